"""Read the optimizer of a nanotron training: AdamW's moments, FP32 master weights, steps and settings.

    STEP/optimizer/optimizer_config.json                           class of the optimizer, parallel sizes
    STEP/optimizer/optimizer_pp-0-of-1_tp-0-of-2_exp-0-of-1.pt     a file for each pipeline and tensor-parallel rank
    STEP/optimizer/optimizer_pp-0-of-1_dp-0-of-2_tp-….pt           with ZeRO-1 also for each data-parallel rank

Each file is the optimizer's `state_dict()`:

    state                   {0: {step, exp_avg, exp_avg_sq}, …}
    names                   {0: "model.decoder.0.pp_block.attn.qkv_proj.weight", …}: the parameters of the stage
    param_groups            [{lr, betas, eps, weight_decay, …, params: [0]}, …]: a group for each parameter
    gradient_accumulator    {name: FP32 master weight}, where gradients are accumulated in FP32

A rank has the states of its part of each parameter, in the layout of the weights. With ZeRO-1 that part is flattened,
and each data-parallel rank has an interval of it. A tied embedding has states in the first and in the last stage.

Facts: huggingface/nanotron at 2411b022, serialize/optimizer.py, optim/named_optimizer.py, optim/zero.py
(`_partition_parameters`), optim/gradient_accumulator.py, helpers.py (`init_optimizer_and_grad_accumulator`); the same
files of v0.5. Checkpoints of its trainer, and the states it had in memory, are in tests/golden/nanotron/optimizer.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from formats.checkpoint import Checkpoint
from formats.disk.json_file import read_json
from formats.disk.safetensors import FLOATS, Fragment
from formats.errors import SourceError, UnsupportedError, short, some
from formats.huggingface.nanotron.checkpoint import METADATA, STEP, Nanotron
from formats.huggingface.nanotron.tables import slots_of
from formats.layout.columns import Cut, Piece
from formats.layout.pieces import Scattered, from_pieces, match_pieces, whole_part
from formats.layout.placed import files_of
from formats.layout.slots import Slot
from formats.model.spec import ModelSpec
from formats.optimizer import STATES, Group, Optimizer, group_of, number_of, refusal_hint, states_by, whose
from formats.torch_files import duplicate_files
from formats.torch_files.archive import TorchFile, read_torch
from formats.torch_files.archive_writer import plain
from formats.torch_files.pickle_values import TensorRef
from formats.torch_files.saved_names import OPTIM_OF_NANOTRON
from formats.torch_files.unpickle import DAMAGE

FOLDER, CONFIG = "optimizer", "optimizer_config.json"
ZERO = "ZeroDistributedOptimizer"
"""The config's name of the optimizer class that shards its states over data-parallel ranks (ZeRO-1)."""
CLASSES = (ZERO, "OptimizerFromGradientAccumulator", "NamedOptimizer")
"""The optimizer classes of nanotron's optim/, each of which wraps torch's AdamW."""
SIZES = {"pp": "pp_size", "dp": "dp_size", "tp": "tp_size", "exp": "expert_parallel_size"}
"""Axis: the key of the number of its ranks in optimizer_config.json."""
OFFSETS, SHAPES = "param_name_to_dp_rank_offsets", "orig_param_shapes"
"""With ZeRO-1, by the name of a parameter: {rank: [start, stop]}, without empty intervals, and the shape before it was
flattened; all numbers as texts. The first rank of the training writes them, of the parameters of its own stage."""
COPY = "copy the files of all ranks of one save"
WITHOUT = "convert the weights without --with-optimizer"
FROZEN = "is it frozen, or has it made no step yet? an optimizer moves with a model that is trained as a whole"


class Ranks(NamedTuple):
    """The rank that wrote a file, along each axis; the data-parallel rank is None without ZeRO-1."""

    pp: int
    dp: int | None
    tp: int


@dataclass(frozen=True)
class Share:
    """The optimizer states, step counts and settings in the file of one rank, each by the key of a parameter."""

    file: TorchFile
    states: Mapping[str, Mapping[str, TensorRef]]
    steps: Mapping[str, float]
    groups: Mapping[str, Group]


