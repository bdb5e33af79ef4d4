"""The releases of Megatron-LM: what each is given, what it ignores, and what is asked of those who read its runs."""

from __future__ import annotations

import ast
import json
import re
import shlex
from copy import deepcopy
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from converters.prove.digest import MANIFEST
from formats.errors import RefusedError, UnsupportedError, UsageError
from formats.huggingface.config import from_huggingface
from formats.megatron.args.args import from_megatron, to_megatron
from formats.megatron.args.flags import faults, flags, remarks
from formats.megatron.args.options import Options, namespace
from formats.megatron.args.versions import DEVIATIONS, IGNORED, OPTIONS, VERSIONS, WROTE, ignored, version_of
from formats.torch_files.pickle_values import Opaque
from tests.megatron_runs import with_args
from tests.models import IN_MEGATRON, LATENT_YARN, LLAMA3, PLAIN_YARN, YARN, files, settings_of

LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
FACTOR_32 = {**LLAMA3, "factor": 32.0}


def spec_of(name: str = "llama", **changes):
    config = AutoConfig.for_model(**deepcopy(settings_of(name, **changes))).to_dict()
    return from_huggingface(config | changes, {}, "config.json")


def args_of(name: str = "llama", options: Options | None = None, **changes):
    return namespace(spec_of(name, **changes), ["F32"], options or Options(), 256, {}, None)


def trained(args, version: str):
    """Args as the parser of a version writes them: with the dests that it has."""
    dests = [name for name, first in WROTE.items() if VERSIONS.index(first) <= VERSIONS.index(version)]
    return {**args, **dict.fromkeys((*dests, "lr_decay_style", "clip_grad"))}


def test_the_fields_of_the_installed_release_are_those_of_the_table():
    """What the table calls an option of 0.16 that is a field of the config is one there; what it calls newer is not."""
    (root,) = find_spec("megatron").submodule_search_locations
    source = ast.parse((Path(root) / "core/transformer/transformer_config.py").read_text())
    classes = [node for node in source.body if isinstance(node, ast.ClassDef)]
    fields = {line.target.id for node in classes for line in node.body if isinstance(line, ast.AnnAssign)}
    assert {row.dest for row in IGNORED if row.when == "latent yarn"} <= fields
    newer = {option.dest for option in OPTIONS if VERSIONS.index(option.known) > VERSIONS.index("0.16")}
    assert newer
    assert not newer & fields


@pytest.mark.parametrize("name", IN_MEGATRON)
def test_no_release_is_given_an_option_that_it_lacks(name):
    """Every family, every release: an option that is written is known there; what is not known, is refused by name."""
    args = args_of(name)
    for version in VERSIONS:
        if faults(args, version):
            with pytest.raises(RefusedError) as raised:
                flags(args, version)
            assert re.search(r"--megatron-version 0\.1\d", raised.value.hint)
            continue
        text = flags(args, version)
        options = {word for word in shlex.split(text, comments=True) if word.startswith("--")}
        known = {option.name for option in OPTIONS if VERSIONS.index(option.known) <= VERSIONS.index(version)}
        known |= {f"--no-{name[2:]}" for name in known}
        assert options - known <= {"--use-checkpoint-args", "--rope-type"}
        assert not options & {"--original-max-position-embeddings", "--beta-fast", "--beta-slow"}
        assert remarks(text) == (f"flags for Megatron-LM {version}",)


@pytest.mark.parametrize(
    ("name", "changes", "version", "first"),
    [
        ("mistral", {}, "0.14", "0.15: it has no --window-size"),
        ("smollm3", {}, "0.12", "0.13: it has no --no-rope-freq"),
        ("gpt_oss", {}, "0.18", "0.19: it cannot compute yarn"),
        ("qwen2_moe", {}, "0.15", "0.16: it has no --moe-shared-expert-gate"),
        ("qwen3-tied", {}, "0.14", "0.19: it computes with position_embedding_type = 'none' instead of 'yarn'"),
        ("llama", {"rope_parameters": LINEAR}, "0.18", "0.19: it computes with rotary_seq_len_interpolation_fac"),
        ("deepseek_v3", {}, "0.13", "0.14: it computes with original_max_position_embeddings = 128 instead of 4096"),
    ],
)  # fmt: skip
def test_a_release_that_cannot_compute_a_model_is_refused_with_the_first_that_can(name, changes, version, first):
    with pytest.raises(RefusedError) as raised:
        flags(args_of(name, **changes), version)
    assert f"Megatron-LM {version} does not compute this model, and the first that does is {first}" in str(raised.value)
    assert f"--megatron-version {first[:4]}" in raised.value.hint
    assert flags(args_of(name, **changes), first[:4])


