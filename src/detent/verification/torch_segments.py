"""Level 2 for a prepared model: cuts it at its quantizers, and compares its segments with the file as written.

The model runs in PyTorch with its exported weights, folded batch norms and int32 biases. Each quantizer outputs the
file's codes, dequantized, so an error stays in its segment. PyTorch and ONNX Runtime accumulate in different orders, so
values differ by rounding errors, and codes next to a rounding boundary may differ by one.

The bound on rounding errors is measured, because it depends on the operators: the model also runs in float64. In each
tensor, source and file may differ by ``ERROR_RATIO`` times the largest difference between float32 and float64, plus
``MAX_ULPS`` ulp of the largest value. Huge values, as in attention masks, have a separate bound. Each code must
be between the codes of x - bound and x + bound.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from detent.checks import first_index
from detent.onnx_model.graph import DEQUANTIZE
from detent.onnx_model.qdq_reader import QuantizedGraph, QuantizeNode
from detent.ops import dequantize, quantize
from detent.params import QuantParams
from detent.torch.arrays import to_array
from detent.torch.export_graph import MAX_BIAS_CODE
from detent.torch.export_marks import copy_for_export, fold_in
from detent.torch.preparation import onnx_weights, quantizers_of, weight_layers
from detent.torch.quantized_layer import QuantizedMatmul
from detent.torch.quantizer import FakeQuantize
from detent.verification.codes import shift_of
from detent.verification.tally import Tally
from detent.verification.verify_report import Segments

__all__ = ["TorchSegments"]

Array = NDArray[Any]
Take = Callable[[QuantizeNode, Array, QuantParams], None]
Call = Callable[[nn.Module, Mapping[str, Array]], list[Tensor]]
ERROR_RATIO, MAX_ULPS = 16, 8  # allow any accumulation order; the resulting bound is far below one code
BOUND = (
    f"values may differ by {ERROR_RATIO} times the largest difference between float32 and float64 in the tensor, plus "
    f"{MAX_ULPS} ulp"
)
FLOAT32 = np.finfo(np.float32)
HUGE_EXPONENT, HUGE_EXPONENT_GAP = 12, 6  # huge values: at least 2**12, and over 2**6 times all other values


class _CodeInjector:
    """Hooks for one run of a model.

    They pass the input of each quantizer to ``take``, and replace the quantizer's output by the file's codes,
    dequantized.
    """

    def __init__(
        self,
        model: nn.Module,
        nodes: Mapping[str, Sequence[QuantizeNode]],
        codes: Mapping[str, Array],
        take: Take,
        tally: Tally,
    ) -> None:
        self._nodes, self._codes, self._take, self._tally = nodes, codes, take, tally
        self._names = {id(quantizer): name for name, quantizer in quantizers_of(model).items()}
        self._calls: dict[str, int] = defaultdict(int)

    def _injected(self, quantizer: FakeQuantize, x: Tensor) -> Tensor | None:
        """Return the file's codes for this call, dequantized.

        Returns None if the file has no node for this call, the codes have a wrong shape, or the quantizer is disabled.
        """
        name = self._names[id(quantizer)]
        nodes, call = self._nodes.get(name, ()), self._calls[name]
        self._calls[name] += 1
        if call >= len(nodes) or not quantizer.enabled or not x.numel():
            return None
        node, params, shape = nodes[call], quantizer.params, tuple(x.shape)
        codes = self._codes[node.node]
        if codes.shape not in {shape, (1, *shape)}:  # the export adds a batch axis if the input has no batch axis
            self._tally.count(codes.size, codes.size)
            self._tally.note("wrong shape", node.node, node.codes, (), str(shape), str(codes.shape))
            return None
        self._take(node, to_array(x).reshape(codes.shape), params)
        values = _dequantized(codes.reshape(shape), params, shift_of(params, node.qparams.kind))
        return torch.from_numpy(values).to(x.dtype)

    def before_layer(self, layer: Any, args: tuple[Any, ...]) -> tuple[Any, ...] | None:  # noqa: ANN401 - a hook
        quantizer = layer.quantizer("input_quantizer")
        if quantizer is None or not args or not isinstance(args[0], Tensor):
            return None
        padded = layer.padded(args[0]) if layer.weight.ndim > 2 else args[0]
        values = self._injected(quantizer, padded)
        if values is None:
            return None
        return (values if padded is args[0] else _without_padding(layer, values), *args[1:])

    def after_quantizer(self, quantizer: Any, args: tuple[Any, ...], result: Tensor) -> Tensor | None:  # noqa: ANN401, ARG002
        return self._injected(quantizer, args[0])

    def check_counts(self) -> None:
        """Count a quantizer as wrong if it ran more or less often than it has QuantizeLinear nodes in the file."""
        for name, nodes in self._nodes.items():
            if name and self._calls[name] != len(nodes):
                self._tally.count(0, 1)
                cause = "wrong number of QuantizeLinear nodes for this quantizer"
                self._tally.note(cause, name, name, (), self._calls[name], len(nodes))


class TorchSegments:
    """Comparison of the segments of a prepared model with a file; ``call`` runs a model on a batch."""

    checks_quantizers = False

    def __init__(
        self,
        model: nn.Module,
        artifact: QuantizedGraph,
        nodes: Mapping[str, Sequence[QuantizeNode]],
        call: Call,
        tally: Tally,
    ) -> None:
        self._artifact, self._nodes, self._call, self._tally = artifact, nodes, call, tally
        self._float32_model = _as_exported(model, _int32_biases(artifact, nodes))
        self._float64_model = deepcopy(self._float32_model).double()
        self._codes_within_bound = self._compared_outputs = self._differing_outputs = 0

    @property
    def readers(self) -> tuple[tuple[str, str], ...]:
        """Return (node name, output name) of each QuantizeLinear node whose codes are an argument of ``run``."""
        return tuple((node.node, node.codes) for name, nodes in self._nodes.items() if name for node in nodes)

    def run(self, feeds: Mapping[str, Array], codes: Mapping[str, Array], outputs: Sequence[Array]) -> None:
        """Run the model in float32 and float64; compare with the file's ``codes`` (by node name) and ``outputs``."""
        float32_inputs: dict[str, Array] = {}

        def keep(node: QuantizeNode, x: Array, params: QuantParams) -> None:  # noqa: ARG001 - same signature as compare
            float32_inputs[node.node] = x

        def compare(node: QuantizeNode, x: Array, params: QuantParams) -> None:
            self._compare(node, float32_inputs.pop(node.node), x, params, codes[node.node])

        with torch.no_grad(), self._injecting(self._float32_model, codes, keep):
            expected = [to_array(each) for each in self._call(self._float32_model, feeds)]
        float64_feeds = {name: x.astype(np.float64) if x.dtype == np.float32 else x for name, x in feeds.items()}
        with torch.no_grad(), self._injecting(self._float64_model, codes, compare):
            exact = [to_array(each) for each in self._call(self._float64_model, float64_feeds)]
        for name, *values in zip(self._artifact.graph.outputs, expected, exact, outputs, strict=True):
            self._compare_output(name, *values)

    @contextmanager
    def _injecting(self, model: nn.Module, codes: Mapping[str, Array], take: Take) -> Iterator[None]:
        """Replace quantizers' outputs in a model by the file's codes, and pass quantizers' inputs to ``take``."""
        injector = _CodeInjector(model, self._nodes, codes, take, self._tally)
        layers = [module for module in model.modules() if isinstance(module, QuantizedMatmul)]
        inputs = {id(each._modules.get("input_quantizer")) for each in layers}
        weights = {id(quantizer) for *_, quantizer in weight_layers(model)}
        others = [each for each in quantizers_of(model).values() if id(each) not in inputs | weights]
        hooks = [each.register_forward_pre_hook(injector.before_layer) for each in layers]
        hooks += [each.register_forward_hook(injector.after_quantizer) for each in others]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        injector.check_counts()

    def _compare(self, node: QuantizeNode, x: Array, exact: Array, params: QuantParams, got: Array) -> None:
        bound = _bound(x, exact)
        shift = shift_of(params, node.qparams.kind)
        low, expected, high = (_codes(each, params, shift) for each in (x - bound, x, x + bound))
        codes = got.astype(expected.dtype)
        differing = codes != expected
        if expected.dtype.kind == "f":
            differing &= ~(np.isnan(codes) & np.isnan(expected))
        wrong = differing & ((codes < low) | (codes > high) | np.isnan(x))
        self._tally.count(got.size, np.count_nonzero(wrong))
        self._codes_within_bound += int(np.count_nonzero(differing & ~wrong))
        if wrong.any():
            index = first_index(np.atleast_1d(wrong))[: x.ndim]
            scale = float(params.scale.reshape(-1)[0]) if params.scale.size == 1 else None
            values = expected[index].item(), codes[index].item(), float(x[index]), scale
            self._tally.note("wrong code", node.node, node.codes, index, *values)

    def _compare_output(self, name: str, x: Array, exact: Array, got: Array) -> None:
        self._compared_outputs += 1
        if x.shape != got.shape or x.dtype != got.dtype:
            self._differing_outputs += 1
            types = [f"{each.dtype}{list(each.shape)}" for each in (x, got)]
            self._tally.note("wrong output", f"output {name}", name, (), types[0], types[1])
            return
        if x.dtype.kind == "f":
            wrong = ~(np.abs(got.astype(np.float64) - x) <= _bound(x, exact)) & (got != x)
            wrong &= ~(np.isnan(got) & np.isnan(x))
        else:
            wrong = got != x
        if wrong.any():
            self._differing_outputs += 1
            index = first_index(np.atleast_1d(wrong))[: x.ndim]
            values = x[index].item(), got[index].item()
            self._tally.note("wrong output", f"output {name}", name, index, *values)

    def result(self) -> Segments:
        """Return the result over all batches."""
        tally = self._tally
        codes = tally.compared, tally.differing, self._codes_within_bound
        return Segments("", *codes, self._compared_outputs, self._differing_outputs, BOUND, tally.first)


