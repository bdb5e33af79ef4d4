"""LoRA in Megatron: the adapters of Megatron-Bridge (and NeMo 2) in a torch_dist checkpoint without their base.

    …linear_qkv.adapter.linear_in.weight               [layers, r, hidden]      LoRA: one for the whole fused matrix
    …linear_qkv.adapter.linear_out.weight              [layers, rows, r]        rows in the order of the matrix
    …linear_qkv.adapter.adapter_q.linear_in.weight     [layers, r, hidden]      CanonicalLoRA: one for each of q, k, v
    …experts.experts.linear_fc1.adapter.linear_in.weight    [layers, experts, r, hidden]      of each expert
    …experts.experts.linear_fc1.adapter.linear_out.weight   [layers, experts, 2 * ffn, r]     gate, then up
    run_config.yaml, `peft`                            its class, dim (r), alpha; scale = alpha / r

A rank stores the rows of `linear_fc1…linear_out` in two halves: of LoRA, gate and up. A `linear_out` of CanonicalLoRA
is of gate or up alone, and its rows are stored in two halves all the same: the order of its rows in a checkpoint
depends on the tensor parallel size, and only with the same size Bridge loads the rows in the right order
(`ParallelLinearAdapter.sharded_state_dict`). 0.3.1 stores a matrix without a gate in halves too, later versions do not.

The grouped experts of a layer share one LoRA (`share_expert_adapters`, the usual), which is stored once for each expert,
or have one each, stored in the same places; with `experts_shared_outer_loras` they share one factor of the two, which
has no axis of experts. What they share is one of each expert here. The r of experts is dim divided by the number of
experts that a token gets if `normalize_moe_lora` is true, and dim otherwise; alpha is the same.

Facts: Megatron-Bridge 0.3.1 and 0.6.2 peft/utils.py, lora.py, canonical_lora.py, and their own files in
tests/golden/bridge; NeMo 2 has the same names.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from formats.checkpoint import Checkpoint, Details, Settings, Target
from formats.errors import SourceError, UnsupportedError, UsageError, short, some
from formats.huggingface import folder as huggingface
from formats.layout.pattern import Axis, Fill, Pattern, Product, Term
from formats.layout.pieces import Scattered, match_pieces, repeat, whole_part
from formats.layout.slots import Slot
from formats.layout.table import Rule, rules
from formats.megatron import common_state, lora_targets
from formats.megatron.args import providers, run_config
from formats.megatron.args.args import from_megatron
from formats.megatron.args.moe import interleaves_of
from formats.megatron.args.options import Options, namespace
from formats.megatron.classic import topology_of
from formats.megatron.folders import TRACKER, name_of
from formats.model.lora import OF_EXPERTS, TOGETHER, LoraSpec, spec_of
from formats.model.spec import ModelSpec
from formats.torch_files import dcp, dcp_writer
from formats.torch_files.archive import TorchFile
from formats.torch_files.archive_plan import packed
from formats.torch_files.archive_writer import packed_plain

ADAPTER = ".adapter."
LAYERS = "decoder.layers."
EXPERTS, SHARED_EXPERTS = ".mlp.experts.", ".mlp.shared_experts."
ALIKE = rules("""
decoder.layers.{layer}.self_attention.linear_proj.adapter.linear_in.weight    output_lora_a: rank (group head dim)
decoder.layers.{layer}.self_attention.linear_proj.adapter.linear_out.weight   output_lora_b: hidden rank
decoder.layers.{layer}.mlp.linear_fc2.adapter.linear_in.weight                down_lora_a: rank ffn    dense
decoder.layers.{layer}.mlp.linear_fc2.adapter.linear_out.weight               down_lora_b: hidden rank    dense
decoder.layers.{layer}.mlp.shared_experts.linear_fc2.adapter.linear_in.weight     shared_down_lora_a: rank shared_ffn    sparse
decoder.layers.{layer}.mlp.shared_experts.linear_fc2.adapter.linear_out.weight    shared_down_lora_b: hidden rank    sparse
decoder.layers.{layer}.mlp.experts.experts.linear_fc1.adapter.linear_in.weight    expert_gate_lora_a: expert expert_rank hidden    sparse
decoder.layers.{layer}.mlp.experts.experts.linear_fc1.adapter.linear_out.weight   expert (expert_gate_lora_b: expert_ffn | expert_up_lora_b: expert_ffn) expert_rank    sparse
decoder.layers.{layer}.mlp.experts.experts.linear_fc2.adapter.linear_in.weight    expert_down_lora_a: expert expert_rank expert_ffn    sparse
decoder.layers.{layer}.mlp.experts.experts.linear_fc2.adapter.linear_out.weight   expert_down_lora_b: expert hidden expert_rank    sparse
""")
"""The layout that `LoRA` and `CanonicalLoRA` have alike, which has one LoRA for gate and up of an expert in both."""
FUSED = (
    *rules("""
