"""Scale modes: construction, comparison and JSON."""

from itertools import permutations, product

import pytest

import detent as dt
from detent.scale_mode import get_scale_mode

MODES = {"per_batch": dt.PerBatch(), "ema": dt.EMA(0.99), "fixed": dt.Fixed(), "learned": dt.Learned()}


@pytest.mark.parametrize(("name", "mode"), MODES.items())
def test_names_json_and_repr(name, mode):
    assert get_scale_mode(name) == mode
    assert get_scale_mode(mode) is mode
    assert dt.ScaleMode.from_json(mode.to_json()) == mode
    assert eval(repr(mode), vars(dt)) == mode


def test_modes_are_distinct_and_hashable():
    assert len({*MODES.values(), dt.EMA(0.5), dt.EMA(0.99)}) == 5


def test_decay_is_a_float():
    assert isinstance(dt.EMA(0).decay, float)
    assert dt.ScaleMode.from_json('{"kind": "EMA", "decay": 0}') == dt.EMA(0.0)


ASCENDING = [dt.PerBatch(), dt.EMA(0.0), dt.EMA(0.5), dt.EMA(0.99), dt.Fixed(), dt.Learned()]


def test_modes_are_ordered_by_kind_then_decay():
    for (i, one), (k, other) in product(enumerate(ASCENDING), repeat=2):
        assert (one < other, one <= other, one > other, one >= other) == (i < k, i <= k, i > k, i >= k), (one, other)
        assert (one == other) == (i == k)
    assert all(sorted(order) == ASCENDING for order in permutations(ASCENDING))
    assert (min(ASCENDING), max(ASCENDING)) == (dt.PerBatch(), dt.Learned())


@pytest.mark.parametrize("other", ["ema", 0.5, None, 1])
def test_modes_do_not_compare_with_other_values(other):
    for compare in (lambda: dt.EMA(0.5) < other, lambda: dt.EMA(0.5) >= other, lambda: other < dt.EMA(0.5)):
        with pytest.raises(TypeError, match="not supported between instances"):
            compare()
