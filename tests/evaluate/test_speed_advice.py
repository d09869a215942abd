"""Advice for models that are not faster: slow layers, and options that were tried. Times are made up."""

import numpy as np
import pytest
from onnx import TensorProto

import detent as dt
import detent.onnx as qo
from detent.errors import UnsupportedError
from detent.evaluate import speed_advice
from detent.evaluate.speed import Timing
from detent.evaluate.speed_advice import NodeTime, advise, node_times
from detent.onnx_model import load_model
from tests.onnx.onnx_graphs import Maker, images

SLOW, EQUAL, FAST = Timing(1.0, 1.5, 50, 1), Timing(1.0, 1.0, 50, 1), Timing(1.0, 0.5, 50, 1)


def convolutions():
    m = Maker()
    t = m.add("Relu", [m.conv("x", 8, 16, name="first")])
    t = m.add("Relu", [m.conv(t, 16, 16, name="second")])
    t = m.add("Relu", [m.conv(t, 16, 16, name="third")])
    return m.model([("x", ["n", 8, 8, 8])], [m.conv(t, 16, 16, name="last")])


def is_float(model, layer):
    """Whether a layer of a quantized model reads its weight in float."""
    (node,) = [node for node in model.graph.node if node.name == layer]
    return node.input[1] in {tensor.name for tensor in model.graph.initializer}


def has_wide_weights(model):
    """Whether a weight is stored in uint8."""
    return any(tensor.data_type == TensorProto.UINT8 and len(tensor.dims) == 4 for tensor in model.graph.initializer)


class Case:
    """A quantized model, made-up times of its nodes, and models that were tried."""

    def __init__(self, tmp_path, monkeypatch, **options):
        self.source, self.tried, self.feeds = load_model(convolutions()), [], images(4)
        self.result = qo.quantize(self.source, tmp_path / "q.onnx", self.feeds, progress=False, **options)
        self.quantized = load_model(self.result.output)
        self.nodes = [], []
        monkeypatch.setattr(speed_advice, "node_times", lambda *_: self.nodes)

    def advise(self, timing=SLOW, tried=lambda _: SLOW):
        def measure(model):
            self.tried.append(model)
            return tried(model)

        return advise(self.source, self.quantized, self.result, timing, self.feeds, measure)

    def warning(self, **options):
        (warning,) = self.advise(**options).warnings
        assert warning.code == "slower"
        return warning.text


@pytest.fixture
def case(tmp_path, monkeypatch):
    return lambda **options: Case(tmp_path, monkeypatch, **options)


def test_a_faster_model_needs_no_advice(case):
    quantized = case(prefer="accuracy")
    assert quantized.advise(FAST) == ((), ())
    assert not quantized.tried


def test_times_in_onnx_runtime_say_nothing_about_openvino(case):
    assert case(target="openvino").advise(SLOW) == ((), ())


@pytest.mark.parametrize(
    ("vnni", "flag"),
    [(True, "--target onnxruntime-vnni (only for CPUs with VNNI)"), (False, "--prefer speed (weights of 7 bits)")],
)
def test_fast_storage_of_weights_is_a_hint_only_if_it_helps(case, monkeypatch, vnni, flag):
    monkeypatch.setattr(speed_advice, "has_vnni", lambda: vnni)
    quantized = case(prefer="accuracy")
    assert has_wide_weights(quantized.quantized.proto)
    advice = quantized.advise(EQUAL, lambda model: EQUAL if has_wide_weights(model) else FAST)
    assert advice.hints[0] == f"a faster option for this model: {flag}: 0.50 ms"
    assert not advice.warnings
    assert quantized.advise(EQUAL, lambda _: EQUAL) == ((), ())


def test_weights_that_are_fast_already_are_not_tried(case):
    quantized = case(prefer="speed")
    assert quantized.advise(EQUAL, lambda _: FAST) == ((), ())
    assert not quantized.tried


def test_prefer_speed_also_quantizes_the_output_of_a_last_layer(case, monkeypatch):
    monkeypatch.setattr(speed_advice, "has_vnni", lambda: True)
    quantized = case(prefer="accuracy", target="onnxruntime-vnni")

    def is_quantized_at_the_end(model):
        (output,) = [node for node in model.graph.node if model.graph.output[0].name in node.output]
        return output.op_type == "DequantizeLinear"

    assert not is_quantized_at_the_end(quantized.quantized.proto)
    text = quantized.warning(tried=lambda model: FAST if is_quantized_at_the_end(model) else SLOW)
    assert text.endswith("Options that help: --prefer speed (weights of 7 bits): 0.50 ms")


