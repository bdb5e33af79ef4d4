"""Checkpoints that would pass for those of a format in the registry, and that have no reader: recognised by content.

Facts: megatron-core 0.19.2 training/checkpointing.py (torch_dcp), Megatron-Bridge 067f987d
training/utils/checkpoint_utils.py, NeMo 2 lightning/io.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from formats.errors import SourceError, UnsupportedError
from formats.megatron import fsdp_dtensor
from formats.torch_files import dcp

MOST_YAML = 1 << 20


class Lookalike(NamedTuple):
    """A kind of checkpoint: what it is, what can be done with it today, and the file or folder that tells it."""

    what: str
    hint: str
    told_by: Callable[[Path], Path | None]


def check(path: Path) -> None:
    """Refuse a checkpoint that is another program's, by the name of the program.

    Raises:
        UnsupportedError: it is in `LOOKALIKES`.
    """
    for one in LOOKALIKES if path.is_dir() else ():
        if found := one.told_by(path):
            raise UnsupportedError(f"{path} is {one.what}, which is not read ({found} tells)", one.hint)


def _torch_dcp(path: Path) -> Path | None:
    """Megatron's plain DCP, whose model has the names of modules; in fsdp_dtensor they begin with `module`."""
    folder = _iteration(path)
    if folder is None or not dcp.names(folder, *fsdp_dtensor.OBJECTS):
        return None
    try:
        entries, objects = dcp.contents(folder)
    except SourceError:  # which a reader will tell
        return None
    keys = [entry.name for entry in entries if re.match(r"model\d*\.", entry.name)]
    mine = set(fsdp_dtensor.OBJECTS) <= set(objects) and not any(map(fsdp_dtensor.KEY.match, keys))
    return folder / dcp.METADATA if mine and keys else None


def _bridge(path: Path) -> Path | None:
    """`run_config.yaml` in an iteration, which says of what class its model is."""
    folder = _iteration(path)
    config = folder / "run_config.yaml" if folder else None
    if config is None or not config.is_file() or config.stat().st_size > MOST_YAML:
        return None
    return config if "_target_:" in config.read_text(errors="replace") else None


def _nemo(path: Path) -> Path | None:
    """`context/` beside `weights/`, from the folder of both or from `weights/` itself."""
    folder = path.parent if path.name == "weights" else path
    files = [folder / "context" / name for name in ("model.yaml", "io.json")]
    return next((file for file in files if (folder / "weights").is_dir() and file.is_file()), None)


def _iteration(path: Path) -> Path | None:
    from formats.megatron.folders import locate

    try:
        return locate(path)[1]
    except SourceError:
        return None


LOOKALIKES = (
    Lookalike(
        "a checkpoint of Megatron-LM with --ckpt-format torch_dcp",
        "load it in that training and save with --ckpt-format torch_dist, which is read",
        _torch_dcp,
    ),
    Lookalike(
        "a checkpoint of Megatron-Bridge, whose weights are torch_dist without the args of Megatron-LM",
        "export it with Megatron-Bridge: AutoBridge.from_hf_pretrained(MODEL).export_ckpt(ITERATION, OUT)",
        _bridge,
    ),
    Lookalike(
        "a checkpoint of NeMo 2, whose weights are torch_dist without the args of Megatron-LM",
        "export it with NeMo: llm.export_ckpt(path=FOLDER, target='hf', output_path=OUT) of nemo.collections",
        _nemo,
    ),
)
"""They are tried in this order, before the formats of the registry."""
