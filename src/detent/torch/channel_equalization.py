r"""Cross-layer equalization of a PyTorch model: gives the channels of a layer's input similar ranges.

.. math:: \operatorname{relu}(W_1 x) = \operatorname{diag}(s) \operatorname{relu}(\operatorname{diag}(s)^{-1} W_1 x)

The maker of a tensor is divided by the factors, along its output channels: a convolution, a linear layer, or the gain
and bias of a normalization. All readers of the tensor are convolutions or linear layers, whose weights are multiplied
by the factors along their input channels. Between them are only functions with ``f(s * x) = s * f(x)`` for ``s > 0``.
If a batch norm follows a convolution, the batch norm is the maker, so that it can still train. With a LayerNorm as
maker, equalization is SmoothQuant (Xiao et al. 2023).

A symbolic trace proves that nothing else reads the tensor or calls the modules. Without a trace, nothing is equalized.
"""

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from detent.channel_factors import MAX_REMAINING_NOISE, MIN_CHANNEL_VALUES, STRENGTHS, equalization_factors
from detent.granularity import PerTensor
from detent.params import QuantParams
from detent.rule import ObserverSpec
from detent.scale_mode import PerBatch
from detent.torch import eager
from detent.torch.activation_ranges import ActivationRanges, watching_inputs
from detent.torch.arrays import on_cpu, to_array
from detent.torch.batchnorm import traced_graphs
from detent.torch.calibration import passing
from detent.torch.layers import runs_as_matmul
from detent.torch.parameter_changes import ParameterChanges
from detent.torch.quantized_layer import QuantizedMatmul
from detent.torch.quantizer import FakeQuantize
from detent.torch.weight_scales import observer_spec_for

__all__ = ["Between", "Equalized", "apply", "channel_axes", "choose_factors", "find_between"]

Array = NDArray[Any]
INPUT = "input_quantizer"
_POOLS = (
    *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
)
_HOMOGENEOUS = (nn.ReLU, nn.LeakyReLU, nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
_FUNCTIONS = (F.relu, torch.relu, F.leaky_relu, F.dropout)
_METHODS = ("relu", "contiguous")


@dataclass(frozen=True)
class Between:
    """A tensor between layers, by module names: the maker of the tensor, and all its readers."""

    maker: str
    readers: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.maker} -> {', '.join(self.readers)}"


@dataclass(frozen=True)
class Equalized:
    """Factors of a tensor, the strength they were computed with, and the fraction of noise that remains."""

    between: Between
    factors: Array
    strength: float
    remaining: float


def find_between(model: nn.Module) -> tuple[Between, ...]:
    """Find the tensors of a float model that can be equalized.

    Raises:
        Exception: the model cannot be traced.
    """
    training, evaluation = traced_graphs(model)
    modules = dict(model.named_modules())
    shared = _shared_parameters(model)
    tensors = set(_between(training, modules)) & set(_between(evaluation, modules))
    read = {str(node.target) for node in (*training.nodes, *evaluation.nodes) if node.op == "get_attr"}
    order = {name: number for number, name in enumerate(modules)}
    return tuple(
        each
        for each in sorted(tensors, key=lambda between: order[between.maker])
        if all(_owns_parameters(modules[name], name, shared, read) for name in (each.maker, *each.readers))
    )


def _shared_parameters(model: nn.Module) -> set[int]:
    owners = Counter(
        id(parameter)
        for module in model.modules()
        for parameter in module._parameters.values()
        if parameter is not None
    )
    return {key for key, count in owners.items() if count > 1}


def _owns_parameters(module: nn.Module, name: str, shared: set[int], read: set[str]) -> bool:
    """Return whether only this module reads its parameters, and they are plain parameters."""
    if _has_hooks(module):
        return False
    parameters = {key: each for key, each in module._parameters.items() if each is not None}
    return "weight" in parameters and not any(
        id(each) in shared or f"{name}.{key}" in read for key, each in parameters.items()
    )


def _between(graph: fx.Graph, modules: Mapping[str, nn.Module]) -> Iterable[Between]:
    calls = Counter(str(node.target) for node in graph.nodes if node.op == "call_module")

    def module_of(node: fx.Node) -> nn.Module | None:
        """Return the module of a node, if the module is called only once."""
        return modules[str(node.target)] if node.op == "call_module" and calls[str(node.target)] == 1 else None

    for maker in graph.nodes:
        module = module_of(maker)
        if module is None or not _is_maker(module):
            continue
        tensor, has_pool = maker, False
        while len(tensor.users) == 1 and _passes(next(iter(tensor.users)), tensor, modules):
            tensor = next(iter(tensor.users))
            has_pool |= tensor.op == "call_module" and isinstance(modules[str(tensor.target)], _POOLS)
        readers = [module_of(node) if node.args == (tensor,) and not node.kwargs else None for node in tensor.users]
        if readers and all(each is not None and _fits(module, each, has_pool=has_pool) for each in readers):
            yield Between(str(maker.target), tuple(str(node.target) for node in tensor.users))


