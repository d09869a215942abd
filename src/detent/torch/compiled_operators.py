"""Compiled operators: under ``torch.compile`` on a CPU, each quantizer is one or two nodes of the graph.

``traced`` writes fake quantization in plain torch operations. A quantizer then has hundreds of nodes, which a compiler
for CPUs turns into several C++ functions: a model with 16 quantizers took minutes to compile. The operators of this
module run the native kernels instead. The graph keeps the matmuls and the rest of the model, and compiles almost as
fast as the float model. Both ways give the same bits. Exported programs (``torch.export``) and other devices use
``traced``, so that they do not depend on detent or on the CPU.

================================== ====================================================================================
detent::fake_quantize              constant scales (``operator``)
detent::fake_quantize_learned      learned scales and zero points, with gradients
detent::batch_parameters           scale and zero point from the range of x (mode PerBatch)
detent::ema_parameters             updates the EMA range with x; returns copies of scale and zero point (mode EMA)
================================== ====================================================================================

Specs and estimators are texts, because graphs and their caches on disk can hold only texts and numbers.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from array_api_compat import numpy as xp
from torch import Tensor

from detent.errors import ShapeError
from detent.observers.minmax import mix_seen_ranges
from detent.params import QuantParams
from detent.rule import estimator_text
from detent.scale_mode import Learned, ScaleMode
from detent.scale_rule import float_parameters
from detent.spec import QuantSpec
from detent.ste import Custom, Estimator
from detent.torch import eager
from detent.torch.arrays import FLOAT_TYPES, scale_dtype, to_array, to_tensor
from detent.torch.operator import parse_texts, registered_fake_quantize, rounded_zero_point
from detent.torch.parameters import LearnedState

__all__ = [
    "OperatorTexts",
    "batch_parameters",
    "ema_parameters",
    "fake_quantize",
    "fake_quantize_learned",
    "is_supported",
    "texts_of",
]


class OperatorTexts(NamedTuple):
    """Settings of a quantizer as texts."""

    spec: str
    ste: str
    mode: str


def texts_of(spec: QuantSpec, ste: Estimator, mode: ScaleMode) -> OperatorTexts | None:
    """Return the settings of a quantizer as texts, or None if the operators do not support them.

    A callable estimator has no text. With stochastic rounding, a trace cannot read the counter.
    """
    if isinstance(ste, Custom) or spec.rounding.kind == "stochastic" or spec.scale_format != "float":
        return None
    return OperatorTexts(spec.to_json(), estimator_text(ste), mode.to_json())


def is_supported(x: Tensor) -> bool:
    """Return whether a trace of x can contain the operators: under ``torch.compile``, on a CPU."""
    return torch.compiler.is_compiling() and not torch.compiler.is_exporting() and x.device.type == "cpu"


def fake_quantize(x: Tensor, scale: Tensor, zero_point: Tensor, texts: OperatorTexts) -> Tensor:
    """Fake-quantize x with scale and zero point as tensors, which receive no gradients."""
    y: Tensor = registered_fake_quantize(x, scale.to(scale_dtype(x)), zero_point, texts.spec, texts.ste)
    return y


def fake_quantize_learned(x: Tensor, state: LearnedState, texts: OperatorTexts) -> Tensor:
    """Fake-quantize x with learned parameters, whose shifts receive gradients."""
    y: Tensor = _fake_quantize_learned(x, *state, *texts)
    return y


def _shape_of(x: Tensor, spec: QuantSpec) -> tuple[int, ...]:
    return spec.granularity._tiling(tuple(x.shape)).scale_shape


@lru_cache(maxsize=1024)
def _parsed(spec: str, ste: str, mode: str) -> tuple[QuantSpec, Estimator, Learned]:
    return *parse_texts(spec, ste), ScaleMode.from_json(mode)  # type: ignore[return-value]  # mode Learned only


def _params(x: Tensor, state: LearnedState, spec: QuantSpec, mode: Learned) -> QuantParams:
    scale, zero_point = state.values(spec, mode)
    shape = _shape_of(x, spec)
    if scale.numel() != int(np.prod(shape)):
        raise ShapeError(
            f"got scales of shape {tuple(scale.shape)}, but data of shape {tuple(x.shape)} with granularity "
            f"{spec.granularity} need scales of shape {shape}: make params from these data, or reshape the data"
        )
    rounded = rounded_zero_point(zero_point, spec) if zero_point.is_floating_point() else zero_point
    return QuantParams(spec, to_array(scale.to(scale_dtype(x))).reshape(shape), to_array(rounded).reshape(shape))


@torch.library.custom_op("detent::fake_quantize_learned", mutates_args=())
def _fake_quantize_learned(
    x: Tensor,
    initial_scale: Tensor,
    initial_zero_point: Tensor,
    scale_shift: Tensor,
    zero_point_shift: Tensor | None,
    spec: str,
    ste: str,
    mode: str,
) -> Tensor:
    parsed, _, learned = _parsed(spec, ste, mode)
    state = LearnedState(initial_scale, initial_zero_point, scale_shift, zero_point_shift)
    return eager.fake_quantize(x, _params(x, state, parsed, learned))


@torch.library.custom_op("detent::fake_quantize_learned_backward", mutates_args=())
def _learned_backward(
    g: Tensor,
    x: Tensor,
    initial_scale: Tensor,
    initial_zero_point: Tensor,
    scale_shift: Tensor,
    zero_point_shift: Tensor | None,
    spec: str,
    ste: str,
    mode: str,
) -> tuple[Tensor, Tensor, Tensor]:
    parsed, estimator, learned = _parsed(spec, ste, mode)
    state = LearnedState(initial_scale, initial_zero_point, scale_shift, zero_point_shift)
    gx, gs, gz = eager.learned_backward(g, x, _params(x, state, parsed, learned), estimator)
    of_scale, of_zero_point = state.gradients(gs, gz, parsed, learned)
    return gx, of_scale.to(scale_shift.dtype), of_zero_point.to(scale_shift.dtype)


@_fake_quantize_learned.register_fake
def _(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


@_learned_backward.register_fake
def _(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    x, shift = args[1], args[4]
    return x.new_empty(x.shape), torch.empty_like(shift), torch.empty_like(shift)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001 - the signature is torch's
    ctx.save_for_backward(*inputs[:5])
    ctx.texts = inputs[5:]


def _gradient(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    gx, gs, gz = _learned_backward(g, *saved, *ctx.texts)
    return gx, None, None, gs, None if saved[-1] is None else gz, None, None, None


_fake_quantize_learned.register_autograd(_gradient, setup_context=_setup)


# Parameters


@torch.library.custom_op("detent::batch_parameters", mutates_args=())
def batch_parameters(x: Tensor, spec: str) -> tuple[Tensor, Tensor]:
    """Compute scale and zero point from the range of x; non-finite elements are ignored, and nothing is checked."""
    parsed = parse_texts(spec, "")[0]
    lo, hi, _ = eager.bounds(x.detach(), parsed)
    scale, zero_point = _derived(parsed, lo, hi, scale_dtype(x))
    return to_tensor(scale), to_tensor(zero_point)


@batch_parameters.register_fake
def _(x: Tensor, spec: str) -> tuple[Tensor, Tensor]:
    shape = _shape_of(x, parse_texts(spec, "")[0])
    return x.new_empty(shape, dtype=scale_dtype(x)), x.new_empty(shape, dtype=torch.int32)


def _derived(spec: QuantSpec, lo: Any, hi: Any, dtype: torch.dtype) -> tuple[Any, Any]:
    lo, hi = (np.asarray(bound, np.float64) for bound in (lo, hi))
    with np.errstate(all="ignore"):  # a set without finite elements
        scale, zero_point, _ = float_parameters(xp, spec, lo, hi, np.dtype(FLOAT_TYPES[dtype]))
    return np.asarray(scale), np.asarray(zero_point)


@torch.library.custom_op("detent::ema_parameters", mutates_args=("lo", "hi", "scale", "zero_point", "initialized"))
def ema_parameters(
    x: Tensor,
    lo: Tensor,
    hi: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    initialized: Tensor,
    spec: str,
    decay: float,
) -> tuple[Tensor, Tensor]:
    """Update the EMA range with the range of x, and scale and zero point with the new range; return copies of both."""
    parsed, shape = parse_texts(spec, "")[0], tuple(lo.shape)
    batch = [np.asarray(bound, np.float32).reshape(shape) for bound in eager.bounds(x.detach(), parsed)[:2]]
    old = to_array(lo), to_array(hi)
    is_started = (to_array(initialized) != 0) & (old[0] <= old[1])
    with np.errstate(all="ignore"):  # inf - inf where no value was observed; these results are not used
        new = mix_seen_ranges(xp, old, (batch[0], batch[1]), decay, is_started)
    derived = _derived(parsed, *new, scale.dtype)
    for buffer, values in zip((lo, hi, scale, zero_point), (*new, *derived), strict=True):
        buffer.copy_(to_tensor(np.array(values)).reshape(buffer.shape))
    initialized.fill_(1)
    return scale.clone(), zero_point.clone()


@ema_parameters.register_fake
def _(*args: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(args[3]), torch.empty_like(args[4])
