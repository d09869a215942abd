"""Functions of the traced namespace: the forms that are used while torch compiles have the bits of the plain ones."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest

import detent as dt

torch = pytest.importorskip("torch")

from torch_bits import assert_same, tensor  # noqa: E402

from detent.torch import traced  # noqa: E402
from detent.torch import traced_namespace as xp  # noqa: E402

VALUES = np.array([0.0, 1e-45, 1e-40, 1.2e-38, 0.3, 0.5, 1.0, 1.5, 2.5, 8388607.5, 3e38, np.inf, np.nan])
X = np.concatenate([VALUES, -VALUES, np.random.default_rng(0).normal(size=4096) * 100])
FUNCTIONS = {
    "divide": xp.divide,
    "multiply": xp.multiply,
    "floor": lambda a, b: xp.floor(a),
    "abs": lambda a, b: xp.abs(a),
    "isnan": lambda a, b: xp.isnan(a),
    "isfinite": lambda a, b: xp.isfinite(a),
}
PLAIN = {"divide": np.divide, "multiply": np.multiply}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("compiling", [False, True])
def test_bits(name: str, dtype: str, compiling: bool) -> None:
    a = X.astype(dtype)
    b = np.random.default_rng(1).permutation(a)
    with np.errstate(all="ignore"):
        expected = PLAIN[name](a, b) if name in PLAIN else getattr(np, name)(a)
    with mock.patch("torch.compiler.is_compiling", return_value=compiling):
        assert_same(FUNCTIONS[name](tensor(a), tensor(b)), expected)


@pytest.mark.parametrize(
    "text", ["int8/tensor", "uint8/token/affine/compressed_tensors", "int4/group5/affine/torch", "nf4"]
)
def test_fake_quantize_in_the_compiled_form(text: str) -> None:
    """No compiler runs here, so this is quick; ``test_traced`` compiles."""
    spec = dt.QuantSpec.parse(text)
    x = np.concatenate([(np.arange(-400, 400) + 0.5) * 0.0123, X])[:4100].astype(np.float32).reshape(41, 100)
    shape = spec.granularity.tiling(x.shape).scale_shape
    params = dt.QuantParams(spec, np.full(shape, 0.0123, np.float32))
    with mock.patch("torch.compiler.is_compiling", return_value=True):
        y = traced.fake_quantize(tensor(x), tensor(params.scale), tensor(params.zero_point), spec)
    assert_same(y, dt.fake_quantize(x, params))
