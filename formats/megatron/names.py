"""Names in classic files that differ between versions; a reader accepts either name.

Facts: megatron-core at the heads of core_r0.16.0 to core_r0.19.0, transformer/multi_token_prediction.py and
ssm/mamba_mixer.py, whose torch_dist keeps the older names.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from formats.layout.table import Rule
from formats.megatron.args.versions import is_between

RENAMED = (
    ("transformer_layer", "mtp_model_layer", "0.17"),
    ("conv1d.weight", "conv1d_weight", "0.19"),
    ("conv1d.bias", "conv1d_bias", "0.19"),
)
"""Old name, new name, and the first version with the new name."""


def of_version(table: Iterable[Rule], version: str) -> tuple[Rule, ...]:
    """The table with the names that a version writes."""
    spelled = {f"{{{old}|{new}}}": new if is_between(version, first) else old for old, new, first in RENAMED}

    def key(rule: Rule) -> str:
        pair = next((pair for pair in spelled if pair in rule.key), "")
        return rule.key.replace(pair, spelled[pair]) if pair else rule.key

    return tuple(replace(rule, key=key(rule)) for rule in table)
