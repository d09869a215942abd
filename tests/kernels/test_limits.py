"""Limits of kernels: thread counts, sizes, misaligned memory, NumPy integers, and operands in one list."""

import os
import subprocess
import sys
from threading import Thread

import numpy as np
import pytest

import detent as dt
from detent.kernels import native
from detent.kernels.settings import MAX_THREADS

P = dt.QuantParams(dt.QuantSpec("int8"), scale=0.0123)


@pytest.mark.parametrize("count", [MAX_THREADS + 1, 1 << 30, (1 << 31) - 1, 1 << 40])
def test_more_threads_than_there_can_be(count):
    before = dt.get_num_threads()
    with pytest.raises(dt.DetentError, match="threads"):
        dt.set_num_threads(count)
    assert dt.get_num_threads() == before


def test_as_many_threads_as_there_can_be():
    before, x = dt.get_num_threads(), np.linspace(-3, 3, 1 << 16, dtype=np.float32)
    expected = dt.fake_quantize(x, P)
    try:
        dt.set_num_threads(64)
        assert np.array_equal(dt.fake_quantize(x, P, out=np.full_like(x, 7)), expected)
    finally:
        dt.set_num_threads(before)


@pytest.mark.parametrize("value", ["0", "99999999999", "-3", "many", "2,1"])
def test_values_of_others_variables_are_no_error(value):
    clean = {key: text for key, text in os.environ.items() if key != "DETENT_NUM_THREADS"}
    code = "import detent; print(detent.get_num_threads())"
    run = [sys.executable, "-c", code]
    process = subprocess.run(
        run, env=clean | {"OMP_NUM_THREADS": value}, capture_output=True, text=True, check=True, timeout=60
    )
    assert int(process.stdout) >= 1


@pytest.mark.parametrize("operation", ["fake_quantize", "quantize", "dequantize_backward"])
@pytest.mark.parametrize("shape", [(1 << 61,), (1 << 60, 2), (1 << 57,), (1 << 31, 1 << 30)])
def test_sizes_beyond_memory_touch_none(operation, shape):
    plan = dt.Plan.select(operation, shape=shape, dtype="float64", spec="int8")
    empty = np.empty(0)
    assert plan.kernel.backend == "reference"
    assert not plan.can_implement(empty, P, out=empty)
    with pytest.raises((ValueError, MemoryError, OverflowError)):
        plan.run(empty, P, out=empty)


@pytest.mark.parametrize("offset", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_misaligned_memory(dtype, offset):
    size = np.dtype(dtype).itemsize
    x = np.frombuffer(bytearray(100 * size + offset), dtype, offset=offset)
    out = np.frombuffer(bytearray(100 * size + offset), dtype, offset=offset)
    x[:] = np.linspace(-3, 3, 100)
    expected = dt.fake_quantize(x.copy(), P)
    assert native.is_ready(x) == (offset % size == 0)
    assert np.array_equal(dt.fake_quantize(x, P, out=out), expected)
    assert np.array_equal(
        dt.fake_quantize_dynamic(x, "int8", out=out)[0], dt.fake_quantize_dynamic(x.copy(), "int8")[0]
    )
    assert np.array_equal(dt.quantize(x, P).codes, dt.quantize(x.copy(), P).codes)


@pytest.mark.parametrize("ste", ["identity", dt.ste.Clipped(on="value"), "hard_tanh"])
def test_stochastic_specs_run_natively_where_nothing_rounds(ste):
    spec = dt.QuantSpec("int8", rounding="stochastic(1)")
    with dt.use_kernels("native"):
        plan = dt.Plan.select("fake_quantize_backward", shape=(4,), dtype="float32", spec=spec, ste=ste)
        assert plan.kernel.backend == "native"
        assert dt.Plan.select("dequantize", shape=(4,), dtype="float32", spec=spec).kernel.backend == "native"
        with pytest.raises(dt.UnsupportedError, match="stochastic"):
            dt.Plan.select("fake_quantize_backward", shape=(4,), dtype="float32", spec=spec, ste="clipped")


@pytest.mark.parametrize("integer", [int, np.int8, np.uint8, np.int64])
def test_widths_and_counts_of_any_integer_type(integer):
    codes = np.arange(100, dtype=np.int8) % 7
    packed = dt.packing.pack(codes, integer(4))
    assert packed.size == dt.packing.packed_size(integer(100), integer(4)) == 50
    assert np.array_equal(dt.packing.unpack(packed, integer(4), integer(100)), codes)


def test_out_is_a_keyword_of_run():
    x = np.ones(3, np.float32)
    plan = dt.Plan.select("fake_quantize", shape=(3,), dtype="float32", spec="int8")
    with pytest.raises(dt.DtypeError, match="pass out as a keyword argument"):
        plan.run(x, P, np.empty_like(x))


def test_an_unhashable_policy_is_a_spec_error():
    with pytest.raises(dt.SpecError, match="NaN policy"):
        dt.quantize(np.ones(3, np.float32), P, nan=[])


def test_params_of_dynamic_quantization_cannot_be_written():
    _, params = dt.fake_quantize_dynamic(np.ones((2, 4), np.float32), "int8/token")
    base = params.scale
    while base is not None:
        assert not base.flags.writeable
        base = base.base


def test_bounds_in_any_order_of_memory():
    lo = -np.arange(1.0, 16.0).reshape(3, 5).T
    params = dt.QuantParams.from_range("int8/group4", lo, -lo)
    assert params.scale.flags.c_contiguous
    x = np.linspace(-9, 9, 60, dtype=np.float32).reshape(5, 12)
    with dt.use_kernels("reference"):
        expected = dt.fake_quantize(x, dt.QuantParams.from_range("int8/group4", lo, -lo))
    assert np.array_equal(dt.fake_quantize(x, params), expected)


def test_many_shapes_from_many_threads():
    """Four threads use one QuantParams with many shapes at the same time."""
    params, wrong = dt.QuantParams(dt.QuantSpec("int8"), scale=1.0), []

    def work():
        for size in list(range(1, 150)) * 3:
            if not np.array_equal(dt.fake_quantize(np.full(size, 2.25, np.float32), params), np.full(size, 2.0)):
                wrong.append(size)

    threads = [Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
