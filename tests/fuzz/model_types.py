"""Weights of one class with the model type of another whose tensors have the same names: refused, or equal logits.

AutoModelForCausalLM goes by the model type, whatever class `architectures` names and the tensors are of.
"""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from tests.fuzz.architectures import as_dcp, build, quiet, run

ALIKE = (
    "arcee", "cohere", "gemma", "glm", "granite", "helium", "llama", "mistral", "olmo", "persimmon", "phi", "qwen2",
    "qwen3", "seed_oss", "smollm3", "stablelm", "starcoder2",
)  # fmt: skip
"""Types whose models differ in what they compute more than in the names of their tensors, with and without a table."""


def attack(seed: int, folder: Path) -> str:
    """One model whose config names another type, another class, or both.

    Returns:
        `refused`, or `right`: what AutoModelForCausalLM makes of the output has the logits of the model.

    Raises:
        AssertionError: it has others, or cannot be loaded; or a bug.
    """
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    draw = random.Random(seed)
    kind, other = draw.sample(ALIKE, 2)
    place, logits = _saved(kind)
    own, theirs = (json.loads((_saved(name)[0] / "config.json").read_text()) for name in (kind, other))
    changes = {"model_type": other} if draw.random() < 0.6 else {"architectures": theirs["architectures"]}
    config = {**(own if draw.random() < 0.7 else {**theirs, **own, "model_type": kind}), **changes}
    source, out, tensors = folder / "source", folder / "out", load_file(place / "model.safetensors")
    if command := ["fsdp2hf"] if draw.random() < 0.5 else []:
        with quiet():
            as_dcp(source, tensors, draw)
    else:
        source.mkdir()
        save_file(tensors, source / "model.safetensors", {"format": "pt"})
    (source / "config.json").write_text(json.dumps(config))
    code, output = run(*(command or ["hf2hf"]), source, out, "-q")
    if code:
        return "refused"
    case = f"seed {seed}: a {kind} that its config calls {changes}: exit 0\n{output}"
    try:
        with quiet(), torch.no_grad():
            model, about = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
            computed = model.eval()(input_ids=torch.arange(3, 19)[None]).logits
    except Exception as error:
        raise AssertionError(f"{case}transformers computes nothing with it: {error}") from error
    wrong = [*about["missing_keys"], *about["unexpected_keys"]]
    assert not wrong, f"{case}{wrong}"
    assert torch.allclose(computed, logits, atol=1e-4), case
    return "right"


@cache
def _saved(kind: str) -> tuple[Path, Any]:
    """A model of a type, in one file, and its logits."""
    import torch

    folder = Path(mkdtemp(prefix=f"model-type-{kind}-"))
    with quiet(), torch.no_grad():
        model = build(kind, 1)
        assert model is not None, kind
        model = model.float()
        model.save_pretrained(folder)
        return folder, model.eval()(input_ids=torch.arange(3, 19)[None]).logits
