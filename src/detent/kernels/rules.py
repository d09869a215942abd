"""Rules: a problem in the numbers that the native extension takes, field by field as in ``native/.../call.hpp``."""

from collections.abc import Mapping
from math import frexp, prod
from types import MappingProxyType
from typing import Any

from detent.formats import BYTE, Format
from detent.granularity import Tiling
from detent.kernels.problem import Problem
from detent.kernels.reference.elements import boundaries
from detent.spec import QuantSpec
from detent.ste import Clipped, HardTanh

__all__ = ["DTYPES", "ROUNDINGS", "TERMS", "layout_of", "plain_rules", "problem_rules", "scale_rules"]

DTYPES: Mapping[str, int] = MappingProxyType({"float16": 0, "bfloat16": 1, "float32": 2, "float64": 3})
ROUNDINGS: Mapping[str, int] = MappingProxyType({"half_even": 0, "half_away": 1, "floor": 2})
TERMS: Mapping[str, int] = MappingProxyType(
    {"value": 0, "square": 1, "squared_error": 2, "absolute_error": 3, "product": 4}
)
BYTES, WORDS, PACKED = range(3)
_INTEGERS, _SMALL_FLOATS, _CODEBOOK = range(3)
_IDENTITY, _BY_CODE, _BY_VALUE, _HARD_TANH = range(4)
_SYMMETRIC = {"qmax": 1, "half_span": 2, "tight": 3}
_ZERO_RANGES = {"unit": 0, "unit_at_qmin": 1, "eps": 2, "width": 3, "error": 4}
_NONE: Mapping[str, Any] = MappingProxyType(
    dict.fromkeys(
        (
            *("division", "zero_point", "rounding", "fill", "mask", "grad", "find_nan", "exclusive", "is_signed"),
            *("no_zero", "codes", "kind", "mantissa", "min_exponent", "symmetric", "zero_range", "include_zero"),
            "half_away",
        ),
        0,
    )
    | dict.fromkeys(("qmin", "qmax", "largest", "floor", "symmetric_zero_point"), 0.0)
    | {"bits": BYTE, "levels": [], "bounds": []}
)


def plain_rules(dtype: str) -> dict[str, Any]:
    """The rules of an operation that knows no format.

    >>> plain_rules("float64")["dtype"]
    3
    """
    return {**_NONE, "dtype": DTYPES[dtype]}


def problem_rules(problem: Problem, codes: int = BYTES) -> dict[str, Any]:
    """The rules of a problem, with codes as bytes, words or packed bits.

    >>> from detent.granularity import PerTensor
    >>> problem = Problem("quantize", PerTensor().tiling((4,)), "float32", QuantSpec("int4"), None, "qmin")
    >>> problem_rules(problem)["fill"], problem_rules(problem)["qmin"]
    (2, -7.0)
    """
    spec, ste, form = problem.spec, problem.ste, problem.spec.format
    mask = _IDENTITY
    if isinstance(ste, Clipped):
        mask = _BY_VALUE if ste.on == "value" and form.is_integer else _BY_CODE
    elif isinstance(ste, HardTanh):
        mask = _HARD_TANH
    return {
        **plain_rules(problem.dtype),
        **_format_rules(form, "float64" if problem.dtype == "float64" else "float32"),
        "division": int(spec.convention.division == "reciprocal" and form.is_integer),
        "zero_point": int(spec.convention.zero_point == "before_round"),
        "rounding": ROUNDINGS.get(spec.rounding.kind, 0),
        "fill": {"zero_point": 1, "qmin": 2}.get(problem.nan, 0),
        "mask": mask,
        "grad": int(problem.operation == "quantize_backward"),
        "find_nan": int(problem.nan == "raise"),
        "exclusive": int(isinstance(ste, Clipped) and ste.bounds == "exclusive"),
        "is_signed": int(form.is_integer and form.signed),
        "no_zero": int(spec.symmetric and spec.symmetric_zero_point == 0),
        "bits": spec.bits,
        "codes": codes,
        "qmin": float(spec.qmin),
        "qmax": float(spec.qmax),
    }


def _format_rules(form: Format, compute: str) -> dict[str, Any]:
    if form.is_integer:
        return {"kind": _INTEGERS}
    rules: dict[str, Any] = {"levels": list(form.levels), "largest": form.finite_levels[-1]}
    if form.kind == "codebook":
        return {**rules, "kind": _CODEBOOK, "bounds": list(boundaries(form, compute))}
    smallest_normal = form.magnitudes[1 << form.mantissa]
    return {**rules, "kind": _SMALL_FLOATS, "mantissa": form.mantissa, "min_exponent": frexp(smallest_normal)[1] - 1}


def scale_rules(spec: QuantSpec) -> dict[str, Any]:
    """From a range to parameters; for scales that are plain floats.

    >>> scale_rules(QuantSpec("uint8"))["symmetric"]
    0
    """
    convention = spec.convention
    return {
        "symmetric": _SYMMETRIC[convention.symmetric_scale] if spec.symmetric else 0,
        "zero_range": _ZERO_RANGES[convention.zero_range.kind],
        "floor": convention.zero_range.value,
        "symmetric_zero_point": float(spec.symmetric_zero_point if spec.symmetric else 0),
        "include_zero": int(convention.include_zero),
        "half_away": int(convention.rounding.kind == "half_away"),
        "qmin": float(spec.qmin),
        "qmax": float(spec.qmax),
    }


def layout_of(tiling: Tiling) -> tuple[int, int, list[tuple[int, int, int]], int]:
    """Columns, their block, every other axis as (size, block, stride in sets), and the number of sets.

    >>> from detent.granularity import PerAxis
    >>> layout_of(PerAxis(0).tiling((2, 3, 4)))
    (12, 12, [(2, 1, 1)], 2)
    """
    few = tiling.merged()
    cols, block = (few.shape[-1], few.block[-1]) if few.shape else (1, 1)
    lead = [
        (size, block, prod(few.grid[axis + 1 :]))
        for axis, (size, block) in enumerate(zip(few.shape[:-1], few.block[:-1], strict=True))
    ]
    return cols, min(block, max(cols, 1)), lead, few.sets
