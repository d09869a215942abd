"""Calibrate: batches into observers, with progress, resume files that give the same bits, and a memory budget."""

import gc
import io
import shutil
import tracemalloc
from itertools import islice

import ml_dtypes
import numpy as np
import pytest

import detent as dt
from detent import storage
from detent.observers import MSE, EMAMinMax, Entropy, MinMax, Percentile, budget, calibrate

RNG = np.random.default_rng(0)
BATCHES = [RNG.normal(size=(3, 20)).astype(np.float32) * 2.0**i for i in range(6)]
NAMED = [{"a": x, "b": x.T, "c": x[0]} for x in BATCHES]
HISTOGRAMS = {
    "Percentile": lambda: Percentile(granularity="axis0"),
    "MSE": lambda: MSE(granularity="axis0"),
    "Entropy": lambda: Entropy("axis0"),
}
KINDS = {"MinMax": lambda: MinMax("axis0"), "EMAMinMax": lambda: EMAMinMax(0.5, "axis0"), **HISTOGRAMS}
every_kind = pytest.mark.parametrize("kind", KINDS)


def watching():
    return {"a": Percentile(granularity="axis0"), "b": EMAMinMax(0.5)}


def all_bytes(observers):
    return {name: observer.to_bytes() for name, observer in observers.items()}


def interrupted(batches, after):
    """Yield that many batches, then raise an exception."""
    yield from islice(batches, after)
    raise RuntimeError("the power went out")


def run_until(after, observers, path, batches=BATCHES, every=2):
    with pytest.raises(RuntimeError, match="the power went out"):
        calibrate(interrupted(batches, after), observers, resume_file=path, every=every)


@every_kind
def test_one_observer(kind):
    observer, expected = KINDS[kind](), KINDS[kind]()
    for x in BATCHES:
        expected.observe(x)
    assert calibrate(BATCHES, observer) is observer
    assert observer.to_bytes() == expected.to_bytes()


def test_several_observers_by_name():
    observers, a, b = watching(), Percentile(granularity="axis0"), EMAMinMax(0.5)
    for x in BATCHES:
        a.observe(x)
        b.observe(x.T)
    assert calibrate(iter(NAMED), observers) is observers
    assert all_bytes(observers) == {"a": a.to_bytes(), "b": b.to_bytes()}


def test_what_was_observed_before_stays():
    observer = calibrate(BATCHES[3:], calibrate(BATCHES[:3], MinMax("axis0")))
    assert observer.to_bytes() == calibrate(BATCHES, MinMax("axis0")).to_bytes()


@pytest.mark.parametrize(("batches", "total"), [(BATCHES, 6), (iter(BATCHES), None), (np.stack(BATCHES), 6)])
def test_progress_is_called_after_each_batch(batches, total):
    seen = []
    calibrate(batches, MinMax("axis0"), progress=lambda *done: seen.append(done))
    assert seen == [(number, total) for number in range(1, 7)]


@pytest.mark.parametrize("progress", [True, False])
def test_nothing_is_printed_where_there_is_no_terminal(progress, capsys):
    calibrate(BATCHES, MinMax("axis0"), progress=progress)
    assert capsys.readouterr() == ("", "")


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(("progress", "expected"), [(True, "6/6 batches"), (False, "")])
def test_a_bar_on_a_terminal(progress, expected, monkeypatch):
    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    calibrate(BATCHES, MinMax("axis0"), progress=progress)
    assert expected in stream.getvalue()
    assert bool(stream.getvalue()) is progress


@pytest.mark.parametrize("batches", [[], iter(()), {}])
def test_no_batches(batches, tmp_path):
    with pytest.raises(dt.NotCalibratedError, match="there are no calibration batches: pass at least one"):
        calibrate(batches, MinMax(), resume_file=tmp_path / "c")
    assert list(tmp_path.iterdir()) == []


def test_nothing_finite_names_the_tensor():
    batch = {"a": np.ones((3, 2), np.float32), "b": np.array([np.nan], np.float32)}
    with pytest.raises(dt.NotCalibratedError, match=r"'b': .*no finite value"):
        calibrate([batch], watching())


