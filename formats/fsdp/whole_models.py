"""Models of images under torchtitan's own names: the language model by a table, its vision tower tensor by tensor.

    tok_embeddings.weight, layers.*, norm.weight, lm_head.weight    the language model, without a prefix
    vision_encoder.*                                                the tower, whose query, key and value are apart

The whole is read and written under the names of its Hugging Face files (`huggingface/whole_model.py`).

Facts: torchtitan 0.3.0 (PyPI), models/qwen3_5 (state_dict_adapter.py, model.py, vision_encoder.py) and
models/common/vision_encoder.py; pytorch/torchtitan at b5bcd76c has the same names. Checkpoints that 0.3.0 saved, and
its logits, are in tests/golden/torchtitan_images.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from formats.checkpoint import Checkpoint, OutputFile, Settings
from formats.errors import RefusedError, SourceError, short
from formats.families import qwen3_5_moe_text, qwen3_5_text
from formats.fsdp.native import TORCHTITAN
from formats.huggingface import folder as huggingface
from formats.huggingface import language_model
from formats.huggingface.whole_model import (
    ONLY_TEXT,
    Locations,
    Shape,
    described,
    dtypes_of,
    file_parts,
    in_files,
    locations,
    nowhere,
    renamed,
    require_settings_of,
    text_of,
)
from formats.layout.pattern import Axis, Pattern, Product, Sum, Term
from formats.layout.pattern import text_of as text_of_term
from formats.layout.pieces import Scattered, match_pieces
from formats.layout.placed import Placed
from formats.layout.slots import ALONE, DIM, ORIGINAL, Slot
from formats.layout.table import Rule, rules
from formats.model.accepted import MERGER, Deviation
from formats.model.spec import ModelSpec, Verbatim
from formats.model.values import positive_int

TOWER = "vision_encoder."
VISUAL = "model.visual."
HEAD = "lm_head.weight"
CONFIG = "vision_config"
WHY = "its tower has none, and the language model has one under torchtitan's names alone"


class Row(NamedTuple):
    """Tensors of a tower: what they are called, and how those of Hugging Face files are cut.

    Attributes:
        key: prefix of the names in Hugging Face files, with `{layer}` for the number of a layer.
        names: prefixes of the names in torchtitan, of tensors whose rows follow one another in the files.
        columns: keys of the tower's config, with their defaults, whose sizes are the dimensions of the files into which
            the columns are split; empty if these are one dimension.
    """

    key: str
    names: tuple[str, ...]
    columns: tuple[tuple[str, int], ...] = ()

    def names_of(self, key: str) -> tuple[str, ...]:
        """The names in torchtitan of a tensor of the files; empty if it is none of these."""
        names = (renamed(key, [(self.key, name)]) for name in self.names)
        return tuple(name for name in names if name is not None)

    def key_of(self, name: str) -> str | None:
        """The name in the files of a tensor of torchtitan; None if it is none of these."""
        return renamed(name, ((own, self.key) for own in self.names))

    def shape_of(self, shape: Shape, tower: Mapping[str, Any]) -> Shape:
        """The shape in the files, of that of one of the tensors in torchtitan and the tower's config.

        Raises:
            SourceError: the tensor has no rows, or its columns are not those of the config.
        """
        if not shape:
            raise SourceError(f"a tensor of {TOWER} that is a number")
        rows, columns = shape[0] * len(self.names), shape[1:]
        if not self.columns:
            return (rows, *columns)
        split = tuple(
            positive_int(tower.get(key, usual), f"{CONFIG}.{key}", "config.json") for key, usual in self.columns
        )
        if columns != (prod(split),):
            raise SourceError(f"{self.names[0]} has the columns {list(columns)}, and the config implies {list(split)}")
        return (rows, *split)

    def slots(self, key: str, shape: Shape) -> tuple[Slot, list[Slot]]:
        """A tensor of the files, and the tensors of torchtitan that have its rows.

        Raises:
            SourceError: its rows do not divide.
        """
        names = self.names_of(key)
        if not shape or shape[0] % len(names):
            raise SourceError(f"{key} has the shape {list(shape)}, whose rows are not those of {', '.join(names)}")
        sizes = (shape[0] // len(names), *shape[1:])
        axes = tuple(Axis(f"{DIM}{i}") for i in range(len(shape)))
        known = tuple(zip((axis.name for axis in axes), sizes, strict=True))
        stacked = Sum(tuple((name, Product(axes[:1])) for name in names))
        there = _slot(key, None, (stacked, *axes[1:]), shape, known)
        flat = (Product(axes[1:]),) if axes[1:] else ()
        inner = (sizes[0], *((prod(sizes[1:]),) if axes[1:] else ()))
        return there, [_slot(name, name, (axes[0], *flat), inner, known) for name in names]


def _slot(
    key: str, label: str | None, dims: tuple[Term, ...], shape: Shape, sizes: tuple[tuple[str, int], ...]
) -> Slot:
    pattern = Pattern(f"{key}: {' '.join(map(text_of_term, dims))}", label, dims)
    return Slot(ALONE, (key,), shape, Rule(key, pattern, frozenset()), (), sizes, None, ORIGINAL)


PATCH = (("in_channels", 3), ("temporal_patch_size", 2), ("patch_size", 16), ("patch_size", 16))
"""The dimensions of a patch, in the files; torchtitan multiplies it by a matrix, transformers convolves it."""
ROWS = (
    Row(f"{VISUAL}patch_embed.proj.weight", (f"{TOWER}patch_embed.weight",), PATCH),
    Row(f"{VISUAL}patch_embed.proj.", (f"{TOWER}patch_embed.",)),
    Row(f"{VISUAL}pos_embed.weight", (f"{TOWER}pos_embed",)),
    Row(
        f"{VISUAL}blocks.{{layer}}.attn.qkv.",
        tuple(f"{TOWER}layers.{{layer}}.attn.{part}." for part in ("wq", "wk", "wv")),
    ),
    Row(f"{VISUAL}blocks.", (f"{TOWER}layers.",)),
    Row(f"{VISUAL}merger.", (f"{TOWER}merger.",)),
)
"""The tower of Qwen3.5. The first row that fits a name counts."""
TEXT = {"model.": "model.language_model.", "lm_head.": "lm_head."}
"""Prefix of a name in files of the language model alone: prefix in files of the whole."""
FIXED = {"hidden_act": "gelu_pytorch_tanh", "deepstack_visual_indexes": []}
"""Key of the tower's config: the only value that torchtitan computes."""
GELU = Deviation(
    MERGER,
    "in torchtitan the merger behind the tower has the gelu that tanh approximates, in transformers the exact one",
    "which changes little, or for a training of text",
)


