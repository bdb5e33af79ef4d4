"""Jobs as they are printed: the sites' facts, the golden scripts, and what is refused before Slurm is asked."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from shutil import which

import pytest
import yaml

from converters.common.slurm import (
    Wishes,
    cpu_header,
    cpu_job,
    gpu_header,
    load_site,
    megabytes_of,
    options_of,
    seconds_of,
)
from formats.errors import RefusedError, UsageError

ROOT = Path(__file__).parents[2]
CONTAINERS = ROOT / "containers"
SITES = sorted(path.stem for path in (CONTAINERS / "sites").glob("*.sh"))
SCRIPTS = sorted([CONTAINERS / "run", CONTAINERS / "copy", CONTAINERS / "schedule.sh", *CONTAINERS.glob("*/*.sh")])
TREE = {
    "model": {"path": "start"}, "data": {"train": ["P"], "seq_length": 64}, "batch": {"size": 192},
    "optim": {"lr": 1e-5}, "steps": {"train_iters": 8}, "save": {"path": "save"},
}  # fmt: skip
ASKED = {
    "training": ["train", "run1/config.yml", "--optim.lr", "1e-6", "--nodes", "24", "--bench", "pp.sh"],
    "torchrun": [
        "train",
        "run1/config.yml",
        "--nodes",
        "8",
        "--launcher",
        "torchrun",
        "--jobs",
        "3",
        "--time",
        "10:00:00",
    ],
    "preflight": ["train", "--preflight", "--nodes", "4", "--sbatch", "exclude=n1"],
    "evaluation": ["train", "eval", "run1", "--all", "--time", "2:00:00"],
    "tokenizing": ["train", "tokenize", "--input", "a b.jsonl", "--vocab-file", "m.model", "--output-prefix", "P"],
    "conversion": ["convert", "hf2megatron", "MODEL", "out", "--tp", "2"],
    "conversion in parts": ["convert", "--part", "8", "hf2megatron", "MODEL", "out", "--tp", "2"],
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a run in it, where a user stands."""
    (tmp_path / "run1").mkdir()
    (tmp_path / "run1/config.yml").write_text(yaml.safe_dump(TREE))
    (tmp_path / "pp.sh").write_text("#!/bin/bash\n")
    monkeypatch.chdir(tmp_path)
    for name in ("VITRUVIAN_SITE", "VITRUVIAN_IMAGE", "VITRUVIAN_SETTINGS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def said(argv: list[object], env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a program."""
    return subprocess.run(
        [str(word) for word in argv],
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=ROOT,
    )


def launcher(site: str, *argv: str, path: str) -> str:
    """What `containers/run -n` prints."""
    env = {
        "PATH": path,
        "USER": "ada",
        "HOME": "/home/ada",
        "SLURM_JOB_ID": "7",
        "SLURM_CPUS_PER_TASK": "7",
        "SLURM_NTASKS": "8",
        "SLURM_JOB_PARTITION": "gpus",
    }
    ran = said([CONTAINERS / "run", "-n", "--site", site, *argv], env)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.parametrize("site", SITES)
def test_jobs_and_launcher_are_the_golden_ones(site, train, convert, folder, model, tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/apptainer").symlink_to("/bin/true")
    texts = []
    for name, (program, *template) in ASKED.items():
        argv = [str(model()) if word == "MODEL" else word for word in template]
        image = [] if name == "conversion" else ["--image", "/scratch/v.sif"]
        ran = (train if program == "train" else convert)(
            "submit", "--site", site, "--account", "P", *image, *argv, "-n"
        )
        assert ran.code == 0, ran.err
        kind = "preflight" if name == "preflight" else "chain"
        body = (CONTAINERS / f"slurm/{kind}.sh").read_text()
        assert ran.out.count(body) == 1 + (name == "conversion in parts")
        texts.append(f"### {name}: {program} submit\n{ran.out.replace(chr(10) + body, '')}")
    path = f"{tmp_path}/bin:/usr/bin:/bin"
    if site != "local":  # where the flag for GPUs is that of this machine
        texts.append("### launcher\n" + launcher(site, "--image", "/scratch/v.sif", "train", "run", path=path))
    texts.append("### launcher, no image\n" + launcher(site, "train", "run", path=path))
    text = "\n".join(texts)
    for here, name in (
        (tmp_path, "HERE"),
        (Path(sys.executable).parent, "BIN"),
        (ROOT, "VITRUVIAN"),
        (model(), "MODEL"),
    ):
        text = text.replace(str(here), name)
    golden = ROOT / f"tests/hpc/golden/{site}.txt"
    assert text == golden.read_text()


@pytest.mark.parametrize("site", SITES)
def test_the_shell_and_the_submission_read_the_same_facts(site):
    code = f'CACHE=x; . {CONTAINERS}/sites/{site}.sh; for name in "${{!SITE_@}}"; do echo "$name=${{!name}}"; done'
    output = subprocess.run(["bash", "-euc", code], capture_output=True, text=True, timeout=20, check=True).stdout
    facts = dict(line.split("=", 1) for line in output.splitlines())
    loaded = load_site(site)
    assert options_of(facts["SITE_GPU"].split()) == loaded.gpu
    assert facts["SITE_SRUN"].split() == loaded.srun
    assert [options_of(facts[f"SITE_CPU_{number}"].split()) for number in range(1, 1 + len(loaded.cpu))] == loaded.cpu


def test_where_memory_comes_with_cores_no_memory_is_asked_for():
    site = load_site("marenostrum5")
    header = cpu_header(site, Wishes("marenostrum5", {}, None), 3600, 9001)
    assert (header["cpus-per-task"], "mem" in header, header["qos"]) == ("5", False, "gp_ehpc")
    with pytest.raises(RefusedError, match="more than a partition of marenostrum5 has"):
        cpu_header(site, Wishes("marenostrum5", {}, None), 3600, 300_000)


def test_the_masks_of_lumi_are_seven_cores_each_beside_their_die():
    site = load_site("lumi")
    (option,) = site.srun
    masks = [int(mask, 16) for mask in option.removeprefix("--cpu-bind=mask_cpu:").split(",")]
    assert len(masks) == site.tasks == 8
    cores = [[core for core in range(64) if mask >> core & 1] for mask in masks]
    assert all(len(group) == int(site.gpu["cpus-per-task"]) == 7 for group in cores)
    assert len({core for group in cores for core in group}) == 56
    assert not any(core % 8 == 0 for group in cores for core in group)  # the first of eight is the system's
    assert [group[0] // 16 for group in cores] == [3, 3, 1, 1, 0, 0, 2, 2]  # NUMA domain of each die, 16 cores each
    assert all(group[-1] - group[0] == 6 for group in cores)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_finds_nothing(path):
    program = which("shellcheck", path=f"{Path(sys.executable).parent}:/usr/bin")
    ran = said([program, "--shell=bash", "--external-sources", path])
    assert ran.returncode == 0, ran.stdout


def test_a_script_of_all_sites_passes_bash(train, folder):
    for site in SITES:
        ran = train("submit", "--site", site, "run1/config.yml", "--nodes", "1", "-n")
        assert ran.code == 0, ran.err
        assert "#!/bin/bash" in ran.out
        assert "SBATCH" in ran.out
        read = subprocess.run(["bash", "-n"], input=ran.out, capture_output=True, text=True, timeout=20, check=False)
        assert (read.returncode, read.stderr) == (0, ""), site


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--nodes", "5", "--site", "lumi", "run1/config.yml"], "batch.size is 192"),
        (["--site", "mars", "run1/config.yml"], "there is no site 'mars'"),
        (["--site", "lumi", "run1/config.yml", "--time", "3-00"], "standard-g of lumi gives 2-00:00:00, not 3-00"),
        (["run1/config.yml", "--time", "soon"], "is not a time"),
        (["run1/config.yml", "--time", "10"], "leaves nothing before the last 600 s"),
        (["run1/config.yml", "--save-seconds", "65536"], "is not in the range 1<=x<=65535"),
        (["run1/config.yml", "--bench", "none.sh"], "none.sh is not there"),
        (["run1/config.yml", "--jobs", "0"], "neither auto nor a number"),
        (["run1/config.yml", "--optim.rl", "1"], "optim.rl is no setting"),
        (["run1/config.yml", "--sbatch", "--nodes 4"], "is no option of sbatch"),
        (["eval", "nosuch", "--all"], "nosuch: No such file"),
        (["--preflight", "run1/config.yml"], "--preflight examines nodes"),
        ([], "nothing to submit"),
        (["--settings", "run1/config.yml", "run1/config.yml"], "batch.size is no setting of a job"),
        (["--settings", "time.yml", "run1/config.yml"], "slurm.time is the number 72000"),
        (["--sbatch", "nodes=2-4", "run1/config.yml"], "nodes is '2-4', not a number"),
        (["--sbatch", "ntasks-per-node", "--preflight"], "ntasks-per-node is '', not a number"),
    ],
)
def test_what_cannot_be_meant_is_refused(train, folder, argv, message):
    Path("time.yml").write_text("slurm: {time: 20:00:00}\n")
    ran = train("submit", *argv, "-n")
    assert ran.code == 2
    assert message in ran.err


@pytest.mark.parametrize("site", ["lumi", "leonardo"])
def test_a_header_is_shown_though_the_batch_is_too_small(train, folder, site):
    """F18 and F22: the header of the guide has more ranks than its yml has rows."""
    argv = ["submit", "run1/config.yml", "--site", site, "--account", "P", "--nodes", "192"]
    ran = train(*argv, "-n")
    assert (ran.code, "\n#SBATCH --nodes=192\n" in ran.out) == (2, True), ran.err
    assert "batch.size: 192 rows are fewer than" in ran.err
    ran = train(*argv)
    assert (ran.code, ran.out) == (2, "")
    ran = train(*argv, "--parallel.context", "8", "-n")
    assert ran.code == 0, ran.err
    ran = train(*argv, "--parallel.context", "5", "-n")
    assert (ran.code, "cannot be groups of 5 that share rows" in ran.err) == (2, True)


def test_a_chain_may_begin_with_finetune(train, folder):
    """F30: the second job goes on with what the first has saved."""
    ran = train("submit", "run1/config.yml", "--site", "lumi", "--account", "P", "--init", "finetune", "-n")
    assert ran.code == 0, ran.err
    assert "--init finetune" in ran.out


def test_settings_of_a_user_stand_behind_options(train, folder):
    Path("mine.yml").write_text(
        "slurm: {site: lumi, account: A, nodes: 2, sbatch: [qos=x]}\ncontainer: {image: v.sif}\n"
    )
    ran = train("submit", "--settings", "mine.yml", "run1/config.yml", "--account", "B", "-n")
    assert ran.code == 0, ran.err
    for line in ("account=B", "nodes=2", "qos=x", "partition=standard-g"):
        assert f"#SBATCH --{line}\n" in ran.out
    assert f"export VITRUVIAN_IMAGE={folder}/v.sif\n" in ran.out


def test_settings_of_trainings_are_not_those_of_other_jobs(train, folder):
    Path("mine.yml").write_text("slurm: {nodes: 24, time: '20:00:00', partition: boost_usr_prod, sbatch: qos=x}\n")
    submit = ["submit", "--settings", "mine.yml", "--site", "leonardo"]
    ran = train(*submit, "tokenize", "--input", "a", "-n")
    for line in ("nodes=1", "partition=lrd_all_serial", "time=04:00:00", "qos=x"):
        assert f"#SBATCH --{line}\n" in ran.out
    ran = train(*submit, "--preflight", "-n")
    for line in ("nodes=24", "time=00:20:00", "no-requeue"):
        assert f"#SBATCH --{line}\n" in ran.out


@pytest.mark.parametrize("name", ["my run", "q's", "a b's $x ü", "50%j"])
def test_a_folder_may_have_any_name(train, folder, monkeypatch, name):
    """Each line is one word to a shell, as sbatch reads it."""
    (folder / name).mkdir()
    monkeypatch.chdir(folder / name)
    ran = train("submit", "tokenize", "--input", "a", "--sbatch", "comment=a #b", "--time", "1", "-n")
    lines = [line.removeprefix("#SBATCH ") for line in ran.out.splitlines() if line.startswith("#SBATCH ")]
    words = [shlex.split(line) for line in lines]
    assert all(len(parts) == 1 for parts in words)
    here = f"{folder}/{name}"
    for option in (
        f"--chdir={here}",
        "--comment=a #b",
        "--signal=B:USR1@30",
        f"--output={here.replace('%', '%%')}/slurm/%x-%j.out",
    ):
        assert [option] in words
    assert Path("slurm").is_dir()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("time: 20:00:00", 'slurm.time is the number 72000 to YAML\nhint: time: "20:00:00", in quotes'),
        ("time: 90", "slurm.time is the number 90"),
        ("sbatch: {mail-type: FAIL}", "\"{'mail-type': 'FAIL'}\" is no option of sbatch"),
    ],
)
def test_settings_that_yaml_reads_otherwise_are_refused(train, folder, line, message):
    Path("mine.yml").write_text(f"slurm: {{site: lumi, {line}}}\n")
    ran = train("submit", "--settings", "mine.yml", "run1/config.yml", "-n")
    assert (ran.code, message in ran.err) == (2, True), ran.err


