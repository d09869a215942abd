"""Building blocks: modules that combine other modules, and the layers that most networks share."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional


class Apply(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        """Apply the function."""
        return self.function(x)


class Residual(nn.Module):
    """``after(shortcut(x) + body(x))``."""

    def __init__(self, body: nn.Module, shortcut: nn.Module | None = None, after: nn.Module | None = None) -> None:
        super().__init__()
        self.body, self.shortcut, self.after = body, shortcut or nn.Identity(), after or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Add both paths."""
        return self.after(self.shortcut(x) + self.body(x))


class Gate(nn.Module):
    """``x * gate(x)``."""

    def __init__(self, gate: nn.Module) -> None:
        super().__init__()
        self.gate = gate

    def forward(self, x: Tensor) -> Tensor:
        """Multiply the input by the gate."""
        return x * self.gate(x)


class Concatenated(nn.Module):
    """Outputs of several branches, one after another along the channels."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        """Run the branches on the same input."""
        return torch.cat([branch(x) for branch in self.branches], 1)


class Heads(nn.Module):
    """A body, and several heads: each head computes one output from the output of the body."""

    def __init__(self, body: nn.Module, *heads: nn.Module) -> None:
        super().__init__()
        self.body, self.heads = body, nn.ModuleList(heads)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Run the body once and every head."""
        x = self.body(x)
        return tuple(head(x) for head in self.heads)


class Attention(nn.Module):
    """Self-attention with one projection for queries, keys and values, and an optional bias for the scores."""

    def __init__(self, width: int, heads: int, positions: int = 0) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.bias = nn.Parameter(0.02 * torch.randn(heads, positions, positions)) if positions else None

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map (batch, tokens, width) to the same shape; ``mask`` is added to the scores."""
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        scores = query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5
        if self.bias is not None:
            scores = scores + self.bias
        if mask is not None:
            scores = scores + mask
        return self.mix((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))


def mlp(width: int, hidden: int) -> nn.Sequential:
    """Two linear layers with GELU between them."""
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))


def attention_block(width: int, heads: int) -> nn.Sequential:
    """Attention and an MLP, each after a layer norm and with a residual connection."""
    attention = Residual(nn.Sequential(nn.LayerNorm(width), Attention(width, heads)))
    return nn.Sequential(attention, Residual(nn.Sequential(nn.LayerNorm(width), mlp(width, 4 * width))))


def conv(
    before: int, after: int, kernel: int = 3, stride: int = 1, groups: int = 1, act: nn.Module | None = None
) -> nn.Sequential:
    """Convolution without bias, batch norm and an activation function."""
    layer = nn.Conv2d(before, after, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(after), *([] if act is None else [act]))


def excite(channels: int, inner: int, gate: nn.Module, act: nn.Module | None = None) -> Gate:
    """Squeeze-and-excitation: multiply each channel by a number computed from the means of all channels."""
    narrow, wide = nn.Conv2d(channels, inner, 1), nn.Conv2d(inner, channels, 1)
    return Gate(nn.Sequential(nn.AdaptiveAvgPool2d(1), narrow, act or nn.ReLU(), wide, gate))


def classifier(channels: int, classes: int, dropout: float = 0.0) -> list[nn.Module]:
    """Global average pooling and a linear layer."""
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(dropout), nn.Linear(channels, classes)]


def stacked(layers: Sequence[nn.Module]) -> nn.Sequential:
    """Run modules one after another."""
    return nn.Sequential(*layers)


def upsampled(x: Tensor, factor: int = 2, mode: str = "nearest") -> Tensor:
    """Enlarge a picture."""
    return functional.interpolate(x, scale_factor=factor, mode=mode)
