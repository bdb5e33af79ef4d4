"""Real DeepSpeed trains a tiny model and writes checkpoints, on gloo and the CPU.

    python zero_world.py MODEL_DIR OUT_DIR WORLD KIND [KIND ...]
    python zero_world.py load CHECKPOINT_DIR MODEL_DIR WORLD STAGE TRUTH
    python zero_world.py load-universal UNIVERSAL_DIR MODEL_DIR WORLD STAGE TRUTH
    python zero_world.py load-neox RUN_DIR OUT_FILE PP TP
    python zero_world.py go-on UNIVERSAL_DIR MODEL_DIR WORLD STAGE [STAGE ...]
    python zero_world.py unbroken MODEL_DIR WORLD STAGE

The first writes OUT_DIR/KIND for every kind of the table KINDS, and OUT_DIR/KIND.truth.safetensors next to it: what the
engine held in memory when it saved. Every kind runs in WORLD processes of its own, forked when all is imported, for
DeepSpeed, accelerate and Trainer keep global state.

The truth has, in full shape, module.NAME for all that the module's state dict names (tied names twice, buffers too),
and fp32.NAME, exp_avg.NAME, exp_avg_sq.NAME for what is trained. With model parallelism all begin with the mp rank,
`3.fp32.NAME`. It owes nothing to files, param_slice_mappings, param_shapes or the paddings. Where a parameter lies in
its group's flat buffer is read off memory itself, data_ptr() of the parameter (ZeRO-3: of its ds_tensor) less that of
the buffer, which holds for shuffled groups (round_robin_gradients) too; master weights and moments, cut where the
buffer is cut, are gathered and read at the same place. Stage 0 has whole tensors, a pair per parameter. The module's
own weights come another way, DeepSpeed's all-gathers, and every fp32.NAME, rounded, must be module.NAME bit for bit.

The kinds of the model train on the same data without clipping, and sharding changes no number where only two add up: at
WORLD 2 the truths of zero1, zero2, zero3, bf16-optimizer and the round-robin kinds are equal bit for bit, at 4 those of
a stage are. Layouts that differ could not agree if an address were wrong.

pp2 kinds ask for an even WORLD, pp2-tp2 for a multiple of 4, tp2 kinds for an even one; what is left is data parallel.
load-neox starts PP x TP processes (PP 0: no pipeline) with models of the names of GPT-NeoX, lets DeepSpeed load the
module alone and strictly, as NeoX does with `finetune: true`, and writes what each mp rank holds to OUT_FILE.

go-on trains 2 * STEPS steps, of stage 1, with a learning rate that falls in the second half, and once more for each
STAGE the second half alone: after a universal checkpoint, which finds another model and another learning rate. A line
of JSON each: the losses of the second half by rank. unbroken is the first of these alone, of that stage.

STAGE is 0 to 3 or bf16-optimizer; options of zero_optimization may follow, `3,sub_group_size=5000`, the optimizer among
them, `2,optimizer="lion"`, and to go on `fp32=true`; `optimizer="adam"` goes on after moments in 8 bits. `load` needs
WORLD and options as they were. DeepSpeed checks that, but not round_robin_gradients, without which it loads nonsense.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import json
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

warnings.filterwarnings("ignore")
os.environ |= {"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"}
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # Muon's step would be compiled by each rank
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import bitsandbytes
import deepspeed
import deepspeed.runtime.zero.muon.muon_optimizer  # it takes seconds, and every rank would import it
import ranks
import torch
import torch.distributed as dist
import zero_neox
from accelerate import Accelerator, DeepSpeedPlugin, PartialState
from deepspeed.ops.lion import FusedLion
from deepspeed.ops.op_builder.npu.fused_lion import NPUFusedLion
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.pipe.topology import PipelineParallelGrid, PipeModelDataParallelTopology
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from lion import Lion
from ranks import TIMEOUT, World, differences, load_model, quiet
from safetensors.torch import load_file, save_file
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments
from transformers.optimization import Adafactor

STEPS = 3
RATE = 0.01
StateDict = dict[str, Any]
Config = dict[str, Any]


def settings(stage: int, dtype: torch.dtype = torch.bfloat16, **zero: Any) -> Config:
    """DeepSpeed's configuration; `zero` goes into zero_optimization."""
    if stage == 3:
        zero = {"stage3_param_persistence_threshold": 0} | zero
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,  # its default is 1.0
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 10**6} | zero,
        "bf16": {"enabled": dtype == torch.bfloat16},
    }


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW with two groups, matrices and the rest, as everybody has them."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = {"params": [each for each in trained if each.dim() > 1], "weight_decay": 0.1}
    others = {"params": [each for each in trained if each.dim() <= 1], "weight_decay": 0.0}
    return torch.optim.AdamW([matrices, others], lr=RATE)