def _is_convolution(module: nn.Module) -> TypeGuard[nn.Conv1d | nn.Conv2d | nn.Conv3d]:
    return isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) and runs_as_matmul(type(module))


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and runs_as_matmul(type(module))


def _is_maker(module: nn.Module) -> bool:
    if isinstance(module, nn.LayerNorm):
        return len(module.normalized_shape) == 1 and module.weight is not None
    if isinstance(module, _BatchNorm | nn.GroupNorm):
        return module.weight is not None
    return _is_convolution(module) or _is_linear(module)


def _passes(node: fx.Node, tensor: fx.Node, modules: Mapping[str, nn.Module]) -> bool:
    """Return whether a node computes a function with ``f(s * x) = s * f(x)`` of only this tensor."""
    if not node.args or node.args[0] is not tensor:
        return False
    if node.op == "call_function":
        return node.target in _FUNCTIONS
    if node.op == "call_method":
        return node.target in _METHODS
    if node.op != "call_module":
        return False
    module = modules[str(node.target)]
    return type(module) in (*_HOMOGENEOUS, *_POOLS) and not _has_hooks(module)


def _has_hooks(module: nn.Module) -> bool:
    """Return whether a module has forward hooks, which may change data, and which a trace does not show."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _fits(maker: nn.Module, reader: nn.Module, *, has_pool: bool) -> bool:
    """Return whether the channels of the maker are the input channels of the reader.

    A BatchNorm1d has its channels on axis 1, which is the last axis for inputs with two axes only; ``choose_factors``
    checks this.
    """
    weight = maker.weight
    if not isinstance(weight, Tensor):
        return False
    if isinstance(reader, nn.Linear):
        is_last_axis = isinstance(maker, nn.Linear | nn.LayerNorm | nn.BatchNorm1d) and not has_pool
        return runs_as_matmul(type(reader)) and is_last_axis and len(weight) == reader.in_features
    is_first_axis = not isinstance(maker, nn.Linear | nn.LayerNorm)
    return _is_convolution(reader) and is_first_axis and len(weight) == reader.in_channels


def channel_axes(model: nn.Module, tensors: Iterable[Between]) -> dict[str, int]:
    """Return the channel axis of each reader's input, by the name of the reader's input quantizer."""
    axes = {}
    for name in {name for each in tensors for name in each.readers}:
        layer = model.get_submodule(name)
        if isinstance(layer, QuantizedMatmul) and _has_one_scale(layer):
            axes[f"{name}.{INPUT}"] = 1 - layer.weight.ndim
    return axes


def _has_one_scale(layer: QuantizedMatmul) -> bool:
    quantizer = layer.quantizer(INPUT)
    if quantizer is None or isinstance(quantizer.mode, PerBatch):
        return False
    return isinstance(quantizer.spec.granularity, PerTensor) and layer.quantizer("weight_quantizer") is not None


class _Probe:
    """Measures the error at the outputs of the readers of one tensor."""

    def __init__(self, model: nn.Module, between: Between, ranges: ActivationRanges) -> None:
        self.between = between
        self.layers: dict[str, QuantizedMatmul] = {}
        for name in between.readers:
            layer = model.get_submodule(name)
            assert isinstance(layer, QuantizedMatmul)  # noqa: S101 - channel_axes has only such layers
            self.layers[f"{name}.{INPUT}"] = layer
        self.lo, self.hi, self.values_per_channel = ranges.channel_range(next(iter(self.layers)))
        self.largest = np.maximum(-self.lo, self.hi).astype(np.float64)
        self.errors: dict[float, float] = {}  # by strength; 0 is the error without equalization
        self._maker = model.get_submodule(between.maker)
        self._weights: dict[str, Tensor] = {}
        self._factors: Array = np.ones(0)

    @property
    def is_usable(self) -> bool:
        sizes = {layer.weight.shape[1] * _groups(layer) for layer in self.layers.values()}
        return (
            self.values_per_channel >= MIN_CHANNEL_VALUES and bool(self.largest.any()) and sizes == {self.largest.size}
        )

    def start(self, strength: float, observer: ObserverSpec | None) -> None:
        """Quantize the weights for a strength."""
        self.errors[strength] = 0.0
        self._factors = equalization_factors(self.largest, strength) if strength else np.ones_like(self.largest)
        for name, layer in self.layers.items():
            quantizer = layer.weight_quantizer_of("weight")
            weight = on_cpu(multiplied(_folded_weight(layer), self._factors, _groups(layer)))
            params = observer_spec_for(quantizer, observer).params_of(to_array(weight), quantizer.spec)
            self._weights[name] = eager.fake_quantize(weight, params).to(layer.weight.device)

    def measure(self, name: str, quantizer: FakeQuantize, x: Tensor, strength: float) -> None:
        """Add the error of a reader's output for its input x."""
        layer = self.layers[name]
        if isinstance(self._maker, nn.BatchNorm1d) and layer.weight.ndim == 2 and x.ndim != 2:
            self.errors[strength] = float("nan")  # the channels are not on the last axis
            return
        factors = torch.from_numpy(self._factors.astype(np.float32)).to(x)
        scaled = on_cpu(x / factors.reshape(-1, *(1,) * (layer.weight.ndim - 2))).contiguous()
        lo, hi = float((self.lo / self._factors).min()), float((self.hi / self._factors).max())
        params = QuantParams.from_range(quantizer.spec, lo, hi, dtype="float32")
        quantized = eager.fake_quantize(scaled, params).to(x)
        expected = _output(layer, x, _folded_weight(layer))
        error = expected - _output(layer, quantized, self._weights[name])
        power = float(expected.double().square().sum())
        self.errors[strength] += float(error.double().square().sum()) / power if power else 0.0

    def best(self) -> Equalized | None:
        """Return the factors with the least error, or None if the gain is too small."""
        baseline = self.errors[0.0]
        strength = min(STRENGTHS, key=self.errors.__getitem__)
        if not baseline or not self.errors[strength] < MAX_REMAINING_NOISE * baseline:
            return None
        factors = equalization_factors(self.largest, strength)
        return Equalized(self.between, factors, strength, self.errors[strength] / baseline)


