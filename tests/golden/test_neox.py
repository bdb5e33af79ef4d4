"""Checkpoints that real GPT-NeoX wrote (neox/README.md), judged by the logits that it left in them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from formats.checkpoint import Settings
from formats.deepspeed.neox import tables
from formats.families import family_named
from formats.layout.table import Rule
from formats.registry import open_checkpoint
from tests.faults.dcp_tools import refused

HERE = Path(__file__).parent / "neox"
CASES = sorted(path.parent for path in HERE.glob("*/latest"))
WITH_MASTERS = [case for case in CASES if any(case.glob("*/*optim_states.pt"))]
SHARED = Path(__file__).parents[3] / "shared" / "fixtures" / "neox"
MEAN, MOST = 0.008, 0.06
"""How far bfloat16 logits may be from those of the same weights in float32; a wrong rule gives a mean above 0.01."""


def flags(case: Path) -> list[str]:
    layout = "grouped" if "grouped" in case.name or "w123" in case.name else "blocked"
    vocab = "125" if "125" in case.name else "253" if case.parent == SHARED else "101"
    return ["--vocab-size", vocab, "--gqa-layout", layout, "-q"]


def tag(case: Path) -> Path:
    return case / (case / "latest").read_text().strip()


def golden(case: Path) -> Any:
    """NeoX's logits, of all tensor parallel ranks."""
    import torch

    files = [torch.load(path, weights_only=False) for path in sorted(tag(case).glob("mp_rank_*_model_states.pt"))]
    logits = [file["checkpoint_validation_logits"] for file in files]
    return torch.cat([part.float() for part in logits if part is not None], -1)


def distances(out: Path, case: Path) -> tuple[float, float]:
    """Mean and largest distance of the logits of transformers, in float32, from NeoX's."""
    import torch
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), info
    expected = golden(case)
    with torch.no_grad():
        logits = model.eval()(torch.arange(len(expected))[None]).logits[0]
    apart = (logits - expected[:, : logits.shape[1]]).abs()
    return apart.mean().item(), apart.max().item()


def test_there_are_cases():
    assert [case.name for case in CASES] == [
        "gpt2-pp2-tp2", "gpt2-tied-tp2", "gpt2-untied-tp2", "llama-bf16-optimizer-tp2", "llama-fp16-tp2",
        "llama-fp32-tp2", "llama-gqa-pp2-tp2", "llama-gqa-tp2", "llama-grouped-tp2", "llama-mha-tp2",
        "llama-tied-pp2", "llama-tp2-dp2", "llama-vocab125-tp1", "llama-vocab125-tp2", "llama-w123-tp2",
        "neox-defaults-tp2", "neox-h4h-tp2", "neox-parallel-tp2", "neox-parallel-tp4", "neox-pp2-tp2",
        "neox-serial-tp2", "neox-tied-tp2",
    ]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_logits_are_those_of_neox(convert, tmp_path, case):
    ran = convert("neox2hf", case, tmp_path / "out", *flags(case))
    assert ran.code == 0, ran.err
    mean, most = distances(tmp_path / "out", case)
    limit = 1e-5 if "fp32" in case.name else MEAN
    assert mean < limit, mean
    assert most < max(limit * 10, 1e-4) if "fp32" in case.name else most < MOST, most


@pytest.mark.parametrize("case", WITH_MASTERS, ids=lambda case: case.name)
def test_the_masters_are_the_same_model(convert, tmp_path, case):
    """Rounded to bfloat16 they are the module, bit for bit; and in float32 they give its logits."""
    masters = [*flags(case), "--weights", "fp32-master"]
    module = convert("neox2hf", case, tmp_path / "module", *flags(case), "--json")
    ran = convert("neox2hf", case, tmp_path / "bf16", *masters, "--dtype", "bf16", "--json")
    assert (module.code, ran.code) == (0, 0), module.err + ran.err
    summed = "parallel" in case.name  # a sum of rounded biases is not the rounded sum
    assert summed or json.loads(module.out)["digest"] == json.loads(ran.out)["digest"]
    assert convert("neox2hf", case, tmp_path / "fp32", *masters).code == 0
    mean, most = distances(tmp_path / "fp32", case)
    assert mean < MEAN, mean
    assert most < MOST, most


