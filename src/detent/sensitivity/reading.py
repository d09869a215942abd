"""Reading: sensitivities as JSON, whose text is not trusted.

::

    {version, options, samples, storage, target, recipe: null or a recipe,
     layers: [{name, type, elements, nbytes_float, tied, options: {label: [noise, nbytes]}}]}
"""

import json
from collections.abc import Mapping
from reprlib import repr as brief
from typing import TYPE_CHECKING, Any

from detent.checks import as_integer, has_keys, unique_keys
from detent.errors import DetentError, FileFormatError
from detent.recipe import Recipe
from detent.sensitivity.noise import LayerNoise
from detent.sensitivity.options import STORAGES

if TYPE_CHECKING:
    from detent.sensitivity.found import Sensitivity

__all__ = ["from_json", "to_json"]

VERSION = 1
LENGTH_LIMIT = 1 << 26
LAYERS_LIMIT, OPTIONS_LIMIT = 100_000, 64
LARGEST = 1 << 62
_KEYS = ("layers", "options", "recipe", "samples", "storage", "target", "version")
_LAYER_KEYS = ("elements", "name", "nbytes_float", "options", "tied", "type")


def to_json(found: "Sensitivity") -> str:
    """A sensitivity as JSON.

    >>> from detent.sensitivity import LayerNoise, Sensitivity
    >>> to_json(Sensitivity((LayerNoise("a", "Conv", 1, 4, {"w8a8": 0.5}, {"w8a8": 5}),), ("w8a8",)))[:30]
    '{"version": 1, "options": ["w8'
    """
    layers = [
        {
            "name": layer.name,
            "type": layer.type,
            "elements": layer.elements,
            "nbytes_float": layer.nbytes_float,
            "tied": list(layer.tied),
            "options": {option: [noise, layer.nbytes[option]] for option, noise in layer.noise.items()},
        }
        for layer in found.layers
    ]
    about = {
        "version": VERSION,
        "options": list(found.options),
        "samples": found.samples,
        "storage": found.storage,
        "target": found.target,
        "recipe": None if found.recipe is None else json.loads(found.recipe.to_json()),
        "layers": layers,
    }
    return json.dumps(about, allow_nan=False)


def from_json(text: str) -> dict[str, Any]:
    """The fields of the sensitivity that a text describes.

    Raises:
        FileFormatError: too long, not JSON, other keys, types, sizes or numbers.

    >>> from_json("[]")
    Traceback (most recent call last):
    ...
    detent.errors.FileFormatError: a sensitivity needs exactly the keys layers, options, recipe, samples, storage, \
target, version, got []
    """
    if not isinstance(text, str):
        raise FileFormatError(f"expected the JSON of a sensitivity as text, got {type(text).__name__}")
    if len(text) > LENGTH_LIMIT:
        raise FileFormatError(f"{len(text)} characters are more than the {LENGTH_LIMIT} that a sensitivity may have")
    try:
        data = json.loads(text, object_pairs_hook=unique_keys, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise FileFormatError(f"not the JSON of a sensitivity: {error}") from error
    if not has_keys(data, _KEYS):
        raise FileFormatError(f"a sensitivity needs exactly the keys {', '.join(_KEYS)}, got {_shown(data)}")
    if type(data["version"]) is not int or data["version"] != VERSION:
        raise FileFormatError(f"this detent reads version {VERSION}, got {brief(data['version'])}: update detent")
    try:
        return _fields(data)
    except FileFormatError:
        raise
    except DetentError as error:
        raise FileFormatError(f"not the JSON of a sensitivity: {error}") from error


def _fields(data: Mapping[str, Any]) -> dict[str, Any]:
    options = _texts("options", data["options"], OPTIONS_LIMIT)
    storage, target = (_text(key, data[key]) for key in ("storage", "target"))
    if storage not in STORAGES:
        raise FileFormatError(f"storage is one of {', '.join(STORAGES)}, got {brief(storage)}")
    layers = data["layers"]
    if not isinstance(layers, list) or not 0 < len(layers) <= LAYERS_LIMIT:
        raise FileFormatError(f"layers are a list of 1 to {LAYERS_LIMIT} tables, got {brief(layers)}")
    recipe = data["recipe"]
    if recipe is not None and not isinstance(recipe, dict):
        raise FileFormatError(f"recipe is null or the table of a recipe, got {brief(recipe)}")
    return {
        "layers": tuple(_layer(number, layer) for number, layer in enumerate(layers)),
        "options": options,
        "recipe": None if recipe is None else Recipe.from_json(json.dumps(recipe)),
        "samples": as_integer("samples", data["samples"], at_least=1, at_most=LARGEST, error=FileFormatError),
        "storage": storage,
        "target": target,
    }


def _layer(number: int, data: object) -> LayerNoise:
    where = f"layer {number}"
    if not isinstance(data, dict) or not has_keys(data, _LAYER_KEYS):
        raise FileFormatError(f"{where} needs exactly the keys {', '.join(_LAYER_KEYS)}, got {_shown(data)}")
    measured = data["options"]
    if not isinstance(measured, dict) or not 0 < len(measured) <= OPTIONS_LIMIT:
        raise FileFormatError(f"{where} needs a table of 1 to {OPTIONS_LIMIT} options, got {brief(measured)}")
    noise, nbytes = dict[str, float](), dict[str, int]()
    for option, pair in measured.items():
        if not isinstance(pair, list) or len(pair) != 2 or type(pair[0]) not in {float, int}:
            raise FileFormatError(f"{where} needs [noise, bytes] at {brief(option)}, got {brief(pair)}")
        noise[option] = _finite(f"the noise of {where}", pair[0])
        nbytes[option] = _size(f"the bytes of {where}", pair[1])
    return LayerNoise(
        _text(f"the name of {where}", data["name"]),
        _text(f"the type of {where}", data["type"]),
        _size(f"the elements of {where}", data["elements"]),
        _size(f"nbytes_float of {where}", data["nbytes_float"]),
        noise,
        nbytes,
        _texts(f"tied of {where}", data["tied"], LAYERS_LIMIT),
    )


def _finite(what: str, value: float) -> float:
    try:
        return float(value)
    except OverflowError as error:
        raise FileFormatError(f"{what} is too large: {brief(value)}") from error


def _size(what: str, value: object) -> int:
    return as_integer(what, value, at_least=0, at_most=LARGEST, error=FileFormatError)


def _text(what: str, value: object) -> str:
    if not isinstance(value, str):
        raise FileFormatError(f"{what} is text, got {brief(value)}")
    return value


def _texts(what: str, value: object, limit: int) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) > limit:
        raise FileFormatError(f"{what} is a list of at most {limit} texts, got {brief(value)}")
    return tuple(_text(what, each) for each in value)


def _shown(data: object) -> str:
    return brief(sorted(data)) if isinstance(data, dict) else brief(data)


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no finite number")
