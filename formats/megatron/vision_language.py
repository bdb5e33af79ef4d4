"""Vision-language models of Megatron-Bridge, read and written under the tensor names of their Hugging Face files.

The language model has the tensors and the sharding of a language model alone (`torch_dist.py`), with `language_model.`
before each name; the vision tower has the tensors of the Hugging Face files. The whole model has no layout table: each
physical tensor of Megatron is described as boxes of tensors of the Hugging Face files.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from formats.checkpoint import Checkpoint, OutputFile, Settings
from formats.disk.safetensors import Fragment, row_major
from formats.errors import RefusedError, SourceError, short
from formats.huggingface import folder as huggingface
from formats.huggingface import language_model
from formats.huggingface.whole_model import (
    NOWHERE,
    ONLY_TEXT,
    Locations,
    Shape,
    described,
    dtypes_of,
    file_parts,
    in_files,
    locations,
    require_settings_of,
    text_of,
)
from formats.layout.pieces import Scattered, match_pieces
from formats.layout.placed import Placed
from formats.layout.slots import ORIGINAL, Slot
from formats.megatron.args import visions, whole_config
from formats.megatron.args.vision import HEAD, PREFIX, TEXT, Vision
from formats.megatron.chained_optimizer import CHAINED
from formats.model import untabled
from formats.model.spec import ModelSpec, Verbatim
from formats.torch_files import dcp, dcp_writer

OPTIMIZER = re.compile(CHAINED + r"optimizer\..*")
WHY = "its tower has none, and the language model has one in Megatron alone"


@dataclass(frozen=True)
class VisionLanguageModel:
    """A vision-language model that is to be written for Megatron-Bridge.

    Attributes:
        vision: the class of Megatron-Bridge that computes the model.
        config: the config.json of the model.
        spec: the tensors of the Hugging Face files.
        text: the spec of the language model.
        locations: where the logical tensors of the language model and the tower are in the Hugging Face files.
    """

    vision: Vision
    config: Mapping[str, Any]
    spec: Verbatim
    text: ModelSpec
    locations: Locations

    def fields(self) -> dict[str, Any]:
        """Return the fields of run_config.yaml that the class adds to those of the language model."""
        return self.vision.said(self.config)

    def notes(self, accept: Collection[str]) -> tuple[str, ...]:
        """Return the notes for the user. Args and errors are those of `Vision.deviations`."""
        only = f"these files are for Megatron-Bridge's {self.vision.name} alone: megatron-core has no tower"
        deviations = self.vision.deviations(accept, f"Megatron-Bridge's {self.vision.name}")
        releases = (f"they are for its {self.vision.releases}",) if self.vision.releases else ()
        return (only, *releases, *deviations)

    def padded(self, tp: int, first: int) -> int:
        """Return the rows of the embedding, which has no padding. Args and errors are those of `Vision.require`."""
        self.vision.require(self.text, self.config, tp, first)
        return self.text.vocab or 0

    def dtypes(self, known: Mapping[tuple[str, int | None], str]) -> dict[tuple[str, int | None], str]:
        """Return the dtype of each logical tensor, from the dtypes of the Hugging Face tensors (`known`)."""
        return dtypes_of(self.locations, known)

    def states(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the `_extra_state` entries that a load requires; `names` are those of the language model alone."""
        layers = self.vision.layers
        own = layers.states(self.vision.tower(self.config)) if layers else ()
        return (*(PREFIX + name for name in names), *self.vision.states, *own)

    def stored(self, ranks: list[list[dcp_writer.SlotPart]]) -> list[list[dcp_writer.SlotPart]]:
        """Return the tensors on each rank: `ranks` of the language model, with the tower added to the first rank."""
        ranks = [[stored._replace(name=PREFIX + stored.name) for stored in each] for each in ranks]
        for key, shape in self.spec.shapes.items():
            tensor = _of_tower(self.vision, self.config, key, shape)
            if tensor is not None:
                ranks[0].append(self._stacked(dcp_writer.whole_slot(tensor[1], tensor[0].key)))
        return ranks

    def _stacked(self, stored: dcp_writer.SlotPart) -> dcp_writer.SlotPart:
        """A tensor of the tower as a part of its stack, if it is of a layer of a tower that is stacked."""
        layers = self.vision.layers
        stack = layers.stacked(stored.name, self.vision.tower(self.config)) if layers else None
        if stack is None:
            return stored
        name, number, count = stack
        return stored._replace(name=name, shape=(count, *stored.shape), box=((number, number + 1), *stored.box))

    def written(self, files: Iterable[OutputFile]) -> list[OutputFile]:
        """Return output files whose tensors are described as boxes of tensors of the Hugging Face files."""
        return [
            replace(file, tensors=tuple(file_parts(file.tensors, self.locations, self.spec))) for file in files
        ]  # fmt: skip


