"""Parts of level 1: distances of codes, layouts of scales, offsets."""

import numpy as np
import pytest
from onnx import NodeProto, TensorProto

from detent.errors import FileFormatError
from detent.onnx_model import QdqParams
from detent.onnx_model.qdq_reader import WeightCodes
from detent.params import QuantParams
from detent.verification.codes import Tally, code_distance, layout_in_file, layout_of, shift_of, spread


def test_the_first_difference_is_kept():
    tally = Tally()
    tally.count(10, 1)
    tally.note("wrong code", "Q", "q", (0,), 1, 2)
    tally.note("wrong code", "R", "r")
    assert (tally.compared, tally.differing, tally.first.node, tally.first.got) == (10, 1, "Q", 2)


@pytest.mark.parametrize(
    ("a", "b", "steps"),
    [
        (np.uint8([0, 9]), np.uint8([255, 9]), 255),
        (np.int8([-128]), np.int8([127]), 255),
        (np.int32([-(2**31)]), np.uint8([1]), 2**31 + 1),
        (np.float32([0.5, np.nan]), np.float32([2.0, 1.0]), 2),
        (np.uint8([]), np.uint8([]), 0),
    ],
)
def test_steps(a, b, steps):
    assert code_distance(a, b) == code_distance(b, a) == steps


def test_layouts():
    qparams = QdqParams(np.ones(4, np.float32), np.zeros(4), TensorProto.INT8, axis=-1)
    gathered = WeightCodes("w", TensorProto(), NodeProto(), qparams, path=("Gather",))
    assert str(layout_in_file(gathered, (9, 4))) == "axis 1"
    assert str(layout_of(QuantParams.int8_symmetric(), 2)) == "per-tensor"
    with pytest.raises(FileFormatError, match=r"scales of shape \(4,\) for codes of shape \(\)"):
        layout_in_file(gathered, ())
    per_column = layout_of(QuantParams("int8/axis1", np.ones(2)), 2)
    assert spread(np.array([1, 2]), per_column, (1, 2)).tolist() == [[1, 2]]
    assert spread(np.array([1, 2, 3]), per_column, (1, 2)) is None


def test_shift_of_codes():
    assert shift_of(QuantParams.int8_symmetric(), TensorProto.UINT8) == 128
    assert shift_of(QuantParams.int8_symmetric(), TensorProto.INT8) == 0
