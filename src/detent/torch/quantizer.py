"""FakeQuantize: fake quantization as a module with state.

``values_for`` returns the parameters of a forward pass, by scale mode:

=========== ================================== ================================== ====================================
mode        training                           evaluation                         first training batch, uncalibrated
=========== ================================== ================================== ====================================
PerBatch    range of this batch                range of this batch                range of this batch
EMA         EMA range, updated by this batch   EMA range                          this batch starts the EMA range
Fixed       stored parameters                  stored parameters                  NotCalibratedError
Learned     stored parameters, with gradients  stored parameters, with gradients  this batch sets the parameters
=========== ================================== ================================== ====================================

In evaluation, modes other than PerBatch raise NotCalibratedError if there are no parameters yet. Some attributes change
the behavior in this table. With ``observing=False``, training works like evaluation. With ``sync=True``, as in
distributed training, only ``qt.sync`` updates the EMA range, with the ranges of all forward passes since the last
``qt.sync``. During calibration or a delay, data pass unchanged: calibration observes the data, and during a delay the
data update EMA ranges.

Native kernels cannot read tensors under ``torch.compile``, ``torch.export`` and ``torch.func``, or on devices other
than the CPU. For such tensors, ``traced_values_for`` implements the table in torch operations. It cannot branch on data
or state. So it does not reject NaN, and in mode Learned it does not set the parameters from the first batch.
"""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from detent.checks import refuse_nan
from detent.errors import NotCalibratedError, RangeError, StateError
from detent.formats import Format
from detent.observers import Observer
from detent.params import QuantParams
from detent.plan import STEP_LIMIT
from detent.rule import ObserverSpec
from detent.scale_mode import EMA, Learned, PerBatch, ScaleMode, get_scale_mode
from detent.spec import QuantSpec, get_spec
from detent.ste import Clipped, Custom, Estimator, EstimatorLike, Identity, get_estimator
from detent.torch import compiled_operators, eager, traced
from detent.torch.arrays import FLOAT_TYPES, Slot, check_float, is_plain, on_cpu, process_count, scale_dtype, to_array
from detent.torch.fused_requantization import SumUnits, follow_sums, follow_sums_traced
from detent.torch.integer_product import Requantization
from detent.torch.operator import Values, apply, apply_traced, check_finite_zero_point, rounded_zero_point
from detent.torch.parameters import ParameterState
from detent.torch.recomputation import Recording, is_recomputing, is_recorded, once
from detent.torch.transforms import outside

__all__ = ["FakeQuantize", "Quantized", "WatcherFunction"]

EMA_DEFAULT = EMA(0.99)
FORWARDS_WITHOUT_SYNC = 100  # training forward passes before a warning; gradient accumulation needs fewer
Range = tuple[NDArray[Any], NDArray[Any]]
WatcherFunction = Callable[["FakeQuantize", Tensor, QuantParams | None], None]


class Quantized(NamedTuple):
    """A fake-quantized tensor, with parameters and STE for the backward pass."""

    tensor: Tensor
    values: Values
    ste: Estimator  # Identity if clipping is impossible


