"""Native float8, float4 and nf4 equal the reference: every 16-bit input, every code, both sides of every midpoint."""

import numpy as np
import pytest

import detent as dt
from detent.kernels import Problem, native

from .twins import DTYPES, LEVELS, at, difference, dtype_of

FORMATS = ("float8_e4m3fn", "float8_e5m2", "float4_e2m1fn", "nf4")
OPERATIONS = ("quantize", "fake_quantize", "fake_quantize_backward", "quantize_backward")
SCALES = (0.0123, 1 / 3, 0.5, 1e-30, 7e20)
TILINGS = (
    (dt.PerTensor(), (40001,)),
    (dt.PerGroup(32), (33, 1001)),
    (dt.PerAxis(0), (7, 5001)),
    (dt.PerAxis(1), (700, 51)),
)


def need_kernel(operation, form, dtype="float32"):
    """Skip the test if there is no native kernel, and give the reason."""
    ste = dt.ste.Clipped() if operation.endswith("quantize_backward") else None
    policy = "raise" if operation == "quantize" else "propagate"
    tiling = dt.PerTensor().tiling((4,))
    why_not = native.refusal(Problem(operation, tiling, dtype, dt.QuantSpec(form), ste, policy))
    if why_not is not None:
        pytest.skip(why_not)


def both(operation, arrays, params, dtype, **options):
    """The difference between native and reference, or None."""
    results = []
    for kernels in ("native", "reference"):
        with dt.use_kernels(kernels):
            plan = dt.Plan.select(operation, shape=arrays[0].shape, dtype=dtype_of(dtype), spec=params.spec, **options)
            assert plan.kernel.backend == kernels
            result = plan.run(*arrays, params)
            results.append(result.view(np.uint8) if operation == "quantize" else result)
    return difference(*results)


def params_of(form, scale, dtype, granularity=dt.PerTensor()):
    return dt.QuantParams(
        dt.QuantSpec(form, granularity), np.asarray(scale, np.float64 if dtype == "float64" else np.float32)
    )


def beside_midpoints(form, scale, dtype):
    """Levels, their midpoints, and the adjacent numbers of each; also numbers out of range."""
    levels = np.array([float(level) for level in dt.formats.FORMATS[form].finite_levels])
    steps = np.concatenate([levels, (levels[1:] + levels[:-1]) / 2, [3 * levels[-1], 0.0]])
    steps = np.concatenate([steps, -steps])
    with np.errstate(all="ignore"):
        x = (steps * scale).astype(dtype_of(dtype))
        infinity = x.dtype.type(np.inf)
        return np.concatenate([x, np.nextafter(x, infinity), np.nextafter(x, -infinity)])


def inputs(operation, x):
    return [x[::-1].copy(), x] if operation.endswith("backward") else [x]


def policy(operation):
    return {"nan": "zero_point"} if operation == "quantize" else {}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_beside_midpoints(operation, form, dtype, level):
    need_kernel(operation, form, dtype)
    with at(level):
        for scale in SCALES:
            x = beside_midpoints(form, scale, dtype)
            params = params_of(form, scale, dtype)
            assert both(operation, inputs(operation, x), params, dtype, **policy(operation)) is None, scale


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_all_16_bit_floats(operation, form, dtype, level):
    need_kernel(operation, form, dtype)
    x = np.arange(1 << 16, dtype=np.uint16).view(dtype_of(dtype))
    with at(level):
        for scale in SCALES[:2]:
            params = params_of(form, scale, dtype)
            assert both(operation, inputs(operation, x), params, dtype, **policy(operation)) is None, scale


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMATS)
def test_all_codes(form, dtype, level):
    need_kernel("dequantize", form, dtype)
    spec = dt.QuantSpec(form)
    storage = dt.quantize(np.zeros(1, np.float32), dt.QuantParams(spec, np.float32(1))).codes.dtype
    codes = np.arange(1 << spec.bits, dtype=np.uint8).view(storage)
    with at(level):
        for scale in SCALES:
            assert both("dequantize", [codes], params_of(form, scale, dtype), dtype) is None, scale


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("granularity", "shape"), TILINGS, ids=str)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_granularities_and_threads(operation, form, granularity, shape, dtype):
    need_kernel(operation, form, dtype)
    rng = np.random.default_rng(0)
    scale = rng.choice([0.0123, 1 / 3, 0.5], size=granularity.tiling(shape).scale_shape)
    params = params_of(form, scale, dtype, granularity)
    x = rng.normal(scale=min(float(dt.formats.FORMATS[form].qmax) / 4, 1000), size=shape).astype(dtype_of(dtype))
    for threads in (1, 2, 3):
        with at(threads=threads):
            assert both(operation, inputs(operation, x), params, dtype) is None, threads


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_length(operation, form, level):
    need_kernel(operation, form)
    rng = np.random.default_rng(1)
    points = {dtype: rng.choice(beside_midpoints(form, 0.3, dtype), size=130) for dtype in DTYPES}
    with at(level):
        for size in range(131):
            dtype = DTYPES[(size + size // 16) % 4]  # together they cover every remainder of a vector
            arrays = inputs(operation, points[dtype][:size])
            assert both(operation, arrays, params_of(form, 0.3, dtype), dtype) is None, size
