"""Ranges of inputs in subgraphs equal the ranges that NumPy computes step by step."""

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx_graphs import Maker, weights

from detent.onnx.subgraph_ranges import observe_ranges

W = weights(4, 4, seed=3) * np.float32(1.5)


def value(name, kind=TensorProto.FLOAT, shape=None):
    return helper.make_tensor_value_info(name, kind, shape)


def loop_body(prefix="", before=()):
    """A body that applies ``W`` and tanh to its state; ``before`` are nodes that compute the input of the layer."""
    inputs = [value(f"{prefix}i", TensorProto.INT64, []), value(f"{prefix}on", TensorProto.BOOL, [])]
    nodes = [
        helper.make_node("Identity", [f"{prefix}on"], [f"{prefix}on_out"], name="on"),
        *before,
        helper.make_node("MatMul", [f"{prefix}h", "w"], [f"{prefix}product"], name="fc"),
        helper.make_node("Tanh", [f"{prefix}product"], [f"{prefix}next"], name="tanh"),
    ]
    outputs = [value(f"{prefix}on_out", TensorProto.BOOL, []), value(f"{prefix}next")]
    return helper.make_graph(nodes, "body", [*inputs, value(f"{prefix}h")], outputs)


def looped():
    m = Maker()
    m.constant(W, "w")
    y = m.add("Loop", ["steps", m.constant(np.array(True)), "x"], name="loop", body=loop_body())
    return m.model([("x", [2, 4]), ("steps", [], TensorProto.INT64)], [y])


def x_of(seed, scale=1.0):
    return (scale * np.random.default_rng(seed).normal(size=(2, 4))).astype(np.float32)


def states(x, steps):
    """Return the inputs of the layer in each step."""
    result = []
    for _ in range(steps):
        result.append(x)
        x = np.tanh(x @ W)
    return result


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_all_steps_of_a_loop_count(steps):
    feeds = [{"x": x_of(seed), "steps": np.array(steps)} for seed in (0, 1)]
    expected = np.concatenate([state for feed in feeds for state in states(feed["x"], steps)])
    (lo, hi) = observe_ranges(looped(), ["loop/fc"], feeds)["loop/fc"]
    np.testing.assert_allclose((lo, hi), (expected.min(), expected.max()), rtol=1e-5)


def test_a_loop_without_steps_is_not_observed():
    feed = {"x": x_of(0), "steps": np.array(0)}
    assert observe_ranges(looped(), ["loop/fc"], [feed]) == {}
    both = [feed, {**feed, "steps": np.array(1)}]
    assert observe_ranges(looped(), ["loop/fc"], both)["loop/fc"] == (feed["x"].min(), feed["x"].max())


def branched(then_nodes=(), else_nodes=()):
    m = Maker()
    m.constant(W, "w")
    then_branch = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["a"], name="fc"), *then_nodes], "then", [], [value("a")]
    )
    else_branch = helper.make_graph(
        [
            helper.make_node("Neg", ["x"], ["negative"], name="neg"),
            helper.make_node("MatMul", ["negative", "w"], ["b"], name="other"),
            *else_nodes,
        ],
        "else",
        [],
        [value("b")],
    )
    y = m.add("If", ["yes"], name="if", then_branch=then_branch, else_branch=else_branch)
    return m.model([("x", [2, 4]), ("yes", [], TensorProto.BOOL)], [y])


def test_each_branch_has_its_own_range():
    feeds = [{"x": x_of(seed), "yes": np.array(seed > 0)} for seed in (0, 1, 2)]
    ranges = observe_ranges(branched(), ["if/fc", "if/other"], feeds)
    run = np.stack([feed["x"] for feed in feeds[1:]])
    assert ranges["if/fc"] == (run.min(), run.max())
    assert ranges["if/other"] == (-feeds[0]["x"].max(), -feeds[0]["x"].min())


def test_a_branch_that_never_runs_is_left_out():
    feeds = [{"x": x_of(0), "yes": np.array(True)}]
    assert list(observe_ranges(branched(), ["if/fc", "if/other"], feeds)) == ["if/fc"]


def test_subgraphs_may_be_nested():
    m = Maker()
    m.constant(W, "w")
    m.constant(np.int64(2), "steps")
    m.constant(np.array(True), "go")
    loop = helper.make_node("Loop", ["steps", "go", "x"], ["deep"], name="inner", body=loop_body())
    then_branch = helper.make_graph([loop], "then", [], [value("deep")])
    same = [helper.make_node("Identity", ["x"], ["flat"], name="same")]
    else_branch = helper.make_graph(same, "else", [], [value("flat")])
    y = m.add("If", ["yes"], name="if", then_branch=then_branch, else_branch=else_branch)
    model = m.model([("x", [2, 4]), ("yes", [], TensorProto.BOOL)], [y])
    feeds = [{"x": x_of(seed), "yes": np.array(seed > 0)} for seed in (0, 1)]
    expected = np.concatenate(states(feeds[1]["x"], 2))
    np.testing.assert_allclose(
        observe_ranges(model, ["if/inner/fc"], feeds)["if/inner/fc"], (expected.min(), expected.max()), rtol=1e-5
    )


def test_a_layer_of_the_main_graph_is_observed_too():
    m = Maker()
    model = m.model([("x", [2, 4])], [m.matmul("x", 4, 4, name="fc")])
    x = x_of(0)
    assert observe_ranges(model, ["fc"], [{"x": x}])["fc"] == (x.min(), x.max())


def test_inputs_that_are_not_finite_are_left_out():
    x = x_of(0)
    x[0, 0] = np.inf
    assert observe_ranges(branched(), ["if/fc"], [{"x": x, "yes": np.array(True)}]) == {}


def test_a_loop_that_omits_its_last_outputs():
    model = looped()
    body = model.graph.node[0].attribute[0].g
    body.node.append(helper.make_node("Identity", ["product"], ["seen"], name="seen"))
    body.output.append(value("seen"))
    feed = {"x": x_of(0), "steps": np.array(2)}
    expected = np.concatenate(states(feed["x"], 2))
    lo, hi = observe_ranges(model, ["loop/fc"], [feed])["loop/fc"]
    np.testing.assert_allclose((lo, hi), (expected.min(), expected.max()), rtol=1e-5)


def test_the_model_is_not_changed():
    model = branched()
    before = model.SerializeToString()
    observe_ranges(model, ["if/fc"], [{"x": x_of(0), "yes": np.array(True)}])
    assert model.SerializeToString() == before
    assert numpy_helper.to_array(model.graph.initializer[0]).shape == (4, 4)
