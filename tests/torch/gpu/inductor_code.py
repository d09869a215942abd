"""The CUDA code that Inductor writes for a function, made and compiled on a machine without a GPU.

A function is traced with fake CUDA tensors, lowered by Inductor, and its Triton kernels are compiled to PTX. This uses
private parts of the pinned torch version. Two parts of ``torch.compile`` are left out: the joint-graph and post-grad
passes, which need a CUDA build.
"""

# ruff: noqa: E402 - imports after the check for Triton

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import numpy as np
import pytest

triton = pytest.importorskip("triton", reason="needs Triton: make test-gpu")

import torch
import torch._inductor.config as inductor_config
from compiled_code import assembly_of
from torch._dynamo.device_interface import CudaInterface
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import triton_helpers, triton_heuristics
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

__all__ = ["fake_cuda", "kernels_of", "ptx_of"]

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
    gcnArchName="",
    shared_memory_per_block_optin=166912,
    L2_cache_size=1 << 25,
    is_integrated=0,
)
KERNEL = re.compile(r"async_compile\.triton\('(\w+)', '''(.*?)'''", re.DOTALL)
BLOCKS = {"XBLOCK": 256, "YBLOCK": 16, "R0_BLOCK": 256, "R1_BLOCK": 16}
aten = torch.ops.aten
# the decomposition of torch itself indexes a tensor in Python, for which a CPU build looks for a device
DECOMPOSITIONS = {aten.index_select.default: lambda x, axis, index: aten.index.Tensor(x, [None] * axis + [index])}
HEURISTICS = ("pointwise", "reduction", "persistent_reduction", "cooperative_reduction", "split_scan", "foreach")


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
def fake_cuda() -> Iterator[FakeTensorMode]:
    """A fake tensor mode in which torch believes that there is one NVIDIA GPU of compute capability 8.0."""
    replaced = {
        "torch.compiler.is_compiling": lambda: True,
        "torch.cuda._lazy_init": lambda: None,
        "torch.cuda.is_available": lambda: True,
        "torch.cuda.current_device": lambda: 0,
        "torch.cuda.get_device_properties": lambda *_: PROPERTIES,
        "torch.cuda.get_device_capability": lambda *_: (8, 0),
        "torch._inductor.utils.get_gpu_type": lambda: "cuda",
        "torch._dynamo.device_interface.caching_worker_device_properties": {"cuda": [PROPERTIES]},
        "torch.utils._triton.triton_hash_with_backend": lambda: "no backend",
        "torch.tensor": _tensor,
    }
    properties = DeviceProperties("cuda", 0, 108, 80, 8, 65536, 2048, 1024, 32)
    with ExitStack() as stack:
        for name, value in replaced.items():
            stack.enter_context(mock.patch(name, value))
        stack.enter_context(mock.patch.object(CudaInterface.Worker, "current_device", staticmethod(lambda: 0)))
        stack.enter_context(mock.patch.object(torch.Tensor, "__getitem__", _getitem))
        stack.enter_context(mock.patch.object(DeviceProperties, "create", classmethod(lambda *_: properties)))
        yield FakeTensorMode(allow_non_fake_inputs=True)


def kernels_of(function: Callable[..., object], *like: torch.Tensor) -> dict[str, str]:
    """Return the sources of the Triton kernels that Inductor writes for a function of CUDA tensors like these."""
    with fake_cuda() as mode:
        with mode:
            inputs = [torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device="cuda:0") for a in like]
            traced = make_fx(function, decomposition_table=select_decomp_table() | DECOMPOSITIONS)(*inputs)
        graph = GraphLowering(traced, example_inputs=inputs)
        handlers = V.set_graph_handler(graph), V.set_fake_mode(mode), V.set_debug_handler(mock.MagicMock())
        with handlers[0], handlers[1], handlers[2], inductor_config.patch(fx_graph_cache=False):
            graph.run(*inputs)
            code, _ = graph.codegen()
    return dict(KERNEL.findall(code.value))


def ptx_of(kernels: dict[str, str], directory: Path, arch: int = 80) -> dict[str, str]:
    """Compile kernels of ``kernels_of`` with Inductor's own options, and return the PTX of each."""
    assembly = {}
    for name, source in kernels.items():
        caught: dict[str, object] = {}

        def catch(caught: dict[str, object] = caught, **options: object) -> Callable[[object], object]:
            def keep(function: object) -> object:
                caught.update(options, function=function)
                return function

            return keep

        with (
            mock.patch.multiple(triton_heuristics, **dict.fromkeys(HEURISTICS, catch)),
            mock.patch.object(triton_helpers, "set_driver_to_gpu"),
        ):
            _load(name, source, directory)
        meta = caught["triton_meta"]
        names = [each for each, kind in meta["signature"].items() if kind == "constexpr" and each in BLOCKS]
        constants = meta["constants"] | {each: BLOCKS[each] for each in names}
        source_of = ASTSource(fn=caught["function"], signature=meta["signature"], constexprs=constants)
        options = {"enable_fp_fusion": meta["enable_fp_fusion"]}
        assembly[name] = assembly_of(source_of, GPUTarget("cuda", arch, 32), options)
    return assembly


def _load(name: str, source: str, directory: Path) -> ModuleType:
    path = directory / f"{name}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
