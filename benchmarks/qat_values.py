"""How many distinct numbers enter each convolution and matrix product: whether the bits claimed are the bits used.

Operands are looked at where torch computes, below modules and autograd, so that it makes no difference how a library
quantizes. Inputs are counted over the whole tensor, weights within each output channel, which has a scale of its own.
"""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

ATEN = torch.ops.aten


@dataclass(frozen=True)
class Product:
    """One product: the operation, the distinct values of its input, and the most of any channel of its weight."""

    operation: str
    inputs: int
    weights: int


class Products(TorchDispatchMode):
    """Notes every product that is computed within its context."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Product] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:  # noqa: ANN401 - torch's own signature
        """Look at the operands, then compute."""
        operands = _operands(func, args)
        if operands is not None:
            inputs, channels = operands
            most = max(channel.unique().numel() for channel in channels)
            self.found.append(Product(str(func.overloadpacket.__name__), inputs.unique().numel(), most))
        return func(*args, **(kwargs or {}))


def _operands(func: Any, args: tuple) -> tuple[Tensor, Tensor] | None:  # noqa: ANN401 - an operator
    """The input, and the weight as one row per output channel; None for what is no product."""
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


def products(model: nn.Module, inputs: Tensor) -> list[dict]:
    """The products of one forward pass in evaluation mode, in the order in which they are computed."""
    model.eval()
    with torch.no_grad(), Products() as seen:
        model(inputs)
    return [asdict(product) for product in seen.found]
