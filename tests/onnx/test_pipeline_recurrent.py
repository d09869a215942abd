"""qo.quantize for recurrent layers and layers in subgraphs."""

import importlib
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx_graphs import Maker, weights

import detent as dt
import detent.onnx as qo
from detent.cli.model_contents import model_contents
from detent.errors import SpecError, UnsupportedError
from detent.onnx.decisions import Decisions
from detent.onnx_model import Graph, make_session, optimized
from detent.onnx_model.graph import subgraphs
from detent.onnx_model.layers import layers_of
from detent.onnx_model.qdq_reader import open_quantized
from detent.onnx_model.quantized_model import load_quantized
from detent.report.file_layers import find_layers

sys.path.append(str(Path(__file__).parents[1] / "tools"))
small_models = importlib.import_module("small_models")

INNER = ("branch/matmul", "branch/matmul_1", "loop/matmul")
PARTS = tuple(f"{name}/{part}" for name in ("lstm", "gru", "rnn") for part in ("W", "R"))


@pytest.fixture(scope="module")
def subject():
    return small_models.recurrent()


def quantize(subject, tmp_path, recipe="w8a8", **options):
    model, batches = subject
    return qo.quantize(model, tmp_path / "q.onnx", batches, recipe, progress=False, **options)


def test_every_weight_is_stored_as_codes(subject, tmp_path):
    report = quantize(subject, tmp_path)
    assert [layer.name for layer in report.layers] == [*PARTS, *INNER, "head"]
    assert not any(layer.reason for layer in report.layers)
    assert all(layer.input == "" for layer in report.layers if layer.type != "MatMul")
    assert report.output_sqnr_db > 30
    graph = Graph(qo.load(report.output))
    floats = [name for name in graph.constants if graph.kind(name) == TensorProto.FLOAT]
    assert max(int(np.prod(graph.shape(name))) for name in floats) < 200  # biases and scales


@pytest.mark.parametrize(
    ("recipe", "least"), [("w8a8", 30), ("w8a16", 30), ("w8a8-dynamic", 30), ("w4a16-g32", 8), ("w4a16", 8)]
)
@pytest.mark.parametrize("target", ["onnxruntime", "onnxruntime-avx2"])
def test_files_of_all_recipes_are_accurate_and_verified(recipe, least, target, subject, tmp_path):
    report = quantize(subject, tmp_path, recipe, target=target)
    assert report.output_sqnr_db > least
    assert dt.verify(subject[0], report.output, subject[1][:1]).ok
    assert dt.verify(subject[0], report.output).ok


def test_onnx_runtime_dequantizes_once_at_load(subject, tmp_path):
    graph = optimized(qo.load(quantize(subject, tmp_path).output)).graph
    kinds = {node.op_type for node in graph.node}
    assert {"LSTM", "GRU", "RNN"} <= kinds
    assert not kinds & {"Cast", "Mul"}
    codes = [each for each in graph.initializer if each.data_type == TensorProto.INT8 and len(each.dims) > 1]
    assert {tuple(each.dims) for each in codes} == {(16, 16), (16, 5)}  # a matmul in a branch, and the head


def test_scales_have_one_value_per_direction_and_row(subject):
    decisions = {layer.name: layer for layer in qo.decide(*subject, progress=False).layers}
    assert decisions["lstm/W"].weight_scale.shape == (2, 32, 1)
    assert decisions["gru/R"].weight_scale.shape == (36,)
    weight = qo.prepare(subject[0]).graph.initializer
    weight = next(each for each in weight if each.name == "lstm.W")
    largest = np.abs(np.frombuffer(weight.raw_data, np.float32).reshape(2, 32, 10)).max(axis=2, keepdims=True)
    np.testing.assert_array_equal(decisions["lstm/W"].weight_scale, (largest.astype(np.float64) / 127).astype("f4"))


def test_decisions_survive_json_and_give_the_same_file(subject, tmp_path):
    report = quantize(subject, tmp_path)
    again = Decisions.from_json(report.decisions.to_json())
    assert again == report.decisions
    assert qo.rewrite(subject[0], again) == qo.rewrite(subject[0], report.decisions)


