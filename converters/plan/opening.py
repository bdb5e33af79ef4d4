"""Open the source of a conversion: check its format, that each option has an effect, and choose the replica policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from converters.common.hub_names import folder_of
from formats.checkpoint import Checkpoint, Settings
from formats.errors import SourceError, UnsupportedError, UsageError, short
from formats.format import Format
from formats.huggingface import mtp
from formats.layout.table import MTP
from formats.model import accepted
from formats.model.spec import ModelSpec, idle_setting
from formats.registry import KNOWN_TO, downloaded, format_of, open_checkpoint

if TYPE_CHECKING:
    from formats.deepspeed.universal import States
    from formats.families.family import Family


DEFAULTS = {field.name: getattr(Settings(), field.name) for field in fields(Settings)}
FLAGS = {"values": "set"}
"""Setting of a reader: its flag, where that has another name."""


def resolve_source(path: Path, settings: Settings) -> tuple[Path, Settings, list[str]]:
    """The folder of a source, the settings with the folder of its config, and notes on what was found for Hub names.

    Raises:
        UsageError: the config is neither a folder with a config.json nor a yml of GPT-NeoX.
        SourceError: a name that begins with `hf://`, or a yml, is not on this machine.
    """
    source, notes = folder_of(path), list[str]()
    if source.note:
        notes.append(source.note)
    if settings.config is not None:
        named = settings.config
        config = folder_of(named.parent if named.name == "config.json" and named.is_file() else named)
        if config.folder.suffix in (".yml", ".yaml") and not config.folder.exists():
            raise SourceError(f"{config.folder} is not there", "--config names the yml of the run, or an HF folder")
        yml = config.folder.suffix in (".yml", ".yaml", ".json") and config.folder.is_file()
        if not yml and not any(config.folder.glob("*.y*ml")) and not (config.folder / "config.json").is_file():
            raise UsageError(
                f"--config {settings.config} is not a folder with a config.json", downloaded(settings.config)
            )
        notes += [f"--config {config.note}"] if config.note else []
        settings = replace(settings, config=config.folder)
    return source.folder, settings, notes


def open_source(path: Path, settings: Settings, formats: Sequence[Format] = ()) -> Checkpoint:
    """Open a checkpoint of one of some formats.

    Args:
        path: the folder of the checkpoint, or a name of the Hub (`converters.common.hub_names`).
        settings: the user's settings.
        formats: the formats that are read; none for any.

    Raises:
        SourceError: there is no checkpoint, or it is damaged.
        UsageError: the checkpoint is of another format.
    """
    path, settings, notes = resolve_source(path, settings)
    source = open_checkpoint(path, replace(settings, as_read=_as_read), formats)
    source = replace(source, notes=(*source.notes, *notes))
    if formats and format_of(source) not in formats:
        raise UsageError(
            f"{path} is a checkpoint of the format {source.format}, this command reads "
            f"{' and '.join(form.name for form in formats)}",
            format_of(source).commands,
        )
    return source


def _as_read(config: Mapping[str, Any]) -> dict[str, Any] | None:
    from converters.plan.agreement import config_as_read

    return config_as_read(config)


def open_only(path: Path, settings: Settings, family: Family | None, formats: Sequence[Format] = ()) -> Checkpoint:
    """Open one checkpoint, on which each setting has to have an effect (`open_all`)."""
    return open_all([path], settings, family, formats)[0]


def open_all(
    paths: Sequence[Path], settings: Settings, family: Family | None, formats: Sequence[Format] = ()
) -> list[Checkpoint]:
    """Open checkpoints; each setting has to have an effect on one of them.

    Args:
        paths: their folders, or names of the Hub.
        settings: the user's settings.
        family: the family of the user's own table, if there is one.
        formats: the formats that are read; none for any.

    Raises:
        SourceError: a checkpoint is absent, or damaged.
        UsageError: a checkpoint is of another format, or a setting, the family or a name given to --accept has no
            effect on any of them.
    """
    sources = [open_source(path, settings, formats) for path in paths]
    require_effect(settings, *sources)
    require_family(family, *sources)
    require_known(settings.accept, *sources)
    return sources


def open_training(path: Path, settings: Settings, family: Family | None) -> Checkpoint | States:
    """Open the source of a universal checkpoint: optimizer states partitioned over ranks, or any checkpoint."""
    from converters.plan.universal import is_partitioned, open_states

    if not is_partitioned(folder_of(path).folder, settings.tag):
        return open_only(path, settings, family)
    path, settings, _ = resolve_source(path, settings)
    from formats.deepspeed import NEOX

    states = open_states(path, settings)
    of_neox = dict.fromkeys(("gqa_layout", "config", "vocab_size", "values"), (NEOX,))
    require_effect(settings, states.opened["fp32"], known={**of_neox, "verbatim": (), "container": (), "only": ()})
    require_known(settings.accept, states.opened["fp32"])
    return states


def source_of(opened: Checkpoint | States) -> Checkpoint:
    """The opened checkpoint; of optimizer states that of the FP32 master weights."""
    return opened if isinstance(opened, Checkpoint) else opened.opened["fp32"]


def require_effect(settings: Settings, *sources: Checkpoint, known: Mapping[str, Sequence[Format]] = KNOWN_TO) -> None:
    """Refuse a setting that has no effect on any of the checkpoints.

    Args:
        settings: the user's settings.
        sources: the opened checkpoints.
        known: the formats that a setting is for, by its name.

    Raises:
        UsageError: an option has no effect on them.
        UnsupportedError: a setting of `--set` has none.
    """
    for name, formats in known.items():
        given = getattr(settings, name) != DEFAULTS[name]
        if given and not any(format_of(source) in formats for source in sources):
            flag = FLAGS.get(name, name).replace("_", "-")
            kinds = " and ".join(f"{source.root}, which is {source.format}" for source in sources)
            raise UsageError(f"--{flag} has no effect on {kinds}", "leave it out")
    if settings.allow_missing and all(isinstance(source.spec, ModelSpec) for source in sources):
        raise UsageError(
            f"--allow-missing has no effect on {sources[0].root}: a table says which tensors a "
            f"{sources[0].spec.family} has",
            "leave it out",
        )
    for name in settings.values:
        idle = [idle_setting(source.spec, name, settings.values) for source in sources]
        if why := all(idle) and idle[0]:
            raise UnsupportedError(f"--set {name} would have no effect on {sources[0].root}: {why}", "leave it out")
    if settings.only and all(source.left is None for source in sources):
        kind = sources[0].spec.family
        raise UsageError(
            f"--only {settings.only}: {sources[0].root} holds a {kind}, of which no part but text is known",
            "leave it out",
        )
    if MTP in settings.drop and not any(mtp.keys_of(source.dropped) for source in sources):
        raise UsageError("--drop mtp: the model has no layer that predicts further tokens", "leave it out")


def require_known(names: Sequence[str], *sources: Checkpoint) -> None:
    """Every name of `--accept` is one of those here, or an argument or key of a run.

    Args:
        names: what was accepted.
        sources: what was opened.

    Raises:
        UsageError: one is nothing.
    """
    strange = [name for name in names if name not in accepted.KNOWN]
    strange = [name for name in strange if not any(name in source.details.arguments for source in sources)]
    if strange:
        known = ", ".join(accepted.KNOWN)
        raise UsageError(
            f"--accept {short(strange[0])}: there is no such deviation, nor such an argument of the run",
            f"known: {known}; besides, what a refusal names",
        )


def require_family(family: Family | None, *sources: Checkpoint) -> None:
    """Refuse a family of the user's own table that is not that of any of the checkpoints.

    Raises:
        UsageError: no checkpoint is of the family.
    """
    specs = [source.spec for source in sources]
    if family is None or any(isinstance(spec, ModelSpec) and spec.family == family.name for spec in specs):
        return
    is_a = f"a {specs[0].family}" if isinstance(specs[0], ModelSpec) else f"a model without a table: {specs[0].why}"
    raise UsageError(f"--family {family.file} describes {family.name}, and {sources[0].root} is {is_a}")


def replicas_of(source: Checkpoint, policy: str | None) -> str:
    """The policy for further copies of a tensor. Copies that differ are damaged, except in formats where copies drift.

    Args:
        source: the opened checkpoint.
        policy: `verify`, `first` or `mean`; None for the default of its format, where `drift` is `mean` if there is a
            `proof`.
    """
    usual = format_of(source).replicas
    return policy or ("mean" if usual == "drift" and source.proof is not None else usual)
