r"""Smoothing: outliers in some channels of a matrix product's input, moved into its weight.

.. math:: X W = (X \operatorname{diag}(s)^{-1}) (\operatorname{diag}(s) W), \qquad
          s_j = \max|X_j|^\alpha / \max|W_j|^{1 - \alpha}

(SmoothQuant, Xiao et al. 2022). No single strength fits all layers, so each has the one under which its own output is
closest to float, or none. Strengths are judged on data that the factors were not made of: what looks like an outlier
in a handful of rows is often chance, and factors made of chance cost more than they bring. The division is folded into
the normalisation before the layer where nobody else reads that, and is a product with a constant elsewhere.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, helper

from detent.granularity import PerAxis
from detent.onnx.graph_plan import GraphPlan, weight_params
from detent.onnx.layer_error import noise
from detent.onnx_model.graph import Graph, attribute_of
from detent.onnx_model.layers import Layer
from detent.onnx_model.sessions import record
from detent.ops import fake_quantize
from detent.params import QuantParams
from detent.spec import QuantSpec

__all__ = ["Smoothing", "smooth"]

Array = NDArray[Any]

Feed = dict[str, Array]
STRENGTHS = (0.5, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)
ROWS = 256
FREE, COSTLY = 0.95, 0.7  # the part of the noise that may be left where smoothing is folded away, and where it is not


@dataclass(frozen=True)
class Smoothing:
    """What was done to the input of some layers.

    Attributes:
        tensor: the input.
        layers: that read it.
        strength: the exponent.
        gain_db: how much less noise the layers' outputs have.
        is_folded: whether it costs nothing.

    >>> str(Smoothing("x", ("fc",), 0.5, 6.0, True))
    'smoothed x (fc) with strength 0.5: 6.0 dB less noise'
    """

    tensor: str
    layers: tuple[str, ...]
    strength: float
    gain_db: float
    is_folded: bool

    def __str__(self) -> str:
        cost = "" if self.is_folded else ", at the cost of a product"
        what = f"smoothed {self.tensor} ({', '.join(self.layers)})"
        return f"{what} with strength {self.strength:g}: {self.gain_db:.1f} dB less noise{cost}"


def smooth(plan: GraphPlan, samples: Sequence[Feed], *, seed: int = 0) -> tuple[ModelProto, list[Smoothing]]:
    """The plan's model with smoothed inputs of matrix products, and what was done.

    Args:
        plan: whose layers are smoothed where input and weight are quantized; its model is not changed.
        samples: batches to judge on.
        seed: of the rows that are taken from them.

    >>> import detent.onnx as qo
    >>> from onnx import parser
    >>> made = qo.plan(parser.parse_model('''<ir_version: 8, opset_import: ["" : 17]>
    ...     g (float[N,2] x) => (float[N,1] y) <float[2,1] w = {100.0, 0.01}> { [fc] y = MatMul(x, w) }'''))
    >>> model, done = smooth(made, [{"x": np.float32([[0.013, 100.0], [0.012, -90.0]])}])
    >>> done[0].layers, done[0].is_folded, [node.op_type for node in model.graph.node]
    (('fc',), False, ['Mul', 'MatMul'])
    """
    groups: dict[str, list[str]] = defaultdict(list)
    specs: dict[str, tuple[QuantSpec, QuantSpec]] = {}
    for line in plan.quantized:
        if line.type in {"MatMul", "Gemm"} and line.input is not None and line.weight is not None:
            groups[plan.found[line.name].data].append(line.name)
            specs[line.name] = line.input, line.weight
    if not groups or not samples:
        return plan.model, []
    model = ModelProto()
    model.CopyFrom(plan.model)
    graph, done = Graph(model), []
    rows = _rows(plan.model, list(groups), samples, np.random.default_rng(seed))
    for tensor, names in groups.items():
        if tensor not in rows:  # there was nothing in it
            continue
        layers = [plan.found[name] for name in names]
        matrices = [_matrix(plan.graph, layer) for layer in layers]
        found = _choose(rows[tensor], matrices, [specs[name] for name in names])
        if found is None:
            continue
        strength, factors, ratio = found
        folded = _norm_before(graph, tensor, names)
        if ratio > (COSTLY if folded is None else FREE):
            continue
        _apply(graph, tensor, layers, factors, folded)
        done.append(
            Smoothing(tensor, tuple(names), strength, float(-10 * np.log10(max(ratio, 1e-12))), folded is not None)
        )
    return graph.finish(), done


def _rows(
    model: ModelProto, tensors: list[str], samples: Sequence[Feed], rng: np.random.Generator
) -> dict[str, tuple[Array, Array]]:
    """Two halves of some rows of each tensor, each with the ends of its channels as two rows more."""
    kept: dict[str, tuple[list[Array], list[Array]]] = defaultdict(lambda: ([], []))
    each = max(1, ROWS // len(samples))
    for number, found in enumerate(record(model, tensors, samples)):
        for name, values in found.items():
            flat = values.reshape(-1, values.shape[-1])
            parts = [flat] if len(samples) > 1 else [flat[0::2], flat[1::2]]
            for half, part in enumerate(parts, number):
                if len(part):
                    chosen = rng.choice(len(part), min(each, len(part)), replace=False)
                    kept[name][half % 2].extend([part[np.sort(chosen)], part.max(0)[None], part.min(0)[None]])
    return {name: (np.concatenate(a), np.concatenate(b)) for name, (a, b) in kept.items() if a and b}


def _matrix(graph: Graph, layer: Layer) -> Array:
    """A layer's weight, its inputs along axis 0."""
    weight = graph.array(layer.weight)
    return weight.T if attribute_of(layer.node, "transB", 0) else weight


