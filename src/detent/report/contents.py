"""Contents of a report, assembled from the quantized file, from what is known of it, and from a run over data.

``tensor_stats`` measures weights and activations, ``file_layers`` finds the layers; nothing is measured here.
"""

import platform
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import file_digest
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path

import numpy as np
from onnx import ModelProto

import detent
from detent.errors import DetentError, UnsupportedError
from detent.kernels import native
from detent.onnx.pipeline import LayerReport, QuantizeReport
from detent.onnx_model import Graph, Provenance, load
from detent.onnx_model.batches import BatchSource, open_batches
from detent.onnx_model.files import LoadedModel, ModelSource, load_model
from detent.onnx_model.graph import INTEGER_KERNELS, node_name
from detent.onnx_model.qdq_reader import QuantizedGraph, open_quantized
from detent.recipe import Recipe
from detent.report.document import (
    Basis,
    Layer,
    Report,
    Reproduction,
    Status,
    Table,
    Tensor,
    option_of,
    short,
)
from detent.report.file_layers import FileLayer, find_layers, kernels_by_layer, origin_of
from detent.report.tensor_stats import (
    ActivationStats,
    FloatWeights,
    QuantizerStats,
    measure_activations,
    measure_weight,
    size_parts,
    stored_nbytes,
)
from detent.sensitivity import Mix, Sensitivity
from detent.verification.verify_report import VerifyReport

__all__ = ["BATCHES", "ReportInputs", "measure_report"]

BATCHES = 8
PACKAGES = ("numpy", "onnx", "onnxruntime", "torch")


@dataclass(frozen=True)
class ReportInputs:
    """Optional inputs of a report: float model, quantize result, verification, sensitivity, texts."""

    source: ModelSource | None = None
    result: QuantizeReport | None = None
    verification: VerifyReport | None = None
    sensitivity: Sensitivity | None = None
    mix: Mix | None = None
    title: str = ""
    facts: tuple[tuple[str, str], ...] = ()
    tables: tuple[Table, ...] = ()
    command: str = ""


def measure_report(source: ModelSource, data: BatchSource | None, given: ReportInputs) -> Report:
    """Build the report of a file."""
    model = load_model(source)
    artifact, size = open_quantized(model), model.nbytes
    sizes, batches = size_parts(artifact, size), None
    if data is not None:
        batches = open_batches(data, model.inputs)
        batches.check_first()  # fail before anything takes long
    file_layers = find_layers(artifact)
    reference = _reference(given)
    weights = _Weights(artifact, file_layers, reference, given.result)
    feeds = () if batches is None else islice(iter(batches), BATCHES)
    beside = reference if batches is not None else None
    activations = measure_activations(artifact, feeds, beside, weights.comparable())
    kernels, unknown = _kernels(artifact, file_layers, given.result)
    layers = _layers(artifact, file_layers, weights, activations, kernels, given.result)
    layers, basis = _ranked(layers, {} if given.sensitivity is None else _alone(given.sensitivity, given.mix, layers))
    sqnr, against = _output_sqnr(given, activations)
    agreement = None if given.verification is None else given.verification.agreement
    return Report(
        title=given.title,
        nbytes_before=_nbytes_before(given),
        nbytes_after=size,
        layers=layers,
        others=_others(artifact, file_layers, activations),
        sizes=sizes,
        damage_basis=basis,
        output_sqnr_db=sqnr,
        output_sqnr_against=against,
        agreement=activations.agreement if agreement is None else agreement,
        batches=activations.batches,
        facts=given.facts,
        tables=given.tables,
        sensitivity=given.sensitivity,
        mix=given.mix,
        verification=given.verification,
        reproduction=_reproduction(model, artifact, given),
        steps=() if given.result is None else (*given.result.steps, *given.result.hints),
        notes=tuple(dict.fromkeys((*artifact.notes, *activations.notes, *unknown))),
    )


