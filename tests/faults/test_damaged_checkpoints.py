"""Checkpoints that are incomplete, mixed up or altered, and places that have no room: each is noticed."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from converters.move.descriptors import Descriptors
from converters.prove.archive_crc import amend
from formats.checkpoint import MANIFEST
from formats.errors import OutputError, SourceError
from formats.layout.placed import Placed
from formats.registry import open_checkpoint
from tests.conftest import Ran
from tests.faults.dcp_tools import refused, with_config
from tests.models import files

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def make_run(model: Callable[..., Path], convert: Callable[..., Ran], tmp_path: Path) -> Callable[..., Path]:
    """`make_run("tp2 pp2", name="one")`: a Megatron folder of that topology, to be damaged."""

    def make(topology: str, name: str = "m", family: str = "llama", *extra: object, **changes: Any) -> Path:
        options = [word for part in topology.split() for word in (f"--{part[:2]}", part[2:])]
        source = model(family, "float32", **changes)
        assert convert("hf2megatron", source, tmp_path / name, *options, *extra, "-q").code == 0
        return tmp_path / name

    return make


def rank(root: Path, name: str, iteration: str = "release") -> Path:
    return root / iteration / f"mp_rank_{name}" / "model_optim_rng.pt"


def held(root: Path, key: str, file: Path) -> Placed:
    """A physical tensor of one file."""
    return next(
        placed for placed in open_checkpoint(root).fragments() if placed.key == key and placed.fragment.path == file
    )


def poke(placed: Placed, index: int, value: float) -> float:
    """Overwrite one float32 element of a physical tensor, as if it was saved so; returns what was there."""
    offset = placed.fragment.offset + 4 * index
    with placed.fragment.path.open("r+b") as file:
        file.seek(offset)
        before = float(np.frombuffer(file.read(4), np.float32)[0])
        file.seek(offset)
        file.write(np.float32(value).tobytes())
    if placed.fragment.path.suffix == ".pt":
        amend(placed.fragment.path, [(offset, 4)])
    return before


# --- ranks -----------------------------------------------------------------------------------------------------------

TOPOLOGIES = {"tp2 pp1": ["00", "01"], "tp1 pp2": ["00_000", "00_001"],
              "tp2 pp2": ["00_000", "01_000", "00_001", "01_001"]}  # fmt: skip
RANKS = [(topology, name) for topology, names in TOPOLOGIES.items() for name in names]


@pytest.mark.parametrize(("topology", "name"), RANKS)
@pytest.mark.parametrize("command", ["inspect", "digest"])
def test_a_missing_rank_folder_is_noticed(make_run, convert, topology, name, command):
    root = make_run(topology)
    shutil.rmtree(rank(root, name).parent)
    refused(convert(command, root), 3, root / "release")


@pytest.mark.parametrize(("topology", "name"), RANKS)
def test_a_missing_rank_file_is_noticed(make_run, convert, topology, name):
    root = make_run(topology)
    rank(root, name).unlink()
    refused(convert("inspect", root), 3, rank(root, name).parent)


@pytest.mark.parametrize("left", [0.0, 0.3, 0.999])
@pytest.mark.parametrize(("topology", "name"), RANKS)
def test_a_truncated_rank_file_is_noticed(make_run, convert, topology, name, left):
    root = make_run(topology)
    os.truncate(rank(root, name), int(left * rank(root, name).stat().st_size))
    refused(convert("inspect", root), 3, rank(root, name))


def swap(first: Path, second: Path) -> None:
    first.rename(first.with_suffix(".tmp"))
    second.rename(first)
    first.with_suffix(".tmp").rename(second)


@pytest.mark.parametrize(
    ("topology", "first", "second"),
    [("tp2 pp1", "00", "01"), ("tp2 pp2", "00_001", "01_001"), ("tp2 pp2", "00_000", "01_001"),
     ("tp1 pp2", "00_000", "00_001"), ("tp1 pp4", "00_001", "00_002"), ("tp2 pp4", "01_001", "01_002"),
     ("tp4 pp1", "02", "03")],
)  # fmt: skip
def test_swapped_ranks_are_noticed(make_run, convert, topology, first, second):
    root = make_run(topology)
    swap(rank(root, first), rank(root, second))
    refused(convert("inspect", root), 3, root)


def test_verify_refuses_what_is_no_checkpoint(make_run, convert):
    """Each file of another program's run is sound by itself; the run is not."""
    root = make_run("tp2 pp2")
    for note in root.rglob(MANIFEST):
        note.unlink()
    assert "each with its CRC-32" in convert("verify", root).out
    swap(rank(root, "00_001"), rank(root, "01_001"))
    refused(convert("verify", root), 3, root)
    swap(rank(root, "00_001"), rank(root, "01_001"))
    assert convert("verify", root).code == 0


