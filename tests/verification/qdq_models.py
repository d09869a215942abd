"""Quantized models built node by node, and copies with one change, for the tests of verification."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper, numpy_helper

from detent.onnx_model import array_of, make_tensor

__all__ = ["chain", "change", "change_axis", "model", "weight_only"]


def model(nodes: list, inputs: list, outputs: list, constants: dict, *, opset: int = 21) -> ModelProto:
    """Build a model; constants are arrays, or (array, type)."""
    tensors = [
        make_tensor(name, *value) if isinstance(value, tuple) else numpy_helper.from_array(np.asarray(value), name)
        for name, value in constants.items()
    ]
    infos = [[helper.make_tensor_value_info(*each) for each in part] for part in (inputs, outputs)]
    graph = helper.make_graph(nodes, "g", *infos, tensors)
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


class _Writer:
    def __init__(self, seed: int, *, quantized: bool) -> None:
        self.rng, self.quantized = np.random.default_rng(seed), quantized
        self.nodes: list = []
        self.constants: dict = {}

    def add(self, operator: str, inputs: list[str], y: str, **attributes: object) -> None:
        self.nodes.append(helper.make_node(operator, inputs, [y], name=f"{y}_{operator}", **attributes))

    def quantize(self, x: str, scale: float, zero: int) -> str:
        if not self.quantized:
            return x
        self.constants |= {f"{x}_s": np.float32(scale), f"{x}_z": np.uint8(zero)}
        self.add("QuantizeLinear", [x, f"{x}_s", f"{x}_z"], f"{x}_q")
        self.add("DequantizeLinear", [f"{x}_q", f"{x}_s", f"{x}_z"], f"{x}_d")
        return f"{x}_d"

    def weight(self, name: str, shape: tuple[int, ...], axis: int, *, signed: bool = False) -> NDArray:
        codes = self.rng.integers(-127, 128, shape)
        scale = self.rng.uniform(0.001, 0.01, shape[axis]).astype(np.float32)
        wide = [-1 if i == axis else 1 for i in range(len(shape))]
        if not self.quantized:
            self.constants[name] = (codes * scale.reshape(wide)).astype(np.float32)
            return scale
        shift, kind = (0, np.int8) if signed else (128, np.uint8)
        self.constants |= {
            f"{name}_q": (codes + shift).astype(kind),
            f"{name}_s": scale,
            f"{name}_z": np.full(len(scale), shift, kind),
        }
        self.add("DequantizeLinear", [f"{name}_q", f"{name}_s", f"{name}_z"], name, axis=axis)
        return scale

    def bias(self, name: str, scale: NDArray) -> None:
        codes = self.rng.integers(-500, 500, len(scale)).astype(np.int32)
        if not self.quantized:
            self.constants[name] = (codes * scale).astype(np.float32)
            return
        self.constants |= {f"{name}_q": codes, f"{name}_s": scale.astype(np.float32)}
        self.add("DequantizeLinear", [f"{name}_q", f"{name}_s"], name, axis=0)


def chain(*, quantized: bool = True, signed: bool = False, seed: int = 0) -> ModelProto:
    """Build a model with one operator for each integer kernel: convolutions, an addition, matmuls."""
    w = _Writer(seed, quantized=quantized)
    x = w.quantize("x", 0.1, 128)
    scale = w.weight("w1", (16, 3, 3, 3), 0, signed=signed)
    w.bias("b1", scale * np.float32(0.1))
    w.add("Conv", [x, "w1", "b1"], "c1", pads=[1, 1, 1, 1], strides=[2, 2])
    w.add("Relu", ["c1"], "r1")
    x = w.quantize("r1", 0.13, 0)
    w.weight("w2", (16, 1, 3, 3), 0, signed=True)
    w.add("Conv", [x, "w2"], "c2", pads=[1, 1, 1, 1], group=16)
    x = w.quantize("c2", 0.35, 100)
    w.weight("w3", (8, 16, 1, 1), 0, signed=signed)
    w.add("Conv", [x, "w3"], "c3")
    x = w.quantize("c3", 0.45, 110)
    w.add("Add", [x, x], "a")
    x = w.quantize("a", 0.9, 110)
    w.add("Flatten", [x], "f")
    x = w.quantize("f", 0.9, 110)
    w.weight("w4", (128, 32), 1, signed=signed)
    w.add("MatMul", [x, "w4"], "m")
    x = w.quantize("m", 4.0, 128)
    scale = w.weight("w5", (10, 32), 0, signed=signed)
    w.bias("b5", scale * np.float32(4.0))
    w.add("Gemm", [x, "w5", "b5"], "g", transB=1)
    x = w.quantize("g", 10.0, 135)
    w.weight("w6", (10, 7), 1, signed=signed)
    w.add("MatMul", [x, "w6"], "y")
    return model(w.nodes, [("x", TensorProto.FLOAT, ["n", 3, 8, 8])], [("y", TensorProto.FLOAT, ["n", 7])], w.constants)


def weight_only(*, quantized: bool = True) -> ModelProto:
    """Build a weight-only matmul with 4-bit weights in groups of 32."""
    rng = np.random.default_rng(0)
    codes, scale = rng.integers(-7, 8, (64, 48)), rng.uniform(0.01, 0.1, (2, 48)).astype(np.float32)
    product = helper.make_node("MatMul", ["x", "w"], ["y"], name="product")
    ends = [("x", TensorProto.FLOAT, ["n", 64])], [("y", TensorProto.FLOAT, ["n", 48])]
    if not quantized:
        return model([product], *ends, {"w": (codes * np.repeat(scale, 32, axis=0)).astype(np.float32)})
    decode = helper.make_node("DequantizeLinear", ["w_q", "w_s"], ["w"], name="decode", axis=0, block_size=32)
    return model([decode, product], *ends, {"w_q": (codes, TensorProto.INT4), "w_s": scale})


def change(given: ModelProto, name: str, edit: Callable[[NDArray], None]) -> ModelProto:
    """Copy a model, and edit one initializer of the copy."""
    copy = ModelProto()
    copy.CopyFrom(given)
    tensor = next(each for each in copy.graph.initializer if each.name == name)
    values = np.array(array_of(tensor))
    edit(values)
    tensor.CopyFrom(make_tensor(name, values, tensor.data_type))
    return copy


def change_axis(given: ModelProto, node: str, axis: int) -> ModelProto:
    """Copy a model, and change the axis of one node."""
    copy = ModelProto()
    copy.CopyFrom(given)
    dequantize = next(each for each in copy.graph.node if each.name == node)
    next(each for each in dequantize.attribute if each.name == "axis").i = axis
    return copy
