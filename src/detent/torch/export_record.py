"""ExportRecord: the arguments of an export; with the same arguments, a model exports to the same bytes.

The record is stored as ``export`` in the metadata of the file. Example inputs are recorded by shape and type, because
their values do not affect the graph. The versions of torch and onnxscript are recorded, because other versions may
write a different graph.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor

from detent.codec import check_version, decode, encode
from detent.errors import FileFormatError
from detent.torch.onnx_export import FIRST_OPSET, LAST_OPSET

__all__ = ["ExportRecord"]

WHERE = "export record"  # first words of each error message
VERSION = 1
MAX_ELEMENTS = 1 << 26  # maximum for all example inputs together; an untrusted file sets their shapes
MAX_DEPTH = 8  # maximum nesting of dynamic_shapes
MAX_SIZE = 1 << 62  # maximum size of an axis; torch uses larger values for "unlimited"
EXPORTERS = ("torch", "onnxscript")
_HINTS = ("AUTO", "DYNAMIC", "STATIC")
_DTYPES = {str(each).removeprefix("torch."): each for each in (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
)}  # fmt: skip


@dataclass(frozen=True)
class ExampleInput:
    """Name, type and shape of one example input; the name is "" for positional inputs."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ExportRecord:
    """Arguments of a call to ``qt.export_onnx``, and the versions of the packages that write the graph.

    ``dynamic_shapes`` is ``{"value": v}``, where v is the argument as JSON. If JSON cannot express the argument, v is
    ``{"unknown": true}``.
    """

    opset: int
    container: str
    inputs: tuple[ExampleInput, ...]
    dynamic_shapes: dict[str, Any]
    exporters: Mapping[str, str]

    @classmethod
    def of(
        cls,
        example: Sequence[Tensor] | Mapping[str, Tensor],
        opset: int,
        container: str | None,
        dynamic_shapes: Any | None,
    ) -> "ExportRecord":
        """Return the record of an export with the given arguments."""
        named = example.items() if isinstance(example, Mapping) else (("", each) for each in example)
        inputs = tuple(ExampleInput(name, str(x.dtype).removeprefix("torch."), tuple(x.shape)) for name, x in named)
        try:
            shapes = _shapes_to_json(dynamic_shapes)
        except TypeError:
            shapes = {"unknown": True}
        return cls(opset, container or "", inputs, {"value": shapes}, exporter_versions())

    def to_dict(self) -> dict[str, Any]:
        """Return the record as JSON-ready data."""
        encoded: dict[str, Any] = encode(self)
        return {"version": VERSION, **encoded}

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> "ExportRecord":
        """Read the record from a file's metadata.

        Raises:
            FileFormatError: the record is invalid.
        """
        entry = dict(value)
        check_version(entry.pop("version", None), VERSION, WHERE)
        shapes = entry.get("dynamic_shapes")
        if not isinstance(shapes, dict) or set(shapes) != {"value"}:
            raise FileFormatError(
                f"{WHERE}: got dynamic_shapes {shapes!r:.60}, expected an object with the key 'value': export again"
            )
        fields = decode(_Fields, {name: each for name, each in entry.items() if name != "dynamic_shapes"}, WHERE)
        if not FIRST_OPSET <= fields.opset <= LAST_OPSET:
            raise FileFormatError(
                f"{WHERE}: got opset {fields.opset}, expected {FIRST_OPSET} to {LAST_OPSET}: export again"
            )
        names = {each.name for each in fields.inputs}
        if not names or (names != {""} and ("" in names or len(names) < len(fields.inputs))):
            raise FileFormatError(
                f"{WHERE}: got input names {[*names]!r:.60}, expected unique names, or no names at all: export again"
            )
        for each in fields.inputs:
            if each.dtype not in _DTYPES or any(size < 0 for size in each.shape):
                raise FileFormatError(
                    f"{WHERE}: got an input of type {each.dtype!r:.40} and shape {each.shape!r:.60}, expected sizes >= "
                    f"0 and one of the types {', '.join(_DTYPES)}: export again"
                )
        return cls(fields.opset, fields.container, fields.inputs, shapes, fields.exporters)

    @property
    def problem(self) -> str:
        """The reason why the export cannot be repeated on this machine, or "" if it can."""
        installed = exporter_versions()
        for name in EXPORTERS:
            if self.exporters.get(name) != installed[name]:
                return (
                    f"the file was exported with {name} {self.exporters.get(name)}, but {name} {installed[name]} is "
                    f"installed and may write a different graph: install {name} {self.exporters.get(name)}, or export "
                    "again"
                )
        if self.dynamic_shapes["value"] == {"unknown": True}:
            return (
                "the file does not record dynamic_shapes, because JSON cannot express their values: export again "
                "with dynamic_shapes of dicts, sequences, names and torch.export.Dim"
            )
        elements = sum(prod(size or 1 for size in each.shape) for each in self.inputs)
        if elements > MAX_ELEMENTS:
            return (
                f"the example inputs of the export have {elements:,} elements, more than the limit of "
                f"{MAX_ELEMENTS:,}: export with a smaller batch"
            )
        return ""

    def example(self) -> tuple[Tensor, ...] | dict[str, Tensor]:
        """Make example inputs of zeros with the recorded shapes and types; allowed only if ``problem`` is empty."""
        tensors = [torch.zeros(each.shape, dtype=_DTYPES[each.dtype]) for each in self.inputs]
        names = [each.name for each in self.inputs]
        return dict(zip(names, tensors, strict=True)) if all(names) else tuple(tensors)

    def shapes(self) -> Any:
        """Return the argument ``dynamic_shapes`` of the export.

        Raises:
            FileFormatError: the record is invalid.
        """
        return _shapes_from_json(self.dynamic_shapes["value"], {}, 0)


