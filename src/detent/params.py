"""QuantParams: the quantization parameters of a spec, one scale and zero point per parameter set.

::

    spec --+-- from_range(spec, lo, hi) --+
           +-- from_data(spec, x) --------+--> QuantParams(spec, scale, zero_point)
           +-- QuantParams(spec, scale=s) +

Scales are float32, or float64 for float64 data. Arrays are read-only; ``dataclasses.replace`` makes a changed copy and
checks it again.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import prod
from typing import Any, TypeAlias, cast

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from detent.checks import (
    FLOATS,
    as_array,
    as_integer,
    compute_dtype,
    first_index,
    first_nonfinite,
    float_array,
    float_dtype,
    read_only,
)
from detent.codec import MAX_CHARS_SHOWN, MAX_MESSAGE, check_version, decode_array, encode_array, parse, reading
from detent.errors import DetentError, DtypeError, ParamsError, RangeError, ShapeError
from detent.formats import Format, get_format, int4, int8, uint8
from detent.granularity import Granularity, PerAxis, PerBlock, PerGroup, PerTensor
from detent.kernels import minmax
from detent.scale_rule import Parameters, derive
from detent.spec import QuantSpec, get_spec, parameter_bits, short_spec

__all__ = ["QuantParams"]

JSON_VERSION = 1
INT32_LIMIT = 1 << 31
POWER_OF_TWO = 0.5  # the mantissa that np.frexp returns for every power of two
Array: TypeAlias = NDArray[Any]
Pair: TypeAlias = tuple[NDArray[np.floating], NDArray[np.floating]]
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


@dataclass(frozen=True, init=False, eq=False, repr=False)
class QuantParams:
    """A spec with its scales and zero points.

    Args:
        spec: a QuantSpec or its short string.
        scale: positive, finite, normal numbers in the scale shape of the granularity. float64 arrays stay float64,
            all others become float32.
        zero_point: integers in ``[qmin, qmax]``, broadcast to the scale's shape. None means the only valid zero point
            if the spec is symmetric, and the code nearest to 0 if it is affine.
        min_val: lower bound of the range that the parameters were derived from, or None; ``==`` ignores it.
        max_val: upper bound of that range, or None; ``==`` ignores it.
        block_scale: float8 scale of each group (NVFP4 only); ``scale`` is ``block_scale * tensor_scale``.
        tensor_scale: float32 scale of the whole tensor (NVFP4 only).

    >>> import detent as dt
    >>> dt.QuantParams(dt.QuantSpec(dt.uint8), scale=0.5, zero_point=3)
    dt.QuantParams('uint8/tensor/affine', scale=0.5, zero_point=3)
    """

    spec: QuantSpec
    scale: NDArray[np.floating]
    zero_point: NDArray[np.int32]
    min_val: NDArray[np.float64] | None
    max_val: NDArray[np.float64] | None
    block_scale: NDArray[np.generic] | None
    tensor_scale: NDArray[np.floating] | None

    def __init__(
        self,
        spec: QuantSpec | Format | str,
        scale: ArrayLike,
        zero_point: ArrayLike | None = None,
        min_val: ArrayLike | None = None,
        max_val: ArrayLike | None = None,
        block_scale: ArrayLike | None = None,
        tensor_scale: ArrayLike | None = None,
    ) -> None:
        put = object.__setattr__
        put(self, "spec", get_spec(spec))
        stored = as_scale("scale", scale)
        if isinstance(self.spec.granularity, PerTensor) and stored.size == 1:
            stored = stored.reshape(())
        put(self, "scale", read_only(stored))
        put(self, "zero_point", read_only(as_zero_point(self.spec, zero_point, stored.shape)))
        for name, value in (("min_val", min_val), ("max_val", max_val)):
            bound = None if value is None else broadcast(name, numbers(name, value).astype(np.float64), stored.shape)
            put(self, name, None if bound is None else read_only(bound))
        block = None if block_scale is None else as_array("block_scale", block_scale)
        if block is not None and block.dtype != E4M3:
            raise DtypeError(f"got block_scale of dtype {block.dtype}, expected {E4M3}: use from_range or from_data")
        put(self, "block_scale", None if block is None else read_only(block))
        tensor = None if tensor_scale is None else numbers("tensor_scale", tensor_scale).astype(np.float32)
        put(self, "tensor_scale", None if tensor is None else read_only(tensor))
        self.validate()

    @classmethod
    def from_range(
        cls,
        spec: QuantSpec | Format | str,
        lo: ArrayLike,
        hi: ArrayLike,
        *,
        shape: tuple[int, ...] | None = None,
        dtype: DTypeLike = "float32",
    ) -> "QuantParams":
        """Derive parameters that represent the range ``[lo, hi]`` of each parameter set.

        Args:
            spec: a QuantSpec or its short string.
            lo: lower bound of each parameter set, broadcastable to the scale's shape.
            hi: upper bound of each parameter set, broadcastable to the scale's shape.
            shape: shape of the data; needed only if lo and hi are scalars and the spec has several parameter sets.
            dtype: dtype of the scale.

        Raises:
            RangeError: lo > hi, or a bound that is not finite.
            ShapeError: bounds that cannot be broadcast to the scale's shape.

        >>> import detent as dt
        >>> dt.QuantParams.from_range(dt.QuantSpec(dt.uint8), -1.0, 4.0).zero_point
        array(51, dtype=int32)
        """
        spec = get_spec(spec)
        low, high = bounds(lo, hi)
        if shape is not None:
            scale_shape = spec.granularity.tiling(shape).scale_shape
            low, high = broadcast("lo", low, scale_shape), broadcast("hi", high, scale_shape)
        if isinstance(spec.granularity, PerTensor) and low.size == 1:
            low, high = low.reshape(()), high.reshape(())
        if not low.size:
            raise RangeError(f"got empty bounds of shape {low.shape}, expected at least one lo and one hi")
        check_scale_shape(spec.granularity, low.shape, "lo and hi")
        return cls.trusted(spec, derive(spec, low, high, scale_dtype(dtype)), low, high)

    @classmethod
    def trusted(cls, spec: QuantSpec, derived: Parameters, low: Array, high: Array) -> "QuantParams":
        """Make params from the result of a scale rule; the result is not checked again."""
        params = cls.__new__(cls)
        bounds = low.astype(np.float64, "C"), high.astype(np.float64, "C")
        arrays = (derived.scale, derived.zero_point, *bounds, derived.block_scale, derived.tensor_scale)
        ordered = [None if array is None else np.asarray(array, order="C") for array in arrays]
        for value in ordered:
            forbid_writing(value)
        params.__dict__.update(zip(cls.__dataclass_fields__, (spec, *ordered), strict=True))
        return params

    @classmethod
    def from_data(cls, spec: QuantSpec | Format | str, x: ArrayLike) -> "QuantParams":
        """Derive parameters from the min-max range of each parameter set of x.

        Raises:
            RangeError: x is empty or contains NaN or infinities. Observers, in contrast, skip and count such values.

        >>> import detent as dt, numpy as np
        >>> dt.QuantParams.from_data("int8/axis0", np.array([[1.0, -2.0], [0.5, 0.25]], np.float32)).scale * 127
        array([2. , 0.5], dtype=float32)
        """
        spec = get_spec(spec)
        data = float_array(x)
        tiling = spec.granularity.tiling(data.shape)
        if not data.size:
            raise RangeError(
                f"x of shape {data.shape} is empty, so it has no range: pass data with at least one element"
            )
        lo, hi, nonfinite = minmax(data, tiling)
        if nonfinite:
            raise RangeError(
                f"x is not finite in {nonfinite} of {data.size} elements, the first at index {first_nonfinite(data)}: "
                "replace these elements, or use detent.observers.MinMax, which skips them"
            )
        return cls.from_range(spec, lo, hi, dtype=compute_dtype(data.dtype))

    def from_statistics(self, lo: ArrayLike, hi: ArrayLike) -> "QuantParams":
        """Derive new parameters with the same spec and scale shape from other bounds.

        Bounds are single values, or arrays in the scale's shape.

        >>> import detent as dt
        >>> dt.QuantParams.int8_symmetric().from_statistics(-2.0, 2.0).max_val
        array(2.)
        """
        low, high = bounds(lo, hi)
        try:
            shape = np.broadcast_shapes(low.shape, self.scale.shape)
        except ValueError:
            raise ShapeError(
                f"got bounds of shape {low.shape}, expected single values or the scale's shape {self.scale.shape}"
            ) from None
        low, high = np.broadcast_to(low, shape), np.broadcast_to(high, shape)
        return type(self).from_range(self.spec, low, high, dtype=self.scale.dtype)

    @classmethod
    def int8_symmetric(cls) -> "QuantParams":
        """Make a placeholder: int8 per tensor, symmetric, scale 1, zero point 0."""
        return cls(QuantSpec(int8), 1.0)

    @classmethod
    def uint8_asymmetric(cls) -> "QuantParams":
        """Make a placeholder: uint8 per tensor, affine, scale 1, zero point 128."""
        return cls(QuantSpec(uint8), 1.0, 128)

    @classmethod
    def int4_symmetric(cls) -> "QuantParams":
        """Make a placeholder: int4 per tensor, symmetric, scale 1, zero point 0."""
        return cls(QuantSpec(int4), 1.0)

    @classmethod
    def channel_wise(cls, channels: int, element: Format | str, axis: int = 0) -> "QuantParams":
        """Make a placeholder: one parameter set per channel, all with scale 1."""
        count = as_integer("the number of channels", channels, at_least=1, at_most=(1 << 31) - 1, error=ShapeError)
        return cls(QuantSpec(get_format(element), PerAxis(axis)), np.ones(count, np.float32))

    @classmethod
    def block_wise(cls, size: int, element: Format | str) -> "QuantParams":
        """Make a placeholder for a single group of up to ``size`` elements on the last axis, with scale 1."""
        return cls(QuantSpec(get_format(element), PerGroup(size)), np.ones(1, np.float32))

    def validate(self) -> None:
        """Check again that scales, zero points and bounds are valid for the spec.

        Raises:
            ParamsError, ShapeError: an invariant is broken; the message shows the values.
        """
        check_scale_shape(self.spec.granularity, self.scale.shape, "scale")
        check_scale_values("scale", self.scale)
        check_zero_points(self.spec, self.zero_point)
        bounds = [bound for bound in (self.min_val, self.max_val) if bound is not None]
        if bounds:
            check_bounds(bounds[0], bounds[-1])
        check_levels(self.spec, self.scale, self.block_scale, self.tensor_scale)

    @property
    def num_parameter_sets(self) -> int:
        """The number of parameter sets: (scale, zero point) pairs."""
        return int(self.scale.size)

    @property
    def is_per_channel(self) -> bool:
        """Whether each index of one axis has its own parameter set."""
        return isinstance(self.spec.granularity, PerAxis)

    def quantization_error_bound(self) -> float:
        """Return the largest ``|x - dequantize(quantize(x))|`` for x inside the representable range.

        Integers: half of the largest scale if codes are rounded to nearest, the largest scale for floor and stochastic
        rounding. Other formats: half of the widest gap between adjacent values. The bound does not include the float
        rounding of ``x / scale`` and of the result.

        >>> import detent as dt
        >>> dt.QuantParams(dt.QuantSpec(dt.int8), scale=0.5).quantization_error_bound()
        0.25
        """
        steps = 0.5 if self.spec.rounding.kind.startswith("half") else 1.0
        return float(self.scale.max(initial=0.0)) * self.spec.format.largest_gap * steps

    def compression_ratio(self, shape: tuple[int, ...] | None = None, *, include_params: bool = True) -> float:
        """Return the size in float32 divided by the size of codes, scales and zero points.

        Args:
            shape: shape of the data. Without a shape, scales and zero points are counted only for groups and blocks.
            include_params: whether to count scales and zero points; if False, only codes are counted.

        >>> import detent as dt
        >>> dt.QuantParams.block_wise(32, dt.int4).compression_ratio()
        6.4
        """
        bits = float(self.spec.bits)
        if include_params and shape is not None:
            tiling = self.spec.granularity.tiling(shape)
            bits += self.parameter_bits(tiling.sets) / max(prod(tiling.shape), 1)
        elif include_params and self.spec.granularity.set_size:
            bits += (self.parameter_bits(2) - self.parameter_bits(1)) / self.spec.granularity.set_size
        return 32.0 / bits

    def parameter_bits(self, sets: int | None = None) -> int:
        """Return how many bits the scales and zero points of ``sets`` parameter sets (None for all) need in a file."""
        count = self.num_parameter_sets if sets is None else sets
        return parameter_bits(self.spec, count, 8 * self.scale.dtype.itemsize)

    def compute_arrays(self, dtype: str) -> Pair:
        """Return scale and zero point as cached arrays of ``dtype``, the compute type of a kernel."""
        cache = self.__dict__.setdefault("_cache", {})
        if dtype not in cache:
            cache[dtype] = (read_only(self.scale.astype(dtype)), read_only(self.zero_point.astype(dtype)))
        return cast("Pair", cache[dtype])

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Return a dict that maps field names to arrays; float8 block scales are returned as their bits in uint8."""
        arrays = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "spec"}
        present = {name: value for name, value in arrays.items() if value is not None}
        if self.block_scale is not None:
            present["block_scale"] = self.block_scale.view(np.uint8)
        return present

    @classmethod
    def from_arrays(cls, spec: QuantSpec | str, arrays: Mapping[str, ArrayLike]) -> "QuantParams":
        """Make parameters from the arrays of ``to_arrays``."""
        names = {f.name for f in fields(cls)} - {"spec"}
        if not isinstance(arrays, Mapping) or not {"scale", "zero_point"} <= set(arrays) <= names:
            raise ParamsError(
                f"got the arrays {list(arrays)!r}, expected 'scale', 'zero_point' and optionally "
                f"{sorted(names - {'scale', 'zero_point'})}"[:MAX_MESSAGE]
            )
        values: dict[str, Any] = dict(arrays)
        if "block_scale" in values:
            bits = np.asarray(values["block_scale"])
            if bits.dtype != np.uint8:
                raise ParamsError(
                    f"got block_scale of dtype {bits.dtype}, expected float8 bits in uint8, as to_arrays returns them"
                )
            values["block_scale"] = bits.view(E4M3)
        return cls(get_spec(spec), **values)

    def to_json(self) -> str:
        """Return spec and parameters as one line of JSON; every float is stored exactly.

        >>> p = QuantParams.uint8_asymmetric()
        >>> QuantParams.from_json(p.to_json()) == p
        True
        """
        arrays = {name: encode_array(values) for name, values in self.to_arrays().items()}
        return json.dumps({"version": JSON_VERSION, "spec": self.spec.to_dict(), **arrays})

    @classmethod
    def from_json(cls, text: str) -> "QuantParams":
        """Read the JSON of ``to_json``.

        Raises:
            ParamsError: the text is not JSON of ``to_json``, or the parameters are invalid.
        """
        with reading("the text is not the JSON of a QuantParams", error=ParamsError, keep=DetentError):
            data = parse(text, "a QuantParams", error=ParamsError)
            check_version(data.pop("version"), JSON_VERSION, "QuantParams", error=ParamsError)
            spec = QuantSpec.from_dict(data.pop("spec"))
            names = {name: name[:MAX_CHARS_SHOWN] for name in data}
            return cls.from_arrays(
                spec, {name: decode_array(data[name], shown, error=ParamsError) for name, shown in names.items()}
            )

    def _key(self) -> tuple[object, ...]:
        parts = (self.scale, self.zero_point, self.block_scale, self.tensor_scale)
        return (self.spec, *((str(part.dtype), part.shape, part.tobytes()) for part in parts if part is not None))

    def __reduce__(self) -> tuple[type["QuantParams"], tuple[object, ...]]:
        """Copy and unpickle through the constructor, which checks the values again."""
        return type(self), tuple(getattr(self, field.name) for field in fields(self))

    def __eq__(self, other: object) -> bool:
        return self._key() == other._key() if isinstance(other, QuantParams) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        scale, zero_point = self.scale, self.zero_point
        points = str(zero_point.min()) if _is_constant(zero_point) else f"<{zero_point.min()} to {zero_point.max()}>"
        if not scale.ndim:
            scales = str(scale)
        elif _is_constant(scale):
            scales = f"full({scale.shape}, {scale.flat[0]})"
        else:
            scales = f"<{scale.shape}, {scale.min():.4g} to {scale.max():.4g}>"
        return f"dt.QuantParams({short_spec(self.spec)}, scale={scales}, zero_point={points})"


