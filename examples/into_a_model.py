"""Fill a model of transformers from a run of any trainer, without a copy on disk: `into_a_model.py ANY BASE`."""

import sys

import torch
from accelerate import init_empty_weights
from transformers import AutoConfig, AutoModelForCausalLM

import vitruvian.torch

run, base = sys.argv[1:]
with init_empty_weights(include_buffers=False):
    config = AutoConfig.from_pretrained(base)
    model = AutoModelForCausalLM.from_config(config, dtype=config.dtype)
loaded = vitruvian.torch.load(model, run)
print(f"{len(loaded.names)} tensors; logits {tuple(model(torch.tensor([[1, 2, 3]])).logits.shape)}")
