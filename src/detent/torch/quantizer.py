"""FakeQuantize: fake quantization as a module with state.

=========== ============================== ============================== ======================
mode        training forward               evaluation forward             before any data
=========== ============================== ============================== ======================
PerBatch    parameters of this batch       parameters of this batch       nothing is needed
EMA         state updated, then used       state used                     first batch is copied
Fixed       parameters used                parameters used                NotCalibratedError
Learned     parameters used                parameters used                first batch sets them
=========== ============================== ============================== ======================

With ``sync``, as in distributed training, an EMA forward uses the state that the last ``qt.sync`` left, and keeps the
range of its batch for the next one.
"""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from detent.errors import NaNError, NotCalibratedError, RangeError, SpecError, StateError
from detent.formats import Format
from detent.observers import Observer
from detent.observers.minmax import mix_ranges
from detent.params import QuantParams
from detent.plan import STEP_LIMIT
from detent.rule import ObserverSpec
from detent.scale_mode import EMA, Learned, PerBatch, ScaleMode, get_scale_mode
from detent.scale_rule import derive
from detent.spec import QuantSpec, get_spec
from detent.ste import Clipped, Custom, EstimatorLike, Identity, get_estimator
from detent.torch import eager, traced
from detent.torch.arrays import Slot, check_float, is_plain, on_cpu, process_count, to_array
from detent.torch.operator import Values, apply, apply_traced
from detent.torch.parameters import ParameterState

__all__ = ["FakeQuantize", "WatcherFunction"]

EMA_DEFAULT = EMA(0.99)
PATIENCE = 100
Range = tuple[NDArray[Any], NDArray[Any]]
WatcherFunction = Callable[["FakeQuantize", Tensor, QuantParams | None], None]


