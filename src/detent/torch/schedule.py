"""Schedule: when quantization starts, and what stays as it is from which step on.

Counted in optimizer steps; the state of step n is that of the forward passes after n steps::

    0 .. delay            the model computes in float; averages of mode EMA are gathered
    delay ..              quantized
    observe_until ..      averages of mode EMA stay
    freeze_norms ..       batch norms use their running statistics, and leave them
    freeze_scales ..      all scales stay: averages, and learned ones

It switches what every quantizer and batch norm has as an attribute, and only at these steps: in between, ``step()``
counts. Scales of mode PerBatch have no state and follow their data always.
"""

from collections.abc import Mapping

from torch import nn

from detent.checks import as_integer
from detent.errors import DtypeError, SpecError, StateError
from detent.scale_mode import EMA
from detent.torch.batchnorm import QuantizedNorm
from detent.torch.distributed import sync
from detent.torch.preparation import plan_of, quantizers_of
from detent.torch.quantizer import FakeQuantize

__all__ = ["Schedule"]

EVENTS = ("delay", "observe_until", "freeze_norms", "freeze_scales")


class Schedule:
    """Starts quantization and freezes its parts at given steps; works in any loop that calls ``step()``.

    Making one applies the state of step 0. Learned scales start from the first quantized batch, so with a delay they
    are best not calibrated before. A learned scale that rests gets no gradient: under DistributedDataParallel, a delay
    or ``freeze_scales`` needs ``find_unused_parameters=True``.

    Args:
        model: a prepared model, wrapped or not.
        delay: how many steps to train in float first, while averages are gathered.
        observe_until: the step from which averages of mode EMA stay; None for never.
        freeze_norms: the step from which the statistics of batch norms stay.
        freeze_scales: the step from which all scales stay, learned ones too.

    Attributes:
        steps: how many steps there were.

    Raises:
        StateError: the model is not prepared.
        SpecError: a step that is no integer of at least 0, or an order that cannot be meant.

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
      step 0    float, ranges are gathered
    > step 100  quantized
      step 900  scales stay, learned ones too
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        delay: int = 0,
        observe_until: int | None = None,
        freeze_norms: int | None = None,
        freeze_scales: int | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise DtypeError(f"Schedule takes a prepared model, got {type(model).__name__}: qt.prepare(model, recipe)")
        plan_of(model)
        self.model = model
        self.delay = as_integer("delay", delay, at_least=0)
        self.observe_until = _step_or_none("observe_until", observe_until)
        self.freeze_norms = _step_or_none("freeze_norms", freeze_norms)
        self.freeze_scales = _step_or_none("freeze_scales", freeze_scales)
        self._check_order()
        self.steps = 0
        self._syncs = False
        self._apply()

    def _check_order(self) -> None:
        for early, late, why in (
            ("delay", "observe_until", "ranges would stay before quantization starts"),
            ("delay", "freeze_scales", "scales would stay before quantization starts"),
            ("observe_until", "freeze_scales", "frozen scales observe nothing"),
        ):
            first, last = getattr(self, early), getattr(self, late)
            if first is not None and last is not None and last < first:
                raise SpecError(f"{late}={last} comes before {early}={first}, but {why}: expected {late} >= {early}")

    def step(self) -> None:
        """Count a step; call it once after each ``optimizer.step()``, on every process.

        Where quantizers synchronise (``qt.prepare(..., sync=True)``), it also merges what all processes have seen, by
        ``qt.sync``.
        """
        if self._syncs:
            sync(self.model)
        self.steps += 1
        if self.steps in self._given().values():
            self._apply()

    def _given(self) -> dict[str, int]:
        """The arguments other than their defaults."""
        pairs = ((name, getattr(self, name)) for name in EVENTS)
        return {name: value for name, value in pairs if value is not None and (name, value) != ("delay", 0)}

    def _before(self, name: str) -> bool | None:
        """Whether the step of that name is still to come; None where it never does."""
        value: int | None = getattr(self, name)
        return None if value is None else self.steps < value

    def _apply(self) -> None:
        """Set every switch to the state of the current step; those of arguments not given stay as they are."""
        learning, observing, moving = (
            self._before(name) for name in ("freeze_scales", "observe_until", "freeze_norms")
        )
        quantizers = quantizers_of(self.model).values()
        self._syncs = any(quantizer.sync for quantizer in quantizers)
        for quantizer in quantizers:
            quantizer.delayed = self.steps < self.delay
            switches = learning, observing if isinstance(quantizer.mode, EMA) else None
            if switches != (None, None):
                quantizer.observing = False not in switches
            if learning is not None:
                _let_learn(quantizer, learn=learning)
        for module in self.model.modules():
            if isinstance(module, QuantizedNorm) and moving is not None:
                module.frozen = not moving

    def state_dict(self) -> dict[str, int | None]:
        """The step and the arguments, for a checkpoint.

        >>> import detent.torch as qt
        >>> qt.Schedule(qt.prepare(nn.Sequential(nn.Linear(4, 2)), "w8a8"), delay=9).state_dict()
        {'steps': 0, 'delay': 9, 'observe_until': None, 'freeze_norms': None, 'freeze_scales': None}
        """
        return {"steps": self.steps, **{name: getattr(self, name) for name in EVENTS}}

    def load_state_dict(self, state: Mapping[str, int | None]) -> None:
        """Continue where a checkpoint was made, and set the model's switches accordingly.

        Args:
            state: what ``state_dict`` returned; ``{"steps": n}`` alone continues at step n by the arguments given here.

        Raises:
            StateError: not the state of a schedule, or that of one with other arguments.

        >>> import detent.torch as qt
        >>> model = qt.prepare(nn.Sequential(nn.Linear(4, 2)), "w8a8")
        >>> schedule = qt.Schedule(model, delay=9)
        >>> schedule.load_state_dict({"steps": 9})
        >>> model[0].input_quantizer.delayed
        False
        """
        if not isinstance(state, Mapping) or "steps" not in state or not set(state) <= {"steps", *EVENTS}:
            given = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
            raise StateError(f"expected what Schedule.state_dict() returned, with the key 'steps', got {given}")
        steps = as_integer("steps", state["steps"], at_least=0, error=StateError)
        own = self.state_dict()
        other = [
            f"{name}={state[name]} (here {own[name]})" for name in EVENTS if state.get(name, own[name]) != own[name]
        ]
        if other:
            raise StateError(
                f"the checkpoint belongs to a schedule with {', '.join(other)}: make this one with the same arguments, "
                f"or load its step alone, load_state_dict({{'steps': {steps}}})"
            )
        self.steps = steps
        self._apply()

    def describe(self) -> str:
        """The timeline, which is also its ``str``; the current part has a mark.

        >>> import detent.torch as qt
        >>> print(qt.Schedule(qt.prepare(nn.Sequential(nn.Linear(4, 2)), "w8a8"), freeze_norms=50).describe())
        > step 0   quantized
          step 50  batch-norm statistics stay
        """
        texts = {0: ["float, ranges are gathered"]} if self.delay else {}
        for name, value in {"delay": self.delay, **self._given()}.items():
            texts.setdefault(value, []).append(_TEXTS[name])
        now = max(value for value in texts if value <= self.steps)
        width = len(str(max(texts)))
        marks = {value: ">" if value == now else " " for value in texts}
        return "\n".join(f"{marks[at]} step {at:<{width}}  {'; '.join(texts[at])}" for at in sorted(texts))

    def __str__(self) -> str:
        return self.describe()

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value}" for name, value in self._given().items())
        return f"Schedule({given}) at step {self.steps}"


_TEXTS = {
    "delay": "quantized",
    "observe_until": "ranges of mode EMA stay",
    "freeze_norms": "batch-norm statistics stay",
    "freeze_scales": "scales stay, learned ones too",
}


def _step_or_none(name: str, value: int | None) -> int | None:
    return None if value is None else as_integer(name, value, at_least=0)


def _let_learn(quantizer: FakeQuantize, *, learn: bool) -> None:
    """Let gradients change learned parameters, or keep every optimizer from changing them."""
    for parameter in quantizer.parameters(recurse=False):
        parameter.requires_grad_(learn)
        if not learn:
            parameter.grad = None  # with one, momentum and weight decay would go on
