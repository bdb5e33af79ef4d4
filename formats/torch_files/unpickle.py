"""Parses pickles without ever executing them.

A `torch.save` file is a pickle, and unpickling can run any code. The machine below builds plain data only: a global
that a pickle names is one of the few plain values of `_PLAIN`, or an `Opaque` with its name and arguments. Nothing is
imported and nothing that the file names is called. Lengths are checked before memory is allocated for them, and
operations that a few bytes could blow up (copies, nested keys) have a budget.

Facts: Lib/pickletools.py of CPython 3.13 for the opcodes; torch/_utils.py, torch/serialization.py 2.13 for the globals.
"""

from __future__ import annotations

import signal
import struct
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from formats.disk.safetensors import MAX_DIMENSIONS
from formats.errors import SourceError
from formats.torch_files.pickle_values import DTYPES, STORAGES, Dtype, Namespace, Opaque, StorageRef, TensorRef
from formats.torch_files.rows import Bytes, Memo, Reader

_EMPTY = {0x29: tuple, 0x5D: list, 0x7D: dict, 0x8F: set}
_CONSTANTS = {0x4E: None, 0x88: True, 0x89: False}
_U8, _U16, _U32, _U64, _I32 = (struct.Struct(kind) for kind in ("<B", "<H", "<I", "<Q", "<i"))
_NUMBERS = {0x4A: _I32, 0x4B: _U8, 0x4D: _U16, 0x47: struct.Struct(">d")}
_COUNTS = {
    0x58: (_U32, "utf-8"), 0x8C: (_U8, "utf-8"), 0x8D: (_U64, "utf-8"), 0x54: (_U32, "latin-1"), 0x55: (_U8, "latin-1"),
    0x42: (_U32, ""), 0x43: (_U8, ""), 0x8E: (_U64, ""), 0x96: (_U64, ""),
}  # fmt: skip
"""Opcode of a text or of bytes: the format of its length, and the encoding, empty for bytes."""


