"""Quantize an image classifier with a directory of pictures, and verify the file.

The script draws pictures of discs and squares into one directory per class, and writes a small classifier as an ONNX
file. It then quantizes the classifier with the pictures, and verifies the quantized file on them.
"""

import tempfile
from pathlib import Path

import numpy as np
from onnx import TensorProto, helper, numpy_helper
from PIL import Image, ImageDraw

import detent as dt
import detent.evaluate as qe
import detent.onnx as qo
from detent.onnx_model import DataFiles

PER_CLASS, SIDE = 16, 32


def draw_pictures(directory: Path, rng: np.random.Generator) -> None:
    """Draw pictures of two classes; each class has its own sub-directory."""
    for name in ("disc", "square"):
        (directory / name).mkdir(parents=True)
        for i in range(PER_CLASS):
            ground, ink = (tuple(int(value) for value in rng.integers(0, 256, 3)) for _ in range(2))
            picture = Image.new("RGB", (80, 60), ground)
            left, top, size = (int(value) for value in rng.integers((5, 5, 20), (30, 15, 40)))
            pen = ImageDraw.Draw(picture)
            shape = pen.ellipse if name == "disc" else pen.rectangle
            shape((left, top, left + size, top + size), fill=ink)
            picture.save(directory / name / f"{i:02}.{'jpg' if i % 2 else 'png'}")


def write_classifier(path: Path, rng: np.random.Generator) -> None:
    """Write a network of two convolutions and a linear layer, with random weights."""
    shapes = {"w1": (16, 3, 3, 3), "w2": (32, 16, 3, 3), "w3": (32, 2)}
    weights = {name: rng.normal(0, 1, shape) / np.prod(shape[1:]) ** 0.5 for name, shape in shapes.items()}
    nodes = [
        helper.make_node("Conv", ["image", "w1"], ["a"], name="first", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["a"], ["b"], name="relu1"),
        helper.make_node("Conv", ["b", "w2"], ["c"], name="second", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c"], ["d"], name="relu2"),
        helper.make_node("GlobalAveragePool", ["d"], ["e"], name="pool"),
        helper.make_node("Flatten", ["e"], ["f"], name="flat"),
        helper.make_node("MatMul", ["f", "w3"], ["scores"], name="head"),
    ]
    graph = helper.make_graph(
        nodes,
        "classifier",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["n", 3, SIDE, SIDE])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["n", 2])],
        [numpy_helper.from_array(value.astype(np.float32), name) for name, value in weights.items()],
    )
    qo.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


def main() -> None:
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as directory:
        pictures, model, quantized = (Path(directory, name) for name in ("pictures", "model.onnx", "small.onnx"))
        draw_pictures(pictures, rng)
        write_classifier(model, rng)

        data = DataFiles(pictures, preprocess="-1..1")
        evaluation = qe.quantize_and_evaluate(model, quantized, data)
        print(*evaluation.result.data_notes, evaluation, sep="\n")
        assert evaluation.split is not None
        print("classes:", *evaluation.split.evaluation.classes)
        print("labels of the held-out pictures:", evaluation.split.evaluation.labels)

        report = dt.verify(model, quantized, data)
        print(report.headline)
        assert report.ok


if __name__ == "__main__":
    main()
