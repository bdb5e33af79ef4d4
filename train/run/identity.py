"""Identity of the start: each checkpoint records the model that its run began with; resume and merge compare it.

    SAVE/global_step1500/config.json   the config of the start, which the model is built from
    SAVE/global_step1500/.start        digest of the start's weights, as `convert digest` prints it, and of each tensor

To resume from a checkpoint of all weights, the config must be the same; for adapters, the weights must be too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import Any

from converters.common.manifest import contradictions, total
from converters.move.engine import digest_of
from converters.plan.plan import Job, make_plan
from converters.plan.request import Limits
from formats.checkpoint import Checkpoint
from formats.disk.json_file import read_json
from formats.errors import RefusedError, SourceError, VerificationError, VitruvianError, some
from formats.huggingface import HUGGINGFACE
from formats.registry import open_checkpoint
from train.data.tokens.tokenizers import FILES, names_digest, open_vocabulary
from train.distributed import World
from train.model.trainee import open_config
from train.start.run_folder import RECORD

BESIDE = (".json", ".jinja", ".model", ".txt")
"""Suffixes of the small files of a model folder that go into each checkpoint."""
NOT_BESIDE = (".index.json", "vitruvian.json")
"""Endings of the small files that do not go into a checkpoint: they describe the tensors of the start."""
FREE = frozenset({
    "_name_or_path", "name_or_path", "architectures", "transformers_version", "dtype", "torch_dtype", "use_cache",
    "bos_token_id", "eos_token_id",
})  # fmt: skip
"""Keys of a config.json that do not affect the training: `model.dtype` sets the dtype, token files determine the tokens
(transformers 5.23.0 configuration_utils.py)."""
LIMITS = Limits(threads=2)
"""How tensors are read for a digest."""


def small_files(folder: Path) -> dict[str, bytes]:
    """The contents of the small files of a start that go into each checkpoint, by name, as they are now."""
    return {
        path.name: path.read_bytes()
        for path in sorted(folder.iterdir())
        if path.suffix in BESIDE and path.is_file() and not path.name.endswith(NOT_BESIDE)
    }


def changed_files(checkpoint: Path, folder: Path) -> str:
    """A note that names the small files that differ between a start and a checkpoint; empty if none does."""
    then, now = small_files(checkpoint), small_files(folder)
    shared = (then.keys() & now.keys()) - {"config.json"}  # `require_same_config` compares its values
    names = [name for name in sorted(shared) if then[name] != now[name]]
    return (
        f"{folder} has other files than {checkpoint}, which are saved from here on: {some(names, 4)}" if names else ""
    )


# --- the config ------------------------------------------------------------------------------------------------------


def require_same_config(checkpoint: Path, folder: Path) -> None:
    """Check that a model's config equals that of a checkpoint; both are compared as transformers reads them.

    Args:
        checkpoint: a checkpoint of a run, with the config.json that it was trained with.
        folder: the model folder whose model will get the weights of the checkpoint.

    Raises:
        RefusedError: a setting differs.
        SourceError: a config.json is missing or cannot be read.
    """
    changed = differing(read_settings(checkpoint), read_settings(folder))
    if changed:
        raise RefusedError(
            f"{folder / 'config.json'} is not what {checkpoint} was trained with (then | now): {some(changed, 4)}",
            f"cp --remove-destination {quote(str(checkpoint / 'config.json'))} {quote(str(folder / 'config.json'))}; "
            "another model is another run, with another save.path",
        )


def differing(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The settings that differ between two models, as `name: then | now`; the model type comes first if it differs."""
    return contradictions({"model_type": None, **dict.fromkeys(now), **then}, now)


def read_settings(folder: Path) -> dict[str, Any]:
    """The config of a model as transformers reads it, without the keys in `FREE`.

    Raises:
        SourceError: config.json is missing or cannot be read.
    """
    if not (folder / "config.json").is_file():
        raise SourceError(f"{folder} has no config.json, so its model is not known", "copy it back")
    settings: dict[str, Any] = _bound(open_config(folder).to_dict())
    return settings


def _bound(value: Any) -> Any:
    """A config without the keys in `FREE`, also in nested configs."""
    if isinstance(value, Mapping):
        return {str(name): _bound(inner) for name, inner in value.items() if name not in FREE}
    return value


def require_same_tokenizer(checkpoint: Path, folder: Path) -> None:
    """Check that token ids still mean the same tokens; added tokens and the formatting of the file may differ.

    Args:
        checkpoint: a checkpoint of a run, with the tokenizer of its start, if the start had one.
        folder: the model folder whose tokenizer would go into the next checkpoints.

    Raises:
        RefusedError: a token id stands for another token.
    """
    for name in FILES:
        pair = [place / name for place in (checkpoint, folder)]
        if all(path.is_file() for path in pair) and not _same_names(*pair):
            raise RefusedError(
                f"{pair[1]} is not the tokenizer that {checkpoint} was trained with: ids have other tokens",
                f"cp --remove-destination {quote(str(pair[0]))} {quote(str(pair[1]))}",
            )


