"""Write the optimizer of a nanotron training: a file for each pipeline and tensor-parallel rank, without ZeRO.

A training that resumes loads the file of its own rank and pairs the parameter groups with its own by order, the order
of the modules. It can also split the files of one rank for any tensor-parallel size, but then makes master weights
from the weights (serialize/optimizer.py `load_optimizer`).

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
from formats.huggingface.nanotron.codecs import LLAMA, QWEN2
from formats.huggingface.nanotron.optimizer import CONFIG, FOLDER, SIZES
from formats.huggingface.nanotron.tables import slots_of
from formats.layout.slots import Slot
from formats.model.spec import ModelSpec
from formats.optimizer import STATES, Group, Optimizer, step_tensor
from formats.torch_files.archive_writer import TensorEntry, archived
from formats.torch_files.pickle_values import TensorRef

EMBEDDING, NORM, HEAD = "model.token_position_embeddings.", "model.final_layer_norm.", "model.lm_head."
"""Name prefixes of the blocks of a model that are not layers."""
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
"""Model class: the modules of a layer, in nanotron's order; the weight of a module comes before its bias."""
PLAIN: Mapping[str, Any] = {
    "amsgrad": False, "maximize": False, "foreach": None, "capturable": False, "differentiable": False, "fused": None,
    "decoupled_weight_decay": True,
}  # fmt: skip
"""The other keys of a parameter group of torch's AdamW: a training loads its groups unchanged from the file."""


@dataclass(frozen=True)
class Topology:
    """The parallel sizes of the training that resumes."""

    tp: int = 1
    pp: int = 1


def files_of(
    root: Path, spec: ModelSpec, padded: int, kind: str, optimizer: Optimizer, topology: Topology
) -> Iterator[OutputFile]:
    """Lay out the optimizer files of all ranks.

    Args:
        root: the folder of the checkpoint.
        spec: the model.
        padded: rows of the embedding, padding among them.
        kind: the model class in nanotron, `LLAMA` or `QWEN2`.
        optimizer: the optimizer to write.
        topology: the parallel sizes.

    Raises:
        RefusedError: nanotron cannot train the model in this topology.
        UnsupportedError: the optimizer is not Adam, has no settings, or has several settings for parts of one parameter
            of nanotron.
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
    """Return optimizer_config.json by its path: the class of the optimizer, and the parallel sizes."""
    sizes = {"tp": topology.tp, "dp": 1, "pp": topology.pp, "exp": 1}
    kind = "OptimizerFromGradientAccumulator" if STATES[0] in optimizer.states else "NamedOptimizer"
    config = {"type": kind, "parallelism": {SIZES[axis]: str(size) for axis, size in sizes.items()}, "configs": {}}
    return {f"{FOLDER}/{CONFIG}": json.dumps(config).encode()}


def stages_of(spec: ModelSpec, padded: int, pp: int) -> list[list[str]]:
    """Return the blocks of each pipeline stage, a block as the prefix of its parameters' names.

    A stage ends with the block at which the sum of the costs so far exceeds the share of the stages so far.

    Raises:
        RefusedError: a stage would have no block.
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
    """Refuse a tensor-parallel size that does not divide the heads, rows and columns of the model.

    Raises:
        RefusedError: the tensor-parallel size does not divide one of them.
    """
    sizes = {"heads": spec.heads, "key/value heads": spec.kv_heads, "columns of the MLP": spec.ffn,
             "columns of the shared expert": spec.shared_ffn or 0, "rows of the embedding": padded}  # fmt: skip
    for name, size in sizes.items():
        if size % topology.tp:
            raise RefusedError(f"--tp {topology.tp} does not divide {size} {name}")


def _of_block(
    block: str, slots: Mapping[str, Slot], kind: str, spec: ModelSpec, stages: Sequence[Sequence[str]]
) -> list[Slot]:
    """Return the parameters of a block, in the order of its modules; a tied head repeats the embedding.

    With one stage only, a tied head and the embedding are one parameter, in the embedding's block.
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
    """Lay out the file of a rank, in the form in which torch.save writes the optimizer's `state_dict()`."""
    treated = [_group(slot, optimizer) for slot in parameters]
    step = step_tensor(optimizer.updates(path))
    states: dict[str, list[TensorEntry]] = {
        state: [(f"{state} {slot.keys[0]}", slot, slot.shape, slot_dtype(slot, dtypes)) for slot in parameters]
        for state, dtypes in optimizer.dtypes.items()
    }

    def value(refs: Mapping[str, TensorRef]) -> dict[str, Any]:
        names = [slot.keys[0] for slot in parameters]
        moments = [{"step": step, **{state: refs[f"{state} {name}"] for state in STATES[1:]}} for name in names]
        groups = [{**group._asdict(), **PLAIN, "params": [number]} for number, group in enumerate(treated)]
        content = {"state": dict(enumerate(moments)), "param_groups": groups, "names": dict(enumerate(names))}
        if STATES[0] in states:
            content["gradient_accumulator"] = {name: refs[f"{STATES[0]} {name}"] for name in names}
        return content

    return archived(path, (), value, path.stem, states)


def _group(slot: Slot, optimizer: Optimizer) -> Group:
    """Return the AdamW settings of a parameter.

    Raises:
        UnsupportedError: the settings are unknown, or differ between logical tensors of the parameter.
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
