"""Plans of a training with an adapter in its checkpoint: the adapter as PEFT saves it, or the model with it merged."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import groupby
from math import prod
from pathlib import Path

from converters.plan.merging import plan_merge
from converters.plan.plan import Job, Plan, cast_dtypes, make_plan
from converters.plan.request import Request
from formats.checkpoint import Checkpoint, Target
from formats.disk.safetensors import Fragment, row_major
from formats.errors import UnsupportedError
from formats.huggingface import adapter as peft
from formats.huggingface import folder as huggingface
from formats.layout.table import Placed
from formats.model.adapters import OF_LORA
from formats.registry import format_of


def plan_adapted(source: Checkpoint, request: Request, planned: Callable[[Checkpoint], Plan]) -> Plan:
    """A plan of what `--adapter` asks for.

    Args:
        source: the adapter alone, or the base that it is merged into, as its settings say.
        request: what the user asked for.
        planned: the plan of the base alone.

    Raises:
        SourceError: there is no adapter_config.json.
        UnsupportedError: the adapter is no LoRA that can be merged.
    """
    if source.settings.adapter == "only":
        return _plan_alone(source, request)
    alone = format_of(source).reader.read(source.root, replace(source.settings, adapter="only"))
    alone = replace(alone, settings=source.settings)
    left = tuple(name for name in source.dropped if not OF_LORA.fullmatch(name))
    return plan_merge(replace(source, dropped=left), _saved(alone), request, planned)


def _config(source: Checkpoint) -> dict[str, object]:
    """The settings of the adapter, which trainers leave beside the checkpoint."""
    named = [source.settings.config] if source.settings.config else []
    return peft.read_config([source.root, source.home, source.root.parent, *named])


def _saved(alone: Checkpoint) -> peft.Saved:
    """An adapter in a checkpoint as one on disk: each tensor in one piece."""
    tensors = {}
    counted = (one for one in alone.fragments() if not one.slot.replica)
    for key, pieces in groupby(counted, key=lambda one: one.key):
        tensors[key] = _joined([*pieces])
    return peft.Saved(alone.root, _config(alone), tensors, alone.files)


def _joined(pieces: list[Placed]) -> Fragment:
    """A tensor whose pieces are intervals of its elements.

    Raises:
        UnsupportedError: they are other parts of it.
    """
    shape, found = pieces[0].slot.shape, []
    for key, _, fragment, part, *_ in pieces:
        start = 0
        if part is not None and part.flat:
            start = part.ranges[0][0]
        elif part is not None and part.ranges:
            if any(bounds != (0, size) for bounds, size in zip(part.ranges[1:], shape[1:], strict=True)):
                raise UnsupportedError(f"{fragment.path} holds some columns of {key}", "take --adapter only first")
            start = part.ranges[0][0] * prod(shape[1:])
        if not fragment.row_major:
            raise UnsupportedError(f"{fragment.path} holds {key} with gaps", "take --adapter only first")
        found.append((start, fragment))
    first = pieces[0].fragment
    return Fragment(first.path, 0, first.dtype, shape, row_major(shape), pieces=tuple(found))


def _plan_alone(source: Checkpoint, request: Request) -> Plan:
    """A plan that writes a folder which PeftModel.from_pretrained loads."""
    config = _config(source)
    if config.get("bias") not in (None, "none"):
        raise UnsupportedError(
            f"the adapter in {source.root} was trained with bias = {config['bias']}, and its biases are in the base",
            "--adapter merged has them",
        )
    written = huggingface.write(request.root, source.spec, cast_dtypes(source, request.cast), 1 << 60)
    files = []
    for file in written.files:
        path = file.path.with_name(peft.WEIGHTS)
        placed = (one._replace(fragment=one.fragment._replace(path=path)) for one in file.tensors)
        files.append(replace(file, path=path, tensors=tuple(placed)))
    text = json.dumps({**config, "inference_mode": True}, indent=2, sort_keys=True) + "\n"
    target = Target(tuple(files), {peft.CONFIG: text.encode()}, {})
    return replace(make_plan(source, target, request.cast), again=_read_back)


def _read_back(plan: Plan) -> Plan:
    """A plan that reads what was written, with the reader of adapters."""
    assert plan.target is not None
    root: Path = plan.target.files[0].path.parent
    held = peft.read(root).tensors
    slots = {slot.keys[0]: slot for slot in huggingface.model_slots(plan.spec)}
    placed = tuple(Placed(key, slots[key], fragment) for key, fragment in held.items())
    jobs: tuple[Job, ...] = make_plan(replace(plan.source, tensors=placed, twins=(), spec=plan.spec)).jobs
    return replace(plan, jobs=jobs)
