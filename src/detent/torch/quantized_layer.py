"""Running: how a prepared layer computes.

A prepared module keeps its identity, its parameters and its place; only its class changes, to one that derives from its
own class and from ``QuantizedLayer``, and changes back with ``qt.unprepare``. Layers that are one product run as such
(``products``); all others run their own forward, which finds quantized weights where it looks for its weights.

Cache: the quantized weight of a layer, kept where it is used more than once and never when it is out of date.

In evaluation it is kept. In training weights change with every step, and a copy would take as much memory as they do:
it is kept only where the same weight comes twice, as in gradient accumulation, and then as long as that goes on.

A tensor's version does not tell of every change: not of writes through ``.data``, nor of trainers that refill sharded
weights in place. So what is kept has a checksum of the weight it was made from, which costs a fraction of making it.
"""

import inspect
import threading
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from detent.errors import UnsupportedError
from detent.kernels import checksum
from detent.ops import quantize
from detent.params import QuantParams
from detent.spec import QuantSpec
from detent.ste import Identity
from detent.tensor import QuantizedTensor
from detent.torch.arrays import full_tensor, is_distributed, is_plain, on_cpu, order_of, to_array, to_tensor
from detent.torch.batchnorm import Fold, QuantizedNorm
from detent.torch.layers import LayerKind, Operand, Weight, kind_of, product, runs_as_product
from detent.torch.quantizer import FakeQuantize

__all__ = ["QuantizedLayer", "QuantizedProduct", "WeightCache", "quantized_class"]

_ANY_ORDER = QuantSpec("int8")


class WeightCache:
    """At most one quantized weight.

    >>> import torch
    >>> cache, weight = WeightCache(), torch.ones(2)
    >>> made = Weight(None, None, torch.ones(2))
    >>> cache.find("key", weight, lambda keep: made, training=False).keep
    True
    >>> cache.find("key", weight, lambda keep: 1 / 0, training=False) is not None
    True
    """

    def __init__(self) -> None:
        self._key: object = None  # of the last weight asked for
        self._sum = 0
        self._known: Weight | None = None  # and what was made of it, where that is kept
        self._repeats = False  # whether the same weight came twice, before it changed last

    def find(self, key: object, weight: Tensor, make: Callable[[bool], Weight], *, training: bool) -> Weight:
        """The weight kept under that key, or a new one.

        Args:
            key: what the quantized weight depends on, as far as it can be told without reading it.
            weight: what it is made from.
            make: makes it, in memory of its own if it is told that it will be kept.
            training: weights are expected to change.
        """
        again, known = key == self._key, self._known
        if again:
            self._repeats = True
            if known is not None and self._sum == _sum(weight):
                return known
        keep = not training or self._repeats
        self._repeats, self._key, self._known = again, key, None  # nothing is kept if making it fails
        made = make(keep)
        if keep:
            made, self._sum = made._replace(keep=True), _sum(weight)
            self._known = made
        return made


def _sum(weight: Tensor) -> int:
    return checksum(to_array(order_of(weight, _ANY_ORDER).lay(weight.detach())))


FLOAT = Operand(None, Identity())
FROZEN = (
    "the model is frozen: layers with a folded batch norm compute with constants, and their weights no longer train; "
    "to train on, qt.unprepare and qt.prepare it again"
)


