"""Fake quantization as a differentiable operation on tensors.

Native kernels process plain tensors in CPU memory, and Triton kernels (``gpu``) those on GPUs; both save one bit per
element for the backward pass. Under ``torch.compile``, ``torch.export`` and ``torch.func``, and on other devices, the
reference kernels run in torch operations (``traced``), which a compiler can fuse. All give the same bits. The
backward pass uses a straight-through estimator (STE) from ``detent.ste``. Learned scales and zero points receive the
gradients of LSQ (Esser et al. 2020) and LSQ+ (Bhalgat et al. 2020).

``torch.ops.detent.fake_quantize`` is the same operation in PyTorch's operator registry, for code that writes or reads
graphs. Its arguments are tensors, strings and integers. It supports meta and fake tensors, gradients and
``torch.vmap``. In a graph, it stays one node, while ``torch.compile`` decomposes and fuses ``qt.fake_quantize``.
"""

from collections.abc import Callable
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from detent import scale_rule
from detent.block_format import BlockFormat
from detent.errors import DtypeError, ParamsError, ShapeError, SpecError, UnsupportedError
from detent.formats import Format
from detent.gguf import find_block_format
from detent.params import ParamsLike, QuantParams
from detent.plan import check_is_params, check_step
from detent.rule import as_estimator
from detent.spec import QuantSpec, get_spec
from detent.ste import Clipped, Custom, Estimator, EstimatorLike, Identity, get_estimator
from detent.torch import eager, traced
from detent.torch import traced_namespace as xp
from detent.torch.arrays import check_float, is_plain, on_cpu, scale_dtype, to_array
from detent.torch.block_quantizer import fake_quantize_block_format
from detent.torch.gpu import launch

__all__ = [
    "Values",
    "apply",
    "apply_traced",
    "check_finite_zero_point",
    "check_second_derivatives",
    "fake_quantize",
    "gradient_of",
    "is_differentiated_twice",
    "learned_derivative_error",
    "learned_gradients",
    "params_with",
    "parse_texts",
    "registered_backward",
    "registered_fake_quantize",
    "rounded_zero_point",
]


def fake_quantize(
    x: Tensor,
    params: ParamsLike | BlockFormat,
    *,
    scale: Tensor | None = None,
    zero_point: Tensor | None = None,
    ste: EstimatorLike = None,
    step: int = 0,
) -> Tensor:
    """Fake-quantize a tensor to the same bits as ``detent.fake_quantize``; gradients are straight-through.

    Args:
        x: float data.
        params: ``QuantParams`` that fit the shape of x, or a spec. With a spec, the range of x determines the
            parameters. Or a block format such as ``dt.gguf.q4_k``. Compilers cannot trace a spec as text: under
            ``torch.compile``, pass ``dt.QuantSpec.parse(text)``.
        scale: tensor that replaces the scale of ``params`` and receives the gradient of the scale (LSQ).
        zero_point: tensor that replaces the zero point of ``params`` and receives the gradient of the zero point
            (LSQ+). The forward pass rounds and clamps this tensor.
        ste: straight-through estimator; None uses the gradient mask of the spec's convention. A callable is called with
            ``(g, x, params)``, where g and x are tensors.
        step: counter for stochastic rounding.

    Raises:
        ShapeError, DtypeError, ParamsError, SpecError: an argument has the wrong shape, type or value.
        RangeError: ``params`` is a spec, and x is empty or contains NaN or infinities. Under
            ``torch.compile`` and ``torch.func``, and on devices other than the CPU, x is not checked.

    >>> import detent as dt, detent.torch as qt, torch
    >>> x = torch.tensor([0.3, 0.9, 99.0], requires_grad=True)
    >>> y = qt.fake_quantize(x, dt.QuantParams(dt.QuantSpec("int8"), scale=0.5))
    >>> y.sum().backward()
    >>> y.detach(), x.grad
    (tensor([ 0.5000,  1.0000, 63.5000]), tensor([1., 1., 0.]))
    >>> qt.fake_quantize(torch.tensor([0.3, -127.0]), "int8")
    tensor([   0., -127.])
    """
    check_float(x)
    form = find_block_format(params)
    if form is not None:
        if scale is not None or zero_point is not None or not (ste is None or isinstance(ste, Identity)):
            raise SpecError(
                f"{form} derives its scales itself, and its gradient passes straight through: omit scale=, zero_point= "
                "and ste="
            )
        return fake_quantize_block_format(x, form)
    for name, part in (("scale", scale), ("zero_point", zero_point)):
        if part is not None:
            check_float(part, name)
    if not isinstance(params, QuantSpec | Format | str):
        check_is_params(params)
        params = cast("QuantParams", params)
    elif is_plain(x):
        params = QuantParams.from_data(params, to_array(x))
    else:
        return _fake_quantize_by_range(x, get_spec(params), scale, zero_point, ste, check_step(step))
    estimator = get_estimator(ste, params.spec.convention)
    return apply(x, Values(params, scale, zero_point), estimator, check_step(step))


