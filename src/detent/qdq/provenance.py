"""Provenance: what a file says of where its quantizers come from, so that they can be compared with their source.

It is one entry of the model's metadata, ``detent``, in JSON.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from onnx import ModelProto

from detent._checks import unique_keys
from detent.errors import FileFormatError
from detent.qdq.tensors import array_of

__all__ = ["Provenance", "digests_of"]

KEY = "detent"
VERSION = 1
TEXT_LIMIT = 1 << 24
_TEXTS = ("made_by", "target", "recipe", "data")
_NAMES = ("weights", "activations", "digests")
_QUANTIZERS = ("QuantizeLinear", "DequantizeLinear")
_PLACES = ("axis", "block_size")
SHOWN = 8


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
    digests: Mapping[str, str] = field(default_factory=dict)

    def write(self, model: ModelProto) -> None:
        """Put it into a model's metadata, in place of what was there, with the digests of the model as it is now."""
        others = [(entry.key, entry.value) for entry in model.metadata_props if entry.key != KEY]
        del model.metadata_props[:]
        text = json.dumps({"version": VERSION, **vars(self), "digests": digests_of(model)}, sort_keys=True)
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
        try:
            about = json.loads(found[-1][:TEXT_LIMIT], object_pairs_hook=unique_keys)
        except (ValueError, RecursionError) as error:
            raise FileFormatError(f"the metadata entry {KEY!r} is no JSON: {error}") from error
        if not isinstance(about, dict) or about.pop("version", None) != VERSION:
            raise FileFormatError(f"the metadata entry {KEY!r} is not of version {VERSION}")
        if not _is_sound(about):
            raise FileFormatError(f"the metadata entry {KEY!r} has other keys or values than it should")
        return cls(**about)


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
        if node.op_type not in _QUANTIZERS and not (node.op_type == "Gather" and node.input[0] in constants):
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
