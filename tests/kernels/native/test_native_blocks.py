"""Native kernels of block formats: equal to the reference kernels on every instruction set and number of threads."""

import numpy as np
import pytest

import detent as dt
from detent.kernels import encode_blocks, native

pytestmark = pytest.mark.skipif(native.WHY_NOT is not None, reason="there are no native kernels")
LEVELS = [name for name, supported in native.levels().items() if supported]


def data(rows, columns):
    rng = np.random.default_rng(rows)
    x = (rng.standard_t(3, (rows, columns)) * 0.05).astype(np.float32)
    x[rows // 2] = 0
    x[0, ::7] *= 100
    x[-1] = np.round(x[-1] * 40) / 40 * (rng.random(columns) < 0.5)
    return x, rng.chisquare(1, columns).astype(np.float32)


@pytest.fixture
def any_level():
    before = native.current_level()
    yield native.set_level
    native.set_level(before)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", list(dt.gguf.BLOCK_FORMATS))
def test_every_instruction_set_gives_the_bytes_of_the_reference(name, level, any_level):
    any_level(level)
    for rows in (1, 3, 17):
        x, importance = data(rows, 512)
        for weights in (None, importance):
            with dt.use_kernels("reference"):
                expected = dt.quantize(x, name, importance=weights, scales="keep")
                values = expected.dequantize()
            with dt.use_kernels("native"):
                q = dt.quantize(x, name, importance=weights, scales="keep")
                assert q.packed.tobytes() == expected.packed.tobytes()
                assert q.dequantize().tobytes() == values.tobytes()


@pytest.mark.parametrize("name", list(dt.gguf.BLOCK_FORMATS))
def test_threads_do_not_change_bytes(name):
    x, importance = data(77, 1024)
    before = dt.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 5):
            dt.set_num_threads(threads)
            q = dt.quantize(x, name, importance=importance, scales="keep")
            results.append((q.packed.tobytes(), q.dequantize().tobytes()))
    finally:
        dt.set_num_threads(before)
    assert len(set(results)) == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", list(dt.gguf.BLOCK_FORMATS))
def test_every_kernel_finds_numbers_that_are_not_finite(name, bad):
    x, importance = data(3, 512)
    for place in ((0, 0), (1, 31), (2, 511)):
        wrong = x.copy()
        wrong[place] = bad
        for weights in (None, importance):
            with dt.use_kernels("native"), pytest.raises(dt.DetentError, match=f"{place[0]}, {place[1]}"):
                dt.quantize(wrong, name, importance=weights, scales="keep")


def test_the_kernels_check_sizes():
    x, out = np.zeros((2, 256), np.float32), np.empty((2, 144), np.uint8)
    with pytest.raises(ValueError, match="out"):
        native.encode_blocks(12, x, None, out[:1])
    with pytest.raises(ValueError, match="unknown block format"):
        native.encode_blocks(1, x, None, out)
    with pytest.raises(ValueError, match="rows of whole blocks"):
        native.encode_blocks(12, x[:, :100].copy(), None, out)
    with pytest.raises(ValueError, match="importance"):
        native.encode_blocks(12, x, np.ones(7, np.float32), out)
    with pytest.raises(ValueError, match="out"):
        native.decode_blocks(12, out, np.empty((1, 256), np.float32))


@pytest.mark.parametrize("name", list(dt.gguf.BLOCK_FORMATS))
def test_kernels_tell_which_data_need_a_check_of_scales(name):
    form = dt.gguf.get_block_format(name)
    x = np.random.default_rng(0).normal(size=(6, 1024)).astype(np.float32)
    out = np.empty((6, form.row_bytes(1024)), np.uint8)
    lowest = 1e-39 if name == "gguf.mxfp4" else 1e-30
    highest = 3e38  # mxfp4 can represent it, but its byte is that of a tiny block
    with dt.use_kernels("native"):
        assert encode_blocks(form, x, None, out) == (True, False)
        for value in (lowest, highest):
            for row in (0, 5):
                other = x.copy()
                other[row, 512:768] = value
                assert encode_blocks(form, other, None, out) == (True, True)