decoder.layers.{layer}.self_attention.linear_qkv.adapter.linear_in.weight     query_lora_a: rank hidden    no_query_gate
decoder.layers.{layer}.self_attention.linear_qkv.adapter.linear_out.weight    (group (query_lora_b: head half pair | key_lora_b: half pair | value_lora_b: dim)) rank    no_query_gate
decoder.layers.{layer}.mlp.linear_fc1.adapter.linear_in.weight                gate_lora_a: rank hidden    dense
decoder.layers.{layer}.mlp.linear_fc1.adapter.linear_out.weight               (gate_lora_b: shard fold chunk | up_lora_b: shard fold chunk) rank    dense
decoder.layers.{layer}.mlp.shared_experts.linear_fc1.adapter.linear_in.weight     shared_gate_lora_a: rank hidden    sparse
decoder.layers.{layer}.mlp.shared_experts.linear_fc1.adapter.linear_out.weight    (shared_gate_lora_b: shard fold shared_chunk | shared_up_lora_b: shard fold shared_chunk) rank    sparse
decoder.layers.{layer}.mlp.linear_fc1.adapter.linear_in.weight                up_lora_a: rank hidden    dense plain
decoder.layers.{layer}.mlp.linear_fc1.adapter.linear_out.weight               up_lora_b: (shard fold chunk) rank    dense plain
"""),
    *ALIKE,
)
"""The layout of Bridge's `LoRA`."""
CANONICAL = (
    *rules("""
decoder.layers.{layer}.self_attention.linear_qkv.adapter.adapter_q.linear_in.weight     query_lora_a: rank hidden    no_query_gate
decoder.layers.{layer}.self_attention.linear_qkv.adapter.adapter_q.linear_out.weight    query_lora_b: (group head half pair) rank    no_query_gate
decoder.layers.{layer}.self_attention.linear_qkv.adapter.adapter_k.linear_in.weight     key_lora_a: rank hidden    no_query_gate
decoder.layers.{layer}.self_attention.linear_qkv.adapter.adapter_k.linear_out.weight    key_lora_b: (group half pair) rank    no_query_gate
decoder.layers.{layer}.self_attention.linear_qkv.adapter.adapter_v.linear_in.weight     value_lora_a: rank hidden    no_query_gate
decoder.layers.{layer}.self_attention.linear_qkv.adapter.adapter_v.linear_out.weight    value_lora_b: (group dim) rank    no_query_gate
decoder.layers.{layer}.mlp.linear_fc1.adapter.adapter_gate.linear_in.weight             gate_lora_a: rank hidden    dense
decoder.layers.{layer}.mlp.linear_fc1.adapter.adapter_gate.linear_out.weight            gate_lora_b: (fold shard chunk) rank    dense
decoder.layers.{layer}.mlp.linear_fc1.adapter.adapter_up.linear_in.weight               up_lora_a: rank hidden    dense
decoder.layers.{layer}.mlp.linear_fc1.adapter.adapter_up.linear_out.weight              up_lora_b: (fold shard chunk) rank    dense
decoder.layers.{layer}.mlp.shared_experts.linear_fc1.adapter.adapter_gate.linear_in.weight     shared_gate_lora_a: rank hidden    sparse
decoder.layers.{layer}.mlp.shared_experts.linear_fc1.adapter.adapter_gate.linear_out.weight    shared_gate_lora_b: (fold shard shared_chunk) rank    sparse
decoder.layers.{layer}.mlp.shared_experts.linear_fc1.adapter.adapter_up.linear_in.weight       shared_up_lora_a: rank hidden    sparse
decoder.layers.{layer}.mlp.shared_experts.linear_fc1.adapter.adapter_up.linear_out.weight      shared_up_lora_b: (fold shard shared_chunk) rank    sparse
"""),
    *ALIKE,
)
"""The layout of Bridge's `CanonicalLoRA`."""
TABLES = {"fused": FUSED, "canonical": CANONICAL}
CLASSES = {"fused": "megatron.bridge.peft.lora.LoRA", "canonical": "megatron.bridge.peft.canonical_lora.CanonicalLoRA"}
"""The class of Bridge that trains an adapter, by kind."""
TARGETS = {
    "query": {"fused": "linear_qkv", "canonical": "linear_q"},
    "key": {"fused": "linear_qkv", "canonical": "linear_k"},
    "value": {"fused": "linear_qkv", "canonical": "linear_v"},
    "output": {"fused": "linear_proj", "canonical": "linear_proj"},
    "gate": {"fused": "linear_fc1", "canonical": "linear_fc1_gate"},
    "up": {"fused": "linear_fc1", "canonical": "linear_fc1_up"},
    "down": {"fused": "linear_fc2", "canonical": "linear_fc2"},
    "shared_gate": {"fused": "linear_fc1", "canonical": "linear_fc1_gate"},
    "shared_up": {"fused": "linear_fc1", "canonical": "linear_fc1_up"},
    "shared_down": {"fused": "linear_fc2", "canonical": "linear_fc2"},
    "expert_gate": {"fused": "linear_fc1", "canonical": "linear_fc1_gate"},
    "expert_up": {"fused": "linear_fc1", "canonical": "linear_fc1_up"},
    "expert_down": {"fused": "linear_fc2", "canonical": "linear_fc2"},
}
"""The name of a matrix in `target_modules`, by kind."""
PLACES = {
    **dict.fromkeys(("gate", "up", "down"), "*.mlp."),
    **dict.fromkeys(("shared_gate", "shared_up", "shared_down"), "*.mlp.shared_experts."),
    **dict.fromkeys(("expert_gate", "expert_up", "expert_down"), "*.mlp.experts.*"),
}
"""What stands before the name of a matrix in `target_modules` where the name alone would be that of others too."""
EXPORT = "export it with Megatron-Bridge: AutoBridge.export_adapter_ckpt"


