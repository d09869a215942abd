"""Weights of layers in subgraphs become constants of the main graph, and the outputs stay the same, bit for bit."""

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx_graphs import Maker, weights

import detent.onnx as qo
from detent.onnx_model import Graph, make_session
from detent.onnx_model.graph import subgraphs
from detent.onnx_model.layers import layers_of

sys.path.append(str(Path(__file__).parents[1] / "tools"))
small_models = importlib.import_module("small_models")

FLOAT = TensorProto.FLOAT


def value(name, shape=None, kind=FLOAT):
    return helper.make_tensor_value_info(name, kind, shape)


def branch(nodes, tensors=(), result="out"):
    return helper.make_graph(nodes, result, [], [value(result)], list(tensors))


def chosen(then_branch, else_branch, constants=()):
    """A model with one If; ``constants`` are initializers of the main graph."""
    m = Maker()
    for name, array in constants:
        m.constant(array, name)
    y = m.add("If", ["yes"], name="if", then_branch=then_branch, else_branch=else_branch)
    return m.model([("x", [2, 4]), ("yes", [], TensorProto.BOOL)], [y])


def looped(body_nodes, carried, results, constants, outputs=("y",)):
    """A model with a Loop of three steps; ``carried`` maps names of body inputs to names of initial values."""
    m = Maker()
    for name, array in {**constants, "steps": np.int64(3), "go": np.bool_(True)}.items():
        m.constant(array, name)
    inputs = [value("i", [], TensorProto.INT64), value("on", [], TensorProto.BOOL), *map(value, carried)]
    nodes = [helper.make_node("Identity", ["on"], ["on_out"], name="on"), *body_nodes]
    body = helper.make_graph(nodes, "body", inputs, [value("on_out", [], TensorProto.BOOL), *map(value, results)])
    names = ["y", *(f"final{i}" for i in range(len(carried) - 1))]
    given = ["steps", "go", *carried.values()]
    m.nodes.append(helper.make_node("Loop", given, names, name="loop", body=body))
    return m.model([("x", [2, 4])], outputs)


def feeds(model):
    x = np.random.default_rng(0).normal(size=(2, 4)).astype(np.float32)
    has_flag = any(each.name == "yes" for each in model.graph.input)
    return [{"x": x, "yes": np.array(flag)} for flag in (True, False)] if has_flag else [{"x": x}]


def check_same_outputs(model, prepared, batches):
    for feed in batches:
        expected, got = (make_session(each, optimize=False).run(None, feed) for each in (model, prepared))
        for one, other in zip(expected, got, strict=True):
            np.testing.assert_array_equal(one, other)


def prepared_layers(model):
    prepared = qo.prepare(model)
    check_same_outputs(model, prepared, feeds(model))
    return prepared, list(layers_of(Graph(prepared)))


def matmul(weight, x="x", out="out", name="fc"):
    return helper.make_node("MatMul", [x, weight], [out], name=name)


def test_a_constant_of_a_branch_moves_out():
    own = numpy_helper.from_array(weights(4, 4), "own")
    node = helper.make_node("Constant", [], ["made"], value=numpy_helper.from_array(weights(4, 4, seed=1), "made"))
    model = chosen(branch([matmul("own")], [own]), branch([node, matmul("made", out="o2", name="other")], result="o2"))
    prepared, layers = prepared_layers(model)
    assert [layer.name for layer in layers] == ["if/other", "if/fc"]
    assert all(layer.reason == "" and layer.is_weight_only for layer in layers)
    assert {layer.weight for layer in layers} <= Graph(prepared).constants.keys()
    (node,) = prepared.graph.node
    assert all(not body.initializer and [each.op_type for each in body.node] == ["MatMul"] for body in subgraphs(node))


def test_equal_weights_of_two_branches_are_stored_once_and_layers_get_unique_names():
    tensors = [numpy_helper.from_array(weights(4, 4), name) for name in ("a", "b")]
    model = chosen(branch([matmul("a")], tensors[:1]), branch([matmul("b", out="o2")], tensors[1:], result="o2"))
    _, layers = prepared_layers(model)
    assert [layer.name for layer in layers] == ["if/fc", "if/fc_1"]
    assert len({layer.weight for layer in layers}) == 1


