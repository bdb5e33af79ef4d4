"""Fixtures: a Hub on loopback, a folder as the converter writes it, and `convert push` in a process of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import Ran
from tests.hub.server import TOKEN, Hub
from tests.models import build

ROOT = Path(__file__).parents[2]
CONVERT = """
import sys
from converters import cli
from converters.commands import publish
cli.main()
"""
TEMPLATE = """\
{%- for one in messages -%}<|im_start|>{{ one['role'] }}
{{ one['content'] }}<|im_end|>
{% endfor %}{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif %}"""


def environment(hub: Hub, home: Path) -> dict[str, str]:
    """Variables that point huggingface_hub at the test's Hub, whatever this process is set to."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    return variables | {
        "HF_ENDPOINT": hub.endpoint, "HF_TOKEN": TOKEN, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "127.0.0.1", "PYTHONPATH": str(ROOT),
    }  # fmt: skip


def spawn(code: str, *argv: object, env: dict[str, str]) -> subprocess.Popen[str]:
    """Start Python code in a process of its own."""
    command = [sys.executable, "-c", code, *map(str, argv)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, cwd=ROOT)


def finish(process: subprocess.Popen[str], seconds: float = 120) -> Ran:
    """Wait for it."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    assert "Traceback" not in err, err
    return Ran(process.returncode, out, err)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with Hub(tmp_path / "hub") as running:
        yield running
    assert not running.server.broken, running.server.broken


@pytest.fixture
def env(hub: Hub, tmp_path: Path) -> dict[str, str]:
    return environment(hub, tmp_path / "home")


@pytest.fixture
def push(env: dict[str, str]) -> Callable[..., Ran]:
    """`push(folder, "acme/m", "--json")`: run the command and get (exit code, stdout, stderr)."""

    def run(*argv: object, **changes: str) -> Ran:
        return finish(spawn(CONVERT, "push", *argv, env=env | changes))

    return run


@pytest.fixture(scope="session")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `convert megatron2hf` writes, to be read only: shards, a tokenizer with a chat template, a manifest."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    place = tmp_path_factory.mktemp("converted")
    source = build(place / "source", "llama", vocab_size=300, eos_token_id=257)
    for name in ("tokenizer.model", "chat_template.jinja", "tokenizer_config.json"):
        (source / name).unlink()
    special = ["<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", chat_template=TEMPLATE)
    fast.save_pretrained(source)
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": fast.eos_token_id}))
    env = dict(os.environ, PYTHONPATH=str(ROOT))
    for argv in (
        ["hf2megatron", source, place / "megatron", "--tp", 2],
        ["megatron2hf", place / "megatron", place / "hf", "--shard-size", "200kB"],
    ):
        ran = finish(spawn("from converters.cli import main; main()", *argv, env=env))
        assert ran.code == 0, ran.err
    assert len(list((place / "hf").glob("model-*.safetensors"))) >= 3
    return place / "hf"


@pytest.fixture
def folder(converted: Path, tmp_path: Path) -> Path:
    """A copy of it to change."""
    return Path(shutil.copytree(converted, tmp_path / "model"))
