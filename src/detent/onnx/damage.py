"""Damage: how much noise layers cause at the outputs of a model, and which of them should rather stay float.

One session serves all questions: its graph holds every weight twice, as it is and rounded, and a switch before each
quantizer. Noise of several layers about adds up, so that groups of layers are asked first, and only those that cause
much are asked one by one.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper

from detent.onnx.calibrating import Feed
from detent.onnx.inserting import weight_params
from detent.onnx.planning import GraphPlan
from detent.onnx.probing import noise
from detent.ops import quantize
from detent.params import QuantParams
from detent.qdq.graph import Graph
from detent.qdq.nodes import Quantization, dequantize_node, quantize_node
from detent.qdq.sessions import make_session
from detent.qdq.targets import Container
from detent.qdq.tensors import element_type

__all__ = ["Switches", "choose_float"]

SHARE, LARGEST, MOST = 0.25, 0.1, 5
LITTLE = 1e-4  # of an output's power: noise that nobody has to be left in float for
FIRST = 1  # samples on which layers are searched; whether it helps to leave them out is judged on all
HELPS = 0.9  # the part of the noise that may be left without a layer
Array = NDArray[Any]


class Switches:
    """A model whose layers can be quantized one by one.

    Args:
        plan: what is quantized.
        params: of activations, by tensor.
        samples: the batches on which noise is measured.

    >>> import detent.onnx as qo
    >>> from onnx import parser
    >>> made = qo.plan(parser.parse_model('''<ir_version: 8, opset_import: ["" : 17]>
    ...     g (float[1,2] x) => (float[1,1] y) <float[2,1] w = {127.0, 0.6}> { [fc] y = Gemm(x, w) }'''), "w4a8")
    >>> switches = Switches(made, {}, [{"x": np.float32([[2.0, 2.0]])}])
    >>> switches.noise([]), switches.noise(["fc"]) > 0, switches.all_noise() == switches.noise(["fc"])
    (0.0, True, True)
    >>> list(switches.worst(0.25))
    ['fc']
    """

    def __init__(self, plan: GraphPlan, params: Mapping[str, QuantParams], samples: Sequence[Feed]) -> None:
        self.layers = [line.name for line in plan.quantized]
        self._of_layer: dict[str, list[str]] = {name: [f"{name}//weight"] for name in self.layers}
        self._flags = [f"{name}//weight" for name in self.layers]
        self._session = make_session(self._build(plan, params))
        self._samples = samples
        self._names = [name for name in Graph(plan.model).outputs if plan.graph.kind(name) in {0, TensorProto.FLOAT}]
        self._references = [self._run(feed, ()) for feed in samples]
        self.runs = 0

    def _build(self, plan: GraphPlan, params: Mapping[str, QuantParams]) -> ModelProto:
        model = ModelProto()
        model.CopyFrom(plan.model)
        graph = Graph(model)
        by_name = {graph.node_name(node): node for node in graph.nodes}
        for line in plan.quantized:
            layer, node = plan.found[line.name], by_name[line.name]
            if line.weight is None:
                continue
            place = 0 if layer.node.op_type == "Gather" else 1
            weight = graph.array(layer.weight)
            coarse, chosen = graph.fresh(f"{layer.weight}//rounded"), graph.fresh(f"{line.name}//chosen")
            graph.insert([_rounding(graph, layer.weight, weight_params(weight, line.weight), coarse)])
            graph.insert([helper.make_node("Where", [f"{line.name}//weight", coarse, layer.weight], [chosen])])
            graph.give(node, place, chosen)
        for tensor, each in params.items():
            self._quantize(plan, graph, tensor, each)
        for flag in self._flags:
            model.graph.input.append(helper.make_tensor_value_info(flag, TensorProto.BOOL, []))
        return graph.finish()

    def _quantize(self, plan: GraphPlan, graph: Graph, tensor: str, params: QuantParams) -> None:
        """Put a quantizer with a switch behind a tensor; it belongs to the layers that read or make it."""
        flag = f"{tensor}//input"
        owners = [name for name in self.layers if plan.found[name].data == tensor]
        owners = owners or [name for name in self.layers if _makes(plan, name, tensor)]
        for name in owners:
            self._of_layer[name].append(flag)
        self._flags.append(flag)
        how = Quantization.of(params, plan.target.activation_container(params.spec.format, least=8), 0)
        scale = graph.add_constant(f"{tensor}//scale", how.scale)
        zero = graph.add_constant(f"{tensor}//zero", how.zero_point, how.kind)
        codes, back, chosen = (graph.fresh(f"{tensor}//{part}") for part in ("codes", "back", "chosen"))
        readers = list(graph.consumers(tensor))
        graph.redirect(tensor, chosen, readers)
        graph.insert(
            [
                quantize_node(tensor, scale, zero, codes, how),
                dequantize_node(codes, scale, zero, back, how),
                helper.make_node("Where", [flag, back, tensor], [chosen]),
            ]
        )

    def _run(self, feed: Feed, flags: Iterable[str]) -> list[Array]:
        on = set(flags)
        switches = {flag: np.array(flag in on) for flag in self._flags}
        found: list[Array] = self._session.run(self._names, {**feed, **switches})
        return found

    def noise(self, layers: Iterable[str], samples: int | None = None) -> float:
        """The noise at the outputs, relative to their power, when these layers are quantized and no others."""
        return self._noise([flag for name in layers for flag in self._of_layer[name]], samples)

    @property
    def count(self) -> int:
        """How many outputs are compared in all."""
        return len(self._names) * len(self._samples)

    def all_noise(self, but: Iterable[str] = ()) -> float:
        """The same when everything is quantized but some layers."""
        off = {flag for name in but for flag in self._of_layer[name]}
        return self._noise(flag for flag in self._flags if flag not in off)

    def _noise(self, flags: Iterable[str], samples: int | None = None) -> float:
        self.runs += 1
        total = 0.0
        on = list(flags)
        for feed, reference in list(zip(self._samples, self._references, strict=True))[:samples]:
            for old, new in zip(reference, self._run(feed, on), strict=True):
                if old.dtype == np.float32:
                    total += noise(old, new) / max(noise(old, np.zeros_like(old)), 1e-30)
        return total

    def worst(self, share: float) -> dict[str, float]:
        """The layers that alone cause at least so much of all noise, and how much; on the first sample alone."""
        total = self._noise(self._flags, FIRST)
        found: dict[str, float] = {}

        def ask(names: list[str]) -> None:
            caused = self.noise(names, FIRST) / max(total, 1e-30)
            if caused < share or not names:
                return
            if len(names) == 1:
                found[names[0]] = caused
                return
            half = len(names) // 2
            ask(names[:half])
            ask(names[half:])

        ask(self.layers)
        return found


def _rounding(graph: Graph, name: str, params: QuantParams, result: str) -> NodeProto:
    """A node that makes the rounded weight of its codes, which take a quarter of its memory."""
    weight = graph.array(name)
    how = Quantization.of(params, Container(element_type(params.spec.format, 8)), weight.ndim)
    codes = graph.add_constant(f"{name}//codes", quantize(weight, params).codes, how.kind)
    scale = graph.add_constant(f"{name}//scale", how.scale)
    zero = graph.add_constant(f"{name}//zero", how.zero_point, how.kind)
    return dequantize_node(codes, scale, zero, result, how)


def _makes(plan: GraphPlan, name: str, tensor: str) -> bool:
    """Whether a tensor is a layer's result, or what a Relu or Clip makes of it."""
    result = plan.found[name].node.output[0]
    producer = plan.graph.producer(tensor)
    return tensor == result or (
        producer is not None and producer.op_type in {"Relu", "Clip"} and producer.input[0] == result
    )


