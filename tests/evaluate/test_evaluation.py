"""Quantize and evaluate from Python."""

import json
from dataclasses import replace

import numpy as np
import pytest
from onnx import parser

from detent import report as qr
from detent.errors import NotCalibratedError, SpecError, UnsupportedError
from detent.evaluate import Accuracy, Checks, MetricResult, evaluation, quantize_and_evaluate
from detent.evaluate.speed import Timing
from detent.onnx import MetricSearch
from detent.onnx.quality_warnings import QuantizeWarning
from detent.onnx_model import files
from detent.output_measures import OutputScore

MODEL = parser.parse_model(
    """<ir_version: 8, opset_import: ["" : 17]>
    g (float[N, 4] x) => (float[N, 3] y)
    <float[4, 4] v = {1, 2, -1, 3, 0.5, 1, 1, 2, -3, 1, 2, 0.25, 1, 1, 1, -2},
     float[4, 3] w = {3, 1, 2, -1, 4, 1, 2, 2, 1, 0, 1, -1}>
    { a = MatMul(x, v) b = Relu(a) y = MatMul(b, w) }"""
)
NONE = Checks(verify=False, time=False, sensitivity=False)


def batches(count):
    return [np.random.default_rng(i).normal(size=(1, 4)).astype(np.float32) for i in range(count)]


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    stages = []
    output = tmp_path_factory.mktemp("evaluation") / "small.onnx"
    return quantize_and_evaluate(MODEL, output, batches(40), progress=lambda name, *_: stages.append(name)), stages


def test_everything_is_measured(done):
    evaluation, stages = done
    assert evaluation.split.is_held_out
    assert evaluation.accuracy.batches == 4
    assert evaluation.accuracy.sqnr_db > 20
    assert evaluation.verification.ok
    assert evaluation.timing.runs
    assert {each.code for each in evaluation.warnings} <= {"larger-file", "slower"}
    assert 0 < sum(layer.noise_share for layer in evaluation.sensitive_layers) <= 1.0001
    assert list(dict.fromkeys(stages)) == ["calibrating", "timing", "evaluating", "verifying", "measuring sensitivity"]


def test_the_summary(done):
    evaluation, _ = done
    text = str(evaluation)
    assert "on 4 held-out batches" in text
    assert "verified: ok: the file matches" in text
    assert "integer kernels:   2 of 2 layers" in text
    document = json.loads(json.dumps(evaluation.to_dict()))
    assert document["evaluated_on_held_out"]
    assert document["integer_kernel_layers"] == 2
    assert [layer["layer"] for layer in document["sensitive_layers"]] == [
        layer.name for layer in evaluation.sensitive_layers
    ]


def test_the_worst_output_is_compared_with_the_limit(done):
    evaluation = replace(done[0], accuracy=Accuracy({"boxes": 40.0, "scores": 12.0, "masks": 30.0}, None, 3))
    assert evaluation.missed_limits(20.0) == ["the SQNR of output scores is 12.0 dB, below the limit of 20 dB"]
    assert evaluation.missed_limits(12.0) == []
    nan = replace(evaluation, accuracy=Accuracy({"a": 1.0, "b": float("nan")}, 0.5, 1))
    assert "output b is nan dB" in nan.missed_limits(0.5)[0]
    assert nan.missed_limits(None, 0.6) == ["the top-1 agreement is 0.5, below the limit of 0.6"]
    unknown = replace(evaluation, accuracy=None)
    assert unknown.missed_limits(1.0) == [
        "the SQNR was not measured, so the limit of 1 dB is not met: an SQNR needs data and a float output"
    ]
    assert "the top-1 agreement was not measured" in unknown.missed_limits(None, 0.5)[0]


def test_notebooks_show_the_summary_as_a_table(done):
    evaluation = replace(done[0], warnings=(QuantizeWarning("not-run", "the models were not timed: <b>"),))
    text = evaluation._repr_html_()
    assert text.count("<tr>") == 1 + len(evaluation.facts())
    assert text.endswith("<div>warning: the models were not timed: &lt;b&gt;</div>")
    assert "<b>" not in text
    summary = repr(evaluation)
    assert summary.startswith(f"<Evaluation of {evaluation.result.output}: size ")
    assert "\n" not in summary
    assert f"SQNR {evaluation.accuracy.sqnr_db:.1f} dB" in summary


