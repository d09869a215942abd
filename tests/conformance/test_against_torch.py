"""Comparison with PyTorch: its fake quantization, forward and backward, against `Convention.torch`.

Checked here: on at least a million tie-adjacent points for each range of codes,
`torch.fake_quantize_per_tensor_affine` and `torch.fake_quantize_per_channel_affine` give detent's float32
bits, and their gradients detent's. Infinite and huge inputs per channel are excluded by name
(`KNOWN_WRONG`).
"""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

import detent as dt

from .points import MILLION, Batch, axis_batch, tensor_batches
from .ties import special_values

torch = pytest.importorskip("torch")

RANGES = {
    "int4": ("int4", -8, 7),
    "uint4": ("uint4", 0, 15),
    "int8": ("int8", -128, 127),
    "int8_narrow": ("int8", -127, 127),
    "uint8": ("uint8", 0, 255),
    "int16": ("int16", -32768, 32767),
    "uint16": ("uint16", 0, 65535),
}

KNOWN_WRONG = {
    "per channel, |x / s| >= 2^63": "x * (1 / s) is cast to int64 before the clamp: +inf gives qmin",
}
"""What torch 2.13.0 gets wrong, and why its verdict is not asked there."""


def _spec(name: str, granularity: dt.granularity.Granularity) -> dt.QuantSpec:
    fmt, qmin, qmax = RANGES[name]
    return dt.QuantSpec(fmt, granularity, symmetric=False, convention=dt.Convention.torch, qmin=qmin, qmax=qmax)


def _torch(name: str, batch: Batch, g: NDArray[np.float32]) -> tuple[NDArray, NDArray]:
    """(y, gradient of x) according to torch."""
    _, qmin, qmax = RANGES[name]
    x = torch.from_numpy(batch.x).requires_grad_()
    if batch.scale.ndim == 0:
        y = torch.fake_quantize_per_tensor_affine(x, float(batch.scale), int(batch.zero_point), qmin, qmax)
    else:
        axis = batch.granularity.axis % batch.x.ndim
        scale, zero = torch.from_numpy(batch.scale), torch.from_numpy(batch.zero_point)
        y = torch.fake_quantize_per_channel_affine(x, scale, zero, axis, qmin, qmax)
    y.backward(torch.from_numpy(g))
    return y.detach().numpy(), x.grad.numpy()


def _differing(name: str, batch: Batch) -> tuple[int, int]:
    """(values that differ in a bit, gradients that differ) between torch and detent."""
    params = batch.params(_spec(name, batch.granularity))
    g = np.random.default_rng(1).uniform(0.5, 2, size=batch.x.shape).astype(np.float32)
    y, gx = _torch(name, batch, g)
    ours, our_gx = dt.fake_quantize(batch.x, params), dt.fake_quantize_backward(g, batch.x, params)
    return int(np.sum(y.view(np.uint32) != ours.view(np.uint32))), int(np.sum(gx != our_gx))


@pytest.mark.parametrize("name", RANGES)
def test_per_tensor(name: str) -> None:
    points, differing = 0, np.zeros(2, dtype=int)
    for batch in tensor_batches(*RANGES[name][1:]):
        points += batch.x.size
        differing += _differing(name, batch)
    assert points >= MILLION
    assert differing.tolist() == [0, 0]


@pytest.mark.parametrize("axis", [0, -1])
@pytest.mark.parametrize("name", RANGES)
def test_per_channel(name: str, axis: int) -> None:
    batch = axis_batch(*RANGES[name][1:], axis)
    assert batch.x.size >= MILLION
    assert _differing(name, batch) == (0, 0)


@pytest.mark.parametrize("name", RANGES)
def test_special_values_per_tensor(name: str) -> None:
    _, qmin, qmax = RANGES[name]
    for zero in (qmin, qmax, 1, 2):
        batch = Batch(special_values(), np.array(0.3, np.float32), np.array(zero, np.int32), dt.PerTensor())
        assert _differing(name, batch) == (0, 0)


def test_known_wrong_per_channel_overflow_is_right_here() -> None:
    """detent clamps before it casts, per channel as per tensor."""
    x = np.array([[np.inf, 3e38, -np.inf, -3e38]], dtype=np.float32)
    params = dt.QuantParams(
        _spec("int8", dt.PerAxis(0)), scale=np.ones(1, np.float32), zero_point=np.zeros(1, np.int32)
    )
    assert dt.fake_quantize(x, params).tolist() == [[127.0, 127.0, -128.0, -128.0]]
