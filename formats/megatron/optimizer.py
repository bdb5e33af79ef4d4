"""The optimizer state of a Megatron run: Adam's states of each parameter, and how they are written.

    model_optim_rng.pt    {state: {i: {exp_avg, exp_avg_sq, step}}, param_groups}                  float32
                          {optimizer: {state, param_groups}, fp32_from_fp16_params: [[master] of each group]}
                                                                                                    half precision
                          {optimizer: {param_groups}}, with distrib_optim.pt in the same folder     distributed
    distrib_optim.pt      {chunk: {types: {param, exp_avg, exp_avg_sq, numel_unpadded}}}: the parameters end to end
    torch_dist            optimizer.state.{exp_avg|exp_avg_sq|fp32_param|param}.{key of the model}; or buckets:
                          optimizer.distributed.dp_group_idx_{rank}.gbuf_idx_{chunk}.{types}.bucket_idx_{n}.{param|…}

The numbers i count the parameters with weight decay first, then the vectors and biases, both in the order of the model.
In `distrib_optim.pt` parameters are in the reverse order of the model, each from a multiple of 64 elements on. Experts
on several ranks have an optimizer of their own (`chained_optimizer`).

Facts: megatron-core 0.16.1, optimizer/__init__.py `_get_param_groups`, optimizer.py, distrib_optimizer.py and
distributed/param_and_grad_buffer.py; tests/golden/test_megatron_optim.py resumes a training with each.
"""

from __future__ import annotations

import re
import struct
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from formats.checkpoint import Checkpoint, OutputFile, slot_dtype
from formats.disk.safetensors import DTYPES, Fragment, row_major
from formats.errors import UnsupportedError
from formats.layout.placed import Placed
from formats.layout.tensors import BUFFERS
from formats.megatron import chained_optimizer as chained
from formats.megatron import muon
from formats.megatron.chained_optimizer import Parameter, decays
from formats.optimizer import STATES
from formats.torch_files.archive_plan import STREAM, plan_archive
from formats.torch_files.archive_writer import Small, TensorEntry
from formats.torch_files.pickle_values import Dtype, StorageRef, TensorRef

ALIGNMENT = 64
"""In the buffers of a distributed optimizer a parameter begins at a multiple of so many elements."""
RESHARDABLE = "fully_reshardable"
OTHERS = {"lion": "Megatron trains the matrices of the layers alone with it, and with Adam all else"}
"""What else `--optimizer` takes, and why it is not carried (0.19.2 optimizer/__init__.py: `lion` is among the
emerging ones; 0.16.1 has none). Beside a Lion that is layer-wise it saves no `exp_avg_sq` of its Adam."""
PREFIX = "optimizer.state."
SHARDED = "distrib_optim.pt"
LAYER = re.compile(r"(decoder|mtp)\.layers\.(\d+)\.(?:transformer_layer\.|mtp_model_layer\.)?(.*)")
MODULES = (
    "enorm", "hnorm", "eh_proj", "mixer.conv1d_", "mixer.dt_bias", "mixer.A_log", "mixer.D", "mixer.in_proj",
    "mixer.conv1d", "mixer.norm", "mixer.out_proj", "input_layernorm", "self_attention.dt_bias", "self_attention.A_log",
    "self_attention.in_proj", "self_attention.conv1d", "self_attention.out_norm", "self_attention.out_proj",
    "self_attention.core_attention", "self_attention.linear_proj", "self_attention.linear_qkv",
    "self_attention.linear_q_proj", "self_attention.linear_q_down_proj", "self_attention.linear_q_up_proj",
    "self_attention.linear_kv_down_proj", "self_attention.linear_kv_up_proj", "self_attention.q_layernorm",
    "self_attention.k_layernorm", "self_attention.kv_layernorm", "pre_mlp_layernorm", "mlp.linear_fc1",
    "mlp.linear_fc2", "mlp.router",
    "mlp.fc1_latent_proj", "mlp.fc2_latent_proj", "mlp.experts", "mlp.shared_experts", "final_layernorm",
)  # fmt: skip
"""The modules of a layer in the order of the model (transformer_layer.py, attention.py,
gated_delta_net.py, mlp.py, moe_layer.py; multi_token_prediction.py for those of an MTP layer)."""
EXPERT = re.compile(r"mlp\.experts\.(?:local_experts\.(\d+)\.|linear_fc([12])\.\w+?(\d+)$)")
"""The key of an expert's tensor. Experts are a module each; or all their fc1 are one module and all their fc2 another,
in which the tensors are ordered by expert (transformer_engine/pytorch/module/grouped_linear.py, `weight0`, `bias0`,
`weight1`, ...)."""


