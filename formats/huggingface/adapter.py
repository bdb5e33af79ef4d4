"""A LoRA adapter as PEFT saves it: its settings, and the changes that it makes to tensors of its base model.

    adapter_config.json, adapter_model.safetensors
    base_model.model. MODULE .lora_A.weight [r, in]   .lora_B.weight [out, r]       a matrix
    base_model.model. MODULE .lora_embedding_A [r, vocab]   .lora_embedding_B [hidden, r]    an embedding
    base_model.model. MODULE .lora_magnitude_vector [out], of an embedding [hidden]    DoRA
    base_model.model. MODULE .weight, .bias, .base_layer.weight                     replaces the base's tensor

Facts: peft 0.21.2 tuners/lora/layer.py, tuners/lora/config.py, tuners/tuners_utils.py `_inject_parameters` and
utils/save_and_load.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from formats.disk.safetensors import FLOATS, Fragment, read_safetensors
from formats.errors import SourceError, UnsupportedError, short, some
from formats.huggingface import lora_patterns
from formats.huggingface.lora_config import CONFIG, PEFT_MERGES, read_config
from formats.model.vocab_rows import EMBEDDING, HEAD

WEIGHTS = "adapter_model.safetensors"
ROOT = "base_model.model."
BIAS = ".bias"
INNER = "base_layer"
"""The name that PEFT gives the wrapped module, and an inner wrapper of a parameter in an outer one."""
ENDS = {
    "lora_A.weight": "right", "lora_B.weight": "left", "lora_embedding_A": "right", "lora_embedding_B": "left",
    "lora_magnitude_vector": "magnitude", "lora_magnitude_vector.weight": "magnitude",
}  # fmt: skip
"""End of the name of a LoRA tensor: the part of the LoRA that the tensor is."""


class Saved(NamedTuple):
    """An adapter as it is on disk.

    Attributes:
        root: the folder of the adapter, or the checkpoint that holds it.
        config: the parsed adapter_config.json.
        tensors: the tensors by their names in PEFT's files.
        files: the files that are read.
    """

    root: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, Fragment]
    files: tuple[Path, ...]


class Lora(NamedTuple):
    """The product that is added to one tensor of the base: scale * left @ right, or its transpose.

    Attributes:
        left: B, [out, r]; of parameters of several experts [out, r * experts], the experts next to each other.
        right: A, [r, in]; of parameters of several experts [experts * r, in].
        scale: alpha / r, or alpha / sqrt(r).
        rank: r, of one expert.
        magnitude: the norm of each row of the result, for DoRA.
        embedding: whether the tensor is an embedding, whose weight [vocab, hidden] gets the transpose.
    """

    left: Fragment
    right: Fragment
    scale: float
    rank: int
    magnitude: Fragment | None = None
    embedding: bool = False


@dataclass(frozen=True)
class Adapter:
    """A parsed adapter.

    Attributes:
        root: the folder of the adapter.
        config: the parsed adapter_config.json.
        added: the LoRA of each module, or of each parameter of a module, by its name in the base.
        whole: the tensors that replace tensors of the base, by the keys of these.
    """

    root: Path
    config: Mapping[str, Any]
    added: Mapping[str, Lora]
    whole: Mapping[str, Fragment]

    def keys(self, known: Collection[str]) -> set[str]:
        """The keys of the base tensors that the adapter changes; a name in `known` is a key, others are modules."""
        return {*self.whole, *(name if name in known else f"{name}.weight" for name in self.added)}


BESIDE = re.compile(r"(.+)\.(?:modules_to_save|original_module)\.(.+)")
"""The name of a tensor that PEFT saves a second time where the vocabulary was resized, or the tensor as it was before:
PEFT loads the tensor under the module's own name (peft 0.21.2 utils/save_and_load.py `save_embedding_layers`)."""


