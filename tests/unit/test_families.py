"""What is particular to a family: the names and masks of GPT-2, the shapes of Falcon, and what each refuses."""

from __future__ import annotations

import copy
import json
import math
import re
import shutil

import pytest
import transformers
from safetensors.torch import load_file, save_file

from formats.errors import RefusedError, UnsupportedError
from formats.families import FAMILIES, OTHERWISE, family_of
from formats.huggingface.config import from_huggingface, to_huggingface
from formats.huggingface.folder import model_slots
from formats.huggingface.rope import PARTIAL
from formats.megatron.args.args import from_megatron, to_megatron
from formats.model.spec import differences
from formats.registry import open_checkpoint
from tests.models import files, settings_of

FALCON_7B = {
    "alibi": False, "apply_residual_connection_post_layernorm": False, "architectures": ["FalconForCausalLM"],
    "bias": False, "hidden_size": 4544, "layer_norm_epsilon": 1e-05, "model_type": "falcon", "multi_query": True,
    "new_decoder_architecture": False, "num_attention_heads": 71, "num_hidden_layers": 32, "parallel_attn": True,
    "vocab_size": 65024,
}  # fmt: skip
FALCON_40B = {
    **FALCON_7B, "hidden_size": 8192, "new_decoder_architecture": True, "num_attention_heads": 128,
    "num_hidden_layers": 60, "num_kv_heads": 8,
}  # fmt: skip
FALCON_11B = {
    **FALCON_40B, "hidden_size": 4096, "num_attention_heads": 32, "num_ln_in_parallel_attn": 1,
    "ffn_hidden_size": 16384, "tie_word_embeddings": False, "rope_theta": 500042,
}  # fmt: skip
"""As tiiuae wrote them on the Hub, as far as they say something of the model."""


def config(name: str, **changes) -> dict:
    """A config.json as transformers 5 writes it."""
    from transformers import AutoConfig

    return AutoConfig.for_model(**settings_of(name, **changes)).to_dict()


EXPERTS_OF_THE_HUB = {
    "glm4_moe": (
        {
            "attention_bias": True, "first_k_dense_replace": 3, "head_dim": 128, "hidden_act": "silu",
            "hidden_size": 5120, "intermediate_size": 12288, "max_position_embeddings": 131072,
            "model_type": "glm4_moe", "moe_intermediate_size": 1536, "n_group": 1, "n_routed_experts": 160,
            "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 96, "num_experts_per_tok": 8,
            "num_hidden_layers": 92, "num_key_value_heads": 8, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5,
            "rope_scaling": None, "rope_theta": 1000000, "routed_scaling_factor": 2.5, "tie_word_embeddings": False,
            "topk_group": 1, "use_qk_norm": True, "vocab_size": 151552,
        },
        353,
    ),
    "solar_open": (
        {
            "first_k_dense_replace": 0, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
            "intermediate_size": 10240, "max_position_embeddings": 131072, "model_type": "solar_open",
            "moe_intermediate_size": 1280, "n_routed_experts": 128, "n_shared_experts": 1, "norm_topk_prob": True,
            "num_attention_heads": 64, "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5, "rope_theta": 1000000, "routed_scaling_factor": 1.0, "tie_word_embeddings": False,
            "rope_scaling": {"factor": 2.0, "original_max_position_embeddings": 65536, "type": "yarn"},
            "vocab_size": 196608,
        },
        103,
    ),
    "minimax_m2": (
        {
            "head_dim": 128, "hidden_act": "silu", "hidden_size": 3072, "intermediate_size": 1536,
            "max_position_embeddings": 204800, "model_type": "minimax_m2", "num_attention_heads": 48,
            "num_experts_per_tok": 8, "num_hidden_layers": 62, "num_key_value_heads": 8, "num_local_experts": 256,
            "qk_norm_type": "per_layer", "rms_norm_eps": 1e-6, "rope_theta": 5000000, "rotary_dim": 64,
            "scoring_func": "sigmoid", "shared_intermediate_size": 0, "tie_word_embeddings": False,
            "use_qk_norm": True, "use_routing_bias": True, "vocab_size": 200064,
        },
        229,
    ),
    "ernie4_5_moe_300b": (
        {
            "hidden_act": "silu", "hidden_size": 8192, "intermediate_size": 28672, "max_position_embeddings": 131072,
            "model_type": "ernie4_5_moe", "moe_intermediate_size": 3584, "moe_k": 8, "moe_layer_end_index": 53,
            "moe_layer_interval": 1, "moe_layer_start_index": 3, "moe_num_experts": 64, "moe_num_shared_experts": 0,
            "num_attention_heads": 64, "num_hidden_layers": 54, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0, "tie_word_embeddings": True, "use_bias": False, "vocab_size": 103424,
        },
        299,
    ),
}  # fmt: skip
"""Configs of transformers 4, and how many billion parameters the model has without what predicts further tokens."""


