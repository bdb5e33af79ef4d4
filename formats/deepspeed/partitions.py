"""Read DeepSpeed ZeRO's partitions: each data parallel rank's part of the FP32 master weights and moments.

    TAG/mp_rank_{mp:02d}_model_states.pt                     stages 0 to 2: the module, and the shapes in stored order
    TAG/zero_pp_rank_{dp}_mp_rank_{mp:02d}_model_states.pt   stage 3: the shapes; the module is empty
    TAG/[bf16_]zero_pp_rank_{dp}_mp_rank_{mp:02d}_optim_states.pt   a rank's part of each flat parameter group

Stages 1 and 2 (deepspeed/runtime/zero/stage_1_and_2.py, 0.19.8) lay the parameters of a group end to end, in the order
of `param_shapes`, pad the end to a multiple of twice the ranks, and give each rank an equal part; padding at the end of
the stored master weights is stripped. Stage 3 (stage3.py) gives each rank ceil(n / ranks) elements of every parameter.
`param_slice_mappings` is not used: with round_robin_gradients its order is not that of the data.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from formats.deepspeed import eight_bits, muon
from formats.deepspeed import folders as deepspeed
from formats.deepspeed.flat_pieces import flat_piece, whole_of
from formats.deepspeed.steps import number, steps_by_group
from formats.disk.safetensors import DTYPES, FLOATS, Fragment
from formats.errors import SourceError, UnsupportedError, short, some
from formats.layout.columns import Columns, Ints, boxes
from formats.layout.pieces import Scattered, from_pieces
from formats.optimizer import (
    MOMENTUM,
    NAMES,
    STATES,
    Muon,
    kind_of,
    refusal_hint,
    require_states,
    required_states,
    whose,
)
from formats.torch_files import duplicate_files, saved_names
from formats.torch_files.archive import TorchFile, read_torch
from formats.torch_files.pickle_values import Opaque, TensorRef
from formats.torch_files.unpickle import DAMAGE

KEPT = frozenset({"step", *STATES})
"""The entries that Adam and Lion store for a parameter."""


class Flat(NamedTuple):
    """A rank's part of one flat group: its fragment, and how many elements of padding were stripped from its end."""

    fragment: Fragment
    stripped: int


@dataclass(frozen=True)
class Partition:
    """The optimizer states that one data parallel rank holds.

    Attributes:
        path: the file of the rank.
        stage: the ZeRO stage.
        ranks: how many ranks share each group, as the file records it.
        groups: the rank's part of each group, by state; None if the optimizer of the group has no such state.
        gaps: elements of padding after each parameter of each group.
        steps: how many steps Adam has made in each flat group, as far as the file records them.
        settings: the parameter groups of the optimizer, as torch has them; `params` are numbers of flat groups.
        deepspeed_groups: the same groups with the keys of DeepSpeed.
        kept: the names of the states of each parameter, without the momentum of Muon's groups.
        whole_momentum: whether the momentum of Muon is stored for whole matrices, instead of the rank's part.
    """

    path: Path
    stage: int
    ranks: tuple[int, ...]
    groups: Mapping[str, tuple[Flat | None, ...]]
    gaps: tuple[tuple[int, ...], ...]
    steps: tuple[float, ...] = ()
    settings: tuple[Mapping[str, Any], ...] = ()
    kept: frozenset[str] = frozenset()
    deepspeed_groups: tuple[Mapping[str, Any], ...] = ()
    whole_momentum: bool = True

    @property
    def optimizer(self) -> str:
        """What it is called."""
        return " and ".join(sorted({NAMES[kind_of(group)] for group in self.settings}))

    @property
    def flats(self) -> list[Fragment]:
        """Its part of each group, of each state that is not in 8 bits."""
        flats = (flat.fragment for groups in self.groups.values() for flat in groups if flat)
        return [flat for flat in flats if not flat.scales]


