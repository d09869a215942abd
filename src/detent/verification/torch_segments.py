"""Level 2 of a prepared model: its layers between quantizers, each fed the file's codes, beside the file as written.

The model runs in PyTorch with the weights, folded batch norms and int32 biases that it exports. Each quantizer passes
the file's codes on, dequantized, so that an error stays in its segment. PyTorch and ONNX Runtime add in another order:
values may be apart by what rounding explains, and codes next to a rounding boundary may then differ by a step.

What rounding explains is measured, because it depends on the operators: the model runs once more in float64. Values of
source and file may be apart by ``NOISE_RATIO`` times the largest difference of float32 and float64 in the same tensor,
and ``ULPS`` units in the last place of its largest value. Huge values, such as those of masks, do not count for the
others. Codes have to lie between those of x - bound and x + bound.
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
from detent.torch.export_graph import BIAS_LIMIT
from detent.torch.export_marks import copy_for_export, fold_in
from detent.torch.preparation import quantized_state, quantizers_of, weight_layers
from detent.torch.quantized_layer import QuantizedProduct
from detent.torch.quantizer import FakeQuantize
from detent.verification.codes import shift_of
from detent.verification.tally import Tally
from detent.verification.verify_report import Segments

__all__ = ["TorchSegments"]

Array = NDArray[Any]
Take = Callable[[QuantizeNode, Array, QuantParams], None]
Call = Callable[[nn.Module, Mapping[str, Array]], list[Tensor]]
NOISE_RATIO, ULPS = 16, 8
BOUND = (
    f"values within {NOISE_RATIO} times the largest difference of float32 and float64 in their tensor, and {ULPS} ulp"
)
FLOAT32 = np.finfo(np.float32)
LEAST_HUGE, HUGE_GAP = 12, 6  # binary exponents: huge values are 4096 or more, and 64 times all others


class _Forcing:
    """What hooks of one run do: hand out what a quantizer gets, and let it pass the file's codes on, dequantized."""

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

    def _passed(self, quantizer: FakeQuantize, x: Tensor) -> Tensor | None:
        name = self._names[id(quantizer)]
        nodes, place = self._nodes.get(name, ()), self._calls[name]
        self._calls[name] += 1
        if place >= len(nodes) or not quantizer.enabled or not x.numel():
            return None
        node, params, shape = nodes[place], quantizer.params, tuple(x.shape)
        codes = self._codes[node.node]
        if codes.shape not in {shape, (1, *shape)}:  # the file gives an input without a batch axis one
            self._tally.count(codes.size, codes.size)
            self._tally.note("another shape", node.node, node.codes, (), str(shape), str(codes.shape))
            return None
        self._take(node, to_array(x).reshape(codes.shape), params)
        passed = _dequantized(codes.reshape(shape), params, shift_of(params, node.qparams.kind))
        return torch.from_numpy(passed).to(x.dtype)

    def before_product(self, layer: Any, args: tuple[Any, ...]) -> tuple[Any, ...] | None:  # noqa: ANN401 - a hook
        quantizer = layer.quantizer("input_quantizer")
        if quantizer is None or not args or not isinstance(args[0], Tensor):
            return None
        padded = layer.padded(args[0]) if layer.weight.ndim > 2 else args[0]
        passed = self._passed(quantizer, padded)
        if passed is None:
            return None
        return (passed if padded is args[0] else _inner(layer, passed), *args[1:])

    def after_quantizer(self, quantizer: Any, args: tuple[Any, ...], result: Tensor) -> Tensor | None:  # noqa: ANN401, ARG002
        return self._passed(quantizer, args[0])

    def check_counts(self) -> None:
        """Count quantizers that ran another number of times than they are nodes of the file."""
        for name, nodes in self._nodes.items():
            if name and self._calls[name] != len(nodes):
                self._tally.count(0, 1)
                cause = "a quantizer that runs another number of times than it is a node of the file"
                self._tally.note(cause, name, name, (), self._calls[name], len(nodes))


