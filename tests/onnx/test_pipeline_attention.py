"""Matmuls of two activations: plans, files, decisions and verification."""

from dataclasses import replace

import numpy as np
import pytest
from onnx import numpy_helper
from onnx_graphs import Maker, operators, rows, weights

import detent as dt
import detent.onnx as qo
import detent.report as qr
import detent.sensitivity as qs
from detent.onnx_model import make_session
from detent.onnx_model.graph import Graph

RULE = dt.Rule(types="ActivationMatMul", input="uint8")
RECIPE = dt.Recipe([*dt.Recipe.preset("w8a8").rules, RULE], "attention")
MATMULS = ("scores", "mixed")


def attention(width=16, first_channel=1.0):
    """A factor of the first channel of q is undone in k, so that it does not change the scores."""
    m = Maker()
    factors = np.ones(width, np.float32)
    factors[0] = first_channel
    q = m.matmul("x", width, width, name="q", weight=weights(width, width, seed=1) / factors)
    k = m.matmul("x", width, width, name="k", weight=weights(width, width, seed=2) * factors)
    v = m.matmul("x", width, width, name="v")
    scores = m.add("MatMul", [q, m.add("Transpose", [k], perm=[0, 2, 1])], name="scores")
    mixed = m.add("MatMul", [m.add("Softmax", [scores], axis=-1), v], name="mixed")
    return m.model([("x", [1, "n", width])], [m.matmul(mixed, width, 5, name="out")])


def quantized_rows(plan):
    return {line.name: line for line in plan.quantized}


def test_matmuls_of_two_activations_are_in_float_by_default():
    plan = qo.plan(qo.prepare(attention()))
    assert {line.name: line.reason for line in plan.layers if line.reason} == dict.fromkeys(
        MATMULS, "a matmul of two activations"
    )


def test_a_rule_for_their_type_quantizes_both_inputs():
    plan = qo.plan(qo.prepare(attention()), RECIPE)
    line = quantized_rows(plan)["scores"]
    assert (line.weight, str(line.input), line.nbytes_after) == (None, "uint8/tensor/affine/onnx", 0)
    assert line.note == "both inputs are quantized"
    layer = plan.layers_by_name["scores"]
    readers = {each.tensor: each.readers for each in plan.placements()}
    assert all("scores" in readers[tensor] for tensor in layer.activations)


@pytest.mark.parametrize(
    ("rules", "reason"),
    [
        ([dt.Rule(weight="int8/axis0"), dt.Rule(types="ActivationMatMul", ste="clipped")], "has no input spec"),
        ([*RECIPE.rules, dt.Rule("scores", skip=True)], "excluded"),
        ([*RECIPE.rules, dt.Rule("scores", mode=dt.PerBatch())], "dynamic quantization needs a constant weight"),
        ([*RECIPE.rules, dt.Rule("scores", input="uint8/token")], "one scale per tensor"),
    ],
)
def test_reasons_to_keep_such_a_matmul_in_float(rules, reason):
    plan = qo.plan(qo.prepare(attention()), dt.Recipe(rules))
    assert reason in next(line.reason for line in plan.layers if line.name == "scores")


def test_skip_applies_to_them():
    plan = qo.plan(qo.prepare(attention()), RECIPE, skip=["scores"])
    assert "mixed" in quantized_rows(plan)
    assert next(line.reason for line in plan.layers if line.name == "scores") == "skipped"


@pytest.mark.parametrize(
    ("width", "target", "expected"),
    [(64, "onnxruntime", MATMULS), (48, "onnxruntime", ()), (64, "openvino", ())],
)
def test_prefer_speed_quantizes_them_if_they_are_large(width, target, expected):
    plan = qo.plan(qo.prepare(attention(width)), prefer="speed", target=target)
    assert tuple(name for name in quantized_rows(plan) if name in MATMULS) == expected


