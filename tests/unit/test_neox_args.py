"""The yml of GPT-NeoX: settings both ways, YaRN as the fork computes it, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest

from formats.deepspeed.neox.yml import from_neox, to_neox
from formats.errors import SourceError, UnsupportedError

LLAMA: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 64, "num_attention_heads": 8, "num_kv_heads": 4, "max_position_embeddings": 4096,
    "pos_emb": "rotary", "norm": "rmsnorm", "rms_norm_epsilon": "3e-06", "activation": "swiglu",
    "no_weight_tying": True, "rotary_emb_base": 200000,
}  # fmt: skip
PYTHIA: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 64, "num_attention_heads": 8, "max_position_embeddings": 2048, "pos_emb": "rotary",
    "rotary_pct": 0.25, "no_weight_tying": True, "gpt_j_residual": True,
}  # fmt: skip
FLASH = {"attention_config": [[["flash"], 2]]}
GPT2 = {key: value for key, value in PYTHIA.items() if key not in ("pos_emb", "rotary_pct", "gpt_j_residual")}


def spec(config: dict[str, Any], *, biases: bool = False, **settings: Any) -> Any:
    return from_neox(config, settings, 96, biases, 211, "run.yml")


def test_a_llama():
    model = spec(LLAMA)
    assert (model.family, model.kv_heads, model.norm_epsilon, model.tied) == ("llama", 4, 3e-6, False)
    assert spec(LLAMA | {"sliding_window_width": 512} | FLASH).family == "mistral"


@pytest.mark.parametrize(
    ("norm", "told"),
    [({"norm": "rmsnorm"}, 1), ({"norm": "rmsnorm", "rmsnorm_fusion": True}, 0), ({"norm": "te_rmsnorm"}, 0)],
)
def test_a_norm_that_older_versions_compute_otherwise(norm, told):
    notes = spec({**LLAMA, **norm}).notes
    assert [("before 4c9f1081" in note, "3e-06" in note) for note in notes] == [(True, True)] * told


def test_a_window_is_as_wide_as_in_neox():
    """Its mask, computed here as it does (megatron/utils.py:67-80), is that of transformers with our setting."""
    import torch
    from transformers.masking_utils import sliding_window_causal_mask_function

    mask = torch.triu(torch.tril(torch.ones(9, 9)), diagonal=-3) >= 0.5
    model = spec(LLAMA | {"sliding_window_width": 3} | FLASH)
    sees = sliding_window_causal_mask_function(model.sliding_window)
    theirs = [[bool(sees(0, 0, torch.tensor(row), torch.tensor(column))) for column in range(9)] for row in range(9)]
    assert torch.equal(mask, torch.tensor(theirs))
    assert to_neox(model, 1, 0, 1, {})["sliding_window_width"] == 3
    assert "sliding_window = 4 counts the token itself, sliding_window_width = 3 of GPT-NeoX" in model.notes[0]
    assert (spec(LLAMA | {"sliding_window_width": 3}, sliding_window=3).sliding_window, len(spec(LLAMA).notes)) == (
        3,
        1,
    )
    with pytest.raises(SourceError, match="sliding_window_width = 0"):
        spec(LLAMA | {"sliding_window_width": 0})


@pytest.mark.parametrize(
    "kinds", [None, [[["global"], 3]], [[["flash", "global"], "all"]], [[["flash"], 2], [["global"], 1]]]
)
def test_only_flash_attention_keeps_to_a_window(kinds):
    """Other layers get a mask without it, or a softmax that reads no mask (training.py:523, fused_softmax.py:162)."""
    config = LLAMA | {"sliding_window_width": 7, "attention_config": kinds, "seq_length": 64}
    with pytest.raises(UnsupportedError, match=r"sliding_window_width = 7 with seq_length = 64 and .* global"):
        spec(config)
    assert spec(config | {"seq_length": 8}).sliding_window == 8  # no text was longer than the window
    for window in (None, 8):
        model = spec(config, sliding_window=window)
        again = to_neox(model, 1, 0, 1, config)
        assert (model.sliding_window, spec(again).sliding_window) == (window, window)
        assert again["attention_config"] == ([[["flash"], 2]] if window else kinds)


def test_global_attention_in_a_pipeline_keeps_to_a_window():
    """Its mask has the window (training.py:485, utils.py:67); the fused softmax does not read the mask."""
    config = LLAMA | {"sliding_window_width": 7, "attention_config": None, "seq_length": 64, "pipe_parallel_size": 1}
    assert spec(config).sliding_window == 8
    with pytest.raises(UnsupportedError, match="in a pipeline without scaled_upper_triang_masked_softmax_fusion"):
        spec(config | {"scaled_upper_triang_masked_softmax_fusion": True})
    with pytest.raises(UnsupportedError, match="attention of the kind local"):
        spec(config | {"attention_config": [[["local"], "all"]]})


def test_an_odd_number_of_rotary_elements_is_refused():
    """GPT-NeoX broadcasts a single element to two, transformers turns one more."""
    with pytest.raises(UnsupportedError, match="odd number of a head's"):
        spec(PYTHIA | {"hidden_size": 32, "num_attention_heads": 8, "rotary_pct": 0.25}, biases=True)


def test_what_neox_takes_when_a_key_is_absent():
    """megatron/neox_arguments/neox_args.py at ea7aefd8: tied, LayerNorm with 1e-5, GELU, serial, whole heads turn."""
    bare = {key: PYTHIA[key] for key in ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")}
    model = spec(bare | {"pos_emb": "rotary"}, biases=True)
    assert (model.family, model.tied, model.norm_epsilon, model.rope_theta) == ("gpt_neox", True, 1e-5, 10000.0)
    assert (model.rotary_fraction, model.parallel_residual, model.activation) == (1.0, False, "gelu")
    model = spec(bare, biases=True)
    assert (model.family, model.tied, model.rope_theta, model.activation) == ("gpt2", True, None, "gelu")


@pytest.mark.parametrize(
    "changes",
    [
        {"opt_pos_emb_offset": 2}, {"mup_rp_embedding_mult": 2.0}, {"gpt_j_residual": True}, {"norm": "rmsnorm"},
        {"num_kv_heads": 4}, {"activation": "swiglu"}, {"sliding_window_width": 4}, {"pos_emb": "sinusoidal"},
    ],
    ids=str,
)  # fmt: skip
def test_learned_positions_that_are_no_gpt_2(changes):
    """Its class adds row p of the positions to token p, as they are (word_embeddings.py:142)."""
    with pytest.raises(UnsupportedError):
        spec(GPT2 | changes, biases=True)
    assert spec(GPT2 | {"opt_pos_emb_offset": 0, "mup_rp_embedding_mult": 1.0}, biases=True).family == "gpt2"


@pytest.mark.parametrize(
    ("config", "fused", "activation"),
    [(PYTHIA, True, "gelu_fast"), (PYTHIA, False, "gelu"), (GPT2, True, "gelu_new"), (GPT2, False, "gelu")],
)
def test_a_fused_gelu_is_the_one_with_tanh(config, fused, activation):
    import torch
    from transformers.activations import ACT2FN

    model = spec(config | {"bias_gelu_fusion": fused}, biases=True)
    assert model.activation == activation
    x = torch.linspace(-4, 4, 1000, dtype=torch.float64)
    tanh = x * 0.5 * (1 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))  # activations.py:83
    exact = x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))
    assert torch.allclose(ACT2FN[activation](x), tanh if fused else exact, atol=1e-7)


@pytest.mark.parametrize("factor", [None, 8.0])
@pytest.mark.parametrize("scale", [None, 0.5])
def test_yarn_turns_as_in_the_fork(factor, scale):
    """Its cosine and sine, computed here as it does, are those of transformers with our settings."""
    import torch
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    keys = {"yarn_factor": factor, "yarn_attention_factor": scale}
    config = LLAMA | {"yarn": True, "yarn_original_max_position_embeddings": 1024, "seq_length": 4096}
    model = spec(config | {key: value for key, value in keys.items() if value is not None})
    rope = {"rope_theta": model.rope_theta, **model.rope_scaling}
    theirs = LlamaConfig(head_dim=64, max_position_embeddings=4096, rope_parameters=rope)
    frequencies, product = ROPE_INIT_FUNCTIONS["yarn"](theirs, "cpu")
    stretch, dim, base = factor or 4.0, 64, 200000
    plain = 1.0 / base ** (torch.arange(0, dim, 2).float() / dim)

    def place(turns: float) -> float:
        return dim * math.log(1024 / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = max(math.floor(place(32)), 0), min(math.ceil(place(1)), dim - 1)
    ramp = ((torch.arange(dim // 2) - low) / (high - low)).clamp(0, 1)
    assert torch.allclose(frequencies, plain * (1 - ramp) + plain / stretch * ramp)
    assert product == pytest.approx(0.1 * (1.0 if scale is None else scale) * math.log(stretch) + 1)


@pytest.mark.parametrize(
    "config", [LLAMA, LLAMA | {"num_kv_heads": 8}, LLAMA | {"sliding_window_width": 512} | FLASH, PYTHIA, GPT2]
)
def test_what_is_written_is_read_as_the_same(config):
    model = spec(config, biases="norm" not in config)
    again = to_neox(model, 2, 0, 128, {})
    assert spec(again, biases="norm" not in config) == model
    assert "train_iters" not in again
    kept = to_neox(model, 2, 0, 128, config | {"train_iters": 7, "expansion_factor": 4, "mlp_type": "llama"})
    assert kept["train_iters"] == 7
    assert not {"expansion_factor", "mlp_type"} & kept.keys()


@pytest.mark.parametrize(
    ("keys", "setting"),
    [
        ({"sliding_window_width": 512}, {"sliding_window": None}),
        ({"yarn": True, "yarn_original_max_position_embeddings": 1024, "yarn_factor": 4.0}, {"rope_scaling": None}),
    ],
)
def test_what_the_kept_yml_says_and_the_model_no_longer_has_is_switched_off(keys, setting):
    model = spec(LLAMA | keys, **setting)
    again = spec(to_neox(model, 2, 0, 128, LLAMA | keys))
    assert (again.sliding_window, again.rope_scaling) == (None, None)
    assert not {*keys} & to_neox(model, 2, 0, 128, LLAMA).keys()


def test_an_inner_size_that_neox_takes_two_thirds_of():
    """ParallelMLP: int(int(x * 2 / 3)) for gate and up together (transformer.py:117-143)."""
    for ffn in (96, 21504, 11008, 14336, 5461):
        model = from_neox(LLAMA, {}, ffn, False, 211, "run.yml")
        size = to_neox(model, 1, 0, 1, {})["intermediate_size"]
        assert (int(size * 2 / 3), int(size * 2 / 3) // 2) == (2 * ffn, ffn)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"num_attention_heads": None}, SourceError), ({"num_layers": "two"}, SourceError),
        ({"norm": "scalenorm"}, UnsupportedError), ({"activation": "reglu"}, UnsupportedError),
        ({"gpt_j_tied": True}, UnsupportedError), ({"te_mha": True}, UnsupportedError),
        ({"te_layernorm_mlp": True}, UnsupportedError), ({"moe_num_experts": 8}, UnsupportedError),
        ({"use_mup": True}, UnsupportedError), ({"attention_config": [[["mamba"], 2]]}, UnsupportedError),
        ({"attention_config": {"a": 1}}, UnsupportedError), ({"rotary_emb_base": "much"}, SourceError),
        ({"rms_norm_epsilon": float("nan")}, SourceError), ({"num_kv_heads": 3}, SourceError),
    ],
    ids=str,
)  # fmt: skip
def test_what_transformers_cannot_compute_is_refused(changes, error):
    with pytest.raises(error):
        spec(LLAMA | changes)


@pytest.mark.parametrize(
    "key",
    [
        "use_qk_layernorm", "gpt_j_tied", "use_mup", "te_mha", "te_fp8_mha", "te_layernorm_mlp", "geglu", "openai_gelu",
        "apply_residual_connection_post_layernorm",
    ],
)  # fmt: skip
def test_switches_that_change_what_a_model_computes(key):
    """None of them moves a tensor: off they may be said, on no class of transformers computes it."""
    assert spec(LLAMA | {key: False}) == spec(LLAMA)
    with pytest.raises(UnsupportedError, match=f"{key} = True"):
        spec(LLAMA | {key: True})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_experts", 2), ("moe_num_experts", 2), ("num_unique_layers", 1), ("soft_prompt_tuning", {"enabled": True}),
        ("output_layer_parallelism", "row"), ("train_impl", "rm"), ("sparsity", "all"), ("sparsity", "interspersed"),
    ],
)  # fmt: skip
def test_values_that_change_what_a_model_computes(key, value):
    with pytest.raises(UnsupportedError, match=f"{key} = "):
        spec(LLAMA | {key: value})


def test_outputs_that_are_summed_up_twice():
    """Transformer Engine's layers sum up, and a parallel residual does once more (transformer.py:1116)."""
    config = PYTHIA | {"te_rowparallel": True, "model_parallel_size": 2}
    with pytest.raises(UnsupportedError, match=r"te_rowparallel = True .* 2 tensor parallel ranks"):
        spec(config, biases=True)
    model = spec(config | {"model_parallel_size": 1}, biases=True)
    assert spec(config | {"gpt_j_residual": False}, biases=True).parallel_residual is False
    assert to_neox(model, 2, 0, 1, config)["te_rowparallel"] is False
    assert "te_rowparallel" not in to_neox(model, 2, 0, 1, PYTHIA)
