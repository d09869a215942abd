"""Compiled GPU code of the torch operations in ``traced``: Inductor's code for GPUs keeps the numeric contract.

Most functions are traced with an addition of 1.5 after it, with which a compiler would fuse the last product. Needs
Triton, but no GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

import detent as dt

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="needs Triton: make test-gpu")

from compiled_code import MAIN_TARGETS, assembler_fuses, violations  # noqa: E402
from inductor_code import assembly_of_kernels, kernels_of  # noqa: E402
from ptx_rule import float_operations  # noqa: E402
from ptx_rule import violations as ptx_violations  # noqa: E402

from detent.observers.minmax import mix_seen_ranges  # noqa: E402
from detent.torch import traced, traced_namespace  # noqa: E402

SHAPE = (64, 96)
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SPECS = {
    "int8": dt.QuantSpec("int8"),
    "uint8/axis0/affine": dt.QuantSpec.parse("uint8/axis0/affine"),
    "int4/group32": dt.QuantSpec.parse("int4/group32"),
    "torch": dt.QuantSpec("int8", convention="torch"),
    "compressed_tensors": dt.QuantSpec("uint8", convention="compressed_tensors"),
    "oxicuda": dt.QuantSpec("uint8", convention="oxicuda"),
    "floor": dt.QuantSpec("int8", rounding="floor"),
    "float8_e4m3fn": dt.QuantSpec("float8_e4m3fn"),
    "nf4": dt.QuantSpec("nf4", "group32"),
}
ESTIMATORS = {
    "clipped": dt.ste.Clipped(),
    "value": dt.ste.Clipped(on="value", bounds="exclusive"),
    "hard_tanh": dt.ste.HardTanh(),
}


def arguments(spec: dt.QuantSpec, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """Data, scale and zero point like those of the spec; their values do not matter."""
    shape = spec.granularity.tiling(SHAPE).scale_shape
    scale = torch.empty(shape, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    return torch.empty(SHAPE, dtype=dtype), scale, torch.empty(shape, dtype=torch.int32)


def broken(function: Callable[..., object], directory: Path, *like: torch.Tensor) -> Counter[str]:
    """Return what breaks the rules in all kernels of a function, for all main targets."""
    found: Counter[str] = Counter()
    for amd in (False, True):
        kernels = kernels_of(function, *like, amd=amd)
        for target in MAIN_TARGETS:
            if target.startswith("gfx") == amd:
                for assembly in assembly_of_kernels(kernels, directory, target).values():
                    found += violations(assembly, target, bare=True)
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SPECS)
def test_forward(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    spec = SPECS[name]

    def forward(x: torch.Tensor, s: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return traced.fake_quantize(x, s, z, spec).to(s.dtype) + 1.5

    assert not broken(forward, tmp_path, *arguments(spec, dtype))


def constants(spec: dt.QuantSpec, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A scale and a zero point that are constants of the trace."""
    shape = spec.granularity.tiling(SHAPE).scale_shape
    zero_point = torch.full(shape, 3, dtype=torch.int32, device=like.device)
    return torch.full(shape, 0.0123, device=like.device), zero_point


@pytest.mark.parametrize("name", SPECS)
def test_forward_with_a_constant_scale(name: str, tmp_path: Path) -> None:
    """Inductor multiplies by the reciprocal of a constant divisor, unless ``addcdiv`` divides."""
    spec = SPECS[name]
    x = torch.empty(SHAPE)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return traced.fake_quantize(x, *constants(spec, x), spec)

    assert not broken(forward, tmp_path, x)
    (ptx,) = assembly_of_kernels(kernels_of(forward, x), tmp_path, "sm_80").values()
    assert bool(float_operations(ptx)["div.rn.f32"]) == (name != "torch")  # 1 / s is computed by the compiler


