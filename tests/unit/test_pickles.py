"""Pickles: what is written comes back, here and in Python's own unpickler; what is read is never run."""

from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import enum
import importlib.util
import io
import math
import os
import pickle
import re
import signal
import struct
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from formats.errors import SourceError
from formats.torch_files.pickle_values import (
    DTYPES,
    STORAGES,
    Dtype,
    Namespace,
    Opaque,
    StorageRef,
    TensorRef,
    dumps,
    is_plain,
)
from formats.torch_files.unpickle import loads

PLAIN: dict[str, Any] = {
    "none": None, "true": True, "false": False, "zero": 0, "one": 1, "minus one": -1, "int32 max": 2**31 - 1,
    "int32 min": -(2**31), "above int32": 2**31, "below int32": -(2**31) - 1, "int64 max": 2**63 - 1,
    "uint64": 2**64 - 1, "128": 128, "-128": -128, "255": 255, "2**39": 2**39, "-2**39": -(2**39), "2**1000": 2**1000,
    "-2**1000": -(2**1000), "float": 1e-5, "minus zero": -0.0, "inf": math.inf, "denormal": 5e-324, "empty": "",
    "text": "plain", "unicode": "é日本🦙\n\x00'\"", "long text": "x" * 70_000, "empty tuple": (), "tuple": (1,),
    "pair": (1, "a"), "four": (1, 2, 3, 4), "nested": ((), ((), (1.5,))), "empty list": [], "list": [1, [2, [None]]],
    "long list": list(range(3000)), "empty dict": {}, "dict": {"a": 1, 2: "b", (1, 2): None, None: True},
    "ordered": OrderedDict([("z", 1), ("a", OrderedDict())]), "empty ordered": OrderedDict(),
    "mixed": {"a": [{"b": ({"c": OrderedDict(d=[1.0, "é"])},)}], "e": -1},
}  # fmt: skip


def same(first: Any, second: Any) -> bool:
    """Equal in value, type and order of entries."""
    if type(first) is not type(second):
        return False
    if isinstance(first, dict):
        pairs = zip(first.items(), second.items(), strict=True) if len(first) == len(second) else [((0, 0), (1, 1))]
        return all(same(a, b) and same(x, y) for (a, x), (b, y) in pairs)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(same(a, b) for a, b in zip(first, second, strict=True))
    return repr(first) == repr(second) and first == second


@pytest.mark.parametrize("value", PLAIN.values(), ids=PLAIN)
def test_plain_values_come_back(value):
    assert is_plain(value)
    written = dumps(value)
    assert same(loads(written, "it"), value)
    assert same(pickle.loads(written), value)
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert same(loads(pickle.dumps(value, protocol), "it"), value), protocol


def test_nan_keeps_its_bits():
    assert dumps(math.nan) == b"\x80\x02G\x7f\xf8\0\0\0\0\0\0."
    assert math.isnan(loads(dumps(math.nan), "it"))


@pytest.mark.parametrize("value", [b"", b"\x00\xff", bytes(range(256)), bytearray(b"ab"), {1, 2}, frozenset({3}),
                                   [b"x" * 300, {"k": b"v"}]], ids=lambda value: type(value).__name__)  # fmt: skip
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_bytes_and_sets_are_read_as_python_reads_them(value, protocol):
    parsed = loads(pickle.dumps(value, protocol), "it")
    if (isinstance(value, bytearray | frozenset) and protocol < 5) or (value == b"" and protocol < 3):
        assert isinstance(parsed, Opaque | type(value))
    elif isinstance(value, bytearray):
        assert parsed == bytes(value)
    else:
        assert same(parsed, value)


@pytest.mark.parametrize("size", [256, 1 << 16, 1 << 20])
def test_an_int_of_any_size_can_travel_or_is_left_out(size):
    value = 1 << (8 * size)
    if is_plain(value):
        assert pickle.loads(dumps(value)) == value


@pytest.mark.parametrize("value", ["\ud800", "a\udfffb", {"\udcff": 1}], ids=ascii)
def test_a_lone_surrogate_is_no_text(value):
    with pytest.raises(SourceError, match="damaged"):
        loads(pickle.dumps(value), "it")
    assert not is_plain(value)


def test_texts_of_python_2_are_latin_1():
    long, short = b"\x80\x02T\x03\x00\x00\x00ab\xe9.", b"\x80\x02U\x03ab\xe9."
    for data in (long, short):
        assert loads(data, "it") == pickle.loads(data, encoding="latin-1") == "ab\u00e9"


