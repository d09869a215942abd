"""Small float models with most patterns of real models, and data for them: a CNN, a transformer, a recurrent one.

::

    model, batches = cnn()

The CNN has a residual, depthwise, grouped and transposed convolutions, batch norm, pools, Resize, Clip, Concat, an If
whose branches compute different things, and a layer to be skipped (``SKIPPED``). The transformer has an embedding,
LayerNormalization, attention with Softmax, a decomposed GELU, Gemm, Sub and Div. The recurrent model has LSTM, GRU and
RNN layers, and layers in an If and in a Loop.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

__all__ = ["SKIPPED", "cnn", "recurrent", "transformer"]

Array = NDArray[Any]
SKIPPED = ("skipped",)  # names of layers
OPSET, IR_VERSION = 17, 8
WORDS, STEPS, FEATURES = 23, 5, 16


class _Maker:
    """Collects nodes and constants; a node's output has the node's name."""

    def __init__(self, seed: int) -> None:
        self.nodes: list[NodeProto] = []
        self.constants: dict[str, Array] = {}
        self._rng = np.random.default_rng([17, seed])

    def normal(self, *shape: int, deviation: float = 1.0, mean: float = 0.0) -> Array:
        return self._rng.normal(mean, deviation, shape).astype(np.float32)

    def constant(self, name: str, values: Any) -> str:
        self.constants[name] = np.asarray(values)
        return name

    def add(self, op: str, name: str, inputs: Sequence[str], **attributes: Any) -> str:
        self.nodes.append(helper.make_node(op, list(inputs), [f"{name}_out"], name=name, **attributes))
        return f"{name}_out"

    def layer(self, op: str, name: str, x: str, shape: Sequence[int], bias: int = 0, **attributes: Any) -> str:
        """Add a layer with a weight of that shape, and a bias of that length if it is not 0."""
        deviation = (1.5 / max(1, np.prod(shape) / max(shape))) ** 0.5
        names = [x, self.constant(f"{name}.weight", self.normal(*shape, deviation=deviation))]
        if bias:
            names.append(self.constant(f"{name}.bias", self.normal(bias, deviation=0.3)))
        return self.add(op, name, names, **attributes)

    def model(self, name: str, given: list[Any], results: list[Any]) -> ModelProto:
        ends = [[helper.make_tensor_value_info(*each) for each in part] for part in (given, results)]
        tensors = [numpy_helper.from_array(values, name) for name, values in self.constants.items()]
        graph = helper.make_graph(self.nodes, name, *ends, tensors)
        imports = [helper.make_opsetid("", OPSET)]
        return helper.make_model(graph, opset_imports=imports, ir_version=IR_VERSION, producer_name="small_models")


def cnn(seed: int = 0) -> tuple[ModelProto, list[dict[str, Array]]]:
    """A convolutional network for 12x12 images with 3 channels.

    >>> model, batches = cnn()
    >>> len({node.op_type for node in model.graph.node}) > 15, len(batches)
    (True, 4)
    """
    m = _Maker(seed)
    t = m.layer("Conv", "stem", "x", (8, 3, 3, 3), bias=8, pads=[1] * 4, kernel_shape=[3, 3], strides=[1, 1])
    t = m.add("Relu", "stem_relu", [t])
    norm = [
        m.constant("norm.scale", m.normal(8, deviation=0.2, mean=1)),
        m.constant("norm.bias", m.normal(8, deviation=0.2)),
        m.constant("norm.mean", m.normal(8, deviation=0.2)),
        m.constant("norm.var", np.abs(m.normal(8, mean=1, deviation=0.1))),
    ]
    block = m.layer("Conv", "depthwise", t, (8, 1, 3, 3), pads=[1] * 4, group=8, dilations=[1, 1])
    block = m.add("BatchNormalization", "norm", [block, *norm], epsilon=1e-3)
    bounds = [m.constant("low", np.float32(0)), m.constant("high", np.float32(2.5))]
    block = m.add("Clip", "clip", [block, *bounds])
    block = m.layer("Conv", "grouped", block, (8, 4, 1, 1), bias=8, group=2)
    t = m.add("Add", "residual", [block, t])
    t = m.add("MaxPool", "pool", [t], kernel_shape=[2, 2], strides=[2, 2])
    left = m.add("Relu", "left_relu", [m.layer("Conv", "left", t, (8, 8, 3, 3), bias=8, pads=[1] * 4)])
    right = m.add("Relu", "right_relu", [m.layer("Conv", "right", t, (8, 8, 3, 3), bias=8, pads=[1] * 4)])
    t = m.add("Sub", "difference", [left, right])
    kept = m.layer("Conv", SKIPPED[0], t, (8, 8, 1, 1), bias=8)
    kept = m.add("LeakyRelu", "leaky", [kept], alpha=0.2)
    up = m.layer("ConvTranspose", "up", t, (8, 4, 2, 2), bias=4, strides=[2, 2])
    sizes = [m.constant("no_roi", np.zeros(0, np.float32)), m.constant("sizes", np.float32([1, 1, 2, 2]))]
    resized = m.add("Resize", "resize", [kept, *sizes], mode="nearest", coordinate_transformation_mode="asymmetric")
    t = m.add("Concat", "concat", [resized, up], axis=1)
    t = m.add("AveragePool", "mean_pool", [t], kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4)
    total = m.add("ReduceMean", "total", [t], keepdims=0)
    positive = m.add("Greater", "is_positive", [total, m.constant("zero", np.float32(0))])
    t = _branches(m, positive, t)
    t = m.add("Transpose", "transpose", [t], perm=[0, 2, 3, 1])
    t = m.add("MatMul", "mix", [t, m.constant("mix.weight", m.normal(12, 12, deviation=0.3))])
    t = m.add("Flatten", "flatten", [m.add("Transpose", "back", [t], perm=[0, 3, 1, 2])], axis=1)
    m.layer("Gemm", "head", t, (10, 432), bias=10, transB=1)
    m.nodes[-1].output[0] = "y"
    m.add("Softmax", "softmax", ["y"], axis=1)
    model = m.model(
        "cnn",
        [("x", TensorProto.FLOAT, ["n", 3, 12, 12])],
        [("y", TensorProto.FLOAT, ["n", 10]), ("softmax_out", TensorProto.FLOAT, ["n", 10])],
    )
    return model, [{"x": m.normal(2, 3, 12, 12)} for _ in range(4)]


def _branches(m: _Maker, condition: str, x: str) -> str:
    """An If: the value times a constant, or plus a constant."""
    branches = {}
    for name, op, number in (("then_branch", "Mul", 1.25), ("else_branch", "Sub", 0.5)):
        constant = numpy_helper.from_array(np.float32(number), f"{name}_number")
        nodes = [
            helper.make_node(op, [x, constant.name], [f"{name}_inner"], name=f"{name}_{op.lower()}"),
            helper.make_node("LeakyRelu", [f"{name}_inner"], [f"{name}_out"], name=f"{name}_leaky", alpha=0.3),
        ]
        result = helper.make_tensor_value_info(f"{name}_out", TensorProto.FLOAT, ["n", 12, 6, 6])
        branches[name] = helper.make_graph(nodes, name, [], [result], [constant])
    return m.add("If", "if", [condition], **branches)


def transformer(seed: int = 0) -> tuple[ModelProto, list[dict[str, Array]]]:
    """One transformer block over 5 tokens, with a classifier.

    >>> model, batches = transformer()
    >>> [batch["ids"].shape for batch in batches]
    [(2, 5), (2, 5), (2, 5), (2, 5)]
    """
    m = _Maker(100 + seed)
    table = m.constant("embedding.weight", m.normal(WORDS, FEATURES))
    t = m.add("Gather", "embedding", [table, "ids"], axis=0)
    t = m.add("Add", "positions", [t, m.constant("positions.weight", m.normal(STEPS, FEATURES, deviation=0.3))])
    given = _layer_norm(m, "norm1", t)
    query, key, value = (
        _heads(m, name, m.layer("MatMul", name, given, (FEATURES, FEATURES))) for name in ("query", "key", "value")
    )
    flipped = m.add("Transpose", "key_turned", [key], perm=[0, 1, 3, 2])
    scores = m.add("MatMul", "scores", [query, flipped])
    scores = m.add("Div", "scaled", [scores, m.constant("root", np.float32(np.sqrt(FEATURES / 2)))])
    mixed = m.add("MatMul", "mixed", [m.add("Softmax", "attention", [scores], axis=-1), value])
    mixed = m.add("Transpose", "joined", [mixed], perm=[0, 2, 1, 3])
    mixed = m.add("Reshape", "rows", [mixed, m.constant("rows.shape", np.int64([0, 0, FEATURES]))])
    t = m.add("Add", "attended", [t, m.layer("MatMul", "projection", mixed, (FEATURES, FEATURES))])
    hidden = m.layer("MatMul", "wide", _layer_norm(m, "norm2", t), (FEATURES, 2 * FEATURES))
    hidden = m.add("Add", "wide_bias", [hidden, m.constant("wide.bias", m.normal(2 * FEATURES, deviation=0.2))])
    t = m.add("Add", "fed", [t, m.layer("MatMul", "narrow", _gelu(m, hidden), (2 * FEATURES, FEATURES))])
    mean = m.add("ReduceMean", "mean", [t], axes=[1], keepdims=0)
    first = m.add("Gather", "first", [t, m.constant("first.index", np.int64(0))], axis=1)
    t = m.add("Sub", "contrast", [first, mean])
    t = m.add("Relu", "pooled_relu", [m.layer("Gemm", "pooled", t, (FEATURES, FEATURES), bias=FEATURES, transB=1)])
    m.layer("Gemm", "classes", t, (FEATURES, 7), bias=7)
    m.nodes[-1].output[0] = "y"
    model = m.model("transformer", [("ids", TensorProto.INT64, ["n", STEPS])], [("y", TensorProto.FLOAT, ["n", 7])])
    rng = np.random.default_rng([23, seed])
    return model, [{"ids": rng.integers(0, WORDS, (2, STEPS))} for _ in range(4)]


def _layer_norm(m: _Maker, name: str, x: str) -> str:
    parts = [
        m.constant(f"{name}.scale", m.normal(FEATURES, mean=1, deviation=0.2)),
        m.constant(f"{name}.bias", m.normal(FEATURES, deviation=0.2)),
    ]
    return m.add("LayerNormalization", name, [x, *parts], axis=-1, epsilon=1e-5)


def _heads(m: _Maker, name: str, x: str) -> str:
    """Split features into two heads."""
    split = m.add("Reshape", f"{name}_split", [x, m.constant(f"{name}.shape", np.int64([0, 0, 2, FEATURES // 2]))])
    return m.add("Transpose", f"{name}_heads", [split], perm=[0, 2, 1, 3])


def _gelu(m: _Maker, x: str) -> str:
    """``x * (1 + erf(x / sqrt 2)) / 2``."""
    small = m.add("Div", "gelu_div", [x, m.constant("gelu.root", np.float32(np.sqrt(2)))])
    grown = m.add("Add", "gelu_add", [m.add("Erf", "gelu_erf", [small]), m.constant("gelu.one", np.float32(1))])
    product = m.add("Mul", "gelu_mul", [x, grown])
    return m.add("Mul", "gelu_half", [product, m.constant("gelu.half", np.float32(0.5))])


def recurrent(seed: int = 0) -> tuple[ModelProto, list[dict[str, Array]]]:
    """Recurrent layers, an If whose branches are layers, and a Loop over a layer; sequences of 6 steps.

    >>> model, batches = recurrent()
    >>> [node.op_type for node in model.graph.node if node.op_type in ("LSTM", "GRU", "RNN", "If", "Loop")]
    ['LSTM', 'GRU', 'RNN', 'If', 'Loop']
    """
    m = _Maker(200 + seed)
    t = _recurrent_layer(m, "LSTM", "x", (10, 8), 4, bidirectional=True)
    t = _recurrent_layer(m, "GRU", t, (16, 12), 3)
    t = _recurrent_layer(m, "RNN", t, (12, 16), 1)
    mean = m.add("ReduceMean", "level", [t], keepdims=0)
    condition = m.add("Greater", "is_high", [mean, m.constant("zero", np.float32(0))])
    t = _layer_branches(m, condition, t)
    t = _looped_layer(m, t)
    m.layer("MatMul", "head", m.add("Tanh", "last", [t]), (16, 5))
    m.nodes[-1].output[0] = "y"
    model = m.model("recurrent", [("x", TensorProto.FLOAT, [6, "n", 10])], [("y", TensorProto.FLOAT, [6, "n", 5])])
    return model, [{"x": m.normal(6, 3, 10)} for _ in range(4)]


def _recurrent_layer(
    m: _Maker, op: str, x: str, sizes: tuple[int, int], gates: int, *, bidirectional: bool = False
) -> str:
    """Add a recurrent layer, and join the directions of its output."""
    inputs, hidden, directions, name = *sizes, 1 + bidirectional, op.lower()
    names = [
        m.constant(f"{name}.W", m.normal(directions, gates * hidden, inputs, deviation=0.4)),
        m.constant(f"{name}.R", m.normal(directions, gates * hidden, hidden, deviation=0.4)),
        m.constant(f"{name}.B", m.normal(directions, 2 * gates * hidden, deviation=0.1)),
    ]
    direction = "bidirectional" if bidirectional else "forward"
    t = m.add(op, name, [x, *names], hidden_size=hidden, direction=direction)
    t = m.add("Transpose", f"{name}_turned", [t], perm=[0, 2, 1, 3])
    return m.add("Reshape", f"{name}_joined", [t, m.constant(f"{name}.shape", np.int64([0, 0, directions * hidden]))])


def _layer_branches(m: _Maker, condition: str, x: str) -> str:
    """An If: a matmul with its own constant, or a matmul whose weight the branch cuts out of a constant outside."""
    halves = m.constant("halves", m.normal(16, 32, deviation=0.3))
    own = numpy_helper.from_array(m.normal(16, 16, deviation=0.3), "own.weight")
    bounds = [numpy_helper.from_array(np.int64([value]), f"bound{value}") for value in (16, 32, 1)]
    branches = {
        "then_branch": ([helper.make_node("MatMul", [x, own.name], ["then_out"], name="matmul")], [own]),
        "else_branch": (
            [
                helper.make_node("Slice", [halves, *(each.name for each in bounds)], ["half"], name="half"),
                helper.make_node("MatMul", [x, "half"], ["else_out"], name="matmul"),
            ],
            bounds,
        ),
    }
    graphs = {}
    for name, (nodes, tensors) in branches.items():
        result = helper.make_tensor_value_info(nodes[-1].output[0], TensorProto.FLOAT, [6, "n", 16])
        graphs[name] = helper.make_graph(nodes, name, [], [result], tensors)
    return m.add("If", "branch", [condition], **graphs)


def _looped_layer(m: _Maker, x: str) -> str:
    """A Loop of three steps, which passes its weight from step to step, as converters from TensorFlow write it."""
    weight = m.constant("looped.weight", m.normal(16, 16, deviation=0.3))
    values = [("step", TensorProto.INT64, []), ("go_on", TensorProto.BOOL, []), ("state", TensorProto.FLOAT, None)]
    inputs = [helper.make_tensor_value_info(*each) for each in (*values, ("kernel", TensorProto.FLOAT, [16, 16]))]
    nodes = [
        helper.make_node("Identity", ["go_on"], ["goes_on"], name="goes_on"),
        helper.make_node("MatMul", ["state", "kernel"], ["product"], name="matmul"),
        helper.make_node("Tanh", ["product"], ["next"], name="tanh"),
    ]
    names = (("goes_on", TensorProto.BOOL, []), ("next", TensorProto.FLOAT, None), ("kernel", TensorProto.FLOAT, None))
    body = helper.make_graph(nodes, "body", inputs, [helper.make_tensor_value_info(*each) for each in names])
    given = [m.constant("steps", np.int64(3)), m.constant("start", np.bool_(True)), x, weight]
    m.nodes.append(helper.make_node("Loop", given, ["loop_out", "unread"], name="loop", body=body))
    return "loop_out"
