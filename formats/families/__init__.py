"""Model families. A family is one file here: a table of Hugging Face names and the facts of its config.

To add one, copy the nearest file, change its table, and add its golden tests; nothing else lists the families.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, NamedTuple

from formats.errors import UnsupportedError, short
from formats.layout import Rule


class Facts(NamedTuple):
    """What arguments that name no family say of a model, and only some families have.

    Biases on query, key and value; norms on each query and key head; a sliding window; heads that rotate in part;
    LayerNorm, biases everywhere and an MLP without a gate. Of a mixture of experts, the tensors of `EXPERTS` that it
    has and how its router makes weights of scores.
    """

    qkv_bias: bool = False
    qk_norm: bool = False
    window: bool = False
    partial: bool = False
    plain: bool = False
    experts: frozenset[str] = frozenset()
    router: str = ""


EXPERTS = frozenset({"router", "router_bias", "shared_up", "shared_router"})
"""The tensors that tell one mixture of experts from another."""


@dataclass(frozen=True)
class Family:
    """One model family.

    Attributes:
        name: `model_type` of its config.json.
        architecture: its class in transformers.
        tensors: the layout of its Hugging Face files.
        drops: regular expressions of keys in those files that carry no weights.
        requires: config keys that must have one value, or be absent.
        rope_theta: what transformers assumes when the config names none.
        head_dim: the same for the head dimension; None for hidden size / heads.
        mha: whether it assumes as many key/value heads as heads.
        window: the config key of its sliding window, if it has one, and what transformers assumes.
        keys: setting: config key, where the family has one of its own; empty where it has none, every head being alike.
        defaults: setting: what transformers assumes of those.
        own: config keys that change what the model computes and that no other format has, and what transformers
            assumes (None where that depends on others). A family with such keys has an `only_here`.
        only_here: why Megatron cannot hold the model; empty where it can.
        router: how a mixture of experts makes weights of the router's scores: `softmax` or `sigmoid`.
        full_until: the config key that says how many layers have full attention, and what transformers assumes; the
            model may not have more.
    """

    name: str
    architecture: str
    tensors: tuple[Rule, ...]
    drops: tuple[str, ...] = ()
    requires: Mapping[str, Any] = field(default_factory=dict)
    rope_theta: float = 10000.0
    head_dim: int | None = None
    mha: bool = False
    window: str = ""
    window_default: int | None = None
    keys: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    own: Mapping[str, Any] = field(default_factory=dict)
    only_here: str = ""
    router: str = ""
    full_until: tuple[str, int] | None = None

    @property
    def qkv_bias(self) -> bool:
        """Whether query, key and value have biases."""
        return any("query_bias" in rule.pattern.tensors for rule in self.tensors)

    @property
    def qk_norm(self) -> bool:
        """Whether each query and key head is normalised."""
        return any("query_norm" in rule.pattern.tensors for rule in self.tensors)

    @property
    def plain(self) -> bool:
        """Whether the MLP has no gate, which every model that descends from Llama has."""
        return not any({"gate", "expert_gate"} & set(rule.pattern.tensors) for rule in self.tensors)

    @property
    def experts(self) -> frozenset[str]:
        """The tensors of `EXPERTS` that its models have; none without experts."""
        return EXPERTS.intersection(name for rule in self.tensors for name in rule.pattern.tensors)

    def fits(self, facts: Facts) -> bool:
        """Whether a model of Megatron with these facts can belong to the family."""
        return (
            not self.only_here
            and (self.qkv_bias, self.qk_norm, self.plain) == (facts.qkv_bias or facts.plain, facts.qk_norm, facts.plain)
            and (self.experts, self.router) == (facts.experts, facts.router)
            and (bool(self.window) or not facts.window)
            and ("rotary_fraction" in self.keys or not facts.partial)
        )


def family_named(name: Any, where: str = "") -> Family:
    """The family of a `model_type`.

    Raises:
        UnsupportedError: there is none; the message lists those that exist.
    """
    if not isinstance(name, str) or name not in FAMILIES:
        source = f"{where}: " if where else ""
        raise UnsupportedError(
            f"{source}the model type {short(name)} is not supported", f"supported: {', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[name]


_found = [import_module(f"{__name__}.{module.name}").FAMILY for module in iter_modules(__path__)]
FAMILIES: Mapping[str, Family] = {family.name: family for family in _found}
"""Every family, by name."""
