"""Float layers between Q/DQ nodes: ONNX Runtime quantizes them unless they are guarded, across most operators."""

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from detent.onnx_model import Graph, make_session, optimized
from detent.onnx_model.graph import INTEGER_KERNELS
from detent.onnx_model.ort_workarounds import guard_float

RNG = np.random.default_rng(0)
BETWEEN = {  # operators between a Q/DQ node and the layer, with attributes and constant inputs
    "nothing": [],
    "Relu": [("Relu", {}, [])],
    "Clip": [("Clip", {}, [np.float32(0), np.float32(6)])],
    "MaxPool": [("MaxPool", {"kernel_shape": [2, 2], "pads": [0, 0, 1, 1]}, [])],
    "Transpose": [("Transpose", {"perm": [0, 1, 3, 2]}, [])],
    "Reshape": [("Reshape", {}, [np.int64([0, 8, 2, -1])])],
    "Flatten, Reshape": [("Flatten", {}, []), ("Reshape", {}, [np.int64([0, 8, 4, -1])])],
    "Unsqueeze, Squeeze": [("Unsqueeze", {}, [np.int64([2])]), ("Squeeze", {}, [np.int64([2])])],
    "Slice": [("Slice", {}, [np.int64([0]), np.int64([2]), np.int64([2])])],
    "Dropout": [("Dropout", {}, [])],
    "Identity": [("Identity", {}, [])],
    "Cast": [("Cast", {"to": TensorProto.FLOAT}, [])],
    "Expand": [("Expand", {}, [np.int64([1, 1, 1, 1])])],
    "Pad": [("Pad", {}, [np.int64([0, 0, 1, 1, 0, 0, 1, 1])])],
    "Mul": [("Mul", {}, [np.ones((1, 8, 1, 1), np.float32)])],
    "Add": [("Add", {}, [np.ones((1, 8, 1, 1), np.float32)])],
    "BatchNormalization": [("BatchNormalization", {}, [np.ones(8, np.float32)] * 4)],
    "Relu, Reshape": [("Relu", {}, []), ("Reshape", {}, [np.int64([0, 8, 2, -1])])],
    "Resize": [("Resize", {"mode": "nearest"}, [None, np.float32([1, 1, 2, 2])])],
    "Sigmoid": [("Sigmoid", {}, [])],
}
ROWS, IMAGE = ("Reshape", {}, [np.int64([-1, 8])]), ("Reshape", {}, [np.int64([1, 8, 4, -1])])


def normal(*shape):
    return RNG.normal(size=shape).astype(np.float32)


LAYERS = {
    "Conv": [("Conv", {"pads": [1] * 4}, [normal(8, 8, 3, 3), normal(8)])],
    "ConvTranspose": [("ConvTranspose", {"pads": [1] * 4}, [normal(8, 8, 3, 3)])],
    "Gemm": [ROWS, ("Gemm", {}, [normal(8, 8), normal(8)]), IMAGE],
    "MatMul, Add": [ROWS, ("MatMul", {}, [normal(8, 8)]), ("Add", {}, [normal(8)]), IMAGE],
}


def between_quantizers(*parts):
    """Make a graph of operators in a row between a DequantizeLinear and a QuantizeLinear."""
    nodes, tensors, x = [], [], "x"

    def add(op, attributes, constants):
        nonlocal x
        names = []
        for value in constants:
            names.append("" if value is None else f"c{len(tensors)}")
            if value is not None:
                tensors.append(numpy_helper.from_array(np.asarray(value), names[-1]))
        x, before = f"t{len(nodes)}", x
        nodes.append(helper.make_node(op, [before, *names], [x], name=f"{op}_{len(nodes)}", **attributes))

    def add_pair(scale, zero_point):
        add("QuantizeLinear", {}, [np.float32(scale), np.uint8(zero_point)])
        add("DequantizeLinear", {}, [np.float32(scale), np.uint8(zero_point)])

    add_pair(0.03, 128)
    for each in [each for part in parts for each in part]:
        add(*each)
    add_pair(0.1, 0)
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 8, 4, 4])],
        [helper.make_tensor_value_info(x, TensorProto.FLOAT, None)],
        tensors,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def is_quantized(model):
    """Whether ONNX Runtime uses an integer kernel, or stores a weight as codes."""
    running = optimized(model).graph
    stored = [each for each in running.initializer if each.data_type in {TensorProto.INT8, TensorProto.UINT8}]
    return any(node.op_type in INTEGER_KERNELS for node in running.node) or any(len(each.dims) > 1 for each in stored)


@pytest.mark.parametrize("position", ["before", "behind"])
@pytest.mark.parametrize("operators", BETWEEN)
@pytest.mark.parametrize("layer", LAYERS)
def test_a_guarded_layer_is_not_quantized(layer, operators, position):
    parts = [BETWEEN[operators], LAYERS[layer]]
    model = between_quantizers(*(parts if position == "before" else reversed(parts)))
    given = {"x": normal(1, 8, 4, 4)}
    expected = make_session(model, optimize=False).run(None, given)[0]
    was_quantized = is_quantized(model)
    graph = Graph(model)
    guarded = guard_float(graph)
    guarded_model = graph.finish()
    assert guarded or not was_quantized
    assert bool(guarded) == (operators != "Sigmoid"), "a Max costs time, and no quantizer moves over a Sigmoid"
    assert not is_quantized(guarded_model)
    np.testing.assert_array_equal(make_session(guarded_model, optimize=False).run(None, given)[0], expected)
    got = make_session(guarded_model).run(None, given)[0]
    np.testing.assert_allclose(got, expected, atol=0.1001)  # rounding may change a code by one


def test_onnx_runtime_quantizes_what_is_not_guarded():
    for operators in ("nothing", "MaxPool", "Transpose", "Reshape", "Dropout", "Slice", "Unsqueeze, Squeeze"):
        assert is_quantized(between_quantizers(LAYERS["Conv"], BETWEEN[operators])), operators
        assert is_quantized(between_quantizers(BETWEEN[operators], LAYERS["Conv"])), operators


def test_layers_without_a_quantizer_after_them_are_not_guarded():
    model = between_quantizers(LAYERS["Conv"], BETWEEN["Relu"])
    del model.graph.node[-2:]
    model.graph.output[0].name = model.graph.node[-1].output[0]
    assert guard_float(Graph(model)) == []


def test_two_layers_in_a_row_are_both_guarded():
    model = between_quantizers(LAYERS["Conv"], BETWEEN["Relu"], LAYERS["Conv"])
    assert guard_float(Graph(model)) == [], "the first has no quantizer behind it, the second none before it"


def test_a_weight_that_is_computed_from_constants_counts_as_one():
    model = between_quantizers(LAYERS["Conv"])
    conv = next(node for node in model.graph.node if node.op_type == "Conv")
    model.graph.node.insert(0, helper.make_node("Identity", [conv.input[1]], ["copied"]))
    conv.input[1] = "copied"
    assert is_quantized(model)
    graph = Graph(model)
    assert guard_float(graph) == [conv.name]
    assert not is_quantized(graph.finish())
