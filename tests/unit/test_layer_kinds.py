"""What a model of mixed layers, or one that predicts a second token, is refused for, and in which words."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
from transformers import AutoConfig

from formats.errors import RefusedError, SourceError, UnsupportedError, VitruvianError
from formats.families import find_family
from formats.huggingface.config import from_huggingface, to_huggingface
from formats.megatron.args.args import from_megatron, to_megatron
from formats.megatron.args.flags import choose_version
from formats.registry import open_checkpoint
from tests.golden.test_mtp import add_copies, with_second
from tests.models import files, settings_of

EPSILON = {"rms_norm_eps": 1e-6}
FULL, LINEAR = "full_attention", "linear_attention"


def test_kinds_of_layers():
    spec = from_huggingface(settings_of("qwen3_next-tied", **EPSILON), {}, "one")
    assert [sorted(kinds) for kinds in spec.layer_kinds] == [
        ["dense", "recurrent"], ["attention", "sparse"], ["recurrent", "sparse"], ["attention", "sparse"],
    ]  # fmt: skip
    assert spec.mixed
    assert not from_huggingface(settings_of("llama", **EPSILON), {}, "one").mixed


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"layer_types": [LINEAR] * 4}, "of 4 have linear attention, and a qwen3_5_text mixes both"),
        ({"full_attention_interval": 1}, "of 4 have linear attention"),
        ({"full_attention_interval": 0}, "full_attention_interval = 0"),
        ({"layer_types": [LINEAR, FULL]}, "linear_attention or full_attention for each layer"),
        ({"layer_types": [LINEAR, FULL, "sliding_attention", FULL]}, "linear_attention or full_attention"),
        ({"linear_num_value_heads": 6}, "6 value heads of linear attention do not divide over 4 key heads"),
        ({"linear_conv_kernel_dim": 0}, "linear_taps = 0"),
        ({"attention_bias": True}, "attention_bias = True is not supported"),
    ],
)
def test_configs_that_make_no_such_model(changes, reason):
    with pytest.raises(VitruvianError, match=reason):
        from_huggingface(settings_of("qwen3_5_text", **EPSILON, **changes), {}, "one")


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("mamba2", {"expand": 1}),
        ("bamba", {"mamba_expand": 1}),
        ("granitemoehybrid", {"mamba_expand": 4}),
        ("falcon_h1", {"mamba_d_ssm": 64}),
    ],
)
def test_heads_of_state_spaces_are_as_wide_as_the_config_says(name, changes):
    """Their classes in transformers 5.23 refuse such a config, whose weights have the shapes of the heads."""
    config = {**AutoConfig.for_model(**settings_of(name)).to_dict(), "architectures": None}
    assert from_huggingface(config, {}, "one").state_heads == 8
    with pytest.raises(SourceError, match=r"8 heads of state spaces with 1. elements each are not as wide as"):
        from_huggingface(config | changes, {}, "one")


def test_widths_of_state_spaces_that_a_config_leaves_out():
    """A Falcon-H1 without `mamba_d_ssm` has 1024 elements in all heads, whatever its hidden size (transformers 5)."""
    config = {**AutoConfig.for_model(**settings_of("falcon_h1")).to_dict(), "architectures": None}
    short = {key: value for key, value in config.items() if key not in ("mamba_d_ssm", "mamba_d_head")}
    assert from_huggingface(short, {}, "one").state_dim == AutoConfig.for_model(**short).mamba_d_head == 128
    bamba = {**AutoConfig.for_model(**settings_of("bamba")).to_dict(), "architectures": None, "mamba_expand": {}}
    with pytest.raises(SourceError, match=r"8 heads of state spaces with 16 elements each are not as wide as"):
        from_huggingface(bamba, {}, "one")


@pytest.mark.parametrize(
    ("options", "code", "reason"),
    [
        (["--norm", "local"], 5, "in Transformer Engine's layers alone"),
        (["--tp", 8], 5, "4 key heads and 8 value heads of linear attention do not divide over tp = 8"),
        (["--megatron-version", "0.15"], 5, "the first that does is 0.16: it has no --experimental-attention-variant"),
        (["--format", "fsdp_dtensor"], 4, "linear attention is not supported in fsdp_dtensor"),
        (["--format", "megatron-llm"], 5, "no norms on query and key"),
    ],
)
def test_what_megatron_has_not(model, convert, tmp_path, options, code, reason):
    ran = convert("hf2megatron", model("qwen3_5_text"), tmp_path / "m", *options)
    assert (ran.code, reason in ran.err) == (code, True), ran.err


@pytest.mark.parametrize(
    ("options", "code", "reason"),
    [
        (["--pp", 2, "--pp-layout", "Ett|ttL"], 5, "a pipeline layout, or a last stage without layers, is not"),
        (["--pp", 2, "--pp-layout", "Ett|ttL", "--format", "torch_dist"], 5, "a pipeline layout, or a last stage"),
    ],
)
def test_where_a_second_token_is_not_predicted(model, convert, tmp_path, options, code, reason):
    source = with_second(model("glm4_moe"), tmp_path / "hf")
    ran = convert("hf2megatron", source, tmp_path / "m", *options)
    assert (ran.code, reason in ran.err) == (code, True), ran.err
    assert convert("hf2megatron", source, tmp_path / "m2", *options, "--drop", "mtp").code == 0


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_text"])
@pytest.mark.parametrize("layout", ["torch", "torch_dist"])
def test_a_second_token_behind_linear_attention(model, convert, tmp_path, name, layout):
    """megatron-core builds the layer like the last of the decoder: tests/golden/test_mtp.py."""
    source, run = with_second(model(name, layer_types=[LINEAR, FULL, LINEAR, LINEAR]), tmp_path / "hf"), tmp_path / "m"
    ran = convert("hf2megatron", source, run, "--format", layout)
    reason = f"like the last layer of the decoder, and layer 3, the last of this {name}, has linear attention"
    assert (ran.code, reason in ran.err, "--drop mtp" in ran.err) == (5, True, True), ran.err
    assert not run.exists()
    assert convert("hf2megatron", source, run, "--format", layout, "--drop", "mtp").code == 0
    assert convert("megatron2hf", run, tmp_path / "back").code == 0
    assert convert("verify", tmp_path / "back", source, "--drop", "mtp").code == 0
    assert convert("hf2fsdp", source, tmp_path / "fsdp").code == 0
    assert convert("fsdp2hf", tmp_path / "fsdp", tmp_path / "whole").code == 0
    assert convert("verify", tmp_path / "whole", source).code == 0


@pytest.mark.parametrize(
    ("options", "code", "reason"),
    [
        (["--norm", "local"], 5, "the sparse attention of a glm_moe_dsa in Transformer Engine's layers alone"),
        (["--megatron-version", "0.18"], 5, "other elements of the heads of its indexer rotate"),
    ],
)
def test_where_an_indexer_is_another(model, convert, tmp_path, options, code, reason):
    ran = convert("hf2megatron", model("glm_moe_dsa"), tmp_path / "m", *options)
    assert (ran.code, reason in ran.err) == (code, True), ran.err


def test_an_indexer_in_args():
    """Of a release before 0.19 it has tensors of the same names and shapes, and its args lack what 0.19 brought."""
    spec = from_huggingface(settings_of("glm_moe_dsa"), {}, "one")
    args = to_megatron(spec)
    assert (args["dsa_indexer_topk_freq"], from_megatron(args, {}, spec, "args")) == (2, spec)
    assert from_megatron(args, {"vocab": 211}, None, "args").family == "glm_moe_dsa"
    assert (
        from_megatron(args | {"dsa_indexer_rope_interleaved": False, "dsa_indexer_topk_freq": 1}, {}, None, "").family
        == "deepseek_v32"
    )
    del args["dsa_indexer_rope_interleaved"]
    with pytest.raises(UnsupportedError, match=r"before 0\.19"):
        from_megatron(args, {}, spec, "args")
    with pytest.raises(RefusedError, match="share indexers at equal distances"):
        to_megatron(replace(spec, shared_index_layers=(1,)))


def test_dense_layers_that_are_not_in_front():
    """DeepSeek's config counts them from the first one on."""
    config = settings_of("deepseek_v3", **EPSILON)
    spec = from_huggingface(config, {}, "one")
    assert to_huggingface(replace(spec, dense_layers=(0, 1)), config)["first_k_dense_replace"] == 2
    for dense in ((1,), (0, 2)):
        with pytest.raises(RefusedError, match="has them only in front"):
            to_huggingface(replace(spec, dense_layers=dense), config)


