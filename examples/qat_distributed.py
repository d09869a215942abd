"""Quantization-aware training on several processes, which get identical scales although each has its own data.

    torchrun --nproc_per_node 2 examples/qat_distributed.py

Without torchrun, the same code runs in one process. In both cases, qt.sync updates EMA ranges once per step.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import detent.torch as qt

STEPS, BATCH = 60, 64


def points(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random points in the plane; points of class 1 lie in a ring."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(BATCH, 2, generator=generator) * 4 - 2
    return x, (x.norm(dim=1) - 1.2).abs().lt(0.4).long()


def train(model: nn.Module, rank: int, size: int) -> None:
    trained = DistributedDataParallel(model) if size > 1 else model
    optimizer = torch.optim.Adam(trained.parameters(), 1e-2)
    for step in range(STEPS):
        x, classes = points(step * size + rank)
        loss = nn.functional.cross_entropy(trained(x), classes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        qt.sync(model)  # one collective per step, on every process


def same_on_all(value: torch.Tensor, size: int) -> bool:
    gathered = [torch.empty_like(value) for _ in range(size)]
    dist.all_gather(gathered, value)
    return all(torch.equal(value, other) for other in gathered)


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size > 1:
        dist.init_process_group("gloo")  # use nccl on GPUs; call this before qt.prepare
    rank = dist.get_rank() if size > 1 else 0

    model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
    qt.prepare(model, "w4a8", sync=True)
    with qt.calibrating(model):  # each process observes its share of the batches; on exit, the observers are merged
        for i in range(rank, 8, size):
            model(points(1000 + i)[0])

    train(model, rank, size)
    qt.freeze(model.eval())
    x, classes = points(2000)
    accuracy = (model(x).argmax(1) == classes).float().mean().item()
    scales = torch.stack([model[i].input_quantizer.scale for i in (0, 2, 4)])
    same = size == 1 or same_on_all(scales, size)
    if rank == 0:
        print(f"{size} process{'es' if size > 1 else ''}, {STEPS} steps: accuracy {accuracy:.0%} on held-out data")
        print(f"scales {', '.join(f'{scale:.5f}' for scale in scales.tolist())}; same scales on all processes: {same}")
        for name, weight in qt.quantized_state(model).items():
            print(f"{name}: {weight.params.spec}")
    if size > 1:
        dist.destroy_process_group()  # without this call, the process group can deadlock at exit


if __name__ == "__main__":
    main()
