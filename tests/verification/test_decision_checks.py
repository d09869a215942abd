"""Bounds of decisions: each kind is changed a little, and too much."""

from dataclasses import replace

import numpy as np
import pytest
from onnx import helper, numpy_helper

import detent as dt
import detent.onnx as qo
from detent.onnx_model.graph import Graph
from detent.verification import segments as segments_module
from detent.verification.segments import SegmentCheck


def model(channels=16):
    rng = np.random.default_rng(0)
    spread = np.logspace(-2.5, 0.5, channels, dtype=np.float32).reshape(-1, 1, 1, 1)
    w1 = rng.normal(size=(channels, 8, 1, 1)).astype(np.float32) * spread
    w2 = rng.normal(size=(channels, 1, 3, 3)).astype(np.float32) / spread
    w3 = rng.normal(size=(4, channels, 1, 1)).astype(np.float32)
    biases = {f"b{i}": rng.normal(size=len(w)).astype(np.float32) for i, w in enumerate((w1, w2, w3), 1)}
    tensors = {"w1": w1, "w2": w2, "w3": w3, **biases}
    nodes = [
        helper.make_node("Conv", ["x", "w1", "b1"], ["a"], name="first"),
        helper.make_node("Relu", ["a"], ["ra"], name="relu"),
        helper.make_node("Conv", ["ra", "w2", "b2"], ["b"], name="depthwise", group=channels, pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["b"], ["rb"], name="relu2"),
        helper.make_node("Conv", ["rb", "w3", "b3"], ["y"], name="last"),
    ]
    shapes = ("x", [2, 8, 12, 12]), ("y", [2, 4, 12, 12])
    ends = [[helper.make_tensor_value_info(name, 1, shape)] for name, shape in shapes]
    initializers = [numpy_helper.from_array(value, name) for name, value in tensors.items()]
    graph = helper.make_graph(nodes, "g", *ends, initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


DATA = [np.random.default_rng(i).normal(size=(2, 8, 12, 12)).astype(np.float32) for i in range(4)]


@pytest.fixture(scope="module", params=["w8a8", "w4a8", "w8a16"])
def decisions(request):
    return qo.decide(model(), DATA, request.param, progress=False)


def with_layer(decisions, name, **changes):
    layers = tuple(replace(each, **changes) if each.name == name else each for each in decisions.layers)
    return replace(decisions, layers=layers)


def layer(decisions, name="last"):
    return next(each for each in decisions.layers if each.name == name)


def verdict(decisions):
    return dt.verify(model(), qo.rewrite(model(), decisions))


def test_what_was_decided_is_ok(decisions):
    report = verdict(decisions)
    assert report.ok, report.failure
    assert any("corrected bias" in each for each in report.replay.decided)
    assert dt.verify(model(), qo.rewrite(model(), decisions), DATA).ok


@pytest.mark.parametrize("factor", [0.98, 1.02])
def test_a_weight_scale_follows_from_the_weight(decisions, factor):
    scale = layer(decisions).weight_scale * np.float32(factor)
    report = verdict(with_layer(decisions, "last", weight_scale=scale))
    if decisions.layers[-1].weight.bits == 8 or factor > 1.5:
        assert not report.ok
        assert report.first_difference.tensor == "weight_scale"
        assert "do not follow from the min-max range of the weight" in report.failure


def test_the_scales_of_a_histogram_search_are_accepted():
    """Files of earlier versions have them, and for few values they can be worse than min-max scales."""
    decisions = qo.decide(model(), DATA, "w4a8", equalize=False, bias_correction=False, progress=False)
    spec, weight = layer(decisions, "depthwise").weight, Graph(model()).array("w2")
    histogram = dt.observers.MSE(granularity=spec.granularity).observe(weight).params(spec)
    pair = histogram, dt.QuantParams.from_data(spec, weight)
    errors = [np.square(weight - dt.fake_quantize(weight, each)).sum(axis=(1, 2, 3)) for each in pair]
    assert (errors[0] > errors[1] * 1.001).any()
    report = verdict(with_layer(decisions, "depthwise", weight_scale=histogram.scale))
    assert report.ok, report.failure
    worst = with_layer(decisions, "depthwise", weight_scale=histogram.scale * np.float32(0.7))
    assert "larger squared error than the min-max scale" in verdict(worst).failure


@pytest.mark.parametrize("factor", [0.1, 8.0])
def test_a_weight_scale_that_is_far_off_is_caught_at_any_width(decisions, factor):
    scale = layer(decisions).weight_scale * np.float32(factor)
    report = verdict(with_layer(decisions, "last", weight_scale=scale))
    assert not report.ok
    assert report.first_difference.node == "last"


def test_a_corrected_bias_has_a_bound(decisions):
    line = layer(decisions)
    bias = line.bias.copy()
    bias.reshape(-1)[1] += 1 if bias.dtype == np.int32 else np.float32(1e-6)
    assert verdict(with_layer(decisions, "last", bias=bias)).ok  # it is another decision
    bias = line.bias.copy()
    bias.reshape(-1)[1] += (1 << 22) if bias.dtype == np.int32 else np.float32(1e6)
    report = verdict(with_layer(decisions, "last", bias=bias))
    assert not report.ok
    assert "wrong corrected bias: off by more than" in report.failure
    assert report.first_difference.index == (1,)


def test_factors_have_to_fit_a_pair():
    decisions = qo.decide(model(), DATA, progress=False)
    assert decisions.equalized
    assert verdict(decisions).ok
    halved = tuple(replace(each, factors=each.factors / 2) for each in decisions.equalized)
    changed = replace(decisions, equalized=halved)
    report = verdict(changed)  # the function is the same, but not these scales of weights
    assert not report.ok
    assert "do not follow from the min-max range of the weight" in report.failure


def test_tiny_scales_are_not_excused_by_a_bias():
    decisions = qo.decide(model(), DATA, "w4a8", progress=False)
    tiny = np.full_like(layer(decisions).weight_scale, 2e-37)
    changed = with_layer(decisions, "last", weight_scale=tiny, bias=None)
    report = verdict(changed)
    assert not report.ok
    assert "wrong weight scale" in report.failure


def test_how_far_biases_were_moved_is_listed(decisions):
    line = next(each for each in verdict(decisions).replay.decided if "corrected bias" in each)
    assert "of the largest output of" in line
    forged = {name: replace(each, observed_range=(-1e30, 1e30)) for name, each in decisions.ranges.items()}
    bias = layer(decisions).bias.copy()
    bias.reshape(-1)[1] += (1 << 24) if bias.dtype == np.int32 else np.float32(1e6)
    changed = with_layer(replace(decisions, ranges=forged), "last", bias=bias)
    if decisions.ranges:  # a quantizer clips at most its own range, whatever the file says that it saw
        assert not verdict(changed).ok


# Segments


def test_segments_in_groups_are_the_same(monkeypatch):
    decisions = qo.decide(model(), DATA, progress=False)
    file = qo.rewrite(model(), decisions)
    whole = dt.verify(model(), file, DATA, levels=(2,)).segments
    checks = []
    init = SegmentCheck.__init__

    def small(self, *args):
        init(self, *args, budget=4096)
        checks.append(self)

    monkeypatch.setattr(SegmentCheck, "__init__", small)
    assert dt.verify(model(), file, DATA, levels=(2,)).segments == whole
    assert len(checks[0]._sessions) > 1


def test_the_segment_of_a_difference_is_named(monkeypatch):
    file = qo.rewrite(model(), qo.decide(model(), DATA, progress=False))
    node = next(each for each in Graph(file).nodes if each.name == "depthwise")
    next(each for each in node.attribute if each.name == "pads").ints[:] = [0, 0, 2, 2]
    report = dt.verify(model(), file, DATA, levels=(2,))
    assert not report.ok
    assert "(relu2, depthwise)" in report.failure
    monkeypatch.setattr(segments_module, "MAX_NODES_SHOWN", 1)
    assert "(relu2 and 1 more)" in dt.verify(model(), file, DATA, levels=(2,)).failure
