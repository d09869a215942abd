"""Dynamic quantization: data quantized by their own range, in one go."""

from typing import Any, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from detent._plan_checks import check_out
from detent.dtypes import compute_dtype, float_array
from detent.errors import RangeError
from detent.formats import Format
from detent.kernels import Problem, dtype_name, minmax, observe
from detent.params import QuantParams
from detent.plan import Plan
from detent.scale_rule import Parameters
from detent.spec import QuantSpec, get_spec

__all__ = ["fake_quantize_dynamic"]

Array = NDArray[Any]


def fake_quantize_dynamic(
    x: ArrayLike, spec: QuantSpec | Format | str, *, out: Array | None = None
) -> tuple[Array, QuantParams]:
    """Fake quantize x with the parameters of its own range, and return both.

    The same bits as ``params = QuantParams.from_data(spec, x)`` and ``fake_quantize(x, params)``, but that values
    which are not finite are left out of the range; x is read once where its sets fit a cache.

    Args:
        x: float data.
        spec: how.
        out: where the values go.

    Raises:
        RangeError: x is empty, or a set has no finite value; what is in ``out`` is then undefined.

    >>> import detent as dt, numpy as np
    >>> y, params = dt.fake_quantize_dynamic(np.array([[127.0, 0.6], [1.0, -0.25]]), "int8/token")
    >>> y[0], params.scale * 127
    (array([127.,   1.]), array([127.,   1.]))
    """
    spec = get_spec(spec)
    data = float_array(x)
    tiling = spec.granularity.tiling(data.shape)
    if not data.size:
        raise RangeError(f"x of shape {data.shape} is empty: there is no range to take")
    if out is not None:
        check_out(out, [(data.dtype, data.shape)], {"x": data})
    target = np.empty_like(data, order="C") if out is None else out
    found = observe(Problem("fake_quantize", tiling, dtype_name(data.dtype), spec, None, "propagate"), data, target)
    if found is not None:
        low, high, scale, zero_point, _ = found
        return target, QuantParams.trusted(spec, Parameters(scale, zero_point.astype(np.int32)), low, high)
    low, high, nonfinite = minmax(data, tiling)
    if (low > high).any():
        raise RangeError(
            f"{int((low > high).sum())} of {low.size} sets of x have no finite value, {nonfinite} non-finite values in "
            "all: mend the data"
        )
    params = QuantParams.from_range(spec, low, high, dtype=compute_dtype(data.dtype))
    plan = Plan.select("fake_quantize", shape=data.shape, dtype=data.dtype, spec=spec)
    return cast("Array", plan.run(data, params, out=target)), params
