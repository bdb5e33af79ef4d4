"""Runs of Megatron-Bridge and NeMo 2 whose kernels compute something else than their fields say."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from formats.errors import RefusedError, UnsupportedError
from formats.megatron.args import run_config
from formats.megatron.args.args import from_megatron
from formats.megatron.args.options import Options
from formats.model.spec import ModelSpec
from tests.faults.dcp_tools import refused
from tests.golden.test_bridge import CORE, REAL, nemo, partial
from tests.unit.test_megatron_versions import args_of

Fields = Mapping[str, Any]
BRIDGE, NEMO = "megatron.bridge.models.gpt_provider", "nemo.collections.llm.gpt.model.base"
LOCAL = {
    "attention_backend": {"_target_": "megatron.core.transformer.enums.AttnBackend", "_args_": [4], "_call_": True}
}
FUSED = {"masked_softmax_fusion": True, "seq_length": 64, "bf16": True}
WINDOW = {**FUSED, "window_size": [7, 0]}


def written(name: str = "llama", **changes: Any) -> dict[str, Any]:
    """The fields of a GPTModelProvider for a model."""
    args = args_of(name, Options(dialect="torch_dist", trainer="bridge"), **changes)
    return dict(yaml.safe_load(run_config.written(args, 0)["run_config.yaml"])["model"])


def read(fields: Fields, settings: Fields | None = None, **options: Any) -> ModelSpec:
    """The model of a run with these fields."""
    args = run_config.args_of(run_config.RunConfig(Path("run_config.yaml"), fields, {}), settings or {})
    return from_megatron(vars(args), settings or {}, None, "run_config.yaml", trained=True, **options)


def built(module: str, kind: str) -> dict[str, Any]:
    return {"transformer_layer_spec": {"_target_": f"{module}.{kind}_layer_spec", "_call_": False}}


def with_fields(at: Path, fields: Fields, source: Path = REAL / "llama3_tied") -> Path:
    """Bridge's run with other fields."""
    run = Path(shutil.copytree(source, at))
    path = next(run.glob("iter_*/run_config.yaml"))
    document = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump({**document, "model": {**document["model"], **fields}}))
    return run


@pytest.mark.parametrize("trainer", ["bridge", "nemo"])
@pytest.mark.parametrize("fields", [LOCAL, "local"], ids=["attention_backend", "layers"])
def test_a_window_that_the_fused_softmax_did_not_heed(convert, tmp_path, fields, trainer):
    module = BRIDGE if trainer == "bridge" else NEMO
    own = built(module, "local") if fields == "local" else LOCAL
    for number, (given, asked) in enumerate(
        ((own, True), ({}, False), ({**own, "masked_softmax_fusion": False}, False))
    ):
        at, every = tmp_path / str(number), {**WINDOW, **built(module, "default"), **given}
        run = with_fields(at, every) if trainer == "bridge" else nemo(at, **every)
        ran = convert("inspect", run, "--vocab-size", 60)
        if asked:
            said = "attention_backend = local" if own is LOCAL else "transformer_impl = local"
            refused(ran, 5, f"masked_softmax_fusion) of {said} keeps to no window", "--set sliding_window=none")
            assert convert("inspect", run, "--vocab-size", 60, "--set", "sliding_window=8").code == 0
        else:
            assert ran.code == 0, ran.err


def test_what_is_written_for_bridge_is_not_asked_about():
    fields = written("mistral")
    assert read(fields).sliding_window == read({**fields, **FUSED}).sliding_window is not None


def test_a_window_without_an_end_in_local_layers():
    """Transformer Engine takes a right of -1 for 0; to megatron-core's own attention a token does not see itself."""
    fields = {**written("mistral"), "window_size": [7, -1]}
    assert read({**fields, "transformer_impl": "local"}).sliding_window == 8, "a field that Bridge does not heed"
    block = {"transformer_layer_spec": partial(CORE, use_transformer_engine=False)}
    for local in (LOCAL, built(BRIDGE, "local"), block):
        with pytest.raises(UnsupportedError, match=r"window_size = \[7, -1\] with"):
            read({**fields, **local})
    assert read({**fields, "transformer_layer_spec": partial(CORE, use_transformer_engine=True)}).sliding_window == 8


def test_an_exact_gelu_of_transformer_engine():
    """Bridge's own layers leave `use_te_activation_func` out, those of megatron-core's function do not."""
    fields = written("gpt2-untied", activation_function="gelu")
    assert read(fields).activation == "gelu"
    block = {"transformer_layer_spec": partial(CORE, use_transformer_engine=True)}
    fuser, function = {"use_transformer_engine_op_fuser": True}, {"use_te_activation_func": True}
    for asked in (fuser, {**built(BRIDGE, "transformer_engine"), **fuser}, {**block, **function}):
        with pytest.raises(RefusedError, match="approximation with tanh in Transformer Engine"):
            read({**fields, **asked})
        assert read({**fields, **asked}, {"activation": "gelu_new"}).activation == "gelu_new"
    for exact in (function, {**built(BRIDGE, "default"), **function}, {**built(BRIDGE, "local"), **fuser}):
        assert read({**fields, **exact}).activation == "gelu"