def test_the_error_for_a_missing_name_has_the_batch():
    with pytest.raises(dt.ShapeError, match=r"batch 2 has the arrays \['a'\], but no array 'b'"):
        calibrate([NAMED[0], {"a": BATCHES[1]}], watching())


def test_an_array_where_names_are_expected():
    with pytest.raises(dt.ShapeError, match=r"batch 1 is of type ndarray, expected a dict \{name: array\}"):
        calibrate(BATCHES, watching())


def test_the_error_for_a_wrong_shape_has_name_and_batch():
    with pytest.raises(dt.ShapeError, match=r"'a' in batch 3: .*use one observer per shape"):
        calibrate([*NAMED[:2], {"a": BATCHES[0][:2], "b": BATCHES[0]}], watching())


def test_the_error_for_integers_has_name_and_batch():
    with pytest.raises(dt.DtypeError, match="'b' in batch 1: x has dtype int64"):
        calibrate([{"a": BATCHES[0], "b": np.arange(3)}], watching())


@pytest.mark.parametrize("every", [0, -1, 1.5, True])
def test_every_must_be_positive(every):
    with pytest.raises(dt.SpecError, match="every must be an integer"):
        calibrate(BATCHES, MinMax("axis0"), every=every)


@pytest.mark.parametrize("after", range(7))
@every_kind
def test_an_interrupted_run_resumes_to_the_same_bytes(kind, after, tmp_path):
    run_until(after, KINDS[kind](), tmp_path / "c")
    resumed = calibrate(BATCHES, KINDS[kind](), resume_file=tmp_path / "c")
    assert resumed.to_bytes() == calibrate(BATCHES, KINDS[kind]()).to_bytes()


def test_several_observers_resume_to_the_same_bytes(tmp_path):
    for after in (1, 2, 5):
        run_until(after, watching(), tmp_path / "c", NAMED)
    resumed = calibrate(NAMED, watching(), resume_file=tmp_path / "c")
    assert all_bytes(resumed) == all_bytes(calibrate(NAMED, watching()))


@every_kind
def test_a_killed_run_resumes_from_the_last_save(kind, tmp_path):
    def batches():
        for number, x in enumerate(BATCHES, start=1):
            if number == 5:  # the file as it is before the fifth batch
                shutil.copy(tmp_path / "c", tmp_path / "killed")
            yield x

    whole = calibrate(batches(), KINDS[kind](), resume_file=tmp_path / "c", every=3).to_bytes()
    seen = []
    resumed = calibrate(
        BATCHES, KINDS[kind](), resume_file=tmp_path / "killed", progress=lambda *done: seen.append(done)
    )
    assert seen == [(4, 6), (5, 6), (6, 6)]
    assert resumed.to_bytes() == whole


@every_kind
def test_batches_already_seen_are_not_observed_again(kind, tmp_path):
    run_until(4, KINDS[kind](), tmp_path / "c")
    spoilt = [np.full((1, 1, 1), np.nan)] * 3  # which every observer rejects
    resumed = calibrate([*spoilt, *BATCHES[3:]], KINDS[kind](), resume_file=tmp_path / "c")
    assert resumed.to_bytes() == calibrate(BATCHES, KINDS[kind]()).to_bytes()


def test_a_finished_run_is_not_repeated(tmp_path):
    first = calibrate(BATCHES, MinMax("axis0"), resume_file=tmp_path / "c")
    saved, seen = (tmp_path / "c").read_bytes(), []
    again = calibrate(BATCHES, MinMax("axis0"), resume_file=tmp_path / "c", progress=lambda *done: seen.append(done))
    assert seen == []
    assert again.to_bytes() == first.to_bytes()
    assert (tmp_path / "c").read_bytes() == saved


def test_an_observer_that_has_seen_something_does_not_resume(tmp_path):
    run_until(3, MinMax("axis0"), tmp_path / "c")
    held = MinMax("axis0").observe(BATCHES[0] * 1000)
    before = held.to_bytes()
    with pytest.raises(dt.StateError, match="pass a new observer"):
        calibrate(BATCHES, held, resume_file=str(tmp_path / "c"))
    assert held.to_bytes() == before