@pytest.mark.parametrize(
    ("name", "rope", "accepted", "line"),
    [
        ("llama", FACTOR_32, "rope_scaling_factor", 'kwargs["rope_scaling_factor"] = args.rope_scaling_factor'),
        ("deepseek_v3", YARN, "latent_yarn", "(original_max_position_embeddings=32, beta_fast=4.0, beta_slow=0.5)"),
    ],
)
def test_what_no_release_heeds_is_refused_until_it_is_accepted(name, rope, accepted, line):
    args = args_of(name, rope_parameters=rope)
    with pytest.raises(RefusedError, match="no release does") as raised:
        flags(args)
    assert f"--accept {accepted}" in raised.value.hint
    assert line in raised.value.hint
    text = flags(args, None, (accepted,))
    assert line in remarks(text)[1]
    assert [deviation for deviation in DEVIATIONS if deviation in accepted]
    with pytest.raises(UsageError, match=f"--accept {accepted}"):
        flags(args_of(), None, (accepted,))


def test_older_releases_are_told_what_newer_ones_take_from_the_checkpoint():
    args = args_of("dots1")
    old, new = flags(args, "0.15"), flags(args, "0.16")
    for line in ("--moe-router-score-function sigmoid", "--moe-router-enable-expert-bias"):
        assert f"\n{line}\n" in old
        assert line not in new
    assert "--moe-router-topk-scaling-factor 2.5" in old
    args = args_of("deepseek_v3-tied")
    assert "--rope-type rope" in flags(args, "0.14")
    assert "--rope-type" not in flags(args, "0.13")  # where it is YaRN with a factor of 1
    assert "--rotary-scaling-factor 1.0" in flags(args, "0.13")
    assert "--no-rope-fusion" in flags(args)  # which rotates by YaRN alone, and stops a run of plain rope
    assert "--no-rope-fusion" not in flags(args_of("deepseek_v3")) + flags(args_of())


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        (
            "deepseek_v32",
            "multi-latent-attention|q-lora-rank 24|kv-lora-rank 16|qk-head-dim 16|qk-pos-emb-head-dim 8|v-head-dim 12|"
            "rotary-scaling-factor 4.0|mscale 0.7|mscale-all-dim 0.4|rope-type yarn|moe-router-num-groups 4|"
            "moe-router-group-topk 2|experimental-attention-variant dsa|dsa-indexer-n-heads 4|dsa-indexer-head-dim 12|"
            "dsa-indexer-topk 5|no-dsa-indexer-rotate-activation|dsa-indexer-k-norm-epsilon 1e-06|no-rope-fusion|"
            "expert-model-parallel-size 2|expert-tensor-parallel-size 1|norm-epsilon 1e-06|qk-layernorm|",
        ),
        (
            "qwen3_next",
            "experimental-attention-variant gated_delta_net|attention-output-gate|linear-attention-freq '[1,1,1,0]'|"
            "linear-num-key-heads 4|linear-num-value-heads 8|linear-key-head-dim 4|linear-value-head-dim 6|"
            "linear-conv-kernel-dim 4|apply-layernorm-1p|moe-shared-expert-gate|qk-layernorm|norm-epsilon 1e-06|"
            "expert-model-parallel-size 2|expert-tensor-parallel-size 1|",
        ),
    ],
)
def test_what_no_release_takes_from_the_checkpoint_is_given(name, lines):
    """Each size that megatron-core would otherwise assume, and nothing besides."""
    everywhere = (
        "use-checkpoint-args|make-vocab-size-divisible-by 128|transformer-impl transformer_engine|"
        "tensor-model-parallel-size 1|pipeline-model-parallel-size 1"
    )
    _, *given = flags(args_of(name, Options(ep=2)), "0.19").splitlines()
    assert sorted(given) == sorted(f"--{line}" for line in (lines + everywhere).split("|"))


