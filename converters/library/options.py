"""The keyword arguments of the library: the flags of the commands by their names, checked and made into settings."""

from __future__ import annotations

import errno
import json
import math
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict, get_args

from converters.common.cores import CEILING, cores
from converters.common.hub_names import READ, require_scheme
from converters.plan.output import DEFAULTS, Output
from converters.plan.request import GONE, LONG, WHOLE, Limits
from formats.checkpoint import Settings
from formats.errors import OutputError, SourceError, UsageError, short

if TYPE_CHECKING:
    from converters.common.progress import Tell

Place = str | PathLike[str]
Quantization = Literal["fp8-block"]
Dtype = Literal["keep", "bf16", "fp16", "fp32"]
Target = Literal["huggingface", "megatron", "fsdp", "neox", "deepspeed", "mistral", "megatron-deepspeed", "nanotron"]
Weights = Literal["module", "fp32-master", "exp_avg", "exp_avg_sq"]
QueryOrder = Literal["auto", "blocked", "grouped"]
AdapterUse = Literal["merged", "only"]
Replicas = Literal["verify", "first", "mean"]
LayerNames = Literal["te", "local"]
Container = Literal["torch", "torch_dist", "fsdp_dtensor", "megatron-llm"]
Trainer = Literal["bridge"]
Lora = Literal["canonical", "fused"]
LayerFiles = Literal["sequential", "pipeline"]
QkvRows = Literal["grouped", "blocked", "separate"]
TensorNames = Literal["huggingface", "torchtitan", "olmo-core"]
OptimizerFiles = Literal["plain", "distributed"]
Rank = int | tuple[int, int]
"""A parallel size, or a rank and the size, such as (3, 8)."""


class Reading(TypedDict, total=False):
    """Options that tell what a checkpoint does not record itself: those of `convert inspect --help`, by name."""

    config: Place
    vocab_size: int
    set: Mapping[str, object]
    verbatim: bool
    allow_missing: Sequence[str]
    container: str
    tag: str
    weights: Weights
    gqa_layout: QueryOrder
    accept: Sequence[str]
    drop: Sequence[Literal["mtp"]]
    only: Literal["text"]
    adapter: AdapterUse
    family: Place


class Effort(TypedDict, total=False):
    """Options of a run: threads, bytes of all buffers, the replica policy, and a function to call with progress."""

    threads: int
    memory: int
    replicas: Replicas
    progress: Tell


class Names(TypedDict, total=False):
    """Options of how a layout names and cuts tensors, except parallel sizes (`converters.plan.output.Output`)."""

    vpp: int
    first_stage_layers: int
    last_stage_layers: int
    pp_layout: str
    etp: int
    norm: LayerNames
    experts: LayerNames
    glu_interleave: int
    megatron_version: str
    make_vocab_size_divisible_by: int
    format: Container
    for_trainer: Trainer
    true_vocab_size: int
    layout: LayerFiles
    qkv: QkvRows
    names: TensorNames
    optimizer: OptimizerFiles


class Layout(Names, total=False):
    """Options of how an output is laid out (`converters.plan.output.Output`)."""

    tp: int
    pp: int
    ep: int
    ranks: int
    archive: bool
    iteration: int
    with_optimizer: bool
    consumed_samples: int
    lr: float
    min_lr: float
    shard_size: int
    chat_template: str
    quantize: Quantization


class View(Names, Effort, total=False):
    """Options of a view of a checkpoint in another layout: of one rank, or of all."""

    tp: Rank
    pp: Rank
    ep: Rank
    ranks: Rank
    with_optimizer: bool
    shard_size: int


class Planning(Reading, Layout, total=False):
    """Options of a plan."""

    dtype: Dtype


class Conversion(Planning, Effort, total=False):
    """Options of a conversion."""

    force: bool
    verify: bool
    stripes: bool


class Kind(NamedTuple):
    """A kind of values: its description in words, and the test whether a value is of the kind."""

    words: str
    holds: Callable[[Any], bool]


