"""GPU kernels in Triton's interpreter have the bits of the CPU kernels.

The interpreter computes with NumPy, so it shows wrong formulas, indices, masks and casts. It cannot show what a GPU
compiler does with a division or a product; ``test_kernel_code`` checks that.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from types import ModuleType
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import detent as dt

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="needs Triton: make test-gpu")

from interpreted import interpreted, load_kernels  # noqa: E402
from torch_bits import array, assert_same, make_case, tensor  # noqa: E402

from detent import kernels  # noqa: E402
from detent.kernels.reference.operators import gradient_factor  # noqa: E402
from detent.torch import traced_namespace as xp  # noqa: E402
from detent.torch.gpu import launch  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of overflows in the interpreter

DTYPES = ("float16", "bfloat16", "float32", "float64")
FORMATS = ("int2", "int4", "int8", "uint8", "int16", "uint16", "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn", "nf4")
CONVENTIONS = ("onnx", "torch", "compressed_tensors", "oxicuda", "entrenar", "baracuda_token")
GRANULARITIES = (
    "tensor",
    "axis0",
    "axis1",
    "axis-1",
    "token",
    "group5",
    "group32",
    "group2@0",
    "block2x4",
    "block3x2x5",
)
ROUNDINGS = ("half_even", "half_away", "floor", "stochastic(81985529216486895)")
ESTIMATORS = (
    dt.ste.Identity(),
    dt.ste.Clipped(),
    dt.ste.Clipped(on="value"),
    dt.ste.Clipped(bounds="exclusive"),
    dt.ste.Clipped(on="value", bounds="exclusive"),
)
CLIPPED = dt.ste.Clipped()
SHAPE = (3, 5, 46)


@pytest.fixture(autouse=True, scope="module")
def _interpreted() -> Iterator[None]:
    with interpreted():
        yield


def spec_of(
    form: str, granularity: str = "tensor", convention: str = "onnx", rounding: str | None = None
) -> dt.QuantSpec:
    integer = dt.formats.FORMATS[form].is_integer
    return dt.QuantSpec(
        form, granularity, symmetric=not integer, convention=convention, rounding=rounding if integer else None
    )


def check(
    spec: dt.QuantSpec, dtype: str, shape: tuple[int, ...] = SHAPE, ste: dt.ste.Estimator = ESTIMATORS[1]
) -> None:
    """Compare every operation with its CPU kernel."""
    case = make_case(spec, shape, dtype)
    x, g, s, z = map(tensor, (case.x, case.g, case.params.scale, case.params.zero_point))
    step = 5 if spec.rounding.kind == "stochastic" else 0
    assert_same(launch.fake_quantize(x, s, z, spec, step), dt.fake_quantize(case.x, case.params, step=step))
    for fill in ("zero_point", "qmin"):
        expected = dt.quantize(case.x, case.params, nan=fill, step=step)
        codes = launch.quantize(x, s, z, spec, fill, step)
        raw = np.ascontiguousarray(expected.codes)
        assert array(codes).tobytes() == raw.tobytes()
        assert_same(launch.dequantize(codes, s, z, spec, x.dtype), expected.dequantize())
    gradient = dt.fake_quantize_backward(case.g, case.x, case.params, ste=ste, step=step)
    assert_same(launch.fake_quantize_backward(g, x, s, z, spec, ste, step), gradient)
    y, mask = dt.fake_quantize_masked(case.x, case.params, ste=ste, step=step)
    ours, bits, order = launch.fake_quantize_masked(x, s, z, spec, ste, step)
    assert_same(ours, y)
    assert bits.numpy().tobytes() == np.asarray(mask).tobytes()
    assert_same(launch.masked_backward(g, bits, order), gradient)
    for got, bound in zip(launch.minmax(x, spec), kernels.minmax(case.x, spec.granularity.tiling(shape)), strict=False):
        assert_same(got, bound)
    check_learned(spec, dtype, shape, ste, step)


def check_learned(spec: dt.QuantSpec, dtype: str, shape: tuple[int, ...], ste: dt.ste.Estimator, step: int) -> None:
    case = make_case(spec, shape, dtype, nasty=False)
    case.x.reshape(-1)[0] = np.nan
    x, g, s, z = map(tensor, (case.x, case.g, case.params.scale, case.params.zero_point))
    factor = gradient_factor(xp, spec, spec.granularity.tiling(shape), None, s)
    learned = launch.fake_quantize_learned_backward(g, x, s, z, spec, ste, factor, step)
    expected = dt.fake_quantize_learned_backward(case.g, case.x, case.params, ste=ste, step=step)
    for got, theirs in zip(learned, expected, strict=True):
        assert_same(got, theirs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMATS)
def test_formats(form: str, dtype: str) -> None:
    check(spec_of(form, "axis1"), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("convention", CONVENTIONS)
def test_conventions(convention: str, dtype: str) -> None:
    check(spec_of("uint8", "token", convention), dtype)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_granularities(granularity: str) -> None:
    check(spec_of("int4", granularity), "float32")
    check(spec_of("nf4", granularity), "bfloat16")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_roundings(rounding: str, dtype: str) -> None:
    check(spec_of("uint8", "group5", rounding=rounding), dtype)
    check(spec_of("int4", "axis0", "compressed_tensors", rounding), dtype)


@pytest.mark.parametrize("ste", ESTIMATORS, ids=str)
@pytest.mark.parametrize("form", ["uint8", "float8_e4m3fn"])
def test_estimators(form: str, ste: dt.ste.Estimator) -> None:
    for dtype in ("float32", "bfloat16"):
        check(spec_of(form, "axis-1"), dtype, ste=ste)


@pytest.mark.parametrize("shape", [(1,), (8,), (1023,), (1025,), (5000,), (2, 3000), (3000, 2), ()])
def test_sizes(shape: tuple[int, ...]) -> None:
    check(spec_of("uint8"), "float32", shape)
    if len(shape) == 2:
        check(spec_of("int8", "axis0"), "float16", shape)
        check(spec_of("int8", "axis1"), "float16", shape)


def test_positions_in_int64() -> None:
    """Large arrays compute positions in int64; here, every array does."""
    with mock.patch.object(launch, "LONG_INDEX", 0):
        launch._call.cache_clear()
        for granularity in ("tensor", "axis1", "group5", "block2x4"):
            check(spec_of("uint8", granularity), "float32")
    launch._call.cache_clear()


# Memory orders


@pytest.mark.parametrize("granularity", ["tensor", "axis0", "axis1", "token", "group5"])
def test_memory_orders(granularity: str) -> None:
    spec = spec_of("uint8", granularity)
    case = make_case(spec, (4, 6, 5, 7), "float32")
    params, s, z = case.params, tensor(case.params.scale), tensor(case.params.zero_point)
    x, g = tensor(case.x), tensor(case.g)
    expected = dt.fake_quantize(case.x, params), dt.fake_quantize_backward(case.g, case.x, params)
    wide = torch.zeros(4, 6, 5, 14)
    strided = wide[..., ::2].copy_(x)
    for data in (x, x.to(memory_format=torch.channels_last), x.mT.contiguous().mT, strided):
        y = launch.fake_quantize(data, s, z, spec)
        assert_same(y, expected[0])
        if data is not strided and granularity in ("tensor", "axis0", "axis1"):
            assert y.stride() == data.stride()
        assert_same(launch.fake_quantize_backward(g, data, s, z, spec, dt.ste.Clipped()), expected[1])


def test_an_expanded_gradient() -> None:
    spec = spec_of("int8")
    x = torch.linspace(-2, 2, 100).reshape(10, 10)
    s, z = torch.tensor(0.01), torch.tensor(0, dtype=torch.int32)
    gx = launch.fake_quantize_backward(torch.tensor(2.0).expand(10, 10), x, s, z, spec, dt.ste.Clipped())
    params = dt.QuantParams(spec, 0.01)
    assert_same(gx, dt.fake_quantize_backward(np.full((10, 10), 2.0, np.float32), x.numpy(), params))


# Many points


def many_points(spec: dt.QuantSpec, dtype: str, magnitude: str, seed: int) -> tuple[NDArray, dt.QuantParams]:
    """Make 2^20 values within two ulps of ties, for 64 scales; or, for 16-bit dtypes, every value for 16 scales."""
    rng = np.random.default_rng(seed)
    wide = np.float64 if dtype == "float64" else np.float32
    # for 16-bit data, extreme scales are those that the data can reach
    exponents = {"ordinary": (-9, 1), "tiny": (-126, -118), "huge": (98, 110)}
    if dtype == "float16":
        exponents |= {"tiny": (-24, -16), "huge": (6, 15)}
    if dtype == "float64":
        exponents |= {"tiny": (-1022, -1010), "huge": (980, 1000)}
    scale = np.ldexp(rng.uniform(1, 2, size=64), rng.integers(*exponents[magnitude], size=64)).astype(wide)
    zero = np.zeros(64, np.int32) if spec.symmetric else rng.integers(spec.qmin, spec.qmax, 64, np.int32, endpoint=True)
    if dtype in ("float16", "bfloat16"):
        values = np.arange(65536, dtype=np.uint16).view(dtype if dtype == "float16" else ml_dtypes.bfloat16)
        return np.tile(values, (16, 1)), dt.QuantParams(spec, scale[:16], zero[:16])
    low, high = spec.qmin - zero[:, None] - 3, spec.qmax - zero[:, None] + 3
    ties = np.floor(rng.random((64, 16384)) * (high - low)) + low + 0.5
    with np.errstate(all="ignore"):
        x = (ties * scale[:, None].astype(np.float64)).astype(wide)
        bits = x.view(f"i{x.itemsize}") + rng.integers(-2, 3, size=x.shape)
    return bits.astype(f"i{x.itemsize}").view(wide), dt.QuantParams(spec, scale, zero)


MANY = [
    ("int8", "onnx", None),
    ("uint8", "onnx", None),
    ("int16", "onnx", None),
    ("int16", "torch", None),
    ("uint8", "torch", None),
    ("uint16", "compressed_tensors", None),
    ("uint8", "oxicuda", None),
    ("uint4", "baracuda_token", None),
    ("int16", "onnx", "floor"),
    ("int16", "onnx", "half_away"),
    ("uint8", "compressed_tensors", "floor"),
    ("int1", "torsh", None),
]


def count_differences(spec: dt.QuantSpec, x: NDArray, params: dt.QuantParams) -> tuple[int, int]:
    """Count the differing codes, and the differing outputs and mask bits."""
    data, s, z = map(tensor, (x, params.scale, params.zero_point))
    with mock.patch.object(launch, "BLOCK", 1 << 17):  # the interpreter is faster with few large blocks
        launch._call.cache_clear()
        codes = array(launch.quantize(data, s, z, spec, "qmin"))
        y, mask, _ = launch.fake_quantize_masked(data, s, z, spec, dt.ste.Clipped())
    launch._call.cache_clear()
    expected, bits = dt.fake_quantize_masked(x, params, ste=dt.ste.Clipped())
    kind = f"u{x.itemsize}"
    same = (array(y).view(kind) == np.ascontiguousarray(expected).view(kind)) | (np.isnan(x) & np.isnan(array(y)))
    wrong_bits = np.unpackbits(mask.numpy() ^ np.asarray(bits)).sum()
    wrong_codes = (codes != dt.quantize(x, params, nan="qmin").codes).sum()
    return int(wrong_codes), int((~same).sum() + wrong_bits)


@pytest.mark.slow
@pytest.mark.parametrize("magnitude", ["ordinary", "tiny", "huge"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("form", "convention", "rounding"), MANY)
def test_many_points(form: str, convention: str, rounding: str | None, dtype: str, magnitude: str) -> None:
    """All tests together compare more than 10^8 points next to ties, or with every 16-bit value."""
    symmetric = False if form == "int1" else None
    spec = dt.QuantSpec(form, "axis0", symmetric=symmetric, convention=convention, rounding=rounding)
    seed = zlib.crc32(f"{spec} {dtype} {magnitude}".encode())
    assert count_differences(spec, *many_points(spec, dtype, magnitude, seed)) == (0, 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_points_of_one_spec(dtype: str) -> None:
    spec = dt.QuantSpec("int16", "axis0")
    x, params = many_points(spec, dtype, "ordinary", 0)
    assert count_differences(spec, np.ascontiguousarray(x[:, ::32]), params) == (0, 0)


# Wrong kernels


MUTANTS = {
    "reciprocal for divide": (
        "t = tl.math.div_rn(x, s)",
        "t = x * tl.math.div_rn(tl.full(s.shape, 1.0, tl.float32), s)",
    ),
    "half away for half even": ('if ROUNDING == "half_even":', 'if ROUNDING == "never":'),
    "zero point before rounding": ("if BEFORE:", "if not BEFORE:"),
    "exclusive bounds": ("(value >= low)", "(value > low)"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_kernel_is_seen(name: str) -> None:
    spec = dt.QuantSpec("int16", "axis0")
    x, params = many_points(spec, "float32", "ordinary", 1)
    with interpreted(_mutant(*MUTANTS[name])):
        assert sum(count_differences(spec, x[:, :2048].copy(), params)) > 0


def test_a_plain_cast_to_bfloat16_is_seen() -> None:
    mutant = _mutant("result = nearest.to(tl.int16)", "result = y.to(tl.bfloat16).to(tl.int16, bitcast=True)")
    spec = dt.QuantSpec("int16", "axis0")
    x, params = many_points(spec, "bfloat16", "ordinary", 1)
    with interpreted(mutant):
        assert count_differences(spec, x[:2].copy(), dt.QuantParams(spec, params.scale[:2]))[1] > 0


def _mutant(old: str, new: str) -> ModuleType:
    return load_kernels(interpret=True, replace=(old, new))
