"""QuantParams: scales computed by hand from docs/numerics.md, equality and copies, and properties."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest

import detent as dt

F32 = np.float32


def ranged(spec, lo, hi, **more):
    params = dt.QuantParams.from_range(spec, lo, hi, **more)
    return params.scale.item(), params.zero_point.item()


@pytest.mark.parametrize(
    ("spec", "lo", "hi", "scale", "zero_point"),
    [
        ("int8", -2.0, 1.0, 2 / 127, 0),
        ("int8/torch", -2.0, 1.0, 2 / 127.5, 0),
        ("int8/torch_fused", -2.0, 1.0, 2 / 128, 0),
        ("int8/torch_fused", -1.0, 2.0, 2 / 127, 0),
        ("int8/oxicuda", -2.0, 1.0, 2 / 127, 0),
        ("int8/torsh", -2.0, 1.0, 2 / 127.5, 0),
        ("uint8/symmetric", -2.0, 1.0, 2 / 127, 128),
        ("uint8/symmetric/torch", -2.0, 1.0, 2 / 127.5, 128),
        ("uint8", -1.0, 4.0, 5 / 255, 51),
        ("uint8", 2.0, 4.0, 4 / 255, 0),
        ("uint8", -4.0, -2.0, 4 / 255, 255),
        ("uint8/torsh", 2.0, 4.0, 2 / 255, 0),
        ("uint8/entrenar", -4.0, -2.0, 2 / 255, 255),
        ("int8/affine", -1.0, 4.0, 5 / 255, -77),
        ("int4/affine", -8.0, 7.0, 1.0, 0),
        ("nf4", -3.0, 2.0, 3.0, 0),
        ("float8_e4m3fn", -3.0, 2.0, 3 / 448, 0),
    ],
)
def test_scale_and_zero_point(spec, lo, hi, scale, zero_point):
    assert ranged(spec, lo, hi) == (F32(scale), zero_point)
    assert ranged(spec, lo, hi, dtype="float64") == (scale, zero_point)


@pytest.mark.parametrize(
    ("spec", "scale", "zero_point"),
    [
        ("int8", 1.0, 0),
        ("uint8", 1.0, 0),
        ("uint8/symmetric", 1.0, 128),
        ("int8/torch", F32(2.0**-23), 0),
        ("uint8/oxicuda", F32(1e-8 / 255), 0),
        ("int8/oxicuda", F32(1e-8 / 127), 0),
        ("uint8/entrenar", F32(1e-10), 0),
        ("int8/affine/torsh", 1.0, -128),
        ("int8/rlx", F32(1e-12), 0),
        ("nf4", 1.0, 0),
    ],
)
def test_a_range_without_width(spec, scale, zero_point):
    assert ranged(spec, 0.0, 0.0) == (scale, zero_point)


def test_zero_points_round_half_to_even_or_away_as_the_convention_does():
    lo, hi = -2.5, 12.5  # uint4: s = 1, z = 2.5
    assert ranged("uint4", lo, hi) == (1.0, 2)
    assert ranged("uint4/oxicuda", lo, hi) == (1.0, 3)


def test_zero_points_use_the_stored_scale():
    """With the exact scale 0.1, z would be a tie. The nearest float32 is larger than 0.1, so z is below the tie."""
    lo, hi = -0.25, 1.25  # uint4: s = 0.1
    assert ranged("uint4", lo, hi)[1] == round(0.25 / float(F32(0.1)))
    assert ranged("uint4/oxicuda", lo, hi)[1] == 2


def test_the_widest_range_does_not_overflow():
    assert ranged("uint8", -3e38, 3e38)[0] == F32(6e38 / 255)
    assert ranged("uint8", -1.5e308, 1.5e308, dtype="float64")[0] == 1.5e308 / 255 * 2


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_smallest_scale_is_normal(dtype):
    smallest = np.finfo(dtype).smallest_normal
    assert ranged("int8", 0.0, float(smallest), dtype=dtype)[0] == smallest


def test_bounds_broadcast_to_the_data():
    params = dt.QuantParams.from_range("int8/axis0", -1.0, 1.0, shape=(3, 5))
    assert params.scale.shape == params.zero_point.shape == params.min_val.shape == (3,)
    columns = dt.QuantParams.from_range("uint8/group2", np.zeros((3, 1)), np.ones((1, 4)))
    assert columns.scale.shape == (3, 4)


@pytest.mark.parametrize("dtype", ["float16", ml_dtypes.bfloat16, "float32", "float64"])
def test_from_data_keeps_float64_only(dtype):
    x = np.array([[1.0, -2.0], [0.5, 0.25]]).astype(dtype)
    params = dt.QuantParams.from_data("int8/axis0", x)
    kept = "float64" if np.dtype(dtype) == np.float64 else "float32"
    assert params.scale.dtype == kept
    assert np.array_equal(params.scale, (np.array([2.0, 0.5]) / 127).astype(kept))
    assert np.array_equal(params.max_val, [1.0, 0.5])


@pytest.mark.parametrize(
    ("given", "dtype"),
    [(0.5, "float32"), (1, "float32"), (np.float16(0.5), "float32"), (np.float64(0.5), "float64"), ([0.5], "float32")],
)
def test_scale_dtype(given, dtype):
    assert dt.QuantParams("int8", given).scale.dtype == dtype


@pytest.mark.parametrize(("spec", "expected"), [("int8", 0), ("uint8/symmetric", 128), ("uint8", 0), ("nf4", 0)])
def test_zero_point_left_out(spec, expected):
    params = dt.QuantParams(spec, 1.0)
    assert params.zero_point.dtype == np.int32
    assert params.zero_point.tolist() == expected


def test_zero_point_left_out_is_the_code_nearest_zero():
    assert dt.QuantParams(dt.QuantSpec("uint8", qmin=5), 1.0).zero_point == 5


def test_arrays_are_copies_and_read_only():
    scale, zero_point = np.ones(3, np.float32), np.zeros(3, np.int32)
    params = dt.QuantParams("uint8/axis0", scale, zero_point)
    scale[0], zero_point[0] = 9.0, 9
    assert params.scale[0] == 1.0
    assert params.zero_point[0] == 0
    for array in (params.scale, params.zero_point):
        assert not array.flags.writeable


def test_equality_hash_and_repr():
    a, b = (dt.QuantParams("uint8/axis0", [0.5, 0.25], 3) for _ in range(2))
    assert a == b
    assert hash(a) == hash(b)
    assert a != dataclasses.replace(a, zero_point=4)
    assert a != dataclasses.replace(a, scale=a.scale.astype(np.float64))
    assert a != "params"
    assert repr(a) == ("dt.QuantParams('uint8/axis0/affine', scale=<(2,), 0.25 to 0.5>, zero_point=3)")
    assert repr(dt.QuantParams("uint8/axis0", [0.5, 0.5], [3, 4])) == (
        "dt.QuantParams('uint8/axis0/affine', scale=full((2,), 0.5), zero_point=<3 to 4>)"
    )


@pytest.mark.parametrize(
    "text", ["int8", "uint8", "int8/token", "uint4/group128@0/affine/torch", "nvfp4", "nf4/axis-1"]
)
def test_reprs_fit_a_line_of_a_notebook(text):
    x = np.random.default_rng(0).normal(size=(4096, 256)).astype(np.float32)
    params = dt.QuantParams.from_data(text, x)
    plan = dt.Plan.select("fake_quantize_backward", shape=x.shape, dtype="float32", spec=text)
    for value in (params.spec, params, dt.quantize(x, params), dt.FakeQuantize(text)):
        assert len(repr(value)) <= 120
        assert "\n" not in repr(value)
    assert len(repr(plan)) <= 140


def test_from_statistics_keeps_spec_and_dtype():
    params = dt.QuantParams("uint8/axis0", np.ones(2))
    new = params.from_statistics(-1.0, [1.0, 4.0])
    assert (new.spec, new.scale.dtype, new.scale.shape) == (params.spec, np.float64, (2,))
    assert new.zero_point.tolist() == [128, 51]


@pytest.mark.parametrize(
    ("params", "bound"),
    [
        (dt.QuantParams("int8", 0.5), 0.25),
        (dt.QuantParams("int8/axis0", [0.5, 2.0]), 1.0),
        (dt.QuantParams(dt.QuantSpec("int8", rounding="floor"), 0.5), 0.5),
        (dt.QuantParams(dt.QuantSpec("int8", rounding="stochastic"), 0.5), 0.5),
        (dt.QuantParams("float4_e2m1fn", 0.5), 0.5),
        (dt.QuantParams("float8_e4m3fn", 0.5), 8.0),
    ],
)
def test_error_bound(params, bound):
    assert params.quantization_error_bound() == bound


@pytest.mark.parametrize(
    ("params", "shape", "bits"),
    [
        (dt.QuantParams("int8", 1.0), None, 8),
        (dt.QuantParams("int8", 1.0), (8,), 8 + 32 / 8),
        (dt.QuantParams("uint8", 1.0), (8,), 8 + 40 / 8),
        (dt.QuantParams("int8", np.float64(1.0)), (8,), 8 + 64 / 8),
        (dt.QuantParams.channel_wise(4, "int8"), (4, 16), 8 + 32 / 16),
        (dt.QuantParams.block_wise(32, "int4"), None, 4 + 32 / 32),
        (dt.QuantParams.block_wise(32, "uint4"), None, 4 + 36 / 32),
        (dt.QuantParams.from_range("mxfp4", [[-1.0]], [[1.0]]), None, 4 + 8 / 32),
        (dt.QuantParams.from_range("nvfp4", [[-1.0]], [[1.0]]), None, 4 + 8 / 16),
        (dt.QuantParams.from_range("nvfp4", [[-1.0]], [[1.0]]), (2, 16), 4 + 8 / 16 + 32 / 32),
    ],
)
def test_compression_ratio(params, shape, bits):
    assert params.compression_ratio(shape) == 32 / bits
    assert params.compression_ratio(shape, include_params=False) == 32 / params.spec.bits


def test_channel_wise_and_block_wise():
    channels = dt.QuantParams.channel_wise(3, dt.uint8, axis=1)
    assert (channels.spec.granularity, channels.scale.tolist()) == (dt.PerAxis(1), [1.0] * 3)
    assert channels.is_per_channel
    blocks = dt.QuantParams.block_wise(16, "int4")
    assert (blocks.spec.granularity, blocks.scale.tolist()) == (dt.PerGroup(16), [1.0])
    assert not blocks.is_per_channel


def test_nvfp4_keeps_both_levels():
    x = np.array([[6.0] * 16, [0.01] * 16, [0.0] * 16], np.float32)
    params = dt.QuantParams.from_data("nvfp4", x)
    tensor = F32(6.0 / (448 * 6))
    assert params.tensor_scale == tensor
    block = params.block_scale.astype(np.float32)
    smallest_normal = 2.0**-6  # of e4m3
    assert block.ravel().tolist() == [448.0, block[1, 0], smallest_normal]
    assert np.array_equal(params.scale, block * tensor)
    assert dt.fake_quantize(x, params)[0].tolist() == [6.0] * 16


@pytest.mark.parametrize(
    ("largest", "exponent"), [(6.0, 0), (4.0, 0), (3.99, -1), (8.0, 1), (1.0, -2), (0.0, 0), (1e-44, -126)]
)
def test_mxfp4_scale_is_a_power_of_two(largest, exponent):
    params = dt.QuantParams.from_range("mxfp4", [[-largest]], [[largest]])
    assert params.scale.tolist() == [[2.0**exponent]]


def test_validate_finds_what_was_tampered_with():
    params = dt.QuantParams("int8", 1.0)
    object.__setattr__(params, "scale", np.array(-1.0, np.float32))
    with pytest.raises(dt.ParamsError):
        params.validate()