# --- the interface of the format -------------------------------------------------------------------------------------


def is_trained(source: Checkpoint) -> bool:
    """Whether there are optimizer states besides the weights."""
    return (source.home / FOLDER).is_dir()


def read(source: Checkpoint) -> Optimizer:
    """Read the optimizer of an opened checkpoint of nanotron.

    Raises:
        SourceError: there is no optimizer, or it is damaged, incomplete, or of another save or model than the weights.
        UnsupportedError: the optimizer is not AdamW, or parameters were not trained, or not equally often.
    """
    folder = source.home / FOLDER
    if not folder.is_dir():
        raise SourceError(f"{source.root} holds no optimizer", WITHOUT)
    files, sizes = _files(folder)
    _require_said(folder, sizes, source)
    shares = {ranks: _share(read_torch(path)) for ranks, path in files.items()}
    assert isinstance(source.spec, ModelSpec)
    details, padded = source.details_of(Nanotron), source.padded_vocab or 0
    by_rank = {
        tp: slots_of(source.spec, padded, neighbours=details.neighbours, tp=(tp, sizes["tp"]))
        for tp in range(sizes["tp"])
    }
    _require_trained(shares, by_rank[0], folder)
    if "dp" in sizes:
        _require_intervals(folder, shares, by_rank[0], sizes["dp"])
    state_names = _kept(shares)
    cut = {slot.keys[0] for slot in by_rank[sizes["tp"] - 1] if not slot.replica}  # no copies of the first rank's
    duplicate_files.require_own((share.file.path, _fragments(share, cut)) for share in shares.values())
    checkpoints = {}
    for state in state_names:
        pieces = [
            piece
            for tp, slots in by_rank.items()
            for piece in match_pieces(slots, _joined_state(shares, slots, tp, state, sizes), (), folder)[1]
        ]
        twins = source.tensors if state == STATES[0] else ()
        of_state = tuple(sorted(files_of(pieces)))
        checkpoints[state] = replace(source, tensors=tuple(pieces), dropped=(), files=of_state, twins=twins)
    step = _step(shares, details, source)
    return Optimizer(checkpoints, step, _groups(shares, by_rank[0]), details.samples or None)


states = states_by(read)


# --- the files and their ranks ---------------------------------------------------------------------------------------


def _files(folder: Path) -> tuple[dict[Ranks, Path], dict[str, int]]:
    """Return the file of each rank, and the number of ranks along each axis; `dp` is among the axes only with ZeRO-1.

    Raises:
        SourceError: a file is missing, or the files are of several topologies.
        UnsupportedError: the files are of several expert-parallel ranks.
    """
    files: dict[Ranks, Path] = {}
    topologies: dict[tuple[tuple[str, int], ...], Path] = {}
    for path in sorted(folder.iterdir()):
        name = OPTIM_OF_NANOTRON.fullmatch(path.name)
        if name:
            of = {axis: (int(name[axis]), int(name[f"{axis}s"])) for axis in SIZES if name[axis] is not None}
            topologies.setdefault(tuple((axis, size) for axis, (_, size) in of.items()), path)
            ranks = Ranks(of["pp"][0], of["dp"][0] if "dp" in of else None, of["tp"][0])
            if files.setdefault(ranks, path) is not path:
                raise SourceError(f"{folder} holds two files of one rank: {files[ranks].name} and {path.name}", COPY)
    if not topologies:
        raise SourceError(
            f"{folder} holds no file of a rank, such as optimizer_pp-0-of-1_tp-0-of-1_exp-0-of-1.pt", COPY
        )
    if len(topologies) > 1:
        names = " and ".join(path.name for path in topologies.values())
        raise SourceError(f"{folder} holds files of {len(topologies)} topologies: {names}", COPY)
    sizes = dict(next(iter(topologies)))
    if sizes["exp"] > 1:
        raise UnsupportedError(f"{folder} is of several expert parallel ranks, which are not read", WITHOUT)
    count = prod(sizes.values())
    if len(files) != count or any(rank is not None and rank >= sizes[axis]
                                   for ranks in files for axis, rank in ranks._asdict().items()):  # fmt: skip
        topology = ", ".join(f"{axis} {size}" for axis, size in sizes.items() if axis != "exp")
        names = some([path.name for path in files.values()], 4)
        raise SourceError(
            f"{folder} holds the files of {len(files)} ranks, and there were {count} ({topology}): {names}", COPY
        )
    return files, sizes