@pytest.mark.parametrize("name", ["int8", "uint8/axis0/affine", "torch", "compressed_tensors"])
def test_backward_with_a_constant_scale(name: str, tmp_path: Path) -> None:
    spec = SPECS[name]

    def backward(g: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return traced.fake_quantize_backward(g, x, *constants(spec, x), spec, dt.ste.Clipped()) + 1.5

    assert not broken(backward, tmp_path, torch.empty(SHAPE), torch.empty(SHAPE))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ste", ESTIMATORS)
def test_backward(ste: str, dtype: torch.dtype, tmp_path: Path) -> None:
    spec = SPECS["uint8/axis0/affine"]

    def backward(g: torch.Tensor, x: torch.Tensor, s: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return traced.fake_quantize_backward(g, x, s, z, spec, ESTIMATORS[ste]).to(s.dtype) + 1.5

    like = arguments(spec, dtype)
    assert not broken(backward, tmp_path, like[0], *like)


@pytest.mark.parametrize("text", ["uint8/axis0/affine", "int8/axis0/torch", "int4/group32"])
def test_learned_backward(text: str, tmp_path: Path) -> None:
    spec = dt.QuantSpec.parse(text)

    def backward(g: torch.Tensor, x: torch.Tensor, s: torch.Tensor, z: torch.Tensor) -> list[torch.Tensor]:
        gradients = traced.fake_quantize_learned_backward(g, x, s, z, spec, dt.ste.Clipped())
        return [gradient + 1.5 for gradient in gradients]

    like = arguments(spec)
    assert not broken(backward, tmp_path, like[0], *like)


@pytest.mark.parametrize("name", SPECS)
def test_ranges_and_scales(name: str, tmp_path: Path) -> None:
    """The range of a batch, mixed into an EMA range, and the scale and zero point from it."""
    spec = SPECS[name]
    lo = torch.empty(spec.granularity.tiling(SHAPE).scale_shape)

    def observe(x: torch.Tensor, lo: torch.Tensor, hi: torch.Tensor) -> tuple[torch.Tensor, ...]:
        new = traced.minmax(x, spec)
        mixed = mix_seen_ranges(traced_namespace, (lo, hi), new, 0.99, lo <= hi)
        return traced.derive(spec, *mixed)

    assert not broken(observe, tmp_path, torch.empty(SHAPE), lo, lo)


# a function that breaks the contract, and what is found in its code
MUTANTS = {
    "division": (lambda x, s: x / s, {"div.full.f32"}),
    "constant": (lambda x, s: x / torch.full_like(s, 0.3), {"fma.rn.f32", "fma.rn.f32x2"}),
    "product": (lambda x, s: x * s, {"fma.rn.f32", "fma.rn.f32x2", "v_fmac_f32"}),
    "negative product": (lambda x, s: -(x * s), {"fma.rn.f32", "sub.f32 of a product"}),
    "product through float64": (lambda x, s: (x.double() * s.double()).float(), {"fma.rn.f32"}),
    "floor": (lambda x, s: torch.floor(x), {"cvt.rmi.ftz.f32.f32"}),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_rule_catches(name: str, tmp_path: Path) -> None:
    mutant, expected = MUTANTS[name]
    found = broken(lambda x, s: mutant(x, s) + 1.5, tmp_path, torch.empty(SHAPE), torch.empty(SHAPE))
    assert expected.intersection(found), found


PTX = """
.version 8.0
.target sm_80
.address_size 64
.visible .entry kernel(.param .u64 p) {{
  .reg .u64 %rd<2>; .reg .f32 %f<6>; .reg .pred %p<2>;
  ld.param.u64 %rd1, [p];
  ld.global.f32 %f1, [%rd1];
  ld.global.f32 %f2, [%rd1+4];
  {0}
  st.global.f32 [%rd1], %f5;
  ret;
}}
"""
FUSIBLE = {
    "sum": "mul.f32 %f3, %f1, %f2; add.f32 %f5, %f3, %f1;",
    "difference": "mul.f32 %f3, %f1, %f2; sub.f32 %f5, %f1, %f3;",
    "copy": "mul.f32 %f3, %f1, %f2; mov.b32 %f4, %f3; add.f32 %f5, %f4, %f1;",
    "sign": "mul.f32 %f3, %f1, %f2; neg.f32 %f4, %f3; add.f32 %f5, %f4, %f1;",
}
NOT_FUSIBLE = {
    "rounded product": "mul.rn.f32 %f3, %f1, %f2; add.f32 %f5, %f3, %f1;",
    "rounded sum": "mul.f32 %f3, %f1, %f2; add.rn.f32 %f5, %f3, %f1;",
    "selection": "mul.f32 %f3, %f1, %f2; setp.eq.f32 %p1, %f3, 0f00000000; selp.f32 %f4, %f2, %f3, %p1; "
    "add.f32 %f5, %f4, %f1;",
    "product of a sum": "add.f32 %f3, %f1, %f2; mul.f32 %f5, %f3, %f1;",
}


@pytest.mark.parametrize("name", [*FUSIBLE, *NOT_FUSIBLE])
def test_the_assembler_agrees_with_the_rule(name: str) -> None:
    body = (FUSIBLE | NOT_FUSIBLE)[name].replace("; ", ";\n  ")
    ptx = PTX.format(body)
    assert assembler_fuses(ptx) == (name in FUSIBLE)
    if name not in ("rounded product", "rounded sum"):
        assert bool(ptx_violations(ptx, bare=True)) == (name in FUSIBLE)