def read(root: Path) -> Saved:
    """Open the folder of an adapter: its config and the header of its file.

    Raises:
        SourceError: a file is missing or damaged.
        UnsupportedError: the adapter is of another method than LoRA, or of a variant that cannot be merged here.
    """
    config = read_config([root])
    if not (root / WEIGHTS).is_file():
        old = root / "adapter_model.bin"
        hint = "load and save it with PEFT, which writes safetensors" if old.is_file() else "copy the folder again"
        raise SourceError(f"{root} holds no {WEIGHTS}", hint)
    return Saved(root, config, read_safetensors(root / WEIGHTS)[0], (root / CONFIG, root / WEIGHTS))


def parse(saved: Saved, parameters: Sequence[str], *, ordered: bool = True) -> Adapter:
    """Parse the tensors of an adapter: each is a part of a LoRA, or replaces a tensor of the base.

    Args:
        saved: the adapter.
        parameters: the keys of the base's tensors.
        ordered: whether they are in the order in which the base's modules have them in memory.

    Raises:
        SourceError: a tensor is missing, or contradicts the config.
        UnsupportedError: a tensor is none of LoRA's, or a pattern of ranks takes too long to match; or several
            parameters of a module have a LoRA, and nothing tells their order.
    """
    root, config, tensors, _ = saved
    places: dict[str, dict[str, Fragment]] = {}
    whole: dict[str, Fragment] = {}
    embeddings = set[str]()
    for key, fragment in tensors.items():
        if not key.startswith(ROOT):
            raise SourceError(f"{root} holds {key}, which does not begin with {ROOT} as names of PEFT do")
        if fragment.dtype not in FLOATS:
            raise UnsupportedError(f"{key} of {root} is {fragment.dtype}, and LoRA has floating point numbers")
        name = key.removeprefix(ROOT)
        end = next((end for end in ENDS if name.endswith("." + end)), None)
        if end is not None:
            place = name.removesuffix("." + end)
            names = [f"{ROOT}{place}.{other}" for other, part in ENDS.items() if part == ENDS[end]]
            if len(twice := [other for other in names if other in tensors]) > 1:
                raise SourceError(f"{root} holds one part of a LoRA twice: {' and '.join(twice)}", "copy it again")
            places.setdefault(place, {})[ENDS[end]] = fragment
            embeddings |= {place} if end.startswith("lora_embedding") else set()
        elif (beside := BESIDE.fullmatch(name)) and f"{ROOT}{beside[1]}.{beside[2]}" in tensors:
            continue
        elif "lora_" in name or ".token_adapter." in name or "trainable_tokens" in name:
            raise UnsupportedError(f"{root} holds {key}, which no LoRA has that is known here", PEFT_MERGES)
        else:
            whole[name.replace(f".{INNER}.", ".")] = fragment
    added: dict[str, Lora] = {}
    targets = {place: _target(place, saved, parameters, ordered) for place in places}
    lora_patterns.require_bounded(config, lora_patterns.RANKS, {*targets.values()}, str(root / CONFIG))
    for place, parts in places.items():
        module = targets[place]
        if not {"left", "right"} <= parts.keys():
            lacking = "B" if "right" in parts else "A"
            raise SourceError(f"{root} holds no lora_{lacking} of {place}", "the file is not complete: copy it again")
        added[module] = _lora(module, parts, config, root)._replace(embedding=place in embeddings)
    wrapped = {_bare(place) for place in places}
    for key in tensors.keys() - {f"{ROOT}{place}.{end}" for place in places for end in ENDS}:
        module = key.removeprefix(ROOT).rpartition(".")[0]
        if (_bare(module) in wrapped) != (_bare(module) != module):
            has = "has a LoRA" if _bare(module) in wrapped else "has no LoRA"
            raise SourceError(
                f"{root} holds {key}, and {_bare(module)} {has}: under this name PEFT does not load it",
                "copy the files of one save again",
            )
    if not added and not whole:
        raise SourceError(f"{root} holds no tensor of an adapter")
    return Adapter(root, config, added, whole)


def _bare(place: str) -> str:
    """The name of a module without the names of LoRA's wrappers around it."""
    return re.sub(rf"(?:\.{INNER})+$", "", place)


