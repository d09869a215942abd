"""Files: ONNX models read with suspicion and written atomically.

A file is hostile until it is checked: sizes are compared with the bytes that are there before anything is allocated,
data outside the file must lie beside it, in plain files that nothing else points at, and nodes must form no circle.
"""

import hashlib
import os
import stat
from collections.abc import Iterator
from math import prod
from os import PathLike
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError, EncodeError
from onnx import AttributeProto, GraphProto, ModelProto, TensorProto

from detent import storage
from detent.errors import FileFormatError, UnsupportedError
from detent.qdq.order import sort_nodes
from detent.qdq.tensors import BITS

__all__ = ["SAVE_LIMIT", "ModelSource", "load", "save", "tensors_of"]

ModelSource = ModelProto | str | PathLike[str]
FILE_LIMIT = (1 << 31) - 1  # what a protocol buffer can hold
SAVE_LIMIT = FILE_LIMIT - (64 << 20)
SMALLEST_OUTSIDE = 1024  # bytes of a tensor that is worth a place in the data file
NEWEST_IR = 13
_TYPED = ("float_data", "int32_data", "int64_data", "double_data", "uint64_data", "string_data")


def load(source: ModelSource) -> ModelProto:
    """A checked model, its external data included; a ModelProto is copied.

    Args:
        source: a path, or a model in memory.

    Raises:
        FileFormatError: not an ONNX model, damaged, cyclic, or with data that lie where they must not.
        UnsupportedError: a newer version than ONNX Runtime reads.

    >>> from onnx import parser
    >>> made = parser.parse_model(
    ...     '<ir_version: 8, opset_import: ["" : 17]> g (float[1] x) => (float[1] y) { y = Relu(x) }')
    >>> load(made).graph.node[0].op_type
    'Relu'
    """
    if isinstance(source, ModelProto):
        model = ModelProto()
        model.CopyFrom(source)
        _check(model, None, "the model")
        return model
    path = Path(source)
    name = os.fspath(path)
    if not path.is_file():
        raise FileFormatError(f"{name}: there is no such file" if not path.exists() else f"{name} is no file")
    size = path.stat().st_size
    if not 0 < size <= FILE_LIMIT:
        raise FileFormatError(f"{name} has {size} bytes, an ONNX file has between 1 and {FILE_LIMIT}")
    try:
        model = ModelProto()
        model.ParseFromString(path.read_bytes())
    except (DecodeError, ValueError, RecursionError) as error:
        raise FileFormatError(f"{name} is no ONNX model, or truncated: {error}") from error
    _check(model, path.parent, name)
    return model


def _check(model: ModelProto, folder: Path | None, name: str) -> None:
    if not model.HasField("graph") or not model.opset_import:
        raise FileFormatError(f"{name} is no ONNX model: it has no graph, or names no operator set")
    if model.ir_version > NEWEST_IR:
        raise UnsupportedError(f"{name} has IR version {model.ir_version}, ONNX Runtime reads at most {NEWEST_IR}")
    for tensor in tensors_of(model):
        try:
            _fetch(tensor, folder)
            _check_tensor(tensor)
        except FileFormatError as error:
            raise FileFormatError(f"{name}: tensor {tensor.name!r} {error}") from error
    try:
        sort_nodes(model.graph)
        if model.ByteSize() < SAVE_LIMIT:
            onnx.checker.check_model(model)
    except (onnx.checker.ValidationError, FileFormatError) as error:
        raise FileFormatError(f"{name}: {error}") from error
    except EncodeError:  # larger than a protocol buffer, now that its data are here
        return


def tensors_of(model: ModelProto) -> Iterator[TensorProto]:
    """Every tensor of a model: initializers and constants, those of inner graphs and functions included.

    >>> list(tensors_of(ModelProto()))
    []
    """
    yield from _of_graph(model.graph)
    for function in model.functions:
        for node in function.node:
            for attribute in node.attribute:
                yield from _of_attribute(attribute)


def _of_graph(graph: GraphProto) -> Iterator[TensorProto]:
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    for node in graph.node:
        for attribute in node.attribute:
            yield from _of_attribute(attribute)


def _of_attribute(attribute: AttributeProto) -> Iterator[TensorProto]:
    if attribute.HasField("t"):
        yield attribute.t
    yield from attribute.tensors
    if attribute.HasField("g"):
        yield from _of_graph(attribute.g)
    for graph in attribute.graphs:
        yield from _of_graph(graph)