def open_partitions(folder: Path, mp: int, states: Sequence[str] | None = None) -> list[Partition]:
    """The partition of every data parallel rank of one model parallel rank.

    Args:
        folder: the tag.
        mp: the model parallel rank.
        states: the states of `optimizer.STATES` to read; None for all that the optimizer has.

    Raises:
        SourceError: a rank's file is missing, damaged, or there twice.
    """
    paths: dict[int, Path] = {}
    for path in sorted(folder.iterdir()):
        name = saved_names.OPTIM.fullmatch(path.name)
        if name and int(name[2]) == mp:
            other = paths.setdefault(int(name[1]), path)
            if other is not path:
                raise SourceError(f"{folder} holds two partitions of rank {name[1]}: {other.name} and {path.name}")
    if not paths:
        raise SourceError(f"{folder} holds no optimizer states of mp_rank_{mp:02d}", _without_states(folder))
    partitions = {rank: _partition(read_torch(path), states) for rank, path in paths.items()}
    count = max([max(paths) + 1, *(n for partition in partitions.values() for n in partition.ranks)])
    if count > deepspeed.MOST_RANKS:
        raise SourceError(f"{folder} claims {count} data parallel ranks", "a file is damaged, or has another's name")
    missing = sorted(set(range(count)) - set(paths))
    if missing:
        names = some(list(map(str, missing)), 8)
        raise SourceError(
            f"{folder} lacks the optimizer states of data parallel ranks {names} of {count} for mp_rank_{mp:02d}",
            _without_states(folder),
        )
    require_same_save(list(partitions.values()))
    for partition in partitions.values():
        if {n for n in partition.ranks if n != count}:
            raise SourceError(
                f"{partition.path} belongs to {min(partition.ranks)} data parallel ranks, {count} are there: "
                "files of another run",
                "remove those that are older than the others",
            )
    duplicate_files.require_own((partition.path, partition.flats) for partition in partitions.values())
    return [partitions[rank] for rank in sorted(partitions)]


def _without_states(folder: Path) -> str:
    """The hint if files of optimizer states are missing; in stage 3 no other files hold the weights."""
    third = any(saved_names.MODEL_OF_STAGE_3.fullmatch(path.name) for path in folder.iterdir())
    return "copy them from their nodes" + ("" if third else ", or take --weights module")


def require_same_save(partitions: Sequence[Partition]) -> None:
    """Refuse partitions of ranks that differ in ZeRO stage, number of steps, states, or optimizer.

    Raises:
        SourceError: two ranks differ.
    """
    first = partitions[0]
    for partition in partitions[1:]:
        for what, ours, others in (
            ("stage", partition.stage, first.stage),
            ("the optimizer", partition.optimizer, first.optimizer),
            ("step", _steps(partition), _steps(first)),
            ("states", ", ".join(partition.groups), ", ".join(first.groups)),
        ):
            if ours != others:
                raise SourceError(
                    f"{partition.path} is of {what} {ours}, {first.path} of {others}: files of different saves",
                    "copy the files of one save from all nodes",
                )


def _steps(partition: Partition) -> str:
    """The different step counts of a partition, as text; the groups may differ between pipeline stages."""
    return ", ".join(str(step) for step in sorted({*partition.steps})) or "none"


def _partition(file: TorchFile, states: Sequence[str] | None) -> Partition:
    try:
        return _parse(file, file.value["optimizer_state_dict"], states)
    except DAMAGE:
        raise SourceError(f"{file.path} holds no ZeRO partition of a version that is known") from None


