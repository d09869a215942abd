"""Planning: how a recipe will quantize each layer of a model, before the model runs.

``qo.plan`` returns a table with one row per layer. A row shows the rule that applies, and either the specs and the
bytes, or why the layer is kept in float. ``qo.insert`` applies a plan.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from os import PathLike
from typing import Any, Literal

from numpy.typing import NDArray
from onnx import ModelProto

from detent.block_format import BlockFormat
from detent.errors import RangeError, SpecError, UnsupportedError
from detent.granularity import PerAxis, PerGroup, PerTensor, PerToken
from detent.observers import best_params, unclipped_params
from detent.onnx.decisions import QuantizerPlacement, RangeDecision
from detent.onnx.placement import place_quantizers
from detent.onnx_model.graph import MATMULS, Graph, attribute_of, describe, subgraphs
from detent.onnx_model.layers import ACTIVATION_MATMUL, RECURRENT, TWO_ACTIVATIONS, Layer, all_nodes, layers_of
from detent.onnx_model.targets import Target, get_target
from detent.params import QuantParams
from detent.recipe import EXCLUDED, NO_RULE, Decision, PlanTotals, Recipe, get_recipe, skipped_names
from detent.rounding import half_even
from detent.rule import Layer as RuleLayer
from detent.rule import ObserverSpec, check_axis
from detent.spec import QuantSpec, onnx_nbytes, onnx_widths
from detent.tables import html_table, short_name, table_lines

__all__ = [
    "NO_KERNEL",
    "PREFERENCES",
    "WEIGHT_ONLY",
    "GraphPlan",
    "LayerPlan",
    "Preference",
    "activation_problem",
    "dynamic_problem",
    "plan",
    "weight_params",
    "weight_problem",
]

Array = NDArray[Any]
RecipeLike = Recipe | str | PathLike[str]
Preference = Literal["speed", "balanced", "accuracy"]
PREFERENCES: tuple[Preference, ...] = ("speed", "balanced", "accuracy")

MINMAX_BITS = 8  # weights with at least 8 bits get their min-max range; with fewer bits, their MSE-optimal range
# Weights with at least so many bits, in groups of at most so many values, are not clipped: clipping lowers the error of
# groups little, and its errors all make outputs smaller, while errors of rounding cancel out. In a BERT of 16
# layers with 4 bits and groups of 128, the SQNR of the outputs is 2.7 dB higher without clipping.
MIN_UNCLIPPED_BITS, MAX_UNCLIPPED_GROUP = 4, 256
WEIGHT_ONLY = "only its weight is quantized"  # start of a note
PADDED = "ONNX files store its weight in"  # start of a note
SLOW_BITS = 16  # ONNX Runtime has no integer kernels for 16-bit activations on CPUs
# Time of an integer kernel of ONNX Runtime 1.31 relative to float, on one thread of a CPU with AVX-512 and VNNI:
#   one group, 1 to 4 input channels: 0.3 to 0.94 with at least 1600 weights (21 shapes: stems of 5x5 and 7x7, 3x3 with
#     64 outputs, patches, waves); 0.45 to 2.1 with fewer weights (26 shapes)
#   several groups, 3x3, maps of 8x8 to 32x32: 4 channels per group 1.5 to 2.8, 5: 1.3 to 2.3, 6: 1.1 to 1.9, 8: 0.9 to
#     1.4, 10: 0.7 to 1.1, 12: 0.6 to 0.9, 16: 0.9, 32: 0.5
# A layer that would be slower than in float is kept in float only if its weight is small, as with fewer than 5
# channels per group.
MIN_CONV_CHANNELS = 5  # per group; convolutions with fewer, and with several groups or few weights, stay float
MIN_CONV_WEIGHTS = 1600
MIN_TRANSPOSE_SHARE = 0.01  # share of all weight bytes; a ConvTranspose with a smaller weight is kept in float
SLOWER = "an integer kernel would be slower than float"  # end of a reason
NO_KERNEL = "ONNX Runtime has no integer kernel for ConvTranspose"  # a reason, and the start of a note
# ConvInteger of ONNX Runtime 1.31 takes 3.2 to 4.3 times as long as a float Conv, on one thread of a CPU with VNNI
# (4 shapes, from a stem of 7x7 to 256 channels), so dynamic quantization keeps convolutions in float.
DYNAMIC = "dynamic"  # after the spec of an input in plans and reports
DYNAMIC_SPEC = QuantSpec("uint8")  # what DynamicQuantizeLinear computes
BYTE = 8  # bits
TABLE_SPEC = QuantSpec("int8", granularity=PerAxis(0))  # of embeddings, if a rule for all layers has fewer bits
TABLE_NOTE = "8 bits, because ONNX files store embeddings in bytes"
# Time of attention (two matmuls, softmax, transposes) with both matmuls on integer kernels of ONNX Runtime 1.31,
# relative to float, on one thread of a CPU with VNNI, for 32, 64, 128, 256 and 512 tokens (heads of equal total size):
#   heads of 32: 1.09, 1.03, 0.99, 0.99, 1.06; of 64: 0.99, 0.88, 0.85, 0.82, 0.87; of 128: 0.95, 0.82, 0.80, 0.75, 0.74
# If the outputs are quantized, too, attention takes longer, because softmax runs in float.
MIN_MATMUL_SIZE = 64  # a matmul of two activations with a smaller known size is not quantized by prefer="speed"
MATRIX_RANK = 2
MIN_GROUP_SIZE = 16  # the smallest group size that replaces a larger one
FLOAT_BYTES = 4


@dataclass(frozen=True)
class LayerPlan:
    """Row of a plan: how one layer will be quantized.

    Attributes:
        name: name of its node.
        type: operator of its node.
        rule: index of the last rule that matched; None if no rule matched.
        reason: why the layer is kept in float; "" if it is quantized.
        weight: spec of its weight; None if the layer is kept in float, or is a matmul of two activations.
        input: spec of its input, or of both inputs of a matmul of two activations; None if the input is float or
            quantized dynamically.
        observer: observer of its input; None if no rule names an observer.
        nbytes_before: bytes of its weight in the float file.
        nbytes_after: bytes of its weight in the quantized file, including scales and zero points. Equal zero points are
        stored once in the file, but counted for each layer.
        note: remark on a quantized layer.
        wide_weight: the 8-bit spec of the recipe, if ``weight`` is limited to 7 bits for fast kernels.
        dynamic_input: spec of its input, if the file quantizes the input with the range of the current batch.
        own_range: scale and zero point of its input, if the layer is in a subgraph or shares its weight with one, and
        after calibration.

    >>> LayerPlan("fc", "MatMul", reason="excluded").is_quantized
    False
    """

    name: str
    type: str
    rule: int | None = None
    reason: str = ""
    weight: QuantSpec | None = None
    input: QuantSpec | None = None
    observer: ObserverSpec | None = None
    nbytes_before: int = 0
    nbytes_after: int = 0
    note: str = ""
    wide_weight: QuantSpec | None = None
    dynamic_input: QuantSpec | None = None
    own_range: RangeDecision | None = None

    @property
    def is_quantized(self) -> bool:
        """Whether the layer is quantized."""
        return not self.reason

    @property
    def has_quantized_input(self) -> bool:
        """Whether the layer's input is quantized, with fixed scales or dynamically."""
        return self.input is not None or self.dynamic_input is not None

    @property
    def input_text(self) -> str:
        """The spec of the input as text, with the word "dynamic" for dynamic quantization; "" if the input is float."""
        if self.dynamic_input is not None:
            return f"{self.dynamic_input} {DYNAMIC}"
        return "" if self.input is None else str(self.input)

    def kept_in_float(self, reason: str) -> "LayerPlan":
        """Return this layer's row, changed to keep the layer in float for ``reason``.

        >>> LayerPlan("fc", "MatMul").kept_in_float("too sensitive").reason
        'too sensitive'
        """
        return LayerPlan(
            self.name, self.type, self.rule, reason, nbytes_before=self.nbytes_before, nbytes_after=self.nbytes_before
        )


