"""A family in a file of the user's own: the one that the README shows, on a Llama under the names of InternLM2."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from formats.families import FAMILIES
from tests.models import files

README = Path(__file__).parents[2] / "formats" / "README.md"
NAMES = {
    "embed_tokens": "tok_embeddings",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}
"""What InternLM2 calls the tensors of Llama (internlm/internlm2-7b, modeling_internlm2.py)."""


def example() -> str:
    """The file that the README shows."""
    text = README.read_text().partition('    name = "internlm2"')
    return "\n".join(line[4:] for line in (text[1] + text[2].partition("\nFurther")[0]).splitlines())


@pytest.fixture
def family(tmp_path):
    path = tmp_path / "internlm2.toml"
    path.write_text(example())
    return path


@pytest.fixture
def source(model, tmp_path):
    """A Llama, renamed, its queries, keys and values in one tensor, group by group."""
    import torch
    from safetensors.torch import load_file, save_file

    base, folder = model("llama"), tmp_path / "hf"
    shutil.copytree(base, folder)
    tensors, renamed = load_file(base / "model.safetensors"), {}
    for key, value in tensors.items():
        name = "output.weight" if key == "lm_head.weight" else key
        for theirs, ours in NAMES.items():
            name = name.replace(theirs, ours)
        if "q_proj" in key:
            heads = [
                tensors[key.replace("q_proj", projection)].view(4, -1, 8, 64)
                for projection in ("q_proj", "k_proj", "v_proj")
            ]
            renamed[name.replace("self_attn.q_proj", "attention.wqkv")] = torch.cat(heads, 1).reshape(-1, 64)
        elif "k_proj" not in key and "v_proj" not in key:
            renamed[name] = value.contiguous()
    save_file(renamed, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "internlm2", "architectures": ["InternLM2ForCausalLM"]}
    config["bias"] = config.pop("attention_bias")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("form", ["torch", "torch_dist", "megatron-llm"])
def test_it_goes_into_megatron_as_its_twin_does_and_comes_back(model, convert, tmp_path, family, source, form):
    flags = ["--format", form, "--tp", 2]
    for folder, out, own in ((model("llama"), "twin", ()), (source, "run", ("--family", family))):
        ran = convert("hf2megatron", folder, tmp_path / out, *flags, *own)
        assert ran.code == 0, ran.err
    weights = [
        {name: content for name, content in files(tmp_path / out).items() if not name.startswith("huggingface/")}
        for out in ("run", "twin")
    ]
    assert weights[0] == weights[1]
    run, again = tmp_path / "run", tmp_path / "again"
    travelled = run / "huggingface/family.toml"
    assert travelled.read_text() == family.read_text()
    refused = convert("megatron2hf", run, again)
    assert refused.code == 4
    assert f"no table describes the model type 'internlm2' without --family {travelled}" in refused.err
    assert convert("reshard", run, again, "--tp", 4, "--family", travelled).code == 0
    assert convert("verify", again, source, "--family", travelled).code == 0
    assert convert("megatron2hf", again, tmp_path / "back", "--family", travelled).code == 0
    back = files(tmp_path / "back")
    assert back.pop("family.toml") == family.read_bytes()
    expected = files(source)
    assert {*back} == {*expected}
    for name in set(expected) - {"model.safetensors"}:
        assert back[name] == expected[name], name
    assert convert("diff", tmp_path / "back", source, "--family", family).code == 0
    assert "internlm2" not in FAMILIES, "a family of the user's own is known as long as its command runs"


def test_another_file_than_the_one_that_travelled_is_refused(convert, tmp_path, family, source):
    assert convert("hf2megatron", source, tmp_path / "run", "--family", family).code == 0
    other = tmp_path / "other.toml"
    other.write_text(
        family.read_text().replace("value: dim | key: half pair", "key: half pair | value: dim") + "# corrected"
    )
    ran = convert("megatron2hf", tmp_path / "run", tmp_path / "back", "--family", other)
    assert ran.code == 5, ran
    assert f"was written with {tmp_path / 'run/huggingface/family.toml'}" in ran.err


def test_it_travels_through_fsdp(convert, tmp_path, family, source):
    assert convert("hf2fsdp", source, tmp_path / "f", "--ranks", 3, "--family", family).code == 0
    assert convert("fsdp2hf", tmp_path / "f", tmp_path / "back", "--family", tmp_path / "f/family.toml").code == 0
    assert convert("verify", tmp_path / "back", source, "--family", family).code == 0
    ran = convert("hf2neox", source, tmp_path / "n", "--family", family)
    assert ran.code == 4
    assert "GPT-NeoX has no internlm2" in ran.err


def test_without_it_the_model_is_carried_under_its_own_names(convert, tmp_path, source):
    ran = convert("hf2megatron", source, tmp_path / "m")
    assert ran.code == 4
    assert "no table describes the model type 'internlm2' without --family FILE" in ran.err


def test_without_a_config_it_is_the_family_of_a_megatron_folder(model, convert, tmp_path, family):
    assert convert("hf2megatron", model("llama"), tmp_path / "m").code == 0
    shutil.rmtree(tmp_path / "m/huggingface")
    assert convert("megatron2hf", tmp_path / "m", tmp_path / "back", "--family", family).code == 0
    config = json.loads((tmp_path / "back/config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("internlm2", ["InternLM2ForCausalLM"])


def test_it_has_to_be_the_family_of_the_checkpoint(model, convert, tmp_path, family):
    ran = convert("hf2megatron", model("llama"), tmp_path / "m", "--family", family)
    assert ran.code == 2
    assert f"--family {family} describes internlm2, and {model('llama')} is a llama" in ran.err
    assert convert("diff", model("llama"), model("llama"), "--family", family).code == 2


def test_a_line_of_it_can_be_drawn(convert, family):
    assert "group = 8" in convert("explain", "huggingface", "wqkv", "--family", family).out
    assert convert("explain", "megatron", "linear_qkv", "--family", family).code == 2


def test_a_class_of_the_users_own_under_a_known_model_type(model, convert, tmp_path, family, source):
    """Remote code often keeps the model type of the model that it began as."""
    family.write_text('model_type = "llama"\n' + example())
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))
    ran = convert("hf2megatron", source, tmp_path / "m", "--family", family)
    assert ran.code == 0, ran.err
    assert json.loads((tmp_path / "m/huggingface/config.json").read_text())["model_type"] == "llama"


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("gate: ffn hidden", "gate: hidden ffn", "has shape [96, 64], but the configuration implies [64, 96]"),
        ("value: dim", "value: dim value_bias", "has no size|axes"),
        ("ffn_norm.weight", "mlp_norm.weight", "4 tensors are missing: model.layers.0.mlp_norm.weight"),
        ("    model.norm.weight                                final_norm: hidden\n", "", "model.norm.weight"),
    ],
)
def test_a_table_of_another_model_is_refused(convert, tmp_path, family, source, old, new, reason):
    text = 'only_here = "it is wrong"\n' + example()
    assert old.strip() in text
    family.write_text(text.replace(old.strip(), new.strip()))
    ran = convert("inspect", source, "--family", family)
    assert ran.code in (2, 3)
    assert any(message in ran.err for message in reason.split("|")), ran.err
