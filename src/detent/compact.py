"""Compact parameters: the arrays a file needs, and nothing it can derive.

============ ======================================================================
scale        float32 or float64; for "e8m0" the biased exponents in uint8
block_scale  "e4m3" only, instead of scale: the float8 bits in uint8
tensor_scale "e4m3" only: float32
zero_point   affine specs only: packed at the format's bits
============ ======================================================================

The range that parameters came from is not kept: it takes no part in what they compute.
"""

from collections.abc import Mapping
from math import prod
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from detent._checks import has_keys
from detent.errors import FileFormatError
from detent.packing import pack, unpack
from detent.params import QuantParams
from detent.spec import QuantSpec

__all__ = ["compact", "expand"]

Arrays = dict[str, NDArray[Any]]
E8M0_BIAS = 127


def compact(params: QuantParams) -> Arrays:
    """The arrays that ``expand`` makes equal parameters of; together they have ``parameter_bits()``, in whole bytes.

    >>> import detent as dt
    >>> sorted(compact(dt.QuantParams.uint8_asymmetric()))
    ['scale', 'zero_point']
    """
    spec = params.spec
    arrays: Arrays = {}
    if params.block_scale is not None and params.tensor_scale is not None:
        arrays = {"block_scale": params.block_scale.view(np.uint8), "tensor_scale": params.tensor_scale}
    elif spec.scale_format == "e8m0":
        arrays = {"scale": (np.frexp(params.scale)[1] - 1 + E8M0_BIAS).astype(np.uint8)}
    else:
        arrays = {"scale": params.scale}
    if not spec.symmetric:
        arrays["zero_point"] = pack(params.zero_point, spec.bits)
    return arrays


def expand(spec: QuantSpec, arrays: Mapping[str, NDArray[Any]], scale_shape: tuple[int, ...]) -> QuantParams:
    """The parameters that ``compact`` took apart.

    Raises:
        FileFormatError: missing, extra or misshapen arrays.

    >>> import detent as dt
    >>> params = dt.QuantParams.uint8_asymmetric()
    >>> expand(params.spec, compact(params), ()) == params
    True
    """
    _check_names(spec, arrays)
    two_level = spec.scale_format == "e4m3"
    stored = arrays["block_scale" if two_level else "scale"]
    _check_array("scales", stored, ("uint8",) if spec.scale_format != "float" else ("float32", "float64"), scale_shape)
    if two_level:
        _check_array("tensor_scale", arrays["tensor_scale"], ("float32",), ())
        block = stored.view(ml_dtypes.float8_e4m3fn)
        with np.errstate(all="ignore"):  # QuantParams refuses what overflows
            scale = block.astype(np.float32) * arrays["tensor_scale"]
        return QuantParams(spec, scale, block_scale=block, tensor_scale=arrays["tensor_scale"])
    if spec.scale_format == "e8m0":
        with np.errstate(all="ignore"):  # QuantParams refuses the exponents of no normal number
            return QuantParams(spec, np.ldexp(np.float32(1.0), stored.astype(np.int32) - E8M0_BIAS))
    if spec.symmetric:
        return QuantParams(spec, stored)
    zero_point = unpack(arrays["zero_point"], spec.bits, prod(scale_shape), signed=spec.format.signed)
    return QuantParams(spec, stored, zero_point.reshape(scale_shape).astype(np.int32))


def _check_names(spec: QuantSpec, arrays: Mapping[str, NDArray[Any]]) -> None:
    wanted = {"block_scale", "tensor_scale"} if spec.scale_format == "e4m3" else {"scale"}
    wanted |= set() if spec.symmetric else {"zero_point"}
    if not has_keys(arrays, wanted):
        raise FileFormatError(f"parameters of {spec} are stored as {sorted(wanted)}, got {sorted(arrays)}")


def _check_array(name: str, array: NDArray[Any], dtypes: tuple[str, ...], shape: tuple[int, ...]) -> None:
    if array.dtype.name not in dtypes or array.shape != shape:
        raise FileFormatError(
            f"{name} have dtype {' or '.join(dtypes)} and shape {shape}, got {array.dtype} of shape {array.shape}"
        )
