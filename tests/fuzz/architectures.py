"""Random architectures of transformers, with and without a table, saved as trainers save them: the same tensors back.

Each is a small model of a random class that generates text. A new architecture of the installed transformers is tried
without a change here. What is saved is judged by `from_pretrained`: nothing missing, and equal to the last bit.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from tests.architectures.sizes import SMALL, SPECIAL, with_changes

LARGEST = 20_000_000
"""Parameters of a model that is still taken."""
Saved = Callable[[Path, dict[str, Any], random.Random], list[str]]


LAYER_KEYS = ("indexer_types", "layer_types", "mlp_layer_types", "layers_block_type", "block_types", "per_layer_config")
"""Keys that say something of each layer; a class makes them itself of the number of these."""
UNSAID = ("head_dim", "n_routed_experts", "n_shared_experts", "num_experts_per_tok", "num_key_value_heads")
"""Sizes that some classes leave to be null, and others cannot compute with."""


def smaller(config: dict[str, Any], *, sparse: bool = False) -> dict[str, Any]:
    """A config with small sizes, in its inner configs too; of a sparse one all else is left to its class."""
    small = {}
    for key, value in config.items():
        if isinstance(value, dict) and key.endswith("_config"):
            small[key] = smaller(value, sparse=sparse)
        elif key in SMALL and (type(value) is int or (value is None and key in UNSAID)):
            small[key] = SMALL[key]
        elif key in LAYER_KEYS or (sparse and key != "model_type"):
            continue
        else:
            small[key] = 1 if key.endswith("token_id") and type(value) is int else value
    return small


def classes() -> list[str]:
    """The model types that generate text, in a fixed order."""
    from transformers.models.auto import modeling_auto

    both = {
        **modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        **modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    }
    return sorted(both)


def class_of(kind: str, config: Mapping[str, Any]) -> str:
    """The class that generates text of a type: that of images too, where the config is of more than text."""
    from transformers.models.auto import modeling_auto

    texts, both = (
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )
    inner = any(key in config for key in ("text_config", "vision_config"))
    name = both[kind] if kind in both and (inner or kind not in texts) else texts[kind]
    return name if isinstance(name, str) else name[0]


def build(kind: str, seed: int) -> Any | None:
    """A random model of a type; None where its class does not take the small sizes."""
    with contextlib.suppress(Exception):  # not every class takes these sizes, and some need what is not installed
        return built(kind, seed, sparse=False)
    with contextlib.suppress(Exception):
        return built(kind, seed, sparse=True)
    return None


def built(kind: str, seed: int, *, sparse: bool) -> Any:
    """The same with the settings of its config, or with those alone that are smaller; an error says why not."""
    import torch
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    defaults = CONFIG_MAPPING[kind]().to_dict()
    config = CONFIG_MAPPING[kind].from_dict(with_changes(smaller(defaults, sparse=sparse), SPECIAL.get(kind, {})))
    config.architectures = [class_of(kind, defaults)]
    model_class = getattr(transformers, config.architectures[0])
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in model_class(config).parameters())
    if size > LARGEST:
        raise ValueError(f"{size // 10**6} million parameters with the small sizes")
    torch.manual_seed(seed)
    model = model_class(config)
    if not any(tensor.is_floating_point() for tensor in model.state_dict().values()):
        raise ValueError("it has no weights")
    return model


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without what transformers and torch print."""
    import logging

    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        logging.disable(logging.ERROR)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)


def as_dcp(folder: Path, state: dict[str, Any], rng: random.Random) -> list[str]:
    """One rank's DCP folder, in a container or in none."""
    from tests.faults.dcp_tools import save

    save(folder, {"model": state} if rng.random() < 0.7 else state)
    return ["fsdp2hf"]


def as_dump(folder: Path, state: dict[str, Any], rng: random.Random) -> list[str]:
    """accelerate's full state dict, with a wrapper's prefix or without."""
    import torch

    folder.mkdir()
    prefix = rng.choice(["", "_orig_mod.", "module."])
    torch.save({prefix + key: value for key, value in state.items()}, folder / "pytorch_model_fsdp.bin")
    return ["fsdp2hf"]


