"""Models of the QAT benchmarks: small, common architectures, without any code for quantization.

Each entry of ``MODELS`` creates a float model and a batch for it: six convolutions with batch norm on 32x32 images, a
ResNet-18 and a network like MobileNet for images of that size, transformers of width 256 and 512, MLPs, and a network
with 115,000 parameters, in which calls take longer than arithmetic. A training step takes about 2 ms (the small
network) to 2 s (ResNet-18) on one core. ``digits`` is the network of the accuracy table; it trains on 28x28 images in
less than a minute per epoch. ``VisionTransformer`` is the transformer of the table of default settings.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, LAYERS, HEADS, TOKENS, VOCABULARY = 256, 4, 4, 64, 256


def conv_bn_relu(channels_in: int, channels_out: int, stride: int = 1) -> list[nn.Module]:
    """Convolution, batch norm and ReLU."""
    convolution = nn.Conv2d(channels_in, channels_out, 3, stride=stride, padding=1, bias=False)
    return [convolution, nn.BatchNorm2d(channels_out), nn.ReLU()]


def cnn() -> nn.Module:
    """Conv-bn-relu six times, from 3 to 128 channels and from 32x32 to 8x8, then a linear classifier."""
    return nn.Sequential(
        *conv_bn_relu(3, 32),
        *conv_bn_relu(32, 32),
        nn.MaxPool2d(2),
        *conv_bn_relu(32, 64),
        *conv_bn_relu(64, 64),
        nn.MaxPool2d(2),
        *conv_bn_relu(64, 128),
        *conv_bn_relu(128, 128),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


def small() -> nn.Module:
    """Three convolutions and two linear layers for 28x28 images, with 115,000 parameters."""
    return nn.Sequential(
        *conv_bn_relu(1, 16, stride=2),
        *conv_bn_relu(16, 32),
        *conv_bn_relu(32, 32, stride=2),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


class Residual(nn.Module):
    """Two 3x3 convolutions with batch norm, and a residual connection: the basic block of ResNet."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1, self.relu1 = conv_bn_relu(channels_in, channels_out, stride)
        self.conv2, self.norm2, self.relu2 = conv_bn_relu(channels_out, channels_out)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or channels_in != channels_out:
            convolution = nn.Conv2d(channels_in, channels_out, 1, stride=stride, bias=False)
            self.shortcut = nn.Sequential(convolution, nn.BatchNorm2d(channels_out))

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, channels, height, width) to the output's channels and size."""
        y = self.norm2(self.conv2(self.relu1(self.norm1(self.conv1(x)))))
        return self.relu2(y + self.shortcut(x))


def resnet18() -> nn.Module:
    """ResNet-18 as it is used for 32x32 images: a 3x3 convolution first, and no pooling after it."""
    widths = (64, 64, 128, 256, 512)
    blocks = []
    for stage, (before, after) in enumerate(pairwise(widths)):
        blocks += [Residual(before, after, 2 if stage else 1), Residual(after, after, 1)]
    return nn.Sequential(
        *conv_bn_relu(3, 64), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10)
    )


def mobilenet() -> nn.Module:
    """Depthwise and 1x1 convolutions in turns, as in MobileNet: nine pairs, from 32 to 512 channels."""
    layers = conv_bn_relu(3, 32)
    plan = ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), (512, 1), (512, 1), (512, 1))
    before = 32
    for after, stride in plan:
        depthwise = nn.Conv2d(before, before, 3, stride=stride, padding=1, groups=before, bias=False)
        pointwise = nn.Conv2d(before, after, 1, bias=False)
        layers += [depthwise, nn.BatchNorm2d(before), nn.ReLU(), pointwise, nn.BatchNorm2d(after), nn.ReLU()]
        before = after
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 10))


