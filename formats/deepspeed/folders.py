"""The folders in which DeepSpeed saves: a run, its tags, and the files of each rank.

    RUN/latest                                     the name of a tag; `latest_universal` of a universal checkpoint
    RUN/TAG/mp_rank_{mp:02d}_model_states.pt       the module and the state of one model parallel rank
    RUN/TAG/layer_{i:02d}-model_{tp:02d}-model_states.pt    one layer of a pipeline module
    RUN/TAG/[bf16_]zero_pp_rank_{dp}_mp_rank_{mp:02d}_optim_states.pt    a rank's part of the optimizer states

Tags may be links, and have any name. Facts: deepspeed/runtime/engine.py and runtime/pipe/module.py, 0.19.8.
"""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from formats.disk.handle import dangling
from formats.disk.safetensors import file_size
from formats.disk.stamps import Stamp, stamp_of
from formats.errors import OptionNeededError, SourceError, UnsupportedError, short
from formats.torch_files.saved_names import LAYER, MODEL, MODEL_OF_STAGE_3

LATEST = "latest"
OURS = "vitruvian"
"""The key in model files written here for entries that other programs do not write."""
MOST_RANKS = 1 << 20
TRACKERS = (LATEST, "latest_universal")
EXPERT = re.compile(
    r"(?:layer_\d+_)?expert_\d+_mp_rank_\d+_model_states\.pt|expp_rank_\d+_mp_rank_\d+_optim_states\.pt"
)
"""Files of DeepSpeed's MoE (`_get_expert_ckpt_name`, `_get_optimizer_ckpt_name` in runtime/engine.py, 0.19.8)."""

WITH_EXPERTS = "where it was trained, save the whole model with its experts in Hugging Face's files"


def model_name(rank: int) -> str:
    """The name of the model file of a model parallel rank."""
    return f"mp_rank_{rank:02d}_model_states.pt"


def is_model(name: str) -> bool:
    """Whether a file name is that of a model file of a rank."""
    return bool(MODEL.fullmatch(name) or MODEL_OF_STAGE_3.fullmatch(name))


def value_of(file: Path) -> Any:
    """The contents of a file, by which readers recognize their format; parsed once, then cached.

    Raises:
        SourceError: the file cannot be read; further errors are those of `read_torch`.
    """
    file_size(file)
    return _value_of(file, stamp_of(file))


@lru_cache(maxsize=8)
def _value_of(file: Path, _: Stamp) -> Any:
    from formats.torch_files.archive import read_torch

    return read_torch(file).value


def holds(folder: Path) -> bool:
    """Whether a folder is a tag: it holds model or layer files of DeepSpeed."""
    return folder.is_dir() and any(is_model(path.name) or LAYER.fullmatch(path.name) for path in folder.iterdir())


def tags(run: Path) -> list[str]:
    """The names of the tags in a run's folder."""
    return sorted(path.name for path in run.iterdir() if holds(path))


def likely(run: Path) -> list[Path]:
    """The folder of the tag that is read by default, in a list: that of `latest`, else the last; empty without tags."""
    present = tags(run)
    tracker = run / LATEST
    tag = tracker.read_bytes()[:1000].decode(errors="replace").strip() if tracker.is_file() else ""
    return [run / (tag if tag in present else present[-1])] if present else []


def parts(path: Path) -> list[Path]:
    """The folder of the tag that is read by default (`Format.folders`)."""
    return [path] if holds(path) else likely(path)


def detect(path: Path) -> bool:
    """Whether a folder is a tag or a run, complete or not; not a run of FSDP, which may have a `latest` too."""
    trackers = [path / name for name in TRACKERS if (path / name).is_file()]
    return holds(path) or bool(tags(path)) or (bool(trackers) and not any(path.glob("*/.metadata")))


def locate(path: Path, tag: str | None) -> tuple[Path, Path]:
    """The run folder and the folder of one tag.

    Args:
        path: the run folder or the folder of a tag.
        tag: the tag's name; None for the tag that `latest` names.

    Raises:
        SourceError: there is no such tag, or it is not complete.
        OptionNeededError: no file names a tag.
    """
    if tag is None and holds(path):
        return (path.parent if (path.parent / LATEST).is_file() else path), path
    names = tags(path)
    present = f"present: {', '.join(names[-8:]) or 'no tag at all'}"
    if tag is None:
        tracker = next((path / name for name in TRACKERS if (path / name).is_file()), None)
        broken = next(filter(None, (dangling(path / name) for name in TRACKERS)), "")
        if tracker is None and broken:
            raise SourceError(broken, f"name a tag with --tag; {present}")
        if tracker is None:
            raise OptionNeededError(f"{path} has no file {LATEST} that names a tag", f"name one with --tag; {present}")
        with tracker.open("rb") as file:
            tag = file.read(1000).decode(errors="replace").strip()
        named_by = f"{tracker} names"
    else:
        named_by = "--tag says"
    if not tag.isprintable() or Path(tag).name != tag or tag in ("", "..") or len(tag) > 255:
        raise SourceError(f"{named_by} {short(tag)}, which is not a folder name", present)
    if broken := dangling(path / tag):
        raise SourceError(broken, present)
    if not (path / tag).is_dir():
        raise SourceError(f"{named_by} {tag}, which is not in {path}", present)
    if not holds(path / tag):
        raise SourceError(f"{path / tag} holds no file of DeepSpeed's model states", present)
    return path, path / tag


def require_no_experts(tag: Path) -> None:
    """Refuse a tag with experts in separate files, which the module in the model files lacks.

    Raises:
        UnsupportedError: there are such files.
    """
    experts = next((name for name in sorted(path.name for path in tag.iterdir()) if EXPERT.fullmatch(name)), None)
    if experts:
        raise UnsupportedError(
            f"{tag} holds experts in files of their own ({experts}), which are not supported", WITH_EXPERTS
        )


def model_files(tag: Path) -> dict[int, Path]:
    """The model file of each model parallel rank, in order of the ranks.

    Raises:
        SourceError: a rank's file is missing or there twice, or has the name of an impossible rank.
        UnsupportedError: the model has experts in separate files.
    """
    names = {path.name: path for path in tag.iterdir()}
    require_no_experts(tag)
    paths: dict[int, Path] = {}
    for filename, path in sorted(names.items()):
        name = MODEL.fullmatch(filename)
        if name and paths.setdefault(int(name[1]), path) is not path:
            raise SourceError(
                f"{tag} holds two files of rank {int(name[1])}: {paths[int(name[1])].name} and {filename}"
            )
    if max(paths, default=0) > MOST_RANKS:
        raise SourceError(f"{paths[max(paths)]} has the name of a rank that no run has")
    missing = [rank for rank in range(max(paths, default=0)) if rank not in paths]
    if missing or not paths:
        wanted = [model_name(rank) for rank in missing or [0]]
        raise SourceError(f"{tag} lacks {', '.join(wanted[:8])}", "copy the files of all ranks into one folder")
    return dict(sorted(paths.items()))