def test_other_batches_do_not_resume(tmp_path):
    calibrate(BATCHES, MinMax("axis0"), resume_file=tmp_path / "c")
    with pytest.raises(dt.FileFormatError, match=r"got 2 batches, .* was saved after 6"):
        calibrate(BATCHES[:2], MinMax("axis0"), resume_file=tmp_path / "c")
    with pytest.raises(dt.FileFormatError, match="differs from the last batch"):
        calibrate([batch * 2 for batch in BATCHES], MinMax("axis0"), resume_file=tmp_path / "c")


@pytest.mark.parametrize("observers", [MinMax, [MinMax()], {"a": 1}, {"__metadata__": MinMax()}, {3: MinMax()}])
def test_values_that_are_not_observers(observers):
    with pytest.raises(dt.DtypeError, match="observer"):
        calibrate(BATCHES, observers)


def test_the_batch_is_named():
    with pytest.raises(dt.ShapeError, match=r"^batch 2: "):
        calibrate([np.ones((2, 3)), np.ones((5, 3))], MinMax("axis0"))


def test_only_the_resume_file_is_left_behind(tmp_path):
    calibrate(BATCHES, MinMax("axis0"), resume_file=tmp_path / "c", every=1)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_a_batch_that_fails_half_way_is_not_saved(tmp_path):
    def make():
        return {"a": MinMax("axis0"), "b": MinMax()}

    with pytest.raises(dt.DtypeError, match="'b' in batch 2"):
        calibrate([NAMED[0], {"a": BATCHES[1], "b": np.arange(3)}], make(), resume_file=tmp_path / "c")
    resumed = calibrate(NAMED, make(), resume_file=tmp_path / "c")
    assert all_bytes(resumed) == all_bytes(calibrate(NAMED, make()))


