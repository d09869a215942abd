"""ONNX model files: read as untrusted, written atomically.

``load_model`` checks a model once, in this order:

1. the outermost protobuf fields, before the file is parsed
2. IR version and opset
3. the number of bytes of each tensor, compared with the tensor's shape and type, before an array is allocated
4. cycles in the graph
5. ``onnx.checker``

External data must be a regular file in the model's directory or below it, without symbolic or hard links. Otherwise a
model could refer to any file that the user can read, and ``save`` would copy that file into the next model.
"""

import hashlib
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from math import prod
from os import PathLike
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import IO, TypeVar

import onnx
from google.protobuf.message import DecodeError, EncodeError, Message
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper

from detent import storage
from detent.errors import FileFormatError, SpecError, UnsupportedError
from detent.onnx_model.graph import BITS, MAIN, check_depth, sort_nodes
from detent.onnx_model.model_inputs import InputInfo, inputs_of
from detent.onnx_model.provenance import digest_of
from detent.recipe import Recipe

__all__ = [
    "SAVE_LIMIT",
    "LoadedModel",
    "ModelSource",
    "copied",
    "default_output",
    "load",
    "load_model",
    "older_file",
    "remove",
    "save",
    "without_initializers",
]

FILE_LIMIT = (1 << 31) - 1  # largest size of a protocol buffer in bytes
SAVE_LIMIT = FILE_LIMIT - (64 << 20)  # bytes; in larger models, large tensors become external data
MIN_EXTERNAL_BYTES = 1024  # smaller tensors stay in the model file
MAX_SHARING = 4  # limit on the bytes that tensors read from an external file, as a multiple of the file's size
NEWEST_IR, NEWEST_OPSET = 13, 26  # the newest versions that ONNX Runtime 1.31 reads
FIELDS_LIMIT = 100_000  # limit on the outermost fields of a file; real models have a few dozen
GRAPH_FIELD = 7  # protobuf field number of ModelProto.graph
VARINT_LIMIT = 10  # bytes
MAX_CHARS_SHOWN = 200  # longer names are cut in messages
AnyMessage = TypeVar("AnyMessage", bound=Message)
UNNAMED_RECIPE = "quantized"  # used in file names if the recipe has no name
_SEPARATORS = re.compile(r"[/\\\x00-\x1f]+")
_KEYS = frozenset({"location", "offset", "length", "checksum"})
_FIXED = {1: 8, 5: 4}  # maps the wire type of a field to its size in bytes
_DATA_FIELDS = ("float_data", "int32_data", "int64_data", "uint64_data", "double_data", "string_data")
_COMPLEX = (TensorProto.COMPLEX64, TensorProto.COMPLEX128)


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model that was read and checked once; functions that accept a path also accept a ``LoadedModel``.

    Attributes:
        proto: the model, including its external data. Do not change it; ``load`` returns a copy that may be changed.
        path: the file that the model was read from, or None for a model in memory.
        nbytes: size of the model file and its external data in bytes; for a model in memory, the size that its file
            would have.

    >>> from onnx import parser
    >>> model = load_model(parser.parse_model(
    ...     '<ir_version: 8, opset_import: ["" : 17]> g (float[N, 3] x) => (float[N, 3] y) { y = Relu(x) }'))
    >>> model.inputs, model.outputs, load_model(model) is model
    ((InputInfo(name='x', dtype=dtype('float32'), shape=(None, 3)),), ('y',), True)
    """

    proto: ModelProto
    path: Path | None
    nbytes: int

    @cached_property
    def digest(self) -> str:
        """Hash of what the model computes; see ``provenance.digest_of``."""
        return digest_of(self.proto)

    @cached_property
    def inputs(self) -> tuple[InputInfo, ...]:
        """Inputs that a caller must pass; raises UnsupportedError if an input is not a tensor."""
        return tuple(inputs_of(self.proto))

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the outputs."""
        return tuple(value.name for value in self.proto.graph.output)


ModelSource = LoadedModel | ModelProto | str | PathLike[str]


