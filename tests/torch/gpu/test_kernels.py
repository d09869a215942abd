"""GPU kernels in Triton's interpreter have the bits of the CPU kernels.

The interpreter computes with NumPy, so it shows wrong formulas, indices, masks and casts. It cannot show what a GPU
compiler does with a division or a product; ``test_kernel_code`` checks that.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from math import prod
from unittest import mock

import numpy as np
import pytest

import detent as dt

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="needs Triton: make test-gpu")

from interpreted import interpreted, large_programs, load_kernels  # noqa: E402
from tie_points import MAGNITUDES, differences, every_value, tie_points  # noqa: E402
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


# Points next to rounding boundaries


MANY_SHAPE = (16, 45, 91)  # one program of the interpreter
INTEGERS = [each.name for each in dt.formats.FORMATS.values() if each.is_integer]
OTHER_FORMATS = [each.name for each in dt.formats.FORMATS.values() if not each.is_integer]
# for the kernels, conventions with the same division and order of the zero point are equal
ARITHMETICS = {
    "divide": ("onnx", "torsh", "rlx", "baracuda_channel"),
    "reciprocal": ("torch", "torch_fused", "baracuda"),
    "before_round": ("compressed_tensors", "oxicuda", "entrenar", "baracuda_token"),
}


def test_conventions_differ_in_their_arithmetic_only() -> None:
    """What a convention changes in a kernel, besides the limits of codes, is the arithmetic."""
    kinds = {}
    for convention in dt.convention.PRESETS:
        spec = dt.QuantSpec("uint8", convention=convention, rounding="half_even")
        constants = launch._constants(spec, torch.float32, CLIPPED)
        kinds[convention] = tuple(value for name, value in constants.items() if name not in ("LOW", "HIGH"))
    assert sorted(kinds) == sorted(each for conventions in ARITHMETICS.values() for each in conventions)
    for conventions in ARITHMETICS.values():
        assert len({kinds[each] for each in conventions}) == 1
    assert len(set(kinds.values())) == len(ARITHMETICS)


def seed_of(*facts: object) -> int:
    return zlib.crc32(" ".join(map(str, facts)).encode())


def combined_spec(granularity: str, arithmetic: str, rounding: str, seed: int) -> dt.QuantSpec:
    """Make a spec of a convention and an integer format that the seed chooses."""
    rng = np.random.default_rng(seed)
    form, convention = rng.choice(INTEGERS), rng.choice(ARITHMETICS[arithmetic])
    symmetric = False if form.endswith("nt1") else (None, False)[rng.integers(2)]
    return dt.QuantSpec(str(form), granularity, symmetric=symmetric, convention=str(convention), rounding=rounding)


def count_differences(spec: dt.QuantSpec, dtype: str, magnitude: str, shape: tuple[int, ...] = MANY_SHAPE) -> Counter:
    seed = seed_of(spec, dtype, magnitude)
    step = seed % 7 if spec.rounding.kind == "stochastic" else 0
    case = tie_points(spec, shape, dtype, magnitude, seed, step)
    return differences(spec, case, ESTIMATORS[seed % len(ESTIMATORS)], step)


@pytest.mark.slow
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("magnitude", MAGNITUDES)
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_points_of_integers(
    dtype: str, granularity: str, magnitude: str, rounding: str, record_property: Callable[[str, object], None]
) -> None:
    """All tests of integers and other formats together compare 1.26 * 10^8 points."""
    with large_programs(prod(MANY_SHAPE)):
        for arithmetic in ARITHMETICS:
            seed = seed_of(dtype, granularity, magnitude, rounding, arithmetic)
            spec = combined_spec(granularity, arithmetic, rounding, seed)
            assert not count_differences(spec, dtype, magnitude), spec
    record_property("points", prod(MANY_SHAPE) * len(ARITHMETICS))


@pytest.mark.slow
@pytest.mark.parametrize("magnitude", MAGNITUDES)
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_points_of_other_formats(
    dtype: str, granularity: str, magnitude: str, record_property: Callable[[str, object], None]
) -> None:
    with large_programs(prod(MANY_SHAPE)):
        for form in OTHER_FORMATS:
            spec = dt.QuantSpec(form, granularity)
            assert not count_differences(spec, dtype, magnitude), spec
    record_property("points", prod(MANY_SHAPE) * len(OTHER_FORMATS))


@pytest.mark.slow
@pytest.mark.parametrize("magnitude", MAGNITUDES)
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("arithmetic", ARITHMETICS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_value_of_16_bits(
    dtype: str, arithmetic: str, rounding: str, magnitude: str, record_property: Callable[[str, object], None]
) -> None:
    convention = ARITHMETICS[arithmetic][0]
    spec = dt.QuantSpec("uint8", "axis0", symmetric=False, convention=convention, rounding=rounding)
    case = every_value(spec, 2, dtype, magnitude, seed_of(spec, dtype, magnitude))
    with large_programs(case.x.size):
        assert not differences(spec, case, CLIPPED)
    record_property("values", case.x.size)


@pytest.mark.parametrize("magnitude", MAGNITUDES)
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_points_of_one_spec(dtype: str, rounding: str, magnitude: str) -> None:
    spec = dt.QuantSpec("int16", "axis0", rounding=rounding)
    with large_programs(1 << 14):
        assert not count_differences(spec, dtype, magnitude, (16, 1024))


# Wrong kernels


INT16 = dt.QuantSpec("int16", "axis0")
# the source, its replacement, and the results that must differ
MUTANTS = {
    "reciprocal for divide": (
        "t = tl.math.div_rn(x, s)",
        "t = x * tl.math.div_rn(tl.full(s.shape, 1.0, tl.float32), s)",
        {"codes", "outputs", "masked outputs", "gradients of scales"},
    ),
    "half away for half even": ('if ROUNDING == "half_even":', 'if ROUNDING == "never":', {"codes", "outputs"}),
    "exclusive bounds": ("(value >= low)", "(value > low)", {"mask bytes", "gradients", "gradients by mask"}),
    "sums in another order": (
        "tl.reshape(terms, [ROWS, 2, COLUMNS >> (i + 1)]), 1,",
        "tl.reshape(terms, [ROWS, COLUMNS >> (i + 1), 2]), 2,",
        {"gradients of scales"},
    ),
    "infinity as the largest value": (' & (x < float("inf"))', "", {"maxima"}),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_kernel_is_seen(name: str) -> None:
    old, new, expected = MUTANTS[name]
    dtype = "float64" if name == "sums in another order" else "float32"  # rounding to float32 hides most orders
    case = tie_points(INT16, (16, 1024), dtype, "ordinary", 1)
    with interpreted(load_kernels(interpret=True, replace=(old, new))), large_programs(case.x.size):
        assert expected <= set(differences(INT16, case, CLIPPED))


def test_a_plain_cast_to_bfloat16_is_seen() -> None:
    replace = ("result = nearest.to(tl.int16)", "result = y.to(tl.bfloat16).to(tl.int16, bitcast=True)")
    case = every_value(INT16, 2, "bfloat16", "ordinary", 1)
    with interpreted(load_kernels(interpret=True, replace=replace)), large_programs(case.x.size):
        assert {"outputs", "values of codes"} <= set(differences(INT16, case, CLIPPED))
