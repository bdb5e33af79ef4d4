"""Mixtures of experts: read out of the Hub's files, trained, and their checkpoints converted."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from tests.models import EXPERTS, FUSED_HERE, LINEAR
from train.model.fused_experts import Fused
from train.model.trainee import fill, fill_buffers, make, open_config, pieces, weights

NEAR = 2e-6
OTHERS = ("llama3", "qwen3-tied", "gpt_neox", "phi3")


@pytest.mark.parametrize("name", [*(name for name in EXPERTS if name not in LINEAR), *FUSED_HERE, *OTHERS])
def test_what_is_read_is_what_transformers_reads(model, name):
    from transformers import AutoModelForCausalLM

    folder = model(name)
    ours = make(open_config(folder), "eager").to_empty(device="cpu")
    ours.tie_weights()
    fill_buffers(ours, torch.device("cpu"))
    theirs, tokens = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager"), torch.arange(90)[None]
    with torch.no_grad():
        fill(ours, folder)
        logits = ours.eval()(input_ids=tokens).logits
        assert torch.equal(logits, theirs(input_ids=tokens).logits)  # by frequencies of positions too
    assert weights(ours).keys() == weights(theirs).keys()
    for key, tensor in weights(ours).items():
        assert torch.equal(tensor, weights(theirs)[key]), key


def test_a_rank_reads_its_box(model):
    folder = model("qwen3_moe")
    fused = [piece for _, piece in pieces(make(open_config(folder), "sdpa"), folder) if isinstance(piece, Fused)]
    shape = fused[0].get_shape()
    assert len(shape) == 3
    everything = fused[0][...]
    assert list(everything.shape) == shape
    half, rows = shape[0] // 2, shape[1] // 2
    box = (slice(half, shape[0]), slice(rows - 3, rows + 5), slice(1, 7))  # over the border of gate and up
    assert torch.equal(fused[0][box], everything[box])
    assert torch.equal(fused[0][half : half + 1], everything[half : half + 1])  # as DeepSpeed's ranks do


@pytest.mark.parametrize(
    ("key", "tensor", "message"),
    [
        ("model.layers.1.block_sparse_moe.experts.2.w3.weight", None, r"lacks 1 tensors, such as .*experts\.2\.w3"),
        ("model.norm.weight", None, r"lacks 1 tensors, such as model\.norm\.weight"),
        ("model.norm.bias", torch.zeros(64), r"has, and the model has not, 1 tensors, such as model\.norm\.bias"),
        ("model.norm.weight", torch.zeros(3), r"model\.norm\.weight of .* has the shape \[3\], the model \(64,\)"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(model, tmp_path, key, tensor, message):
    from safetensors.torch import load_file, save_file

    from formats.errors import SourceError

    folder = model("mixtral")
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: value for name, value in tensors.items() if name != key} | (
        {} if tensor is None else {key: tensor}
    )
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    save_file(tensors, tmp_path / "model.safetensors")
    with torch.no_grad(), pytest.raises(SourceError, match=message):
        fill(make(open_config(tmp_path), "sdpa").to_empty(device="cpu"), tmp_path)


def test_a_layer_for_further_tokens_has_a_hint(model, tmp_path):
    """As GLM-4.5-Air has one in the Hub's files."""
    from safetensors.torch import load_file, save_file

    from formats.errors import SourceError

    folder = model("glm4_moe")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    tensors = load_file(folder / "model.safetensors")
    for name, hint in (("model.layers.46.eh_proj.weight", "--drop mtp"), ("model.layers.46", "")):
        save_file({**tensors, name: torch.ones(2)}, tmp_path / "model.safetensors")
        with torch.no_grad(), pytest.raises(SourceError, match="has, and the model has not, 1 tensors") as failed:
            fill(make(open_config(tmp_path), "sdpa").to_empty(device="cpu"), tmp_path)
        assert hint in failed.value.hint
        assert bool(hint) == bool(failed.value.hint)


def test_a_buffer_that_nothing_computes_is_refused(model, monkeypatch):
    """One whose class makes it without a value."""
    from formats.errors import UnsupportedError

    ours = make(open_config(model("gemma3")), "eager").to_empty(device="cpu")
    ours.get_decoder().register_buffer("chance", torch.empty(2), persistent=False)
    with pytest.raises(UnsupportedError, match=r"gemma3_text has a buffer model\.chance that nothing fills"):
        fill_buffers(ours, torch.device("cpu"))


def test_a_loss_of_the_router_that_a_class_lacks_is_refused(model):
    from formats.errors import UnsupportedError
    from train.model.trainee import Trainee

    config = open_config(model("llama"))
    config.output_router_logits = True
    with pytest.raises(UnsupportedError, match="LlamaForCausalLM has no loss of the router"):
        Trainee(make(config, "sdpa"), "sdpa")