ParamsLike: TypeAlias = QuantParams | QuantSpec | Format | str


def get_params(value: ParamsLike, data: NDArray[Any]) -> QuantParams:
    """Return QuantParams unchanged; for a spec, derive params from the min-max range of the data."""
    if isinstance(value, QuantParams):
        return value
    if isinstance(value, QuantSpec | Format | str):
        return QuantParams.from_data(value, data)
    raise DtypeError(
        f"params must be a QuantParams or a spec such as 'int8/axis0', got {type(value).__name__}: pass a spec, "
        "or make params with from_data or from_range"
    )


def numbers(name: str, value: ArrayLike) -> NDArray[Any]:
    array = as_array(name, value)
    if array.dtype.kind not in "fiu" and array.dtype not in FLOATS.values():
        raise DtypeError(f"got {name}={value!r}, expected numbers")
    return array


def as_scale(name: str, value: ArrayLike) -> NDArray[np.floating]:
    """Convert a scale to float32, unless it is a float64 array."""
    is_double = isinstance(value, np.ndarray | np.generic) and value.dtype == np.float64
    with np.errstate(all="ignore"):
        return numbers(name, value).astype(np.float64 if is_double else np.float32)


def as_zero_point(spec: QuantSpec, value: ArrayLike | None, shape: tuple[int, ...]) -> NDArray[np.int32]:
    """Convert a zero point to int32 in the scale's shape; None means the spec's default."""
    if value is None:
        affine = int(np.clip(0, spec.qmin, spec.qmax)) if spec.format.is_integer else 0
        return np.full(shape, spec.symmetric_zero_point if spec.symmetric else affine, np.int32)
    array = numbers("zero_point", value)
    if not (array == np.trunc(array)).all() or not (np.abs(array.astype(np.float64)) < INT32_LIMIT).all():
        raise ParamsError(
            f"got zero_point {brief(array)}, expected integers that fit int32: round the zero point, or clamp it"
        )
    return broadcast("zero_point", array.astype(np.int32), shape)


