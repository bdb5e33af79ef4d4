"""The tensor names that only trainers use: torchtitan's, which Meta's Llama files have too, and OLMo-core's.

Facts of torchtitan: pytorch/torchtitan at v0.1.0, v0.2.0, v0.2.2 and b5bcd76c, `state_dict_adapter.py` and `model.py`
of models/llama3 and models/qwen3; of mixtures torchtitan 0.3.0 (PyPI), the same files of models/deepseek_v3, gpt_oss
and qwen3, and moe.py. w1 is the gate, w3 is up, w2 is down. Llama rotates neighbouring rows of a head (`pair half`),
Qwen3 rotates halves as Hugging Face does.

Facts of OLMo-core: ai2-olmo-core 3.0.0 (PyPI), nn/hf/convert.py, nn/transformer and train/checkpoint.py; files that
it wrote, and its logits, are in tests/golden/olmo_core.
"""

from collections.abc import Collection, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from formats.errors import RefusedError
from formats.families import FAMILIES
from formats.huggingface.rope import LOCAL
from formats.layout.slots import Slot
from formats.layout.table import Rule, rules
from formats.model.accepted import EXPERT_BIAS
from formats.model.spec import ModelSpec, Spec


class Names(NamedTuple):
    """The tensor names of a trainer.

    Attributes:
        sign: a key by which the names are recognised.
        container: the path of the model in the trainer's checkpoints, before each key.
        optimizer: whether an optimizer is written too, its settings under the key of each parameter (torch's flattened
            form).
    """

    sign: str
    container: tuple[str, ...]
    optimizer: bool = False


TORCHTITAN, OLMO_CORE = "torchtitan", "olmo-core"
TRAINERS = {
    TORCHTITAN: Names("tok_embeddings.weight", ()),
    OLMO_CORE: Names("blocks.0.attention.w_out.weight", ("model",), optimizer=True),
}
DROPS = (r"freqs_cis",)
BIAS = EXPERT_BIAS
"""Last part of the key of a router's bias, which is added to the scores to choose experts. torchtitan trains it in any
mixture unless `load_balance_coeff` is None (moe.py); of these families only DeepSeek-V3 has it in transformers."""


LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
YARN = {"rope_type": "yarn", "original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0}


def alternating(spec: ModelSpec) -> list[str]:
    """The kind of attention of each layer, the first one with a window."""
    return [("sliding_attention", "full_attention")[layer % 2] for layer in range(spec.layers)]


def three_of_four(spec: ModelSpec) -> list[str]:
    """The kind of attention of each layer, every fourth and the last one without a window."""
    full = {*range(3, spec.layers, 4), spec.layers - 1}
    return ["full_attention" if layer in full else "sliding_attention" for layer in range(spec.layers)]


def theta_of_mixtures(spec: ModelSpec) -> float:
    """The rotary base of the Qwen3 mixtures of torchtitan: 5e6 in that of 235B parameters, else 1e6."""
    return 5e6 if spec.rope_theta == 5e6 else 1e6


STOCK: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    TORCHTITAN: {
        "llama": {"norm_epsilon": 1e-5, "rope_theta": 5e5, "rope_scaling": LLAMA3},
        "qwen3": {"norm_epsilon": 1e-6, "rope_theta": 1e6, "rope_scaling": None},
        "qwen3_moe": {
            "norm_epsilon": 1e-6, "rope_theta": theta_of_mixtures, "rope_scaling": None, "router_normalized": True,
        },
        "gpt_oss": {
            "norm_epsilon": 1e-5, "rope_theta": 1.5e5, "sliding_window": 128, "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0, "rope_scaling": {**YARN, "factor": 32.0, "truncate": False},
            "layer_types": alternating,
        },
        "deepseek_v3": {
            "rope_theta": 1e4, "rope_scaling": {**YARN, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0},
            "router_normalized": True, "router_scale": 2.5,
        },
        "qwen3_5_text": {"norm_epsilon": 1e-6, "rope_theta": 1e7, "rope_scaling": None},
        "qwen3_5_moe_text": {
            "norm_epsilon": 1e-6, "rope_theta": 1e7, "rope_scaling": None, "router_normalized": True,
        },
    },
    OLMO_CORE: {
        "olmo2": {"norm_epsilon": 1e-6, "rope_theta": 5e5, "rope_scaling": None},
        "olmo3": {
            "norm_epsilon": 1e-6, "rope_theta": 5e5, "rope_scaling": None, "sliding_window": 4096,
            "layer_types": three_of_four, LOCAL: 5e5,
        },
    },
}  # fmt: skip
"""Trainer and family: settings of all its own models. Of torchtitan 0.3.0 (`__init__.py` of models/*, of DeepSeek-V3
those with a sigmoid router; 1e-5 is the default of its RMSNorm, and a Llama has this scaling from v0.2.0 on, which a
Llama 3.2 has not); of OLMo-core 3.0.0 (nn/transformer/config.py, `olmo2_7B` and `olmo3_7B` and those beside them)."""
RECORDS = {
    TORCHTITAN: "its checkpoints do not record it",
    OLMO_CORE: "what it loads does not record it: its own config has to say it",
}
REMARKS = {
    "deepseek_v3": "torchtitan's own DeepSeek-V3 computes all norms with an epsilon of 1e-05, and its checkpoints do "
    "not record it: transformers computes those of latents with 1e-06, the others with that of the config",
}
"""Family: what differs from transformers in torchtitan's own models, whatever the config says."""


