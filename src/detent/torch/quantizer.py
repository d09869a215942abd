"""FakeQuantize: fake quantization as a module with state.

Every forward takes its parameters from ``values_for``, by the scale mode:

=========== ======================================== ================================ ================================
mode        training                                 evaluation                       before any data
=========== ======================================== ================================ ================================
PerBatch    the range of this batch                  the range of this batch          nothing is needed
EMA         the average, moved by this batch         the average                      the first batch is the average
Fixed       the state                                the state                        NotCalibratedError
Learned     the state, with gradients                the state, with gradients        the first batch sets it
=========== ======================================== ================================ ================================

Switches change this table. ``observing=False`` gives training the column of evaluation. With ``sync``, as in
distributed training, the EMA range moves in ``qt.sync`` only, by the ranges of all forwards since the last call. During
calibration or a delay, data pass unchanged: calibration observes them, and under a delay EMA ranges move.

Tensors that native kernels cannot read (in ``torch.compile`` and ``torch.export``, under ``torch.func``, on other
devices) go through ``traced_values_for``, the same table in torch operations. It cannot branch on data or state, so it
neither rejects NaN nor starts mode Learned from its first batch.
"""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

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
from detent.torch import eager, traced
from detent.torch.arrays import FLOAT_TYPES, Slot, check_float, is_plain, on_cpu, process_count, scale_dtype, to_array
from detent.torch.operator import Values, apply, apply_traced, check_finite_zero_point
from detent.torch.parameters import ParameterState
from detent.torch.recomputation import Recording, is_recomputing, is_recorded, once
from detent.torch.transforms import outside

__all__ = ["FakeQuantize", "Quantized", "WatcherFunction"]

EMA_DEFAULT = EMA(0.99)
FORWARDS_WITHOUT_SYNC = 100  # in training, before a warning
Range = tuple[NDArray[Any], NDArray[Any]]
WatcherFunction = Callable[["FakeQuantize", Tensor, QuantParams | None], None]


class Quantized(NamedTuple):
    """A fake-quantized tensor, and what its backward needs."""

    tensor: Tensor
    values: Values
    ste: Estimator  # Identity if nothing can have been clipped


