"""Packed rows and documents alone: the same logits, losses and gradients."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from formats.errors import RefusedError, UnsupportedError, UsageError
from tests.models import MODELS, SMALL, settings_of
from train.data.rows import IGNORED, Flat, open_rows
from train.data.tokens.documents import open_documents
from train.model.attention import forward_kwargs
from train.model.neftune import noise_for
from train.model.optimizer import groups
from train.model.selfcheck import require_masks, self_check
from train.model.trainee import Trainee, summed_loss
from train.settings.config import Data

CPU = torch.device("cpu")
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32}
FAMILIES = ["llama", "mistral", "qwen3", "gpt_neox"]


def loaded(folder, backend="sdpa"):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=backend, dtype=torch.float32)
    return Trainee(model, backend)


def flat_of(documents):
    """Documents of (tokens, mask), as `Rows.flat` lays them out."""
    inputs = [tokens[:-1] for tokens, _ in documents]
    labels = [np.where(mask[1:], tokens[1:], IGNORED) for tokens, mask in documents]
    sizes = [len(document) for document in inputs]
    ends = np.array([0, *np.cumsum(sizes)], np.int32)
    positions = np.concatenate([np.arange(size) for size in sizes])
    joined = np.concatenate(labels)
    return Flat(np.concatenate(inputs), joined, positions, ends, max(sizes), int((joined != IGNORED).sum()))


@pytest.fixture
def documents():
    random = np.random.default_rng(1)
    return [(random.integers(0, 253, size), random.random(size) < 0.6) for size in (40, 2, 17, 5, 64, 9)]


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_is_unpacked_in_losses_and_gradients(model, documents, family):
    folder = model(family, vocab_size=253)
    packed, alone = loaded(folder), loaded(folder)
    total = packed(flat_of(documents), CPU)
    total.backward()
    parts = [alone(flat_of([document]), CPU) for document in documents]
    torch.stack(parts).sum().backward()
    assert total.item() == pytest.approx(sum(part.item() for part in parts), rel=1e-6)
    for (name, tensor), (_, other) in zip(packed.named_parameters(), alone.named_parameters(), strict=True):
        assert torch.allclose(tensor.grad, other.grad, atol=2e-5, rtol=1e-4), name


def test_a_cache_would_mix_documents(model, documents):
    """What the arguments of `forward_kwargs` protect from: the default of every model."""
    trainee = loaded(model("llama", vocab_size=253))
    kwargs = forward_kwargs(flat_of(documents), CPU, "sdpa")
    assert kwargs["use_cache"] is False
    assert "attention_mask" not in kwargs
    with torch.no_grad():
        right = trainee.model(**kwargs).logits
        mixed = trainee.model(**kwargs | {"use_cache": True}).logits
        ones = trainee.model(**kwargs | {"attention_mask": torch.ones_like(kwargs["input_ids"])}).logits
    assert (mixed - right).abs().max() > 0.1
    assert (ones - right).abs().max() > 0.1


def test_the_self_check_refuses_what_mixes_documents(model, monkeypatch):
    from transformers import AutoConfig

    from formats.errors import VerificationError
    from train.model import selfcheck

    config = AutoConfig.from_pretrained(model("llama", vocab_size=253))
    assert self_check(config, CPU, "sdpa", torch.float32) < 1e-5
    monkeypatch.setattr(selfcheck, "forward_kwargs", lambda *_: forward_kwargs(*_) | {"use_cache": True})
    with pytest.raises(VerificationError, match="documents of a row see each other"):
        self_check(config, CPU, "sdpa", torch.float32)


def test_the_self_check_forgives_a_token_that_rounding_gives_to_another_expert():
    from transformers import AutoConfig

    config = AutoConfig.for_model(**settings_of("mixtral", vocab_size=203, num_local_experts=64))
    assert self_check(config, CPU, "sdpa", torch.bfloat16) < 2e-2


def test_the_self_check_has_the_kernels_of_the_training(settings, monkeypatch, alone):
    """A stand-in for liger's: rotary positions that count the tokens of a row."""
    from formats.errors import VerificationError
    from train.run.prepare import choose_attention
    from train.settings.config_file import load_config

    def counting(model):
        forward = model.model.rotary_emb.forward
        model.model.rotary_emb.forward = lambda x, position_ids: forward(x, torch.arange(x.shape[1])[None] ** 2)

    monkeypatch.setattr("train.model.kernels.resolve", lambda *_: "liger")
    monkeypatch.setattr("train.model.kernels.replace", counting)
    with pytest.raises(VerificationError, match="documents of a row see each other"):
        choose_attention(load_config(settings())[0], alone)
    assert choose_attention(load_config(settings(engine="deepspeed"))[0], alone)[1:] == (
        "sdpa",
        pytest.approx(0, abs=1e-5),
    )


def test_chunks_of_the_loss(monkeypatch):
    torch.manual_seed(0)
    head, hidden = torch.nn.Linear(16, 50), torch.randn(100, 16, requires_grad=True)
    labels = torch.randint(0, 50, (100,))
    labels[::3] = IGNORED
    loss = torch.nn.functional.cross_entropy(head(hidden), labels, ignore_index=IGNORED, reduction="sum")
    expected = torch.autograd.grad(loss, hidden)[0]
    monkeypatch.setattr("train.model.trainee.CHUNK", 7)
    chunked = summed_loss(hidden, labels, head)
    assert chunked.item() == pytest.approx(loss.item(), rel=1e-6)
    assert torch.allclose(torch.autograd.grad(chunked, hidden)[0], expected, atol=1e-6)
    assert float(summed_loss(hidden, torch.full((100,), IGNORED), head)) == 0