def test_layers_can_be_skipped_by_name_and_by_type(subject, tmp_path):
    report = quantize(subject, tmp_path, skip=["lstm/*", "loop/matmul"])
    kept = [layer.name for layer in report.layers if layer.reason]
    assert kept == ["lstm/W", "lstm/R", "loop/matmul"]
    assert dt.verify(subject[0], report.output, subject[1][:1]).ok
    recipe = dt.Recipe([dt.Rule(types="GRU", weight="int8/axis0")])
    plan = qo.plan(qo.prepare(subject[0]), recipe)
    assert [line.name for line in plan.quantized] == ["gru/W", "gru/R"]


def test_the_plan_knows_sizes_and_reasons(subject):
    plan = qo.plan(qo.prepare(subject[0]), "w8a8")
    lines = {line.name: line for line in plan.layers}
    assert lines["lstm/W"].nbytes_before == 4 * 2 * 32 * 10
    assert lines["lstm/W"].nbytes_after == 2 * 32 * 10 + 5 * 2 * 32
    assert lines["lstm/R"].note == "only its weight is quantized, because ONNX Runtime runs LSTM layers in float"
    assert (str(lines["branch/matmul"].input), lines["branch/matmul"].note) == ("uint8/tensor/affine/onnx", "")
    assert lines["loop/matmul"].note == "only its weight is quantized, because it reads the state of a loop"
    assert qo.plan(qo.prepare(subject[0]), "w8a16").layers[0].note == ""


def test_a_weight_that_a_subgraph_shares_is_stored_once(tmp_path):
    m = Maker()
    weight = m.constant(weights(16, 16), "shared")
    value = helper.make_tensor_value_info("out", TensorProto.FLOAT, None)
    nodes = [helper.make_node("MatMul", ["x", weight], ["out"], name="inner")]
    other = [helper.make_node("Identity", ["x"], ["out2"], name="same")]
    value2 = helper.make_tensor_value_info("out2", TensorProto.FLOAT, None)
    branches = {
        "then_branch": helper.make_graph(nodes, "then", [], [value]),
        "else_branch": helper.make_graph(other, "else", [], [value2]),
    }
    t = m.add("If", ["yes"], name="if", **branches)
    y = m.matmul(m.add("MatMul", [t, weight], name="outer"), 16, 4, name="head")
    model = m.model([("x", [3, 16]), ("yes", [], TensorProto.BOOL)], [y])
    x = np.random.default_rng(0).normal(size=(3, 16)).astype(np.float32)
    data = [{"x": x, "yes": np.array(flag)} for flag in (True, False)]
    report = quantize((model, data), tmp_path)
    assert {layer.name: layer.kernel for layer in report.layers} == dict.fromkeys(
        ("if/inner", "outer", "head"), "MatMulIntegerToFloat"
    )
    graph = Graph(qo.load(report.output))
    assert [name for name in graph.constants if graph.shape(name) == (16, 16)] == ["shared_codes"]
    assert report.output_sqnr_db > 30
    assert dt.verify(model, report.output, data).ok


def test_only_recurrent_layers_are_enough(tmp_path):
    m = Maker()
    sizes = {"W": (1, 12, 5), "R": (1, 12, 3)}
    names = [m.constant(weights(*shape), name) for name, shape in sizes.items()]
    _, y = m.add("LSTM", ["x", *names], outputs=2, name="lstm", hidden_size=3)
    model = m.model([("x", [4, 1, 5])], [y])
    x = np.random.default_rng(0).normal(size=(4, 1, 5)).astype(np.float32)
    for recipe in ("w8a8", "w8a8-dynamic", "w8a16"):
        report = quantize((model, [x]), tmp_path, recipe)
        assert [layer.kernel for layer in report.layers] == ["LSTM", "LSTM"]
        assert dt.verify(model, report.output, [x]).ok


@pytest.mark.parametrize(
    "spec", ["int8", "uint8/axis0/affine", "int8/axis1", "int16/axis0", "int4/group2", "int3/axis0"]
)
def test_weights_of_any_spec(spec, subject, tmp_path):
    recipe = dt.Recipe([dt.Rule(weight=spec)])
    report = quantize(subject, tmp_path, recipe)
    assert not any(layer.reason for layer in report.layers if layer.type in {"LSTM", "GRU", "RNN"})
    assert dt.verify(subject[0], report.output, subject[1][:1]).ok


