"""Qwen3.5 with its vision tower under torchtitan's own names: what 0.3.0 wrote and computed (torchtitan/README.md)."""

from __future__ import annotations

import json
import shutil
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from formats.fsdp import whole_models
from formats.layout.table import rules
from tests.faults.dcp_tools import refused, save, with_config
from tests.golden.test_bridge_qwen3_5 import with_second
from tests.golden.test_coverage import lines
from tests.golden.test_torchtitan import same

HERE = Path(__file__).parent / "torchtitan_images"
CASES = {"qwen3_5": HERE / "qwen3_5_v030_tied", "qwen3_5_moe": HERE / "qwen3_5_moe_v030"}
ACCEPT = ("--accept", "merger_gelu")
NAMES = ("--names", "torchtitan")
CLASSES = {"qwen3_5": "Qwen3_5", "qwen3_5_moe": "Qwen3_5Moe"}


def read(convert: Any, kind: str, folder: Path, *options: Any, run: Path | None = None) -> Path:
    """The Hugging Face folder that is read of torchtitan's checkpoint."""
    case = CASES[kind]
    ran = convert("fsdp2hf", run or case / "step-1", folder, "--config", case / "hf", *(options or ACCEPT))
    assert ran.code == 0, ran.err
    return folder


def differences(folder: Path, kind: str) -> tuple[float, float]:
    """How far the logits of transformers are from torchtitan's: of an image in text, and of text."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForImageTextToText

    stored = load_file(CASES[kind] / "logits.safetensors")
    model, info = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), info
    ids = stored["image_ids"]
    image = {"pixel_values": stored["pixels"], "image_grid_thw": stored["grid"]}
    image["mm_token_type_ids"] = (ids == model.config.image_token_id).int()
    with torch.no_grad():
        seen, text = model.eval()(input_ids=ids, **image).logits[0], model(input_ids=stored["ids"]).logits[0]
    assert min(stored[name].abs().max() for name in ("logits", "image_logits")) > 1
    return float((seen - stored["image_logits"]).abs().max()), float((text - stored["logits"]).abs().max())


@pytest.fixture
def with_tanh(monkeypatch) -> None:
    """Have transformers compute the gelu of torchtitan's merger."""
    import torch

    for kind, prefix in CLASSES.items():
        merger = getattr(import_module(f"transformers.models.{kind}.modeling_{kind}"), f"{prefix}VisionPatchMerger")

        def made(self: Any, *args: Any, own: Any = merger.__init__, **kwargs: Any) -> None:
            own(self, *args, **kwargs)
            self.act_fn = torch.nn.GELU(approximate="tanh")

        monkeypatch.setattr(merger, "__init__", made)


def contents(folder: Path, at: Path) -> dict[str, Any]:
    """The tensors of a DCP folder, as torch reads them."""
    import torch
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(folder, at)
    return dict(torch.load(at))


@pytest.mark.parametrize("kind", CASES)
def test_its_logits(convert, tmp_path, with_tanh, kind):
    out = read(convert, kind, tmp_path / "out")
    assert max(differences(out, kind)) < 1e-5


@pytest.mark.parametrize("kind", CASES)
def test_its_merger_is_told(convert, tmp_path, kind):
    """With the exact gelu of transformers an image is seen a little otherwise, and text is read the same."""
    argv = ("fsdp2hf", CASES[kind] / "step-1", tmp_path / "out", "--config", CASES[kind] / "hf")
    refused(convert(*argv), 5, "the gelu that tanh approximates", *ACCEPT)
    seen, text = differences(read(convert, kind, tmp_path / "out"), kind)
    assert 1e-4 < seen < 5e-3
    assert text < 1e-5


