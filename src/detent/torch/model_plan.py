"""ModelPlan: what a recipe will quantize in a model, before anything runs.

The printed plan has one line per layer: its rule, specs and bytes, or the reason why the layer is kept in float.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from os import PathLike
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.parametrize import ParametrizationList

from detent.block_format import BlockFormat
from detent.errors import SpecError
from detent.granularity import PerAxis, PerGroup, PerTensor, PerToken
from detent.plots import bar_axes
from detent.recipe import EXCLUDED, NO_RULE, Decision, PlanTotals, Recipe, get_recipe
from detent.rule import Arithmetic, Layer, ObserverSpec, check_arithmetic, check_axis
from detent.scale_mode import EMA, Fixed, Learned, PerBatch, ScaleMode
from detent.spec import QuantSpec, stored_nbytes
from detent.ste import Estimator
from detent.tables import counted, html_table, short_repr, table_lines
from detent.torch.batchnorm import find_folds
from detent.torch.computed_weights import current_weight
from detent.torch.integer_limits import has_product, integer_problem
from detent.torch.integer_placement import find_placements
from detent.torch.integer_probe import integer_kernels
from detent.torch.layers import LayerKind, float_class_of, kind_of, runs_as_matmul

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["LayerPlan", "ModelPlan", "plan"]

HEAD = ("layer", "type", "rule", "weight", "input", "output", "bytes", "packed", "")
BYTE_COLUMNS = (6, 7)
RecipeLike = Recipe | str | PathLike[str]
AnySpec = QuantSpec | BlockFormat
_ACTIVATIONS, _WEIGHTS = EMA(0.99), PerBatch()
FEW_BITS = 4  # with this many bits or fewer, scales are learned by default
_FEW = Learned(start="mse", zero_point="auto", rate=10.0)


@dataclass(frozen=True)
class LayerPlan:
    """The plan for one layer.

    Attributes:
        name: full name of the layer in the model.
        type: name of the layer's class.
        rule: index of the rule that applies, or None if no rule matches.
        reason: why the layer is kept in float, or "" if it is quantized.
        weights: dict from weight names to specs or block formats, for the quantized weights.
        input: spec of the layer's input, or None if it stays float.
        output: spec of the layer's output, or None if it stays float.
        mode: scale mode of the activations.
        weight_mode: scale mode of the weights.
        ste: straight-through estimator; None uses the gradient mask of the spec's convention.
        observer: observer for calibration; None leaves the choice to ``qt.calibrating``.
        norm: full name of the batch norm that is folded into the layer, or "" if no batch norm is folded.
        tied: weights that an earlier layer has, too; maps the weight name to the full name in the earlier layer.
        arithmetic: how the layer multiplies: "float", or "integer" (products of codes).
        arithmetic_note: why a layer with arithmetic "auto" multiplies floats, or "".
        fallback: why a weight has another block format than its rule says, or "".
        output_cause: why ``qt.prepare`` places an output quantizer for ONNX Runtime's integer kernel, or "".
        after_relu: whether the placed output quantizer includes the ReLU that follows the layer.
        next_layer: name of the layer whose input quantizer ONNX Runtime fuses into this layer, or "".
        next_after_relu: whether a ReLU comes before that quantizer.
        in_channels_first: whether the layer is an integer 2-d convolution that would be faster in channels-last format.
        nbytes_before: bytes of the float weights; a tied weight counts only in its first layer.
        nbytes_after: bytes of the quantized weights; a tied weight counts only in its first layer.
    """

    name: str
    type: str
    rule: int | None = None
    reason: str = ""
    weights: Mapping[str, AnySpec] = field(default_factory=dict)
    input: QuantSpec | None = None
    output: QuantSpec | None = None
    mode: ScaleMode = _ACTIVATIONS
    weight_mode: ScaleMode = _WEIGHTS
    ste: Estimator | None = None
    observer: ObserverSpec | None = None
    norm: str = ""
    tied: Mapping[str, str] = field(default_factory=dict)
    arithmetic: Literal["float", "integer"] = "float"
    arithmetic_note: str = ""
    fallback: str = ""
    output_cause: str = ""
    after_relu: bool = False
    next_layer: str = ""
    next_after_relu: bool = False
    in_channels_first: bool = False
    nbytes_before: int = 0
    nbytes_after: int = 0

    @property
    def is_quantized(self) -> bool:
        """Whether a weight or an activation of the layer is quantized."""
        return not self.reason

    def __repr__(self) -> str:
        return short_repr(self)


@dataclass(frozen=True)
class ModelPlan(PlanTotals[LayerPlan]):
    """The plan for a model, layer by layer; ``str`` returns a table, which notebooks show as HTML.

    >>> import detent.torch as qt
    >>> model_plan = qt.plan(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), "w8a8")
    >>> model_plan
    <ModelPlan: 2 of 2 layers quantized by recipe 'w8a8'; weights 96 -> 48 bytes, 2.00 times smaller>
    >>> [layer.name for layer in model_plan.layers], model_plan.nbytes_before, model_plan.nbytes_after
    (['0', '2'], 96, 48)
    """

    recipe: Recipe
    layers: tuple[LayerPlan, ...]

    def __str__(self) -> str:
        return "\n".join([*table_lines(self._rows()), self._headline()])

    def __repr__(self) -> str:
        return f"<ModelPlan: {self._headline()}>"

    def _repr_html_(self) -> str:
        return html_table(self._rows(), right=BYTE_COLUMNS, notes=[self._headline()])

    def _headline(self) -> str:
        ratio = f", {self.nbytes_before / self.nbytes_after:.2f} times smaller" if self.nbytes_after else ""
        integers = sum(layer.arithmetic == "integer" for layer in self.layers)
        products = f"; integer products in {integers} layers: {integer_kernels().note}" if integers else ""
        return self._summary() + ratio + products + self._advice()

    def _advice(self) -> str:
        """Return how the model could train faster, or ""."""
        if not any(layer.in_channels_first for layer in self.layers):
            return ""
        return (
            "; integer convolutions are faster if model and images are in channels-last format: "
            "model.to(memory_format=torch.channels_last)"
        )

    def _rows(self) -> list[tuple[str, ...]]:
        return [HEAD, *map(_row, self.layers)]

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """Plot the bit widths of each layer's weight and input as bars; layers kept in float have no bars.

        Args:
            ax: matplotlib Axes to draw on; None creates new Axes.

        Returns:
            The Axes.

        Raises:
            UnsupportedError: ``ax`` is None and matplotlib is not installed.
        """
        ax = bar_axes(ax, [layer.name or "(model)" for layer in self.layers])
        weight_bits = [max((spec.bits for spec in layer.weights.values()), default=0) for layer in self.layers]
        input_bits = [0 if layer.input is None else layer.input.bits for layer in self.layers]
        rows = range(len(self.layers))
        ax.barh([row - 0.2 for row in rows], weight_bits, height=0.4, label="weight")
        ax.barh([row + 0.2 for row in rows], input_bits, height=0.4, label="input")
        for row, layer in enumerate(self.layers):
            if not layer.is_quantized:
                ax.text(0, row, " float", va="center", color="gray")
        ax.set_xlabel("bits")
        ax.set_title(f"{len(self.quantized)} of {len(self.layers)} layers quantized")
        ax.legend(loc="upper left", bbox_to_anchor=(1, 1))  # to the right of the bars
        return ax


def _row(layer: LayerPlan) -> tuple[str, ...]:
    weights = list(dict.fromkeys(str(spec) for spec in layer.weights.values()))
    notes = [layer.reason] if layer.reason else []
    if layer.norm:
        notes.append(f"folds {layer.norm}")
    notes += [f"{name} is shared with {other}" for name, other in layer.tied.items()]
    if layer.arithmetic == "integer":
        notes.append("integer products")
    if layer.arithmetic_note:
        notes.append(f"float products: {layer.arithmetic_note}")
    if layer.fallback:
        notes.append(layer.fallback)
    if layer.output_cause:
        notes.append(f"output quantizer placed: {layer.output_cause}")
    if layer.is_quantized:
        notes.append(_mode_note(layer))
    return (
        layer.name or "(model)",
        layer.type,
        "-" if layer.rule is None else str(layer.rule),
        ", ".join(weights) or "-",
        "-" if layer.input is None else str(layer.input),
        "-" if layer.output is None else str(layer.output),
        f"{layer.nbytes_before:,}",
        f"{layer.nbytes_after:,}",
        "; ".join(notes),
    )


def _mode_note(layer: LayerPlan) -> str:
    """Return the mode of the activations, and the mode of the weights if the first does not imply it."""
    has_activations = layer.input or layer.output
    if not has_activations or not layer.weights or layer.weight_mode in (_WEIGHTS, layer.mode):
        return str(layer.mode if has_activations else layer.weight_mode)
    return f"{layer.mode}, weights {layer.weight_mode}"


def plan(model: nn.Module, recipe: RecipeLike, *, arithmetic: Arithmetic = "float") -> ModelPlan:
    """Plan what ``qt.prepare`` will quantize, layer by layer; the model is not changed.

    Args:
        model: any module.
        recipe: a ``dt.Recipe``, the name of a preset, or the path of a .toml or .json file.
        arithmetic: how layers multiply, for layers whose rules do not say it: "float"; "integer", products of codes
            with the bits that ONNX Runtime computes; or "auto", integer where possible.

    Returns:
        A plan to print, plot or query.

    Raises:
        SpecError: a rule matches no layer, a weight lacks the axis that its rule names, the recipe gives different
            specs to tied weights, or a layer cannot multiply codes although its arithmetic is "integer".

    >>> import detent.torch as qt
    >>> print(qt.plan(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), "w8a16"))  # doctest: +NORMALIZE_WHITESPACE
    layer  type    rule  weight                     input  output  bytes  packed
    0      Linear  0     int8/axis0/symmetric/onnx  -      -       64     32      PerBatch()
    1 of 1 layers quantized by recipe 'w8a16'; weights 64 -> 32 bytes, 2.00 times smaller
    """
    if not isinstance(model, nn.Module):
        raise SpecError(f"got {type(model).__name__} for model, expected a torch.nn.Module")
    recipe, arithmetic = get_recipe(recipe), check_arithmetic(arithmetic)
    candidates = list(_candidates(model))
    layers = _rule_layers(candidates)
    recipe.check_matched(layers)
    owners: dict[int, tuple[str, tuple[object, ...]]] = {}
    lines = []
    requested: dict[str, Arithmetic] = {}
    for layer, (name, module, kind) in zip(layers, candidates, strict=True):
        decision = recipe.resolve(name, layer.types, first=layer.first, last=layer.last)
        requested[name] = decision.arithmetic or arithmetic
        lines.append(_tie(_plan_layer(name, module, kind, decision), module, owners))
    lines = list(_with_norms(lines, model))
    if any(each != "float" for each in requested.values()):
        lines = with_integer_products(lines, model, requested)
    return ModelPlan(recipe, tuple(lines))


_OUTPUT = QuantSpec.parse("uint8/tensor/affine")


def with_integer_products(
    lines: list[LayerPlan], model: nn.Module, requested: Mapping[str, Arithmetic]
) -> list[LayerPlan]:
    """Set the arithmetic of each layer, and place the output quantizers that ONNX Runtime's integer kernels need."""
    modules = dict(model.named_modules())
    problems = {
        line.name: _integer_problem(modules[line.name], line)
        for line in lines
        if line.is_quantized and requested[line.name] != "float" and has_product(modules[line.name])
    }
    refused = {name: each for name, each in problems.items() if each and requested[name] == "integer"}
    if refused:
        reasons = [f"  {name or 'the model'}: {reason}" for name, reason in refused.items()]
        head = f"arithmetic='integer' is not possible in {counted(len(refused), 'layer')}:"
        raise SpecError("\n".join([head, *reasons, "use arithmetic='auto', or a rule with arithmetic='float'"]))
    planned = [
        replace(
            line,
            arithmetic="integer" if problems.get(line.name) == "" else "float",
            arithmetic_note=problems.get(line.name, ""),
            in_channels_first=problems.get(line.name) == "" and _is_channels_first(modules[line.name]),
        )
        for line in lines
    ]
    return _with_placements(planned, model)


