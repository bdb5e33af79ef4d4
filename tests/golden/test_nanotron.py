"""nanotron: what it saved has its own logits, and what is written is what it writes."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from formats.checkpoint import Settings
from formats.errors import RefusedError, SourceError, UnsupportedError
from formats.huggingface.nanotron import model_config, shards
from formats.registry import open_checkpoint
from tests.faults.dcp_tools import refused
from tests.golden.test_coverage import lines, used

HERE = Path(__file__).with_name("nanotron")
CASES = {
    "llama_tp2": ("llama", ["--vocab-size", 95]),
    "llama_pp2_tied": ("llama", []),
    "qwen2_tp2": ("qwen2", []),
    "qwen2_nope_tied": ("smollm3", []),
    "qwen2_window": ("mistral", []),
    "qwen2_moe": ("qwen2_moe", []),
    "llama_v05_tp2": ("llama", []),
}
"""Run: the family that it is read as, and what has to be said of it."""
ALONE = ("qwen2_nope_tied", "qwen2_window", "qwen2_moe")
"""Runs of one tensor parallel rank, in which halves of a head rotate: as they are written."""
QKV = "3/model/model/decoder/0/pp_block/attn/qkv_proj/model_weight_pp-rank-0-of-1_tp-rank-{}-of-2.safetensors"


def said(path: Path) -> tuple[dict[str, str], dict[str, list[Any]]]:
    """Metadata and tensors of a file; nanotron spells an integer of numpy as one."""
    with safe_open(path, "pt") as file:
        metadata = {key: re.sub(r"np\.int64\((\d+)\)", r"\1", value) for key, value in (file.metadata() or {}).items()}
    return metadata, {key: tensor.tolist() for key, tensor in load_file(path).items()}


def parameters(step: Path) -> dict[str, tuple[dict[str, str], dict[str, list[Any]]]]:
    """The files of the parameters."""
    return {str(path.relative_to(step)): said(path) for path in sorted((step / "model").rglob("*.safetensors"))}


def changed(tmp_path: Path, name: str, change: Callable[[dict[str, Any]], Any]) -> Path:
    """A run whose model_config.json is another one."""
    run = shutil.copytree(HERE / name, tmp_path / "run")
    path = run / "3/model_config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))
    return run


@pytest.mark.parametrize("inner", [".", "3"])
@pytest.mark.parametrize("name", CASES)
def test_its_logits(convert, tmp_path, name, inner):
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM

    family, options = CASES[name]
    out, golden = tmp_path / "out", np.load(HERE / name / "logits.npz")
    ran = convert("nanotron2hf", HERE / name / inner, out, *options)
    assert ran.code == 0, ran.err
    assert json.loads((out / "config.json").read_text())["model_type"] == family
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)(torch.tensor(golden["ids"])).logits
    assert np.abs(logits.numpy() - golden["logits"]).max() < 1e-5 < np.abs(golden["logits"]).max()


@pytest.mark.parametrize("name", ALONE)
def test_what_is_written_is_what_nanotron_writes(convert, tmp_path, name):
    """Names, metadata, tensors and settings, file by file."""
    assert convert("nanotron2hf", HERE / name, tmp_path / "hf").code == 0
    assert convert("to", "nanotron", tmp_path / "hf", tmp_path / "again").code == 0
    assert parameters(tmp_path / "again") == parameters(HERE / name / "3")
    theirs, ours = (
        json.loads((at / "model_config.json").read_text()) for at in (HERE / name / "3", tmp_path / "again")
    )
    assert ours == theirs


def with_tokens(at: Path, **ids: int) -> Path:
    run = shutil.copytree(HERE / "llama_tp2", at)
    path = run / "3/model_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | ids))
    return run


def test_several_end_tokens(convert, tmp_path):
    """nanotron has one: that is the first, and a note says so; of one that the config denies its default stays."""
    assert convert("nanotron2hf", with_tokens(tmp_path / "run", eos_token_id=4), tmp_path / "hf").code == 0
    path = tmp_path / "hf/config.json"
    (path.parent / "vitruvian.json").unlink()
    for number, (said, written, note) in enumerate(
        (
            ([7, 0], 7, "eos_token_id = [7, 0] of the config, 7 in model_config.json: nanotron has one"),
            ([7], 7, ""),
            (None, 2, "eos_token_id = null of the config, 2 in model_config.json"),
        )
    ):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": said}))
        out, back = tmp_path / f"out-{number}", tmp_path / f"back-{number}"
        ran = convert("hf2nanotron", tmp_path / "hf", out)
        assert ran.code == 0, ran.err
        assert json.loads((out / "model_config.json").read_text())["eos_token_id"] == written
        assert f"note: {note}" in ran.err if note else "eos_token_id" not in ran.err
        ran = convert("nanotron2hf", out, back)
        assert ran.code == 0, ran.err
        assert "eos_token_id" not in ran.err
        assert json.loads((back / "config.json").read_text())["eos_token_id"] == said


def test_special_tokens(convert, tmp_path):
    """Where no config travels, their ids are those of the training; of ids that contradict each other a note tells."""
    ids = {"bos_token_id": 5, "eos_token_id": 0, "pad_token_id": 7}
    run = with_tokens(tmp_path / "run", **ids)
    assert convert("nanotron2hf", run, tmp_path / "hf").code == 0
    assert json.loads((tmp_path / "hf/config.json").read_text()).items() >= ids.items()
    for number, source in enumerate((run, tmp_path / "hf")):
        again = tmp_path / f"again-{number}"
        assert convert("hf2nanotron", source, again).code == 0
        assert json.loads((again / "model_config.json").read_text()).items() >= ids.items()
    other = with_tokens(tmp_path / "other", eos_token_id=3, pad_token_id=-1)
    ran = convert("nanotron2hf", other, tmp_path / "out", "--config", tmp_path / "hf")
    assert ran.code == 0
    assert "eos_token_id = 0 as in the config, " in ran.err
    assert "pad_token_id = -1 of " in ran.err
    assert json.loads((tmp_path / "out/config.json").read_text()).items() >= ids.items()


@pytest.mark.parametrize("name", CASES)
def test_back_it_is_the_same_model(convert, tmp_path, name):
    _, options = CASES[name]
    ran = convert("hf2nanotron", HERE / name, tmp_path / "again", *options)
    assert ran.code == 0, ran.err
    assert convert("diff", HERE / name, tmp_path / "again", *options).code == 0
    output = convert("inspect", tmp_path / "again").out
    assert "nanotron, tp 1, pp 1" in output
    assert open_checkpoint(tmp_path / "again").spec == open_checkpoint(HERE / name).spec or options


def test_it_is_replaced_as_a_whole(convert, tmp_path):
    """`--force` knows every file of a run as one of a checkpoint."""
    run, source = shutil.copytree(HERE / "llama_tp2", tmp_path / "run"), HERE / "qwen2_moe"
    (run / "logits.npz").unlink()
    refused(convert("hf2nanotron", source, run), 7, "exists")
    assert convert("hf2nanotron", source, run, "--force").code == 0
    assert not (run / "3").exists()
    assert convert("hf2nanotron", HERE / "qwen2_tp2", run, "--force").code == 0
    assert convert("diff", run, HERE / "qwen2_tp2").code == 0


def test_every_line_was_written_by_nanotron():
    from formats.huggingface.nanotron.tables import HALVES, NEIGHBOURS

    seen = set().union(*(used(HERE / name) for name in CASES))
    assert lines(HALVES) - seen == set()
    assert {rule.pattern.text for rule in NEIGHBOURS} - {rule.pattern.text for rule in HALVES} - {
        pattern for _, pattern in used(HERE / "llama_pp2_tied")
    } == {next(rule.pattern.text for rule in NEIGHBOURS if "query_bias" in rule.pattern.tensors)}


def test_the_vocabulary(convert, tmp_path):
    """Its trainer pads it and says the padded number; the rows of no token are left out where a true one is known."""
    assert convert("nanotron2hf", HERE / "llama_tp2", tmp_path / "whole").code == 0
    assert convert("nanotron2hf", HERE / "llama_tp2", tmp_path / "true", "--vocab-size", 95).code == 0
    rows = {
        name: load_file(tmp_path / name / "model.safetensors")["model.embed_tokens.weight"]
        for name in ("whole", "true")
    }
    assert len(rows["whole"]) == 96
    assert rows["true"].equal(rows["whole"][:95])
    ran = convert("hf2nanotron", tmp_path / "true", tmp_path / "padded", "--make-vocab-size-divisible-by", 8)
    assert ran.code == 0
    written = parameters(tmp_path / "padded")[
        "model/model/lm_head/pp_block/model_weight_pp-rank-0-of-1_tp-rank-0-of-1.safetensors"
    ]
    assert len(written[1]["data"]) == 96
    assert convert("diff", tmp_path / "true", tmp_path / "padded").code == 0


def test_a_vocabulary_that_its_padding_excludes(convert, tmp_path):
    """Its run pads to multiples of 1 times two ranks, and 96 rows are there."""
    argv = ("nanotron2hf", HERE / "llama_tp2", tmp_path / "out")
    padded = "a vocabulary of 94 would have been padded to 94 rows", "holds 96: rows of tokens would be lost"
    refused(convert(*argv, "--vocab-size", 94), 5, *padded, "--set vocab=94")
    assert convert("nanotron2hf", HERE / "llama_tp2", tmp_path / "hf").code == 0
    config = tmp_path / "hf/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": 90}))
    refused(convert(*argv, "--config", tmp_path / "hf"), 5, "a vocabulary of 90 would have been padded to 90 rows")
    assert convert(*argv, "--set", "vocab=94").code == 0


def test_each_field_of_its_classes_is_known():
    """Each is read into a setting, changes nothing, or has one value that is read."""
    defaults = json.loads((HERE / "defaults.json").read_text())
    rows = {name: row for row in model_config.TABLE for names in row.keys for name in names}
    fields = {
        *defaults["LlamaConfig"],
        *defaults["Qwen2Config"],
        *(f"moe_config.{key}" for key in defaults["MoEConfig"]),
    }
    assert fields - {*rows} - model_config.HARMLESS == set()
    assert {*rows} | model_config.HARMLESS <= fields
    written = {**model_config.OF_A_RUN, **model_config.OF_QWEN2}
    assert {key: value for key, value in written.items() if defaults["Qwen2Config"][key] != value} == {
        "log_attn_probs": False  # with which a training logs what nobody asked for
    }


REFUSED: dict[str, tuple[str, dict[str, Any], int]] = {
    "rope_scaling, which no model of nanotron applies": (
        "llama_tp2",
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        4,
    ),
    "attention_bias = True": ("llama_tp2", {"attention_bias": True}, 4),
    "hidden_act = 'gelu'": ("llama_tp2", {"hidden_act": "gelu"}, 4),
    "flex_attention_mask = 'document'": ("qwen2_tp2", {"flex_attention_mask": "document"}, 4),
    "_use_qkv_packed = False": ("qwen2_tp2", {"_use_qkv_packed": False}, 4),
    "biases and window is of no family": ("qwen2_tp2", {"sliding_window_size": 8}, 4),
    "new_key = 1 is not supported": ("qwen2_tp2", {"new_key": 1}, 4),
    "does not say rope_interleaved": ("qwen2_tp2", {"rope_interleaved": None}, 3),
    "does not say rope_interleaved, and there is no safe default": ("llama_tp2", {"rope_interleaved": None}, 3),
    "has is_starcoder2_config": ("llama_tp2", {"is_llama_config": None, "is_starcoder2_config": True}, 4),
    "heads do not divide hidden_size": ("llama_tp2", {"num_attention_heads": 5}, 3),
    "the configuration implies": ("llama_tp2", {"intermediate_size": 96}, 3),
    "enable_shared_expert = False": ("qwen2_moe", {"moe_config": {"enable_shared_expert": False}}, 4),
    "says rope_interleaved = 'false'": ("llama_tp2", {"rope_interleaved": "false"}, 3),
    "says attention_bias = 'yes'": ("qwen2_tp2", {"attention_bias": "yes"}, 3),
    "says tied = 1": ("llama_tp2", {"tie_word_embeddings": 1}, 3),
    "are no layers": ("qwen2_moe", {"moe_config": {"layers": [0, 7]}}, 3),
}
"""What is said: the run, and how its settings are changed."""


@pytest.mark.parametrize("message", REFUSED)
def test_settings_that_are_refused(convert, tmp_path, message):
    name, change, code = REFUSED[message]

    def apply(config: dict[str, Any]) -> None:
        inner = change.get("moe_config", {})
        config |= {**change, **({"moe_config": {**config["moe_config"], **inner}} if inner else {})}

    refused(convert("nanotron2hf", changed(tmp_path, name, apply), tmp_path / "out"), code, message)
    assert not (tmp_path / "out").exists()


def test_what_version_0_5_does_not_say(convert, tmp_path):
    """It says neither base nor order: neighbours rotate, with a base of 10000 (its logits are those above)."""
    spec = open_checkpoint(HERE / "llama_v05_tp2").spec
    assert spec.rope_theta == 10000.0
    assert convert("hf2nanotron", HERE / "llama_v05_tp2", tmp_path / "again").code == 0
    config = json.loads((tmp_path / "again/model_config.json").read_text())
    assert (config["rope_theta"], config["rope_interleaved"]) == (10000.0, False)


def test_positions_that_are_interpolated_are_linear_scaling(convert, tmp_path):
    run = changed(tmp_path, "qwen2_tp2", lambda config: config.update(rope_seq_len_interpolation_factor=4.0))
    assert convert("nanotron2hf", run, tmp_path / "hf").code == 0
    assert open_checkpoint(tmp_path / "hf").spec.rope_scaling == {"rope_type": "linear", "factor": 4.0}
    assert convert("hf2nanotron", tmp_path / "hf", tmp_path / "again").code == 0
    assert json.loads((tmp_path / "again/model_config.json").read_text())["rope_seq_len_interpolation_factor"] == 4.0


@pytest.mark.parametrize(("chosen", "family"), [("none", "llama"), ("5", "mistral")])
def test_a_window_that_its_version_ignored_is_asked_for(convert, tmp_path, chosen, family):
    """From March to June 2025 `_forward_packed` heeds none; and its config lacks what came with windows."""
    since = ("rope_seq_len_interpolation_factor", "log_attn_probs", "ring_attn_heads_k_stride")
    run = changed(tmp_path, "qwen2_window", lambda config: [config.pop(key) for key in since])
    hint = "--set sliding_window=none (the stock version) or --set sliding_window=5 (one that heeds it)"
    message = "sliding_window_size = 5 without a rope_seq_len_interpolation_factor"
    refused(convert("nanotron2hf", run, tmp_path / "out"), 5, message, hint)
    assert not (tmp_path / "out").exists()
    ran = convert("nanotron2hf", run, tmp_path / "out", "--set", f"sliding_window={chosen}")
    assert ran.code == 0, ran.err
    spec = open_checkpoint(tmp_path / "out").spec
    assert (spec.family, spec.sliding_window) == (family, None if chosen == "none" else 5)


def test_a_model_without_a_window_is_read_of_any_version(tmp_path):
    run = changed(tmp_path, "qwen2_tp2", lambda config: config.pop("rope_seq_len_interpolation_factor"))
    assert open_checkpoint(run).spec == open_checkpoint(HERE / "qwen2_tp2").spec


@pytest.mark.parametrize("factor", ["x", False, True, 0, -1, [], float("nan"), float("inf"), 1e30])
def test_a_factor_that_is_none_is_refused(convert, tmp_path, factor):
    run = changed(tmp_path, "qwen2_tp2", lambda config: config.update(rope_seq_len_interpolation_factor=factor))
    message = f"3/model_config.json says rope_seq_len_interpolation_factor = {factor!r}"
    refused(convert("nanotron2hf", run, tmp_path / "out"), 3, message, "a finite number above 0, or null")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("key", [key for row in model_config.TABLE for names in row.keys for key in names])
def test_no_setting_is_taken_unchecked(tmp_path, key):
    """What no key of the table may be is refused, in each class of nanotron, whether it has that key or not."""
    *outer, inner = key.split(".")
    for name in ("qwen2_moe",) if outer else ("qwen2_tp2", "llama_tp2"):
        for number, value in enumerate(("x", 0, -1, [], {}, float("nan"), float("inf"), 1e30)):

            def apply(config: dict[str, Any], value: Any = value) -> None:
                (config[outer[0]] if outer else config)[inner] = value

            run = changed(tmp_path / f"{name}{number}", name, apply)
            with pytest.raises((SourceError, UnsupportedError, RefusedError)):
                open_checkpoint(run)


@pytest.mark.parametrize("name", ["qwen2_moe", "qwen2_nope_tied", "llama_tp2"])
def test_a_hint_of_a_setting_helps(tmp_path, name):
    """Where an error says `--set NAME`, that corrects it; else it names what to do to the file."""
    sound, helped = vars(open_checkpoint(HERE / name).spec), set[str]()
    for key in [*(key for row in model_config.TABLE for names in row.keys for key in names), "vocab_size"]:
        for number, value in enumerate(("x", 0, [], None)):

            def apply(config: dict[str, Any], key: str = key, value: Any = value) -> None:
                *outer, inner = key.split(".")
                ((config.get(outer[0]) or {}) if outer else config)[inner] = value

            run = changed(tmp_path / f"{key}{number}", name, apply)
            try:
                open_checkpoint(run)
            except (SourceError, UnsupportedError, RefusedError) as error:
                for setting in re.findall(r"--set (\w+)", error.hint):
                    open_checkpoint(run, Settings(values={setting: sound[setting]}))
                    helped.add(setting)
            shutil.rmtree(run)
    assert len(helped) > 2


def test_a_contradiction_is_decided_by_what_its_hint_names(convert, tmp_path):
    assert convert("nanotron2hf", HERE / "qwen2_nope_tied", tmp_path / "base").code == 0
    path = tmp_path / "base/config.json"
    config = json.loads(path.read_text())
    words = ["nanotron2hf", HERE / "qwen2_nope_tied", tmp_path / "out", "--config", tmp_path / "base"]
    for changes, name, more in (
        ({"vocab_size": 90}, "vocab=96", ["--vocab-size", 96]),
        ({"vocab_size": 97}, "vocab=96", []),
        ({"rms_norm_eps": 1e-3}, "norm_epsilon=1e-5", []),
    ):  # fmt: skip
        path.write_text(json.dumps(config | changes))
        hint = f"hint: decide with --set {name.partition('=')[0]}=VALUE, or give the right config"
        refused(convert(*words, *more), 5, "contradict each other", hint)
        ran = convert(*words, *more, "--set", name, "--force")
        assert ran.code == 0, ran.err
        written = json.loads((tmp_path / "out/config.json").read_text())
        assert (written["vocab_size"], written["rms_norm_eps"]) == (96, 1e-5)
    refused(convert(*words, "--set", "vocab=97", "--force"), 5, "97 is more than the 96 rows")


def test_a_padding_token_that_its_class_takes_is_told(convert, tmp_path):
    """transformers gives a SmolLM3 the padding token 128004, for which a smaller embedding has no row."""
    from transformers import AutoModelForCausalLM

    assert convert("nanotron2hf", HERE / "qwen2_nope_tied", tmp_path / "base").code == 0
    path = tmp_path / "base/config.json"
    config = json.loads(path.read_text())
    del config["pad_token_id"]
    path.write_text(json.dumps(config))
    ran = convert("nanotron2hf", HERE / "qwen2_nope_tied", tmp_path / "out", "--config", tmp_path / "base")
    assert ran.code == 0
    assert f"note: {path} does not say pad_token_id, for which transformers takes 128004" in ran.err
    with pytest.raises(AssertionError, match="Padding_idx"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_more_tokens_than_rows_are_refused(convert, tmp_path):
    ran = convert("nanotron2hf", HERE / "llama_tp2", tmp_path / "out", "--vocab-size", 97)
    refused(ran, 5, "--vocab-size 97 is more than the 96 rows", "3/model_config.json", "tokens without padding")


def test_a_llama_with_mup_is_refused(convert, tmp_path):
    """Nothing but the config of its run says so."""
    for name, code in (("llama_tp2", 4), ("qwen2_tp2", 0)):
        run = shutil.copytree(HERE / name, tmp_path / name)
        path = run / "3/config.yaml"
        path.write_text(path.read_text().replace("    std: 0.25\n", "    use_mup: true\n"))
        ran = convert("inspect", run)
        assert ran.code == code
        assert ("muP" in ran.err) == bool(code)


def test_faults_of_the_files(convert, tmp_path):
    """A shard that is missing, is of another save, or says another part; and a file that is none of nanotron's."""

    def damaged(number: int, change: Callable[[Path], Any]) -> Any:
        run = shutil.copytree(HERE / "llama_tp2", tmp_path / str(number))
        change(run)
        return convert("nanotron2hf", run, tmp_path / "out")

    def says(old: str, new: str) -> Callable[[Path], None]:
        def change(run: Path) -> None:
            path = run / QKV.format(1)
            metadata, tensors = said(path)[0], load_file(path)
            assert old in str(metadata)
            save_file(tensors, path, {key: value.replace(old, new) for key, value in metadata.items()})

        return change

    def renamed(old: str, new: str) -> Callable[[Path], None]:
        def change(run: Path) -> None:
            path = run / QKV.format(1)
            path.rename(path.with_name(path.name.replace(old, new)))

        return change

    norm, save = "3/model/model/final_layer_norm/pp_block", "3/checkpoint_metadata.json"
    faults: dict[str, Callable[[Path], Any]] = {
        "and there were 2 ranks": lambda run: (run / QKV.format(1)).unlink(),
        "two topologies": renamed("-of-2", "-of-4"),
        "a rank that there is not": renamed("pp-rank-0-of-1", "pp-rank-7-of-1"),
        "safetensors: version '1.6' of": says("1.5", "1.6"),
        "safetensors: version 'x' of": says("1.5", "x"),
        "overlap in": says("#16,32,", "#8,24,"),
        "does not say which part": says("#16,32,", "#16,33,"),
        "not all of the file": says("16,24,None|None,None,None#", "0,8,None|None,None,None#"),
        "does not say of what shape": says("(64, 32)", "(64, -32)"),
        "another one": says("(64, 32)", "(96, 32)"),
        "is no file of a parameter": lambda run: (run / norm / "weight.bin").write_bytes(b""),
        "/3: 1 tensor is missing: model.final_layer_norm.pp_block.weight [32]\nhint: was a file not copied?": (
            lambda run: (run / norm / "model_weight.safetensors").unlink()
        ),
        "/3: 12 tensors are missing: model.decoder.": lambda run: shutil.rmtree(run / "3/model/model/decoder"),
        "is whole, and": lambda run: shutil.copy(
            run / norm / "model_weight.safetensors", (run / QKV.format(1)).with_name("model_weight.safetensors")
        ),
        "the files are of 2 ranks": lambda run: (run / save).write_text('{"version": "1.5", "tp": 4}'),
        "the newest that is read is 1.5": lambda run: (run / save).write_text('{"version": "1.10"}'),
    }  # fmt: skip
    for number, (message, change) in enumerate(faults.items()):
        ran = damaged(number, change)
        assert message in ran.err, (message, ran.err)
        assert ran.code in (3, 4)
    assert not (tmp_path / "out").exists()


