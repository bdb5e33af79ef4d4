"""Files that Megatron-LLM's own programs wrote (megatron_llm/README.md), read and, tensor by tensor, written."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from formats.checkpoint import Settings
from formats.disk.safetensors import read_safetensors
from formats.errors import UnsupportedError
from formats.megatron import megatron_llm
from formats.registry import open_checkpoint
from formats.torch_files.archive import read_torch
from formats.torch_files.pickle_values import TensorRef
from tests.golden.test_coverage import lines, used
from tests.golden.test_megatron_lm import tensors
from tests.models import files

HERE = Path(__file__).parent / "megatron_llm"
TOPOLOGY = {"llama2": ("--tp", 4), "mistral": ("--tp", 2, "--pp", 2)}
NAMES = list(TOPOLOGY)


def held(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Each tensor of a file, by the names of the maps that it lies in."""
    file = read_torch(path)

    def walk(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, TensorRef]]:
        for name, inner in value.items():
            yield from walk(inner, f"{prefix}{name}/") if isinstance(inner, dict) else [(prefix + name, inner)]

    fragments = {name: file.fragment(ref, name) for name, ref in walk(file.value["model"])}
    content = path.read_bytes()
    return {name: (f.dtype, f.shape, content[f.offset : f.offset + f.nbytes]) for name, f in fragments.items()}


def same_as_upstream(ours: Path, theirs: Path) -> None:
    """Files, names, nesting, order, types and bytes of all tensors, rows of padding included; and the tracker."""
    names = sorted(str(path.relative_to(theirs)) for path in theirs.rglob("*.pt"))
    assert sorted(str(path.relative_to(ours)) for path in ours.rglob("*.pt")) == names
    for name in names:
        mine, other = held(ours / name), held(theirs / name)
        assert list(mine) == list(other)
        assert mine == other
    tracker = "latest_checkpointed_iteration.txt"
    assert (ours / tracker).read_text() == (theirs / tracker).read_text()


