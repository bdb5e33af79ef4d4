"""Real megatron-core (0.16.1, CPU, gloo) loads our torch_dist folders on any number of ranks, and we read its own."""

from __future__ import annotations

import json
import re
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from formats.layout.table import MTP
from formats.megatron import tables, torch_dist
from formats.megatron.args import mla
from formats.registry import open_checkpoint
from tests.golden.test_coverage import lines, used
from tests.models import EXPERTS, files

pytestmark = pytest.mark.megatron
JUDGE = Path(__file__).with_name("megatron_dist_judge.py")


class Case(NamedTuple):
    """One model: how we write it, and how megatron-core writes it back."""

    model: str
    tp: int
    pp: int
    layers: str
    dtype: str = "float32"
    optimizer: str = ""
    norm: str = "local"
    experts: tuple[Any, ...] | None = None
    archive: bool = False


CASES = (
    Case("llama", 1, 1, "stacked", "bfloat16"),
    Case("llama-tied", 2, 2, "stacked", optimizer="dp_reshardable", archive=True),
    Case("llama-mqa", 2, 1, "numbered", optimizer="fully_reshardable"),
    Case("llama3", 4, 1, "split"),
    Case("mistral", 1, 2, "stacked", optimizer="fully_reshardable"),
    Case("qwen2", 4, 2, "numbered", "bfloat16"),
    Case("qwen2-tied", 1, 4, "split", optimizer="dp_reshardable", norm="te"),
    Case("llama-biased", 2, 1, "stacked"),
    Case("llama-biased", 1, 2, "split", "bfloat16"),
    Case("starcoder2", 2, 2, "stacked"),
    Case("gpt2", 2, 2, "stacked", norm="te"),
    Case("gpt2-untied", 1, 2, "numbered"),
    Case("phi3", 2, 1, "split", "bfloat16"),
    Case("smollm3", 1, 2, "stacked"),
    Case("cwm", 2, 1, "numbered"),
    Case("ernie4_5-tied", 2, 1, "split"),
    Case("nemotron", 2, 2, "stacked", "bfloat16", norm="te"),
    Case("arcee", 1, 2, "numbered", optimizer="dp_reshardable"),
    Case("qwen3", 2, 2, "numbered", norm="te"),
    Case("mixtral", 2, 1, "stacked", norm="te", experts=("--ep", 2)),
    Case("qwen2_moe", 1, 2, "stacked", "bfloat16", experts=("--ep", 2, "--etp", 2), archive=True),
    Case("qwen3_moe-tied", 1, 1, "numbered", norm="te", experts=("--ep", 4)),
    Case("dots1", 2, 2, "split", experts=("--ep", 2, "--etp", 1)),
    Case("deepseek_v3", 2, 2, "numbered", norm="te", experts=("--ep", 2)),
    Case("deepseek_v2-tied", 1, 2, "stacked", "bfloat16", experts=("--ep", 2)),
    Case("deepseek_v2", 2, 1, "split"),
    Case("qwen3_next", 2, 1, "numbered", norm="te", experts=("--ep", 2)),
    Case("qwen3_5_text", 4, 1, "numbered", optimizer="fully_reshardable", norm="te"),
    Case("qwen3_5_text-tied", 1, 2, "split", "bfloat16", norm="te"),
    Case("nemotron_h", 2, 2, "numbered", norm="te", experts=("--ep", 2)),
    Case("nemotron_h-latent", 1, 1, "stacked", norm="te"),
    Case("gpt_oss", 2, 1, "stacked", norm="te", experts=("--etp", 1)),
    Case("gpt_oss-tied", 1, 2, "split", "bfloat16", experts=("--ep", 4, "--etp", 1)),
)
"""The folders are cut for --tp and --pp, and loaded at TP2 x PP2, and at one of TP1, TP2 and PP2 in turn."""
SPREAD = {(2, 2): {"ep": 2, "etp": 1}, (2, 1): {"ep": 2, "etp": 2}, (1, 2): {"ep": 1, "etp": 2}, (1, 1): {"ep": 4}}
"""How experts are spread then, over all four ranks."""
GROUPED = ("mixtral", "dots1")


def write(convert, source: Path, out: Path, case: Case) -> None:
    """The folder of a case. The vocabulary is padded to 224 rows at TP1, to 256 at TP2."""
    options = ["--tp", case.tp, "--pp", case.pp, "--norm", case.norm, "--make-vocab-size-divisible-by", 32]
    options += [*(case.experts or ()), *(["--archive"] if case.archive else [])]
    ran = convert("hf2megatron", source, out, "--format", "torch_dist", *options)
    assert ran.code == 0, ran.err