class _Machine:
    """Runs the opcodes of protocols 2 to 5 over plain data."""

    def __init__(self, data: Bytes, rows: Reader | None) -> None:
        self.data = data
        self.at = 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo = Memo()
        self.budget = len(data)
        self.rows = rows

    def take(self, count: int) -> bytes:
        """The next bytes of the pickle."""
        if count > len(self.data) - self.at:
            raise SourceError(f"the pickle is cut off after {len(self.data)} bytes")
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, kind: struct.Struct) -> Any:
        """The next number of the pickle."""
        self.at += kind.size
        return kind.unpack_from(self.data, self.at - kind.size)[0]

    def line(self) -> str:
        """The next line of the pickle."""
        end = self.data.find(b"\n", self.at)
        if end < 0:
            raise SourceError(f"the pickle is cut off after {len(self.data)} bytes")
        line = self.data[self.at : end].decode()
        self.at = end + 1
        return line

    def since_mark(self) -> list[Any]:
        """Pop the values that were pushed since the last mark, and the mark."""
        start = self.marks.pop()
        values = self.stack[start:]
        del self.stack[start:]
        return values

    def remember(self, number: int) -> None:
        """Put the top of the stack into the memo. Every pickler counts memo numbers up from 0, one by one."""
        if number > self.memo.count:
            raise SourceError(f"the pickle gives an object the number {number} after {self.memo.count} others")
        self.memo[number] = self.stack[-1]
        self.memo.count = max(self.memo.count, number + 1)

    def recall(self, number: int) -> Any:
        """An object of the memo by its number. An object in rows is made by running the bytes of all its rows."""
        memo = self.memo
        if number not in memo:
            row = next((recorded for recorded in memo.rows if recorded[0] <= number < recorded[1]), None)
            if row is None:
                raise SourceError(f"the pickle refers to the object {number}, which it does not have")
            memo.rows.remove(row)
            before = self.stack, self.marks, self.at, memo.count, self.rows
            self.stack, self.marks, self.rows, memo.count = [], [], None, row[0]
            self.run(row[2], row[3])
            self.stack, self.marks, self.at, memo.count, self.rows = before
        return memo[number]

    def spend(self, count: int) -> None:
        """Count elements that a pickle has copied: no honest pickle copies more elements than it has."""
        self.budget -= count
        if self.budget < 0:
            raise SourceError("the pickle copies more than it holds")

    def run(self, at: int = 0, end: int = -1) -> Any:
        """Run the pickle and return its object. Frequent opcodes are handled here, the others by `_RARE`.

        With an `end` only the bytes up to `end` are run, for the objects that they put into the memo.
        """
        data, stack, marks, memo = self.data, self.stack, self.marks, self.memo
        while at != end:
            code = data[at]
            at += 1
            if code == 0x71:  # BINPUT
                self.remember(data[at])
                at += 1
            elif code == 0x68:  # BINGET
                stack.append(memo[data[at]] if data[at] in memo else self.recall(data[at]))
                at += 1
            elif code == 0x28:  # MARK
                marks.append(len(stack))
            elif code in _NUMBERS:
                kind = _NUMBERS[code]
                stack.append(kind.unpack_from(data, at)[0])
                at += kind.size
            elif code == 0x74:  # TUPLE
                start = marks.pop()
                stack[start:] = [tuple(stack[start:])]
            elif code in _COUNTS:
                kind, encoding = _COUNTS[code]
                start = at + kind.size
                at = start + kind.unpack_from(data, at)[0]
                if at > len(data):
                    raise SourceError(f"the pickle is cut off after {len(data)} bytes")
                stack.append(str(data[start:at], encoding) if encoding else data[start:at])
            elif code == 0x72:  # LONG_BINPUT
                self.remember(_U32.unpack_from(data, at)[0])
                at += 4
            elif code == 0x94:  # MEMOIZE
                memo.add(stack[-1])
            elif code in _EMPTY:
                stack.append(_EMPTY[code]())
            elif code in _CONSTANTS:
                stack.append(_CONSTANTS[code])
            elif 0x85 <= code <= 0x87:  # TUPLE1, TUPLE2, TUPLE3
                items = tuple(stack[0x84 - code :])
                del stack[0x84 - code :]
                stack.append(items)
            elif code == 0x2E:  # STOP
                if len(stack) != 1:
                    raise SourceError("the pickle ends with an unfinished object")
                return stack[0]
            elif code in _RARE:
                self.at = at
                _RARE[code](self)
                at = self.at
            else:
                raise SourceError(f"the pickle holds opcode 0x{code:02x}, which no checkpoint needs")
        return None

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def pop(self) -> Any:
        return self.stack.pop()

    def global_(self, module: Any, name: Any) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            raise SourceError("the pickle names a global that is no text")
        if module in ("torch", "torch.storage") and name in STORAGES:
            self.push(STORAGES[name])
        elif module == "torch" and name in DTYPES:
            self.push(Dtype(name))
        elif module == "signal" and name in signal.Signals.__members__:  # so Python up to 3.11.3, later ones by number
            self.push(Opaque("signal", "Signals", (signal.Signals[name].value,)))
        else:
            self.push(Opaque(module, name))

    def stack_global(self) -> None:
        name = self.pop()
        self.global_(self.pop(), name)

    def call(self, kwargs: Any = None) -> None:
        """REDUCE, NEWOBJ and NEWOBJ_EX: nothing is called except the functions of `_PLAIN`."""
        args, function = self.pop(), self.pop()
        if not isinstance(function, Opaque) or not isinstance(args, tuple) or function.args:
            raise SourceError("the pickle calls something that is no global")
        known = _PLAIN.get((function.module, function.name))
        if known is None:
            self.push(Opaque(function.module, function.name, args if kwargs is None else (*args, kwargs)))
            return
        if args and known is not _rebuild_tensor:  # it copies nothing
            self.spend(sum(len(value) for value in args if isinstance(value, list | set | dict | str)))
        self.push(known(*args))

    def new(self) -> None:
        self.call()
        if self.rows is not None:
            self.rows.start_object(self.data, self.at, self.stack, self.marks, self.memo)

    def call_with_names(self) -> None:
        self.call(self.pop())

    def build(self) -> None:
        """BUILD: only a namespace or an opaque object gets a state."""
        state, target = self.pop(), self.stack[-1]
        if isinstance(target, Namespace):
            if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
                raise SourceError("a namespace in the pickle has a state that is no map of names")
            self.spend(len(state))
            target.__dict__.update(state)
        elif isinstance(target, Opaque):
            target.state = state
            if self.rows is not None:
                self.at = self.rows.read_following(self.data, self.at, self.stack, self.marks, self.memo)
        elif not isinstance(target, OrderedDict):  # whose state, such as `_metadata`, is not needed
            raise SourceError("the pickle sets the state of a plain value")

    def extend(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, list | Opaque):
            raise SourceError("the pickle appends to something that is no list")
        if isinstance(target, Opaque):
            target.filled = True
        else:
            target.extend(values)

    def update(self, values: list[Any]) -> None:
        target = self.stack[-1]
        pairs = list(zip(values[::2], values[1::2], strict=True))
        if isinstance(target, Opaque):
            target.filled = True
        elif isinstance(target, dict):
            for key, value in pairs:
                target[key if type(key) is str else _key(key)] = value
        else:
            raise SourceError("the pickle sets entries of something that is no map")

    def add(self, values: list[Any]) -> None:
        if not isinstance(self.stack[-1], set):
            raise SourceError("the pickle adds to something that is no set")
        self.stack[-1].update(map(_key, values))

    def persistent(self) -> None:
        """A storage: ("storage", type, key, location, number of elements)."""
        match self.pop():
            case ("storage", str(dtype), str(key), _, int(numel), *_) if dtype in DTYPE_NAMES and 0 <= numel < 2**63:
                self.push(StorageRef(dtype, key, numel))
            case _:
                raise SourceError("the pickle refers to a storage of an unknown kind")

    def long(self, kind: struct.Struct) -> None:
        count = self.number(kind)
        if count > MAX_INT:
            raise SourceError(f"the pickle holds an integer of {count} bytes")
        self.push(int.from_bytes(self.take(count), "little", signed=True))


