"""Norms that Megatron stores less one: what comes back bit by bit, what is rounded, and who has to agree to that."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from converters.move.casts import add_one, less_one
from formats.errors import RefusedError
from tests.golden.test_bridge_lora import contents
from tests.optimizers import add_optimizer, of
from tests.unit.test_edges import DTYPES, INTS, TORCH, bits, by_torch

KEY = "decoder.layers.0.self_attention.out_norm.weight"
HUB = "model.layers.0.linear_attn.norm.weight"


def numbers(words: np.ndarray, dtype: str) -> torch.Tensor:
    return torch.from_numpy(words.view(f"i{words.itemsize}")).view(TORCH[dtype])


def words_of(tensor: torch.Tensor, dtype: str) -> np.ndarray:
    return tensor.view(INTS[DTYPES[dtype]]).numpy().view(f"u{DTYPES[dtype]}")


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_one_is_added_as_torch_does(dtype):
    words = bits(dtype)
    finite = words[torch.isfinite(numbers(words, dtype) + 1).numpy()]
    assert np.array_equal(add_one(finite, dtype), words_of(numbers(finite, dtype) + 1, dtype))


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_from_one_half_to_two_hundred_it_comes_back(dtype):
    words = bits(dtype)
    values = numbers(words, dtype)
    near = words[((values >= 0.5) & (values <= 200)).numpy()]
    assert len(near) > 1000
    assert np.array_equal(less_one(near, dtype, "norm"), words_of(numbers(near, dtype) - 1, dtype))
    below = words_of(torch.tensor([1.0, 0.1, 0.2], dtype=TORCH[dtype]), dtype)
    with pytest.raises(RefusedError, match=r"norm holds 0\.(1|09).* \(2 or more such values\)"):
        less_one(below, dtype, "norm")
    rounded = less_one(below, dtype, "norm", rounded=True)
    assert torch.equal(numbers(rounded, dtype), torch.tensor([1.0, 0.1, 0.2], dtype=TORCH[dtype]) - 1)


def test_what_is_of_16_bits_mostly_comes_back_in_32():
    words = bits("BF16")
    values = numbers(words, "BF16").abs()
    words = by_torch(words[((values >= 1e-4) & (values < 1e6)).numpy()], "BF16", "F32")
    assert len(words) > 1000
    assert np.array_equal(add_one(less_one(words, "F32", "norm"), "F32"), words)


def with_norm(source, folder, values: list[float]):
    """A copy of a model whose first norm of linear attention begins with these values."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(source / "model.safetensors")
    tensors[HUB][: len(values)] = torch.tensor(values).to(tensors[HUB].dtype)
    folder.mkdir()
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def norm_of(run) -> torch.Tensor:
    return torch.load(run / "release/mp_rank_00/model_optim_rng.pt", weights_only=False)["model"][KEY]


def test_the_plan_names_the_change(model, convert, tmp_path):
    source, run = model("qwen3_5_text", "bfloat16"), tmp_path / "m"
    there = json.loads(convert("hf2megatron", source, run, "-n", "--json").out)
    assert there["edges"] == {"subtract 1 from a norm": 3}
    assert convert("hf2megatron", source, run).code == 0
    back = json.loads(convert("megatron2hf", run, tmp_path / "b", "-n", "--json").out)
    assert back["edges"] == {"add 1 to a norm that is stored minus 1": 3}
    again = json.loads(convert("reshard", run, tmp_path / "r", "--tp", 2, "-n", "--json").out)
    assert again["edges"] == {}
    assert convert("diff", source, run).code == 0
    assert convert("verify", run, source).code == 0


def test_what_would_be_rounded_is_refused_unless_it_is_accepted(model, convert, tmp_path):
    source = with_norm(model("qwen3_5_text", "bfloat16"), tmp_path / "hf", [0.1, 0.2])
    ran = convert("hf2megatron", source, tmp_path / "m")
    assert ran.code == 5
    assert (
        ".layers.0.linear_attn.norm.weight holds 0.100098: stored minus 1, as the target has it, that is another number"
        in ran.err
    )
    assert "in BF16 (2 or more such values)" in ran.err
    assert "--accept rounded_norms rounds them" in ran.err
    assert convert("hf2megatron", source, tmp_path / "m", "--accept", "rounded_norms").code == 0
    assert norm_of(tmp_path / "m")[:2].tolist() == (torch.tensor([0.1, 0.2]).bfloat16() - 1).tolist()
    assert convert("verify", tmp_path / "m").code == 0
    assert HUB in convert("diff", source, tmp_path / "m").out
    assert convert("hf2megatron", source, tmp_path / "m32", "--dtype", "fp32").code == 0
    assert norm_of(tmp_path / "m32")[0].item() == torch.tensor(0.1).bfloat16().item() - 1


