"""The defaults of the classes of Megatron-Bridge and NeMo 2 that a file may leave out and no tensor shows.

Bridge writes all fields of a class, and NeMo those alone that were passed to it (lightning/io/mixin.py
`_io_transform_args`). Other fields without a value are refused where they are read, or show in the shapes and names of
tensors: heads, biases, norms of queries and keys, experts, a head of its own. Where releases differ, the user is asked.

Facts: NeMo 2.0 to 2.5, collections/llm/gpt/model/ (base, llama, mistral, mixtral, qwen3); Megatron-Bridge
0.1 to 0.6, models/gpt_provider.py and llama/llama_provider.py, which 0.4 has no more. Classes of Llama 3.1 scale twice
where `rope_scaling` is on too: megatron-core builds the scaled frequencies, and the class scales them (`provide`).
Norms are those of megatron-core 0.13 to 0.19, transformer/transformer_config.py, where a class has none of its own.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from formats.errors import RefusedError, short
from formats.megatron.args.provider import TARGET
from formats.model.values import positive_float

POSITIONS = "max_position_embeddings"
NEMO, BRIDGE = r"nemo\.collections\.llm\.gpt\.model\.", r"megatron\.bridge\.models\."
DEFAULTS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    (rf"{BRIDGE}.*", {"rope_scaling_factor": 1.0}),
    (rf"{BRIDGE}gpt_provider\.GPTModelProvider|{NEMO}base\.\w+", {"normalization": "LayerNorm"}),
    (rf"{NEMO}mistral\.MistralConfig7B", {"window_size": [4096, 0]}),
    (rf"{NEMO}(base\.GPTConfig\d|llama\.|mixtral\.)\w+|{BRIDGE}llama\..*", {"bias_activation_fusion": True}),
    (rf"{NEMO}base\.GPTConfig175B", {"layernorm_zero_centered_gamma": True}),
    (rf"{NEMO}mixtral\.\w+", {POSITIONS: 4096}),
    (rf"{NEMO}qwen3\.\w+", {POSITIONS: 40960}),
)
"""By pattern of classes: the defaults that differ from what a file without the field is read as."""
IN_DOUBT = (
    (
        rf"{NEMO}mixtral\.\w+", "moe_router_pre_softmax", "router_normalized",
        "True in NeMo 2.0.0 to 2.3.2 and False since 2.4.0",
        "--set router_normalized=true (since 2.4.0) or --set router_normalized=false (before)",
    ),
    (
        rf"{NEMO}mixtral\.MixtralConfig8x22B", POSITIONS, "max_positions",
        "65536 in NeMo 2.2 and 4096 before and since",
        "--set max_positions=65536 (2.2) or --set max_positions=4096 (before and since)",
    ),
)  # fmt: skip
"""Defaults in which the releases differ: pattern of the classes, field, setting, what the releases have, and a hint."""
LLAMA = rf"({NEMO}llama|{BRIDGE}llama\.\w+)\."
SCALING = {rf"{LLAMA}Llama31\w+": 8.0, rf"{LLAMA}Llama32\w+": 32.0}
"""The factor by which a class scales its rotary embedding, by pattern."""
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "old_context_len": 8192}
"""The fields for the scaling beside its factor: their defaults, and the only values that megatron-core has."""
FACTOR = "scale_factor"
"""The field for the factor: in NeMo, and in Bridge before 0.3.1, which has the fields in `CORE`."""
CORE = ("rope_scaling", "rope_scaling_factor")


def with_defaults(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a class, with its defaults of `DEFAULTS`."""
    kind = str(fields.get(TARGET))
    known = [defaults for pattern, defaults in DEFAULTS if re.fullmatch(pattern, kind)]
    return {**{name: value for defaults in known for name, value in defaults.items()}, **fields}


def require_decided(fields: Mapping[str, Any], settings: Collection[str], where: str) -> None:
    """Refuse a file without a field in whose default the releases of its class differ.

    Args:
        fields: those in the file, without defaults.
        settings: the settings that the user passed, which overrule the file.
        where: what to call the file in an error.

    Raises:
        RefusedError: it is such a file.
    """
    kind = str(fields.get(TARGET))
    for pattern, name, setting, values, hint in IN_DOUBT:
        if name not in fields and setting not in settings and re.fullmatch(pattern, kind):
            own = short(kind.rpartition(".")[2])
            raise RefusedError(f"{where}: no {name}, which the class {own} has {values}", hint)


def of_scaling(fields: Mapping[str, Any]) -> Collection[str]:
    """The fields that a class has for the scaling of Llama 3.1, and GPTModelProvider has not."""
    return (FACTOR, *LLAMA3) if _factor(fields) else ()


def llama3(fields: Mapping[str, Any], settings: Collection[str], where: str) -> dict[str, Any]:
    """The args for the rope scaling of a class of Llama 3.1 or 3.2; empty for other classes.

    Args:
        fields: those in the file, without defaults.
        settings: the settings that the user passed, which overrule the file.
        where: what to call the file in an error.

    Raises:
        RefusedError: megatron-core has no such scaling, the file has it twice, or the releases differ in its meaning.
        SourceError: the factor is no positive number.
    """
    default, own = _factor(fields), {FACTOR, *LLAMA3}.intersection(fields)
    if default is None or "rope_scaling" in settings:
        return {}
    kind = short(str(fields[TARGET]).rpartition(".")[2])
    if own and fields.get(CORE[0]):
        raise RefusedError(
            f"{where}: {CORE[0]} = True, and {', '.join(sorted(own))} of the class {kind}, which scales once more",
            _hint(default, "one scaling"),
        )
    if not own and {*CORE}.intersection(fields):
        if not fields.get(CORE[0], True):
            raise RefusedError(
                f"{where}: {CORE[0]} = {short(fields[CORE[0]])} and no {FACTOR}: the class {kind} scales by {default} "
                "in NeMo and in Megatron-Bridge before 0.3.1, which have no such field, and not at all in Bridge since",
                f"{_hint(default, 'NeMo, Bridge before 0.3.1')} or --set rope_scaling=none (since)",
            )
        return {"use_rope_scaling": True, "rope_scaling_factor": fields.get(CORE[1], default)}
    known = {FACTOR: default, **LLAMA3, **fields}
    for name, only in LLAMA3.items():
        if known[name] != only:
            raise RefusedError(f"{where}: {name} = {short(known[name])}, and megatron-core has {only} alone")
    return {"use_rope_scaling": True, "rope_scaling_factor": positive_float(known[FACTOR], FACTOR, where)}


def _factor(fields: Mapping[str, Any]) -> float | None:
    kind = str(fields.get(TARGET))
    return next((factor for pattern, factor in SCALING.items() if re.fullmatch(pattern, kind)), None)


def _hint(factor: float, whose: str) -> str:
    numbers = f'"factor":{factor},"low_freq_factor":1.0,"high_freq_factor":4.0,"original_max_position_embeddings":8192'
    return f"""--set 'rope_scaling={{"rope_type":"llama3",{numbers}}}' ({whose})"""
