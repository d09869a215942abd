"""PyTorch's own operators and its fused observer module. They have no ``out`` and allocate their results.

The backward of PyTorch reads a mask that the forward pass stored. detent recomputes the mask, which is more work.
"""

from collections.abc import Iterator

import numpy as np
import torch
from case import Array, Case, SkippedError, Tool


def tools_for(case: Case) -> Iterator[Tool]:
    """Yield PyTorch for a case."""
    makers = {
        "fake_quantize": _fake_quantize,
        "fake_quantize_backward": _backward,
        "min-max": _minmax,
        "observe + fake_quantize": _observe,
        "quantize int8": _quantize,
    }
    if case.operation not in makers:
        raise SkippedError(f"torch: no operator for {case.operation}")
    if case.dtype == "float64":
        raise SkippedError("torch: uses a float32 scale for float64, which gives different results")
    with torch.no_grad():
        yield makers[case.operation](case)


def tensor(array: Array) -> torch.Tensor:
    """Wrap an array as a tensor that shares its memory."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def array_of(value: torch.Tensor, case: Case) -> Array:
    """Convert a tensor to an array of the case's shape."""
    if value.dtype == torch.bfloat16:
        return value.view(torch.uint16).numpy().view(case.real).reshape(case.shape)
    return value.numpy().reshape(case.shape)


def channels(case: Case) -> tuple[tuple[int, ...], int]:
    """Return a shape and an axis: in this shape, each parameter set is a channel of the axis."""
    if case.group is None:
        return case.shape, int(case.granularity == "axis1")
    if case.shape[-1] % case.group:
        raise SkippedError("torch: incomplete groups")
    return (-1, case.group), 0


def _operands(case: Case) -> tuple[torch.Tensor, tuple]:
    """Return the input tensor, and the other arguments of the operator."""
    params, spec = case.params(), case.spec()
    if case.granularity == "tensor":
        return tensor(case.x), (float(params.scale), int(params.zero_point), spec.qmin, spec.qmax)
    shape, axis = channels(case)
    scale, zero = (torch.from_numpy(values.ravel().copy()) for values in (params.scale, params.zero_point))
    return tensor(case.x).view(shape), (scale, zero, axis, spec.qmin, spec.qmax)


def _fake_quantize(case: Case) -> Tool:
    x, rest = _operands(case)
    per_tensor = case.granularity == "tensor"
    call = torch.fake_quantize_per_tensor_affine if per_tensor else torch.fake_quantize_per_channel_affine
    return Tool("torch eager", lambda: call(x, *rest), lambda: [array_of(call(x, *rest), case)], "torch")


def _backward(case: Case) -> Tool:
    x, rest = _operands(case)
    kind = "tensor" if case.granularity == "tensor" else "channel"
    forward = getattr(torch.ops.aten, f"fake_quantize_per_{kind}_affine_cachemask")
    call = getattr(torch.ops.aten, f"fake_quantize_per_{kind}_affine_cachemask_backward")
    g, mask = tensor(case.g).view(x.shape), forward(x, *rest)[1]
    return Tool("torch eager", lambda: call(g, mask), lambda: [array_of(call(g, mask), case)], "torch")


def _minmax(case: Case) -> Tool:
    if case.granularity == "tensor":
        x = tensor(case.x)
        return Tool("torch eager", lambda: torch.aminmax(x), lambda: [e.float().numpy() for e in x.aminmax()])
    shape, axis = channels(case)
    x = tensor(case.x).view(shape)

    def answer() -> list[Array]:
        return [each.float().numpy().reshape(case.tiling.scale_shape) for each in torch.aminmax(x, dim=1 - axis)]

    return Tool("torch eager", lambda: torch.aminmax(x, dim=1 - axis), answer)


def _quantize(case: Case) -> Tool:
    if case.granularity != "tensor" or case.dtype != "float32":
        raise SkippedError("torch: quantize_per_channel supports only float32 and gives different codes next to ties")
    x, (scale, zero, *_) = _operands(case)

    def run() -> torch.Tensor:
        return torch.quantize_per_tensor(x, scale, zero, torch.qint8)

    return Tool("torch eager", run, lambda: [run().int_repr().numpy()], "torch")


def _observe(case: Case) -> Tool:
    if case.granularity not in {"tensor", "axis0"} or case.dtype != "float32":
        raise SkippedError("torch: the fused module supports only float32, per tensor and per channel")
    from torch.ao.quantization import FusedMovingAvgObsFakeQuantize as Fused  # noqa: PLC0415 - slow and deprecated
    from torch.ao.quantization import MovingAverageMinMaxObserver, MovingAveragePerChannelMinMaxObserver  # noqa: PLC0415

    whole = case.granularity == "tensor"
    module = Fused(
        observer=MovingAverageMinMaxObserver if whole else MovingAveragePerChannelMinMaxObserver,
        quant_min=-128,
        quant_max=127,
        dtype=torch.qint8,
        qscheme=torch.per_tensor_affine if whole else torch.per_channel_affine,
        averaging_constant=1.0,
        **({} if whole else {"ch_axis": 0}),
    )
    x = tensor(case.x)
    return Tool("torch eager", lambda: module(x), lambda: [module(x).detach().numpy()], "torch_fused")
