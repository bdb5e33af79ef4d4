"""Adapters: as peft makes, merges and loads them; the same on any ranks, and after an interruption."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

from formats.errors import RefusedError, UnsupportedError, UsageError
from tests.models import nearest_bfloat16
from tests.train.test_deepspeed import zero
from tests.train.test_freezing import by_hand
from train.model import lora
from train.model.trainee import filed, fill, make, open_config, place
from train.settings.config import Lora

LR = {"lr": 1e-2}
NEAR = 2e-6


def base_of(folder, **kwargs):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, **kwargs)


def tensors(folder):
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def load_adapter(folder):
    from safetensors.torch import load_file

    return load_file(folder / "adapter_model.safetensors")


def nearest(tensor):
    """A tensor of float64, rounded once to bf16."""
    return torch.from_numpy(nearest_bfloat16(tensor.numpy()).view("int16")).view(torch.bfloat16)


def require_as_peft(base, out):
    """OUT is what peft merges in float64, rounded once to bf16; every other weight is the base's."""
    from peft import PeftModel

    tokens = torch.arange(40)[None] % 250
    with torch.no_grad():
        before = base_of(base, dtype=torch.float32)(input_ids=tokens).logits
        model = PeftModel.from_pretrained(base_of(base, dtype=torch.float32), out / "adapter")
        adapted = model(input_ids=tokens).logits
        merged = model.merge_and_unload(safe_merge=True)
        after = merged(input_ids=tokens).logits
        exported = base_of(out)(input_ids=tokens).logits.float()
    assert torch.allclose(adapted, after, atol=1e-5)
    assert (adapted - before).abs().max() > 0.5
    assert (adapted - exported).abs().max() < 0.05 * adapted.abs().max()
    exact = PeftModel.from_pretrained(base_of(base, dtype=torch.float64), out / "adapter").double().merge_and_unload()
    ours, first = tensors(out), tensors(base)
    for name, tensor in exact.state_dict().items():
        assert torch.equal(ours[filed(name, merged.config.model_type)], nearest(tensor)), name
    changed = {name for name in first if not torch.equal(ours[name], first[name].bfloat16())}
    targets = json.loads((out / "adapter/adapter_config.json").read_bytes())["target_modules"]
    assert changed == {name for name in first if name.endswith(tuple(f".{target}.weight" for target in targets))}


