"""Batch norm folding: quantize the weight that will be exported, which includes the gain of the batch norm.

::

    g = gamma / sqrt(running_var + eps)                   gain, one per output channel
    f = g where g is not 0, otherwise 1                   factor, by which a weight can be divided

    y = norm(linear(x, fq(w * f) / f))                    unfused weight: forward passes before qt.freeze
    y = linear(x, fq(w * g)) + (b - mean) * g + beta      exported weight: after qt.freeze, and in exported files

``linear`` is the layer's matmul or convolution, and ``fq`` is fake quantization. The unfused and the exported weight
have the same codes, so in evaluation the outputs differ only by float rounding. Training needs no extra work on
activations: as in float, the batch norm normalizes the layer's output with the statistics of the batch. Symmetric
per-channel scales of mode Fixed or Learned can absorb the gain. Then the unfused weight is ``fq(w)``.
"""

from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from itertools import pairwise
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from detent.kernels.reference.elements import code_values
from detent.params import QuantParams
from detent.spec import QuantSpec
from detent.tensor import QuantizedTensor
from detent.torch import traced_namespace as xp
from detent.torch.arrays import fingerprint, full_tensor, on_cpu, scale_dtype, to_array, to_tensor
from detent.torch.recomputation import is_recomputing

__all__ = ["Fold", "QuantizedNorm", "find_folds", "traced_graphs", "unfused_weight"]


def unfused_weight(
    weight: Tensor, factor: Tensor | None, quantize: Callable[[Tensor], Tensor], *, in_place: bool = False
) -> Tensor:
    """Fake-quantize weight w with the batch norm factor f: ``fq(w * f) / f``, or ``fq(w)`` if f is None.

    With ``in_place``, the division overwrites the tensor that ``quantize`` returns.
    """
    if factor is None:
        return quantize(weight)
    quantized = quantize(weight * factor)
    return quantized.div_(factor) if in_place else xp.divide(quantized, factor)


class Fold:
    """The batch norm that is folded into a layer.

    A fold is not a module, so that folding does not change the module tree. If ``layer`` is given, this layer computes
    the batch norm in evaluation without gradients, too, so that its outputs are those of the exported file.
    """

    def __init__(self, norm: _BatchNorm, layer: nn.Module | None = None) -> None:
        self.norm = norm
        self.layer = layer
        if layer is not None:
            vars(norm)["fold"] = self

    @property
    def is_fused(self) -> bool:
        """Whether the layer computes the batch norm together with its own output."""
        if getattr(self.norm, "fused", False):
            return True
        layer = self.layer
        return layer is not None and not (layer.training or self.norm.training or torch.is_grad_enabled())

    def fuse(self) -> None:
        """Let the layer compute the batch norm; the batch norm module then returns its input unchanged."""
        if isinstance(self.norm, QuantizedNorm):
            self.norm.fused = True

    def unfuse(self) -> None:
        """Let the batch norm module normalize again."""
        if isinstance(self.norm, QuantizedNorm):
            self.norm.fused = False
            self.norm.fold = self.layer = None

    def quantized_output(self, y: Tensor) -> Tensor:
        """Quantize the output of the batch norm with the layer's output quantizer, if ``qt.prepare`` placed one."""
        layer: Any = self.layer
        return y if layer is None else layer.finish_output(y)

    def gain(self) -> Tensor:
        """Return the per-channel gain g, ``gamma / sqrt(running_var + eps)``."""
        norm = self.norm
        variance = norm.running_var.detach()  # type: ignore[union-attr]  # find_folds skips norms without statistics
        gain = torch.rsqrt(variance + norm.eps)
        return gain if norm.weight is None else gain * full_tensor(norm.weight.detach())

    def factor(self, weight: Tensor) -> Tensor:
        """Return the per-channel factor f: the gain, or 1 where the gain is 0; its shape broadcasts to the weight."""
        gain = self.gain().to(weight.dtype)
        return _per_channel(torch.where(gain == 0, torch.ones_like(gain), gain), weight)

    def with_gain(self, weight: Tensor) -> Tensor:
        """Return the weight w of the layer, multiplied by the gain of the batch norm: ``w * g``."""
        return weight * _per_channel(self.gain().to(weight.dtype), weight)

    def codes_with_gain(self, quantized: QuantizedTensor) -> QuantizedTensor:
        """Multiply a quantized weight by the gain g: scales are multiplied by ``|g|``, and codes by the sign of g."""
        scale = to_tensor(quantized.params.scale)
        gain = on_cpu(self.gain()).to(scale.dtype)
        params = QuantParams(quantized.spec, to_array(_scale_with_gain(scale, gain)))
        signs = to_array(gain.sign()).astype(quantized.codes.dtype).reshape(-1, *(1,) * (quantized.codes.ndim - 1))
        return QuantizedTensor.from_codes(quantized.codes * signs, params, quantized.dtype)

    def fake_quantize_with_gain(self, weight: Tensor, scale: Tensor, spec: QuantSpec) -> Tensor:
        """Quantize a float weight, apply the gain to codes and scales like ``codes_with_gain``, and dequantize it.

        The computation uses torch operations and records no gradients.
        """
        scale = scale.detach().to(scale_dtype(weight))
        gain = self.gain().to(scale.dtype)
        old, new, sign = (_per_channel(part, weight) for part in (scale, _scale_with_gain(scale, gain), gain.sign()))
        values = code_values(xp, spec, xp.astype(weight.detach(), scale.dtype), old, torch.zeros_like(old), step=0)
        y = xp.astype(values * sign * new, weight.dtype)
        return y if spec.format.kind == "float" else xp.where(y == 0, torch.zeros_like(y), y)

    def exported_scale(self, weight: Tensor, quantizer: Any) -> Tensor:
        """Return the scales of the exported weight, computed in torch operations."""
        if not quantizer.absorbs_gain:
            scale: Tensor = quantizer.traced_values_for(self.with_gain(weight))[0]
            return scale.detach().reshape(-1)
        scale = quantizer.traced_values_for(weight)[0].detach()
        return _scale_with_gain(scale, self.gain().to(scale.dtype)).reshape(-1)

    def bias(self, bias: Tensor | None) -> Tensor:
        """Return the bias of the layer after folding the batch norm: ``(b - mean) * g + beta``."""
        norm = self.norm
        gain, mean = self.gain(), norm.running_mean.detach()  # type: ignore[union-attr]
        shift = -mean if bias is None else full_tensor(bias.detach()) - mean
        return shift * gain if norm.bias is None else shift * gain + full_tensor(norm.bias.detach())

    def version(self) -> object:
        """Return a key that changes if the gain changes.

        PyTorch's version counter cannot be the key, because it misses updates of the running statistics.
        """
        return fingerprint(*(part for part in (self.norm.running_var, self.norm.weight) if part is not None))