def test_the_summary_and_the_contents_of_a_file_list_all_layers(subject, tmp_path):
    report = quantize(subject, tmp_path)
    stored = load_quantized(report.output)
    assert {"lstm.W_codes", "looped.weight_codes"} <= stored.weights.keys()
    codes = stored.weights["lstm.W_codes"]
    assert codes.shape == (2, 32, 10)
    rows = {row.name: row for row in model_contents(report.output).rows}
    assert (rows["gru.W_codes"].kind, rows["gru.W_codes"].type) == ("weight", "int8/axis1/affine/onnx")
    layers = {layer.name: layer for layer in find_layers(open_quantized(report.output))}
    assert {*PARTS, *INNER} <= layers.keys()
    assert all(layers[name].is_quantized for name in (*PARTS, *INNER))


def computed_weight():
    m = Maker()
    w = m.add("Exp", ["w"])
    r = m.constant(weights(1, 12, 3))
    y = m.add("LSTM", ["x", w, r], name="lstm", hidden_size=3)
    return m.model([("x", [4, 1, 5]), ("w", [1, 12, 5])], [y])


def test_a_computed_weight_stays_float():
    lines = qo.plan(qo.prepare(computed_weight()), "w8a16").layers
    assert [line.reason for line in lines] == ["its weight is computed, not constant", ""]


def test_a_weight_with_too_few_axes_stays_float():
    m = Maker()
    y = m.add("GRU", ["x", m.constant(weights(9, 5)), m.constant(weights(1, 9, 3))], name="gru", hidden_size=3)
    model = m.model([("x", [4, 1, 5])], [y])
    lines = qo.plan(model, "w8a16").layers
    assert [line.reason for line in lines] == ["its weight has 2 axes, expected 3", ""]


def test_nothing_is_written_if_nothing_can_be_quantized(tmp_path):
    with pytest.raises(UnsupportedError, match=r"no layer was quantized.*skipped \(lstm/R\)"):
        qo.quantize(computed_weight(), tmp_path / "q.onnx", None, "w8a16", skip=["lstm/R"])
    assert not list(tmp_path.iterdir())


def test_weights_that_are_not_finite_are_rejected(subject, tmp_path):
    model, batches = small_models.recurrent()
    tensor = next(each for each in model.graph.initializer if each.name == "gru.R")
    array = np.frombuffer(tensor.raw_data, np.float32).copy()
    array[7] = np.nan
    tensor.raw_data = array.tobytes()
    with pytest.raises(dt.errors.DetentError, match="gru"):
        quantize((model, batches), tmp_path, "w8a16", compare=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight_scale": np.ones(3, np.float32), "weight_zero_point": np.zeros(3, np.int32)}, "shape"),
        ({"bias": np.zeros(16, np.float32)}, "bias must be None"),
        ({"input": dt.QuantSpec("uint8")}, "own_range must be a range|must be None"),
        ({"dynamic_input": dt.QuantSpec("int8")}, "dynamic"),
    ],
)
@pytest.mark.parametrize("name", ["gru/W", "loop/matmul"])
def test_decisions_that_do_not_fit_are_rejected(name, change, message, subject):
    decisions = qo.decide(*subject, progress=False)
    layers = tuple(replace(each, **change) if each.name == name else each for each in decisions.layers)
    with pytest.raises(SpecError, match=message):
        qo.rewrite(subject[0], replace(decisions, layers=layers))


def test_inner_layers_read_the_dequantized_weight(subject, tmp_path):
    graph = Graph(qo.load(quantize(subject, tmp_path).output))
    layers = {layer.name: layer for layer in layers_of(graph)}
    assert graph.producer(layers["loop/matmul"].node.input[1]).op_type == "Mul"
    bodies = [body for node in graph.nodes for body in subgraphs(node)]
    assert not any(body.initializer for body in bodies)


