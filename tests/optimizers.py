"""Optimizers for Megatron runs, made of their weights: of each element w a moment is w / 2, the other w squared.

So they are right wherever an element lies, and `check` needs no layout to see whether they still are.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

VOCABULARY, PADDED = 211, 0.25
"""Of the tiny models; what rows of padding hold."""
STATE = {"exp_avg": 0.5, "exp_avg_sq": 1.0, "master": 1 + 2**-12}
"""What each state is of a weight, the second moment of its square; a master rounds to it."""
GROUP = {"lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False, "lr": 0.01, "betas": (0.9, 0.999)}
GROUP |= {"eps": 1e-8, "weight_decay": 0.1, "amsgrad": False}
SCHEDULER = {"num_steps": 3, "max_lr": 0.01, "lr_decay_style": "cosine"}


def of(weight: Any, state: str) -> Any:
    """A state of a weight."""
    scaled = weight.float() * STATE[state]
    return scaled * scaled if state == "exp_avg_sq" else scaled


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
        stored["optimizer"] = plain(stored) if how == "plain" else settings(stored)
        if how == "distributed":
            torch.save(buffers(stored, path.parent.name), path.with_name("distrib_optim.pt"))
        torch.save(stored, path)
    return run


Parameters = list[tuple[str, str, Any]]
"""Chunk, key and weight of each."""


def parameters(stored: dict[str, Any]) -> Parameters:
    """The parameters of a file, in its order; what corrects a router is none."""
    chunks = sorted(name for name in stored if name.startswith("model"))
    every = [(name, key, weight) for name in chunks for key, weight in stored[name].items()]
    return [parameter for parameter in every if not parameter[1].endswith("expert_bias")]


def shares(stored: dict[str, Any]) -> list[Parameters]:
    """The parameters of each optimizer of a file: with experts on several ranks these have their own."""
    every = parameters(stored)
    if stored["args"].expert_model_parallel_size == 1:
        return [every]
    return [[parameter for parameter in every if (".experts." in parameter[1]) == experts] for experts in (False, True)]


def chained(stored: dict[str, Any], of: Callable[[Parameters, bool], Any]) -> Any:
    """What a file holds of its one optimizer, or a list of both."""
    states = [of(share, bool(number)) for number, share in enumerate(shares(stored))]
    return states if len(states) > 1 else states[0]


def settings(stored: dict[str, Any]) -> Any:
    """What a distributed optimizer saves of itself beside the weights, with the step of torch's Adam."""
    return chained(stored, lambda _, experts: {"optimizer": {"param_groups": groups(experts=experts, step=3.0)}})


def groups(*, experts: bool = False, **more: Any) -> list[dict[str, Any]]:
    """The parameter groups of an optimizer: with weight decay and, for all but experts, without."""
    every = [{**GROUP, "is_expert_parallel": experts, "wd_mult": decay, **more} for decay in (1.0, 0.0)]
    return every[:1] if experts else every


def plain(stored: dict[str, Any]) -> Any:
    """What megatron-core's optimizer saves of itself: of a model in half precision with master weights."""
    return chained(stored, lambda share, experts: _plain(share, experts, half(stored)))


def _plain(share: Parameters, experts: bool, half: bool) -> dict[str, Any]:
    import torch

    every = [(weight.ndim == 1 or key.endswith(".bias"), weight) for _, key, weight in share]
    states, param_groups, masters = [], [], []
    for group in groups(experts=experts):
        weights = [weight for vector, weight in every if vector == (not group["wd_mult"])]
        param_groups.append({**group, "params": [*range(len(states), len(states) + len(weights))]})
        states += [{name: of(weight, name) for name in ("exp_avg", "exp_avg_sq")} for weight in weights]
        masters.append([of(weight, "master") for weight in weights])
    for state in states:
        state["step"] = torch.tensor(3.0)
    inner = {"state": dict(enumerate(states)), "param_groups": param_groups}
    return {"optimizer": inner, "fp32_from_fp16_params": masters} if half else inner


def half(stored: dict[str, Any]) -> bool:
    """Whether there are master weights beside the weights."""
    import torch

    return any(weight.dtype != torch.float32 for _, _, weight in parameters(stored))


