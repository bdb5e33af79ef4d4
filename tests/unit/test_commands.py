"""The commands as a user meets them: what they print, and their exit codes."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from pathlib import Path

import click
import pytest

import vitruvian
from converters.cli import cli as convert_cli
from converters.commands.options import Size
from converters.common.hub_names import READ, WRITTEN, scheme_of
from formats import families
from formats.errors import UsageError
from formats.model import accepted
from formats.registry import FORMATS
from tests.faults.dcp_tools import refused
from tests.megatron_runs import with_args
from tests.models import build, files, settings_of
from train.cli import cli as train_cli


def test_help_names_every_command_and_exit_code(convert):
    text = convert("--help").out
    for word in (
        "hf2megatron",
        "megatron2hf",
        "reshard",
        "inspect",
        "plan",
        "explain",
        "formats",
        "digest",
        "verify",
        "diff",
    ):
        assert word in text
    assert "75 interrupted" in text


@pytest.mark.parametrize(
    "argv", [["nonsense"], ["inspect"], ["inspect", "a", "--tp", "2"], ["hf2megatron", "a", "b", "--tp", "0"]]
)
def test_usage_errors_are_2(convert, argv):
    assert convert(*argv).code == 2


def test_a_second_path_for_one_option_is_refused(convert, train):
    """GPT-NeoX itself takes several files, where click takes the last one without a word."""
    for ran, option in (
        (convert("neox2hf", "NEOX", "OUT", "--config", "model.yml", "--config=run.yml"), "--config"),
        (train("bench", "HF", "--out", "A", "--out", "A"), "--out"),
    ):
        assert (ran.code, f"{option} is given twice, and takes one path" in ran.err) == (2, True), ran.err


@pytest.mark.parametrize(
    "argv",
    [
        ["digest", ""],
        ["hf2megatron", "", "OUT"],
        ["hf2megatron", "HF", ""],
        ["megatron2hf", "MEGATRON", "OUT", "--config", ""],
        ["neox2hf", "NEOX", "OUT", "--tokenizer", ""],
        ["inspect", "HF", "--family", ""],
        ["megatron2hf", "MEGATRON", "OUT", "--chat-template", ""],
        ["fsdp2hf", "MEGATRON", "OUT", "--push", ""],
        ["push", "HF", ""],
    ],
)
def test_an_empty_path_is_not_the_current_folder(model, convert, tmp_path, monkeypatch, argv):
    """As that of a variable which was never set, `--config "$BASE"`."""
    monkeypatch.chdir(model())
    places = {word: tmp_path / word.lower() for word in ("OUT", "MEGATRON", "NEOX")} | {"HF": model()}
    ran = convert(*(places.get(word, word) for word in argv))
    refused(ran, 2, "it is empty")
    assert "Invalid value for" in ran.err
    assert not (tmp_path / "out").exists()


def _paths(command, before):
    """Each argument and option of the commands of a group that is a path, with the words that name its command."""
    if isinstance(command, click.Group):
        for name, member in command.commands.items():
            yield from _paths(member, (*before, name))
        return
    for parameter in command.params:
        if isinstance(parameter.type, click.Path):
            yield before, command, parameter


EVERY_PATH = [
    found for name, group in (("convert", convert_cli), ("train", train_cli)) for found in _paths(group, (name,))
]


@pytest.mark.parametrize(
    ("command", "parameter"),
    [found[1:] for found in EVERY_PATH],
    ids=[f"{' '.join(words)} {parameter.name}" for words, _, parameter in EVERY_PATH],
)
def test_no_path_is_an_address_that_is_not_taken(tmp_path, monkeypatch, command, parameter):
    """As a path, it would be that of a folder `s3:` here."""
    monkeypatch.chdir(tmp_path)
    Path("a:b/c").mkdir(parents=True)
    context = click.Context(command)
    assert parameter.type.taken in ((), READ, WRITTEN)
    for scheme in (
        "s3",
        "gs",
        "az",
        "hf",
        "https",
        "S3",
        "HF",
        "Https",
        "gcs",
        "abfs",
        "ftp",
        "memory",
        "file",
        "File",
    ):
        if scheme in parameter.type.taken:
            assert scheme_of(parameter.type.convert(f"{scheme}://one/two", parameter, context)) == scheme
            with pytest.raises(UsageError, match=f"{scheme}:// is no whole address"):
                parameter.type.convert(f"{scheme}://", parameter, context)
            continue
        for address in (f"{scheme}://one/two", f"{scheme}:///one/two", f"{scheme}:/one/two"):
            with pytest.raises(UsageError, match=re.escape(address)):
                parameter.type.convert(address, parameter, context)
    assert parameter.type.convert("a:b/c", parameter, context) == Path("a:b/c")


@pytest.mark.parametrize(
    ("argv", "message", "hint"),
    [
        (["hf2hf", "HF", "S3://bucket/m"], "S3://bucket/m: the scheme S3 is not known", "it is written s3://…"),
        (["hf2hf", "HF", "HF://acme/m"], "HF://acme/m: the scheme HF is not known", "it is written hf://…"),
        (["hf2hf", "HF", "gcs://bucket/m"], "gcs:// can be neither read nor written", "s3://…, gs://…, az://…, hf://…"),
        (["to", "hf", "HF", "memory://m"], "memory:// can be neither read nor written", "a folder of this machine"),
        (["hf2hf", "HF", "file:///one/two"], "file:///one/two is an address", "write the path alone: /one/two"),
        (["hf2hf", "HF", "https://one/two"], "https://one/two can be read, and not written", "hf://…"),
        (["digest", "ftp://one/two"], "ftp:// can be neither read nor written", "http://…"),
        (["watch", "HF", "--out", "s3://b/m", "--once"], "s3://b/m is an address, and only a path of this machine", ""),
        (["inspect", "HF", "--html", "s3://b/p.html"], "s3://b/p.html is an address, and only a path", ""),
    ],
)
def test_an_address_that_is_not_taken_is_refused(model, convert, tmp_path, monkeypatch, argv, message, hint):
    monkeypatch.chdir(tmp_path)
    refused(convert(*(model() if word == "HF" else word for word in argv)), 2, message, hint)
    assert not [*tmp_path.iterdir()]


def test_the_library_takes_no_other_addresses(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for out in ("gcs://bucket/m", Path("S3://bucket/m"), "file:///one/two"):
        with pytest.raises(UsageError):
            vitruvian.convert(model(), out)
    with pytest.raises(UsageError, match="only a path of this machine"):
        vitruvian.exporter("s3://bucket/models")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("argv", [["run", ""], ["eval", "RUN", "--checkpoint", ""], ["eval", "RUN", "--ppl", ""]])
def test_no_command_of_train_takes_an_empty_path(train, argv):
    refused(train(*argv), 2, "it is empty")


@pytest.mark.parametrize(
    ("argv", "flags"),
    [
        (["digest", "HF"], ["--container", "model"]),
        (["digest", "HF"], ["--weights", "module"]),
        (["inspect", "MEGATRON"], ["--verbatim"]),
        (["neox2hf", "NEOX", "OUT"], ["--verbatim"]),
        (["verify", "HF", "MEGATRON"], ["--container", "model"]),
        (["diff", "HF", "MEGATRON"], ["--weights", "fp32-master"]),
        (["reshard", "MEGATRON", "OUT"], ["--layout", "pipeline"]),
        (["reshard", "MEGATRON", "OUT"], ["--gqa-layout", "blocked"]),
        (["reshard", "MEGATRON", "OUT"], ["--tag", "global_step1"]),
        (["reshard", "NEOX", "OUT"], ["--norm", "te"]),
        (["plan", "HF", "--to", "huggingface"], ["--tp", 2]),
        (["plan", "HF", "--to", "neox"], ["--vpp", 2]),
        (["plan", "HF", "--to", "fsdp"], ["--ep", 2]),
        (["plan", "HF", "--to", "megatron-llm"], ["--experts", "te"]),
        (["explain", "huggingface", "q_proj"], ["--tp", 4]),
    ],
    ids=str,
)
def test_options_without_an_effect_are_refused(model, convert, tmp_path, argv, flags):
    places = {"HF": model("llama"), **{name: tmp_path / name for name in ("MEGATRON", "NEOX", "OUT")}}
    convert("hf2megatron", model("llama"), places["MEGATRON"])
    convert("hf2neox", model("llama"), places["NEOX"])
    argv = [places.get(word, word) for word in argv]
    ran = convert(*argv, *flags)
    assert ran.code == 2, ran.err
    assert f"error: {flags[0]} has no effect on " in ran.err
    assert not places["OUT"].exists()
    assert convert(*argv).code == 0


@pytest.mark.parametrize(
    "argv",
    [
        ("hf2hf", "HF", "OUT"),
        ("reshard", "MEGATRON", "OUT"),
        ("average", "HF", "HF", "OUT"),
        ("neox2hf", "NEOX", "OUT"),
        ("plan", "HF", "--to", "megatron"),
        ("verify", "MEGATRON"),
        ("diff", "HF", "NEOX"),
    ],
    ids=str,
)
def test_a_deviation_that_is_none_is_refused(model, convert, tmp_path, argv):
    places = {"HF": model("llama"), **{name: tmp_path / name for name in ("MEGATRON", "NEOX", "OUT")}}
    convert("hf2megatron", model("llama"), places["MEGATRON"])
    convert("hf2neox", model("llama"), places["NEOX"])
    ran = convert(*(places.get(word, word) for word in argv), "--accept", "rope_scaling_facto")
    refused(ran, 2, "--accept 'rope_scaling_facto': there is no such deviation", "known: global_steps, ")
    assert not places["OUT"].exists()


def test_help_lists_the_deviations(convert):
    for name in ("hf2megatron", "megatron2hf", "zero2universal", "average"):
        text = "".join(convert(name, "--help").out.split())  # a line may end at a hyphen within a name
        assert all(deviation in text for deviation in accepted.KNOWN)


def test_an_argument_of_one_of_two_runs_is_accepted(model, convert, tmp_path):
    convert("hf2megatron", model("llama"), tmp_path / "run")
    own = with_args(tmp_path / "run", tmp_path / "own", my_scale=0.5)
    assert convert("average", model("llama"), own, tmp_path / "out", "--accept", "my_scale").code == 0
    assert convert("diff", model("llama"), own, "--accept", "my_scale").code == 0
    refused(convert("diff", model("llama"), tmp_path / "run", "--accept", "my_scale"), 2, "'my_scale': there is no")


def test_an_option_for_one_of_two_checkpoints(model, convert, tmp_path):
    convert("hf2fsdp", model("llama"), tmp_path / "fsdp")
    for argv in (["verify", tmp_path / "fsdp", model("llama")], ["diff", model("llama"), tmp_path / "fsdp"]):
        assert "has no effect" not in convert(*argv, "--container", "model").err
    assert convert("verify", tmp_path / "fsdp", model("llama"), "--verbatim").code == 0


@pytest.mark.parametrize(
    ("name", "bias"), [("attention_bias", "self_attn.k_proj.bias"), ("mlp_bias", "mlp.down_proj.bias")]
)
def test_a_config_with_biases_that_the_files_lack(model, convert, tmp_path, name, bias):
    """No table describes such a Llama, and transformers would give it random ones."""
    import torch
    from safetensors.torch import load_file, save_file

    source = tmp_path / "source"
    shutil.copytree(model("llama"), source)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {name: True}))
    ran = convert("hf2fsdp", source, tmp_path / "out")
    assert ran.code == 3
    assert f"says {name} = True, and " in ran.err
    assert f"biases are missing, such as model.layers.0.{bias}" in ran.err
    tensors = load_file(source / "model.safetensors")
    part = bias.partition(".")[0]
    weights = [key for key in tensors if f".{part}." in key]
    biases = {key.replace(".weight", ".bias"): torch.zeros(len(tensors[key])) for key in weights}
    save_file({**tensors, **biases}, source / "model.safetensors", {"format": "pt"})
    assert convert("hf2fsdp", source, tmp_path / "out").code == 0
    del biases[f"model.layers.3.{bias}"]
    save_file({**tensors, **biases}, source / "model.safetensors", {"format": "pt"})
    assert f"1 of {len(biases) + 1} biases are missing" in convert("hf2fsdp", source, tmp_path / "again").err


def test_a_query_beside_latents_has_no_bias(tmp_path, convert):
    """DeepSeek-V3 without q_lora_rank: biases are those of kv_a_proj_with_mqa and o_proj."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**settings_of("deepseek_v3"), attention_bias=True)
    config.q_lora_rank = None
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / "hf")
    ran = convert("hf2hf", tmp_path / "hf", tmp_path / "out")
    assert (ran.code, "no table checks the names" in ran.err) == (0, True), ran.err


