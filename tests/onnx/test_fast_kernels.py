"""Files are fast by default: 7-bit weights, quantized outputs of last layers, graphs that ONNX Runtime fuses."""

from unittest.mock import Mock

import numpy as np
import pytest
from onnx import TensorProto
from onnx_graphs import Maker, conv_chain, images, operators, weights

import detent as dt
import detent.onnx as qo
from detent.errors import SpecError, UnsupportedError
from detent.onnx import accuracy_passes, fast_kernels
from detent.onnx.fast_kernels import (
    choose_wide,
    multiplications,
    recurrent_multiplications,
    with_last_layers,
)
from detent.onnx.float_fallback import NoiseByLayer
from detent.onnx.graph_plan import NO_KERNEL, PADDED, plan
from detent.onnx.pipeline import output_sqnr
from detent.onnx_model.graph import Graph
from detent.onnx_model.sessions import kernels_of, optimized


def decided(model, feeds, **options):
    decisions = qo.decide(model, feeds, keep_float="none", progress=False, **options)
    file = qo.rewrite(model, decisions)
    assert dt.verify(model, file, feeds[:1]).ok
    return decisions, file


def last_after(channels, **options):
    """Two layers, and a last one with that many outputs, which no quantized layer follows."""
    m = Maker()
    t = m.add("Relu", [m.conv("x", 8, 64, name="first")])
    t = m.add("Relu", [m.conv(t, 64, 64, name="second")])
    y = m.conv(t, 64, channels, 1, name="last", **options)
    return m.model([("x", [1, 8, 8, 8])], [y])


def test_multiplications():
    m = Maker()
    t = m.conv("x", 8, 16, name="dense")
    t = m.conv(t, 16, 16, group=16, name="depthwise")
    model = m.model([("x", [2, 8, 8, 8])], [t])
    counts = multiplications(plan(qo.prepare(model)), images(1)[0])
    assert counts == {"dense": 2 * 64 * 16 * 8 * 9, "depthwise": 2 * 64 * 16 * 9}


@pytest.mark.parametrize("prefer", ["speed", "balanced"])
def test_a_large_last_layer_gets_a_quantized_output(prefer):
    model = last_after(64)
    decisions, file = decided(model, images(2, batch=1), prefer=prefer)
    assert Graph(model).outputs[0] in {each.tensor for each in decisions.placements}
    assert kernels_of(file) == dict.fromkeys(("first", "second", "last"), "QLinearConv")
    assert [value.name for value in file.graph.output] == [value.name for value in model.graph.output]


def test_a_small_last_layer_is_kept_in_float():
    decisions, file = decided(last_after(1), images(2, batch=1))
    last = next(each for each in decisions.layers if each.name == "last")
    assert last.reason == fast_kernels.FLOAT_REASON
    assert kernels_of(file) == dict.fromkeys(("first", "second"), "QLinearConv")
    assert file.graph.output[0].name not in {each.tensor for each in decisions.placements}


def test_accuracy_keeps_the_outputs_of_last_layers_in_float():
    decisions, _ = decided(last_after(64), images(2, batch=1), prefer="accuracy")
    assert all(each.is_quantized for each in decisions.layers)
    assert len(decisions.placements) == 3


def resized(position, mode="linear"):
    """Two layers, a Resize, and a small last layer before or after it."""
    m = Maker()
    t = m.add("Relu", [m.conv("x", 8, 64, name="first")])
    t = m.add("Relu", [m.conv(t, 64, 64, name="second")])
    scales = m.constant(np.float32([1, 1, 2, 2]))

    def resize(tensor):
        return m.add("Resize", [tensor, "", scales], mode=mode)

    y = resize(m.conv(t, 64, 1, 1, name="last")) if position == "before" else m.conv(resize(t), 64, 1, 1, name="last")
    return m.model([("x", [1, 8, 8, 8])], [m.add("Sigmoid", [y])])