@pytest.mark.parametrize("name", EXPERTS_OF_THE_HUB)
def test_a_config_of_the_hub_makes_a_model_of_its_size(name):
    from transformers import AutoConfig

    settings, billions = EXPERTS_OF_THE_HUB[name]
    spec = from_huggingface(settings, {}, "config.json")
    assert spec.family == name
    assert round(sum(math.prod(shape) for _, _, shape in spec.boxes()) / 1e9) == billions
    assert to_huggingface(spec, settings) == settings
    assert differences(from_huggingface(AutoConfig.for_model(**copy.deepcopy(settings)).to_dict(), {}, "5"), spec) == []
    if not FAMILIES[name].only_here:
        assert from_megatron(to_megatron(spec), {}, spec, "args") == spec


@pytest.mark.parametrize("name", ["glm4_moe", "minimax_m2"])
@pytest.mark.parametrize("keys", [{}, {"partial_rotary_factor": None}, {"partial_rotary_factor": 0.25}])
def test_the_part_of_a_head_that_rotates_is_that_of_transformers(name, keys):
    """Where the key is there, and says nothing, all of a head rotates, whatever the family assumes without it."""
    from transformers import AutoConfig

    old = {key: value for key, value in config(name).items() if key != "rope_parameters"} | {"rope_theta": 1e4, **keys}
    theirs = AutoConfig.for_model(**copy.deepcopy(old)).rope_parameters.get("partial_rotary_factor", 1.0)
    spec = from_huggingface(old, {}, "config.json")
    assert spec.rotary_fraction == theirs
    assert to_huggingface(spec, old) == old


@pytest.mark.parametrize("keys", [{}, {"rotary_pct": 0.5}, {"rope_scaling": {"type": "default", PARTIAL: 0.5}}])
def test_a_class_with_a_key_of_its_own_for_this_reads_no_other(keys):
    from transformers import AutoConfig

    old = {key: value for key, value in config("gpt_neox").items() if key not in ("rope_parameters", "rotary_pct")}
    old |= {PARTIAL: 0.5 if "rope_scaling" in keys else 0.75, **keys}
    theirs = AutoConfig.for_model(**copy.deepcopy(old)).rope_parameters[PARTIAL]
    assert from_huggingface(old, {}, "config.json").rotary_fraction == theirs


@pytest.mark.parametrize("keys", [{}, {"rope_theta": 7.0}, {"rope_scaling": {"type": "default", "rope_theta": 5.0}}])
def test_what_the_class_of_phi3_takes_for_the_base_of_its_rotation(keys):
    from transformers import AutoConfig

    old = {key: value for key, value in config("phi3").items() if key not in ("rope_parameters", "rope_theta")}
    old |= {"default_theta": 7.0, **keys}
    theirs = AutoConfig.for_model(**copy.deepcopy(old)).rope_parameters["rope_theta"]
    spec = from_huggingface(old, {}, "config.json")
    assert spec.rope_theta == theirs
    assert to_huggingface(spec, old) == old
    changed = to_huggingface(from_megatron(to_megatron(spec), {"rope_theta": 3.0}, spec, "args"), old)
    assert AutoConfig.for_model(**changed).rope_parameters["rope_theta"] == 3.0


@pytest.mark.parametrize("name", ["nemotron_h", "nemotron_h_dense"])
@pytest.mark.parametrize("key", ["time_step_min", "mamba_dt_min"])
def test_the_smallest_step_of_a_nemotron_h(name, key):
    """Two spellings (configuration_nemotron_h.py `__post_init__`) of a limit that Megatron does not have."""
    config = settings_of(name)
    assert from_huggingface({**config, key: 0.001}, {}, "config.json").family == name
    with pytest.raises(UnsupportedError, match=f"{key} = 0.5 is not supported"):
        from_huggingface({**config, key: 0.5}, {}, "config.json")


def test_a_config_that_names_no_layers_with_a_window_stays_as_it_is():
    settings = {**config("ministral"), "layer_types": None}
    spec = from_huggingface(settings, {}, "config.json")
    assert (spec.sliding_window, spec.full_layers) == (8, ())
    assert to_huggingface(from_megatron(to_megatron(spec), {}, spec, "args"), settings) == settings


