"""The state of observers: round trips, and corrupted states, which are rejected and change nothing."""

import json

import numpy as np
import pytest

import detent as dt
from detent import storage
from detent.observers import (
    MSE,
    EMAMinMax,
    Entropy,
    HistogramObserver,
    MinMax,
    MinMaxObserver,
    MovingAverageMinMaxObserver,
    Percentile,
)

X = np.random.default_rng(0).normal(size=(3, 50)).astype(np.float32)
HISTOGRAMS = {
    "Percentile": lambda: Percentile(1, 99, "axis0", 3),
    "MSE": lambda: MSE(1.0, "axis0", 3),
    "Entropy": lambda: Entropy("axis0", 3),
}
KINDS = {"MinMax": lambda: MinMax("axis0"), "EMAMinMax": lambda: EMAMinMax(0.5, "axis0"), **HISTOGRAMS}
every_kind = pytest.mark.parametrize("kind", KINDS)
every_histogram = pytest.mark.parametrize("kind", HISTOGRAMS)
REJECTED = (dt.StateError, dt.FileFormatError)


def ask(observer):
    """Parameters from an observer, for two specs."""
    return observer.params("int8/axis0"), observer.params("uint4/axis0")


def test_names_of_pytorch_are_the_same_classes():
    assert (MinMaxObserver, MovingAverageMinMaxObserver, HistogramObserver) == (MinMax, EMAMinMax, MSE)
    assert dt.Rule(observer=HistogramObserver).observer == dt.Rule(observer="mse").observer


@pytest.mark.parametrize(
    ("observer", "text"),
    [
        (MinMax(), "MinMax()"),
        (EMAMinMax(0.5), "EMAMinMax(decay=0.5)"),
        (Percentile(), "Percentile()"),
        (Percentile(1, 99, "group32@0"), "Percentile(lower=1.0, upper=99.0, granularity='group32@0')"),
        (MSE(granularity="block2x8", precision=7), "MSE(granularity='block2x8', precision=7)"),
        (Entropy("token"), "Entropy(granularity='token')"),
    ],
)
def test_repr_is_the_call_without_defaults(observer, text):
    assert repr(observer) == text
    assert eval(text).to_bytes() == observer.to_bytes()


def test_str_adds_what_was_observed():
    observer = MinMax("axis0")
    assert str(observer) == "MinMax(granularity='axis0'), nothing observed"
    assert str(observer.observe(np.full((2, 3), np.nan))) == "MinMax(granularity='axis0'), 6 non-finite values"
    text = str(observer.observe(np.array([[0.5, -1.0], [np.inf, np.nan]])))
    assert (
        text
        == "MinMax(granularity='axis0'), 2 values in 2 parameter sets within [-1, 0.5], 8 non-finite values skipped"
    )
    assert str(MSE().observe(np.linspace(-1, 3, 2000))) == "MSE(), 2,000 values within [-1, 3]"


@every_kind
def test_bytes_round_trip(kind):
    observer = KINDS[kind]().observe(X).observe(X.astype(np.float64) * 2)
    again = type(observer).from_bytes(observer.to_bytes())
    assert again.to_bytes() == observer.to_bytes()
    assert (repr(again), again.count, again.nonfinite) == (repr(observer), observer.count, observer.nonfinite)
    assert ask(again) == ask(observer)
    assert again.observe(X).to_bytes() == observer.observe(X).to_bytes()


@every_kind
def test_state_dict_round_trip(kind):
    observer = KINDS[kind]().observe(X)
    again = KINDS[kind]().observe(X * 9).load_state_dict(observer.state_dict())
    assert again.to_bytes() == observer.to_bytes()
    assert ask(again) == ask(observer)


@every_kind
def test_nothing_observed_round_trip(kind):
    empty = KINDS[kind]()
    assert type(empty).from_bytes(empty.to_bytes()).to_bytes() == empty.to_bytes()
    assert KINDS[kind]().observe(X).load_state_dict(empty.state_dict()).to_bytes() == empty.to_bytes()


