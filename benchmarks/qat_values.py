"""Count the distinct values that enter each convolution and matmul, to check that the claimed bits are the bits used.

Operands are read where torch dispatches operators, below modules and autograd, so the result does not depend on how a
tool quantizes. Inputs are counted over the whole tensor. Weights are counted per output channel, because each channel
has its own scale.
"""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

ATEN = torch.ops.aten


@dataclass(frozen=True)
class LayerValues:
    """Distinct values of a convolution or matmul: in its input, and in the weight channel that has the most."""

    operation: str
    inputs: int
    weights: int


class ValueCounter(TorchDispatchMode):
    """Counts the values of every convolution and matmul computed within its context."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: list[LayerValues] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:  # noqa: ANN401 - torch's own signature
        """Count the values of the operands, then compute."""
        operands = _operands(func, args)
        if operands is not None:
            inputs, channels = operands
            most = max(channel.unique().numel() for channel in channels)
            self.layers.append(LayerValues(str(func.overloadpacket.__name__), inputs.unique().numel(), most))
        return func(*args, **(kwargs or {}))


def _operands(func: Any, args: tuple) -> tuple[Tensor, Tensor] | None:  # noqa: ANN401 - an operator
    """Return the input, and the weight with one row per output channel; None for other operators."""
    if func in (ATEN.convolution.default, ATEN._convolution.default, ATEN.mkldnn_convolution.default):
        return args[0], args[1].flatten(1)
    if func is ATEN.linear.default:
        return args[0], args[1]
    if func is ATEN.mm.default:
        return args[0], args[1].t()
    if func is ATEN.addmm.default:
        return args[1], args[2].t()
    if func is ATEN.bmm.default:
        return args[0], args[1].transpose(1, 2).flatten(0, 1)
    return None


def count_values(model: nn.Module, inputs: Tensor) -> list[dict]:
    """Count values in one forward pass in evaluation mode, in the order of computation."""
    model.eval()
    with torch.no_grad(), ValueCounter() as counter:
        model(inputs)
    return [asdict(layer) for layer in counter.layers]
