"""Provenance: how a quantized file was made, so that ``dt.verify`` can compare the file with its source model.

Provenance is stored as JSON in the metadata entry ``detent``. The same model and decisions give the same entry on every
machine. The kernels that ONNX Runtime chose depend on the machine, so they are in a separate entry,
``detent.runtime``.

The decisions are by far the largest part, so they are compressed: the base85 of the bzip2 compression of their JSON. A
JSON object in this place is read, too: people may edit it, and short decisions and files of version 2 have it.
"""

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto

from detent.codec import Leaf, Leaves, check_version, decode, parse
from detent.errors import FileFormatError, UnsupportedError
from detent.onnx_model.graph import QUANTIZE, array_of

__all__ = ["KEY", "RUNTIME_KEY", "Provenance", "RuntimeRecord", "digest_of", "fields_of", "packed", "unpacked"]

KEY, RUNTIME_KEY = "detent", "detent.runtime"
VERSION = 3
RUNTIME_VERSION = 1
TEXT_LIMIT = 1 << 24  # limit on the characters of an entry
MAX_EXPANSION, MIN_LIMIT = 64, 1 << 16  # decompressed decisions have at most 64 times the characters, or 65,536
CODES_NODE = "_codes_node"  # end of a QuantizeLinear node's name, after the name of the tensor
MODEL_DIGITS = 32  # hexadecimal digits of a digest
_DECISIONS = f"'decisions' in the metadata entry {KEY!r}"
_PARTS: Leaves = {dict: Leaf(lambda value: value, lambda value: value)}  # decoded by the modules that encoded them


@dataclass(frozen=True)
class Provenance:
    """Metadata of a quantized file: its source model, recipe and options, and the origin of its codes.

    Attributes:
        weights: maps the name of each initializer that holds codes to the name of its layer or weight.
        activations: maps the name of each QuantizeLinear node to the name of its quantizer or tensor. The mapping is
            not stored if each QuantizeLinear node is named ``<tensor>_codes_node``.
        target: name of the target.
        recipe: the recipe as JSON.
        made_by: version of detent that wrote the file.
        data: hash of the calibration data.
        source: digest of the float ONNX model.
        options: options that differ from the defaults, as JSON.
        decisions: decisions that the file was made from, as encoded by ``stored_decisions``, or None without decisions.
        export: arguments of ``qt.export_onnx``, or None if the file is not from ``qt.export_onnx``.

    >>> model = ModelProto()
    >>> Provenance({"w_codes": "fc.weight"}, {}, "onnxruntime").write(model)
    >>> Provenance.read(model).weights
    {'w_codes': 'fc.weight'}
    """

    weights: Mapping[str, str] = field(default_factory=dict)
    activations: Mapping[str, str] = field(default_factory=dict)
    target: str = ""
    recipe: str = ""
    made_by: str = ""
    data: str = ""
    source: str = ""
    options: str = ""
    decisions: dict[str, Any] | None = None
    export: dict[str, Any] | None = None

    def write(self, model: ModelProto) -> None:
        """Write the provenance into a model's metadata, replacing an existing entry."""
        # A recipe may be long, with one rule per layer, so its JSON is stored without spaces, too.
        recipe = json.dumps(json.loads(self.recipe), separators=(",", ":")) if self.recipe else ""
        fields = {name: value for name, value in vars(self).items() if value is not None}
        if self.activations == _tensors_by_name(model):
            del fields["activations"]
        if self.decisions is not None:
            fields["decisions"] = _shorter(self.decisions)
        _write_entry(model, KEY, {"version": VERSION, **fields, "recipe": recipe})

    @classmethod
    def read(cls, model: ModelProto) -> "Provenance | None":
        """Read the provenance from a model's metadata; return None if the metadata has no provenance.

        Raises:
            FileFormatError: the entry cannot be read.
            UnsupportedError: the decisions are compressed, and this Python has no module bz2.
        """
        text, entry = _entry(model, KEY), f"the metadata entry {KEY!r}"
        if text is None:
            return None
        fields = fields_of(text)
        version = fields.pop("version", None)
        if version == 1:  # version 1 had hashes of quantizers instead of decisions
            fields.pop("digests", None)
        else:
            check_version(version, VERSION, entry)
        fields.setdefault("activations", _tensors_by_name(model))
        parts = {name: fields.pop(name, None) for name in ("decisions", "export")}
        for name, part in parts.items():
            if not isinstance(part, dict | None):
                raise FileFormatError(f"{entry}: {name} must be a JSON object, got {part!r:.60}")
        return replace(decode(cls, {**fields, "decisions": None, "export": None}, entry, _PARTS), **parts)


