"""Expressions in the settings of a LoRA: those whose matching takes no end are refused, and no ordinary ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from formats.errors import UnsupportedError
from formats.huggingface.lora_config import require_lora

ORDINARY = [
    r".*\.(q_proj|v_proj)",
    r"^(?!.*visual).*(q|k|v)_proj$",
    "all-linear",
    r"model\.layers\.(\d+)\.(self_attn|mlp)\..*",
    r"(?:.*?(?:language|text).*?(?:self_attn|attn|mlp|ffn).*?(?:k_proj|v_proj|q_proj).*?)|"
    r"(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:q_proj|up_proj)))",
    r"model\.(layers\.\d+\.)?.*(attn|mlp)?\.[a-z_]+",
    r"model\.layers\.([0-9]|1[0-9])\..*",
]
ENDLESS = [r"([a-z_.0-9]+)+!", r"(a.*b)*", r"(a|a)*x!|(?:aa|a)+", r"(?=(\w+)*$)", r"(a?){30}b", r"(x(y|zz))*"]


def settings(name: str, text: str) -> dict[str, object]:
    """Settings in which one has an expression."""
    value = {text: 4} if name.endswith("_pattern") else text
    return {"peft_type": "LORA", "target_modules": ["q_proj"], "r": 4, "lora_alpha": 4} | {name: value}


@pytest.mark.parametrize("name", ["target_modules", "exclude_modules", "rank_pattern", "alpha_pattern"])
def test_expressions(name):
    for text in ORDINARY:
        require_lora(settings(name, text), Path("adapter_config.json"))
    for text in ENDLESS:
        with pytest.raises(UnsupportedError, match=f"says {name} = .*a repeat contains"):
            require_lora(settings(name, text), Path("adapter_config.json"))
