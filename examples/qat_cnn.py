"""Quantization-aware training of a convolutional network: 4-bit weights and activations.

Quantizing the trained float network costs accuracy; training it on as a quantized one wins that back. Convolutions are
quantized with their batch normalisation folded in, as they are shipped. The float network is trained on for as many
steps, too, so that the comparison is fair.
"""

import copy

import torch
from torch import Tensor, nn

import detent.torch as qt

SIDE, CLASSES, BATCH = 12, 24, 64
FLOAT_STEPS, QAT_STEPS = 200, 80


def images(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Stripes at any phase, in noise; their direction is the class."""
    made = torch.Generator().manual_seed(seed)
    classes = torch.randint(CLASSES, (count,), generator=made)
    angle = (classes * (torch.pi / CLASSES))[:, None, None]
    row, column = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    phase = 2 * torch.pi * torch.rand(count, 1, 1, generator=made)
    stripes = torch.sin(1.2 * (row * angle.sin() + column * angle.cos()) + phase)
    return (stripes + 0.6 * torch.randn(count, SIDE, SIDE, generator=made))[:, None], classes


def network() -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs, stride in ((1, 8, 1), (8, 12, 2), (12, 24, 2)):
        layers += [nn.Conv2d(inputs, outputs, 3, stride, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, CLASSES))


def train(model: nn.Module, rate: float, steps: range) -> nn.Module:
    """An ordinary loop: it knows nothing of quantization."""
    model.train()
    optimizer = torch.optim.Adam(model.parameters(), rate)
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, len(steps))
    for step in steps:
        x, classes = images(BATCH, seed=step)
        loss = nn.functional.cross_entropy(model(x), classes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        decay.step()
    return model


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    x, classes = images(2000, seed=10**6)
    return (model.eval()(x).argmax(1) == classes).float().mean().item()


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # more do not help a network as small as this
    model = train(network(), 1e-2, range(FLOAT_STEPS))
    more_steps = range(FLOAT_STEPS, FLOAT_STEPS + QAT_STEPS)
    in_float = accuracy(train(copy.deepcopy(model), 2e-3, more_steps))

    plan = qt.plan(model, "w4a4")  # nothing happens yet
    print(plan)
    qt.prepare(model, "w4a4")
    with qt.calibrating(model):
        model(images(512, seed=10**7)[0])
    after_training = accuracy(model)

    trained = accuracy(train(model, 2e-3, more_steps))
    qt.freeze(model)  # batch normalisations become part of their convolutions
    frozen = accuracy(model)
    weights = qt.quantized_state(model)
    shipped = sum(weight.nbytes for weight in weights.values())

    print(f"\naccuracy in float              {in_float:.1%}")
    print(f"quantized after training       {after_training:.1%}")
    print(f"quantized while training       {trained:.1%}, {frozen:.1%} when frozen")
    print(f"weights {plan.nbytes_before:,} bytes in float, {shipped:,} packed, with their scales")
    assert after_training + 0.01 < trained
    assert in_float - 0.03 < trained
    assert abs(frozen - trained) < 0.005  # the same codes; sums of floats in another order
    assert shipped == plan.nbytes_after


if __name__ == "__main__":
    main()
