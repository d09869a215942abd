"""Networks whose output is a picture or a list of boxes: segmentation, restoration, matting, detection, regression."""

import torch
from torch import Tensor, nn

from networks.blocks import Apply, Concatenated, Gate, Heads, Residual, conv, stacked, upsampled
from networks.scenes import CLASSES, SHAPES

STRIDES = (8, 16)
CELLS = tuple((64 // stride) ** 2 for stride in STRIDES)


def double(before: int, after: int, act: nn.Module | None = None) -> nn.Module:
    """Two 3x3 convolutions with batch norm and ReLU."""
    act = act or nn.ReLU()
    return stacked([conv(before, after, act=act), conv(after, after, act=act)])


class Unet(nn.Module):
    """UNet with transposed convolutions; the output is a score for every pixel: is it part of the shape?"""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        sizes = [width << i for i in range(4)]
        self.down = nn.ModuleList(double(a, b) for a, b in zip([3, *sizes[:-1]], sizes, strict=True))
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * size, size, 2, 2) for size in sizes[-2::-1])
        self.mix = nn.ModuleList(double(2 * size, size) for size in sizes[-2::-1])
        self.pool, self.head = nn.MaxPool2d(2), nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Map pictures to logits of shape (batch, 1, side, side)."""
        skips = []
        for i, layer in enumerate(self.down):
            x = layer(self.pool(x) if i else x)
            skips.append(x)
        for up, mix, skip in zip(self.up, self.mix, skips[-2::-1], strict=True):
            x = mix(torch.cat([skip, up(x)], 1))
        return self.head(x)


def deeplab() -> nn.Module:
    """DeepLab: parallel dilated convolutions, and a bilinear resize at the end."""

    def dilated(rate: int) -> nn.Module:
        layer = nn.Conv2d(96, 32, 3, padding=rate, dilation=rate, bias=False)
        return stacked([layer, nn.BatchNorm2d(32), nn.ReLU()])

    backbone = [conv(3, 32, 3, 2, act=nn.ReLU()), conv(32, 64, 3, 2, act=nn.ReLU()), conv(64, 96, act=nn.ReLU())]
    pyramid = Concatenated(conv(96, 32, 1, act=nn.ReLU()), dilated(2), dilated(4), dilated(6))
    head = [conv(128, 64, 1, act=nn.ReLU()), nn.Conv2d(64, 1, 1), Apply(lambda x: upsampled(x, 4, "bilinear"))]
    return stacked([*backbone, pyramid, *head])


def autoencoder() -> nn.Module:
    """Convolutional autoencoder with a small code and sigmoid outputs."""
    layers: list[nn.Module] = []
    for before, after in ((3, 16), (16, 32), (32, 64), (64, 64)):
        layers += [nn.Conv2d(before, after, 3, 2, 1), nn.LeakyReLU(0.1)]
    layers += [nn.Flatten(), nn.Linear(1024, 96), nn.Linear(96, 1024), nn.LeakyReLU(0.1), nn.Unflatten(1, (64, 4, 4))]
    for before, after in ((64, 64), (64, 32), (32, 16)):
        layers += [nn.ConvTranspose2d(before, after, 4, 2, 1), nn.LeakyReLU(0.1)]
    return stacked([*layers, nn.ConvTranspose2d(16, 3, 4, 2, 1), nn.Sigmoid()])


def super_resolution() -> nn.Module:
    """Super-resolution by two: a residual network without batch norm, then DepthToSpace."""
    width = 32
    bodies = [
        stacked([nn.Conv2d(width, width, 3, padding=1), nn.PReLU(), nn.Conv2d(width, width, 3, padding=1)])
        for _ in range(4)
    ]
    layers = [nn.Conv2d(3, width, 3, padding=1), nn.PReLU(), Residual(stacked([Residual(body) for body in bodies]))]
    return stacked([*layers, nn.Conv2d(width, 12, 3, padding=1), nn.PixelShuffle(2)])


class Matting(nn.Module):
    """Portrait matting: a coarse and a fine branch of depthwise convolutions; the output is one opacity map."""

    def __init__(self) -> None:
        super().__init__()
        act = nn.ReLU6()

        def light(before: int, after: int, stride: int = 1) -> nn.Module:
            return stacked([conv(before, before, 3, stride, before, act), conv(before, after, 1, act=act)])

        self.stem = conv(3, 16, 3, 2, act=act)
        self.fine = stacked([light(16, 24), light(24, 24)])
        self.coarse = stacked([light(16, 32, 2), light(32, 64, 2), light(64, 96, 2), light(96, 96), light(96, 96)])
        self.context = Gate(stacked([nn.AdaptiveAvgPool2d(1), nn.Conv2d(96, 96, 1), nn.Sigmoid()]))
        self.narrow, self.mix = conv(96, 24, 1, act=act), stacked([light(48, 32), light(32, 16)])
        self.head = nn.Conv2d(16, 1, 3, padding=1)

    def forward(self, pictures: Tensor) -> Tensor:
        """Map pictures to opacities of shape (batch, 1, side, side)."""
        x = self.stem(pictures)
        coarse = upsampled(self.narrow(self.context(self.coarse(x))), 8, "bilinear")
        x = self.mix(torch.cat([self.fine(x), coarse], 1))
        return torch.sigmoid(upsampled(self.head(x), 2, "bilinear"))


def csp(before: int, after: int, stride: int = 2, act: nn.Module | None = None) -> nn.Module:
    """Stage of a YOLO backbone: a strided convolution, then two branches with SiLU, concatenated."""
    half, act = after // 2, act or nn.SiLU()
    body = stacked(
        [conv(after, half, 1, act=act), Residual(stacked([conv(half, half, act=act), conv(half, half, act=act)]))]
    )
    joined = Concatenated(conv(after, half, 1, act=act), body)
    return stacked([conv(before, after, 3, stride, act=act), joined, conv(after, after, 1, act=act)])


class Yolo(nn.Module):
    """YOLO: two scales joined top-down; boxes in pixels and class scores in one output (batch, 4 + shapes, cells)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.small = stacked([conv(3, 16, 3, 2, act=nn.SiLU()), csp(16, 32)]), csp(32, 64)
        self.large, self.mix = csp(64, 128), stacked([conv(192, 64, act=nn.SiLU())])
        self.boxes = nn.ModuleList(stacked([conv(c, 32, act=nn.SiLU()), nn.Conv2d(32, 4, 1)]) for c in (64, 128))
        self.scores = nn.ModuleList(stacked([conv(c, 32, act=nn.SiLU()), nn.Conv2d(32, SHAPES, 1)]) for c in (64, 128))
        for i, stride in enumerate(STRIDES):
            side = 64 // stride
            rows, columns = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
            centers = (torch.stack([columns, rows]).flatten(1) + 0.5) * stride
            self.register_buffer(f"centers{i}", centers, persistent=False)

    def forward(self, pictures: Tensor) -> Tensor:
        """Detect shapes."""
        small = self.small(self.stem(pictures))
        large = self.large(small)
        levels = (self.mix(torch.cat([small, upsampled(large)], 1)), large)
        predictions = []
        for i, (stride, x) in enumerate(zip(STRIDES, levels, strict=True)):
            box, score = self.boxes[i](x).flatten(2), self.scores[i](x).flatten(2)
            middle = getattr(self, f"centers{i}") + stride * torch.tanh(box[:, :2])
            size = stride * torch.exp(box[:, 2:].clamp(max=3.0))
            predictions.append(torch.cat([middle, size, torch.sigmoid(score)], 1))
        return torch.cat(predictions, 2)