def test_a_number_that_is_given_again_is_that_of_the_new_object():
    data = b"\x80\x02(]q\x00}q\x01)q\x00h\x00h\x01t."  # a list 0, a map 1, a tuple 0, then 0 and 1
    assert same(loads(data, "it"), pickle.loads(data))


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_namespace_comes_back(protocol):
    original = argparse.Namespace(a=1, b=[1.5, None], c=argparse.Namespace(d="é"))
    namespace = loads(pickle.dumps(original, protocol), "it")
    assert isinstance(namespace, Namespace)
    assert isinstance(namespace.c, Namespace)
    again = pickle.loads(dumps(namespace))
    assert again == original
    assert list(vars(again)) == ["a", "b", "c"]
    assert vars(loads(dumps(namespace), "it").c) == {"d": "é"}


@pytest.mark.parametrize("name", DTYPES)
def test_dtypes_come_back(name):
    assert loads(pickle.dumps(getattr(torch, name)), "it") == Dtype(name)
    assert pickle.loads(dumps(Dtype(name))) is getattr(torch, name)


class Unpickler(pickle.Unpickler):
    """torch.load's half of the bargain: it says what it was asked for."""

    def persistent_load(self, identifier: Any) -> torch.UntypedStorage:
        kind, storage, key, place, numel = identifier
        assert (kind, key, place) == ("storage", "5", "cpu")
        self.storage = torch.storage.TypedStorage(
            wrap_storage=torch.UntypedStorage(numel * storage.dtype.itemsize), dtype=storage.dtype, _internal=True
        )
        return self.storage


@pytest.mark.parametrize("dtype", sorted(set(STORAGES.values())))
def test_tensors_come_back(dtype):
    ref = TensorRef(StorageRef(dtype, "5", 30), 2, (4, 3), (6, 2), dtype)
    assert loads(dumps({"t": ref}), "it") == {"t": ref}
    tensor = Unpickler(io.BytesIO(dumps(ref))).load()
    assert DTYPES[str(tensor.dtype).removeprefix("torch.")] == dtype
    assert (tuple(tensor.shape), tensor.stride(), tensor.storage_offset()) == ((4, 3), (6, 2), 2)


def test_every_readable_dtype_is_written_or_known_to_have_no_storage():
    """`dumps` of a tensor of any dtype of the table either works or is refused by `keeps`."""
    for dtype in sorted(set(DTYPES.values())):
        ref = TensorRef(StorageRef(dtype, "5", 1), 0, (1,), (1,), dtype)
        if is_plain(ref):
            assert loads(dumps(ref), "it") == ref, dtype


# --- keeps -----------------------------------------------------------------------------------------------------------


class Colour(enum.Enum):
    RED = 1


class Plain:
    def __init__(self) -> None:
        self.x = 1


def opaque(module: str, name: str, *args: Any) -> Opaque:
    """As the reader makes it."""
    return Opaque(module, name, args)


@pytest.mark.parametrize("value", [
    opaque("megatron.core.transformer.enums", "AttnBackend", 5), opaque("megatron.core.enums", "ModelType", 1),
    opaque("signal", "Signals", 15), [opaque("megatron.core.enums", "ModelType", 1)],
    {"k": (opaque("signal", "Signals", 15),)},
], ids=lambda value: type(value).__name__)  # fmt: skip
def test_members_of_known_enums_travel(value):
    assert is_plain(value)
    assert repr(loads(dumps(value), "it")) == repr(value)


@pytest.mark.parametrize("data", [pickle.dumps(signal.SIGTERM, 2), b"\x80\x02csignal\nSIGTERM\n."])
def test_a_signal_comes_back_as_itself(data):
    """The second is how Python up to 3.11.3 pickles it."""
    parsed = loads(data, "it")
    assert is_plain({"exit_signal": parsed})
    assert pickle.loads(data) is pickle.loads(dumps(parsed)) is signal.SIGTERM


def source_of(module: str) -> str:
    """The text of a module of an installed package, which is not imported."""
    package, _, rest = module.partition(".")
    folder = importlib.util.find_spec(package).submodule_search_locations[0]
    return Path(folder, rest.replace(".", "/") + ".py").read_text()


@pytest.mark.parametrize(("module", "name"), [
    ("deepspeed.runtime.zero.config", "ZeroStageEnum"), ("megatron.core.enums", "ModelType"),
    ("megatron.core.transformer.enums", "AttnBackend"),
])  # fmt: skip
def test_enums_as_python_3_11_0_to_3_11_3_pickles_them(module, name):
    """`getattr(Enum, "name")`, of which every other Python makes `Enum(number)`."""
    body = re.search(rf"^class {name}\(.*\n((?:\n|    .*\n)+)", source_of(module), re.MULTILINE)[1]
    kind = enum.Enum(name, [(key, int(value)) for key, value in re.findall(r"^    (\w+) = (\d+)", body, re.MULTILINE)])
    assert list(kind)
    for member in kind:
        text = b"X" + struct.pack("<I", len(member.name)) + member.name.encode()
        parsed = loads(b"\x80\x02c__builtin__\ngetattr\n" + f"c{module}\n{name}\n".encode() + text + b"\x86R.", "it")
        assert (parsed.module, parsed.name, parsed.args) == (module, name, (member.value,))