WHOLES: Mapping[str, Mapping[str, str]] = {
    TORCHTITAN: {"qwen3_5": qwen3_5_text.TORCHTITAN, "qwen3_5_moe": qwen3_5_moe_text.TORCHTITAN},
}
"""Trainer: the layout of the language model in each of its models of images, by `model_type`."""


@cache
def tables(trainer: str) -> dict[str, tuple[Rule, ...]]:
    """The layout of the language model in each model of images that a trainer has, by `model_type`."""
    return {kind: rules(text) for kind, text in WHOLES.get(trainer, {}).items()}


@dataclass(frozen=True)
class Whole:
    """A model of images that is read under a trainer's names.

    Attributes:
        config: its config.json.
        text: the config of its language model alone.
        table: the layout of its language model.
        tower: the config of its tower.
    """

    config: dict[str, Any]
    text: dict[str, Any]
    table: tuple[Rule, ...]
    tower: Mapping[str, Any]


def tower_in(tensors: dict[str, Scattered], trainer: str | None) -> dict[str, Scattered]:
    """Take the tensors of a tower out of those of a trainer's model; nothing if it has none."""
    names = [name for name in tensors if name.startswith(TOWER)] if trainer in WHOLES else []
    return {name: tensors.pop(name) for name in names}


def whole_of(config: dict[str, Any], names: Collection[str], trainer: str, where: str) -> Whole:
    """The model of images that a config.json describes; `names` are those of the language model's tensors.

    Raises:
        SourceError: the trainer has no such model.
        RefusedError: the trainer computes another tower.
    """
    table = _table_of(config, trainer, where)
    head = [HEAD] if HEAD in names else []
    text = language_model.select(config, head, ONLY_TEXT, where).config
    return Whole(config, text, table, _tower_of(config, trainer, where))


def _table_of(config: Mapping[str, Any], trainer: str, where: str) -> tuple[Rule, ...]:
    """The layout of the language model. Raises `SourceError` where the trainer has no such model of images."""
    kind, known = config.get("model_type"), tables(trainer)
    if kind not in known:
        raise SourceError(
            f"{where} says model_type = {short(kind)}, and {trainer} has no such model of images",
            f"give the config of the whole model with --config: {trainer} has {', '.join(known)}",
        )
    return known[kind]


def _tower_of(config: Mapping[str, Any], trainer: str, where: str) -> Mapping[str, Any]:
    """The config of the tower.

    Raises:
        SourceError: it is no dictionary.
        RefusedError: the trainer computes another tower.
    """
    tower = config.get(CONFIG) or {}
    if not isinstance(tower, dict):
        raise SourceError(f"{where}: {CONFIG} = {short(tower)} is no config of a tower")
    for key, only in FIXED.items():
        if tower.get(key, only) != only:
            raise RefusedError(
                f"{where}: {CONFIG}.{key} = {short(tower[key])}, and {trainer} computes its tower with {short(only)}"
            )
    return tower