@pytest.fixture
def copied(tmp_path):
    """`copied(name)`: a copy of a model's folder that may be written to."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(HERE / name, tmp_path / f"copy of {name}"))

    return copy


# --- to Megatron-LLM -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_shards_are_those_of_upstream(convert, tmp_path, name):
    """Both scripts of CodeAct in one command: hf_to_megatron.py and checkpoint_util.py."""
    flags = (*TOPOLOGY[name], "--true-vocab-size", 130)
    assert convert("hf2megatron", HERE / name / "hf", tmp_path / "m", "--format", "megatron-llm", *flags).code == 0
    same_as_upstream(tmp_path / "m", HERE / name / "sharded")


@pytest.mark.parametrize("name", NAMES)
def test_reshard_is_that_of_upstream(convert, tmp_path, name):
    """shard_model_4tp.sh, from the file that hf_to_megatron.py wrote."""
    flags = (*TOPOLOGY[name], "--true-vocab-size", 130, "--dtype", "bf16")
    assert convert("reshard", HERE / name / "raw", tmp_path / "m", *flags).code == 0
    same_as_upstream(tmp_path / "m", HERE / name / "sharded")


@pytest.mark.parametrize("name", NAMES)
def test_args_are_those_of_upstream(convert, tmp_path, name):
    convert("hf2megatron", HERE / name / "hf", tmp_path / "m", "--format", "megatron-llm", *TOPOLOGY[name],
            "--true-vocab-size", 130)  # fmt: skip
    ours, theirs = (open_checkpoint(path).details.args for path in (tmp_path / "m", HERE / name / "sharded"))
    differing = {key for key in ours.keys() & theirs.keys() if str(ours[key]) != str(theirs[key])}
    unlike = {"hidden_dropout", "attention_dropout", "perform_initialization", "position_embedding_type"}
    assert differing == unlike | ({"use_flash_attn"} if name == "mistral" else set())  # without it there is no window
    assert ours.keys() - theirs.keys() == {"bias_droput_fusion", "true_vocab_size", "iteration"}
    flags = (tmp_path / "m/megatron_flags.txt").read_text().splitlines()
    assert flags == ["--use_checkpoint_args", f"--model_name {name}", "--layernorm_epsilon 1e-05",
                     "--rope_theta 10000.0", "--rope_scaling_factor 1.0",
                     *(["--use_flash_attn"] if name == "mistral" else []), "--bf16"]  # fmt: skip


# --- from Megatron-LLM -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("folder", ["raw", "sharded"])
def test_it_becomes_the_model_that_it_came_from(convert, tmp_path, name, folder):
    base, out = HERE / name / "hf", tmp_path / "hf"
    assert convert("megatron2hf", HERE / name / folder, out, "--config", base, "--dtype", "bf16").code == 0
    assert files(out) == files(base)


@pytest.mark.parametrize(("name", "iteration"), [("llama2", 152), ("mistral", 304)])
def test_a_training_becomes_the_model_of_upstream(convert, copied, name, iteration):
    """convert_sharded_to_hf.sh, which writes below the run: TP to 1, Hugging Face, tokens and chat template."""
    pytest.importorskip("tokenizers", reason="chat templates need tokenizers")
    run = copied(name) / "trained"
    out, base = run / f"hf/model_iter_{iteration}", HERE / name / "hf"
    flags = ("--iteration", iteration, "--config", base, "--chat-template", "chatml")
    ran = convert("megatron2hf", run, out, *flags)
    assert ran.code == 0
    assert "the embedding has their rows, as they were trained" in ran.err
    assert tensors(out / "model.safetensors") == tensors(HERE / name / "expected.safetensors")
    assert json.loads((out / "config.json").read_text())["vocab_size"] == 130
    added = json.loads((out / "tokenizer.json").read_text())["added_tokens"]
    assert {token["content"]: token["id"] for token in added} | {"<|im_start|>": 128, "<|im_end|>": 129} == {
        token["content"]: token["id"] for token in added
    }
    assert "<|im_start|>" in (out / "chat_template.jinja").read_text()
    assert convert("verify", out, run / f"iter_{iteration:07d}", "--config", base).code == 0
    again = run.parent / "again"  # its own tokenizer knows the tokens: nothing is added twice
    assert convert("megatron2hf", run, again, "--config", out, "--chat-template", "chatml").code == 0
    assert files(again) == files(out)


@pytest.mark.parametrize("name", NAMES)
def test_upstreams_model_computes_what_transformers_does(convert, tmp_path, name):
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    base = HERE / name / "hf"
    assert convert("megatron2hf", HERE / name / "raw", tmp_path / "hf", "--config", base).code == 0
    golden = load_file(HERE / name / "logits.safetensors")
    with torch.no_grad():
        computed = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)(golden["ids"]).logits
    assert float(computed.abs().max()) > 0.5
    assert torch.allclose(computed, golden["logits"], atol=5e-6, rtol=0)


def test_every_line_was_written_by_upstream():
    seen = set().union(
        *(used(HERE / name / folder, HERE / name / "hf") for name in NAMES for folder in ("raw", "sharded"))
    )
    assert lines((*megatron_llm.TRAINED, *megatron_llm.CONVERTED)) == seen


@pytest.mark.parametrize("name", NAMES)
def test_what_is_there_is_said(convert, name):
    ran = convert("inspect", HERE / name / "trained", "--config", HERE / name / "hf")
    assert "megatron-llm, tp" in ran.out
    assert re.search(r"^ +vocab +130$", ran.out, re.MULTILINE)
    assert "--no_load_optim --no_load_rng" in ran.out
    record = json.loads(convert("inspect", HERE / name / "raw", "--json").out)
    assert (record["dialect"], record["settings"]["vocab"]) == ("megatron-llm", 128)


# --- what it does not say --------------------------------------------------------------------------------------------


def test_a_window_keeps_its_number_and_is_told(convert, tmp_path):
    """Upstream's flash-attn looks so many tokens back; its converters and its Mistral know no other number."""
    note = "note: sliding_window_size = 4096 of Megatron-LLM sees a token more than that of transformers"
    ran = convert("hf2megatron", HERE / "mistral/hf", tmp_path / "m", "--format", "megatron-llm")
    assert note in ran.err
    for run in (tmp_path / "m", HERE / "mistral/sharded"):
        assert note in convert("megatron2hf", run, tmp_path / "hf", "--config", HERE / "mistral/hf", "--force").err
    assert convert("reshard", tmp_path / "m", tmp_path / "two", "--tp", 2).err.count(note) == 1
    assert "sliding_window" not in convert("megatron2hf", HERE / "llama2/raw", tmp_path / "llama").err


def test_a_window_without_flash_attention():
    """Stock layers see all tokens then (model/transformer.py:517), of which a training of longer texts would tell."""
    known = open_checkpoint(HERE / "mistral/sharded", Settings(config=HERE / "mistral/hf")).details.args

    def window(*, flash: bool, **settings: Any) -> int | None:
        args = known | {"seq_length": 8192, "use_flash_attn": flash}
        return megatron_llm.from_args(args, Settings(values=settings), None, None, False, "x").sliding_window

    assert window(flash=True) == 4096
    with pytest.raises(UnsupportedError, match="window_size = 4096 with seq_length = 8192 and use_flash_attn = False"):
        window(flash=False)
    assert [window(flash=False, sliding_window=value) for value in (None, 4096)] == [None, 4096]


def test_an_unknown_vocabulary_is_asked_for(convert, tmp_path):
    run = HERE / "llama2/trained"
    ran = convert("megatron2hf", run, tmp_path / "out")
    assert ran.code == 5
    assert "it only holds 512 padded rows" in ran.err
    assert convert("megatron2hf", run, tmp_path / "out", "--vocab-size", 130).code == 0
    assert tensors(tmp_path / "out/model.safetensors") == tensors(HERE / "llama2/expected.safetensors")


