"""Planning: what a recipe means for a graph, before anything runs.

``qo.plan`` is a table with a line per layer: the rule that decides, the specs, the bytes, or why the layer is left
alone. ``qo.insert`` does what the plan says.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from os import PathLike
from typing import Any

from numpy.typing import NDArray
from onnx import ModelProto

from detent.errors import RangeError, SpecError, UnsupportedError
from detent.granularity import PerAxis, PerGroup, PerTensor, PerToken
from detent.observers import MSE
from detent.onnx.decisions import QuantizerPlacement
from detent.onnx.placement import place_quantizers
from detent.onnx_model.graph import MATMULS, Graph
from detent.onnx_model.layers import Layer, layers_of
from detent.onnx_model.targets import Target, get_target
from detent.params import QuantParams
from detent.recipe import EXCLUDED, NO_RULE, Decision, PlanTotals, Recipe, get_recipe, skipped_names
from detent.rounding import half_even
from detent.rule import Layer as RuleLayer
from detent.rule import ObserverSpec, check_axis
from detent.spec import QuantSpec, onnx_widths, stored_nbytes
from detent.tables import table_lines

__all__ = ["GraphPlan", "LayerPlan", "activation_problem", "plan", "weight_params", "weight_problem"]

Array = NDArray[Any]
RecipeLike = Recipe | str | PathLike[str]

MINMAX_BITS = 8  # from here on a weight's range is its smallest and largest value, below it is searched
SLOW_BITS = 16
MIN_CONV_CHANNELS = 5  # of the input; with fewer, ONNX Runtime is 2 to 10 times slower with integers than with floats
FLOAT_BYTES = 4


@dataclass(frozen=True)
class LayerPlan:
    """What happens to one layer.

    Attributes:
        name: of its node.
        type: its operator.
        rule: the index of the rule that decides, None where none matched.
        reason: why it is left alone; "" where it is quantized.
        weight, input: the specs, None for what stays float.
        observer: of its input, as its rule says.
        nbytes_before, nbytes_after: of its weight.
        note: what else there is to know.

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

    @property
    def is_quantized(self) -> bool:
        """Whether anything happens to it."""
        return not self.reason

    def kept_in_float(self, reason: str) -> "LayerPlan":
        """The same layer with a float weight.

        >>> LayerPlan("fc", "MatMul").kept_in_float("too sensitive").reason
        'too sensitive'
        """
        return LayerPlan(
            self.name, self.type, self.rule, reason, nbytes_before=self.nbytes_before, nbytes_after=self.nbytes_before
        )


@dataclass(frozen=True)
class GraphPlan(PlanTotals[LayerPlan]):
    """What happens to a model; ``str`` is a table.

    Attributes:
        recipe, target: what it was made for.
        layers: a line for each.
        model: the prepared model that it is about.

    >>> from onnx import parser
    >>> made = plan(parser.parse_model('''<ir_version: 8, opset_import: ["" : 17]>
    ...     g (float[1,1] x) => (float[1,1] y) <float[1,1] w = {3.0}> { [fc] y = MatMul(x, w) }'''), "w8a8")
    >>> [layer.name for layer in made.quantized], made.nbytes_before, made.nbytes_after
    (['fc'], 4, 6)
    >>> [each.tensor for each in made.placements()], made.without(["fc"], "too sensitive").quantized
    (['x'], ())
    """

    recipe: Recipe
    target: Target
    layers: tuple[LayerPlan, ...]
    model: ModelProto = field(repr=False, compare=False)
    _weight_params: dict[tuple[str, QuantSpec], QuantParams] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def graph(self) -> Graph:
        """The prepared model's graph."""
        return Graph(self.model)

    @cached_property
    def layers_by_name(self) -> Mapping[str, Layer]:
        """The layers of the graph by name."""
        return {layer.name: layer for layer in layers_of(self.graph)}

    def placements(self, ranges: Mapping[str, tuple[float, float]] | None = None) -> list[QuantizerPlacement]:
        """Where activations are quantized; all that may be, where their ranges are not known yet."""
        chosen = {layer.name: self.layers_by_name[layer.name] for layer in self.quantized}
        specs = {layer.name: layer.input for layer in self.quantized if layer.input is not None}
        return place_quantizers(self.graph, chosen, specs, ranges)

    def weight_params(self, line: LayerPlan) -> QuantParams:
        """The parameters of a quantized layer's weight; found once for layers that share weight and spec."""
        if line.weight is None:
            raise SpecError(f"layer {line.name!r} is kept in float: {line.reason}")
        key = self.layers_by_name[line.name].weight, line.weight
        if key not in self._weight_params:
            try:
                self._weight_params[key] = weight_params(self.graph.array(key[0]), line.weight)
            except RangeError as error:
                raise RangeError(f"weight {key[0]!r} of layer {line.name!r}: {error}") from error
        return self._weight_params[key]

    def with_model(self, model: ModelProto) -> "GraphPlan":
        """The same for a model with other weights; layers keep their names, specs and bytes."""
        return GraphPlan(self.recipe, self.target, self.layers, model)

    def without(self, names: Iterable[str], reason: str) -> "GraphPlan":
        """The same with some layers kept in float."""
        gone = set(names)
        return replace(
            self, layers=tuple(each.kept_in_float(reason) if each.name in gone else each for each in self.layers)
        )

    def __str__(self) -> str:
        head = ("layer", "type", "rule", "weight", "input", "bytes", "after", "")
        return "\n".join([*table_lines([head, *map(_row, self.layers)]), self._summary(f" for {self.target.name}")])


