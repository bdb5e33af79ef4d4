"""Weights that llm-compressor quantized (`quant_method: compressed-tensors`), read as BF16 or F16.

    X.weight_packed  X.weight_scale  X.weight_shape           pack-quantized: integers of 4 or 8 bits in words of 32
    X.weight_packed  X.weight_scale  X.weight_global_scale    nvfp4-pack-quantized: two elements a byte
    X.weight_packed  X.weight_scale                           mxfp4-pack-quantized
    X.weight         X.weight_scale                           int-, float-, naive- and mxfp8-quantized

Facts: compressed-tensors 0.20.0. `compressors/*/base.py` (`decompress`) has the names; `pack_quantized/helpers.py` the
order: the first element in the lowest bits, integers with half their range added; a row whose last word is in part
padding has the columns that `weight_shape` says (`unpack_from_int32`). `_dequantize` of
`quantization/lifecycle/forward_helpers.py` multiplies in the type of the scale, and divides it by the global one
before, in float32. The grid of the scales follows from `strategy` (`quantization/quant_args.py`). transformers 5.23.0
calls the same code (integrations/compressed_tensors.py, `dequantize=True`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from formats.disk.safetensors import Fragment, Scales, read_bytes, row_major
from formats.errors import SourceError, UnsupportedError, short
from formats.huggingface.scales import FACTORS, KEEP, require_floats, require_grid, scales_of

METHOD = "compressed-tensors"


class WeightFormat(NamedTuple):
    """How a format of compressed-tensors stores weights of a type.

    Attributes:
        method: how an element is coded.
        elements: the last part of the key of the quantized elements, after the name of the module.
        dtype: the element type of that tensor.
        per: how many weights an element of that tensor holds.
        scales: the element type of the scales; None for a floating point type.
    """

    method: str
    elements: str
    dtype: str
    per: int = 1
    scales: str | None = None


NVFP4 = "NVFP4"
HALF = "F16"
"""The type of scales of which products are read as that type, in which compressed-tensors multiplies too."""
FORMATS = {
    ("pack-quantized", "int", 4): WeightFormat("INT4", "weight_packed", "I32", 8),
    ("pack-quantized", "int", 8): WeightFormat("INT8 in words", "weight_packed", "I32", 4),
    ("int-quantized", "int", 8): WeightFormat("INT8", "weight", "I8"),
    ("naive-quantized", "int", 8): WeightFormat("INT8", "weight", "I8"),
    ("float-quantized", "float", 8): WeightFormat("FP8", "weight", "F8_E4M3"),
    ("naive-quantized", "float", 8): WeightFormat("FP8", "weight", "F8_E4M3"),
    ("mxfp8-quantized", "float", 8): WeightFormat("MXFP8", "weight", "F8_E4M3", scales="U8"),
    ("nvfp4-pack-quantized", "float", 4): WeightFormat(NVFP4, "weight_packed", "U8", 2, "F8_E4M3"),
    ("mxfp4-pack-quantized", "float", 4): WeightFormat("MXFP4", "weight_packed", "U8", 2, "U8"),
}
"""Format, type and bits of the weights: how they are stored."""
INTEGERS = ("I64", "I32")
SCALE, GLOBAL, SHAPE = "weight_scale", "weight_global_scale", "weight_shape"
ACTIVATIONS = tuple(
    f".{name}" for name in ("input_scale", "input_global_scale", "output_scale", "q_scale", "k_scale", "v_scale")
)
"""Ends of the keys of scales that belong to activations or to the KV cache, and not to a weight."""
FREE = {
    "config_groups", "format", "ignore", "kv_cache_scheme", "quant_method", "quantization_status", "version",
    "global_compression_ratio", "dequantize", "run_compressed", "use_optimized_inference",
}  # fmt: skip
"""Keys of a quantization_config that are read here, or do not affect weights. Other keys may rotate weights."""
SPARSITY = "sparsity_config"
"""The key for how the zeros of pruned weights are stored. Format `dense` stores all of them, whatever its other keys
(compressed-tensors `config/dense.py`; `ModelCompressor.from_compression_config` does not read it)."""
ARGUMENTS = {
    "num_bits", "type", "strategy", "group_size", "block_structure", "symmetric", "dynamic", "actorder",
    "observer", "observer_kwargs", "scale_dtype", "zp_dtype",
}  # fmt: skip
"""Keys of a group's `weights` that are read here, or do not affect weights."""