@dataclass(frozen=True, repr=False)
class GraphPlan(PlanTotals[LayerPlan]):
    """Plan for quantizing the layers of a model; ``str`` and notebooks show it as a table.

    Attributes:
        recipe: the recipe that the plan applies.
        target: the runtime that the plan is for.
        layers: one row per layer.
        model: the prepared model.
        last_layers: names of layers with a quantized output although no quantized layer comes after them.
        has_fitted_scales: whether scales of weights depend on the data (``group_scales``).
        float_joins: whether each Add and Concat of a chain and a tensor from outside it is kept in float
            (``placement``).
        resized_outputs: whether small last layers before or after a Resize get a quantized output (``fast_kernels``).

    >>> from onnx import parser
    >>> graph_plan = plan(parser.parse_model('''<ir_version: 8, opset_import: ["" : 17]>
    ...     g (float[1,1] x) => (float[1,1] y) <float[1,1] w = {3.0}> { [fc] y = MatMul(x, w) }'''), "w8a8")
    >>> graph_plan
    <GraphPlan 1 of 1 layers quantized by recipe 'w8a8' for onnxruntime; weights 4 -> 6 bytes>
    >>> [layer.name for layer in graph_plan.quantized]
    ['fc']
    >>> [each.tensor for each in graph_plan.placements()], graph_plan.without(["fc"], "too sensitive").quantized
    (['x'], ())
    """

    recipe: Recipe
    target: Target
    layers: tuple[LayerPlan, ...]
    model: ModelProto = field(repr=False, compare=False)
    last_layers: frozenset[str] = frozenset()
    has_fitted_scales: bool = False
    float_joins: bool = False
    resized_outputs: bool = False
    _weight_params: dict[tuple[str, QuantSpec], QuantParams] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def graph(self) -> Graph:
        """Graph of the prepared model."""
        return Graph(self.model)

    @cached_property
    def layers_by_name(self) -> Mapping[str, Layer]:
        """Layers of the graph by name."""
        return {layer.name: layer for layer in layers_of(self.graph)}

    def placements(self, ranges: Mapping[str, tuple[float, float]] | None = None) -> list[QuantizerPlacement]:
        """Return the placements of Q/DQ pairs; ``ranges`` can exclude some of them, see ``place_quantizers``."""
        chosen = {layer.name: self.layers_by_name[layer.name] for layer in self.quantized}
        specs = {
            layer.name: layer.input
            for layer in self.quantized
            if layer.input is not None and not chosen[layer.name].is_weight_only
        }
        last_layers = self.last_layers & set(chosen)
        return place_quantizers(self.graph, chosen, specs, ranges, last_layers, float_joins=self.float_joins)

    def weight_params(self, line: LayerPlan) -> QuantParams:
        """Return the parameters of a quantized layer's weight; layers with the same weight and spec share them."""
        if line.weight is None:
            why = f"it is kept in float: {line.reason}" if line.reason else f"it is {TWO_ACTIVATIONS}"
            raise SpecError(f"layer {line.name!r} has no weight parameters, because {why}")
        key = self.layers_by_name[line.name].weight, line.weight
        if key not in self._weight_params:
            try:
                self._weight_params[key] = weight_params(self.graph.array(key[0]), line.weight)
            except RangeError as error:
                raise RangeError(f"weight {key[0]!r} of layer {line.name!r}: {error}") from error
        return self._weight_params[key]

    def with_weight_params(self, params: Mapping[tuple[str, QuantSpec], QuantParams]) -> "GraphPlan":
        """Return this plan with other parameters of some weights, by name and spec of the weight."""
        return replace(self, has_fitted_scales=True, _weight_params={**self._weight_params, **params})

    def with_model(self, model: ModelProto) -> "GraphPlan":
        """Return this plan for a model with the same layers and different weights."""
        return replace(self, model=model, has_fitted_scales=False, _weight_params={})

    def without(self, names: Iterable[str], reason: str) -> "GraphPlan":
        """Return this plan with some layers kept in float for ``reason``."""
        removed = set(names)
        layers = [each.kept_in_float(reason) if each.name in removed else each for each in self.layers]
        return replace(self, layers=_without_shared(self.graph, self.layers_by_name, layers))

    def widened(self, names: Iterable[str]) -> "GraphPlan":
        """Return this plan with 8 instead of 7 bits for the weights of some layers."""
        wide = set(names)
        layers = (
            replace(each, weight=each.wide_weight, wide_weight=None) if each.name in wide else each
            for each in self.layers
        )
        return replace(self, layers=tuple(layers))

    @property
    def own_range_layers(self) -> list[str]:
        """Names of the quantized layers whose inputs are quantized, but have no placements."""
        layers = self.layers_by_name
        return [each.name for each in self.quantized if each.input is not None and layers[each.name].is_weight_only]

    def with_own_ranges(self, ranges: Mapping[str, tuple[float, float]]) -> "GraphPlan":
        """Return this plan with observed ranges for ``own_range_layers``; layers without a range get float inputs."""
        names = set(self.own_range_layers)
        lines = (_with_own_range(each, ranges.get(each.name)) if each.name in names else each for each in self.layers)
        return replace(self, layers=tuple(lines))

    def with_fixed_inputs(self) -> "GraphPlan":
        """Return this plan with fixed scales for inputs that are quantized dynamically.

        The noise of both is similar, so accuracy passes can measure the plan with fixed scales. Inputs of weight-only
        layers get no scale, because they may be inside a subgraph.
        """
        if all(each.dynamic_input is None for each in self.layers):
            return self
        weight_only = {name for name, layer in self.layers_by_name.items() if layer.is_weight_only}
        layers = (
            replace(each, input=None if each.name in weight_only else each.dynamic_input, dynamic_input=None)
            for each in self.layers
        )
        return replace(self, layers=tuple(layers))

    def with_float_joins(self) -> "GraphPlan":
        """Return this plan with the Add and Concat of a chain and a tensor from outside it in float (``placement``)."""
        return replace(self, float_joins=True)

    def with_resized_outputs(self, *, resized_outputs: bool) -> "GraphPlan":
        """Return this plan with quantized outputs of small last layers before or after a Resize (``fast_kernels``)."""
        return replace(self, resized_outputs=resized_outputs)

    def with_quantized_outputs(self, names: Iterable[str]) -> "GraphPlan":
        """Return this plan with quantized outputs for some last layers, which have no quantized layer after them."""
        return replace(self, last_layers=self.last_layers | set(names))

    def __str__(self) -> str:
        rows = [_row(each, short_name(each.name)) for each in self.layers]
        return "\n".join([*table_lines([_HEAD, *rows]), self._total()])

    def __repr__(self) -> str:
        return f"<GraphPlan {self._total()}>"

    def _repr_html_(self) -> str:
        rows = [_row(each, each.name) for each in self.layers]
        return html_table([_HEAD, *rows], right=_NUMBERS, notes=[self._total()])

    def _total(self) -> str:
        return self._summary(f" for {self.target.name}")


