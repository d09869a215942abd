r"""SmoothQuant: moves outliers from the input channels of a matmul into its weight (Xiao et al. 2022).

.. math:: X W = (X \operatorname{diag}(s)^{-1}) (\operatorname{diag}(s) W), \qquad
          s_j = \max|X_j|^\alpha / \max|W_j|^{1 - \alpha}

No strength alpha fits all layers. So each tensor X gets the strength with the smallest error at the outputs of the
layers that read it. If no strength helps enough, X is not smoothed. Strengths are evaluated on rows that did not
determine the factors: an outlier in a few rows is often random, and factors fitted to it increase the error.

The division is folded into the normalization before X if no other node reads X. Otherwise, a Mul node is inserted.

``choose`` compares strengths on sample data. ``apply`` writes the chosen factors into a model and needs no data.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, helper

from detent.channel_factors import rounded_factors
from detent.error_places import at
from detent.errors import SpecError
from detent.granularity import PerAxis
from detent.onnx.decisions import SMOOTHED_FACTORS, Smoothed
from detent.onnx.graph_plan import GraphPlan, weight_params
from detent.onnx.layer_error import gain_db, noise
from detent.onnx_model.graph import MATMULS, Graph, attribute_of
from detent.onnx_model.layers import Layer, layers_of
from detent.onnx_model.sessions import record_in_parts
from detent.ops import fake_quantize
from detent.params import QuantParams
from detent.spec import QuantSpec

__all__ = ["Strength", "TensorToSmooth", "apply", "choose", "compare_strengths"]

Array = NDArray[Any]
Feed = dict[str, Array]

STRENGTHS = (0.5, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)
SAMPLED_ROWS = 256  # rows of each tensor on which strengths are compared
MAX_REMAINING_NOISE_FOLDED = 0.95  # without a Mul node, smoothing must remove at least 5 % of the noise
MAX_REMAINING_NOISE = 0.7  # with a Mul node, smoothing must remove at least 30 %


class TensorToSmooth(NamedTuple):
    """An input of matmuls: its number, which is part of the seed, and the layers that read it.

    Each layer has its name, and the specs of its input and its weight as JSON.
    """

    number: int
    tensor: str
    layers: tuple[tuple[str, str, str], ...]


class Strength(NamedTuple):
    """The best strength of a tensor, its factors, and the fraction of noise that remains."""

    strength: float
    factors: Array
    remaining: float


Compare = Callable[[Sequence[TensorToSmooth]], Iterable[Strength | None]]


def choose(
    plan: GraphPlan,
    samples: Sequence[Feed],
    *,
    seed: int = 0,
    memory_budget: int | None = None,
    compare: Compare | None = None,
) -> tuple[Smoothed, ...]:
    """Choose factors for inputs of matmuls; keep only factors that clearly reduce the output error.

    ``compare`` does the work of ``compare_strengths``, for example on workers; None compares in this process.
    """
    groups: dict[str, list[tuple[str, str, str]]] = defaultdict(list)
    for line in plan.quantized:
        is_own = plan.layers_by_name[line.name].is_weight_only
        if line.type in MATMULS and line.input is not None and line.weight is not None and not is_own:
            specs = line.input.to_json(), line.weight.to_json()
            groups[plan.layers_by_name[line.name].data].append((line.name, *specs))
    if not groups or not samples:
        return ()
    tensors = [TensorToSmooth(i, tensor, tuple(layers)) for i, (tensor, layers) in enumerate(groups.items())]
    if compare is None:
        strengths: Iterable[Strength | None] = compare_strengths(plan.model, tensors, samples, seed, memory_budget)
    else:
        strengths = compare(tensors)
    chosen = []
    for each, best in zip(tensors, strengths, strict=True):
        names = tuple(name for name, *_ in each.layers)
        folded = _norm_before(plan.graph, each.tensor, names) is not None
        limit = MAX_REMAINING_NOISE_FOLDED if folded else MAX_REMAINING_NOISE
        if best is not None and best.remaining <= limit:
            gain = gain_db(best.remaining)
            chosen.append(Smoothed(each.tensor, names, best.factors, folded, best.strength, gain))
    return tuple(chosen)


def compare_strengths(
    model: ModelProto, tensors: Sequence[TensorToSmooth], samples: Sequence[Feed], seed: int, memory_budget: int | None
) -> list[Strength | None]:
    """Return the best strength of each tensor; None if the tensor is empty or has no noise."""
    graph = Graph(model)
    layers = {layer.name: layer for layer in layers_of(graph)}
    rows = _rows(model, {each.tensor: each.number for each in tensors}, samples, seed, memory_budget)
    strengths: list[Strength | None] = []
    for each in tensors:
        best = None
        with at("tensor", each.tensor):
            if each.tensor in rows:
                matrices = [_matrix(graph, layers[name]) for name, *_ in each.layers]
                specs = [(QuantSpec.from_json(x), QuantSpec.from_json(weight)) for _, x, weight in each.layers]
                best = _best_strength(rows[each.tensor], matrices, specs)
        strengths.append(best)
    return strengths


def apply(model: ModelProto, smoothed: Sequence[Smoothed]) -> ModelProto:
    """Apply the chosen factors to the weights and activations of a model, in place."""
    if not smoothed:
        return model
    graph = Graph(model)
    for each in smoothed:
        with at("tensor", each.tensor):
            _apply(graph, each)
    return graph.finish()


def _rows(
    model: ModelProto, tensors: Mapping[str, int], samples: Sequence[Feed], seed: int, memory_budget: int | None
) -> dict[str, tuple[Array, Array]]:
    """Sample rows of each tensor in two halves; each half also holds the per-channel maxima and minima as rows.

    ``tensors`` maps names to numbers, which are part of the seeds.
    """
    kept: dict[str, tuple[list[Array], list[Array]]] = defaultdict(lambda: ([], []))
    per_sample = max(1, SAMPLED_ROWS // len(samples))
    generators = {name: np.random.default_rng([seed, i]) for name, i in tensors.items()}
    for number, recorded in record_in_parts(model, tensors, samples, memory_budget):
        for name, values in recorded.items():
            with at("tensor", name):
                flat = values.reshape(-1, values.shape[-1])
                parts = [flat] if len(samples) > 1 else [flat[0::2], flat[1::2]]
                for half, part in enumerate(parts, number):
                    if len(part):
                        chosen = generators[name].choice(len(part), min(per_sample, len(part)), replace=False)
                        kept[name][half % 2].extend([part[np.sort(chosen)], part.max(0)[None], part.min(0)[None]])
    return {name: (np.concatenate(a), np.concatenate(b)) for name, (a, b) in kept.items() if a and b}


def _matrix(graph: Graph, layer: Layer) -> Array:
    """Return a layer's weight with the input channels along axis 0."""
    weight = graph.array(layer.weight)
    return weight.T if attribute_of(layer.node, "transB", 0) else weight