@pytest.mark.parametrize("state", ["exp_avg", "exp_avg_sq"])
def test_moments_come_in_the_shapes_of_the_model(convert, tmp_path, state):
    case = HERE / "llama-tp2-dp2"
    assert convert("neox2hf", case, tmp_path / "out", *flags(case), "--weights", state).code == 0
    record = json.loads(convert("inspect", tmp_path / "out", "--json").out)
    assert record["dtypes"] == {"F32": record["tensors"]}


@pytest.mark.parametrize("yml", sorted((HERE / "refused").glob("*.yml")), ids=lambda path: path.stem)
def test_models_that_transformers_lacks_are_refused(convert, tmp_path, yml):
    case = HERE / ("neox-parallel-tp2" if "neox" in yml.stem else "llama-gqa-tp2")
    ran = convert("neox2hf", case, tmp_path / "out", *flags(case), "--config", yml)
    if "bias" in yml.stem:
        refused(ran, 3, yml.name, "use_bias_in_attn_linear")
    else:
        refused(ran, 4, yml.name)
        assert re.search(r"no class with|is not supported", ran.err), ran.err


def test_the_two_orders_of_query_key_and_value_are_never_guessed(convert, tmp_path):
    ran = convert("neox2hf", HERE / "llama-grouped-tp2", tmp_path / "out", "--vocab-size", 101)
    refused(ran, 3, "2024-11-13", "--gqa-layout")
    assert not (tmp_path / "out").exists()
    refused(convert("digest", HERE / "llama-grouped-tp2", "--vocab-size", 101), 3, "--gqa-layout")
    ran = convert("inspect", HERE / "llama-grouped-tp2", "--vocab-size", 101)  # of which it prints nothing
    assert (ran.code, "heads " in ran.out, "add --gqa-layout blocked" in ran.out) == (0, True, True), ran.err
    for command in ("inspect", "digest"):  # whatever reads it takes the hint
        options = ["--vocab-size", 101, "--gqa-layout", "grouped"]
        assert convert(command, HERE / "llama-grouped-tp2", *options).code == 0


def test_an_order_that_the_rows_contradict_is_told(convert, tmp_path):
    """Queries, keys and values of lengths of their own, as in a trained model."""
    import shutil

    import torch

    run = shutil.copytree(HERE / "llama-gqa-tp2", tmp_path / "run")
    for path in run.glob("*/mp_rank_0*_model_states.pt"):
        state = torch.load(path, weights_only=False)
        for key in [key for key in state["module"] if key.endswith("query_key_value.weight")]:
            third = len(state["module"][key]) // 4
            state["module"][key][2 * third : 3 * third] *= 10
            state["module"][key][3 * third :] *= 100
        torch.save(state, path)
    for layout, message in (
        ("auto", "read as blocked, which is what their rows look like"),
        ("grouped", "read as grouped, as --gqa-layout says, though their rows look blocked"),
        ("blocked", ""),
    ):
        ran = convert("neox2hf", run, tmp_path / layout, "--vocab-size", 101, "--gqa-layout", layout)
        assert ran.code == 0, ran.err
        assert message in ran.err
        assert message or "rows look" not in ran.err


@pytest.mark.parametrize("name", ["llama-grouped-tp2", "llama-gqa-tp2"])
def test_masters_are_compared_in_either_order(convert, tmp_path, name):
    """One bit of a key in the module, which its master does not have."""
    import shutil

    import torch

    run = shutil.copytree(HERE / name, tmp_path / name)
    path = next(run.glob("*/mp_rank_01_model_states.pt"))
    state = torch.load(path, weights_only=False)
    state["module"]["sequential.3.attention.query_key_value.weight"][9, 5] += 1
    torch.save(state, path)
    ran = convert("neox2hf", run, tmp_path / "out", *flags(run), "--weights", "fp32-master")
    refused(ran, 6, "1 of ", "are not the rounded FP32 master weights")


def test_the_wrong_order_would_show(convert, tmp_path):
    """What the shapes cannot tell: the peers' silent error, and why it is asked for."""
    case = HERE / "llama-grouped-tp2"
    assert convert("neox2hf", case, tmp_path / "out", "--vocab-size", 101, "--gqa-layout", "blocked").code == 0
    assert distances(tmp_path / "out", case)[0] > 0.1