def test_a_tensor_without_a_name_is_refused(model, convert, tmp_path):
    import torch
    from safetensors.torch import load_file, save_file

    source = shutil.copytree(model("llama"), tmp_path / "source")
    save_file(load_file(source / "model.safetensors") | {"": torch.zeros(2)}, source / "model.safetensors")
    refused(convert("hf2hf", source, tmp_path / "out", "--verbatim"), 4, "shape [2] has an empty name")


def test_what_cannot_be_deleted_after_the_output_is_complete(model, convert, tmp_path, monkeypatch):
    delete = shutil.rmtree

    def busy(path, *given, **named):
        if Path(path) == tmp_path / "out.partial":
            raise OSError(errno.EBUSY, "Device or resource busy", str(path))
        delete(path, *given, **named)

    monkeypatch.setattr(shutil, "rmtree", busy)
    refused(
        convert("hf2hf", model("llama"), tmp_path / "out"), 7, "out is complete and in its place; after that", "busy"
    )
    assert convert("verify", tmp_path / "out").code == 0


def test_inspect_says_what_it_is(model, convert, tmp_path):
    source = model("qwen3")
    facts = json.loads(convert("inspect", source, "--json", "--tensors").out)
    assert (facts["format"], facts["settings"]["family"], facts["settings"]["head_dim"]) == ("huggingface", "qwen3", 16)
    assert facts["tensors"] == len(facts["list"]) == 4 * 11 + 3
    convert("hf2megatron", source, tmp_path / "m", "--tp", 2, "--pp", 2, "--iteration", 12)
    facts = json.loads(convert("inspect", tmp_path / "m/iter_0000012", "--json").out)
    assert (facts["topology"], facts["iteration"], facts["padded_vocab"]) == ({"tp": 2, "pp": 2}, 12, 256)
    text = convert("inspect", tmp_path / "m").out
    assert all(line.split()[-1] not in ("None", "True", "False") for line in text.splitlines())
    assert [" ".join(line.split()) for line in text.splitlines() if line.startswith(("  rope_scaling", "  tied"))] == [
        "rope_scaling none",
        "tied false",
    ]
    assert "megatron, tp 2, pp 2, iter_0000012" in text
    assert "tokenizer.model" in text


