"""Real torch.distributed writes checkpoints of a tiny model: FSDP1, FSDP2, DCP, accelerate, on gloo and the CPU.

    python fsdp_world.py MODEL_DIR OUT_DIR WORLD KIND [KIND ...]
    python fsdp_world.py load DCP_DIR MODEL_DIR WORLD
    python fsdp_world.py load-accelerate CHECKPOINT_DIR MODEL_DIR WORLD
    python fsdp_world.py all CALLS.json

The first writes OUT_DIR/KIND for every kind of the table KINDS, all in one start of WORLD processes, because starting
takes longest. The weights are those of MODEL_DIR, a Hugging Face folder, bit for bit. `edge` alone is no model: what
it holds is in OUT_DIR/edge.safetensors.

The other two build the model with other weights, shard it, let the framework load the checkpoint, gather, and compare
every tensor bit for bit with MODEL_DIR's. Exit status 0 when all are equal.

The last makes several of these calls, a list of lists of words, and names those that fail.
"""

from __future__ import annotations

import functools
import json
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

warnings.filterwarnings("ignore")  # torch announces every deprecation once a rank
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import ranks
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate import FullyShardedDataParallelPlugin, PartialState
from accelerate.utils.fsdp_utils import load_fsdp_model, save_fsdp_model, save_fsdp_optimizer
from ranks import TIMEOUT, World, differences, load_model
from safetensors.torch import save_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

StateDict = dict[str, Any]


@functools.cache
def mesh(**dimensions: int) -> DeviceMesh:
    """`mesh(dp=2, tp=2)`, each made once: process groups are dear."""
    device_mesh = init_device_mesh("cpu", tuple(dimensions.values()), mesh_dim_names=tuple(dimensions))
    for group in device_mesh.get_all_groups():
        _set_pg_timeout(TIMEOUT, group)  # gloo's own is half an hour, and a mesh takes no other
    return device_mesh


def shard(model: nn.Module, over: DeviceMesh) -> nn.Module:
    """FSDP2: every layer, then the rest."""
    for layer in model.model.layers:
        fully_shard(layer, mesh=over)
    return fully_shard(model, mesh=over)


def fsdp2_model(world: World) -> nn.Module:
    """FSDP2 over all ranks."""
    return shard(world.copy(), mesh(fsdp=world.size))


def whole(value: Any) -> Any:
    """The full tensor of a DTensor: a collective."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def trained(world: World) -> tuple[nn.Module, torch.optim.Optimizer]:
    """FSDP2 and AdamW after a real step, whose learning rate is 0: the weights stay what they are."""
    model = fsdp2_model(world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    ids = torch.arange(16).view(1, 16) + world.rank
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    after = {name: whole(value) for name, value in model.state_dict().items()}
    assert not differences(after, world.model.state_dict()), "a step with lr=0 changed the weights"
    return model, optimizer


def halves(world: World) -> tuple[int, int]:
    """The lengths of a mesh of two dimensions: 2 and half of the ranks, or 1 and all where their number is odd."""
    two = math.gcd(world.size, 2)
    return two, world.size // two


def replicas(world: World) -> DeviceMesh:
    """Two replicas, each of half of the ranks; the names are verl's."""
    two, half = halves(world)
    return mesh(ddp=two, fsdp=half)


