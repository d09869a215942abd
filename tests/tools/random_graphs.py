"""Random graphs: small ONNX models generated from a seed, with calibration data.

::

    model, batches = random_model(7)

A seed always gives the same model and batches; only NumPy and onnx are needed. A graph starts with images (rank 4),
sequences (rank 3), tokens for an embedding, or rows (rank 2). Pieces follow one after another, each a function from the
last value to a new one: layers, activations, pools, gates, residuals, concatenations, attention. Sizes are small enough
to quantize a model within a second.

Shapes are computed while a graph is built, so every model is valid. Weights are normally distributed and keep
activations near 1; some have outliers, some have channels of zeros, some are shared by two layers. Some graphs have
Constant nodes, nameless nodes, two outputs, or a fixed batch size.

``random_model(7, extended=True)`` adds more kinds of pieces: transposed convolutions, layers that share weight and
bias, subgraphs of If and Loop with their own layers, and inputs without fixed sizes.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

__all__ = ["OPSETS", "random_model"]

Array = NDArray[Any]
Feed = dict[str, Array]
Shape = tuple[int, ...]

OPSETS = {11: 6, 13: 7, 17: 8, 21: 10}  # opset: IR version
BATCHES = 4
LAYER_NORM_SINCE = 17
WORDS = 29


class Value(NamedTuple):
    """A tensor of the graph: its name, and its shape in a calibration batch."""

    name: str
    shape: Shape


class Builder:
    """Collects the nodes and constants of one graph."""

    def __init__(self, seed: int, *, extended: bool = False) -> None:
        self.extended = extended
        self.rng = np.random.default_rng([21 if extended else 20, seed])
        self.opset = sorted(OPSETS)[seed % len(OPSETS)]
        self.samples = int(self.rng.integers(1, 4))
        self.nodes: list[NodeProto] = []
        self.constants: dict[str, Array] = {}
        self.as_nodes = self.chance(0.15)
        self.named = not self.chance(0.1)
        self._count = 0

    def chance(self, probability: float) -> bool:
        """True with this probability."""
        return bool(self.rng.random() < probability)

    def pick(self, choices: Sequence[Any]) -> Any:
        """Pick one of these at random."""
        return choices[int(self.rng.integers(len(choices)))]

    def fresh(self, stem: str) -> str:
        """A new name."""
        self._count += 1
        return f"{stem}_{self._count}"

    def add(self, op: str, inputs: Sequence[str], shape: Shape, **attributes: Any) -> Value:
        """Add a node with one output of that shape."""
        name = self.fresh(op.lower())
        label = name if self.named else ""
        self.nodes.append(helper.make_node(op, list(inputs), [f"{name}_out"], name=label, **attributes))
        return Value(f"{name}_out", shape)

    def constant(self, array: Array, stem: str = "c") -> str:
        """Add a constant, as an initializer or as a Constant node; return its name."""
        name = self.fresh(stem)
        if self.as_nodes and array.size < 64:
            tensor = numpy_helper.from_array(array, name)
            self.nodes.append(helper.make_node("Constant", [], [name], value=tensor))
        else:
            self.constants[name] = array
        return name

    def number(self, value: float, stem: str = "c") -> str:
        """Add a scalar constant; return its name."""
        return self.constant(np.full((), value, np.float32), stem)

    def normal(self, shape: Shape, deviation: float = 1.0, mean: float = 0.0) -> Array:
        """Normally distributed numbers."""
        return self.rng.normal(mean, deviation, shape).astype(np.float32)

    def weight(self, shape: Shape, fan_in: int, channels: int = 0) -> str:
        """Add a weight, or reuse one of the same shape; ``channels`` is the axis of output channels."""
        same_shape = [name for name, array in self.constants.items() if name.startswith("w_") and array.shape == shape]
        if same_shape and self.chance(0.1):
            return str(self.pick(same_shape))
        array = self.normal(shape, (1.5 / fan_in) ** 0.5)
        by_channel = np.moveaxis(array, channels, 0)
        if self.chance(0.4):  # channels of very different magnitudes
            factors = np.exp(self.rng.normal(0, 1, len(by_channel))).astype(np.float32)
            by_channel *= factors.reshape(-1, *[1] * (array.ndim - 1))
        if self.chance(0.15):
            by_channel[int(self.rng.integers(len(by_channel)))] = 0
        if self.chance(0.25):  # outliers
            places = self.rng.integers(0, array.size, 2)
            array.reshape(-1)[places] *= 8
        return self.constant(array, "w")


Piece = Callable[[Builder, Value], Value]


# Pieces of any rank


def relu(b: Builder, x: Value) -> Value:
    """Relu."""
    return b.add("Relu", [x.name], x.shape)


def clip(b: Builder, x: Value) -> Value:
    """Clip with two bounds, or one."""
    low = b.number(b.pick([0.0, -1.0]), "low")
    high = [b.number(b.pick([6.0, 1.5]), "high")] if b.chance(0.8) else []
    return b.add("Clip", [x.name, low, *high], x.shape)


def leaky_relu(b: Builder, x: Value) -> Value:
    """LeakyRelu, with or without an alpha attribute."""
    return b.add("LeakyRelu", [x.name], x.shape, **({"alpha": 0.1} if b.chance(0.5) else {}))


def swish(b: Builder, x: Value) -> Value:
    """``x * sigmoid(x)``."""
    gate = b.add("Sigmoid", [x.name], x.shape)
    return b.add("Mul", [x.name, gate.name], x.shape)


def scaled(b: Builder, x: Value) -> Value:
    """Multiply by a constant: a scalar, or one number per index of the last axis."""
    single = b.chance(0.7)
    factor = b.number(b.pick([0.5, 1.7, -1.0])) if single else b.constant(b.normal(x.shape[-1:], 0.2, 1.0))
    names = [x.name, factor]
    return b.add("Mul", names if b.chance(0.7) else names[::-1], x.shape)


def shifted(b: Builder, x: Value) -> Value:
    """Add a constant."""
    return b.add("Add", [x.name, b.constant(b.normal(x.shape[-1:], 0.3))], x.shape)


def reshaped(b: Builder, x: Value, shape: Shape) -> Value:
    """Reshape; the batch size stays dynamic."""
    sizes = np.array([0, *shape[1:-1], -1] if len(shape) > 2 else [0, -1], np.int64)
    return b.add("Reshape", [x.name, b.constant(sizes, "shape")], shape)


def activation(b: Builder, x: Value) -> Value:
    """A random activation function."""
    piece: Piece = b.pick((relu, relu, clip, leaky_relu, swish))
    return piece(b, x)


def doubled(b: Builder, x: Value) -> Value:
    """Concatenate the value and its activation along the last axis."""
    other = activation(b, x)
    shape = (*x.shape[:-1], 2 * x.shape[-1])
    return b.add("Concat", [x.name, other.name], shape, axis=len(shape) - 1)


# Pieces for images


def conv(b: Builder, x: Value, *, out: int = 0, size: int = 0, stride: int = 0, groups: int = 0) -> Value:
    """A convolution that keeps the image size, or halves it."""
    n, channels, height, width = x.shape
    size, stride = size or b.pick([1, 3, 3]), stride or (b.pick([1, 1, 1, 2]) if min(height, width) >= 4 else 1)
    groups = groups or b.pick([1, 1, 2] if channels % 2 == 0 else [1])
    out = out or b.pick([4, 6, 8, 12, 16, 32])
    out += -out % groups
    names = [x.name, b.weight((out, channels // groups, size, size), channels // groups * size**2)]
    if b.chance(0.6):
        names.append(b.constant(b.normal((out,), 0.2), "bias"))
    pad = size // 2
    shape = (n, out, *((side + 2 * pad - size) // stride + 1 for side in (height, width)))
    given = {"kernel_shape": [size, size]} if b.chance(0.7) else {}
    return b.add("Conv", names, shape, pads=[pad] * 4, strides=[stride] * 2, group=groups, **given)


def depthwise(b: Builder, x: Value) -> Value:
    """A depthwise convolution."""
    return conv(b, x, out=x.shape[1], size=3, groups=x.shape[1])


def separable(b: Builder, x: Value) -> Value:
    """Depthwise, then 1x1, as in mobile networks."""
    first = activation(b, batch_norm(b, depthwise(b, x)))
    return conv(b, first, size=1, stride=1, groups=1)


def batch_norm(b: Builder, x: Value) -> Value:
    """Batch norm with random statistics."""
    count = x.shape[1]
    arrays = (
        b.normal((count,), 0.2, 1.0),
        b.normal((count,), 0.2),
        b.normal((count,), 0.2),
        b.rng.uniform(0.5, 2.0, count).astype(np.float32),
    )
    names = [x.name, *(b.constant(array, "norm") for array in arrays)]
    return b.add("BatchNormalization", names, x.shape, epsilon=b.pick([1e-5, 1e-3]))


def conv_block(b: Builder, x: Value) -> Value:
    """Convolution, batch norm, activation."""
    block = batch_norm(b, conv(b, x)) if b.chance(0.6) else conv(b, x)
    return activation(b, block) if b.chance(0.85) else block


def residual_block(b: Builder, x: Value) -> Value:
    """Two convolutions with a residual connection."""
    first = activation(b, batch_norm(b, conv(b, x, stride=1)))
    second = conv(b, first, out=x.shape[1], stride=1)
    if second.shape != x.shape:  # grouped convolutions may change the number of channels
        return second
    added = b.add("Add", [second.name, x.name], x.shape)
    return relu(b, added) if b.chance(0.7) else added


def squeeze(b: Builder, x: Value) -> Value:
    """Squeeze and excitation: channels times gates computed from their means."""
    mean = b.add("GlobalAveragePool", [x.name], (*x.shape[:2], 1, 1))
    narrow = relu(b, conv(b, mean, out=4, size=1, groups=1))
    gate = b.add("Sigmoid", [conv(b, narrow, out=x.shape[1], size=1, groups=1).name], mean.shape)
    return b.add("Mul", [x.name, gate.name], x.shape)


def two_ways(b: Builder, x: Value) -> Value:
    """Two convolutions of one value, their channels concatenated."""
    parts = conv(b, x, stride=1), activation(b, conv(b, x, stride=1, size=1))
    shape = (x.shape[0], sum(part.shape[1] for part in parts), *x.shape[2:])
    return b.add("Concat", [part.name for part in parts], shape, axis=1)


def pool(b: Builder, x: Value) -> Value:
    """Max or average pooling."""
    height, width = x.shape[2:]
    if min(height, width) < 4:
        return x
    op = b.pick(["MaxPool", "AveragePool"])
    size, stride = b.pick([(2, 2), (3, 2), (3, 1)])
    pad = size // 2 if size == 3 else 0
    shape = (*x.shape[:2], *((side + 2 * pad - size) // stride + 1 for side in (height, width)))
    given = {"count_include_pad": 1} if op == "AveragePool" and b.chance(0.3) else {}
    return b.add(op, [x.name], shape, kernel_shape=[size] * 2, strides=[stride] * 2, pads=[pad] * 4, **given)


def turned(b: Builder, x: Value) -> Value:
    """Swap height and width."""
    n, channels, height, width = x.shape
    return b.add("Transpose", [x.name], (n, channels, width, height), perm=[0, 1, 3, 2])


def by_channel(b: Builder, x: Value) -> Value:
    """Multiply and add one number per channel."""
    factor = b.constant(b.normal((1, x.shape[1], 1, 1), 0.2, 1.0))
    product = b.add("Mul", [x.name, factor], x.shape)
    return b.add("Add", [product.name, b.constant(b.normal((x.shape[1], 1, 1), 0.3))], x.shape)


def picture_to_row(b: Builder, x: Value) -> Value:
    """Channel means, or all values flattened."""
    if b.chance(0.7) or prod(x.shape[1:]) > 512:
        x = b.add("GlobalAveragePool", [x.name], (*x.shape[:2], 1, 1))
    shape = (x.shape[0], prod(x.shape[1:]))
    return b.add("Flatten", [x.name], shape, axis=1) if b.chance(0.4) else reshaped(b, x, shape)


def picture_to_sequence(b: Builder, x: Value) -> Value:
    """Turn pixels into steps, and channels into features."""
    n, channels, height, width = x.shape
    flat = b.add(
        "Reshape",
        [x.name, b.constant(np.array([0, channels, -1], np.int64), "shape")],
        (n, channels, height * width),
    )
    return b.add("Transpose", [flat.name], (n, height * width, channels), perm=[0, 2, 1])


# Pieces for rows and sequences: the last axis holds features


def matmul(b: Builder, x: Value, out: int = 0) -> Value:
    """A matmul, with or without a bias."""
    out, features = out or b.pick([12, 16, 32, 32, 64, 128]), x.shape[-1]
    product = b.add("MatMul", [x.name, b.weight((features, out), features, channels=1)], (*x.shape[:-1], out))
    if b.chance(0.4):
        return product
    names = [product.name, b.constant(b.normal((out,), 0.2), "bias")]
    return b.add("Add", names if b.chance(0.7) else names[::-1], product.shape)


def gemm(b: Builder, x: Value, out: int = 0) -> Value:
    """A Gemm; rows only."""
    out, features, turned_weight = out or b.pick([10, 16, 32, 64, 128]), x.shape[-1], b.chance(0.6)
    shape = (out, features) if turned_weight else (features, out)
    names = [x.name, b.weight(shape, features, channels=0 if turned_weight else 1)]
    if b.chance(0.7):
        names.append(b.constant(b.normal((out,), 0.2), "bias"))
    given: dict[str, Any] = {"transB": 1} if turned_weight else {}
    if b.chance(0.15):
        given["alpha"] = 0.5
    return b.add("Gemm", names, (x.shape[0], out), **given)


def dense(b: Builder, x: Value, out: int = 0) -> Value:
    """A Gemm (rows only) or a matmul."""
    return gemm(b, x, out) if len(x.shape) == 2 and b.chance(0.6) else matmul(b, x, out)


def dense_block(b: Builder, x: Value) -> Value:
    """A layer and an activation."""
    return activation(b, dense(b, x))


def gated(b: Builder, x: Value) -> Value:
    """A layer times the sigmoid gates of another layer."""
    out = b.pick([16, 32])
    value, gate = dense(b, x, out), dense(b, x, out)
    opened = b.add("Sigmoid", [gate.name], gate.shape)
    return b.add("Mul", [value.name, opened.name], value.shape)


def feed_forward(b: Builder, x: Value) -> Value:
    """Two layers with a residual connection."""
    hidden = activation(b, matmul(b, layer_norm(b, x), 2 * x.shape[-1]))
    second = matmul(b, hidden, x.shape[-1])
    return b.add("Add", [x.name, second.name], x.shape)


def layer_norm(b: Builder, x: Value) -> Value:
    """Layer norm: one node, or its parts in opsets without that operator."""
    features = x.shape[-1]
    factor = b.constant(b.normal((features,), 0.2, 1.0), "norm")
    offset = b.constant(b.normal((features,), 0.2), "norm")
    if b.opset >= LAYER_NORM_SINCE:
        return b.add("LayerNormalization", [x.name, factor, offset], x.shape, axis=-1)
    single = (*x.shape[:-1], 1)
    mean = b.add("ReduceMean", [x.name], single, axes=[-1])
    centered = b.add("Sub", [x.name, mean.name], x.shape)
    square = b.add("Pow", [centered.name, b.number(2.0)], x.shape)
    variance = b.add("ReduceMean", [square.name], single, axes=[-1])
    safe = b.add("Add", [variance.name, b.number(1e-5)], single)
    deviation = b.add("Sqrt", [safe.name], single)
    normal = b.add("Div", [centered.name, deviation.name], x.shape)
    grown = b.add("Mul", [normal.name, factor], x.shape)
    return b.add("Add", [grown.name, offset], x.shape)


def softmax(b: Builder, x: Value) -> Value:
    """Softmax over the features."""
    return b.add("Softmax", [x.name], x.shape, axis=-1 if b.chance(0.5) else len(x.shape) - 1)


def attention(b: Builder, x: Value) -> Value:
    """Attention of one or two heads with a residual connection; sequences only."""
    n, steps, features = x.shape
    heads = b.pick([1, 2]) if features % 2 == 0 else 1
    given = layer_norm(b, x) if b.chance(0.5) else x
    query, key, value = (_heads(b, matmul(b, given, features), heads) for _ in range(3))
    axes = [*range(len(key.shape) - 2), len(key.shape) - 1, len(key.shape) - 2]
    flipped = b.add("Transpose", [key.name], (*key.shape[:-2], key.shape[-1], steps), perm=axes)
    scores = b.add("MatMul", [query.name, flipped.name], (*query.shape[:-1], steps))
    small = b.add("Mul", [scores.name, b.number((features // heads) ** -0.5)], scores.shape)
    mixed = b.add("MatMul", [softmax(b, small).name, value.name], query.shape)
    joined = matmul(b, _joined(b, mixed, (n, steps, features)), features)
    return b.add("Add", [x.name, joined.name], x.shape)


def _heads(b: Builder, x: Value, heads: int) -> Value:
    if heads == 1:
        return x
    n, steps, features = x.shape
    split = reshaped(b, x, (n, steps, heads, features // heads))
    return b.add("Transpose", [split.name], (n, heads, steps, features // heads), perm=[0, 2, 1, 3])


def _joined(b: Builder, x: Value, shape: Shape) -> Value:
    if x.shape == shape:
        return x
    order = (x.shape[0], x.shape[2], x.shape[1], x.shape[3])
    return reshaped(b, b.add("Transpose", [x.name], order, perm=[0, 2, 1, 3]), shape)


def across(b: Builder, x: Value) -> Value:
    """A layer over the steps of a sequence instead of its features."""
    n, steps, features = x.shape
    flipped = b.add("Transpose", [x.name], (n, features, steps), perm=[0, 2, 1])
    product = matmul(b, flipped, steps)
    return b.add("Transpose", [product.name], x.shape, perm=[0, 2, 1])


def sequence_to_row(b: Builder, x: Value) -> Value:
    """Flatten the steps."""
    return reshaped(b, x, (x.shape[0], prod(x.shape[1:])))


# Pieces of extended graphs


def conv_transpose(b: Builder, x: Value) -> Value:
    """A transposed convolution that keeps the image size, or doubles it."""
    n, channels, height, width = x.shape
    size, stride, pad = b.pick([(2, 2, 0), (3, 1, 1), (4, 2, 1)]) if max(height, width) <= 12 else (3, 1, 1)
    groups = b.pick([1, 1, 2]) if channels % 2 == 0 else 1
    out = b.pick([4, 6, 8])
    fan_in = channels * size**2 // (groups * stride**2)
    names = [x.name, b.weight((channels, out // groups, size, size), fan_in, channels=1)]
    if b.chance(0.6):
        names.append(b.constant(b.normal((out,), 0.2), "bias"))
    shape = (n, out, height * stride, width * stride)
    return b.add("ConvTranspose", names, shape, pads=[pad] * 4, strides=[stride] * 2, group=groups)


def twins(b: Builder, x: Value) -> Value:
    """Two layers with one shared weight and mostly a shared bias, on a value and on its activation."""
    other = activation(b, x)
    if len(x.shape) == 4:
        out = b.pick([4, 8])
        weight, biases = b.weight((out, x.shape[1], 1, 1), x.shape[1]), _two_biases(b, out)
        shape = (x.shape[0], out, *x.shape[2:])
        layers = [
            b.add("Conv", [value.name, weight, bias], shape) for value, bias in zip((x, other), biases, strict=True)
        ]
    else:
        out = b.pick([16, 32])
        weight, biases = b.weight((x.shape[-1], out), x.shape[-1], channels=1), _two_biases(b, out)
        shape = (*x.shape[:-1], out)
        products = [b.add("MatMul", [value.name, weight], shape) for value in (x, other)]
        layers = [b.add("Add", [each.name, bias], shape) for each, bias in zip(products, biases, strict=True)]
    return b.add(b.pick(["Add", "Sub", "Mul"]), [each.name for each in layers], shape)


def _two_biases(b: Builder, count: int) -> tuple[str, str]:
    first = b.constant(b.normal((count,), 0.2), "bias")
    return (first, first) if b.chance(0.7) else (first, b.constant(b.normal((count,), 0.2), "bias"))


def branch(b: Builder, x: Value) -> Value:
    """An If that depends on the mean of the value: a layer, or adding a constant."""
    mean = b.add("ReduceMean", [x.name], (), keepdims=0)
    condition = b.add("Greater", [mean.name, b.number(b.pick([0.0, 0.2]))], ())
    bodies = {}
    for name, is_layer in (("then_branch", b.chance(0.7)), ("else_branch", False)):
        result = b.fresh("branch")
        node, tensors = _inner_node(b, x, x.name, result, is_layer=is_layer)
        values = [helper.make_tensor_value_info(result, TensorProto.FLOAT, None)]
        bodies[name] = helper.make_graph([node], b.fresh("body"), [], values, tensors)
    return b.add("If", [condition.name], x.shape, **bodies)


def loop(b: Builder, x: Value) -> Value:
    """A Loop of two iterations: a layer, or adding a constant."""
    names = [b.fresh(stem) for stem in ("turn", "goes_on", "before", "goes_further", "after")]
    turn, goes_on, before, further, after = names
    node, tensors = _inner_node(b, x, before, after, is_layer=b.chance(0.7))
    same = helper.make_node("Identity", [goes_on], [further], name=b.fresh("identity") if b.named else "")
    given = [
        helper.make_tensor_value_info(turn, TensorProto.INT64, []),
        helper.make_tensor_value_info(goes_on, TensorProto.BOOL, []),
        helper.make_tensor_value_info(before, TensorProto.FLOAT, None),
    ]
    results = [
        helper.make_tensor_value_info(further, TensorProto.BOOL, []),
        helper.make_tensor_value_info(after, TensorProto.FLOAT, None),
    ]
    body = helper.make_graph([same, node], b.fresh("body"), given, results, tensors)
    count = b.constant(np.array(2, np.int64), "count")
    return b.add("Loop", [count, b.constant(np.array(True), "start"), x.name], x.shape, body=body)


def _inner_node(
    b: Builder, x: Value, given: str, result: str, *, is_layer: bool
) -> tuple[NodeProto, list[TensorProto]]:
    """A node of a subgraph that keeps the shape of a value, and the constants to store in the subgraph."""
    label = b.fresh("inner") if b.named else ""
    if not is_layer:
        number = numpy_helper.from_array(np.float32(b.pick([0.5, -0.25])), b.fresh("inner_c"))
        return helper.make_node("Add", [given, number.name], [result], name=label), [number]
    if len(x.shape) == 4:
        op, weight = "Conv", b.normal((x.shape[1], x.shape[1], 1, 1), x.shape[1] ** -0.5)
    else:
        op, weight = "MatMul", b.normal((x.shape[-1], x.shape[-1]), x.shape[-1] ** -0.5)
    if b.chance(0.5):
        name, tensors = b.fresh("w"), []
        b.constants[name] = weight
    else:
        name = b.fresh("inner_w")
        tensors = [numpy_helper.from_array(weight, name)]
    return helper.make_node(op, [given, name], [result], name=label), tensors


# Complete graphs

PIECES: dict[int, tuple[Piece, ...]] = {
    4: (
        conv_block,
        conv_block,
        conv_block,
        residual_block,
        residual_block,
        separable,
        depthwise,
        squeeze,
        two_ways,
        pool,
        pool,
        turned,
        by_channel,
        scaled,
        batch_norm,
    ),
    3: (attention, attention, feed_forward, feed_forward, matmul, dense_block, layer_norm, gated, across, doubled),
    2: (dense_block, dense_block, gated, feed_forward, dense, layer_norm, doubled, shifted, scaled, softmax),
}
MORE_PIECES: dict[int, tuple[Piece, ...]] = {
    4: (*PIECES[4], conv_transpose, conv_transpose, twins, twins, branch, loop),
    3: (*PIECES[3], twins, twins, branch, loop),
    2: (*PIECES[2], twins, twins, branch, loop),
}  # of extended graphs
DOWN: dict[int, tuple[Piece, ...]] = {4: (picture_to_row, picture_to_row, picture_to_sequence), 3: (sequence_to_row,)}
LARGEST = 4096  # elements of one sample


def _pictures(b: Builder) -> Value:
    side = b.pick([6, 8, 9, 12])
    return Value("x", (b.samples, b.pick([1, 3, 6, 8, 8]), side, b.pick([side, 8])))


def _sequences(b: Builder) -> Value:
    return Value("x", (b.samples, b.pick([3, 5, 8]), b.pick([12, 16, 32, 64, 128])))


def _tokens(b: Builder) -> Value:
    return Value("ids", (b.samples, b.pick([4, 6, 9])))


def _rows(b: Builder) -> Value:
    return Value("x", (b.samples, b.pick([16, 33, 64, 128])))


def _embedded(b: Builder, ids: Value) -> Value:
    """Embedding of tokens, sometimes with position embeddings."""
    features = b.pick([16, 32, 64])
    table = b.constant(b.normal((WORDS, features)), "table")
    rows = b.add("Gather", [table, ids.name], (*ids.shape, features), axis=0)
    if b.chance(0.5):
        places = b.constant(b.normal((ids.shape[1], features), 0.3))
        rows = b.add("Add", [rows.name, places], rows.shape)
    return layer_norm(b, rows) if b.chance(0.5) else rows


def _body(b: Builder, start: Value) -> list[Value]:
    """Build the graph; return its outputs: the last value, and sometimes one in the middle."""
    value, seen = start, []
    for _ in range(int(b.rng.integers(3, 7))):
        rank = len(value.shape)
        pieces = DOWN[rank] if rank in DOWN and b.chance(0.08) else (MORE_PIECES if b.extended else PIECES)[rank]
        value = b.pick(pieces)(b, value)
        if prod(value.shape[1:]) > LARGEST:
            value = pool(b, value) if len(value.shape) == 4 else dense(b, value, 8)
        seen.append(value)
    if len(value.shape) in DOWN and b.chance(0.6):
        value = b.pick(DOWN[len(value.shape)])(b, value)
    value = conv(b, value) if len(value.shape) == 4 else dense(b, value)  # at least one layer with a weight
    if b.chance(0.3):
        value = softmax(b, value)
    middle = [each for each in seen if each.name not in {start.name, value.name}]
    return [value, b.pick(middle)] if middle and b.chance(0.2) else [value]


def _info(value: Value, kind: int, *, fixed: bool, is_open: bool = False) -> ValueInfoProto:
    sizes: list[str | int | None] = [value.shape[0] if fixed else "n", *value.shape[1:]]
    if is_open:  # all but channels and features, which weights need
        kept = {1} if len(sizes) == 4 else {len(sizes) - 1} - ({1} if kind == TensorProto.INT64 else set())
        sizes = [size if i in kept else f"{value.name}_{i}" for i, size in enumerate(sizes)]
    return helper.make_tensor_value_info(value.name, kind, sizes)


def _batches(b: Builder, given: Value) -> list[Feed]:
    if given.name == "ids":
        return [{"ids": b.rng.integers(0, WORDS, given.shape)} for _ in range(BATCHES)]
    deviation = np.ones(given.shape[-1], np.float32)
    if b.chance(0.3):
        deviation[int(b.rng.integers(len(deviation)))] = 10  # an outlier, as in inputs of transformers
    return [{"x": b.normal(given.shape) * deviation} for _ in range(BATCHES)]


def random_model(seed: int, *, extended: bool = False) -> tuple[ModelProto, list[Feed]]:
    """Generate a model and calibration batches; extended models have more kinds of pieces.

    >>> model, batches = random_model(0)
    >>> model == random_model(0)[0], len(batches)
    (True, 4)
    """
    b = Builder(seed, extended=extended)
    given: Value = b.pick([*[_pictures] * 4, _sequences, _tokens, _rows])(b)
    start = _embedded(b, given) if given.name == "ids" else given
    outputs = _body(b, start)
    fixed = b.chance(0.2)
    is_open = extended and b.chance(0.3)
    kind = TensorProto.INT64 if given.name == "ids" else TensorProto.FLOAT
    graph = helper.make_graph(
        b.nodes,
        f"random_{seed}",
        [_info(given, kind, fixed=fixed, is_open=is_open)],
        [_info(value, TensorProto.FLOAT, fixed=fixed, is_open=is_open) for value in outputs],
        [numpy_helper.from_array(array, name) for name, array in b.constants.items()],
    )
    imports = [helper.make_opsetid("", b.opset)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=OPSETS[b.opset], producer_name="random_graphs")
    return model, _batches(b, given)
