"""The optimizer of a nanotron training, written: a file for each pipeline and tensor parallel rank, without ZeRO.

A training that resumes takes the file of its own rank, whose groups it pairs with its own by their order, which is that
of the modules. The files of one rank it takes apart for any tensor parallel size, but with master weights that it makes
of the weights (serialize/optimizer.py `load_optimizer`).

Facts: huggingface/nanotron at 2411b022, serialize/optimizer.py, optim/base.py (`custom_load_state_dict`),
models/base.py (`build_model`), models/llama.py and models/qwen.py (`get_block_compute_costs`, the order of modules).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from formats.checkpoint import OutputFile, slot_dtype
from formats.errors import RefusedError, UnsupportedError
from formats.huggingface.nanotron.model_config import LLAMA, QWEN2
from formats.huggingface.nanotron.optimizer import CONFIG, FOLDER, SIZES
from formats.huggingface.nanotron.tables import slots_of
from formats.layout.slots import Slot
from formats.model.spec import ModelSpec
from formats.optimizer import STATES, Group, Optimizer, step_tensor
from formats.torch_files.archive_writer import Held, archived
from formats.torch_files.pickle_values import TensorRef

EMBEDDING, NORM, HEAD = "model.token_position_embeddings.", "model.final_layer_norm.", "model.lm_head."
"""Blocks of a model that are no layers."""
ORDER: Mapping[str, tuple[str, ...]] = {
    LLAMA: (
        "input_layernorm", "attn.qkv_proj", "attn.o_proj", "post_attention_layernorm", "mlp.gate_up_proj",
        "mlp.down_proj",
    ),
    QWEN2: (
        "input_layernorm", "post_attention_layernorm", "attn.qkv_proj", "attn.o_proj", "mlp.gate_up_proj",
        "mlp.down_proj", "mlp.router", "mlp.shared_expert.gate_up_proj", "mlp.shared_expert.down_proj",
        "mlp.shared_expert_gate", "mlp.experts.merged_gate_up_proj", "mlp.experts.merged_down_proj",
    ),
}  # fmt: skip
"""Class: the modules of a layer, in the order in which it has them; of one, the weight comes before the bias."""
PLAIN: Mapping[str, Any] = {
    "amsgrad": False, "maximize": False, "foreach": None, "capturable": False, "differentiable": False, "fused": None,
    "decoupled_weight_decay": True,
}  # fmt: skip
"""What else torch's AdamW has in a group: a training takes its groups from the file as they are."""


@dataclass(frozen=True)
class Topology:
    """The parallel sizes of the training that resumes."""

    tp: int = 1
    pp: int = 1


def files_of(
    root: Path, spec: ModelSpec, padded: int, kind: str, optimizer: Optimizer, topology: Topology
) -> Iterator[OutputFile]:
    """The files of all ranks.

    Args:
        root: the folder of the checkpoint.
        spec: the model.
        padded: rows of its embedding.
        kind: its class in nanotron, `LLAMA` or `QWEN2`.
        optimizer: what is written.
        topology: the parallel sizes.

    Raises:
        RefusedError: nanotron has no such topology of the model.
        UnsupportedError: it is not Adam's, without settings, or treats one parameter of nanotron in several ways.
    """
    _require_divided(spec, padded, topology)
    optimizer.require_only((Group,), root, "nanotron trains with AdamW")
    stages = stages_of(spec, padded, topology.pp)
    for tp in range(topology.tp):
        of_rank = slots_of(spec, padded, neighbours=False, tp=(tp, topology.tp))
        slots = {slot.keys[0]: slot for slot in of_rank}
        for pp, blocks in enumerate(stages):
            parameters = [slot for block in blocks for slot in _of_block(block, slots, kind, spec, stages)]
            name = f"optimizer_pp-{pp}-of-{topology.pp}_tp-{tp}-of-{topology.tp}_exp-0-of-1"
            yield _file(root / FOLDER / f"{name}.pt", parameters, optimizer)


def config_of(optimizer: Optimizer, topology: Topology) -> dict[str, bytes]:
    """The text beside them: the class of the optimizer, and the parallel sizes."""
    sizes = {"tp": topology.tp, "dp": 1, "pp": topology.pp, "exp": 1}
    kind = "OptimizerFromGradientAccumulator" if STATES[0] in optimizer.states else "NamedOptimizer"
    config = {"type": kind, "parallelism": {SIZES[axis]: str(size) for axis, size in sizes.items()}, "configs": {}}
    return {f"{FOLDER}/{CONFIG}": json.dumps(config).encode()}


