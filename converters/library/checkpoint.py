"""An opened checkpoint, and views of it in any layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from converters.library.options import (
    KINDS,
    RANKS,
    Effort,
    Place,
    Reading,
    Target,
    checked,
    known_family,
    limits_of,
    output_of,
    path_of,
    settings_of,
)
from converters.library.options import View as ViewOptions
from converters.library.records import inspect_record
from converters.library.view import Reader, View, tensors_of
from converters.move.casts import Array
from converters.plan.opening import open_source, replicas_of, require_effect, require_family
from converters.plan.output import plan_output, require_target
from converters.plan.request import Request
from converters.prove.sources import check_manifests, compared
from formats import checkpoint
from formats.disk.stamps import Stamp, stamp_of
from formats.errors import SourceError, UnsupportedError, UsageError, hint_of, some
from formats.megatron import MEGATRON
from formats.model.spec import Spec

if TYPE_CHECKING:
    from typing_extensions import Unpack

NOWHERE = Path("/view")
"""The output folder in the plan of a view; nothing is written to it."""
AXES = ("tp", "pp", "ep")
IN_MEMORY = {"megatron": ("format", "torch"), "neox": ("layout", "sequential")}
"""Layout: the option with which a file holds the tensors of one rank, under the names that they have in memory."""
IN_PIECES = {
    "torch_dist": "torch_dist holds tensors of all layers in pieces, under one name",
    "pipeline": "GPT-NeoX's layout pipeline has a file of each layer, with the names of the others",
}
"""Value of such an option with which files do not: why."""
NO_VIEW = {
    "deepspeed": ("a universal checkpoint has no view", "its tensors are those of as_('fsdp')"),
    "megatron-deepspeed": ("Megatron-DeepSpeed has a file of each layer, with the names of the others", "convert it"),
}
"""Target: why it has no view, and what to do."""


class Checkpoint:
    """A checkpoint of any format: the contents of its headers, and its tensors in any layout.

    Attributes:
        path: its folder.
        source: the checkpoint as the reader of its format opened it.
    """

    def __init__(self, path: Path, options: Mapping[str, Any]) -> None:
        self.path, self.options = path, options
        settings = settings_of(options)
        with known_family(options) as family:
            self.source: checkpoint.Checkpoint = open_source(path, settings)
            require_effect(settings, self.source)  # `accept` may name any setting of a model that is filled from it
            require_family(family, self.source)
        self.stamps = {file: self.source.stamps.get(file) or _stamp(file) for file in self.source.files}

    def unchanged(self, *files: Path) -> None:
        """Refuse files that have changed since the checkpoint was opened: those that are named, else all.

        Raises:
            SourceError: a file was written or replaced.
        """
        own = [file for file in files or self.stamps if file in self.stamps]
        changed = [str(file) for file in own if _stamp(file) != self.stamps[file]]
        if changed:
            raise SourceError(
                f"{len(changed)} files of {self.path} have changed since it was opened, such as {changed[0]}",
                "open it again",
            )

    def __repr__(self) -> str:
        sizes = "".join(f", {name}={size}" for name, size in self.topology.items())
        return f"Checkpoint({str(self.path)!r}, {self.format}{sizes}, {self.family})"

    @property
    def format(self) -> str:
        """The name of its format, such as `fsdp`."""
        return self.source.format

    @property
    def spec(self) -> Spec:
        """The settings of the model."""
        return self.source.spec

    @property
    def family(self) -> str:
        """The name of the model's family."""
        return self.source.spec.family

    @property
    def topology(self) -> dict[str, int]:
        """The parallel sizes of the checkpoint, such as `{"tp": 4, "pp": 2}`; empty when nothing is sharded."""
        return dict(self.source.topology)

    @cached_property
    def record(self) -> dict[str, Any]:
        """The record that `convert inspect --json` prints."""
        with known_family(self.options):
            return inspect_record(self.source, tensors=False)

    def __getitem__(self, to: Target) -> View:
        """A view in a layout at its defaults: `checkpoint["huggingface"]["lm_head.weight"].shape`."""
        return self.as_(to)

    def tensors(self, to: Target = "huggingface", **options: Unpack[Effort]) -> Iterator[tuple[str, Array]]:
        """Name and elements of every tensor in a layout, in the order of its files, one at a time in memory.

        The bytes are those that a conversion writes, and memory is bounded, except for what the caller keeps. What is
        read is compared with the source's vitruvian.json, if there is one, and at the end with its checksums.

        Raises:
            UnsupportedError: a tensor is bfloat16 or float8, and ml_dtypes is not installed.
            DamagedError: bytes that were read do not have the checksum that the source records.
            VerificationError: copies of a tensor differ, or a tensor is not what the source's vitruvian.json says.
        """
        with self.as_(to, **options) as view:
            yield from view.read()

    def as_(self, to: Target, **options: Unpack[ViewOptions]) -> View:
        """The tensors in a layout, as one rank of it would load them, without a conversion.

        Args:
            to: `huggingface`, `megatron`, `fsdp` (the names that transformers has in memory), `neox` or `mistral`.
            options: how it is laid out, by the flags of the command; a parallel size is given as `(rank, size)` to
                view one rank: `as_("megatron", tp=(3, 8), pp=(0, 4))`, and `as_("fsdp", ranks=(1, 2))` for a data
                file of DCP. With `with_optimizer`, optimizer states are among the tensors, as `exp_avg.NAME`. Whatever
                the source is, Megatron's names are those of the `format` torch and GPT-NeoX's those of the `layout`
                sequential, as a rank has them in memory.

        Raises:
            UsageError: an option has no effect on the layout, or no rank is named where several hold tensors of one
                name.
            RefusedError: something would be lost, guessed or duplicated.
            UnsupportedError: the layout cannot hold the model.
        """
        laid_out = checked(options, ViewOptions.__optional_keys__, {**KINDS, **RANKS})
        require_target(to)
        if to in NO_VIEW:
            raise UnsupportedError(*NO_VIEW[to])
        option, value = IN_MEMORY.get(to, ("", ""))
        if option and self.format != MEGATRON.name:
            laid_out.setdefault(option, value)
        if laid_out.get(option) in IN_PIECES:
            raise UnsupportedError(IN_PIECES[laid_out[option]], f"a rank has it in memory as of {option}={value!r}")
        ranks = {name: laid_out[name] for name in RANKS if isinstance(laid_out.get(name), tuple)}
        laid_out |= {name: size for name, (_, size) in ranks.items()}
        own_file = _file_of(to, ranks, laid_out) if ranks else ""
        limits = limits_of(laid_out, replicas_of(self.source, laid_out.get("replicas")))
        self.unchanged()
        with known_family(self.options), _readable():
            plan = plan_output(self.source, Request(NOWHERE, limits=limits), to, output_of(laid_out))
            check_manifests(plan)
            plan = compared(plan, unchanged=True)
        assert plan.target is not None
        root = Request(NOWHERE).root
        if own_file and not any(own_file in file.path.relative_to(root).parts for file in plan.target.files):
            raise UsageError(f"no file of such an output is of the rank {own_file}", "name a rank that saves one")
        every = list(tensors_of(plan.target))
        every = [entry for entry in every if not own_file or own_file in entry[0].relative_to(root).parts]
        tensors = {name: (str(file.relative_to(root)), state, placed) for file, state, name, placed in every}
        if len(tensors) < len(every):
            names = some([*dict.fromkeys(str(file.relative_to(root)) for file, *_ in every)], 3)
            hint = {"megatron": "name a rank, such as tp=(0, 2)", "fsdp": "name a rank, such as ranks=(0, 2)"}
            raise UsageError(f"several files hold tensors of one name: {names}", hint.get(to, "leave tp out"))
        return View(plan, Reader(plan, plan.target, limits, self.unchanged), tensors)


