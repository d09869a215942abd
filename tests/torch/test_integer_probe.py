"""The probe finds kernels that are not exact, and a process without VNNI computes the same bits."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from detent.torch import integer_probe  # noqa: E402
from detent.torch.integer_probe import IntegerKernels, integer_kernels  # noqa: E402


@pytest.fixture(autouse=True)
def fresh_probe():
    integer_kernels.cache_clear()
    yield
    integer_kernels.cache_clear()


def saturating(x, weight):
    """Multiply as AVX2 kernels do: two products in an int16 accumulator."""
    wide = x.int().unsqueeze(1) * weight.int().unsqueeze(0)
    wide = torch.nn.functional.pad(wide, (0, wide.shape[-1] % 2))
    return wide.unflatten(-1, (-1, 2)).sum(-1).clamp(-(2**15), 2**15 - 1).sum(-1)


def test_saturating_matmul_is_not_exact(monkeypatch):
    monkeypatch.setattr(integer_probe, "multiply_codes", saturating)
    assert not integer_kernels().matmul


def test_missing_operators_are_not_exact(monkeypatch):
    def missing(*_):
        raise AttributeError("'_OpNamespace' 'onednn' object has no attribute 'qconv_pointwise'")

    monkeypatch.setattr(integer_probe, "convolve_codes", missing)
    assert not integer_kernels().convolution


def test_float_convolutions_of_small_integers_are_exact():
    assert integer_kernels().float_convolution


def test_notes_name_the_kernels():
    assert IntegerKernels(True, True, True).note == "int8 kernels"
    assert "not exact" in IntegerKernels(False, False, True).note
    assert "int8 matmul" in IntegerKernels(True, False, True).note


SCRIPT = """
import hashlib, torch, detent.torch as qt
from torch import nn
from detent.torch.integer_probe import integer_kernels
torch.manual_seed(0)
net = nn.Sequential(nn.Conv2d(24, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, groups=16), nn.ReLU(),
                    nn.Flatten(), nn.Linear(16 * 36, 40), nn.ReLU(), nn.Linear(40, 8))
qt.prepare(net, "w8a8", arithmetic="integer")
x = torch.randint(-40, 41, (6, 24, 8, 8)) / 16
net(x)  # ranges from integer products, which do not depend on the CPU
net.eval()
with torch.no_grad():
    y = net(x)
print(integer_kernels().matmul, integer_kernels().convolution, hashlib.sha256(y.numpy().tobytes()).hexdigest())
"""


def run(**variables):
    environment = {**os.environ, **variables}
    command = [sys.executable, "-c", SCRIPT]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()


def test_same_bits_without_vnni():
    default, narrow = run(), run(ONEDNN_MAX_CPU_ISA="AVX2")
    assert narrow[:2] == ["False", "False"] or default[:2] == ["False", "False"]
    assert narrow[2] == default[2]
