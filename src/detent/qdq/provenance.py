"""Provenance: what a file says of where its quantizers come from, so that they can be compared with their source.

It is one entry of the model's metadata, ``detent``, in JSON.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from onnx import ModelProto

from detent._checks import unique_keys
from detent.errors import FileFormatError

__all__ = ["Provenance"]

KEY = "detent"
VERSION = 1
TEXT_LIMIT = 1 << 24
_TEXTS = ("made_by", "target", "recipe", "data")
_NAMES = ("weights", "activations")


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

    def write(self, model: ModelProto) -> None:
        """Put it into a model's metadata, in place of what was there."""
        others = [(entry.key, entry.value) for entry in model.metadata_props if entry.key != KEY]
        del model.metadata_props[:]
        text = json.dumps({"version": VERSION, **vars(self)}, sort_keys=True)
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


def _is_sound(about: dict[str, Any]) -> bool:
    texts = all(isinstance(about.get(key), str) for key in _TEXTS)
    names = all(
        isinstance(about.get(key), dict) and all(isinstance(value, str) for value in about[key].values())
        for key in _NAMES
    )
    return texts and names and set(about) == {*_TEXTS, *_NAMES}
