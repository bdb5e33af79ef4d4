"""Write a drafted family as the text of a family file: guesses, and, as comments, what was not guessed."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from converters.draft.probes import LAYER_KEYS, Model
from converters.draft.reading import unread
from converters.draft.tables import PART_BY_NEIGHBOURS, Drafted, Row
from formats.errors import UsageError
from formats.families import FAMILIES
from formats.families.family import Family
from formats.huggingface.family_file import load
from formats.huggingface.nulls import NULLABLE
from formats.huggingface.rope import ORIGINAL
from formats.huggingface.settings_table import USUAL

HARMLESS = re.compile(
    r".*(?:dropout|pdrop|initializer|token_id).*|use_cache|is_decoder|pretraining_tp|output_router_logits"
    r"|router_aux_loss_coef|router_jitter_noise|rope_parameters|rope_scaling|num_mtp_layers|max_window_layers|"
    + "|".join(LAYER_KEYS)
)  # fmt: skip
"""Config keys that a family need not name: of training and generation, common to all, or derived from others."""
OF_ROUTER = ("experts", "top_k", "expert_ffn", "dense_layers", "router_normalized", "router_scale", "router_groups",
             "router_top_groups")  # fmt: skip
NEED = {
    **dict.fromkeys(OF_ROUTER, r"router"), "shared_ffn": r"shared_up", "latent_rank": r"latent_up",
    "query_rank": r"query_up", "nope_dim": r"latent_up", "rope_dim": r"latent_up", "parallel_residual": r"",
}  # fmt: skip
"""Setting: the logical tensor that a model with this setting has; empty for any model."""
SWITCH, WINDOW = "use_sliding_window", "sliding_window"
UNSEEN = "nobody has compared its logits with Megatron's yet"
UNJUDGED = "only_here may go once somebody has compared logits with Megatron's"


@dataclass(frozen=True)
class Draft:
    """A drafted family.

    Attributes:
        text: the contents of the file.
        rows: the lines of its table.
        faults: why the file does not load yet; empty if it does.
        unread: why the family cannot read the config of its own model yet; empty if it can.
    """

    text: str
    rows: tuple[Row, ...]
    faults: str
    unread: str = ""

    @property
    def doubtful(self) -> list[Row]:
        """The rows that were not guessed, or are not certain."""
        return [row for row in self.rows if row.doubt]


def draft(model: Model, table: Drafted) -> Draft:
    """The draft of a family; with an `only_here` where Megatron has no such model, or that was not confirmed."""
    values = _values(model, table)
    own = list(values["own"])
    values["only_here"] = ""
    loaded, why = _loaded(_text(values, table.rows)), UNSEEN
    if isinstance(loaded, UsageError) and "only_here" in loaded.hint:
        why = str(loaded).partition(": ")[2]
    if any(row.doubt == PART_BY_NEIGHBOURS for row in table.rows):
        why = PART_BY_NEIGHBOURS
    elif own:
        why = f"nobody has said what Megatron makes of {', '.join(own)}"
    values["only_here"] = why
    text = _text(values, table.rows)
    loaded = _loaded(text)
    if isinstance(loaded, UsageError):
        fault = str(loaded).partition(": ")[2]
        rows = tuple(_marked(row, fault) for row in table.rows)
        return Draft(_text(values, rows, "" if rows != table.rows else fault), rows, fault)
    reason = unread(loaded, model)
    return Draft(_text(values, table.rows, reason), table.rows, "", reason)


def _marked(row: Row, fault: str) -> Row:
    """The row, with the reason why the file does not load as its doubt where the reason names a tensor of the row."""
    is_reason = any(re.search(rf"\b{tensor}\b", fault) for tensor in row.tensors)
    return replace(row, doubt=fault) if is_reason and not row.doubt else row


def _loaded(text: str) -> Family | UsageError:
    """The family of a file with this text, or the error on loading it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "family.toml"
        path.write_text(text)
        try:
            return load(path)
        except UsageError as error:
            return error


