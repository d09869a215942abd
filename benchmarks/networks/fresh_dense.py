"""Networks of the fresh set whose output is a picture or a list of boxes: segmentation, restoration, detection."""

from itertools import pairwise

import torch
from torch import Tensor, nn

from networks.blocks import Apply, Heads, Residual, conv, stacked, upsampled
from networks.convolutional import basic, stem
from networks.dense import csp
from networks.scenes import SHAPES

BINS = 8  # possible distances of a side from the center of a cell, in strides
YOLO_STRIDES = (8, 16)


class Linknet(nn.Module):
    """LinkNet: a residual encoder; a decoder of transposed convolutions that adds the features of the encoder."""

    def __init__(self, widths: tuple[int, ...] = (24, 48, 96, 160)) -> None:
        super().__init__()
        self.stem = stacked(stem(widths[0]))
        pairs = list(pairwise(widths))
        self.down = nn.ModuleList(stacked([basic(a, b, 2), basic(b, b, 1)]) for a, b in pairs)
        self.up = nn.ModuleList(self._decoder(b, a) for a, b in pairs[::-1])
        self.head = stacked([self._decoder(widths[0], 24), nn.ConvTranspose2d(24, 1, 2, 2)])

    @staticmethod
    def _decoder(before: int, after: int) -> nn.Module:
        inner, act = before // 4, nn.ReLU()
        enlarge = nn.ConvTranspose2d(inner, inner, 3, 2, 1, output_padding=1, bias=False)
        return stacked(
            [conv(before, inner, 1, act=act), enlarge, nn.BatchNorm2d(inner), act, conv(inner, after, 1, act=act)]
        )

    def forward(self, pictures: Tensor) -> Tensor:
        """Map pictures to logits of shape (batch, 1, side, side)."""
        skips = [self.stem(pictures)]
        for layer in self.down:
            skips.append(layer(skips[-1]))
        x = skips[-1]
        for layer, skip in zip(self.up, skips[-2::-1], strict=True):
            x = layer(x) + skip
        return self.head(x)


class Pyramid(nn.Module):
    """Semantic FPN: features of all scales are added top-down, and their sum is segmented."""

    def __init__(self, widths: tuple[int, ...] = (24, 48, 96, 144), inner: int = 48) -> None:
        super().__init__()
        act = nn.ReLU()
        self.down = nn.ModuleList(conv(a, b, 3, 2, act=act) for a, b in zip((3, *widths), widths, strict=False))
        self.side = nn.ModuleList(nn.Conv2d(width, inner, 1) for width in widths)
        self.smooth = nn.ModuleList(conv(inner, 32, act=act) for _ in widths)
        self.head = nn.Conv2d(32, 1, 1)

    def forward(self, pictures: Tensor) -> Tensor:
        """Map pictures to logits of shape (batch, 1, side, side)."""
        levels, x = [], pictures
        for layer, side in zip(self.down, self.side, strict=True):
            x = layer(x)
            levels.append(side(x))
        for i in range(len(levels) - 1, 0, -1):
            levels[i - 1] = levels[i - 1] + upsampled(levels[i])
        total = self.smooth[0](levels[0])
        for i in range(1, len(levels)):
            total = total + upsampled(self.smooth[i](levels[i]), 1 << i, "bilinear")
        return upsampled(self.head(total), 2, "bilinear")


def dncnn() -> nn.Module:
    """DnCNN: predicts the noise of a picture by plain convolutions, and subtracts it."""
    width = 48
    middle = [conv(width, width, act=nn.ReLU()) for _ in range(5)]
    noise = [nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), *middle, nn.Conv2d(width, 3, 3, padding=1)]
    return Residual(stacked([*noise, Apply(torch.neg)]))


