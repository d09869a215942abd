"""Native kernels use corrected quotients for scales in a range: tests at its ends, outside of it, and mixed."""

import numpy as np
import pytest

import detent as dt

ENDS = {"float16": 60, "bfloat16": 60, "float32": 60, "float64": 400}
FORMATS = ("int8", "uint8", "int4", "uint16", "int2", "float8_e4m3fn", "float4_e2m1fn", "nf4")


def nasty_scales(dtype: str, count: int, rng: np.random.Generator) -> np.ndarray:
    """Scales at and next to both ends of the range, and common scales, in the compute type."""
    compute = np.float64 if dtype == "float64" else np.float32
    ends = [compute(2.0**exponent) for exponent in (ENDS[dtype], -ENDS[dtype])]
    near = [np.nextafter(end, compute(side)) for end in ends for side in (0, np.inf)]
    ones = np.nextafter(compute(2), compute(0))  # a mantissa of all ones has the least exact inverse
    pool = np.array([*ends, *near, ones, ones / 128, compute(0.0123), compute(1)], compute)
    return rng.choice(pool, count)


def around_ties(scale: np.ndarray, codes: int, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Numbers at, next to and far beyond the midpoints between codes, zeros of both signs, and infinities."""
    middle = (rng.integers(-codes, codes, shape) + 0.5) * scale.astype(np.float64)
    x = middle.astype(scale.dtype)
    x = np.where(rng.random(shape) < 0.3, np.nextafter(x, np.inf, dtype=x.dtype), x)
    x = np.where(rng.random(shape) < 0.3, np.nextafter(x, -np.inf, dtype=x.dtype), x)
    special = np.array([0.0, -0.0, np.inf, -np.inf, 1e-45, -1e-45, 3e38, -3e38], x.dtype)
    return np.where(rng.random(shape) < 0.1, rng.choice(special, shape), x)


@pytest.mark.parametrize("granularity", ["axis0", "axis1", "group32", "tensor"])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", sorted(ENDS))
def test_same_bits_at_the_ends(dtype, name, granularity):
    rng = np.random.default_rng(len(name) + 7 * len(granularity))
    symmetric = None if name.startswith(("int", "float", "nf")) else False
    spec = dt.QuantSpec(name, granularity=granularity, symmetric=symmetric)
    shape = (24, 160)
    sets = spec.granularity.tiling(shape).scale_shape
    for turn in range(4):
        scale = nasty_scales(dtype, int(np.prod(sets)), rng).reshape(sets)
        zero = rng.choice([spec.qmin, spec.qmax, (spec.qmin + spec.qmax) // 2], sets) if symmetric is False else None
        params = dt.QuantParams(spec, scale=scale, zero_point=zero)
        each = {"axis0": scale[..., None], "group32": np.repeat(np.atleast_2d(scale), 32, axis=1)}.get(
            granularity, scale
        )
        with np.errstate(all="ignore"):
            x = around_ties(np.broadcast_to(each, shape), 2 ** min(spec.bits, 8), rng, shape).astype(dtype)
        x[turn, :8] = x.dtype.type(1)
        g = np.ones_like(x)
        native = [dt.quantize(x, params).codes, dt.fake_quantize(x, params), dt.fake_quantize_backward(g, x, params)]
        with dt.use_kernels("reference"):
            reference = [
                dt.quantize(x, params).codes,
                dt.fake_quantize(x, params),
                dt.fake_quantize_backward(g, x, params),
            ]
        for mine, theirs in zip(native, reference, strict=True):
            assert mine.tobytes() == theirs.tobytes()


@pytest.mark.parametrize("columns", [5, 100, 1024, 1030, 4096, 4100])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_inverses_are_those_of_the_row(columns, dtype):
    rng = np.random.default_rng(columns)
    x = rng.standard_normal((3, 5, columns)).astype(dtype)
    block = dt.QuantParams.from_data(dt.QuantSpec("int8", granularity=dt.PerBlock(2, 1)), x[0])
    axis = dt.QuantParams.from_data("int8/axis2", x)
    for data, params in ((x[0], block), (x, axis)):
        native = dt.fake_quantize(data, params), dt.quantize(data, params).codes, dt.quantize(data, params).dequantize()
        with dt.use_kernels("reference"):
            reference = (
                dt.fake_quantize(data, params),
                dt.quantize(data, params).codes,
                dt.quantize(data, params).dequantize(),
            )
        for mine, theirs in zip(native, reference, strict=True):
            assert mine.tobytes() == theirs.tobytes()
