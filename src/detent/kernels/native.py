"""The native backend: C++ kernels, one table per CPU level, behind ``detent._native``.

A kernel is made for one problem: rules and layout are decided here once, and a run passes pointers. Arrays that are not
C-contiguous are copied first; results are the reference's, bit for bit.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib import import_module
from math import prod
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from detent._checks import SIZE_LIMIT, refuse_nan
from detent.formats import BYTE, MAX_BITS
from detent.granularity import Tiling
from detent.kernels.problem import Problem, Result
from detent.packing import pack
from detent.ste import Clipped, HardTanh, Identity

_native: ModuleType | None
try:
    _native = import_module("detent._native")  # built where there is a compiler
except ImportError as error:  # the package works without it
    _native = None
    WHY_NOT: str | None = f"the native kernels are not built ({error}): install with a C++ compiler on PATH"
else:
    WHY_NOT = None

__all__ = ["NativeKernel", "levels", "minmax", "refusal", "set_level"]

Array = NDArray[Any]
MAX_LEAD = 8
_OPERATIONS = {
    "quantize": 0,
    "dequantize": 1,
    "fake_quantize": 2,
    "fake_quantize_backward": 3,
    "quantize_backward": 3,
    "dequantize_backward": 4,
}
_MINMAX = 5
_RULES = (
    "division",
    "zero_point",
    "rounding",
    "fill",
    "mask",
    "grad",
    "find_nan",
    "exclusive",
    "is_signed",
    "no_zero",
    "codes",
)
_DTYPES = {"float16": 0, "bfloat16": 1, "float32": 2, "float64": 3}
_ROUNDINGS = {"half_even": 0, "half_away": 1, "floor": 2}
_BYTES, _WORDS, _PACKED = range(3)
_DENSE = {BYTE: _BYTES, MAX_BITS: _WORDS}


def levels() -> dict[str, bool]:
    """The CPU levels that were compiled, and whether this machine can run them; the last that can is used.

    >>> all(levels().values()) in (True, False)
    True
    """
    return {} if _native is None else dict(_native.levels())


class _Level:
    index = 0 if _native is None else _native.best_level()


def set_level(name: str) -> None:
    """Run the kernels of another CPU level from the next plan on; for tests, since results do not depend on it.

    >>> set_level(list(levels())[-1]) if all(levels().values()) and levels() else None
    """
    _Level.index = list(levels()).index(name)


def current_level() -> str:
    """The CPU level that new kernels run at; "none" without native kernels."""
    return list(levels())[_Level.index] if levels() else "none"


def set_num_threads(count: int) -> None:
    """Let native kernels use that many threads."""
    if _native is not None:
        _native.set_num_threads(count)


def refusal(problem: Problem) -> str | None:
    """Why there is no native kernel for the problem, or None where there is one.

    >>> from detent.granularity import PerTensor
    >>> from detent.spec import QuantSpec
    >>> spec = QuantSpec("int8", rounding="stochastic(1)")
    >>> "stochastic" in refusal(Problem("quantize", PerTensor().tiling((4,)), "float32", spec, None, "raise"))
    True
    """
    if WHY_NOT is not None:
        return WHY_NOT
    if problem.operation not in _OPERATIONS:
        return f"{problem.operation} has no native kernel"
    if problem.operation != "dequantize_backward":
        if not problem.spec.format.is_integer:
            return f"{problem.spec.format.name} has no native kernel"
        if problem.spec.rounding.kind not in _ROUNDINGS:
            return f"{problem.spec.rounding.kind} rounding has no native kernel"
        if problem.ste is not None and not isinstance(problem.ste, Identity | Clipped | HardTanh):
            return f"{type(problem.ste).__name__} has no native kernel"
    if len(problem.tiling.merged().shape) > MAX_LEAD or prod(problem.tiling.shape) >= SIZE_LIMIT:
        return f"an array of shape {problem.tiling.shape} is too large for the native kernels"
    return None


def minmax(x: Array, tiling: Tiling) -> tuple[Array, Array, int] | None:
    """The smallest and largest finite element of each set and the number of other elements; None without a kernel.

    >>> minmax(np.zeros(2, np.complex64), Tiling((2,), (2,), (1,), ())) is None
    True
    """
    few = tiling.merged()
    if _native is None or x.dtype.name not in _DTYPES or len(few.shape) > MAX_LEAD or x.size >= SIZE_LIMIT:
        return None
    compute = np.float64 if x.dtype == np.float64 else np.float32
    low, high = np.full(tiling.scale_shape, np.inf, compute), np.full(tiling.scale_shape, -np.inf, compute)
    nonfinite = _reducer(few, x.dtype.name, _Level.index).reduce(_ready(x), low, high)
    low += 0.0  # a negative zero becomes a positive one
    high += 0.0
    return low, high, int(nonfinite)


@lru_cache(maxsize=1024)
def _reducer(few: Tiling, dtype: str, level: int) -> Any:
    rules = {**dict.fromkeys(_RULES, 0), "dtype": _DTYPES[dtype], "bits": BYTE, "qmin": 0.0, "qmax": 0.0}
    return _make_runner(_MINMAX, level, few, rules)


class NativeKernel:
    """A problem's C++ kernel.

    >>> NativeKernel.backend
    'native'
    """

    backend = "native"

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        form = problem.spec.format
        to_codes = problem.operation == "quantize"
        self._result = np.dtype(form.storage) if to_codes else _float(problem.dtype)
        self._runner = _runner(problem, _BYTES if form.bits <= BYTE else _WORDS)
        # Codes of 9 to 15 bits are packed in Python; all others by the kernel, 8 and 16 bits as they are.
        packs = to_codes and (form.bits <= BYTE or form.bits in _DENSE)
        self._packer = _runner(problem, _DENSE.get(form.bits, _PACKED)) if packs else None

    def run(
        self,
        inputs: Sequence[Array],
        scale: Array,
        zero_point: Array,
        out: Array | None,
        step: int,  # noqa: ARG002 - no native kernel rounds stochastically
        grad_scale: float | None,  # noqa: ARG002 - nor learns
    ) -> Result:
        """Run on checked arrays.

        >>> NativeKernel.backend
        'native'
        """
        shape = self.problem.tiling.shape
        packed = out is not None and (out.shape != shape or out.dtype != self._result)
        runner = self._packer if packed else self._runner
        if runner is None:
            codes = self.run(inputs, scale, zero_point, None, 0, None)
            np.copyto(out, pack(codes, self.problem.spec.bits))  # type: ignore[arg-type]  # out is given, codes are one
            return out  # type: ignore[return-value]  # out is given
        target = out
        if target is None or not target.flags.c_contiguous:
            target = np.empty(shape if out is None else out.shape, self._result if out is None else out.dtype)
        first = _ready(inputs[0])
        second = first if len(inputs) == 1 else _ready(inputs[1])
        if runner.run(first, second, scale, zero_point, _ready(target)) and self.problem.nan == "raise":
            refuse_nan("x", inputs[0])
        if out is None or target is out:
            return target
        np.copyto(out, target)
        return out


def _runner(problem: Problem, codes: int) -> Any:
    """The extension's kernel for the problem, with codes as bytes, words or packed bits."""
    spec, ste = problem.spec, problem.ste
    mask = 0 if ste is None or isinstance(ste, Identity) else 3 if isinstance(ste, HardTanh) else 1
    if isinstance(ste, Clipped) and ste.on == "value":
        mask = 2
    rules: Mapping[str, float] = {
        "dtype": _DTYPES[problem.dtype],
        "division": int(spec.convention.division == "reciprocal"),
        "zero_point": int(spec.convention.zero_point == "before_round"),
        "rounding": _ROUNDINGS.get(spec.rounding.kind, 0),
        "fill": {"zero_point": 1, "qmin": 2}.get(problem.nan, 0),
        "mask": mask,
        "grad": int(problem.operation == "quantize_backward"),
        "find_nan": int(problem.nan == "raise"),
        "exclusive": int(isinstance(ste, Clipped) and ste.bounds == "exclusive"),
        "is_signed": int(spec.format.signed),
        "no_zero": int(spec.symmetric and spec.format.signed),
        "bits": spec.bits,
        "codes": codes,
        "qmin": float(spec.qmin),
        "qmax": float(spec.qmax),
    }
    return _make_runner(_OPERATIONS[problem.operation], _Level.index, problem.tiling.merged(), rules)


def _make_runner(operation: int, level: int, few: Tiling, rules: Mapping[str, float]) -> Any:
    cols, block = (few.shape[-1], few.block[-1]) if few.shape else (1, 1)
    make = _native.Runner  # type: ignore[union-attr]  # callers exclude a missing extension
    return make(operation, level, cols, min(block, max(cols, 1)), _lead(few), few.sets, dict(rules))


def _lead(few: Tiling) -> list[tuple[int, int, int]]:
    """Size, block and stride in sets of every axis but the last."""
    return [
        (size, block, prod(few.grid[axis + 1 :]))
        for axis, (size, block) in enumerate(zip(few.shape[:-1], few.block[:-1], strict=True))
    ]


def _float(name: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def _ready(array: Array) -> Array:
    """The array as the extension takes it: C-contiguous, and of a type that every array library knows."""
    ready = array if array.flags.c_contiguous else np.ascontiguousarray(array)
    return ready.view(np.uint16) if ready.dtype == ml_dtypes.bfloat16 else ready
