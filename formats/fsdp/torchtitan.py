"""The native names of torchtitan, which are those of Meta's own Llama files too.

Facts: pytorch/torchtitan at v0.1.0, v0.2.0, v0.2.2 and b5bcd76c, `state_dict_adapter.py` and `model.py` of
models/llama3 and models/qwen3; of mixtures torchtitan 0.3.0 (PyPI), the same files of models/deepseek_v3, gpt_oss and
qwen3, and moe.py. w1 is the gate, w3 is up, w2 is down. Llama rotates neighbouring rows of a head
(`pair half`), Qwen3 rotates halves as Hugging Face does.
"""

from functools import cache

from formats.families import FAMILIES
from formats.layout.table import Rule, rules

FIRST = "tok_embeddings.weight"
"""The key that gives these names away."""

DROPS = (r"freqs_cis",)


@cache
def layouts() -> dict[str, tuple[Rule, ...]]:
    """The layout of each family that has these names. Asks for every family, so not before somebody wants to know."""
    return {name: rules(family.torchtitan) for name, family in FAMILIES.items() if family.torchtitan}