@pytest.mark.parametrize(
    ("seconds", "megabytes", "partition"),
    [(3600, 2000, "lrd_all_serial"), (3600, 40_000, "dcgp_usr_prod"), (5 * 3600, 2000, "dcgp_usr_prod")],
)
def test_a_conversion_takes_the_first_partition_that_is_enough(seconds, megabytes, partition):
    header = cpu_header(load_site("leonardo"), Wishes("leonardo", {}, None), seconds, megabytes)
    assert header["partition"] == partition


def test_what_the_site_does_not_know_is_left_to_slurm(train, folder):
    header = cpu_header(load_site("lumi"), Wishes("lumi", {"partition": "largemem"}, None), 3600, 10**6)
    assert (header["partition"], header["cpus-per-task"], header["mem"]) == ("largemem", "16", "1000000")
    long = ["--sbatch", "qos=boost_qos_lprod", "--time", "3-00:00:00"]
    assert train("submit", "run1/config.yml", "--site", "leonardo", *long, "-n").code == 0
    header = cpu_header(load_site("leonardo"), Wishes("leonardo", {"qos": "x", "time": "3-00"}, None), 60, 40_000)
    assert header["partition"] == "dcgp_usr_prod"


def test_parts_share_the_time(convert, folder, model, monkeypatch):
    monkeypatch.setattr("converters.commands.submit.RATE", 100)
    ran = convert("submit", "--part", "8", "hf2megatron", model(), "out", "-n")
    part, whole = (seconds_of(time) - 900 for time in re.findall(r"^#SBATCH --time=(.*)$", ran.out, re.MULTILINE))
    assert whole > 3600
    assert 0 <= part * 8 - whole <= 8 * 60


