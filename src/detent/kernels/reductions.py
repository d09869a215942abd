"""Reductions: bounds, sums and histograms of arrays, and codes packed into bytes, where no plan is needed.

They run on native kernels where these exist and on the reference elsewhere, with the same bits. Packed codes of few
bits lie side by side, element 0 in the lowest bits of byte 0; the last byte is padded with zeros.
"""

from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detent.errors import UnsupportedError
from detent.formats import BYTE, MAX_BITS
from detent.granularity import Tiling
from detent.kernels import native, reference
from detent.kernels.problem import Problem
from detent.kernels.reference import ONE, Factor, Term
from detent.kernels.settings import current_kernels
from detent.spec import QuantSpec

__all__ = [
    "checksum",
    "derive",
    "error_sum",
    "grid_errors",
    "histogram",
    "largest_error",
    "minmax",
    "observe",
    "pack_bits",
    "tree_sum",
    "unpack_bits",
]

Bytes = NDArray[np.uint8]
Codes = NDArray[Any]
CHUNK = 1 << 18  # codes at a time, which bounds the scratch memory


def pack_bits(codes: Codes, bits: int) -> Bytes:
    """The low ``bits`` of each of a 1-D array of one- or two-byte integers."""
    if codes.dtype.itemsize == 1 and current_kernels() != "reference":
        packed = native.pack(codes, bits)
        if packed is not None:
            return packed
    if bits in {BYTE, MAX_BITS}:
        return codes.astype("<u2" if bits == MAX_BITS else np.uint8).view(np.uint8)
    words: NDArray[np.uint16] = codes.astype(np.uint16) & np.uint16((1 << bits) - 1)
    parts = [_pack_part(words[start : start + CHUNK], bits) for start in range(0, words.size, CHUNK)]
    return np.concatenate(parts) if parts else np.zeros(0, np.uint8)


def _pack_part(words: NDArray[np.uint16], bits: int) -> Bytes:
    planes = (words[:, None] >> np.arange(bits, dtype=np.uint16)) & 1
    return np.packbits(planes.astype(np.uint8).reshape(-1), bitorder="little")


