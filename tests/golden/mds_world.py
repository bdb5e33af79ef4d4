"""Let DeepSpeed's pipeline engine load a run of Megatron-DeepSpeed.

    python mds_world.py RUN LIKE OUT_FILE PP TP                         as a training with `--finetune` does
    python mds_world.py RUN LIKE OUT_FILE PP TP {partitions|universal}  as one does that goes on

The modules have the names and shapes of the layer files in LIKE, and other weights. OUT_FILE gets what the ranks hold
then: RANK.MODULE.NAME. Of a training that goes on that is STATE.RANK.MODULE.NAME, and OUT_FILE.json gets the losses of
three further steps. What its modules compute makes no sense, but every parameter matters, and every token's row.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import io
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from ranks import World, quiet
from safetensors.torch import save_file
from torch import nn
from zero_world import engine_of, grid, launch, settings, trained_state

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


TOKENS, PARTS = 60, ("word_embeddings.weight", "lm_head.weight")
"""Rows of the vocabulary that tokens have, and the matrices that tensor parallel ranks have parts of."""


class Computing(Named):
    """The same, of a tensor parallel rank, which computes something."""

    def __init__(self, shapes: Mapping[str, torch.Size], rank: int) -> None:
        super().__init__(shapes)
        self.rank = rank

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Scale by a number that all rows of tokens have a share in."""
        return self.scaled(value, "")

    def scaled(self, value: torch.Tensor, end: str) -> torch.Tensor:
        """The same, with the parameters whose names end so."""
        share = torch.zeros(())
        for name, parameter in self.named_parameters():
            rows = max(0, TOKENS - self.rank * len(parameter)) if name.endswith(PARTS) else len(parameter)
            used = parameter[:rows].float() if name.endswith(end) else parameter[:0]
            share = (
                share + (used * torch.arange(used.numel()).view(used.shape).cos()).sum() / max(1, used.numel()) ** 0.5
            )
        return value * (1 + 0.1 * share.tanh()).to(value.dtype)


def same(value: Any) -> Any:
    """What such a pipeline has instead of a module."""
    return value


def again(module: Computing, value: torch.Tensor) -> torch.Tensor:
    """A tied head."""
    return module.scaled(value, WEIGHT)


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


def computing(folder: Path, rank: int) -> list[Any]:
    """The same sequence of modules that compute."""
    made = specs(folder, rank)
    tied = isinstance(made[1], TiedLayerSpec)
    layers = [LayerSpec(Computing, *spec.module_args, rank) if isinstance(spec, LayerSpec) else same for spec in made]
    if tied:
        build = functools.partial(
            TiedLayerSpec, "embed", Computing, *made[1].module_args, rank, tied_weight_attr=WEIGHT
        )
        layers[1], layers[-1] = build(), build(forward_fn=again)
    return layers


def groups_of(model: nn.Module, *, halves: bool) -> list[dict[str, Any]]:
    """The parameter groups as the trees have them: what decays, in BigScience's in two halves, and what does not."""
    named = list(model.named_parameters())
    decaying = [parameter for name, parameter in named if parameter.dim() > 1]
    others = [parameter for name, parameter in named if parameter.dim() <= 1]
    half = len(decaying) // 2 if halves else 0
    return [{"params": each} for each in (decaying[:half], decaying[half:], others) if each]


def go_on(world: World, run: Path, like: Path, out: Path, pp: int, tp: int, how: str) -> None:
    """Load weights, optimizer and step, and make three steps. Settings that are not loaded would show."""
    topology = grid(world, pp, tp).topology()
    layers = computing(like, topology.get_coord(world.rank).model)
    model = PipelineModule(layers, topology=topology, loss_fn=nn.functional.mse_loss, partition_method="uniform")
    universal, bloom = how == "universal", any(like.glob("layer_06-*"))
    config = settings(1) | {"gradient_accumulation_steps": 2, "checkpoint": {"load_universal": universal}}
    groups = groups_of(model, halves=universal and bloom)
    optimizer = torch.optim.AdamW(groups, lr=0.5, weight_decay=0.5, betas=(0.5, 0.5))
    with contextlib.redirect_stdout(io.StringIO()):
        engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
        path, state = engine.load_checkpoint(str(run))
    assert path, "DeepSpeed found nothing to load"
    assert (state["iteration"], engine.global_steps) == (3, 3)
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    rank, held = engine.mpu.get_model_parallel_rank(), {}
    for parameter, states in trained_state(engine):
        held |= {f"{kind}.{rank}.{names[id(parameter)]}": tensor.clone() for kind, tensor in states.items()}
    generator = torch.Generator().manual_seed(5)
    batches = iter([(torch.randn(2, 8, generator=generator).bfloat16(), torch.ones(2, 8).bfloat16()) for _ in range(6)])
    losses = [engine.train_batch(batches).item() for _ in range(3)]
    everybody: list[Any] = [None] * world.size
    dist.gather_object(held, everybody if world.rank == 0 else None)
    if world.rank == 0:
        save_file({name: value for each in everybody for name, value in each.items()}, out)
        out.with_suffix(".json").write_text(json.dumps(losses))


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
    pp, tp = map(int, sizes[:2])
    quiet()
    job = functools.partial(go_on, how=sizes[2]) if sizes[2:] else load
    return launch(
        pp * tp, nn.Identity(), functools.partial(job, run=Path(run), like=Path(like), out=Path(out), pp=pp, tp=tp)
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
