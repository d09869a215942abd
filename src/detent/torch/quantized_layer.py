"""Quantized layers: how a prepared layer computes.

A prepared module keeps its identity, its parameters and its place. Only its class changes, to one that derives from its
own class and from one of these two, and changes back with ``qt.unprepare``:

================ =====================================================================================================
QuantizedProduct a layer that is one product (Linear, Conv): quantizes x and w, multiplies (``layers.product``)
QuantizedLayer   any other layer: its own forward, which finds quantized weights where it looks for its weights
================ =====================================================================================================
"""

import inspect
import threading
import warnings
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from detent.errors import UnsupportedError
from detent.kernels import checksum
from detent.ops import quantize
from detent.spec import QuantSpec
from detent.ste import Identity
from detent.tensor import QuantizedTensor
from detent.torch.arrays import full_tensor, is_distributed, is_plain, on_cpu, order_of, to_array, to_tensor
from detent.torch.batchnorm import Fold, QuantizedNorm, running_weight
from detent.torch.layers import LayerKind, Operand, QuantizedWeight, kind_of, product, runs_as_product
from detent.torch.quantizer import FakeQuantize, Quantized

__all__ = ["QuantizedLayer", "QuantizedProduct", "WeightCache", "WeightKey", "quantized_class"]

FLOAT = Operand(None, Identity())
FROZEN = (
    "the model is frozen: layers with a folded batch norm compute with constants, and their weights no longer train; "
    "to train on, qt.unprepare and qt.prepare it again"
)
_ANY_ORDER = QuantSpec("int8")


class QuantizedLayer(nn.Module):
    """What every prepared layer is, beside its own class.

    Inside its forward, and in no other place, the names of its weights give quantized values.

    >>> import detent.torch as qt
    >>> layer = qt.prepare(nn.Sequential(nn.Bilinear(2, 2, 3)), "w8a8")[0]
    >>> isinstance(layer, QuantizedLayer), layer.weight is layer._parameters["weight"]
    (True, True)
    >>> layer.exported_weight("weight").shape
    (3, 2, 2)
    """

    float_class: ClassVar[type[nn.Module]]
    kind: ClassVar[LayerKind]
    input_arguments: ClassVar[tuple[str, ...]]
    _forwards = 0  # in progress, in all threads; see _count_forwards

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The layer's own forward with quantized weights and inputs."""
        layers = [self, *(child for child in self.children() if isinstance(child, QuantizedLayer))]
        for name in self.input_arguments[len(args) :]:  # given by keyword
            if name not in kwargs:
                break
            args = (*args, kwargs.pop(name))
        inputs = self._quantized_inputs(args)
        _count_forwards(layers, 1)
        try:
            result = self.float_class.forward(self, *inputs, **kwargs)
        finally:
            _count_forwards(layers, -1)
        return self._quantized_output(result)

    def quantizer(self, name: str) -> FakeQuantize | None:
        """The quantizer of that name, where there is one and it is switched on."""
        module = self._modules.get(name)
        return module if isinstance(module, FakeQuantize) and module.enabled else None

    def _quantized_inputs(self, args: tuple[Any, ...]) -> list[Any]:
        """The arguments, float data quantized; a tensor that comes twice is quantized once."""
        names, data, quantized = self.kind.input_names(), list(args), {}
        for i in range(min(self.kind.inputs, len(data)) if names else 0):
            x, quantizer = data[i], self.quantizer(names[min(i, len(names) - 1)])
            if quantizer is None or not isinstance(x, Tensor) or not x.is_floating_point():
                continue
            if id(x) not in quantized:
                quantized[id(x)] = quantizer(x)
            data[i] = quantized[id(x)]
        return data

    def _quantized_output(self, result: Any) -> Any:
        quantizer = self.quantizer("output_quantizer")
        if quantizer is None:
            return result
        return (quantizer(result[0]), *result[1:]) if isinstance(result, tuple) else quantizer(result)

    def weight_in_forward(self, name: str) -> Tensor:
        """What the name of a weight gives: inside forward its quantized values, else the parameter."""
        parameter = self._parameter(name)
        quantizer = self.quantizer(f"{name}_quantizer") if self._forwards else None
        return parameter if quantizer is None or quantizer.is_passing else quantizer(parameter)

    def weight_quantizer_of(self, name: str) -> FakeQuantize:
        """The quantizer of a weight, switched on or not."""
        module = self._modules.get(f"{name}_quantizer")
        if not isinstance(module, FakeQuantize):
            raise UnsupportedError(f"{self.float_class.__name__} has no quantized {name}")
        return module

    def float_weight(self, name: str) -> Tensor:
        """The float data whose codes are exported."""
        return full_tensor(self._parameter(name).detach())

    def exported_weight(self, name: str) -> QuantizedTensor:
        """A weight as it is exported."""
        data, quantizer = on_cpu(self.float_weight(name)), self.weight_quantizer_of(name)
        return quantize(to_array(data), quantizer.values_for(data).params)

    def _parameter(self, name: str) -> Tensor:
        parameter: Tensor = self._parameters[name]  # type: ignore[assignment]  # only names of weights come here
        return parameter

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        return _blank, (self.float_class,), self.__getstate__()