def fields_of(text: str) -> dict[str, Any]:
    """Parse the metadata entry ``detent``; decisions that are compressed become a JSON object.

    Raises:
        FileFormatError: the entry cannot be read.
        UnsupportedError: the decisions are compressed, and this Python has no module bz2.

    >>> fields_of('{"version":2,"decisions":{"opset":17}}')
    {'version': 3, 'decisions': {'opset': 17}}
    """
    fields = parse(text, f"the metadata entry {KEY!r}", limit=TEXT_LIMIT)
    if isinstance(fields.get("decisions"), str):
        fields["decisions"] = unpacked(fields["decisions"])
    version = fields.get("version")
    if type(version) is int and version == 2:  # version 2 never compressed decisions
        fields["version"] = VERSION
    return fields


def packed(decisions: Mapping[str, Any]) -> str:
    """Return the base85 of the bzip2 compression of a JSON object; ``unpacked`` returns the object.

    Raises:
        UnsupportedError: this Python has no module bz2.

    >>> text = packed({"opset": 17})
    >>> unpacked(text)
    {'opset': 17}
    """
    return _compressed(_compact(decisions))


def _compressed(plain: str) -> str:
    # Not zlib: zlib and zlib-ng compress the same text to different bytes, and a file must have the same bytes on every
    # machine. There is one implementation of bzip2.
    return base64.b85encode(_bz2().compress(plain.encode(), 9)).decode("ascii")


def unpacked(text: str) -> dict[str, Any]:
    """Return the JSON object of a text from ``packed``. A short text may only expand to a short object.

    Raises:
        FileFormatError: the text is malformed, or its JSON is too long or not an object.
        UnsupportedError: this Python has no module bz2.
    """
    if len(text) % 5 == 1:  # b85decode ignores a single character after the last group of five
        raise _unreadable(f"the text has {len(text)} characters, which base85 never has")
    limit = _limit(text)
    try:
        content = base64.b85decode(text)
        decompressor = _bz2().BZ2Decompressor()
        decoded = decompressor.decompress(content, max_length=limit + 1)
        plain = decoded.decode() if len(decoded) <= limit else ""
    except (ValueError, OSError) as error:
        raise _unreadable(f"got {text!r:.60}: {error}") from error
    if len(decoded) > limit:
        raise FileFormatError(
            f"{_DECISIONS} has more than {limit} characters when decompressed, expected at most {limit} for a text of "
            f"{len(text)} characters"
        )
    if not decompressor.eof:
        raise _unreadable(f"the text of {len(text)} characters ends too early")
    if decompressor.unused_data:
        raise _unreadable(f"got {len(decompressor.unused_data)} bytes after the compressed data")
    return parse(plain, _DECISIONS, limit=limit)


def _limit(text: str) -> int:
    """Return the limit on the characters of decompressed decisions."""
    return min(TEXT_LIMIT, max(MIN_LIMIT, MAX_EXPANSION * len(text)))


def _bz2() -> ModuleType:
    """Import the module bz2, which a Python built without libbz2 lacks."""
    try:
        return import_module("bz2")
    except ImportError as error:
        raise UnsupportedError(
            f"{_DECISIONS} is compressed, but this Python was built without the module bz2: install libbz2 and build "
            "Python again, or use another Python"
        ) from error


def _unreadable(problem: str) -> FileFormatError:
    return FileFormatError(
        f"{_DECISIONS}: {problem}; expected the base85 of bzip2-compressed JSON, or a JSON object: quantize again"
    )


def _shorter(decisions: dict[str, Any]) -> dict[str, Any] | str:
    """Compress decisions if that makes them shorter, ``unpacked`` accepts the text, and this Python has bz2."""
    plain = _compact(decisions)
    try:
        text = _compressed(plain)
    except UnsupportedError:
        return decisions
    return text if len(text) < len(plain) <= _limit(text) else decisions


