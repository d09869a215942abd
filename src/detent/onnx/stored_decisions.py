"""Decisions stored in the metadata of a quantized file.

The decisions are stored as the JSON of ``Decisions``, with six changes that make it much smaller, and compressed by
``Provenance``:

- Fields of the metadata entry ``detent`` (target, source, data, recipe, options, version of detent) are not repeated.
- Fields with default values are left out, and so is a placement's ``group`` if it is the placement's own tensor.
- An array is written in one of three forms:
  ``{"initializer": name, "shape": [...], "digest": ...}``  a constant of the file, with a digest of its values
  ``{"fill": number, "dtype": ..., "shape": [...]}``        one number repeated; dtype is left out for float32
  ``{"base85": text, "dtype": ..., "shape": [...]}``        its little-endian bytes (see ``base64.b85decode``); if
  dtype is bfloat16, the upper two bytes of each float32, whose other bytes are 0
- Zero points are left out if all of them are 0. Float32 numbers have only as many digits as they need.
- Each spec is written once, in the list ``specs``; other fields contain the index of the spec in this list.
- The range of a group is the entry ``range`` of the group's first placement.

Files are untrusted: the size of the file limits the sizes of arrays, and ``Decisions`` checks all other values.
"""

import base64
from collections.abc import Mapping
from dataclasses import MISSING, fields
from hashlib import sha256
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto

from detent.checks import as_shape
from detent.codec import Leaf, decode, encode, reading, table
from detent.errors import FileFormatError
from detent.onnx.decisions import (
    LEAVES,
    REWRITE_VERSION,
    VERSION,
    Decisions,
    Equalized,
    LayerDecision,
    QuantizerPlacement,
    RangeDecision,
    Smoothed,
)
from detent.onnx_model.graph import array_of
from detent.onnx_model.provenance import Provenance
from detent.spec import QuantSpec

__all__ = ["ChangedConstant", "StoredDecisions", "read_decisions", "to_metadata", "why_unreadable"]

Array = NDArray[Any]
WHERE = "the decisions of the file"
_REPEATED = {"written_by": "made_by", "target": "target", "source": "source", "data": "data"} | {
    name: name for name in ("recipe", "options")
}  # fields of Decisions -> fields of Provenance
_PARTS = {
    "layers": LayerDecision,
    "equalized": Equalized,
    "smoothed": Smoothed,
    "placements": QuantizerPlacement,
    "ranges": RangeDecision,
}
_SMALL = (TensorProto.INT4, TensorProto.UINT4, TensorProto.INT8, TensorProto.UINT8)  # zero points in the file
_KINDS: dict[int, str] = {
    TensorProto.FLOAT: "float32",
    TensorProto.INT32: "int32",
    TensorProto.DOUBLE: "float64",
    **dict.fromkeys(_SMALL, "int32"),
}  # types of constants that decisions refer to, and the dtype of the array in the decisions
_DTYPES = ("float32", "float64", "int32", "uint8")
_BFLOAT16 = "bfloat16"  # dtype of float32 arrays that bfloat16 represents exactly, only in the form base85
MIN_BFLOAT16 = 8  # elements; with fewer, the bytes of float32 are shorter than the name of the dtype
_FLOAT32 = ("scale", "observed_range", "input_range")  # fields with one or two float32 numbers
MAX_FLOAT32 = float(np.finfo(np.float32).max)
MIN_REFERRED = 12  # elements; with fewer, the bytes are shorter than a reference
ALWAYS_ALLOWED_ELEMENTS = 1 << 16  # array elements that decisions may hold in addition to twice the file's constants
DIGITS = 8  # hexadecimal digits of a digest


def to_metadata(decisions: Decisions, model: ModelProto) -> dict[str, Any]:
    """Encode decisions for the metadata of ``model``, the quantized model."""
    initializers = _Initializers(model, decisions)
    specs = _Specs()
    leaves = {**LEAVES, np.ndarray: Leaf(initializers.write, _unread), QuantSpec: Leaf(specs.write, _unread)}
    entry: dict[str, Any] = encode(decisions, leaves)
    for name, cls in _PARTS.items():
        entry[name] = _each(entry[name], _defaults(cls), _compact)
    ranges = entry.pop("ranges")
    entry["placements"] = [_with_range(each, ranges) for each in entry["placements"]]
    defaults = _defaults(Decisions)
    kept = {
        name: value
        for name, value in entry.items()
        if name not in _REPEATED and (name in {"version", "rewrite_version"} or value != defaults.get(name))
    }
    return kept | ({"specs": specs.entries} if specs.entries else {})


