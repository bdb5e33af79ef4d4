"""The types that all formats share: an opened checkpoint, and the layout of the files of a checkpoint to be written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from formats.disk.safetensors import DTYPES, FLOATS
from formats.disk.stamps import Stamp
from formats.errors import RefusedError, UnsupportedError
from formats.layout.placed import OnRank, Placed
from formats.layout.slots import Slot
from formats.model.spec import ModelSpec, Spec

INTEGERS = {dtype for dtype in DTYPES if dtype not in FLOATS and not dtype.startswith("F8")}

ASSETS = "huggingface"
"""The folder of a run of Megatron or GPT-NeoX with the small files of the model: config.json, tokenizer, card."""
MANIFEST = "vitruvian.json"
"""The manifest, which a conversion writes beside the weights, and no other program does."""


@dataclass(frozen=True)
class Settings:
    """The user's options for reading a checkpoint.

    Attributes:
        vocab_size: the true number of tokens, without padding.
        values: settings of the model that overrule those in the checkpoint.
        config: a Hugging Face folder whose settings and tokenizer belong to the weights.
        verbatim: carry every tensor under its own name, without the table of a family.
        container: the part of a saved dictionary that holds the model, where several could.
        tag: the tag of a checkpoint in a run of DeepSpeed.
        weights: `module`, or an optimizer state of each parameter: `fp32-master`, `exp_avg` or `exp_avg_sq`.
        allow_missing: names, or patterns of them, in which a model without a table may differ from that of its config.
        gqa_layout: the order of query, key and value in a checkpoint of GPT-NeoX: `auto`, `blocked` or `grouped`.
        accept: deviations that the user allows, by the names that errors give them.
        drop: parts of the model that are left out: `mtp`, the layers that predict tokens after the next.
        only: the part of the model that is read: `text`, the language model of a multimodal model.
        adapter: for a training with an adapter: `only` reads the adapter; `merged` reads the base, into which the
            adapter is merged.
        without_buffers: read a checkpoint of a kind that never holds buffers, for a comparison with its manifest.
        own_names: read a universal checkpoint without the config.json beside it, under the names of its training, if no
            other setting speaks of the model.
        as_read: gives a config.json as its class in transformers reads it, or None; without it, none is asked for.
    """

    vocab_size: int | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    config: Path | None = None
    verbatim: bool = False
    container: str | None = None
    tag: str | None = None
    weights: str | None = None
    gqa_layout: str = "auto"
    allow_missing: tuple[str, ...] = ()
    accept: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    adapter: str | None = None
    only: str | None = None
    without_buffers: bool = False
    own_names: bool = False
    as_read: Callable[[Mapping[str, Any]], dict[str, Any] | None] | None = None


@dataclass(frozen=True, kw_only=True)
class Details:
    """The part of an opened checkpoint that only its own format can use; a format subclasses it.

    Attributes:
        kind: the name of the kind of checkpoint, where a format has several; empty for the format's name.
        fresh: the option with which the framework starts from fresh optimizer states.
        shown: further entries of the record that `inspect` prints.
        residue: the names of settings that no table knows, by the file or object that holds them.
        arguments: the names of what its run was given, which `--accept` may name.
    """

    kind: str = ""
    fresh: str = ""
    shown: Mapping[str, Any] = field(default_factory=dict)
    residue: Mapping[str, list[str]] = field(default_factory=dict)
    arguments: Collection[str] = ()


Own = TypeVar("Own", bound=Details)


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint: headers and metadata, no weights.

    Attributes:
        root: the folder.
        home: the folder of the weight files; in a run of Megatron that of the iteration.
        format: the name of the format.
        spec: the model's settings.
        tensors: every physical tensor, with its slot in the layout.
        dropped: keys that carry no weights.
        files: the weight files.
        topology: the parallel sizes, in the order in which they are shown; empty when nothing is sharded.
        assets: the folder with config, tokenizer and chat template, if there is one.
        details: the part that only the same format can use, such as Megatron's `args`.
        twins: where `tensors` are FP32 master weights, the same tensors in the type that the model computes with.
        notes: further messages for the user.
        proof: where `tensors` are moments, the FP32 master weights beside them, which can be compared with the module.
        without: the logical tensors of the model that the checkpoint does not hold.
        buffers: the logical tensors that transformers has as buffers, of a model without a table; None if not known.
        settings: the options with which the checkpoint was opened.
        config: the parsed config.json of `assets`.
        run_config: the settings of model and training in a file of the run, such as the yml of GPT-NeoX.
        padded_vocab: rows of the embedding, padding included; None where the format does not pad.
        tokenizer_given: whether the tokenizer in `assets` is one that was named in place of the run's own.
        added_tokens: tokens that the training added to its tokenizer, in the order of their ids.
        token_ids: ids of special tokens that its own settings say, for a config.json that is made, by their keys there.
        state: the names of the saved training state besides the weights, which is not carried.
        ties: the names of entries in the model files that are equal in all files of one save.
        unbounded: whether a shape is only the extent of the pieces, since the files do not record how many there were.
        left: the names of the tensors that are not read, where only a part of the model is; None where all of it is.
        stamps: the stamps of weight files from before their headers were read.
        original: where the tensors are read as parts of other tensors, or quantized, the checkpoint with its own.
    """

    root: Path
    home: Path
    format: str
    spec: Spec
    tensors: tuple[Placed, ...]
    dropped: tuple[str, ...]
    files: tuple[Path, ...]
    topology: Mapping[str, int] = field(default_factory=dict)
    assets: Path | None = None
    details: Details = field(default_factory=Details)
    twins: tuple[Placed, ...] = ()
    notes: tuple[str, ...] = ()
    proof: Checkpoint | None = None
    without: frozenset[str] = frozenset()
    buffers: frozenset[str] | None = None
    settings: Settings = field(default_factory=Settings)
    config: Mapping[str, Any] | None = None
    run_config: Mapping[str, Any] = field(default_factory=dict)
    padded_vocab: int | None = None
    tokenizer_given: bool = False
    added_tokens: tuple[str, ...] = ()
    token_ids: Mapping[str, int] = field(default_factory=dict)
    state: tuple[str, ...] = ()
    ties: tuple[str, ...] = ()
    unbounded: bool = False
    left: tuple[str, ...] | None = None
    original: Checkpoint | None = None
    stamps: Mapping[Path, Stamp] = field(default_factory=dict, compare=False, repr=False)

    def details_of(self, kind: type[Own]) -> Own:
        """The details, which have to be of type `kind`: that of the checkpoint's format."""
        assert isinstance(self.details, kind)
        return self.details

    def fragments(self) -> Iterator[Placed]:
        """Every physical tensor, each piece of a sharded one by itself."""
        return (fragment for placed in self.tensors for fragment in placed.each())

    def dtypes(self) -> dict[tuple[str, int | None], str]:
        """The element type of each logical tensor, by (name, layer).

        Raises:
            RefusedError: parts of one logical tensor differ in type.
            UnsupportedError: a tensor in the table of a family holds no floating point numbers.
        """
        dtypes: dict[tuple[str, int | None], str] = {}
        for placed in self.tensors:
            if placed.fragment.dtype in INTEGERS and isinstance(self.spec, ModelSpec):
                raise UnsupportedError(
                    f"{placed.key} in {placed.fragment.path} is {placed.fragment.dtype}, and the weights of a "
                    f"{self.spec.family} are floating point numbers",
                    "--verbatim carries every tensor as it is",
                )
            for name in placed.slot.rule.pattern.tensors:
                key = (name, placed.slot.layer)
                if dtypes.setdefault(key, placed.fragment.dtype) != placed.fragment.dtype:
                    raise RefusedError(
                        f"{placed.key} in {placed.fragment.path} is {placed.fragment.dtype}, other parts of the same "
                        f"tensor are {dtypes[key]}"
                    )
        return dtypes