def _fake_quantize_by_range(
    x: Tensor, spec: QuantSpec, scale: Tensor | None, zero_point: Tensor | None, ste: EstimatorLike, step: int
) -> Tensor:
    """Fake-quantize x with a spec and the range of x, in torch operations."""
    s, z = traced.derive(spec, *traced.minmax(x, spec))
    learned = scale is not None or zero_point is not None
    s, z = s if scale is None else scale, z if zero_point is None else zero_point
    return apply_traced(x, s, z, spec, get_estimator(ste, spec.convention), step, learned=learned)


class Values(NamedTuple):
    """Quantization parameters; ``scale`` and ``zero_point``, if given, are learned and replace those in ``params``."""

    params: QuantParams
    scale: Tensor | None = None
    zero_point: Tensor | None = None

    @property
    def is_learned(self) -> bool:
        """Whether scale or zero point receives a gradient."""
        return self.scale is not None or self.zero_point is not None

    def without_graph(self) -> "Values":
        """Return a copy for backward, in which learned tensors have a shape and a dtype, but no data."""
        return Values(self.params, *_without_data(self.scale, self.zero_point))


def apply(x: Tensor, values: Values, ste: Estimator, step: int = 0) -> Tensor:
    """Fake-quantize x like ``fake_quantize``, with arguments that are already checked."""
    params, scale, zero_point = values
    if is_plain(x) and all(is_plain(part) for part in (scale, zero_point) if part is not None):
        current = params_with(values) if values.is_learned else params
        eager.check(x, current)
        if values.is_learned:
            learned: Tensor = _LearnedFakeQuantize.apply(x, scale, zero_point, current, ste, step)
            return learned
        if not (torch.is_grad_enabled() and x.requires_grad):
            return eager.fake_quantize(x, current, step)
        quantized: Tensor = _FakeQuantize.apply(x, current, ste, step)
        return quantized
    s = torch.as_tensor(params.scale.copy(), dtype=scale_dtype(x), device=x.device) if scale is None else scale
    z = torch.as_tensor(params.zero_point.copy(), device=x.device) if zero_point is None else zero_point
    return apply_traced(x, s, z, params.spec, ste, step, learned=values.is_learned)


def apply_traced(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    spec: QuantSpec,
    ste: Estimator,
    step: int = 0,
    *,
    learned: bool = False,
) -> Tensor:
    """Fake-quantize x in torch operations, with scale and zero point as tensors."""
    if isinstance(ste, Custom):
        raise DtypeError("got a callable STE, which runs only in eager mode on the CPU: use an estimator in detent.ste")
    shape = spec.granularity._tiling(tuple(x.shape)).scale_shape  # without the cache, which compilers cannot trace
    if scale.numel() != prod(shape):
        raise ShapeError(
            f"got scales of shape {tuple(scale.shape)}, but data of shape {tuple(x.shape)} with granularity "
            f"{spec.granularity} need scales of shape {shape}: make params from these data, or reshape the data"
        )
    _check_device(x, scale, zero_point)
    s = scale.to(scale_dtype(x)).reshape(shape)
    if not learned and isinstance(ste, Clipped) and x.requires_grad and torch.is_grad_enabled():
        z = zero_point.reshape(shape)
        if traced.runs_on_gpu_kernels(x, s, z, spec, ste, step):
            masked: Tensor = _MaskedFakeQuantize.apply(x, s, _rounded(z, spec), spec, ste, step)
            return masked
    function = _CompiledFakeQuantize if torch.compiler.is_compiling() else _TracedFakeQuantize
    y: Tensor = function.apply(x, s, zero_point.reshape(shape), spec, ste, step, learned)
    return y


