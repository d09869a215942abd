"""Rounding rules: construction, comparison, and the rounding of ties."""

import numpy as np
import pytest

import detent as dt
from detent.rounding import Rounding, get_rounding

TIES = [-2.5, -1.5, -0.5, 0.5, 1.5, 2.5]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("half_even", dt.rounding.half_even),
        ("half_away", dt.rounding.half_away),
        ("floor", dt.rounding.floor),
        ("stochastic(0)", dt.rounding.stochastic()),
        ("stochastic(18446744073709551615)", dt.rounding.stochastic(2**64 - 1)),
    ],
)
def test_strings(text, value):
    assert get_rounding(text) == value
    assert (str(value), repr(value)) == (text, f"dt.rounding.{text}")
    assert eval(repr(value), {"dt": dt}) == value


def test_stochastic_without_a_seed_is_seed_0():
    assert get_rounding("stochastic") == Rounding("stochastic", 0)


def test_seeds_make_different_rules():
    assert len({dt.rounding.stochastic(seed) for seed in (0, 1, 0)}) == 2


@pytest.mark.parametrize(
    ("rounding", "codes"),
    [
        ("half_even", [-2, -2, 0, 0, 2, 2]),
        ("half_away", [-3, -2, -1, 1, 2, 3]),
        ("floor", [-3, -2, -1, 0, 1, 2]),
    ],
)
def test_ties(rounding, codes):
    params = dt.QuantParams(dt.QuantSpec("int8", rounding=rounding), 1.0)
    assert dt.quantize(np.array(TIES, np.float32), params).codes.tolist() == codes


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_half_away_does_not_add_a_half(dtype):
    """The number just below one half rounds to 0, although adding one half to it gives 1."""
    below = np.nextafter(np.array([0.5], dtype), np.array(0.0, dtype))
    params = dt.QuantParams(dt.QuantSpec("int8", rounding="half_away"), 1.0)
    assert dt.quantize(below, params).codes.tolist() == [0]


def test_stochastic_rounding_depends_on_seed_step_and_position_only():
    x = np.full((3, 40), 0.5, np.float32)

    def codes(seed, step=0, data=x):
        return dt.quantize(
            data, dt.QuantParams(dt.QuantSpec("int8", rounding=dt.rounding.stochastic(seed)), 1.0), step=step
        ).codes

    first = codes(1)
    assert np.array_equal(codes(1), first)
    assert np.array_equal(codes(1, data=x.reshape(-1)), first.reshape(-1))
    assert not np.array_equal(codes(2), first)
    assert not np.array_equal(codes(1, step=1), first)
    assert set(first.ravel().tolist()) == {0, 1}


def test_stochastic_rounding_keeps_whole_numbers():
    x = np.arange(-100, 100, dtype=np.float32)
    spec = dt.QuantSpec("int8", rounding=dt.rounding.stochastic(9))
    assert dt.quantize(x, dt.QuantParams(spec, 1.0)).codes.tolist() == x.tolist()
