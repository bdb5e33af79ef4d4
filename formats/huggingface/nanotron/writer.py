"""Write checkpoints of nanotron that load in any topology.

A training that finds no weights file of its own rank joins the files of all ranks and takes its part
(serialize/weights.py `load_weights`), so one file per parameter is enough. It loads the optimizer from the file of its
own rank.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from formats.checkpoint import OutputFile, Target, slot_dtype
from formats.disk.safetensors import DTYPES, Entry, Fragment, row_major, safetensors_header
from formats.huggingface.nanotron import codecs, model_config, optimizer_writer, shards
from formats.huggingface.nanotron.checkpoint import METADATA
from formats.huggingface.nanotron.optimizer_writer import Topology
from formats.huggingface.nanotron.tables import slots_of
from formats.layout.placed import Placed
from formats.layout.slots import Slot
from formats.model.spec import ModelSpec
from formats.optimizer import Optimizer

ONE_RANK = Topology()


def write(
    root: Path,
    spec: ModelSpec,
    dtypes: Mapping[tuple[str, int | None], str],
    vocab_multiple: int,
    config: Mapping[str, Any],
    optimizer: Optimizer | None = None,
    topology: Topology = ONE_RANK,
) -> Target:
    """Lay out a checkpoint.

    Args:
        root: the folder of the checkpoint.
        spec: the model; its true vocabulary must be known.
        dtypes: the element type of each logical tensor.
        vocab_multiple: the rows of the vocabulary on each tensor-parallel rank are padded to a multiple of this.
        config: the Hugging Face config of the model.
        optimizer: the optimizer to write beside the weights, for a training that resumes.
        topology: the parallel sizes of the training that resumes.

    Raises:
        UnsupportedError: models of the family are not written for nanotron.
        RefusedError: nanotron has no key for a setting of the model, or cannot train it in the topology.
    """
    multiple = vocab_multiple * topology.tp
    padded = -(-(spec.vocab or 0) // multiple) * multiple
    settings = model_config.written_config(spec, padded, config)
    files = tuple(_file(root, slot, slot_dtype(slot, dtypes)) for slot in slots_of(spec, padded, neighbours=False))
    texts = {model_config.NAME: settings, METADATA: _metadata(optimizer)}
    small = {name: (json.dumps(text, indent=2) + "\n").encode() for name, text in texts.items()}
    if optimizer:
        kind = next(kind for kind, mark in codecs.MARKS.items() if mark in settings)
        files += tuple(optimizer_writer.files_of(root, spec, padded, kind, optimizer, topology))
        small |= optimizer_writer.config_of(optimizer, topology)
    return Target(files, small, {})


def _file(root: Path, slot: Slot, dtype: str) -> OutputFile:
    """Lay out the file of a parameter."""
    key, metadata = slot.keys[0], shards.metadata_of(slot)
    path = root / shards.path_of(key, split=bool(metadata))
    header, offsets = safetensors_header([Entry(shards.DATA, dtype, slot.shape)], metadata)
    fragment = Fragment(path, offsets[shards.DATA], dtype, slot.shape, row_major(slot.shape))
    size = len(header) + prod(slot.shape) * DTYPES[dtype]
    return OutputFile(path, size, (Placed(key, slot, fragment),), {}, lambda _: [(0, header)])


def _metadata(optimizer: Optimizer | None) -> dict[str, Any]:
    """Return checkpoint_metadata.json with the step and samples of the optimizer, 0 without (serialize/metadata.py)."""
    counts = {"consumed_train_samples": 0, "consumed_tokens_total": 0, "last_train_step": 0, "last_stage_idx": 0}
    if optimizer:
        counts |= {"last_train_step": optimizer.step or 0, "consumed_train_samples": optimizer.samples or 0}
    sizes = {"tp": 1, "dp": 1, "cp": 1}
    return {"version": shards.VERSION, **sizes, "custom_metas": None, "metas": {**counts, "data_stages": []}}
