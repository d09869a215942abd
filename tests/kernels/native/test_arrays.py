"""Native equals reference on arrays of every length and layout."""

import numpy as np
import pytest

import detent as dt

from .layouts import LAYOUTS
from .twins import DTYPES, ESTIMATORS, LEVELS, OPERATIONS, Trial, at, difference, native_result, reference_result

# Lengths next to the size of a chunk (1024), of a part (4096), and to 2^15, where kernels use several threads.
EDGES = (1023, 1024, 1025, 2049, 4095, 4096, 4097, 8191, 8193, 32767, 32768, 32769, 36863, 36865)


def variety(number):
    """Return rules that change with the number, so that the lengths together cover all rules."""
    return {
        "format": ("int8", "uint4", "int16", "uint8", "int3", "uint1")[number % 6],
        "convention": ("onnx", "torch", "compressed_tensors", "oxicuda", "torsh", "baracuda_token")[number // 6 % 6],
        "seed": number,
    }


def with_estimator(operation, number):
    return list(ESTIMATORS.values())[number % len(ESTIMATORS)] if operation.endswith("quantize_backward") else None


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_length(operation, dtype, level):
    with at(level):
        for size in range(131):
            trial = Trial(operation, dtype, shape=(size,), ste=with_estimator(operation, size), **variety(size))
            mismatch = difference(native_result(trial), reference_result(trial))
            assert mismatch is None, (size, mismatch, trial)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(
    "granularity",
    [dt.PerAxis(0), dt.PerAxis(1), dt.PerToken(), dt.PerGroup(3), dt.PerGroup(32), dt.PerGroup(2, axis=0)],
    ids=str,
)
def test_every_length_of_rows(granularity, operation, level):
    with at(level):
        for size in range(0, 131, 3):
            dtype = DTYPES[size % 4]
            rules = variety(size)
            trial = Trial(operation, dtype, granularity, (3, size), ste=with_estimator(operation, size), **rules)
            mismatch = difference(native_result(trial), reference_result(trial))
            assert mismatch is None, (size, mismatch, trial)


@pytest.mark.parametrize("size", EDGES)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_lengths_at_the_edges_of_chunks_and_parts(operation, size):
    trial = Trial(operation, DTYPES[size % 4], shape=(size,), ste=with_estimator(operation, size), **variety(size))
    with at(threads=3):
        assert difference(native_result(trial), reference_result(trial)) is None


@pytest.mark.parametrize("granularity", [dt.PerGroup(32), dt.PerGroup(1000)], ids=str)
@pytest.mark.parametrize("size", EDGES)
def test_sets_at_the_edges_of_chunks_and_parts(granularity, size):
    trial = Trial("fake_quantize", DTYPES[size % 4], granularity, (size,), **variety(size))
    with at(threads=3):
        assert difference(native_result(trial), reference_result(trial)) is None


@pytest.mark.parametrize("form", [f"{sign}int{bits}" for bits in range(1, 9) for sign in ("", "u")])
def test_packed_output(form):
    for size in (*range(1, 131, 2), *EDGES):
        # Two axes: a 1-D array of as many bytes as elements would be unpacked codes.
        trial = Trial("quantize", DTYPES[size % 4], shape=(1, size), format=form, seed=size)
        expected = dt.packing.pack(reference_result(trial), trial.params.spec.bits)
        out = np.full(expected.shape, 0xA5, np.uint8)
        with at(LEVELS[size % len(LEVELS)]):
            native_result(trial, out=out)
        assert difference(out, expected) is None, size


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_layout_of_the_inputs(operation, layout, dtype):
    trial = Trial(operation, dtype, dt.PerAxis(0), (7, 37), ste=with_estimator(operation, len(layout)))
    arrays = [LAYOUTS[layout](getattr(trial, name)) for name in trial.inputs]
    same = [np.array(array, order="C") for array in arrays]
    assert difference(native_result(trial, arrays), reference_result(trial, same)) is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["offset by one", "backwards", "transposed", "not aligned", "every second"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_layout_of_the_output(operation, layout, dtype):
    trial = Trial(operation, dtype, dt.PerGroup(5), (7, 37), ste=with_estimator(operation, len(layout)))
    expected = reference_result(trial)
    out = LAYOUTS[layout](np.zeros_like(expected))
    assert native_result(trial, out=out) is out
    assert difference(out, expected) is None


@pytest.mark.parametrize("operation", OPERATIONS)
def test_nothing_beside_the_output_changes(operation):
    trial = Trial(operation, "float32", dt.PerTensor(), (5, 33))
    around = np.full((7, 70), 77).astype(reference_result(trial).dtype)
    out = around[1:6, 3:69:2]
    native_result(trial, out=out)
    out[...] = 77
    assert (around == 77).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_zero_dimensions(operation, dtype):
    for seed in range(8):
        trial = Trial(operation, dtype, shape=(), seed=seed)
        assert difference(native_result(trial), reference_result(trial)) is None


@pytest.mark.parametrize(
    ("granularity", "shape"),
    [
        (dt.PerTensor(), (0,)),
        (dt.PerTensor(), (3, 0, 2)),
        (dt.PerAxis(0), (0, 4)),
        (dt.PerAxis(0), (4, 0)),
        (dt.PerAxis(1), (0, 4)),
        (dt.PerToken(), (4, 0)),
        (dt.PerToken(), (0, 4)),
        (dt.PerGroup(3), (2, 0)),
        (dt.PerBlock(2, 2), (0, 5)),
        (dt.PerBlock(2, 2), (5, 0)),
    ],
    ids=str,
)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_empty(operation, granularity, shape):
    trial = Trial(operation, "float32", granularity, shape)
    assert difference(native_result(trial), reference_result(trial)) is None


@pytest.mark.parametrize(
    ("granularity", "shape"),
    [
        (dt.PerAxis(2), (2, 3, 4, 5, 6)),
        (dt.PerBlock(2, 3, 2), (3, 4, 5, 3, 7)),
        (dt.PerGroup(2, axis=1), (3, 5, 2, 2, 3, 2)),
        (dt.PerGroup(7, axis=-2), (2, 3, 15, 4)),
        (dt.PerBlock(2, 2, 2, 2, 2, 2, 2), (3, 3, 3, 3, 3, 3, 3)),
        (dt.PerAxis(1), (1, 1, 9)),
        (dt.PerToken(), (1, 1, 1)),
    ],
    ids=str,
)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_many_axes(operation, granularity, shape):
    trial = Trial(operation, "float32", granularity, shape)
    assert difference(native_result(trial), reference_result(trial)) is None
