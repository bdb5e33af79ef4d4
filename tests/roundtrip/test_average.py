"""`convert average`: bit for bit the sums of numpy in float64, of any formats, and what it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from converters.move import casts
from formats.huggingface.layers import FULL, SLIDING
from tests.fuzz.architectures import build, quiet
from tests.models import WITHOUT_TABLE, files, nearest_bfloat16
from tests.optimizers import add_optimizer

MODEL = "llama-tied"
TYPES = {"bf16": ml_dtypes.bfloat16, "fp32": np.float32, "fp16": np.float16}


@pytest.fixture(scope="module")
def three(model, tmp_path_factory) -> list[Path]:
    """Three checkpoints of one model in float32, whose weights differ."""
    first, folders = model(MODEL), []
    for number in range(3):
        folder = tmp_path_factory.mktemp("run") / f"checkpoint-{number + 9}"
        shutil.copytree(first, folder)
        dice = np.random.default_rng(number)
        moved = {
            name: (tensor + 0.01 * dice.standard_normal(tensor.shape)).astype(np.float32)
            for name, tensor in load_file(first / "model.safetensors").items()
        }
        save_file(moved, folder / "model.safetensors", {"format": "pt"})
        folders.append(folder)
    return folders


def expected(folders: list[Path], weights: list[float]) -> dict[str, np.ndarray]:
    """The weighted sum in float64, in order."""
    models = [load_file(folder / "model.safetensors") for folder in folders]
    total = {name: np.zeros(array.shape) for name, array in models[0].items()}
    for tensors, weight in zip(models, weights, strict=True):
        for name, tensor in tensors.items():
            total[name] = total[name] + weight * tensor.astype(np.float64)
    return total


def equal(out: Path, total: dict[str, np.ndarray], dtype: str) -> None:
    """OUT holds a sum, rounded once."""
    import torch
    from safetensors.torch import load_file as load_torch

    stored = load_torch(out / "model.safetensors")
    assert stored.keys() == total.keys()
    for name, values in total.items():
        want = nearest_bfloat16(values) if dtype == "bf16" else values.astype(TYPES[dtype])
        got = stored[name].view(torch.uint8).numpy() if stored[name].dim() else stored[name].numpy()
        assert got.tobytes() == want.tobytes(), name


@pytest.mark.parametrize(
    ("options", "weights"),
    [
        ([], [1 / 3, 1 / 3, 1 / 3]),
        (["--weights", "0.5,0.3,0.2"], [0.5, 0.3, 0.2]),
        (["--weights", "1.5,-0.7,0.2"], [1.5, -0.7, 0.2]),
        (["--ema", "0.9"], [0.9**2, (1 - 0.9) * 0.9, 1 - 0.9]),
    ],
)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_the_sum_of_numpy_in_float64(three, convert, tmp_path, options, weights, dtype):
    ran = convert("average", *three, tmp_path / "out", *options, "--dtype", dtype, "--memory", "1MiB")
    assert ran.code == 0, ran.err
    equal(tmp_path / "out", expected(three, weights), dtype)
    assert convert("verify", tmp_path / "out").code == 0
    manifest = json.loads((tmp_path / "out/vitruvian.json").read_text())
    assert [(source["name"], source["weight"]) for source in manifest["sources"]] == [
        (path.name, weight) for path, weight in zip(three, weights, strict=True)
    ]


def test_transformers_computes_the_mean(three, convert, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    assert convert("average", *three, tmp_path / "out").code == 0
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    judge = AutoModelForCausalLM.from_pretrained(three[0])
    means = {name: torch.from_numpy(array.astype(np.float32)) for name, array in expected(three, [1 / 3] * 3).items()}
    judge.load_state_dict(means, strict=False)
    ids = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, judge(ids).logits)


def test_any_formats_mixed_give_the_same_bytes(three, convert, tmp_path):
    assert convert("average", *three, tmp_path / "plain").code == 0
    assert convert("hf2megatron", three[1], tmp_path / "megatron", "--tp", 2, "--pp", 2).code == 0
    assert convert("hf2fsdp", three[2], tmp_path / "fsdp", "--ranks", 2).code == 0
    ran = convert("average", three[0], tmp_path / "megatron", tmp_path / "fsdp", tmp_path / "mixed")
    assert ran.code == 0, ran.err
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("plain", "mixed")]
    assert weights[0] == weights[1]


@pytest.mark.parametrize("how", ["plain", "distributed"])
def test_masters_are_averaged(model, convert, tmp_path, how):
    """Each is 1 + 2**-12 times its bfloat16 weight, to which it rounds. Megatron-LM#5114 averages the latter."""
    sources, runs = [model("llama", "bfloat16"), tmp_path / "other"], []
    shutil.copytree(sources[0], sources[1])
    flipped = {name: -tensor for name, tensor in load_file(sources[0] / "model.safetensors").items()}
    flipped = {name: (tensor / 2 if "norm" not in name else -tensor) for name, tensor in flipped.items()}
    save_file(flipped, sources[1] / "model.safetensors", {"format": "pt"})
    for number, source in enumerate(sources):
        options = ["--norm", "local", "--iteration", 3, "--make-vocab-size-divisible-by", 16, "--tp", 2]
        assert convert("hf2megatron", source, tmp_path / f"run{number}", *options).code == 0
        runs.append(add_optimizer(tmp_path / f"run{number}", how))
    total = {name: array * (1 + 2**-12) for name, array in expected(sources, [0.75, 0.25]).items()}
    for dtype in ("keep", "fp32"):
        ran = convert("average", *runs, tmp_path / dtype, "--weights", "0.75,0.25", "--dtype", dtype)
        assert ran.code == 0, ran.err
        equal(tmp_path / dtype, total, "bf16" if dtype == "keep" else dtype)
    assert "opt_param_scheduler, optimizer, rng_state: continue the training with" in ran.err
    ran = convert("average", runs[0], sources[1], tmp_path / "mixed", "-n")
    assert ran.code == 0, ran.err
    assert f"{runs[0]}: format megatron, averaged FP32 master weights, weight 0.5" in ran.out
    assert f"{sources[1]}: format huggingface, averaged weights, weight 0.5" in ran.out


