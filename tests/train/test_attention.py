"""Which attention a device has, torch's varlen kernel as a GPU would be asked, and logits that are not the head's."""

from __future__ import annotations

import inspect
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from formats.errors import UnsupportedError
from tests.train.test_model import flat_of
from train.model.attention import named, resolve, varlen
from train.model.selfcheck import self_check
from train.model.trainee import Trainee

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def loaded(folder, backend, **options):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation=named(backend), **options)


def config_of(folder):
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(folder)


@pytest.fixture
def documents():
    random = np.random.default_rng(1)
    return [(random.integers(0, 253, size), random.random(size) < 0.6) for size in (40, 2, 17, 64)]


@pytest.mark.parametrize(
    ("family", "dtype", "flash", "expected"),
    [
        ("llama", torch.bfloat16, True, "flash"),
        ("llama", torch.bfloat16, False, "varlen"),
        ("llama", torch.float32, True, "sdpa"),
        ("gemma2", torch.bfloat16, True, "flash"),
        ("gemma2", torch.bfloat16, False, "eager"),
        ("gemma2-untied", torch.bfloat16, False, "eager"),
    ],
)
def test_what_a_gpu_takes(model, monkeypatch, family, dtype, flash, expected):
    monkeypatch.setattr("train.model.attention._has_flash", lambda: flash)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", lambda q, *, window_size, scale, enable_gqa: q)
    config = config_of(model(family, vocab_size=253))
    assert resolve("auto", config, CUDA, dtype) == expected
    assert resolve("auto", config, CPU, dtype) == ("eager" if "gemma2" in family else "sdpa")
    with pytest.raises(UnsupportedError, match="varlen does not compute"):
        resolve("varlen", config, CPU if family == "llama" else CUDA, dtype)


@pytest.mark.parametrize(
    ("family", "changes", "with_flash", "without_flash"),
    [
        ("llama", {"head_dim": 264}, "sdpa", "sdpa"),
        ("llama", {"head_dim": 20}, "flash", "sdpa"),
        ("llama", {"attention_dropout": 0.1}, "flash", "sdpa"),
        ("gpt_neox", {"num_attention_heads": 8}, "flash", "varlen"),
        ("deepseek_v3", {}, "flash", "varlen"),
        ("deepseek_v3", {"qk_nope_head_dim": 256}, "sdpa", "sdpa"),
        ("deepseek_v3", {"qk_nope_head_dim": 12}, "flash", "sdpa"),
    ],
)
def test_kernels_are_not_given_what_they_refuse(model, monkeypatch, family, changes, with_flash, without_flash):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", lambda q, *, window_size, scale, enable_gqa: q)
    config = config_of(model(family, vocab_size=253, **changes))
    for flash, backend in ((True, with_flash), (False, without_flash)):
        monkeypatch.setattr("train.model.attention._has_flash", lambda flash=flash: flash)
        assert resolve("auto", config, CUDA, torch.bfloat16) == backend


def test_a_flash_attn_that_cannot_be_imported_is_not_there(model, monkeypatch, tmp_path):
    """One that was built for another torch."""
    (tmp_path / "flash_attn.py").write_text("raise ImportError('undefined symbol: _ZN3c105ErrorC2E')")
    monkeypatch.syspath_prepend(tmp_path)
    config = config_of(model("llama", vocab_size=253))
    assert resolve("auto", config, CUDA, torch.bfloat16) != "flash"
    with pytest.raises(UnsupportedError, match="flash does not compute llama in bfloat16 on cuda"):
        resolve("flash", config, CUDA, torch.bfloat16)


def test_a_kernel_that_does_not_ask_for_groups_is_taken(model, monkeypatch):
    """That of torch 2.11."""
    monkeypatch.setattr("train.model.attention._has_flash", lambda: False)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", lambda q, *, window_size, scale: q)
    assert resolve("auto", config_of(model("llama", vocab_size=253)), CUDA, torch.bfloat16) == "varlen"


def test_a_kernel_without_windows_is_not_taken(model, monkeypatch):
    """That of torch 2.10."""
    monkeypatch.setattr("train.model.attention._has_flash", lambda: False)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", lambda q, *, is_causal: q)
    config = config_of(model("llama", vocab_size=253))
    assert resolve("auto", config, CUDA, torch.bfloat16) == "sdpa"
    with pytest.raises(UnsupportedError, match="varlen does not compute"):
        resolve("varlen", config, CUDA, torch.bfloat16)


@pytest.fixture
def kernel(monkeypatch):
    """torch's varlen kernel, which runs on GPUs only, in plain torch; arguments that it would not take are errors."""
    from torch.nn.attention import varlen

    signature, calls = inspect.signature(varlen.varlen_attn), []
    if "window_size" not in signature.parameters:
        pytest.skip(f"the kernel of torch {torch.__version__} has no windows, and is not taken")

    def computed(*args, **kwargs):
        given = signature.bind(*args, **kwargs).arguments
        q, k, v = (given[name] for name in ("query", "key", "value"))
        ends, (left, right) = given["cu_seq_q"].tolist(), given["window_size"]
        assert given["cu_seq_q"].dtype == torch.int32
        assert (given["max_q"], right, ends[-1]) == (int(np.diff(ends).max()), 0, len(q))
        grouped = q.shape[1] != k.shape[1]
        assert given.get("enable_gqa", grouped) == grouped  # torch 2.11 does not ask
        assert q.shape[2] == k.shape[2] == v.shape[2]  # aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp
        calls.append(left)
        parts = []
        for low, high in pairwise(ends):
            place = torch.arange(high - low)
            distance = place[:, None] - place[None]
            mask = (distance >= 0) & ((distance <= left) if left >= 0 else True)
            heads = [tensor[low:high].transpose(0, 1)[None] for tensor in (q, k, v)]
            parts.append(
                torch.nn.functional.scaled_dot_product_attention(
                    *heads, attn_mask=mask, scale=given["scale"], enable_gqa=grouped
                )[0].transpose(0, 1)
            )
        return torch.cat(parts)

    computed.__signature__ = signature
    monkeypatch.setattr(varlen, "varlen_attn", computed)
    return calls