def test_a_name_and_its_metadata_that_contradict_each_other(convert, tmp_path):
    """nanotron goes by the names of the files at the topology of the save, by their metadata at another one."""
    run = shutil.copytree(HERE / "llama_tp2", tmp_path / "exchanged")
    first, second = (run / QKV.format(rank) for rank in (0, 1))
    held = first.read_bytes()
    shutil.copy(second, first)
    second.write_bytes(held)
    refused(
        convert("nanotron2hf", run, tmp_path / "out"), 3, f"{first} is by its name of tensor parallel rank 0 of 2",
        "holds [0:16, 0:32], [32:40, 0:32], [48:56, 0:32] of model.decoder.0.pp_block.attn.qkv_proj.weight [64, 32]",
        "metadata says [16:32, 0:32], [40:48, 0:32], [56:64, 0:32]", "was it renamed, or edited?",
    )  # fmt: skip
    run = shutil.copytree(HERE / "llama_tp2", tmp_path / "edited")
    for path in (run / QKV.format(rank) for rank in (0, 1)):
        metadata, tensors = said(path)[0], load_file(path)
        query, key, value = (pair.split("#") for pair in metadata[shards.SLICES].split(";"))
        pairs = (query, (key[0], value[1]), (value[0], key[1]))
        save_file(tensors, path, {**metadata, shards.SLICES: ";".join(map("#".join, pairs))})
    refused(
        convert("nanotron2hf", run, tmp_path / "out"), 3, "metadata says [0:16, 0:32], [48:56, 0:32], [32:40, 0:32]"
    )
    assert not (tmp_path / "out").exists()


