"""Layer error: the quantization error of a layer, measured at its own output or at the outputs of the model.

A ``Probe`` runs one layer by itself on sample data. Accuracy passes use it to compare candidates for a layer; running
the whole model for each candidate would take hundreds of times longer. A part of the layer's input is enough: some rows
of a matrix, or some blocks of an image.

A ``SwitchableModel`` measures how the quantization of layers changes the outputs of the model. It has one session, in
which each layer can be quantized or kept in float, and a faster one, in which all layers are quantized. Float fallback,
the search for ranges and ``detent.sensitivity`` use it.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper

from detent.array_store import ArrayStore
from detent.error_places import at
from detent.kernels import error_sum
from detent.onnx.graph_plan import GraphPlan
from detent.onnx_model.files import copied
from detent.onnx_model.graph import MATMULS, Graph, attribute_of
from detent.onnx_model.layers import Layer, layers_of
from detent.onnx_model.qdq_writer import QdqParams, QdqWriter, needs_clip
from detent.onnx_model.sessions import make_session, ort_errors, record_in_parts
from detent.onnx_model.targets import Target
from detent.params import QuantParams

__all__ = [
    "IsolatedLayers",
    "Probe",
    "ReferenceOutputs",
    "Switch",
    "SwitchableModel",
    "gain_db",
    "mean_power",
    "noise",
    "output_noise",
    "part_of",
    "power",
]

_log = logging.getLogger(__name__)

Array = NDArray[Any]

Feed = dict[str, Array]
PART_ROWS = 512  # rows of a matrix on which errors are measured
MAX_SOURCE_BYTES = 1 << 26  # size of a model that gets a second session, which copies all of it
PART_POINTS, BLOCK_SIDE = 64 * 64, 8  # pixels of an image on which errors are measured, and the side of their blocks


class Probe:
    """One layer that runs by itself, without its bias."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        self._session: ort.InferenceSession | None = None

    def run(self, x: Array, weight: Array) -> Array:
        """Compute the output of the layer without its bias."""
        kind = self.layer.node.op_type
        if kind in MATMULS:
            matrix = weight.T if attribute_of(self.layer.node, "transB", 0) else weight
            return x.reshape(-1, x.shape[-1]) @ matrix
        if self._session is None:
            self._session = make_session(_alone(self.layer.node), threads=1)  # one per layer; few run at once
        with ort_errors():
            result: Array = self._session.run(None, {"x": x, "w": weight})[0]
        return result


class IsolatedLayers:
    """The layers of a plan with quantized weights; each runs by itself, on a part of its input in each sample.

    When ``inputs`` is first called, the model runs on all samples and records the layers' inputs. ``memory_budget``
    limits the bytes that are recorded at once, and those that are kept in memory. With more samples, the part of the
    input that is used in each sample is smaller.
    """

    def __init__(self, plan: GraphPlan, samples: Sequence[Feed], memory_budget: int | None = None) -> None:
        lines = [line for line in plan.quantized if line.weight is not None and line.type != "Gather"]
        layers = {line.name: plan.layers_by_name[line.name] for line in lines}
        self._layers = {name: layer for name, layer in layers.items() if not layer.is_weight_only}
        self._probes: dict[str, Probe] = {}
        self._inputs: ArrayStore | None = None  # by sample and layer
        self._model, self._samples, self._budget = plan.model, samples, memory_budget
        self.count = len(samples)

    def inputs(self, sample: int) -> Mapping[str, Array]:
        """Return a dict from layer names to arrays: the part of each layer's input that is used in one sample."""
        if self._inputs is None:
            self._inputs = ArrayStore(self._budget)
            tensors = [layer.data for layer in self._layers.values()]
            for i, recorded in record_in_parts(self._model, tensors, self._samples, self._budget):
                for name, layer in self._layers.items():
                    if layer.data in recorded:
                        with at("layer", name):
                            self._inputs[i, name] = [part_of(layer, recorded[layer.data], self.count)]
        return _SampleInputs(self._inputs, sample, tuple(self._layers))

    def run(self, name: str, x: Array, weight: Array) -> Array:
        """Compute the output of a layer without its bias."""
        if name not in self._probes:
            self._probes[name] = Probe(self._layers[name])
        return self._probes[name].run(x, weight)


