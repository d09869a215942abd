"""Convolutional classifiers: small versions of well-known architectures, for pictures of 64x64."""

from collections.abc import Callable
from functools import reduce
from itertools import pairwise

import torch
from torch import Tensor, nn

from networks.blocks import (
    Apply,
    Concatenated,
    Residual,
    classifier,
    conv,
    excite,
    stacked,
)
from networks.scenes import CLASSES

Settings = tuple[tuple[int, ...], ...]  # expansion factor, channels, blocks, stride; kernel if it differs
Gates = Callable[[int], nn.Module]  # builds a gate for a number of channels


def hard_gate(channels: int) -> nn.Module:
    """Squeeze-and-excitation of MobileNetV3."""
    return excite(channels, max(8, channels // 4), nn.Hardsigmoid())


def inverted(
    before: int, after: int, factor: int, stride: int, kernel: int, act: nn.Module, gate: Gates | None = None
) -> nn.Module:
    """Inverted residual of MobileNet: a 1x1 expansion, a depthwise convolution, a linear 1x1 projection."""
    inner = before * factor
    layers = [conv(before, inner, 1, act=act)] if factor > 1 else []
    layers.append(conv(inner, inner, kernel, stride, inner, act))
    layers += [gate(inner)] if gate else []
    layers.append(conv(inner, after, 1))
    return Residual(stacked(layers)) if stride == 1 and before == after else stacked(layers)


def mobile(
    settings: Settings,
    act: nn.Module,
    kernel: int = 3,
    gate: Gates | None = None,
    head: int = 256,
    classes: int = CLASSES,
) -> nn.Module:
    """MobileNet-like classifier."""
    layers: list[nn.Module] = [conv(3, 16, 3, 2, act=act)]
    before = 16
    for factor, after, blocks, stride, *kernels in settings:
        for i in range(blocks):
            layers.append(inverted(before, after, factor, stride if i == 0 else 1, *(kernels or [kernel]), act, gate))
            before = after
    return stacked([*layers, conv(before, head, 1, act=act), *classifier(head, classes, 0.1)])


def mobilenet_v2() -> nn.Module:
    """MobileNetV2 with ReLU6."""
    return mobile(((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 3, 2), (6, 96, 2, 1)), nn.ReLU6())


def mobilenet_v3() -> nn.Module:
    """MobileNetV3 with squeeze-and-excitation, HardSwish and 5x5 kernels."""
    return mobile(((1, 16, 1, 2), (4, 24, 2, 2), (4, 48, 3, 1), (6, 96, 2, 2)), nn.Hardswish(), 5, hard_gate)


def efficientnet_lite() -> nn.Module:
    """EfficientNet-Lite: ReLU6, no squeeze-and-excitation."""
    return mobile(((1, 16, 1, 1), (6, 24, 2, 2), (6, 40, 2, 2), (6, 80, 3, 2), (6, 112, 3, 1)), nn.ReLU6(), 5, head=320)


def lcnet() -> nn.Module:
    """LCNet: depthwise and 1x1 convolutions with HardSwish; squeeze-and-excitation and 5x5 kernels at the end."""
    act = nn.Hardswish()
    layers: list[nn.Module] = [conv(3, 16, 3, 2, act=act)]
    for i, ((before, after), stride) in enumerate(
        zip(pairwise((16, 32, 64, 64, 128, 128, 256, 256)), (1, 2, 1, 2, 1, 2, 1), strict=True)
    ):
        layers.append(conv(before, before, 5 if i >= 4 else 3, stride, before, act))
        layers += [excite(before, before // 4, nn.Hardsigmoid())] if i >= 5 else []
        layers.append(conv(before, after, 1, act=act))
    tail = [nn.AdaptiveAvgPool2d(1), nn.Conv2d(256, 512, 1), nn.Hardswish(), nn.Flatten(), nn.Linear(512, CLASSES)]
    return stacked(layers + tail)


def basic(before: int, after: int, stride: int) -> nn.Module:
    """Residual block of two 3x3 convolutions."""
    body = stacked([conv(before, after, 3, stride, act=nn.ReLU()), conv(after, after)])
    return Residual(body, None if stride == 1 and before == after else conv(before, after, 1, stride), nn.ReLU())


def bottleneck(before: int, after: int, stride: int, groups: int = 1) -> nn.Module:
    """Residual block of a 1x1, a 3x3 and a 1x1 convolution."""
    inner = after // 4 * (2 if groups > 1 else 1)
    body = [
        conv(before, inner, 1, act=nn.ReLU()),
        conv(inner, inner, 3, stride, groups, nn.ReLU()),
        conv(inner, after, 1),
    ]
    return Residual(stacked(body), None if before == after else conv(before, after, 1, stride), nn.ReLU())


def stem(channels: int) -> list[nn.Module]:
    """Stem of ResNet: a 7x7 convolution and max pooling."""
    return [conv(3, channels, 7, 2, act=nn.ReLU()), nn.MaxPool2d(3, 2, 1)]


def resnet_18() -> nn.Module:
    """ResNet-18 with half the channels."""
    layers = [
        basic(before, after, stride)
        for before, after, stride in (
            (32, 32, 1),
            (32, 32, 1),
            (32, 64, 2),
            (64, 64, 1),
            (64, 128, 2),
            (128, 128, 1),
            (128, 256, 2),
            (256, 256, 1),
        )
    ]
    return stacked([*stem(32), *layers, *classifier(256, CLASSES)])


def resnet_bottleneck() -> nn.Module:
    """ResNet with bottlenecks."""
    blocks = ((32, 128, 1), (128, 128, 1), (128, 256, 2), (256, 256, 1), (256, 512, 2), (512, 512, 1))
    return stacked([*stem(32), *(bottleneck(*block) for block in blocks), *classifier(512, CLASSES)])


def resnext() -> nn.Module:
    """ResNeXt: bottlenecks with 8 groups."""
    blocks = ((32, 128, 1, 8), (128, 128, 1, 8), (128, 256, 2, 8), (256, 256, 1, 8), (256, 384, 2, 8))
    return stacked([*stem(32), *(bottleneck(*block) for block in blocks), *classifier(384, CLASSES)])


def channels_last(*layers: nn.Module) -> nn.Module:
    """Layers that work on the last axis, between two permutations."""
    return stacked([Apply(lambda x: x.permute(0, 2, 3, 1)), *layers, Apply(lambda x: x.permute(0, 3, 1, 2))])


class Scaled(nn.Module):
    """Layer scale: a learned factor for each channel of the last axis."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.full((channels,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        """Multiply."""
        return x * self.factor


def convnext() -> nn.Module:
    """ConvNeXt: 7x7 depthwise convolutions, layer norm, linear layers on the last axis with GELU, layer scale."""
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 4, 4), channels_last(nn.LayerNorm(32))]
    for before, after, blocks in ((32, 32, 2), (32, 64, 2), (64, 128, 3)):
        if before != after:
            layers += [channels_last(nn.LayerNorm(before)), nn.Conv2d(before, after, 2, 2)]
        for _ in range(blocks):
            mixed = (
                nn.LayerNorm(after),
                nn.Linear(after, 4 * after),
                nn.GELU(),
                nn.Linear(4 * after, after),
                Scaled(after),
            )
            layers.append(Residual(stacked([nn.Conv2d(after, after, 7, 1, 3, groups=after), channels_last(*mixed)])))
    pool = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(128), nn.Linear(128, CLASSES)]
    return stacked(layers + pool)


def densenet() -> nn.Module:
    """DenseNet: every layer reads all layers before it, with batch norm in front of its convolutions."""
    channels, growth = 32, 16
    layers: list[nn.Module] = [nn.Conv2d(3, channels, 3, 2, 1, bias=False)]
    for stage in range(3):
        for _ in range(4):
            new = [nn.BatchNorm2d(channels), nn.ReLU(), nn.Conv2d(channels, 4 * growth, 1, bias=False)]
            new += [nn.BatchNorm2d(4 * growth), nn.ReLU(), nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)]
            layers.append(Concatenated(nn.Identity(), stacked(new)))
            channels += growth
        if stage < 2:
            layers += [
                nn.BatchNorm2d(channels),
                nn.ReLU(),
                nn.Conv2d(channels, channels // 2, 1, bias=False),
                nn.AvgPool2d(2),
            ]
            channels //= 2
    return stacked([*layers, nn.BatchNorm2d(channels), nn.ReLU(), *classifier(channels, CLASSES)])


def inception() -> nn.Module:
    """Inception: the outputs of several branches, which have different ranges, are concatenated."""

    def module(before: int, after: int) -> nn.Module:
        act, part = nn.ReLU(), after // 4
        narrow, wide = (
            conv(before, part, 1, act=act),
            stacked([conv(before, part, 1, act=act), conv(part, part, 5, act=act)]),
        )
        linear = nn.Conv2d(before, part, 3, padding=1)
        pooled = stacked([nn.AvgPool2d(3, 1, 1), nn.Conv2d(before, part, 1), Apply(lambda x: 8 * x)])
        return Concatenated(narrow, wide, linear, pooled)

    layers = [conv(3, 32, 3, 2, act=nn.ReLU()), module(32, 64), nn.MaxPool2d(3, 2, 1), module(64, 128), nn.ReLU()]
    layers += [nn.MaxPool2d(3, 2, 1), module(128, 192), module(192, 256), nn.ReLU()]
    return stacked(layers + classifier(256, CLASSES))


def squeezenet() -> nn.Module:
    """SqueezeNet: fire modules, no batch norm, a convolution as classifier."""

    def fire(before: int, inner: int, after: int) -> nn.Module:
        narrow = stacked([nn.Conv2d(inner, after // 2, 1), nn.ReLU()])
        wide = stacked([nn.Conv2d(inner, after // 2, 3, padding=1), nn.ReLU()])
        return stacked([nn.Conv2d(before, inner, 1), nn.ReLU(), Concatenated(narrow, wide)])

    layers = [nn.Conv2d(3, 48, 3, 2, 1), nn.ReLU(), nn.MaxPool2d(3, 2, 1), fire(48, 16, 96), fire(96, 16, 96)]
    layers += [nn.MaxPool2d(3, 2, 1), fire(96, 32, 160), fire(160, 32, 192), nn.Conv2d(192, CLASSES, 1)]
    return stacked([*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()])


class Shuffled(nn.Module):
    """Unit of ShuffleNetV2: half of the channels pass through, then the channels of both halves alternate."""

    def __init__(self, channels: int, stride: int) -> None:
        super().__init__()
        half, act = channels // 2, nn.ReLU()
        body = [conv(half, half, 1, act=act), conv(half, half, 3, stride, half), conv(half, half, 1, act=act)]
        self.body, self.is_split = stacked(body), stride == 1
        shortcut = [conv(half, half, 3, stride, half), conv(half, half, 1, act=act)]
        self.shortcut = nn.Identity() if stride == 1 else stacked(shortcut)

    def forward(self, x: Tensor) -> Tensor:
        """Run both halves and alternate their channels."""
        first, second = x.chunk(2, 1) if self.is_split else (x, x)
        joined = torch.cat([self.shortcut(first), self.body(second)], 1)
        return joined.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)


def shufflenet() -> nn.Module:
    """ShuffleNetV2."""
    layers: list[nn.Module] = [conv(3, 24, 3, 2, act=nn.ReLU()), nn.MaxPool2d(3, 2, 1)]
    for channels, blocks in ((48, 3), (96, 4), (192, 2)):
        layers += [Shuffled(channels, 2), *(Shuffled(channels, 1) for _ in range(blocks - 1))]
    return stacked([*layers, conv(192, 256, 1, act=nn.ReLU()), *classifier(256, CLASSES)])


def separable() -> nn.Module:
    """Depthwise-separable network with ReLU, like MobileNetV1; ``with_outliers`` is applied after training."""
    layers: list[nn.Module] = [conv(3, 32, 3, 2, act=nn.ReLU())]
    for before, after, stride in ((32, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1)):
        layers += [conv(before, before, 3, stride, before, nn.ReLU()), conv(before, after, 1, act=nn.ReLU())]
    return stacked(layers + classifier(256, CLASSES))


def with_outliers(model: nn.Module) -> None:
    """Scale up every 16th channel before each 1x1 convolution, and scale down its weights; outputs stay the same."""
    for before, after in pairwise(
        block for block in model if isinstance(block[0] if isinstance(block, nn.Sequential) else block, nn.Conv2d)
    ):
        if after[0].kernel_size == (1, 1):
            factors = torch.ones(after[0].in_channels)
            factors[::16] = 24.0
            before[1].weight.data *= factors
            before[1].bias.data *= factors
            after[0].weight.data /= factors[:, None, None]


class RepBlock(nn.Module):
    """RepVGG: the sum of convolutions with several kernels and of the input, each with batch norm."""

    def __init__(
        self,
        before: int,
        after: int,
        stride: int,
        kernels: tuple[int, ...] = (3, 1),
        groups: int = 1,
        act: Callable[[Tensor], Tensor] = torch.relu,
    ) -> None:
        super().__init__()
        self.branches = nn.ModuleList(conv(before, after, kernel, stride, groups) for kernel in kernels)
        self.plain = nn.BatchNorm2d(before) if before == after and stride == 1 else None
        self.merged: nn.Module | None = None
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        """Add the branches, or run the convolution that replaces them."""
        if self.merged is not None:
            return self.act(self.merged(x))
        branches = [branch(x) for branch in self.branches] + ([] if self.plain is None else [self.plain(x)])
        return self.act(reduce(torch.add, branches))

    def merge(self) -> None:
        """Replace the branches by one convolution."""
        layer = self.branches[0][0]
        merged = nn.Conv2d(
            layer.in_channels, layer.out_channels, layer.kernel_size, layer.stride, layer.padding, groups=layer.groups
        )
        parts = [_folded(_padded(branch[0].weight, layer.weight), branch[1]) for branch in self.branches]
        if self.plain is not None:
            size = layer.weight.shape[1]
            identity = torch.eye(size).repeat(layer.groups, 1)[:, :, None, None]
            parts.append(_folded(_padded(identity, layer.weight), self.plain))
        kernel, bias = (sum(part) for part in zip(*parts, strict=True))
        merged.weight.data, merged.bias.data = kernel.detach(), bias.detach()
        self.merged = merged
        del self.branches, self.plain


def _padded(weight: Tensor, like: Tensor) -> Tensor:
    """Pad a kernel with zeros to the size of another kernel."""
    margin = (like.shape[-1] - weight.shape[-1]) // 2
    return nn.functional.pad(weight, (margin,) * 4)


def _folded(weight: Tensor, norm: nn.BatchNorm2d) -> tuple[Tensor, Tensor]:
    gain = norm.weight / torch.sqrt(norm.running_var + norm.eps)
    return weight * gain[:, None, None, None], norm.bias - norm.running_mean * gain


def repvgg() -> nn.Module:
    """RepVGG; ``merge_branches`` is applied after training."""
    blocks = [
        RepBlock(*block)
        for block in ((3, 32, 2), (32, 48, 2), (48, 48, 1), (48, 48, 1), (48, 96, 2), (96, 96, 1), (96, 192, 2))
    ]
    return stacked([*blocks, *classifier(192, CLASSES)])


def merge_branches(model: nn.Module) -> None:
    """Merge the branches of every block."""
    for block in list(model.modules()):
        if isinstance(block, RepBlock):
            block.merge()


def vgg() -> nn.Module:
    """VGG without batch norm: biases, max pooling, and large linear layers at the end."""
    layers: list[nn.Module] = []
    for before, after in pairwise((3, 32, 64, 96, 128)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    head = [nn.Flatten(), nn.Linear(128 * 16, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, CLASSES)]
    return stacked(layers + head)