def test_where_nothing_is_quantized_nothing_is_written(tmp_path):
    with pytest.raises(UnsupportedError, match=r"no layer was quantized, so no file is written: skipped \("):
        quantize_and_evaluate(MODEL, tmp_path / "a.onnx", batches(3), skip=["*"], checks=NONE)
    assert not list(tmp_path.iterdir())


def test_checks_can_be_left_out(tmp_path):
    result = quantize_and_evaluate(MODEL, tmp_path / "a.onnx", batches(3), checks=NONE)
    assert (result.timing, result.verification, result.sensitivity) == (None, None, None)
    assert "3 calibration batches (nothing held out)" in str(result)


def test_without_data(tmp_path):
    result = quantize_and_evaluate(MODEL, tmp_path / "a.onnx", recipe="w8a16")
    assert result.split is result.accuracy is result.verification is None
    assert result.timing is not None
    assert "not compared" in str(result)


def test_a_check_that_fails_is_a_warning(tmp_path, monkeypatch):
    def fail(*_args, **_options):
        raise UnsupportedError("cannot be done")

    for name in ("verify", "time_models"):
        monkeypatch.setattr(evaluation, name, fail)
    monkeypatch.setattr(evaluation.qs, "measure", fail)
    result = quantize_and_evaluate(MODEL, tmp_path / "a.onnx", batches(3))
    assert [each.text.partition(":")[0] for each in result.warnings if each.code == "not-run"] == [
        "the models were not timed",
        "the quantized model was not verified",
        "the sensitivity of layers was not measured",
    ]
    assert (tmp_path / "a.onnx").is_file()


def test_a_target_for_another_cpu_is_a_warning(tmp_path, monkeypatch):
    monkeypatch.setattr(evaluation, "has_vnni", lambda: False)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    for target, expected in (("onnxruntime-vnni", True), ("onnxruntime", False)):
        result = quantize_and_evaluate(MODEL, tmp_path / "a.onnx", batches(3), target=target, checks=NONE)
        assert ("target" in [each.code for each in result.warnings]) == expected


def test_each_file_is_read_once(tmp_path, monkeypatch):
    files.save(MODEL, tmp_path / "a.onnx")
    read, parse = [], files._parse
    monkeypatch.setattr(files, "_parse", lambda path: read.append(path.name) or parse(path))
    result = quantize_and_evaluate(tmp_path / "a.onnx", tmp_path / "b.onnx", batches(20))
    qr.build_from_evaluation(result)
    assert read == ["a.onnx", "b.onnx"]


def test_the_report_shows_the_evaluation(done):
    report = qr.build_from_evaluation(done[0], command="detent quantize a.onnx")
    assert report.title == "small.onnx"
    assert report.output_sqnr_db == done[0].accuracy.outputs_sqnr_db
    assert report.output_sqnr_against == "the float model, on 4 held-out batches"
    assert ("Time", str(done[0].timing)) in report.facts


def test_times_of_a_file_for_openvino_are_those_of_onnxruntime(tmp_path, monkeypatch):
    timing = Timing(4.0, 2.0, 10, 1)
    monkeypatch.setattr(evaluation, "time_models", lambda *_, **__: timing)
    for target, text in (("openvino", f"{timing}, in ONNX Runtime, not OpenVINO"), ("onnxruntime", str(timing))):
        checks = NONE._replace(time=True)
        result = quantize_and_evaluate(MODEL, tmp_path / "a.onnx", batches(3), target=target, checks=checks)
        assert ("Time", text) in qr.build_from_evaluation(result).facts
        assert ("time", text) in result.facts()


def test_outputs_are_compared_once_unless_asked_for(tmp_path):
    evaluations = {
        name: quantize_and_evaluate(MODEL, tmp_path / "small.onnx", batches(4), checks=NONE, **options)
        for name, options in {"default": {}, "asked": {"compare": True}}.items()
    }
    assert not evaluations["default"].result.outputs_sqnr_db
    assert set(evaluations["asked"].result.outputs_sqnr_db) == {"y"}
    documents = [each.to_dict()["calibration_sqnr_db_by_output"] for each in evaluations.values()]
    assert set(documents[0]) == set(documents[1]) == {"y"}