def _target(place: str, saved: Saved, parameters: Sequence[str], ordered: bool) -> str:
    """The module that a LoRA is added to, or the key of the parameter, if the LoRA is of a parameter of a module.

    Wrappers of several parameters of a module are nested: the wrapper of the first parameter is the innermost.

    Raises:
        UnsupportedError: there are several, and their order is not known.
    """
    module = _bare(place)
    own = [key for key in parameters if key.rpartition(".")[0] == module]
    wrapped = [key for key in own if _is_target_parameter(key, saved.config)]
    if len(wrapped) > 1 and not ordered:
        raise UnsupportedError(
            f"{saved.root} has a LoRA of {some(wrapped, 4)}: PEFT names them by the order in which {module} has them "
            "in memory, which neither a table nor transformers tells here",
            PEFT_MERGES,
        )
    depth = place.removeprefix(module).count(INNER)
    return wrapped[len(wrapped) - 1 - depth] if depth < len(wrapped) else module


def _is_target_parameter(key: str, config: Mapping[str, Any]) -> bool:
    """Whether `target_parameters` names a parameter."""
    return any(f".{key}".endswith(f".{name}") for name in config.get("target_parameters") or ())


def _lora(module: str, parts: Mapping[str, Fragment], config: Mapping[str, Any], root: Path) -> Lora:
    """The LoRA of a module: its matrices, with their scale.

    Raises:
        SourceError: the shapes do not fit, or the config gives no rank and alpha for them.
        UnsupportedError: the module is a convolution.
    """
    left, right = parts["left"], parts["right"]
    if len(left.shape) == len(right.shape) > 2:
        raise UnsupportedError(f"{root} has a LoRA of {module}, which is a convolution", PEFT_MERGES)
    if len(left.shape) != 2 or len(right.shape) != 2 or left.shape[1] != right.shape[0]:
        raise SourceError(
            f"{root}: lora_A and lora_B of {module} are {list(right.shape)} and {list(left.shape)}: of no matrix",
            "the file is damaged: copy it again",
        )
    try:
        rank = _pattern_value("rank_pattern", config, module, config.get("r"))
        alpha = _pattern_value("alpha_pattern", config, module, config.get("lora_alpha"))
    except re.error as error:
        raise _no_pattern(root, "ranks or alphas", error) from None
    if type(rank) is not int or rank < 1 or type(alpha) not in (int, float) or not math.isfinite(alpha):
        raise SourceError(
            f"{root / CONFIG} says r = {short(rank)} and lora_alpha = {short(alpha)} of {module}: they are to be "
            "a whole number from 1 on, and a number",
            "take adapter_config.json from where the file comes from",
        )
    if bool(config.get("use_dora")) != ("magnitude" in parts):
        says = "holds no" if config.get("use_dora") else "does not say use_dora, and there is a"
        raise SourceError(
            f"{root} {says} lora_magnitude_vector of {module}",
            "take adapter_config.json and adapter_model.safetensors from one save",
        )
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return Lora(left, right, scale, rank, parts.get("magnitude"))


def _pattern_value(setting: str, config: Mapping[str, Any], module: str, usual: Any) -> Any:
    """The value of the first key that matches the end of a module's name, as PEFT's `get_pattern_key`; or `usual`."""
    values = (config.get(setting) or {}).items()
    matching = (value for key, value in values if lora_patterns.match(setting, key, module))
    return next(matching, usual)


def _no_pattern(root: Path, what: str, error: re.error) -> SourceError:
    """The error for a pattern in the config that is no regular expression."""
    return SourceError(
        f"{root / CONFIG} has a pattern of {what} that is no regular expression: {error}",
        "take it from where the file comes from",
    )


def is_all_linear(config: Mapping[str, Any]) -> bool:
    """Whether `target_modules` is `all-linear`: every linear layer but the output head.

    PEFT itself writes a list (peft 0.21.2 tuners/tuners_utils.py `_maybe_include_all_linear_layers`).
    """
    return str(config.get("target_modules")).lower() == "all-linear"


