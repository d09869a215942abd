"""Networks on sequences and tables: recurrent, convolutional in time, and linear layers on rows."""

from itertools import pairwise

import torch
from torch import Tensor, nn

from networks.blocks import Apply, Residual, attention_block, stacked
from networks.series import FIELD_VALUES, FIELDS, MOTION_CLASSES, SOUND_CLASSES, TABLE_CLASSES

SENSORS, COLUMNS = 6, 40


class Recurrent(nn.Module):
    """A recurrent layer, and a classifier on its last output or on the mean of its outputs."""

    def __init__(self, kind: type[nn.RNNBase], hidden: int, layers: int, bidirectional: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(SENSORS)
        self.layer = kind(SENSORS, hidden, layers, batch_first=True, bidirectional=bidirectional)
        self.is_mean = bidirectional
        self.head = nn.Linear(hidden * (2 if bidirectional else 1), MOTION_CLASSES)

    def forward(self, readings: Tensor) -> Tensor:
        """Classify readings of shape (batch, steps, sensors)."""
        states, _ = self.layer(self.norm(readings.transpose(1, 2)).transpose(1, 2))
        return self.head(states.mean(1) if self.is_mean else states[:, -1])


def lstm() -> nn.Module:
    """Two bidirectional LSTM layers."""
    return Recurrent(nn.LSTM, 96, 2, bidirectional=True)


def gru() -> nn.Module:
    """One GRU layer, classified by its last state."""
    return Recurrent(nn.GRU, 192, 1, bidirectional=False)


def conv1d(before: int, after: int, kernel: int, stride: int = 1, dilation: int = 1) -> nn.Module:
    """1-D convolution, batch norm and ReLU."""
    padding = dilation * (kernel - 1) // 2
    layer = nn.Conv1d(before, after, kernel, stride, padding, dilation, bias=False)
    return stacked([layer, nn.BatchNorm1d(after), nn.ReLU()])


def audio() -> nn.Module:
    """M5: strided 1-D convolutions on raw sound."""
    layers = [
        conv1d(1, 32, 79, 4),
        nn.MaxPool1d(4),
        conv1d(32, 64, 3),
        nn.MaxPool1d(4),
        conv1d(64, 128, 3),
        nn.MaxPool1d(4),
    ]
    return stacked([*layers, conv1d(128, 256, 3), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(256, SOUND_CLASSES)])


class Causal(nn.Module):
    """Causal 1-D convolution with a dilation: it pads only the start."""

    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        self.pad, self.layer = 2 * dilation, nn.Conv1d(channels, channels, 3, dilation=dilation)

    def forward(self, x: Tensor) -> Tensor:
        """Convolve."""
        return self.layer(nn.functional.pad(x, (self.pad, 0)))


def tcn() -> nn.Module:
    """TCN: residual blocks of causal convolutions with growing dilation; classified by the last step."""
    blocks = [
        Residual(stacked([Causal(64, d), nn.ReLU(), Causal(64, d), nn.ReLU()]), after=nn.ReLU()) for d in (1, 2, 4, 8)
    ]
    first = [nn.BatchNorm1d(SENSORS), nn.Conv1d(SENSORS, 64, 1)]
    return stacked(
        [
            Apply(lambda x: x.transpose(1, 2)),
            *first,
            *blocks,
            Apply(lambda x: x[:, :, -1]),
            nn.Linear(64, MOTION_CLASSES),
        ]
    )


class Speech(nn.Module):
    """A speech encoder: strided convolutions on raw sound, then a transformer; the output is a class for each step."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        sizes = ((1, 48, 10, 5), (48, 64, 8, 4), (64, width, 4, 2), (width, width, 4, 2))
        convs = [stacked([nn.Conv1d(a, b, k, s), nn.GELU()]) for a, b, k, s in sizes]
        self.features, self.norm = stacked(convs), nn.LayerNorm(width)
        self.blocks = stacked([attention_block(width, 4) for _ in range(3)])
        self.head = nn.Linear(width, SOUND_CLASSES)

    def forward(self, waves: Tensor) -> Tensor:
        """Map (batch, 1, samples) to (batch, steps, classes)."""
        return self.head(self.blocks(self.norm(self.features(waves).transpose(1, 2))))


class Table(nn.Module):
    """A recommender: linear layers on embeddings of categories and on numbers of different ranges."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(FIELD_VALUES, 16) for _ in range(FIELDS))
        self.norm = nn.BatchNorm1d(COLUMNS)
        sizes = (COLUMNS + 16 * FIELDS, 256, 256, 128)
        hidden = [stacked([nn.Linear(a, b), nn.BatchNorm1d(b), nn.ReLU()]) for a, b in pairwise(sizes)]
        self.layers = stacked([*hidden, nn.Linear(128, TABLE_CLASSES)])

    def forward(self, numbers: Tensor, fields: Tensor) -> Tensor:
        """Classify rows."""
        embedded = [layer(fields[:, i]) for i, layer in enumerate(self.embeddings)]
        return self.layers(torch.cat([self.norm(numbers), *embedded], 1))


def keras_dense() -> nn.Module:
    """Linear layers on rows; ``keras_graph`` writes them as MatMul and Add."""
    sizes = (COLUMNS, 256, 512, 256)
    hidden = [stacked([nn.Linear(a, b), nn.ReLU()]) for a, b in pairwise(sizes)]
    return stacked([nn.BatchNorm1d(COLUMNS), *hidden, nn.Linear(256, TABLE_CLASSES), nn.Softmax(-1)])
