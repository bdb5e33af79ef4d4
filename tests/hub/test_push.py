"""`convert push` against a real HTTP server on loopback: what arrives, what resumes, what is refused."""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
import signal
import threading
import time

import pytest

from tests.hub.conftest import CONVERT, finish, spawn
from tests.hub.server import Fault
from tests.hub.xet import Cas

PULL = """
import json, re, sys
from pathlib import Path
import torch
from huggingface_hub import snapshot_download
from transformers import AutoModelForCausalLM, AutoTokenizer

folder, repo, revision = sys.argv[1:4]
theirs, ours = (AutoModelForCausalLM.from_pretrained(*where[:1], **where[1]).state_dict()
                for where in ((repo, {"revision": revision}), (folder, {})))
assert theirs.keys() == ours.keys() and all(torch.equal(theirs[name], ours[name]) for name in ours)
messages = [{"role": "user", "content": "Grüße!"}, {"role": "assistant", "content": " \\u2028 ok"}]
ids = [AutoTokenizer.from_pretrained(where, **more).apply_chat_template(messages)["input_ids"]
       for where, more in ((repo, {"revision": revision}), (folder, {}))]
assert ids[0] == ids[1] and len(ids[0]) > 20
pulled = Path(snapshot_download(repo, revision=revision))
names = sorted(path.relative_to(pulled).as_posix() for path in pulled.rglob("*") if path.is_file())
for path in Path(folder).iterdir():
    assert (pulled / path.name).read_bytes() == path.read_bytes(), path
code = re.search("```python\\n(.*?)```", (pulled / "README.md").read_text(), re.S)[1]
exec(code)
print(json.dumps({"names": names, "new": outputs.shape[1] - inputs["input_ids"].shape[1]}))
"""


def sent(hub, pattern="PUT /lfs"):
    """How often each object was sent."""
    names = [path.split("/")[2] for path, _ in hub.asked(pattern)]
    return {name: names.count(name) for name in names}


