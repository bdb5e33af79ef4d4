"""No line of a layout table without a witness from outside: the golden cases together use every one of them."""

from __future__ import annotations

import re

import pytest
from transformers import GPT2LMHeadModel

from converters.plan.request import Request
from converters.plan.targets import plan_megatron
from formats.checkpoint import Settings
from formats.families import FAMILIES, find_family
from formats.fsdp import native
from formats.layout.table import MTP
from formats.megatron import mtp, tables
from formats.megatron.args.options import Options
from formats.registry import open_checkpoint
from tests.faults.dcp_tools import save
from tests.golden.cases import TOPOLOGIES
from tests.golden.test_megatron_lm import FOLDERS
from tests.golden.test_olmo_core import CASES as OLMO_CORE
from tests.golden.test_torchtitan import CASES
from tests.golden.test_torchtitan import family as family_of
from tests.models import FEW, MODELS, settings_of


def lines(table) -> set[tuple[str, str]]:
    """Each spelling of each rule, with its pattern."""
    return {(spelling, rule.pattern.text) for rule in table for spelling in rule.spellings}


def used(folder, config=None) -> set[tuple[str, str]]:
    """The lines that a folder's tensors are read by."""
    pairs = set()
    for placed in open_checkpoint(folder, Settings(config=config)).fragments():
        spelling = placed.slot.rule.spellings[placed.slot.keys.index(placed.key)]
        pairs.add((spelling, placed.slot.rule.pattern.text))
    return pairs


def planned(source, topology) -> set[tuple[str, str]]:
    """The lines that a model's tensors are written by in a topology; nothing is written."""
    spread = {"ep": topology.ep, "etp": topology.etp or None, "version": topology.version or None}
    spread["experts"] = topology.experts or None
    options = Options(topology.tp, topology.pp, topology.vpp, topology.norm, **spread)
    plan = plan_megatron(open_checkpoint(source), Request(source), options, None)
    pairs = set()
    for placed in (placed for file in plan.target.files for placed in file.tensors):
        key = placed.key.rpartition(" ")[2]  # after the chunk that holds it
        pairs.add((placed.slot.rule.spellings[placed.slot.keys.index(key)], placed.slot.rule.pattern.text))
    return pairs


@pytest.mark.slow
def test_every_line_of_megatron_core_is_judged(model):
    """The folders are those that `test_megatron_core.py` has real megatron-core load."""
    seen, few = set(), set()
    for topology in TOPOLOGIES.values():
        for case in () if topology.uneven else topology.cases:
            pairs = planned(model(case.model, case.dtype), topology)
            seen |= pairs
            few |= pairs if case.model in FEW else set()
    assert few == seen, "FEW of tests/models.py lacks a model"
    table = [rule for rule in tables.MCORE if not {MTP, "predicting"} & rule.conditions]  # of which test_mtp.py has all
    grouped = {line for line in lines(table) if tables.GROUPED.fullmatch(line[0])}
    newer = {line for line in lines(table) if ".mixer.conv1d_" in line[0]}  # 0.19, where the older name has its shape
    newer |= {line for line in lines(table) if ".indexer." in line[0]}  # 0.19, whose stock judges them (test_stock.py)
    assert lines(table) - seen == grouped | newer, "of the first test_megatron_dist.py has real ones"


def test_a_layer_that_predicts_a_second_token_has_a_block_of_the_decoder():
    """Its lines are those of the decoder, which are judged; `test_mtp.py` judges all that are around it."""
    block = [rule for rule in tables.MCORE if MTP in rule.conditions and rule not in (*mtp.BEFORE, *mtp.BEHIND)]
    inner = {(spelling.split("layer.", 1)[1], rule.pattern.text) for rule in block for spelling in rule.spellings}
    decoder = {(key.removeprefix("decoder.layers.{layer}."), pattern) for key, pattern in lines(tables.DECODER)}
    assert inner <= decoder
    assert {rule.key for rule in (*mtp.BEFORE, *mtp.BEHIND)} <= {rule.key for rule in tables.MCORE}


def test_every_line_of_the_older_names_was_written_by_megatron_lm():
    seen = set().union(*(used(folder) for folder in FOLDERS["legacy"]))
    assert lines(tables.LEGACY) - seen == set()


STEPS = {
    "torchtitan": [case / "step-1" for case in CASES],
    "olmo-core": [case / "step3" for case in OLMO_CORE],
}


@pytest.mark.parametrize("trainer", native.TRAINERS)
def test_every_line_of_a_trainer_s_own_names_was_written_by_it(trainer):
    """Each spelling, tied and untied; families that share a table share its cases."""
    seen = {}
    for step in STEPS[trainer]:
        of = native.layouts(trainer)[family_of(step.parent)]
        seen.setdefault(of, set()).update(used(step, step.parent / "hf"))
    for table in native.layouts(trainer).values():
        assert lines(table) - seen[table] == set()


def test_every_key_that_torchtitan_drops_was_written_by_it():
    dropped = [key for case in CASES for key in open_checkpoint(case / "step-1", Settings(config=case / "hf")).dropped]
    for drop in native.DROPS:
        assert any(re.fullmatch(rf"(?:.*\.)?{drop}", key) for key in dropped), drop


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.slow
def test_every_line_of_a_family_was_written_by_transformers(model, tmp_path, family):
    """The tiny models are saved by transformers: megatron-core judges those that it can hold by their logits, real
    GPT-NeoX the other one that goes elsewhere (test_neox.py). Experts are fused in what transformers has in memory."""
    from transformers import AutoModelForCausalLM

    seen = set()
    for name in MODELS:
        if FAMILIES[family] is find_family(settings_of(name)):
            seen |= used(model(name))
    if family == "gpt2":  # its base model, which has no head
        GPT2LMHeadModel.from_pretrained(model("gpt2")).transformer.save_pretrained(tmp_path)
        seen |= used(tmp_path, model("gpt2"))
    if family == "kimi_linear":  # whose dense layers transformers saves under other names than the Hub's
        AutoModelForCausalLM.from_pretrained(model("kimi_linear")).save_pretrained(tmp_path / "saved")
        seen |= used(tmp_path / "saved")
    if any("fused" in rule.conditions for rule in FAMILIES[family].tensors):
        for name in (name for name in MODELS if FAMILIES[family] is find_family(settings_of(name))):
            state = AutoModelForCausalLM.from_pretrained(model(name)).state_dict()
            seen |= used(save(tmp_path / name, {"model": state}), model(name))
    explicit_tied_head = {(f"{head}.weight", "embedding: vocab hidden") for head in ("lm_head", "embed_out")}
    in_memory = {("lm_head.weight", "head: vocab hidden")} if family == "gpt_neox" else set()  # test_fsdp_other_models
    table = [rule for rule in FAMILIES[family].tensors if MTP not in rule.conditions]  # which test_mtp.py has it read
    if FAMILIES[family].in_memory:  # the Hub's names are only in the whole: test_only_text.py
        table = [rule for rule in table if "separate" not in rule.conditions]
    assert lines(table) - seen - explicit_tied_head - in_memory == set()
