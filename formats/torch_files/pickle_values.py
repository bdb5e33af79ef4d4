"""The values in a pickle of a checkpoint, as inert data, and the writer of such pickles."""

from __future__ import annotations

import io
import struct
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

# --- what a pickle can hold ------------------------------------------------------------------------------------------

STORAGES = {
    "DoubleStorage": "F64", "FloatStorage": "F32", "HalfStorage": "F16", "BFloat16Storage": "BF16",
    "LongStorage": "I64", "IntStorage": "I32", "ShortStorage": "I16", "CharStorage": "I8",
    "ByteStorage": "U8", "BoolStorage": "BOOL", "UntypedStorage": "U8",
}  # fmt: skip
"""Storage class of torch (torch/storage.py, 2.13): the safetensors name of its element type."""

DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "uint16": "U16", "uint32": "U32", "uint64": "U64",
}  # fmt: skip
"""Name of a torch dtype in a pickle: the safetensors name of the element type."""


@dataclass(frozen=True, slots=True)
class Dtype:
    """A `torch.dtype`, by its name."""

    name: str


@dataclass(frozen=True, slots=True)
class StorageRef:
    """A storage whose bytes are elsewhere in the file, under `key`."""

    dtype: str
    key: str
    numel: int


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A view of a storage: offset, shape and strides in elements."""

    storage: StorageRef
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str


class Namespace:
    """An `argparse.Namespace`: read its attributes with `vars`."""

    def __init__(self, attributes: Mapping[str, Any], /) -> None:
        self.__dict__.update(attributes)


@dataclass(eq=False, slots=True)
class Opaque:
    """A global of an unknown kind, with the arguments and the state that the pickle gives it: inert data.

    `filled` specifies that the pickle also gives it entries of a list or a map, which are not kept.
    """

    module: str
    name: str
    args: tuple[Any, ...] = ()
    state: Any = None
    filled: bool = False

    def __repr__(self) -> str:
        return f"<{self.module}.{self.name}>"


# --- writing ---------------------------------------------------------------------------------------------------------

STORAGE_OF = {dtype: name for name, dtype in reversed(STORAGES.items())}
"""Element type that can be written: its storage class."""

ENUMS = {
    ("megatron.core.enums", "ModelType"),
    ("megatron.core.transformer.enums", "AttnBackend"),
    ("megatron.enums", "PositionEmbeddingType"),
    ("signal", "Signals"),
}
"""Enums whose members are carried over in `args`. Any other opaque value is left out, because it might run code."""


DCP = "torch.distributed.checkpoint.metadata"
OBJECTS = {
    (DCP, "Metadata"), (DCP, "TensorStorageMetadata"), (DCP, "ChunkStorageMetadata"), (DCP, "TensorProperties"),
    (DCP, "MetadataIndex"), (DCP, "BytesStorageMetadata"), ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("deepspeed.checkpoint.universal_checkpoint", "SubparamShape"),
}  # fmt: skip
"""Classes of torch and DeepSpeed whose instances are written as their state."""

CALLS = {("torch", "Size"), ("torch.serialization", "_get_layout"), (DCP, "_MEM_FORMAT_ENCODING")}
"""Functions of torch that are written as a call."""


def is_plain(value: Any, depth: int = 8) -> bool:
    """Whether a value is plain enough to be carried over: data, dtypes, and members of known enums."""
    match value:
        case Opaque():
            plain = len(value.args) == 1 and type(value.args[0]) is int
            return (value.module, value.name) in ENUMS and plain and value.state is None and not value.filled
        case str():
            return not any("\ud800" <= part <= "\udfff" for part in value)
        case dict():
            inner = [*value.keys(), *value.values()]
        case list() | tuple():
            inner = list(value)
        case int():
            return value.bit_length() < 2000
        case _:
            return value is None or isinstance(value, float) or (isinstance(value, Dtype) and value.name in DTYPES)
    return depth > 0 and len(inner) <= 10_000 and all(is_plain(part, depth - 1) for part in inner)


def dumps(value: Any) -> bytes:
    """Pickle plain data, tensor references and namespaces (protocol 2, as `torch.save` does)."""
    writer = _Writer()
    writer.emit(value)
    return b"\x80\x02" + writer.out.getvalue() + b"."


class _Writer:
    """Writes values; a global or a fixed text is written once and then referred to."""

    def __init__(self) -> None:
        self.out = io.BytesIO()
        self.memo: dict[bytes, int] = {}

    def once(self, code: bytes) -> None:
        """Write code that pushes a constant, or fetch the constant from the memo if it was written before."""
        if code in self.memo:
            self.out.write(b"h" + bytes([self.memo[code]]))
            return
        self.memo[code] = len(self.memo)
        self.out.write(code + b"q" + bytes([self.memo[code]]))

    def emit(self, value: Any) -> None:
        """Write a value."""
        write = self.out.write
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
                self.emit_all(b"(", value, b"t")
            case list():
                self.emit_all(b"](", value, b"e")
            case Mapping():
                if isinstance(value, OrderedDict):
                    self.once(b"ccollections\nOrderedDict\n")
                    write(b")R")
                else:
                    write(b"}")
                self.emit_all(b"(", [item for pair in value.items() for item in pair], b"u")
            case Dtype() if value.name in DTYPES:
                self.once(f"ctorch\n{value.name}\n".encode())
            case Namespace():
                self.once(b"cargparse\nNamespace\n")
                write(b")\x81")
                self.emit(vars(value))
                write(b"b")
            case TensorRef():
                self.once(b"ctorch._utils\n_rebuild_tensor_v2\n")
                write(b"((")
                self.once(b"X\x07\x00\x00\x00storage")
                self.once(f"ctorch\n{STORAGE_OF[value.dtype]}\n".encode())
                self.emit_all(b"", (value.storage.key, "cpu", value.storage.numel), b"tQ")
                self.emit_all(b"", (value.offset, value.shape, value.strides, False, OrderedDict()), b"tR")
            case Opaque():
                self.emit_opaque(value)
            case _:
                raise TypeError(f"cannot pickle {value!r}")

    def emit_opaque(self, value: Opaque) -> None:
        """Write an object of a known class as its state, or a known call."""
        name = (value.module, value.name)
        if name not in OBJECTS and name not in CALLS and not is_plain(value):
            raise TypeError(f"cannot pickle {value!r}")
        self.once(f"c{value.module}\n{value.name}\n".encode())
        if name in OBJECTS:
            self.out.write(b")\x81")
            self.emit(value.state)
            self.out.write(b"b")
        else:
            self.emit(value.args)
            self.out.write(b"R")

    def emit_all(self, before: bytes, values: Iterable[Any], after: bytes) -> None:
        """Write values between two opcodes."""
        self.out.write(before)
        for value in values:
            self.emit(value)
        self.out.write(after)
