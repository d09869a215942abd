"""What a plan refuses: outputs that cannot take the result, NaN, scales that do not fit. Used by ``detent.plan``."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detent._checks import as_integer
from detent.errors import DtypeError, OutError, ParamsError, SpecError
from detent.params import QuantParams

Array = NDArray[Any]
STEP_LIMIT = 1 << 32
MAX_FLOAT = sys.float_info.max


def check_step(step: int) -> int:
    """The step if it is a counter of stochastic rounding."""
    return as_integer("step", step, at_least=0, at_most=STEP_LIMIT - 1)


def check_is_params(params: object) -> None:
    """Raise unless it is a QuantParams."""
    if not isinstance(params, QuantParams):
        raise DtypeError(
            f"params must be a QuantParams, got {type(params).__name__}: make one with from_data or from_range"
        )


def as_factor(grad_scale: object) -> float | None:
    """The factor of learned gradients as a float; None stays None."""
    if grad_scale is None:
        return None
    if isinstance(grad_scale, bool) or not isinstance(grad_scale, int | float | np.floating | np.integer):
        raise DtypeError(f"grad_scale must be a number or None, got {grad_scale!r}")
    if not -MAX_FLOAT <= grad_scale <= MAX_FLOAT:
        raise SpecError(f"grad_scale must be a finite number, got {grad_scale!r}")
    return float(grad_scale)


def check_narrowed(scale: NDArray[np.floating]) -> None:
    """Raise unless float64 scales are still positive normal numbers in float32."""
    with np.errstate(over="ignore", under="ignore"):
        narrow = scale.astype(np.float32)
    if not (np.isfinite(narrow) & (narrow >= np.finfo(np.float32).smallest_normal)).all():
        raise ParamsError(
            f"float64 scales in [{scale.min()}, {scale.max()}] do not fit the float32 that data of fewer bits is "
            "computed in: quantize float64 data, or rescale"
        )


def check_out(
    out: object, accepted: Sequence[tuple[np.dtype[Any], tuple[int, ...]]], inputs: Mapping[str, object]
) -> None:
    """Raise unless the result can be written to ``out``."""
    if not isinstance(out, np.ndarray):
        raise OutError(f"out must be a NumPy array, got {type(out).__name__}")
    if (out.dtype, out.shape) not in accepted:
        wanted = " or ".join(f"{dtype} of shape {shape}" for dtype, shape in accepted)
        raise OutError(f"out has dtype {out.dtype} and shape {out.shape}, expected {wanted}")
    if not out.flags.writeable:
        raise OutError("out is read-only: give it an array that can be written")
    if _overlaps_itself(out):
        raise OutError(f"elements of out share memory (strides {out.strides}): give it an array of its own")
    for name, array in inputs.items():
        if isinstance(array, np.ndarray) and _share_memory(out, array):
            raise OutError(f"out overlaps {name} in memory: give it an array of its own")


def _overlaps_itself(out: Array) -> bool:
    """Whether two elements may share memory; arrays that only a solver could clear count as overlapping."""
    if out.flags.c_contiguous or not out.size:
        return False
    reach = out.itemsize
    for stride, size in sorted(
        (abs(stride), size) for stride, size in zip(out.strides, out.shape, strict=True) if size > 1
    ):
        if stride < reach:
            return True
        reach += stride * (size - 1)
    return False


def _share_memory(a: Array, b: Array) -> bool:
    if not np.may_share_memory(a, b):
        return False
    try:
        return bool(np.shares_memory(a, b, max_work=10_000))  # type: ignore[arg-type]  # the stubs know 0 and -1 only
    except np.exceptions.TooHardError:
        return True
