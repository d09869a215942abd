"""Data for a model: all supported forms, and all errors."""

import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from onnx import TensorProto, helper, parser

import detent as dt
from detent.onnx_model.batches import Batches, open_batches
from detent.onnx_model.model_inputs import InputInfo, inputs_of

F32, I64 = np.dtype("float32"), np.dtype("int64")
X = InputInfo("x", F32, (None, 3))
MASK = InputInfo("mask", I64, (None, None))
FIXED = InputInfo("x", F32, (4, 3))


def x(rows=2, start=0.0):
    return (np.arange(rows * 3, dtype=np.float32) + np.float32(start)).reshape(rows, 3)


def mask(rows=2, columns=5):
    return np.ones((rows, columns), np.int64)


def shapes(batches):
    return [{name: array.shape for name, array in feed.items()} for feed in batches]


def refusal(error, words, data, inputs, **options):
    """Check that opening or reading the data raises that error."""
    with pytest.raises(error) as caught:
        list(open_batches(data, inputs, **options))
    assert isinstance(caught.value, dt.DetentError)
    assert not [word for word in words if word not in str(caught.value)], str(caught.value)


# Iterables


@pytest.mark.parametrize(
    "batch",
    [{"x": x(), "mask": mask()}, {"mask": mask(), "x": x()}, (x(), mask()), [x(), mask()]],
    ids=["dict", "dict in another order", "tuple", "list"],
)
def test_batches_of_two_inputs(batch):
    (feed,) = open_batches([batch], [X, MASK])
    assert list(feed) == ["x", "mask"]
    assert np.array_equal(feed["x"], x())
    assert np.array_equal(feed["mask"], mask())


def test_batches_of_one_input_may_be_arrays_and_differ_in_shape():
    batches = open_batches([x(2), x(5), (x(1),), {"x": x(3)}], [X])
    assert shapes(batches) == [{"x": (2, 3)}, {"x": (5, 3)}, {"x": (1, 3)}, {"x": (3, 3)}]
    assert batches.is_repeatable
    assert batches.count == 4
    assert len(shapes(batches)) == 4


def test_arrays_are_not_copied():
    given = x()
    (feed,) = open_batches([given], [X])
    assert np.shares_memory(feed["x"], given)


def test_tensors_of_torch_are_arrays():
    torch = pytest.importorskip("torch")
    (feed,) = open_batches([torch.ones(2, 3)], [X])
    assert np.array_equal(feed["x"], np.ones((2, 3)))
    refusal(dt.DtypeError, ["'x'", "batch 0", "detach"], [torch.ones(2, 3, requires_grad=True)], [X])


def test_the_first_batch_of_an_iterator_is_checked_and_put_back():
    taken = []

    def source():
        for i in range(3):
            taken.append(i)
            yield x(start=i)

    batches = open_batches(source(), [X])
    assert taken == [0]
    assert [feed["x"][0, 0] for feed in batches] == [0, 1, 2]
    assert not batches.is_repeatable
    assert batches.count is None
    with pytest.raises(dt.SpecError, match="pass a list"):
        list(batches)


def test_an_iterable_that_was_read_before_is_rejected():
    class Once:
        def __init__(self):
            self.rest = iter([x()])

        def __iter__(self):
            return self.rest

    batches = open_batches(Once(), [X])
    assert len(list(batches)) == 1
    with pytest.raises(dt.SpecError, match="no batches"):
        list(batches)


def test_a_lazy_source_is_started_once_per_pass():
    starts = []

    class Loader:
        def __iter__(self):
            starts.append(1)
            return iter([x(), x()])

    batches = open_batches(Loader(), [X])
    list(batches)
    assert len(starts) == 1
    list(batches)
    assert len(starts) == 2


def test_a_callable_is_called_once_per_pass():
    calls = []

    def data():
        calls.append(1)
        return (x(start=i) for i in range(3))

    batches = open_batches(data, [X])
    assert (batches.is_repeatable, batches.count) == (True, None)
    assert [[feed["x"][0, 0] for feed in batches] for _ in range(2)] == [[0, 1, 2]] * 2
    assert len(calls) == 2
    counted = batches.with_count()
    assert (counted.count, len(calls)) == (3, 3)
    assert [feed["x"][0, 0] for feed in counted.subset([0, 2])] == [0, 2]
    assert batches.with_count().with_count().count == 3