def missing(
    adapter: Adapter, modules: Iterable[Sequence[str]], tensors: Iterable[Sequence[str]], linear: Collection[str]
) -> list[str]:
    """The modules and tensors of the base that the adapter lacks, although its config names them.

    Args:
        adapter: the adapter, with its config.
        modules: the modules of the base that hold a matrix, each by all names that it may have.
        tensors: the tensors of the base, each by all names that it may have.
        linear: the first names of the modules that are linear layers, without the output head.

    Raises:
        SourceError: the config has a pattern of names that is no regular expression.
        UnsupportedError: to match one takes too long.
    """
    config, saved_modules = adapter.config, adapter.config.get("modules_to_save") or ()
    all_linear, has_bias = is_all_linear(config), _bias_owners(adapter)
    modules = [*modules]
    names_of_all = {name for names in modules for name in names}
    lora_patterns.require_bounded(config, lora_patterns.NAMED, names_of_all, str(adapter.root / CONFIG))
    try:
        lacking = [
            names[0]
            for names in modules
            if _is_target(names[0], config, all_linear and names[0] in linear)
            and adapter.added.keys().isdisjoint(names)
        ]
    except re.error as error:
        raise _no_pattern(adapter.root, "modules", error) from None
    for names in tensors:
        is_kept = any(_is_inside(names[0], module) for module in saved_modules)
        is_bias = any(name.endswith(BIAS) and has_bias(name.removesuffix(BIAS)) for name in names)
        if (is_kept or is_bias) and adapter.whole.keys().isdisjoint(names):
            lacking.append(names[0])
        if _is_target_parameter(names[0], config) and adapter.added.keys().isdisjoint(names):
            lacking.append(names[0])
    return lacking


def _bias_owners(adapter: Adapter) -> Callable[[str], bool]:
    """Whether PEFT trains and saves the bias of a module, if it has one.

    Those are all with `all`, with `lora_only` the modules with a LoRA of their weight or of one of their parameters
    (peft 0.21.2 tuners/tuners_utils.py `_get_learnable_bias_state_dict`).
    """
    added, config = adapter.added, adapter.config
    with_lora = {name.rpartition(".")[0] if _is_target_parameter(name, config) else name for name in added}
    owners: dict[str, Callable[[str], bool]] = {"all": lambda _: True, "lora_only": with_lora.__contains__}
    return owners.get(config.get("bias", "none"), lambda _: False)


def unexplained(adapter: Adapter) -> list[str]:
    """The tensors that replace some of the base and that PEFT does not save with an adapter of this config.

    It saves the modules of `modules_to_save`, trained biases, and embedding and output head where they have a LoRA or
    the vocabulary was resized (peft 0.21.2 utils/save_and_load.py `get_peft_model_state_dict`).
    """
    modules, has_bias = adapter.config.get("modules_to_save") or (), _bias_owners(adapter)
    return [
        key
        for key in adapter.whole
        if not any(_is_inside(key, module) for module in modules)
        and not (key.endswith(BIAS) and has_bias(key.removesuffix(BIAS)))
        and not (EMBEDDING.fullmatch(key) or HEAD.fullmatch(key))
    ]


def _is_inside(key: str, module: str) -> bool:
    """Whether a tensor is in a module of `modules_to_save` (peft 0.21.2 utils/other.py `_set_trainable`)."""
    parts = key.split(".")
    return any(".".join(parts[:count]).endswith(module) for count in range(1, len(parts)))


def surplus(adapter: Adapter, modules: Iterable[Sequence[str]]) -> list[str]:
    """The modules of the base that have a LoRA in the file, and none by the config: PEFT does not load such a LoRA.

    Args:
        adapter: the adapter, with its config, whose patterns are known to be regular expressions.
        modules: the modules of the base that hold a matrix, each by all names that it may have.
    """
    tied = adapter.config.get("ensure_weight_tying")  # embedding and head, which are in no layer, share one LoRA
    with_lora = [names for names in modules if not adapter.added.keys().isdisjoint(names)]
    outside = [
        names
        for names in with_lora
        if not any(_is_target(name, adapter.config, not _is_around(name)) for name in names)
    ]
    return [names[0] for names in outside if not tied or re.search(r"\.\d+\.", names[0])]