@pytest.mark.parametrize(
    ("topology", "copied", "lost"),
    [("tp2 pp1", "00", "01"), ("tp2 pp2", "00_000", "01_000"), ("tp1 pp4", "00_001", "00_002"),
     ("tp4 pp1", "01", "02")],
)  # fmt: skip
def test_a_rank_in_the_place_of_another_is_noticed(make_run, convert, topology, copied, lost):
    root = make_run(topology)
    shutil.copyfile(rank(root, copied), rank(root, lost))
    # rank 0 in both files of tp2: so do some converters write, and only what they hold can tell
    refused(convert("inspect", root), 3, root, *(["was copied over"] if topology == "tp2 pp1" else []))


@pytest.mark.parametrize(
    ("change", "code", "parts"),
    [
        (lambda content: content.update(ema=content["model"]), 5, ("holds tensors under 'ema' beside its model",)),
        (lambda content: content.update(extra=[{"of": content["model"]}]), 5, ("holds tensors under 'extra'",)),
        (
            lambda content: setattr(content["args"], "padded_vocab_size", 999),
            3,
            ("padded_vocab_size = 999", "have 256 rows"),
        ),
        (lambda content: content.update(torch_rng_state=torch.ones(9), note={"runs": [3]}, time=torch.ones(1)), 0, ()),
    ],
    ids=["a second model", "within lists", "another vocabulary", "no model"],
)
def test_what_a_file_holds_besides_its_model(make_run, convert, tmp_path, change, code, parts):
    root = make_run("tp2 pp1")
    for file in root.rglob("model_optim_rng.pt"):
        stored = torch.load(file, weights_only=False)
        change(stored)
        torch.save(stored, file)
    (root / "release" / MANIFEST).unlink()
    ran = convert("megatron2hf", root, tmp_path / "hf")
    assert ran.code == code, ran.err
    assert all(part in ran.err for part in parts), ran.err


def test_ranks_of_two_iterations_are_noticed(make_run, convert):
    first, second = (
        make_run("tp2 pp2", "one", "llama", "--iteration", 100),
        make_run("tp2 pp2", "two", "llama", "--iteration", 200),
    )
    shutil.copyfile(rank(second, "01_001", "iter_0000200"), rank(first, "01_001", "iter_0000100"))
    refused(convert("inspect", first), 3, first, "100", "200")


@pytest.mark.parametrize("version", [None, 0, 1.0, 1])
def test_an_older_order_of_query_key_and_value_is_noticed(make_run, convert, version):
    import torch

    path = rank(make_run("tp1 pp1"), "00")
    stored = torch.load(path, weights_only=False)
    stored.pop("checkpoint_version")
    torch.save(stored if version is None else stored | {"checkpoint_version": version}, path)
    refused(convert("inspect", path.parents[2]), 4, path, f"checkpoint version {version or 0} orders query, key")


@pytest.mark.parametrize("topology", ["tp2 pp1", "tp1 pp2"])
@pytest.mark.parametrize(
    "changes",
    [{"hidden_size": 128}, {"intermediate_size": 128}, {"num_hidden_layers": 8}, {"vocab_size": 400},
     {"num_key_value_heads": 8}, {"tie_word_embeddings": True}, {"rms_norm_eps": 1e-5}, {"max_position_embeddings": 64},
     {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}],
    ids=lambda changes: next(iter(changes)),
)  # fmt: skip
def test_a_shard_of_another_model_is_noticed(make_run, convert, topology, changes):
    first, second = make_run(topology, "one"), make_run(topology, "two", "llama", **changes)
    last = TOPOLOGIES[topology][-1]
    shutil.copyfile(rank(second, last), rank(first, last))
    refused(convert("digest", first), 3, first)


def test_a_shard_of_a_twin_is_noticed_by_its_norms(make_run, convert):
    """Same settings, other weights: across tensor ranks the norms tell."""
    first, second = make_run("tp2 pp1", "one"), make_run("tp2 pp1", "two", "llama3", rope_parameters=None)
    for file in rank(second, "01"), rank(second, "00"):
        root = file.parents[2]
        poke(held(root, "decoder.final_layernorm.weight", file), 5, 9.0)
    shutil.copyfile(rank(second, "01"), rank(first, "01"))
    refused(convert("digest", first), 6, "decoder.final_layernorm.weight differs", rank(first, "00"), rank(first, "01"))


