"""Float16 models: the quantized file computes in float32 and integers, and keeps the interface of the float16 model."""

import json

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, parser
from onnx_graphs import Maker, conv_chain, images, operators, weights

import detent as dt
import detent.onnx as qo
from detent.onnx.half_precision import is_float16, store_float16, widen
from detent.onnx_model.graph import Graph, array_of, make_tensor
from detent.onnx_model.sessions import make_session

HALF, FLOAT = TensorProto.FLOAT16, TensorProto.FLOAT


def halved(model, keeps_interface=False):
    """Return a float16 copy of a model, as converters write it; with ``keeps_interface``, Casts surround the model."""
    model = onnx.ModelProto.FromString(model.SerializeToString())
    for tensor in model.graph.initializer:
        tensor.CopyFrom(make_tensor(tensor.name, array_of(tensor).astype(np.float16)))
    (x,), (y,) = model.graph.input, model.graph.output
    if keeps_interface:
        for node in model.graph.node:
            node.input[:] = ["x_half" if name == x.name else name for name in node.input]
            node.output[:] = ["y_half" if name == y.name else name for name in node.output]
        model.graph.node.insert(0, helper.make_node("Cast", [x.name], ["x_half"], to=HALF))
        model.graph.node.append(helper.make_node("Cast", ["y_half"], [y.name], to=FLOAT))
    else:
        x.type.tensor_type.elem_type = y.type.tensor_type.elem_type = HALF
    return model


def run(model, feed):
    return make_session(model).run(None, feed)


@pytest.mark.parametrize("keeps_interface", [False, True])
def test_a_float16_model_is_quantized_like_its_float32_twin(tmp_path, keeps_interface):
    plain = conv_chain()
    model = halved(plain, keeps_interface)
    kind = np.float32 if keeps_interface else np.float16
    feeds = [{"x": feed["x"].astype(kind)} for feed in images(24)]
    report = qo.quantize(model, tmp_path / "q.onnx", feeds, progress=False)
    expected = qo.quantize(plain, tmp_path / "p.onnx", images(24), progress=False)
    assert [layer.kernel for layer in report.layers] == [layer.kernel for layer in expected.layers]
    assert report.output_sqnr_db > expected.output_sqnr_db - 1
    quantized = onnx.load(tmp_path / "q.onnx")
    for part in ("input", "output"):
        before, after = (getattr(each.graph, part)[0].type.tensor_type for each in (model, quantized))
        assert before.elem_type == after.elem_type
    assert run(quantized, feeds[0])[0].dtype == kind
    result = dt.verify(model, tmp_path / "q.onnx", feeds[:2])
    assert result.ok
    assert not result.differing_codes


def test_widening_is_exact_in_weights_and_close_in_outputs():
    model = halved(conv_chain())
    feed = {"x": images(1)[0]["x"].astype(np.float16)}
    (before,) = run(model, feed)
    wide = widen(onnx.ModelProto.FromString(model.SerializeToString()))
    for old, new in zip(model.graph.initializer, wide.graph.initializer, strict=True):
        assert new.data_type == FLOAT
        np.testing.assert_array_equal(array_of(old), array_of(new))
    (after,) = run(wide, feed)
    np.testing.assert_allclose(after.astype(np.float32), before.astype(np.float32), atol=5e-3)


def test_preparing_twice_changes_nothing():
    once = qo.prepare(halved(conv_chain()))
    assert qo.prepare(once).graph == once.graph
    assert is_float16(once), "the Casts at the border still write float16"


def test_casts_inside_a_mixed_precision_model_do_not_separate_layers():
    m = Maker()
    t = m.add("Cast", [m.conv("x", 8, 8, name="a")], to=HALF)
    t = m.add("Relu", [t])
    m.conv(m.add("Cast", [t], to=FLOAT), 8, 8, name="b")
    model = m.model([("x", ["n", 8, 8, 8])], [m.nodes[-1].output[0]])
    prepared = qo.prepare(model)
    assert [node.op_type for node in prepared.graph.node] == ["Conv", "Relu", "Conv"]
    plan = qo.plan(prepared)
    assert operators(qo.insert(plan, qo.calibrate(plan, images())))["QLinearConv"] == 1, "b is the last layer"


