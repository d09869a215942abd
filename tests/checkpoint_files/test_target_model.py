"""Layouts: any range of target rows equals the same rows of the whole tensor."""

import pickle

import ml_dtypes
import numpy as np
import pytest

from detent.checkpoint_files.target_model import (
    Constant,
    ExpertRows,
    Experts,
    GgufModel,
    HeadPairs,
    MetadataEntry,
    SourceRows,
    TargetTensor,
    Transposed,
)
from detent.checkpoint_files.tensor_source import ArrayTensor, TensorSource
from detent.errors import ShapeError

rng = np.random.default_rng(0)
W = rng.normal(size=(12, 6)).astype(np.float32)
STACK = rng.normal(size=(3, 8, 6)).astype(ml_dtypes.bfloat16)


def source():
    tensors = [ArrayTensor("w", W), ArrayTensor("bias", W[:, 0]), ArrayTensor("stack", STACK)]
    tensors += [ArrayTensor(f"e{i}", STACK[i].astype(np.float32)) for i in range(3)]
    return TensorSource(tensors)


def reordered(values, heads):
    """The formula: (heads, 2, d/2, ...) with axes 1 and 2 swapped."""
    shape = (heads, 2, len(values) // heads // 2, *values.shape[1:])
    return values.reshape(shape).swapaxes(1, 2).reshape(values.shape)


CASES = {
    "rows": (TargetTensor("t", (12, 6), ("w",)), W),
    "some rows": (TargetTensor("t", (5, 6), ("w",), SourceRows(4)), W[4:9]),
    "vector": (TargetTensor("t", (12,), ("bias",)), W[:, 0]),
    "heads": (TargetTensor("t", (12, 6), ("w",), HeadPairs(2)), reordered(W, 2)),
    "bias of heads": (TargetTensor("t", (12,), ("bias",), HeadPairs(3)), reordered(W[:, 0], 3)),
    "experts": (TargetTensor("t", (3, 8, 6), ("e0", "e1", "e2"), Experts()), STACK.astype(np.float32)),
    "rows of experts": (TargetTensor("t", (3, 4, 6), ("stack",), ExpertRows(4, 4)), STACK[:, 4:].astype(np.float32)),
    "transposed": (TargetTensor("t", (6, 12), ("w",), Transposed()), W.T),
    "constant": (TargetTensor("t", (2,), (), Constant((1.5, 2.0))), np.array([1.5, 2.0], np.float32)),
    "offset": (TargetTensor("t", (12,), ("bias",), offset=1.0), W[:, 0] + np.float32(1)),
}


@pytest.mark.parametrize("name", CASES)
def test_every_range_of_rows_equals_the_formula(name):
    tensor, expected = CASES[name]
    expected = expected.reshape(tensor.row_count, tensor.columns)
    for start in range(tensor.row_count + 1):
        for stop in range(start, tensor.row_count + 1):
            rows = tensor.rows(source(), start, stop)
            assert rows.dtype == np.float32
            assert np.array_equal(rows, expected[start:stop]), (start, stop)


def test_a_transposed_tensor_is_read_in_parts(monkeypatch):
    monkeypatch.setattr("detent.checkpoint_files.target_model.TRANSPOSE_BYTES", 5 * 4 * 6)
    tensor = TargetTensor("t", (6, 12), ("w",), Transposed())
    assert np.array_equal(tensor.rows(source(), 1, 5), W.T[1:5])


def test_rows_outside_of_the_tensor_are_rejected():
    with pytest.raises(ShapeError, match="rows 3 to 13 of t"):
        TargetTensor("t", (12, 6), ("w",)).rows(source(), 3, 13)


def test_a_model_is_plain_data():
    entries = (
        MetadataEntry("llama.block_count", "uint32", 4),
        MetadataEntry("llama.attention.head_count", "array:uint32", (8, 4)),
    )
    model = GgufModel("llama", entries, tuple(tensor for tensor, _ in CASES.values()))
    assert pickle.loads(pickle.dumps(model)) == model
    assert (model.block_count, model.heads, model.expert_count) == (4, (8, 8), 0)
    assert model.value("{arch}.absent", "nothing") == "nothing"
