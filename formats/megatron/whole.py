"""A model of images in Megatron-Bridge, read and written under the names of its Hugging Face files.

Its language model has the tensors and the cut of one alone (`torch_dist.py`), with `language_model.` before each name,
and its tower the tensors of the files. The whole has no table: each physical tensor of Megatron is a number of boxes of
tensors of the files.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from formats.checkpoint import Checkpoint, OutputFile, Settings
from formats.disk.safetensors import Fragment, row_major
from formats.errors import RefusedError, SourceError, UnsupportedError, short
from formats.huggingface import folder as huggingface
from formats.huggingface import text_alone
from formats.layout.composed import boxes_of
from formats.layout.leaves import Leaf
from formats.layout.pieces import Scattered, match_pieces
from formats.layout.placed import Placed, match
from formats.layout.slots import ALONE, ORIGINAL
from formats.megatron.args import providers
from formats.megatron.args.vision import HEAD, PREFIX, VISIONS, Vision
from formats.megatron.chained_optimizer import CHAINED
from formats.model import untabled
from formats.model.spec import ModelSpec, Verbatim
from formats.torch_files import dcp, dcp_writer

OPTIMIZER = re.compile(CHAINED + r"optimizer\..*")
NOWHERE = Path()
WHY = "its tower has none, and the language model has one in Megatron alone"
Shape = tuple[int, ...]
Homes = Mapping[tuple[str, int | None], Sequence[tuple[str, Leaf]]]
"""(tensor of Megatron, layer): each tensor of the files that holds some of it, and where."""
ONLY_TEXT = Settings(only=text_alone.TEXT)


@dataclass(frozen=True)
class Whole:
    """A model of images that is to be written.

    Attributes:
        vision: the class that computes it.
        config: its config.json.
        spec: the tensors of its files.
        text: its language model.
        homes: where the tensors of Megatron are in those of its files.
    """

    vision: Vision
    config: Mapping[str, Any]
    spec: Verbatim
    text: ModelSpec
    homes: Homes

    def fields(self) -> dict[str, Any]:
        """Those of its class beside its language model's."""
        return self.vision.said(self.config)

    def notes(self, accept: Collection[str]) -> tuple[str, ...]:
        """What the user should know. Args and errors are those of `Vision.deviations`."""
        only = f"these files are for Megatron-Bridge's {self.vision.name} alone: megatron-core has no tower"
        deviations = self.vision.deviations(accept, f"Megatron-Bridge's {self.vision.name}")
        return (only, *providers.of_release(self.text), *deviations)

    def padded(self, tp: int, first: int) -> int:
        """The rows of its embedding, which its class does not pad. Args and errors are those of `Vision.require`."""
        self.vision.require(self.text, self.config, tp, first)
        return self.text.vocab or 0

    def dtypes(self, known: Mapping[tuple[str, int | None], str]) -> dict[tuple[str, int | None], str]:
        """The element types of the tensors of Megatron, of those of its files."""
        return {of: known[homes[0][0], None] for of, homes in self.homes.items()}

    def states(self, names: Iterable[str]) -> tuple[str, ...]:
        """The entries without elements that its class asks for, by those of the language model alone."""
        return (*(PREFIX + name for name in names), *self.vision.states)

    def stored(self, ranks: list[list[dcp_writer.Stored]]) -> list[list[dcp_writer.Stored]]:
        """What the ranks hold of the language model, and the first one of the tower."""
        ranks = [[stored._replace(name=PREFIX + stored.name) for stored in each] for each in ranks]
        for key, shape in self.spec.shapes.items():
            placed = _of_tower(self.vision, key, shape)
            if placed is not None:
                ranks[0].append(dcp_writer.whole(placed.slot, placed.key))
        return ranks

    def written(self, files: Iterable[OutputFile]) -> list[OutputFile]:
        """Files whose tensors are boxes of those of the model's files."""
        return [
            replace(file, tensors=tuple(in_files(file.tensors, self.homes, self.spec))) for file in files
        ]  # fmt: skip


