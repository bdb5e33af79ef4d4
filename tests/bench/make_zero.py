"""DeepSpeed ZeRO checkpoints for the benchmarks, laid out as DeepSpeed 0.19.8 does, of a Hugging Face folder.

python -m tests.bench.make_zero SRC OUT --stage 2|3 [--ranks N]
python -m tests.bench.make_zero --same ONE TWO

Training a model of this size with real DeepSpeed takes minutes and all of the memory; what counts here is how many
bytes lie where. The master weights are the weights in float32, the moments are made of them. The second form compares
the tensors of two folders of safetensors files, bit for bit.
"""

from __future__ import annotations

import argparse
import sys
from collections import OrderedDict
from pathlib import Path

import torch
from safetensors import safe_open


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a folder."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return tensors


def make(source: Path, out: Path, stage: int, ranks: int) -> None:
    """Write one checkpoint."""
    module = weights(source)
    groups = [{n: t for n, t in module.items() if t.dim() > 1}, {n: t for n, t in module.items() if t.dim() == 1}]
    tag = out / "global_step1"
    tag.mkdir(parents=True)
    (out / "latest").write_text(tag.name)
    shapes = [OrderedDict((name, tensor.shape) for name, tensor in group.items()) for group in groups]
    head = {
        "buffer_names": [], "optimizer": None, "param_shapes": shapes, "frozen_param_shapes": None,
        "frozen_param_fragments": None, "shared_params": {}, "global_steps": 1, "skipped_steps": 0,
        "dp_world_size": ranks, "mp_world_size": 1, "ds_config": {}, "ds_version": "0.19.8",
    }  # fmt: skip
    for rank in range(ranks):
        flats = [flat(group, stage, rank, ranks) for group in groups]
        state = {
            index: {"step": torch.tensor(1.0), "exp_avg": value * 0.1, "exp_avg_sq": value * value}
            for index, value in enumerate(flats)
        }
        inner = {"state": state, "param_groups": [{"lr": 1e-3, "params": [index]} for index in range(len(flats))]}
        if stage == 3:
            states = {
                "zero_stage": 3,
                "partition_count": ranks,
                "optimizer_state_dict": inner,
                "fp32_flat_groups": flats,
            }
            empty = OrderedDict((name, torch.empty(0, dtype=torch.bfloat16)) for name in module)
            torch.save({"module": empty, **head}, tag / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        else:
            states = {
                "zero_stage": 2, "partition_count": [ranks] * 2, "base_optimizer_state": inner,
                "single_partition_of_fp32_groups": flats, "group_paddings": [0, 0],
            }  # fmt: skip
        states["ds_version"] = "0.19.8"
        path = tag / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": states, "ds_config": {}, "ds_version": "0.19.8"}, path)
    if stage < 3:
        torch.save({"module": OrderedDict(module), **head}, tag / "mp_rank_00_model_states.pt")


def flat(group: dict[str, torch.Tensor], stage: int, rank: int, ranks: int) -> torch.Tensor:
    """A rank's part of a group: an interval of all, or in stage 3 an interval of each."""
    if stage == 3:
        return torch.cat([tensor.flatten().float().chunk(ranks)[rank] for tensor in group.values()])
    return torch.cat([tensor.flatten() for tensor in group.values()]).chunk(ranks)[rank].float().clone()


def same(first: Path, second: Path) -> bool:
    """Whether two folders hold the same tensors."""
    ours, theirs = weights(first), weights(second)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--stage", type=int, choices=[2, 3], default=2)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--same", action="store_true")
    options = parser.parse_args()
    if options.same:
        sys.exit(0 if same(options.source, options.out) else "they differ")
    make(options.source, options.out, options.stage, options.ranks)


if __name__ == "__main__":
    main()
