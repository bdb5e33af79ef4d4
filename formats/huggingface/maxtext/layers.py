"""The layers of a MaxText array: which of them it holds, and along which dimension.

Scanned layers (`scan_layers`) share arrays, which stack the blocks that the scan runs through along their second
dimension (`param_scan_axis: 1`). A block is a layer, or one period of a decoder whose layers alternate:

    decoder.layers.mlp.wo.kernel                       a block is a layer
    decoder.layers.mlp_local.wo.kernel                 Gemma 2: a block is a layer with a window and one without
    decoder.layers.layers_3.mlp.wo.kernel              Gemma 3: the fourth of the six layers of a block
    decoder.layers_remainder.layers_1.mlp.wo.kernel    Gemma 3: the second of the layers after the last whole block
    decoder.layers_7.mlp.wo.kernel                     not scanned: of block 7, which in Gemma 3 is a layer

Facts: maxtext 0.2.5 (PyPI), layers/nnx_decoders.py (`_init_scanned_layers`, `_init_sequential_generic`),
models/gemma2.py, models/gemma3.py (`Gemma3ScannableBlock`).
"""

from __future__ import annotations

import re
from typing import NamedTuple

from formats.disk.chunks import Array, Store
from formats.errors import SourceError
from formats.huggingface.maxtext.orbax import tensor_of
from formats.layout.pieces import Scattered, unstack
from formats.model.spec import ModelSpec

STACK = 1
"""The dimension of a stacked array that counts its blocks (`param_scan_axis`)."""
INNER = {"local": 0, "global": 1}
"""The place in a block of a layer that has a name there; others have a number."""


class Blocks(NamedTuple):
    """Arrays of blocks of layers.

    Attributes:
        pattern: the name of such an array. Groups: `block`, the number of the block, without which the array stacks all
            blocks; `inner`, the place of the layer in its block; `head` and `tail`, what the name of a layer keeps.
        period: the number of layers in a block; where layers have windows, the last one of a block has none.
        rest: whether the layers are those after the last whole block.
    """

    pattern: re.Pattern[str]
    period: int = 1
    rest: bool = False


PLAIN = (Blocks(re.compile(r"decoder\.layers\.(?P<tail>.+)")),)
PAIR = r"decoder\.layers(?:_(?P<block>\d{1,6}))?\.(?P<head>\w+)_(?P<inner>local|global)(?P<tail>\..+)"
SIX = r"decoder\.layers\.layers_(?P<inner>[0-5])\.(?P<tail>.+)"
REST = r"decoder\.layers_remainder\.layers_(?P<inner>[0-4])\.(?P<tail>.+)"
BLOCKS = {
    "gemma2": (Blocks(re.compile(PAIR), 2),),
    "gemma3_text": (Blocks(re.compile(SIX), 6), Blocks(re.compile(REST), 6, rest=True)),
}
"""Family: the names of its arrays of several layers, where a block is not a layer."""


def by_layer(key: str, name: str, array: Array, store: Store, spec: ModelSpec) -> dict[str, Scattered]:
    """Return the tensors of an array by name, each of one layer, which its name numbers: `decoder.layers_7.…`.

    Args:
        key: the name of the parameter.
        name: the name of the array in the store.
        array: the metadata of the array.
        store: where the array is stored.
        spec: the model of the config.

    Raises:
        SourceError: the array has another number of layers than the config.
    """
    matches = ((blocks, blocks.pattern.fullmatch(key)) for blocks in BLOCKS.get(spec.family, PLAIN))
    blocks, match = next(((of, found) for of, found in matches if found), (PLAIN[0], None))
    if match is None:
        return {key: tensor_of(store, name, array)}
    groups = match.groupdict("")
    inner = groups.get("inner", "")
    place = INNER[inner] if inner in INNER else int(inner or 0)
    rest, whole = groups.get("head", "") + groups["tail"], spec.layers // blocks.period
    if blocks.rest or groups.get("block"):
        layer = blocks.period * (whole if blocks.rest else int(groups["block"])) + place
        return {f"decoder.layers_{layer}.{rest}": tensor_of(store, name, array)}
    if len(array.shape) <= STACK or array.shape[STACK] != whole:
        raise SourceError(
            f"{store.folder}: {key} {list(array.shape)} should have the {_counted(spec, blocks)} of the config along "
            "its second dimension",
            "check that the config belongs to these weights; another param_scan_axis than 1 is not read",
        )
    parts = unstack(tensor_of(store, name, array, STACK), STACK)
    return {f"decoder.layers_{blocks.period * block + place}.{rest}": part for block, part in enumerate(parts)}


def _counted(spec: ModelSpec, blocks: Blocks) -> str:
    whole = spec.layers // blocks.period
    return f"{spec.layers} layers" if blocks.period == 1 else f"{whole} blocks of {blocks.period} layers"