# --- reading ---------------------------------------------------------------------------------------------------------


def read(
    run: Path,
    folder: Path,
    common: TorchFile,
    args: Mapping[str, Any],
    peft: Mapping[str, Any],
    tensors: Mapping[str, Scattered],
    names: Sequence[str],
    settings: Settings,
) -> Checkpoint:
    """The adapter of a checkpoint as a checkpoint of its own, with the names of PEFT's files.

    Args:
        run: the folder of the run.
        folder: the folder of the iteration.
        common: the file that holds the args.
        args: the attributes of the checkpoint's `args`.
        peft: the fields of the adapter's class in Megatron-Bridge; empty if no file has them.
        tensors: the tensors of the adapter, one for each layer.
        names: the names of all tensors and objects in the checkpoint.
        settings: the user's settings.

    Raises:
        UsageError: there is no adapter, or the user asked for more than the adapter (`--adapter only`).
        SourceError: the adapter is not complete, or has more than its config names.
        UnsupportedError: the adapter is of another method, or of other modules.
    """
    if not tensors:
        raise UsageError(f"{folder} holds no adapter", "leave --adapter out")
    if settings.adapter != "only":
        raise UsageError(f"{folder} holds no base", "take the adapter with --adapter only, then convert merge")
    config = huggingface.read_config(settings.config) if settings.config else None
    base = huggingface.read_spec(config, settings.config, settings) if settings.config and config else None
    model = from_megatron(args, settings.values, base, str(common.path), accept=settings.accept, settled=True)
    model = replace(model, mtp_layers=0)
    require_products(args, tensors, str(common.path))
    tensors = _of_each_expert(tensors, model, args, folder)
    named = next((kind for kind, name in CLASSES.items() if peft and peft.get("_target_") == name), "fused")
    kind = "canonical" if any(f"{ADAPTER}adapter_" in key for key in tensors) else named  # some names are of both
    if peft and peft.get("_target_") != CLASSES[kind]:
        raise UnsupportedError(f"{common.path}: the adapter is of the class {short(peft.get('_target_'))}", EXPORT)
    rank, expert_rank = (_rank(tensors, of_experts, folder) for of_experts in (False, True))
    topk = (model.top_k or 1) if peft.get("normalize_moe_lora") else 1
    if expert_rank and peft and expert_rank * topk != peft.get("dim"):
        raise SourceError(
            f"{folder} holds factors of experts of rank {expert_rank}, {common.path} says dim = "
            f"{short(peft.get('dim'))}{f' for {topk} experts' * (topk > 1)}"
        )
    matrices = _matrices_of(tensors, TABLES[kind], model)
    named_modules, excluded = lora_targets.patterns(peft, common.path)
    absent = tuple(name for name in TARGETS if name in model.tensors and name not in matrices)
    tp = args.get("tensor_model_parallel_size") or 1
    spec = spec_of(
        model,
        rank or expert_rank * topk,
        matrices,
        shared=kind == "fused",
        expert_rank=expert_rank,
        shards=tp if kind == "canonical" else 0,
    )
    require_orders(spec, tp)
    staged = (args.get("pipeline_model_parallel_size") or 1) > 1
    without = _modules(replace(spec, matrices=absent), kind, "no_query_gate")
    layers = model.layers if staged else 0
    lora_targets.require(_modules(spec, kind), without, named_modules, excluded, layers, folder)
    try:
        _, placed, _ = match_pieces(_slots(spec), tensors, (), folder)
    except SourceError as error:
        hint = f"adapters of attention, MLPs and experts are read; of others: {EXPORT}"
        raise SourceError(str(error), hint) from None
    without_adapters = tuple(name for name in names if ADAPTER not in name)
    return Checkpoint(
        run,
        folder,
        "megatron_dist",
        spec,
        placed,
        without_adapters,
        tuple(dict.fromkeys([common.path, *(path for tensor in tensors.values() for path in tensor.files)])),
        details=Details(arguments=tuple(args)),
        settings=settings,
        run_config={"peft": peft} if peft else {},
    )