def test_file_report_and_verification(tmp_path):
    model, feeds = attention(), rows()
    report = qo.quantize(model, tmp_path / "q.onnx", feeds, RECIPE, progress=False)
    layers = {layer.name: layer for layer in report.layers}
    assert all(layers[name].runs_on_integer_kernel for name in MATMULS)
    assert operators(qo.load(report.output))["MatMul"] == 0
    expected, got = (make_session(each).run(None, feeds[0])[0] for each in (model, report.output))
    assert dt.metrics.sqnr_db(expected, got) > 25
    verified = dt.verify(model, report.output, feeds)
    assert verified.ok
    assert "2 matmuls of two activations: scores, mixed" in str(verified)
    assert all(row.compared and not row.differing for row in verified.kernels)
    assert len(verified.kernels) == 6
    statuses = {layer.name: layer.status for layer in qr.build(report.output, data=feeds, source=model).layers}
    assert {statuses[name] for name in MATMULS} == {"integer"}


def test_decisions_round_trip_and_can_be_edited():
    model, feeds = attention(), rows()
    decisions = qo.decide(model, feeds, RECIPE, progress=False)
    assert qo.Decisions.from_json(decisions.to_json()) == decisions
    fewer = decisions.with_layers_in_float(["scores"], "too sensitive")
    assert operators(qo.rewrite(model, fewer))["FusedMatMul"] == 1
    assert dt.verify(model, qo.rewrite(model, fewer), feeds).ok


def edited(decisions, name, **changes):
    return replace(
        decisions, layers=tuple(replace(each, **changes) if each.name == name else each for each in decisions.layers)
    )


def test_decisions_that_do_not_fit_are_rejected():
    model = attention()
    decisions = qo.decide(model, rows(), RECIPE, progress=False)
    weight = next(each for each in decisions.layers if each.name == "q")
    stored = {name: getattr(weight, name) for name in ("weight", "weight_scale", "weight_zero_point")}
    empty = dict.fromkeys((*stored, "bias", "input_range"))
    kept = replace(
        decisions, layers=tuple(each.kept_in_float("x") if each.name == "scores" else each for each in decisions.layers)
    )
    for wrong, message in (
        (edited(decisions, "scores", **stored), "must have input=, and no weight"),
        (edited(decisions, "q", **empty), "not a matmul of two activations"),
        (kept, "it is kept in float, but reads codes"),
        (edited(decisions, "scores", input=dt.QuantSpec.parse("uint8/tensor/affine/torch")), "use convention 'onnx'"),
    ):
        with pytest.raises(dt.DetentError, match=message):
            qo.rewrite(model, wrong)


def test_a_missing_placement_is_rejected():
    model = attention()
    decisions = qo.decide(model, rows(), RECIPE, progress=False)
    tensor = next(each.tensor for each in decisions.placements if "mixed" in each.readers)
    placements = tuple(each for each in decisions.placements if each.tensor != tensor)
    ranges = {name: each for name, each in decisions.ranges.items() if name != tensor}
    with pytest.raises(dt.DetentError, match="has no placement for this layer"):
        qo.rewrite(model, replace(decisions, placements=placements, ranges=ranges))


def test_a_changed_scale_of_the_second_input_is_found():
    model, feeds = attention(), rows()
    file = qo.rewrite(model, qo.decide(model, feeds, RECIPE, progress=False))
    graph = Graph(file)
    matmul = next(node for node in graph.nodes if node.name == "mixed")
    scale = graph.producer(matmul.input[1]).input[1]
    tensor = next(each for each in file.graph.initializer if each.name == scale)
    tensor.CopyFrom(numpy_helper.from_array(np.float32(1.01) * numpy_helper.to_array(tensor), scale))
    assert not dt.verify(model, file, feeds).ok


def test_float_fallback_keeps_a_noisy_matmul_in_float():
    model, feeds = attention(first_channel=3e3), rows()
    decisions = qo.decide(model, feeds, RECIPE, progress=False)
    assert "float fallback" in next(each.reason for each in decisions.layers if each.name == "scores")


def test_sensitivity_measures_the_layers_with_weights():
    model, feeds = attention(), rows()
    decisions = qo.decide(model, feeds, RECIPE, progress=False)
    by_decisions, by_recipe = qs.measure(model, feeds, decisions), qs.measure(model, feeds, RECIPE)
    for result in (by_decisions, by_recipe):
        assert {row.name for row in result.layers} == {"q", "k", "v", "out"}
