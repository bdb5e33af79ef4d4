"""Files of one save in the folder of another save of the same run, or under each other's names: a careless copy.

The command gives the model of one save, or refuses. It may give a mixture only of what `UNTIED` lists: nothing in those
files says which save they are of. Each kind of checkpoint is saved twice a process, with other weights and equal sizes.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import cache
from itertools import combinations
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any

from tests.fuzz.architectures import run
from tests.fuzz.flips import CONFIG, GOLDEN

UNTIED = ("FSDP DCP", "GPT-NeoX pipeline", "Hugging Face", "Megatron torch_dist", "dumps of ranks")
"""Formats of which a mixture of saves is not seen. A file under the name of another one of its save is seen in all."""
Tensors = dict[str, Any]


def attack(seed: int, folder: Path) -> str:
    """Copy some files of one save over those of another, or swap those of two ranks of a save; and convert that.

    Returns:
        What came of it: `refused`; `right`, the model of one of the two; or `untied`.

    Raises:
        AssertionError: it is a mixture, and of no format of `UNTIED`; or a bug.
    """
    draw = random.Random(seed)
    kind = draw.choice(sorted(KINDS))
    saved, command, expected = _saved(kind)
    chosen, other = draw.sample(saved, 2)
    src, out = folder / chosen.name, folder / "out"
    shutil.copytree(chosen, src)
    names = sorted(str(path.relative_to(chosen)) for path in chosen.rglob("*") if _is_of_save(path))
    pairs = [pair for pair in combinations(names, 2) if len({re.sub(r"\d+", "", name) for name in pair}) == 1]
    swapped = bool(pairs) and draw.random() < 0.3
    copied = draw.sample(names, draw.choice([1, 1, draw.randrange(len(names)), len(names)]) or 1)
    copied = list(draw.choice(pairs)) if swapped else copied
    for name, place in zip(copied, reversed(copied) if swapped else copied, strict=True):
        shutil.copy((chosen if swapped else other) / name, src / place)
    code, output = run(command[0], src, out, *command[1:], "-q")
    what = "with each other's names" if swapped else f"of {other.name}"
    case = f"seed {seed}: {copied} {what} in {chosen.name} of {kind}: exit {code}\n{output}"
    assert code in (0, 3, 6), case
    assert (code == 0) == out.exists(), case
    if code:
        return "refused"
    if any(_equal(_tensors(out), tensors) for tensors in expected):
        return "right"
    assert not swapped, f"{case}\na mixture of two files"
    assert kind in UNTIED, f"{case}\na mixture of two saves"
    return "untied"


def _is_of_save(path: Path) -> bool:
    """Whether a file is made anew by each save; texts may be alike."""
    return path.is_file() and (path.suffix not in (".json", ".yml", ".txt") or path.name.endswith(".index.json"))


def _tensors(folder: Path) -> Tensors:
    from safetensors.torch import load_file

    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def _equal(first: Tensors, second: Tensors) -> bool:
    return first.keys() == second.keys() and all(first[name].equal(second[name]) for name in first)


@cache
def _scratch() -> Path:
    return Path(mkdtemp(prefix="mixtures-"))


@cache
def _saved(kind: str) -> tuple[list[Path], list[object], list[Tensors]]:
    """Two saves, the command that reads them with its options, and the tensors that it gives of each."""
    from converters.prove.digest import MANIFEST

    make, command = KINDS[kind]
    saved = [make(_scratch() / kind, number) for number in (1, 2)]
    for path in (_scratch() / kind).rglob(MANIFEST):  # as another program leaves it
        path.unlink()
    config = ["--config", _hf(1)] if command[0] == "fsdp2hf" else []
    outs = [_scratch() / f"{kind} out {number}" for number in (1, 2)]
    for folder, out in zip(saved, outs, strict=True):
        code, output = run(command[0], folder, out, *command[1:], *config)
        assert code == 0, output
    expected = [_tensors(out) for out in outs]
    assert not _equal(*expected), kind
    return saved, [*command, *config], expected


def _weights(number: int) -> Tensors:
    import torch

    hidden, wide, kv, rows = (
        CONFIG[name] for name in ("hidden_size", "intermediate_size", "num_key_value_heads", "vocab_size")
    )
    kv *= hidden // CONFIG["num_attention_heads"]
    shapes = {"model.embed_tokens": [rows, hidden], "model.norm": [hidden], "lm_head": [rows, hidden]}
    for layer in range(CONFIG["num_hidden_layers"]):
        parts = {
            "self_attn.q_proj": [hidden, hidden], "self_attn.k_proj": [kv, hidden], "self_attn.v_proj": [kv, hidden],
            "self_attn.o_proj": [hidden, hidden], "mlp.gate_proj": [wide, hidden], "mlp.up_proj": [wide, hidden],
            "mlp.down_proj": [hidden, wide], "input_layernorm": [hidden], "post_attention_layernorm": [hidden],
        }  # fmt: skip
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in parts.items()}
    generator = torch.Generator().manual_seed(number)
    return {f"{name}.weight": torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}


# --- two saves of a run ----------------------------------------------------------------------------------------------


def _dcp(folder: Path, number: int) -> Path:
    """torch's own, in three files."""
    import torch.distributed.checkpoint as dcp

    place = folder / f"step-{number}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(_weights(number), storage_writer=dcp.FileSystemWriter(place, thread_count=3), no_dist=True)
    return place