@contextmanager
def _readable() -> Iterator[None]:
    """Raise an OSError of the source as a SourceError with a sentence."""
    try:
        yield
    except OSError as error:
        raise SourceError(f"{error.filename or 'the source'}: {error.strerror}", hint_of(error)) from None


def _stamp(file: Path) -> Stamp | None:
    """The stamp of a file; None if there is no file."""
    try:
        return stamp_of(file)
    except OSError:
        return None


def _file_of(to: str, ranks: Mapping[str, tuple[int, int]], options: Mapping[str, Any]) -> str:
    """The name of the file of a rank, or of the folder of its files.

    Raises:
        UsageError: the layout has no files of ranks, or a rank is missing.
    """
    if to == "fsdp" and ranks.keys() == {"ranks"}:
        return f"__{ranks['ranks'][0]}_0.distcp"
    if to != "megatron" or "ranks" in ranks or options.get("format") == "fsdp_dtensor":
        raise UsageError(f"the layout {to} has no view of such ranks", "megatron has tp, pp and ep, fsdp has ranks")
    from formats.megatron.mesh import Mesh
    from formats.megatron.shards import folder_of

    size = {axis: options.get(axis) or 1 for axis in AXES}
    if open_axes := [axis for axis in AXES if size[axis] > 1 and axis not in ranks]:
        raise UsageError(
            f"{open_axes[0]}={size[open_axes[0]]} names no rank", f"{open_axes[0]}=(0, {size[open_axes[0]]})"
        )
    tp, pp, ep = (ranks[axis][0] if axis in ranks else 0 for axis in AXES)
    return folder_of(tp, pp, ep, size["pp"], Mesh(size["tp"], size["ep"], options.get("etp") or size["tp"]))


def open_checkpoint(path: Place, **options: Unpack[Reading]) -> Checkpoint:
    """Open a checkpoint of any format. Only headers are read, no weights.

    Args:
        path: the folder of the checkpoint; or `ORG/NAME`, `hf://…`, `s3://…` and the like, of which only headers are
            read.
        options: what the checkpoint does not record itself, by the flags of `convert inspect`: `config="BASE"`.

    Raises:
        SourceError: there is no checkpoint, or it is damaged or incomplete.
        UnsupportedError: the checkpoint is sound, but of a kind that has no layout here.
        RefusedError: the checkpoint holds two models, and no option says which one is meant.
        UsageError: an option has no effect on the checkpoint.
    """
    return Checkpoint(path_of(path, "path"), checked(options, Reading.__optional_keys__))