@every_kind
def test_nothing_finite_round_trip(kind):
    observer = KINDS[kind]().observe(np.full((3, 2), np.nan, np.float32))
    assert type(observer).from_bytes(observer.to_bytes()).to_bytes() == observer.to_bytes()


@pytest.mark.parametrize("kind", ["MinMax", "EMAMinMax", *HISTOGRAMS])
def test_a_batch_without_elements_round_trip(kind):
    observer = KINDS[kind]().observe(np.empty((3, 0), np.float32))
    assert type(observer).from_bytes(observer.to_bytes()).to_bytes() == observer.to_bytes()


@every_histogram
def test_weighted_round_trip(kind):
    observer = HISTOGRAMS[kind]().observe(X).observe(X, np.abs(X))
    again = type(observer).from_bytes(observer.to_bytes())
    assert again.to_bytes() == observer.to_bytes()
    assert again.weighted is True
    assert again.observe(X).to_bytes() == observer.observe(X).to_bytes()


@every_histogram
def test_precision_is_part_of_the_bytes(kind):
    assert type(HISTOGRAMS[kind]()).from_bytes(HISTOGRAMS[kind]().to_bytes()).precision == 3


@every_kind
def test_state_is_a_copy(kind):
    observer = KINDS[kind]().observe(X)
    before = observer.to_bytes()
    state = observer.state_dict()
    again = KINDS[kind]().load_state_dict(state)
    for array in (value for value in state.values() if isinstance(value, np.ndarray)):
        array[...] = 1
    assert observer.to_bytes() == again.to_bytes() == before


@every_kind
def test_state_of_files_is_read_only_and_does_not_matter(kind):
    observer = type(KINDS[kind]()).from_bytes(KINDS[kind]().observe(X).to_bytes())
    assert observer.observe(X).to_bytes() == KINDS[kind]().observe(X).observe(X).to_bytes()


@every_kind
def test_reset_forgets_everything(kind):
    assert KINDS[kind]().observe(X).reset().to_bytes() == KINDS[kind]().to_bytes()


def changed(name, change):
    """A corruption that replaces one entry."""
    return lambda state: {**state, name: change(state[name])}


def moved(counts):
    """Counts with one more element in the first non-empty bin."""
    counts = counts.copy()
    counts.flat[np.flatnonzero(counts)[0]] += 1
    return counts


def replaced(array, index, value):
    array = array.copy()
    array.flat[index] = value
    return array


def with_bit(rows, row):
    bits = np.unpackbits(rows)
    bits[row] ^= 1
    return np.packbits(bits)


def moved_to(rows, row):
    """Rows with the last one moved, as many as before."""
    bits = np.unpackbits(rows)
    bits[np.flatnonzero(bits)[-1]] = 0
    bits[row] = 1
    return np.packbits(bits)