def lion(model: nn.Module, kind: type[torch.optim.Optimizer] = Lion) -> torch.optim.Optimizer:
    """A Lion with the same two groups: without a count of its steps, or DeepSpeed's."""
    groups = [{**group, "betas": (0.9, 0.99)} for group in adam(model).param_groups]
    kept = ("params", "betas", "weight_decay")
    return kind([{name: group[name] for name in kept} for group in groups], lr=RATE / 10)


def fused_lion(model: nn.Module) -> torch.optim.Optimizer:
    """DeepSpeed's own, with its own computation in torch in the place of that on GPUs."""
    deepspeed.ops.lion.fused_lion.FusedLionBuilder = lambda: SimpleNamespace(load=lambda: NPUFusedLion)
    return lion(model, FusedLion)


def bits(model: nn.Module) -> torch.optim.Optimizer:
    """bitsandbytes' AdamW, with moments in 8 bits."""
    kept = ("params", "weight_decay")
    groups = [{name: group[name] for name in kept} for group in adam(model).param_groups]
    return bitsandbytes.optim.AdamW8bit(groups, lr=RATE)


def adafactor(model: nn.Module, kind: Callable[..., torch.optim.Optimizer] = torch.optim.Adafactor) -> Any:
    """An Adafactor of the same two groups."""
    kept = ("params", "weight_decay")
    return kind([{name: group[name] for name in kept} for group in adam(model).param_groups], lr=RATE)


OPTIMIZERS = {
    "adam": adam,
    "lion": lion,
    "fused-lion": fused_lion,
    "bits": bits,
    "adafactor": adafactor,
    "hf-adafactor": functools.partial(adafactor, kind=functools.partial(Adafactor, relative_step=False)),
}
KEPT = ("exp_avg", "exp_avg_sq", "variance", "momentum_buffer")
"""What they keep of a parameter besides its steps."""


MUON = {
    "type": "Muon",
    # torch_adam: a fused one would be compiled
    "params": {"lr": RATE, "momentum": 0.9, "betas": [0.9, 0.95], "eps": 1e-8, "torch_adam": True},
}
"""DeepSpeed's own Muon, which it makes by itself: of matrices but embedding and head, and an AdamW of all else."""


def engine_of(model: nn.Module, config: Config, optimizer: str = "adam", **options: Any) -> Any:
    """A DeepSpeed engine."""
    if optimizer.endswith("-muon"):
        groups = [{name: group[name] for name in ("params", "weight_decay")} for group in adam(model).param_groups]
        about = {**MUON, "params": {**MUON["params"], "ns_method": optimizer.removesuffix("-muon")}}
        made = copy.deepcopy(config) | {"optimizer": about}
        return deepspeed.initialize(model=model, model_parameters=groups, config=made, **options)[0]
    made = OPTIMIZERS[optimizer](model)
    return deepspeed.initialize(model=model, optimizer=made, config=copy.deepcopy(config), **options)[0]


def tokens(rank: int, step: int, vocabulary: int) -> torch.Tensor:
    """A rank's batch of a step: one sequence."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randint(vocabulary, (1, 24), generator=generator)


def train(world: World, engine: Any) -> Any:
    """Real steps; the same data whatever the sharding."""
    steps(world, engine, range(STEPS))
    return engine


def steps(world: World, engine: Any, numbers: range) -> list[float]:
    """Steps with those numbers, and the loss before each."""
    losses = []
    for step in numbers:
        ids = tokens(world.rank, step, world.model.config.vocab_size)
        loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    return losses


def gathered(value: torch.Tensor, group: Any) -> list[torch.Tensor]:
    """Everybody's tensor, by rank within the group."""
    value = value.detach().contiguous()
    out = [torch.empty_like(value) for _ in range(dist.get_world_size(group))]
    dist.all_gather(out, value, group=group)
    return out


