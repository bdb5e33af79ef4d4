"""How tensor parallel ranks are joined in a universal checkpoint: what its files say, and what they must say.

DeepSpeed's ds_to_universal joins the parts of a parameter by what the training has recorded of its name, and writes
beside the tensor how it did, for its loader to cut the tensor again:

    (no key)            all ranks had the same, or their mean was taken: whole
    cat_dim             the parts are concatenated along that dimension, in rank order
    param_n_sub_params  so many sections of equal size, each concatenated by itself, along `cat_dim`
    sub_param_shape     sections of the sizes that the shape lists, along its `partition_dim`
    vocab_tensor        rows of the vocabulary, without the padding at their end: whole

A training records lists of regular expressions in its model files, under `universal_checkpoint_info`. Without them
(`--inject_missing_state`) every parameter is concatenated along dimension 0. So the keys of a file follow from the
name of its parameter, and other keys are those of a changed file, by which ranks would get rows of each other.

Facts: deepspeed/checkpoint/ds_to_universal.py `merge_tp_slices` and constants.py, 0.19.8.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from formats.errors import SourceError, UnsupportedError, short
from formats.torch_files.archive import TorchFile
from formats.torch_files.pickle_values import Opaque

INFO = "universal_checkpoint_info"
KEYS = {"param", "cat_dim", "param_n_sub_params", "sub_param_shape", "vocab_tensor"}
"""The keys that a file may have; others, such as those of experts, say that it is laid out otherwise."""
VERSION, VOCAB, SECTIONS, WIDTHS = (
    "universal_checkpoint_version", "vocabulary_parameter_patterns", "parameter_with_sub_params",
    "sub_param_shard_widths",
)  # fmt: skip
REST = {"cat_dim": 0}
"""The keys of a file whose name none matches."""
OTHERS = {
    VERSION, VOCAB, WIDTHS, "original_vocab_size", "padded_vocab_size", "pipeline_replicated_parameter_patterns"
}  # fmt: skip
"""Further keys of the record: they do not decide how parts are joined, or do so with one of `CATEGORIES`."""
PATTERN = re.compile(r"\^?(?:\\\.|[\w.\-])*(?:\\d\+(?:\\\.|[\w.\-])*){0,2}\$?")
"""The expressions that trees write: no others are searched for, since one from a file could take for ever."""
WIDTHS_SINCE = 0.4
"""The version of a record from which on sections may be cut in unequal parts, which it lists."""


Keys = Mapping[str, Any]
"""Keys of a file, such as `KEYS`."""
Reader = Callable[[Path, Mapping[str, Any], str, str, tuple[int, ...]], Keys | None]
"""From the model file, its record, a key of the record, the name of a parameter and its shape: the keys of the
parameter's file; None if the key says nothing of it. UnsupportedError: it is in an unknown form."""


class Layout(NamedTuple):
    """How a tensor is joined.

    Attributes:
        dim: the dimension along which the parts of ranks are concatenated; None if the tensor is the same on all.
        sizes: the size of each section along it.
        vocab: whether these are rows of the vocabulary, whose padding is not there.
    """

    dim: int | None
    sizes: tuple[int, ...] = ()
    vocab: bool = False


