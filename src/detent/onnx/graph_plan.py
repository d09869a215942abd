"""Planning: what a recipe means for a graph, before anything runs.

``qo.plan`` is a table with a line per layer: the rule that decides, the specs, the bytes, or why the layer is left
alone. ``qo.insert`` does what the plan says.
"""

import fnmatch
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from os import PathLike
from typing import Any

from numpy.typing import NDArray
from onnx import ModelProto

from detent.errors import SpecError, UnsupportedError, closest
from detent.granularity import PerAxis, PerGroup, PerTensor, PerToken
from detent.observers import MSE
from detent.onnx.placement import Place, place
from detent.onnx_model.graph import Graph
from detent.onnx_model.layers import Layer, layers_of
from detent.onnx_model.targets import Target, get_target
from detent.params import QuantParams
from detent.recipe import Decision, PlanTotals, Recipe, get_recipe
from detent.rule import Layer as Seen
from detent.rule import ObserverSpec
from detent.spec import QuantSpec
from detent.tables import table_lines

__all__ = ["GraphPlan", "LayerPlan", "plan", "weight_params"]

EIGHT = 8

Array = NDArray[Any]


def weight_params(weight: Array, spec: QuantSpec) -> QuantParams:
    """The parameters of a weight: its range, and below 8 bits the one of least error.

    >>> import numpy as np
    >>> weight_params(np.float32([[127.0]]), QuantSpec.parse("int8/axis0")).scale
    array([1.], dtype=float32)
    """
    if spec.bits >= EIGHT:
        return QuantParams.from_data(spec, weight)
    return MSE(granularity=spec.granularity).observe(weight).params(spec)


