"""BlockTensor: data in a block format, as the bytes that a file contains.

It has the interface of ``QuantizedTensor``, but no params, because the bytes of a block include its scales. Slices of
leading axes are allowed; a slice of the last axis must have step 1, and start and end at a block boundary.
"""

import json
import os
from math import prod
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from detent import storage
from detent.block_format import BlockFormat
from detent.checks import as_array, as_shape, first_nonfinite, float_array, float_dtype, refuse_nan
from detent.codec import parse, reading, table
from detent.errors import DtypeError, FileFormatError, OutError, ParamsError, RangeError, ShapeError, SpecError
from detent.gguf import get_block_format
from detent.kernels import decode_blocks, encode_blocks
from detent.quantized_data import Index, QuantizedData, complete_slices, read_only
from detent.tables import bytes_text, html_table

__all__ = ["BlockTensor", "ScalePolicy", "fake_quantize_blocks", "quantize_blocks"]

Array = NDArray[Any]
Bytes = NDArray[np.uint8]
ScalePolicy: TypeAlias = Literal["raise", "keep"]
FILE_VERSION = 1
FLOAT16_SIZE = 0x7FFF  # the bits of a float16 without its sign, which compare like magnitudes
FIRST_WRAPPED = 232  # lowest byte of a negative exponent: that of the smallest float32 is -24
FLOAT16_INF = 0x7C00  # infinity; NaN is larger
_METADATA = "detent.BlockTensor"
_KEYS = frozenset({"format", "shape", "dtype"})