def describe(spec: Verbatim, config: Mapping[str, Any], where: str, version: str | None) -> VisionLanguageModel:
    """Describe a Hugging Face vision-language model for writing it for Megatron-Bridge.

    Args:
        spec: the tensors of the Hugging Face files.
        config: the config.json of the model.
        where: the name of the folder in an error.
        version: the megatron-core with which Megatron-Bridge runs; None for that of the newest release.

    Raises:
        UnsupportedError: the language model has no layout table.
        RefusedError: no release with this megatron-core has the class, tensors have other names than on the Hub, or the
            shape of fused experts leaves their orientation open.
        SourceError: a tensor is missing, or has another shape.
    """
    vision = visions.of_kind(spec.family, version)
    text, names, homes = text_of(spec, config, where, "Megatron")
    _require_names(vision, spec, names, where)
    _require_one_way(vision, text, where)
    for key, shape in spec.shapes.items():
        tensor = _of_tower(vision, config, key, shape)
        if tensor is not None:
            homes |= locations([tensor[0]], {tensor[0].key: key})
    return VisionLanguageModel(vision, config, spec, text, homes)


def _of_tower(vision: Vision, config: Mapping[str, Any], key: str, shape: Shape) -> tuple[Placed, Slot] | None:
    """Return a tensor of a vision tower under its name in Megatron-Bridge; None if the tensor is of no tower.

    Args:
        vision: the class of Megatron-Bridge.
        config: the config.json of the model.
        key: the name in the Hugging Face files.
        shape: the shape in the Hugging Face files.

    Returns:
        The tensor in the Hugging Face files, with its strides there, and the tensor in Megatron-Bridge.

    Raises:
        SourceError: the rows of query, key and value are not those of the tower's heads.
    """
    name, steps = vision.in_bridge(key), row_major(shape)
    if name is None:
        return None
    if key in vision.transposed:
        shape, steps = shape[::-1], steps[::-1]
    here = there = untabled.slot(name, name, shape, ORIGINAL)
    if vision.layers:
        here, there = vision.layers.slots(name, key, shape, vision.tower(config)) or (here, there)
    return Placed(name, there, Fragment(NOWHERE, 0, "F32", shape, steps)), here


def _require_names(vision: Vision, spec: Verbatim, names: Mapping[str, str], where: str) -> None:
    """Refuse tensors with other names than those of files on the Hub, under which a Megatron run is read back.

    Raises:
        RefusedError: a tensor has another name.
    """
    known = {vision.in_files(key) for key in names} | {key for key in spec.shapes if vision.in_bridge(key) is not None}
    odd = sorted(spec.shapes.keys() - known)
    if odd:
        raise RefusedError(
            f"{where}: {odd[0]} is not a name that files of the Hub have of a {spec.family} ({len(odd)} of its names)",
            "load it with transformers and save it",
        )


def _require_one_way(vision: Vision, text: ModelSpec, where: str) -> None:
    """Refuse fused experts of a shape that does not tell whether their matrices are transposed.

    Raises:
        RefusedError: both orientations have the same shape.
    """
    if vision.kind in untabled.TRANSPOSED and text.hidden in (text.expert_ffn, 2 * (text.expert_ffn or 0)):
        raise RefusedError(f"{where}: experts of {text.expert_ffn} in {text.hidden} may be either way round in files")


# --- reading ---------------------------------------------------------------------------------------------------------


