"""Files of GPT-NeoX as its users have them: one of a phase of a pre-training, and the least that is one."""

PHASE = """{
  "launcher": "slurm", "deepspeed_slurm": true, "no_ssh_check": true,
  "pipe_parallel_size": 0, "model_parallel_size": 8, "seed": 42,
  "make_vocab_size_divisible_by": 1, "tokenizer_type": "SPMTokenizer", "vocab_file": "/t/model.model",
  "train_data_paths": ["/d/U1_1"], "valid_data_paths": ["/d/flores_text_document"],
  "test_data_paths": ["/d/flores_text_document"], "use_shared_fs": true, "data_impl": "mmap",
  "use_flashattn_swiglu": true, "num_layers": 60, "attention_config": [[["flash"], 60]], "seq_length": 8192 ,
  "rms_norm_epsilon": 3.0e-06, "layernorm_epsilon": 1.0e-05, "init_method": "small_init", "init_method_std": 0.005,
  "scaled_upper_triang_masked_softmax_fusion": true, "bias_gelu_fusion": true,
  "data_types": {"grad_accum_dtype": "fp32"},
  "optimizer": {"type": "Adam", "params": {"lr": 1.6e-4, "betas": [0.9, 0.95], "eps": 1.0e-8}},
  "clip_grad": 0.5, "gradient_clipping": 0.5, "min_lr": 3.0e-5, "lr_decay_style": "constant", "warmup": 0,
  "zero_optimization": {"stage": 1, "allgather_partitions": True},
  "train_micro_batch_size_per_gpu": 3, "train_batch_size": 576, "gradient_accumulation_steps": 1,
  "train_iters": 29790, "iteration_offset": 2000, "eval_interval": 500, "eval_iters": 1, "override_lr_scheduler": true,
  "weight_decay": 0.1, "hidden_dropout": 0.0, "attention_dropout": 0.0, "checkpoint_activations": true,
  "precision": "bfloat16", "fp32_allreduce": false, "checkpoint_validation_with_forward_pass": false,
  "checkpoint_factor": 450, "exit_interval": 8550, "save": "/c", "load": "/c",
  "log_interval": 1, "log_grad_pct_zeros": True, "log_grad_norm": True, "wall_clock_breakdown": true,
  "comms_logger": {"enabled": false, "verbose": false}, "profile": false,
}"""
BARE = """
train_data_paths: [/d/P]
seq_length: 64
train_batch_size: 8
train_iters: 100
optimizer: {type: Adam, params: {lr: 1.6e-4}}
save: /c
load: /c
"""
