"""Ranks: who we are, the mesh that shards the model, and process groups that never share a collective.

Three kinds of traffic run at the same time: FSDP's, the few numbers of each step, and checkpoints in the background. On
gloo two of them in one group abort or hang, so each has its own.
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
        rank: of this process.
        ranks: how many there are.
        device: of this process.
        groups: what has threads: the mesh and the process groups; empty once this rank has left.
        beat: seconds after which a rank that works alone tells the others that it still does.
    """

    rank: int
    ranks: int
    device: torch.device
    groups: dict[str, Any]
    beat: float

    @property
    def mesh(self) -> DeviceMesh:
        """(replicate, shard)."""
        found: DeviceMesh = self.groups["mesh"]
        return found

    @property
    def numbers(self) -> Any:
        """Group for the numbers of each step, on CPU."""
        return self.groups["numbers"]

    @property
    def saving(self) -> Any:
        """Group for checkpoints, on CPU."""
        return self.groups["saving"]

    @property
    def first(self) -> bool:
        """Whether this is the rank that speaks."""
        return self.rank == 0

    def sums(self, *values: float) -> list[float]:
        """Sums of numbers over all ranks, float64."""
        held = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(held, group=self.numbers)
        found: list[float] = held.tolist()
        return found

    def told(self, find: Callable[[], Any]) -> Any:
        """What the first rank finds out, on all of them, however long that takes.

        Raises:
            VitruvianError, OSError: it fails, and says so; the others end with its exit code.
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
        """What each rank has found, by rank."""
        box: list[Any] = [None] * self.ranks
        dist.all_gather_object(box, value, group=self.numbers)
        return box

    @contextmanager
    def _beating(self) -> Iterator[None]:
        """Tell the others now and then that the first rank still works, so that they wait longer."""
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
        """Until all ranks are here."""
        dist.barrier(group=self.numbers)


def environment(held: Mapping[str, str]) -> dict[str, str]:
    """The variables that torch.distributed reads: of torchrun, of Slurm with a task for each GPU, or of one process.

    Raises:
        UsageError: this is the script of a job of several tasks, and none of them.
    """
    if "RANK" in held and "WORLD_SIZE" in held:
        return {}
    if int(held.get("SLURM_NTASKS", "1")) > 1 and "SLURM_PROCID" in held:
        if "SLURM_STEP_NUM_TASKS" not in held:  # a script has the number of its tasks, and a rank of 0
            raise UsageError(f"this job has {held['SLURM_NTASKS']} tasks, which nobody started", "srun train …")
        port = 20_000 + int(held.get("SLURM_JOB_ID", "0")) % 12_000  # Linux gives those from 32768 on to anyone
        return {
            "RANK": held["SLURM_PROCID"],
            "WORLD_SIZE": held["SLURM_NTASKS"],
            "LOCAL_RANK": held.get("SLURM_LOCALID", "0"),
            "MASTER_ADDR": held.get("MASTER_ADDR") or _first_host(held),
            "MASTER_PORT": held.get("MASTER_PORT") or str(port),
        }
    # port 0: whichever is free
    return {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def _first_host(held: Mapping[str, str]) -> str:
    """The node of rank 0, of a list such as `n[01-04,07],m1`: an image has no scontrol that would read it."""
    nodes = held.get("SLURM_STEP_NODELIST") or held.get("SLURM_JOB_NODELIST", "")
    first = re.sub(r"\[(\w+)[^]]*\]", r"\1", nodes).partition(",")[0]
    if not first:
        raise UsageError("Slurm does not say which nodes there are", "set MASTER_ADDR to the first one")
    return first


@contextmanager
def _on_stderr() -> Iterator[None]:
    """Send to stderr what libraries write: gloo of torch 2.10 tells on stdout, where results are, who is connected."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


@contextmanager
def world(replicas: int, minutes: float) -> Iterator[World]:
    """Join the other ranks.

    Args:
        replicas: copies of the sharded model (HSDP); 1 shards it over all ranks.
        minutes: how long a rank waits for the others.

    Raises:
        UsageError: the ranks cannot be divided so, or some do not come.
    """
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # each of three gloo groups has a socket to every rank
    # torch 2.10 says so of its own writer of checkpoints
    warnings.filterwarnings("ignore", "TypedStorage is deprecated", UserWarning, "torch.distributed")
    os.environ.update(environment(os.environ))
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if ranks % replicas:
        raise UsageError(f"{ranks} ranks cannot be {replicas} replicas of equal shards")
    cuda = torch.cuda.is_available()
    device = torch.device("cpu")
    if cuda:  # Slurm may show each task its own GPU only, which is number 0 then
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    timeout = timedelta(minutes=minutes)
    try:
        with _on_stderr():
            dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timeout)
    except dist.DistStoreError as error:
        told = " ".join(str(error).split())[:200]
        raise UsageError(f"rank {rank} of {ranks} waited in vain for the others: {told}", "did all start?") from error
    groups = dict[str, Any]()
    try:
        with _on_stderr():
            shape = replicas, ranks // replicas
            groups["mesh"] = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
            groups |= {name: dist.new_group(backend="gloo", timeout=timeout) for name in ("numbers", "saving")}
        yield World(rank, ranks, device, groups, timeout.total_seconds() / 4)
    finally:
        # The threads of a gloo group are joined when nothing refers to it, and an error's traceback refers to the
        # world. One that drops its last tensor while Python ends calls std::terminate (torch 2.13
        # ProcessGroupGloo.cpp `runLoop`).
        groups.clear()
        dist.destroy_process_group()
