"""TorchSource: a model prepared by ``qt.prepare`` that a file is compared with."""

import inspect
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from onnx import TensorProto
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from detent.errors import DetentError, FileFormatError, ShapeError
from detent.onnx_model import QdqParams
from detent.onnx_model.model_inputs import inputs_of
from detent.onnx_model.qdq_reader import QuantizedGraph, QuantizeNode
from detent.onnx_model.qdq_writer import needs_clip
from detent.onnx_model.targets import Container
from detent.ops import quantize
from detent.params import QuantParams
from detent.tables import counted
from detent.tensor import QuantizedTensor
from detent.torch.arrays import call_with, on_cpu, to_array
from detent.torch.computed_weights import weight_owner
from detent.torch.export_record import WHERE, ExportRecord
from detent.torch.onnx_export import exported_model
from detent.torch.preparation import evaluating, is_frozen, onnx_weights, plan_of, quantizers_of, weight_layers
from detent.torch.quantized_layer import QuantizedMatmul
from detent.torch.quantizer import FakeQuantize
from detent.verification.codes import shift_of
from detent.verification.replay import compare_models
from detent.verification.source import Expected, Reference, SourceSegments
from detent.verification.tally import Tally
from detent.verification.torch_segments import TorchSegments
from detent.verification.verify_report import Difference, Replay

__all__ = ["TorchSource"]

Array = NDArray[Any]
TRAINED_SINCE_EXPORT = "only trained values differ: if the model was trained after the export, export it again"