def test_the_newest_of_a_run(three, convert, tmp_path):
    run = tmp_path / "run"
    for folder in three:
        shutil.copytree(folder, run / folder.name)  # checkpoint-9, -10 and -11: by number, and not by name
    assert convert("average", run, tmp_path / "out", "--last", 2, "--ema", 0.75).code == 0
    equal(tmp_path / "out", expected(three[1:], [0.75, 0.25]), "fp32")
    (run / "12").mkdir()  # of a log
    (run / "12/events.out.tfevents.1").touch()
    ran = convert("average", run, tmp_path / "beside", "--last", 2, "--ema", 0.75)
    assert ran.code == 0, ran.err
    equal(tmp_path / "beside", expected(three[1:], [0.75, 0.25]), "fp32")
    ran = convert("average", run, tmp_path / "more", "--last", 4)
    assert (ran.code, "holds 3 checkpoints, --last asks for 4" in ran.err) == (3, True)
    (run / "latest").write_text("checkpoint-10\n")
    ran = convert("average", run, tmp_path / "more", "--last", 2)
    assert (ran.code, "says that 10 is the latest checkpoint, and checkpoint-11 is there too" in ran.err) == (5, True)
    (run / "latest").write_text("checkpoint-12\n")
    ran = convert("average", run, tmp_path / "more", "--last", 2)
    assert (ran.code, "12 is the latest checkpoint, and checkpoint-11 is the newest" in ran.err) == (5, True)
    (run / "checkpoint-9").rename(run / "epoch_1")
    ran = convert("average", run, tmp_path / "more", "--last", 2)
    assert (ran.code, "epoch_1 and checkpoint-11, and nobody can tell which is newer" in ran.err) == (5, True), ran.err