class FakeQuantize(ParameterState):
    """Fake quantization as a module with state.

    Args:
        spec: how to quantize; a QuantSpec, a format or a short string.
        mode: where the parameters come from.
        ste: the straight-through estimator of backward; None is the mask of the spec's convention.
        shape: the shape of the data, which gives the state its final shape; needed before data for every granularity
            except per-tensor. Axes that do not matter may have any length.
        dtype: the scale's type, float32 or, for float64 data, float64.

    Attributes:
        enabled: False passes data unchanged and keeps the state.
        observing: False keeps the parameters in training, too.
        delayed: data pass unchanged while the EMA range moves; ``qt.Schedule`` sets it.
        sync: the EMA range moves in ``qt.sync`` only.
        watcher: called with this module, x and its parameters in every forward that quantizes; ``qt.watch`` sets it.
            Forwards in torch operations pass None; then ``params_for(x)`` gives the parameters.
        name: the full name in the model, for messages.
        observer: the observer for ``qt.calibrating``.

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
        self.is_calibrating = False
        self.observers_in_use: tuple[Observer | None, ...] = ()  # of all calibrations around, the innermost last

    def forward(self, x: Tensor) -> Tensor:
        """Fake-quantize x, after updating the state as the mode says.

        Raises:
            NotCalibratedError: mode Fixed, or evaluation, before there are parameters.
            NaNError: x holds NaN where its range is taken.
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
            self._look_at_passing(x)
            return x
        if self._is_native(x):
            return apply(x, self.values_for(x), self.ste, self.next_step())
        scale, zero_point = self.traced_values_for(x)
        return apply_traced(x, scale, zero_point, self.spec, self.ste, self.next_step(), learned=self.is_learned)

    def _is_native(self, x: Tensor) -> bool:
        return is_plain(x) and self.scale.device.type == "cpu"

    def next_step(self) -> int:
        """The counter of stochastic rounding, one per forward in training."""
        if not self.is_stochastic:
            return 0
        if not self.training:
            return int(self.step)
        return once((id(self), "step"), self._count, lambda: (int(self.step) - 1) % STEP_LIMIT)

    def _count(self) -> int:
        now = int(self.step)
        with outside(self.step):
            self.step.fill_((now + 1) % STEP_LIMIT)
        return now

    # Parameters by mode

    def values_for(self, x: Tensor) -> Values:
        """The parameters of a forward over x, a plain tensor; updates the state first, as the mode says."""
        mode, params, recomputed = self.mode, None, is_recomputing()
        updates = self.training and self.observing
        if isinstance(mode, PerBatch):
            params = self._params_of_batch(x)
            if not recomputed:
                self.hold(params)
        elif isinstance(mode, EMA) and updates:
            params = once(id(self), lambda: self._move_average(x) or self.stored_params(), self.stored_params)
        elif isinstance(mode, Learned) and updates and not recomputed and not self.is_initialized:
            self._refuse_own_start()
            self.set_params(self._params_of_batch(x))
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
        """``values_for`` in torch operations: scale and zero point as tensors."""
        mode, recomputed = self.mode, is_recomputing()
        values = self.scale, self.zero_point
        if isinstance(mode, PerBatch):
            values = traced.derive(self.spec, *traced.minmax(x.detach(), self.spec))
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
        """Mode EMA: scale and zero point after x has moved the average; copies, for the next forward moves it again."""
        self._move_average_traced(x)
        return self.scale.clone(), self.zero_point.clone()

    def params_for(self, x: Tensor) -> QuantParams:
        """The parameters for x, without changing the state; NotCalibratedError if there are none."""
        return self._params_of_batch(x) if isinstance(self.mode, PerBatch) else self.params

    def quantize(self, x: Tensor, step: int, slot: Slot | None = None, values: Values | None = None) -> Quantized:
        """Fake-quantize x, a plain tensor without gradients, by ``values_for(x)`` if no values are given.

        Mode PerBatch takes range and values in one pass over memory if a kernel can.
        """
        dynamic = eager.fake_quantize_dynamic(x, self.spec, slot) if isinstance(self.mode, PerBatch) else None
        if dynamic is None:
            values = self.values_for(x) if values is None else values
            return Quantized(eager.fake_quantize(x, values.params, step, slot), values, self.ste)
        quantized, params, nonfinite = dynamic
        if nonfinite:
            self._refuse_nan(x)
        if not is_recomputing():
            self.hold(params)
            if self.watcher is not None:
                self.watcher(self, x, params)
        passes = self._never_clips and not nonfinite
        return Quantized(quantized, Values(params), Identity() if passes else self.ste)

    @property
    def _never_clips(self) -> bool:
        """Whether no finite element is clipped by the range of its batch: the largest one rounds to the last code."""
        spec, zero_point = self.spec, self.spec.symmetric_zero_point if self.spec.symmetric else 0
        return (
            (isinstance(self.ste, Identity) or self.ste == Clipped())
            and spec.symmetric
            and spec.convention.symmetric_scale == "qmax"
            and spec.qmin - zero_point <= zero_point - spec.qmax  # else the smallest one may be clipped
            # x / s may exceed the last code by its rounding error, which other roundings and formats do not forgive
            and spec.format.is_integer
            and spec.rounding.kind in ("half_even", "half_away")
        )

    # The range of a batch

    def _params_of_batch(self, x: Tensor) -> QuantParams:
        lo, hi = self._range_of(on_cpu(x))
        return QuantParams.from_range(self.spec, lo, hi, dtype=FLOAT_TYPES[scale_dtype(x)])

    def _range_of(self, x: Tensor) -> Range:
        lo, hi, nonfinite = eager.bounds(x.detach(), self.spec)
        if nonfinite:
            self._refuse_nan(x)
            if (lo > hi).all():
                raise RangeError(f"{self.label}: its input of shape {tuple(x.shape)} has no finite value")
        return lo, hi

    def _move_average(self, x: Tensor) -> QuantParams | None:
        """Mode EMA: blend x into the EMA range and return its parameters; None if only ``qt.sync`` updates it."""
        if self.sync and not (self.is_initialized or self.delayed):
            self._refuse_own_start()
        lo, hi = self._range_of(x)
        if self.lo.shape != lo.shape:
            self._take_shape(x, lo.shape)
        self._remind_of_sync()
        if not self.sync:
            return self.merge_range(lo, hi)
        self.add_pending(lo, hi)
        return None

    def _move_average_traced(self, x: Tensor) -> None:
        """``_move_average`` in torch operations."""
        if not torch.compiler.is_compiling():
            self._remind_of_sync()
        lo, hi = (bound.to(torch.float32) for bound in traced.minmax(x.detach(), self.spec))
        if self.sync:
            self.add_pending_traced(lo, hi)
        else:
            self.merge_range_traced(lo, hi)

    def _take_shape(self, x: Tensor, shape: tuple[int, ...]) -> None:
        if self.scale.shape != (0,):
            raise StateError(
                f"{self.label} keeps scales of shape {tuple(self.scale.shape)}, an input of shape {tuple(x.shape)} "
                f"with granularity {self.spec.granularity} needs {shape}: keep that axis as it was, or use PerBatch"
            )
        self._make_state(self.scale.dtype, shape, self.scale.device)

    def _refuse_own_start(self) -> None:
        if self.sync:
            raise NotCalibratedError(
                f"{self.label} has no parameters yet, and processes that synchronize cannot take them "
                "from their own batches: calibrate first, `with qt.calibrating(model): ...`"
            )

    def _refuse_nan(self, x: Tensor) -> None:
        if torch.isnan(x).any():
            repair = "look at the layers before it, the learning rate and the data"
            refuse_nan(f"{self.label}: x", to_array(on_cpu(x)), repair)

    def _remind_of_sync(self) -> None:
        """Warn if ranges are not merged; the message is the same for all quantizers, so it is shown once."""
        self._memo.forwards += 1
        if self.sync and self._memo.forwards == FORWARDS_WITHOUT_SYNC:
            warnings.warn(
                f"{FORWARDS_WITHOUT_SYNC} training forwards without qt.sync(model), so ranges are not updating: call "
                "it once per optimizer step on every process",
                stacklevel=2,
            )
        elif not self.sync and self._memo.forwards == 1 and process_count() > 1:
            warnings.warn(
                "every process averages the ranges of its own batches: start torch.distributed before qt.prepare, or "
                "use qt.prepare(..., sync=True), and call qt.sync(model) once per optimizer step",
                stacklevel=2,
            )

    # Data that pass unchanged

    @property
    def is_passing(self) -> bool:
        """Whether data pass unchanged, because of calibration or a delay."""
        return self.is_calibrating or self.delayed

    def start_calibration(self, observer: Observer | None) -> None:
        """Let forward only observe; without an observer, only pass. Calibrations may be nested."""
        self.is_calibrating, self.observers_in_use = True, (*self.observers_in_use, observer)

    def stop_calibration(self) -> None:
        """End the innermost calibration; after the last one forward quantizes again."""
        self.observers_in_use = self.observers_in_use[:-1]
        self.is_calibrating = bool(self.observers_in_use)

    def _look_at_passing(self, x: Tensor) -> None:
        if self.is_calibrating:
            self._observe(x)
        elif isinstance(self.mode, EMA) and self.training and self.observing and not is_recomputing():
            move = self._move_average if self._is_native(x) else self._move_average_traced
            move(x)

    @torch.compiler.disable
    def _observe(self, x: Tensor) -> None:
        for observer in self.observers_in_use:
            if observer is None:
                continue
            before = observer.nonfinite
            observer.observe(to_array(on_cpu(x)))
            if observer.nonfinite > before:
                self._refuse_nan(x)

    def extra_repr(self) -> str:
        """Spec, mode, estimator, and the scales in short."""
        ste = "custom" if isinstance(self.ste, Custom) else repr(self.ste)
        scales = "not calibrated"
        if self.scale.device.type != "meta" and bool(self.initialized):
            low, high = float(self.scale.min()), float(self.scale.max())
            scales = f"scale {low:.3g}" if low == high else f"scales {low:.3g} to {high:.3g}"
        off = ", delayed" * self.delayed + ", disabled" * (not self.enabled)
        return f"{self.spec}, {self.mode}, {ste}, {scales}{off}"


def _may_write_in_evaluation() -> bool:
    """Exported programs stay pure, and ``torch.func`` cannot write to captured buffers."""
    if torch.compiler.is_compiling():
        return not torch.compiler.is_exporting()
    return not torch._C._are_functorch_transforms_active()
