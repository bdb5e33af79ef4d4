"""Refuses folders that have the weights of two models: which of the two a program reads would be chance.

The Trainer of transformers writes both a model and the shards of DeepSpeed or FSDP into a checkpoint, of one step: its
`trainer_state.json` shows that both are one model (transformers 5.23.0 trainer.py, `_save_checkpoint`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from formats.deepspeed import folders as deepspeed
from formats.errors import RefusedError
from formats.huggingface import nanotron
from formats.megatron import folders as megatron

ONE_MODEL = "trainer_state.json"
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
SHARDS = (
    ".metadata",
    "model_world_size_*",
    "pytorch_model_fsdp_0/.metadata",
    "pytorch_model_fsdp.bin",
    "shard-*-model-*-of-*.safetensors",
    "mp_rank_*/*.pt",
)
"""Patterns of the files that distributed checkpoints of torch and of Megatron have directly in a folder."""
TRACKERS = (*deepspeed.TRACKERS, megatron.TRACKER, nanotron.TRACKER)
"""Files of a run that name the checkpoint to read."""
LONGEST = 200
"""Maximum number of bytes of a file name, with room for a prefix."""


def two_models(path: Path, known: Callable[[Path], bool]) -> tuple[str, str] | None:
    """What a folder has of two models, of Hugging Face and of a training or of two trainings, and how to read one.

    Args:
        path: the folder, or what the user named instead of one, which has no two.
        known: returns whether a folder is a checkpoint of a known format.

    Returns:
        The finding and the hint; None if it has one model.
    """
    if not path.is_dir():
        return None
    run, own = tracked(path, known), shards(path)
    ours, other = weights(path), run or own
    if ours is None and run is not None:
        ours, kind = own, ""
    else:
        ours, kind = None if (path / ONE_MODEL).is_file() else ours, " of Hugging Face"
    if ours is None or other is None:
        return None
    latest = other.is_dir()
    return (
        f"{path} holds two models: {ours.relative_to(path)}{kind}, and {other.relative_to(path)}"
        + (", which its run names as the latest" if latest else ""),
        f"name {other}; or, for the model{kind or ' beside it'}, move the other one out of {path}"
        if latest
        else f"move {other.relative_to(path)} and what belongs to it out of {path}, or {ours.name}",
    )


def require_one(path: Path, known: Callable[[Path], bool]) -> None:
    """Check that a folder, named without further options, has only one model; see `two_models`.

    Raises:
        RefusedError: the folder has two models.
    """
    if found := two_models(path, known):
        raise RefusedError(*found)


def weights(path: Path) -> Path | None:
    """The file of weights of a Hugging Face folder, None if the folder is none."""
    files = [path / name for name in WEIGHTS if (path / name).is_file()]
    return files[0] if files and (path / "config.json").is_file() else None


def shards(path: Path) -> Path | None:
    """A file or folder of shards directly in a folder, None if there is none."""
    matches = (shard for pattern in SHARDS for shard in path.glob(pattern))
    return next(matches, None) or next((shard for shard in path.iterdir() if deepspeed.is_model(shard.name)), None)


def tracked(path: Path, known: Callable[[Path], bool]) -> Path | None:
    """The checkpoint that a run folder names as its latest, None if it names no existing checkpoint."""
    for tracker in TRACKERS:
        file = path / tracker
        written = file.read_bytes()[:1000].decode(errors="replace").strip() if file.is_file() else ""
        for name in (written, f"iter_{written:0>7}"):
            if 0 < len(written) < LONGEST and Path(name).name == name and (path / name).is_dir() and known(path / name):
                return path / name
    return None
