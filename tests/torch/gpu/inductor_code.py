"""The GPU code that Inductor writes for a function, made and compiled on a machine without a GPU.

A function is traced with fake CUDA tensors, lowered by Inductor, and its Triton kernels are compiled. This uses private
parts of the pinned torch version. Two parts of ``torch.compile`` are left out: the joint-graph and post-grad
passes, which need a CUDA build.
"""

# ruff: noqa: E402 - imports after the check for Triton

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest

triton = pytest.importorskip("triton", reason="needs Triton: make test-gpu")

import torch
import torch._inductor.config as inductor_config
from compiled_code import TARGETS, assembly_of
from fake_cuda import fake_cuda
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import triton_helpers, triton_heuristics
from torch._inductor.virtualized import V
from torch.fx.experimental.proxy_tensor import make_fx
from triton.compiler import ASTSource

__all__ = ["assembly_of_kernels", "kernels_of"]

KERNEL = re.compile(r"async_compile\.triton\('(\w+)', '''(.*?)'''", re.DOTALL)
BLOCKS = {"XBLOCK": 256, "YBLOCK": 16, "R0_BLOCK": 256, "R1_BLOCK": 16}
REDUCTION_BLOCKS = BLOCKS | {"XBLOCK": 4}  # a reduction may read whole rows: more rows take minutes to assemble
aten = torch.ops.aten
# the decomposition of torch itself indexes a tensor in Python, for which a CPU build looks for a device
DECOMPOSITIONS = {aten.index_select.default: lambda x, axis, index: aten.index.Tensor(x, [None] * axis + [index])}
HEURISTICS = ("pointwise", "reduction", "persistent_reduction", "cooperative_reduction", "split_scan", "foreach")


def kernels_of(function: Callable[..., object], *like: torch.Tensor, amd: bool = False) -> dict[str, str]:
    """Return the sources of the Triton kernels that Inductor writes for a function of GPU tensors like these."""
    with fake_cuda(compiling=True, amd=amd) as mode:
        with mode:
            inputs = [torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device="cuda:0") for a in like]
            traced = make_fx(function, decomposition_table=select_decomp_table() | DECOMPOSITIONS)(*inputs)
        graph = GraphLowering(traced, example_inputs=inputs)
        handlers = V.set_graph_handler(graph), V.set_fake_mode(mode), V.set_debug_handler(mock.MagicMock())
        with handlers[0], handlers[1], handlers[2], inductor_config.patch(fx_graph_cache=False):
            graph.run(*inputs)
            code, _ = graph.codegen()
    return dict(KERNEL.findall(code.value))


def assembly_of_kernels(kernels: dict[str, str], directory: Path, target: str) -> dict[str, str]:
    """Compile kernels of ``kernels_of`` with Inductor's own options, and return the assembly code of each."""
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
        blocks = REDUCTION_BLOCKS if "reduction(" in source else BLOCKS
        constants = meta["constants"] | {each: blocks[each] for each in names}
        source_of = ASTSource(fn=caught["function"], signature=meta["signature"], constexprs=constants)
        options = {"enable_fp_fusion": meta["enable_fp_fusion"]}
        assembly[name] = assembly_of(source_of, TARGETS[target], options)
    return assembly


def _load(name: str, source: str, directory: Path) -> ModuleType:
    path = directory / f"{name}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
