"""Casts, against torch on every float16 and bfloat16 and on random and special float32."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from converters.move.casts import WORDS, as_words, cast, finite, mean
from formats.disk.safetensors import DTYPES
from formats.errors import RefusedError

TORCH = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(dtype: str) -> np.ndarray:
    """Every bit pattern of a 16-bit type; special and random ones of a wider type."""
    word = WORDS[DTYPES[dtype]]
    if DTYPES[dtype] == 2:
        return np.arange(1 << 16, dtype=np.uint32).astype(word)
    dice = np.random.default_rng(0)
    random = dice.integers(0, np.iinfo(word).max, 200_000, dtype=word, endpoint=True)
    near = dice.normal(0, 1, 100_000).astype(np.float32 if dtype == "F32" else np.float64)
    ties = (np.arange(1 << 16, dtype=np.uint32) << 16 | 0x8000).astype(np.uint32)
    if dtype == "F64":
        with np.errstate(invalid="ignore"):
            ties = as_words(ties.view(np.float32).astype(np.float64))
    return np.concatenate([random, as_words(near), ties])


def by_torch(words: np.ndarray, source: str, target: str) -> np.ndarray:
    wide = torch.from_numpy(words.view(f"i{words.itemsize}")).view(TORCH[source])
    return wide.to(TORCH[target]).view(INTS[DTYPES[target]]).numpy().view(WORDS[DTYPES[target]])


@pytest.mark.parametrize("target", TORCH)
@pytest.mark.parametrize("source", TORCH)
def test_casts_are_those_of_torch(source, target):
    words = bits(source)
    expected = by_torch(words, source, target)
    numbers = torch.from_numpy(expected.view(f"i{expected.itemsize}")).view(TORCH[target])
    original = torch.from_numpy(words.view(f"i{words.itemsize}")).view(TORCH[source])
    overflown = (torch.isinf(numbers) & torch.isfinite(original)).numpy()
    if overflown.any():
        with pytest.raises(RefusedError, match=f"too large for {target}"):
            cast(words, source, target, "weight")
    words, expected = words[~overflown], expected[~overflown]
    got = cast(words, source, target, "weight")
    nan = torch.isnan(numbers).numpy()[~overflown]
    assert got.dtype == WORDS[DTYPES[target]]
    assert np.array_equal(got[~nan], expected[~nan])
    again = torch.from_numpy(got.view(f"i{got.itemsize}")).view(TORCH[target])
    assert np.array_equal(torch.isnan(again).numpy(), nan)


def test_without_a_cast_no_bit_changes():
    words = bits("F32")
    assert cast(words, "F32", "F32", "weight") is words


def test_the_mean_is_taken_in_float32_and_rounded_once():
    a, b, c = (torch.randn(1000, generator=torch.Generator().manual_seed(n)).bfloat16() for n in range(3))
    copies = [tensor.view(torch.int16).numpy().view(np.uint16) for tensor in (a, b, c)]
    expected = ((a.float() + b.float() + c.float()) / 3).bfloat16()
    assert np.array_equal(mean(copies, "BF16"), expected.view(torch.int16).numpy().view(np.uint16))


@pytest.mark.parametrize("dtype", TORCH)
def test_what_is_finite_is_what_torch_says(dtype):
    number = torch.finfo(TORCH[dtype])
    for value in (0.0, number.max, number.min, number.smallest_normal / 2, math.inf, -math.inf, math.nan):
        tensor = torch.tensor([1.0, value], dtype=TORCH[dtype])
        words = tensor.view(INTS[DTYPES[dtype]]).numpy().view(WORDS[DTYPES[dtype]])
        assert finite(words, dtype) == bool(torch.isfinite(tensor).all()), value
