"""Options of a Megatron training by which its parameters decay otherwise than their shapes tell: refused by name."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.optimizers import add_optimizer

ITERATION = "iter_0000003"
V0_14, V0_15, V0_16 = ({name: None} for name in ("save_retain_interval", "perform_rl_step", "async_strategy"))


@pytest.fixture(scope="module")
def run(model, tmp_path_factory):
    """A run in torch_dist with an optimizer, and the fields of its class: to be copied before it is spoiled."""
    from converters.cli import cli

    folder = tmp_path_factory.mktemp("run")
    source, classic = str(model("qwen3", "bfloat16")), folder / "classic"
    for argv in (
        ["hf2megatron", source, str(classic), "--iteration", "3"],
        ["hf2megatron", source, str(folder / "bridge"), "--format", "torch_dist", "--for", "bridge"],
    ):
        cli([*argv, "-q"], standalone_mode=False)
    add_optimizer(classic, "plain")
    argv = ["reshard", str(classic), str(folder / "run"), "--format", "torch_dist", "--with-optimizer", "-q"]
    cli(argv, standalone_mode=False)
    (folder / "run" / ITERATION / "vitruvian.json").unlink()
    (config,) = (folder / "bridge").rglob("run_config.yaml")
    return folder / "run", yaml.safe_load(config.read_text())["model"]


def with_args(run: Path, **args: Any) -> None:
    """Add args; without any take all of them out, as Megatron-Bridge saves none."""
    import torch

    path = run / ITERATION / "common.pt"
    stored = torch.load(path, weights_only=False)
    vars(stored["args"]).update(args)
    if not args:
        del stored["args"]
    torch.save(stored, path)


def converted(convert: Any, run: Path, tmp_path: Path) -> tuple[int, str]:
    ran = convert("hf2fsdp", run, tmp_path / "out", "--with-optimizer", "-n")
    assert convert("hf2fsdp", run, tmp_path / "out", "-n").code == 0, "the weights alone"
    return ran.code, ran.err


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ({"embedding_init_method_std": 0.02, **V0_14}, "embedding_init_method_std = 0.02"),
        ({"embedding_init_method_std": 0.02, **V0_15}, "embedding_init_method_std = 0.02"),
        ({"embedding_init_method_std": 0.02}, "embedding_init_method_std = 0.02"),
        ({"embedding_init_method_std": None, **V0_15}, None),
        ({"embedding_init_method_std": 0.02, **V0_16}, None),
        ({"embedding_init_method_std": 0.02, "sft": False}, None),
        ({"no_weight_decay_cond_type": "apply_wd_to_qk_layernorm", **V0_15}, "no_weight_decay_cond_type = 'apply_wd"),
        ({"no_weight_decay_cond_type": "qwen3_next", **V0_15}, "no_weight_decay_cond_type = 'qwen3_next'"),
        ({"apply_wd_to_qk_layernorm": True, **V0_16}, "apply_wd_to_qk_layernorm = True"),
        ({"apply_wd_to_qk_layernorm": False, "no_weight_decay_cond_type": None, **V0_16}, None),
    ],
)
def test_args_of_megatron_lm(run, convert, tmp_path, args, named):
    spoiled = shutil.copytree(run[0], tmp_path / "run")
    with_args(spoiled, **args)
    code, err = converted(convert, spoiled, tmp_path)
    assert (code, f"was trained with {named}" in err) == ((4, True) if named else (0, False)), err


@pytest.mark.parametrize(("decoupled", "code"), [(False, 4), (None, 4), (True, 0)])
def test_weight_decay_in_the_gradients_by_args(run, convert, tmp_path, decoupled, code):
    """Stock takes each field of `OptimizerConfig` that args have, though it has no option for this one."""
    spoiled = shutil.copytree(run[0], tmp_path / "run")
    with_args(spoiled, decoupled_weight_decay=decoupled)
    ended, err = converted(convert, spoiled, tmp_path)
    assert (ended, "a weight decay of 0.1 is in the gradients" in err) == (code, code == 4), err


BRIDGE: list[tuple[dict[str, Any], str | None]] = [
    ({"scheduler": {"no_weight_decay_cond_type": "qwen3_next"}}, "no_weight_decay_cond_type = 'qwen3_next'"),
    ({"optimizer": {"apply_wd_to_qk_layernorm": True}}, "apply_wd_to_qk_layernorm = True"),
    ({"optimizer": {"decoupled_weight_decay": False}}, "a weight decay of 0.1 is in the gradients"),
    ({"optimizer": {"decoupled_weight_decay": None}}, "a weight decay of 0.1 is in the gradients"),
    ({"scheduler": None, "optimizer": {"apply_wd_to_qk_layernorm": False, "decoupled_weight_decay": True}}, None),
]
NEMO: list[tuple[dict[str, Any], str | None]] = [
    ({"no_weight_decay_cond": {"_target_": "mine.cond", "_call_": False}}, "no_weight_decay_cond = "),
    ({"config": {"apply_wd_to_qk_layernorm": True}}, "apply_wd_to_qk_layernorm = True"),
    ({"config": {"decoupled_weight_decay": False}}, "a weight decay of 0.1 is in the gradients"),
    ({"config": {"decoupled_weight_decay": True}, "no_weight_decay_cond": None}, None),
]


@pytest.mark.parametrize(("sections", "said"), BRIDGE)
def test_options_of_megatron_bridge(run, convert, tmp_path, sections, said):
    """Its models have `embedding_init_method_std` always, and decay their embeddings all the same."""
    spoiled = shutil.copytree(run[0], tmp_path / "run")
    with_args(spoiled)
    fields = {**run[1], "embedding_init_method_std": 0.02}
    (spoiled / ITERATION / "run_config.yaml").write_text(yaml.safe_dump({"model": fields, **sections}))
    code, err = converted(convert, spoiled, tmp_path)
    assert (code, said is None or said in err) == (0 if said is None else 4, True), err


@pytest.mark.parametrize(("optim", "said"), NEMO)
def test_options_of_nemo(run, convert, tmp_path, optim, said):
    spoiled = shutil.copytree(run[0], tmp_path / "run")
    with_args(spoiled)
    fields = {**run[1], "_target_": "nemo.collections.llm.gpt.model.qwen3.Qwen3Config600M"}
    for name in ("rope_scaling", "rope_scaling_factor"):
        del fields[name]
    (spoiled / "context").mkdir()
    (spoiled / "context/model.yaml").write_text(yaml.safe_dump({"config": fields, "optim": optim}))
    code, err = converted(convert, spoiled, tmp_path)
    assert (code, said is None or said in err) == (0 if said is None else 4, True), err


@pytest.mark.filterwarnings("ignore")
def test_remainders_of_master_weights(run, convert, tmp_path):
    """Transformer Engine's Adam keeps what BF16 weights lack as int16, under the name of the FP32 master weights."""
    import torch
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    from tests.faults.dcp_tools import save

    folder = shutil.copytree(run[0], tmp_path / "run") / ITERATION
    about = FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = {name: item for name, item in about.items() if isinstance(item, TensorStorageMetadata)}
    state = {name: torch.empty(item.size, dtype=item.properties.dtype) for name, item in tensors.items()}
    load(state, checkpoint_id=folder, no_dist=True)
    for path in (folder / ".metadata", *folder.glob("*.distcp")):
        path.unlink()
    masters = {name: item for name, item in state.items() if name.startswith("optimizer.state.fp32_param.")}
    assert masters
    save(folder, state | {name: item.view(torch.int32).to(torch.int16) for name, item in masters.items()})
    code, err = converted(convert, folder.parent, tmp_path)
    assert (code, "store_param_remainders of --use-precision-aware-optimizer" in err) == (4, True), err
    assert "verbatim" not in err
