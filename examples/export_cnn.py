"""Train a quantized network in PyTorch, export it to ONNX, and run it on ONNX Runtime's integer kernels.

The file contains the trained weights: codes minus zero point equal the codes of ``qt.quantized_state``. ONNX Runtime
accumulates integers where PyTorch accumulates floats, and the file has int32 biases. So activations close to a rounding
boundary may differ by one code.
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
    """Noisy images of stripes with random phase; the class is the direction of the stripes."""
    generator = torch.Generator().manual_seed(seed)
    classes = torch.randint(CLASSES, (count,), generator=generator)
    angle = (classes * (torch.pi / CLASSES))[:, None, None]
    row, column = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    phase = 2 * torch.pi * torch.rand(count, 1, 1, generator=generator)
    stripes = torch.sin(1.2 * (row * angle.sin() + column * angle.cos()) + phase)
    return (stripes + 0.6 * torch.randn(count, SIDE, SIDE, generator=generator))[:, None], classes


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
    torch.set_num_threads(1)  # more threads do not speed up a network this small
    model = network()
    train(model, 1e-2, 0)
    qt.prepare(model, "w8a8")
    with qt.calibrating(model):
        model(images(256, seed=10**6)[0])
    train(model, 1e-3, STEPS)
    qt.freeze(model).eval()

    path = qt.export_onnx(model, images(1, seed=0)[0], Path("cnn.onnx"))

    graph, state = Graph(load(path)), qt.quantized_state(model)
    weights = Provenance.read(graph.model).weights  # initializer name -> weight name
    for initializer, name in weights.items():
        codes = graph.array(initializer).astype(int) - graph.array(f"{name}_zero_point").reshape(-1)[0]
        assert np.array_equal(codes, state[name].codes)
        assert np.array_equal(graph.array(f"{name}_scale"), state[name].params.scale)

    x, classes = images(2000, seed=10**7)
    with torch.no_grad():
        expected = model(x).argmax(1).numpy()
    got = ort.InferenceSession(path).run(None, {"input": x.numpy()})[0].argmax(1)

    kernels = Counter(node.op_type for node in optimized(path).graph.node)
    print(f"{path}: {path.stat().st_size:,} bytes, quantized weights {', '.join(weights.values())}")
    print(f"all codes and scales of {sum(each.size for each in state.values()):,} weights equal the trained ones")
    print(f"ONNX Runtime uses integer kernels: {kernels['QLinearConv']} QLinearConv, {kernels['QGemm']} QGemm")
    print(
        f"accuracy in PyTorch {np.mean(expected == classes.numpy()):.1%}, in ONNX Runtime "
        f"{np.mean(got == classes.numpy()):.1%}; top-1 agreement {np.mean(got == expected):.2%}"
    )
    assert np.mean(got == expected) >= 0.999
    assert np.mean(got == classes.numpy()) > 0.9


if __name__ == "__main__":
    main()