def hashes(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def until(true):
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# --- what arrives ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("way", ["lfs", "xet"])
def test_pushed_then_pulled_back_by_transformers(hub, push, env, converted, tmp_path, way):
    changes = {}
    if way == "xet":
        hub.cas, changes = Cas(tmp_path / "cas"), {"HF_HUB_DISABLE_XET": "0"}
    ran = push(converted, "acme/m", **changes)
    assert ran.code == 0, ran.err
    assert bool(hub.asked("PUT /lfs")) == (way == "lfs")
    assert bool(hub.asked("GET .*/xet-write-token/")) == (way == "xet")
    assert hub.store.repos["acme/m"].private
    content = hub.store.content("acme/m")
    local_files = {path.name: path.read_bytes() for path in converted.iterdir()}
    assert {name: content[name] for name in local_files} == local_files
    assert content.keys() - local_files.keys() == {".gitattributes", "README.md"}
    pulled = finish(spawn(PULL, converted, "acme/m", "main", env=env))
    assert pulled.code == 0, pulled.err
    facts = json.loads(pulled.out.splitlines()[-1])
    assert facts["names"] == sorted(content)
    assert facts["new"] > 0, "the usage example of the card generates"


def test_objects_sent_in_parts(hub, push, converted):
    hub.multipart = 150_000
    assert push(converted, "acme/m").code == 0
    assert len(hub.asked("PUT /lfs/.*/2")) >= 3
    content = hub.store.content("acme/m")
    assert all(content[path.name] == path.read_bytes() for path in converted.iterdir())


def test_a_second_push_sends_no_object(hub, push, converted):
    assert push(converted, "acme/m").code == 0
    first, hub.log[:] = hub.store.repos["acme/m"].refs["main"], []
    ran = push(converted, "acme/m", "--json")
    assert ran.code == 0
    assert not hub.asked("PUT|/commit/")
    assert json.loads(ran.out)["commit"] == first


def test_links_and_what_stays_at_home(hub, push, folder):
    for name in (
        ".env",
        "model-9.safetensors.partial",
        "optimizer.pt",
        "rng_state_0.pth",
        ".cache/x",
        "checkpoint-5/a",
    ):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("secret")
    (folder / "NOTICE").write_text("ours")
    (folder / "LICENSE").symlink_to("NOTICE")
    (folder / "loop").symlink_to(folder)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates/tool [1].jinja").write_text("{{ messages }}")
    assert push(folder, "acme/m").code == 0
    content = hub.store.content("acme/m")
    assert content["LICENSE"] == b"ours"
    assert content["additional_chat_templates/tool [1].jinja"] == b"{{ messages }}"
    assert b"secret" not in content.values()
    assert not [name for name in content if name.startswith("loop")]


def test_a_card_of_the_folder_is_sent_once_and_completed(hub, push, folder):
    (folder / "README.md").write_text("---\nlicense: mit\n---\nours\n")
    ran = push(folder, "acme/m", "-n", "--json")
    assert [file["name"] for file in json.loads(ran.out)["files"]].count("README.md") == 1
    assert push(folder, "acme/m").code == 0
    added = "library_name: transformers\npipeline_tag: text-generation\ntags:\n- vitruvian\n"
    sent_card = hub.store.content("acme/m")["README.md"].decode()
    assert sent_card == json.loads(ran.out)["card"] == f"---\nlicense: mit\n{added}---\nours\n"
    assert (folder / "README.md").read_text() == "---\nlicense: mit\n---\nours\n"


# --- a dry run -------------------------------------------------------------------------------------------------------


def test_a_dry_run_prints_no_digest_that_the_weights_do_not_have(push, folder):
    assert json.loads((folder / "vitruvian.json").read_text())["digest"] in push(folder, "acme/m", "-n").out
    weights = next(folder.glob("*.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    ran = push(folder, "acme/m", "-n")
    assert (ran.code, ran.out) == (6, "")
    assert "1 tensors of" in ran.err


def test_a_changed_file_is_not_sent_as_verified(push, convert, folder):
    """`convert verify` refuses it too; a change that is meant is recorded by `convert assets`."""
    path = folder / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "temperature": 0.5}))
    ran = push(folder, "acme/m", "-n")
    assert (ran.code, ran.out) == (6, "")
    assert f"generation_config.json of {folder}: not what its vitruvian.json says" in ran.err
    assert convert("assets", folder, "--from", folder).code == 0
    assert push(folder, "acme/m", "-n").code == 0


def test_a_dry_run_sends_nothing_and_needs_no_token(hub, push, converted, tmp_path):
    dry = push(converted, "acme/m", "-n", "--json", "--base-model", "acme/base", HF_TOKEN="")
    text = push(converted, "acme/m", "-n", HF_TOKEN="", HF_HUB_OFFLINE="1")
    assert dry.code == text.code == 0
    assert hub.log == []
    facts = json.loads(dry.out)
    listed = {file["name"]: file for file in facts["files"]}
    digests = hashes(converted)
    assert {name: listed[name]["sha256"] for name in digests} == digests
    assert all(f"{digest}  " in text.out and name in text.out for name, digest in digests.items())
    assert "private if it is new" in text.out

    assert push(converted, "acme/m", "--base-model", "acme/base").code == 0
    sent_files = hub.store.content("acme/m")
    assert sent_files.pop("README.md").decode() == facts["card"]
    del sent_files[".gitattributes"], listed["README.md"]
    assert {name: (len(content), hashlib.sha256(content).hexdigest()) for name, content in sent_files.items()} == {
        name: (file["bytes"], file["sha256"]) for name, file in listed.items()
    }


# --- interruptions ---------------------------------------------------------------------------------------------------