# --- altered bytes ---------------------------------------------------------------------------------------------------

KEYS = ["embedding.word_embeddings.weight", "decoder.layers.0.self_attention.linear_qkv.weight",
        "decoder.layers.1.mlp.linear_fc1.weight", "decoder.layers.1.mlp.linear_fc2.weight",
        "decoder.layers.0.self_attention.linear_proj.weight"]  # fmt: skip
LOGICAL = {"word_embeddings": "embedding", "linear_qkv": "query.0", "fc1": "gate.1", "fc2": "down.1",
           "linear_proj": "output.0"}  # fmt: skip


@pytest.mark.parametrize("bit", [0, 31])
@pytest.mark.parametrize("key", KEYS)
def test_an_altered_bit_is_seen(make_run, convert, tmp_path, key, bit):
    root = make_run("tp2 pp2")
    shutil.copytree(root, tmp_path / "before")
    before = convert("digest", root).out.split()[0]
    assert convert("verify", root).code == 0
    place = held(root, key, rank(root, "00_000")).fragment
    with place.path.open("r+b") as file:
        file.seek(place.offset + bit // 8)
        byte = file.read(1)[0]
        file.seek(place.offset + bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))
    name = next(logical for part, logical in LOGICAL.items() if part in key)
    for argv in (["digest", root], ["diff", root, tmp_path / "before"], ["verify", tmp_path / "before", root]):
        refused(convert(*argv), 3, f"{place.path} is damaged", f"({key}) have the CRC-32")
    refused(convert("verify", root), 6, root, name)
    amend(place.path, [(place.offset, 4)])  # saved so
    assert convert("digest", root).out.split()[0] != before
    refused(convert("verify", root), 6, root, name)
    refused(convert("verify", root, tmp_path / "before"), 6, name)
    ran = convert("diff", root, tmp_path / "before", "--json")
    assert ran.code == 6
    (different,) = json.loads(ran.out)["tensors"]
    assert (different["name"], different["elements"]) == (name, 1)


def test_altered_padding_is_no_difference(make_run, convert):
    """The rows behind the vocabulary belong to no tensor."""
    root = make_run("tp2 pp1")
    embedding = held(root, KEYS[0], rank(root, "01"))
    assert poke(embedding, 127 * 64 + 63, 1.0) == 0.0
    assert convert("verify", root).code == 0


def test_an_altered_safetensors_file_is_seen(make_run, convert, tmp_path):
    assert convert("megatron2hf", make_run("tp2 pp1"), tmp_path / "hf").code == 0
    place = next(placed for placed in open_checkpoint(tmp_path / "hf").fragments() if "norm" in placed.key)
    poke(place, 3, 17.5)
    refused(convert("verify", tmp_path / "hf"), 6, tmp_path / "hf")


# --- what travels with a source contradicts it ------------------------------------------------------------------------


@pytest.fixture
def written(model: Callable[..., Path], convert: Callable[..., Ran], tmp_path: Path) -> Callable[..., Path]:
    """`written(family)`: what `convert hf2hf` writes of a model, to be damaged."""

    def make(family: str, **changes: Any) -> Path:
        assert convert("hf2hf", model(family, "float32", **changes), tmp_path / "src", "-q").code == 0
        return tmp_path / "src"

    return make


