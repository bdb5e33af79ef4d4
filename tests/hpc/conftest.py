"""A real Slurm on this machine: slurmctld, and a slurmd for each of two nodes that are as large as those of the sites.

The nodes are in a network namespace of their own, from which nothing but this machine is reached, as compute nodes
have no internet; their partitions have the limits of the sites, and job_submit.lua refuses what BSC refuses.

Facts: slurm.conf(5) of Slurm 22.05. Several slurmd on a host need a port, a spool and a pid file each (%n), and
`config_overrides` lets a node have more cores than there are. Where cgroups of version 1 can be made they track the
processes, as at the sites: of a step only what slurmstepd itself has started is signalled. Elsewhere all of it is. No
accounting, no binding: `--cpu-bind` and QOS are accepted and ignored. The daemons run as root. What a test starts ends
with the session.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.hpc.images import place, sif  # noqa: F401  # fixtures
from tests.train.conftest import data, environment, forks, run, settings  # noqa: F401  # fixtures

NODES, GPUS = 2, 8
MARK = "# slurm of the tests"
PARTITIONS = (
    "debug MaxTime=1-00:00:00 Default=YES",
    "standard-g MaxTime=2-00:00:00", "small MaxTime=3-00:00:00", "dev-g MaxTime=03:00:00",
    "boost_usr_prod MaxTime=1-00:00:00", "dcgp_usr_prod MaxTime=1-00:00:00",
    "lrd_all_serial MaxTime=04:00:00 MaxNodes=1 MaxMemPerNode=30800",
    "booster MaxTime=1-00:00:00", "batch MaxTime=1-00:00:00 MaxMemPerNode=96000", "mem192 MaxTime=1-00:00:00",
    "normal MaxTime=12:00:00", "gpp MaxTime=3-00:00:00", "rome MaxTime=5-00:00:00 MaxMemPerNode=229376",
    "genoa MaxTime=5-00:00:00", "gpu_a100 MaxTime=5-00:00:00",
)  # fmt: skip
CONFIG = """
ClusterName=lab
SlurmctldHost={host}({here})
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CryptoType=crypto/munge
StateSaveLocation={lab}/state
SlurmdSpoolDir={lab}/state/%n
SlurmctldPidFile={lab}/slurmctld.pid
SlurmdPidFile={lab}/%n.pid
SlurmctldLogFile={lab}/slurmctld.log
SlurmdLogFile={lab}/%n.log
ProctrackType=proctrack/{tracking}
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0
SwitchType=switch/none
MpiDefault=none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
SlurmdTimeout=10
KillWait=20
MessageTimeout=10
PropagateResourceLimits=NONE
UnkillableStepTimeout=20
EnforcePartLimits=ALL
RequeueExit=75
GresTypes=gpu
JobSubmitPlugins=lua
"""
SUBMIT = """
-- What a site refuses: an account that nobody has, and, where memory comes with cores (MareNostrum 5), --mem.
function slurm_job_submit(job, parts, uid)
  if job.account == "nobody" then
    slurm.log_user("Invalid account or account/partition combination specified")
    return slurm.ERROR
  end
  if job.qos == "gp_ehpc" then
    if job.pn_min_memory ~= nil and job.pn_min_memory ~= slurm.NO_VAL64 then
      slurm.log_user("--mem is not allowed")
      return slurm.ERROR
    end
    job.partition = "gpp"
  end
  return slurm.SUCCESS