def test_a_line_cut_in_an_object_costs_that_object_only(hub, push, converted):
    hub.faults.append(Fault("PUT /lfs", drop_after=50_000))
    ran = push(converted, "acme/m")
    assert ran.code == 0
    assert sorted(sent(hub).values()) == [1] * (len(sent(hub)) - 1) + [2]
    assert "X-Amz" not in ran.err
    assert "/lfs/" not in ran.err, "addresses of objects are signed"


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1], ids=lambda number: number.name
)
def test_a_stopped_push_goes_on_where_it_stopped(hub, push, env, converted, tmp_path, number):
    release, temporary = threading.Event(), tmp_path / "temporary"
    temporary.mkdir()
    shards = hashes(converted)
    stuck = next(digest for name, digest in shards.items() if name.startswith("model-"))
    hub.faults.append(Fault(f"PUT /lfs/{stuck}", stall=(50_000, release)))
    process = spawn(CONVERT, "push", converted, "acme/m", env=env | {"TMPDIR": str(temporary)})
    others = {digest for name, digest in shards.items() if name.startswith("model-") and name.endswith("safetensors")}
    until(lambda: sent(hub).keys() | {stuck} >= others)
    began = time.monotonic()
    process.send_signal(number)
    stopped = finish(process)
    assert time.monotonic() - began < 30, "it does not wait for what is on its way"
    release.set()
    until(lambda: stuck in sent(hub))  # it is noted when it ends
    assert "acme/m" not in {name for name, repo in hub.store.repos.items() if len(repo.commits) > 1}
    if number != signal.SIGKILL:
        assert stopped.code == 75
        assert f"hint: convert push {converted} acme/m" in stopped.err
        assert list(temporary.iterdir()) == []
    hub.log.clear()
    assert push(converted, "acme/m").code == 0
    assert sent(hub) == {stuck: 1}
    assert hub.store.content("acme/m")["config.json"] == (converted / "config.json").read_bytes()


def test_xet_does_not_send_known_chunks_again(hub, push, converted, tmp_path):
    hub.cas = Cas(tmp_path / "cas")
    hub.faults.append(Fault("POST .*/commit/", status=400))
    failed = push(converted, "acme/m", HF_HUB_DISABLE_XET="0")
    assert failed.code == 2
    size = sum(path.stat().st_size for path in (tmp_path / "cas").rglob("xorbs/default.*"))
    assert size > 0
    assert push(converted, "acme/m", HF_HUB_DISABLE_XET="0").code == 0
    assert sum(path.stat().st_size for path in (tmp_path / "cas").rglob("xorbs/default.*")) == size


def test_a_push_through_xet_can_be_stopped(hub, push, env, converted, tmp_path):
    hub.cas, release = Cas(tmp_path / "cas"), threading.Event()
    hub.faults.append(Fault("POST .*/commit/", stall=(10, release)))
    process = spawn(CONVERT, "push", converted, "acme/m", env=env | {"HF_HUB_DISABLE_XET": "0"})
    until(lambda: hub.faults[0].times == 0)
    process.send_signal(signal.SIGTERM)
    assert finish(process, 60).code == 75
    release.set()
    assert push(converted, "acme/m", HF_HUB_DISABLE_XET="0").code == 0


def test_a_busy_hub_is_asked_again(hub, push, converted):
    hub.faults += [Fault("POST .*/preupload/", status=503), Fault("PUT /lfs", status=500), Fault("/batch", status=429)]
    assert push(converted, "acme/m").code == 0
    assert len(hub.asked("POST .*/preupload/")) == 2


# --- branches and pull requests --------------------------------------------------------------------------------------


def test_a_branch_is_made_and_used(hub, push, converted):
    for _ in range(2):
        assert push(converted, "acme/m", "--revision", "step/100").code == 0
        assert "config.json" in hub.store.content("acme/m", "step/100")
        assert set(hub.store.content("acme/m")) == {".gitattributes"}
    assert len(hub.asked("PUT /lfs")) == len(sent(hub))