def load_model(source: ModelSource) -> LoadedModel:
    """Read and check a model; a ``LoadedModel`` is returned unchanged, a ModelProto is copied.

    Raises:
        FileFormatError: the file is not an ONNX model or is damaged, the graph is cyclic, or external data is in a
            forbidden place.
        UnsupportedError: the model has a newer IR version or opset than ONNX Runtime reads.
        SpecError: ``source`` is neither a path nor a model.

    >>> load_model("nothing.onnx")
    Traceback (most recent call last):
    ...
    detent.errors.FileFormatError: nothing.onnx: there is no such file
    """
    if isinstance(source, LoadedModel):
        return source
    if isinstance(source, ModelProto):
        check_depth(source.graph)  # otherwise, protobuf would reject deep nesting with its own error
        model = copied(source)
        _check(model, _ExternalData(None), "the model")
        return LoadedModel(model, None, _nbytes(model))
    if not isinstance(source, str | PathLike):
        raise SpecError(f"expected the model as a path, a ModelProto or a LoadedModel, got {source!r:.80}")
    path = Path(source)
    model, external = _parse(path), _ExternalData(path.parent)
    _check(model, external, os.fspath(path))
    return LoadedModel(model, path, path.stat().st_size + external.nbytes)


def load(source: ModelSource) -> ModelProto:
    """Load and check a model with its external data; the caller may change the result.

    Raises:
        FileFormatError, UnsupportedError: the model is invalid or not supported, see ``load_model``.
    """
    return copied(source.proto) if isinstance(source, LoadedModel) else load_model(source).proto


def copied(model: ModelProto) -> ModelProto:
    """Return a copy of a model, which may be changed."""
    copy = ModelProto()
    copy.CopyFrom(model)
    return copy


def _parse(path: Path) -> ModelProto:
    name = os.fspath(path)
    if not path.is_file():
        raise FileFormatError(
            f"{name}: there is no such file" if not path.exists() else f"{name} is not a file, expected an ONNX file"
        )
    model = ModelProto()
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            _check_frame(file, size)
            file.seek(0)
            model.ParseFromString(file.read(size))
    except (DecodeError, ValueError, RecursionError) as error:  # FileFormatError is a ValueError
        raise FileFormatError(f"{name} is not an ONNX model, or is truncated: {error}") from error
    except OSError as error:
        raise FileFormatError(f"{name} cannot be read: {error.strerror}") from error
    return model


def _check_frame(file: IO[bytes], size: int) -> None:
    """Check that the outermost protobuf fields fill a file exactly; their contents are not read."""
    if not 0 < size <= FILE_LIMIT:
        raise FileFormatError(f"the file has {size} bytes, expected between 1 and {FILE_LIMIT}")
    position, count, has_graph = 0, 0, False
    while position < size and count < FIELDS_LIMIT:
        file.seek(position)
        start = file.read(2 * VARINT_LIMIT)
        tag, tag_length = _varint(start)
        number, wire = tag >> 3, tag & 7
        value, value_length = (0, 0) if wire in _FIXED else _varint(start[tag_length:])
        if not number or wire not in {0, 2, *_FIXED}:
            raise FileFormatError(f"invalid protobuf field at byte {position}")
        has_graph |= number == GRAPH_FIELD
        count += 1
        position += tag_length + value_length + _FIXED.get(wire, value if wire else 0)
    if position != size:
        raise FileFormatError(f"the protobuf fields end at byte {position}, but the file has {size} bytes")
    if not has_graph:
        raise FileFormatError("the file has no graph")


def _varint(data: bytes) -> tuple[int, int]:
    """Decode a varint; return its value and its length in bytes."""
    value = 0
    for i, byte in enumerate(data[:VARINT_LIMIT]):
        value |= (byte & 127) << 7 * i
        if byte < 128:  # no continuation bit: the last byte
            return value, i + 1
    raise FileFormatError("truncated varint")


def _check(model: ModelProto, external: "_ExternalData", name: str) -> None:
    try:
        _check_versions(model)
        for tensor in _tensors(model):
            try:
                if any(size < 0 for size in tensor.dims):
                    raise FileFormatError(f"the shape {list(tensor.dims)} has a negative size")
                external.fetch(tensor)
                _check_tensor(tensor)
            except FileFormatError as error:
                raise FileFormatError(f"tensor {tensor.name!r}: {error}") from error
        sort_nodes(model.graph)
        _run_onnx_checker(model)
    except (FileFormatError, UnsupportedError) as error:
        raise type(error)(f"{name}: {error}") from error
    except (onnx.checker.ValidationError, ValueError, RecursionError) as error:
        raise FileFormatError(f"{name}: {error}") from error