ANY = {
    "no mapping": list,
    "no version": lambda state: {name: value for name, value in state.items() if name != "version"},
    "no count": lambda state: {name: value for name, value in state.items() if name != "count"},
    "no lo": lambda state: {name: value for name, value in state.items() if name != "lo"},
    "no hi": lambda state: {name: value for name, value in state.items() if name != "hi"},
    "an extra key": lambda state: {**state, "mean": np.zeros(3)},
    "another version": lambda state: {**state, "version": 2},
    "a version that is a boolean": lambda state: {**state, "version": True},
    "a negative count": lambda state: {**state, "count": -1},
    "a count that is a float": lambda state: {**state, "count": 150.0},
    "a negative number of others": lambda state: {**state, "nonfinite": -1},
    "bounds of another dtype": changed("lo", lambda lo: lo.astype(np.float16)),
    "bounds as integers": changed("hi", lambda hi: hi.astype(np.int64)),
    "bounds of another shape": changed("lo", lambda lo: lo[:2]),
    "bounds of another rank": lambda state: {**state, "lo": state["lo"][None], "hi": state["hi"][None]},
    "bounds exchanged": lambda state: {**state, "lo": state["hi"], "hi": state["lo"]},
    "bounds that are NaN": changed("lo", lambda lo: replaced(lo, 0, np.nan)),
    "bounds that are infinite": changed("hi", lambda hi: replaced(hi, 1, np.inf)),
}
HISTOGRAM = {
    "no rows": lambda state: {name: value for name, value in state.items() if name != "rows"},
    "no counts": lambda state: {name: value for name, value in state.items() if name != "counts"},
    "bounds alone": lambda state: {name: value for name, value in state.items() if name not in ("rows", "counts")},
    "weights unknown": lambda state: {name: value for name, value in state.items() if name != "weighted"},
    "rows of another dtype": changed("rows", lambda rows: rows.astype(np.int64)),
    "rows of another rank": changed("rows", lambda rows: rows[:, None]),
    "a row too few": changed("rows", lambda rows: rows[:-1]),
    "another row": changed("rows", lambda rows: with_bit(rows, 7)),
    "a row of infinity": changed("rows", lambda rows: moved_to(rows, 511)),
    "a row of positive infinity": changed("rows", lambda rows: moved_to(rows, 255)),
    "counts of another dtype": changed("counts", lambda counts: counts.astype(np.int32)),
    "counts as floats": changed("counts", lambda counts: counts.astype(np.float64)),
    "counts of another precision": changed("counts", lambda counts: counts[..., ::2].copy()),
    "counts of fewer sets": changed("counts", lambda counts: counts[:, :2].copy()),
    "counts of another rank": changed("counts", lambda counts: counts.reshape(counts.shape[0], -1)),
    "a negative number in a bin": changed("counts", lambda counts: replaced(replaced(counts, 0, -1), 1, 1)),
    "one element too many": changed("counts", moved),
    "another count": lambda state: {**state, "count": state["count"] + 1},
    "counts whose sum overflows": changed("counts", lambda counts: np.full_like(counts, 1 << 62)),
}
CASES = [(kind, name, ANY[name]) for kind in KINDS for name in ANY]
CASES += [(kind, name, HISTOGRAM[name]) for kind in HISTOGRAMS for name in HISTOGRAM]


@pytest.mark.parametrize(("kind", "corrupt"), [case[::2] for case in CASES], ids=[f"{a}-{b}" for a, b, _ in CASES])
def test_a_corrupted_state_is_rejected_and_changes_nothing(kind, corrupt):
    observer = KINDS[kind]().observe(X * 3)
    before = observer.to_bytes()
    with pytest.raises(dt.StateError):
        observer.load_state_dict(corrupt(KINDS[kind]().observe(X).state_dict()))
    assert observer.to_bytes() == before


@every_kind
def test_elements_without_arrays_are_rejected(kind):
    with pytest.raises(dt.StateError):
        KINDS[kind]().load_state_dict({**KINDS[kind]().state_dict(), "count": 5})


@every_histogram
def test_counts_of_a_state_add_up_in_python_integers(kind):
    state = HISTOGRAMS[kind]().observe(X).state_dict()
    state["counts"] = np.full_like(state["counts"], 1 << 62)
    state["count"] = int(state["counts"].sum())
    with pytest.raises(dt.StateError):
        HISTOGRAMS[kind]().load_state_dict(state)


@every_kind
def test_truncated_bytes_are_rejected(kind):
    data = KINDS[kind]().observe(X).to_bytes()
    for length in [*range(0, len(data), 37), len(data) - 1]:
        with pytest.raises(dt.FileFormatError):
            type(KINDS[kind]()).from_bytes(data[:length])
    with pytest.raises(dt.FileFormatError):
        type(KINDS[kind]()).from_bytes(data + b"\0")


@every_kind
def test_flipped_bits_are_rejected_or_make_another_observer(kind):
    data = KINDS[kind]().observe(X).to_bytes()
    for place in range(0, len(data), 7):
        flipped = bytearray(data)
        flipped[place] ^= 1 << place % 8
        try:
            observer = type(KINDS[kind]()).from_bytes(bytes(flipped))
        except REJECTED:
            continue
        assert type(observer).from_bytes(observer.to_bytes()).to_bytes() == observer.to_bytes()


