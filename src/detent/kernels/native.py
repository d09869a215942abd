"""The native backend: C++ kernels in the extension module ``detent._native``, compiled once per instruction set.

A ``Runner`` of the extension module contains the kernels for one tiling and one dict of rules. Rules are numbers, named
like the fields in ``native/.../call.hpp``. This module computes rules and layout once and caches runners, so a call
only passes pointers. Arrays that are not C-contiguous are copied first. Results equal the results of the reference
kernels bit for bit. Functions that reduce or pack return None if there is no native kernel for their arguments.
"""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from functools import lru_cache
from importlib import import_module
from math import frexp, prod
from types import MappingProxyType, ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detent.checks import FLOATS, compute_dtype
from detent.formats import BYTE, Format
from detent.granularity import Tiling
from detent.kernels.problem import OPERATIONS, Problem
from detent.kernels.reference import Factor, Term
from detent.kernels.reference.bins import whole_cells
from detent.kernels.reference.elements import boundaries
from detent.kernels.reference.scale_search import COARSE, FACTORS, PER_OCTAVE
from detent.spec import QuantSpec
from detent.ste import Clipped, HardTanh, Identity

__all__ = ["dtype_name", "join_team", "layer_step"]

DTYPES: Mapping[str, int] = MappingProxyType({name: number for number, name in enumerate(FLOATS)})
ROUNDINGS: Mapping[str, int] = MappingProxyType({"half_even": 0, "half_away": 1, "floor": 2})
TERMS: Mapping[str, int] = MappingProxyType(
    {"value": 0, "square": 1, "squared_error": 2, "absolute_error": 3, "product": 4}
)
BYTES, WORDS, PACKED = range(3)
_INTEGERS, _FLOAT_FORMATS, _CODEBOOK = range(3)
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
    | {"levels": [], "bounds": []}
)


def plain_rules(dtype: str, bits: int = BYTE) -> dict[str, Any]:
    """Return the rules of an operation that needs no format. In a histogram, a bin has ``bits`` mantissa bits."""
    return {**_NONE, "dtype": DTYPES[dtype], "bits": bits}