def test_the_newest_of_nanotron(three, convert, tmp_path):
    run = tmp_path / "run"
    for number, folder in enumerate(three):
        assert convert("hf2nanotron", folder, run / f"{9 + number}").code == 0
    assert convert("average", run, tmp_path / "out", "--last", 2).code == 0
    equal(tmp_path / "out", expected(three[1:], [0.5, 0.5]), "fp32")
    (run / "latest.txt").write_text("10")
    ran = convert("average", run, tmp_path / "more", "--last", 2)
    assert (ran.code, "says that 10 is the latest checkpoint, and 11 is there too" in ran.err) == (5, True), ran.err
    shutil.copytree(three[0], run / "checkpoint-9")
    ran = convert("average", run, tmp_path / "more", "--last", 2)
    assert (ran.code, "holds 11 and checkpoint-9, and nobody can tell which is newer" in ran.err) == (5, True), ran.err


def test_other_tokenizers_and_other_tokens_are_told(three, convert, tmp_path):
    other = shutil.copytree(three[1], tmp_path / "other")
    (other / "tokenizer.model").write_bytes(b"another one")
    ran = convert("average", three[0], other, tmp_path / "out")
    assert (ran.code, f"tokenizer.model of {other} and of {three[0]} differ" in ran.err) == (0, True), ran.err
    assert "differ" not in convert("average", *three, tmp_path / "alike").err
    ends = shutil.copytree(three[0], tmp_path / "ends")
    config = json.loads((ends / "config.json").read_text()) | {"eos_token_id": 5}
    (ends / "config.json").write_text(json.dumps(config))
    ran = convert("diff", three[0], ends)
    assert ran.code == 0
    assert "differs in keys that no tensor depends on: eos_token_id: " in ran.out
    assert "all settings" not in ran.out
    note = "differs in keys that no tensor depends on (here | there): eos_token_id: "
    ran = convert("verify", three[0], ends)
    assert (ran.code, note in ran.err) == (0, True), ran.err
    ran = convert("average", three[0], ends, tmp_path / "none")
    assert (ran.code, note in ran.err, "different models" in ran.err) == (5, True, False), ran.err
    assert "all settings" in convert("diff", three[0], three[0]).out
    assert json.loads(convert("diff", three[0], ends, "--json").out)["config"][0].startswith("eos_token_id: ")


def test_records_of_the_first_are_not_those_of_the_mean(three, convert, tmp_path):
    first = shutil.copytree(three[0], tmp_path / "first")
    (first / "all_results.json").write_text('{"eval_loss": 1.5}')
    assert convert("hf2hf", first, tmp_path / "same").code == 0
    assert (tmp_path / "same/all_results.json").exists()
    assert convert("average", first, *three[1:], tmp_path / "out").code == 0
    assert not (tmp_path / "out/all_results.json").exists()


def test_tokenizers_of_other_kinds_are_told(three, convert, tmp_path):
    first, other = (shutil.copytree(three[number], tmp_path / str(number)) for number in (0, 1))
    for path in [*first.glob("tokenizer.*"), *other.glob("tokenizer.*")]:
        path.unlink()
    (other / "tokenizer.model").write_bytes(b"a tokenizer")
    assert "differ: the mean" not in convert("average", first, other, tmp_path / "a", "-n").out
    (first / "tokenizer.json").write_text("{}")
    assert "tokenizer.json and tokenizer.model of" in convert("average", first, other, tmp_path / "a", "-n").out


def test_the_plan_names_the_sources(three, convert, tmp_path):
    ran = convert("average", *three, tmp_path / "out", "--weights", "0.5,0.25,0.25", "-n")
    assert ran.code == 0
    assert f"of     {three[1]}: format huggingface, averaged weights, weight 0.25" in ran.out
    assert "change weighted mean of 3 in float64, rounded once to F32" in ran.out
    assert not (tmp_path / "out").exists()