def damaged(folder: Path, what: str) -> None:
    """Swap what is of equal size: coverage and digests are blind to it, the judge must not be."""
    stored = {placed.key: placed.fragment for placed in open_checkpoint(folder).fragments()}
    fragment, other = (stored[f"decoder.layers.{layer}.mlp.linear_fc1.weight"] for layer in (1, 2))
    half = fragment.nbytes // 2
    starts, length = (
        ((fragment.offset, fragment.offset + half), half)
        if what == "gate"
        else ((fragment.offset, other.offset), 2 * half)
    )
    content = fragment.path.read_bytes()
    first, second = (content[start : start + length] for start in starts)
    changed = bytearray(content)
    for start, part in zip(starts, (second, first), strict=True):
        changed[start : start + length] = part
    fragment.path.write_bytes(changed)


def test_megatron_core_loads_and_we_read_what_it_saves(model, convert, megatron_core, tmp_path):
    sources = [model(case.model, case.dtype) for case in CASES]
    for number, (case, source) in enumerate(zip(CASES, sources, strict=True)):
        write(convert, source, tmp_path / f"m{number}", case)
    jobs: list[dict[str, Any]] = []
    for (turn, (tp, pp)), (number, case) in product(enumerate(SPREAD), enumerate(CASES)):
        if turn not in (0, 1 + number % 3):
            continue
        job = {"dist": str(tmp_path / f"m{number}"), "hf": str(sources[number]), "te": case.norm == "te"}
        job |= SPREAD[tp, pp] if case.model in EXPERTS else {}
        job |= {"etp": 1} if case.model.startswith("gpt_oss") else {}  # megatron-core cuts no experts with biases
        save = {"save": str(tmp_path / f"s{number}"), "layers": case.layers, "optimizer": case.optimizer}
        jobs.append({"tp": tp, "pp": pp, **job, **(save if tp * pp == 4 else {})})
    for what in ("gate", "layer"):
        write(convert, sources[0], tmp_path / what, CASES[0])
        damaged(tmp_path / what, what)
        jobs.append({"dist": str(tmp_path / what), "hf": str(sources[0]), "tp": 1, "pp": 1, "damaged": True})
    grouped = [number for number, case in enumerate(CASES) if case.model in GROUPED]
    for number in grouped:
        job = {"dist": str(tmp_path / f"m{number}"), "hf": str(sources[number]), "te": CASES[number].norm == "te"}
        jobs.append({**job, "tp": 2, "pp": 2, "ep": 2, "etp": 1, "grouped": str(tmp_path / f"g{number}")})
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    code, out = megatron_core([str(tmp_path / "jobs.json")], 1, JUDGE)
    assert code == 0, out
    assert out.count("max abs logit difference") == len(jobs) - len(grouped)
    for number in grouped:
        back = tmp_path / f"grouped{number}"
        assert any(tables.GROUPED.fullmatch(key) for key, _ in used(tmp_path / f"g{number}"))
        assert convert("megatron2hf", tmp_path / f"g{number}", back, "--config", sources[number]).code == 0
        assert files(back) == files(sources[number])
    seen = set()
    for number, (case, source) in enumerate(zip(CASES, sources, strict=True)):
        saved, back = tmp_path / f"s{number}", tmp_path / f"back{number}"
        checkpoint = open_checkpoint(saved)
        state = ("optimizer", "rng_state") if case.optimizer else ("rng_state",)
        assert (checkpoint.format, checkpoint.state) == (torch_dist.NAME, state)
        seen |= used(saved)
        assert convert("verify", saved).code == 0, "its own checksums"
        assert convert("megatron2hf", saved, back, "--config", source).code == 0
        assert files(back) == files(source), f"what megatron-core wrote of {case} came back changed"
    table = [rule for rule in (*torch_dist.TABLE, *torch_dist.SPLIT) if MTP not in rule.conditions]  # test_mtp.py
    table = [rule for rule in table if ".indexer." not in rule.key]  # test_stock.py
    table = [rule for rule in table if rule not in tables.BRIDGE]  # test_bridge_gemma3.py
    copies = lines(rule for rule in table if "copy" in rule.conditions)
    norms = {line for line in lines(tables.MCORE) if re.search(r"\.(input|pre_mlp)_layernorm\.", line[0])}
    local = norms - lines(torch_dist.STACKED) - lines(mla.RULES)
    assert seen == lines(table) - copies - local
