"""Properties of scales and zero points for every range, code range, symmetry and zero-range rule."""

from dataclasses import replace

import numpy as np
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

import detent as dt
from detent.convention import ZeroRange

from .cases import INTEGERS, same_bits

ZERO_RANGES = (
    *(ZeroRange(kind) for kind in ("unit", "unit_at_qmin")),
    ZeroRange("eps", 2.0**-23),
    ZeroRange("width", 0.5),
)
BOUNDS = st.floats(-(2.0**100), 2.0**100, width=32)
CONVENTIONS = [
    replace(dt.Convention.torch_fused, name="mine", symmetric_scale=rule, zero_range=zero_range, include_zero=include)
    for rule in ("tight", "qmax", "half_span")
    for zero_range in ZERO_RANGES
    for include in (True, False)
]
TIGHT = CONVENTIONS[0]


@st.composite
def code_ranges(draw):
    """A spec with any code range of its format, including ranges on one side of zero."""
    form = dt.formats.FORMATS[draw(st.sampled_from(INTEGERS))]
    codes = st.sampled_from([form.qmin, form.qmax, 0, 1, -1]) | st.integers(form.qmin, form.qmax)
    qmin, qmax = sorted((draw(codes), draw(codes)))
    try:
        return dt.QuantSpec(
            form, symmetric=draw(st.booleans()), convention=draw(st.sampled_from(CONVENTIONS)), qmin=qmin, qmax=qmax
        )
    except dt.SpecError:  # no positive code
        assume(False)


def from_range(kernels, spec, lo, hi):
    with dt.use_kernels(kernels):
        return dt.QuantParams.from_range(spec, lo, hi)


@given(code_ranges(), BOUNDS, BOUNDS)
@example(dt.QuantSpec("int8", symmetric=True, convention=TIGHT, qmin=0), -2.0, -1.0)
@example(dt.QuantSpec("int8", symmetric=True, convention=TIGHT, qmin=0), -2.0, 0.0)
@example(dt.QuantSpec("int8", symmetric=True, convention=dt.Convention.torch_fused, qmin=0, qmax=1), -5.0, -5.0)
def test_every_range_has_a_positive_scale_and_a_zero_point_among_the_codes(spec, one, other):
    lo, hi = min(one, other), max(one, other)
    params = from_range("auto", spec, lo, hi)
    assert np.finfo(np.float32).smallest_normal <= params.scale < np.inf
    assert spec.qmin <= params.zero_point <= spec.qmax
    reference = from_range("reference", spec, lo, hi)
    assert same_bits(params.scale, reference.scale)
    assert same_bits(params.zero_point, reference.zero_point)


@settings(suppress_health_check=[HealthCheck.filter_too_much])
@given(code_ranges(), BOUNDS, BOUNDS)
def test_symmetric_codes_reach_both_bounds_where_there_are_codes_of_that_sign(spec, one, other):
    assume(spec.symmetric and spec.convention.symmetric_scale != "half_span")
    lo, hi = min(one, other), max(one, other)
    params = from_range("auto", spec, lo, hi)
    below, above = ((code - int(params.zero_point)) * float(params.scale) for code in (spec.qmin, spec.qmax))
    assert hi <= above * (1 + 2.0**-23)
    if spec.convention.symmetric_scale == "tight" and below:
        assert below * (1 + 2.0**-23) <= lo
