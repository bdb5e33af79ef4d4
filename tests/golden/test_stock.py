"""Stock Megatron-LM of the newest release computes what transformers computes, given our folder and our flags alone.

It runs in an environment of its own (`make test-stock`), without transformers: `stock_judge.py`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from formats.megatron.args.versions import ALWAYS, IGNORED, OPTIONS, VERSIONS, is_between
from tests.golden.test_mtp import with_second
from tests.models import EXPERTS, IN_MEGATRON, INDEXED, LINEAR, LLAMA3, PLAIN_YARN, YARN, build

pytestmark = pytest.mark.stock
HERE = Path(__file__).parent
PYTHON = os.environ.get("VITRUVIAN_STOCK", "")
TOLERANCE = 2e-5
"""Of the largest logit: both compute in float32, in another order."""
LENGTH = 64
LOCAL = ("--norm", "local")
TE_NAMES = ("--transformer-impl", "local", "--no-persist-layer-norm", "--no-rope-fusion")
"""Names of Transformer Engine in torch_dist, which the local layers load too: a CPU has no others. The flags are for
Transformer Engine's layers, so that what local layers need beside them stands here."""


class Case(NamedTuple):
    """A model, and how it is written."""

    model: str
    words: tuple[str, ...] = LOCAL
    ranks: int = 1
    changes: tuple[tuple[str, Any], ...] = ()
    more: tuple[str, ...] = ()

    def __str__(self) -> str:
        changes = "".join(f" {name}={json.dumps(value)}" for name, value in self.changes)
        return f"{self.model} {' '.join(self.words)}{changes}"


def rope(model: str, accepted: str = "", **parameters: Any) -> Case:
    """A model with another rope scaling, and what has to be accepted for it."""
    options = (*LOCAL, *(("--accept", accepted) if accepted else ()))
    return Case(model, options, changes=(("rope_parameters", parameters),))


THETA = {"rope_theta": 1e4}
TORCH = ("--deterministic-mode", "--no-rope-fusion")
"""Linear attention by megatron-core's own code in torch, no rotation by Transformer Engine: a CPU has no kernels."""
ENDS = ("deepseek_v2", "deepseek_v3-tied", "glm4_moe_lite-tied", "youtu-tied")
"""Latents whose queries have none, which the newest local layers refuse."""
APART = ("gpt_oss", *ENDS, *LINEAR, *INDEXED)
SCALED = (
    rope("llama", rope_type="linear", factor=4.0, **THETA),
    rope("qwen2", rope_type="linear", factor=2.0, original_max_position_embeddings=64, **THETA),
    rope("llama", **{**LLAMA3, "rope_theta": 1e4}),
    rope("llama", "rope_scaling_factor", **{**LLAMA3, "factor": 32.0}),
    rope("llama", **LLAMA3 | {"low_freq_factor": 4, "high_freq_factor": 16, "original_max_position_embeddings": 32768}),
    rope("llama", **PLAIN_YARN),
    rope("llama", **YARN),
    rope("qwen3", **{**PLAIN_YARN, "truncate": False}),
    rope("qwen3", **{name: value for name, value in PLAIN_YARN.items() if name != "original_max_position_embeddings"}),
    rope("qwen3_moe", **{**PLAIN_YARN, "factor": 8.0, "original_max_position_embeddings": 16384}),
    rope("deepseek_v3", "latent_yarn", **YARN),
    rope("deepseek_v3", "latent_yarn", **{**YARN, "original_max_position_embeddings": 4096, "beta_fast": 16.0}),
)  # fmt: skip
CUT = tuple(
    Case(name, (*LOCAL, *options), ranks)
    for options, ranks, names in (
        (("--tp", "2"), 2, ("llama", "qwen2-tied", "mistral", "gpt2", "nemotron", "gpt_oss", "phi3", "mixtral")),
        (("--pp", "2"), 2, ("llama-tied", "qwen3-tied", "smollm3", "starcoder2", "glm4_moe", "deepseek_v3")),
        (("--pp", "2", "--first-stage-layers", "1"), 2, ("llama",)),
        (("--pp", "2", "--pp-layout", "Et|tttL"), 2, ("qwen2",)),
        (("--ep", "2"), 2, tuple(name for name in EXPERTS if "-" not in name and name not in APART)),
        (("--tp", "2", "--ep", "2", "--etp", "1"), 2, ("gpt_oss", "dots1-tied", "hy_v3")),
    )
    for name in names
    if not (name.startswith("gpt_oss") and options == ("--tp", "2"))
)
DIST = tuple(
    Case(name, (*norm, "--format", "torch_dist", *options), ranks, more=() if norm else TE_NAMES)
    for norm, options, ranks, names in (
        (LOCAL, (), 1, ("llama", "qwen3-tied", "mixtral", "gpt2", "deepseek_v3", "gpt_oss")),
        (LOCAL, ("--tp", "2"), 2, ("llama-tied", "qwen2_moe", "starcoder2")),
        (LOCAL, ("--pp", "2"), 2, ("qwen2", "dots1")),
        ((), (), 1, ("llama", "qwen2-tied", "qwen3")),
    )
    for name in names
)
HYBRID = [name for name in LINEAR if name.startswith("nemotron_h")]
"""Those of Megatron's hybrid stack: its builder is a script beside the package, which the wheel lacks. They are judged
by megatron-core's modules alone (`test_megatron_core.py`, `test_megatron_dist.py`)."""
GATED = [name for name in LINEAR if name not in HYBRID]
OF_LINEAR = tuple(
    Case(name, options, ranks, more=TORCH)
    for options, ranks, names in (
        (("--experts", "local"), 1, GATED),
        (("--experts", "local", "--tp", "2"), 2, ("qwen3_next", "qwen3_5_text-tied")),
        (("--experts", "local", "--pp", "2"), 2, ("qwen3_next-tied", "qwen3_5_text")),
        (("--experts", "local", "--ep", "2"), 2, ("qwen3_5_moe_text",)),
        (("--format", "torch_dist"), 1, ("qwen3_next", "qwen3_5_text-tied")),
        (("--format", "torch_dist", "--tp", "2"), 2, ("qwen3_5_text",)),
    )
    for name in names
)
OF_INDEXED = (
    Case("deepseek_v32", ("--experts", "local", "--tp", "2"), 2),
    Case("deepseek_v32-tied", ("--experts", "local")),
    Case("glm_moe_dsa", ("--experts", "local", "--pp", "2"), 2),
    Case("glm_moe_dsa", ("--format", "torch_dist", "--ep", "2"), 2),
    Case("glm_moe_dsa-tied", ("--experts", "local", "--ep", "2"), 2),
)
CASES = (
    *(Case(name) for name in IN_MEGATRON if name not in (*ENDS, *LINEAR, *INDEXED)),
    *SCALED,
    *CUT,
    *DIST,
    *OF_LINEAR,
    *OF_INDEXED,
)