def _is_channels_first(layer: nn.Module) -> bool:
    weight = layer._parameters.get("weight")
    if not isinstance(layer, nn.Conv2d) or weight is None:
        return False
    return not weight.is_contiguous(memory_format=torch.channels_last)


def _integer_problem(module: nn.Module, line: LayerPlan) -> str:
    weight = line.weights.get("weight")
    if isinstance(weight, BlockFormat):
        return f"the block format {weight} has no integer product"
    return integer_problem(module, weight, line.input)


def _with_placements(lines: list[LayerPlan], model: nn.Module) -> list[LayerPlan]:
    modules = dict(model.named_modules())
    integers = {line.name: line for line in lines if line.arithmetic == "integer"}
    norms = {name: line.norm for name, line in integers.items() if line.norm}
    unsigned = {
        line.name: line.input is not None and not line.input.symmetric and line.input.qmin == 0
        for line in lines
        if line.input is not None and runs_as_matmul(float_class_of(modules[line.name]))
    }
    placements = find_placements(model, {name: modules[name] for name in integers}, norms, unsigned)
    if placements is None:
        note = "the model cannot be traced, so no output quantizers are placed"
        return [replace(line, arithmetic_note=note) if line.name in integers else line for line in lines]
    planned = []
    for line in lines:
        place = placements.get(line.name)
        if place is None or line.output is not None:
            planned.append(line)
        elif place.reader:
            planned.append(replace(line, next_layer=place.reader, next_after_relu=place.after_relu))
        elif isinstance(modules[line.name], nn.Linear):
            planned.append(line)
        else:
            planned.append(replace(line, output=_OUTPUT, output_cause=place.cause, after_relu=place.after_relu))
    return planned


