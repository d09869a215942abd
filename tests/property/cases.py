"""Examples for the property tests: all kinds of specs, awkward parameters, and data on and next to rounding boundaries.

Data are drawn in steps of the scale: on ties, on codes and next to both, because conventions differ there. A drawn
element shrinks to a small number of steps, so a failing example is easy to read.
"""

from dataclasses import dataclass
from math import inf

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)
import numpy as np
from hypothesis import strategies as st

import detent as dt

__all__ = [
    "DTYPES",
    "INTEGERS",
    "NEAREST",
    "OTHERS",
    "PRESETS",
    "SCALES",
    "TILINGS",
    "Case",
    "all_specs",
    "cases",
    "edge_data",
    "make_params",
    "same_bits",
    "specs",
]

DTYPES = ("float16", "bfloat16", "float32", "float64")
INTEGERS = tuple(f"{sign}int{bits}" for bits in range(1, 17) for sign in ("", "u"))
OTHERS = ("float8_e4m3fn", "float8_e5m2", "float4_e2m1fn", "nf4")
PRESETS = tuple(dt.convention.PRESETS)
NEAREST = ("half_even", "half_away")
SCALES = (0.0123, 0.3, 0.017, 1 / 3, 0.5, 2.0**-10, 3.7e4)
TILINGS = (
    (dt.PerTensor(), (2, 3, 5)),
    (dt.PerAxis(0), (3, 7)),
    (dt.PerAxis(-2), (2, 3, 5)),
    (dt.PerToken(), (2, 3, 5)),
    (dt.PerGroup(4), (3, 10)),
    (dt.PerGroup(2, axis=0), (5, 6)),
    (dt.PerBlock(2, 4), (3, 10)),
)


# Hypothesis prints a dataclass field by field, including class variables, so a Convention would print its presets
# recursively. Print specs and params by their repr instead.
for _class in (dt.Convention, dt.QuantSpec, dt.QuantParams):
    _class._repr_pretty_ = lambda self, printer, _cycle: printer.text(repr(self))


def same_bits(a, b):
    """Whether two arrays have the same dtype, shape and bits, including the sign of zero."""
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def all_specs(convention, granularity=dt.PerTensor()):
    """All formats, symmetric and affine where both exist, and the named block formats."""
    for name in INTEGERS:
        wide = dt.formats.FORMATS[name].bits > 1
        for symmetric in (True, False) if wide else (False,):
            yield dt.QuantSpec(name, granularity, symmetric=symmetric, convention=convention)
    for name in OTHERS:
        yield dt.QuantSpec(name, granularity, convention=convention)
    for spec in (dt.mxfp4, dt.mxfp8, dt.mxfp8_e5m2, dt.nvfp4):
        yield spec.replace(granularity=granularity, convention=convention)


def make_params(rng, spec, shape):
    """Random parameters for data of that shape: awkward scales, any valid zero point."""
    scale_shape = spec.granularity.tiling(shape).scale_shape
    scale = rng.choice(SCALES, size=scale_shape)
    if spec.scale_format != "float":
        return dt.QuantParams.from_range(spec, -spec.qmax * scale, spec.qmax * scale)
    if spec.symmetric:
        return dt.QuantParams(spec, scale.astype(np.float32))
    zero_point = rng.integers(spec.qmin, spec.qmax, size=scale_shape, endpoint=True)
    return dt.QuantParams(spec, scale.astype(np.float32), zero_point)


def edge_data(rng, params, shape, dtype, nan=False):
    """Random data on codes, on ties, next to both, and outside the range; zeros of both signs and infinities."""
    scale = dt.dequantize_backward(np.ones(shape), params)
    reach = params.spec.qmax - params.spec.qmin + 2
    steps = rng.uniform(-reach, reach, size=shape)
    steps = np.where(rng.random(shape) < 0.7, np.round(2 * steps) / 2, steps)
    with np.errstate(over="ignore", under="ignore"):
        x = np.asarray(steps * scale).astype(dtype)
        x = np.asarray(np.nextafter(x, rng.choice([-inf, 0.0, inf], size=shape).astype(dtype)))
    special = np.array([0.0, -0.0, inf, -inf, *([np.nan] if nan else [])]).astype(dtype)
    replaced = rng.random(shape) < 0.15
    return np.where(replaced, rng.choice(special, size=shape), x).astype(dtype).reshape(shape)


@dataclass(frozen=True)
class Case:
    """One drawn example: parameters of a spec, and data to quantize with them."""

    params: dt.QuantParams
    x: np.ndarray

    @property
    def spec(self):
        return self.params.spec


@st.composite
def specs(draw, formats=INTEGERS + OTHERS, conventions=PRESETS, roundings=(None,), granularities=(dt.PerTensor(),)):
    """A spec; integer formats are symmetric or affine, and affine ones sometimes have a custom code range."""
    form = dt.formats.FORMATS[draw(st.sampled_from(formats))]
    common = {
        "granularity": draw(st.sampled_from(granularities)),
        "convention": draw(st.sampled_from(conventions)),
    }
    if not form.is_integer:
        return dt.QuantSpec(form, **common)
    common["rounding"] = draw(st.sampled_from(roundings))
    if form.bits > 1 and draw(st.booleans()):
        return dt.QuantSpec(form, symmetric=True, **common)
    if draw(st.booleans()):
        common["qmin"] = draw(st.integers(form.qmin, form.qmax - 1))
        common["qmax"] = draw(st.integers(common["qmin"] + 1, form.qmax))
    return dt.QuantSpec(form, symmetric=False, **common)


def _elements(spec):
    """Elements in steps of the scale: codes, ties, values between them, and infinities."""
    reach = int(spec.qmax - spec.qmin) + 2
    whole = st.integers(-reach, reach)
    return st.one_of(
        whole.map(float),
        whole.map(lambda k: k + 0.5),
        st.floats(-reach, reach, width=32),
        st.sampled_from([0.0, -0.0, inf, -inf, *(level for level in spec.format.finite_levels)]),
    )


@st.composite
def cases(draw, dtypes=DTYPES, max_size=12, **choices):
    """A Case with one parameter set."""
    spec = draw(specs(**choices))
    scale = np.float32(draw(st.one_of(st.sampled_from(SCALES), st.floats(2.0**-40, 2.0**40, width=32))))
    zero_point = None if spec.symmetric else draw(st.integers(spec.qmin, spec.qmax))
    params = dt.QuantParams(spec, scale, zero_point)
    steps = draw(st.lists(_elements(spec), min_size=1, max_size=max_size))
    towards = draw(st.lists(st.sampled_from([0.0, -inf, inf]), min_size=len(steps), max_size=len(steps)))
    dtype = draw(st.sampled_from(dtypes))
    with np.errstate(over="ignore", under="ignore"):
        x = (np.array(steps) * np.float64(scale)).astype(dtype)
        nudged = np.nextafter(x, np.array(towards).astype(dtype))
    return Case(params, np.where(np.array(towards) == 0.0, x, nudged))
