"""Load the weights of any checkpoint into a torch model, or iterate over them as torch tensors."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Replicate, Shard

from converters.library.checkpoint import Checkpoint, open_checkpoint
from converters.library.options import Effort, Place, Reading, Target, View
from converters.library.torch_tensor import as_torch, dtype_of
from converters.library.view import Tensor
from converters.plan.agreement import model_differences
from formats.errors import RefusedError, UnsupportedError, UsageError, some

if TYPE_CHECKING:
    from typing_extensions import Unpack

SHOWN = 4
LOG = logging.getLogger("vitruvian")
AHEAD = 1
"""How many further tensors are read while one is put into the model."""


class Loading(Reading, Effort, total=False):
    """Options of loading."""


class Iterating(Reading, View, total=False):
    """Options of iterating."""


@dataclass(frozen=True)
class Loaded:
    """The result of loading into a model.

    Attributes:
        names: tensors of the model that were filled.
        missing: tensors of the model that the checkpoint does not hold; none if `strict`.
        unexpected: tensors of the checkpoint that the model does not have; none if `strict`.
        notes: further messages for the user.
    """

    names: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    notes: tuple[str, ...] = ()


def iterate(
    src: Place | Checkpoint,
    *,
    to: Target = "huggingface",
    device: torch.device | str | None = None,
    prefetch: int = 1,
    **options: Unpack[Iterating],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and torch tensor of every tensor of a checkpoint, in a layout, in the order of its files.

    Notes, such as that all weights are averaged ones, are logged as warnings of the logger `vitruvian`.

    Args:
        src: the folder of a checkpoint in any format, or a checkpoint that `vitruvian.open` returned.
        to: the layout: `huggingface` for the names of the Hub, `fsdp` for those that transformers has in memory.
        device: the device of the tensors; None for the CPU.
        prefetch: how many further tensors are read, and are in memory, while the caller uses one.
        options: by the flags of the commands; for a rank of Megatron `tp=(0, 8)`.

    Raises:
        DamagedError: at the end, if bytes that were read do not have the checksum that the source records.
        VerificationError: copies of a tensor differ, or a tensor is not what the source's vitruvian.json says.
    """
    checkpoint, viewing = _opened(src, options, Iterating.__optional_keys__)
    if type(prefetch) is not int or prefetch < 0:
        raise UsageError(f"prefetch = {prefetch!r} is not a whole number of 0 or more")
    with checkpoint.as_(to, **viewing) as view:
        for note in view.notes:
            LOG.warning("%s: %s", checkpoint.path, note)
        for tensor, words in view.read_words(prefetch):
            made = as_torch(words, tensor.dtype)
            yield tensor.name, made if device is None else made.to(device, non_blocking=True)


def load(
    model: nn.Module, src: Place | Checkpoint, *, strict: bool = True, cast: bool = False, **options: Unpack[Loading]
) -> Loaded:
    """Fill a model of transformers from a checkpoint of any format. Each rank reads the rows that it holds.

    Parameters on the meta device are made on the CPU. Parameters may be DTensors that are sharded (FSDP2, tensor
    parallel) or replicated.

    Args:
        model: the model, which is filled in place.
        src: the folder of a checkpoint, or a checkpoint that `vitruvian.open` returned.
        strict: refuse a model and a checkpoint whose tensor names differ, before anything is filled. In any case,
            settings that differ between the configs of checkpoint and model are refused, except those that `accept`
            names: `accept=["norm_epsilon"]`.
        cast: whether tensors may be rounded to the dtype of the model's.
        options: by the flags of the commands.

    Raises:
        RefusedError: settings, names, shapes or (without `cast`) element types differ, or tensors do that are one in
            the model.
        UnsupportedError: a DTensor has another placement.
        DamagedError: bytes that were read do not have the checksum that the source records; the model is filled then.
        VerificationError: copies of a tensor differ, or a tensor that is read as a whole is not what the source's
            vitruvian.json says; a part of the model is filled then.
    """
    checkpoint, effort = _opened(src, options, Loading.__optional_keys__)
    _require_plain(model)
    with checkpoint.as_("fsdp", **effort) as view:
        tensors, stored = dict(_tensors(model)), {key: tensor for tensor in view.values() for key in tensor.spellings}
        shared = _shared(tensors)
        missing = [name for name in tensors if not shared[name] & stored.keys()]
        unexpected = [tensor.name for tensor in view.values() if not tensor.spellings & tensors.keys()]
        shared_names = [name for name in tensors if name in stored]
        if not shared_names or (strict and (missing or unexpected)):
            parts = [f"{what} {len(names)}: {some(names, SHOWN)}" for what, names in
                     (("the checkpoint lacks", missing), ("the model lacks", unexpected)) if names]  # fmt: skip
            raise RefusedError(
                f"{type(model).__name__} and {checkpoint.path} differ in names: {'; '.join(parts)}",
                _hint(missing) or ("strict=False fills what both have" if shared_names else ""),
            )
        for name in shared_names:
            _require_fit(name, tensors[name], stored[name], cast=cast)
        for names in {id(shared[name]): shared[name] for name in shared_names}.values():
            _require_one({name: tensors[name] for name in sorted(names & stored.keys())}, stored)
        _require_settings(model, checkpoint)
        notes = view.notes
        reads = (partial(stored[name].words, *_ranges(name, tensors[name])) for name in shared_names)
        words = view.reader.in_order(reads, AHEAD)
        for name in shared_names:
            _fill(model, name, tensors[name], as_torch(next(words), stored[name].dtype), shared[name])
        view.reader.complete()
    if any(tensors[name].is_meta for name in shared_names) and callable(tie := getattr(model, "tie_weights", None)):
        tie()  # parameters that replace those on the meta device are not tied yet
    if stranded := [name for name, buffer in model.named_buffers() if buffer.is_meta]:
        raise RefusedError(
            f"{type(model).__name__} has {len(stranded)} buffers on the meta device that no checkpoint holds: "
            f"{some(stranded, SHOWN)}",
            "make the model with accelerate.init_empty_weights(), which computes its buffers",
        )
    return Loaded(tuple(shared_names), tuple(missing), tuple(unexpected), notes)


