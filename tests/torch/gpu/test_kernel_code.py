"""Generated code of the GPU kernels keeps the numeric contract, and reads and writes memory as often as documented.

Kernels are compiled for NVIDIA and AMD GPUs without a GPU. The rule for NVIDIA code is in ``ptx_rule``. AMD code has no
approximate division; there, every fused multiply-add belongs to a division, which has five of them.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from types import ModuleType

import pytest

import detent as dt

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="needs Triton: make test-gpu")

from interpreted import load_kernels  # noqa: E402
from kernel_code import TARGETS, arguments_of, code_of  # noqa: E402
from ptx_rule import violations  # noqa: E402

CLIPPED = dt.ste.Clipped()
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
OPERATIONS = (
    "fake_quantize",
    "fake_quantize_masked",
    "quantize",
    "dequantize",
    "backward",
    "masked_backward",
    "minmax",
    "learned_backward",
)
SPECS = {
    "int8": dt.QuantSpec("int8"),
    "torch": dt.QuantSpec.parse("uint8/axis0/affine/torch"),
    "oxicuda": dt.QuantSpec.parse("uint8/group32/affine/oxicuda"),
    "floor": dt.QuantSpec("int16", "block2x4", rounding="floor"),
    "stochastic": dt.QuantSpec("int8", rounding="stochastic"),
    "float8_e4m3fn": dt.QuantSpec("float8_e4m3fn"),
    "nf4": dt.QuantSpec("nf4", "group32"),
}
# one variant for each path in the kernels: operation, spec, dtype
VARIANTS = [
    *((operation, "int8", torch.float32) for operation in OPERATIONS),
    *((operation, "torch", torch.bfloat16) for operation in ("fake_quantize_masked", "backward", "learned_backward")),
    ("fake_quantize", "oxicuda", torch.float16),
    ("fake_quantize", "floor", torch.float64),
    ("fake_quantize", "stochastic", torch.float32),
    ("fake_quantize", "float8_e4m3fn", torch.float32),
    ("quantize", "nf4", torch.bfloat16),
    ("learned_backward", "float8_e4m3fn", torch.float16),
    ("minmax", "torch", torch.bfloat16),
]
ALL_VARIANTS = [(operation, spec, dtype) for operation in OPERATIONS for spec in SPECS for dtype in DTYPES]
MAIN_TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")


@cache
def compiled_kernels() -> ModuleType:
    return load_kernels(interpret=False)


def code(
    operation: str,
    spec: str,
    dtype: torch.dtype,
    target: str,
    module: ModuleType | None = None,
    options: dict[str, object] | None = None,
) -> str:
    kernel, arguments = arguments_of(operation, SPECS[spec], dtype, CLIPPED, (64, 96))
    return code_of(compiled_kernels() if module is None else module, kernel, arguments, TARGETS[target], options)


def broken(assembly: str, target: str) -> Counter[str]:
    """Return the operations that break the rule of the target."""
    return violations(assembly) if target.startswith("sm_") else amd_violations(assembly)


def amd_violations(assembly: str) -> Counter[str]:
    """Count products that are fused with an addition of a constant, and fused operations that no division explains.

    Divisions of integers by float reciprocals (``v_rcp_iflag``) have their own fused operations, so the second check
    only applies to code without them.
    """
    found = Counter(re.findall(r"^\s*(v_(?:fmaak|fmamk|pk_fma|mad)_\w*f(?:16|32|64)\w*)", assembly, re.MULTILINE))
    if "v_rcp_iflag" in assembly:
        found.pop("v_fmamk_f32", None)
        found.pop("v_fmaak_f32", None)
        return found
    for bits, per_division in (("32", 5), ("64", 5)):
        fused = len(re.findall(rf"^\s*v_fmac?_f{bits}", assembly, re.MULTILINE))
        divisions = len(re.findall(rf"^\s*v_div_fixup_f{bits}", assembly, re.MULTILINE))
        steps = len(re.findall(rf"^\s*v_div_fmas_f{bits}", assembly, re.MULTILINE))
        if fused > per_division * max(divisions, steps):
            found[f"v_fma_f{bits} without a division"] = fused - per_division * divisions
    return found


@pytest.mark.parametrize("target", MAIN_TARGETS)
@pytest.mark.parametrize(("operation", "spec", "dtype"), VARIANTS)
def test_code_keeps_the_contract(operation: str, spec: str, dtype: torch.dtype, target: str) -> None:
    assert not broken(code(operation, spec, dtype, target), target)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_all_code_keeps_the_contract(operation: str, target: str) -> None:
    for each, spec, dtype in ALL_VARIANTS:
        if each == operation:
            assert not broken(code(operation, spec, dtype, target), target), (spec, dtype)


# Wrong kernels

MUTANTS = {
    "approximate division": ("t = tl.math.div_rn(x, s)", "t = x / s", "div.full.f32"),
    "floor of libdevice": (
        "    nearest = _half_even(t, WIDE)\n    return tl.where(nearest > t, nearest - 1.0, nearest)",
        "    return tl.math.floor(t)",
        "ftz",
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_kernel_is_seen(name: str) -> None:
    old, new, expected = MUTANTS[name]
    module = load_kernels(interpret=False, replace=(old, new))
    found = violations(code("fake_quantize", "oxicuda", torch.float32, "sm_80", module))
    assert any(expected in each for each in found), found


@pytest.mark.parametrize("target", ["sm_80", "gfx942"])
def test_fused_products_are_seen(target: str) -> None:
    module = load_kernels(interpret=False, replace=("        t = tl.math.div_rn(x, s)", "        t = x * s"))
    assembly = code("fake_quantize", "int8", torch.float32, target, module, {"enable_fp_fusion": True})
    assert broken(assembly, target)


# Passes over memory

# operation: reads and writes of the array, per element
PASSES = {
    "fake_quantize": (1, 1),
    "quantize": (1, 1),
    "dequantize": (1, 1),
    "backward": (2, 1),
    "minmax": (1, 0),
    "learned_backward": (2, 1),
}


@pytest.mark.parametrize("operation", PASSES)
def test_passes_over_memory(operation: str) -> None:
    """Count loads and stores of a tensor with one scale; observe + fake quantize is minmax, then fake_quantize."""
    kernel, arguments = arguments_of(operation, SPECS["int8"], torch.float32, CLIPPED, (1 << 20,))
    assembly = code_of(compiled_kernels(), kernel, arguments, TARGETS["sm_80"])
    block = arguments.get("BLOCK") or arguments["ROWS"] * arguments["COLUMNS"]
    per_thread = block // 128  # four warps
    pointers = [name for name in arguments if name in ("x_ptr", "g_ptr", "q_ptr")]
    reads, writes = PASSES[operation]
    assert len(pointers) == reads
    sizes = {"b8": 1, "b16": 1, "b32": 1, "b64": 1}
    count = {"ld": 0, "st": 0}
    for op, vector, kind in re.findall(r"\b(ld|st)\.global(?:\.v(\d))?\.(b\d+)", assembly):
        count[op] += int(vector or 1) * sizes[kind]
    parameters = 2 * per_thread  # at most one load of a scale and a zero point for each element, from the cache
    assert reads * per_thread * _packing(operation, "ld") <= count["ld"] <= reads * per_thread + parameters
    assert count["st"] <= writes * per_thread + 8  # and a few partial results
    assert count["st"] >= writes * per_thread * _packing(operation, "st")


def _packing(operation: str, op: str) -> float:
    """Return the number of registers per element of data; four codes share a register."""
    return 0.25 if (operation, op) in {("quantize", "st"), ("dequantize", "ld")} else 1.0
