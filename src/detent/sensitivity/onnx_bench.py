"""Layer runner for ONNX models. One ``SwitchableModel`` runs all layers with all candidates.

If a recipe quantizes activations, the input of each layer passes through a Q/DQ pair. A switch turns the pair on, for
this layer only. The params are the same as ``qo.quantize`` would write with the observer of the layer's rule. If
decisions are measured, the params come from the quantized file.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto

from detent.errors import UnsupportedError
from detent.kernels import get_num_threads
from detent.onnx.calibration import Calibration, activation_params, calibrate
from detent.onnx.decisions import Decisions, LayerDecision
from detent.onnx.graph_plan import GraphPlan, LayerPlan, plan, weight_params
from detent.onnx.layer_error import Switch, SwitchableModel
from detent.onnx.normal_form import prepare
from detent.onnx.quantized_graph import check_fits, float_form, insert
from detent.onnx_model.batches import BatchSource, digest_of, open_batches
from detent.onnx_model.files import ModelSource, load, load_model
from detent.onnx_model.graph import Graph
from detent.onnx_model.layers import Layer
from detent.onnx_model.model_inputs import inputs_of
from detent.onnx_model.sessions import ACCURACY_LEVEL, make_session, ort_errors
from detent.onnx_model.targets import Target, get_target
from detent.ops import fake_quantize
from detent.params import QuantParams
from detent.recipe import EXCLUDED, NO_RULE, Recipe, exact_pattern, skipped_names
from detent.rule import Rule
from detent.sensitivity.bench import LayerGroup, OutputNoise, weight_nbytes
from detent.sensitivity.layer_noise import FLOAT, Storage
from detent.spec import QuantSpec

__all__ = ["EXACT", "OnnxLayerRunner", "open_decisions", "open_recipe", "run_recipe"]

Array = NDArray[Any]
Feed = dict[str, Array]
# Compute weight-only matmuls in float, so that only the noise of the weights is measured.
EXACT = {ACCURACY_LEVEL: "0"}
MAX_WORKERS = 4  # maximum number of parallel runs; each run keeps the activations of a batch in memory
FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE)


class OnnxLayerRunner:
    """A ``LayerRunner`` for an ONNX model; ``open_recipe`` and ``open_decisions`` create it."""

    def __init__(
        self,
        model: ModelProto,
        layers: Mapping[str, Layer],
        specs: Mapping[str, Mapping[str, QuantSpec]],
        recipe: Recipe | None,
        inputs: Mapping[str, QuantParams],
        batches: tuple[Sequence[Feed], int],  # the feeds, and the number of samples in them
        storage: Storage,
        weight_params: Mapping[str, QuantParams] | None = None,
        *,
        parallel: bool = True,
    ) -> None:
        self.feeds, self.samples = batches
        self._specs, self._weight_params = specs, weight_params or {}
        self.recipe, self.options = recipe, tuple(specs)
        self.groups: Sequence[LayerGroup] = _groups(specs, layers, storage, inputs, self._weight_params)
        self.names: Sequence[str] = _float_outputs(model)
        switches = [Switch(f"{name}//switch", layers[name].data, each, (name,)) for name, each in inputs.items()]
        self._flags = {name: switch.flag for switch in switches for name in switch.readers}
        weights = {group.names[0]: group.names for group in self.groups}
        # Parallel runs get one thread each; sequential runs get all threads.
        self.workers, threads = (min(get_num_threads(), MAX_WORKERS), 1) if parallel else (1, 0)
        any_target = get_target("onnxruntime")  # any target works, because the codes are the same for all targets
        self._model = SwitchableModel(model, weights, switches, any_target, threads)
        self._params: dict[tuple[str, QuantSpec], QuantParams] = {}

    @property
    def digest(self) -> str:
        """SHA-256 of the samples."""
        digest = hashlib.sha256()
        for feed in self.feeds:
            digest.update(digest_of(feed))
        return digest.hexdigest()

    def reference(self) -> Iterator[Sequence[Array]]:
        """Yield the float model's outputs of float type, batch by batch."""
        return self.outputs({})

    def tasks(self) -> Iterator[tuple[LayerGroup, str]]:
        """Yield all pairs of a group and a candidate that the group supports."""
        return ((group, option) for group in self.groups for option in self.options if option in group.nbytes)

    def outputs(self, options: Mapping[str, str], batches: range | None = None) -> Iterator[Sequence[Array]]:
        """Yield the outputs of float type with some groups quantized; ``batches`` are batch numbers, None for all."""
        feeds = self.feeds if batches is None else self.feeds[batches.start : batches.stop]
        weights, flags = dict[str, Array](), list[str]()
        for group in self.groups:
            label = group.names[0]
            option = options.get(label, FLOAT)
            if option == FLOAT:
                continue
            flags += [self._flags[name] for name in group.names if name in self._flags]
            weights[label] = self._fake_quantized(label, self._specs[option][label])
        return (self._model.run(self.names, feed, weights, flags) for feed in feeds)

    def _fake_quantized(self, label: str, spec: QuantSpec) -> Array:
        """Fake-quantize a weight; the params are cached, because a search quantizes the same weight many times."""
        weight, key = self._model.weights[label], (label, spec)
        if key not in self._params:
            self._params[key] = self._weight_params.get(label) or weight_params(weight, spec)
        return np.asarray(fake_quantize(weight, self._params[key]), np.float32)