def _choose(
    halves: tuple[Array, Array], weights: list[Array], specs: list[tuple[QuantSpec, QuantSpec]]
) -> tuple[float, Array, float] | None:
    """The strength, the factors and the part of the noise that is left; None where nothing helps."""
    whole = np.concatenate(halves)
    references = [[x @ weight for weight in weights] for x in halves]
    largest_w = np.max([np.abs(weight).max(1) for weight in weights], axis=0).astype(np.float64)

    def largest(x: Array) -> Array:
        found: Array = np.abs(x).max(0).astype(np.float64)
        return found

    def error(factors: Array, half: int) -> float:
        total = 0.0
        data = (halves[half] / factors).astype(np.float32)
        for weight, reference, (incoming, kept) in zip(weights, references[half], specs, strict=True):
            params = QuantParams.from_data(incoming, (whole / factors).astype(np.float32))
            matrix = np.ascontiguousarray((weight * factors[:, None]).astype(np.float32))
            aligned = kept.replace(granularity=PerAxis(1)) if isinstance(kept.granularity, PerAxis) else kept
            rounded = fake_quantize(matrix, weight_params(matrix, aligned))
            coarse = fake_quantize(data, params)
            total += noise(reference, coarse @ rounded) / max(noise(reference, np.zeros_like(reference)), 1e-30)
        return total

    ones = np.ones(whole.shape[1])
    plain = error(ones, 0) + error(ones, 1)
    best: tuple[float, Array, float] | None = None
    for strength in STRENGTHS:
        unseen = [error(_factors(largest(halves[1 - half]), largest_w, strength), half) for half in (0, 1)]
        ratio = sum(unseen) / max(plain, 1e-30)
        if best is None or ratio < best[2]:
            best = strength, _factors(largest(whole), largest_w, strength), ratio
    return best


def _factors(x: Array, w: Array, strength: float) -> Array:
    usable = (x > 0) & (w > 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        found = np.where(usable, x**strength / np.where(usable, w, 1.0) ** (1 - strength), 1.0)
    found /= np.exp(np.log(found[usable]).mean()) if usable.any() else 1.0
    clipped: Array = np.clip(found, 1e-4, 1e4).astype(np.float32)
    return clipped


def _norm_before(graph: Graph, tensor: str, names: list[str]) -> list[tuple[NodeProto, int]] | None:
    """Where constants before a tensor can take the division: a normalisation's, which nobody else reads."""
    readers = graph.consumers(tensor)
    if tensor in graph.outputs or tensor in graph.captured or {graph.node_name(each) for each in readers} != set(names):
        return None
    node = graph.producer(tensor)
    if node is None:
        return None
    if node.op_type == "LayerNormalization":
        places = [(node, i) for i in range(1, len(node.input)) if node.input[i]]
        return places if all(node.input[i] in graph.constants for _, i in places) else None
    places = []
    if node.op_type == "Add":
        constant = [i for i, name in enumerate(node.input) if name in graph.constants]
        if len(constant) != 1 or not _is_vector(graph, node.input[constant[0]]):
            return None
        places.append((node, constant[0]))
        before = node.input[1 - constant[0]]
        if len(graph.consumers(before)) != 1 or before in graph.outputs:
            return None
        node = graph.producer(before)
    if node is None or node.op_type != "Mul":
        return None
    constant = [i for i, name in enumerate(node.input) if name in graph.constants]
    if len(constant) != 1 or not _is_vector(graph, node.input[constant[0]]):
        return None
    return [*places, (node, constant[0])]


def _is_vector(graph: Graph, name: str) -> bool:
    values = graph.array(name)
    return values.dtype == np.float32 and values.ndim >= 1 and values.size == values.shape[-1] > 1


def _apply(
    graph: Graph, tensor: str, layers: list[Layer], factors: Array, folded: list[tuple[NodeProto, int]] | None
) -> None:
    by_name = {graph.node_name(node): node for node in graph.nodes}
    for layer in layers:
        node = by_name[layer.name]
        weight = graph.array(node.input[1])
        column = factors if attribute_of(node, "transB", 0) else factors[:, None]
        graph.give(node, 1, graph.add_constant(f"{layer.weight}_smoothed", (weight * column).astype(np.float32)))
    if folded is None:
        inverse = graph.add_constant(f"{tensor}_smoothing", (1 / factors).astype(np.float32))
        result = graph.fresh(f"{tensor}_smoothed")
        graph.redirect(tensor, result, [by_name[layer.name] for layer in layers])
        graph.insert([helper.make_node("Mul", [tensor, inverse], [result], name=f"{result}_node")])
        return
    for node, i in folded:
        values = graph.array(node.input[i])
        graph.give(node, i, graph.add_constant(f"{node.input[i]}_smoothed", (values / factors).astype(np.float32)))
    graph.drop_unread()