def _dumps(folder: Path, number: int) -> Path:
    """What LOCAL_STATE_DICT leaves of two ranks: the interval of each parameter that each has."""
    import torch

    place = folder / f"checkpoint-{number}"
    place.mkdir(parents=True)
    for rank in range(2):
        shard = {"_flat_param": torch.zeros(0)}
        for name, tensor in _weights(number).items():
            shard[name] = tensor.flatten().chunk(2)[rank].clone()
        torch.save(shard, place / f"pytorch_model_fsdp_rank{rank}.bin")
    return place


class _Written:
    """An engine that writes with torch's own."""

    def __init__(self, folder: Path, number: int) -> None:
        self.folder, self.number = folder, number

    def write(self, staging: Path) -> Future[Any] | None:
        shutil.copytree(_dcp(self.folder / "dcp", self.number), staging, dirs_exist_ok=True)
        return None


def _trained(folder: Path, number: int) -> Path:
    """What our trainer leaves, one rank of it."""
    from train.run.checkpoint import Progress, Saver
    from train.run.identity import small_files
    from train.settings.config import Save

    world: Any = SimpleNamespace(
        rank=0, ranks=1, first=True, wait=lambda: None, from_first=lambda find: find(), gathered=lambda value: [value]
    )
    progress = Progress(number, 100, 4, 1, "rows", 9, 24)
    saver, engine = Saver(Save(path=folder), small_files(_hf(1)), world), _Written(folder, number)
    saver.start(engine, progress)  # type: ignore[arg-type]  # nothing else of it is asked for
    saver.finish()
    return folder / progress.name


@cache
def _hf(number: int) -> Path:
    """A Hugging Face folder of two shards."""
    from safetensors.torch import save_file

    folder = _scratch() / f"hf-{number}"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(dict(CONFIG)))
    tensors = _weights(number)
    places = {name: f"model-{1 + place % 2:05d}-of-00002.safetensors" for place, name in enumerate(tensors)}
    for file in {*places.values()}:
        save_file(
            {name: tensor for name, tensor in tensors.items() if places[name] == file}, folder / file, {"format": "pt"}
        )
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def _converted(*options: object) -> Callable[[Path, int], Path]:
    def make(folder: Path, number: int) -> Path:
        place = folder / f"run-{number}"
        code, output = run("hf2megatron", _hf(number), place, "--iteration", 100 * number, *options)
        assert code == 0, output
        return place / f"iter_{100 * number:07d}"

    return make


def _neox(name: str) -> Callable[[Path, int], Path]:
    """What GPT-NeoX wrote; and the same two steps later, when all signs of its weights have changed."""

    def make(folder: Path, number: int) -> Path:
        import torch

        source = next((GOLDEN / name).glob("global_step*"))
        place = folder / f"global_step{4 + 2 * number}"
        shutil.copytree(source, place)
        for path in sorted(place.glob("*.pt")) if number > 1 else ():
            stored = torch.load(path, weights_only=False)
            _negate(stored.get("optimizer_state_dict", stored.get("module", stored)))
            for key in ("iteration", "global_steps"):
                if isinstance(stored.get(key), int):
                    stored[key] += 2
            torch.save(stored, path)
        return place

    return make


def _negate(node: Any) -> None:
    """Change the signs of all floating tensors, weights and master weights; Adam's step, which is one, moves on."""
    import torch

    for key, value in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        if key == "step":
            node[key] = value + 2
        elif isinstance(value, torch.Tensor) and value.is_floating_point():
            value.data.neg_()
        else:
            _negate(value)


NEOX: list[object] = ["neox2hf", "--vocab-size", 101, "--gqa-layout", "blocked"]
KINDS: Mapping[str, tuple[Callable[[Path, int], Path], list[object]]] = {
    "train": (_trained, ["fsdp2hf"]),
    "FSDP DCP": (_dcp, ["fsdp2hf"]),
    "dumps of ranks": (_dumps, ["fsdp2hf"]),
    "Hugging Face": (lambda _, number: _hf(number), ["hf2hf"]),
    "Megatron": (_converted("--tp", 2, "--pp", 2), ["megatron2hf"]),
    "Megatron torch_dist": (_converted("--format", "torch_dist", "--tp", 2), ["megatron2hf"]),
    "GPT-NeoX": (_neox("llama-tp2-dp2"), NEOX),
    "GPT-NeoX pipeline": (_neox("llama-gqa-pp2-tp2"), NEOX),
    "ZeRO": (_neox("llama-tp2-dp2"), [*NEOX, "--weights", "fp32-master"]),
}
"""How two saves are made, and the command that reads one."""
