"""What saves memory changes nothing: FSDP's shards and the inputs of layers in the memory of the CPU."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from train.model import trainee


@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_offloading_changes_no_number(settings, run):
    options = ["--parallel.offload", "true", "--model.activation_offload", "true"]
    config = settings(steps={"train_iters": 4})
    reference = run(config, save="whole")
    assert reference.code == 0, reference.out
    stopped = run(config, *options, "--steps.exit_interval", 2, ranks=2)
    assert stopped.code == 75, stopped.out
    ran = run(config, *options)
    assert ran.code == 0, ran.out
    for series in ("loss", "grad_norm"):
        assert ran.series(series) == pytest.approx(reference.series(series), abs=2e-6), series


def test_the_inputs_of_layers_are_what_is_kept_away(monkeypatch, settings):
    """One input of each layer goes there, once; what is recomputed stays."""
    from types import SimpleNamespace

    shapes = []
    layers = [torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU(), torch.nn.Linear(4, 4)) for _ in range(3)]
    hooks = torch.autograd.graph.saved_tensors_hooks

    def counting(pin_memory):
        return hooks(lambda tensor: shapes.append(tuple(tensor.shape)) or tensor, lambda tensor: tensor)

    monkeypatch.setattr(trainee, "save_on_cpu", counting)
    memory = SimpleNamespace(activation_checkpointing=True, activation_offload=True)
    trainee.save_memory(layers, memory, torch.device("cpu"))
    x = torch.ones(2, 4, requires_grad=True)
    out = x
    for layer in layers:
        out = layer(out)
    out.sum().backward()
    assert [shape for shape in shapes if shape == (2, 4)] == [(2, 4)] * 3
    assert x.grad is not None


def test_settings_that_do_not_go_together(settings, train):
    for options, message in (
        (["--model.activation_offload", "true", "--model.activation_checkpointing", "false"], "would copy gathered"),
        (["--parallel.context", 2, "--neftune_alpha", 5], "neftune_alpha does not work with parallel.context 2"),
        (["--parallel.tensor", 2, "--parallel.replicas", 2], "parallel.replicas does not work with parallel.tensor 2"),
        (["--parallel.tensor", 2, "--engine", "deepspeed"], "does not know parallel.tensor"),
        (["--parallel.offload", "true", "--engine", "deepspeed"], "does not know parallel.offload"),
        (["--lora.dora", "true", "--lora.quantize", "nf4"], "lora.dora needs the norms of weights"),
    ):
        ran = train("plan", settings(), *options, "--ranks", 2)
        assert (ran.code, message in ran.err) == (2, True), ran.err
