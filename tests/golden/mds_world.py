"""Let DeepSpeed's pipeline engine load a run of Megatron-DeepSpeed, as a training with `--finetune` does.

    python mds_world.py RUN LIKE OUT_FILE PP TP

The modules have the names and shapes of the layer files in LIKE, which the trainer wrote, and other weights. OUT_FILE
gets what the ranks hold then: RANK.MODULE.NAME.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import io
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from ranks import World, quiet
from safetensors.torch import save_file
from torch import nn
from zero_world import engine_of, grid, launch, settings

EMBEDDING, WEIGHT = 1, "word_embeddings.weight"
POSITIONS = enum.Enum("PositionEmbeddingType", "rotary absolute alibi", module="megatron.enums")
"""What the arguments of BigScience's tree have in them, where the tree itself is not (megatron/enums.py)."""
sys.modules.setdefault("megatron.enums", cast("ModuleType", SimpleNamespace(PositionEmbeddingType=POSITIONS)))


class Named(nn.Module):
    """Parameters under dotted names; nothing is computed with them."""

    def __init__(self, shapes: Mapping[str, torch.Size]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            *outer, last = name.split(".")
            module: nn.Module = self
            for part in outer:
                if not hasattr(module, part):
                    module.add_module(part, nn.Module())
                module = getattr(module, part)
            module.register_parameter(last, nn.Parameter(torch.randn(shape)))


def function(*values: Any) -> Any:
    """What its pipeline has instead of a module, also of a tied head."""
    return values


def specs(folder: Path, rank: int) -> list[Any]:
    """The sequence of modules of a tensor parallel rank. A number without a file is that of a function."""
    files = {
        int(match[1]): path
        for path in folder.glob("layer_*")
        if (match := re.fullmatch(rf"layer_(\d+)-model_{rank:02d}-model_states\.pt", path.name))
    }
    shapes = {index: {name: tensor.shape for name, tensor in torch.load(path).items()} for index, path in files.items()}
    numbers = range(min(shapes), max(shapes) + 1)
    layers = [LayerSpec(Named, shapes[index]) if index in shapes else function for index in numbers]
    if any("lm_head.weight" in names for names in shapes.values()):
        return [function, *layers]
    tied = functools.partial(TiedLayerSpec, "embed", Named, shapes[EMBEDDING], tied_weight_attr=WEIGHT)
    return [function, tied(), *layers[1:], tied(forward_fn=function)]


def load(world: World, run: Path, like: Path, out: Path, pp: int, tp: int) -> None:
    """Load the module alone, strictly."""
    topology = grid(world, pp, tp).topology()
    layers = specs(like, topology.get_coord(world.rank).model)
    model = PipelineModule(layers, topology=topology, loss_fn=function, partition_method="uniform")
    engine = engine_of(model, settings(1) | {"gradient_accumulation_steps": 2})
    with contextlib.redirect_stdout(io.StringIO()):
        path, state = engine.load_checkpoint(str(run), load_module_strict=True, load_optimizer_states=False,
                                             load_lr_scheduler_states=False, load_module_only=True)  # fmt: skip
    assert path, "DeepSpeed found nothing to load"
    assert state["checkpoint_version"] == 3.0
    assert state["iteration"] == 3
    rank = engine.mpu.get_model_parallel_rank()
    parameters = {f"{rank}.{name}": value.detach().clone() for name, value in engine.module.named_parameters()}
    everybody: list[Any] = [None] * world.size
    dist.gather_object(parameters, everybody if world.rank == 0 else None)
    if world.rank == 0:
        save_file({name: value for each in everybody for name, value in each.items()}, out)


def main(argv: list[str]) -> int:
    """The command line."""
    run, like, out, *sizes = argv
    pp, tp = map(int, sizes)
    quiet()
    return launch(
        pp * tp, nn.Identity(), functools.partial(load, run=Path(run), like=Path(like), out=Path(out), pp=pp, tp=tp)
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
