"""MaxText's checkpoints that are damaged, not whole, of another model, or none of MaxText: one sentence each."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from formats.disk import chunks
from formats.errors import SourceError
from formats.huggingface.maxtext import checkpoint
from formats.registry import open_checkpoint
from tests.faults.dcp_tools import refused

GOLDEN = Path(__file__).parents[1] / "golden/maxtext"
QUERY = "params.params.decoder.layers.self_attention.query.kernel"


@pytest.fixture(autouse=True)
def _opened_anew() -> None:
    """Nothing is remembered of the arrays of another test."""
    chunks._opened.cache_clear()
    chunks._context.cache_clear()


def copied(tmp_path: Path, name: str) -> Path:
    """A checkpoint that may be changed, with its config in it."""
    at = shutil.copytree(GOLDEN / name / "checkpoint", tmp_path / "run/1000")
    shutil.copy(GOLDEN / name / "config.json", at)
    return at


def changed(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a JSON file."""
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def data(at: Path) -> list[Path]:
    """The files with values, the largest first."""
    return sorted((at / "items").glob("ocdbt.process_*/d/*"), key=lambda path: -path.stat().st_size)


def test_a_file_of_data_is_missing(convert, tmp_path):
    at = copied(tmp_path, "llama_state")
    for path in data(at)[:2]:
        path.unlink()
    refused(convert("maxtext2hf", at, tmp_path / "out"), 3, f"{at / 'items'} holds no sound array params.params.")
    assert not (tmp_path / "out").exists()


def test_a_file_of_data_is_cut_off(convert, tmp_path):
    at = copied(tmp_path, "llama_state")
    for path in data(at)[:2]:
        path.write_bytes(path.read_bytes()[:1000])
    refused(convert("maxtext2hf", at, tmp_path / "out"), 3, "holds no sound array params.params.", "cut off?")


@pytest.mark.parametrize("where", ["manifest.ocdbt", "d"])
def test_a_flipped_byte_of_the_tree(convert, tmp_path, where):
    """Manifest and nodes have checksums; the chunks themselves have none."""
    at = copied(tmp_path, "llama_state")
    path = at / "items" / where
    path = path if path.is_file() else next(path.iterdir())
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    refused(convert("maxtext2hf", at, tmp_path / "out"), 3, "holds no sound array", "DATA_LOSS")


def test_the_tree_is_missing(convert, tmp_path):
    at = copied(tmp_path, "llama_state")
    (at / "items/manifest.ocdbt").unlink()
    refused(convert("inspect", at), 3, "items lacks manifest.ocdbt, the tree of its arrays")


@pytest.mark.parametrize(("name", "chunk"), [("mistral_files", "c/0/0/0/0"), ("qwen3_files_zarr2", "0.0.0")])
def test_a_chunk_of_a_folder_is_missing_and_no_zeros(convert, tmp_path, name, chunk):
    at = copied(tmp_path, name)
    folder = next((at / "items").glob("*self_attention.query.kernel.value"))
    (folder / chunk).unlink()
    refused(convert("maxtext2hf", at, tmp_path / "out"), 3, f"holds no sound array {folder.name}", chunk)


def test_an_array_is_missing(convert, tmp_path):
    at = copied(tmp_path, "mistral_files")
    folder = next((at / "items").glob("*self_attention.query.kernel.value"))
    shutil.rmtree(folder)
    refused(convert("inspect", at), 3, f"holds no sound array {folder.name}: NOT_FOUND")
    changed(at / "items/_METADATA", lambda text: drop(text, "query"))
    refused(
        convert("inspect", at), 3, "3 tensors are missing: decoder.layers_0.self_attention.query.kernel [32, 4, 16]"
    )


