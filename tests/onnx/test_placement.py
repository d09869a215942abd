"""Q/DQ placement, checked in the graph that ONNX Runtime optimizes."""

import numpy as np
import pytest
from onnx_graphs import Maker, conv_chain, images, operators, rows, weights

import detent as dt
import detent.onnx as qo
from detent.onnx_model import Graph, make_session
from detent.onnx_model.graph import INTEGER_KERNELS


def quantize_model(model, feeds, recipe="w8a8", **options):
    plan = qo.plan(qo.prepare(model), recipe, **options)
    return qo.insert(plan, qo.calibrate(plan, feeds, observer="minmax")), plan


def close(model, quantized, feeds, least_db=25):
    for feed in feeds:
        for old, new in zip(make_session(model).run(None, feed), make_session(quantized).run(None, feed), strict=True):
            assert dt.metrics.sqnr_db(old, new) > least_db


def test_convolutions_with_relu_run_on_integer_kernels():
    model, feeds = conv_chain(), images()
    quantized, _ = quantize_model(model, feeds)
    counts = operators(quantized)
    assert counts["QLinearConv"] == 2
    assert counts["Relu"] == 0, "a quantizer behind a Relu does its work"
    close(model, quantized, feeds)


def test_the_last_layer_keeps_a_float_result():
    quantized, _ = quantize_model(conv_chain(), images())
    graph = Graph(quantized)
    last = next(node for node in graph.nodes if node.name == "last")
    assert last.output[0] in graph.outputs


def test_clip_is_redundant_and_its_bound_is_kept():
    m = Maker()
    low, high = m.constant(np.float32(0)), m.constant(np.float32(0.5))
    t = m.add("Clip", [m.conv("x", 8, 16), low, high])
    y = m.conv(t, 16, 4)
    model, feeds = m.model([("x", [2, 8, 8, 8])], [y]), images()
    quantized, _ = quantize_model(model, feeds)
    assert operators(quantized)["Clip"] == 0
    graph = Graph(quantized)
    node = next(each for each in graph.nodes if each.op_type == "QuantizeLinear" and each.input[0] == t)
    scale, zero = graph.array(node.input[1]), graph.array(node.input[2])
    assert zero == 0
    assert np.float32(255) * scale <= np.float32(0.5)
    close(model, quantized, feeds)


def test_residual_blocks_run_on_integer_kernels():
    m = Maker()
    t = m.add("Relu", [m.conv("x", 8, 16)])
    t = m.add("Relu", [m.add("Add", [m.conv(t, 16, 16), t])])
    y = m.conv(t, 16, 4)
    model, feeds = m.model([("x", [2, 8, 8, 8])], [y]), images()
    quantized, _ = quantize_model(model, feeds)
    counts = operators(quantized)
    assert (counts["QLinearAdd"], counts["Add"], counts["Relu"]) == (1, 0, 0)
    close(model, quantized, feeds)


def test_residual_blocks_after_a_float_convolution_run_on_integer_kernels():
    """The first Add reads a float tensor that has a Q/DQ pair for the next convolution; the second Add follows it."""
    m = Maker()
    t = m.add("Relu", [m.conv("x", 3, 16)])
    for _ in range(2):
        t = m.add("Relu", [m.add("Add", [t, m.conv(t, 16, 16)])])
    model, feeds = m.model([("x", [2, 3, 8, 8])], [m.conv(t, 16, 4)]), images(channels=3)
    quantized, plan = quantize_model(model, feeds)
    assert "only 3 input channels" in plan.layers[0].reason
    counts = operators(quantized)
    assert (counts["QLinearAdd"], counts["Add"]) == (2, 0)
    close(model, quantized, feeds)


