"""Contents of a report, assembled from the quantized file, from what is known of it, and from a run over data.

``tensor_stats`` measures weights and activations, ``file_layers`` finds the layers; nothing is measured here.
"""

import platform
from dataclasses import dataclass, replace
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path

import numpy as np
from onnx import ModelProto

import detent
from detent.errors import DetentError, UnsupportedError
from detent.kernels import native
from detent.onnx.pipeline import LayerReport, QuantizeReport
from detent.onnx_model import Graph, load
from detent.onnx_model.batches import BatchSource, open_batches
from detent.onnx_model.files import LoadedModel, ModelSource, load_model
from detent.onnx_model.graph import INTEGER_KERNELS
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
from detent.report.file_layers import FileLayer, Origin, find_layers, kernels_by_layer, origin_of
from detent.report.tensor_stats import (
    ActivationStats,
    FloatWeights,
    SiteWatch,
    size_parts,
    stored_nbytes,
    watch,
    weigh,
)
from detent.sensitivity import Mix, Sensitivity
from detent.verification.verify_report import VerifyReport

__all__ = ["BATCHES", "ReportInputs", "measure_report"]

BATCHES = 8
PACKAGES = ("numpy", "onnx", "onnxruntime", "torch")


@dataclass(frozen=True)
class ReportInputs:
    """What was given beside the file and the data.

    >>> ReportInputs(title="a").command
    ''
    """

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
    """What ``build`` does.

    >>> from onnx import parser
    >>> made = parser.parse_model('''<ir_version: 10, opset_import: ["" : 21]>
    ...     g (float[1,2] x) => (float[1,1] y) <float s = {0.5}, int8[2,1] w = {3, 4}, int8 z = {0}>
    ...     { v = DequantizeLinear(w, s, z) [fc] y = MatMul(x, v) }''')
    >>> measure_report(made, None, ReportInputs(title="small")).layers[0].weight.spec
    'int8/tensor'
    """
    model = load_model(source)
    artifact, size = open_quantized(model), model.nbytes
    sizes, batches = size_parts(artifact, size), None
    if data is not None:
        batches = open_batches(data, model.inputs)
        batches.check_first()  # what does not fit is told before anything takes long
    found = find_layers(artifact)
    reference = _reference(given)
    weights = _Weights(artifact, found, reference, given.result)
    feeds = () if batches is None else islice(iter(batches), BATCHES)
    seen = watch(artifact, feeds, reference if batches is not None else None, weights.comparable())
    kernels, unknown = _kernels(artifact, found)
    layers = _layers(artifact, found, weights, seen, kernels, given.result)
    layers, basis = _ranked(layers, {} if given.sensitivity is None else _alone(given.sensitivity, given.mix, layers))
    sqnr, against = _output_sqnr(given, seen)
    agreement = None if given.verification is None else given.verification.agreement
    return Report(
        title=given.title,
        nbytes_before=_nbytes_before(given),
        nbytes_after=size,
        layers=layers,
        others=_others(artifact, found, seen),
        sizes=sizes,
        damage_basis=basis,
        output_sqnr_db=sqnr,
        output_sqnr_against=against,
        agreement=seen.agreement if agreement is None else agreement,
        batches=seen.batches,
        facts=given.facts,
        tables=given.tables,
        sensitivity=given.sensitivity,
        mix=given.mix,
        verification=given.verification,
        reproduction=_reproduction(model, artifact, given),
        steps=() if given.result is None else (*given.result.steps, *given.result.hints),
        notes=tuple(dict.fromkeys((*artifact.notes, *seen.notes, *unknown))),
    )


def _kernels(artifact: QuantizedGraph, found: list[FileLayer]) -> tuple[dict[str, str], tuple[str, ...]]:
    """The kernels, and why they are not known: a file may be made for another runtime."""
    try:
        return kernels_by_layer(artifact, found), ()
    except UnsupportedError as error:
        return {}, (f"the kernels of layers are not known: {error}",)


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
        found: list[FileLayer],
        reference: ModelProto | None,
        result: QuantizeReport | None,
    ) -> None:
        self._artifact, self._found = artifact, found
        self._prepared = result is not None
        floats = None if reference is None else FloatWeights(Graph(reference))
        plans = {} if result is None else {line.name: line for line in result.plan.layers}
        self.tensors: dict[str, Tensor] = {}
        self._same: set[str] = set()
        for layer in found:
            if layer.weight is None:
                continue
            node = artifact.graph.node_name(layer.node)
            expected = None if floats is None else floats.of(node, layer.node.op_type)
            spec = plans[layer.name].weight if layer.name in plans else None
            self.tensors[layer.name], same = weigh(layer.weight, expected, spec)
            self._same |= {layer.name} if same else set()

    def comparable(self) -> list[str]:
        """The results that mean the same in both models: those of layers whose weights were not scaled or trained."""
        return [
            layer.output
            for layer in self._found
            if layer.output and (self._prepared or layer.name in self._same or layer.output in self._outputs())
        ]

    def _outputs(self) -> list[str]:
        return self._artifact.graph.outputs


def _layers(
    artifact: QuantizedGraph,
    found: list[FileLayer],
    weights: _Weights,
    seen: ActivationStats,
    kernels: dict[str, str],
    result: QuantizeReport | None,
) -> tuple[Layer, ...]:
    told = {} if result is None else {line.name: line for line in result.layers}
    layers = [
        _layer(artifact, each, weights, seen, kernels.get(each.name, ""), told.pop(each.name, None)) for each in found
    ]
    layers += [
        Layer(line.name, line.type, "float" if line.reason else "quantized", line.kernel, line.reason, line.note)
        for line in told.values()
    ]
    return tuple(layers)