def test_a_watch_is_a_chain_of_short_jobs(convert, folder):
    (folder / "run2").mkdir()  # no checkpoint yet
    argv = ["watch", "run2", "--out", "models", "--every", "20", "--idle", "24"]
    ran = convert("submit", "--site", "leonardo", *argv, "-n")
    assert ran.code == 0, ran.err
    for line in (
        "#SBATCH --partition=lrd_all_serial",
        "#SBATCH --time=01:00:00",
        f"#SBATCH --output={folder}/slurm/%x.out",
        "COMMAND=(convert watch run2 --out models --every 20 --idle 24 --once)",
        "LINKS=${VITRUVIAN_LINKS:-100000}",
        "PAUSE=1200",
    ):
        assert f"{line}\n" in ran.out, line
    assert convert("submit", "--part", "2", *argv, "-n").code == 2


def test_a_job_without_internet_is_not_given_what_needs_it(convert, folder, model):
    """Of Leonardo the serial partition has it, where a push goes; no job of JUPITER does."""
    assert convert("hf2fsdp", model(), "saved").code == 0
    ran = convert("submit", "--site", "jupiter", "fsdp2hf", "saved", "out", "--push", "acme/m", "-n")
    assert (ran.code, "--push acme/m needs the internet, which jobs of jupiter in booster" in ran.err) == (2, True)
    (folder / "run2").mkdir()
    ran = convert(
        "submit", "--site", "leonardo", "--time", "5:00:00", "watch", "run2", "--out", "m", "--push", "acme/m", "-n"
    )
    assert (ran.code, "in dcgp_usr_prod do not have" in ran.err) == (2, True)
    for site in ("leonardo", "lumi", "local"):
        assert convert("submit", "--site", site, "watch", "run2", "--out", "m", "--push", "acme/m", "-n").code == 0
    ran = convert("submit", "--site", "marenostrum5", "hf2megatron", str(model()), "out", "-n")
    assert re.search(r"^out needs [\d.]+ [kM]B in \d+ files and folders$", ran.err, re.MULTILINE), ran.err


