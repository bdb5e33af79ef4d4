"""Read checkpoints of nanotron.

    RUN/latest.txt                 the last step
    RUN/STEP/model_config.json     the settings (model_config.py)
    RUN/STEP/model/…               a file for each parameter and rank (shards.py)
    RUN/STEP/checkpoint_metadata.json    version, tp, dp, and the step in `metas`
    RUN/STEP/config.yaml           the run; the only record of whether the model uses muP
    RUN/STEP/optimizer/            read only with the optimizer (optimizer.py)
    RUN/STEP/lr_scheduler/, random/    not read

Facts: huggingface/nanotron at 2411b022, trainer.py (`save_checkpoint`), serialize/main.py, serialize/metadata.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from formats.checkpoint import ASSETS, Checkpoint, Details, Settings
from formats.disk.json_file import read_json
from formats.errors import SourceError, UnsupportedError, count, short
from formats.families.family import Family
from formats.huggingface import NANOTRON
from formats.huggingface import folder as huggingface
from formats.huggingface.nanotron import TRACKER, codecs, model_config, shards, special_tokens
from formats.huggingface.nanotron.tables import TABLES, slots_of
from formats.layout.pieces import match_pieces
from formats.layout.slots import Slot
from formats.layout.table import Rule
from formats.model.accepted import LAST_STEP
from formats.model.padding import require_rows, unit_of

NAME = NANOTRON.name
METADATA = "checkpoint_metadata.json"
STEP, SAMPLES = LAST_STEP, "consumed_train_samples"
"""The keys in `metas` of the step and of the number of samples so far."""
RUN_CONFIG = "config.yaml"
STATE = ("optimizer", "lr_scheduler", "random")
"""Folders with training state, for resuming the training."""
DIVISIBLE_BY = re.compile(r"^ +make_vocab_size_divisible_by: *(\d{1,9}) *$", re.MULTILINE)
WITH_MUP = re.compile(r"^ +use_mup: *true *$", re.MULTILINE | re.IGNORECASE)
"""Lines of the run's config, as yaml.dump writes it (config/config.py `save_as_yaml`)."""
FRESH = "load_optimizer: false and load_lr_scheduler: false in its config"


@dataclass(frozen=True, kw_only=True)
class Nanotron(Details):
    """Facts of a nanotron save that the model's spec does not hold.

    Attributes:
        step: the step; None where the metadata records none.
        samples: how many samples the model was trained on; None where the metadata records none.
        neighbours: whether rotary embeddings rotate neighbouring rows of a head, not halves.
    """

    step: int | None
    samples: int | None
    neighbours: bool


def detect(path: Path) -> bool:
    """Whether a folder looks like a checkpoint of nanotron, or like a run of nanotron."""
    folder = locate(path)
    return (folder / model_config.NAME).is_file() and (folder / shards.FOLDER / "model").is_dir()


def locate(path: Path) -> Path:
    """Return the folder of the checkpoint: of a run, the folder of its last step."""
    latest = path / TRACKER
    if (path / model_config.NAME).is_file() or not latest.is_file():
        return path
    step = latest.read_text(errors="replace").strip()
    return path / step if step.isdecimal() and (path / step).is_dir() else path


def parts(path: Path) -> list[Path]:
    """The folder of the step that is read (`Format.folders`)."""
    return [locate(path)]


def tables() -> dict[str, tuple[Rule, ...]]:
    """The tensor layouts of the format, by name."""
    return TABLES


def holders(family: Family) -> dict[str, bool]:
    """Whether the format can hold models of a family: one that nanotron's two model classes compute."""
    return {NAME: family.name in model_config.MAY_HAVE}


