"""Contents of a report, assembled from the quantized file, the optional inputs and a run over data.

``tensor_stats`` measures weights and activations. ``file_layers`` lists the layers. This module combines their results.
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
    matching_candidate,
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

BATCHES = 8  # batches on which activations are measured
PACKAGES = ("numpy", "onnx", "onnxruntime", "torch")  # packages whose versions a report lists
DYNAMIC_NOTE = "input quantized dynamically, with the range of the current batch"


@dataclass(frozen=True)
class ReportInputs:
    """Optional inputs of a report; see ``detent.report.build``."""

    source: ModelSource | None = None
    result: QuantizeReport | None = None
    verification: VerifyReport | None = None
    sensitivity: Sensitivity | None = None
    mix: Mix | None = None
    title: str = ""
    facts: tuple[tuple[str, str], ...] = ()
    tables: tuple[Table, ...] = ()
    command: str = ""


def measure_report(source: ModelSource, data: BatchSource | None, inputs: ReportInputs) -> Report:
    """Build the report of a quantized file."""
    model = load_model(source)
    artifact, size = open_quantized(model), model.nbytes
    sizes, batches = size_parts(artifact, size), None
    if data is not None:
        batches = open_batches(data, model.inputs)
        batches.check_first()  # fail early if the data do not fit
    file_layers = find_layers(artifact)
    reference = _reference(inputs)
    weights = _Weights(artifact, file_layers, reference, inputs.result)
    feeds = () if batches is None else islice(iter(batches), BATCHES)
    float_model = reference if batches is not None else None
    activations = measure_activations(artifact, feeds, float_model, weights.comparable())
    kernels, kernel_notes = _kernels(artifact, file_layers, inputs.result)
    layers = _layers(artifact, file_layers, weights, activations, kernels, inputs.result)
    noise = {} if inputs.sensitivity is None else _sensitivity_noise(inputs.sensitivity, inputs.mix, layers)
    layers, basis = _ranked(layers, noise)
    sqnr, against = _output_sqnr(inputs, activations)
    agreement = None if inputs.verification is None else inputs.verification.agreement
    return Report(
        title=inputs.title,
        nbytes_before=_nbytes_before(inputs),
        nbytes_after=size,
        layers=layers,
        others=_others(artifact, file_layers, activations),
        sizes=sizes,
        noise_share_basis=basis,
        output_sqnr_db=sqnr,
        output_sqnr_against=against,
        agreement=activations.agreement if agreement is None else agreement,
        batches=activations.batches,
        facts=inputs.facts,
        tables=inputs.tables,
        sensitivity=inputs.sensitivity,
        mix=inputs.mix,
        verification=inputs.verification,
        reproduction=_reproduction(model, artifact, inputs),
        steps=() if inputs.result is None else (*inputs.result.steps, *inputs.result.hints),
        notes=tuple(dict.fromkeys((*artifact.notes, *activations.notes, *kernel_notes))),
    )


def _kernels(
    artifact: QuantizedGraph, file_layers: list[FileLayer], result: QuantizeReport | None
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the kernel of each layer, and notes if ONNX Runtime cannot load the file."""
    kernels = {} if result is None else {line.name: line.kernel for line in result.layers if line.kernel}
    if all(layer.weight is None or layer.name in kernels for layer in file_layers):
        return kernels, ()
    try:
        return {**kernels_by_layer(artifact, file_layers), **kernels}, ()
    except UnsupportedError as error:
        return kernels, (f"the kernels of layers are unknown: {error}",)


def _reference(inputs: ReportInputs) -> ModelProto | None:
    """Return the float model to compare with: the model in ``result``, after accuracy passes, or else the source."""
    if inputs.result is not None:
        return inputs.result.plan.model
    return None if inputs.source is None else load(inputs.source)


def _nbytes_before(inputs: ReportInputs) -> int | None:
    if inputs.result is not None:
        return inputs.result.nbytes_before
    return None if inputs.source is None else load_model(inputs.source).nbytes


