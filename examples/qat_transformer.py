"""Train a small transformer with 2-bit weights, 4-bit activations and learned scales (LSQ).

The attention is written in plain PyTorch. The operands of its two activation-activation matmuls are quantized by
``qt.Quantizer()``, a module that passes data unchanged until a recipe gives it a spec. Learned scales are ordinary
parameters: Adam with learning rate 1e-3 trains them.
"""

import torch
from torch import Tensor, nn

import detent as dt
import detent.torch as qt

LETTERS, LENGTH, WIDTH, HEADS, BATCH = 8, 9, 32, 4, 64
FLOAT_STEPS, QAT_STEPS = 300, 80


def sequences(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Random sequences s of letters, which are indices; the class of a sequence is ``s[s[s[-1]]]``."""
    generator = torch.Generator().manual_seed(seed)
    letters = torch.randint(LETTERS, (count, LENGTH), generator=generator)
    return letters, letters.gather(1, letters.gather(1, letters[:, -1:]))[:, 0]


class Block(nn.Module):
    """Attention and a feed-forward network, each with layer norm before it and a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.into, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.queries, self.keys, self.values, self.attention = (qt.Quantizer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Compute the block; all operands of the two attention matmuls are quantized."""
        parts = self.into(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).movedim(2, 0).transpose(2, 3)
        query, key, value = self.queries(parts[0]), self.keys(parts[1]), self.values(parts[2])
        attention = self.attention((query @ key.mT * query.shape[-1] ** -0.5).softmax(-1))
        x = x + self.out((attention @ value).transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Classifier(nn.Module):
    """Two transformer blocks, and a classifier on the last letter."""

    def __init__(self) -> None:
        super().__init__()
        self.letters, self.positions = nn.Embedding(LETTERS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, LETTERS)

    def forward(self, letters: Tensor) -> Tensor:
        """Compute a score for every letter."""
        x = self.letters(letters) + self.positions(torch.arange(LENGTH))
        return self.head(self.norm(self.blocks(x)[:, -1]))


def train(model: nn.Module, rate: float, steps: range) -> None:
    optimizer = torch.optim.Adam(model.parameters(), rate)
    for step in steps:
        letters, classes = sequences(BATCH, seed=step)
        loss = nn.functional.cross_entropy(model(letters), classes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    letters, classes = sequences(2000, seed=10**6)
    predictions = model.eval()(letters).argmax(1)
    model.train()
    return (predictions == classes).float().mean().item()


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # more threads do not speed up a network this small
    model = Classifier()
    train(model, 3e-3, range(FLOAT_STEPS))
    float_accuracy = accuracy(model)

    recipe = dt.Recipe.preset("w2a4", mode="learned")
    plan = qt.plan(model, recipe)
    print(plan)
    qt.prepare(model, recipe)
    with qt.calibrating(model):  # sets the initial values of learned scales
        model(sequences(256, seed=10**7)[0])
    ptq_accuracy = accuracy(model)

    attention = model.blocks[0].attention
    scale_before = attention.input_quantizer.scale.item()
    train(model, 1e-3, range(FLOAT_STEPS, FLOAT_STEPS + QAT_STEPS))
    qt.freeze(model)
    qat_accuracy = accuracy(model)
    nbytes = sum(weight.nbytes for weight in qt.quantized_state(model).values())

    scale_after = attention.input_quantizer.scale.item()
    print(f"\naccuracy in float     {float_accuracy:.1%}")
    print(f"quantized by PTQ      {ptq_accuracy:.1%}")
    print(f"quantized by QAT      {qat_accuracy:.1%}")
    print(f"weights: {plan.nbytes_before:,} bytes in float, {nbytes:,} bytes packed, including scales")
    print(f"training changed the scale of attention probabilities from {scale_before:.4f} to {scale_after:.4f}")
    assert ptq_accuracy + 0.1 < qat_accuracy
    assert float_accuracy - 0.05 < qat_accuracy
    assert scale_after != scale_before
    assert len(attention(torch.rand(1000)).unique()) <= 16  # the attention probabilities have 4 bits
    assert nbytes == plan.nbytes_after


if __name__ == "__main__":
    main()