def test_float_and_quantized_files_run_equally_fast_kernels(subject, tmp_path):
    report = quantize(subject, tmp_path)
    before, after = (
        {node.op_type for node in optimized(model).graph.node} for model in (subject[0], qo.load(report.output))
    )
    assert after - before <= {"QuantizeLinear", "MatMulIntegerToFloat"}
    assert make_session(report.output).run(None, subject[1][0])[0].shape == (6, 3, 5)


@pytest.mark.parametrize(
    ("prefer", "dynamic"),
    [("speed", {*INNER, "head"}), ("balanced", {"branch/matmul", "branch/matmul_1", "head"}), ("accuracy", {"head"})],
)
def test_matmuls_in_subgraphs_are_quantized_dynamically(prefer, dynamic, subject, tmp_path):
    model, batches = subject
    report = quantize((model, None), tmp_path, "w8a8-dynamic", prefer=prefer)
    assert {layer.name for layer in report.layers if layer.input} == dynamic
    assert {layer.name for layer in report.layers if layer.kernel == "DynamicQuantizeMatMul"} == dynamic
    verification = dt.verify(model, report.output, batches[:2])
    assert verification.ok
    assert dt.verify(model, report.output).ok
    expected, got = (make_session(each).run(None, batches[0])[0] for each in (model, report.output))
    assert dt.metrics.sqnr_db(expected, got) > 25
    layers = {layer.name: layer for layer in find_layers(open_quantized(report.output))}
    assert {name for name, layer in layers.items() if layer.is_dynamic} == dynamic


def test_dynamic_layers_inside_and_outside_of_a_subgraph_share_codes(tmp_path):
    m = Maker()
    weight = m.constant(weights(16, 16), "shared")
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("out", "out2")]
    inner = helper.make_graph([helper.make_node("MatMul", ["x", weight], ["out"], name="inner")], "a", [], values[:1])
    other = helper.make_graph([helper.make_node("Neg", ["x"], ["out2"], name="neg")], "b", [], values[1:])
    t = m.add("If", ["yes"], name="if", then_branch=inner, else_branch=other)
    model = m.model([("x", [3, 16]), ("yes", [], TensorProto.BOOL)], [m.add("MatMul", [t, weight], name="outer")])
    x = np.random.default_rng(0).normal(size=(3, 16)).astype(np.float32)
    data = [{"x": x, "yes": np.array(flag)} for flag in (True, False)]
    for given in (data, None):
        report = quantize((model, given), tmp_path, "w8a8-dynamic")
        assert [layer.kernel for layer in report.layers] == ["DynamicQuantizeMatMul"] * 2
        graph = Graph(qo.load(report.output))
        assert [name for name in graph.constants if graph.shape(name) == (16, 16)] == ["shared_codes"]
        assert dt.verify(model, report.output, data).ok


@pytest.mark.parametrize(
    ("prefer", "static"),
    [("speed", {"branch/matmul_1", "loop/matmul"}), ("balanced", {"branch/matmul_1"}), ("accuracy", set())],
)
def test_inputs_of_matmuls_in_subgraphs_get_the_observed_range(prefer, static, subject, tmp_path):
    report = quantize(subject, tmp_path, prefer=prefer)
    decided = {layer.name: layer.own_range for layer in report.decisions.layers if layer.own_range is not None}
    assert decided.keys() == static
    kernels = {layer.name: layer.kernel for layer in report.layers}
    assert all(kernels[name] == "MatMulIntegerToFloat" for name in static)
    for own_range in decided.values():
        expected = dt.QuantParams.from_range("uint8", *own_range.observed_range)
        assert (own_range.scale, own_range.zero_point) == (float(expected.scale), int(expected.zero_point))
    verification = dt.verify(subject[0], report.output, subject[1][:1])
    assert verification.ok
    assert ("activation scale in subgraphs" in " ".join(verification.replay.decided)) == (len(static) == 1)


def test_a_branch_that_calibration_does_not_run_keeps_a_float_input(subject, tmp_path):
    report = quantize(subject, tmp_path)
    layers = {layer.name: layer for layer in report.layers}
    assert layers["branch/matmul"].input == ""
    assert layers["branch/matmul"].note == (
        "only its weight is quantized, because it does not run on the calibration data"
    )


