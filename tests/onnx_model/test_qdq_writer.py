"""The writer of quantized graphs: the Clip before codes of few bits, widened codes, and rows of a table."""

import numpy as np
import pytest
from onnx import TensorProto, parser

import detent as dt
from detent.onnx_model.graph import Graph
from detent.onnx_model.qdq_writer import QdqParams, QdqWriter, gather
from detent.onnx_model.targets import get_target


def graph_of(text):
    return Graph(parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]> {text}'))


@pytest.mark.parametrize(("high", "operators"), [(15, ["Clip"]), (255, [])], ids=["4 bits", "all codes"])
def test_a_clip_precedes_codes_of_few_bits(high, operators):
    graph = graph_of("g (float[2] x) => (float[2] y) { y = Relu(x) }")
    writer = QdqWriter(graph)
    qparams = QdqParams(np.float32(0.5), np.array(0), TensorProto.UINT8, high=high)
    pair = writer.pair("x", "x", writer.parameters("x", qparams), qparams)
    assert [node.op_type for node in pair.nodes] == [*operators, "QuantizeLinear", "DequantizeLinear"]
    assert pair.dequantized == "x_dq"
    assert not operators or (graph.array("x_least"), graph.array("x_most")) == (0, 7.5)


def test_codes_of_4_bits_are_stored_packed_and_read_in_bytes():
    graph = graph_of("g (float[2] x) => (float[2] y) { y = Relu(x) }")
    writer = QdqWriter(graph)
    params = dt.QuantParams("uint3", np.float32(0.5), 4)
    qparams = QdqParams.of(params, get_target("onnxruntime").weight_container(params.spec, as_bytes=True), 1)
    assert (qparams.kind, qparams.read_kind, qparams.high) == (TensorProto.UINT4, TensorProto.UINT8, 7)
    names = writer.codes("w", np.array([7, 0, 3]), qparams)
    assert [graph.kind(name) for name in names] == [TensorProto.UINT4, TensorProto.FLOAT, TensorProto.UINT8]
    (cast,), wide = writer.widened(names[0], "w", qparams)
    assert (cast.op_type, *cast.input, *cast.output, cast.attribute[0].i) == ("Cast", names[0], wide, TensorProto.UINT8)


def test_codes_that_are_read_as_they_are_stored_need_no_cast():
    graph = graph_of("g (float[2] x) => (float[2] y) { y = Relu(x) }")
    for spec in ("int8", "int4"):
        params = dt.QuantParams(spec, np.float32(0.5))
        qparams = QdqParams.of(params, get_target("onnxruntime-vnni").weight_container(params.spec), 1)
        assert QdqWriter(graph).widened("codes", "w", qparams) == ([], "codes")


@pytest.mark.parametrize(
    ("scale", "axis", "block", "operators"),
    [
        (np.ones(()), 1, 0, ["Gather", "DequantizeLinear"]),
        (np.ones(9), 0, 0, ["Gather", "Cast", "Gather", "Unsqueeze", "Mul"]),
        (np.ones((9, 2)), 1, 2, ["Gather", "Cast", "Reshape", "Gather", "Unsqueeze", "Mul", "Reshape"]),
    ],
    ids=["tensor", "row", "group"],
)
def test_rows_of_a_table(scale, axis, block, operators):
    graph = graph_of("g (float[9, 4] table, int64[2] i) => (float[2, 4] y) { y = Gather(table, i) }")
    qparams = QdqParams(scale.astype(np.float32), np.zeros(scale.shape, np.int64), TensorProto.INT8, axis, block)
    nodes = gather(graph, graph.nodes[0], ("codes", "scale", "zero"), qparams, (9, 4), "table")
    assert [node.op_type for node in nodes] == operators
    assert nodes[-1].output[0] == "y"
