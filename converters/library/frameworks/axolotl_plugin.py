"""The plug-in of axolotl that exports each checkpoint at its save.

As of axolotl 0.19.0, integrations/base.py and integrations/config.py: `plugins` of the config names a class as
MODULE.CLASS; `get_input_args` names a pydantic model whose fields the config may then have; the callbacks that
`add_callbacks_post_trainer` returns are added to its Trainer, which is that of transformers.
"""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel

from converters.library.frameworks.trainer_callback import ExportCallback
from formats.errors import UsageError

NAME = "vitruvian_export"
"""The key in axolotl's config that holds the arguments of `ExportCallback`."""


class ExportArgs(BaseModel):
    """The fields that the plug-in adds to axolotl's config."""

    vitruvian_export: dict[str, Any] | None = None


class ExportPlugin(BasePlugin):  # type: ignore[misc]  # axolotl need not be installed
    """Exports each checkpoint that axolotl saves: `plugins: [vitruvian.axolotl.ExportPlugin]`.

    `vitruvian_export` of the config holds the arguments of `vitruvian.transformers.ExportCallback`: `out`, and others
    by name. The default of `config` is the `base_model` of axolotl's config.
    """

    def get_input_args(self) -> str:
        """The name of the pydantic model with the plug-in's fields."""
        return "vitruvian.axolotl.ExportArgs"

    def add_callbacks_post_trainer(self, cfg: Any, trainer: Any) -> list[ExportCallback]:
        """The callbacks for the Trainer.

        Raises:
            UsageError: the config names no folder, or an option does not exist.
        """
        del trainer
        settings = dict(cfg.vitruvian_export or {})
        if not settings.get("out"):
            raise UsageError(f"the config names no folder for exports: {NAME} has no out", f"{NAME}: {{out: hub}}")
        return [ExportCallback(**{"config": cfg.base_model, **settings})]
