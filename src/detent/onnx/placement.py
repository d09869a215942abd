"""Placement: behind which tensors Q/DQ pairs stand, so that runtimes find integer operators to fuse.

A *chain* is a stretch of a network that can run in integers: the result of a quantized Conv or Gemm, behind the Relu
or Clip that follows it, and what Add, Mul, Sigmoid, pools and Concat make of such results. Its tensors have Q/DQ pairs
that all readers read from. Tensors outside of chains have one where a quantized layer reads them, for that layer alone:
so inputs of MatMul are quantized and their results are not, and attention, normalization and activation functions stay
float. What leads to no quantized layer any more stays float, too.

Operators that move data only (MaxPool, Reshape, Transpose, ...) have the same parameters before and behind them. A
product with a positive constant has the same codes, and another scale: it costs nothing. Other constants in a chain,
and gates that come from outside (the sigmoid of a squeeze-and-excitation block), are quantized for their reader.
"""

from collections.abc import Mapping
from math import prod

import numpy as np
from onnx import NodeProto, TensorProto

from detent.onnx.decisions import QuantizerPlacement
from detent.onnx_model.graph import PASSING_CODES, Graph, attribute_of, reads
from detent.onnx_model.layers import Layer
from detent.spec import QuantSpec

__all__ = ["place_quantizers"]

PRODUCTS = ("Conv", "Gemm")
CHAINED = ("Add", "Mul", "AveragePool", "GlobalAveragePool", "Sigmoid", "Concat", "LeakyRelu")
PAIRED = ("Add", "Mul")
GATES = ("Sigmoid", "HardSigmoid", "Tanh")
PAIR = 2
MAX_RANGE_RATIO = 4.0  # inputs of a Concat whose ranges differ by more keep their own precision only in float
Range = tuple[float, float]


def place_quantizers(
    graph: Graph,
    layers: Mapping[str, Layer],
    specs: Mapping[str, QuantSpec],
    ranges: Mapping[str, Range] | None = None,
) -> list[QuantizerPlacement]:
    """Where Q/DQ pairs of activations stand, in the order of the graph.

    Where ranges are known, a Concat of very different ones breaks its chain.
    """
    return _Placer(graph, layers, specs, ranges).run()