class _Weights:
    """Statistics of all weights, measured once."""

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
        self._unchanged: set[str] = set()  # layers whose weight was rounded, and not changed in another way
        for layer in file_layers:
            if layer.weight is None:
                continue
            expected = None if floats is None else floats.of(node_name(layer.node), layer.node.op_type)
            self.tensors[layer.name], is_unchanged = measure_weight(layer.weight, expected, specs.get(layer.name))
            if is_unchanged:
                self._unchanged.add(layer.name)

    def comparable(self) -> list[str]:
        """Return the names of the layer outputs that can be compared with the float model.

        With ``result``, these are the outputs of all layers. Without ``result``, these are layer outputs that are
        also model outputs, and outputs of layers whose weight was only rounded or clipped.
        """
        return [
            layer.output
            for layer in self._layers
            if layer.output and (self._prepared or layer.name in self._unchanged or layer.output in self._outputs)
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
    status: Status = "float" if not layer.is_quantized else "integer" if kernel in INTEGER_KERNELS else "quantized"
    reason = ""
    if not layer.is_quantized:
        reason = (line.reason if line is not None else "") or layer.reason or "not quantized in the file"
    activation = None if layer.quantizer is None else activations.tensors.get(layer.quantizer.node)
    if activation is not None and line is not None and line.input:
        activation = replace(activation, spec=line.input)
    note = "" if line is None else line.note
    if layer.is_dynamic:
        note = "; ".join(filter(None, (DYNAMIC_NOTE, note)))
    before, after = stored_nbytes(artifact, layer)
    return Layer(
        layer.name,
        layer.node.op_type,
        status,
        kernel if layer.is_quantized else "",
        reason,
        note,
        weights.tensors.get(layer.name),
        activation,
        activations.results.get(layer.output),
        None,
        before,
        after,
    )


def _others(artifact: QuantizedGraph, file_layers: list[FileLayer], activations: ActivationStats) -> tuple[Tensor, ...]:
    """Return quantized activations that no layer reads, such as inputs of Add and Concat."""
    read = {layer.quantizer.node for layer in file_layers if layer.quantizer is not None}
    return tuple(
        activations.tensors.get(each.node) or QuantizerStats(artifact, each).result()
        for each in artifact.quantize_nodes
        if each.node not in read
    )


def _ranked(layers: tuple[Layer, ...], sensitivity: dict[str, float]) -> tuple[tuple[Layer, ...], Basis]:
    """Sort layers by noise share, largest first; return the sorted layers and the basis of the shares.

    The basis is the first in this list that has any noise: sensitivity, layer outputs, weights, inputs.
    """
    measures: dict[Basis, dict[str, float]] = {
        "sensitivity": sensitivity,
        "output": _noise({each.name: each.output_sqnr_db for each in layers}),
        "weight": _noise({each.name: each.weight.sqnr_db for each in layers if each.weight is not None}),
        "input": _noise({each.name: each.input.sqnr_db for each in layers if each.input is not None}),
    }
    names = {each.name for each in layers if each.is_quantized}
    for basis, noise in measures.items():
        finite = {name: value for name, value in noise.items() if name in names and np.isfinite(value)}
        total = sum(finite.values())
        if total > 0:
            shares = {name: short(value / total) for name, value in finite.items()}
            ranked = [replace(each, noise_share=shares.get(each.name)) for each in layers]
            # First quantized layers with a share, then quantized layers without a share, then layers in float.
            ranked.sort(
                key=lambda each: (not each.is_quantized, -1.0 if each.noise_share is None else -each.noise_share - 2.0)
            )
            return tuple(ranked), basis
    return tuple(sorted(layers, key=lambda each: not each.is_quantized)), "none"


def _noise(sqnr_db: Mapping[str, float | None]) -> dict[str, float]:
    """Convert each SQNR in dB to relative noise power; entries that are None are left out."""
    return {name: float(10 ** (-db / 10)) for name, db in sqnr_db.items() if db is not None}


def _sensitivity_noise(sensitivity: Sensitivity, mix: Mix | None, layers: tuple[Layer, ...]) -> dict[str, float]:
    """Return the measured noise of each layer for the candidate that the layer uses.

    If ``mix`` is given, it has the candidate of each layer. Otherwise, the candidate is the measured recipe or, if
    weight specs were measured, the weight spec that matches the layer.
    """
    specs = {each.name: each.weight.spec for each in layers if each.weight is not None}
    noise = {}
    for each in sensitivity.layers:
        if mix is not None:
            option = mix.options.get(each.name, "")
        elif sensitivity.recipe is not None:  # the recipe was the only candidate
            option = next(iter(each.noise), "")
        else:
            option = matching_candidate(specs.get(each.name, ""), tuple(each.noise))
        if option in each.noise:
            noise[each.name] = short(float(each.noise[option]))
    return noise


def _output_sqnr(inputs: ReportInputs, activations: ActivationStats) -> tuple[dict[str, float], str]:
    if inputs.result is not None and inputs.result.outputs_sqnr_db:
        return {name: short(db) for name, db in inputs.result.outputs_sqnr_db.items()}, "the float model"
    if activations.outputs:
        return dict(activations.outputs), "the float model"
    run = None if inputs.verification is None else inputs.verification.end_to_end.get("optimized")
    if run is not None and run.output_sqnr_db:
        return {name: short(db) for name, db in run.output_sqnr_db.items()}, "the source model of dt.verify"
    return {}, ""


def _reproduction(model: LoadedModel, artifact: QuantizedGraph, inputs: ReportInputs) -> Reproduction:
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
        inputs.command,
        versions,
        platform.machine(),
        native.current_level(),
        origin_of(artifact) if inputs.result is None else "onnx",
    )


def _recipe(text: str) -> tuple[str, str]:
    """Parse the JSON of a recipe, and return the recipe's name and TOML. If this fails, return "" and ``text``."""
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