def srgan() -> nn.Module:
    """Generator of SRGAN: residual blocks with batch norm and PReLU, then a transposed convolution and tanh."""
    width = 48
    bodies = [Residual(stacked([conv(width, width, act=nn.PReLU()), conv(width, width)])) for _ in range(4)]
    first = [nn.Conv2d(3, width, 9, padding=4), nn.PReLU()]
    enlarge = [nn.ConvTranspose2d(width, width, 4, 2, 1), nn.PReLU()]
    last = [nn.Conv2d(width, 3, 9, padding=4), Apply(lambda x: 2 * torch.tanh(x))]
    return stacked([*first, Residual(stacked([*bodies, conv(width, width)])), *enlarge, *last])


class DistributedYolo(nn.Module):
    """YOLOv8: the distance of each side is the mean of a softmax over bins (distribution focal loss).

    The output has boxes as center and size in pixels, and class scores: (batch, 4 + shapes, cells).
    """

    def __init__(self, side: int = 64) -> None:
        super().__init__()
        act = nn.SiLU()
        self.stem, self.small = stacked([conv(3, 16, 3, 2, act=act), csp(16, 32)]), csp(32, 64)
        self.large, self.up = csp(64, 128), conv(192, 64, 1, act=act)
        self.down, self.mix = conv(64, 64, 3, 2, act=act), conv(192, 96, 1, act=act)
        self.boxes = nn.ModuleList(self._head(channels, 4 * BINS) for channels in (64, 96))
        self.scores = nn.ModuleList(self._head(channels, SHAPES) for channels in (64, 96))
        self.register_buffer("bins", torch.arange(BINS).float(), persistent=False)
        centers, strides = [], []
        for stride in YOLO_STRIDES:
            places = (torch.arange(side // stride) + 0.5) * stride
            centers.append(torch.stack([*torch.meshgrid(places, places, indexing="xy")]).flatten(1))
            strides.append(torch.full((centers[-1].shape[1],), float(stride)))
        self.register_buffer("centers", torch.cat(centers, 1), persistent=False)
        self.register_buffer("strides", torch.cat(strides), persistent=False)

    @staticmethod
    def _head(channels: int, after: int) -> nn.Module:
        return stacked([conv(channels, 48, act=nn.SiLU()), conv(48, 48, act=nn.SiLU()), nn.Conv2d(48, after, 1)])

    def forward(self, pictures: Tensor) -> Tensor:
        """Detect shapes."""
        small = self.small(self.stem(pictures))
        large = self.large(small)
        fine = self.up(torch.cat([small, upsampled(large)], 1))
        levels = fine, self.mix(torch.cat([self.down(fine), large], 1))
        boxes = torch.cat([head(x).flatten(2) for head, x in zip(self.boxes, levels, strict=True)], 2)
        scores = torch.cat([head(x).flatten(2) for head, x in zip(self.scores, levels, strict=True)], 2)
        shares = boxes.unflatten(1, (4, BINS)).softmax(2)
        left, top, right, bottom = ((shares * self.bins[:, None]).sum(2) * self.strides).unbind(1)
        x, y = self.centers[0] + (right - left) / 2, self.centers[1] + (bottom - top) / 2
        return torch.cat([torch.stack([x, y, left + right, top + bottom], 1), scores.sigmoid()], 1)


def centernet() -> nn.Module:
    """CenterNet: a heat map of the centers of shapes, offsets within a cell, and sizes, at a quarter of the side."""
    act = nn.ReLU()

    def head(after: int, last: nn.Module) -> nn.Module:
        return stacked([conv(48, 48, act=act), nn.Conv2d(48, after, 1), last])

    def enlarged(before: int, after: int) -> list[nn.Module]:
        return [nn.ConvTranspose2d(before, after, 4, 2, 1, bias=False), nn.BatchNorm2d(after), act]

    body = [conv(3, 24, 3, 2, act=act), basic(24, 48, 2), basic(48, 96, 2), basic(96, 160, 2), basic(160, 160, 1)]
    body += [*enlarged(160, 96), *enlarged(96, 48)]
    sizes = Apply(lambda x: 16 * nn.functional.softplus(x))
    return Heads(stacked(body), head(1, nn.Sigmoid()), head(2, nn.Identity()), head(2, sizes))
