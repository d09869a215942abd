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
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from detent.block_tensor import BlockTensor
from detent.errors import DetentError, UnsupportedError
from detent.granularity import PerAxis, PerTensor
from detent.kernels import checksum
from detent.ops import quantize
from detent.params import QuantParams
from detent.spec import QuantSpec
from detent.ste import Clipped, Identity
from detent.tensor import QuantizedTensor
from detent.torch import (
    integer_operator,  # noqa: F401 - registers torch.ops.detent.multiply_quantized
    native_step,
)
from detent.torch.arrays import full_tensor, is_distributed, is_plain, on_cpu, order_of, to_array, to_tensor
from detent.torch.batchnorm import Fold, QuantizedNorm, unfused_weight
from detent.torch.block_quantizer import BlockFakeQuantize, fake_quantize_block_format, straight_through
from detent.torch.computed_weights import current_weight, weight_for_forward
from detent.torch.exported_bias import bias_codes, exported_bias
from detent.torch.fused_requantization import SumUnits, Units
from detent.torch.integer_product import Requantization, WeightCodes
from detent.torch.layers import (
    Convolution,
    LayerKind,
    Matmul,
    Operand,
    QuantizedWeight,
    kind_of,
    matmul,
    multiply_codes,
    runs_as_matmul,
)
from detent.torch.operator import Values, apply_traced, rounded_zero_point
from detent.torch.quantizer import FakeQuantize, Quantized
from detent.torch.recomputation import Recording, is_recorded, once

__all__ = ["QuantizedLayer", "QuantizedMatmul", "WeightCache", "WeightKey", "quantized_class"]

FLOAT = Operand(None, Identity())
FROZEN = (
    "the model is frozen, so layers with a folded batch norm no longer train: to continue training, call qt.unprepare "
    "and qt.prepare"
)
_ANY_ORDER = QuantSpec("int8")
EMPTY = torch.empty(0)
_MATRIX = 2  # axes of the weight of a Linear layer


class NextQuantizer:
    """The input quantizer of the next layer, if ONNX Runtime fuses it into the layer before.

    This is not a module, so that the quantizer stays a child of its own layer. ``after_relu`` says that a ReLU comes
    before the quantizer. ONNX Runtime drops the ReLU if the smallest code has the value 0, and only then fuses.
    """

    def __init__(self, quantizer: FakeQuantize, *, after_relu: bool) -> None:
        self.quantizer, self.after_relu = quantizer, after_relu

    def requantization(self) -> Requantization | None:
        """Return the current parameters, or None if ONNX Runtime does not fuse the quantizer."""
        quantizer = self.quantizer
        if not quantizer.enabled or quantizer.is_passing or not quantizer.is_initialized:
            return None
        if quantizer.params.scale.ndim or (self.after_relu and int(quantizer.params.zero_point) != quantizer.spec.qmin):
            return None
        return Requantization.of(quantizer.params)

    def tensors(self) -> tuple[Any, ...]:
        """Return scale, zero point and range of the codes, for compiled code."""
        quantizer = self.quantizer
        if not quantizer.enabled or quantizer.is_passing or quantizer.scale.numel() != 1:
            return ()
        low, high = int(quantizer.spec.qmin), int(quantizer.spec.qmax)
        return quantizer.scale, quantizer.zero_point, [low, high, 1] if self.after_relu else [low, high]


