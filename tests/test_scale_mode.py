"""Scale modes as values."""

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
