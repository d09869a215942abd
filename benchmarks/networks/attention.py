"""Transformers and mixers, for patches of pictures and tokens of texts."""

import torch
from torch import Tensor, nn

from networks.blocks import Apply, Attention, Residual, attention_block, mlp, stacked
from networks.scenes import CLASSES
from networks.series import TOPICS, WORDS

PATCH, SIDE = 8, 64
PATCHES = (SIDE // PATCH) ** 2


class Vit(nn.Module):
    """ViT: pre-norm blocks on patches and a class token."""

    def __init__(self, width: int = 128, blocks: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, PATCH, PATCH)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, PATCHES + 1, width))
        self.blocks = stacked([attention_block(width, heads) for _ in range(blocks)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, pictures: Tensor) -> Tensor:
        """Classify pictures."""
        x = self.patches(pictures).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.positions
        return self.head(self.norm(self.blocks(x))[:, 0])


class Encoder(nn.Module):
    """BERT: embeddings of words and positions, and post-norm blocks with a mask. The first token gives the class."""

    def __init__(self, width: int = 192, blocks: int = 4, heads: int = 6, tokens: int = 64) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(WORDS, width), nn.Embedding(tokens, width)
        self.norm = nn.LayerNorm(width)
        self.attentions = nn.ModuleList(Attention(width, heads) for _ in range(blocks))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * blocks))
        self.mlps = nn.ModuleList(mlp(width, 4 * width) for _ in range(blocks))
        self.pool, self.head = nn.Linear(width, width), nn.Linear(width, TOPICS)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Classify texts; ``mask`` is 0 where a token is padding."""
        x = self.norm(self.words(tokens) + self.positions(torch.arange(tokens.shape[1])))
        scores = (1.0 - mask[:, None, None].float()) * -10000.0
        for attention, layer, first, second in zip(
            self.attentions, self.mlps, self.norms[::2], self.norms[1::2], strict=True
        ):
            x = first(x + attention(x, scores))
            x = second(x + layer(x))
        weights = mask[:, :, None].float()
        return self.head(torch.tanh(self.pool((x * weights).sum(1) / weights.sum(1))))


class Decoder(nn.Module):
    """GPT: a causal language model; the outputs are logits of the next token at every position."""

    def __init__(self, width: int = 128, blocks: int = 3, heads: int = 4, tokens: int = 64) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(WORDS, width), nn.Parameter(0.02 * torch.randn(tokens, width))
        self.register_buffer("causal", torch.full((tokens, tokens), -10000.0).triu(1), persistent=False)
        self.attentions = nn.ModuleList(Attention(width, heads) for _ in range(blocks))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * blocks + 1))
        self.mlps = nn.ModuleList(mlp(width, 4 * width) for _ in range(blocks))
        self.head = nn.Linear(width, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (batch, tokens) to logits of shape (batch, tokens, words)."""
        x = self.words(tokens) + self.positions
        for attention, layer, first, second in zip(
            self.attentions, self.mlps, self.norms[:-1:2], self.norms[1::2], strict=True
        ):
            x = x + attention(first(x), self.causal)
            x = x + layer(second(x))
        return self.head(self.norms[-1](x))


class Window(nn.Module):
    """Swin: attention within windows, which are shifted in every second block."""

    def __init__(self, width: int, heads: int, side: int, window: int, shift: int) -> None:
        super().__init__()
        self.side, self.window, self.shift = side, window, shift
        self.norm, self.attention = nn.LayerNorm(width), Attention(width, heads, window * window)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, side, side, width) to the same shape."""
        parts, size, width = self.side // self.window, self.window, x.shape[-1]
        y = self.norm(x)
        y = torch.roll(y, (-self.shift, -self.shift), (1, 2)) if self.shift else y
        y = y.reshape(-1, parts, size, parts, size, width).transpose(2, 3).reshape(-1, size * size, width)
        y = self.attention(y).reshape(-1, parts, parts, size, size, width).transpose(2, 3)
        y = y.reshape(-1, self.side, self.side, width)
        return x + (torch.roll(y, (self.shift, self.shift), (1, 2)) if self.shift else y)


def swin() -> nn.Module:
    """Swin with two stages; between the stages, four neighboring tokens become one."""

    def stage(width: int, side: int) -> list[nn.Module]:
        mixed = [Residual(stacked([nn.LayerNorm(width), mlp(width, 4 * width)])) for _ in range(2)]
        return [Window(width, width // 32, side, 4, 0), mixed[0], Window(width, width // 32, side, 4, 2), mixed[1]]

    def merged(x: Tensor) -> Tensor:
        return torch.cat([x[:, i::2, j::2] for i in (0, 1) for j in (0, 1)], -1)

    patches = [nn.Conv2d(3, 64, 4, 4), Apply(lambda x: x.permute(0, 2, 3, 1)), nn.LayerNorm(64)]
    merge = [Apply(merged), nn.LayerNorm(256), nn.Linear(256, 128, bias=False)]
    head = [nn.LayerNorm(128), Apply(lambda x: x.mean((1, 2))), nn.Linear(128, CLASSES)]
    return stacked([*patches, *stage(64, 16), *merge, *stage(128, 8), *head])


def mixer() -> nn.Module:
    """MLP-Mixer: linear layers across patches and across channels."""
    width = 128

    def turned(layer: nn.Module) -> nn.Module:
        return stacked([Apply(lambda x: x.transpose(1, 2)), layer, Apply(lambda x: x.transpose(1, 2))])

    layers: list[nn.Module] = [nn.Conv2d(3, width, PATCH, PATCH), Apply(lambda x: x.flatten(2).transpose(1, 2))]
    for _ in range(4):
        layers.append(Residual(stacked([nn.LayerNorm(width), turned(mlp(PATCHES, 2 * PATCHES))])))
        layers.append(Residual(stacked([nn.LayerNorm(width), mlp(width, 4 * width)])))
    return stacked([*layers, nn.LayerNorm(width), Apply(lambda x: x.mean(1)), nn.Linear(width, CLASSES)])
