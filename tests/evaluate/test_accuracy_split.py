"""Held-out batches, and the accuracy measured on them."""

import numpy as np
import pytest
from onnx import numpy_helper, parser

from detent.errors import RangeError, ShapeError, SpecError
from detent.evaluate import check_metric, measure_accuracy, split_batches
from detent.onnx_model import files
from detent.onnx_model.files import load_model

MODEL = parser.parse_model(
    '<ir_version: 8, opset_import: ["" : 17]> g (float[N, 2] x) => (float[N, 2] y) { y = Abs(x) }'
)


def numbers(batches):
    return [int(feed["x"][0, 0]) // 2 for feed in batches]


@pytest.mark.parametrize(
    ("samples", "held"), [(1, []), (19, []), (20, [9, 19]), (29, [9, 19]), (101, list(range(9, 101, 10)))]
)
def test_a_tenth_is_held_out_from_20_batches_on(tmp_path, samples, held):
    values = np.arange(2 * samples, dtype=np.float32).reshape(samples, 2)
    np.save(tmp_path / "x.npy", values)
    for data in (tmp_path / "x.npy", list(values[:, None])):
        split = split_batches(MODEL, data)
        assert split.is_held_out == bool(held)
        for _ in range(2):
            assert numbers(split.calibration) == [i for i in range(samples) if i not in held]
        assert numbers(split.evaluation) == (held or list(range(min(8, samples))))
        assert ("held-out" in str(split)) == bool(held)


def test_batches_not_samples_are_held_out(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros((60, 2), np.float32))
    assert list(split_batches(MODEL, tmp_path / "x.npy", 3).evaluation.numbers) == [9, 19]
    assert not split_batches(MODEL, tmp_path / "x.npy", 4).is_held_out


def test_an_iterator_cannot_be_split():
    with pytest.raises(SpecError, match="pass a list"):
        split_batches(MODEL, iter([np.zeros((1, 2), np.float32)]))


def test_models_are_loaded_once(monkeypatch):
    model = load_model(MODEL)
    monkeypatch.setattr(files, "_check", None)
    split = split_batches(model, [np.float32([[1, 2]])] * 20)
    accuracy = measure_accuracy(model, model, split.evaluation)
    assert (accuracy.sqnr_db, accuracy.agreement, accuracy.batches) == (np.inf, 1.0, 2)


def test_a_search_has_batches_of_its_own():
    data = [np.float32([[2 * i, 0]]) for i in range(40)]
    split = split_batches(MODEL, data, search=True, labels=range(40))
    parts = [numbers(each) for each in (split.calibration, split.search, split.evaluation)]
    assert [len(part) for part in parts] == [20, 10, 10]
    assert sorted(number for part in parts for number in part) == list(range(40))
    assert split.labels.tolist() == parts[2]
    assert split.search_labels.tolist() == parts[1]
    assert len({number % 10 for number in parts[2]}) > 3, "a periodic order of classes does no harm"
    assert split.is_held_out


def test_evaluation_data_leave_all_data_for_calibration():
    data, others = [np.float32([[2 * i, 0]]) for i in range(30)], [np.float32([[200 + 2 * i, 0]]) for i in range(6)]
    split = split_batches(MODEL, data, eval_data=others, labels=range(6))
    assert (numbers(split.calibration), numbers(split.evaluation)) == (list(range(30)), list(range(100, 106)))
    assert (split.search, split.search_labels, split.labels.tolist()) == (None, None, list(range(6)))
    assert str(split) == "6 held-out batches"
    split = split_batches(MODEL, data, eval_data=others, search=True)
    assert sorted(numbers(split.search) + numbers(split.evaluation)) == list(range(100, 106))
    assert split.calibration.count == 30


@pytest.mark.parametrize(("count", "options"), [(3, {}), (30, {"eval_data": [np.zeros((1, 2), np.float32)]})])
def test_a_search_needs_batches(count, options):
    with pytest.raises(SpecError, match="to search on some and evaluate on others, got"):
        split_batches(MODEL, [np.zeros((1, 2), np.float32)] * count, search=True, **options)


def test_labels_are_counted():
    with pytest.raises(ShapeError, match="got 3 labels for 4 samples"):
        split_batches(MODEL, [np.zeros((2, 2), np.float32)] * 2, labels=[1, 2, 3])


def test_a_metric_is_checked_before_quantization():
    split = split_batches(MODEL, [np.zeros((2, 2), np.float32)] * 2, labels=[0, 1, 1, 2])
    with pytest.raises(RangeError, match="classes are from 0 to 1"):
        check_metric(MODEL, split, None)
    check_metric(MODEL, split, lambda outputs: 1.0)


# Classes of directories

CLASSIFIER = """<ir_version: 8, opset_import: ["" : 17]>
    g (float[N, 3, 4, 4] x) => (float[N, C] y) <float[48, C] w> {
        rows = Flatten<axis = 1>(x)
        [fc] y = MatMul(rows, w)
    }"""


def classifier(classes):
    model = parser.parse_model(CLASSIFIER.replace("C", str(classes)))
    weight = np.random.default_rng(0).normal(size=(48, classes)).astype(np.float32)
    del model.graph.initializer[:]
    model.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    return model


@pytest.fixture
def photos(tmp_path):
    image = pytest.importorskip("PIL.Image")
    rng = np.random.default_rng(1)
    for name in ("ant", "bee"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for i in range(15):
            image.fromarray(rng.integers(0, 256, (4, 4, 3), np.uint8)).save(tmp_path / "photos" / name / f"{i:02}.png")
    return tmp_path / "photos"


def test_sub_directories_are_labels(photos):
    split = split_batches(classifier(2), photos)
    assert split.labels.tolist() == [0, 1, 1]
    assert any(
        "labels: 2 sub-directories in sorted order, from 0 (ant) to 1 (bee)" in note for note in split.evaluation.notes
    )
    searched = split_batches(classifier(2), photos, search=True)
    assert len(searched.search_labels) == searched.search.count
    assert split_batches(classifier(2), photos, labels=np.zeros(30, int)).labels.tolist() == [0, 0, 0]


def test_sub_directories_that_do_not_fit_the_model_are_no_labels(photos):
    split = split_batches(classifier(7), photos)
    assert split.labels is None
    assert any(
        "labels: none (--labels), because the data have 2 sub-directories, but the model 7 classes" in note
        for note in split.evaluation.notes
    )
    assert split_batches(classifier(2), photos, metric="cosine").labels is None


def test_accuracy_uses_the_labels_of_a_directory(photos):
    model = classifier(2)
    accuracy = measure_accuracy(model, model, photos)
    assert (accuracy.metric.name, accuracy.metric.samples, accuracy.metric.drop) == ("top1", 30, 0.0)
    assert measure_accuracy(classifier(7), classifier(7), photos).metric is None


def test_models_with_other_outputs_are_an_error():
    text = '<ir_version: 8, opset_import: ["" : 17]> g (float[N, 2] x) => (float[N, 2] z) { z = Abs(x) }'
    with pytest.raises(SpecError, match=r"outputs \['z'\], but the float model \['y'\]: pass two models"):
        measure_accuracy(MODEL, parser.parse_model(text), [np.float32([[1, 2]])])