def _with_own_range(line: LayerPlan, bounds: tuple[float, float] | None) -> LayerPlan:
    if bounds is None or line.input is None:
        return replace(line, input=None, note=f"{WEIGHT_ONLY}, because it does not run on the calibration data")
    params = QuantParams.from_range(line.input, *bounds)
    return replace(line, own_range=RangeDecision(float(params.scale), int(params.zero_point), False, bounds))


_HEAD = ("layer", "type", "rule", "weight", "input", "bytes", "after", "")
_NUMBERS = (5, 6)  # columns


def _row(layer: LayerPlan, name: str) -> tuple[str, ...]:
    return (
        name,
        layer.type,
        "-" if layer.rule is None else str(layer.rule),
        "-" if layer.weight is None else str(layer.weight),
        layer.input_text or "-",
        f"{layer.nbytes_before:,}",
        f"{layer.nbytes_after:,}",
        layer.reason or layer.note,
    )


def plan(
    model: ModelProto,
    recipe: RecipeLike = "w8a8",
    *,
    target: Target | str = "onnxruntime",
    skip: Iterable[str] = (),
    prefer: Preference = "balanced",
) -> GraphPlan:
    """Plan how a recipe quantizes a prepared model; the model is not changed.

    Args:
        model: a model that ``qo.prepare`` returned.
        recipe: a ``dt.Recipe``, the name of a preset, or the path of a .toml or .json file.
        target: the runtime that the file is for, such as "onnxruntime-avx2".
        skip: names or glob patterns of layers to keep in float.
        prefer: "accuracy" uses 8-bit weights where fast kernels need 7 bits. "speed" keeps weights in float that would
        be dequantized in every run, and quantizes large matmuls of two activations. See ``qo.quantize``.

    Raises:
        SpecError: a rule or a pattern of ``skip`` matches no layer, or a weight lacks the axis that its rule names.
        UnsupportedError: the model has no layer to quantize, or the target does not support dynamic quantization.

    >>> from onnx import parser
    >>> print(plan(parser.parse_model('''<ir_version: 8, opset_import: ["" : 17]>
    ...     g (float[1,1] x) => (float[1,1] y) <float[1,1] w = {3.0}> { [fc] y = MatMul(x, w) }'''), "w8a16"))
    layer  type    rule  weight                     input  bytes  after
    fc     MatMul  0     int8/axis1/symmetric/onnx  -      4      6
    1 of 1 layers quantized by recipe 'w8a16' for onnxruntime; weights 4 -> 6 bytes
    """
    recipe, target = get_recipe(recipe), get_target(target)
    graph = Graph(model)
    layers = list(layers_of(graph))
    if not layers and recipe.rules:
        raise UnsupportedError(
            "nothing to quantize: the model has no Conv, MatMul, Gemm, Gather, LSTM, GRU or RNN with a constant weight"
        )
    usable = [layer.name for layer in layers if layer.weight and not layer.reason] or [layer.name for layer in layers]
    first, last = (usable[0], usable[-1]) if usable else ("", "")
    rule_layers = [RuleLayer(each.name, each.types, each.name == first, each.name == last) for each in layers]
    recipe.check_matched(rule_layers)
    skipped = skipped_names([layer.name for layer in layers], skip, "qo.plan and --dry-run show")
    small = MIN_TRANSPOSE_SHARE * sum(_float_nbytes(layer) for layer in layers)
    lines = []
    for each, layer in zip(rule_layers, layers, strict=True):
        decision = recipe.resolve(each.name, each.types, first=each.first, last=each.last)
        is_small = prefer == "speed" or _float_nbytes(layer) < small
        is_skipped = layer.name in skipped
        if layer.second:
            is_named = any(ACTIVATION_MATMUL in recipe.rules[i].types for i in decision.rules)
            is_chosen = is_named or (prefer == "speed" and _is_fast_matmul(graph, layer, target))
            lines.append(_plan_matmul(layer, decision, skipped=is_skipped, is_chosen=is_chosen))
            continue
        is_widened = layer.node.op_type == "Gather" and _is_too_narrow(recipe, decision)
        decision = replace(decision, weight=TABLE_SPEC) if is_widened else decision
        line = _plan_layer(graph, layer, decision, target, prefer, skipped=is_skipped, is_small=is_small)
        line = replace(line, note=TABLE_NOTE) if is_widened and line.is_quantized else line
        lines.append(line if prefer == "accuracy" else _with_fast_weight(line, layer, target))
    if target.runtime != "onnxruntime" and any(line.dynamic_input is not None for line in lines):
        raise UnsupportedError(
            f"target {target.name!r} does not support dynamic quantization, because OpenVINO runs it in float and "
            "slower than the float model: use the target 'onnxruntime', or recipe 'w8a8' or 'w8a16'"
        )
    by_name = {layer.name: layer for layer in layers}
    return GraphPlan(recipe, target, _without_shared(graph, by_name, lines), model)


