"""ONNX models as layer runners: one ``SwitchableModel`` for all layers and options.

Where a recipe quantizes activations, the data that come to a layer pass a quantizer that a switch turns on: the layer's
alone, whoever else reads the same tensor. Its parameters are those that the quantizer in a file would have, from the
observer of the layer's rule.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from detent.errors import UnsupportedError
from detent.onnx.calibration import Calibration, activation_params, calibrate
from detent.onnx.graph_plan import GraphPlan, LayerPlan, plan, weight_params
from detent.onnx.layer_error import Switch, SwitchableModel
from detent.onnx.normal_form import prepare
from detent.onnx.quantized_graph import insert
from detent.onnx_model.batches import BatchSource, inputs_of, open_batches
from detent.onnx_model.files import ModelSource, load
from detent.onnx_model.layers import Layer
from detent.onnx_model.sessions import make_session, ort_errors
from detent.onnx_model.targets import Target, get_target
from detent.ops import fake_quantize
from detent.params import QuantParams
from detent.recipe import Recipe, exact_pattern
from detent.rule import Rule
from detent.sensitivity.bench import LayerGroup, OutputNoise, weight_nbytes
from detent.sensitivity.layer_noise import FLOAT, Storage
from detent.spec import QuantSpec

__all__ = ["EXACT", "OnnxLayerRunner", "run_recipe"]

Array = NDArray[Any]
Feed = dict[str, Array]
# Weight-only products are computed in float: what is measured is the noise of the weights.
EXACT = {"session.qdq_matmulnbits_accuracy_level": "0"}
EXCLUDED = ("excluded", "no rule matches")
PRODUCTS = ("MatMul", "Gemm")
FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE)


class OnnxLayerRunner:
    """A model as a ``LayerRunner``.

    Args:
        source: the float model.
        data: see ``qo.quantize``.
        recipe: says which layers are measured, and how where there are no widths.
        widths: specs of weights by label; None for the recipe's own.
        samples: how many.
        target: what it is to run on.
        skip: names or globs of layers to leave out.
        storage: how bytes are counted.

    >>> from onnx import parser
    >>> from detent.recipe import get_recipe
    >>> bench = OnnxLayerRunner(parser.parse_model('''<ir_version: 8, opset_import: ["" : 17]>
    ...     g (float[1,2] x) => (float[1,1] y) <float[2,1] w = {127.0, 0.6}> { [fc] y = Gemm(x, w) }'''),
    ...     [np.float32([[2.0, 2.0]])], get_recipe("w8a8"), None, 32, "onnxruntime", (), "onnx")
    >>> bench.groups[0].names, bench.options, list(bench.reference()), bench.names
    (('fc',), ('w8a8',), [[array([[255.2]], dtype=float32)]], ['y'])
    >>> [list(bench.outputs({group.names[0]: option})) for group, option in bench.tasks()]
    [[[array([[256.]], dtype=float32)]]]
    """

    def __init__(
        self,
        source: ModelSource,
        data: BatchSource,
        recipe: Recipe,
        widths: Mapping[str, QuantSpec] | None,
        samples: int,
        target: Target | str,
        skip: Iterable[str],
        storage: Storage,
    ) -> None:
        original = load(source)
        batches = open_batches(data, inputs_of(original))
        self._feeds, self.samples = batches.first_samples(samples)
        prepared = prepare(original, low_bits=True, feed=self._feeds[0])
        del original
        skipped = (skip,) if isinstance(skip, str) else tuple(skip)
        whole = plan(prepared, recipe, target=target, skip=skipped)
        if widths is None:
            plans = {recipe.name or "recipe": whole}
        else:
            left = tuple(exact_pattern(line.name) for line in whole.layers if line.reason in EXCLUDED)
            plans = {
                label: plan(prepared, Recipe([Rule(weight=spec)]), target=target, skip=(*skipped, *left))
                for label, spec in widths.items()
            }
        self.options = tuple(plans)
        self._lines = {label: {line.name: line for line in made.quantized} for label, made in plans.items()}
        self._found = whole.layers_by_name
        self.groups: Sequence[LayerGroup] = _groups(self._lines, whole.layers_by_name, storage)
        if not self.groups:
            raise UnsupportedError(f"no layer of the model can be measured:\n{next(iter(plans.values()))}")
        self.recipe = None if widths is not None else _named(whole)
        self.names: Sequence[str] = [
            each.name for each in prepared.graph.output if whole.graph.kind(each.name) in FLOATS
        ]
        inputs = {} if widths is not None else _input_params(whole, self._feeds)
        switches = [Switch(f"{name}//switch", self._found[name].data, each, name) for name, each in inputs.items()]
        self._flags = {switch.reader: switch.flag for switch in switches}
        weights = {group.names[0]: group.names for group in self.groups}
        self._model = SwitchableModel(prepared, weights, switches, get_target("onnxruntime"))
        self._params: dict[tuple[str, QuantSpec], QuantParams] = {}

    def reference(self) -> Iterator[Sequence[Array]]:
        """The float outputs of the float model, batch by batch."""
        return self.outputs({})

    def tasks(self) -> Iterator[tuple[LayerGroup, str]]:
        """Every group at every option it has."""
        return ((group, option) for group in self.groups for option in self.options if option in group.nbytes)

    def outputs(self, options: Mapping[str, str]) -> Iterator[Sequence[Array]]:
        """The same outputs with some groups quantized."""
        weights, flags = dict[str, Array](), list[str]()
        for group in self.groups:
            label = group.names[0]
            option = options.get(label, FLOAT)
            if option == FLOAT:
                continue
            flags += [self._flags[name] for name in group.names if name in self._flags]
            spec = self._lines[option][label].weight
            if spec is not None:
                weights[label] = self._rounded(label, spec)
        return (self._model.run(self.names, feed, weights, flags) for feed in self._feeds)

    def _rounded(self, label: str, spec: QuantSpec) -> Array:
        """A weight as its codes say. Its parameters are kept: a search that takes long comes back to them."""
        weight, key = self._model.weights[label], (label, spec)
        if key not in self._params:
            self._params[key] = weight_params(weight, spec)
        return np.asarray(fake_quantize(weight, self._params[key]), np.float32)


def _groups(
    lines: Mapping[str, Mapping[str, LayerPlan]], found: Mapping[str, Layer], storage: Storage
) -> tuple[LayerGroup, ...]:
    """The layers by their weights, in order; those that share one and its specs, and so its codes, are one group."""
    sharing: dict[tuple[str, tuple[QuantSpec | None, ...]], list[str]] = defaultdict(list)
    for name, layer in found.items():
        specs = tuple(made[name].weight if name in made else None for made in lines.values())
        if any(spec is not None for spec in specs):
            sharing[layer.weight, specs].append(name)
    groups = []
    for (_, specs), names in sharing.items():
        layer = found[names[0]]
        is_product = all(found[name].node.op_type in PRODUCTS for name in names)
        nbytes = {
            label: weight_nbytes(spec, layer.shape, storage, is_product=is_product)
            for label, spec in zip(lines, specs, strict=True)
            if spec is not None
        }
        elements = int(np.prod(layer.shape))
        groups.append(LayerGroup(tuple(names), layer.node.op_type, elements, 4 * elements, nbytes))
    return tuple(groups)


def _float_outputs(made: GraphPlan) -> list[str]:
    return [each.name for each in made.model.graph.output if made.graph.kind(each.name) in FLOATS]


def _named(whole: GraphPlan) -> Recipe:
    """What a recipe gives each layer, in a rule of its own."""
    rules = (
        Rule(exact_pattern(line.name), weight=line.weight, input=line.input, observer=line.observer)
        for line in whole.quantized
    )
    return Recipe(rules, whole.recipe.name)


def _calibrated(made: GraphPlan, feeds: Sequence[Feed]) -> Calibration | None:
    """What the data have shown; rules that name no observer get the whole range."""
    return calibrate(made, feeds, observer="minmax") if made.placements() else None


def _input_params(whole: GraphPlan, feeds: Sequence[Feed]) -> dict[str, QuantParams]:
    """The parameters of each layer's input, where it is quantized, as in a file."""
    seen = _calibrated(whole, feeds)
    if seen is None:
        return {}
    places = {place.tensor: place for place in whole.placements(seen.ranges)}
    specs = {line.name: line.input for line in whole.quantized if line.input is not None}
    return {
        name: activation_params(replace(places[whole.layers_by_name[name].data], spec=spec), seen, clipped=True)
        for name, spec in specs.items()
    }


def run_recipe(source: ModelSource, data: BatchSource, recipe: Recipe, samples: int, target: Target | str) -> float:
    """The noise at the outputs of the model that a recipe makes, quantizers inserted and run as a file would be.

    >>> from onnx import parser
    >>> run_recipe(parser.parse_model('''<ir_version: 8, opset_import: ["" : 17]>
    ...     g (float[1,2] x) => (float[1,1] y) <float[2,1] w = {127.0, 0.6}> { [fc] y = Gemm(x, w) }'''),
    ...     [np.float32([[2.0, 2.0]])], Recipe.preset("w8a16"), 32, "onnxruntime") < 1e-4
    True
    """
    original = load(source)
    feeds, _ = open_batches(data, inputs_of(original)).first_samples(samples)
    made = plan(prepare(original, low_bits=True, feed=feeds[0]), recipe, target=target)
    seen = _calibrated(made, feeds)
    names = _float_outputs(made)
    sessions = make_session(original), make_session(insert(made, seen), config=EXACT)

    def run(at: int) -> Iterator[Sequence[Array]]:
        with ort_errors():
            for feed in feeds:
                yield sessions[at].run(names, feed)

    return OutputNoise(names, run(0)).noise(run(1))