KIMI_LISTS = {"full_attn_layers": [4, 8], "kda_layers": [1, 2, 3, 5, 6, 7, 9]}
OF_ITS_SIZE: dict[str, tuple[str, dict]] = {
    "gemma4": ("gemma4_text", {}),
    "gemma4 reusing": ("gemma4_text", {"num_kv_shared_layers": 20, "use_double_wide_mlp": True}),
    "gemma4 moe": (
        "gemma4_text",
        {"attention_k_eq_v": True, "num_global_key_value_heads": 2, "hidden_size_per_layer_input": 0}
        | {"enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704},
    ),
    "gemma4 unified": ("gemma4_unified_text", {}),
    "kimi": ("kimi_linear", {}),
    "kimi of the Hub": (
        "kimi_linear",
        {"num_hidden_layers": 9, "first_k_dense_replace": 2}
        | {"linear_attn_config": {**KIMI_LISTS, "num_heads": 16, "head_dim": 64, "short_conv_kernel_size": 3}},
    ),
    "minimax": ("minimax_m3_vl_text", {}),
    "minimax of the Hub": (
        "minimax_m3_vl_text",
        {"num_hidden_layers": 4, "moe_layer_freq": [0, 1, 1, 1], "hidden_act": "swigluoai"}
        | {"sparse_attention_config": {"sparse_attention_freq": [0, 0, 1, 1], "sparse_num_index_heads": 2}},
    ),
    "mimo": ("mimo_v2_flash", {}),
    "mimo of the Hub": ("mimo_v2_flash", {"sliding_window_size": 128, "routed_scaling_factor": None}),
}
"""Model types, and what their configs say: the sizes are those that the class assumes, which are released ones."""


@pytest.mark.parametrize("name", OF_ITS_SIZE)
def test_a_table_has_the_tensors_of_the_class_at_its_real_size(name):
    """Names and shapes, of layers of several kinds and sizes, from a config that says little."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, settings = OF_ITS_SIZE[name]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **copy.deepcopy(settings)))
    spec = from_huggingface({"model_type": kind, **settings}, {}, "config.json")
    slots = [slot for slot in model_slots(spec, memory=True) if not slot.replica]
    theirs = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
    if spec.tied:
        del theirs["lm_head.weight"]
    assert {slot.keys[0]: slot.shape for slot in slots} == theirs
    saved = from_huggingface(json.loads(model.config.to_json_string(use_diff=False)), {}, "5")
    assert [*saved.boxes()] == [*spec.boxes()]


DROPPED = ("hy_v3", "ernie4_5_moe")


@pytest.mark.parametrize("name", DROPPED)
def test_what_stays_behind_is_what_transformers_leaves(name):
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import AutoModelForCausalLM

    ignored = AutoModelForCausalLM._model_mapping[type(AutoConfig.for_model(**settings_of(name)))]
    keys = [f"model.layers.{layer}.enorm.weight" for layer in range(100)] + ["model.mtp_block.0.mlp.up_proj.weight"]
    ours = [key for key in keys if any(re.fullmatch(drop, key) for drop in FAMILIES[name].drops)]
    theirs = [
        key for key in keys if any(re.search(pattern, key) for pattern in ignored._keys_to_ignore_on_load_unexpected)
    ]
    assert ours == theirs != []


# --- GPT-2 -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def old_gpt2(model, tmp_path):
    """A GPT-2 as the first one lies on the Hub: the base model's names, its masks, no head."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import GPT2LMHeadModel

    source, folder = model("gpt2"), tmp_path / "old"
    shutil.copytree(source, folder)
    GPT2LMHeadModel.from_pretrained(source).transformer.save_pretrained(tmp_path / "base")
    tensors = load_file(tmp_path / "base/model.safetensors")
    assert "wte.weight" in tensors
    for layer in range(4):
        tensors[f"h.{layer}.attn.bias"] = torch.tril(torch.ones(1, 1, 128, 128))
        tensors[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(
        json.dumps(config("gpt2") | {"architectures": ["GPT2LMHeadModel"], "n_ctx": 128})
    )
    return folder


def test_the_names_and_masks_of_the_first_gpt_2(model, convert, tmp_path, old_gpt2):
    """Its masks are no weights, and its names come back."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    assert convert("digest", old_gpt2).out.split()[0] == convert("digest", model("gpt2")).out.split()[0]
    assert convert("hf2megatron", old_gpt2, tmp_path / "m", "--tp", 2, "--pp", 2).code == 0
    assert convert("megatron2hf", tmp_path / "m", tmp_path / "back").code == 0
    keys = load_file(tmp_path / "back/model.safetensors").keys()
    masks = {key for key in load_file(old_gpt2 / "model.safetensors") if key.endswith((".attn.bias", ".masked_bias"))}
    assert len(masks) == 8
    assert {*keys, *masks} == {*load_file(old_gpt2 / "model.safetensors")}
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(info.values())


def test_its_matrices_are_input_by_output(model, convert, tmp_path):
    """Megatron's are output by input: each of them is the transpose, the fused one head by head."""
    import torch
    from safetensors.torch import load_file

    assert convert("hf2megatron", model("gpt2"), tmp_path / "m", "--norm", "local").code == 0
    state = torch.load(tmp_path / "m/release/mp_rank_00/model_optim_rng.pt", weights_only=False)["model"]
    theirs = load_file(model("gpt2") / "model.safetensors")
    layer, name = "transformer.h.2.", "decoder.layers.2."
    assert torch.equal(state[f"{name}mlp.linear_fc1.weight"], theirs[f"{layer}mlp.c_fc.weight"].T)
    assert torch.equal(state[f"{name}self_attention.linear_proj.weight"], theirs[f"{layer}attn.c_proj.weight"].T)
    heads = torch.stack([part.T.view(8, 8, 64) for part in theirs[f"{layer}attn.c_attn.weight"].split(64, dim=1)], 1)
    assert torch.equal(state[f"{name}self_attention.linear_qkv.weight"], heads.reshape(192, 64))
    assert torch.equal(state["embedding.position_embeddings.weight"], theirs["transformer.wpe.weight"])


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = True is not supported"),
        ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights = False is not supported"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention = True is not supported"),
        ("falcon", {"alibi": True, "bias": True, "multi_query": False, "parallel_attn": False}, "alibi = True"),
        ("falcon", {"multi_query": False}, "multi_query = False"),
        ("falcon", {"parallel_attn": False}, "parallel_attn = False"),
        ("falcon-40b", {"bias": True}, "bias = True"),
        ("falcon-40b", {"parallel_attn": False}, "parallel_attn = False"),
        ("gpt_neox", {"head_dim": 32}, "head_dim = 32 is not supported for gpt_neox, only 8"),
        ("falcon", {"head_dim": 32}, "head_dim = 32 is not supported for falcon, only 8"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is not supported"),
        ("solar_open", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is not supported"),
        ("minimax_m2", {"scoring_func": "softmax"}, "scoring_func = 'softmax' is not supported"),
        ("ernie4_5_moe", {"use_bias": True}, "use_bias = True is not supported"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob = True is not supported"),
        ("nemotron_h", {"tie_word_embeddings": True}, "tie_word_embeddings = True is not supported"),
        ("nemotron_h_dense", {"tie_word_embeddings": True}, "tie_word_embeddings = True is not supported"),
        ("kimi_linear", {"tie_word_embeddings": True}, "tie_word_embeddings = True is not supported"),
        ("opensci", {"qk_layernorm": False}, "qk_layernorm = False is not supported"),
    ],
)
def test_what_has_no_table_is_refused(name, changes, reason):
    with pytest.raises(UnsupportedError, match=reason):
        from_huggingface(config(name) | changes, {}, "config.json")


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "opensci"])  # whose class is not transformers'
def test_only_classes_that_tie_their_head_have_tables_of_tied_models(name):
    family = FAMILIES[name]
    ties = bool(getattr(transformers, family.architecture)._tied_weights_keys)
    assert ties == family.requires.get("tie_word_embeddings", True)


