"""Pickles that are parsed and never executed, and the one fixed pickle that we write.

A `torch.save` file is a pickle, and unpickling can run any code. Here every global that a pickle names becomes inert
data: either one of the few plain values below, or an `Opaque` that only remembers its name and arguments. Nothing is
imported and nothing is called, whatever the file says. A linear scan of the opcodes comes first and turns absurd
lengths and memo indices into an error before any memory is spent on them.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from formats.errors import SourceError

# --- what a pickle can hold ------------------------------------------------------------------------------------------

STORAGES = {
    "DoubleStorage": "F64", "FloatStorage": "F32", "HalfStorage": "F16", "BFloat16Storage": "BF16",
    "LongStorage": "I64", "IntStorage": "I32", "ShortStorage": "I16", "CharStorage": "I8",
    "ByteStorage": "U8", "BoolStorage": "BOOL", "UntypedStorage": "U8",
}  # fmt: skip
"""Storage classes of torch (torch/storage.py, 2.13) and the safetensors name of their element type."""

DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "uint16": "U16", "uint32": "U32", "uint64": "U64",
}  # fmt: skip
"""torch dtypes by their name in a pickle, and the safetensors name of each."""


@dataclass(frozen=True)
class Dtype:
    """A `torch.dtype`, by its name."""

    name: str


@dataclass(frozen=True)
class StorageRef:
    """A storage that lies elsewhere in the file, under `key`."""

    dtype: str
    key: str
    numel: int


@dataclass(frozen=True)
class TensorRef:
    """A view of a storage: offset, shape and strides in elements."""

    storage: StorageRef
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str


class Namespace:
    """An `argparse.Namespace`: read its attributes with `vars`."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


class Opaque:
    """A global of an unknown kind with the arguments it was given. It is data and does nothing."""

    module = ""
    name = ""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    state: Any
    entries: list[Any]

    def __new__(cls, *args: Any, **kwargs: Any) -> Opaque:
        """Remember the arguments."""
        self = object.__new__(cls)
        self.args = args
        self.kwargs = kwargs
        self.state = None
        self.entries = []
        return self

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def append(self, entry: Any) -> None:
        """Remember an element that the pickle appends."""
        self.entries.append(entry)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.entries.append((key, value))

    def __repr__(self) -> str:
        return f"<{self.module}.{self.name}>"


# --- reading ---------------------------------------------------------------------------------------------------------

_FIXED = {
    **dict.fromkeys(b"(.012N]})ael\x85\x86\x87tdsuRbQ\x81\x92\x93\x94\x88\x89\x8f\x90\x91", 0),
    **dict.fromkeys(b"Khq\x80", 1), ord("M"): 2, **dict.fromkeys(b"Jj", 4), **dict.fromkeys(b"G\x95", 8),
}  # fmt: skip
_COUNTED = {
    **dict.fromkeys(b"\x8cCU\x8a", "<B"),
    **dict.fromkeys(b"XBT\x8b", "<I"),
    **dict.fromkeys(b"\x8d\x8e\x96", "<Q"),
}
_LINES = {**dict.fromkeys(b"IFLSVgpP", 1), ord("c"): 2}
_MEMO_PUT = ord("r")


def scan(data: bytes, name: str) -> None:
    """Check a pickle's opcodes and lengths without unpickling it.

    Raises:
        SourceError: an opcode that no checkpoint needs (extension registry, out-of-band buffers, old-style
            instances), a length past the end, a memo index that could only serve to exhaust memory, or no end.
    """
    position, end = 0, len(data)
    while position < end:
        code = data[position]
        position += 1
        fixed = _FIXED.get(code)
        if fixed is not None:
            position += fixed
            if code == 0x2E and position <= end:
                return
        elif code in _COUNTED:
            width = struct.calcsize(_COUNTED[code])
            if position + width > end:
                break
            position += width + struct.unpack_from(_COUNTED[code], data, position)[0]
        elif code in _LINES:
            for _ in range(_LINES[code]):
                position = data.find(b"\n", position) + 1 or end + 1
        elif code == _MEMO_PUT and position + 4 <= end:
            if struct.unpack_from("<I", data, position)[0] > end:
                raise SourceError(f"{name}: the pickle asks for an absurd memo index at byte {position - 1}")
            position += 4
        else:
            raise SourceError(
                f"{name}: the pickle holds opcode 0x{code:02x} at byte {position - 1}, which no checkpoint needs"
            )
    raise SourceError(f"{name}: the pickle is cut off after {end} bytes")


