"""Where the weights come from: a Hugging Face folder as it is, or any other checkpoint, converted once."""

from __future__ import annotations

from pathlib import Path

from formats.errors import UsageError
from train.config import Config

TO_FOLDER = {
    "fsdp": "fsdp2hf", "megatron": "megatron2hf", "megatron_dist": "megatron2hf", "neox": "neox2hf", "zero": "zero2hf",
}  # fmt: skip
"""Format of a checkpoint: the command that makes a Hugging Face folder of it."""
MAKE = f"make one of a checkpoint: convert {', '.join(dict.fromkeys(TO_FOLDER.values()))} CHECKPOINT FOLDER"
"""A hint where a Hugging Face folder is wanted."""
CONVERTED = "start"
"""Folder in `save.path` that holds the start of a training as a Hugging Face folder."""


def is_folder(path: Path) -> bool:
    """Whether ranks can read their pieces from a folder as it is."""
    held = any((path / name).is_file() for name in ("model.safetensors", "model.safetensors.index.json"))
    return held and (path / "config.json").is_file()


def folder_of(config: Config) -> Path:
    """The Hugging Face folder to start from. Any other checkpoint is converted to `SAVE/start`, if that is not its.

    Raises:
        VitruvianError: it cannot be converted; or the Hugging Face folder that it needs is not given.
    """
    path = config.model.path
    if is_folder(path):
        return path
    from converters.convert import SHARD_SIZE, Request, plan_huggingface, run
    from converters.durable import write_file
    from converters.journal import fingerprint
    from formats.checkpoint import Settings
    from formats.registry import open_checkpoint

    out = config.save.path / CONVERTED
    note = out.with_name(f".{CONVERTED}")
    source = open_checkpoint(path, Settings(config=config.model.config))
    out.parent.mkdir(parents=True, exist_ok=True)
    request = Request(out, quiet=True, force=True)
    plan = plan_huggingface(source, request, SHARD_SIZE)
    made_of = fingerprint(plan, request.limits.replicas).encode()
    if is_folder(out) and note.is_file() and note.read_bytes() == made_of:
        return out
    run(plan, request)
    write_file(note, made_of)
    if not is_folder(out):
        raise UsageError(f"{path} was converted to {out}, which has no config.json", "--model.config HF_FOLDER")
    return out
