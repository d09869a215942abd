"""Quantized layers: the forward pass of prepared layers.

``qt.prepare`` changes only the class of a module; the module object and its parameters stay the same. The new class
derives from the module's own class and from one of these two classes:

================ =====================================================================================================
QuantizedMatmul  a layer that is one matmul or convolution (Linear, Conv): quantizes x and w (``layers.matmul``)
QuantizedLayer   any other layer: runs its own forward, in which weight attributes return quantized values
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
from detent.torch.batchnorm import Fold, QuantizedNorm, unfused_weight
from detent.torch.computed_weights import current_weight, weight_for_forward
from detent.torch.layers import LayerKind, Operand, QuantizedWeight, kind_of, matmul, runs_as_matmul
from detent.torch.operator import Values, apply_traced
from detent.torch.quantizer import FakeQuantize
from detent.torch.recomputation import Recording, is_recorded, once

__all__ = ["QuantizedLayer", "QuantizedMatmul", "WeightCache", "WeightKey", "quantized_class"]

FLOAT = Operand(None, Identity())
FROZEN = (
    "the model is frozen, so layers with a folded batch norm no longer train: to continue training, call qt.unprepare "
    "and qt.prepare"
)
_ANY_ORDER = QuantSpec("int8")


class QuantizedLayer(nn.Module):
    """Mixin class of every prepared layer; only inside forward, weight attributes return quantized values."""

    float_class: ClassVar[type[nn.Module]]
    kind: ClassVar[LayerKind]
    input_arguments: ClassVar[tuple[str, ...]]
    _forwards = 0  # forward passes in progress, in all threads; see _count_forwards

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer's own forward with quantized weights and inputs."""
        if not self.training or torch.compiler.is_compiling():
            return self._forward(*args, **kwargs)
        with Recording(self, next((each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)), None)):
            return self._forward(*args, **kwargs)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        layers = [self, *(child for child in self.children() if isinstance(child, QuantizedLayer))]
        for name in self.input_arguments[len(args) :]:  # inputs passed by keyword
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
        """Return the quantizer with this name, or None if it does not exist or is disabled."""
        module = self._modules.get(name)
        return module if isinstance(module, FakeQuantize) and module.enabled else None

    def _quantized_inputs(self, args: tuple[Any, ...]) -> list[Any]:
        """Quantize the arguments that are float data; a tensor that occurs twice is quantized once."""
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
        """Return the quantized weight inside forward, and the float parameter outside."""
        weight = weight_for_forward(self, name)
        quantizer = self.quantizer(f"{name}_quantizer") if self._forwards else None
        return weight if quantizer is None or quantizer.is_passing else quantizer(weight)

    def weight_quantizer_of(self, name: str) -> FakeQuantize:
        """Return the quantizer of a weight, even if it is disabled."""
        module = self._modules.get(f"{name}_quantizer")
        if not isinstance(module, FakeQuantize):
            raise UnsupportedError(
                f"{self.float_class.__name__} has no quantized weight {name!r}: pass the name of a quantized weight"
            )
        return module

    def float_weight(self, name: str) -> Tensor:
        """Return the float weight that is quantized for export."""
        return full_tensor(current_weight(self, name))

    def exported_weight(self, name: str) -> QuantizedTensor:
        """Return the quantized weight as it is exported."""
        data, quantizer = on_cpu(self.float_weight(name)), self.weight_quantizer_of(name)
        return quantize(to_array(data), quantizer.values_for(data).params)

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        # a weight that a forward pre-hook computed has a gradient function, and could not be copied
        state = {key: each.detach() if isinstance(each, Tensor) else each for key, each in self.__getstate__().items()}
        return _blank, (self.float_class,), state


_counter_lock = threading.Lock()


def _count_forwards(layers: list[QuantizedLayer], change: int) -> None:
    """Add ``change`` to each layer's number of running forward passes: 1 when a pass begins, -1 when it ends."""
    if torch.compiler.is_compiling():  # compilers cannot trace a lock; a trace runs in one thread
        for layer in layers:
            layer._forwards += change
        return
    _check_not_jit()
    with _counter_lock:
        for layer in layers:
            layer._forwards += change