def broadcast(name: str, values: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """Broadcast the values to this shape; a single value fits every shape."""
    if values.shape == shape:
        return values
    if values.size == 1:
        values = values.reshape(())
    try:
        return np.broadcast_to(values, shape)
    except ValueError:
        raise ShapeError(
            f"got {name} of shape {values.shape}, expected a single value or the scale's shape {shape}"
        ) from None


def bounds(lo: ArrayLike, hi: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Convert lo and hi to float64 arrays of the same shape, and check the bounds."""
    arrays = [numbers(name, value).astype(np.float64) for name, value in (("lo", lo), ("hi", hi))]
    try:
        low, high = np.broadcast_arrays(*arrays)
    except ValueError:
        raise ShapeError(
            f"got lo of shape {arrays[0].shape} and hi of shape {arrays[1].shape}, expected equal shapes"
        ) from None
    check_bounds(low, high)
    return low, high


def check_bounds(low: NDArray[np.float64], high: NDArray[np.float64]) -> None:
    """Raise unless all bounds are finite and every lower bound is at most the upper bound."""
    bad = ~(np.isfinite(low) & np.isfinite(high))
    if bad.any():
        at = int(np.argmax(bad))
        raise RangeError(f"got lo {low.flat[at]} and hi {high.flat[at]}{_where(bad)}, expected finite bounds")
    bad = low > high
    if bad.any():
        at = int(np.argmax(bad))
        raise RangeError(
            f"got lo {low.flat[at]} > hi {high.flat[at]}{_where(bad)}, expected lo <= hi: were lo and hi swapped?"
        )


def _where(bad: NDArray[np.bool_]) -> str:
    return f" at index {first_index(bad)} ({int(bad.sum())} of {bad.size} parameter sets)" if bad.ndim else ""


def check_scale_shape(granularity: Granularity, shape: tuple[int, ...], name: str) -> None:
    """Raise if the granularity cannot have scales of this shape."""
    fits, expected = True, ""
    if isinstance(granularity, PerTensor):
        fits, expected = shape == (), "(), a single value"
    elif isinstance(granularity, PerAxis):
        fits, expected = len(shape) == 1, "(n,), one value per index of the axis"
    elif isinstance(granularity, PerGroup):
        fits, expected = len(shape) >= 1, "the data's shape with the grouped axis divided by the group size"
    elif isinstance(granularity, PerBlock):
        fits, expected = len(shape) >= len(granularity.sizes), f"a rank of at least {len(granularity.sizes)}"
    if not fits:
        raise ShapeError(
            f"got {name} of shape {shape} for granularity {granularity}, expected {expected}"
            + ("" if shape else ": pass an array, or use from_range(..., shape=x.shape)")
        )


def check_scale_values(name: str, scale: NDArray[np.floating]) -> None:
    """Raise unless every scale is a positive normal float."""
    normal = np.finfo(scale.dtype).smallest_normal
    for bad, expected in (
        (np.isnan(scale), "a number"),
        (np.isinf(scale), "a finite number"),
        (scale <= 0, "a positive number"),
        (scale < normal, f"a normal number of at least {normal}"),
    ):
        if bad.any():
            raise ParamsError(f"{name} must be {expected}, got {scale.flat[int(np.argmax(bad))]}{_where(bad)}")


def check_zero_points(spec: QuantSpec, zero_point: NDArray[np.int32]) -> None:
    """Raise unless every zero point is a valid code; symmetric specs have a single valid zero point."""
    low, high = (int(spec.qmin), int(spec.qmax)) if spec.format.is_integer else (0, 0)
    if spec.symmetric:
        low = high = spec.symmetric_zero_point
    outside = (zero_point < low) | (zero_point > high)
    if outside.any():
        expected = f"{low} (the spec is symmetric)" if spec.symmetric else f"in [{low}, {high}]"
        repair = "leave zero_point out" if spec.symmetric else "clamp the zero points"
        raise ParamsError(
            f"zero points of {spec} must be {expected}, got {int(zero_point[outside].flat[0])} "
            f"(invalid: {int(outside.sum())} of {outside.size} zero points): {repair}"
        )


def brief(values: NDArray[Any]) -> str:
    """Describe an array in a message by its shape and range."""
    if values.ndim == 0:
        return str(values)
    return f"array of shape {values.shape} in [{values.min()}, {values.max()}]" if values.size else "an empty array"


def _is_constant(values: NDArray[Any]) -> bool:
    return bool((values == values.flat[0]).all())


def check_levels(
    spec: QuantSpec,
    scale: NDArray[np.floating],
    block_scale: NDArray[np.generic] | None,
    tensor_scale: NDArray[np.floating] | None,
) -> None:
    """Raise unless the scales are valid in the spec's scale format."""
    two_level = spec.scale_format == "e4m3"
    given = block_scale is not None, tensor_scale is not None
    if given != (two_level, two_level):
        raise ParamsError(
            f"scale_format {spec.scale_format!r} {'needs' if two_level else 'does not support'} block_scale and "
            "tensor_scale: use from_range or from_data"
        )
    if block_scale is not None and tensor_scale is not None:
        with np.errstate(all="ignore"):
            product = block_scale.astype(np.float32) * tensor_scale
        if product.shape != scale.shape or not np.array_equal(product, scale):
            raise ParamsError("scale differs from block_scale * tensor_scale in float32: use from_range or from_data")
    if spec.scale_format == "e8m0" and not (np.frexp(scale)[0] == POWER_OF_TWO).all():
        raise ParamsError(f"got e8m0 scale {brief(scale)}, expected powers of two: use from_range or from_data")


def scale_dtype(dtype: DTypeLike) -> np.dtype[Any]:
    checked = float_dtype(dtype, "the scale")
    if checked.itemsize < np.dtype(np.float32).itemsize:
        raise DtypeError(f"got scale dtype {checked}, expected float32 or float64")
    return checked


def forbid_writing(array: NDArray[Any] | None) -> None:
    """Make an array read-only, and if it is a view, also the arrays that it views."""
    part: object = array
    while isinstance(part, np.ndarray):
        part.setflags(write=False)
        part = part.base
