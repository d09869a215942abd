"""A bug in a pass becomes a DetentError with the pass and the node; errors of the caller are not changed."""

import json
import re

import numpy as np
import pytest
from onnx_graphs import Maker, conv_chain, images, rows

import detent as dt
import detent.onnx as qo
from detent.onnx import accuracy_passes, pipeline, quantized_graph
from detent.onnx.pass_errors import listening, running

PASSES = {
    "load_model": "loading",
    "to_normal_form": "preparing the model",
    "plan": "planning",
    "compare_outputs": "comparing outputs",
    "save": "writing",
}
ACCURACY_PASSES = {
    "calibrate_groups": "calibration",
    "choose_clipped": "choosing ranges",
    "multiplications": "choosing kernels",
    "choose_samples": "choosing samples",
    "NoiseByLayer": "measuring noise at the outputs",
    "choose_wide": "choosing weight bits",
    "choose_float": "float fallback",
    "corrected_biases": "bias correction",
    "layer_decisions": "choosing weight scales",
    "rewrite": "evaluating bias correction",
}


def broken(*_, **__):
    return {}["t1"]


def as_ours(function):
    """Return the function as if it were code of detent."""
    return type(function)(function.__code__, {**function.__globals__, "__name__": "detent.made_by_a_test"})


@pytest.mark.parametrize("name", [*PASSES, *ACCURACY_PASSES])
def test_a_bug_names_its_pass(name, monkeypatch, tmp_path):
    monkeypatch.setattr(pipeline if name in PASSES else accuracy_passes, name, as_ours(broken))
    title = (PASSES | ACCURACY_PASSES)[name]
    with pytest.raises(dt.DetentError, match=f"{title} failed with KeyError: 't1'. This is a bug") as caught:
        qo.quantize(conv_chain(), tmp_path / "q.onnx", images(2), progress=False)
    assert isinstance(caught.value.__cause__, KeyError)
    assert not list(tmp_path.iterdir())


def test_a_bug_in_the_last_rewrite(monkeypatch, tmp_path):
    monkeypatch.setattr(pipeline, "rewrite", as_ours(broken))
    with pytest.raises(dt.DetentError, match="rewriting failed with KeyError"):
        qo.quantize(conv_chain(), tmp_path / "q.onnx", images(2), progress=False, effort="fast")


@pytest.mark.parametrize(("module", "title"), [("equalization", "equalization"), ("smoothquant", "SmoothQuant")])
def test_a_bug_in_channel_factors(module, title, monkeypatch, tmp_path):
    monkeypatch.setattr(getattr(accuracy_passes, module), "choose", as_ours(broken))
    with pytest.raises(dt.DetentError, match=f"{title} failed with KeyError"):
        qo.decide(conv_chain(), images(2), progress=False)


def test_a_bug_names_its_node(monkeypatch):
    decisions = qo.decide(conv_chain(), images(2), progress=False)
    monkeypatch.setattr(quantized_graph, "stored_codes", as_ours(broken))
    with running("rewriting"), pytest.raises(KeyError):
        qo.rewrite(conv_chain(), decisions)
    with pytest.raises(dt.DetentError, match="rewriting failed at layer 'first' with KeyError"), running("rewriting"):
        qo.rewrite(conv_chain(), decisions)


def test_errors_of_numpy_are_bugs_of_the_pass(tmp_path, monkeypatch):
    def add_shapes(*_, **__):
        return np.concatenate([np.zeros((2, 2)), np.zeros(3)])

    monkeypatch.setattr(accuracy_passes, "choose_float", as_ours(add_shapes))
    with pytest.raises(dt.DetentError, match="float fallback failed with ValueError"):
        qo.quantize(conv_chain(), tmp_path / "q.onnx", images(2), progress=False)


def failing_batches():
    yield from images(1)
    raise ValueError("the caller's own")


@pytest.mark.parametrize(
    ("data", "progress"),
    [(failing_batches, False), (lambda: map(int, ["a"]), False), (lambda: images(2), lambda *_: 1 / 0)],
    ids=["generator", "builtin", "progress"],
)
def test_errors_of_the_caller_stay_what_they_are(data, progress, tmp_path):
    with pytest.raises((ValueError, ZeroDivisionError)) as caught:
        qo.quantize(conv_chain(), tmp_path / "q.onnx", data(), progress=progress)
    assert not isinstance(caught.value, dt.DetentError) or "bug" not in str(caught.value)


@pytest.mark.parametrize("error", [OSError("disk full"), MemoryError(), dt.SpecError("told")])
def test_deliberate_errors_pass_unchanged(error):
    with pytest.raises(type(error)) as caught, running("planning"):
        raise error
    assert caught.value is error


def test_a_weight_with_nan_is_named(tmp_path):
    m = Maker()
    y = m.matmul("x", 16, 4, name="fc", weight=np.full((16, 4), np.nan, np.float32))
    with pytest.raises(dt.RangeError, match=r"weight 'c0' of layer 'fc': .*not finite in 64 of "):
        qo.quantize(m.model([("x", [1, 6, 16])], [y]), tmp_path / "q.onnx", rows(2), "w8a16", progress=False)


def test_a_report_has_the_time_of_each_pass(tmp_path):
    report = qo.quantize(conv_chain(), tmp_path / "q.onnx", images(2), progress=False)
    assert {"loading", "calibration", "choosing ranges", "float fallback", "rewriting", "writing"} <= set(report.passes)
    assert 0 < sum(report.passes.values()) <= report.seconds
    assert json.loads(report.to_json())["passes"] == report.passes
    names = []
    with listening(lambda name, seconds: names.append((name, seconds))):
        fast = qo.decide(conv_chain(), images(2), progress=False, effort="fast")
    assert fast.layers
    assert {name for name, _ in names} < set(report.passes), "fast has fewer passes"


def test_a_long_job_announces_the_time_of_each_effort(monkeypatch):
    texts = []
    with listening(lambda *_: None, texts.append):
        qo.decide(conv_chain(), images(2), progress=False)
        assert texts == [], "a short job announces nothing"
        monkeypatch.setattr(accuracy_passes, "MIN_SECONDS_ANNOUNCED", 0.0)
        qo.decide(conv_chain(), images(2), progress=False, effort="fast")
    (text,) = texts
    assert re.fullmatch(
        r"effort fast takes about \d+ s on this machine \(balanced about \d+ s, best about \d+ s\)", text
    )


def test_a_search_is_estimated_to_take_longer_than_a_fast_job(monkeypatch):
    texts = []
    monkeypatch.setattr(accuracy_passes, "MIN_SECONDS_ANNOUNCED", 0.0)
    monkeypatch.setattr(accuracy_passes, "_duration", lambda seconds: f"{seconds:.9f}")
    with listening(lambda *_: None, texts.append):
        qo.decide(conv_chain(), images(8), progress=False)
    balanced, fast, best = map(float, re.findall(r"about ([\d.]+)", texts[0]))
    assert fast < balanced <= best
