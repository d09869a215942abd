"""Provenance: where the quantizers of a file come from, so that they can be compared with their source.

It is one entry of the model's metadata, ``detent``, in JSON.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto

from detent.codec import check_version, decode, parse
from detent.onnx_model.graph import QUANTIZERS, array_of

__all__ = ["Provenance", "digest_of", "digests_of"]

KEY = "detent"
VERSION = 1
TEXT_LIMIT = 1 << 24
_LAYOUT = ("axis", "block_size")
QUANTIZER_DIGITS, MODEL_DIGITS = 8, 32  # of a digest, hexadecimal


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
        digests: hashes of the quantizers as they were written, by their results' names.

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
    digests: Mapping[str, str] = field(default_factory=dict)

    def write(self, model: ModelProto) -> None:
        """Write or replace the entry in a model's metadata, with the digests of the model as it is now."""
        others = [(entry.key, entry.value) for entry in model.metadata_props if entry.key != KEY]
        del model.metadata_props[:]
        # A recipe may have a rule for every layer: its JSON is stored without spaces, too.
        recipe = json.dumps(json.loads(self.recipe), separators=(",", ":")) if self.recipe else ""
        fields = {"version": VERSION, **vars(self), "recipe": recipe, "digests": digests_of(model)}
        text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
        for key, value in (*others, (KEY, text)):
            model.metadata_props.add(key=key, value=value)

    @classmethod
    def read(cls, model: ModelProto) -> "Provenance | None":
        """Read the entry of a model's metadata; None if there is none.

        Raises:
            FileFormatError: the entry cannot be read.
        """
        texts = [entry.value for entry in model.metadata_props if entry.key == KEY]
        if not texts:
            return None
        entry = f"the metadata entry {KEY!r}"
        fields = parse(texts[-1], entry, limit=TEXT_LIMIT)
        check_version(fields.pop("version", None), VERSION, entry)
        return decode(cls, fields, entry)


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


def digests_of(model: ModelProto) -> dict[str, str]:
    """Hash every quantizer and every lookup of codes, by result: the node, then each of its inputs ("" if computed)."""
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    of_constants: dict[str, str] = {}
    digests = {}
    for node in model.graph.node:
        if node.op_type not in QUANTIZERS and not (node.op_type == "Gather" and node.input[0] in constants):
            continue
        layout = sorted((each.name, each.i) for each in node.attribute if each.name in _LAYOUT)
        parts = [_hash((node.op_type, layout, list(node.input)))]
        for name in node.input:
            if name in constants and name not in of_constants:
                tensor = constants[name]
                of_constants[name] = _hash((tensor.data_type, list(tensor.dims)), _content(tensor))
            parts.append(of_constants.get(name, ""))
        digests[node.output[0]] = ".".join(parts)
    return digests


def _content(tensor: TensorProto) -> bytes | memoryview:
    """The values of a tensor however it stores them; an array of strings holds addresses."""
    if tensor.data_type == TensorProto.STRING:
        return repr(list(tensor.string_data)).encode()
    return np.ascontiguousarray(array_of(tensor)).view(np.uint8).data if np.prod(tensor.dims) else b""


def _hash(facts: tuple[Any, ...], content: bytes | memoryview = b"") -> str:
    digest = sha256(repr(facts).encode())
    digest.update(content)
    return digest.hexdigest()[:QUANTIZER_DIGITS]
