"""Compare the config.json that is beside weights with the one that the user names for them (`--config`)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from formats.checkpoint import Settings
from formats.disk.json_file import read_json
from formats.errors import UnsupportedError, short
from formats.huggingface import language_model
from formats.huggingface.config import OF_NO_MODEL, config_differences, from_huggingface
from formats.huggingface.require import LAYER_CONFIG, OF_ALL, WINDOW
from formats.huggingface.rope import PARAMETERS
from formats.model.checks import require_no_contradictions
from formats.model.settings import TYPES
from formats.model.spec import ModelSpec, Spec, class_tells, computing_differences, of_own

CONFIG = "config.json"
IDLE = (
    "vocab_size", "tie_word_embeddings", "output_router_logits", "router_aux_loss_coef", "output_attentions",
    "output_hidden_states", "return_dict", "id2label", "label2id", "problem_type", "use_cache", "auto_map",
    "task_specific_params", "max_length", "min_length", "num_beams", "forced_decoder_ids", "suppress_tokens",
    "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id",
    *(name for name in OF_NO_MODEL if name != "layer_types"),
)  # fmt: skip
"""Keys in which the two configs of a model without a table may differ: shapes and names of the weights tell the first
two, and no logit depends on the others. The same holds of the ids of special tokens (`SPECIAL`)."""
SPECIAL = {f"{kind}_token_id" for kind in ("bos", "eos", "pad", "unk", "sep", "cls", "mask", "decoder_start")}
"""Keys of tokens that no layer looks for, as it does for those of images; `PAD` is looked for in `PLACED_BY_PAD`."""
PAD = "pad_token_id"
PLACED_BY_PAD = {
    "camembert", "data2vec-text", "esm", "fsmt", "ibert", "layoutlmv3", "lilt", "longformer", "luke", "m2m_100",
    "markuplm", "mpnet", "nllb-moe", "prophetnet", "roberta", "roberta-prelayernorm", "trocr", "xglm", "xlm-roberta",
    "xlm-roberta-xl", "xmod",
}  # fmt: skip
"""Model types whose positions are counted from the id of the padding, or leave it out (transformers 5.23.0,
modeling_*.py of each, `create_position_ids_from_input_ids` and `padding_idx`)."""
DERIVED = ("head_dim", "n_inner", "intermediate_size")
"""Sizes that classes of transformers derive in the model where they are null; the shapes of the weights tell them."""
OF_EVERY_MODEL: Mapping[str, Any] = {**OF_ALL, WINDOW: None, LAYER_CONFIG: None}
"""Keys that transformers reads of every model, also where its class has no such key, and what they are there."""
HINT = "leave --config out, or correct one of them"
HINT_OF_SETTINGS = "leave --config out, correct one of them, or decide with --set NAME=VALUE"


def require_same(
    own: Path | None, base: Mapping[str, Any], keys: Iterable[str], settings: Settings, spec: Spec | None
) -> Mapping[str, Any]:
    """Refuse a config of the user that contradicts the one that the weights come with.

    Settings that the user passed overrule both configs, and so do names and shapes of the weights (`tied`, `vocab`).
    Without a table, configs that differ as they are written are compared as their class in transformers reads them.

    Args:
        own: the folder with the config.json that is read without `--config`, if there is one.
        base: the config.json that the user named.
        keys: the names of the tensors in the checkpoint.
        settings: the user's settings.
        spec: the model as `base` has it; None where its config is carried as it is.

    Returns:
        The settings of the family's own as the config beside the weights spells them; those of `base` if it is compared
        with none, or no table describes it.

    Raises:
        RefusedError: the two contradict each other.
        SourceError: the config beside the weights cannot be read.
    """
    owned = spec.own if isinstance(spec, ModelSpec) else {}
    if own is None or settings.config is None:
        return owned
    where, config = str(own / CONFIG), read_json(own / CONFIG)
    if not isinstance(config.get("model_type"), str):  # of a trainer, not of a model
        return owned
    names = list(keys)
    ours, theirs = (language_model.select(dict(each), names, settings, where).config for each in (config, base))
    known = _spec_of(ours, where, settings) if isinstance(spec, ModelSpec) else None
    if isinstance(spec, ModelSpec) and known:
        lines = _table_differences(known, spec, lambda: _key_differences(ours, theirs, settings))
    else:
        lines = _key_differences(ours, theirs, settings)
    decidable = known is not None and all(line.partition(":")[0] in TYPES for line in lines)
    both = f"{where} and {settings.config / CONFIG}"
    hint = HINT_OF_SETTINGS if decidable else HINT
    require_no_contradictions(lines, both, f"{own.name} | {settings.config.name}", hint)
    return known.own if known else owned


def _key_differences(ours: Mapping[str, Any], theirs: Mapping[str, Any], settings: Settings) -> list[str]:
    """The keys in which two configs differ: as transformers reads them, or as they are written where it does not tell.

    Their class fills in its defaults, and reads two spellings as one: DeBERTa's `p2c|c2p` is its list of the two. As
    they are written, a null is no value, since it may stand for a default.
    """
    kinds = ours.get("model_type"), theirs.get("model_type")
    spelled = (_comparable(config, nulls=False) for config in (ours, theirs))
    written = config_differences(*_shared(*spelled, whole=(LAYER_CONFIG,)))
    if kinds[0] != kinds[1]:
        return [f"model_type: {short(kinds[0])} | {short(kinds[1])}", *written]
    if settings.as_read is None or _comparable(ours) == _comparable(theirs):
        return written
    one, other = settings.as_read(ours), settings.as_read(theirs)
    if one is None or other is None:
        return written
    return config_differences(*_shared(_comparable(one), _comparable(other), whole=(PARAMETERS, LAYER_CONFIG)))


def _spec_of(config: dict[str, Any], where: str, settings: Settings) -> ModelSpec | None:
    try:
        return from_huggingface(config, settings.values, where)
    except UnsupportedError:
        return None


def _table_differences(ours: ModelSpec, theirs: ModelSpec, as_read: Callable[[], list[str]]) -> list[str]:
    """The settings in which two specs differ.

    A null of a key of the family's own stands for a value that the class derives from others, and that trainers spell
    out: where one of the two has none, the lines of `as_read` tell whether the values of all such keys are one.
    """
    if class_tells(ours, theirs):
        return [*computing_differences(replace(ours, own=theirs.own), theirs), *of_own(as_read(), theirs)]
    return computing_differences(ours, theirs)


def _comparable(config: Mapping[str, Any], *, nulls: bool = True) -> dict[str, Any]:
    """A config, and those nested in it, without keys in which two may differ; with `nulls` a null is a value.

    Keys that transformers reads of every model then count in the configs that lack them too.
    """
    idle = {*IDLE, *SPECIAL} - ({PAD} if config.get("model_type") in PLACED_BY_PAD else set())
    return {
        name: _comparable(value, nulls=nulls) if isinstance(value, dict) else value
        for name, value in ({**OF_EVERY_MODEL, **config} if nulls else config).items()
        if not (name in idle or name.startswith("_"))
        and not (name == "type" and "rope_type" in config)  # its name in transformers 4
        and (value is not None or (nulls and name not in DERIVED))
    }


def _shared(
    one: Mapping[str, Any], other: Mapping[str, Any], *, whole: Collection[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two configs, and those nested in them, with the keys that both have; what is in `whole` keeps all of its own."""
    both = {name: (one[name], other[name]) for name in one if name in other}
    both |= {
        name: _shared(*pair, whole=whole)
        for name, pair in both.items()
        if name not in whole and all(isinstance(value, dict) for value in pair)
    }
    return {name: ours for name, (ours, _) in both.items()}, {name: theirs for name, (_, theirs) in both.items()}