def _without_shared(graph: Graph, layers: Mapping[str, Layer], lines: Iterable[LayerPlan]) -> tuple[LayerPlan, ...]:
    """Keep a layer in float if another node needs the same weight in float, because codes would enlarge the file."""
    lines = tuple(lines)
    quantized = {line.name: layers[line.name].weight for line in lines if line.weight is not None}
    reasons = {weight: _float_reader(graph, weight, quantized) for weight in dict.fromkeys(quantized.values())}
    texts = {
        name: f"{reasons[weight]} also reads this weight in float, so storing codes as well would make the file larger"
        for name, weight in quantized.items()
        if reasons[weight]
    }
    return tuple(line.kept_in_float(texts[line.name]) if line.name in texts else line for line in lines)


def _float_reader(graph: Graph, weight: str, quantized: Mapping[str, str]) -> str:
    """Return the name of the first node that needs a weight in float, or "" if all nodes can read codes."""
    if weight in graph.outputs:
        return "a model output"
    for each in all_nodes(graph.consumers(weight)):
        names = (each.name, f"{each.name}/W", f"{each.name}/R")  # of a layer, or of the parts of a recurrent layer
        reads_codes = any(quantized.get(name) == weight for name in names) and list(each.node.input).count(weight) == 1
        if weight in each.node.input and not reads_codes:
            return describe(each.outer or each.node)
        if any(weight == value.name for body in subgraphs(each.node) for value in body.output):
            return describe(each.outer or each.node)
    return ""