class FakeQuantize(ParameterState):
    """Fake quantization with state.

    Args:
        spec: how; a QuantSpec, a format or a short string.
        mode: where the parameters come from.
        ste: the estimator of backward; None is the mask of the spec's convention.
        shape: the shape of the data, from which the state gets its final shape; needed before data for every
            granularity but per tensor. Axes that do not matter may have any length.
        dtype: the scale's type, float32 or, for float64 data, float64.

    Attributes:
        enabled: False lets data pass as they are and leaves the state alone.
        observing: False keeps the parameters as they are in training, too.
        delayed: data pass as they are, while an average of mode EMA is gathered; ``qt.Schedule`` sets it.
        watcher: is called with this module, x and its parameters in every forward that quantizes; ``qt.watch`` sets it.
        sync: EMA forwards use the state of the last ``qt.sync``.
        name: the full name in the model, for messages.
        observer: what ``qt.calibrating`` observes with.

    >>> import detent as dt, detent.torch as qt, torch
    >>> fq = qt.FakeQuantize("int8", mode=dt.EMA(decay=0.9))
    >>> fq(torch.tensor([-127.0, 0.4]))
    tensor([-127.,    0.])
    >>> sorted(fq.state_dict())
    ['_extra_state', 'hi', 'initialized', 'lo', 'scale', 'zero_point']

    What layers use instead of a forward of its own:

    >>> x = torch.tensor([-63.5, 0.4])
    >>> fq.eval().choose(x).params.scale, fq.choose_traced(x)[0]
    (array(1., dtype=float32), tensor(1.))
    >>> fq.choose_and_quantize(x, fq.next_step())[1]
    tensor([-64.,   0.])
    >>> fq.merge_range(np.array(-127.0), np.array(0.0))
    >>> fq.start_calibration(None); fq(x); fq.stop_calibration()
    tensor([-63.5000,   0.4000])
    >>> fq.extra_repr()
    "int8/tensor/symmetric/onnx, EMA(decay=0.9), Clipped(on='code', bounds='inclusive'), scale 1"
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
        self.watcher: WatcherFunction | None = None
        self.sync = False
        self.observer: ObserverSpec | None = None
        self.is_calibrating = False
        self.observer_in_use: Observer | None = None
        self.since_sync = 0

    def forward(self, x: Tensor) -> Tensor:
        """Fake quantize x, after updating the state as the mode says.

        Raises:
            NotCalibratedError: mode Fixed, or evaluation, before there are parameters.
            NaNError: x holds NaN where its range is taken.
        """
        check_float(x)
        if not self.enabled or not x.numel():
            return x
        if self.is_calibrating:
            self._observe(x)
            return x
        if self.delayed:
            self._gather(x)
            return x
        if is_plain(x) and self.scale.device.type == "cpu":
            return apply(x, self.choose(x), self.ste, self.next_step())
        scale, zero_point = self.choose_traced(x)
        if self.watcher is not None and not torch.compiler.is_compiling():
            self.watcher(self, x, None)
        learned = isinstance(self.mode, Learned)
        return apply_traced(x, scale, zero_point, self.spec, self.ste, self.next_step(), learned=learned)

    def next_step(self) -> int:
        """The counter of stochastic rounding, one per forward in training."""
        if not self.is_stochastic:
            return 0
        now = int(self.step)
        if self.training:
            self.step.fill_((now + 1) % STEP_LIMIT)
        return now

    @torch.compiler.disable
    def _observe(self, x: Tensor) -> None:
        observer = self.observer_in_use
        if observer is None:
            return
        before = observer.nonfinite
        observer.observe(to_array(on_cpu(x)))
        if observer.nonfinite > before:
            self._refuse_nan(x)

    def _gather(self, x: Tensor) -> None:
        if not (isinstance(self.mode, EMA) and self.training and self.observing):
            return
        if is_plain(x) and self.scale.device.type == "cpu":
            self._update_range(x)
        else:
            self.choose_traced(x)

    @property
    def is_passing(self) -> bool:
        """Whether data pass as they are, calibration or a delay being on."""
        return self.is_calibrating or self.delayed

    def _refuse_nan(self, x: Tensor) -> None:
        bad = torch.isnan(x)
        if bad.any():
            first, count = tuple(int(i) for i in bad.nonzero()[0]), int(bad.sum())
            raise NaNError(
                f"{self.label}: of the {x.numel()} elements to quantize {count} are NaN, the first at index {first}: "
                "look at the layers before it, the learning rate and the data",
                count,
                first,
            )

    def choose(self, x: Tensor) -> Values:
        """The parameters of a forward over x, a plain tensor; the state is updated first, as the mode says."""
        values = self._choose(x)
        if self.watcher is not None:
            self.watcher(self, x, values.params)
        return values

    def _choose(self, x: Tensor) -> Values:
        mode, active = self.mode, self.training and self.observing and not _in_backward()
        if isinstance(mode, PerBatch):
            params = self._of_batch(x)
            if self.scale.shape == params.scale.shape:
                self._store(params)
            else:  # it depends on the batch, and is nobody's state
                self.__dict__["_known"] = params
            return Values(params)
        if isinstance(mode, EMA) and active:
            self._update_range(x)
            if self._known is not None and not self.sync:
                return Values(self._known)  # as just made
        elif isinstance(mode, Learned) and active and not self.is_initialized:
            self._refuse_own_start()
            self.set_params(self._of_batch(x))
        if isinstance(mode, Learned) and self.is_initialized:
            return Values(self.params, *self._learned())
        return Values(self.params)

    def choose_and_quantize(self, x: Tensor, step: int, slot: Slot | None = None) -> tuple[Values, Tensor, bool]:
        """The parameters of x, x quantized by them, and whether its whole gradient is known to pass."""
        found = eager.fake_quantize_dynamic(x, self.spec, slot) if isinstance(self.mode, PerBatch) else None
        if found is None:
            values = self.choose(x)
            return values, eager.fake_quantize(x, values.params, step, slot), False
        quantized, params, nonfinite = found
        if nonfinite:
            self._refuse_nan(x)
        if self.scale.numel() == params.scale.size:
            self._store(params)
        if self.watcher is not None:
            self.watcher(self, x, params)
        return Values(params), quantized, self._never_clips and not nonfinite

    @property
    def _never_clips(self) -> bool:
        """Whether data within its own range are inside the codes' range: symmetric codes whose last one is the end."""
        passes = isinstance(self.ste, Identity) or self.ste == Clipped()
        return passes and self.spec.symmetric and self.spec.convention.symmetric_scale == "qmax"

    def _refuse_own_start(self) -> None:
        if self.sync:
            raise NotCalibratedError(
                f"{self.label} has no parameters yet, and processes that synchronise cannot take them "
                "from their own batches: calibrate first, `with qt.calibrating(model): ...`"
            )

    def _bounds(self, x: Tensor) -> Range:
        lo, hi, nonfinite = eager.bounds(x, self.spec)
        if nonfinite:
            self._refuse_nan(x)
            if (lo > hi).all():
                raise RangeError(f"{self.label}: its input of shape {tuple(x.shape)} has no finite value")
        return lo, hi

    def _of_batch(self, x: Tensor) -> QuantParams:
        dtype = "float64" if x.dtype == torch.float64 else "float32"
        return QuantParams.from_range(self.spec, *self._bounds(x.detach()), dtype=dtype)

    def _update_range(self, x: Tensor) -> None:
        if self.sync and not (self.is_initialized or self.delayed):
            self._refuse_own_start()
        lo, hi = self._bounds(x.detach())
        if self.lo.shape != lo.shape:
            self._take_shape(x, lo.shape)
        self._remind()
        if not self.sync:
            self.merge_range(lo, hi)
            return
        pending = to_array(self.pending)
        np.maximum(pending, np.stack((-lo, hi)), out=pending, casting="same_kind")

    def _remind(self) -> None:
        """Warn where ranges are not merged as they should be; the same words for all quantizers, shown once."""
        self.__dict__["since_sync"] += 1
        if self.sync and self.since_sync == PATIENCE:
            warnings.warn(
                f"{PATIENCE} training forwards without qt.sync(model): ranges stay as they are until it is called, "
                "once per optimizer step, on every process",
                stacklevel=2,
            )
        elif not self.sync and self.since_sync == 1 and process_count() > 1:
            warnings.warn(
                "every process averages the ranges of its own batches: start torch.distributed before qt.prepare, or "
                "use qt.prepare(..., sync=True), and call qt.sync(model) once per optimizer step",
                stacklevel=2,
            )

    def _take_shape(self, x: Tensor, shape: tuple[int, ...]) -> None:
        if self.scale.shape != (0,):
            raise StateError(
                f"{self.label} keeps scales of shape {tuple(self.scale.shape)}, an input of shape {tuple(x.shape)} "
                f"with granularity {self.spec.granularity} needs {shape}: keep that axis as it was, or use PerBatch"
            )
        self._make_state(self.scale.dtype, shape, self.scale.device)

    def merge_range(self, lo: NDArray[Any], hi: NDArray[Any]) -> None:
        """Move the average of mode EMA by a batch with these bounds."""
        mode = self.mode
        if not isinstance(mode, EMA):
            raise SpecError(f"only mode EMA averages ranges, this is {mode}")
        lo, hi = np.asarray(lo, np.float32), np.asarray(hi, np.float32)  # the type of the average
        states = self._array("lo"), self._array("hi")
        if self.is_initialized:
            lo, hi = mix_ranges(states, (lo, hi), mode.decay)
        params = self._params_of(lo, hi)
        self._write("lo", lo)
        self._write("hi", hi)
        self._store(params)

    def _params_of(self, lo: NDArray[Any], hi: NDArray[Any]) -> QuantParams:
        """The parameters of a range; the checks of ``from_range`` only where they would find something."""
        if not (lo <= hi).all():
            return QuantParams.from_range(self.spec, lo, hi, dtype=_name(self.scale.dtype))
        found = derive(self.spec, lo.astype(np.float64), hi.astype(np.float64), self._array("scale").dtype)
        return QuantParams.trusted(self.spec, found, lo, hi)

    def choose_traced(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The same in torch operations: scale and zero point as tensors, the state updated without looking at it."""
        mode, active = self.mode, self.training and self.observing
        if isinstance(mode, PerBatch):
            scale, zero_point = traced.derive(self.spec, *traced.minmax(x.detach(), self.spec))
            if self.training and self.scale.shape == scale.shape:
                self.scale.copy_(scale)
                self.zero_point.copy_(zero_point)
                self.initialized.fill_(1)
            return scale, zero_point
        if isinstance(mode, EMA) and active and not torch.compiler.is_compiling():
            self._remind()
        if isinstance(mode, EMA) and active and self.sync:
            lo, hi = (end.to(torch.float32) for end in traced.minmax(x.detach(), self.spec))
            self.pending.copy_(torch.maximum(self.pending, torch.stack((-lo, hi))))
        elif isinstance(mode, EMA) and active:
            lo, hi = (end.to(torch.float32) for end in traced.minmax(x.detach(), self.spec))
            seen = (self.initialized != 0) & (self.lo <= self.hi)
            empty = lo > hi
            for state, new in ((self.lo, lo), (self.hi, hi)):
                mixed = torch.where(empty, state, traced.blend(state, new, mode.decay))
                state.copy_(torch.where(seen, mixed, new))
            scale, zero_point = traced.derive(self.spec, self.lo, self.hi)
            self.scale.copy_(scale)
            self.zero_point.copy_(zero_point)
            self.initialized.fill_(1)
        if isinstance(mode, Learned):
            learned, shifted = self._learned()
            return learned, self.zero_point if shifted is None else shifted
        return self.scale, self.zero_point

    def start_calibration(self, observer: Observer | None) -> None:
        """Let forward only observe, or only pass with None."""
        self.is_calibrating, self.observer_in_use = True, observer

    def stop_calibration(self) -> None:
        """Let forward quantize again."""
        self.is_calibrating, self.observer_in_use = False, None

    def extra_repr(self) -> str:
        """Spec, mode, estimator, and the scales in short."""
        ste = "custom" if isinstance(self.ste, Custom) else repr(self.ste)
        scales = "not calibrated"
        if self.scale.device.type != "meta" and bool(self.initialized):
            low, high = float(self.scale.min()), float(self.scale.max())
            scales = f"scale {low:.3g}" if low == high else f"scales {low:.3g} to {high:.3g}"
        off = ", delayed" * self.delayed + ", disabled" * (not self.enabled)
        return f"{self.spec}, {self.mode}, {ste}, {scales}{off}"


def _in_backward() -> bool:
    """Whether a forward pass is done once more for its gradients, by checkpointing: it has been observed before."""
    return torch._C._current_graph_task_id() != -1


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