def test_local_layers_end_with_the_release_that_refuses_their_latents():
    args = args_of("deepseek_v3-tied", Options(norm="local"))
    assert flags(args).startswith("# flags for Megatron-LM 0.18\n")
    assert flags(args_of("deepseek_v3-tied")).startswith("# flags for Megatron-LM 0.19\n")


def test_experts_one_by_one_clamp_after_their_bias():
    """The fusion clamps before (fusions/fused_bias_geglu.py); grouped layers have added the bias by then."""
    assert "--no-bias-gelu-fusion" in flags(args_of("gpt_oss", Options(norm="local")))
    assert "--no-bias-gelu-fusion" not in flags(args_of("gpt_oss"))


@pytest.mark.megatron
def test_the_fusion_of_real_megatron_clamps_before_the_bias(monkeypatch):
    from megatron.core.fusions.fused_bias_geglu import quick_gelu, weighted_bias_quick_geglu_impl

    monkeypatch.setattr(torch._dynamo.config, "disable", True)  # the kernel would want a C++ compiler
    torch.manual_seed(0)
    hidden, bias, weights = 4 * torch.randn(5, 12), 4 * torch.randn(12), torch.rand(5, 1)

    def computed(before: bool):
        glu, linear = (hidden if before else hidden + bias).chunk(2, -1)
        both = torch.cat((glu.clamp(max=2.0), linear.clamp(-2.0, 2.0)), -1)
        glu, linear = (both + bias if before else both).chunk(2, -1)
        return quick_gelu(glu) * (linear + 1.0) * weights

    output = weighted_bias_quick_geglu_impl(hidden, bias, weights, False, 1.0, 2.0)
    assert torch.allclose(output, computed(before=True))
    assert not torch.allclose(output, computed(before=False), atol=0.1)


@pytest.mark.parametrize("version", ["0.15", "0.16", "0.19"])
def test_a_run_whose_experts_clamped_before_their_bias_is_refused_until_it_is_accepted(version):
    """No config of transformers says so. Each other run is read: grouped, not fused, or written by a conversion."""
    local, grouped = (args_of("gpt_oss", Options(norm=norm)) for norm in ("local", "te"))
    assert (local["bias_gelu_fusion"], local["moe_grouped_gemm"]) == (False, False)
    fused = local | {"bias_gelu_fusion": True}
    for args in (
        trained(local, version),
        trained(grouped, version),
        trained(grouped | {"bias_gelu_fusion": False}, version),
        fused,
    ):
        assert not from_megatron(args, {}, None, "args").notes
    with pytest.raises(
        UnsupportedError, match=r"bias_gelu_fusion = True with moe_grouped_gemm = False clamps before"
    ) as raised:
        from_megatron(trained(fused, version), {}, None, "args")
    assert raised.value.hint.startswith("--accept bias_gelu_fusion ")
    accepted = from_megatron(trained(fused, version), {}, None, "args", accept=("bias_gelu_fusion",))
    assert "clamped before it added the biases" in accepted.notes[0]


def test_the_command_asks_about_such_a_run(model, convert, tmp_path):
    assert convert("hf2megatron", model("gpt_oss"), tmp_path / "m", "--norm", "local").code == 0
    for path in (tmp_path / "m").rglob(MANIFEST):  # as a training leaves it
        path.unlink()
    args = trained({}, "0.16")
    run = with_args(tmp_path / "m", tmp_path / "trained", **args | {"bias_gelu_fusion": True})
    ran = convert("megatron2hf", run, tmp_path / "hf")
    assert ran.code == 4, ran.err
    assert "--accept bias_gelu_fusion" in ran.err
    ran = convert("megatron2hf", run, tmp_path / "hf", "--accept", "bias_gelu_fusion")
    assert ran.code == 0, ran.err
    assert "bias_gelu_fusion = True is taken as False" in ran.err
    assert convert("diff", tmp_path / "hf", model("gpt_oss")).code == 0
    fused_off = with_args(tmp_path / "m", tmp_path / "unfused", **args)
    assert convert("megatron2hf", fused_off, tmp_path / "hf2").code == 0


