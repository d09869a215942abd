"""Sessions: large weights shared as arrays, inner tensors, errors."""

import gc

import numpy as np
import onnxruntime as ort
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper, parser

from detent.errors import UnsupportedError
from detent.onnx_model.sessions import (
    Probe,
    Reading,
    make_session,
    optimized,
    ort_errors,
    record,
    record_in_parts,
    split_by_bytes,
    tensor_bounds,
    tensor_nbytes,
    without_weights,
)

SIDE = 32  # a matrix of 4 kB


def constant(name, dtype=np.float32, seed=0):
    values = np.random.default_rng(seed).integers(-100, 100, (SIDE, SIDE)).astype(dtype)
    return numpy_helper.from_array(values, name)


def model_of(nodes, initializers, inputs=(), outputs=("y",)):
    shaped = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("x", *inputs)]
    results = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
    graph = helper.make_graph(nodes, "g", shaped, results, initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def product(**given):
    return model_of([helper.make_node("MatMul", ["x", "w"], ["y"])], [constant("w")], **given)


def branches():
    """A model whose weight only a subgraph of an If reads."""
    bodies = [
        helper.make_graph(
            [helper.make_node("MatMul", ["x", name], [f"{name}_y"])],
            name,
            [],
            [helper.make_tensor_value_info(f"{name}_y", TensorProto.FLOAT, None)],
        )
        for name in ("a", "b")
    ]
    choice = helper.make_node("If", ["flag"], ["y"], then_branch=bodies[0], else_branch=bodies[1])
    flag = numpy_helper.from_array(np.array(True), "flag")
    return model_of([choice], [flag, constant("a"), constant("b", seed=1)])


def unread():
    model = product()
    model.graph.initializer.append(constant("unread"))
    return model


def as_output():
    return model_of([helper.make_node("MatMul", ["x", "w"], ["y"])], [constant("w")], outputs=("y", "w"))


def doubles():
    nodes = [
        helper.make_node("Cast", ["w"], ["v"], to=TensorProto.FLOAT),
        helper.make_node("MatMul", ["x", "v"], ["y"]),
    ]
    return model_of(nodes, [constant("w", np.float64)])


@pytest.mark.parametrize("make", [product, branches, unread, as_output, doubles])
@pytest.mark.parametrize("optimize", [True, False])
def test_results_are_those_of_the_whole_model(make, optimize):
    model, x = make(), np.random.default_rng(2).standard_normal((3, SIDE)).astype(np.float32)
    before = model.SerializeToString()
    session = make_session(model, optimize=optimize)
    gc.collect()  # the session must keep the arrays of its weights alive
    expected = ort.InferenceSession(before, providers=["CPUExecutionProvider"]).run(None, {"x": x})
    for got, want in zip(session.run(None, {"x": x}), expected, strict=True):
        np.testing.assert_array_equal(got, want)
    assert model.SerializeToString() == before


def test_a_weight_that_is_an_input_too_can_still_be_replaced():
    model, x = product(inputs=("w",)), np.ones((1, SIDE), np.float32)
    session = make_session(model)
    whole, given = session.run(None, {"x": x}), session.run(None, {"x": x, "w": np.eye(SIDE, dtype=np.float32)})
    assert not np.array_equal(whole[0], given[0])
    np.testing.assert_array_equal(given[0], x)


def test_lean_models_hold_no_large_data():
    lean, weights = without_weights(unread())
    assert list(weights) == ["w"]
    assert lean.ByteSize() < 500
    assert [tensor.name for tensor in lean.graph.initializer] == ["w"]
    small, none = without_weights(ModelProto(ir_version=8, producer_name="me"))
    assert (small.ir_version, small.producer_name, none) == (8, "me", {})


def test_wrong_sizes_are_rejected():
    model = product()
    model.graph.initializer[0].dims[0] = SIDE + 1
    with pytest.raises(UnsupportedError, match="failed to load the model"):
        make_session(model)


def parsed(text):
    return parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> g {text}')


ABS_NEG = "(float[1] x) => (float[1] y) { t = Abs(x) y = Neg(t) }"
FEED = {"x": np.float32([-2])}


def test_tensors_are_recorded():
    assert list(record(parsed(ABS_NEG), ["t", "x"], [FEED])) == [{"t": 2, "x": -2}]


def test_a_probe_does_not_change_the_model():
    model, seen = parsed(ABS_NEG), []
    before = model.SerializeToString()
    Probe(model, [Reading(("x", "t"), lambda arrays: seen.append(arrays["t"].item()))]).run(FEED)
    assert seen == [2]
    assert model.SerializeToString() == before


def test_sizes_that_depend_on_data():
    model = parsed("(float[N] x) => (int64[1, M] y) { t = Abs(x) y = NonZero(t) }")
    assert tensor_nbytes(model, ["t", "y"], {"x": np.float32([1, 0, 2])}) == {"t": 12, "y": 8}


def test_errors_of_onnx_runtime():
    with pytest.raises(UnsupportedError, match="failed to run the model"), ort_errors():
        ort.InferenceSession(b"no model")


def test_errors_of_detent_are_not_changed():
    with pytest.raises(UnsupportedError, match=r"^failed before$"), ort_errors():
        raise UnsupportedError("failed before")


def test_a_probe_raises_errors_of_onnx_runtime():
    probe = Probe(parsed("(float[N] x) => (float[M] y) { y = Abs(x) }"), [Reading(("y",), print)])
    probe.run({"x": np.zeros(2, np.float32)})
    with pytest.raises(UnsupportedError, match="failed to run the model"):
        probe.run({"x": np.zeros((2, 2), np.float32)})


def test_optimized_graphs_with_convolutions_in_subgraphs_can_be_loaded():
    values = np.random.default_rng(0).normal(size=(16, 16, 3, 3)).astype(np.float32)

    def conv(x, y):
        return helper.make_node("Conv", [x, f"{y}_w"], [y], name=f"conv_{y}", pads=[1] * 4)

    bodies = [
        helper.make_graph(
            [conv("t", y)],
            y,
            [],
            [helper.make_tensor_value_info(y, TensorProto.FLOAT, None)],
            [numpy_helper.from_array(values, f"{y}_w")],
        )
        for y in ("then", "else")
    ]
    nodes = [
        conv("x", "t"),
        helper.make_node("ReduceMean", ["t"], ["mean"], keepdims=0),
        helper.make_node("Cast", ["mean"], ["condition"], to=TensorProto.BOOL),
        helper.make_node("If", ["condition"], ["y"], then_branch=bodies[0], else_branch=bodies[1]),
    ]
    model = model_of(nodes, [numpy_helper.from_array(values, "t_w")])
    model.graph.input[0].CopyFrom(helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 16, 8, 8]))
    x = {"x": np.ones((1, 16, 8, 8), np.float32)}
    runs = [make_session(each).run(None, x)[0] for each in (model, optimized(model))]
    assert np.array_equal(*runs)