@dataclass(frozen=True)
class _Fields:
    opset: int
    container: Literal["", "int8"]
    inputs: tuple[ExampleInput, ...]
    exporters: Mapping[str, str]


def exporter_versions() -> dict[str, str]:
    """Return the versions of the packages that write graphs."""
    return {name: version(name) for name in EXPORTERS}


def _shapes_to_json(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Mapping):
        return {"entries": [[_key(key), _shapes_to_json(each)] for key, each in value.items()]}
    if isinstance(value, tuple | list):
        return {"tuple" if isinstance(value, tuple) else "list": [_shapes_to_json(each) for each in value]}
    for hint in _HINTS:
        if value is getattr(torch.export.Dim, hint):
            return {"hint": hint}
    if type(value) is torch.export.Dim:
        low, high = (int(each) if each < MAX_SIZE else None for each in (value.min, value.max))
        return {"dim": value.__name__, "min": low, "max": high}
    raise TypeError(
        f"{type(value).__name__} cannot be written as JSON: use dicts, sequences, names and torch.export.Dim"
    )


def _key(key: object) -> int | str:
    if not isinstance(key, int | str):
        raise TypeError(f"{type(key).__name__} cannot be a key of dynamic_shapes: use a name or an index")
    return key


def _shapes_from_json(value: Any, dims: dict[str, Any], depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise FileFormatError(
            f"{WHERE}: dynamic_shapes have more than {MAX_DEPTH} nested levels: export again with fewer"
        )
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, dict) and len(value) == 1:
        (kind, content), *_ = value.items()
        if kind in {"tuple", "list"} and isinstance(content, list):
            inner = [_shapes_from_json(each, dims, depth + 1) for each in content]
            return tuple(inner) if kind == "tuple" else inner
        if kind == "entries" and isinstance(content, list) and all(_is_pair(each) for each in content):
            return {key: _shapes_from_json(each, dims, depth + 1) for key, each in content}
        if kind == "hint" and content in _HINTS:
            return getattr(torch.export.Dim, content)
    if isinstance(value, dict) and set(value) == {"dim", "min", "max"} and _is_dim(value):
        limits = {key: value[key] for key in ("min", "max") if value[key] is not None}
        return dims.setdefault(value["dim"], torch.export.Dim(value["dim"], **limits))
    raise FileFormatError(
        f"{WHERE}: got {value!r:.60} in dynamic_shapes, expected a size, a name, or an object with the key 'tuple', "
        "'list', 'entries', 'hint' or 'dim': export again"
    )


def _is_dim(value: dict[str, Any]) -> bool:
    name, low, high = (value[key] for key in ("dim", "min", "max"))
    low, high = 0 if low is None else low, MAX_SIZE if high is None else high
    is_range = type(low) is int and type(high) is int and 0 <= low < high <= MAX_SIZE
    return is_range and isinstance(name, str) and name.isidentifier()


def _is_pair(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and isinstance(value[0], int | str)
