"""For axolotl: `vitruvian.axolotl.ExportPlugin`."""

from vitruvian import beside

beside.load("converters.library")

from converters.library.frameworks.axolotl_plugin import ExportArgs, ExportPlugin  # noqa: E402

__all__ = ["ExportArgs", "ExportPlugin"]