@pytest.mark.parametrize("name", ["nemotron_h", "nemotron_h_dense", "kimi_linear"])
def test_a_head_that_is_missing_and_never_tied(model, convert, tmp_path, name):
    """transformers would fill it at random, whatever the config says."""
    folder = shutil.copytree(model(name), tmp_path / "hf")
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedError, match=f"the head of a {name} is never tied"):
        from_huggingface(config(name), {"tied": True}, "config.json")
    ran = convert("hf2hf", folder, tmp_path / "out", "--set", "tied=true")
    assert (ran.code, "lm_head.weight is missing" in ran.err) == (3, True), ran.err
    (folder / "config.json").write_text(json.dumps(config(name) | {"tie_word_embeddings": True}))
    ran = convert("hf2hf", folder, tmp_path / "out")
    assert (ran.code, "lm_head.weight is missing" in ran.err) == (3, True), ran.err


OF_THE_HUB = [
    *((name, "scoring_func", "softmax") for name in ("deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm4_moe_lite")),
    *((name, "topk_method", "greedy") for name in ("deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm4_moe_lite")),
    *((name, "moe_layer_freq", 2) for name in ("deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm4_moe_lite")),
    *((name, "rope_interleave", False) for name in ("deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm4_moe_lite")),
    ("deepseek_v32", "indexer_rope_interleave", True),
    ("glm_moe_dsa", "indexer_rope_interleave", False),
    ("glm4_moe_lite", "first_k_dense_replace", 2),
    ("hy_v3", "first_k_dense_replace", 2),
    ("hy_v3", "moe_router_enable_expert_bias", False),
    ("hy_v3", "moe_router_use_sigmoid", False),
    ("hy_v3", "qk_norm", False),
    ("hy_v3", "route_norm", False),
    ("mimo_v2_flash", "first_k_dense_replace", 2),
    ("minimax_m2", "attention_bias", True),
    ("minimax_m2", "qk_norm_type", "per_head"),
    ("minimax_m2", "shared_intermediate_size", 64),
    ("minimax_m2", "use_qk_norm", False),
    ("minimax_m2", "use_routing_bias", False),
    ("olmoe", "sliding_window", 8),
    ("solar_open", "first_k_dense_replace", 1),
    ("solar_open", "use_qk_norm", True),
    *((name, "apply_residual_connection_post_layernorm", True) for name in ("falcon", "falcon-40b", "falcon-11b")),
]
"""Config keys of a model's own code that the class of transformers 5.23.0 has none of, and what it cannot compute."""


