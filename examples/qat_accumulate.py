"""Gradient accumulation and autocast: the loop that you have works as it is on a prepared model.

Four small batches make one step of the optimizer, under bfloat16 autocast; a quantized weight is kept until the
optimizer changes it. The schedule lets the ranges of activations follow the data for a while and then rest. From then
on, the gradients of the parts add up to that of the whole, as in the float model.
"""

import os

import torch
from torch import Tensor, nn

import detent.torch as qt

STEPS, PARTS, BATCH, REST = 200, 4, 128, 150


def points(seed: int, count: int = BATCH) -> tuple[Tensor, Tensor]:
    """Points in the plane, and whether they lie in a ring."""
    made = torch.Generator().manual_seed(seed)
    x = torch.rand(count, 2, generator=made) * 4 - 2
    return x, (x.norm(dim=1) - 1.2).abs().lt(0.4).long()


def accumulate(model: nn.Module, x: Tensor, wanted: Tensor, parts: int, *, autocast: bool) -> list[Tensor]:
    """Gradients of the mean loss, from so many parts of the batch."""
    model.zero_grad()
    for part, answer in zip(x.chunk(parts), wanted.chunk(parts), strict=True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = nn.functional.cross_entropy(model(part), answer) / parts
        loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def main() -> None:
    # Some virtual machines announce AMX and forbid it: there, torch itself would die of an illegal instruction.
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
    torch.manual_seed(0)
    torch.set_num_threads(1)  # more do not help a network as small as this
    model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
    qt.prepare(model, "w4a8")
    with qt.calibrating(model), torch.autocast("cpu", dtype=torch.bfloat16):
        model(points(1000)[0])

    schedule = qt.Schedule(model, observe_until=REST)
    print(schedule)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for step in range(STEPS):
        accumulate(model, *points(step), parts=PARTS, autocast=True)
        optimizer.step()
        schedule.step()

    batch = points(2000)
    whole = accumulate(model, *batch, parts=1, autocast=False)
    parts = accumulate(model, *batch, parts=PARTS, autocast=False)
    apart = max(((a - b).norm() / a.norm()).item() for a, b in zip(whole, parts, strict=True))

    qt.freeze(model.eval())
    x, wanted = points(3000, 2000)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        y = model(x)
    right = (y.argmax(1) == wanted).float().mean().item()
    print(f"{STEPS} steps of {PARTS} parts under bfloat16: {right:.1%} right on unseen data")
    print(f"gradients of the whole and of the sum of its parts differ by {apart:.0e}")
    assert right > 0.9
    assert apart < 1e-4
    assert y.dtype == torch.bfloat16
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}  # what is trained stays so
    assert model[0].input_quantizer.scale.dtype == torch.float32


if __name__ == "__main__":
    main()