def _without_padding(layer: Any, x: Tensor) -> Tensor:  # noqa: ANN401 - a convolution
    """Remove the padding from the input of a convolution."""
    pads = layer._reversed_padding_repeated_twice  # start and end of each axis, last axis first
    cut = [slice(None)] * x.ndim
    for i in range(len(pads) // 2):
        before, after = pads[2 * i], pads[2 * i + 1]
        cut[-1 - i] = slice(before, x.shape[-1 - i] - after)
    return x[tuple(cut)]


def _bound(x: Array, exact: Array) -> Array:
    """Return how much each x may differ from a float32 result with a different accumulation order."""
    finite = np.isfinite(x) & np.isfinite(exact)
    exact = np.clip(exact, -float(FLOAT32.max), float(FLOAT32.max))  # attention masks use the lowest float64
    error = np.abs(np.subtract(x, exact, dtype=np.float64), where=finite, out=np.zeros(x.shape))
    magnitude = np.abs(exact, where=finite, out=np.zeros(x.shape))
    huge = magnitude >= _huge_threshold(magnitude)
    max_error, max_magnitude = (part.max(where=~huge, initial=0.0) for part in (error, magnitude))
    bound = np.full(x.shape, ERROR_RATIO * max_error + MAX_ULPS * float(FLOAT32.eps) * max_magnitude)
    if huge.any():
        bound[huge] += ERROR_RATIO * error[huge].max() + MAX_ULPS * float(FLOAT32.eps) * magnitude[huge]
    return np.asarray(np.minimum(bound, float(FLOAT32.max)), np.float32)


def _huge_threshold(magnitude: Array) -> float:
    """Return the magnitude from which values count as huge; infinity if no value is huge."""
    if magnitude.max(initial=0.0) < 2.0**HUGE_EXPONENT:
        return np.inf
    exponents = np.unique(np.frexp(magnitude[magnitude > 0])[1]) - 1
    above = exponents[1:][(np.diff(exponents) > HUGE_EXPONENT_GAP) & (exponents[1:] >= HUGE_EXPONENT)]
    return float(2.0 ** above[0]) if above.size else np.inf


def _codes(x: Array, params: QuantParams, shift: int) -> Array:
    codes = quantize(np.ascontiguousarray(x, np.float32), params, nan="qmin").codes
    return codes.astype(np.int64) + shift if codes.dtype.kind in "iu" else codes.astype(np.float32)


def _dequantized(codes: Array, params: QuantParams, shift: int) -> Array:
    if not params.spec.format.is_integer:  # float8 and float4, read as float32
        return np.asarray(codes.astype(np.float32) * np.float32(params.scale))
    if codes.dtype.kind == "f" or shift:
        codes = codes.astype(np.int32) - shift
    return dequantize(codes, params)


@torch.no_grad()
def _as_exported(model: nn.Module, int32_biases: Collection[tuple[str, str]]) -> nn.Module:
    """Copy a model as it is exported: with dequantized weights, folded batch norms and rounded biases."""
    copy = copy_for_export(model)
    state = onnx_weights(copy)
    for module in copy.modules():
        if isinstance(module, QuantizedMatmul) and module.fold is not None:
            fold_in(module, module.fold)
    quantizers = quantizers_of(copy)
    names = {id(quantizer): name for name, quantizer in quantizers.items()}
    layers = [each for each in copy.modules() if isinstance(each, QuantizedMatmul)]
    own = {names.get(id(each._modules.get("input_quantizer"))) for each in layers}  # only its own layer reads it
    first: dict[FakeQuantize, str] = {}  # name of the weight in the file; tied weights share a quantizer
    for full, layer, name, quantizer in weight_layers(copy):
        if full not in state:
            continue
        input_quantizer = layer._modules.get("input_quantizer")
        inputs = [x for weight, x in int32_biases if weight == first.setdefault(quantizer, full)]
        if input_quantizer is not None:
            inputs = [x for x in inputs if x == names.get(id(input_quantizer))]
        else:
            inputs = [x for x in inputs if x not in own]
        inputs = [x for x in inputs if x in quantizers]
        if isinstance(layer, QuantizedMatmul) and layer.bias is not None and inputs:
            values = _rounded_bias(to_array(layer.bias), quantizers[inputs[0]].params, state[full].params)
            layer.bias = nn.Parameter(torch.from_numpy(values))
        layer._parameters[name] = nn.Parameter(torch.from_numpy(dequantize(state[full].codes, state[full].params)))
        quantizer.enabled = False
    return copy


def _rounded_bias(bias: Array, x: QuantParams, weight: QuantParams) -> Array:
    """Round a bias to multiples of input scale times weight scale; return the bias unchanged if codes exceed int32."""
    unit = np.asarray(np.asarray(x.scale, np.float32).reshape(-1)[0] * weight.scale.astype(np.float32))
    if x.scale.ndim or unit.shape not in {(), bias.shape} or unit.min() < FLOAT32.smallest_normal:
        return bias.copy()
    codes = np.rint(bias.astype(np.float64) / unit)
    return bias.copy() if not np.abs(codes).max(initial=0) <= MAX_BIAS_CODE else codes.astype(np.float32) * unit


def _int32_biases(artifact: QuantizedGraph, nodes: Mapping[str, Sequence[QuantizeNode]]) -> list[tuple[str, str]]:
    """List pairs of full weight name and input quantizer's name, for all layers with an int32 bias in the file."""
    provenance, graph = artifact.provenance, artifact.graph
    names = {} if provenance is None else provenance.weights
    weights = {each.node.output[0]: names.get(each.name, "") for each in artifact.weights}
    inputs = {node.codes: name for name, each in nodes.items() for node in each}
    layers = []
    for bias in (each for each in artifact.weights if each.is_bias):
        for reader in graph.consumers(bias.node.output[0]):
            producer = graph.producer(reader.input[0]) if len(reader.input) > 2 else None
            if producer is not None and producer.op_type == DEQUANTIZE:
                layers.append((weights.get(reader.input[1], ""), inputs.get(producer.input[0], "")))
    return layers
