"""A loader of vLLM that reads a checkpoint of any format.

As of vLLM 0.33.0, model_executor/model_loader: `register_model_loader` in __init__.py names a class for `load_format`;
`DefaultModelLoader` in default_loader.py takes names and tensors from `get_all_weights`, and refuses parameters of the
model that no tensor was loaded into. Its constructor refuses an extra config that it does not know.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from vllm.model_executor.model_loader import DefaultModelLoader, register_model_loader

from converters.library.frameworks.serving import FORMAT, opened, weights


@register_model_loader(FORMAT)
class CheckpointLoader(DefaultModelLoader):  # type: ignore[misc]  # vLLM need not be installed
    """Loads a checkpoint of any format into a model of vLLM: `--load-format vitruvian`.

    The model that vLLM is given is the Hugging Face folder with config and tokenizer; the extra config names the
    checkpoint: `{"checkpoint": "run/"}`, and options of `vitruvian.open` and `vitruvian.torch.iterate`.

    Args:
        load_config: the LoadConfig of vLLM.
    """

    def __init__(self, load_config: Any) -> None:
        super().__init__(replace(load_config, model_loader_extra_config={}))
        self.load_config = load_config

    def download_model(self, model_config: Any) -> None:
        """Open the checkpoint: nothing is downloaded."""
        opened(self.load_config.model_loader_extra_config, model_config.model, model_config.revision)

    def get_all_weights(self, model_config: Any, model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and tensor of all weights that are loaded into the model."""
        self.counter_before_loading_weights = time.perf_counter()
        config = self.load_config.model_loader_extra_config
        yield from weights(config, model_config.model, model_config.revision, model)
