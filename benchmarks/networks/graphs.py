"""Graphs written node by node: Keras-style layers, and NonMaxSuppression after a detector."""

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from torch import nn

KERAS_OPSET = 13
KERAS_ACTIVATIONS = {nn.ReLU: "Relu", nn.ELU: "Elu", nn.SELU: "Selu"}
MAX_BOXES, MAX_OVERLAP, MIN_SCORE = 5, 0.5, 0.3


class _Writer:
    """Collects nodes and weights of a graph."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []

    def weight(self, name: str, array: NDArray[np.generic]) -> str:
        self.weights.append(numpy_helper.from_array(np.ascontiguousarray(array), name))
        return name

    def node(self, operator: str, *inputs: str, output: str = "", **attributes: object) -> str:
        output = output or f"{operator.lower()}_{len(self.nodes)}:0"
        self.nodes.append(helper.make_node(operator, list(inputs), [output], f"model/{output[:-2]}", **attributes))
        return output

    def dense(self, x: str, layer: nn.Linear, name: str) -> str:
        """Write MatMul and Add, as tf2onnx does for a Dense layer."""
        kernel = self.weight(f"{name}/kernel", layer.weight.detach().numpy().T)
        bias = self.weight(f"{name}/bias", layer.bias.detach().numpy())
        return self.node("Add", self.node("MatMul", x, kernel), bias)

    def model(self, inputs: list[onnx.ValueInfoProto], outputs: list[onnx.ValueInfoProto]) -> onnx.ModelProto:
        graph = helper.make_graph(self.nodes, "tf2onnx", inputs, outputs, self.weights)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", KERAS_OPSET)], ir_version=7)


def keras_dense(model: nn.Module) -> onnx.ModelProto:
    """Write linear layers on rows as MatMul and Add; a batch norm before them is written as Mul and Add."""
    writer = _Writer()
    norm = model[0]
    gain = norm.weight / (norm.running_var + norm.eps).sqrt()
    shift = norm.bias - norm.running_mean * gain
    x = writer.node("Mul", "numbers", writer.weight("norm/gain", gain.detach().numpy()))
    x = writer.node("Add", x, writer.weight("norm/shift", shift.detach().numpy()))
    for i, block in enumerate(model[1:-2]):
        x = writer.node(KERAS_ACTIVATIONS[type(block[1])], writer.dense(x, block[0], f"dense_{i}"))
    writer.node("Softmax", writer.dense(x, model[-2], "scores"), output="output", axis=-1)
    rows = helper.make_tensor_value_info("numbers", TensorProto.FLOAT, ["unk__1", norm.num_features])
    scores = helper.make_tensor_value_info("output", TensorProto.FLOAT, ["unk__1", model[-2].out_features])
    return writer.model([rows], [scores])


def keras_pictures(model: nn.Module) -> onnx.ModelProto:
    """Write a VGG-like network for pictures with channels last, with transposes in the same places as tf2onnx."""
    writer = _Writer()
    x = writer.node("Transpose", "pictures", perm=[0, 3, 1, 2])
    layers = list(model)
    for i, layer in enumerate(layers):
        if isinstance(layer, nn.Conv2d):
            kernel = writer.weight(f"conv_{i}/kernel", layer.weight.detach().numpy())
            bias = writer.weight(f"conv_{i}/bias", layer.bias.detach().numpy())
            x = writer.node("Conv", x, kernel, bias, auto_pad="SAME_UPPER", kernel_shape=[3, 3], strides=[1, 1])
        elif isinstance(layer, nn.ReLU):
            x = writer.node("Relu", x)
        elif isinstance(layer, nn.MaxPool2d):
            x = writer.node("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2])
        elif isinstance(layer, nn.Flatten):
            shape = writer.weight("flatten/shape", np.array([-1, layers[i + 1].in_features], np.int64))
            x = writer.node("Reshape", writer.node("Transpose", x, perm=[0, 2, 3, 1]), shape)
        elif isinstance(layer, nn.Linear):
            x = writer.dense(x, _channels_last(layer) if isinstance(layers[i - 1], nn.Flatten) else layer, f"dense_{i}")
    writer.node("Softmax", x, output="output", axis=-1)
    pictures = helper.make_tensor_value_info("pictures", TensorProto.FLOAT, ["unk__1", 64, 64, 3])
    scores = helper.make_tensor_value_info("output", TensorProto.FLOAT, ["unk__1", layers[-1].out_features])
    return writer.model([pictures], [scores])


def _channels_last(layer: nn.Linear) -> nn.Linear:
    """Reorder the inputs of a linear layer that reads a flattened (128, 4, 4) picture."""
    turned = nn.Linear(layer.in_features, layer.out_features)
    turned.weight.data = layer.weight.data.reshape(-1, 128, 4, 4).permute(0, 2, 3, 1).flatten(1)
    turned.bias.data = layer.bias.data
    return turned


def with_suppression(model: onnx.ModelProto) -> onnx.ModelProto:
    """Append NonMaxSuppression: the outputs are boxes, scores and classes, and their number depends on the data."""
    graph = model.graph
    corners, scores = (value.name for value in graph.output)
    constants = {
        "most": np.array([MAX_BOXES], np.int64),
        "overlap": np.array([MAX_OVERLAP], np.float32),
        "least": np.array([MIN_SCORE], np.float32),
        "class_axis": np.array([1], np.int64),
        "cell_axis": np.array([2], np.int64),
        "batch": np.array([0], np.int64),
        "flat": np.array([-1], np.int64),
    }
    graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in constants.items())
    graph.node.extend(
        [
            helper.make_node("NonMaxSuppression", [corners, scores, "most", "overlap", "least"], ["chosen"], "nms"),
            helper.make_node("Gather", ["chosen", "class_axis"], ["class_column"], axis=1),
            helper.make_node("Reshape", ["class_column", "flat"], ["classes"]),
            helper.make_node("Gather", ["chosen", "cell_axis"], ["cell_column"], axis=1),
            helper.make_node("Reshape", ["cell_column", "flat"], ["cells"]),
            helper.make_node("Squeeze", [corners, "batch"], ["all_boxes"]),
            helper.make_node("Gather", ["all_boxes", "cells"], ["boxes"], axis=0),
            helper.make_node("Squeeze", [scores, "batch"], ["all_scores"]),
            helper.make_node("Concat", ["class_column", "cell_column"], ["pairs"], axis=1),
            helper.make_node("GatherND", ["all_scores", "pairs"], ["box_scores"]),
        ]
    )
    del graph.output[:]
    graph.output.extend(
        [
            helper.make_tensor_value_info("boxes", TensorProto.FLOAT, ["detections", 4]),
            helper.make_tensor_value_info("box_scores", TensorProto.FLOAT, ["detections"]),
            helper.make_tensor_value_info("classes", TensorProto.INT64, ["detections"]),
        ]
    )
    return model