def _check_versions(model: ModelProto) -> None:
    if not model.HasField("graph") or not model.opset_import:
        raise FileFormatError("not an ONNX model: no graph, or no opset")
    if model.ir_version > NEWEST_IR:
        raise UnsupportedError(
            f"got IR version {model.ir_version}, but ONNX Runtime reads at most {NEWEST_IR}: export the model with an "
            "older IR version"
        )
    versions: dict[str, int] = {}
    for entry in model.opset_import:
        domain = "" if entry.domain in MAIN else entry.domain
        if versions.setdefault(domain, entry.version) != entry.version:
            raise FileFormatError(
                f"the model has two versions of the opset {entry.domain!r}, expected one: export the model again"
            )
    if versions.get("", 1) < 1:
        raise FileFormatError(f"the model has opset {versions['']}, expected at least 1")
    if versions.get("", 1) > NEWEST_OPSET:
        raise UnsupportedError(
            f"got opset {versions['']}, but ONNX Runtime reads at most {NEWEST_OPSET}: export with an older opset"
        )


def _run_onnx_checker(model: ModelProto) -> None:
    """Run ``onnx.checker`` without the data of large tensors; accept inputs without shapes, as runtimes do."""
    lean = without_initializers(model)
    lean.graph.initializer.extend(_without_bytes(tensor) for tensor in model.graph.initializer)
    for value in (*lean.graph.input, *lean.graph.output):
        kind = value.type.tensor_type
        if value.HasField("type") and kind.elem_type and not kind.HasField("shape"):
            kind.shape.SetInParent()
    onnx.checker.check_model(lean)


def _without_bytes(tensor: TensorProto) -> TensorProto:
    """Return an empty tensor with the name and type of a large tensor; return a small tensor unchanged."""
    is_large = tensor.data_type in BITS and _raw_nbytes(tensor) >= MIN_EXTERNAL_BYTES
    if not is_large or not tensor.HasField("raw_data") or any(len(getattr(tensor, name)) for name in _DATA_FIELDS):
        return tensor
    return TensorProto(name=tensor.name, data_type=tensor.data_type, dims=[0])


def without_initializers(model: ModelProto) -> ModelProto:
    """Copy a model without its initializers, to save memory."""
    lean = _copy_without(model, "graph")
    lean.graph.CopyFrom(_copy_without(model.graph, "initializer"))
    return lean


def _copy_without(message: AnyMessage, name: str) -> AnyMessage:
    """Copy a protocol buffer without one of its fields."""
    copy: AnyMessage = type(message)()
    for field, value in message.ListFields():
        if field.name == name:
            continue
        if isinstance(value, Message):
            getattr(copy, field.name).CopyFrom(value)
        elif hasattr(value, "extend"):
            getattr(copy, field.name).extend(value)
        else:
            setattr(copy, field.name, value)
    return copy


def _nbytes(model: ModelProto) -> int:
    """Return the size of a model in bytes; for a model above the protobuf limit, the size of its tensors."""
    try:
        return int(model.ByteSize())
    except EncodeError:
        return sum(len(tensor.raw_data) for tensor in _tensors(model))


def _tensors(model: ModelProto) -> Iterator[TensorProto]:
    """Yield all initializers and constants of the main graph, of subgraphs and of functions."""
    yield from _tensors_of_graph(model.graph)
    for function in model.functions:
        yield from _tensors_of_nodes(function.node)


def _tensors_of_graph(graph: GraphProto) -> Iterator[TensorProto]:
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    yield from _tensors_of_nodes(graph.node)


def _tensors_of_nodes(nodes: Iterable[NodeProto]) -> Iterator[TensorProto]:
    for attribute in (each for node in nodes for each in node.attribute):
        if attribute.HasField("t"):
            yield attribute.t
        yield from attribute.tensors
        if attribute.HasField("g"):
            yield from _tensors_of_graph(attribute.g)
        for graph in attribute.graphs:
            yield from _tensors_of_graph(graph)


