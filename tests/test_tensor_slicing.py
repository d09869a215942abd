"""Slicing: a slice has the scales of its elements."""

import numpy as np
import pytest

import detent as dt
from detent.tensor import complete_slices, slice_params

ALL = slice(None)


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        (slice(1, 2), (slice(1, 2), ALL, ALL)),
        ((slice(1, 2), slice(0, 1)), (slice(1, 2), slice(0, 1), ALL)),
        (..., (ALL, ALL, ALL)),
        ((..., slice(3)), (ALL, ALL, slice(3))),
        ((slice(3), ..., slice(4)), (slice(3), ALL, slice(4))),
        ((slice(1), slice(2), slice(3), ...), (slice(1), slice(2), slice(3))),
        ((), (ALL, ALL, ALL)),
    ],
)
def test_complete_slices(index, expected):
    assert complete_slices(index, (5, 4, 3)) == expected


def params(spec, shape):
    count = dt.QuantSpec.parse(spec).granularity.tiling(shape)
    scale = 1.0 + np.arange(count.sets).reshape(count.scale_shape)
    return dt.QuantParams.from_range(spec, -scale, 2 * scale)


@pytest.mark.parametrize(
    ("spec", "slices", "part"),
    [
        ("uint8/tensor", (slice(1, 3), slice(0, 0)), ...),
        ("uint8/axis0", (slice(None, None, -2), slice(1, 2)), slice(None, None, -2)),
        ("uint8/axis1", (slice(0, 1), slice(1, 7, 3)), slice(1, 7, 3)),
        ("uint8/token", (slice(1, 3), slice(0, 5)), slice(1, 3)),
        ("uint8/group4", (slice(1, 3), slice(4, 10)), (slice(1, 3), slice(1, 3))),
        ("uint8/group4", (ALL, slice(8, None)), (ALL, slice(2, 3))),
        ("uint8/group4", (ALL, slice(4, 4)), (ALL, slice(0, 0))),
        ("uint8/group2@0", (slice(2, 4), slice(None, None, 3)), (slice(1, 2), slice(None, None, 3))),
        ("uint8/group1", (ALL, slice(None, None, -1)), (ALL, slice(None, None, -1))),
        ("uint8/block2x4", (slice(2, 5), slice(0, 8)), (slice(1, 3), slice(0, 2))),
    ],
)
def test_slice_params(spec, slices, part):
    whole = params(spec, (5, 10))
    cut = slice_params(whole, (5, 10), slices)
    for name in ("scale", "zero_point", "min_val", "max_val"):
        assert np.array_equal(getattr(cut, name), getattr(whole, name)[part]), name
    assert cut.spec == whole.spec


def test_both_levels_of_nvfp4_are_kept():
    whole = params("nvfp4", (5, 40))
    cut = slice_params(whole, (5, 40), (slice(1, 3), slice(16, 40)))
    assert cut.tensor_scale == whole.tensor_scale
    assert np.array_equal(cut.block_scale, whole.block_scale[1:3, 1:3])
    cut.validate()


FORMATS = ("int8", "uint8", "int16", "int4", "uint4", "int2", "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn", "nf4")


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("spec", [*FORMATS, "mxfp4/tensor", "mxfp8/tensor", "mxfp8_e5m2/tensor", "nvfp4/tensor"])
@pytest.mark.parametrize("index", [(), ..., (...,)], ids=str)
def test_a_slice_of_a_0d_tensor_is_the_tensor(spec, dtype, index):
    x = np.asarray(0.7, dtype)
    whole = dt.quantize(x, dt.QuantParams.from_data(spec, x))
    part = whole[index]
    assert part == whole
    assert hash(part) == hash(whole)
    assert type(part.codes) is np.ndarray and not part.codes.flags.writeable  # noqa: PT018 - one fact
    assert part.packed.tobytes() == whole.packed.tobytes()
    assert part.dequantize().tobytes() == whole.dequantize().tobytes()