@pytest.mark.parametrize("xet", [False, True])
def test_a_pull_request_holds_all_and_main_nothing(hub, push, converted, tmp_path, xet):
    hub.cas = Cas(tmp_path / "cas")
    ran = push(converted, "acme/m", "--create-pr", "--json", HF_HUB_DISABLE_XET="0" if xet else "1")
    assert ran.code == 0, ran.err
    facts = json.loads(ran.out)
    assert facts["revision"] == "refs/pr/1"
    assert facts["url"].endswith("/acme/m/discussions/1")
    assert set(hub.store.content("acme/m")) == {".gitattributes"}
    content = hub.store.content("acme/m", "refs/pr/1")
    assert all(content[path.name] == path.read_bytes() for path in converted.iterdir())


def test_an_interrupted_pull_request_is_gone_on_with(hub, push, converted):
    hub.faults.append(Fault("POST .*/commit/", status=503))
    ran = push(converted, "acme/m", "--create-pr")
    assert ran.code == 8
    assert ran.err.splitlines()[-1] == f"hint: convert push {converted} acme/m --revision refs/pr/1"
    assert push(converted, "acme/m", "--revision", "refs/pr/1").code == 0
    assert list(hub.store.repos["acme/m"].pulls) == [1]
    assert "config.json" in hub.store.content("acme/m", "refs/pr/1")
    assert len(hub.asked("PUT /lfs")) == len(sent(hub))


def test_no_pull_request_without_a_difference(hub, push, converted):
    assert push(converted, "acme/m").code == 0
    ran = push(converted, "acme/m", "--create-pr")
    assert ran.code == 0
    assert "no pull request is opened" in ran.err
    assert not hub.store.repos["acme/m"].pulls


def test_create_pr_and_a_branch_exclude_each_other(hub, push, converted):
    assert push(converted, "acme/m", "--create-pr", "--revision", "dev").code == 2
    assert hub.log == []


# --- memory ----------------------------------------------------------------------------------------------------------


def large(folder):
    """A Llama of 200 MB, its weights one hole."""
    hidden, ffn, layers, vocab = 2048, 5632, 2, 1000
    block = {f"self_attn.{letter}_proj": [hidden, hidden] for letter in "qkvo"}
    block |= {"mlp.gate_proj": [ffn, hidden], "mlp.up_proj": [ffn, hidden], "mlp.down_proj": [hidden, ffn]}
    block |= {"input_layernorm": [hidden], "post_attention_layernorm": [hidden]}
    shapes = {f"model.layers.{layer}.{name}": shape for layer in range(layers) for name, shape in block.items()}
    shapes |= {"model.embed_tokens": [vocab, hidden], "lm_head": [vocab, hidden], "model.norm": [hidden]}
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * math.prod(shape)
        header[f"{name}.weight"] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    folder.mkdir()
    with (folder / "model.safetensors").open("wb") as handle:
        handle.write(len(text).to_bytes(8, "little") + text)
        handle.truncate(8 + len(text) + end)
    config = {"hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers, "vocab_size": vocab}
    config |= {"num_attention_heads": 16, "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 1e4}
    config |= {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config | {"hidden_act": "silu", "tie_word_embeddings": False}))
    return folder


def test_memory_does_not_grow_with_the_files(hub, env, converted, tmp_path):
    folder = large(tmp_path / "large")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(converted / name, folder)
    code = CONVERT.replace("cli.main()", "try:\n    cli.main()\nfinally:\n    print(open('/proc/self/status').read())")
    ran = finish(spawn(code, "push", folder, "acme/m", env=env))
    assert ran.code == 0, ran.err
    size = (folder / "model.safetensors").stat().st_size
    assert size > 200 * 10**6
    assert int(re.search(r"VmHWM:\s+(\d+) kB", ran.out)[1]) < 80_000
    repo = hub.store.repos["acme/m"]
    assert repo.commits[repo.refs["main"]]["model.safetensors"].size == size
