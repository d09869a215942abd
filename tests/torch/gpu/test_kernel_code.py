"""Generated code of the GPU kernels keeps the numeric contract, and reads and writes memory as often as documented.

Kernels are compiled for NVIDIA and AMD GPUs without a GPU. The rules for the code are in ``ptx_rule`` and ``amd_rule``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from types import ModuleType

import pytest

import detent as dt

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="needs Triton: make test-gpu")

from compiled_code import MAIN_TARGETS, TARGETS, violations  # noqa: E402
from interpreted import load_kernels  # noqa: E402
from kernel_code import arguments_of, code_of  # noqa: E402

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
    ("fake_quantize", "float8_e4m3fn", torch.float16),
    ("dequantize", "int8", torch.float16),
    ("quantize", "nf4", torch.bfloat16),
    ("learned_backward", "float8_e4m3fn", torch.float16),
    ("minmax", "torch", torch.bfloat16),
]
# all combinations of constants that change float operations; how elements find their parameter set does not
ROUNDINGS = ("half_even", "half_away", "floor", "stochastic")
ARITHMETICS = ("onnx", "torch", "compressed_tensors")  # division, reciprocal, zero point before rounding
ALL_SPECS = {
    **{
        f"{convention} {rounding}": dt.QuantSpec("uint8", convention=convention, rounding=rounding)
        for convention in ARITHMETICS
        for rounding in ROUNDINGS
    },
    **{form: dt.QuantSpec(form) for form in ("float8_e4m3fn", "float4_e2m1fn", "nf4")},
}
OTHER_ESTIMATORS = (
    dt.ste.Identity(),
    dt.ste.Clipped(on="value"),
    dt.ste.Clipped(bounds="exclusive"),
    dt.ste.Clipped(on="value", bounds="exclusive"),
)
ONE_SPEC = dt.QuantSpec("uint8")
WITHOUT_SPEC = ("masked_backward", "minmax")
WITH_ESTIMATOR = ("fake_quantize_masked", "backward", "learned_backward")


def all_variants(operation: str) -> list[tuple[dt.QuantSpec, dt.ste.Estimator]]:
    """Return the specs and estimators for which an operation has different code."""
    if operation in WITHOUT_SPEC:
        return [(ONE_SPEC, CLIPPED)]
    if operation == "dequantize":
        return [(ONE_SPEC, CLIPPED), *((ALL_SPECS[form], CLIPPED) for form in ("float8_e4m3fn", "nf4"))]
    variants = [(spec, CLIPPED) for spec in ALL_SPECS.values()]
    if operation in WITH_ESTIMATOR:  # Identity has no kernel for its gradient
        estimators = OTHER_ESTIMATORS[operation == "backward" :]
        variants += [(spec, ste) for spec in (ONE_SPEC, ALL_SPECS["nf4"]) for ste in estimators]
    return variants


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


@pytest.mark.parametrize("target", MAIN_TARGETS)
@pytest.mark.parametrize(("operation", "spec", "dtype"), VARIANTS)
def test_code_keeps_the_contract(operation: str, spec: str, dtype: torch.dtype, target: str) -> None:
    assert not violations(code(operation, spec, dtype, target), target)


@pytest.mark.slow
@pytest.mark.parametrize("target", [each for each in TARGETS if each not in MAIN_TARGETS])
def test_code_for_other_targets(target: str, record_property: Callable[[str, object], None]) -> None:
    for operation, spec, dtype in VARIANTS:
        assert not violations(code(operation, spec, dtype, target), target), (operation, spec, dtype)
    record_property("kernels", len(VARIANTS))
    record_property("target", target)


@pytest.mark.slow
@pytest.mark.parametrize("target", MAIN_TARGETS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_all_code_keeps_the_contract(
    operation: str, dtype: torch.dtype, target: str, record_property: Callable[[str, object], None]
) -> None:
    variants = all_variants(operation)
    for spec, ste in variants:
        kernel, arguments = arguments_of(operation, spec, dtype, ste, (64, 96))
        assembly = code_of(compiled_kernels(), kernel, arguments, TARGETS[target])
        assert not violations(assembly, target), (spec, ste)
    record_property("kernels", len(variants))
    record_property("target", target)


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
    found = violations(code("fake_quantize", "oxicuda", torch.float32, "sm_80", module), "sm_80")
    assert any(expected in each for each in found), found


@pytest.mark.parametrize("target", ["sm_80", "gfx942"])
def test_fused_products_are_seen(target: str) -> None:
    module = load_kernels(interpret=False, replace=("        t = tl.math.div_rn(x, s)", "        t = x * s"))
    assembly = code("fake_quantize", "int8", torch.float32, target, module, {"enable_fp_fusion": True})
    assert violations(assembly, target)


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


# Large arrays


@pytest.mark.parametrize("granularity", ["tensor", "axis0", "group32"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_arrays_of_2_to_the_31_elements(operation: str, granularity: str) -> None:
    """Positions are int64, and a GPU can launch the number of programs."""
    shape = (1 << 16, (1 << 15) + 32)
    _, arguments = arguments_of(operation, dt.QuantSpec("int8", granularity), torch.float32, CLIPPED, shape)
    assert arguments["LONG"]
    assert arguments.get("count", 1 << 31) >= 1 << 31
    per_program = arguments.get("BLOCK") or arguments["ROWS"] * arguments["COLUMNS"]
    assert shape[0] * shape[1] <= arguments["programs"] * per_program
    assert arguments["programs"] < 1 << 31


def test_code_for_large_arrays_keeps_the_contract() -> None:
    kernel, arguments = arguments_of("fake_quantize", SPECS["torch"], torch.float32, CLIPPED, (1 << 16, 1 << 15))
    assembly = code_of(compiled_kernels(), kernel, arguments, TARGETS["sm_80"])
    assert not violations(assembly, "sm_80")
    assert re.search(r"mad\.wide|mul\.wide|shl\.b64|add\.s64", assembly)
