"""Classes with the same layout in Megatron-Bridge 0.3.1 and later: tests/golden/bridge/*_0.6 are what 0.6.2 wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.golden.test_bridge_lora import contents
from tests.golden.test_bridge_vision import differences

REAL = Path(__file__).with_name("bridge")
ITERATION = "iter_0000005"
BRIDGE = ("--format", "torch_dist", "--for", "bridge")
KINDS = ("glm4v_moe", "qwen2_5_vl")


def real(kind: str) -> Path:
    """Bridge's run of a kind."""
    return REAL / f"{kind}_0.6"


def read(convert: Any, kind: str, folder: Path) -> Path:
    """The Hugging Face folder that is read of Bridge's run."""
    ran = convert("megatron2hf", real(kind), folder, "--config", real(kind))
    assert ran.code == 0, ran.err
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_its_logits(convert, tmp_path, kind):
    """What modules of 0.6.2 compute of an image and of text, transformers does of what is read; and settings show."""
    base = read(convert, kind, tmp_path / "base")
    assert max(differences(base, kind, golden=real(kind))) < 5e-6

    def another_tower(config: dict[str, Any]) -> None:
        config["vision_config"]["hidden_act"] = "relu"

    seen, text = differences(base, kind, another_tower, golden=real(kind))
    assert seen > 1e-3
    assert text < 5e-6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("topology", [(), ("--tp", 2, "--pp", 2)])
def test_what_it_loads(convert, tmp_path, kind, topology):
    """Every tensor that 0.6.2 saves, the norm behind the last layer too; and no release is named.

    Its modules loaded these files with strict="raise_all" (tests/golden/bridge/README.md).
    """
    base, run = read(convert, kind, tmp_path / "base"), tmp_path / "run"
    ran = convert("hf2megatron", base, run, *BRIDGE, *topology)
    assert ran.code == 0, ran.err
    assert "they are for its" not in ran.err
    ours, theirs = contents(run / "iter_0000000"), contents(real(kind) / ITERATION)
    weights = {key: tensor for key, tensor in theirs.items() if tensor is not None}
    assert "language_model.decoder.final_layernorm.weight" in {key.split("/")[0] for key in weights}
    stored = {key: tensor for key, tensor in weights.items() if not key.startswith("common_state")}
    assert all(np.array_equal(tensor, ours[key]) for key, tensor in stored.items())
    assert {key for key in ours if "_extra_state" not in key} <= stored.keys()
    digests = {convert("digest", folder).out.split()[0] for folder in (run, base)}
    assert len(digests) == 1