def test_a_watch_is_submitted_beside_a_checkpoint_that_is_cut_off(convert, folder, model):
    """As the watch itself goes past it; where none can be converted, nothing is submitted."""
    for step in (10, 20):
        assert convert("hf2hf", model(), folder / f"run3/checkpoint-{step}").code == 0
        (folder / f"run3/checkpoint-{step}/trainer_state.json").write_text(f'{{"global_step": {step}}}')
    (weights,) = (folder / "run3/checkpoint-10").glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-100])
    argv = ["submit", "--site", "local", "watch", folder / "run3", "--out", folder / "models", "-n"]
    ran = convert(*argv)
    assert ran.code == 0, ran.err
    assert "note: checkpoint-10: " in ran.err
    shutil.rmtree(folder / "run3/checkpoint-20")
    assert convert(*argv).code == 3


def test_what_a_site_binds_is_in_the_image():
    """A bind needs an existing place where the image is mounted without an overlay."""
    folders = set(shlex.split((CONTAINERS / "post.sh").read_text().partition("mkdir -p ")[2].partition("\n\n")[0]))
    for site in SITES:
        binds = re.search("^SITE_BIND='(.*)'$", (CONTAINERS / f"sites/{site}.sh").read_text(), re.MULTILINE)
        assert binds is not None
        assert {*filter(None, binds[1].split(","))} <= folders, site


