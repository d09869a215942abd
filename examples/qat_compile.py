"""Compile a prepared model with torch.compile: one graph for forward and backward, including the quantizers.

Two copies of a model are trained with the same steps. One copy is compiled with ``fullgraph=True``, which does not
allow graph breaks. The scales of both copies agree. On the CPU, torch.compile needs a C++ compiler; without a compiler,
the example prints a note and runs uncompiled.
"""

import copy
import os
import shutil
import warnings

import torch
from torch import Tensor, nn

import detent.torch as qt

STEPS, BATCH = 10, 16


def compiler() -> str | None:
    """The path of the C++ compiler that torch would use; None if no compiler is installed."""
    names = [os.environ.get("CXX", ""), "g++", "c++", "clang++", "cl"]
    return next((path for name in names if name and (path := shutil.which(name))), None)


def batch(seed: int) -> tuple[Tensor, Tensor]:
    """Images of noise; in class 1, the upper half is brighter."""
    generator = torch.Generator().manual_seed(seed)
    upper = torch.randint(2, (BATCH,), generator=generator)
    x = torch.randn(BATCH, 1, 8, 8, generator=generator)
    x[:, :, :4] += upper[:, None, None, None]
    return x, upper


def main() -> None:
    warnings.simplefilter("ignore", DeprecationWarning)  # torch.compile uses deprecated parts of torch
    torch.manual_seed(0)
    torch.set_num_threads(1)
    eager = nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 2, bias=False)
    )
    qt.prepare(eager, "w8a8")
    with qt.calibrating(eager):
        eager(batch(1000)[0])
    model = copy.deepcopy(eager)
    path = compiler()
    print(f"compiling with {path}" if path else "no C++ compiler is installed: running without torch.compile")
    # This option prevents torch from compiling test programs for instruction sets, which would take half of the time.
    compiled = torch.compile(model, fullgraph=True, options={"cpp.vec_isa_ok": True}) if path else model

    losses = []
    for each, forward in ((eager, eager), (model, compiled)):
        optimizer = torch.optim.SGD(each.parameters(), 0.1)
        for step in range(STEPS):
            x, upper = batch(step)
            loss = nn.functional.cross_entropy(forward(x), upper)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())

    for i in (0, 4):
        expected, scale = (each[i].input_quantizer.scale.item() for each in (eager, model))
        print(f"layer {i}: scale {expected:.7f} in eager mode, {scale:.7f} {'compiled' if path else 'in a second run'}")
        assert abs(expected - scale) < 1e-5 * expected
    print(f"loss of the two copies after {STEPS} steps: {losses[0]:.6f} and {losses[1]:.6f}")
    assert abs(losses[0] - losses[1]) < 1e-4


if __name__ == "__main__":
    main()