_counter_lock = threading.Lock()


def _count_forwards(layers: list[QuantizedLayer], change: int) -> None:
    """Note that forwards of these layers begin (1) or end (-1); several threads may run one layer at a time."""
    if torch.compiler.is_compiling():  # which cannot trace a lock, and needs none
        for layer in layers:
            layer._forwards += change
        return
    _refuse_jit()
    with _counter_lock:
        for layer in layers:
            layer._forwards += change


def _refuse_jit() -> None:
    if torch.jit._trace.is_tracing():
        raise UnsupportedError("torch.jit cannot follow prepared layers: use torch.compile or torch.export")


class QuantizedProduct(QuantizedLayer):
    """A prepared layer that is one product.

    Its weight, with g, f and fold as ``batchnorm`` defines them::

        running weight    fq(w)             without a batch norm, and where the scales absorb its gain
                          fq(w * f) / f     before a batch norm
        exported weight   fq(w)             without a batch norm
                          fq(w) * g         where the scales absorb the gain: codes * sign(g), scale * |g|
                          fq(w * g)         else; without a quantizer w * g

    A forward uses the running weight, and once the batch norm is fused, after ``qt.freeze``, the exported one.

    Attributes:
        fold: the batch norm after it.

    >>> import detent.torch as qt
    >>> layer = qt.prepare(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), "w8a8")[0]
    >>> torch.equal(layer.float_weight("weight"), layer.fold.with_gain(layer.weight))
    True
    """

    weight: Tensor
    bias: Tensor | None
    fold: Fold | None = None
    _cache: "WeightCache | None" = None

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the float layer's name for it
        """The product of the quantized input and the quantized weight."""
        x = input
        _refuse_jit()
        if self.fold is not None and self.weight.ndim == 2 and x.ndim != 2:
            self.fold.unfuse()  # it works along another axis than the layer's last
            self.fold = None
        inputs, weights = self.quantizer("input_quantizer"), self.quantizer("weight_quantizer")
        if weights is not None and weights.is_passing:
            weights = None
        if inputs is not None and inputs.is_passing:
            inputs(x)
            inputs = None
        if inputs is None and weights is None and not self._is_fused:
            y: Tensor = self.float_class.forward(self, x)
        else:
            y = self._product(x, inputs, weights)
        result: Tensor = self._quantized_output(y)
        return result

    @property
    def _is_fused(self) -> bool:
        return self.fold is not None and self.fold.is_fused

    def _product(self, x: Tensor, inputs: FakeQuantize | None, weights: FakeQuantize | None) -> Tensor:
        if self.kind.product is None:
            raise UnsupportedError(f"{self.float_class.__name__} is no product")
        kind = self.kind.product(self)
        x = self._padded(x)
        unbatched = self.weight.ndim > 2 and x.ndim == self.weight.ndim - 1
        x = x.unsqueeze(0) if unbatched else x
        bias = self.fold.bias(self.bias) if self.fold is not None and self.fold.is_fused else self.bias
        if is_plain(x) and is_plain(self.weight):
            operand = _operand(inputs, x)
            weight, quantized = self._native_weight(weights)
            y = product(kind, x, weight, bias, operand, quantized)
        else:
            y = kind.forward(x if inputs is None else inputs(x), self._traced_weight(weights), bias)
        return y.squeeze(0) if unbatched else y

    def _padded(self, x: Tensor) -> Tensor:
        """The input with the border that the product does not know: any but zeros, and what "same" comes to."""
        mode = getattr(self, "padding_mode", "zeros")
        if mode == "zeros" and not isinstance(getattr(self, "padding", None), str):
            return x
        border: list[int] = self._reversed_padding_repeated_twice  # type: ignore[assignment]  # of every convolution
        return F.pad(x, border, mode="constant" if mode == "zeros" else mode)

    # The weight that a forward multiplies with

    def _native_weight(self, quantizer: FakeQuantize | None) -> tuple[Tensor, QuantizedWeight]:
        """The tensor that receives the gradient, and the weight that enters the product."""
        fold, weight = self.fold, self.weight
        if fold is None or not fold.is_fused:
            return weight, self._running_weight(quantizer)
        if self.training and torch.is_grad_enabled() and weight.requires_grad:
            warnings.warn(FROZEN, stacklevel=3)
        constant = self._exported_constant(quantizer, fold)
        return constant.tensor, constant

    def _traced_weight(self, quantizer: FakeQuantize | None) -> Tensor:
        """The weight that enters the product, in torch operations."""
        weight, fold = self.weight, self.fold
        if fold is not None and fold.is_fused:
            if quantizer is None:
                return fold.with_gain(weight)
            return fold.with_gain(quantizer(weight)) if quantizer.absorbs_gain else quantizer(fold.with_gain(weight))
        return weight if quantizer is None else running_weight(weight, self._factor(quantizer), quantizer)

    def _factor(self, quantizer: FakeQuantize) -> Tensor | None:
        return None if self.fold is None or quantizer.absorbs_gain else self.fold.factor(self.weight)

    def _running_weight(self, quantizer: FakeQuantize | None) -> QuantizedWeight:
        """The running weight, from the cache where nothing has changed."""
        weight = self.weight
        if quantizer is None:
            return QuantizedWeight(FLOAT, None, weight.detach(), keep=True)
        step = quantizer.next_step()

        def make(keep: bool) -> QuantizedWeight:
            made: list[Quantized] = []

            def fake_quantize(data: Tensor) -> Tensor:
                made.append(quantizer.quantize(data, step, None if keep else "weight"))
                return made[0].tensor

            factor = self._factor(quantizer)
            tensor = running_weight(weight.detach(), factor, fake_quantize, in_place=True)
            return QuantizedWeight(Operand(made[0].values, made[0].ste, step), factor, tensor)

        if quantizer.is_stochastic or not quantizer.is_ready:  # never the same twice, or about to change
            return make(False)
        quantized = self._cached(quantizer, None if quantizer.absorbs_gain else self.fold, make)
        if not (quantizer.is_learned and quantized.keep):
            return quantized
        # What is kept has the scale of another forward's graph.
        return quantized._replace(operand=Operand(quantizer.values_for(weight), quantizer.ste, step))

    def _exported_constant(self, quantizer: FakeQuantize | None, fold: Fold) -> QuantizedWeight:
        """The exported weight, as a constant."""

        def make(_: bool) -> QuantizedWeight:
            if quantizer is None:
                return QuantizedWeight(FLOAT, None, fold.with_gain(self.weight.detach()), keep=True)
            return QuantizedWeight(FLOAT, None, to_tensor(self.exported_weight("weight").dequantize()), keep=True)

        return self._cached(quantizer, fold, make)

    def _cached(
        self, quantizer: FakeQuantize | None, fold: Fold | None, make: Callable[[bool], QuantizedWeight]
    ) -> QuantizedWeight:
        weight = self.weight
        # Sharded models are refilled unseen and not to be kept whole; tensors of inference have no version.
        if is_distributed() or weight.is_inference():
            return make(False)
        if self._cache is None:
            self._cache = WeightCache()
        key = WeightKey.of(weight, quantizer, fold)
        training = torch.is_grad_enabled() and weight.requires_grad and not key.is_fused
        return self._cache.find(key, weight, make, training=training)

    # The weight that is exported

    def float_weight(self, name: str) -> Tensor:
        """The float data whose codes are exported: ``w * g``, or ``w`` where the scales absorb the gain."""
        weight, fold = super().float_weight(name), self.fold
        return weight if fold is None or self.weight_quantizer_of(name).absorbs_gain else fold.with_gain(weight)

    def exported_weight(self, name: str) -> QuantizedTensor:
        """The weight as it is exported, with the gain of a batch norm in it."""
        quantized, fold = super().exported_weight(name), self.fold
        if fold is None or not self.weight_quantizer_of(name).absorbs_gain:
            return quantized
        return fold.codes_with_gain(quantized)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_cache": None}