def _rule_layers(candidates: list[tuple[str, nn.Module, LayerKind | None]]) -> list[Layer]:
    """Describe each layer by its name, its types, and whether it is the first or last layer with weights."""
    weighted = [name for name, _, kind in candidates if kind is not None and (kind.weights or kind.names)]
    # without registered layers, unregistered layers count, although they stay float
    weighted = weighted or [name for name, _, kind in candidates if kind is None]
    first, last = (weighted[0], weighted[-1]) if weighted else ("", "")
    return [
        Layer(name, tuple(base.__name__ for base in float_class_of(module).__mro__), name == first, name == last)
        for name, module, _ in candidates
    ]


def _candidates(model: nn.Module) -> Iterator[tuple[str, nn.Module, LayerKind | None]]:
    """Yield modules of a registered type, and other modules with a parameter of two or more axes."""
    for name, module in model.named_modules():
        kind = kind_of(module)
        if isinstance(module, ParametrizationList):
            continue  # belongs to a layer, which is listed itself
        if any(isinstance(each, UninitializedParameter) for each in module._parameters.values()):
            raise SpecError(
                f"{name or 'the model'} is a lazy module whose weights do not exist yet: run a batch through the model "
                "first"
            )
        if kind is not None and not (isinstance(module, nn.MultiheadAttention) and not kind.weight_names(module)):
            yield name, module, kind
        elif kind is None and any(each is not None and each.ndim > 1 for each in module._parameters.values()):
            yield name, module, None


