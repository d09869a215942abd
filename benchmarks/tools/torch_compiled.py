"""torch.compile of the decomposed formula, with a preallocated output; few cases, because compiling is slow."""

from collections.abc import Iterator

import numpy as np
import torch
from case import Case, SkippedError, Tool

from tools.numpy_ufuncs import broadcast_params, grouped_shape
from tools.torch_eager import tensor

GRANULARITIES = ("tensor", "axis0", "group32")


def tools_for(case: Case) -> Iterator[Tool]:
    """Yield torch.compile for float32 fake quantization of 2^20 elements or more."""
    if case.operation != "fake_quantize" or case.dtype != "float32" or case.size < 2**20:
        raise SkippedError("torch.compile: only float32 fake_quantize from 2^20 elements")
    if case.granularity not in GRANULARITIES:
        raise SkippedError(f"torch.compile: only {', '.join(GRANULARITIES)}")
    qmin, qmax = case.spec().qmin, case.spec().qmax

    def formula(x: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_((torch.clamp(torch.round(x / scale) + zero, qmin, qmax) - zero) * scale)

    compiled = torch.compile(formula, dynamic=False)
    out = np.empty(grouped_shape(case), case.real)
    operands = [
        tensor(case.x).view(grouped_shape(case)),
        *map(torch.from_numpy, broadcast_params(case)),
        torch.from_numpy(out),
    ]
    yield Tool("torch.compile", lambda: compiled(*operands), lambda: [out.reshape(case.shape)])