def _layer(
    artifact: QuantizedGraph,
    found: FileLayer,
    weights: _Weights,
    seen: ActivationStats,
    kernel: str,
    told: LayerReport | None,
) -> Layer:
    if told is not None and told.kernel:
        kernel = told.kernel
    status: Status = "float" if not found.is_quantized else "integers" if kernel in INTEGER_KERNELS else "quantized"
    reason = "" if found.is_quantized else (told.reason if told is not None and told.reason else found.reason)
    site = found.quantizer
    activation = None if site is None else seen.tensors.get(site.node)
    if activation is not None and told is not None and told.input:
        activation = replace(activation, spec=told.input)
    before, after = stored_nbytes(artifact, found)
    return Layer(
        found.name,
        found.node.op_type,
        status,
        kernel if found.is_quantized else "",
        reason or ("" if found.is_quantized else "no quantizer in the file"),
        "" if told is None else told.note,
        weights.tensors.get(found.name),
        activation,
        seen.results.get(found.output),
        None,
        before,
        after,
    )


def _others(artifact: QuantizedGraph, found: list[FileLayer], seen: ActivationStats) -> tuple[Tensor, ...]:
    """Quantizers that no layer reads: of additions, concatenations and the like."""
    taken = {layer.quantizer.node for layer in found if layer.quantizer is not None}
    return tuple(
        seen.tensors.get(site.node) or SiteWatch(artifact, site).result()
        for site in artifact.quantize_nodes
        if site.node not in taken
    )


def _ranked(layers: tuple[Layer, ...], alone: dict[str, float]) -> tuple[tuple[Layer, ...], Basis]:
    """Layers by damage, worst first: by one measure for all of them, the best that there is."""
    measures: dict[Basis, dict[str, float]] = {
        "sensitivity": alone,
        "output": {each.name: _ratio(each.output_sqnr_db) for each in layers if each.output_sqnr_db is not None},
        "weight": {
            each.name: _ratio(each.weight.sqnr_db)
            for each in layers
            if each.weight is not None and each.weight.sqnr_db is not None
        },
        "input": {
            each.name: _ratio(each.input.sqnr_db)
            for each in layers
            if each.input is not None and each.input.sqnr_db is not None
        },
    }
    names = {each.name for each in layers if each.is_quantized}
    for basis, noise in measures.items():
        known = {name: value for name, value in noise.items() if name in names and np.isfinite(value)}
        total = sum(known.values())
        if total > 0:
            shared = [replace(each, damage=_share(known.get(each.name), total)) for each in layers]
            # Those that are not known come last, those in float after them.
            shared.sort(key=lambda each: (not each.is_quantized, -1.0 if each.damage is None else -each.damage - 2.0))
            return tuple(shared), basis
    return tuple(sorted(layers, key=lambda each: not each.is_quantized)), "none"


def _share(noise: float | None, total: float) -> float | None:
    return None if noise is None else short(noise / total)


def _alone(found: Sensitivity, mix: Mix | None, layers: tuple[Layer, ...]) -> dict[str, float]:
    """The noise of each layer with the option that it has: that of the mix, the recipe's, or that of its spec."""
    specs = {each.name: each.weight.spec for each in layers if each.weight is not None}
    noise = {}
    for each in found.layers:
        if mix is not None:
            option = mix.options.get(each.name, "")
        elif found.recipe is not None:  # its only option is what the recipe says of it
            option = next(iter(each.noise), "")
        else:
            option = option_of(specs.get(each.name, ""), tuple(each.noise))
        if option in each.noise:
            noise[each.name] = short(float(each.noise[option]))
    return noise


def _ratio(db: float | None) -> float:
    return float("nan") if db is None else float(10 ** (-db / 10))


def _output_sqnr(given: ReportInputs, seen: ActivationStats) -> tuple[dict[str, float], str]:
    if given.result is not None and given.result.outputs_sqnr_db:
        return {name: short(db) for name, db in given.result.outputs_sqnr_db.items()}, "the float model"
    if seen.outputs:
        return dict(seen.outputs), "the float model"
    optimised = None if given.verification is None else given.verification.end_to_end.get("optimised")
    if optimised is not None and optimised.output_sqnr_db:
        return {name: short(db) for name, db in optimised.output_sqnr_db.items()}, "what it was verified with"
    return {}, ""


def _reproduction(model: LoadedModel, artifact: QuantizedGraph, given: ReportInputs) -> Reproduction:
    about = artifact.provenance
    recipe, toml = ("", "") if about is None else _recipe(about.recipe)
    versions = {"detent": detent.__version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return Reproduction(
        "" if about is None else about.made_by,
        "" if about is None else about.target,
        recipe,
        toml,
        "" if about is None else about.data,
        "" if model.path is None else _digest(model.path),
        given.command,
        versions,
        platform.machine(),
        native.current_level(),
        _origin(artifact, given),
    )


def _origin(artifact: QuantizedGraph, given: ReportInputs) -> Origin:
    return origin_of(artifact) if given.result is None else "onnx"


def _recipe(text: str) -> tuple[str, str]:
    """The name of a recipe and its TOML; of one that cannot be read, its text."""
    if not text:
        return "", ""
    try:
        found = Recipe.from_json(text)
        return found.name, found.to_toml()
    except DetentError:
        return "", text


def _digest(path: Path) -> str:
    digest = sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
