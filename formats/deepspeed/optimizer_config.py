"""The optimizer in the configuration of a training, which says how weight decay acts where parameter groups do not.

    "optimizer": {"type": "Adam", "params": {"adam_w_mode": false, …}}

in the `ds_config` of the model files, and in the yml of GPT-NeoX, some versions of which save no `ds_config`.

Facts: deepspeed 0.19.8 runtime/engine.py `_configure_basic_optimizer`, ops/adam/fused_adam.py and cpu_adam.py; GPT-NeoX
at ea7aefd8, megatron/training.py `get_optimizer`; mup 1.0.0 optim.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from formats.errors import UnsupportedError, short
from formats.model.accepted import COUPLED
from formats.optimizer import AnyGroup, Group, Muon


class Adam(NamedTuple):
    """An optimizer of which parameter groups are Adam's.

    Attributes:
        switches: parameters of which a false one puts the weight decay into the gradients: FusedAdam's, and
            DeepSpeedCPUAdam's, of which each refuses the other's.
        coupled: whether the weight decay is in the gradients whatever they are.
        trains: the type of a parameter group that it always has.
    """

    switches: tuple[str, ...] = (COUPLED, "adamw_mode")
    coupled: bool = False
    trains: type[AnyGroup] = Group


ADAMS: Mapping[str, Adam] = {
    "": Adam(),  # GPT-NeoX' default is Adam
    "adam": Adam(),
    "adamw": Adam(switches=()),
    "cpu_adam": Adam(),
    "cpu_torch_adam": Adam(),  # a DeepSpeedCPUAdam too
    "cpuadam": Adam(),
    "deepspeedcpuadam": Adam(),
    "fusedadam": Adam(),
    "muadam": Adam(coupled=True),  # torch.optim.Adam
    "muadamw": Adam(),
    "muon": Adam(trains=Muon),
}
"""Type in a configuration, in lower case: types of DeepSpeed and of GPT-NeoX, and classes of a training's own."""


def optimizer_in(config: Any) -> tuple[str, Mapping[str, Any]]:
    """Return type and `params` of the optimizer in a configuration; empty without one.

    A training that makes its optimizer itself does not heed them, except for GPT-NeoX.
    """
    optimizer = config.get("optimizer") if isinstance(config, Mapping) else None
    about = optimizer if isinstance(optimizer, Mapping) else {}
    params = about.get("params")
    return str(about.get("type") or ""), params if isinstance(params, Mapping) else {}


def require_adamw(name: str, config: Any, weight_decay: float, kinds: Collection[type[AnyGroup]], path: Path) -> None:
    """Refuse a parameter group of Adam, which does not say how its weight decay acts, if a configuration denies AdamW.

    Args:
        name: what to call the configuration in an error.
        config: the configuration.
        weight_decay: the weight decay of the group.
        kinds: the types of all parameter groups.
        path: the file of the group, for an error.

    Raises:
        UnsupportedError: the optimizer of the configuration is no Adam, or has its weight decay in the gradients.
    """
    kind, params = optimizer_in(config)
    adam = ADAMS.get(kind.lower())
    hint = (
        "convert the weights without the optimizer; "
        f"--accept {COUPLED} for a training that made an AdamW itself, which does not heed the {name}"
    )
    if adam is None or adam.trains not in kinds:
        raise UnsupportedError(
            f"{path}: its {name} says that its optimizer is {short(kind)}, whose steps are not Adam's, and its "
            "parameter groups have the form of Adam's",
            hint,
        )
    coupling = [f"{switch} = {short(params[switch])}" for switch in adam.switches if not params.get(switch, True)]
    coupling += [f"type = {kind}"] * adam.coupled
    if coupling and weight_decay:
        raise UnsupportedError(
            f"{path}: its {name} says {coupling[0]}, by which a weight decay of {weight_decay:g} is in the gradients, "
            "and not AdamW's",
            hint,
        )
