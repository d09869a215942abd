"""Kernels: ONNX Runtime's integer kernels on this machine, against the oracle.

A CPU without VNNI multiplies unsigned by signed bytes and adds two products in 16 bits, which saturates where weights
are signed and beyond 64. Sums are wrong then, by many steps, and nothing says so.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, helper

from detent.errors import UnsupportedError
from detent.proof.oracle import ORACLES, Prediction
from detent.proof.probe import Reading
from detent.proof.report import Difference, Kernel
from detent.proof.tally import first_index

__all__ = ["KernelCheck", "compare_kernel", "is_integer_kernel"]

Array = NDArray[Any]
SAFE_CODE = 64
"""Two products of an unsigned byte and a signed one of at most this stay within 16 bits: 255 * 64 * 2 < 2**15."""
_FAMILY = ("QLinear", "QGemm", "QAttention", "DynamicQuantize", "MatMulInteger", "ConvInteger", "MatMulNBits")
_WEIGHTS = {"QLinearConv": 3, "QLinearMatMul": 3, "QGemm": 3, "MatMulIntegerToFloat": 1, "MatMulInteger": 1}
_ZERO_POINTS = {"QLinearConv": 7, "QLinearMatMul": 7, "QGemm": 8}


def is_integer_kernel(node: NodeProto) -> bool:
    """Whether a node of an optimised graph computes with integers.

    >>> is_integer_kernel(NodeProto(op_type="QLinearConv")), is_integer_kernel(NodeProto(op_type="QuantizeLinear"))
    (True, False)
    """
    return node.op_type.startswith(_FAMILY)


class _Row:
    """What was found of one kernel, over all batches."""

    def __init__(self, node: NodeProto) -> None:
        self.name, self.kernel = node.name or node.output[0], node.op_type
        self.compared = self.differing = self.steps = 0
        self.saturated = False
        self.worst: Difference | None = None

    @property
    def row(self) -> Kernel:
        return Kernel(self.name, self.kernel, self.compared, self.differing, self.steps, self.saturated)


def compare_kernel(node: NodeProto, inputs: list[Array | None], got: Array) -> tuple[Kernel, Difference | None]:
    """A kernel's result beside what exact arithmetic gives.

    Args:
        node: of the optimised graph.
        inputs: its inputs, None for those that are left out.
        got: what the kernel gave.

    Returns:
        The figures, and the largest difference where sums saturate.

    Raises:
        UnsupportedError: the node has a form that the oracle does not know.

    >>> node = helper.make_node("MatMulInteger", ["a", "b"], ["y"], name="product")
    >>> a, b = np.full((1, 2), 255, np.uint8), np.full((2, 1), 127, np.int8)
    >>> row, difference = compare_kernel(node, [a, b], np.array([[32767]], np.int32))  # as AVX2 has it
    >>> row.differing, row.max_steps, row.saturated, difference.expected
    (1, 32003, True, 64770)
    """
    attributes = {each.name: helper.get_attribute_value(each) for each in node.attribute}
    expected = ORACLES[node.op_type](inputs, attributes)
    name, size = node.name or node.output[0], int(expected.values.size)
    if expected.values.shape != got.shape:
        raise UnsupportedError(f"the result has shape {got.shape}, expected {expected.values.shape}")
    steps = _steps(expected, got)
    differing = int(np.count_nonzero(steps))
    if not differing:
        return Kernel(name, node.op_type, size, 0, 0, saturated=False), None
    largest = int(steps.max())
    risky = _can_saturate(node, inputs)
    saturated = risky or largest > 1
    row = Kernel(name, node.op_type, size, differing, largest, saturated)
    return row, _describe(node, inputs, expected, got, steps, risky=risky) if saturated else None


def _steps(expected: Prediction, got: Array) -> Array:
    """The distance of each code, or of the sum behind each float."""
    distance = np.abs(got.astype(np.float64) - expected.values.astype(np.float64))
    if expected.slack is None or expected.step is None:
        return distance.astype(np.int64)
    beyond = distance > expected.slack + 0.5 * expected.step.astype(np.float64)
    return np.where(beyond, np.ceil(distance / expected.step.astype(np.float64)), 0).astype(np.int64)


def _can_saturate(node: NodeProto, inputs: list[Array | None]) -> bool:
    weights = inputs[_WEIGHTS.get(node.op_type, 1)]
    return weights is not None and weights.dtype == np.int8 and _reach(weights) > SAFE_CODE


def _reach(weights: Array) -> int:
    return max(-int(weights.min(initial=0)), int(weights.max(initial=0)))


def _describe(
    node: NodeProto, inputs: list[Array | None], expected: Prediction, got: Array, steps: Array, *, risky: bool
) -> Difference:
    index = first_index(steps == steps.max())
    channel = index[expected.axis]
    counts = np.count_nonzero(np.moveaxis(steps, expected.axis, 0)[channel])
    why = "the sums are wrong"
    weights = inputs[_WEIGHTS.get(node.op_type, 1)]
    if risky and weights is not None:
        why = (
            f"two products overflow 16 bits, for int8 weights reach {_reach(weights)}: "
            "quantize for target 'onnxruntime' or 'onnxruntime-avx2'"
        )
    place = _ZERO_POINTS.get(node.op_type, len(inputs))
    scale, zero = inputs[place - 1 : place + 1] if place < len(inputs) else (None, None)
    return Difference(
        node.name or node.output[0],
        node.output[0],
        index,
        expected.values[index].item(),
        got[index].item(),
        None,
        None if scale is None else float(scale.reshape(-1)[0]),
        None if zero is None else int(zero.reshape(-1)[0]),
        f"saturation in channel {channel}, {counts} of its codes differ, by up to {int(steps.max())} steps; {why}",
    )


class KernelCheck:
    """Level 3: every integer kernel of an optimised graph.

    Args:
        model: the optimised graph.

    >>> from onnx import parser
    >>> made = parser.parse_model('''<ir_version: 8, opset_import: ["" : 17]>
    ...     g (uint8[1, 2] a, int8[2, 1] b) => (int32[1, 1] y) { y = MatMulInteger(a, b) }''')
    >>> check = KernelCheck(made)
    >>> arrays = {"a": np.uint8([[1, 2]]), "b": np.int8([[3], [4]]), "y": np.int32([[11]])}
    >>> [reading.take(arrays) for reading in check.readings()]
    [None]
    >>> check.rows()[0].compared, check.saturation()
    (1, None)
    """

    def __init__(self, model: ModelProto) -> None:
        self._nodes = [node for node in model.graph.node if is_integer_kernel(node)]
        self._rows = {node.output[0]: _Row(node) for node in self._nodes}
        self.notes: dict[str, None] = {}

    def readings(self) -> list[Reading]:
        """What has to be looked at."""
        return [self._reading(node) for node in self._nodes if node.op_type in ORACLES]

    def _reading(self, node: NodeProto) -> Reading:
        names = (*dict.fromkeys(name for name in node.input if name), node.output[0])
        return Reading(names, self._taker(node))

    def _taker(self, node: NodeProto) -> Callable[[Mapping[str, Array]], None]:
        row = self._rows[node.output[0]]

        def take(arrays: Mapping[str, Array]) -> None:
            inputs = [arrays[name] if name else None for name in node.input]
            try:
                found, difference = compare_kernel(node, inputs, arrays[node.output[0]])
            except UnsupportedError as error:
                self.notes[f"{row.name} ({row.kernel}) was not compared: {error}"] = None
                return
            row.compared += found.compared
            row.differing += found.differing
            row.saturated |= found.saturated
            if difference is not None and (row.worst is None or found.max_steps > row.steps):
                row.worst = difference
            row.steps = max(row.steps, found.max_steps)

        return take

    def rows(self) -> tuple[Kernel, ...]:
        """A row for each kernel, in the graph's order."""
        return tuple(self._rows[node.output[0]].row for node in self._nodes)

    def saturation(self) -> Difference | None:
        """The largest wrong code of the first kernel whose sums saturate."""
        return next((row.worst for row in self._rows.values() if row.worst is not None), None)
