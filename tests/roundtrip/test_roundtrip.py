"""HF to Megatron to another Megatron topology to HF: every file comes back byte for byte."""

from __future__ import annotations

import pytest

from formats.families import FAMILIES
from formats.registry import open_checkpoint
from tests.models import DTYPES, FEW, IN_EVERY_TYPE, LINEAR, MODELS, RENAMED, files

TOPOLOGIES = ["tp1 pp1", "tp2 pp2", "tp4 pp1", "tp1 pp4", "tp2 pp2 vpp2", "tp8 pp1"]


def flags(topology: str) -> list[str]:
    """`tp2 pp2` as options."""
    return [word for part in topology.split() for word in (f"--{part.rstrip('0123456789')}", part.lstrip("tpv"))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, dtype) for name in FEW if name not in RENAMED for dtype in DTYPES[: 3 if name in IN_EVERY_TYPE else 1]],
)
def test_every_line_and_type_comes_back(model, convert, tmp_path, name, dtype):
    """Every family comes back in `test_chain.py`."""
    source = model(name, dtype, shard="100KB" if dtype == "bfloat16" else "50GB")
    linear = name in LINEAR  # which has no local names, and not heads for eight ranks
    topologies = [topology.replace("8", "4") if linear else topology for topology in TOPOLOGIES]
    for number, (start, target) in enumerate(zip(topologies[::2], topologies[1::2], strict=True)):
        first, second, back = (tmp_path / f"{number} {step}" for step in ("one", "two", "back"))
        norm = "te" if linear else ("te", "local")[number % 2]
        assert convert("hf2megatron", source, first, "--norm", norm, *flags(start)).code == 0
        assert convert("reshard", first, second, *flags(target)).code == 0
        assert convert("megatron2hf", second, back).code == 0
        assert files(back) == files(source)


@pytest.fixture(scope="module")
def written(model, tmp_path_factory):
    """`written(convert, topology)`: the model, and what is written of it, once a topology."""
    source, made = model("qwen2-tied", "bfloat16"), {}

    def get(convert, topology):
        if topology not in made:
            made[topology] = tmp_path_factory.mktemp("written") / "m"
            assert convert("hf2megatron", source, made[topology], *flags(topology)).code == 0
        return source, made[topology]

    return get


@pytest.mark.parametrize("target", TOPOLOGIES)
@pytest.mark.parametrize("start", TOPOLOGIES)
def test_every_topology_reaches_every_other(written, convert, tmp_path, start, target):
    (source, first), (_, direct) = written(convert, start), written(convert, target)
    assert convert("reshard", first, tmp_path / "two", *flags(target)).code == 0
    assert files(tmp_path / "two") == files(direct), "A to B to C is not A to C"
    assert convert("megatron2hf", tmp_path / "two", tmp_path / "back").code == 0
    assert files(tmp_path / "back") == files(source)


@pytest.mark.parametrize(
    ("name", "changes", "topology", "reason"),
    [
        ("llama", {}, "tp7 pp1", "8 heads in 4 key/value groups do not divide over tp = 7"),
        (
            "llama",
            {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8, "hidden_size": 48},
            "tp3 pp1",
            "do not divide over tp = 3",
        ),
        (
            "llama",
            {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 16, "hidden_size": 48},
            "tp2 pp1",
            "3 heads",
        ),
        ("llama", {"intermediate_size": 97}, "tp2 pp1", "97 rows do not divide over tp = 2"),
        ("llama", {}, "tp1 pp3", "4 layers do not divide over 3 pipeline parts"),
        ("llama", {}, "tp1 pp2 vpp4", "4 layers do not divide over 8 pipeline parts"),
    ],
)
def test_what_does_not_divide_is_refused(model, convert, tmp_path, name, changes, topology, reason):
    ran = convert("hf2megatron", model(name, **changes), tmp_path / "out", *flags(topology))
    assert ran.code == 5
    assert reason in ran.err
    assert list(tmp_path.iterdir()) == []


UNEVEN = [
    ["--pp", 2, "--first-stage-layers", 1],
    ["--pp", 3, "--first-stage-layers", 1, "--last-stage-layers", 1],
    ["--pp", 2, "--last-stage-layers", 1],
    ["--pp", 2, "--vpp", 2, "--last-stage-layers", 2, "--tp", 2],
    ["--pp", 2, "--pp-layout", "Et|(t|)*2tL"],
    ["--pp", 3, "--pp-layout", "Etttt||L"],
    ["--pp", 2, "--vpp", 2, "--pp-layout", "E||tttt|L"],
]


@pytest.mark.parametrize("options", UNEVEN)
def test_stages_of_different_sizes_come_back(model, convert, tmp_path, options):
    source = model("llama-tied", "bfloat16")
    kinds = ["torch", "torch_dist"]
    for kind in kinds:
        assert convert("hf2megatron", source, tmp_path / kind, "--format", kind, *options).code == 0
        flags_of_pipeline = (tmp_path / kind / "megatron_flags.txt").read_text()
        assert "-pipeline-num-layers" in flags_of_pipeline or "--pipeline-model-parallel-layout" in flags_of_pipeline
        assert convert("megatron2hf", tmp_path / kind, tmp_path / f"{kind} back").code == 0
        assert files(tmp_path / f"{kind} back") == files(source)
    assert convert("hf2megatron", source, tmp_path / "even").code == 0
    assert convert("reshard", tmp_path / "even", tmp_path / "resharded", *options).code == 0
    direct = open_checkpoint(tmp_path / "torch")
    assert [tensor.key for tensor in open_checkpoint(tmp_path / "resharded").tensors] == [
        tensor.key for tensor in direct.tensors
    ]
    assert convert("reshard", tmp_path / "torch", tmp_path / "even again").code == 0
    assert files(tmp_path / "even again") == files(tmp_path / "even")


