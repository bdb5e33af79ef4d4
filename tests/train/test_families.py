"""Every family: packed rows have the losses and the gradients that transformers itself has for each document alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from formats.errors import VitruvianError
from tests.models import INDEXED, LINEAR, MODELS, variants_slow
from tests.train.test_model import flat_of
from train.model.attention import resolve
from train.model.selfcheck import require_masks, self_check
from train.model.trainee import Trainee, fill, fill_buffers, make, open_config

CPU = torch.device("cpu")
STATEFUL = ("bamba", "granitemoehybrid", "granite_hybrid", "falcon_h1", "mamba2", "lfm2", "kimi_linear")
STATES = [name for name in MODELS if name.startswith(STATEFUL)]
REFUSED = {
    **dict.fromkeys((*LINEAR, *STATES), "layers that carry a state from token to token"),
    **dict.fromkeys(INDEXED, "counts the tokens of a row, not of a document"),
    "minimax_m3_vl_text": "divides a row into blocks of keys, not a document",
    **dict.fromkeys(("bloom", "bloom-untied"), "bloom cannot be computed with the attention"),
    **dict.fromkeys(("cohere2", "cohere2-untied"), "cohere2 does something with its logits that is not known here"),
}
"""Name of a model: what is said where it cannot be trained. README.md of train has them too."""
README = Path(__file__).parents[2] / "train/README.md"


def documents():
    random = np.random.default_rng(5)
    return [(random.integers(0, 211, size), random.random(size) < 0.7) for size in (40, 2, 17, 5)]


def theirs(folder, backend):
    """Losses and gradients of transformers, a document at a time."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=backend, dtype=torch.float32)
    total = torch.zeros(())
    for tokens, mask in documents():
        labels = torch.from_numpy(np.where(mask, tokens, -100))[None]
        count = int(mask[1:].sum())
        if count:
            total = total + model(input_ids=torch.from_numpy(tokens)[None], labels=labels, use_cache=False).loss * count
    total.backward()
    return total.item(), {name: tensor.grad for name, tensor in model.named_parameters() if tensor.grad is not None}


def check(config):
    """What is looked at before a training; how far packed rows are from documents alone."""
    require_masks(config, 64)
    return self_check(config, CPU, resolve("auto", config, CPU, torch.float32), torch.float32)


@pytest.mark.parametrize("name", variants_slow(MODELS))
def test_it_is_trained_as_transformers_would(model, name):
    folder = model(name)
    config = open_config(folder)
    if name in REFUSED:
        with pytest.raises(VitruvianError, match=REFUSED[name]):
            check(config)
        return
    assert check(config) < 1e-5
    backend = resolve("auto", config, CPU, torch.float32)
    ours = make(config, backend).to_empty(device="cpu")
    ours.tie_weights()
    fill_buffers(ours, CPU)
    with torch.no_grad():
        fill(ours, folder)
    trainee = Trainee(ours, backend).eval()  # as `from_pretrained` gives a model: nothing drops out
    total = trainee(flat_of(documents()), CPU)
    total.backward()
    expected, gradients = theirs(folder, backend)
    assert total.item() == pytest.approx(expected, rel=2e-6)
    trained = {name: tensor.grad for name, tensor in ours.named_parameters() if tensor.grad is not None}
    assert gradients.keys() >= trained.keys()
    for key, gradient in trained.items():
        assert torch.allclose(gradient, gradients[key], atol=5e-5, rtol=2e-3), key


def test_the_readme_says_so():
    text = " ".join(README.read_text().split())
    stateful = "Qwen3-Next, Qwen3.5, Nemotron-H, Bamba, Granite 4, Falcon-H1, Mamba 2, LFM2, Kimi Linear"
    assert f"Every family of `convert formats` trains but those whose layers carry a state ({stateful}), BLOOM" in text


def test_alibi_is_refused():
    from transformers import AutoConfig

    from formats.errors import UsageError

    with pytest.raises(UsageError, match="falcon with alibi counts the tokens of a row"):
        require_masks(AutoConfig.for_model("falcon", alibi=True), 64)


def test_on_a_gpu_falcon_has_no_attention_of_the_interface(model):
    config = open_config(model("falcon"))
    assert resolve("auto", config, torch.device("cuda"), torch.bfloat16) == "sdpa"


@pytest.mark.parametrize("name", ["gemma3", "falcon", "llama4_text"])
def test_a_training_of_what_could_not_be_trained(run, settings, name):
    ran = run(settings(name, steps={"train_iters": 2}))
    assert ran.code == 0, ran.out
    assert len(ran.lines) == 2
