"""Dynamic quantization, recomputed: scale, zero point and codes equal those of ONNX Runtime, bit for bit."""

import numpy as np
import pytest
from onnx import TensorProto, helper

import detent as dt
from detent.onnx_model import make_session
from detent.onnx_model.qdq_reader import DynamicQuantizer
from detent.verification.dynamic_quantizer import compare_dynamic, dynamic_params
from detent.verification.tally import Tally

NODE = DynamicQuantizer("quantize", "x", "codes", "scale", "zero")


@pytest.fixture(scope="module")
def session():
    node = helper.make_node("DynamicQuantizeLinear", ["x"], ["codes", "scale", "zero"])
    outputs = [helper.make_empty_tensor_value_info(name) for name in node.output]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, None)]
    graph = helper.make_graph([node], "g", inputs, outputs)
    return make_session(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8))


def arrays(count=300):
    """Arrays with ranges on one or both sides of 0, from tiny to huge, some with NaN."""
    rng = np.random.default_rng(0)
    for i in range(count):
        x = (rng.normal(rng.uniform(-2, 2), 1, (4, 9)) * 10.0 ** rng.uniform(-20, 20)).astype(np.float32)
        x = np.abs(x) if i % 5 == 0 else x
        if i % 7 == 0:
            x[0, 3] = np.nan
        yield x
    yield from (np.zeros((2, 2), np.float32), np.float32([[5.0]]), np.full(3, -5, np.float32), np.zeros(0, np.float32))


def test_equal_to_onnx_runtime(session):
    tally = Tally()
    for x in arrays():
        got = session.run(None, {"x": x})
        params = dynamic_params(x)
        assert (float(params.scale), int(params.zero_point)) == (float(got[1]), int(got[2]))
        compare_dynamic(tally, NODE, x, tuple(got))
    assert (tally.differing, tally.first) == (0, None)
    assert tally.compared > 10_000


def test_the_core_differs_by_one_ulp_at_most():
    scales = [(dynamic_params(x), dt.QuantParams.from_data("uint8", np.nan_to_num(x))) for x in arrays() if x.size]
    ulps = [abs(int(np.float32(a.scale).view(np.int32)) - int(np.float32(b.scale).view(np.int32))) for a, b in scales]
    assert set(ulps) == {0, 1}
    assert all(a.zero_point == b.zero_point for a, b in scales)


@pytest.mark.parametrize("x", [[np.inf, 1.0], [3e38, -3e38], [0.0, 1e-40]])
def test_ranges_without_a_scale(x):
    assert dynamic_params(np.float32(x)) is None
    tally = Tally()
    compare_dynamic(tally, NODE, np.float32(x), (np.zeros(2, np.uint8), np.float32(1), np.uint8(0)))
    assert tally.compared == 0


def test_mismatches_are_named(session):
    x = next(arrays())
    codes, scale, zero = session.run(None, {"x": x})
    wrong = codes.copy()
    wrong[1, 2] ^= 1
    for got, cause, tensor in (
        ((wrong, scale, zero), "wrong code", "codes"),
        ((codes, np.nextafter(scale, np.float32(9e9)), zero), "wrong scale of dynamic quantization", "scale"),
        ((codes, scale, zero + np.uint8(1)), "wrong zero point of dynamic quantization", "zero"),
        ((codes[:2], scale, zero), "wrong code", "codes"),
    ):
        tally = Tally()
        compare_dynamic(tally, NODE, x, got)
        assert tally.differing > 0
        assert (tally.first.cause, tally.first.tensor) == (cause, tensor)
