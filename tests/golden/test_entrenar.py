"""entrenar: the documented behavior of FakeQuantize, its calibration and its two backward passes.

Documented: ``q4()``, ``q8()``, ``calibrate``, ``forward_with_calibration`` (calibrates once), a straight-through
``backward``, ``backward_clamped``, ``num_levels``, ``is_initialized``; per-channel and per-group tensors.
"""

from functools import partial

import numpy as np
import pytest

import detent as dt

from .tables import number, same_bits

INT8 = "int8/tensor/symmetric/entrenar"
INT4 = "int4/tensor/symmetric/entrenar"
UINT8 = "uint8/tensor/affine/entrenar"
fixed = partial(dt.FakeQuantize.from_bits, convention="entrenar")


def array(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def operator(spec: str) -> dt.FakeQuantize:
    """An operator without calibration."""
    return dt.FakeQuantize(spec, mode=dt.Fixed())


# ---- configuration ----


def test_q4() -> None:
    fq = dt.FakeQuantize.q4()
    assert (fq.bits, fq.symmetric, fq.quant_range()) == (4, True, (-7, 7))


def test_q8() -> None:
    fq = dt.FakeQuantize.q8()
    assert (fq.bits, fq.symmetric, fq.quant_range()) == (8, True, (-127, 127))


@pytest.mark.parametrize("bits", range(2, 10))
def test_symmetric_levels(bits: int) -> None:
    # the narrow range -(2^(b-1) - 1) .. 2^(b-1) - 1
    assert operator(f"int{bits}/tensor/symmetric/entrenar").num_levels == 2**bits - 1


@pytest.mark.parametrize("bits", [4, 8])
def test_asymmetric_range(bits: int) -> None:
    assert operator(f"uint{bits}/tensor/affine/entrenar").quant_range() == (0, 2**bits - 1)


# ---- calibration ----


@pytest.mark.parametrize("make", [dt.FakeQuantize.q4, dt.FakeQuantize.q8])
def test_nothing_is_initialized_at_first(make: type) -> None:
    assert not make().is_initialized


def test_calibrate_initializes() -> None:
    fq = operator(INT8)
    fq.calibrate(array(0.0, 1.0))
    assert fq.is_initialized


def test_symmetric_calibration() -> None:
    fq = operator(INT8)
    fq.calibrate(array(0.0, 1.0, -2.0, 1.5, -1.5))
    assert (fq.scale, fq.zero_point) == (number("2/127"), 0)


def test_asymmetric_calibration() -> None:
    fq = operator(UINT8)
    fq.calibrate(array(0.0, 1.0, 2.0, 3.0, 4.0))
    assert (fq.scale, fq.zero_point) == (number("4/255"), 0)


def test_all_positive_calibration_is_not_widened_to_zero() -> None:
    fq = operator(UINT8)
    fq.calibrate(array(10.0, 11.0, 12.0, 13.0, 14.0))
    assert (fq.scale, fq.zero_point) == (number("4/255"), 0)


def test_calibration_on_zeros_gives_the_smallest_scale() -> None:
    fq = operator(INT8)
    fq.calibrate(array(0.0, 0.0, 0.0))
    assert fq.scale == number("1e-10")


def test_a_second_calibration_replaces_the_first() -> None:
    fq = operator(INT8)
    fq.calibrate(array(127.0))
    fq.calibrate(array(254.0))
    assert fq.scale == 2.0


# ---- forward ----


def test_forward_on_calibrated_levels() -> None:
    # s = 127 / 127 = 1; 0.5 -> 1, away from zero
    fq = operator(INT8)
    fq.calibrate(array(0.0, 127.0, -127.0))
    assert same_bits(fq.forward(array(0.0, 0.5, -0.5, 1000.0)), array(0.0, 1.0, -1.0, 127.0))


def test_forward_with_calibration_calibrates_the_first_time() -> None:
    fq = operator(INT4)
    fq.forward_with_calibration(array(-14.0, 7.0))
    assert fq.scale == 2.0


def test_forward_with_calibration_returns_the_calibrated_values() -> None:
    # s = 14 / 7 = 2: 7 / 2 = 3.5 -> 4 -> 8
    assert same_bits(operator(INT4).forward_with_calibration(array(-14.0, 7.0)), array(-14.0, 8.0))


def test_forward_with_calibration_calibrates_once() -> None:
    fq = operator(INT4)
    fq.forward_with_calibration(array(-14.0, 7.0))
    fq.forward_with_calibration(array(700.0))
    assert fq.scale == 2.0


def test_forward_does_not_calibrate() -> None:
    fq = fixed(8, True, 0.5)
    fq.forward(array(1000.0))
    assert fq.scale == 0.5


def test_free_function() -> None:
    # fake_quantize(tensor, bits, symmetric) of entrenar: calibrate on the tensor, then forward
    x = array(0.0, 1.0, -7.0, 2.5)
    y = dt.fake_quantize(x, dt.QuantParams.from_data(INT4, x))
    assert same_bits(y, array(0.0, 1.0, -7.0, 3.0))


# ---- backward ----


def test_plain_backward_passes_everything() -> None:
    fq = fixed(8, True, 0.5)
    fq.forward(array(0.0, 1000.0, -1000.0, 1.0))
    assert same_bits(fq.backward(array(1.0, 2.0, 3.0, 4.0)), array(1.0, 2.0, 3.0, 4.0))


def test_clamped_backward() -> None:
    # four bits, scale 1: the range is [-7, 7]
    fq = fixed(4, True, 1.0)
    assert same_bits(fq.backward_clamped(array(1.0, 1.0, 1.0), array(0.5, 10.0, -10.0)), array(1.0, 0.0, 0.0))


def test_clamped_backward_includes_the_ends() -> None:
    fq = fixed(4, True, 1.0)
    assert same_bits(fq.backward_clamped(array(1.0, 1.0), array(7.0, -7.0)), array(1.0, 1.0))


def test_clamped_backward_looks_at_the_value() -> None:
    # 7.25 has code 7, but is outside [-7, 7]
    assert same_bits(fixed(4, True, 1.0).backward_clamped(array(1.0), array(7.25)), array(0.0))


def test_clamped_backward_counts_the_zero_point() -> None:
    # [-64, 63.5]; entrenar uses [0, 127.5] here and stops every negative x
    fq = fixed(8, False, 0.5, 128)
    assert same_bits(fq.backward_clamped(array(1.0, 1.0, 1.0), array(-1.0, 63.5, 100.0)), array(1.0, 1.0, 0.0))


def test_clamped_backward_refuses_other_shapes() -> None:
    # entrenar truncates to the shorter of the two
    with pytest.raises(dt.ShapeError):
        fixed(4, True, 1.0).backward_clamped(array(1.0), array(1.0, 2.0))


# ---- what entrenar accepts and detent rejects ----


def test_calibrating_on_nothing_is_refused() -> None:
    # entrenar ignores it and continues with scale 1
    with pytest.raises(dt.RangeError):
        operator(INT8).calibrate(array())


def test_forward_before_calibration_is_refused() -> None:
    # entrenar: scale 1
    with pytest.raises(dt.NotCalibratedError):
        operator(INT8).forward(array(1.0))


def test_nan_stays_nan() -> None:
    # entrenar: NaN becomes 0 in the conversion to an integer
    assert np.isnan(fixed(8, True, 0.5).forward(array(float("nan")))).all()


def test_nan_can_become_the_zero_point() -> None:
    params = dt.QuantParams(dt.QuantSpec.parse(INT8), scale=0.5)
    assert same_bits(dt.fake_quantize(array(float("nan")), params, nan="zero_point"), array(0.0))


# ---- tensors ----


def test_per_channel_scales() -> None:
    x = np.array([[127.0, 0.0], [-254.0, 0.0]], dtype=np.float32)
    assert dt.QuantParams.from_data("int8/axis0/symmetric/entrenar", x).scale.tolist() == [1.0, 2.0]


def test_per_group_scales_with_a_ragged_last_group() -> None:
    x = array(7.0, 0.0, -14.0, 0.0, 21.0)
    assert dt.QuantParams.from_data("int4/group2/symmetric/entrenar", x).scale.tolist() == [1.0, 2.0, 3.0]


def test_a_tensor_knows_its_memory() -> None:
    # 64 codes of 4 bits are 32 bytes; entrenar keeps one byte each
    x = np.linspace(-1.0, 1.0, 64, dtype=np.float32)
    assert dt.quantize(x, dt.QuantParams.from_data(INT4, x)).packed.nbytes == 32


def test_a_saved_tensor_keeps_its_zero_point(tmp_path: object) -> None:
    # entrenar's safetensors files omit it
    q = dt.quantize(array(-1.0, 0.5), dt.QuantParams(dt.QuantSpec.parse(UINT8), scale=0.5, zero_point=17))
    path = tmp_path / "q.safetensors"  # type: ignore[operator]  # pytest's tmp_path is a Path
    q.save(path)
    assert dt.QuantizedTensor.load(path).params.zero_point == 17
