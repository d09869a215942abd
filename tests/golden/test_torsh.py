"""torsh-backend: the documented behavior of QuantizationParams and of the stored bytes.

Documented: constructors ``default``, ``new(scale, zero_point)``, ``int8_symmetric``, ``uint8_asymmetric``,
``int4_symmetric``, ``channel_wise``, ``block_wise``; ``from_statistics``, ``validate``, ``num_parameter_sets``,
``is_per_channel``, ``quantization_error_bound``, ``compression_ratio``.
"""

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

import detent as dt

from .tables import number, same_bits

INT8 = dt.QuantSpec.parse("int8/tensor/symmetric/torsh")
UINT8 = dt.QuantSpec.parse("uint8/tensor/affine/torsh")
Make = Callable[[], dt.QuantParams]


def array(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


# ---- constructors ----


@pytest.mark.parametrize(
    ("make", "format_", "symmetric", "zero_point"),
    [
        (dt.QuantParams.int8_symmetric, dt.int8, True, 0),
        (dt.QuantParams.uint8_asymmetric, dt.uint8, False, 128),
        (dt.QuantParams.int4_symmetric, dt.int4, True, 0),
    ],
)
def test_presets(make: Make, format_: dt.Format, symmetric: bool, zero_point: int) -> None:
    p = make()
    assert (p.spec.format, p.spec.symmetric, p.scale, p.zero_point) == (format_, symmetric, 1.0, zero_point)


def test_new_takes_scale_and_zero_point() -> None:
    p = dt.QuantParams(UINT8, scale=255.0, zero_point=128)
    assert (p.scale, p.zero_point) == (255.0, 128)


def test_channel_wise_has_one_set_per_channel() -> None:
    p = dt.QuantParams.channel_wise(64, dt.int8)
    assert (p.scale.shape, p.zero_point.shape) == ((64,), (64,))


def test_channel_wise_starts_at_scale_one() -> None:
    assert (dt.QuantParams.channel_wise(64, dt.int8).scale == 1.0).all()


def test_block_wise_remembers_its_size() -> None:
    assert dt.QuantParams.block_wise(128, dt.int8).spec.granularity == dt.PerGroup(128)


def test_no_range_is_known_at_first() -> None:
    p = dt.QuantParams.int8_symmetric()
    assert (p.min_val, p.max_val) == (None, None)


# ---- from_statistics ----


def test_symmetric_statistics() -> None:
    # twice the magnitude over the number of steps: 4 / 255
    p = dt.QuantParams(INT8, scale=1.0).from_statistics(-2.0, 2.0)
    assert (p.scale, p.zero_point) == (number("4/255"), 0)


def test_asymmetric_statistics() -> None:
    p = dt.QuantParams(UINT8, scale=1.0).from_statistics(0.0, 255.0)
    assert (p.scale, p.zero_point) == (1.0, 0)


def test_statistics_are_remembered() -> None:
    p = dt.QuantParams.int8_symmetric().from_statistics(-2.0, 2.0)
    assert (p.min_val, p.max_val) == (-2.0, 2.0)


def test_statistics_keep_the_spec() -> None:
    assert dt.QuantParams(INT8, scale=1.0).from_statistics(-2.0, 2.0).spec == INT8


def test_statistics_give_new_params() -> None:
    # torsh changes its params in place
    p = dt.QuantParams(INT8, scale=1.0)
    p.from_statistics(-2.0, 2.0)
    assert p.scale == 1.0


def test_statistics_of_channels_fill_every_channel() -> None:
    # torsh sets only the first channel
    p = dt.QuantParams.channel_wise(2, dt.int8).from_statistics([-127.0, -254.0], [0.0, 0.0])
    assert p.scale.tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("lo", "hi"), [(2.0, 1.0), (float("nan"), 1.0), (1.0, float("inf")), (float("-inf"), 1.0), (0.0, float("nan"))]
)
def test_impossible_statistics_are_refused(lo: float, hi: float) -> None:
    with pytest.raises(dt.RangeError):
        dt.QuantParams.uint8_asymmetric().from_statistics(lo, hi)


# ---- validate ----


@pytest.mark.parametrize(
    "p",
    [
        dt.QuantParams(UINT8, scale=1.0, zero_point=0),
        dt.QuantParams.channel_wise(64, dt.int8),
        dt.QuantParams.channel_wise(1, dt.int8),  # torsh requires more than one channel
        dt.QuantParams.block_wise(128, dt.int8),
    ],
)
def test_good_params_validate(p: dt.QuantParams) -> None:
    p.validate()


@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf"), float("nan")])
def test_bad_scales_are_refused(scale: float) -> None:
    with pytest.raises(dt.ParamsError):
        dt.QuantParams(UINT8, scale=scale)


