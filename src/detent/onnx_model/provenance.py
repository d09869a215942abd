"""Provenance: how a quantized file was made, so that ``dt.verify`` can compare the file with its source model.

Provenance is stored as JSON in the metadata entry ``detent``. The same model and decisions give the same entry on every
machine. The kernels that ONNX Runtime chose depend on the machine, so they are in a separate entry,
``detent.runtime``.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto

from detent.codec import Leaf, Leaves, check_version, decode, parse
from detent.errors import FileFormatError
from detent.onnx_model.graph import QUANTIZE, array_of

__all__ = ["KEY", "RUNTIME_KEY", "Provenance", "RuntimeRecord", "digest_of"]

KEY, RUNTIME_KEY = "detent", "detent.runtime"
VERSION = 2
RUNTIME_VERSION = 1
TEXT_LIMIT = 1 << 24  # limit on the characters of an entry
CODES_NODE = "_codes_node"  # end of a QuantizeLinear node's name, after the name of the tensor
MODEL_DIGITS = 32  # hexadecimal digits of a digest
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
        _write_entry(model, KEY, {"version": VERSION, **fields, "recipe": recipe})

    @classmethod
    def read(cls, model: ModelProto) -> "Provenance | None":
        """Read the provenance from a model's metadata; return None if the metadata has no provenance.

        Raises:
            FileFormatError: the entry cannot be read.
        """
        fields, entry = _read_entry(model, KEY), f"the metadata entry {KEY!r}"
        if fields is None:
            return None
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


def _tensors_by_name(model: ModelProto) -> dict[str, str]:
    """Map the name of each QuantizeLinear node that is named ``<tensor>_codes_node`` to ``<tensor>``."""
    names = [node.name for node in model.graph.node if node.op_type == QUANTIZE]
    return {name: name.removesuffix(CODES_NODE) for name in names if name.endswith(CODES_NODE)}


def _write_entry(model: ModelProto, key: str, fields: Mapping[str, Any]) -> None:
    others = [(entry.key, entry.value) for entry in model.metadata_props if entry.key != key]
    del model.metadata_props[:]
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    for name, value in (*others, (key, text)):
        model.metadata_props.add(key=name, value=value)


def _read_entry(model: ModelProto, key: str) -> dict[str, Any] | None:
    texts = [entry.value for entry in model.metadata_props if entry.key == key]
    if len(texts) > 1:
        raise FileFormatError(f"the metadata entry {key!r} occurs {len(texts)} times, expected once")
    return parse(texts[0], f"the metadata entry {key!r}", limit=TEXT_LIMIT) if texts else None


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
        fields, entry = _read_entry(model, RUNTIME_KEY), f"the metadata entry {RUNTIME_KEY!r}"
        if fields is None:
            return None
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
