"""Assembly code of Triton kernels for any GPU, compiled without a GPU."""

# ruff: noqa: E402 - imports after the check for Triton

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from unittest import mock

import pytest

triton = pytest.importorskip("triton", reason="needs Triton: make test-gpu")

import amd_rule
import ptx_rule
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend, get_ptxas
from triton.compiler import ASTSource

__all__ = ["MAIN_TARGETS", "TARGETS", "assembler_fuses", "assembly_of", "violations"]

TARGETS = {
    **{f"sm_{arch}": GPUTarget("cuda", arch, 32) for arch in (75, 80, 86, 89, 90, 100, 120)},
    **{name: GPUTarget("hip", name, 64) for name in ("gfx90a", "gfx942", "gfx950")},
    **{name: GPUTarget("hip", name, 32) for name in ("gfx1100", "gfx1201")},
}
MAIN_TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")


def assembly_of(source: ASTSource, target: GPUTarget, options: Mapping[str, object]) -> str:
    """Compile a kernel to PTX or AMD assembly; the binary is not made, because it takes the longest."""
    with tempfile.TemporaryDirectory() as cache, knobs.cache.scope():
        knobs.cache.dir = cache  # without binaries, results are not for the cache of the user
        with mock.patch.object(CUDABackend, "make_cubin", return_value=b""):
            compiled = triton.compile(source, target=target, options=dict(options))
        return compiled.asm["ptx" if target.backend == "cuda" else "amdgcn"]


def violations(assembly: str, target: str, *, bare: bool = False) -> Counter[str]:
    """Count what breaks the rule of the target; ``bare`` allows PTX without rounding modes if nothing can be fused."""
    if TARGETS[target].backend == "hip":
        return amd_rule.violations(assembly)
    found = ptx_rule.violations(assembly, bare=bare)
    if bare and assembler_fuses(assembly):
        found["product fused by the assembler"] += 1
    return found


def assembler_fuses(ptx: str) -> bool:
    """Return whether ptxas fuses a product with an addition: whether code has more fused operations if it may fuse.

    Divisions have fused operations in both cases. The rest of the code may differ, too: for bare operations, ptxas also
    replaces ``a + b < 0`` by ``a < -b``, which is the same for numbers that are not flushed to zero.
    """
    architecture = re.search(r"^\.target\s+(\w+)", ptx, re.MULTILINE)[1]
    ptxas = get_ptxas(int(re.search(r"\d+", architecture)[0])).path
    counts = []
    with tempfile.TemporaryDirectory() as directory:
        source, binary = Path(directory, "kernel.ptx"), Path(directory, "kernel.cubin")
        source.write_text(ptx, encoding="utf-8")
        for fuses in ("true", "false"):
            # -O1 is the lowest level that fuses; higher ones take many times as long for large kernels.
            command = [ptxas, f"--fmad={fuses}", "-O1", f"--gpu-name={architecture}", str(source), "-o", str(binary)]
            subprocess.run(command, check=True, capture_output=True)
            shown = subprocess.run([knobs.nvidia.nvdisasm.path, "-c", str(binary)], check=True, capture_output=True)
            assert b"EXIT" in shown.stdout
            counts.append(len(re.findall(rb"\b(?:FFMA2?|DFMA)\b", shown.stdout)))
    return counts[0] != counts[1]
