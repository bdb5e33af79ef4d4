"""What a run began with: recorded in each of its checkpoints, and compared before they are put on a model again.

    SAVE/global_step1500/config.json   that of the start, of which the model is made
    SAVE/global_step1500/.start        digest of the start's weights, as `convert digest` prints it, and of each tensor

A checkpoint of all weights needs the same config; adapters need the same weights too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from shlex import quote
from typing import Any

from converters.common.manifest import contradictions
from converters.move.engine import digest_of
from converters.plan.plan import Job, make_plan
from converters.plan.request import Limits
from converters.prove.digest import total
from formats.checkpoint import Checkpoint
from formats.disk.json_file import read_json
from formats.errors import RefusedError, SourceError, VitruvianError, some
from formats.huggingface import HUGGINGFACE
from formats.registry import open_checkpoint
from train.data.tokens.tokenizers import FILES, names_digest, open_vocabulary
from train.distributed import World
from train.model.trainee import open_config
from train.start.run_folder import RECORD

BESIDE = (".json", ".jinja", ".model", ".txt")
"""Small files of a model's folder that go into each checkpoint,"""
NOT_BESIDE = (".index.json", "vitruvian.json")
"""but not what tells of its tensors."""
FREE = frozenset({
    "_name_or_path", "name_or_path", "architectures", "transformers_version", "dtype", "torch_dtype", "use_cache",
    "bos_token_id", "eos_token_id",
})  # fmt: skip
"""Keys of a config that change nothing of what is trained: `model.dtype` says the type, token files the tokens
(transformers 5.23.0 configuration_utils.py)."""
LIMITS = Limits(replicas="first")
"""Of a tied head transformers reads one copy."""


def small_files(folder: Path) -> dict[str, bytes]:
    """The small files of a start that go into each checkpoint, by name, as they are now."""
    return {
        path.name: path.read_bytes()
        for path in sorted(folder.iterdir())
        if path.suffix in BESIDE and path.is_file() and not path.name.endswith(NOT_BESIDE)
    }


def changed_files(checkpoint: Path, folder: Path) -> str:
    """A note of the small files of a start that are not those that a checkpoint has; empty without any."""
    then, now = small_files(checkpoint), small_files(folder)
    both = (then.keys() & now.keys()) - {"config.json"}  # which is compared by what it says
    names = [name for name in sorted(both) if then[name] != now[name]]
    return (
        f"{folder} has other files than {checkpoint}, which are saved from here on: {some(names, 4)}" if names else ""
    )


# --- the config ------------------------------------------------------------------------------------------------------


def require_same_config(checkpoint: Path, folder: Path) -> None:
    """See that a model's config is that of a checkpoint; as transformers reads both, so how they are written is free.

    Args:
        checkpoint: of a run, which has the config that it was trained with.
        folder: the model that is to be filled from it.

    Raises:
        RefusedError: a setting differs.
        SourceError: one of them is missing or cannot be read.
    """
    changed = differing(read_settings(checkpoint), read_settings(folder))
    if changed:
        raise RefusedError(
            f"{folder / 'config.json'} is not what {checkpoint} was trained with (then | now): {some(changed, 4)}",
            f"cp --remove-destination {quote(str(checkpoint / 'config.json'))} {quote(str(folder / 'config.json'))}; "
            "another model is another run, with another save.path",
        )


