"""Outputs whose shapes depend on the data: what can be compared is compared, and the rest is listed."""

import json
import logging

import numpy as np
import pytest
from onnx import TensorProto, helper
from onnx_graphs import Maker, conv_chain, images, weights

import detent as dt
import detent.evaluate as qe
import detent.onnx as qo
import detent.sensitivity as qs
from detent import report as qr
from detent.errors import SpecError
from detent.onnx.calibration import choose_params
from detent.onnx.float_fallback import NoiseByLayer, choose_float
from detent.onnx.graph_plan import plan
from detent.onnx_model.sessions import make_session


def detector(*, with_scores=False, threshold=0.8):
    """Boxes and classes after NonMaxSuppression: as many as scores above the threshold."""
    m = Maker()
    t = m.add("Relu", [m.conv("x", 8, 16, name="first")])
    t = m.add(
        "Reshape", [m.conv(t, 16, 7, name="second", weight=3 * weights(7, 16, 3, 3)), m.constant(np.array([1, 7, 64]))]
    )
    boxes, scores = m.add("Split", [t, m.constant(np.array([4, 3]))], 2, axis=1)
    boxes = m.add("Transpose", [boxes], perm=[0, 2, 1])
    limits = m.constant(np.array([20])), m.constant(np.float32([0.5])), m.constant(np.float32([threshold]))
    chosen = m.add("NonMaxSuppression", [boxes, scores, *limits])
    classes = m.add("Gather", [chosen, m.constant(np.array(1))], axis=1)
    cells = m.add("Gather", [chosen, m.constant(np.array(2))], axis=1)
    found = m.add("Gather", [m.add("Squeeze", [boxes, m.constant(np.array([0]))]), cells])
    model = m.model([("x", [1, 8, 8, 8])], [found, *([scores] if with_scores else [])])
    model.graph.output.append(helper.make_tensor_value_info(classes, TensorProto.INT64, ["n"]))
    return model, (found, classes, scores)


def planned(model, feeds):
    """Return the plan and the activation parameters of a model."""
    graph_plan = plan(qo.prepare(model))
    calibration = qo.calibrate(graph_plan, feeds, progress=False)
    return graph_plan, choose_params(graph_plan.placements(calibration.ranges), calibration)


def changed(graph_plan, params, feeds, name):
    """Return two samples on which quantization changes the shape of an output."""
    sessions = make_session(graph_plan.model), make_session(qo.insert(graph_plan, params=params))
    shapes = ([session.run([name], feed)[0].shape for session in sessions] for feed in feeds)
    return [feed for feed, (before, after) in zip(feeds, shapes, strict=True) if before != after][:2]


@pytest.fixture(scope="module")
def feeds():
    return images(40, batch=1)


def test_quantize_compares_the_outputs_that_keep_their_shape(tmp_path, feeds):
    model, (boxes, classes, scores) = detector(with_scores=True)
    report = qo.quantize(model, tmp_path / "q.onnx", feeds, progress=False)
    assert report.not_compared.keys() == {boxes, classes}
    assert report.not_compared[boxes].startswith("shape (")
    assert "in float" in report.not_compared[boxes]
    assert report.outputs_sqnr_db[scores] > 20
    assert f"output {boxes!r} not compared: shape" in str(report)
    assert json.loads(report.to_json())["outputs_not_compared"] == report.not_compared


def test_evaluation_and_report_list_what_was_not_compared(tmp_path, feeds):
    model, (boxes, classes, _) = detector()
    evaluation = qe.quantize_and_evaluate(model, tmp_path / "q.onnx", feeds)
    accuracy = evaluation.accuracy
    assert accuracy.not_compared.keys() == {boxes, classes}
    assert evaluation.sensitivity is not None
    assert evaluation.verification.ok
    assert f"not compared: {accuracy.not_compared[boxes]}" in str(evaluation)
    assert evaluation.to_dict()["outputs_not_compared"] == dict(accuracy.not_compared)
    assert evaluation.to_dict()["equal_share_by_output"] == dict(accuracy.outputs_equal)
    page = qr.build_from_evaluation(evaluation)
    assert f"output {boxes!r} not compared: {accuracy.not_compared[boxes]}" in page.notes