def test_rows_are_flattened_as_a_slow_reader_would(data):
    rows = open_rows(Data(train=[data], seq_length=64), [data], 1)
    documents = open_documents(data)
    for number in range(len(rows)):
        flat = rows.flat([number])
        pairs = []
        for document, _, _ in rows.plans[0].row(number, documents.indexed.sizes):
            tokens, mask = documents.indexed[document].tolist(), documents.trained(document, document + 1).tolist()
            pairs += [
                (tokens[place], tokens[place + 1] if mask[place + 1] else IGNORED, place)
                for place in range(len(tokens) - 1)
            ]
        assert list(zip(flat.input_ids, flat.labels, flat.position_ids, strict=True)) == pairs
        assert len(pairs) <= 64
        assert flat.trained == sum(label != IGNORED for _, label, _ in pairs)
        assert flat.cu_seqlens[-1] == len(pairs)


def test_positions_of_the_longest_document_are_enough(data):
    rows = open_rows(Data(train=[data], seq_length=64), [data], 1)
    longest = max(rows.flat([number]).longest for number in range(len(rows)))
    assert rows.longest == longest
    for learned in (True, False):
        assert "made for" not in rows.within(longest, learned).overlong
    assert f"the model was made for {longest - 1}" in rows.within(longest - 1, False).overlong
    with pytest.raises(RefusedError, match=f"vectors of {longest - 1} positions"):
        rows.within(longest - 1, True)


def test_noise_is_scaled_for_each_document(model, documents):
    trainee, flat = loaded(model("llama", vocab_size=253)), flat_of(documents)
    (noise,) = noise_for(trainee.model, flat, 5.0, (1, 2, 3))
    for begin, end in zip(flat.cu_seqlens, flat.cu_seqlens[1:], strict=False):
        bound = 5.0 / ((end - begin) * 64) ** 0.5
        assert noise[begin:end].abs().max() <= bound
        assert noise[begin:end].max() > 0.8 * bound
        assert noise[begin:end].min() < -0.8 * bound
    assert abs(noise.sum()) < 0.05 * noise.abs().sum()
    assert torch.equal(noise, noise_for(trainee.model, flat, 5.0, (1, 2, 3))[0])
    assert not torch.equal(noise, noise_for(trainee.model, flat, 5.0, (1, 2, 4))[0])


@pytest.mark.parametrize(
    ("name", "changes", "length", "reason"),
    [
        ("llama", {}, 1 << 20, ""),
        ("llama4_text", {}, 8191, ""),
        ("llama4_text", {}, 8192, "after 8191 differ"),
        ("llama4_text", {"attention_chunk_size": 64}, 65, "after 64 differ"),
        ("llama", {"layer_types": ["linear_attention"] * 4}, 64, "carry a state from token to token"),
        ("phi3", {"rope_parameters": LONG}, 32, ""),
        ("phi3", {"rope_parameters": LONG}, 33, ""),
        (
            "gemma3",
            {"rope_parameters": {"full_attention": LONG}},
            33,
            "by the longest, if that has more than 32 tokens",
        ),
        ("llama", {"keep_window_size": 48}, 49, "after 48 differ"),
    ],
)
def test_a_model_that_sees_more_than_a_document_is_refused(name, changes, length, reason):
    from transformers import AutoConfig

    config = AutoConfig.for_model(**settings_of(name))
    for key, value in changes.items():
        setattr(config, key, value)
    if reason:
        with pytest.raises(UsageError, match=reason):
            require_masks(config, length)
    else:
        require_masks(config, length)


def test_ranks_that_share_a_row_do_not_know_how_long_a_document_is():
    from transformers import AutoConfig

    config = AutoConfig.for_model(**settings_of("phi3"))
    config.rope_parameters = LONG
    require_masks(config, 32, context=2)
    with pytest.raises(UsageError, match="by the longest, if that has more than 32 tokens"):
        require_masks(config, 33, context=2)


def test_rows_of_a_micro_batch_are_one_sequence():
    from transformers import AutoConfig

    config = AutoConfig.for_model(**settings_of("llama4_text"))
    require_masks(config, 4095, 2)
    with pytest.raises(UsageError, match="after 8191 differ"):
        require_masks(config, 4096, 2)


@pytest.mark.parametrize("kind", ["gemma3", "mistral3", "qwen3_5"])
def test_a_model_of_more_than_text_is_refused(kind):
    """With one sentence: its text model's settings are not where the others have theirs."""
    from transformers import AutoConfig

    with pytest.raises(UnsupportedError, match=f"{kind} is a model of more than text"):
        require_masks(AutoConfig.for_model(kind), 64)


def test_a_decoder_that_is_none_is_refused():
    from transformers import AutoConfig

    config = AutoConfig.for_model("modernbert-decoder", **SMALL, pad_token_id=0)
    with pytest.raises(UnsupportedError, match="does not separate its decoder from its head"):
        self_check(config, CPU, "sdpa", torch.float32)


@pytest.mark.parametrize("name", MODELS)
def test_what_has_weight_decay_has_it_in_transformers_trainer_too(name):
    from transformers import AutoConfig, AutoModelForCausalLM, Trainer

    settings = settings_of(name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(settings.pop("model_type"), **settings))
    names = {id(tensor): key for key, tensor in model.named_parameters()}
    decayed = {names[id(tensor)] for tensor in groups(model, 0.1)[0]["params"]}
    assert decayed
    assert decayed <= set(Trainer.get_decay_parameter_names(None, model))