WRAPPED = {"module.": "model.module", "_orig_mod.": "model._orig_mod", "base_model.model.": "the base model"}
"""Prefix of the names of a wrapped model: the model that is to be loaded instead."""
EXACT = {("BF16", torch.float32), ("F16", torch.float32), ("BF16", torch.float64), ("F16", torch.float64),
         ("F32", torch.float64)}  # fmt: skip
"""Pairs of element types where every number of the first is one of the second."""


def _opened(src: Place | Checkpoint, options: Any, names: Collection[str]) -> tuple[Checkpoint, Any]:
    """The opened checkpoint, and the options that are not for opening it.

    Raises:
        UsageError: an option is unknown, or is for opening a checkpoint that is open already.
    """
    if odd := [name for name in options if name not in names]:
        raise UsageError(f"there is no option {odd[0]}", f"options: {', '.join(sorted(names))}")
    reading = {name: value for name, value in options.items() if name in Reading.__optional_keys__}
    rest = {name: value for name, value in options.items() if name not in reading}
    if not isinstance(src, Checkpoint):
        return open_checkpoint(src, **reading), rest
    if reading:
        raise UsageError(f"{next(iter(reading))} is for opening, and {src.path} is open", "give it to vitruvian.open")
    return src, rest


def _require_plain(model: nn.Module) -> None:
    """Refuse a model whose parameters are not those that its state dict names.

    Raises:
        UnsupportedError: FSDP1 has flattened the parameters.
    """
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise UnsupportedError(
            f"{type(model).__name__} is wrapped by FSDP1, which keeps flat parameters of its own",
            "load it before it is wrapped, or shard it with fully_shard (FSDP2)",
        )


