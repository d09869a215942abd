"""Random networks for tests: convolutions with batch norm, strides, groups and residuals; MLPs; small transformers."""

from __future__ import annotations

import random

import torch
from torch import nn

CHANNELS, CLASSES, SIZE, TOKENS, WIDTH = 3, 5, 12, 6, 16


class Block(nn.Module):
    """Two convolutions with a residual."""

    def __init__(self, channels: int, activation: nn.Module, dilation: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=dilation, dilation=dilation, bias=False)
        self.first_norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, groups=channels)
        self.second_norm = nn.BatchNorm2d(channels)
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.activation(self.first_norm(self.first(x)))
        return torch.relu(self.second_norm(self.second(y)) + x)


class Attention(nn.Module):
    """A transformer layer of Linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        weights = torch.softmax(self.query(y) @ self.key(y).transpose(1, 2) / WIDTH**0.5, -1)
        x = x + self.out(weights @ self.value(y))
        return x + self.down(torch.relu(self.up(self.norm2(x))))


def cnn(draw: random.Random) -> nn.Module:
    """Make a convolutional network."""
    layers: list[nn.Module] = []
    channels = CHANNELS
    for _ in range(draw.randint(2, 4)):
        width, kernel = draw.choice([8, 12, 16]), draw.choice([1, 3, 5])
        groups = draw.choice([1, 1, 1, channels if width % channels == 0 else 1])
        stride = draw.choice([1, 1, 2])
        layers.append(nn.Conv2d(channels, width, kernel, stride, kernel // 2, groups=groups))
        if draw.random() < 0.6:
            layers.append(nn.BatchNorm2d(width))
        layers.append(draw.choice([nn.ReLU, nn.ReLU, nn.ReLU, nn.SiLU, nn.ReLU6, nn.Hardswish])())
        channels = width
        if draw.random() < 0.3:
            layers.append(Block(channels, nn.ReLU(), draw.choice([1, 2])))
    pooled = draw.choice([True, True, False])
    layers += [nn.AdaptiveAvgPool2d(1 if pooled else 2), nn.Flatten()]
    channels *= 1 if pooled else 4
    if draw.random() < 0.5:
        layers += [nn.Linear(channels, 24), nn.ReLU()]
        channels = 24
    return nn.Sequential(*layers, nn.Linear(channels, CLASSES))


def mlp(draw: random.Random) -> nn.Module:
    """Make a multilayer perceptron."""
    layers: list[nn.Module] = [nn.Flatten()]
    width = CHANNELS * SIZE * SIZE
    for _ in range(draw.randint(1, 3)):
        wider = draw.choice([16, 33, 64])
        layers += [nn.Linear(width, wider, bias=draw.random() < 0.8)]
        layers += [nn.BatchNorm1d(wider)] if draw.random() < 0.5 else []
        layers += [draw.choice([nn.ReLU, nn.ReLU, nn.Tanh, nn.GELU])()]
        width = wider
    return nn.Sequential(*layers, nn.Linear(width, CLASSES))


class Transformer(nn.Module):
    """Tokens of pixels, transformer layers, and a head on the first token."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.embed = nn.Linear(CHANNELS * SIZE * SIZE // TOKENS, WIDTH)
        self.layers = nn.Sequential(*(Attention() for _ in range(draw.randint(1, 2))))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embed(x.reshape(x.shape[0], TOKENS, -1)))[:, 0])


def random_network(seed: int) -> nn.Module:
    """Make the network of a seed: mostly convolutional ones."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    kind = draw.choice([cnn, cnn, cnn, cnn, mlp, mlp, Transformer])
    return kind(draw)


def batches(seed: int, count: int, size: int = 16) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Draw pictures and labels; a label is the brightest of five stripes."""
    source = torch.Generator().manual_seed(seed)
    drawn = []
    for _ in range(count):
        x = torch.randn(size, CHANNELS, SIZE, SIZE, generator=source)
        stripes = x.mean((1, 3))[:, : 2 * CLASSES].reshape(size, CLASSES, 2).mean(2)
        drawn.append((x, stripes.argmax(1)))
    return drawn


def train(model: nn.Module, seed: int, steps: int = 50) -> nn.Module:
    """Train a model with Adam."""
    model.train()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for x, labels in batches(seed, steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), labels).backward()
        optimizer.step()
    return model.eval()