def _parse(file: TorchFile, optimizer: Mapping[str, Any], states: Sequence[str] | None) -> Partition:
    if "ds_autoep_layers" in file.value or "autoep_layers" in file.value:
        raise UnsupportedError(f"{file.path}: expert parallel optimizer states are not supported")
    saved_stage = optimizer.get("zero_stage", 1)  # BF16_Optimizer records no stage
    stage = saved_stage.args[0] if isinstance(saved_stage, Opaque) else saved_stage
    if stage not in (1, 2, 3):
        raise UnsupportedError(f"{file.path}: ZeRO stage {short(stage)} is not known")
    masters = optimizer["fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"]
    moments = optimizer["optimizer_state_dict" if stage == 3 else "base_optimizer_state"]
    paddings = [0] * len(masters) if stage == 3 else list(optimizer["group_paddings"])
    by_group = {
        number: eight_bits.torch_states(value)
        for number, value in moments["state"].items()
        if isinstance(value, Mapping)
    }
    parsed = tuple(
        {name: number(file, value) if isinstance(value, TensorRef) else value for name, value in group.items()}
        for group in moments["param_groups"]
    )
    settings = tuple(muon.as_torch(group, str(file.path)) for group in parsed)
    inner = [value for _, value in sorted(by_group.items())]
    of_muon = {member for group in settings if kind_of(group) is Muon for member in group["params"]}
    for member in of_muon:
        if others := sorted(map(str, by_group.get(member, {}).keys() - {MOMENTUM})):
            raise UnsupportedError(f"{file.path}: Muon keeps {some(others, 4)}, which is not known")
    kept = frozenset(str(name) for value in inner for name in value)
    groups: dict[str, tuple[Flat | None, ...]] = {}
    for state in required_states(settings, kept) if states is None else states:
        refs = masters if state == "fp32" else [by_group.get(i, {}).get(state) for i in range(len(masters))]
        wanted = [state == "fp32" or (i in of_muon) == (state == MOMENTUM) for i in range(len(masters))]
        if any(ref is None for ref, needed in zip(refs, wanted, strict=True) if needed):
            raise SourceError(
                f"{file.path} holds no {state}: its optimizer{whose(kept)} is not Adam or Lion, or has made no step "
                "yet",
                refusal_hint(kept),
            )
        flats = [flat_fragment(file, ref, f"{state} of group {i}") if wanted[i] else None for i, ref in enumerate(refs)]
        if odd := next((flat.dtype for flat in flats if flat and flat.dtype not in FLOATS), None):
            raise SourceError(f"{file.path} holds {state} as {odd}, which is no float: the file is damaged")
        lengths = [flat_fragment(file, ref, "").shape[0] for ref in masters]
        stripped = [
            pad if "zero_stage" in optimizer and flat and flat.shape[0] == length else 0
            for flat, pad, length in zip(flats, paddings, lengths, strict=True)
        ]
        groups[state] = tuple(flat and Flat(flat, pad) for flat, pad in zip(flats, stripped, strict=True))
    count = optimizer["partition_count"]
    ranks = tuple(count) if isinstance(count, list) else (count,)
    if not all(type(n) is int and n > 0 for n in ranks) or not all(type(n) is int and n >= 0 for n in paddings):
        raise ValueError
    gaps = tuple(tuple(group) for group in optimizer.get("param_alignment_paddings") or ())
    steps = tuple(steps_by_group(file, by_group, parsed))
    if not settings:
        raise SourceError(f"{file.path} holds an optimizer without a group of parameters")
    if unknown := sorted(set(moments["state"]) - set(range(len(masters)))):
        groups_of = f"states of group {short(unknown[0])}, and master weights of {len(masters)} groups"
        raise SourceError(f"{file.path} holds {groups_of}")
    kept -= {MOMENTUM} if of_muon else set()
    by_matrix = "zero_stage" in optimizer and stage < 3
    return Partition(file.path, stage, ranks, groups, gaps, steps, settings, kept, parsed, by_matrix)


def require_trained(partitions: Sequence[Partition]) -> None:
    """Refuse an optimizer with unknown states, or with settings that differ between ranks.

    Raises:
        SourceError: two ranks differ in a setting of a parameter group.
        UnsupportedError: the optimizer has more states than Adam.
    """
    for partition in partitions:
        require_known(partition.path, partition.kept)
        for group in partition.settings:
            require_states(group, str(partition.path))
    require_same_settings(partitions)


