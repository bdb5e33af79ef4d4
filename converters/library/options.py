"""The keyword arguments of the library, which are the flags of the commands by their names, and what becomes of them.

settings, family = reading({"config": "BASE", "set": {"rope_theta": 5e5}})
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from converters.plan.output import DEFAULTS, Output
from converters.plan.request import DEFAULT_MEMORY, Limits
from formats.checkpoint import Settings
from formats.errors import UsageError

if TYPE_CHECKING:
    from converters.common.progress import Tell

Place = str | PathLike[str]
Dtype = Literal["keep", "bf16", "fp16", "fp32"]
Target = Literal["huggingface", "megatron", "fsdp", "neox", "deepspeed"]
Rank = int | tuple[int, int]
"""A parallel size, or a rank and the size, such as (3, 8)."""


class Reading(TypedDict, total=False):
    """What a checkpoint does not say of itself: the options of `convert inspect --help`, by name."""

    config: Place
    vocab_size: int
    set: Mapping[str, object]
    verbatim: bool
    allow_missing: Sequence[str]
    container: str
    tag: str
    weights: Literal["module", "fp32-master", "exp_avg", "exp_avg_sq"]
    gqa_layout: Literal["auto", "blocked", "grouped"]
    accept: Sequence[str]
    family: Place


class Effort(TypedDict, total=False):
    """How much of the machine is used: threads, bytes of all buffers; and what is called with progress."""

    threads: int
    memory: int
    replicas: Literal["verify", "first", "mean"]
    progress: Tell


class Names(TypedDict, total=False):
    """How a layout names and cuts tensors, its parallel sizes apart (`converters.plan.output.Output`)."""

    vpp: int
    first_stage_layers: int
    last_stage_layers: int
    pp_layout: str
    etp: int
    norm: Literal["te", "local"]
    experts: Literal["te", "local"]
    glu_interleave: int
    megatron_version: str
    make_vocab_size_divisible_by: int
    format: Literal["torch", "torch_dist", "megatron-llm"]
    true_vocab_size: int
    layout: Literal["sequential", "pipeline"]
    optimizer: Literal["plain", "distributed"]


class Layout(Names, total=False):
    """How an output is laid out (`converters.plan.output.Output`)."""

    tp: int
    pp: int
    ep: int
    ranks: int
    iteration: int
    with_optimizer: bool
    consumed_samples: int
    shard_size: int
    chat_template: str


class View(Names, Effort, total=False):
    """What a view of a checkpoint in another layout is asked for: a rank, or a whole."""

    tp: Rank
    pp: Rank
    ep: Rank
    ranks: Rank
    with_optimizer: bool
    shard_size: int


class Planning(Reading, Layout, total=False):
    """What a plan depends on."""

    dtype: Dtype


class Conversion(Planning, Effort, total=False):
    """What a conversion depends on."""

    force: bool
    verify: bool


def settings_of(options: Mapping[str, Any]) -> Settings:
    """What `Reading` tells a reader.

    Raises:
        UsageError: `set` names a setting that does not exist.
    """
    from formats.model.settings import parse_settings

    values = parse_settings(f"{name}={json.dumps(value)}" for name, value in dict(options.get("set") or {}).items())
    config = options.get("config")
    return Settings(
        vocab_size=options.get("vocab_size"),
        values=values,
        config=None if config is None else Path(config),
        verbatim=options.get("verbatim", False),
        container=options.get("container"),
        tag=options.get("tag"),
        weights=options.get("weights"),
        gqa_layout=options.get("gqa_layout", "auto"),
        allow_missing=tuple(options.get("allow_missing", ())),
        accept=tuple(options.get("accept", ())),
    )


@contextmanager
def known_family(options: Mapping[str, Any]) -> Iterator[Any]:
    """While it lasts, the family that `family` names is known."""
    if options.get("family") is None:
        yield None
        return
    from formats.families import known
    from formats.huggingface.family_file import load

    family = load(Path(options["family"]))
    with known(family):
        yield family


def output_of(options: Mapping[str, Any]) -> Output:
    """How `Layout` lays out an output."""
    return Output(**{name: value for name, value in options.items() if name in DEFAULTS})


def limits_of(options: Mapping[str, Any], replicas: str) -> Limits:
    """How much of the machine `Effort` uses, given what is done with further copies."""
    accepted = tuple(options.get("accept", ()))
    return Limits(options.get("threads", 2), options.get("memory", DEFAULT_MEMORY), replicas, accepted=accepted)


def cast_of(options: Mapping[str, Any]) -> str | None:
    """What weights are cast to, None for nothing.

    Raises:
        UsageError: there is no such type.
    """
    dtype = options.get("dtype", "keep")
    if dtype not in ("keep", "bf16", "fp16", "fp32"):
        raise UsageError(f"there is no dtype {dtype}", "keep, bf16, fp16 or fp32")
    return None if dtype == "keep" else str(dtype)


def require_known(options: Mapping[str, Any], names: Collection[str]) -> None:
    """Every keyword is one that a function has.

    Raises:
        UsageError: one is none.
    """
    if odd := [name for name in options if name not in names]:
        raise UsageError(f"there is no option {odd[0]}", f"options: {', '.join(sorted(names))}")