def as_shards(folder: Path, state: dict[str, Any], rng: random.Random) -> list[str]:
    """What torch's Hugging Face writer leaves of several ranks, each with its rows of every tensor."""
    import torch
    from torch.distributed.checkpoint import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

    ranks = rng.choice([2, 3, 4])
    plans = []
    for rank in range(ranks):
        items = []
        for key, value in state.items():
            step = -(-value.shape[0] // ranks) if value.dim() else 1
            low, high = (rank * step, min((rank + 1) * step, value.shape[0])) if value.dim() else (0, int(rank == 0))
            if low >= high:
                continue
            start = torch.Size([low] + [0] * (value.dim() - 1) if value.dim() else [])
            sizes = torch.Size([high - low, *value.shape[1:]] if value.dim() else [])
            data = TensorWriteData(
                ChunkStorageMetadata(start, sizes), TensorProperties.create_from_tensor(value), value.shape
            )
            items.append(WriteItem(MetadataIndex(key, start), WriteItemType.SHARD, tensor_data=data))
        plans.append(SavePlan(items))
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)

    class Planner(DefaultSavePlanner):
        def resolve_data(self, item: WriteItem) -> Any:
            chunk = item.tensor_data.chunk
            value = state[item.index.fqn]
            return value[tuple(slice(low, low + n) for low, n in zip(chunk.offsets, chunk.sizes, strict=True))]

    folder.mkdir()
    writer.set_up_storage_writer(is_coordinator=True)
    for plan in writer.prepare_global_plan(plans):
        writer.write_data(plan, Planner()).wait()
    return ["fsdp2hf"]


SAVERS: Mapping[str, Saved] = {"dcp": as_dcp, "dump": as_dump, "shards": as_shards}


def run(*arguments: object, transformers: bool = True) -> tuple[int, str]:
    """A command of `convert` in this process: its exit code, and what it said.

    It is as if transformers were not installed, where the checks of a login node are to be seen.
    """
    from converters import cli
    from converters.plan import agreement, meta_model

    output = io.StringIO()
    local = mock.patch.object(
        agreement, "_answer_of_program", lambda text: json.dumps(meta_model.report(json.loads(text)))
    )
    needed = mock.patch.object(agreement, "NEEDED", agreement.NEEDED if transformers else ("not_installed",))
    argv = mock.patch.object(sys, "argv", ["convert", *map(str, arguments)])
    code = 0
    with argv, local, needed, contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            cli.main()
        except SystemExit as done:
            code = int(done.code or 0)
    assert code != 1, output.getvalue()
    assert "Traceback" not in output.getvalue(), output.getvalue()
    return code, output.getvalue()


def loaded(out: Path, like: Any) -> tuple[Any, dict[str, Any]]:
    """The model that transformers makes of a folder, and what it reports."""
    with quiet():
        return type(like).from_pretrained(out, output_loading_info=True)


def equal(first: Any, second: Any) -> bool:
    """Whether two models have the same tensors, bit for bit."""
    import torch

    left, right = first.state_dict(), second.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


def attack(seed: int, folder: Path) -> str:
    """One random model, through one random container, with the config or the whole model as its base."""
    rng = random.Random(seed)
    kind = rng.choice(classes())
    with quiet():
        model = build(kind, seed)
        if model is None:
            return "not built"
        model.save_pretrained(folder / "base")
        container = rng.choice([*SAVERS])
        state = {key: value.detach().contiguous() for key, value in model.state_dict().items()}
        argv = SAVERS[container](folder / "source", state, rng)
    base = folder / "base"
    if rng.random() < 0.5:
        for path in base.glob("*.safetensors*"):
            path.unlink()
    code, output = run(*argv, folder / "source", folder / "out", "--config", base, "-q")
    about = f"seed {seed}: {kind} as {container}: exit {code}\n{output}"
    if code:
        return f"refused: {kind} as {container}: {output}"
    again, report = loaded(folder / "out", model)
    assert not any(report[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys")), f"{about}{report}"
    assert equal(again, model), f"{about}the tensors differ"
    return "right"
