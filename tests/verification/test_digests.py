"""A file that was changed after it was written is caught, whatever its source knows."""

import numpy as np
import pytest
from onnx import helper, numpy_helper

import detent as dt
import detent.onnx as qo
from detent.onnx_model import array_of, make_tensor


def model():
    rng = np.random.default_rng(0)
    square = [numpy_helper.from_array(rng.normal(size=(8, 8)).astype(np.float32), name) for name in ("w1", "w2")]
    nodes = [
        helper.make_node("MatMul", ["x", "w1"], ["a"], name="first"),
        helper.make_node("Relu", ["a"], ["b"], name="relu"),
        helper.make_node("MatMul", ["b", "w2"], ["y"], name="second"),
    ]
    ends = [[helper.make_tensor_value_info(name, 1, ["n", 8])] for name in ("x", "y")]
    graph = helper.make_graph(nodes, "g", *ends, square)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


DATA = [np.random.default_rng(i).normal(size=(4, 8)).astype(np.float32) for i in range(3)]


def changed(made, name, change):
    for tensor in made.graph.initializer:
        if tensor.name == name:
            tensor.CopyFrom(make_tensor(name, change(array_of(tensor)), tensor.data_type))
            return name
    raise AssertionError(name)


def one_code(values):
    values = values.copy()
    values[3, 2] ^= 1
    return values


def one_ulp(values):
    return np.nextafter(values, np.float32(np.inf)).astype(np.float32)


def first_ulp(values):
    values = values.copy()
    values[0] = np.nextafter(values[0], np.float32(np.inf))
    return values


@pytest.fixture
def made(tmp_path):
    return qo.load(qo.quantize(model(), tmp_path / "q.onnx", DATA, progress=False, smooth=False).output)


def test_nothing_differs_in_a_file_as_it_was_written(made):
    report = dt.verify(model(), made, DATA)
    assert report.ok
    assert report.differing_codes == 0
    assert report.compared_codes > 100


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("w1_codes", one_code),
        ("w2_scale", first_ulp),
        ("x_scale", one_ulp),
        ("x_zero_point", lambda values: values + 1),
        ("w1_zero_point", lambda values: values + 1),
    ],
)
def test_changed_constants_are_caught_and_named(made, name, change):
    changed(made, name, change)
    report = dt.verify(model(), made, DATA, levels=(1,))
    assert not report.ok
    assert report.differing_codes > 0
    assert report.first_difference.tensor == name or name.startswith("w1_zero")
    with pytest.raises(dt.VerificationError, match=name.split("_")[0]):
        dt.verify(model(), made, DATA, levels=(1,), raise_on_difference=True)


def test_a_swapped_axis_is_caught(made):
    node = next(node for node in made.graph.node if node.input[0] == "w1_codes")
    node.attribute[0].i = 0
    report = dt.verify(model(), made, DATA, levels=(1,))
    assert not report.ok
    assert report.first_difference.tensor == "its place"


def test_a_file_is_of_its_own_source_and_of_no_other(made, tmp_path):
    report = dt.verify(model(), made, DATA, levels=(1,))
    assert report.weights_by == "digests"
    assert "recorded for this source" in str(report)
    other = model()
    changed(other, "w1", one_ulp)
    found = dt.verify(other, made, DATA, levels=(1,))
    assert not found.ok
    assert found.first_difference.cause == "the file was made from another model than this source"
    stored = model()  # the same numbers, stored in another way
    for tensor in stored.graph.initializer:
        values = numpy_helper.to_array(tensor)
        tensor.ClearField("raw_data")
        tensor.float_data.extend(values.ravel().tolist())
    assert dt.verify(stored, made, DATA, levels=(1,)).ok


def test_a_file_without_digests_says_that_weights_were_not_compared(made):
    del made.metadata_props[:]
    report = dt.verify(model(), made, DATA, levels=(1,))
    assert report.weights_by == "nothing"
    assert any("weights not compared" in note for note in report.notes)
    assert "all codes match the source" not in str(report)