def tp_model(world: World) -> nn.Module:
    """Two dimensions: DTensors placed (_StridedShard(0), Shard(0)), or (Shard(0), Shard(1)) where rows are cut."""
    (two, half), model = halves(world), world.copy()
    grid = mesh(dp=half, tp=two)
    plan: dict[str, Any] = {f"model.layers.*.self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
    plan |= {f"model.layers.*.mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
    plan |= {f"model.layers.*.{name}_proj": RowwiseParallel() for name in ("self_attn.o", "mlp.down")}
    if not model.config.tie_word_embeddings:  # each gets a parameter of its own
        plan["model.embed_tokens"] = RowwiseParallel(input_layouts=Replicate())
        plan["lm_head"] = ColwiseParallel(output_layouts=Replicate())
    return shard(parallelize_module(model, grid["tp"], plan), grid["dp"])


def fsdp1_model(world: World, model: nn.Module | None = None, **options: Any) -> nn.Module:
    """FSDP1, wrapped by layer. Without device_id it would look for an accelerator."""
    model = model or world.copy()
    policy = ModuleWrapPolicy({type(world.model.model.layers[0])})
    cpu = torch.device("cpu")
    return FullyShardedDataParallel(
        model, auto_wrap_policy=policy, device_id=cpu, **({"use_orig_params": True} | options)
    )


def sharded_state_dict(model: nn.Module) -> StateDict:
    """FSDP1's SHARDED_STATE_DICT."""
    with FullyShardedDataParallel.state_dict_type(
        model, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(offload_to_cpu=False)
    ):
        return model.state_dict()


def plugin(kind: str, version: int) -> FullyShardedDataParallelPlugin:
    """accelerate's settings. Accelerator itself does not do FSDP on a CPU."""
    return FullyShardedDataParallelPlugin(fsdp_version=version, state_dict_type=kind, cpu_ram_efficient_loading=False)


def dump_verl(world: World, out: Path, version: int, **states: StateDict) -> None:
    """The folder that verl's FSDPCheckpointManager writes."""
    states["extra_state"] = {"lr_scheduler": {"last_epoch": 7}, "rng": {"cpu": torch.get_rng_state()}}
    for name, state in states.items():
        torch.save(state, out / f"{name}_world_size_{world.size}_rank_{world.rank}.pt")
    if world.rank == 0:
        (out / "fsdp_config.json").write_text(json.dumps({"FSDP_version": version, "world_size": world.size}))
        world.model.config.save_pretrained(out / "huggingface")


def accelerator(world: World, **changes: Any) -> Any:
    """What accelerate's save and load functions ask of an Accelerator."""
    PartialState(cpu=True)  # its logger demands it
    facts = {"num_processes": world.size, "process_index": world.rank, "is_main_process": world.rank == 0}
    return SimpleNamespace(**facts | {"is_fsdp2": True, "wait_for_everyone": dist.barrier} | changes)


def fsdp2(world: World, out: Path, **options: Any) -> None:
    """{"model": state dict of DTensors}: what everybody does."""
    dcp.save({"model": get_model_state_dict(fsdp2_model(world))}, checkpoint_id=out, **options)


def fsdp2_optim(world: World, out: Path) -> None:
    """The model and Adam's state in one folder."""
    model, optimizer = trained(world)
    state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=out)


def fsdp2_files(world: World, out: Path) -> None:
    """Three files a rank, the items dealt out by size."""
    fsdp2(world, out, storage_writer=dcp.FileSystemWriter(out, thread_count=3))


def fsdp2_item_files(world: World, out: Path) -> None:
    """A file for every item."""
    fsdp2(world, out, storage_writer=dcp.FileSystemWriter(out, single_file_per_rank=False))


def fsdp2_zstd(world: World, out: Path) -> None:
    """Every item a zstd stream."""
    fsdp2(world, out, storage_writer=dcp.FileSystemWriter(out, _extensions=[ZStandard()]))


def fsdp2_per_rank_metadata(world: World, out: Path) -> None:
    """A `__R.metadata` for every rank, which knows its own chunks only, and no `.metadata`."""
    fsdp2(world, out, use_collectives=False)


def hsdp(world: World, out: Path) -> None:
    """Two replicas of a sharded model; DCP writes each chunk once, from either."""
    model = shard(world.copy(), replicas(world))
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=out)


def tp_fsdp(world: World, out: Path) -> None:
    """Tensor parallel inside, FSDP2 outside: rectangles on disk, not in order, and uneven in the vocabulary."""
    dcp.save({"model": get_model_state_dict(tp_model(world))}, checkpoint_id=out)


def fsdp1(world: World, out: Path) -> None:
    """FSDP1 without a mesh: ShardedTensors."""
    dcp.save({"model": sharded_state_dict(fsdp1_model(world))}, checkpoint_id=out)


def fsdp1_hybrid(world: World, out: Path) -> None:
    """FSDP1 on a mesh of replicas: DTensors, or plain tensors where a replica is one rank."""
    model = fsdp1_model(world, sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=replicas(world))
    dcp.save({"model": sharded_state_dict(model)}, checkpoint_id=out)


def fsdp1_wrapped(world: World, out: Path) -> None:
    """Layers under activation checkpointing and torch.compile: the state dict keeps `_orig_mod.` in its keys."""
    model = world.copy()
    for number, layer in enumerate(model.model.layers):
        model.model.layers[number] = torch.compile(checkpoint_wrapper(layer))
    dcp.save({"model": sharded_state_dict(fsdp1_model(world, model))}, checkpoint_id=out)


def fsdp2_compiled(world: World, out: Path) -> None:
    """The whole model compiled, its own state_dict() saved: every key begins with `_orig_mod.`."""
    dcp.save({"model": torch.compile(fsdp2_model(world)).state_dict()}, checkpoint_id=out)