def configure(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def contradicted(convert: Callable[..., Ran], source: Path, *parts: object, verify: bool = True) -> str:
    """A source is refused by every way to write it, before anything is; gives the hint."""
    assert not verify or convert("verify", source).code == 6
    ways = [(), ("-n",), ("--part", "1/2")]
    for number, options in enumerate(ways):
        ran = convert("hf2fsdp" if number else "hf2hf", source, source.with_name("out"), *options)
        refused(ran, 6, source, "vitruvian.json", *parts)
        assert [path.name for path in source.parent.iterdir()] == [source.name]
    return ran.err.partition("hint: ")[2].strip()


@pytest.mark.parametrize(
    ("command", "options", "folder"),
    [("hf2hf", [], "."), ("hf2fsdp", [], "."), ("hf2megatron", ["--iteration", 3], "huggingface")],
)
def test_a_tokenizer_that_is_not_what_was_written_is_noticed(model, convert, tmp_path, command, options, folder):
    """And a template, a generation config, code; a card is the user's own. One that is meant can be recorded."""
    source, out = Path(shutil.copytree(model(), tmp_path / "hf")), tmp_path / "out"
    small = {
        "tokenizer.json": "{}",
        "chat_template.jinja": "{{ 1 }}",
        "additional_chat_templates/tool.jinja": "{{ 2 }}",
        "custom_generate/generate.py": "pass",
    }
    for name, text in {**small, "README.md": "Mine"}.items():
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(text)
    assert convert(command, source, out, *options).code == 0
    (out / folder / "README.md").write_text("Ours")
    assert convert("verify", out).code == 0
    for name in (*small, "config.json"):
        path = out / folder / name
        was = path.read_bytes()
        path.write_bytes(was + b" ")
        refused(convert("verify", out), 6, f"{name} of {out} is not what vitruvian.json says", "convert assets")
        path.write_bytes(was)
    (out / folder / "tokenizer.json").unlink()
    ran = convert("verify", out, "--json")
    lost = "tokenizer.json" if folder == "." else f"../{folder}/tokenizer.json"
    assert (ran.code, json.loads(ran.out)["files"]) == (6, [lost])
    (out / folder / "config.json").write_text((out / folder / "config.json").read_text() + " ")
    ran = convert("verify", out)
    place = out if folder == "." else out / folder
    refused(ran, 6, f"`convert assets {place} --from {place}`")
    for _ in range(2):
        assert convert("assets", place, "--from", place).code == 0
        assert convert("verify", out).code == 0


def test_a_manifest_of_an_earlier_version_names_no_small_files(model, convert, tmp_path):
    assert convert("hf2hf", model(), tmp_path / "out").code == 0
    path = tmp_path / "out/vitruvian.json"
    path.write_text(
        json.dumps({name: value for name, value in json.loads(path.read_text()).items() if name != "files"})
    )
    ran = convert("verify", tmp_path / "out")
    assert (ran.code, "of an earlier version, names no small files" in ran.err) == (0, True), ran.err


@pytest.mark.parametrize("fault", ["another name", "one less"])
def test_names_that_a_manifest_lacks_are_noticed(written, convert, fault):
    """Of a model without a table, whose names no settings tell."""
    from safetensors.numpy import load_file, save_file

    source = written("gpt_neox", attention_bias=False)
    config = (source / "config.json").read_text()
    (source / "config.json").write_text(config.replace("{", '{"rotary_pct": 0.5, ', 1))
    refused(convert("verify", source), 6, "config.json of", "not what vitruvian.json says")
    (source / "config.json").write_text(config)
    assert convert("verify", source).code == 0
    weights = load_file(source / "model.safetensors")
    name = next(key for key in weights if "layers.0.attention" in key)
    value = weights.pop(name)
    weights |= {name.replace("layers.0.", "layers.0>"): value} if fault == "another name" else {}
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    hint = contradicted(convert, source, f"such as {name}", f"{1 + (fault != 'one less')} tensors")
    (source / "vitruvian.json").unlink()
    assert str(source / "vitruvian.json") in hint
    argv = ("hf2hf", source, source.with_name("out"))
    refused(convert(*argv), 3, "not one whole model", name)
    assert convert(*argv, "--allow-missing", "gpt_neox.layers.*").code == 0


def test_a_table_that_no_longer_fits_is_noticed(written, convert):
    """Its tensors would go under other names, and nothing of the manifest be compared."""
    source = written("llama")
    configure(source, model_type="mlama")
    hint = contradicted(convert, source, "is of a model that a table describes, 'llama'", "'mlama'")
    assert "--verbatim" in hint
    assert convert("hf2hf", source, source.with_name("out"), "--verbatim").code == 0


@pytest.mark.parametrize(
    ("family", "changes", "says", "way"),
    [
        ("llama", {"rms_norm_eps": 1e-5}, "norm_epsilon: 1e-05 | 1e-06", "norm_epsilon=1e-05"),
        ("llama", {"max_position_embeddings": 4096}, "max_positions: 4096 | ", "max_positions=4096"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
            "rope_scaling.rope_type: 'linear' | None; rope_scaling.factor: 2.0 | None",
            """'rope_scaling={"rope_type": "linear", "factor": 2.0}'""",
        ),
        ("gpt_oss", {"swiglu_limit": 6.0}, "own.swiglu_limit: 6.0 | 7.0", None),
        (
            "llama",
            {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": None},
            "family: 'mistral' | 'llama'",
            None,
        ),
        ("gpt_neox", {"vocab_size": 210}, "vocab: 210 | 211", "vocab=210"),
    ],
    ids=["epsilon", "positions", "rope", "own", "family", "verbatim"],
)
def test_settings_that_a_manifest_contradicts_are_noticed(written, convert, family, changes, says, way):
    """Who means them says so, and the output says the same."""
    source = written(family, **({"attention_bias": False} if family == "gpt_neox" else {}))
    configure(source, **changes)
    hint = contradicted(convert, source, says)
    manifest = source / "vitruvian.json"
    assert hint == f"if that is meant: {f'--set {way}, or ' if way else ''}remove {manifest}"
    if way is None:
        manifest.unlink()
    options = ["--set", way.strip("'")] if way else []
    options += ["--allow-missing", "*"] if family == "gpt_neox" else []  # rows that no token of the config has
    ran = convert("hf2hf", source, source.with_name("out"), *options)
    assert ran.code == 0, ran.err
    assert convert("verify", source.with_name("out")).code == 0
    config = json.loads((source.with_name("out") / "config.json").read_text())
    assert config.items() >= changes.items()


def test_what_no_manifest_records_may_change(written, convert):
    """Tokens that end an answer, say, are the user's own."""
    source = written("llama")
    configure(source, eos_token_id=[2, 7], use_cache=False, transformers_version="9.9")
    assert convert("hf2fsdp", source, source.with_name("out")).code == 0


# --- replicas --------------------------------------------------------------------------------------------------------

NORM = "decoder.layers.0.mlp.linear_fc1.layer_norm_weight"


@pytest.fixture
def diverged(make_run: Callable[..., Path]) -> tuple[Path, float]:
    """Four tensor ranks; the same norm element is 1 more on rank 2 and 3 more on rank 3. Gives the first copy's."""
    root = make_run("tp4 pp1")
    value = poke(held(root, NORM, rank(root, "00")), 7, 0.5)
    for name, difference in (("01", 0.0), ("02", 1.0), ("03", 3.0)):
        assert poke(held(root, NORM, rank(root, name)), 7, 0.5 + difference) == value
    (root / "release/vitruvian.json").unlink()  # a training run has none
    return root, 0.5


def norm_of(folder: Path) -> float:
    from safetensors.numpy import load_file

    return float(load_file(folder / "model.safetensors")["model.layers.0.post_attention_layernorm.weight"][7])


DIVERGED = "decoder.layers.0.mlp.linear_fc1.layer_norm_weight"


@pytest.mark.parametrize("argv", [("digest",), ("megatron2hf", "OUT"), ("reshard", "OUT", "--tp", 2)])
def test_diverged_norms_are_noticed(diverged, convert, tmp_path, argv):
    root, _ = diverged
    command, *rest = [tmp_path / "out" if word == "OUT" else word for word in argv]
    ran = convert(command, root, *rest, "--replicas", "verify")
    refused(ran, 6, DIVERGED, "2 of 3", "tp rank 3", "by up to 3", rank(root, "00"), rank(root, "03"),
            "--replicas first", "--replicas mean")  # fmt: skip
    assert not (tmp_path / "out").exists()


def test_diverged_norms_are_noticed_by_default(diverged, convert):
    refused(convert("digest", diverged[0]), 6, DIVERGED)


@pytest.mark.parametrize(("policy", "difference"), [("first", 0.0), ("mean", 1.0)])
def test_diverged_norms_can_be_decided(diverged, convert, tmp_path, policy, difference):
    root, first = diverged
    assert convert("megatron2hf", root, tmp_path / "hf", "--replicas", policy).code == 0
    assert norm_of(tmp_path / "hf") == first + difference
    assert convert("reshard", root, tmp_path / "again", "--tp", 2, "--replicas", policy).code == 0
    assert convert("digest", tmp_path / "again").out.split()[0] == convert("digest", tmp_path / "hf").out.split()[0]
    assert convert("digest", root, "--replicas", policy).code == 0


@pytest.mark.parametrize("policy", ["first", "mean"])
def test_equal_copies_give_the_same_bytes_under_every_policy(make_run, convert, tmp_path, policy):
    root = make_run("tp4 pp1")
    assert convert("megatron2hf", root, tmp_path / "one").code == 0
    assert convert("megatron2hf", root, tmp_path / "two", "--replicas", policy).code == 0
    assert files(tmp_path / "one") == files(tmp_path / "two")


@pytest.mark.parametrize(("value", "distance"), [(float("nan"), "inf"), (float("inf"), "inf"), (-0.0, "0")])
def test_copies_that_differ_in_odd_values_are_noticed(make_run, convert, value, distance):
    root = make_run("tp2 pp1")
    for name, number in (("00", 0.0), ("01", value)):
        poke(held(root, NORM, rank(root, name)), 7, number)
    refused(convert("digest", root), 6, f"by up to {distance} between")


def test_a_diverged_copy_of_a_tied_embedding_is_noticed(make_run, convert):
    root = make_run("tp1 pp2", "m", "llama-tied")
    before = poke(held(root, "output_layer.weight", rank(root, "00_001")), 100, 2.0)
    assert abs(before) < 1
    refused(convert("digest", root), 6, "embedding", rank(root, "00_000"), rank(root, "00_001"))
    assert convert("digest", root, "--replicas", "first").code == 0


# --- Hugging Face folders --------------------------------------------------------------------------------------------


def test_a_missing_shard_is_noticed(model, convert, tmp_path):
    folder = Path(shutil.copytree(model("llama", "float32", shard="100KB"), tmp_path / "hf"))
    for lost in sorted(folder.glob("*.safetensors")):
        lost.rename(tmp_path / "aside")
        refused(convert("digest", folder), 3, lost)
        (tmp_path / "aside").rename(lost)
    assert convert("digest", folder).code == 0


@pytest.mark.parametrize(
    "changes",
    [{"hidden_size": 32}, {"num_hidden_layers": 3}, {"num_hidden_layers": 5}, {"intermediate_size": 64},
     {"vocab_size": 210}, {"num_key_value_heads": 2}, {"num_attention_heads": 16}, {"tie_word_embeddings": True},
     {"model_type": "qwen2"}, {"model_type": "qwen3"}, {"head_dim": 16}],
    ids=str,
)  # fmt: skip
def test_a_config_of_another_model_is_noticed(model, convert, make_run, tmp_path, changes):
    folder = Path(shutil.copytree(model("llama"), tmp_path / "hf"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    if changes != {"tie_word_embeddings": True}:  # then lm_head is a copy that may be there
        refused(convert("digest", folder), 3)
    refused(convert("digest", make_run("tp2 pp1"), "--config", folder), 5, "config")


@pytest.mark.parametrize("names", [["LlamaForSequenceClassification"], ["LlamaForCausalLM", "LlamaModel"]])
@pytest.mark.parametrize("options", [[], ["--no-verify"]])
def test_a_config_of_a_class_that_has_no_head_is_noticed(model, convert, tmp_path, names, options):
    """The base of a training may be a reward model; before anything is written."""
    assert convert("hf2nanotron", model("llama"), tmp_path / "run").code == 0
    shutil.rmtree(tmp_path / "run" / "huggingface", ignore_errors=True)
    base = with_config(tmp_path / "base", model("llama"), architectures=names)
    ran = convert("nanotron2hf", tmp_path / "run", tmp_path / "out", "--config", base, *options)
    assert (ran.code, f"{base / 'config.json'}: a model of the class" in ran.err) == (4, True), ran.err
    assert not (tmp_path / "out").exists()


def test_an_untied_head_under_a_tied_config_is_no_silent_loss(model, convert, tmp_path):
    folder = Path(shutil.copytree(model("llama"), tmp_path / "hf"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    refused(convert("hf2megatron", folder, tmp_path / "m"), 6, "model.embed_tokens.weight")
    assert not (tmp_path / "m").exists()


# --- the output ------------------------------------------------------------------------------------------------------


def test_an_output_that_exists_is_kept_unless_forced(model, convert, tmp_path):
    out = tmp_path / "m"
    assert convert("hf2megatron", model("llama"), out).code == 0
    before = files(out)
    refused(convert("hf2megatron", model("qwen2"), out), 7, out, "--force")
    assert files(out) == before
    assert convert("hf2megatron", model("qwen2"), out, "--force", "--tp", 2).code == 0
    assert convert("diff", model("qwen2"), out).code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_a_forced_conversion_that_fails_leaves_what_was_there(model, convert, tmp_path, monkeypatch):
    assert convert("hf2megatron", model("llama"), tmp_path / "m").code == 0
    before = files(tmp_path / "m")
    failing(monkeypatch, 5)
    refused(convert("hf2megatron", model("qwen2"), tmp_path / "m", "--force"), 7)
    assert files(tmp_path / "m") == before


def test_an_empty_folder_is_no_output(model, convert, tmp_path):
    (tmp_path / "m").mkdir()
    assert convert("hf2megatron", model("llama"), tmp_path / "m").code == 0


@pytest.mark.parametrize("kind", ["file", "broken link", "file in the way", "staging is a file"])
def test_a_place_that_cannot_be_a_folder_is_refused(model, convert, tmp_path, kind):
    out = tmp_path / "m"
    if kind == "file":
        out.write_text("mine")
    elif kind == "broken link":
        out.symlink_to("nowhere")
    elif kind == "file in the way":
        (tmp_path / "file").write_text("mine")
        out = tmp_path / "file/m"
    else:
        (tmp_path / "m.partial").write_text("mine")
    before = files(tmp_path)
    refused(convert("hf2megatron", model("llama"), out, "--force"), 7, out)
    assert files(tmp_path) == before


@pytest.mark.parametrize("force", [(), ("--force",)], ids=["", "force"])
@pytest.mark.parametrize("out", [".", "inside", "inside/deep", "..", "../hf/../hf"])
def test_an_output_inside_its_source_or_around_it_is_refused(model, convert, tmp_path, out, force):
    source = Path(shutil.copytree(model("llama"), tmp_path / "around/hf"))
    before = files(tmp_path)
    refused(convert("hf2megatron", source, source / out, *force), 7)
    assert files(tmp_path) == before


def test_an_output_through_a_link_into_its_source_is_refused(model, convert, tmp_path):
    source = Path(shutil.copytree(model("llama"), tmp_path / "hf"))
    (tmp_path / "link").symlink_to(source)
    before = files(source)
    refused(convert("hf2megatron", source, tmp_path / "link/out"), 7)
    assert files(source) == before


@pytest.mark.parametrize("force", [(), ("--force",)], ids=["", "force"])
@pytest.mark.parametrize("source", ["m.partial", "m.partial/out", "m.partial/hf"])
def test_a_source_where_the_work_would_be_done_is_kept(model, convert, tmp_path, source, force):
    folder = Path(shutil.copytree(model("llama"), tmp_path / source))
    before = files(folder)
    ran = convert("hf2megatron", folder, tmp_path / "m", *force)
    assert folder.is_dir(), "the source is gone"
    assert files(folder) == before
    refused(ran, 7)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_place_is_refused(model, convert, tmp_path):
    (tmp_path / "locked").mkdir(mode=0o555)
    refused(convert("hf2megatron", model("llama"), tmp_path / "locked/m"), 7, tmp_path / "locked")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "."])
def test_a_source_that_may_not_be_read_is_named(model, convert, tmp_path, name):
    folder = Path(shutil.copytree(model("llama"), tmp_path / "hf"))
    (folder / name).chmod(0)
    refused(convert("digest", folder), 3, folder)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may search everything")
def test_a_source_that_may_not_be_searched_is_named(model, convert, tmp_path):
    """Not a file that nothing says is in it."""
    folder = Path(shutil.copytree(model("llama"), tmp_path / "hf"))
    folder.chmod(0o600)
    refused(convert("digest", folder), 3, f"{folder}: no permission to open files in it", "chmod u+x")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO], ids=["denied", "broken"])
def test_a_source_that_cannot_be_opened_is_named(model, convert, monkeypatch, name, number):
    """The same as a user who is root, and on a disk that is broken."""
    folder, real = model("llama"), os.open

    def deny(self: Path, *args: Any, **options: Any) -> Any:
        if self == folder / name:
            raise OSError(number, os.strerror(number), str(self))
        return opened(self, *args, **options)

    opened = Path.open
    monkeypatch.setattr(Path, "open", deny)
    monkeypatch.setattr(Path, "read_bytes", lambda self: deny(self, "rb").read())
    refused(convert("digest", folder), 3, folder / name)
    assert os.open is real


# --- no room ---------------------------------------------------------------------------------------------------------


def failing(monkeypatch: pytest.MonkeyPatch, after: int, number: int = errno.ENOSPC) -> None:
    """Every call that writes to disk fails once `after` of them have succeeded."""
    left = [after]

    def guard(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise OSError(number, os.strerror(number))
            return real(*args, **options)

        return call

    for name in ("pwrite", "write", "fsync", "fdatasync", "mkdir"):
        monkeypatch.setattr(os, name, guard(getattr(os, name)))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO], ids=errno.errorcode.get)
@pytest.mark.parametrize("after", [0, 1, 2, 3, 5, 10, 20, 40, 60, 80, 90, 95, 100])
def test_a_disk_that_fills_up_at_any_time_leaves_no_output(model, convert, tmp_path, after, number):
    source, out = model("llama", "float32", num_hidden_layers=2), tmp_path / "m"
    argv = ("hf2megatron", source, out, "--tp", 2, "-q")
    with pytest.MonkeyPatch.context() as patch:
        failing(patch, after, number)
        ran = convert(*argv)
    refused(ran, 7, out)
    assert not out.exists()
    assert convert(*argv).code == 0
    assert convert("hf2megatron", source, tmp_path / "reference", "--tp", 2).code == 0
    assert files(out) == files(tmp_path / "reference")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "reference"]