def _plan_layer(name: str, module: nn.Module, kind: LayerKind | None, decision: Decision) -> LayerPlan:
    rule = decision.rules[-1] if decision.rules else None
    names = [key for key, each in module._parameters.items() if each is not None and each.ndim > 1]
    names = names if kind is None else kind.weight_names(module)
    floats = {key: current_weight(module, key) for key in names}
    before = sum(each.numel() * each.element_size() for each in floats.values())
    plain = LayerPlan(name, float_class_of(module).__name__, rule, nbytes_before=before, nbytes_after=before)

    def kept_in_float(reason: str) -> LayerPlan:
        return replace(plain, reason=reason)

    problem = _layer_problem(module)
    if problem:
        return kept_in_float(problem)
    if kind is None:
        return kept_in_float(
            f"layer type not registered: to quantize the layer, call qt.register_layer({plain.type}, weights=...)"
        )
    if rule is None or decision.skip:
        return kept_in_float(NO_RULE if rule is None else EXCLUDED)
    shapes = {key: tuple(each.shape) for key, each in floats.items()}
    rule_spec = decision.weight
    weights = {} if rule_spec is None else {key: _weight_spec(rule_spec, shapes[key], kind.axis(key)) for key in names}
    for key, spec in weights.items():
        problem = _weight_problem(spec, shapes[key], f"{name}.{key}".lstrip("."))
        if problem:
            return kept_in_float(problem)
    has_input = kind.inputs > 0
    if not weights and not (decision.output or (decision.input and has_input)):
        return kept_in_float("the rule has no spec that applies to this layer")
    mode, weight_mode = _modes(decision, weights.values(), has_input=has_input)
    return replace(
        plain,
        weights=weights,
        input=decision.input if has_input else None,
        output=decision.output,
        mode=mode,
        weight_mode=weight_mode,
        ste=decision.ste,
        observer=decision.observer,
        fallback=_fallback_note(rule_spec, weights, shapes),
        nbytes_after=sum(stored_nbytes(weights[key], shape) for key, shape in shapes.items()) if weights else before,
    )


