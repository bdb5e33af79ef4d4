"""Universal checkpoints of Megatron-DeepSpeed without layer files, as DeepSpeed's own ds_to_universal makes them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.dcp_tools import refused
from tests.golden.test_mds import CASES, HERE, enums, logits
from tests.golden.test_mds_optim import APEX, STATES, changed, universal_files
from tests.golden.test_universal import loaded, theirs

__all__ = ["enums"]

pytestmark = pytest.mark.distributed
MASTERS = ["--weights", "fp32-master"]
SAID = ("llama_gqa_separate_tp2", "llama_gqa_fused_tp2", "gpt_layernorm_tied_tp2", "gpt_tied_pp2", "gpt_blocked_tp2")
"""Runs whose tree says how the parts of ranks are joined. Of the others all are concatenated along dimension 0."""


@pytest.fixture(scope="session")
def universal(zero, tmp_path_factory) -> Callable[[str], Path]:
    """`universal(name)`: the universal checkpoint that DeepSpeed makes of a run of `CASES`; made once."""
    folder = tmp_path_factory.mktemp("universal")

    def get(name: str) -> Path:
        if not (folder / name).exists():
            theirs(zero, HERE / name / "global_step3", folder / name, injected=name not in SAID)
        return folder / name

    return get


@pytest.mark.parametrize("name", CASES)
def test_its_logits(convert, tmp_path, universal, name):
    """Masters round to the weights, whose logits the tree has computed; queries, keys and values have their rows."""
    import numpy as np

    out, golden = tmp_path / "out", np.load(HERE / name / "logits.npz")
    ran = convert("zero2hf", universal(name), out, *CASES[name], "--dtype", "bf16")
    assert ran.code == 0, ran.err
    assert "it holds no module: these are the float32 master weights" in ran.err
    computed = logits(out, golden["ids"])
    assert np.abs(computed - golden["logits"][..., :60]).max() < 2e-6 < np.abs(computed).max()


@pytest.mark.parametrize("name", CASES)
def test_every_state_is_that_of_the_ranks(convert, universal, name):
    """Bit for bit what is read of the partitions of the ranks."""
    for weights in STATES.values():
        options = [*CASES[name], "--weights", weights]
        digests = [convert("digest", run, *options).out.split()[0] for run in (universal(name), HERE / name)]
        assert digests[0] == digests[1], weights


@pytest.mark.parametrize("name", ["gpt_blocked_tp2", "gpt_tied_pp2", "bloom_tp2"])
def test_other_frameworks_resume_from_it(convert, tmp_path, universal, name):
    """As from the partitions, bit for bit; and in the other order of queries, keys and values, at another topology."""
    run, options = universal(name), [*CASES[name], "--with-optimizer"]
    facts = convert("inspect", run, *CASES[name]).out
    assert "a universal checkpoint of Megatron-DeepSpeed, tp " in facts
    assert "exp_avg, exp_avg_sq, step 3" in facts
    for source, out in ((HERE / name, "partitions"), (run, "universal")):
        ran = convert("hf2fsdp", source, tmp_path / out, *options)
        assert ran.code == 0, ran.err
    first, second = (tmp_path / out / "__0_0.distcp" for out in ("partitions", "universal"))
    assert first.read_bytes() == second.read_bytes()
    order = ["--qkv", "grouped", "--tp", 1, "--pp", 2]
    assert convert("hf2mds", run, tmp_path / "mds", *options, *order, "--iteration", 3).code == 0
    assert convert("hf2fsdp", tmp_path / "mds", tmp_path / "again", "--with-optimizer").code == 0
    assert (tmp_path / "again/__0_0.distcp").read_bytes() == first.read_bytes()
    ran = convert("zero2universal", run, tmp_path / "hub-names", *CASES[name])
    assert ran.code == 0, ran.err


def test_commands_that_prove(convert, tmp_path, universal):
    """Compared with its training, with what was made of it, and by its own checksums."""
    name = "llama_gqa_fused_tp2"
    run = universal(name)
    assert convert("verify", run, HERE / name, *MASTERS).code == 0
    assert convert("diff", run, HERE / name, *MASTERS).code == 0
    assert convert("zero2hf", run, tmp_path / "hub").code == 0
    assert convert("verify", tmp_path / "hub", run).code == 0
    assert "each with its CRC-32" in convert("verify", run).out
    refused(convert("zero2hf", run, tmp_path / "no", "--weights", "module"), 3, "there are no weights", "fp32-master")
    assert convert("zero2universal", run, tmp_path / "named").code == 0
    refused(convert("verify", tmp_path / "named"), 3, "has no config.json", "add --config BASE")
    assert convert("verify", tmp_path / "named", "--config", tmp_path / "hub").code == 0


def test_deepspeed_gives_another_size_the_rows_of_others(convert, tmp_path, universal):
    """A tree of the newer order says nothing of it: the script has the rows of one rank after those of another."""
    name = "gpt_blocked_tp2"
    parameter = "2.self_attention.query_key_value.weight"
    argv = ["hf2mds", universal(name), tmp_path / "ours", *CASES[name], "--with-optimizer", "--qkv", "blocked"]
    assert convert(*argv, "--tp", 1).code == 0
    folders = [run / "zero" / parameter for run in (universal(name) / "u", tmp_path / "ours/global_step3")]
    for ranks in (1, 2):
        first, second = (loaded(folder, "fp32", (72 // ranks, 24), 0, ranks) for folder in folders)
        assert first.equal(second) is (ranks == 2), ranks
        assert first.flatten().sort().values.equal(second.flatten().sort().values), "in other places"


def test_apex_counts_in_the_groups_alone(convert, tmp_path, universal):
    """DeepSpeed's script writes no step.pt then; what is written has one, as from the partitions."""
    run = universal(APEX.name)
    assert not list(run.rglob("step.pt"))
    assert "exp_avg, exp_avg_sq, step 3" in convert("inspect", run).out
    for source, out in ((run, tmp_path / "ours"), (APEX, tmp_path / "same")):
        assert convert("hf2mds", source, out, "--with-optimizer", "--iteration", 3).code == 0
    assert universal_files(tmp_path / "ours") == universal_files(tmp_path / "same") != {}