def place(part: torch.Tensor, buffer: torch.Tensor) -> slice:
    """Where a tensor lies in the flat buffer that it is a view of."""
    start, rest = divmod(part.data_ptr() - buffer.data_ptr(), buffer.element_size())
    assert rest == 0, "not aligned with the buffer"
    assert 0 <= start <= start + part.numel() <= buffer.numel(), "not a view of the buffer"
    return slice(start, start + part.numel())


def trained_state(engine: Any) -> Iterator[tuple[nn.Parameter, StateDict]]:
    """Each trained parameter with its master and moments, put together from the live objects of all ranks."""
    optimizer = engine.optimizer

    def states(master: torch.Tensor) -> StateDict:
        state = getattr(optimizer, "optimizer", optimizer).state[master]
        for key, number in (("exp_avg", 1), ("exp_avg_sq", 2)) if "state1" in state else ():
            codes, about = state[f"state{number}"], {"blocksize": 256}
            about |= {"absmax": state.get(f"absmax{number}"), "code": state.get(f"qmap{number}")}
            coded = codes.dtype == torch.uint8
            state = {**state, key: bitsandbytes.functional.dequantize_blockwise(codes, **about) if coded else codes}
        return {"fp32": master, **{key: state[key] for key in KEPT if key in state}}

    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        group = optimizer.dp_process_group
        flats = optimizer.fp16_partitioned_groups_flat
        for params, flat, master in zip(
            optimizer.fp16_groups, flats, optimizer.fp32_partitioned_groups_flat, strict=True
        ):
            pieces = {key: gathered(value, group) for key, value in states(master).items()}
            for param in params:
                where = place(param.ds_tensor, flat)
                yield (
                    param,
                    {
                        key: torch.cat([piece[where] for piece in each])[: param.ds_numel].view(param.ds_shape)
                        for key, each in pieces.items()
                    },
                )
    elif isinstance(optimizer, (DeepSpeedZeroOptimizer, BF16_Optimizer)):
        if isinstance(optimizer, BF16_Optimizer):
            groups, flats = optimizer.bf16_groups, optimizer.bf16_groups_flat
            masters = optimizer.fp32_groups_flat_partition
        else:
            groups, flats = optimizer.bit16_groups, optimizer.bit16_groups_flat
            masters = optimizer.single_partition_of_fp32_groups
        every = zip(optimizer.real_dp_process_group, groups, flats, masters, strict=True)
        for number, (group, params, flat, master) in enumerate(every):
            whole = isinstance(optimizer, DeepSpeedZeroOptimizer)
            kept = {key: value for key, value in states(master).items() if key != "momentum_buffer" or not whole}
            tensors = {key: torch.cat(gathered(value, group)) for key, value in kept.items()}
            momentum = momentum_of(optimizer, number, group) if whole else {}
            for index, param in enumerate(params):
                where = place(param, flat)
                state = {key: value[where].view(param.shape) for key, value in tensors.items()}
                yield param, state | ({"momentum_buffer": momentum[index]} if index in momentum else {})
    elif isinstance(optimizer, FP16_UnfusedOptimizer):
        for params, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
            for param, master in zip(params, masters, strict=True):
                yield param, states(master)
    else:
        for group in optimizer.param_groups:
            for param in group["params"]:
                yield param, states(param)