def _check_device(x: Tensor, scale: Tensor, zero_point: Tensor) -> None:
    """Raise if the parameters are on a different device; PyTorch would multiply by the reciprocal of a CPU scalar."""
    for name, part in (("scale", scale), ("zero_point", zero_point)):
        if part.device != x.device and "meta" not in (part.device.type, x.device.type):
            raise ParamsError(
                f"got x on {x.device}, but {name} on {part.device}, expected one device: move the model or the data, "
                f"for example model.to({str(x.device)!r})"
            )


def params_with(values: Values) -> QuantParams:
    """Return ``values.params`` with the learned scale and zero point instead of the stored ones."""
    params, spec = values.params, values.params.spec
    scale, zero_point = params.scale, params.zero_point
    if values.scale is not None:
        scale = _in_shape("scale", values.scale, scale.shape)
    if values.zero_point is not None:
        check_finite_zero_point(values.zero_point)
        zero_point = _in_shape("zero_point", rounded_zero_point(values.zero_point, spec), zero_point.shape)
    return QuantParams(spec, scale, zero_point)


def check_finite_zero_point(zero_point: Tensor) -> None:
    """Raise if a zero point is NaN or infinite, which rounding and clamping would hide."""
    if not torch.isfinite(zero_point).all():
        raise ParamsError(f"got zero_point {zero_point!r}, expected finite values: check learning rate and data")


def rounded_zero_point(zero_point: Tensor, spec: QuantSpec) -> Tensor:
    """Return the learned zero points as forward uses them: rounded half to even, and clamped."""
    rounded: Tensor = scale_rule.whole_zero_point(xp, spec, zero_point.detach())
    return rounded


def _in_shape(name: str, value: Tensor, shape: tuple[int, ...]) -> Any:
    if value.numel() != int(np.prod(shape)):
        raise ShapeError(
            f"got {name} of shape {tuple(value.shape)}, expected {shape}, as in params: pass a {name} of shape {shape}"
        )
    array = to_array(on_cpu(value)).reshape(shape)
    if not np.isfinite(array).all():
        raise ParamsError(f"got {name} {array!r}, expected finite values: check learning rate and data")
    return array


def gradient_of(g: Tensor, x: Tensor, params: QuantParams, ste: Estimator, step: int, *, reuse: bool = False) -> Tensor:
    """Return the gradient of x, given the gradient g of the fake-quantized x; ``reuse`` permits overwriting g."""
    if isinstance(ste, Identity):
        return g
    if isinstance(ste, Custom):
        gx = ste.function(g, x, params)
        if not isinstance(gx, Tensor) or gx.shape != g.shape or gx.dtype != g.dtype:
            returned = f"{gx.dtype} of shape {tuple(gx.shape)}" if isinstance(gx, Tensor) else type(gx).__name__
            raise DtypeError(
                f"the callable STE returned {returned}, expected {g.dtype} of shape {tuple(g.shape)}: return a tensor "
                "with the shape and dtype of g"
            )
        return gx
    if is_differentiated_twice():
        check_second_derivatives(ste)
        return _linear(g, lambda each: eager.backward(each, x, params, ste, step))
    return eager.backward(g, x, params, ste, step, reuse=reuse)


def is_differentiated_twice() -> bool:
    """Return whether autograd records this backward pass for a second backward pass (``create_graph=True``)."""
    return torch.is_grad_enabled()


