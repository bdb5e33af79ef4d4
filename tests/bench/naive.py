"""The script that people write: load every shard with torch, cut, torch.save each rank. The benchmarks' yardstick.

python tests/bench/naive.py SRC OUT --tp N --pp N [--dtype fp32]    convert
python tests/bench/naive.py --same ONE TWO                          compare the tensors of two Megatron folders

It is correct for Llama with grouped query attention, and as plain as it can be: it holds the whole model and a stage of
its copy in memory, checks nothing, syncs nothing, and carries neither tokenizer nor config.
"""

from __future__ import annotations

import argparse
import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def shard(state: dict[str, Any], config: dict[str, Any], rank: int, stage: int, tp: int, pp: int) -> dict[str, Any]:
    """The state dict of one rank."""
    groups, hidden, layers = config["num_key_value_heads"], config["hidden_size"], config["num_hidden_layers"]

    def rows(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.chunk(tp, 0)[rank].clone()

    def columns(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.chunk(tp, 1)[rank].clone()

    def padded(tensor: torch.Tensor) -> torch.Tensor:
        return rows(torch.nn.functional.pad(tensor, (0, 0, 0, -len(tensor) % (128 * tp))))

    out: dict[str, Any] = {}
    if stage == 0:
        out["embedding.word_embeddings.weight"] = padded(state["model.embed_tokens.weight"])
    for i in range(layers // pp):
        new, old = f"decoder.layers.{i}.", f"model.layers.{stage * (layers // pp) + i}."
        qkv = [state[f"{old}self_attn.{x}_proj.weight"].view(groups, -1, hidden) for x in "qkv"]
        out[new + "self_attention.linear_qkv.layer_norm_weight"] = state[old + "input_layernorm.weight"].clone()
        out[new + "self_attention.linear_qkv.weight"] = rows(torch.cat(qkv, 1).reshape(-1, hidden))
        out[new + "self_attention.linear_proj.weight"] = columns(state[old + "self_attn.o_proj.weight"])
        out[new + "mlp.linear_fc1.layer_norm_weight"] = state[old + "post_attention_layernorm.weight"].clone()
        gate, up = (rows(state[f"{old}mlp.{x}_proj.weight"]) for x in ("gate", "up"))
        out[new + "mlp.linear_fc1.weight"] = torch.cat([gate, up])
        out[new + "mlp.linear_fc2.weight"] = columns(state[old + "mlp.down_proj.weight"])
    if stage == pp - 1:
        out["decoder.final_layernorm.weight"] = state["model.norm.weight"].clone()
        out["output_layer.weight"] = padded(state["lm_head.weight"])
    return out


def convert(source: Path, out: Path, tp: int, pp: int, dtype: str | None) -> None:
    config = json.loads((source / "config.json").read_text())
    state: dict[str, torch.Tensor] = {}
    for path in sorted(source.glob("*.safetensors")):
        state |= load_file(path)
    if dtype:
        state = {key: tensor.to(DTYPES[dtype]) for key, tensor in state.items()}
    args = Namespace(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp)
    for stage in range(pp):
        for rank in range(tp):
            folder = out / "release" / (f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if pp > 1 else ""))
            folder.mkdir(parents=True)
            model = shard(state, config, rank, stage, tp, pp)
            torch.save({"args": args, "checkpoint_version": 3.0, "model": model}, folder / "model_optim_rng.pt")
    (out / "latest_checkpointed_iteration.txt").write_text("release")


def same(first: Path, second: Path) -> bool:
    """Whether two run folders hold the same files of the same tensors, bit for bit."""
    names = [sorted(str(path.relative_to(root)) for path in root.glob("*/*/*.pt")) for root in (first, second)]
    for name in names[0] if names[0] == names[1] else ():
        a, b = (torch.load(root / name, weights_only=False)["model"] for root in (first, second))
        if a.keys() != b.keys() or not all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a):
            return False
    return names[0] == names[1] != []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--dtype", choices=DTYPES)
    parser.add_argument("--same", action="store_true")
    options = parser.parse_args()
    if options.same:
        raise SystemExit(0 if same(options.source, options.out) else "the two folders differ")
    convert(options.source, options.out, options.tp, options.pp, options.dtype)


if __name__ == "__main__":
    main()
