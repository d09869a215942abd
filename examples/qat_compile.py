"""torch.compile of a prepared model: one graph, forward and backward, with the quantizers in it.

Two copies of a model take the same steps, one compiled with ``fullgraph=True``, which refuses to break the graph. Their
scales agree. The compiler needs a C++ compiler on the CPU; without one the example says so and runs as it is.
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
    """The C++ compiler that torch would use, if there is one."""
    names = [os.environ.get("CXX", ""), "g++", "c++", "clang++", "cl"]
    return next((found for name in names if name and (found := shutil.which(name))), None)


def batch(seed: int) -> tuple[Tensor, Tensor]:
    """Noise that is brighter in the upper or in the lower half."""
    made = torch.Generator().manual_seed(seed)
    upper = torch.randint(2, (BATCH,), generator=made)
    x = torch.randn(BATCH, 1, 8, 8, generator=made)
    x[:, :, :4] += upper[:, None, None, None]
    return x, upper


def main() -> None:
    warnings.simplefilter("ignore", DeprecationWarning)  # the compiler uses parts of torch that torch deprecates
    torch.manual_seed(0)
    torch.set_num_threads(1)
    eager = nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 2, bias=False)
    )
    qt.prepare(eager, "w8a8")
    with qt.calibrating(eager):
        eager(batch(1000)[0])
    model = copy.deepcopy(eager)
    found = compiler()
    print(f"compiling with {found}" if found else "no C++ compiler is installed: this runs without torch.compile")
    # The option spares half of the time here, in which torch would compile programs to try what the CPU says it can do.
    run = torch.compile(model, fullgraph=True, options={"cpp.vec_isa_ok": True}) if found else model

    losses = []
    for each, forward in ((eager, eager), (model, run)):
        optimizer = torch.optim.SGD(each.parameters(), 0.1)
        for step in range(STEPS):
            x, upper = batch(step)
            loss = nn.functional.cross_entropy(forward(x), upper)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())

    for i in (0, 4):
        ours, theirs = (each[i].input_quantizer.scale.item() for each in (eager, model))
        print(f"layer {i}: scale {ours:.7f} in eager mode, {theirs:.7f} {'compiled' if found else 'again'}")
        assert abs(ours - theirs) < 1e-5 * ours
    print(f"loss after {STEPS} steps: {losses[0]:.6f} and {losses[1]:.6f}")
    assert abs(losses[0] - losses[1]) < 1e-4


if __name__ == "__main__":
    main()
