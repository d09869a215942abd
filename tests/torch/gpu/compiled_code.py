"""Assembly code of Triton kernels for any GPU, compiled without a GPU."""

# ruff: noqa: E402 - imports after the check for Triton

from __future__ import annotations

import re
import struct
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
    """Return whether ptxas fuses a product with an addition: whether it makes other machine code if it may not."""
    architecture = re.search(r"^\.target\s+(\w+)", ptx, re.MULTILINE)[1]
    ptxas = get_ptxas(int(re.search(r"\d+", architecture)[0])).path
    with tempfile.TemporaryDirectory() as directory:
        source, binary = Path(directory, "kernel.ptx"), Path(directory, "kernel.cubin")
        source.write_text(ptx, encoding="utf-8")
        binaries = set()
        for fuses in ("true", "false"):
            command = [ptxas, f"--fmad={fuses}", f"--gpu-name={architecture}", str(source), "-o", str(binary)]
            subprocess.run(command, check=True, capture_output=True)
            binaries.add(_machine_code(binary.read_bytes()))
    return len(binaries) > 1


def _machine_code(binary: bytes) -> bytes:
    """Return the sections of an ELF file that contain code; others may contain the options of the assembler."""
    (start,) = struct.unpack_from("<Q", binary, 0x28)
    size, count, names = struct.unpack_from("<HHH", binary, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", binary, start + i * size) for i in range(count)]
    sections = {binary[headers[names][4] + each[0] :].split(b"\0", 1)[0]: each for each in headers}
    code = [binary[each[4] : each[4] + each[5]] for name, each in sections.items() if name.startswith(b".text.")]
    assert code, "no code in the binary"
    return b"".join(code)
