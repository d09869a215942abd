"""Native packing equals reference packing, and packed codes dequantize to the same values as unpacked codes."""

import numpy as np
import pytest

import detent as dt
from detent.errors import DtypeError, FileFormatError, ShapeError
from detent.kernels import pack_bits, unpack_bits
from detent.packing import LAYOUTS as ORDERS
from detent.packing import pack, packed_size, unpack

from .layouts import LAYOUTS
from .twins import DTYPES, LEVELS, at, difference, dtype_of

BITS = range(1, 17)
LENGTHS = (*range(131), 4095, 4096, 4097)
INTEGERS = tuple(f"{sign}int{bits}" for bits in BITS for sign in ("", "u"))
OTHERS = ("float8_e4m3fn", "float8_e5m2", "float4_e2m1fn", "nf4")
TILINGS = (
    (dt.PerTensor(), (3, 1367)),
    (dt.PerAxis(0), (5, 331)),
    (dt.PerAxis(1), (61, 17)),
    (dt.PerGroup(7), (9, 131)),
    (dt.PerGroup(32), (3, 11, 41)),
)
LARGE = (dt.PerGroup(100), (5, 8001))


def some_codes(bits, signed, size, seed=0):
    """Codes of this bit width in their storage type, including the lowest and the highest code."""
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)
    codes = np.random.default_rng(seed).integers(low, high, size=size, endpoint=True)
    codes[:2] = [low, high][: codes[:2].size]
    return codes.astype(f"{'' if signed else 'u'}int{8 if bits <= 8 else 16}")


def assert_equal(codes, bits, signed):
    with dt.use_kernels("reference"):
        expected = pack(codes, bits)
        assert difference(unpack(expected, bits, codes.size, signed=signed), codes) is None
    with dt.use_kernels("native"):
        assert difference(pack(codes, bits), expected) is None, (bits, signed, codes.size)
        assert difference(unpack(expected, bits, codes.size, signed=signed), codes) is None, (bits, signed, codes.size)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("bits", BITS)
def test_every_length(bits, signed, level):
    with at(level):
        for size in LENGTHS:
            assert_equal(some_codes(bits, signed, size, size), bits, signed)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("bits", BITS)
def test_threads(bits, signed, threads):
    with at(threads=threads):
        for size in (32_767, 32_768, 40_000):
            assert_equal(some_codes(bits, signed, size), bits, signed)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("bits", BITS)
def test_every_code(bits, level):
    with at(level):
        for signed in (True, False):
            codes = np.arange(1 << bits) - (1 << (bits - 1) if signed else 0)
            assert_equal(codes.astype(some_codes(bits, signed, 0).dtype), bits, signed)


@pytest.mark.parametrize("bits", range(1, 9))
def test_only_the_low_bits_are_packed(bits):
    """Higher bits of a byte, a sign or garbage, are ignored."""
    codes = np.arange(256, dtype=np.uint8)
    with dt.use_kernels("reference"):
        expected = pack_bits(codes, bits)
    with dt.use_kernels("native"):
        assert difference(pack_bits(codes, bits), expected) is None
        assert difference(pack_bits(codes.view(np.int8), bits), expected) is None


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("signed", [True, False])
def test_padding_is_ignored(signed, bits):
    packed = np.full(5, 0xFF, np.uint8)
    count = (8 * packed.size - 1) // bits
    packed = packed[: packed_size(count, bits)]
    expected = np.full(count, -1 if signed else (1 << bits) - 1, np.int8 if signed else np.uint8)
    for kernels in ("native", "reference"):
        with dt.use_kernels(kernels):
            assert difference(unpack_bits(packed, bits, count, signed=signed), expected) is None


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("bits", [1, 3, 4, 8, 11, 16])
def test_layout_of_the_inputs(bits, layout):
    codes = LAYOUTS[layout](some_codes(bits, True, 7 * 37).reshape(7, 37))
    packed = pack(codes.copy(), bits)
    bytes_ = LAYOUTS[layout](packed) if "both" not in layout and layout != "broadcast" else packed
    for kernels in ("native", "reference"):
        with dt.use_kernels(kernels):
            assert difference(pack(codes, bits), packed) is None
            assert difference(unpack(bytes_, bits, codes.size, signed=True), codes.reshape(-1)) is None


@pytest.mark.parametrize("order", [name for name, row in ORDERS.items() if row.bits == 4])
def test_orders(order):
    for size in range(131):
        codes = some_codes(4, True, size, size)
        results = []
        for kernels in ("native", "reference"):
            with dt.use_kernels(kernels):
                packed = pack(codes, 4, order)
                results.append((packed, unpack(packed, 4, size, signed=True, layout=order)))
        assert difference(*results) is None
        assert difference(results[0][1], codes) is None


@pytest.mark.parametrize("kernels", ["native", "reference"])
def test_byte_strings_that_do_not_fit(kernels):
    with dt.use_kernels(kernels):
        for packed in (np.zeros(3, np.uint8), np.zeros(1, np.uint8), np.zeros(2, np.int8), np.zeros((2, 1), np.uint8)):
            with pytest.raises(FileFormatError, match=r"expected uint8 of shape \(2,\)"):
                unpack(packed, 3, 5)
        with pytest.raises(FileFormatError, match="must be zero"):
            unpack(np.array([0, 0x80], np.uint8), 3, 5)


# Packed codes


