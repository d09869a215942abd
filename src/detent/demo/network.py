"""The network: convolutions with batch norm, two depthwise blocks and a classifier, for images of 8 x 8.

45,434 parameters: small enough to train in seconds, and deep and narrow enough for 2-bit weights to hurt.
"""

from collections import OrderedDict

from torch import nn

__all__ = ["make_network"]

CLASSES = 10
WIDTHS = (16, 32, 64, 32)
AREA = 4 * 4  # of what the classifier sees


def make_network() -> nn.Sequential:
    """A new network with random weights; it takes (n, 1, 8, 8) and gives logits (n, 10).

    >>> import torch
    >>> make_network()(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 10])
    >>> sum(parameter.numel() for parameter in make_network().parameters())
    45434
    """
    first, second, third, hidden = WIDTHS
    layers: list[tuple[str, nn.Module]] = [
        *_norm_and_relu("conv1", nn.Conv2d(1, first, 3, padding=1, bias=False)),
        *_norm_and_relu("conv2", nn.Conv2d(first, second, 3, padding=1, bias=False)),
        *_norm_and_relu("depthwise3", nn.Conv2d(second, second, 3, stride=2, padding=1, groups=second, bias=False)),
        *_norm_and_relu("pointwise3", nn.Conv2d(second, third, 1, bias=False)),
        *_norm_and_relu("depthwise4", nn.Conv2d(third, third, 3, padding=1, groups=third, bias=False)),
        *_norm_and_relu("pointwise4", nn.Conv2d(third, third, 1, bias=False)),
        ("flatten", nn.Flatten()),
        ("hidden", nn.Linear(third * AREA, hidden)),
        ("hidden_relu", nn.ReLU()),
        ("classifier", nn.Linear(hidden, CLASSES)),
    ]
    return nn.Sequential(OrderedDict(layers))


def _norm_and_relu(name: str, layer: nn.Conv2d) -> list[tuple[str, nn.Module]]:
    return [(name, layer), (f"{name}_norm", nn.BatchNorm2d(layer.out_channels)), (f"{name}_relu", nn.ReLU())]