def number(least: int, most: float = math.inf) -> Kind:
    """The kind of whole numbers from a least one on, and up to a most one if there is one."""
    words = f"{least} or more" if most == math.inf else f"{least} to {most}"
    return Kind(f"a whole number of {words}", lambda value: type(value) is int and least <= value <= most)


def choice(literal: Any) -> Kind:
    """The kind of the words of a Literal."""
    values = get_args(literal)
    return Kind("one of " + ", ".join(values), lambda value: value in values)


TEXT = Kind("a text", lambda value: isinstance(value, str))


def _is_path(value: Any) -> bool:
    """Whether a file system can have a value as a path."""
    try:
        return isinstance(value, str | PathLike) and os.fspath(value) != "" and b"\0" not in os.fsencode(value)
    except UnicodeEncodeError:
        return False


PLACE = Kind("a path", _is_path)
NUMBER = Kind(
    "a number that a float can be",
    lambda value: type(value) is float or (type(value) is int and abs(value) <= sys.float_info.max),
)
RATE = Kind("a number of 0 or more", lambda value: type(value) in (int, float) and 0 <= value <= sys.float_info.max)
FLAG = Kind("True or False", lambda value: isinstance(value, bool))
NAMES = Kind(
    "a list of texts",
    lambda value: isinstance(value, list | tuple | set) and all(isinstance(item, str) for item in value),
)
RANK = Kind(
    "a size, or a rank and the size such as (0, 2)",
    lambda value: (
        (type(value) is int and value >= 1)
        or (isinstance(value, tuple) and [type(item) for item in value] == [int, int] and 0 <= value[0] < value[1])
    ),
)
KINDS: Mapping[str, Kind] = {
    "config": PLACE, "vocab_size": number(1), "set": Kind("a dict of settings", lambda value: isinstance(value, dict)),
    "verbatim": FLAG, "allow_missing": NAMES, "container": TEXT, "tag": TEXT, "accept": NAMES, "family": PLACE,
    "drop": NAMES, "only": choice(Literal["text"]), "adapter": choice(AdapterUse),
    "weights": choice(Weights),
    "gqa_layout": choice(QueryOrder), "replicas": choice(Replicas),
    "threads": number(1, CEILING), "memory": number(1), "progress": Kind("a function", callable),
    **dict.fromkeys(("tp", "pp", "ep", "ranks"), number(1)),
    **dict.fromkeys(("vpp", "etp", "make_vocab_size_divisible_by", "true_vocab_size", "shard_size"), number(1)),
    **dict.fromkeys(("first_stage_layers", "last_stage_layers", "glu_interleave", "consumed_samples"), number(0)),
    "lr": RATE, "min_lr": RATE,
    "iteration": number(0), "pp_layout": TEXT, "megatron_version": TEXT, "chat_template": Kind(
        "a name or a path", PLACE.holds),
    "norm": choice(LayerNames), "experts": choice(LayerNames), "with_optimizer": FLAG, "force": FLAG, "archive": FLAG,
    "format": choice(Container), "layout": choice(LayerFiles), "qkv": choice(QkvRows), "names": choice(TensorNames),
    "optimizer": choice(OptimizerFiles), "for_trainer": choice(Trainer), "lora": choice(Lora),
    "verify": FLAG, "prefetch": number(0),
    "dtype": choice(Dtype), "quantize": choice(Quantization), "stripes": FLAG,
    "ema": NUMBER, "last": number(2),
}  # fmt: skip
"""Option: the kind of its value."""
RANKS = dict.fromkeys(("tp", "pp", "ep", "ranks"), RANK)
"""Option of a view that may name a rank: the kind of its value."""


