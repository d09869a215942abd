"""Scale modes: the source of a stateful quantizer's parameters.

============ =======================================================================================
PerBatch()   the range of the current batch, in training and evaluation
EMA(decay)   an exponential moving average of the batches' ranges; ``decay`` is the weight of the old average
Fixed()      parameters set once, by calibration or by hand
Learned()    scale and zero point trained by gradients (LSQ, Esser et al. 2020; LSQ+, Bhalgat et al. 2020)
============ =======================================================================================

Modes can be compared and sorted: ``PerBatch() < EMA(d) < Fixed() < Learned()``. EMA modes are sorted by decay.
"""

import json
from dataclasses import asdict, astuple, dataclass
from functools import total_ordering
from math import inf
from numbers import Real

from detent.codec import parse, reading
from detent.errors import SpecError, closest

__all__ = ["EMA", "Fixed", "Learned", "PerBatch", "ScaleMode", "get_scale_mode"]


@total_ordering
@dataclass(frozen=True)
class ScaleMode:
    """Base class of scale modes.

    Modes are ordered by class, from PerBatch to Learned. EMA modes are ordered by decay. Comparing a mode with another
    type raises a TypeError.

    >>> ScaleMode.from_json('{"kind": "EMA", "decay": 0.9}')
    EMA(decay=0.9)
    >>> sorted([Learned(), EMA(0.9), PerBatch(), EMA(0.5)])
    [PerBatch(), EMA(decay=0.5), EMA(decay=0.9), Learned(start='minmax', zero_point='learned', rate=1.0)]
    """

    def __lt__(self, other: object) -> bool:
        return self._key < other._key if isinstance(other, ScaleMode) else NotImplemented

    @property
    def _key(self) -> tuple[float, ...]:
        """The key for sorting: 0 to 3 for the classes PerBatch to Learned, then the fields (EMA: decay)."""
        return (*(place for place, kind in enumerate(_MODES.values()) if isinstance(self, kind)), *astuple(self))

    def to_json(self) -> str:
        """Return the mode as one line of JSON."""
        return json.dumps({"kind": type(self).__name__, **asdict(self)})

    @staticmethod
    def from_json(text: str) -> "ScaleMode":
        """Read the JSON of ``to_json``.

        Raises:
            SpecError: the text is not the JSON of a mode.
        """
        complaint = f"the text is not the JSON of a scale mode, expected for example {EMA().to_json()!r}"
        with reading(complaint, error=SpecError):
            data = parse(text, "a scale mode", error=SpecError)
            return _MODES[data.pop("kind")](**data)


@dataclass(frozen=True)
class PerBatch(ScaleMode):
    """Parameters from the range of the current batch."""


@dataclass(frozen=True)
class EMA(ScaleMode):
    """Parameters from an exponential moving average of the batches' ranges (EMA range).

    ``state = decay * state + (1 - decay) * batch``; the first batch sets the state. The averaging constant (or
    momentum) of other libraries is the weight of the *new* batch, which is ``1 - decay``.
    """

    decay: float = 0.99

    def __post_init__(self) -> None:
        if isinstance(self.decay, bool) or not isinstance(self.decay, Real) or not 0.0 <= self.decay < 1.0:
            raise SpecError(
                f"got EMA decay {self.decay!r}, expected a number in [0, 1), which is the weight of the old average"
            )
        object.__setattr__(self, "decay", float(self.decay))


@dataclass(frozen=True)
class Fixed(ScaleMode):
    """Parameters set once, by calibration or by hand."""


@dataclass(frozen=True)
class Learned(ScaleMode):
    """Scale and zero point trained by gradients.

    Args:
        start: where parameters start without calibration: ``"minmax"``, the range of the first training batch, or
            ``"mse"``, the MSE-optimal range of the first training batch. In PyTorch, ``"mse"`` also sets the scales of
            weights in ``qt.prepare``.
        zero_point: ``"learned"``, or ``"auto"``: the zero point stays constant if the data were non-negative at the
            start, as after a ReLU, and is learned otherwise.
        rate: in PyTorch, how much faster scales and zero points learn than weights do with Adam: a step of 1e-3 changes
            a scale by ``rate`` times 0.1 %.
    """

    start: str = "minmax"
    zero_point: str = "learned"
    rate: float = 1.0

    def __post_init__(self) -> None:
        for name, choices in (("start", ("minmax", "mse")), ("zero_point", ("learned", "auto"))):
            value = getattr(self, name)
            if not isinstance(value, str) or value not in choices:
                raise SpecError(f"got {name}={value!r} for mode Learned, expected {' or '.join(map(repr, choices))}")
        if isinstance(self.rate, bool) or not isinstance(self.rate, Real) or not 0.0 < self.rate < inf:
            raise SpecError(f"got rate={self.rate!r} for mode Learned, expected a number above 0, for example 10")
        object.__setattr__(self, "rate", float(self.rate))


_MODES: dict[str, type[ScaleMode]] = {"PerBatch": PerBatch, "EMA": EMA, "Fixed": Fixed, "Learned": Learned}
_NAMES: dict[str, ScaleMode] = {"per_batch": PerBatch(), "ema": EMA(), "fixed": Fixed(), "learned": Learned()}


def get_scale_mode(value: ScaleMode | str) -> ScaleMode:
    """Look up a mode by name ("per_batch", "ema", "fixed", "learned"); return a mode unchanged."""
    if isinstance(value, ScaleMode):
        return value
    if isinstance(value, str) and value in _NAMES:
        return _NAMES[value]
    raise SpecError(f"unknown scale mode {value!r}{closest(str(value), _NAMES)} expected {', '.join(_NAMES)}")