@every_histogram
def test_flipped_bits_of_counts_are_rejected(kind):
    observer = HISTOGRAMS[kind]().observe(X)
    data = observer.to_bytes()
    counts = observer.state_dict()["counts"].tobytes()
    start = data.index(counts)
    for place in range(start, start + len(counts), 11):
        flipped = bytearray(data)
        flipped[place] ^= 1 << place % 8
        with pytest.raises(REJECTED):
            type(observer).from_bytes(bytes(flipped))


def forged(observer, **changes):
    """The observer's bytes with changed metadata."""
    arrays, metadata = storage.loads(observer.to_bytes())
    about = {**json.loads(metadata["detent.Observer"]), **changes}
    return storage.dumps(arrays, {"detent.Observer": json.dumps(about)})


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"granularity": {"kind": "tensor"}},
        {"precision": 11},
        {"precision": 0},
        {"precision": 4},
        {"precision": "3"},
        {"lower": 99},
        {"upper": 101},
        {"upper": None},
        {"more": 1},
    ],
    ids=str,
)
def test_other_settings_are_rejected(settings):
    observer = Percentile(1, 99, "axis0", 3).observe(X)
    whole = observer._settings()
    with pytest.raises(dt.FileFormatError):
        Percentile.from_bytes(forged(observer, settings={**whole, **settings} if settings else {}))


@every_kind
def test_the_bytes_of_another_kind_are_rejected(kind):
    data = KINDS[kind]().observe(X).to_bytes()
    for other, make in KINDS.items():
        if other != kind:
            with pytest.raises(dt.FileFormatError, match=f"the bytes of a {kind}, expected a {other}"):
                type(make()).from_bytes(data)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (Percentile(1, 99), Percentile(2, 99)),
        (Percentile(1, 99), Percentile(1, 98)),
        (Percentile(precision=5), Percentile(precision=4)),
        (MSE(2), MSE(1)),
        (MSE(precision=5), MSE(precision=6)),
        (Entropy(precision=5), Entropy(precision=6)),
        (Entropy("axis0"), Entropy("axis1")),
        (MinMax("axis0"), MinMax("tensor")),
        (EMAMinMax(0.5), EMAMinMax(0.25)),
    ],
    ids=lambda observer: f"{observer!r}",
)
def test_settings_that_differ_do_not_merge(a, b):
    a, b = a.observe(X), b.observe(X)
    before = a.to_bytes(), b.to_bytes()
    with pytest.raises(dt.StateError, match="merge observers with the same settings"):
        a.merge(b)
    assert (a.to_bytes(), b.to_bytes()) == before


@every_kind
def test_other_kinds_and_other_shapes_do_not_merge(kind):
    observer = KINDS[kind]().observe(X)
    before = observer.to_bytes()
    other = MinMax("axis0") if kind != "MinMax" else Entropy("axis0")
    with pytest.raises(dt.DtypeError, match="merge observers of the same class"):
        observer.merge(other)
    with pytest.raises(dt.ShapeError, match="expected equal shapes"):
        observer.merge(KINDS[kind]().observe(X[:2]))
    assert observer.to_bytes() == before


@every_kind
def test_a_batch_of_other_sets_is_rejected_and_changes_nothing(kind):
    observer = KINDS[kind]().observe(X)
    before = observer.to_bytes()
    with pytest.raises(dt.ShapeError, match="use one observer per shape"):
        observer.observe(X[:2])
    assert observer.to_bytes() == before


@every_histogram
@pytest.mark.parametrize("weighted", [0, 1])
def test_counts_that_the_next_batch_could_overflow_are_rejected(kind, weighted):
    state = KINDS[kind]().observe(X).state_dict()
    counts = np.zeros_like(state["counts"])
    counts[0, 0, 0] = 2**63 - 1
    observer = KINDS[kind]().observe(X)
    before = observer.to_bytes()
    with pytest.raises(dt.StateError, match="with a sum below 2\\^62"):
        observer.load_state_dict({**state, "counts": counts, "count": 2**63 - 1, "weighted": weighted})
    assert observer.to_bytes() == before
