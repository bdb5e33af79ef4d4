"""Judge: does a training of real megatron-core go on from a checkpoint as if nothing had happened to it?

Real megatron-core (0.16.1, local layer spec, CPU, gloo, two ranks) trains with its own optimizer, saves by its own
functions, loads and trains on. Its loop around them, megatron/training, is not in the package: `saved` and `resume`
put and take the entries of megatron/training/checkpointing.py (0032978f), written here once more.

    python megatron_train.py JOBS.json

JOBS.json is a list of trainings, done one after another in one start of the framework, which takes longest:

    {"hf": FOLDER, "dtype": "float32", "distributed": false, "tp": 2, "pp": 1, "losses": FILE, ...}
                                              one training; ranks beyond tp * pp are data parallel
    {..., "vpp": 2}                           virtual chunks of each stage
    {..., "multiple": 1}                      of what the rows of the vocabulary are one, else 16
    {..., "ep": 2, "etp": 1}                  experts on several ranks
    {..., "experts": "te" | "grouped"}        in the module for grouped layers of Transformer Engine, which are ours
                                              here; or in two matrices, which begin at random
    {..., "bucket": 20000}                    elements of a bucket of the distributed optimizer, else there is one
    {..., "weights": RUN}                     it begins with the weights of a run, trains, saves, trains on
    {..., "resume": RUN}                      it loads all of a run, saves, and trains on with the losses of the other
    {..., "resume": RUN, "foreign": true}     the same, of a run that began in another framework, which rounds otherwise
    {..., "damaged": true}                    the losses must differ
    {..., "save": {RUN: "torch" | "torch_dist" | "dp_reshardable" | "prefixed"}}
"""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from copy import copy, deepcopy
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # before torch reads it

import megatron.core.transformer.moe.experts as megatron_experts
import megatron_dist_judge as dist_judge
import megatron_judge as judge
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing as dc
from megatron.core import parallel_state as ps
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from transformers import AutoConfig

RANKS, BATCH, STEPS, RATE = 2, 4, 3, 0.01
TOLERANCE = {"float32": 1e-6, "bfloat16": 5e-4}
"""Largest relative difference of a loss: a few times what another order of the sums makes of it."""
FOREIGN = 1e-5
"""The same where another framework made the steps before."""


