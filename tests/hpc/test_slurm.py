"""Jobs of `train submit` and `convert submit` on a real Slurm with the headers of the sites.

What is told of signals, time limits and failed nodes is tried with a command that sleeps: it stands for a training
where the body of the job is what is tested, and costs nothing.
"""

from __future__ import annotations

import fcntl
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.hpc.conftest import Lab
from tests.models import files
from tests.train.conftest import ROOT, Trained
from tests.train.test_run import require_same

pytestmark = [pytest.mark.hpc, pytest.mark.distributed, pytest.mark.timeout(400)]
TRAINER = f"""#!{sys.executable} -IS
# Rank 0 saves what it has when it is told to, as a training does.
import os, signal, sys, time
from pathlib import Path

def tell(number, _):
    signal.signal(number, signal.SIG_IGN)  # where Slurm signals all processes it comes twice
    save.joinpath("latest").open("a").write("told ")
    save.joinpath("RESUME").touch()
    sys.exit(75)

save, rank = Path("save"), int(os.environ["SLURM_PROCID"])
save.mkdir(exist_ok=True)
what, *code = sys.argv[1:]
if what == "exit":
    time.sleep(2 * rank)
    sys.exit(int(code[0]))
if what == "until-told" and save.joinpath("RESUME").exists():
    save.joinpath("RESUME").unlink()
    sys.exit()
if what == "until-requeued" and os.environ.get("SLURM_RESTART_COUNT", "0") != "0":
    sys.exit()
if what == "late":
    if save.joinpath("RESUME").exists():
        sys.exit()
    save.joinpath("RESUME").touch()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
elif rank == 0:
    signal.signal(signal.SIGUSR1, tell)
    signal.signal(signal.SIGTERM, tell)
    save.joinpath("running").touch()
time.sleep(100)
"""


@pytest.fixture
def job(submitted, settings, queue, tmp_path):
    """`job(words, options)`: the chain of a training whose command is TRAINER, submitted; its number."""
    (tmp_path / "trainer").write_text(TRAINER)
    (tmp_path / "trainer").chmod(0o755)

    def submit(*argv: str, edit: tuple[str, str] = ("", ""), options: tuple[str, ...] = ()) -> str:
        sbatch = subprocess.run(
            ["train", "submit", str(settings()), "-n", *options],
            env=queue.env, capture_output=True, text=True, timeout=60, check=True,
        ).stdout  # fmt: skip
        text = re.sub(r"^COMMAND=.*$", f"COMMAND=({tmp_path}/trainer {' '.join(argv)})", sbatch, flags=re.MULTILINE)
        script = tmp_path / "job.sbatch"
        script.write_text(text.replace(*edit))
        return queue.call("sbatch", "--parsable", script).strip()

    return submit


def until(path: Path, seconds: float = 60) -> None:
    for _ in range(int(seconds * 5)):
        if path.exists():
            return
        time.sleep(0.2)
    raise AssertionError(f"{path} did not come")


def logs(folder: Path) -> str:
    return "\n".join(path.read_text() for path in sorted((folder / "slurm").glob("*.out")))


def test_two_nodes_train_like_one_process_in_a_chain_with_evaluations(submitted, settings, run, queue, data, tmp_path):
    config = settings(data={"validation": {"one": str(data)}}, evaluate={"every": 1000})
    reference = run(config, save="whole")
    bench = tmp_path / "pp.sh"
    bench.write_text(
        f"#!/bin/bash\n#SBATCH --output=/dev/null\necho $1 ${{SLURM_CPUS_PER_TASK-}} >> {tmp_path}/tested\n"
    )
    options = ["--site", "lumi", "--nodes", "2", "--sbatch", "ntasks-per-node=2", "--time", "1:00:00", "--bench", bench]
    first = submitted("train", config, "--steps.exit_interval", "4", *options)
    facts = queue.wait(first)
    assert facts["JobState"] == "COMPLETED", logs(tmp_path)
    assert (facts["NumNodes"], facts["Partition"], facts["Requeue"]) == ("2", "standard-g", "1")
    queue.idle()
    save = tmp_path / "save"
    require_same(Trained(0, "", save), reference)
    assert not (save / "RESUME").exists()
    assert sorted((tmp_path / "tested").read_text().split()) == [f"{save}/global_step104", f"{save}/global_step108"]
    log = (tmp_path / "slurm/job_log.txt").read_text().splitlines()
    assert [line.split(" ", 1)[1].partition(",")[0] for line in log] == [
        tmp_path.name,
        "link 2",
        "evaluation",
        "evaluation",
    ]
    # the users' call, for a job too many: it ends at once, makes nothing, and nothing follows it
    script = tmp_path / f"slurm/{tmp_path.name}.sbatch"
    stdout = queue.call("bash", ROOT / "containers/schedule.sh", script, 3, "no.sh")
    assert "there is no no.sh" in stdout
    last = stdout.partition("Submitted batch job ")[2].split()[0]
    assert (tmp_path / "job_log.txt").read_text() == f"{last} link 1\n"
    assert queue.wait(last)["JobState"] == "COMPLETED"
    assert "nothing left to do" in logs(tmp_path)
    queue.idle()
    assert len((tmp_path / "tested").read_text().splitlines()) == 2
    # checkpoints that have no results yet
    assert [path.name for path in (save / "perplexity").iterdir()] == ["108.csv"]
    evaluated = submitted("train", "--site", "leonardo", "--sbatch", "ntasks-per-node=1", "eval", config, "--all")
    assert queue.wait(evaluated)["JobState"] == "COMPLETED", logs(tmp_path)
    assert (save / "perplexity/104.csv").is_file()