@pytest.mark.skipif(
    not SHARED.is_dir(), reason="needs the checkpoints of the workplace, which are no part of the project"
)
@pytest.mark.parametrize("name", ["up_llama_tp2", "up_llama_pp2tp2", "up_neox_tp2"])
def test_more_checkpoints_of_neox(convert, tmp_path, name):
    ran = convert("neox2hf", SHARED / name, tmp_path / "out", *flags(SHARED / name), "--weights", "fp32-master")
    assert ran.code == 0, ran.err
    assert distances(tmp_path / "out", SHARED / name)[0] < MEAN


@pytest.mark.parametrize(
    ("name", "sizes"), [("gpt2-tied-tp2", []), ("gpt2-untied-tp2", []), ("gpt2-pp2-tp2", ["--pp", 2])]
)
def test_a_gpt_2_is_written_as_neox_wrote_it(convert, tmp_path, name, sizes):
    """The same files with the same names, types, shapes and bits in them, and a yml of the same model."""
    import torch
    import yaml

    case, options = HERE / name, ["--tp", 2, *sizes, "--layout", "pipeline" if sizes else "sequential"]
    assert convert("neox2hf", case, tmp_path / "hub", *flags(case)).code == 0
    options += ["--make-vocab-size-divisible-by", 1, "--iteration", 6]
    ran = convert("hf2neox", tmp_path / "hub", tmp_path / "run", *options)
    assert ran.code == 0, ran.err
    files = sorted(path.name for path in tag(case).glob("*model_states.pt"))
    assert sorted(path.name for path in tag(tmp_path / "run").glob("*model_states.pt")) == files
    for file in files:
        ours, theirs = (torch.load(tag(run) / file, weights_only=False) for run in (tmp_path / "run", case))
        if not file.startswith("layer"):
            ours, theirs = ours["module"] or {}, theirs["module"] or {}
        assert list(ours) == list(theirs), file
        for key, tensor in ours.items():
            padded = key.endswith(("word_embeddings.weight", "final_linear.weight")) and bool(
                re.search("_01[-_]model_states", file)
            )
            rows = len(tensor) - padded
            assert tensor.dtype == theirs[key].dtype, key
            assert tensor[:rows].equal(theirs[key][:rows]), key
    (ours,), (theirs,) = (list(tag(run).glob("configs/*.yml")) for run in (tmp_path / "run", case))
    written, trained = yaml.safe_load(ours.read_text()), yaml.safe_load(theirs.read_text())
    changed = {key: value for key, value in written.items() if key in trained and trained[key] != value}
    assert changed == {}, changed


# --- what a user has on a cluster ------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path) -> Path:
    """A folder to start from: a link to a checkpoint of another run, and `latest`."""
    other = tmp_path / "final_train_v2"
    other.mkdir()
    (other / "global_step6").symlink_to(tag(HERE / "llama-mha-tp2"))
    folder = tmp_path / "LATEST_translate_sft_v1"
    folder.mkdir()
    (folder / "global_step6").symlink_to(Path("..") / "final_train_v2" / "global_step6")
    (folder / "latest").write_text("global_step6\n")
    return folder


@pytest.fixture(scope="module")
def spoken(tmp_path_factory) -> Path:
    """A SentencePiece model of 101 pieces with control tokens, as the users of NeoX on LUMI have."""
    import random

    from sentencepiece import SentencePieceTrainer

    draw, prefix = random.Random(0), tmp_path_factory.mktemp("spm") / "model"
    text = (" ".join("".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=4)) for _ in range(9)) for _ in range(400))
    control = ["<|endoftext|>", "<|pad|>", "<|sep|>", "<|system|>", "<|user|>", "<|assistant|>"]
    SentencePieceTrainer.train(
        sentence_iterator=text, model_prefix=str(prefix), vocab_size=101, model_type="bpe", control_symbols=control,
        minloglevel=2,
    )  # fmt: skip
    return prefix.with_suffix(".model")


def test_a_start_folder_becomes_a_model_with_tokenizer_and_chat_template(convert, run, spoken, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    chat = ["--chat-template", "control"]
    ran = convert("neox2hf", run, tmp_path / "out", "--tokenizer", spoken, *chat, "-q")
    assert ran.code == 0, ran.err
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "a b"}], add_generation_prompt=True, tokenize=True)
    ids = ids["input_ids"] if isinstance(ids, dict) or hasattr(ids, "keys") else ids
    user, assistant = tokenizer.convert_tokens_to_ids(["<|user|>", "<|assistant|>"])
    assert [ids[0], ids[-2], ids[-1]] == [user, user, assistant] == [7, 7, 8]
    assert assistant in model.generation_config.eos_token_id
    assert len(tokenizer) == model.config.vocab_size == 101