def momentum_of(optimizer: Any, number: int, group: Any) -> dict[int, torch.Tensor]:
    """Of stages 1 and 2: the momentum of each matrix of a flat group, by the number of the matrix.

    A rank has those of all matrices of which it has a part, and two ranks that share one have to agree.
    """
    flat = optimizer.optimizer.param_groups[number]["params"][0]
    buffer = optimizer.optimizer.state[flat].get("momentum_buffer")
    names = {id(param): index for index, param in enumerate(optimizer.bit16_groups[number])}
    parts = optimizer.params_in_partition[number] if buffer is not None else []
    pieces = torch.split(buffer, [param.numel() for param in parts]) if parts else ()
    mine = {names[id(param)]: piece.view(param.shape) for param, piece in zip(parts, pieces, strict=True)}
    everybody: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everybody, mine, group=group)
    whole: dict[int, torch.Tensor] = {}
    for index, momentum in (item for each in everybody for item in each.items()):
        assert torch.equal(whole.setdefault(index, momentum), momentum), "two ranks have another momentum of a matrix"
    return whole


def truth(engine: Any) -> StateDict:
    """What the engine holds, in full: a collective. Every rank of a data parallel group gets it."""
    module = engine.module
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    with deepspeed.zero.GatheredParameters(list(module.parameters()), enabled=engine.zero_optimization_stage() == 3):
        tensors = {f"module.{name}": value.detach().clone() for name, value in module.state_dict().items()}
    for param, state in trained_state(engine):
        tensors |= {f"{key}.{names[id(param)]}": value.detach().clone() for key, value in state.items()}
    return tensors


def check(engine: Any, tensors: StateDict) -> None:
    """What must be so, or the truth is none."""
    for name, parameter in engine.module.named_parameters():
        assert parameter.requires_grad == (f"fp32.{name}" in tensors), f"{name} is missing"
        if parameter.requires_grad:
            weight, master = tensors[f"module.{name}"], tensors[f"fp32.{name}"]
            assert weight.shape == master.shape, f"{name}: master and weight are not of one shape"
            assert torch.equal(master.to(weight.dtype), weight), f"{name}: the rounded master is not the weight"
            kept = [tensors[f"{key}.{name}"].any() for key in KEPT if f"{key}.{name}" in tensors]
            assert kept, f"{name} has no moments"
            assert all(kept), f"{name} has no moments"


def save_truth(world: World, engine: Any, path: Path) -> None:
    """Write the truth, of all mp ranks where there are several."""
    tensors, mpu = truth(engine), engine.mpu
    check(engine, tensors)
    if mpu is not None:
        prefix = f"{mpu.get_model_parallel_rank()}."
        tensors = {prefix + name: value for name, value in tensors.items()} if mpu.get_data_parallel_rank() == 0 else {}
        everybody: list[Any] = [None] * world.size
        dist.gather_object(tensors, everybody if world.rank == 0 else None)
        if world.rank == 0:
            tensors = {name: value for each in everybody for name, value in each.items()}
    if world.rank == 0:
        save_file({name: value.contiguous() for name, value in sorted(tensors.items())}, path)


def freeze(model: nn.Module) -> None:
    """No gradient for the embeddings, which may be tied, and for a matrix and a norm in between."""
    model.get_input_embeddings().requires_grad_(requires_grad=False)
    model.model.layers[1].mlp.up_proj.requires_grad_(requires_grad=False)
    model.model.layers[1].input_layernorm.requires_grad_(requires_grad=False)


