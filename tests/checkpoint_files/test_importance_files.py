"""Importance files: both forms, round trips, merging, and damaged files."""

import struct

import gguf
import numpy as np
import pytest

from detent.checkpoint_files.importance_files import ColumnSums, Importance, read_importance, write_importance
from detent.errors import FileFormatError, RangeError, ShapeError, SpecError, UnsupportedError

rng = np.random.default_rng(0)


def example(chunks=3):
    columns = {
        "blk.0.attn_q.weight": ColumnSums(rng.random((1, 8)) * 100, np.array([64.0])),
        "blk.0.ffn_up_exps.weight": ColumnSums(rng.random((3, 8)) * 100, np.array([10.0, 0.0, 54.0])),
    }
    return Importance(columns, ("wiki.txt",), chunks, 16)


def test_the_gguf_form_is_that_of_llama_cpp(tmp_path):
    importance = example()
    importance.save(tmp_path / "imatrix.gguf")
    reader = gguf.GGUFReader(tmp_path / "imatrix.gguf")
    assert reader.get_field("general.type").contents() == "imatrix"
    assert reader.get_field("imatrix.datasets").contents() == ["wiki.txt"]
    assert reader.get_field("imatrix.chunk_count").contents() == 3
    assert reader.get_field("imatrix.chunk_size").contents() == 16
    tensors = {tensor.name: tensor.data for tensor in reader.tensors}
    sums = importance.columns["blk.0.ffn_up_exps.weight"]
    assert np.array_equal(tensors["blk.0.ffn_up_exps.weight.in_sum2"], sums.sums.astype(np.float32))
    assert np.array_equal(tensors["blk.0.ffn_up_exps.weight.counts"], sums.counts[:, None].astype(np.float32))


def test_the_gguf_form_is_read_back(tmp_path):
    importance = example()
    write_importance(importance, tmp_path / "imatrix.gguf")
    again = read_importance(tmp_path / "imatrix.gguf")
    assert (again.datasets, again.chunk_count, again.chunk_size) == (("wiki.txt",), 3, 16)
    for name, sums in importance.columns.items():
        assert np.array_equal(again.columns[name].weights(), sums.weights())
    write_importance(again, tmp_path / "again.gguf")
    assert (tmp_path / "again.gguf").read_bytes() == (tmp_path / "imatrix.gguf").read_bytes()


def test_an_expert_without_tokens_gets_ones():
    weights = example().weights("blk.0.ffn_up_exps.weight", (3, 4, 8))
    assert (weights[1] == 1).all()
    assert weights.dtype == np.float32


def test_the_legacy_form_has_importance_times_calls(tmp_path):
    importance = example(chunks=4)  # a power of two, so that multiplication and division are exact
    write_importance(importance, tmp_path / "imatrix.dat")
    data = (tmp_path / "imatrix.dat").read_bytes()
    count, length = struct.unpack("<ii", data[:8])
    assert (count, data[8 : 8 + length]) == (2, b"blk.0.attn_q.weight")
    calls, values = struct.unpack_from("<ii", data, 8 + length)
    assert (calls, values) == (4, 8)
    assert data.endswith(struct.pack("<ii", 4, 8) + b"wiki.txt")
    again = read_importance(tmp_path / "imatrix.dat")
    for name, shape in (("blk.0.attn_q.weight", (2, 8)), ("blk.0.ffn_up_exps.weight", (3, 4, 8))):
        assert np.array_equal(again.weights(name, shape), importance.weights(name, shape))
    assert again.weights("blk.9.attn_q.weight", (2, 8)) is None


def test_a_legacy_file_may_end_after_its_entries(tmp_path):
    name = b"blk.0.attn_q.weight"
    values = np.arange(4, dtype="<f4")
    data = struct.pack("<ii", 1, len(name)) + name + struct.pack("<ii", 2, 4) + values.tobytes()
    (tmp_path / "imatrix.dat").write_bytes(data)
    assert read_importance(tmp_path / "imatrix.dat").weights(name.decode(), (1, 4)).tolist() == [[0, 0.5, 1, 1.5]]


def test_merging_in_any_order_gives_the_same_file(tmp_path):
    parts = [example(), example(), example()]
    for number, order in enumerate(((0, 1, 2), (2, 0, 1), (1, 2, 0))):
        first, second, third = (parts[index] for index in order)
        first.merged(second).merged(third).save(tmp_path / f"{number}.gguf")
    files = {(tmp_path / f"{number}.gguf").read_bytes() for number in range(3)}
    assert len(files) == 1
    merged = read_importance(tmp_path / "0.gguf")
    assert merged.chunk_count == 9
    assert merged.columns["blk.0.attn_q.weight"].counts.tolist() == [192.0]


def test_importance_of_another_model_is_rejected():
    with pytest.raises(ShapeError, match="was collected with another model"):
        example().weights("blk.0.attn_q.weight", (4, 16))
    with pytest.raises(ShapeError, match="expected equal shapes"):
        ColumnSums(np.ones((1, 2)), np.ones(1)).merged(ColumnSums(np.ones((1, 3)), np.ones(1)))
    with pytest.raises(SpecError, match="equal sizes"):
        example().merged(Importance({}, chunk_size=8))


@pytest.mark.parametrize("value", [np.nan, np.inf, -1.0])
def test_sums_must_be_finite_and_not_negative(value):
    with pytest.raises(RangeError, match="finite and at least 0"):
        ColumnSums(np.full((1, 2), value), np.ones(1))


@pytest.mark.parametrize("suffix", ["gguf", "dat"])
def test_every_truncation_is_an_error(tmp_path, suffix):
    write_importance(example(), tmp_path / f"full.{suffix}")
    data = (tmp_path / f"full.{suffix}").read_bytes()
    end = len(data) - len(b"wiki.txt") - 8  # a legacy file may end here
    for size in range(0, len(data) - 32 * (suffix == "gguf"), 7):  # a GGUF file ends with padding
        if suffix == "dat" and size == end:
            continue
        path = tmp_path / f"short.{suffix}"
        path.write_bytes(data[:size])
        with pytest.raises(FileFormatError):
            read_importance(path)


def test_files_of_other_kinds_are_rejected(tmp_path):
    with pytest.raises(FileFormatError, match="no such file"):
        read_importance(tmp_path / "absent.gguf")
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tensor("w", np.ones((2, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(FileFormatError, match="not an importance file"):
        read_importance(tmp_path / "model.gguf")
    (tmp_path / "text.dat").write_text("some text that is not an importance file")
    with pytest.raises(FileFormatError, match="not an importance file"):
        read_importance(tmp_path / "text.dat")


@pytest.mark.parametrize("suffix", ["gguf", "dat"])
def test_mutated_files_are_read_or_rejected(tmp_path, suffix):
    write_importance(example(), tmp_path / f"full.{suffix}")
    data = np.frombuffer((tmp_path / f"full.{suffix}").read_bytes(), np.uint8)
    random, rejected, path = np.random.default_rng(3), 0, tmp_path / f"mutated.{suffix}"
    for _ in range(400):
        mutated = data.copy()
        at = random.integers(0, len(data), random.integers(1, 4))
        mutated[at] = random.choice(np.array([0, 1, 0x7F, 0x80, 0xFF, random.integers(256)], np.uint8), len(at))
        path.write_bytes(mutated.tobytes())
        try:
            importance = read_importance(path)
        except (FileFormatError, UnsupportedError):
            rejected += 1
            continue
        assert all(np.isfinite(importance[name]).all() for name in importance)
    assert 20 < rejected < 400