@pytest.mark.parametrize("position", ["before", "after"])
@pytest.mark.parametrize(
    ("mode", "options", "is_quantized"),
    [
        ("linear", {}, True),
        ("linear", {"prefer": "speed"}, True),
        ("linear", {"effort": "fast"}, True),
        ("nearest", {}, False),
    ],
)
def test_a_small_last_layer_at_a_resize_gets_a_quantized_output(position, mode, options, is_quantized):
    decisions, file = decided(resized(position, mode), images(2, batch=1), **options)
    assert layer_named(decisions, "last").is_quantized == is_quantized
    assert kernels_of(file).get("last") == ("QLinearConv" if is_quantized else None)


def test_accuracy_keeps_the_output_of_a_last_layer_at_a_resize_in_float():
    decisions, _ = decided(resized("before"), images(2, batch=1), prefer="accuracy")
    assert len(decisions.placements) == 3


@pytest.mark.parametrize(
    ("noises", "is_quantized"),
    [((9e-4, 1e-5), True), ((1.1e-2, 1e-2), True), ((1.3e-2, 1e-2), False), (None, False)],
)
def test_a_last_layer_at_a_resize_stays_in_float_if_that_removes_much_noise(
    noises, is_quantized, monkeypatch, tmp_path
):
    monkeypatch.setattr(accuracy_passes._PlanNoise, "means", lambda *_: noises)
    report = qo.quantize(resized("after"), tmp_path / "q.onnx", images(2, batch=1), keep_float="none", progress=False)
    kept = [step for step in report.steps if "kept last layers at a Resize in float: 23% less noise" in step]
    assert bool(kept) == (noises == (1.3e-2, 1e-2))
    assert layer_named(report.decisions, "last").is_quantized == is_quantized


def test_other_runtimes_need_no_quantized_outputs():
    prepared = qo.prepare(last_after(64))
    for target, expected in (("openvino", set()), ("onnxruntime", {"last"})):
        graph_plan = plan(prepared, target=target)
        work = multiplications(graph_plan, images(1, batch=1)[0])
        changed = with_last_layers(graph_plan, work, "balanced")
        assert (changed.last_layers, changed.layers) == (expected, graph_plan.layers)


def stem(outputs, size, channels=3, group=1):
    """A convolution with few input channels per group, and a layer that reads it."""
    m = Maker()
    t = m.add("Relu", [m.conv("x", channels, outputs, size, group=group, name="stem")])
    return m.model([("x", [1, channels, 16, 16])], [m.conv(t, outputs, 8, name="last")])


@pytest.mark.parametrize(("outputs", "size", "kernel"), [(64, 3, "QLinearConv"), (32, 7, "QLinearConv"), (32, 3, None)])
def test_stems_with_many_weights_are_quantized(outputs, size, kernel):
    model = stem(outputs, size)
    decisions, file = decided(model, images(2, channels=3, side=16, batch=1))
    assert layer_named(decisions, "stem").is_quantized == (kernel is not None)
    assert kernels_of(file).get("stem") == kernel


@pytest.mark.parametrize(
    ("target", "is_quantized"), [("onnxruntime", False), ("onnxruntime-vnni", True), ("openvino", True)]
)
def test_accuracy_keeps_stems_in_float_unless_8_bits_are_fast(target, is_quantized):
    line = plan(qo.prepare(stem(64, 7)), target=target, prefer="accuracy").layers[0]
    assert line.is_quantized == is_quantized


def test_thin_groups_are_kept_in_float():
    line = plan(qo.prepare(stem(64, 7, channels=16, group=4))).layers[0]
    assert line.reason == "only 4 input channels: an integer kernel would be slower than float"


