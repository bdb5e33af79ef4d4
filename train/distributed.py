"""Ranks: this rank's number, the device mesh that shards the model, and one process group for each kind of traffic.

Several kinds of collectives run at the same time: FSDP's, the counters of each step, checkpoints in the background, and
keys and values where ranks share rows. Two of them in one gloo group abort or hang, so each has its own group.
"""

from __future__ import annotations

import os
import re
import resource
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from threading import Event
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from formats.errors import OutputError, UsageError, VitruvianError


@dataclass(frozen=True)
class World:
    """The ranks of a training.

    Attributes:
        rank: number of this process.
        ranks: number of ranks.
        device: device of this process.
        groups: the meshes and the process groups (which own threads), by name; empty once this rank has left.
        beat: seconds between the heartbeats of rank 0 while the other ranks wait for it.
        context: number of consecutive ranks that share the rows of a micro-batch.
        tensor: number of consecutive ranks that each compute a part of every layer, on the same rows.
    """

    rank: int
    ranks: int
    device: torch.device
    groups: dict[str, Any]
    beat: float
    context: int = 1
    tensor: int = 1

    @property
    def mesh(self) -> DeviceMesh:
        """The device mesh, (replicate, shard), or (replicate, shard, tensor) with tensor parallelism."""
        mesh: DeviceMesh = self.groups["mesh"]
        return mesh

    @property
    def every(self) -> DeviceMesh:
        """The device mesh of all ranks in one dimension; exists only with tensor parallelism."""
        mesh: DeviceMesh = self.groups["every"]
        return mesh

    @property
    def numbers(self) -> Any:
        """Process group for the counters of each step, on CPU."""
        return self.groups["numbers"]

    @property
    def saving(self) -> Any:
        """Process group for checkpoints, on CPU."""
        return self.groups["saving"]

    @property
    def sharing(self) -> Any:
        """Process group of the ranks that share rows with this one; None without context parallelism."""
        return self.groups.get("context")

    @property
    def reader(self) -> int:
        """The number of this rank's group of ranks that compute the same rows."""
        return self.rank // (self.context * self.tensor)

    @property
    def readers(self) -> int:
        """The number of groups of ranks that compute the same rows: each group takes other rows."""
        return self.ranks // (self.context * self.tensor)

    @property
    def part(self) -> int:
        """The number of the part of the rows that this rank computes."""
        return self.rank % self.context

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which prints and writes logs."""
        return self.rank == 0

    def sums(self, *values: float) -> list[float]:
        """Sums of numbers over all ranks, in float64."""
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, group=self.numbers)
        totals: list[float] = tensor.tolist()
        return totals

    def from_first(self, find: Callable[[], Any]) -> Any:
        """Call `find` on rank 0 and broadcast its result to all ranks; heartbeats prevent timeouts meanwhile.

        Raises:
            VitruvianError, OSError: `find` raised it on rank 0; the other ranks exit with its exit code.
        """
        box: list[Any] = [None, None, self.first]
        failure: VitruvianError | OSError | None = None
        if self.first:
            with self._beating():
                try:
                    box[0] = find()
                except (VitruvianError, OSError) as error:
                    failure, box[1] = error, getattr(error, "exit_code", OutputError.exit_code)
        dist.broadcast_object_list(box, 0, group=self.numbers)
        while not box[2]:
            dist.broadcast_object_list(box, 0, group=self.numbers)
        if box[1] is not None:
            raise failure or SystemExit(box[1])
        return box[0]

    def gathered(self, value: Any) -> list[Any]:
        """The value of each rank, in the order of ranks."""
        box: list[Any] = [None] * self.ranks
        dist.all_gather_object(box, value, group=self.numbers)
        return box

    @contextmanager
    def _beating(self) -> Iterator[None]:
        """Send heartbeats while rank 0 works, so that the other ranks keep waiting."""
        done = Event()

        def beat() -> None:
            while not done.wait(self.beat):
                dist.broadcast_object_list([None, None, False], 0, group=self.numbers)

        with ThreadPoolExecutor(1) as threads:
            beating = threads.submit(beat)
            try:
                yield
            finally:
                done.set()
            beating.result()

    def wait(self) -> None:
        """Barrier: wait until all ranks are here."""
        dist.barrier(group=self.numbers)


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables for torch.distributed to set: none under torchrun, else of Slurm (one task per GPU) or one process.

    Raises:
        UsageError: this process is the batch script of a job with several tasks, not one of the tasks.
    """
    if "RANK" in variables and "WORLD_SIZE" in variables:
        return {}
    if int(variables.get("SLURM_NTASKS", "1")) > 1 and "SLURM_PROCID" in variables:
        if "SLURM_STEP_NUM_TASKS" not in variables:  # the batch script has SLURM_NTASKS too, and SLURM_PROCID 0
            raise UsageError(f"this job has {variables['SLURM_NTASKS']} tasks, but srun started none", "srun train …")
        port = 20_000 + int(variables.get("SLURM_JOB_ID", "0")) % 12_000  # ephemeral ports of Linux begin at 32768
        return {
            "RANK": variables["SLURM_PROCID"],
            "WORLD_SIZE": variables["SLURM_NTASKS"],
            "LOCAL_RANK": variables.get("SLURM_LOCALID", "0"),
            "MASTER_ADDR": variables.get("MASTER_ADDR") or _first_host(variables),
            "MASTER_PORT": variables.get("MASTER_PORT") or str(port),
        }
    # port 0: any free one
    return {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def _first_host(variables: Mapping[str, str]) -> str:
    """The node of rank 0, from a list such as `n[01-04,07],m1`; containers have no scontrol to expand it."""
    nodes = variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST", "")
    first = re.sub(r"\[(\w+)[^]]*\]", r"\1", nodes).partition(",")[0]
    if not first:
        raise UsageError("Slurm does not say which nodes there are", "set MASTER_ADDR to the first one")
    return first


@contextmanager
def _on_stderr() -> Iterator[None]:
    """Redirect stdout to stderr: gloo of torch 2.10 logs connections to stdout, where results go."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


@contextmanager
def world(replicas: int, minutes: float, context: int = 1, tensor: int = 1) -> Iterator[World]:
    """Join the other ranks, and leave them at the end.

    Args:
        replicas: number of copies of the sharded model (HSDP); 1 shards the model over all ranks.
        minutes: collective timeout in minutes: how long a rank waits for other ranks.
        context: number of consecutive ranks that share rows.
        tensor: number of consecutive ranks that each compute a part of every layer.

    Raises:
        UsageError: the number of ranks is not a multiple of `replicas`, `context` or `tensor`, or some ranks did not
            start in time.
    """
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # each of three gloo groups has a socket to every rank
    # torch 2.10 warns about its own checkpoint writer
    warnings.filterwarnings("ignore", "TypedStorage is deprecated", UserWarning, "torch.distributed")
    os.environ.update(environment(os.environ))
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if ranks % replicas:
        raise UsageError(f"{ranks} ranks cannot be {replicas} replicas of equal shards")
    if ranks % context:
        raise UsageError(f"{ranks} ranks cannot be groups of {context} that share rows", "--parallel.context 1")
    if ranks // replicas % tensor:
        raise UsageError(f"{ranks} ranks cannot be groups of {tensor} that share layers", "--parallel.tensor 1")
    cuda = torch.cuda.is_available()
    device = torch.device("cpu")
    if cuda:  # Slurm may show each task only its own GPU, which is then device 0
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    timeout = timedelta(minutes=minutes)
    try:
        with _on_stderr():
            dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timeout)
    except dist.DistStoreError as error:
        why = " ".join(str(error).split())[:200]
        raise UsageError(f"rank {rank} of {ranks} waited in vain for the others: {why}", "did all start?") from error
    groups = dict[str, Any]()
    try:
        with _on_stderr():
            shape, names = (replicas, ranks // replicas // tensor, tensor), ("replicate", "shard", "tensor")
            dimensions = 3 if tensor > 1 else 2
            groups["mesh"] = init_device_mesh(device.type, shape[:dimensions], mesh_dim_names=names[:dimensions])
            if tensor > 1:
                groups["every"] = init_device_mesh(device.type, (ranks,), mesh_dim_names=("every",))
            groups |= {name: dist.new_group(backend="gloo", timeout=timeout) for name in ("numbers", "saving")}
            if context > 1:  # gathers keys and values while FSDP gathers weights
                subgroups: Any = dist.new_subgroups
                groups["context"] = subgroups(context, timeout=timeout)[0]
        yield World(rank, ranks, device, groups, timeout.total_seconds() / 4, context, tensor)
    finally:
        # The threads of a gloo group are joined when the last reference to it goes, and an error's traceback holds a
        # reference to the world. A thread that frees its last tensor while Python shuts down calls std::terminate
        # (torch 2.13 ProcessGroupGloo.cpp `runLoop`).
        groups.clear()
        dist.destroy_process_group()