def test_the_plan_lists_what_changes_and_what_is_written(model, convert, tmp_path):
    text = convert("plan", model("llama"), "--to", "megatron", "--tp", 2, "--dtype", "bf16", "--blocks").out
    assert "cast F32 to BF16 in 39 tensors" in text
    assert "fill   5760 elements of vocabulary padding with zeros" in text
    assert "release/mp_rank_01/model_optim_rng.pt" in text
    assert "gate.3 F32[1, 96, 64]" in text
    assert "change nothing: all bits are kept" in convert("plan", model("llama"), "--to", "huggingface").out
    ran = convert("hf2megatron", model("llama"), tmp_path / "out", "--tp", 2, "-n", "--json")
    assert json.loads(ran.out)["edges"] == {}
    assert list(tmp_path.iterdir()) == []


def test_explain_draws_the_fused_projection(model, convert):
    text = convert("explain", "megatron", "linear_qkv.weight", "--model", model("llama"), "--tp", 2).out
    for line in (
        "0 .. 15  query        group 0",
        "16 .. 23  key          group 0",
        "24 .. 31  value        group 0 dim 0..7",
    ):
        assert line in text
    assert "head = 2" in text
    refused = convert("explain", "megatron", "linear_fc1.weight", "--model", model("llama"), "--tp", 5)
    assert "refused for tp = 5" in refused.out
    assert "q_proj" in convert("explain", "huggingface").out
    assert convert("explain", "megatron", "no_such_key").code == 2
    assert convert("explain", "nothing").code == 2


