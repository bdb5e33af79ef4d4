"""Files of axolotl, TRL, LLaMA-Factory and torchtune as settings of ours."""

from __future__ import annotations

import json

import pytest
import yaml

from formats.errors import UsageError
from train.settings.config_file import load_config
from train.settings.other_trainers import TRAINERS
from train.settings.schedule import learning_rate
from train.settings.translation import translate

AXOLOTL = """
base_model: NousResearch/Meta-Llama-3-8B
datasets: [{path: teknium/GPT4-LLM-Cleaned, type: alpaca}]
val_set_size: 0.05
output_dir: ./out
sequence_len: 4096
sample_packing: true
wandb_project: mine
gradient_accumulation_steps: 8
micro_batch_size: 1
num_epochs: 2
optimizer: paged_adamw_8bit
lr_scheduler: cosine
learning_rate: 2e-5
bf16: auto
gradient_checkpointing: true
flash_attention: true
warmup_steps: 100
evals_per_epoch: 2
saves_per_epoch: 1
weight_decay: 0.0
fsdp_config: {fsdp_offload_params: true}
lora_r: 8
somekey: 1
"""
TRL = """
model_name_or_path: Qwen/Qwen3-8B
dataset_name: trl-lib/Capybara
max_length: 2048
packing: true
assistant_only_loss: true
use_peft: true
lora_alpha: 16
lora_target_modules: all-linear
load_in_4bit: true
num_train_epochs: 1
warmup_steps: 0.1
adam_beta2: 0.95
report_to: [tensorboard, mlflow]
eval_steps: 100
"""
FACTORY = """
model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
deepspeed: ds.json
dataset: identity,alpaca_en_demo
template: llama3
cutoff_len: 2048
mask_history: true
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
"""
TUNE = """
output_dir: /tmp/torchtune
tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer, path: /m/tokenizer.model, max_seq_len: 8192}
dataset: {_component_: torchtune.datasets.alpaca_dataset, packed: true}
seed: null
model: {_component_: torchtune.models.llama3_1.lora_llama3_1_8b, lora_attn_modules: [q_proj, output_proj],
        lora_rank: 8, lora_alpha: 16, lora_dropout: 0.0}
checkpointer: {_component_: torchtune.training.FullModelHFCheckpointer, checkpoint_dir: /m/}
batch_size: 2
epochs: 1
optimizer: {_component_: torch.optim.AdamW, lr: 2e-5, fused: true}
lr_scheduler: {_component_: torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup, num_warmup_steps: 100}
loss: {_component_: torchtune.modules.loss.LinearCrossEntropyLoss}
max_steps_per_epoch: null
gradient_accumulation_steps: 8
clip_grad_norm: null
compile: false
enable_activation_checkpointing: true
dtype: bf16
metric_logger: {_component_: torchtune.training.metric_logging.WandBLogger, project: mine}
"""
CASES = {
    "axolotl": (AXOLOTL, {
        "model.path": "NousResearch/Meta-Llama-3-8B", "data.seq_length": 4096, "batch.accumulation": 8,
        "batch.micro": 1, "steps.epochs": 2, "schedule.style": "cosine", "optim.lr": 2e-5, "model.dtype": "bf16",
        "model.activation_checkpointing": True, "model.attention": "flash", "schedule.warmup": 100,
        "optim.weight_decay": 0.0, "log.trackers": ["wandb"], "data.packing": "bfd", "data.loss": "assistant",
        "optim.betas": [0.9, 0.999],
    }, ["optimizer: paged_adamw_8bit", "datasets", "saves_per_epoch", "somekey"]),
    "trl": (TRL, {
        "model.path": "Qwen/Qwen3-8B", "data.seq_length": 2048, "data.loss": "assistant", "lora.alpha": 16,
        "lora.rank": 16, "lora.dropout": 0.05, "lora.targets": ["all-linear"], "lora.quantize": "nf4",
        "steps.epochs": 1, "schedule.warmup": 0.1, "optim.betas": [0.9, 0.95],
        "log.trackers": ["tensorboard", "mlflow"], "optim.lr": 2e-5, "schedule.style": "linear",
        "data.overlong": "truncate",
        "batch.micro": 8, "batch.accumulation": 1, "save.every": 500, "seed": 42, "model.dtype": "bf16",
    }, ["dataset_name", "eval_steps"]),
    "llama-factory": (FACTORY, {
        "model.path": "meta-llama/Meta-Llama-3-8B-Instruct", "lora.rank": 8, "lora.targets": ["all-linear"],
        "data.seq_length": 2048, "data.loss": "last_turn", "batch.micro": 1, "batch.accumulation": 8,
        "optim.lr": 1e-4, "steps.epochs": 3.0, "schedule.style": "cosine", "schedule.warmup": 0.1,
        "model.dtype": "bf16", "lora.alpha": 16, "optim.betas": [0.9, 0.999], "save.every": 500, "seed": 42,
        "data.overlong": "truncate",
    }, ["dataset", "packing"]),
    "torchtune": (TUNE, {
        "data.seq_length": 8192, "model.path": "/m/", "lora.rank": 8, "lora.alpha": 16, "lora.dropout": 0.0,
        "lora.targets": ["q_proj", "o_proj"], "batch.micro": 2, "steps.epochs": 1, "optim.lr": 2e-5,
        "schedule.style": "cosine", "schedule.warmup": 100, "batch.accumulation": 8, "model.compile": False,
        "model.activation_checkpointing": True, "model.dtype": "bf16", "log.trackers": ["wandb"],
        "optim.weight_decay": 0.01, "optim.betas": [0.9, 0.999], "data.loss": "all", "optim.clip": 0,
        "data.overlong": "truncate",
    }, ["dataset._component_"]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_each_key_is_accounted_for(tmp_path, name):
    text, expected, left = CASES[name]
    (tmp_path / "c.yml").write_text(text)
    settings, lines = translate(TRAINERS[name], tmp_path / "c.yml")
    assert settings == expected
    untranslated = [line.removeprefix("not translated: ") for line in lines if line.startswith("not translated")]
    assert [entry.startswith(key) for entry, key in zip(sorted(untranslated), sorted(left), strict=True)] == [
        True
    ] * len(left), untranslated
    together = "\n".join(lines)
    given = yaml.safe_load(text)
    for key, value in given.items():
        assert value is None or key in together, key
    for setting, value in settings.items():
        assert setting in together or setting in ("optim.betas", "lora.rank"), (setting, value)


@pytest.mark.parametrize("name", CASES)
def test_a_run_folder_is_made_of_it(train, model, data, tmp_path, name):
    text, expected, _ = CASES[name]
    (tmp_path / "c.yml").write_text(text)
    argv = ["init", tmp_path / "run", f"--from-{name}", tmp_path / "c.yml", "--data", data]
    assert "is not a folder here" in train(*argv).err
    ran = train(*argv, "--from", model("llama", vocab_size=253))
    assert ran.code == 0, ran.err
    assert "not translated: " in ran.err
    assert f"optim.lr: {expected['optim.lr']}" in ran.err
    config, _ = load_config(tmp_path / "run/config.yml")
    assert config.batch.size is None
    assert config.optim.lr == expected["optim.lr"]
    assert (config.lora is not None) == any(setting.startswith("lora.") for setting in expected)
    argv = ["--json", "--data.seq_length", 64, "--schedule.warmup", 0]
    planned = json.loads(train("plan", tmp_path / "run/config.yml", *argv).out)
    assert planned["batch"] == expected["batch.micro"] * expected["batch.accumulation"]


@pytest.mark.parametrize(("ratio", "warmup"), [("0.1", 0.1), ("1", "all"), ("1.0", "all"), ("0", None), ("2", None)])
def test_a_warmup_ratio_of_one_is_all_steps(tmp_path, ratio, warmup):
    """A `schedule.warmup` of 1 is one step."""
    (tmp_path / "c.yml").write_text(f"warmup_ratio: {ratio}\n")
    settings, lines = translate(TRAINERS["llama-factory"], tmp_path / "c.yml")
    assert settings.get("schedule.warmup") == warmup
    assert any(line.startswith("not translated: warmup_ratio") for line in lines) == (ratio == "2")


@pytest.mark.parametrize("style", ["linear", "cosine"])
def test_rates_are_those_of_the_trainer_but_for_the_first_step(tmp_path, style):
    """Our warm-up is one step ahead: its first step is not 0."""
    torch = pytest.importorskip("torch")
    from transformers import get_scheduler

    (tmp_path / "c.yml").write_text(
        f"model_name_or_path: M\nlr_scheduler_type: {style}\nwarmup_steps: 5\nmax_steps: 40\n"
    )
    settings, _ = translate(TRAINERS["trl"], tmp_path / "c.yml")
    options = [word for name, value in settings.items() for word in (f"--{name}", json.dumps(value))]
    (tmp_path / "ours.yml").write_text("save: {path: s}\ndata: {train: [P]}\n")
    config, _ = load_config(tmp_path / "ours.yml", options)
    optimizer = torch.optim.AdamW([torch.zeros(1)], lr=config.optim.lr)
    scheduler = get_scheduler(style, optimizer, 5, 40)
    theirs = []
    for _ in range(40):
        theirs.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    ours = [learning_rate(config, step, 40) for step in range(40)]
    assert ours[5:] == pytest.approx(theirs[5:], rel=1e-12)
    assert ours[:5] == pytest.approx(theirs[1:6], rel=1e-12)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("axolotl", "warmup_steps: 5\nwarmup_ratio: 0.1\n", "warmup_steps and warmup_ratio both mean schedule.warmup"),
        ("llama-factory", "mask_history: true\ntrain_on_prompt: true\n", "both mean data.loss: last_turn and all"),
        ("trl", "- a\n", "is not a mapping"),
        ("trl", "a: [\n", "is not YAML"),
    ],
)
def test_what_contradicts_itself_is_refused(tmp_path, name, text, message):
    (tmp_path / "c.yml").write_text(text)
    with pytest.raises(UsageError, match=message):
        translate(TRAINERS[name], tmp_path / "c.yml")


