"""Oscillation: damping and freezing of weights that jump between two codes (Nagel et al. 2022).

At few bits, a weight whose best value is between two codes crosses their rounding boundary again and again, because the
straight-through estimator pushes it back from either side. After each optimizer step, with codes q and weights w::

    o = 1 if q changed, in the opposite direction of its last change, otherwise 0
    f = (1 - momentum) * f + momentum * o           frequency of oscillations
    a = (1 - momentum) * a + momentum * q           average code

    damping    w = w + damping * (dequantize(q) - w)                 where w is not clipped
    freezing   w = dequantize(round(a)), from now on                 where f > threshold

Damping is the gradient step of a regularizer, decoupled from the optimizer as weight decay is in AdamW. A frozen weight
keeps its code, and its value follows the scale.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from detent.checks import as_integer
from detent.errors import SpecError, StateError
from detent.ops import quantize
from detent.torch.arrays import is_plain, to_array, to_tensor
from detent.torch.quantizer import FakeQuantize

__all__ = ["Oscillation", "OscillationTracker"]


@dataclass(frozen=True)
class Oscillation:
    """Settings for weights that jump between two codes, for ``qt.Schedule(model, oscillation=...)``.

    Attributes:
        damping: part of the distance to its quantized value that a weight moves after each step, from 0 to 1.
        threshold: frequency of oscillations above which a weight is frozen, from 0 to 1; None never freezes. At 0.02,
            the paper's usual value, a weight is frozen if about one step in 50 moves it back to the code before.
        momentum: weight of the current step in averages.
        start: step from which weights are tracked; early oscillations are harmless.

    Raises:
        SpecError: a value is out of range.

    >>> Oscillation(damping=1e-3, threshold=0.02)
    Oscillation(damping=0.001, threshold=0.02, momentum=0.01, start=0)
    """

    damping: float = 0.0
    threshold: float | None = 0.02
    momentum: float = 0.01
    start: int = 0

    def __post_init__(self) -> None:
        for name in ("damping", "threshold", "momentum"):
            value = getattr(self, name)
            if value is None and name == "threshold":
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
                raise SpecError(f"got {name}={value!r}, expected a number from 0 to 1")
        as_integer("start", self.start, at_least=0)


class OscillationTracker:
    """Tracks the codes of a model's weights, and changes weights as an ``Oscillation`` says."""

    def __init__(self, settings: Oscillation) -> None:
        self.settings = settings
        self.weights: dict[str, _TrackedWeight] = {}

    @torch.no_grad()
    def update(self, layers: Iterable[tuple[str, Any, str, FakeQuantize]]) -> None:
        """Take in the weights after an optimizer step; layers are those of ``weight_layers``."""
        seen: set[int] = set()
        for full, layer, name, quantizer in layers:
            weight = layer._parameters.get(name)
            if weight is None or id(weight) in seen or not _is_tracked(weight, quantizer):
                continue
            seen.add(id(weight))
            self.weights.setdefault(full, _TrackedWeight()).update(weight, layer, quantizer, self.settings)

    @property
    def frozen(self) -> dict[str, float]:
        """The part of each weight's elements that is frozen, by name."""
        shares = {name: each.frozen_share for name, each in self.weights.items()}
        return {name: share for name, share in shares.items() if share}

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Return the state for a checkpoint: tensors by weight."""
        return {name: each.state() for name, each in self.weights.items()}

    def load(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Continue with the state of a checkpoint."""
        self.weights = {name: _TrackedWeight.of(name, parts) for name, parts in state.items()}


def _is_tracked(weight: Tensor, quantizer: FakeQuantize) -> bool:
    """Return whether a weight has integer codes of its own, on the CPU."""
    is_ready = quantizer.enabled and not quantizer.is_passing and quantizer.is_ready
    return is_ready and quantizer.spec.format.is_integer and is_plain(weight)


class _TrackedWeight:
    """Codes and oscillations of one weight; tensors have its shape."""

    names = ("codes", "direction", "frequency", "average", "frozen")

    def __init__(self) -> None:
        self.codes: Tensor | None = None
        self.direction = self.frequency = self.average = self.frozen = torch.empty(0)

    @classmethod
    def of(cls, name: str, parts: Mapping[str, Tensor]) -> "_TrackedWeight":
        """Make it from the state of a checkpoint."""
        if set(parts) != set(cls.names) or not all(isinstance(each, Tensor) for each in parts.values()):
            raise StateError(f"oscillation state of {name}: got {sorted(parts)}, expected tensors {sorted(cls.names)}")
        tracked = cls()
        for key, value in parts.items():
            setattr(tracked, key, value.clone())
        return tracked

    def state(self) -> dict[str, Tensor]:
        """Return the state for a checkpoint."""
        return {name: getattr(self, name) for name in self.names}

    @property
    def frozen_share(self) -> float:
        """The part of the elements that is frozen."""
        return float(self.frozen.double().mean()) if self.frozen.numel() else 0.0

    def update(self, weight: Tensor, layer: Any, quantizer: FakeQuantize, settings: Oscillation) -> None:
        """Take in the codes after an optimizer step, and damp or freeze elements."""
        coded = _Codes(weight, layer, quantizer)
        if self.codes is None or self.codes.shape != weight.shape:
            self._start(coded.codes)
            return
        change = (coded.codes - self.codes).sign()
        oscillates = (change != 0) & (change == -self.direction)
        self.frequency.lerp_(oscillates.float(), settings.momentum)
        self.average.lerp_(coded.codes, settings.momentum)
        self.direction = torch.where(change != 0, change, self.direction)
        target = weight
        if settings.damping:
            pulled = torch.lerp(weight, coded.values(coded.codes), settings.damping)
            target = torch.where(coded.is_inside, pulled, weight)
        if settings.threshold is not None:
            self.frozen |= self.frequency > settings.threshold
            # the first average of a frozen element is its code for good
            self.average = torch.where(self.frozen, self.average.round(), self.average)
            target = torch.where(self.frozen, coded.values(self.average), target)
        if target is not weight:
            weight.copy_(target)
        self.codes = (
            torch.where(self.frozen, self.average, coded.codes) if settings.threshold is not None else coded.codes
        )

    def _start(self, codes: Tensor) -> None:
        self.codes, self.average = codes, codes.clone()
        self.direction, self.frequency = torch.zeros_like(codes), torch.zeros_like(codes)
        self.frozen = torch.zeros_like(codes, dtype=torch.bool)


class _Codes:
    """The codes of a weight as the next forward pass computes them, relative to the zero point."""

    def __init__(self, weight: Tensor, layer: Any, quantizer: FakeQuantize) -> None:
        fold = getattr(layer, "fold", None)
        self._factor = None if fold is None or quantizer.absorbs_gain else fold.factor(weight)
        scaled = weight.detach() if self._factor is None else weight.detach() * self._factor
        params = quantizer.refresh().params_for(scaled)
        tiling = quantizer.spec.granularity.tiling(tuple(weight.shape))
        scale, zero_point = (to_tensor(np.array(tiling.spread(part))) for part in (params.scale, params.zero_point))
        codes = to_tensor(np.array(quantize(to_array(scaled), params).codes))
        self._scale = scale.to(weight.dtype)
        self.codes = (codes.to(torch.int32) - zero_point).float()
        half = 0.5 * self._scale  # a weight that is farther from its value is clipped
        self.is_inside = (scaled - self.codes * self._scale).abs() <= half

    def values(self, codes: Tensor) -> Tensor:
        """Return the float weight that has these codes."""
        values = codes.to(self._scale.dtype) * self._scale
        return values if self._factor is None else values / self._factor