def _values(model: Model, table: Drafted) -> dict[str, Any]:
    """The fields of the family, except its table."""
    tensors = {name for row in table.rows for name in row.tensors}
    raw = {entry.name: entry.default for entry in fields(model.config_class)}
    keys = {name: key for name, key in model.keys.items() if name in USUAL or NEED.get(name, "-") in {"", *tensors}}
    ungated = not {"gate", "expert_gate"} & tensors
    requires = {key: model.said.get(key, model.defaults[key]) for key in table.fixed}
    activation = model.keys.get("activation", "hidden_act")
    if ungated and activation in model.defaults:
        keys["activation"] = activation
    elif activation in model.defaults:
        requires[activation] = model.said.get(activation, model.defaults[activation])
    window = WINDOW in model.defaults and SWITCH not in model.defaults and "layer_types" not in model.defaults
    if SWITCH in model.defaults:
        requires[SWITCH] = False
    rope = getattr(model.config_class(), "rope_parameters", None) or {}
    rope = rope if "rope_type" in rope else next((entry for entry in rope.values() if isinstance(entry, dict)), {})
    if "partial_rotary_factor" in rope:
        keys["rotary_fraction"] = _taken(model, "partial_rotary_factor", "rotary_pct")
    if rope and (theta := _taken(model, "rope_theta", "rotary_emb_base")) != "rope_theta":
        keys["rope_theta"] = theta
    for name in ("kv_heads", "head_dim"):
        if name not in keys:
            keys[name] = ""
    used = {*keys.values(), *table.biases, *requires, WINDOW, SWITCH, ORIGINAL, "tie_word_embeddings"}
    own = {key: value for key, value in model.defaults.items() if key not in used and not HARMLESS.fullmatch(key)}
    usual_values = {name: raw[key] for name, key in keys.items() if isinstance(raw.get(key), bool | int | float | str)}
    usual = {"rotary_fraction": rope.get("partial_rotary_factor")} if "rotary_fraction" in keys else {}
    usual |= {ORIGINAL: model.defaults[ORIGINAL]} if ORIGINAL in model.defaults else {}
    excluded = OF_ONE_MODEL | ({"head_dim"} if keys["head_dim"] in ("", "head_dim") else set())
    shared_values = {name: value for name, value in usual_values.items() if name not in excluded}
    return {
        "name": model.kind if model.kind not in FAMILIES else f"{model.kind}_drafted",
        "architecture": model.architecture,
        "model_type": model.kind,
        "rope_theta": float(rope["rope_theta"]) if rope else "none",
        "head_dim": usual_values.get("head_dim") if keys["head_dim"] == "head_dim" else None,
        "mha": keys["kv_heads"] == "" or raw.get(keys["kv_heads"], 0) is None,
        "linear": model.linear,
        "square": model.square,
        "nulls": sorted(key for key in keys.values() if key in raw and raw[key] is None and key not in NULLABLE),
        "router": ("sigmoid" if "router_bias" in tensors else "softmax") if "router" in tensors else "",
        "window": WINDOW if window else "",
        "window_default": raw.get(WINDOW) if window else None,
        "requires": requires,
        "keys": {name: key for name, key in keys.items() if USUAL.get(name) != key},
        "defaults": {**shared_values, **usual},
        "biases": {key: [names, usual] for key, (names, usual) in table.biases.items()},
        "own": own,
        "tokens": {
            key: value for key, value in raw.items() if key.endswith("_token_id") and type(value) is int and value > 10
        },
    }


OF_ONE_MODEL = {"layers", "hidden", "heads", "ffn", "vocab", "max_positions"}
"""Settings that a config has to specify: their defaults are of one model, not of its family."""


def _taken(model: Model, *keys: str) -> str:
    """The key, of two, that the config class reads for a rotary setting."""
    first, second = keys
    made = model.config_class(**{second: 0.75}).rope_parameters
    return second if 0.75 in made.values() else first


def _text(values: Mapping[str, Any], rows: tuple[Row, ...], fault: str = "") -> str:
    """The contents of the family file."""
    lines = [f"# Drafted by `convert family`: what it could not see is marked; {UNJUDGED}."]
    tables = {name: value for name, value in values.items() if isinstance(value, dict) and value}
    plain = {
        name: value
        for name, value in values.items()
        if not isinstance(value, dict) and value not in (None, "", [], False)
    }
    lines += [f"{name} = {json.dumps(value)}" for name, value in plain.items()]
    wide = max((len(row.key) for row in rows), default=0) + 4
    deep = max((len(row.pattern) for row in rows if row.conditions), default=0) + 4
    guessed = [row for row in rows if row.pattern]
    lines += ["table = '''", *(_line(row, wide, deep) for row in guessed), "'''"]
    lines += [f"# ? {row.key}: {row.doubt}" for row in rows if row.doubt]
    lines += [f"# ? {fault}"] if fault else []
    for name, value in tables.items():
        lines += ["", f"[{name}]{ABOUT.get(name, '')}", *_pairs(value)]
    return "\n".join(lines) + "\n"


ABOUT = {
    "requires": "  # what the config must say, or leave out",
    "own": "  # what its class has and nothing here knows: take out what leaves the computation alone",
}


def _line(row: Row, wide: int, deep: int) -> str:
    return f"{row.key:<{wide}}{row.pattern:<{deep}}{' '.join(row.conditions)}".rstrip()


def _pairs(table: Mapping[str, Any]) -> Iterator[str]:
    """The lines of keys and values; values that a family file cannot hold are comments."""
    for key, value in table.items():
        mapping = value.to_dict() if hasattr(value, "to_dict") else value
        if isinstance(mapping, dict):
            yield f"# ? {key} = {json.dumps(mapping, default=str)}: of several parts, which a line here cannot hold"
        else:
            yield f"{key} = {_value(value)}"


def _value(value: Any) -> str:
    """A value as TOML writes it, which spells infinity."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    return repr(value) if isinstance(value, float) else json.dumps("none" if value is None else value)
