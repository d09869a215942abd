"""Trials: run an operation with the native kernel and with the reference kernel, and compare the results bit for bit.

A Trial is one input of a kernel with all options. Its data are codes and ties of its scales, adjacent floats,
zeros of both signs, infinities, subnormals, the largest numbers, and NaN where the policy allows it.
"""

from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from math import inf, nan, prod

import ml_dtypes
import numpy as np

import detent as dt
import detent.plan
from detent.kernels import native

__all__ = [
    "CONVENTIONS",
    "DTYPES",
    "ESTIMATORS",
    "FORMATS",
    "GRANULARITIES",
    "LEVELS",
    "MASKED",
    "OPERATIONS",
    "Trial",
    "at",
    "difference",
    "dtype_of",
    "native_result",
    "reference_result",
]

OPERATIONS = (
    "quantize",
    "dequantize",
    "fake_quantize",
    "quantize_backward",
    "dequantize_backward",
    "fake_quantize_backward",
)
MASKED = ("fake_quantize_masked", "fake_quantize_masked_backward")
DTYPES = ("float16", "bfloat16", "float32", "float64")
CONVENTIONS = tuple(dt.convention.PRESETS)
LEVELS = tuple(name for name, runs in native.levels().items() if runs) or ("none",)  # "none": tests are skipped
FORMATS = ("int8", "uint8", "int4", "uint4", "int3", "int2", "uint1", "int16", "uint16", "int11")

# Each shape has more than 2^15 elements, so that kernels use several threads, and rows that end inside a chunk.
GRANULARITIES = {
    "tensor": (dt.PerTensor(), (3, 11003)),
    "axis first": (dt.PerAxis(0), (9, 3700)),
    "axis middle": (dt.PerAxis(1), (5, 7, 1030)),
    "axis last": (dt.PerAxis(-1), (37, 1029)),
    "axis last, short rows": (dt.PerAxis(-1), (6601, 5)),
    "token": (dt.PerToken(), (4, 17, 491)),
    "group 1": (dt.PerGroup(1), (8, 4100)),
    "group 3, ragged": (dt.PerGroup(3), (11, 3001)),
    "group 32, ragged": (dt.PerGroup(32), (33, 1001)),
    "group 128, ragged": (dt.PerGroup(128), (17, 2011)),
    "group 4 of axis 0": (dt.PerGroup(4, axis=0), (10, 3300)),
    "block 3x100, ragged": (dt.PerBlock(3, 100), (2, 20, 830)),
    "block 2x130, ragged": (dt.PerBlock(2, 130), (33, 1001)),
}
ESTIMATORS = {
    "of the convention": None,
    "identity": dt.ste.Identity(),
    "code": dt.ste.Clipped(),
    "code, exclusive": dt.ste.Clipped(bounds="exclusive"),
    "value": dt.ste.Clipped(on="value"),
    "value, exclusive": dt.ste.Clipped(on="value", bounds="exclusive"),
    "hard tanh": dt.ste.HardTanh(),
}
_SCALES = (0.0123, 0.3, 0.017, 1 / 3, 0.5, 2.0**-10, 3.7e4)
_BACKWARD = ("quantize_backward", "fake_quantize_backward")
_ESTIMATED = (*_BACKWARD, "fake_quantize_masked")


def dtype_of(name):
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


@contextmanager
def at(level=None, threads=None):
    """Run native kernels with this instruction set and this number of threads."""
    before, count = native.current_level(), dt.get_num_threads()
    native.set_level(level or before)
    dt.set_num_threads(threads or count)
    detent.plan._PLANS.clear()  # plans keep the instruction set that they were made with
    try:
        yield
    finally:
        native.set_level(before)
        dt.set_num_threads(count)
        detent.plan._PLANS.clear()


def difference(native_array, reference_array):
    """Describe the difference of two results; None if type, shape and every bit are equal (all NaNs are equal).

    A result may be several arrays.
    """
    if isinstance(reference_array, tuple):
        mismatches = (difference(*pair) for pair in zip(native_array, reference_array, strict=True))
        return next((each for each in mismatches if each is not None), None)
    a, b = np.asarray(native_array), np.asarray(reference_array)
    if a.dtype != b.dtype or a.shape != b.shape:
        return f"native {a.dtype}{a.shape}, reference {b.dtype}{b.shape}"
    a, b = np.ascontiguousarray(a).reshape(-1), np.ascontiguousarray(b).reshape(-1)
    words = f"u{a.dtype.itemsize}"
    unequal = a.view(words) != b.view(words)
    if a.dtype.kind not in "iu":
        with np.errstate(invalid="ignore"):  # signalling NaN
            unequal &= ~(np.isnan(a) & np.isnan(b))
    where = np.flatnonzero(unequal)
    if not where.size:
        return None
    first = where[0]
    return f"{where.size} of {a.size} differ, first at {first}: native {a[first]!r}, reference {b[first]!r}"