def test_adapters_are_trained_only_where_the_file_says_so(tmp_path):
    for text, expected in (("lora_r: 8\n", False), ("adapter: lora\n", True), ("adapter: qlora\nlora_r: 4\n", True)):
        (tmp_path / "c.yml").write_text(text)
        settings, _ = translate(TRAINERS["axolotl"], tmp_path / "c.yml")
        assert any(name.startswith("lora") for name in settings) == expected


def _of(tmp_path, name, text):
    (tmp_path / "c.yml").write_text(text)
    settings, lines = translate(TRAINERS[name], tmp_path / "c.yml")
    return settings, "\n".join(lines)


@pytest.mark.parametrize(
    ("name", "text", "key"),
    [
        ("trl", "lr_scheduler_type: constant\nwarmup_steps: 5\n", "warmup_steps"),
        ("llama-factory", "warmup_ratio: 0.5\nlr_scheduler_type: constant\n", "warmup_ratio"),
        ("axolotl", "lr_scheduler: constant\nwarmup_steps: 5\n", "warmup_steps"),
        ("axolotl", "lr_scheduler: constant\n", None),
    ],
)
def test_a_constant_schedule_has_no_warmup(tmp_path, name, text, key):
    settings, lines = _of(tmp_path, name, text)
    assert settings["schedule.style"] == "constant"
    assert settings["schedule.warmup"] == 0
    assert (f"no effect there: {key}: the schedule constant has no warm-up" in lines) == (key is not None)
    settings, lines = _of(tmp_path, name, text.replace("constant", "constant_with_warmup"))
    assert settings["schedule.style"] == "constant"
    assert settings["schedule.warmup"] in (5, 0.5, 0.03)
    assert "no effect there" not in lines


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("_component_: torchtune.models.llama3_1.qlora_llama3_1_8b", "model._component_: torchtune.models.llama3_1.ql"),
        ("_component_: lora_llama3_1_8b, quantize_base: true", "model.quantize_base: True: lora.quantize: nf4"),
        ("_component_: lora_llama3_1_8b, apply_lora_to_output: true", "model.apply_lora_to_output: True"),
    ],
)
def test_what_torchtune_does_beyond_plain_lora_is_named(tmp_path, text, line):
    settings, lines = _of(tmp_path, "torchtune", f"model: {{{text}}}\ndataset: {{_component_: d, packed: true}}\n")
    untranslated = [entry for entry in lines.splitlines() if entry.startswith("not translated") and line in entry]
    assert len(untranslated) == 1, lines
    assert "lora.quantize" not in settings


