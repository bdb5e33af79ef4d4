"""Each checkpoint of the Trainer of transformers becomes a Hub-ready folder while it trains: `… BASE RUN OUT`."""

import sys

import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from vitruvian.transformers import ExportCallback

base, run, out = sys.argv[1:]
rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)} for _ in range(8)]
arguments = TrainingArguments(run, max_steps=2, save_steps=1, report_to=[], use_cpu=True, disable_tqdm=True)
callback = ExportCallback(out, waiting=2, strict=True)
Trainer(AutoModelForCausalLM.from_pretrained(base), arguments, train_dataset=rows, callbacks=[callback]).train()