def buffers(stored: dict[str, Any], folder: str) -> Any:
    """The content of distrib_optim.pt in a rank's folder; dense parameters are on the first data rank alone."""
    args = stored["args"]
    tp, ep = args.tensor_model_parallel_size, args.expert_model_parallel_size
    of_stage = 0
    if ep > 1:
        etp, ranks = args.expert_tensor_parallel_size, (int(folder[8:10]), int(folder[-3:]))
        of_stage = next(rank for rank in range(ep * etp) if (rank % tp, rank // etp % ep) == ranks)
    return chained(stored, lambda share, experts: _buffers(share, half(stored)) if experts or of_stage < tp else None)


def _buffers(share: Parameters, half: bool) -> dict[Any, Any]:
    """The parameters of each chunk end to end, the last one first."""
    import torch

    by_chunk: dict[Any, Any] = {"buckets_coalesced": True}
    for number, chunk in enumerate(dict.fromkeys(name for name, _, _ in share)):
        weights = [weight for name, _, weight in share if name == chunk][::-1]
        flat = {
            name: torch.cat(
                [(of(weight, state) if half or name != "param" else weight).flatten() for weight in weights]
            )
            for name, state in (("param", "master"), ("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq"))
        }
        by_chunk[number] = {(weights[0].dtype, torch.float32): {**flat, "numel_unpadded": len(flat["param"])}}
    return by_chunk


def check(run: Path, how: str, padding: int) -> None:
    """An optimizer is still the one of the weights, and so many rows of padding are those of the source."""
    import torch

    folder = run / "iter_0000003"
    if (folder / "common.pt").is_file():
        return _check_dist(folder, how)
    padded = set()
    for path in sorted(folder.glob("mp_rank_*/model_optim_rng.pt")):
        stored = torch.load(path, weights_only=False)
        assert stored["opt_param_scheduler"] == SCHEDULER
        assert stored["num_floating_point_operations_so_far"] == 12.0
        assert "rng_state" not in stored
        assert stored["args"].no_save_optim is False
        if how == "distributed":
            same(torch.load(path.with_name("distrib_optim.pt"), weights_only=False), buffers(stored, path.parent.name))
            assert stored["optimizer"] == settings(stored)
        else:
            same(stored["optimizer"], plain(stored))
        for _, key, weight in parameters(stored):
            if key.startswith("embedding"):
                first = int(path.parent.name[8:10]) * len(weight)
                rows = weight[max(0, VOCABULARY - first) : max(0, VOCABULARY + padding - first)]
                assert (rows == PADDED).all()
                padded |= {first + n for n in range(len(weight)) if n + first >= VOCABULARY}
    assert len(padded) >= padding
    return None


def _check_dist(folder: Path, how: str) -> None:
    import torch
    import torch.distributed.checkpoint as dcp

    metadata = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in metadata.items()
        if hasattr(entry, "size")
    }
    dcp.load(tensors, checkpoint_id=folder, no_dist=True)
    weights = {key: tensor for key, tensor in tensors.items() if not key.startswith("optimizer.")}
    weights = {key: weight for key, weight in weights.items() if not key.endswith("expert_bias")}
    half = next(iter(weights.values())).dtype != torch.float32
    names = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
    if half or how == "distributed":
        names["param" if how == "distributed" else "fp32_param"] = "master"
    assert sum(key.startswith("optimizer.") for key in tensors) == len(names) * len(weights)
    for key, weight in weights.items():
        for name, state in names.items():
            expected = of(weight, state) if half or state != "master" else weight
            assert torch.equal(tensors[f"optimizer.state.{name}.{key}"], expected), f"{name} of {key}"
    common = torch.load(folder / "common.pt", weights_only=False)
    optimizer = common["optimizer"]
    several = common["args"].expert_model_parallel_size > 1
    assert not several or [*optimizer] == [0, 1]
    for experts, outer in ((False, optimizer[0]), (True, optimizer[1])) if several else ((False, optimizer),):
        inner = outer.get("optimizer", outer)
        more = {"step": 3} if how == "distributed" else {}
        assert inner["param_groups"] == groups(experts=experts, **more)
        assert how == "distributed" or inner["state"] == {"common_step": torch.tensor(3.0)}
    kind = "fully_reshardable" if how == "distributed" else None
    assert common["content_metadata"].get("distrib_optim_sharding_type") == kind


def same(first: Any, second: Any) -> None:
    """Two nested states are equal."""
    import torch

    if isinstance(first, torch.Tensor):
        assert torch.equal(first, second)
    elif isinstance(first, dict | list):
        assert len(first) == len(second)
        for key in first if isinstance(first, dict) else range(len(first)):
            same(first[key], second[key])
    else:
        assert first == second