@pytest.mark.parametrize(("family", "window"), [("llama", -1), ("mistral", 15), ("gpt_neox", -1), ("deepseek_v3", -1)])
def test_varlen_gives_what_eager_gives(model, documents, kernel, family, window):
    folder = model(family, vocab_size=253, **({"sliding_window": 16} if family == "mistral" else {}))
    assert self_check(config_of(folder), CPU, "varlen", torch.float32) < 1e-5
    packed, padded = (Trainee(loaded(folder, backend), backend) for backend in ("varlen", "eager"))
    losses = [trainee(flat_of(documents), CPU) for trainee in (packed, padded)]
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-6)
    losses[0].backward()
    losses[1].backward()
    for (name, tensor), (_, other) in zip(packed.named_parameters(), padded.named_parameters(), strict=True):
        assert torch.allclose(tensor.grad, other.grad, atol=2e-5, rtol=1e-4), name
    assert set(kernel) == {window}


def test_varlen_has_no_dropout(model, documents, kernel):
    folder = model("gpt_neox", vocab_size=253, attention_dropout=0.1)
    trainee = Trainee(loaded(folder, "varlen"), "varlen").train()
    with pytest.raises(UnsupportedError, match="varlen has no dropout, gpt_neox needs it"):
        trainee(flat_of(documents), CPU)


@pytest.mark.parametrize(("name", "value"), [("softcap", 30.0), ("s_aux", torch.zeros(2))])
def test_varlen_refuses_what_it_would_leave_out(kernel, name, value):
    layer, heads = SimpleNamespace(config=SimpleNamespace(model_type="m")), torch.zeros(1, 2, 3, 8)
    with pytest.raises(UnsupportedError, match=f"varlen has no {name}, m needs it"):
        varlen(layer, heads, heads, heads, None, **{name: value})
    assert not kernel


def test_what_does_not_run_is_one_sentence(model, monkeypatch):
    def fails(*_, **__):
        raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.")

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", fails)
    config = config_of(model("llama", vocab_size=253))
    with pytest.raises(UnsupportedError, match=r"attention varlen in float32 on cpu: FlashAttention only supports"):
        self_check(config, CPU, "varlen", torch.float32)


@pytest.mark.parametrize(("family", "changes"), [("granite", {"logits_scaling": 4.0}), ("gemma2", {})])
def test_logits_that_a_model_scales_or_caps(model, documents, monkeypatch, family, changes):
    folder = model(family, vocab_size=253, **changes)
    config, flat = config_of(folder), flat_of(documents)
    backend = resolve("auto", config, CPU, torch.float32)
    trainee = Trainee(loaded(folder, backend), backend)
    ids, places = (torch.from_numpy(array)[None] for array in (flat.input_ids, flat.position_ids))
    with torch.no_grad():
        trainee.model.get_output_embeddings().weight.mul_(9)
        logits = trainee.model(input_ids=ids, position_ids=places, use_cache=False).logits[0]
        expected = torch.nn.functional.cross_entropy(logits, torch.from_numpy(flat.labels), reduction="sum")
        assert trainee(flat, CPU).item() == pytest.approx(expected.item(), rel=1e-5)
    assert self_check(config, CPU, backend, torch.float32) < 1e-4
    monkeypatch.setattr("train.model.selfcheck.adjusted", lambda logits, _: logits)
    with pytest.raises(UnsupportedError, match=f"{family} does something with its logits that is not known here"):
        self_check(config, CPU, backend, torch.float32)


def test_gpt_oss_sees_where_documents_begin(model, documents):
    """Its masks, of all tokens and of a window, get no positions from transformers."""
    folder = model("gpt_oss", vocab_size=253)
    config = config_of(folder)
    assert resolve("auto", config, CPU, torch.float32) == "eager"
    for dtype, most in ((torch.float32, 1e-5), (torch.bfloat16, 5e-2)):
        assert self_check(config, CPU, "eager", dtype) < most
    trainee = Trainee(loaded(folder, "eager", dtype=torch.float32), "eager")
    packed = trainee(flat_of(documents), CPU)
    packed.backward()
    expected = {name: tensor.grad.clone() for name, tensor in trainee.named_parameters()}
    trainee.zero_grad()
    alone = [trainee(flat_of([document]), CPU) for document in documents]
    sum(alone).backward()
    assert packed.item() == pytest.approx(sum(loss.item() for loss in alone), rel=1e-6)
    for name, tensor in trainee.named_parameters():
        assert torch.allclose(tensor.grad, expected[name], atol=2e-5, rtol=1e-4), name
