import gguf
import numpy as np
import pytest

import detent as dt
from detent.checkpoint_files.gguf_reader import open_gguf, read_gguf
from detent.checkpoint_files.gguf_types import VALUE_TYPES, tensor_types
from detent.checkpoint_files.gguf_writer import gguf_layout
from detent.errors import DtypeError, ShapeError, SpecError

VALUES = np.random.default_rng(0).normal(size=(3, 256)).astype(np.float32)
ENTRIES = [
    ("general.architecture", "string", "llama"),
    ("a.u8", "uint8", 255),
    ("a.i64", "int64", -(1 << 62)),
    ("a.u64", "uint64", (1 << 64) - 1),
    ("a.f32", "float32", 1e-5),
    ("a.flag", "bool", False),
    ("a.text", "string", "grüße"),
    ("a.tokens", "array:string", ["a", "", "日"]),
    ("a.none", "array:float32", []),
    ("a.scores", "array:float32", [0.5, -1.0]),
    ("a.types", "array:int32", np.array([1, 2, 3])),
]


def write(path, layout, data):
    buffer = bytearray(layout.nbytes)
    buffer[: len(layout.header)] = layout.header
    for tensor in layout.tensors:
        buffer[tensor.offset : tensor.offset + tensor.nbytes] = data[tensor.name]
    path.write_bytes(buffer)


def test_the_reference_reader_reads_what_was_laid_out(tmp_path):
    tensors = [("w", (3, 256), "Q4_K"), ("norm", (256,), "F32"), ("exps", (3, 2, 128), "Q8_0")]
    layout = gguf_layout(ENTRIES, tensors)
    packed = dt.quantize(VALUES.reshape(3, 2, 128), "q8_0").packed
    data = {"w": dt.quantize(VALUES, "q4_k").packed.tobytes(), "norm": VALUES[0].tobytes(), "exps": packed.tobytes()}
    write(tmp_path / "m.gguf", layout, data)
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    assert {tensor.name: tuple(tensor.shape[::-1]) for tensor in reader.tensors} == {
        name: shape for name, shape, _ in tensors
    }
    for tensor in reader.tensors:
        assert tensor.data.tobytes() == data[tensor.name]
    values = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    expected = {key: list(value) if kind.startswith("array:") else value for key, kind, value in ENTRIES}
    expected["a.f32"] = float(np.float32(1e-5))
    assert values == expected


def test_reader_and_layout_agree(tmp_path):
    layout = gguf_layout(ENTRIES, [("w", (3, 256), "Q6_K"), ("b", (3,), "F32")])
    write(tmp_path / "m.gguf", layout, {"w": dt.quantize(VALUES, "q6_k").packed.tobytes(), "b": bytes(12)})
    file = read_gguf(tmp_path / "m.gguf")
    assert [(t.name, t.offset, t.nbytes) for t in file.tensors] == [
        (t.name, t.offset, t.nbytes) for t in layout.tensors
    ]
    again = gguf_layout(file.entries, [("w", file.tensors[0].shape, "Q6_K"), ("b", file.tensors[1].shape, "F32")])
    assert again == layout
    assert np.array_equal(open_gguf(tmp_path / "m.gguf")["w"].dequantize(), dt.quantize(VALUES, "q6_k").dequantize())


def test_the_bytes_equal_those_of_the_reference_writer(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "ref.gguf", "llama")
    writer.add_uint32("llama.block_count", 1)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    writer.add_tensor("w", VALUES)
    writer.add_tensor("n", VALUES[0, :3].copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    entries = [
        ("general.architecture", "string", "llama"),
        ("llama.block_count", "uint32", 1),
        ("tokenizer.ggml.tokens", "array:string", ["a", "b"]),
    ]
    layout = gguf_layout(entries, [("w", (3, 256), "F32"), ("n", (3,), "F32")])
    write(tmp_path / "own.gguf", layout, {"w": VALUES.tobytes(), "n": VALUES[0, :3].tobytes()})
    assert (tmp_path / "own.gguf").read_bytes() == (tmp_path / "ref.gguf").read_bytes()


def test_constants_equal_those_of_the_reference_package():
    assert {name: number for name, (number, _) in VALUE_TYPES.items()} == {
        kind.name.lower(): int(kind) for kind in gguf.GGUFValueType if kind.name != "ARRAY"
    }
    for form in dt.gguf.BLOCK_FORMATS.values():
        kind = tensor_types()[form.type_name]
        assert (kind.number, kind.block_size, kind.block_bytes) == (form.gguf_type, form.block_size, form.block_bytes)


@pytest.mark.parametrize(
    ("entries", "tensors", "error", "message"),
    [
        ([("k", "uint32", 1)] * 2, [], SpecError, "'k' occurs twice"),
        ([], [("w", (1,), "F32")] * 2, SpecError, "'w' occurs twice"),
        ([("k", "uint33", 1)], [], SpecError, "uint33"),
        ([("k", "uint8", 256)], [], DtypeError, "cannot represent 256"),
        ([("k", "uint32", 1.5)], [], DtypeError, "cannot represent 1.5"),
        ([("k", "uint32", True)], [], DtypeError, "got True"),
        ([("k", "string", 3)], [], DtypeError, "not a string"),
        ([("k", "array:string", ["a", 3])], [], DtypeError, "not a string"),
        ([], [("w", (2, 48), "Q8_0")], ShapeError, "multiple of 32"),
        ([], [("w", (), "F32")], ShapeError, "one to four axes"),
        ([], [("w", (0, 32), "F32")], ShapeError, "not empty"),
        ([], [("w", (2, 32), "Q8_1K")], SpecError, "did you mean 'Q8_K'"),
        ([], [("", (2, 32), "F32")], SpecError, "1 to 65,535 bytes"),
    ],
)
def test_invalid_contents_raise(entries, tensors, error, message):
    with pytest.raises(error, match=message):
        gguf_layout(entries, tensors)