def checked(options: Mapping[str, Any], names: Collection[str], kinds: Mapping[str, Kind] = KINDS) -> dict[str, Any]:
    """The options that were given, after a check that each is known and has a possible value. None means not given.

    Args:
        options: values by name.
        names: the options that the function has.
        kinds: the kind of value of each option.

    Raises:
        UsageError: an option is unknown, or has an impossible value.
    """
    if odd := [name for name in options if name not in names]:
        raise UsageError(f"there is no option {odd[0]}", f"options: {', '.join(sorted(names))}")
    stated = {name: value for name, value in options.items() if value is not None}
    if "dtype" in stated:
        stated["dtype"] = LONG.get(str(stated["dtype"]).removeprefix("torch."), stated["dtype"])
    for name, value in stated.items():
        if not kinds[name].holds(value):
            raise UsageError(f"{name} = {short(value)} is not {kinds[name].words}")
    return stated


def path_of(value: object, what: str, taken: Collection[str] = READ) -> Path:
    """A path that the caller gave, absolute if it exists, since the current folder may change.

    Args:
        value: the path.
        what: the name of the parameter.
        taken: the schemes of the addresses that are taken (`require_scheme`).

    Raises:
        UsageError: the value is no path, or so long a one that no file system has it; or an address that is not taken.
        SourceError, OutputError: the system does not tell whether it exists, such as for lack of rights.
    """
    if not isinstance(value, str | PathLike) or not PLACE.holds(value):
        raise UsageError(f"{what} = {short(value)} is no path")
    require_scheme(value, taken)
    path = Path(value)
    try:
        return path.absolute() if path.exists() else path
    except OSError as error:
        kind = UsageError if error.errno == errno.ENAMETOOLONG else OutputError if what == "out" else SourceError
        raise kind(f"{what} = {short(str(path))}: {error.strerror}") from None


def absolute(path: Path) -> Path:
    """A path that does not depend on the current folder.

    Raises:
        UsageError: it is relative, and the current folder was deleted.
    """
    try:
        return path.absolute()
    except FileNotFoundError:
        raise UsageError(f"{path}: {GONE}", WHOLE) from None


def settings_of(options: Mapping[str, Any]) -> Settings:
    """The settings of a reader from the options of `Reading`.

    Raises:
        UsageError: `set` names a setting that does not exist.
    """
    from formats.model.settings import parse_settings

    values = parse_settings(f"{name}={json.dumps(value)}" for name, value in dict(options.get("set") or {}).items())
    config = options.get("config")
    return Settings(
        vocab_size=options.get("vocab_size"),
        values=values,
        config=None if config is None else path_of(config, "config"),
        verbatim=options.get("verbatim", False),
        container=options.get("container"),
        tag=options.get("tag"),
        weights=options.get("weights"),
        gqa_layout=options.get("gqa_layout", "auto"),
        allow_missing=tuple(options.get("allow_missing", ())),
        accept=tuple(options.get("accept", ())),
        drop=tuple(options.get("drop", ())),
        adapter=options.get("adapter"),
        only=options.get("only"),
    )


@contextmanager
def known_family(options: Mapping[str, Any]) -> Iterator[Any]:
    """A context in which the family of the option `family` is known; gives the family, or None."""
    if options.get("family") is None:
        yield None
        return
    from formats.families import known
    from formats.huggingface.family_file import load

    family = load(Path(options["family"]))
    with known(family):
        yield family


def output_of(options: Mapping[str, Any]) -> Output:
    """The layout of an output from the options of `Layout`."""
    return Output(**{name: value for name, value in options.items() if name in DEFAULTS})


def limits_of(options: Mapping[str, Any], replicas: str) -> Limits:
    """The limits of a run from the options of `Effort`, with a replica policy."""
    accepted = tuple(options.get("accept", ()))
    return Limits(options.get("threads") or cores(), options.get("memory"), replicas, accepted=accepted)


def cast_of(options: Mapping[str, Any]) -> str | None:
    """The element type that weights are cast to; None for no cast."""
    dtype = options.get("dtype", "keep")
    return None if dtype == "keep" else str(dtype)
