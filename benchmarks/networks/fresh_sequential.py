"""Networks of the fresh set on sequences, spectrograms, points and tables."""

from itertools import pairwise

import torch
from torch import Tensor, nn

from networks.blocks import Apply, Attention, Residual, conv, stacked
from networks.records import (
    BANDS,
    BRACKETS,
    GRADES,
    LEADS,
    QUANTITIES,
    SOLIDS,
    SYMBOLS,
    WAVES,
)
from networks.sequential import conv1d
from networks.series import SOUND_CLASSES
from networks.textures import TEXTURES

COLUMNS = 36


class Convolution(nn.Module):
    """Convolution module of Conformer, on (batch, steps, width): gated 1x1, depthwise, batch norm, SiLU and 1x1."""

    def __init__(self, width: int, kernel: int = 9) -> None:
        super().__init__()
        depthwise = nn.Conv1d(width, width, kernel, padding=kernel // 2, groups=width)
        self.norm = nn.LayerNorm(width)
        self.layers = stacked(
            [
                nn.Conv1d(width, 2 * width, 1),
                nn.GLU(1),
                depthwise,
                nn.BatchNorm1d(width),
                nn.SiLU(),
                nn.Conv1d(width, width, 1),
            ]
        )

    def forward(self, x: Tensor) -> Tensor:
        """Convolve over the steps."""
        return self.layers(self.norm(x).transpose(1, 2)).transpose(1, 2)


def conformer() -> nn.Module:
    """Conformer on spectrograms: strided convolutions, then half steps of an MLP around attention and convolution."""
    width = 128

    def half() -> nn.Module:
        layers = [nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width)]
        return Residual(stacked([*layers, Apply(lambda x: x / 2)]))

    def block() -> list[nn.Module]:
        attention = Residual(stacked([nn.LayerNorm(width), Attention(width, 4)]))
        return [half(), attention, Residual(Convolution(width)), half(), nn.LayerNorm(width)]

    first = [conv(1, 32, 3, 2, act=nn.ReLU()), nn.Conv2d(32, 32, 3, (2, 1), 1), nn.ReLU()]
    first += [Apply(lambda x: x.permute(0, 3, 1, 2).flatten(2)), nn.Linear(32 * BANDS // 4, width)]
    return stacked([*first, *block(), *block(), nn.Linear(width, SOUND_CLASSES)])


class Wavenet(nn.Module):
    """WaveNet: dilated convolutions with tanh gated by sigmoid; the sum of all skips gives the wave at every step."""

    def __init__(self, width: int = 48, dilations: tuple[int, ...] = (1, 2, 4, 8, 16, 1, 2, 4)) -> None:
        super().__init__()
        self.first = nn.Conv1d(LEADS, width, 1)
        self.gates = nn.ModuleList(nn.Conv1d(width, 2 * width, 3, padding=d, dilation=d) for d in dilations)
        self.mixes = nn.ModuleList(nn.Conv1d(width, width, 1) for _ in dilations)
        self.skips = nn.ModuleList(nn.Conv1d(width, 64, 1) for _ in dilations)
        self.head = stacked([nn.ReLU(), nn.Conv1d(64, 64, 1), nn.ReLU(), nn.Conv1d(64, WAVES, 1)])

    def forward(self, leads: Tensor) -> Tensor:
        """Map (batch, leads, steps) to scores of shape (batch, steps, waves)."""
        x, total = self.first(leads), 0
        for gate, mix, skip in zip(self.gates, self.mixes, self.skips, strict=True):
            value, control = gate(x).chunk(2, 1)
            y = torch.tanh(value) * torch.sigmoid(control)
            x, total = x + mix(y), total + skip(y)
        return self.head(total).transpose(1, 2)


def keyword_spotter() -> nn.Module:
    """DS-CNN: a wide first kernel, depthwise-separable convolutions with ReLU, and pooling, on spectrograms."""
    act, width = nn.ReLU(), 96
    first = nn.Conv2d(1, width, (10, 4), 2, (5, 1), bias=False)
    layers: list[nn.Module] = [first, nn.BatchNorm2d(width), act]
    for _ in range(4):
        layers += [conv(width, width, 3, 1, width, act), conv(width, width, 1, act=act)]
    return stacked([*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, SOUND_CLASSES)])


class Crnn(nn.Module):
    """CRNN: convolutions shrink the bands of a spectrogram, a bidirectional GRU reads the steps."""

    def __init__(self, hidden: int = 64) -> None:
        super().__init__()
        act = nn.ReLU()
        pools = [nn.MaxPool2d((2, 1)) for _ in range(3)]
        layers = [conv(a, b, act=act) for a, b in pairwise((1, 24, 48, 64))]
        self.layers = stacked([each for pair in zip(layers, pools, strict=True) for each in pair])
        self.recurrent = nn.GRU(64 * BANDS // 8, hidden, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * hidden, SOUND_CLASSES)

    def forward(self, spectrograms: Tensor) -> Tensor:
        """Map (batch, 1, bands, steps) to scores of shape (batch, steps, classes)."""
        states, _ = self.recurrent(self.layers(spectrograms).flatten(1, 2).transpose(1, 2))
        return self.head(states)


class Tagger(nn.Module):
    """Sequence to sequence: a bidirectional LSTM encodes, a second one decodes with attention to all encoder states."""

    def __init__(self, width: int = 64, hidden: int = 64) -> None:
        super().__init__()
        self.symbols = nn.Embedding(SYMBOLS, width)
        self.encoder = nn.LSTM(width, hidden, batch_first=True, bidirectional=True)
        self.decoder = nn.LSTM(2 * hidden, 2 * hidden, batch_first=True)
        self.query, self.head = nn.Linear(2 * hidden, 2 * hidden), nn.Linear(4 * hidden, 1 + BRACKETS)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (batch, tokens) to scores of shape (batch, tokens, tags)."""
        memory, _ = self.encoder(self.symbols(tokens))
        states, _ = self.decoder(memory)
        shares = (self.query(states) @ memory.transpose(1, 2) / memory.shape[-1] ** 0.5).softmax(-1)
        return self.head(torch.cat([states, shares @ memory], -1))


def residual_mlp() -> nn.Module:
    """Residual MLP on rows with batch norm, which estimates three quantities of different ranges."""
    width = 192

    def block() -> nn.Module:
        body = [nn.BatchNorm1d(width), nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width)]
        return Residual(stacked(body))

    first = [nn.BatchNorm1d(COLUMNS), nn.Linear(COLUMNS, width)]
    last = [nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, QUANTITIES)]
    return stacked([*first, *(block() for _ in range(4)), *last, Scale((1, 5, 20))])


class Scale(nn.Module):
    """Multiplication of the last axis by constants."""

    def __init__(self, factors: tuple[float, ...]) -> None:
        super().__init__()
        self.register_buffer("factors", torch.tensor(factors, dtype=torch.float32), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply."""
        return x * self.factors


def keras_elu() -> nn.Module:
    """Linear layers with ELU and SELU on rows; ``keras_dense`` writes them as MatMul and Add."""
    acts = nn.ELU(), nn.SELU(), nn.ELU()
    sizes = pairwise((COLUMNS, 512, 512, 384))
    hidden = [stacked([nn.Linear(a, b), act]) for (a, b), act in zip(sizes, acts, strict=True)]
    return stacked([nn.BatchNorm1d(COLUMNS), *hidden, nn.Linear(384, GRADES), nn.Softmax(-1)])


def table_autoencoder() -> nn.Module:
    """Autoencoder on rows with a code of 8 numbers; it reconstructs the normalized row."""
    sizes = (COLUMNS, 512, 256, 8, 256, 512)
    layers = [stacked([nn.Linear(a, b), nn.Tanh() if b == 8 else nn.ELU()]) for a, b in pairwise(sizes)]
    norm = nn.BatchNorm1d(COLUMNS, affine=False)
    return stacked([norm, *layers, nn.Linear(512, COLUMNS)])


class Pointnet(nn.Module):
    """PointNet: a predicted 3x3 matrix turns the points, the same layers run on each, the maximum is classified."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = stacked([conv1d(3, 32, 1), conv1d(32, 96, 1), nn.AdaptiveMaxPool1d(1), nn.Flatten()])
        self.matrix = nn.Linear(96, 9)
        nn.init.zeros_(self.matrix.weight)
        self.matrix.bias.data = torch.eye(3).flatten()
        self.points = stacked([conv1d(a, b, 1) for a, b in pairwise((3, 48, 96, 192, 384))])
        head = [nn.Linear(384, 128, bias=False), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, SOLIDS)]
        self.head = stacked(head)

    def forward(self, points: Tensor) -> Tensor:
        """Classify clouds of shape (batch, 3, points)."""
        turned = self.matrix(self.turn(points)).unflatten(-1, (3, 3)) @ points
        return self.head(self.points(turned).amax(-1))


def deep_sets() -> nn.Module:
    """Deep Sets: linear layers on every point, minus the mean of all points, then the sum is classified."""
    act = nn.Tanh()

    def equivariant(before: int, after: int) -> list[nn.Module]:
        return [Apply(lambda x: x - x.mean(1, keepdim=True)), nn.Linear(before, after), act]

    layers = [layer for a, b in pairwise((3, 128, 192, 192)) for layer in equivariant(a, b)]
    head = [Apply(lambda x: x.amax(1)), nn.Linear(192, 192), act, nn.Linear(192, SOLIDS)]
    return stacked([Apply(lambda x: x.transpose(1, 2)), *layers, *head])


class Fusion(nn.Module):
    """A picture and a row of a table: convolutions and linear layers, joined by a bilinear gate; two outputs."""

    def __init__(self) -> None:
        super().__init__()
        act = nn.ReLU()
        body = [conv(a, b, 3, 2, act=act) for a, b in pairwise((3, 24, 48, 96))]
        self.picture = stacked([*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(96, 128)])
        rows = [nn.BatchNorm1d(COLUMNS), nn.Linear(COLUMNS, 256), nn.GELU(), nn.Linear(256, 128)]
        self.row = stacked(rows)
        self.mix = stacked([nn.LayerNorm(384), nn.Linear(384, 192), act])
        self.heads = nn.ModuleList(nn.Linear(192, classes) for classes in (TEXTURES, GRADES))

    def forward(self, pictures: Tensor, numbers: Tensor) -> tuple[Tensor, ...]:
        """Return the scores of the texture in the picture, and of the grade of the row."""
        x, y = self.picture(pictures), self.row(numbers)
        joined = self.mix(torch.cat([x, y, x * torch.sigmoid(y)], 1))
        return tuple(head(joined) for head in self.heads)