def layout(where: Path, shape: tuple[int, ...], keys: Mapping[str, Any]) -> Layout:
    """How a tensor is joined, by the keys beside it.

    Raises:
        SourceError: the keys contradict the shape.
        UnsupportedError: they are in an unknown form.
    """
    if odd := sorted(str(other) for other in keys.keys() - KEYS):
        raise UnsupportedError(f"{where} says {short(odd[0])} of its tensor, whose layout is not known")
    dim, sections, runs = keys.get("cat_dim"), keys.get("param_n_sub_params", 1), keys.get("sub_param_shape")
    vocab = keys.get("vocab_tensor", False)
    if not isinstance(vocab, bool):
        raise UnsupportedError(f"{where} says vocab_tensor = {short(vocab)}")
    if runs is not None:
        return _of_runs(where, shape, runs)._replace(vocab=vocab)
    if dim is None and "param_n_sub_params" not in keys:
        return Layout(None, vocab=vocab)
    if type(dim) is not int or not 0 <= dim < len(shape) or type(sections) is not int or sections < 1:
        raise UnsupportedError(f"{where} says cat_dim = {short(dim)}, param_n_sub_params = {short(sections)}")
    if shape[dim] % sections:
        raise SourceError(f"{where} holds {list(shape)}, which has no {sections} sections along dimension {dim}")
    return Layout(dim, (shape[dim] // sections,) * sections, vocab)


def _of_runs(where: Path, shape: tuple[int, ...], runs: Any) -> Layout:
    state = runs.state if isinstance(runs, Opaque) and isinstance(runs.state, dict) else {}
    sizes_of, dim = state.get("shape"), state.get("partition_dim")
    if not isinstance(sizes_of, tuple) or type(dim) is not int or not 0 <= dim < len(shape) == len(sizes_of):
        raise UnsupportedError(f"{where} says sub_param_shape in a form that is not known")
    sizes = sizes_of[dim]
    if not isinstance(sizes, tuple) or not all(type(size) is int and size > 0 for size in sizes):
        raise UnsupportedError(f"{where} says sub_param_shape = {short(sizes_of)}, without the size of each section")
    if sum(sizes) != shape[dim]:
        raise SourceError(f"{where} holds {list(shape)}, and says sections of {' + '.join(map(str, sizes))}")
    return Layout(dim, sizes)


def require(where: Path, name: str, found: Layout, wanted: Layout, source: object) -> None:
    """Refuse a tensor that is joined otherwise than `source` says of it.

    Raises:
        SourceError: it is.
    """
    if found != wanted:
        raise SourceError(
            f"{where} says that {short(name)} is {_text(found)}; after {source} it is {_text(wanted)}",
            "the file was changed, or is of another training: make the universal checkpoint again",
        )


def _text(of: Layout) -> str:
    rows = " without the vocabulary's padding" if of.vocab else ""
    if of.dim is None:
        return f"whole{rows}"
    sections = f" in sections of {' + '.join(map(str, of.sizes))}" if len(of.sizes) > 1 else ""
    return f"concatenated along dimension {of.dim}{sections}{rows}"


def wanted(model: TorchFile, name: str, where: Path, shape: tuple[int, ...]) -> Layout:
    """How ds_to_universal joins a parameter of a training.

    Args:
        model: a model file of the training.
        name: the name of the parameter.
        where: the file of its tensor, for errors.
        shape: the shape of the joined tensor.

    Raises:
        SourceError: the shape cannot be that of a tensor which is joined so.
        UnsupportedError: the training has recorded it in an unknown form.
    """
    info = _info(model)
    keys: dict[str, Any] = dict(REST)
    for category, read in CATEGORIES.items():
        recorded = read(model.path, info, category, name, shape)
        if recorded is not None:
            keys = dict(recorded)
            break
    if _matches(model.path, info.get(VOCAB), name):
        keys["vocab_tensor"] = True
    return layout(where, shape, keys)


def _info(model: TorchFile) -> Mapping[str, Any]:
    """What a training has recorded; nothing where its tree does not.

    Raises:
        UnsupportedError: there is an entry that is not known, such as the `affine_map` of DeepSpeed's own tensor
            parallelism.
    """
    info = model.value.get(INFO) or {}
    if not isinstance(info, Mapping):
        raise UnsupportedError(f"{model.path} says {INFO} = {short(info)}")
    if odd := sorted(str(key) for key, value in info.items() if value and key not in {*CATEGORIES, *OTHERS}):
        raise UnsupportedError(f"{model.path}: {INFO} has {short(odd[0])}, and how it joins tensors is not known")
    return info


def _matches(model: Path, patterns: Any, name: str) -> str | None:
    """The first expression that matches the beginning of a name.

    Raises:
        UnsupportedError: these are no expressions, or none that a tree writes.
    """
    for pattern in patterns if isinstance(patterns, list | tuple) else [patterns] * (patterns is not None):
        if not isinstance(pattern, str) or not PATTERN.fullmatch(pattern):
            raise UnsupportedError(f"{model}: {INFO} has the pattern {short(pattern)}, which is not supported")
        if re.match(pattern, name):
            return pattern
    return None


def _keys(**keys: int) -> Reader:
    """The reader of a category whose parameters have these keys."""

    def read(model: Path, info: Mapping[str, Any], category: str, name: str, _: tuple[int, ...]) -> Keys | None:
        return keys if _matches(model, info.get(category), name) else None

    return read


def _runs(model: Path, info: Mapping[str, Any], _: str, name: str, shape: tuple[int, ...]) -> Keys | None:
    """The sections of a parameter, each with its size; a number of them stands for sections of one size.

    Raises:
        UnsupportedError: they are in an unknown form, or cut in unequal parts.
    """
    entries = info.get(SECTIONS) or ()
    for entry in entries if isinstance(entries, list | tuple) else [entries]:
        if not isinstance(entry, Mapping):
            raise UnsupportedError(f"{model}: {INFO} has {SECTIONS} = {short(entries)}")
        pattern = _matches(model, entry.get("patterns"), name)
        if pattern is None:
            continue
        sizes, dim = entry.get("shape"), entry.get("partition_dim")
        if not isinstance(sizes, list | tuple) or type(dim) is not int or not 0 <= dim < len(sizes) == len(shape):
            raise UnsupportedError(f"{model}: {INFO} has {SECTIONS} = {short(entry)}")
        count = sizes[dim]
        if type(count) is int and count > 0 and shape[dim] % count == 0:
            sizes = (*sizes[:dim], (shape[dim] // count,) * count, *sizes[dim + 1 :])
        _require_even(model, info, pattern)
        return {"sub_param_shape": Opaque("", "SubparamShape", state={"shape": tuple(sizes), "partition_dim": dim})}
    return None


def _require_even(model: Path, info: Mapping[str, Any], pattern: str) -> None:
    """Refuse sections that ranks have unequal parts of."""
    listed = (info.get(WIDTHS) or {}).get(pattern) if isinstance(info.get(WIDTHS) or {}, Mapping) else None
    version = info.get(VERSION, 0.0)
    older = isinstance(version, int | float) and version < WIDTHS_SINCE
    known = isinstance(listed, Sequence) and all(isinstance(of_ranks, list | tuple) for of_ranks in listed)
    if not older and not (known and all(len({*of_ranks}) == 1 for of_ranks in listed or ())):
        raise UnsupportedError(f"{model}: {INFO} has {WIDTHS} = {short(listed)} of {short(pattern)}")


CATEGORIES: Mapping[str, Reader] = {
    "tp_replicated_parameter_patterns": _keys(),
    "parameter_to_average_patterns": _keys(),
    "parameter_with_2_sub_params_cat_dim_0": _keys(cat_dim=0, param_n_sub_params=2),
    SECTIONS: _runs,
    "parameter_with_row_parallelism_patterns": _keys(cat_dim=1),
}
"""Key of the record: what reads from it the keys of a file with a parameter's name. The first match counts."""
