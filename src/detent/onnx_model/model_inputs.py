"""Inputs of a model: names, types, shapes, and the check of an array against them.

Arrays of another type are converted if no value is lost:

=================== ================ ==========================================================
array               input            condition
=================== ================ ==========================================================
float64             float32          rounded; every value must stay finite
integers            other integers   every value is in the range of the input's type
integers            floats           every value is exact in the input's type
=================== ================ ==========================================================

The condition is checked for each batch. All other differences of types are errors.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper

from detent.checks import first_index
from detent.errors import DtypeError, RangeError, ShapeError, SpecError, UnsupportedError, closest
from detent.onnx_model.graph import DEQUANTIZE, array_of

__all__ = ["Array", "Feed", "InputInfo", "can_convert", "check_input_names", "inputs_of"]

Array = NDArray[Any]
Feed = dict[str, Array]

LOOKUPS, CASTS = frozenset({"Gather"}), frozenset({"Cast", "Identity"})
MAX_CHANNELS = 4  # constants with more elements do not normalize pixels


@dataclass(frozen=True)
class InputInfo:
    """One input of a model.

    ``rows`` is the number of rows of the embedding table that the input indexes; None if it is not such an input.
    ``pixels`` is "0..255" or "0..1" if the first operator on the input shows that it expects such pixels, else "".
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int | None, ...] | None  # sizes that vary are None; an unknown shape is None
    # Not compared, because a quantized model stores its tables in another way.
    rows: int | None = field(default=None, compare=False, repr=False)
    pixels: str = field(default="", compare=False, repr=False)

    def check(self, dtype: np.dtype[Any], shape: tuple[int, ...], where: str) -> None:
        """Raise DtypeError or ShapeError if an array does not fit this input; messages begin with ``where``."""
        is_text = self.dtype == object and dtype.kind in "OUST"
        if dtype != self.dtype and not is_text and not can_convert(dtype, self.dtype):
            raise DtypeError(
                f"{where}: input {self.name!r} has dtype {dtype}, but the model expects {self.dtype}: "
                f"convert it first, for example x.astype({self.dtype.name!r})"
            )
        expected = self.shape
        if expected is not None and (
            len(expected) != len(shape) or any(a not in {None, b} for a, b in zip(expected, shape, strict=True))
        ):
            raise ShapeError(
                f"{where}: input {self.name!r} has shape {shape}, but the model expects {self.shape_text}: pass "
                "arrays of this shape"
            )
        if shape and not shape[0]:
            raise ShapeError(
                f"{where}: input {self.name!r} has shape {shape}, expected at least one sample: remove empty batches"
            )

    @property
    def shape_text(self) -> str:
        """Shape as text, such as "(any, 3, 224, 224)"."""
        if self.shape is None:
            return "any shape"
        return f"({', '.join('any' if size is None else str(size) for size in self.shape)})"

    def convert(self, array: Array, where: str) -> Array:
        """Convert an array that passed ``check`` to the type of this input.

        Raises:
            DtypeError: an integer is not exact in the type of this input.
            RangeError: a value is too large for float32.
        """
        if array.dtype == self.dtype or not can_convert(array.dtype, self.dtype):
            return array
        with np.errstate(over="ignore"):
            converted = array.astype(self.dtype)
        if array.dtype.kind == "f":
            wrong = np.isinf(converted) & np.isfinite(array)
            if wrong.any():
                raise RangeError(
                    f"{where}: input {self.name!r} has the value {array[wrong][0]} at index {first_index(wrong)}, too "
                    f"large for {self.dtype}: scale the data"
                )
            return converted
        wrong = _inexact(array, converted)
        if wrong.any():
            raise DtypeError(
                f"{where}: input {self.name!r} has dtype {array.dtype}, and its value {array[wrong][0]} at index "
                f"{first_index(wrong)} is not exact in {self.dtype}, which the model expects: check the data, or "
                f"convert them first, for example x.astype({self.dtype.name!r})"
            )
        return converted


def can_convert(given: np.dtype[Any], expected: np.dtype[Any]) -> bool:
    """Return whether arrays of one type are converted for an input of another type, if their values allow it."""
    if given.kind == "f":
        return given.itemsize == 8 and expected == np.float32
    return given.kind in "iu" and expected.kind in "iuf" and given != expected


def _inexact(array: Array, converted: Array) -> NDArray[np.bool_]:
    """Return which integers changed their value in a conversion."""
    if converted.dtype.kind != "f":
        limits = np.iinfo(converted.dtype)
        return (array < limits.min) | (array > limits.max)
    limit = 1 << np.finfo(converted.dtype).nmant  # integers up to this limit are exact
    wrong = (array > limit) | (array < -limit)
    if wrong.any():  # Python compares integers and floats exactly
        pairs = zip(array[wrong].tolist(), converted[wrong].tolist(), strict=True)
        wrong[wrong] = [before != after for before, after in pairs]
    return wrong