def _require_said(folder: Path, sizes: Mapping[str, int], source: Checkpoint) -> None:
    """Refuse optimizer files whose topology differs from optimizer_config.json or from that of the weights.

    Raises:
        SourceError: the topologies differ.
        UnsupportedError: optimizer_config.json is in an unknown form.
    """
    path = folder / CONFIG
    config = read_json(path)
    parallelism, kind = config.get("parallelism"), config.get("type")
    if not isinstance(parallelism, Mapping) or not isinstance(kind, str):
        raise UnsupportedError(f"{path} does not say the class of its optimizer and the parallel sizes", WITHOUT)
    if kind not in CLASSES:
        raise UnsupportedError(
            f"{path} names an optimizer of the class {short(kind)}: known is {some(CLASSES, 3)}", WITHOUT
        )
    if (kind == ZERO) != ("dp" in sizes):
        found = "with" if "dp" in sizes else "without"
        raise SourceError(f"{path} says {short(kind)}, and the files are those of a training {found} ZeRO-1", COPY)
    for axis, size in sizes.items():
        recorded, weights = str(parallelism.get(SIZES[axis])), source.topology.get(axis, size)
        if recorded != str(size) or weights not in (1, size):  # weights of one rank are for all topologies
            raise SourceError(
                f"{folder} holds files of {axis} {size}: {CONFIG} says {short(recorded)}, the weights are of {weights}",
                "they are of two saves: " + COPY,
            )


# --- parsing a file --------------------------------------------------------------------------------------------------


def _share(file: TorchFile) -> Share:
    """Parse the optimizer file of a rank.

    Raises:
        SourceError: the file is in an unknown form.
        UnsupportedError: the optimizer is not AdamW, or a parameter has no states.
    """
    try:
        return _parse(file)
    except DAMAGE:
        raise SourceError(f"{file.path} holds no optimizer of nanotron in a form that is known") from None


def _parse(file: TorchFile) -> Share:
    where, names, kept = str(file.path), dict(file.value["names"]), dict(file.value["state"])
    settings = _settings(file)
    if lost := sorted(settings.keys() - kept.keys()):
        raise UnsupportedError(f"{where} holds no states of {len(lost)} parameters, such as number {lost[0]}", FROZEN)
    if kept.keys() != names.keys() or kept.keys() != settings.keys() or len({*names.values()}) != len(names):
        raise SourceError(f"{where}: states, names and groups of its optimizer are not of the same parameters", COPY)
    masters, *moments = STATES
    states: dict[str, dict[str, TensorRef]] = {state: {} for state in moments}
    steps: dict[str, float] = {}
    for number, kept_states in kept.items():
        name = names[number]
        if others := sorted(kept_states.keys() - {"step", *moments}):
            raise UnsupportedError(
                f"{where}: its optimizer{whose(others)} keeps {some(others, 4)} of {name}, and only AdamW's "
                "states are carried",
                refusal_hint(others),
            )
        steps[name] = number_of(plain(file, kept_states["step"], "a step"), f"{where}: the step of {name}")
        for state in moments:
            states[state][name] = kept_states[state]
    accumulator = file.value.get("gradient_accumulator")
    if accumulator is not None:
        if accumulator.keys() != steps.keys():
            raise SourceError(f"{where} holds master weights of other parameters than it has moments of", COPY)
        states[masters] = dict(accumulator)
    for state, refs in states.items():
        dtypes = ("F32",) if state == masters else FLOATS
        for name, ref in refs.items():
            if not isinstance(ref, TensorRef) or ref.dtype not in dtypes:
                raise SourceError(f"{where} holds {state} of {name} as {short(ref)}")
    return Share(file, states, steps, {name: settings[number] for number, name in names.items()})


