"""Gradients of learned scales and zero points (LSQ and LSQ+) compared with the exact oracle.

Checked here: the terms g * ((q - z) - t) in range, g * (q - z) where clipped, and -s * g for the zero point
are float64 products of the forward's own numbers; they are added in the one documented order (blocks of
1024 in C order, halves folded, then the block sums); the default factor is 1 / sqrt(N * max(|qmax|, 1));
NaN adds nothing.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

import detent as dt

from . import oracle
from .exact import FLOAT64
from .grid import GRANULARITIES, Cell, Sets, cells


def _fold(values: list[float]) -> float:
    """Add the second half to the first until one value is left; the length is a power of two."""
    while len(values) > 1:
        half = len(values) // 2
        values = [a + b for a, b in zip(values[:half], values[half:], strict=True)]
    return values[0]


def _sum(terms: list[float]) -> float:
    """The contract's sum of one set's terms."""
    padded = terms + [0.0] * (-len(terms) % 1024)
    sums = [_fold(padded[i : i + 1024]) for i in range(0, len(padded), 1024)]
    size = 1
    while size < len(sums):
        size *= 2
    return _fold(sums + [0.0] * (size - len(sums)))


def _expected(cell: Cell, g: np.ndarray, grad_scale: float | None) -> tuple[list[float], list[float]]:
    """Per set, the float64 gradients of the scale and of the zero point."""
    scale_terms: list[list[float]] = [[] for _ in range(cell.sets.count)]
    zero_terms: list[list[float]] = [[] for _ in range(cell.sets.count)]
    low, high, kind = int(cell.spec.qmin), int(cell.spec.qmax), cell.spec.rounding.kind
    for (x, s, z, w), gi, owner in zip(cell.elements(), g.ravel().tolist(), cell.sets.flat, strict=True):
        if math.isnan(x):
            scale_terms[owner].append(0.0)
            zero_terms[owner].append(0.0)
            continue
        u = oracle.unclamped(x, s, z, cell.row, kind, cell.fl, w)
        steps = int(min(max(u, low), high)) - z
        inside = low <= u <= high
        t = oracle.ratio(x, s, cell.row.division, cell.fl)
        factor = FLOAT64.round(steps - Fraction(t)) if inside else float(steps)
        scale_terms[owner].append(FLOAT64.round(Fraction(gi) * Fraction(factor)))
        zero_terms[owner].append(0.0 if inside else FLOAT64.round(-Fraction(s) * Fraction(gi)))
    weight = max(abs(high), 1)
    factors = [grad_scale if grad_scale is not None else 1 / math.sqrt(len(t) * weight) for t in scale_terms]
    both = [[_sum(t) * f for t, f in zip(terms, factors, strict=True)] for terms in (scale_terms, zero_terms)]
    return both[0], both[1]


def _check(cell: Cell, grad_scale: float | None) -> None:
    g = np.random.default_rng(9).normal(size=cell.x.shape).astype(cell.x.dtype)
    gx, gs, gz = dt.fake_quantize_learned_backward(g, cell.x, cell.params, grad_scale=grad_scale, step=cell.step)
    scale, zero = (
        np.array(v).astype(cell.scale.dtype).reshape(cell.scale.shape) for v in _expected(cell, g, grad_scale)
    )
    assert gs.shape == gz.shape == cell.scale.shape
    assert np.array_equal(gs, scale)
    assert np.array_equal(gz, zero)
    assert gx.tobytes() == dt.fake_quantize_backward(g, cell.x, cell.params, step=cell.step).tobytes()


@pytest.mark.parametrize("grad_scale", [None, 1.0, 0.3], ids=["default", "one", "awkward"])
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("convention", ["onnx", "torch", "oxicuda", "baracuda_token"])
def test_gradients_of_scale_and_zero_point(convention: str, granularity: str, grad_scale: float | None) -> None:
    for fmt in ("int4", "uint8"):
        for cell in cells(convention, "half_even", granularity, fmt):
            _check(cell, grad_scale)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize("fmt", ["int4", "uint8"])
def test_gradients_in_other_dtypes(fmt: str, dtype: str) -> None:
    for cell in cells("onnx", "half_even", "group_ragged", fmt, dtype=dtype):
        _check(cell, None)


@pytest.mark.parametrize("size", [1, 1023, 1024, 1025, 3000])
def test_sums_of_long_sets_have_the_documented_order(size: int) -> None:
    rng = np.random.default_rng(size)
    x = (rng.normal(size=size) * np.exp2(rng.uniform(-20, 6, size=size))).astype(np.float32)
    x[::7] = np.nan
    sets = Sets(x.shape, dt.PerTensor(), (), ("tensor",))
    cell = Cell(
        dt.QuantSpec("int8", symmetric=False),
        oracle.ROWS["onnx"],
        sets,
        x,
        np.array(0.0123, np.float32),
        np.array(3, np.int32),
        step=0,
    )
    _check(cell, 1.0)
