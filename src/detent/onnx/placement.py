"""Placement: which tensors get Q/DQ pairs, so that runtimes can fuse integer kernels.

A *chain* is a part of a network that can run on integer kernels without a float tensor in between. It begins at the
output of a quantized Conv or Gemm, or of the Relu or Clip after that layer. It continues through Add, Mul, Sigmoid,
LeakyRelu, average pools and Concat. A tensor of a chain has one Q/DQ pair, which all nodes that read the tensor share.

A tensor outside of chains gets a Q/DQ pair only for the quantized layers that read it. So the input of a MatMul is
quantized, and the output of the MatMul is not. Normalization and activation functions are kept in float, and so is
attention, unless a plan quantizes both inputs of its matmuls. A tensor on which no quantized layer depends is also kept
in float.

The output of an operator that only moves data (MaxPool, Reshape, Transpose, ...) has the parameters of its input. A
multiplication by a positive constant keeps the codes and changes only the scale, at no run-time cost. Other scalar
constants in a chain get a Q/DQ pair for the operator that reads them. Gates from outside the chain, such as the sigmoid
of a squeeze-and-excitation block, also get a Q/DQ pair. An Add may also read a tensor from outside the chain that has a
Q/DQ pair for a quantized layer: a residual connection, for example, whose first convolution is kept in float. A Concat
may read a tensor of a chain that a Resize enlarged by interpolation, which computes in float; without a Q/DQ pair, the
Concat would join float tensors. Both can add noise, so a plan may keep such nodes in float.
"""

from collections.abc import Collection, Mapping
from math import prod

import numpy as np
from onnx import NodeProto, TensorProto

from detent.onnx.decisions import QuantizerPlacement
from detent.onnx_model.graph import PASSING_CODES, Graph, interpolates, reads
from detent.onnx_model.layers import Layer
from detent.spec import QuantSpec

__all__ = ["place_quantizers"]

CHAIN_LAYERS = ("Conv", "Gemm")  # layers that begin a chain
CHAINED = ("Add", "Mul", "AveragePool", "GlobalAveragePool", "Sigmoid", "Concat", "LeakyRelu")
BINARY = ("Add", "Mul")
GATES = ("Sigmoid", "HardSigmoid", "Tanh")
MAX_RANGE_RATIO = 4.0  # above it, the Concat input with the smallest range would lose over 2 bits
LAST_SPEC = QuantSpec("uint8")  # spec of a last layer's output if the layer's input has fewer bits
Range = tuple[float, float]


def place_quantizers(
    graph: Graph,
    layers: Mapping[str, Layer],
    specs: Mapping[str, QuantSpec],
    ranges: Mapping[str, Range] | None = None,
    last_layers: Collection[str] = (),
    *,
    float_joins: bool = False,
) -> list[QuantizerPlacement]:
    """Place the Q/DQ pairs of activations, in graph order.

    If ``ranges`` of activations are passed, a Concat whose inputs have very different ranges ends a chain (see the
    module docstring). The outputs of ``last_layers`` are also quantized, although no quantized layer follows. With
    ``float_joins``, an Add or Concat of a chain and a tensor from outside the chain is kept in float.
    """
    return _Placer(graph, layers, specs, ranges, last_layers, float_joins).run()


