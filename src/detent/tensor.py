"""QuantizedTensor: codes with their quantization parameters.

A tensor approximates data ``x`` by ``(codes - zero_point) * scale``. It is read-only and can be compared with ``==``.
It is saved as a safetensors file with the spec in the metadata. It is dequantized to the float type of the data that it
was made from.

Any slice of an axis is allowed if one parameter set spans the axis, or if each index has its own parameter set. Along
an axis with groups or blocks, a slice must have step 1, and start and end at a group boundary.

A file contains the packed codes and the parameters:

============ ======================================================================
scale        float32 or float64; with scale format "e8m0", biased exponents in uint8
block_scale  with scale format "e4m3", instead of ``scale``: float8 bits in uint8
tensor_scale with scale format "e4m3": float32
zero_point   for affine specs: packed at the bit width of the format
============ ======================================================================

The range that the parameters were derived from is not saved.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from types import EllipsisType
from typing import Any, cast

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from detent import storage
from detent.checks import as_array, as_shape, float_dtype
from detent.codec import parse, reading, table
from detent.errors import DtypeError, FileFormatError, ParamsError, ShapeError
from detent.granularity import Tiling
from detent.packing import pack, packed_size, unpack
from detent.params import QuantParams
from detent.plan import Plan, check_is_params
from detent.quantized_data import Index, QuantizedData, Slices, complete_slices, read_only
from detent.spec import QuantSpec, code_dtype, short_spec, spec_text
from detent.tables import bytes_text, html_table, svg_histogram

__all__ = ["QuantizedTensor"]

Arrays = dict[str, NDArray[Any]]
FILE_VERSION = 1
MAX_BINS = 64  # bins of the histogram in notebooks, each one to four pixels wide
MAX_CODES_COUNTED = 1 << 20  # for a larger tensor, the histogram counts every n-th code, to take less than 0.1 s
E8M0_BIAS = 127  # exponent bias, as in float32
_METADATA = "detent.QuantizedTensor"
_KEYS = frozenset({"spec", "shape", "dtype"})


class QuantizedTensor(QuantizedData):
    """Codes with their parameters; made by ``dt.quantize``, ``from_codes`` or ``from_packed``.

    A tensor from ``dt.quantize(..., out=...)`` shares memory with ``out``; all others are immutable.

    >>> import detent as dt, numpy as np
    >>> q = dt.quantize(np.array([0.5, -1.0, 0.25], np.float32), dt.QuantParams(dt.QuantSpec(dt.int4), scale=0.25))
    >>> q
    QuantizedTensor(shape=(3,), dtype=float32, spec='int4/tensor', 6 bytes, 2.0x smaller)
    >>> q.codes, q.packed.tobytes().hex()
    (array([ 2, -4,  1], dtype=int8), 'c201')
    """

    __slots__ = ("_codes", "_packed", "_params")

    def __init__(self, codes: ArrayLike, params: QuantParams, dtype: DTypeLike = "float32") -> None:
        """Make a tensor from unpacked codes; same as ``from_codes``."""
        array = as_array("codes", codes)
        self._dtype = float_dtype(dtype, "the tensor")
        _check_fit(params, array.shape, self._dtype)
        self._codes: NDArray[Any] | None = read_only(_checked_codes(array, params.spec))
        self._packed: NDArray[np.uint8] | None = None
        self._params, self._shape, self._shared = params, array.shape, False

    @classmethod
    def trusted(
        cls,
        data: NDArray[Any],
        params: QuantParams,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        *,
        packed: bool = False,
        shared: bool = False,
    ) -> "QuantizedTensor":
        """Make a tensor from codes (or packed codes) that a plan has just computed, without a check or copy.

        If ``shared``, the codes may change, so the tensor caches nothing and has no hash.
        """
        tensor = cls.__new__(cls)
        view = read_only(data)
        tensor._codes, tensor._packed = (None, view) if packed else (view, None)
        tensor._params, tensor._shape, tensor._dtype, tensor._shared = params, shape, dtype, shared
        return tensor

    @classmethod
    def from_codes(cls, codes: ArrayLike, params: QuantParams, dtype: DTypeLike = "float32") -> "QuantizedTensor":
        """Make a tensor from unpacked codes: integers of any dtype, or floats of at most 8 bits in the format's dtype.

        Raises:
            ParamsError: a code is outside the spec's range.
            ShapeError: the scales have the wrong shape for these codes.

        >>> import detent as dt
        >>> QuantizedTensor.from_codes([1, -2], dt.QuantParams.int8_symmetric()).dequantize()
        array([ 1., -2.], dtype=float32)
        """
        return cls(codes, params, dtype)

    @classmethod
    def from_packed(
        cls, packed: ArrayLike, params: QuantParams, shape: tuple[int, ...], dtype: DTypeLike = "float32"
    ) -> "QuantizedTensor":
        """Make a tensor from packed codes; ``shape`` is the shape of the unpacked codes.

        >>> import detent as dt, numpy as np
        >>> QuantizedTensor.from_packed(np.array([0xE1], np.uint8), dt.QuantParams.int4_symmetric(), (2,)).codes
        array([ 1, -2], dtype=int8)
        """
        sizes = as_shape(shape)
        _check_fit(params, sizes, float_dtype(dtype, "the tensor"))
        return cls(_unpacked(as_array("packed", packed), params.spec, sizes), params, dtype)

    @property
    def codes(self) -> NDArray[Any]:
        """The codes, unpacked and read-only, in the data's shape."""
        if self._codes is not None:
            return self._codes
        codes = read_only(_unpacked(self.packed, self.spec, self._shape))
        if not self._shared:
            self._codes = codes
        return codes

    @property
    def packed(self) -> NDArray[np.uint8]:
        """The codes packed at ``spec.bits`` bits each, read-only: element 0 in the lowest bits of byte 0."""
        if self._packed is not None:
            return self._packed
        packed = read_only(pack(self.codes, self.spec.bits))
        if not self._shared:
            self._packed = packed
        return packed

    @property
    def params(self) -> QuantParams:
        """The parameters."""
        return self._params

    @property
    def spec(self) -> QuantSpec:
        """The spec of the codes."""
        return self._params.spec

    @property
    def nbytes(self) -> int:
        """The size of the stored tensor in bytes: packed codes, scales and zero points."""
        return packed_size(self.size, self.spec.bits) + -(-self._params.parameter_bits() // 8)

    def dequantize(self, dtype: DTypeLike | None = None, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """Return the values ``(codes - zero_point) * scale`` in ``dtype``, by default the original data's dtype.

        >>> import detent as dt, numpy as np
        >>> dt.quantize(np.array([0.4, 1.6]), dt.QuantParams.int8_symmetric()).dequantize()
        array([0., 2.])
        """
        result = self._dtype if dtype is None else float_dtype(dtype, "the result")
        plan = Plan.select("dequantize", shape=self._shape, dtype=result, spec=self.spec)
        codes = self.packed if self._codes is None else self._codes
        plan.check(codes, self._params, out)
        return cast("NDArray[Any]", plan.run(codes, self._params, out=out))

    def __getitem__(self, index: Index) -> "QuantizedTensor":
        """Slice the tensor; a slice may not cut a group or block."""
        slices = complete_slices(index, self._shape)
        params = slice_params(self._params, self._shape, slices)
        full_index: tuple[slice | EllipsisType, ...] = (*slices, ...)  # the ellipsis makes a 0-d result an array
        codes = self.codes[full_index].copy()
        return type(self).trusted(codes, params, codes.shape, self._dtype)

    def _identity(self) -> tuple[object, ...]:
        return self._params, self.codes.tobytes()

    def __reduce__(self) -> tuple[type["QuantizedTensor"], tuple[object, ...]]:
        return type(self), (self.codes, self._params, self._dtype)

    def __repr__(self) -> str:
        return (
            f"QuantizedTensor(shape={self._shape}, dtype={self._dtype}, spec={short_spec(self.spec)}, "
            f"{self.nbytes:,} bytes, {self._compression:.1f}x smaller)"
        )

    def _repr_html_(self) -> str:
        """Format a table with shape and size, and a histogram of the codes, for notebooks."""
        spec = spec_text(self.spec) or str(self.spec)
        size, ratio = bytes_text(self.nbytes), f"{self._compression:.1f}x smaller than {self._dtype}"
        table_text = html_table(
            [
                ("shape", "spec", "parameter sets", "size", "compression"),
                (str(self._shape), spec, f"{self._params.num_parameter_sets:,}", size, ratio),
            ]
        )
        counts, lo, hi = code_histogram(self.codes, self.spec)
        return table_text + svg_histogram(counts, f"{lo:g}", f"{hi:g}", "histogram of the codes")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file atomically: a header with the spec, and ``nbytes`` bytes of codes and parameters."""
        metadata = {
            "version": FILE_VERSION,
            "spec": self.spec.to_dict(),
            "shape": list(self._shape),
            "dtype": self._dtype.name,
        }
        arrays = {"packed": self.packed, **compact(self._params)}
        storage.write_atomic(path, storage.dumps(arrays, {_METADATA: json.dumps(metadata)}))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "QuantizedTensor":
        """Read a file that ``save`` wrote.

        Raises:
            FileFormatError: the file is truncated, oversized or inconsistent, or was not written by ``save``.

        >>> import detent as dt, pathlib, tempfile
        >>> q = QuantizedTensor.from_codes([1, -2], dt.QuantParams.int8_symmetric())
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     path = pathlib.Path(directory, "q.safetensors")
        ...     q.save(path)
        ...     QuantizedTensor.load(path) == q
        True
        """
        arrays, metadata = storage.read(path)
        with reading(f"{os.fspath(path)} does not contain a QuantizedTensor"):
            text = table(metadata, "the metadata", (_METADATA,))[_METADATA]
            entries = table(parse(text, _METADATA), _METADATA, _KEYS, version=FILE_VERSION)
            dtype, spec, shape = entries["dtype"], QuantSpec.from_dict(entries["spec"]), as_shape(entries["shape"])
            if not isinstance(dtype, str) or "packed" not in arrays:
                raise FileFormatError(
                    f"got dtype {dtype!r} and arrays {sorted(arrays)}, expected a dtype name and an array 'packed'"
                )
            packed = arrays.pop("packed")
            needed = packed_size(prod(shape), spec.bits)
            if packed.shape != (needed,):
                raise FileFormatError(
                    f"got packed codes of shape {packed.shape}, expected ({needed},) for codes of shape {shape}"
                )
            params = expand(spec, arrays, spec.granularity.tiling(shape).scale_shape)
            return cls.from_packed(packed, params, shape, dtype)


def _check_fit(params: QuantParams, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    check_is_params(params)
    Plan.select("dequantize", shape=shape, dtype=dtype, spec=params.spec).check_params(params)


def _unpacked(packed: NDArray[np.uint8], spec: QuantSpec, shape: tuple[int, ...]) -> NDArray[Any]:
    codes = unpack(packed, spec.bits, prod(shape), signed=spec.format.is_integer and spec.format.signed)
    return (codes.view(code_dtype(spec)) if spec.format.kind == "float" else codes).reshape(shape)


def _checked_codes(codes: NDArray[Any], spec: QuantSpec) -> NDArray[Any]:
    """Copy codes to the format's storage type, and check that they are in the spec's range."""
    storage_type = code_dtype(spec)
    if spec.format.kind == "float":
        if codes.dtype != storage_type:
            raise DtypeError(
                f"got codes of dtype {codes.dtype}, expected {storage_type} for {spec.format.name}: use astype for "
                "values, or view for bit patterns"
            )
        if codes.size and int(codes.view(np.uint8).max()) >> spec.bits:
            raise ParamsError(f"got codes of more than {spec.bits} bits for {spec.format.name}: clear the higher bits")
        return codes.copy()
    if codes.dtype.kind not in "iu":
        raise DtypeError(
            f"got codes of dtype {codes.dtype}, expected integers for {spec.format.name}: use "
            f"astype({storage_type.name!r})"
        )
    low, high = (int(spec.qmin), int(spec.qmax)) if spec.format.is_integer else (0, len(spec.format.levels) - 1)
    if codes.size and not (low <= int(codes.min()) and int(codes.max()) <= high):
        raise ParamsError(
            f"got codes in [{codes.min()}, {codes.max()}], expected [{low}, {high}] for {spec}: clamp the codes, or "
            "change qmin and qmax of the spec"
        )
    return codes.astype(storage_type)


def code_histogram(codes: NDArray[Any], spec: QuantSpec) -> tuple[list[int], float, float]:
    """Count the codes in bins over the spec's range, and return the counts and the range.

    Integers and codebook indices are counted in bins of equal integer width; float codes are counted by their values.
    """
    sample = codes.reshape(-1)[:: max(1, -(-codes.size // MAX_CODES_COUNTED))]
    lo, hi = (float(spec.qmin), float(spec.qmax))
    if spec.format.kind == "float":
        counts, _ = np.histogram(sample.astype(np.float32), MAX_BINS, (lo, hi))
        return counts.tolist(), lo, hi
    if not spec.format.is_integer:
        lo, hi = 0.0, float(len(spec.format.levels) - 1)
    width = -(-int(hi - lo + 1) // MAX_BINS)
    bins = (sample.astype(np.int64) - int(lo)) // width
    return np.bincount(bins, minlength=int(hi - lo) // width + 1).tolist(), lo, hi


def slice_params(params: QuantParams, shape: tuple[int, ...], slices: Slices) -> QuantParams:
    """Return the parameters of a part of the data: ``slices`` select the part from data of shape ``shape``."""
    before = params.spec.granularity.tiling(shape)
    sizes = (len(range(*part.indices(size))) for part, size in zip(slices, shape, strict=True))
    after = params.spec.granularity.tiling(tuple(sizes))
    tiles = tuple(_tile(axis, part, before, after) for axis, part in enumerate(slices))
    changes = {
        name: value.reshape(before.grid)[(*tiles, ...)].reshape(after.scale_shape)
        for name in ("scale", "zero_point", "min_val", "max_val", "block_scale")
        if (value := getattr(params, name)) is not None
    }
    return replace(params, **changes)


def _tile(axis: int, part: slice, before: Tiling, after: Tiling) -> slice:
    """Return the slice of the parameter sets that belongs to ``part``, a slice of the data along ``axis``."""
    block = before.block[axis]
    grouped = before.scale_shape == before.grid
    if after.grid[axis] == 0:
        return slice(0, 0)
    if before.grid[axis] == 1 and not grouped:
        return slice(0, 1)
    if block == 1:
        return part
    start, stop, step = part.indices(before.shape[axis])
    if step != 1 or start % block or (stop % block and stop != before.shape[axis]):
        raise ShapeError(
            f"slice {start}:{stop}:{step} of axis {axis} cuts groups of {block}: start and end at multiples of {block} "
            "with step 1, or dequantize first"
        )
    return slice(start // block, -(-stop // block))


def compact(params: QuantParams) -> Arrays:
    """Return the parameters as the arrays that a file contains; ``expand`` restores the parameters."""
    spec = params.spec
    arrays: Arrays = {"scale": params.scale}
    if params.block_scale is not None and params.tensor_scale is not None:
        arrays = {"block_scale": params.block_scale.view(np.uint8), "tensor_scale": params.tensor_scale}
    elif spec.scale_format == "e8m0":
        arrays = {"scale": (np.frexp(params.scale)[1] - 1 + E8M0_BIAS).astype(np.uint8)}
    if not spec.symmetric:
        arrays["zero_point"] = pack(params.zero_point, spec.bits)
    return arrays


def expand(spec: QuantSpec, arrays: Mapping[str, NDArray[Any]], scale_shape: tuple[int, ...]) -> QuantParams:
    two_level = spec.scale_format == "e4m3"
    names = {"block_scale", "tensor_scale"} if two_level else {"scale"}
    table(arrays, f"the parameters of {spec}", names if spec.symmetric else names | {"zero_point"})
    stored = arrays["block_scale" if two_level else "scale"]
    _check_array("scales", stored, ("uint8",) if spec.scale_format != "float" else ("float32", "float64"), scale_shape)
    if two_level:
        _check_array("tensor_scale", arrays["tensor_scale"], ("float32",), ())
        block = stored.view(ml_dtypes.float8_e4m3fn)
        with np.errstate(all="ignore"):  # QuantParams rejects infinite scales
            scale = block.astype(np.float32) * arrays["tensor_scale"]
        return QuantParams(spec, scale, block_scale=block, tensor_scale=arrays["tensor_scale"])
    if spec.scale_format == "e8m0":
        with np.errstate(all="ignore"):  # QuantParams rejects exponents of subnormal numbers
            return QuantParams(spec, np.ldexp(np.float32(1.0), stored.astype(np.int32) - E8M0_BIAS))
    if spec.symmetric:
        return QuantParams(spec, stored)
    zero_point = unpack(arrays["zero_point"], spec.bits, prod(scale_shape), signed=spec.format.signed)
    return QuantParams(spec, stored, zero_point.reshape(scale_shape).astype(np.int32))


def _check_array(name: str, array: NDArray[Any], dtypes: tuple[str, ...], shape: tuple[int, ...]) -> None:
    if array.dtype.name not in dtypes or array.shape != shape:
        raise FileFormatError(
            f"got {name} of dtype {array.dtype} and shape {array.shape}, expected dtype "
            f"{' or '.join(dtypes)} and shape {shape}"
        )