@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_told_to_save_a_training_saves(submitted, settings, queue, tmp_path, launcher):
    """torchrun knows no USR1: it has to live until its workers have saved."""
    config = settings(steps={"train_iters": 100_000}, save={"every": 100_000})
    options = ["--nodes", "2", "--launcher", launcher, "--jobs", "1", "--time", "1:00:00"]
    job = submitted("train", config, *options)
    until(tmp_path / "save/log.jsonl", 100)
    queue.call("scancel", "--batch", "--signal=USR1", job)
    queue.wait(job)
    done = len((tmp_path / "save/log.jsonl").read_text().splitlines())
    assert (tmp_path / "save/latest").read_text() == f"global_step{100 + done}"
    log = logs(tmp_path)
    assert "told to save, USR1 to the step" in log
    assert f"stopped after step {done} of 100000" in log
    assert "that was the last of 1 links" in log
    assert (tmp_path / "save/RESUME").exists()


def test_a_chain_goes_on_behind_a_time_limit(job, queue, tmp_path):
    job_id = job("until-told", edit=("--time=1-00:00:00", "--time=00:01:00"), options=("--save-seconds", "40"))
    assert queue.wait(job_id)["JobState"] == "COMPLETED"
    queue.idle()
    log = logs(tmp_path)
    assert log.count("told to save, USR1") == 1, log
    assert "link 2: done" in log
    assert (tmp_path / "save/latest").read_text() == "told "


def test_a_chain_goes_on_though_a_save_was_late(job, queue, tmp_path):
    job_id = job("late", edit=("--time=1-00:00:00", "--time=00:01:00"), options=("--save-seconds", "40"))
    assert queue.wait(job_id)["JobState"] == "TIMEOUT"
    queue.idle()
    log = logs(tmp_path)
    assert "told to save, USR1" in log
    assert "the time was up before all was saved" in log
    assert "link 2: done" in log


def test_a_conversion_whose_time_is_up_is_followed_by_another_job(job, queue, tmp_path):
    edit = (f"SAVE={tmp_path}/save\nSIGNAL=USR1\n", "SAVE=''\nSIGNAL=TERM\n")
    job_id = job("until-told", edit=edit)
    until(tmp_path / "save/running")
    queue.call("scancel", "--batch", "--signal=USR1", job_id)
    assert queue.wait(job_id)["JobState"] == "COMPLETED"
    queue.idle()
    assert "told to save, TERM to the step" in logs(tmp_path)
    assert "link 2: done" in logs(tmp_path)


def test_a_failed_node_brings_the_job_back_to_the_queue(job, queue: Lab, tmp_path):
    job_id = job("until-requeued", options=("--nodes", "2"))
    until(tmp_path / "save/running")
    queue.fail("n2")
    facts = queue.wait(job_id, "PENDING", seconds=90)
    assert facts["Restarts"] == "1"
    queue.node("n2")
    assert queue.ready(), queue.log()
    # not at once: what the controller could not tell n2 while it was down ends the new step, which has the same number
    queue.call("scontrol", "update", f"JobId={job_id}", "StartTime=now+12")
    assert queue.wait(job_id)["JobState"] == "COMPLETED", logs(tmp_path) + queue.log()
    assert "restart 1" in logs(tmp_path)


