"""Transformers of the fresh set, and networks that mix tokens without attention: for pictures and expressions."""

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from networks.blocks import Apply, Attention, Residual, attention_block, conv, mlp, stacked
from networks.convolutional import Scaled, inverted
from networks.records import BRACKETS, GROUPS, SYMBOLS
from networks.textures import TEXTURES

PATCH, SIDE = 8, 64
PATCHES = (SIDE // PATCH) ** 2
MASKED = -10000.0  # score of a token that attention must ignore
DISTANCES = 32  # T5 tells apart distances below half of this number, with their sign


class Deit(nn.Module):
    """DeiT: a class token and a distillation token, layer scale, and the mean of two heads."""

    def __init__(self, width: int = 144, blocks: int = 4, heads: int = 3) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, PATCH, PATCH)
        self.tokens = nn.Parameter(0.02 * torch.randn(1, 2, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, PATCHES + 2, width))
        layers: list[nn.Module] = []
        for _ in range(blocks):
            layers.append(Residual(stacked([nn.LayerNorm(width), Attention(width, heads), Scaled(width)])))
            layers.append(Residual(stacked([nn.LayerNorm(width), mlp(width, 4 * width), Scaled(width)])))
        self.blocks = stacked([*layers, nn.LayerNorm(width)])
        self.heads = nn.ModuleList(nn.Linear(width, TEXTURES) for _ in range(2))

    def forward(self, pictures: Tensor) -> Tensor:
        """Classify pictures."""
        x = self.patches(pictures).flatten(2).transpose(1, 2)
        x = self.blocks(torch.cat([self.tokens.expand(x.shape[0], -1, -1), x], 1) + self.positions)
        return (self.heads[0](x[:, 0]) + self.heads[1](x[:, 1])) / 2


