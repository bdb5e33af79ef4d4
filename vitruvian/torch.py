"""Load weights into a torch model, or iterate over them: `vitruvian.torch.load`, `vitruvian.torch.iterate`."""

from vitruvian import beside

beside.load("converters.library")

from converters.library.frameworks.into_model import Loaded, iterate, load  # noqa: E402

__all__ = ["Loaded", "iterate", "load"]