def test_a_conversion_beyond_every_partition_is_refused():
    with pytest.raises(RefusedError, match="more than a partition of leonardo has"):
        cpu_header(load_site("leonardo"), Wishes("leonardo", {}, None), 3600, 500_000)
    with pytest.raises(RefusedError):
        cpu_header(
            load_site("leonardo"), Wishes("leonardo", {"partition": "lrd_all_serial", "mem": "40G"}, None), 60, 1
        )


@pytest.mark.parametrize("option", ["qos", "reservation"])
def test_limits_of_a_qos_are_left_to_slurm(option):
    """A QOS may give more time than its partition, not more memory."""
    site, wish = load_site("leonardo"), {option: "long", "time": "3-00:00:00"}
    assert gpu_header(site, Wishes("leonardo", wish, None))["time"] == "3-00:00:00"
    for limits in site.cpu:
        header = cpu_header(site, Wishes("leonardo", {**wish, "partition": limits["partition"]}, None), 60, 1)
        assert (header["time"], header["cpus-per-task"]) == ("3-00:00:00", limits["cpus-per-task"])
    with pytest.raises(RefusedError, match="512000 MB for 3-00"):
        cpu_header(site, Wishes("leonardo", {**wish, "partition": "dcgp_usr_prod", "mem": "500G"}, None), 60, 1)


