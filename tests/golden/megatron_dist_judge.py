"""Judge: does a torch_dist checkpoint hold the same model as a Hugging Face folder, on any number of ranks?

The real megatron-core (0.16.1, local layer spec, CPU, gloo) is built from the Hugging Face config alone, loads the
folder with `dist_checkpointing.load(strict="raise_all")`, and must give the logits of transformers. Then it may save
what it holds by its own `dist_checkpointing.save`. Exit status 0 means that everything agrees.

    python megatron_dist_judge.py JOBS.json

JOBS.json is a list; its entries are done one after another in one start of the framework, which takes longest, those of
one topology together:

    {"dist": RUN, "hf": FOLDER, "tp": 2, "pp": 2}      load, compare args and logits; ranks beyond tp * pp are copies
    {..., "te": true}                                  its modules have the states that Transformer Engine gives them
    {..., "mtp": true}                                 its layer that predicts a second token is compared
    {..., "damaged": true}                             the logits must differ
    {..., "ep": 2, "etp": 1}                           experts on several ranks
    {..., "grouped": RUN}                              experts as before Transformer Engine, which compute on GPUs
                                                       only: what they hold is saved as a classic run
    {..., "save": RUN, "layers": "stacked" | "numbered" | "split", "optimizer": "dp_reshardable"}

"numbered" keeps the layers apart, as for mixed layers; "split" keeps gate and up apart too (`singleton_local_shards`).
"""

from __future__ import annotations

import faulthandler
import gc
import json
import multiprocessing
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # before torch reads it

import megatron.core.transformer.moe.experts as megatron_experts
import megatron_judge as judge
import mtp_judge
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing as dc
from megatron.core import parallel_state as ps
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from ranks import fork
from transformers import AutoConfig
from transformers.utils import logging

RANKS = 4
LAYERS = {
    "stacked": {},
    "numbered": {"non_homogeneous_layers": True},
    "split": {"singleton_local_shards": True},
}
"""How layers are saved: the metadata that makes megatron-core do so (transformer/transformer_block.py:805)."""


class Optimizing(judge.CpuForCuda):
    """Calls tensors those of a GPU, which DistributedOptimizer wants (optimizer/distrib_optimizer.py:405)."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)
        return result.replace("torch.", "torch.cuda.") if func is torch.Tensor.type and len(args) == 1 else result


def claims_of(folder: Path) -> Namespace:
    """The args in common.pt."""
    stored = torch.load(folder / "common.pt", weights_only=False)
    if "args" not in stored or stored.get("checkpoint_version") != 3.0:
        raise judge.JudgementError(f"{folder}/common.pt holds {sorted(stored)}")
    return stored["args"]


def metadata(layers: str) -> dict[str, Any]:
    """What `sharded_state_dict` is told."""
    return {**LAYERS[layers], "dp_cp_group": ps.get_data_parallel_group(with_context_parallel=True)}


def as_transformer_engine(model: GPTModel) -> None:
    """Give an extra state to the modules that have one in Transformer Engine: the real code then asks for it.

    They are norms by themselves (get_extra_state in transformer_engine/pytorch/ops/op.py) and the attention, which did
    so up to megatron-core 0.14, before it had a `sharded_state_dict` of its own.
    """
    state = {
        "get_extra_state": lambda self: torch.empty(0, dtype=torch.uint8),
        "set_extra_state": lambda self, value: None,
    }
    latent = model.config.multi_latent_attention  # whose own norms are a part of what follows them
    alone = (
        "final_layernorm",
        "final_norm",
        "latent_proj",
        "enorm",
        "hnorm",
        *(("input_layernorm",) if latent else ("q_layernorm", "k_layernorm", "out_norm")),
    )
    for name, module in model.named_modules():
        if name.endswith("core_attention"):
            sinks = model.config.softmax_type == "learnable"  # which it never saved without that method
            older = {} if sinks else {"sharded_state_dict": MegatronModule.sharded_state_dict}
            module.__class__ = type("OlderAttention", (type(module),), {**state, **older})
        elif name.endswith(alone) and not isinstance(module, IdentityOp):
            module.__class__ = type("Norm", (type(module),), state)
    for layer in [*model.decoder.layers, *(further.transformer_layer for further in further_layers(model))]:
        if latent:
            mlp = {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
            layer.submodules_config.sharded_state_dict_keys_map = {**judge.LATENT_NORMS, **mlp}
        if hasattr(getattr(layer, "mlp", None), "router"):  # the norm before experts is never a part of what follows it
            layer.pre_mlp_layernorm.__class__ = type("Norm", (type(layer.pre_mlp_layernorm),), state)
            renamed = layer.submodules_config.sharded_state_dict_keys_map
            layer.submodules_config.sharded_state_dict_keys_map = {
                key: value for key, value in renamed.items() if not key.startswith("pre_mlp_layernorm")
            }


def further_layers(model: GPTModel) -> list[torch.nn.Module]:
    """The layers of this stage that predict further tokens."""
    return list(model.mtp.layers) if getattr(model, "mtp_process", False) else []


def load(model: GPTModel, folder: Path) -> list[str]:
    """Load the real way; keys that are missing or left over on either side are failures."""
    sharded_state = {"model": model.sharded_state_dict(metadata=metadata("stacked"))}
    try:
        state = dc.load(sharded_state, str(folder), strict="raise_all")
        model.load_state_dict(state["model"], strict=True)
    except (RuntimeError, dc.core.CheckpointingException) as error:
        return [f"{type(error).__name__}: {str(error)[:2000]}"]
    return []


def real_optimizer(model: GPTModel) -> Any:
    """megatron-core's distributed optimizer after one step with a rate of 0: it has moments, the weights stay."""
    wrapped = DistributedDataParallel(
        model.config, DistributedDataParallelConfig(use_distributed_optimizer=True), model
    )
    config = OptimizerConfig(lr=0.0, weight_decay=0.0, params_dtype=torch.float32, use_distributed_optimizer=True)
    optimizer = get_megatron_optimizer(config, [wrapped])
    for number, parameter in enumerate(model.parameters()):
        parameter.main_grad.fill_(0.01 * (number + 1))
    optimizer.step()
    return optimizer