class Training:
    """The model, optimizer and scheduler of one rank."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.job = job
        self.c = AutoConfig.from_pretrained(job["hf"])
        self.half = job["dtype"] == "bfloat16"
        dtype, distributed = getattr(torch, job["dtype"]), job["distributed"]
        topology = judge.Topology(job["tp"], job["pp"], job.get("vpp"), {}, job.get("ep", 1), job.get("etp"))
        self.topology = topology
        config = judge.transformer_config(self.c, topology, dtype)
        config.pipeline_dtype = dtype
        config.bf16 = self.half
        config.sequence_parallel = config.num_moe_experts is not None and topology.tp > 1
        padding = Namespace(make_vocab_size_divisible_by=job.get("multiple", 16))
        rows = judge.padded_vocabulary(self.c, topology, padding)
        config.moe_grouped_gemm = job.get("experts") == "grouped"
        torch.manual_seed(0)
        self.chunks = judge.build_chunks(self.c, config, rows)
        if job.get("experts") == "te":
            group_experts(self.chunks)
        for chunk in self.chunks:
            if chunk.post_process:
                chunk.parallel_output, chunk.output_layer.gather_output = True, False
        ddp = DistributedDataParallelConfig(
            use_distributed_optimizer=distributed,
            overlap_grad_reduce="bucket" in job,
            bucket_size=job.get("bucket"),
            grad_reduce_in_fp32=True,
        )
        self.wrapped = [
            DistributedDataParallel(config, deepcopy(ddp), chunk, disable_bucketing=number > 0)
            for number, chunk in enumerate(self.chunks)
        ]
        settings = OptimizerConfig(
            lr=RATE, min_lr=RATE / 10, weight_decay=0.1, bf16=self.half, params_dtype=dtype, clip_grad=1.0,
            use_distributed_optimizer=distributed,
        )  # fmt: skip
        self.optimizer = get_megatron_optimizer(settings, self.wrapped)
        self.scheduler = OptimizerParamScheduler(
            self.optimizer, init_lr=0.0, max_lr=RATE, min_lr=RATE / 10, lr_warmup_steps=2, lr_decay_steps=20,
            lr_decay_style="cosine", start_wd=0.1, end_wd=0.1, wd_incr_steps=20, wd_incr_style="constant",
            override_opt_param_scheduler="foreign" in job, use_checkpoint_opt_param_scheduler="foreign" not in job,
        )  # fmt: skip
        self.iteration = 0

    def train(self) -> list[float]:
        """Some steps; the loss of each, known to every rank."""
        return [self.step() for _ in range(STEPS)]

    def step(self) -> float:
        """One step on the batch of this iteration, of which each data parallel rank takes its share."""
        generator = torch.Generator().manual_seed(self.iteration)
        ids = torch.randint(0, self.c.vocab_size, (BATCH, 17), generator=generator)
        ranks, rank = ps.get_data_parallel_world_size(), ps.get_data_parallel_rank()
        ids = ids[rank * BATCH // ranks : (rank + 1) * BATCH // ranks]
        for wrapped in self.wrapped:
            wrapped.zero_grad_buffer()
        self.optimizer.zero_grad()
        loss = self.pass_through(ids)
        finalize_model_grads(self.wrapped, None)
        self.optimizer.step()
        self.scheduler.step(increment=1)
        self.iteration += 1
        dist.all_reduce(loss)
        return loss.item() / (ranks * self.job["tp"])

    def pass_through(self, ids: torch.Tensor) -> torch.Tensor:
        """Forward and backward through all stages of the pipeline; the loss on the last one, 0 elsewhere."""
        positions, hidden = torch.arange(16)[None].expand(len(ids), 16), []
        loss = torch.zeros(())
        for wrapped, chunk in zip(self.wrapped, self.chunks, strict=True):
            x = None
            if not chunk.pre_process:
                x = torch.empty(16, len(ids), chunk.config.hidden_size, dtype=chunk.config.params_dtype)
                dist.recv(x, src=ps.get_pipeline_model_parallel_prev_rank())
                chunk.set_input_tensor(x.requires_grad_())
            with judge.CpuForCuda():
                y = wrapped(ids[:, :-1], positions, None, labels=ids[:, 1:] if chunk.post_process else None)
            if chunk.post_process:
                y = y.float().mean()
                loss = y.detach().clone()
            else:
                dist.send(y.detach().contiguous(), dst=ps.get_pipeline_model_parallel_next_rank())
            hidden.append((chunk, x, y))
        for chunk, x, y in reversed(hidden):
            grad = None
            if not chunk.post_process:
                grad = torch.empty_like(y)
                dist.recv(grad, src=ps.get_pipeline_model_parallel_next_rank())
            with judge.CpuForCuda():
                y.backward(grad)
            if x is not None:
                dist.send(x.grad, dst=ps.get_pipeline_model_parallel_prev_rank())
        return loss


class GroupedLinear(torch.nn.Module):
    """A matrix for each expert, as in Transformer Engine, which is not here.

    It registers `weight0`, `weight1`, ... in this order (its pytorch/module/grouped_linear.py at 0069563f).
    """

    def __init__(self, experts: int, inputs: int, outputs: int, *, config: Any, **_: Any) -> None:
        super().__init__()
        for number in range(experts):
            weight = torch.nn.Parameter(torch.zeros(outputs, inputs, dtype=config.params_dtype))
            weight.allreduce = config.expert_model_parallel_size == 1
            self.register_parameter(f"weight{number}", weight)

    def forward(self, x: torch.Tensor, tokens: list[int]) -> tuple[torch.Tensor, None]:
        parts = zip(x.split(tokens), self.parameters(), strict=True)
        return torch.cat([torch.nn.functional.linear(part, weight) for part, weight in parts]), None


def group_experts(chunks: list[Any]) -> None:
    """Put megatron-core's module for grouped layers in the place of that with a module for each expert."""
    layers = MLPSubmodules(linear_fc1=GroupedLinear, linear_fc2=GroupedLinear)
    for chunk in chunks:
        for layer in chunk.decoder.layers:
            count, config = layer.mlp.num_local_experts, chunk.config
            layer.mlp.experts = TEGroupedMLP(count, config, layers, get_default_pg_collection())


