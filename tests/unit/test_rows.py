"""A vocabulary that grows: new rows are the mean of the others, in every place that holds them, and it is said."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest

from converters.move import reading
from converters.move.blocks import Files
from converters.move.regions import Nearby
from converters.plan.targets import plan_reading
from formats.model.spec import Verbatim
from formats.model.vocab_rows import grown, rows
from formats.registry import open_checkpoint
from tests.faults.test_manifests import flip

TOKENS = 211


@pytest.fixture
def base(model, tmp_path):
    """A model whose tokenizer has a token for each row of its embedding."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    def make(name: str, dtype: str = "float32", **changes):
        folder = tmp_path / "base"
        shutil.copytree(model(name, dtype, **changes), folder)
        (folder / "tokenizer.model").unlink()
        (folder / "chat_template.jinja").unlink()
        vocabulary = {"<s>": 0, "</s>": 1, "<unk>": 2} | {f"w{i}": i for i in range(3, TOKENS)}
        tokenizer = Tokenizer(models.WordLevel(vocabulary, "<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer.add_special_tokens(["<s>", "</s>"])
        tokenizer.save(str(folder / "tokenizer.json"))
        names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
        (folder / "tokenizer_config.json").write_text(json.dumps(names))
        return folder

    return make


@pytest.mark.parametrize("memory", ["16MiB", "256KiB"])
@pytest.mark.parametrize(("name", "dtype"), [("llama", "float32"), ("llama-tied", "bfloat16"), ("qwen3", "float16")])
def test_new_rows_are_the_mean_of_the_others(base, convert, tmp_path, name, dtype, memory):
    import torch
    from safetensors.torch import load_file

    source, out = base(name, dtype), tmp_path / "out"
    assert convert("hf2fsdp", source, tmp_path / "dcp", "--ranks", 3).code == 0
    plan = convert("fsdp2hf", tmp_path / "dcp", out, "--chat-template", "chatml", "-n")
    assert f"change mean of {TOKENS} rows as 2 new rows in {1 if 'tied' in name else 2} tensors" in plan.out
    assert convert("fsdp2hf", tmp_path / "dcp", out, "--chat-template", "chatml", "--memory", memory).code == 0
    old, new = load_file(source / "model.safetensors"), load_file(out / "model.safetensors")
    assert old.keys() == new.keys()
    for key, tensor in old.items():
        assert torch.equal(new[key][: len(tensor)], tensor), key
        if key in ("model.embed_tokens.weight", "lm_head.weight"):
            assert new[key].shape[0] == TOKENS + 2
            mean = tensor.double().mean(dim=0).float().to(tensor.dtype)
            assert all(torch.equal(row, mean) for row in new[key][TOKENS:])
        else:
            assert new[key].shape == tensor.shape
    assert json.loads((out / "config.json").read_text())["vocab_size"] == TOKENS + 2
    assert convert("verify", out).code == 0


def test_rows_beside_new_ones_are_compared_with_a_manifest(base, convert, tmp_path):
    source, grown = tmp_path / "written", ("--chat-template", "chatml")
    assert convert("hf2hf", base("llama-tied", "float32"), source).code == 0
    assert convert("hf2hf", source, tmp_path / "right", *grown).code == 0
    flip(source, "model.embed_tokens.weight", -1)
    ran = convert("hf2hf", source, tmp_path / "out", *grown)
    assert (ran.code, "model.embed_tokens.weight differs from the vitruvian.json" in ran.err) == (6, True), ran.err


@pytest.mark.parametrize("room", [10, 64, 200, 1 << 14])
def test_a_new_row_may_be_wider_than_a_tile(model, room):
    import numpy as np

    plan = plan_reading(open_checkpoint(model("llama")))
    (job,) = (replace(job, rows=TOKENS) for job in plan.jobs if job.name == "embedding")
    tile, scratch = (np.empty(room, np.uint32) for _ in range(2))
    with Files() as files:
        last, mean = (
            make(job, Nearby(job.sources, 2), files, tile, scratch) for make in (reading.last_row, reading.mean_row)
        )
    fragment = job.sources[0].fragment
    whole = np.fromfile(fragment.path, np.float32, TOKENS * 64, offset=fragment.offset).reshape(TOKENS, 64)
    assert (last.view(np.float32) == whole[-1]).all()
    assert (mean.view(np.float32) == whole.mean(0, dtype=np.float64).astype(np.float32)).all()


def test_a_model_without_a_table_grows_too(base, convert, tmp_path):
    from safetensors.torch import load_file

    source, out = base("llama"), tmp_path / "out"
    assert convert("hf2fsdp", source, tmp_path / "dcp", "--verbatim").code == 0
    assert convert("fsdp2hf", tmp_path / "dcp", out, "--chat-template", "control", "--verbatim").code == 0
    new = load_file(out / "model.safetensors")
    assert {len(new[key]) for key in ("model.embed_tokens.weight", "lm_head.weight")} == {TOKENS + 2}
    assert len(new["model.norm.weight"]) == 64
    assert convert("verify", out).code == 0


def test_a_template_whose_tokens_are_there_changes_no_weight(base, convert, tmp_path):
    source, first, second = base("llama"), tmp_path / "first", tmp_path / "second"
    assert convert("hf2fsdp", source, tmp_path / "dcp").code == 0
    assert convert("fsdp2hf", tmp_path / "dcp", first, "--chat-template", "chatml").code == 0
    assert convert("hf2fsdp", first, tmp_path / "dcp2").code == 0
    assert convert("fsdp2hf", tmp_path / "dcp2", second, "--chat-template", "chatml").code == 0
    assert convert("hf2hf", source, tmp_path / "direct", "--chat-template", "chatml").code == 0
    assert (tmp_path / "direct" / "model.safetensors").read_bytes() == (first / "model.safetensors").read_bytes()
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()


def test_megatron_to_hugging_face_with_a_template(base, convert, tmp_path):
    """The last step of a Megatron training: a chat template, and rows for its tokens."""
    source, out = base("llama"), tmp_path / "out"
    assert convert("hf2megatron", source, tmp_path / "run", "--tp", 2).code == 0
    assert convert("megatron2hf", tmp_path / "run", out, "--chat-template", "chatml").code == 0
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"][-1] == TOKENS + 1
    assert "generation" in (out / "chat_template.jinja").read_text()


def test_a_head_with_a_bias_grows_by_its_mean(base, tmp_path, convert):
    import torch
    from safetensors.torch import load_file, save_file

    source, out = base("llama"), tmp_path / "out"
    weights = load_file(source / "model.safetensors")
    bias, options = torch.linspace(-1, 3, TOKENS), ("--verbatim", "--allow-missing", "lm_head.bias")
    save_file({**weights, "lm_head.bias": bias}, source / "model.safetensors", {"format": "pt"})
    assert convert("hf2fsdp", source, tmp_path / "dcp", "--ranks", 2, *options).code == 0
    assert convert("fsdp2hf", tmp_path / "dcp", out, "--chat-template", "chatml", *options).code == 0
    grown_bias = load_file(out / "model.safetensors")["lm_head.bias"]
    assert torch.equal(grown_bias[:TOKENS], bias)
    assert torch.equal(grown_bias[TOKENS:], bias.double().mean().float().expand(2))


def test_what_has_rows_and_what_only_looks_like_it():
    shapes = {"wte.weight": (7, 4), "lm_head.weight": (7, 4), "lm_head.bias": (7,), "h.0.w.weight": (7, 4)}
    spec = Verbatim("x", shapes, tied=False, vocab=7, why="a test")
    assert rows(spec) == 7
    bigger = grown(spec, 9)
    assert bigger.shapes == {**shapes, "wte.weight": (9, 4), "lm_head.weight": (9, 4), "lm_head.bias": (9,)}
    assert bigger.vocab == 9


def test_an_embedding_for_each_layer_does_not_grow(base, convert, tmp_path):
    """Gemma 4 looks each token up there too: transformers 5.23 `_resize_per_layer_embeddings`."""
    for options in ([], ["--verbatim"]):
        ran = convert("hf2hf", base("gemma4_text"), tmp_path / "out", "--chat-template", "chatml", *options)
        shutil.rmtree(tmp_path / "base")
        reason = f"the embedding for each layer has {TOKENS} rows, which do not grow, and {TOKENS + 2} tokens need one"
        assert (ran.code, reason in ran.err) == (4, True), ran.err
    longer = base("gemma4_text", vocab_size_per_layer_input=TOKENS + 2)
    assert convert("hf2hf", longer, tmp_path / "out", "--chat-template", "chatml").code == 0