@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_the_loss_of_the_router_is_that_of_transformers(model, data, settings, run, tmp_path):
    """Of a batch of one row, whose documents a mask of blocks keeps apart; and the same on any ranks."""
    import json
    import shutil

    from transformers import AutoModelForCausalLM

    from train.data.rows import open_rows
    from train.settings.batching import Order
    from train.settings.config import Data

    folder = tmp_path / "start"
    shutil.copytree(model("mixtral", vocab_size=253), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"output_router_logits": True, "router_aux_loss_coef": 0.5, "router_z_loss_coef": 0.1})
    )
    rows = open_rows(Data(train=[data], seq_length=64), [data], 1234)
    flat = rows.flat([Order(len(rows), 1234, 8).row(0)])
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    begins = torch.zeros(len(flat.labels), dtype=torch.int64)
    begins[flat.cu_seqlens[1:-1].tolist()] = 1
    document = begins.cumsum(0)
    visible = (document[:, None] == document[None]).tril()[None, None]
    mask = torch.zeros(visible.shape).masked_fill(~visible, -1e9)
    labels = torch.from_numpy(flat.labels)
    out = plain.model(
        input_ids=torch.from_numpy(flat.input_ids)[None], position_ids=torch.from_numpy(flat.position_ids)[None],
        attention_mask=mask, output_router_logits=True, use_cache=False,
    )  # fmt: skip
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
    from transformers.models.switch_transformers.modeling_switch_transformers import router_z_loss_func

    logits = plain.lm_head(out.last_hidden_state[0])
    loss = torch.nn.functional.cross_entropy(logits, labels)
    loss = loss + 0.5 * load_balancing_loss_func(out.router_logits, plain.num_experts, plain.num_experts_per_tok)
    loss = loss + 0.1 * router_z_loss_func(torch.stack(out.router_logits))
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
    options = ["--model.path", folder, "--steps.train_iters", 1]
    single = run(settings("mixtral"), *options, "--batch.size", 1, "--batch.micro", 1, save="one")
    assert single.code == 0, single.out
    assert single.series("loss") == pytest.approx([float(loss)], abs=NEAR)
    assert single.series("grad_norm") == pytest.approx([float(norm)], abs=1e-5)
    many = run(settings("mixtral"), *options, "--batch.micro", 4, save="many")
    ranks = run(settings("mixtral"), *options, "--batch.micro", 1, ranks=2, save="ranks")
    for series in ("loss", "grad_norm"):
        assert many.series(series) == pytest.approx(ranks.series(series), abs=1e-5)


@pytest.mark.parametrize("name", ["ernie4_5_moe", "minimax_m2", "hy_v3", "glm4_moe"])
def test_what_nothing_trains_is_not_rounded(model, name):
    """The bias by which a router chooses, in bf16 too, as frozen weights beside adapters are."""
    skeleton = make(open_config(model(name)), "eager", torch.bfloat16)
    assert all(tensor.requires_grad for tensor in skeleton.parameters())
    assert {tensor.dtype for key, tensor in weights(skeleton).items() if "correction_bias" in key} == {torch.float32}


@pytest.mark.distributed
@pytest.mark.parametrize(("name", "stage"), [("ernie4_5_moe", 3), ("minimax_m2", 1)])
def test_zero_does_not_round_the_bias_of_a_router(run, settings, convert, model, tmp_path, name, stage):
    from safetensors.torch import load_file

    argv = ["--engine", "deepspeed", "--parallel.zero_stage", stage, "--model.dtype", "bf16", "--steps.train_iters", 2]
    ran = run(settings(name), *argv, ranks=2)
    assert ran.code == 0, ran.out
    assert convert("zero2hf", ran.save / "global_step102", tmp_path / "hf").code == 0
    before, behind = (
        load_file(folder / "model.safetensors") for folder in (model(name, vocab_size=253), tmp_path / "hf")
    )
    assert before.keys() == behind.keys()
    biases = [key for key in before if key.endswith("correction_bias")]
    assert len(biases) > 1
    for key in biases:
        assert torch.equal(before[key], behind[key]), key


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_two_ranks_train_as_one(run, settings, convert, tmp_path, name):
    alone = run(settings(name), save="alone")
    both = run(settings(name), ranks=2, save="both")
    assert (alone.code, both.code) == (0, 0), alone.out + both.out
    assert both.series("loss") == pytest.approx(alone.series("loss"), abs=NEAR)
    newest = both.save / (both.save / "latest").read_text().strip()
    assert convert("fsdp2hf", newest, tmp_path / "hf").code == 0
    from transformers import AutoModelForCausalLM

    _, report = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