def test_writes_that_stop_half_way_are_continued(model, convert, tmp_path, monkeypatch):
    """A system may write less than it was told to, without an error."""
    source, pwrite = model("llama", "float32", num_hidden_layers=2), os.pwrite
    assert convert("hf2megatron", source, tmp_path / "reference").code == 0
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, data[:1000], offset))
    assert convert("hf2megatron", source, tmp_path / "m", "--no-verify").code == 0
    assert files(tmp_path / "m") == files(tmp_path / "reference")


def command(*argv: object, limit: int | None = None, most: int | None = None) -> Ran:
    """`convert` in a process of its own that may write no file longer than `limit`, and have `most` files open."""

    def bound() -> None:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        if most is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

    program = [sys.executable, "-B", "-c", "from converters.cli import main; main()", *map(str, argv)]
    done = subprocess.run(
        program, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, preexec_fn=bound, check=False
    )
    return Ran(done.returncode, done.stdout, done.stderr)


@pytest.mark.parametrize("limit", [0, 20, 200, 3000, 100_000])
def test_files_that_may_not_grow_leave_no_output(model, convert, tmp_path, limit):
    source, out = model("llama"), tmp_path / "m"
    refused(command("hf2megatron", source, out, limit=limit), 7, out)
    assert not out.exists()
    assert convert("hf2megatron", source, out).code == 0
    assert convert("hf2megatron", source, tmp_path / "reference").code == 0
    assert files(out) == files(tmp_path / "reference")