@pytest.mark.parametrize(("name", "key", "value"), OF_THE_HUB)
def test_what_only_the_code_of_the_hub_computes_is_refused(name, key, value):
    with pytest.raises(UnsupportedError, match=f"{key} = {value!r} is not supported"):
        from_huggingface(config(name) | {key: value}, {}, "config.json")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"rope_theta": 1e4}, "a gpt2 has no rotary embedding"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "a gpt2 has no rotary embedding"),
        ({"kv_heads": 4}, "kv_heads = 4 is not supported for gpt2, only 8"),
        ({"head_dim": 16}, "head_dim = 16 is not supported for gpt2, only 8"),
    ],
)
def test_settings_that_are_none_of_gpt_2(settings, reason):
    with pytest.raises(UnsupportedError, match=reason):
        from_huggingface(config("gpt2"), settings, "config.json")


def test_the_mlp_of_gpt_2_has_four_hidden_sizes_where_nothing_else_is_said():
    spec = from_huggingface(config("gpt2-untied"), {}, "config.json")
    assert (spec.ffn, to_huggingface(spec, {})["n_inner"]) == (256, 256)
    assert to_huggingface(spec, config("gpt2-untied"))["n_inner"] is None


def test_a_fused_gelu_of_megatron_is_the_gelu_of_the_config():
    """Both names are the approximation with tanh; without a config it is the one that GPT-2 began with."""
    for name in ("gelu_new", "gelu_pytorch_tanh"):
        base = from_huggingface(config("gpt2", activation_function=name), {}, "config.json")
        args = to_megatron(base)
        assert (args["bias_gelu_fusion"], args["openai_gelu"]) == (True, False)
        assert from_megatron(args, {}, base, "args") == base
        assert from_megatron(args, {}, None, "args").activation == "gelu_new"
    with pytest.raises(RefusedError, match=r"activation: gelu \| gelu_pytorch_tanh"):
        from_megatron(args | {"bias_gelu_fusion": False}, {}, base, "args")


def test_positions_are_weights_of_gpt_2_and_only_a_limit_of_others():
    for name in ("gpt2", "starcoder2"):
        base = from_huggingface(config(name), {}, "config.json")
        args = to_megatron(base) | {"max_position_embeddings": 64}
        if name == "gpt2":
            with pytest.raises(RefusedError, match=r"max_positions: 64 \| 128"):
                from_megatron(args, {}, base, "args")
        else:
            assert from_megatron(args, {}, base, "args") == base


def test_grouped_queries_with_learned_positions_are_no_gpt_2():
    args = to_megatron(from_huggingface(config("gpt2"), {}, "config.json"))
    with pytest.raises(UnsupportedError, match="kv_heads = 2 is not supported for gpt2, only 8"):
        from_megatron(args | {"group_query_attention": True, "num_query_groups": 2}, {}, None, "args")
    with pytest.raises(RefusedError, match="describes a model like gpt2, its config a starcoder2"):
        from_megatron(args, {}, from_huggingface(config("starcoder2"), {}, "config.json"), "args")