def drop(metadata: dict[str, Any], name: str) -> None:
    """Forget the arrays with a name."""
    entries = metadata["tree_metadata"]
    for key in [key for key in entries if f"'{name}'" in key]:
        del entries[key]


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"num_hidden_layers": 4}, ("decoder.layers.", "should have the 4 layers of the config")),
        ({"hidden_size": 64}, ("but the configuration implies",)),
        ({"num_key_value_heads": 4}, ("self_attention.key.kernel has shape [32, 2, 16]", "implies [32, 4, 16]")),
        (
            {"vocab_size": 100},
            ("token_embedder.embedding [96, 32] has fewer rows than the config has tokens, 100",),
        ),
        ({"vocab_size": 64}, ("has 96 rows, the config 64 tokens", "--vocab-size 64 takes the others for padding")),
        ({"tie_word_embeddings": True}, ("decoder.logits_dense.kernel", "has no place in this model")),
    ],
)
def test_the_config_is_of_another_model(convert, tmp_path, change, parts):
    at = copied(tmp_path, "llama_state")
    changed(at / "config.json", lambda config: config.update(change))
    refused(convert("maxtext2hf", at, tmp_path / "out"), 3, *parts)


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (
            {"model_type": "smollm3", "architectures": ["SmolLM3ForCausalLM"]},
            ("a smollm3 of MaxText is not read", "qwen3"),
        ),
        (
            {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 16},
            ("sliding_window = 16, and MaxText's decoder of mistral has no windows", "--set sliding_window=none"),
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
            ("rope_type = 'yarn', with which a checkpoint does not say which rows of a head rotate",),
        ),
        ({"mlp_bias": True}, ("mlp_bias of llama, and MaxText's decoder has no such biases",)),
        ({"attention_bias": True}, ("output_bias of llama",)),
    ],
)
def test_a_model_that_is_not_read(convert, tmp_path, change, parts):
    at = copied(tmp_path, "llama_state")
    changed(at / "config.json", lambda config: config.update(change))
    refused(convert("maxtext2hf", at, tmp_path / "out"), 4, *parts)


ALWAYS = ["full_attention"] * 2 + ["sliding_attention"] * 2


@pytest.mark.parametrize(
    ("name", "change", "part"),
    [
        ("gemma2", {"layer_types": ALWAYS}, "MaxText's gemma2 has a window in all but each layer 2"),
        ("gemma2", {"num_hidden_layers": 3}, "num_hidden_layers = 3, and MaxText's gemma2 has an even number"),
        ("gemma2", {"rms_norm_eps": 1e-5}, "rms_norm_eps = 1e-05, and MaxText's gemma2 has 1e-06"),
        ("gemma2", {"tie_word_embeddings": False}, "tie_word_embeddings = False"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
        ("gemma2", {"hidden_activation": "gelu"}, "activation = gelu, and MaxText has its approximation alone"),
        (
            "gemma2",
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                              "original_max_position_embeddings": 32}},
            "rope_type = 'llama3'",
        ),
        ("gemma3_unscanned", {"sliding_window_pattern": 2}, "sliding_window_pattern = 2, and MaxText's gemma3_text"),
        ("gemma3_unscanned", {"query_pre_attn_scalar": 24}, "query_pre_attn_scalar = 24.0, and MaxText's gemma3_text"),
    ],
)  # fmt: skip
def test_a_gemma_that_its_decoder_does_not_compute(convert, tmp_path, name, change, part):
    at = copied(tmp_path, name)
    changed(at / "config.json", lambda config: config.update(change))
    refused(convert("maxtext2hf", at, tmp_path / "out"), 4, part)


@pytest.mark.parametrize(
    ("name", "layers", "part"),
    [
        ("gemma2", 6, "should have the 3 blocks of 2 layers of the config"),
        ("gemma3_unscanned", 8, "tensors are missing: decoder.layers_7"),
    ],
)
def test_a_gemma_of_other_layers(convert, tmp_path, name, layers, part):
    at = copied(tmp_path, name)
    changed(at / "config.json", lambda config: config.update(num_hidden_layers=layers))
    refused(convert("maxtext2hf", at, tmp_path / "out"), 3, part)


def test_the_text_of_a_gemma_3(convert, tmp_path):
    """The released models are multimodal: their config is for the text, which MaxText may train alone."""
    at = copied(tmp_path, "gemma3_unscanned")
    text = json.loads((at / "config.json").read_text())
    whole = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    (at / "config.json").write_text(json.dumps(whole | {"tie_word_embeddings": True}))
    ran = convert("maxtext2hf", at, tmp_path / "out", "--only", "text")
    assert ran.code == 0, ran.err
    assert json.loads((tmp_path / "out/config.json").read_text())["architectures"] == ["Gemma3ForCausalLM"]
    same = convert("diff", tmp_path / "out", GOLDEN / "gemma3_unscanned/checkpoint", "--config", tmp_path / "out")
    assert same.code == 0, same.err