def test_lengths_must_agree() -> None:
    with pytest.raises(dt.ShapeError):
        dt.QuantParams("int8/axis0/affine/torsh", scale=array(1.0, 2.0), zero_point=[0, 0, 0])


@pytest.mark.parametrize("zero_point", [-1, 256])
def test_a_zero_point_outside_the_type_is_refused(zero_point: int) -> None:
    with pytest.raises(dt.ParamsError):
        dt.QuantParams(UINT8, scale=1.0, zero_point=zero_point)


def test_symmetric_params_refuse_a_zero_point() -> None:
    with pytest.raises(dt.ParamsError):
        dataclasses.replace(dt.QuantParams(INT8, scale=1.0), zero_point=10)


def test_a_block_size_must_be_positive() -> None:
    with pytest.raises(dt.SpecError):
        dt.QuantParams.block_wise(0, dt.int8)


# ---- properties ----


def test_num_parameter_sets_of_a_tensor() -> None:
    assert dt.QuantParams(UINT8, scale=1.0).num_parameter_sets == 1


def test_num_parameter_sets_of_channels() -> None:
    assert dt.QuantParams.channel_wise(64, dt.int8).num_parameter_sets == 64


def test_is_per_channel() -> None:
    assert dt.QuantParams.channel_wise(64, dt.int8).is_per_channel


@pytest.mark.parametrize("make", [dt.QuantParams.int8_symmetric, lambda: dt.QuantParams.block_wise(128, dt.int8)])
def test_is_not_per_channel(make: Make) -> None:
    assert not make().is_per_channel


def test_error_bound_is_half_a_step() -> None:
    assert dt.QuantParams(INT8, scale=0.25).quantization_error_bound() == 0.125


def test_error_bound_takes_the_largest_step() -> None:
    p = dt.QuantParams("int8/axis0/symmetric/torsh", scale=array(0.25, 2.0, 0.5))
    assert p.quantization_error_bound() == 1.0


@pytest.mark.parametrize(
    ("make", "ratio"), [(dt.QuantParams.int8_symmetric, 4.0), (dt.QuantParams.int4_symmetric, 8.0)]
)
def test_compression_of_the_codes(make: Make, ratio: float) -> None:
    assert make().compression_ratio(include_params=False) == ratio


def test_compression_counts_the_params() -> None:
    # torsh ignores them: groups of 32 codes of 8 bits share 32 bits of scale, so 32 / (8 + 1)
    assert dt.QuantParams.block_wise(32, dt.int8).compression_ratio() == pytest.approx(32 / 9)


# ---- stored bytes ----


@pytest.mark.parametrize(
    ("spec", "x", "packed"),
    [
        ("int4/tensor/symmetric/torsh", [1.0, -1.0, 7.0], [0xF1, 0x07]),  # low nibble first; an odd tail is padded
        ("uint4/tensor/affine/torsh", [1.0, 15.0], [0xF1]),
        ("uint1/tensor/affine/torsh", [1.0, 0.0, 0.0, 1.0, 0, 0, 0, 0, 1.0], [0x09, 0x01]),  # lowest bit first
    ],
)
def test_packing(spec: str, x: list[float], packed: list[int]) -> None:
    q = dt.quantize(array(*x), dt.QuantParams(dt.QuantSpec.parse(spec), scale=1.0, zero_point=0))
    assert q.packed.tolist() == packed


def test_an_odd_number_of_nibbles_comes_back_whole() -> None:
    # torsh returns one element too many
    q = dt.quantize(array(1.0, -1.0, 7.0), dt.QuantParams(dt.QuantSpec.parse("int4/tensor/symmetric/torsh"), scale=1.0))
    assert same_bits(q.dequantize(), array(1.0, -1.0, 7.0))


def test_params_survive_json() -> None:
    # torsh cannot store them
    p = dt.QuantParams(UINT8, scale=0.1, zero_point=17)
    assert dt.QuantParams.from_json(p.to_json()) == p


# ---- fake quantize ----


def test_channels_of_the_first_axis() -> None:
    # each channel rounds with its own step: 0.75 / 0.5 = 1.5 -> 2 -> 1.0, 0.75 / 1 -> 1
    p = dt.QuantParams("int8/axis0/symmetric/torsh", scale=array(0.5, 1.0))
    x = np.array([[0.75, 0.25], [0.75, 0.5]], dtype=np.float32)
    assert same_bits(dt.fake_quantize(x, p), np.array([[1.0, 0.5], [1.0, 1.0]], dtype=np.float32))


def test_ten_and_five_stay_apart() -> None:
    # torsh's per-tensor symmetric helper gives 4.98 for both
    p = dt.QuantParams(INT8, scale=1.0).from_statistics(0.0, 10.0)
    five, ten = dt.fake_quantize(array(5.0, 10.0), p)
    assert abs(five - 5.0) <= p.quantization_error_bound() < ten - five
