import os
import pickle

import ml_dtypes
import numpy as np
import pytest

import detent as dt
from detent.checkpoint_files.tensor_source import ArrayTensor, SourceTensor, StoredTensor, TensorSource
from detent.errors import FileFormatError, ShapeError, UnsupportedError

VALUES = np.random.default_rng(0).normal(size=(6, 64)).astype(np.float32)


def stored(path, array, dtype, shape=None, **options):
    data = array.tobytes()
    path.write_bytes(b"head" * 2 + data)
    return StoredTensor("w", array.shape if shape is None else shape, dtype, path, 8, len(data), **options)


def test_rows_of_a_stored_tensor_equal_those_of_the_array(tmp_path):
    tensor = stored(tmp_path / "a", VALUES, "float32")
    assert np.array_equal(tensor.read(2, 5), VALUES[2:5])
    assert np.array_equal(tensor.dequantize(), VALUES)
    assert not tensor.read().flags.writeable


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn"])
def test_small_floats_dequantize_to_float32(tmp_path, dtype):
    array = VALUES.astype(getattr(ml_dtypes, dtype, dtype))
    tensor = stored(tmp_path / "a", array, dtype)
    assert tensor.dequantize(1, 3).dtype == np.float32
    assert np.array_equal(tensor.dequantize(1, 3), array[1:3].astype(np.float32))


def test_a_block_format_reads_bytes_and_dequantizes(tmp_path):
    tensor = dt.quantize(VALUES, "q4_0")
    source = stored(tmp_path / "a", tensor.packed, "q4_0", shape=VALUES.shape)
    assert source.read(4).shape == (2, 36)
    assert np.array_equal(source.read(4).reshape(-1), tensor[4:].packed)
    assert np.array_equal(source.dequantize(4), tensor[4:].dequantize())


def test_a_three_dimensional_block_tensor_keeps_its_shape(tmp_path):
    tensor = dt.quantize(VALUES.reshape(2, 3, 64), "q8_0")
    source = stored(tmp_path / "a", tensor.packed, "q8_0", shape=(2, 3, 64))
    assert source.read(1).shape == (1, 3, 68)
    assert np.array_equal(source.dequantize(1), tensor[1:].dequantize())


def test_scales_per_block_multiply_rows_from_any_start(tmp_path):
    codes = VALUES.astype(ml_dtypes.float8_e4m3fn)
    scales = np.arange(1, 7, dtype=np.float32).reshape(2, 3)  # blocks of 4 x 30: the last ones are shorter
    (tmp_path / "s").write_bytes(scales.tobytes())
    scale = StoredTensor("s", (2, 3), "float32", tmp_path / "s", 0, 24)
    tensor = stored(tmp_path / "a", codes, "float8_e4m3fn", scale=scale, scale_block=(4, 30))
    expected = codes.astype(np.float32) * np.repeat(np.repeat(scales, 4, 0)[:6], 30, 1)[:, :64]
    assert np.array_equal(tensor.dequantize(), expected)
    assert np.array_equal(tensor.dequantize(3, 6), expected[3:6])


def test_one_scale_multiplies_the_tensor(tmp_path):
    (tmp_path / "s").write_bytes(np.float32(0.5).tobytes())
    scale = StoredTensor("s", (), "float32", tmp_path / "s", 0, 4)
    tensor = stored(tmp_path / "a", VALUES.astype(ml_dtypes.float8_e5m2), "float8_e5m2", scale=scale)
    assert np.array_equal(tensor.dequantize(), VALUES.astype(ml_dtypes.float8_e5m2).astype(np.float32) / 2)


def test_a_tensor_without_axes_is_one_row(tmp_path):
    tensor = stored(tmp_path / "a", np.array(3.5, np.float32), "float32")
    assert tensor.read().shape == ()
    assert tensor.dequantize() == 3.5


def test_an_empty_tensor_reads_no_bytes(tmp_path):
    tensor = stored(tmp_path / "a", np.empty((0, 4), np.float32), "float32")
    assert tensor.read().shape == (0, 4)


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (0, 7), (3, 2)])
def test_rows_outside_the_tensor_raise(tmp_path, start, stop):
    with pytest.raises(ShapeError, match="within its 6 rows"):
        stored(tmp_path / "a", VALUES, "float32").read(start, stop)


def test_a_file_truncated_after_opening_raises(tmp_path):
    tensor = stored(tmp_path / "a", VALUES, "float32")
    tensor.read()
    os.truncate(tmp_path / "a", 100)
    with pytest.raises(FileFormatError, match="truncated after it was opened"):
        tensor.read()


def test_unknown_types_read_but_do_not_dequantize(tmp_path):
    tensor = stored(tmp_path / "a", np.zeros((2, 66), np.uint8), "iq2_xxs", shape=(2, 256))
    assert tensor.read(1).shape == (1, 66)
    with pytest.raises(UnsupportedError, match="iq2_xxs"):
        tensor.dequantize()


def test_tensors_can_be_pickled(tmp_path):
    tensor = stored(tmp_path / "a", VALUES, "float32")
    copy = pickle.loads(pickle.dumps(tensor))
    assert copy == tensor
    assert np.array_equal(copy.read(), VALUES)


def test_both_kinds_of_tensor_follow_the_protocol(tmp_path):
    assert isinstance(ArrayTensor("w", VALUES), SourceTensor)
    assert isinstance(stored(tmp_path / "a", VALUES, "float32"), SourceTensor)


def test_a_source_is_a_mapping_in_the_order_of_the_checkpoint():
    source = TensorSource([ArrayTensor("b", VALUES), ArrayTensor("a", VALUES)], config={"model_type": "llama"})
    assert list(source) == ["b", "a"]
    assert source.nbytes == 2 * VALUES.nbytes
    assert source.config == {"model_type": "llama"}
    assert "c" not in source