def save_real(out: Path, model: GPTModel, claims: Namespace, layers: str, optimizer: str) -> None:
    """Write what the real model holds, with the entries that Megatron's training adds."""
    folder = out / "iter_0000007"
    folder.mkdir(parents=True, exist_ok=True)
    about = metadata(layers)
    ranks = ps.get_pipeline_model_parallel_rank(), ps.get_tensor_model_parallel_rank()
    sizes = ps.get_pipeline_model_parallel_world_size(), ps.get_tensor_model_parallel_world_size()
    rng = ShardedObject(
        "rng_state", [{"torch_rng_state": torch.get_rng_state()}], sizes, ranks, ps.get_data_parallel_rank()
    )
    state = {"args": claims, "checkpoint_version": 3.0, "iteration": 7, "rng_state": rng}
    state["model"] = model.sharded_state_dict(metadata=about)
    if optimizer:
        about["distrib_optim_sharding_type"] = optimizer
        with Optimizing():
            state["optimizer"] = real_optimizer(model).sharded_state_dict(state["model"], metadata=about)
    dist.barrier()
    dc.save(state, str(folder), content_metadata=LAYERS[layers])
    dist.barrier()
    if dist.get_rank() == 0:
        (out / "latest_checkpointed_iteration.txt").write_text("7")


