"""A table of settings reads what it writes."""

import pytest

from formats.errors import RefusedError, UnsupportedError
from formats.model.codec import Codec, fixed, read, rows, write

TABLE = """
layers     num_layers
epsilon    layernorm_epsilon|norm_epsilon
tied       untied                            opposite
scaling    kind factor                       kind_and_factor     rotary
"""


def kind_and_factor(kind: str, factor: str) -> Codec:
    """One setting out of two keys."""

    def read_both(spelled, context):
        if (kind in spelled) is not (factor in spelled):
            raise UnsupportedError(f"{context.where}: {kind} without {factor}")
        return (spelled[kind], spelled[factor]) if kind in spelled else None

    return Codec(read_both, lambda value, _: dict(zip((kind, factor), value or (None, None), strict=True)))


ROWS = rows(TABLE, {"kind_and_factor": kind_and_factor})
VALUES = {"layers": 4, "epsilon": 1e-5, "tied": True, "scaling": ("yarn", 2.0)}
SPELLED = {
    "num_layers": 4, "layernorm_epsilon": 1e-5, "norm_epsilon": 1e-5, "untied": False, "kind": "yarn", "factor": 2.0,
}  # fmt: skip


def test_both_directions_follow_from_the_table():
    assert write(ROWS, VALUES, {"rotary"}, "args") == SPELLED
    assert read(ROWS, SPELLED, {"rotary"}, "args") == VALUES


def test_a_row_whose_condition_does_not_hold_is_not_there():
    assert "kind" not in write(ROWS, VALUES, (), "args")
    assert "scaling" not in read(ROWS, SPELLED, (), "args")


def test_the_first_name_with_a_value_counts():
    spelled = {"layernorm_epsilon": None, "norm_epsilon": 3e-4}
    assert read(ROWS, spelled, (), "args")["epsilon"] == 3e-4
    assert read(ROWS, spelled | {"layernorm_epsilon": 1e-6}, (), "args")["epsilon"] == 1e-6


def test_what_is_absent_is_none():
    assert read(ROWS, {}, {"rotary"}, "args") == dict.fromkeys(VALUES)


def test_a_codec_names_the_file():
    with pytest.raises(UnsupportedError, match="args: kind without factor"):
        read(ROWS, {"kind": "yarn"}, {"rotary"}, "args")


COMMON = rows(
    """
hidden     hidden_size
heads      num_heads
kv_heads   num_kv_heads    default heads
head_dim   head_dim        default hidden / heads
theta      base            default 10000.0
-          norm            = "rms"
-          position        write "rope"
""",
    {},
)


def test_every_table_has_some_codecs():
    sizes = {"hidden": 64, "heads": 8}
    values = sizes | {"kv_heads": 8, "head_dim": 8, "theta": 10000.0}
    spelled = {"hidden_size": 64, "num_heads": 8}
    assert read(COMMON, spelled, (), "args") == values
    assert read(COMMON, spelled | {"head_dim": 32, "num_kv_heads": 2}, (), "args")["head_dim"] == 32
    assert write(COMMON, values, (), "args") == spelled | {
        "num_kv_heads": 8, "head_dim": 8, "base": 10000.0, "norm": "rms", "position": "rope",
    }  # fmt: skip


def test_a_key_with_one_value_refuses_others():
    spelled = {"hidden_size": 64, "num_heads": 8, "position": "none"}  # what is only written is not read
    assert read(COMMON, spelled, (), "args")["head_dim"] == 8
    with pytest.raises(UnsupportedError, match="args: norm = 'layer' is not supported, only 'rms'"):
        read(COMMON, spelled | {"norm": "layer"}, (), "args")


def test_a_key_that_has_to_be_there():
    table = rows("-    offset    stated 1.0", {})
    assert write(table, {}, (), "args") == {"offset": 1.0}
    assert read(table, {"offset": 1}, (), "args") == {}
    for spelled, present in (({"offset": 0.0}, "= 0.0"), ({}, "is not there"), ({"offset": None}, "is not there")):
        with pytest.raises(UnsupportedError, match=f"args: offset {present}; of such a model only 1.0 is supported"):
            read(table, spelled, (), "args")


def test_a_codec_that_no_table_has():
    with pytest.raises(KeyError):
        rows("layers    num_layers    squared", {})


def test_a_setting_without_a_key_has_one_of_few_values():
    refuses = fixed(False, None, error=lambda value, _: RefusedError(f"tied is {value}"))
    table = rows("tied    -    must be false", {"must be false": refuses})
    assert read(table, {}, (), "args") == {"tied": False}
    assert write(table, {"tied": None}, (), "args") == {}
    with pytest.raises(RefusedError, match="tied is True"):
        write(table, {"tied": True}, (), "args")