class _Placer:
    def __init__(
        self,
        graph: Graph,
        layers: Mapping[str, Layer],
        specs: Mapping[str, QuantSpec],
        ranges: Mapping[str, Range] | None,
    ) -> None:
        self.graph, self.layers, self.specs, self.ranges = graph, layers, specs, ranges
        self.by_node = {id(layer.node): layer for layer in layers.values()}
        self.readers: dict[str, list[str]] = {}
        for name in specs:
            self.readers.setdefault(layers[name].data, []).append(name)
        self.leading = self._leading()
        self.chain: dict[str, QuantizerPlacement] = {}
        self.gates: dict[str, list[str]] = {}
        self.gate_spec = next(iter(specs.values()), QuantSpec("uint8"))

    def _leading(self) -> set[str]:
        """The tensors that lead to a layer whose input is quantized."""
        leading = set(self.readers)
        for node in reversed(self.graph.nodes):
            if node.op_type != "Shape" and leading & set(node.output):
                leading.update(reads(node))
        return leading

    def run(self) -> list[QuantizerPlacement]:
        passed: set[int] = set()
        for node in self.graph.nodes:
            if id(node) in passed:
                continue
            bound = self._bound_behind(node)
            result = node.output[0] if bound is None else bound.output[0]
            spec = self._chain_spec(node)
            if spec is not None and result in self.leading and not self._escapes(node, bound):
                clip_min, clip_max = (-np.inf, np.inf) if bound is None else _limits(self.graph, bound)
                constants = tuple(
                    name for name in node.input if node.op_type in PAIRED and name in self.graph.constants
                )
                finest = self._finest_spec(result, spec)
                self.chain[result] = QuantizerPlacement(
                    result, finest, result, (), clip_min, clip_max, constants=constants
                )
                self._quantize_gates(node, spec)
                if bound is not None:
                    passed.add(id(bound))
            elif self._scaled_by(node) is not None and result in self.leading and not self._escapes(node, None):
                self._scale(node)
            elif node.op_type in PASSING_CODES and node.input[0] in self.chain and _only_moves(node):
                self._move(node)
        placements = list(self.chain.values())
        outside = {
            **self.readers,
            **{name: [*self.readers.get(name, ()), *nodes] for name, nodes in self.gates.items()},
        }
        for tensor, names in outside.items():
            if tensor not in self.chain:
                spec = self._finest_spec(tensor, self.specs.get(names[0], self.gate_spec))
                placements.append(QuantizerPlacement(tensor, spec, tensor, tuple(dict.fromkeys(names))))
        return placements

    def _finest_spec(self, tensor: str, default: QuantSpec) -> QuantSpec:
        """The spec of the layers that read a tensor, that with most bits where they differ."""
        specs = [self.specs[name] for name in self.readers.get(tensor, ())]
        return max(specs, key=lambda spec: spec.bits, default=default)

    def _bound_behind(self, node: NodeProto) -> NodeProto | None:
        """The Relu or Clip that alone reads a node's result, where a quantizer can take over its work."""
        result = node.output[0]
        readers = self.graph.consumers(result)
        if len(readers) != 1 or readers[0].op_type not in {"Relu", "Clip"} or result in self.graph.outputs:
            return None
        return readers[0] if _limits(self.graph, readers[0])[0] == 0 else None

    def _escapes(self, node: NodeProto, bound: NodeProto | None) -> bool:
        """Whether a result, or what is bounded of it, is read by somebody outside of the graph."""
        names = [node.output[0], *([] if bound is None else [bound.output[0]])]
        return any(name in self.graph.outputs or name in self.graph.captured for name in names)

    def _chain_spec(self, node: NodeProto) -> QuantSpec | None:
        """The spec of a node's result as part of a chain; None where it is none."""
        layer = self.by_node.get(id(node))
        if layer is not None and node.op_type in PRODUCTS:
            return self.specs.get(layer.name)
        chained = [name for name in node.input if name in self.chain]
        if node.op_type not in CHAINED or not chained or self._scaled_by(node) is not None:
            return None
        others = [name for name in node.input if name not in self.chain]
        if not all(node.op_type in PAIRED and (self._is_number(name) or self._is_gate(name)) for name in others):
            return None
        if node.op_type == "Concat" and self._is_mixed(node):
            return None
        return self.chain[chained[0]].spec

    def _is_number(self, name: str) -> bool:
        """Whether a tensor is one float."""
        tensor = self.graph.constants.get(name)
        return tensor is not None and tensor.data_type == TensorProto.FLOAT and prod(tensor.dims) == 1

    def _is_gate(self, name: str) -> bool:
        producer = self.graph.producer(name)
        return producer is not None and producer.op_type in GATES

    def _quantize_gates(self, node: NodeProto, spec: QuantSpec) -> None:
        for name in node.input:
            if node.op_type in PAIRED and name not in self.chain and self._is_gate(name):
                self.gates.setdefault(name, []).append(self.graph.node_name(node))
                self.gate_spec = spec

    def _scaled_by(self, node: NodeProto) -> float | None:
        """What a node multiplies a tensor of the chain by, if it is one positive number."""
        if node.op_type not in {"Mul", "Div"} or len(node.input) != PAIR:
            return None
        numbers = [i for i, name in enumerate(node.input) if self._is_number(name)]
        if (
            len(numbers) != 1
            or (node.op_type == "Div" and numbers[0] == 0)
            or node.input[1 - numbers[0]] not in self.chain
        ):
            return None
        shape = self.graph.constants[node.input[numbers[0]]].dims
        value = float(self.graph.array(node.input[numbers[0]]).item())
        if not np.isfinite(value) or value <= 0 or len(shape) > 1:
            return None
        # Where float operators read the product, its codes are no use, and a fusion such as GELU's would break.
        if not all(self._reads_codes(reader) for reader in self.graph.consumers(node.output[0])):
            return None
        return value if node.op_type == "Mul" else 1 / value

    def _reads_codes(self, node: NodeProto) -> bool:
        layer = self.by_node.get(id(node))
        return node.op_type in {*CHAINED, *PASSING_CODES} or (layer is not None and layer.name in self.specs)

    def _scale(self, node: NodeProto) -> None:
        source = next(self.chain[name] for name in node.input if name in self.chain)
        factor = self._scaled_by(node) or 1.0
        result = node.output[0]
        self.chain[result] = QuantizerPlacement(result, source.spec, result, source_tensor=source.tensor, factor=factor)

    def _is_mixed(self, node: NodeProto) -> bool:
        if self.ranges is None or any(name not in self.ranges for name in node.input):
            return False
        widths = [high - low for low, high in (self.ranges[name] for name in node.input)]
        return max(widths) > MAX_RANGE_RATIO * min(widths)

    def _move(self, node: NodeProto) -> None:
        source = self.chain[node.input[0]]
        for name in node.output if node.op_type == "Split" else node.output[:1]:
            if name in self.leading and name not in self.graph.outputs and name not in self.graph.captured:
                self.chain[name] = QuantizerPlacement(name, source.spec, source.group)


def _only_moves(node: NodeProto) -> bool:
    if node.op_type == "Resize":
        mode = attribute_of(node, "mode", b"nearest")
        return bool(mode == b"nearest")
    return True


def _limits(graph: Graph, node: NodeProto) -> Range:
    """What a Relu or Clip enforces; NaN where that is no constant."""
    if node.op_type == "Relu":
        return 0.0, np.inf
    limits = []
    for position, default in ((1, -np.inf), (2, np.inf)):
        name = node.input[position] if len(node.input) > position else ""
        if name and name not in graph.constants:
            return np.nan, np.nan
        limits.append(float(graph.array(name)) if name else default)
    return limits[0], limits[1]