def test_what_a_branch_computes_from_constants_is_computed_ahead():
    bounds = [numpy_helper.from_array(np.int64([each]), f"b{each}") for each in (0, 4, 1)]
    nodes = [
        helper.make_node("Slice", ["wide", "b0", "b4", "b1"], ["part"], name="slice"),
        helper.make_node("Transpose", ["part"], ["turned"], name="transpose", perm=[1, 0]),
        matmul("turned"),
    ]
    other = branch([helper.make_node("Identity", ["x"], ["o2"], name="same")], result="o2")
    model = chosen(branch(nodes, bounds), other, [("wide", weights(8, 4))])
    prepared, (layer,) = prepared_layers(model)
    assert layer.shape == (4, 8)
    assert [each.op_type for each in list(subgraphs(prepared.graph.node[0]))[1].node] == ["MatMul"]
    assert "wide" not in Graph(prepared).constants


def test_a_computed_weight_stays_where_it_is():
    nodes = [helper.make_node("Exp", ["w"], ["grown"], name="exp"), matmul("grown")]
    tensors = [numpy_helper.from_array(weights(4, 4), "w")]
    other = branch([helper.make_node("Identity", ["x"], ["o2"], name="same")], result="o2")
    _, (layer,) = prepared_layers(chosen(branch(nodes, tensors), other))
    assert layer.reason == "inside a subgraph of If 'if': a matmul of two activations"


def test_a_loop_reads_a_carried_weight_by_name():
    model = looped([matmul("w", "h")], {"h": "x", "w": "start"}, ["out", "w"], {"start": weights(4, 4)})
    prepared, (layer,) = prepared_layers(model)
    (node,) = prepared.graph.node
    assert (layer.name, layer.weight, layer.reason) == ("loop/fc", "start", "")
    assert (list(node.input), list(node.output)) == (["steps", "go", "x"], ["y"])


@pytest.mark.parametrize(
    ("results", "outputs"),
    [(["out", "changed"], ("y",)), (["out", "w"], ("y", "final0")), (["w", "w"], ("y",))],
    ids=["changed", "read", "passed twice"],
)
def test_a_carried_weight_that_is_changed_or_read_stays(results, outputs):
    nodes = [matmul("w", "h"), helper.make_node("Neg", ["w"], ["changed"], name="neg")]
    model = looped(nodes, {"h": "x", "w": "start"}, results, {"start": weights(4, 4)}, outputs)
    _, (layer,) = prepared_layers(model)
    assert "inside a subgraph of Loop 'loop'" in layer.reason


def test_layers_in_nested_subgraphs_are_found():
    inner = branch([matmul("w", out="deep")], [numpy_helper.from_array(weights(4, 4), "w")], result="deep")
    same = branch([helper.make_node("Identity", ["x"], ["flat"], name="same")], result="flat")
    outer = branch([helper.make_node("If", ["yes"], ["out"], name="second", then_branch=inner, else_branch=same)])
    other = branch([helper.make_node("Identity", ["x"], ["o2"], name="same")], result="o2")
    _, (layer,) = prepared_layers(chosen(outer, other))
    assert (layer.name, layer.reason) == ("if/second/fc", "")


def test_the_recurrent_model_keeps_its_outputs():
    model, batches = small_models.recurrent()
    check_same_outputs(model, qo.prepare(model), batches)


def test_a_model_without_layers_in_subgraphs_keeps_its_subgraphs():
    model, _ = small_models.cnn()
    before, after = (
        next(node for node in each.graph.node if node.op_type == "If") for each in (model, qo.prepare(model))
    )
    assert [len(body.initializer) for body in subgraphs(before)] == [len(body.initializer) for body in subgraphs(after)]


@pytest.mark.parametrize("bias", ["constant", "carried", "computed"])
def test_a_matmul_with_a_bias_has_no_integer_kernel(bias):
    """ONNX Runtime would merge it with the bias, and dequantize the weight in each step."""
    weight, vector = weights(4, 4, seed=1), np.ones(4, np.float32)
    carried = {"h": "x", "carried": "b"}
    constants = {"w": weight, "b": vector, "constant": vector}
    nodes = [
        helper.make_node("Tanh", ["h"], ["t"], name="tanh"),
        matmul("w", x="t", out="product"),
        helper.make_node("Neg", ["t"], ["computed"], name="neg"),
        helper.make_node("Add", ["product", bias], ["out"], name="add"),
        helper.make_node("Identity", ["carried"], ["b_out"], name="same"),
    ]
    _, layers = prepared_layers(looped(nodes, carried, ["out", "b_out"], constants))
    assert [layer.has_integer_form for layer in layers] == [bias == "computed"]
