"""MinMax: exact, and independent of the order and size of batches."""

from functools import reduce

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import detent as dt
from detent.observers import MinMax

FLOATS = st.floats(width=32, allow_nan=True, allow_infinity=True)
BATCHES = st.lists(hnp.arrays(np.float32, (2, 3), elements=FLOATS), min_size=1, max_size=4)


def observed(*batches, granularity="axis0"):
    observer = MinMax(granularity)
    for x in batches:
        observer.observe(x)
    return observer


@given(BATCHES, st.randoms())
def test_order_and_partition_change_nothing(batches, random):
    whole = observed(*batches).to_bytes()
    shuffled = random.sample(batches, len(batches))
    assert observed(*shuffled).to_bytes() == whole
    assert observed(np.concatenate(batches, axis=1)).to_bytes() == whole
    assert reduce(lambda a, b: a.merge(b), [observed(x) for x in shuffled]).to_bytes() == whole


@given(BATCHES, BATCHES, BATCHES)
def test_merge_is_commutative_and_associative(a, b, c):
    def fresh():
        return observed(*a), observed(*b), observed(*c)

    x, y, z = fresh()
    left = x.merge(y).merge(z).to_bytes()
    x, y, z = fresh()
    assert x.merge(y.merge(z)).to_bytes() == left
    x, y, z = fresh()
    assert z.merge(y).merge(x).to_bytes() == left


@given(BATCHES)
def test_merge_with_nothing_changes_nothing(batches):
    whole = observed(*batches).to_bytes()
    assert observed(*batches).merge(MinMax("axis0")).to_bytes() == whole
    assert MinMax("axis0").merge(observed(*batches)).to_bytes() == whole


def test_merge_does_not_change_the_other():
    a, b = observed(np.ones((2, 3), np.float32)), observed(np.full((2, 3), 5.0, np.float32))
    before = b.to_bytes()
    assert a.merge(b) is a
    a.observe(np.full((2, 3), -9.0, np.float32))
    assert b.to_bytes() == before


def test_nonfinite_values_are_skipped_and_counted():
    x = np.array([[1.0, np.nan, -2.0], [np.inf, 3.0, -np.inf]], np.float32)
    observer = observed(x)
    assert (observer.count, observer.nonfinite) == (3, 3)
    assert observer.range().lo.tolist() == [-2.0, 3.0]
    assert observer.range().hi.tolist() == [1.0, 3.0]


def test_a_set_without_finite_values_may_get_some_later():
    observer = observed(np.array([[1.0], [np.nan]], np.float32))
    with pytest.raises(dt.NotCalibratedError, match=r"1 of 2 parameter sets, first at index \(1,\)"):
        observer.range()
    assert observer.observe(np.array([[2.0], [4.0]], np.float32)).range().hi.tolist() == [2.0, 4.0]


def test_zero_has_no_sign():
    lo, hi = observed(np.array([[-0.0]], np.float32)).range()
    assert not np.signbit(lo).any()
    assert not np.signbit(hi).any()


def test_range_is_read_only_and_does_not_follow_the_observer():
    observer = observed(np.ones((2, 3), np.float32))
    bounds = observer.range()
    observer.observe(np.full((2, 3), 7.0, np.float32))
    assert bounds.hi.tolist() == [1.0, 1.0]
    assert not bounds.lo.flags.writeable
    assert not bounds.hi.flags.writeable


@pytest.mark.parametrize(
    ("granularity", "shape", "scale_shape"),
    [("tensor", (), ()), ("token", (2, 3), (2,)), ("group2", (2, 5), (2, 3)), ("block2x2", (3, 3), (2, 2))],
)
def test_granularities(granularity, shape, scale_shape):
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    observer = MinMax(granularity).observe(x)
    assert observer.range().lo.shape == scale_shape
    assert observer.params(f"uint8/{granularity}") == dt.QuantParams.from_data(f"uint8/{granularity}", x)


def test_batches_may_differ_where_sets_do_not():
    observer = observed(np.ones((2, 3), np.float32), np.ones((2, 7), np.float32), np.ones((2, 4, 5), np.float32))
    assert observer.count == 6 + 14 + 40


@pytest.mark.parametrize(
    ("dtypes", "scale"), [(["float32", "float16"], "float32"), (["float32", "float64"], "float64")]
)
def test_one_float64_batch_makes_float64_scales(dtypes, scale):
    for order in (dtypes, dtypes[::-1]):
        observer = observed(*(np.full((2, 3), 0.1).astype(dtype) for dtype in order))
        assert observer.params("int8/axis0").scale.dtype == scale


def test_float64_is_kept():
    assert observed(np.full((1, 1), 0.1)).range().lo.item() == 0.1


def test_reset_forgets_everything():
    observer = observed(np.full((2, 3), np.nan, np.float32))
    assert observer.reset().to_bytes() == MinMax("axis0").to_bytes()


def test_state_round_trip():
    observer = observed(np.ones((2, 3), np.float32))
    again = MinMax("axis0").load_state_dict(observer.state_dict())
    assert again.to_bytes() == observer.to_bytes()
    again.state_dict()["lo"][...] = 99
    assert again.to_bytes() == observer.to_bytes()


def test_repr():
    assert repr(MinMax("axis0")) == "MinMax(granularity='axis0')"
    assert repr(MinMax()) == "MinMax()"