def test_explain_names_every_table_that_has_a_rule(convert):
    text = convert("explain", "huggingface", "q_proj.weight").out
    shared = next(line for line in text.splitlines() if "dots1" in line)
    assert {"llama", "mistral", "qwen3"} <= set(shared.partition(":")[0].split(", "))
    assert "-1" not in text  # of DeepSeek's latents, which the example has not
    assert "no such tensor in this model" in text


def test_formats_lists_formats_and_families(convert):
    assert "not in Megatron: megatron-core multiplies neither" in convert("formats").out
    facts = json.loads(convert("formats", "--json").out)
    assert set(facts["formats"]) == {*FORMATS}
    files = {path.stem for path in Path(families.__file__).parent.glob("*.py")} - {"__init__", *families.NO_FAMILIES}
    assert len(facts["families"]) == len(files)
    assert {"llama", "gpt_neox", "gemma3_text", "falcon_40b"} <= {*facts["families"]}


def test_diff_finds_one_changed_weight_and_says_by_how_much(model, convert, tmp_path):
    import torch
    from safetensors.torch import load_file, save_file

    source, other = model("llama"), tmp_path / "other"
    shutil.copytree(source, other)
    tensors = load_file(other / "model.safetensors")
    tensors["model.layers.2.mlp.up_proj.weight"][3, 5] += 0.5
    tensors["model.norm.weight"][0] = torch.nan
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    convert("hf2megatron", source, tmp_path / "m", "--tp", 2)
    ran = convert("diff", tmp_path / "m", other, "--json")
    assert ran.code == 6
    differing = {entry["name"]: entry for entry in json.loads(ran.out)["tensors"]}
    assert set(differing) == {"up.2", "final_norm"}
    assert differing["up.2"]["elements"] == 1
    assert differing["up.2"]["largest"] == pytest.approx(0.5)
    assert differing["final_norm"]["largest"] == float("inf")
    assert "up.2" in convert("verify", tmp_path / "m", other).err