def slot_dtype(slot: Slot, dtypes: Mapping[tuple[str, int | None], str]) -> str:
    """The element type of a physical tensor that is to be written.

    Raises:
        RefusedError: the tensor would hold logical tensors of several element types.
    """
    names = {dtypes[name, slot.layer] for name in slot.rule.pattern.tensors}
    if len(names) > 1:
        raise RefusedError(
            f"{slot.keys[0]} would have to hold {' and '.join(sorted(names))} together",
            "cast all of them with --dtype; if they are states of an optimizer, leave that out"
            if names <= {*FLOATS}
            else "",
        )
    return names.pop()


@dataclass(frozen=True)
class OutputFile:
    """A file that is to be written: its tensors have known offsets, so that they can be written in any order.

    Attributes:
        path: the path of the file.
        size: bytes.
        tensors: the model's tensors, with their places in the file.
        checksums: byte ranges (offset, size) whose CRC-32 `headers` needs, by name.
        headers: (offset, bytes) of everything that is no tensor, given those checksums.
        states: the tensors of FP32 master weights and moments in the file, by the name of the optimizer state.
    """

    path: Path
    size: int
    tensors: Sequence[Placed]
    checksums: Mapping[str, tuple[int, int]]
    headers: Callable[[Mapping[str, int]], Iterable[tuple[int, bytes]]]
    states: Mapping[str, Sequence[Placed]] = field(default_factory=dict)


@dataclass(frozen=True)
class Target:
    """A checkpoint that is to be written.

    Attributes:
        files: the weight files.
        texts: small files, by path relative to the folder.
        copies: files that are copied as they are, by path relative to the folder.
        home: the folder of the weights, relative to the folder.
        padding: the content of vocabulary rows that no token has: `zeros`, or copies of the `last` row of the model.
    """

    files: tuple[OutputFile, ...]
    texts: Mapping[str, bytes]
    copies: Mapping[str, Path]
    home: str = "."
    padding: str = "zeros"

    @property
    def tensors(self) -> Iterator[Placed]:
        """Every physical tensor; tensors that all ranks of a group hold alike are one (`Placed.files`)."""
        alike = Counter(id(file.tensors.tensors) for file in self.files if isinstance(file.tensors, OnRank))
        for file in self.files:
            placed = file.tensors
            if not isinstance(placed, OnRank) or not placed or alike[id(placed.tensors)] < placed.tensors[0].fragments:
                yield from placed
            elif placed.rank == 0:
                yield from placed.tensors