def require_products(args: Mapping[str, Any], keys: Iterable[str], where: str) -> None:
    """Refuse adapters of experts for which Bridge trained something else than the product of their factors.

    Args:
        args: the attributes of the checkpoint's `args`.
        keys: the keys of the adapter's tensors.
        where: the file that holds the args, for error messages.

    Raises:
        UnsupportedError: it is such an adapter, or one whose rows are in another order.
    """
    names, tp = [*keys], args.get("tensor_model_parallel_size") or 1
    of_experts, of_shared = (any(place in name for name in names) for place in (EXPERTS, SHARED_EXPERTS))
    etp = args.get("expert_tensor_parallel_size") or tp
    if of_experts and etp > 1:
        raise UnsupportedError(
            f"{where} says expert_tensor_parallel_size = {etp}, with which Megatron-Bridge computes something else than "
            "the product of the factors of an expert's LoRA (Megatron-Bridge#5634): no merged matrix is what was trained"
        )
    if of_shared and tp > 1 and args.get("moe_shared_expert_overlap"):
        raise UnsupportedError(
            f"{where} says moe_shared_expert_overlap and tensor_model_parallel_size = {tp}, with which Megatron-Bridge "
            "adds the LoRA of shared experts several times (Megatron-Bridge#5634): no merged matrix is what was trained"
        )
    if (of_experts or of_shared) and any(interleaves_of(args, where).values()):
        raise UnsupportedError(f"{where}: gate and up of experts alternate, and the order of their LoRA is not known")
    if apart := [name for name in names if EXPERTS in name and f"{ADAPTER}adapter_" in name]:
        raise UnsupportedError(
            f"{apart[0]} is of CanonicalLoRA around experts that are not grouped, which has one lora_A for the gate and "
            "one for up, and PEFT has one for gate_up_proj",
            EXPORT,
        )


def _of_each_expert(
    tensors: Mapping[str, Scattered], model: ModelSpec, args: Mapping[str, Any], folder: Path
) -> dict[str, Scattered]:
    """The tensors of an adapter, in which a factor that all experts share is one of each expert.

    Such a factor is a matrix with `experts_shared_outer_loras`, and in releases before 0.5.1 whatever the experts of a
    rank share; from then on that has an axis of experts, as have factors of single experts.

    Raises:
        UnsupportedError: there were several ranks of experts, of which the factor is the first one's.
    """
    shared = {key for key, tensor in tensors.items() if EXPERTS in key and len(tensor.shape) == 2}
    if shared and (args.get("expert_model_parallel_size") or 1) > 1:
        raise UnsupportedError(
            f"{folder}: {min(shared)} has no axis of experts, and is of the first of "
            f"{args['expert_model_parallel_size']} expert parallel ranks: those of the others were not saved"
        )
    return {key: repeat(tensor, model.experts or 1) if key in shared else tensor for key, tensor in tensors.items()}


def _rank(tensors: Mapping[str, Scattered], of_experts: bool, folder: Path) -> int:
    """The rank of the factors of experts, or of all others; 0 if there are none.

    Raises:
        SourceError: there are several ranks.
    """
    inputs = (
        tensor
        for key, tensor in tensors.items()
        if key.endswith(".linear_in.weight") and (EXPERTS in key) == of_experts
    )
    ranks = {tensor.shape[-2] for tensor in inputs if len(tensor.shape) > 1}
    if len(ranks) > 1:
        raise SourceError(f"{folder} holds factors of {len(ranks)} ranks: {some([*map(str, sorted(ranks))], 3)}")
    return max(ranks, default=0)


