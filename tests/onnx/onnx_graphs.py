"""Small models with the operator patterns that Q/DQ placement must handle."""

import re
from collections import Counter

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper

from detent.onnx import quality_warnings
from detent.onnx_model import optimized

RNG = np.random.default_rng(0)


def weights(*shape, seed=0):
    return (np.random.default_rng(seed).normal(size=shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float32)


class Maker:
    """Builds a graph node by node: ``t = m.conv("x", 8, 8)``."""

    def __init__(self, opset=17, ir=8):
        self.nodes, self.tensors, self.opset, self.ir = [], [], opset, ir
        self.count = 0

    def constant(self, values, name=None):
        name = name or f"c{len(self.tensors)}"
        self.tensors.append(numpy_helper.from_array(np.asarray(values), name))
        return name

    def add(self, op, inputs, outputs=1, name=None, **attributes):
        self.count += 1
        names = [f"t{self.count}"] if outputs == 1 else [f"t{self.count}_{i}" for i in range(outputs)]
        self.nodes.append(helper.make_node(op, inputs, names, name=name or f"{op}{self.count}", **attributes))
        return names[0] if outputs == 1 else names

    def conv(self, x, before, after, size=3, group=1, bias=True, name=None, weight=None, **attributes):
        weight = weights(after, before // group, size, size, seed=len(self.nodes)) if weight is None else weight
        inputs = [x, self.constant(weight)]
        if bias:
            inputs.append(self.constant(weights(after, 1, seed=7 + len(self.nodes)).ravel()))
        return self.add("Conv", inputs, name=name, group=group, pads=[size // 2] * 4, **attributes)

    def matmul(self, x, before, after, name=None, weight=None):
        weight = weights(before, after, seed=len(self.nodes)) if weight is None else weight
        return self.add("MatMul", [x, self.constant(weight)], name=name)

    def model(self, inputs, outputs, domains=()) -> ModelProto:
        arguments = [
            helper.make_tensor_value_info(name, kind if isinstance(kind, int) else TensorProto.FLOAT, shape)
            for name, shape, kind in [(*each, None)[:3] for each in inputs]
        ]
        results = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
        graph = helper.make_graph(self.nodes, "g", arguments, results, self.tensors)
        opsets = [helper.make_opsetid("", self.opset), *(helper.make_opsetid(name, 1) for name in domains)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=self.ir)


def images(count=4, channels=8, side=8, batch=2, scale=1.0):
    return [
        {"x": (scale * np.random.default_rng(i).normal(size=(batch, channels, side, side))).astype(np.float32)}
        for i in range(count)
    ]


def rows(count=4, width=16, length=6):
    return [{"x": np.random.default_rng(i).normal(size=(1, length, width)).astype(np.float32)} for i in range(count)]


def operators(model) -> Counter:
    """Count the operators of the graph that ONNX Runtime optimizes."""
    return Counter(node.op_type for node in optimized(model).graph.node)


def conv_chain(activation="Relu"):
    m = Maker()
    t = m.conv("x", 8, 16, name="first")
    t = m.add(activation, [t])
    t = m.conv(t, 16, 16, name="second")
    t = m.add(activation, [t])
    y = m.conv(t, 16, 4, name="last")
    return m.model([("x", ["n", 8, 8, 8])], [y])


def warning_codes():
    """List the codes of warnings, from the docstring of their module."""
    codes = re.findall(r"^([a-z]+-?[a-z]+) {2,}", quality_warnings.__doc__, re.MULTILINE)
    return [code for code in codes if code != "code"]
