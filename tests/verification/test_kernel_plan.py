"""Level 3 fails if an integer kernel was not requested by the file, or is missing."""

import numpy as np
import pytest
from onnx import helper, numpy_helper

import detent as dt
import detent.onnx as qo
from detent.onnx_model.provenance import RuntimeRecord


def model():
    rng = np.random.default_rng(0)
    names = ("w1", "w2", "w3", "w4", "w5")
    tensors = [numpy_helper.from_array(rng.normal(size=(8, 8, 1, 1)).astype(np.float32), name) for name in names]
    nodes = [
        helper.make_node("Conv", ["x", "w1"], ["a"], name="first"),
        helper.make_node("Conv", ["a", "w2"], ["b"], name="second"),
        helper.make_node("Conv", ["b", "w3"], ["c"], name="float"),
        helper.make_node("MaxPool", ["c"], ["d"], name="pool", kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Conv", ["d", "w4"], ["e"], name="third"),
        helper.make_node("Conv", ["e", "w5"], ["y"], name="last"),
    ]
    shapes = ("x", [1, 8, 8, 8]), ("y", [1, 8, 4, 4])
    ends = [[helper.make_tensor_value_info(name, 1, shape)] for name, shape in shapes]
    graph = helper.make_graph(nodes, "g", *ends, tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


DATA = [np.random.default_rng(1).normal(size=(1, 8, 8, 8)).astype(np.float32)]


@pytest.fixture
def file(tmp_path):
    report = qo.quantize(model(), tmp_path / "q.onnx", DATA, skip="float", progress=False)
    return qo.load(report.output)


def test_a_float_layer_that_runs_in_integers_fails(file):
    """ONNX Runtime quantizes a float layer between quantizers if the file does not prevent it."""
    assert dt.verify(model(), file, DATA).ok
    guards = {node.output[0]: node for node in file.graph.node if node.op_type == "Max"}
    for node in file.graph.node:
        if node.input[0] in guards:
            node.input[0] = guards[node.input[0]].input[0]
    assert len(guards) == 2, "one before the layer, one after the pool"
    for guard in guards.values():
        file.graph.node.remove(guard)
    report = dt.verify(model(), file, DATA, levels=(3,))
    assert not report.ok
    assert (report.kernel_difference.node, report.kernel_difference.got) == ("float", "QLinearConv")
    assert "the file keeps this layer in float, but ONNX Runtime runs it on an integer kernel" in report.failure


def test_what_onnx_runtime_made_is_recorded(file):
    record = RuntimeRecord.read(file)
    assert record.kernels == dict.fromkeys(("first", "second", "third", "last"), "QLinearConv")
    assert record.onnxruntime
    assert record.machine


def test_a_kernel_that_is_gone_fails(file):
    record = RuntimeRecord.read(file)
    RuntimeRecord(record.onnxruntime, record.machine, {**record.kernels, "pool": "QLinearMaxPool"}).write(file)
    report = dt.verify(model(), file, DATA)
    assert not report.ok
    assert report.kernel_difference.node == "pool"
    assert "when the file was written, but does not now (1 layer in all)" in report.failure
    RuntimeRecord("1.0.0", record.machine, {**record.kernels, "pool": "QLinearMaxPool"}).write(file)
    report = dt.verify(model(), file, DATA)
    assert report.ok
    assert any(
        "in ONNX Runtime 1.0.0" in note and "but not in the installed ONNX Runtime" in note for note in report.notes
    )


@pytest.mark.parametrize(
    "value",
    ['{"version": 2}', '{"version": 1, "kernels": 3}', '{"version": 1, "kernels": {"a": [1]}}', "[", '{"version": 1}'],
)
def test_malformed_records_are_refused(file, value):
    next(each for each in file.metadata_props if each.key == "detent.runtime").value = value
    with pytest.raises(dt.FileFormatError, match=r"detent\.runtime"):
        dt.verify(model(), file, DATA)
