"""Classes of Megatron-Bridge and NeMo 2 whose own defaults a file leaves out, and files that say a thing twice."""

from __future__ import annotations

from typing import Any

import pytest

from formats.errors import RefusedError, UnsupportedError
from formats.model.spec import ModelSpec
from tests.faults.dcp_tools import refused
from tests.golden.test_bridge import REAL, nemo
from tests.golden.test_bridge_kernels import read, with_fields, written

LLAMA = "megatron.bridge.models.llama.llama_provider.Llama"
NEMO = "nemo.collections.llm.gpt.model"
FIELDS = ("scale_factor", "low_freq_factor", "high_freq_factor", "old_context_len")
CORE = ("rope_scaling", "rope_scaling_factor")


def of_class(kind: str, *, without: tuple[str, ...] = CORE, **fields: Any) -> dict[str, Any]:
    """The fields of a plain Llama, of another class."""
    return {name: value for name, value in written().items() if name not in without} | {"_target_": kind, **fields}


def factor(spec: ModelSpec) -> float | None:
    return spec.rope_scaling["factor"] if spec.rope_scaling else None


@pytest.mark.parametrize(
    ("kind", "scaled"),
    [
        *((f"{LLAMA}31ModelProvider{size}", 8.0) for size in ("", "8B", "405B")),
        (f"{LLAMA}32ModelProvider1B", 32.0),
        (f"{NEMO}.llama.Llama31Config", 8.0),
        (f"{NEMO}.llama.Llama31Config8B", 8.0),
        (f"{NEMO}.llama.Llama32Config1B", 32.0),
        (f"{NEMO}.llama.Llama3Config8B", None),
        (f"{NEMO}.llama.Llama2Config7B", None),
        (f"{LLAMA}3ModelProvider70B", None),
    ],
)
def test_the_scaling_of_a_class(kind, scaled):
    """NeMo saves the fields alone that were passed."""
    assert factor(read(of_class(kind))) == scaled
    assert read(of_class(kind), {"rope_scaling": None}).rope_scaling is None
    if scaled:
        assert factor(read(of_class(kind, scale_factor=4.0))) == 4.0
        assert factor(read(of_class(kind, old_context_len=8192))) == scaled
        assert factor(read(of_class(kind, rope_scaling=True))) == scaled
        assert factor(read(of_class(kind, rope_scaling_factor=16.0))) == 16.0
        with pytest.raises(RefusedError, match="low_freq_factor = 2"):
            read(of_class(kind, low_freq_factor=2))
    else:
        with pytest.raises(UnsupportedError, match=r"scale_factor = 8\.0"):
            read(of_class(kind, scale_factor=8.0))


@pytest.mark.parametrize("own", FIELDS)
def test_a_class_that_scales_twice(own):
    fields = of_class(f"{LLAMA}31ModelProvider", **{own: {**dict.fromkeys(FIELDS, 8), FIELDS[-1]: 8192}[own]})
    with pytest.raises(RefusedError, match=f"rope_scaling = True, and {own} of the class 'Llama31ModelProvider'"):
        read(fields | {"rope_scaling": True})
    assert read(fields | {"rope_scaling": True}, {"rope_scaling": None}).rope_scaling is None


def test_a_scaling_that_is_off_where_earlier_releases_have_no_such_field(convert, tmp_path):
    run = with_fields(tmp_path / "run", {"_target_": f"{LLAMA}31ModelProvider", "rope_scaling": False})
    refused(convert("inspect", run), 5, "rope_scaling = False and no scale_factor", "--set rope_scaling=none (since)")
    assert convert("inspect", run, "--set", "rope_scaling=none").code == 0
    with pytest.raises(RefusedError, match=r"scales by 8\.0 in NeMo and in Megatron-Bridge before 0\.3\.1"):
        read(of_class(f"{NEMO}.llama.Llama31Config8B", rope_scaling=False))


def test_a_scaling_without_its_factor():
    """GPTModelProvider scales by 1 then, Megatron-LM by 8."""
    fields = written() | {"rope_scaling": True}
    del fields["rope_scaling_factor"]
    assert factor(read(fields)) == 1.0


def test_a_later_llama_is_not_known():
    with pytest.raises(UnsupportedError, match=r"Llama33Config' is not known"):
        read(of_class(f"{NEMO}.llama.Llama33Config"))