def open_recipe(
    source: ModelSource,
    data: BatchSource,
    recipe: Recipe,
    widths: Mapping[str, QuantSpec] | None,
    samples: int,
    target: Target | str,
    skip: Sequence[str],
    storage: Storage,
    *,
    parallel: bool = True,
) -> OnnxLayerRunner:
    """Create a runner for the layers that a recipe selects, with the recipe or ``widths`` as candidates."""
    original = load(source)
    feeds, count = open_batches(data, inputs_of(original)).first_samples(samples)
    prepared = prepare(original, low_bits=True, feed=feeds[0])
    del original
    recipe_plan = plan(prepared, recipe, target=target, skip=skip)
    if widths is None:
        plans = {recipe.name or "recipe": recipe_plan}
    else:
        unselected = tuple(
            exact_pattern(line.name) for line in recipe_plan.layers if line.reason in {EXCLUDED, NO_RULE}
        )
        plans = {
            # The pattern is not "*", for which a plan would give embeddings at least 8 bits.
            label: plan(prepared, Recipe([Rule("?*", weight=spec)]), target=target, skip=(*skip, *unselected))
            for label, spec in widths.items()
        }
    specs = {
        label: {line.name: line.weight for line in each.quantized if line.weight is not None}
        for label, each in plans.items()
    }
    if not any(specs.values()):
        raise UnsupportedError(f"no layer of the model can be measured:\n{next(iter(plans.values()))}")
    inputs = {} if widths is not None else _input_params(recipe_plan, feeds)
    layer_rules = None if widths is not None else _rule_per_layer(recipe_plan.quantized, recipe.name)
    layers = recipe_plan.layers_by_name
    return OnnxLayerRunner(prepared, layers, specs, layer_rules, inputs, (feeds, count), storage, parallel=parallel)


def open_decisions(
    source: ModelSource, data: BatchSource, decisions: Decisions, samples: int, skip: Sequence[str], storage: Storage
) -> OnnxLayerRunner:
    """Create a runner for the layers of a quantized model, with the params in ``decisions``."""
    original = load_model(source)
    feeds, count = open_batches(data, original.inputs).first_samples(samples)
    model = float_form(original, decisions)
    layers, params = check_fits(Graph(model), decisions), decisions.tensor_params()
    quantized = [each for each in decisions.layers if each.weight is not None]
    skipped = skipped_names([each.name for each in quantized], skip, "decisions.layers has")
    quantized = [each for each in quantized if each.name not in skipped]
    if not quantized:
        raise UnsupportedError(
            "no layer can be measured, because the decisions quantize no layer, or skip= matches every quantized "
            "layer: pass fewer names as skip=, or other decisions"
        )
    name = Recipe.from_json(decisions.recipe).name if decisions.recipe else ""
    specs = {name or "recipe": {each.name: each.weight_params.spec for each in quantized}}
    placed = [each for each in quantized if each.input is not None and each.own_range is None]
    inputs = {each.name: params[layers[each.name].data] for each in placed}
    weights = {each.name: each.weight_params for each in quantized}
    layer_rules = _rule_per_layer(quantized, name)
    return OnnxLayerRunner(model, layers, specs, layer_rules, inputs, (feeds, count), storage, weights)