def _two_values(machine: _Machine) -> list[Any]:
    value = machine.pop()
    return [machine.pop(), value]


_RARE: dict[int, Callable[[_Machine], object]] = {
    0x80: lambda m: m.take(1),  # PROTO
    0x6A: lambda m: m.push(m.recall(m.number(_U32))),  # LONG_BINGET
    0x95: lambda m: m.take(8),  # FRAME
    0x30: lambda m: m.stack.pop(),  # POP
    0x31: lambda m: m.since_mark(),  # POP_MARK
    0x32: lambda m: m.push(m.stack[-1]),  # DUP
    0x6C: lambda m: m.push(m.since_mark()),  # LIST
    0x91: lambda m: m.push(frozenset(map(_key, m.since_mark()))),  # FROZENSET
    0x61: lambda m: m.extend([m.pop()]),  # APPEND
    0x65: lambda m: m.extend(m.since_mark()),  # APPENDS
    0x73: lambda m: m.update(_two_values(m)),  # SETITEM
    0x75: lambda m: m.update(m.since_mark()),  # SETITEMS
    0x90: lambda m: m.add(m.since_mark()),  # ADDITEMS
    0x63: lambda m: m.global_(m.line(), m.line()),  # GLOBAL
    0x93: lambda m: m.stack_global(),  # STACK_GLOBAL
    0x52: lambda m: m.call(),  # REDUCE
    0x81: lambda m: m.new(),  # NEWOBJ
    0x92: lambda m: m.call_with_names(),  # NEWOBJ_EX
    0x62: lambda m: m.build(),  # BUILD
    0x51: lambda m: m.persistent(),  # BINPERSID
    0x8A: lambda m: m.long(_U8),  # LONG1
    0x8B: lambda m: m.long(_U32),  # LONG4
}
MAX_INT = 4096
"""Size of the largest integer that is read, in bytes."""
DTYPE_NAMES = frozenset(STORAGES.values())


def _key(value: Any) -> Any:
    """A key of a map or set, refused if hashing it is not cheap: nested tuples can be made to hash for ever."""
    rest, nodes = [value], 0
    while rest:
        node = rest.pop()
        nodes += 1
        if nodes > 1000 or isinstance(node, list | dict | set | Namespace):
            raise SourceError("the pickle uses a key that no map can have")
        if isinstance(node, tuple | frozenset):
            rest.extend(node)
    return value


def _rebuild_tensor(storage: Any, offset: Any, shape: Any, strides: Any, *rest: Any) -> TensorRef:
    """`torch._utils._rebuild_tensor_v2`: the last argument marks views that are conjugated or negated."""
    if not isinstance(storage, StorageRef) or not isinstance(shape, tuple) or not isinstance(strides, tuple):
        raise SourceError("a tensor in the pickle has no storage or no shape")
    numbers = (offset, *shape, *strides)
    sound = len(shape) == len(strides) <= MAX_DIMENSIONS and set(map(type, numbers)) == {int}
    if not sound or min(numbers) < 0 or max(numbers) >= 2**63:
        raise SourceError("a tensor in the pickle has an impossible offset, shape or stride")
    if len(rest) > 2 and rest[2]:
        raise SourceError("a tensor in the pickle is a negated or conjugated view")
    return TensorRef(storage, offset, shape, strides, storage.dtype)