def notes(spec: Spec, trainer: str | None) -> tuple[str, ...]:
    """Notes on what a trainer's own models of a kind compute otherwise than transformers does with this model."""
    if trainer is None or not isinstance(spec, ModelSpec):
        return ()
    texts = []
    for name, value in STOCK[trainer].get(spec.family, {}).items():
        ours = spec.own[name] if name in spec.own else getattr(spec, name)
        theirs = value(spec) if callable(value) else value
        by_default = name in spec.own and ours is None  # what transformers takes then is what the trainer has
        if ours != theirs and not by_default:
            texts.append(
                f"the config says {name} = {_said(ours)}: that of {trainer}'s own models of this kind is "
                f"{_said(theirs)}, and {RECORDS[trainer]}"
            )
    return (*texts, *([REMARKS[spec.family]] if spec.family in REMARKS else ()))


def _said(value: Any) -> str:
    """A setting in a message; of a rotary scaling its type and parameters."""
    if not isinstance(value, Mapping):
        return str(value)
    parameters = (f"{name}={parameter}" for name, parameter in sorted(value.items()) if name != "rope_type")
    return f"{value.get('rope_type')} ({', '.join(parameters)})"


def biases(slots: Iterable[Slot], keys: Iterable[str], spec: Spec, accept: Collection[str], where: Path) -> list[str]:
    """The keys of router biases that have no slot in the model.

    Raises:
        RefusedError: there are such keys, and `accept` does not contain `BIAS`.
    """
    placed = {key for slot in slots for key in slot.keys}
    expert_biases = [key for key in keys if key.rpartition(".")[2] == BIAS and key not in placed]
    if expert_biases and BIAS not in accept:
        raise RefusedError(
            f"{where}: {len(expert_biases)} routers have a bias by which the training chose experts, such as "
            f"{expert_biases[0]}, and a {spec.family} has none",
            f"--accept {BIAS} leaves it out, as torchtitan's export does: experts are chosen by their scores alone",
        )
    return expert_biases


def trainer_of(keys: Collection[str]) -> str | None:
    """The trainer whose own names some keys are; None if they are no trainer's."""
    return next((trainer for trainer, names in TRAINERS.items() if names.sign in keys), None)


@cache
def layouts(trainer: str) -> dict[str, tuple[Rule, ...]]:
    """The layout of each family in the names of a trainer; called only when needed, as it imports every family."""
    return {name: rules(family.native[trainer]) for name, family in FAMILIES.items() if trainer in family.native}