def _has_channel_scales(spec: QuantSpec) -> bool:
    """Return whether a weight's spec has one scale per tensor or per output channel, as int32 biases need."""
    return spec.format.is_integer and spec.granularity in (PerTensor(), PerAxis(0))


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
        blocks = self.block_quantizer(name) if self._forwards else None
        if blocks is not None:
            return blocks(weight)  # type: ignore[no-any-return]  # a tensor
        quantizer = self.quantizer(f"{name}_quantizer") if self._forwards else None
        return weight if quantizer is None or quantizer.is_passing else quantizer(weight)

    def block_quantizer(self, name: str) -> BlockFakeQuantize | None:
        """Return the quantizer of a weight with a block format, or None if it does not exist or is disabled."""
        module = self._modules.get(f"{name}_quantizer")
        return module if isinstance(module, BlockFakeQuantize) and module.enabled else None

    def block_weight(self, name: str) -> BlockTensor:
        """Return the weight in its block format, as a file contains it."""
        module = self._modules[f"{name}_quantizer"]
        assert isinstance(module, BlockFakeQuantize)  # noqa: S101 - callers find such quantizers
        try:
            return quantize(to_array(on_cpu(self.float_weight(name).detach()).contiguous()), module.spec)
        except DetentError as error:
            error.args = (f"{module.name.removesuffix('_quantizer')}: {error}", *error.args[1:])
            raise

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
    arithmetic: Literal["float", "integer"] = "float"
    bias_rule: Literal["float", "exported"] = "float"
    memory: Literal["float", "codes", "auto"] = "auto"  # what integer products keep for backward
    next_quantizer: "NextQuantizer | None" = None
    _cache: "WeightCache | None" = None
    _steps: dict[object, native_step.Step] | None = None

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the argument name of the float layer
        """Multiply the quantized input by the quantized weight."""
        if self.training and not torch.compiler.is_compiling() and torch.is_grad_enabled():
            y = native_step.run(self, input)
            if y is not None:
                quantized: Tensor = self._quantized_output(y)
                return quantized
        result: Tensor = super().forward(input)
        return result

    def _forward(self, x: Tensor) -> Tensor:
        _check_not_jit()
        if self.fold is not None and isinstance(self, nn.Linear) and x.ndim != 2:
            self.fold.unfuse()  # batch norm normalizes axis 1, which is not the layer's channel axis here
            self.fold = None
        inputs, weights = self.quantizer("input_quantizer"), self.quantizer("weight_quantizer")
        y: Tensor
        if weights is not None and weights.is_passing:
            weights = None
        if inputs is not None and inputs.is_passing:
            inputs(x)
            inputs = None
        blocks = self.block_quantizer("weight")
        if blocks is not None:
            y = self._multiply_by_blocks(x, inputs, blocks)
        elif inputs is None and weights is None and not self._is_fused:
            y = self.float_class.forward(self, x)
        else:
            y = self._matmul(x, inputs, weights)
        result: Tensor = self._quantized_output(y)
        return result

    def _multiply_by_blocks(self, x: Tensor, inputs: FakeQuantize | None, blocks: BlockFakeQuantize) -> Tensor:
        """Multiply by the weight as its block format stores it; its gradient passes straight through."""
        weight = self.weight
        x = self.padded(x) if weight.ndim > 2 else x
        if is_plain(x) and is_plain(weight):

            def make(_: bool) -> QuantizedWeight:
                values = fake_quantize_block_format(weight.detach(), blocks.spec)
                return QuantizedWeight(FLOAT, None, values, keep=True)

            values = self._cached(weight, None, None, make, to_codes=False).tensor
            quantized = straight_through(weight, values)
        else:
            quantized = blocks(weight)
        assert self.kind.matmul is not None  # noqa: S101 - qt.plan gives block formats only to registered layers
        return self.kind.matmul(self).forward(x if inputs is None else inputs(x), quantized, self.bias)

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
                if inputs.sum_units is not None and inputs.sum_units.units is not None:
                    to = Requantization.of(operand.values.params)  # type: ignore[union-attr]  # quantizers have values
                    operand = operand._replace(units=inputs.sum_units.units_for(x, to))
            multiplies_codes = self._multiplies_codes(x, operand, weights)
            if multiplies_codes and self._keeps_codes(x, operand):
                operand = operand._replace(keeps_codes=True)
            trained, quantized = self._native_weight(weight, weights, to_codes=multiplies_codes)
            if quantized.codes is not None and not (self.training or torch.is_grad_enabled()):
                requantization = self._requantization(x, bias)
                y = multiply_codes(kind, x, weight, operand, quantized.codes, bias, requantization)
                self._write_units(None, x, bias)
            else:
                self._write_units(self._units(operand, quantized.codes, bias), x, bias)
                y = matmul(kind, x, trained, self._as_exported(bias, operand, quantized), operand, quantized)
        elif inputs is not None and weights is not None and self._compiles_codes(x):
            y = self._compiled_product(kind, x, inputs, weights, bias)
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

    # Integer arithmetic and the exported bias

    def _multiplies_codes(self, x: Tensor, operand: Operand, weights: FakeQuantize | None) -> bool:
        if self.arithmetic == "float" or operand.values is None or weights is None:
            return False
        return x.dtype != torch.float64

    def _keeps_codes(self, x: Tensor, operand: Operand) -> bool:
        """Return whether backward keeps codes and one bit per element instead of x.

        With memory "auto", x is kept if autograd or the caller keeps it anyway: the output of a ReLU, or a leaf.
        """
        if self.memory == "float" or not torch.is_grad_enabled() or operand.values is None:
            return False
        params = operand.values.params
        if operand.values.is_learned or params.spec.format.signed or not isinstance(operand.ste, Clipped | Identity):
            return False
        kept_anyway = x.grad_fn is None or type(x.grad_fn).__name__ == "ReluBackward0"
        return self.memory == "codes" or not kept_anyway

    def _compiles_codes(self, x: Tensor) -> bool:
        """Return whether compiled code multiplies codes; exported programs multiply floats, which any runtime has."""
        if self.arithmetic == "float" or x.dtype != torch.float32 or x.device.type != "cpu":
            return False
        return torch.compiler.is_compiling() and not torch.compiler.is_exporting()

    def _compiled_product(
        self, kind: Matmul, x: Tensor, inputs: FakeQuantize, weights: FakeQuantize, bias: Tensor | None
    ) -> Tensor:
        """Multiply codes in compiled code, by ``torch.ops.detent.multiply_quantized``."""
        fold, weight = self.fold, self.weight
        is_fused = fold is not None and fold.is_fused
        x_scale, x_zero_point = inputs.traced_values_for(x)
        quantized = apply_traced(x, x_scale, x_zero_point, inputs.spec, inputs.ste, learned=inputs.is_learned)
        quantized = inputs.follow_sums_traced(quantized, x, x_scale, x_zero_point)
        if is_fused and fold is not None:
            values, w_scale = self._traced_weight(weight, weights), fold.exported_scale(weight.detach(), weights)
        else:
            factor = self._factor(weight, weights)
            scaled = weight if factor is None else weight * factor
            scale, zero_point = weights.traced_values_for(scaled)
            values = apply_traced(scaled, scale, zero_point, weights.spec, weights.ste, learned=weights.is_learned)
            values = values if factor is None else values / factor
            w_scale = scale.detach().reshape(-1) / (1.0 if factor is None else factor.reshape(-1))
        rounded = x_zero_point.detach()
        rounded = rounded_zero_point(rounded, inputs.spec) if rounded.is_floating_point() else rounded
        settings = [*kind.stride, *kind.padding, *kind.dilation, kind.groups] if isinstance(kind, Convolution) else []
        float_bias = fold is not None and not is_fused
        following = None if self.training or torch.is_grad_enabled() else self._following(x, bias)
        output = () if following is None else following.tensors()
        units = None
        if (self.training or torch.is_grad_enabled()) and not float_bias and self.sum_units(x, bias) is not None:
            units = Units(
                (w_scale * x_scale).detach().expand(weight.shape[0]), channels_are_last=weight.ndim == _MATRIX
            )
        self._write_units(units, x, bias)
        scales = x_scale.detach(), rounded, w_scale, inputs.spec.format.signed
        y: Tensor = torch.ops.detent.multiply_quantized(quantized, values, bias, *scales, settings, float_bias, *output)
        return y

    def _as_exported(self, bias: Tensor | None, operand: Operand, quantized: QuantizedWeight) -> Tensor | None:
        """Round the bias of a float product as it is exported, if this is requested."""
        is_float = self.bias_rule == "float" or quantized.codes is not None
        if is_float or bias is None or operand.values is None or quantized.scale is None:
            return bias
        return exported_bias(bias, quantized.scale * float(operand.values.params.scale))

    def _following(self, x: Tensor, bias: Tensor | None) -> NextQuantizer | None:
        """Return the quantizer that ONNX Runtime may fuse into this layer, or None."""
        if self.weight.ndim == 2 and x.ndim != 2 and bias is not None:
            return None  # the exported MatMul is followed by an Add
        own = self.quantizer("output_quantizer")
        return self.next_quantizer if own is None else NextQuantizer(own, after_relu=False)

    def _requantization(self, x: Tensor, bias: Tensor | None) -> Requantization | None:
        following = self._following(x, bias)
        return None if following is None else following.requantization()

    def sum_units(self, x: Tensor, bias: Tensor | None) -> SumUnits | None:
        """Return the link to the quantizer that ONNX Runtime may fuse into this layer, or None."""
        if self.arithmetic == "float":
            return None
        following = self._following(x, bias)
        return None if following is None else following.quantizer.sum_units

    def _write_units(self, units: Units | None, x: Tensor, bias: Tensor | None) -> None:
        link = self.sum_units(x, bias)
        if link is not None:
            link.units = units

    def _units(self, operand: Operand, codes: WeightCodes | None, bias: Tensor | None) -> Units | None:
        """Return the units of the output, or None if the bias is added in float."""
        if codes is None or codes.float_bias or operand.values is None:
            return None
        units = codes.scale * float(operand.values.params.scale)
        if bias is not None and bias_codes(bias.detach(), units) is None:
            return None
        return Units(units, channels_are_last=self.weight.ndim == _MATRIX)

    def finish_output(self, y: Tensor) -> Tensor:
        """Quantize the output, after the batch norm."""
        result: Tensor = super()._quantized_output(y)
        return result

    def _quantized_output(self, result: Any) -> Any:
        fold = self.fold
        if fold is not None and fold.layer is not None and not fold.is_fused:
            return result  # the batch norm calls ``finish_output``
        return self.finish_output(result)

    # The weight in a forward pass

    def _native_weight(
        self, weight: Tensor, quantizer: FakeQuantize | None, *, to_codes: bool = False
    ) -> tuple[Tensor, QuantizedWeight]:
        """Return the tensor that receives the gradient, and the quantized weight for the matmul."""
        fold = self.fold
        if fold is None or not fold.is_fused:
            return weight, self._unfused_weight(weight, quantizer, to_codes=to_codes)
        if self.training and torch.is_grad_enabled() and weight.requires_grad:
            warnings.warn(FROZEN, stacklevel=3)
        constant = self._exported_constant(weight, quantizer, fold, to_codes=to_codes)
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

    def _unfused_weight(self, weight: Tensor, quantizer: FakeQuantize | None, *, to_codes: bool) -> QuantizedWeight:
        """Return the weight of forward passes before ``qt.freeze``, from the cache if nothing has changed."""
        if quantizer is None:
            return QuantizedWeight(FLOAT, None, weight.detach(), keep=True)
        step = quantizer.next_step()
        learned: Values | None = None

        def make(keep: bool) -> QuantizedWeight:
            data, factor = weight.detach(), self._factor(weight, quantizer)
            scaled = data if factor is None else data * factor
            if to_codes:
                coded = quantizer.quantize(scaled, step, None, learned, to_codes=True)
                return self._coded_weight(coded, factor, keep=keep)
            quantized = quantizer.quantize(scaled, step, None if keep else "weight", learned)
            tensor = quantized.tensor if factor is None else quantized.tensor.div_(factor)
            operand = Operand(quantized.values, quantized.ste, step)
            return QuantizedWeight(operand, factor, tensor, scale=self._exported_scale(quantized.values.params))

        if quantizer.is_stochastic or not quantizer.is_ready or is_recorded():  # cannot be cached
            return make(False)
        if quantizer.is_learned:  # each autograd graph needs learned values, even if the weight is cached
            factor = self._factor(weight, quantizer)
            learned = quantizer.values_for(weight if factor is None else weight.detach() * factor)
        fold = None if self.fold is None or quantizer.absorbs_gain else self.fold
        quantized = self._cached(weight, quantizer, fold, make, to_codes=to_codes)
        return quantized if learned is None else quantized._replace(operand=Operand(learned, quantizer.ste, step))

    def _exported_scale(self, params: QuantParams) -> Tensor | None:
        """Return the weight's scale for the exported bias, or None if the bias is not rounded."""
        if self.bias_rule == "float" or self.fold is not None or not _has_channel_scales(params.spec):
            return None
        return to_tensor(np.asarray(params.scale, np.float32).reshape(-1))

    def _coded_weight(self, coded: Quantized, factor: Tensor | None, *, keep: bool) -> QuantizedWeight:
        """Make the weight of an integer product; if ``keep``, also make the fake-quantized weight for backward."""
        scale = to_tensor(np.asarray(coded.values.params.scale, np.float32).reshape(-1))
        tensor = EMPTY
        if keep:
            tensor = WeightCodes(coded.tensor, scale).dequantized(self.weight.dtype)
            tensor = tensor if factor is None else tensor.div_(factor)
        scale = scale if factor is None else scale / factor.reshape(-1).to(torch.float32)
        codes = WeightCodes(coded.tensor, scale, float_bias=self.fold is not None)
        return QuantizedWeight(Operand(coded.values, coded.ste), factor, tensor, codes=codes)

    def _exported_constant(
        self, weight: Tensor, quantizer: FakeQuantize | None, fold: Fold, *, to_codes: bool
    ) -> QuantizedWeight:
        """Return the exported weight, as a constant."""

        def make(_: bool) -> QuantizedWeight:
            if quantizer is None:
                return QuantizedWeight(FLOAT, None, fold.with_gain(weight.detach()), keep=True)
            exported = self.exported_weight("weight")
            scale, codes = to_tensor(np.asarray(exported.params.scale, np.float32).reshape(-1)), None
            if to_codes:
                codes = WeightCodes(to_tensor(exported.codes), scale)
            rounds = self.bias_rule == "exported" and _has_channel_scales(exported.spec)
            tensor = to_tensor(exported.dequantize())
            return QuantizedWeight(FLOAT, None, tensor, keep=True, codes=codes, scale=scale if rounds else None)

        return self._cached(weight, quantizer, fold, make, to_codes=to_codes)

    def _cached(
        self,
        weight: Tensor,
        quantizer: FakeQuantize | None,
        fold: Fold | None,
        make: Callable[[bool], QuantizedWeight],
        *,
        to_codes: bool,
    ) -> QuantizedWeight:
        # not cached: sharded weights change without a new version, and inference tensors have no version
        if is_distributed() or weight.is_inference():
            return make(False)
        if self._cache is None:
            self._cache = WeightCache()
        key = WeightKey.of(weight, quantizer, fold, to_codes=to_codes)
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
        return {**super().__getstate__(), "_cache": None, "_steps": None}


class WeightKey(NamedTuple):
    """Everything that determines a quantized weight, except for the values of the float weight."""

    address: int  # changes if the parameter is replaced or moved
    version: int  # PyTorch's counter of writes, for example by an optimizer
    quantizer: object
    fold: object
    is_fused: bool  # True for the exported weight, False for the unfused weight
    has_codes: bool  # whether codes are needed, for integer products

    @staticmethod
    def of(weight: Tensor, quantizer: FakeQuantize | None, fold: Fold | None, *, to_codes: bool = False) -> "WeightKey":
        """Return the key for the current state of the weight."""
        return WeightKey(
            weight.data_ptr(),
            weight._version,
            None if quantizer is None else quantizer.version(),
            None if fold is None else fold.version(),
            fold is not None and fold.is_fused,
            to_codes,
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
        attributes |= {"fused": False, "frozen": False, "fold": None, "__reduce_ex__": QuantizedLayer.__reduce_ex__}
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
