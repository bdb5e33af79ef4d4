"""Stock Megatron-LM trains, saves by its own `save_checkpoint` and loads by its own `load_checkpoint` (CPU, gloo).

It runs in an environment of its own (make test-stock), where nothing of this project is:

    python stock_dist.py JOBS.json

JOBS.json is a list; its entries are done one after another in one start of the framework, each on four ranks, of which
those beyond tp * pp are data parallel:

    {"tp": 2, "pp": 1, "flags": ["--num-layers", "4", ...]}      a model that begins at random
    {..., "load": RUN}                              first `load_checkpoint`, with the optimizer unless it has none
    {..., "steps": 3}                               so many steps
    {..., "save": {RUN: "torch" | "dp_reshardable" | "fully_reshardable"}}      then `save_checkpoint`
    {..., "losses": FILE}                           the losses of three steps after that
    {..., "logits": FILE}                           .npz with `ids` and the logits of the model in float32 (pp = 1)

What there is of CUDA in its way is replaced for a CPU; the optimizer is torch's Adam, for there is no other here.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import multiprocessing
import os
import sys
import types
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
os.environ["TORCHDYNAMO_DISABLE"] = "1"

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.num_microbatches_calculator import (
    init_num_microbatches_calculator,
    unset_num_microbatches_calculator,
)
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.rerun_state_machine import destroy_rerun_state_machine, initialize_rerun_state_machine
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.module import Float16Module
from megatron.training import checkpointing, global_vars
from megatron.training.arguments import core_transformer_config_from_args, parse_args, validate_args
from megatron.training.training import get_megatron_optimizer_config
from torch.overrides import TorchFunctionMode

RANKS, BATCH, LENGTH, RATE = 4, 4, 16, 0.01
CPU = torch.device("cpu")
FLAGS = """
    --micro-batch-size 1 --global-batch-size 4 --lr 0.01 --train-iters 20 --use-cpu-initialization
    --no-persist-layer-norm --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-rope-fusion
    --no-bias-swiglu-fusion --no-bias-dropout-fusion --transformer-impl local --attention-dropout 0 --hidden-dropout 0
    --weight-decay 0.1 --clip-grad 1.0 --attention-backend unfused --tokenizer-type NullTokenizer --seed 7
    --save-interval 1 --dist-ckpt-strictness raise_all --seq-length 16
""".split()  # noqa: SIM905


class Idle:
    """A stream or an event of a GPU, of which there is none."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: Idle()


class Cpu(TorchFunctionMode):
    """What asks for a GPU gets the CPU, whose tensors say that they are of a GPU."""

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = CPU
        if func is torch.Tensor.to and len(args) > 1 and str(args[1]).startswith("cuda"):
            args = (args[0], CPU, *args[2:])
        if func is torch.device and args[:1] != ("meta",):
            return CPU
        result = func(*args, **kwargs)
        return result.replace("torch.", "torch.cuda.") if func is torch.Tensor.type and len(args) == 1 else result


def without_gpu() -> None:
    """Replace what torch and Megatron ask of a GPU."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    cuda: Any = torch.cuda
    cuda.Stream = cuda.Event = Idle
    cuda.current_device = lambda: CPU
    cuda.current_stream = cuda.default_stream = lambda *_: Idle()
    cuda.stream = lambda _: contextlib.nullcontext()
    cuda.get_device_properties = lambda *_: types.SimpleNamespace(major=9, minor=0, total_memory=1 << 34)
    cuda.get_device_capability = lambda *_: (9, 0)
    cuda.get_rng_state = lambda *_: torch.get_rng_state()
    cuda.is_current_stream_capturing = lambda: False
    for name in ("synchronize", "empty_cache", "set_device", "set_rng_state"):
        setattr(cuda, name, lambda *_, **__: None)
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated"):
        setattr(cuda, name, lambda *_: 0)
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *_, **__: self  # type: ignore[assignment]
    tracker: Any = megatron_random.CudaRNGStatesTracker
    tracker.fork = lambda self, name="": contextlib.nullcontext()
    tracker.get_states, tracker.set_states = (lambda self: {}), (lambda self, states: None)
    filesystem_async.HAVE_PSUTIL = True
    memory = types.SimpleNamespace(memory_info=lambda: types.SimpleNamespace(rss=0))  # which goes to a log
    filesystem_async.psutil = types.SimpleNamespace(Process=lambda *_: memory)
    os.fsync = lambda fd: None  # a test's files need not outlive a power cut
    give_steps()


def all_gather(tensors: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
    """As NCCL does it: gloo wants tensors of one size."""
    for source, each in zip(dist.get_process_group_ranks(group or dist.group.WORLD), tensors, strict=True):
        if source == dist.get_rank():
            each.copy_(tensor)
        if each.numel():
            dist.broadcast(each, source, group=group)
    return Idle() if async_op else None


def give_steps() -> None:
    """Let the distributed optimizer load without Transformer Engine, whose Adam keeps no step of each parameter."""
    load = DistributedOptimizer._set_main_param_and_optimizer_states

    def with_step(self: Any, parameter: Any, tensors: dict[str, Any]) -> None:
        group, order = self.model_param_group_index_map[parameter]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        step = state.pop("step", None)
        load(self, parameter, tensors)
        if step is not None:
            state["step"] = step.clone()

    DistributedOptimizer._set_main_param_and_optimizer_states = with_step


def arguments(flags: list[str]) -> Any:
    """Megatron's own arguments."""
    sys.argv = ["pretrain_gpt.py", *FLAGS, *flags]
    unset_num_microbatches_calculator()
    global_vars.unset_global_variables()
    args = parse_args()
    if args.use_checkpoint_args:
        args, _ = checkpointing.load_args_from_checkpoint(args)
    validate_args(args)
    args.padded_vocab_size = args.padded_vocab_size or padded(args)
    global_vars.set_args(args)
    init_num_microbatches_calculator(
        args.rank, None, args.global_batch_size, args.micro_batch_size, args.data_parallel_size
    )
    return args