def test_without_a_config(convert, tmp_path):
    refused(
        convert("maxtext2hf", GOLDEN / "mixtral/checkpoint", tmp_path / "out"), 3, "names and shapes", "--config BASE"
    )
    looked = json.loads(convert("inspect", GOLDEN / "llama_state/checkpoint", "--json").out)
    assert looked["containers"] == {"nnx_aux": 12, "opt_state": 26, "params": 12, "step": 1}


def test_without_tensorstore(convert, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorstore", None)
    ran = convert("maxtext2hf", GOLDEN / "mixtral/checkpoint", tmp_path / "out", "--config", GOLDEN / "mixtral")
    refused(ran, 4, "which the package tensorstore reads", "pip install 'vitruvian[orbax]'")


def test_a_folder_of_any_name(convert, tmp_path):
    """Names go to tensorstore as they are, and are no addresses there."""
    at = copied(tmp_path, "llama_state").rename(tmp_path / "a b%20?#*[é]")
    ran = convert("maxtext2hf", at, tmp_path / "out")
    assert ran.code == 0, ran.err


def test_another_programs_checkpoint_of_orbax(convert, tmp_path):
    at = copied(tmp_path, "llama_state")
    changed(at / "items/_METADATA", lambda text: drop(text, "token_embedder"))
    refused(convert("inspect", at), 4, "is a checkpoint of Orbax, but not of MaxText")


@pytest.mark.parametrize(
    ("case", "added", "code", "part"),
    [
        ("llama_state", "params.params.vision_encoder.kernel", 4, "holds {} besides a decoder"),
        ("mistral_files", "mtp_block.mtp_layer_1.mtp_1_embedding_norm.scale.value", 4, "holds {} besides a decoder"),
        ("mistral_files", "decoder.decoder_norm.scale", 3, "holds decoder.decoder_norm.scale twice"),
        (
            "llama_state",
            "params.params.decoder.layers_0.mlp.wo.kernel",
            3,
            "holds decoder.layers_0.mlp.wo.kernel twice",
        ),
    ],
)
def test_parameters_of_more_than_a_decoder(convert, tmp_path, monkeypatch, case, added, code, part):
    """Of a tower, of further-token layers; of a parameter that is there already, stacked or not."""
    at = copied(tmp_path, case)
    described = checkpoint.arrays

    def with_added(store: chunks.Store, names: Any) -> Any:
        known = described(store, [name for name in names if name != added])
        like = next(array for name, array in known.items() if "wo.kernel" in name)
        shape, chunk = ((of[0], *of[2:]) for of in (like.shape, like.chunk))
        return {**known, added: like._replace(shape=shape, chunk=chunk)}

    def extended(text: dict[str, Any]) -> None:
        names = tuple(added.split("."))
        entry = {"key_metadata": [{"key": name, "key_type": 2} for name in names]}
        text["tree_metadata"][str(names)] = entry | {"value_metadata": {"value_type": "jax.Array"}}

    monkeypatch.setattr(checkpoint, "arrays", with_added)
    changed(at / "items/_METADATA", extended)
    refused(convert("maxtext2hf", at, tmp_path / "out"), code, part.format(added))


def test_a_query_of_eight_bits(convert, tmp_path, monkeypatch):
    at = copied(tmp_path, "llama_state")
    described = checkpoint.arrays

    def of_eight_bits(store: chunks.Store, names: Any) -> Any:
        return {
            name: array._replace(dtype="float8_e4m3fn") if "query" in name else array
            for name, array in described(store, names).items()
        }

    monkeypatch.setattr(checkpoint, "arrays", of_eight_bits)
    refused(
        convert("maxtext2hf", at, tmp_path / "out"),
        4,
        "is F8_E4M3, in which nothing is computed",
        "multiply by the root",
    )


@pytest.mark.parametrize(("place", "names"), [("default", "default, items"), (".", "itself, items")])
def test_two_in_one_folder(convert, tmp_path, place, names):
    """Two items of a step, or one checkpoint in another's folder: one of them is named."""
    at = copied(tmp_path, "llama_state")
    shutil.copytree(at / "items", at / place, dirs_exist_ok=True)
    ran = convert("maxtext2hf", at, tmp_path / "out")
    refused(ran, 3, f"{at} holds 2 checkpoints of Orbax: {names}", f"name one: {at}/", str(at / "items"))
    assert not (tmp_path / "out").exists()
    assert convert("maxtext2hf", at / "items", tmp_path / "out", "--config", at).code == 0


@pytest.mark.parametrize("name", ["1000.orbax-checkpoint-tmp-17", "1000/items.orbax-checkpoint-tmp-18"])
def test_a_save_that_was_not_finished(convert, tmp_path, name):
    at, path = copied(tmp_path, "llama_state"), tmp_path / "run" / name
    (at / "items" if "/" in name else at).rename(path)
    refused(convert("maxtext2hf", path, tmp_path / "out"), 3, "is a save that Orbax has not finished")


def test_chunks_of_zeros_that_were_left_out(convert, tmp_path):
    at = copied(tmp_path, "llama_state")
    changed(at / "items/_METADATA", lambda text: text.update(store_array_data_equal_to_fill_value=False))
    refused(convert("inspect", at), 4, "left out chunks of zeros")


@pytest.mark.parametrize("name", ["..", "", "a/b", "a\0b", "a\nb", "\ud800"])
def test_names_that_lead_elsewhere(tmp_path, name):
    at = copied(tmp_path, "mistral_files")

    def renamed(text: dict[str, Any]) -> None:
        next(iter(text["tree_metadata"].values()))["key_metadata"][0]["key"] = name

    changed(at / "items/_METADATA", renamed)
    with pytest.raises(SourceError, match="without sound names"):
        open_checkpoint(at)


@pytest.mark.parametrize("change", [{"tree_metadata": {}}, {"tree_metadata": {"a": 1}}, {"use_ocdbt": 1}])
def test_metadata_that_is_none(tmp_path, change):
    at = copied(tmp_path, "llama_state")
    changed(at / "items/_METADATA", lambda text: text.update(change))
    with pytest.raises(SourceError, match="_METADATA"):
        open_checkpoint(at)


def test_an_array_of_too_many_chunks(tmp_path):
    at = copied(tmp_path, "qwen3_files_zarr2")
    array = next((at / "items").glob("*embedding.value")) / ".zarray"
    changed(array, lambda text: text.update(shape=[1 << 40, 32], chunks=[1, 32]))
    with pytest.raises(SourceError, match=r"is in 1099511627776 chunks of \[1, 32\]"):
        open_checkpoint(at)


def test_a_chunk_that_is_larger_than_its_array(tmp_path):
    """It would be decoded whole."""
    at = copied(tmp_path, "qwen3_files_zarr2")
    array = next((at / "items").glob("*embedding.value")) / ".zarray"
    changed(array, lambda text: text.update(chunks=[1 << 30, 1 << 30]))
    with pytest.raises(SourceError, match="no part of it"):
        open_checkpoint(at)


def test_no_command_writes_it(convert, tmp_path):
    refused(
        convert("to", "maxtext", GOLDEN / "converted_llama31/hf", tmp_path / "out"),
        2,
        "no command writes",
        "to_maxtext",
    )


def test_a_part_of_one(convert, tmp_path):
    at = copied(tmp_path, "llama_state")
    refused(convert("inspect", at / "items/ocdbt.process_0"), 4, "a part of a checkpoint of Orbax", "_METADATA")
    refused(convert("inspect", at.parent), 3, "holds 1 checkpoint", f"name one: {at}")


@pytest.mark.parametrize("name", ["llama_state", "mistral_files"])
def test_a_path_with_dots_and_a_link(convert, tmp_path, monkeypatch, name):
    """tensorstore refuses dots, and a link's parent is that of the folder that it leads to."""
    at = copied(tmp_path / "a", name)
    assert convert("maxtext2hf", at, tmp_path / "plain").code == 0
    (tmp_path / "b/c").mkdir(parents=True)
    (tmp_path / "b/c/link").symlink_to(at.parent)
    monkeypatch.chdir(tmp_path / "b")
    for number, path in enumerate(("../a/run/1000", "c/link/../run/1000")):
        out = tmp_path / f"out{number}"
        ran = convert("maxtext2hf", path, out)
        assert ran.code == 0, ran.err
        file = "model.safetensors"
        assert (out / file).read_bytes() == (tmp_path / "plain" / file).read_bytes()


def test_one_in_a_store(convert, monkeypatch):
    monkeypatch.setattr(checkpoint, "is_remote", lambda path: True)
    refused(convert("inspect", GOLDEN / "mixtral/checkpoint"), 4, "is in a store", "copy it to a disk")