def fsdp2_parameters(world: World, out: Path) -> None:
    """named_parameters() of checkpointed layers: `_checkpoint_wrapped_module.` in the keys, no second tied name."""
    model = world.copy()
    for number, layer in enumerate(model.model.layers):
        model.model.layers[number] = checkpoint_wrapper(layer)
    dcp.save({"model": dict(shard(model, mesh(fsdp=world.size)).named_parameters())}, checkpoint_id=out)


def fsdp1_full(world: World, out: Path) -> None:
    """accelerate's FULL_STATE_DICT: pytorch_model_fsdp.bin.

    It is told of one process, because it offloads to the CPU for more, and FSDP1 on the CPU then frees what it saves
    and crashes.
    """
    save_fsdp_model(plugin("FULL_STATE_DICT", 1), accelerator(world, num_processes=1), fsdp1_model(world), str(out))


def accelerate_full(world: World, out: Path) -> None:
    """The same from FSDP2, the optimizer's state with it."""
    accelerate(world, out, "FULL_STATE_DICT")


def accelerate(world: World, out: Path, kind: str = "SHARDED_STATE_DICT", **options: Any) -> None:
    """A checkpoint-N folder of accelerate, with what Trainer puts next to it."""
    model, optimizer = trained(world)
    folder, settings, us = out / "checkpoint-7", plugin(kind, 2), accelerator(world)
    save_fsdp_model(settings, us, model, str(folder), **options)
    save_fsdp_optimizer(settings, us, optimizer, model, str(folder), **options)
    torch.save({"cpu": torch.get_rng_state()}, folder / f"rng_state_{world.rank}.pth")
    if world.rank == 0:
        torch.save({"last_epoch": 7}, folder / "scheduler.pt")
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": 7}))


def accelerate_dumps(world: World, out: Path) -> None:
    """use_dcp=False: each rank dumps its DTensors into pytorch_model_fsdp_0_rankR.bin."""
    accelerate(world, out, use_dcp=False)


def accelerate_local(world: World, out: Path, use_orig_params: bool = False) -> None:
    """LOCAL_STATE_DICT: pytorch_model_fsdp_rankR.bin with flat pieces, of whose parameters nothing is said."""
    model = fsdp1_model(world, use_orig_params=use_orig_params)
    save_fsdp_model(plugin("LOCAL_STATE_DICT", 1), accelerator(world), model, str(out / "checkpoint-7"))


def accelerate_local_orig(world: World, out: Path) -> None:
    """The same with the parameters' names: each what this rank holds of it, in one dimension."""
    accelerate_local(world, out, use_orig_params=True)


def verl(world: World, out: Path) -> None:
    """What verl's FSDPCheckpointManager writes: a dump of DTensors a rank, and much that is no weights."""
    model, optimizer = trained(world)
    dump_verl(world, out, 2, model=model.state_dict(), optim=optimizer.state_dict())


def verl_fsdp1(world: World, out: Path) -> None:
    """The same from FSDP1 without a mesh: ShardedTensors."""
    dump_verl(world, out, 1, model=sharded_state_dict(fsdp1_model(world)))


def verl_fsdp1_mesh(world: World, out: Path) -> None:
    """The same from FSDP1 on a mesh, as verl makes it: DTensors."""
    dump_verl(world, out, 1, model=sharded_state_dict(fsdp1_model(world, device_mesh=mesh(fsdp=world.size))))


def verl_hsdp(world: World, out: Path) -> None:
    """The same from FSDP2 with two replicas: every chunk is there twice."""
    model = shard(world.copy(), replicas(world))
    dump_verl(world, out, 2, model=model.state_dict())


def verl_tp(world: World, out: Path) -> None:
    """The same with tensor parallelism inside: _StridedShard."""
    dump_verl(world, out, 2, model=tp_model(world).state_dict())


def titan_like(world: World, out: Path) -> None:
    """torchtitan's layout: the model's keys without a container, all else next to them."""
    model, optimizer = trained(world)
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    others = {
        "optimizer": get_optimizer_state_dict(model, optimizer, options=flat),
        "lr_scheduler": {"last_epoch": 7, "_last_lr": [0.0]},
        "train_state": {"step": torch.tensor(7, dtype=torch.int32), "ntokens_seen": torch.tensor(112)},
        "dataloader": {"world_size": world.size, f"dp_rank_{world.rank}": b"where this rank has got to"},
    }
    dcp.save(get_model_state_dict(model) | others, checkpoint_id=out / "step-7")


class AppState(Stateful):
    """Model and optimizer in one, as in torch's DCP tutorial."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> StateDict:
        """Called by dcp.save."""
        model, optim = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optim}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Called by dcp.load."""
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state_dict["model"], optim_state_dict=state_dict["optim"]
        )


