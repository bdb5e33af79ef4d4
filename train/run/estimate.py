"""Steps, memory and FLOPs of a training run, from its settings and the headers of its files: no GPU, no torch.

Memory is per rank, and is the sum of:

* FP32 weights, gradients and two moments of its shard. With LoRA these are of the adapters only, and the shard of the
  frozen weights in the compute dtype is added. Tensors of `model.freeze` are float32, with DeepSpeed in the compute
  dtype;
* the gathered weights of two layers, or of all layers without `parallel.reshard` (with tensor parallelism the rank's
  part of them), and of the root module, in the compute dtype;
* the inputs of every layer, which activation checkpointing keeps;
* the logits of a chunk.

ZeRO-1 does not shard gradients; neither ZeRO-1 nor ZeRO-2 shards the compute weights. All of it is an estimate:
kernels, the allocator and DeepSpeed's buckets need more, and what DeepSpeed offloads is counted all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import NamedTuple

import numpy as np

from formats.disk.json_file import read_json
from formats.errors import UnsupportedError, UsageError
from formats.huggingface.config import from_huggingface
from formats.huggingface.folder import model_slots
from formats.model.spec import ModelSpec, Spec
from formats.model.vocab_rows import EMBEDDING, HEAD
from train.data.rows import CHUNK, Rows, check_tokenizer, lengths, open_rows
from train.settings.batching import Order, Sizes, make_order, sizes_of
from train.settings.config import Config, Lora
from train.settings.effects import check_effect
from train.settings.freezing import frozen
from train.settings.schedule import check_schedule
from train.settings.splitting import require_divisible
from train.start.run_folder import started
from train.start.start_adapter import resolved

MASTER, GRADIENT = 4, 4
MOMENTS = {"fp32": 2 * 4, "8bit": 2 * (1 + 4 / 256)}
"""Bytes per parameter of a shard: FP32 weight; gradient; two moments, in 8 bits with a scale for each block."""
NF4 = 1 / 2 + 4 / 64
"""Bytes per quantized parameter."""
WIDTH = {"bf16": 2, "fp32": 4}
PEAK = {
    "A100": 312e12,  # NVIDIA A100 datasheet, dense bf16
    "H100": 989e12,  # NVIDIA H100 SXM datasheet
    "H200": 989e12,  # NVIDIA H200 datasheet
    "MI250X": 191.5e12,  # AMD MI250X datasheet: 383e12 of the card, whose two dies are a device each
    "MI300X": 1307e12,  # AMD MI300X datasheet
}
"""Peak bf16 FLOP/s of a device, by a part of its name."""


class Part(NamedTuple):
    """A set of a mixture.

    Attributes:
        name: prefix of its token file.
        rows: number of rows of the set.
        share: share of the set in the rows that are trained.
        trained: number of its rows that are trained, counting repetitions.
        epochs: passes over the set.
        tokens: number of its tokens that are trained, counting repetitions.
    """

    name: str
    rows: int
    share: float
    trained: int
    epochs: float
    tokens: int


class Estimate(NamedTuple):
    """What a training run will need.

    Attributes:
        ranks: number of ranks of the training.
        sizes: micro-batch, accumulation and rows per step.
        steps: number of optimizer steps.
        samples: number of rows of all steps; the last step may be short.
        rows: the rows of the data, and how full they are.
        parameters: number of parameters of the model, adapters included.
        trained: number of trainable parameters.
        memory: bytes per rank, by use.
        flops: model FLOPs of all steps, see `throughput.flops_of`.
        mixture: the sets of a mixture; empty if sets are not mixed.
    """

    ranks: int
    sizes: Sizes
    steps: int
    samples: int
    rows: Rows
    parameters: int
    trained: int
    memory: dict[str, int]
    flops: float
    mixture: list[Part]

    @property
    def epochs(self) -> float:
        """Number of passes over the rows."""
        return self.samples / len(self.rows)

    def seconds(self, device: str, mfu: float) -> float:
        """Time of all steps on a device of `PEAK` with this MFU, in seconds."""
        return self.flops / (PEAK[device] * mfu * self.ranks)


def estimate(config: Config, ranks: int) -> Estimate:
    """Estimate from the settings, the data's indexes and the model's headers.

    Raises:
        UsageError: the settings contradict each other, or the ranks cannot be divided.
        RefusedError: a token file was made with another tokenizer than the model's.
        UnsupportedError: the model is of no known family, or cannot be split.
    """
    from formats.registry import open_checkpoint
    from train.start.start_weights import settings_of

    if ranks % config.parallel.replicas:
        raise UsageError(f"{ranks} ranks cannot be {config.parallel.replicas} replicas of equal shards")
    sizes = sizes_of(config, ranks)
    rows = open_rows(config.data, config.data.train, config.seed)
    order, steps = make_order(rows.ends, config.seed, config.data, config.steps, sizes.size)
    check_schedule(config, steps)
    check_effect(config, steps)
    check_tokenizer(rows.documents, started(config.model.path))
    path = started(config.model.path)
    if config.model.init == "config":
        spec: Spec = from_huggingface(read_json(path / "config.json"), {}, str(path))
    else:
        spec = open_checkpoint(path, settings_of(config)).spec
    counted = sum(prod(shape) for _, _, shape in spec.boxes(None))
    if not isinstance(spec, ModelSpec):
        raise UnsupportedError(f"{config.model.path} is of no known family: its sizes are not known either")
    require_divisible(config.parallel.tensor, spec)
    rows = rows.within(spec.max_positions, any(tensor == "positions" for tensor, _, _ in spec.boxes(None)))
    hidden, layers, vocabulary = spec.hidden, spec.layers, spec.vocab or 0
    width, row_tokens = WIDTH[config.model.dtype], sizes.micro * config.data.seq_length
    context = config.parallel.context
    tokens = -(-row_tokens // context)
    across = 4 * row_tokens * (spec.kv_heads) * spec.head_dim * width if context > 1 else 0
    shards = ranks // config.parallel.replicas
    kept = 1 if config.model.activation_checkpointing else 16
    stage = config.parallel.zero_stage if config.engine == "deepspeed" else None
    graded = 1 if stage == 1 else shards
    in_bits = _quantized(spec) if config.lora and config.lora.quantize != "none" else 0
    of_layers = counted - in_bits - 2 * vocabulary * hidden
    at_once = 2 if config.parallel.reshard else layers
    gathered = width * (at_once * of_layers // layers // config.parallel.tensor + 2 * vocabulary * hidden)
    idle = _frozen(config.model.freeze, spec)
    trained = _adapters(resolved(config.lora), spec) if config.lora else counted - idle
    kept_frozen = width * counted if config.lora else (width if stage else 4) * idle
    kept_frozen -= width * in_bits
    memory = {
        **({"quantized weights": round(NF4 * in_bits)} if in_bits else {}),
        **({"frozen weights": kept_frozen // shards} if kept_frozen else {}),
        "weights, gradients, moments": round((MASTER + MOMENTS[config.optim.moments]) * trained) // shards
        + GRADIENT * trained // graded,
        "gathered weights": {None: gathered, 3: gathered + width * counted // shards}.get(stage, width * counted),
        "activations": kept * layers * tokens * hidden * width + 40 * tokens * hidden * width,
        **({"gathered keys and values": across} if across else {}),
        "logits": 3 * 4 * min(CHUNK, tokens) * vocabulary,
    }
    inputs, pairs = _once(rows, order)
    multiplied = counted - _idle(spec) - (0 if spec.tied else vocabulary * hidden)
    factor = 4.0 * multiplied + 6.0 * trained if config.lora else 6.0 * multiplied - 2.0 * idle
    head = ((spec.nope_dim or 0) + spec.rope_dim + spec.head_dim) / 2 if spec.rope_dim else spec.head_dim
    flops = factor * inputs + 12.0 * layers * spec.heads * head * pairs
    parameters = counted + trained if config.lora else counted
    return Estimate(
        ranks=ranks,
        sizes=sizes,
        steps=steps,
        samples=order.samples,
        rows=rows,
        parameters=parameters,
        trained=trained,
        memory=memory,
        flops=flops,
        mixture=mixture_of(rows, order),
    )


def _once(rows: Rows, order: Order) -> tuple[float, float]:
    """Input tokens of the whole training, and pairs of input tokens where one attends to the other."""
    sets = [lengths(*pair).astype(float) - 1 for pair in zip(rows.documents, rows.plans, strict=True)]
    parts = [stop - first for first, stop in pairwise(rows.ends)]
    taken = order.taken() if order.sets else [order.samples * many / len(rows) for many in parts]
    passes = [many / of for many, of in zip(taken, parts, strict=True)]
    inputs = sum(often * of.sum() for often, of in zip(passes, sets, strict=True))
    pairs = sum(often * np.square(of).sum() / 2 for often, of in zip(passes, sets, strict=True))
    return float(inputs), float(pairs)


def mixture_of(rows: Rows, order: Order) -> list[Part]:
    """The sets of a mixture, with how much of each is trained; empty if all rows are trained alike."""
    if not order.sets:
        return []
    names = [str(documents.indexed.prefix) for documents in rows.documents]
    tokens = [plan.counts["tokens"] for plan in rows.plans]
    return [
        Part(name, chosen.rows, chosen.weight, taken, taken / chosen.rows, round(count * taken / chosen.rows))
        for name, chosen, taken, count in zip(names, order.sets, order.taken(), tokens, strict=True)
    ]


def _idle(spec: ModelSpec) -> int:
    """Number of parameters of the experts that a token is not routed to."""
    if not spec.experts or not spec.top_k:
        return 0
    expert_parameters = sum(prod(shape) for tensor, _, shape in spec.boxes(None) if "expert_" in tensor)
    return expert_parameters // spec.experts * (spec.experts - spec.top_k)


def _frozen(patterns: Sequence[str], spec: ModelSpec) -> int:
    """Number of frozen parameters. Raises what `freezing.frozen` raises."""
    slots = [slot for slot in model_slots(spec, memory=True) if not slot.replica.shared]
    names = frozen([key for slot in slots for key in slot.keys], patterns)
    return sum(prod(slot.shape) for slot in slots if not names.isdisjoint(slot.keys))


def _quantized(spec: ModelSpec) -> int:
    """Number of parameters that QLoRA quantizes: the matrices of layers, which are all linear without experts."""
    slots = [slot for slot in model_slots(spec, memory=True) if len(slot.shape) == 2 and slot.layer is not None]
    return sum(prod(slot.shape) for slot in slots)


def _adapters(lora: Lora, spec: ModelSpec) -> int:
    """Number of adapter parameters: rank x (rows + columns) of each matrix with an adapter, and with DoRA its rows.

    Raises:
        UsageError: a target is not a matrix of the model.
    """
    shapes = {slot.keys[0]: slot.shape for slot in model_slots(spec, memory=True) if len(slot.shape) == 2}
    targeted = {key for key in shapes if not (EMBEDDING.fullmatch(key) or HEAD.fullmatch(key))}
    if not lora.everywhere:
        keys_of_target = {
            target: {key for key in shapes if f".{key}".endswith(f".{target}.weight")} for target in lora.targets
        }
        wrong = [target for target, keys in keys_of_target.items() if not keys]
        if wrong:
            raise UsageError(f"lora.targets: {wrong[0]} is no matrix of {spec.family}")
        targeted = set().union(*keys_of_target.values())
    return sum(lora.rank * sum(shapes[key]) + (shapes[key][0] if lora.dora else 0) for key in targeted)
