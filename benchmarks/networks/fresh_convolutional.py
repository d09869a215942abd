"""Convolutional networks of the fresh set: small versions of well-known architectures, for pictures of textures."""

from functools import reduce
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from networks.blocks import Apply, Concatenated, Heads, Residual, classifier, conv, excite, stacked, upsampled
from networks.convolutional import RepBlock, channels_last, hard_gate, mobile, stem
from networks.dense import csp
from networks.textures import TEXTURES

COSINE_SCALE = 8.0  # cosines are at most 1, too small for a softmax


def mnasnet() -> nn.Module:
    """MNASNet: inverted residuals with ReLU, kernels of 3x3 and 5x5."""
    settings = ((1, 16, 1, 1, 3), (3, 24, 2, 2, 3), (3, 40, 3, 2, 5), (6, 80, 2, 2, 5), (6, 96, 2, 1, 3))
    return mobile(settings, nn.ReLU(), head=320, classes=TEXTURES)


def efficientnet() -> nn.Module:
    """EfficientNet-B0: inverted residuals with SiLU and squeeze-and-excitation."""

    def gate(channels: int) -> nn.Module:
        return excite(channels, max(4, channels // 16), nn.Sigmoid(), nn.SiLU())

    settings = ((1, 16, 1, 1, 3), (6, 24, 2, 2, 3), (6, 40, 2, 2, 5), (6, 80, 2, 2, 3), (6, 112, 2, 1, 5))
    return mobile(settings, nn.SiLU(), gate=gate, head=320, classes=TEXTURES)


def ghost(before: int, after: int, act: nn.Module | None) -> nn.Module:
    """Ghost module: a 1x1 convolution computes half of the channels, a depthwise one derives the others from it."""
    half = after // 2
    return stacked([conv(before, half, 1, act=act), Concatenated(nn.Identity(), conv(half, half, 3, 1, half, act))])


def ghost_bottleneck(before: int, inner: int, after: int, stride: int, has_gate: bool) -> nn.Module:
    """Bottleneck of two ghost modules with a strided depthwise convolution and squeeze-and-excitation between them."""
    body = [ghost(before, inner, nn.ReLU())]
    body += [conv(inner, inner, 3, stride, inner)] if stride > 1 else []
    body += [hard_gate(inner)] if has_gate else []
    shortcut = None
    if stride > 1 or before != after:
        shortcut = stacked([conv(before, before, 3, stride, before), conv(before, after, 1)])
    return Residual(stacked([*body, ghost(inner, after, None)]), shortcut)


def ghostnet() -> nn.Module:
    """GhostNet."""
    blocks = (
        (16, 32, 16, 1, False),
        (16, 48, 24, 2, False),
        (24, 72, 24, 1, False),
        (24, 96, 40, 2, True),
        (40, 120, 40, 1, True),
        (40, 240, 80, 2, False),
        (80, 320, 80, 1, True),
    )
    layers = [conv(3, 16, 3, 2, act=nn.ReLU()), *(ghost_bottleneck(*block) for block in blocks)]
    return stacked([*layers, conv(80, 320, 1, act=nn.ReLU()), *classifier(320, TEXTURES)])


def mobileone() -> nn.Module:
    """MobileOne: depthwise and 1x1 convolutions with branches; ``merge_branches`` is applied after training."""
    layers: list[nn.Module] = [RepBlock(3, 48, 2)]
    blocks = ((48, 96, 1), (96, 96, 2), (96, 192, 1), (192, 192, 2), (192, 192, 1), (192, 384, 1))
    for before, after, stride in blocks:
        layers += [RepBlock(before, before, stride, (3, 1), before), RepBlock(before, after, 1, (1, 1, 1))]
    return stacked([*layers, *classifier(384, TEXTURES)])


def lcnet_v2() -> nn.Module:
    """PP-LCNetV2: depthwise convolutions with branches, two 1x1 convolutions, HardSwish, shortcuts at the end."""
    act = nn.Hardswish()
    layers: list[nn.Module] = [conv(3, 24, 3, 2, act=act)]
    for before, after, stride in ((24, 48, 1), (48, 96, 2), (96, 96, 1), (96, 192, 2), (192, 192, 1), (192, 192, 1)):
        is_late = before == after == 192
        body: list[nn.Module] = [RepBlock(before, before, stride, (5, 3, 1) if before > 48 else (3, 1), before, act)]
        body += [hard_gate(before)] if is_late else []
        body += [conv(before, after // 2, 1, act=act), conv(after // 2, after, 1, act=act)]
        layers.append(Residual(stacked(body)) if is_late else stacked(body))
    tail = [nn.AdaptiveAvgPool2d(1), nn.Conv2d(192, 384, 1), act, nn.Flatten(), nn.Linear(384, TEXTURES)]
    return stacked(layers + tail)


def regnet() -> nn.Module:
    """RegNetY: residual blocks of group convolutions with constant width, and squeeze-and-excitation."""

    def block(before: int, after: int, stride: int) -> nn.Module:
        act = nn.ReLU()
        body = [conv(before, after, 1, act=act), conv(after, after, 3, stride, after // 16, act)]
        body += [excite(after, before // 4, nn.Sigmoid()), conv(after, after, 1)]
        return Residual(stacked(body), conv(before, after, 1, stride) if stride > 1 else None, act)

    blocks = ((32, 48, 2), (48, 96, 2), (96, 96, 1), (96, 192, 2), (192, 192, 1), (192, 192, 1))
    layers = [conv(3, 32, 3, 2, act=nn.ReLU()), *(block(*each) for each in blocks)]
    return stacked([*layers, *classifier(192, TEXTURES)])


class Preactivated(nn.Module):
    """Pre-activation block: batch norm and activation in front of two 3x3 convolutions; the sum has no activation."""

    def __init__(self, before: int, after: int, stride: int, act: nn.Module) -> None:
        super().__init__()
        self.first = stacked([nn.BatchNorm2d(before), act])
        inner = conv(before, after, 3, stride, act=act)
        self.body = stacked([inner, nn.Conv2d(after, after, 3, padding=1, bias=False)])
        is_same = before == after and stride == 1
        self.shortcut = None if is_same else nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Add the body to the input, or to a projection of the activated input."""
        y = self.first(x)
        return self.body(y) + (x if self.shortcut is None else self.shortcut(y))


def preactivated(first: list[nn.Module], blocks: tuple[tuple[int, int, int], ...], act: nn.Module) -> nn.Module:
    """ResNet of pre-activation blocks."""
    last = blocks[-1][1]
    end = [nn.BatchNorm2d(last), act, *classifier(last, TEXTURES)]
    return stacked([*first, *(Preactivated(*block, act) for block in blocks), *end])


def resnet_v2() -> nn.Module:
    """ResNetV2 with the stem of ResNet."""
    blocks = ((24, 24, 1), (24, 24, 1), (24, 48, 2), (48, 48, 1), (48, 96, 2), (96, 96, 1), (96, 192, 2))
    return preactivated(stem(24), blocks, nn.ReLU())


def wide_resnet() -> nn.Module:
    """Wide ResNet with LeakyReLU: few blocks with many channels."""
    blocks = ((16, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1))
    return preactivated([nn.Conv2d(3, 16, 3, 2, 1, bias=False)], blocks, nn.LeakyReLU(0.1))


def xception() -> nn.Module:
    """Xception: depthwise-separable convolutions after their activation, max pooling, projected shortcuts."""

    def separable(before: int, after: int) -> nn.Module:
        return stacked([nn.Conv2d(before, before, 3, padding=1, groups=before, bias=False), conv(before, after, 1)])

    def entry(before: int, after: int) -> nn.Module:
        body = [nn.ReLU(), separable(before, after), nn.ReLU(), separable(after, after), nn.MaxPool2d(3, 2, 1)]
        return Residual(stacked(body), conv(before, after, 1, 2))

    def middle(width: int) -> nn.Module:
        return Residual(stacked([layer for _ in range(3) for layer in (nn.ReLU(), separable(width, width))]))

    first = [conv(3, 24, 3, 2, act=nn.ReLU()), conv(24, 48)]
    body = [entry(48, 96), entry(96, 160), middle(160), middle(160)]
    return stacked([*first, *body, separable(160, 256), nn.ReLU(), *classifier(256, TEXTURES)])


def darknet() -> nn.Module:
    """CSPDarkNet with Mish, and spatial pyramid pooling in front of the classifier."""
    act = nn.Mish()
    pools = [nn.MaxPool2d(side, 1, side // 2) for side in (3, 5, 7)]
    stages = [csp(before, after, act=act) for before, after in pairwise((24, 64, 128, 320))]
    pyramid = [conv(320, 96, 1, act=act), Concatenated(nn.Identity(), *pools), conv(384, 320, 1, act=act)]
    return stacked([conv(3, 24, act=act), *stages, *pyramid, *classifier(320, TEXTURES)])


class ResponseNorm(nn.Module):
    """Global response normalization of ConvNeXt V2, for channels on the last axis."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gain, self.shift = nn.Parameter(torch.zeros(channels)), nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Scale each channel by its norm over the picture, relative to the mean norm of all channels."""
        norms = (x * x).sum((1, 2), keepdim=True).add(1e-6).sqrt()
        return x + self.gain * (x * (norms / norms.mean(-1, keepdim=True))) + self.shift


def convnext_v2() -> nn.Module:
    """ConvNeXt V2: 7x7 depthwise convolutions, layer norm, linear layers with GELU and response normalization."""
    layers: list[nn.Module] = [nn.Conv2d(3, 40, 4, 4), channels_last(nn.LayerNorm(40))]
    for before, after, blocks in ((40, 40, 2), (40, 80, 3), (80, 160, 2)):
        if before != after:
            layers += [channels_last(nn.LayerNorm(before)), nn.Conv2d(before, after, 2, 2)]
        for _ in range(blocks):
            wide, narrow = nn.Linear(after, 4 * after), nn.Linear(4 * after, after)
            mixed = nn.LayerNorm(after), wide, nn.GELU(), ResponseNorm(4 * after), narrow
            layers.append(Residual(stacked([nn.Conv2d(after, after, 7, 1, 3, groups=after), channels_last(*mixed)])))
    return stacked([*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(160), nn.Linear(160, TEXTURES)])


class Exchange(nn.Module):
    """HRNet: convolutions in branches of several resolutions, then every branch receives the sum of all branches."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        act = nn.ReLU()
        self.bodies = nn.ModuleList(
            Residual(stacked([conv(width, width, act=act), conv(width, width)]), after=act) for width in widths
        )
        self.paths = nn.ModuleList(
            nn.ModuleList(self._path(widths, before, after) for before in range(len(widths)))
            for after in range(len(widths))
        )

    @staticmethod
    def _path(widths: tuple[int, ...], before: int, after: int) -> nn.Module:
        if before > after:
            enlarge = Apply(lambda x: upsampled(x, 1 << (before - after)))
            return stacked([conv(widths[before], widths[after], 1), enlarge])
        steps = [conv(widths[i], widths[i + 1], 3, 2) for i in range(before, after)]
        return stacked(steps) if steps else nn.Identity()

    def forward(self, branches: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Run the branches, and add them up in every resolution."""
        branches = tuple(body(x) for body, x in zip(self.bodies, branches, strict=True))
        sums = [reduce(torch.add, [path(x) for path, x in zip(row, branches, strict=True)]) for row in self.paths]
        return tuple(torch.relu(x) for x in sums)


class Hrnet(nn.Module):
    """HRNet: three resolutions in parallel; the output is a score for every pixel: is it part of the region?"""

    def __init__(self, widths: tuple[int, ...] = (24, 48, 96)) -> None:
        super().__init__()
        act = nn.ReLU()
        self.stem = conv(3, widths[0], 3, 2, act=act)
        self.down = nn.ModuleList(conv(before, after, 3, 2, act=act) for before, after in pairwise(widths))
        self.exchanges = nn.ModuleList(Exchange(widths) for _ in range(2))
        self.head = stacked([conv(sum(widths), 48, 1, act=act), nn.Conv2d(48, 1, 1)])

    def forward(self, pictures: Tensor) -> Tensor:
        """Map pictures to logits of shape (batch, 1, side, side)."""
        branches = [self.stem(pictures)]
        for layer in self.down:
            branches.append(layer(branches[-1]))
        levels: tuple[Tensor, ...] = tuple(branches)
        for exchange in self.exchanges:
            levels = exchange(levels)
        joined = torch.cat([upsampled(x, 1 << i, "bilinear") if i else x for i, x in enumerate(levels)], 1)
        return upsampled(self.head(joined), 2, "bilinear")


def mobilefacenet() -> nn.Module:
    """MobileFaceNet: PReLU, a depthwise convolution in place of pooling; outputs are an embedding and class scores."""

    def bottleneck(before: int, after: int, stride: int) -> nn.Module:
        inner = 2 * after
        body = [conv(before, inner, 1, act=nn.PReLU(inner)), conv(inner, inner, 3, stride, inner, nn.PReLU(inner))]
        body.append(conv(inner, after, 1))
        return Residual(stacked(body)) if stride == 1 else stacked(body)

    layers = [conv(3, 32, 3, 2, act=nn.PReLU(32)), conv(32, 32, 3, 1, 32, nn.PReLU(32))]
    layers += [bottleneck(*block) for block in ((32, 48, 2), (48, 48, 1), (48, 48, 1), (48, 96, 2), (96, 96, 1))]
    whole = nn.Conv2d(192, 192, 8, groups=192, bias=False)
    layers += [conv(96, 192, 1, act=nn.PReLU(192)), whole, nn.BatchNorm2d(192), nn.Flatten()]
    layers += [nn.Linear(192, 64, bias=False), nn.BatchNorm1d(64), Apply(lambda x: normalize(x, dim=-1))]
    return Heads(stacked(layers), nn.Identity(), Cosines(64, TEXTURES))


class Cosines(nn.Module):
    """Cosines of the angles between a vector of length 1 and one learned vector per class, times a constant."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(classes, width))

    def forward(self, x: Tensor) -> Tensor:
        """Multiply by the normalized class vectors."""
        return COSINE_SCALE * (x @ normalize(self.weight, dim=-1).t())


class Siamese(nn.Module):
    """Two pictures through the same network; the output is the cosine of their embeddings, as a logit."""

    def __init__(self) -> None:
        super().__init__()
        act = nn.ReLU()
        widths = pairwise((3, 24, 48, 96, 128))
        self.body = stacked([conv(before, after, 3, 2, act=act) for before, after in widths])
        self.head = stacked([nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 64)])
        self.scale, self.shift = nn.Parameter(torch.tensor(4.0)), nn.Parameter(torch.tensor(-2.0))

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        """Return, for each pair, the logit that both pictures have the same texture."""
        embeddings = [normalize(self.head(self.body(pictures)), dim=-1) for pictures in (first, second)]
        return self.scale * (embeddings[0] * embeddings[1]).sum(-1) + self.shift