def _best_strength(
    halves: tuple[Array, Array], weights: list[Array], specs: list[tuple[QuantSpec, QuantSpec]]
) -> Strength | None:
    """Return the best strength, or None if there is no noise."""
    whole = np.concatenate(halves)
    references = [[x @ weight for weight in weights] for x in halves]
    powers = [[max(noise(each, np.zeros_like(each)), 1e-30) for each in half] for half in references]
    largest_w = np.max([np.abs(weight).max(1) for weight in weights], axis=0).astype(np.float64)
    aligned = [
        spec.replace(granularity=PerAxis(1)) if isinstance(spec.granularity, PerAxis) else spec for _, spec in specs
    ]

    def largest(x: Array) -> Array:
        result: Array = np.abs(x).max(0).astype(np.float64)
        return result

    def error(factors: Array, half: int) -> float:
        data, every = ((x / factors).astype(np.float32, copy=False) for x in (halves[half], whole))
        inputs = {spec: fake_quantize(data, QuantParams.from_data(spec, every)) for spec in {spec for spec, _ in specs}}
        total = 0.0
        for i, weight in enumerate(weights):
            matrix = np.ascontiguousarray((weight * factors[:, None]).astype(np.float32, copy=False))
            rounded = fake_quantize(matrix, weight_params(matrix, aligned[i]))
            total += noise(references[half][i], inputs[specs[i][0]] @ rounded) / powers[half][i]
        return total

    ones = np.ones(whole.shape[1])
    baseline = error(ones, 0) + error(ones, 1)
    if baseline == 0:  # for example, all values are zero
        return None
    best: Strength | None = None
    for strength in STRENGTHS:
        unseen = [error(_factors(largest(halves[1 - half]), largest_w, strength), half) for half in (0, 1)]
        ratio = sum(unseen) / baseline
        if best is None or ratio < best.remaining:
            best = Strength(strength, _factors(largest(whole), largest_w, strength), ratio)
    return best