class _SampleInputs(Mapping[str, Array]):
    """Inputs of layers in one sample; those in a file are read when they are accessed."""

    def __init__(self, stored: ArrayStore, sample: int, names: tuple[str, ...]) -> None:
        self._stored, self._sample, self._names = stored, sample, names

    def __getitem__(self, name: str) -> Array:
        return self._stored[self._sample, name][0]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def part_of(layer: Layer, x: Array, batches: int = 1) -> Array:
    """Select the part of a layer's input on which errors are measured: rows of a matrix, or blocks of an image.

    If errors are measured on several batches, the part of each batch is smaller.
    """
    if layer.node.op_type in MATMULS:
        flat, count = x.reshape(-1, x.shape[-1]), -(-PART_ROWS // batches)
        return np.ascontiguousarray(flat[:: max(1, len(flat) // count)][:count])  # a view would keep x alive
    sizes = layer.shape[2:]
    dilations = attribute_of(layer.node, "dilations", [1] * len(sizes))
    remaining = -(-PART_POINTS // batches)
    for number, axis in enumerate(sorted(range(2, x.ndim), key=lambda axis: x.shape[axis])):
        even_side = int(remaining ** (1 / (x.ndim - 2 - number)) + 1e-9)
        receptive = 2 * (sizes[axis - 2] - 1) * dilations[axis - 2] + 2  # wider than the receptive field
        side = max(even_side, receptive)
        if x.shape[axis] > side:
            x = x.take(_blocks(x.shape[axis], side), axis)
        remaining = max(1, remaining // x.shape[axis])
    return x


def _blocks(length: int, side: int) -> NDArray[np.intp]:
    """Return the indices of evenly spread blocks of adjacent pixels, at least ``side`` pixels in total."""
    count = -(-side // BLOCK_SIDE)
    starts = np.linspace(0, length - BLOCK_SIDE, count).astype(np.intp)
    return (starts[:, None] + np.arange(BLOCK_SIDE)).ravel()


def _alone(node: NodeProto) -> ModelProto:
    """Make a model of one convolution whose weight is a model input."""
    copy = NodeProto()
    copy.CopyFrom(node)
    del copy.input[:], copy.output[:]
    copy.input.extend(["x", "w"])
    copy.output.append("y")
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("x", "w")]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    graph = helper.make_graph([copy], "layer", inputs, outputs)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)


def noise(reference: Array, result: Array) -> float:
    """Compute the sum of the squared differences of two arrays; any number of threads gives the same bits."""
    return error_sum("squared_error", np.ascontiguousarray(result), np.ascontiguousarray(reference))


def power(x: Array) -> float:
    """Compute the sum of the squared elements of an array; any number of threads gives the same bits."""
    flat = np.ascontiguousarray(x)
    return error_sum("square", flat, flat)


def output_noise(reference: Array, quantized: Array) -> float | None:
    """Compute the noise of an output; None if the shape differs, or the output is not float."""
    old, new = _wide(reference), _wide(quantized)
    return noise(old, new) if old.shape == new.shape and old.dtype == np.float32 else None


def mean_power(signals: Sequence[Array]) -> float:
    """Compute the mean power of a signal over several samples; the noise of each sample is divided by this power.

    So a sample with little power, such as a blank image, does not outweigh other samples. The SQNR of a report counts
    noise in the same way.
    """
    return _mean_power([power(each) for each in signals])


def _mean_power(powers: Sequence[float]) -> float:
    return max(sum(powers) / max(1, len(powers)), 1e-30)


class ReferenceOutputs:
    """Float outputs of some samples, with which quantized outputs are compared.

    ``outputs`` are read one after the other. Those above the memory budget are kept in a temporary file.
    """

    def __init__(
        self, names: Sequence[str], outputs: Iterable[Sequence[Array]], memory_budget: int | None = None
    ) -> None:
        self.names, self._outputs = names, ArrayStore(memory_budget)
        self._compared: list[list[int]] = []  # positions of outputs, by sample
        powers: list[list[float]] = [[] for _ in names]  # by output, then by sample
        for sample, arrays in enumerate(outputs):
            wide = [_wide(each) for each in arrays]
            for by_sample, each in zip(powers, wide, strict=True):
                if each.dtype == np.float32:
                    by_sample.append(power(each))
            self._outputs[sample] = wide
            self._compared.append(list(range(len(names))))
        self._powers = [_mean_power(each) for each in powers]

    @property
    def count(self) -> int:
        """Number of compared outputs, summed over the samples."""
        return sum(map(len, self._compared))

    def leave_out(self, sample: int, quantized: Sequence[Array]) -> None:
        """Leave out outputs of a sample that are empty, are not float, or have a different shape in ``quantized``."""
        pairs = zip(self._outputs[sample], quantized, strict=True)
        same = [old.shape == new.shape and old.size > 0 and old.dtype == np.float32 for old, new in pairs]
        for name, is_same in zip(self.names, same, strict=True):
            if not is_same:
                reason = "the output is empty or not float, or its shape depends on the data"
                _log.info("sample %d: noise at output %r not measured, because %s", sample, name, reason)
        self._compared[sample] = [i for i, is_same in enumerate(same) if is_same]

    def noise(self, sample: int, quantized: Sequence[Array]) -> list[float]:
        """Compute the noise of each compared output of a sample, relative to the mean power of the output.

        If the shape of a quantized output differs from that of the float output, the noise is 1.
        """
        outputs = self._outputs[sample]
        compared = self._compared[sample]
        return self.relative(sample, {i: output_noise(outputs[i], quantized[i]) for i in compared})

    def relative(self, sample: int, noises: Mapping[int, float | None]) -> list[float]:
        """Divide the noise of each compared output of a sample by the mean power of the output.

        ``noises`` has the results of ``output_noise`` by position of the output.
        """
        compared = ((i, noises[i]) for i in self._compared[sample])
        return [1.0 if each is None else each / self._powers[i] for i, each in compared]


def _wide(output: Array) -> Array:
    """Return float16 outputs as float32, in which noise does not overflow; others are returned unchanged."""
    return output.astype(np.float32) if output.dtype == np.float16 else output


def gain_db(remaining: float) -> float:
    """Convert the remaining fraction of noise to a gain in dB, at most 120."""
    return float(-10 * np.log10(max(remaining, 1e-12)))


@dataclass(frozen=True)
class Switch:
    """A Q/DQ pair after ``tensor`` that a flag turns on, for the nodes ``readers``; empty means all that read it."""

    flag: str
    tensor: str
    params: QuantParams
    readers: tuple[str, ...] = ()


class SwitchableModel:
    """A model whose layers can be quantized one by one.

    Weights are inputs of the session, so each call of ``run`` can replace them. ``weights`` maps a label for each
    weight to the layers that share the weight. Each Q/DQ pair of an activation has a switch, and saturates as in a
    quantized file. Scales and zero points of activations are inputs too, except if the pair has a Clip, whose bounds
    depend on them. ``run_quantized`` is faster than ``run`` if all pairs are turned on: it has a second session, with
    constant weights and without switches.
    """

    def __init__(
        self,
        model: ModelProto,
        weights: Mapping[str, Sequence[str]],
        switches: Sequence[Switch],
        target: Target,
        threads: int = 0,
    ) -> None:
        self._source, self._labels, self._switches = model, weights, switches
        self._fits_twice = model.ByteSize() <= MAX_SOURCE_BYTES
        self._target, self._threads = target, threads
        self.weights: dict[str, Array] = {}
        self._params: dict[str, Array] = {}  # scales and zero points, by input name
        copy = copied(model)
        graph = Graph(copy)
        layers = {layer.name: layer for layer in layers_of(graph)}
        for label, names in weights.items():
            for name in names:
                self.weights.setdefault(label, graph.array(layers[name].weight))
                layers[name].set_weight(graph, _weight_input(label))
            kind, shape = TensorProto.FLOAT, self.weights[label].shape
            copy.graph.input.append(helper.make_tensor_value_info(_weight_input(label), kind, shape))
        for switch in switches:
            copy.graph.input.append(helper.make_tensor_value_info(switch.flag, TensorProto.BOOL, []))
            qparams = self._qparams(switch.params)
            if not needs_clip(qparams):
                self._params |= _stored(switch.flag, qparams)
        self._insert_pairs(graph, is_switched=True)
        self._off = {switch.flag: np.array(False) for switch in switches}
        self._session = make_session(graph.finish(), threads=threads)
        self._constants: dict[str, Array] = {}  # weights of the second session, by label
        self._quantized: ort.InferenceSession | None = None  # the second session

    def _insert_pairs(self, graph: Graph, *, is_switched: bool) -> None:
        """Insert the Q/DQ pairs, and inputs for their parameters."""
        nodes = {graph.node_name(node): node for node in graph.nodes}
        writer = QdqWriter(graph)
        for switch in self._switches:
            readers = [nodes[name] for name in switch.readers] or list(graph.consumers(switch.tensor))
            qparams, stem = self._qparams(switch.params), switch.flag
            inputs = None if needs_clip(qparams) else _param_inputs(stem)
            pair = writer.pair(switch.tensor, stem, inputs or writer.parameters(stem, qparams), qparams)
            if is_switched:
                node, result = writer.switch(stem, pair.nodes, pair.dequantized, switch.tensor)
                inserted = [node]
            else:
                inserted, result = list(pair.nodes), pair.dequantized
            graph.redirect(switch.tensor, result, readers)
            graph.insert(inserted)
            if inputs is not None:
                kinds = zip(inputs, (TensorProto.FLOAT, qparams.kind), strict=True)
                graph.model.graph.input.extend(helper.make_tensor_value_info(name, kind, []) for name, kind in kinds)
        graph.drop_unread()

    def _qparams(self, params: QuantParams) -> QdqParams:
        return QdqParams.of(params, self._target.activation_container(params.spec.format), 0)

    def can_replace(self, flag: str) -> bool:
        """Whether scale and zero point of the Q/DQ pair of ``flag`` are inputs, so that ``run`` can replace them."""
        return _param_inputs(flag)[0] in self._params

    def set_params(self, flag: str, params: QuantParams) -> None:
        """Replace the parameters of the Q/DQ pair of ``flag`` in all further calls of ``run``."""
        self._params |= _stored(flag, self._qparams(params))

    def prepared(self, params: Mapping[str, QuantParams]) -> dict[str, Array]:
        """Convert parameters of Q/DQ pairs, by flag, to inputs of the session."""
        inputs: dict[str, Array] = {}
        for flag, each in params.items():
            inputs |= _stored(flag, self._qparams(each))
        return inputs

    def run(
        self,
        names: Sequence[str],
        feed: Feed,
        weights: Mapping[str, Array],
        flags: Iterable[str],
        params: Mapping[str, Array] = MappingProxyType({}),
    ) -> list[Array]:
        """Compute outputs with some weights replaced and some Q/DQ pairs turned on.

        ``params`` is a result of ``prepared``; it replaces parameters of Q/DQ pairs in this call only.
        """
        if not names:  # for an empty list, ONNX Runtime would compute all outputs
            return []
        arrays = {_weight_input(label): array for label, array in {**self.weights, **weights}.items()}
        on = {flag: np.array(True) for flag in flags}
        stored = {**self._params, **params}
        with ort_errors():
            outputs: list[Array] = self._session.run(names, {**feed, **arrays, **stored, **self._off, **on})
        return outputs

    def run_quantized(
        self, names: Sequence[str], feed: Feed, weights: Mapping[str, Array], params: Mapping[str, Array]
    ) -> list[Array]:
        """Compute outputs with all Q/DQ pairs turned on, up to rounding errors of float kernels; see ``run``.

        The same objects should be passed as ``weights`` again and again: other weights take a new session. A large
        model needs too much memory for a second session, so it uses ``run``.
        """
        if not names:
            return []
        used = {**self.weights, **weights}
        if not self._fits_twice:
            return self.run(names, feed, weights, self._off, params)
        if self._quantized is None or any(self._constants[label] is not array for label, array in used.items()):
            self._quantized, self._constants = self._with_constants(used), used
        with ort_errors():
            outputs: list[Array] = self._quantized.run(names, {**feed, **self._params, **params})
        return outputs

    def _with_constants(self, weights: Mapping[str, Array]) -> ort.InferenceSession:
        """Make a session with constant weights and without switches."""
        graph = Graph(copied(self._source))
        layers = {layer.name: layer for layer in layers_of(graph)}
        for label, names in self._labels.items():
            constant = graph.add_constant(_weight_input(label), weights[label])
            for name in names:
                layers[name].set_weight(graph, constant)
        self._insert_pairs(graph, is_switched=False)
        # Without this setting, ONNX Runtime would replace some nodes between Q/DQ pairs by integer kernels.
        return make_session(graph.finish(), threads=self._threads, config={"session.disable_quant_qdq": "1"})


def _weight_input(label: str) -> str:
    return f"{label}//weight"


def _param_inputs(flag: str) -> tuple[str, str]:
    """Return the names of the inputs with the scale and the zero point of a Q/DQ pair."""
    return f"{flag}//scale", f"{flag}//zero_point"


def _stored(flag: str, qparams: QdqParams) -> dict[str, Array]:
    scale, zero_point = _param_inputs(flag)
    kind = helper.tensor_dtype_to_np_dtype(qparams.kind)
    return {scale: qparams.scale, zero_point: np.asarray(qparams.zero_point).astype(kind)}