class Scheme(NamedTuple):
    """How the weights of a model are quantized.

    Attributes:
        stored: how the weights are stored.
        block: the numbers of rows and of columns that share a scale; None where all of them do.
    """

    stored: WeightFormat
    block: tuple[int | None, int | None]


def scheme_of(quantization: Mapping[Any, Any]) -> Scheme:
    """The quantization scheme in the quantization_config of a model.

    Raises:
        UnsupportedError: there are several schemes, or an unknown one; the message lacks the name of the file, which
            the caller puts before it.
    """
    for key in quantization.keys() - FREE:
        dense = key == SPARSITY and isinstance(quantization[key], dict) and quantization[key].get("format") == "dense"
        if quantization[key] and not dense:
            raise UnsupportedError(f"a {METHOD} model with {key} = {short(quantization[key])} is not supported", KEEP)
    match quantization:
        case {"config_groups": {**groups}, "format": str(form)} if groups:
            schemes = {_scheme(group, form) for group in groups.values()}
        case _:
            raise UnsupportedError(f"a {METHOD} model without a format and groups is not supported", KEEP)
    if len(schemes) > 1:
        names = " and ".join(sorted(scheme.stored.method for scheme in schemes))
        raise UnsupportedError(f"a {METHOD} model with weights of several kinds ({names}) is not supported", KEEP)
    return schemes.pop()


def _scheme(group: object, form: str) -> Scheme:
    match group:
        case {"weights": {"num_bits": int(bits), "type": str(kind), **rest}, **others}:
            form = str(others.get("format") or form)
        case _:
            raise UnsupportedError(f"{METHOD}: a group without weights is not supported", KEEP)
    stored = FORMATS.get((form, kind.lower(), bits))
    if stored is None:
        raise UnsupportedError(f"{METHOD}: {form} with weights of type {kind} and {bits} bits is not supported", KEEP)
    only: dict[str, tuple[Any, ...]] = {
        "symmetric": (True,), "dynamic": (False,), "actorder": (None, False, "weight", "static")
    }  # fmt: skip
    unknown = {key: value for key, value in rest.items() if key not in ARGUMENTS and value}
    wrong = unknown | {key: rest[key] for key, values in only.items() if key in rest and rest[key] not in values}
    for key, value in wrong.items():
        raise UnsupportedError(f"{METHOD}: weights with {key} = {short(value)} are not supported", KEEP)
    return Scheme(stored, _block(rest))