def test_a_window_of_local_layers_is_not_left_to_the_fused_softmax():
    """It minds no window up to 4,096 tokens in half precision (0.19.2, fusions/fused_softmax.py)."""
    local, engine = (args_of("mistral", Options(norm=norm, computed="bfloat16")) for norm in ("local", "te"))
    assert "--no-masked-softmax-fusion" in flags(local)
    assert "--no-masked-softmax-fusion" not in flags(engine) + flags(args_of("llama", Options(norm="local")))
    fused, window = {"masked_softmax_fusion": True, "seq_length": 64}, spec_of("mistral").sliding_window
    for args in (local | {"seq_length": 64}, engine | fused, local | fused | {"seq_length": window},
                 local | fused | {"bf16": False}, local | fused | {"seq_length": 8192}):  # fmt: skip
        assert from_megatron(trained(args, "0.19"), {}, None, "args").sliding_window == window
    with pytest.raises(
        RefusedError, match=r"window_size = .7, 0. with seq_length = 64, and the fused softmax"
    ) as raised:
        from_megatron(trained(local | fused, "0.19"), {}, None, "args")
    assert "--set sliding_window=none" in raised.value.hint
    for value in (None, window):
        setting = {"sliding_window": value}
        assert from_megatron(trained(local | fused, "0.19"), setting, None, "args").sliding_window == value


def test_what_local_layers_lack():
    """torch's norms refuse the persistent kernel, and Transformer Engine alone fuses the rotation (0.19.2)."""
    for name, rotating in (("llama", True), ("deepseek_v3", True), ("gpt2", False)):
        local, engine = (flags(args_of(name, Options(norm=norm))) for norm in ("local", "te"))
        assert local.count("--no-persist-layer-norm\n") == 1
        assert local.count("--no-rope-fusion\n") == rotating
        assert "--no-persist-layer-norm" not in engine


def test_a_window_of_attention_that_is_not_of_transformer_engine():
    """`--attention-backend local` takes megatron-core's own in layers of Transformer Engine (0.19.2, models/gpt.py)."""
    backends = {number: Opaque("megatron.core.transformer.enums", "AttnBackend", (number,)) for number in (1, 4, 5)}
    fused = {"masked_softmax_fusion": True, "seq_length": 64}
    args = trained(args_of("mistral", Options(computed="bfloat16")), "0.19") | fused
    for number in (1, 5):
        assert from_megatron(args | {"attention_backend": backends[number]}, {}, None, "args").sliding_window
    own = args | {"attention_backend": backends[4]}
    with pytest.raises(RefusedError, match=r"the fused softmax .* of attention_backend = local keeps to no window"):
        from_megatron(own, {}, None, "args")
    assert from_megatron(own | {"masked_softmax_fusion": False}, {}, None, "args").sliding_window
    assert from_megatron(args | {"window_size": (7, -1)}, {}, None, "args").sliding_window == 8
    with pytest.raises(UnsupportedError, match=r"window_size = .7, -1. with attention_backend = local"):
        from_megatron(own | {"window_size": (7, -1)}, {}, None, "args")


def test_the_fused_softmax_of_stock_megatron_minds_no_window():
    """Its own class says that the kernel would be taken, whatever the window is."""
    fused_softmax = pytest.importorskip("megatron.core.fusions.fused_softmax", reason="megatron-core is not installed")
    from megatron.core.transformer.enums import AttnMaskType

    answers = set()
    for window in (None, (7, 0)):
        softmax = fused_softmax.FusedScaleMaskSoftmax(
            False, True, AttnMaskType.causal, True, None, True, None, window_size=window
        )
        softmax.get_batch_per_block = lambda *_: 4
        answers.add(softmax.is_kernel_available(None, 4, 4, 64, 64))
    assert answers == {True}


@pytest.mark.parametrize("option", ["use_te_activation_func", "use_transformer_engine_op_fuser"])
def test_an_exact_gelu_that_transformer_engine_computed_is_asked_for(option):
    args = trained(args_of("gpt2-untied", activation_function="gelu"), "0.19")
    assert from_megatron(args, {}, None, "args").activation == "gelu"
    with pytest.raises(RefusedError, match=f"{option} = True with bias_gelu_fusion = False") as raised:
        from_megatron(args | {option: True}, {}, None, "args")
    assert "--set activation=gelu_pytorch_tanh" in raised.value.hint
    for name in ("gelu", "gelu_new"):
        assert from_megatron(args | {option: True}, {"activation": name}, None, "args").activation == name
    assert from_megatron(trained(args_of("llama"), "0.19") | {option: True}, {}, None, "args").family == "llama"


