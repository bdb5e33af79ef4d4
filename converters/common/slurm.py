"""Jobs for Slurm: the facts of a site, a batch script, and its submission.

A script is a header of sbatch options, a few settings as shell variables, and a body from `containers/slurm`,
unchanged. The sites' facts are in `containers/sites`; those files are parsed here, not run.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from formats.errors import RefusedError, UsageError

CONTAINERS = Path(__file__).parents[2] / "containers"
OTHER_LIMITS = frozenset({"qos", "reservation"})
"""Options with time limits of their own, such as four days for boost_qos_lprod of Leonardo, which Slurm checks."""
FACT = re.compile(r"^(SITE_(?:GPU|CPU_\d+|CORE_MB|SRUN|NET|ONLINE))=(?:'([^']*)')?", re.MULTILINE)


@dataclass(frozen=True)
class Site:
    """The facts of a cluster.

    Attributes:
        name: the name of the site's file.
        gpu: sbatch options of a job with GPUs; `time` is the limit.
        cpu: sbatch options of each partition for jobs without GPUs, the first choice first; `mem` (MB) and `time` are
            the limits.
        srun: options of a step that has whole nodes.
        network: the network between nodes, where falling back to TCP is a fault.
        core: megabytes that come with each core, where memory cannot be requested; 0 where it can.
        online: partitions whose nodes reach the internet; None for all.
    """

    name: str
    gpu: Mapping[str, str]
    cpu: Sequence[Mapping[str, str]]
    srun: Sequence[str]
    network: str
    core: int = 0
    online: frozenset[str] | None = None

    @property
    def tasks(self) -> int:
        """Tasks of a node: one for each of its GPUs."""
        return int(self.gpu["ntasks-per-node"])


@dataclass(frozen=True)
class Job:
    """A batch script.

    Attributes:
        name: the name of the job.
        header: sbatch options.
        settings: shell variables, with values quoted for the shell; see `quoted` and `array`.
        body: the file in `containers/slurm` that does the work, without its suffix.
        folder: the folder of the script and its logs.
    """

    name: str
    header: Mapping[str, str]
    settings: Mapping[str, str]
    body: str
    folder: Path

    @property
    def options(self) -> list[str]:
        """All sbatch options, as command line words."""
        output = str(self.folder).replace("%", "%%") + "/%x-%j.out"
        header = {
            "job-name": self.name,
            **self.header,
            "output": self.header.get("output", output),
            "open-mode": "append",
        }
        return [f"--{name}={value}" if value else f"--{name}" for name, value in header.items()]

    @property
    def text(self) -> str:
        """The text of the script."""
        options = [f"#SBATCH {quoted(option)}" for option in self.options]
        settings = [f"{name}={value}" for name, value in self.settings.items()]
        body = (CONTAINERS / "slurm" / f"{self.body}.sh").read_text()
        return "\n".join(["#!/bin/bash", *options, "", *settings, "", body])

    @property
    def cost(self) -> str:
        """The most nodes and hours that the job may use, in words."""
        nodes, hours = int(self.header["nodes"]), seconds_of(self.header["time"]) / 3600
        return f"{nodes} node{'s' * (nodes > 1)} for {hours:.3g} h, at the most {nodes * hours:.4g} node hours a job"


@dataclass(frozen=True)
class Wishes:
    """The user's settings for any job.

    Attributes:
        site: name of the site's file.
        sbatch: sbatch options that replace the site's.
        image: the container image that the job runs in, None for none.
    """

    site: str
    sbatch: Mapping[str, str]
    image: Path | None


def load_site(name: str) -> Site:
    """Read a site's facts.

    Raises:
        UsageError: there is no such site, or its file lacks something.
    """
    known = sorted(path.stem for path in (CONTAINERS / "sites").glob("*.sh"))
    if name not in known:
        raise UsageError(f"there is no site {name!r}", f"there are {', '.join(known)} in {CONTAINERS / 'sites'}")
    path = CONTAINERS / "sites" / f"{name}.sh"
    facts: dict[str, str] = {}
    for match in FACT.finditer(path.read_text()):
        if match[2] is None:
            raise UsageError(f"{path}: {match[1]} has to be in single quotes", "no shell reads it here")
        facts[match[1]] = match[2]
    gpu = _wanted(path, facts, "SITE_GPU", "ntasks-per-node")
    partitions = sorted(key for key in facts if key.startswith("SITE_CPU_")) or ["SITE_CPU_1"]
    cpu = [_wanted(path, facts, key, "mem") for key in partitions]
    srun, core = shlex.split(facts.get("SITE_SRUN", "")), int(facts.get("SITE_CORE_MB", 0))
    online = frozenset(facts["SITE_ONLINE"].split()) if "SITE_ONLINE" in facts else None
    return Site(name, gpu, cpu, srun, facts.get("SITE_NET", ""), core, online)


def _wanted(path: Path, facts: Mapping[str, str], key: str, name: str) -> dict[str, str]:
    """The sbatch options in a fact of a site, which have to include `name`, cpus-per-task and time.

    Raises:
        UsageError: an option is missing.
    """
    options = options_of(shlex.split(facts.get(key, "")))
    for needed in (name, "cpus-per-task", "time"):
        if not options.get(needed):
            raise UsageError(f"{path}: {key} has no --{needed}", "sites/local.sh is the pattern")
    return _counted(options, f"{path}: {key} ")


def _counted(options: dict[str, str], where: str = "") -> dict[str, str]:
    """The options, after a check that counts are numbers; ranges of nodes, as sbatch has them, are not supported.

    Raises:
        UsageError: a count is no number.
    """
    for name in ("nodes", "ntasks-per-node", "cpus-per-task"):
        if re.fullmatch("[1-9][0-9]*", options.get(name, "1")) is None:
            raise UsageError(f"{where}{name} is {options[name]!r}, not a number", f"such as --sbatch {name}=2")
    return options


def options_of(words: Iterable[str]) -> dict[str, str]:
    """Words such as `--nodes=2` or `nodes=2` as a dict; an option without a value has an empty one.

    Raises:
        UsageError: a word is no option.
    """
    options = {}
    for word in words:
        match = re.fullmatch(r"(?:--)?([a-z][a-z-]+)(?:=(.*))?", word)
        if match is None:
            raise UsageError(f"{word!r} is no option of sbatch", "such as --sbatch qos=boost_qos_dbg")
        options[match[1]] = match[2] or ""
    return options


def gpu_header(site: Site, wishes: Wishes) -> dict[str, str]:
    """The sbatch options of a job with all GPUs of its nodes.

    Raises:
        UsageError: the job asks for more time than the partition's known limit, or a user's option cannot be read.
    """
    header = _counted({**site.gpu, "nodes": "1", **wishes.sbatch})
    known = header.get("partition") == site.gpu.get("partition") and not OTHER_LIMITS & wishes.sbatch.keys()
    if known and seconds_of(header["time"]) > seconds_of(site.gpu["time"]):
        where = header.get("partition", "the default partition")
        raise UsageError(
            f"{where} of {site.name} gives {site.gpu['time']}, not {header['time']}", "a chain resumes by itself"
        )
    return header


def cpu_header(site: Site, wishes: Wishes, seconds: float, megabytes: float) -> dict[str, str]:
    """The sbatch options of a job of one node without GPUs, in the site's first partition that is large enough.

    Args:
        site: the site.
        wishes: the user's options, which replace those of the site.
        seconds: estimated duration of the job.
        megabytes: memory of the job.

    Raises:
        RefusedError: no partition is large enough.
        UsageError: a user's option cannot be read.
    """
    asked = {"ntasks-per-node": "1", "mem": str(round(megabytes)), "time": clock(seconds)}
    asked = _counted({**asked, **wishes.sbatch}) | {"nodes": "1"}
    mem, time = megabytes_of(asked["mem"]), seconds_of(asked["time"])
    if OTHER_LIMITS & asked.keys():
        time = 0  # Slurm knows the limit
    for limits in site.cpu:
        if "partition" in asked and limits.get("partition") != asked["partition"]:
            continue
        if mem <= megabytes_of(limits["mem"]) and time <= seconds_of(limits["time"]):
            return _by_cores(site, {**limits, **asked}, mem)
    if "partition" in asked and all(limits.get("partition") != asked["partition"] for limits in site.cpu):
        return _by_cores(site, {**site.cpu[0], **asked}, mem)  # a partition that only the user knows
    most = "; ".join(
        f"{partition.get('partition', 'default')} {megabytes_of(partition['mem']):.0f} MB, {partition['time']}"
        for partition in site.cpu
    )
    raise RefusedError(
        f"{mem:.0f} MB for {asked['time']} are more than a partition of {site.name} has ({most})",
        "--time and --sbatch mem=… say otherwise; what is interrupted resumes when it is submitted again",
    )


def _by_cores(site: Site, header: dict[str, str], megabytes: float) -> dict[str, str]:
    """The options, with cores in place of memory where memory comes with cores."""
    if not site.core:
        return header
    cores = max(int(header["cpus-per-task"]), -int(-megabytes // site.core))
    return {name: value for name, value in header.items() if name != "mem"} | {"cpus-per-task": str(cores)}


def megabytes_of(text: str) -> float:
    """The megabytes of a memory size as sbatch reads it: in megabytes, or with K, M, G, T.

    Raises:
        UsageError: the text is no size.
    """
    match = re.fullmatch(r"(\d+)([KMGT]?)B?", text.upper())
    if match is None:
        raise UsageError(f"--sbatch mem={text} is not a size such as 30800 or 28G")
    return int(match[1]) * 1024.0 ** ("KMGT".index(match[2] or "M") - 1)


def seconds_of(text: str) -> int:
    """The seconds of a time as sbatch reads it: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S.

    Raises:
        UsageError: the text is no time.
    """
    match = re.fullmatch(r"(?:(\d+)-(\d+)(?::(\d+))?(?::(\d+))?|(\d+)(?::(\d+))?(?::(\d+))?)", text)
    if match is None:
        raise UsageError(f"--time {text} is not a time such as 20:00:00 or 1-12")
    days, *dayed, first, second, third = (int(part or 0) for part in match.groups())
    hours, minutes, seconds = dayed if match[1] else (first, second, third) if match[7] else (0, first, second)
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def clock(seconds: float) -> str:
    """A time for sbatch, rounded up to whole minutes."""
    minutes = max(1, -int(-seconds // 60))
    return f"{minutes // 60:02}:{minutes % 60:02}:00"


def quoted(value: object) -> str:
    """A value quoted for the shell."""
    return shlex.quote(str(value))


def array(words: Iterable[object]) -> str:
    """Words quoted as a shell array."""
    return "(" + " ".join(map(quoted, words)) + ")"


def launching(site: Site, wishes: Wishes, folder: Path) -> dict[str, str]:
    """The settings that each body needs: the launcher, site and image, and the file that records jobs."""
    launch = {
        "export VITRUVIAN_SITE": quoted(site.name),
        "export VITRUVIAN_IMAGE": quoted(wishes.image.absolute() if wishes.image else ""),
        "RUN": quoted(CONTAINERS / "run"),
        "JOB_LOG": f"${{VITRUVIAN_JOB_LOG:-{quoted(folder / 'job_log.txt')}}}",
    }
    if wishes.image is None:
        launch["export PATH"] = f"{quoted(Path(sys.executable).parent)}:$PATH"
    return launch


def chain(
    command: Sequence[object],
    *,
    srun: Iterable[str] = (),
    save: Path | None = None,
    links: int = 10,
    retries: int = 0,
    bench: Path | None = None,
) -> dict[str, str]:
    """The settings of the body `chain`, a chain of jobs that resume each other.

    Args:
        command: the command that runs in each task.
        srun: options of the step.
        save: the folder of a training's checkpoints; None for a command whose exit code 75 means that it is to be
            resumed.
        links: most jobs in the chain.
        retries: most failures in a row without a new checkpoint.
        bench: batch script that is submitted for each new checkpoint.
    """
    return {
        "COMMAND": array(command),
        "SRUN": array(srun),
        "SAVE": quoted(save.absolute() if save else ""),
        "SIGNAL": "USR1" if save else "TERM",
        "LINKS": f"${{VITRUVIAN_LINKS:-{links}}}",
        "RETRIES": str(retries),
        "BENCH": f"${{VITRUVIAN_BENCH-{quoted(bench.absolute() if bench else '')}}}",
    }


def cpu_job(
    name: str, command: Sequence[object], wishes: Wishes, seconds: float, megabytes: float, **header: str
) -> Job:
    """A job that runs a resumable command as a chain of jobs without GPUs in the current folder.

    Args:
        name: the name of the job.
        command: the command.
        wishes: the user's settings.
        seconds: estimated duration of the command.
        megabytes: memory of the command.
        header: further sbatch options.

    Raises:
        RefusedError: no partition is large enough.
    """
    site, here = load_site(wishes.site), Path.cwd()
    options = cpu_header(site, wishes, seconds, megabytes)
    options |= {"chdir": str(here), "signal": f"B:USR1@{min(120, seconds_of(options['time']) // 2)}", **header}
    return Job(name, options, launching(site, wishes, here / "slurm") | chain(command), "chain", here / "slurm")


def submit(job: Job) -> str:
    """Write a job's script and submit it with sbatch.

    The options of the script are repeated on the command line, since variables such as SBATCH_ACCOUNT override those in
    a script. SLURM_ variables, which describe the job that this process may run in, are not passed on.

    Returns:
        The number of the job.

    Raises:
        UsageError: Slurm is not here, or does not accept the job.
    """
    script = job.folder / f"{job.name}.sbatch"
    job.folder.mkdir(parents=True, exist_ok=True)
    script.write_text(job.text)
    env = {key: value for key, value in os.environ.items() if key == "SLURM_CONF" or not key.startswith("SLURM_")}
    words = ["sbatch", "--parsable", *job.options, str(script)]
    try:
        ran = subprocess.run(words, env=env, capture_output=True, text=True, check=False)  # noqa: S603
    except FileNotFoundError:
        raise UsageError("there is no sbatch here", "-n prints the job") from None
    if ran.returncode:
        raise UsageError(f"sbatch does not take {script}: {' '.join(ran.stderr.split())}")
    number = ran.stdout.strip().partition(";")[0]
    with Path(os.environ.get("VITRUVIAN_JOB_LOG", job.folder / "job_log.txt")).open("a") as log:
        log.write(f"{number} {job.name}\n")
    return number


def load_settings(path: Path) -> dict[str, Any]:
    """A user's settings for all jobs: `slurm: {site: lumi, account: …, time: …}` and `container: {image: …}`.

    Raises:
        UsageError: the file is no such file.
    """
    try:
        document = yaml.safe_load(path.read_text()) or {}
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise UsageError(f"{path} is no YAML: {' '.join(str(error).split())}") from None
    known = {"slurm": ("site", "account", "partition", "nodes", "time", "sbatch"), "container": ("image",)}
    settings: dict[str, Any] = {}
    for section, values in document.items() if isinstance(document, dict) else [(str(document), None)]:
        for key, value in values.items() if isinstance(values, dict) else [("", None)]:
            if key not in known.get(section, ()):
                known_keys = "; ".join(f"{name}: {', '.join(keys)}" for name, keys in known.items())
                raise UsageError(f"{path}: {section}.{key} is no setting of a job", f"there are {known_keys}")
            if key == "time" and not isinstance(value, str):  # YAML 1.1 reads 20:00:00 as seconds, and 1:30 as 90
                raise UsageError(f"{path}: slurm.time is the number {value} to YAML", 'time: "20:00:00", in quotes')
            settings[key] = [value] if key == "sbatch" and not isinstance(value, list) else value
    return settings