def test_the_positions_of_megatron_llm_as_these_pickle_them():
    """Its megatron/model/enums.py; the package is not installed here."""
    for number, name in enumerate(("rotary", "absolute"), 1):
        text = b"X" + struct.pack("<I", len(name)) + name.encode()
        enum_of = b"cmegatron.model.enums\nPositionEmbeddingType\n"
        parsed = loads(b"\x80\x02c__builtin__\ngetattr\n" + enum_of + text + b"\x86R.", "it")
        assert (parsed.name, parsed.args) == ("PositionEmbeddingType", (number,))


@pytest.mark.parametrize("entries", [(iter([1]),), (None, iter([("a", 1)]))], ids=["list", "map"])
def test_a_member_that_is_given_entries_does_not_travel(entries):
    class Odd:
        def __reduce__(self) -> tuple[Any, ...]:
            return signal.Signals, (15,), None, *entries

    assert not is_plain(loads(pickle.dumps(Odd(), 2), "it"))


def stateful() -> Opaque:
    value = opaque("signal", "Signals", 15)
    value.state = {"x": 1}
    return value


def filled() -> Opaque:
    value = opaque("signal", "Signals", 15)
    value.filled = True
    return value


NOT_KEPT = {
    "a function": opaque("os", "system", "true"), "an enum of others": opaque("torch", "memory_format", 1),
    "no argument": opaque("signal", "Signals"), "two arguments": opaque("signal", "signal", 15, 0),
    "a list": opaque("signal", "Signals", [15]),
    "a state": stateful(), "entries": filled(), "the class itself": Opaque,
    "a function of the module": opaque("signal", "raise_signal", 9), "alarm": opaque("signal", "alarm", 1),
    "a module of the module": opaque("megatron.core.enums", "enum.sys.exit", 1),
    "a name that ends a line": opaque("signal", "Signals\n(cos\nsystem\n", 1),
    "a dtype that ends a line": Dtype("float32\n0cos\nsystem\n"), "an unknown dtype": Dtype("load"),
    "bytes": b"x", "set": {1}, "complex": 1j,
    "a namespace with a function": Namespace({"a": Namespace({"b": opaque("os", "system", "true")})}),
    "a tensor of an unknown type": TensorRef(StorageRef("X", "0", 1), 0, (1,), (1,), "X"),
}  # fmt: skip


@pytest.mark.parametrize("value", NOT_KEPT.values(), ids=NOT_KEPT)
@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: [x], lambda x: {"k": (1, x)}, lambda x: Namespace({"k": x})],
                         ids=["itself", "list", "dict", "namespace"])  # fmt: skip
def test_what_might_run_code_or_cannot_be_written_is_not_kept(value, wrap):
    assert not is_plain(wrap(value))


@pytest.mark.parametrize(
    "value", [object(), Plain(), b"x", {1, 2}, opaque("os", "system", "true")], ids=lambda value: type(value).__name__
)
def test_dumps_writes_nothing_that_it_does_not_keep(value):
    with pytest.raises(TypeError, match="cannot pickle"):
        dumps([value])


@pytest.mark.parametrize("value", [
    Colour.RED, Plain(), datetime.datetime(2026, 1, 1), decimal.Decimal("1.5"), range(3), slice(1), 1j, os.system,
    print, torch.Generator, torch.device("cpu"), collections.Counter("aab"), collections.deque([1, 2]),
    collections.defaultdict(list, a=[1]), ValueError("x"), torch.quint4x2,
], ids=lambda value: type(value).__name__)  # fmt: skip
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_other_objects_are_read_as_data_and_not_kept(value, protocol):
    try:
        written = pickle.dumps(value, protocol)
    except (pickle.PicklingError, TypeError, ImportError):
        pytest.skip("this protocol cannot pickle it")
    parsed = loads(written, "it")
    assert isinstance(parsed, Opaque)
    assert not is_plain(parsed)


@pytest.mark.parametrize("value", [PLAIN["mixed"], Namespace({"a": [1, "é"], "b": 2.5})], ids=["plain", "namespace"])
def test_cut_off_anywhere_is_an_error(value):
    written = dumps(value)
    for end in range(len(written)):
        with pytest.raises(SourceError, match="it: the pickle"):
            loads(written[:end], "it")