@pytest.mark.parametrize(("full", "linear"), [([2, 4], [1]), ([2, 4], [1, 2, 3]), ([2, 4], [1, 3, 5])])
def test_lists_that_have_a_layer_not_once(full, linear):
    config = settings_of("kimi_linear")
    del config["layer_types"]
    lists = {"num_heads": 4, "head_dim": 8, "short_conv_kernel_size": 4, "full_attn_layers": full}
    sound = config | {"linear_attn_config": {**lists, "kda_layers": [1, 3]}}
    assert from_huggingface(sound, {}, "one").recurrent_layers == (0, 2)
    with pytest.raises(SourceError, match="its lists should have each layer once"):
        from_huggingface(config | {"linear_attn_config": {**lists, "kda_layers": linear}}, {}, "one")


@pytest.mark.parametrize(
    ("fields", "shared"),
    [
        ({"index_topk_pattern": "FSSF"}, (1, 2)),
        ({"index_topk_pattern": ["full", "full", "shared", "full"]}, (2,)),
        ({"index_topk_freq": 2}, (2,)),
        ({"index_topk_freq": 0}, ()),
        ({"index_topk_freq": 3, "index_skip_topk_offset": 1}, (1, 2)),
        ({}, ()),
    ],
)
def test_layers_that_share_an_indexer(fields, shared):
    """As AutoConfig has it."""
    from transformers import AutoConfig

    settings = {**settings_of("glm_moe_dsa"), **fields}
    del settings["indexer_types"]
    assert from_huggingface(settings, {}, "one").shared_index_layers == shared
    theirs = AutoConfig.for_model(**settings).indexer_types
    assert tuple(layer for layer, kind in enumerate(theirs) if kind == "shared") == shared