def test_too_few_files_may_be_open(model, convert, tmp_path):
    """The hint says how to allow more; then the same command resumes."""
    argv = ("hf2megatron", model("llama"), tmp_path / "m", "--tp", 4, "--pp", 2, "-j", 8)
    ran = command(*argv, most=10)
    assert ran.code in (3, 7), ran.err
    assert "Too many open files" in ran.err
    assert "hint: more files have to be allowed: `ulimit -Sn $(ulimit -Hn)`" in ran.err
    assert convert(*argv).code == 0


def test_a_file_of_out_that_cannot_be_opened_again_is_none_of_the_source(tmp_path, monkeypatch):
    (tmp_path / "out").touch()
    descriptors, missing = Descriptors(), OSError(errno.EMFILE, "Too many open files")
    with descriptors.open(tmp_path / "out", writable=True):
        monkeypatch.setattr("converters.move.descriptors.open_handle", Mock(side_effect=missing))
        for name, kind in (("out", OutputError), ("source", SourceError)):
            with pytest.raises(kind, match=f"{name}: Too many open files"), descriptors.open(tmp_path / name):
                pass


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """`disk(nbytes)`: a small file system of its own; calling it again makes it larger."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = []

    def make(nbytes: int) -> Path:
        options = ["-o", f"{'remount,' if mounted else ''}size={nbytes}", *(() if mounted else ("-t", "tmpfs"))]
        done = subprocess.run(["mount", *options, "none", place], capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
        mounted.append(place)
        return place

    yield make
    if mounted:
        subprocess.run(["umount", "--lazy", place], check=True)


@pytest.mark.skipif(shutil.which("mount") is None, reason="there is no mount")
@pytest.mark.parametrize("left", [1, 2, 0.1, 0.6, -8, -4, -3, -2], ids=str)
def test_a_full_disk_leaves_no_output(model, convert, tmp_path, disk, left):
    """From no room for the journal, over no room for the weights, to one page too few for the last small file."""
    source = model("llama")
    assert convert("hf2megatron", source, tmp_path / "reference").code == 0
    reference = files(tmp_path / "reference")
    needed = sum(-(-len(content) // 4096) for content in reference.values())
    pages = left if left >= 1 else needed + left if left < 0 else int(needed * left)
    place = disk(pages * 4096)
    if pages == 1:
        (place / "full").write_bytes(bytes(4096))
    out = place / "m"
    refused(convert("hf2megatron", source, out), 7, out)
    assert not out.exists()
    disk(16 << 20)
    assert convert("hf2megatron", source, out).code == 0
    assert files(out) == reference