def inputs_of(model: ModelProto) -> list[InputInfo]:
    """List the inputs that a caller must pass; inputs with an initializer are left out.

    Raises:
        UnsupportedError: an input is not a tensor.
    """
    initializers = {tensor.name for tensor in model.graph.initializer}
    rows, pixels = _table_rows(model), _pixel_ranges(model)
    inputs = []
    for value in model.graph.input:
        if value.name in initializers:
            continue
        if value.type.WhichOneof("value") != "tensor_type":
            raise UnsupportedError(
                f"input {value.name!r} is not a tensor, but only tensors are supported: export "
                "the model with tensor inputs"
            )
        kind = value.type.tensor_type
        try:
            dtype = np.dtype(helper.tensor_dtype_to_np_dtype(kind.elem_type))
        except (KeyError, ValueError, TypeError) as error:
            raise UnsupportedError(
                f"input {value.name!r} has the unknown type {kind.elem_type}: update onnx, or export the model again"
            ) from error
        shape = None
        if kind.HasField("shape"):  # some exporters write 0 or -1 for sizes that vary
            shape = tuple(axis.dim_value if axis.dim_value > 0 else None for axis in kind.shape.dim)
        inputs.append(InputInfo(value.name, dtype, shape, rows.get(value.name), pixels.get(value.name, "")))
    return inputs


def _table_rows(model: ModelProto) -> dict[str, int]:
    """Map each input that a Gather uses as indices to the number of rows of the smallest table."""
    sizes = {tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer}
    origins = {value.name: value.name for value in model.graph.input}
    rows: dict[str, int] = {}
    for node in model.graph.node:
        if not node.input or not node.output:
            continue
        first = node.input[0]
        if node.op_type in CASTS and first in origins:
            origins[node.output[0]] = origins[first]
        elif node.op_type in {DEQUANTIZE, *CASTS} and first in sizes:
            sizes[node.output[0]] = sizes[first]
        elif node.op_type in LOOKUPS and first in sizes and node.input[1] in origins:
            axis = next((each.i for each in node.attribute if each.name == "axis"), 0)
            if -len(sizes[first]) <= axis < len(sizes[first]):
                name = origins[node.input[1]]
                rows[name] = min(rows.get(name, sizes[first][axis]), sizes[first][axis])
    return rows


def _pixel_ranges(model: ModelProto) -> dict[str, str]:
    """Map each input that its first operator normalizes to the range of pixels that this operator expects.

    The operator is a division, multiplication, subtraction or addition with one constant, or one per channel.
    """
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    tensors |= {
        node.output[0]: attribute.t
        for node in model.graph.node
        if node.op_type == "Constant"
        for attribute in node.attribute
        if attribute.name == "value"
    }
    origins = {value.name: value.name for value in model.graph.input}
    ranges: dict[str, str] = {}
    for node in model.graph.node:
        origin = origins.get(node.input[0]) if node.input else None
        if origin is None:
            continue
        if node.op_type in {*CASTS, "Transpose"}:
            origins[node.output[0]] = origin
        elif node.op_type in {"Div", "Mul", "Sub", "Add"} and node.input[1] in tensors:
            ranges.setdefault(origin, _pixel_range(node.op_type, tensors[node.input[1]]))
    return ranges


def _pixel_range(operator: str, constant: TensorProto) -> str:
    """Return the range of pixels that x / c, x * c, x - c or x + c expects, or ""."""
    is_small = 1 <= prod(constant.dims) <= MAX_CHANNELS and constant.data_location != TensorProto.EXTERNAL
    if not is_small or constant.data_type != TensorProto.FLOAT:
        return ""
    size = float(np.abs(array_of(constant)).max())
    if operator == "Mul":
        return "0..255" if 0 < size <= 1 / 50 else ""
    if size >= 50:  # c is 255, 127.5, or a mean of bytes such as 104 or 123.68
        return "0..255"
    return "0..1" if operator != "Div" and 0.2 < size < 0.8 else ""


def check_input_names(given: Sequence[Any], names: Sequence[str], where: str) -> None:
    """Raise SpecError if a name is not an input, or if an input is missing."""
    unknown = [name for name in given if name not in names]
    if unknown:
        hint = closest(str(unknown[0]), names)
        raise SpecError(f"{where}: the model has no input {unknown[0]!r}{hint} its inputs are {', '.join(names)}")
    missing = [name for name in names if name not in given]
    if missing:
        raise SpecError(f"{where} has no array for {', '.join(missing)}: pass an array for each input")
