"""Write the optimizer of a Megatron-DeepSpeed run: DeepSpeed's universal checkpoint, beside the layer files.

    TAG/zero/{module}.{key}/{fp32,exp_avg,exp_avg_sq,step}.pt    tied_modules.embed.{key} of a tied embedding
    TAG/zero/optimizer_state.pt                                  a group with weight decay, and one without
    TAG/mp_rank_{mp:02d}_model_states.pt                         samples, tokens and schedule

A training with `--universal-checkpoint` loads the optimizer in any topology. DeepSpeed pairs parameter groups by their
order; BigScience's tree has two groups with weight decay. Where the source has no schedule of Megatron-DeepSpeed, a
constant rate is written, which `--override-opt_param-scheduler` (BigScience's: `--override-lr-scheduler`) replaces by
the training's. apex' Adam keeps its step in the groups.

Facts: megatron/checkpointing.py, optimizer/__init__.py, optimizer_param_scheduler.py and learning_rates.py of the trees
that `tables.py` names; deepspeed 0.19.8 runtime/base_optimizer.py `load_hp_checkpoint_state_from_checkpoint_dir`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from formats.checkpoint import OutputFile
from formats.deepspeed import universal
from formats.deepspeed.mds.tables import EMBEDDING, FAMILIES, OF_BIGSCIENCE, slots_of
from formats.deepspeed.modules import name_of
from formats.deepspeed.universal import Parameter
from formats.errors import RefusedError, UsageError
from formats.layout.slots import Slot
from formats.megatron.chained_optimizer import decays
from formats.model.spec import ModelSpec
from formats.optimizer import Group

SCHEDULER = "lr_scheduler"
OF_FILE = (SCHEDULER, "tokens")
"""Keys of a model file that record the progress of a training."""
OF_ARGS = ("consumed_train_samples", "consumed_valid_samples", "tokenizer_type")
"""Arguments for the progress of a training; with --vocab-file it compares the type of its tokenizer."""
SAMPLES = OF_ARGS[0]


class Resumed(NamedTuple):
    """The training state with which a training resumes.

    Attributes:
        states: which of `optimizer.STATES` are written.
        groups: the settings of parameters with weight decay, and of those without.
        step: how many updates the optimizer has made.
        progress: the known values of OF_FILE and OF_ARGS, as a run of Megatron-DeepSpeed has them.
    """

    states: Collection[str]
    groups: tuple[Group, Group]
    step: int
    progress: Mapping[str, Any]


def progress_keys(resumed: Resumed, family: str) -> dict[str, Any]:
    """Return the keys of a model file for the progress of a training; an unknown schedule becomes a constant rate."""
    group, samples = resumed.groups[0], resumed.progress.get(SAMPLES) or 0
    progress = {name: resumed.progress[name] for name in OF_FILE if resumed.progress.get(name) is not None}
    progress |= {"global_samples": resumed.progress[SAMPLES]} if SAMPLES in resumed.progress else {}
    return {SCHEDULER: _constant_rate(family, group.lr, group.weight_decay, samples), **progress}


def _constant_rate(family: str, rate: float, decay: float, samples: int) -> dict[str, Any]:
    """Return the state of the schedule of the family's tree, at a constant learning rate."""
    schedule = {"max_lr": rate, "min_lr": 0.0, "num_steps": samples}
    if FAMILIES[family] == OF_BIGSCIENCE:
        return {**schedule, "warmup_steps": 0, "decay_steps": 1, "decay_style": "constant"}
    return {
        **schedule,
        "lr_warmup_steps": 0, "lr_warmup_tokens": None, "lr_decay_steps": 1, "lr_decay_tokens": None,
        "lr_decay_style": "constant", "start_wd": decay, "end_wd": decay, "wd_incr_steps": 0,
        "wd_incr_style": "constant",
    }  # fmt: skip


def fresh_keys(family: str) -> dict[str, Any]:
    """Return the keys of a model file of weights alone, of which BigScience's tree loads the schedule all the same."""
    return {SCHEDULER: _constant_rate(family, 0.0, 0.0, 0)} if FAMILIES[family] == OF_BIGSCIENCE else {}


def skipped(resumed: Resumed, iteration: int) -> int:
    """Return the number of iterations without an update.

    Raises:
        UsageError: there are more updates than iterations.
    """
    if iteration < resumed.step:
        raise UsageError(
            f"--iteration {iteration} is less than the {resumed.step} steps that the optimizer has made",
            "leave it out, or leave --with-optimizer out",
        )
    return iteration - resumed.step


def files(home: Path, spec: ModelSpec, qkv: str, resumed: Resumed) -> list[OutputFile]:
    """Lay out the files of every parameter, one for each optimizer state."""
    parameters = [parameter for group in _grouped(spec, qkv, resumed) for parameter in group]
    return [
        replace(file, tensors=(), states={state: file.tensors})
        for state in resumed.states
        for file in universal.files(home, parameters, state)
    ]


def texts(spec: ModelSpec, qkv: str, resumed: Resumed) -> dict[str, bytes]:
    """Return the content of the small files of the optimizer, by path relative to the tag."""
    groups = _grouped(spec, qkv, resumed)
    treated = (*[resumed.groups[0]] * (len(groups) - 1), resumed.groups[1])
    settings = [
        {**group._asdict(), "amsgrad": False, "step": resumed.step, "params": [number]}
        for number, group in enumerate(treated)
    ]
    return universal.steps_and_groups([parameter for group in groups for parameter in group], settings)


def shapes(spec: ModelSpec, qkv: str, resumed: Resumed) -> list[dict[str, tuple[int, ...]]]:
    """Return the unsharded shapes of the parameters of each group, for `param_shapes` of a model file."""
    return [{parameter.name: parameter.slot.shape for parameter in group} for group in _grouped(spec, qkv, resumed)]


def _grouped(spec: ModelSpec, qkv: str, resumed: Resumed) -> list[list[Parameter]]:
    """Return the parameters of each group, in the tree's order of groups."""
    sides: dict[bool, list[Parameter]] = {True: [], False: []}
    for slot in whole_slots(spec, qkv, FAMILIES[spec.family]):
        name = name_of(slot.keys[0], EMBEDDING, tied=spec.tied)
        sides[decays(name, slot.shape)].append(Parameter(name, slot, universal.cut_of(slot), resumed.step))
    half = len(sides[True]) // 2 if FAMILIES[spec.family] == OF_BIGSCIENCE else 0
    return [*([sides[True][:half]] if half else []), sides[True][half:], sides[False]]


def whole_slots(spec: ModelSpec, qkv: str, first: int) -> Iterator[Slot]:
    """Return every parameter, unsharded and without vocabulary padding."""
    return slots_of(spec, 1, spec.vocab or 0, {qkv}, first)


def require_padding(spec: ModelSpec, padded: int, tp: int) -> None:
    """Refuse a vocabulary with as many rows as each rank's padded shard, which the loader cannot tell apart.

    Raises:
        RefusedError: the numbers are equal: the loader would give each rank all rows (universal_checkpoint.py:277).
    """
    if tp > 1 and spec.vocab == padded // tp:
        raise RefusedError(
            f"each of {tp} tensor parallel ranks has {padded // tp} rows of the vocabulary, with its padding, and the "
            f"model has {spec.vocab} tokens: DeepSpeed would take these for the rows of each rank",
            "another --make-vocab-size-divisible-by",
        )