@pytest.mark.parametrize("result", [None, 3, x(), {"x": x()}], ids=str)
def test_a_callable_that_returns_no_iterator(result):
    refusal(dt.SpecError, ["data() returned", type(result).__name__, "return iter"], lambda: result, [X])


def test_an_iterator_of_unknown_length_cannot_be_counted():
    with pytest.raises(dt.SpecError, match="callable that returns an iterator"):
        open_batches(iter([x()]), [X]).with_count()


# Labels


LABELS = np.array([1, 0])


@pytest.mark.parametrize(
    "batch",
    [
        (x(), mask(), LABELS),
        [x(), mask(), LABELS],
        ((x(), mask()), LABELS),
        ({"mask": mask(), "x": x()}, LABELS),
        {"x": x(), "mask": mask(), "labels": LABELS},
        {"x": x(), "Target": LABELS, "mask": mask()},
    ],
    ids=["tuple", "list", "pair of tuples", "pair with a dict", "dict", "dict with another name"],
)
def test_labels_are_kept_apart(batch):
    batches = open_batches([batch, batch], [X, MASK])
    assert [list(feed) for feed in batches] == [["x", "mask"]] * 2
    assert batches.labels.tolist() == [1, 0, 1, 0]
    assert batches.subset([1]).labels.tolist() == [1, 0]


INVALID_LABELS = {"one array": np.array([1]), "text": "ab", "dicts": [{"box": 1}, {}], "none": None, "object": object()}


@pytest.mark.parametrize("labels", INVALID_LABELS.values(), ids=INVALID_LABELS)
def test_labels_that_are_not_one_per_sample_are_dropped(labels):
    batches = open_batches([(x(), labels)], [X])
    assert len(list(batches)) == 1
    assert batches.labels is None


def test_labels_are_known_after_a_pass():
    batches = open_batches([(x(), LABELS), (x(1), LABELS[:1])], [X])
    assert batches.labels is None
    list(batches)
    assert batches.labels.tolist() == [1, 0, 1]
    assert open_batches([x()], [X]).labels is None


def test_loaders_of_torch():
    torch = pytest.importorskip("torch")
    from torch.utils.data import DataLoader, TensorDataset

    data = TensorDataset(torch.from_numpy(x(5)), torch.arange(5))
    batches = open_batches(DataLoader(data, batch_size=2), [X])
    assert (batches.count, batches.is_repeatable, batches.notes) == (3, True, ())
    assert np.array_equal(np.concatenate([feed["x"] for feed in batches]), x(5))
    assert batches.labels.tolist() == [0, 1, 2, 3, 4]
    assert [len(feed["x"]) for feed in batches.subset([0, 2])] == [2, 1]
    by_name = [{"x": x(5)[i], "mask": mask(5)[i]} for i in range(5)]
    assert shapes(open_batches(DataLoader(by_name, batch_size=5), [X, MASK])) == [{"x": (5, 3), "mask": (5, 5)}]
    (note,) = open_batches(DataLoader(data, shuffle=True), [X]).notes
    assert "shuffle=False" in note


def test_loaders_without_a_length():
    torch = pytest.importorskip("torch")
    from torch.utils.data import DataLoader, IterableDataset

    class Stream(IterableDataset):
        def __iter__(self):
            return iter(torch.from_numpy(x(4)))

    batches = open_batches(DataLoader(Stream(), batch_size=2), [X])
    assert (batches.count, batches.with_count().count) == (None, 2)


def test_tensors_with_a_method_numpy():
    class Tensor:
        def numpy(self):
            return x()

    (feed,) = open_batches([Tensor()], [X])
    assert np.array_equal(feed["x"], x())


# Types