def packed_and_not(form, dtype, granularity, shape, seed=0):
    """Return the same tensor twice: with packed and with unpacked codes."""
    rng, format_ = np.random.default_rng(seed), dt.formats.FORMATS[form]
    symmetric = not format_.is_integer
    spec = dt.QuantSpec(form, granularity, symmetric=symmetric)
    sets = granularity.tiling(shape).scale_shape
    wide = np.float64 if dtype == "float64" else np.float32
    scale = rng.choice([0.0123, 1 / 3, 0.5, 2.0**-10], size=sets).astype(wide)
    zero_point = rng.integers(format_.qmin, format_.qmax, size=sets, endpoint=True) if not symmetric else None
    params = dt.QuantParams(spec, scale, zero_point)
    reach = float(format_.qmax) - float(format_.qmin)
    with np.errstate(over="ignore"):
        x = (rng.uniform(-reach, reach, size=shape) * 0.3).astype(dtype_of(dtype))
    out = np.full(packed_size(x.size, spec.bits), 0xA5, np.uint8)
    return dt.quantize(x, params, out=out), dt.quantize(x, params)


def assert_same_values(form, dtype, granularity, shape, seed=0):
    """Shapes have several axes, because a 1-D array with as many bytes as codes would count as unpacked codes."""
    packed, plain = packed_and_not(form, dtype, granularity, shape, seed)
    assert difference(packed.codes, plain.codes) is None
    with dt.use_kernels("reference"):
        expected = plain.dequantize()
        assert difference(packed.dequantize(), expected) is None, (form, dtype, shape)
    with dt.use_kernels("native"):
        assert difference(packed.dequantize(), expected) is None, (form, dtype, shape)
        assert difference(plain.dequantize(), expected) is None, (form, dtype, shape)


@pytest.mark.parametrize(("granularity", "shape"), TILINGS, ids=str)
@pytest.mark.parametrize("form", INTEGERS + OTHERS)
def test_dequantize_packed_codes(form, granularity, shape):
    for number, dtype in enumerate(DTYPES):
        with at(LEVELS[(number + shape[0]) % len(LEVELS)]):
            assert_same_values(form, dtype, granularity, shape)


@pytest.mark.parametrize("form", ["int1", "uint3", "int4", "uint7", "int8", "int11", "uint16", *OTHERS])
def test_dequantize_packed_codes_of_every_length(form):
    for size in range(131):
        with at(LEVELS[size % len(LEVELS)]):
            assert_same_values(form, DTYPES[size // 3 % 4], (dt.PerTensor(), dt.PerGroup(5))[size % 2], (1, size), size)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("form", ["int1", "uint3", "int4", "int6", "int8", "uint11", "int16", *OTHERS])
def test_dequantize_packed_codes_on_threads(form, threads):
    for dtype, level in zip(DTYPES, (*LEVELS, *LEVELS, *LEVELS, *LEVELS), strict=False):
        with at(level, threads):
            assert_same_values(form, dtype, *LARGE)


@pytest.mark.slow
@pytest.mark.parametrize("form", INTEGERS + OTHERS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("level", LEVELS)
def test_dequantize_every_packed_format_everywhere(level, dtype, form):
    for threads in (1, 2, 3):
        with at(level, threads):
            for granularity, shape in (*TILINGS, LARGE, (dt.PerTensor(), (1, 40_001)), (dt.PerAxis(-1), (9, 4100))):
                assert_same_values(form, dtype, granularity, shape)


@pytest.mark.parametrize("layout", ["offset by one", "every second", "backwards", "read-only", "not aligned"])
@pytest.mark.parametrize("form", ["uint3", "int4", "int8", "uint11", "float4_e2m1fn"])
def test_layout_of_packed_codes(form, layout):
    packed, plain = packed_and_not(form, "float32", dt.PerAxis(0), (5, 33))
    for kernels in ("native", "reference"):
        with dt.use_kernels(kernels):
            plan = dt.Plan.select("dequantize", shape=(5, 33), dtype="float32", spec=plain.spec)
            codes = LAYOUTS[layout](packed.packed)
            plan.check(codes, plain.params)
            assert difference(plan.run(codes, plain.params), plain.dequantize()) is None


@pytest.mark.parametrize("kernels", ["native", "reference"])
@pytest.mark.parametrize("form", ["int4", "uint4", "int8", "int11", "uint16", "float8_e4m3fn", "float4_e2m1fn", "nf4"])
def test_a_plan_takes_codes_packed_or_not(form, kernels):
    packed, plain = packed_and_not(form, "float32", dt.PerTensor(), (5, 33))
    size = packed.packed.size
    with dt.use_kernels(kernels):
        plan = dt.Plan.select("dequantize", shape=(5, 33), dtype="float32", spec=plain.spec)
        assert plan.kernel.backend == kernels
        assert plan.can_implement(packed.packed, plain.params)
        assert plan.can_implement(plain.codes, plain.params)
        assert difference(plan.run(packed.packed, plain.params), plan.run(plain.codes, plain.params)) is None
        for wrong in (size - 1, size + 1, 0):
            with pytest.raises((ShapeError, DtypeError)):
                plan.check(np.zeros(wrong, np.uint8), plain.params)
        for wrong in (np.zeros(size, np.int16), np.zeros(size, np.float32), np.zeros((size, 1), np.uint8), [0] * size):
            with pytest.raises((ShapeError, DtypeError)):
                plan.check(wrong, plain.params)
