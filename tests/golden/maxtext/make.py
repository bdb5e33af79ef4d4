"""Train, save and compute logits with real MaxText: `python make.py CASE OUT`, a process for each case.

MaxText 0.2.5 (PyPI) needs Python 3.12. Its modules do the work: trainers/pre_train/train.py trains on synthetic data
and saves, utils/generate_param_only_checkpoint.py makes a checkpoint of parameters alone, what was saved is loaded by
utils/model_creation_utils.py, and the model that this gives computes the logits.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

COMMON = {
    "base_emb_dim": 32, "base_num_query_heads": 4, "base_num_kv_heads": 2, "head_dim": 16, "base_mlp_dim": 48,
    "base_num_decoder_layers": 3, "vocab_size": 96, "model_name": "default", "hardware": "cpu",
    "skip_jax_distributed_system": True, "dataset_type": "synthetic", "steps": 4, "checkpoint_period": 3,
    "enable_checkpointing": True, "async_checkpointing": False, "per_device_batch_size": 1, "max_target_length": 32,
    "attention": "dot_product", "dtype": "float32", "weight_dtype": "float32", "matmul_precision": "highest",
    "float32_logits": True, "float32_qk_product": True, "enable_goodput_recording": False,
    "monitor_goodput": False, "enable_dropout": False, "learning_rate": 0.02, "warmup_steps_fraction": 0.0,
    "normalization_layer_epsilon": 1e-5, "normalize_embedding_logits": False,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "base_mlp_dim": 24, "base_moe_mlp_dim": 24, "sparse_matmul": False,
    "megablox": False,
}  # fmt: skip
GEMMA = {
    "mlp_activations": "[gelu,linear]", "logits_via_embedding": True, "normalize_embedding_logits": True,
    "normalization_layer_epsilon": 1e-6, "use_post_attn_norm": True, "use_post_ffw_norm": True,
    "sliding_window_size": 5,
}  # fmt: skip
GEMMA2 = {**GEMMA, "decoder_block": "gemma2", "attn_logits_soft_cap": 2.0, "final_logits_soft_cap": 20.0}
GEMMA3 = {
    **GEMMA, "model_name": "gemma3-4b", "override_model_config": True, "use_multimodal": False,
    "decoder_block": "gemma3", "local_rope_max_timescale": 10000, "rope_max_timescale": 1000000,
    "rope_linear_scaling_factor": 4.0, "base_mlp_dim": 40,
}  # fmt: skip
CASES: dict[str, dict[str, object]] = {
    "llama_state": {"decoder_block": "llama2", "base_num_decoder_layers": 2},
    "llama_sharded": {
        "decoder_block": "llama2", "head_dim": 8, "ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2,
        "rope_max_timescale": 50000,
    },
    "llama31_zarr2": {
        "decoder_block": "llama2", "rope_type": "llama3.1", "rope_max_timescale": 500000, "scan_layers": False,
        "checkpoint_storage_use_zarr3": False,
    },
    "mistral_files": {"decoder_block": "mistral", "checkpoint_storage_use_ocdbt": False},
    "qwen2_tied": {
        "decoder_block": "qwen2", "attention_bias": True, "logits_via_embedding": True, "rope_max_timescale": 1000000,
        "weight_dtype": "bfloat16",
    },
    "qwen3_files_zarr2": {
        "decoder_block": "qwen3", "use_qk_norm": True, "scan_layers": False, "head_dim": 12,
        "checkpoint_storage_use_ocdbt": False, "checkpoint_storage_use_zarr3": False,
    },
    "mixtral": {"decoder_block": "mixtral", **EXPERTS},
    "qwen3_moe": {
        "decoder_block": "qwen3_moe", "use_qk_norm": True, "norm_topk_prob": True, "scan_layers": False, **EXPERTS,
    },
    "qwen3_state": {"decoder_block": "qwen3", "use_qk_norm": True, "base_num_decoder_layers": 2, "steps": 8},
    "gemma2": {"steps": 8, **GEMMA2, "base_num_decoder_layers": 2},
    "gemma2_unscanned": {**GEMMA2, "base_num_decoder_layers": 2, "base_emb_dim": 16, "scan_layers": False},
    "gemma3": {**GEMMA3, "base_num_decoder_layers": 13, "base_emb_dim": 16},
    "gemma3_unscanned": {**GEMMA3, "base_num_decoder_layers": 7, "base_emb_dim": 16, "scan_layers": False},
}  # fmt: skip
"""What differs from `COMMON` and from the defaults of its configs/base.yml."""
WITH_STATE = ("llama_state", "llama_sharded", "gemma2", "qwen3_state")
"""Cases that keep the whole state of the training; of the others the parameters are saved alone."""


def main(case: str, out: Path) -> None:
    """Make a case in a new folder."""
    settings = COMMON | CASES[case]
    devices = int(settings.get("ici_fsdp_parallelism", 1)) * int(settings.get("ici_tensor_parallelism", 1))  # type: ignore[call-overload]
    os.environ |= {
        "JAX_PLATFORMS": "cpu", "DECOUPLE_GCLOUD": "TRUE",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    }  # fmt: skip
    import jax
    import maxtext
    import numpy as np
    from maxtext.configs import pyconfig
    from maxtext.input_pipeline.input_pipeline_interface import create_data_iterator
    from maxtext.trainers.pre_train import train
    from maxtext.utils import generate_param_only_checkpoint, maxtext_utils, model_creation_utils

    base = Path(maxtext.__file__).parent / "configs/base.yml"
    runs = out / "runs"

    def arguments(run: str, **more: object) -> list[str]:
        own = settings | {"run_name": run, "base_output_directory": str(runs)} | more
        return ["", str(base), *(f"{key}={value}" for key, value in own.items())]

    train.main(arguments("train", metrics_file=out / "metrics.jsonl"))
    state = runs / "train/checkpoints/3"
    if case in WITH_STATE:
        final = state
    else:
        generate_param_only_checkpoint.main(arguments("params", load_full_state_path=state / "items"))
        final = runs / "params/checkpoints/0"
    config = pyconfig.initialize(arguments("logits", load_parameters_path=final / "items", enable_checkpointing=False))
    mesh = jax.sharding.Mesh(maxtext_utils.create_device_mesh(config), config.mesh_axes)
    model = model_creation_utils.from_pretrained(config, mesh=mesh)
    model = model[0] if isinstance(model, tuple) else model
    ids = np.random.default_rng(0).integers(0, 96, (4, 12))
    positions = np.broadcast_to(np.arange(12), ids.shape)
    with mesh:
        logits = model(ids, positions, np.ones_like(ids), enable_dropout=False)
    if settings["steps"] > 4:
        keep_steps(out, next(create_data_iterator(config, mesh)[0]))
    shutil.copytree(final, out / "checkpoint")
    np.savez(out / "logits.npz", ids=ids, logits=np.asarray(logits, np.float32))
    shutil.rmtree(runs)
    for name in ("_sharding", "commit_success.txt"):
        for path in out.rglob(name):
            path.unlink()


def keep_steps(out: Path, batch: dict[str, object]) -> None:
    """Keep the batch of a training, which is the same in all steps, and loss and learning rate of each step."""
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    steps = [{"loss": line["learning/loss"], "lr": line["learning/current_learning_rate"]} for line in lines]
    kept = {name: [[int(token) for token in row] for row in batch[name]] for name in ("inputs", "targets")}
    (out / "steps.json").write_text(json.dumps({**kept, "steps": steps}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]).absolute())
