"""Write checkpoints for GPT-NeoX: sequential or pipeline files of any topology.

The files hold what NeoX needs to load them with `finetune: true`: the module, or layer files, and `dp_world_size`
(deepspeed/runtime/engine.py:4668, 0.19.8). Optimizer states are not written; `finetune: false` would need them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from formats.checkpoint import OutputFile, Target, slot_dtype
from formats.deepspeed import folders as deepspeed
from formats.deepspeed.neox.tables import slots_of
from formats.deepspeed.neox.yml import to_neox
from formats.deepspeed.neox.yml_file import dump_yml
from formats.errors import RefusedError
from formats.layout.slots import Slot
from formats.model.spec import ModelSpec
from formats.torch_files.archive_writer import TensorEntry, archived
from formats.torch_files.pickle_values import TensorRef

YML = "configs/model.yml"


@dataclass(frozen=True)
class Options:
    """The user's options: the topology, the kind of files, and the padding of the vocabulary.

    `pp` is 0 for a sequential checkpoint. `base` is the yml of the checkpoint that is resharded.
    """

    tp: int = 1
    pp: int = 0
    vocab_multiple: int = 128
    iteration: int = 0
    base: Mapping[str, Any] = field(default_factory=dict)


def write(root: Path, spec: ModelSpec, dtypes: Mapping[tuple[str, int | None], str], options: Options) -> Target:
    """Lay out a run folder with one checkpoint.

    Args:
        root: the run folder.
        spec: the model; its true vocabulary must be known.
        dtypes: the element type of each logical tensor.
        options: topology and kind of files.

    Raises:
        RefusedError: the sizes do not divide, or there are more stages than layers.
        UnsupportedError: NeoX has no such model.
    """
    unit = options.vocab_multiple * options.tp
    padded = -(-(spec.vocab or 0) // unit) * unit
    if options.pp > spec.layers:
        raise RefusedError(f"{spec.layers} layers do not fill {options.pp} pipeline stages")
    config = to_neox(spec, options.tp, options.pp, options.vocab_multiple, options.base)
    if spec.ffn % options.tp:
        raise RefusedError(f"{spec.ffn} rows of the MLP do not divide over tp = {options.tp}")
    conditions = {"mha" if spec.kv_heads == spec.heads else "gqa", "fused"}
    tag = f"global_step{options.iteration}"
    by_file: dict[str, list[TensorEntry]] = {}
    for slot in slots_of(spec, options.tp, padded, conditions, layered=options.pp > 0):
        by_file.setdefault(slot.place.file, []).append(_tensor(slot, dtypes, layered=options.pp > 0))
    head = _head(spec, options, padded)
    files = [_file(root / tag / name, tensors, head, layered=options.pp > 0) for name, tensors in by_file.items()]
    if options.pp:
        names = map(deepspeed.model_name, range(options.tp * options.pp))
        files += [_archived(root / tag / name, (), lambda _: {**head, "module": None}) for name in names]
    texts = {deepspeed.LATEST: tag.encode(), f"{tag}/{YML}": dump_yml(config)}
    return Target(tuple(files), texts, {}, tag)


def _tensor(slot: Slot, dtypes: Mapping[tuple[str, int | None], str], *, layered: bool) -> TensorEntry:
    """A tensor to write, with its key in the file; of a bias that ranks sum up the first has all, the others zeros."""
    key = slot.keys[0].partition(".")[2] if layered else f"sequential.{slot.keys[0]}"
    zeros = "partial" in slot.rule.conditions and slot.replica
    return key, None if zeros else slot, slot.shape, slot_dtype(slot, dtypes)


def _head(spec: ModelSpec, options: Options, padded: int) -> dict[str, Any]:
    """The entries of the file of a model parallel rank, besides the weights."""
    return {
        "optimizer": {},
        "dp_world_size": 1,
        "mp_world_size": options.tp * max(1, options.pp),
        "global_steps": options.iteration,
        "skipped_steps": 0,
        "iteration": options.iteration,
        "args": {
            "num_layers": spec.layers,
            "hidden_size": spec.hidden,
            "num_attention_heads": spec.heads,
            "max_position_embeddings": spec.max_positions,
            "make_vocab_size_divisible_by": options.vocab_multiple,
            "padded_vocab_size": padded,
            "model_parallel_size": options.tp,
        },
        deepspeed.OURS: {"gqa_layout": "blocked", "vocab": spec.vocab, "family": spec.family},
    }


def _archived(
    path: Path, tensors: Sequence[TensorEntry], value: Callable[[Mapping[str, TensorRef]], Any]
) -> OutputFile:
    """A file that holds its own name, as those of torch.save do, so that a reader refuses swapped ranks."""
    return archived(path, tensors, value, path.stem)


def _file(path: Path, tensors: list[TensorEntry], head: Mapping[str, Any], *, layered: bool) -> OutputFile:
    if layered:
        return _archived(path, tensors, OrderedDict)
    return _archived(path, tensors, lambda refs: {"module": OrderedDict(refs), **head})