class TorchSegments:
    """The segments of a prepared model beside a file; ``call`` runs a model on a batch."""

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
        self._single = _as_exported(model, _rounded_biases(artifact, nodes))
        self._double = deepcopy(self._single).double()
        self._within = self._outputs = self._differing_outputs = 0

    @property
    def readers(self) -> tuple[tuple[str, str], ...]:
        """The nodes whose codes a run needs."""
        return tuple((node.node, node.codes) for name, nodes in self._nodes.items() if name for node in nodes)

    def run(self, feeds: Mapping[str, Array], codes: Mapping[str, Array], outputs: Sequence[Array]) -> None:
        """Run the model in both precisions, and compare it with the file's codes, by node, and with its outputs."""
        singles: dict[str, Array] = {}

        def keep(node: QuantizeNode, x: Array, params: QuantParams) -> None:  # noqa: ARG001 - as compare
            singles[node.node] = x

        def compare(node: QuantizeNode, x: Array, params: QuantParams) -> None:
            self._compare(node, singles.pop(node.node), x, params, codes[node.node])

        with torch.no_grad(), self._forced(self._single, codes, keep):
            own = [to_array(each) for each in self._call(self._single, feeds)]
        doubled = {name: x.astype(np.float64) if x.dtype == np.float32 else x for name, x in feeds.items()}
        with torch.no_grad(), self._forced(self._double, codes, compare):
            exact = [to_array(each) for each in self._call(self._double, doubled)]
        for name, single, double, got in zip(self._artifact.graph.outputs, own, exact, outputs, strict=True):
            self._compare_output(name, single, double, got)

    @contextmanager
    def _forced(self, model: nn.Module, codes: Mapping[str, Array], take: Take) -> Iterator[None]:
        """Let the quantizers of a model pass the file's codes on, and hand out what they get."""
        forcing = _Forcing(model, self._nodes, codes, take, self._tally)
        products = [module for module in model.modules() if isinstance(module, QuantizedProduct)]
        inputs = {id(each._modules.get("input_quantizer")) for each in products}
        weights = {id(quantizer) for *_, quantizer in weight_layers(model)}
        others = [each for each in quantizers_of(model).values() if id(each) not in inputs | weights]
        hooks = [each.register_forward_pre_hook(forcing.before_product) for each in products]
        hooks += [each.register_forward_hook(forcing.after_quantizer) for each in others]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        forcing.check_counts()

    def _compare(self, node: QuantizeNode, x: Array, exact: Array, params: QuantParams, got: Array) -> None:
        bound = _bound(x, exact)
        shift = shift_of(params, node.qparams.kind)
        low, own, high = (_codes(each, params, shift) for each in (x - bound, x, x + bound))
        theirs = got.astype(own.dtype)
        differing = theirs != own
        if own.dtype.kind == "f":
            differing &= ~(np.isnan(theirs) & np.isnan(own))
        wrong = differing & ((theirs < low) | (theirs > high) | np.isnan(x))
        self._tally.count(got.size, np.count_nonzero(wrong))
        self._within += int(np.count_nonzero(differing & ~wrong))
        if wrong.any():
            index = first_index(np.atleast_1d(wrong))[: x.ndim]
            cause = "not the code that the source gives"
            scale = float(params.scale.reshape(-1)[0]) if params.scale.size == 1 else None
            values = own[index].item(), theirs[index].item(), float(x[index]), scale
            self._tally.note(cause, node.node, node.codes, index, *values)

    def _compare_output(self, name: str, x: Array, exact: Array, got: Array) -> None:
        self._outputs += 1
        if x.shape != got.shape or x.dtype != got.dtype:
            self._differing_outputs += 1
            expected, present = (f"{each.dtype}{list(each.shape)}" for each in (x, got))
            self._tally.note("not the output that the source gives", f"output {name}", name, (), expected, present)
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
            self._tally.note("not the output that the source gives", f"output {name}", name, index, *values)

    def result(self) -> Segments:
        """What all batches have shown."""
        tally = self._tally
        counts = tally.compared, tally.differing, self._within, self._outputs, self._differing_outputs
        return Segments("", *counts, BOUND, tally.first)