def vocab_with(args: Mapping[str, Any], base: Path = HERE / "llama2/hf", *, release: bool = False) -> int | None:
    """The vocabulary that a training with these arguments has."""
    known = open_checkpoint(HERE / "llama2/trained", Settings(config=HERE / "llama2/hf")).details.args
    spec = open_checkpoint(base).spec
    return megatron_llm.from_args(known | args, Settings(), spec, base, release, "x").vocab


def test_tokens_that_a_training_added_are_counted_or_asked_for(copied):
    assert vocab_with({}) == 130
    assert vocab_with({"vocab_extra_ids_list": None}) == 128
    assert vocab_with({"new_tokens": True}) is None
    assert vocab_with({"vocab_extra_ids": 100}) is None
    assert vocab_with({"perform_initialization": False}) is None
    assert vocab_with({"perform_initialization": False}, release=True) == 128
    base = copied("llama2") / "hf"
    tokenizer = json.loads((base / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append({"content": "<pad>", "id": 128})  # which is not what the training had there
    (base / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert vocab_with({}, base) is None
    (base / "tokenizer.json").unlink()
    assert vocab_with({}, base) is None


def test_a_template_with_other_tokens_than_the_training_is_refused(convert, tmp_path):
    pytest.importorskip("tokenizers", reason="chat templates need tokenizers")
    flags = ("--config", HERE / "llama2/hf", "--chat-template", "llama3")
    ran = convert("megatron2hf", HERE / "llama2/trained", tmp_path / "out", *flags)
    assert ran.code == 5
    assert "where the model was trained with <|im_start|>, <|im_end|>" in ran.err


def test_what_the_resharder_forgot_comes_from_the_config(convert, copied):
    """checkpoint_util.py drops the rotary base and writes the default; a training's own base is believed."""
    base = copied("llama2") / "hf"
    config = base / "config.json"
    config.write_text(config.read_text().replace("10000.0", "1000000.0"))
    spec = open_checkpoint(HERE / "llama2/sharded", Settings(config=base)).spec
    assert spec.rope_theta == 1e6
    assert "re-sharder forgets" in "".join(spec.notes)
    ran = convert("megatron2hf", HERE / "llama2/trained", base.parent / "out", "--config", base)
    assert ran.code == 5
    assert "rope_theta: 10000.0 | 1000000.0" in ran.err
    ran = convert("inspect", HERE / "llama2/sharded")
    assert "--config BASE has the true ones" in ran.out


def test_a_config_with_more_tokens_is_that_of_another_model(convert, copied):
    base = copied("llama2") / "hf"
    config = base / "config.json"
    config.write_text(config.read_text().replace('"vocab_size": 128', '"vocab_size": 129'))
    ran = convert("megatron2hf", HERE / "llama2/raw", base.parent / "out", "--config", base)
    assert ran.code == 5
    assert "vocab: 128 | 129" in ran.err


def test_an_iteration_that_is_not_there_is_named(convert, tmp_path):
    ran = convert("megatron2hf", HERE / "llama2/trained", tmp_path / "out", "--iteration", 153)
    assert ran.code == 3
    assert "holds no iter_0000153" in ran.err
    assert "present: iter_0000152" in ran.err


@pytest.mark.parametrize(
    "args",
    [{"parallel_attn": True}, {"use_bias": True}, {"glu_activation": "geglu"}, {"tie_embed_logits": True},
     {"use_rms_norm": False}, {"position_embedding_type": "absolute"}, {"kv_channels": 8}, {"use_post_ln": True},
     {"glu_activation": None}],
)  # fmt: skip
def test_another_model_is_not_read(args):
    known = open_checkpoint(HERE / "llama2/raw").details.args
    with pytest.raises(UnsupportedError, match=re.escape(str(next(iter(args.values()))))):
        megatron_llm.from_args(known | args, Settings(), None, None, True, "x")


def test_linear_rope_scaling_is_read():
    known = open_checkpoint(HERE / "llama2/raw").details.args
    spec = megatron_llm.from_args(known | {"rope_scaling_factor": 4.0}, Settings(), None, None, True, "x")
    assert spec.rope_scaling == {"rope_type": "linear", "factor": 4.0}


def test_the_expected_models_are_not_the_sources():
    """A training changed every tensor: nothing above is true by accident."""
    for name in NAMES:
        before, after = (tensors(HERE / name / path) for path in ("hf/model.safetensors", "expected.safetensors"))
        assert before.keys() == after.keys()
        assert all(before[key] != after[key] for key in before)
        shapes = read_safetensors(HERE / name / "expected.safetensors")[0]
        assert shapes["lm_head.weight"].shape[0] == 130
