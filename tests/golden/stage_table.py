"""megatron-core's own answer to "which layers does each pipeline stage have?".

    python stage_table.py ASKED.json ANSWERS.json

Reads a JSON list of configs and writes the answers, in the same order:

    {"layers": 8, "pp": 2, "vpp": 2, "first": 4, "last": 4, "embedding": false, "loss": false, "layout": ""}
    -> {"stages": [[{"offset": 0, "layers": 2}, ...one per virtual stage], ...one per rank], "complete": true}
    -> {"error": "..."} where megatron-core refuses the config

Only `layers` is required. "complete" says whether the stages hold every layer exactly once. No processes, no
devices. Line numbers are those of megatron-core 0.16.1, relative to megatron/core/.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore")  # megatron-core announces every missing accelerator package

import torch
from megatron.core import parallel_state as ps
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

NAMES = {"layers", "pp", "vpp", "first", "last", "embedding", "loss", "layout"}


def transformer_config(case: dict[str, Any]) -> TransformerConfig:
    """The smallest TransformerConfig with it (checks: transformer/transformer_config.py:1294-1480)."""
    return TransformerConfig(
        num_layers=case["layers"],
        hidden_size=8,
        num_attention_heads=1,
        pipeline_dtype=torch.float32,
        pipeline_model_parallel_size=case.get("pp", 1),
        virtual_pipeline_model_parallel_size=case.get("vpp"),
        num_layers_in_first_pipeline_stage=case.get("first"),
        num_layers_in_last_pipeline_stage=case.get("last"),
        account_for_embedding_in_pipeline_split=case.get("embedding", False),
        account_for_loss_in_pipeline_split=case.get("loss", False),
        pipeline_model_parallel_layout=case.get("layout") or None,
    )


def stage(config: TransformerConfig, pp_rank: int, vp_stage: int | None) -> dict[str, int]:
    """One chunk: transformer/transformer_block.py:75 and transformer/transformer_layer.py:39.

    A layout gets no pp_rank and asks parallel_state (pipeline_parallel_layer_layout.py:160, :178),
    so the rank is set there too.
    """
    ps.set_pipeline_model_parallel_rank(pp_rank)
    return {
        "offset": get_transformer_layer_offset(config, vp_stage, pp_rank),
        "layers": get_num_layers_to_build(config, vp_stage, pp_rank),
    }


def answer(case: dict[str, Any]) -> dict[str, Any]:
    """All chunks of one config, or the reason why megatron-core refuses it."""
    if unknown := set(case) - NAMES:
        raise SystemExit(f"unknown names {sorted(unknown)} in {case}")
    try:
        config = transformer_config(case)
        pp, vpp = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size
        if vpp is not None and pp == 1:  # megatron-core's own check needs processes: parallel_state.py:746
            raise ValueError("virtual pipeline stages need a pipeline")
        ps.set_pipeline_model_parallel_world_size(pp)
        ps.set_virtual_pipeline_model_parallel_world_size(vpp)
        virtual = [None] if vpp is None else list(range(vpp))
        stages = [[stage(config, rank, v) for v in virtual] for rank in range(pp)]
    except (AssertionError, ValueError, RuntimeError, NotImplementedError, ZeroDivisionError) as error:
        return {"error": " ".join(str(error).split()) or type(error).__name__}
    layers = [n for row in stages for s in row for n in range(s["offset"], s["offset"] + s["layers"])]
    return {"stages": stages, "complete": sorted(layers) == list(range(config.num_layers))}


def main() -> None:
    """Answer what is asked."""
    questions, answers = map(Path, sys.argv[1:])
    answers.write_text(json.dumps([answer(case) for case in json.loads(questions.read_text())]))


if __name__ == "__main__":
    main()
