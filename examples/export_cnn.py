"""From a quantized network in PyTorch to an ONNX file with the same codes, and ONNX Runtime running it in integers.

The file holds what was trained: weight codes minus zero point equal ``qt.quantized_state`` element by element. ONNX
Runtime adds up in integers where PyTorch adds floats, and biases are rounded to the unit of these sums, so that now and
then an activation takes the neighbouring code.
"""

from collections import Counter
from pathlib import Path

import numpy as np
import onnxruntime as ort
import torch
from torch import Tensor, nn

import detent.torch as qt
from detent.onnx_model import Graph, Provenance, load, optimized

SIDE, CLASSES, BATCH, STEPS = 12, 20, 64, 80


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
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 24, 3, stride=2), nn.BatchNorm2d(24), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, CLASSES)),
    )


def train(model: nn.Module, rate: float, first: int) -> None:
    optimizer = torch.optim.Adam(model.train().parameters(), rate)
    for step in range(first, first + STEPS):
        x, classes = images(BATCH, seed=step)
        loss = nn.functional.cross_entropy(model(x), classes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # more do not help a network as small as this
    model = network()
    train(model, 1e-2, 0)
    qt.prepare(model, "w8a8")
    with qt.calibrating(model):
        model(images(256, seed=10**6)[0])
    train(model, 1e-3, STEPS)
    qt.freeze(model).eval()

    path = qt.export_onnx(model, images(1, seed=0)[0], Path("cnn.onnx"))

    graph, state = Graph(load(path)), qt.quantized_state(model)
    weights = Provenance.read(graph.model).weights  # initializers by name, and the weight that each of them holds
    for initializer, name in weights.items():
        codes = graph.array(initializer).astype(int) - graph.array(f"{name}_zero_point").reshape(-1)[0]
        assert np.array_equal(codes, state[name].codes)
        assert np.array_equal(graph.array(f"{name}_scale"), state[name].params.scale)

    x, classes = images(2000, seed=10**7)
    with torch.no_grad():
        expected = model(x).argmax(1).numpy()
    got = ort.InferenceSession(path).run(None, {"input": x.numpy()})[0].argmax(1)

    kernels = Counter(node.op_type for node in optimized(path).graph.node)
    print(f"{path}: {path.stat().st_size:,} bytes, weights {', '.join(weights.values())}")
    print(f"every code and scale of {sum(each.size for each in state.values()):,} weights is the trained one")
    print(f"integer kernels of ONNX Runtime: {kernels['QLinearConv']} QLinearConv, {kernels['QGemm']} QGemm")
    print(
        f"accuracy in PyTorch {np.mean(expected == classes.numpy()):.1%}, in ONNX Runtime on any number of images "
        f"{np.mean(got == classes.numpy()):.1%}; the same answer for {np.mean(got == expected):.2%}"
    )
    assert np.mean(got == expected) >= 0.999
    assert np.mean(got == classes.numpy()) > 0.9


if __name__ == "__main__":
    main()
