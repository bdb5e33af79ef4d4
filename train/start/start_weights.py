"""The weights that a run starts from: a Hugging Face folder, or any other checkpoint, which is converted once."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from formats.checkpoint import Checkpoint, Settings
from formats.disk.json_file import read_json
from formats.errors import OutputError, SourceError, UnsupportedError, UsageError
from formats.huggingface.folder import INDEX, SINGLE
from formats.model.spec import Verbatim
from formats.registry import FORMATS, open_checkpoint
from train.data.tokens.tokenizers import open_vocabulary
from train.settings.config import Config
from train.start.run_folder import started

if TYPE_CHECKING:
    from converters.plan.plan import Plan

TO_FOLDER = {form.name: form.to_folder for form in FORMATS.values() if form.to_folder}
"""Format of a checkpoint: the command that converts it to a Hugging Face folder."""
MAKE = f"make one of a checkpoint: convert {', '.join(sorted({*TO_FOLDER.values()}))} CHECKPOINT FOLDER"
"""The hint of errors where a Hugging Face folder is required."""
CONVERTED = "start"
"""Name of the Hugging Face folder in `save.path` that the start of a run is converted to.

`SAVE/.start` beside it records what it was made of; it is empty while the folder is being made."""


def settings_of(config: Config) -> Settings:
    """The settings with which the checkpoint to start from is opened."""
    return Settings(config=config.model.config, gqa_layout=config.model.gqa_layout)


def is_folder(path: Path) -> bool:
    """Whether ranks can read their shards from a folder directly: it has safetensors that are not quantized."""
    has_weights = any((path / name).is_file() for name in (SINGLE, INDEX))
    return has_weights and (path / "config.json").is_file() and not _is_quantized(path)


def _is_quantized(path: Path) -> bool:
    file = path / "config.json"
    return file.is_file() and bool(read_json(file).get("quantization_config"))


def folder_of(config: Config, resumed: bool = False) -> tuple[Path, list[str]]:
    """The Hugging Face folder to start from. Any other checkpoint is converted once, to `SAVE/start`.

    Args:
        config: the settings; `model`, `seed` and `save.path` are read.
        resumed: whether the weights come from a checkpoint of this run. Where `model.path` is `save.path`, as in
            GPT-NeoX files, `latest` then names a checkpoint of this run, and `SAVE/start` stays the start of the run.

    Returns:
        The folder, and the notes on its conversion.

    Raises:
        OutputError: `SAVE/start` is not of this trainer, or holds other files too.
        VitruvianError: the checkpoint cannot be converted, or it needs a Hugging Face folder or tokenizer, not given.
    """
    if config.model.tokenizer is not None and config.model.tokenizer.exists():
        open_vocabulary(config.model.tokenizer)  # checked also where the start has its own
    if resumed and is_folder(config.model.path):  # an older run that saves into its start folder
        return config.model.path, []  # its own checkpoint has the weights
    path, out = started(config.model.path), config.save.path / CONVERTED
    if config.model.init == "config":
        return _random(path, config.seed, out), []
    if is_folder(path):
        return path, []
    if resumed and is_folder(out) and config.model.path.resolve() == config.save.path.resolve():
        return out, []
    from converters.common.atomic import write_file
    from converters.convert import run
    from converters.move.journal import fingerprint
    from converters.plan.request import Request
    from converters.plan.targets import SHARD_SIZE, plan_huggingface

    request = Request(out, quiet=True, force=True)
    with TemporaryDirectory(prefix="vitruvian-") as scratch:
        source = opened(path, config, Path(scratch))
        if isinstance(source.spec, Verbatim) and _is_quantized(path):
            raise UnsupportedError(f"{path} cannot be trained: {source.spec.why}")
        plan = plan_huggingface(source, request, SHARD_SIZE)
        assert plan.target is not None
        weights = fingerprint(plan, request.limits.replicas)
        made_of = _made_of(weights, plan.target.texts, plan.target.copies)
        notes = notes_of(plan)
        if _is_made_of(out, made_of):
            return out, notes
        record = _claimed(out)
        run(plan, request)
    write_file(record, made_of)
    if not is_folder(out):
        raise UsageError(f"{path} was converted to {out}, which has no config.json", "--model.config HF_FOLDER")
    return out, notes


def notes_of(plan: Plan) -> list[str]:
    """The notes on a conversion, without that on the state of the training, which `init` decides on."""
    from converters.library import records

    return records.notes_of(replace(plan, source=replace(plan.source, state=())))


def _made_of(weights: str, texts: Mapping[str, bytes], copies: Mapping[str, Path]) -> bytes:
    """What a start is made of: what identifies its weights, and a digest of its small files."""
    small = {**texts, **{name: path.read_bytes() for name, path in copies.items()}}
    return f"{weights} {blake3(repr(sorted(small.items())).encode()).hexdigest()}".encode()


def _is_made_of(out: Path, made_of: bytes) -> bool:
    record = _record_of(out)
    return is_folder(out) and record.is_file() and record.read_bytes() == made_of


def _record_of(out: Path) -> Path:
    return out.with_name(f".{out.name}")


def _claimed(out: Path) -> Path:
    """Empty the record of a start that is about to be made anew, and return its path.

    Raises:
        OutputError: without a record, what is there is not of this trainer; or other files are in the folder.
    """
    from converters.assets.replaceable import reason_to_keep
    from converters.common.atomic import write_file

    record, elsewhere = _record_of(out), "move it elsewhere, or take another save.path"
    for place in (out, out.with_name(f"{out.name}.partial")):
        is_empty = place.is_dir() and not any(place.iterdir())
        if os.path.lexists(place) and not is_empty and not record.is_file():
            raise OutputError(
                f"{place} exists and was not made by this run, as there is no {record}: it would be replaced by the "
                "folder that the run starts from",
                elsewhere,
            )
    if out.is_dir() and (reason := reason_to_keep(out)):
        raise OutputError(f"{out}, which has to be made again, {reason}", elsewhere)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_file(record, b"")
    return record


def _random(path: Path, seed: int, out: Path) -> Path:
    """The folder `SAVE/start` with config and tokenizer of a Hugging Face folder and random weights, made once.

    The weights are those that transformers initialises after `torch.manual_seed(seed)`, on this rank, which needs
    memory for all of them.

    Raises:
        OutputError: `SAVE/start` is not of this trainer, or holds other files too.
        SourceError: the folder has no config.json, or transformers does not know its model.
    """
    from converters.assets.files import files, write

    if not (path / "config.json").is_file():
        raise SourceError(f"{path} has no config.json, which model.init config needs", "--model.path HF_FOLDER")
    small = dict(files(path))
    made_of = _made_of(f"config {seed}", {}, small)
    if _is_made_of(out, made_of):
        return out
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from converters.common.atomic import write_file

    try:
        model_config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        torch.manual_seed(seed)
        model: Any = AutoModelForCausalLM.from_config(model_config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = " ".join(str(error).split())[:200]
        raise SourceError(f"transformers makes no model of {path / 'config.json'}: {why}") from error
    record, staging = _claimed(out), out.with_name(f"{out.name}.partial")
    shutil.rmtree(staging, ignore_errors=True)
    model.save_pretrained(staging)
    write(staging, {}, small)
    shutil.rmtree(out, ignore_errors=True)
    staging.rename(out)
    write_file(record, made_of)
    return out


def opened(path: Path, config: Config, scratch: Path) -> Checkpoint:
    """A checkpoint, with a tokenizer if the checkpoint lacks one.

    The tokenizer is that of the settings, or the one that the checkpoint's yml names.
    """
    from converters.assets.files import has_tokenizer
    from converters.assets.tokenizer_files import attached, load, named_in_yml

    tokenizer, settings = config.model.tokenizer, settings_of(config)
    source = open_checkpoint(path, settings)
    if source.assets is not None and has_tokenizer(source.assets):
        return source
    if tokenizer is not None and not tokenizer.exists():
        hint = "--model.tokenizer FILE; or null for none"
        raise SourceError(f"{tokenizer}, the tokenizer of {path}, is not there", hint)
    by = "--model.tokenizer FILE"
    loaded, notes = (load(tokenizer), ()) if tokenizer is not None else named_in_yml(source, by)
    if loaded is None:
        return replace(source, notes=(*source.notes, *notes))
    if source.spec.vocab is None:
        source = open_checkpoint(path, replace(settings, vocab_size=loaded.size))
    return attached(source, loaded, scratch)