class Block(nn.Module):
    """Attention and an MLP, each after a layer norm and with a residual connection."""

    def __init__(self, width: int = WIDTH, *, causal: bool = True) -> None:
        super().__init__()
        self.causal = causal
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.gelu = nn.GELU()
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, tokens, width) to the same shape."""
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3 * HEADS, -1)).transpose(1, 2)
        q, k, v = heads.chunk(3, 1)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.proj(mixed.transpose(1, 2).flatten(2))
        return x + self.down(self.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """A causal language model over bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(torch.randn(TOKENS, WIDTH) * 0.02)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (batch, tokens) to logits of shape (batch, vocabulary, tokens), as cross entropy expects."""
        return self.head(self.norm(self.blocks(self.token(tokens) + self.position))).transpose(1, 2)


class Encoder(nn.Module):
    """Four transformer blocks without a mask, on vectors, and a classifier."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(width, causal=False) for _ in range(LAYERS)))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, tokens, width) to (batch, 10)."""
        return self.head(self.blocks(x).mean(1))


def mlp() -> nn.Module:
    """An MLP with three hidden layers of width 1024."""
    sizes = (784, 1024, 1024, 1024)
    hidden = [layer for before, after in pairwise(sizes) for layer in (nn.Linear(before, after), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(sizes[-1], 10))


def digits() -> nn.Module:
    """Four convolutions and a classifier for 28x28 images: the network of the accuracy table."""
    return nn.Sequential(
        *conv_bn_relu(1, 16, stride=2),
        *conv_bn_relu(16, 32),
        *conv_bn_relu(32, 32, stride=2),
        *conv_bn_relu(32, 64),
        nn.Flatten(),
        nn.Linear(64 * 7 * 7, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


class VisionTransformer(nn.Module):
    """A transformer on the 16 patches of a 28x28 image: two blocks of width 64, and a linear classifier."""

    def __init__(self, width: int = 64, blocks: int = 2) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 7, stride=7)
        self.position = nn.Parameter(torch.randn(16, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, causal=False) for _ in range(blocks)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Map (batch, 1, 28, 28) to (batch, 10)."""
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.position
        return self.head(self.norm(self.blocks(tokens)).mean(1))


@dataclass(frozen=True)
class Workload:
    """A model and the batch it is trained on.

    Attributes:
        title: description in the tables.
        make: creates a float model.
        batch: creates inputs and targets, equal for all tools.
    """

    title: str
    make: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]

    def model(self) -> nn.Module:
        """Create the model with fixed initial weights, in training mode."""
        torch.manual_seed(0)
        return self.make().train()


def _images(count: int, *shape: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, *shape, generator=generator), torch.randint(10, (count,), generator=generator)


def _bytes(count: int) -> tuple[Tensor, Tensor]:
    text = torch.randint(VOCABULARY, (count, TOKENS + 1), generator=torch.Generator().manual_seed(1))
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


MODELS = {
    "cnn": Workload("CNN, conv-bn-relu x6, batch 64 of 32x32", cnn, lambda: _images(64, 3, 32, 32)),
    "transformer": Workload("transformer, d=256, 4 layers, batch 8 of 64 tokens", Transformer, lambda: _bytes(8)),
    "mlp": Workload("MLP, 784-1024-1024-1024-10, batch 256", mlp, lambda: _images(256, 784)),
    "mlp-1024": Workload("the same MLP, batch 1024", mlp, lambda: _images(1024, 784)),
    "small": Workload("small CNN, 115,000 parameters, batch 32 of 28x28", small, lambda: _images(32, 1, 28, 28)),
    "mobilenet": Workload("MobileNet-like, batch 64 of 32x32", mobilenet, lambda: _images(64, 3, 32, 32)),
    "resnet18": Workload("ResNet-18, batch 64 of 32x32", resnet18, lambda: _images(64, 3, 32, 32)),
    "encoder-256": Workload("encoder, d=256, 4 layers, 8x128", lambda: Encoder(256), lambda: _images(8, 128, 256)),
    "encoder-512": Workload("encoder, d=512, 4 layers, 8x128", lambda: Encoder(512), lambda: _images(8, 128, 512)),
}
