"""NEFTune: noise on the embeddings during training, scaled for each document.

The paper's scale is alpha / sqrt(length x width) of a sequence. A packed row has many sequences, so `length` is that of
the document. The row's length would make the noise several times too small (transformers 5.23.0
integrations/neftune.py takes `output.size(1)`, the row).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from train.data.rows import Flat
from train.settings.batching import seed_of


def noise_for(model: Any, flat: Flat, alpha: float, seed: tuple[int, ...]) -> torch.Tensor:
    """Noise for flattened rows, a function of the seed only.

    Args:
        model: a model of transformers; only the width of its embedding is read.
        flat: the rows.
        alpha: strength of the noise, `neftune_alpha`.
        seed: the training's seed, and the step, rank and micro-batch.

    Returns:
        float32[1, n, width], uniform between minus and plus alpha / sqrt(length of the document x width).
    """
    width = int(model.config.hidden_size)
    lengths = np.diff(flat.cu_seqlens)
    scale = alpha / np.sqrt(np.repeat(lengths, lengths) * width)
    generator = torch.Generator().manual_seed(seed_of(*seed))
    noise = torch.rand(1, len(flat.input_ids), width, generator=generator) * 2 - 1
    return noise * torch.from_numpy(scale.astype(np.float32))[None, :, None]