@pytest.mark.parametrize("kind", ["iterable", "file", "directory"])
def test_types_are_converted_with_a_note(tmp_path, kind, caplog):
    arrays = {"x": x(4).astype(np.float64) + 0.1, "mask": mask(4).astype(np.int32)}
    (tmp_path / "many").mkdir()
    np.savez(tmp_path / "d.npz", **arrays)
    np.savez(tmp_path / "many" / "0.npz", **arrays)
    data = {"iterable": [arrays, arrays], "file": tmp_path / "d.npz", "directory": tmp_path / "many"}[kind]
    batches = open_batches(data, [X, MASK])
    with caplog.at_level("INFO", "detent"):
        feeds = list(batches)
    assert np.array_equal(feeds[0]["x"][0], arrays["x"][0].astype(F32))
    assert {feed["mask"].dtype for feed in feeds} == {I64}
    notes = ("data: input 'x' rounded from float64 to float32", "data: input 'mask' converted from int32 to int64")
    assert batches.notes == notes
    assert len(caplog.messages) == (0 if kind == "iterable" else 2)  # an iterable was checked when it was opened


def test_integers_that_do_not_fit_are_errors():
    data = [x().astype(np.int64), np.full((1, 3), 2**24 + 1)]
    refusal(dt.DtypeError, ["batch 1", "'x'", "16777217", "not exact in float32"], data, [X])