OTHERS = {
    "other percentiles": (Percentile(1, 99), Percentile(2, 99)),
    "another precision": (Percentile(precision=5), Percentile(precision=4)),
    "another norm": (MSE(2), MSE(1)),
    "another precision of MSE": (MSE(precision=5), MSE(precision=4)),
    "another precision of Entropy": (Entropy(precision=5), Entropy(precision=4)),
    "another decay": (EMAMinMax(0.5), EMAMinMax(0.25)),
    "another granularity": (MinMax("axis0"), MinMax("tensor")),
    "another granularity with as many sets": (MinMax("axis0"), MinMax("token")),
    "another kind": (MinMax(), EMAMinMax()),
    "another kind of histogram": (MSE(), Entropy()),
    "one by name": (MinMax(), {"a": MinMax()}),
    "other names": ({"a": MinMax(), "b": MinMax()}, {"a": MinMax(), "c": MinMax()}),
    "fewer names": ({"a": MinMax(), "b": MinMax()}, {"a": MinMax()}),
    "more names": ({"a": MinMax()}, {"a": MinMax(), "b": MinMax()}),
    "names exchanged": ({"a": MinMax(), "b": Entropy()}, {"a": Entropy(), "b": MinMax()}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_the_resume_file_of_other_observers_is_rejected(name, tmp_path):
    saved, other = OTHERS[name]
    batches = [NAMED, BATCHES]
    calibrate(batches[not isinstance(saved, dict)], saved, resume_file=tmp_path / "c")
    before = (tmp_path / "c").read_bytes()
    with pytest.raises((dt.FileFormatError, dt.StateError)):
        calibrate(batches[not isinstance(other, dict)], other, resume_file=tmp_path / "c")
    assert (tmp_path / "c").read_bytes() == before


def test_a_rejected_resume_file_does_not_change_observers(tmp_path):
    calibrate(NAMED, {"a": MinMax(), "b": EMAMinMax(0.5)}, resume_file=tmp_path / "c")
    others = {"a": MinMax(), "b": EMAMinMax(0.25)}
    before = all_bytes(others)
    with pytest.raises(dt.FileFormatError):
        calibrate(NAMED, others, resume_file=tmp_path / "c")
    assert all_bytes(others) == before


CORRUPTED = {
    "empty": lambda data: b"",
    "truncated": lambda data: data[:-1],
    "truncated by half": lambda data: data[: len(data) // 2],
    "longer": lambda data: data + b"\0",
    "another length of the header": lambda data: bytes([data[0] ^ 1]) + data[1:],
    "not a resume file": lambda data: storage.dumps({"x": np.zeros(3, np.uint8)}, {}),
    "an observer": lambda data: MinMax().observe([1.0]).to_bytes(),
    "another version": lambda data: data.replace(rb"\"version\": 1, \"batches\"", rb"\"version\": 2, \"batches\""),
    "no batches": lambda data: data.replace(rb"\"batches\": 6", rb"\"batches\": 0"),
    "batches that are not a number": lambda data: data.replace(rb"\"batches\": 6", rb"\"batches\": []"[:15]),
    "an observer of another kind": lambda data: data.replace(b'\\"kind\\": \\"MinMax\\"', b'\\"kind\\": \\"MaxMin\\"'),
}


@pytest.mark.parametrize("name", CORRUPTED)
def test_a_corrupted_resume_file_is_rejected_and_kept(name, tmp_path):
    calibrate(BATCHES, MinMax("axis0"), resume_file=tmp_path / "c")
    whole = (tmp_path / "c").read_bytes()
    corrupted = CORRUPTED[name](whole)
    assert corrupted != whole
    (tmp_path / "c").write_bytes(corrupted)
    observer = MinMax("axis0")
    with pytest.raises(dt.FileFormatError):
        calibrate(BATCHES, observer, resume_file=tmp_path / "c")
    assert (tmp_path / "c").read_bytes() == corrupted
    assert observer.to_bytes() == MinMax("axis0").to_bytes()


def test_budget_adds_up():
    observers = {"a": Percentile(granularity="axis0"), "b": EMAMinMax(), "c": MinMax("token")}
    shapes = {"a": (3, 20), "b": (7,), "c": (5, 2), "not watched": (9,)}
    sizes = budget(observers, shapes)
    assert list(sizes) == ["a", "b", "c", "total"]
    assert sizes["total"] == sizes["a"] + sizes["b"] + sizes["c"]
    assert {name: observer.max_nbytes(shapes[name]) for name, observer in observers.items()}.items() <= sizes.items()
    assert (sizes["b"], sizes["c"]) == (8, 80)


def test_budget_needs_every_shape():
    with pytest.raises(dt.ShapeError, match=r"got shapes for \['a'\], but no shape for observer 'b'"):
        budget({"a": MinMax(), "b": MinMax()}, {"a": (3,)})


@pytest.mark.parametrize("precision", [1, 5, 10])
@pytest.mark.parametrize("granularity", ["tensor", "axis0", "axis1", "token", "group8", "block2x8"])
def test_observers_stay_within_their_budget(granularity, precision):
    x = np.random.default_rng(0).standard_cauchy(size=(3, 20)).astype(np.float32)
    for make in (Entropy, MSE, Percentile):
        observer = make(granularity=granularity, precision=precision)
        for i in range(20):
            observer.observe(x * np.float32(2.0**i))
            assert observer.nbytes <= observer.max_nbytes(x.shape)
    for observer in (MinMax(granularity), EMAMinMax(granularity=granularity)):
        assert observer.observe(x).nbytes == observer.max_nbytes(x.shape)


@pytest.mark.parametrize("precision", [1, 5])
def test_every_exponent_stays_within_the_budget(precision):
    with np.errstate(invalid="ignore"):  # signalling NaN
        x = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
    observer = Entropy(precision=precision).observe(x)
    assert observer.nbytes <= observer.max_nbytes(x.shape)


def peak(make, count):
    """Return the peak memory of calibrating with that many batches."""
    tracemalloc.start()
    try:
        calibrate((BATCHES[i % 6].repeat(400, axis=-1) for i in range(count)), make(), progress=False)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "kind", ["Percentile", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("MinMax", "EMAMinMax"))]
)
def test_many_batches_take_as_much_memory_as_few(kind):
    gc.collect()
    gc.disable()  # a collection empties Python's free list of tuples, which then fills up again
    try:
        peak(KINDS[kind], 2100)
        few, many = peak(KINDS[kind], 10), peak(KINDS[kind], 10_000)
    finally:
        gc.enable()
    assert many == pytest.approx(few, rel=0.05)