# --- Falcon ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "name", "facts"),
    [
        (FALCON_7B, "falcon", (1, 64, 4 * 4544, 2048, True, 1e4)),
        (FALCON_40B, "falcon_40b", (8, 64, 4 * 8192, 2048, True, 1e4)),
        (FALCON_11B, "falcon_11b", (8, 128, 16384, 2048, False, 500042.0)),
    ],
)
def test_the_configs_of_the_hub(settings, name, facts):
    spec = from_huggingface(settings, {}, "config.json")
    assert spec.family == name
    assert (spec.kv_heads, spec.head_dim, spec.ffn, spec.max_positions, spec.tied, spec.rope_theta) == facts
    assert to_huggingface(spec, settings) == settings
    again = to_huggingface(spec, {})
    assert from_huggingface(again, {}, "again") == spec
    assert again["model_type"] == "falcon"


def test_each_head_of_falcon_40b_has_its_own_key_unless_the_config_says_how_many():
    from transformers import AutoConfig

    said = {key: value for key, value in FALCON_40B.items() if key != "num_kv_heads"}
    spec = from_huggingface(said, {}, "config.json")
    assert spec.kv_heads == AutoConfig.for_model(**said).num_kv_heads == 128
    (note,) = [note for note in spec.notes if "num_kv_heads" in note]
    assert note.startswith("num_kv_heads = 128 ")


def test_two_norms_of_falcon_40b_may_be_said():
    """transformers says so once it has built the model."""
    assert family_of(FALCON_40B | {"num_ln_in_parallel_attn": 2}, "config.json").name == "falcon_40b"


@pytest.mark.parametrize("name", ["falcon", "falcon-40b", "falcon-11b"])
def test_queries_keys_and_values_are_those_of_transformers(model, name):
    """`_split_heads` of its own attention, on the matrix as if it were what it computes."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    source = model(name)
    key = "transformer.h.1.self_attention.query_key_value.weight"
    attention = AutoModelForCausalLM.from_pretrained(source).transformer.h[1].self_attention
    flat = load_file(source / "model.safetensors")[key]
    query, first, value = (part[0].movedim(0, -1) for part in attention._split_heads(flat.T[None]))
    (placed,) = [tensor for tensor in open_checkpoint(source).tensors if tensor.key == key]
    spec = open_checkpoint(source).spec
    for leaf in placed.leaves():
        expected = {"query": query, "key": first, "value": value}[leaf.tensor]
        if leaf.tensor != "query" and expected.shape[0] == spec.heads:  # already one for each query head
            expected = expected[:: spec.heads // spec.kv_heads]
        spans = [span for span in leaf.spans if span.axis != "layer"]
        shape, strides = [span.size for span in spans], [span.stride for span in spans]
        ours = torch.as_strided(flat, shape, strides, leaf.base)
        assert torch.equal(ours.reshape(expected.shape), expected)


def test_falcon_with_alibi_is_carried_under_its_own_names(model, convert, tmp_path):
    changes = {"alibi": True, "bias": True, "multi_query": False, "parallel_attn": False}
    source = model("falcon", **changes)
    ran = convert("hf2fsdp", source, tmp_path / "f")
    assert ran.code == 0
    assert "no table checks the names" in ran.err
    assert "alibi = True is not supported for falcon" in ran.err
    assert convert("fsdp2hf", tmp_path / "f", tmp_path / "back").code == 0
    assert files(tmp_path / "back") == files(source)
    ran = convert("hf2megatron", source, tmp_path / "m")
    assert ran.code == 4
    assert "alibi = True is not supported for falcon" in ran.err


def test_a_family_is_named_like_its_model_type():
    """By that the files which may be of a config are found; the others are not read."""
    kinds = {name: family.model_type or name for name, family in FAMILIES.items()}
    odd = {name: kind for name, kind in kinds.items() if not name.startswith(kind)}
    assert odd == {name: kind for kind, names in OTHERWISE.items() for name in names}


def test_a_class_that_transformers_lacks_is_not_named_as_the_next_step(model, convert, tmp_path):
    ran = convert("hf2hf", model("opensci"), tmp_path / "out")
    assert "next: OpensciForCausalLM of open-sci's branch of transformers: no release" in ran.out, ran.out
    assert "AutoModelForCausalLM" not in ran.out
