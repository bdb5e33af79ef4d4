"""HF to FSDP and back: every file comes back byte for byte; and the native names of torchtitan become those of HF."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.faults.dcp_tools import as_trained, save, weights
from tests.models import DTYPES, IN_EVERY_TYPE, RENAMED, files

RANKS = [1, 2, 3, 8, 300]
"""300: more than any tensor has rows."""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), [(name, dtype) for name in IN_EVERY_TYPE for dtype in DTYPES])
def test_every_type_comes_back(model, convert, tmp_path, name, dtype):
    """Every family comes back in `test_chain.py`."""
    source = model(name, dtype, shard="100KB" if dtype == "bfloat16" else "50GB")
    digest = convert("digest", source).out.split()[0]
    for ranks in (2, 300) if dtype == "float32" else (3,):
        folder, back = tmp_path / f"{ranks}", tmp_path / f"{ranks} back"
        assert convert("hf2fsdp", source, folder, "--ranks", ranks, "-q").code == 0
        assert convert("digest", folder).out.split()[0] == digest
        assert convert("verify", folder, source).code == 0
        options = ("--shard-size", "100KB") if dtype == "bfloat16" else ()
        assert convert("fsdp2hf", folder, back, *options, "-q").code == 0
        if options and name in RENAMED:
            assert convert("digest", back).out.split()[0] == digest
        else:
            assert files(back) == files(source)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(
    "changes",
    [
        {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 16, "hidden_size": 48},
        {
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 14,
            "hidden_size": 51,
            "intermediate_size": 97,
        },
        {"num_hidden_layers": 1, "vocab_size": 1},
        {"vocab_size": 211, "hidden_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1},
    ],
    ids=["three heads", "nothing divides", "one row", "narrow"],
)
def test_odd_sizes_come_back(model, convert, tmp_path, changes, ranks):
    source = model("llama", "bfloat16", **changes)
    assert convert("hf2fsdp", source, tmp_path / "one", "--ranks", ranks, "-q").code == 0
    assert convert("fsdp2hf", tmp_path / "one", tmp_path / "back", "-q").code == 0
    assert files(tmp_path / "back") == files(source)


@pytest.mark.parametrize("ranks", RANKS)
def test_chunks_are_those_of_fsdp(model, convert, tmp_path, ranks):
    """ceil(rows / ranks) rows for each rank, the rest for the last, and no file for those that get none."""
    import torch.distributed.checkpoint as dcp

    assert convert("hf2fsdp", model("llama"), tmp_path / "c", "--ranks", ranks, "-q").code == 0
    stored = dcp.FileSystemReader(tmp_path / "c").read_metadata().state_dict_metadata["model.model.embed_tokens.weight"]
    step = -(-211 // ranks)
    assert [list(chunk.offsets) for chunk in stored.chunks] == [[start, 0] for start in range(0, 211, step)]
    assert sum(chunk.sizes[0] for chunk in stored.chunks) == 211
    assert len(list((tmp_path / "c").glob("*.distcp"))) == min(ranks, 211)


def test_the_same_source_gives_the_same_bytes(model, convert, tmp_path):
    for name, threads in (("one", 1), ("two", 4)):
        assert convert("hf2fsdp", model("qwen2"), tmp_path / name, "--ranks", 3, "-q", "-j", threads).code == 0
    assert files(tmp_path / "one") == files(tmp_path / "two")


def test_torch_reads_what_we_write_without_its_own_config(model, convert, tmp_path):
    """dcp_to_torch_save reads the folder, and what it says is the state dict that we began with."""
    import torch
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    source = model("qwen3")
    assert convert("hf2fsdp", source, tmp_path / "c", "--ranks", 5, "-q").code == 0
    dcp_to_torch_save(as_trained(tmp_path / "c"), tmp_path / "all.pt")
    state, expected = torch.load(tmp_path / "all.pt")["model"], weights(source)
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[key], expected[key]) for key in expected)


@pytest.mark.parametrize("topology", [("--tp", 2, "--pp", 2), ("--tp", 4)])
def test_megatron_reaches_fsdp_and_fsdp_megatron(model, convert, tmp_path, topology):
    source = model("qwen2-tied", "bfloat16")
    assert convert("hf2megatron", source, tmp_path / "m", *topology, "-q").code == 0
    assert convert("hf2fsdp", tmp_path / "m", tmp_path / "f", "--ranks", 3, "-q").code == 0
    assert convert("hf2fsdp", source, tmp_path / "direct", "--ranks", 3, "-q").code == 0
    assert files(tmp_path / "f") == files(tmp_path / "direct")
    assert convert("diff", tmp_path / "m", tmp_path / "f").code == 0


# --- torchtitan ------------------------------------------------------------------------------------------------------

NATIVE = {
    "self_attn.q_proj": "attention.wq", "self_attn.k_proj": "attention.wk", "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo", "self_attn.q_norm": "attention.q_norm", "self_attn.k_norm": "attention.k_norm",
    "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3", "mlp.down_proj": "feed_forward.w2",
    "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
"""From `from_hf_map` of pytorch/torchtitan v0.2.0, models/llama3/model/state_dict_adapter.py and models/qwen3."""


def native(source: Path, qkv: str = "", head: str = "output") -> dict[str, Any]:
    """The state dict that torchtitan has of a model."""
    config = json.loads((source / "config.json").read_text())
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    state = {}
    for key, value in weights(source).items():
        tensor, name = value, key.removeprefix("model.")
        part = name.split(".")[-2]
        if config["model_type"] == "llama" and part in heads:  # `_reverse_permute` of the same file
            rows, columns = tensor.shape
            pairs = tensor.view(heads[part], 2, rows // heads[part] // 2, columns)
            tensor = pairs.transpose(1, 2).reshape(rows, columns)
        for theirs, ours in NATIVE.items():
            prefix = qkv if part in ("q_proj", "k_proj", "v_proj") else ""
            name = name.replace(f".{theirs}.", f".{ours.replace('.w', f'.{prefix}w')}.")
        name = name.replace("embed_tokens", "tok_embeddings").replace("lm_head", head)
        state[name] = tensor
    return state


@pytest.mark.parametrize(("qkv", "head"), [("", "output"), ("qkv_linear.", "lm_head")], ids=["v0.2.0", "b5bcd76"])
@pytest.mark.parametrize("name", ["llama", "llama-mqa", "llama3", "qwen3", "llama-tied", "qwen3-tied"])
def test_native_names_of_torchtitan_become_those_of_hf(model, convert, tmp_path, name, qkv, head):
    import torch

    source = model(name)
    state = native(source, qkv, head)
    if "tied" in name:
        state[f"{head}.weight"] = state["tok_embeddings.weight"]
    moments = {f"state.{key}.exp_avg": torch.zeros(tensor.shape) for key, tensor in state.items()}
    others = {"optimizer": moments, "lr_scheduler": {"last_epoch": 7}, "train_state": {"step": torch.tensor(7)}}
    folder = save(tmp_path / "step-7", state | {"freqs_cis": torch.randn(8, 4, dtype=torch.complex64)} | others)
    ran = convert("fsdp2hf", folder, tmp_path / "out", "--config", source, "-q")
    assert ran.code == 0, ran.err
    assert files(tmp_path / "out") == files(source)


def test_native_names_that_lack_a_table_are_refused(model, convert, tmp_path):
    folder = save(tmp_path / "step-7", native(model("mistral", sliding_window=None)))
    ran = convert("fsdp2hf", folder, tmp_path / "out", "--config", model("mistral", sliding_window=None))
    assert ran.code == 4
    assert "torchtitan" in ran.err


ATTENTION = NATIVE | {f"self_attn.{letter}_proj": f"attention.qkv_linear.w{letter}" for letter in "qkv"}
LATENT = NATIVE | {
    "self_attn.q_proj": "attention.wq", "self_attn.q_a_proj": "attention.wq_a", "self_attn.q_b_proj": "attention.wq_b",
    "self_attn.q_a_layernorm": "attention.q_norm", "self_attn.kv_a_proj_with_mqa": "attention.wkv_a",
    "self_attn.kv_a_layernorm": "attention.kv_norm", "self_attn.kv_b_proj": "attention.wkv_b",
}  # fmt: skip
MIXTURE = {
    "mlp.gate.weight": "moe.router.gate.weight", "mlp.gate.e_score_correction_bias": "moe.expert_bias_E",
    "mlp.shared_experts.gate_proj": "moe.shared_experts.w1", "mlp.shared_experts.up_proj": "moe.shared_experts.w3",
    "mlp.shared_experts.down_proj": "moe.shared_experts.w2", "mlp.router": "moe.router.gate",
    "self_attn.sinks": "attention.sinks",
}  # fmt: skip
EXPERTS = {"gate_proj": "w1_EFD", "up_proj": "w3_EFD", "down_proj": "w2_EDF"}
OUTPUT_FIRST = {
    "gate_up_proj": "mlp1_weight_EGD", "down_proj": "mlp2_weight_EDF",
    "gate_up_proj_bias": "mlp1_bias_EG", "down_proj_bias": "mlp2_bias_ED",
}  # fmt: skip
"""From `from_hf_map` of torchtitan 0.3.0, state_dict_adapter.py of its three models, and models/gpt_oss/moe.py."""


def native_mixture(source: Path) -> dict[str, Any]:
    """The state dict that torchtitan 0.3.0 has of a model with experts."""
    import torch

    kind = json.loads((source / "config.json").read_text())["model_type"]
    names = MIXTURE | (LATENT if kind == "deepseek_v3" else ATTENTION)
    state, experts = {}, {}
    for key, tensor in weights(source).items():
        name = key.removeprefix("model.").replace("embed_tokens", "tok_embeddings")
        layer, _, inner = name.partition(".mlp.experts.")
        stem = f"{layer}.moe.routed_experts.inner_experts"
        if inner and kind == "gpt_oss":
            turned = tensor if "bias" in inner else tensor.transpose(1, 2)
            state[f"{stem}.{OUTPUT_FIRST[inner]}"] = turned.contiguous()
        elif inner:
            number, matrix, _ = inner.split(".")
            experts.setdefault(f"{stem}.{EXPERTS[matrix]}", {})[int(number)] = tensor
        else:
            for hub, own in sorted(names.items(), reverse=True):
                at = name.find(f".{hub}")
                if at > 0 and name[at + 1 + len(hub) :][:1] in ("", "."):
                    name = name.replace(f".{hub}", f".{own}")
                    break
            state[name] = tensor
    return state | {
        name: torch.stack([by_number[i] for i in range(len(by_number))]) for name, by_number in experts.items()
    }


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_moe", "gpt_oss"])
def test_mixtures_under_torchtitan_s_names_both_ways(model, convert, tmp_path, name):
    import torch
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    source = model(name)
    expected = native_mixture(source)
    ran = convert("fsdp2hf", save(tmp_path / "step-7", expected), tmp_path / "out", "--config", source, "-q")
    assert ran.code == 0, ran.err
    assert files(tmp_path / "out") == files(source)
    ran = convert("hf2fsdp", source, tmp_path / "titan", "--names", "torchtitan", "--ranks", 3, "-q")
    assert ran.code == 0, ran.err
    assert "initial_load_path" in ran.out
    dcp_to_torch_save(tmp_path / "titan", tmp_path / "all.pt")
    state = torch.load(tmp_path / "all.pt")
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[key], expected[key]) for key in expected)


@pytest.mark.parametrize(
    ("name", "key", "code"),
    [
        ("qwen3_moe", "layers.0.moe.expert_bias_E", 5),
        ("gpt_oss", "layers.0.moe.expert_bias_E", 5),
        ("deepseek_v3", "mtp_layers.0.enorm.weight", 3),
    ],
)
def test_what_the_model_has_no_place_for_is_refused(model, convert, tmp_path, name, key, code):
    """Such a bias chooses other experts, and torchtitan's own adapters leave it out of these two."""
    import torch

    source = model(name)
    folder = save(tmp_path / "step-7", native_mixture(source) | {key: torch.ones(4)})
    ran = convert("fsdp2hf", folder, tmp_path / "out", "--config", source, "-q")
    assert ran.code == code
    assert key in ran.err
    assert not (tmp_path / "out").exists()
    if code == 5:
        assert "--accept expert_bias_E leaves it out" in ran.err
        ran = convert("fsdp2hf", folder, tmp_path / "out", "--config", source, "-q", "--accept", "expert_bias_E")
        assert (ran.code, key in ran.err) == (0, True), ran.err
        assert convert("verify", tmp_path / "out", source).code == 0
