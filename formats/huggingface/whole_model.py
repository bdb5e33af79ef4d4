"""A multimodal model whose trainer has a table of its language model: the parts of both as boxes of tensors in files.

The whole model has no layout table: each physical tensor of a trainer is described as boxes of the tensors that the
Hugging Face files have. Megatron-Bridge's models of images and torchtitan's are read and written this way.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from formats.checkpoint import Checkpoint, Settings
from formats.disk.safetensors import Fragment, row_major
from formats.errors import RefusedError, UnsupportedError
from formats.huggingface import folder as huggingface
from formats.huggingface import language_model
from formats.layout.composed import boxes_of
from formats.layout.leaves import Leaf
from formats.layout.placed import Placed, match
from formats.layout.slots import ALONE
from formats.layout.table import CENTRED, Rule
from formats.model import untabled
from formats.model.spec import ModelSpec, Verbatim, differences

LAYER = "{layer}"
NOWHERE = Path()
STATED = {"tied", "vocab"}
"""Settings with which the user may overrule the config of a whole model."""
ONLY_TEXT = Settings(only=language_model.TEXT)
Shape = tuple[int, ...]
Locations = dict[tuple[str, int | None], list[tuple[str, Leaf]]]
"""(logical tensor, layer): the tensors of the Hugging Face files that hold parts of it, each with its leaf."""


class Text(NamedTuple):
    """The language model of a multimodal model.

    Attributes:
        spec: the spec of the language model alone.
        names: name of each of its tensors in a language model alone: its name in the files of the whole.
        locations: where its logical tensors are in the files of the whole.
    """

    spec: ModelSpec
    names: Mapping[str, str]
    locations: Locations


def text_of(spec: Verbatim, config: Mapping[str, Any], where: str, layout: str) -> Text:
    """The language model of a multimodal model that files of the Hub hold.

    Args:
        spec: the tensors of the files.
        config: the config.json of the whole model.
        where: the name of the folder in an error.
        layout: the name of the layout that the language model is to have, for an error.

    Raises:
        UnsupportedError: the language model has no layout table.
        SourceError: a tensor of it is missing, or has another shape.
    """
    fragments = {key: nowhere(shape) for key, shape in spec.shapes.items()}
    part = language_model.select(dict(config), fragments, ONLY_TEXT, where)
    upright = part.of(language_model.with_transposed_experts(config, fragments, ONLY_TEXT))
    text = huggingface.spec_of(
        {key: fragment.shape for key, fragment in upright.items()}, part.config, Path(where), ONLY_TEXT
    )
    if not isinstance(text, ModelSpec):
        raise UnsupportedError(f"{where}: its language model has no {layout} layout: {text.why}")
    placed, _ = match(huggingface.model_slots(text, upright), {ALONE: upright}, (), Path(where))
    return Text(text, part.names, locations(placed, part.names))


def in_files(text: ModelSpec, kind: str, name_of: Callable[[str], str]) -> tuple[dict[str, Shape], Locations]:
    """The shapes of a language model's tensors in the files of the whole model, and where its logical tensors are.

    Args:
        text: the spec of the language model alone.
        kind: the `model_type` of the whole model.
        name_of: gives the name in files of the whole, of the name in a language model alone.
    """
    shapes, homes = dict[str, Shape](), Locations()
    for slot in huggingface.model_slots(text, memory=kind in untabled.FUSED_ON_HUB):
        if slot.replica:
            continue
        key = name_of(slot.keys[0])
        turned = untabled.hidden_axis(kind, key) is not None
        shape = (slot.shape[0], slot.shape[2], slot.shape[1]) if turned else slot.shape
        first, *rest = row_major(shape)
        strides = (first, rest[1], rest[0]) if turned else row_major(shape)
        shapes[key] = shape
        placed = Placed(key, slot, nowhere(slot.shape)._replace(strides=strides))
        for of_tensor, there in locations([placed], {key: key}).items():
            homes.setdefault(of_tensor, []).extend(there)
    return shapes, homes


def described(
    config: Mapping[str, Any], shapes: Mapping[str, Shape], text: ModelSpec, settings: Settings, why: str
) -> Verbatim:
    """The spec of a whole model, with the vocabulary of its language model.

    Args:
        config: the config.json of the whole model.
        shapes: the shapes of its tensors in files.
        text: the spec of the language model.
        settings: the settings that the user passed.
        why: why no table describes the whole.
    """
    stated = {name: value for name, value in settings.values.items() if name in STATED}
    return untabled.describe(dict(config), shapes, stated | {"vocab": text.vocab}, why)


def require_settings_of(config: Mapping[str, Any], place: str, text: Checkpoint, settings: Settings) -> None:
    """Refuse settings of the user that are not those of the whole model's config, which is carried as it is.

    Args:
        config: the config.json of the whole model.
        place: what to call the config in an error.
        text: the checkpoint of the language model, with its config.
        settings: the user's settings.

    Raises:
        RefusedError: a setting has another value in the config.
    """
    named = settings.values.keys() - STATED
    if not named:
        return
    assert text.config is not None
    plain = replace(settings, values={name: settings.values[name] for name in settings.values.keys() & STATED})
    said = huggingface.spec_at(text.config, place, plain)
    idle = [line for line in differences(text.spec, said) if line.partition(":")[0] in named]
    if idle:
        raise RefusedError(
            f"the config of a {config['model_type']} is carried as it is, and --set contradicts it (set | config): "
            f"{'; '.join(idle)}",
            "correct config.json in the folder that --config names",
        )


def nowhere(shape: Shape) -> Fragment:
    """A fragment that stands for a row-major tensor, in no file."""
    return Fragment(NOWHERE, 0, "F32", shape, row_major(shape))


def locations(tensors: Iterable[Placed], names: Mapping[str, str]) -> Locations:
    """Return where logical tensors are in Hugging Face files; `names` maps keys of `tensors` to names in the files."""
    homes = Locations()
    for placed in tensors:
        if not placed.slot.replica:
            for leaf in placed.leaves():
                homes.setdefault((leaf.tensor, placed.slot.layer), []).append((names[placed.key], leaf))
    return homes


def file_parts(
    tensors: Iterable[Placed], homes: Mapping[tuple[str, int | None], Sequence[tuple[str, Leaf]]], spec: Verbatim
) -> Iterator[Placed]:
    """Yield the parts of a trainer's tensors, each as a box of a tensor of the Hugging Face files."""
    for placed in (part for tensor in tensors for part in tensor.each()):
        for leaf in placed.leaves():
            for key, there in homes[leaf.tensor, placed.slot.layer]:
                shape, transposed = spec.shapes[key], key in spec.transposed
                slot = untabled.slot(placed.key, key, shape, placed.slot.replica, transposed=transposed)
                slot = slot._replace(rule=_marked(slot.rule, placed.slot.rule))
                for box in boxes_of(leaf, there, shape):
                    yield Placed(placed.key, slot, box.of(placed.fragment), box.part)


def _marked(rule: Rule, source: Rule) -> Rule:
    """A rule whose tensor is stored minus 1 where that of `source` is."""
    return replace(rule, conditions=rule.conditions | (source.conditions & {CENTRED}))


def dtypes_of(homes: Locations, known: Mapping[tuple[str, int | None], str]) -> dict[tuple[str, int | None], str]:
    """The dtype of each logical tensor, from the dtypes of the Hugging Face tensors (`known`)."""
    return {of: known[there[0][0], None] for of, there in homes.items()}


def prefix_of(template: str) -> re.Pattern[str]:
    """The pattern of names that begin with a prefix, of whatever layer."""
    return re.compile(re.escape(template).replace(re.escape(LAYER), r"(?P<layer>\d+)"))


def renamed(name: str, prefixes: Iterable[tuple[str, str]]) -> str | None:
    """A name with its prefix replaced: the first that it begins with; None if it begins with none.

    Args:
        name: the name.
        prefixes: (prefix, new prefix), both with `{layer}` for the number of a layer.
    """
    for prefix, new in prefixes:
        found = prefix_of(prefix).match(name)
        if found:
            return new.replace(LAYER, found.groupdict().get("layer", "")) + name[found.end() :]
    return None
