"""Schedule: the optimizer steps at which quantization starts, and at which ranges, statistics and scales freeze.

The state of step n applies to forward passes after n optimizer steps::

    0 .. delay            the model computes in float; EMA ranges are updated
    delay ..              the model computes with quantization
    observe_until ..      EMA ranges frozen
    freeze_norms ..       batch norms use their running statistics and do not update them
    freeze_scales ..      all scales frozen, learned ones included

A schedule sets attributes of quantizers and batch norms only at these steps. Scales of mode PerBatch never freeze.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn

from detent.checks import as_integer
from detent.errors import DtypeError, SpecError, StateError
from detent.scale_mode import EMA
from detent.torch.batchnorm import QuantizedNorm
from detent.torch.distributed import sync
from detent.torch.oscillation import Oscillation, OscillationTracker
from detent.torch.preparation import plan_of, quantizers_of, weight_layers
from detent.torch.weight_scales import set_weight_scales, starts_in_preparation

__all__ = ["Schedule"]

OSCILLATION = "oscillation"
EVENTS = {
    "delay": "quantized",
    "observe_until": "EMA ranges frozen",
    "freeze_norms": "batch norm statistics frozen",
    "freeze_scales": "all scales frozen, learned ones included",
}


class Schedule:
    """Schedule of the optimizer steps at which quantization starts, and at which ranges, statistics and scales freeze.

    Call ``step()`` after each optimizer step. The constructor applies the state of step 0. Learned scales start from
    the first quantized batch, so do not calibrate before a delay. A frozen or delayed learned scale gets no gradient:
    under DistributedDataParallel, a delay or ``freeze_scales`` needs ``find_unused_parameters=True``.

    Args:
        model: a prepared model, wrapped or not.
        delay: number of steps to train in float first, while EMA ranges are updated.
        observe_until: step at which EMA ranges freeze; None means never.
        freeze_norms: step at which the statistics of batch norms freeze; None means never.
        freeze_scales: step at which all scales freeze, learned scales included; None means never.
        oscillation: an ``Oscillation``, to damp or freeze weights that jump between two codes; None does neither. Only
            weights with integer codes on the CPU are tracked.

    Raises:
        StateError: the model is not prepared.
        SpecError: a step is not an integer >= 0, or the steps are in the wrong order.

    >>> import detent.torch as qt
    >>> model = qt.prepare(nn.Sequential(nn.Linear(4, 2)), "w8a8")
    >>> schedule = qt.Schedule(model, delay=100, freeze_scales=900)
    >>> model[0].input_quantizer.delayed
    True
    >>> for _ in range(150):
    ...     schedule.step()                                         # after optimizer.step()
    >>> schedule
    Schedule(delay=100, freeze_scales=900) at step 150
    >>> print(schedule)
      step 0    float, EMA ranges are updated
    > step 100  quantized
      step 900  all scales frozen, learned ones included
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        delay: int = 0,
        observe_until: int | None = None,
        freeze_norms: int | None = None,
        freeze_scales: int | None = None,
        oscillation: Oscillation | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise DtypeError(
                f"got {type(model).__name__} for model, expected a module prepared by qt.prepare: call qt.prepare first"
            )
        plan_of(model)
        self.model = model
        self.delay = as_integer("delay", delay, at_least=0)
        self.observe_until = _step_or_none("observe_until", observe_until)
        self.freeze_norms = _step_or_none("freeze_norms", freeze_norms)
        self.freeze_scales = _step_or_none("freeze_scales", freeze_scales)
        self._check_order()
        if oscillation is not None and not isinstance(oscillation, Oscillation):
            raise DtypeError(f"got {type(oscillation).__name__} for oscillation, expected a qt.Oscillation or None")
        self.oscillation = oscillation
        self._tracker = None if oscillation is None else OscillationTracker(oscillation)
        self.steps = 0
        self._syncs = False
        self._apply()

    def _check_order(self) -> None:
        for early, late, why in (
            ("delay", "observe_until", "ranges would freeze before quantization starts"),
            ("delay", "freeze_scales", "scales would freeze before quantization starts"),
            ("observe_until", "freeze_scales", "EMA ranges cannot be updated after all scales are frozen"),
        ):
            first, last = getattr(self, early), getattr(self, late)
            if first is not None and last is not None and last < first:
                raise SpecError(f"got {late}={last} and {early}={first}, expected {late} >= {early}: {why}")

    def step(self) -> None:
        """Count an optimizer step, and call ``qt.sync`` if needed; call this method after ``optimizer.step()``."""
        if self._syncs:
            sync(self.model)
        self.steps += 1
        if self.steps in self._given().values():
            self._apply()
        if self.delay and self.steps == self.delay:  # weights have changed since qt.prepare set their scales
            set_weight_scales(each for each in weight_layers(self.model) if starts_in_preparation(each[-1]))
        if self._tracker is not None and self.steps >= max(self._tracker.settings.start, self.delay):
            self._tracker.update(weight_layers(self.model))

    @property
    def frozen_weights(self) -> dict[str, float]:
        """The part of each weight's elements that is frozen because they oscillated, by name."""
        return {} if self._tracker is None else self._tracker.frozen

    def _given(self) -> dict[str, int]:
        """Return the arguments that differ from their defaults."""
        pairs = ((name, getattr(self, name)) for name in EVENTS)
        return {name: value for name, value in pairs if value is not None and (name, value) != ("delay", 0)}

    def _before(self, name: str) -> bool | None:
        """Return whether the current step is before the step in the argument ``name``; None if the argument is None."""
        value: int | None = getattr(self, name)
        return None if value is None else self.steps < value

    def _apply(self) -> None:
        """Set the attributes of quantizers and batch norms for this step; an argument that is None has no effect."""
        scales_learn, ranges_update, norms_update = (
            self._before(name) for name in ("freeze_scales", "observe_until", "freeze_norms")
        )
        quantizers = quantizers_of(self.model).values()
        self._syncs = any(quantizer.sync for quantizer in quantizers)
        for quantizer in quantizers:
            quantizer.delayed = self.steps < self.delay
            switches = scales_learn, ranges_update if isinstance(quantizer.mode, EMA) else None
            if switches != (None, None):
                quantizer.observing = False not in switches
            for parameter in () if scales_learn is None else quantizer.parameters(recurse=False):
                parameter.requires_grad_(bool(scales_learn))
                if not scales_learn:
                    parameter.grad = None  # otherwise momentum and weight decay would change the parameter
        for module in self.model.modules():
            if isinstance(module, QuantizedNorm) and norms_update is not None:
                module.frozen = not norms_update

    def state_dict(self) -> dict[str, Any]:
        """Return the current step, the arguments and the state of oscillating weights, for a checkpoint."""
        state: dict[str, Any] = {"steps": self.steps, **{name: getattr(self, name) for name in EVENTS}}
        return state if self._tracker is None else {**state, OSCILLATION: self._tracker.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the step of a checkpoint, and set the attributes of quantizers and batch norms for this step.

        Args:
            state: result of ``state_dict``; ``{"steps": n}`` alone continues at step n with this schedule's arguments.

        Raises:
            StateError: ``state`` is not the state of a schedule, or is from a schedule with different arguments.
        """
        if not isinstance(state, Mapping) or "steps" not in state or not set(state) <= {"steps", OSCILLATION, *EVENTS}:
            given = f"keys {sorted(map(str, state))}" if isinstance(state, Mapping) else type(state).__name__
            raise StateError(f"got {given}, expected the result of Schedule.state_dict(), with the key 'steps'")
        steps = as_integer("steps", state["steps"], at_least=0, error=StateError)
        own = self.state_dict()
        different = [
            f"{name}={state[name]} (here {own[name]})" for name in EVENTS if state.get(name, own[name]) != own[name]
        ]
        if different:
            raise StateError(
                f"the checkpoint is from a schedule with {', '.join(different)}: construct this schedule with the same "
                f"arguments, or load only the step with load_state_dict({{'steps': {steps}}})"
            )
        self.steps = steps
        self._apply()
        if self._tracker is not None:
            self._tracker.load(state.get(OSCILLATION, {}))

    def describe(self) -> str:
        """Return the timeline as text, equal to ``str``; ``>`` marks the current part."""
        events = {0: ["float, EMA ranges are updated"]} if self.delay else {}
        for name, value in {"delay": self.delay, **self._given()}.items():
            events.setdefault(value, []).append(EVENTS[name])
        current = max(value for value in events if value <= self.steps)
        width = len(str(max(events)))
        marks = {value: ">" if value == current else " " for value in events}
        return "\n".join(f"{marks[at]} step {at:<{width}}  {'; '.join(events[at])}" for at in sorted(events))

    def __str__(self) -> str:
        return self.describe()

    def __repr__(self) -> str:
        settings: dict[str, object] = {**self._given()}
        if self.oscillation is not None:
            settings[OSCILLATION] = self.oscillation
        given = ", ".join(f"{name}={value}" for name, value in settings.items())
        return f"Schedule({given}) at step {self.steps}"


def _step_or_none(name: str, value: int | None) -> int | None:
    return None if value is None else as_integer(name, value, at_least=0)