def _groups(layer: nn.Module) -> int:
    return operator.index(getattr(layer, "groups", 1))


def _output(layer: QuantizedMatmul, x: Tensor, weight: Tensor) -> Tensor:
    """Compute the output of a layer without its bias."""
    assert layer.kind.matmul is not None  # noqa: S101 - a QuantizedMatmul has one
    return layer.kind.matmul(layer).forward(layer.padded(x) if weight.ndim > 2 else x, weight, None)


def _folded_weight(layer: QuantizedMatmul) -> Tensor:
    weight = layer.weight.detach()
    return weight if layer.fold is None else layer.fold.with_gain(weight)


def multiplied(weight: Tensor, factors: Array, groups: int) -> Tensor:
    """Multiply the input channels of a weight by the factors."""
    rows = torch.from_numpy(factors.astype(np.float32)).to(weight).reshape(groups, 1, -1)
    spread = rows.expand(groups, len(weight) // groups, weight.shape[1]).reshape(len(weight), weight.shape[1])
    return weight * spread.reshape(*spread.shape, *(1,) * (weight.ndim - 2))


def choose_factors(
    model: nn.Module,
    tensors: Iterable[Between],
    ranges: ActivationRanges,
    run: Callable[[], object],
    observer: ObserverSpec | None = None,
) -> list[Equalized]:
    """Choose the factors of each tensor that reduce the error at the outputs of its readers.

    Args:
        model: a prepared model.
        tensors: the tensors that can be equalized.
        ranges: the observed ranges of their channels.
        run: function that runs the model on samples.
        observer: observer for weights whose rule sets none.
    """
    # The range of an observer that the user chose cannot be divided by factors.
    usable = channel_axes(model, tensors).keys() & set(ranges.searched)
    candidates = (each for each in tensors if all(f"{name}.{INPUT}" in usable for name in each.readers))
    probes = [probe for probe in (_Probe(model, each, ranges) for each in candidates) if probe.is_usable]
    if not probes:
        return []
    by_reader = {name: probe for probe in probes for name in probe.layers}
    quantizers = {name: ranges.quantizers[name] for name in by_reader}
    for strength in (0.0, *STRENGTHS):
        for probe in probes:
            probe.start(strength, observer)

        def measure(name: str, quantizer: FakeQuantize, x: Tensor, strength: float = strength) -> None:
            by_reader[name].measure(name, quantizer, x, strength)

        with passing(model), watching_inputs(quantizers, measure):
            run()
    return [best for probe in probes if (best := probe.best()) is not None]


def apply(model: nn.Module, equalized: Sequence[Equalized], changes: ParameterChanges) -> set[nn.Module]:
    """Write factors into the parameters of a model, and return the changed modules."""
    changed: set[nn.Module] = set()
    for each in equalized:
        maker = model.get_submodule(each.between.maker)
        changed.add(maker)
        for name in ("weight", "bias"):
            tensor = maker._parameters[name]
            if tensor is not None:
                inverse = torch.from_numpy((1 / each.factors).astype(np.float32)).to(tensor)
                changes.set(maker, name, tensor * inverse.reshape(-1, *(1,) * (tensor.ndim - 1)))
        for name in each.between.readers:
            reader = model.get_submodule(name)
            weight = reader._parameters["weight"]
            assert weight is not None  # noqa: S101 - _owns_parameters checks it
            changes.set(reader, "weight", multiplied(weight, each.factors, _groups(reader)))
            changed.add(reader)
    return changed