def check_second_derivatives(ste: Estimator, *, learned: bool = False) -> None:
    """Raise for estimators other than Identity and Clipped, and for learned scales: they have no second derivatives."""
    if learned:
        raise learned_derivative_error()
    if not isinstance(ste, Identity | Clipped):
        raise UnsupportedError(f"{ste!r} has no second or forward-mode derivatives: use Clipped or Identity")


def learned_derivative_error() -> UnsupportedError:
    """Return the error which says that learned scales have no second or forward-mode derivatives."""
    return UnsupportedError(
        "learned scales have no second or forward-mode derivatives: use another scale mode, or freeze the scales with "
        "scale_shift.requires_grad_(False)"
    )


def _linear(g: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Select elements of g by ``function``; the result is differentiable if autograd records this backward pass."""
    if not is_differentiated_twice():
        return function(g)
    selected: Tensor = _Selection.apply(g, function)
    return selected


class _Selection(torch.autograd.Function):
    """A function that selects elements; its derivative selects the same elements."""

    @staticmethod
    def forward(ctx: Any, g: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.function = function
        return function(g)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return _linear(g, ctx.function), None


def learned_gradients(
    g: Tensor, x: Tensor, values: Values, ste: Estimator, step: int
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of x, scale and zero point, each in its tensor's shape and dtype, or None for a constant."""
    kernel_ste = Identity() if isinstance(ste, Custom) else ste
    gx, *parts = eager.learned_backward(g, x, values.params, kernel_ste, step)
    if isinstance(ste, Custom):
        gx = gradient_of(g, x, values.params, ste, step)
    gs, gz = (
        None if like is None else part.reshape(like.shape).to(like.dtype)
        for part, like in zip(parts, values[1:], strict=True)
    )
    return gx, gs, gz


def _without_data(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    return tuple(None if each is None else torch.empty_like(each, device="meta") for each in tensors)


class _FakeQuantize(torch.autograd.Function):
    """Fake quantization with constant parameters.

    For the backward pass, Clipped saves one bit per element, Identity saves nothing, and other estimators save x.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, params: QuantParams, ste: Estimator, step: int) -> Tensor:
        ctx.call = params, ste, step
        if isinstance(ste, Clipped):
            y, mask, ctx.order = eager.fake_quantize_masked(x, params, ste, step)
            ctx.save_for_backward(mask)
            return y
        if not isinstance(ste, Identity):
            ctx.save_for_backward(x)
        return eager.fake_quantize(x, params, step)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None]:
        params, ste, step = ctx.call
        if isinstance(ste, Identity):
            return g, None, None, None
        (saved,) = ctx.saved_tensors
        if isinstance(ste, Clipped):
            order = ctx.order
            return _linear(g, lambda each: eager.masked_backward(each, saved, order, params)), None, None, None
        return gradient_of(g, saved, params, ste, step), None, None, None


class _MaskedFakeQuantize(torch.autograd.Function):
    """Fake quantization by GPU kernels, with constant parameters and the estimator Clipped; saves a bit per element."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor, zero_point: Tensor, spec: QuantSpec, ste: Estimator, step: int
    ) -> Tensor:
        y, mask, ctx.order = launch.fake_quantize_masked(x, scale, zero_point, spec, ste, step)
        ctx.save_for_backward(mask)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (mask,) = ctx.saved_tensors
        order = ctx.order
        return _linear(g, lambda each: launch.masked_backward(each, mask, order)), *(None,) * 5


class _LearnedFakeQuantize(torch.autograd.Function):
    """Fake quantization with learned scale and zero point, whose values are in ``params``."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        scale: Tensor | None,
        zero_point: Tensor | None,
        params: QuantParams,
        ste: Estimator,
        step: int,
    ) -> Tensor:
        ctx.call = params, ste, step
        ctx.like = _without_data(scale, zero_point)
        ctx.save_for_backward(x)
        return eager.fake_quantize(x, params, step)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        params, ste, step = ctx.call
        (x,) = ctx.saved_tensors
        if is_differentiated_twice():
            check_second_derivatives(ste, learned=any(ctx.needs_input_grad[1:3]))
            return gradient_of(g, x, params, ste, step), None, None, None, None, None
        return *learned_gradients(g, x, Values(params, *ctx.like), ste, step), None, None, None


class _CompiledFakeQuantize(torch.autograd.Function):
    """Fake quantization in torch operations with first derivatives only, as compilers require."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, scale: Tensor, zero_point: Tensor, spec: QuantSpec, ste: Estimator, step: int, learned: bool
    ) -> Tensor:
        return traced.fake_quantize(x, scale, _rounded(zero_point, spec), spec, step)

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, scale, zero_point, *call = inputs
        ctx.save_for_backward(x, scale, zero_point)
        ctx.call = call  # type: ignore[attr-defined]  # contexts accept attributes

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, zero_point = ctx.saved_tensors
        spec, ste, step, learned = ctx.call
        rounded = _rounded(zero_point, spec)
        rest = (None,) * 4
        if not learned:
            return traced.fake_quantize_backward(g, x, scale, rounded, spec, ste, step), None, None, *rest
        gx, gs, gz = traced.fake_quantize_learned_backward(g, x, scale, rounded, spec, ste, None, step)
        return gx, gs, gz.to(zero_point.dtype) if zero_point.is_floating_point() else None, *rest


