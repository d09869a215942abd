"""What a plan refuses: outputs that cannot take the result, NaN, scales that do not fit. Used by ``detent.plan``."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detent.errors import NaNError, OutError, ParamsError, SpecError

Array = NDArray[Any]
STEP_LIMIT = 1 << 32


def check_step(step: int) -> int:
    """The step if it is a counter of stochastic rounding."""
    if isinstance(step, bool) or not isinstance(step, int | np.integer) or not 0 <= step < STEP_LIMIT:
        raise SpecError(f"step is an integer in 0..2**32-1, got {step!r}")
    return int(step)


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
    for name, array in inputs.items():
        if isinstance(array, np.ndarray) and _share_memory(out, array):
            raise OutError(f"out overlaps {name} in memory: give it an array of its own")


def _share_memory(a: Array, b: Array) -> bool:
    try:
        return bool(np.shares_memory(a, b, max_work=10_000))  # type: ignore[arg-type]  # the stubs know 0 and -1 only
    except np.exceptions.TooHardError:
        return True


def refuse_nan(name: str, x: Array) -> None:
    """Raise if there is any NaN, with its count and first index."""
    missing = np.isnan(x)
    count = int(np.count_nonzero(missing))
    if count:
        first = tuple(int(i) for i in np.unravel_index(int(np.argmax(missing)), x.shape))
        raise NaNError(
            f"{name} holds {count} NaN of {x.size} elements, the first at index {first}: mend the data or choose "
            "nan='zero_point' or nan='qmin'",
            count,
            first,
        )
