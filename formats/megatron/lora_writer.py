"""An adapter of Megatron-Bridge, written: the run folder that a training of LoRA resumes beside its base.

Facts: Megatron-Bridge 0.6.2 peft/utils.py, lora.py, canonical_lora.py, which loads what is written so.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from formats.checkpoint import Target
from formats.errors import UnsupportedError, some
from formats.layout.pattern import Axis, Fill, Pattern, Product, Term
from formats.layout.pieces import whole_part
from formats.layout.slots import Slot
from formats.megatron import common_state
from formats.megatron.args import providers, run_config
from formats.megatron.args.options import Options, namespace
from formats.megatron.classic import topology_of
from formats.megatron.folders import TRACKER, name_of
from formats.megatron.lora import CLASSES, EXPERTS, TARGETS, require_orders, slots_of
from formats.model.lora import TOGETHER, LoraSpec
from formats.torch_files import dcp, dcp_writer
from formats.torch_files.archive_plan import packed
from formats.torch_files.archive_writer import packed_plain

LAYERS = "decoder.layers."
MERGED = "convert merge puts it into the base"
PLACES = {
    **dict.fromkeys(("gate", "up", "down"), "*.mlp."),
    **dict.fromkeys(("shared_gate", "shared_up", "shared_down"), "*.mlp.shared_experts."),
    **dict.fromkeys(("expert_gate", "expert_up", "expert_down"), "*.mlp.experts.*"),
}
"""What stands before the name of a matrix in `target_modules` where the name alone would be that of others too."""


def write(root: Path, spec: LoraSpec, dtype: str, alpha: float, options: Options, iteration: int) -> Target:
    """Lay out a run folder with an adapter that Megatron-Bridge resumes; its base is in another run folder.

    If one tensor of a fused matrix has an adapter, CanonicalLoRA needs adapters for all tensors of the matrix. Adapters
    that the source lacks are zeros, which a training leaves alone: neither factor has a gradient.

    Args:
        root: the run folder.
        spec: the adapter.
        dtype: the element type of the adapter.
        alpha: the scale of the adapter times its rank.
        options: the topology of the training.
        iteration: the iteration in the name of the folder.

    Raises:
        UnsupportedError: Bridge has no such adapter, or Megatron has no such model.
        RefusedError: Megatron has no such topology.
    """
    base, kind = spec.base, "fused" if spec.shared else "canonical"
    providers.require_no_adapter(providers.PROVIDERS.get(base.family), f"a LoRA of a {base.family}")
    _, padded = topology_of(base, options, options.trainer)
    require_orders(spec, options.tp)
    absent = [name for group in TOGETHER for name in group if {*group} & {*spec.matrices} and name not in spec.matrices]
    absent = [name for name in absent if name in base.tensors]
    if absent and spec.shared:
        raise UnsupportedError(
            f"the adapter has none of {', '.join(absent)}, and LoRA of Megatron-Bridge changes all of a fused matrix",
            "--lora canonical",
        )
    slots = [*slots_of(spec), *_zeros(spec, absent)]
    covered = {name for slot in slots for name in slot.rule.pattern.tensors}
    if missing := sorted({*spec.tensors} - covered):
        raise UnsupportedError(f"Megatron-Bridge has no adapter of {some(missing, 3)} of a {base.family}")
    folder, layers = name_of(iteration), base.layers
    stored, objects = [], dict[str, bytes]()
    for slot in slots:
        key, part = slot.keys[0], whole_part(slot.shape)
        layer = int(key.split(".")[2])
        name = key if base.mixed else key.replace(f"{LAYERS}{layer}.", LAYERS)
        shape, box = (slot.shape, part.ranges) if base.mixed else (
            (layers, *slot.shape), ((layer, layer + 1), *part.ranges)
        )  # fmt: skip
        stored.append(dcp_writer.SlotPart(slot, part, name, shape, box, dtype=dtype))
        shard = "0_1" if base.mixed else f"{layer}_{layers}"
        if EXPERTS not in key:
            objects[f"{name.removesuffix('weight')}_extra_state/shard_{shard}"] = packed([None])
    files, metadata = dcp_writer.layout(root / folder, [stored], {}, objects=objects)
    args = namespace(base, [dtype], options, padded, {}, iteration)
    peft = {"_target_": CLASSES[kind], "target_modules": _target_modules(spec, absent), "dim": spec.rank,
            "alpha": int(alpha) if float(alpha).is_integer() else alpha, "dropout": 0.0}  # fmt: skip
    further: dict[str, Any] = {}
    if spec.expert_rank:
        peft |= {"share_expert_adapters": False, "normalize_moe_lora": spec.expert_rank != spec.rank}
        further = {"expert_tensor_parallel_size": 1}
    common = {"checkpoint_version": 3.0, "iteration": iteration, "content_metadata": {"singleton_local_shards": False}}
    texts = {
        f"{folder}/{dcp.METADATA}": metadata,
        f"{folder}/{common_state.FILE}": packed_plain(common),
        f"{folder}/{common_state.BACKEND}": json.dumps(common_state.ABOUT).encode(),
        TRACKER: str(iteration).encode(),
    }
    texts |= {
        name if name.startswith("latest") else f"{folder}/{name}": text
        for name, text in run_config.written(args, iteration, {"peft": peft}, further, hint=MERGED).items()
    }
    return Target(tuple(files), texts, {}, folder)


def _target_modules(spec: LoraSpec, absent: Sequence[str]) -> list[str]:
    """The `target_modules` of an adapter, with their places where other matrices of the model have the same name."""
    kind, changed = "fused" if spec.shared else "canonical", (*spec.matrices, *absent)
    others = {TARGETS[name][kind] for name in TARGETS if name in spec.base.tensors and name not in changed}
    names = {matrix: TARGETS[matrix][kind] for matrix in changed}
    return [*dict.fromkeys(PLACES.get(matrix, "") * (name in others) + name for matrix, name in names.items())]


def _zeros(spec: LoraSpec, absent: Sequence[str]) -> list[Slot]:
    """The slots of the adapters of zeros, for the matrices that have no adapter."""
    if not absent:
        return []
    slots = slots_of(replace(spec, matrices=tuple(absent)))
    return [slot._replace(rule=replace(slot.rule, pattern=_filled(slot.rule.pattern))) for slot in slots]


def _filled(pattern: Pattern) -> Pattern:
    """A pattern of the same shape that holds zeros and no part of a tensor."""
    dims = tuple(_fill(term) for term in pattern.dims)
    return Pattern(f"zeros of {pattern.text}", None, dims)


def _fill(term: Term) -> Term:
    if isinstance(term, Axis):
        return Fill(term.name)
    assert isinstance(term, Product)
    return Product(tuple(map(_fill, term.terms)))