def require_same_settings(partitions: Sequence[Partition]) -> None:
    """Refuse settings of an optimizer, such as the learning rate of a step, that differ between ranks.

    Raises:
        SourceError: two ranks differ in a setting of a parameter group.
    """
    first = partitions[0]
    for partition in partitions:
        for index, (ours, others) in enumerate(zip(partition.deepspeed_groups, first.deepspeed_groups, strict=False)):
            for name in sorted({*ours, *others} - {"params"}):
                if ours.get(name) != others.get(name):
                    raise SourceError(
                        f"{partition.path} has {name} = {short(ours.get(name))} in group {index} of its optimizer, "
                        f"{first.path} has {short(others.get(name))}: files of different runs or saves",
                        "copy the files of one save from all nodes",
                    )


def require_of_all(partitions: Sequence[Partition], state: str, tag: Path) -> None:
    """There is a state of every parameter.

    Raises:
        UnsupportedError: Muon keeps something else of what it trains.
    """
    if any(flat is None for partition in partitions for flat in partition.groups[state]):
        raise UnsupportedError(
            f"{tag} has no {state} of the matrices that Muon trains, of which it keeps {MOMENTUM}",
            "--weights module or fp32-master has all tensors; convert hf2fsdp --with-optimizer takes it along",
        )


def require_known(path: Path, kept: Iterable[str]) -> None:
    """Refuse an optimizer that stores more for a parameter than Adam does.

    Raises:
        UnsupportedError: there are further states, such as AMSGrad's largest moments.
    """
    if others := sorted(set(kept) - KEPT):
        raise UnsupportedError(
            f"{path}: its optimizer{whose(others)} keeps {some(others, 4)} of each parameter, and only Adam's "
            "states are carried",
            refusal_hint(others),
        )


def flat_fragment(file: TorchFile, ref: Any, name: str) -> Fragment:
    """The fragment of a flat tensor of a file, also of a moment in 8 bits.

    Raises:
        SourceError: `ref` is no flat tensor.
    """
    if isinstance(ref, eight_bits.Codes):
        return eight_bits.fragment_of(file, ref, name)
    if not isinstance(ref, TensorRef) or len(ref.shape) != 1 or (ref.strides != (1,) and ref.shape[0] > 1):
        raise SourceError(f"{file.path} holds {name} as {short(ref)}, which is no flat tensor")
    return file.fragment(ref, name)


def load(
    partitions: Sequence[Partition], shapes: Sequence[Mapping[str, tuple[int, ...]]], state: str
) -> Iterator[tuple[str, Scattered]]:
    """A state of every parameter that one model parallel rank trains, put together from all data parallel ranks.

    Args:
        partitions: the partitions of all ranks, in the order of the ranks.
        shapes: name and shape of the parameters of each group, in the stored order: `param_shapes`.
        state: one of `optimizer.STATES`.

    Raises:
        SourceError: the sizes of parameters and partitions do not fit.
    """
    flat_groups = [partition.groups[state] for partition in partitions]
    for partition, groups in zip(partitions, flat_groups, strict=True):
        if len(groups) != len(shapes):
            raise SourceError(
                f"{partition.path} has {len(groups)} flat parameter groups, the model files {len(shapes)}: "
                "files of different runs"
            )
    for index, group in enumerate(shapes):
        flats = [flat for groups in flat_groups if (flat := groups[index])]
        if len(flats) not in (0, len(partitions)):
            raise SourceError(f"{partitions[0].path} and other ranks have {state} of different groups")
        gaps = partitions[0].gaps[index] if partitions[0].gaps else (0,) * len(group)
        if partitions[0].stage == 3 and flats:
            yield from _by_parameter(flats, group)
        elif state == MOMENTUM and flats and partitions[0].whole_momentum:
            masters = [flat for partition in partitions if (flat := partition.groups["fp32"][index])]
            size = max(flat.fragment.shape[0] + flat.stripped for flat in masters)
            yield from muon.load([flat.fragment for flat in flats], size, group, gaps)
        elif flats:
            yield from _by_interval(flats, group, gaps)