@pytest.mark.parametrize("kind", CASES)
def test_what_its_own_adapter_makes_of_it(convert, tmp_path, kind):
    """Of experts `to_hf` makes matrices that transformers has the other way round; in hf/ they are transposed."""
    case, out = CASES[kind], read(convert, kind, tmp_path / "out")
    if kind == "qwen3_5":
        same(out / "model.safetensors", case / "hf/model.safetensors")
    assert convert("diff", case / "step-1", case / "hf", "--config", case / "hf", *ACCEPT).code == 0
    assert convert("verify", out, case / "step-1", "--config", case / "hf", *ACCEPT).code == 0
    digests = {
        convert("digest", path, "--config", case / "hf", *ACCEPT).out.split()[0] for path in (case / "step-1", out)
    }
    assert len(digests) == 1


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("ranks", [1, 3])
def test_what_is_written_is_what_torchtitan_wrote(convert, tmp_path, kind, ranks):
    """Bit for bit, of files of either kind; its CheckpointManager loaded such folders (torchtitan/README.md)."""
    import torch

    case = CASES[kind]
    theirs = contents(case / "step-1", tmp_path / "theirs.pt")
    for source in (case / "hf", read(convert, kind, tmp_path / "read")):
        run = tmp_path / f"titan-{source.name}"
        ran = convert("hf2fsdp", source, run, *NAMES, "--ranks", ranks, *ACCEPT)
        assert ran.code == 0, ran.err
        assert "the gelu that tanh approximates" in ran.err
        ours = contents(run, tmp_path / "ours.pt")
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            assert (ours[name].dtype, ours[name].shape) == (tensor.dtype, tensor.shape), name
            assert torch.equal(ours[name], tensor), name
    out = read(convert, kind, tmp_path / "back", run=run)
    assert convert("diff", out, tmp_path / "read", "--tensors").code == 0


@pytest.mark.parametrize("kind", CASES)
def test_its_language_model_alone(convert, tmp_path, kind):
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    out = read(convert, kind, tmp_path / "out", "--only", "text")
    stored = load_file(CASES[kind] / "logits.safetensors")
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    with torch.no_grad():
        assert (model(input_ids=stored["ids"]).logits[0] - stored["logits"]).abs().max() < 1e-5
    ran = convert("hf2fsdp", out, tmp_path / "no", *NAMES, *ACCEPT)
    refused(ran, 4, f"whose {kind}_text has no table")


# --- the judge sees ---------------------------------------------------------------------------------------------------

TEXT = {
    "query and its gate": ("(query: half pair | query_gate: dim)", "(query_gate: dim | query: half pair)"),
    "linear query and key": ("in_proj_q.weight     linear_query", "in_proj_q.weight     linear_key"),
    "decay and step": ("linear_alpha: (key_head spread)", "linear_alpha: (spread key_head)"),
    "gate and value": ("linear_gate: (key_head spread value_dim)", "linear_gate: (spread key_head value_dim)"),
}


@pytest.mark.parametrize("mistake", TEXT)
def test_logits_show_a_wrong_table(convert, tmp_path, monkeypatch, with_tanh, mistake):
    kind, (right, wrong) = "qwen3_5_moe", TEXT[mistake]
    table = whole_models.WHOLES["torchtitan"][kind]
    assert right in table
    other = table.replace("in_proj_k.weight     linear_key:", "in_proj_k.weight     linear_query:")
    table = (other if "key" in mistake else table).replace(right, wrong)
    monkeypatch.setitem(whole_models.tables("torchtitan"), kind, rules(table))
    assert min(differences(read(convert, kind, tmp_path / "out"), kind)) > 1e-3


def test_logits_show_a_wrong_tower(convert, tmp_path, monkeypatch, with_tanh):
    """Query and value, and the two norms of a layer, whose shapes are the same."""
    rows, layer = whole_models.ROWS, "layers.{layer}."
    turned = tuple(row._replace(names=row.names[::-1]) for row in rows)
    norms = [
        whole_models.Row(f"model.visual.blocks.{{layer}}.{one}.", (f"vision_encoder.{layer}{other}.",))
        for one, other in (("norm1", "norm2"), ("norm2", "norm1"))
    ]
    for number, wrong in enumerate((turned, (*norms, *rows))):
        monkeypatch.setattr(whole_models, "ROWS", wrong)
        seen, text = differences(read(convert, "qwen3_5", tmp_path / f"out-{number}"), "qwen3_5")
        assert seen > 1e-2
        assert text < 1e-5


def test_every_line_was_written_by_it(convert, tmp_path):
    """Of both tables, tied and not; and every row of the tower."""
    seen, keys = set(), set[str]()
    for kind, case in CASES.items():
        keys |= contents(case / "step-1", tmp_path / "all.pt").keys()
        config = json.loads((case / "hf/config.json").read_text())
        tied = "tied" if config["tie_word_embeddings"] else "untied"
        table = whole_models.tables("torchtitan")[kind]
        seen |= lines(rule for rule in table if not rule.conditions & ({"tied", "untied"} - {tied}))
    assert seen == set().union(*(lines(table) for table in whole_models.tables("torchtitan").values()))
    spellings = {spelling.replace("{layer}", "0") for spelling, _ in seen}
    assert all(spelling in keys or spelling.replace(".0.", ".1.") in keys for spelling in spellings)
    assert all(any(row.key_of(key) for key in keys) for row in whole_models.ROWS)