def _block_problem(form: BlockFormat, shape: tuple[int, ...]) -> str:
    return f"{shape[-1]}, the size of the weight's last axis, is not a multiple of {form.block_size}"


def _fallback_note(
    rule_spec: AnySpec | None, weights: Mapping[str, AnySpec], shapes: Mapping[str, tuple[int, ...]]
) -> str:
    """Say which weights have another block format than their rule says, because its blocks do not fit."""
    if not isinstance(rule_spec, BlockFormat):
        return ""
    others = {key: form for key, form in weights.items() if form != rule_spec}
    return "; ".join(
        f"{form} instead of {rule_spec}: {_block_problem(rule_spec, shapes[key])}" for key, form in others.items()
    )


def _modes(decision: Decision, weights: Iterable[AnySpec], *, has_input: bool) -> tuple[ScaleMode, ScaleMode]:
    """Return the scale modes of activations and of weights; without a mode in the recipe, bit widths decide."""
    if decision.mode is not None:
        return decision.mode, decision.mode if isinstance(decision.mode, Learned | Fixed) else _WEIGHTS
    activations = [spec for spec in (decision.input if has_input else None, decision.output) if spec is not None]
    learns = activations and all(isinstance(spec.granularity, PerTensor) for spec in activations)
    mode = _FEW if learns and _has_few_bits(activations) else _ACTIVATIONS
    return mode, _FEW if _has_few_bits(weights) else _WEIGHTS


def _has_few_bits(specs: Iterable[AnySpec]) -> bool:
    """Return whether all specs are integers of few bits, with scales that can be learned."""
    checked = [
        isinstance(s, QuantSpec) and s.format.is_integer and s.bits <= FEW_BITS and s.scale_format == "float"
        for s in specs
    ]
    return bool(checked) and all(checked)