def grouped_gemm(x: torch.Tensor, weights: torch.Tensor, tokens: torch.Tensor, trans_b: bool) -> torch.Tensor:
    """The kernel of `GroupedMLP`, which is for GPUs only: the rows of each expert times its matrix."""
    assert not trans_b
    return torch.cat([part @ weight for part, weight in zip(x.split(tokens.tolist()), weights, strict=True)])


def norm_some_rows() -> None:
    """Let torch's norms stand where sequences are cut, as they have to be to train experts on tensor ranks.

    megatron-core refuses them there (transformer/torch_norm.py:32): their gradients are those of some rows. It adds
    them up where a weight says so (distributed/finalize_model_grads.py).
    """
    build = WrappedTorchNorm.__new__

    def marked(cls: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        alone = copy(config)
        alone.sequence_parallel = False
        norm = build(cls, alone, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    WrappedTorchNorm.__new__ = marked


def give_steps() -> None:
    """Let the distributed optimizer load without Transformer Engine, whose Adam has no step in each parameter's state.

    That of torch has. Of what is loaded none is found (distrib_optimizer.py:939), and all share the tensor of line 821.
    """
    load = DistributedOptimizer._set_main_param_and_optimizer_states

    def with_step(self: Any, parameter: Any, tensors: dict[str, Any]) -> None:
        group, order = self.model_param_group_index_map[parameter]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        step = state.pop("step").clone()
        load(self, parameter, tensors)
        state["step"] = step

    DistributedOptimizer._set_main_param_and_optimizer_states = with_step


def begin(training: Training, run: Path) -> None:
    """The weights of a run that was converted, and nothing else of it; two matrices of all experts are not written."""
    if training.job.get("experts") == "grouped":
        return
    stored = torch.load(place(training, run) / judge.FILE, weights_only=False)
    judge.agree(judge.load_chunks(training.chunks, stored, training.topology.chunks(), "local"))
    training.optimizer.reload_model_params()


def place(training: Training, run: Path) -> Path:
    """This rank's folder in a classic run."""
    return judge.iteration_folder(run) / training.topology.folder(*judge.my_ranks())


def claims_of(training: Training, run: Path) -> Namespace:
    """The args of a run, with those that say how the optimizer is kept."""
    (path, *_) = [
        *judge.iteration_folder(run).glob("common.pt"),
        *sorted(judge.iteration_folder(run).glob("mp*/m*.pt")),
    ]
    claims = torch.load(path, weights_only=False)["args"]
    more = {"use_distributed_optimizer": training.job["distributed"], "accumulate_allreduce_grads_in_fp32": True}
    return Namespace(**{**vars(claims), **more, "bf16": training.half, "no_save_optim": False, "rank": dist.get_rank()})


def metadata(how: str, training: Training) -> dict[str, Any]:
    """What `_build_sharded_state_dict_metadata` makes of the arguments."""
    kind = {"torch_dist": "fully_reshardable"}.get(how, how)
    about: dict[str, Any] = {"distrib_optim_sharding_type": kind} if training.job["distributed"] else {}
    return about | {"singleton_local_shards": False, "chained_optim_avoid_prefix": how != "prefixed"}


def save(training: Training, out: Path, how: str, claims: Namespace) -> None:
    """What `save_checkpoint` writes, less the random states."""
    state: dict[str, Any] = {"args": claims, "checkpoint_version": 3.0, "iteration": training.iteration}
    state["opt_param_scheduler"] = training.scheduler.state_dict()
    state["num_floating_point_operations_so_far"] = 1e9
    folder, names = out / f"iter_{training.iteration:07d}", training.topology.chunks()
    if how == "torch":
        path = folder / training.topology.folder(*judge.my_ranks())
        path.mkdir(parents=True, exist_ok=True)
        if training.job["distributed"]:
            training.optimizer.save_parameter_state(str(path / "distrib_optim.pt"))
        state |= {
            name: chunk.state_dict_for_save_checkpoint() for name, chunk in zip(names, training.chunks, strict=True)
        }
        state["optimizer"] = training.optimizer.state_dict()
        if ps.get_expert_data_parallel_rank() == 0:
            torch.save(state, path / judge.FILE)
    else:
        folder.mkdir(parents=True, exist_ok=True)
        state |= sharded(training, metadata(how, training))
        dist.barrier()
        dc.save(state, str(folder), content_metadata=metadata(how, training))
    dist.barrier()
    if dist.get_rank() == 0:
        (out / "latest_checkpointed_iteration.txt").write_text(str(training.iteration))


def sharded(training: Training, about: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The model and the optimizer for a distributed checkpoint."""
    about = about | {"dp_cp_group": ps.get_data_parallel_group(with_context_parallel=True)}
    names = training.topology.chunks()
    state = {name: chunk.sharded_state_dict(metadata=about) for name, chunk in zip(names, training.chunks, strict=True)}
    return state | {"optimizer": training.optimizer.sharded_state_dict(state, metadata=about, **more)}


@torch.no_grad()
def resume(training: Training, run: Path) -> None:
    """What `load_checkpoint` does with the model, the optimizer and its scheduler."""
    folder, names = judge.iteration_folder(run), training.topology.chunks()
    if (folder / "metadata.json").is_file():
        if training.job["distributed"]:
            training.optimizer.step()  # without Transformer Engine it needs one (distrib_optimizer.py:642)
        about = dc.load_content_metadata(str(folder))
        sharded_state = sharded(training, about, is_loading=True)
        state = dc.load(sharded_state, str(folder), strict="raise_all")
    else:
        state = torch.load(place(training, run) / judge.FILE, weights_only=False)
    assert state["args"].no_save_optim is False, "load_checkpoint would begin with a fresh optimizer"
    for name, chunk in zip(names, training.chunks, strict=True):
        chunk.load_state_dict(state[name], strict=True)
    training.optimizer.load_state_dict(state["optimizer"])
    if training.job["distributed"] and not (folder / "metadata.json").is_file():
        training.optimizer.load_parameter_state(str(place(training, run) / "distrib_optim.pt"))
    training.scheduler.load_state_dict(state["opt_param_scheduler"])
    training.iteration = state["iteration"]
    assert state.get("num_floating_point_operations_so_far") == (None if training.job.get("foreign") else 1e9)


def do(job: dict[str, Any]) -> None:
    """One training; ends every rank when anything is wrong."""
    with dist_judge.Optimizing():
        training = Training(job)
        run = Path(job.get("weights") or job["resume"])
        if "weights" in job:
            begin(training, run)
            training.train()
        else:
            resume(training, run)
        for out, how in job.get("save", {}).items():
            save(training, Path(out), how, claims_of(training, run))
        losses, path = training.train(), Path(job["losses"])
    if dist.get_rank() == 0:
        print(job.get("resume", "begun"), *(f"{loss:.7f}" for loss in losses), flush=True)
    if "weights" in job:
        path.write_text(json.dumps(losses))
        return
    expected = json.loads(path.read_text())
    apart = max(abs(loss - other) / other for loss, other in zip(losses, expected, strict=True))
    if dist.get_rank() == 0:
        print(f"largest relative loss difference {apart:.3g}", flush=True)
    same = apart < (FOREIGN if "foreign" in job else TOLERANCE[job["dtype"]])
    judge.agree([] if same != job.get("damaged", False) else [f"losses {losses}, unbroken {expected}"])


def main() -> int:
    """Fork the ranks. Exit status 0 when everything agrees, 1 when not."""
    give_steps()
    norm_some_rows()
    megatron_experts.gg.ops = Namespace(gmm=grouped_gemm)
    return dist_judge.main(do, RANKS)


if __name__ == "__main__":
    sys.exit(main())
