"""Checkpoints of torch DCP to be damaged: made in one process, and edited with torch's own classes."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.conftest import Ran


def refused(ran: Ran, code: int, *parts: object) -> None:
    """The command ended with that code, and its message has those parts."""
    assert ran.code == code, f"{ran.code}: {ran.err}{ran.out[:300]}"
    for part in parts:
        assert str(part) in ran.err, ran.err


def as_trained(folder: Path) -> Path:
    """Without what only our own output has: the manifest, config and tokenizer."""
    for path in folder.iterdir():
        if path.name != ".metadata" and path.suffix != ".distcp":
            path.unlink()
    return folder


def save(folder: Path, state: Mapping[str, Any], **options: Any) -> Path:
    """torch's own dcp.save, in this process alone."""
    import warnings

    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if options:
            dcp.save(dict(state), storage_writer=dcp.FileSystemWriter(folder, **options), no_dist=True)
        else:
            dcp.save(dict(state), checkpoint_id=folder, no_dist=True)
    return folder


def save_by_rank(folder: Path, *states: Mapping[str, Any]) -> Path:
    """What each rank saves with `use_collectives=False`: its own metadata, here of a whole state."""
    import dataclasses

    folder.mkdir()
    for rank, state in enumerate(states):
        own = save(folder / str(rank), state)

        def named(metadata: Any, rank: int = rank) -> None:
            for index, info in metadata.storage_data.items():
                path = info.relative_path.replace("__0_", f"__{rank}_")
                metadata.storage_data[index] = dataclasses.replace(info, relative_path=path)

        edit(own, named)
        (own / ".metadata").rename(folder / f"__{rank}.metadata")
        for path in own.glob("__0_*.distcp"):
            path.rename(folder / path.name.replace("__0_", f"__{rank}_"))
        own.rmdir()
    return folder


def weights(source: Path) -> dict[str, Any]:
    """The tensors of a Hugging Face folder, in the order of the model."""
    from safetensors.torch import load_file

    return load_file(source / "model.safetensors")


def edit(folder: Path, change: Callable[[Any], object]) -> None:
    """Load `.metadata` with torch, change the object, and write it back."""
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def places(metadata: Any, name: str) -> list[tuple[Any, Any]]:
    """Index and storage of each stored piece of a tensor, by offset."""
    items = [(index, info) for index, info in metadata.storage_data.items() if index.fqn == name]
    return sorted(items, key=lambda item: tuple(item[0].offset))


def with_config(folder: Path, source: Path, **changes: Any) -> Path:
    """A folder with the config of another one, changed; None takes a key out."""
    folder.mkdir(exist_ok=True)
    config = json.loads((source / "config.json").read_text()) | changes
    settings = {key: value for key, value in config.items() if value is not None or key not in changes}
    (folder / "config.json").write_text(json.dumps(settings))
    return folder
