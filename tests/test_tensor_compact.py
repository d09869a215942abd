"""Compact parameters: the documented number of bytes, and exact round trips."""

import numpy as np
import pytest

import detent as dt
from detent.tensor import compact, expand

X = np.random.default_rng(0).normal(size=(5, 70)).astype(np.float32)
SPECS = [
    "int4",
    "uint3/axis0",
    "int5/axis1/affine",
    "uint8/group16",
    "nf4/token",
    "mxfp4",
    "mxfp8/group16",
    "nvfp4",
    "uint16/block2x8",
]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("spec", SPECS)
def test_round_trip_and_size(spec, dtype):
    params = dt.QuantParams.from_data(spec, X.astype(dtype))
    arrays = compact(params)
    again = expand(params.spec, arrays, params.scale.shape)
    assert np.array_equal(again.scale, params.scale)
    assert np.array_equal(again.zero_point, params.zero_point)
    if params.spec.scale_format == "float":
        assert again == params
    assert sum(array.nbytes for array in arrays.values()) == -(-params.parameter_bits() // 8)


@pytest.mark.parametrize(
    ("spec", "names"),
    [
        ("int4", {"scale"}),
        ("uint4", {"scale", "zero_point"}),
        ("mxfp4", {"scale"}),
        ("nvfp4", {"block_scale", "tensor_scale"}),
    ],
)
def test_only_what_cannot_be_derived(spec, names):
    assert set(compact(dt.QuantParams.from_data(spec, X))) == names


def test_mx_exponents_are_biased_by_127():
    params = dt.QuantParams("mxfp4", 2.0 ** np.array([[-126, 0, 127]]))
    assert compact(params)["scale"].tolist() == [[1, 127, 254]]


@pytest.mark.parametrize("name", ["block_scale", "tensor_scale", "scale", "zero_point"])
def test_missing_or_extra_arrays(name):
    for spec in ("nvfp4", "uint4/group16"):
        params = dt.QuantParams.from_data(spec, X)
        arrays = compact(params)
        changed = {k: v for k, v in arrays.items() if k != name} if name in arrays else arrays | {name: np.ones(1)}
        with pytest.raises(dt.FileFormatError, match="expected exactly"):
            expand(params.spec, changed, params.scale.shape)


@pytest.mark.parametrize(
    "wrong", [np.ones(5), np.ones((5, 5), np.float16), np.ones((5, 1), np.float32)], ids=["rank", "dtype", "shape"]
)
def test_misshapen_scales(wrong):
    params = dt.QuantParams.from_data("int4/group16", X)
    with pytest.raises(dt.FileFormatError, match=r"\(5, 5\)"):
        expand(params.spec, {"scale": wrong}, params.scale.shape)
