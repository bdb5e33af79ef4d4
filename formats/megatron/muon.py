"""Muon in a Megatron run: which parameters Muon trains and which Adam, and their optimizer states in torch_dist.

    optimizer.state.{momentum_buffer|fp32_param}.{key}                     a matrix of Muon
    optimizer.state.{exp_avg|exp_avg_sq|fp32_param|param}.{key}            a parameter of Adam (fp32_param: plain Adam)
    optimizer.distributed.dp_group_idx_…, as in `bucketed_optimizer`       Adam's states in buckets (dp_reshardable)

Names may have the prefix chained_0. or chained_1.; in the common state 0 is Muon's entry and 1 is Adam's. A run with
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
"""Ends of the names of the matrices that Adam trains."""
STACKED = ".mlp.experts.experts."
"""Part of the names of experts' parameters: torch_dist stacks all experts (transformer/moe/experts.py
`sharded_state_dict`)."""
SHARES = {MOMENTUM: True, "exp_avg": False, "exp_avg_sq": False}
"""Optimizer state: true if Muon keeps it, false if Adam does. Both keep FP32 master weights."""
LAYERED = ("use_layer_wise_distributed_optimizer", "use_layer_wise_param_layout")
"""Arguments that are set in a run whose Adam is distributed."""
SCALAR = "muon_scalar_optimizer"


class Setting(NamedTuple):
    """A setting of torch's Muon: Megatron's arguments for it, and their values for each value of the setting."""

    name: str
    args: tuple[str, ...]
    values: Mapping[Any, tuple[Any, ...]]


SETTINGS = (
    Setting("nesterov", ("muon_nesterov",), {False: (False,), True: (True,)}),
    Setting("ns_coefficients", ("muon_coefficient_type",), {(3.4445, -4.775, 2.0315): ("simple",)}),
    Setting("ns_steps", ("muon_num_ns_steps",), {steps: (steps,) for steps in range(1, 100)}),
    Setting("adjust_lr_fn", ("muon_scale_mode", "muon_extra_scale_factor"), {
        "original": ("shape_scaling", 1.0), None: ("shape_scaling", 1.0), "match_rms_adamw": ("spectral", 0.2),
    }),
    Setting("eps", (), {1e-7: ()}),
)  # fmt: skip
"""Facts: torch 2.13.0 optim/_muon.py; emerging-optimizers 0.3.0 orthogonalized_optimizers/muon.py and muon_utils.py."""
APART = frozenset({"query", "key", "value"})
"""Logical tensors of one parameter that Muon orthogonalizes separately (`muon_split_qkv`)."""


def is_used(args: Mapping[str, Any]) -> bool:
    """Whether the arguments of a run select Muon."""
    return args.get("optimizer") == NAME


def trains(slot: Slot) -> bool:
    """Whether Muon trains a parameter; of a stack of experts, whether it trains the matrix of each expert."""
    key = slot.keys[0]
    stacked = STACKED in key and not key.partition(STACKED)[2][:1].isdigit()
    return len(slot.shape) - stacked == 2 and not key.endswith(ENDS)


def has_state(state: str, slot: Slot, tensors: Collection[tuple[str, int | None]]) -> bool:
    """Whether a Megatron run with Muon keeps an optimizer state of a parameter.

    Args:
        state: the name of the state.
        slot: the parameter.
        tensors: the (logical tensor, layer) pairs of which the source has the state.

    Raises:
        UnsupportedError: the source lacks a state that Megatron keeps, or has one that Megatron does not keep: other
            parameters were trained with Muon.
    """
    has_state = trains(slot) == SHARES.get(state, trains(slot))
    if any(((name, slot.layer) in tensors) != has_state for name in slot.rule.pattern.tensors):
        other = "Adam" if trains(slot) else "Muon"
        raise UnsupportedError(
            f"{slot.keys[0]} was trained with {other}, and Megatron trains all matrices but embedding and head with "
            "Muon, and nothing else",
            "convert the weights without --with-optimizer",
        )
    return has_state


def require_known(args: Mapping[str, Any], where: str) -> None:
    """Refuse a run whose arguments do not mean Muon for all matrices, experts' among them, and Adam for all else.

    Raises:
        UnsupportedError: experts are on several ranks, where they have a Muon of their own, or parameters other than
            matrices are not trained with Adam.
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
    """Return the note for a run that resumes at another tensor-parallel size, where that changes Muon's steps."""
    if not is_used(args) or args.get("muon_tp_mode") != "blockwise" or args["tensor_model_parallel_size"] == tp:
        return []
    return ["Muon orthogonalizes what a tensor rank has (--muon-tp-mode blockwise): at another --tp its steps differ"]


def of_torch(group: Mapping[str, Any], args: Mapping[str, Any], where: str) -> Muon:
    """Return torch's form of a Muon parameter group, from Megatron's group and the arguments of the run.

    Raises:
        UnsupportedError: torch's Muon has no such setting.
        KeyError: a setting is missing.
    """
    if args["muon_split_qkv"] is not True:
        raise UnsupportedError(f"{where}: its Muon takes query, key and value as one matrix, which no other does")
    settings = {}
    for word in SETTINGS:
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
    """Return Megatron's arguments for a Muon parameter group.

    Raises:
        UnsupportedError: Megatron has no arguments for a setting.
    """
    args: dict[str, Any] = {"muon_momentum": muon.momentum, "muon_split_qkv": True, SCALAR: "adam"}
    for word in SETTINGS:
        value = getattr(muon, word.name)
        if value not in word.values:
            raise UnsupportedError(f"{where}: Megatron's Muon has no {word.name} = {short(value)}")
        args |= dict(zip(word.args, word.values[value], strict=True))
    return args


def flags_of(args: Mapping[str, Any]) -> str:
    """Return the command-line flags for these arguments, which a training does not take from the checkpoint."""
    names = ["muon_momentum", *(name for word in SETTINGS for name in word.args if args[name] is not False)]
    flags = [f"--{name.replace('_', '-')}{'' if args[name] is True else f' {args[name]}'}" for name in names]
    return " ".join(["--optimizer muon", *flags])