@dataclass(frozen=True)
class Optimizer:
    """The training state of a run, besides the weights.

    Attributes:
        states: the states of KEPT that the optimizer has, each as a checkpoint of its own.
        groups: Adam's parameter groups, without their parameters.
        distributed: whether it is Megatron's distributed optimizer, which has its step in the groups.
        step: the step of torch's Adam; None if the groups have it.
        scaler: the state of the loss scaler of an FP16 training; None without one.
        head: entries beside the optimizer that are the same on all ranks, such as the learning rate scheduler.
        grads: torch's name of the element type in which gradients are reduced.
        muon: the parameter group of Muon, beside which Adam trains all other parameters; None without Muon.
        run: further args of a training that resumes with the optimizer.
    """

    states: Mapping[str, Checkpoint]
    groups: Sequence[Mapping[str, Any]]
    distributed: bool
    step: Small | None
    scaler: Any
    head: Mapping[str, Any]
    grads: str
    muon: Mapping[str, Any] | None = None
    run: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def dtypes(self) -> dict[str, Mapping[tuple[str, int | None], str]]:
        """The element type of each logical tensor, by state."""
        return {state: source.dtypes() for state, source in self.states.items()}

    def args(self) -> dict[str, Any]:
        """The args by which Megatron recognizes that a checkpoint holds the optimizer."""
        if self.muon is None:
            return {"no_save_optim": False, "use_distributed_optimizer": self.distributed}
        layered = dict.fromkeys(muon.LAYERED, self.distributed)
        kind = {"optimizer": muon.NAME, "use_distributed_optimizer": False, **layered}
        return {"no_save_optim": False, **kind, **self.run}

    def around(self, inner: Mapping[str, Any], masters: Any = None) -> dict[str, Any]:
        """The entry `optimizer` of a file.

        Args:
            inner: the state dict of the inner optimizer, such as torch's Adam.
            masters: the FP32 master weights of each group; None if they are not in the entry.
        """
        if not self.distributed and "fp32" not in self.states:
            return dict(inner)
        state = {"optimizer": dict(inner)} | ({} if self.scaler is None else {"grad_scaler": self.scaler})
        return state if masters is None else {**state, "fp32_from_fp16_params": masters}


def of_kind(optimizer: Optimizer, source: Checkpoint, *, distributed: bool) -> Optimizer:
    """The same optimizer as a distributed one, or as a plain one.

    The distributed optimizer of a float32 model has FP32 master weights too, which are the weights themselves. The step
    of torch's Adam is beside the moments, and, if distributed, a float in the groups; that of Transformer Engine's and
    Apex's Adam is an integer in the groups in both (optimizer/distrib_optimizer.py `state_dict`).

    Args:
        optimizer: the optimizer of the source.
        source: the weights of the model.
        distributed: whether the result is a distributed optimizer.

    Raises:
        UnsupportedError: a state is not float32, or the step is stored in a way that is not known.
    """
    if optimizer.distributed == distributed:
        return optimizer
    for state, dtypes in optimizer.dtypes.items():
        if others := set(dtypes.values()) - {"F32"}:
            reason = "a distributed one is made of float32" if distributed else "only a distributed one keeps it so"
            raise UnsupportedError(f"{state} of the optimizer is {others.pop()}: {reason}", "leave --optimizer out")
    weights = tuple(item for item in source.tensors if not BUFFERS.intersection(item.slot.rule.pattern.tensors))
    groups, step, states = [dict(group) for group in optimizer.groups], optimizer.step, dict(optimizer.states)
    if distributed:
        if step is not None and (step.dtype, step.shape) != ("F32", ()):
            raise UnsupportedError(f"its optimizer counts steps as {step.dtype} {list(step.shape)}, which is not known")
        groups = groups if step is None else [{**group, "step": step.number} for group in groups]
        states = {"fp32": replace(source, tensors=weights, without=BUFFERS)} | states
        return replace(optimizer, states=states, groups=groups, distributed=True, step=None)
    if all(type(group.get("step")) is float for group in groups):
        step = Small("F32", (), struct.pack("<f", groups[0]["step"]))
        groups = [{name: item for name, item in group.items() if name != "step"} for group in groups]
    if all(item.fragment.dtype == "F32" for item in weights):
        del states["fp32"]
    return replace(optimizer, states=states, groups=groups, distributed=False, step=step)