def test_a_stale_count_beside_that_of_apex(convert, tmp_path, universal):
    """DeepSpeed loads step.pt into a state that Apex' FusedAdam never counts, and writes it again in each save."""
    import torch

    run = shutil.copytree(universal(APEX.name), tmp_path / "run")
    for path in run.glob("*/zero/*/fp32.pt"):
        torch.save(torch.tensor(1.0), path.with_name("step.pt"))
    assert "exp_avg, exp_avg_sq, step 3" in convert("inspect", run).out
    for source, out in ((run, tmp_path / "ours"), (APEX, tmp_path / "same")):
        assert convert("hf2mds", source, out, "--with-optimizer", "--iteration", 3).code == 0
    assert universal_files(tmp_path / "ours") == universal_files(tmp_path / "same") != {}


def test_a_vocabulary_of_the_user(convert, tmp_path, universal):
    """It may be smaller than what the training said, of which the files have the rows."""
    run = universal("llama_gqa_fused_tp2")
    assert convert("zero2hf", run, tmp_path / "out", "--set", "vocab=50").code == 0
    refused(convert("zero2hf", run, tmp_path / "no", "--set", "vocab=62"), 3, "60 rows of embeddings", "--vocab-size")


def test_the_order_is_asked_for(convert, tmp_path, universal):
    refused(convert("zero2hf", universal("gpt_blocked_tp2"), tmp_path / "out"), 3, "in one of two orders")


# --- what is wrong with it -------------------------------------------------------------------------------------------

NORM, UP, GROUPS = "zero/2.input_layernorm.weight", "zero/2.mlp.dense_h_to_4h.weight", "zero/optimizer_state.pt"
DOWN = "zero/2.self_attention.dense.weight"
FUSED = "llama_gqa_fused_tp2"


def of(path: str, **keys: Any) -> Callable[[Path], None]:
    """Change keys of a file."""
    return changed(path, lambda value: value.update(keys))


def shaped(path: str, change: Callable[[Any], Any]) -> Callable[[Path], None]:
    """Change the tensor in a file."""
    return changed(path, lambda value: value.update(param=change(value["param"]).clone()))


def stepped(tag: Path) -> None:
    import torch

    torch.save(torch.tensor(4.0), tag / NORM / "step.pt")