def of(spec: Verbatim, config: Mapping[str, Any], where: str) -> Whole:
    """A model of images that Megatron-Bridge is to compute.

    Args:
        spec: the tensors of its files.
        config: its config.json.
        where: what to call its folder in an error.

    Raises:
        UnsupportedError: its language model has no table.
        RefusedError: its tensors have other names than the Hub's, or fused experts may be either way round.
        SourceError: a tensor is missing, or has another shape.
    """
    vision = VISIONS[spec.family]
    fragments = {key: Fragment(NOWHERE, 0, "F32", shape, row_major(shape)) for key, shape in spec.shapes.items()}
    part = text_alone.alone(dict(config), fragments, ONLY_TEXT, where)
    upright = part.of(text_alone.upright(config, fragments, ONLY_TEXT))
    text = huggingface.spec_of(
        {key: fragment.shape for key, fragment in upright.items()}, part.config, Path(where), ONLY_TEXT
    )
    if not isinstance(text, ModelSpec):
        raise UnsupportedError(f"{where}: its language model has no Megatron layout: {text.why}")
    _require_names(vision, spec, part.names, where)
    _require_one_way(vision, text, where)
    placed, _ = match(huggingface.model_slots(text, upright), {ALONE: upright}, (), Path(where))
    homes = _homes(placed, part.names)
    for key, shape in spec.shapes.items():
        tensor = _of_tower(vision, key, shape)
        if tensor is not None:
            homes |= _homes([tensor], {tensor.key: key})
    return Whole(vision, config, spec, text, homes)


def _of_tower(vision: Vision, key: str, shape: Shape) -> Placed | None:
    """A tensor of a tower under its name in Megatron-Bridge, as it is in one of files; None if it is of no tower.

    Args:
        vision: the class.
        key: the name in files.
        shape: the shape there.
    """
    name, steps = vision.in_bridge(key), row_major(shape)
    if name is None:
        return None
    if key in vision.turned:
        shape, steps = shape[::-1], steps[::-1]
    return Placed(name, untabled.slot(name, name, shape, ORIGINAL), Fragment(NOWHERE, 0, "F32", shape, steps))


def _require_names(vision: Vision, spec: Verbatim, names: Mapping[str, str], where: str) -> None:
    """The tensors have the names of the Hub, by which a run is read.

    Raises:
        RefusedError: they have not.
    """
    known = {vision.in_files(key) for key in names} | {key for key in spec.shapes if vision.in_bridge(key) is not None}
    odd = sorted(spec.shapes.keys() - known)
    if odd:
        raise RefusedError(
            f"{where}: {odd[0]} is not a name that files of the Hub have of a {spec.family} ({len(odd)} of its names)",
            "load it with transformers and save it",
        )


def _require_one_way(vision: Vision, text: ModelSpec, where: str) -> None:
    """The shape of fused experts tells which way round they are.

    Raises:
        RefusedError: it does not.
    """
    if vision.kind in untabled.TRANSPOSED and text.hidden in (text.expert_ffn, 2 * (text.expert_ffn or 0)):
        raise RefusedError(f"{where}: experts of {text.expert_ffn} in {text.hidden} may be either way round in files")


def _homes(tensors: Iterable[Placed], names: Mapping[str, str]) -> dict[tuple[str, int | None], list[tuple[str, Leaf]]]:
    """Where the tensors of a table are in files: `names` are those that the whole has them under."""
    homes: dict[tuple[str, int | None], list[tuple[str, Leaf]]] = {}
    for placed in tensors:
        if not placed.slot.replica:
            for leaf in placed.leaves():
                homes.setdefault((leaf.tensor, placed.slot.layer), []).append((names[placed.key], leaf))
    return homes


def in_files(tensors: Iterable[Placed], homes: Homes, spec: Verbatim) -> Iterator[Placed]:
    """Tensors of Megatron as boxes of those of files."""
    for placed in (part for tensor in tensors for part in tensor.each()):
        for leaf in placed.leaves():
            for key, there in homes[leaf.tensor, placed.slot.layer]:
                shape, turned = spec.shapes[key], key in spec.turned
                slot = untabled.slot(placed.key, key, shape, placed.slot.replica, turned=turned)
                for box in boxes_of(leaf, there, shape):
                    yield Placed(placed.key, slot, box.of(placed.fragment), box.part)


# --- reading ---------------------------------------------------------------------------------------------------------


def parted(entries: Iterable[dcp.Entry]) -> tuple[list[dcp.Entry], list[dcp.Entry]]:
    """The tensors of the language model, under the names that they have in one alone, and those of its tower.

    States of an optimizer are among the first, under their own names.
    """
    text, beside = list[dcp.Entry](), list[dcp.Entry]()
    for entry in entries:
        if entry.name.startswith(PREFIX):
            text.append(replace(entry, name=entry.name.removeprefix(PREFIX)))
        else:
            (text if OPTIMIZER.fullmatch(entry.name) else beside).append(entry)
    return text, beside


