"""Read verl's optimizer, torch's own `state_dict()` of each rank: its numbers get names from the model's dumps.

    model_world_size_W_rank_R.pt    {name: DTensor}, in the order of the module; buffers, and tied weights once more
    optim_world_size_W_rank_R.pt    {"state": {0: {step, exp_avg, …}, …}, "param_groups": [{…, "params": [0, …]}]}

verl gives its optimizer `module.parameters()`, in one group, with frozen parameters. With FSDP2 these are the DTensors
of the model's dictionary, in its order, each once. With FSDP1 (`use_orig_params: false`) they are flat parameters: the
first consists of all parameters that are in no layer, then there is one for each layer; a rank has an equal interval of
each, with padding at the end on the last rank.

Facts: verl 0.9.1 utils/checkpoint/fsdp_checkpoint_manager.py, workers/engine/fsdp/transformer_impl.py and
utils/fsdp_utils.py `get_fsdp_wrap_policy`, `apply_fsdp2`; torch 2.13.0 nn/modules/module.py `_named_members`,
distributed/fsdp/_flat_param.py; files that its FSDPCheckpointManager wrote are in tests/golden/verl.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from formats.errors import SourceError, UnsupportedError, short
from formats.torch_files import rank_dumps
from formats.torch_files.archive import TorchFile
from formats.torch_files.pickle_values import Opaque, TensorRef
from formats.torch_files.rank_dumps import FlatPart

LAYER = re.compile(r"(?P<layer>.*?\.\d+)\..+")
"""The key of a parameter of a layer: the name of the layer ends with its number."""
WITHOUT = "convert the weights without --with-optimizer; only the training that saved it can resume with it"
Keys = Sequence[Sequence[tuple[str, tuple[int, ...]]]]
"""For each number of the optimizer: the names and shapes of its parameters, several for a flat parameter."""


def is_numbered(files: Mapping[int, TorchFile]) -> bool:
    """Whether all dumps of an optimizer have numbers in place of parameter names."""
    states = [file.value.get("state") if isinstance(file.value, Mapping) else None for file in files.values()]
    return all(isinstance(state, Mapping) and state and all(type(key) is int for key in state) for state in states)


def with_parameter_names(
    files: Mapping[int, TorchFile], models: Mapping[int, TorchFile], *, tied: bool
) -> dict[int, TorchFile]:
    """The dumps of an optimizer with parameter names of the model in place of numbers.

    Args:
        files: the dump of the optimizer on each rank.
        models: the dump of the model on each rank.
        tied: whether the output head may be a copy that a flat parameter leaves out.

    Raises:
        SourceError: the ranks differ.
        UnsupportedError: the numbers are not those of the parameters of this model.
    """
    parameters = [_parameters(rank, file) for rank, file in models.items()]
    first = next(iter(files.values())).path
    for rank, other in zip(models, parameters, strict=True):
        if other != parameters[0]:
            raise SourceError(f"{models[rank].path} names other parameters than the dumps of other ranks")
    if not parameters[0]:
        raise UnsupportedError(
            f"{first} numbers its parameters, and {next(iter(models.values())).path} holds no sharded tensor: a "
            "training on one rank does not say which of its tensors are parameters",
            WITHOUT,
        )
    flat = any(isinstance(value, TensorRef) and value.shape for value in _states(files))
    count, *others = {_count(file) for file in files.values()}
    if others:
        raise SourceError(f"{first} and the dumps of other ranks number {count} and {others[0]} parameters")
    keys: Keys = _units(parameters[0]) if flat else [[each] for each in parameters[0].items()]
    if len(keys) != count:
        what = "flat parameters, those of one for each layer and one for all else" if flat else "parameters"
        raise UnsupportedError(
            f"{first} numbers {count} {'flat ' * flat}parameters, and its model has {len(keys)} {what}", WITHOUT
        )
    if flat:
        sizes = [_size(files.values(), number) for number in range(count)]
        keys = [_fitting(unit, size, len(files), tied, first) for unit, size in zip(keys, sizes, strict=True)]
    return {rank: _renamed(file, keys, rank if flat else None) for rank, file in files.items()}


def _parameters(rank: int, file: TorchFile) -> dict[str, tuple[int, ...]]:
    """The shapes of the parameters that a rank saved, in their order; a tied parameter has its first name alone."""
    shapes: dict[str, tuple[int, ...]] = {}
    places = set[tuple[Path, int, tuple[int, ...]]]()
    for key, value in rank_dumps.leaves(file.value):
        if not isinstance(value, Opaque):
            continue  # a buffer, which FSDP does not shard
        name = ".".join(key)
        shape, pieces = rank_dumps.pieces_of(value, rank, file, name)
        owned = {(piece.fragment.path, piece.fragment.offset, piece.fragment.shape) for piece in pieces}
        owned = {place for place in owned if prod(place[2])}
        if owned and owned <= places:
            continue
        places |= owned
        shapes[name] = shape
    return shapes


def _states(files: Mapping[int, TorchFile]) -> Iterator[Any]:
    """The values of all states of all parameters in dumps of an optimizer."""
    for file in files.values():
        for about in file.value["state"].values():
            yield from about.values() if isinstance(about, Mapping) else ()


def _count(file: TorchFile) -> int:
    """The number of parameters of an optimizer with one parameter group.

    Raises:
        UnsupportedError: there are several groups, whose order is not that of the module.
    """
    groups = file.value.get("param_groups")
    numbers = [group.get("params") for group in groups] if isinstance(groups, list) else []
    if len(numbers) != 1 or numbers[0] != [*range(len(numbers[0] or ()))]:
        raise UnsupportedError(
            f"{file.path}: its optimizer numbers its parameters, in {len(numbers)} groups, and does not say which is "
            "which: verl has one, in the order of the module",
            WITHOUT,
        )
    return len(numbers[0])


def _units(parameters: Mapping[str, tuple[int, ...]]) -> list[list[tuple[str, tuple[int, ...]]]]:
    """The parameters by flat parameter of FSDP1: those that are in no layer, then those of each layer."""
    units: dict[str, list[tuple[str, tuple[int, ...]]]] = {"": []}
    for key, shape in parameters.items():
        layer = LAYER.fullmatch(key)
        units.setdefault(layer["layer"] if layer else "", []).append((key, shape))
    return [*units.values()]


def _size(files: Iterable[TorchFile], number: int) -> int | None:
    """The number of elements of a flat parameter on each rank; None where it has no states.

    Raises:
        SourceError: the ranks differ.
    """
    sizes = {
        value.shape[0] if len(value.shape) == 1 else None
        for file in files
        for value in file.value["state"].get(number, {}).values()
        if isinstance(value, TensorRef) and value.shape
    }
    if len(sizes) > 1 or sizes == {None}:
        paths = sorted(file.path for file in files)
        raise SourceError(f"{paths[0]} and the dumps of other ranks have states of {sizes} elements of {number}")
    return sizes.pop() if sizes else None


def _fitting(
    unit: Sequence[tuple[str, tuple[int, ...]]], size: int | None, ranks: int, tied: bool, where: Path
) -> Sequence[tuple[str, tuple[int, ...]]]:
    """The parameters of a flat parameter with `size` elements on each rank; a tied head may be left out.

    Raises:
        UnsupportedError: the parameters have more or fewer elements.
    """
    heads = [[each for each in unit if each[0].endswith("lm_head.weight")] if tied else [], []]
    totals = []
    for head in heads:
        rest = [each for each in unit if each not in head]
        totals.append(sum(prod(shape) for _, shape in rest))
        if size in (None, -(-totals[-1] // ranks)):
            return rest
    raise UnsupportedError(
        f"{where} holds {size} elements of a flat parameter on each of {ranks} ranks, and {unit[0][0]} and what "
        f"follows it have {' or '.join(str(total) for total in dict.fromkeys(totals))} together: was the model wrapped "
        "in another way than by its layers?",
        WITHOUT,
    )


def _renamed(file: TorchFile, keys: Keys, rank: int | None) -> TorchFile:
    """A dump with names in place of numbers; with a `rank`, states of flat parameters are split into parameters."""
    state: dict[str, dict[str, Any]] = {}
    for number, about in file.value["state"].items():
        if number not in range(len(keys)) or not isinstance(about, Mapping):
            raise SourceError(f"{file.path} holds states of a parameter {short(number)} that is in no group")
        if rank is None:
            state[keys[number][0][0]] = dict(about)
            continue
        for name, value in about.items():
            for key, part in _parts(value, keys[number], rank):
                state.setdefault(key, {})[str(name)] = part
    (group,) = file.value["param_groups"]
    names = [key for unit in keys for key, _ in unit]
    return replace(file, value={"state": state, "param_groups": [{**group, "params": names}]})


def _parts(value: Any, unit: Sequence[tuple[str, tuple[int, ...]]], rank: int) -> Iterator[tuple[str, Any]]:
    """The parts of a flat parameter's state on a rank, by parameter; a single number such as a step is that of all."""
    if not isinstance(value, TensorRef) or not value.shape:
        yield from ((key, value) for key, _ in unit)
        return
    (size,), start = value.shape, 0
    begin, end = rank * size, (rank + 1) * size
    for key, shape in unit:
        stop = start + prod(shape)
        low, high = max(start, begin), min(stop, end)
        if low < high:
            offset = value.offset + low - begin
            yield key, FlatPart(shape, low - start, replace(value, offset=offset, shape=(high - low,)))
        start = stop
