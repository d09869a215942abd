"""Fake CUDA tensors on a machine without a GPU: shapes and operators without data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
from torch._dynamo.device_interface import CudaInterface
from torch._inductor.runtime.hints import DeviceProperties
from torch._subclasses.fake_tensor import FakeTensorMode

__all__ = ["fake_cuda"]

PROPERTIES = SimpleNamespace(
    multi_processor_count=108,
    major=8,
    minor=0,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    name="fake",
    total_memory=1 << 34,
    gcnArchName="gfx942",
    shared_memory_per_block_optin=166912,
    L2_cache_size=1 << 25,
    is_integrated=0,
)
aten = torch.ops.aten
_real_tensor = torch.tensor


def _tensor(value: object, **options: object) -> torch.Tensor:
    """``torch.tensor``; on the fake GPU without values, because a CPU build cannot copy them there."""
    if options.get("device") is None:
        return _real_tensor(value, **options)
    return torch.empty(np.shape(value), **options)


def _getitem(x: torch.Tensor, index: object) -> torch.Tensor:
    """Slices of a tensor by operators; a CPU build of torch cannot index a CUDA tensor in Python."""
    parts = index if isinstance(index, tuple) else (index,)
    before = parts.index(...) if ... in parts else len(parts)
    axes = [*range(before), *range(x.ndim - len(parts) + before + 1, x.ndim)]
    for axis, part in zip(axes, (each for each in parts if each is not ...), strict=True):
        start, stop, step = part.indices(x.shape[axis])
        x = aten.slice(x, axis, start, stop, step)
    return x


@contextmanager
def fake_cuda(*, compiling: bool, amd: bool = False) -> Iterator[FakeTensorMode]:
    """A fake tensor mode in which torch believes that there is one NVIDIA GPU (sm_80) or one AMD GPU (gfx942)."""
    replaced = {
        "torch.compiler.is_compiling": lambda: compiling,
        "torch.cuda._lazy_init": lambda: None,
        "torch.cuda.is_available": lambda: True,
        "torch.cuda.current_device": lambda: 0,
        "torch.cuda.get_device_properties": lambda *_: PROPERTIES,
        "torch.cuda.get_device_capability": lambda *_: (8, 0),
        "torch._inductor.utils.get_gpu_type": lambda: "cuda",
        "torch._dynamo.device_interface.caching_worker_device_properties": {"cuda": [PROPERTIES]},
        "torch.utils._triton.triton_hash_with_backend": lambda: "no backend",
        "torch.tensor": _tensor,
        "torch.version.hip": "6.4" if amd else None,
    }
    properties = DeviceProperties("cuda", 0, 108, 80, 8, 65536, 2048, 1024, 32)
    if amd:
        properties = DeviceProperties("hip", 0, 304, "gfx942", 9, 65536, 2048, 1024, 64)
    with ExitStack() as stack:
        for name, value in replaced.items():
            stack.enter_context(mock.patch(name, value))
        stack.enter_context(mock.patch.object(CudaInterface.Worker, "current_device", staticmethod(lambda: 0)))
        stack.enter_context(mock.patch.object(torch.Tensor, "__getitem__", _getitem))
        stack.enter_context(mock.patch.object(DeviceProperties, "create", classmethod(lambda *_: properties)))
        yield FakeTensorMode(allow_non_fake_inputs=True)
