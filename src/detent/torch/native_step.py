"""Native steps: the training step of a prepared layer, with one call into C++ before and after its product.

What a layer does around its matmul or convolution depends on settings that hardly change: specs, scale modes, shapes,
memory order, and the addresses of buffers. A ``Step`` has all of them, decided once, and a native record that reads and
writes the buffers directly::

    forward    observe x, update its range, derive parameters, quantize x and the weight (with the factor of a batch
               norm), scales and offsets of the sums      [one call]    product    scale the sums      [one call]
    backward   quantize x and the weight again, find clipped elements   [one call]
               product    gradients of clipped elements and of learned scales      [one call]

A layer has one step for each shape and memory order of its input. A step is used only if nothing has changed since it
was made, and if the pass is an ordinary one: training with gradients, eager, float32, on the CPU, one process, without
autocast, hooks of saved tensors, calibration or watchers. Otherwise, and for NaN and infinities, ``run`` returns None,
and the general path of ``quantized_layer`` computes the pass, to the same bits. It also computes passes in which the
weight has not changed since the last pass, because it caches quantized weights.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from detent.errors import UnsupportedError
from detent.granularity import PerAxis, PerTensor, Tiling
from detent.kernels import Problem, current_kernels, layer_step
from detent.params import QuantParams
from detent.scale_mode import EMA, Fixed, Learned, PerBatch
from detent.spec import QuantSpec
from detent.ste import Clipped, Estimator, Identity
from detent.torch import eager
from detent.torch.arrays import PLAIN_TYPES, Order, borrow_as, is_channels_last, is_distributed, order_of
from detent.torch.batchnorm import Fold
from detent.torch.block_quantizer import BlockFakeQuantize
from detent.torch.fused_requantization import Units, follow_sums
from detent.torch.integer_probe import convolve_codes, integer_kernels, multiply_codes, pack_convolution
from detent.torch.integer_product import InputCodes, Requantization, WeightCodes, integer_product
from detent.torch.layers import Convolution, Linear, Matmul, Operand, QuantizedWeight, matmul_gradients
from detent.torch.operator import Values, learned_derivative_error
from detent.torch.parameters import MIN_GROWTH
from detent.torch.quantizer import FakeQuantize
from detent.torch.recomputation import is_ordinary_pass

__all__ = ["Step", "run"]

MAX_STEPS = 16  # per layer; inputs of more shapes start anew
MODES = {"stored": 0, "ema": 1, "batch": 2, "learned": 3}  # the enum Mode in layer_step.hpp
_FLAT = 2  # axes of the input of a Linear layer that is exported as Gemm


def run(layer: Any, x: Tensor) -> Tensor | None:
    """Compute a training pass of a prepared matmul or convolution; return None if the general path must compute it."""
    if type(x) not in PLAIN_TYPES or not _is_ordinary():
        return None
    if isinstance(layer._modules.get("weight_quantizer"), BlockFakeQuantize):
        return None  # a block format has no parameters that a step could keep
    steps = layer._steps
    if steps is None:
        steps = layer._steps = {}
    key = x.shape, x.stride(), x.dtype
    settings = _settings(layer)
    step = steps.get(key)
    if step is None or step.settings != settings or not step.is_current():
        if len(steps) >= MAX_STEPS:
            steps.clear()
        steps[key] = step = Step(layer, x, settings)
    return step.run(x, layer) if step.native is not None else None


def _is_ordinary() -> bool:
    """Return whether this is an ordinary pass of eager training; see the module's text."""
    return (
        not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
        and torch._C._get_tracing_state() is None
        and not torch.is_autocast_enabled("cpu")
        and is_ordinary_pass()
        and current_kernels() != "reference"
        and not is_distributed()
    )


def _settings(layer: Any) -> tuple[object, ...]:
    """Return all settings of a layer that are not tensors; a step is made anew if one of them changes."""
    modules, fold = layer._modules, layer.fold
    x, weight = modules.get("input_quantizer"), modules.get("weight_quantizer")
    norm = None if fold is None else (fold.norm, fold.norm.fused, fold.norm.eps)
    own = layer.arithmetic, layer.bias_rule, layer.memory, fold, norm
    return own, _quantizer_settings(x), _quantizer_settings(weight)