def app_state(world: World, out: Path) -> None:
    """{"app": AppState}: the weights two containers deep."""
    dcp.save({"app": AppState(*trained(world))}, checkpoint_id=out)


def hf_shards(world: World, out: Path, files: int = 1, **options: Any) -> None:
    """DCP's own safetensors: a shard a rank and file, no .metadata. safetensors refuses two names of one tensor."""
    state = get_model_state_dict(fsdp2_model(world))
    if world.model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    index = {name: 1 + number * files // len(state) for number, name in enumerate(state)}
    writer = HuggingFaceStorageWriter(str(out), index if files > 1 else None, save_distributed=True, **options)
    dcp.save(state, storage_writer=writer)


def hf_shards_files(world: World, out: Path) -> None:
    """The same in two files a rank."""
    hf_shards(world, out, files=2)


def hf_consolidated(world: World, out: Path) -> None:
    """The same, merged by torch: the shards in sharded/, whole files and an index above."""
    hf_shards(world, out, files=2, enable_consolidation=True)


def edge(world: World, out: Path) -> None:
    """Odd tensors and things that are no tensors. What they are is written next to the folder."""
    over = mesh(fsdp=world.size)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))

    plain = {
        "scalar": torch.tensor(3.5),
        "scalar_int": torch.tensor(-7),
        "vector_int": torch.arange(-3, 9),
        "bool": torch.tensor([[True, False, True], [False, False, True]]),
        "empty": torch.empty(0, 4),
        "five": numbers(2, 3, 2, 3, 2),
        "slice": numbers(8, 10)[2:5, 3:7],
        "transposed": numbers(3, 5).t(),
        "vector_as_row": numbers(7, 1).t(),
        "permuted": numbers(2, 3, 4).permute(2, 0, 1),
        "transposed_slice": numbers(8, 10)[2:5, 3:7].t(),
        "expanded": numbers(1, 3).expand(4, 3),
        "parameter": nn.Parameter(numbers(4, 6)),
        "half": numbers(3, 4).half(),
        "bfloat16": numbers(3, 4).bfloat16(),
        "double": numbers(3, 4).double(),
        "byte": torch.arange(250, 260).to(torch.uint8),
        "short": torch.arange(-3, 3).to(torch.int16),
        "unsigned_short": torch.arange(65530, 65536).to(torch.uint16),
        "float8": numbers(4, 4).to(torch.float8_e4m3fn),
        "nan": torch.tensor([float("nan"), float("inf"), -0.0, 1e-45]),
    }
    distributed = {
        "rows_fewer_than_ranks": distribute_tensor(numbers(1, 3), over, [Shard(0)]),
        "rows_uneven": distribute_tensor(numbers(7, 3), over, [Shard(0)]),
        "columns_uneven": distribute_tensor(numbers(3, 7), over, [Shard(1)]),
        "replicated": distribute_tensor(numbers(4, 3), over, [Replicate()]),
        "transposed_rows": distribute_tensor(numbers(4, 8), over, [Shard(1)]).t(),
    }
    tensors = plain | distributed
    things = {
        "int": 5,
        "str": "text",
        "tuple": (1, "two", torch.ones(2)),
        "list_of_ints": [1, 2, 3],
        "list": ["zero", numbers(2, 2), {"inner": numbers(3)}],
        "none": None,
    }
    dcp.save({"model": tensors | things, "step": 3, "rng": torch.get_rng_state()}, checkpoint_id=out)
    expected = {name: whole(value.detach()).contiguous() for name, value in tensors.items()}
    expected |= {"list.1": things["list"][1], "list.2.inner": things["list"][2]["inner"]}
    if world.rank == 0:
        save_file({name: value.clone() for name, value in expected.items()}, out.with_suffix(".safetensors"))


KINDS: dict[str, Callable[[World, Path], None]] = {
    "fsdp2": fsdp2,
    "fsdp2-optim": fsdp2_optim,
    "fsdp2-files": fsdp2_files,
    "fsdp2-item-files": fsdp2_item_files,
    "fsdp2-zstd": fsdp2_zstd,
    "fsdp2-per-rank-metadata": fsdp2_per_rank_metadata,
    "hsdp": hsdp,
    "tp-fsdp": tp_fsdp,
    "fsdp1": fsdp1,
    "fsdp1-hybrid": fsdp1_hybrid,
    "fsdp1-wrapped": fsdp1_wrapped,
    "fsdp2-compiled": fsdp2_compiled,
    "fsdp2-parameters": fsdp2_parameters,
    "fsdp1-full": fsdp1_full,
    "accelerate-full": accelerate_full,
    "accelerate": accelerate,
    "accelerate-dumps": accelerate_dumps,
    "accelerate-local": accelerate_local,
    "accelerate-local-orig": accelerate_local_orig,
    "verl": verl,
    "verl-fsdp1": verl_fsdp1,
    "verl-fsdp1-mesh": verl_fsdp1_mesh,
    "verl-hsdp": verl_hsdp,
    "verl-tp": verl_tp,
    "titan-like": titan_like,
    "app-state": app_state,
    "hf-shards": hf_shards,
    "hf-shards-files": hf_shards_files,
    "hf-consolidated": hf_consolidated,
    "edge": edge,
}


