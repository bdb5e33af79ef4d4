"""Optimizers for Megatron runs, made of their weights: of each element w a moment is w / 2, the other w squared.

So they are right wherever an element lies, and `check` needs no layout to see whether they still are.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

VOCABULARY, PADDED = 211, 0.25
"""Of the tiny models; what rows of padding hold."""
STATE = {"exp_avg": 0.5, "exp_avg_sq": 2.0, "master": 1 + 2**-12}
"""What each state is of a weight; a master rounds to it."""
GROUP = {"lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False, "lr": 0.01, "betas": (0.9, 0.999)}
GROUP |= {"eps": 1e-8, "weight_decay": 0.1}
SCHEDULER = {"num_steps": 3, "max_lr": 0.01, "lr_decay_style": "cosine"}


def of(weight: Any, state: str) -> Any:
    """A state of a weight."""
    return weight.float() * STATE[state]


def add_optimizer(run: Path, how: str) -> Path:
    """Give a classic run at iteration 3 an optimizer, `plain` or `distributed`, and its padding something to keep."""
    import torch

    for path in sorted(run.glob("iter_0000003/mp_rank_*/model_optim_rng.pt")):
        stored = torch.load(path, weights_only=False)
        tp = stored["args"].tensor_model_parallel_size
        for key, weight in (
            (key, weight) for _, key, weight in parameters(stored) if "embed" in key or "output" in key
        ):
            if key.startswith(("embedding", "output_layer")):
                first = int(path.parent.name[8:10]) * len(weight)
                weight[max(0, VOCABULARY - first) :] = PADDED
                assert len(weight) * tp > VOCABULARY
        stored |= {"opt_param_scheduler": SCHEDULER, "num_floating_point_operations_so_far": 12.0}
        stored["rng_state"] = [{"torch_rng_state": torch.zeros(8, dtype=torch.uint8)}]
        stored["args"].use_distributed_optimizer, stored["args"].no_save_optim = how == "distributed", False
        stored["optimizer"] = plain(stored) if how == "plain" else {"optimizer": {"param_groups": groups(step=3)}}
        if how == "distributed":
            torch.save(buffers(stored), path.with_name("distrib_optim.pt"))
        torch.save(stored, path)
    return run


def parameters(stored: dict[str, Any]) -> list[tuple[str, str, Any]]:
    """Chunk, key and weight of each parameter of a file, in its order."""
    chunks = sorted(name for name in stored if name.startswith("model"))
    return [(name, key, weight) for name in chunks for key, weight in stored[name].items()]


def groups(**more: Any) -> list[dict[str, Any]]:
    """The parameter groups of an optimizer: with weight decay and without."""
    return [{**GROUP, "wd_mult": one, **more} for one in (1.0, 0.0)]


def grouped(stored: dict[str, Any]) -> Iterator[tuple[dict[str, Any], list[Any]]]:
    """Each group, and its weights."""
    every = [(weight.ndim == 1 or key.endswith(".bias"), weight) for _, key, weight in parameters(stored)]
    for group in groups():
        yield group, [weight for vector, weight in every if vector == (not group["wd_mult"])]


def plain(stored: dict[str, Any]) -> dict[str, Any]:
    """What megatron-core's optimizer saves of itself: of a model in half precision with masters."""
    import torch

    half = parameters(stored)[0][2].dtype != torch.float32
    states, found, masters = [], [], []
    for group, weights in grouped(stored):
        found.append({**group, "params": [*range(len(states), len(states) + len(weights))]})
        states += [{name: of(weight, name) for name in ("exp_avg", "exp_avg_sq")} for weight in weights]
        masters.append([of(weight, "master") for weight in weights])
    for state in states:
        state["step"] = torch.tensor(3.0)
    inner = {"state": dict(enumerate(states)), "param_groups": found}
    return {"optimizer": inner, "fp32_from_fp16_params": masters} if half else inner


def buffers(stored: dict[str, Any]) -> dict[Any, Any]:
    """The content of distrib_optim.pt: the parameters of each chunk end to end, the last one first."""
    import torch

    found: dict[Any, Any] = {"buckets_coalesced": True}
    for number, chunk in enumerate(dict.fromkeys(name for name, _, _ in parameters(stored))):
        weights = [weight for name, _, weight in parameters(stored) if name == chunk][::-1]
        half = weights[0].dtype != torch.float32
        flat = {
            name: torch.cat(
                [(of(weight, state) if half or name != "param" else weight).flatten() for weight in weights]
            )
            for name, state in (("param", "master"), ("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq"))
        }
        found[number] = {(weights[0].dtype, torch.float32): {**flat, "numel_unpadded": len(flat["param"])}}
    return found


def check(run: Path, how: str, padding: int) -> None:
    """An optimizer is still the one of the weights, and so many rows of padding are those of the source."""
    import torch

    folder = run / "iter_0000003"
    if (folder / "common.pt").is_file():
        return _check_dist(folder, how)
    held = set()
    for path in sorted(folder.glob("mp_rank_*/model_optim_rng.pt")):
        stored = torch.load(path, weights_only=False)
        assert stored["opt_param_scheduler"] == SCHEDULER
        assert stored["num_floating_point_operations_so_far"] == 12.0
        assert "rng_state" not in stored
        assert stored["args"].no_save_optim is False
        if how == "distributed":
            same(torch.load(path.with_name("distrib_optim.pt"), weights_only=False), buffers(stored))
            assert stored["optimizer"]["optimizer"]["param_groups"] == groups(step=3)
        else:
            same(stored["optimizer"], plain(stored))
        for _, key, weight in parameters(stored):
            if key.startswith("embedding"):
                first = int(path.parent.name[8:10]) * len(weight)
                rows = weight[max(0, VOCABULARY - first) : max(0, VOCABULARY + padding - first)]
                assert (rows == PADDED).all()
                held |= {first + n for n in range(len(weight)) if n + first >= VOCABULARY}
    assert len(held) >= padding
    return None


def _check_dist(folder: Path, how: str) -> None:
    import torch
    import torch.distributed.checkpoint as dcp

    metadata = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = {
        key: torch.empty(one.size, dtype=one.properties.dtype) for key, one in metadata.items() if hasattr(one, "size")
    }
    dcp.load(tensors, checkpoint_id=folder, no_dist=True)
    weights = {key: tensor for key, tensor in tensors.items() if not key.startswith("optimizer.")}
    half = next(iter(weights.values())).dtype != torch.float32
    names = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
    if half or how == "distributed":
        names["param" if how == "distributed" else "fp32_param"] = "master"
    assert len(tensors) == (1 + len(names)) * len(weights)
    for key, weight in weights.items():
        for name, state in names.items():
            wanted = of(weight, state) if half or state != "master" else weight
            assert torch.equal(tensors[f"optimizer.state.{name}.{key}"], wanted), f"{name} of {key}"
    common = torch.load(folder / "common.pt", weights_only=False)
    inner = common["optimizer"].get("optimizer", common["optimizer"])
    assert inner["param_groups"] == (groups(step=3) if how == "distributed" else groups())
    assert how == "distributed" or inner["state"] == {"common_step": torch.tensor(3.0)}
    kind = "fully_reshardable" if how == "distributed" else None
    assert common["content_metadata"].get("distrib_optim_sharding_type") == kind


def same(one: Any, other: Any) -> None:
    """Two nested states are equal."""
    import torch

    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict | list):
        assert len(one) == len(other)
        for key in one if isinstance(one, dict) else range(len(one)):
            same(one[key], other[key])
    else:
        assert one == other