def test_yarn_that_one_kernel_rotates_is_asked_for():
    """It passes no scale to the kernel (0.16 to 0.19, transformer/attention.py `apply_fused_qkv_rotary_pos_emb`)."""
    fused = {"fused_single_qkv_rope": True}
    args = trained(args_of(rope_parameters=PLAIN_YARN), "0.19")
    with pytest.raises(RefusedError, match="fused_single_qkv_rope = True with YaRN") as raised:
        from_megatron(args | fused, {}, None, "args")
    unscaled, scaled = (json.loads(way) for way in re.findall(r"--set 'rope_scaling=(.*?)'", raised.value.hint))
    assert unscaled == scaled | {"attention_factor": 1.0}
    for scaling in (unscaled, scaled):
        assert from_megatron(args | fused, {"rope_scaling": scaling}, None, "args").rope_scaling == scaling
    latent = trained(args_of("deepseek_v3"), "0.19") | fused
    assert from_megatron(latent, {}, None, "args").family == "deepseek_v3"


def test_norms_around_zero_to_which_a_run_added_no_one_are_refused():
    args = trained(args_of("qwen3_next"), "0.19") | {"batch_invariant_mode": True}
    with pytest.raises(UnsupportedError, match="batch_invariant_mode = True with apply_layernorm_1p = True") as raised:
        from_megatron(args, {}, None, "args")
    assert raised.value.hint.startswith("--accept batch_invariant_mode ")
    accepted = from_megatron(args, {}, None, "args", accept=("batch_invariant_mode",))
    assert any("batch_invariant_mode = True is taken as False" in note for note in accepted.notes)
    assert from_megatron(args | {"batch_invariant_mode": False}, {}, None, "args").family == "qwen3_next"
    llama = trained(args_of(), "0.19") | {"batch_invariant_mode": True}
    assert from_megatron(llama, {}, None, "args").family == "llama"


@pytest.mark.parametrize("version", VERSIONS)
def test_the_version_of_a_checkpoint(version):
    assert version_of(trained(args_of(), version)) == version
    assert version_of(args_of()) is None


@pytest.mark.parametrize(
    ("rope", "version", "computed"),
    [
        (LINEAR, "0.12", None),
        (LINEAR, "0.18", None),
        (LINEAR, "0.19", LINEAR),
        (FACTOR_32, "0.16", LLAMA3),
        (FACTOR_32, "0.19", LLAMA3),
        (LLAMA3, "0.16", LLAMA3),
        (PLAIN_YARN, "0.19", PLAIN_YARN),
    ],
)
def test_what_a_release_ignored_is_asked_for(rope, version, computed):
    """Neither reading is taken silently, both are named so that they can be pasted, and each is then what it says."""
    args = trained(to_megatron(spec_of(rope_parameters=rope)), version)
    scaling = spec_of(rope_parameters=rope).rope_scaling
    if computed == rope:
        assert from_megatron(args, {}, None, "args").rope_scaling == scaling
        return
    meant = spec_of(rope_parameters=computed).rope_scaling if computed else None
    for base in (None, spec_of(rope_parameters=rope)):
        with pytest.raises(RefusedError, match=f"Megatron-LM {version} made these args") as raised:
            from_megatron(args, {}, base, "args")
        ways = re.findall(r"--set ('.*?'|\S+) \((.*?)\)", raised.value.hint)
        assert [whose for _, whose in ways] == [
            f"stock Megatron-LM {version}",
            "a tree that was changed to heed them",
        ]
        values = [shlex.split(way)[0].partition("=")[2] for way, _ in ways]
        assert [None if value == "none" else json.loads(value) for value in values] == [meant, scaling]
        for value in (meant, scaling):
            assert from_megatron(args, {"rope_scaling": value}, base, "args").rope_scaling == value