def _check_not_jit() -> None:
    if torch.jit._trace.is_tracing():
        raise UnsupportedError("torch.jit does not support prepared layers: use torch.compile or torch.export")


class QuantizedMatmul(QuantizedLayer):
    """A prepared layer that is one matmul or convolution.

    Its quantized weight has two forms. ``batchnorm`` defines the gain g and the factor f::

        unfused weight    fq(w)             without a batch norm, or if the scales absorb its gain
                          fq(w * f) / f     with a batch norm otherwise
        exported weight   fq(w)             without a batch norm
                          fq(w) * g         if the scales absorb the gain: codes * sign(g), scale * |g|
                          fq(w * g)         with a batch norm otherwise; w * g if the weight is not quantized

    Forward passes use the unfused weight. After ``qt.freeze``, layers with a batch norm use the exported weight.
    """

    weight: Tensor
    bias: Tensor | None
    fold: Fold | None = None
    _cache: "WeightCache | None" = None

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the argument name of the float layer
        """Multiply the quantized input by the quantized weight."""
        result: Tensor = super().forward(input)
        return result

    def _forward(self, x: Tensor) -> Tensor:
        _check_not_jit()
        if self.fold is not None and isinstance(self, nn.Linear) and x.ndim != 2:
            self.fold.unfuse()  # batch norm normalizes axis 1, which is not the layer's channel axis here
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
            y = self._matmul(x, inputs, weights)
        result: Tensor = self._quantized_output(y)
        return result

    @property
    def _is_fused(self) -> bool:
        return self.fold is not None and self.fold.is_fused

    def _matmul(self, x: Tensor, inputs: FakeQuantize | None, weights: FakeQuantize | None) -> Tensor:
        if self.kind.matmul is None:
            raise UnsupportedError(
                f"{self.float_class.__name__} is not a registered matmul or convolution: register the class with "
                "qt.register_layer before qt.prepare"
            )
        kind, weight, fold = self.kind.matmul(self), self.weight, self.fold  # attribute access is slow: do it once
        x = self.padded(x) if weight.ndim > 2 else x
        unbatched = weight.ndim > 2 and x.ndim == weight.ndim - 1
        x = x.unsqueeze(0) if unbatched else x
        bias = fold.bias(self.bias) if fold is not None and fold.is_fused else self.bias
        if is_plain(x) and is_plain(weight):
            operand = FLOAT
            if inputs is not None and x.numel():
                operand = Operand(inputs.values_for(x), inputs.ste, inputs.next_step())
            trained, quantized = self._native_weight(weight, weights)
            y = matmul(kind, x, trained, bias, operand, quantized)
        else:
            y = kind.forward(x if inputs is None else inputs(x), self._traced_weight(weight, weights), bias)
        return y.squeeze(0) if unbatched else y

    def padded(self, x: Tensor) -> Tensor:
        """Pad x if ``Convolution`` does not support the padding: other values than zeros, or padding as a string."""
        layer: Any = self
        mode = layer.padding_mode
        if mode == "zeros" and not isinstance(layer.padding, str):
            return x
        return F.pad(x, layer._reversed_padding_repeated_twice, mode="constant" if mode == "zeros" else mode)

    # The weight in a forward pass

    def _native_weight(self, weight: Tensor, quantizer: FakeQuantize | None) -> tuple[Tensor, QuantizedWeight]:
        """Return the tensor that receives the gradient, and the quantized weight for the matmul."""
        fold = self.fold
        if fold is None or not fold.is_fused:
            return weight, self._unfused_weight(weight, quantizer)
        if self.training and torch.is_grad_enabled() and weight.requires_grad:
            warnings.warn(FROZEN, stacklevel=3)
        constant = self._exported_constant(weight, quantizer, fold)
        return constant.tensor, constant

    def _traced_weight(self, weight: Tensor, quantizer: FakeQuantize | None) -> Tensor:
        """Return the quantized weight for the matmul, computed in torch operations."""
        fold = self.fold
        if fold is None or not fold.is_fused:
            return weight if quantizer is None else unfused_weight(weight, self._factor(weight, quantizer), quantizer)
        weight = weight.detach()  # the exported weight is a constant
        if quantizer is not None and quantizer.absorbs_gain:
            return fold.fake_quantize_with_gain(weight, quantizer.traced_values_for(weight)[0], quantizer.spec)
        folded = fold.with_gain(weight)
        if quantizer is None:
            return folded
        return apply_traced(folded, *quantizer.traced_values_for(folded), quantizer.spec, quantizer.ste)

    def _factor(self, weight: Tensor, quantizer: FakeQuantize) -> Tensor | None:
        fold = self.fold
        if fold is None or quantizer.absorbs_gain:
            return None
        return once(id(fold), lambda: fold.factor(weight), lambda: fold.factor(weight))

    def _unfused_weight(self, weight: Tensor, quantizer: FakeQuantize | None) -> QuantizedWeight:
        """Return the weight of forward passes before ``qt.freeze``, from the cache if nothing has changed."""
        if quantizer is None:
            return QuantizedWeight(FLOAT, None, weight.detach(), keep=True)
        step = quantizer.next_step()
        learned: Values | None = None

        def make(keep: bool) -> QuantizedWeight:
            data, factor = weight.detach(), self._factor(weight, quantizer)
            scaled = data if factor is None else data * factor
            quantized = quantizer.quantize(scaled, step, None if keep else "weight", learned)
            tensor = quantized.tensor if factor is None else quantized.tensor.div_(factor)
            return QuantizedWeight(Operand(quantized.values, quantized.ste, step), factor, tensor)

        if quantizer.is_stochastic or not quantizer.is_ready or is_recorded():  # cannot be cached
            return make(False)
        if quantizer.is_learned:  # each autograd graph needs learned values, even if the weight is cached
            factor = self._factor(weight, quantizer)
            learned = quantizer.values_for(weight if factor is None else weight.detach() * factor)
        fold = None if self.fold is None or quantizer.absorbs_gain else self.fold
        quantized = self._cached(weight, quantizer, fold, make)
        return quantized if learned is None else quantized._replace(operand=Operand(learned, quantizer.ste, step))

    def _exported_constant(self, weight: Tensor, quantizer: FakeQuantize | None, fold: Fold) -> QuantizedWeight:
        """Return the exported weight, as a constant."""

        def make(_: bool) -> QuantizedWeight:
            if quantizer is None:
                return QuantizedWeight(FLOAT, None, fold.with_gain(weight.detach()), keep=True)
            return QuantizedWeight(FLOAT, None, to_tensor(self.exported_weight("weight").dequantize()), keep=True)

        return self._cached(weight, quantizer, fold, make)

    def _cached(
        self, weight: Tensor, quantizer: FakeQuantize | None, fold: Fold | None, make: Callable[[bool], QuantizedWeight]
    ) -> QuantizedWeight:
        # not cached: sharded weights change without a new version, and inference tensors have no version
        if is_distributed() or weight.is_inference():
            return make(False)
        if self._cache is None:
            self._cache = WeightCache()
        key = WeightKey.of(weight, quantizer, fold)
        training = torch.is_grad_enabled() and weight.requires_grad and not key.is_fused
        return self._cache.find(key, weight, make, training=training)

    # The exported weight

    def float_weight(self, name: str) -> Tensor:
        """Return the float weight that is quantized for export: ``w * g``, or ``w`` if the scales absorb the gain."""
        weight, fold = super().float_weight(name), self.fold
        return weight if fold is None or self.weight_quantizer_of(name).absorbs_gain else fold.with_gain(weight)

    def exported_weight(self, name: str) -> QuantizedTensor:
        """Return the quantized weight as it is exported, including the gain of a batch norm."""
        quantized, fold = super().exported_weight(name), self.fold
        if fold is None or not self.weight_quantizer_of(name).absorbs_gain:
            return quantized
        return fold.codes_with_gain(quantized)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_cache": None}


