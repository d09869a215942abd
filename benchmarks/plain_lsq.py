"""Plain LSQ: learned step size quantization as published (Esser et al. 2020), in torch operations.

One step size per tensor, trained by the optimizer of the weights; weights are signed, inputs are signed only where the
float network has negative values. Step sizes start at ``2 * mean(|x|) / sqrt(qmax)``, and their gradients are
multiplied by ``1 / sqrt(count * qmax)``. The first and the last layer have 8 bits.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

EDGE_BITS = 8


class _Quantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor, step: Tensor, qmin: int, qmax: int) -> Tensor:
        ctx.save_for_backward(x, step)
        ctx.limits = qmin, qmax
        return (x / step).clamp(qmin, qmax).round() * step

    @staticmethod
    def backward(ctx: object, g: Tensor) -> tuple[Tensor | None, ...]:
        x, step = ctx.saved_tensors
        qmin, qmax = ctx.limits
        scaled = x / step
        below, above = scaled < qmin, scaled > qmax
        slope = torch.where(below, float(qmin), torch.where(above, float(qmax), scaled.round() - scaled))
        of_step = (g * slope).sum() / (x.numel() * qmax) ** 0.5
        return g * ~(below | above), of_step.reshape(step.shape), None, None


class StepSize(nn.Module):
    """A quantizer with one learned step size, which starts at the first tensor."""

    def __init__(self, bits: int, *, signed: bool) -> None:
        super().__init__()
        self.limits = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
        self.step = nn.Parameter(torch.tensor(float("nan")))

    def forward(self, x: Tensor) -> Tensor:
        """Quantize and dequantize x."""
        if torch.isnan(self.step):
            self.step.data = 2 * x.detach().abs().mean() / self.limits[1] ** 0.5
        return _Quantize.apply(x, self.step, *self.limits)


def lsq(model: nn.Module, example: Tensor, bits: int) -> nn.Module:
    """Quantize the inputs and weights of all linear layers and convolutions of a model, in place."""
    layers = [each for each in model.modules() if isinstance(each, nn.Linear | nn.Conv2d)]
    signed = {}
    hooks = [
        each.register_forward_pre_hook(lambda layer, args: signed.update({layer: bool((args[0] < 0).any())}))
        for each in layers
    ]
    with torch.no_grad():
        model.eval()(example)
    for hook in hooks:
        hook.remove()
    for layer in layers:
        width = EDGE_BITS if layer in (layers[0], layers[-1]) else bits
        layer.step_of_weight, layer.step_of_input = StepSize(width, signed=True), StepSize(width, signed=signed[layer])
        layer.forward = _linear(layer) if isinstance(layer, nn.Linear) else _convolution(layer)
    with torch.no_grad():
        model(example)  # step sizes must exist before the optimizer
    return model


def _linear(layer: nn.Linear) -> object:
    return lambda x: functional.linear(layer.step_of_input(x), layer.step_of_weight(layer.weight), layer.bias)


def _convolution(layer: nn.Conv2d) -> object:
    return lambda x: layer._conv_forward(layer.step_of_input(x), layer.step_of_weight(layer.weight), layer.bias)
