"""Which optimizer of a Megatron run has which parameters: one has all, or experts on ranks of their own have another.

    ep = 1    {…}                                 in a classic file, in `distrib_optim.pt` and in `common.pt`
    ep > 1    [{dense}, {experts}]                in a classic file
              [{dense} or None, {experts}]        in `distrib_optim.pt`: the dense ones on the first data rank alone
              {0: {dense}, 1: {experts}}          in `common.pt`; in buckets, and in older saves, with chained_0. and
                                                  chained_1. before the names of all tensors

Facts: megatron-core 0.16.1, optimizer/__init__.py `_get_param_groups` and `get_megatron_optimizer`, optimizer.py
`ChainedOptimizer`, and the attribute `allreduce` of experts (tensor_parallel/layers.py, transformer/moe/experts.py).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from formats.errors import SourceError, UnsupportedError
from formats.layout.slots import Place, Slot
from formats.megatron import muon
from formats.torch_files.archive import TorchFile
from formats.torch_files.archive_writer import plain

CHAINED = r"(?:chained_(\d+)\.)?"
"""What may stand before the names of an optimizer's tensors in a distributed checkpoint."""
EXPERTS = ".mlp.experts."
BUFFER = re.compile(r".*\.mlp\.router\.expert_bias")
"""What is in a model and in no optimizer: a router corrects it by itself (transformer/moe/router.py)."""


class Parameter(NamedTuple):
    """A parameter of a rank's file: the chunk that it is in, its key, and its slot."""

    chunk: str
    key: str
    slot: Slot


def decays(key: str, shape: Sequence[int]) -> bool:
    """Whether a parameter is in the group with weight decay."""
    return len(shape) > 1 and not key.endswith(".bias")


def trained(parameters: Iterable[Parameter]) -> list[Parameter]:
    """Those of them that an optimizer moves."""
    return [parameter for parameter in parameters if not BUFFER.fullmatch(parameter.key)]


def repeated(slot: Slot) -> bool:
    """Whether a data rank other than the first holds this dense tensor, for the experts beside it."""
    return not slot.rule.splits & {"ep", "etp"} and any(rank for axis, (rank, _) in slot.mesh if axis in ("ep", "copy"))


# --- writing ---------------------------------------------------------------------------------------------------------


def spread(slots: Iterable[Slot], ep: int) -> frozenset[bool]:
    """The groups that the optimizer of the experts has, by whether their weights decay; none where they have none.

    Every rank has the same groups, also one without such a parameter.
    """
    experts = (slot for slot in slots if ep > 1 and EXPERTS in slot.keys[0])
    return frozenset(decays(slot.keys[0], slot.shape) for slot in experts)


def shares(parameters: Sequence[Parameter], kinds: Collection[bool]) -> list[list[Parameter]]:
    """The parameters of each optimizer of a rank, given the groups of the experts."""
    own = trained(parameters)
    if not kinds:
        return [own]
    return [[parameter for parameter in own if (EXPERTS in parameter.key) == experts] for experts in (False, True)]


def groups(every: Sequence[Mapping[str, Any]], kinds: Collection[bool]) -> list[list[dict[str, Any]]]:
    """The parameter groups of each optimizer, given those of the experts."""
    chained = [[dict(group) for group in every]]
    if kinds:
        chained.append([{**group, "is_expert_parallel": True} for group in every if bool(group["wd_mult"]) in kinds])
    return chained


# --- reading ---------------------------------------------------------------------------------------------------------


def entries(file: TorchFile, args: Mapping[str, Any]) -> list[Mapping[Any, Any]]:
    """The entry of each optimizer in a file: one, or with experts on several ranks, or Muon beside Adam, two.

    Raises:
        UnsupportedError: there are others.
    """
    optimizer, several = file.value.get("optimizer", {}), is_spread(args) or muon.is_used(args)
    if isinstance(optimizer, Mapping) and set(optimizer) == {0, 1}:
        optimizer = [optimizer[0], optimizer[1]]
    if isinstance(optimizer, Mapping) and not several:
        return [optimizer]
    if (
        not isinstance(optimizer, list)
        or not several
        or [isinstance(part, Mapping) for part in optimizer] != [True, True]
    ):
        raise UnsupportedError(
            f"{file.path} holds {'several optimizers' if isinstance(optimizer, list) else 'one optimizer'}: supported "
            "is one, and one more of experts that are on several ranks, or of Muon"
        )
    return optimizer


def is_spread(args: Mapping[str, Any]) -> bool:
    """Whether experts are on several ranks, as args say."""
    size = args.get("expert_model_parallel_size")
    return args.get("num_experts") is not None and type(size) is int and size > 1


def apart(chunks: Mapping[Place, Mapping[str, Any]], *, several: bool) -> list[dict[Place, dict[str, Any]]]:
    """The tensors of each chunk of a file, by key, for each optimizer."""
    moved = {
        place: {key: fragment for key, fragment in tensors.items() if not BUFFER.fullmatch(key)}
        for place, tensors in chunks.items()
    }
    if not several:
        return [moved]
    return [
        {
            place: {key: fragment for key, fragment in tensors.items() if (EXPERTS in key) == experts}
            for place, tensors in moved.items()
        }
        for experts in (False, True)
    ]


def joined(every: Sequence[tuple[TorchFile, Any]]) -> list[dict[str, Any]]:
    """The parameter groups of all optimizers, without their parameters: with weight decay, and without.

    Args:
        every: those of each optimizer, and the file that holds them.

    Raises:
        UnsupportedError: more than weight decay tells two of them apart, or experts are trained otherwise.
    """
    several = [groups_of(file, saved, experts=number > 0) for number, (file, saved) in enumerate(every)]
    if len(several[0]) != 2:
        raise _unknown(every[0][0], several[0])
    dense = {bool(group["wd_mult"]): group for groups in several[:1] for group in groups}
    for group in (group for groups in several[1:] for group in groups):
        same = dense[bool(group["wd_mult"])]
        step = {"step": same["step"]} if "step" in same else {}  # Transformer Engine does not count in empty groups
        if {**step, **group} != same:
            raise UnsupportedError(f"{every[0][0].path}: experts are trained with other settings than all else")
    return [dense[True], dense[False]]


def groups_of(file: TorchFile, saved: Any, *, experts: bool = False) -> list[dict[str, Any]]:
    """The parameter groups of an optimizer, without their parameters."""
    groups = [
        plain(file, {name: value for name, value in group.items() if name != "params"}, "a group") for group in saved
    ]
    kinds = {bool(group["wd_mult"]) for group in groups}
    if len(kinds) < len(groups) or any(bool(group["is_expert_parallel"]) != experts for group in groups):
        raise _unknown(file, groups)
    return [{**group, "is_expert_parallel": False} for group in groups]


def _unknown(file: TorchFile, groups: Sequence[Any]) -> UnsupportedError:
    return UnsupportedError(
        f"{file.path} holds {len(groups)} groups of parameters, not one with weight decay and one without"
    )


def same_scaler(every: Sequence[tuple[TorchFile | None, Any]]) -> Any:
    """The scaler of losses, which is that of each optimizer; None without one.

    Raises:
        SourceError: they differ.
    """
    first, *others = (plain(file, saved, "grad_scaler") if file else None for file, saved in every)
    if any(other != first for other in others):
        where = next(file.path for file, _ in every if file)
        raise SourceError(f"{where}: the optimizers of experts and of all else scale losses otherwise")
    return first