def read(path: Path, settings: Settings) -> Checkpoint:
    """Open a checkpoint: read its settings and the header of each file, but no weights.

    Raises:
        SourceError: a file is missing or damaged.
        UnsupportedError: the model, or the version of the files, is not supported.
        RefusedError: model_config.json and the Hugging Face config contradict each other, or the vocabulary would have
            been padded to fewer rows.
    """
    home = locate(path)
    assets = settings.config or next(
        (folder for folder in (home / ASSETS, home) if (folder / "config.json").is_file()), None
    )
    config = huggingface.read_config(assets) if assets else None
    base = huggingface.read_spec(config, assets, replace(settings, vocab_size=None)) if assets and config else None
    where = home / model_config.NAME
    settings_file = read_json(where)
    spec, neighbours = model_config.read_config(settings_file, settings, base, str(where))
    token_ids = special_tokens.read(settings_file, spec.vocab)
    metadata = _metadata(home)
    _require_no_mup(home, settings_file)
    files = tuple(shards.shards(home))
    topology = shards.topology(files, home)
    if metadata.get("tp") not in (None, topology["tp"]):
        raise SourceError(
            f"{home / METADATA} says tp = {short(metadata['tp'])}, the files are of {topology['tp']} ranks",
            "they are of two saves",
        )
    padded = settings_file[model_config.VOCAB]
    require_rows(spec.vocab, padded, _padding_unit(home, topology["tp"], padded), home, settings.values)
    slots = slots_of(spec, padded, neighbours=neighbours)
    _require_all(slots, files, home)
    _, pieces, dropped = match_pieces(slots, shards.pieces_by_parameter(files), (), home)
    shards.require_own_parts(files, slots)
    step = _step(metadata, home)
    return Checkpoint(
        path, home, NAME, spec, pieces, tuple(dropped),
        tuple(sorted({file.fragment.path for file in files})), topology, assets,
        Nanotron(
            step=step,
            samples=_counter(metadata, SAMPLES),
            neighbours=neighbours,
            fresh=FRESH,
            shown={"step": step} | ({"padded_vocab": padded} if padded != spec.vocab else {}),
        ),
        config=config, padded_vocab=padded, settings=settings, token_ids=token_ids,
        notes=special_tokens.apart(settings_file, config or {}, spec.vocab, where),
        state=tuple(name for name in STATE if (home / name).is_dir()),
    )  # fmt: skip


def _metadata(home: Path) -> Mapping[str, Any]:
    """Return the content of checkpoint_metadata.json; empty without that file, as after nanotron's own conversion.

    Raises:
        UnsupportedError: the version of the files is unknown.
    """
    path = home / METADATA
    if not path.is_file():
        return {}
    metadata = read_json(path)
    shards.require_known(metadata.get("version"), path)
    return metadata


def _padding_unit(home: Path, tp: int, rows: int) -> int:
    """Return the number that the rows of the padded vocabulary are a multiple of; all rows if the run does not say it.

    The trainer pads by `make_vocab_size_divisible_by` of the run's config times its tensor parallel size, and puts the
    padded number into the config that it saves (trainer.py `init_model`).
    """
    path = home / RUN_CONFIG
    said = DIVISIBLE_BY.search(path.read_text()) if path.is_file() else None
    return unit_of(int(said[1]) if said else None, tp, rows)


def _step(metadata: Mapping[str, Any], home: Path) -> int | None:
    """Return the step of a save, which is also the name of its folder; step 0, of untrained weights, fits any folder.

    Raises:
        SourceError: the folder is named after another step (trainer.py `save_checkpoint` writes the same number).
    """
    step, name = _counter(metadata, STEP), home.resolve().name
    if step and re.fullmatch("[0-9]+", name) and name != str(step):
        raise SourceError(
            f"{home / METADATA} says {STEP} = {step}, the folder is that of step {name}",
            "files of two saves may be mixed; if the folder alone was renamed, give it a name that is no number, or "
            f"{step}",
        )
    return step


def _counter(metadata: Mapping[str, Any], key: str) -> int | None:
    """Return a counter in `metas` of the metadata; None where it is absent."""
    metas = metadata.get("metas")
    number = metas.get(key) if isinstance(metas, Mapping) else None
    return number if type(number) is int else None


def _require_all(slots: Iterable[Slot], files: Iterable[shards.Shard], home: Path) -> None:
    """Refuse a checkpoint that lacks parameters of its model.

    Raises:
        SourceError: parameters are missing; the message names the first five.
    """
    names = {file.key for file in files}
    missing = [f"{slot.keys[0]} {list(slot.shape)}" for slot in slots if slot.keys[0] not in names]
    if missing:
        more = f"; and {len(missing) - 5} more" if len(missing) > 5 else ""
        lacking = count(len(missing), "tensor is", "tensors are")
        raise SourceError(f"{home}: {lacking} missing: {'; '.join(missing[:5])}{more}", "was a file not copied?")


def _require_no_mup(home: Path, config: Mapping[str, Any]) -> None:
    """Refuse a Llama trained with muP, which divides attention scores by the head dimension, not by its square root.

    Raises:
        UnsupportedError: the model was trained with muP (models/llama.py `CoreAttention`, `is_using_mup`).
    """
    path = home / RUN_CONFIG
    if config.get(codecs.MARKS[codecs.LLAMA]) and path.is_file() and WITH_MUP.search(path.read_text()):
        raise UnsupportedError(
            f"{path}: a Llama that is trained with muP (use_mup) computes attention otherwise than any family here"
        )