@pytest.mark.parametrize(
    ("data", "error", "words"),
    [
        (None, dt.SpecError, ["missing", ".npz"]),
        ([], dt.SpecError, ["no batches"]),
        (iter([]), dt.SpecError, ["no batches"]),
        (x(), dt.SpecError, ["ndarray", "[data]"]),
        ({"x": x()}, dt.SpecError, ["dict", "[data]"]),
        (3, dt.SpecError, ["int"]),
        ([x().astype(np.float16)], dt.DtypeError, ["batch 0", "'x'", "float16", "x.astype('float32')"]),
        ([x().astype(">f4")], dt.DtypeError, ["float32"]),
        ([[1.0, 2.0, 3.0]], dt.SpecError, ["batch 0", "must be 1, or one more for labels, got 3"]),
        ([(5,)], dt.DtypeError, ["'x'", "int", "float32"]),
        ([x()[0]], dt.ShapeError, ["(3,)", "(any, 3)"]),
        ([x()[:, :2]], dt.ShapeError, ["(2, 2)", "(any, 3)"]),
        ([x(0)], dt.ShapeError, ["(0, 3)", "at least one"]),
        ([(x(), mask(), mask())], dt.SpecError, ["must be 1, or one more for labels, got 3"]),
        ([{"X": x()}], dt.SpecError, ["'X'", "its inputs are x"]),
        ([{}], dt.SpecError, ["no array for x"]),
        ([x(), x(), x()[:, :2]], dt.ShapeError, ["batch 2", "(2, 2)"]),
        ([x(), {"y": x()}], dt.SpecError, ["batch 1", "'y'"]),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_batches_that_do_not_fit_are_rejected(data, error, words):
    refusal(error, words, data, [X])


@pytest.mark.parametrize(("value", "error"), [(np.nan, dt.NaNError), (np.inf, dt.RangeError), (-np.inf, dt.RangeError)])
@pytest.mark.parametrize("dtype", ["float32", "float16", ml_dtypes.bfloat16], ids=str)
def test_errors_name_the_element_that_is_not_finite(value, error, dtype):
    bad = x().astype(dtype)
    bad[1, 2] = value
    info = InputInfo("x", np.dtype(dtype), None)
    refusal(error, ["batch 1", "'x'", "(1, 2)"], [x().astype(dtype), bad], [info])


def test_the_first_batch_is_checked_before_anything_runs():
    with pytest.raises(dt.NaNError) as caught:
        open_batches([np.full((1, 3), np.nan, np.float32)], [X])
    assert (caught.value.count, caught.value.first_index) == (3, (0, 0))


@pytest.mark.parametrize("info", [InputInfo("t", np.dtype("int64"), ()), InputInfo("t", np.dtype(object), (None,))])
def test_scalars_and_strings(info):
    value = np.array(16000) if info.shape == () else np.array(["a", "b"])
    batches = open_batches([{"t": value}], [info])
    assert [feed["t"].shape for feed in batches.hashed()] == [value.shape]
    assert len(batches.fingerprint()) == 64


# Files


def test_an_npz_is_cut_into_samples(tmp_path):
    np.savez(tmp_path / "d.npz", x=x(5), mask=mask(5))
    batches = open_batches(tmp_path / "d.npz", [X, MASK])
    assert (batches.count, batches.is_repeatable) == (5, True)
    feeds = list(batches)
    assert np.array_equal(np.concatenate([feed["x"] for feed in feeds]), x(5))
    assert {feed["mask"].shape for feed in feeds} == {(1, 5)}
    assert len(list(batches)) == 5


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("size", [1, 2, 5, 7])
def test_batches_of_samples(tmp_path, save, order, size):
    save(tmp_path / "d.npz", x=np.asarray(x(5), order=order).astype(">f4"))
    batches = open_batches(str(tmp_path / "d.npz"), [X], batch_size=size)
    arrays = [feed["x"] for feed in batches]
    assert batches.count == len(arrays) == -(-5 // size)
    assert {array.dtype for array in arrays} == {F32}
    assert np.array_equal(np.concatenate(arrays), x(5))


def test_the_model_may_fix_the_batch_size(tmp_path):
    np.savez(tmp_path / "d.npz", x(8))
    assert shapes(open_batches(tmp_path / "d.npz", [FIXED])) == [{"x": (4, 3)}] * 2
    refusal(dt.ShapeError, ["batch size of 2", "expects 4"], tmp_path / "d.npz", [FIXED], batch_size=2)
    np.savez(tmp_path / "d.npz", x(9))
    refusal(
        dt.ShapeError, ["samples, 9", "batch size, 4", "remove 1 of the samples, or add 3"], tmp_path / "d.npz", [FIXED]
    )


def test_numpys_own_names_stand_for_the_inputs_in_order(tmp_path):
    np.savez(tmp_path / "d.npz", x(3), mask(3))
    assert shapes(open_batches(tmp_path / "d.npz", [X, MASK])) == [{"x": (1, 3), "mask": (1, 5)}] * 3


def test_an_npy_is_cut_into_samples(tmp_path):
    np.save(tmp_path / "d.npy", x(3))
    assert shapes(open_batches(tmp_path / "d.npy", [X])) == [{"x": (1, 3)}] * 3
    refusal(dt.FileFormatError, ["one array", "x, mask"], tmp_path / "d.npy", [X, MASK])


def test_a_directory_holds_one_npz_per_batch(tmp_path):
    for i in (2, 0, 1):
        np.savez(tmp_path / f"{i}.npz", x=x(i + 1, start=i), mask=mask(i + 1, columns=i + 2))
    (tmp_path / "README").write_text("not data")
    batches = open_batches(tmp_path, [X, MASK])
    assert batches.count == 3
    assert shapes(batches) == [{"x": (i + 1, 3), "mask": (i + 1, i + 2)} for i in range(3)]


def test_a_directory_of_npy_files(tmp_path):
    for i in range(3):
        np.save(tmp_path / f"{i}.npy", x(i + 1))
    assert shapes(open_batches(tmp_path, [X])) == [{"x": (i + 1, 3)} for i in range(3)]
    np.savez(tmp_path / "4.npz", x=x())
    refusal(dt.SpecError, [str(tmp_path), "expected only .npz or only .npy files"], tmp_path, [X])


def test_inputs_without_a_batch_axis_need_a_directory(tmp_path):
    state, rate = InputInfo("state", F32, (2, None)), InputInfo("rate", I64, ())
    arrays = {"x": x(1), "state": np.zeros((2, 1), np.float32), "rate": np.array(16000)}
    np.savez(tmp_path / "0.npz", **arrays)
    assert shapes(open_batches(tmp_path, [X, state, rate])) == [{"x": (1, 3), "state": (2, 1), "rate": ()}]
    refusal(dt.ShapeError, ["samples"], tmp_path / "0.npz", [X, state, rate])
    np.savez(tmp_path / "0.npz", x=x(2), rate=np.array([1, 2]))
    refusal(dt.ShapeError, ["a directory"], tmp_path / "0.npz", [X, rate])


@pytest.mark.parametrize(
    ("arrays", "error", "words"),
    [
        ({"x": x(), "mask": mask(3)}, dt.ShapeError, ["{'x': 2, 'mask': 3}", "the same number"]),
        ({"x": x(0), "mask": mask(0)}, dt.ShapeError, ["at least 1"]),
        ({"x": x()}, dt.SpecError, ["mask"]),
        ({"x": x(), "musk": mask()}, dt.SpecError, ["'musk'", "did you mean 'mask'"]),
        ({"x": x().astype(np.float16), "mask": mask()}, dt.DtypeError, ["float16", "astype"]),
        ({"x": x()[:, :2], "mask": mask()}, dt.ShapeError, ["(1, 2)", "(any, 3)"]),
        ({"x": x() * np.float32(np.nan), "mask": mask()}, dt.NaNError, ["batch 0", "'x'"]),
        ({"x": np.array([None]), "mask": mask()}, dt.FileFormatError, ["'x'", "array of numbers"]),
        ({"x": np.array(["a"]), "mask": mask()}, dt.FileFormatError, ["'x'", "array of numbers"]),
        ({"x": np.zeros(2, "f4,i4"), "mask": mask()}, dt.FileFormatError, ["'x'", "array of numbers"]),
    ],
    ids=["lengths", "empty", "missing", "misspelt", "dtype", "shape", "nan", "objects", "texts", "records"],
)
def test_files_that_do_not_fit(tmp_path, arrays, error, words):
    np.savez(tmp_path / "d.npz", **arrays)
    refusal(error, [*words, "d.npz"], tmp_path / "d.npz", [X, MASK])


def test_files_of_a_directory_are_checked_before_the_first_is_read(tmp_path):
    np.savez(tmp_path / "0.npz", x=x())
    np.savez(tmp_path / "1.npz", x=x()[:, :2])
    with pytest.raises(dt.ShapeError, match=re.escape("1.npz: input 'x' has shape (2, 2)")):
        open_batches(tmp_path, [X])


def test_missing_files(tmp_path):
    refusal(dt.FileFormatError, ["none.npz", "no such file"], tmp_path / "none.npz", [X])
    refusal(dt.SpecError, ["holds no data", ".npz or .npy files, images, .wav files"], tmp_path, [X])
    (tmp_path / "f.npz").mkdir()
    refusal(dt.FileFormatError, ["f.npz", "no such file"], tmp_path, [X])


# Fingerprints


def test_a_fingerprint_covers_the_batches_that_were_read(tmp_path):
    np.savez(tmp_path / "d.npz", x=x(4))
    prints = []
    for data in (tmp_path / "d.npz", [{"x": x(4)[i : i + 1]} for i in range(4)], iter(np.split(x(4), 4))):
        batches = open_batches(data, [X])
        with pytest.raises(dt.NotCalibratedError, match="iterate"):
            batches.fingerprint()
        list(batches.hashed())
        prints.append(batches.fingerprint())
    assert len({*prints}) == 1
    assert re.fullmatch("[0-9a-f]{64}", prints[0])


@pytest.mark.parametrize(
    ("data", "info"),
    [
        ([x(4)], X),
        ([x(2), x(2, 6)], X),
        ([x(4, start=1)], X),
        ([x(4)], InputInfo("z", F32, None)),
        ([x(4).view(np.int32)], InputInfo("x", np.dtype("int32"), None)),
        ([x(4).reshape(3, 4)], InputInfo("x", F32, None)),
    ],
    ids=["same", "other batches", "other values", "other name", "other type", "other shape"],
)
def test_every_difference_changes_the_fingerprint(data, info):
    first, other = Batches([x(4)], [X]), Batches(data, [info])
    list(first.hashed()), list(other.hashed())
    assert (first.fingerprint() == other.fingerprint()) == (info is X and np.array_equal(data[0], x(4)))


# Subsets


def write_sources(folder, count):
    """Return equal batches as a list, an iterable without length, an .npz, a compressed .npz, an .npy, a directory."""
    values = x(count)
    np.savez(folder / "d.npz", x=values)
    np.savez_compressed(folder / "c.npz", x=values)
    np.save(folder / "d.npy", values)
    np.save(folder / "f.npy", np.asfortranarray(values))
    (folder / "many").mkdir()
    for i in range(count):
        np.savez(folder / "many" / f"{i:03}.npz", x=values[i : i + 1])
    parts = np.split(values, count)
    return [
        parts,
        dict(enumerate(parts)).values(),
        *(folder / name for name in ("d.npz", "c.npz", "d.npy", "f.npy", "many")),
    ]


@pytest.mark.parametrize("numbers", [[0], [1, 3], [4, 6], [0, 1, 2, 3, 4, 5, 6], range(1, 7, 2)], ids=str)
def test_a_subset_of_any_source(tmp_path, numbers):
    for source in write_sources(tmp_path, 7):
        subset = open_batches(source, [X]).subset(numbers)
        assert subset.count == len(numbers)
        for _ in range(2):
            assert [feed["x"][0, 0] // 3 for feed in subset] == list(numbers)
        assert [feed["x"][0, 0] // 3 for feed in subset.first(1)] == list(numbers)[:1]
        assert [feed["x"][0, 0] // 3 for feed in subset.subset([len(numbers) - 1])] == list(numbers)[-1:]


def test_a_subset_reads_nothing_else(tmp_path):
    values = x(6)
    values[[0, 1, 3, 5]] = np.nan  # a pass over all batches would fail
    np.savez(tmp_path / "d.npz", x=values)
    assert [feed["x"][0, 0] for feed in open_batches(tmp_path / "d.npz", [X]).subset([2, 4])] == [6, 12]
    for i in range(6):
        np.save(tmp_path / f"{i}.npy", values[i : i + 1])
    (tmp_path / "d.npz").unlink()
    batches = open_batches(tmp_path, [X]).subset([2, 4])
    (tmp_path / "3.npy").unlink()
    assert [feed["x"][0, 0] for feed in batches] == [6, 12]


def test_messages_of_a_subset_have_the_numbers_of_the_source():
    bad = np.full((1, 3), np.nan, np.float32)
    with pytest.raises(dt.NaNError, match="batch 4"):
        list(open_batches([x(1), x(1), x(1), x(1), bad], [X]).subset([2, 4]))


def test_an_iterator_has_no_subsets():
    with pytest.raises(dt.SpecError, match="as a list, a file"):
        open_batches(iter([x()]), [X]).subset([0])
    with pytest.raises(dt.SpecError, match="as a list, a file"):
        open_batches(iter([x()]), [X]).first(1)


def test_batches_are_opened_once():
    batches = open_batches([x(), x()], [X])
    assert open_batches(batches, [X]) is batches
    other = InputInfo("x", F32, (None, None))
    assert open_batches(batches.subset([1]), [other]).count == 1
    refusal(dt.ShapeError, ["(2, 3)", "(4, 3)"], batches, [FIXED])


# Inputs


def test_inputs_leave_out_initializers_and_free_sizes():
    model = parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]>
        g (float[N, 3, 4] a, int64[2] b, float c, float w) => (float y) <float w = {1}> { y = Add(c, w) }"""
    )
    assert inputs_of(model) == [
        InputInfo("a", F32, (None, 3, 4)),
        InputInfo("b", I64, (2,)),
        InputInfo("c", F32, ()),
    ]
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_value = -1
    model.graph.input[1].type.tensor_type.ClearField("shape")
    assert [info.shape for info in inputs_of(model)] == [(None, None, 4), None, ()]


def test_inputs_that_are_not_tensors_or_have_no_type():
    model = parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> g (seq(float[N]) s) => (int64 n) { n = SequenceLength(s) }'
    )
    with pytest.raises(dt.UnsupportedError, match="'s' is not a tensor"):
        inputs_of(model)
    del model.graph.input[:]
    model.graph.input.append(helper.make_tensor_value_info("x", TensorProto.FLOAT, [1]))
    model.graph.input[0].type.tensor_type.elem_type = 99
    with pytest.raises(dt.UnsupportedError, match="unknown type 99"):
        inputs_of(model)


def test_this_directory_does_not_shadow_onnx():
    assert not Path(__file__).with_name("__init__.py").exists()


def test_counted_batches_do_not_change_the_original():
    batches, calls = open_batches([x(2), x(5)], [X]), []
    batches.check_first()
    counted = batches.counted(lambda *done: calls.append(done))
    assert shapes(counted) == shapes(batches) == shapes(counted) == [{"x": (2, 3)}, {"x": (5, 3)}]
    assert calls == [(1, 2), (2, 2)] * 2


def test_counted_batches_of_an_iterator_continue_the_pass():
    batches = open_batches(iter([x(2), x(5)]), [X])
    batches.check_first()
    assert shapes(batches.counted(lambda *_: None)) == [{"x": (2, 3)}, {"x": (5, 3)}]
    with pytest.raises(dt.SpecError, match="pass a list, a file or a directory"):
        list(batches)