def test_a_job_that_is_put_back_goes_on(job, queue, tmp_path):
    job_id = job("until-requeued")
    until(tmp_path / "save/running")
    queue.call("scontrol", "requeue", job_id)
    queue.wait(job_id, "PENDING")
    queue.call("scontrol", "update", f"JobId={job_id}", "StartTime=now")
    assert queue.wait(job_id)["JobState"] == "COMPLETED"
    log = logs(tmp_path)
    assert "restart 0" in log
    assert "restart 1" in log


@pytest.mark.parametrize("options", [(), ("--sbatch", "export=NONE")], ids=["", "export"])
def test_a_chain_without_progress_ends(job, queue, tmp_path, options):
    assert queue.wait(job("exit", "9", options=options))["ExitCode"] == "1:0"
    queue.idle()
    log = logs(tmp_path)
    assert log.count("nodes from") == 3, log
    assert "exit code 9, and nothing new 3 times; the chain ends" in log


def test_what_is_refused_is_not_tried_again(job, queue, tmp_path):
    assert queue.wait(job("exit", "5", options=("--nodes", "2")))["ExitCode"] == "5:0"
    queue.idle()
    assert logs(tmp_path).count("nodes from") == 1


def test_a_cancelled_job_has_no_successor(job, queue, tmp_path):
    job_id = job("until-told")
    until(tmp_path / "save/running")
    queue.call("scancel", job_id)
    assert queue.wait(job_id)["JobState"] == "CANCELLED"
    queue.idle()
    assert "link 2" not in logs(tmp_path)


@pytest.fixture
def preflight(queue, tmp_path, monkeypatch):
    """`preflight(code)`: the facts of a preflight of two nodes, whose tasks run this code in place of the launcher."""

    monkeypatch.chdir(tmp_path)

    def run(code: str, site: str = "local") -> dict[str, str]:
        (tmp_path / "run").write_text(f"#!/bin/bash\n{code}\n")
        (tmp_path / "run").chmod(0o755)
        script = queue.call("train", "submit", "--preflight", "--site", site, "--nodes", "2", "-n")
        script = re.sub(r"^RUN=.*$", f"RUN={tmp_path}/run", script, flags=re.MULTILINE)
        (tmp_path / "job.sbatch").write_text(script)
        return queue.wait(queue.call("sbatch", "--parsable", tmp_path / "job.sbatch").strip())

    return run


@pytest.mark.parametrize(("seconds", "message"), [("0", "PREFLIGHT OK: 2 nodes, 2 tasks"), ("3", "SLOW n2: matmul 3")])
def test_a_preflight_measures_the_nodes(preflight, tmp_path, seconds, message):
    """On one machine with other work a node may well take twice what the other takes: here five times is slow."""
    (tmp_path / "slowed.py").write_text(f"""
import os, sys, time, torch
from train import cli
from train.tools import node_speed
node_speed.REPEATS = 3
if os.environ["SLURMD_NODENAME"] == "n2":
    mm, torch.mm = torch.mm, lambda *words: (time.sleep({seconds}), mm(*words))[1]
sys.argv = sys.argv[1:] + ["--slower", "5"]
cli.main()
""")
    facts = preflight(f'PYTHONPATH={ROOT} exec {sys.executable} {tmp_path}/slowed.py "$@"')
    log = logs(tmp_path)
    assert message in log
    assert "2 ranks sum 67.1 MB" in log
    assert "67.1 MB to and from a neighbour in" in log
    assert (facts["JobState"] == "COMPLETED") == (seconds == "0")
    assert ("leave these out: --sbatch exclude=n2" in log) == (seconds == "3")


@pytest.mark.parametrize(
    ("site", "rule", "bad"),
    [
        ("local", '[ "$SLURMD_NODENAME" != n2 ]', "n2"),
        ("local", '[ "$SLURM_NNODES" = 1 ]', "n1,n2"),
        ("leonardo", '[ "$SLURM_NNODES" = 1 ] || echo "NCCL INFO Using network Socket"', "n1,n2"),
    ],
)
def test_a_preflight_names_nodes_to_exclude(preflight, tmp_path, site, rule, bad):
    facts = preflight(rule, site)
    assert facts["Requeue"] == "0"
    assert facts["ExitCode"] == "1:0"
    assert f"leave these out: --sbatch exclude={bad}" in logs(tmp_path)
    assert (tmp_path / f"slurm/preflight-{facts['JobId']}/exclude").read_text() == f"{bad}\n"