def _settings(file: TorchFile) -> dict[int, Group]:
    """Return the settings of each parameter by its number.

    Raises:
        SourceError: a parameter is in two groups.
        UnsupportedError: the optimizer is not AdamW.
    """
    settings: dict[int, Group] = {}
    for param_group in file.value["param_groups"]:
        group = group_of(plain(file, param_group, "a parameter group"), str(file.path))
        if not isinstance(group, Group):
            raise UnsupportedError(
                f"{file.path}: its optimizer is not AdamW, which is what nanotron trains with", WITHOUT
            )
        for number in param_group["params"]:
            if number in settings:
                raise SourceError(f"{file.path}: parameter {short(number)} is in two groups of its optimizer")
            settings[number] = group
    return settings


def _fragments(share: Share, keys: Collection[str]) -> list[Fragment]:
    """Return the states of some parameters in the file of a rank."""
    return [
        share.file.fragment(ref, f"{state} of {key}")
        for state, refs in share.states.items()
        for key, ref in refs.items()
        if key in keys
    ]


def _kept(shares: Mapping[Ranks, Share]) -> list[str]:
    """Return the names of the optimizer states, which all ranks must share.

    Raises:
        SourceError: some ranks keep master weights, and others do not.
    """
    first, *others = shares.values()
    for share in others:
        if share.states.keys() != first.states.keys():
            raise SourceError(f"{share.file.path} and {first.file.path} do not both keep FP32 master weights", COPY)
    return [state for state in STATES if state in first.states]


def _require_trained(shares: Mapping[Ranks, Share], slots: Sequence[Slot], folder: Path) -> None:
    """Refuse an optimizer that does not train exactly the parameters of the model.

    Raises:
        SourceError: the optimizer has a parameter that the model lacks.
        UnsupportedError: the optimizer has no states of a parameter of the model.
    """
    keys, names = {slot.keys[0] for slot in slots}, {name for share in shares.values() for name in share.steps}
    if odd := sorted(names - keys):
        raise SourceError(f"{folder} trains {some(odd, 4)}, its model has no such parameter", "is it of another model?")
    if missing := sorted(keys - names):
        raise UnsupportedError(f"{folder} holds no states of {len(missing)} parameters, such as {missing[0]}", FROZEN)


def _require_intervals(folder: Path, shares: Mapping[Ranks, Share], slots: Iterable[Slot], ranks: int) -> None:
    """Refuse an optimizer_config.json whose intervals or shapes of ZeRO-1 are not those of the files (see `_piece`).

    Raises:
        SourceError: an interval or a shape of a parameter differs, or is said of other parameters than the files have.
    """
    path, sizes = folder / CONFIG, {slot.keys[0]: slot.shape for slot in slots}
    first = {key for at, share in shares.items() if (at.pp, at.tp) == (0, 0) for key in share.steps}
    of_files: dict[str, Mapping[str, Any]] = {
        OFFSETS: {key: _offsets(prod(sizes[key]), ranks) for key in first},
        SHAPES: {key: [str(size) for size in sizes[key]] for key in first},
    }
    configs = read_json(path).get("configs")
    for name, expected in of_files.items():
        recorded = configs.get(name) if isinstance(configs, Mapping) else None
        if not isinstance(recorded, Mapping):
            raise SourceError(f"{path} does not say {name}, as every save with ZeRO-1 does", COPY)
        for key in sorted(recorded.keys() | expected.keys()):
            if recorded.get(key) != expected.get(key):
                raise SourceError(
                    f"{path} says {name} of {key} = {_brief(recorded.get(key))}, and in the files it is "
                    f"{_brief(expected.get(key))}",
                    "they are of two saves: " + COPY,
                )


def _brief(value: Any) -> str:
    """A value of optimizer_config.json for a message."""
    text = json.dumps(value)
    return text[:160] + "…" * (len(text) > 160)