class _TracedFakeQuantize(_CompiledFakeQuantize):
    """``_CompiledFakeQuantize`` with second and forward-mode derivatives, for ``torch.func`` and devices like CUDA."""

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: Tensor) -> None:
        _CompiledFakeQuantize.setup_context(ctx, inputs, output)
        ctx.save_for_forward(*inputs[:3])
        ctx.set_materialize_grads(False)  # tangents of constants are None, not zeros

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> tuple[Tensor | None, ...]:
        if g is None:
            return (None,) * 7
        x, scale, zero_point = ctx.saved_tensors
        spec, ste, step, learned = ctx.call
        tensors, rest = (g, x, scale, _rounded(zero_point, spec)), (None,) * 4
        if not learned:
            return _TracedGradient.apply(*tensors, spec, ste, step), None, None, *rest
        gx, gs, gz = _TracedLearnedGradient.apply(*tensors, spec, ste, step)
        return gx, gs, gz.to(zero_point.dtype) if zero_point.is_floating_point() else None, *rest

    @staticmethod
    def jvp(ctx: Any, x: Tensor | None, scale: Tensor | None, zero_point: Tensor | None, *_: Any) -> Tensor | None:
        data, s, z = ctx.saved_tensors
        spec, ste, step, learned = ctx.call
        check_second_derivatives(ste, learned=learned and not (scale is None and zero_point is None))
        return None if x is None else _TracedGradient.apply(x, data, s, _rounded(z, spec), spec, ste, step)


class _TracedGradient(torch.autograd.Function):
    """The STE gradient of x, as a function of the output gradient g.

    The function is elementwise and linear in g, so its backward and its jvp are the same function.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        g: Tensor, x: Tensor, scale: Tensor, zero_point: Tensor, spec: QuantSpec, ste: Estimator, step: int
    ) -> Tensor:
        return traced.fake_quantize_backward(g, x, scale, zero_point, spec, ste, step)

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, x, scale, zero_point, *call = inputs
        ctx.save_for_backward(x, scale, zero_point)
        ctx.save_for_forward(x, scale, zero_point)
        ctx.call = call  # type: ignore[attr-defined]  # contexts accept attributes

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        check_second_derivatives(ctx.call[1])
        return _TracedGradient.apply(g, *ctx.saved_tensors, *ctx.call), *(None,) * 6

    @staticmethod
    def jvp(ctx: Any, g: Tensor | None, *_: Any) -> Tensor | None:
        check_second_derivatives(ctx.call[1])
        return None if g is None else _TracedGradient.apply(g, *ctx.saved_tensors, *ctx.call)


class _TracedLearnedGradient(torch.autograd.Function):
    """The gradients of x, scale and zero point, which have no further derivatives."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        g: Tensor, x: Tensor, scale: Tensor, zero_point: Tensor, spec: QuantSpec, ste: Estimator, step: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        return traced.fake_quantize_learned_backward(g, x, scale, zero_point, spec, ste, None, step)

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        ctx.ste = inputs[5]  # type: ignore[attr-defined]  # contexts accept attributes

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        check_second_derivatives(ctx.ste, learned=True)
        return (None,) * 7

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> tuple[Tensor | None, ...]:
        check_second_derivatives(ctx.ste, learned=True)
        return (None,) * 3