def _inner(layer: Any, x: Tensor) -> Tensor:  # noqa: ANN401 - a convolution
    """The input of a convolution without its padding, which comes last axis first."""
    pads = layer._reversed_padding_repeated_twice
    cut = [slice(None)] * x.ndim
    for place in range(len(pads) // 2):
        before, after = pads[2 * place], pads[2 * place + 1]
        cut[-1 - place] = slice(before, x.shape[-1 - place] - after)
    return x[tuple(cut)]


def _bound(x: Array, exact: Array) -> Array:
    """How far a float32 value of another order of sums may be from each x."""
    finite = np.isfinite(x) & np.isfinite(exact)
    exact = np.clip(exact, -float(FLOAT32.max), float(FLOAT32.max))  # float64 masks with a lowest number of its own
    noise = np.abs(np.subtract(x, exact, dtype=np.float64), where=finite, out=np.zeros(x.shape))
    size = np.abs(exact, where=finite, out=np.zeros(x.shape))
    huge = size >= _least_huge(size)
    noise_level, largest = (part.max(where=~huge, initial=0.0) for part in (noise, size))
    bound = np.full(x.shape, NOISE_RATIO * noise_level + ULPS * float(FLOAT32.eps) * largest)
    if huge.any():
        bound[huge] += NOISE_RATIO * noise[huge].max() + ULPS * float(FLOAT32.eps) * size[huge]
    return np.asarray(np.minimum(bound, float(FLOAT32.max)), np.float32)


def _least_huge(size: Array) -> float:
    """The smallest magnitude far above all ordinary ones; infinite where there is none."""
    if size.max(initial=0.0) < 2.0**LEAST_HUGE:
        return np.inf
    exponents = np.unique(np.frexp(size[size > 0])[1]) - 1
    above = exponents[1:][(np.diff(exponents) > HUGE_GAP) & (exponents[1:] >= LEAST_HUGE)]
    return float(2.0 ** above[0]) if above.size else np.inf


def _codes(x: Array, params: QuantParams, shift: int) -> Array:
    codes = quantize(np.ascontiguousarray(x, np.float32), params, nan="qmin").codes
    return codes.astype(np.int64) + shift if codes.dtype.kind in "iu" else codes.astype(np.float32)


def _dequantized(codes: Array, params: QuantParams, shift: int) -> Array:
    if not params.spec.format.is_integer:  # small floats, which are read as float32
        return np.asarray(codes.astype(np.float32) * np.float32(params.scale))
    if codes.dtype.kind == "f" or shift:
        codes = codes.astype(np.int32) - shift
    return dequantize(codes, params)


@torch.no_grad()
def _as_exported(model: nn.Module, rounded: Collection[tuple[str, str]]) -> nn.Module:
    """A copy whose weights are the dequantized codes that are exported, with folded norms and rounded biases."""
    copy = copy_for_export(model)
    state = quantized_state(copy)
    for module in copy.modules():
        if isinstance(module, QuantizedProduct) and module.fold is not None:
            fold_in(module, module.fold)
    quantizers = quantizers_of(copy)
    names = {id(quantizer): name for name, quantizer in quantizers.items()}
    first: dict[FakeQuantize, str] = {}  # the name of a weight in the file; tied ones have one quantizer
    for full, layer, name, quantizer in weight_layers(copy):
        if full not in state:
            continue
        own = layer._modules.get("input_quantizer")
        inputs = [x for weight, x in rounded if weight == first.setdefault(quantizer, full)]
        inputs = [x for x in inputs if x in quantizers and (own is None or x == names.get(id(own)))]
        if isinstance(layer, QuantizedProduct) and layer.bias is not None and inputs:
            values = _rounded(to_array(layer.bias), quantizers[inputs[0]].params, state[full].params)
            layer.bias = nn.Parameter(torch.from_numpy(values))
        layer._parameters[name] = nn.Parameter(torch.from_numpy(dequantize(state[full].codes, state[full].params)))
        quantizer.enabled = False
    return copy


def _rounded(bias: Array, x: QuantParams, weight: QuantParams) -> Array:
    """A bias rounded to the product of the scales of input and weight; as it is where no int32 can hold that."""
    unit = np.asarray(np.asarray(x.scale, np.float32).reshape(-1)[0] * weight.scale.astype(np.float32))
    if x.scale.ndim or unit.shape not in {(), bias.shape} or unit.min() < FLOAT32.smallest_normal:
        return bias.copy()
    codes = np.rint(bias.astype(np.float64) / unit)
    return bias.copy() if not np.abs(codes).max(initial=0) <= BIAS_LIMIT else codes.astype(np.float32) * unit


def _rounded_biases(artifact: QuantizedGraph, nodes: Mapping[str, Sequence[QuantizeNode]]) -> list[tuple[str, str]]:
    """The layers whose bias is int32 in the file, by the full name of the weight and the quantizer of the input."""
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
