import json
import shutil
from math import inf
from pathlib import Path

import gguf
import numpy as np
import pytest

import detent as dt
import detent.checkpoint as qc
from detent.checkpoint_files.gguf_reader import read_gguf
from detent.checkpoint_files.gguf_writer import gguf_layout
from detent.errors import FileFormatError, SpecError, UnsupportedError, VerificationError

from .tiny_checkpoints import CONFIG, llama_tensors, write_checkpoint


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    directory = tmp_path_factory.mktemp("verify")
    write_checkpoint(directory / "tiny")
    qc.quantize(directory / "tiny", directory / "tiny.gguf", vocabulary=False)
    return directory


def rewritten(files, tmp_path, change):
    """Write the file again after a change of its metadata entries and tensors (name, shape, type, bytes)."""
    file = read_gguf(files / "tiny.gguf")
    entries = list(file.entries)
    data = file.path.read_bytes()
    tensors = [
        [t.name, t.shape, {"float32": "F32"}.get(t.dtype, t.dtype.upper()), data[t.offset : t.offset + t.nbytes]]
        for t in file.tensors
    ]
    change(entries, tensors)
    layout = gguf_layout(entries, [tuple(tensor[:3]) for tensor in tensors])
    buffer = bytearray(layout.nbytes)
    buffer[: len(layout.header)] = layout.header
    for place, tensor in zip(layout.tensors, tensors, strict=True):
        buffer[place.offset : place.offset + place.nbytes] = tensor[3]
    path = tmp_path / "changed.gguf"
    path.write_bytes(buffer)
    return path


def test_a_correct_file_is_ok_and_has_an_sqnr_per_tensor(files):
    result = dt.verify(files / "tiny", files / "tiny.gguf")
    assert result.ok
    with pytest.raises(dt.DtypeError, match=r"use \.ok"):
        bool(result)
    assert result.differing_bytes == 0
    assert result.compared_bytes == sum(tensor.nbytes for tensor in read_gguf(files / "tiny.gguf").tensors)
    assert result.sqnr_db["output_norm.weight"] == inf
    up = llama_tensors()["model.layers.0.mlp.up_proj.weight"].astype(np.float32)
    expected = dt.metrics.sqnr_db(up, dt.fake_quantize(up, "q4_k"))
    assert result.sqnr_db["blk.0.ffn_up.weight"] == pytest.approx(expected, abs=1e-6)
    assert json.loads(result.to_json())["ok"] is True
    assert str(result).startswith("ok: every tensor matches its source\nbytes that differ: 0 of ")


def test_every_flipped_byte_of_a_tensor_is_found_and_named(files, tmp_path):
    tensor = next(t for t in read_gguf(files / "tiny.gguf").tensors if t.name == "blk.1.ffn_down.weight")
    data = bytearray((files / "tiny.gguf").read_bytes())
    at = 5 * tensor.nbytes // 256 + 210  # row 5, second block of 210 bytes
    data[tensor.offset + at] ^= 0x10
    (tmp_path / "x.gguf").write_bytes(data)
    result = dt.verify(files / "tiny", tmp_path / "x.gguf")
    assert not result.ok
    assert result.differing_bytes == 1
    assert result.first_difference.startswith("tensor blk.1.ffn_down.weight differs in the block at [5, 256], byte 0:")
    with pytest.raises(VerificationError, match=r"blk.1.ffn_down"):
        dt.verify(files / "tiny", tmp_path / "x.gguf", raise_on_difference=True)


def test_a_byte_of_padding_is_found(tmp_path):
    config = CONFIG | {"vocab_size": 95, "num_hidden_layers": 1}  # the bytes of 95 rows are no multiple of 32
    source = write_checkpoint(tmp_path / "tiny", config=config)
    qc.quantize(source, tmp_path / "x.gguf", vocabulary=False)
    tensor = next(t for t in read_gguf(tmp_path / "x.gguf").tensors if t.name == "output.weight")
    data = bytearray((tmp_path / "x.gguf").read_bytes())
    data[tensor.offset + tensor.nbytes] = 1
    (tmp_path / "x.gguf").write_bytes(data)
    assert dt.verify(source, tmp_path / "x.gguf").failure == "the padding after tensor output.weight is not zero"


def test_changed_metadata_are_named(files, tmp_path):
    def change(entries, tensors):
        index = next(i for i, entry in enumerate(entries) if entry[0] == "llama.rope.freq_base")
        entries[index] = (*entries[index][:2], 500000.0)

    result = dt.verify(files / "tiny", rewritten(files, tmp_path, change))
    assert "metadata llama.rope.freq_base is 500000.0, expected 10000.0" in result.differences


def test_extra_and_missing_metadata_are_named(files, tmp_path):
    def change(entries, tensors):
        entries.append(("llama.extra", "uint32", 1))
        entries.remove(next(entry for entry in entries if entry[0] == "llama.block_count"))

    result = dt.verify(files / "tiny", rewritten(files, tmp_path, change))
    assert not result.ok
    text = str(result.differences)
    assert "llama.extra is 1, expected missing" in text
    assert "llama.block_count is missing, expected 2" in text