def stock(jobs: list[dict[str, Any]], folder: Path) -> list[str | None]:
    """What the judge answers to each job."""
    (folder / "jobs.json").write_text(json.dumps(jobs))
    command = [PYTHON, str(HERE / "stock_judge.py"), str(folder / "jobs.json")]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def logits_of(source: Path) -> tuple[list[list[int]], np.ndarray]:
    """Random ids, and what transformers computes of them."""
    import torch
    from transformers import AutoModelForCausalLM

    ids = torch.randint(0, 211, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        return ids.tolist(), model(ids).logits.numpy()


def job_of(case: Case, convert: Any, folder: Path, built: dict[str, Any]) -> tuple[dict[str, Any], np.ndarray]:
    """What the judge is asked, and what transformers says."""
    key = f"{case.model} {case.changes}"
    if key not in built:
        place = folder / f"hf{len(built)}"
        built[key] = (build(place, case.model, **dict(case.changes)), *logits_of(place))
    source, ids, logits = built[key]
    run = folder / f"run{len(list(folder.glob('run*')))}"
    ran = convert("hf2megatron", source, run, *case.words)
    assert ran.code == 0, f"{case}: {ran.err}"
    job = {"run": str(run), "ids": ids, "out": f"{run}/logits.npy", "ranks": case.ranks, "more": case.more}
    return job, logits


def difference(job: dict[str, Any], logits: np.ndarray) -> float:
    """How far the judge's logits are from those of transformers, relative to the largest."""
    computed = np.load(job["out"])[..., : logits.shape[-1]]
    return float(abs(computed - logits).max() / abs(logits).max())


@pytest.fixture(scope="session", autouse=True)
def _environment():
    if not PYTHON:
        pytest.skip("VITRUVIAN_STOCK names no Python with stock Megatron-LM: make test-stock")


PARTS = 4
SIZES = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size",
    "num_layers_per_virtual_pipeline_stage", "expert_model_parallel_size", "apply_layernorm_1p",
)  # fmt: skip
"""What is taken only with --use-mp-args-from-checkpoint-args, and the last, which nothing reads since 0.16."""


