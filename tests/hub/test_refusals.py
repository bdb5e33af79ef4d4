"""What `convert push` does not do, and what it says: exit 2 where the user has to change something, 8 where not."""

from __future__ import annotations

import json
import re

import pytest

from tests.hub.conftest import CONVERT, finish, spawn
from tests.hub.server import TOKEN, Fault


@pytest.mark.parametrize("status", [500, 503, 429])
def test_a_hub_that_does_not_work_is_exit_8(hub, push, converted, status):
    hub.faults.append(Fault("POST /api/repos/create", status=status))
    ran = push(converted, "acme/m", "--public", "--revision", "a b", "--base-model", "acme/base")
    assert ran.code == 8
    assert f"hint: convert push {converted} acme/m --public --revision 'a b' --base-model acme/base\n" in ran.err
    assert "PUT" not in {method for method, *_ in hub.log}


def test_an_address_of_the_storage_that_has_expired_is_exit_8_and_not_shown(hub, push, converted):
    hub.faults.append(Fault("PUT /lfs", status=403, xml="<Error><StringToSign>secret</StringToSign></Error>"))
    ran = push(converted, "acme/m")
    assert ran.code == 8
    assert "the storage of the Hub refuses a file of acme/m (403)" in ran.err
    assert "secret" not in ran.err
    assert push(converted, "acme/m").code == 0


def test_a_hub_that_is_not_there_is_exit_8(push, converted, env):
    ran = push(converted, "acme/m", HF_ENDPOINT="http://127.0.0.1:9")
    assert ran.code == 8
    assert "acme/m cannot be reached" in ran.err
    assert "Connection refused" in ran.err
    assert "hint: convert push" in ran.err