def stages_of(spec: ModelSpec, padded: int, pp: int) -> list[list[str]]:
    """The blocks of each pipeline stage, by what the names of their parameters begin with.

    A stage ends with the block that takes the costs so far beyond its share.

    Raises:
        RefusedError: a stage would have none.
    """
    layer = 4 * spec.heads * (spec.hidden // spec.heads) * spec.hidden + 3 * spec.ffn * spec.hidden
    layers = {f"model.decoder.{number}.": layer for number in range(spec.layers)}
    costs = {EMBEDDING: 0, **layers, NORM: 0, HEAD: padded * spec.hidden}
    total, so_far, stages = sum(costs.values()), 0, [list[str]()]
    for block, cost in costs.items():
        stages[-1].append(block)
        so_far += cost
        if so_far > total * (len(stages) / pp):
            stages.append([])
    stages += [[] for _ in range(pp - len(stages))]
    if not all(stages):
        raise RefusedError(f"nanotron leaves a stage of {pp} without a block: {spec.layers} layers", "a smaller --pp")
    return stages


def _require_divided(spec: ModelSpec, padded: int, topology: Topology) -> None:
    """Each tensor parallel rank has as many heads, rows and columns as another.

    Raises:
        RefusedError: they do not divide.
    """
    sizes = {"heads": spec.heads, "key/value heads": spec.kv_heads, "columns of the MLP": spec.ffn,
             "columns of the shared expert": spec.shared_ffn or 0, "rows of the embedding": padded}  # fmt: skip
    for name, size in sizes.items():
        if size % topology.tp:
            raise RefusedError(f"--tp {topology.tp} does not divide {size} {name}")


def _of_block(
    block: str, slots: Mapping[str, Slot], kind: str, spec: ModelSpec, stages: Sequence[Sequence[str]]
) -> list[Slot]:
    """The parameters of a block, in the order of its modules; a tied head is the embedding once more.

    Where both are in one stage they are one parameter, that of the embedding.
    """
    if block == HEAD and spec.tied:
        return [
            slot._replace(replica=slot.replica._replace(shared=True))
            for key, slot in slots.items()
            if key.startswith(EMBEDDING) and len(stages) > 1
        ]
    own = [slot for key, slot in slots.items() if key.startswith(block)]
    order = {f"{block}pp_block.{module}": number for number, module in enumerate(ORDER[kind])}

    def place(slot: Slot) -> tuple[int, bool]:
        key = slot.keys[0]
        module = key if key in order else key.rpartition(".")[0]
        return order[module], key.endswith(".bias")

    return sorted(own, key=place) if len(own) > 1 else own


def _file(path: Path, parameters: Sequence[Slot], optimizer: Optimizer) -> OutputFile:
    """The file of a rank, as torch.save writes what `state_dict()` gives."""
    treated = [_group(slot, optimizer) for slot in parameters]
    step = step_tensor(optimizer.updates(path))
    states: dict[str, list[Held]] = {
        state: [(f"{state} {slot.keys[0]}", slot, slot.shape, slot_dtype(slot, dtypes)) for slot in parameters]
        for state, dtypes in optimizer.dtypes.items()
    }

    def value(refs: Mapping[str, TensorRef]) -> dict[str, Any]:
        names = [slot.keys[0] for slot in parameters]
        moments = [{"step": step, **{state: refs[f"{state} {name}"] for state in STATES[1:]}} for name in names]
        groups = [{**group._asdict(), **PLAIN, "params": [number]} for number, group in enumerate(treated)]
        kept = {"state": dict(enumerate(moments)), "param_groups": groups, "names": dict(enumerate(names))}
        if STATES[0] in states:
            kept["gradient_accumulator"] = {name: refs[f"{STATES[0]} {name}"] for name in names}
        return kept

    return archived(path, (), value, path.stem, states)


def _group(slot: Slot, optimizer: Optimizer) -> Group:
    """How AdamW treats a parameter.

    Raises:
        UnsupportedError: it is not said, or parts of the parameter are treated in several ways.
    """
    groups = {optimizer.groups.get((name, slot.layer)) for name in slot.rule.pattern.tensors}
    (group, *others) = groups
    if others or not isinstance(group, Group):
        how = f"in {len(groups)} ways" if others else "with settings that nobody says"
        raise UnsupportedError(
            f"{slot.keys[0]} is one parameter in nanotron, and was trained {how}",
            "convert the weights without --with-optimizer",
        )
    return group
