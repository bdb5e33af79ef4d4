"""The examples of each command of `convert`: shown below its help, and parsed by a test."""

EXAMPLES = {
    "fsdp2hf": "checkpoint-5000 model --config base\ncheckpoint-5000 model --config base --push ORG/NAME",
    "hf2fsdp": "base start --ranks 8\nzero-run start --config base --with-optimizer",
    "hf2megatron": "base run --tp 4 --pp 2\nbase run --format torch_dist --ep 8\n"
    "base run --format torch_dist --for bridge\n"
    "zero-run run --tp 4 --with-optimizer --config base",
    "hf2neox": "base run --tp 4",
    "hf2hf": "model small --dtype bf16 --shard-size 2GB",
    "hf2mds": "base run --tp 4 --pp 2 --qkv blocked\nrun-tp2 run-tp8 --tp 8",
    "hf2mistral": "base native",
    "hf2nanotron": "base start",
    "mistral2hf": "native model --set max_positions=32768",
    "maxtext2hf": "run/checkpoints/1000 model --config base",
    "nanotron2hf": "run model --config base\nrun/30000 model --config base",
    "megatron2hf": "run model --config base\nrun model --config base --iteration 5000\n"
    "run adapter --config base --adapter only",
    "neox2hf": "run model --tokenizer model.model --chat-template control",
    "zero2hf": "run model --config base\nrun masters --config base --weights fp32-master",
    "zero2universal": "zero-run universal\nmegatron-run universal --config base",
    "reshard": "run run-tp8 --tp 8\nrun run-pp2 --pp 2 --with-optimizer",
    "to": "huggingface run model --config base\nmegatron base run --tp 4 --pp 2",
    "average-norms": "run averaged",
    "average": "run mean --last 5\nstep-900 step-1000 mean --weights 0.4,0.6",
    "merge": "base adapter model\nbase adapter model --dtype bf16",
    "peft2megatron": "base adapter run --tp 2\nbase adapter run --lora fused",
    "watch": "run --out models --config base\nrun --out models --config base --push ORG/NAME --keep 3",
    "submit": "--site lumi fsdp2hf checkpoint-5000 model --config base -n\n"
    "--site lumi --part 8 hf2megatron base run --tp 8",
    "inspect": "checkpoint-5000\nrun --tensors\nrun --html run.html",
    "plan": "base --to megatron --tp 8\nbase --to megatron --tp 8 --html plan.html",
    "explain": "megatron linear_qkv\nmegatron linear_qkv.weight --svg qkv.svg",
    "formats": "--json",
    "family": "glm glm.toml\ncheck glm.toml glm",
    "family draft": "glm glm.toml",
    "family check": "glm.toml glm",
    "digest": "run\nrun --tensors",
    "verify": "model\nmodel run --config base",
    "diff": "run model\nrun model --tensors\nbase tuned --html diff.html",
    "assets": "model --from base --chat-template llama3",
    "tokenizer": "m.model out --control '<|user|>' --control '<|system|>'",
    "push": "model ORG/NAME -n\nmodel ORG/NAME --private",
}
"""Command: lines of arguments to type after it."""
