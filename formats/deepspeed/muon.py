"""DeepSpeed's Muon in ZeRO: its parameter groups in torch's form, and where the momentum of a matrix is stored.

    {"use_muon": True, "lr", "momentum", "weight_decay", "ns_method": "gram" | "standard"}    a group of matrices
    {"use_muon": False, "lr", "betas", "eps", "weight_decay", …}                              an AdamW of all else

In stages 1 and 2 a rank has the whole momentum of each matrix of which it has a part, concatenated in the order of the
flat group: two ranks that share a matrix both have its whole momentum, identical. In stage 3 and in BF16_Optimizer the
momentum is sharded as the weights are. Both methods compute the five Newton-Schulz steps of torch's Muon
(`adjust_lr_fn` "original"), `gram` in another order of products and in float16. Of a parameter [expert, out, in] both
orthogonalize each expert's matrix by itself. `per_head_muon` orthogonalizes head by
head; only the configuration of the training records that.

Facts: deepspeed 0.19.8 runtime/zero/muon, runtime/engine.py `_muon_param_groups`, runtime/zero/stage_1_and_2.py
`get_partition_info` and `_muon_momentum_buffer`, runtime/zero/stage3.py, runtime/bf16_optimizer.py
`_prepare_muon_updates`; torch 2.13.0 optim/_muon.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

from formats.deepspeed.optimizer_config import optimizer_in
from formats.disk.safetensors import DTYPES, Fragment, row_major
from formats.errors import SourceError, UnsupportedError, short
from formats.layout.columns import Piece
from formats.layout.pieces import Scattered, from_pieces, whole_part

SIGN = "use_muon"
METHODS = ("gram", "standard")
TORCH = {
    "nesterov": True, "ns_coefficients": (3.4445, -4.775, 2.0315), "eps": 1e-7, "ns_steps": 5,
    "adjust_lr_fn": "original",
}  # fmt: skip
"""The fixed settings of DeepSpeed's Muon, under torch's names."""


def as_torch(group: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return a parameter group of Muon, or of the AdamW beside it, in torch's form; other groups unchanged.

    Raises:
        UnsupportedError: the Newton-Schulz method is unknown.
    """
    if SIGN not in group:
        return group
    rest = {name: value for name, value in group.items() if name not in (SIGN, "ns_method")}
    if not group[SIGN]:
        return {"amsgrad": False, **rest}
    if (method := group.get("ns_method", METHODS[0])) not in METHODS:
        raise UnsupportedError(f"{where} says ns_method = {short(method)}, which is not known")
    return {**rest, **TORCH}


def require_whole_matrices(model: Mapping[str, Any], where: str) -> None:
    """Refuse a training whose Muon orthogonalizes matrices head by head.

    Raises:
        UnsupportedError: the configuration of the training sets `per_head_muon`.
    """
    if optimizer_in(model.get("ds_config"))[1].get("per_head_muon"):
        raise UnsupportedError(
            f"{where} was trained with per_head_muon, which no other Muon has",
            "convert the weights without the optimizer",
        )


def load(
    flats: Sequence[Fragment], size: int, group: Mapping[str, tuple[int, ...]], gaps: Sequence[int]
) -> Iterator[tuple[str, Scattered]]:
    """Yield the momentum of each matrix of a flat group, in stages 1 and 2.

    Args:
        flats: the flat momentum of each rank, in the order of ranks.
        size: how many elements of the flat master weights each rank has, padding among them.
        group: the shape of each matrix, in the order of the group.
        gaps: elements of padding after each matrix.

    Raises:
        SourceError: a rank has more or fewer elements than its matrices.
        UnsupportedError: there is padding between matrices.
    """
    if any(gaps):
        raise UnsupportedError(f"{flats[0].path}: Muon with parameter_alignment is not known")
    pieces: dict[str, list[Piece]] = {name: [] for name in group}
    for rank, flat in enumerate(flats):
        start = at = 0
        for name, shape in group.items():
            stop = start + prod(shape)
            if start < (rank + 1) * size and rank * size < stop:
                offset = flat.offset + at * DTYPES[flat.dtype]
                fragment = flat._replace(offset=offset, shape=shape, strides=row_major(shape))
                pieces[name].append(Piece(whole_part(shape), fragment))
                at += prod(shape)
            start = stop
        if at != flat.shape[0]:
            raise SourceError(
                f"{flat.path} holds {flat.shape[0]} elements of momentum_buffer, and the matrices of which it has a "
                f"part have {at}",
                "files of different runs may be mixed up",
            )
    for name, shape in group.items():
        yield name, from_pieces(name, shape, flats[0].dtype, pieces[name])