def _float_nbytes(layer: Layer) -> int:
    """Return the bytes of a layer's float weight; 0 if the weight is not constant."""
    return FLOAT_BYTES * prod(layer.shape) if layer.shape else 0


def _plan_layer(
    graph: Graph,
    layer: Layer,
    decision: Decision,
    target: Target,
    prefer: Preference,
    *,
    skipped: bool,
    is_small: bool,
) -> LayerPlan:
    """Plan one layer; ``is_small`` keeps a ConvTranspose in float, because codes would hardly reduce the file size."""
    rule = decision.rules[-1] if decision.rules else None
    before = _float_nbytes(layer)
    line = LayerPlan(layer.name, layer.node.op_type, rule, nbytes_before=before, nbytes_after=before)
    is_dynamic, input_spec = _input_of(layer, decision, target, prefer)
    has_quantized_inputs = decision.input is not None and not is_dynamic and layer.node.op_type != "Gather"
    reason = layer.reason or (_runtime_problem(layer, target, prefer) if has_quantized_inputs else "")
    note = ""
    if layer.is_weight_only and decision.input is not None and input_spec is None and not is_dynamic:
        note = f"{WEIGHT_ONLY}, because {_float_cause(layer)}"
    if reason == NO_KERNEL and not is_small:
        reason, note, input_spec = "", f"{NO_KERNEL}, so only its weight is quantized", None
    if reason:
        return line.kept_in_float(reason)
    if skipped or decision.skip or rule is None:
        return line.kept_in_float("skipped" if skipped else NO_RULE if rule is None else EXCLUDED)
    if not isinstance(decision.weight, QuantSpec):
        return line.kept_in_float(_no_spec(decision.weight))
    weight, group_note = _fit_groups(_fit_axis(decision.weight, layer), layer, target)
    if (input_spec is not None or is_dynamic) and not layer.depthwise:  # accumulators of depthwise kernels are exact
        weight = target.weight_spec(weight)
    check_axis(weight, f"the weight of {layer.name!r}", layer.shape)
    reason = weight_problem(weight, layer, target) or _rank_problem(graph, layer, weight)
    if reason:
        return line.kept_in_float(reason)
    dynamic_input = decision.input if is_dynamic else None
    reason = "" if input_spec is None else activation_problem(input_spec)
    if dynamic_input is not None:
        reason = dynamic_problem(dynamic_input, weight, layer)
    if reason:
        return line.kept_in_float(reason)
    slow = input_spec is not None and input_spec.bits == SLOW_BITS
    if slow and target.runtime == "onnxruntime":
        note = "ONNX Runtime runs 16-bit activations in float on CPUs"
    stored = next(width for width in onnx_widths(line.type) if width >= weight.bits)
    if stored > weight.bits:
        padded = f"{PADDED} {stored} bits, not {weight.bits}: no smaller than {stored}-bit weights, but less accurate"
        note = f"{note}; {padded}" if note.startswith(NO_KERNEL) else padded
    note = "; ".join(filter(None, (note, group_note)))
    line = replace(line, weight=weight, input=input_spec, dynamic_input=dynamic_input, observer=decision.observer)
    read_input = dynamic_input or input_spec
    nbytes = onnx_nbytes(weight, layer.shape, line.type, 0 if read_input is None else read_input.bits)
    return replace(line, nbytes_after=nbytes, note=note)