def _rounded(zero_point: Tensor, spec: QuantSpec) -> Tensor:
    return rounded_zero_point(zero_point, spec) if zero_point.is_floating_point() else zero_point


# torch.ops.detent


@lru_cache(maxsize=1024)
def parse_texts(spec: str, ste: str) -> tuple[QuantSpec, Estimator]:
    """Parse the texts of a registered operator: a spec as short text or JSON, and an estimator or ""."""
    parsed = QuantSpec.from_json(spec) if spec.startswith("{") else get_spec(spec)
    return parsed, as_estimator(ste) if ste else get_estimator(None, parsed.convention)


def _params(scale: Tensor, zero_point: Tensor, spec: QuantSpec) -> QuantParams:
    return QuantParams(spec, to_array(scale), to_array(zero_point))


@torch.library.custom_op("detent::fake_quantize", mutates_args=())
def registered_fake_quantize(
    x: Tensor, scale: Tensor, zero_point: Tensor, spec: str, ste: str = "", step: int = 0
) -> Tensor:
    """Fake-quantize x.

    Args:
        x: float data.
        scale: float tensor, in the shape that the spec needs for x.
        zero_point: int32 tensor in the same shape as the scale.
        spec: a QuantSpec as short text or as JSON.
        ste: name of the straight-through estimator; "" uses the gradient mask of the spec's convention.
        step: counter for stochastic rounding.

    >>> import detent.torch, torch
    >>> torch.ops.detent.fake_quantize(torch.tensor([0.4, 0.6]), torch.tensor(1.0), torch.tensor(0), "int8")
    tensor([0., 1.])
    """
    parsed, _ = parse_texts(spec, ste)
    if is_plain(x):
        params = _params(scale, zero_point, parsed)
        eager.check(x, params)
        return eager.fake_quantize(x, params, step)
    return traced.fake_quantize(x, scale, zero_point, parsed, step)


@torch.library.custom_op("detent::fake_quantize_backward", mutates_args=())
def registered_backward(
    g: Tensor, x: Tensor, scale: Tensor, zero_point: Tensor, spec: str, ste: str = "", step: int = 0
) -> Tensor:
    """Compute the gradient of x, given the gradient g of ``torch.ops.detent.fake_quantize``."""
    parsed, estimator = parse_texts(spec, ste)
    if isinstance(estimator, Custom):
        raise UnsupportedError(
            "got a callable STE, which a graph cannot contain: use the name of an estimator in detent.ste"
        )
    if is_plain(x) and is_plain(g):
        return eager.backward(g, x, _params(scale, zero_point, parsed), estimator, step).clone()
    return traced.fake_quantize_backward(g, x, scale, zero_point, parsed, estimator, step)


@registered_fake_quantize.register_fake
def _(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


@registered_backward.register_fake
def _(g: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(g)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001 - the signature is torch's
    x, scale, zero_point, *ctx.texts = inputs
    ctx.save_for_backward(x, scale, zero_point)


def _gradient(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    return registered_backward(g, *ctx.saved_tensors, *ctx.texts), None, None, None, None, None


registered_fake_quantize.register_autograd(_gradient, setup_context=_setup)


def _one_by_one(operation: Any, tensors: int) -> Any:
    """Make a vmap rule that runs the operation on each slice; the granularity refers to the axes of a slice."""

    def run(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
        def pick(i: int, j: int) -> Any:
            return args[j] if j >= tensors or in_dims[j] is None else args[j].select(in_dims[j], i)

        return torch.stack([operation(*(pick(i, j) for j in range(len(args)))) for i in range(info.batch_size)]), 0

    return run


registered_fake_quantize.register_vmap(_one_by_one(registered_fake_quantize, 3))
registered_backward.register_vmap(_one_by_one(registered_backward, 4))