def test_the_step_in_the_name_of_the_folder(convert, tmp_path):
    """It is that of the metadata; what nobody trained, and what has another name, is not compared."""
    save = "checkpoint_metadata.json"
    for name, step, code in (("7", 3, 3), ("7", 0, 0), ("final", 3, 0), ("3", 3, 0)):
        folder = shutil.copytree(HERE / "llama_tp2/3", tmp_path / f"{name} {step}" / name)
        said_of_it = json.loads((folder / save).read_text())
        said_of_it["metas"]["last_train_step"] = step
        (folder / save).write_text(json.dumps(said_of_it))
        ran = convert("inspect", folder)
        assert ran.code == code, ran.err
        assert (f"{folder / save} says last_train_step = 3, the folder is that of step 7" in ran.err) == bool(code)


def test_ranks_of_experts_are_refused(convert, tmp_path):
    run = shutil.copytree(HERE / "qwen2_moe", tmp_path / "run")
    path = next(run.rglob("model_merged_down_proj.safetensors"))
    path.rename(path.with_name("model_merged_down_proj_pp-rank-0-of-1_tp-rank-0-of-1_exp-rank-0-of-2.safetensors"))
    refused(convert("inspect", run), 4, "several expert parallel ranks", "expert_parallel_size: 1")


def test_its_optimizer_is_carried_where_it_is_asked_for(convert, tmp_path):
    """What of it is there is told in test_nanotron_optim.py."""
    run = shutil.copytree(HERE / "llama_tp2", tmp_path / "run")
    refused(convert("hf2fsdp", run, tmp_path / "fsdp", "--with-optimizer"), 3, "holds no optimizer")
    (run / "3/optimizer").mkdir()
    ran = convert("nanotron2hf", run, tmp_path / "out")
    assert ran.code == 0
    assert "not optimizer" in ran.err
    assert "load_optimizer: false" in ran.err
    refused(convert("hf2fsdp", run, tmp_path / "fsdp", "--with-optimizer"), 3, "holds no file of a rank")


def test_models_that_nanotron_has_not(convert, model, tmp_path):
    for name, changes, message in (
        ("qwen3", {}, "nanotron is written of llama"),
        ("mistral", {"head_dim": 16}, "hidden / heads"),
        ("llama3", {}, "plain or linearly scaled"),
        ("llama-biased", {}, "qkv_bias"),
        ("smollm3", {"num_hidden_layers": 3, "no_rope_layers": [1, 0, 0]}, "each n-th layer"),
        ("qwen2_moe", {"norm_topk_prob": True}, "add up to 1"),
    ):
        ran = convert("hf2nanotron", model(name, **changes), tmp_path / "out")
        assert ran.code in (4, 5), (name, ran.err)
        assert message in ran.err, (name, ran.err)
    assert not (tmp_path / "out").exists()