class _Placer:
    def __init__(
        self,
        graph: Graph,
        layers: Mapping[str, Layer],
        specs: Mapping[str, QuantSpec],
        ranges: Mapping[str, Range] | None,
        last_layers: Collection[str],
        float_joins: bool,
    ) -> None:
        self.graph, self.layers, self.specs, self.ranges = graph, layers, specs, ranges
        self.float_joins = float_joins
        self.by_node = {id(layer.node): layer for layer in layers.values()}
        self.readers: dict[str, list[str]] = {}
        for name in specs:
            for tensor in layers[name].activations:
                self.readers.setdefault(tensor, []).append(name)
        self.last_nodes = {id(layers[name].node) for name in last_layers}
        self.leading = self._leading()
        self.chain: dict[str, QuantizerPlacement] = {}
        self.inputs: dict[str, list[str]] = {}
        self.input_spec = next(iter(specs.values()), QuantSpec("uint8"))

    def _leading(self) -> set[str]:
        """Find all tensors from which a path leads to a layer with a quantized input; a path ends at a Shape node."""
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
            bound = self._bound_after(node)
            result = node.output[0] if bound is None else bound.output[0]
            spec = self._chain_spec(node)
            if spec is not None and self._needs_codes(node, bound):
                clip_min, clip_max = (-np.inf, np.inf) if bound is None else _limits(self.graph, bound)
                constants = tuple(
                    name for name in node.input if node.op_type in BINARY and name in self.graph.constants
                )
                finest = self._finest_spec(result, LAST_SPEC if self._is_coarse(node, spec) else spec)
                self.chain[result] = QuantizerPlacement(
                    result, finest, result, (), clip_min, clip_max, constants=constants
                )
                self._quantize_inputs(node, spec)
                if bound is not None:
                    passed.add(id(bound))
            elif self._scaled_by(node) is not None and result in self.leading and not self._escapes(node, None):
                self._scale(node)
            elif node.op_type in PASSING_CODES and node.input[0] in self.chain and not interpolates(node):
                self._move(node)
        placements = list(self.chain.values())
        outside = {
            **self.readers,
            **{name: [*self.readers.get(name, ()), *nodes] for name, nodes in self.inputs.items()},
        }
        for tensor, names in outside.items():
            if tensor not in self.chain:
                spec = self._finest_spec(tensor, self.specs.get(names[0], self.input_spec))
                placements.append(QuantizerPlacement(tensor, spec, tensor, tuple(dict.fromkeys(names))))
        return placements

    def _needs_codes(self, node: NodeProto, bound: NodeProto | None) -> bool:
        """Return whether the output of a node in a chain (see the module docstring) is quantized."""
        result = node.output[0] if bound is None else bound.output[0]
        if id(node) in self.last_nodes:
            return result not in self.graph.captured
        return result in self.leading and not self._escapes(node, bound)

    def _is_coarse(self, node: NodeProto, spec: QuantSpec) -> bool:
        """Return whether a spec has too few bits for the output of a last layer."""
        return id(node) in self.last_nodes and spec.bits < LAST_SPEC.bits

    def _finest_spec(self, tensor: str, default: QuantSpec) -> QuantSpec:
        """Return the input spec with the most bits of all layers that read a tensor, or ``default`` without readers."""
        specs = [self.specs[name] for name in self.readers.get(tensor, ())]
        return max(specs, key=lambda spec: spec.bits, default=default)

    def _bound_after(self, node: NodeProto) -> NodeProto | None:
        """Return the only reader of a node's output if it is a Relu, or a Clip with lower bound 0; otherwise None."""
        result = node.output[0]
        readers = self.graph.consumers(result)
        if len(readers) != 1 or readers[0].op_type not in {"Relu", "Clip"} or result in self.graph.outputs:
            return None
        return readers[0] if _limits(self.graph, readers[0])[0] == 0 else None

    def _escapes(self, node: NodeProto, bound: NodeProto | None) -> bool:
        """Return whether the output of a node or of its Relu or Clip is a model output, or is read by a subgraph."""
        names = [node.output[0], *([] if bound is None else [bound.output[0]])]
        return any(name in self.graph.outputs or name in self.graph.captured for name in names)

    def _chain_spec(self, node: NodeProto) -> QuantSpec | None:
        """Return the spec of a node's output if the output is in a chain (see the module docstring); else None."""
        layer = self.by_node.get(id(node))
        if layer is not None and node.op_type in CHAIN_LAYERS:
            return self.specs.get(layer.name)
        chained = [name for name in node.input if name in self.chain]
        if node.op_type not in CHAINED or not chained or self._scaled_by(node) is not None:
            return None
        others = [name for name in node.input if name not in self.chain]
        if not all(self._can_read_codes(node, name) for name in others):
            return None
        if node.op_type == "Concat" and self._has_unequal_ranges(node):
            return None
        return self.chain[chained[0]].spec

    def _can_read_codes(self, node: NodeProto, name: str) -> bool:
        """Return whether a node of a chain can read an input from outside the chain through a Q/DQ pair."""
        if not self.float_joins and (
            (node.op_type == "Add" and name in self.readers) or (node.op_type == "Concat" and self._is_resized(name))
        ):
            return True
        return node.op_type in BINARY and (self._is_scalar(name) or self._is_gate(name))

    def _is_scalar(self, name: str) -> bool:
        """Return whether a tensor is a float constant of one element."""
        tensor = self.graph.constants.get(name)
        return tensor is not None and tensor.data_type == TensorProto.FLOAT and prod(tensor.dims) == 1

    def _is_resized(self, name: str) -> bool:
        """Return whether a tensor is a tensor of a chain that was resized by interpolation."""
        producer = self.graph.producer(name)
        return producer is not None and interpolates(producer) and producer.input[0] in self.chain

    def _is_gate(self, name: str) -> bool:
        producer = self.graph.producer(name)
        return producer is not None and producer.op_type in GATES

    def _quantize_inputs(self, node: NodeProto, spec: QuantSpec) -> None:
        """Quantize the inputs of a node from outside the chain, except for constants."""
        if node.op_type not in {*BINARY, "Concat"}:
            return
        for name in node.input:
            if name not in self.chain and not self._is_scalar(name):
                self.inputs.setdefault(name, []).append(self.graph.node_name(node))
                self.input_spec = spec

    def _scaled_by(self, node: NodeProto) -> float | None:
        """Return the positive constant by which a node multiplies a tensor of a chain, or None for other nodes.

        The module docstring explains chains. The result is also None if a float operator reads the product.
        """
        if node.op_type not in {"Mul", "Div"} or len(node.input) != 2:
            return None
        scalars = [i for i, name in enumerate(node.input) if self._is_scalar(name)]
        if (
            len(scalars) != 1
            or (node.op_type == "Div" and scalars[0] == 0)
            or node.input[1 - scalars[0]] not in self.chain
        ):
            return None
        shape = self.graph.constants[node.input[scalars[0]]].dims
        value = float(self.graph.array(node.input[scalars[0]]).item())
        if not np.isfinite(value) or value <= 0 or len(shape) > 1:
            return None
        # Float operators that read the product cannot use its codes, and fusions such as GELU's would break.
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

    def _has_unequal_ranges(self, node: NodeProto) -> bool:
        if self.ranges is None or any(name not in self.ranges for name in node.input):
            return False
        widths = [hi - lo for lo, hi in (self.ranges[name] for name in node.input)]
        return max(widths) > MAX_RANGE_RATIO * min(widths)

    def _move(self, node: NodeProto) -> None:
        source = self.chain[node.input[0]]
        for name in node.output if node.op_type == "Split" else node.output[:1]:
            if name in self.leading and name not in self.graph.outputs and name not in self.graph.captured:
                self.chain[name] = QuantizerPlacement(name, source.spec, source.group)


def _limits(graph: Graph, node: NodeProto) -> Range:
    """Return the bounds of a Relu or Clip; NaN for a bound that is not constant."""
    if node.op_type == "Relu":
        return 0.0, np.inf
    limits = []
    for position, default in ((1, -np.inf), (2, np.inf)):
        name = node.input[position] if len(node.input) > position else ""
        if name and name not in graph.constants:
            return np.nan, np.nan
        limits.append(float(graph.array(name)) if name else default)
    return limits[0], limits[1]
