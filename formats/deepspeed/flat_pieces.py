"""Pieces of parameters that are intervals of a flat group, and the parameters made of them."""

from __future__ import annotations

from math import prod

from formats.disk.safetensors import DTYPES, Fragment
from formats.layout.columns import Cut, Piece
from formats.layout.pieces import Scattered, from_pieces, whole_part


def flat_piece(flat: Fragment, at: int, low: int, high: int) -> Piece:
    """The piece with the elements [low, high) of a parameter, which begin at element `at` of a flat group."""
    if flat.scales:
        window = flat._replace(shape=(high - low,), scales=None, pieces=((-at, flat),))
        return Piece(Cut(((low, high),), flat=True), window)
    fragment = flat._replace(offset=flat.offset + at * DTYPES[flat.dtype], shape=(high - low,), strides=(1,))
    return Piece(Cut(((low, high),), flat=True), fragment)


def whole_of(name: str, shape: tuple[int, ...], pieces: list[Piece], like: Fragment) -> Scattered:
    """A parameter made of its pieces; a parameter without elements has one piece, with dtype and file of `like`."""
    if not prod(shape):
        pieces = [Piece(whole_part(shape), like._replace(shape=shape, strides=(1,) * len(shape)))]
    return from_pieces(name, shape, like.dtype, pieces)
