"""Train a convolutional network with 4-bit weights and activations (QAT), and compare it with float and with PTQ.

Quantizing the trained float network (PTQ) costs accuracy; quantization-aware training recovers it. Convolutions are
quantized as they are exported, with their batch norm folded in. For a fair comparison, the float network is trained for
the same number of additional steps.
"""

import copy

import torch
from torch import Tensor, nn

import detent.torch as qt

SIDE, CLASSES, BATCH = 12, 24, 64
FLOAT_STEPS, QAT_STEPS = 200, 200


def images(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Noisy images of stripes with random phase; the class is the direction of the stripes."""
    generator = torch.Generator().manual_seed(seed)
    classes = torch.randint(CLASSES, (count,), generator=generator)
    angle = (classes * (torch.pi / CLASSES))[:, None, None]
    row, column = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    phase = 2 * torch.pi * torch.rand(count, 1, 1, generator=generator)
    stripes = torch.sin(1.2 * (row * angle.sin() + column * angle.cos()) + phase)
    return (stripes + 0.6 * torch.randn(count, SIDE, SIDE, generator=generator))[:, None], classes


def network() -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs, stride in ((1, 8, 1), (8, 12, 2), (12, 24, 2)):
        layers += [nn.Conv2d(inputs, outputs, 3, stride, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, CLASSES))


def train(model: nn.Module, rate: float, steps: range) -> nn.Module:
    """Train in an ordinary loop, which needs no change for quantization."""
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
    torch.set_num_threads(1)  # more threads do not speed up a network this small
    model = train(network(), 1e-2, range(FLOAT_STEPS))
    more_steps = range(FLOAT_STEPS, FLOAT_STEPS + QAT_STEPS)
    float_accuracy = accuracy(train(copy.deepcopy(model), 2e-3, more_steps))

    plan = qt.plan(model, "w4a4")  # does not change the model
    print(plan)
    qt.prepare(model, "w4a4")
    with qt.calibrating(model):
        model(images(512, seed=10**7)[0])
    ptq_accuracy = accuracy(model)

    qat_accuracy = accuracy(train(model, 2e-3, more_steps))
    qt.freeze(model)  # fuses batch norms into their convolutions
    frozen_accuracy = accuracy(model)
    weights = qt.quantized_state(model)
    nbytes = sum(weight.nbytes for weight in weights.values())

    print(f"\naccuracy in float     {float_accuracy:.1%}")
    print(f"quantized by PTQ      {ptq_accuracy:.1%}")
    print(f"quantized by QAT      {qat_accuracy:.1%}, {frozen_accuracy:.1%} after qt.freeze")
    print(f"weights: {plan.nbytes_before:,} bytes in float, {nbytes:,} bytes packed, including scales")
    assert ptq_accuracy + 0.01 < qat_accuracy
    assert float_accuracy - 0.03 < qat_accuracy
    assert abs(frozen_accuracy - qat_accuracy) < 0.005  # equal codes; only the order of float operations differs
    assert nbytes == plan.nbytes_after


if __name__ == "__main__":
    main()
