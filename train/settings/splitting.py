"""Which models can be split over ranks by tensor parallelism; checked before weights are loaded."""

from __future__ import annotations

from formats.errors import UnsupportedError
from formats.model.spec import ModelSpec, Spec

FAMILIES = (
    "arcee", "cwm", "ernie4_5", "exaone4", "gemma2", "gemma3_text", "glm4", "gpt_neox", "granite", "helium", "jais2",
    "llama", "ministral", "ministral3", "mistral", "nemotron", "olmo2", "olmo3", "opensci", "phi3", "qwen2", "qwen3",
)  # fmt: skip
"""Families whose plan in transformers 5.23.0 gives the same gradients as one rank. The plans of experts and of latent
attention have styles that are not handled; the plan of Apertus gives wrong gradients of the activations' parameters,
and the plan of Gemma 4 does not run."""


def require_divisible(tensor: int, spec: Spec) -> None:
    """Check that tensor parallelism can split a model.

    Args:
        tensor: number of ranks that each compute a part of every layer; 1 for no tensor parallelism.
        spec: the model.

    Raises:
        UnsupportedError: transformers has no plan that is right for the family, or the sizes cannot be divided.
    """
    if tensor == 1:
        return
    if not isinstance(spec, ModelSpec) or spec.family not in FAMILIES:
        family = spec.family if isinstance(spec, ModelSpec) else "a model of no known family"
        raise UnsupportedError(
            f"{family} cannot be split by parallel.tensor: {', '.join(FAMILIES)} can", "--parallel.tensor 1"
        )
    sizes = {"query heads": spec.heads, "key/value heads": spec.kv_heads, "elements inside an MLP": spec.ffn}
    for what, size in sizes.items():
        if size % tensor:
            raise UnsupportedError(f"{size} {what} cannot be split by parallel.tensor {tensor}", "--parallel.tensor 1")