def test_what_a_reader_notes_of_each_source(model, convert, tmp_path):
    """Each source that was quantized is named, not the first alone."""
    quantized = tmp_path / "quantized"
    base = model("llama", "bfloat16", hidden_size=128, intermediate_size=256)
    assert convert("hf2hf", base, quantized, "--quantize", "fp8-block").code == 0
    ran = convert("average", base, quantized, tmp_path / "out")
    assert (ran.code, ran.err.count(f"{quantized}: 20 tensors of FP8 are read as BF16")) == (0, 1), ran.err


@pytest.mark.parametrize(
    ("options", "code", "text"),
    [
        (["--weights", "0.5,0.3"], 2, "says 2 weights of 3 checkpoints"),
        (["--weights", "0.5,0.3,0.3"], 2, "are 1.1 in all"),
        (["--weights", "nan,0.5,0.5"], 2, "finite number other than 0"),
        (["--weights", "0,0.5,0.5"], 2, "finite number other than 0"),
        (["--weights", "a,b,c"], 2, "is not a list such as"),
        (["--ema", "1"], 2, "no decay between 0 and 1"),
        (["--ema", "0.9", "--weights", "0.5,0.3,0.2"], 2, "--ema says every weight"),
        (["--last", "2"], 2, "--last is for one run"),
    ],
)
def test_weights_that_are_none(three, convert, tmp_path, options, code, text):
    ran = convert("average", *three, tmp_path / "out", *options)
    assert ran.code == code
    assert text in ran.err


def logits_of(folder: Path) -> np.ndarray:
    """The logits of a model for a few tokens, by attention with a mask."""
    with quiet(), torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        return model(torch.arange(1, 9)[None]).logits.numpy()


def changed(folder: Path, out: Path, **keys: object) -> Path:
    """A copy of a model with another config."""
    shutil.copytree(folder, out)
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | keys))
    return out


def test_other_models_are_refused_by_name(three, model, convert, tmp_path):
    def refusal(other: Path) -> str:
        ran = convert("average", three[0], other, tmp_path / "out")
        assert ran.code == 5, ran.err
        return ran.err

    assert "norm_epsilon: 1e-06 | 0.001" in refusal(changed(three[1], tmp_path / "eps", rms_norm_eps=1e-3))
    assert "own_key: None | 3" in refusal(changed(three[1], tmp_path / "own", own_key=3))
    assert "family: llama | qwen2" in refusal(model("qwen2-tied"))
    assert "tied: True | False" in refusal(model("llama"))
    assert "--dtype says which one the mean has" in refusal(model(MODEL, "bfloat16"))
    assert convert("average", three[0], model(MODEL, "bfloat16"), tmp_path / "out", "--dtype", "bf16").code == 0
    ran = convert("average", three[0], three[0], tmp_path / "twice")
    assert (ran.code, "is named twice" in ran.err) == (2, True)
    ran = convert("average", three[0], three[1], three[0] / "inside")
    assert (ran.code, "inside each other" in ran.err) == (7, True)


def test_settings_of_a_model_without_a_table(convert, tmp_path):
    """Nothing says which key of a config matters, so that each does."""
    with quiet():
        build(WITHOUT_TABLE, 3).save_pretrained(tmp_path / "one")
    base = tmp_path / "one"
    same = changed(base, tmp_path / "same", transformers_version="9", use_cache=False, dtype="bfloat16")
    other = changed(base, tmp_path / "other", rms_norm_eps=0.5)
    layered = [
        changed(base, tmp_path / kind, layer_types=[kind] * 3) for kind in ("full_attention", "linear_attention")
    ]
    assert convert("average", base, same, tmp_path / "mean").code == 0
    assert convert("average", base, layered[0], tmp_path / "mean of one that does not say").code == 0
    assert [convert(*argv, base, same).code for argv in (["diff"], ["verify"])] == [0, 0]
    for first, second, key in ((base, other, "rms_norm_eps: "), (*layered, "layer_types: ")):
        ran = convert("average", first, second, tmp_path / "out")
        assert (ran.code, key in ran.err) == (5, True), ran.err
        for command in ("diff", "verify"):
            ran = convert(command, first, second)
            assert (ran.code != 0, key in ran.out + ran.err) == (True, True), ran.err