class WeightKey(NamedTuple):
    """Everything that determines a quantized weight, except for the values of the float weight."""

    address: int  # changes if the parameter is replaced or moved
    version: int  # PyTorch's counter of writes, for example by an optimizer
    quantizer: object
    fold: object
    is_fused: bool  # True for the exported weight, False for the unfused weight

    @staticmethod
    def of(weight: Tensor, quantizer: FakeQuantize | None, fold: Fold | None) -> "WeightKey":
        """Return the key for the current state of the weight."""
        return WeightKey(
            weight.data_ptr(),
            weight._version,
            None if quantizer is None else quantizer.version(),
            None if fold is None else fold.version(),
            fold is not None and fold.is_fused,
        )


class WeightCache:
    """A cache of at most one quantized weight.

    Evaluation always caches the quantized weight. In training, weights change with every step, and a cached copy needs
    as much memory as the weight. So training caches a weight only while it is used more than once, as in gradient
    accumulation. A cached weight is reused if its key and the checksum of the float weight are unchanged. The checksum
    is needed because PyTorch's version counter misses writes through ``.data``. Computing the checksum is much
    faster than quantizing.
    """

    def __init__(self) -> None:
        self._key: object = None  # key of the last weight that was asked for
        self._checksum = 0
        self._quantized: QuantizedWeight | None = None
        self._repeats = False  # whether the previous weight was used more than once

    def find(
        self, key: object, weight: Tensor, make: Callable[[bool], QuantizedWeight], *, training: bool
    ) -> QuantizedWeight:
        """Return the cached weight, or otherwise the result of ``make(keep)``.

        If ``keep`` is True, the result stays in the cache, and ``make`` must allocate new memory for it.
        """
        is_same = key == self._key
        if is_same:
            self._repeats = True
            if self._quantized is not None and self._checksum == _checksum(weight):
                return self._quantized
        keep = not training or self._repeats
        self._repeats, self._key, self._quantized = is_same, key, None  # the cache is empty if make raises
        quantized = make(keep)
        if keep:
            self._quantized = quantized = quantized._replace(keep=True)
            self._checksum = _checksum(weight)
        return quantized


