"""The oracle's own foundations: correct rounding of rationals, and the random bits of stochastic rounding.

Checked here: `Binary.round` equals the hardware's conversions on random, subnormal, tie and overflow values,
and its quotients and products equal NumPy's; `philox4x32` gives the published known answers of the
Random123 library.
"""

from __future__ import annotations

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from . import exact, oracle
from .philox import philox4x32, word

DTYPES = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float32": np.float32,
    "float8_e5m2": ml_dtypes.float8_e5m2,
}


def _bits(value: float) -> bytes:
    return np.float64(value).tobytes()


def _doubles(name: str, count: int) -> np.ndarray:
    """Random float64 values over the whole range of a format: plain, exact ties, and ties' neighbors."""
    fmt = exact.FORMATS[name]
    rng = np.random.default_rng(1)
    exponents = rng.integers(fmt.emin - fmt.precision - 2, fmt.emax + 2, count)
    plain = np.ldexp(rng.uniform(1, 2, count), exponents)
    ties = np.ldexp(rng.integers(2**fmt.precision, 2 ** (fmt.precision + 1), count) | 1, exponents - fmt.precision)
    values = np.concatenate([plain, ties, np.nextafter(ties, np.inf), np.nextafter(ties, -np.inf)])
    return np.concatenate([values, -values])


@pytest.mark.parametrize("name", ["float16", "float32"])
def test_rounding_to_a_float_equals_numpys_conversion(name: str) -> None:
    values = _doubles(name, 1500)
    with np.errstate(over="ignore"):
        expected = values.astype(DTYPES[name]).astype(np.float64)
    got = [exact.FORMATS[name].round(float(v)) for v in values]
    assert np.array(got).tobytes() == expected.tobytes()


@pytest.mark.parametrize("name", ["bfloat16", "float8_e5m2"])
def test_rounding_to_a_small_float_equals_ml_dtypes_on_float32_values(name: str) -> None:
    with np.errstate(over="ignore"):
        values = _doubles(name, 1500).astype(np.float32)
    expected = values.astype(DTYPES[name]).astype(np.float64)
    got = [exact.FORMATS[name].round(float(v)) for v in values]
    assert np.array(got).tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_quotients_and_products_equal_the_hardwares(dtype: type) -> None:
    fl = exact.FORMATS[np.dtype(dtype).name]
    rng = np.random.default_rng(2)
    bits = np.dtype(dtype).itemsize * 8
    a, b = rng.integers(0, 2**bits, (2, 4000), dtype=np.uint64).astype(f"uint{bits}").view(dtype)
    usable = np.isfinite(a) & np.isfinite(b) & (b != 0) & (a != 0)
    a, b = a[usable], b[usable]
    with np.errstate(all="ignore"):
        quotients, products = (a / b).astype(np.float64), (a * b).astype(np.float64)
    pairs = [(Fraction(float(x)), Fraction(float(y))) for x, y in zip(a, b, strict=True)]
    assert len(pairs) > 3000
    assert np.array_equal([fl.round(x / y) for x, y in pairs], quotients)
    assert np.array_equal([fl.round(x * y) for x, y in pairs], products)


def test_the_sign_of_an_underflow_survives() -> None:
    assert _bits(exact.FLOAT32.round(Fraction(-1, 10**60))) == _bits(-0.0)


@pytest.mark.parametrize("fmt", [exact.FLOAT16, exact.FLOAT32, exact.FLOAT64], ids=lambda f: f.name)
def test_limits_of_the_formats_are_numpys(fmt: exact.Binary) -> None:
    info = np.finfo(fmt.name)
    assert (fmt.largest, fmt.smallest_normal) == (float(info.max), float(info.tiny))


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_philox_gives_the_published_known_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    assert philox4x32(counter, key) == expected


def test_a_word_is_the_first_output_word_without_its_low_byte() -> None:
    assert word(0, 0, 0) == 0x6627E8


@pytest.mark.parametrize(
    ("rounding", "expected"),
    [
        ("half_even", [-2, -2, 0, 0, 2, 2]),
        ("half_away", [-3, -2, -1, 1, 2, 3]),
        ("floor", [-3, -2, -1, 0, 1, 2]),
    ],
)
def test_roundings_of_exact_ties(rounding: str, expected: list[int]) -> None:
    assert [oracle.round_int(t, rounding) for t in (-2.5, -1.5, -0.5, 0.5, 1.5, 2.5)] == expected


def test_infinities_pass_the_rounding() -> None:
    assert oracle.round_int(math.inf, "half_even") == math.inf


def test_divide_and_reciprocal_differ_next_to_a_tie() -> None:
    """The oracle tells them apart on more than a fifth of such points."""
    s = float(np.float32(0.0123))
    points = [(float(np.float32((k + 0.5) * s)), k) for k in range(1000)]
    differing = sum(
        oracle.ratio(x, s, "divide", exact.FLOAT32) != oracle.ratio(x, s, "reciprocal", exact.FLOAT32)
        for x, _ in points
    )
    assert differing > 200