class Hybrid(nn.Module):
    """Block of MobileViT: a local convolution, transformer blocks across 2x2 patches, and a fusing convolution."""

    def __init__(self, channels: int, width: int, blocks: int) -> None:
        super().__init__()
        act = nn.SiLU()
        self.local = stacked([conv(channels, channels, act=act), nn.Conv2d(channels, width, 1, bias=False)])
        self.blocks = stacked([*(attention_block(width, 4) for _ in range(blocks)), nn.LayerNorm(width)])
        self.project, self.fuse = conv(width, channels, 1, act=act), conv(2 * channels, channels, act=act)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, channels, side, side) to the same shape; tokens at the same place of all patches attend."""
        y = self.local(x)
        width, half = y.shape[1], y.shape[2] // 2
        tokens = y.reshape(-1, width, half, 2, half, 2).permute(0, 3, 5, 2, 4, 1).reshape(-1, half * half, width)
        tokens = self.blocks(tokens).reshape(-1, 2, 2, half, half, width).permute(0, 5, 3, 1, 4, 2)
        return self.fuse(torch.cat([x, self.project(tokens.reshape(-1, width, 2 * half, 2 * half))], 1))


def mobilevit() -> nn.Module:
    """MobileViT: inverted residuals with SiLU, and transformer blocks on the small feature maps."""
    act = nn.SiLU()
    layers = [conv(3, 16, 3, 2, act=act), inverted(16, 24, 2, 2, 3, act), inverted(24, 48, 3, 1, 3, act)]
    layers += [Hybrid(48, 64, 2), inverted(48, 64, 3, 2, 3, act), Hybrid(64, 80, 2), conv(64, 192, 1, act=act)]
    return stacked([*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(192, TEXTURES)])


class ChannelScaled(Scaled):
    """Layer scale for channels on the second axis of a picture."""

    def forward(self, x: Tensor) -> Tensor:
        """Multiply."""
        return x * self.factor[:, None, None]


def poolformer() -> nn.Module:
    """PoolFormer: average pooling mixes tokens; group norm with one group, 1x1 convolutions, layer scale."""

    def block(width: int) -> list[nn.Module]:
        pooled = Apply(lambda x: nn.functional.avg_pool2d(x, 3, 1, 1, count_include_pad=False) - x)
        mixed = [nn.Conv2d(width, 4 * width, 1), nn.GELU(), nn.Conv2d(4 * width, width, 1)]
        bodies = ([pooled], mixed)
        return [Residual(stacked([nn.GroupNorm(1, width), *body, ChannelScaled(width)])) for body in bodies]

    layers: list[nn.Module] = [nn.Conv2d(3, 48, 7, 4, 2)]
    layers += [*block(48), *block(48), nn.Conv2d(48, 96, 3, 2, 1), *block(96), *block(96)]
    layers += [nn.Conv2d(96, 160, 3, 2, 1), *block(160), *block(160), nn.GroupNorm(1, 160)]
    return stacked([*layers, Apply(lambda x: x.mean((2, 3))), nn.Linear(160, TEXTURES)])


class PostNorm(nn.Module):
    """Post-norm block with the approximation of GELU by tanh."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention, self.norms = Attention(width, heads), nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.layers = stacked([nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width)])

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, tokens, width) to the same shape."""
        x = self.norms[0](x + self.attention(x))
        return self.norms[1](x + self.layers(x))


class PostNormEncoder(nn.Module):
    """Post-norm encoder: every block has its own weights, or all blocks share one.

    Args:
        inner: width of the embeddings, which a linear layer maps to the width of the blocks, as in ALBERT.
        is_shared: whether all blocks have the same weights, as in ALBERT.
    """

    def __init__(self, width: int, blocks: int, heads: int, tokens: int, inner: int, is_shared: bool) -> None:
        super().__init__()
        self.symbols, self.positions = nn.Embedding(SYMBOLS, inner), nn.Embedding(tokens, inner)
        self.first = stacked([nn.LayerNorm(inner), nn.Linear(inner, width)])
        own = [PostNorm(width, heads) for _ in range(1 if is_shared else blocks)]
        self.blocks, self.repeats = stacked(own), blocks if is_shared else 1
        self.pool, self.head = nn.Linear(width, width), nn.Linear(width, GROUPS)

    def forward(self, tokens: Tensor) -> Tensor:
        """Classify expressions of shape (batch, tokens) by the names that they prefer."""
        x = self.first(self.symbols(tokens) + self.positions(torch.arange(tokens.shape[1])))
        for _ in range(self.repeats):
            x = self.blocks(x)
        return self.head(torch.tanh(self.pool(x.mean(1))))


def roberta() -> nn.Module:
    """Encoder with separate blocks, like RoBERTa."""
    return PostNormEncoder(160, 4, 5, 48, 160, is_shared=False)


def albert() -> nn.Module:
    """ALBERT: all blocks share their weights, and embeddings are narrow."""
    return PostNormEncoder(160, 4, 4, 48, 64, is_shared=True)


class RootMeanSquare(nn.Module):
    """RMSNorm: division by the root mean square of the last axis, and a learned gain."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Normalize."""
        return self.gain * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class GatedLinear(nn.Module):
    """SwiGLU and its relatives: the product of an activated and a plain linear layer, then a third layer."""

    def __init__(self, width: int, hidden: int, act: nn.Module | None = None) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down, self.act = nn.Linear(hidden, width, bias=False), act

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., width) to the same shape."""
        gate = self.gate(x)
        return self.down((silu(gate) if self.act is None else self.act(gate)) * self.up(x))


class GroupedAttention(nn.Module):
    """Causal attention of Llama: rotary positions, and groups of query heads that share keys and values."""

    def __init__(self, width: int, heads: int, groups: int, tokens: int) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.query = nn.Linear(width, width, bias=False)
        self.key, self.value = (nn.Linear(width, groups * self.size, bias=False) for _ in range(2))
        self.mix = nn.Linear(width, width, bias=False)
        angles = torch.outer(torch.arange(tokens), 10000.0 ** -(torch.arange(0, self.size, 2) / self.size))
        turned = torch.cat([angles, angles], -1)
        self.register_buffer("cosines", turned.cos(), persistent=False)
        self.register_buffer("sines", turned.sin(), persistent=False)
        self.register_buffer("causal", torch.full((tokens, tokens), MASKED).triu(1), persistent=False)

    def _rotated(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * self.cosines + torch.cat([-second, first], -1) * self.sines

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, tokens, width) to the same shape."""
        query = self._rotated(self.query(x).unflatten(-1, (self.heads, -1)).transpose(1, 2))
        key = self._rotated(self.key(x).unflatten(-1, (self.groups, -1)).transpose(1, 2))
        value = self.value(x).unflatten(-1, (self.groups, -1)).transpose(1, 2)
        key, value = (part.repeat_interleave(self.heads // self.groups, 1) for part in (key, value))
        scores = query @ key.transpose(-2, -1) / self.size**0.5 + self.causal
        return self.mix((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))


def llama() -> nn.Module:
    """Llama: a causal language model with RMSNorm, rotary positions, grouped queries and SwiGLU."""
    width, blocks, tokens = 128, 3, 48
    layers: list[nn.Module] = [nn.Embedding(SYMBOLS, width)]
    for _ in range(blocks):
        layers.append(Residual(stacked([RootMeanSquare(width), GroupedAttention(width, 8, 2, tokens)])))
        layers.append(Residual(stacked([RootMeanSquare(width), GatedLinear(width, 352)])))
    return stacked([*layers, RootMeanSquare(width), nn.Linear(width, SYMBOLS, bias=False)])


class RelativeAttention(nn.Module):
    """Attention of T5: no biases, no division of the scores, and a learned score for each distance."""

    def __init__(self, width: int, heads: int, tokens: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.mix = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.query.weight.data *= (width // heads) ** -0.5  # T5 moves the division of the scores into the weights
        self.distances = nn.Embedding(DISTANCES, heads)
        places = torch.arange(tokens)
        buckets = (places[None] - places[:, None]).clamp(-DISTANCES // 2, DISTANCES // 2 - 1) + DISTANCES // 2
        self.register_buffer("buckets", buckets, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, tokens, width) to the same shape."""
        parts = [
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        ]
        scores = parts[0] @ parts[1].transpose(-2, -1) + self.distances(self.buckets).permute(2, 0, 1)
        return self.mix((scores.softmax(-1) @ parts[2]).transpose(1, 2).flatten(2))


def t5() -> nn.Module:
    """Encoder of T5: relative positions, RMSNorm, gated GELU; the output is the bracket around every token."""
    width, blocks, tokens = 128, 4, 64
    layers: list[nn.Module] = [nn.Embedding(SYMBOLS, width)]
    for _ in range(blocks):
        layers.append(Residual(stacked([RootMeanSquare(width), RelativeAttention(width, 4, tokens)])))
        layers.append(Residual(stacked([RootMeanSquare(width), GatedLinear(width, 256, nn.GELU("tanh"))])))
    return stacked([*layers, RootMeanSquare(width), nn.Linear(width, 1 + BRACKETS)])
