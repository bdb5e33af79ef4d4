"""Export: the last checkpoint of a run as a Hugging Face folder, converted as `convert fsdp2hf` does.

Adapters are merged into their base model as `convert merge` does.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from blake3 import blake3

from converters.assets.chat_template import load_template
from converters.assets.files import files, has_tokenizer
from converters.assets.token_files import held_template
from converters.convert import check_paths, run
from converters.library.records import notes_of
from converters.plan.merging import plan_merge
from converters.plan.request import Request
from converters.plan.targets import SHARD_SIZE, plan_huggingface
from converters.prove.archive_crc import archives, check
from formats.errors import RefusedError, UsageError
from formats.huggingface import adapter as peft
from formats.huggingface import lora_config
from formats.registry import open_checkpoint
from formats.torch_files.saves import require_one_save
from train.data.tokens.documents import Documents
from train.settings.config import Config

ADAPTER = "adapter"
"""Name of the folder in OUT that has the adapters only, as peft loads them."""


def export(checkpoint: Path, out: Path, template: str | None = None, moved: Path | None = None) -> list[str]:
    """Convert a checkpoint to bf16, without a process group, in constant memory; the output is read back and compared.

    For a checkpoint with adapters, OUT is the merged model and `OUT/adapter` is what peft loads.

    Args:
        checkpoint: a checkpoint of this trainer.
        out: the folder to write; it must not exist.
        template: name or file of a chat template; None keeps that of the model, if it has one.
        moved: the base model of the adapters, if it is no longer at the path that `adapter_config.json` records.

    Returns:
        The notes on the conversion; one of them says so if the checkpoint does not record which weights its adapters
        belong to.

    Raises:
        VitruvianError: the conversion is refused; or the adapters belong to other weights.
    """
    from safetensors.torch import save_file

    from train.model.lora import BASE, NOTE
    from train.run.identity import require_same_base

    request = Request(out, cast="bf16", quiet=True)
    if not (checkpoint / NOTE).is_file():
        plan = plan_huggingface(open_checkpoint(checkpoint), request, SHARD_SIZE, template)
        notes = notes_of(plan)
        run(plan, request)
        return notes
    require_one_save(checkpoint)
    settings = json.loads((checkpoint / NOTE).read_bytes())
    place = Path(settings[BASE])
    base = open_checkpoint(moved if moved is not None and not place.exists() else place)
    check_paths(base, request)
    note = require_same_base(checkpoint, base)
    beside = request.place.parent
    beside.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{ADAPTER}.", dir=beside) as folder:
        scratch = Path(folder)
        save_file(read_adapters(checkpoint), scratch / peft.WEIGHTS, {"format": "pt"})
        shutil.copyfile(checkpoint / NOTE, scratch / lora_config.CONFIG)
        saved = peft.read(scratch)
        saved = saved._replace(config={**saved.config, BASE: str(base.root)})  # `require_same_base` has compared it
        plan = plan_merge(base, saved, request, lambda merged: plan_huggingface(merged, request, SHARD_SIZE, template))
        assert plan.target is not None
        own = {f"{ADAPTER}/{name}": scratch / name for name in (lora_config.CONFIG, peft.WEIGHTS)}
        plan = replace(plan, target=replace(plan.target, copies={**plan.target.copies, **own}))
        notes = [*notes_of(plan), *filter(None, [note])]
        run(plan, request)
    return notes


def check_export(config: Config, start: Path, trained: Iterable[Documents]) -> str:
    """Check before the training that its model can be exported.

    Args:
        config: the settings; `export`, `chat_template` and `model` are read.
        start: the Hugging Face folder that the training starts from.
        trained: the documents of the token files that are trained.

    Returns:
        A note, if a token file was made with another chat template than the exported model will have; both may render
        the same text.

    Raises:
        VitruvianError: the start lacks a tokenizer, or the chat template does not fit it.
    """
    if config.export is None:
        if config.chat_template is not None:
            raise UsageError("chat_template is that of the exported folder, and nothing is exported", "--export OUT")
        return ""
    if not has_tokenizer(start):
        later = "train without export, and then: convert tokenizer FILE FOLDER, convert assets OUT --from FOLDER"
        raise RefusedError(
            f"{config.export} would have no tokenizer: {config.model.path} has none",
            f"--model.tokenizer FILE of SentencePiece or tokenizer.json; or {later}"
            if start != config.model.path
            else later,
        )
    plan_huggingface(open_checkpoint(start), Request(config.export, cast="bf16"), SHARD_SIZE, config.chat_template)
    template = (
        held_template(dict(files(start))) if config.chat_template is None else load_template(config.chat_template)
    )
    digest = None if template is None else blake3(template.encode()).hexdigest()
    other = [
        documents.indexed.prefix
        for documents in trained
        if documents.facts is not None and documents.facts.template not in (None, digest)
    ]
    if not other:
        return ""
    return (
        f"{other[0]} was made with another chat template than {config.export} will have: is what they write the same? "
        "else --chat_template FILE"
    )


def read_adapters(checkpoint: Path) -> dict[str, Any]:
    """The adapters of a checkpoint as float32 tensors, by their names in peft's files.

    Raises:
        SourceError: a file does not match its CRC-32, or belongs to another save.
    """
    import torch
    from safetensors.torch import load_file
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    from train.run.checkpoint import THREADS, refuse_damaged

    refuse_damaged(checkpoint, check(archives(checkpoint), THREADS, lambda _: None).damaged)
    require_one_save(checkpoint)
    if (checkpoint / peft.WEIGHTS).is_file():  # beside the states of DeepSpeed
        return load_file(checkpoint / peft.WEIGHTS)
    reader, inside = FileSystemReader(checkpoint), "model."
    metadata: dict[str, Any] = reader.read_metadata().state_dict_metadata
    tensors = {name: torch.empty(metadata[name].size) for name in sorted(metadata) if name.startswith(inside)}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # which is intended
        load(tensors, storage_reader=reader, no_dist=True)
    return {name.removeprefix(inside): tensor for name, tensor in tensors.items()}