@pytest.mark.parametrize(
    ("shared", "apart", "in_front"),
    [((1, 3), 2, 0), ((2, 3), 3, 2), ((1, 2), 3, 0), ((3,), 2, 3), ((2,), 2, 2), ((), 1, 0)],
)
def test_layers_that_share_an_indexer_in_args(shared, apart, in_front):
    """As dsa.py `is_dsa_skip_topk_layer` counts them, also behind some in front that share none."""
    args = to_megatron(replace(from_huggingface(settings_of("glm_moe_dsa"), {}, "one"), shared_index_layers=shared))
    assert (args["dsa_indexer_topk_freq"], args["dsa_indexer_skip_topk_offset"]) == (apart, in_front)
    assert from_megatron(args, {}, None, "args").shared_index_layers == shared


def test_a_first_layer_that_shares_an_indexer():
    settings = settings_of("glm_moe_dsa") | {"indexer_types": ["shared", "full", "full", "full"]}
    with pytest.raises(SourceError, match="the first layer has no indexer, and none is before it"):
        from_huggingface(settings, {}, "one")


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe", "glm_moe_dsa"])
def test_a_config_that_counts_the_layer_among_those_of_the_decoder(model, convert, tmp_path, name):
    """Its block would be one of the decoder, and `--drop mtp` would leave out what is around it alone."""
    source = with_second(model(name), tmp_path / "hf")
    config = json.loads((source / "config.json").read_text())
    layers = config["num_hidden_layers"]
    config["num_hidden_layers"] += 1
    for key in ("mlp_layer_types", "layer_types", "indexer_types"):
        if config.get(key):
            config[key].append(config[key][-1])
    (source / "config.json").write_text(json.dumps(config))
    for options in ([], ["--drop", "mtp"]):
        for command in ("hf2hf", "hf2fsdp"):
            ran = convert(command, source, tmp_path / "out", *options)
            reason = f"number {layers} of them predicts a further token: it has model.layers.{layers}.eh_proj.weight"
            assert (ran.code, reason in ran.err) == (3, True), ran.err


def test_copies_in_a_layer_that_predicts_a_second_token_come_out_of_megatron_as_on_the_hub(model, convert, tmp_path):
    """After FSDP no index travels along; one that does says which copies there were."""
    source = with_second(model("deepseek_v3"), tmp_path / "hf")
    assert convert("hf2fsdp", source, tmp_path / "fsdp").code == 0
    for name in ("hf", "fsdp"):
        if name == "fsdp":
            add_copies(source)
        assert convert("hf2megatron", tmp_path / name, tmp_path / "run", "--force").code == 0
        assert convert("megatron2hf", tmp_path / "run", tmp_path / f"{name} out").code == 0
        assert files(tmp_path / f"{name} out")["model.safetensors"] == files(source)["model.safetensors"]


