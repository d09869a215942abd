"""EMAMinMax: the float32 formula of docs/numerics.md, batch by batch."""

import numpy as np
import pytest

import detent as dt
from detent.observers import EMAMinMax

F32 = np.float32
MAX = float(np.finfo(np.float32).max)


def batches(count=5):
    rng = np.random.default_rng(0)
    return [(rng.normal(size=(2, 50)) * rng.uniform(0.5, 3)).astype(np.float32) for _ in range(count)]


def blend(decay, old, new):
    """Compute the average with one rounding per operation."""
    return F32(F32(F32(decay) * old) + F32(F32(1.0 - decay) * new))


@pytest.mark.parametrize("decay", [0.0, 0.1, 0.5, 0.9, 0.99, 0.999])
def test_the_formula(decay):
    observer = EMAMinMax(decay, "axis0")
    lo = hi = None
    for x in batches():
        observer.observe(x)
        low, high = x.min(axis=1), x.max(axis=1)
        lo = low if lo is None else [blend(decay, a, b) for a, b in zip(lo, low, strict=True)]
        hi = high if hi is None else [blend(decay, a, b) for a, b in zip(hi, high, strict=True)]
        bounds = observer.range()
        assert bounds.lo.dtype == bounds.hi.dtype == np.float32
        assert bounds.lo.tolist() == list(lo)
        assert bounds.hi.tolist() == list(hi)


def test_it_depends_on_the_order():
    forward, backward = EMAMinMax(0.5), EMAMinMax(0.5)
    for x in batches():
        forward.observe(x)
    for x in batches()[::-1]:
        backward.observe(x)
    assert forward.range() != backward.range()


def test_float64_data_are_rounded_to_float32():
    observer = EMAMinMax().observe(np.array([0.1, 0.3]))
    assert observer.range().hi == F32(0.3)
    assert observer.params("int8").scale.dtype == np.float64


def test_a_batch_without_finite_values_keeps_the_average():
    observer = EMAMinMax(0.5, "axis0").observe(np.array([[2.0], [4.0]], np.float32))
    observer.observe(np.array([[6.0], [np.nan]], np.float32))
    assert observer.range().hi.tolist() == [4.0, 4.0]
    assert (observer.count, observer.nonfinite, observer.batches) == (3, 1, 2)


def test_a_set_first_seen_later_starts_there():
    observer = EMAMinMax(0.5, "axis0").observe(np.array([[2.0], [np.nan]], np.float32))
    assert observer.observe(np.array([[2.0], [8.0]], np.float32)).range().hi.tolist() == [2.0, 8.0]


@pytest.mark.parametrize("decay", [0.1, 0.3, 0.9, 0.99])
def test_the_largest_floats_do_not_overflow(decay):
    x = np.array([MAX, -MAX], np.float32)
    observer = EMAMinMax(decay).observe(x).observe(x).observe(x)
    assert np.isfinite(observer.range().hi)
    assert observer.range().lo == -observer.range().hi


def test_merge_counts_batches():
    a, b = EMAMinMax(0.5), EMAMinMax(0.5)
    a.observe(np.array([8.0], np.float32))
    for _ in range(2):
        b.observe(np.array([4.0], np.float32))
    a.merge(b)
    assert a.range().hi == 0.25 * 8.0 + 0.75 * 4.0
    assert (a.batches, a.count) == (3, 3)


def test_merge_with_nothing():
    full = EMAMinMax(0.5).observe(np.array([8.0], np.float32))
    before = full.to_bytes()
    assert full.merge(EMAMinMax(0.5)).to_bytes() == before
    assert EMAMinMax(0.5).merge(full).to_bytes() == before


def test_decay_is_part_of_the_bytes():
    again = EMAMinMax.from_bytes(EMAMinMax(0.25, dt.PerAxis(0)).to_bytes())
    assert (again.decay, again.granularity) == (0.25, dt.PerAxis(0))
    assert repr(again) == "EMAMinMax(decay=0.25, granularity='axis0')"


def test_reset_forgets_everything_but_the_settings():
    observer = EMAMinMax(0.25).observe(np.ones(3, np.float32))
    assert observer.reset().to_bytes() == EMAMinMax(0.25).to_bytes()