def test_the_window_of_a_class():
    """MistralConfig7B alone has one; `None` is a value."""
    assert read(of_class(f"{NEMO}.mistral.MistralConfig7B", without=("window_size",))).sliding_window == 4097
    assert read(of_class(f"{NEMO}.mistral.MistralConfig7B", window_size=None)).sliding_window is None
    assert read(of_class(f"{NEMO}.mistral.MistralNeMoConfig12B", without=("window_size",))).sliding_window is None


def test_fusions_and_norms_of_a_class():
    """Both change no shape: a fused GELU is the approximation, and norms around zero add 1."""
    fields = written("starcoder2") | {"_target_": f"{NEMO}.base.GPTConfig"}
    fields.pop("bias_activation_fusion")
    assert read(fields).activation == "gelu"
    fields["_target_"] += "126M"
    assert read(fields).activation == "gelu_pytorch_tanh"
    assert read({**fields, "bias_activation_fusion": False}).activation == "gelu"
    fields = written("nemotron") | {"_target_": f"{NEMO}.base.GPTConfig175B"}
    del fields["layernorm_zero_centered_gamma"]
    assert read(fields).family == "nemotron"


@pytest.mark.parametrize("kind", ["megatron.bridge.models.gpt_provider.GPTModelProvider", f"{NEMO}.base.GPTConfig"])
def test_the_norm_of_a_class(kind):
    """megatron-core's default is a LayerNorm; the classes of a family have that of the family."""
    for fields in (of_class(kind, without=("normalization",)), of_class(kind, normalization="LayerNorm")):
        with pytest.raises(UnsupportedError, match="normalization = 'LayerNorm'"):
            read(fields)
    assert read(of_class(f"{NEMO}.llama.Llama3Config8B", without=(*CORE, "normalization"))).family == "llama"


@pytest.mark.parametrize("size", ["", "8x7B"])
def test_the_router_of_a_class_whose_releases_differ(size):
    """True in NeMo up to 2.3.2, False since 2.4.0; transformers' Mixtral is the second."""
    fields = written("mixtral") | {"_target_": f"{NEMO}.mixtral.MixtralConfig{size}"}
    assert read(fields).family == "mixtral"
    del fields["moe_router_pre_softmax"]
    with pytest.raises(RefusedError, match=r"no moe_router_pre_softmax, .* has True in NeMo 2\.0\.0 to 2\.3\.2"):
        read(fields)
    assert read(fields, {"router_normalized": True}).family == "mixtral"
    with pytest.raises(UnsupportedError, match="router_normalized"):
        read(fields, {"router_normalized": False})


@pytest.mark.parametrize(
    ("name", "kind", "positions"),
    [
        ("mixtral", "mixtral.MixtralConfig", 4096),
        ("mixtral", "mixtral.MixtralConfig8x7B", 4096),
        ("qwen3", "qwen3.Qwen3Config8B", 40960),
        ("qwen3_moe", "qwen3.Qwen3Config30B_A3B", 40960),
        ("qwen2", "qwen2.Qwen2Config7B", 77),
    ],
)
def test_the_positions_of_a_class(name, kind, positions):
    """Mixtral and Qwen3 have a number of their own beside `seq_length`, and NeMo saves it only where it was passed."""
    fields = written(name) | {"_target_": f"{NEMO}.{kind}", "seq_length": 77}
    assert read(fields).max_positions == positions
    assert read({**fields, "max_position_embeddings": 50}).max_positions == 50
    assert read(fields, {"max_positions": 60}).max_positions == 60


def test_the_positions_of_a_class_whose_releases_differ():
    """65536 in NeMo 2.2.0 and 2.2.1 alone."""
    fields = written("mixtral") | {"_target_": f"{NEMO}.mixtral.MixtralConfig8x22B"}
    with pytest.raises(RefusedError, match=r"no max_position_embeddings, .* has 65536 in NeMo 2\.2 and 4096 before"):
        read(fields)
    assert read({**fields, "max_position_embeddings": 50}).max_positions == 50
    assert read(fields, {"max_positions": 65536}).max_positions == 65536


