"""Searches for scales: the arithmetic that the block formats of GGUF have in common.

All functions work on many blocks at once. Arrays have one row per element of a block and one column per block, so every
operation is elementwise, and sums run over the rows in order. The arithmetic is that of ggml: float32, one rounding per
operation, no fused multiply-add. Sums begin with +0.0.

============ =========================================================================================
``affine``   scale and minimum with the least weighted error: ``x ~ scale * code + min``, ``min <= 0``
``signed``   signed scale with the least weighted error: ``x ~ scale * code``
``refined``  signed scale, improved one code at a time
``positive`` scale of numbers that are mostly positive, such as scales, improved one code at a time
============ =========================================================================================
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Affine", "affine", "extremes", "first_largest", "nearest", "ordered_sum", "positive", "refined", "signed"]

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]
F32 = np.float32
MAGIC = F32(12582912.0)  # 1.5 * 2^23: adding it rounds to an integer, which is then in the mantissa
NEGLIGIBLE = F32(1e-15)  # blocks of smaller numbers are stored as zeros
ROUNDS = 5  # of improving one code at a time


def nearest(x: Floats) -> Ints:
    """Round to the nearest integer, ties to even; meaningful for magnitudes below 2^22."""
    bits = (x + MAGIC).view(np.int32)
    return (bits & 0x007FFFFF) - 0x00400000


def ordered_sum(terms: Floats) -> Floats:
    """Add the rows in order."""
    total = np.zeros(terms.shape[1:], np.float32)
    for row in terms:
        total += row
    return total


def extremes(x: Floats) -> tuple[Floats, Floats]:
    """Return the smallest and the largest element of each block; of equals, such as -0.0 and +0.0, the first."""
    low, high = (np.take_along_axis(x, at[None], axis=0)[0] for at in (x.argmin(axis=0), x.argmax(axis=0)))
    return low, high


def first_largest(x: Floats) -> Floats:
    """Return the element of largest magnitude with its sign; of equals, the first. If all are zero, it is +0.0."""
    at = np.abs(x).argmax(axis=0)
    largest: Floats = np.take_along_axis(x, at[None], axis=0)[0] + F32(0)
    return largest


class Affine(NamedTuple):
    """Result of ``affine``; ``least`` is the negated minimum, which is not negative."""

    scale: Floats
    least: Floats
    codes: Ints


def affine(
    x: Floats,
    weights: Floats,
    top: int,
    *,
    first: float,
    step: float,
    count: int,
    absolute: bool = False,
    narrow: bool = False,
) -> Affine:
    """Search the scale and minimum with the least weighted error, for codes from 0 to ``top``.

    After the min-max scale, ``count + 1`` candidates are tried: codes for the inverse scale ``(top + first + i * step)
    / range``, with the scale and minimum that fit them best. ``absolute`` measures absolute errors instead of squared
    ones. ``narrow`` treats blocks as constant where the maximum is at most the minimum, not only where they are equal.
    """
    low, high = extremes(x)
    low = np.where(low > 0, F32(0), low)
    weight_sum, x_sum = ordered_sum(weights), ordered_sum(weights * x)
    constant = high <= low if narrow else high == low

    def error_of(scale: Floats, minimum: Floats, codes: Ints) -> Floats:
        distance = scale * codes.astype(np.float32) + minimum - x
        return ordered_sum(weights * (np.abs(distance) if absolute else distance * distance))

    inverse = F32(top) / (high - low)
    scale: Floats = F32(1) / inverse
    minimum: Floats = low.copy()
    best_codes = np.clip(nearest(inverse * (x - minimum)), 0, top)
    best_error = error_of(scale, minimum, best_codes)
    for i in range(count + 1):
        inverse = (F32(first) + F32(step) * F32(i) + F32(top)) / (high - minimum)
        codes = np.clip(nearest(inverse * (x - minimum)), 0, top)
        values = codes.astype(np.float32)
        weighted = weights * values
        code_sum, square_sum, product_sum = (ordered_sum(each) for each in (weighted, weighted * values, weighted * x))
        determinant = weight_sum * square_sum - code_sum * code_sum
        fitted: Floats = np.divide(weight_sum * product_sum - x_sum * code_sum, determinant)
        offset: Floats = np.divide(square_sum * x_sum - code_sum * product_sum, determinant)
        above = offset > 0
        fitted = np.where(above, product_sum / square_sum, fitted)
        offset = np.where(above, F32(0), offset)
        error = error_of(fitted, offset, codes)
        better = (determinant > 0) & (error < best_error)
        best_error = np.where(better, error, best_error)
        scale, minimum = np.where(better, fitted, scale), np.where(better, offset, minimum)
        best_codes = np.where(better, codes, best_codes)
    return Affine(
        np.where(constant, F32(0), scale),
        -np.where(constant, low, minimum),
        np.where(constant, 0, best_codes),
    )


def signed(x: Floats, weights: Floats, top: int) -> tuple[Floats, Ints]:
    """Search the signed scale with the least weighted error; codes are -top to top - 1, returned plus ``top``.

    The element of largest magnitude gets the code -top, which is why the scale may be negative.
    """
    largest = first_largest(x)

    def sums(inverse: Floats) -> tuple[Ints, Floats, Floats]:
        codes = np.clip(nearest(inverse * x), -top, top - 1)
        values = codes.astype(np.float32)
        return codes, ordered_sum(weights * x * values), ordered_sum(weights * values * values)

    best_codes, product_sum, square_sum = sums(F32(-top) / largest)
    scale = np.where(square_sum != 0, product_sum / square_sum, F32(0))
    best = scale * product_sum
    for i in (*range(-9, 0), *range(1, 10)):
        codes, product_sum, square_sum = sums(-(F32(top) + F32(0.1) * F32(i)) / largest)
        better = (square_sum > 0) & (product_sum * product_sum > best * square_sum)
        best_codes = np.where(better, codes, best_codes)
        scale = np.where(better, product_sum / square_sum, scale)
        best = np.where(better, scale * product_sum, best)
    tiny = np.abs(largest) < NEGLIGIBLE
    return np.where(tiny, F32(0), scale), np.where(tiny, 0, best_codes + top)


def refined(x: Floats, top: int) -> tuple[Floats, Ints]:
    """Find the signed scale with the least error, weighted by ``x * x``; codes are returned plus ``top``.

    Starts with the element of largest magnitude at -top; then each code in turn may change if that helps.
    """
    largest = first_largest(x)
    codes = np.clip(nearest(F32(-top) / largest * x), -top, top - 1)
    weights, values = x * x, codes.astype(np.float32)
    product_sum, square_sum = ordered_sum(weights * x * values), ordered_sum(weights * values * values)
    going = np.ones(product_sum.shape, bool)
    for _ in range(ROUNDS):
        changed = np.zeros_like(going)
        for i, (number, weight) in enumerate(zip(x, weights, strict=True)):
            value = values[i]
            products, squares = product_sum - weight * number * value, square_sum - weight * value * value
            code = np.clip(nearest(number * squares / products), -top, top - 1).astype(np.float32)
            moved = going & (products > 0) & (code != value)
            products, squares = products + weight * number * code, squares + weight * code * code
            moved &= (squares > 0) & (products * products * square_sum > product_sum * product_sum * squares)
            values[i] = np.where(moved, code, value)
            product_sum, square_sum = np.where(moved, products, product_sum), np.where(moved, squares, square_sum)
            changed |= moved
        going &= changed
        if not going.any():
            break
    scale = np.where(square_sum > 0, product_sum / square_sum, F32(0))
    tiny = np.abs(largest) < NEGLIGIBLE
    return np.where(tiny, F32(0), scale), np.where(tiny, 0, values.astype(np.int32) + top)


def positive(x: Floats, weights: Floats, top: int) -> tuple[Floats, NDArray[np.uint8]]:
    """Quantize numbers to codes from 0 to ``top``; return the scale and the codes.

    Nine scales near the min-max scale are tried; then each code in turn may change if that helps. Codes are bytes, so a
    negative number, which is rare, wraps around as in ggml.
    """
    high = np.maximum(x.max(axis=0), F32(0))
    best_inverse = F32(top) / high
    scale = F32(1) / best_inverse
    distance = x - scale * nearest(best_inverse * x).astype(np.uint8).astype(np.float32)
    least = ordered_sum(weights * distance * distance)
    for i in (*range(-4, 0), *range(1, 5)):
        inverse = (F32(0.1) * F32(i) + F32(top)) / high
        codes = np.minimum(nearest(inverse * x), top)
        distance = x - F32(1) / inverse * codes.astype(np.float32)
        error = ordered_sum(weights * distance * distance)
        better = error < least
        least, best_inverse = np.where(better, error, least), np.where(better, inverse, best_inverse)
    signed_codes = np.minimum(nearest(best_inverse * x), top)
    factors = signed_codes.astype(np.float32)
    product_sum, square_sum = ordered_sum(weights * x * factors), ordered_sum(weights * factors * factors)
    values = signed_codes.astype(np.uint8).astype(np.float32)
    going = np.ones(high.shape, bool)
    for _ in range(ROUNDS):
        changed = np.zeros_like(going)
        for i, (number, weight) in enumerate(zip(x, weights, strict=True)):
            value = values[i]
            products, squares = product_sum - weight * number * value, square_sum - weight * value * value
            moved = going & (products > 0) & (squares > 0)
            whole = np.minimum(nearest(number * squares / products), top)
            code = whole.astype(np.float32)
            moved &= code != value
            products, squares = products + weight * number * code, squares + weight * code * code
            moved &= products * products * square_sum > product_sum * product_sum * squares
            values[i] = np.where(moved, whole.astype(np.uint8).astype(np.float32), value)
            product_sum, square_sum = np.where(moved, products, product_sum), np.where(moved, squares, square_sum)
            changed |= moved
        going &= changed
        if not going.any():
            break
    tiny = high < NEGLIGIBLE
    scale = np.where((square_sum > 0) & ~tiny, product_sum / square_sum, F32(0))
    return scale, np.where(tiny, np.uint8(0), values.astype(np.uint8))
