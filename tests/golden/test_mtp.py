"""The layer that predicts a second token: megatron-core 0.16.1 computes what transformers does of the Hub's names.

Stock 0.19.2 loads it too: test_stock.py, test_stock_fsdp.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from formats.megatron import mtp
from tests.models import files

pytestmark = pytest.mark.megatron
JUDGE = Path(__file__).with_name("mtp_judge.py")
DIST_JUDGE = JUDGE.with_name("megatron_dist_judge.py")
OWN = {
    "mtp.": ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"),
    "": ("eh_proj", "enorm", "hnorm", "shared_head.norm"),
}
"""Prefix: what is around the block; without one its layer is numbered behind the others."""


def with_second(source: Path, out: Path, seed: int = 3) -> Path:
    """A copy of a model with such a layer under the Hub's names, its block like the last layer with attention."""
    import torch
    from safetensors.torch import load_file, save_file

    out.mkdir()
    for path in source.iterdir():
        (out / path.name).write_bytes(path.read_bytes())
    tensors, generator = load_file(source / "model.safetensors"), torch.Generator().manual_seed(seed)
    config = json.loads((source / "config.json").read_text())
    last, hidden = config["num_hidden_layers"] - 1, config["hidden_size"]
    like = max(int(key.split(".")[2]) for key in tensors if ".self_attn." in key)
    qwen = config["model_type"].startswith("qwen3")
    block, before = ("mtp.layers.0.", "mtp.") if qwen else (f"model.layers.{last + 1}.",) * 2
    names = OWN["mtp." if qwen else ""]
    dtype = tensors["model.norm.weight"].dtype

    def drawn(shape: list[int], name: str) -> torch.Tensor:
        low_high = torch.empty(shape).uniform_(0.5, 1.5, generator=generator)
        return (low_high if "norm" in name else torch.empty(shape).normal_(0, 0.08, generator=generator)).to(dtype)

    more = {
        block + key.removeprefix(f"model.layers.{like}."): drawn(list(value.shape), key)
        for key, value in tensors.items()
        if key.startswith(f"model.layers.{like}.")
    }
    shapes = {name: [hidden] for name in names} | {names[0]: [hidden, 2 * hidden]}
    more |= {
        f"{before}{name}.weight": drawn(shape, name if name in names[:1] else "norm") for name, shape in shapes.items()
    }
    for key, value in list(more.items()):
        if key.endswith("e_score_correction_bias"):
            more[key] = value.float()
    if not qwen:  # as on the Hub
        (out / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}, indent=2) + "\n")
    save_file(tensors | more, out / "model.safetensors", {"format": "pt"})
    return out


CASES = [
    ("qwen3_next", "te", ("--tp", 1)),
    ("qwen3_5_text", "te", ("--tp", 2)),
    ("qwen3_5_text-tied", "te", ("--pp", 2)),
    ("qwen3_5_moe_text", "te", ("--ep", 2)),
    ("glm4_moe", "local", ("--tp", 2)),
    ("glm4_moe_air", "local", ("--pp", 2)),
    ("deepseek_v3", "te", ("--tp", 2)),
    ("deepseek_v3", "local", ("--pp", 2)),
]


@pytest.mark.parametrize(
    ("name", "norm", "options"), CASES, ids=[f"{name} {' '.join(map(str, options))}" for name, _, options in CASES]
)
def test_megatron_core_computes_what_transformers_computes(
    model, convert, megatron_core, tmp_path, name, norm, options
):
    source, run = with_second(model(name), tmp_path / "hf"), tmp_path / "m"
    ran = convert("hf2megatron", source, run, "--norm", norm, "--megatron-version", "0.16", *options)
    assert ran.code == 0, ran.err
    assert "--mtp-num-layers 1" in (run / "megatron_flags.txt").read_text()
    code, out = megatron_core([str(run), str(source), norm], options[1], JUDGE)
    assert code == 0, out
    assert out.count("max abs logit difference") == 1
    assert convert("megatron2hf", run, tmp_path / "back").code == 0
    assert files(tmp_path / "back") == files(source)


def test_behind_linear_attention_it_builds_none(model, convert, megatron_core, tmp_path, monkeypatch):
    """The block is like the last layer of the decoder, and must have a mask; files that have one anyway are read."""
    layers = ["linear_attention", "full_attention", "linear_attention", "linear_attention"]
    source, run = with_second(model("qwen3_5_text", layer_types=layers), tmp_path / "hf"), tmp_path / "m"
    monkeypatch.setattr(mtp, "require_attention", lambda _: None)
    assert convert("hf2megatron", source, run, "--norm", "te", "--megatron-version", "0.16").code == 0
    code, out = megatron_core([str(run), str(source), "te"], 1, JUDGE)
    assert (code != 0, "AssertionError: Multi-Token Prediction (MTP) is not" in out) == (True, True), out
    assert "MultiTokenPredictionLayer" in out
    monkeypatch.undo()
    assert convert("megatron2hf", run, tmp_path / "back").code == 0
    assert files(tmp_path / "back") == files(source)


def add_copies(folder: Path) -> None:
    """Add the copies of embedding and head that the Hub's files have in such a layer."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    prefix = f"model.layers.{json.loads((folder / 'config.json').read_text())['num_hidden_layers']}."
    ends = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
    copies = {prefix + end: tensors[key].clone() for end, key in ends.items()}
    save_file(tensors | copies, folder / "model.safetensors", {"format": "pt"})


DIST = [
    ("deepseek_v3", ("--tp", 2, "--ep", 2, "--norm", "te"), "numbered", (2, 2)),
    ("glm4_moe", ("--pp", 2, "--norm", "local"), "split", (2, 1)),
    ("qwen3_5_text-tied", ("--pp", 2, "--norm", "te"), "stacked", (1, 1)),
]
"""A model, how it is written, how megatron-core's own save has its layers, and where that loads it (TP, PP)."""


def test_torch_dist(model, convert, megatron_core, tmp_path):
    """It loads strictly in another topology and computes the same; what it saves is read, and so is fsdp_dtensor."""
    jobs = []
    for number, (name, options, layers, (tp, pp)) in enumerate(DIST):
        source, run = with_second(model(name), tmp_path / f"hf{number}"), tmp_path / f"m{number}"
        ran = convert("hf2megatron", source, run, "--format", "torch_dist", "--megatron-version", "0.16", *options)
        assert ran.code == 0, ran.err
        job = {"dist": str(run), "hf": str(source), "tp": tp, "pp": pp, "mtp": True, "te": "te" in options}
        jobs.append({**job, "save": str(tmp_path / f"s{number}"), "layers": layers})
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    code, out = megatron_core([str(tmp_path / "jobs.json")], 1, DIST_JUDGE)
    assert code == 0, out
    assert out.count("max abs logit difference") == len(jobs)
    for number, job in enumerate(jobs):
        saved, back, source = tmp_path / f"s{number}", tmp_path / f"back{number}", Path(job["hf"])
        if "qwen" not in DIST[number][0]:
            add_copies(source)  # without an index they are written as in the Hub's files
        assert convert("megatron2hf", saved, back, "--config", source).code == 0
        assert files(back) == files(source)
        if "qwen" not in DIST[number][0]:  # fsdp_dtensor has no linear attention
            sharded, again = tmp_path / f"f{number}", tmp_path / f"again{number}"
            assert convert("reshard", saved, sharded, "--format", "fsdp_dtensor", "--config", source).code == 0
            assert convert("megatron2hf", sharded, again, "--config", source).code == 0
            assert files(again) == files(source)