class FakeQuantize(ParameterState):
    """Fake quantization as a module with state.

    Args:
        spec: a QuantSpec, a format or a short text such as "int8/axis0".
        mode: scale mode: PerBatch, EMA, Fixed or Learned.
        ste: straight-through estimator for the backward pass; None uses the gradient mask of the spec's convention.
        shape: shape of the data, which determines the number of scales. Learned scales need ``shape``, except for
            per-tensor scales. Axes along which scales do not vary may have any length.
        dtype: dtype of the scale: float32, or float64 for float64 data.

    Attributes:
        enabled: if False, data pass unchanged, and the state does not change.
        observing: if False, stored parameters stay constant in training.
        delayed: if True, data pass unchanged and update the EMA range; ``qt.Schedule`` sets this attribute.
        sync: if True, only ``qt.sync`` updates the EMA range.
        watcher: function that each quantizing forward pass calls with this module, x and the parameters for x;
            ``qt.watch`` sets it. If the native kernels cannot read x, the watcher receives None instead of the
            parameters, and can call ``params_for(x)``.
        name: full name in the model, for messages.
        observer: observer for ``qt.calibrating``; None leaves the choice to ``qt.calibrating``.
        sum_units: link to the integer layer into which ONNX Runtime fuses this quantizer, or None.
        after_relu: if True, ranges are those of ``relu(x)``. Codes below the smallest one are clipped, so an affine
            quantizer includes the ReLU.

    >>> import detent as dt, detent.torch as qt, torch
    >>> fq = qt.FakeQuantize("int8", mode=dt.EMA(decay=0.9))
    >>> fq(torch.tensor([-127.0, 0.4]))
    tensor([-127.,    0.])
    >>> fq
    FakeQuantize(int8/tensor/symmetric/onnx, EMA(decay=0.9), Clipped(on='code', bounds='inclusive'), scale 1)
    >>> sorted(fq.state_dict())
    ['_extra_state', 'hi', 'initialized', 'lo', 'scale', 'zero_point']
    """

    def __init__(
        self,
        spec: QuantSpec | Format | str,
        mode: ScaleMode | str = EMA_DEFAULT,
        ste: EstimatorLike = None,
        *,
        shape: tuple[int, ...] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(get_spec(spec), get_scale_mode(mode), shape, dtype)
        self.ste = get_estimator(ste, self.spec.convention)
        self.enabled = True
        self.observing = True
        self.delayed = False
        self.sync = False
        self.watcher: WatcherFunction | None = None
        self.observer: ObserverSpec | None = None
        self.after_relu = False
        self.sum_units: SumUnits | None = None
        self.is_calibrating = False
        self.observers_in_use: tuple[Observer | None, ...] = ()  # observers of nested calibrations, from outer to inner

    @property
    def ste(self) -> Estimator:
        """The straight-through estimator for the backward pass."""
        return self._ste

    @ste.setter
    def ste(self, ste: Estimator) -> None:
        self._ste = ste
        self._texts = compiled_operators.texts_of(self.spec, ste, self.mode)

    def forward(self, x: Tensor) -> Tensor:
        """Update the state as the mode requires, and fake-quantize x.

        Raises:
            NotCalibratedError: there are no parameters yet, and the module is in evaluation or in mode Fixed.
            NaNError: x contains NaN, and the mode uses the range of x.
        """
        if not self.training or torch.compiler.is_compiling() or is_recorded():
            return self._forward(x)
        with Recording(self, x):
            return self._forward(x)

    def _forward(self, x: Tensor) -> Tensor:
        check_float(x)
        if not self.enabled or not x.numel():
            return x
        if self.is_passing:
            self._observe_passing(x)
            return x
        if self._is_native(x):
            values = self.values_for(x)
            y = apply(x, values, self.ste, self.next_step())
            if self.sum_units is not None and self.sum_units.units is not None:
                to = Requantization.of(values.params)
                units = self.sum_units.units_for(x, to)
                if units is not None:
                    follow_sums(x, y.detach(), units, to)
            return y
        is_operator = self._texts is not None and compiled_operators.is_supported(x)
        if is_operator and self.is_learned:
            y = compiled_operators.fake_quantize_learned(x, self.learned_state(), self._texts)  # type: ignore[arg-type]
            return y if self.sum_units is None else self.follow_sums_traced(y, x, *self.learned_values())
        scale, zero_point = self.traced_values_for(x)
        if is_operator:
            y = compiled_operators.fake_quantize(x, scale, zero_point, self._texts)  # type: ignore[arg-type]
            return self.follow_sums_traced(y, x, scale, zero_point)
        return apply_traced(x, scale, zero_point, self.spec, self.ste, self.next_step(), learned=self.is_learned)

    def follow_sums_traced(self, y: Tensor, x: Tensor, scale: Tensor, zero_point: Tensor | None) -> Tensor:
        """Apply fused requantization to y, the fake-quantized x, in compiled code."""
        link = self.sum_units
        units = None if link is None else link.take(x)
        if link is None or units is None or scale.numel() != 1:
            return y
        whole = self.zero_point if zero_point is None else zero_point
        whole = rounded_zero_point(whole, self.spec) if whole.is_floating_point() else whole
        return follow_sums_traced(y, x, units, link, scale.detach(), whole.detach(), self.spec)

    def _is_native(self, x: Tensor) -> bool:
        return is_plain(x) and self.scale.device.type == "cpu"

    def next_step(self) -> int:
        """Return the counter of stochastic rounding; in training, also advance the counter."""
        if not self.is_stochastic:
            return 0
        if not self.training:
            return int(self.step)
        return once((id(self), "step"), self._count, lambda: (int(self.step) - 1) % STEP_LIMIT)

    def _count(self) -> int:
        current = int(self.step)
        with outside(self.step):
            self.step.fill_((current + 1) % STEP_LIMIT)
        return current

    # Parameters by mode

    def values_for(self, x: Tensor) -> Values:
        """Update the state as the mode requires, and return the parameters for x, which must be a plain tensor."""
        mode, params, recomputed = self.mode, None, is_recomputing()
        updates = self.training and self.observing
        if isinstance(mode, PerBatch):
            params = self._params_of_batch(x)
            if not recomputed:
                self.hold(params)
        elif isinstance(mode, EMA) and updates:
            params = once(id(self), lambda: self._update_ema(x) or self.stored_params(), self.stored_params)
        elif isinstance(mode, Learned) and updates and not recomputed and not self.is_initialized:
            self._check_can_start()
            self.set_params(self._params_at_start(x, mode))
        learned: tuple[Tensor | None, Tensor | None] = (None, None)
        if isinstance(mode, Learned):
            learned = scale, zero_point = self.learned_values()
            if zero_point is not None:
                check_finite_zero_point(zero_point)
            self.refresh((scale, zero_point))
        if params is None:
            params = self.stored_params()
        if self.watcher is not None and not recomputed:
            self.watcher(self, x, params)
        return Values(params, *learned)

    def traced_values_for(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Update the state like ``values_for``, with torch operations; return scale and zero point as tensors."""
        mode, recomputed = self.mode, is_recomputing()
        values = self.scale, self.zero_point
        if isinstance(mode, PerBatch):
            if self._texts is not None and compiled_operators.is_supported(x):
                values = compiled_operators.batch_parameters(self._ranged(x), self._texts.spec)
            else:
                values = traced.derive(self.spec, *traced.minmax(self._ranged(x), self.spec))
            if not recomputed and (self.training or _may_write_in_evaluation()):
                self.hold_traced(*values)
        elif isinstance(mode, EMA) and self.training and self.observing:
            values = once(id(self), lambda: self._values_after(x), lambda: values)
        elif isinstance(mode, Learned):
            scale, zero_point = self.learned_values()
            values = scale, self.zero_point if zero_point is None else zero_point
        if self.watcher is not None and not recomputed and not torch.compiler.is_compiling():
            self.watcher(self, x, None)
        return values

    def _values_after(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """In mode EMA, update the EMA range with x, and return copies of scale and zero point.

        Copies are needed because the next forward pass changes the buffers.
        """
        if self._texts is not None and compiled_operators.is_supported(x) and not self.sync:
            state = self.lo, self.hi, self.scale, self.zero_point, self.initialized
            decay = self.mode.decay  # type: ignore[attr-defined]  # called in mode EMA only
            updated: tuple[Tensor, Tensor] = compiled_operators.ema_parameters(
                self._ranged(x), *state, self._texts.spec, decay
            )
            return updated
        self._update_ema_traced(x)
        return self.scale.clone(), self.zero_point.clone()

    def params_for(self, x: Tensor) -> QuantParams:
        """Return the parameters for x, without a change of state; raise NotCalibratedError if none are set."""
        return self._params_of_batch(x) if isinstance(self.mode, PerBatch) else self.params

    def quantize(
        self, x: Tensor, step: int, slot: Slot | None = None, values: Values | None = None, *, to_codes: bool = False
    ) -> Quantized:
        """Fake-quantize a plain tensor without gradients, with ``values`` or, if it is None, with ``values_for(x)``.

        In mode PerBatch, one pass over memory computes the range and quantizes, if a kernel supports this. With
        ``to_codes``, the result has codes of one byte instead of fake-quantized values.
        """
        dynamic = None
        if isinstance(self.mode, PerBatch):
            dynamic = eager.fake_quantize_dynamic(x, self.spec, slot, to_codes=to_codes)
        if dynamic is None:
            values = self.values_for(x) if values is None else values
            if to_codes:
                return Quantized(eager.quantize(x, values.params), values, self.ste)
            return Quantized(eager.fake_quantize(x, values.params, step, slot), values, self.ste)
        quantized, params, nonfinite = dynamic
        if nonfinite:
            self._refuse_nan(x)
        if not is_recomputing():
            self.hold(params)
            if self.watcher is not None:
                self.watcher(self, x, params)
        is_unclipped = self.never_clips and not nonfinite
        return Quantized(quantized, Values(params), Identity() if is_unclipped else self.ste)

    @property
    def never_clips(self) -> bool:
        """Whether it is certain that quantizing a batch with its own range clips no finite element."""
        spec, zero_point = self.spec, self.spec.symmetric_zero_point if self.spec.symmetric else 0
        return (
            (isinstance(self.ste, Identity) or self.ste == Clipped())
            and spec.symmetric
            and spec.convention.symmetric_scale == "qmax"
            and spec.qmin - zero_point <= zero_point - spec.qmax  # otherwise the smallest element may be clipped
            # x / s may exceed the last code by a rounding error; only rounding to the nearest integer removes it
            and spec.format.is_integer
            and spec.rounding.kind in ("half_even", "half_away")
        )

    # The range of a batch

    def _params_of_batch(self, x: Tensor) -> QuantParams:
        lo, hi = self._range_of(on_cpu(x))
        return QuantParams.from_range(self.spec, lo, hi, dtype=FLOAT_TYPES[scale_dtype(x)])

    def _params_at_start(self, x: Tensor, mode: Learned) -> QuantParams:
        """Return the parameters with which mode Learned starts on its first batch without calibration."""
        if mode.start == "minmax":
            return self._params_of_batch(x)
        observer = (self.observer or ObserverSpec("mse")).make(self.spec.granularity)
        observer.observe(to_array(on_cpu(self._ranged(x))))
        if observer.nonfinite:
            self._refuse_nan(x)
        return observer.params(self.spec)

    def _range_of(self, x: Tensor) -> Range:
        lo, hi, nonfinite = eager.bounds(x.detach(), self.spec)
        if self.after_relu:
            lo, hi = np.maximum(lo, 0), np.maximum(hi, 0)
        if nonfinite:
            self._refuse_nan(x)
            if (lo > hi).all():
                raise RangeError(
                    f"{self.label}: the input of shape {tuple(x.shape)} has no finite value: check the layers before "
                    "this quantizer"
                )
        return lo, hi

    def _ranged(self, x: Tensor) -> Tensor:
        """Return the values whose range counts."""
        return torch.relu(x.detach()) if self.after_relu else x.detach()

    def _update_ema(self, x: Tensor) -> QuantParams | None:
        """In mode EMA, update the range with x and return new parameters; return None if ``qt.sync`` does this."""
        if self.sync and not (self.is_initialized or self.delayed):
            self._check_can_start()
        lo, hi = self._range_of(x)
        if self.lo.shape != lo.shape:
            self._set_scale_shape(x, lo.shape)
        self._warn_without_sync()
        if not self.sync:
            return self.merge_range(lo, hi)
        self.add_pending(lo, hi)
        return None

    def _update_ema_traced(self, x: Tensor) -> None:
        """In mode EMA, update the EMA range with x, in torch operations."""
        if not torch.compiler.is_compiling():
            self._warn_without_sync()
        lo, hi = (bound.to(torch.float32) for bound in traced.minmax(self._ranged(x), self.spec))
        if self.sync:
            self.add_pending_traced(lo, hi)
        else:
            self.merge_range_traced(lo, hi)

    def _set_scale_shape(self, x: Tensor, shape: tuple[int, ...]) -> None:
        if self.scale.shape != (0,):
            raise StateError(
                f"{self.label} has scales of shape {tuple(self.scale.shape)}, but an input of shape {tuple(x.shape)} "
                f"with granularity {self.spec.granularity} needs scales of shape {shape}: give all inputs the same "
                "shape, or use mode PerBatch"
            )
        self._make_state(self.scale.dtype, shape, self.scale.device)

    def _check_can_start(self) -> None:
        if self.sync:
            raise NotCalibratedError(
                f"{self.label} has no parameters yet, and with sync=True a process cannot set parameters from its "
                "own batches: calibrate the model first (`with qt.calibrating(model): ...`)"
            )

    def _refuse_nan(self, x: Tensor) -> None:
        if torch.isnan(x).any():
            repair = "check the data, the learning rate, and the layers before this quantizer"
            refuse_nan(f"{self.label}: x", to_array(on_cpu(x)), repair)

    def _warn_without_sync(self) -> None:
        """Warn if processes do not merge ranges; all quantizers use the same text, so Python shows the warning once."""
        self._memo.forwards += 1
        if self.sync and self._memo.forwards == FORWARDS_WITHOUT_SYNC:
            warnings.warn(
                f"qt.sync(model) was not called for {FORWARDS_WITHOUT_SYNC} training forward passes, so EMA ranges are "
                "not updated: call qt.sync once per optimizer step on every process",
                stacklevel=2,
            )
        elif not self.sync and self._memo.forwards == 1 and process_count() > 1:
            warnings.warn(
                "each process updates its EMA ranges separately: start torch.distributed before qt.prepare, or use "
                "qt.prepare(..., sync=True), and call qt.sync(model) once per optimizer step",
                stacklevel=2,
            )

    # Calibration and delay: data pass unchanged

    @property
    def is_passing(self) -> bool:
        """Whether data pass unchanged, because of calibration or a delay."""
        return self.is_calibrating or self.delayed

    def start_calibration(self, observer: Observer | None) -> None:
        """Let data pass unchanged, and let the observer, if any, observe the data; calibrations can be nested."""
        self.is_calibrating, self.observers_in_use = True, (*self.observers_in_use, observer)

    def stop_calibration(self) -> None:
        """End the innermost calibration; after the outermost calibration, forward passes quantize again."""
        self.observers_in_use = self.observers_in_use[:-1]
        self.is_calibrating = bool(self.observers_in_use)

    def _observe_passing(self, x: Tensor) -> None:
        if self.is_calibrating:
            self._observe(x)
        elif isinstance(self.mode, EMA) and self.training and self.observing and not is_recomputing():
            update = self._update_ema if self._is_native(x) else self._update_ema_traced
            update(x)

    @torch.compiler.disable
    def _observe(self, x: Tensor) -> None:
        for observer in self.observers_in_use:
            if observer is None:
                continue
            before = observer.nonfinite
            observer.observe(to_array(on_cpu(self._ranged(x))))
            if observer.nonfinite > before:
                self._refuse_nan(x)

    def extra_repr(self) -> str:
        """Return spec, mode, STE, and the scale or the range of scales."""
        ste = "custom" if isinstance(self.ste, Custom) else repr(self.ste)
        scales = "not calibrated"
        if self.scale.device.type != "meta" and bool(self.initialized):
            smallest, largest = float(self.scale.min()), float(self.scale.max())
            scales = f"scale {smallest:.3g}" if smallest == largest else f"scales {smallest:.3g} to {largest:.3g}"
        off = ", delayed" * self.delayed + ", disabled" * (not self.enabled)
        return f"{self.spec}, {self.mode}, {ste}, {scales}{off}"


def _may_write_in_evaluation() -> bool:
    """Return whether evaluation may write to buffers; exported programs and ``torch.func`` forbid this."""
    if torch.compiler.is_compiling():
        return not torch.compiler.is_exporting()
    return not torch._C._are_functorch_transforms_active()
