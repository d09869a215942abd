"""Traced mode: fake quantization in plain torch operations, for compilers and for devices without native kernels.

In eager mode on a GPU, ``detent.torch.gpu`` runs a Triton kernel instead of the torch operations, if it can.

The functions run the code of ``detent.kernels.reference`` and ``detent.scale_rule`` on the array namespace
``traced_namespace``, whose casts and selections compilers do not change. So eager and compiled results have the same
bits as ``detent.fake_quantize``. ``spec`` and ``ste`` are constants of a trace. Arguments are not checked, because a
trace cannot raise errors. The functions record no gradients, because they are the forward and backward passes of
autograd functions. Scale and zero point must have the shape that the spec needs for x.

The scales of MX and NVFP4, and callable estimators, are not supported.
"""

from typing import Any, cast

import torch
from torch import Tensor

from detent.errors import UnsupportedError
from detent.granularity import Tiling
from detent.kernels import reference
from detent.kernels.reference.operators import gradient_factor
from detent.scale_rule import float_parameters
from detent.spec import QuantSpec
from detent.ste import Estimator
from detent.torch import traced_namespace as xp
from detent.torch.gpu import launch
from detent.torch.gpu.readiness import can_launch

__all__ = [
    "derive",
    "fake_quantize",
    "fake_quantize_backward",
    "fake_quantize_learned_backward",
    "minmax",
    "runs_on_gpu_kernels",
]


def runs_on_gpu_kernels(
    x: Tensor, scale: Tensor, zero_point: Tensor, spec: QuantSpec, ste: Estimator | None, step: int | Tensor
) -> bool:
    """Return whether a GPU kernel runs an operation on these tensors."""
    if torch.compiler.is_compiling() or not isinstance(step, int):
        return False
    return x.device == scale.device == zero_point.device and can_launch(x, spec, ste)


def fake_quantize(x: Tensor, scale: Tensor, zero_point: Tensor, spec: QuantSpec, step: int | Tensor = 0) -> Tensor:
    """Return ``dequantize(quantize(x))`` in x's dtype; NaN stays NaN."""
    if runs_on_gpu_kernels(x, scale, zero_point, spec, None, step):
        return launch.fake_quantize(x, scale, zero_point, spec, cast("int", step))
    options = _options(x, zero_point, spec, step)
    return cast("Tensor", reference.fake_quantize(x.detach(), scale.detach(), zero_point, **options))


def fake_quantize_backward(
    g: Tensor,
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    spec: QuantSpec,
    ste: Estimator,
    step: int | Tensor = 0,
) -> Tensor:
    """Return the gradient of x given the gradient g of ``fake_quantize``, in x's dtype."""
    if runs_on_gpu_kernels(x, scale, zero_point, spec, ste, step):
        return launch.fake_quantize_backward(g, x, scale, zero_point, spec, ste, cast("int", step))
    tensors = (g.detach(), x.detach(), scale.detach(), zero_point)
    options = _options(x, zero_point, spec, step)
    return cast("Tensor", reference.fake_quantize_backward(*tensors, **options, ste=ste))


def fake_quantize_learned_backward(
    g: Tensor,
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    spec: QuantSpec,
    ste: Estimator,
    grad_scale: float | None = None,
    step: int | Tensor = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, scale and zero point (LSQ, LSQ+); the last two have the shape of the scale.

    The order of additions is fixed, so the compiled graph depends on the number of elements in a parameter set. Above
    1024 elements, each doubling adds one addition to the graph.
    """
    if runs_on_gpu_kernels(x, scale, zero_point, spec, ste, step) and launch.supports_sums(spec, tuple(x.shape)):
        factor = gradient_factor(xp, spec, _tiling(x, spec), grad_scale, scale)
        whole = cast("int", step)
        return launch.fake_quantize_learned_backward(g, x, scale, zero_point, spec, ste, factor, whole)
    tensors = (g.detach(), x.detach(), scale.detach(), zero_point)
    options = _options(x, zero_point, spec, step) | {"ste": ste, "grad_scale": grad_scale}
    gx, gs, gz = reference.fake_quantize_learned_backward(*tensors, **options)
    return gx, gs, gz


def minmax(x: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor]:
    """Return the smallest and largest finite element of each parameter set; (inf, -inf) if no element is finite."""
    if not torch.compiler.is_compiling() and can_launch(x, spec):
        return launch.minmax(x, spec)
    lo, hi = reference.minmax(x.detach(), _tiling(x, spec), xp=xp)
    return lo, hi


def derive(spec: QuantSpec, lo: Tensor, hi: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Derive scale and zero point for each range; the result is undefined for a range that ``from_range`` rejects.

    The scale has the type ``dtype``, or the type of lo if ``dtype`` is None.
    """
    if spec.scale_format != "float":
        raise UnsupportedError(
            f"got {spec}, but scales of format {spec.scale_format} are not supported in torch operations: use "
            "scale_format='float'"
        )
    wide_lo, wide_hi = (xp.astype(bound.detach(), torch.float64) for bound in (lo, hi))
    scale, zero_point, _ = float_parameters(xp, spec, wide_lo, wide_hi, dtype or lo.dtype)
    return scale, zero_point


def _tiling(x: Tensor, spec: QuantSpec) -> Tiling:
    """Divide x into parameter sets without using the cache, because compilers cannot trace the cache."""
    return spec.granularity._tiling(tuple(x.shape))


def _options(x: Tensor, zero_point: Tensor, spec: QuantSpec, step: int | Tensor) -> dict[str, Any]:
    if spec.rounding.kind == "stochastic":
        # Inductor recomputes a value at each use unless it depends on memory; Philox uses each value twice or more
        step = (zero_point.reshape(-1)[:1].to(torch.int64) & 0) + step
    return {"spec": spec, "tiling": _tiling(x, spec), "step": step, "xp": xp}
