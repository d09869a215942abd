"""The operation in PyTorch's registry: ``torch.ops.detent.fake_quantize``, for those who write or read graphs.

It takes tensors and texts only, works on meta and fake tensors, has gradients and runs under ``torch.vmap``. A graph
that holds it keeps it whole, while ``qt.fake_quantize`` under ``torch.compile`` becomes operations that get fused.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from detent.errors import UnsupportedError
from detent.params import QuantParams
from detent.spec import QuantSpec, get_spec
from detent.ste import Custom, Estimator, get_estimator
from detent.torch import eager, traced
from detent.torch.arrays import is_plain, to_array

__all__ = ["registered_backward", "registered_fake_quantize"]


@lru_cache(maxsize=1024)
def _parse(spec: str, ste: str) -> tuple[QuantSpec, Estimator]:
    how = QuantSpec.from_json(spec) if spec.startswith("{") else get_spec(spec)
    return how, get_estimator(ste or None, how.convention)  # type: ignore[arg-type]  # one of the names, or an error


def _values(scale: Tensor, zero_point: Tensor, spec: QuantSpec) -> QuantParams:
    return QuantParams(spec, to_array(scale), to_array(zero_point))


@torch.library.custom_op("detent::fake_quantize", mutates_args=())
def registered_fake_quantize(
    x: Tensor, scale: Tensor, zero_point: Tensor, spec: str, ste: str = "", step: int = 0
) -> Tensor:
    """Fake quantized x.

    Args:
        x: float data.
        scale, zero_point: float and int32, in the spec's scale shape.
        spec: a short text or the JSON of a QuantSpec.
        ste: the name of the estimator of backward; "" is the mask of the spec's convention.
        step: the counter of stochastic rounding.

    >>> import detent.torch, torch
    >>> torch.ops.detent.fake_quantize(torch.tensor([0.4, 0.6]), torch.tensor(1.0), torch.tensor(0), "int8")
    tensor([0., 1.])
    """
    how, _ = _parse(spec, ste)
    if is_plain(x):
        params = _values(scale, zero_point, how)
        eager.check(x, params)
        return eager.fake_quantize(x, params, step)
    return traced.fake_quantize(x, scale, zero_point, how, step)


@torch.library.custom_op("detent::fake_quantize_backward", mutates_args=())
def registered_backward(
    g: Tensor, x: Tensor, scale: Tensor, zero_point: Tensor, spec: str, ste: str = "", step: int = 0
) -> Tensor:
    """The gradient of x.

    >>> import detent.torch, torch
    >>> one, x = torch.ones(2), torch.tensor([1.0, 900.0])
    >>> torch.ops.detent.fake_quantize_backward(one, x, torch.tensor(1.0), torch.tensor(0), "int8")
    tensor([1., 0.])
    """
    how, estimator = _parse(spec, ste)
    if isinstance(estimator, Custom):
        raise UnsupportedError("graphs hold no callables: name an estimator of detent.ste")
    if is_plain(x) and is_plain(g):
        return eager.backward(g, x, _values(scale, zero_point, how), estimator, step).clone()
    return traced.fake_quantize_backward(g, x, scale, zero_point, how, estimator, step)


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
    """Runs the operation on each slice; all granularities mean the axes of a slice."""

    def run(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
        def pick(i: int, j: int) -> Any:
            return args[j] if j >= tensors or in_dims[j] is None else args[j].select(in_dims[j], i)

        return torch.stack([operation(*(pick(i, j) for j in range(len(args)))) for i in range(info.batch_size)]), 0

    return run


registered_fake_quantize.register_vmap(_one_by_one(registered_fake_quantize, 3))
registered_backward.register_vmap(_one_by_one(registered_backward, 4))