def _no_spec(weight: BlockFormat | None) -> str:
    if weight is None:
        return "its rule has no weight spec"
    return f"ONNX files cannot store the block format {weight}: use e.g. w4a16-g32"


def _is_too_narrow(recipe: Recipe, decision: Decision) -> bool:
    """Whether a rule for all layers gives an embedding fewer than 8 bits, which ONNX files store in bytes anyway."""
    weight_rules = [recipe.rules[i] for i in decision.rules if recipe.rules[i].weight is not None]
    is_general = bool(weight_rules) and weight_rules[-1].match == "*" and not weight_rules[-1].types
    return (
        is_general
        and isinstance(decision.weight, QuantSpec)
        and decision.weight.format.is_integer
        and decision.weight.bits < BYTE
    )


def _plan_matmul(layer: Layer, decision: Decision, *, skipped: bool, is_chosen: bool) -> LayerPlan:
    """Plan a matmul of two activations: both inputs are quantized if ``is_chosen`` and its rules allow it."""
    line = LayerPlan(layer.name, layer.node.op_type, decision.rules[-1] if decision.rules else None)
    if not is_chosen:
        return line.kept_in_float(TWO_ACTIVATIONS)
    if skipped or decision.skip:
        return line.kept_in_float("skipped" if skipped else EXCLUDED)
    if decision.input is None:
        return line.kept_in_float(f"{TWO_ACTIVATIONS}, and its rule has no input spec")
    reason = activation_problem(decision.input)
    if decision.is_dynamic:
        reason = "dynamic quantization needs a constant weight"
    if reason:
        return line.kept_in_float(f"{TWO_ACTIVATIONS}: {reason}")
    return replace(line, input=decision.input, observer=decision.observer, note="both inputs are quantized")


def _is_fast_matmul(graph: Graph, layer: Layer, target: Target) -> bool:
    """Whether a matmul of two activations is faster on an integer kernel; only known sizes count."""
    rows, columns = graph.shape(layer.data), graph.shape(layer.second)
    if target.runtime != "onnxruntime" or not rows or not columns or min(len(rows), len(columns)) < MATRIX_RANK:
        return False
    sizes = [size for size in (*rows[-2:], *columns[-2:]) if isinstance(size, int)]
    return bool(sizes) and min(sizes) >= MIN_MATMUL_SIZE


def _with_fast_weight(line: LayerPlan, layer: Layer, target: Target) -> LayerPlan:
    """Limit the weight of a dense layer to codes that fast kernels multiply exactly."""
    if line.weight is None or not line.has_quantized_input or layer.depthwise:
        return line
    fast = target.fast_weight_spec(line.weight)
    wide = None if layer.is_weight_only else line.weight  # layers that share a weight have the same bits
    return line if fast == line.weight else replace(line, weight=fast, wide_weight=wide)