def test_bounds_of_tensors_ignore_what_is_not_finite_and_are_zero_for_empty_tensors():
    model = model_of([helper.make_node("Identity", ["x"], ["y"])], [])
    feeds = [{"x": np.float32(values)} for values in ([-1, np.inf, 3], [np.nan, -np.inf], [], [5, 7])]
    ((lo, hi),) = tensor_bounds(model, ["x"], feeds).values()
    assert (lo.tolist(), hi.tolist()) == ([-1, 0, 0, 5], [3, 0, 0, 7])


def test_tensors_are_recorded_in_parts_that_fit_the_budget():
    model = model_of(
        [
            helper.make_node("Abs", ["x"], ["a"]),
            helper.make_node("Neg", ["a"], ["b"]),
            helper.make_node("Abs", ["b"], ["y"]),
        ],
        [],
    )
    feeds = [{"x": np.float32([1, -2])}, {"x": np.float32([3, 4])}]
    assert split_by_bytes(model, ["x", "a", "b", "y"], feeds[0], None) == [["x", "a", "b", "y"]]
    assert split_by_bytes(model, ["x", "a", "b", "y"], feeds[0], 16) == [["x", "a", "b"], ["y"]]
    assert split_by_bytes(model, ["a", "b"], feeds[0], 1) == [["a"], ["b"]]
    rows = [
        (number, {name: array.tolist() for name, array in tensors.items()})
        for number, tensors in record_in_parts(model, ["a", "b"], feeds, 1)
    ]
    assert rows == [(0, {"a": [1, 2]}), (1, {"a": [3, 4]}), (0, {"b": [-1, -2]}), (1, {"b": [-3, -4]})]