def test_lora_of_torchtune_has_its_defaults(tmp_path):
    settings, lines = _of(tmp_path, "torchtune", "model: {_component_: lora_llama3_1_8b, lora_attn_modules: [q_proj]}")
    assert (settings["lora.rank"], settings["lora.alpha"]) == (8, 16)
    assert "no model.lora_rank (torchtune: 8) -> lora.rank: 8" in lines
    assert "no model.lora_alpha (torchtune: 16) -> lora.alpha: 16" in lines
    settings, _ = _of(tmp_path, "torchtune", "model: {_component_: llama3_1_8b}")
    assert not any(name.startswith("lora") for name in settings)


@pytest.mark.parametrize(
    ("builder", "loss"),
    [
        ("alpaca_dataset", "all"),
        ("alpaca_cleaned_dataset", "all"),
        ("text_completion_dataset", "all"),
        ("cnn_dailymail_articles_dataset", "all"),
        ("wikitext_dataset", "all"),
        ("instruct_dataset", "assistant"),
        ("chat_dataset", "assistant"),
        ("grammar_dataset", "assistant"),
        ("samsum_dataset", "assistant"),
        ("slimorca_dataset", "assistant"),
        ("multimodal.the_cauldron_dataset", "assistant"),
        ("preference_dataset", None),
        ("other_dataset", None),
        (None, None),
    ],
)
def test_the_loss_of_torchtune_without_a_key_is_that_of_the_builder(tmp_path, builder, loss):
    text = f"dataset: {{_component_: torchtune.datasets.{builder}}}\n" if builder else "dataset: [{_component_: d}]\n"
    settings, lines = _of(tmp_path, "torchtune", text)
    assert settings.get("data.loss") == loss
    assert ("no dataset.train_on_input (torchtune: " in lines) == (loss is not None)
    unknown = f"the labels that {builder or 'dataset'} trains are not known; data.loss: assistant by default"
    assert (f"not translated: {unknown}" in lines) == (builder in ("other_dataset", None))
    assert ("preferences are not trained here" in lines) == (builder == "preference_dataset")
    if builder:
        for flag, given in (("true", "all"), ("false", "assistant")):
            settings, lines = _of(tmp_path, "torchtune", text.replace("}", f", train_on_input: {flag}}}"))
            assert settings["data.loss"] == given
            assert "are not known" not in lines