@pytest.mark.parametrize("form", ["neox", "nanotron"])
@pytest.mark.parametrize("config", ["its own", "none"])
def test_a_setting_that_differs_from_the_config_of_the_other_side_is_a_difference(
    model, convert, tmp_path, form, config
):
    """The config that a checkpoint without one borrows there contradicts it."""
    run, other = tmp_path / "run", tmp_path / "other"
    assert convert("to", form, model("llama"), run).code == 0
    if config == "none":
        shutil.rmtree(run / "huggingface")
    assert convert("diff", run, model("llama")).code == 0
    build(other, "llama", "float32", rms_norm_eps=0.125)
    own = json.loads((model("llama") / "config.json").read_text())["rms_norm_eps"]
    ran = convert("diff", run, other)
    assert (ran.code, f"setting norm_epsilon: {own} | 0.125\n" in ran.out) == (6, True), ran.err
    ran = convert("diff", other, run)
    assert (ran.code, f"setting norm_epsilon: 0.125 | {own}\n" in ran.out) == (6, True), ran.err
    refused(convert("verify", other, run), 6, f"norm_epsilon: 0.125 | {own}")
    refused(convert("diff", run, model("llama"), "--config", other), 5, "contradict each other")


def test_diff_compares_types_as_numbers_and_settings_by_name(model, convert, tmp_path):
    source = model("llama", "bfloat16")
    convert("hf2megatron", source, tmp_path / "wide", "--dtype", "fp32")
    ran = convert("diff", source, tmp_path / "wide")
    assert ran.code == 6
    assert "BF16 | F32" in ran.out
    assert "elements differ" not in ran.out
    other = tmp_path / "other"
    shutil.copytree(source, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-5}))
    ran = convert("diff", source, other)
    assert ran.code == 6
    assert "setting norm_epsilon: 1e-06 | 1e-05" in ran.out


@pytest.mark.parametrize(("there", "bits"), [(-0.0, 0x8000), (float("nan"), 0x7FC1)])
def test_diff_and_verify_look_at_bits(model, convert, tmp_path, there, bits):
    """A zero with a sign, and a NaN with another payload, are no other numbers, and other weights."""
    import torch
    from safetensors.torch import load_file, save_file

    here = torch.tensor(there).abs().bfloat16()
    folders = [shutil.copytree(model("llama", "bfloat16"), tmp_path / name) for name in "ab"]
    for folder, value in zip(folders, (here, torch.tensor(bits, dtype=torch.uint16).view(torch.bfloat16)), strict=True):
        tensors = load_file(folder / "model.safetensors")
        tensors["model.norm.weight"][:3] = value
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert convert("verify", *folders).code == 6
    ran = convert("diff", *folders)
    assert ran.code == 6
    assert " ".join(ran.out.split()) == "model.norm.weight bits of zeros or NaN 3 elements differ by up to 0"


@pytest.mark.parametrize(
    ("dtype", "there", "name"),
    [("float32", "bf16", "bfloat16"), ("bfloat16", "fp32", "float32"), ("float32", "fp16", "float16")],
)
def test_casts_are_those_of_transformers(model, convert, tmp_path, dtype, there, name):
    """A cast on the way gives the file that transformers saves in that type, config included."""
    source, expected = model("llama", dtype), model("llama", name)
    convert("hf2megatron", source, tmp_path / "m", "--tp", 2, "--dtype", there)
    assert convert("megatron2hf", tmp_path / "m", tmp_path / "h").code == 0
    if dtype == "float32":
        assert files(tmp_path / "h") == files(expected)
    else:
        config = json.loads((tmp_path / "h/config.json").read_text())
        assert config["dtype"] == name
    assert convert("verify", tmp_path / "h", tmp_path / "m").code == 0


@pytest.mark.parametrize(("there", "back"), [("hf2megatron", "megatron2hf"), ("hf2neox", "neox2hf")])
def test_the_type_that_a_config_names_is_that_of_the_weights(model, convert, tmp_path, there, back):
    """A run beside the config of a model of another type; a config that names none is left alone."""
    assert convert(there, model(), tmp_path / "run").code == 0
    (path,) = tmp_path.rglob("config.json")
    config = json.loads(path.read_text())
    for name, about in (("other", {"dtype": "bfloat16"}), ("none", {})):
        path.write_text(json.dumps({key: value for key, value in config.items() if key != "dtype"} | about))
        assert convert(back, tmp_path / "run", tmp_path / name).code == 0
    assert json.loads((tmp_path / "other/config.json").read_text())["dtype"] == "float32"
    assert (tmp_path / "none/config.json").read_bytes() == path.read_bytes()