def _require_settings(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Refuse a model whose config has other settings than those that the checkpoint was trained with.

    A model without a config of transformers is compared by its names and shapes alone.

    Raises:
        RefusedError: a setting differs, and `accept` does not name it.
    """
    config: Any = getattr(model, "config", None)
    if not (getattr(config, "model_type", "") and hasattr(config, "to_json_string")):
        return
    source = checkpoint.source
    own = _written(type(config).from_dict(dict(source.config))) if source.config else {}
    where = f"the config of {type(model).__name__}"
    changed = model_differences(source, _written(config), own, where)
    names = [text.partition(":")[0] for text in changed]
    if refused := [text for name, text in zip(names, changed, strict=True) if name not in source.settings.accept]:
        raise RefusedError(
            f"{checkpoint.path} and {where} differ in {len(refused)} settings: {some(refused, SHOWN)}",
            f"make the model with the settings of the checkpoint, or take its own: accept={names}",
        )


def _written(config: Any) -> dict[str, Any]:
    """A config of transformers as a config.json records it, with all defaults; infinity is spelled as there."""
    written: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return written


def _hint(missing: Sequence[str]) -> str:
    """The hint which model to load instead of a wrapped one; empty if the model is not wrapped."""
    inner = [what for prefix, what in WRAPPED.items() if missing and all(name.startswith(prefix) for name in missing)]
    return f"the model is wrapped: load {inner[0]}" if inner else ""


def _require_one(tensors: Mapping[str, torch.Tensor], stored: Mapping[str, Tensor]) -> None:
    """Refuse names of one tensor of the model that are tensors of the checkpoint with different elements.

    Only the elements are compared that this rank holds.

    Raises:
        RefusedError: the checkpoint has different tensors under these names.
    """
    first, *others = {_origins(stored[name]): name for name in tensors}.values()
    if not others:
        return
    ranges, dtype = _ranges(first, tensors[first]), stored[first].dtype
    held = stored[first].words(*ranges)
    for other in others:
        if stored[other].dtype != dtype or not np.array_equal(held, stored[other].words(*ranges)):
            raise RefusedError(
                f"{first} and {other} are one tensor in the model, and several in the checkpoint",
                "make the model with tie_word_embeddings=False",
            )


def _origins(tensor: Tensor) -> frozenset[object]:
    """The origin of each physical tensor of the source that a tensor is assembled from."""
    jobs = {job.name: job for job, _ in tensor.reader.leaves(tensor.placed, tensor.state)}
    fragments = (part.fragment for job in jobs.values() for part in job.sources)
    return frozenset(fragment.origin for fragment in fragments)


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor of the parameters and saved buffers of a model; a shared tensor under each of its names."""
    state = model.state_dict(keep_vars=True)
    for name, tensor in state.items():
        if isinstance(tensor, torch.Tensor):
            yield name, tensor


def _shared(tensors: dict[str, torch.Tensor]) -> dict[str, set[str]]:
    """Name of a tensor: all names of the same tensor."""
    groups: dict[int, set[str]] = {}
    for name, tensor in tensors.items():
        groups.setdefault(id(tensor), set()).add(name)
    return {name: groups[id(tensor)] for name, tensor in tensors.items()}


def _require_fit(name: str, tensor: torch.Tensor, stored: Tensor, *, cast: bool) -> None:
    """Refuse a tensor of the model that cannot be filled from the stored one.

    Raises:
        RefusedError: shape or dtype differ.
        UnsupportedError: the tensor is a DTensor with a placement other than Shard and Replicate.
    """
    if tuple(tensor.shape) != stored.shape:
        raise RefusedError(
            f"{name} is {list(stored.shape)} in the checkpoint, {list(tensor.shape)} in the model",
            "make the model with the settings of the checkpoint: vitruvian.open(…).spec",
        )
    if tensor.dtype != dtype_of(stored.dtype) and not cast and (stored.dtype, tensor.dtype) not in EXACT:
        raise RefusedError(
            f"{name} is {stored.dtype} in the checkpoint, {tensor.dtype} in the model",
            f"make the model in that type (dtype={dtype_of(stored.dtype)}), or cast=True rounds",
        )
    _ranges(name, tensor)


def _fill(model: nn.Module, name: str, tensor: torch.Tensor, values: torch.Tensor, names: set[str]) -> None:
    """Fill a tensor of a model; one on the meta device is replaced by one on the CPU, under all of its names."""
    values = _rounded(name, values, tensor.dtype)
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    with torch.no_grad():
        if not local.is_meta:
            local.copy_(values)
            return
        if isinstance(tensor, DTensor):
            values = DTensor.from_local(
                values,
                tensor.device_mesh,
                tensor.placements,
                run_check=False,
                shape=tensor.shape,
                stride=tensor.stride(),
            )
    parameter = nn.Parameter(values, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else None
    for each in names:
        path, _, last = each.rpartition(".")
        module = model.get_submodule(path)
        if parameter is not None:
            module._parameters[last] = parameter  # noqa: SLF001
        else:
            module._buffers[last] = values  # noqa: SLF001


def _rounded(name: str, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The values rounded to another dtype.

    Raises:
        RefusedError: a value is too large for the dtype.
    """
    if values.dtype == dtype:
        return values
    rounded = values.to(dtype)
    if rounded.is_floating_point() and bool((rounded.isinf() & ~values.isinf()).any()):
        raise RefusedError(f"{name} holds numbers that are too large for {dtype}", "make the model in another type")
    return rounded


def _ranges(name: str, tensor: torch.Tensor) -> tuple[slice, ...]:
    """The box of a tensor that this rank holds: along a sharded axis chunks of ceil(n / ranks), as torch.chunk cuts.

    Raises:
        UnsupportedError: the DTensor has a placement other than Shard and Replicate.
    """
    if not isinstance(tensor, DTensor):
        return ()
    ranges = [(0, n) for n in tensor.shape]
    coordinate: list[int] = list(tensor.device_mesh.get_coordinate() or [])
    for placement, rank, ranks in zip(tensor.placements, coordinate, tensor.device_mesh.shape, strict=True):
        if type(placement) is Shard:
            low, high = ranges[placement.dim]
            step = -(-(high - low) // ranks)
            ranges[placement.dim] = (min(low + rank * step, high), min(low + (rank + 1) * step, high))
        elif type(placement) is not Replicate:
            raise UnsupportedError(f"{name} is placed as {placement}, and only Shard and Replicate have ranges")
    return tuple(slice(low, high) for low, high in ranges)
