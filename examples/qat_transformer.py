"""Quantization-aware training of a small transformer: 2-bit weights, 4-bit activations, learned scales (LSQ).

Attention is written out, and its two products of activations are reached by ``qt.Quantizer()``, a module that lets data
pass until a recipe gives it a spec. Learned scales are parameters like others: plain Adam at 1e-3 trains them.
"""

import torch
from torch import Tensor, nn

import detent as dt
import detent.torch as qt

LETTERS, LENGTH, WIDTH, HEADS, BATCH = 8, 9, 32, 4, 64
FLOAT_STEPS, QAT_STEPS = 300, 80


def sequences(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Random letters. The last one names a place, the letter there another place, and the letter there is wanted."""
    made = torch.Generator().manual_seed(seed)
    letters = torch.randint(LETTERS, (count, LENGTH), generator=made)
    return letters, letters.gather(1, letters.gather(1, letters[:, -1:]))[:, 0]


class Block(nn.Module):
    """Attention and two linear layers, each normalised before and added after."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.into, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.queries, self.keys, self.values, self.shares = (qt.Quantizer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """What enters both products of attention passes a quantizer."""
        parts = self.into(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).movedim(2, 0).transpose(2, 3)
        query, key, value = self.queries(parts[0]), self.keys(parts[1]), self.values(parts[2])
        shares = self.shares((query @ key.mT * query.shape[-1] ** -0.5).softmax(-1))
        x = x + self.out((shares @ value).transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Classifier(nn.Module):
    """Two blocks; the answer is read at the last letter."""

    def __init__(self) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(LETTERS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, LETTERS)

    def forward(self, letters: Tensor) -> Tensor:
        """A score for every letter."""
        x = self.letters(letters) + self.places(torch.arange(LENGTH))
        return self.head(self.norm(self.blocks(x)[:, -1]))


def train(model: nn.Module, rate: float, steps: range) -> None:
    optimizer = torch.optim.Adam(model.parameters(), rate)
    for step in steps:
        letters, wanted = sequences(BATCH, seed=step)
        loss = nn.functional.cross_entropy(model(letters), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    letters, wanted = sequences(2000, seed=10**6)
    found = model.eval()(letters).argmax(1)
    model.train()
    return (found == wanted).float().mean().item()


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # more do not help a network as small as this
    model = Classifier()
    train(model, 3e-3, range(FLOAT_STEPS))
    in_float = accuracy(model)

    recipe = dt.Recipe.preset("w2a4", mode="learned")
    plan = qt.plan(model, recipe)
    print(plan)
    qt.prepare(model, recipe)
    with qt.calibrating(model):  # learned scales start from what is seen here
        model(sequences(256, seed=10**7)[0])
    after_training = accuracy(model)

    shares = model.blocks[0].shares
    before = shares.input_quantizer.scale.item()
    train(model, 1e-3, range(FLOAT_STEPS, FLOAT_STEPS + QAT_STEPS))
    qt.freeze(model)
    trained = accuracy(model)
    shipped = sum(weight.nbytes for weight in qt.quantized_state(model).values())

    print(f"\naccuracy in float              {in_float:.1%}")
    print(f"quantized after training       {after_training:.1%}")
    print(f"quantized while training       {trained:.1%}")
    print(f"weights {plan.nbytes_before:,} bytes in float, {shipped:,} packed, with their scales")
    print(
        f"the scale of the first attention's shares went from {before:.4f} to {shares.input_quantizer.scale.item():.4f}"
    )
    assert after_training + 0.1 < trained
    assert in_float - 0.05 < trained
    assert shares.input_quantizer.scale.item() != before
    assert len(shares(torch.rand(1000)).unique()) <= 16  # what enters the product has 4 bits
    assert shipped == plan.nbytes_after


if __name__ == "__main__":
    main()