def test_slow_layers_are_named_with_their_kernels(case):
    quantized = case(skip="first")
    quantized.nodes = (
        [NodeTime(f"t{2 * i}_nchwc", "Conv", 0.2) for i in (1, 2, 3)] + [NodeTime("t7_nchwc", "Conv", 0.2)],
        [
            NodeTime("first_token_3", "Conv", 0.3),
            NodeTime("second_nhwc_token_5", "QLinearConv", 0.9),
            NodeTime("third", "QLinearConv", 0.1),
            NodeTime("fused last", "QLinearConv", 0.25),
            NodeTime("t2_codes_node", "QuantizeLinear", 0.04),
        ],
    )
    text = quantized.warning()
    assert "Where the time goes: second takes 0.90 ms instead of 0.20 ms (QLinearConv)" in text
    assert "; first takes 0.30 ms instead of 0.20 ms (in float: skipped)" in text
    assert "; last takes 0.25 ms instead of 0.20 ms (QLinearConv)." in text
    assert "third" not in text, "it is faster"
    assert "quantizing and dequantizing" not in text, "4 % of the time"
    quantized.nodes[1].append(NodeTime("t9_dequantized_node", "DequantizeLinear", 0.02))
    assert "quantizing and dequantizing activations takes 60.0 µs" in quantized.warning()


@pytest.mark.parametrize("recipe", ["w8a8", "w4a8"])
def test_dequantizing_a_weight_is_time_of_its_layer(case, recipe):
    quantized = case(recipe=recipe)
    makers = {name: node for node in quantized.quantized.proto.graph.node for name in node.output}
    (second,) = [node for node in makers.values() if node.name == "second"]
    dequantizer = makers[second.input[1]].name
    float_nodes = [NodeTime("second", "Conv", 0.2)]
    quantized.nodes = float_nodes, [*float_nodes, NodeTime(dequantizer, "DequantizeLinear", 0.5)]
    assert "second takes 0.70 ms instead of 0.20 ms" in quantized.warning()


def test_skip_is_advised_only_if_it_helps(case):
    quantized = case()
    quantized.nodes = (
        [NodeTime(name, "Conv", 0.1) for name in ("second", "third")],
        [NodeTime("second", "QLinearConv", 0.9), NodeTime("third", "QLinearConv", 0.5)],
    )

    def second_helps(model):
        return FAST if is_float(model, "second") and not is_float(model, "third") else SLOW

    assert quantized.warning(tried=second_helps).endswith("Options that help: --skip second: 0.50 ms")
    assert [is_float(quantized.tried[-1], name) for name in ("first", "second", "third")] == [False, True, True]

    def both_help(model):
        return FAST if is_float(model, "third") else SLOW

    assert quantized.warning(tried=both_help).endswith("Options that help: --skip second --skip third: 0.50 ms")
    assert quantized.warning().endswith("No option helps: quantizing does not make this model faster on this CPU")


def test_options_that_do_not_help_enough(case):
    quantized = case()
    quantized.nodes = [NodeTime("second", "Conv", 0.1)], [NodeTime("second", "QLinearConv", 0.9)]
    text = quantized.warning(tried=lambda _: Timing(1.0, 1.2, 50, 1))
    assert text.endswith(
        "--skip second: 1.20 ms. Even so, quantizing does not make this model faster than float on this CPU"
    )


def test_a_model_that_cannot_be_profiled_or_tried_gets_the_warning(case, monkeypatch):
    def fail(*_):
        raise UnsupportedError("no memory")

    quantized = case(prefer="accuracy")
    monkeypatch.setattr(speed_advice, "node_times", fail)
    text = quantized.warning(tried=fail)
    assert text == (
        "the quantized model is slower than the float model: 1.00 ms -> 1.50 ms (1.5x slower, 1 thread, 50 runs). "
        "No option helps: quantizing does not make this model faster on this CPU"
    )


def test_recipes_without_integer_kernels(case):
    wide = dt.Recipe([dt.Rule(weight="int8/axis0", input="uint16/tensor/affine")])
    assert case(recipe=wide).warning().endswith("8 bits without groups: for speed, try --recipe w8a8")
    assert case(recipe="w4a8").warning().endswith(speed_advice.NO_OPTION_HELPS), "it runs on integer kernels"
    weight_only = case(recipe="w8a16")
    assert weight_only.warning().endswith(
        "Weight-only recipes make files smaller, not faster: for speed, try --recipe w8a8"
    )
    assert not weight_only.tried


def test_both_profiles_hold_every_layer(tmp_path):
    model, feeds = convolutions(), images(4)
    result = qo.quantize(model, tmp_path / "q.onnx", feeds, skip="third", progress=False)
    times = speed_advice._layer_times(result, load_model(result.output), feeds)
    assert {each.layer.name for each in times.layers} == {"first", "second", "third", "last"}
    assert [each.extra_ms for each in times.layers] == sorted((each.extra_ms for each in times.layers), reverse=True)


def test_layers_with_the_names_of_their_outputs(tmp_path):
    model, feeds = convolutions(), images(4)
    for node in model.graph.node:
        node.name = node.output[0]
    result = qo.quantize(model, tmp_path / "q.onnx", feeds, progress=False)
    times = speed_advice._layer_times(result, load_model(result.output), feeds)
    assert {each.layer.name for each in times.layers} == {
        node.name for node in model.graph.node if node.op_type == "Conv"
    }


def test_nodes_of_a_profile():
    m = Maker()
    model = m.model([("x", [4])], [m.add("Abs", [m.add("Exp", ["x"], name="e")], name="a")])
    (nodes,) = node_times([model], [{"x": np.zeros(4, np.float32)}])
    assert [(node.name, node.operator) for node in nodes] == [("e", "Exp"), ("a", "Abs")]
    assert all(node.ms >= 0 for node in nodes)