def upsampled(side=8, group=1, channels=32):
    """A convolution, and a ConvTranspose that has most of the weights."""
    m = Maker()
    t = m.add("Relu", [m.conv("x", 8, 32, name="before")])
    weight = weights(32, channels // group, 4, 4)
    return m.model(
        [("x", [1, 8, side, side])],
        [m.add("ConvTranspose", [t, m.constant(weight)], name="up", strides=[2, 2], pads=[1] * 4, group=group)],
    )


def layer_named(decisions, name):
    return next(each for each in decisions.layers if each.name == name)


@pytest.mark.parametrize("group", [1, 2, 32])
def test_a_large_conv_transpose_is_stored_as_codes(group):
    model, feeds = upsampled(group=group), images(2, batch=1)
    decisions, file = decided(model, feeds)
    up = layer_named(decisions, "up")
    assert up.is_quantized
    assert up.input is None, "ONNX Runtime has no integer kernel for it"
    assert up.weight_scale.shape == (32 // group,)
    node = next(each for each in file.graph.node if each.name == "up")
    producer = Graph(file).producer(node.input[1])
    assert (producer.op_type, producer.attribute[0].i) == ("DequantizeLinear", 1)
    assert output_sqnr(model, file, feeds)[file.graph.output[0].name] > 35


def test_speed_keeps_a_conv_transpose_in_float():
    decisions, _ = decided(upsampled(), images(2, batch=1), prefer="speed")
    assert layer_named(decisions, "up").reason == NO_KERNEL


def test_a_small_conv_transpose_is_kept_in_float():
    m = Maker()
    t = m.add("Relu", [m.conv("x", 8, 64, name="before")])
    t = m.add("Relu", [m.conv(t, 64, 64, name="dense")])
    small = m.model([("x", [1, 8, 8, 8])], [m.add("ConvTranspose", [t, m.constant(weights(64, 1, 2, 2))], name="up")])
    decisions, _ = decided(small, images(2, batch=1))
    assert layer_named(decisions, "up").reason == NO_KERNEL


def test_a_conv_transpose_of_few_pixels_is_kept_in_float():
    """One input pixel: to dequantize a weight takes longer than all its multiplications."""
    m = Maker()
    t = m.add("Relu", [m.conv("x", 8, 32, 1, name="before")])
    t = m.add("GlobalAveragePool", [t])
    model = m.model([("x", [1, 8, 8, 8])], [m.add("ConvTranspose", [t, m.constant(weights(32, 64, 4, 4))], name="up")])
    decisions, _ = decided(model, images(2, batch=1))
    assert layer_named(decisions, "up").reason == fast_kernels.SLOW_REASON


def test_a_model_with_only_slow_weights_is_rejected():
    m = Maker()
    up = m.add("ConvTranspose", ["x", m.constant(weights(8, 64, 4, 4))], name="up")
    with pytest.raises(UnsupportedError, match=fast_kernels.SLOW_REASON):
        qo.decide(m.model([("x", [1, 8, 1, 1])], [up]), images(2, side=1, batch=1), progress=False)


def test_other_runtimes_quantize_the_input_of_a_conv_transpose():
    line = plan(qo.prepare(upsampled()), target="openvino").layers[-1]
    assert (line.name, line.note) == ("up", "")
    assert line.input is not None


def test_multiplications_of_a_conv_transpose():
    counts = multiplications(plan(qo.prepare(upsampled())), images(1, batch=1)[0])
    assert counts["up"] == 64 * 32 * 32 * 16


@pytest.mark.parametrize(("weight", "is_padded"), [("int4/axis0", False), ("int3/axis0", True)])
def test_a_conv_transpose_with_3_bits_notes_its_size(weight, is_padded):
    recipe = dt.Recipe([dt.Rule("*", weight=weight, input="uint8/tensor/affine")])
    line = plan(qo.prepare(upsampled()), recipe).layers[-1]
    assert line.note.startswith(NO_KERNEL)
    assert (PADDED in line.note) == is_padded


def sensitive(cheap=True):
    """A small or a large layer whose weights need more than 7 bits, after a large one."""
    m = Maker()
    t = m.add("Relu", [m.conv("x", 8, 64, name="large")])
    t = m.add("GlobalAveragePool" if cheap else "Relu", [t])
    peak = np.full((8, 64, 1, 1), 0.02, np.float32) + weights(8, 64, 1, 1) / 1000
    peak[:, 0] = 3.0
    return m.model([("x", [1, 8, 8, 8])], [m.add("Sigmoid", [m.conv(t, 64, 8, 1, weight=peak, name="small")])])


def weight_bits(decisions):
    return {each.name: 8 if each.weight.qmax > 64 else 7 for each in decisions.layers if each.is_quantized}


def test_a_cheap_layer_that_needs_8_bits_gets_them():
    feeds = images(4, batch=1)
    assert weight_bits(decided(sensitive(), feeds)[0]) == {"large": 7, "small": 8}
    assert weight_bits(decided(sensitive(), feeds, prefer="speed")[0]) == {"large": 7, "small": 7}
    assert weight_bits(decided(sensitive(), feeds, prefer="accuracy")[0]) == {"large": 8, "small": 8}
    assert weight_bits(decided(sensitive(), feeds, target="onnxruntime-vnni")[0]) == {"large": 8, "small": 8}


def test_an_expensive_layer_keeps_7_bits():
    assert weight_bits(decided(sensitive(cheap=False), images(4, batch=1))[0]) == {"large": 7, "small": 7}


def test_the_report_says_what_8_bits_gained(tmp_path):
    report = qo.quantize(sensitive(), tmp_path / "q.onnx", images(4, batch=1), keep_float="none", progress=False)
    assert any(step.startswith("8-bit weights for small: ") for step in report.steps)


@pytest.mark.parametrize("bias", [(16,), (1, 16)])
def test_a_dense_layer_of_matmul_and_add_runs_on_an_integer_kernel(bias):
    m = Maker()
    t = m.add("Add", [m.matmul("x", 8, 16, name="up"), m.constant(weights(*bias))])
    y = m.add("Add", [m.constant(weights(4)), m.matmul(m.add("Relu", [t]), 16, 4, name="down")])
    model = m.model([("x", [3, 8])], [y])
    feeds = [{"x": np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32)}]
    _, file = decided(model, feeds)
    assert operators(file)["QGemm"] == 2
    assert "DequantizeLinear" not in operators(file)


def test_dense_layers_of_3_d_data_run_on_integer_kernels():
    """ONNX Runtime would merge MatMul and Add into a float Gemm between two Reshapes."""
    m = Maker()
    t = m.add("Add", [m.matmul("x", 8, 16, name="up"), m.constant(weights(16))])
    y = m.add("Add", [m.constant(weights(1, 4)), m.matmul(m.add("Relu", [t]), 16, 4, name="down")])
    model = m.model([("x", [1, 3, 8])], [y])
    prepared = qo.prepare(model)
    assert [node.op_type for node in prepared.graph.node] == ["MatMul", "Add", "Relu", "MatMul", "Add"]
    feeds = [{"x": np.random.default_rng(0).normal(size=(1, 3, 8)).astype(np.float32)}]
    _, file = decided(model, feeds)
    assert operators(file)["MatMulIntegerToFloat"] == 2
    assert "Gemm" not in operators(file)


@pytest.mark.parametrize(("axes", "kernel"), [(3, "MatMulIntegerToFloat"), (2, "QGemm")])
def test_dense_layers_after_a_reshape_by_computed_sizes_run_on_integer_kernels(axes, kernel):
    """Shape inference alone does not find the number of axes after such a Reshape."""
    m = Maker()
    first = m.add("Gather", [m.add("Shape", ["x"]), m.constant(np.int64([0]))])
    sizes = m.add("Concat", [first, m.constant(np.int64([3, 8] if axes == 3 else [8]))], axis=0)
    t = m.add("Reshape", ["x", m.add("Abs", [sizes])])
    for i in range(2):
        t = m.add("Add", [m.matmul(t, 8, 8, name=f"dense{i}"), m.constant(weights(8))])
    model = m.model([("x", [3, 8] if axes == 2 else [1, 3, 8])], [t])
    feeds = [{"x": np.random.default_rng(0).normal(size=(3, 8) if axes == 2 else (1, 3, 8)).astype(np.float32)}]
    _, file = decided(model, feeds)
    assert operators(file)[kernel] == 2
    assert "Gemm" not in operators(file)


@pytest.mark.parametrize("bias", [(), (1,), (3, 16)])
def test_an_add_that_is_no_bias_stays_an_add(bias):
    m = Maker()
    y = m.add("Add", [m.matmul("x", 8, 16, name="up"), m.constant(np.ones(bias, np.float32))])
    prepared = qo.prepare(m.model([("x", [3, 8])], [y]))
    assert [node.op_type for node in prepared.graph.node] == ["MatMul", "Add"]


def test_a_pool_of_float_data_stays_in_float():
    m = Maker()
    t = m.add("Relu", [m.conv("x", 3, 8, name="first")])
    t = m.add("MaxPool", [t], kernel_shape=[2, 2], strides=[2, 2], name="pool")
    t = m.add("Relu", [m.conv(t, 8, 8, name="second")])
    model = m.model([("x", [1, 3, 8, 8])], [m.conv(t, 8, 8, name="third")])
    _, file = decided(model, images(2, channels=3, batch=1))
    runtime = optimized(file)
    pool = next(node for node in runtime.graph.node if node.op_type == "MaxPool")
    assert Graph(runtime).producer(pool.input[0]).op_type != "QuantizeLinear"


def test_no_node_is_written_that_nothing_reads():
    m = Maker()
    t = m.add("Relu", [m.conv("x", 8, 8, name="first")])
    t = m.add("Mul", [t, m.constant(np.float32(0.5))])
    model = m.model([("x", [2, 8, 8, 8])], [m.conv(t, 8, 8, name="second")])
    _, file = decided(model, images(2))
    read = {name for node in file.graph.node for name in node.input} | {value.name for value in file.graph.output}
    assert all(read & set(node.output) for node in file.graph.node)


def test_weights_of_few_bits_are_signed():
    _, file = decided(conv_chain(), images(2), recipe="w4a8")
    kinds = {tensor.data_type for tensor in file.graph.initializer if tensor.name.endswith("_codes")}
    assert TensorProto.UINT8 not in kinds


def test_an_unknown_preference():
    with pytest.raises(SpecError, match="got prefer='size', expected one of speed, balanced, accuracy"):
        qo.decide(conv_chain(), images(2), prefer="size")


def test_noise_that_is_not_a_number_ends_the_choice_of_weight_bits():
    noise = Mock(spec=NoiseByLayer, count=1)
    noise.noise_with.return_value = np.nan
    graph_plan = plan(qo.prepare(conv_chain()))
    assert choose_wide(noise, graph_plan, {line.name: 0.0 for line in graph_plan.quantized}) == {}
    assert noise.noise_with.call_count == 1


def test_recurrent_layers_and_loops_count_one_multiplication_per_weight_and_step():
    m = Maker()
    inputs = ["x", m.constant(weights(1, 12, 4)), m.constant(weights(1, 12, 3))]
    state = m.add("GRU", inputs, hidden_size=3)
    graph = Graph(m.model([("x", [5, 1, 4])], [state]))
    feed = {"x": np.zeros((5, 7, 4), np.float32)}
    assert recurrent_multiplications(graph, feed) == (12 * 4 + 12 * 3) * 7
    assert recurrent_multiplications(Graph(conv_chain()), feed) == 0


@pytest.mark.parametrize("is_data", [True, False])
def test_a_layer_that_gives_a_resize_only_its_shape_is_not_before_the_resize(is_data):
    m = Maker()
    t = m.add("Relu", [m.conv("x", 8, 64, name="first")])
    t = m.add("Relu", [m.conv(t, 64, 64, name="second")])
    y = m.conv(t, 64, 1, 1, name="last")
    sides = m.add("Slice", [m.add("Shape", [y]), *(m.constant(np.int64([each])) for each in (2, 4, 0))])
    sizes = m.add("Concat", [m.constant(np.int64([1, 1 if is_data else 8])), sides], axis=0)
    resized_output = m.add("Resize", [y if is_data else "x", "", "", sizes], mode="linear")
    model = m.model([("x", [1, 8, 8, 8])], [m.add("Sigmoid", [y]), resized_output])
    decisions, _ = decided(model, images(2, batch=1), effort="fast")
    assert layer_named(decisions, "last").is_quantized == is_data