def test_the_tokenizer_that_the_yml_names_is_found(convert, run, tmp_path):
    yml = tmp_path / "run.yml"
    text = next((tag(HERE / "llama-mha-tp2") / "configs").glob("*.yml")).read_text()
    yml.write_text(text.replace('"spm101.model"', json.dumps(str(HERE / "spm101.model"))))
    assert convert("neox2hf", run, tmp_path / "out", "--config", yml, "-q").code == 0
    assert (tmp_path / "out" / "tokenizer.json").is_file()


def test_tags_of_any_name(convert, run, tmp_path):
    (run / "_global_step_423858_backup").symlink_to(tag(HERE / "llama-fp32-tp2"))
    ran = convert("neox2hf", run, tmp_path / "out", "--tag", "_global_step_423858_backup", *flags(HERE / "x"))
    assert ran.code == 0, ran.err
    assert json.loads(convert("inspect", tmp_path / "out", "--json").out)["dtypes"] == {"F32": 21}


def test_a_vocabulary_that_nothing_tells_is_asked_for(convert, run, tmp_path):
    refused(convert("neox2hf", run, tmp_path / "out"), 5, "102 padded rows", "--vocab-size")


# --- every line has a witness ----------------------------------------------------------------------------------------


def test_every_line_of_the_tables_was_written_by_neox():
    seen: dict[tuple[Rule, ...], set[tuple[str, str]]] = {tables.LLAMA: set(), tables.GPT_NEOX: set()}
    for case in CASES:
        checkpoint = open_checkpoint(case, Settings(vocab_size=int(flags(case)[1]), gqa_layout=flags(case)[3]))
        for placed in checkpoint.fragments():
            spelling = placed.slot.rule.spellings[placed.slot.keys.index(placed.key)]
            key = re.sub(r"^\d+\.(?=norm)", "{norm}.", re.sub(r"^\d+\.(?=final)", "{head}.", spelling))
            table = tables.TABLES[family_named(checkpoint.spec.family).neox]
            seen[table].add((key, placed.slot.rule.pattern.text))
    transformer_engine = re.compile(r"norm\.norm\.weight$|layernorm\.norm\.weight$")  # which runs on no CPU
    for table, lines in seen.items():
        for rule in table:
            for spelling in rule.spellings:
                if table is tables.LLAMA and transformer_engine.search(spelling):
                    continue
                assert (spelling, rule.pattern.text) in lines, spelling


def test_no_machine_is_named_in_the_files():
    for case in CASES:
        for path in case.rglob("*"):
            assert not path.is_file() or b"/home/" not in path.read_bytes(), path


def test_diff_adds_up_what_ranks_hold_of_a_bias(convert, tmp_path):
    """As verify does: of two ranks with a parallel residual, each holds a summand."""
    import shutil

    import torch

    case, out = HERE / "neox-parallel-tp2", tmp_path / "out"
    assert convert("neox2hf", case, out, *flags(case)).code == 0
    other = shutil.copytree(case, tmp_path / "other")
    ran = convert("diff", case, out, "--vocab-size", 101)
    assert ran.code == 0, ran.out
    path = tag(other) / "mp_rank_01_model_states.pt"
    state = torch.load(path, weights_only=False)
    state["module"]["sequential.2.attention.dense.bias"] += 1
    torch.save(state, path)
    ran = convert("diff", case, other, "--vocab-size", 101)
    assert ran.code == 6
    assert [line.split()[0] for line in ran.out.splitlines()] == ["gpt_neox.layers.0.attention.dense.bias"]


def test_diff_knows_copies_that_drifted(convert, tmp_path):
    """It is told what to do with them, as verify is."""
    import shutil

    import torch

    case = HERE / "llama-mha-tp2"
    other = shutil.copytree(case, tmp_path / "other")
    path = tag(other) / "mp_rank_01_model_states.pt"
    state = torch.load(path, weights_only=False)
    state["module"]["sequential.5.norm.scale"] += 0.5
    torch.save(state, path)
    argv = ["diff", case, other, "--vocab-size", 101]
    refused(convert(*argv), 6, "5.norm.scale differs between its copies", "--replicas first")
    assert convert(*argv, "--replicas", "first").code == 0
    ran = convert(*argv, "--replicas", "mean")
    assert ran.code == 6
    assert ran.out.split()[0] == "model.norm.weight"