def _kernels(
    artifact: QuantizedGraph, file_layers: list[FileLayer], result: QuantizeReport | None
) -> tuple[dict[str, str], tuple[str, ...]]:
    """The kernels, and why they are not known: a file may be made for another runtime."""
    kernels = {} if result is None else {line.name: line.kernel for line in result.layers if line.kernel}
    if all(layer.weight is None or layer.name in kernels for layer in file_layers):
        return kernels, ()
    try:
        return {**kernels_by_layer(artifact, file_layers), **kernels}, ()
    except UnsupportedError as error:
        return kernels, (f"the kernels of layers are not known: {error}",)


def _reference(given: ReportInputs) -> ModelProto | None:
    """The float model: as it was after equalizing and smoothing where that is known, as it was given otherwise."""
    if given.result is not None:
        return given.result.plan.model
    return None if given.source is None else load(given.source)


def _nbytes_before(given: ReportInputs) -> int | None:
    if given.result is not None:
        return given.result.nbytes_before
    return None if given.source is None else load_model(given.source).nbytes


class _Weights:
    """The weights of all layers, measured once."""

    def __init__(
        self,
        artifact: QuantizedGraph,
        file_layers: list[FileLayer],
        reference: ModelProto | None,
        result: QuantizeReport | None,
    ) -> None:
        self._outputs, self._layers, self._prepared = artifact.graph.outputs, file_layers, result is not None
        floats = None if reference is None else FloatWeights(Graph(reference))
        specs = {} if result is None else {line.name: line.weight for line in result.plan.layers}
        self.tensors: dict[str, Tensor] = {}
        self._same: set[str] = set()
        for layer in file_layers:
            if layer.weight is None:
                continue
            expected = None if floats is None else floats.of(node_name(layer.node), layer.node.op_type)
            self.tensors[layer.name], is_same = measure_weight(layer.weight, expected, specs.get(layer.name))
            if is_same:
                self._same.add(layer.name)

    def comparable(self) -> list[str]:
        """The results that mean the same in both models: those of layers whose weights were not scaled or trained."""
        return [
            layer.output
            for layer in self._layers
            if layer.output and (self._prepared or layer.name in self._same or layer.output in self._outputs)
        ]


def _layers(
    artifact: QuantizedGraph,
    file_layers: list[FileLayer],
    weights: _Weights,
    activations: ActivationStats,
    kernels: dict[str, str],
    result: QuantizeReport | None,
) -> tuple[Layer, ...]:
    lines = {} if result is None else {line.name: line for line in result.layers}
    layers = [
        _layer(artifact, each, weights, activations, kernels.get(each.name, ""), lines.pop(each.name, None))
        for each in file_layers
    ]
    layers += [
        Layer(line.name, line.type, "float" if line.reason else "quantized", line.kernel, line.reason, line.note)
        for line in lines.values()
    ]
    return tuple(layers)


def _layer(
    artifact: QuantizedGraph,
    layer: FileLayer,
    weights: _Weights,
    activations: ActivationStats,
    kernel: str,
    line: LayerReport | None,
) -> Layer:
    status: Status = "float" if not layer.is_quantized else "integers" if kernel in INTEGER_KERNELS else "quantized"
    reason = ""
    if not layer.is_quantized:
        reason = (line.reason if line is not None else "") or layer.reason or "no quantizer in the file"
    activation = None if layer.quantizer is None else activations.tensors.get(layer.quantizer.node)
    if activation is not None and line is not None and line.input:
        activation = replace(activation, spec=line.input)
    before, after = stored_nbytes(artifact, layer)
    return Layer(
        layer.name,
        layer.node.op_type,
        status,
        kernel if layer.is_quantized else "",
        reason,
        "" if line is None else line.note,
        weights.tensors.get(layer.name),
        activation,
        activations.results.get(layer.output),
        None,
        before,
        after,
    )