def text_config(
    vision: Vision,
    fields: Mapping[str, Any],
    config: Mapping[str, Any],
    names: Iterable[str],
    where: str,
    assets: str,
) -> dict[str, Any]:
    """The config of the language model alone.

    Args:
        vision: the class of the whole.
        fields: what its file says of it.
        config: the config.json of the whole.
        names: the tensors of the language model in Megatron.
        where: what to call the file in an error.
        assets: the same of the config.

    Raises:
        SourceError: the config is that of another model.
        RefusedError: file and config contradict each other.
    """
    if config.get("model_type") != vision.kind:
        raise SourceError(
            f"{assets} says model_type = {short(config.get('model_type'))}, and {where} is of a {vision.kind}",
            "give the config of the whole model with --config",
        )
    vision.require_agreement(fields, config, where)
    head = [f"{HEAD}weight"] if "output_layer.weight" in names else []
    return text_alone.alone(dict(config), head, ONLY_TEXT, assets).config


def joined(
    vision: Vision,
    text: Checkpoint,
    tower: Mapping[str, Scattered],
    config: Mapping[str, Any] | None,
    settings: Settings,
) -> Checkpoint:
    """The whole of which a language model was read, under the names of its files; with `only` the language model.

    Args:
        vision: its class.
        text: its language model.
        tower: its other tensors, under the names of Megatron-Bridge.
        config: its config.json, None where there is none.
        settings: what the user said.

    Raises:
        SourceError: a tensor is of no tower, or there is no config.
        UnsupportedError: its tower is that of a later release.
        RefusedError: its class computes something else than transformers.
    """
    if settings.only:
        return replace(text, left=tuple(tower))
    if config is None:
        raise SourceError(
            f"{text.home} is of a {vision.kind}, of which the config of its tower is missing",
            "give the Hugging Face folder that the training began with: --config BASE; or --only text",
        )
    assert isinstance(text.spec, ModelSpec)
    shapes, homes = dict[str, Shape](), dict[tuple[str, int | None], list[tuple[str, Leaf]]]()
    slots = [
        slot
        for slot in huggingface.model_slots(text.spec, memory=vision.kind in untabled.FUSED_ON_HUB)
        if not slot.replica
    ]
    for slot in slots:
        key = vision.in_files(slot.keys[0])
        turned = untabled.hidden_axis(vision.kind, key) is not None
        shape = (slot.shape[0], slot.shape[2], slot.shape[1]) if turned else slot.shape
        first, *rest = row_major(shape)
        strides = (first, rest[1], rest[0]) if turned else row_major(shape)
        shapes[key] = shape
        fragment = Fragment(NOWHERE, 0, "F32", slot.shape, strides)
        for of_tensor, where in _homes([Placed(key, slot, fragment)], {key: key}).items():
            homes.setdefault(of_tensor, []).extend(where)
    placed: list[Placed] = [*text.tensors]
    later = sorted(name for name in tower if name.startswith(vision.later))
    if later:
        raise UnsupportedError(
            f"{text.home} holds {later[0]}: from 0.4.0 on Megatron-Bridge gives a {vision.kind} a tower of "
            "megatron-core's layers, which is not read",
            "export it with its own AutoBridge.export_ckpt, or take --only text",
        )
    odd = sorted(name for name in tower if vision.of_tower(name) is None)
    if odd:
        raise SourceError(f"{text.home} holds {odd[0]}, which is of no part of a {vision.kind}")
    for name, tensor in tower.items():
        key = str(vision.of_tower(name))
        shapes[key] = tensor.shape[::-1] if key in vision.turned else tensor.shape
        there = _of_tower(vision, key, shapes[key])
        assert there is not None
        homes |= _homes([there], {name: key})
        placed += match_pieces([there.slot], {name: tensor}, (), text.home)[1]
    notes = vision.deviations(settings.accept, str(text.home))
    stated = {name: value for name, value in settings.values.items() if name in ("tied", "vocab")}
    spec = untabled.describe(dict(config), shapes, stated | {"vocab": text.spec.vocab}, WHY)
    spec = replace(spec, remarks=(*spec.remarks, *text.spec.notes, *notes))
    return replace(
        text,
        spec=spec,
        tensors=tuple(in_files(placed, homes, spec)),
        config=config,
        padded_vocab=None,
    )
