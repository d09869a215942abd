"""BlockFakeQuantize: fake quantization of weights with a block format, as a module without parameters.

A block format derives its scales from the weight in every forward pass, so there is nothing to calibrate and nothing to
learn: the values are exactly those of the bytes that ``dt.quantize`` returns for the current weight. The gradient
passes straight through.

The operator ``torch.ops.detent.fake_quantize_blocks`` runs on the CPU, in eager mode and in compiled code; tensors on
other devices are copied to the CPU and back.
"""

from typing import Any

import torch
from torch import Tensor, nn

from detent.block_format import BlockFormat
from detent.block_tensor import fake_quantize_blocks
from detent.errors import StateError
from detent.gguf import get_block_format
from detent.torch.arrays import check_float, on_cpu, to_array, to_tensor

__all__ = ["BlockFakeQuantize", "fake_quantize_block_format", "straight_through"]


@torch.library.custom_op("detent::fake_quantize_blocks", mutates_args=())
def _fake_quantize(x: Tensor, name: str) -> Tensor:
    data = on_cpu(x.detach()).contiguous()
    return to_tensor(fake_quantize_blocks(to_array(data), get_block_format(name))).to(x.device)


@_fake_quantize.register_fake
def _(x: Tensor, name: str) -> Tensor:  # noqa: ARG001 - the operator's signature
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:  # noqa: ARG001 - the signature of backward
    return g, None


_fake_quantize.register_autograd(_backward)


def fake_quantize_block_format(x: Tensor, form: BlockFormat) -> Tensor:
    """Fake-quantize a tensor with a block format; its gradient passes straight through.

    >>> import detent as dt
    >>> fake_quantize_block_format(torch.tensor([0.0, 1.0, -127.0, *[0.4] * 29]), dt.gguf.q8_0)[:4]
    tensor([   0.,    1., -127.,    0.])
    """
    check_float(x)
    form.check_shape(tuple(x.shape))
    y: Tensor = _fake_quantize(x, form.name)
    return y


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, values: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g, None


def straight_through(weight: Tensor, values: Tensor) -> Tensor:
    """Return ``values``, whose gradient is passed on to ``weight``."""
    result: Tensor = _StraightThrough.apply(weight, values)
    return result


class BlockFakeQuantize(nn.Module):
    """Fake quantization with a block format.

    Args:
        format: block format or its name.

    Attributes:
        enabled: if False, data pass unchanged.
        name: full name in the model, for messages.

    >>> BlockFakeQuantize("q4_k")
    BlockFakeQuantize(q4_k, 4.5 bits per weight)
    """

    def __init__(self, format: BlockFormat | str) -> None:
        super().__init__()
        self.spec = get_block_format(format)
        self.enabled = True
        self.name = ""

    def forward(self, x: Tensor) -> Tensor:
        """Fake-quantize x."""
        return fake_quantize_block_format(x, self.spec) if self.enabled else x

    def get_extra_state(self) -> Tensor:
        """Return the name of the format as bytes in a tensor, which every checkpoint format can store."""
        return torch.tensor(list(self.spec.name.encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        """Raise StateError if the saved format differs from this quantizer's."""
        is_same = isinstance(state, Tensor) and torch.equal(state.cpu(), self.get_extra_state())
        if not is_same:
            raise StateError(
                f"{self.name or 'BlockFakeQuantize'} has the format {self.spec}, but the checkpoint has another one: "
                "prepare the model with the recipe of the checkpoint"
            )

    def extra_repr(self) -> str:
        """Return format and bits per weight."""
        return f"{self.spec}, {self.spec.bits_per_weight:g} bits per weight" + ", disabled" * (not self.enabled)