class QuantizedLayer(nn.Module):
    """What every prepared layer is, beside its own class.

    >>> import detent.torch as qt
    >>> layer = qt.prepare(nn.Sequential(nn.Bilinear(2, 2, 3)), "w8a8")[0]
    >>> isinstance(layer, QuantizedLayer), layer.quantizer("output_quantizer")
    (True, None)
    >>> layer.own_quantizer("weight") is layer.weight_quantizer, layer.running_weight("weight") is layer.weight
    (True, True)
    >>> torch.equal(layer.source("weight"), layer.weight), layer.shipped("weight").shape
    (True, (3, 2, 2))
    """

    float_class: ClassVar[type[nn.Module]]
    kind: ClassVar[LayerKind]
    input_arguments: ClassVar[tuple[str, ...]]
    _running = 0  # how many forwards are in progress, of all threads

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The layer's own forward with quantized weights and inputs."""
        parts = [self, *(child for child in self.children() if isinstance(child, QuantizedLayer))]
        for name in self.input_arguments[len(args) :]:  # given by keyword
            if name not in kwargs:
                break
            args = (*args, kwargs.pop(name))
        quantized = self._quantized_inputs(args)
        _count(parts, 1)
        try:
            result = self.float_class.forward(self, *quantized, **kwargs)
        finally:
            _count(parts, -1)
        return self._quantized_output(result)

    def quantizer(self, name: str) -> FakeQuantize | None:
        """The quantizer of that name, where there is one and it is switched on."""
        found = self._modules.get(name)
        return found if isinstance(found, FakeQuantize) and found.enabled else None

    def _quantized_inputs(self, args: tuple[Any, ...]) -> list[Any]:
        names, data, seen = self.kind.input_names(), list(args), {}
        for i in range(min(self.kind.inputs, len(data)) if names else 0):
            x, quantizer = data[i], self.quantizer(names[min(i, len(names) - 1)])
            if quantizer is None or not isinstance(x, Tensor) or not x.is_floating_point():
                continue
            if id(x) not in seen:
                seen[id(x)] = quantizer(x)
            data[i] = seen[id(x)]
        return data

    def _quantized_output(self, result: Any) -> Any:
        quantizer = self.quantizer("output_quantizer")
        if quantizer is None:
            return result
        return (quantizer(result[0]), *result[1:]) if isinstance(result, tuple) else quantizer(result)

    def running_weight(self, name: str) -> Tensor:
        """What is found under a weight's name: the parameter, and inside forward its quantized values."""
        parameter: Tensor = self._parameters[name]  # type: ignore[assignment]  # only names of weights come here
        quantizer = self.quantizer(f"{name}_quantizer") if self._running else None
        return parameter if quantizer is None or quantizer.is_passing else quantizer(parameter)

    def own_quantizer(self, weight: str) -> FakeQuantize:
        """The quantizer of a weight, switched on or not."""
        found = self._modules.get(f"{weight}_quantizer")
        if not isinstance(found, FakeQuantize):
            raise UnsupportedError(f"{self.float_class.__name__} has no quantized {weight}")
        return found

    def source(self, name: str) -> Tensor:
        """The data whose codes a weight's quantizer makes."""
        weight: Tensor = self._parameters[name]  # type: ignore[assignment]  # only names of weights come here
        return full_tensor(weight.detach())

    def shipped(self, name: str) -> QuantizedTensor:
        """A weight as it is shipped."""
        return _codes(self.own_quantizer(name), self.source(name))

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        return _blank, (self.float_class,), self.__getstate__()


def _refuse_tracing() -> None:
    if torch.jit._trace.is_tracing():
        raise UnsupportedError("torch.jit cannot follow prepared layers: use torch.compile or torch.export")


_counting = threading.Lock()


def _count(layers: list[QuantizedLayer], change: int) -> None:
    if torch.compiler.is_compiling():
        for layer in layers:
            layer._running += change
        return
    _refuse_tracing()
    with _counting:
        for layer in layers:
            layer._running += change