def test_a_generator_calibrates_subgraphs_with_the_chosen_samples(subject, tmp_path):
    model, batches = subject
    report = quantize((model, iter(batches)), tmp_path)
    assert [layer.name for layer in report.decisions.layers if layer.own_range] == ["branch/matmul_1"]
    assert dt.verify(model, report.output, batches[:1]).ok


def test_step_by_step_functions_quantize_only_weights_in_subgraphs(subject):
    model, batches = subject
    plan = qo.plan(qo.prepare(model), "w8a8")
    file = qo.insert(plan, qo.calibrate(plan, batches))
    assert dt.verify(model, file, batches[:1]).ok
    layers = {layer.name: layer for layer in layers_of(Graph(file))}
    assert Graph(file).producer(layers["branch/matmul"].node.input[1]).op_type == "Mul"


@pytest.mark.parametrize(("recipe", "target"), [("w4a8", "onnxruntime"), ("w8a8", "openvino")])
def test_without_an_integer_kernel_only_weights_are_quantized(recipe, target, subject, tmp_path):
    report = quantize(subject, tmp_path, recipe, target=target)
    assert all(layer.own_range is None for layer in report.decisions.layers)
    assert dt.verify(subject[0], report.output, subject[1][:1]).ok


def test_groups_have_no_integer_kernel_in_a_subgraph(subject):
    plan = qo.plan(qo.prepare(subject[0], low_bits=True), dt.Recipe([dt.Rule(weight="int8/group4", input="uint8")]))
    assert [line.input for line in plan.layers if line.name in INNER] == [None] * 3


def test_a_wrong_scale_in_a_subgraph_is_found(subject, tmp_path):
    report = quantize(subject, tmp_path)
    layers = [
        each
        if each.own_range is None
        else replace(each, own_range=replace(each.own_range, scale=2 * each.own_range.scale))
        for each in report.decisions.layers
    ]
    forged = qo.rewrite(subject[0], replace(report.decisions, layers=tuple(layers)))
    failure = dt.verify(subject[0], forged).failure
    assert "branch/matmul_1" in failure
    assert "observed range" in failure


@pytest.mark.parametrize("part", ["scale", "zero point"])
@pytest.mark.parametrize("levels", [(1,), (2,)])
def test_a_changed_activation_quantizer_in_a_subgraph_is_found_by_each_level(part, levels, subject, tmp_path):
    """Codes in subgraphs are not compared one by one, but the file and the outputs of the subgraph are.

    Level 2 finds only changes that alter an output, so the changed zero point clips half of the values.
    """
    model, batches = subject
    file = qo.load(quantize(subject, tmp_path, prefer="speed").output)
    graph = Graph(file)
    inner = [node for outer in graph.nodes for body in subgraphs(outer) for node in body.node]
    names = [node.input[1 + (part == "zero point")] for node in inner if node.op_type == "QuantizeLinear"]
    assert len(set(names)) == 2
    for name in set(names):
        changed = type(file).FromString(file.SerializeToString())
        tensor = next(each for each in changed.graph.initializer if each.name == name)
        value = numpy_helper.to_array(tensor)
        clipping = np.uint8(0 if value.item() >= 128 else 255)
        value = value * np.float32(1.5) if part == "scale" else np.full_like(value, clipping)
        tensor.CopyFrom(numpy_helper.from_array(np.asarray(value), name))
        assert not dt.verify(model, changed, batches[:2], levels=levels).ok
    assert dt.verify(model, file, batches[:2], levels=levels).ok


def test_a_changed_zero_point_in_a_subgraph_that_alters_no_output_is_found_by_level_1(subject, tmp_path):
    """Both nodes of a Q/DQ pair share the zero point, so a small change only moves the range."""
    model, batches = subject
    file = qo.load(quantize(subject, tmp_path, prefer="speed").output)
    inner = [node for outer in Graph(file).nodes for body in subgraphs(outer) for node in body.node]
    name = next(node.input[2] for node in inner if node.op_type == "QuantizeLinear")
    tensor = next(each for each in file.graph.initializer if each.name == name)
    value = numpy_helper.to_array(tensor)
    tensor.CopyFrom(numpy_helper.from_array(np.asarray(value + np.uint8(1)), name))
    assert not dt.verify(model, file, batches[:2]).ok
    assert not dt.verify(model, file).ok