def stored_name(state: str, distributed: bool) -> str:
    """The name of a state in a distributed checkpoint."""
    return state if state != "fp32" else "param" if distributed else "fp32_param"


# --- classic files ---------------------------------------------------------------------------------------------------


def in_order(parameters: Iterable[Parameter]) -> list[Parameter]:
    """The parameters of a file in the order of the model."""

    def place(parameter: Parameter) -> tuple[int, ...]:
        chunk, match = int(parameter.chunk[5:] or 0), LAYER.fullmatch(parameter.key)
        if match is None:
            begins = "first" in parameter.slot.rule.conditions or parameter.key.startswith("embedding.")
            return chunk, -1 if begins else 0 if parameter.key.startswith("decoder.") else 2, sys.maxsize
        rank = next((n for n, module in enumerate(MODULES) if match[3].startswith(module)), len(MODULES))
        expert = EXPERT.match(match[3])
        numbers = (int(number or 0) for number in (expert.groups() if expert else ()))
        return chunk, int(match[1] == "mtp"), int(match[2]), rank, *numbers

    return sorted(parameters, key=place)


def plain_tensors(optimizer: Optimizer, parameters: Sequence[Parameter]) -> dict[str, list[TensorEntry]]:
    """The tensors of a plain optimizer in a rank's file, by state."""
    tensors: dict[str, list[TensorEntry]] = {}
    for state, dtypes in optimizer.dtypes.items():
        tensors[state] = [
            (
                f"{state} {parameter.chunk} {parameter.key}",
                parameter.slot,
                parameter.slot.shape,
                slot_dtype(parameter.slot, dtypes),
            )
            for parameter in chained.trained(parameters)
        ]
    return tensors


def entry(
    optimizer: Optimizer, parameters: Sequence[Parameter], refs: Mapping[str, TensorRef], kinds: Collection[bool]
) -> Any:
    """The entry `optimizer` of a rank's file; a list of two if experts have an optimizer, whose groups are `kinds`."""
    every = zip(chained.groups(optimizer.groups, kinds), chained.shares(parameters, kinds), strict=True)
    entries = [_entry(optimizer, groups, share, refs) for groups, share in every]
    return entries if kinds else entries[0]


def _entry(
    optimizer: Optimizer,
    every: Sequence[Mapping[str, Any]],
    parameters: Sequence[Parameter],
    refs: Mapping[str, TensorRef],
) -> dict[str, Any]:
    if optimizer.distributed:
        return optimizer.around({"param_groups": list(every)})
    groups, states, masters = [], dict[int, dict[str, Any]](), []
    for group in every:
        members = [
            parameter
            for parameter in parameters
            if decays(parameter.key, parameter.slot.shape) == bool(group["wd_mult"])
        ]
        first = len(states)
        for number, parameter in enumerate(members, first):
            step = {} if optimizer.step is None else {"step": optimizer.step}
            states[number] = step | {
                name: refs[f"{name} {parameter.chunk} {parameter.key}"] for name in ("exp_avg", "exp_avg_sq")
            }
        groups.append({**group, "params": list(range(first, len(states)))})
        masters.append(
            [refs[f"fp32 {parameter.chunk} {parameter.key}"] for parameter in members if "fp32" in optimizer.states]
        )
    return optimizer.around({"state": states, "param_groups": groups}, masters)