def _others(artifact: QuantizedGraph, file_layers: list[FileLayer], activations: ActivationStats) -> tuple[Tensor, ...]:
    """Quantizers that no layer reads: of additions, concatenations and the like."""
    taken = {layer.quantizer.node for layer in file_layers if layer.quantizer is not None}
    return tuple(
        activations.tensors.get(each.node) or QuantizerStats(artifact, each).result()
        for each in artifact.quantize_nodes
        if each.node not in taken
    )


def _ranked(layers: tuple[Layer, ...], alone: dict[str, float]) -> tuple[tuple[Layer, ...], Basis]:
    """Layers by damage, worst first: by one measure for all of them, the best that there is."""
    measures: dict[Basis, dict[str, float]] = {
        "sensitivity": alone,
        "output": _noise({each.name: each.output_sqnr_db for each in layers}),
        "weight": _noise({each.name: each.weight.sqnr_db for each in layers if each.weight is not None}),
        "input": _noise({each.name: each.input.sqnr_db for each in layers if each.input is not None}),
    }
    names = {each.name for each in layers if each.is_quantized}
    for basis, noise in measures.items():
        known = {name: value for name, value in noise.items() if name in names and np.isfinite(value)}
        total = sum(known.values())
        if total > 0:
            shares = {name: short(value / total) for name, value in known.items()}
            shared = [replace(each, damage=shares.get(each.name)) for each in layers]
            # Those that are not known come last, those in float after them.
            shared.sort(key=lambda each: (not each.is_quantized, -1.0 if each.damage is None else -each.damage - 2.0))
            return tuple(shared), basis
    return tuple(sorted(layers, key=lambda each: not each.is_quantized)), "none"


def _noise(sqnr_db: Mapping[str, float | None]) -> dict[str, float]:
    """Relative noise power of those whose SQNR is known."""
    return {name: float(10 ** (-db / 10)) for name, db in sqnr_db.items() if db is not None}


def _alone(sensitivity: Sensitivity, mix: Mix | None, layers: tuple[Layer, ...]) -> dict[str, float]:
    """The noise of each layer with the option that it has: that of the mix, the recipe's, or that of its spec."""
    specs = {each.name: each.weight.spec for each in layers if each.weight is not None}
    noise = {}
    for each in sensitivity.layers:
        if mix is not None:
            option = mix.options.get(each.name, "")
        elif sensitivity.recipe is not None:  # its only option is what the recipe says of it
            option = next(iter(each.noise), "")
        else:
            option = option_of(specs.get(each.name, ""), tuple(each.noise))
        if option in each.noise:
            noise[each.name] = short(float(each.noise[option]))
    return noise


def _output_sqnr(given: ReportInputs, activations: ActivationStats) -> tuple[dict[str, float], str]:
    if given.result is not None and given.result.outputs_sqnr_db:
        return {name: short(db) for name, db in given.result.outputs_sqnr_db.items()}, "the float model"
    if activations.outputs:
        return dict(activations.outputs), "the float model"
    run = None if given.verification is None else given.verification.end_to_end.get("optimized")
    if run is not None and run.output_sqnr_db:
        return {name: short(db) for name, db in run.output_sqnr_db.items()}, "what it was verified with"
    return {}, ""


def _reproduction(model: LoadedModel, artifact: QuantizedGraph, given: ReportInputs) -> Reproduction:
    provenance = artifact.provenance or Provenance()
    recipe, toml = _recipe(provenance.recipe)
    versions = {"detent": detent.__version__, "python": platform.python_version()}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return Reproduction(
        provenance.made_by,
        provenance.target,
        recipe,
        toml,
        provenance.data,
        "" if model.path is None else _sha256(model.path),
        given.command,
        versions,
        platform.machine(),
        native.current_level(),
        origin_of(artifact) if given.result is None else "onnx",
    )


def _recipe(text: str) -> tuple[str, str]:
    """The name of a recipe and its TOML; of one that cannot be read, its text."""
    if not text:
        return "", ""
    try:
        recipe = Recipe.from_json(text)
        return recipe.name, recipe.to_toml()
    except DetentError:
        return "", text


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()