def _groups(
    specs: Mapping[str, Mapping[str, QuantSpec]],
    layers: Mapping[str, Layer],
    storage: Storage,
    inputs: Mapping[str, QuantParams],
    weight_params: Mapping[str, QuantParams],
) -> tuple[LayerGroup, ...]:
    """Group layers that share a weight and quantize it to the same codes, in the model's order."""
    sharing: dict[tuple[str, tuple[QuantSpec | None, ...], QuantParams | None], list[str]] = defaultdict(list)
    for name, layer in layers.items():
        layer_specs = tuple(by_name.get(name) for by_name in specs.values())
        if any(spec is not None for spec in layer_specs):
            sharing[layer.weight, layer_specs, weight_params.get(name)].append(name)
    groups = []
    for (_, layer_specs, _), names in sharing.items():
        layer = layers[names[0]]
        operators = [layers[name].node.op_type for name in names]
        operator = "Gather" if "Gather" in operators else operators[0]
        input_bits = max(inputs[name].spec.bits if name in inputs else 0 for name in names)
        nbytes = {
            label: weight_nbytes(spec, layer.shape, storage, operator, input_bits)
            for label, spec in zip(specs, layer_specs, strict=True)
            if spec is not None
        }
        elements = int(np.prod(layer.shape))
        groups.append(LayerGroup(tuple(names), layer.node.op_type, elements, 4 * elements, nbytes))
    return tuple(groups)


def _float_outputs(model: ModelProto) -> list[str]:
    graph = Graph(model)
    return [name for name in graph.outputs if graph.kind(name) in FLOATS]


def _rule_per_layer(quantized: Iterable[LayerPlan | LayerDecision], name: str) -> Recipe:
    """Return a recipe with one rule per layer."""
    rules = [
        Rule(
            exact_pattern(line.name),
            weight=line.weight,
            input=line.input,
            observer=line.observer if isinstance(line, LayerPlan) else None,
        )
        for line in quantized
        if line.weight is not None
    ]
    return Recipe(rules, name)


def _calibrated(graph_plan: GraphPlan, feeds: Sequence[Feed]) -> Calibration | None:
    """Calibrate the model if the plan quantizes activations, else return None; the default observer is "minmax"."""
    return calibrate(graph_plan, feeds, observer="minmax") if graph_plan.placements() else None


def _input_params(graph_plan: GraphPlan, feeds: Sequence[Feed]) -> dict[str, QuantParams]:
    """Return the params of each layer's quantized input, from the observer of its rule, or from the min-max range."""
    calibration = _calibrated(graph_plan, feeds)
    if calibration is None:
        return {}
    placements = {each.tensor: each for each in graph_plan.placements(calibration.ranges)}
    own = set(graph_plan.own_range_layers)
    lines = [line for line in graph_plan.quantized if line.weight is not None and line.name not in own]
    specs = {line.name: line.input for line in lines if line.input is not None}
    tensors = {name: graph_plan.layers_by_name[name].data for name in specs}
    return {
        name: activation_params(replace(placements[tensors[name]], spec=spec), calibration, clipped=True)
        for name, spec in specs.items()
    }


def run_recipe(source: ModelSource, data: BatchSource, recipe: Recipe, samples: int, target: Target | str) -> float:
    """Insert the Q/DQ pairs of a recipe into a model, run the model, and return the noise at the outputs."""
    original = load(source)
    feeds, _ = open_batches(data, inputs_of(original)).first_samples(samples)
    graph_plan = plan(prepare(original, low_bits=True, feed=feeds[0]), recipe, target=target)
    names = _float_outputs(graph_plan.model)
    quantized = insert(graph_plan, _calibrated(graph_plan, feeds))

    def run(model: ModelProto, config: Mapping[str, str] | None = None) -> Iterator[Sequence[Array]]:
        session = make_session(model, config=config)
        with ort_errors():
            for feed in feeds:
                yield session.run(names, feed)

    return OutputNoise(names, run(original)).noise(run(quantized, EXACT))
