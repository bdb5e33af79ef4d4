"""Every argument of every Megatron version has a class, and none is dropped that changes a model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from formats.errors import UnsupportedError
from formats.megatron.args.args import from_megatron, to_megatron
from formats.megatron.args.fields import FIELDS, UNKNOWN, WORDS, off, require_understood
from formats.megatron.args.run_options import RUN
from formats.registry import open_checkpoint
from tests.megatron_runs import with_args

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests/golden/megatron_lm"
STOCK = os.environ.get("VITRUVIAN_STOCK", "")
STRANGE = {bool: True, int: 7, float: 0.37, str: "strange", list: [3], type(None): 0.37}
"""A value that no argument has, by the type of one that it has."""

LIST = """
import dataclasses, json, warnings
warnings.simplefilter("ignore")
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

def default_of(field):
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default

fields = {f.name: default_of(f) for c in (MLATransformerConfig, TransformerConfig) for f in dataclasses.fields(c)}

def plain(value):
    known = value is None or isinstance(value, (bool, int, float, str, list))
    return value if known else {"object": repr(value)}

options = {}
try:
    import argparse
    from megatron.training.arguments import add_megatron_arguments
    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    options = {a.dest: plain(a.default) for a in parser._actions if a.dest != "help"}
except ImportError:
    pass