def _operand(quantizer: FakeQuantize | None, x: Tensor) -> Operand:
    if quantizer is None or not x.numel():
        return FLOAT
    return Operand(quantizer.values_for(x), quantizer.ste, quantizer.next_step())


class WeightKey(NamedTuple):
    """What a quantized weight depends on, as far as it can be told without reading the weight.

    Attributes:
        address: of the weight's memory; another one when the parameter is replaced or moved.
        version: PyTorch's counter of writes to the weight, such as an optimizer's.
        quantizer: changes with the quantizer's parameters.
        fold: changes with the gain of the batch norm.
        is_fused: whether the running or the exported weight was made.
    """

    address: int
    version: int
    quantizer: object
    fold: object
    is_fused: bool

    @staticmethod
    def of(weight: Tensor, quantizer: FakeQuantize | None, fold: Fold | None) -> "WeightKey":
        """The key of the weight as it is now."""
        return WeightKey(
            weight.data_ptr(),
            weight._version,
            None if quantizer is None else quantizer.version(),
            None if fold is None else fold.version(),
            fold is not None and fold.is_fused,
        )


class WeightCache:
    """At most one quantized weight, kept where it is used more than once and never when it is out of date.

    In evaluation it is kept. In training weights change with every step, and a copy would take as much memory as they
    do: it is kept only where the same weight comes twice, as in gradient accumulation, and as long as that goes on.

    A weight that is kept is used again if its ``WeightKey`` is the same, and the weight has the same checksum: a
    tensor's version does not tell of writes through ``.data``, nor of trainers that refill sharded weights in place.
    The checksum costs a fraction of quantizing.

    >>> import torch
    >>> cache, weight = WeightCache(), torch.ones(2)
    >>> cache.find("key", weight, lambda keep: QuantizedWeight(FLOAT, None, torch.ones(2)), training=False).keep
    True
    >>> cache.find("key", weight, lambda keep: 1 / 0, training=False).tensor
    tensor([1., 1.])
    """

    def __init__(self) -> None:
        self._key: object = None  # of the last weight asked for
        self._checksum = 0
        self._kept: QuantizedWeight | None = None
        self._repeats = False  # whether the same weight came twice, before it changed last

    def find(
        self, key: object, weight: Tensor, make: Callable[[bool], QuantizedWeight], *, training: bool
    ) -> QuantizedWeight:
        """The weight kept under that key, or a new one.

        Args:
            key: a ``WeightKey``.
            weight: the float weight.
            make: makes the quantized one; called with True if it will be kept, and then in memory of its own.
            training: weights are expected to change.
        """
        same = key == self._key
        if same:
            self._repeats = True
            if self._kept is not None and self._checksum == _checksum(weight):
                return self._kept
        keep = not training or self._repeats
        self._repeats, self._key, self._kept = same, key, None  # nothing is kept if making it fails
        quantized = make(keep)
        if keep:
            self._kept = quantized = quantized._replace(keep=True)
            self._checksum = _checksum(weight)
        return quantized