@pytest.mark.parametrize(("time", "at"), [("1", 30), ("2", 60), ("3:59", 119), ("4", 120), ("1-00", 120)])
def test_a_job_without_gpus_works_before_it_is_told_to_stop(folder, time, at):
    job = cpu_job("tokenize", ["true"], Wishes("local", {"time": time}, None), 60, 1)
    assert job.header["signal"] == f"B:USR1@{at}"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('SITE_GPU="--ntasks-per-node=4"', "SITE_GPU has to be in single quotes"),
        ("SITE_GPU='--cpus-per-task=1 --time=1'", "SITE_GPU has no --ntasks-per-node"),
        ("SITE_GPU='--ntasks-per-node=4 --cpus-per-task=1'", "SITE_GPU has no --time"),
        (
            "SITE_GPU='--ntasks-per-node=four --cpus-per-task=1 --time=1'",
            "SITE_GPU ntasks-per-node is 'four', not a number",
        ),
        ("SITE_CPU_1='--cpus-per-task=1 --time=1'", "SITE_CPU_1 has no --mem"),
        ("# no GPUs", "SITE_GPU has no --ntasks-per-node"),
        ("# no CPUs", "SITE_CPU_1 has no --mem"),
    ],
)
def test_a_site_file_that_lacks_something_is_refused_by_name(monkeypatch, tmp_path, line, message):
    key = {"# no GPUs": "SITE_GPU=", "# no CPUs": "SITE_CPU_1="}.get(line, line.partition("=")[0] + "=")
    text = (CONTAINERS / "sites/local.sh").read_text()
    (tmp_path / "sites").mkdir()
    (tmp_path / "sites/mine.sh").write_text(re.sub(f"^{key}.*$", line, text, flags=re.MULTILINE))
    monkeypatch.setattr("converters.common.slurm.CONTAINERS", tmp_path)
    with pytest.raises(UsageError, match=re.escape(f"{tmp_path}/sites/mine.sh: {message}")):
        load_site("mine")


def test_a_site_file_needs_neither_binds_nor_masks(monkeypatch, tmp_path):
    """Nor is the size of memory in megabytes alone, and what only the launcher reads may be quoted as you like."""
    (tmp_path / "slurm").symlink_to(CONTAINERS / "slurm")
    (tmp_path / "run").write_text((CONTAINERS / "run").read_text())
    (tmp_path / "sites").mkdir()
    (tmp_path / "sites/mine.sh").write_text(
        "SITE_GPU='--ntasks-per-node=4 --cpus-per-task=1 --time=1'\n"
        "SITE_CPU_1='--cpus-per-task=1 --mem=64G --time=60'\n"
    )
    monkeypatch.setattr("converters.common.slurm.CONTAINERS", tmp_path)
    site = load_site("mine")
    assert (site.srun, site.network) == ([], "")
    assert cpu_header(site, Wishes("mine", {}, None), 60, 65536)["mem"] == "65536"
    (tmp_path / "apptainer").symlink_to("/bin/true")
    ran = said(
        ["bash", tmp_path / "run", "-n", "--site", "mine", "--image", "x.sif", "true"],
        {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": "/nowhere"},
    )
    assert ran.returncode == 0, ran.stderr
    assert "apptainer exec x.sif sh" in ran.stdout


@pytest.mark.parametrize("wish", ["nodes=2-4", "nodes=0", "ntasks-per-node", "ntasks-per-node=0", "cpus-per-task=x"])
def test_numbers_of_nodes_and_tasks_are_numbers(train, folder, wish):
    for argv in (["run1/config.yml", "--launcher", "torchrun"], ["--preflight"], ["tokenize", "--input", "x"]):
        ran = train("submit", *argv, "--sbatch", wish, "-n")
        assert (ran.code, f"{wish.partition('=')[0]} is '" in ran.err, "not a number" in ran.err) == (2, True, True)


def test_no_conversion_is_submitted_that_would_be_refused(convert, folder, model):
    assert "'inspect' is no conversion" in convert("submit", "inspect", str(model()), "-n").err
    ran = convert("submit", "hf2megatron", "nowhere", "out", "-n")
    assert (ran.code, ran.out) == (3, "")
    (folder / "out").mkdir()
    (folder / "out/mine").write_text("")
    assert convert("submit", "hf2megatron", str(model()), "out", "-n").code == 7


def test_times_and_sizes_are_those_of_sbatch():
    times = {"90": 5400, "1:30": 90, "20:00:00": 72000, "1-12": 129600, "2-00:00:00": 172800, "1-00:30": 88200}
    assert {text: seconds_of(text) for text in times} == times
    assert [megabytes_of(text) for text in ("30800", "28G", "1T", "512K", "5GB")] == [30800, 28672, 2**20, 0.5, 5120]
    with pytest.raises(UsageError):
        megabytes_of("much")


def test_the_launcher_knows_what_is_unwise(folder, tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/apptainer").symlink_to("/bin/true")
    (tmp_path / "unpacked").mkdir()
    env = {
        "PATH": f"{tmp_path}/bin:/usr/bin:/bin",
        "HOME": str(tmp_path),
        "HF_HOME": f"{tmp_path}/hf",
        "PYTHONPATH": "/mine",
    }
    argv = [CONTAINERS / "run", "-n", "--image", f"{tmp_path}/unpacked", "train"]
    ran = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=20, check=True)
    assert ran.stderr.count("is in the home folder") == 2
    assert "is an unpacked image" in ran.stderr
    assert "PYTHONPATH" not in ran.stdout
    del env["HOME"]  # a job of sbatch --export=NONE
    ran = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=20, check=True)
    assert "home folder" not in ran.stderr