def _compact(value: Mapping[str, Any]) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _tensors_by_name(model: ModelProto) -> dict[str, str]:
    """Map the name of each QuantizeLinear node that is named ``<tensor>_codes_node`` to ``<tensor>``."""
    names = [node.name for node in model.graph.node if node.op_type == QUANTIZE]
    return {name: name.removesuffix(CODES_NODE) for name in names if name.endswith(CODES_NODE)}


def _write_entry(model: ModelProto, key: str, fields: Mapping[str, Any]) -> None:
    others = [(entry.key, entry.value) for entry in model.metadata_props if entry.key != key]
    del model.metadata_props[:]
    for name, value in (*others, (key, _compact(fields))):
        model.metadata_props.add(key=name, value=value)


def _entry(model: ModelProto, key: str) -> str | None:
    texts = [entry.value for entry in model.metadata_props if entry.key == key]
    if len(texts) > 1:
        raise FileFormatError(f"the metadata entry {key!r} occurs {len(texts)} times, expected once")
    return texts[0] if texts else None


@dataclass(frozen=True)
class RuntimeRecord:
    """Version, machine and integer kernels of ONNX Runtime when a file was written.

    Attributes:
        onnxruntime: version of ONNX Runtime.
        machine: architecture of the CPU, from ``platform.machine()``.
        kernels: maps the name of each node to its integer kernel.
    """

    onnxruntime: str
    machine: str
    kernels: Mapping[str, str]

    def write(self, model: ModelProto) -> None:
        """Write the runtime record into a model's metadata, replacing an existing entry."""
        by_kernel: dict[str, list[str]] = {}
        for node, kernel in self.kernels.items():
            by_kernel.setdefault(kernel, []).append(node)
        fields = {"version": RUNTIME_VERSION, **vars(self), "kernels": by_kernel}
        _write_entry(model, RUNTIME_KEY, fields)

    @classmethod
    def read(cls, model: ModelProto) -> "RuntimeRecord | None":
        """Read the runtime record from a model's metadata; return None if the metadata has no such record.

        Raises:
            FileFormatError: the entry cannot be read.
        """
        text, entry = _entry(model, RUNTIME_KEY), f"the metadata entry {RUNTIME_KEY!r}"
        if text is None:
            return None
        fields = parse(text, entry, limit=TEXT_LIMIT)
        check_version(fields.pop("version", None), RUNTIME_VERSION, entry)
        by_kernel = fields.get("kernels")
        if not isinstance(by_kernel, dict) or not all(isinstance(each, list) for each in by_kernel.values()):
            raise FileFormatError(f"{entry}: kernels must be a JSON object of lists, got {by_kernel!r:.60}")
        names = [(node, kernel) for kernel, nodes in by_kernel.items() for node in nodes]
        if not all(isinstance(node, str) for node, _ in names):
            raise FileFormatError(f"{entry}: kernels must list node names, got {by_kernel!r:.60}")
        return decode(cls, {**fields, "kernels": dict(names)}, entry)


def digest_of(model: ModelProto) -> str:
    """Hash what a model computes: nodes, values of constants, names of inputs and outputs."""
    graph, digest = model.graph, sha256()
    digest.update(repr([[value.name for value in part] for part in (graph.input, graph.output)]).encode())
    for node in graph.node:
        digest.update(node.SerializeToString(deterministic=True))
    for tensor in sorted(graph.initializer, key=lambda tensor: tensor.name):
        digest.update(repr((tensor.name, tensor.data_type, list(tensor.dims))).encode())
        digest.update(_content(tensor))
    return digest.hexdigest()[:MODEL_DIGITS]


def _content(tensor: TensorProto) -> bytes | memoryview:
    """Return the values of a tensor as bytes, independent of their storage in the file."""
    # A NumPy array of strings would hold addresses, not the strings.
    if tensor.data_type == TensorProto.STRING:
        return repr(list(tensor.string_data)).encode()
    return np.ascontiguousarray(array_of(tensor)).view(np.uint8).data if np.prod(tensor.dims) else b""