def test_subgraphs_types_and_constants_are_widened():
    model = parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]>
        g (float16[2] x, bool c) => (float16[2] y, float16[2] kept, float16[2] x2)
        <float16[2] w = {1, 2}, float16[2] kept = {3, 4}> {
            shape = Shape(x)
            filled = ConstantOfShape<value = float16[1] {2}>(shape)
            sum = Add(x, filled)
            y = If(c) <
                then_branch = yes () => (float16[2] a) { a = Mul(sum, w) },
                else_branch = no () => (float16[2] b) { t = Cast<to = 10>(shape) u = Sub(x, t) b = Add(u, kept) }
            >
            x2 = Neg(kept)
        }"""
    )
    feeds = [{"x": np.float16([1, 2]), "c": np.array(flag)} for flag in (True, False)]
    before = [run(model, feed) for feed in feeds]
    after = widen(onnx.ModelProto.FromString(model.SerializeToString()))
    onnx.checker.check_model(after, full_check=True)
    for feed, expected in zip(feeds, before, strict=True):
        for old, new in zip(expected, run(after, feed), strict=True):
            assert new.dtype == np.float16
            np.testing.assert_array_equal(old, new)
    inner = [node.op_type for node in after.graph.node if any(each == HALF for each in _types(node))]
    assert inner == ["Cast"] * 3, "only the Casts to the outputs write float16"


def _types(node):
    return [each.i for each in node.attribute if each.name == "to"]


def test_a_model_that_returns_its_input_keeps_it():
    model = parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> g (float16[2] x) => (float16[2] x, float16[2] y) { y = Abs(x) }'
    )
    feed = {"x": np.float16([-1, 2])}
    for old, new in zip(run(model, feed), run(widen(model), feed), strict=True):
        np.testing.assert_array_equal(old, new)


def test_float32_models_are_not_float16():
    assert not is_float16(conv_chain())
    assert is_float16(halved(conv_chain()))
    m = Maker()
    t = m.add("Cast", [m.matmul("x", 4, 4)], to=HALF)
    assert is_float16(m.model([("x", [1, 4])], [m.add("Cast", [t], to=FLOAT)]))


def test_data_of_a_float16_model_must_be_float16(tmp_path):
    m = Maker()
    y = m.add("MatMul", ["x", m.constant(weights(4, 4))])
    model = halved(m.model([("x", [1, 4])], [y]))
    with pytest.raises(dt.DtypeError, match="float16"):
        qo.quantize(model, tmp_path / "q.onnx", [np.ones((1, 4), np.float32) / 3], progress=False)
    assert not list(tmp_path.iterdir())


# Float parts in float16 again


def test_float_parts_are_stored_in_float16_on_request(tmp_path):
    model = halved(conv_chain())
    feeds = [{"x": feed["x"].astype(np.float16)} for feed in images(8)]
    reports = [
        qo.quantize(model, tmp_path / f"{float16}.onnx", feeds, skip=["second"], float16=float16, progress=False)
        for float16 in (False, True)
    ]
    assert reports[1].nbytes_after < reports[0].nbytes_after - 1000
    files = [onnx.load(report.output) for report in reports]
    for feed in feeds:
        assert run(files[0], feed)[0].tobytes() == run(files[1], feed)[0].tobytes()
    assert operators(files[0]) == operators(files[1])  # ONNX Runtime folds the Casts when it loads the file
    stored = [tensor for tensor in files[1].graph.initializer if tensor.data_type == HALF]
    assert stored
    assert not [tensor for tensor in files[0].graph.initializer if tensor.data_type == HALF]
    result = dt.verify(model, reports[1].output, feeds[:2])
    assert result.ok
    assert not result.differing_codes
    values = array_of(stored[0]).copy()
    values.flat[3] += 1
    stored[0].CopyFrom(make_tensor(stored[0].name, values))
    assert not dt.verify(model, files[1], feeds[:2]).ok


def test_values_that_float16_cannot_hold_stay_in_float32():
    plain, feeds = conv_chain(), images(8)
    decisions = qo.decide(plain, feeds, skip=["second"], float16=True, progress=False)
    file = qo.rewrite(plain, decisions)
    assert not [tensor for tensor in file.graph.initializer if tensor.data_type == HALF]
    assert json.loads(decisions.options) == {"skip": ["second"], "float16": True}


def test_the_request_is_part_of_the_decisions():
    decisions = qo.decide(halved(conv_chain()), recipe="w8a16", float16=True)
    assert decisions.float16
    assert qo.Decisions.from_json(decisions.to_json()) == decisions
    document = json.loads(decisions.to_json())
    del document["float16"]  # earlier versions did not write it
    assert not qo.Decisions.from_json(json.dumps(document)).float16


@pytest.mark.parametrize("value", [65520.0, 1e-9, 1 / 3])
def test_storing_in_float16_is_exact(value):
    graph = Graph(conv_chain())
    graph.add_constant("exact", np.full(64, -0.0, np.float32))
    graph.add_constant("rounded", np.full(64, value, np.float32))
    graph.add_constant("short", np.zeros(63, np.float32))
    store_float16(graph, ["exact", "rounded", "short", "missing"])
    assert {"exact_float16", "rounded", "short"} <= graph.constants.keys()
    assert "exact" not in graph.constants
