"""Bytes that are not a valid observer."""

import json

import numpy as np
import pytest
import safetensors.numpy

import detent as dt
from detent import storage
from detent.observers import EMAMinMax, MinMax

from .refusal import check

X = np.array([[1.0, -2.0], [0.5, 0.25]], np.float32)


def forged(make=MinMax, *, about=(), state=(), settings=(), arrays=(), drop=(), metadata=()):
    """Bytes of an observer of X with some contents replaced."""
    stored, described = storage.loads(make(granularity="axis0").observe(X).to_bytes())
    facts = json.loads(described["detent.Observer"])
    facts["state"] |= dict(state)
    facts["settings"] |= dict(settings)
    facts |= dict(about)
    kept = {name: value for name, value in (stored | dict(arrays)).items() if name not in drop}
    return safetensors.numpy.save(kept, {"detent.Observer": json.dumps(facts), **dict(metadata)})


def test_unchanged_bytes_are_valid():
    assert MinMax.from_bytes(forged()).range().lo.tolist() == [-2.0, 0.25]


INVALID = {
    "another kind": (forged(EMAMinMax), "EMAMinMax", "MinMax"),
    "an unknown kind": (forged(about={"kind": "Mean"}), "Mean", "MinMax"),
    "a foreign file": (storage.dumps({"lo": np.zeros(2)}, {"format": "np"}), "MinMax"),
    "no facts": (storage.dumps({}, {"detent.Observer": "{}"}), "MinMax"),
    "facts in a list": (storage.dumps({}, {"detent.Observer": "[]"}), "MinMax"),
    "facts that are not JSON": (storage.dumps({}, {"detent.Observer": "{"}), "MinMax"),
    "facts too deep": (storage.dumps({}, {"detent.Observer": "[" * 100_000}), "MinMax"),
    "another metadata key": (forged(metadata={"comment": "hi"}), "comment"),
    "an extra fact": (forged(about={"comment": "hi"}), "comment"),
    "unknown granularity": (forged(settings={"granularity": {"kind": "row"}}), "row"),
    "an unknown setting": (forged(settings={"decay": 0.5}), "decay"),
    "version": (forged(state={"version": 2}), "version"),
    "negative count": (forged(state={"count": -1}), "count"),
    "count of text": (forged(state={"count": "4"}), "count"),
    "an extra counter": (forged(state={"mean": 1}), "mean"),
    "no hi": (forged(drop=("hi",)), "lo"),
    "an extra array": (forged(arrays={"mean": np.zeros(2)}), "mean"),
    "NaN": (forged(arrays={"lo": np.array([np.nan, 0.0])}), "nan"),
    "infinite": (forged(arrays={"lo": np.array([-np.inf, 0.0])}), "inf"),
    "reversed": (forged(arrays={"lo": np.array([9.0, 0.0])}), "9."),
    "two shapes": (forged(arrays={"lo": np.zeros(3)}), "shape"),
    "another rank": (forged(arrays={"lo": np.zeros((2, 2)), "hi": np.ones((2, 2))}), "(2, 2)"),
}


@pytest.mark.parametrize("name", INVALID)
def test_refused(name):
    data, *words = INVALID[name]
    check(lambda: MinMax.from_bytes(data), dt.FileFormatError, words)


@pytest.mark.parametrize("value", ["some text of many letters", 5, None], ids=repr)
def test_not_bytes(value):
    check(lambda: MinMax.from_bytes(value), dt.DtypeError, [type(value).__name__])


@pytest.mark.parametrize("decay", [1.0, -0.1, "x", None], ids=repr)
def test_an_invalid_decay(decay):
    data = forged(EMAMinMax, settings={"decay": decay})
    check(lambda: EMAMinMax.from_bytes(data), dt.FileFormatError, ["decay"])


@pytest.mark.parametrize("make", [MinMax, EMAMinMax])
def test_truncated_anywhere(make):
    data = make(granularity="axis0").observe(X).to_bytes()
    for length in range(len(data)):
        check(lambda length=length: make.from_bytes(data[:length]), dt.FileFormatError, [])


@pytest.mark.parametrize("make", [MinMax, EMAMinMax])
def test_damaged_bytes_are_refused_or_give_a_valid_observer(make):
    data = make(granularity="axis0").observe(X).to_bytes()
    rng = np.random.default_rng(5)
    for _ in range(400):
        copy = bytearray(data)
        copy[int(rng.integers(len(copy)))] ^= 1 << int(rng.integers(8))
        try:
            observer = make.from_bytes(bytes(copy))
        except dt.FileFormatError:
            continue
        observed = observer.range()
        assert np.isfinite(observed.lo).all()
        assert (observed.lo <= observed.hi).all()
        assert make.from_bytes(observer.to_bytes()).to_bytes() == observer.to_bytes()