def test_an_addition_of_a_tensor_without_codes_is_kept_in_float():
    m = Maker()
    t = m.add("Sqrt", [m.add("Relu", [m.conv("x", 8, 16)])])
    model = m.model([("x", [2, 8, 8, 8])], [m.conv(m.add("Add", [t, m.conv("x", 8, 16)]), 16, 4)])
    quantized, _ = quantize_model(model, images())
    counts = operators(quantized)
    assert (counts["QLinearAdd"], counts["Add"]) == (0, 1)


def test_swish_runs_on_integer_kernels():
    m = Maker()
    t = m.conv("x", 8, 16)
    t = m.add("Mul", [t, m.add("Sigmoid", [t])])
    y = m.conv(t, 16, 4)
    model, feeds = m.model([("x", [2, 8, 8, 8])], [y]), images()
    quantized, _ = quantize_model(model, feeds)
    counts = operators(quantized)
    assert (counts["QLinearSigmoid"], counts["QLinearMul"], counts["Mul"]) == (1, 1, 0)
    close(model, quantized, feeds)


def test_hard_swish_of_single_operators_runs_on_integer_kernels():
    m = Maker()
    three, zero, six = (m.constant(np.float32([value])) for value in (3, 0, 6))
    scalars = [m.constant(np.float32(value)) for value in (0, 6)]
    t = m.conv("x", 8, 16)
    gate = m.add("Clip", [m.add("Add", [t, three]), *scalars])
    t = m.add("Div", [m.add("Mul", [t, gate]), six])
    y = m.conv(t, 16, 4)
    model, feeds = m.model([("x", [2, 8, 8, 8])], [y]), images(scale=3.0)
    quantized, _ = quantize_model(model, feeds)
    counts = operators(quantized)
    assert (counts["QLinearAdd"], counts["QLinearMul"], counts["Div"], counts["Clip"]) == (1, 1, 0, 0)
    assert zero not in Graph(quantized).constants
    close(model, quantized, feeds)


def test_gates_are_quantized_for_their_product():
    m = Maker()
    t = m.add("Relu", [m.conv("x", 8, 16)])
    gate = m.add("HardSigmoid", [m.conv(m.add("GlobalAveragePool", [t]), 16, 16, 1)])
    y = m.conv(m.add("Mul", [t, gate]), 16, 4)
    model, feeds = m.model([("x", [2, 8, 8, 8])], [y]), images()
    quantized, _ = quantize_model(model, feeds)
    assert operators(quantized)["QLinearMul"] == 1
    close(model, quantized, feeds)


@pytest.mark.parametrize(
    ("op", "attributes"),
    [("MaxPool", {"kernel_shape": [2, 2], "strides": [2, 2]}), ("Transpose", {"perm": [0, 1, 3, 2]}), ("Flatten", {})],
)
def test_moving_operators_have_equal_parameters_on_both_sides(op, attributes):
    m = Maker()
    t = m.add("Relu", [m.conv("x", 8, 16)])
    moved = m.add(op, [t], **attributes)
    y = m.conv(moved, 16, 4) if op != "Flatten" else m.add("Gemm", [moved, m.constant(weights(1024, 5))])
    model, feeds = m.model([("x", [2, 8, 8, 8])], [y]), images()
    quantized, _ = quantize_model(model, feeds)
    graph = Graph(quantized)
    before, behind = (
        next(each for each in graph.nodes if each.op_type == "QuantizeLinear" and each.input[0] == name)
        for name in (t, moved)
    )
    assert list(before.input[1:]) == list(behind.input[1:])
    assert operators(quantized)["QuantizeLinear"] == 1, "only the model's input"
    close(model, quantized, feeds)


@pytest.mark.parametrize(("factor", "kind"), [(1.0, "QLinearSigmoid"), (20.0, "Sigmoid")], ids=["alike", "mixed"])
def test_a_concat_of_very_different_ranges_ends_its_chain(factor, kind):
    m = Maker()
    parts = [m.conv("x", 8, 8), m.conv("x", 8, 8, weight=factor * weights(8, 8, 3, 3))]
    y = m.conv(m.add("Sigmoid", [m.add("Concat", parts, axis=1)]), 16, 4)
    model, feeds = m.model([("x", [2, 8, 8, 8])], [y]), images()
    quantized, _ = quantize_model(model, feeds)
    assert operators(quantized)[kind] == 1
    close(model, quantized, feeds)


