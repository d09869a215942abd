"""Weights with several readers: a layer is quantized only if no float copy of its weight stays in the file."""

import numpy as np
import pytest
from onnx import TensorProto, helper
from onnx_graphs import Maker, rows, weights

import detent as dt
import detent.onnx as qo
from detent.onnx.graph_plan import plan

WIDTH = 64


def looped(m, weight, *, captured):
    """Add a Loop that multiplies the weight by a scalar, as a carried value or as a captured one."""
    given = "carried" if not captured else weight
    body = helper.make_graph(
        [
            helper.make_node("ReduceSum", [given], ["sum"], keepdims=0),
            helper.make_node("Identity", ["more"], ["again"]),
            *([] if captured else [helper.make_node("Identity", ["carried"], ["next"])]),
        ],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("more", TensorProto.BOOL, []),
            *([] if captured else [helper.make_tensor_value_info("carried", TensorProto.FLOAT, [WIDTH, WIDTH])]),
        ],
        [
            helper.make_tensor_value_info("again", TensorProto.BOOL, []),
            *([] if captured else [helper.make_tensor_value_info("next", TensorProto.FLOAT, [WIDTH, WIDTH])]),
            helper.make_tensor_value_info("sum", TensorProto.FLOAT, []),
        ],
    )
    inputs = [m.constant(np.array(3)), m.constant(np.array(True)), *([] if captured else [weight])]
    results = m.add("Loop", inputs, 1 if captured else 2, name="loop", body=body)
    return results if captured else results[-1]


def tied(reader, *, other=False):
    """Two matmuls; another node reads the weight of the first one."""
    m = Maker()
    weight = m.constant(weights(WIDTH, WIDTH), "w")
    t = m.add("MatMul", ["x", weight], name="tied")
    t = m.matmul(m.add("Relu", [t]), WIDTH, WIDTH, name="own")
    if reader == "loop":
        second = looped(m, weight, captured=False)
    elif reader == "captured":
        second = looped(m, weight, captured=True)
    elif reader == "float":
        second = m.add("Abs", [weight], name="norm")
    elif reader == "output":
        second = weight
    elif reader == "twin":
        second = m.add("MatMul", [m.add("Relu", [t]), weight], name="twin")
    return m.model([("x", [1, 6, WIDTH])], [t, second])


@pytest.mark.parametrize("recipe", ["w8a8", "w8a16", "w4a16-g32"])
@pytest.mark.parametrize(
    ("reader", "text"),
    [("loop", "Loop loop"), ("captured", "Loop loop"), ("float", "Abs norm"), ("output", "a model output")],
)
def test_a_weight_that_stays_in_float_is_not_stored_twice(tmp_path, reader, text, recipe):
    model, data = tied(reader), rows(width=WIDTH)
    lines = {line.name: line for line in plan(qo.prepare(model, low_bits=True), recipe).layers}
    assert lines["tied"].reason.startswith(f"{text} also reads this weight in float, so storing codes as well")
    assert lines["own"].is_quantized
    report = qo.quantize(model, tmp_path / "q.onnx", data, recipe, progress=False)
    stored = {tensor.name: tensor for tensor in qo.load(tmp_path / "q.onnx").graph.initializer}
    assert stored["w"].data_type == TensorProto.FLOAT
    assert sum(list(tensor.dims) == [WIDTH, WIDTH] for tensor in stored.values()) <= 2
    assert report.nbytes_after < report.nbytes_before
    assert dt.verify(model, tmp_path / "q.onnx", data[:1]).ok


def test_layers_that_share_a_weight_are_quantized_together(tmp_path):
    report = qo.quantize(tied("twin"), tmp_path / "q.onnx", rows(width=WIDTH), progress=False)
    assert all(not layer.reason for layer in report.layers)
    assert report.nbytes_after < 0.6 * report.nbytes_before


def test_a_layer_is_kept_in_float_with_the_one_that_shares_its_weight(tmp_path):
    model, data = tied("twin"), rows(width=WIDTH)
    report = qo.quantize(model, tmp_path / "q.onnx", data, skip="twin", progress=False)
    reasons = {layer.name: layer.reason for layer in report.layers}
    assert reasons["tied"].startswith("MatMul twin also reads this weight in float")
    assert reasons["twin"] == "skipped"
    assert not reasons["own"]
    later = plan(qo.prepare(model)).without(["twin"], "too noisy")
    assert [line.name for line in later.quantized] == ["own"]
