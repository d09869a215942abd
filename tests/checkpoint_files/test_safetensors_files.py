import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from detent.checkpoint_files.safetensors_files import open_safetensors
from detent.errors import FileFormatError

VALUES = np.random.default_rng(0).normal(size=(6, 8)).astype(np.float32)
DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "float8_e4m3fn": "F8_E4M3", "int64": "I64"}


def write(path, arrays, change=lambda header: header, tail=b""):
    """Write a file as other tools do, so that a test can damage its header."""
    header, body = {}, b""
    for name, array in arrays.items():
        data = array.tobytes()
        span = [len(body), len(body) + len(data)]
        header[name] = {"dtype": DTYPES[array.dtype.name], "shape": list(array.shape), "data_offsets": span}
        body += data
    text = json.dumps(change(header)).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + body + tail)
    return path


def write_index(directory, weight_map):
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.fixture
def sharded(tmp_path):
    write(tmp_path / "model-1.safetensors", {"a": VALUES})
    write(tmp_path / "model-2.safetensors", {"b": VALUES + 1})
    write_index(tmp_path, {"a": "model-1.safetensors", "b": "model-2.safetensors"})
    return tmp_path


def test_files_of_the_safetensors_library_are_read(tmp_path):
    save_file({"w": VALUES, "h": VALUES.astype(np.float16)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    source = open_safetensors(tmp_path)
    assert np.array_equal(source["w"].read(), VALUES)
    assert source["h"].dtype == "float16"
    assert source.metadata == {"format": "pt"}
    assert source.config is None


def test_all_shards_of_an_index_are_one_source(sharded):
    (sharded / "unrelated.safetensors").write_bytes(b"not read")
    (sharded / "config.json").write_text('{"model_type": "llama"}')
    source = open_safetensors(sharded)
    assert list(source) == ["a", "b"]
    assert np.array_equal(source["b"].read(2, 3), VALUES[2:3] + 1)
    assert source.config == {"model_type": "llama"}
    assert [path.name for path in source.files] == ["model-1.safetensors", "model-2.safetensors"]


def test_shards_without_an_index_are_one_source(sharded):
    (sharded / "model.safetensors.index.json").unlink()
    assert list(open_safetensors(sharded)) == ["a", "b"]


def test_the_digest_depends_on_shapes_and_config(sharded):
    first = open_safetensors(sharded).digest
    assert open_safetensors(sharded).digest == first
    (sharded / "config.json").write_text("{}")
    assert open_safetensors(sharded).digest != first


def test_bfloat16_is_exact_in_float32(tmp_path):
    array = VALUES.astype(ml_dtypes.bfloat16)
    source = open_safetensors(write(tmp_path / "x.safetensors", {"w": array}))
    assert np.array_equal(source["w"].dequantize(), array.astype(np.float32))


def test_block_scales_of_float8_belong_to_their_tensor(tmp_path):
    codes = VALUES.astype(ml_dtypes.float8_e4m3fn)
    scale = np.array([[1, 2], [3, 4]], np.float32)
    write(tmp_path / "model.safetensors", {"l.weight": codes, "l.weight_scale_inv": scale})
    (tmp_path / "config.json").write_text('{"quantization_config": {"weight_block_size": [4, 5]}}')
    source = open_safetensors(tmp_path)
    assert list(source) == ["l.weight"]
    expected = codes.astype(np.float32) * np.repeat(np.repeat(scale, 4, 0)[:6], 5, 1)[:, :8]
    assert np.array_equal(source["l.weight"].dequantize(), expected)


@pytest.mark.parametrize("shape", [(), (1,), (6,), (6, 1)])
def test_scales_per_tensor_and_per_row(tmp_path, shape):
    codes = VALUES.astype(ml_dtypes.float8_e4m3fn)
    scale = np.arange(1, 1 + np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
    tensors = {"l.weight": codes, "l.weight_scale": scale, "l.input_scale": np.float32(2).reshape(())}
    source = open_safetensors(write(tmp_path / "model.safetensors", tensors))
    assert list(source) == ["l.weight"]
    factors = scale.reshape(-1, 1) if scale.size > 1 else scale.reshape(())
    assert np.array_equal(source["l.weight"].dequantize(2), (codes.astype(np.float32) * factors)[2:])


def test_scales_of_a_wrong_shape_raise(tmp_path):
    codes = VALUES.astype(ml_dtypes.float8_e4m3fn)
    write(tmp_path / "model.safetensors", {"w": codes, "w_scale_inv": np.ones((2, 3), np.float32)})
    with pytest.raises(FileFormatError, match=r"expected \(1, 1\): one scale per block of \(128, 128\)"):
        open_safetensors(tmp_path)


def test_a_tensor_in_two_shards_raises(sharded):
    write(sharded / "model-2.safetensors", {"a": VALUES, "b": VALUES})
    with pytest.raises(FileFormatError, match=r"'a' is in model-1.safetensors and in model-2.safetensors"):
        open_safetensors(sharded)


def test_an_index_that_names_a_missing_file_raises(sharded):
    (sharded / "model-2.safetensors").unlink()
    with pytest.raises(FileFormatError, match=r"'model-2.safetensors', which does not exist"):
        open_safetensors(sharded)


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "a/b.safetensors", "..", ""])
def test_an_index_cannot_name_files_elsewhere(sharded, name):
    write_index(sharded, {"a": name})
    with pytest.raises(FileFormatError, match="without a directory"):
        open_safetensors(sharded)


def test_an_index_that_contradicts_the_shards_raises(sharded):
    write_index(sharded, {"a": "model-2.safetensors", "b": "model-1.safetensors"})
    with pytest.raises(FileFormatError, match=r"'a' is in model-2.safetensors, but it is in model-1.safetensors"):
        open_safetensors(sharded)
    write_index(sharded, {"c": "model-1.safetensors"})
    with pytest.raises(FileFormatError, match=r"'c' is in model-1.safetensors, but it is in no shard"):
        open_safetensors(sharded)


@pytest.mark.parametrize("index", ['{"weight_map": 3}', '{"weight_map": {}}', '{"weight_map": {"a": 1}}', "[1]", "x"])
def test_a_damaged_index_raises(sharded, index):
    (sharded / "model.safetensors.index.json").write_text(index)
    with pytest.raises(FileFormatError):
        open_safetensors(sharded)


def test_a_truncated_shard_raises_and_is_named(sharded):
    path = sharded / "model-2.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(FileFormatError, match=r"model-2.safetensors: tensor 'b' ends at byte 192.*truncated"):
        open_safetensors(sharded)


def test_a_replaced_file_raises_when_it_is_read(sharded):
    source = open_safetensors(sharded)
    write(sharded / "model-2.safetensors", {"b": np.ones((60, 8), np.float32)})
    with pytest.raises(FileFormatError, match="changed or replaced"):
        source["b"].read()


def test_overlapping_tensors_raise(tmp_path):
    def overlap(header):
        header["b"]["data_offsets"] = header["a"]["data_offsets"]
        return header

    path = write(tmp_path / "model.safetensors", {"a": VALUES, "b": VALUES}, overlap)
    with pytest.raises(FileFormatError, match="hole or an overlap"):
        open_safetensors(path)


@pytest.mark.parametrize("shape", [[1 << 40, 1 << 40], [0, 1 << 61], [-1, 4], [1.5], "x"])
def test_impossible_shapes_raise(tmp_path, shape):
    def change(header):
        header["a"]["shape"] = shape
        return header

    with pytest.raises(FileFormatError):
        open_safetensors(write(tmp_path / "model.safetensors", {"a": VALUES}, change))


def test_a_directory_without_tensors_raises(tmp_path):
    with pytest.raises(FileFormatError, match=r"has no \.safetensors files"):
        open_safetensors(tmp_path)