class TorchSource:
    """A model prepared by ``qt.prepare`` that a file is compared with."""

    is_same = False
    flaw = None

    def __init__(self, model: nn.Module, artifact: QuantizedGraph) -> None:
        plan_of(model)
        self._model, self._artifact = model, artifact
        provenance = artifact.provenance
        self.can_match_weights = provenance is not None  # otherwise the file does not record the names of weights
        self._names = {} if provenance is None else provenance.activations
        self.names = {} if provenance is None else provenance.weights
        self._quantizers = quantizers_of(model)
        self._nodes: dict[str, list[QuantizeNode]] = defaultdict(list)  # maps quantizer names to nodes
        for node in artifact.quantize_nodes:
            self._nodes[self._names.get(node.node, "")].append(node)
        self.notes: dict[str, None] = {}
        self.tally = Tally()
        self.causes = self._find_causes()
        self._called: set[str] = set()
        self._quantized: set[str] = set()

    def replay(self) -> Replay:
        """Export this model with the options recorded in the file, and compare the result with the file."""
        provenance = self._artifact.provenance
        if provenance is None or provenance.export is None:
            return Replay("the file has no record of its export (files from qt.export_onnx have such a record)")
        record = ExportRecord.from_dict(provenance.export)
        if record.problem:
            return Replay(record.problem)
        self._check_example(record)
        example, shapes = record.example(), record.shapes()
        container: Literal["int8"] | None = "int8" if record.container == "int8" else None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                expected = exported_model(
                    self._model,
                    example,
                    target=provenance.target,
                    dynamic_shapes=shapes,
                    opset=record.opset,
                    container=container,
                )
        except DetentError as error:
            return Replay(f"the model cannot be exported with the options recorded in the file: {error}")
        result = compare_models(expected, self._artifact.model, made_by="export")
        is_trained = bool(result.differences) and all(map(self._is_learned, result.differences))
        return replace(result, hint=TRAINED_SINCE_EXPORT if is_trained else "")

    def _check_example(self, record: ExportRecord) -> None:
        """Raise FileFormatError if the recorded example inputs do not fit the file's inputs.

        The check comes before the model runs on the example inputs.
        """
        declared = {each.name: each for each in inputs_of(self._artifact.model)}
        names = [each.name for each in record.inputs] if all(each.name for each in record.inputs) else [*declared]
        for name, recorded in zip(names, record.inputs, strict=False):
            shape = declared[name].shape if name in declared else None
            fits = shape is None or (
                len(shape) == len(recorded.shape)
                and all(size in {None, own} for size, own in zip(shape, recorded.shape, strict=True))
            )
            if not fits:
                raise FileFormatError(
                    f"{WHERE}: input {name!r:.60} has shape {recorded.shape!r:.60}, expected {shape} as in the file: "
                    "export the model again"
                )

    def _is_learned(self, difference: Difference) -> bool:
        """Return whether a mismatch is only in the values of a weight, bias, scale or zero point, not in the graph."""
        constant = self._artifact.graph.constants.get(difference.tensor)
        if constant is None or not difference.cause.endswith("changed"):
            return False
        learned = self._artifact.parameters | {weight.name for weight in self._artifact.weights}
        return difference.tensor in learned or constant.data_type == TensorProto.FLOAT

    @cached_property
    def segments(self) -> SourceSegments | None:
        """The model cut into segments, or None if the file does not record the names of quantizers."""
        if not self.can_match_weights:
            return None
        return TorchSegments(self._model, self._artifact, self._nodes, self._outputs_of, self.tally)

    def _find_causes(self) -> list[str]:
        """List known reasons why sums in the file differ from sums in the model."""
        causes = []
        layers = [each for each in self._model.modules() if isinstance(each, QuantizedMatmul)]
        floats = [each for each in layers if each.arithmetic == "float"]
        if any(weight.is_bias for weight in self._artifact.weights) and any(
            each.bias_rule == "float" for each in floats
        ):
            causes.append("biases are rounded to int32")
        if len(floats) < len(layers):
            causes.append("integer products requantize as fused kernels do")
        if any(each.fold is not None for each in floats) and not is_frozen(self._model):
            causes.append("batch norms are folded only in the file (qt.freeze folds them in the model)")
        return causes

    def weights(self) -> dict[str, QuantizedTensor]:
        """Map full names to quantized weights."""
        return onnx_weights(self._model)

    def expected(self, quantizer: QuantizeNode) -> Expected | None:
        """Return the model's quantizer for a node of the file, or None if the quantizer's name is not recorded."""
        node, name = quantizer, self._names.get(quantizer.node)
        module = None if name is None else self._quantizers.get(name)
        if module is None:
            return None
        params = module.params
        shift = shift_of(params, node.qparams.kind)
        narrow = needs_clip(QdqParams.of(params, Container(node.qparams.kind, shift), 1 + params.scale.ndim))
        return Expected(params, shift, node.unclipped if narrow else node.x)

    def bias(self, weight: str) -> Array | None:
        """Return the bias of the layer that has this weight, with the layer's batch norm folded into the bias.

        Returns None if the layer has no bias, or if the weight is tied.
        """
        prefix = weight.rpartition(".")[0]
        layer = self._model.get_submodule(prefix) if prefix else self._model
        if not isinstance(layer, QuantizedMatmul):
            return None
        own = weight_owner(layer, "weight")
        if sum(weight_owner(other, name) is own for _, other, name, _ in weight_layers(self._model)) > 1:
            return None
        bias = layer.bias if layer.fold is None else layer.fold.bias(layer.bias)
        return None if bias is None else to_array(on_cpu(bias))

    def absent_weights(self, missing: Mapping[str, QuantizedTensor]) -> dict[str, QuantizedTensor]:
        """Return the weights in ``missing`` whose layers ran.

        A file stores tied weights once, under the name of the first weight. If the file has this name, all weights tied
        to it are left out.
        """
        if not self.can_match_weights:
            return {}
        first: dict[int, str] = {}
        tied = {
            full
            for full, layer, name, _ in weight_layers(self._model)
            if first.setdefault(id(weight_owner(layer, name)), full) not in missing
        }
        return {name: tensor for name, tensor in missing.items() if name not in tied and self._is_used(name)}

    def _is_used(self, weight: str) -> bool:
        prefix = weight.rpartition(".")[0]
        above = prefix.rpartition(".")[0]
        parent = self._model.get_submodule(above) if above else self._model
        return prefix in self._called or (isinstance(parent, nn.MultiheadAttention) and above in self._called)

    def absent_quantizers(self) -> list[str]:
        """Return activation quantizers that ran and have no node in the file."""
        return sorted(self._quantized - set(self._names.values())) if self.can_match_weights else []

    def run(self, feeds: Mapping[str, Array]) -> Reference:
        """Run a batch in evaluation mode, and return outputs and codes."""
        calls: dict[str, list[tuple[Array, QuantParams]]] = defaultdict(list)
        with self._recording(calls), torch.no_grad():
            outputs = self._outputs_of(self._model, feeds)
        self._quantized.update(calls)
        return Reference([to_array(on_cpu(each)) for each in outputs], self._codes(calls))

    def _outputs_of(self, model: nn.Module, feeds: Mapping[str, Array]) -> list[Tensor]:
        device = next((each.device for each in model.parameters()), torch.device("cpu"))
        inputs = {name: torch.from_numpy(np.array(each)).to(device) for name, each in feeds.items()}
        by_name = set(inputs) <= set(inspect.signature(model.forward).parameters)
        result = call_with(model, inputs if by_name else tuple(inputs.values()))
        outputs = [each for each in pytree.tree_leaves(result) if isinstance(each, Tensor)]
        names = self._artifact.graph.outputs
        if len(outputs) != len(names):
            given, expected = counted(len(outputs), "tensor"), f"{len(names)} as in the file ({', '.join(names)})"
            raise ShapeError(f"the model returns {given}, expected {expected}: pass the model that was exported")
        return outputs

    def _codes(self, calls: Mapping[str, list[tuple[Array, QuantParams]]]) -> dict[str, Array]:
        """Map names of nodes in the file to codes, which were recorded when the model called its quantizers."""
        by_node = {}
        for name, nodes in self._nodes.items():
            results = calls.get(name, [])
            if name and len(results) != len(nodes):
                counts = f"{counted(len(results), 'run')} in the model, {counted(len(nodes), 'node')} in the file"
                self.notes[f"quantizer {name} was not compared end to end: {counts}"] = None
                continue
            for node, (codes, params) in zip(nodes, results, strict=False):
                shift = shift_of(params, node.qparams.kind)
                by_node[node.node] = codes.astype(np.int32) + shift if params.spec.format.is_integer else codes
        return by_node

    @contextmanager
    def _recording(self, calls: dict[str, list[tuple[Array, QuantParams]]]) -> Iterator[None]:
        """Put the model into evaluation mode and record calls of quantizers and layers; restore the mode at the end."""
        weights = {id(quantizer) for *_, quantizer in weight_layers(self._model)}
        names = {id(quantizer): name for name, quantizer in self._quantizers.items()}

        def watch(quantizer: FakeQuantize, x: Tensor, params: QuantParams | None) -> None:
            if id(quantizer) not in weights:
                own = quantizer.params_for(x) if params is None else params
                codes = quantize(to_array(on_cpu(x)), own, nan="qmin").codes
                calls[names[id(quantizer)]].append((codes, own))

        def note(name: str) -> Any:  # noqa: ANN401 - a hook
            return lambda *_: self._called.add(name)

        hooks = [module.register_forward_pre_hook(note(name)) for name, module in self._model.named_modules()]
        try:
            with evaluating(self._model, watch):
                yield
        finally:
            for hook in hooks:
                hook.remove()