@pytest.mark.parametrize(
    ("argv", "message"),
    [([], "no command"), (["--site", "mars", "train"], "no site mars"), (["--image", "x.sif", "train"], "neither")],
)
def test_the_launcher_refuses(argv, message, tmp_path):
    (tmp_path / "bin").mkdir()
    for name in ("bash", "dirname", "uname"):  # and no apptainer, wherever it may be installed
        (tmp_path / "bin" / name).symlink_to(str(which(name)))
    ran = said([CONTAINERS / "run", *argv], {"PATH": f"{tmp_path}/bin", "HOME": "/"})
    assert (ran.returncode, message in ran.stderr) == (2, True), ran.stderr


def test_schedule_wants_a_job_of_ours(folder):
    (folder / "launch.sh").write_text("#!/bin/bash\ndeepy.py train.py x.yml\n")
    (folder / "job_log.txt").write_text("41 link 1\n")
    argv = ["bash", CONTAINERS / "schedule.sh", "launch.sh", "3", "pp.sh"]
    ran = subprocess.run(argv, capture_output=True, text=True, timeout=20, check=False)
    assert (ran.returncode, "train submit CONFIG.yml -n > launch.sh" in ran.stderr) == (2, True)
    assert (folder / "job_log.txt").read_text() == "41 link 1\n"


def test_the_users_call_submits_a_chain(folder):
    (folder / "sbatch").write_text(
        f'#!/bin/sh\necho "42;lab"\nprintf "%s\\n" "$@" ${{SLURM_MEM_PER_CPU-none}} $SLURM_CONF >{folder}/said\n'
    )
    (folder / "sbatch").chmod(0o755)
    path = f"{folder}:{Path(sys.executable).parent}:/usr/bin:/bin"
    env = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "VITRUVIAN_SITE": "lumi"}
    env |= {"SLURM_MEM_PER_CPU": "1", "SLURM_CONF": "lab.conf"}  # in a shell of salloc
    argv = ["bash", CONTAINERS / "schedule.sh", "run1/config.yml", "3", "pp.sh"]
    ran = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (ran.returncode, ran.stdout) == (0, "Submitted batch job 42\n"), ran.stderr
    assert "1 node for 48 h, at the most 48 node hours a job" in ran.stderr
    assert (folder / "job_log.txt").read_text() == "42 run1\n"
    submitted = (folder / "said").read_text().split()
    # SBATCH_ variables beat a script
    assert {"--partition=standard-g", "--time=2-00:00:00", "--requeue"} <= set(submitted)
    assert submitted[-3:] == [f"{folder}/run1/slurm/run1.sbatch", "none", "lab.conf"]
    script = (folder / "run1/slurm/run1.sbatch").read_text()
    assert "LINKS=${VITRUVIAN_LINKS:-3}\n" in script
    assert f"BENCH=${{VITRUVIAN_BENCH-{folder}/pp.sh}}\n" in script


