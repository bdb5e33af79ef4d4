"""Which folders `--force` deletes: of one checkpoint, whose files all have names that it or its training gives them.

People work in their run folders. A text, a repository or source code beside the weights are the user's own: their names
are in no table here, and no pattern is general, such as any `.txt`, `.md`, `.py` or `.json`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from converters.assets.trusted import OTHER_WEIGHTS, TRAVELS, stays
from formats.detect.rivals import ONE_MODEL
from formats.errors import some
from formats.registry import others_inside

LOGS = "logs of a training"
AS_THEY_TRAVEL = ("weights, and what goes with them", "settings", "tokenizers", "chat templates")
NAMES = {
    **{what: TRAVELS[what] for what in AS_THEY_TRAVEL},
    "weights": r".+\.(pt|pth|ckpt|distcp|gguf)|(tf|flax|rust)_model\.\w+|model\.onnx(_data)?|\.metadata|__\d+_\d+"
    r"|(pytorch_model|adapter_model|model)[\w.-]*\.bin(\.index\.json)?",
    "code of a model": r"(\w+_)?(configuration|modeling|modular|tokenization|processing|generation)(_\w+)?\.py"
    r"|zero_to_fp32\.py|requirements\.txt",
    "documents": r"(readme|licen[cs]e|notice|copying|copyright|model_?card|use_policy|third_party_notices?)s?"
    r"([-_.][\w-]{1,60})?(\.(md|txt|rst|html))?|\.gitattributes|\.gitignore",
    "states of a training": r"(optimizer|scheduler|scaler|sampler|random_states|training_args|rng_state)[\w.-]*"
    r"\.(bin|pkl)|(trainer_state|(checkpoint_)?metadata|adapter|(evaluation|eval|train|test|all|benchmark)_results)\.json"
    r"|latest(_universal)?|(latest(_checkpointed_iteration)?|progress|megatron_flags|sharded_checkpoint)\.txt"
    r"|\.(progress|files|start|lock)|[\w.+=-]+\.ya?ml",
    LOGS: r"events\.out\.tfevents\..+|.+\.log|(slurm-[\w%-]+|nohup)\.(out|err)"
    r"|(log|metrics)\.(jsonl|json|csv|txt)|plot\.png",
}
"""Kind of files: a regular expression of the whole file name, in any case."""
FOLDERS = re.compile(r"wandb|mlruns|\.cache|__pycache__|\.locks?|custom_generate")
"""Folders of programs that copy code and settings of a training, and of a model's own `generate`: with any contents but
another checkpoint."""
ADAPTERS = "adapter_model.*"
"""The weights of an adapter of PEFT: in a checkpoint's folder they are another model, but for one that a trainer has
saved with them."""
_LOG = re.compile(NAMES[LOGS], re.ASCII | re.IGNORECASE)
_KNOWN = re.compile("|".join(f"(?:{names})" for names in NAMES.values()), re.ASCII | re.IGNORECASE | re.DOTALL)


def is_known_name(name: str) -> bool:
    """Whether a checkpoint or a training leaves files of this name."""
    return _KNOWN.fullmatch(name) is not None


def is_of_training(folder: Path) -> bool:
    """Whether all files in a folder, at any depth, are states, logs and caches of a training, or hidden."""
    if FOLDERS.fullmatch(folder.name):
        return True
    try:
        paths = list(folder.iterdir())
    except OSError:  # whose contents nobody may read
        return False
    left = (path for path in paths if stays(path.name) in ("", OTHER_WEIGHTS) and not _LOG.fullmatch(path.name))
    return all(path.is_dir() and not path.is_symlink() and is_of_training(path) for path in left)


def foreign(folder: Path) -> list[str]:
    """The files below a folder that no checkpoint and no training leaves, and the hidden folders, by relative path."""
    paths: list[str] = []
    for place, folders, names in os.walk(folder):
        inside = Path(place).relative_to(folder)
        paths += [str(inside / name) for name in names if not is_known_name(name)]
        entered = [name for name in folders if not FOLDERS.fullmatch(name)]
        paths += [str(inside / name) for name in entered if name.startswith(".")]
        folders[:] = [name for name in entered if not name.startswith(".")]
    return sorted(paths)


def reason_to_keep(folder: Path, odd: Sequence[str] | None = None) -> str:
    """What a checkpoint's folder holds besides, for which it is not deleted, as a predicate; empty if nothing.

    Args:
        folder: the folder of a checkpoint.
        odd: the files in it that no checkpoint has, where they are known (`foreign`).
    """
    if others := others_inside(folder):
        several = f"{len(others)} other checkpoints" if len(others) > 1 else "another checkpoint"
        return f"holds {several}: {some(others, 4)}"
    if adapters := [] if (folder / ONE_MODEL).is_file() else sorted(folder.glob(ADAPTERS)):
        return f"holds the weights of an adapter: {adapters[0].name}"
    odd = foreign(folder) if odd is None else odd
    return f"holds what no checkpoint has: {some(odd, 4)}" if odd else ""