@pytest.mark.parametrize(
    ("name", "text", "loss", "idle"),
    [
        ("llama-factory", "mask_history: true\ntrain_on_prompt: false\n", "last_turn", "train_on_prompt"),
        ("llama-factory", "mask_history: false\ntrain_on_prompt: true\n", "all", "mask_history"),
        ("llama-factory", "stage: pt\ntrain_on_prompt: false\n", "all", "train_on_prompt"),
        ("llama-factory", "mask_history: false\ntrain_on_prompt: false\n", "assistant", None),
        ("llama-factory", "mask_history: false\n", "assistant", None),
        ("llama-factory", "seed: 1\n", "assistant", None),
        ("trl", "assistant_only_loss: false\ncompletion_only_loss: true\n", "assistant", "assistant_only_loss"),
        ("trl", "assistant_only_loss: true\ncompletion_only_loss: false\n", "assistant", "completion_only_loss"),
        ("trl", "assistant_only_loss: true\ncompletion_only_loss: true\n", "assistant", None),
        ("trl", "assistant_only_loss: false\ncompletion_only_loss: false\n", "all", None),
        ("trl", "assistant_only_loss: false\n", "all", None),
    ],
)
def test_a_flag_at_its_default_does_not_contradict_another(tmp_path, name, text, loss, idle):
    settings, lines = _of(tmp_path, name, text)
    assert settings["data.loss"] == loss
    assert (f"no effect there: {idle}: false beside " in lines) == (idle is not None)


@pytest.mark.parametrize(
    ("text", "is_open"),
    [
        ("assistant_only_loss: false\n", True),
        ("completion_only_loss: null\n", True),
        ("assistant_only_loss: true\n", False),
        ("completion_only_loss: false\n", False),
    ],
)
def test_what_trl_trains_by_default_depends_on_the_records(tmp_path, text, is_open):
    line = "not translated: completion_only_loss: null by default: of records with prompt and completion only"
    assert (line in _of(tmp_path, "trl", text)[1]) == is_open


@pytest.mark.parametrize(
    ("name", "key", "off", "on"),
    [
        ("trl", "packing", "packing: false", "packing: true"),
        ("axolotl", "sample_packing", "sample_packing: false", "sample_packing: true"),
        ("llama-factory", "packing", "packing: false", "neat_packing: true"),
        ("torchtune", "dataset.packed", "dataset: {_component_: d, packed: false}",
         "dataset: {_component_: d, packed: true}"),
    ],
)  # fmt: skip
def test_rows_that_the_trainer_does_not_pack_are_named(tmp_path, name, key, off, on):
    for text, value in ((off, "false"), ("seed: 1", "false by default")):
        settings, lines = _of(tmp_path, name, text)
        assert f"not translated: {key}: {value}: rows are packed here" in lines
        assert key not in "".join(line for line in lines.splitlines() if line.startswith("no effect here"))
        assert "data.packing" not in settings
    assert "rows are packed" not in _of(tmp_path, name, on)[1]


def test_a_pretraining_of_llama_factory_packs_by_default(tmp_path):
    assert "rows are packed" not in _of(tmp_path, "llama-factory", "stage: pt\n")[1]
    assert "rows are packed" in _of(tmp_path, "llama-factory", "stage: pt\npacking: false\n")[1]


