import os

import gguf
import ml_dtypes
import numpy as np
import pytest

import detent as dt
from detent.checkpoint_files.gguf_reader import is_gguf, open_gguf, read_gguf
from detent.errors import FileFormatError, UnsupportedError

VALUES = np.random.default_rng(0).normal(size=(4, 256)).astype(np.float32)


@pytest.fixture
def reference_file(tmp_path):
    """A file that llama.cpp's own package writes, with values of every type."""
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("a.u8", 200)
    writer.add_int8("a.i8", -3)
    writer.add_uint16("a.u16", 60_000)
    writer.add_int16("a.i16", -30_000)
    writer.add_uint32("a.u32", 1 << 31)
    writer.add_int32("a.i32", -5)
    writer.add_float32("a.f32", 0.5)
    writer.add_float64("a.f64", 1e-300)
    writer.add_uint64("a.u64", 1 << 63)
    writer.add_int64("a.i64", -(1 << 62))
    writer.add_bool("a.bool", True)
    writer.add_string("a.text", "grüße")
    writer.add_array("a.strings", ["x", "", "日本"])
    writer.add_array("a.numbers", [1, 2, 3])
    writer.add_array("a.flags", [True, False])
    writer.add_tensor("f32", VALUES)
    writer.add_tensor("f16", VALUES.astype(np.float16))
    for name in ("q4_k", "q8_0"):
        packed = dt.quantize(VALUES, name).packed.reshape(4, -1).copy()
        writer.add_tensor(name, packed, raw_dtype=gguf.GGMLQuantizationType[name.upper()])
    bits = VALUES.astype(ml_dtypes.bfloat16).view(np.uint8)
    writer.add_tensor("bf16", bits, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.add_tensor("cube", VALUES.reshape(2, 2, 256))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_metadata_of_every_type_is_read(reference_file):
    file = read_gguf(reference_file)
    types = {key: kind for key, kind, _ in file.entries}
    metadata = file.metadata
    assert {key: value for key, value in metadata.items() if not types[key].startswith("array:")} == {
        "general.architecture": "llama",
        "a.u8": 200,
        "a.i8": -3,
        "a.u16": 60_000,
        "a.i16": -30_000,
        "a.u32": 1 << 31,
        "a.i32": -5,
        "a.f32": 0.5,
        "a.f64": 1e-300,
        "a.u64": 1 << 63,
        "a.i64": -(1 << 62),
        "a.bool": True,
        "a.text": "grüße",
    }
    assert metadata["a.strings"] == ["x", "", "日本"]
    assert metadata["a.numbers"].tolist() == [1, 2, 3]
    assert open_gguf(reference_file).metadata_types == types
    assert (types["a.flags"], metadata["a.flags"].tolist()) == ("array:bool", [True, False])


def test_tensors_have_the_values_that_were_written(reference_file):
    source = open_gguf(reference_file)
    assert source["q4_k"].shape == (4, 256)
    assert np.array_equal(source["f32"].read(), VALUES)
    assert np.array_equal(source["f16"].dequantize(1, 2), VALUES[1:2].astype(np.float16).astype(np.float32))
    assert np.array_equal(source["bf16"].dequantize(), VALUES.astype(ml_dtypes.bfloat16).astype(np.float32))
    assert np.array_equal(source["q4_k"].dequantize(2), dt.quantize(VALUES[2:], "q4_k").dequantize())
    assert np.array_equal(source["cube"].read(1), VALUES.reshape(2, 2, 256)[1:])


def test_positions_equal_those_of_the_reference_reader(reference_file):
    reference = {tensor.name: tensor for tensor in gguf.GGUFReader(reference_file).tensors}
    tensors = open_gguf(reference_file)
    assert list(tensors) == list(reference)
    for name, tensor in tensors.items():
        assert tensor.offset == reference[name].data_offset
        assert tensor.nbytes == reference[name].n_bytes


def test_the_start_of_a_file_tells_its_format(reference_file, tmp_path):
    (tmp_path / "other").write_bytes(b"abcdef")
    assert is_gguf(reference_file)
    assert not is_gguf(tmp_path / "other")


@pytest.mark.parametrize("size", [0, 3, 23, 24, 100, 2000, -1])
def test_truncated_files_raise(reference_file, size):
    data = reference_file.read_bytes()
    os.truncate(reference_file, size if size >= 0 else len(data) - 2080)  # the last tensor has 2048 bytes, no padding
    with pytest.raises(FileFormatError, match=r"model.gguf"):
        open_gguf(reference_file)


def header(tensors=(), entries=b"", num_entries=0, version=3, num_tensors=None, tail=64):
    """The bytes of a small file; a tensor is (name, dims, type, offset)."""
    count = len(tensors) if num_tensors is None else num_tensors
    data = b"GGUF" + version.to_bytes(4, "little") + count.to_bytes(8, "little") + num_entries.to_bytes(8, "little")
    data += entries
    for name, dims, kind, offset in tensors:
        data += len(name).to_bytes(8, "little") + name + len(dims).to_bytes(4, "little")
        data += b"".join(size.to_bytes(8, "little") for size in dims)
        data += kind.to_bytes(4, "little") + offset.to_bytes(8, "little")
    return data + bytes(-len(data) % 32) + bytes(tail)


def entry(key, kind, value):
    return len(key).to_bytes(8, "little") + key + kind.to_bytes(4, "little") + value


BIG = (1 << 62).to_bytes(8, "little")
DAMAGED = {
    "wrong magic": (b"GGML" + header()[4:], "does not start with 'GGUF'"),
    "too many tensors": (header(num_tensors=1 << 60), "1152921504606846976 tensors"),
    "too many entries": (header(num_entries=1 << 60), "1152921504606846976 metadata entries"),
    "key beyond the file": (header(entries=BIG, num_entries=1), "a metadata key has"),
    "string beyond the file": (header(entries=entry(b"k", 8, BIG), num_entries=1), "the value of 'k' needs"),
    "array beyond the file": (header(entries=entry(b"k", 9, (4).to_bytes(4, "little") + BIG), num_entries=1), "values"),
    "strings beyond the file": (
        header(entries=entry(b"k", 9, (8).to_bytes(4, "little") + BIG), num_entries=1),
        "strings of 'k'",
    ),
    "unknown value type": (header(entries=entry(b"k", 13, bytes(8)), num_entries=1), "unknown type 13"),
    "bool of 2": (header(entries=entry(b"k", 7, b"\2"), num_entries=1), "the bool 2"),
    "duplicate keys": (header(entries=entry(b"k", 0, b"\1") * 2, num_entries=2), "'k' occurs twice"),
    "alignment 3": (
        header(entries=entry(b"general.alignment", 4, (3).to_bytes(4, "little")), num_entries=1),
        "power of two",
    ),
    "duplicate tensors": (header([(b"w", [4], 0, 0), (b"w", [4], 0, 32)]), "'w' occurs twice"),
    "overlapping tensors": (header([(b"v", [12], 0, 0), (b"w", [4], 0, 32)]), "'v' and 'w' overlap"),
    "offset beyond the file": (header([(b"w", [4], 0, 1 << 40)]), "truncated"),
    "unaligned offset": (header([(b"w", [4], 0, 16)]), "expected a multiple of 32"),
    "too many dimensions": (header([(b"w", [1] * 5, 0, 0)]), "5 dimensions"),
    "dims whose product overflows": (header([(b"w", [1 << 40, 1 << 40], 0, 0)]), "too large"),
    "an empty tensor that is too large": (header([(b"w", [1 << 60, 0], 0, 0)]), "too large"),
    "a partial block": (header([(b"w", [48], 8, 0)]), "multiple of 32"),
    "a scalar block tensor": (header([(b"w", [], 8, 0)]), "multiple of 32"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_headers_raise(tmp_path, case):
    data, message = DAMAGED[case]
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    with pytest.raises(FileFormatError, match=message):
        open_gguf(path)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (header(version=1), "version 1"),
        (header(version=3 << 24), "big-endian"),
        (header([(b"w", [4], 999, 0)]), "type number 999"),
        (header(entries=entry(b"k", 9, (9).to_bytes(4, "little") + bytes(8)), num_entries=1), "array of arrays"),
    ],
)
def test_unsupported_files_raise(tmp_path, data, message):
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    with pytest.raises(UnsupportedError, match=message):
        open_gguf(path)


@pytest.fixture
def split_files(tmp_path):
    paths = []
    for number in range(3):
        writer = gguf.GGUFWriter(tmp_path / f"m-0000{number + 1}-of-00003.gguf", "llama")
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", 3)
        writer.add_int32("split.tensors.count", 3)
        writer.add_tensor(f"t{number}", VALUES + number)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        paths.append(tmp_path / f"m-0000{number + 1}-of-00003.gguf")
    return paths


@pytest.mark.parametrize("number", [0, 2])
def test_any_part_opens_all_parts(split_files, number):
    source = open_gguf(split_files[number])
    assert list(source) == ["t0", "t1", "t2"]
    assert np.array_equal(source["t1"].read(), VALUES + 1)


def test_a_missing_part_raises(split_files):
    split_files[1].unlink()
    with pytest.raises(FileFormatError, match=r"m-00002-of-00003.gguf does not exist"):
        open_gguf(split_files[0])


def test_a_renamed_part_raises(split_files, tmp_path):
    with pytest.raises(FileFormatError, match="restore the original names"):
        open_gguf(split_files[0].rename(tmp_path / "renamed.gguf"))


def test_swapped_parts_raise(split_files):
    data = split_files[1].read_bytes()
    split_files[1].write_bytes(split_files[2].read_bytes())
    split_files[2].write_bytes(data)
    with pytest.raises(FileFormatError, match=r"split.no \(3, 2\), expected \(3, 1\)"):
        open_gguf(split_files[0])
