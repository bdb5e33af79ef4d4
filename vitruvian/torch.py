"""Weights into a model of torch, and tensors of torch one by one: `vitruvian.torch.load`, `vitruvian.torch.iterate`."""

from vitruvian import beside

beside.load("converters.library")

from converters.library.frameworks.into_model import Loaded, iterate, load  # noqa: E402

__all__ = ["Loaded", "iterate", "load"]