def test_the_next_link_comes_before_the_evaluation_and_is_asked_for_again(train, folder):
    """Slurm is played: `sbatch` fails once, and writes what it is given."""
    played = {
        "srun": 'echo "srun $1"\necho global_step4 >save/latest\nexit 75',
        "scontrol": '[ "$1" = write ] && cat job || echo a',
        "squeue": ":",
        "sleep": ":",
        "sbatch": 'echo "$*" ${MASTER_ADDR-} ${VITRUVIAN_LINK-} ${SLURM_JOB_ID-} ${VITRUVIAN_BENCH-} >>said\n'
        '[ "$(wc -l <said)" -gt 1 ] && echo 7',
    }
    for name, code in played.items():
        (folder / name).write_text(f"#!/bin/bash\n{code}\n")
        (folder / name).chmod(0o755)
    (folder / "save").mkdir()
    argv = ["run1/config.yml", "--time", "20:00:00", "--sbatch", "comment=a b", "--bench", "pp.sh", "-n"]
    script = train("submit", *argv).out.replace("--nodes=1\n", "--nodes=1 # one\n")
    (folder / "job").write_text(script)
    env = {
        "PATH": f"{folder}:/usr/bin:/bin",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "x",
        "SLURM_JOB_NUM_NODES": "1",
    }
    env |= {"SLURM_JOB_NAME": "run1", "VITRUVIAN_LINK": "2", "VITRUVIAN_BENCH": f"{folder}/pp.sh"}
    ran = subprocess.run(["bash"], input=script, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (ran.returncode, ran.stderr) == (0, ""), ran.stdout
    assert "srun --export=ALL" in ran.stdout
    first, again, bench = (folder / "said").read_text().splitlines()
    assert first == again
    assert "--job-name=run1 --ntasks-per-node=1" in again
    assert "--nodes=1 --comment=a b " in again
    assert again.endswith(f" --dependency=afterany:7 --export=ALL,VITRUVIAN_LINK=3,VITRUVIAN_FAILED=0 {folder}/pp.sh")
    assert (
        bench
        == f"--parsable --kill-on-invalid-dep=yes --dependency=afterany:7 {folder}/pp.sh {folder}/save/global_step4"
    )


TCP = "echo 'n: NCCL INFO Using network Socket'"


@pytest.mark.parametrize(
    ("site", "rule", "bad", "message"),
    [
        ("local", "true", "", "PREFLIGHT OK: 3 nodes, 3 tasks"),
        ("local", TCP, "", "NCCL INFO Using network Socket\nPREFLIGHT OK: 3 nodes, 3 tasks"),
        ("leonardo", TCP, "a,b,c", "FAULT a: error: NCCL uses TCP, not IB"),
        ("lumi", f"{TCP}\n[ $nodes != b ]", "a,b,c", "FAULT c: error: NCCL uses TCP, not AWS Libfabric"),
        (
            "local",
            "echo 'slow b            matmul 9.0 ms, the median is 4.0 ms'",
            "b",
            "SLOW b: matmul 9.0 ms, the median is 4.0 ms",
        ),
        ("local", '[ "$nodes" != b ] || { echo "error: no device"; false; }', "b", "FAULT b: error: no device"),
        ("local", "[[ $nodes != *,*,* && $nodes != b,c ]]", "b,c", "FAULT between b and c"),
    ],
)
def test_a_preflight_of_three_nodes(train, folder, site, rule, bad, message):
    """Slurm is played: `srun` writes what the doctor would say of the nodes that it is given."""
    srun = "for word; do case $word in --nodelist=*) nodes=${word#*=};; --output=*) log=${word#*=};; esac; done"
    for name, code in (("srun", f'{srun}\nexec >>"$log"\n{rule}'), ("scontrol", "printf '%s\\n' a b c")):
        (folder / name).write_text(f"#!/bin/bash\n{code}\n")
        (folder / name).chmod(0o755)
    script = train("submit", "--preflight", "--site", site, "--nodes", "3", "-n").out
    env = {
        "PATH": f"{folder}:/usr/bin:/bin",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "x",
        "SLURM_CPUS_PER_TASK": "1",
    }
    ran = subprocess.run(["bash"], input=script, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (ran.returncode, ran.stderr) == (int(bool(bad)), "")
    assert message in ran.stdout
    exclude = folder / "slurm/preflight-7/exclude"
    assert (exclude.read_text() if exclude.exists() else "").strip() == bad