class QuantizedProduct(QuantizedLayer):
    """A prepared layer that is one product.

    Attributes:
        fold: the batch normalisation after it.

    >>> import detent.torch as qt
    >>> layer = qt.prepare(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), "w8a8")[0]
    >>> isinstance(layer, QuantizedProduct), layer.fold is None
    (True, False)
    >>> torch.equal(layer.source("weight"), layer.fold.shipped(layer.weight)), layer.shipped("weight").shape
    (True, (3, 2))
    """

    weight: Tensor
    bias: Tensor | None
    fold: Fold | None = None
    _cache: WeightCache | None = None

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the float layer's name for it
        """The product of the quantized input and the quantized weight."""
        x = input
        if self.fold is not None and self.weight.ndim == 2 and x.ndim != 2:
            self.fold.unfuse()  # it works along another axis than the layer's last
            self.fold = None
        _refuse_tracing()
        inputs, weights = self.quantizer("input_quantizer"), self.quantizer("weight_quantizer")
        if weights is not None and weights.is_passing:
            weights = None
        if inputs is not None and inputs.is_passing:
            inputs(x)
            inputs = None
        fused = self.fold is not None and self.fold.is_fused
        if inputs is None and weights is None and not fused:
            y: Tensor = self.float_class.forward(self, x)
        else:
            y = self._product(x, inputs, weights, fused=fused)
        result: Tensor = self._quantized_output(y)
        return result

    def _product(self, x: Tensor, inputs: FakeQuantize | None, weights: FakeQuantize | None, *, fused: bool) -> Tensor:
        weight, bias, fold = self.weight, self.bias, self.fold
        if self.kind.product is None:
            raise UnsupportedError(f"{self.float_class.__name__} is no product")
        kind = self.kind.product(self)
        x = self._padded(x)
        unbatched = weight.ndim > 2 and x.ndim == weight.ndim - 1
        x = x.unsqueeze(0) if unbatched else x
        if not (is_plain(x) and is_plain(weight)):
            quantized = x if inputs is None else inputs(x)
            bias = bias if fold is None or not fused else fold.bias(bias)
            y = kind.forward(quantized, self._traced_weight(weights), bias)
        elif fused and fold is not None:
            if self.training and torch.is_grad_enabled() and weight.requires_grad:
                warnings.warn(FROZEN, stacklevel=2)
            known = self._shipped_constant(weights, fold)
            y = product(kind, x, known.quantized, fold.bias(bias), _operand(inputs, x), known)
        else:
            y = product(kind, x, weight, bias, _operand(inputs, x), self._known_weight(weight, weights, fold))
        return y.squeeze(0) if unbatched else y

    def _padded(self, x: Tensor) -> Tensor:
        """The input with the border that the product does not know: any but zeros, and what "same" comes to."""
        mode = getattr(self, "padding_mode", "zeros")
        if mode == "zeros" and not isinstance(getattr(self, "padding", None), str):
            return x
        border: list[int] = self._reversed_padding_repeated_twice  # type: ignore[assignment]  # of every convolution
        return F.pad(x, border, mode="constant" if mode == "zeros" else mode)

    def _known_weight(self, weight: Tensor, quantizer: FakeQuantize | None, fold: Fold | None) -> Weight:
        """The quantized weight; what is kept of it is used where nothing has changed."""
        if quantizer is None:
            return Weight(FLOAT, None, weight.detach(), keep=True)
        if quantizer.absorbs_gain:
            fold = None
        step = quantizer.next_step()

        def make(keep: bool) -> Weight:
            factor = None if fold is None else fold.factor(weight)
            source = weight.detach() if factor is None else weight.detach() * factor
            quantized, values, ste = quantizer.quantize(source, step, None if keep else "weight")
            how = Operand(values, ste, step)
            return Weight(how, factor, quantized if factor is None else quantized.div_(factor))

        # Sharded models are refilled unseen and not to be kept whole; tensors of inference have no version; and
        # stochastic rounding is never the same twice.
        if is_distributed() or weight.is_inference() or quantizer.is_stochastic or not quantizer.is_ready:
            return make(False)
        known = self._find(weight, quantizer, fold, make)
        if not (quantizer.is_learned and known.keep):
            return known
        # What is kept has the scale of another forward's graph.
        return known._replace(how=Operand(quantizer.values_for(weight), quantizer.ste, step))

    def _find(
        self, weight: Tensor, quantizer: FakeQuantize | None, fold: Fold | None, make: Callable[[bool], Weight]
    ) -> Weight:
        if self._cache is None:
            self._cache = WeightCache()
        version = None if quantizer is None else quantizer.version()
        fused = fold is not None and fold.is_fused
        key = (weight.data_ptr(), weight._version, version, None if fold is None else fold.key(), fused)
        training = torch.is_grad_enabled() and weight.requires_grad and not fused
        return self._cache.find(key, weight, make, training=training)

    def _shipped_constant(self, quantizer: FakeQuantize | None, fold: Fold) -> Weight:
        """The weight as it is shipped, normalisation included."""

        def make(_: bool) -> Weight:
            if quantizer is None:
                return Weight(FLOAT, None, fold.shipped(self.weight.detach()), keep=True)
            return Weight(FLOAT, None, to_tensor(self.shipped("weight").dequantize()), keep=True)

        weight = self.weight
        return make(True) if is_distributed() or weight.is_inference() else self._find(weight, quantizer, fold, make)

    def source(self, name: str) -> Tensor:
        """The weight, with a batch normalisation's factor in it unless that is the scale's business."""
        weight, fold = super().source(name), self.fold
        return weight if fold is None or self.own_quantizer(name).absorbs_gain else fold.shipped(weight)

    def shipped(self, name: str) -> QuantizedTensor:
        """The weight as it is shipped, with a batch normalisation's factor in it."""
        own, quantizer, fold = super().shipped(name), self.own_quantizer(name), self.fold
        if fold is None or not quantizer.absorbs_gain:
            return own
        gain = to_array(on_cpu(fold.gain())).astype(own.params.scale.dtype)
        scale = np.where(gain == 0, own.params.scale, own.params.scale * np.abs(gain))
        floor = np.finfo(scale.dtype).smallest_normal
        params = QuantParams(quantizer.spec, np.maximum(scale, floor))
        signs = np.sign(gain).astype(own.codes.dtype).reshape(-1, *(1,) * (own.codes.ndim - 1))
        return QuantizedTensor.from_codes(own.codes * signs, params, own.dtype)

    def _traced_weight(self, quantizer: FakeQuantize | None) -> Tensor:
        """The weight that enters the product, in torch operations."""
        weight, fold = self.weight, self.fold
        if quantizer is None:
            return weight if fold is None or not fold.is_fused else fold.shipped(weight)
        if fold is None or (quantizer.absorbs_gain and not fold.is_fused):
            quantized: Tensor = quantizer(weight)
            return quantized
        if quantizer.absorbs_gain:
            return fold.shipped(quantizer(weight))
        if fold.is_fused:
            shipped: Tensor = quantizer(fold.shipped(weight))
            return shipped
        factor = fold.factor(weight)
        divided: Tensor = quantizer(weight * factor) / factor
        return divided

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_cache": None}