RecipeLike = Recipe | str | PathLike[str]
SLOW_BITS = 16
FEWEST = 5  # channels that come to a convolution, below which ONNX Runtime is 2 to 10 times slower in integers
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

    def left(self, reason: str) -> "LayerPlan":
        """The same layer, left alone.

        >>> LayerPlan("fc", "MatMul").left("it hurts").reason
        'it hurts'
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
    >>> [each.tensor for each in made.places()], made.without(["fc"], "it hurts").quantized
    (['x'], ())
    """

    recipe: Recipe
    target: Target
    layers: tuple[LayerPlan, ...]
    model: ModelProto = field(repr=False, compare=False)

    @cached_property
    def graph(self) -> Graph:
        """The prepared model's graph."""
        return Graph(self.model)

    @cached_property
    def found(self) -> Mapping[str, Layer]:
        """The layers of the graph by name."""
        return {layer.name: layer for layer in layers_of(self.graph)}

    def places(self, ranges: Mapping[str, tuple[float, float]] | None = None) -> list[Place]:
        """Where activations are quantized; all that may be, where their ranges are not known yet."""
        chosen = {layer.name: self.found[layer.name] for layer in self.quantized}
        specs = {layer.name: layer.input for layer in self.quantized if layer.input is not None}
        return place(self.graph, chosen, specs, ranges)

    def without(self, names: Iterable[str], reason: str) -> "GraphPlan":
        """The same with some layers left alone."""
        gone = set(names)
        return replace(self, layers=tuple(each.left(reason) if each.name in gone else each for each in self.layers))

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
        SpecError: a rule or a pattern of ``skip`` matches no layer.

    >>> from onnx import parser
    >>> print(plan(parser.parse_model('''<ir_version: 8, opset_import: ["" : 17]>
    ...     g (float[1,1] x) => (float[1,1] y) <float[1,1] w = {3.0}> { [fc] y = MatMul(x, w) }'''), "w8a16"))
    layer  type    rule  weight                     input  bytes  after
    fc     MatMul  0     int8/axis1/symmetric/onnx  -      4      6
    1 of 1 layers quantized by recipe 'w8a16' for onnxruntime; weights 4 -> 6 bytes
    """
    wanted, aim = get_recipe(recipe), get_target(target)
    graph = Graph(model)
    found = list(layers_of(graph))
    if not found and wanted.rules:
        raise UnsupportedError(
            "the model has no Conv, MatMul, Gemm or Gather with a constant weight: there is nothing to quantize"
        )
    usable = [layer.name for layer in found if not layer.reason]
    ends = (usable[0], usable[-1]) if usable else ("", "")
    seen = [Seen(each.name, each.types, each.name == ends[0], each.name == ends[1]) for each in found]
    wanted.check_matched(seen)
    skipped = _skipped([layer.name for layer in found], skip)
    lines = []
    for about, layer in zip(seen, found, strict=True):
        decision = wanted.resolve(about.name, about.types, first=about.first, last=about.last)
        lines.append(_plan_layer(graph, layer, decision, aim, skipped=layer.name in skipped))
    return GraphPlan(wanted, aim, tuple(lines), model)


def _skipped(names: list[str], patterns: Iterable[str]) -> set[str]:
    given = (patterns,) if isinstance(patterns, str) else tuple(patterns)
    found: set[str] = set()
    for pattern in given:
        matched = {name for name in names if name == pattern or fnmatch.fnmatchcase(name, pattern)}
        if not matched:
            raise SpecError(
                f"skip={pattern!r} matches no layer{closest(pattern, names)} qo.plan and --dry-run show their names"
            )
        found |= matched
    return found


def _plan_layer(graph: Graph, layer: Layer, decision: Decision, target: Target, *, skipped: bool) -> LayerPlan:
    rule = decision.rules[-1] if decision.rules else None
    before = FLOAT_BYTES
    for size in layer.shape:
        before *= size
    before = before if layer.shape else 0
    line = LayerPlan(layer.name, layer.node.op_type, rule, nbytes_before=before, nbytes_after=before)
    given = None if layer.node.op_type == "Gather" else decision.input
    reason = layer.reason or ("" if given is None else _unsuited(layer, target))
    if reason:
        return line.left(reason)
    if skipped or decision.skip or rule is None:
        return line.left("skipped" if skipped else "no rule matches" if rule is None else "excluded")
    if decision.weight is None:
        return line.left("its rule names no spec for its weight")
    weight = _placed(decision.weight, layer)
    if given is not None and not layer.depthwise:  # others add no products that could saturate
        weight = target.weight_spec(weight)
    reason = _misfit(weight, layer) or _unknown(graph, layer, weight)
    if reason:
        return line.left(reason)
    reason = "" if given is None else _unfit(given)
    if reason:
        return line.left(reason)
    slow = given is not None and given.bits == SLOW_BITS
    note = "ONNX Runtime runs 16-bit activations in float on CPUs" if slow and target.runtime == "onnxruntime" else ""
    after = _stored(weight, layer)
    return replace(line, weight=weight, input=given, observer=decision.observer, nbytes_after=after, note=note)


def _unsuited(layer: Layer, target: Target) -> str:
    if target.runtime != "onnxruntime":
        return ""
    if layer.node.op_type == "ConvTranspose":
        return "ONNX Runtime has no ConvTranspose in integers"
    if layer.node.op_type == "Conv" and not layer.depthwise and layer.shape[1] < FEWEST:
        return f"input channels: {layer.shape[1]}, of which integers take longer than floats"
    return ""


def _placed(spec: QuantSpec, layer: Layer) -> QuantSpec:
    """The spec with "axis 0" meaning output channels, and groups along what is summed over."""
    if spec.granularity == PerAxis(0):
        return spec.replace(granularity=PerAxis(layer.axis))
    if isinstance(spec.granularity, PerGroup) and layer.axis != 0 and len(layer.shape) == 2:
        return spec.replace(granularity=PerGroup(spec.granularity.size, axis=0))
    return spec


def _misfit(spec: QuantSpec, layer: Layer) -> str:
    kind = spec.granularity
    if not spec.format.is_integer:
        return f"ONNX Runtime computes with integers, and {spec.format.name} is none: use w8a8 or w8a16"
    if not isinstance(kind, PerTensor | PerAxis | PerGroup) or spec.scale_format != "float":
        return f"ONNX files cannot hold weights of {spec}"
    if layer.node.op_type == "Gather" and kind == PerAxis(1) and not spec.symmetric:
        return "a table looked up by rows has one scale per row, or symmetric ones per column"
    if isinstance(kind, PerGroup):
        if layer.node.op_type not in {"MatMul", "Gemm", "Gather"}:
            return f"groups are for matrices, {layer.node.op_type} has none"
        if layer.shape[kind.axis] % kind.size:
            return (
                f"groups of {kind.size} do not divide the {layer.shape[kind.axis]} of a weight of shape {layer.shape}"
            )
    return ""


def _unknown(graph: Graph, layer: Layer, spec: QuantSpec) -> str:
    if layer.node.op_type == "Gather" and isinstance(spec.granularity, PerGroup) and graph.shape(layer.data) is None:
        return "how many axes its indices have is not known, which groups need"
    return ""


def _unfit(spec: QuantSpec) -> str:
    if isinstance(spec.granularity, PerToken) or not isinstance(spec.granularity, PerTensor):
        return f"activations of a file have one scale per tensor, got {spec}"
    return "" if spec.scale_format == "float" else f"ONNX files cannot hold activations of {spec}"


def _stored(spec: QuantSpec, layer: Layer) -> int:
    """The bytes of codes, scales and zero points in the file."""
    count, sets = 1, spec.granularity.tiling(layer.shape).sets
    for size in layer.shape:
        count *= size
    least = 4 if layer.node.op_type in {"MatMul", "Gemm"} else 8  # other operators take no 4-bit types
    bits = next(width for width in (4, 8, 16) if width >= max(spec.bits, least))
    return -(-count * bits // 8) + sets * FLOAT_BYTES + -(-sets * bits // 8)