def _with_range(placement: dict[str, Any], ranges: Mapping[str, Any]) -> dict[str, Any]:
    """Add the range of a group to the group's first placement."""
    has_range = "group" not in placement and "source_tensor" not in placement
    return {**placement, "range": ranges[placement["tensor"]]} if has_range else placement


def why_unreadable(provenance: Provenance | None) -> str:
    """Return why this version of detent cannot apply the decisions of a file, or "" if it can."""
    if provenance is None or provenance.decisions is None:
        return "the file has no decisions in its metadata (files from qo.quantize have them)"
    for name, expected in (("version", VERSION), ("rewrite_version", REWRITE_VERSION)):
        version = provenance.decisions.get(name)
        if type(version) is not int:
            raise FileFormatError(f"{WHERE}: {name} must be an integer, got {version!r:.60}")
        if version != expected:
            return (
                f"the file's decisions have {name} {version}, but this version of detent applies {expected}: use the "
                f"version of detent that wrote the file ({provenance.made_by or 'unknown'}), or quantize again"
            )
    return ""


class ChangedConstant(NamedTuple):
    """A constant that decisions refer to, and whose bytes were changed after the file was written."""

    name: str
    digest_written: str
    digest: str


class StoredDecisions(NamedTuple):
    """Decisions of a file, and constants of these decisions that were changed after the file was written.

    ``decisions`` is None if such a change made the decisions invalid.
    """

    decisions: Decisions | None
    changed: tuple[ChangedConstant, ...]


def read_decisions(model: ModelProto, provenance: Provenance) -> StoredDecisions:
    """Read the decisions from a file's metadata.

    Raises:
        FileFormatError: the decisions are malformed or contradictory, or refer to a constant that the file lacks.
    """
    reader = _Reader(model)
    try:
        return StoredDecisions(_read(provenance, reader), tuple(reader.changed))
    except FileFormatError:
        if not reader.changed:
            raise
        return StoredDecisions(None, tuple(reader.changed))


def _read(provenance: Provenance, reader: "_Reader") -> Decisions:
    entry: dict[str, Any] = {**_defaults(Decisions), **(provenance.decisions or {})}
    repeated = sorted(_REPEATED.keys() & (provenance.decisions or {}).keys())
    if repeated:
        raise FileFormatError(
            f"{WHERE}: got the keys {repeated} in the decisions, expected them only in the metadata entry 'detent': "
            "quantize again"
        )
    _take_ranges(entry)
    for name, cls in _PARTS.items():
        entry[name] = _each(entry.get(name), _defaults(cls), _whole)
    entry.update({name: getattr(provenance, of) for name, of in _REPEATED.items()})
    with reading(WHERE):
        specs = _Specs(entry.pop("specs", []))
        leaves = {**LEAVES, np.ndarray: Leaf(_unread, reader.read), QuantSpec: Leaf(_unread, specs.read)}
        return decode(Decisions, entry, WHERE, leaves)


def _take_ranges(entry: dict[str, Any]) -> None:
    """Move each group's range out of the group's first placement; ``decode`` rejects entries that are not objects."""
    if entry["ranges"]:
        raise FileFormatError(
            f"{WHERE}: unexpected key 'ranges', expected a key 'range' in each group's first placement"
        )
    placements = entry["placements"] if isinstance(entry["placements"], list) else []
    ranged = [each for each in placements if isinstance(each, dict) and "range" in each]
    entry["ranges"] = {str(each.get("tensor")): each["range"] for each in ranged}
    if ranged:
        entry["placements"] = [
            {name: value for name, value in each.items() if name != "range"} if isinstance(each, dict) else each
            for each in placements
        ]


class _Specs:
    """The distinct specs of decisions, each written once."""

    def __init__(self, entries: object = ()) -> None:
        if not isinstance(entries, list | tuple):
            raise FileFormatError(f"the entry 'specs' must be a list, got {entries!r:.60}")
        self.entries = list(entries)
        self._numbers: dict[QuantSpec, int] = {}
        self._specs: dict[int, QuantSpec] = {}

    def write(self, spec: QuantSpec) -> int:
        if spec not in self._numbers:
            self._numbers[spec] = len(self.entries)
            self.entries.append(LEAVES[QuantSpec].write(spec))
        return self._numbers[spec]

    def read(self, value: Any) -> QuantSpec:  # noqa: ANN401 - JSON
        if type(value) is not int or not 0 <= value < len(self.entries):
            raise FileFormatError(
                f"a spec must be an index into the list 'specs', from 0 to {len(self.entries) - 1}, got {value!r:.60}"
            )
        if value not in self._specs:
            self._specs[value] = LEAVES[QuantSpec].read(self.entries[value])
        return self._specs[value]