@pytest.mark.parametrize("kind", ["qwen2", "qwen2_moe", "qwen3"])
def test_layers_that_one_config_leaves_to_its_class(convert, model, tmp_path, kind):
    """Without a table, `layer_types` was compared only where both configs have it."""
    window = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    silent = changed(model(kind), tmp_path / "silent", **window)
    config = json.loads((silent / "config.json").read_text())
    (silent / "config.json").write_text(json.dumps({key: config[key] for key in config if key != "layer_types"}))
    derived = AutoConfig.from_pretrained(silent).layer_types
    assert {*derived} == {FULL, SLIDING}
    same = changed(silent, tmp_path / "same", layer_types=derived)
    assert [convert(command, silent, same).code for command in ("diff", "verify")] == [0, 0]
    for number, layers in enumerate(([SLIDING] * len(derived), derived[::-1])):
        other = changed(silent, tmp_path / f"other{number}", layer_types=layers)
        for argv in (["diff", silent, other], ["diff", other, silent], ["verify", other, silent]):
            ran = convert(*argv)
            assert (ran.code, "layer_types: " in ran.out + ran.err) == (6, True), ran.err
        ran = convert("average", silent, other, tmp_path / "mean")
        assert (ran.code, "layer_types: " in ran.err) == (5, True), ran.err


@pytest.mark.parametrize("key", [{"time_step_limit": [0.1, 0.2]}, {"rescale_prenorm_residual": True}])
def test_what_a_mamba2_computes_with(convert, model, tmp_path, key):
    """Its class clamps the time steps, and divides weights of the second; no table knew the keys."""
    base, (name,) = model("mamba2"), key
    other = changed(base, tmp_path / "other", **key)
    for command in ("diff", "verify"):
        ran = convert(command, base, other)
        assert (ran.code, f"{name}: " in ran.out + ran.err) == (6, True), ran.err
    assert convert("hf2fsdp", base, tmp_path / "run").code == 0
    ran = convert("fsdp2hf", tmp_path / "run", tmp_path / "hf", "--config", other)
    assert (ran.code, f"{name}: " in ran.err) == (5, True), ran.err


@pytest.mark.parametrize("name", ["mamba2", "bamba"])
def test_infinity_as_transformers_4_spells_it(convert, model, tmp_path, name):
    base = model(name)
    other = changed(base, tmp_path / "other", time_step_limit=[0.0, float("inf")])
    assert "Infinity]" in (other / "config.json").read_text()
    for command in ("diff", "verify"):
        ran = convert(command, base, other)
        assert (ran.code, "time_step_limit" in ran.out + ran.err) == (0, False), ran.err


def test_whether_a_token_sees_those_after_it(convert, tmp_path):
    """transformers takes null for false, and a config without the key for true: null counted as no key."""
    with quiet():
        build("cohere", 3).save_pretrained(tmp_path / "one")
    other = changed(tmp_path / "one", tmp_path / "other", is_causal=None)
    same = changed(tmp_path / "one", tmp_path / "same", is_causal=True)
    logits = [logits_of(folder) for folder in (tmp_path / "one", same, other)]
    assert np.array_equal(*logits[:2])
    assert not np.allclose(*logits[1:], atol=1e-7)
    for command in ("diff", "verify"):
        assert convert(command, tmp_path / "one", same).code == 0
        ran = convert(command, tmp_path / "one", other)
        assert (ran.code, "is_causal: True | None" in ran.out + ran.err) == (6, True), ran.err
    assert convert("average", tmp_path / "one", other, tmp_path / "mean").code == 5


