"""Reductions: ranges, sums, histograms and best scales of arrays, and packing of codes, without a plan.

A reduction runs on a native kernel if there is one, else on the reference kernel; both give equal bits. Packed codes
have no gaps: element 0 is in the lowest bits of byte 0, and the last byte is padded with zeros.
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
    "best_scales",
    "checksum",
    "derive",
    "error_sum",
    "grid_errors",
    "histogram",
    "largest_error",
    "minmax",
    "observe",
    "pack_bits",
    "quantize_masked",
    "requantize",
    "scale_sums",
    "tree_sum",
    "unpack_bits",
]

Bytes = NDArray[np.uint8]
Codes = NDArray[Any]
MAX_EXACT_FLOAT32 = 1 << 24  # float32 holds every integer below this number
CHUNK = 1 << 18  # codes that are packed at a time; bounds the scratch memory


def pack_bits(codes: Codes, bits: int) -> Bytes:
    """Pack the lowest ``bits`` bits of each element of a 1-D array; elements are one- or two-byte integers."""
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
    """Unpack ``count`` codes from bytes. The result is int8 or uint8 for up to 8 bits, otherwise int16 or uint16."""
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
    """Return the min-max range of each parameter set in the compute type, and the number of non-finite elements."""
    choice = current_kernels()
    result = None if choice == "reference" else native.minmax(x, tiling)
    if result is not None:
        return result
    _refuse_if(choice == "native", f"minmax of {x.dtype} data")
    with np.errstate(all="ignore"):  # some dtypes of ml_dtypes warn about signaling NaN
        lo, hi = reference.minmax(x, tiling)
        return np.asarray(lo), np.asarray(hi), int(np.count_nonzero(~np.isfinite(x)))


def histogram(
    x: Array, tiling: Tiling, bits: int, rows: NDArray[np.int16], counts: Array, weights: Array | None = None
) -> tuple[NDArray[np.uint8], bool, tuple[Array, Array, int]]:
    """Count elements, or add up their weights, in ``counts[row, set, bin]``.

    A row is a sign and an exponent. ``rows`` maps each of the 512 rows to its index in ``counts``, or to -1 if the row
    is not stored. A bin is the leading ``bits`` bits of the mantissa. Returns a mask of the rows that occur in x but
    are not stored, whether all finite elements fit float32, and the result of ``minmax``.
    """
    choice = current_kernels()
    result = None if choice == "reference" else native.histogram(x, tiling, bits, rows, weights, counts)
    if result is not None:
        return result
    _refuse_if(choice == "native", f"a histogram of {x.dtype} data")
    with np.errstate(all="ignore"):
        return *reference.histogram(x, tiling, bits, rows, weights, counts), minmax(x, tiling)


def grid_errors(
    norm: float, code_range: tuple[float, float], levels: Array, bins: tuple[Array, ...], scale: Array, zero: Array
) -> Array:
    """Return the quantization error of each candidate: the sum over bins of the integral of ``|x - level|^norm``.

    Norms 1 and 2 have native kernels. Other norms have no native kernel, because math libraries differ in the last
    bits.
    """
    result = None
    if current_kernels() != "reference":
        result = native.grid_errors(norm, code_range, levels, bins, scale, zero)
    return reference.grid_errors(norm, code_range, levels, bins, scale, zero) if result is None else result


def best_scales(
    x: Array, tiling: Tiling, spec: QuantSpec, bounds: tuple[Array, Array], start: tuple[Array, Array], least: float
) -> tuple[Array, Array, Array]:
    """Find the scale and zero point with the least squared error for each parameter set; return them and the error.

    ``bounds`` are the smallest and the largest value of each set. ``start`` are the min-max scale and zero point of
    each set. All four arrays have the scale's shape and the compute type of x. No scale is below ``least``.
    ``reference.scale_search`` describes the search.
    """
    choice = current_kernels()
    problem = Problem("fake_quantize", tiling, native.dtype_name(x.dtype), spec, None, "propagate")
    result = None if choice == "reference" else native.best_scales(problem, x, bounds, start, least)
    if result is not None:
        return result
    _refuse_if(choice == "native", f"a scale search of {x.dtype} data with {spec}")
    return reference.best_scales(x, tiling, spec, bounds, start, least)


def error_sum(term: Term, x: Array, y: Array, factor: Factor = ONE, second_factor: Factor = ONE) -> float:
    """Return the sum of a term over all elements, in float64.

    ``term`` selects ``x``, ``x^2``, ``(x - y)^2``, ``|x - y|`` or ``x y``. Before squaring, x or the error is
    multiplied by ``factor``. In products, x is multiplied by ``factor``, and y by ``second_factor``.
    """
    choice = current_kernels()
    result = None if choice == "reference" else native.error_sum(term, x, y, factor, second_factor)
    if result is not None:
        return result
    _refuse_if(choice == "native", f"the {term} sum of {x.dtype} and {y.dtype} data")
    with np.errstate(all="ignore"):
        return float(reference.error_sum(term, x, y, factor, second_factor))


def largest_error(term: Term, x: Array, y: Array) -> float:
    """Return the largest magnitude of x if ``term`` is "value", otherwise of the error x - y.

    The result is NaN if any element is NaN, and 0 if x is empty.
    """
    choice = current_kernels()
    result = None if choice == "reference" else native.largest_error(term, x, y)
    if result is not None:
        return result
    _refuse_if(choice == "native", f"the largest error of {x.dtype} and {y.dtype} data")
    with np.errstate(all="ignore"):
        return float(reference.largest_error(term, x, y))


def tree_sum(terms: NDArray[np.float64]) -> float:
    """Return the sum of all elements in the fixed accumulation order."""
    return error_sum("value", terms, terms)


def observe(
    problem: Problem, x: Array, out: Array, *, to_codes: bool = False
) -> tuple[Array, Array, Array, Array, int] | None:
    """Fake-quantize x into ``out`` by a native kernel, with params from the range of x.

    With ``to_codes``, ``out`` receives one code per byte instead of values.

    Returns lo, hi, scale, zero point and the number of non-finite elements. Returns None if there is no native kernel,
    the scale format is not "float", or a range is invalid.
    """
    return None if current_kernels() == "reference" else native.observe(problem, x, out, to_codes=to_codes)


def derive(spec: QuantSpec, lo: Array, hi: Array, dtype: np.dtype[Any]) -> tuple[Array, Array] | None:
    """Derive scale and zero point from float64 bounds by a native kernel.

    Returns None if there is no native kernel, or if a range is invalid.
    """
    return None if current_kernels() == "reference" else native.derive(spec, lo, hi, dtype)


def checksum(x: Array) -> int:
    """Return a checksum of the bits of x; compare it only with checksums from this process."""
    result = None if current_kernels() == "reference" else native.checksum(x)
    if result is not None:
        return result
    return int.from_bytes(blake2b(np.ascontiguousarray(x).view(np.uint8).data, digest_size=8).digest())


def quantize_masked(
    problem: Problem, x: Array, scale: Array, zero_point: Array, codes: Array, mask: Array
) -> bool | None:
    """Quantize x to codes of one byte, and write the mask of ``fake_quantize_masked``, in one pass over memory.

    Returns whether x contains NaN, or None if there is no native kernel; then nothing is written.
    """
    if current_kernels() == "reference":
        return None
    return native.quantize_masked(problem, x, scale, zero_point, codes, mask)


def scale_sums(sums: Array, offset: Array, scale: Array, bias: Array | None, out: Array) -> bool:
    """Scale sums of products of codes to floats: ``out = float32(sums + offset) * scale [+ bias]``.

    Args:
        sums: int32, or float32 that holds integers; the last axis is the column.
        offset: int32, one per column; the sum with the offset is taken modulo 2^32.
        scale: float32, one per column.
        bias: float32, one per column, or None.
        out: float32, in the shape of the sums; it may share their memory.

    Returns:
        Whether all sums are exact: False if a float32 sum is 2^24 or larger and may have been rounded.

    >>> out = np.empty((1, 2), np.float32)
    >>> scale_sums(np.array([[3, -4]], np.int32), np.array([1, 0], np.int32), np.float32([0.5, 2.0]), None, out), out
    (True, array([[ 2., -8.]], dtype=float32))
    """
    exact = None if current_kernels() == "reference" else native.scale_sums(sums, offset, scale, bias, out)
    if exact is not None:
        return exact
    is_float = sums.dtype.kind == "f"
    exact = not is_float or not bool((np.abs(sums) >= MAX_EXACT_FLOAT32).any())
    limit = np.float32(2**31 - 128)  # the largest float32 below 2^31
    whole = np.clip(sums, -limit, limit).astype(np.int32) if is_float else sums
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = (whole + offset.astype(np.int32)).astype(np.float32) * scale
        np.copyto(out, scaled if bias is None else scaled + bias)
    return exact


def requantize(
    x: Array, unit: Array, cols: int, out: Array, *, scale: float, zero_point: int, qmin: int, qmax: int
) -> None:
    """Write the codes or values of fused requantization, where x is a whole number of units.

    Such an element is ``fl(sum * unit)``, where sum is ``round(fl(x * fl(1 / unit)))``. Its code is
    ``clamp(round(fl(sum * fl(unit / scale))) + zero_point)``. All other elements keep what ``out`` contains.

    Args:
        x: float32 in C order.
        unit: float32, one per channel.
        cols: number of elements of one channel before the next channel begins.
        out: in the shape of x: codes of one byte, or float32 for fake-quantized values.
        scale: scale of the codes.
        zero_point: zero point of the codes.
        qmin: smallest code.
        qmax: largest code.

    >>> x, out = np.float32([[1.5, 0.5, 0.3]]), np.zeros((1, 3), np.uint8)
    >>> requantize(x, np.float32([0.5]), 1, out, scale=0.25, zero_point=3, qmin=0, qmax=255)
    >>> out
    array([[9, 5, 0]], dtype=uint8)
    """
    with np.errstate(all="ignore"):
        inverse, multiplier = np.float32(1) / unit, unit / np.float32(scale)
    target = float(scale), float(zero_point), float(qmin), float(qmax)
    if current_kernels() != "reference" and native.requantize(x, (unit, inverse, multiplier), cols, target, out):
        return
    channels = np.arange(x.size) // cols % unit.size
    units, data, result = unit[channels], x.reshape(-1), out.reshape(-1)
    with np.errstate(all="ignore"):
        sums = np.rint(data * inverse[channels])
        codes = np.clip(np.rint(sums * multiplier[channels]) + np.float32(zero_point), qmin, qmax)
        chosen = sums * units == data
    if out.dtype.kind == "f":
        codes = (codes - np.float32(zero_point)) * np.float32(scale)
    result[chosen] = codes[chosen].astype(out.dtype)


def _refuse_if(refused: bool, what: str) -> None:
    if refused:
        raise UnsupportedError(f"{what} has no native kernel: use_kernels('auto') runs the reference kernel instead")