class Odd(nn.Module):
    """Parameters of odd shapes. Parameters without a dimension DeepSpeed cannot broadcast: no stage takes them."""

    def __init__(self) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.linspace(-1, 1, 7))
        self.cube = nn.Parameter(torch.linspace(-1, 1, 15).view(3, 1, 5))
        self.single = nn.Parameter(torch.full((1,), 0.5))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Every one of them matters."""
        return value * (1 + self.single * self.vector.exp().sum() * self.cube.exp().sum() / 100)


def oddities(model: nn.Module) -> None:
    """A vector of 7, a cube and a single number, trained."""
    model.odd = odd = Odd()
    model.model.norm.register_forward_hook(lambda module, inputs, output: odd(output))


def buffers(model: nn.Module) -> None:
    """Persistent buffers, of a float and of an integer."""
    model.register_buffer("statistics", torch.linspace(0, 1, 5))
    model.model.layers[0].register_buffer("counter", torch.tensor(2**40 + 1))


def zero(
    world: World,
    out: Path,
    stage: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    change: Callable[[nn.Module], None] | None = None,
    more: Config | None = None,
    client: StateDict | None = None,
    optimizer: str = "adam",
    **options: Any,
) -> Any:
    """One engine, trained and saved."""
    model = world.copy().float()
    if change:
        change(model)
    config = settings(stage, dtype, **options) | (more or {})
    engine = train(world, engine_of(model, config, optimizer))
    engine.save_checkpoint(str(out), client_state=client or {})
    return engine


def grid(world: World, pp: int, tp: int) -> PipelineParallelGrid:
    """Who is where: ranks count TP first, then DP, then PP, as in NeoX."""
    assert world.size % (pp * tp) == 0, f"{world.size} ranks are not PP {pp} x TP {tp} x DP"
    return PipelineParallelGrid(PipeModelDataParallelTopology(pp, tp, world.size // (pp * tp)))


def pipeline(world: World, out: Path, tp: int = 1, *, tied: bool = False, **options: Any) -> Any:
    """A PipelineModule of two stages, ZeRO-1."""
    topology = grid(world, 2, tp).topology()
    layers = zero_neox.specs(tp, tied=tied)
    model = PipelineModule(layers, topology=topology, loss_fn=zero_neox.loss, partition_method="type:Layer")
    place = topology.get_coord(world.rank)
    zero_neox.initialise(model, place.model)
    engine = engine_of(model, settings(1) | {"gradient_accumulation_steps": 2} | options)
    data = zero_neox.batches(place.data)
    for _ in range(STEPS):
        engine.train_batch(data)
    engine.save_checkpoint(str(out), client_state={"iteration": STEPS})
    return engine


def sequential(world: World, out: Path, tp: int = 2, **options: Any) -> Any:
    """What GPT-NeoX does with pipe_parallel_size 0: an engine that is given an mpu."""
    mpu = grid(world, 1, tp)
    model = zero_neox.Sequential(tp)
    zero_neox.initialise(model, mpu.get_tensor_model_parallel_rank())
    engine = engine_of(model, settings(1) | options, mpu=mpu)
    data = zero_neox.batches(mpu.get_data_parallel_rank())
    for _ in range(STEPS):
        engine.backward(engine(next(data)[0]))
        engine.step()
    engine.save_checkpoint(str(out), client_state={"iteration": STEPS})
    return engine


def samples(world: World) -> list[StateDict]:
    """A data set with enough for all."""
    batches = [tokens(0, step, world.model.config.vocab_size)[0] for step in range(STEPS * world.size)]
    return [{"input_ids": ids, "labels": ids} for ids in batches]


def trainer(world: World, out: Path, stage: int, **options: Any) -> Any:
    """transformers' Trainer: out/checkpoint-N, and no weights but DeepSpeed's at stage 3 unless it gathers them."""
    plan = TrainingArguments(
        output_dir=str(out),
        deepspeed=settings(stage, **options),
        use_cpu=True,
        bf16=True,
        optim="adamw_torch",
        dataloader_pin_memory=False,
        disable_tqdm=True,
        report_to=[],
        per_device_train_batch_size=1,
        learning_rate=RATE,
        max_grad_norm=0.0,
        max_steps=STEPS,
        save_steps=STEPS,
    )
    hf = Trainer(model=world.copy().float(), args=plan, train_dataset=samples(world))
    hf.train()
    return hf.model_wrapped


def accelerate(world: World, out: Path, stage: int) -> Any:
    """accelerate's save_state: DeepSpeed's folder is out/pytorch_model, the tag, and out/latest."""
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"  # as its launcher does
    PartialState(backend="gloo")  # Accelerator(cpu=True) would be without DeepSpeed, Accelerator() without a backend
    plugin = DeepSpeedPlugin(hf_ds_config=settings(stage))
    accelerator = Accelerator(mixed_precision="bf16", deepspeed_plugin=plugin)
    model = world.copy().float()
    loader = DataLoader(samples(world), batch_size=1)
    engine, optimizer, loader = accelerator.prepare(model, adam(model), loader)
    for batch in loader:
        accelerator.backward(engine(**batch, use_cache=False).loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.save_state(str(out))
    return engine


FLOAT = {"dtype": torch.float32}
ACCUMULATE = {"more": {"data_types": {"grad_accum_dtype": "fp32"}}}
UNIVERSAL = {"client": {"universal_checkpoint_info": {"universal_checkpoint_version": 0.2}}}
Kind = Callable[[World, Path], Any]
KINDS: dict[str, Kind] = {
    "zero0": functools.partial(zero, stage=0),
    "zero0-fp32": functools.partial(zero, stage=0, **FLOAT),
    "zero1": functools.partial(zero, stage=1),
    "zero1-fp32": functools.partial(zero, stage=1, **FLOAT),
    "zero1-round-robin": functools.partial(zero, stage=1, round_robin_gradients=True),
    "zero1-universal": functools.partial(zero, stage=1, **UNIVERSAL),
    "zero1-frozen": functools.partial(zero, stage=1, change=freeze),
    "bf16-optimizer": functools.partial(zero, stage=1, **ACCUMULATE),
    "zero2": functools.partial(zero, stage=2),
    "zero2-fp32": functools.partial(zero, stage=2, **FLOAT),
    "zero2-round-robin": functools.partial(zero, stage=2, round_robin_gradients=True),
    "zero2-aligned": functools.partial(zero, stage=2, parameter_alignment=True, change=oddities),
    "zero2-frozen": functools.partial(zero, stage=2, change=freeze),
    "zero2-buffers": functools.partial(zero, stage=2, change=buffers),
    "zero2-odd": functools.partial(zero, stage=2, change=oddities),
    "zero3": functools.partial(zero, stage=3),
    "zero3-fp32": functools.partial(zero, stage=3, **FLOAT),
    "zero3-persistent": functools.partial(zero, stage=3, stage3_param_persistence_threshold=10**6),
    "zero3-sub-groups": functools.partial(zero, stage=3, sub_group_size=5000),
    "zero3-frozen": functools.partial(zero, stage=3, change=freeze),
    "zero3-buffers": functools.partial(zero, stage=3, change=buffers),
    "zero3-odd": functools.partial(zero, stage=3, change=oddities),
    "zero1-fp32-lion": functools.partial(zero, stage=1, optimizer="lion", **FLOAT),
    "zero2-fused-lion": functools.partial(zero, stage=2, optimizer="fused-lion"),
    "zero3-fused-lion": functools.partial(zero, stage=3, optimizer="fused-lion"),
    "zero1-fp32-bits": functools.partial(zero, stage=1, optimizer="bits", **FLOAT),
    "zero2-bits": functools.partial(zero, stage=2, optimizer="bits"),
    "zero3-bits": functools.partial(zero, stage=3, optimizer="bits"),
    "zero1-adafactor": functools.partial(zero, stage=1, optimizer="adafactor"),
    "zero3-adafactor": functools.partial(zero, stage=3, optimizer="adafactor"),
    "zero2-hf-adafactor": functools.partial(zero, stage=2, optimizer="hf-adafactor"),
    "zero1-fp32-muon": functools.partial(zero, stage=1, optimizer="standard-muon", **FLOAT),
    "zero1-fp32-gram-muon": functools.partial(zero, stage=1, optimizer="gram-muon", **FLOAT),
    "zero2-muon": functools.partial(zero, stage=2, optimizer="gram-muon"),
    "zero2-round-robin-muon": functools.partial(zero, stage=2, optimizer="gram-muon", round_robin_gradients=True),
    "bf16-optimizer-muon": functools.partial(zero, stage=1, optimizer="gram-muon", **ACCUMULATE),
    "zero3-muon": functools.partial(zero, stage=3, optimizer="standard-muon", reduce_scatter=False),
    "trainer2": functools.partial(trainer, stage=2),
    "trainer3": functools.partial(trainer, stage=3),
    "trainer3-gathered": functools.partial(trainer, stage=3, stage3_gather_16bit_weights_on_model_save=True),
    "accelerate2": functools.partial(accelerate, stage=2),
    "accelerate3": functools.partial(accelerate, stage=3),
    "pp2": pipeline,
    "pp2-tied": functools.partial(pipeline, tied=True),
    "pp2-tp2": functools.partial(pipeline, tp=2),
    "pp2-bf16-optimizer": functools.partial(pipeline, **ACCUMULATE["more"]),
    "tp2": sequential,
    "tp2-bf16-optimizer": functools.partial(sequential, **ACCUMULATE["more"]),
}


def make(world: World, out: Path, kind: str) -> None:
    """One kind."""
    (out / kind).mkdir(parents=True, exist_ok=True)
    dist.barrier()
    with contextlib.redirect_stdout(io.StringIO()):
        engine = KINDS[kind](world, out / kind)
    save_truth(world, engine, out / f"{kind}.truth.safetensors")


def blank(world: World, expected: StateDict) -> nn.Module:
    """The model that has the names of the truth, trains what was trained there, and knows nothing."""
    model = world.copy().float()
    for change, name in ((oddities, "odd.vector"), (buffers, "statistics")):
        if f"module.{name}" in expected:
            change(model)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        parameter.data.normal_(generator=generator)
        parameter.requires_grad_(f"fp32.{name}" in expected)
    return model


def read_stage(stage: str) -> tuple[str, str, StateDict]:
    """A stage as the command line has it: its number, the optimizer, and options of zero_optimization."""
    number, *fields = stage.split(",")
    options = {key: json.loads(value) for key, value in (field.split("=") for field in fields)}
    return number, options.pop("optimizer", "adam"), options


def load(world: World, folder: Path, stage: str, expected: StateDict, *, universal: bool) -> None:
    """Let DeepSpeed load a checkpoint, and compare; all ranks end with status 1 when anything differs."""
    number, optimizer, options = read_stage(stage)
    extra = dict(ACCUMULATE["more"]) if number == "bf16-optimizer" else {}
    if universal:
        extra["checkpoint"] = {"load_universal": True}
    dtype = next(value.dtype for name, value in expected.items() if f"fp32.{name.removeprefix('module.')}" in expected)
    config = settings(int(number) if number.isdigit() else 1, dtype, **options) | extra
    with contextlib.redirect_stdout(io.StringIO()):
        engine = engine_of(blank(world, expected), config, optimizer)
        rates = [group["lr"] for group in engine.optimizer.param_groups]
        for group in engine.optimizer.param_groups:
            group["lr"] *= 7
        tag = folder.name if (folder / "zero").is_dir() else None  # without one, `latest` or `latest_universal` says it
        path, _ = engine.load_checkpoint(str(folder.parent if tag else folder), tag)
    lines = differences(truth(engine), expected) if path else ["DeepSpeed found nothing to load"]
    after = [group["lr"] for group in engine.optimizer.param_groups]
    lines += ["a group has no rate" for loaded, rate in zip(after, rates, strict=True) if loaded == 7 * rate]
    if world.rank == 0:
        print(*lines or [f"equal {len(expected)} tensors"], sep="\n", flush=True)
    dist.barrier()
    if lines:
        sys.exit(1)


def falling(step: int) -> float:
    """What the learning rate is multiplied with."""
    return 0.5 ** max(0, step - STEPS)


def go_on(world: World, folder: Path | None, stage: str) -> None:
    """The second half of a training, after its first half or a universal checkpoint of it."""
    extra: Config = {"checkpoint": {"load_universal": True}} if folder else {}
    number, optimizer, options = read_stage(stage)
    extra |= ACCUMULATE["more"] if number == "bf16-optimizer" else {}
    dtype = torch.float32 if options.pop("fp32", False) else torch.bfloat16
    model = world.copy().float()
    if folder:
        generator = torch.Generator().manual_seed(1)
        for parameter in model.parameters():
            parameter.data.normal_(generator=generator)
    config = settings(int(number) if number.isdigit() else 1, dtype, **options) | extra
    with contextlib.redirect_stdout(io.StringIO()):
        engine = engine_of(model, config, optimizer, lr_scheduler=functools.partial(LambdaLR, lr_lambda=falling))
        if folder:
            for group in engine.optimizer.param_groups:
                group["lr"] *= 7
            assert engine.load_checkpoint(str(folder))[0], "DeepSpeed found nothing to load"
            for state in engine.optimizer.optimizer.state.values():
                state["step"] = state["step"].clone()  # in stage 3 all groups have one, which each of them moves on
        else:
            train(world, engine)
    everybody: list[Any] = [None] * world.size
    dist.all_gather_object(everybody, steps(world, engine, range(STEPS, 2 * STEPS)))
    if world.rank == 0:
        print(json.dumps(everybody), flush=True)


def load_neox(world: World, folder: Path, out: Path, pp: int, tp: int) -> None:
    """Let DeepSpeed load the module of a checkpoint with NeoX's names into a model of other weights."""
    if pp:
        topology = grid(world, pp, tp).topology()
        model: nn.Module = PipelineModule(zero_neox.specs(tp), topology=topology, loss_fn=zero_neox.loss,
                                          partition_method="type:Layer")  # fmt: skip
        engine = engine_of(model, settings(1) | {"gradient_accumulation_steps": 2})
    else:
        model = zero_neox.Sequential(tp)
        engine = engine_of(model, settings(1), mpu=grid(world, 1, tp))
    with contextlib.redirect_stdout(io.StringIO()):
        path, _ = engine.load_checkpoint(str(folder), load_module_strict=True, load_optimizer_states=False,
                                         load_lr_scheduler_states=False, load_module_only=True)  # fmt: skip
    assert path, "DeepSpeed found nothing to load"
    rank = engine.mpu.get_model_parallel_rank()
    parameters = {f"{rank}.{name}": value.detach().clone() for name, value in engine.module.named_parameters()}
    everybody: list[Any] = [None] * world.size
    dist.gather_object(parameters, everybody if world.rank == 0 else None)
    if world.rank == 0:
        save_file({name: value for each in everybody for name, value in each.items()}, out)