def test_an_explicit_tied_head_is_compared_and_comes_back(model, convert, tmp_path):
    from safetensors.torch import load_file, save_file

    source = tmp_path / "source"
    shutil.copytree(model("llama-tied"), source)
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    assert convert("digest", source).out.split()[0] == convert("digest", model("llama-tied")).out.split()[0]
    convert("hf2megatron", source, tmp_path / "m", "--pp", 2)
    assert convert("megatron2hf", tmp_path / "m", tmp_path / "h").code == 0
    assert files(tmp_path / "h") == files(source)
    tensors["lm_head.weight"][7, 7] += 1
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    ran = convert("hf2megatron", source, tmp_path / "other")
    assert ran.code == 6
    assert (
        f"should share model.embed_tokens.weight and differs from it by up to 1 in {source}/model.safetensors\n"
        in ran.err
    )
    assert "by up to 1 " in ran.err


def test_a_plan_for_hf_is_one_for_huggingface(model, convert):
    ran, other = (convert("plan", model(), "--to", to) for to in ("hf", "huggingface"))
    assert (ran.code, ran.out) == (0, other.out), ran.err


@pytest.mark.parametrize(("text", "value"), [("5GB", 5 * 10**9), ("64MiB", 64 << 20), ("1.5 kB", 1500), ("7000", 7000)])
def test_sizes(text, value):
    assert Size().convert(text, None, None) == value


@pytest.mark.parametrize("text", ["", "GB", "-1", "5 parsecs", "0"])
def test_sizes_that_are_none(text):
    with pytest.raises(click.BadParameter):
        Size().convert(text, None, None)


def test_an_unknown_vocabulary_is_never_guessed(model, convert, tmp_path):
    """A run of Megatron's own knows only the padded size; everything but moving weights still works."""
    import torch

    source = model("llama")
    convert("hf2megatron", source, tmp_path / "m")
    shutil.rmtree(tmp_path / "m/huggingface")
    (tmp_path / "m/release/vitruvian.json").unlink()
    path = tmp_path / "m/release/mp_rank_00/model_optim_rng.pt"
    stored = torch.load(path, weights_only=False)
    del stored["args"].true_vocab_size
    torch.save(stored, path)
    assert "its true vocabulary is unknown" in convert("inspect", tmp_path / "m").out
    for argv in (
        ["megatron2hf", tmp_path / "m", tmp_path / "h"],
        ["reshard", tmp_path / "m", tmp_path / "r"],
        ["digest", tmp_path / "m"],
    ):
        ran = convert(*argv)
        assert ran.code == 5
        assert "it only holds 256 padded rows" in ran.err
        assert "--vocab-size" in ran.err
    assert convert("megatron2hf", tmp_path / "m", tmp_path / "h", "--vocab-size", 211).code == 0
    assert convert("verify", tmp_path / "h", source).code == 0
    assert convert("megatron2hf", tmp_path / "m", tmp_path / "i", "--vocab-size", 300).code == 3
    assert convert("megatron2hf", tmp_path / "m", tmp_path / "i", "--config", source).code == 0
    assert files(tmp_path / "i") == files(source)


def test_the_flags_that_megatron_does_not_take_from_a_checkpoint(model, convert, tmp_path):
    convert("hf2megatron", model("mistral"), tmp_path / "m", "--tp", 2, "--pp", 2, "--vpp", 2)
    flags = (tmp_path / "m/megatron_flags.txt").read_text().split("\n")
    assert "--use-checkpoint-args" in flags
    assert "--window-size 7,0" in flags
    assert "--num-layers-per-virtual-pipeline-stage 1" in flags
    convert("hf2megatron", model("llama3"), tmp_path / "n")
    assert "\n--use-rope-scaling\n" in (tmp_path / "n/megatron_flags.txt").read_text()


def test_two_sets_of_weights_in_one_folder_are_refused(model, convert, tmp_path):
    """transformers would load the single file and leave the shards alone: which one is meant is not for us to say."""
    source = tmp_path / "source"
    shutil.copytree(model("llama", shard="100KB"), source)
    shutil.copy(model("llama") / "model.safetensors", source)
    ran = convert("digest", source)
    assert ran.code == 3
    assert "holds both" in ran.err