def _step(shares: Mapping[Ranks, Share], details: Nanotron, source: Checkpoint) -> int:
    """Return how many steps the optimizer has made.

    Raises:
        SourceError: ranks differ, or checkpoint_metadata.json records another step, or none, and the user has not
            accepted that.
        UnsupportedError: parameters of one rank have made different numbers of steps.
    """
    first = next(iter(shares.values()))
    count = next(iter(first.steps.values()))
    for share in shares.values():
        for key, step in share.steps.items():
            if step != count or step < 1 or step != int(step):
                message = f"{share.file.path}: {key} has made {step:g} steps, others {count:g}"
                if len({*share.steps.values()}) > 1 or share is first:
                    raise UnsupportedError(message, WITHOUT)
                raise SourceError(f"{message}: files of different saves", COPY)
    if count != details.step and STEP not in source.settings.accept:
        said = f"says no {STEP}" if details.step is None else f"says {STEP} = {details.step}"
        said = said if (source.home / METADATA).is_file() else "is not there"
        raise SourceError(
            f"{first.file.path} has made {count:g} steps, {source.home / METADATA} {said}",
            f"files of different saves? {COPY}; of a training that began without the optimizer of the one before: "
            f"--accept {STEP}",
        )
    return int(count)


def _groups(shares: Mapping[Ranks, Share], slots: Iterable[Slot]) -> dict[tuple[str, int | None], Group]:
    """Return the AdamW settings of each logical tensor, by (tensor, layer).

    Raises:
        SourceError: ranks have different settings for one parameter.
    """
    by_key: dict[str, tuple[Group, Path]] = {}
    for share in shares.values():
        for key, group in share.groups.items():
            other, path = by_key.setdefault(key, (group, share.file.path))
            if group != other:
                raise SourceError(f"{share.file.path} and {path} treat {key} differently: {group} and {other}", COPY)
    return {(name, slot.layer): by_key[slot.keys[0]][0] for slot in slots for name in slot.rule.pattern.tensors}


# --- joining states --------------------------------------------------------------------------------------------------


def _joined_state(
    shares: Mapping[Ranks, Share], slots: Iterable[Slot], tp: int, state: str, sizes: Mapping[str, int]
) -> dict[str, Scattered]:
    """Return one state of each parameter, as a tensor-parallel rank has it, joined from its files.

    Raises:
        SourceError: a piece of a state is missing, or has another size than the layout.
    """
    together = {}
    for slot in slots:
        key = slot.keys[0]
        pieces = list[Piece]()
        for ranks, share in shares.items():
            if ranks.tp == tp and key in share.states[state]:
                fragment = share.file.fragment(share.states[state][key], f"{state} of {key}")
                pieces.append(_piece(fragment, slot, ranks.dp, sizes.get("dp", 1), f"{state} of {key}"))
        if not pieces:
            raise SourceError(f"{FOLDER}: tensor parallel rank {tp} has no {state} of {key}", COPY)
        together[key] = from_pieces(f"{state} of {key}", slot.shape, pieces[0].fragment.dtype, pieces)
    return together


def _piece(fragment: Fragment, slot: Slot, rank: int | None, ranks: int, name: str) -> Piece:
    """Return the piece of a state in one file: all of the state, or with ZeRO-1 the interval of a data-parallel rank.

    Raises:
        SourceError: the tensor has another shape than that piece.
    """
    if rank is None:
        part, shape = whole_part(slot.shape), slot.shape
    else:
        low, high = _interval(prod(slot.shape), rank, ranks)
        part, shape = Cut(((low, high),), flat=True), (high - low,)
    if fragment.shape != shape:
        raise SourceError(
            f"{fragment.path} holds {name} with shape {list(fragment.shape)}, its model has {list(shape)} there",
            "is it of another model?",
        )
    return Piece(part, fragment)


def _interval(count: int, rank: int, ranks: int) -> tuple[int, int]:
    """Return the interval [start, stop) of `count` elements that a data-parallel rank has.

    Where `ranks` does not divide `count`, the first ranks have one element more.
    """
    size, remainder = divmod(count, ranks)
    starts = [number * size + min(number, remainder) for number in (rank, rank + 1)]
    return starts[0], starts[1]


def _offsets(count: int, ranks: int) -> dict[str, list[str]]:
    """Return the intervals of all data-parallel ranks as optimizer_config.json has them."""
    intervals = {str(rank): _interval(count, rank, ranks) for rank in range(ranks)}
    return {rank: [str(start), str(stop)] for rank, (start, stop) in intervals.items() if start < stop}