def starts(sizes: Sequence[tuple[str, Sequence[int]]]) -> Iterator[tuple[int, int]]:
    """Number and first element of each parameter in the buffer of a distributed optimizer.

    Args:
        sizes: key and shape of each parameter of a chunk, in the order of the model.

    Raises:
        UnsupportedError: there are gaps between the parameters, which depend on how the buffer is cut into buckets.
    """
    at = 0
    for number in reversed(range(len(sizes))):
        key, shape = sizes[number]
        if prod(shape) % ALIGNMENT:
            raise UnsupportedError(
                f"{key} {list(shape)} is no multiple of {ALIGNMENT} elements: where in {SHARDED} the others lie, the "
                "buckets of a training decide",
                "take torch_dist instead, which a training saves with --dist-ckpt-optim-fully-reshardable",
            )
        yield number, at
        at += prod(shape)


def sharded_file(
    path: Path,
    optimizer: Optimizer,
    parameters: Sequence[Parameter],
    dtype: str,
    kinds: Collection[bool],
    *,
    first: bool,
) -> OutputFile:
    """The file `distrib_optim.pt` of a rank.

    Args:
        path: the path of the file.
        optimizer: the optimizer to write.
        parameters: the parameters of the rank.
        dtype: torch's name of the element type of the parameters.
        kinds: the groups of the experts' optimizer (`chained_optimizer.expert_groups`).
        first: whether the rank is the first data rank, which alone writes dense parameters.

    Raises:
        UnsupportedError: a state is not float32, or there would be gaps between the parameters.
    """
    for state, dtypes in optimizer.dtypes.items():
        if others := set(dtypes.values()) - {"F32"}:
            raise UnsupportedError(
                f"{state} is {others.pop()}, {SHARDED} is of float32", "--format torch_dist keeps it"
            )
    value: list[Any] = []
    buffers: list[list[Parameter]] = []
    storages: dict[str, int] = {}
    for number, share in enumerate(chained.shares(parameters, kinds)):
        chunks: dict[str, list[Parameter]] = {}
        for parameter in share if number or first else ():
            chunks.setdefault(parameter.chunk, []).append(parameter)
        entries: dict[Any, Any] = {"buckets_coalesced": True}
        for at, members in enumerate(chunks.values()):
            total = sum(prod(parameter.slot.shape) for parameter in members)
            tensors: dict[str, Any] = {}
            for state in STATES:
                name = str(len(storages))
                storages[name] = total * DTYPES["F32"]
                tensors[stored_name(state, True)] = TensorRef(StorageRef("F32", name, total), 0, (total,), (1,), "F32")
            entries[at] = {(Dtype(dtype), Dtype(optimizer.grads)): {**tensors, "numel_unpadded": total}}
            buffers.append(members)
        value.append(entries if number or first else None)
    archive = plan_archive(value if kinds else value[0], storages)
    extents = archive.storages()
    placed: dict[str, list[Placed]] = {state: [] for state in STATES}
    for number, members in enumerate(buffers):
        for index, at in starts([(parameter.key, parameter.slot.shape) for parameter in members]):
            parameter = members[index]
            for offset, state in enumerate(STATES):
                begin = extents[f"{STREAM}/data/{number * len(STATES) + offset}"][0] + at * DTYPES["F32"]
                fragment = Fragment(path, begin, "F32", parameter.slot.shape, row_major(parameter.slot.shape))
                placed[state].append(Placed(parameter.key, parameter.slot, fragment))
    return OutputFile(path, archive.size, (), extents, archive.headers, {s: tuple(p) for s, p in placed.items()})


# --- distributed checkpoints -----------------------------------------------------------------------------------------


def common(optimizer: Optimizer, kinds: Collection[bool]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The entries of `common.pt` for an optimizer, and the entries of its `content_metadata`."""
    metadata: dict[str, Any] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    metadata |= {"distrib_optim_sharding_type": RESHARDABLE} if optimizer.distributed else {}
    parts = [_common(optimizer, groups) for groups in chained.groups(optimizer.groups, kinds)]
    if optimizer.muon is not None:
        parts = [replace(optimizer, distributed=False).around({"param_groups": [dict(optimizer.muon)]}), *parts]
    return {**optimizer.head, "optimizer": dict(enumerate(parts)) if len(parts) > 1 else parts[0]}, metadata


def _common(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    if optimizer.distributed:
        return {**optimizer.around({"param_groups": groups}), "param_state_sharding_type": RESHARDABLE}
    step = {} if optimizer.step is None else {"common_step": optimizer.step}
    return optimizer.around({"state": step, "param_groups": groups})
