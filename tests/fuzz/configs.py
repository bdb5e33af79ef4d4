"""Mutated configs: a conversion that succeeds gives the logits of transformers for the very config that it was given.

A tiny model of a random family, with a table or without, one to three keys of its config.json changed: other values,
other types, null, absent, the spelling of transformers 4. What transformers does not load is no case. A refusal is a
right answer; they are told apart by their reason, so that a person sees which of them are not.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.models import MODELS, settings_of

TOKENS = 48
"""Longer than the windows and the original lengths of the tiny models."""
CLOSE = 1e-4
"""Of the largest logit: another class of transformers computes in another order, a wrong setting is far beyond."""
WAYS: dict[str, tuple[tuple[str, ...], ...]] = {
    "hf2hf": (("hf2hf",),),
    "hf2fsdp": (("hf2fsdp",), ("fsdp2hf",)),
    "hf2megatron": (("hf2megatron",), ("megatron2hf",)),
    "hf2megatron, two ranks": (("hf2megatron", "--tp", "2", "--pp", "2"), ("megatron2hf",)),
    "hf2megatron, config lost": (("hf2megatron",), ("megatron2hf",)),
}
SCALINGS: tuple[dict[str, Any], ...] = (
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "linear", "factor": 2},
    {"type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    {"rope_type": "yarn", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 16, "truncate": False},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 16},
    {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 8192},
)  # fmt: skip
FIXED = {"model_type", "architectures", "transformers_version", "vocab_size", "quantization_config"}
"""What says which model it is. A vocabulary of another size is as good as this one."""


def attack(seed: int, folder: Path) -> str:
    """Make one case, convert it there and back, and compare logits. Returns a word for the outcome."""
    import torch

    dice = random.Random(seed)
    name = dice.choice(list(MODELS))
    way = dice.choice(list(WAYS))
    config, changes = _mutated(name, dice)
    case = f"seed {seed}: {name}, {changes}, {way}"
    source = folder / "source"
    with _quiet(), torch.no_grad():
        try:
            _save(source, config)
            expected = _logits(source)
        except Exception:  # noqa: BLE001  # whatever transformers raises for a config, it is none
            return "no model of transformers"
        out = source
        for number, argv in enumerate(WAYS[way]):
            given, out = out, folder / f"out{number}"
            if number and way.endswith("config lost"):
                shutil.rmtree(given / "huggingface")
            code, output = _convert(argv[0], str(given), str(out), *argv[1:])
            assert code != 1, f"{case}: a bug: {output}"
            assert "memory is short" not in output, f"{case}: {output}"
            assert "Traceback" not in output, f"{case}: {output}"
            if code:
                return f"refused: {argv[0]}: {_reason(output, folder)}"
        try:
            computed = _logits(out)
        except Exception as error:
            raise AssertionError(f"{case}: transformers does not load what was written: {error}") from error
    scale = float(expected.abs().nan_to_num().max())
    same = torch.allclose(computed, expected, rtol=0, atol=CLOSE * max(scale, 1e-3), equal_nan=True)
    worst = float((computed - expected).abs().nan_to_num(nan=float("inf")).max())
    assert same, f"{case}: exit code 0, and logits differ by {worst:.3g} of {scale:.3g}\n{json.dumps(config)}"
    return f"right: {way}"


def _mutated(name: str, dice: random.Random) -> tuple[dict[str, Any], str]:
    """A config.json with some keys changed, and what was changed."""
    from transformers import AutoConfig

    settings = settings_of(name)
    config = json.loads(AutoConfig.for_model(settings.pop("model_type"), **settings).to_json_string(use_diff=False))
    config = {key: value for key, value in config.items() if not (key in FALSE and value in FALSE[key])}
    changes = []
    for _ in range(dice.randint(1, 3)):
        change = dice.choice((_value, _value, _value, _absent, _rotary, _spelling, _types))
        changes.append(change(config, dice))
    return config, "; ".join(changes)


FALSE: dict[str, tuple[Any, ...]] = {"quantization_config": (None, {}), "architectures": (None,)}


def _keys(config: dict[str, Any]) -> list[str]:
    return sorted(set(config) - FIXED)


def _value(config: dict[str, Any], dice: random.Random) -> str:
    """Another value of a key, of the same type or not."""
    from transformers.activations import ACT2CLS

    key = dice.choice(_keys(config))
    old = config[key]
    others: list[Any] = [None]
    if isinstance(old, bool):
        others += [not old] * 6 + [int(old)]
    elif isinstance(old, int):
        others += [old + 1, old * 2, old // 2, max(old - 1, 0), 0, 1, 2, float(old), -1]
    elif isinstance(old, float):
        others += [old * 2, old / 2, 0.0, 1.0, int(old) + 1, 1e-6]
    elif key.endswith(("_act", "_activation", "_function")):
        others += sorted(ACT2CLS)
    elif isinstance(old, list) and old:
        others += [old[::-1], old[:1] * len(old), [*old[1:], old[0]], []]
    elif old is None:
        others += [0, 1, 8, True, 1.0]
    config[key] = dice.choice(others)
    return f"{key}: {old} -> {config[key]}"


def _absent(config: dict[str, Any], dice: random.Random) -> str:
    key = dice.choice(_keys(config))
    return f"{key} = {config.pop(key)} is gone"


def _rotary(config: dict[str, Any], dice: random.Random) -> str:
    """Another scaling of the rotary embedding, in the spelling of either version of transformers."""
    scaling = dict(dice.choice(SCALINGS))
    if dice.random() < 0.5:
        rotary = config.get("rope_parameters")
        theta = rotary.get("rope_theta") if isinstance(rotary, dict) else None
        config["rope_parameters"] = {"rope_theta": theta or 10000.0, **scaling}
    else:
        config.pop("rope_parameters", None)
        config |= {"rope_theta": dice.choice((10000.0, 500000, 1e6)), "rope_scaling": scaling}
    return f"rope {scaling}"


def _spelling(config: dict[str, Any], dice: random.Random) -> str:
    """The rotary settings as transformers 4 spells them, or beside those of 5."""
    rotary = config.get("rope_parameters")
    if not isinstance(rotary, dict) or any(isinstance(value, dict) for value in rotary.values()):
        return "no rotary settings to spell"
    scaling = {key: value for key, value in rotary.items() if key not in ("rope_theta", "partial_rotary_factor")}
    plain = scaling.get("rope_type", "default") == "default"
    config |= {key: rotary[key] for key in ("rope_theta", "partial_rotary_factor") if key in rotary}
    config["rope_scaling"] = None if plain else scaling
    beside = dice.random() < 0.3
    if not beside:
        del config["rope_parameters"]
    return f"the spelling of transformers 4{' beside that of 5' if beside else ''}"


def _types(config: dict[str, Any], dice: random.Random) -> str:
    """Element types that are stale, or of another version."""
    types = {key: dice.choice(("float32", "bfloat16", "float16")) for key in ("dtype", "torch_dtype")}
    keep = dice.choice((("dtype",), ("torch_dtype",), ("dtype", "torch_dtype")))
    for key in types:
        config.pop(key, None)
    config |= {key: types[key] for key in keep}
    return f"{ {key: types[key] for key in keep} }"


def _save(folder: Path, config: dict[str, Any]) -> None:
    """Real weights of transformers for a config, which stays as it is."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    folder.mkdir()
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    built: Callable[..., Any] = AutoModelForCausalLM.from_config
    model = built(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
        if "norm" in name or ".ln_" in name:
            parameter.uniform_(0.5, 1.5, generator=generator)
        elif "inv_freq" not in name and parameter.is_floating_point() and "embed_scale" not in name:
            parameter.normal_(0, 0.08, generator=generator)
    model.save_pretrained(folder)
    config.setdefault("architectures", [type(model).__name__])
    path.write_text(json.dumps(config))
    assert save_file  # what save_pretrained writes with


def _logits(folder: Path) -> Any:
    """What transformers computes with a folder."""
    import torch
    from transformers import AutoModelForCausalLM

    load: Callable[..., Any] = AutoModelForCausalLM.from_pretrained
    model, about = load(folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    lost = {key for key in about["missing_keys"] if key != "lm_head.weight"}
    if lost or about["mismatched_keys"]:
        raise ValueError(f"it makes up {sorted(lost)[:3]} {about['mismatched_keys']}")
    tokens = torch.arange(3, 3 + TOKENS)[None] % 200
    return model.eval()(tokens, use_cache=False).logits


def _convert(*arguments: str) -> tuple[int, str]:
    """Run the command line in this process: exit code, and what it said on stderr."""
    from converters.cli import main

    output, argv, code = io.StringIO(), sys.argv, 0
    sys.argv = ["convert", *arguments]
    try:
        with contextlib.redirect_stderr(output), contextlib.redirect_stdout(io.StringIO()):
            main()
    except SystemExit as done:
        code = int(done.code or 0)
    finally:
        sys.argv = argv
    return code, output.getvalue()


@contextlib.contextmanager
def _quiet() -> Any:
    """No warnings and progress of transformers."""
    from transformers.utils import logging

    logging.set_verbosity(50)
    logging.disable_progress_bar()
    with contextlib.redirect_stderr(io.StringIO()):
        yield


def _reason(output: str, folder: Path) -> str:
    """An error without the places and numbers of this case."""
    line = next((line for line in output.splitlines() if line.startswith("error: ")), output)
    return re.sub(r"[-+]?\d[\d.e+-]*", "N", line.removeprefix("error: ").replace(f"{folder}/", ""))[:160]
