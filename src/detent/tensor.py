"""QuantizedTensor: codes and the parameters that give them meaning.

``x ~ (codes - zero_point) * scale``. A tensor is a value: immutable, comparable, and saved as a safetensors file whose
metadata hold the spec. It remembers the float type of the data it was made from and dequantizes to it.
"""

import json
import os
from math import prod
from typing import Any, cast

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from detent import storage
from detent.compact import compact, expand
from detent.dtypes import code_dtype, float_dtype
from detent.errors import DetentError, DtypeError, FileFormatError, ParamsError, ShapeError
from detent.packing import pack, packed_size, unpack
from detent.params import QuantParams
from detent.plan import Plan
from detent.slicing import Index, complete_slices, slice_params
from detent.spec import QuantSpec

__all__ = ["QuantizedTensor"]

FILE_VERSION = 1
_KEYS = frozenset({"version", "spec", "shape", "dtype"})


class QuantizedTensor:
    """Codes of one shape with their parameters; made by ``dt.quantize``, ``from_codes`` or ``from_packed``.

    Invariants: ``codes.shape == shape``; ``params.scale.shape`` is what the granularity makes of ``shape``; every
    integer code lies in the spec's range; ``packed`` holds the codes at ``spec.bits`` each.

    >>> import detent as dt, numpy as np
    >>> q = dt.quantize(np.array([0.5, -1.0, 0.25], np.float32), dt.QuantParams(dt.QuantSpec(dt.int4), scale=0.25))
    >>> q
    QuantizedTensor(shape=(3,), dtype=float32, spec=int4/tensor/symmetric/onnx, 6 bytes, 2.0x smaller than float32)
    >>> q.codes, q.packed.tobytes().hex()
    (array([ 2, -4,  1], dtype=int8), 'c201')
    """

    __slots__ = ("_codes", "_dtype", "_packed", "_params", "_shape")

    def __init__(
        self,
        codes: NDArray[Any] | None,
        packed: NDArray[np.uint8] | None,
        params: QuantParams,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
    ) -> None:
        """Trusts its arguments; ``from_codes`` and ``from_packed`` check them."""
        self._codes = _read_only(codes)
        self._packed = _read_only(packed)
        self._params = params
        self._shape = shape
        self._dtype = dtype

    @classmethod
    def from_codes(cls, codes: ArrayLike, params: QuantParams, dtype: DTypeLike = "float32") -> "QuantizedTensor":
        """A tensor of unpacked codes: integers of any width, or small floats of the format's own type.

        Raises:
            ParamsError: a code outside the spec's range.
            ShapeError: the parameters do not fit the codes' shape.

        >>> import detent as dt
        >>> QuantizedTensor.from_codes([1, -2], dt.QuantParams.int8_symmetric()).dequantize()
        array([ 1., -2.], dtype=float32)
        """
        array = np.asarray(codes)
        _check_fit(params, array.shape)
        stored = _checked_codes(array, params.spec)
        return cls(stored, None, params, array.shape, float_dtype(dtype, "dtype"))

    @classmethod
    def from_packed(
        cls, packed: ArrayLike, params: QuantParams, shape: tuple[int, ...], dtype: DTypeLike = "float32"
    ) -> "QuantizedTensor":
        """A tensor of packed codes.

        >>> import detent as dt, numpy as np
        >>> QuantizedTensor.from_packed(np.array([0xE1], np.uint8), dt.QuantParams.int4_symmetric(), (2,)).codes
        array([ 1, -2], dtype=int8)
        """
        shape = tuple(shape)
        _check_fit(params, shape)
        spec = params.spec
        codes = unpack(np.asarray(packed), spec.bits, prod(shape), signed=spec.format.is_integer and spec.format.signed)
        if spec.format.kind == "float":
            codes = codes.view(code_dtype(spec))
        stored = _checked_codes(codes.reshape(shape), spec)
        return cls(stored, np.array(packed, np.uint8), params, shape, float_dtype(dtype, "dtype"))

    @property
    def codes(self) -> NDArray[Any]:
        """The codes, unpacked and read-only, in the data's shape."""
        if self._codes is None:
            whole = type(self).from_packed(self.packed, self._params, self._shape, self._dtype)
            self._codes = whole.codes
        return self._codes

    @property
    def packed(self) -> NDArray[np.uint8]:
        """The codes at ``spec.bits`` each, read-only: element 0 in the lowest bits of byte 0."""
        if self._packed is None:
            self._packed = _read_only(pack(self.codes, self.spec.bits))
        return self._packed  # type: ignore[return-value]  # set above

    @property
    def params(self) -> QuantParams:
        """The parameters."""
        return self._params

    @property
    def spec(self) -> QuantSpec:
        """How the codes were made."""
        return self._params.spec

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the data."""
        return self._shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """The float type of the data the tensor was made from, and of ``dequantize()``."""
        return self._dtype

    @property
    def size(self) -> int:
        """The number of elements."""
        return prod(self._shape)

    @property
    def nbytes(self) -> int:
        """The bytes it takes to store the tensor: packed codes, scales and zero points.

        >>> import detent as dt, numpy as np
        >>> dt.quantize(np.zeros(64, np.float32), dt.QuantParams.int8_symmetric()).nbytes
        68
        """
        return packed_size(self.size, self.spec.bits) + -(-self._params.parameter_bits() // 8)

    def dequantize(self, dtype: DTypeLike | None = None, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """The values ``(codes - zero_point) * scale`` in ``dtype``, by default the data's own.

        >>> import detent as dt, numpy as np
        >>> dt.quantize(np.array([0.4, 1.6]), dt.QuantParams.int8_symmetric()).dequantize()
        array([0., 2.])
        """
        wanted = self._dtype if dtype is None else float_dtype(dtype, "dtype")
        plan = Plan.select("dequantize", shape=self._shape, dtype=wanted, spec=self.spec)
        plan.check(self.codes, self._params, out)
        return cast("NDArray[Any]", plan.run(self.codes, self._params, out=out))

    def __getitem__(self, index: Index) -> "QuantizedTensor":
        """A part of the tensor, by slices; no group or block may be cut.

        >>> import detent as dt, numpy as np
        >>> x = np.arange(12, dtype=np.float32).reshape(3, 4)
        >>> q = dt.quantize(x, dt.QuantParams.from_data("int8/axis0", x))
        >>> np.array_equal(q[1:, ::2].dequantize(), q.dequantize()[1:, ::2])
        True
        """
        slices = complete_slices(index, self._shape)
        params = slice_params(self._params, self._shape, slices)
        codes = self.codes[slices].copy()
        return type(self)(codes, None, params, codes.shape, self._dtype)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, QuantizedTensor):
            return NotImplemented
        return (
            self._shape == other._shape
            and self._dtype == other._dtype
            and self._params == other._params
            and self.codes.tobytes() == other.codes.tobytes()
        )

    def __hash__(self) -> int:
        return hash((self._shape, self._dtype, self._params, self.codes.tobytes()))

    def __len__(self) -> int:
        if not self._shape:
            raise ShapeError("a 0-d QuantizedTensor has no length")
        return self._shape[0]

    def __repr__(self) -> str:
        ratio = self.size * self._dtype.itemsize / self.nbytes
        return (
            f"QuantizedTensor(shape={self._shape}, dtype={self._dtype}, spec={self.spec}, {self.nbytes:,} bytes, "
            f"{ratio:.1f}x smaller than {self._dtype})"
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file: ``nbytes`` of packed codes and parameters, with the spec in the header.

        The file appears whole or not at all. The range the parameters came from is not kept.

        >>> import detent as dt, numpy as np, tempfile, pathlib
        >>> q = dt.quantize(np.zeros(3, np.float32), dt.QuantParams.int8_symmetric())
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     q.save(pathlib.Path(folder, "q.safetensors"))
        ...     QuantizedTensor.load(pathlib.Path(folder, "q.safetensors")) == q
        True
        """
        about = {
            "version": FILE_VERSION,
            "spec": self.spec.to_dict(),
            "shape": list(self._shape),
            "dtype": self._dtype.name,
        }
        arrays = {"packed": self.packed, **compact(self._params)}
        storage.write_atomic(path, storage.dumps(arrays, {"detent.QuantizedTensor": json.dumps(about)}))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "QuantizedTensor":
        """Read what ``save`` wrote.

        Raises:
            FileFormatError: truncated, oversized, duplicated, foreign or contradictory content.
        """
        arrays, metadata = storage.read(path)
        try:
            return cls._from_file(arrays, metadata)
        except (DetentError, ValueError, TypeError, RecursionError) as error:
            raise FileFormatError(f"{os.fspath(path)} holds no QuantizedTensor: {error}") from error

    @classmethod
    def _from_file(cls, arrays: dict[str, NDArray[Any]], metadata: dict[str, str]) -> "QuantizedTensor":
        if set(metadata) != {"detent.QuantizedTensor"}:
            raise FileFormatError(f"expected the metadata key 'detent.QuantizedTensor', got {sorted(metadata)}")
        about = json.loads(metadata["detent.QuantizedTensor"])
        if not isinstance(about, dict) or set(about) != _KEYS:
            raise FileFormatError(f"the metadata need exactly the keys {sorted(_KEYS)}")
        if about["version"] != FILE_VERSION:
            raise FileFormatError(f"this detent reads version {FILE_VERSION}, got {about['version']!r}: update detent")
        shape = about["shape"]
        if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
            raise FileFormatError(f"shape {shape!r} is no list of sizes")
        if "packed" not in arrays:
            raise FileFormatError(f"expected the array 'packed', got {sorted(arrays)}")
        packed = arrays.pop("packed")
        spec = QuantSpec.from_dict(about["spec"])
        params = expand(spec, arrays, spec.granularity.tiling(tuple(shape)).scale_shape)
        return cls.from_packed(packed, params, tuple(shape), float_dtype(about["dtype"], "dtype"))


