"""What the elements of a quantized weight and their scales have to be, whoever quantized them."""

from __future__ import annotations

from collections.abc import Mapping

from formats.disk.safetensors import Fragment
from formats.errors import SourceError, UnsupportedError

FACTORS = ("F32", "BF16")
"""Element types of scales in floats. The products with those of F16 are rounded to F16, which BF16 cannot hold."""
KEEP = "--verbatim carries every tensor as it is, in Hugging Face"


def scales_of(fragments: Mapping[str, Fragment], name: str, elements: Fragment, key: str) -> Fragment:
    """The scales of a tensor.

    Args:
        fragments: the tensors of all files, by key.
        name: the key of the scales.
        elements: the quantized elements.
        key: their key.

    Raises:
        SourceError: no file holds them.
        UnsupportedError: they or the elements are not row-major.
    """
    if name not in fragments:
        raise SourceError(f"{elements.path} holds {key}, and no file its {name}")
    for fragment, of in ((elements, key), (fragments[name], name)):
        if not fragment.row_major:
            raise UnsupportedError(f"{fragment.path}: {of} is not row-major: strides {list(fragment.strides)}", KEEP)
    return fragments[name]


def require_floats(scales: Fragment, name: str) -> None:
    """Scales are in a type whose products BF16 rounds once.

    Raises:
        UnsupportedError: they are in another one.
    """
    if scales.dtype not in FACTORS:
        raise UnsupportedError(f"{scales.path}: {name} is {scales.dtype}, not {' or '.join(FACTORS)}", KEEP)


def require_grid(scales: Fragment, name: str, dtype: str, shape: tuple[int, ...]) -> None:
    """Scales have the element type and the shape that the elements imply.

    Raises:
        SourceError: they have not.
    """
    if (scales.dtype, scales.shape) != (dtype, shape):
        raise SourceError(
            f"{scales.path}: {name} is {scales.dtype}{list(scales.shape)}, its elements imply {dtype}{list(shape)}"
        )
