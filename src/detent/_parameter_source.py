"""Where a quantizer's parameters come from: its mode, its observer, what was set by hand. Used by ``detent.quantizer``.

Every method either succeeds or leaves the source as it was.
"""

from copy import copy
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from detent._checks import read_only
from detent._param_checks import broadcast, numbers
from detent._quantizer_state import State
from detent.errors import NotCalibratedError, ParamsError, ShapeError, SpecError
from detent.observers import EMAMinMax, MinMax
from detent.params import QuantParams
from detent.scale_mode import EMA, Fixed, Learned, PerBatch, ScaleMode
from detent.spec import QuantSpec

Array = NDArray[Any]


class ParameterSource:
    """The parameters of one spec under one mode; ``params`` is None before there are any."""

    def __init__(self, spec: QuantSpec, mode: ScaleMode) -> None:
        if isinstance(mode, Learned) and spec.scale_format != "float":
            raise SpecError(f"a scale stored as {spec.scale_format} cannot be learned: use another mode or spec")
        self.spec = spec
        self.mode = mode
        self.params: QuantParams | None = None
        self.observer = EMAMinMax(mode.decay, spec.granularity) if isinstance(mode, EMA) else None
        self._learned: Array | None = None

    def for_batch(self, x: Array, *, training: bool) -> QuantParams:
        """The parameters of a forward over x."""
        if isinstance(self.mode, PerBatch):
            self.params = self.of_batch(x)
            return self.params
        if self.observer is not None and training:
            observer = copy(self.observer).observe(x)
            self.params, self.observer = observer.params(self.spec), observer
        elif isinstance(self.mode, Learned) and training and self.params is None:
            self.calibrate(x)
        return self.require()

    def of_batch(self, x: Array) -> QuantParams:
        """The batch's own parameters, from its finite values: NaN shows in the result, as in the other modes."""
        return MinMax(self.spec.granularity).observe(x).params(self.spec)

    def starts_by_itself(self, *, training: bool) -> bool:
        """Whether a forward finds its parameters without calibration."""
        return isinstance(self.mode, PerBatch) or (training and not isinstance(self.mode, Fixed))

    def calibrate(self, x: ArrayLike) -> None:
        """Take the parameters from x."""
        if self.observer is None:
            self._set(QuantParams.from_data(self.spec, x))
            return
        observer = copy(self.observer).reset().observe(x)
        self._set(observer.params(self.spec))
        self.observer = observer

    def update(self, scale: ArrayLike, zero_point: ArrayLike | None) -> None:
        """Take the parameters as given; a learned zero point may be fractional."""
        if not isinstance(self.mode, Learned) or zero_point is None:
            self._set(QuantParams(self.spec, scale, zero_point))
            return
        learned = numbers("zero_point", zero_point).astype(np.float32)
        params = QuantParams(self.spec, scale, self._whole(learned))
        self._set(params, broadcast("zero_point", learned, params.scale.shape))

    def _whole(self, learned: Array) -> Array:
        """The zero points that forward uses: rounded half to even and clamped."""
        if not np.isfinite(learned).all():
            raise ParamsError(f"a learned zero point is finite, got {learned!r}")
        return np.asarray(np.clip(np.round(learned), self.spec.qmin, self.spec.qmax))

    def _set(self, params: QuantParams, learned: Array | None = None) -> None:
        if isinstance(self.mode, Learned):
            self._learned = read_only(params.zero_point.astype(np.float32) if learned is None else learned)
        self.params = params

    def require(self) -> QuantParams:
        """The parameters, or an error that says how to get some."""
        if self.params is None:
            raise NotCalibratedError(
                "FakeQuantize has no parameters yet: call calibrate(x), forward_with_calibration(x) or "
                "update_params(scale, zero_point) first"
            )
        return self.params

    @property
    def zero_point(self) -> Array:
        """The zero points; in mode Learned the floats before rounding."""
        params = self.require()
        return params.zero_point if self._learned is None else self._learned

    def state(self, step: int) -> State:
        """Everything there is to save."""
        arrays = {} if self.params is None else {**self.params.to_arrays(), "zero_point": self.zero_point}
        observed = {} if self.observer is None else self.observer.state_dict()
        return State(self.spec, self.params is not None, step, arrays, observed)

    def load(self, parts: State) -> None:
        """Take over saved state; only a new source may be left half loaded by an error."""
        if parts.arrays:
            learned = numbers("zero_point", parts.arrays["zero_point"]) if isinstance(self.mode, Learned) else None
            whole = {} if learned is None else {"zero_point": self._whole(learned)}
            self._set(QuantParams.from_arrays(self.spec, {**parts.arrays, **whole}), learned)
        if self.observer is not None:
            seen = self.observer.load_state_dict(parts.observed).state_dict().get("lo")
            if self.params is not None and seen is not None and seen.shape != self.params.scale.shape:
                raise ShapeError(f"the observer has ranges of shape {seen.shape}, the scales {self.params.scale.shape}")
