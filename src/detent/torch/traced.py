"""The numeric contract in plain torch operations.

For what ``torch.compile`` and ``torch.export`` trace, and for devices without kernels of our own. The arithmetic is
``detent.kernels.reference`` and ``detent.scale_rule``, the same text that runs on NumPy, over a namespace whose casts
and selections survive compilers (``traced_namespace``). The bits are those of ``detent.fake_quantize`` and its kin,
eager and compiled. ``spec`` and ``ste`` are constants of a trace. Nothing is checked, because a trace cannot raise, and
nothing records gradients: these are the halves of an autograd function.

Shapes: scale and zero point have ``spec.granularity``'s scale shape for x. Left out: the scales of MX and NVFP4, and
callable estimators.
"""

from typing import Any, cast

import torch
from torch import Tensor

from detent.errors import UnsupportedError
from detent.granularity import Tiling
from detent.kernels import reference
from detent.scale_rule import float_parameters
from detent.spec import QuantSpec
from detent.ste import Estimator
from detent.torch import traced_namespace as xp

__all__ = [
    "blend",
    "derive",
    "fake_quantize",
    "fake_quantize_backward",
    "fake_quantize_learned_backward",
    "minmax",
]


def fake_quantize(x: Tensor, scale: Tensor, zero_point: Tensor, spec: QuantSpec, step: int | Tensor = 0) -> Tensor:
    """``dequantize(quantize(x))`` in x's dtype; NaN stays NaN.

    Args:
        x: float data.
        scale: float32, or float64 with float64 data.
        zero_point: int32.
        spec: how.
        step: the counter of stochastic rounding; as a 0-d int64 tensor it may change without another trace.

    >>> one, zero = torch.tensor(0.5), torch.tensor(0, dtype=torch.int32)
    >>> fake_quantize(torch.tensor([0.3, 0.9, 99.0]), one, zero, QuantSpec("int8"))
    tensor([ 0.5000,  1.0000, 63.5000])
    """
    options: dict[str, Any] = {"spec": spec, "tiling": _tiling(x, spec), "step": _loaded(step, zero_point, spec)}
    return cast("Tensor", reference.fake_quantize(x.detach(), scale.detach(), zero_point, **options, xp=xp))


def fake_quantize_backward(
    g: Tensor,
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    spec: QuantSpec,
    ste: Estimator,
    step: int | Tensor = 0,
) -> Tensor:
    """The gradient of x given the gradient g of ``fake_quantize``, in x's dtype.

    >>> from detent.ste import Clipped
    >>> one, zero = torch.tensor(1.0), torch.tensor(0, dtype=torch.int32)
    >>> fake_quantize_backward(torch.ones(2), torch.tensor([127.4, 127.6]), one, zero, QuantSpec("int8"), Clipped())
    tensor([1., 0.])
    """
    tensors = (g.detach(), x.detach(), scale.detach(), zero_point)
    options: dict[str, Any] = {"spec": spec, "tiling": _tiling(x, spec), "step": _loaded(step, zero_point, spec)}
    return cast("Tensor", reference.fake_quantize_backward(*tensors, **options, ste=ste, xp=xp))


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
    """The gradients of x, of the scale and of the zero point (LSQ, LSQ+), the latter two like the scale.

    Sums have the contract's order, so that a compiled graph depends on how many doublings of 1024 elements a set has.

    >>> from detent.ste import Clipped
    >>> one, zero = torch.tensor(1.0), torch.tensor(0, dtype=torch.int32)
    >>> x, spec = torch.tensor([1.25, 200.0]), QuantSpec("int8")
    >>> fake_quantize_learned_backward(torch.ones(2), x, one, zero, spec, Clipped(), grad_scale=1.0)
    (tensor([1., 0.]), tensor(126.7500), tensor(-1.))
    """
    tensors = (g.detach(), x.detach(), scale.detach(), zero_point)
    options: dict[str, Any] = {"spec": spec, "tiling": _tiling(x, spec), "step": _loaded(step, zero_point, spec)}
    options |= {"ste": ste, "grad_scale": grad_scale}
    gx, gs, gz = reference.fake_quantize_learned_backward(*tensors, **options, xp=xp)
    return gx, gs, gz


def minmax(x: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor]:
    """The smallest and largest finite element of each set in the compute type; (inf, -inf) for sets without any.

    >>> minmax(torch.tensor([1.0, -2.0, float("nan")]), QuantSpec("int8"))
    (tensor(-2.), tensor(1.))
    """
    lo, hi = reference.minmax(x.detach(), _tiling(x, spec), xp=xp)
    return lo, hi


def derive(spec: QuantSpec, lo: Tensor, hi: Tensor) -> tuple[Tensor, Tensor]:
    """Scale, in lo's dtype, and zero point, int32, of each range.

    What ``QuantParams.from_range`` refuses gives numbers without meaning: ranges that are not finite or not ordered,
    and ranges without width under the zero range "error".

    Raises:
        UnsupportedError: scales of MX or NVFP4.

    >>> derive(QuantSpec("uint8"), torch.tensor(-1.0), torch.tensor(4.0))
    (tensor(0.0196), tensor(51, dtype=torch.int32))
    """
    if spec.scale_format != "float":
        raise UnsupportedError(f"{spec}: scales of {spec.scale_format} are not traced; use scale_format='float'")
    low, high = (xp.astype(end.detach(), torch.float64) for end in (lo, hi))
    scale, zero_point, _ = float_parameters(xp, spec, low, high, lo.dtype)
    return scale, zero_point


def blend(old: Tensor, new: Tensor, decay: float) -> Tensor:
    """The moving average of a bound in float32, ``fl(fl(d * old) + fl((1 - d) * new))``.

    >>> blend(torch.tensor([2.0]), torch.tensor([4.0]), 0.5)
    tensor([3.])
    """
    old, new = (xp.astype(end.detach(), torch.float32) for end in (old, new))
    return torch.full_like(old, decay) * old + torch.full_like(new, 1.0 - decay) * new


def _tiling(x: Tensor, spec: QuantSpec) -> Tiling:
    """The sets of x; not through the cache, which no compiler traces."""
    return spec.granularity._tiling(tuple(x.shape))


def _loaded(step: int | Tensor, like: Tensor, spec: QuantSpec) -> int | Tensor:
    """The step as something read from memory.

    Inductor copies what reads nothing into each of its uses, and the rounds of Philox use everything twice or more.
    """
    if spec.rounding.kind != "stochastic":
        return step
    return (like.reshape(-1)[:1].to(torch.int64) & 0) + step