@pytest.mark.parametrize("shared", [False, True])
def test_two_layers_that_predict_tokens(model, convert, tmp_path, shared):
    """Each has copies of embedding and head, as on the Hub, or none of them has."""
    from safetensors.torch import load_file, save_file

    source = with_second(model("deepseek_v3"), tmp_path / "hf")
    file, config = source / "model.safetensors", json.loads((source / "config.json").read_text())
    layers, tensors = config["num_hidden_layers"], load_file(file)
    first, second = (f"model.layers.{layers + depth}." for depth in (0, 1))
    tensors |= {second + key.removeprefix(first): value + 1 for key, value in tensors.items() if key.startswith(first)}
    if shared:
        ends = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
        tensors |= {prefix + end: tensors[key].clone() for prefix in (first, second) for end, key in ends.items()}
    save_file(tensors, file, {"format": "pt"})
    (source / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 2}))
    for to, back in (("hf2fsdp", "fsdp2hf"), ("hf2megatron", "megatron2hf")):
        there, out = tmp_path / to, tmp_path / back
        for ran in (convert(to, source, there), convert(back, there, out)):
            assert ran.code == 0, ran.err
        again = load_file(out / "model.safetensors")
        assert all(again[key].equal(value) for key, value in tensors.items() if key in again)
        assert not {
            key for key in tensors.keys() - again.keys() if "embed_tokens" not in key and "head.head" not in key
        }


def test_copies_that_are_none_and_a_layer_in_part(model, convert, tmp_path):
    from safetensors.torch import load_file, save_file

    source = with_second(model("glm4_moe"), tmp_path / "hf")
    tensors, file = load_file(source / "model.safetensors"), source / "model.safetensors"
    copy = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors | {"model.layers.4.embed_tokens.weight": copy}, file, {"format": "pt"})
    assert convert("hf2megatron", source, tmp_path / "m").code == 0
    save_file(tensors | {"model.layers.4.embed_tokens.weight": copy + 1}, file, {"format": "pt"})
    ran = convert("hf2megatron", source, tmp_path / "m2")
    assert (ran.code, "model.embed_tokens.weight differs between its copies" in ran.err) == (6, True), ran.err
    del tensors["model.layers.4.mlp.gate.weight"]
    save_file(tensors, file, {"format": "pt"})
    ran = convert("hf2megatron", source, tmp_path / "m3")
    assert (ran.code, "1 tensor is missing: model.layers.4.mlp.gate.weight" in ran.err) == (3, True), ran.err


def test_copies_in_a_layer_that_predicts_a_second_token_are_written_where_they_were(model, convert, tmp_path):
    """Of one file without an index, in other shards, as other types, and after FSDP."""
    from safetensors.torch import load_file, save_file

    source = with_second(model("deepseek_v3"), tmp_path / "hf")
    tensors = load_file(source / "model.safetensors")
    copies = {
        "model.layers.4.embed_tokens.weight": tensors["model.embed_tokens.weight"].clone(),
        "model.layers.4.shared_head.head.weight": tensors["lm_head.weight"].clone(),
    }
    save_file(tensors | copies, source / "model.safetensors", {"format": "pt"})
    for number, options in enumerate(([], ["--shard-size", "1MB"], ["--dtype", "fp32"], ["--drop", "mtp"])):
        out = tmp_path / f"out{number}"
        assert convert("hf2hf", source, out, *options).code == 0
        keys = {key for file in out.glob("*.safetensors") for key in load_file(file)}
        assert keys & copies.keys() == (set() if options[:1] == ["--drop"] else copies.keys()), options
    for command in ("verify", "diff"):  # what only one of the two has is left out
        assert convert(command, tmp_path / "out3", source).code == 6
        for two in ((tmp_path / "out3", source), (source, tmp_path / "out3")):
            assert convert(command, *two, "--drop", "mtp").code == 0
        ran = convert(command, tmp_path / "out3", tmp_path / "out3", "--drop", "mtp")
        assert (ran.code, "the model has no layer that predicts further tokens" in ran.err) == (2, True), ran.err
    assert convert("average", tmp_path / "out3", source, tmp_path / "mean", "--drop", "mtp").code == 0
    assert convert("hf2fsdp", source, tmp_path / "fsdp").code == 0
    assert convert("verify", tmp_path / "fsdp", tmp_path / "out3", "--drop", "mtp").code == 0
    assert convert("fsdp2hf", tmp_path / "fsdp", tmp_path / "back").code == 0
    assert load_file(tmp_path / "back/model.safetensors").keys() == (tensors | copies).keys()


