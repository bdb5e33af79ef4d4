"""Which optimizer of a Megatron run has which parameters: one has all, or experts on several ranks have their own.

    ep = 1    {…}                                 in a classic file, in `distrib_optim.pt` and in `common.pt`
    ep > 1    [{dense}, {experts}]                in a classic file
              [{dense} or None, {experts}]        in `distrib_optim.pt`: {dense} on the first data rank alone
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
"""The optional prefix of the names of an optimizer's tensors in a distributed checkpoint."""
EXPERTS = ".mlp.experts."
BUFFER = re.compile(r".*\.mlp\.router\.expert_bias")
"""The key of a tensor of a model that no optimizer trains: the router updates it itself (transformer/moe/router.py)."""


class Parameter(NamedTuple):
    """A parameter of a rank's file: the key of its virtual pipeline chunk, its own key, and its slot."""

    chunk: str
    key: str
    slot: Slot


def decays(key: str, shape: Sequence[int]) -> bool:
    """Whether a parameter is in the group with weight decay."""
    return len(shape) > 1 and not key.endswith(".bias")


def trained(parameters: Iterable[Parameter]) -> list[Parameter]:
    """The parameters that an optimizer trains: all but the buffers of the model."""
    return [parameter for parameter in parameters if not BUFFER.fullmatch(parameter.key)]


def repeated(slot: Slot) -> bool:
    """Whether a slot is the copy of a dense tensor on a data rank other than the first, beside that rank's experts."""
    return not slot.rule.splits & {"ep", "etp"} and any(rank for axis, (rank, _) in slot.mesh if axis in ("ep", "copy"))


# --- writing ---------------------------------------------------------------------------------------------------------


def expert_groups(slots: Iterable[Slot], ep: int) -> frozenset[bool]:
    """The parameter groups of the experts' optimizer, as whether a group has weight decay; empty without one.

    Every rank has the same groups, even if no parameter of the rank is in a group.
    """
    experts = (slot for slot in slots if ep > 1 and EXPERTS in slot.keys[0])
    return frozenset(decays(slot.keys[0], slot.shape) for slot in experts)


def shares(parameters: Sequence[Parameter], kinds: Collection[bool]) -> list[list[Parameter]]:
    """The parameters of each optimizer of a rank, given the groups of the experts' optimizer (`expert_groups`)."""
    own = trained(parameters)
    if not kinds:
        return [own]
    return [[parameter for parameter in own if (EXPERTS in parameter.key) == experts] for experts in (False, True)]


def groups(every: Sequence[Mapping[str, Any]], kinds: Collection[bool]) -> list[list[dict[str, Any]]]:
    """The parameter groups of each optimizer, given the groups of the experts' optimizer (`expert_groups`)."""
    chained = [[dict(group) for group in every]]
    if kinds:
        chained.append([{**group, "is_expert_parallel": True} for group in every if bool(group["wd_mult"]) in kinds])
    return chained


# --- reading ---------------------------------------------------------------------------------------------------------


def entries(file: TorchFile, args: Mapping[str, Any]) -> list[Mapping[Any, Any]]:
    """The entry of each optimizer in a file: two if experts are on several ranks or Muon is beside Adam, else one.

    Raises:
        UnsupportedError: the file holds another number of optimizers.
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
    """Whether experts are on several ranks, according to the args."""
    size = args.get("expert_model_parallel_size")
    return args.get("num_experts") is not None and type(size) is int and size > 1


def tensors_by_optimizer(
    chunks: Mapping[Place, Mapping[str, Any]], *, several: bool
) -> list[dict[Place, dict[str, Any]]]:
    """The tensors that each optimizer trains, by chunk of a file and key.

    Args:
        chunks: the tensors of a file by key, by chunk.
        several: whether the experts have an optimizer of their own; the first result is then of the dense tensors.
    """
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


def shared_groups(every: Sequence[tuple[TorchFile, Any]]) -> list[dict[str, Any]]:
    """The two parameter groups that all optimizers share, without their parameters: with weight decay, and without.

    Args:
        every: the file of each optimizer, and the parameter groups in it.

    Raises:
        UnsupportedError: two groups differ in more than weight decay, or experts are trained with other settings.
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
    """The parameter groups of one optimizer, without their parameters.

    Args:
        file: the file that holds the groups.
        saved: the groups.
        experts: whether the optimizer is that of the experts.

    Raises:
        UnsupportedError: two groups differ in more than weight decay, or a group is not of the expected optimizer.
    """
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
    """The state of the loss scaler, which all optimizers share; None without a scaler.

    Raises:
        SourceError: the optimizers have different loss scalers.
    """
    first, *others = (plain(file, saved, "grad_scaler") if file else None for file, saved in every)
    if any(other != first for other in others):
        where = next(file.path for file, _ in every if file)
        raise SourceError(f"{where}: the optimizers of experts and of all else scale losses otherwise")
    return first