def _runtime_problem(layer: Layer, target: Target, prefer: Preference) -> str:
    if target.runtime != "onnxruntime" or layer.is_weight_only:
        is_gru = layer.node.op_type == "GRU" and target.runtime == "openvino"
        return (
            "OpenVINO cannot load a GRU with a quantized weight in a model with quantized activations" if is_gru else ""
        )
    if layer.node.op_type == "ConvTranspose":
        return NO_KERNEL
    is_thin = layer.node.op_type == "Conv" and not layer.depthwise and layer.shape[1] < MIN_CONV_CHANNELS
    if is_thin and not _is_fast_stem(layer, target, prefer):
        count = layer.shape[1]
        return f"only {count} input channel{'s' * (count != 1)}: {SLOWER}"
    return ""


def _is_fast_stem(layer: Layer, target: Target, prefer: Preference) -> bool:
    """Whether a convolution with few input channels runs faster on an integer kernel than in float."""
    has_slow_weight = prefer == "accuracy" and target.unsigned_weights
    is_dense = attribute_of(layer.node, "group", 1) == 1
    return is_dense and prod(layer.shape) >= MIN_CONV_WEIGHTS and not has_slow_weight


def _input_of(layer: Layer, decision: Decision, target: Target, prefer: Preference) -> tuple[bool, QuantSpec | None]:
    """Return whether the input of a layer is quantized dynamically, and the spec of an input with a fixed scale."""
    if layer.node.op_type == "Gather":
        return False, None
    if layer.is_weight_only and not _is_integer_inside(layer, prefer):
        return False, None
    if decision.is_dynamic:
        return True, None
    is_static = not layer.is_weight_only or _has_kernel_inside(layer, target, decision)
    return False, decision.input if is_static else None