def split_entries(entries: Iterable[dcp.Entry]) -> tuple[list[dcp.Entry], list[dcp.Entry]]:
    """Split entries into those of the language model, without `PREFIX`, and those of the vision tower.

    Optimizer states are among the first, under their own names.
    """
    text, beside = list[dcp.Entry](), list[dcp.Entry]()
    for entry in entries:
        if entry.name.startswith(PREFIX):
            text.append(replace(entry, name=entry.name.removeprefix(PREFIX)))
        else:
            (text if OPTIMIZER.fullmatch(entry.name) else beside).append(entry)
    return text, beside


def config_place(vision: Vision, assets: Path | None, run_config: Path) -> str:
    """What to call the config of a model in an error: its config.json, or the key of run_config.yaml that holds it."""
    return str(assets / huggingface.CONFIG) if assets else f"{run_config}: model.{vision.whole or TEXT}"


def text_config(
    vision: Vision,
    fields: Mapping[str, Any],
    config: Mapping[str, Any],
    names: Iterable[str],
    where: str,
    place: str,
) -> dict[str, Any]:
    """Return the config of the language model alone.

    Args:
        vision: the class of the whole model.
        fields: the model's fields in run_config.yaml.
        config: the config.json of the whole model.
        names: the names of the language model's tensors in Megatron.
        where: the name of run_config.yaml in an error.
        place: what to call the config in an error (`config_place`).

    Raises:
        SourceError: the config is of another type of model.
        RefusedError: run_config.yaml and config.json contradict each other.
    """
    if config.get("model_type") != vision.kind:
        raise SourceError(
            f"{place} says model_type = {short(config.get('model_type'))}, and {where} is of a {vision.kind}",
            "give the config of the whole model with --config",
        )
    vision.require_agreement(fields, config, where)
    head = [f"{HEAD}weight"] if "output_layer.weight" in names else []
    return language_model.select(dict(config), head, ONLY_TEXT, place).config


def join(
    vision: Vision,
    fields: Mapping[str, Any],
    text: Checkpoint,
    tower: Mapping[str, Scattered],
    config: Mapping[str, Any] | None,
    place: str,
    settings: Settings,
) -> Checkpoint:
    """Join a language model with its vision tower, under the names of Hugging Face files; with `settings.only` without.

    Args:
        vision: the class of the whole model.
        fields: the model's fields in run_config.yaml.
        text: the checkpoint of the language model.
        tower: the other tensors, under the names of Megatron-Bridge.
        config: the config.json of the whole model; None where there is none.
        place: what to call the config in an error (`config_place`).
        settings: the settings that the user passed.

    Raises:
        SourceError: a tensor is of no part of the model, or there is no config.
        RefusedError: the class deviates from transformers, which the user has not accepted, or it computes no such
            model, or the user sets what the config does not say.
    """
    if settings.only:
        return replace(text, left=tuple(tower))
    if config is None:
        began = fields.get(whole_config.MODEL_ID)
        raise SourceError(
            f"{text.home} is of a {vision.kind}, of which the config of its tower is missing",
            f"give the Hugging Face folder that the training began with: --config {began or 'BASE'}; or --only text",
        )
    assert isinstance(text.spec, ModelSpec)
    require_settings_of(config, place, text, settings)
    vision.require_limit(text.spec, config)
    shapes, homes = in_files(text.spec, vision.kind, vision.in_files)
    placed: list[Placed] = [*text.tensors]
    tower = vision.layers.apart(tower) if vision.layers else tower
    odd = sorted(name for name in tower if vision.of_tower(name) is None)
    if odd:
        raise SourceError(f"{text.home} holds {odd[0]}, which is of no part of a {vision.kind}")
    for name, tensor in tower.items():
        key = str(vision.of_tower(name))
        shapes[key] = tensor.shape[::-1] if key in vision.transposed else tensor.shape
        placement = _of_tower(vision, config, key, shapes[key])
        assert placement is not None
        there, here = placement
        homes |= locations([there], {name: key})
        placed += match_pieces([here], {name: tensor}, (), text.home)[1]
    notes = vision.deviations(settings.accept, str(text.home))
    spec = described(config, shapes, text.spec, settings, WHY)
    made = () if text.assets else ("its config.json is made of the configs in run_config.yaml",)
    spec = replace(spec, remarks=(*spec.remarks, *made, *text.spec.notes, *notes))
    return replace(
        text,
        spec=spec,
        tensors=tuple(file_parts(placed, homes, spec)),
        config=config,
        padded_vocab=None,
    )
