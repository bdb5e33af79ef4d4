"""What a torch_dist checkpoint holds besides tensors and is the same on all ranks: args, iteration, parameter groups.

    common.pt                   a dict                                             megatron-core up to 0.18
    common_state/shard_0_1      a list of that dict, an object of the DCP          megatron-core 0.19

Facts: `load_common_state_dict` in dist_checkpointing/serialization.py of megatron-core 0.16.1, 0.17.1, 0.18.2, 0.19.2.
0.19 reads both, and takes common.pt where both are there: so common.pt is what we write, which all of them load. Of one
training all four saved the same tensors under the same names, and loaded what we wrote with its optimizer.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from formats.errors import SourceError
from formats.torch_files import dcp
from formats.torch_files.archive import TorchFile, read_torch

FILE, OBJECT = "common.pt", "common_state/shard_0_1"
BACKEND = "metadata.json"
ABOUT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
"""What `metadata.json` says. From 0.19 on there is no `common_*`, and what is there is left alone (core.py, 0.19.2)."""
AGAIN = "take an earlier iteration, or copy the files again"


def is_held(folder: Path) -> bool:
    """Whether a folder has one of the two."""
    return (folder / FILE).is_file() or dcp.names(folder, OBJECT)


def read(folder: Path) -> TorchFile:
    """Open it; `value` is the dict, whichever of the two it is.

    Raises:
        SourceError: there is none, it is damaged, or there are both.
    """
    inside = dcp.names(folder, OBJECT)
    if not (folder / FILE).is_file():
        objects = dcp.read_objects(folder, [OBJECT]) if inside else {}
        if OBJECT not in objects:
            raise SourceError(f"{folder} holds neither {FILE} nor {OBJECT}, which have the arguments", AGAIN)
        common, name = objects[OBJECT], f"{objects[OBJECT].path}: {OBJECT}"
        value = common.value[0] if isinstance(common.value, list) and len(common.value) == 1 else None
    elif inside:
        raise SourceError(
            f"{folder} holds {FILE} and, in .metadata, {OBJECT}: megatron-core 0.19 and an older one saved into it",
            f"remove {folder / FILE} if megatron-core 0.19 saved last",
        )
    else:
        common = read_torch(folder / FILE)
        value, name = common.value, str(common.path)
    if not isinstance(value, dict):
        raise SourceError(f"{name} holds no map of names")
    return replace(common, value=value)
