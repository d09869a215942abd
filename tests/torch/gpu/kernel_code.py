"""Generated code of the GPU kernels: each operation with its constants, compiled for one GPU architecture."""

from __future__ import annotations

from types import ModuleType
from unittest import mock

import pytest

pytest.importorskip("triton", reason="needs Triton: make test-gpu")

import torch
from compiled_code import assembly_of
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import detent as dt
from detent.torch.gpu import launch

__all__ = ["arguments_of", "code_of"]

POINTERS = {
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int16: "*i16",
    torch.uint16: "*u16",
    torch.int32: "*i32",
}


def arguments_of(
    operation: str, spec: dt.QuantSpec, dtype: torch.dtype, ste: dt.ste.Estimator, shape: tuple[int, ...]
) -> tuple[str, dict[str, object]]:
    """Return the kernel that an operation launches, and its arguments with ``programs``; nothing runs."""
    caught: list[tuple[str, dict[str, object]]] = []

    def catch(kernel: object) -> object:
        class Kernel:
            arg_names = kernel.arg_names

            def __getitem__(self, programs: tuple[int]) -> object:
                return lambda **arguments: caught.append((kernel.__name__, arguments | {"programs": programs[0]}))

        return Kernel()

    names = ("forward", "dequantize", "backward", "masked_backward", "minmax", "learned_backward")
    replaced = {name: catch(getattr(launch.kernels, name)) for name in names}
    x = torch.empty(shape, dtype=dtype, device="meta")
    scale = x.new_empty(spec.granularity.tiling(shape).scale_shape, dtype=launch.scale_dtype(x))
    z = torch.empty_like(scale, dtype=torch.int32)
    calls = {
        "fake_quantize": lambda: launch.fake_quantize(x, scale, z, spec),
        "fake_quantize_masked": lambda: launch.fake_quantize_masked(x, scale, z, spec, ste),
        "quantize": lambda: launch.quantize(x, scale, z, spec),
        "dequantize": lambda: launch.dequantize(_codes(x, spec), scale, z, spec, dtype),
        "backward": lambda: launch.fake_quantize_backward(x, x, scale, z, spec, ste),
        "masked_backward": lambda: launch.masked_backward(
            x, x.new_empty(x.numel() // 8, dtype=torch.uint8), launch.order_of(x, spec)
        ),
        "minmax": lambda: launch.minmax(x, spec),
        "learned_backward": lambda: launch.fake_quantize_learned_backward(x, x, scale, z, spec, ste, scale.double()),
    }
    with mock.patch.multiple(launch.kernels, **replaced):
        calls[operation]()
    ((name, arguments),) = caught
    return name, arguments


def _codes(x: torch.Tensor, spec: dt.QuantSpec) -> torch.Tensor:
    return x.to(getattr(torch, spec.format.storage) if spec.format.is_integer else torch.uint8)


def code_of(
    module: ModuleType,
    kernel: str,
    arguments: dict[str, object],
    target: GPUTarget,
    options: dict[str, object] | None = None,
) -> str:
    """Compile a kernel of the module for these arguments."""
    function = getattr(module, kernel)
    signature, constants = {}, {}
    for name in function.arg_names:
        value = arguments[name]
        if isinstance(value, torch.Tensor):
            signature[name] = POINTERS[value.dtype]
        elif name.isupper() or (value == 1 and name not in {"step", "seed_low", "seed_high"}):  # as Triton specializes
            signature[name], constants[name] = "constexpr", value
        else:
            signature[name] = "i64" if name.startswith("seed") or arguments["LONG"] else "i32"
    source = ASTSource(fn=function, signature=signature, constexprs=constants)
    return assembly_of(source, target, launch.OPTIONS if options is None else options)
