"""torch.compile of the decomposed formula, written into memory made beforehand. Compiling takes long: few cases."""

from collections.abc import Iterator

import numpy as np
import torch
from case import Case, Contestant, SkippedError

from peers.numpy_ufuncs import blocked, numbers
from peers.torch_eager import tensor

GRANULARITIES = ("tensor", "axis0", "group32")


def enter(case: Case) -> Iterator[Contestant]:
    """The compiled contestant, for float32 fake quantization of a million elements and more."""
    if case.operation != "fake_quantize" or case.dtype != "float32" or case.size < 2**20:
        raise SkippedError("torch.compile: only float32 fake_quantize from 2^20 elements")
    if case.granularity not in GRANULARITIES:
        raise SkippedError(f"torch.compile: only {', '.join(GRANULARITIES)}")
    low, high = case.spec().qmin, case.spec().qmax

    def formula(x: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_((torch.clamp(torch.round(x / scale) + zero, low, high) - zero) * scale)

    compiled = torch.compile(formula, dynamic=False)
    out = np.empty(blocked(case), case.real)
    operands = [tensor(case.x).view(blocked(case)), *map(torch.from_numpy, numbers(case)), torch.from_numpy(out)]
    yield Contestant("torch.compile", lambda: compiled(*operands), lambda: [out.reshape(case.shape)])