class Ssd(nn.Module):
    """SSD: corners of boxes and class scores of every cell, as two outputs for NonMaxSuppression."""

    def __init__(self) -> None:
        super().__init__()
        self.body, act = Yolo(), nn.ReLU()
        self.body.stem = stacked([conv(3, 16, 3, 2, act=act), conv(16, 32, 3, 2, act=act)])

    def forward(self, pictures: Tensor) -> tuple[Tensor, Tensor]:
        """Return corners (batch, cells, 4) as y and x of both, and scores (batch, shapes, cells)."""
        raw = self.body(pictures)
        x, y, width, height = raw[:, :4].unbind(1)
        corners = torch.stack([y - height / 2, x - width / 2, y + height / 2, x + width / 2], -1)
        return corners, raw[:, 4:]


def regression() -> nn.Module:
    """Four outputs of different ranges: the center in pixels; the radius; brightness and contrast; class scores."""
    body = stacked(
        [
            conv(3, 24, 5, 2, act=nn.ReLU()),
            conv(24, 48, 3, 2, act=nn.ReLU()),
            conv(48, 96, 3, 2, act=nn.ReLU()),
            conv(96, 128, 3, 2, act=nn.ReLU()),
            nn.Flatten(),
            nn.Linear(2048, 128),
            nn.ReLU(),
        ]
    )
    return Heads(
        body,
        stacked([nn.Linear(128, 2), Apply(lambda x: 32 + 16 * x)]),
        stacked([nn.Linear(128, 1), nn.Softplus()]),
        stacked([nn.Linear(128, 2), nn.Tanh()]),
        nn.Linear(128, CLASSES),
    )


def keypoints() -> nn.Module:
    """Hourglass: a heat map of the shape's center, at a quarter of the resolution."""
    act = nn.ReLU()
    inner = stacked([conv(64, 96, 3, 2, act=act), conv(96, 96, act=act), conv(96, 64, act=act), Apply(upsampled)])
    outer = stacked([conv(48, 64, 3, 2, act=act), Residual(inner), conv(64, 48, act=act), Apply(upsampled)])
    stem = [conv(3, 24, 3, 2, act=act), conv(24, 48, 3, 2, act=act)]
    return stacked([*stem, Residual(outer), conv(48, 32, act=act), nn.Conv2d(32, 1, 1), nn.Sigmoid()])