def problem_rules(problem: Problem, codes: int = BYTES) -> dict[str, Any]:
    """Return the rules of a problem; ``codes`` says how codes are stored: bytes, 16-bit words or packed bits."""
    spec, ste, form = problem.spec, problem.ste, problem.spec.format
    mask = _IDENTITY
    if isinstance(ste, Clipped):
        mask = _BY_VALUE if ste.on == "value" and form.is_integer else _BY_CODE
    elif isinstance(ste, HardTanh):
        mask = _HARD_TANH
    return {
        **plain_rules(problem.dtype),
        **_format_rules(form, compute_dtype(FLOATS[problem.dtype]).name),
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
    return {**rules, "kind": _FLOAT_FORMATS, "mantissa": form.mantissa, "min_exponent": frexp(smallest_normal)[1] - 1}


def derive_rules(dtype: str, spec: QuantSpec) -> dict[str, Any]:
    return plain_rules(dtype) | _scale_rules(spec)


def observe_rules(problem: Problem) -> dict[str, Any]:
    return problem_rules(problem) | _scale_rules(problem.spec)


def _scale_rules(spec: QuantSpec) -> dict[str, Any]:
    """Return the rules for deriving parameters with float scales from a range."""
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
    """Return size and block of the last axis, a list of the axes before it, and the number of parameter sets.

    Adjacent axes are merged first. Each axis in the list is a tuple (size, block, stride). The stride is
    the number of parameter sets from one block to the next.
    """
    merged = tiling.merged()
    cols, block = (merged.shape[-1], merged.block[-1]) if merged.shape else (1, 1)
    lead = [
        (size, block, prod(merged.grid[axis + 1 :]))
        for axis, (size, block) in enumerate(zip(merged.shape[:-1], merged.block[:-1], strict=True))
    ]
    return cols, min(block, max(cols, 1)), lead, merged.sets


_native: ModuleType | None
try:
    _native = import_module("detent._native")  # exists if there was a compiler at installation
except ImportError as error:  # only the reference kernels are available
    _native = None
    WHY_NOT: str | None = f"the native kernels are not built ({error}): install detent with a C++ compiler on PATH"
else:
    WHY_NOT = None

Array = NDArray[Any]
MAX_RUNNERS = 4096  # size of the cache
MAX_LEAD = 8  # largest number of axes, equal to kMaxLead in layout.hpp
MAX_LEVELS = 16  # largest number of codebook levels, the size of an array in codec.hpp
BLOCK_TYPES = frozenset({2, 3, 6, 7, 8, 10, 11, 12, 13, 14, 20, 23, 39})  # the block formats in blocks.hpp
MAX_SIZE = 1 << 57  # number of elements whose bits can still be counted in int64


def levels() -> dict[str, bool]:
    """Return, for each compiled instruction set, whether this CPU supports it; the last supported one is used."""
    return {} if _native is None else dict(_native.levels())


class _Level:
    index = 0 if _native is None else _native.best_level()


def set_level(name: str) -> None:
    """Set the instruction set of kernels that are made later; only tests need this, because results stay equal."""
    _Level.index = list(levels()).index(name)


def current_level() -> str:
    """Return the instruction set of new kernels; "none" if there are no native kernels."""
    return list(levels())[_Level.index] if levels() else "none"


def set_num_threads(count: int) -> None:
    if _native is not None:
        _native.set_num_threads(count)


def join_team(address: int, size: int = 0) -> None:
    """Run kernels on the threads of an OpenMP runtime, or switch back to the kernels' own threads.

    ``address`` is the address of the runtime's function ``GOMP_parallel``; 0 means the kernels' own threads. ``size``
    is the address of the runtime's function ``omp_get_max_threads``, which limits the number of threads; 0 means no
    limit.
    """
    if _native is not None:
        _native.join_team(address, size)


def refusal(problem: Problem) -> str | None:
    """Return the reason why there is no native kernel for the problem, or None if there is a native kernel."""
    if WHY_NOT is not None:
        return WHY_NOT
    if OPERATIONS[problem.operation].needs_format:
        if problem.spec.format.kind == "codebook" and len(problem.spec.format.levels) > MAX_LEVELS:
            return f"a codebook of more than {MAX_LEVELS} levels has no native kernel"
        if _rounds(problem) and problem.spec.rounding.kind not in ROUNDINGS:
            return f"{problem.spec.rounding.kind} rounding has no native kernel"
        if problem.ste is not None and not isinstance(problem.ste, Identity | Clipped | HardTanh):
            return f"{type(problem.ste).__name__} has no native kernel"
    if not _fits(problem.tiling):
        return f"an array of shape {problem.tiling.shape} has too many axes or elements for the native kernels"
    return None


def _rounds(problem: Problem) -> bool:
    """Return whether the operation rounds x to integer codes; dequantization and some gradients do not."""
    if not problem.spec.format.is_integer or problem.operation == "dequantize":
        return False
    if problem.operation in {"fake_quantize_backward", "quantize_backward"}:
        return isinstance(problem.ste, Clipped) and problem.ste.on == "code"
    return True


@lru_cache(maxsize=1024)
def _fits(tiling: Tiling) -> bool:
    return len(tiling.merged().shape) <= MAX_LEAD and prod(tiling.shape) < MAX_SIZE


def make_runner(problem: Problem, codes: int) -> Any:
    """Make the runner for a problem; ``codes`` says how codes are stored: bytes, 16-bit words or packed bits."""
    return _runner(_Level.index, problem.tiling, problem_rules, problem, codes)


@lru_cache(maxsize=MAX_RUNNERS)
def _runner(level: int, tiling: Tiling, rules: Callable[..., dict[str, Any]], *arguments: Hashable) -> Any:
    """Make the runner for an instruction set, a tiling and the rules ``rules(*arguments)``."""
    make = _native.Runner  # type: ignore[union-attr]  # callers exclude a missing extension
    return make(level, *layout_of(tiling), rules(*arguments))


def ready(array: Array) -> Array:
    """Convert an array for the extension module: C-contiguous, aligned, and of a built-in dtype."""
    plain = array if is_ready(array) else np.array(array, order="C")
    return plain if plain.dtype.isbuiltin == 1 else plain.view(f"u{plain.dtype.itemsize}")  # a dtype of ml_dtypes


def is_ready(array: Array) -> bool:
    """Return whether the extension module can use the array without a copy: C-contiguous and aligned."""
    flags = array.flags
    return bool(flags.c_contiguous and flags.aligned)


def minmax(x: Array, tiling: Tiling) -> tuple[Array, Array, int] | None:
    """Return the min-max range of each parameter set's finite elements, and the number of non-finite elements."""
    name = dtype_name(x.dtype)
    if _native is None or name not in DTYPES or not _fits(tiling):
        return None
    low, high = _empty_bounds(tiling, x.dtype)
    nonfinite = _runner(_Level.index, tiling, plain_rules, name).minmax(ready(x), low, high)
    low += 0.0  # turns -0.0 into +0.0
    high += 0.0
    return low, high, int(nonfinite)


@lru_cache(maxsize=64)
def dtype_name(dtype: np.dtype[Any]) -> str:
    """Return the name of a dtype; cached, because NumPy builds it slowly."""
    return dtype.name


def _empty_bounds(tiling: Tiling, dtype: np.dtype[Any]) -> tuple[Array, Array]:
    compute = compute_dtype(dtype)
    return np.full(tiling.scale_shape, np.inf, compute), np.full(tiling.scale_shape, -np.inf, compute)


def histogram(
    x: Array, tiling: Tiling, bits: int, rows: NDArray[np.int16], weights: NDArray[np.int64] | None, counts: Array
) -> tuple[NDArray[np.uint8], bool, tuple[Array, Array, int]] | None:
    """Return the result of the reference kernels' ``histogram``, and the result of ``minmax``."""
    name = dtype_name(x.dtype)
    if _native is None or name not in DTYPES or not _fits(tiling) or not (is_ready(counts) and is_ready(rows)):
        return None
    low, high = _empty_bounds(tiling, x.dtype)
    missed = np.zeros(rows.size, np.uint8)
    runner = _runner(_Level.index, tiling, plain_rules, name, bits)
    ready_weights = np.empty(0, np.int64) if weights is None else ready(weights)
    nonfinite, good = runner.histogram(ready(x), ready_weights, rows, len(counts), counts, missed, low, high)
    low += 0.0
    high += 0.0
    return missed, bool(good), (low, high, int(nonfinite))


def grid_errors(
    norm: float, code_range: tuple[float, float], levels: Array, bins: tuple[Array, ...], scale: Array, zero: Array
) -> Array | None:
    if _native is None or norm not in {1, 2}:
        return None
    errors = np.empty(scale.shape)
    middles = (levels[1:] + levels[:-1]) / 2
    arrays = (*bins, scale, zero, levels, middles, whole_cells(levels, norm), errors)
    _native.grid_errors(_Level.index, int(norm), *code_range, *(ready(array) for array in arrays))
    return errors


def derive(spec: QuantSpec, lo: Array, hi: Array, dtype: np.dtype[Any]) -> tuple[Array, Array] | None:
    """Derive scale and zero point, both in ``dtype``, for each range.

    Returns None if a range is invalid, or if there is no native kernel.
    """
    if _native is None or spec.scale_format != "float":
        return None
    scale, zero_point = np.empty(lo.shape, dtype), np.empty(lo.shape, dtype)
    tiling = Tiling((lo.size,), (1,), (lo.size,), (lo.size,))
    runner = _runner(_Level.index, tiling, derive_rules, dtype_name(dtype), spec)
    return (scale, zero_point) if runner.derive(ready(lo), ready(hi), scale, zero_point) else None


def observe(
    problem: Problem, x: Array, out: Array, *, to_codes: bool = False
) -> tuple[Array, Array, Array, Array, int] | None:
    """Fake-quantize x into ``out``, with params from the range of x; ``to_codes`` writes codes instead.

    Returns lo, hi, scale, zero point and the number of non-finite elements, or None if the range of a parameter set is
    invalid, or if there is no native kernel.
    """
    if refusal(problem) is not None or problem.spec.scale_format != "float" or not is_ready(out):
        return None
    parts = np.empty((4, *problem.tiling.scale_shape), compute_dtype(x.dtype))
    low, high, scale, zero_point = (parts[i, ...] for i in range(4))
    runner = _runner(_Level.index, problem.tiling, observe_rules, problem)
    nonfinite, good = runner.observe(ready(x), low, high, scale, zero_point, ready(out), to_codes)
    low += 0.0  # turns -0.0 into +0.0
    high += 0.0
    parts.setflags(write=False)
    return (low, high, scale, zero_point, int(nonfinite)) if good else None


def best_scales(
    problem: Problem, x: Array, bounds: tuple[Array, Array], start: tuple[Array, Array], least: float
) -> tuple[Array, Array, Array] | None:
    if refusal(problem) is not None or problem.dtype not in DTYPES:
        return None
    best_scale, best_zero = (np.empty(each.shape, each.dtype) for each in start)
    errors = np.zeros(best_scale.shape)
    exponents_only = problem.spec.scale_format == "e8m0"
    runner = _runner(_Level.index, problem.tiling, observe_rules, problem)
    starts = (ready(each) for each in (*bounds, *start))
    grid = FACTORS, PER_OCTAVE if exponents_only else COARSE, not exponents_only, least
    runner.best_scales(ready(x), *starts, *grid, best_scale, best_zero, errors)
    return best_scale, best_zero, errors


def error_sum(term: Term, x: Array, y: Array, factor: Factor, second_factor: Factor) -> float | None:
    if _native is None or x.dtype.name not in DTYPES or y.dtype.name not in DTYPES:
        return None
    pair = (ready(x), DTYPES[x.dtype.name], ready(y), DTYPES[y.dtype.name])
    return float(_native.error_sum(_Level.index, TERMS[term], x.size, *pair, factor, second_factor))


def largest_error(term: Term, x: Array, y: Array) -> float | None:
    if _native is None or x.dtype.name not in DTYPES or y.dtype.name not in DTYPES:
        return None
    pair = (ready(x), DTYPES[x.dtype.name], ready(y), DTYPES[y.dtype.name])
    return float(_native.largest_error(_Level.index, TERMS[term], x.size, *pair))


def checksum(x: Array) -> int | None:
    if _native is None or not x.flags.c_contiguous:
        return None
    return int(_native.checksum(_Level.index, ready(x)))


def quantize_masked(
    problem: Problem, x: Array, scale: Array, zero_point: Array, codes: Array, mask: Array
) -> bool | None:
    """Write codes of one byte, and one bit per element that says where its gradient passes; return whether x has NaN.

    Returns None if there is no native kernel for the problem, an operation "fake_quantize_masked".
    """
    if refusal(problem) is not None:
        return None
    runner = _runner(_Level.index, problem.tiling, problem_rules, problem)
    return bool(runner.quantize_masked(ready(x), scale, zero_point, ready(codes), mask))


def scale_sums(sums: Array, offset: Array, scale: Array, bias: Array | None, out: Array) -> bool | None:
    """Scale sums of products into ``out``; return whether all sums are exact, or None without native kernels."""
    if _native is None or not (sums.flags.c_contiguous and out.flags.c_contiguous):
        return None
    is_float, shift = sums.dtype.kind == "f", np.empty(0, np.float32) if bias is None else ready(bias)
    columns = ready(offset), ready(scale), shift
    return bool(_native.scale_sums(_Level.index, scale.size, sums, is_float, *columns, out))


def requantize(
    x: Array, units: tuple[Array, Array, Array], cols: int, target: tuple[float, float, float, float], out: Array
) -> bool:
    """Write codes or values of fused requantization into ``out``; return False if there is no native kernel.

    ``units`` are the units, their inverses, and the multipliers of the sums.
    """
    if _native is None or not (x.flags.c_contiguous and out.flags.c_contiguous):
        return False
    codes = 0 if out.dtype.kind == "f" else -1 if out.dtype.kind == "i" else 1
    _native.requantize(_Level.index, ready(x), *map(ready, units), cols, *target, codes, ready(out))
    return True


def layer_step(x: Problem, weight: Problem, settings: Mapping[str, Any]) -> Any:
    """Make the native record of a layer's training steps; see ``native/bindings/layer_step.hpp``.

    ``x`` and ``weight`` are problems "fake_quantize_backward". Returns None if there is no native kernel for one of
    them.
    """
    for problem in (x, weight):
        steps = ("fake_quantize", "fake_quantize_backward")
        if any(refusal(replace(problem, operation=step)) is not None for step in steps):
            return None
        if problem.spec.scale_format != "float" or problem.spec.bits > BYTE:
            return None
    runners = (_runner(_Level.index, each.tiling, observe_rules, each) for each in (x, weight))
    return _native.LayerStep(*runners, settings)  # type: ignore[union-attr]  # without it, there is a refusal


def encode_blocks(gguf_type: int, x: Array, importance: Array | None, out: NDArray[np.uint8]) -> tuple[bool, bool]:
    """Encode rows of float32 to a block format.

    Returns whether all elements are finite, and whether scales of a block may be infinite or 0.
    """
    weights = np.empty(0, np.float32) if importance is None else ready(importance)
    return _native.encode_blocks(_Level.index, gguf_type, x.shape[1], ready(x), weights, out)  # type: ignore[union-attr, no-any-return]


def decode_blocks(gguf_type: int, blocks: NDArray[np.uint8], out: Array) -> None:
    _native.decode_blocks(_Level.index, gguf_type, ready(blocks), out)  # type: ignore[union-attr]


def pack(codes: Array, bits: int) -> NDArray[np.uint8] | None:
    """Pack one-byte codes at ``bits`` bits each."""
    if _native is None or codes.dtype.itemsize != 1:
        return None
    packed = np.empty(-(-codes.size * bits // 8), np.uint8)
    _native.repack(True, _Level.index, codes.size, bits, False, ready(codes), packed)
    return packed


def unpack(packed: NDArray[np.uint8], bits: int, count: int, *, signed: bool) -> Array | None:
    """Unpack codes of up to 8 bits."""
    if _native is None or bits > 8:  # the codes would not fit bytes
        return None
    codes = np.empty(count, np.int8 if signed else np.uint8)
    _native.repack(False, _Level.index, count, bits, signed, ready(packed), codes)
    return codes
