"""Granularities: strings, dictionaries and the tilings of odd shapes."""

from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import detent as dt
from detent.granularity import get_granularity, granularity_from_dict
from detent.kernels.reference.sets import counts

STRINGS = {
    "tensor": dt.PerTensor(),
    "axis0": dt.PerAxis(0),
    "axis-1": dt.PerAxis(-1),
    "token": dt.PerToken(),
    "group128": dt.PerGroup(128),
    "group32@0": dt.PerGroup(32, axis=0),
    "group32@-2": dt.PerGroup(32, axis=-2),
    "block128x64": dt.PerBlock(128, 64),
    "block7": dt.PerBlock(7),
    "block1x2x3": dt.PerBlock(1, 2, 3),
}


@pytest.mark.parametrize(("text", "value"), STRINGS.items())
def test_strings_and_dictionaries(text, value):
    assert get_granularity(text) == value
    assert str(value) == text
    assert granularity_from_dict(value.to_dict()) == value
    assert hash(granularity_from_dict(value.to_dict())) == hash(value)


def test_group_along_the_last_axis_has_one_short_form():
    assert str(get_granularity("group32@-1")) == "group32"


SIZES = st.lists(st.integers(0, 7), min_size=1, max_size=3).map(tuple)


@st.composite
def tiled(draw):
    """A granularity that fits a shape, the scale shape that docs/numerics.md defines, and the set of each element."""
    shape = draw(SIZES)
    rank = len(shape)
    kind = draw(st.sampled_from(["tensor", "axis", "token", "group", "block"]))
    if kind == "tensor":
        return dt.PerTensor(), shape, (), lambda index: ()
    if kind == "token":
        return dt.PerToken(), shape, shape[:-1], lambda index: index[:-1]
    axis = draw(st.integers(-rank, rank - 1))
    if kind == "axis":
        return dt.PerAxis(axis), shape, (shape[axis],), lambda index: (index[axis],)
    if kind == "group":
        size, at = draw(st.integers(1, 9)), axis % rank
        blocks = tuple(size if a == at else 1 for a in range(rank))
        granularity = dt.PerGroup(size, axis)
    else:
        sizes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=rank))
        blocks = (1,) * (rank - len(sizes)) + tuple(sizes)
        granularity = dt.PerBlock(*sizes)
    grid = tuple(-(-d // b) for d, b in zip(shape, blocks, strict=True))
    return granularity, shape, grid, lambda index: tuple(i // b for i, b in zip(index, blocks, strict=True))


@given(tiled())
def test_tiling_puts_every_element_into_its_set(case):
    granularity, shape, scale_shape, set_of = case
    tiling = granularity.tiling(shape)
    assert (tiling.shape, tiling.scale_shape) == (shape, scale_shape)
    assert tiling.sets == prod(scale_shape) == prod(tiling.grid)
    numbers = np.arange(tiling.sets).reshape(scale_shape)
    elements = np.broadcast_to(tiling.spread(numbers), shape)
    members = np.zeros(scale_shape, int)
    for index in np.ndindex(shape):
        assert elements[index] == numbers[set_of(index)]
        members[set_of(index)] += 1
    if 0 not in shape:
        assert counts(tiling) == members.ravel().tolist()


@given(tiled())
def test_params_from_data_have_the_range_of_each_set(case):
    granularity, shape, scale_shape, set_of = case
    if 0 in shape:
        return
    x = np.random.default_rng(prod(shape)).normal(size=shape)
    lo, hi = np.full(scale_shape, np.inf), np.full(scale_shape, -np.inf)
    for index in np.ndindex(shape):
        lo[set_of(index)] = min(lo[set_of(index)], x[index])
        hi[set_of(index)] = max(hi[set_of(index)], x[index])
    params = dt.QuantParams.from_data(dt.QuantSpec("uint8", granularity), x)
    assert np.array_equal(params.min_val, lo)
    assert np.array_equal(params.max_val, hi)


def test_a_group_larger_than_its_axis_is_one_ragged_group():
    assert dt.PerGroup(128).tiling((2, 5)).scale_shape == (2, 1)
    assert dt.PerBlock(8, 8).tiling((3, 20)).scale_shape == (1, 3)


def test_repr_is_the_call():
    names = {name: getattr(dt, name) for name in ("PerTensor", "PerAxis", "PerToken", "PerGroup", "PerBlock")}
    assert all(eval(repr(value), names) == value for value in STRINGS.values())


@pytest.mark.parametrize("text", ["int8/axis64", "int8/axis-65", "int8/group4@64"])
def test_axes_that_no_array_has(text):
    with pytest.raises(dt.SpecError, match=r"axis must be an integer in -64\.\.63, got"):
        dt.QuantSpec.parse(text)


def test_per_channel_is_a_spelling_of_per_axis():
    assert dt.PerChannel(axis=1) == dt.PerAxis(1)
    assert dt.PerChannel() == dt.PerAxis(0)
    assert repr(dt.PerChannel(1)) == repr(dt.PerAxis(1)) == "PerAxis(axis=1)"
    assert granularity_from_dict(dt.PerChannel(1).to_dict()) == dt.PerAxis(1)
    assert dt.QuantSpec("int8", dt.PerChannel()) == dt.QuantSpec.parse("int8/axis0")
    assert isinstance(dt.PerAxis(0), dt.PerChannel)


@pytest.mark.parametrize(
    "make",
    [
        lambda: get_granularity("channel"),
        lambda: dt.QuantSpec("int8", "channel"),
        lambda: dt.QuantSpec.parse("int8/channel"),
        lambda: dt.quantize(np.ones((2, 3)), "int8/channel/torch"),
        lambda: dt.FakeQuantize("int8/channel"),
    ],
)
def test_channel_needs_a_layer(make):
    with pytest.raises(dt.SpecError, match=r"only for the weight of a dt\.Rule.*axis0"):
        make()
