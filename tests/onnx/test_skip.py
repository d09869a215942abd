"""Skipped layers: factors are those of the model with all layers quantized; all else is decided without the layers."""

import numpy as np
import pytest
from onnx_graphs import Maker, images, operators, rows, weights

import detent as dt
import detent.onnx as qo
from detent.onnx_model.graph import Graph


def decided(model, feeds, **options):
    decisions = qo.decide(model, feeds, progress=False, **{"keep_float": "none", "effort": "fast", **options})
    file = qo.rewrite(model, decisions)
    assert dt.verify(model, file, feeds[:1]).ok
    return decisions, file


def uneven_channels():
    """Four convolutions; equalization changes the channels between them."""
    m, t = Maker(), "x"
    uneven = np.logspace(-2.5, 0.5, 16, dtype=np.float32).reshape(-1, 1, 1, 1)
    for i, before in enumerate((8, 16, 16)):
        weight = weights(16, before, 1, 1, seed=i) * (1 if i == 1 else uneven)
        t = m.add("Relu", [m.conv(t, before, 16, 1, weight=weight, bias=False, name=f"c{i}")])
    return m.model([("x", [2, 8, 8, 8])], [m.conv(t, 16, 4, name="c3")])


def test_factors_are_those_of_all_layers():
    model, feeds = uneven_channels(), images()
    everything, _ = decided(model, feeds)
    tensors = {each.readers: each for each in everything.equalized}
    assert len(tensors) == 3
    without_first, _ = decided(model, feeds, skip="c0")
    assert without_first.equalized == everything.equalized, "c0 only computes a tensor"
    without_second, _ = decided(model, feeds, skip="c1")
    assert without_second.equalized == (tensors["c2",], tensors["c3",]), "no quantized layer reads the first tensor"


def outliers(*, has_norm):
    """Three matmuls that read a tensor with outliers."""
    m, x = Maker(), "x"
    if has_norm:
        gain = np.ones(32, np.float32)
        gain[[3, 17]] = 60
        x = m.add("LayerNormalization", [x, m.constant(gain), m.constant(np.zeros(32, np.float32))], axis=-1)
    outputs = [m.matmul(x, 32, 32, name=name) for name in "qkv"]
    return m.model([("x", [1, "n", 32])], [m.add("Add", [m.add("Add", outputs[:2]), outputs[2]])])


@pytest.mark.parametrize(("has_norm", "layers"), [(False, ("q", "v")), (True, ("q", "k", "v"))])
def test_the_weight_of_a_skipped_layer_changes_only_with_a_folded_factor(has_norm, layers):
    feeds = rows(width=32, length=64)
    for feed in feeds if not has_norm else ():
        feed["x"][..., [3, 17]] *= 60
    model = outliers(has_norm=has_norm)
    decisions, file = decided(model, feeds, skip="k")
    (smoothed,) = decisions.smoothed
    assert (smoothed.layers, smoothed.folded) == (layers, has_norm)
    before, after = (
        next(graph.array(node.input[1]) for node in graph.nodes if node.name == "k")
        for graph in map(Graph, (model, file))
    )
    assert np.array_equal(before, after) == (not has_norm)


@pytest.mark.parametrize("effort", ["fast", "balanced"])
@pytest.mark.parametrize("kind", ["Conv", "MatMul"])
def test_a_layer_that_cannot_be_quantized_can_be_skipped(kind, effort):
    m = Maker()
    t = m.add("Sigmoid", [m.conv("x", 8, 16, name="first")])
    make, channels, shape = (m.conv, 16, (16, 16, 3, 3)) if kind == "Conv" else (m.matmul, 8, (8, 8))
    weight = weights(*shape)
    weight.flat[0] = np.inf
    t = make(t, channels, channels, name="bad", weight=weight)
    t = m.add("Relu", [m.conv(m.add("Sigmoid", [t]), 16, 16, name="second")])
    model = m.model([("x", [2, 8, 8, 8])], [m.conv(t, 16, 16, name="last")])
    with pytest.raises(dt.errors.RangeError):
        qo.decide(model, images(8), progress=False)
    decisions, _ = decided(model, images(8), skip="bad", effort=effort)
    assert [each.name for each in decisions.layers if each.is_quantized] == ["first", "second", "last"]


@pytest.mark.parametrize(("prefer", "additions"), [("accuracy", 1), ("speed", 0)])
def test_an_addition_behind_a_skipped_layer_follows_prefer(prefer, additions):
    m = Maker()
    t = m.add("Relu", [m.conv("x", 8, 16, name="stem")])
    branch = m.conv(m.add("Relu", [m.conv(t, 16, 16, name="a")]), 16, 16, name="b")
    t = m.add("Relu", [m.conv(m.add("Relu", [m.add("Add", [branch, t])]), 16, 16, name="c")])
    model = m.model([("x", [2, 8, 8, 8])], [m.conv(t, 16, 16, name="last")])
    _, file = decided(model, images(8), skip="stem", prefer=prefer)
    assert operators(file)["Add"] == additions


def test_a_layer_that_skipping_makes_the_last_one_at_a_resize_gets_a_quantized_output():
    m = Maker()
    t = m.add("Relu", [m.conv("x", 8, 64, name="first")])
    t = m.conv(m.add("Relu", [m.conv(t, 64, 64, name="second")]), 64, 8, 1, name="small")
    t = m.add("Resize", [t, "", m.constant(np.float32([1, 1, 2, 2]))], mode="linear")
    model = m.model([("x", [1, 8, 8, 8])], [m.conv(t, 8, 8, name="head")])
    decisions, _ = decided(model, images(4, batch=1), skip="head")
    assert [each.name for each in decisions.layers if each.is_quantized] == ["first", "second", "small"]
