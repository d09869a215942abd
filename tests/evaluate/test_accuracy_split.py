"""Held-out batches, and the accuracy measured on them."""

import numpy as np
import pytest
from onnx import parser

from detent.errors import SpecError
from detent.evaluate import measure_accuracy, split_batches
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
