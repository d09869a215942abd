"""FakeQuantize: fake quantization of arrays, with a spec, a scale mode, an estimator and state.

=========== ============================== ============================== ======================
mode        training forward               evaluation forward             before any data
=========== ============================== ============================== ======================
PerBatch    parameters of this batch       parameters of this batch       works
EMA         average updated, then used     average used                   set from first batch
Fixed       parameters used                parameters used                NotCalibratedError
Learned     parameters used                parameters used                set from first batch
=========== ============================== ============================== ======================

Backward uses the parameters of the last forward; it never recomputes a scale. The quantizer keeps a reference to the
data of the last forward, not a copy. A state dict is flat. It has the keys ``version``, ``spec`` (as JSON),
``initialized`` and ``step``; if initialized, the arrays of the parameters; in mode EMA, ``observer.*``.
"""

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import numpy as np
from array_api_compat import numpy
from numpy.typing import ArrayLike, NDArray

from detent import metrics
from detent.checks import as_integer, float_array, plain, read_only
from detent.codec import check_version, reading
from detent.convention import Convention, get_convention
from detent.errors import NotCalibratedError, ParamsError, ShapeError, SpecError, StateError
from detent.formats import MAX_BITS, Format, get_format, int4, int8
from detent.observers import MSE, EMAMinMax, MinMax
from detent.ops import fake_quantize, fake_quantize_backward, fake_quantize_dynamic, fake_quantize_learned_backward
from detent.params import QuantParams, broadcast, numbers
from detent.plan import STEP_LIMIT
from detent.scale_mode import EMA, Fixed, Learned, PerBatch, ScaleMode, get_scale_mode
from detent.scale_rule import whole_zero_point
from detent.spec import QuantSpec, get_spec, short_spec
from detent.ste import Clipped, Estimator, EstimatorLike, get_estimator

__all__ = ["FakeQuantize"]

STATE_VERSION = 1
EMA_DEFAULT = EMA(0.99)
Array = NDArray[Any]


@dataclass(frozen=True)
class _Forward:
    x: Array
    params: QuantParams
    step: int


