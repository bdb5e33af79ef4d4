"""The common state of a torch_dist checkpoint: args, iteration, parameter groups; no tensors, the same on all ranks.

    common.pt                   a dict                                             megatron-core up to 0.18
    common_state/shard_0_1      a list of that dict, an object of the DCP          megatron-core 0.19

Facts: `load_common_state_dict` in dist_checkpointing/serialization.py of megatron-core 0.16.1, 0.17.1, 0.18.2, 0.19.2.
0.19 reads both, and takes common.pt where both are there. So common.pt is written here, which all four versions load.
Of one training all four saved the same tensors under the same names, and loaded the checkpoint and optimizer written
here.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from formats.errors import SourceError
from formats.torch_files import dcp
from formats.torch_files.archive import TorchFile, read_torch

FILE, OBJECT = "common.pt", "common_state/shard_0_1"
BACKEND = "metadata.json"
VERSION = "sharded_backend_version"
ABOUT = {
    "sharded_backend": "torch_dist",
    VERSION: 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
"""The contents of `metadata.json`. megatron-core from 0.19 on neither writes nor reads `common_*` (core.py, 0.19.2)."""
AGAIN = "take an earlier iteration, or copy the files again"


def is_held(folder: Path) -> bool:
    """Whether a folder holds a common state, as `FILE` or as `OBJECT`."""
    return (folder / FILE).is_file() or dcp.names(folder, OBJECT)


def read(folder: Path) -> TorchFile:
    """Read the common state of a folder; `value` is the dict, whether from `FILE` or from `OBJECT`.

    Raises:
        SourceError: the folder holds neither, or both, or a damaged one.
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