def _is_around(module: str) -> bool:
    """Whether a module is an embedding or the output head, which `all-linear` leaves out."""
    return any(pattern.fullmatch(f"{module}.weight") for pattern in (EMBEDDING, HEAD))


def unmatched_note(adapter: Adapter) -> str:
    """A note on names of `target_modules` that no LoRA has, where no module of the base has one either; or empty.

    PEFT keeps such names. Of experts one by one, which are modules in transformers 4 alone, all may be lost.
    """
    named = adapter.config.get("target_modules")
    without = [
        str(name)
        for name in (named if isinstance(named, list) else [])
        if not any(_is_named(module, [str(name)]) for module in adapter.added)
    ]
    return (
        f"the adapter names {some(without, 4)} in target_modules, of which neither it nor the base has a module: if it "
        "was trained with experts one by one (transformers 4), what it learned of them is lost"
        if without
        else ""
    )


def _is_target(module: str, config: Mapping[str, Any], untold: bool = False) -> bool:
    """Whether a module has a LoRA by the config (peft 0.21.2 tuners/tuners_utils.py `check_target_module_exists`).

    With `all-linear` the name of the module does not tell: then the result is `untold`. A null beside
    `target_parameters` names no module: where PEFT takes a list of its own for the model type, it writes that list.
    `layers_to_transform` does not count for a module that is named in full.
    """
    named, excluded = config.get("target_modules"), config.get("exclude_modules") or []
    if _is_named(module, excluded):
        return False
    if any(lora_patterns.match("modules_to_save", name, module) for name in config.get("modules_to_save") or ()):
        return False
    if named is None or is_all_linear(config):
        return named is not None and untold
    layers = config.get("layers_to_transform")
    if isinstance(named, str) or layers in (None, []) or module in named or not _is_named(module, named):
        return _is_named(module, named)
    given = config.get("layers_pattern")
    patterns = [given] if isinstance(given, str) else given or [r"(?<=\.)[^.]*"]
    matches = (lora_patterns.match("layers_pattern", pattern, module) for pattern in patterns)
    layer = next((int(match[1]) for match in matches if match), None)
    return layer in (layers if isinstance(layers, list) else [layers])


def _is_named(module: str, named: str | Sequence[str]) -> bool:
    """Whether a regular expression matches the name of a module, or the name ends with a name of a list."""
    if isinstance(named, str):
        return lora_patterns.match("target_modules", named, module) is not None
    return any(f".{module}".endswith(f".{name}") for name in named)


def require_consumed(adapter: Adapter, keys: Iterable[str], base: Path, *, only: str | None = None) -> None:
    """Refuse an adapter with tensors for which the base has no tensor.

    Args:
        adapter: the adapter, with its config.
        keys: the keys of the base's tensors.
        base: the folder of the base.
        only: the part of the base that is read, if only a part is.

    Raises:
        SourceError: the adapter has such tensors.
    """
    known, named = {*keys}, str(adapter.config.get("base_model_name_or_path") or "")
    if unmatched := sorted(adapter.keys(known) - known):
        hint = f"it was trained on {short(named)}: is that the base?"
        if only:
            hint = (
                f"an adapter of the whole model is merged into the whole: `convert merge` without --only {only}, then "
                f"`convert hf2hf MERGED OUT --only {only}`"
            )
        elif adapter.config.get("target_parameters"):
            hint = f"target_parameters may name what is fused in memory and apart in the files: {PEFT_MERGES}"
        elif named and Path(named).resolve() == base.resolve():
            hint = f"it was trained on that base under names that are not known here: {PEFT_MERGES}"
        raise SourceError(
            f"{adapter.root} has {len(unmatched)} tensors that {base} has not: {some(unmatched, 3)}", hint
        )