def _block(weights: Mapping[Any, Any]) -> tuple[int | None, int | None]:
    """The numbers of rows and of columns that share a scale, None for all.

    Without a strategy the size of a group tells the strategy (`validate_model_after`).
    """
    size = weights.get("group_size")
    strategy = weights.get("strategy") or {None: "tensor", -1: "channel"}.get(size, "group")
    match strategy, size, weights.get("block_structure"):
        case "tensor", _, _:
            return None, None
        case "channel", _, _:
            return 1, None
        case (("group" | "tensor_group"), int(), _) if size > 0:
            return 1, size
        case "block", _, [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
    raise UnsupportedError(f"{METHOD}: scales by {strategy} of {short(size)} are not supported", KEEP)


def dequantized(fragments: Mapping[str, Fragment], scheme: Scheme) -> dict[str, Fragment]:
    """The tensors of a quantized model with its weights read as BF16 or F16; scales of activations are left out.

    Raises:
        SourceError: scales are missing, or their shape does not fit the elements that they belong to.
        UnsupportedError: scales belong to weights of another type, or rows end within a group.
    """
    stored = scheme.stored
    weights: dict[str, Fragment] = {}
    column_counts: dict[tuple[str, tuple[int, ...]], int] = {}
    for key, fragment in fragments.items():
        module, _, kind = key.rpartition(".")
        elements = fragments.get(f"{module}.{stored.elements}")
        if elements and kind in (SCALE, GLOBAL, SHAPE):
            if elements.dtype != stored.dtype:
                raise UnsupportedError(f"{fragment.path} holds {key} for {elements.dtype}, not {stored.dtype}", KEEP)
            if kind == GLOBAL and stored.method != NVFP4:
                raise UnsupportedError(f"{fragment.path} holds {key}, which {stored.method} has no use for", KEEP)
        elif kind == stored.elements and fragment.dtype == stored.dtype:
            if kind != "weight" and f"{module}.weight" in fragments:
                raise SourceError(f"{fragment.path} holds {key}, and {module}.weight is there too")
            weights[f"{module}.weight"] = _weight(fragments, module, fragment, scheme, column_counts)
        elif not key.endswith(ACTIVATIONS):
            weights[key] = fragment
    return weights


def _weight(
    fragments: Mapping[str, Fragment],
    module: str,
    elements: Fragment,
    scheme: Scheme,
    column_counts: dict[tuple[str, tuple[int, ...]], int],
) -> Fragment:
    """The matrix of a module, as floats: its quantized elements, with their scales.

    `column_counts` has the columns of the matrices before it, by kind of module and shape.
    """
    stored, key, name = scheme.stored, f"{module}.{scheme.stored.elements}", f"{module}.{SCALE}"
    if len(elements.shape) != 2:
        raise UnsupportedError(f"{elements.path}: {key} is {stored.dtype}{list(elements.shape)}, no matrix", KEEP)
    factors = scales_of(fragments, name, elements, key)
    if stored.scales is None:
        require_floats(factors, name, (*FACTORS, HALF))
    rows, columns = elements.shape[0], elements.shape[1] * stored.per
    record = fragments.get(f"{module}.{SHAPE}")
    if record is not None and (record.dtype not in INTEGERS or record.shape != (2,)):
        raise SourceError(
            f"{record.path}: {module}.{SHAPE} is {record.dtype}{list(record.shape)}, no number of rows and of columns"
        )
    kind = module.rpartition(".")[2], elements.shape
    if record is not None and kind not in column_counts:  # of the others it is compared when they are read
        column_counts[kind] = _columns(record, columns, stored.per)
    shape = rows, columns if record is None else column_counts[kind]
    high, wide = (size or max(whole, 1) for size, whole in zip(scheme.block, (rows, columns), strict=True))
    grid = (-(-rows // high), -(-columns // wide))
    if scheme.block != (None, None) or factors.shape not in ((), (1,)):
        if stored.per > 1 and columns % wide:
            raise UnsupportedError(f"{elements.path}: rows of {key} end within a group of {wide}", KEEP)
        if shape[1] != columns and scheme.block[1] is not None:
            reason = (
                f"rows of {key}, of {shape[1]} columns, end within a word of {stored.per}, and scales are by groups"
            )
            raise UnsupportedError(f"{elements.path}: {reason}", KEEP)
        require_grid(factors, name, stored.scales or factors.dtype, grid)
    whole = None
    if stored.method == NVFP4:
        whole = scales_of(fragments, f"{module}.{GLOBAL}", elements, key)
        require_grid(whole, f"{module}.{GLOBAL}", "F32", (1,))
    strides, block = row_major((rows, columns)), (min(high, max(rows, 1)), min(wide, max(columns, 1)))
    if high == 1 and columns % wide == 0:  # the matrix as one row, with one row of scales: read with fewer calls
        rows, columns = 1, rows * columns
    scales = Scales(stored.method, factors, block, rows, columns, name, whole, record and (record, shape, key))
    dtype = HALF if factors.dtype == HALF else "BF16"
    return elements._replace(dtype=dtype, shape=shape, strides=strides, scales=scales)


def _columns(record: Fragment, columns: int, per: int) -> int:
    """The columns that a file says, where its last word of a row can be in part padding; else those of all words."""
    recorded = int.from_bytes(read_bytes(record.path, record.offset, record.nbytes)[record.nbytes // 2 :], "little")
    return recorded if 0 <= columns - recorded < per else columns