def info(**keys: Any) -> Callable[[Path], None]:
    """Change what the training has recorded of its tensors."""
    return changed("mp_rank_00_model_states.pt", lambda value: value["universal_checkpoint_info"].update(keys))


WEIGHTS: dict[str, tuple[Callable[[Path], Any], int, tuple[str, ...]]] = {
    "a parameter is missing": (lambda tag: shutil.rmtree(tag / NORM), 3, ("missing: 2.input_layernorm.weight [24]",)),
    "no masters": (lambda tag: (tag / NORM / "fp32.pt").unlink(), 3, (f"{NORM}/fp32.pt",)),
    "a layer too many": (
        lambda tag: shutil.copytree(tag / NORM, tag / "zero/9.input_layernorm.weight"), 3,
        ("has no place in this model: 9.input_layernorm.weight",),
    ),
    "another shape": (
        shaped(f"{NORM}/fp32.pt", lambda tensor: tensor[:23]), 3,
        ("has [23] for tensor parallel rank 0 of 2", "says [24]"),
    ),
    "other columns": (
        shaped("zero/2.mlp.dense_4h_to_h.weight/fp32.pt", lambda tensor: tensor[:, :47]), 3,
        ("holds 47 along dimension 1, which 2 ranks cannot have had",),
    ),
    "sections of another tensor": (of(f"{UP}/fp32.pt", param_n_sub_params=5), 3, ("holds [96, 24]", "no 5 sections")),
    "another dimension": (of(f"{UP}/fp32.pt", cat_dim=2), 4, ("says cat_dim = 2",)),
    "a vocabulary that is no flag": (of(f"{UP}/fp32.pt", vocab_tensor="x"), 4, ("says vocab_tensor = 'x'",)),
    "an unknown layout": (of(f"{UP}/fp32.pt", is_expert_param=True), 4, ("says 'is_expert_param' of its tensor",)),
    "no sections any more": (
        changed(f"{UP}/fp32.pt", lambda value: value.pop("param_n_sub_params")), 3,
        (f"{UP}/fp32.pt says that '2.mlp.dense_h_to_4h.weight' is concatenated along dimension 0; after "
         "mp_rank_00_model_states.pt it is concatenated along dimension 0 in sections of 48 + 48",),
    ),
    "sections of a tensor without": (
        of("zero/2.self_attention.query_key_value.weight/fp32.pt", param_n_sub_params=2), 3,
        ("'2.self_attention.query_key_value.weight' is concatenated along dimension 0 in sections of 24 + 24; after",),
    ),
    "sections of a tensor that is whole": (of(f"{NORM}/fp32.pt", param_n_sub_params=2), 4, ("says cat_dim = None",)),
    "a square matrix cut by rows": (
        of(f"{DOWN}/fp32.pt", cat_dim=0), 3, ("is concatenated along dimension 0; after", "along dimension 1"),
    ),
    "a matrix that is whole": (
        changed(f"{DOWN}/fp32.pt", lambda value: value.pop("cat_dim")), 3, ("is whole; after", "along dimension 1"),
    ),
    "a vocabulary with padding": (
        changed("zero/5.lm_head.weight/fp32.pt", lambda value: value.pop("vocab_tensor")), 3,
        ("concatenated along dimension 0; after", "without the vocabulary's padding"),
    ),
    "a tree that joins otherwise": (
        info(parameter_with_2_sub_params_cat_dim_0=[]), 3, ("in sections of 48 + 48; after",),
    ),
    "a tree of an unknown kind": (info(affine_map={"version": 1}), 4, ("has 'affine_map'",)),
    "an expression that never ends": (
        info(tp_replicated_parameter_patterns=[r"(\d+)+.weight"]), 4, (r"the pattern '(\\d+)+.weight'",),
    ),
    "masters of another layer": (
        lambda tag: shutil.copy(tag / UP / "fp32.pt", tag / UP.replace("2.", "3.") / "fp32.pt"), 3,
        ("hold the same elements: one is a copy of the other",),
    ),
    "rounded masters": (shaped(f"{UP}/fp32.pt", lambda tensor: tensor.bfloat16()), 3, ("BF16, a master is F32",)),
    "a file of another state": (
        lambda tag: shutil.copy(tag / UP / "exp_avg.pt", tag / UP / "fp32.pt"), 3, ("was saved as 'exp_avg'",),
    ),
    "a truncated file": (
        lambda tag: (tag / UP / "fp32.pt").write_bytes((tag / UP / "fp32.pt").read_bytes()[:900]), 3, ("fp32.pt",),
    ),
    "a folder of another step": (stepped, 4, ("different numbers of steps", "2.input_layernorm.weight 4")),
    "all of another step": (of("mp_rank_00_model_states.pt", skipped_steps=1), 3, ("skipped",)),
    "a rank is missing": (lambda tag: (tag / "mp_rank_01_model_states.pt").unlink(), 3, ("2 model parallel ranks",)),
    "no name of the tree": (
        lambda tag: (tag / NORM).rename(tag / "zero/input_layernorm.weight"), 4, ("has no number of a module",),
    ),
    "a tree that is not known": (
        changed("mp_rank_00_model_states.pt", lambda value: delattr(value["args"], "padded_vocab_size")), 4,
        ("numbers of modules in its names, such as '1.word_embeddings.weight'",),
    ),
    "the same twice": (
        lambda tag: shutil.copytree(tag / NORM, tag / "zero/sequential.2.input_layernorm.weight"), 3, ("twice",),
    ),
}  # fmt: skip
OPTIMIZERS: dict[str, tuple[Callable[[Path], Any], int, tuple[str, ...]]] = {
    "a moment is missing": (lambda tag: (tag / NORM / "exp_avg.pt").unlink(), 3, (f"{NORM}/exp_avg.pt",)),
    "no groups": (lambda tag: (tag / GROUPS).unlink(), 3, ("optimizer_state.pt",)),
    "one group": (changed(GROUPS, lambda value: value["param_groups"].pop()), 3, ("holds the parameters of group 1",)),
    "a moment of another shape": (
        shaped(f"{NORM}/exp_avg.pt", lambda tensor: tensor[:20]), 3, ("has [20] for tensor parallel rank 0",),
    ),
}  # fmt: skip
"""What is done to a tag, the exit code, and what the message says."""