class FakeQuantize:
    """Fake quantizer with state; starts in training mode.

    Copies are independent. A fake quantizer is not thread-safe: each thread needs its own copy.

    Args:
        spec: a QuantSpec, a format or a short string.
        mode: scale mode: where the parameters come from.
        ste: straight-through estimator for backward; None means the mask of the spec's convention.

    Attributes:
        enabled: if False, forward returns a copy of x, backward returns a copy of g, and the state does not change.
        training: set by ``train()`` and ``eval()``. In evaluation, forward changes the state only in mode PerBatch.
        step: counter for stochastic rounding, incremented by each training forward with stochastic rounding.
        scale_grad: in mode Learned, the gradient of the scale from the last backward.
        zero_point_grad: in mode Learned, the gradient of the zero point from the last backward, or None for symmetric
            specs.

    >>> import detent as dt, numpy as np
    >>> fq = dt.FakeQuantize("int8", mode=dt.EMA(decay=0.9))
    >>> fq(np.array([-127.0, 0.4], np.float32))
    array([-127.,    0.], dtype=float32)
    >>> fq.backward(np.ones(2, np.float32))
    array([1., 1.], dtype=float32)
    """

    def __init__(
        self, spec: QuantSpec | Format | str, mode: ScaleMode | str = EMA_DEFAULT, ste: EstimatorLike = None
    ) -> None:
        self._scales = ScaleState.empty(get_spec(spec), get_scale_mode(mode))
        self._ste = get_estimator(ste, self.spec.convention)
        self.enabled = True
        self.training = True
        self.step = 0
        self.scale_grad: Array | None = None
        self.zero_point_grad: Array | None = None
        self._last: _Forward | None = None

    @classmethod
    def q8(cls, convention: Convention | str = Convention.onnx) -> Self:
        """Make an uncalibrated symmetric int8 per-tensor fake quantizer with mode Fixed."""
        return cls(QuantSpec(int8, convention=get_convention(convention)), mode=Fixed())

    @classmethod
    def q4(cls, convention: Convention | str = Convention.onnx) -> Self:
        """Make an uncalibrated symmetric int4 per-tensor fake quantizer with mode Fixed."""
        return cls(QuantSpec(int4, convention=get_convention(convention)), mode=Fixed())

    @classmethod
    def from_bits(
        cls,
        bits: int,
        symmetric: bool = True,
        scale: float = 1.0,
        zero_point: int = 0,
        *,
        convention: Convention | str = Convention.onnx,
        ste: EstimatorLike = None,
    ) -> Self:
        """Make a fake quantizer with fixed per-tensor parameters; codes are signed if symmetric, else unsigned.

        >>> FakeQuantize.from_bits(4, symmetric=False, scale=0.5, zero_point=3).float_range()
        (-1.5, 6.0)
        """
        as_integer("bits", bits, at_least=1, at_most=MAX_BITS)
        form = get_format(f"int{bits}" if symmetric else f"uint{bits}")
        spec = QuantSpec(form, symmetric=symmetric, convention=get_convention(convention))
        quantizer = cls(spec, mode=Fixed(), ste=ste)
        quantizer.update_params(scale, zero_point)
        return quantizer

    def __copy__(self) -> Self:
        copied = type(self).__new__(type(self))
        # Only the gradients are copied: all other attributes are replaced when they change, never modified in place.
        grads = {name: copy(getattr(self, name)) for name in ("scale_grad", "zero_point_grad")}
        copied.__dict__.update({**vars(self), **grads})
        return copied

    def __call__(self, x: ArrayLike) -> Array:
        """Call ``forward``."""
        return self.forward(x)

    def forward(self, x: ArrayLike) -> Array:
        """Update the state according to the mode, then fake-quantize x.

        Raises:
            NotCalibratedError: there are no parameters yet. In training, only mode Fixed raises this error; in
                evaluation, all modes except PerBatch do.

        >>> import numpy as np
        >>> FakeQuantize.from_bits(8, scale=0.5).forward(np.array([0.3, 99.0]))
        array([ 0.5, 63.5])
        """
        data = float_array(x)
        if not self.enabled or not data.size:
            self._last = None
            return data.copy()
        result, self._scales = self._scales.run(data, training=self.training, step=self.step)
        self._last = _Forward(data, self.params, self.step)
        if self.training and self.spec.rounding.kind == "stochastic":
            self.step = (self.step + 1) % STEP_LIMIT
        return result

    def forward_with_calibration(self, x: ArrayLike) -> Array:
        """Calibrate on x if there are no parameters yet, then run forward.

        >>> import numpy as np
        >>> FakeQuantize.q8().forward_with_calibration(np.array([127.0, 0.4], np.float32))
        array([127.,   0.], dtype=float32)
        """
        if self.enabled and not self.is_initialized and not self._scales.starts_by_itself(training=self.training):
            self.calibrate(x)
        return self.forward(x)

    def backward(self, g: ArrayLike, x: ArrayLike | None = None) -> Array:
        """Return the gradient of x, computed with the estimator ``ste`` and the parameters of the last forward.

        x is the data of forward; None means the data of the last forward. If there was no forward, x is required, and
        the current parameters are used.
        """
        gradient = float_array(g, "g")
        if not self.enabled or not gradient.size:
            return gradient.copy()
        forward = self._forward_of(x)
        if not isinstance(self.mode, Learned):
            return fake_quantize_backward(gradient, forward.x, forward.params, ste=self.ste, step=forward.step)
        gx, gs, gz = fake_quantize_learned_backward(
            gradient, forward.x, forward.params, ste=self.ste, step=forward.step
        )
        self.scale_grad, self.zero_point_grad = gs, None if self.symmetric else gz
        return gx

    def backward_clamped(self, g: ArrayLike, x: ArrayLike) -> Array:
        """Return g where x lies in ``float_range()``, else 0; the estimator ``ste`` is not used.

        >>> import numpy as np
        >>> FakeQuantize.from_bits(8).backward_clamped(np.ones(2), np.array([127.0, 127.25]))
        array([1., 0.])
        """
        gradient = float_array(g, "g")
        if not self.enabled or not gradient.size:
            return gradient.copy()
        forward = self._forward_of(x)
        return fake_quantize_backward(gradient, forward.x, forward.params, ste=Clipped(on="value"))

    def quantization_noise(self, x: ArrayLike) -> float:
        """Return the mean squared error of forward on x, without changing the state.

        >>> import numpy as np
        >>> FakeQuantize.from_bits(8).quantization_noise(np.array([0.5, 1.0]))
        0.125
        """
        data = float_array(x)
        if not self.enabled or not data.size:
            return 0.0
        params = self._scales.after_batch(data, training=False).require()
        return metrics.mse(data, fake_quantize(data, params, step=self.step))

    def _forward_of(self, x: ArrayLike | None) -> _Forward:
        if x is None:
            if self._last is None:
                raise NotCalibratedError(
                    "backward(g) was called before forward: call forward(x) first, or use backward(g, x)"
                )
            return self._last
        if self._last is None:
            return _Forward(float_array(x), self.params, self.step)
        return _Forward(float_array(x), self._last.params, self._last.step)

    def calibrate(self, x: ArrayLike) -> Self:
        """Set the parameters from the min-max range of x, and discard earlier parameters.

        >>> import numpy as np
        >>> float(FakeQuantize.q8().calibrate(np.array([-2.0, 254.0], np.float32)).scale)
        2.0
        """
        self._scales = self._scales.calibrated(x)
        return self

    def update_params(self, scale: ArrayLike, zero_point: ArrayLike | None = None) -> Self:
        """Set scale and zero point. In mode Learned, the zero point may be fractional; forward rounds and clamps it."""
        self._scales = self._scales.updated(scale, zero_point)
        return self

    @property
    def spec(self) -> QuantSpec:
        """The spec."""
        return self._scales.spec

    @property
    def mode(self) -> ScaleMode:
        """The scale mode."""
        return self._scales.mode

    @property
    def ste(self) -> Estimator:
        """The straight-through estimator of backward."""
        return self._ste

    @property
    def params(self) -> QuantParams:
        """The current parameters."""
        return self._scales.require()

    @property
    def is_initialized(self) -> bool:
        """Whether the parameters have been set."""
        return self._scales.params is not None

    @property
    def bits(self) -> int:
        """The bit width of a code."""
        return self.spec.bits

    @property
    def symmetric(self) -> bool:
        """Whether the spec is symmetric, which fixes the zero point."""
        return self.spec.symmetric

    @property
    def scale(self) -> Array:
        """The current scale, read-only."""
        return self.params.scale

    @property
    def zero_point(self) -> Array:
        """The current zero point, read-only; in mode Learned, a float that is not rounded."""
        return self._scales.zero_point

    @property
    def num_levels(self) -> int:
        """The number of different codes that the spec can produce."""
        return self.spec.num_levels

    def quant_range(self) -> tuple[int | float, int | float]:
        """Return the lowest and highest code."""
        return self.spec.qmin, self.spec.qmax

    def float_range(self) -> tuple[Any, Any]:
        """Return the lowest and highest value that codes can represent: floats if per-tensor, else arrays.

        >>> FakeQuantize.from_bits(8, scale=0.5).float_range()
        (-63.5, 63.5)
        """
        params = self.params
        with np.errstate(all="ignore"):
            lo, hi = (
                (code - params.zero_point).astype(params.scale.dtype) * params.scale for code in self.quant_range()
            )
        return (float(lo), float(hi)) if params.scale.ndim == 0 else (lo, hi)

    def train(self, mode: bool = True) -> Self:
        """Switch to training mode, in which forward may change the state."""
        self.training = mode
        return self

    def eval(self) -> Self:
        """Switch to evaluation mode, in which forward changes the state only in mode PerBatch."""
        return self.train(False)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as a flat dict; the docstring of the module lists its keys."""
        params, observer = self._scales.params, self._scales.observer
        flat: dict[str, Any] = {"version": STATE_VERSION, "spec": self.spec.to_json()}
        flat |= {"initialized": self.is_initialized, "step": self.step}
        flat |= {} if params is None else {**params.to_arrays(), "zero_point": self.zero_point}
        flat |= {} if observer is None else {_OBSERVER + name: value for name, value in observer.state_dict().items()}
        return {name: value.copy() if isinstance(value, np.ndarray) else value for name, value in flat.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> Self:
        """Load the ``state_dict`` of a fake quantizer with an equal spec and mode.

        Raises:
            StateError: missing or unknown keys, unsupported version, or values that are invalid for the spec.
        """
        parts = _split_state(state)
        if parts.spec != self.spec:
            raise StateError(
                f"got a state with {parts.spec!r}, but this quantizer has {self.spec!r}: make a quantizer with the "
                "spec of the state"
            )
        if bool(parts.observed) != (self._scales.observer is not None):
            has = (
                "has an observer, so its mode was EMA"
                if parts.observed
                else "has no observer, so its mode was PerBatch, Fixed or Learned"
            )
            raise StateError(
                f"the state {has}, but this quantizer has mode {self.mode}: make a quantizer with the mode of the state"
            )
        with reading(f"the state is invalid for {self.spec}", error=StateError):
            scales = ScaleState.empty(self.spec, self.mode).loaded(parts.arrays, parts.observed)
        self._scales, self.step, self._last = scales, parts.step, None
        return self

    def __repr__(self) -> str:
        ste = "" if self.ste == get_estimator(None, self.spec.convention) else f", ste={self.ste!r}"
        return f"FakeQuantize({short_spec(self.spec)}, mode={self.mode!r}{ste}, initialized={self.is_initialized})"


@dataclass(frozen=True, eq=False)
class ScaleState:
    """Parameters for one spec and one scale mode; all differences between modes are implemented here.

    Methods return a new state, so an error leaves the old state unchanged.
    """

    spec: QuantSpec
    mode: ScaleMode
    params: QuantParams | None = None
    observer: EMAMinMax | None = None
    learned: Array | None = None

    @classmethod
    def empty(cls, spec: QuantSpec, mode: ScaleMode) -> "ScaleState":
        if isinstance(mode, Learned) and spec.scale_format != "float":
            raise SpecError(
                f"mode Learned needs scale_format 'float', got {spec.scale_format!r}: use another mode or spec"
            )
        return cls(spec, mode, observer=EMAMinMax(mode.decay, spec.granularity) if isinstance(mode, EMA) else None)

    def run(self, x: Array, *, training: bool, step: int) -> tuple[Array, "ScaleState"]:
        """Fake-quantize x; return the values, and the state with the parameters that were used."""
        if isinstance(self.mode, PerBatch) and self.spec.rounding.kind != "stochastic":
            y, params = fake_quantize_dynamic(x, self.spec)
            return y, self.with_params(params)
        after = self.after_batch(x, training=training)
        return fake_quantize(x, after.require(), step=step), after

    def after_batch(self, x: Array, *, training: bool) -> "ScaleState":
        """Return the state with which forward quantizes x: the old state, or a state updated by x.

        The updated ranges ignore NaN and infinities.
        """
        if isinstance(self.mode, PerBatch):
            return self.with_params(MinMax(self.spec.granularity).observe(x).params(self.spec))
        if self.observer is not None and training:
            return self._with_observer(copy(self.observer).observe(x))
        if isinstance(self.mode, Learned) and training and self.params is None:
            if self.mode.start == "mse":
                return self.with_params(MSE(granularity=self.spec.granularity).observe(x).params(self.spec))
            return self.calibrated(x)
        return self

    def starts_by_itself(self, *, training: bool) -> bool:
        return isinstance(self.mode, PerBatch) or (training and not isinstance(self.mode, Fixed))

    def calibrated(self, x: ArrayLike) -> "ScaleState":
        if self.observer is None:
            return self.with_params(QuantParams.from_data(self.spec, x))
        return self._with_observer(copy(self.observer).reset().observe(x))

    def updated(self, scale: ArrayLike, zero_point: ArrayLike | None) -> "ScaleState":
        """Return the state with these parameters; in mode Learned, the zero point may be fractional."""
        if not isinstance(self.mode, Learned) or zero_point is None:
            return self.with_params(QuantParams(self.spec, scale, zero_point))
        learned = numbers("zero_point", zero_point).astype(np.float32)
        params = QuantParams(self.spec, scale, self._whole(learned))
        return self.with_params(params, broadcast("zero_point", learned, params.scale.shape))

    def loaded(self, arrays: Mapping[str, Any], observed: Mapping[str, Any]) -> "ScaleState":
        state = self
        if arrays:
            learned = numbers("zero_point", arrays["zero_point"]) if isinstance(self.mode, Learned) else None
            whole = {} if learned is None else {"zero_point": self._whole(learned)}
            state = self.with_params(QuantParams.from_arrays(self.spec, {**arrays, **whole}), learned)
        if self.observer is None:
            return state
        observer = copy(self.observer).load_state_dict(observed)
        lo = observer.state_dict().get("lo")
        if state.params is not None and lo is not None and lo.shape != state.params.scale.shape:
            raise ShapeError(
                f"got observer ranges of shape {lo.shape}, expected the scale's shape {state.params.scale.shape}: pass "
                "the result of state_dict()"
            )
        return replace(state, observer=observer)

    def with_params(self, params: QuantParams, learned: Array | None = None) -> "ScaleState":
        """Return the state with these parameters; in mode Learned, ``learned`` are the zero points before rounding."""
        if isinstance(self.mode, Learned):
            learned = read_only(params.zero_point.astype(np.float32) if learned is None else learned)
        return replace(self, params=params, learned=learned)

    def _with_observer(self, observer: EMAMinMax) -> "ScaleState":
        return replace(self, params=observer.params(self.spec), observer=observer)

    def _whole(self, learned: Array) -> Array:
        if not np.isfinite(learned).all():
            raise ParamsError(
                f"got learned zero point {learned!r}, expected finite numbers: check the learning rate and the data"
            )
        return np.asarray(whole_zero_point(numpy, self.spec, learned))

    def require(self) -> QuantParams:
        """Return the parameters; raise if there are none yet."""
        if self.params is None:
            raise NotCalibratedError(
                "FakeQuantize has no parameters yet: call calibrate(x), forward_with_calibration(x) or "
                "update_params(scale, zero_point) first"
            )
        return self.params

    @property
    def zero_point(self) -> Array:
        params = self.require()
        return params.zero_point if self.learned is None else self.learned


_OBSERVER = "observer."
_SCALARS = frozenset({"version", "spec", "initialized", "step"})


class _SavedState(NamedTuple):
    spec: QuantSpec
    step: int
    arrays: dict[str, Any]  # empty before calibration
    observed: dict[str, Any]  # empty without an observer


def _split_state(flat: Mapping[str, Any]) -> _SavedState:
    if not isinstance(flat, Mapping) or not all(isinstance(name, str) for name in flat) or not set(flat) >= _SCALARS:
        given = list(flat) if isinstance(flat, Mapping) else []
        missing = sorted(_SCALARS - set(given))
        raise StateError(f"got state with keys {given}, missing {missing}: expected the result of state_dict()")
    scalars = {name: plain(flat[name]) for name in _SCALARS}
    check_version(scalars["version"], STATE_VERSION, "FakeQuantize state", error=StateError)
    if not isinstance(scalars["initialized"], bool):
        raise StateError(f"got initialized={scalars['initialized']!r}, expected True or False")
    step = as_integer("the state's step", scalars["step"], at_least=0, at_most=STEP_LIMIT - 1, error=StateError)
    observed = {name.removeprefix(_OBSERVER): value for name, value in flat.items() if name.startswith(_OBSERVER)}
    arrays = {name: value for name, value in flat.items() if name not in _SCALARS and not name.startswith(_OBSERVER)}
    if scalars["initialized"] != bool(arrays):
        raise StateError(
            f"inconsistent state: initialized is {scalars['initialized']}, but the arrays are "
            f"{sorted(arrays) or 'missing'}: pass the result of state_dict()"
        )
    with reading("cannot read the spec of the state", error=StateError):
        spec = QuantSpec.from_json(scalars["spec"])
    return _SavedState(spec, step, arrays, observed)