def _check_tensor(tensor: TensorProto) -> None:
    if tensor.data_type != TensorProto.STRING and tensor.data_type not in BITS:
        raise FileFormatError(f"unknown data type {tensor.data_type}: update onnx, or export the model again")
    if tensor.HasField("raw_data"):
        expected, stored, unit = _raw_nbytes(tensor), len(tensor.raw_data), "bytes"
    else:
        # One number per element, two numbers per complex element, or one number per byte of packed elements.
        count, bits = prod(tensor.dims), BITS.get(tensor.data_type, 8)
        expected = 2 * count if tensor.data_type in _COMPLEX else -(-count * min(bits, 8) // 8)
        stored, unit = len(getattr(tensor, helper.tensor_dtype_to_field(tensor.data_type))), "numbers"
    if stored != expected:
        raise FileFormatError(
            f"the shape {list(tensor.dims)} needs {expected} {unit}, but the file holds {stored}: "
            "export the model again"
        )


class _ExternalData:
    """External data in the model's directory; ``directory`` is None for a model in memory."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._claimed: dict[Path, int] = {}
        self._sizes: dict[Path, int] = {}

    @property
    def nbytes(self) -> int:
        return sum(self._sizes.values())

    def fetch(self, tensor: TensorProto) -> None:
        """Read the external data of a tensor into the tensor."""
        if tensor.data_location != TensorProto.EXTERNAL:
            return
        if self._directory is None:
            raise FileFormatError("the tensor has external data, but the model is in memory: pass the model's path")
        if tensor.data_type not in BITS:
            raise FileFormatError(
                f"the external data has unknown data type {tensor.data_type}: update onnx, or export the model again"
            )
        entries = {entry.key: entry.value for entry in tensor.external_data if entry.key in _KEYS}
        expected = _raw_nbytes(tensor)
        offset, length = _number(entries, "offset", 0), _number(entries, "length", expected)
        if length != expected:
            raise FileFormatError(
                f"the tensor needs {expected} bytes, but its external data has {length} bytes at offset {offset}: "
                "export the model again"
            )
        tensor.raw_data = self._read(self._directory, entries.get("location", ""), offset, length)
        tensor.ClearField("external_data")
        tensor.ClearField("data_location")

    def _read(self, directory: Path, location: str, offset: int, length: int) -> bytes:
        shown = repr(location[:MAX_CHARS_SHOWN])
        try:
            path = _inside(directory, location)
            handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
            try:
                self._check_file(path, shown, os.fstat(handle), offset + length, length)
                with os.fdopen(handle, "rb", closefd=False) as file:
                    file.seek(offset)
                    return file.read(length)
            finally:
                os.close(handle)
        except OSError as error:
            raise FileFormatError(f"the external data in {shown} cannot be read: {error.strerror}") from error

    def _check_file(self, path: Path, shown: str, status: os.stat_result, end: int, length: int) -> None:
        if not stat.S_ISREG(status.st_mode):
            raise FileFormatError(f"the external data is in {shown}, expected a regular file: replace it by a copy")
        if status.st_nlink != 1:
            raise FileFormatError(f"the external data is in {shown}, which has hard links: replace this file by a copy")
        if end > status.st_size:
            raise FileFormatError(
                f"the external data ends at byte {end} of {shown}, but this file has only {status.st_size} bytes: "
                "copy this file again"
            )
        self._sizes[path] = status.st_size
        self._claimed[path] = self._claimed.get(path, 0) + length
        if self._claimed[path] > MAX_SHARING * status.st_size:
            raise FileFormatError(
                f"the external data is in {shown}, but the tensors together need over {MAX_SHARING} times the "
                "size of this file: store the data of each tensor separately"
            )


def _raw_nbytes(tensor: TensorProto) -> int:
    """Compute the size of a tensor in bytes from shape and type, because reading ``raw_data`` would copy the data."""
    return -(-int(prod(tensor.dims)) * BITS.get(tensor.data_type, 8) // 8)


def _number(entries: dict[str, str], key: str, default: int) -> int:
    text = entries.get(key, str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise FileFormatError(
            f"the external data has the {key} {text[:MAX_CHARS_SHOWN]!r}, expected a number of "
            "bytes: export the model again"
        )
    return int(text)


def _inside(directory: Path, location: str) -> Path:
    """Return the path of ``location``; reject locations that are not in or below ``directory``, and symbolic links."""
    parts = PurePosixPath(location).parts
    is_unsafe = any(letter in location for letter in "\\\0") or PureWindowsPath(location).drive or location[:1] == "/"
    if not parts or is_unsafe or ".." in parts:
        raise FileFormatError(
            f"the external data is in {location[:MAX_CHARS_SHOWN]!r}, expected a file in the model's directory: "
            "save the model again with its data in that directory"
        )
    path = directory
    for part in parts:
        path = path / part
        if path.is_symlink():
            raise FileFormatError(
                f"the external data is in {location[:MAX_CHARS_SHOWN]!r}, where {part!r} is a symbolic link: "
                "replace the link by a copy"
            )
    return path


def default_output(model: str | PathLike[str], recipe: Recipe | str | PathLike[str]) -> Path:
    """Return the default output path: ``<model>.<recipe>.onnx`` next to the model.

    >>> default_output("nets/small.onnx", "w8a8").as_posix(), default_output("small.onnx", "conf/edge.toml").name
    ('nets/small.w8a8.onnx', 'small.edge.onnx')
    """
    name = (recipe.name or UNNAMED_RECIPE) if isinstance(recipe, Recipe) else Path(recipe).stem
    return Path(model).parent / f"{Path(model).stem}.{_SEPARATORS.sub('-', name)}.onnx"


def save(model: ModelProto, path: str | PathLike[str], *, limit: int = SAVE_LIMIT) -> int:
    """Write a model atomically: readers see the old file or the new file. Return the number of bytes written.

    If the model exceeds ``limit`` bytes, large tensors are stored as external data in ``<name>.<hash>.data``, next to
    the model file.

    >>> import tempfile, pathlib
    >>> from onnx import parser
    >>> model = parser.parse_model(
    ...     '<ir_version: 8, opset_import: ["" : 17]> g (float[1] x) => (float[1] y) { y = Relu(x) }')
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     written = save(model, pathlib.Path(directory, "a.onnx"))
    ...     load(pathlib.Path(directory, "a.onnx")).graph.name
    'g'
    """
    target = Path(path)
    content = _serialized(model, limit)
    if content is not None:
        storage.write_atomic(target, content)
        return len(content)
    chunks = [tensor.raw_data for tensor in _tensors(model) if len(tensor.raw_data) >= MIN_EXTERNAL_BYTES]
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
    # The file name depends on the data, so the external data of an older model is not overwritten.
    external = target.with_name(f"{target.name}.{digest.hexdigest()[:12]}.data")
    was_there = external.exists()
    storage.write_atomic(external, chunks)
    try:
        content = _with_external_data(model, external.name)
        storage.write_atomic(target, content)
    except BaseException:
        with suppress(OSError):
            if not was_there:
                external.unlink()
        raise
    return len(content) + sum(map(len, chunks))


def remove(path: str | PathLike[str], older: Path | None = None) -> None:
    """Delete a model file that ``save`` wrote, and its external data. ``older``, if given, takes its place."""
    target = Path(path)
    names = _own_data(target, target.name)
    if older is None:
        target.unlink()
    else:
        with suppress(FileFormatError):  # it may be any file
            names -= _own_data(older, target.name)
        older.replace(target)
    for name in names:
        target.with_name(name).unlink(missing_ok=True)


@contextmanager
def older_file(path: str | PathLike[str]) -> Iterator[Path | None]:
    """Give the file at ``path`` a second name for the block, so that ``remove`` can put it back; None without a file.

    ``save`` does not change its external data.
    """
    target = Path(path)
    if not target.is_file():
        yield None
        return
    older = target.with_name(f".{target.name}.{secrets.token_hex(6)}.older")
    try:
        try:
            older.hardlink_to(target.resolve())
        except OSError:  # the file system has no hard links
            shutil.copyfile(target, older)
        yield older
    finally:
        older.unlink(missing_ok=True)


def _own_data(path: Path, name: str) -> set[str]:
    """Return the files of external data that ``save`` named after the model ``name``, and that a model refers to."""
    own = re.compile(rf"{re.escape(name)}\.[0-9a-f]{{12}}\.data")
    entries = (entry for tensor in _tensors(_parse(path)) for entry in tensor.external_data)
    return {entry.value for entry in entries if entry.key == "location" and own.fullmatch(entry.value)}


def _serialized(model: ModelProto, limit: int) -> bytes | None:
    """Serialize a model without external data; return None if the result would exceed ``limit`` bytes."""
    if sum(map(_raw_nbytes, model.graph.initializer)) > limit:
        return None
    try:
        content = model.SerializeToString(deterministic=True)
    except EncodeError:  # too large for a protocol buffer
        return None
    return content if len(content) <= limit else None


def _with_external_data(model: ModelProto, location: str) -> bytes:
    """Serialize a model; its large tensors refer to external data in the file ``location``."""
    lean = copied(model)
    offset = 0
    for tensor in _tensors(lean):
        length = len(tensor.raw_data)
        if length < MIN_EXTERNAL_BYTES:
            continue
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (("location", location), ("offset", offset), ("length", length)):
            tensor.external_data.add(key=key, value=str(value))
        offset += length
    return bytes(lean.SerializeToString(deterministic=True))