def test_latents_of_old_releases():
    """0.12 and 0.13 took the number of positions for the original length, and one mscale for both."""
    args = trained(to_megatron(spec_of("deepseek_v3")), "0.13")
    with pytest.raises(RefusedError, match=r"original_max_position_embeddings = 4096, mscale_all_dim = 0\.4"):
        from_megatron(args, {}, None, "args")
    same = {**LATENT_YARN, "mscale": 0.7, "mscale_all_dim": 0.7, "original_max_position_embeddings": 128}
    alike = spec_of("deepseek_v3", rope_parameters=same)
    assert from_megatron(trained(to_megatron(alike), "0.13"), {}, None, "args").rope_scaling == alike.rope_scaling
    newer = trained(to_megatron(spec_of("deepseek_v3")), "0.16")
    for absent in ("original_max_position_embeddings", "beta_fast", "beta_slow"):
        del newer[absent]
    read = from_megatron(newer, {}, None, "args").rope_scaling
    assert read["original_max_position_embeddings"] == 4096
    plain = to_megatron(spec_of("deepseek_v3")) | {"rotary_scaling_factor": 1.0, "rope_type": None}
    assert from_megatron(trained(plain, "0.16"), {}, None, "args").rope_scaling is None


def test_yarn_of_a_tree_that_had_no_options_of_it():
    args = trained(to_megatron(spec_of(rope_parameters=PLAIN_YARN)), "0.16")
    for name in [name for name in args if name.startswith("yarn_")]:
        del args[name]
    base = spec_of(rope_parameters=PLAIN_YARN)
    with pytest.raises(RefusedError, match="does not compute rotary_scaling_factor") as raised:
        from_megatron(args, {}, base, "args")
    assert f"--set 'rope_scaling={json.dumps(dict(base.rope_scaling))}' (as in the config)" in raised.value.hint


def test_of_two_names_the_one_of_the_release_counts():
    args = to_megatron(spec_of()) | {"norm_epsilon": 1e-5, "layernorm_epsilon": 1e-6}
    assert from_megatron(trained(args, "0.15"), {}, None, "args").norm_epsilon == 1e-5
    assert from_megatron(trained(args, "0.16"), {}, None, "args").norm_epsilon == 1e-6
    with pytest.raises(RefusedError, match="nothing in its args tells the version"):
        from_megatron(args, {}, None, "args")


def test_two_scalings_at_once_are_refused():
    args = to_megatron(spec_of(rope_parameters=LLAMA3)) | {"rotary_seq_len_interpolation_factor": 4}
    with pytest.raises(UnsupportedError, match="use_rope_scaling with rotary_seq_len_interpolation_factor"):
        from_megatron(trained(args, "0.19"), {}, None, "args")


def test_everything_that_is_ignored_is_accepted_or_has_a_first_release():
    for row in IGNORED:
        later = [other for other in IGNORED if other.dest == row.dest and other.last == VERSIONS[-1]]
        assert row.patch or not later or later[-1].patch
    assert not ignored(args_of(), VERSIONS[0])


# --- spellings of one scaling ----------------------------------------------------------------------------------------


def inverse_frequencies(rope, **changes):
    """Those of transformers, and its factor of cosine and sine."""
    settings = settings_of("llama", rope_parameters=dict(rope), head_dim=64, **changes)
    settings.pop("model_type")
    return ROPE_INIT_FUNCTIONS[rope["rope_type"]](LlamaConfig(**settings), "cpu")


@pytest.mark.parametrize(
    ("rope", "same"),
    [
        ({**LLAMA3, "low_freq_factor": 2.0, "high_freq_factor": 8.0, "original_max_position_embeddings": 16384},
         LLAMA3),
        ({**LINEAR, "original_max_position_embeddings": 64}, LINEAR),
        ({**LLAMA3, "finetuned": True}, LLAMA3),
    ],
    ids=["multiples of llama3", "linear with a length", "what llama3 does not read"],
)  # fmt: skip
def test_two_spellings_that_transformers_computes_alike_are_one(rope, same):
    """Both are the same arguments, and each comes back as its own config spells it."""
    for ours, theirs in zip(inverse_frequencies(rope), inverse_frequencies(same), strict=True):
        assert torch.allclose(torch.as_tensor(ours), torch.as_tensor(theirs))
    spelled, usual = spec_of(rope_parameters=rope), spec_of(rope_parameters=same)
    assert to_megatron(spelled) == to_megatron(usual)
    again = from_megatron(to_megatron(spelled), {}, spelled, "args")
    assert again.rope_scaling == spelled.rope_scaling != usual.rope_scaling
    assert not torch.allclose(inverse_frequencies(rope)[0], inverse_frequencies(LLAMA3 | {"factor": 2.0})[0])