def attention(width=16):
    m = Maker()
    gain, offset = m.constant(np.ones(width, np.float32)), m.constant(np.zeros(width, np.float32))
    norm = m.add("LayerNormalization", ["x", gain, offset], axis=-1)
    q, k, v = (m.matmul(norm, width, width, name=name) for name in ("q", "k", "v"))
    scores = m.add("Softmax", [m.add("MatMul", [q, m.add("Transpose", [k], perm=[0, 2, 1])], name="scores")], axis=-1)
    t = m.add("Add", ["x", m.matmul(m.add("MatMul", [scores, v], name="mixed"), width, width, name="out")])
    y = m.matmul(t, width, 5, name="head")
    return m.model([("x", [1, "n", width])], [y])


def test_attention_and_normalization_are_kept_in_float():
    model, feeds = attention(), rows()
    quantized, plan = quantize_model(model, feeds, prefer="accuracy")
    counts = operators(quantized)
    assert counts["MatMulIntegerToFloat"] == 5
    assert counts["LayerNormalization"] == 1
    assert {line.name: line.reason for line in plan.layers if line.reason} == {
        "scores": "a matmul of two activations",
        "mixed": "a matmul of two activations",
    }
    close(model, quantized, feeds, 30)


def test_other_readers_of_a_layer_input_read_floats():
    quantized, _ = quantize_model(attention(), rows())
    graph = Graph(quantized)
    residual = next(node for node in graph.nodes if node.op_type == "Add")
    assert residual.input[0] == "x"


def test_layers_that_feed_only_roots_and_logarithms_are_kept_in_float():
    m = Maker()
    t = m.conv("x", 8, 8, name="spectrum")
    power = m.add("Log", [m.add("Add", [m.add("Mul", [t, t]), m.constant(np.float32(1))])])
    y = m.conv(power, 8, 4, name="behind")
    plan = qo.plan(qo.prepare(m.model([("x", [2, 8, 8, 8])], [y])))
    assert [line.name for line in plan.quantized] == ["behind"]
    assert "logarithms" in plan.layers[0].reason


def test_float_layers_between_qdq_pairs_are_kept_in_float():
    """Without guards, ONNX Runtime would quantize them itself, per tensor."""
    model, feeds = conv_chain(), images()
    quantized, _ = quantize_model(model, feeds, skip=["second"])
    counts = operators(quantized)
    assert counts["QLinearConv"] == 1
    assert counts["Conv"] + counts["FusedConv"] == 2
    close(model, quantized, feeds)


def test_rows_of_a_table_are_looked_up_as_codes():
    m = Maker()
    table = weights(50, 16)
    y = m.matmul(m.add("Gather", [m.constant(table, "table"), "ids"], name="words"), 16, 4)
    model = m.model([("ids", [1, "n"], 7)], [y])
    plan = qo.plan(qo.prepare(model), "w8a16")
    quantized = qo.insert(plan)
    graph = Graph(quantized)
    gather = next(node for node in graph.nodes if node.op_type == "Gather" and node.input[0] == "table_codes")
    assert graph.array(gather.input[0]).dtype == np.int8
    assert not [name for name in graph.constants if graph.array(name).shape == (50, 16) and graph.kind(name) == 1]
    ids = np.arange(50).reshape(1, -1)
    params = dt.QuantParams.from_data("int8/axis0", table)
    looked = make_session(quantized, optimize=False).run(None, {"ids": ids})[0]
    head = dt.fake_quantize(weights(16, 4, seed=1), dt.QuantParams.from_data("int8/axis1", weights(16, 4, seed=1)))
    np.testing.assert_allclose(looked[0], dt.fake_quantize(table, params) @ head, rtol=1e-5, atol=1e-6)