def _checksum(weight: Tensor) -> int:
    return checksum(to_array(order_of(weight, _ANY_ORDER).lay(weight.detach())))


_CLASSES: dict[tuple[type[nn.Module], LayerKind | None], type[nn.Module]] = {}


def quantized_class(layer: type[nn.Module]) -> type[nn.Module]:
    """Return the class that replaces a layer's class in preparation."""
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
        raise UnsupportedError(
            f"layer type {layer.__name__} is not registered: call qt.register_layer({layer.__name__}, weights=...)"
        )
    attributes["kind"] = kind
    attributes["input_arguments"] = tuple(inspect.signature(layer.forward).parameters)[1 : 1 + kind.inputs]
    if runs_as_matmul(layer):
        return type(name, (QuantizedMatmul, layer), attributes)
    attributes["forward"] = _forward_like(layer)
    weights = {weight: _weight_property(weight) for weight in kind.weights}
    if kind.names is not None:
        weights["_flat_weights"] = property(_get_flat_weights, _set_flat_weights)
    return type(name, (QuantizedLayer, layer), {**attributes, **weights})


def _forward_like(layer: type[nn.Module]) -> Callable[..., Any]:
    """Return a forward method with the signature of the float layer, because exporters inspect the signature."""

    def forward(self: QuantizedLayer, *args: Any, **kwargs: Any) -> Any:
        return QuantizedLayer.forward(self, *args, **kwargs)

    vars(forward)["__signature__"] = inspect.signature(layer.forward)
    return forward


def _weight_property(name: str) -> property:
    def set_computed(layer: Any, weight: Tensor) -> None:  # forward pre-hooks, such as those of pruning, set weights
        vars(layer)[name] = weight

    def delete_computed(layer: Any) -> None:
        del vars(layer)[name]

    return property(lambda layer: layer.weight_in_forward(name), set_computed, delete_computed)


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
    """Return an uninitialized module of the quantized class, for copies and pickles."""
    quantized = quantized_class(layer)
    return quantized.__new__(quantized)