@pytest.mark.parametrize(
    ("repo", "changes", "message", "hint"),
    [
        ("acme/m", {"HF_TOKEN": "hf_of_somebody"}, "does not accept the token", "hf auth login"),
        ("acme/m", {"HF_TOKEN": ""}, "no token for the Hub is known", "hf auth login"),
        ("acme/m", {"HF_TOKEN": "hf_of_the\x01test"}, "characters that no token has", "hf auth login"),
        ("others/m", {}, "may not write to others/m", "hf auth whoami"),
        ("acme/m", {"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set", "unset HF_HUB_OFFLINE"),
        ("acme/../m", {}, "is not a valid name on the Hub", ""),
        ("acme/m--n", {}, "is not a valid name on the Hub", ""),
        ("m", {}, "does not say whose", "convert push OUT YOUR-NAME/m"),
    ],
)
def test_what_the_user_has_to_change_is_exit_2(hub, push, converted, repo, changes, message, hint):
    ran = push(converted, repo, **changes)
    assert ran.code == 2, ran.err
    assert message in ran.err
    assert hint in ran.err
    assert ran.err.count("error:") == 1
    for token in (TOKEN, *changes.values()):
        assert not token.startswith("hf_") or token not in ran.err + ran.out
    assert not hub.store.repos


def test_a_token_from_the_login_is_found(hub, push, converted, tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home/token").write_text(TOKEN)
    assert push(converted, "tester/m", HF_TOKEN="").code == 0


def test_a_damaged_folder_is_not_sent(hub, push, folder):
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    ran = push(folder, "acme/m")
    assert ran.code == 6
    assert "1 tensors of" in ran.err
    assert hub.log == []


def test_changed_settings_are_not_sent(hub, push, folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    ran = push(folder, "acme/m")
    assert ran.code == 6
    assert "norm_epsilon" in ran.err
    assert hub.log == []


def test_a_folder_without_a_manifest_is_sent_with_a_note(hub, push, folder):
    (folder / "vitruvian.json").unlink()
    ran = push(folder, "acme/m")
    assert ran.code == 0
    assert "note:" in ran.err
    assert "nothing to compare" in ran.err


def test_problems_that_the_checks_find_are_listed_and_nothing_is_sent(hub, env, converted):
    code = CONVERT.replace("cli.main()", "publishing.problems_of = lambda folder: ['no EOS', 'NaN']\ncli.main()")
    code = "from converters.library import publishing\n" + code
    for options in (["-n"], []):
        ran = finish(spawn(code, "push", converted, "acme/m", *options, env=env))
        assert ran.code == 5
        assert "not fit to be published: no EOS; NaN" in ran.err
        assert bool(ran.out) == bool(options)
    assert hub.log == []


def test_a_megatron_folder_says_what_to_do(push, converted, hub):
    ran = push(converted.parent / "megatron", "acme/m")
    assert ran.code == 2
    assert f"hint: convert to huggingface {converted.parent / 'megatron'} OUT" in ran.err
    assert hub.log == []


def test_private_weights_do_not_go_into_a_public_repository(hub, push, converted):
    hub.store.create("acme/m", private=False)
    ran = push(converted, "acme/m")
    assert ran.code == 5
    assert "exists and is public" in ran.err
    assert not hub.asked("PUT|/commit/|/branch/")
    assert push(converted, "acme/m", "--public").code == 0


def test_weights_of_another_model_are_not_mixed_with_ours(hub, push, converted):
    repo = hub.store.create("acme/m", private=True)
    tree = dict(repo.commits[repo.refs["main"]], **{"notes.txt": hub.store.put(b"kept")})
    for name in ("model.safetensors", "model-00001-of-00009.safetensors", "model-00002-of-00009.safetensors"):
        tree[name] = hub.store.put(b"old")
    repo.commit("main", "before", tree)
    ran = push(converted, "acme/m")
    assert ran.code == 5
    hint = "hf repos delete-files acme/m 'model-*-of-00009.safetensors' model.safetensors\n"
    assert f"hint: {hint}" in ran.err
    assert not hub.asked("PUT|/commit/")
    repo.commit("main", "cleaned", {name: entry for name, entry in tree.items() if not name.startswith("model")})
    ran = push(converted, "acme/m")
    assert ran.code == 0
    assert re.search("also holds 1 files that are not in .*: notes.txt\n", ran.err)
    assert hub.store.content("acme/m")["notes.txt"] == b"kept"


@pytest.mark.parametrize(
    ("names", "why"),
    [
        (["adapter_config.json"], "the base of an adapter"),
        (["adapter_config.json", "adapter_model.bin"], "the base of an adapter"),
        (
            ["adapter_config.json", "adapter_model.safetensors"],
            "add the adapter to the model, and frameworks would mix",
        ),
        (["hf_quant_config.json"], "take the weights for quantized ones"),
        (["additional_chat_templates/tool.jinja", "chat_template.json"], "a chat template of another model"),
        (["added_tokens.json", "special_tokens_map.json"], "tokens of another tokenizer"),
    ],
)
def test_files_that_would_be_loaded_with_ours_are_named_all(hub, push, converted, names, why):
    """Without the command that names all of them, the push that follows it would leave an adapter_config.json."""
    repo = hub.store.create("acme/m", private=True)
    own = repo.commits[repo.refs["main"]]
    harmless = {f"{folder}/{name}": hub.store.put(b"old") for name in names for folder in ("checkpoint-5", "a/b")}
    repo.commit("main", "before", own | harmless | {name: hub.store.put(b"old") for name in names})
    ran = push(converted, "acme/m")
    assert ran.code == 5
    assert f"acme/m holds {', '.join(sorted(names))}, which {converted} does not: " in ran.err
    assert why in ran.err
    assert f"hint: hf repos delete-files acme/m {' '.join(sorted(names))}\n" in ran.err
    assert not hub.asked("PUT|/commit/")
    repo.commit("main", "cleaned", own | harmless)
    ran = push(converted, "acme/m")
    assert ran.code == 0
    assert f"also holds {len(harmless)} files that are not in {converted}: a/b/{min(names)}, " in ran.err


@pytest.mark.parametrize("name", ["config.json", "model-00001"])
def test_what_did_not_arrive_is_noticed(hub, push, converted, name):
    """A .gitignore on the Hub makes it skip files without a word."""
    hub.ignored = name
    ran = push(converted, "acme/m")
    assert ran.code == 6
    assert re.search(f"{name}.* is missing", ran.err)


@pytest.mark.parametrize("name", ["config.json", "model-00001"])
def test_what_arrived_otherwise_is_noticed(hub, push, converted, name):
    hub.altered = name
    ran = push(converted, "acme/m")
    assert ran.code == 6
    assert re.search(f"{name}.* has another hash", ran.err)
