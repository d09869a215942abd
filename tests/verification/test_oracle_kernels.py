"""The integer oracle against plain loops, ONNX Runtime's kernels and saturating arithmetic."""

from itertools import product
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper
from qdq_models import chain, model

import detent as dt
from detent.errors import UnsupportedError
from detent.onnx_model import make_session
from detent.verification.kernel_oracle import KernelCheck, compare_kernel, conv_sums, matmul_sums, requantize

CPU = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""


def loops(x, w, strides, dilations, pads, group):
    """Convolve integers by definition."""
    rank = x.ndim - 2
    padded = np.pad(x.astype(object), [(0, 0), (0, 0), *zip(pads[:rank], pads[rank:], strict=True)])
    reach = [(k - 1) * d + 1 for k, d in zip(w.shape[2:], dilations, strict=True)]
    sizes = [(n - r) // s + 1 for n, r, s in zip(padded.shape[2:], reach, strides, strict=True)]
    each, outputs = w.shape[1], w.shape[0] // group
    y = np.zeros((x.shape[0], w.shape[0], *sizes), object)
    for n, m, *place in product(range(x.shape[0]), range(w.shape[0]), *map(range, sizes)):
        for c, *tap in product(range(each), *map(range, w.shape[2:])):
            at = [p * s + t * d for p, s, t, d in zip(place, strides, tap, dilations, strict=True)]
            y[(n, m, *place)] += padded[(n, m // outputs * each + c, *at)] * w[(m, c, *tap)]
    return y


@pytest.mark.parametrize(
    ("shape", "kernel", "strides", "dilations", "pads", "group"),
    [
        ((2, 4, 9), (6, 4, 3), [1], [1], [0, 0], 1),
        ((1, 4, 9), (6, 2, 3), [2], [2], [3, 1], 2),
        ((2, 3, 6, 5), (4, 3, 3, 2), [1, 2], [1, 1], [1, 0, 2, 1], 1),
        ((1, 4, 6, 6), (8, 1, 3, 3), [2, 1], [1, 2], [1, 1, 1, 1], 4),
        ((1, 2, 4, 4, 4), (2, 2, 2, 2, 2), [1, 1, 2], [1, 1, 1], [0, 0, 0, 1, 1, 1], 1),
    ],
    ids=["1d", "1d_grouped_dilated", "2d", "depthwise", "3d"],
)
def test_convolution_is_that_of_the_definition(shape, kernel, strides, dilations, pads, group):
    rng = np.random.default_rng(0)
    x, w = rng.integers(-255, 256, shape), rng.integers(-255, 256, kernel)
    got = conv_sums(x, w, strides=strides, dilations=dilations, pads=pads, group=group)
    assert np.array_equal(got, loops(x, w, strides, dilations, pads, group).astype(np.int64))


@pytest.mark.parametrize("terms", [3, 258, 259, 5000])
def test_products_are_exact_beyond_float32(terms):
    a, b = np.full((1, terms), 255), np.full((terms, 1), 255)
    assert matmul_sums(a, b).item() == terms * 255 * 255
    assert matmul_sums(a, -b + np.arange(terms)[:, None] % 2).item() == -terms * 255 * 255 + 255 * (terms // 2)


def test_requantize_rounds_half_to_even_and_clamps():
    codes = requantize(np.array([1, 3, 5, -1, -3, 10**6, -(10**6)]), np.float32(0.5), 10, np.dtype("int8"))
    assert codes.tolist() == [10, 12, 12, 10, 8, 127, -128]


# Beside ONNX Runtime


def run(node, inputs, kinds, *, domain=""):
    """Run a node in ONNX Runtime and compare it; inputs are (name, array), None if omitted."""
    node = helper.make_node(
        node[0], [n if a is not None else "" for n, a in inputs], ["y"], name="k", domain=domain, **node[1]
    )
    given = {name: array for name, array in inputs if array is not None}
    one_node = model([node], [], [("y", kinds, None)], given)
    one_node.graph.output[0].type.tensor_type.ClearField("shape")
    got = make_session(one_node, optimize=False).run(None, {})[0]
    return compare_kernel(node, [array for _, array in inputs], got)


def conv_inputs(rng, shape, kernel, w_kind, x_kind=np.uint8, bias=True, channels=True):
    low, high = np.iinfo(x_kind).min, np.iinfo(x_kind).max
    w_low, w_high = (-60, 60) if w_kind == np.int8 else (0, 255)  # within what no CPU saturates
    size = kernel[0] if channels else 1
    zero = rng.integers(low, high, endpoint=True)
    return [
        ("x", rng.integers(low, high, shape, endpoint=True).astype(x_kind)),
        ("xs", np.float32(0.02)),
        ("xz", x_kind(zero)),
        ("w", rng.integers(w_low, w_high, kernel, endpoint=True).astype(w_kind)),
        ("ws", rng.uniform(0.001, 0.02, size).astype(np.float32)),
        ("wz", np.full(size, 0 if w_kind == np.int8 else 128, w_kind)),
        ("ys", np.float32(0.13)),
        ("yz", x_kind(low + 100)),
        ("b", rng.integers(-5000, 5000, kernel[0]).astype(np.int32) if bias else None),
    ]


CONVS = {
    "1d": ((2, 8, 17), (6, 8, 3), {}),
    "1d_strided_dilated": ((2, 8, 17), (6, 8, 3), {"strides": [2], "dilations": [2], "pads": [2, 1]}),
    "2d": ((2, 8, 9, 7), (16, 8, 3, 3), {"pads": [1, 1, 1, 1]}),
    "2d_strided_dilated": ((1, 8, 9, 7), (6, 8, 3, 2), {"strides": [2, 1], "dilations": [1, 2], "pads": [0, 1, 2, 1]}),
    "same_upper": ((1, 4, 8, 9), (6, 4, 3, 2), {"auto_pad": "SAME_UPPER", "strides": [2, 2]}),
    "same_lower": ((1, 4, 8, 9), (6, 4, 3, 2), {"auto_pad": "SAME_LOWER", "strides": [2, 2]}),
    "valid": ((1, 4, 8, 9), (6, 4, 3, 2), {"auto_pad": "VALID"}),
    "grouped": ((2, 8, 6, 6), (12, 2, 3, 3), {"group": 4}),
    "depthwise": ((2, 16, 8, 8), (16, 1, 3, 3), {"group": 16, "pads": [1, 1, 1, 1]}),
    "depthwise_multiplied": ((1, 8, 8, 8), (16, 1, 3, 3), {"group": 8}),
    "pointwise": ((2, 32, 5, 5), (24, 32, 1, 1), {}),
    "3d": ((1, 2, 4, 5, 6), (3, 2, 2, 2, 2), {}),
}


@pytest.mark.parametrize("kinds", [(np.uint8, np.uint8), (np.uint8, np.int8), (np.int8, np.int8)], ids=str)
@pytest.mark.parametrize("name", CONVS)
def test_qlinear_conv(name, kinds):
    shape, kernel, attributes = CONVS[name]
    rng = np.random.default_rng(0)
    kind = TensorProto.UINT8 if kinds[0] == np.uint8 else TensorProto.INT8
    for bias, channels in product((False, True), repeat=2):
        inputs = conv_inputs(rng, shape, kernel, kinds[1], kinds[0], bias, channels)
        row, difference = run(("QLinearConv", attributes), inputs, kind)
        assert row.compared > 0
        assert (row.differing, difference) == (0, None)


def test_qlinear_conv_with_channels_last():
    rng = np.random.default_rng(0)
    inputs = conv_inputs(rng, (2, 9, 7, 8), (16, 8, 3, 3), np.uint8)
    attributes = {"channels_last": 1, "pads": [1, 1, 1, 1], "strides": [2, 1]}
    row, difference = run(("QLinearConv", attributes), inputs, TensorProto.UINT8, domain="com.microsoft")
    assert (row.compared, row.differing, difference) == (2 * 5 * 7 * 16, 0, None)


@pytest.mark.parametrize("shape", [(7, 33), (2, 3, 7, 33)], ids=str)
@pytest.mark.parametrize("channels", [False, True])
def test_qlinear_matmul(shape, channels):
    rng = np.random.default_rng(0)
    size = 9 if channels else 1
    inputs = [
        ("a", rng.integers(0, 256, shape).astype(np.uint8)),
        ("as", np.float32(0.02)),
        ("az", np.uint8(77)),
        ("b", rng.integers(0, 256, (33, 9)).astype(np.uint8)),
        ("bs", rng.uniform(0.001, 0.02, size).astype(np.float32)),
        ("bz", np.full(size, 128, np.uint8)),
        ("ys", np.float32(0.3)),
        ("yz", np.uint8(120)),
    ]
    row, _ = run(("QLinearMatMul", {}), inputs, TensorProto.UINT8)
    assert (row.compared, row.differing) == (int(np.prod(shape[:-1])) * 9, 0)


@pytest.mark.parametrize("turned", [(0, 0), (0, 1), (1, 0), (1, 1)], ids=str)
@pytest.mark.parametrize("to_float", [False, True])
def test_qgemm(turned, to_float):
    rng = np.random.default_rng(0)
    shapes = [(33, 7) if turned[0] else (7, 33), (9, 33) if turned[1] else (33, 9)]
    inputs = [
        ("a", rng.integers(0, 256, shapes[0]).astype(np.uint8)),
        ("as", np.float32(0.02)),
        ("az", np.uint8(77)),
        ("b", rng.integers(0, 256, shapes[1]).astype(np.uint8)),
        ("bs", rng.uniform(0.001, 0.02, 9).astype(np.float32)),
        ("bz", np.full(9, 128, np.uint8)),
        ("c", rng.integers(-5000, 5000, 9).astype(np.int32)),
    ]
    inputs += [] if to_float else [("ys", np.float32(0.3)), ("yz", np.uint8(120))]
    attributes = {"transA": turned[0], "transB": turned[1]}
    kind = TensorProto.FLOAT if to_float else TensorProto.UINT8
    row, _ = run(("QGemm", attributes), inputs, kind, domain="com.microsoft")
    assert (row.compared, row.differing) == (63, 0)


@pytest.mark.parametrize("bias", [False, True])
def test_matmul_integer_to_float(bias):
    rng = np.random.default_rng(0)
    inputs = [
        ("a", rng.integers(0, 256, (2, 7, 200)).astype(np.uint8)),
        ("b", rng.integers(0, 256, (200, 9)).astype(np.uint8)),
        ("as", np.float32(0.02)),
        ("bs", rng.uniform(0.001, 0.02, 9).astype(np.float32)),
        ("az", np.uint8(77)),
        ("bz", np.full(9, 128, np.uint8)),
        ("c", rng.normal(size=9).astype(np.float32) if bias else None),
    ]
    row, _ = run(("MatMulIntegerToFloat", {}), inputs, TensorProto.FLOAT, domain="com.microsoft")
    assert (row.compared, row.differing) == (126, 0)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("zero", [None, np.int8(0), np.arange(9).astype(np.int8)])
def test_dynamic_quantize_matmul(bias, zero):
    rng = np.random.default_rng(0)
    inputs = [
        ("a", rng.normal(size=(2, 7, 200)).astype(np.float32)),
        ("b", rng.integers(-64, 65, (200, 9)).astype(np.int8)),
        ("bs", rng.uniform(0.001, 0.02, 9).astype(np.float32)),
        ("bz", zero),
        ("c", rng.normal(size=9).astype(np.float32) if bias else None),
    ]
    row, _ = run(("DynamicQuantizeMatMul", {}), inputs, TensorProto.FLOAT, domain="com.microsoft")
    assert (row.compared, row.differing) == (126, 0)


def test_dynamic_quantize_matmul_of_infinite_inputs_is_not_compared():
    node = helper.make_node("DynamicQuantizeMatMul", ["a", "b", "bs"], ["y"], name="k")
    inputs = [np.float32([[np.inf]]), np.int8([[1]]), np.float32([1])]
    with pytest.raises(UnsupportedError, match="infinite"):
        compare_kernel(node, inputs, np.float32([[1]]))


def test_sums_of_integers():
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 256, (4, 50)).astype(np.uint8), rng.integers(0, 256, (50, 3)).astype(np.uint8)
    inputs = [("a", a), ("b", b), ("az", np.uint8(9)), ("bz", np.uint8(128))]
    assert run(("MatMulInteger", {}), inputs, TensorProto.INT32)[0].differing == 0
    x, w = rng.integers(0, 256, (1, 2, 6, 6)).astype(np.uint8), rng.integers(0, 256, (3, 2, 3, 3)).astype(np.uint8)
    inputs = [("x", x), ("w", w), ("xz", np.uint8(9)), ("wz", np.uint8(128))]
    assert run(("ConvInteger", {"pads": [1, 1, 1, 1]}), inputs, TensorProto.INT32)[0].differing == 0


def test_what_the_oracle_does_not_know_is_refused():
    node = helper.make_node("QGemm", list("abc"), ["y"], alpha=2.0)
    with pytest.raises(UnsupportedError, match="alpha"):
        compare_kernel(node, [np.zeros((1, 1), np.uint8), *[np.float32(1)] * 5], np.zeros((1, 1)))


# Saturation


def saturating_sums(x, w):
    """Emulate vpmaddubsw of AVX2: pairs of products of unsigned and signed bytes, added in int16 with saturation."""
    products = x[:, :, None].astype(np.int64) * w[None].astype(np.int64)
    pairs = products.reshape(len(x), -1, 2, w.shape[1]).sum(axis=2)
    return np.clip(pairs, -(1 << 15), (1 << 15) - 1).sum(axis=1)


def saturating_conv(reach, seed=0):
    """Return a 1x1 convolution with int8 weights up to `reach`, and its output on a CPU without VNNI."""
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 256, (1, 64, 10, 10)).astype(np.uint8)
    w = rng.integers(-reach, reach, (8, 64, 1, 1), endpoint=True).astype(np.int8)
    scale = np.float32([0.01])
    inputs = [
        x,
        np.float32(0.02),
        np.uint8(0),
        w,
        np.full(8, scale),
        np.zeros(8, np.int8),
        np.float32(0.9),
        np.uint8(128),
    ]
    sums = saturating_sums(x.reshape(64, 100).T, w.reshape(8, 64).T).T.reshape(1, 8, 10, 10)
    multiplier = np.float32(0.02) * scale[0] / np.float32(0.9)
    got = requantize(sums, multiplier, 128, np.dtype("uint8"))
    return helper.make_node("QLinearConv", list("abcdefgh"), ["y"], name="conv"), inputs, got


def test_saturation_is_named_with_its_channel_and_step():
    node, inputs, got = saturating_conv(127)
    row, difference = compare_kernel(node, inputs, got)
    assert row.differing > 0
    assert row.max_steps > 1
    assert row.saturated
    assert difference.node == "conv"
    assert abs(difference.expected - difference.got) == row.max_steps
    assert f"saturation in channel {difference.index[1]}" in difference.cause
    assert f"by up to {row.max_steps};" in difference.cause
    assert "int8 weights reach 127" in difference.cause
    assert (difference.scale, difference.zero_point) == (pytest.approx(0.9), 128)


def test_nothing_saturates_within_the_limit_of_the_target():
    row, difference = compare_kernel(*saturating_conv(64))
    assert (row.differing, difference) == (0, None)


def test_one_step_of_unsigned_weights_is_rounding():
    node, inputs, _ = saturating_conv(127)
    inputs[3], inputs[5] = (inputs[3].astype(np.int64) + 128).astype(np.uint8), np.full(8, 128, np.uint8)
    sums = matmul_sums(inputs[0].reshape(64, 100).T.astype(int), inputs[3].reshape(8, 64).T.astype(int) - 128)
    right = requantize(
        sums.T.reshape(1, 8, 10, 10), np.float32(0.02) * np.float32(0.01) / np.float32(0.9), 128, np.dtype("uint8")
    )
    assert compare_kernel(node, inputs, right)[0].differing == 0
    right[0, 3, 2, 1] ^= 1
    row, difference = compare_kernel(node, inputs, right)
    assert (row.differing, row.max_steps, row.saturated, difference) == (1, 1, False, None)


def test_a_report_with_saturation_is_not_ok():
    node, inputs, got = saturating_conv(127)
    names = [f"i{i}" for i in range(len(inputs))]
    node.input[:] = names
    ends = [("i0", TensorProto.UINT8, None)], [("y", TensorProto.UINT8, None)]
    check = KernelCheck(model([node], *ends, dict(zip(names[1:], inputs[1:], strict=True))))
    for reading in check.readings():
        reading.take({**dict(zip(names, inputs, strict=True)), "y": got})
    report = dt.verification.VerifyReport((3,), 1, 0, 0, kernels=check.rows(), saturation=check.saturation())
    assert not report.ok
    assert "saturation in channel" in str(report)
    assert "QLinearConv" in str(report)
    assert report.first_difference is None


@pytest.mark.skipif("vnni" in CPU or "avx2" not in CPU, reason="only CPUs with AVX2 and without VNNI saturate")
def test_saturation_on_this_machine():
    x = [np.full((4, 3, 8, 8), 12.7, np.float32)]
    report = dt.verify(chain(quantized=False), chain(signed=True), x, levels=(3,))
    assert not report.ok
    assert any(row.saturated for row in report.kernels)
