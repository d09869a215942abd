"""Storage: detent and the safetensors library read exactly what detent wrote."""

import numpy as np
import pytest
import safetensors.numpy

from detent import storage
from detent.errors import FileFormatError, SpecError

ARRAYS = {
    "empty": np.zeros((0, 3), np.float32),
    "scalar": np.array(7, np.int64),
    "strided": np.arange(12, dtype=np.float64).reshape(3, 4)[::2, ::-1],
    **{
        dtype: np.arange(5).astype(dtype)
        for dtype in ("uint8", "int8", "int16", "int32", "int64", "float32", "float64")
    },
}
METADATA = {"unicode ä": "\u2713 \U0001f600"}


def same(actual, expected):
    return set(actual) == set(expected) and all(
        actual[name].dtype == value.dtype and actual[name].shape == value.shape and np.array_equal(actual[name], value)
        for name, value in expected.items()
    )


def test_round_trip():
    arrays, metadata = storage.loads(storage.dumps(ARRAYS, METADATA))
    assert same(arrays, ARRAYS)
    assert metadata == METADATA


def test_nothing_is_something():
    assert storage.loads(storage.dumps({}, {})) == ({}, {})


def test_equal_input_gives_equal_bytes():
    assert storage.dumps(ARRAYS, METADATA) == storage.dumps(dict(reversed(ARRAYS.items())), METADATA)


def test_several_entries_of_metadata_are_rejected_because_their_order_is_random():
    with pytest.raises(SpecError, match="got 2 entries of metadata, expected at most one"):
        storage.dumps(ARRAYS, METADATA | {"empty": ""})


def test_several_entries_of_metadata_are_read():
    metadata = METADATA | {"k": "v", "empty": ""}
    assert storage.loads(safetensors.numpy.save({}, metadata)) == ({}, metadata)


def test_arrays_are_read_only():
    arrays, _ = storage.loads(storage.dumps(ARRAYS, {}))
    assert not any(array.flags.writeable for array in arrays.values())


def test_the_library_reads_what_we_write(tmp_path):
    storage.write_atomic(tmp_path / "a", storage.dumps(ARRAYS, METADATA))
    assert same(safetensors.numpy.load_file(tmp_path / "a"), ARRAYS)


def test_we_read_what_the_library_writes(tmp_path):
    arrays = {name: np.ascontiguousarray(value) for name, value in ARRAYS.items() if name != "scalar"}
    safetensors.numpy.save_file(arrays, tmp_path / "a", metadata={"format": "np"})
    actual, metadata = storage.read(tmp_path / "a")
    assert same(actual, arrays)
    assert metadata == {"format": "np"}


@pytest.mark.parametrize("kind", [str, lambda path: path], ids=["text", "path"])
def test_paths(kind, tmp_path):
    storage.write_atomic(kind(tmp_path / "a"), storage.dumps({}, {"k": "v"}))
    assert storage.read(kind(tmp_path / "a")) == ({}, {"k": "v"})


def test_a_missing_directory_is_an_error_before_anything_is_written(tmp_path):
    assert storage.check_directory(tmp_path) == tmp_path
    assert not list(tmp_path.iterdir())
    with pytest.raises(FileFormatError, match="is not a directory: create it"):
        storage.check_directory(tmp_path / "nowhere")