def _check_tensor(tensor: TensorProto) -> None:
    if tensor.data_type == TensorProto.STRING:
        return
    if tensor.data_type not in BITS:
        raise FileFormatError(f"has the unknown data type {tensor.data_type}")
    count, bits = _count(tensor), BITS[tensor.data_type]
    if tensor.HasField("raw_data"):
        expected, found = -(-count * bits // 8), len(tensor.raw_data)
        if expected != found:
            raise FileFormatError(f"of shape {list(tensor.dims)} takes {expected} bytes, the file holds {found}")
        return
    held = sum(len(getattr(tensor, name)) for name in _TYPED)
    if held not in {count, 2 * count, -(-count * bits // 8), -(-count * bits // 32)}:
        raise FileFormatError(f"of shape {list(tensor.dims)} holds {count} elements, the file {held}")


def _count(tensor: TensorProto) -> int:
    if any(size < 0 for size in tensor.dims):
        raise FileFormatError(f"has the shape {list(tensor.dims)}")
    return prod(tensor.dims)


def _fetch(tensor: TensorProto, folder: Path | None) -> None:
    """Bring the data of a tensor that lie outside the file into it."""
    if tensor.data_location != TensorProto.EXTERNAL:
        return
    if folder is None:
        raise FileFormatError("lies outside of a model that is in memory: give the model's path")
    if tensor.data_type not in BITS:
        raise FileFormatError(f"lies outside and has data type {tensor.data_type}")
    entries = {entry.key: entry.value for entry in tensor.external_data}
    expected = -(-_count(tensor) * BITS[tensor.data_type] // 8)
    try:
        offset, length = int(entries.get("offset", 0)), int(entries.get("length", expected))
    except ValueError as error:
        raise FileFormatError(f"has the offset and length {entries}, which are no numbers") from error
    if length != expected or offset < 0:
        raise FileFormatError(f"takes {expected} bytes, its entry says {length} at {offset}")
    tensor.raw_data = _read_beside(folder, entries.get("location", ""), offset, length)
    tensor.ClearField("external_data")
    tensor.ClearField("data_location")


def _read_beside(folder: Path, location: str, offset: int, length: int) -> bytes:
    """Bytes of a plain file in that folder, or in one below it, that is reached by no link."""
    relative = Path(location)
    if not location or relative.is_absolute() or "\\" in location or ".." in relative.parts or "\0" in location:
        raise FileFormatError(f"lies in {location!r}, expected a file beside the model")
    path = folder
    for part in relative.parts:
        path = path / part
        if path.is_symlink():
            raise FileFormatError(f"lies in {location!r}, where {part!r} is a symbolic link")
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    except OSError as error:
        raise FileFormatError(f"lies in {location!r}, which cannot be read: {error.strerror}") from error
    with os.fdopen(handle, "rb") as file:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode):
            raise FileFormatError(f"lies in {location!r}, which is no plain file")
        if about.st_nlink != 1:
            raise FileFormatError(f"lies in {location!r}, which has other names, too (hard links): copy it")
        if offset + length > about.st_size:
            raise FileFormatError(f"ends at byte {offset + length} of {location!r}, which has {about.st_size}")
        file.seek(offset)
        return file.read(length)


def save(model: ModelProto, path: str | PathLike[str], *, limit: int = SAVE_LIMIT) -> None:
    """Write a model atomically: readers see the old file or the new one.

    Args:
        model: what to write.
        path: where.
        limit: bytes above which large tensors go into a file of their own, ``<name>.<hash>.data``, beside it.

    >>> import tempfile, pathlib
    >>> from onnx import parser
    >>> made = parser.parse_model(
    ...     '<ir_version: 8, opset_import: ["" : 17]> g (float[1] x) => (float[1] y) { y = Relu(x) }')
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(made, pathlib.Path(folder, "a.onnx"))
    ...     load(pathlib.Path(folder, "a.onnx")).graph.name
    'g'
    """
    target = Path(path)
    large = [tensor for tensor in tensors_of(model) if len(tensor.raw_data) >= SMALLEST_OUTSIDE]
    total = sum(len(tensor.raw_data) for tensor in large)
    if total + _rest(model, large) <= limit:
        storage.write_atomic(target, model.SerializeToString(deterministic=True))
        return
    chunks = [tensor.raw_data for tensor in large]
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
    # Its name tells its content, so that an older model beside it keeps the data that it was written with.
    outside = target.with_name(f"{target.name}.{digest.hexdigest()[:12]}.data")
    storage.write_atomic(outside, chunks)
    lean = ModelProto()
    lean.CopyFrom(model)
    offset = 0
    for tensor in tensors_of(lean):
        length = len(tensor.raw_data)
        if length < SMALLEST_OUTSIDE:
            continue
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (("location", outside.name), ("offset", offset), ("length", length)):
            tensor.external_data.add(key=key, value=str(value))
        offset += length
    storage.write_atomic(target, lean.SerializeToString(deterministic=True))


def _rest(model: ModelProto, large: list[TensorProto]) -> int:
    """The bytes of all that is not in these tensors; what is too large to be counted is none of it."""
    try:
        return int(max(0, model.ByteSize() - sum(len(tensor.raw_data) for tensor in large)))
    except EncodeError:
        return 0