@pytest.mark.parametrize("changed", ["low_freq_factor", "high_freq_factor", "original_max_position_embeddings"])
def test_llama3_of_other_lengths_is_refused_by_the_plan(model, convert, tmp_path, changed):
    source = model("llama", rope_parameters={**LLAMA3, changed: LLAMA3[changed] / 2 if changed[0] != "h" else 8.0})
    dry = convert("hf2megatron", source, tmp_path / "out", "-n")
    wet = convert("hf2megatron", source, tmp_path / "out")
    assert (dry.code, dry.err) == (wet.code, wet.err)
    assert dry.code == 5
    assert "Megatron has no rope scaling llama3" in dry.err


def test_linear_with_a_length_is_written_and_comes_back(model, convert, tmp_path):
    source = model("llama", rope_parameters={**LINEAR, "original_max_position_embeddings": 64})
    assert convert("hf2megatron", source, tmp_path / "m", "-n").code == 0
    assert convert("hf2megatron", source, tmp_path / "m").code == 0
    assert convert("megatron2hf", tmp_path / "m", tmp_path / "back").code == 0
    assert files(tmp_path / "back") == files(source)


def test_the_command_line(model, convert, tmp_path):
    """The plan names the release, an accepted deviation is told on the screen and in the file, and comes back."""
    source = model("llama", rope_parameters=FACTOR_32)
    for argv in (["hf2megatron", source, tmp_path / "m"], ["plan", source, "--to", "megatron"]):
        ran = convert(*argv)
        assert ran.code == 5
        assert "--accept rope_scaling_factor" in ran.err
    assert convert("plan", source, "--to", "megatron", "--accept", "rope_scaling_factor").code == 0
    ran = convert("hf2megatron", source, tmp_path / "m", "--accept", "rope_scaling_factor")
    assert ran.code == 0, ran.err
    text = (tmp_path / "m/megatron_flags.txt").read_text()
    for line in remarks(text):
        assert line in ran.out + ran.err
    assert 'add kwargs["rope_scaling_factor"] = args.rope_scaling_factor' in text
    assert convert("megatron2hf", tmp_path / "m", tmp_path / "back").code == 0
    assert files(tmp_path / "back") == files(source)
    assert convert("reshard", tmp_path / "m", tmp_path / "r", "--tp", 2).code == 5
    options = ["--tp", 2, "--megatron-version", "0.16", "--accept", "rope_scaling_factor"]
    assert convert("reshard", tmp_path / "m", tmp_path / "r", *options).code == 0
    assert "gpt_builders.py" in (tmp_path / "r/megatron_flags.txt").read_text()
    ran = convert("hf2megatron", model(), tmp_path / "x", "--accept", "rope_scaling_factor")
    assert ran.code == 2
    ran = convert("hf2megatron", model(), tmp_path / "x", "--format", "megatron-llm", "--megatron-version", "0.16")
    assert ran.code == 2
    assert "--megatron-version has no effect on" in ran.err


def test_a_run_is_asked_about_and_then_comes_back(model, convert, tmp_path):
    """A run that 0.16 saved: refused with both readings, each of which can be pasted; its resharded copy is settled."""
    source, out = model("llama", rope_parameters=LINEAR), tmp_path / "m"
    assert convert("hf2megatron", source, out, "--iteration", 9).code == 0
    path = out / "iter_0000009/mp_rank_00/model_optim_rng.pt"
    stored = torch.load(path, weights_only=False)
    for name, value in trained(vars(stored["args"]), "0.16").items():
        setattr(stored["args"], name, value)
    torch.save(stored, path)
    (out / "iter_0000009/vitruvian.json").unlink()
    ran = convert("megatron2hf", out, tmp_path / "back")
    assert ran.code == 5
    for way in re.findall(r"--set ('.*?'|\S+) \(", ran.err):
        folder = tmp_path / f"back{len(way)}"
        assert convert("megatron2hf", out, folder, "--set", *shlex.split(way)).code == 0
        rope = json.loads((folder / "config.json").read_text())["rope_parameters"]
        assert rope["rope_type"] == ("default" if "none" in way else "linear")
    setting = f"rope_scaling={json.dumps({'rope_type': 'linear', 'factor': 4.0})}"
    assert convert("reshard", out, tmp_path / "r", "--set", setting, "--tp", 2).code == 0
    assert convert("megatron2hf", tmp_path / "r", tmp_path / "again").code == 0
    assert json.loads((tmp_path / "again/config.json").read_text())["rope_parameters"]["rope_type"] == "linear"