@pytest.mark.parametrize("fault", [*WEIGHTS, *OPTIMIZERS])
def test_a_damaged_one(convert, tmp_path, universal, fault):
    edit, code, parts = {**WEIGHTS, **OPTIMIZERS}[fault]
    run = shutil.copytree(universal(FUSED), tmp_path / "run")
    edit(run / "u")
    command = ["hf2fsdp", run, tmp_path / "out"]
    for options in [[], ["--with-optimizer"]] if fault in WEIGHTS else [["--with-optimizer"]]:
        refused(convert(*command, *options), code, *parts)
        assert not (tmp_path / "out").exists()
    if fault in OPTIMIZERS:
        assert convert(*command).code == 0, "the weights alone"


@pytest.mark.parametrize(
    ("name", "sizes"), [("gpt_blocked_tp2", (1, 2)), ("bloom_tp2", (1, 2)), ("gpt_tied_pp2", (2, 1))]
)
def test_exchanged_parallel_sizes(convert, tmp_path, universal, name, sizes):
    """Two ranks of a pipeline for two tensor parallel ranks, in the arguments: the model files have shapes of parts."""
    run = shutil.copytree(universal(name), tmp_path / "run")
    args = dict(zip(("tensor_model_parallel_size", "pipeline_model_parallel_size"), sizes, strict=True))
    for path in sorted(run.glob("u/mp_rank_*")):
        changed(path.name, lambda value: vars(value["args"]).update(args))(run / "u")
    ran = convert("zero2hf", run, tmp_path / "out", *CASES[name])
    refused(ran, 3, f"for tensor parallel rank 0 of {sizes[0]}, mp_rank_00_model_states.pt says", "the parallel sizes")


def test_a_training_that_skipped_steps_in_part(convert, tmp_path, universal):
    """What the user accepts is taken, of the weights."""
    run = shutil.copytree(universal(FUSED), tmp_path / "run")
    stepped(run / "u")
    assert convert("zero2hf", run, tmp_path / "out", "--accept", "global_steps").code == 0
    refused(
        convert("hf2fsdp", run, tmp_path / "no", "--with-optimizer", "--accept", "global_steps"),
        4, "different numbers of steps",
    )  # fmt: skip