def _operand(quantizer: FakeQuantize | None, x: Tensor) -> Operand:
    if quantizer is None or not x.numel():
        return FLOAT
    return Operand(quantizer.values_for(x), quantizer.ste, quantizer.next_step())


def _codes(quantizer: FakeQuantize, weight: Tensor) -> QuantizedTensor:
    source = on_cpu(weight)
    return quantize(to_array(source), quantizer.values_for(source).params)


_CLASSES: dict[tuple[type[nn.Module], LayerKind | None], type[nn.Module]] = {}


def quantized_class(layer: type[nn.Module]) -> type[nn.Module]:
    """The class of a prepared module of that class.

    >>> [each.__name__ for each in quantized_class(nn.Linear).__mro__[:4]]
    ['QuantizedLinear', 'QuantizedProduct', 'QuantizedLayer', 'Linear']
    """
    key = layer, kind_of(layer)
    if key not in _CLASSES:
        _CLASSES[key] = _make_class(layer)
    return _CLASSES[key]


def _make_class(layer: type[nn.Module]) -> type[nn.Module]:
    name = f"Quantized{layer.__name__}"
    about: dict[str, Any] = {"float_class": layer, "__module__": layer.__module__, "__doc__": layer.__doc__}
    if issubclass(layer, _BatchNorm):
        about |= {"fused": False, "frozen": False, "__reduce_ex__": QuantizedLayer.__reduce_ex__}
        return type(name, (QuantizedNorm, layer), about)
    kind = kind_of(layer)
    if kind is None:
        raise UnsupportedError(f"{layer.__name__} is not registered: qt.register_layer({layer.__name__}, weights=...)")
    about["kind"] = kind
    about["input_arguments"] = tuple(inspect.signature(layer.forward).parameters)[1 : 1 + kind.inputs]
    if runs_as_product(layer):
        return type(name, (QuantizedProduct, layer), about)
    found = {weight: _weight_property(weight) for weight in kind.weights}
    if kind.names is not None:
        found["_flat_weights"] = property(_get_flat_weights, _set_flat_weights)
    return type(name, (QuantizedLayer, layer), {**about, **found})


def _weight_property(name: str) -> property:
    return property(lambda layer: layer.running_weight(name))


def _get_flat_weights(layer: Any) -> list[Tensor]:
    flat: list[Tensor] = layer.__dict__["_flat_weights"]
    if not layer._running:
        return flat
    quantized = set(layer.kind.weight_names(layer))
    pairs = zip(layer._flat_weights_names, flat, strict=True)
    return [layer.running_weight(name) if name in quantized else part for name, part in pairs]


def _set_flat_weights(layer: Any, weights: list[Tensor]) -> None:
    layer.__dict__["_flat_weights"] = weights


def _blank(layer: type[nn.Module]) -> nn.Module:
    """An empty module of the quantized class, for copies and pickles."""
    made = quantized_class(layer)
    return made.__new__(made)