def choose_float(plan: GraphPlan, params: Mapping[str, QuantParams], samples: Sequence[Feed]) -> dict[str, float]:
    """The layers that cause more than a quarter of all noise, hold few weights and are better left out; at most 5.

    Each comes with its share of the noise.

    >>> import detent.onnx as qo
    >>> from onnx import parser
    >>> made = qo.plan(parser.parse_model('''<ir_version: 8, opset_import: ["" : 17]>
    ...     g (float[1,2] x) => (float[1,1] y) <float[2,1] w = {127.0, 0.6}> { [fc] y = Gemm(x, w) }'''), "w4a8")
    >>> choose_float(made, {}, [{"x": np.float32([[2.0, 2.0]])}])
    {}
    """
    switches = Switches(plan, params, samples)
    total = switches.all_noise()
    if not np.isfinite(total) or total <= LITTLE * switches.count:
        return {}
    sizes = {line.name: line.nbytes_before for line in plan.layers}
    limit = LARGEST * plan.nbytes_before
    found = [name for name in switches.worst(SHARE) if sizes[name] < limit]
    caused = {name: switches.noise([name]) / total for name in found}
    small = {name: share for name, share in caused.items() if share >= SHARE}  # on all samples, too
    ranked = sorted(small, key=lambda name: -small[name] / sizes[name])
    kept, left = dict[str, float](), total
    for name in ranked[:MOST]:  # where noise is as large as the signal, less of it in one place may be more in all
        without = switches.all_noise([*kept, name])
        if without < HELPS * left:
            kept[name], left = small[name], without
    return kept
