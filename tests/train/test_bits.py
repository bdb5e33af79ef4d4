"""8-bit moments and QLoRA: as bitsandbytes computes them in a plain loop, on CPUs too."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")
bnb = pytest.importorskip("bitsandbytes")

from tests.train.test_freezing import by_hand
from tests.train.test_lora import base_of, made_by_peft, require_as_peft
from train.model.adam8bit import Adam8bit
from train.settings.config import Optim

FLIPS = 5e-5
"""A gradient that is summed in another order, 1e-7 apart, may become the next 8-bit number."""


@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_moments_in_8_bits_are_those_of_bitsandbytes(settings, run, convert, model, data):
    config = settings(optim={"moments": "8bit"}, steps={"train_iters": 4})
    plain = base_of(model("llama", vocab_size=253), dtype=torch.float32)
    vectors = [tensor for tensor in plain.parameters() if tensor.dim() < 2]
    matrices = [tensor for tensor in plain.parameters() if tensor.dim() > 1]
    optimizer = bnb.optim.AdamW8bit([{"params": matrices}, {"params": vectors}], lr=1e-3, betas=(0.9, 0.95),
                                    weight_decay=0.0)  # fmt: skip
    losses, norms = by_hand(plain, data, 4, optimizer)
    reference = run(config, save="whole")
    assert reference.code == 0, reference.out
    assert reference.series("loss") != pytest.approx(run(config, "--optim.moments", "fp32", save="fp32").series("loss"))
    assert reference.series("loss") == pytest.approx(losses, abs=FLIPS)
    assert reference.series("grad_norm") == pytest.approx(norms, abs=FLIPS)
    stopped = run(config, "--steps.exit_interval", 2)
    assert stopped.code == 75, stopped.out
    resumed = run(config)
    assert resumed.code == 0, resumed.out
    assert resumed.series("loss") == reference.series("loss")  # bit for bit
    two = run(config, ranks=2, save="two")
    assert two.series("loss") == pytest.approx(losses, abs=2e-3)  # blocks are of other elements
    assert convert("verify", reference.save / "global_step104").code == 0


def test_moments_go_there_and_back():
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(80, 70), torch.nn.Linear(70, 5))
    optimizer = Adam8bit(model, Optim(lr=1e-3, moments="8bit"))
    for _ in range(3):
        model(torch.randn(7, 80)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    before = {shard: {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in state.items()}
              for shard, state in optimizer.inner.state.items()}  # fmt: skip
    assert {state["state1"].dtype for state in before.values()} == {torch.uint8, torch.float32}
    optimizer.unpack()
    optimizer.pack()
    for shard, state in before.items():
        for key, value in state.items():
            now = optimizer.inner.state[shard][key]
            assert torch.equal(now, value) if isinstance(value, torch.Tensor) else now == value, key


@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_qlora_is_lora_on_the_weights_of_bitsandbytes(settings, run, model, data, tmp_path):
    from peft import PeftModel

    base = model("llama", vocab_size=253)
    before = made_by_peft(base, tmp_path / "before")
    plain = base_of(base, dtype=torch.float32)
    with torch.no_grad():
        for name, tensor in plain.named_parameters():
            if name.endswith("proj.weight"):
                packed, state = bnb.functional.quantize_4bit(tensor, quant_type="nf4")
                rounded = bnb.functional.dequantize_4bit(packed, state)
                assert not torch.equal(rounded, tensor)
                tensor.copy_(rounded)
    losses, norms = by_hand(PeftModel.from_pretrained(plain, before, is_trainable=True), data, 3)
    config = settings(lora={"adapter": str(before), "quantize": "nf4"}, steps={"train_iters": 3})
    stopped = run(config, "--steps.exit_interval", 2)
    assert stopped.code == 75, stopped.out
    assert "adapters   4,608 of 160,448 parameters are trained" in stopped.out, stopped.out
    ran = run(config, "--export", tmp_path / "out", ranks=2)
    assert ran.code == 0, ran.out
    assert ran.series("loss") == pytest.approx(losses, abs=5e-6)
    assert ran.series("grad_norm") == pytest.approx(norms, abs=5e-6)
    require_as_peft(base, tmp_path / "out")  # merged into weights that are not quantized


def test_the_plan_counts_bits(settings, train):
    ran = train("plan", settings(lora={"quantize": "nf4"}, optim={"moments": "8bit"}), "--json")
    assert ran.code == 0, ran.err
    memory = json.loads(ran.out)["memory"]
    assert memory["quantized weights"] == 0.5625 * 4 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 96)
    assert memory["weights, gradients, moments"] == pytest.approx((4 + 4 + 2 * (1 + 1 / 64)) * 59_392, abs=1)


def test_experts_are_not_quantized(settings, run):
    refused = run(settings("mixtral", lora={"targets": ["q_proj"], "quantize": "nf4"}))
    assert refused.code == 4
    assert "mixtral has experts, which are not quantized here" in refused.out
