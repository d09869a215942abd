"""Train a prepared model with gradient accumulation and autocast, in an unchanged training loop.

Each optimizer step accumulates the gradients of four small batches under bfloat16 autocast. Quantized weights are
cached until the optimizer changes them. After 150 steps, a schedule freezes the EMA ranges of activations. From then
on, the gradients of the four parts add up to the gradient of the full batch, as in the float model.
"""

import os

import torch
from torch import Tensor, nn

import detent.torch as qt

STEPS, PARTS, BATCH, FREEZE_STEP = 200, 4, 128, 150


def points(seed: int, count: int = BATCH) -> tuple[Tensor, Tensor]:
    """Random points in the plane; points of class 1 lie in a ring."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(count, 2, generator=generator) * 4 - 2
    return x, (x.norm(dim=1) - 1.2).abs().lt(0.4).long()


def accumulate(model: nn.Module, x: Tensor, classes: Tensor, parts: int, *, autocast: bool) -> list[Tensor]:
    """Return the gradients of the mean loss, accumulated over ``parts`` parts of the batch."""
    model.zero_grad()
    for x_part, class_part in zip(x.chunk(parts), classes.chunk(parts), strict=True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = nn.functional.cross_entropy(model(x_part), class_part) / parts
        loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def main() -> None:
    # Some virtual machines report AMX but do not allow it: torch would crash with an illegal instruction.
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
    torch.manual_seed(0)
    torch.set_num_threads(1)  # more threads do not speed up a network this small
    model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
    qt.prepare(model, "w4a8")
    with qt.calibrating(model), torch.autocast("cpu", dtype=torch.bfloat16):
        model(points(1000)[0])

    schedule = qt.Schedule(model, observe_until=FREEZE_STEP)
    print(schedule)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for step in range(STEPS):
        accumulate(model, *points(step), parts=PARTS, autocast=True)
        optimizer.step()
        schedule.step()

    batch = points(2000)
    whole = accumulate(model, *batch, parts=1, autocast=False)
    parts = accumulate(model, *batch, parts=PARTS, autocast=False)
    difference = max(((a - b).norm() / a.norm()).item() for a, b in zip(whole, parts, strict=True))

    qt.freeze(model.eval())
    x, classes = points(3000, 2000)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        y = model(x)
    accuracy = (y.argmax(1) == classes).float().mean().item()
    print(f"{STEPS} steps of {PARTS} parts under bfloat16 autocast: accuracy {accuracy:.1%} on held-out data")
    print(f"relative difference of full-batch and accumulated gradients: {difference:.0e}")
    assert accuracy > 0.9
    assert difference < 1e-4
    assert y.dtype == torch.bfloat16
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}  # parameters stay float32
    assert model[0].input_quantizer.scale.dtype == torch.float32


if __name__ == "__main__":
    main()
