"""baracuda-kernels: the documented behavior of its plans, most of all QuantizePerChannelPlan.

Documented: ``Plan.select``, ``can_implement``, ``workspace_size``, ``sku``, ``precision_guarantee``, ``run``; f16,
bf16, f32 and f64 to s8 and u8, ties to even, any axis; backward passes of quantize, dequantize and fake quantize;
per-token and per-group plans; symmetric dynamic range per token.
"""

import ml_dtypes
import numpy as np
import pytest

import detent as dt

from .tables import number, same_bits

DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float64": np.float64}
X = [0.25, 0.75, 1.25, -0.25, -0.75, 63.5, 100.0, -100.0]
# divided by 0.5, ties to even, clamped
STEPS = {"int8": [0, 2, 2, 0, -2, 127, 127, -128], "uint8": [128, 130, 130, 128, 126, 255, 255, 0]}
ZERO_POINT = {"int8": 0, "uint8": 128}


def channel_spec(format_: str, axis: int = 0) -> dt.QuantSpec:
    return dt.QuantSpec(format_, dt.PerAxis(axis), symmetric=False, convention="baracuda_channel")


def array(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


# ---- QuantizePerChannelPlan ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format_", STEPS)
def test_codes(dtype: str, format_: str) -> None:
    x = np.array([X], dtype=DTYPES[dtype])
    plan = dt.Plan.select("quantize", shape=x.shape, dtype=dtype, spec=channel_spec(format_))
    codes = np.empty(x.shape, dtype=format_)
    params = dt.QuantParams(channel_spec(format_), scale=[0.5], zero_point=[ZERO_POINT[format_]])
    plan.run(x, params, out=codes)
    assert codes.tolist() == [STEPS[format_]]


AXES = [(rank, axis) for rank in range(1, 6) for axis in range(rank)]


@pytest.mark.parametrize(("rank", "axis"), AXES)
def test_any_axis_of_any_rank(rank: int, axis: int) -> None:
    # 1.5 / 0.5 = 3, 1.5 / 1 -> 2, 1.5 / 2 = 0.75 -> 1; zero points 10, 20, 30
    shape = tuple(3 if i == axis else 2 for i in range(rank))
    spec = channel_spec("int8", axis)
    params = dt.QuantParams(spec, scale=array(0.5, 1.0, 2.0), zero_point=[10, 20, 30])
    plan = dt.Plan.select("quantize", shape=shape, dtype="float32", spec=spec)
    codes = np.empty(shape, np.int8)
    plan.run(np.full(shape, 1.5, np.float32), params, out=codes)
    expected = np.array([13, 22, 31], np.int8).reshape([3 if i == axis else 1 for i in range(rank)])
    assert np.array_equal(codes, np.broadcast_to(expected, shape))


def test_explicit_range() -> None:
    spec = channel_spec("int8").replace(qmin=-100, qmax=50)
    params = dt.QuantParams(spec, scale=[1.0], zero_point=[0])
    assert dt.quantize(np.array([[-128.0, 127.0]], np.float32), params).codes.tolist() == [[-100, 50]]


def test_empty_input_gives_empty_codes() -> None:
    plan = dt.Plan.select("quantize", shape=(2, 0), dtype="float32", spec=channel_spec("int8"))
    codes = np.empty((2, 0), np.int8)
    plan.run(np.empty((2, 0), np.float32), dt.QuantParams(channel_spec("int8"), scale=[1.0, 1.0]), out=codes)
    assert codes.shape == (2, 0)


@pytest.mark.parametrize("order", ["transposed", "reversed", "stepped"])
def test_any_strides(order: str) -> None:
    # baracuda supports only contiguous tensors
    x = np.arange(24, dtype=np.float32).reshape(4, 6) / 4
    view = {"transposed": x.T, "reversed": x[::-1, ::-1], "stepped": x[:, ::2]}[order]
    params = dt.QuantParams(channel_spec("int8"), scale=np.full(view.shape[0], 0.5), zero_point=3)
    assert np.array_equal(dt.quantize(view, params).codes, dt.quantize(view.copy(order="C"), params).codes)


# ---- the plan itself ----

SHAPE = (2, 3)
PLAN_SPEC = channel_spec("int8")
PARAMS = dt.QuantParams(PLAN_SPEC, scale=[1.0, 1.0])


def select(operation: str = "quantize", dtype: str = "float32") -> dt.Plan:
    return dt.Plan.select(operation, shape=SHAPE, dtype=dtype, spec=PLAN_SPEC)


def test_can_implement_what_fits() -> None:
    assert select().can_implement(np.zeros(SHAPE, np.float32), PARAMS, np.empty(SHAPE, np.int8))


@pytest.mark.parametrize(
    ("x", "params", "out"),
    [
        (np.zeros((3, 2), np.float32), PARAMS, np.empty(SHAPE, np.int8)),
        (np.zeros(SHAPE, np.float64), PARAMS, np.empty(SHAPE, np.int8)),
        (np.zeros(SHAPE, np.float32), PARAMS, np.empty((3, 2), np.int8)),
        (np.zeros(SHAPE, np.float32), PARAMS, np.empty(SHAPE, np.uint8)),
        (np.zeros(SHAPE, np.float32), dt.QuantParams(PLAN_SPEC, scale=[1.0] * 3), np.empty(SHAPE, np.int8)),
        (
            np.zeros(SHAPE, np.float32),
            dt.QuantParams(channel_spec("uint8"), scale=[1.0] * 2),
            np.empty(SHAPE, np.int8),
        ),
    ],
    ids=["input shape", "input type", "output shape", "output type", "scale shape", "other spec"],
)
def test_cannot_implement_what_does_not_fit(x: np.ndarray, params: dt.QuantParams, out: np.ndarray) -> None:
    assert not select().can_implement(x, params, out)


def test_no_workspace_is_needed() -> None:
    assert select().workspace_size == 0


def test_skus_tell_operations_apart() -> None:
    operations = ["quantize", "dequantize", "fake_quantize", "quantize_backward", "dequantize_backward"]
    assert len({select(operation).sku for operation in operations}) == len(operations)


def test_skus_tell_types_apart() -> None:
    assert len({select(dtype=dtype).sku for dtype in DTYPES}) == len(DTYPES)


@pytest.mark.parametrize("dtype", DTYPES)
def test_arithmetic_is_that_of_the_compute_type(dtype: str) -> None:
    expected = "float64" if dtype == "float64" else "float32"
    assert select(dtype=dtype).precision_guarantee.math == expected


def test_results_are_deterministic_and_bit_stable() -> None:
    guarantee = select().precision_guarantee
    assert guarantee.deterministic
    assert guarantee.bit_stable


def test_the_same_problem_gives_the_same_plan() -> None:
    assert select() == select()


def test_axis_out_of_range() -> None:
    with pytest.raises(dt.ShapeError):
        dt.Plan.select("quantize", shape=SHAPE, dtype="float32", spec=channel_spec("int8", 2))


def test_reversed_range() -> None:
    with pytest.raises(dt.SpecError):
        PLAN_SPEC.replace(qmin=10, qmax=-10)


def test_integer_input() -> None:
    with pytest.raises(dt.DtypeError):
        dt.Plan.select("quantize", shape=SHAPE, dtype="int8", spec=PLAN_SPEC)


def test_unknown_operation() -> None:
    with pytest.raises(dt.UnsupportedError):
        dt.Plan.select("gguf_mmvq", shape=SHAPE, dtype="float32", spec=PLAN_SPEC)


# ---- the other directions ----


def params_of(spec: str, scale: float = 0.5, zero_point: int = 0) -> dt.QuantParams:
    return dt.QuantParams(dt.QuantSpec.parse(spec), scale=scale, zero_point=zero_point)


def test_dequantize() -> None:
    codes = np.array([-128, 0, 3, 127], np.int8)
    y = dt.dequantize(codes, params_of("int8/tensor/affine/baracuda", 0.5, 3))
    assert same_bits(y, array(-65.5, -1.5, 0.0, 62.0))


def test_gradient_of_quantize_is_divided_by_the_scale() -> None:
    # g / 0.5 inside, 0 where 100 / 0.5 = 200 is clipped
    gx = dt.quantize_backward(array(3.0, 3.0), array(1.0, 100.0), params_of("int8/tensor/symmetric/baracuda"))
    assert same_bits(gx, array(6.0, 0.0))


def test_gradient_of_dequantize_is_multiplied_by_the_scale() -> None:
    assert same_bits(dt.dequantize_backward(array(3.0), params_of("int8/tensor/symmetric/baracuda")), array(1.5))


def test_gradient_of_fake_quantize_is_not_scaled() -> None:
    gx = dt.fake_quantize_backward(array(3.0, 3.0), array(1.0, 100.0), params_of("int8/tensor/symmetric/baracuda"))
    assert same_bits(gx, array(3.0, 0.0))


# ---- token and group ----


def test_dynamic_range_per_token() -> None:
    # absmax / 127 per row; a row of zeros has scale 1
    x = np.array([[127.0, 1.0], [0.0, 0.0], [-254.0, 3.0]], np.float32)
    assert dt.QuantParams.from_data("int8/token/symmetric/baracuda_token", x).scale.tolist() == [1.0, 1.0, 2.0]


def test_dynamic_range_codes() -> None:
    # 3 / 2 = 1.5 -> 2
    x = np.array([[127.0, 1.0], [0.0, 0.0], [-254.0, 3.0]], np.float32)
    params = dt.QuantParams.from_data("int8/token/symmetric/baracuda_token", x)
    assert dt.quantize(x, params).codes.tolist() == [[127, 1], [0, 0], [-127, 2]]


def test_groups_along_the_last_axis() -> None:
    x = np.array([[127.0, 0.0, 0.0, 254.0]], np.float32)
    assert dt.QuantParams.from_data("int8/group2/symmetric/baracuda_token", x).scale.tolist() == [[1.0, 2.0]]


def test_groups_may_be_ragged() -> None:
    # baracuda requires a divisible axis
    x = np.array([[127.0, 0.0, 254.0]], np.float32)
    assert dt.QuantParams.from_data("int8/group2/symmetric/baracuda_token", x).scale.tolist() == [[1.0, 2.0]]


def test_the_largest_element_of_a_token_gets_no_gradient() -> None:
    # exclusive bounds: codes -128 and 127 are outside
    x = np.array([[127.0, 1.0]], np.float32)
    params = dt.QuantParams.from_data("int8/token/symmetric/baracuda_token", x)
    assert same_bits(dt.fake_quantize_backward(np.ones_like(x), x, params), np.array([[0.0, 1.0]], np.float32))


# ---- what baracuda gets wrong ----


def test_float64_does_not_pass_through_float32() -> None:
    # 0.5 + 2^-40 is above the tie; as float32 it is the tie, which goes to 0
    params = dt.QuantParams(
        dt.QuantSpec.parse("int8/tensor/affine/baracuda_token"), scale=np.float64(1.0), zero_point=0
    )
    assert dt.quantize(np.array([0.5 + 2.0**-40]), params).codes.tolist() == [1]


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_an_impossible_scale_is_refused(scale: float) -> None:
    with pytest.raises(dt.ParamsError):
        params_of("int8/tensor/symmetric/baracuda", scale)


def test_nan_is_refused() -> None:
    with pytest.raises(dt.NaNError):
        dt.quantize(array(float("nan")), params_of("uint8/tensor/affine/baracuda", 0.5, 7))


def test_nan_can_become_the_zero_point() -> None:
    # baracuda does this by default
    q = dt.quantize(array(float("nan")), params_of("uint8/tensor/affine/baracuda", 0.5, 7), nan="zero_point")
    assert q.codes.tolist() == [7]


def test_float16_is_divided_in_float32() -> None:
    # 2.25 / 0.3 = 7.5 - 2.98e-7 in float32, below the tie; rounded to float16 the quotient would be 7.5 -> 8
    params = params_of("int8/tensor/symmetric/baracuda_channel", float(number("0.3")))
    assert dt.quantize(np.array([2.25], np.float16), params).codes.tolist() == [7]