def _rebuild_tensor(storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> TensorRef:
    if not isinstance(storage, StorageRef):
        raise SourceError("a tensor in the pickle has no storage")
    numbers = (offset, *shape, *strides)
    if not all(type(n) is int and n >= 0 for n in numbers) or len(shape) != len(strides):
        raise SourceError(f"a tensor in the pickle has offset {offset!r}, shape {shape!r}, strides {strides!r}")
    return TensorRef(storage, offset, tuple(shape), tuple(strides), storage.dtype)


def _rebuild_tensor_v3(storage: Any, offset: Any, shape: Any, strides: Any, *rest: Any) -> TensorRef:
    dtype = rest[2] if len(rest) > 2 else None
    ref = _rebuild_tensor(storage, offset, shape, strides)
    if not isinstance(dtype, Dtype) or dtype.name not in DTYPES:
        raise SourceError(f"a tensor in the pickle has the unknown dtype {dtype!r}")
    return TensorRef(ref.storage, ref.offset, ref.shape, ref.strides, DTYPES[dtype.name])


_PLAIN: dict[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _rebuild_tensor_v3,
    ("torch._utils", "_rebuild_parameter"): lambda data, *_: data,
    ("torch", "Size"): lambda sizes=(): tuple(sizes),
    ("torch.serialization", "_get_layout"): lambda name: name,
    ("collections", "OrderedDict"): OrderedDict,
    ("argparse", "Namespace"): Namespace,
    ("_codecs", "encode"): lambda text, _: text.encode("latin1"),
    ("builtins", "set"): set,
    ("__builtin__", "set"): set,
}


@lru_cache(maxsize=4096)
def _opaque(module: str, name: str) -> type[Opaque]:
    return type("Opaque", (Opaque,), {"module": module, "name": name})


class _Inert(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _PLAIN:
            return _PLAIN[module, name]
        if module in ("torch", "torch.storage") and name in STORAGES:
            return STORAGES[name]
        if module == "torch" and name in DTYPES:
            return Dtype(name)
        return _opaque(module, name)

    def persistent_load(self, identifier: Any) -> StorageRef:
        match identifier:
            case ("storage", str(dtype), str(key), _, int(numel), *_) if numel >= 0:
                return StorageRef(dtype, key, numel)
        raise SourceError(f"the pickle refers to {str(identifier)[:80]!r}, which is no storage of a known type")


def loads(data: bytes, name: str) -> Any:
    """Unpickle inertly.

    Args:
        data: the pickle.
        name: what to call it in an error.

    Raises:
        SourceError: the pickle is damaged, or is none.
    """
    scan(data, name)
    try:
        return _Inert(io.BytesIO(data), encoding="latin1").load()
    except SourceError as error:
        raise SourceError(f"{name}: {error}") from None
    except Exception as error:  # noqa: BLE001  damaged bytes can raise anything
        raise SourceError(f"{name}: the pickle is damaged ({type(error).__name__}: {str(error)[:120]})") from None


# --- writing ---------------------------------------------------------------------------------------------------------

STORAGE_OF = {dtype: name for name, dtype in reversed(STORAGES.items())}
"""The storage class of each element type that can be written."""

_KEPT = ("megatron.core.enums", "megatron.core.transformer.enums", "signal")
"""Modules whose enum members may travel on in `args`. Any other opaque value is left out: it might run code."""


def keeps(value: Any) -> bool:
    """Whether `dumps` can write a value. Opaque values can travel only as members of known enums."""
    match value:
        case Opaque():
            plain = len(value.args) == 1 and isinstance(value.args[0], int | str) and not value.kwargs
            return value.module in _KEPT and plain and value.state is None and not value.entries
        case Mapping():
            return all(keeps(key) and keeps(inner) for key, inner in value.items())
        case list() | tuple():
            return all(keeps(inner) for inner in value)
        case _:
            return value is None or isinstance(value, bool | int | float | str | Dtype | TensorRef | Namespace)


def dumps(value: Any) -> bytes:
    """Pickle plain data, tensor references and namespaces (protocol 2, as `torch.save` does)."""
    out = io.BytesIO()
    out.write(b"\x80\x02")
    _emit(value, out.write)
    out.write(b".")
    return out.getvalue()


def _emit(value: Any, write: Any) -> None:
    match value:
        case None:
            write(b"N")
        case bool():
            write(b"\x88" if value else b"\x89")
        case int():
            if -(2**31) <= value < 2**31:
                write(b"J" + struct.pack("<i", value))
            else:
                body = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
                write(b"\x8a" + bytes([len(body)]) + body)
        case float():
            write(b"G" + struct.pack(">d", value))
        case str():
            body = value.encode()
            write(b"X" + struct.pack("<I", len(body)) + body)
        case tuple():
            write(b"(")
            for inner in value:
                _emit(inner, write)
            write(b"t")
        case list():
            write(b"](")
            for inner in value:
                _emit(inner, write)
            write(b"e")
        case Mapping():
            write(b"ccollections\nOrderedDict\n)R(" if isinstance(value, OrderedDict) else b"}(")
            for key, inner in value.items():
                _emit(key, write)
                _emit(inner, write)
            write(b"u")
        case Dtype():
            write(f"ctorch\n{value.name}\n".encode())
        case Namespace():
            write(b"cargparse\nNamespace\n)\x81")
            _emit(vars(value), write)
            write(b"b")
        case TensorRef():
            write(
                f"ctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\n{STORAGE_OF[value.dtype]}\n".encode()
            )
            for inner in (value.storage.key, "cpu", value.storage.numel):
                _emit(inner, write)
            write(b"tQ")
            for inner in (value.offset, value.shape, value.strides, False, OrderedDict()):
                _emit(inner, write)
            write(b"tR")
        case Opaque() if keeps(value):
            write(f"c{value.module}\n{value.name}\n".encode())
            _emit(value.args, write)
            write(b"R")
        case _:
            raise TypeError(f"cannot pickle {value!r}")