def test_a_conversion_runs_in_the_serial_partition(submitted, queue, model, convert, tmp_path, monkeypatch):
    """In a folder with any name, out of a shell that has a job's variables and others that beat what a script says."""
    tmp_path = tmp_path / "q's run"
    tmp_path.mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SBATCH_PARTITION", "debug")
    monkeypatch.setenv("SLURM_MEM_PER_CPU", "1")
    job = submitted("convert", "--site", "leonardo", "hf2megatron", model(), "out", "--tp", "2")
    facts = queue.wait(job)
    assert facts["JobState"] == "COMPLETED", logs(tmp_path)
    assert facts["Partition"] == "lrd_all_serial"
    assert convert("verify", tmp_path / "out", model()).code == 0


def test_a_conversion_in_parts_is_finished_behind_one_that_fails(queue, model, convert, monkeypatch, tmp_path):
    """Tasks on both nodes. One of them finds its part in other hands, which is what it fails of."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial/journal.jsonl").touch()
    with (tmp_path / "out.partial/journal-2-of-3.jsonl").open("w") as journal:
        fcntl.flock(journal, fcntl.LOCK_EX)
        argv = ["hf2megatron", model(), "out", "--tp", "2"]
        stdout = queue.call("convert", "submit", "--part", "3", "--sbatch", "exclusive", *argv)
        parts, last = re.findall(r"Submitted batch job (\d+)", stdout)
        assert queue.facts(last)["Dependency"].startswith(f"afterany:{parts}_")
        jobs = [queue.wait(f"{parts}_{number}") for number in (1, 2, 3)]
    assert [facts["ExitCode"] for facts in jobs] == ["0:0", "7:0", "0:0"], logs(tmp_path)
    assert {facts["NodeList"] for facts in jobs} == {"n1", "n2"}
    assert "another process is writing part 2/3" in logs(tmp_path)
    assert queue.wait(last)["JobState"] == "COMPLETED", logs(tmp_path)
    queue.idle()
    assert logs(tmp_path).count("nodes from") == 4
    assert convert(*argv[:2], tmp_path / "whole", *argv[3:]).code == 0
    assert files(tmp_path / "out") == files(tmp_path / "whole")
    assert not (tmp_path / "out.partial").exists()


def test_tokenizing_runs_without_gpus(submitted, queue, data, tmp_path):
    golden = ROOT / "tests/golden/data/1_sft"
    options = [
        "--input",
        golden / "sft.jsonl",
        "--vocab-file",
        golden / "model.model",
        "--append-eod",
        "--output-prefix",
        "P",
    ]
    job = submitted("train", "--site", "lumi", "tokenize", *options, "--workers", "1")
    facts = queue.wait(job)
    assert facts["JobState"] == "COMPLETED", logs(tmp_path)
    assert (facts["Partition"], "gres" in facts["TRES"]) == ("small", False)
    assert (tmp_path / "P_text_document.bin").read_bytes() == data.with_name(data.name + ".bin").read_bytes()


def test_a_wish_beyond_a_partition_is_refused_by_slurm(queue, train, settings, monkeypatch):
    for name, value in queue.env.items():
        monkeypatch.setenv(name, value)
    ran = train(
        "submit",
        settings(batch={"micro": 1}),
        "--site",
        "lumi",
        "--partition",
        "dev-g",
        "--time",
        "5:00:00",
        "--nodes",
        "1",
    )
    assert ran.code == 2
    assert "sbatch does not take" in ran.err


def test_a_watch_goes_on_from_job_to_job_until_nothing_is_new(submitted, convert, model, queue, tmp_path):
    """The first job finds one checkpoint, a later one the other; the last ends the chain."""
    run, out = tmp_path / "run", tmp_path / "out"
    assert convert("hf2fsdp", model(), run / "step-1").code == 0
    argv = ["watch", run, "--out", out, "--every", "0.05", "--idle", "0.01"]
    job = submitted("convert", "--site", "lumi", *argv)
    assert queue.wait(job)["JobState"] == "COMPLETED", logs(tmp_path)
    assert (out / "step-1").is_dir()
    shutil.copytree(run / "step-1", run / "step-2")
    queue.idle()
    log = logs(tmp_path)
    assert (log.count("digest "), log.count("link 1: done")) == (2, 0), log
    assert "link 2: " in log
    assert (out / "step-2").is_dir()
    assert convert("verify", out / "step-2", run / "step-1").code == 0
    assert [path.name for path in (tmp_path / "slurm").glob("*.out")] == ["watch.out"]