def _quantizer_settings(quantizer: Any) -> tuple[object, ...]:
    if quantizer is None:
        return ()
    state = vars(quantizer)
    switches = state["enabled"], state["observing"], state["delayed"], state["is_calibrating"], state["sync"]
    fixed = quantizer, state["spec"], state["mode"], state["_ste"], state["training"], state["watcher"]
    return *switches, *fixed, state["after_relu"], state["_memo"]


class _Reference(NamedTuple):
    """A tensor of a module, and the address of its memory."""

    owner: dict[str, Any]
    name: str
    tensor: Tensor
    address: int


class _References:
    """The tensors whose addresses a native record has."""

    def __init__(self) -> None:
        self.references: list[_Reference] = []

    def _address(self, owner: Any, name: str) -> int:
        """Return the address of a tensor, or 0 without the tensor."""
        tensor = owner.get(name)
        if tensor is None:
            return 0
        self.references.append(_Reference(owner, name, tensor, tensor.data_ptr()))
        return int(tensor.data_ptr())


class _Side(_References):
    """One operand: its quantizer, its memory order, and what the native record needs of them."""

    def __init__(self, quantizer: FakeQuantize, data: Tensor) -> None:
        super().__init__()
        self.quantizer = quantizer
        self.order = order_of(data, quantizer.spec)
        self.images = self.order.images(data.shape)
        self.shape = data.shape if self.order.axes is None else torch.Size(data.shape[axis] for axis in self.order.axes)
        self.tiling: Tiling = self.order.spec.granularity.tiling(tuple(self.shape))
        self.mode = _mode_of(quantizer)
        self.written = quantizer.native_state() if self.mode in ("ema", "batch") else None

    def problem(self) -> Problem:
        """Return the problem whose kernels quantize the operand."""
        return Problem(
            "fake_quantize_backward", self.tiling, "float32", self.order.spec, self.quantizer.ste, "propagate"
        )

    def settings(self) -> dict[str, Any]:
        """Return the settings of the operand's native record."""
        quantizer, mode = self.quantizer, self.quantizer.mode
        names = ("scale", "zero_point", "initialized", "lo", "hi", "initial_scale", "initial_zero_point")
        settings: dict[str, Any] = {name: self._address(quantizer._buffers, name) for name in names}
        for name in ("scale_shift", "zero_point_shift"):
            settings[name] = self._address(quantizer._parameters, name)
        learned = mode if isinstance(mode, Learned) else None
        span = 0.0 if learned is None else (quantizer.spec.qmax - quantizer.spec.qmin) * learned.rate
        elements = max(int(np.prod(self.shape)) // max(self.tiling.sets, 1), 1)
        return settings | {
            "mode": MODES[self.mode],
            "written": 0 if self.written is None else self.written.ctypes.data,
            "decay": mode.decay if isinstance(mode, EMA) else 0.0,
            "rate": 1.0 if learned is None else learned.rate,
            "span": span,
            "min_growth": MIN_GROWTH,
            "held": learned is not None and learned.zero_point == "auto",
            "after_relu": quantizer.after_relu,
            "factor": 1.0 / float(np.sqrt(elements * max(abs(quantizer.spec.qmax), 1))),
            "points": 0 if self.images is None else self.images[0],
            "channels": 0 if self.images is None else self.images[1],
        }

    def problems(self) -> bool:
        """Return whether a tensor of the quantizer cannot be read by the native record."""
        quantizer = self.quantizer
        tensors = [each for each in (*quantizer._buffers.values(), *quantizer._parameters.values()) if each is not None]
        floats = [each for each in tensors if each.is_floating_point()]
        return (
            any(
                type(each) not in PLAIN_TYPES or each.device.type != "cpu" or not each.is_contiguous()
                for each in tensors
            )
            or any(each.dtype != torch.float32 for each in floats)
            or quantizer.scale.numel() != self.tiling.sets
        )

    def new(self, dtype: torch.dtype) -> Tensor:
        """Allocate memory in the operand's memory order, for a result."""
        return torch.empty(self.shape, dtype=dtype)


def _mode_of(quantizer: FakeQuantize) -> str:
    mode = quantizer.mode
    if isinstance(mode, PerBatch):
        return "batch"
    if isinstance(mode, Learned):
        return "learned"
    if isinstance(mode, EMA) and quantizer.training and quantizer.observing:
        return "ema"
    return "stored" if isinstance(mode, EMA | Fixed) else ""


class Step(_References):
    """Training steps of a layer on inputs of one shape and memory order; ``native`` is None if there is no record."""

    def __init__(self, layer: Any, x: Tensor, settings: tuple[object, ...]) -> None:
        super().__init__()
        self.settings = settings
        self.native: Any = None
        self._version = -1
        inputs, weights = layer._modules.get("input_quantizer"), layer._modules.get("weight_quantizer")
        weight = layer._parameters.get("weight")
        if weight is None or not _is_eligible(layer, x, weight, inputs, weights):
            self._watch(layer)
            return
        self.kind: Matmul = layer.kind.matmul(layer)
        self.is_linear = isinstance(self.kind, Linear)
        self.to_codes = layer.arithmetic != "float"
        self.memory = layer.memory
        fold: Fold | None = layer.fold
        self.x, self.weight = _Side(inputs, x), _Side(weights, weight)
        self._watch(layer)
        factored = fold is not None and not weights.absorbs_gain
        if self._problems(fold, factored=factored):
            return
        self.channels = int(weight.shape[0])
        self.channels_last = not self.is_linear and (is_channels_last(x) or is_channels_last(weight))
        self.x_stride = x.stride()
        self.out_shape = (*x.shape[:-1], self.channels)
        self.zeros = torch.zeros(self.channels, dtype=torch.int32)
        self.ones = torch.ones(self.channels)
        self.float_bias = fold is not None
        norm = fold.norm if fold is not None and factored else None
        self.factored = factored
        self.native = layer_step(
            self.x.problem(),
            self.weight.problem(),
            {
                "x": self.x.settings(),
                "w": self.weight.settings(),
                "to_codes": self.to_codes,
                "is_linear": self.is_linear,
                "float_bias": self.float_bias or (self.is_linear and x.ndim != _FLAT),
                "channels": self.channels,
                "running_var": 0 if norm is None else self._address(norm._buffers, "running_var"),
                "gamma": 0 if norm is None else self._address(norm._parameters, "weight"),
                "eps": 0.0 if norm is None else norm.eps,
            },
        )
        self.references += [*self.x.references, *self.weight.references]
        self.clips = isinstance(inputs.ste, Clipped)
        self.learns_x, self.learns_w = self.x.mode == "learned", self.weight.mode == "learned"
        self.mask_bytes = -(-x.numel() // 8)
        shifts = [(inputs, "scale_shift"), (inputs, "zero_point_shift"), (weights, "scale_shift")]
        self.shifts = [each._parameters.get(name) for each, name in shifts]

    def _watch(self, layer: Any) -> None:
        for name in ("weight", "bias"):
            self._address(layer._parameters, name)
        for quantizer in layer._modules.values():
            scale = None if quantizer is None else quantizer._buffers.get("scale")
            if scale is not None:  # parameters that were not set when the step was made
                self._address(quantizer._buffers, "scale")

    def _problems(self, fold: Fold | None, *, factored: bool) -> bool:
        """Return whether the native record cannot compute the step."""
        x, weight = self.x, self.weight
        if not x.mode or x.problems() or weight.problems():
            return True
        axes = weight.order.axes
        if weight.mode not in ("batch", "learned") or (axes is not None and axes[0] != 0):
            return True
        if weight.mode == "batch" and not weight.quantizer.never_clips:
            return True
        if self.is_linear and x.order.axes is not None:
            return True
        if self.to_codes:
            kernels = integer_kernels()
            if x.quantizer.spec.format.signed or not (kernels.matmul if self.is_linear else kernels.convolution):
                return True
        if not factored or fold is None:
            return False
        norm = fold.norm
        parts = [each for each in (norm.running_var, norm.weight) if each is not None]
        plain = all(type(each) in PLAIN_TYPES and each.is_contiguous() for each in parts)
        return norm.running_var is None or not plain or any(each.dtype != torch.float32 for each in parts)

    def is_current(self) -> bool:
        """Return whether all tensors are still the same objects at the same addresses."""
        for owner, name, tensor, address in self.references:
            if owner.get(name) is not tensor or tensor.data_ptr() != address:
                return False
        if self.native is None:
            return True
        for side in (self.x, self.weight):
            if side.written is not None and side.quantizer._memo.written is not side.written:
                return False
        return True

    # Forward

    def run(self, x: Tensor, layer: Any) -> Tensor | None:
        """Compute a training pass; return None if the general path must compute it."""
        (_, _, weight, address) = self.references[0]
        bias = self.references[1].tensor if self.references[1].name == "bias" else None
        version = weight._version
        if version == self._version:  # the general path caches the quantized weight
            return None
        keeps = self.to_codes and self._keeps_codes(x)
        data_type = torch.uint8 if self.to_codes else torch.float32
        x_out = self.x.new(torch.uint8) if self.to_codes else borrow_as("input", self.x.shape, data_type)
        w_out = self.weight.new(torch.int8) if self.to_codes else borrow_as("weight", self.weight.shape, data_type)
        mask = torch.empty(self.mask_bytes, dtype=torch.uint8) if keeps and self.clips else None
        link = layer.sum_units(x, bias)
        needs_unit = self.to_codes and (link is not None or not self.is_linear)
        unit = torch.empty(self.channels) if needs_unit else None
        values = self.native.forward(
            x.data_ptr(),
            x_out.data_ptr(),
            0 if mask is None else mask.data_ptr(),
            address,
            w_out.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            0 if unit is None else unit.data_ptr(),
        )
        if values is None:
            return None
        self._version = version
        for side in (self.x, self.weight):
            if side.written is not None:
                side.quantizer.forget_params()
        if link is not None:
            is_sum = unit is not None and not self.float_bias and (bias is None or values.has_bias_codes)
            link.units = Units(unit, channels_are_last=self.is_linear) if is_sum else None  # type: ignore[arg-type]  # see is_sum
        units = self._follow_sums(x, x_out, values)
        kept = None
        if keeps:
            kept = x_out, mask if values.clips else None
        y: Tensor = _NativeStep.apply(x, weight, bias, *self.shifts, self, values, x_out, w_out, unit, kept, units)
        return y

    def _follow_sums(self, x: Tensor, out: Tensor, values: Any) -> Units | None:
        """Overwrite codes or values of x with those of fused requantization; return the units that backward needs."""
        link = self.x.quantizer.sum_units
        if link is None or link.units is None:
            return None
        to = self._target(values)
        units = link.units_for(x, to)
        if units is not None:
            follow_sums(x, self.x.order.restore(out), units, to)
        return units

    def _target(self, values: Any) -> Requantization:
        spec = self.x.quantizer.spec
        return Requantization(values.x_scale[0], int(values.x_zero[0]), int(spec.qmin), int(spec.qmax))

    def _keeps_codes(self, x: Tensor) -> bool:
        if self.memory == "float" or self.learns_x:
            return False
        if self.memory == "codes":
            return True
        function = x.grad_fn
        return not (function is None or type(function).__name__ == "ReluBackward0")

    def product(self, x: Tensor, w: Tensor, bias: Tensor | None, values: Any, unit: Tensor | None) -> Tensor:
        """Multiply quantized operands, which are in memory order: codes, or floats."""
        if not self.to_codes:
            return self.kind.forward(self.x.order.restore(x), self.weight.order.restore(w), bias)
        if self.is_linear:
            sums = multiply_codes(x.view(-1, x.shape[-1]), w)
            self.native.finish(values, sums.data_ptr(), sums.numel(), False)
            return sums.view(torch.float32).view(self.out_shape)
        return self._convolve(self.x.order.restore(x), self.weight.order.restore(w), bias, values, unit)

    def _convolve(self, x: Tensor, w: Tensor, bias: Tensor | None, values: Any, unit: Tensor | None) -> Tensor:
        kind: Any = self.kind
        settings = kind.stride, kind.padding, kind.dilation, kind.groups
        packed = pack_convolution(w.contiguous(), values.zero_point, settings, tuple(x.shape))
        if not values.has_bias_codes:
            y = convolve_codes(x, values.zero_point, packed, unit, bias, settings, self.zeros)  # type: ignore[arg-type]
        else:
            sums = convolve_codes(x, values.zero_point, packed, self.ones, None, settings, self.zeros)
            sums = sums.movedim(1, -1).contiguous()
            if self.native.finish(values, sums.data_ptr(), sums.numel(), True):
                y = sums.movedim(-1, 1)
            else:  # float32 has rounded a sum
                y = self._exact_convolution(x, w, bias, values)
        return y if self.channels_last else y.contiguous()

    def _exact_convolution(self, x: Tensor, w: Tensor, bias: Tensor | None, values: Any) -> Tensor:
        scale = torch.tensor(values.w_scale)
        if values.factor:
            scale = scale / torch.tensor(values.factor)
        coded = WeightCodes(w, scale, float_bias=self.float_bias)
        inputs = InputCodes(x, np.float32(values.x_scale[0]), values.zero_point)
        return integer_product(inputs, coded, bias, self.kind, channels_last=True)  # type: ignore[arg-type]

    # Backward

    def gradients(self, ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients of x, weight, bias and learned shifts."""
        *saved, weight = ctx.saved_tensors
        values, needs = ctx.values, ctx.needs_input_grad
        if torch.is_grad_enabled():
            return self._differentiable_gradients(ctx, g, saved, weight)
        from_codes = ctx.keeps_codes
        x = saved[0]
        learns_x, learns_w = needs[3] or needs[4], needs[5]
        needed = needs[0] or learns_x, needs[1] or learns_w, needs[2]
        mask = saved[1] if len(saved) > 1 else None
        if mask is None and needed[0] and values.clips and not from_codes and not learns_x:
            mask = torch.empty(self.mask_bytes, dtype=torch.uint8)
            new_mask = mask.data_ptr()
        else:
            new_mask = 0
        x_values = borrow_as("input", self.x.shape, torch.float32)
        w_values = borrow_as("weight", self.weight.shape, torch.float32) if needed[0] else None
        self.native.operands(
            values,
            x.data_ptr(),
            from_codes,
            x_values.data_ptr(),
            new_mask,
            weight.data_ptr(),
            0 if w_values is None else w_values.data_ptr(),
        )
        if ctx.units is not None and not from_codes:
            follow_sums(x, self.x.order.restore(x_values), ctx.units, self._target(values))
        w = weight if w_values is None else self.weight.order.restore(w_values)
        gx, gw, gb = self.kind.backward(g, self.x.order.restore(x_values), w, needed)
        of_x: tuple[Tensor | None, ...] = (gx, None, None)
        if gx is not None:
            of_x = self._learned(values, gx, x, of_weight=False) if learns_x else (self._masked(gx, mask), None, None)
        of_w: tuple[Tensor | None, ...] = (gw, None, None)
        if gw is not None and self.learns_w:
            of_w = self._learned(values, gw, weight, of_weight=True)
        return of_x[0], of_w[0], gb, *of_x[1:], of_w[1], *(None,) * 7

    def _masked(self, gx: Tensor, mask: Tensor | None) -> Tensor:
        if gx.stride() != self.x_stride:
            laid = self.x.order.lay(gx)
            gx = self.x.order.restore(laid)
        if mask is not None:
            self.native.clear(gx.data_ptr(), mask.data_ptr())
        return gx

    def _learned(self, values: Any, g: Tensor, x: Tensor, *, of_weight: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the gradients of an operand and its shifts; sums add elements in C order, as in ``eager``."""
        side = self.weight if of_weight else self.x
        quantizer = side.quantizer
        scale_shift, zero_shift = quantizer.scale_shift, quantizer.zero_point_shift
        of_scale = torch.empty_like(scale_shift)
        of_zero = None if zero_shift is None else torch.empty_like(zero_shift)
        addresses = of_scale.data_ptr(), 0 if of_zero is None else of_zero.data_ptr()
        if side.order.axes is None or side.images is not None:
            laid = side.order.lay(g)
            self.native.learned(values, of_weight, laid.data_ptr(), x.data_ptr(), *addresses)
            return side.order.restore(laid), of_scale, of_zero
        spec = quantizer.spec
        params = self._params(values, of_weight=of_weight)
        gx, gs, gz = eager.learned_backward(g, x, params, quantizer.ste)
        state = quantizer.learned_state()
        parts = state.gradients(gs, gz, spec, quantizer.mode)  # type: ignore[arg-type]  # mode Learned
        return gx, parts[0], None if of_zero is None else parts[1]

    def _params(self, values: Any, *, of_weight: bool) -> QuantParams:
        side = self.weight if of_weight else self.x
        parts = (values.w_scale, values.w_zero) if of_weight else (values.x_scale, values.x_zero)
        shape = side.quantizer.spec.granularity.tiling(_original(side.shape, side.order)).scale_shape
        scale, zero = (np.asarray(part, np.float32).reshape(shape) for part in parts)
        return QuantParams(side.quantizer.spec, scale, zero.astype(np.int32))

    def _differentiable_gradients(
        self, ctx: Any, g: Tensor, saved: list[Tensor], weight: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Compute gradients that can be differentiated again, by the general path."""
        needs = ctx.needs_input_grad
        if ctx.keeps_codes:
            raise UnsupportedError(
                "layers that keep codes have no second derivatives: use qt.prepare(..., memory='float')"
            )
        if any(needs[3:6]):
            raise learned_derivative_error()
        factor = None
        if self.factored:
            factor = torch.tensor(ctx.values.factor).reshape(-1, *(1,) * (weight.ndim - 1))
        x_ste, w_ste = self.x.quantizer.ste, self.weight.quantizer.ste
        operand = Operand(Values(self._params(ctx.values, of_weight=False)), x_ste)
        clips: Estimator = w_ste if self.learns_w else Identity()
        weights = Operand(Values(self._params(ctx.values, of_weight=True)), clips)
        quantized = QuantizedWeight(weights, factor, torch.empty(0))
        gx, gw, gb, *_ = matmul_gradients(
            self.kind, g, saved[0], weight, operand, quantized, (*needs[:3], *(False,) * 4)
        )
        return gx, gw, gb, *(None,) * 10


def _original(shape: torch.Size, order: Order) -> tuple[int, ...]:
    if order.axes is None:
        return tuple(shape)
    sizes = dict(zip(order.axes, shape, strict=True))
    return tuple(sizes[axis] for axis in range(len(shape)))


def _is_eligible(layer: Any, x: Tensor, weight: Tensor, inputs: Any, weights: Any) -> bool:
    """Return whether a layer and its quantizers have settings that steps support."""
    tensors = [weight, *(each for each in [layer._parameters.get("bias")] if each is not None)]
    plain = all(type(each) in PLAIN_TYPES and each.dtype == torch.float32 for each in (x, *tensors))
    dense = weight.is_contiguous() or order_of(weight, _ANY_ORDER).axes is not None
    if not plain or not dense or not x.numel() or any(each.device.type != "cpu" for each in (x, *tensors)):
        return False
    if not x.is_contiguous() and order_of(x, _ANY_ORDER).axes is None:
        return False
    if layer.arithmetic == "float" and layer.bias_rule != "float":
        return False
    if not (isinstance(inputs, FakeQuantize) and isinstance(weights, FakeQuantize)):
        return False
    for quantizer in (inputs, weights):
        is_active = quantizer.enabled and not quantizer.is_passing and quantizer.training
        if not is_active or quantizer.sync or quantizer.watcher is not None or quantizer.is_stochastic:
            return False
    granular = isinstance(inputs.spec.granularity, PerTensor) and weights.spec.granularity in (PerTensor(), PerAxis(0))
    if (
        not granular
        or not isinstance(inputs.ste, Clipped | Identity)
        or not isinstance(weights.ste, Clipped | Identity)
    ):
        return False
    if layer.kind.matmul is None or type(layer.kind.matmul(layer)) not in (Linear, Convolution):
        return False
    return _has_common_shape(layer, x, weight)


_ANY_ORDER = QuantSpec("int8")


def _has_common_shape(layer: Any, x: Tensor, weight: Tensor) -> bool:
    fold: Any = layer.fold
    if fold is not None and fold.norm.fused:
        return False
    if isinstance(layer, nn.Linear):
        return fold is None or x.ndim == _FLAT
    return x.ndim == weight.ndim and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)


class _NativeStep(torch.autograd.Function):
    """The autograd function of a step: x, weight, bias, both shifts of x, and the scale shift of the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
        *_, step, values, x_out, w_out, unit, kept, ctx.units = rest
        ctx.step, ctx.values, ctx.keeps_codes = step, values, kept is not None
        if kept is None:
            ctx.save_for_backward(x, weight)
        else:
            codes, mask = kept
            ctx.save_for_backward(*((codes, weight) if mask is None else (codes, mask, weight)))
        y: Tensor = step.product(x_out, w_out, bias, values, unit)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        result: tuple[Tensor | None, ...] = ctx.step.gradients(ctx, g)
        return result