def test_what_megatron_has_trained_is_rounded_to_the_type_of_the_output(model, convert, tmp_path):
    """Near zero it has more digits than one plus it. The digest is that of the model, a reshard moves every bit."""
    run = tmp_path / "m"
    assert convert("hf2megatron", model("qwen3_5_text", "bfloat16"), run).code == 0
    path = run / "release/mp_rank_00/model_optim_rng.pt"
    stored = torch.load(path, weights_only=False)
    stored["model"][KEY][:2] = torch.tensor([0.0030, 0.0123]).bfloat16()
    torch.save(stored, path)
    (run / "release/vitruvian.json").unlink()
    expected = stored["model"][KEY] + 1
    for options in ([], ["--dtype", "fp32"]):
        out = tmp_path / f"hf{len(options)}"
        assert convert("megatron2hf", run, out, *options).code == 0
        from safetensors.torch import load_file

        converted = load_file(out / "model.safetensors")[HUB]
        assert torch.equal(converted, stored["model"][KEY].float() + 1 if options else expected)
    assert convert("digest", run).out.split()[0] == convert("digest", tmp_path / "hf0").out.split()[0]
    assert convert("reshard", run, tmp_path / "r", "--tp", 2).code == 0
    assert convert("reshard", tmp_path / "r", tmp_path / "r1", "--tp", 1).code == 0
    assert torch.equal(norm_of(tmp_path / "r1"), stored["model"][KEY])
    stored["model"][KEY][0] = 0.0031
    torch.save(stored, tmp_path / "r1/release/mp_rank_00/model_optim_rng.pt")
    assert HUB in convert("diff", run, tmp_path / "r1").out, "two runs are compared as they are stored"


def test_a_run_in_float32_is_rounded_once(model, convert, tmp_path):
    """One is added before the cast: in bfloat16 0.1 - 1 has lost what 0.1 has."""
    from safetensors.torch import load_file

    source = with_norm(model("qwen3_5_text", "bfloat16"), tmp_path / "hf", [0.1, -0.3, 1e-4])
    assert convert("hf2megatron", source, tmp_path / "m", "--dtype", "fp32").code == 0
    assert convert("megatron2hf", tmp_path / "m", tmp_path / "b", "--dtype", "bf16").code == 0
    converted, expected = (load_file(folder / "model.safetensors")[HUB] for folder in (tmp_path / "b", source))
    assert torch.equal(converted, expected)


def test_the_library_gives_the_bytes_of_the_conversion(model, convert, tmp_path):
    import vitruvian

    source, run = model("qwen3_5_text", "bfloat16"), tmp_path / "m"
    assert convert("hf2megatron", source, run).code == 0
    with vitruvian.open(source).as_("megatron") as view:
        assert torch.equal(view[KEY].torch(), norm_of(run))


def test_masters_go_where_they_still_round_to_the_weights(model, convert, tmp_path):
    """Into FSDP as the weights, with one added, and back in float32; into Megatron's half precision they do not."""
    run, fsdp = tmp_path / "run", tmp_path / "fsdp"
    assert convert("hf2megatron", model("qwen3_5_text", "bfloat16"), run, "--iteration", 3).code == 0
    add_optimizer(run, "plain")
    ran = convert("hf2fsdp", run, fsdp, "--with-optimizer")
    assert ran.code == 0, ran.err
    whole = tmp_path / "fp32"
    ran = convert("hf2megatron", fsdp, whole, "--with-optimizer")
    assert ran.code == 0, ran.err
    stored = [torch.load(next(place.rglob("model_optim_rng.pt")), weights_only=False) for place in (run, whole)]
    masters, weights = of(stored[0]["model"][KEY], "master") + 1, stored[1]["model"][KEY]
    assert torch.equal(weights, masters - 1)
    moments = [
        optimizer["optimizer"] if "state" in optimizer["optimizer"] else optimizer["optimizer"]["optimizer"]
        for optimizer in stored
    ]
    every = [
        [state["exp_avg"] for state in optimizer["state"].values() if state["exp_avg"].shape[0] != 256]
        for optimizer in moments
    ]
    # but for the padding of the vocabulary
    sums = [sum(float(tensor.double().sum()) for tensor in tensors) for tensors in every]
    assert sums[0] == sums[1], "moments are those of the weight either way"
    ran = convert("hf2megatron", fsdp, tmp_path / "bf16", "--with-optimizer", "--dtype", "bf16")
    assert (ran.code, "less one, where its FP32 master weights do not round to the weights" in ran.err) == (4, True), (
        ran.err
    )


def test_an_optimizer_of_float32_comes_through_all_its_kinds(model, convert, tmp_path):
    """As a distributed one, whose FP32 master weights are the weights, and as a universal checkpoint, and back."""
    run, fsdp = tmp_path / "run", tmp_path / "fsdp"
    assert convert("hf2megatron", model("qwen3_5_text", "float32"), run, "--iteration", 3).code == 0
    add_optimizer(run, "plain")
    assert convert("hf2fsdp", run, fsdp, "--with-optimizer").code == 0
    kinds = {"plain": (), "distributed": ("--format", "torch_dist", "--optimizer", "distributed")}
    for name, options in kinds.items():
        for dtype in ((), ("--dtype", "fp32")):
            out = tmp_path / f"{name}{len(dtype)}"
            ran = convert("hf2megatron", fsdp, out, "--with-optimizer", *options, *dtype)
            assert ran.code == 0, ran.err
        universal, back = tmp_path / f"{name}-universal", tmp_path / f"{name}-back"
        ran = convert("zero2universal", out, universal)
        assert ran.code == 0, ran.err
        ran = convert("hf2fsdp", universal, back, "--with-optimizer", "--config", fsdp)
        assert ran.code == 0, ran.err
        ours, theirs = (
            {key: tensor for key, tensor in contents(place).items() if tensor is not None} for place in (back, fsdp)
        )
        assert ours.keys() == theirs.keys()
        assert all(np.array_equal(tensor, theirs[key]) for key, tensor in ours.items())
