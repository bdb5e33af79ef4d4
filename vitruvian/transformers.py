"""For the Trainer of transformers: `vitruvian.transformers.ExportCallback`."""

from vitruvian import beside

beside.load("converters.library")

from converters.library.frameworks.trainer_callback import ExportCallback  # noqa: E402

__all__ = ["ExportCallback"]
