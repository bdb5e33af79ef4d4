"""For vLLM: `vitruvian.vllm.CheckpointLoader`, which importing this registers; vLLM does so, by the entry point."""

from vitruvian import beside

beside.load("converters.library")

from converters.library.frameworks.vllm_loader import CheckpointLoader  # noqa: E402

__all__ = ["CheckpointLoader", "register"]


def register() -> None:
    """Do nothing: vLLM calls this in each of its processes, and importing the module has registered the loader."""
