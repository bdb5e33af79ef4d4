"""The params.json of Mistral's own files, converted to and from model settings by one table.

Facts: mistral-inference 1.6.0 args.py (`TransformerArgs`), moe.py (the largest scores, then their softmax, as
Mixtral's), transformer.py (it assumes `rope_theta` = 1e6 where the key is absent, whatever the model was trained with;
here no default is assumed). Keys that only vLLM uses are read too: `max_position_embeddings`, `max_seq_len`,
`activation`, `tied_embeddings`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from formats.checkpoint import Settings
from formats.disk.json_file import read_json
from formats.errors import RefusedError, UnsupportedError, short
from formats.model.checks import checked, lost_setting, require_same_settings
from formats.model.codec import Codec, Context, Spelled, read, rows, write
from formats.model.settings import corrected
from formats.model.spec import ModelSpec

NAME = "params.json"
FAMILIES = ("mistral", "mixtral")
"""The model families that these files can hold; the second has experts."""


def _window(key: str) -> Codec:
    """The codec of the sliding window: one size for all layers; the key is left out where there is no window."""

    def check(spelled: Spelled, context: Context) -> Any:
        value = spelled.get(key)
        if isinstance(value, list) and len({*map(str, value)}) > 1:
            raise UnsupportedError(f"{context.where}: {key} = {short(value)}: windows in some layers are not supported")
        return value[0] if isinstance(value, list) and value else value

    return Codec(check, lambda value, _: {} if value is None else {key: value})


TABLE = rows(
    """
layers            n_layers
hidden            dim
heads             n_heads
kv_heads          n_kv_heads
head_dim          head_dim
ffn               hidden_dim
norm_epsilon      norm_eps
vocab             vocab_size
rope_theta        rope_theta
max_positions     max_position_embeddings|max_seq_len
sliding_window    sliding_window|_sliding_window    size or list
experts           moe.num_experts                   same    moe
top_k             moe.num_experts_per_tok           same    moe
tied              tied_embeddings                   = false
""",
    {"size or list": _window},
)
SILENT = {"model_type": "transformer", "activation": "silu", "use_biases": False, "causal": True}
"""Keys without a model setting, with the only value that is accepted: it does not change the computation."""
OF_A_RUN = ("max_batch_size",)
"""Keys of a run that do not describe the model."""


def spec_of(folder: Path, settings: Settings, base: ModelSpec | None) -> ModelSpec:
    """Read the settings of a model from its params.json.

    Args:
        folder: the folder of params.json.
        settings: the settings that the user passed.
        base: the spec of the Hugging Face config beside params.json, if there is one.

    Raises:
        SourceError: a setting is missing.
        UnsupportedError: the model computes something that has no layout here.
        RefusedError: params.json and config contradict each other.
    """
    path = folder / NAME
    parameters = _flat(read_json(path))
    where = str(path)
    known = {name for row in TABLE for names in row.keys for name in names}
    for key, value in parameters.items():
        if key not in (*known, *OF_A_RUN) and value is not None and SILENT.get(key, ...) != value:
            raise UnsupportedError(f"{where}: {key} = {short(value)} is not supported")
    family = FAMILIES["moe.num_experts" in parameters]
    given = {key: value for key, value in parameters.items() if value is not None}
    _require_one_value(given, where)
    values = read(TABLE, given, _conditions(family), where)
    values |= {name: getattr(base, name) for name in ("max_positions",) if base and values[name] is None}
    values |= {"family": family, "rope_scaling": None} | dict(settings.values)
    values |= {} if settings.vocab_size is None else {"vocab": settings.vocab_size}
    spec = checked(values, corrected(where, settings.values))
    if base:
        both = f"{where} and its config"
        require_same_settings(spec, replace(base, own=spec.own), both, "params | config", settings.values)
    return spec


def written(spec: ModelSpec) -> dict[str, Any]:
    """Return the content of params.json for a model.

    Raises:
        RefusedError: params.json has no key for a setting of the model.
    """
    lost = lost_setting(TABLE, _conditions(spec.family), spec)
    lost = lost or ("" if spec.rope_scaling is None else f"rope_scaling = {short(spec.rope_scaling)}")
    lost = lost or ("tied = True" if spec.tied else "")
    if lost:
        raise RefusedError(f"Mistral's own files have no {lost}", "see `convert formats`")
    flat = write(TABLE, vars(spec), _conditions(spec.family), "")
    experts = {key.removeprefix("moe."): flat.pop(key) for key in [*flat] if key.startswith("moe.")}
    twice = {name for row in TABLE for names in row.keys for name in names[1:]}
    flat_params = {key: value for key, value in flat.items() if key not in twice}
    return flat_params | ({"moe": experts} if experts else {})


def _require_one_value(given: Mapping[str, Any], where: str) -> None:
    """Refuse two keys of one setting with different values; of windows, a list of one size is that size.

    Raises:
        RefusedError: they differ.
    """
    for names in (names for row in TABLE for names in row.keys):
        values = {key: given[key] for key in names if key in given}
        if len({str([*dict.fromkeys(value)] if isinstance(value, list) else [value]) for value in values.values()}) > 1:
            said = " and ".join(f"{key} = {short(value)}" for key, value in values.items())
            raise RefusedError(f"{where}: {said} contradict each other", "remove the key that is not the model's")


def _conditions(family: str) -> set[str]:
    return {"moe" if family == FAMILIES[1] else "dense"}


def _flat(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return params.json as one flat dict; a key of the `moe` map becomes `moe.KEY`."""
    inner = params.get("moe")
    outer = {key: value for key, value in params.items() if key != "moe" or not isinstance(inner, dict)}
    return outer | ({f"moe.{key}": value for key, value in inner.items()} if isinstance(inner, dict) else {})
