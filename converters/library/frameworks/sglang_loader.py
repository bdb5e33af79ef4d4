"""A loader of SGLang that reads a checkpoint of any format.

As of SGLang 0.5.23, srt/model_loader/loader.py: `get_model_loader` calls a `load_format` that is a class;
`DefaultModelLoader` takes names and tensors from `_get_all_weights`. Its constructor refuses an extra config that it
does not know.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from sglang.srt.model_loader.loader import DefaultModelLoader
from torch import nn

from converters.library.frameworks.serving import opened, weights
from formats.errors import UnsupportedError


class CheckpointLoader(DefaultModelLoader):  # type: ignore[misc]  # SGLang need not be installed
    """Loads a checkpoint of any format into a model of SGLang: `load_format=CheckpointLoader`.

    The model that SGLang is given is the Hugging Face folder with config and tokenizer; the extra config names the
    checkpoint: `{"checkpoint": "run/"}`, and options of `vitruvian.open` and `vitruvian.torch.iterate`.

    Args:
        load_config: the LoadConfig of SGLang.
    """

    def __init__(self, load_config: Any) -> None:
        super().__init__(replace(load_config, model_loader_extra_config={}))
        self.load_config = load_config

    def download_model(self, model_config: Any) -> None:
        """Open the checkpoint: nothing is downloaded."""
        opened(self.load_config.model_loader_extra_config, model_config.model_path, model_config.revision)

    def _get_all_weights(self, model_config: Any, model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and tensor of all weights that are loaded into the model."""
        config, draft = self.load_config.model_loader_extra_config, self.load_config.draft_model_idx
        if draft is not None:
            raise UnsupportedError(
                f"SGLang asks for layer {draft} of multi-token prediction by itself, under another name",
                "convert the checkpoint to a Hugging Face folder, and serve that",
            )
        yield from weights(config, model_config.model_path, model_config.revision, model)
