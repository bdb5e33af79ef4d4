"""Read the config of a tiny model with a family, as every command reads a config: what the family cannot say of it."""

from __future__ import annotations

import json

from converters.draft.probes import BY_HAND, Model
from formats.errors import RefusedError, SourceError, UnsupportedError, UsageError
from formats.families import find_family, known
from formats.families.family import Family
from formats.huggingface.config import from_huggingface


def unread(family: Family, model: Model) -> str:
    """Why a family cannot read the config of a tiny model; empty if it can."""
    try:
        _read(family, model)
    except (SourceError, UnsupportedError, RefusedError) as error:
        return str(error)
    return ""


def require_read(family: Family, model: Model) -> None:
    """Refuse a family that cannot read the config of a tiny model.

    Raises:
        SourceError: the family has neither a key nor a value for a setting.
        UnsupportedError: the config says what no field of a family can express.
        UsageError: the model has a table already, which comes first.
    """
    with known(family):
        first = find_family(_config(model))
    if first is not None and first is not family:
        raise UsageError(f"{model.kind} has a table, which every command takes: no command needs {family.file}")
    try:
        _read(family, model)
    except SourceError as error:
        raise SourceError(
            str(error),
            f"add it to {family.file}: its config key under [keys], or the value of every model under [defaults]",
        ) from error
    except (UnsupportedError, RefusedError) as error:
        raise type(error)(str(error), error.hint or BY_HAND) from error


def _read(family: Family, model: Model) -> None:
    """Read the config of a tiny model with a family. Raises what `from_huggingface` raises."""
    with known(family):
        from_huggingface(_config(model), {}, f"the config of a tiny {model.architecture}")


def _config(model: Model) -> dict[str, object]:
    """The config.json of a tiny model whose output head is a matrix of its own."""
    config: dict[str, object] = json.loads(model.tiny(**model.untied)[0].to_json_string())
    return config