def _row(layer: LayerPlan) -> tuple[str, ...]:
    return (
        layer.name,
        layer.type,
        "-" if layer.rule is None else str(layer.rule),
        "-" if layer.weight is None else str(layer.weight),
        "-" if layer.input is None else str(layer.input),
        f"{layer.nbytes_before:,}",
        f"{layer.nbytes_after:,}",
        layer.reason or layer.note,
    )


def plan(
    model: ModelProto, recipe: RecipeLike = "w8a8", *, target: Target | str = "onnxruntime", skip: Iterable[str] = ()
) -> GraphPlan:
    """What ``qo.insert`` would do to a prepared model; nothing is changed.

    Args:
        model: as ``qo.prepare`` makes it.
        recipe: a ``dt.Recipe``, the name of a preset, or the path of a .toml or .json file.
        target: what it is to run on.
        skip: names of nodes to leave alone, or globs of them.

    Raises:
        SpecError: a rule or a pattern of ``skip`` matches no layer, or a weight lacks the axis of its rule.

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
            "the model has no Conv, MatMul, Gemm or Gather with a constant weight: there is nothing to quantize"
        )
    usable = [layer.name for layer in layers if not layer.reason] or [layer.name for layer in layers]
    first, last = (usable[0], usable[-1]) if usable else ("", "")
    rule_layers = [RuleLayer(each.name, each.types, each.name == first, each.name == last) for each in layers]
    recipe.check_matched(rule_layers)
    skipped = skipped_names([layer.name for layer in layers], skip, "qo.plan and --dry-run show")
    lines = []
    for each, layer in zip(rule_layers, layers, strict=True):
        decision = recipe.resolve(each.name, each.types, first=each.first, last=each.last)
        lines.append(_plan_layer(graph, layer, decision, target, skipped=layer.name in skipped))
    return GraphPlan(recipe, target, tuple(lines), model)


def _plan_layer(graph: Graph, layer: Layer, decision: Decision, target: Target, *, skipped: bool) -> LayerPlan:
    rule = decision.rules[-1] if decision.rules else None
    before = FLOAT_BYTES
    for size in layer.shape:
        before *= size
    before = before if layer.shape else 0
    line = LayerPlan(layer.name, layer.node.op_type, rule, nbytes_before=before, nbytes_after=before)
    given = None if layer.node.op_type == "Gather" else decision.input
    reason = layer.reason or ("" if given is None else _runtime_problem(layer, target))
    if reason:
        return line.kept_in_float(reason)
    if skipped or decision.skip or rule is None:
        return line.kept_in_float("skipped" if skipped else NO_RULE if rule is None else EXCLUDED)
    if decision.weight is None:
        return line.kept_in_float("its rule names no spec for its weight")
    weight = _placed(decision.weight, layer)
    if given is not None and not layer.depthwise:  # others add no products that could saturate
        weight = target.weight_spec(weight)
    check_axis(weight, f"the weight of {layer.name!r}", layer.shape)
    reason = weight_problem(weight, layer) or _rank_problem(graph, layer, weight)
    if reason:
        return line.kept_in_float(reason)
    reason = "" if given is None else activation_problem(given)
    if reason:
        return line.kept_in_float(reason)
    slow = given is not None and given.bits == SLOW_BITS
    note = "ONNX Runtime runs 16-bit activations in float on CPUs" if slow and target.runtime == "onnxruntime" else ""
    after = _stored(weight, layer)
    return replace(line, weight=weight, input=given, observer=decision.observer, nbytes_after=after, note=note)


def _runtime_problem(layer: Layer, target: Target) -> str:
    if target.runtime != "onnxruntime":
        return ""
    if layer.node.op_type == "ConvTranspose":
        return "ONNX Runtime has no ConvTranspose in integers"
    if layer.node.op_type == "Conv" and not layer.depthwise and layer.shape[1] < MIN_CONV_CHANNELS:
        return f"input channels: {layer.shape[1]}, of which integers take longer than floats"
    return ""


def _placed(spec: QuantSpec, layer: Layer) -> QuantSpec:
    """The spec with "axis 0" meaning output channels, and groups along what is summed over."""
    if spec.granularity == PerAxis(0):
        return spec.replace(granularity=PerAxis(layer.axis))
    if isinstance(spec.granularity, PerGroup) and layer.axis != 0 and len(layer.shape) == 2:
        return spec.replace(granularity=PerGroup(spec.granularity.size, axis=0))
    return spec


def weight_problem(spec: QuantSpec, layer: Layer) -> str:
    """Why a layer's weight cannot have that spec in a file; "" where it can."""
    kind = spec.granularity
    if not spec.format.is_integer:
        return f"ONNX Runtime computes with integers, and {spec.format.name} is none: use w8a8 or w8a16"
    if not isinstance(kind, PerTensor | PerAxis | PerGroup) or spec.scale_format != "float":
        return f"ONNX files cannot hold weights of {spec}"
    if layer.node.op_type == "Gather" and kind == PerAxis(1) and not spec.symmetric:
        return "a table looked up by rows has one scale per row, or symmetric ones per column"
    if isinstance(kind, PerGroup):
        if layer.node.op_type not in {*MATMULS, "Gather"}:
            return f"groups are for matrices, {layer.node.op_type} has none"
        if layer.shape[kind.axis] % kind.size:
            return (
                f"groups of {kind.size} do not divide the {layer.shape[kind.axis]} of a weight of shape {layer.shape}"
            )
    return ""