@pytest.mark.parametrize("size", ["7B", "13B", "34B", "70B"])
def test_a_code_llama_is_a_llama(size):
    """Its classes set no more than the sizes, the base and `seq_length`."""
    spec = read(of_class(f"{NEMO}.llama.CodeLlamaConfig{size}"))
    assert spec == read(of_class(f"{NEMO}.llama.Llama2Config7B"))


def test_a_field_of_nemo_that_nothing_reads():
    """megatron-core has `bias_dropout_fusion`."""
    fields = written("starcoder2") | {"_target_": f"{NEMO}.base.GPTConfig126M"}
    assert read({**fields, "bias_dropout_add_fusion": True}) == read(fields)


def test_a_class_of_nemo_in_a_folder(convert, tmp_path):
    run = nemo(tmp_path / "nemo")
    for number, left in enumerate((FIELDS[:1], FIELDS)):
        path = run / "context/model.yaml"
        text = "".join(line for line in path.read_text().splitlines(True) if line.split(":")[0].strip() not in left)
        path.write_text(text)
        assert convert("megatron2hf", run, tmp_path / str(number), "--vocab-size", 60).code == 0
        assert convert("diff", tmp_path / str(number), REAL / "llama3_tied").code == 0, left


@pytest.fixture(name="twice", scope="module")
def twice_fixture(tmp_path_factory, model):
    """What we write for Bridge: args of Megatron-LM, and a run_config.yaml beside them."""
    import vitruvian

    run = tmp_path_factory.mktemp("bridge") / "run"
    vitruvian.convert(model(), run, to="megatron", format="torch_dist", for_trainer="bridge")
    return run


def function(name: str) -> dict[str, Any]:
    return {"activation_func": {"_target_": f"torch.nn.functional.{name}", "_call_": False}}


@pytest.mark.parametrize(
    ("fields", "code", "said"),
    [
        ({"rotary_base": 500}, 5, "rope_theta: 10000.0 | 500.0"),
        ({"window_size": [8, 0]}, 5, "sliding_window: None | 9"),
        ({"layernorm_epsilon": 0.1}, 5, "norm_epsilon: "),
        ({"num_layers": 1}, 5, "layers: 4 | 1"),
        ({"vocab_size": 50}, 5, "vocab: "),
        ({"rope_scaling": True, "rope_scaling_factor": 4.0}, 5, "rope_scaling: None | {'rope_type': 'llama3'"),
        ({**function("gelu"), "gated_linear_unit": False}, 5, "args | run_config.yaml"),
        (function("gelu"), 4, "activation_func = 'torch.nn.functional.gelu' with gated_linear_unit = True"),
        ({"softmax_scale": 0.3}, 4, "softmax_scale = 0.3"),
        ({"_target_": f"{LLAMA}31ModelProvider"}, 5, "rope_scaling = False and no scale_factor"),
        ({"_target_": "my_fork.Provider"}, 4, "'my_fork.Provider' is not known"),
    ],
)
def test_a_run_config_that_contradicts_args_beside_it(convert, tmp_path, twice, fields, code, said):
    """Megatron-Bridge builds its model of run_config.yaml alone."""
    run = with_fields(tmp_path / "run", fields, twice)
    refused(convert("megatron2hf", run, tmp_path / "out"), code, "run_config.yaml", said)


def test_args_and_a_run_config_that_agree(convert, tmp_path, twice):
    assert convert("megatron2hf", twice, tmp_path / "out").code == 0
    run = with_fields(tmp_path / "other", {"rotary_base": 500, "rotary_interleaved": True}, twice)
    refused(convert("inspect", run), 4, "run_config.yaml: rotary_interleaved = True")
    accepted = ("--accept", "rotary_interleaved", "--set", "rope_theta=500.0")
    assert convert("inspect", run, *accepted).code == 0
    assert convert("inspect", with_fields(tmp_path / "open", {"vocab_size": None}, twice)).code == 0


def test_interleaved_experts_of_a_run_config_alone(convert, model, tmp_path):
    written_for = ("--format", "torch_dist", "--for", "bridge")
    assert convert("hf2megatron", model("mixtral"), tmp_path / "run", *written_for).code == 0
    assert convert("inspect", tmp_path / "run").code == 0
    run = with_fields(tmp_path / "other", {"moe_mlp_glu_interleave_size": 8}, tmp_path / "run")
    refused(convert("inspect", run), 5, "moe_mlp_glu_interleave_size: 0 | 8")