end
function slurm_job_modify(job, record, parts, uid) return slurm.SUCCESS end
"""
NETWORK, HERE, THERE = "vitruvian-nodes", "169.254.213.1", "169.254.213.2"
"""The namespace of the nodes, and the two ends of the only cable."""


@dataclass(frozen=True)
class Lab:
    """A running Slurm.

    Attributes:
        folder: its state.
        env: variables of everything that speaks to it.
        inside: words before a command that runs where the nodes are.
    """

    folder: Path
    env: dict[str, str]
    inside: tuple[str, ...]

    def call(self, *argv: object, code: int | None = 0) -> str:
        """Run a program that speaks to Slurm; its output."""
        ran = subprocess.run(
            [str(word) for word in argv], env=self.env, capture_output=True, text=True, timeout=120, check=False
        )
        assert code is None or ran.returncode == code, ran.stdout + ran.stderr
        return ran.stdout + ran.stderr

    def facts(self, job: str) -> dict[str, str]:
        """What `scontrol show job` says."""
        pairs = (word.partition("=") for word in self.call("scontrol", "show", "job", job).split())
        return {name: value for name, _, value in pairs}

    def wait(self, job: str, *states: str, seconds: float = 120) -> dict[str, str]:
        """Until a job is in one of some states, or at its end."""
        until = time.monotonic() + seconds
        awaited = states or ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL", "OUT_OF_MEMORY")
        while (facts := self.facts(job))["JobState"] not in awaited:
            assert time.monotonic() < until, (facts, self.log())
            time.sleep(0.5)
        return facts

    def idle(self, seconds: float = 180) -> None:
        """Until no job is left, whatever it may wait for."""
        until = time.monotonic() + seconds
        while left := self.call("squeue", "--noheader", "--format=%i %j %T %r").strip():
            assert time.monotonic() < until, (left, self.log())
            time.sleep(0.5)

    def log(self) -> str:
        """The controller's last lines."""
        return (self.folder / "slurmctld.log").read_text()[-3000:]

    def node(self, name: str) -> None:
        """Start a node."""
        self.call(*self.inside, "slurmd", "-N", name, "-f", self.folder / "slurm.conf", code=None)

    def ready(self) -> bool:
        """Wait until all nodes are idle; whether they are."""
        for _ in range(300):
            if self.call("sinfo", "-h", "-p", "debug", "-t", "idle", "-o", "%D", code=None).strip() == str(NODES):
                return True
            time.sleep(0.1)
        return False

    def fail(self, name: str) -> None:
        """Kill a node."""
        os.kill(int((self.folder / f"{name}.pid").read_text()), signal.SIGKILL)


def cable() -> Iterator[None]:
    """A network namespace that reaches this machine alone."""
    commands = (
        f"netns add {NETWORK}", f"link add vitruvian0 type veth peer name vitruvian1 netns {NETWORK}",
        f"addr add {HERE}/30 dev vitruvian0", "link set vitruvian0 up",
        f"-n {NETWORK} addr add {THERE}/30 dev vitruvian1", f"-n {NETWORK} link set vitruvian1 up",
        f"-n {NETWORK} link set lo up",
    )  # fmt: skip
    _uncable()  # what a killed run left
    try:
        for command in commands:
            ran = subprocess.run(["ip", *command.split()], capture_output=True, text=True, timeout=20, check=False)
            if ran.returncode:
                pytest.skip(f"no network of nodes can be made here: {ran.stderr.strip()}")
        yield
    finally:
        _uncable()


def _uncable() -> None:
    """Delete the namespace, and the cable of one that a process keeps."""
    for command in (f"netns del {NETWORK}", "link del vitruvian0"):
        subprocess.run(["ip", *command.split()], capture_output=True, timeout=20, check=False)


def free_ports(count: int) -> list[int]:
    """Ports that nobody has."""
    sockets = [socket.socket() for _ in range(count)]
    for sock in sockets:
        sock.bind(("127.0.0.1", 0))
    numbers = [sock.getsockname()[1] for sock in sockets]
    for sock in sockets:
        sock.close()
    return numbers


def munge() -> subprocess.Popen[bytes] | None:
    """The service that Slurm's programs know each other by; None if it runs already."""
    if subprocess.run(["munge", "-n"], capture_output=True, timeout=10, check=False).returncode == 0:
        return None
    key = Path("/etc/munge/munge.key")
    if not key.is_file():
        key.write_bytes(os.urandom(1024))
    for folder in ("/run/munge", "/var/log/munge", "/var/lib/munge"):
        Path(folder).mkdir(exist_ok=True)
    for owned_path in ("/run/munge", "/var/log/munge", "/var/lib/munge", "/etc/munge", key):
        shutil.chown(owned_path, "munge", "munge")
    Path("/run/munge").chmod(0o755)
    key.chmod(0o400)
    started = subprocess.Popen(
        ["munged", "--foreground", "--force"], user="munge", group="munge", stderr=subprocess.DEVNULL
    )
    for _ in range(50):
        if Path("/run/munge/munge.socket.2").exists():
            break
        time.sleep(0.1)
    return started