def unpack_bits(packed: Bytes, bits: int, count: int, *, signed: bool) -> Codes:
    """The ``count`` codes of a byte string of the right size: int8 or uint8 up to 8 bits, int16 or uint16 above."""
    if bits <= BYTE and current_kernels() != "reference":
        result = native.unpack(packed, bits, count, signed=signed)
        if result is not None:
            return result
    starts = range(0, count, CHUNK)
    parts = [_unpack_part(packed[start * bits // BYTE :], min(CHUNK, count - start), bits) for start in starts]
    codes = (np.concatenate(parts) if parts else np.zeros(0, np.uint16)).astype(np.int32)
    if signed:
        codes -= (codes >> (bits - 1)) << bits
    return codes.astype(f"{'' if signed else 'u'}int{BYTE if bits <= BYTE else MAX_BITS}")


def _unpack_part(data: Bytes, count: int, bits: int) -> NDArray[np.uint16]:
    planes = np.unpackbits(data[: -(-count * bits // BYTE)], bitorder="little", count=count * bits)
    return planes.reshape(count, bits) @ (1 << np.arange(bits, dtype=np.uint16))


Array = NDArray[Any]


def minmax(x: Array, tiling: Tiling) -> tuple[Array, Array, int]:
    """The smallest and largest finite element of each set in the compute type, and how many elements are not finite."""
    choice = current_kernels()
    result = None if choice == "reference" else native.minmax(x, tiling)
    if result is not None:
        return result
    _refuse_if(choice == "native", f"minmax of {x.dtype} data")
    with np.errstate(all="ignore"):  # some small floats warn of signalling NaN
        lo, hi = reference.minmax(x, tiling)
        return np.asarray(lo), np.asarray(hi), int(np.count_nonzero(~np.isfinite(x)))


def histogram(
    x: Array, tiling: Tiling, bits: int, rows: NDArray[np.int16], counts: Array, weights: Array | None = None
) -> tuple[NDArray[np.uint8], bool, tuple[Array, Array, int]]:
    """Add to ``counts[row, set, bin]`` the elements, or their weights, whose row is known.

    A row is a sign and an exponent, ``rows`` gives the place of each of the 512 or -1, a bin is the leading ``bits`` of
    the mantissa. Returns which of the other rows occur, whether all finite elements are in the range of a float32, and
    what ``minmax`` returns.
    """
    choice = current_kernels()
    result = None if choice == "reference" else native.histogram(x, tiling, bits, rows, weights, counts)
    if result is not None:
        return result
    _refuse_if(choice == "native", f"a histogram of {x.dtype} data")
    with np.errstate(all="ignore"):
        return *reference.histogram(x, tiling, bits, rows, weights, counts), minmax(x, tiling)


def grid_errors(
    norm: float, ends: tuple[float, float], levels: Array, bins: tuple[Array, ...], scale: Array, zero: Array
) -> Array:
    """The sum over bins of the integral of ``|x - nearest level|^norm``, for each set and candidate.

    Native for the norms 1 and 2; others differ in the last places between libraries of mathematics.
    """
    result = None
    if current_kernels() != "reference":
        result = native.grid_errors(norm, ends, levels, bins, scale, zero)
    return reference.grid_errors(norm, ends, levels, bins, scale, zero) if result is None else result


def error_sum(term: Term, x: Array, y: Array, factor: Factor = ONE, second_factor: Factor = ONE) -> float:
    """The sum of ``x``, ``x^2``, ``(x - y)^2``, ``|x - y|`` or ``x y`` over all elements, in float64.

    Squares and products are of values times their factor: of x or the error, and of y.
    """
    choice = current_kernels()
    result = None if choice == "reference" else native.error_sum(term, x, y, factor, second_factor)
    if result is not None:
        return result
    _refuse_if(choice == "native", f"the {term} sum of {x.dtype} and {y.dtype} data")
    with np.errstate(all="ignore"):
        return float(reference.error_sum(term, x, y, factor, second_factor))


def largest_error(term: Term, x: Array, y: Array) -> float:
    """The largest magnitude of x ("value") or of the error; NaN if there is any, 0 for empty data."""
    choice = current_kernels()
    result = None if choice == "reference" else native.largest_error(term, x, y)
    if result is not None:
        return result
    _refuse_if(choice == "native", f"the largest error of {x.dtype} and {y.dtype} data")
    with np.errstate(all="ignore"):
        return float(reference.largest_error(term, x, y))


def tree_sum(terms: NDArray[np.float64]) -> float:
    """The sum of all elements in the contract's order."""
    return error_sum("value", terms, terms)


def observe(problem: Problem, x: Array, out: Array) -> tuple[Array, Array, Array, Array, int] | None:
    """Fake quantize x into ``out`` by its own range: lo, hi, scale, zero point, and how many elements are not finite.

    None where only the steps one by one can do it: on the reference kernels, for scales of a special format, and where
    a range gives no parameters.
    """
    return None if current_kernels() == "reference" else native.observe(problem, x, out)


def derive(spec: QuantSpec, lo: Array, hi: Array, dtype: np.dtype[Any]) -> tuple[Array, Array] | None:
    """Scale and zero point of each range of float64 bounds by a native kernel; None if there is none for them."""
    return None if current_kernels() == "reference" else native.derive(spec, lo, hi, dtype)


def checksum(x: Array) -> int:
    """A number that changes if any bit of x changes; comparable only in this process."""
    result = None if current_kernels() == "reference" else native.checksum(x)
    if result is not None:
        return result
    return int.from_bytes(blake2b(np.ascontiguousarray(x).view(np.uint8).data, digest_size=8).digest())


def _refuse_if(refused: bool, what: str) -> None:
    if refused:
        raise UnsupportedError(f"{what} has no native kernel: use_kernels('auto') runs the reference")