def _layer_problem(module: nn.Module) -> str:
    """Return the reason why a layer cannot be quantized, or "" if it can."""
    if getattr(module, "sparse", False):
        return "sparse gradients are not supported: construct the layer with sparse=False"
    if getattr(module, "max_norm", None) is not None:
        return "max_norm changes weights in forward, which is not supported: construct the layer with max_norm=None"
    kind = kind_of(module)
    if kind is not None and (kind.weights or kind.names) and not kind.weight_names(module):
        names = " or ".join(kind.weights)
        return f"there is no weight {names}: the layer may be registered with a wrong name"
    return ""


def _weight_spec(spec: AnySpec, shape: tuple[int, ...], axis: int) -> AnySpec:
    """Return the spec for a weight.

    Axis 0 of a per-channel spec becomes the weight's output-channel axis. A block format that does not fit becomes the
    format that llama.cpp uses instead.
    """
    if isinstance(spec, BlockFormat):
        return spec.fallback_for(shape) or spec
    return spec.replace(granularity=PerAxis(axis)) if spec.granularity == PerAxis(0) and axis else spec


def _weight_problem(spec: AnySpec, shape: tuple[int, ...], name: str) -> str:
    """Return the reason why a weight of this shape cannot have the spec, or "" if it can."""
    if isinstance(spec, BlockFormat):
        return "" if spec.fits(shape) else _block_problem(spec, shape)
    check_axis(spec, name, shape)
    kind = spec.granularity
    if isinstance(kind, PerToken):
        return "per-token granularity applies only to activations: use 'axis0', 'tensor' or groups for weights"
    try:
        kind.tiling(shape)
    except ValueError as error:
        return str(error)
    if isinstance(kind, PerGroup) and shape[kind.axis] % kind.size:
        return (
            f"group size {kind.size} does not divide {shape[kind.axis]}, the size of axis {kind.axis} of the weight: "
            "use a group size that divides it"
        )
    return ""


def _tie(layer: LayerPlan, module: nn.Module, owners: dict[int, tuple[str, tuple[object, ...]]]) -> LayerPlan:
    """Record the weights that a layer shares with an earlier layer; both layers must have the same settings."""
    tied = {}
    for name, parameter in module._parameters.items():
        if parameter is None or parameter.ndim < 2:
            continue
        full = f"{layer.name}.{name}".lstrip(".")
        spec = layer.weights.get(name)
        settings = () if spec is None else (spec, layer.weight_mode, layer.ste, layer.observer)
        owner, owner_settings = owners.setdefault(id(parameter), (full, settings))
        if owner == full:
            continue
        if settings != owner_settings:
            here, there = (
                ", ".join(str(part) for part in each if part) or "nothing" for each in (settings, owner_settings)
            )
            raise SpecError(
                f"{full} and {owner} are the same parameter, but the recipe gives {here} to {full} and {there} to "
                f"{owner}: add a rule that gives both the same settings, or skip both layers"
            )
        tied[name] = owner
    if not tied:
        return layer
    return replace(layer, tied=tied, nbytes_before=0, nbytes_after=0)


def _with_norms(lines: list[LayerPlan], model: nn.Module) -> Iterator[LayerPlan]:
    """Add the folded batch norm to the LayerPlan of each layer, except for layers with tied weights."""
    folds, modules = find_folds(model), dict(model.named_modules())
    owners = {owner for line in lines for owner in line.tied.values()}
    for line in lines:
        norm = folds.get(line.name, "")
        tied = line.tied or any(f"{line.name}.{key}".lstrip(".") in owners for key in line.weights)
        has_blocks = any(isinstance(spec, BlockFormat) for spec in line.weights.values())
        is_matmul = runs_as_matmul(float_class_of(modules[line.name]))
        foldable = line.weights and not tied and not has_blocks and is_matmul
        yield replace(line, norm=norm) if norm and foldable else line
