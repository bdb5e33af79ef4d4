"""Makes Slurm jobs of trainings, evaluations, data commands and preflights; see `converters/common/slurm.py`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from converters.common.slurm import (
    Job,
    Site,
    Wishes,
    array,
    chain,
    cpu_job,
    gpu_header,
    launching,
    load_site,
    quoted,
    seconds_of,
)
from formats.errors import UsageError
from train.settings.batching import sizes_of
from train.settings.config_file import load_config

RETRIES = 2
"""Number of failures in a row without a new checkpoint after which a chain ends."""
DATA_SECONDS, DATA_MB = 4 * 3600, 28_000
"""Default time in seconds and memory in MB of a data command: the limits of Leonardo's serial partition, enough for a
long preparation."""
EACH = 240
"""Seconds for each node, for all nodes together, and twice for neighbours: less than the 20 minutes of a preflight."""
RENDEZVOUS = (
    "OMP_NUM_THREADS={cpus} exec python -m torch.distributed.run "
    "--nnodes=$SLURM_NNODES --node_rank=$SLURM_NODEID --nproc_per_node={tasks} "
    '--master_addr=$MASTER_ADDR --master_port=$MASTER_PORT -m "$@"'
)


def training(
    config: Path,
    overrides: Sequence[str],
    wishes: Wishes,
    links: int,
    bench: Path | None,
    launcher: str,
    save_seconds: int,
) -> Job:
    """The chain of jobs of a training run, which ends when the training is done.

    Args:
        config: file with the settings of the run.
        overrides: dotted options, as for `load_config`.
        wishes: options of the job.
        links: maximum number of jobs.
        bench: batch script that is submitted for the last checkpoint of each job.
        launcher: srun or torchrun.
        save_seconds: number of seconds before the end of a job at which the training gets the signal to save.

    Raises:
        UsageError: the settings contradict each other, or do not fit the job.
    """
    settings, _ = load_config(config, overrides)
    site = load_site(wishes.site)
    header, srun, argv = _with_gpus(site, wishes, launcher, ["run", config.absolute(), *overrides])
    if seconds_of(header["time"]) < save_seconds + 60:
        raise UsageError(f"--time {header['time']} leaves nothing before the last {save_seconds} s", "--save-seconds")
    if bench is not None and not bench.is_file():
        raise UsageError(f"--bench {bench} is not there")
    header |= {"requeue": "", "signal": f"B:USR1@{save_seconds}"}
    folder = config.absolute().parent / "slurm"
    variables = chain(argv, srun=srun, save=settings.save.path, links=links, retries=RETRIES, bench=bench)
    return Job(config.absolute().parent.name, header, launching(site, wishes, folder) | variables, "chain", folder)


def require_batch(config: Path, overrides: Sequence[str], wishes: Wishes) -> None:
    """Check that the ranks of a training job have rows for each step.

    Raises:
        UsageError: the batch is too small for the ranks, or cannot be divided among them.
    """
    settings, _ = load_config(config, overrides)
    site = load_site(wishes.site)
    sizes_of(settings, int(gpu_header(site, wishes)["nodes"]) * _tasks(site, wishes))


def evaluation(argv: Sequence[str], wishes: Wishes, launcher: str) -> Job:
    """The job that runs `train eval …` on all GPUs of its nodes."""
    site = load_site(wishes.site)
    header, srun, command = _with_gpus(site, wishes, launcher, argv)
    folder = Path.cwd() / "slurm"
    return Job("eval", header, launching(site, wishes, folder) | chain(command, srun=srun, links=1), "chain", folder)


def data(argv: Sequence[str], wishes: Wishes) -> Job:
    """The job of a data command: it has no GPUs, and resumes in another job when its time is up."""
    return cpu_job(argv[0], ["train", *argv], wishes, DATA_SECONDS, DATA_MB)


def preflight(wishes: Wishes) -> Job:
    """The job that runs `train doctor` on each node, and on all of them together."""
    site = load_site(wishes.site)
    header = gpu_header(site, Wishes(wishes.site, {"time": "00:20:00", **wishes.sbatch}, wishes.image))
    header["no-requeue"] = ""  # the preflight looks for failing nodes
    folder = Path.cwd() / "slurm"
    settings = launching(site, wishes, folder) | {
        "LOGS": quoted(folder / "preflight") + "-$SLURM_JOB_ID",
        "TASKS": str(_tasks(site, wishes)),
        "NETWORK": quoted(site.network),
        "SRUN": array(_srun(site, header)),
        "SECONDS_EACH": str(EACH),
    }
    return Job("preflight", header, settings, "preflight", folder)


def _tasks(site: Site, wishes: Wishes) -> int:
    """Number of ranks of a node."""
    return int(wishes.sbatch.get("ntasks-per-node", site.tasks))


def _srun(site: Site, header: dict[str, str]) -> list[str]:
    """Srun options of a step with a task for each GPU; the site's CPU masks fit only whole nodes."""
    return list(site.srun) if int(header["ntasks-per-node"]) == site.tasks else []


def _with_gpus(
    site: Site, wishes: Wishes, launcher: str, argv: Iterable[object]
) -> tuple[dict[str, str], list[str], list[object]]:
    """Header, srun options, and command of `train …` on all GPUs.

    With torchrun there is one task per node. The shell of each task fills in the node number, so the command is wrapped
    in `sh -c`.
    """
    header = gpu_header(site, wishes) | {"chdir": str(Path.cwd())}
    if launcher == "srun":
        return header, _srun(site, header), ["train", *argv]
    tasks, cpus = int(header["ntasks-per-node"]), int(header["cpus-per-task"])
    header |= {"ntasks-per-node": "1", "cpus-per-task": str(tasks * cpus)}
    command = ["sh", "-c", RENDEZVOUS.format(tasks=tasks, cpus=cpus), "sh", "train", *argv]
    return header, [], command