@pytest.mark.parametrize(
    ("options", "code", "reason"),
    [
        (["--first-stage-layers", 1], 2, "one pipeline stage holds all layers"),
        (["--pp", 2, "--first-stage-layers", 0], 2, "0 is not in the range x>=1"),
        (["--pp", 2, "--last-stage-layers", 0], 2, "0 is not in the range x>=1"),
        (["--pp-layout", "EttttL"], 2, "one pipeline stage holds all layers"),
        (["--pp", 2, "--pp-layout", "Et|tttL", "--first-stage-layers", 1], 2, "how many layers each stage has"),
        (["--pp", 2, "--first-stage-layers", 5], 5, "would hold 5 layers, the model has 4"),
        (["--pp", 3, "--first-stage-layers", 1], 5, "3 middle layers do not divide over 2"),
        (["--pp", 2, "--pp-layout", "Et|ttL"], 5, "holds 3 layers, the model has 4"),
        (["--pp", 2, "--pp-layout", "Et|t|ttL"], 5, "do not divide over 2"),
        (["--pp", 2, "--pp-layout", "tt|ttL"], 5, "has to begin with its one E"),
        (["--pp", 2, "--pp-layout", "Ett|tt"], 5, "to end with its one L"),
        (["--pp", 2, "--pp-layout", "Ett|ttmL"], 4, "holds more than E, t, L and |"),
        (["--pp", 2, "--format", "megatron-llm", "--first-stage-layers", 1], 4, "hold equally many layers"),
    ],
)
def test_stages_that_cannot_be_are_refused(model, convert, tmp_path, options, code, reason):
    ran = convert("hf2megatron", model("llama"), tmp_path / "out", *options)
    assert ran.code == code, ran.err
    assert reason in ran.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["granite", "olmo2", "gemma2", "gemma3"])
def test_what_only_hugging_face_and_fsdp_can_hold_is_refused(model, convert, tmp_path, name):
    family = FAMILIES[MODELS[name]["model_type"]]
    for argv in (["hf2megatron"], ["hf2megatron", "--format", "torch_dist"], ["hf2neox"]):
        ran = convert(argv[0], model(name), tmp_path / "out", *argv[1:])
        assert ran.code == 4
        assert (family.only_here if argv[0] == "hf2megatron" else "GPT-NeoX has") in ran.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("heads", "groups", "topology"),
    [(3, 3, "tp3 pp1"), (3, 1, "tp3 pp2"), (7, 7, "tp7 pp1"), (12, 6, "tp3 pp1"), (8, 2, "tp8 pp1")],
)
def test_odd_sizes_come_back(model, convert, tmp_path, heads, groups, topology):
    source = model("llama", num_attention_heads=heads, num_key_value_heads=groups, head_dim=12, hidden_size=168,
                   intermediate_size=168)  # fmt: skip
    assert convert("hf2megatron", source, tmp_path / "one", *flags(topology)).code == 0
    assert convert("megatron2hf", tmp_path / "one", tmp_path / "back").code == 0
    assert files(tmp_path / "back") == files(source)


def test_a_single_file_can_become_shards_and_come_back(model, convert, tmp_path):
    source, digest = model("qwen3", "bfloat16"), None
    convert("hf2megatron", source, tmp_path / "m", "--tp", 2)
    assert convert("megatron2hf", tmp_path / "m", tmp_path / "h", "--shard-size", "50kB").code == 0
    shards = sorted(path.name for path in (tmp_path / "h").glob("*.safetensors"))
    assert len(shards) > 2
    assert shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    for folder in (source, tmp_path / "m", tmp_path / "h"):
        current = convert("digest", folder).out.split()[0]
        assert digest in (None, current)
        digest = current


@pytest.mark.parametrize("size", ["60kB", "20kB"])
def test_shards_are_those_of_transformers(model, convert, tmp_path, size):
    """Fresh sharding cuts where transformers cuts, and gives the same bytes, also of a tensor larger than a file."""
    whole, cut = model("qwen2"), model("qwen2", shard=size)
    convert("hf2megatron", whole, tmp_path / "m")
    assert convert("megatron2hf", tmp_path / "m", tmp_path / "h", "--shard-size", size).code == 0
    assert files(tmp_path / "h") == files(cut)


@pytest.mark.parametrize(
    ("norm", "name"), [("local", "input_layernorm.weight"), ("te", "self_attention.linear_qkv.layer_norm_weight")]
)
def test_a_run_keeps_the_names_of_its_norms(model, convert, tmp_path, norm, name):
    import torch

    assert convert("hf2megatron", model(), tmp_path / "run", "--norm", norm).code == 0
    assert convert("reshard", tmp_path / "run", tmp_path / "out", "--tp", 2).code == 0
    (path,) = (tmp_path / "out").rglob("mp_rank_00/*.pt")
    assert f"decoder.layers.0.{name}" in torch.load(path, weights_only=False)["model"]


def test_an_iteration_that_is_named_itself_has_the_tokenizer_of_its_run(model, convert, tmp_path):
    assert convert("hf2megatron", model(), tmp_path / "run", "--iteration", 5).code == 0
    assert convert("megatron2hf", tmp_path / "run/iter_0000005", tmp_path / "out").code == 0
    assert files(tmp_path / "out") == files(model())