def _factors(x: Array, w: Array, strength: float) -> Array:
    usable = (x > 0) & (w > 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        factors = np.where(usable, x**strength / np.where(usable, w, 1.0) ** (1 - strength), 1.0)
    factors /= np.exp(np.log(factors[usable]).mean()) if usable.any() else 1.0
    return rounded_factors(factors, *SMOOTHED_FACTORS)


def _norm_before(graph: Graph, tensor: str, names: Sequence[str]) -> list[tuple[NodeProto, int]] | None:
    """Find the constants of the normalization before a tensor; return None if they cannot absorb the division."""
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


def _apply(graph: Graph, decision: Smoothed) -> None:
    tensor, factors = decision.tensor, decision.factors
    nodes = _checked_nodes(graph, decision)
    norm = _norm_before(graph, tensor, decision.layers) if decision.folded else None
    if decision.folded and norm is None:
        raise SpecError(
            f"smoothed {tensor!r}: got folded=True, but no normalization before this tensor can absorb the factors: "
            "set folded=False"
        )
    for node in nodes:
        weight = graph.array(node.input[1])
        column = factors if attribute_of(node, "transB", 0) else factors[:, None]
        smoothed = (weight * column).astype(np.float32)
        graph.set_input(node, 1, graph.add_constant(f"{node.input[1]}_smoothed", smoothed))
    if norm is None:
        inverse = graph.add_constant(f"{tensor}_smoothing", (1 / factors).astype(np.float32))
        result = graph.fresh(f"{tensor}_smoothed")
        graph.redirect(tensor, result, nodes)
        graph.insert([helper.make_node("Mul", [tensor, inverse], [result], name=f"{result}_node")])
        return
    for node, i in norm:
        values = graph.array(node.input[i])
        graph.set_input(node, i, graph.add_constant(f"{node.input[i]}_smoothed", (values / factors).astype(np.float32)))
    graph.drop_unread()


def _checked_nodes(graph: Graph, decision: Smoothed) -> list[NodeProto]:
    """Return the nodes of the layers that a decision names; reject layers that cannot absorb the factors."""
    where = f"smoothed {decision.tensor!r}"
    by_name = {graph.node_name(node): node for node in graph.consumers(decision.tensor)}
    nodes = []
    for name in decision.layers:
        node = by_name.get(name)
        if node is None or node.op_type not in MATMULS or node.input[0] != decision.tensor:
            raise SpecError(
                f"{where}: layer {name!r} is not a MatMul or Gemm that reads this tensor: remove this layer from "
                "layers="
            )
        weight = graph.constants.get(node.input[1])
        if weight is None or len(weight.dims) != 2:
            raise SpecError(
                f"{where}: the weight of layer {name!r} is not a constant matrix: remove this layer from layers="
            )
        inputs = weight.dims[1 if attribute_of(node, "transB", 0) else 0]
        if inputs != len(decision.factors):
            raise SpecError(
                f"{where}: got {len(decision.factors)} factors, but layer {name!r} has {inputs} input channels"
            )
        nodes.append(node)
    return nodes