def padded(args: Any) -> int:
    """Rows of the vocabulary on all tensor ranks."""
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    return -(-args.vocab_size // multiple) * multiple


def build(args: Any) -> GPTModel:
    """The model of the arguments."""
    config = core_transformer_config_from_args(args)
    layers = get_gpt_layer_local_spec(normalization=args.normalization)
    if args.num_experts:
        layers = get_gpt_decoder_block_spec(config, False, normalization=args.normalization)
    return GPTModel(
        config=config,
        transformer_layer_spec=layers,
        mtp_block_spec=get_gpt_mtp_block_spec(config, layers, False) if args.mtp_num_layers else None,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=ps.is_pipeline_first_stage(),
        post_process=ps.is_pipeline_last_stage(),
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_base=args.rotary_base,
    )


class Training:
    """Model, optimizer and scheduler of one rank."""

    def __init__(self, job: dict[str, Any]) -> None:
        topology = ["--tensor-model-parallel-size", str(job["tp"]), "--pipeline-model-parallel-size", str(job["pp"])]
        self.args = arguments([*job["flags"], *topology, *(["--load", job["load"]] if "load" in job else [])])
        args = self.args
        ps.destroy_model_parallel()
        ps.initialize_model_parallel(job["tp"], job["pp"])
        destroy_rerun_state_machine()
        initialize_rerun_state_machine()
        torch.manual_seed(args.seed + 10 * ps.get_pipeline_model_parallel_rank() + ps.get_tensor_model_parallel_rank())
        self.plain = build(args)
        config = self.plain.config
        module = Float16Module(config, self.plain) if args.bf16 else self.plain
        self.model = self.wrapped(config, module, job)
        settings = get_megatron_optimizer_config(args)
        self.optimizer = get_megatron_optimizer(settings[0] if isinstance(settings, tuple) else settings, [self.model])
        self.scheduler = OptimizerParamScheduler(
            self.optimizer, init_lr=0.0, max_lr=RATE, min_lr=RATE / 10, lr_warmup_steps=8, lr_decay_steps=80,
            lr_decay_style="cosine", start_wd=0.1, end_wd=0.1, wd_incr_steps=80, wd_incr_style="constant",
            use_checkpoint_opt_param_scheduler=not args.override_opt_param_scheduler,
            override_opt_param_scheduler=args.override_opt_param_scheduler,
        )  # fmt: skip
        self.iteration = 0
        if "load" in job:
            if self.fills_states and not args.no_load_optim and args.ckpt_format != "fsdp_dtensor":
                with torch.no_grad():
                    self.optimizer.step()  # torch's Adam has its states from the first step on, which loading fills
            self.iteration, _ = checkpointing.load_checkpoint([self.model], self.optimizer, self.scheduler)
            if args.no_load_optim:
                self.optimizer.reload_model_params()

    @property
    def fills_states(self) -> bool:
        """Whether loading needs states that it fills: those of a distributed optimizer."""
        return bool(self.args.use_distributed_optimizer)

    def wrapped(self, config: Any, module: Any, job: dict[str, Any]) -> Any:
        """The model with its gradient buffers."""
        ddp = DistributedDataParallelConfig(
            use_distributed_optimizer=self.args.use_distributed_optimizer,
            grad_reduce_in_fp32=True,
            overlap_grad_reduce="bucket" in job,
            bucket_size=job.get("bucket"),
        )
        return DistributedDataParallel(config, ddp, module)

    def step(self) -> float:
        """One step on the batch of this iteration, of which each data parallel rank takes its share."""
        generator = torch.Generator().manual_seed(self.iteration)
        ids = torch.randint(0, self.args.vocab_size, (BATCH, LENGTH + 1), generator=generator)
        ranks, rank = ps.get_data_parallel_world_size(), ps.get_data_parallel_rank()
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        loss = self.passed(ids[rank * BATCH // ranks : (rank + 1) * BATCH // ranks])
        finalize_model_grads([self.model], None)
        self.optimizer.step()
        self.scheduler.step(increment=BATCH)
        self.iteration += 1
        dist.all_reduce(loss)
        return loss.item() / (ranks * self.args.tensor_model_parallel_size)

    def passed(self, ids: torch.Tensor) -> torch.Tensor:
        """Forward and backward through the stages; the loss on the last one, 0 elsewhere."""
        plain, x, grad = self.plain, None, None
        positions = torch.arange(LENGTH)[None].expand(len(ids), LENGTH)
        mask = torch.triu(torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool), 1)
        if not plain.pre_process:
            x = torch.empty(LENGTH, len(ids), plain.config.hidden_size, dtype=self.args.params_dtype)
            dist.recv(x, src=ps.get_pipeline_model_parallel_prev_rank())
            plain.set_input_tensor(x.requires_grad_())
        labels = ids[:, 1:].contiguous() if plain.post_process else None
        y = self.model(ids[:, :-1].contiguous(), positions, mask, labels=labels)
        loss = torch.zeros(())
        if plain.post_process:
            y = y.float().mean()
            loss = y.detach().clone()
        else:
            dist.send(
                y.detach().to(self.args.params_dtype).contiguous(), dst=ps.get_pipeline_model_parallel_next_rank()
            )
            grad = torch.empty(y.shape, dtype=self.args.params_dtype)
            dist.recv(grad, src=ps.get_pipeline_model_parallel_next_rank())
            grad = grad.to(y.dtype)
        y.backward(grad)
        if x is not None:
            dist.send(x.grad.contiguous(), dst=ps.get_pipeline_model_parallel_prev_rank())
        return loss

    def save(self, out: str, how: str) -> None:
        """What Megatron saves with `--ckpt-format` torch or torch_dist, of the latter either kind of optimizer."""
        args = self.args
        args.save, args.iteration = out, self.iteration
        args.ckpt_format = "torch" if how == "torch" else "torch_dist"
        args.use_dist_ckpt = args.ckpt_format != "torch"
        args.dist_ckpt_optim_fully_reshardable = how == "fully_reshardable"
        Path(out).mkdir(parents=True, exist_ok=True)
        dist.barrier()
        checkpointing.save_checkpoint(self.iteration, [self.model], self.optimizer, self.scheduler, 0)
        dist.barrier()

    @torch.no_grad()
    def logits(self, path: str) -> None:
        """The logits of the model's own weights, computed in float32."""
        weights = {name: tensor.float() for name, tensor in self.plain.state_dict().items() if torch.is_tensor(tensor)}
        args = self.args
        args.bf16, args.params_dtype = False, torch.float32
        plain = build(args).eval()
        lost = plain.load_state_dict(weights, strict=False).missing_keys
        assert all("_extra_state" in name for name in lost), lost
        ids = torch.randint(0, args.vocab_size, (2, 12), generator=torch.Generator().manual_seed(1))
        mask = torch.triu(torch.ones(1, 1, 12, 12, dtype=torch.bool), 1)
        logits = plain(ids, torch.arange(12)[None].expand(2, -1), mask)
        parts = [torch.empty_like(logits) for _ in range(ps.get_tensor_model_parallel_world_size())]
        dist.all_gather(parts, logits.contiguous(), group=ps.get_tensor_model_parallel_group())
        if dist.get_rank() == 0:
            np.savez(path, ids=ids.numpy(), logits=torch.cat(parts, -1).numpy())


def do(job: dict[str, Any]) -> None:
    """One entry."""
    with Cpu():
        training = Training(job)
        for _ in range(job.get("steps", 0)):
            training.step()
        for out, how in job.get("save", {}).items():
            training.save(out, how)
        losses = [training.step() for _ in range(3)] if "losses" in job else []
        if "logits" in job:
            training.logits(job["logits"])
    if dist.get_rank() == 0 and losses:
        Path(job["losses"]).write_text(json.dumps(losses))


def run(jobs: Path, rank: int) -> int:
    """All entries, on one rank."""
    faulthandler.enable()
    faulthandler.dump_traceback_later(240.0, exit=True)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
    store = f"file://{jobs}.meeting"
    dist.init_process_group("gloo", store, timedelta(seconds=60), world_size=RANKS, rank=rank)
    with multiprocessing.get_context("fork").Manager() as manager:  # Megatron's own would start Python anew
        filesystem_async._results_queue = manager.Queue()
        for job in json.loads(jobs.read_text()):
            do(job)
        dist.barrier()
    return 0


def main() -> int:
    """Fork the ranks. Exit status 0 when none of them failed."""
    without_gpu()
    jobs = Path(sys.argv[1])
    Path(f"{jobs}.meeting").unlink(missing_ok=True)
    children = []
    for rank in range(RANKS):
        children.append(os.fork())
        if not children[-1]:
            code = 1
            with contextlib.suppress(SystemExit):
                try:
                    code = run(jobs, rank)
                except Exception:  # noqa: BLE001
                    sys.excepthook(*sys.exc_info())
            sys.stdout.flush()
            os._exit(code)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    print("exit statuses of the ranks:", *codes)
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