def test_yarn_is_that_of_the_fields_that_bridge_reads():
    """`rotary_scaling_factor` and `mscale` are those of latents: GPTModel reads `yarn_*` (0.3.1 to 0.6.2)."""
    given = {"rotary_scaling_factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.0}
    own = {"yarn_rotary_scaling_factor": 4.0, "yarn_original_max_position_embeddings": 32, "yarn_beta_fast": 32.0,
           "yarn_beta_slow": 1.0, "yarn_mscale": None, "yarn_mscale_all_dim": None,
           "yarn_correction_range_round_to_int": True}  # fmt: skip
    fields = {**written(), **given, **own, "position_embedding_type": "yarn"}
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    assert read(fields).rope_scaling == {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True, **scaling}
    for value in (False, None):  # what is not said is not truncated
        read_without = read({**fields, "yarn_correction_range_round_to_int": value}).rope_scaling
        assert read_without["truncate"] is False
    scaled = read({**fields, "yarn_mscale": 0.7, "yarn_mscale_all_dim": 0.9}).rope_scaling
    assert (scaled["mscale"], scaled["mscale_all_dim"]) == (0.7, 0.9)
    with pytest.raises(UnsupportedError, match=r"yarn_rotary_scaling_factor = 4\.0 is not supported"):
        read({**written(), "yarn_rotary_scaling_factor": 4.0})  # queries and keys are scaled by it nevertheless


def test_yarn_whose_scale_a_kernel_left_out():
    fused = {"fused_single_qkv_rope": True}
    yarn = {"yarn_rotary_scaling_factor": 4.0, "yarn_original_max_position_embeddings": 32, "yarn_beta_fast": 32.0,
            "yarn_beta_slow": 1.0, "position_embedding_type": "yarn"}  # fmt: skip
    assert read({**written(), **fused}).rope_scaling is None
    fields = {**written(), **yarn}
    assert read(fields).rope_scaling
    with pytest.raises(RefusedError, match="fused_single_qkv_rope = True with YaRN") as raised:
        read({**fields, **fused})
    assert '"attention_factor": 1.0' in raised.value.hint
    assert read({**fields, **fused, "yarn_mscale": 0.7, "yarn_mscale_all_dim": 0.7}).rope_scaling["mscale"] == 0.7
    own = {**read(fields).rope_scaling, "attention_factor": 1.0}
    assert read({**fields, **fused}, {"rope_scaling": own}).rope_scaling == own


def test_experts_that_clamped_before_their_bias():
    args = args_of("gpt_oss", Options(dialect="torch_dist"))
    names = {argument: field for field, argument in run_config.RENAMED.items()}
    kept = {names.get(name, name): value for name, value in args.items()}
    fields = {
        **{name: kept[name] for name in run_config.WRITTEN.split() if name in kept},
        **{name: args[name] for name in ("softmax_type", "glu_linear_offset", "activation_func_clamp_value")},
        **{field: args.get(run_config.YARN[name]) for name, field in run_config.YARN_FIELDS.items()},
        "_target_": f"{BRIDGE}.GPTModelProvider", "seq_length": args["max_position_embeddings"],
        "activation_func": "megatron.core.activations.quick_gelu", "gated_linear_unit": True,
        "share_embeddings_and_output_weights": False, "bias_activation_fusion": True,
    }  # fmt: skip
    assert read({**fields, "moe_grouped_gemm": True}).family == "gpt_oss"
    apart = {**fields, "moe_grouped_gemm": False}
    assert read({**apart, "bias_activation_fusion": False}).family == "gpt_oss"
    with pytest.raises(UnsupportedError, match="bias_gelu_fusion = True with moe_grouped_gemm = False"):
        read(apart)
    assert "clamped before" in read(apart, accept=("bias_gelu_fusion",)).notes[0]


def test_norms_around_zero_are_whole_in_a_batch_invariant_run():
    """Only Megatron-LM puts its kernels in the place of Transformer Engine's (0.16 to 0.19, training/initialize.py)."""
    args = args_of("qwen3_next") | {"batch_invariant_mode": True}
    assert from_megatron(args, {}, None, "args", trained=True).family == "qwen3_next"


@pytest.mark.parametrize("name", ["gemma3", "gemma3_0.6", "mistral3"])
def test_a_class_whose_own_attention_was_replaced(convert, tmp_path, name):
    run = with_fields(tmp_path / "run", LOCAL, REAL / name)
    refused(convert("inspect", run), 4, "attention_backend = local takes megatron-core's attention in the place of")


def test_the_revision_of_its_base(convert, tmp_path):
    """A field of 0.6 that says nothing of the model."""
    assert convert("inspect", with_fields(tmp_path / "run", {"hf_model_revision": "0123abc"})).code == 0