def _same_names(then: Path, now: Path) -> bool:
    """Whether the ids that two tokenizers have in common mean the same tokens."""
    if then.read_bytes() == now.read_bytes():
        return True
    try:
        known = [open_vocabulary(path) for path in (then, now)]
    except SourceError:  # tokenizer.model of some models is tiktoken's
        return False
    size = min(vocabulary.size for vocabulary in known)
    return names_digest(known[0], size) == names_digest(known[1], size)


# --- the weights -----------------------------------------------------------------------------------------------------


def begun(start: Path | None, folder: Path, partial: bool, world: World) -> tuple[dict[str, str], str]:
    """The digests of the weights that a run began with, and a note, empty if there is none. Collective.

    Args:
        start: the checkpoint that the run resumes from, None for a new run.
        folder: the model folder that the settings name now.
        partial: whether checkpoints lack the weights that are not trained, as checkpoints of adapters do.
        world: the ranks; each reads a share of the weights.

    Raises:
        RefusedError: what was trained would be combined with other weights than it was trained on.
    """
    now = _digests(folder, world)
    if start is None:
        return now, ""
    then: Mapping[str, str] | None = world.from_first(lambda: recorded(start))
    note: str = world.from_first(lambda: compared(start, folder, then, now, partial))
    return dict(now if then is None else then), note


def require_same_base(checkpoint: Path, base: Checkpoint) -> str:
    """Check that the adapters of a checkpoint belong to a base model. Returns a note, empty if there is none.

    Raises:
        RefusedError: the config, tokenizer or weights of the base model differ.
    """
    require_same_config(checkpoint, base.root)
    require_same_tokenizer(checkpoint, base.root)
    then = recorded(checkpoint)
    now = {} if then is None else _digested(base.root, make_plan(base).jobs)
    return compared(checkpoint, base.root, then, now, partial=True)


def compared(
    checkpoint: Path, folder: Path, then: Mapping[str, str] | None, now: Mapping[str, str], partial: bool
) -> str:
    """Compare the weights that a checkpoint's run began with and those that are in a folder now. Returns a note.

    Raises:
        RefusedError: the weights differ, and the checkpoint does not have all weights.
    """
    if then is None:
        note = f"{checkpoint} does not record which weights it was trained on: {folder} is taken on trust"
        return note if partial else ""
    other = sorted(name for name in then.keys() | now.keys() if then.get(name) != now.get(name))
    if not other:
        return ""
    note = f"{folder} no longer holds the weights that {checkpoint} began with: {some(other, 3)} differ"
    if not partial:
        return f"{note}; nothing of them is used, the checkpoint has all weights"
    raise RefusedError(
        f"{note}, and what it has was trained on them",
        f"`convert digest {quote(str(folder))}` has to print {total(then)}: put those weights back; a training on "
        "others is another run, with another save.path",
    )


def record(digests: Mapping[str, str]) -> bytes:
    """The content of the file `.start` of a checkpoint: digests of the weights that its run began with."""
    return (json.dumps({"digest": total(digests), "tensors": digests}, indent=1) + "\n").encode()


def recorded(checkpoint: Path) -> dict[str, str] | None:
    """The digests of the weights that a checkpoint's run began with; None if the version that wrote it had no record.

    Raises:
        SourceError: the record is damaged.
    """
    path = checkpoint / RECORD
    if not path.is_file():
        return None
    saved = read_json(path)
    tensors = saved.get("tensors") or {}
    digests = {name: str(value) for name, value in tensors.items()} if isinstance(tensors, dict) else {}
    if total(digests) == saved.get("digest"):
        return digests
    raise SourceError(f"{path} is damaged: it is no record of the weights that a run began with", "copy it again")


def _digests(folder: Path, world: World) -> dict[str, str]:
    """The digest of each tensor of a Hugging Face folder; each tensor is read by one rank. Collective."""
    jobs: tuple[Job, ...] = world.from_first(lambda: _jobs(folder))
    mine = sorted(jobs, key=lambda job: -job.nbytes)[world.rank :: world.ranks]
    digests: dict[str, str] | Exception
    try:
        digests = _digested(folder, mine)
    except (VitruvianError, OSError) as error:
        digests = error
    results = world.gathered(digests)
    world.from_first(lambda: _raise_first(results))
    return {name: digest for rank_digests in results for name, digest in rank_digests.items()}


def _jobs(folder: Path) -> tuple[Job, ...]:
    return make_plan(open_checkpoint(folder, first=(HUGGINGFACE,))).jobs  # the format that the trainer reads


def _digested(folder: Path, jobs: Sequence[Job]) -> dict[str, str]:
    """The digest of each tensor.

    Raises:
        VerificationError: the config ties the output head to the embedding, and the files hold another head.
    """
    try:
        return digest_of(jobs, LIMITS)
    except VerificationError as error:
        hint = f'"tie_word_embeddings": false in {folder / "config.json"} keeps both'
        raise VerificationError(str(error), hint) from None


def require_tied(folder: Path) -> None:
    """Check that a head which the config of a Hugging Face folder ties to the embedding is equal to it in the files.

    Raises:
        VerificationError: it is not.
    """
    _digested(folder, [job for job in _jobs(folder) if job.replicas])


def _raise_first(results: Iterable[Any]) -> None:
    for result in results:
        if isinstance(result, Exception):
            raise result