def _has_kernel_inside(layer: Layer, target: Target, decision: Decision) -> bool:
    """Whether ONNX Runtime has an integer kernel for a layer in a subgraph with these specs."""
    has_bytes = all(spec is not None and BYTE // 2 < spec.bits <= BYTE for spec in (decision.weight, decision.input))
    is_grouped = isinstance(decision.weight, QuantSpec) and isinstance(decision.weight.granularity, PerGroup)
    return has_bytes and not is_grouped and not layer.is_scanned and target.runtime == "onnxruntime"


def _is_integer_inside(layer: Layer, prefer: Preference) -> bool:
    """Whether the input of a layer in a subgraph, or of a layer that shares its weight with one, is quantized.

    If a layer reads the state of a loop, its error grows from step to step. In a loop of 80 steps with two matmuls in
    each (LSTMs of 400 units), integer kernels for both take 0.47 of the float time at 39.8 dB, integer kernels only for
    the matmul of the input 0.66 at 40.5 dB, and quantized weights alone 0.85 at 42.3 dB.
    """
    return layer.has_integer_form and (prefer == "speed" or (prefer == "balanced" and not layer.reads_state))


def _float_cause(layer: Layer) -> str:
    """Explain why a layer computes in float."""
    if layer.is_recurrent:
        return f"ONNX Runtime runs {layer.node.op_type} layers in float"
    if layer.reads_state:
        return "it reads the state of a loop" if layer.outer is not None else "a loop reads this weight, too"
    return "it is inside a subgraph" if layer.outer is not None else "a subgraph reads this weight, too"


def _fit_axis(spec: QuantSpec, layer: Layer) -> QuantSpec:
    """Change "axis0" to the axis of the layer's output channels, and groups to the axis that a matmul sums over.

    A recurrent layer has one scale per direction and row, or per group of a row.
    """
    if layer.is_recurrent and isinstance(spec.granularity, PerGroup):
        return spec.replace(granularity=PerGroup(spec.granularity.size, axis=2))
    if layer.is_recurrent and spec.granularity == PerAxis(0):
        by_row = PerAxis(1) if layer.shape[0] == 1 else PerGroup(layer.shape[2], axis=2)
        return spec.replace(granularity=by_row)
    if spec.granularity == PerAxis(0):
        return spec.replace(granularity=PerAxis(layer.axis))
    if isinstance(spec.granularity, PerGroup) and layer.axis != 0 and len(layer.shape) == 2:
        return spec.replace(granularity=PerGroup(spec.granularity.size, axis=0))
    return spec


def _fit_groups(spec: QuantSpec, layer: Layer, target: Target) -> tuple[QuantSpec, str]:
    """Return a spec whose groups fit the weight, and a note if the group size does not divide the size of its axis.

    In ONNX Runtime, the last group of a matmul's weight may be shorter. Otherwise the spec gets the largest smaller
    group size that divides the size of the axis, unless that group size is below ``MIN_GROUP_SIZE``.
    """
    kind = spec.granularity
    if not isinstance(kind, PerGroup) or not -len(layer.shape) <= kind.axis < len(layer.shape):
        return spec, ""
    length = layer.shape[kind.axis]
    rest = length % kind.size
    if not rest:
        return spec, ""
    if _may_be_short(layer, target):
        return spec, f"the last group has {rest} of {kind.size} values, because {kind.size} does not divide {length}"
    size = next(size for size in range(min(kind.size, length), 0, -1) if length % size == 0)
    is_whole_row = layer.is_recurrent and size == length
    if size < min(kind.size, MIN_GROUP_SIZE) and not is_whole_row:
        return spec, ""
    note = f"group size {size} instead of {kind.size}, which does not divide {length}"
    return spec.replace(granularity=PerGroup(size, kind.axis)), note


def _may_be_short(layer: Layer, target: Target) -> bool:
    """Whether the last group of a weight may be shorter.

    OpenVINO, and the Reshape of tables and of weight-only layers, need equal groups.
    """
    return layer.node.op_type in MATMULS and target.runtime == "onnxruntime" and not layer.is_weight_only


def weight_problem(spec: QuantSpec, layer: Layer, target: Target) -> str:
    """Explain why an ONNX file for a target cannot store a layer's weight with a spec; "" if it can."""
    kind = spec.granularity
    if not spec.format.is_integer:
        return f"ONNX Runtime needs an integer format, got {spec.format.name}: use w8a8 or w8a16"
    if not isinstance(kind, PerTensor | PerAxis | PerGroup) or spec.scale_format != "float":
        return f"ONNX files cannot store weights as {spec}"
    if layer.node.op_type == "Gather" and kind == PerAxis(1) and not spec.symmetric:
        return "per-column embedding scales must be symmetric: use axis0 (per row) or a symmetric spec"
    if isinstance(kind, PerGroup):
        if layer.node.op_type not in {*MATMULS, *RECURRENT, "Gather"}:
            return f"per-group scales need a MatMul, Gemm, Gather or recurrent layer, not {layer.node.op_type}"
        if layer.shape[kind.axis] % kind.size and not _may_be_short(layer, target):
            return f"group size {kind.size} does not divide {layer.shape[kind.axis]} (weight shape {layer.shape})"
    return ""


def _rank_problem(graph: Graph, layer: Layer, spec: QuantSpec) -> str:
    if layer.node.op_type == "Gather" and isinstance(spec.granularity, PerGroup) and graph.shape(layer.data) is None:
        return "group-wise embeddings need indices of known rank, which the model does not declare"
    return ""


def activation_problem(spec: QuantSpec) -> str:
    """Explain why an ONNX file cannot quantize activations with a spec; "" if it can."""
    if isinstance(spec.granularity, PerToken) or not isinstance(spec.granularity, PerTensor):
        return f"QuantizeLinear of activations needs one scale per tensor, got {spec}"
    if spec.rounding != half_even:
        return f"QuantizeLinear rounds half to even, got {spec}: use rounding 'half_even'"
    if spec.convention.division != "divide" or spec.convention.zero_point != "after_round":
        return f"QuantizeLinear divides, rounds, then adds the zero point, got {spec}: use convention 'onnx'"
    return "" if spec.scale_format == "float" else f"ONNX files cannot store activations as {spec}"


def dynamic_problem(spec: QuantSpec, weight: QuantSpec, layer: Layer) -> str:
    """Explain why a file cannot quantize the input of a layer dynamically; "" if it can."""
    if layer.node.op_type not in MATMULS:
        return f"dynamic quantization would make a {layer.node.op_type} slower than float: only MatMul and Gemm have it"
    if spec != DYNAMIC_SPEC:
        return f"dynamic quantization needs an input of {DYNAMIC_SPEC}, got {spec}"
    if weight.bits > BYTE or weight.granularity not in (PerTensor(), PerAxis(1)):
        return f"dynamic quantization needs a weight of at most 8 bits per channel or per tensor, got {weight}"
    return ""


def weight_params(weight: Array, spec: QuantSpec) -> QuantParams:
    """Compute the parameters of a weight.

    Weights with at least 8 bits have their min-max range. With fewer bits, scales have the least squared error; in
    groups, the least one without clipping.
    """
    if spec.bits >= MINMAX_BITS:
        return QuantParams.from_data(spec, weight)
    kind = spec.granularity
    if isinstance(kind, PerGroup) and kind.size <= MAX_UNCLIPPED_GROUP and spec.bits >= MIN_UNCLIPPED_BITS:
        return unclipped_params(weight, spec)
    return best_params(weight, spec)