@dataclass(frozen=True)
class Trial:
    """One operation, its rules and the shape of its data; arrays are made from the seed on first use."""

    operation: str
    dtype: str = "float32"
    granularity: dt.granularity.Granularity = dt.PerTensor()
    shape: tuple = (67,)
    convention: str = "onnx"
    format: str = "int8"
    symmetric: bool | None = False
    rounding: str | None = None
    ste: dt.ste.Estimator | None = None
    nan: str | None = None
    seed: int = 0

    @cached_property
    def params(self):
        spec = dt.QuantSpec(
            self.format, self.granularity, symmetric=self.symmetric, convention=self.convention, rounding=self.rounding
        )
        sets = self.granularity.tiling(self.shape).scale_shape
        rng = np.random.default_rng(self.seed)
        scale = rng.choice(_SCALES, size=sets).astype(np.float64 if self.dtype == "float64" else np.float32)
        zero_point = rng.integers(spec.qmin, spec.qmax, size=sets, endpoint=True) if not spec.symmetric else None
        return dt.QuantParams(spec, scale, zero_point)

    @cached_property
    def x(self):
        spec, rng = self.params.spec, np.random.default_rng(self.seed + 1)
        dtype = dtype_of(self.dtype)
        reach = spec.qmax - spec.qmin + 3
        steps = rng.integers(-2 * reach, 2 * reach, size=self.shape, endpoint=True) / 2
        with np.errstate(all="ignore"):
            near = np.asarray(steps * self._spread_scale()).astype(dtype)
            x = np.nextafter(near, rng.choice([-inf, 0.0, inf], size=self.shape).astype(dtype))
            x = np.where(rng.random(self.shape) < 0.5, near, x)
        return self._sprinkle(rng, x, [nan] if self._may_hold_nan else [])

    @cached_property
    def g(self):
        rng = np.random.default_rng(self.seed + 2)
        return self._sprinkle(rng, rng.normal(size=self.shape).astype(dtype_of(self.dtype)), [nan])

    @cached_property
    def codes(self):
        spec = self.params.spec
        rng = np.random.default_rng(self.seed + 3)
        return rng.integers(spec.qmin, spec.qmax, size=self.shape, endpoint=True).astype(spec.format.storage)

    @cached_property
    def mask(self):
        rng = np.random.default_rng(self.seed + 4)
        return rng.integers(0, 256, size=-(-prod(self.shape) // 8), dtype=np.uint8)

    @property
    def inputs(self):
        """The names of the arrays that the operation reads, in the order of the public function."""
        special = {
            "dequantize": ("codes",),
            "dequantize_backward": ("g",),
            "fake_quantize_masked_backward": ("g", "mask"),
        }
        return special.get(self.operation, ("g", "x") if self.operation in _BACKWARD else ("x",))

    @property
    def _may_hold_nan(self):
        return self.nan != "raise" and (self.operation != "quantize" or self.nan is not None)

    def _spread_scale(self):
        tiling = self.granularity.tiling(self.shape)
        blocks = [np.arange(size) // block for size, block in zip(tiling.shape, tiling.block, strict=True)]
        scale = self.params.scale.astype(np.float64).reshape(tiling.grid)
        return scale[np.ix_(*blocks)] if blocks else scale

    def _sprinkle(self, rng, array, more):
        """The array, with one element in eight replaced by a special value."""
        info = ml_dtypes.finfo(array.dtype)
        small, large = float(info.smallest_subnormal), float(info.max)
        odd = [0.0, -0.0, inf, -inf, small, -3 * small, float(info.smallest_normal), large, -large, 6e-8, -65519, *more]
        with np.errstate(over="ignore"):
            chosen = rng.choice(np.array(odd), size=array.shape).astype(array.dtype)
        replaced = rng.random(array.shape) < 0.125
        return np.asarray(np.where(replaced, chosen, array)).astype(array.dtype).reshape(array.shape)

    def run(self, kernels, arrays=None, out=None):
        """Run the operation with these kernels; ``arrays`` replace the trial's own arrays."""
        given = [getattr(self, name) for name in self.inputs] if arrays is None else arrays
        options = {"ste": self.ste} if self.operation in _ESTIMATED else {}
        options |= {"nan": self.nan} if self.nan is not None else {}
        with dt.use_kernels(kernels):
            plan = dt.Plan.select(
                self.operation, shape=given[0].shape, dtype=dtype_of(self.dtype), spec=self.params.spec, **options
            )
            assert plan.kernel.backend == kernels
            plan.check(*given, self.params, out)
            return plan.run(*given, self.params, out=out)


def native_result(trial, arrays=None, out=None):
    return trial.run("native", arrays, out)


def reference_result(trial, arrays=None):
    return trial.run("reference", arrays)