@torch.no_grad()
def do(job: dict[str, Any], logits_of: dict[str, torch.Tensor]) -> None:
    """One entry; ends every rank when anything is wrong."""
    if dist.get_rank() == 0:
        print(f"{job['dist']} on TP {job['tp']} x PP {job['pp']} against {job['hf']}", flush=True)
    topology = judge.Topology(job["tp"], job["pp"], None, {}, job.get("ep", 1), job.get("etp"))
    folder, hf = judge.iteration_folder(Path(job["dist"])), Path(job["hf"])
    c = AutoConfig.from_pretrained(hf)
    claims = claims_of(folder)
    stored = dc.load_tensors_metadata(str(folder))["embedding.word_embeddings.weight"]
    saved = judge.Topology.read(claims, Namespace(tp=None, pp=None, vpp=None, first=None, last=None))
    padded = judge.padded_vocabulary(c, saved, claims)
    failures = judge.claim_failures(claims, *judge.expected_claims(c, saved, stored.dtype, padded))
    if stored.global_shape[0] != padded:
        failures.append(f"{stored.global_shape[0]} rows of embeddings, args imply {padded}")
    config = judge.transformer_config(c, topology, stored.dtype)
    config.moe_grouped_gemm = "grouped" in job
    further = bool(job.get("mtp"))
    build = mtp_judge.build if further else judge.build_chunks
    (model,) = build(c, config, judge.padded_vocabulary(c, topology, claims))
    if job.get("te"):
        as_transformer_engine(model)
    judge.agree(failures + load(model, folder))
    if "grouped" in job:
        sizes = {"tensor": topology.tp, "pipeline": topology.pp, "expert": topology.ep}
        vars(claims).update({f"{name}_model_parallel_size": size for name, size in sizes.items()})
        claims.expert_tensor_parallel_size = topology.etp
        judge.save_real(Path(job["grouped"]), [model], topology, claims)
        return
    if "save" in job:
        with torch.enable_grad():
            save_real(Path(job["save"]), model, claims, job["layers"], job.get("optimizer", ""))
    ids, failures = judge.token_ids(c), []
    model = model.float().eval()
    logits = mtp_judge.ours(model, ids) if further else judge.pipeline_forward([model], ids)
    if logits is not None and ps.get_tensor_model_parallel_rank() == ps.get_data_parallel_rank() == 0:
        if job["hf"] not in logits_of:
            logits_of[job["hf"]] = (mtp_judge.theirs if further else judge.hugging_face_logits)(hf, ids)
        failures = judge.compare_logits(logits, logits_of[job["hf"]], 1e-4)
        if job.get("damaged"):
            failures = [] if failures else ["the damage shows in no logit"]
    judge.agree(failures)


@contextmanager
def forked_results_queue() -> Iterator[None]:
    """A save's own queue is of a process that is started anew and imports torch again, for the sake of GPUs."""
    with multiprocessing.get_context("fork").Manager() as manager:
        filesystem_async._results_queue = manager.Queue()
        yield


@forked_results_queue()
def do_all(jobs: Path, do: Callable[[dict[str, Any]], None], ranks: int, rank: int) -> int:
    """All entries, on one rank."""
    faulthandler.dump_traceback_later(240.0, exit=True)
    where = f"file://{jobs}.meeting"
    dist.init_process_group("gloo", where, timedelta(seconds=60), world_size=ranks, rank=rank)
    groups = None
    for job in json.loads(jobs.read_text()):
        if groups != (groups := tuple(job.get(name) for name in ("tp", "pp", "vpp", "ep", "etp"))):
            ps.destroy_model_parallel()  # each set of groups leaves threads behind
            ps.initialize_model_parallel(
                *groups[:3],
                expert_model_parallel_size=groups[3] or 1,
                expert_tensor_parallel_size=groups[4],
                distributed_timeout_minutes=1,
            )
        try:
            do(job)
        except judge.JudgementError as error:
            print(f"FAILED\nrank {rank}: {error}", file=sys.stderr, flush=True)
            return 1
    dist.destroy_process_group()
    return 0


def main(do: Callable[[dict[str, Any]], None], ranks: int) -> int:
    """Fork the ranks, which `do` each entry. Exit status 0 when everything agrees, 1 when not."""
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    judge.patch_for_cpu()
    megatron_experts.gg.assert_grouped_gemm_is_available = lambda: None
    os.fsync = lambda fd: None  # a test's files need not outlive a power cut
    torch.cuda.synchronize = lambda *args, **kwargs: None  # dist_checkpointing/strategies/filesystem_async.py
    Path(f"{sys.argv[1]}.meeting").unlink(missing_ok=True)
    gc.freeze()  # else collecting touches, and so copies, what the ranks share; a distributed optimizer's save collects
    return fork(ranks, partial(do_all, Path(sys.argv[1]), do, ranks))


if __name__ == "__main__":
    sys.exit(main(partial(do, logits_of={}), RANKS))
