"""For SGLang: `vitruvian.sglang.CheckpointLoader`."""

from vitruvian import beside

beside.load("converters.library")

from converters.library.frameworks.sglang_loader import CheckpointLoader  # noqa: E402

__all__ = ["CheckpointLoader"]