@pytest.fixture(scope="session")
def network() -> Iterator[None]:
    """The network of the nodes."""
    missing = [name for name in ("slurmctld", "slurmd", "munged", "ip") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"no {', '.join(missing)} here: apt-get install --no-install-recommends slurm-wlm munge iproute2")
    if os.geteuid():
        pytest.skip("slurmctld and slurmd want root")
    yield from cable()


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory, network: None) -> Iterator[Lab]:
    """Two nodes, with the sites' partitions."""
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "state").mkdir()
    names = [f"n{number}" for number in range(1, NODES + 1)]
    port, *ports = free_ports(1 + NODES)
    host = socket.gethostname().partition(".")[0]
    cgroups = Path("/sys/fs/cgroup")
    tracking = "cgroup" if os.access(cgroups / "freezer", os.W_OK) else "linuxproc"
    (folder / "cgroup.conf").write_text(f"CgroupPlugin=cgroup/v1\nCgroupMountpoint={cgroups}\n")
    lines = [CONFIG.format(host=host, port=port, lab=folder, tracking=tracking, here=HERE)]
    shape = f"CPUs=64 SocketsPerBoard=1 CoresPerSocket=64 ThreadsPerCore=1 RealMemory=514000 Gres=gpu:mi250:{GPUS}"
    for name, node_port in zip(names, ports, strict=True):
        lines.append(f"NodeName={name} NodeHostname={host} NodeAddr={THERE} Port={node_port} {shape}")
    lines += [f"PartitionName={partition} Nodes=ALL State=UP" for partition in PARTITIONS]
    (folder / "slurm.conf").write_text("\n".join(lines) + "\n")
    gres = [f"NodeName={name} Name=gpu Type=mi250 File={folder}/gpu[0-{GPUS - 1}]\n" for name in names]
    (folder / "gres.conf").write_text("".join(gres))
    (folder / "job_submit.lua").write_text(SUBMIT)
    try:
        for number in range(GPUS):  # a device node is wanted, this one is like /dev/null
            os.mknod(folder / f"gpu{number}", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("no device nodes can be made here, which GPUs of Slurm are")
    hosts, service = Path("/etc/hosts"), munge()
    before = hosts.read_text()
    if not os.access(hosts, os.W_OK):
        pytest.skip(f"{hosts} cannot be written, where the nodes' names belong")
    hosts.write_text(f"{before.rstrip()}\n{THERE} {' '.join(names)} {MARK}\n")  # the first one is MASTER_ADDR
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    inside = ("nsenter", f"--net=/run/netns/{NETWORK}")
    slurm = Lab(folder, environment() | {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": path}, inside)
    try:
        slurm.call("slurmctld", "-c", "-f", folder / "slurm.conf", code=None)
        for name in names:
            slurm.node(name)
        if not slurm.ready():  # a container without the rights for it, say: nothing of ours has run yet
            log_end = (
                (folder / "slurmctld.log").read_text()[-500:] if (folder / "slurmctld.log").is_file() else "no log"
            )
            pytest.skip(f"this machine cannot run Slurm's daemons: {log_end}")
        yield slurm
    finally:
        slurm.call("scancel", "--user=root", code=None)
        for name in (*names, "slurmctld"):
            with suppress(FileNotFoundError, ProcessLookupError):
                os.kill(int((folder / f"{name}.pid").read_text()), signal.SIGTERM)
        if service is not None:
            service.terminate()
            service.wait(timeout=10)
        hosts.write_text("".join(line for line in hosts.read_text().splitlines(True) if MARK not in line))


@pytest.fixture
def queue(lab: Lab) -> Iterator[Lab]:
    """Slurm with nothing in it, before and after."""
    yield lab
    lab.call("scancel", "--user=root")
    lab.idle(60)


@pytest.fixture
def submitted(queue: Lab, tmp_path: Path, train: Callable[..., object], convert: Callable[..., object],
              monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:  # fmt: skip
    """`submitted("train", word, …)`: `train submit …` in an empty folder, and the job's number."""
    monkeypatch.chdir(tmp_path)
    for name, value in queue.env.items():
        monkeypatch.setenv(name, value)

    def submit(program: str, *argv: object) -> str:
        ran = (train if program == "train" else convert)("submit", *argv)
        assert ran.code == 0, ran.err  # type: ignore[attr-defined]
        return str(ran.out.split()[-1])  # type: ignore[attr-defined]

    return submit