def _read_only(array: NDArray[Any] | None) -> NDArray[Any] | None:
    if array is None:
        return None
    view = array.view()
    view.setflags(write=False)
    return view


def _check_fit(params: QuantParams, shape: tuple[int, ...]) -> None:
    if not isinstance(params, QuantParams):
        raise DtypeError(f"params must be a QuantParams, got {type(params).__name__}")
    Plan.select("dequantize", shape=shape, dtype="float32", spec=params.spec).check_params(params)


def _checked_codes(codes: NDArray[Any], spec: QuantSpec) -> NDArray[Any]:
    """A copy in the format's storage type, every integer code of which the spec could have made."""
    wanted = code_dtype(spec)
    if spec.format.kind == "float":
        if codes.dtype != wanted:
            raise DtypeError(f"codes of {spec.format.name} have dtype {wanted}, got {codes.dtype}")
        return codes.copy()
    if codes.dtype.kind not in "iu":
        raise DtypeError(f"codes of {spec.format.name} are integers, got {codes.dtype}")
    low, high = (int(spec.qmin), int(spec.qmax)) if spec.format.is_integer else (0, len(spec.format.levels) - 1)
    if codes.size and not (low <= int(codes.min()) and int(codes.max()) <= high):
        raise ParamsError(f"codes of {spec} lie in [{low}, {high}], got [{codes.min()}, {codes.max()}]")
    return codes.astype(wanted)