@pytest.mark.parametrize(("packing", "expected"), [("packing: false", None), ("", None), ("packing: true", "packed")])
def test_a_packing_strategy_has_no_effect_without_packing(tmp_path, packing, expected):
    settings, lines = _of(tmp_path, "trl", f"packing_strategy: wrapped\n{packing}\n")
    assert settings.get("data.packing") == expected
    assert ("no effect there: packing_strategy" in lines) == (expected is None)


def test_layers_of_torchtune_add_up(tmp_path):
    given = "_component_: lora_llama3_1_8b, lora_attn_modules: [q_proj, output_proj], apply_lora_to_mlp: true"
    settings, _ = _of(tmp_path, "torchtune", f"model: {{{given}, apply_lora_to_output: false}}")
    assert settings["lora.targets"] == ["q_proj", "o_proj", "gate_proj", "down_proj", "up_proj"]


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize(("flag", "expected"), [("bf16: true", "bf16"), ("bf16: false", "fp32"), ("", "bf16")])
def test_weights_in_float32_are_master_weights(tmp_path, key, flag, expected):
    settings, lines = _of(tmp_path, "trl", f"{key}: float32\n{flag}\n")
    assert settings["model.dtype"] == expected
    assert (f"no effect here: {key}: float32" in lines) == (expected == "bf16")


@pytest.mark.parametrize("name", ["trl", "axolotl"])
def test_settings_of_lora_without_lora_have_no_effect(tmp_path, name):
    _, lines = _of(tmp_path, name, "lora_r: 8\n")
    assert "lora.rank" not in lines
    assert [line for line in lines.splitlines() if "lora_r" in line] == ["no effect here: lora_r"]


def test_no_limit_of_the_length_is_not_the_default(tmp_path):
    settings, lines = _of(tmp_path, "trl", "max_length: null\n")
    assert "data.seq_length" not in settings
    assert "not translated: max_length: None: null is no limit there" in lines
    assert _of(tmp_path, "trl", "max_length: 64\n")[0]["data.seq_length"] == 64
    assert _of(tmp_path, "trl", "seed: 1\n")[0]["data.seq_length"] == 1024


PRETRAINING = """
tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer, max_seq_len: 40}
dataset: {_component_: torchtune.datasets.text_completion_dataset, packed: true}
"""
"""A pre-training of torchtune."""


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("axolotl", "sequence_len: 40", {}),
        ("axolotl", "excess_length_strategy: raise", {"data.overlong": "error"}),
        ("trl", "max_length: 40", {"data.overlong": "truncate"}),
        ("trl", "packing: true", {"data.overlong": "truncate"}),
        ("trl", "packing: true\npacking_strategy: wrapped", {"data.packing": "packed"}),
        ("trl", "max_length: null", {}),
        ("llama-factory", "stage: sft", {"data.overlong": "truncate"}),
        ("llama-factory", "stage: pt", {"data.packing": "packed"}),
        ("llama-factory", "stage: pt\npacking: false", {"data.overlong": "truncate"}),
        ("torchtune", PRETRAINING, {"data.packing": "packed"}),
        ("torchtune", PRETRAINING.replace("true", "true, split_across_pack: false"), {"data.overlong": "truncate"}),
        ("torchtune", PRETRAINING.replace("40", "null").replace("true", "false"), {}),
    ],
)
def test_longer_documents_are_cut_where_the_trainer_cuts_them(tmp_path, name, text, expected):
    (tmp_path / "c.yml").write_text(text)
    settings, lines = translate(TRAINERS[name], tmp_path / "c.yml")
    keys = ("data.overlong", "data.packing")
    assert {key: value for key, value in settings.items() if key in keys} == expected
    assert all(any(key in line for line in lines) for key in expected)
    assert settings.get("data.seq_length") is not None or any("null" in line for line in lines)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("trl", "max_steps: -1", {"steps.epochs": 3}),
        ("llama-factory", "max_steps: -1", {"steps.epochs": 3}),
        ("trl", "max_steps: 7", {"steps.train_iters": 7}),
        ("llama-factory", "pure_bf16: false", {"model.dtype": "fp32"}),
        ("trl", "fp16: false", {"model.dtype": "bf16"}),
        ("trl", "save_strategy: steps", {"save.every": 500}),
        ("trl", "save_total_limit: 0", {"save.keep": None}),
        ("trl", "logging_steps: 0.1", {"log.every": None}),
    ],
)
def test_a_key_with_a_neutral_value_leaves_the_default(tmp_path, name, text, expected):
    (tmp_path / "c.yml").write_text(text)
    settings, _ = translate(TRAINERS[name], tmp_path / "c.yml")
    assert {key: settings.get(key) for key in expected} == expected