@pytest.mark.parametrize("part", range(PARTS))
def test_stock_megatron_computes_what_transformers_computes(convert, tmp_path, part, record_property):
    start, stop = (len(CASES) * number // PARTS for number in (part, part + 1))
    cases, built = sorted(CASES, key=str)[start:stop], dict[str, Any]()  # each model is built in one part
    jobs = [job_of(case, convert, tmp_path, built) for case in cases]
    failed, worst = [], ("", 0.0)
    for case, (job, logits), answer in zip(cases, jobs, stock([job for job, _ in jobs], tmp_path), strict=True):
        if answer is not None:
            failed.append(f"{case}: {answer[-700:]}")
            continue
        deviation = difference(job, logits)
        worst = max(worst, (str(case), deviation), key=lambda pair: pair[1])
        if not deviation < TOLERANCE:
            failed.append(f"{case}: {deviation:.3g} of the largest logit")
    record_property("worst", worst)
    print(f"{len(cases)} combinations, worst logit difference {worst[1]:.3g} of the largest: {worst[0]}")
    assert not failed, "\n".join(failed)


def test_the_judge_sees_what_is_ignored(convert, tmp_path):
    """Without its option, or without the change that the flags name, the model is another one."""
    cases = [
        (SCALED[0], r"--rotary-seq-len-interpolation-factor \S+\n"),
        (SCALED[3], r"# it computes.*\n"),
        (SCALED[10], r"# it computes.*\n"),
        (SCALED[5], r"--rotary-scaling-factor \S+\n"),
        (Case("deepseek_v3"), r"--mscale-all-dim \S+\n"),
        (Case("mistral"), r"--window-size \S+\n"),
        (Case("smollm3"), r"--no-rope-freq \S+\n"),
        (Case("gpt_oss-tied"), r"--no-bias-gelu-fusion\n"),
        (Case("gpt2-untied"), r"--no-bias-gelu-fusion\n"),
        (Case("nemotron"), r"--apply-layernorm-1p\n"),
        (Case("dots1-tied"), r"--moe-router-num-groups.*\n--moe-router-group-topk.*\n"),
    ]
    built: dict[str, Any] = {}
    jobs = [job_of(case, convert, tmp_path, built) for case, _ in cases]
    for (case, line), (job, _) in zip(cases, jobs, strict=True):
        path = Path(job["run"]) / "megatron_flags.txt"
        text, count = re.subn(line, "", path.read_text())
        assert count == 1, f"{case} has no {line}"
        path.write_text(text)
    answers = stock([job for job, _ in jobs], tmp_path)
    for (case, _), (job, logits), answer in zip(cases, jobs, answers, strict=True):
        assert answer is None, f"{case}: {answer}"
        assert difference(job, logits) > TOLERANCE, case


def test_what_the_newest_local_layers_refuse_is_written_for_an_older_release(convert, tmp_path):
    """The flags say so, and the newest does end."""
    jobs = [job_of(Case(name), convert, tmp_path, {})[0] for name in ENDS[:1]]
    for job, answer in zip(jobs, stock(jobs, tmp_path), strict=True):
        assert (Path(job["run"]) / "megatron_flags.txt").read_text().startswith("# flags for Megatron-LM 0.18\n")
        assert "q_lora_rank is None" in answer


def test_a_layer_that_predicts_a_second_token(convert, tmp_path):
    """It is loaded strictly, under the name of its block since 0.17; beside linear attention the newest builds none."""
    cases = [
        Case("glm4_moe"),
        Case("deepseek_v3", (*LOCAL, "--pp", "2"), 2),
        Case(
            "glm4_moe_air",
            (*LOCAL, "--format", "torch_dist", "--tp", "2"),
            2,
            more=("--dist-ckpt-strictness", "raise_all"),
        ),
        Case("qwen3_5_text", (), 1, more=TORCH),
    ]
    jobs, expected = [], []
    for number, case in enumerate(cases):
        source = build(tmp_path / f"hf{number}", case.model)
        ids, logits = logits_of(source)
        run = tmp_path / f"run{number}"
        ran = convert("hf2megatron", with_second(source, tmp_path / f"mtp{number}"), run, *case.words)
        assert ran.code == 0, ran.err
        jobs.append({"run": str(run), "ids": ids, "out": f"{run}/logits.npy", "ranks": case.ranks, "more": case.more})
        expected.append(logits)
    *answers, refused = stock(jobs, tmp_path)
    for job, logits, answer in zip(jobs, expected, answers, strict=False):
        assert answer is None, answer
        assert difference(job, logits) < TOLERANCE
    assert (tmp_path / "run3/megatron_flags.txt").read_text().startswith("# flags for Megatron-LM 0.18\n")
    assert "Experimental attention variant is not supported" in (refused or "")


def test_the_table_agrees_with_the_parser(tmp_path):
    """Every option of the table is one of the parser, with its default, and is taken from a checkpoint as it says."""
    script = """
import inspect, json, sys
sys.argv = ["pretrain_gpt.py"]
from megatron.training import checkpointing
from megatron.training.arguments import add_megatron_arguments
import argparse
parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
options = {word: (one.dest, one.default) for one in parser._actions for word in one.option_strings}
json.dump([options, inspect.getsource(checkpointing.load_args_from_checkpoint)], sys.stdout, default=str)
"""
    done = subprocess.run([PYTHON, "-c", script], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    options, source = json.loads(done.stdout[done.stdout.index("[{") :])
    newest = VERSIONS[-1]
    for option in OPTIONS:
        if not is_between(newest, option.known):
            continue
        names = [option.name, f"--no-{option.name[2:]}"] if option.form == "switch" else [option.name]
        for name in names:
            assert name in options, name
        if option.form != "true" and option.default is not ALWAYS and option.dest != "ckpt_format":
            assert options[names[0]][1] == option.default, option
        forced = f"_set_arg('{option.dest}', force=True)" in source and option.dest not in SIZES
        assert is_between(newest, option.loaded) is forced, option
    without = {row.dest for row in IGNORED if row.patch and row.patch.name == "latent_yarn"}
    assert not {f"--{name.replace('_', '-')}" for name in without} & options.keys()
