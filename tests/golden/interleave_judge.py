"""Judge: what do the grouped experts of stock megatron-core compute from the weights of a run?

The real `TEGroupedMLP` (transformer/moe/experts.py, 0.19.2), which interleaves gate and up where the run's args say
so, is built from these args alone and loads the experts of each layer with strict=True. Its two grouped products, which
only Transformer Engine has, are torch's. Its Python is that of the environment of megatron-core (make test-stock).

    python interleave_judge.py RUN IN.npy OUT.npy    IN [experts, tokens, hidden], OUT [layers, experts, tokens, hidden]
"""

from __future__ import annotations

import dataclasses
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

warnings.filterwarnings("ignore")

import numpy as np
import torch
from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, TEGroupedMLP
from megatron.core.transformer.transformer_config import TransformerConfig


class Grouped(torch.nn.Module):
    """A product for each expert, in the names of Transformer Engine's GroupedLinear."""

    def __init__(self, experts: int, inner: int, outer: int, *, bias: bool, **_: Any) -> None:
        super().__init__()
        self.experts, self.te_return_bias = experts, False
        for expert in range(experts):
            self.register_parameter(f"weight{expert}", torch.nn.Parameter(torch.empty(outer, inner)))
            if bias:
                self.register_parameter(f"bias{expert}", torch.nn.Parameter(torch.empty(outer)))

    def forward(self, x: torch.Tensor, tokens: list[int]) -> tuple[torch.Tensor, None]:
        parts = torch.split(x, tokens)
        each = [
            torch.nn.functional.linear(part, getattr(self, f"weight{n}"), getattr(self, f"bias{n}", None))
            for n, part in enumerate(parts)
        ]
        return torch.cat(each), None


def config_of(args: Any) -> TransformerConfig:
    """The config of args: the fields of the same names, and the activation (argument_utils.py)."""
    names = {field.name for field in dataclasses.fields(TransformerConfig)}
    fields = {name: value for name, value in vars(args).items() if name in names}
    fields |= {"activation_func": torch.nn.functional.silu, "gated_linear_unit": True, "bias_activation_fusion": False}
    fields |= {"num_moe_experts": args.num_experts, "params_dtype": torch.float32, "bf16": False}
    fields.pop("rope_type", None)
    return TransformerConfig(**fields, use_cpu_initialization=True)


@torch.no_grad()
def main(run: Path, given: Path, out: Path) -> None:
    """Compute every layer."""
    (file,) = run.glob("*/mp_rank_00/model_optim_rng.pt")
    record = torch.load(file, weights_only=False)
    config, state = config_of(record["args"]), record["model"]
    x = torch.from_numpy(np.load(given))
    experts, tokens, hidden = x.shape
    group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    groups = SimpleNamespace(ep=group, expt_tp=group)
    outputs = []
    for layer in range(config.num_layers):
        modules = GroupedMLPSubmodules(linear_fc1=Grouped, linear_fc2=Grouped)
        mlp = TEGroupedMLP(experts, config, modules, pg_collection=groups)
        prefix = f"decoder.layers.{layer}.mlp.experts."
        mlp.load_state_dict({key.removeprefix(prefix): state[key] for key in state if key.startswith(prefix)})
        y, _ = mlp(x.reshape(-1, hidden), torch.full((experts,), tokens), torch.ones(experts * tokens))
        outputs.append(y.reshape(experts, tokens, hidden))
    np.save(out, torch.stack(outputs).numpy())


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
