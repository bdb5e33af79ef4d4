"""Vitruvian: LLM checkpoints from any format to any other, proved complete, without a GPU or the framework.

    import vitruvian

    checkpoint = vitruvian.open("run/")                      # headers only
    for name, tensor in checkpoint.tensors("huggingface"):   # one at a time
        ...
    vitruvian.convert("run/", "model", to="huggingface")

Errors are subclasses of `VitruvianError`, with `hint` and `exit_code`. Nothing here imports torch but
`vitruvian.torch`, `vitruvian.transformers`, `vitruvian.axolotl`, `vitruvian.vllm` and `vitruvian.sglang`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from vitruvian import beside

if TYPE_CHECKING:
    from converters.library.checkpoint import Checkpoint
    from converters.library.checkpoint import open_checkpoint as open  # noqa: A004  # as the builtin opens files
    from converters.library.combining import average, merge, peft2megatron
    from converters.library.conversion import Converted, Part, Plan, convert, convert_part, plan
    from converters.library.exporting import Export, Exporter, ExportError, exporter
    from converters.library.proving import Differences, Digest, Verified, diff, digest, verify
    from converters.library.publishing import Pushed, push
    from converters.library.view import Tensor, View
    from converters.prove.diff import Difference
    from formats.errors import (
        DamagedError,
        Interrupted,
        NetworkError,
        OptionNeededError,
        OutputError,
        RefusedError,
        SourceError,
        UnsupportedError,
        UsageError,
        VerificationError,
        VitruvianError,
    )

ROOMS = {
    "converters.library.checkpoint": {"open": "open_checkpoint", "Checkpoint": "Checkpoint"},
    "converters.library.combining": ("average", "merge", "peft2megatron"),
    "converters.library.conversion": ("Converted", "Part", "Plan", "convert", "convert_part", "plan"),
    "converters.library.exporting": ("Export", "ExportError", "Exporter", "exporter"),
    "converters.library.proving": ("Differences", "Digest", "Verified", "diff", "digest", "verify"),
    "converters.library.publishing": ("Pushed", "push"),
    "converters.library.view": ("Tensor", "View"),
    "converters.prove.diff": ("Difference",),
    "formats.errors": (
        "DamagedError", "Interrupted", "NetworkError", "OptionNeededError", "OutputError", "RefusedError",
        "SourceError", "UnsupportedError", "UsageError", "VerificationError", "VitruvianError",
    ),
}  # fmt: skip
"""Module: the public names in it; a dict maps public names to the names in the module where those differ."""
SUBMODULES = ("torch", "transformers", "axolotl", "vllm", "sglang")
"""Modules that import torch, and are imported when they are first used."""
PLACES = {
    name: (module, names[name] if isinstance(names, dict) else name)
    for module, names in ROOMS.items()
    for name in names
}

__all__ = [
    "Checkpoint", "Converted", "DamagedError", "Difference", "Differences", "Digest", "Export", "ExportError",
    "Exporter", "Interrupted", "NetworkError", "OptionNeededError", "OutputError", "Part", "Plan", "Pushed",
    "RefusedError", "SourceError", "Tensor", "UnsupportedError", "UsageError", "VerificationError", "Verified",
    "View", "VitruvianError", "average", "convert", "convert_part", "diff", "digest", "exporter", "merge", "open",
    "peft2megatron", "plan", "push", "verify",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """The object of a public name, or the version; its module is imported at the first use."""
    if name == "__version__":
        from importlib.metadata import version

        return version("vitruvian")
    if name in SUBMODULES:
        return import_module(f"vitruvian.{name}")
    if name not in PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, own = PLACES[name]
    value = getattr(beside.load(module), own)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