def rank_main(rank: int, size: int, store: str, model: nn.Module, job: Callable[[World], None]) -> None:
    """A rank's life."""
    # That module would compile C++, for what is never called. `deepspeed.comm.torch` as an attribute is torch itself.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
    ranks.join(rank, size, store)
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False, timeout=TIMEOUT)
    torch.manual_seed(rank)
    job(World(model, rank, size))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # the end of a process with ZeRO-3 hooks and gloo threads may abort when all is done


def launch(size: int, model: nn.Module, job: Callable[[World], None]) -> int:
    """Fork the ranks."""
    return ranks.launch(size, rank_main, model, job)


def main(argv: list[str]) -> int:
    """The command line."""
    if len(argv) == 6 and argv[0] in ("load", "load-universal"):
        _, folder, model_dir, size, stage, path = argv
        universal = argv[0] == "load-universal"
        job = functools.partial(load, folder=Path(folder), stage=stage, expected=load_file(path), universal=universal)
        return launch(int(size), load_model(model_dir), job)
    if len(argv) == 5 and argv[0] == "load-neox":
        pp, tp = map(int, argv[3:])
        job = functools.partial(load_neox, folder=Path(argv[1]), out=Path(argv[2]), pp=pp, tp=tp)
        quiet()
        return launch(max(1, pp) * tp, nn.Identity(), job)
    if len(argv) == 4 and argv[0] == "unbroken":
        return launch(int(argv[2]), load_model(argv[1]), functools.partial(go_on, folder=None, stage=argv[3]))
    if len(argv) > 4 and argv[0] == "go-on":
        model, size = load_model(argv[2]), int(argv[3])
        first = re.sub(r"^[^,]*", "1", argv[4]).replace('optimizer="adam"', 'optimizer="bits"')
        jobs = [(None, first), *((Path(argv[1]), stage) for stage in argv[4:])]
        return max(launch(size, model, functools.partial(go_on, folder=folder, stage=stage)) for folder, stage in jobs)
    if len(argv) < 4:
        print(__doc__, file=sys.stderr)
        return 2
    model_dir, out, size, *kinds = argv
    if unknown := set(kinds) - set(KINDS):
        print(f"no such kind: {', '.join(sorted(unknown))}; there are {', '.join(KINDS)}", file=sys.stderr)
        return 2
    model = load_model(model_dir)
    return max(launch(int(size), model, functools.partial(make, out=Path(out), kind=kind)) for kind in kinds)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