class BlockTensor(QuantizedData):
    """Data in a block format; made by ``dt.quantize(x, "q4_k")`` or from the bytes of a file.

    Args:
        packed: the bytes, in C order.
        format: block format or its name.
        shape: shape of the data.
        dtype: float type of ``dequantize()``.

    Raises:
        ShapeError: the last axis does not consist of complete blocks, or the number of bytes is wrong.

    >>> import detent as dt, numpy as np
    >>> q = dt.quantize(np.linspace(-1, 1, 64, dtype=np.float32).reshape(2, 32), dt.gguf.q8_0)
    >>> q
    BlockTensor(shape=(2, 32), dtype=float32, format=q8_0, 68 bytes, 3.8x smaller)
    >>> q[1:].packed[:4], q.codes[0, :3]
    (array([ 8, 32,  2,  6], dtype=uint8), array([-127, -123, -119], dtype=int8))
    """

    __slots__ = ("_format", "_packed")

    def __init__(
        self, packed: ArrayLike, format: BlockFormat | str, shape: tuple[int, ...], dtype: DTypeLike = "float32"
    ) -> None:
        array = as_array("packed", packed)
        self._format, self._shape = get_block_format(format), as_shape(shape)
        self._dtype, self._shared = float_dtype(dtype, "the tensor"), False
        needed = self._format.nbytes(self._shape)
        if array.dtype != np.uint8 or array.size != needed:
            raise ShapeError(
                f"got {array.size} elements of dtype {array.dtype}, expected {needed} bytes (uint8) for {self._format} "
                f"data of shape {self._shape}"
            )
        self._packed: Bytes = read_only(array.reshape(-1).copy())

    @classmethod
    def trusted(
        cls, packed: Bytes, form: BlockFormat, shape: tuple[int, ...], dtype: np.dtype[Any], *, shared: bool = False
    ) -> "BlockTensor":
        """Make a tensor from bytes that were just computed, without a check or copy; ``shared`` bytes may change."""
        tensor = cls.__new__(cls)
        tensor._packed, tensor._format, tensor._shape = read_only(packed.reshape(-1)), form, shape
        tensor._dtype, tensor._shared = dtype, shared
        return tensor

    @classmethod
    def from_packed(
        cls, packed: ArrayLike, format: BlockFormat | str, shape: tuple[int, ...], dtype: DTypeLike = "float32"
    ) -> "BlockTensor":
        """Make a tensor from the bytes of a file; same as the constructor."""
        return cls(packed, format, shape, dtype)

    @property
    def format(self) -> BlockFormat:
        """The block format."""
        return self._format

    spec = format

    @property
    def packed(self) -> Bytes:
        """The bytes as a file contains them, read-only and in one axis."""
        return self._packed

    @property
    def blocks(self) -> Bytes:
        """The bytes with one row per block, read-only."""
        return self._packed.reshape(-1, self._format.block_bytes)

    @property
    def codes(self) -> Array:
        """The codes of all elements in the data's shape: unsigned, except for q8_0; indices of levels for iq4."""
        return self._format.unpack(self.blocks).reshape(self._shape)

    @property
    def nbytes(self) -> int:
        """The size of the stored tensor in bytes; scales are part of the blocks."""
        return self._packed.size

    def dequantize(self, dtype: DTypeLike | None = None, out: Array | None = None) -> Array:
        """Return the values, computed in float32 and rounded to ``dtype``, by default the original data's dtype."""
        result = self._dtype if dtype is None else float_dtype(dtype, "the result")
        if out is None:
            out = np.empty(self._shape, result)
        else:
            _check_out(out, result, self._shape)
        _decode_into(self._format, self._packed, out)
        return out

    def __getitem__(self, index: Index) -> "BlockTensor":
        """Slice the tensor; a slice of the last axis may not cut a block."""
        slices = complete_slices(index, self._shape)
        columns, size = self._shape[-1], self._format.block_size
        start, stop, step = slices[-1].indices(columns)
        if step != 1 or start % size or (stop % size and stop > start):
            raise ShapeError(
                f"slice {start}:{stop}:{step} of the last axis cuts blocks of {size}: start and end at multiples of "
                f"{size} with step 1, or dequantize first"
            )
        rows = self._packed.reshape(*self._shape[:-1], columns // size, self._format.block_bytes)
        part = rows[(*slices[:-1], slice(start // size, max(start, stop) // size))].copy()
        shape = (*part.shape[:-2], part.shape[-2] * size)
        return type(self).trusted(part, self._format, shape, self._dtype)

    def _identity(self) -> tuple[object, ...]:
        return self._format, self._packed.tobytes()

    def __reduce__(self) -> tuple[type["BlockTensor"], tuple[object, ...]]:
        return type(self), (self._packed, self._format.name, self._shape, self._dtype.name)

    def __repr__(self) -> str:
        return (
            f"BlockTensor(shape={self._shape}, dtype={self._dtype}, format={self._format}, {self.nbytes:,} bytes, "
            f"{self._compression:.1f}x smaller)"
        )

    def _repr_html_(self) -> str:
        ratio = f"{self._compression:.1f}x smaller than {self._dtype}"
        bits = f"{self._format.bits_per_weight:g}"
        return html_table(
            [
                ("shape", "format", "bits per weight", "size", "compression"),
                (str(self._shape), self._format.name, bits, bytes_text(self.nbytes), ratio),
            ]
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file atomically: a header with the format, and the bytes."""
        metadata = {
            "version": FILE_VERSION,
            "format": self._format.name,
            "shape": list(self._shape),
            "dtype": self._dtype.name,
        }
        storage.write_atomic(path, storage.dumps({"packed": self._packed}, {_METADATA: json.dumps(metadata)}))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "BlockTensor":
        """Read a file that ``save`` wrote.

        Raises:
            FileFormatError: the file is truncated, oversized or inconsistent, or was not written by ``save``.

        >>> import detent as dt, numpy as np, pathlib, tempfile
        >>> q = dt.quantize(np.ones((1, 32), np.float32), "q4_0")
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     path = pathlib.Path(directory, "q.safetensors")
        ...     q.save(path)
        ...     dt.BlockTensor.load(path) == q
        True
        """
        arrays, metadata = storage.read(path)
        with reading(f"{os.fspath(path)} does not contain a BlockTensor"):
            text = table(metadata, "the metadata", (_METADATA,))[_METADATA]
            entries = table(parse(text, _METADATA), _METADATA, _KEYS, version=FILE_VERSION)
            name, dtype = entries["format"], entries["dtype"]
            if not isinstance(name, str) or not isinstance(dtype, str) or set(arrays) != {"packed"}:
                raise FileFormatError(
                    f"got format {name!r}, dtype {dtype!r} and arrays {sorted(arrays)}, expected two names and an "
                    "array 'packed'"
                )
            return cls(arrays["packed"], name, as_shape(entries["shape"]), dtype)


def quantize_blocks(
    x: ArrayLike,
    form: BlockFormat,
    *,
    importance: ArrayLike | None = None,
    out: Array | None = None,
    nan: str = "raise",
    scales: ScalePolicy = "raise",
) -> BlockTensor:
    """Quantize x to a block format; see ``dt.quantize``."""
    if nan != "raise":
        raise SpecError(f"got nan={nan!r}, but {form} has no code for NaN: replace NaN in the data, and omit nan=")
    if scales not in ("raise", "keep"):
        raise SpecError(f"got scales={scales!r}, expected 'raise' or 'keep'")
    data = float_array(x, "x")
    needed = form.nbytes(data.shape)
    weights = _checked_importance(importance, form, data.shape)
    if out is not None:
        _check_out(out, np.dtype(np.uint8), (needed,))
    packed = np.empty(needed, np.uint8) if out is None else out
    rows = _rows(data)
    encoded = encode_blocks(form, rows, weights, packed.reshape(len(rows), form.row_bytes(rows.shape[1])))
    if not encoded.is_finite:
        _refuse_nonfinite(data, rows)
    if scales == "raise" and encoded.needs_check:
        _check_scales(form, data.shape, rows, packed)
    return BlockTensor.trusted(packed, form, data.shape, data.dtype, shared=out is not None)


def fake_quantize_blocks(
    x: ArrayLike,
    form: BlockFormat,
    *,
    importance: ArrayLike | None = None,
    out: Array | None = None,
    nan: str = "propagate",
) -> Array:
    """Fake-quantize x with a block format; see ``dt.fake_quantize``.

    A block that contains NaN or infinities becomes NaN. Scales that float16 cannot represent are not reported: a scale
    that becomes 0 gives zeros, and one that becomes infinite gives infinities or NaN.
    """
    if nan not in ("propagate", "raise"):
        raise SpecError(f"got nan={nan!r} for {form}, expected 'propagate' or 'raise'")
    data = float_array(x, "x")
    form.check_shape(data.shape)
    weights = _checked_importance(importance, form, data.shape)
    if out is None:
        out = np.empty(data.shape, data.dtype)
    else:
        _check_out(out, data.dtype, data.shape)
        if np.may_share_memory(out, data):
            raise OutError("out shares memory with x: pass another array")
    rows = _rows(data)
    packed = np.empty((len(rows), form.row_bytes(rows.shape[1])), np.uint8)
    if encode_blocks(form, rows, weights, packed).is_finite:
        _decode_into(form, packed, out)
        return out
    if nan == "raise":
        _refuse_nonfinite(data, rows)
    bad = ~np.isfinite(rows.reshape(-1, form.block_size)).all(axis=1)
    clean = rows.reshape(-1, form.block_size).copy()
    clean[bad] = 0
    encode_blocks(form, clean.reshape(rows.shape), weights, packed)
    _decode_into(form, packed, out)
    poisoned = np.repeat(bad, form.block_size).reshape(data.shape)
    out[poisoned] = np.nan
    return out


def _rows(data: Array) -> NDArray[np.float32]:
    """Return the data as rows of contiguous float32."""
    with np.errstate(all="ignore"):
        return np.ascontiguousarray(data, np.float32).reshape(prod(data.shape[:-1]), data.shape[-1])


def _decode_into(form: BlockFormat, packed: Bytes, out: Array) -> None:
    shape = (-1, form.block_size)
    blocks = packed.reshape(-1, form.block_bytes)
    if out.dtype == np.float32 and out.flags.c_contiguous:
        decode_blocks(form, blocks, out.reshape(shape))
        return
    values = np.empty((len(blocks), form.block_size), np.float32)
    decode_blocks(form, blocks, values)
    with np.errstate(all="ignore"):
        out[...] = values.reshape(out.shape)


def _check_out(out: Array, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    if not isinstance(out, np.ndarray) or out.dtype != dtype or out.shape != shape:
        given = f"{out.dtype} of shape {out.shape}" if isinstance(out, np.ndarray) else type(out).__name__
        raise OutError(f"got out={given}, expected an array of {dtype} of shape {shape}")
    if not out.flags.writeable or (dtype == np.uint8 and not out.flags.c_contiguous):
        raise OutError("out must be writable, and contiguous if it receives bytes: pass a new array")


def _checked_importance(
    importance: ArrayLike | None, form: BlockFormat, shape: tuple[int, ...]
) -> NDArray[np.float32] | None:
    if importance is None:
        return None
    given = as_array("importance", importance)
    if given.shape != shape[-1:]:
        raise ShapeError(
            f"got importance of shape {given.shape} for data of shape {shape}, expected {shape[-1:]}, one weight per "
            "column"
        )
    if given.dtype.kind not in "fiu":
        raise DtypeError(f"got importance of dtype {given.dtype}, expected floats")
    with np.errstate(all="ignore"):
        weights = np.ascontiguousarray(given, np.float32)
    bad = ~(np.isfinite(weights) & (weights >= 0))
    if bad.any():
        at = int(bad.argmax())
        raise RangeError(
            f"got importance {given[at]} at column {at}, expected finite weights of at least 0 (invalid: "
            f"{int(bad.sum())} of {bad.size})"
        )
    return weights if form.uses_importance else None


def _refuse_nonfinite(data: Array, rows: NDArray[np.float32]) -> None:
    refuse_nan("x", data, "replace NaN in the data")
    at = first_nonfinite(rows.reshape(data.shape))
    raise RangeError(
        f"x contains {data[at]} at {at}, which float32 cannot represent as a finite number: block formats need finite "
        "data; clip the data, or check the layers that produced them"
    )


def _check_exponents(form: BlockFormat, rows: NDArray[np.float32], packed: Bytes) -> None:
    """Raise if the exponent of a block is below the range of a byte; ggml then stores its lowest 8 bits."""
    bad = packed.reshape(-1, form.block_bytes)[:, 0] >= FIRST_WRAPPED
    candidates = np.flatnonzero(bad)
    bad[candidates] = np.abs(rows.reshape(-1, form.block_size)[candidates]).max(axis=1, initial=0) < 1
    if not bad.any():
        return
    at = int(bad.argmax())
    largest = float(np.abs(rows.reshape(-1, form.block_size)[at]).max())
    raise ParamsError(
        f"the scales of {int(bad.sum())} of {len(bad)} {form} blocks are below 2^-127, the lowest that a byte can "
        f"represent; first in block {at}, whose largest magnitude is {largest:.3g}: rescale the data, set such blocks "
        "to 0, or pass scales='keep' to store them anyway"
    )


def _check_scales(form: BlockFormat, shape: tuple[int, ...], rows: NDArray[np.float32], packed: Bytes) -> None:
    """Raise if a scale is infinite in float16, or if all scales of a block that is not zero are 0."""
    if not form.scale_offsets:
        _check_exponents(form, rows, packed)
        return
    words = packed.view("<u2").reshape(-1, form.block_bytes // 2)  # these formats have an even number of bytes
    sizes = np.stack([words[:, at // 2] & FLOAT16_SIZE for at in form.scale_offsets])
    highest = sizes.max(axis=0)
    if not words.size or (int(highest.max()) < FLOAT16_INF and int(highest.min()) > 0):
        return
    infinite, zero = highest >= FLOAT16_INF, highest == 0
    candidates = np.flatnonzero(zero)
    if candidates.size:
        zero[candidates] = rows.reshape(-1, form.block_size)[candidates].any(axis=1)
    bad = infinite | zero
    if not bad.any():
        return
    at = int(bad.argmax())
    index = np.unravel_index(at, (*shape[:-1], shape[-1] // form.block_size))
    first = (*(int(i) for i in index[:-1]), int(index[-1]) * form.block_size)
    largest = float(np.abs(rows.reshape(-1, form.block_size)[at]).max())
    raise ParamsError(
        f"float16 cannot represent the scales of {int(bad.sum())} of {len(words)} {form} blocks: they become "
        f"{'infinite' if infinite[at] else '0'}; first in the block at {first}, whose largest magnitude is "
        f"{largest:.3g}: rescale the data, or pass scales='keep' to store such blocks anyway"
    )