# --- refused ----------------------------------------------------------------------------------------------------------


def test_what_is_refused(convert, tmp_path):
    case = CASES["qwen3_5"]
    run = ("fsdp2hf", case / "step-1", tmp_path / "no")
    refused(convert(*run), 3, "no config.json", "--config BASE")
    config = with_config(tmp_path / "llama", case / "hf", model_type="llama")
    refused(convert(*run, "--config", config, *ACCEPT), 3, "has no such model of images", "qwen3_5, qwen3_5_moe")
    tower = json.loads((case / "hf/config.json").read_text())["vision_config"]
    for key, value, code, message in (
        ("hidden_act", "gelu", 5, "computes its tower with 'gelu_pytorch_tanh'"),
        ("patch_size", 8, 3, "the config implies [3, 2, 8, 8]"),
        ("depth", 3, 3, "model.visual.blocks.2"),
    ):
        config = with_config(tmp_path / key, case / "hf", vision_config=tower | {key: value})
        refused(convert(*run, "--config", config, *ACCEPT), code, message)
    refused(convert(*run, "--config", case / "hf", *ACCEPT, "--set", "norm_epsilon=1e-3"), 5, "--set contradicts it")


@pytest.mark.parametrize("lacking", ["layers.1.attn.wk.bias", "pos_embed", "merger.linear_fc2.weight"])
def test_a_tower_that_lacks_a_tensor(convert, tmp_path, lacking):
    case = CASES["qwen3_5"]
    state = contents(case / "step-1", tmp_path / "all.pt")
    del state[f"vision_encoder.{lacking}"]
    run = save(tmp_path / "step-7", state)
    ran = convert("fsdp2hf", run, tmp_path / "no", "--config", case / "hf", *ACCEPT)
    assert ran.code == 3, ran.err
    assert not (tmp_path / "no").exists()


def test_a_bias_of_its_routers(convert, tmp_path):
    """Which torchtitan trains with the `load_balance_coeff` of its configs; inside a container, as in a run's steps."""
    import torch

    case = CASES["qwen3_5_moe"]
    state = contents(case / "step-1", tmp_path / "all.pt")
    state |= {f"layers.{layer}.moe.expert_bias_E": torch.ones(4) for layer in range(2)}
    run = save(tmp_path / "step-7", {"model": state})
    ran = convert("fsdp2hf", run, tmp_path / "out", "--config", case / "hf", *ACCEPT)
    refused(ran, 5, "--accept expert_bias_E leaves it out")
    out = read(convert, "qwen3_5_moe", tmp_path / "out", *ACCEPT, "--accept", "expert_bias_E", run=run)
    assert convert("verify", out, case / "hf").code == 0


def test_its_optimizer_is_refused(convert, tmp_path):
    """Beside the weights, as in a step that is not the last; the weights convert."""
    import torch

    case = CASES["qwen3_5"]
    state = contents(case / "step-1", tmp_path / "all.pt")
    moments = {
        f"state.{key}.{name}": value
        for key, tensor in state.items()
        for name, value in {"exp_avg": tensor, "exp_avg_sq": tensor.square(), "step": torch.tensor(3.0)}.items()
    }
    run = save(tmp_path / "step-7", {**state, "optimizer": moments})
    argv = ("hf2fsdp", run, tmp_path / "no", "--config", case / "hf", *ACCEPT, "--with-optimizer")
    refused(convert(*argv), 4, "the optimizer of a model of images under torchtitan's names is not read")
    out = read(convert, "qwen3_5", tmp_path / "out", run=run)
    assert convert("verify", out, case / "hf").code == 0


def test_a_layer_that_predicts_a_second_token(convert, tmp_path):
    """torchtitan's Qwen3.5 has none, and its own adapter leaves it out unseen."""
    source = shutil.copytree(CASES["qwen3_5"] / "hf", tmp_path / "hf")
    argv = ("hf2fsdp", with_second(source, like=1), tmp_path / "run", *NAMES, *ACCEPT)
    refused(convert(*argv), 5, "torchtitan has no place for mtp.", "--drop mtp")
    ran = convert(*argv, "--drop", "mtp")
    assert ran.code == 0, ran.err
    assert convert("verify", tmp_path / "run", CASES["qwen3_5"] / "hf", *ACCEPT).code == 0
