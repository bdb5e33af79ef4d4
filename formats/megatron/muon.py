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

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from formats.errors import UnsupportedError, short
from formats.layout.slots import Slot
from formats.optimizer import MOMENTUM, Muon, group_of

NAME = "muon"
ENDS = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Matrices that Adam trains."""
STACKED = ".mlp.experts.experts."
"""Parameters of experts: torch_dist has those of all in one (transformer/moe/experts.py `sharded_state_dict`)."""
SHARES = {MOMENTUM: True, "exp_avg": False, "exp_avg_sq": False}
"""Whether a state is Muon's, and else Adam's. FP32 master weights are of both."""
LAYERED = ("use_layer_wise_distributed_optimizer", "use_layer_wise_param_layout")
"""Arguments of a run whose Adam is a distributed one."""
SCALAR = "muon_scalar_optimizer"


class Word(NamedTuple):
    """A setting of torch's Muon: the arguments that say it, and what they are for each of its values."""

    name: str
    args: tuple[str, ...]
    values: Mapping[Any, tuple[Any, ...]]


WORDS = (
    Word("nesterov", ("muon_nesterov",), {False: (False,), True: (True,)}),
    Word("ns_coefficients", ("muon_coefficient_type",), {(3.4445, -4.775, 2.0315): ("simple",)}),
    Word("ns_steps", ("muon_num_ns_steps",), {steps: (steps,) for steps in range(1, 100)}),
    Word("adjust_lr_fn", ("muon_scale_mode", "muon_extra_scale_factor"), {
        "original": ("shape_scaling", 1.0), None: ("shape_scaling", 1.0), "match_rms_adamw": ("spectral", 0.2),
    }),
    Word("eps", (), {1e-7: ()}),
)  # fmt: skip
"""torch 2.13.0 optim/_muon.py; emerging-optimizers 0.3.0 orthogonalized_optimizers/muon.py and muon_utils.py."""
APART = frozenset({"query", "key", "value"})
"""Tensors of one parameter that Muon orthogonalizes one by one (`muon_split_qkv`)."""


def is_used(args: Mapping[str, Any]) -> bool:
    """Whether a run trains with Muon, as its args say."""
    return args.get("optimizer") == NAME


def trains(slot: Slot) -> bool:
    """Whether Muon trains a parameter, or each of those of experts that are stacked in a torch_dist."""
    key = slot.keys[0]
    return len(slot.shape) - (STACKED in key) == 2 and not key.endswith(ENDS)


def keeps(state: str, slot: Slot, tensors: Collection[tuple[str, int | None]]) -> bool:
    """Whether such a run has a state of a parameter.

    Args:
        state: the state.
        slot: the parameter.
        tensors: the logical tensors, with their layers, of which there is the state.

    Raises:
        UnsupportedError: there is none of it, or one that the run has not: other parameters were trained with Muon.
    """
    kept = trains(slot) == SHARES.get(state, trains(slot))
    if any(((name, slot.layer) in tensors) != kept for name in slot.rule.pattern.tensors):
        other = "Adam" if trains(slot) else "Muon"
        raise UnsupportedError(
            f"{slot.keys[0]} was trained with {other}, and Megatron trains all matrices but embedding and head with "
            "Muon, and nothing else",
            "convert the weights without --with-optimizer",
        )
    return kept


def require_known(args: Mapping[str, Any], where: str) -> None:
    """Muon trains matrices, each expert's too, and Adam all else.

    Raises:
        UnsupportedError: experts are on several ranks, where they have a Muon of their own, or what is no matrix is not
            Adam's.
    """
    if args.get("num_experts") is not None and (ranks := args.get("expert_model_parallel_size") or 1) != 1:
        raise UnsupportedError(
            f"{where}: Muon of experts that are on {short(ranks)} ranks is not supported", "save it with one"
        )
    if args.get(SCALAR) not in (None, "adam"):
        raise UnsupportedError(
            f"{where}: what is no matrix is trained with {short(args[SCALAR])}, and only Adam is read"
        )


def notes(args: Mapping[str, Any], tp: int) -> list[str]:
    """What the number of tensor ranks that it is resumed on does to a run."""
    if not is_used(args) or args.get("muon_tp_mode") != "blockwise" or args["tensor_model_parallel_size"] == tp:
        return []
    return ["Muon orthogonalizes what a tensor rank has (--muon-tp-mode blockwise): at another --tp its steps differ"]


def of_torch(group: Mapping[str, Any], args: Mapping[str, Any], where: str) -> Muon:
    """Muon's parameter group as torch has it, with what the args of a run say.

    Raises:
        UnsupportedError: torch's Muon computes nothing of the kind.
        KeyError: a setting is missing.
    """
    if args["muon_split_qkv"] is not True:
        raise UnsupportedError(f"{where}: its Muon takes query, key and value as one matrix, which no other does")
    settings = {}
    for word in WORDS:
        values = tuple(args[name] for name in word.args)
        matching = [value for value, written in word.values.items() if written == values]
        if not matching:
            what = ", ".join(f"{name} = {short(value)}" for name, value in zip(word.args, values, strict=True))
            raise UnsupportedError(
                f"{where} was trained with {what}, for which torch's Muon has no setting",
                "convert the weights without the optimizer, or reshard --with-optimizer for Megatron",
            )
        settings[word.name] = matching[0]
    muon = group_of({**settings, **{name: group[name] for name in ("lr", "weight_decay", "momentum")}}, where)
    assert isinstance(muon, Muon)
    return muon


def args_of(muon: Muon, where: str) -> dict[str, Any]:
    """The arguments of a training with such a group.

    Raises:
        UnsupportedError: Megatron has none for a setting.
    """
    args: dict[str, Any] = {"muon_momentum": muon.momentum, "muon_split_qkv": True, SCALAR: "adam"}
    for word in WORDS:
        value = getattr(muon, word.name)
        if value not in word.values:
            raise UnsupportedError(f"{where}: Megatron's Muon has no {word.name} = {short(value)}")
        args |= dict(zip(word.args, word.values[value], strict=True))
    return args


def flags_of(args: Mapping[str, Any]) -> str:
    """The flags of a training with these arguments, which no checkpoint brings along."""
    names = ["muon_momentum", *(name for word in WORDS for name in word.args if args[name] is not False)]
    told = [f"--{name.replace('_', '-')}{'' if args[name] is True else f' {args[name]}'}" for name in names]
    return " ".join(["--optimizer muon", *told])
