"""Means of checkpoints, and adapters merged into their base or written for Megatron-Bridge, with typed results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

from converters.common.hub_names import WRITTEN
from converters.library.conversion import Converted, carry_out, request_from
from converters.library.options import (
    NUMBER,
    Conversion,
    Layout,
    Lora,
    Place,
    Reading,
    Target,
    checked,
    known_family,
    output_of,
    path_of,
    settings_of,
)
from converters.library.records import plan_record
from converters.plan.adapted import plan_bridge
from converters.plan.averaging import last_of, plan_average, weights_of
from converters.plan.merging import plan_merge
from converters.plan.opening import open_all, open_only
from converters.plan.output import plan_output
from converters.plan.plan import Plan
from converters.plan.request import Request
from formats.checkpoint import Settings
from formats.errors import UsageError, short
from formats.huggingface.adapter import read

if TYPE_CHECKING:
    from typing_extensions import Unpack

OF_MEAN = Conversion.__optional_keys__ - {"weights", "adapter"}
"""The options of a mean; no `weights`, since master weights are averaged wherever a checkpoint has them."""
OF_MERGE = Conversion.__optional_keys__ - {"adapter"}
"""The options of a merge."""
OF_BRIDGE = (OF_MERGE - Layout.__optional_keys__ - {"weights"}) | {"lora", "tp", "iteration"}
"""The options of an adapter for Megatron-Bridge; none on the base's weights, since only its model counts."""


def average(
    checkpoints: Place | Sequence[Place] | Mapping[Place, float],
    out: Place,
    *,
    ema: float | None = None,
    last: int | None = None,
    to: Target = "huggingface",
    **options: Unpack[Conversion],
) -> Converted:
    """Write the weighted mean of checkpoints of one model: summed in float64, in their order, rounded once.

    OUT is as in `convert`.

    Args:
        checkpoints: their folders, of any formats, for equal weights; or the weight of each, with the sum 1. FP32
            master weights are averaged where there are any. With `last` the folder of a run.
        out: the folder that is written; config and tokenizer are those of the first checkpoint.
        ema: an exponential mean with this decay: mean = ema * mean + (1 - ema) * next, from the first on.
        last: average so many of the newest checkpoints of a run, the oldest of them first.
        to: the target format.
        options: as in `convert`, without `weights` and `adapter`.

    Raises:
        UsageError: a weight is no number, or their sum is not 1.
        RefusedError: the checkpoints are of different models. Else as `convert`.
    """
    given_options, given = checked(options, OF_MEAN), None
    checked({"ema": ema, "last": last}, ("ema", "last"))
    if last is not None and not isinstance(checkpoints, str | PathLike):
        raise UsageError(
            f"checkpoints = {short(checkpoints)}, and with last it is the folder of one run",
            "leave last out, or name the run",
        )
    if last is not None:
        paths = last_of(path_of(checkpoints, "checkpoints"), last)
    elif isinstance(checkpoints, Mapping):
        if ema is not None:
            raise UsageError("ema says every weight, and so does a dict of checkpoints", "name them in a list")
        paths, given = [path_of(checkpoint, "checkpoints") for checkpoint in checkpoints], [*checkpoints.values()]
        if odd := [weight for weight in given if not NUMBER.holds(weight)]:
            raise UsageError(f"the weight {short(odd[0])} is not {NUMBER.words}")
    else:
        items = checkpoints if isinstance(checkpoints, list | tuple) else [checkpoints]
        paths = [path_of(checkpoint, "checkpoints") for checkpoint in items]
    weights, reading = weights_of(len(paths), given, ema), _settings(given_options)
    with known_family(given_options) as family:
        sources = open_all(paths, reading, family)
        request = request_from(path_of(out, "out", WRITTEN), given_options, sources[0])
        plan = plan_average(sources, weights, request, to, output_of(given_options), given_options.get("replicas"))
        return _carried(plan, request)


def merge(
    base: Place, adapter: Place, out: Place, /, *, to: Target = "huggingface", **options: Unpack[Conversion]
) -> Converted:
    """Write a base model with a LoRA adapter of PEFT merged into it: in float64, rounded once. OUT as in `convert`.

    Args:
        base: the folder of the base model, in any format.
        adapter: the folder with adapter_config.json and adapter_model.safetensors.
        out: the folder that is written.
        to: the target format.
        options: as in `convert`, without `adapter`.

    Raises:
        UnsupportedError: the adapter is of another method, or of a LoRA that cannot be merged.
        SourceError: the adapter is not complete, or does not fit the base. Else as `convert`.
    """
    given = checked(options, OF_MERGE)
    reading = _settings(given)
    with known_family(given) as family:
        source = open_only(path_of(base, "base"), reading, family)
        request = request_from(path_of(out, "out", WRITTEN), given, source)
        saved = read(path_of(adapter, "adapter", ()))
        plan = plan_merge(source, saved, request, lambda opened: plan_output(opened, request, to, output_of(given)))
        return _carried(plan, request)


def peft2megatron(
    base: Place, adapter: Place, out: Place, /, *, lora: Lora = "canonical", **options: Unpack[Conversion]
) -> Converted:
    """Write a LoRA adapter of PEFT as one of Megatron-Bridge: torch_dist, to train it further beside its base.

    `convert(out, adapter, adapter="only")` is the way back.

    Args:
        base: the folder of the model that the adapter is of, in any format.
        adapter: the folder with adapter_config.json and adapter_model.safetensors.
        out: the folder of the run that is written.
        lora: `canonical` for CanonicalLoRA, an adapter for each matrix of PEFT's; `fused` for LoRA, where query, key
            and value share lora_A, and gate and up.
        options: as in `convert`; of the layout only `tp`, the tensor parallel size of the training, and `iteration`,
            from which Megatron-Bridge counts on.

    Raises:
        UnsupportedError: Megatron-Bridge has no such adapter, or no such model.
        VerificationError: with `fused`, factors differ that would become one.
        SourceError: the adapter is not complete, or does not fit the base. Else as `convert`.
    """
    given = checked({**options, "lora": lora}, OF_BRIDGE)
    reading = _settings(given)
    with known_family(given) as family:
        source = open_only(path_of(base, "base"), reading, family)
        request = request_from(path_of(out, "out", WRITTEN), given, source)
        saved = read(path_of(adapter, "adapter", ()))
        kind, tp, iteration = given.get("lora", "canonical"), given.get("tp", 1), given.get("iteration", 0)
        plan = plan_bridge(source, saved, request, kind, tp, iteration)
        return _carried(plan, request)


def _settings(given: Mapping[str, Any]) -> Settings:
    """The settings of a reader among the options."""
    return settings_of({name: value for name, value in given.items() if name in Reading.__optional_keys__})


def _carried(plan: Plan, request: Request) -> Converted:
    done = carry_out(plan, request, None, plan_record(plan)["notes"])
    assert isinstance(done, Converted)
    return done