def _rebuild_tensor_v3(storage: Any, offset: Any, shape: Any, strides: Any, *rest: Any) -> TensorRef:
    """`torch._utils._rebuild_tensor_v3`: an untyped storage, and the element type as a separate argument."""
    dtype = rest[2] if len(rest) > 2 else None
    if not isinstance(dtype, Dtype):
        raise SourceError("a tensor in the pickle has no element type that is known")
    ref = _rebuild_tensor(storage, offset, shape, strides, None, None, *rest[3:])
    return replace(ref, dtype=DTYPES[dtype.name])


def _rebuild_from_type(function: Any, kind: Any, args: Any, state: Any) -> Any:
    """`torch._tensor._rebuild_from_type_v2`: a subclass, or a tensor with attributes, which are not needed."""
    plain = isinstance(kind, Opaque) and (kind.module, kind.name) in _TENSORS
    known = _PLAIN.get((function.module, function.name)) if isinstance(function, Opaque) and plain else None
    if known in (_rebuild_tensor, _rebuild_tensor_v3) and isinstance(args, tuple):
        return known(*args)
    return Opaque("torch._tensor", "_rebuild_from_type_v2", (function, kind, args, state))


_TENSORS = {("torch", "Tensor"), ("torch.nn.parameter", "Parameter")}


_MEMBERS: dict[tuple[str, str], dict[str, int]] = {
    ("deepspeed.runtime.zero.config", "ZeroStageEnum"): {
        "disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3,
    },
    ("megatron.core.enums", "ModelType"): {"encoder_or_decoder": 1},
    ("megatron.core.transformer.enums", "AttnBackend"): {"flash": 1, "fused": 2, "unfused": 3, "local": 4, "auto": 5},
    ("megatron.model.enums", "PositionEmbeddingType"): {"rotary": 1, "absolute": 2},
}  # fmt: skip
"""Enum: its members by name. Python 3.11.0 to 3.11.3 pickles names, every other version numbers (Lib/enum.py)."""


def _attribute(owner: Any, name: Any) -> Opaque:
    """A member of an enum, or a name inside a class, such as `ShardedTensor.ProcessGroupState`, as an opaque global."""
    if not isinstance(owner, Opaque) or owner.args or not isinstance(name, str):
        raise SourceError("the pickle takes an attribute of something that is no global")
    number = _MEMBERS.get((owner.module, owner.name), {}).get(name)
    if number is not None:
        return Opaque(owner.module, owner.name, (number,))
    return Opaque(owner.module, f"{owner.name}.{name}")


_PLAIN: dict[tuple[str, str], Callable[..., Any]] = {
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _rebuild_tensor_v3,
    ("torch._tensor", "_rebuild_from_type_v2"): _rebuild_from_type,
    ("torch._utils", "_rebuild_parameter"): lambda data, *_: data,
    ("torch", "Size"): lambda sizes=(): sizes if isinstance(sizes, tuple) else tuple(sizes),
    ("torch.serialization", "_get_layout"): lambda name: name,
    ("collections", "OrderedDict"): lambda pairs=(): OrderedDict((_key(key), value) for key, value in pairs),
    ("argparse", "Namespace"): lambda: Namespace({}),
    ("builtins", "getattr"): _attribute,
    ("__builtin__", "getattr"): _attribute,
    ("_codecs", "encode"): lambda text, _: text.encode("latin1"),
    ("builtins", "set"): lambda values=(): set(map(_key, values)),
    ("__builtin__", "set"): lambda values=(): set(map(_key, values)),
}


DAMAGE = (IndexError, KeyError, ValueError, TypeError, AttributeError, OverflowError, struct.error)
"""Exceptions that are raised by reading a value of another form than expected."""


def loads(data: Bytes, name: str, rows: Reader | None = None) -> Any:
    """Unpickle without executing anything.

    Args:
        data: the pickle, or the memory map of a file that is one.
        name: name of the pickle, for errors.
        rows: reads the objects of some classes as `Rows`, which replace them in lists and, as key and value, in maps.

    Raises:
        SourceError: the data is damaged, or is no pickle.
    """
    try:
        return _Machine(data, rows).run()
    except SourceError as error:
        raise SourceError(f"{name}: {error}") from None
    except DAMAGE as error:
        raise SourceError(f"{name}: the pickle is damaged ({type(error).__name__})") from None