def test_shapes_of_a_model_without_a_table(convert, tmp_path):
    """What of a tensor is named in neither config: its rows."""
    with quiet():
        build(WITHOUT_TABLE, 3).save_pretrained(tmp_path / "one")
    other = changed(tmp_path / "one", tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    name = next(name for name, tensor in tensors.items() if tensor.ndim == 2)
    save_file(tensors | {name: tensors[name][:-1]}, other / "model.safetensors", {"format": "pt"})
    ran = convert("average", tmp_path / "one", other, tmp_path / "out")
    assert (ran.code, f"1 tensor differs in shape, such as {name}" in ran.err) == (5, True), ran.err


def test_tensors_in_another_order_and_names_of_another_file(convert, tmp_path):
    """A DCP lists the tensors of a model without a table in another order than its Hugging Face files."""
    import torch.distributed.checkpoint as dcp

    with quiet():
        made = build("opt", 3)
        made.save_pretrained(tmp_path / "hf")
    weights = load_file(tmp_path / "hf/model.safetensors")
    other = {name: tensor * 3 for name, tensor in made.state_dict().items()}
    dcp.save({"model": other}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    shutil.copy(tmp_path / "hf/config.json", tmp_path / "dcp")
    for pair in (("hf", "dcp"), ("dcp", "hf")):
        ran = convert("average", *(tmp_path / name for name in pair), tmp_path / "out", "--force")
        assert ran.code == 0, ran.err
        mean = load_file(tmp_path / "out/model.safetensors")
        assert all(np.array_equal(mean[name], (tensor + 3 * tensor) / 2) for name, tensor in weights.items())


def test_names_that_change_on_the_way(convert, tmp_path):
    with quiet():
        build("phimoe", 3).save_pretrained(tmp_path / "hf")
    for name in "ab":
        assert convert("hf2fsdp", tmp_path / "hf", tmp_path / name, "--ranks", len(name)).code == 0
    ran = convert("average", tmp_path / "a", tmp_path / "b", tmp_path / "out")
    assert (ran.code, "convert each to Hugging Face first" in ran.err) == (4, True), ran.err
    digests = [convert("digest", tmp_path / name) for name in ("hf", "a")]
    assert digests[0].out.split()[0] != digests[1].out.split()[0]
    note = "note: the digest of a phimoe, which no table describes, is that of its tensors under the names"
    assert all(note in ran.err for ran in digests)
    for pair in (("hf", "a"), ("a", "hf")):
        ran = convert("average", *(tmp_path / name for name in pair), tmp_path / "out")
        assert (ran.code, "no table connects them" in ran.err) == (4, True), ran.err
        assert f"{tmp_path / 'a'} has the tensor names of memory and {tmp_path / 'hf'} those of files" in ran.err


def test_integers_have_to_be_equal(model, convert, tmp_path):
    folders = []
    for number in range(2):
        folder = tmp_path / f"model{number}"
        shutil.copytree(model("llama"), folder)
        tensors = load_file(folder / "model.safetensors") | {"model.table": np.arange(5)}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        folders.append(folder)
    options = ["--verbatim", "--allow-missing", "model.table"]
    assert convert("average", *folders, tmp_path / "out", *options).code == 0
    assert (load_file(tmp_path / "out/model.safetensors")["model.table"] == np.arange(5)).all()
    tensors["model.table"][3] = 7
    save_file(tensors, folders[1] / "model.safetensors", {"format": "pt"})
    ran = convert("average", *folders, tmp_path / "other", *options)
    assert ran.code == 5
    assert "model.table is I64, which has no mean, and differs between" in ran.err


def test_a_value_that_is_not_finite_has_no_mean_and_one_too_large_is_refused(three, convert, tmp_path):
    folder = tmp_path / "odd"
    shutil.copytree(three[0], folder)
    tensors = load_file(folder / "model.safetensors")
    for value in (np.nan, np.inf, -np.inf):
        tensors["model.norm.weight"][3] = value
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        ran = convert("average", three[1], folder, tmp_path / "no")
        words = f"{folder}/model.safetensors holds NaN or infinity in model.norm.weight"
        assert (ran.code, words in ran.err, (tmp_path / "no").exists()) == (5, True, False), ran.err
    tensors["model.norm.weight"][2:4] = [3e38, 1]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert convert("average", folder, three[1], tmp_path / "out").code == 0
    got = load_file(tmp_path / "out/model.safetensors")["model.norm.weight"][:3]
    assert got[2] == np.float32(1.5e38)
    ran = convert("average", folder, three[1], tmp_path / "half", "--dtype", "fp16")
    assert (ran.code, "too large for F16" in ran.err) == (5, True)
    ran = convert("average", *three, tmp_path / "much", "--weights", "1e300,-1e300,1")
    assert (ran.code, "too large for F32 (" in ran.err, "hint: smaller --weights" in ran.err) == (5, True, True), (
        ran.err
    )


def test_round_once_is_the_nearest():
    """Where two roundings would differ from one: a float64 beside the middle of two bfloat16."""
    middle = np.float64(1 + 2**-8)
    values = np.array([middle, middle * (1 + 2**-40), middle * (1 - 2**-40), -middle * (1 + 2**-40), 0.0, 1e-45, 3e38])
    dice = np.random.default_rng(1)
    values = np.concatenate([values, dice.standard_normal(10000) * 10.0 ** dice.integers(-30, 30, 10000)])
    got = casts.round_once(values, "BF16", "x", np.empty(len(values), np.uint16))
    assert (got.view(ml_dtypes.bfloat16) == nearest_bfloat16(values)).all()
    assert casts.cast(casts.as_words(values), "F64", "BF16", "x")[1] != got[1]  # what torch does


def test_parts_and_memory_give_the_same_bytes(three, convert, tmp_path):
    assert convert("average", *three, tmp_path / "one").code == 0
    for part in ("1/2", "2/2"):
        assert convert("average", *three, tmp_path / "two", "--part", part, "--memory", "192KiB").code == 0
    assert convert("average", *three, tmp_path / "two", "--memory", "192KiB").code == 0
    assert files(tmp_path / "one") == files(tmp_path / "two")


def test_sums_are_in_the_memory_too(model, convert, tmp_path):
    """They are four times as large as what is read of bfloat16: a tile is as small as they need."""
    import tracemalloc

    source = model(MODEL, "bfloat16", vocab_size=65536)
    argv = ("average", source, shutil.copytree(source, tmp_path / "copy"), tmp_path / "out", "-j1", "--memory", "16MiB")
    assert convert(*argv, "-n").code == 0, "what is imported and planned once is no part of it"
    tracemalloc.start()
    try:
        ran = convert(*argv)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert ran.code == 0, ran.err
    assert peak < 50 << 20


def test_masters_of_a_real_training(convert, tmp_path):
    """GPT-NeoX's, twice: their mean is what `--weights fp32-master` takes of each."""
    run = Path(__file__).parents[1] / "golden/neox/llama-bf16-optimizer-tp2"
    shutil.copytree(run, tmp_path / "copy")
    options = ["--vocab-size", 101, "--gqa-layout", "blocked"]
    ran = convert("average", run, tmp_path / "copy", tmp_path / "out", *options, "--dtype", "fp32")
    assert ran.code == 0, ran.err
    ran = convert("neox2hf", run, tmp_path / "one", *options, "--weights", "fp32-master")
    assert ran.code == 0, ran.err
    masters, mean = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "out"))
    assert {name: tensor.tobytes() for name, tensor in masters.items()} == {
        name: tensor.tobytes() for name, tensor in mean.items()
    }