def test_a_missing_tensor_and_another_type_are_named(files, tmp_path):
    up = llama_tensors()["model.layers.0.mlp.up_proj.weight"].astype(np.float32)

    def change(entries, tensors):
        tensors.remove(next(tensor for tensor in tensors if tensor[0] == "blk.0.attn_q.weight"))
        tensor = next(tensor for tensor in tensors if tensor[0] == "blk.0.ffn_up.weight")
        tensor[2:] = "Q8_0", dt.quantize(up, "q8_0").packed.tobytes()

    result = dt.verify(files / "tiny", rewritten(files, tmp_path, change))
    assert "tensor blk.0.attn_q.weight is missing" in result.differences
    assert "tensor blk.0.ffn_up.weight has type Q8_0, expected Q4_K" in result.differences


def test_another_source_differs(files, tmp_path):
    other = write_checkpoint(tmp_path / "tiny", llama_tensors(seed=1))
    result = dt.verify(other, files / "tiny.gguf")
    assert not result.ok
    assert result.differing_bytes > result.compared_bytes // 2


def test_a_renamed_source_is_only_a_note(files, tmp_path):
    renamed = Path(shutil.copytree(files / "tiny", tmp_path / "renamed"))
    result = dt.verify(renamed, files / "tiny.gguf")
    assert result.ok
    assert "general.name" in result.notes[0]


def test_files_of_other_tools_are_verified_by_their_own_types(files, tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "llama")
    file = qc.open(files / "tiny.gguf")
    tensors = {target.name: file[target.name] for target in file.values()}
    for name, tensor in tensors.items():
        kind = "F32" if tensor.dtype == "float32" else "Q8_0"
        values = tensor_values(files, name)
        packed = values if kind == "F32" else dt.quantize(values, "q8_0").packed.reshape(len(values), -1).copy()
        writer.add_tensor(name, packed, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    result = dt.verify(qc.open(tmp_path / "f32.gguf"), tmp_path / "other.gguf")
    assert result.ok
    assert "another tool wrote the file" in result.notes[0]


def tensor_values(files, name):
    """Values of a tensor before quantization, from a float32 file that is written once."""
    from detent.checkpoint_files.architectures import gguf_model

    model = gguf_model(qc.open(files / "tiny"), vocabulary=False)
    target = next(target for target in model.tensors if target.name == name)
    return target.rows(qc.open(files / "tiny")).reshape(target.shape)


@pytest.fixture(autouse=True)
def float32_file(files, tmp_path, request):
    if "other_tools" in request.node.name:
        qc.quantize(files / "tiny", tmp_path / "f32.gguf", "gguf:F32", vocabulary=False)


def test_importance_must_be_passed_again(files, tmp_path):
    weights = np.random.default_rng(0).uniform(0, 4, 256).astype(np.float32)
    importance = {"blk.0.ffn_up.weight": weights}
    qc.quantize(files / "tiny", tmp_path / "x.gguf", vocabulary=False, importance=importance)
    with pytest.raises(SpecError, match="pass the same matrix as importance="):
        dt.verify(files / "tiny", tmp_path / "x.gguf")
    assert dt.verify(files / "tiny", tmp_path / "x.gguf", importance=importance).ok
    other = {"blk.0.ffn_up.weight": weights + 1}
    assert "detent.conversion" in dt.verify(files / "tiny", tmp_path / "x.gguf", importance=other).failure


def test_gguf_files_have_no_levels(files):
    with pytest.raises(SpecError, match="drop both"):
        dt.verify(files / "tiny", files / "tiny.gguf", levels=1)


def test_parts_of_split_files_are_not_verified(files, tmp_path):
    def change(entries, tensors):
        entries.append(("split.count", "uint16", 2))

    with pytest.raises(UnsupportedError, match="merge the parts"):
        dt.verify(files / "tiny", rewritten(files, tmp_path, change))


def test_a_file_of_another_tool_needs_no_tokenizer(files, tmp_path):
    def change(entries, _tensors):
        entries[:] = [each for each in entries if each[0] != "detent.conversion"]

    result = qc.verify(files / "tiny", rewritten(files, tmp_path, change))
    assert result.ok
    assert "another tool wrote the file" in result.notes[0]


@pytest.mark.parametrize(
    ("key", "kind", "value"), [("llama.block_count", "string", "x"), ("general.architecture", "uint32", 3)]
)
def test_metadata_of_the_wrong_type_are_refused(files, tmp_path, key, kind, value):
    def change(entries, _tensors):
        entries[:] = [(key, kind, value) if each[0] == key else each for each in entries]

    with pytest.raises(FileFormatError):
        qc.quantize(rewritten(files, tmp_path, change), tmp_path / "again.gguf", to="gguf:Q4_0")


def test_a_number_of_parts_that_is_an_array_is_not_a_split_file(files, tmp_path):
    def change(entries, _tensors):
        entries.append(("split.count", "array:uint32", [1, 2]))

    assert not qc.verify(files / "tiny", rewritten(files, tmp_path, change)).ok  # the metadata differ
