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

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from formats.checkpoint import Checkpoint, Details, Settings
from formats.errors import SourceError, UnsupportedError, UsageError, short, some
from formats.huggingface import folder as huggingface
from formats.layout.pieces import Scattered, match_pieces, repeat
from formats.layout.slots import Slot
from formats.layout.table import Rule, rules
from formats.megatron import lora_targets
from formats.megatron.args.args import from_megatron
from formats.megatron.args.moe import interleaves_of
from formats.model.lora import ALONE_FIRST, OF_EXPERTS, LoraSpec, spec_of
from formats.model.spec import ModelSpec
from formats.torch_files.archive import TorchFile

ADAPTER = ".adapter."
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
FIELDS = {
    "_target_", "a2a_experimental", "alpha", "canonical_mapping", "dim", "dropout", "dropout_position",
    "exclude_modules", "experts_shared_outer_loras", "lora_A_init_method", "lora_B_init_method", "lora_dtype",
    "normalize_moe_lora", "params_to_save", "sequence_parallel_input_regather", "share_expert_adapters",
    "target_modules",
}  # fmt: skip
"""The fields of these classes, 0.3.1 to 0.6.2."""
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
EXPORT = "export it with Megatron-Bridge: AutoBridge.export_adapter_ckpt"


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
        raise UsageError(f"{folder} holds no base", ALONE_FIRST)
    config = huggingface.read_config(settings.config) if settings.config else None
    base = huggingface.read_spec(config, settings.config, settings) if settings.config and config else None
    model = from_megatron(args, settings.values, base, str(common.path), accept=settings.accept, settled=True)
    model = replace(model, mtp_layers=0)
    tp, stages, ep = (_parallel(args, f"{axis}_model", common.path) for axis in ("tensor", "pipeline", "expert"))
    _require_products(args, tensors, tp, common.path)
    tensors = _of_each_expert(tensors, model, ep, folder)
    named = next((kind for kind, name in CLASSES.items() if peft and peft.get("_target_") == name), "fused")
    kind = "canonical" if any(f"{ADAPTER}adapter_" in key for key in tensors) else named  # some names are of both
    if peft and peft.get("_target_") != CLASSES[kind]:
        raise UnsupportedError(f"{common.path}: the adapter is of the class {short(peft.get('_target_'))}", EXPORT)
    if unknown := sorted(name for name, value in peft.items() if value and name not in FIELDS):
        said = f"{unknown[0]} = {short(peft[unknown[0]])}"
        raise UnsupportedError(f"{common.path}: its peft says {said}, which no Megatron-Bridge up to 0.6.2 has", EXPORT)
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
    spec = spec_of(
        model,
        rank or expert_rank * topk,
        matrices,
        shared=kind == "fused",
        expert_rank=expert_rank,
        shards=tp if kind == "canonical" else 0,
    )
    require_orders(spec, tp)
    without = _modules(replace(spec, matrices=absent), kind, "no_query_gate")
    layers = model.layers if stages > 1 else 0
    lora_targets.require(_modules(spec, kind), without, named_modules, excluded, layers, folder)
    try:
        _, placed, _ = match_pieces(slots_of(spec), tensors, (), folder)
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


def _parallel(args: Mapping[str, Any], kind: str, where: Path, usual: int = 1) -> int:
    """How many ranks a training had of a kind of parallelism, such as `expert_model`; `usual` where no arg says it.

    Raises:
        SourceError: it is no whole number above 0.
    """
    name = f"{kind}_parallel_size"
    size = args.get(name) or usual
    if type(size) is not int or size < 0:
        raise SourceError(
            f"{where} says {name} = {short(size)}, which is no number of ranks", "take the file of the run"
        )
    return size


def _require_products(args: Mapping[str, Any], keys: Iterable[str], tp: int, where: Path) -> None:
    """Refuse adapters of experts for which Bridge trained something else than the product of their factors.

    Args:
        args: the attributes of the checkpoint's `args`.
        keys: the keys of the adapter's tensors.
        tp: tensor parallel size of the training.
        where: the file that holds the args, for error messages.

    Raises:
        UnsupportedError: it is such an adapter, or one whose rows are in another order.
    """
    names = [*keys]
    of_experts, of_shared = (any(place in name for name in names) for place in (EXPERTS, SHARED_EXPERTS))
    if of_experts and (etp := _parallel(args, "expert_tensor", where, tp)) > 1:
        raise UnsupportedError(
            f"{where} says expert_tensor_parallel_size = {etp}, with which Megatron-Bridge computes something else than "
            "the product of the factors of an expert's LoRA (Megatron-Bridge#5634): no merged matrix is what was trained"
        )
    if of_shared and tp > 1 and args.get("moe_shared_expert_overlap"):
        raise UnsupportedError(
            f"{where} says moe_shared_expert_overlap and tensor_model_parallel_size = {tp}, with which Megatron-Bridge "
            "adds the LoRA of shared experts several times (Megatron-Bridge#5634): no merged matrix is what was trained"
        )
    if (of_experts or of_shared) and any(interleaves_of(args, str(where)).values()):
        raise UnsupportedError(f"{where}: gate and up of experts alternate, and the order of their LoRA is not known")
    if apart := [name for name in names if EXPERTS in name and f"{ADAPTER}adapter_" in name]:
        raise UnsupportedError(
            f"{apart[0]} is of CanonicalLoRA around experts that are not grouped, which has one lora_A for the gate and "
            "one for up, and PEFT has one for gate_up_proj",
            EXPORT,
        )


def _of_each_expert(tensors: Mapping[str, Scattered], model: ModelSpec, ep: int, folder: Path) -> dict[str, Scattered]:
    """The tensors of an adapter, in which a factor that all experts share is one of each expert.

    Such a factor is a matrix with `experts_shared_outer_loras`, and in releases before 0.5.1 whatever the experts of a
    rank share; from then on that has an axis of experts, as have factors of single experts.

    Args:
        tensors: the tensors of the adapter, one for each layer.
        model: the base model.
        ep: expert parallel size of the training.
        folder: the folder of the iteration, for error messages.

    Raises:
        UnsupportedError: there were several ranks of experts, of which the factor is the first one's.
    """
    shared = {key for key, tensor in tensors.items() if EXPERTS in key and len(tensor.shape) == 2}
    if shared and ep > 1:
        raise UnsupportedError(
            f"{folder}: {min(shared)} has no axis of experts, and is of the first of {ep} expert parallel ranks: those "
            "of the others were not saved"
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
    for slot in slots_of(spec, *conditions):
        matrices = {tensor.rpartition("_lora_")[0] for tensor in slot.rule.pattern.tensors}
        yield slot.keys[0].partition(ADAPTER)[0], {TARGETS[matrix][kind] for matrix in matrices}


def slots_of(spec: LoraSpec, *conditions: str) -> list[Slot]:
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
    if spec.rank % tp and not {*spec.matrices} <= OF_EXPERTS:
        raise UnsupportedError(f"a LoRA of rank {spec.rank} does not divide over tp = {tp}")
    parts = tp * (1 if spec.shared else 2)
    if odd := [count for count, names in rows if names and count % parts]:
        raise UnsupportedError(f"a LoRA of an MLP of {odd[0]} rows does not divide over tp = {tp} in {parts} parts")