def _by_interval(
    flats: Sequence[Flat], group: Mapping[str, tuple[int, ...]], gaps: Sequence[int]
) -> Iterator[tuple[str, Scattered]]:
    """The parameters of a group of stage 1 or 2, a row of elements of which each rank holds an equal interval."""
    sizes = {flat.fragment.shape[0] + flat.stripped for flat in flats}
    total = sum(map(prod, group.values())) + sum(gaps)
    size = max(sizes)
    ends = [rank * size + flat.fragment.shape[0] for rank, flat in enumerate(flats)]
    if len(sizes) > 1 or size * len(flats) < total or len(gaps) != len(group):
        raise SourceError(
            f"{flats[0].fragment.path}: the {len(group)} parameters of a group have {total} elements, its "
            f"{len(flats)} ranks hold {sum(flat.fragment.shape[0] for flat in flats)}",
            "files of different runs may be mixed up",
        )
    start = 0
    for (name, shape), gap in zip(group.items(), gaps, strict=True):
        stop = start + prod(shape)
        pieces = []
        for rank in range(start // size if size else 0, min(len(flats), -(-stop // size) if size else 0)):
            low, high = max(start, rank * size), min(stop, ends[rank])
            if low < high:
                pieces.append(flat_piece(flats[rank].fragment, low - rank * size, low - start, high - start))
        yield name, whole_of(name, shape, pieces, flats[0].fragment)
        start = stop + gap


def _by_parameter(flats: Sequence[Flat], group: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, Scattered]]:
    """The parameters of a group of stage 3, of each of which every rank holds the next ceil(n / ranks) elements."""
    total = sum(-(-prod(shape) // len(flats)) for shape in group.values())
    for flat in flats:
        if flat.fragment.shape[0] != total:
            raise SourceError(
                f"{flat.fragment.path}: a group holds {flat.fragment.shape[0]} elements, its {len(group)} parameters "
                f"have {total} on each of {len(flats)} ranks",
                "files of different runs may be mixed up",
            )
    coded = any(flat.fragment.scales for flat in flats)
    every = None if coded else _Flats.of([flat.fragment for flat in flats])
    at = 0
    for name, shape in group.items():
        part = -(-prod(shape) // len(flats))
        if every is None:
            cuts = [(low, min(low + part, prod(shape))) for low in range(0, prod(shape), part or 1)]
            pieces = [flat_piece(flat.fragment, at, *cut) for flat, cut in zip(flats, cuts, strict=False)]
            yield name, whole_of(name, shape, pieces, flats[0].fragment)
        elif part:
            yield name, from_pieces(name, shape, every.dtype, every.pieces(at, part, prod(shape)))
        else:
            yield name, whole_of(name, shape, [], flats[0].fragment)
        at += part


class _Flats(NamedTuple):
    """A flat group of stage 3 as columns, a row for each rank."""

    dtype: str
    paths: Sequence[Path]
    file: Ints
    offset: Ints
    member: Ints | None

    @classmethod
    def of(cls, flats: Sequence[Fragment]) -> _Flats:
        """The columns of a group, given the fragment of each rank.

        Raises:
            SourceError: the fragments differ in element type.
        """
        import numpy as np

        for flat in flats:
            if flat.dtype != flats[0].dtype:
                raise SourceError(f"{flat.path} holds {flat.dtype}, {flats[0].path} {flats[0].dtype}")
        member = np.array([flat.member or (0, 0, 0) for flat in flats], np.int64)
        common_member = member if all(flat.member for flat in flats) else None
        offset = np.array([flat.offset for flat in flats], np.int64)
        return cls(
            flats[0].dtype, [flat.path for flat in flats], np.arange(len(flats), dtype=np.int32), offset, common_member
        )

    def pieces(self, at: int, part: int, numel: int) -> Columns:
        """The pieces of a parameter.

        Args:
            at: the first element of the parameter in each rank's part of the group.
            part: elements on each rank; the last ranks have fewer or none.
            numel: elements of the parameter.
        """
        import numpy as np

        low = np.arange(0, numel, part, dtype=np.int64)
        cuts = boxes(np.stack((low, np.minimum(low + part, numel)), axis=1)[:, None], flat=True)
        rows = slice(len(low))
        offset = self.offset[rows] + at * DTYPES[self.dtype]
        return Columns(
            self.dtype, cuts, self.paths, self.file[rows], offset, None if self.member is None else self.member[rows]
        )