def test_a_metric_with_labels(tmp_path):
    data = batches(40)
    labels = [int(i % 3) for i in range(40)]
    done = quantize_and_evaluate(MODEL, tmp_path / "a.onnx", data, checks=NONE, labels=labels, metric="top1")
    assert done.accuracy.metric.samples == done.accuracy.samples == 4
    assert f"  top1:              {done.accuracy.metric}" in str(done)
    assert done.to_dict()["metric"]["float_value"] == done.accuracy.metric.float_value
    assert done.to_dict()["max_drop"] is None


def test_a_limit_is_judged_on_batches_that_the_search_did_not_see(tmp_path):
    data = batches(80)
    options = {"checks": NONE, "max_drop": "0.000001%", "metric": "cosine"}
    done = quantize_and_evaluate(MODEL, tmp_path / "a.onnx", data, **options)
    assert (done.split.calibration.count, done.split.search.count, done.split.evaluation.count) == (40, 20, 20)
    assert done.result.search.steps
    assert done.result.search.after.samples == 20
    assert done.accuracy.metric.drop > 1e-8, "a quantized layer remains"
    assert "on 20 samples, above the limit of 1e-08: pass more evaluation data" in done.missed_limits()[0]
    assert [each.code for each in done.warnings].count("max-drop") == 1
    document = json.loads(json.dumps(done.to_dict()))
    assert document["max_drop"] == 1e-8
    assert len(document["max_drop_search"]["steps"]) == len(done.result.search.steps)
    table = qr.build_from_evaluation(done).tables[0]
    assert table.title == "Steps to meet max_drop 1e-08"
    assert len(table.rows) == len(done.result.search.steps)


def test_a_limit_that_is_missed_is_named(done):
    search = MetricSearch(0.01, MetricResult("top1", 0.9, 0.99), MetricResult("top1", 0.98, 0.99), (), (), 9, 9, 1)
    missed = replace(
        done[0],
        result=replace(done[0].result, search=search),
        accuracy=replace(done[0].accuracy, metric=MetricResult("top1", 0.96, 0.99, 0.004, 200)),
    )
    assert missed.missed_limits()[0].startswith(
        "top1 drops by 0.0300 ± 0.0040 on 200 samples, above the limit of 0.01: pass more evaluation data"
    )
    assert "top1:              0.9600 (float 0.9900, drop 0.0300 ± 0.0040)\n" in str(missed)
    assert "max_drop:          0.01 not met, without a change" in str(missed)
    assert "was not measured" in replace(missed, accuracy=None).missed_limits()[0]


def test_other_measures_are_named(done):
    scores = {"mask": OutputScore("IoU", 0.9871), "boxes": OutputScore("relative error", 0.0123)}
    evaluation = replace(done[0], accuracy=Accuracy({}, None, 3, scores=scores))
    assert ("IoU of mask", "0.9871") in evaluation.facts()
    assert ("relative error of boxes", "0.0123") in evaluation.facts()
    with_sqnr = replace(done[0], accuracy=Accuracy({"boxes": 38.2}, None, 3, scores=scores))
    assert "relative error" not in str(with_sqnr), "the SQNR says the same"
    assert evaluation.to_dict()["score_by_output"]["mask"] == {"measure": "IoU", "value": 0.9871}


@pytest.mark.parametrize("options", [{"max_drop": 0.1}, {"metric": "top1"}, {"labels": [1]}])
def test_a_metric_needs_data(options, tmp_path):
    with pytest.raises(NotCalibratedError, match="need data, also for weight-only recipes"):
        quantize_and_evaluate(MODEL, tmp_path / "a.onnx", recipe="w4a16", **options)


def test_a_bad_metric_writes_nothing(tmp_path):
    with pytest.raises(SpecError, match="raised ZeroDivisionError"):
        quantize_and_evaluate(MODEL, tmp_path / "a.onnx", batches(20), metric=lambda outputs: 1 / 0)
    assert not list(tmp_path.iterdir())
