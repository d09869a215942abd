"""Assembly code of Triton kernels for any GPU, compiled without a GPU."""

# ruff: noqa: E402 - imports after the check for Triton

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from unittest import mock

import pytest

triton = pytest.importorskip("triton", reason="needs Triton: make test-gpu")

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource

__all__ = ["assembly_of"]


def assembly_of(source: ASTSource, target: GPUTarget, options: Mapping[str, object]) -> str:
    """Compile a kernel to PTX or AMD assembly; the binary is not made, because it takes the longest."""
    with tempfile.TemporaryDirectory() as cache, knobs.cache.scope():
        knobs.cache.dir = cache  # without binaries, results are not for the cache of the user
        with mock.patch.object(CUDABackend, "make_cubin", return_value=b""):
            compiled = triton.compile(source, target=target, options=dict(options))
        return compiled.asm["ptx" if target.backend == "cuda" else "amdgcn"]