def test_a_manifest_of_names_has_those_that_are_left_out_too(model, convert, tmp_path):
    source = with_second(model("glm4_moe", hidden_size=128, intermediate_size=256), tmp_path / "hf")
    assert convert("hf2hf", source, tmp_path / "fp8", "--quantize", "fp8-block").code == 0
    ran = convert("hf2hf", tmp_path / "fp8", tmp_path / "carried", "--verbatim", "--drop", "mtp")
    assert ran.code == 0, ran.err
    config = json.loads((source / "config.json").read_text())
    quantization = json.loads((tmp_path / "fp8/config.json").read_text())["quantization_config"]
    (source / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    ran = convert("hf2hf", source, tmp_path / "plain")
    assert (ran.code, "config.json says that weights are FP8, and none of the files' is" in ran.err) == (0, True)


def test_the_flags_are_those_of_a_release_that_builds_it(model, convert, tmp_path):
    source, run = with_second(model("qwen3_5_text"), tmp_path / "hf"), tmp_path / "m"
    assert convert("hf2megatron", source, run).code == 0
    assert (run / "megatron_flags.txt").read_text().startswith("# flags for Megatron-LM 0.18\n")
    ran = convert("hf2megatron", source, tmp_path / "m2", "--megatron-version", "0.19")
    assert (ran.code, "it builds no layer that predicts a second token beside linear" in ran.err) == (5, True), ran.err
    assert choose_version({"mtp_num_layers": 1}, None, ())[0] == "0.19"
    summary = json.loads(convert("hf2megatron", source, tmp_path / "m3", "--drop", "mtp", "-n", "--json").out)
    assert any("is not carried: 15 such as mtp." in note for note in summary["notes"])


def test_the_config_says_how_many_layers_predict_further_tokens(model, convert, tmp_path):
    """Of a Megatron run too that has no config; what is left out is not there."""
    source, run = with_second(model("deepseek_v3"), tmp_path / "hf"), tmp_path / "m"

    def said(folder):
        return json.loads((folder / "config.json").read_text()).get("num_nextn_predict_layers")

    assert convert("hf2megatron", source, run).code == 0
    shutil.rmtree(run / "huggingface")
    ran = convert("megatron2hf", run, tmp_path / "back", "--set", "vocab=211")
    assert (ran.code, said(tmp_path / "back")) == (0, 1), ran.err
    assert convert("hf2hf", source, tmp_path / "less", "--drop", "mtp").code == 0
    assert (said(source), said(tmp_path / "less")) == (1, 0)


# --- layers that are one block ---------------------------------------------------------------------------------------


def test_patterns_and_lists_of_blocks_are_one_model():
    """The Hub's pattern, the list of transformers, and what some words were before."""
    new = settings_of("nemotron_h")
    named = {key: value for key, value in new.items() if key != "layers_block_type"}
    old = named | {"layers_block_type": ["mamba", "mlp", "attention", "moe"]}
    pattern = named | {"hybrid_override_pattern": "M-*E"}
    specs = [from_huggingface({**EPSILON, **fields}, {}, "one") for fields in (new, old, pattern)]
    assert specs[0] == specs[1] == specs[2]
    assert [sorted(kinds) for kinds in specs[0].layer_kinds] == [["state"], ["dense"], ["attention"], ["sparse"]]
    assert find_family(named | {"hybrid_override_pattern": "M-*-"}).name == "nemotron_h_dense"
    longer = to_huggingface(replace(specs[2], layers=5), pattern)
    assert longer["hybrid_override_pattern"] == "M-*E*"


def test_two_patterns_of_one_hybrid():
    """Megatron-Bridge took one of them without a word before its #5354."""
    args = to_megatron(from_huggingface(settings_of("nemotron_h", **EPSILON), {}, "one"))
    assert args["hybrid_override_pattern"] == args["hybrid_layer_pattern"] == "M-*E"
    for name in ("hybrid_override_pattern", "hybrid_layer_pattern"):
        for settled in (False, True):
            with pytest.raises(RefusedError, match=r"hybrid_layer_pattern = '.*' contradict each other"):
                from_megatron(args | {name: "M*-E"}, {}, None, "args", settled=settled)
        assert from_megatron(args | {name: None}, {}, None, "args") == from_megatron(args, {}, None, "args")
    stages = dict.fromkeys(("hybrid_override_pattern", "hybrid_layer_pattern"), "M-|*E")
    assert from_megatron(args | stages, {}, None, "args") == from_megatron(args, {}, None, "args")


@pytest.mark.parametrize(
    ("options", "code", "reason"),
    [
        (["--norm", "local"], 5, "has the layers of a nemotron_h of Transformer Engine alone"),
        (["--tp", 8], 5, "4 groups of its state spaces do not divide over tp = 8"),
        (["--pp", 2, "--vpp", 2], 5, "no virtual pipeline chunks of a nemotron_h"),
        (["--megatron-version", "0.15"], 5, "the first that does is 0.16: no layer of its hybrids has experts"),
        (["--format", "fsdp_dtensor"], 4, "a state space is not supported in fsdp_dtensor"),
        (["--set", "taps=3"], 3, "mixer.conv1d.weight has shape"),
        (["--set", "norm_epsilon=1e-6"], 5, "its norms have an epsilon of 1e-06, those of its state spaces 1e-05"),
    ],
)
def test_what_megatron_has_no_hybrids_with(model, convert, tmp_path, options, code, reason):
    ran = convert("hf2megatron", model("nemotron_h"), tmp_path / "m", *options)
    assert (ran.code, reason in ran.err) == (code, True), ran.err


def test_a_hybrid_without_a_config_and_the_names_of_a_convolution(model, convert, tmp_path):
    source, run = model("nemotron_h"), tmp_path / "m"
    for version, name in (("0.18", "conv1d.weight"), ("0.19", "conv1d_weight")):
        assert convert("hf2megatron", source, run, "--megatron-version", version, "--force").code == 0
        assert any(placed.key.endswith(f"mixer.{name}") for placed in open_checkpoint(run).tensors)
        shutil.rmtree(run / "huggingface")
        ran = convert("megatron2hf", run, tmp_path / version, "--set", "vocab=211")
        assert ran.code == 0, ran.err
        assert (tmp_path / version / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


@pytest.mark.parametrize("name", ["qwen2_moe", "qwen3_moe"])
def test_every_third_layer_has_experts_and_none_that_the_list_names(name):
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"num_hidden_layers": 9, "decoder_sparse_step": 3, "mlp_only_layers": [5]}
    config = AutoConfig.for_model(**{**settings_of(name), **sizes})
    with init_empty_weights():
        layers = AutoModelForCausalLM.from_config(config).model.layers
    dense = tuple(number for number, layer in enumerate(layers) if not hasattr(layer.mlp, "experts"))
    spec = from_huggingface(config.to_dict(), {}, "config.json")
    assert spec.dense_layers == dense == (0, 1, 3, 4, 5, 6, 7)


def test_a_step_of_linear_attention_leaves_the_last_layer_of_each_to_full_attention():
    """megatron-core 0.16.1 experimental_attention_variant_module_specs.py `get_linear_attention_pattern`."""
    fields = {"num_hidden_layers": 8, "layer_types": None, "full_attention_interval": 4, **EPSILON}
    spec = from_huggingface(settings_of("qwen3_next", **fields), {}, "one")
    assert spec.recurrent_layers == (0, 1, 2, 4, 5, 6)
    args = to_megatron(spec)
    assert from_megatron(args | {"linear_attention_freq": 4}, {}, None, "args") == from_megatron(args, {}, None, "args")


def test_without_a_number_of_heads_a_state_space_is_twice_as_wide_as_the_model():
    """megatron-core 0.16.1 ssm/mamba_mixer.py: `d_inner = expand * d_model`, expand = 2."""
    args = to_megatron(from_huggingface(settings_of("nemotron_h", **EPSILON), {}, "one"))
    wide = args | {"mamba_num_heads": None, "mamba_head_dim": 8, "mamba_num_groups": 4}
    assert from_megatron(wide, {}, None, "args").state_heads == 2 * args["hidden_size"] // 8


def test_the_pattern_alone_makes_a_hybrid():
    """megatron-core 0.19.2 training/models/hybrid.py: the flag is about initialization, no `--spec` is the default."""
    args = to_megatron(from_huggingface(settings_of("nemotron_h", **EPSILON), {}, "one"))
    assert args["is_hybrid_model"] is True
    newer = ["megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec"]
    for spec in (args["spec"], newer, None):
        for flag in (True, False):
            told = args | {"is_hybrid_model": flag, "spec": spec}
            assert from_megatron(told, {}, None, "args") == from_megatron(args, {}, None, "args")
    with pytest.raises(UnsupportedError, match=r"spec = \['mine', 'stack'\] is not supported"):
        from_megatron(args | {"spec": ["mine", "stack"]}, {}, None, "args")