def test_max_drop_needs_a_metric_of_boxes(tmp_path, feeds):
    model, (boxes, _, _) = detector()
    path = tmp_path / "q.onnx"
    with pytest.raises(SpecError, match=f"rows of output '{boxes}' depends on the data, so metric 'auto' cannot"):
        qo.quantize(model, path, feeds, progress=False, max_drop=0.1)
    assert not path.exists()

    def count(outputs):
        return -abs(len(outputs[boxes]) - 100)

    report = qo.quantize(model, path, feeds, progress=False, effort="fast", max_drop=1e9, metric=count)
    assert report.metric.name == "count"


def test_verification_says_which_outputs_it_did_not_compare_end_to_end(feeds):
    model, (boxes, _, _) = detector()
    file = qo.rewrite(model, qo.decide(model, feeds, progress=False))
    report = dt.verify(model, file, feeds[:6])
    assert report.ok
    assert any(note.startswith(f"output {boxes!r} not compared: shape") for note in report.notes)


def test_outputs_that_change_their_shape_are_left_out_of_the_noise(feeds, caplog):
    model, (boxes, _, _) = detector(with_scores=True)
    graph_plan, params = planned(model, feeds)
    samples = changed(graph_plan, params, feeds, boxes)
    assert len(samples) == 2
    with caplog.at_level(logging.INFO, "detent"):
        noise = NoiseByLayer(graph_plan, params, samples)
    assert noise.count == 2, "one of two float outputs per sample"
    assert 0 < noise.noise_without() < 0.1
    assert "its shape depends on the data" in caplog.text


def test_passes_are_skipped_if_no_output_can_be_compared(feeds, caplog):
    model, (boxes, _, _) = detector()
    graph_plan, params = planned(model, feeds)
    samples = changed(graph_plan, params, feeds, boxes)
    with caplog.at_level(logging.INFO, "detent"):
        noise = NoiseByLayer(graph_plan, params, samples)
    assert noise.count == 0
    assert choose_float(noise, graph_plan, {}, lambda names: graph_plan.without(names, "noisy")) == {}
    assert "the shapes of all outputs depend on the data" in caplog.text


def test_outputs_of_fixed_shapes_are_all_compared(feeds, caplog):
    graph_plan, params = planned(conv_chain(), feeds)
    with caplog.at_level(logging.INFO, "detent"):
        assert NoiseByLayer(graph_plan, params, feeds[:2]).count == 2
    assert "depend" not in caplog.text


def test_an_output_without_elements_is_not_compared(tmp_path, feeds):
    model, (boxes, classes, _) = detector(threshold=1e6)
    report = qo.quantize(model, tmp_path / "q.onnx", feeds, progress=False)
    assert report.not_compared == {boxes: "no elements", classes: "no elements"}
    assert report.output_sqnr_db is None
    assert dt.verify(model, tmp_path / "q.onnx", feeds[:2]).ok


def test_layers_after_a_compress_may_get_no_rows(tmp_path):
    m = Maker()
    t = m.add("Reshape", [m.matmul("x", 16, 16, name="first"), m.constant(np.array([-1, 16]))])
    keep = m.add("ReduceMax", [t], axes=[1], keepdims=0)
    t = m.add("Compress", [t, m.add("Greater", [keep, m.constant(np.float32(1.6))])], axis=0)
    model = m.model([("x", [1, 6, 16])], [m.matmul(t, 16, 4, name="second")])
    rng = np.random.default_rng(0)
    data = [{"x": (scale * rng.normal(size=(1, 6, 16))).astype(np.float32)} for scale in (1, 0, 1, 1.2, 0.01, 1)]
    report = qo.quantize(model, tmp_path / "q.onnx", data, progress=False)
    assert sum(not layer.reason for layer in report.layers) == 2
    assert dt.verify(model, tmp_path / "q.onnx", data).ok


def test_sensitivity_is_measured_on_the_outputs_that_keep_their_shape(feeds):
    model, _ = detector(with_scores=True)
    measured = qs.measure(model, feeds, samples=8, progress=False)
    assert all(0 < layer.worst < 1 for layer in measured.layers)
