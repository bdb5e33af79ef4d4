"""Hugging Face Llama folders for the benchmarks, written by hand: random weights, or files of holes.

python -m tests.bench.make_model {617M,1.1B,8B,30B,70B} OUT [--dtype bf16|fp32] [--sparse] [--megatron TP PP] [--fsdp N]

A sparse folder has true headers and sizes, but its weights are holes: it reads as zeros and takes no room, so a model
of any size fits on any disk. With --megatron or --fsdp the folder is what `convert hf2megatron` or `convert hf2fsdp
--ranks N` would make of it, with holes for weights (and for their checksums, at which `convert` does not look).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO

import numpy as np

from converters.plan.plan import Plan
from converters.plan.request import Request
from converters.plan.targets import plan_fsdp, plan_megatron
from formats.checkpoint import Checkpoint, Target
from formats.huggingface import folder as huggingface
from formats.huggingface.config import from_huggingface
from formats.megatron.args.options import Options
from formats.registry import open_checkpoint

SHAPES = {  # layers, hidden, ffn, heads, key/value heads, vocabulary
    "617M": (8, 2048, 8192, 32, 8, 32000),
    "1.1B": (22, 2048, 5632, 32, 4, 32000),
    "8B": (32, 4096, 14336, 32, 8, 128256),
    "30B": (60, 6144, 21504, 48, 8, 128000),
    "70B": (80, 8192, 28672, 64, 8, 128256),
}
SHARD = 5 * 10**9
STEP = 1 << 22


def config(name: str, dtype: str) -> dict[str, object]:
    """The config.json of a model."""
    layers, hidden, ffn, heads, groups, vocab = SHAPES[name]
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": layers,
        "hidden_size": hidden, "intermediate_size": ffn, "num_attention_heads": heads, "num_key_value_heads": groups,
        "head_dim": hidden // heads, "vocab_size": vocab, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0, "tie_word_embeddings": False, "hidden_act": "silu",
        "torch_dtype": {"BF16": "bfloat16", "F32": "float32"}[dtype],
    }  # fmt: skip


def fill(file: BinaryIO, offset: int, numel: int, dtype: str, rng: np.random.Generator) -> None:
    """Write N(0, 0.02) numbers, all of them finite."""
    file.seek(offset)
    for start in range(0, numel, STEP):
        values = rng.standard_normal(min(STEP, numel - start), np.float32) * np.float32(0.02)
        file.write(values if dtype == "F32" else (values.view(np.uint32) >> 16).astype(np.uint16))


def lay_out(out: Path, target: Target, sparse: bool) -> None:
    """Write the files of a target, with random weights or with holes."""
    rng = np.random.default_rng(0)
    for file in target.files:
        file.path.parent.mkdir(parents=True, exist_ok=True)
        with file.path.open("wb") as handle:
            handle.truncate(file.size)
            for offset, content in file.headers(dict.fromkeys(file.checksums, 0)):
                handle.seek(offset)
                handle.write(content)
            for placed in () if sparse else file.tensors:
                numel = int(np.prod(placed.fragment.shape))
                fill(handle, placed.fragment.offset, numel, placed.fragment.dtype, rng)
    texts = dict(target.texts) | {name: path.read_bytes() for name, path in target.copies.items()}
    for name, content in texts.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_bytes(content)


def make(name: str, out: Path, dtype: str = "BF16", sparse: bool = False) -> Path:
    """Write one model as a Hugging Face folder."""
    out.mkdir(parents=True)
    settings = config(name, dtype)
    (out / "config.json").write_text(json.dumps(settings, indent=2))
    spec = from_huggingface(settings, {}, name)
    dtypes = {(tensor, layer): dtype for tensor in spec.tensors for layer in (None, *range(spec.layers))}
    lay_out(out, huggingface.write(out, spec, dtypes, SHARD), sparse)
    return out


def make_sharded(name: str, out: Path, dtype: str, plan_target: Callable[[Checkpoint, Request], Plan]) -> None:
    """Write what a sparse model becomes in another format."""
    with TemporaryDirectory(dir=out.parent) as folder:
        source = open_checkpoint(make(name, Path(folder) / "source", dtype, sparse=True))
        request = Request(Path(folder) / "run")
        plan = plan_target(source, request)
        assert plan.target is not None
        lay_out(request.root, plan.target, sparse=True)
        request.root.rename(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=SHAPES)
    parser.add_argument("out", type=Path)
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--sparse", action="store_true")
    parser.add_argument("--megatron", nargs=2, type=int, metavar=("TP", "PP"))
    parser.add_argument("--fsdp", type=int, metavar="N")
    options = parser.parse_args()
    dtype = {"bf16": "BF16", "fp32": "F32"}[options.dtype]
    if options.megatron:
        cut = Options(*options.megatron)
        make_sharded(options.model, options.out, dtype, lambda source, run: plan_megatron(source, run, cut, None))
    elif options.fsdp:
        make_sharded(options.model, options.out, dtype, lambda source, run: plan_fsdp(source, run, options.fsdp))
    else:
        make(options.model, options.out, dtype, options.sparse)


if __name__ == "__main__":
    main()
