"""oxicuda-quant: the documented behavior of FakeQuantize and of the observers.

Documented: ``FakeQuantize(bits, symmetric, scale, zero_point)``, an ``enabled`` switch, ``update_params``,
``quant_range``, ``float_range``, ``backward(g, x)``, ``quantization_noise``, errors for bits outside 1..16 and for
scales that are not positive and finite.
"""

from functools import partial

import numpy as np
import pytest

import detent as dt

from .tables import number, same_bits

INT8 = "int8/tensor/symmetric/oxicuda"
fixed = partial(dt.FakeQuantize.from_bits, convention="oxicuda")


def array(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def test_one_comes_back_as_code_127() -> None:
    s = number("1/127")
    assert same_bits(fixed(8, True, s).forward(array(1.0)), array(number("127*s", s)))


def test_four_bits_on_the_unit_interval() -> None:
    # s = 8947849 * 2^-27; 0.5 / s = 67108864 / 8947849 = 7.5 - 3.9e-7, below the tie: 7
    s = number("1/15")
    expected = array(0.0, number("7*s", s), number("15*s", s))
    assert same_bits(fixed(4, False, s).forward(array(0.0, 0.5, 1.0)), expected)


def test_calling_is_forward() -> None:
    fq = fixed(8, True, 0.5)
    assert same_bits(fq(array(0.25, -1.25)), array(0.5, -1.5))


def test_forward_leaves_its_input_alone() -> None:
    x = array(1.5, -2.3, 0.7)
    fixed(8, True, 0.5).forward(x)
    assert same_bits(x, array(1.5, -2.3, 0.7))


def test_disabled_forward_returns_the_values_unchanged() -> None:
    fq = fixed(8, True, 0.01)
    fq.enabled = False
    x = array(1.5, -2.3, 0.7)
    assert same_bits(fq.forward(x), x)


def test_disabled_backward_passes_everything() -> None:
    fq = fixed(8, True, 0.5)
    fq.enabled = False
    assert same_bits(fq.backward(array(1.0, 2.0), array(0.0, 1000.0)), array(1.0, 2.0))


def test_enabled_is_the_default_and_can_be_switched_back_on() -> None:
    fq = fixed(8, True, 0.5)
    assert fq.enabled
    fq.enabled = False
    fq.enabled = True
    assert same_bits(fq.forward(array(0.25)), array(0.5))


def test_backward_passes_inside() -> None:
    fq = fixed(8, True, number("1/127"))
    assert same_bits(fq.backward(array(1.0, -1.0), array(0.5, -0.5)), array(1.0, -1.0))


def test_backward_stops_outside() -> None:
    fq = fixed(8, True, number("1/127"))
    assert same_bits(fq.backward(array(1.0, 1.0), array(2.0, -2.0)), array(0.0, 0.0))


def test_backward_without_x_uses_the_last_forward() -> None:
    fq = fixed(8, True, 0.5)
    fq.forward(array(63.5, 63.625))
    assert same_bits(fq.backward(array(1.0, 1.0)), array(1.0, 0.0))


def test_backward_refuses_other_lengths() -> None:
    with pytest.raises(dt.ShapeError):
        fixed(8, True, 0.01).backward(np.ones(4, np.float32), np.full(3, 0.5, np.float32))


@pytest.mark.parametrize("scale", [0.0, -0.01, float("nan"), float("inf"), float("-inf")])
def test_bad_scale_is_refused(scale: float) -> None:
    with pytest.raises(dt.ParamsError):
        fixed(8, symmetric=True, scale=scale)


@pytest.mark.parametrize("scale", [0.0, -0.01, float("nan"), float("inf")])
def test_update_with_a_bad_scale_is_refused(scale: float) -> None:
    with pytest.raises(dt.ParamsError):
        fixed(8, True, 0.5).update_params(scale, 0)


def test_a_refused_update_changes_nothing() -> None:
    fq = fixed(8, True, 0.5)
    with pytest.raises(dt.ParamsError):
        fq.update_params(-1.0, 0)
    assert fq.scale == 0.5


@pytest.mark.parametrize("bits", [0, 17, -1])
def test_bad_bits_are_refused(bits: int) -> None:
    with pytest.raises(dt.SpecError):
        fixed(bits, symmetric=False)


@pytest.mark.parametrize("bits", range(2, 17))
def test_symmetric_range_is_full(bits: int) -> None:
    fq = fixed(bits, True, 1.0)
    assert fq.quant_range() == (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


@pytest.mark.parametrize("bits", range(1, 17))
def test_asymmetric_range_is_unsigned(bits: int) -> None:
    assert fixed(bits, False, 1.0).quant_range() == (0, 2**bits - 1)


def test_float_range_of_a_symmetric_operator() -> None:
    assert fixed(8, True, 0.5).float_range() == (-64.0, 63.5)


def test_float_range_counts_the_zero_point() -> None:
    assert fixed(4, False, 0.5, 3).float_range() == (-1.5, 6.0)


def test_defaults_are_scale_one_and_zero_point_zero() -> None:
    fq = fixed(8, symmetric=True)
    assert (fq.scale, fq.zero_point) == (1.0, 0)


def test_fields() -> None:
    fq = fixed(4, symmetric=False, scale=0.5, zero_point=3)
    assert (fq.bits, fq.symmetric, fq.scale, fq.zero_point) == (4, False, 0.5, 3)


def test_update_params() -> None:
    fq = fixed(4, False, 1.0)
    fq.update_params(0.5, 3)
    assert (fq.scale, fq.zero_point) == (0.5, 3)


def test_noise_is_the_mean_squared_error() -> None:
    # 0.25 -> 0.5, 1 -> 1, -0.125 -> 0, 0 -> 0: (0.0625 + 0.015625) / 4
    assert fixed(8, True, 0.5).quantization_noise(array(0.25, 1.0, -0.125, 0.0)) == 0.01953125


def test_noise_of_nothing_is_zero() -> None:
    assert fixed(8, True, 0.5).quantization_noise(array()) == 0.0


def test_noise_of_a_fine_scale_is_small() -> None:
    x = np.arange(128, dtype=np.float32) / 128 - 0.5
    assert 0.0 < fixed(8, True, number("1/127")).quantization_noise(x) < 1e-5


def test_noise_while_disabled_is_zero() -> None:
    fq = fixed(8, True, 0.5)
    fq.enabled = False
    assert fq.quantization_noise(array(0.25)) == 0.0


def test_nan_stays_nan() -> None:
    assert np.isnan(fixed(8, True, 0.5).forward(array(float("nan")))).all()


# ---- what oxicuda accepts and detent rejects ----


def test_a_symmetric_operator_has_no_other_zero_point() -> None:
    with pytest.raises(dt.ParamsError):
        fixed(8, True, 0.5, 3)


def test_a_zero_point_outside_the_range_is_refused() -> None:
    with pytest.raises(dt.ParamsError):
        fixed(4, False, 0.5, 16)


def test_one_symmetric_bit_is_refused() -> None:
    # oxicuda: qmax = 0, so its observers return an infinite scale
    with pytest.raises(dt.SpecError):
        dt.QuantSpec.parse("int1/tensor/symmetric/oxicuda")


# ---- observers ----


def test_min_max_skips_what_is_not_finite() -> None:
    observer = dt.observers.MinMax().observe(array(1.0, float("nan"), -2.0, float("inf")))
    assert (observer.range().lo, observer.range().hi) == (-2.0, 1.0)


def test_min_max_counts_what_it_skips() -> None:
    assert dt.observers.MinMax().observe(array(1.0, float("nan"), float("-inf"))).nonfinite == 2


def test_min_max_keeps_the_extremes_of_all_batches() -> None:
    observer = dt.observers.MinMax().observe(array(-1.0, 2.0)).observe(array(-3.0, 0.0))
    assert (observer.range().lo, observer.range().hi) == (-3.0, 2.0)


def test_moving_average_ignores_a_batch_without_finite_values() -> None:
    observer = dt.observers.EMAMinMax(decay=0.5).observe(array(-1.0, 2.0)).observe(array(float("nan")))
    assert (observer.range().lo, observer.range().hi) == (-1.0, 2.0)


@pytest.mark.parametrize("make", [dt.observers.MinMax, dt.observers.EMAMinMax])
def test_an_observer_without_data_refuses(make: type) -> None:
    with pytest.raises(dt.NotCalibratedError):
        make().params(INT8)


def test_an_observer_gives_the_parameters_of_its_range() -> None:
    params = dt.observers.MinMax().observe(array(-2.5, 252.5)).params("uint8/tensor/affine/oxicuda")
    assert (params.scale, params.zero_point) == (1.0, 3)  # round(2.5), away from zero
