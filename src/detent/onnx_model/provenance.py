"""Provenance: what a file says of where its quantizers come from, so that they can be compared with their source.

It is one entry of the model's metadata, ``detent``, in JSON.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import numpy as np
from onnx import ModelProto

from detent.codec import check_version, parse
from detent.errors import FileFormatError
from detent.onnx_model.graph import QUANTIZERS, array_of

__all__ = ["Provenance", "digest_of", "digests_of"]

KEY = "detent"
VERSION = 1
TEXT_LIMIT = 1 << 24
_TEXTS = ("made_by", "target", "recipe", "options", "data", "source")
_NAMES = ("weights", "activations", "digests")
_PLACES = ("axis", "block_size")
SHOWN, LONG = 8, 32


@dataclass(frozen=True)
class Provenance:
    """Where the quantizers of a file come from.

    Attributes:
        weights: initializers of codes, and the name of the weight that each of them holds.
        activations: QuantizeLinear nodes by name, and the quantizer or tensor that each of them stands for.
        target: what the file was made for.
        recipe: as JSON.
        made_by: the version of detent.
        data: a hash of the calibration data.
        source: the digest of the model that the file was made from, where that was an ONNX model.
        options: of the call that made it, those that are not the defaults, as JSON.
        digests: hashes of the quantizers as they were written, by their results' names.

    >>> model = ModelProto()
    >>> Provenance({"w_codes": "fc.weight"}, {}, "onnxruntime").write(model)
    >>> Provenance.read(model).weights
    {'w_codes': 'fc.weight'}
    >>> Provenance.read(ModelProto()) is None
    True
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
        """Put it into a model's metadata, in place of what was there, with the digests of the model as it is now."""
        others = [(entry.key, entry.value) for entry in model.metadata_props if entry.key != KEY]
        del model.metadata_props[:]
        about = {"version": VERSION, **vars(self), "recipe": _compact(self.recipe), "digests": digests_of(model)}
        text = json.dumps(about, sort_keys=True, separators=(",", ":"))
        for key, value in (*others, (KEY, text)):
            model.metadata_props.add(key=key, value=value)

    @classmethod
    def read(cls, model: ModelProto) -> "Provenance | None":
        """What a model's metadata say; None where detent did not write them.

        Raises:
            FileFormatError: the entry cannot be read.
        """
        found = [entry.value for entry in model.metadata_props if entry.key == KEY]
        if not found:
            return None
        about = parse(found[-1], f"the metadata entry {KEY!r}", limit=TEXT_LIMIT)
        check_version(about.pop("version", None), VERSION, f"the metadata entry {KEY!r}")
        if not _is_sound(about):
            raise FileFormatError(f"the metadata entry {KEY!r} has other keys or values than it should")
        return cls(**about)


def digest_of(model: ModelProto) -> str:
    """A hash of what a model computes: its nodes, its constants, the names of inputs and outputs.

    How constants are stored, and what else the file holds, does not count.

    >>> from onnx import parser
    >>> text = '<ir_version: 8, opset_import: ["" : 17]> g (float[1] x) => (float[1] y) { y = Relu(x) }'
    >>> digest_of(parser.parse_model(text)) == digest_of(parser.parse_model(text))
    True
    >>> digest_of(parser.parse_model(text)) == digest_of(parser.parse_model(text.replace("Relu", "Neg")))
    False
    """
    graph, digest = model.graph, sha256()
    digest.update(repr([[value.name for value in part] for part in (graph.input, graph.output)]).encode())
    for node in graph.node:
        digest.update(node.SerializeToString(deterministic=True))
    for tensor in sorted(graph.initializer, key=lambda tensor: tensor.name):
        digest.update(repr((tensor.name, tensor.data_type, list(tensor.dims))).encode())
        digest.update(np.ascontiguousarray(array_of(tensor)).view(np.uint8).data if np.prod(tensor.dims) else b"")
    return digest.hexdigest()[:LONG]


def digests_of(model: ModelProto) -> dict[str, str]:
    """Hashes of every quantizer and every lookup of codes, by its result: of its place, then of what it reads.

    >>> from onnx import parser
    >>> found = digests_of(parser.parse_model('''<ir_version: 10, opset_import: ["" : 21]>
    ...     g (float[2] x) => (float[2] y) <float s = {0.5}, int8[2] w = {3, 4}, int8 z = {0}>
    ...     { v = DequantizeLinear(w, s, z) y = Add(x, v) }'''))
    >>> {name: len(digests.split(".")) for name, digests in found.items()}
    {'v': 4}
    """
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    known: dict[str, str] = {}
    found = {}
    for node in model.graph.node:
        if node.op_type not in QUANTIZERS and not (node.op_type == "Gather" and node.input[0] in constants):
            continue
        places = sorted((each.name, each.i) for each in node.attribute if each.name in _PLACES)
        parts = [_hash(repr((node.op_type, places, list(node.input))).encode())]
        for name in node.input:
            if name in constants and name not in known:
                tensor = constants[name]
                known[name] = _hash(repr((tensor.data_type, list(tensor.dims))).encode(), array_of(tensor).tobytes())
            parts.append(known.get(name, ""))
        found[node.output[0]] = ".".join(parts)
    return found


def _compact(text: str) -> str:
    """JSON without the space that readers like: a recipe may have a rule for every layer."""
    return json.dumps(json.loads(text), separators=(",", ":")) if text else ""


def _hash(*parts: bytes) -> str:
    digest = sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()[:SHOWN]


def _is_sound(about: dict[str, Any]) -> bool:
    texts = all(isinstance(about.get(key), str) for key in _TEXTS)
    names = all(
        isinstance(about.get(key), dict) and all(isinstance(value, str) for value in about[key].values())
        for key in _NAMES
    )
    return texts and names and set(about) == {*_TEXTS, *_NAMES}