def make(world: World, out: Path, kinds: Iterable[str]) -> None:
    """Every kind, one after the other."""
    for kind in kinds:
        (out / kind).mkdir(parents=True, exist_ok=True)
        dist.barrier()
        KINDS[kind](world, out / kind)
        dist.barrier()


def blank(world: World) -> nn.Module:
    """FSDP2 of a model that knows nothing: every weight is NaN until something loads it."""
    model = fsdp2_model(world)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    return model


def judge(world: World, model: nn.Module, lines: Iterable[str] = ()) -> None:
    """Compare the gathered model with what it should be; all ranks end with status 1 when anything differs."""
    ours = {name: whole(value) for name, value in get_model_state_dict(model).items()}
    theirs = world.model.state_dict()
    lines = [*lines, *differences(ours, theirs)]
    if world.rank == 0:
        print(*lines or [f"equal {len(theirs)} tensors"], sep="\n", flush=True)
    dist.barrier()
    if lines:
        sys.exit(1)


def stored_otherwise(world: World, folder: Path) -> list[str]:
    """What dcp.load would pass over: other dtypes, which it casts, and names that nobody asks for."""
    whose = {} if (folder / ".metadata").exists() else {"rank": world.rank}
    metadata = dcp.FileSystemReader(folder).read_metadata(**whose).state_dict_metadata
    theirs = {f"model.{name}": value for name, value in world.model.state_dict().items()}
    lines = [f"{name} is unexpected" for name in metadata if name.startswith("model.") and name not in theirs]
    for name, value in theirs.items():
        stored = metadata[name].properties.dtype if name in metadata else value.dtype
        lines += [f"{name} is stored as {stored}, expected {value.dtype}"] if stored != value.dtype else []
    return lines


def load(world: World, folder: Path) -> None:
    """dcp.load of {"model": ...}."""
    model = blank(world)
    state = {"model": get_model_state_dict(model)}
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    judge(world, model, stored_otherwise(world, folder))


def load_accelerate(world: World, folder: Path) -> None:
    """accelerate's load_fsdp_model of a checkpoint-N folder."""
    model = blank(world)
    load_fsdp_model(plugin("SHARDED_STATE_DICT", 2), accelerator(world), model, str(folder))
    judge(world, model, stored_otherwise(world, folder / "pytorch_model_fsdp_0"))


def rank_main(rank: int, size: int, store: str, model: nn.Module, job: Callable[[World], None]) -> None:
    """A rank's life."""
    ranks.join(rank, size, store)
    torch.manual_seed(rank)
    job(World(model, rank, size))
    dist.barrier()
    dist.destroy_process_group()


def launch(size: int, model_dir: Path, job: Callable[[World], None]) -> int:
    """Fork the ranks, once everything is imported and the model loaded."""
    os.environ.update(CUDA_VISIBLE_DEVICES="", GLOO_SOCKET_IFNAME="lo")
    return ranks.launch(size, rank_main, load_model(model_dir), job)


def main(argv: list[str]) -> int:
    """The command line."""
    loaders = {"load": load, "load-accelerate": load_accelerate}
    if len(argv) == 2 and argv[0] == "all":
        failed = [call for call in json.loads(Path(argv[1]).read_text()) if main(call)]
        for call in failed:
            print("failed:", *call, file=sys.stderr)
        return int(bool(failed))
    if len(argv) == 4 and argv[0] in loaders:
        job = functools.partial(loaders[argv[0]], folder=Path(argv[1]))
        return launch(int(argv[3]), Path(argv[2]), job)
    if len(argv) < 4:
        print(__doc__, file=sys.stderr)
        return 2
    model_dir, out, size, *kinds = argv
    if unknown := set(kinds) - set(KINDS):
        print(f"no such kind: {', '.join(sorted(unknown))}; there are {', '.join(KINDS)}", file=sys.stderr)
        return 2
    return launch(int(size), Path(model_dir), functools.partial(make, out=Path(out), kinds=kinds))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
