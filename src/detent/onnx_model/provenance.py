"""Provenance: where a quantized file comes from, so that it can be compared with its source.

It is one entry of the model's metadata, ``detent``, in JSON. What ONNX Runtime made of the file when it was written is
an entry of its own, ``detent.runtime``, because it belongs to a machine: the same model and decisions give the same
first entry everywhere.
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
from detent.onnx_model.graph import array_of

__all__ = ["KEY", "RUNTIME_KEY", "Provenance", "RuntimeRecord", "digest_of"]

KEY, RUNTIME_KEY = "detent", "detent.runtime"
VERSION = 2
RUNTIME_VERSION = 1
TEXT_LIMIT = 1 << 24
MODEL_DIGITS = 32  # of a digest, hexadecimal
_PARTS: Leaves = {dict: Leaf(lambda value: value, lambda value: value)}  # read by the modules that wrote them


@dataclass(frozen=True)
class Provenance:
    """Where the quantizers of a file come from.

    Attributes:
        weights: the weight that each initializer of codes holds.
        activations: the quantizer or tensor that each QuantizeLinear node stands for, by the node's name.
        recipe: as JSON.
        made_by: the version of detent.
        data: a hash of the calibration data.
        source: the digest of the ONNX model that the file was made from.
        options: arguments of the call that are not the defaults, as JSON.
        decisions: everything that ``qo.rewrite`` needs beside the source, in the form of ``stored_decisions``; None in
            files of other origin.
        export: how ``qt.export_onnx`` was called; None in files of other origin.

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
        """Write or replace the entry in a model's metadata."""
        # A recipe may have a rule for every layer: its JSON is stored without spaces, too.
        recipe = json.dumps(json.loads(self.recipe), separators=(",", ":")) if self.recipe else ""
        fields = {name: value for name, value in vars(self).items() if value is not None}
        _write_entry(model, KEY, {"version": VERSION, **fields, "recipe": recipe})

    @classmethod
    def read(cls, model: ModelProto) -> "Provenance | None":
        """Read the entry of a model's metadata; None if there is none.

        Raises:
            FileFormatError: the entry cannot be read.
        """
        fields, entry = _read_entry(model, KEY), f"the metadata entry {KEY!r}"
        if fields is None:
            return None
        version = fields.pop("version", None)
        if version == 1:  # which had hashes of quantizers in place of decisions
            fields.pop("digests", None)
        else:
            check_version(version, VERSION, entry)
        parts = {name: fields.pop(name, None) for name in ("decisions", "export")}
        for name, part in parts.items():
            if not isinstance(part, dict | None):
                raise FileFormatError(f"{entry}: {name} must be an object, got {part!r:.60}")
        return replace(decode(cls, {**fields, "decisions": None, "export": None}, entry, _PARTS), **parts)


def _write_entry(model: ModelProto, key: str, fields: Mapping[str, Any]) -> None:
    others = [(entry.key, entry.value) for entry in model.metadata_props if entry.key != key]
    del model.metadata_props[:]
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    for name, value in (*others, (key, text)):
        model.metadata_props.add(key=name, value=value)


def _read_entry(model: ModelProto, key: str) -> dict[str, Any] | None:
    texts = [entry.value for entry in model.metadata_props if entry.key == key]
    if len(texts) > 1:
        raise FileFormatError(f"the metadata entry {key!r} is there {len(texts)} times, expected once")
    return parse(texts[0], f"the metadata entry {key!r}", limit=TEXT_LIMIT) if texts else None


@dataclass(frozen=True)
class RuntimeRecord:
    """What ONNX Runtime made of a file when it was written: a record of that machine, in an entry of its own.

    Attributes:
        onnxruntime: its version.
        machine: the processor's architecture, as Python names it.
        kernels: the integer kernels of the optimized graph, by the name of the node that they compute.
    """

    onnxruntime: str
    machine: str
    kernels: Mapping[str, str]

    def write(self, model: ModelProto) -> None:
        """Write or replace the entry in a model's metadata."""
        by_kernel: dict[str, list[str]] = {}
        for node, kernel in self.kernels.items():
            by_kernel.setdefault(kernel, []).append(node)
        fields = {"version": RUNTIME_VERSION, **vars(self), "kernels": by_kernel}
        _write_entry(model, RUNTIME_KEY, fields)

    @classmethod
    def read(cls, model: ModelProto) -> "RuntimeRecord | None":
        """Read the entry of a model's metadata; None if there is none.

        Raises:
            FileFormatError: the entry cannot be read.
        """
        fields, entry = _read_entry(model, RUNTIME_KEY), f"the metadata entry {RUNTIME_KEY!r}"
        if fields is None:
            return None
        check_version(fields.pop("version", None), RUNTIME_VERSION, entry)
        by_kernel = fields.get("kernels")
        if not isinstance(by_kernel, dict) or not all(isinstance(each, list) for each in by_kernel.values()):
            raise FileFormatError(f"{entry}: kernels must be an object of lists, got {by_kernel!r:.60}")
        names = [(node, kernel) for kernel, nodes in by_kernel.items() for node in nodes]
        if not all(isinstance(node, str) for node, _ in names):
            raise FileFormatError(f"{entry}: kernels must list names of nodes")
        return decode(cls, {**fields, "kernels": dict(names)}, entry)


def digest_of(model: ModelProto) -> str:
    """Hash what a model computes: nodes, constants however they are stored, names of inputs and outputs."""
    graph, digest = model.graph, sha256()
    digest.update(repr([[value.name for value in part] for part in (graph.input, graph.output)]).encode())
    for node in graph.node:
        digest.update(node.SerializeToString(deterministic=True))
    for tensor in sorted(graph.initializer, key=lambda tensor: tensor.name):
        digest.update(repr((tensor.name, tensor.data_type, list(tensor.dims))).encode())
        digest.update(_content(tensor))
    return digest.hexdigest()[:MODEL_DIGITS]


def _content(tensor: TensorProto) -> bytes | memoryview:
    """The values of a tensor however it stores them; an array of strings holds addresses."""
    if tensor.data_type == TensorProto.STRING:
        return repr(list(tensor.string_data)).encode()
    return np.ascontiguousarray(array_of(tensor)).view(np.uint8).data if np.prod(tensor.dims) else b""