def _matrices_of(keys: Mapping[str, Any], table: Sequence[Rule], model: ModelSpec) -> tuple[str, ...]:
    """The matrices of a model for which at least one layer has a factor among `keys`."""
    rules = [rule for rule in table if any(rule.key.replace("{layer}", key.split(".")[2]) == key for key in keys)]
    names = {name.rpartition("_lora_")[0] for rule in rules for name in rule.pattern.tensors} & {*model.tensors}
    return tuple(name for name in TARGETS if name in names)


def _modules(spec: LoraSpec, kind: str, *conditions: str) -> Iterator[tuple[str, set[str]]]:
    """The modules with an adapter, by their names in a checkpoint, and what `target_modules` calls each adapter."""
    for slot in _slots(spec, *conditions):
        matrices = {tensor.rpartition("_lora_")[0] for tensor in slot.rule.pattern.tensors}
        yield slot.keys[0].partition(ADAPTER)[0], {TARGETS[matrix][kind] for matrix in matrices}


def _slots(spec: LoraSpec, *conditions: str) -> list[Slot]:
    """The slots of an adapter, one for each layer, of rules under further conditions too."""
    return list(spec.slots_in(TABLES["fused" if spec.shared else "canonical"], *conditions))


def require_orders(spec: LoraSpec, tp: int) -> None:
    """Refuse an adapter whose rows are not in a known order at a tensor parallel size.

    Raises:
        UnsupportedError: the order of the rows is not known, or the rank or the rows of the MLP do not divide.
    """
    ungated, inside = "plain" in spec.base.conditions, {"gate", "up"} & {*spec.matrices}
    rows = [(spec.base.ffn, inside), (spec.base.shared_ffn or 0, {"shared_gate", "shared_up"} & {*spec.matrices})]
    if inside and ungated and (tp > 1 or not spec.shared):
        raise UnsupportedError(
            f"linear_fc1 of a {spec.base.family} has no gate: versions of Megatron-Bridge differ in how they store its "
            f"LoRA at a tensor parallel size of {tp}, and CanonicalLoRA has none",
            "--tp 1 --lora fused",
        )
    parts, divided = tp * (1 if spec.shared else 2), not {*spec.matrices} <= OF_EXPERTS
    if odd := [count for count, names in rows if (divided and spec.rank % tp) or (names and count % parts)]:
        raise UnsupportedError(f"a LoRA of rank {spec.rank} on an MLP of {odd[0]} rows does not divide over tp = {tp}")


# --- writing ---------------------------------------------------------------------------------------------------------


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
    _, padded = topology_of(base, options)
    require_orders(spec, options.tp)
    absent = [name for group in TOGETHER for name in group if {*group} & {*spec.matrices} and name not in spec.matrices]
    absent = [name for name in absent if name in base.tensors]
    if absent and spec.shared:
        raise UnsupportedError(
            f"the adapter has none of {', '.join(absent)}, and LoRA of Megatron-Bridge changes all of a fused matrix",
            "--lora canonical",
        )
    slots = [*_slots(spec), *_zeros(spec, absent)]
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
        for name, text in run_config.written(args, iteration, {"peft": peft}, further).items()
    }
    return Target(tuple(files), texts, {}, folder)


def _names(matrix: str, kind: str) -> tuple[str, str]:
    """The names of a matrix in `target_modules`: alone, and of its place."""
    name = TARGETS[matrix][kind]
    return name, PLACES.get(matrix, "") + name


def _target_modules(spec: LoraSpec, absent: Sequence[str]) -> list[str]:
    """The `target_modules` of an adapter, with their places where other matrices of the model have the same name."""
    kind, changed = "fused" if spec.shared else "canonical", (*spec.matrices, *absent)
    others = {TARGETS[name][kind] for name in TARGETS if name in spec.base.tensors and name not in changed}
    return [*dict.fromkeys(_names(name, kind)[TARGETS[name][kind] in others] for name in changed)]


def _zeros(spec: LoraSpec, absent: Sequence[str]) -> list[Slot]:
    """The slots of the adapters of zeros, for the matrices that have no adapter."""
    if not absent:
        return []
    slots = _slots(replace(spec, matrices=tuple(absent)))
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