def test_rotary_tables_of_old_files_are_dropped_and_the_shards_come_back(model, convert, tmp_path):
    """Llama checkpoints from before transformers 4.32 carry inv_freq."""
    import torch
    from safetensors.torch import load_file, save_file

    source = tmp_path / "source"
    shutil.copytree(model("llama", shard="100KB"), source)
    index = json.loads((source / "model.safetensors.index.json").read_text())
    name = index["weight_map"]["model.norm.weight"]
    tensors = load_file(source / name) | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    save_file(tensors, source / name, {"format": "pt"})
    index["weight_map"]["model.layers.0.self_attn.rotary_emb.inv_freq"] = name
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "what is no weight of the model is not carried: 1 such as" in convert("plan", source, "--to", "megatron").out
    convert("hf2megatron", source, tmp_path / "m", "--tp", 2)
    assert convert("megatron2hf", tmp_path / "m", tmp_path / "h").code == 0
    assert files(tmp_path / "h") == files(model("llama", shard="100KB"))


def test_unknown_settings_are_kept_and_reported(model, convert, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(model("llama"), source)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"my_own_setting": [1, {"a": 2}]}))
    facts = json.loads(convert("plan", source, "--to", "megatron", "--json").out)
    assert "my_own_setting" in facts["residue"]["config.json"]
    assert "num_hidden_layers" not in facts["residue"]["config.json"]
    assert "my_own_setting" in convert("plan", source, "--to", "megatron").out
    convert("hf2megatron", source, tmp_path / "m", "--tp", 2)
    assert (
        "consumed_train_samples"
        in json.loads(convert("plan", tmp_path / "m", "--to", "huggingface", "--json").out)["residue"]["args"]
    )
    assert convert("megatron2hf", tmp_path / "m", tmp_path / "h").code == 0
    assert files(tmp_path / "h") == files(source)


def test_hf2hf_casts_and_cuts_anew(model, convert, tmp_path):
    source = model("qwen2", "float32")
    assert convert("hf2hf", source, tmp_path / "half", "--dtype", "bf16", "--shard-size", "100KB").code == 0
    assert len([*(tmp_path / "half").glob("model-*.safetensors")]) > 1
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"
    assert convert("hf2fsdp", source, tmp_path / "fsdp", "--dtype", "bf16").code == 0
    assert convert("diff", tmp_path / "half", tmp_path / "fsdp").code == 0
    assert convert("hf2megatron", source, tmp_path / "m").code == 0
    assert "this command reads huggingface" in convert("hf2hf", tmp_path / "m", tmp_path / "out").err
    assert "for FSDP use `convert fsdp2hf`" in convert("megatron2hf", tmp_path / "fsdp", tmp_path / "out").err


def test_old_weights_and_states_of_training_do_not_travel(model, convert, tmp_path):
    source = shutil.copytree(model("llama"), tmp_path / "hf")
    for name in ("rust_model.ot", "64.tflite", "model.gguf", "latest", "zero_to_fp32.py", "scheduler.pt"):
        (source / name).write_text("old")
    with (source / "model.llamafile").open("wb") as file:
        file.truncate((64 << 20) + 1)
    (source / "LICENSE").write_text("theirs")
    assert convert("hf2hf", source, tmp_path / "out").code == 0
    assert files(tmp_path / "out") == {**files(model("llama")), "LICENSE": b"theirs"}