def _checksum(weight: Tensor) -> int:
    return checksum(to_array(order_of(weight, _ANY_ORDER).lay(weight.detach())))


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
    attributes: dict[str, Any] = {"float_class": layer, "__module__": layer.__module__, "__doc__": layer.__doc__}
    if issubclass(layer, _BatchNorm):
        attributes |= {"fused": False, "frozen": False, "__reduce_ex__": QuantizedLayer.__reduce_ex__}
        return type(name, (QuantizedNorm, layer), attributes)
    kind = kind_of(layer)
    if kind is None:
        raise UnsupportedError(f"{layer.__name__} is not registered: qt.register_layer({layer.__name__}, weights=...)")
    attributes["kind"] = kind
    attributes["input_arguments"] = tuple(inspect.signature(layer.forward).parameters)[1 : 1 + kind.inputs]
    if runs_as_product(layer):
        return type(name, (QuantizedProduct, layer), attributes)
    weights = {weight: _weight_property(weight) for weight in kind.weights}
    if kind.names is not None:
        weights["_flat_weights"] = property(_get_flat_weights, _set_flat_weights)
    return type(name, (QuantizedLayer, layer), {**attributes, **weights})


def _weight_property(name: str) -> property:
    return property(lambda layer: layer.weight_in_forward(name))


def _get_flat_weights(layer: Any) -> list[Tensor]:
    flat: list[Tensor] = layer.__dict__["_flat_weights"]
    if not layer._forwards:
        return flat
    quantized = set(layer.kind.weight_names(layer))
    pairs = zip(layer._flat_weights_names, flat, strict=True)
    return [layer.weight_in_forward(name) if name in quantized else part for name, part in pairs]


def _set_flat_weights(layer: Any, weights: list[Tensor]) -> None:
    layer.__dict__["_flat_weights"] = weights


def _blank(layer: type[nn.Module]) -> nn.Module:
    """An empty module of the quantized class, for copies and pickles."""
    quantized = quantized_class(layer)
    return quantized.__new__(quantized)
