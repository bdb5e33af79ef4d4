"""The settings of a LoRA in adapter_config.json: which are read, and which no merge can heed.

Facts: peft 0.21.2 tuners/lora/config.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from formats.disk.json_file import read_json
from formats.errors import RefusedError, SourceError, UnsupportedError, short, some

CONFIG = "adapter_config.json"
READ = {
    "peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "fan_in_fan_out",
    "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "target_parameters",
    "modules_to_save", "init_lora_weights", "base_model_name_or_path", "ensure_weight_tying", "bias",
}  # fmt: skip
"""Settings that are read here."""
FREE = {
    "task_type", "auto_mapping", "peft_version", "revision", "inference_mode", "lora_dropout",
    "megatron_core", "qalora_group_size", "runtime_config", "eva_config",
    "velora_config", "inject_method", "loftq_config", "corda_config", "lora_ga_config",
}  # fmt: skip
"""Settings that need no check: how the adapter was trained or initialized, or what tensor names tell too."""
NAMING = (
    "target_modules", "exclude_modules", "target_parameters", "modules_to_save", "layers_pattern",
    "layers_to_transform",
)  # fmt: skip
"""Settings that name modules or layers: a string, a list, or null."""
UNCHANGED = (True, False, "gaussian", "eva", "orthogonal", "mica", None)
"""Values of `init_lora_weights` that leave the weights of the base as they are."""
ONLY = {
    "layer_replication": "repeats layers of its base",
    "megatron_config": "belongs to modules of Megatron",
    "alora_invocation_tokens": "is an activated LoRA, which changes only some tokens",
    "use_qalora": "adds to means of quantized groups",
    "use_bdlora": "is a LoRA in diagonal blocks",
    "arrow_config": "is a router over several adapters",
    "kasa_config": "has its base cut to some singular values",
    "monteclora_config": "samples its weights",
    "trainable_token_indices": "trains some rows of the embedding",
    "lora_bias": "has biases of its own",
}
"""Setting: the variant of LoRA that it turns on, none of which can be merged, as a clause of the error message."""
TRUTH, MAP, OWN = "true or false", "a map", "a map or null"
START, NAMES = "true, false or a name", "a list or null"
KINDS = {
    **dict.fromkeys(("use_rslora", "use_dora", "fan_in_fan_out"), TRUTH),
    **dict.fromkeys(("rank_pattern", "alpha_pattern"), MAP),
    **dict.fromkeys(("velora_config", "lora_ga_config", "corda_config", "eva_config", "loftq_config"), OWN),
    **dict.fromkeys(("kasa_config", "arrow_config", "use_bdlora"), OWN),
    "bias": "none, all or lora_only",
    "init_lora_weights": START,
    "target_parameters": NAMES,
}
"""Setting: what it has to be, if it is there; PEFT loads no other, or takes each other text for true."""
HOLDS: Mapping[str, Callable[[Any], bool]] = {
    TRUTH: lambda value: isinstance(value, bool | None),
    MAP: lambda value: isinstance(value, dict),
    OWN: lambda value: isinstance(value, dict | None),
    START: lambda value: isinstance(value, bool | str | None),
    NAMES: lambda value: isinstance(value, list | None),
    KINDS["bias"]: lambda value: value in ("none", "all", "lora_only"),
}
"""Whether a value is what a setting has to be."""
COPY = "copy the one that PEFT wrote"
PEFT_MERGES = (
    "merge it with PEFT, if it can: PeftModel.from_pretrained(BASE, ADAPTER).merge_and_unload().save_pretrained(OUT)"
)


def read_config(places: Sequence[Path]) -> dict[str, Any]:
    """The settings of a LoRA, from the first of some folders that has an adapter_config.json.

    Raises:
        SourceError: no folder has one, or PEFT does not load its settings.
        UnsupportedError: the settings are not those of a LoRA that can be merged.
        RefusedError: folders have settings that differ in what is read here.
    """
    files = [place / CONFIG for place in places if (place / CONFIG).is_file()]
    if not files:
        raise SourceError(f"{places[0]} holds no {CONFIG}", "copy the one that PEFT or the trainer wrote into it")
    configs = [read_json(file) for file in files]
    for file, config in zip(files[1:], configs[1:], strict=True):
        if odd := _differing(configs[0], config):
            raise RefusedError(f"{files[0]} and {file} differ in {some(odd, 3)}", "keep the one of this adapter alone")
    require_lora(configs[0], files[0])
    return configs[0]


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """The settings that two configs do not have alike; lists are sets of names, the base may be named by its folder."""
    names = sorted((one.keys() | other.keys()) - {*FREE, "base_model_name_or_path"})
    return [name for name in names if _comparable(one.get(name)) != _comparable(other.get(name))]


def _comparable(value: Any) -> Any:
    """A setting as it is compared: a list sorted; what is empty, or a bias of `none`, as what is absent."""
    if isinstance(value, list):
        value = sorted(value, key=str)
    return None if value is False or value in ([], {}, "none") else value


def require_lora(config: Mapping[str, Any], where: Path) -> None:
    """Refuse settings that are not those of a LoRA that can be merged into its base.

    Raises:
        UnsupportedError: the settings are of another method, of a variant, or unknown.
        SourceError: PEFT itself does not load the settings.
    """
    method = config.get("peft_type")
    if method != "LORA":
        raise UnsupportedError(f"{where} is of the method {short(method)}, and only LORA is merged here", PEFT_MERGES)
    for name, what in ONLY.items():
        if config.get(name) or config.get(name) == {}:
            raise UnsupportedError(f"{where} says {name} = {short(config[name])}: it {what}", PEFT_MERGES)
    for name, kind in KINDS.items():
        if name in config and not HOLDS[kind](config[name]):
            raise SourceError(f"{where} says {name} = {short(config[name])}, it has to be {kind}", COPY)
    init = config.get("init_lora_weights", True)
    if init not in UNCHANGED:
        raise UnsupportedError(
            f"{where} says init_lora_weights = {short(init)}, which changed the weights of its base when it began",
            "save it with path_initial_model_for_weight_conversion of PEFT, which makes a plain LoRA of it",
        )
    unknown = [name for name, value in config.items() if value and name not in {*READ, *FREE, *ONLY}]
    if unknown:
        raise UnsupportedError(
            f"{where} says {unknown[0]} = {short(config[unknown[0]])}, which no PEFT up to 0.21 has", PEFT_MERGES
        )
    for name, value in ((name, config.get(name)) for name in NAMING):
        alone = isinstance(value, str | None) or (name == "layers_to_transform" and type(value) is int)
        entries = int if name == "layers_to_transform" else str
        if not alone and not (isinstance(value, list) and all(type(entry) is entries for entry in value)):
            raise SourceError(f"{where} says {name} = {short(value)}, which names nothing", COPY)
    if config.get("target_modules") is None and not config.get("target_parameters"):
        raise SourceError(f"{where} names no target_modules, for which PEFT takes its own of the model type", COPY)
    layers, pattern = config.get("layers_to_transform"), config.get("layers_pattern")
    by_expression = isinstance(config.get("target_modules"), str) and (layers is not None or pattern is not None)
    if by_expression or (pattern and layers is None):  # tuners/lora/config.py `__post_init__`, peft 0.21
        names = "layers_to_transform or layers_pattern beside an expression in target_modules"
        names = names if by_expression else "layers_pattern without layers_to_transform"
        raise SourceError(f"{where} has {names}, which PEFT does not load", COPY)