@pytest.mark.parametrize(
    ("kind", "scale"),
    [("float8_e4m3fn", "weight_scale_inv"), ("int8", "scale"), ("int8", "SCB"), ("uint8", "weight.absmax")],
)
def test_weights_of_8_bits_are_not_cast_without_their_scales(model, convert, tmp_path, kind, scale):
    """A mask of bytes beside a norm that is called scale goes on, as do the scales of weights that were never small."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(model("llama"), tmp_path / "hf")
    (path,) = (tmp_path / "hf").glob("*.safetensors")
    weights = load_file(path)
    layer = "model.layers.0.mlp.up_proj"
    plain = {"attn.bias": torch.ones(4, dtype=torch.uint8), "norm.scale": torch.ones(4)}
    plain[f"{layer}.{scale}"] = torch.ones(1)
    save_file(weights | plain, path, {"format": "pt"})
    argv = ["hf2hf", tmp_path / "hf", "--verbatim"]
    assert convert(*argv, tmp_path / "plain", "--dtype", "bf16", "-n").code == 0
    small = {f"{layer}.weight": weights[f"{layer}.weight"].to(getattr(torch, kind))}
    save_file(weights | plain | small, path, {"format": "pt"})
    ran = convert(*argv, tmp_path / "out", "--dtype", "bf16")
    assert (ran.code, f"weights of 8 bits with scales, such as {layer}.{scale}" in ran.err) == (4, True), ran.err
    assert convert(*argv, tmp_path / "out").code == 0


@pytest.mark.parametrize("kind", ["float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "complex64"])
def test_what_has_no_cast_is_not_left_as_it_is(model, convert, tmp_path, kind):
    """Out of every format that can hold it, and beside a model that is cast."""
    import torch
    from safetensors.torch import load_file, save_file

    from tests.faults.dcp_tools import save

    plain = load_file(model("llama") / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    weights = plain | {name: plain[name].to(getattr(torch, kind))}
    for folder, tensors in (("hf", weights), ("plain", plain)):
        shutil.copytree(model("llama"), tmp_path / folder)
        save_file(tensors, tmp_path / folder / "model.safetensors", {"format": "pt"})
    (tmp_path / "dump").mkdir()
    torch.save(weights, tmp_path / "dump/pytorch_model_fsdp.bin")
    save(tmp_path / "dcp", {"model": weights})
    base = ["--config", model("llama")]
    for argv in (
        ["hf2hf", tmp_path / "hf"], ["average", tmp_path / "plain", tmp_path / "hf"],
        *([] if kind == "complex64" else [["fsdp2hf", tmp_path / "dump", *base], ["fsdp2hf", tmp_path / "dcp", *base]]),
    ):  # fmt: skip
        ran = convert(*argv, tmp_path / "out", "--dtype", "bf16", "--verbatim")
        message = f"holds {name} as {'C64' if kind == 'complex64' else 'F8_E'}"
        assert (ran.code, message in ran.err, "leave --dtype out" in ran.err) == (4, True, True), ran.err
    ran = convert("hf2fsdp", tmp_path / "hf", tmp_path / "out", "--verbatim")
    assert (ran.code, "which is not written into files of torch.save" in ran.err) == (4, True), ran.err
    assert convert("hf2hf", tmp_path / "hf", tmp_path / "out", "--verbatim").code == 0


def test_quantized_weights_of_any_method_are_not_cast(model, convert, tmp_path):
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(model("llama"), tmp_path / "hf")
    weights = load_file(tmp_path / "hf/model.safetensors")
    packed = weights.pop("model.layers.0.mlp.up_proj.weight").int()
    weights |= {"model.layers.0.mlp.up_proj.qweight": packed, "model.layers.0.mlp.up_proj.scales": torch.ones(4, 8)}
    save_file(weights, tmp_path / "hf/model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "hf/config.json").read_text()) | {"quantization_config": {"quant_method": "gptq"}}
    (tmp_path / "hf/config.json").write_text(json.dumps(config))
    ran = convert("hf2hf", tmp_path / "hf", tmp_path / "out", "--dtype", "bf16", "--verbatim")
    assert (ran.code, "holds quantized weights" in ran.err) == (4, True), ran.err
    assert convert("hf2hf", tmp_path / "hf", tmp_path / "out", "--verbatim").code == 0


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("architectures", ["LLaMAForCausalLM"], "only LlamaForCausalLM: correct `architectures` if its tensors are"),
        ("model_type", "lama", "its class is that of llama: correct `model_type` if it computes the same"),
    ],
)
def test_a_config_that_is_nearly_known_is_told_what_is_wrong(model, convert, tmp_path, key, value, says):
    shutil.copytree(model("llama"), tmp_path / "hf")
    config = json.loads((tmp_path / "hf/config.json").read_text()) | {key: value}
    (tmp_path / "hf/config.json").write_text(json.dumps(config))
    ran = convert("hf2megatron", tmp_path / "hf", tmp_path / "m")
    assert (ran.code, says in ran.err) == (4, True), ran.err


def test_what_is_next_can_be_pasted(model, convert, tmp_path):
    ran = convert("hf2hf", model("llama"), tmp_path / "my model")
    assert f'AutoModelForCausalLM.from_pretrained("{tmp_path}/my model")' in ran.out
    assert f"`convert push '{tmp_path}/my model' ORG/NAME`" in ran.out


def test_a_path_may_be_any_bytes(model, convert, tmp_path):
    source, out = (tmp_path / os.fsdecode(name) for name in (b"hf\xff", b"out\xff"))
    shutil.copytree(model("llama"), source)
    ran = convert("hf2hf", source, out)
    assert ran.code == 0, ran.err
    assert convert("verify", out, source).code == 0