@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_any_ranks_and_interruptions(settings, run, convert, model, tmp_path):
    config = settings(lora={}, optim=LR)
    reference = run(config, "--export", tmp_path / "out", save="whole")
    assert reference.code == 0, reference.out
    assert "adapters   59,392 of 215,232 parameters are trained" in reference.out
    losses = reference.series("loss")
    assert losses[-1] < losses[0] - 0.5

    stopped = run(config, "--steps.exit_interval", 4)
    assert stopped.code == 75, stopped.out
    resumed = run(config)
    assert resumed.series("loss") == losses  # so what is frozen has not changed in eight steps either
    from train.run.export import read_adapters

    ours, theirs = (read_adapters(result.save / "global_step108") for result in (resumed, reference))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert len(ours) == len(theirs) == 2 * 7 * 4

    hsdp = run(config, "--parallel.replicas", 2, "--batch.micro", 1, ranks=4, save="hsdp")
    assert hsdp.series("loss") == pytest.approx(losses, abs=2e-6)
    assert hsdp.series("grad_norm") == pytest.approx(reference.series("grad_norm"), abs=2e-6)

    require_as_peft(model("llama", vocab_size=253), tmp_path / "out")
    assert convert("verify", tmp_path / "out").code == 0
    refused = convert("fsdp2hf", reference.save / "global_step108", tmp_path / "none")
    assert refused.code == 4
    assert "holds a PEFT adapter" in refused.err
    assert "train run CONFIG.yml --export OUT" in refused.err
    alone = convert("fsdp2hf", reference.save / "global_step108", tmp_path / "alone", "--adapter", "only")
    assert alone.code == 0, alone.err
    ours, theirs = (load_adapter(folder) for folder in (tmp_path / "alone", tmp_path / "out/adapter"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_names_dropout_noise_and_bf16(settings, run, model, tmp_path):
    """Frozen weights in bf16, float32 adapters of some layers, in a family whose head has another name in its files."""
    base = model("gpt_neox", "bfloat16", vocab_size=253)
    adapter = {"targets": ["query_key_value", "dense"], "rank": 4, "alpha": 16, "dropout": 0.1}
    config = settings("gpt_neox", model={"path": str(base), "dtype": "bf16"}, lora=adapter, optim=LR, neftune_alpha=5)
    ran = run(config, "--export", tmp_path / "out")
    assert ran.code == 0, ran.out
    assert ran.series("loss")[-1] < ran.series("loss")[0] - 0.3
    require_as_peft(base, tmp_path / "out")


def made_by_peft(base, folder, **kwargs):
    """An adapter that peft has made, as if it were trained before."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM", **kwargs)
    torch.manual_seed(5)
    model = get_peft_model(base_of(base, dtype=torch.float32), config)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "lora_" in name:
                tensor.add_(torch.randn_like(tensor) * 0.05)
    model.save_pretrained(folder)
    return folder


@pytest.mark.distributed
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["rslora", "dora"])
def test_an_adapter_of_peft_trains_on_as_in_peft(settings, run, model, data, tmp_path, kind):
    from peft import PeftModel

    base = model("llama", vocab_size=253)
    before = made_by_peft(base, tmp_path / "before", **{f"use_{kind}": True})
    plain = PeftModel.from_pretrained(base_of(base, dtype=torch.float32), before, is_trainable=True)
    losses, norms = by_hand(plain, data, 3)
    config = settings(lora={"adapter": str(before)}, steps={"train_iters": 3})
    ran = run(config, "--steps.exit_interval", 2, "--export", tmp_path / "out")
    assert ran.code == 75, ran.out
    assert f"adapter    {before}" in ran.out
    ran = run(config, "--export", tmp_path / "out", ranks=2)
    assert ran.code == 0, ran.out
    assert ran.series("loss") == pytest.approx(losses, abs=NEAR)
    assert ran.series("grad_norm") == pytest.approx(norms, abs=5e-6)
    require_as_peft(base, tmp_path / "out")
    trained = plain.state_dict()
    for name, tensor in load_adapter(tmp_path / "out/adapter").items():
        last = ".default" if name.endswith("vector") else ""
        theirs = trained[name.replace(".weight", ".default.weight") + (f"{last}.weight" if last else "")]
        assert torch.allclose(tensor, theirs, atol=1e-5), name


def test_an_adapter_says_what_it_is(settings, train, model, tmp_path):
    before = made_by_peft(model("llama", vocab_size=253), tmp_path / "before", use_dora=True)
    ran = train("plan", settings(lora={"adapter": str(before)}), "--json")
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["trained"] == 4 * (4 * (64 + 64 + 96 + 64) + 64 + 64)
    wrong = train("plan", settings(lora={"adapter": str(before), "rank": 8}))
    assert (wrong.code, "lora.rank is 8, and" in wrong.err) == (2, True), wrong.err
    note = json.loads((before / "adapter_config.json").read_bytes())
    (before / "adapter_config.json").write_text(json.dumps(note | {"rank_pattern": {"q_proj": 2}}))
    odd = train("plan", settings(lora={"adapter": str(before)}))
    assert odd.code == 4
    assert "says rank_pattern = {'q_proj': 2}, which cannot be trained further here" in odd.err
    for start, why in (("mica", "PEFT trains its lora_A alone"), ("pissa", "which changed the weights of its base")):
        (before / "adapter_config.json").write_text(json.dumps(note | {"init_lora_weights": start}))
        odd = train("plan", settings(lora={"adapter": str(before)}))
        assert (odd.code, why in odd.err) == (4, True), odd.err


@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_every_engine_trains_the_same_adapters(settings, run, model, tmp_path):
    config = settings(
        lora={"dora": True, "targets": ["q_proj", "o_proj", "down_proj"]}, steps={"train_iters": 3}, optim=LR
    )
    fsdp = run(config, save="fsdp")
    assert fsdp.code == 0, fsdp.out
    stopped = run(config, "--steps.exit_interval", 1, save="trainer")
    assert stopped.code == 75, stopped.out
    trainer = run(config, "--engine", "transformers", "--export", tmp_path / "out", ranks=2, save="trainer")
    assert trainer.code == 0, trainer.out
    require_as_peft(model("llama", vocab_size=253), tmp_path / "out")
    for series in ("loss", "grad_norm"):
        assert trainer.series(series) == pytest.approx(fsdp.series(series), abs=NEAR)


@pytest.mark.distributed
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("stage", "dora"), [(1, False), (3, True)])
def test_zero_trains_the_same_adapters(settings, run, model, tmp_path, stage, dora):
    config = settings(lora={"targets": ["q_proj", "o_proj"], "dora": dora}, steps={"train_iters": 3}, optim=LR)
    fsdp = run(config, save="fsdp")
    assert fsdp.code == 0, fsdp.out
    stopped = run(config, *zero(stage, "--steps.exit_interval", 2), ranks=2)
    assert stopped.code == 75, stopped.out
    ran = run(config, *zero(stage, "--export", tmp_path / "out"), ranks=1 if stage == 1 else 2)
    assert ran.code == 0, ran.out
    for series in ("loss", "grad_norm"):
        assert ran.series(series) == pytest.approx(fsdp.series(series), abs=NEAR)
    require_as_peft(model("llama", vocab_size=253), tmp_path / "out")


def test_magnitudes_begin_as_those_of_peft(model, tmp_path):
    from peft import LoraConfig, get_peft_model

    base = model("llama", vocab_size=253)
    options = {"r": 16, "lora_alpha": 32, "target_modules": ["q_proj"], "use_dora": True}
    theirs = get_peft_model(base_of(base, dtype=torch.bfloat16), LoraConfig(**options)).state_dict()
    network, settings = make(open_config(base), "sdpa", torch.bfloat16), Lora(targets=["q_proj"], dora=True)
    lora.insert(network, settings, base)
    network.to_empty(device="cpu")
    with torch.no_grad():
        fill(network, base)
        for tensor, value in lora.begins(network, settings, base, 1):
            place(tensor, value)
    ours = {name: tensor for name, tensor in lora.adapters(network).items() if name.endswith("vector")}
    assert len(ours) == 4
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[f"{name}.default.weight"]), name


@pytest.mark.distributed
def test_layers_that_have_other_names_in_files(settings, run, model, tmp_path):
    """Hunyuan's shared experts."""
    config = settings("hy_v3", lora={"targets": ["q_proj", "down_proj"]}, optim=LR, steps={"train_iters": 2})
    ran = run(config, "--export", tmp_path / "out")
    assert ran.code == 0, ran.out
    from peft import PeftModel

    base, exported = (base_of(path).state_dict() for path in (model("hy_v3", vocab_size=253), tmp_path / "out"))
    adapted = base_of(model("hy_v3", vocab_size=253), dtype=torch.float64)
    merged = PeftModel.from_pretrained(adapted, tmp_path / "out/adapter").double().merge_and_unload().state_dict()
    assert all(torch.equal(exported[name].bfloat16(), nearest(tensor)) for name, tensor in merged.items()
               if "correction_bias" not in name)  # fmt: skip
    changed = {
        name.rpartition(".mlp.")[2] for name, tensor in merged.items() if not torch.equal(tensor, base[name].double())
    }
    assert "shared_experts.down_proj.weight" in changed


def test_the_plan_counts_them(settings, train):
    ran = train("plan", settings(lora={}), "--ranks", 2, "--json")
    assert ran.code == 0, ran.err
    plan = json.loads(ran.out)
    assert (plan["parameters"], plan["trained"]) == (215_232, 59_392)
    assert plan["memory"]["frozen weights"] == 4 * 155_840 // 2
    assert plan["memory"]["weights, gradients, moments"] == 16 * 59_392 // 2
    some = train("plan", settings(lora={"targets": ["q_proj", "down_proj"], "rank": 2}), "--json")
    assert json.loads(some.out)["trained"] == 4 * 2 * (64 + 64 + 96 + 64)
    single = train("plan", settings(), "--lora.targets", "q_proj", "--json")
    assert json.loads(single.out)["trained"] == 4 * 16 * (64 + 64)
    wrong = train("plan", settings(), "--lora.targets", "q_porj")
    assert wrong.code == 2
    assert "q_porj is no matrix of llama" in wrong.err


@pytest.fixture
def small(model):
    """A model without memory."""
    from transformers import AutoConfig

    return lambda family="llama": make(AutoConfig.from_pretrained(model(family, vocab_size=253)), "sdpa")


def test_adapters_begin_as_those_of_peft(small, tmp_path):
    started = []
    for seed in (1, 1, 2):
        network = small()
        lora.insert(network, Lora(rank=8), tmp_path)
        network.to_empty(device="cpu")
        with torch.no_grad():
            for tensor, value in lora.begins(network, Lora(rank=8), tmp_path, seed):
                place(tensor, value)
        started.append(lora.adapters(network))
    first, same, other = started
    for name, tensor in first.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, same[name])
        if ".lora_B." in name:
            assert not tensor.any()
        else:
            bound = tensor.shape[1] ** -0.5
            assert 0.9 * bound < tensor.abs().max() <= bound
            assert not torch.equal(tensor, other[name])


@pytest.mark.parametrize(
    ("family", "target", "message"),
    [
        ("llama", "q_porj", "q_porj is no linear layer of llama"),
        ("llama", "embed_tokens", "embed_tokens is no linear layer"),
        ("llama", "norm", "norm is no linear layer"),
        ("llama-tied", "lm_head", "lm_head is tied to the embedding"),
    ],
)
def test_targets_that_cannot_be(small, tmp_path, family, target, message):
    with pytest.raises(UsageError, match=message):
        lora.insert(small(family), Lora(targets=["v_proj", target]), tmp_path)


def test_another_adapter_is_refused(small, tmp_path):
    def with_adapter(**options):
        network = small()
        lora.insert(network, Lora(**options), tmp_path / "base")
        return network

    with pytest.raises(RefusedError, match="holds all weights, and the settings have lora"):
        lora.check_same(tmp_path, with_adapter())
    lora.write_note(tmp_path, with_adapter())
    lora.check_same(tmp_path, with_adapter())
    with pytest.raises(RefusedError, match="holds an adapter, and the settings have no lora"):
        lora.check_same(tmp_path, small())
    with pytest.raises(RefusedError, match=r"lora\.rank: 16, now 8; lora\.alpha: 32, now 8"):
        lora.check_same(tmp_path, with_adapter(rank=8, alpha=8))
    with pytest.raises(RefusedError, match=r"lora\.targets: .*, now \['q_proj'\]"):
        lora.check_same(tmp_path, with_adapter(targets=["q_proj"]))
    with pytest.raises(UnsupportedError, match="holds a PEFT adapter beside its weights"):
        lora.insert(small(), Lora(), tmp_path)


def test_adapters_of_experts_are_refused(small, tmp_path):
    with pytest.raises(UnsupportedError, match="peft would put adapters on the experts of mixtral"):
        lora.insert(small("mixtral"), Lora(), tmp_path)
    lora.insert(small("mixtral"), Lora(targets=["q_proj"]), tmp_path)
    with pytest.raises(UnsupportedError) as failed:
        lora.insert(small("glm4_moe_lite"), Lora(), tmp_path)
    assert "[kv_a_proj_with_mqa, kv_b_proj, o_proj, q_a_proj, q_b_proj]" in failed.value.hint
