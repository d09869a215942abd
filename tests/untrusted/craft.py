"""Write valid and invalid bytes of files without the code under test."""

import json

import numpy as np

import detent as dt

__all__ = ["NAMES", "damaged_at", "entry", "file_of", "forged", "header_of", "tensor_file"]

NAMES = {"uint8": "U8", "int8": "I8", "int32": "I32", "int64": "I64", "float32": "F32", "float64": "F64"}


def file_of(header, body=b"", length=None):
    """Bytes of a file with that header (bytes or JSON-ready data) and body; `length` overrides the length field."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + body


def entry(begin, end, shape=None, dtype="U8"):
    """Header entry of one tensor; the default shape fits the offsets."""
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


def header_of(data):
    """Split valid bytes into the parsed header and the body."""
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def tensor_file(about, arrays, **metadata):
    """Bytes of a QuantizedTensor's file with that metadata (text or JSON-ready data) and those arrays."""
    text = about if isinstance(about, str) else json.dumps(about)
    header = {"__metadata__": {"detent.QuantizedTensor": text, **metadata}}
    body = b""
    for name, value in arrays.items():
        array = np.asarray(value)
        header[name] = entry(len(body), len(body) + array.nbytes, list(array.shape), NAMES[array.dtype.name])
        body += array.tobytes()
    return file_of(header, body)


def forged(about=(), spec=(), arrays=(), drop=(), rewrite=json.dumps):
    """Bytes of a small uint4 tensor of shape (2, 3) with some contents replaced."""
    spec_fields = dt.QuantSpec("uint4", "axis0").to_dict() | dict(spec)
    facts = {"version": 1, "spec": spec_fields, "shape": [2, 3], "dtype": "float32"} | dict(about)
    contents = {
        "packed": np.array([0x21, 0x43, 0x65], np.uint8),
        "scale": np.array([0.5, 0.25], np.float32),
        "zero_point": np.array([0x10], np.uint8),
    } | dict(arrays)
    return tensor_file(rewrite(facts), {name: value for name, value in contents.items() if name not in drop})


def damaged_at(rng, data, at, first=0):
    """Remove, insert or change a byte at a position, or change three random bytes from ``first`` on."""
    copy = bytearray(data)
    match rng.integers(4):
        case 0:
            del copy[at]
        case 1:
            copy.insert(at, int(rng.integers(256)))
        case 2:
            copy[at] ^= 1 << int(rng.integers(8))
        case _:
            for position in rng.integers(first, len(copy), size=3):
                copy[position] = int(rng.integers(256))
    return bytes(copy)
