"""Muon in a Megatron run: which parameters it trains, beside the Adam of all others, and what each keeps in torch_dist.

    optimizer.state.{momentum_buffer|fp32_param}.{key}                     Muon's matrices
    optimizer.state.{exp_avg|exp_avg_sq|fp32_param|param}.{key}            what Adam trains: fp32_param of a plain one
    optimizer.distributed.dp_group_idx_…, as in `bucketed_optimizer`       the same in buckets (dp_reshardable)

Either may have chained_0. and chained_1. before it; in the common state 0 is Muon's entry and 1 is Adam's. A run with
--use-distributed-optimizer and without --no-use-layer-wise-param-layout has a distributed Adam, any other a plain one.

Facts: megatron-core 0.19.2, optimizer/__init__.py `_get_megatron_emerging_optimizer`, layer_wise_optimizer.py beside
it, models/common/language_module/language_module.py `setup_embeddings_and_output_layer`; trainings that resume are in
tests/golden/test_stock_muon.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from formats.errors import UnsupportedError, short
from formats.layout.slots import Slot
from formats.optimizer import MOMENTUM

NAME = "muon"
ENDS = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Matrices that Adam trains."""
SHARES = {MOMENTUM: True, "exp_avg": False, "exp_avg_sq": False}
"""Whether a state is Muon's, and else Adam's. FP32 master weights are of both."""
LAYERED = ("use_layer_wise_distributed_optimizer", "use_layer_wise_param_layout")
"""Arguments of a run whose Adam is a distributed one."""
SCALAR = "muon_scalar_optimizer"


def is_used(args: Mapping[str, Any]) -> bool:
    """Whether a run trains with Muon, as its args say."""
    return args.get("optimizer") == NAME


def trains(slot: Slot) -> bool:
    """Whether Muon trains a parameter."""
    return len(slot.shape) == 2 and not slot.keys[0].endswith(ENDS)


def keeps(state: str, slot: Slot) -> bool:
    """Whether such a run has a state of a parameter."""
    return trains(slot) == SHARES.get(state, trains(slot))


def require_known(args: Mapping[str, Any], where: str) -> None:
    """Muon trains dense matrices, and Adam all else.

    Raises:
        UnsupportedError: there are experts, or what is no matrix is not Adam's.
    """
    if args.get("num_experts") is not None:
        raise UnsupportedError(f"{where}: Muon of a model with experts is not supported")
    if args.get(SCALAR) not in (None, "adam"):
        raise UnsupportedError(
            f"{where}: what is no matrix is trained with {short(args[SCALAR])}, and only Adam is read"
        )


def notes(args: Mapping[str, Any]) -> list[str]:
    """What another number of tensor ranks does to a run."""
    if args.get("muon_tp_mode") != "blockwise":
        return []
    return [
        "Muon orthogonalizes what each tensor rank has (--muon-tp-mode blockwise): at another --tp its steps differ"
    ]
