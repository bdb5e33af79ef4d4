"""The CPU image (images.py), used as on a compute node: read-only and without a network."""

from __future__ import annotations

import importlib.metadata
import json
import os
import signal
import subprocess

import pytest

from tests.demo_train import CONFIG, GOLDEN
from tests.hpc.images import BUILDER, call
from tests.hpc.test_definition import IMAGES, pinned

pytestmark = [pytest.mark.hpc, pytest.mark.timeout(1500)]

PIPELINE = r"""
set -euo pipefail
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo
if python -c "import socket; socket.create_connection(('1.1.1.1', 80), 20)" 2> refused; then exit 9; fi
tail -1 refused

convert tokenizer /data/model.model start --control '<|user|>' --control '<|assistant|>' --eos '<|endoftext|>' \
    --allow-mismatches 1
python - <<'PYTHON'
from transformers import AutoConfig, AutoModelForCausalLM

config = AutoConfig.for_model(
    "llama", vocab_size=253, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=8,
    num_key_value_heads=4, max_position_embeddings=256,
)
AutoModelForCausalLM.from_config(config).save_pretrained("start")
PYTHON
head -100 /data/sft.jsonl > data.jsonl
train tokenize --input data.jsonl --vocab-file /data/model.model --append-eod --output-prefix data --workers 2
torchrun --standalone --local-addr 127.0.0.1 --nproc-per-node 2 -m train run config.yml
convert fsdp2hf run/global_step1010 model --chat-template control
convert hf2megatron model megatron --tp 2 --pp 2
convert verify megatron model
convert megatron2hf megatron again
convert diff model again
train chat model --ids --max-new-tokens 3 --prompt saule
"""


@pytest.fixture(scope="session")
def inside(sif, place):
    """`inside(words)`: run a command in the image with nothing of the host but two folders, and no network."""
    work = place / "work"
    call("mkdir", work, work / "tmp")
    data = call("cp", "-r", GOLDEN, place / "data")
    assert data.returncode == 0, data.stderr

    options = [
        "--contain", "--net", "--network", "none", "--bind", f"{work},{place}/data:/data:ro", "--pwd", str(work),
    ]  # fmt: skip

    def run(*argv):
        return call("apptainer", "exec", *options, sif, *argv, TMPDIR=str(work / "tmp"))

    run.work = work
    return run


def test_its_own_test_passes(sif):
    ran = call("apptainer", "test", sif)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    for text in ("torch 2.13.0+cpu", "to Megatron and back: the same bytes", "taken by model.attention auto"):
        assert text in ran.stdout


def test_its_commands_are_found_as_users_call_them(sif):
    assert "Move LLM checkpoints" in call("apptainer", "run", sif, "convert", "--help").stdout
    assert "attention sdpa" in call("apptainer", "run", "--app", "doctor", sif).stdout
    assert call("apptainer", "run", "--app", "convert", sif, "formats").returncode == 0
    assert call("apptainer", "run", "--app", "train", sif, "plan").returncode == 2
    nothing = call("apptainer", "run", sif)
    assert nothing.returncode == 2
    assert "run-help" in nothing.stderr
    assert "Variant cpu" in call("apptainer", "run-help", sif).stdout


def test_it_says_what_it_is_and_what_is_inside(sif, inside):
    labels = json.loads(call("apptainer", "inspect", "--json", sif).stdout)["data"]["attributes"]["labels"]
    assert labels["vitruvian.variant"] == "cpu"
    assert labels["org.opencontainers.image.version"] == importlib.metadata.version("vitruvian")
    document = json.loads(inside("cat", "/opt/vitruvian/sbom.json").stdout)
    parts = document["components"]
    versions = {part["name"]: part["version"] for part in parts if part["purl"].startswith("pkg:pypi/")}
    assert pinned("cpu").items() <= versions.items()
    assert {"libc6", "libssl3"} <= {part["name"] for part in parts}


def test_from_dialogues_to_megatron_with_nothing_but_the_image(inside):
    settings = CONFIG.replace("train_iters: 60", "train_iters: 10")
    written = inside("python", "-c", f"open('config.yml', 'w').write({settings!r})")
    assert written.returncode == 0, written.stderr
    ran = inside("bash", "-c", PIPELINE)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "Network is unreachable" in ran.stdout
    assert "step 10/10 (global 1010)" in ran.stdout
    assert "answer, " in ran.stdout


def test_it_writes_only_where_caches_belong(inside):
    for folder in ("/opt/vitruvian", "/usr", "/scratch"):
        ran = inside("touch", f"{folder}/new")
        assert "Read-only file system" in ran.stderr
    environ = json.loads(inside("python", "-c", "import json, os; print(json.dumps(dict(os.environ)))").stdout)
    caches = inside.work / "tmp" / f"vitruvian-{_uid()}"
    assert environ["TRITON_CACHE_DIR"] == f"{caches}/triton"
    assert environ["TORCH_EXTENSIONS_DIR"] == f"{caches}/extensions"
    # The training above has compiled nothing: had it, it would lie here.
    assert [path for path in caches.rglob("*") if path.is_file()] == []


def test_the_launcher_hands_a_signal_on(sif):
    """Slurm signals the runtime of the image, and neither the command nor squashfuse, which would die of it."""
    code = "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(9)); print('listens', flush=True); time.sleep(60)"
    argv = [IMAGES / "run", "--site", "local", "--image", sif, "python3", "-c", f"import signal, sys, time; {code}"]
    env = {"PATH": os.environ["PATH"], "HOME": "/", "USER": BUILDER, "SLURM_JOB_ID": "0", "SLURM_NTASKS": "2"}
    user = None if os.geteuid() else BUILDER
    with subprocess.Popen(argv, env=env, user=user, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as ran:
        assert ran.stdout is not None
        assert ran.stdout.readline() == "listens\n"
        ran.send_signal(signal.SIGUSR1)
        assert ran.wait(60) == 9


def test_a_job_names_its_own_caches(sif):
    ran = call("apptainer", "exec", sif, "python", "-c", "import os; print(os.environ['TRITON_CACHE_DIR'])",
               TRITON_CACHE_DIR="/scratch/triton")  # fmt: skip
    assert ran.stdout == "/scratch/triton\n"


def _uid():
    return call("id", "-u").stdout.strip()


def test_packages_of_the_user_stay_outside(sif, place):
    """Neither `PYTHONPATH` nor the user's own site-packages of the host take the place of what is in the image."""
    folder = place / "host/lib/python3.11/site-packages"
    call("mkdir", "-p", folder)
    call("bash", "-c", f"echo 'raise SystemExit(1)' > {folder}/torch.py")
    ran = call("apptainer", "exec", "--bind", place / "host", sif, "python", "-c", "import torch; print('fine')",
               PYTHONPATH=str(folder), PYTHONUSERBASE=str(place / "host"))  # fmt: skip
    assert (ran.returncode, ran.stdout) == (0, "fine\n"), ran.stderr
