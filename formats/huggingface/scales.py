"""Checks of quantized elements and their scales that all quantization methods share."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from formats.disk.safetensors import Fragment
from formats.errors import SourceError, UnsupportedError

FACTORS = ("F32", "BF16")
"""Floating point types of scales of which products are read as BF16."""
KEEP = "--verbatim carries every tensor as it is, in Hugging Face"


def scales_of(fragments: Mapping[str, Fragment], name: str, elements: Fragment, key: str) -> Fragment:
    """The scales of a tensor.

    Args:
        fragments: the tensors of all files, by key.
        name: the key of the scales.
        elements: the quantized elements.
        key: the key of the elements.

    Raises:
        SourceError: no file holds the scales.
        UnsupportedError: scales or elements are not row-major.
    """
    if name not in fragments:
        raise SourceError(f"{elements.path} holds {key}, and no file its {name}")
    for fragment, of in ((elements, key), (fragments[name], name)):
        if not fragment.row_major:
            raise UnsupportedError(f"{fragment.path}: {of} is not row-major: strides {list(fragment.strides)}", KEEP)
    return fragments[name]


def require_floats(scales: Fragment, name: str, types: Collection[str] = FACTORS) -> None:
    """Refuse scales that are in none of some types, with which products are rounded only once.

    Raises:
        UnsupportedError: the scales are of another type.
    """
    if scales.dtype not in types:
        raise UnsupportedError(f"{scales.path}: {name} is {scales.dtype}, not {' or '.join(types)}", KEEP)


def require_grid(scales: Fragment, name: str, dtype: str, shape: tuple[int, ...]) -> None:
    """Refuse scales without the element type and the shape that the quantized elements imply.

    Raises:
        SourceError: type or shape differ.
    """
    if (scales.dtype, scales.shape) != (dtype, shape):
        raise SourceError(
            f"{scales.path}: {name} is {scales.dtype}{list(scales.shape)}, its elements imply {dtype}{list(shape)}"
        )