def join(whole: Whole, text: Checkpoint, tower: Mapping[str, Scattered], settings: Settings) -> Checkpoint:
    """Join a language model with its tower, under the names of Hugging Face files; with `settings.only` without.

    Args:
        whole: the model.
        text: the checkpoint of the language model.
        tower: the tensors of the tower, under the names of torchtitan.
        settings: the settings that the user passed.

    Raises:
        SourceError: a part of a query, key and value is missing, or a tensor is of no tower, or has another shape.
        RefusedError: torchtitan deviates from transformers, which the user has not accepted, or the user sets what the
            config does not say.
    """
    if settings.only:
        return replace(text, left=tuple(tower))
    assert isinstance(text.spec, ModelSpec)
    place = str((text.assets or text.home) / huggingface.CONFIG)
    require_settings_of(whole.config, place, text, settings)
    shapes, homes = in_files(text.spec, whole.config["model_type"], lambda key: str(renamed(key, TEXT.items())))
    slots = list[Slot]()
    for key, (row, shape) in _of_files(tower, whole.tower, text.home).items():
        shapes[key] = shape
        there, here = row.slots(key, shape)
        homes |= locations([Placed(key, there, nowhere(shape))], {key: key})
        slots += here
    pieces = match_pieces(slots, tower, (), text.home)[1]
    notes = GELU.notes(settings.accept, str(text.home))
    spec = described(whole.config, shapes, text.spec, settings, WHY)
    spec = replace(spec, remarks=(*spec.remarks, *text.spec.notes, *notes))
    tensors = tuple(file_parts((*text.tensors, *pieces), homes, spec))
    return replace(text, spec=spec, tensors=tensors, config=whole.config)


def _of_files(tower: Mapping[str, Scattered], config: Mapping[str, Any], where: Path) -> dict[str, tuple[Row, Shape]]:
    """The row and the shape of each tensor that Hugging Face files have of a tower."""
    known = dict[str, tuple[Row, Shape]]()
    for name, tensor in tower.items():
        row, key = next(((row, key) for row in ROWS if (key := row.key_of(name)) is not None), (None, ""))
        if row is None:
            raise SourceError(f"{where} holds {name}, which is of no part of a tower")
        known.setdefault(key, (row, row.shape_of(tensor.shape, config)))
    return known


# --- writing ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Written:
    """A model of images that is to be written under torchtitan's names.

    Attributes:
        spec: the tensors of the Hugging Face files.
        slots: the tensors of torchtitan.
        locations: where their logical tensors are in the Hugging Face files.
    """

    spec: Verbatim
    slots: tuple[Slot, ...]
    locations: Locations

    def dtypes(self, known: Mapping[tuple[str, int | None], str]) -> dict[tuple[str, int | None], str]:
        """The dtype of each logical tensor, from the dtypes of the Hugging Face tensors (`known`)."""
        return dtypes_of(self.locations, known)

    def files(self, files: Collection[OutputFile]) -> Iterator[OutputFile]:
        """Output files whose tensors are described as boxes of tensors of the Hugging Face files."""
        for file in files:
            yield replace(file, tensors=tuple(file_parts(file.tensors, self.locations, self.spec)))


def describe(spec: Verbatim, config: Mapping[str, Any], where: str, trainer: str) -> Written:
    """Describe a model of images that is to be written under a trainer's names.

    Args:
        spec: the tensors of the Hugging Face files.
        config: the config.json of the model.
        where: the name of the folder in an error.
        trainer: the trainer.

    Raises:
        SourceError: a tensor is missing, has another shape, or is of no part of the model.
        RefusedError: the trainer computes another tower, or has no place for a tensor of the language model.
    """
    table = _table_of(config, trainer, where)
    _tower_of(config, trainer, where)
    text, names, homes = text_of(spec, config, where, trainer)
    slots = text.slots_in(table, text.sizes())
    placed = {(tensor, slot.layer) for slot in slots for tensor in slot.rule.pattern.tensors}
    lost = [there[0][0] for of, there in homes.items() if of not in placed]
    if lost:
        raise RefusedError(
            f"{where}: {trainer} has no place for {lost[0]} in a {spec.family}",
            "--drop mtp leaves out the layer that predicts a second token",
        )
    for key, shape in spec.shapes.items():
        if key in names.values():
            continue
        row = next((row for row in ROWS if row.names_of(key)), None)
        if row is None:
            raise SourceError(f"{where}: {key} is of no part of a {spec.family}")
        there, here = row.slots(key, shape)
        homes |= locations([Placed(key, there, nowhere(shape))], {key: key})
        slots += here
    return Written(spec, tuple(slots), homes)