def _per_channel(values: Tensor, weight: Tensor) -> Tensor:
    return values.reshape(-1, *(1,) * (weight.ndim - 1))


def _scale_with_gain(scale: Tensor, gain: Tensor) -> Tensor:
    scaled = torch.where(gain == 0, scale, scale * gain.abs())
    return scaled.clamp(min=torch.finfo(scale.dtype).smallest_normal)


class QuantizedNorm(nn.Module):
    """Mixin class of every batch norm in a prepared model."""

    float_class: ClassVar[type[nn.Module]]
    fused: bool  # whether the layer before computes this batch norm
    frozen: bool  # whether training uses the running statistics and does not update them
    fold: Fold | None  # set if the layer before computes this batch norm in evaluation without gradients

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x; return x unchanged if the layer before has already applied this batch norm."""
        fold = self.fold
        if self.fused or (fold is not None and fold.is_fused):
            return x
        y = self._normalized(x)
        return y if fold is None else fold.quantized_output(y)

    def _normalized(self, x: Tensor) -> Tensor:
        if self.frozen and self.training:
            norm: Any = self
            return F.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias, False, 0.0, norm.eps)
        if not (self.training and is_recomputing()):
            result: Tensor = self.float_class.forward(self, x)
            return result
        statistics = dict(self._buffers)
        try:  # a recomputed forward pass must not update the statistics a second time
            self._buffers.update({name: each if each is None else each.clone() for name, each in statistics.items()})
            result = self.float_class.forward(self, x)
        finally:
            self._buffers.update(statistics)
        return result


def find_folds(model: nn.Module) -> dict[str, str]:
    """Find the layers whose output is read only by a batch norm; return a dict from layer names to batch norm names.

    The pairs come from a symbolic trace of the model. If tracing fails, the pairs come from the order in
    ``nn.Sequential``.
    """
    try:
        pairs = _traced_pairs(model)
    except Exception:  # noqa: BLE001 - tracing runs the model's code, which may raise anything
        pairs = _pairs_in_order(model)
    modules = dict(model.named_modules())
    return {layer: norm for layer, norm in pairs.items() if _is_foldable(modules[layer], modules[norm])}


def _pairs_in_order(model: nn.Module) -> dict[str, str]:
    names = {module: name for name, module in model.named_modules()}
    sequences = [list(module) for module in model.modules() if isinstance(module, nn.Sequential)]
    uses = Counter(module for sequence in sequences for module in sequence)
    pairs = (pair for sequence in sequences for pair in pairwise(sequence) if all(uses[each] == 1 for each in pair))
    return {names[layer]: names[norm] for layer, norm in pairs}


def _traced_pairs(model: nn.Module) -> dict[str, str]:
    """Return the (layer, batch norm) pairs that occur both in training mode and in evaluation mode."""
    training, evaluation = map(_pairs_of, traced_graphs(model))
    return dict(training.items() & evaluation.items())


def traced_graphs(model: nn.Module) -> tuple[fx.Graph, fx.Graph]:
    """Trace a model symbolically, in training mode and in evaluation mode.

    The trace runs on a copy of the model, which shares the model's parameters. It raises whatever the model raises.
    """
    memo: dict[int, Any] = {id(each): each for each in model.parameters()}
    # weights that pruning and weight norm compute as attributes have a gradient function, and cannot be copied
    attributes = (each for module in model.modules() for each in vars(module).values())
    memo |= {id(each): each.detach() for each in attributes if isinstance(each, Tensor)}
    copy = deepcopy(model, memo)
    with torch.random.fork_rng(devices=[]):
        training, evaluation = (fx.Tracer().trace(copy.train(mode)) for mode in (True, False))
    return training, evaluation


def _pairs_of(graph: fx.Graph) -> dict[str, str]:
    calls = Counter(node.target for node in graph.nodes if node.op == "call_module")
    pairs = {}
    for node in graph.nodes:
        source = node.args[0] if node.op == "call_module" and node.args else None
        if not isinstance(source, fx.Node) or source.op != "call_module" or len(source.users) != 1:
            continue
        if calls[node.target] == calls[source.target] == 1:
            pairs[str(source.target)] = str(node.target)
    return pairs


def _is_foldable(layer: nn.Module, norm: nn.Module) -> bool:
    if not isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d) or not isinstance(norm, _BatchNorm):
        return False
    channels = layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels
    return norm.track_running_stats and norm.num_features == channels