def _unread(value: object) -> object:
    raise TypeError(f"internal error: stored decisions can only be read, got {type(value).__name__} to write")


def _defaults(cls: type) -> dict[str, Any]:
    """Return the defaults of a class's fields as JSON."""
    defaults = {}
    for field in fields(cls):
        value = field.default if field.default_factory is MISSING else field.default_factory()
        if value is not MISSING:
            defaults[field.name] = encode(value, LEAVES)
    return defaults


def _each(entries: Any, defaults: Mapping[str, Any], change: Any) -> Any:  # noqa: ANN401 - JSON
    """Apply ``change`` to each entry of a JSON list or JSON object; other values stay, and ``decode`` rejects them."""
    if isinstance(entries, dict):
        return {name: change(each, defaults) if isinstance(each, dict) else each for name, each in entries.items()}
    if isinstance(entries, list):
        return [change(each, defaults) if isinstance(each, dict) else each for each in entries]
    return entries


def _compact(entry: dict[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in entry.items() if name not in defaults or value != defaults[name]}
    if "group" in kept and kept["group"] == kept["tensor"]:
        del kept["group"]
    if kept.get("weight_zero_point", {}).get("fill") == 0:
        del kept["weight_zero_point"]
    return {name: _short(value) if name in _FLOAT32 else value for name, value in kept.items()}


def _whole(entry: dict[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    whole = {**defaults, **entry}
    if "spec" in whole and "tensor" in whole:
        whole.setdefault("group", whole["tensor"])
    if whole.get("weight_scale") is not None and whole["weight_zero_point"] is None:
        whole["weight_zero_point"] = _ZerosLike(whole["weight_scale"])
    return {name: _rounded(value) if name in _FLOAT32 else value for name, value in whole.items()}


class _ZerosLike(NamedTuple):
    """Zero points that the file leaves out: zeros in the shape of the array ``entry``."""

    entry: Any


def _short(value: Any) -> Any:  # noqa: ANN401 - JSON
    if isinstance(value, list):
        return [_short(each) for each in value]
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _rounded(value: Any) -> Any:  # noqa: ANN401 - JSON
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return float(np.float32(value)) if isinstance(value, float) and abs(value) < MAX_FLOAT32 else value


def _digest(content: bytes) -> str:
    return sha256(content).hexdigest()[:DIGITS]


def _little_endian(values: Array) -> bytes:
    return np.ascontiguousarray(values).astype(values.dtype.newbyteorder("<"), copy=False).tobytes()


def _values(tensor: TensorProto) -> Array:
    """Return the values of a constant, in the dtype that decisions have."""
    return np.asarray(array_of(tensor)).astype(_KINDS[tensor.data_type], copy=False)


class _Initializers:
    """Writer of arrays as JSON.

    If a constant of the model has the dtype and bytes of an array, the JSON of the array can name this constant.
    """

    def __init__(self, model: ModelProto, decisions: Decisions) -> None:
        sizes = {values.size for values in _arrays(decisions)}
        self._names: dict[tuple[str, bytes], TensorProto] = {}
        for tensor in model.graph.initializer:
            if tensor.data_type in _KINDS and prod(tensor.dims) in sizes:
                self._names.setdefault((_KINDS[tensor.data_type], _little_endian(_values(tensor))), tensor)

    def write(self, values: Array) -> dict[str, Any]:
        content, layout = _little_endian(values), {"shape": list(values.shape), **_dtype_entry(values)}
        if values.size > 1 and content == content[: values.itemsize] * values.size:
            return {"fill": encode(values.flat[0].item()), **layout}
        tensor = self._names.get((str(values.dtype), content)) if values.size >= MIN_REFERRED else None
        if tensor is None:
            if values.size >= MIN_BFLOAT16 and _is_bfloat16(values):
                upper = (_bits(values) >> 16).astype("<u2")
                content, layout["dtype"] = upper.tobytes(), _BFLOAT16
            return {"base85": base64.b85encode(content).decode("ascii"), **layout}
        reference: dict[str, Any] = {"initializer": tensor.name, "digest": _digest(content)}
        return reference if list(tensor.dims) == layout["shape"] else {**reference, "shape": layout["shape"]}


def _is_bfloat16(values: Array) -> bool:
    """Return whether the array is float32, and bfloat16 represents its values exactly."""
    return values.dtype == np.float32 and not (_bits(values) & 0xFFFF).any()


def _bits(values: Array) -> NDArray[np.uint32]:
    return np.ascontiguousarray(values).view(np.uint32)


def _dtype_entry(values: Array) -> dict[str, str]:
    return {} if values.dtype == np.float32 else {"dtype": str(values.dtype)}


def _arrays(decisions: Decisions) -> list[Array]:
    layers = [array for each in decisions.layers for array in (each.weight_scale, each.bias) if array is not None]
    return [*layers, *decisions.constants.values()]


class _Reader:
    """Reader of arrays; the limit on their total number of elements grows with the size of the file's constants."""

    def __init__(self, model: ModelProto) -> None:
        self._tensors = {tensor.name: tensor for tensor in model.graph.initializer}
        self.changed: list[ChangedConstant] = []
        self._left = ALWAYS_ALLOWED_ELEMENTS + 2 * sum(prod(tensor.dims) for tensor in model.graph.initializer)

    def read(self, value: Any) -> Array:  # noqa: ANN401 - JSON
        if isinstance(value, _ZerosLike):
            return np.zeros(self.read(value.entry).shape, np.int32)
        if not isinstance(value, dict):
            raise FileFormatError(f"an array must be a JSON object, got {value!r:.60}")
        if "initializer" in value:
            return self._referred(value)
        form = "fill" if "fill" in value else "base85"
        entry = table({"dtype": "float32", **value}, "an array", (form, "dtype", "shape"))
        shape = self._shape(entry["shape"])
        dtypes = _DTYPES if form == "fill" else (*_DTYPES, _BFLOAT16)
        if not isinstance(entry["dtype"], str) or entry["dtype"] not in dtypes:
            raise FileFormatError(
                f"the dtype of an array must be one of {', '.join(dtypes)}, got {entry['dtype']!r:.60}"
            )
        is_bfloat16 = entry["dtype"] == _BFLOAT16
        dtype = np.dtype("uint16" if is_bfloat16 else entry["dtype"]).newbyteorder("<")
        if form == "fill":
            number = entry["fill"]
            number = float(number) if isinstance(number, str) and number in {"inf", "-inf", "nan"} else number
            if isinstance(number, bool) or not isinstance(number, int | float):
                raise FileFormatError(f"the entry 'fill' of an array must be a number, got {number!r:.60}")
            if dtype.kind in "iu" and not np.iinfo(dtype).min <= number <= np.iinfo(dtype).max:
                raise FileFormatError(f"the entry 'fill' of an array must fit {dtype.name}, got {number!r:.60}")
            return np.full(shape, number, dtype.newbyteorder("="))
        if not isinstance(entry["base85"], str):
            raise FileFormatError(f"the entry 'base85' of an array must be text, got {entry['base85']!r:.60}")
        content = base64.b85decode(entry["base85"])
        expected = prod(shape) * dtype.itemsize
        if len(content) != expected:
            raise FileFormatError(
                f"an array of shape {shape} and dtype {entry['dtype']} needs {expected} bytes, got {len(content)}"
            )
        if is_bfloat16:
            return (np.frombuffer(content, dtype).astype(np.uint32) << 16).view(np.float32).reshape(shape)
        return np.frombuffer(content, dtype).astype(dtype.newbyteorder("=")).reshape(shape)

    def _shape(self, value: object) -> tuple[int, ...]:
        shape = as_shape(value, error=FileFormatError)
        self._left -= prod(shape)
        if self._left < 0:
            raise FileFormatError(
                f"arrays have too many elements: expected at most {ALWAYS_ALLOWED_ELEMENTS} plus twice the number of "
                "elements in the file's constants"
            )
        return shape

    def _referred(self, value: dict[str, Any]) -> Array:
        entry = table({"shape": None, **value}, "a reference", ("initializer", "digest", "shape"))
        name = entry["initializer"]
        tensor = self._tensors.get(name) if isinstance(name, str) else None
        if tensor is None or tensor.data_type not in _KINDS:
            raise FileFormatError(
                f"'initializer' must be the name of a float or integer constant in the file, got {name!r:.60}"
            )
        shape = self._shape(list(tensor.dims) if entry["shape"] is None else entry["shape"])
        values = _values(tensor)
        if prod(shape) != values.size:
            raise FileFormatError(f"got shape {shape} for constant {name!r}, which has shape {tuple(tensor.dims)}")
        digest = _digest(_little_endian(values))
        if digest != entry["digest"]:
            self.changed.append(ChangedConstant(name, str(entry["digest"])[:DIGITS], digest))
        return values.reshape(shape)