def _rank_problem(graph: Graph, layer: Layer, spec: QuantSpec) -> str:
    if layer.node.op_type == "Gather" and isinstance(spec.granularity, PerGroup) and graph.shape(layer.data) is None:
        return "how many axes its indices have is not known, which groups need"
    return ""


def activation_problem(spec: QuantSpec) -> str:
    """Why activations cannot have that spec in a file; "" where they can."""
    if isinstance(spec.granularity, PerToken) or not isinstance(spec.granularity, PerTensor):
        return f"activations of a file have one scale per tensor, got {spec}"
    if spec.rounding != half_even:
        return f"QuantizeLinear rounds half to even, and {spec} does not: use rounding 'half_even'"
    if spec.convention.division != "divide" or spec.convention.zero_point != "after_round":
        return f"QuantizeLinear divides, rounds, and adds the zero point, which {spec} does not: use convention 'onnx'"
    return "" if spec.scale_format == "float" else f"ONNX files cannot hold activations of {spec}"


def _stored(spec: QuantSpec, layer: Layer) -> int:
    """The bytes of codes, scales and zero points in the file."""
    is_matmul = layer.node.op_type in MATMULS
    return stored_nbytes(spec, layer.shape, onnx_widths(is_matmul=is_matmul))


def weight_params(weight: Array, spec: QuantSpec) -> QuantParams:
    """The parameters of a weight: its min-max range, and below 8 bits the MSE-optimal range."""
    if spec.bits >= MINMAX_BITS:
        return QuantParams.from_data(spec, weight)
    return MSE(granularity=spec.granularity).observe(weight).params(spec)