print("LIST" + json.dumps({"fields": {name: plain(value) for name, value in fields.items()}, "options": options}))
"""


def listed(python: str) -> dict[str, dict[str, Any]]:
    """The config fields and the options of the Megatron that an interpreter has, with their defaults."""
    ran = subprocess.run([python, "-c", LIST], capture_output=True, text=True, timeout=280, check=True, cwd=ROOT)
    listing: dict[str, dict[str, Any]] = json.loads(ran.stdout.partition("LIST")[2])
    return listing


def require_classified(listing: dict[str, dict[str, Any]]) -> None:
    """Each name is in one table, and a default changes nothing that the tables assume."""
    names = {*listing["fields"], *listing["options"]}
    assert names <= {*FIELDS, *RUN}, f"unclassified: {sorted(names - {*FIELDS, *RUN})}"
    for kind, defaults in listing.items():
        for name in FIELDS.keys() & defaults.keys():
            default = defaults[name]
            if not isinstance(default, dict):  # a function, which no args hold
                assert FIELDS[name].allows(default, {"num_experts": 8}), f"{kind}: {name} is {default!r} by default"
    require_understood({**listing["options"], "num_experts": 8}, "the parser's defaults")


@pytest.mark.megatron
def test_every_field_of_the_installed_megatron_core_has_a_class():
    listing = listed(sys.executable)
    assert len(listing["fields"]) > 250
    require_classified(listing)


@pytest.mark.stock
def test_every_field_and_option_of_stock_megatron_has_a_class():
    assert STOCK, "VITRUVIAN_STOCK names no interpreter: make test-stock"
    listing = listed(STOCK)
    assert len(listing["fields"]) > 300
    assert len(listing["options"]) > 750
    require_classified(listing)


def test_the_tables_say_each_thing_once():
    assert not FIELDS.keys() & RUN
    assert {field.kind for field in FIELDS.values()} == {"layout", "compute"}
    for field in FIELDS.values():
        assert bool(field.rule) is not bool(field.values)
        if field.rule and field.rule not in WORDS:  # it acts only where that one is at a value that is refused
            assert FIELDS[field.rule].values or FIELDS[field.rule].rule == "read"


def test_every_value_that_is_not_known_is_refused_by_name():
    """Whatever the argument, and whatever the kind of model around it."""
    args = to_megatron(open_checkpoint(GOLDEN / "mcore/tp2pp2_bf16").spec)
    checked = 0
    for name, field in FIELDS.items():
        if field.rule:
            continue
        value = STRANGE[type(field.values[0])]
        with pytest.raises(UnsupportedError, match=f"{name} = ") as refused:
            require_understood({**args, "num_experts": 8, name: value}, "args")
        assert f"--accept {name}" in refused.value.hint
        accepted = require_understood({**args, "num_experts": 8, name: value}, "args", accept=[name])
        assert name in " ".join(accepted)
        for known in field.values:
            assert require_understood({**args, "num_experts": 8, name: known}, "args") == []
        checked += 1
    assert checked > 50


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("softmax_scale", 0.3), ("use_mup", True), ("moe_input_jitter_eps", 0.1), ("gated_linear_unit", True),
        ("tensor_parallel_num_weight_shards", 4), ("spec", ["my", "spec"]), ("test_mode", True),
    ],
)  # fmt: skip
def test_megatron2hf_drops_no_argument(model, convert, tmp_path, name, value):
    source = model("qwen3_moe" if name.startswith("moe") else "starcoder2" if name.startswith("gated") else "llama")
    assert convert("hf2megatron", source, tmp_path / "m", "--tp", 2).code == 0
    run = with_args(tmp_path / "m", tmp_path / "changed", **{name: value})
    ran = convert("megatron2hf", run, tmp_path / "hf")
    assert (ran.code, f"{name} = " in ran.err) == (4, True)
    assert not (tmp_path / "hf").exists()
    ran = convert("megatron2hf", run, tmp_path / "hf", "--accept", name)
    assert (ran.code, f"{name} = " in ran.err) == (0, True)
    assert convert("diff", tmp_path / "hf", source).code == 0
    assert convert("reshard", run, tmp_path / "again", "--accept", name).code == 0


def test_arguments_that_no_version_has(model, convert, tmp_path):
    """Off is off; else they are named, and accepted one by one or all at once."""
    convert("hf2megatron", model(), tmp_path / "m")
    run = with_args(tmp_path / "m", tmp_path / "off", my_fork=False, my_path=None, my_share=0.0, my_list=[])
    assert convert("megatron2hf", run, tmp_path / "one").code == 0
    own = {"rollout_batch": 8, "my_attention_scale": 0.5}
    run = with_args(tmp_path / "m", tmp_path / "own", **own)
    ran = convert("megatron2hf", run, tmp_path / "two")
    assert ran.code == 4
    assert "my_attention_scale = 0.5, rollout_batch = 8" in ran.err
    assert "--accept my_attention_scale --accept rollout_batch" in ran.err
    assert convert("megatron2hf", run, tmp_path / "two", "--accept", "rollout_batch").code == 4
    accepted = [word for name in own for word in ("--accept", name)]
    assert "my_attention_scale, rollout_batch" in convert("megatron2hf", run, tmp_path / "two", *accepted).err
    run = with_args(tmp_path / "m", tmp_path / "many", **{f"my_{number}": number for number in range(1, 30)})
    ran = convert("megatron2hf", run, tmp_path / "three")
    assert (ran.code, ran.err.count("my_"), "and 21 more" in ran.err) == (4, 8, True)
    assert f"--accept {UNKNOWN}" in ran.err
    assert convert("megatron2hf", run, tmp_path / "three", "--accept", UNKNOWN).code == 0


def test_off_means_that_an_option_was_not_used():
    assert all(map(off, (None, False, 0, 0.0, "", [], (), {})))
    assert not any(map(off, (True, 1, 0.1, "x", [0], object())))


def test_megatron_llm_drops_no_argument_either(convert, tmp_path):
    run = ROOT / "tests/golden/megatron_llm/llama2/raw"
    changed = with_args(run, tmp_path / "run", my_norm="other")
    ran = convert("megatron2hf", changed, tmp_path / "hf", "--vocab-size", 211)
    assert (ran.code, "my_norm = 'other'" in ran.err) == (4, True)


def test_weight_shards_are_those_of_the_tensor_ranks_or_refused():
    """Stock 0.19 writes the number that its ranks come to; more of them cut weights further."""
    args = to_megatron(open_checkpoint(GOLDEN / "mcore/tp2pp2_bf16").spec) | {"tensor_model_parallel_size": 2}
    from_megatron({**args, "tensor_parallel_num_weight_shards": 2}, {}, None, "args")
    with pytest.raises(UnsupportedError, match="tensor_parallel_num_weight_shards = 4"):
        from_megatron({**args, "tensor_parallel_num_weight_shards": 4}, {}, None, "args")