def differing(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Where settings of models differ, as `name: then | now`; the model's type, which says most, comes first."""
    return contradictions({"model_type": None, **dict.fromkeys(now), **then}, now)


def read_settings(folder: Path) -> dict[str, Any]:
    """The config of a model as transformers reads it, without what is free.

    Raises:
        SourceError: it is missing or cannot be read.
    """
    if not (folder / "config.json").is_file():
        raise SourceError(f"{folder} has no config.json, so nobody knows which model it is of", "copy it back")
    found: dict[str, Any] = _bound(open_config(folder).to_dict())
    return found


def _bound(value: Any) -> Any:
    """A config without what is free in it, and in the configs inside it."""
    if isinstance(value, Mapping):
        return {str(name): _bound(held) for name, held in value.items() if name not in FREE}
    return value


def require_same_tokenizer(checkpoint: Path, folder: Path) -> None:
    """See that ids mean what they meant: tokens that were added are free, and so is how the file is written.

    Args:
        checkpoint: of a run, which has the tokenizer of its start, if that had one.
        folder: the model whose tokenizer would go into what is saved next.

    Raises:
        RefusedError: a token has another name.
    """
    for name in FILES:
        pair = [place / name for place in (checkpoint, folder)]
        if all(path.is_file() for path in pair) and not _same_names(*pair):
            raise RefusedError(
                f"{pair[1]} is not the tokenizer that {checkpoint} was trained with: ids have other tokens",
                f"cp --remove-destination {quote(str(pair[0]))} {quote(str(pair[1]))}",
            )


def _same_names(then: Path, now: Path) -> bool:
    """Whether the ids that two tokenizers have in common are those of the same tokens."""
    if then.read_bytes() == now.read_bytes():
        return True
    try:
        known = [open_vocabulary(path) for path in (then, now)]
    except SourceError:  # tokenizer.model of some models is tiktoken's
        return False
    size = min(one.size for one in known)
    return names_digest(known[0], size) == names_digest(known[1], size)


# --- the weights -----------------------------------------------------------------------------------------------------


def begun(start: Path | None, folder: Path, adapters: bool, world: World) -> tuple[dict[str, str], str]:
    """The digests of the weights that a run began with, and a note. Every rank has to come here.

    Args:
        start: the checkpoint that it resumes from, None if it begins.
        folder: the model's, whose weights are there now.
        adapters: whether adapters are trained, and the weights are used as they are.
        world: the ranks, which read a share of the weights each.

    Raises:
        RefusedError: adapters would be put on other weights.
    """
    now = _digests(folder, world)
    if start is None:
        return now, ""
    held: Mapping[str, str] | None = world.told(lambda: recorded(start))
    note: str = world.told(lambda: compared(start, folder, held, now, adapters))
    return dict(now if held is None else held), note


def require_same_base(checkpoint: Path, base: Checkpoint) -> str:
    """See that adapters of a checkpoint belong to a model. Returns a note.

    Raises:
        RefusedError: its config, tokenizer or weights are others.
    """
    require_same_config(checkpoint, base.root)
    require_same_tokenizer(checkpoint, base.root)
    held = recorded(checkpoint)
    now = {} if held is None else digest_of(make_plan(base).jobs, LIMITS)
    return compared(checkpoint, base.root, held, now, adapters=True)


def compared(
    checkpoint: Path, folder: Path, held: Mapping[str, str] | None, now: Mapping[str, str], adapters: bool
) -> str:
    """Compare the weights that a checkpoint's run began with and those that are in a folder now. Returns a note.

    Raises:
        RefusedError: they differ, and the checkpoint holds adapters.
    """
    if held is None:
        told = f"{checkpoint} does not record which weights its adapters are of: {folder} is taken on trust"
        return told if adapters else ""
    other = sorted(name for name in held.keys() | now.keys() if held.get(name) != now.get(name))
    if not other:
        return ""
    told = f"{folder} no longer holds the weights that {checkpoint} began with: {some(other, 3)} differ"
    if not adapters:
        return f"{told}; nothing of them is used, the checkpoint has all weights"
    raise RefusedError(
        f"{told}, and its adapters mean nothing on others",
        f"`convert digest {quote(str(folder))}` has to print {total(held)}: put those weights back; adapters for "
        "others are another run, with another save.path",
    )


def record(digests: Mapping[str, str]) -> bytes:
    """What a checkpoint keeps of the weights that its run began with."""
    return (json.dumps({"digest": total(digests), "tensors": digests}, indent=1) + "\n").encode()


def recorded(checkpoint: Path) -> dict[str, str] | None:
    """The digests of the weights that a run began with, None of a run that was made without a record.

    Raises:
        SourceError: the record is damaged.
    """
    path = checkpoint / RECORD
    if not path.is_file():
        return None
    held = read_json(path)
    tensors = held.get("tensors") or {}
    digests = {name: str(value) for name, value in tensors.items()} if isinstance(tensors, dict) else {}
    if total(digests) == held.get("digest"):
        return digests
    raise SourceError(f"{path} is damaged: it is no record of the weights that a run began with", "copy it again")


def _digests(folder: Path, world: World) -> dict[str, str]:
    """The digest of each tensor of a Hugging Face folder: each is read by one rank."""
    jobs: tuple[Job, ...] = world.told(
        lambda: make_plan(open_checkpoint(folder, first=(HUGGINGFACE,))).jobs  # which the trainer reads
    )
    mine = sorted(jobs, key=lambda job: -job.nbytes)[world.rank :: world.ranks]
    found: dict[str, str] | Exception
    try:
        found = digest_of(mine, LIMITS)
    except (VitruvianError, OSError) as error:
        found = error
    every = world.gathered(found)
    world.told(lambda: _raise_first(every))
    return {name: digest for one in every for name, digest in one.items()}


def _raise_first(found: Iterable[Any]) -> None:
    for one in found:
        if isinstance(one, Exception):
            raise one