def test_convolutions_of_few_channels_are_kept_in_float():
    m = Maker()
    t = m.add("Relu", [m.conv("x", 3, 16, name="pixels")])
    model = m.model([("x", [2, 3, 8, 8])], [m.conv(m.add("Relu", [m.conv(t, 16, 16)]), 16, 4)])
    plan = qo.plan(qo.prepare(model))
    assert "only 3 input channels" in plan.layers[0].reason
    assert len(plan.quantized) == 2
    assert len(qo.plan(qo.prepare(model), target="openvino").quantized) == 3


BETWEEN = {
    "nothing": [],
    "Relu": [("Relu", {})],
    "MaxPool": [("MaxPool", {"kernel_shape": [2, 2]})],
    "Transpose": [("Transpose", {"perm": [0, 1, 3, 2]})],
    "Dropout": [("Dropout", {})],
    "Relu, MaxPool, Dropout": [("Relu", {}), ("MaxPool", {"kernel_shape": [2, 2]}), ("Dropout", {})],
}


@pytest.mark.parametrize("behind", BETWEEN)
@pytest.mark.parametrize("before", BETWEEN)
@pytest.mark.parametrize("kept", ["skipped", "weight-only"])
def test_integer_kernels_are_those_of_the_plan(kept, before, behind):
    """ONNX Runtime quantizes no layer that the plan keeps in float, whatever its neighbors are."""
    m = Maker()
    t = m.add("Relu", [m.conv("x", 8, 8, name="first")])
    for op, attributes in BETWEEN[before]:
        t = m.add(op, [t], **attributes)
    t = m.conv(t, 8, 8, name="float")
    for op, attributes in BETWEEN[behind]:
        t = m.add(op, [t], **attributes)
    y = m.conv(m.add("Relu", [m.conv(t, 8, 8, name="third")]), 8, 8, name="last")
    model, feeds = m.model([("x", [2, 8, 8, 8])], [y]), images()
    layers = [dt.Rule(weight="int8/axis0", input="uint8/tensor/affine"), dt.Rule("float", skip=True)]
    if kept == "weight-only":
        names = ("first", "third", "last")
        layers = [dt.Rule(weight="int8/axis0"), *(dt.Rule(each, input="uint8/tensor/affine") for each in names)]
    quantized, plan = quantize_model(model, feeds, dt.Recipe(layers))
    counts = operators(quantized)
    assert [layer.name for layer in plan.layers if layer.input is not None] == ["first", "third", "last"]
    assert sum(counts[kernel] for kernel in INTEGER_KERNELS) == 2, "the result of the last is float"
    assert counts["Conv"] + counts["FusedConv"] == 2
    close(model, quantized, feeds)


@pytest.mark.parametrize(
    ("mode", "is_chained", "expected"),
    [("linear", True, 1), ("nearest", True, 1), ("cubic", True, 1), ("linear", False, 0)],
)
def test_a_concat_behind_a_resize_runs_on_codes(mode, is_chained, expected):
    """A Resize that interpolates computes in float, but its output gets a Q/DQ pair for the Concat."""
    m = Maker()
    fine = m.add("Relu", [m.conv("x", 8, 16)])
    coarse = m.add("Relu", [m.conv(fine, 16, 16, strides=[2, 2])])
    if not is_chained:
        coarse = m.add("Sqrt", [coarse])
    scales = m.constant(np.float32([1, 1, 2, 2]))
    t = m.add("Concat", [fine, m.add("Resize", [coarse, "", scales], mode=mode)], axis=1)
    model, feeds = m.model([("x", [2, 8, 8, 8])], [m.conv(t, 32, 4)]), images()
    quantized, _ = quantize_model(model, feeds)
    counts = operators(quantized)
    assert (counts["QLinearConcat"], counts["Concat"]) == (expected, 1 - expected)
    close(model, quantized, feeds)
