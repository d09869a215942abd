"""Watching: what quantizers do to their data while a model trains, from samples that cost little.

A watched forward looks at no more than ``SAMPLE`` elements, at equal distances that touch every index of every axis.
Weights are looked at whenever they have changed, to see which codes go back and forth; activations every few calls.
A model that is not watched pays nothing. ``qt.health`` reads what was seen.

A weight *oscillates* where its code changes against the direction of its last change. How often it does is an average
over steps (Nagel et al. 2022, "Overcoming oscillations in quantization-aware training")::

    f = MOMENTUM * reversed + (1 - MOMENTUM) * f              oscillating: f > FREQUENCY

Deliberately left out: compiled forwards, which no Python code sees; give ``qt.health`` batches for these.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from detent.checks import as_integer
from detent.errors import DtypeError
from detent.granularity import Granularity, PerAxis, PerTensor
from detent.metrics import clip_fraction
from detent.ops import fake_quantize_backward, quantize
from detent.params import QuantParams
from detent.scale_mode import PerBatch
from detent.scale_rule import Parameters
from detent.spec import QuantSpec
from detent.ste import Clipped, Custom, Estimator, Identity
from detent.tensor import QuantizedTensor
from detent.torch.arrays import on_cpu, to_array
from detent.torch.preparation import plan_of, quantizers_of, weight_layers
from detent.torch.quantizer import FakeQuantize

__all__ = ["Measure", "Oscillation", "Watch", "Watcher", "measure", "params_of", "sample", "watch"]

SAMPLE = 4096
"""How many elements of a tensor a watched forward looks at, at most."""
RECENT = 16
"""How many looks at an activation count: the latest ones."""
MOMENTUM = 0.01
"""The weight of a new step in the average that says how often a code turns back."""
FREQUENCY = 0.005
"""A weight oscillates when its code turns back more often than this, per step."""
SATURATED = 0.01
"""A gradient is saturated where the estimator lets less than this part of it pass."""

Array = NDArray[Any]


@dataclass(frozen=True)
class Measure:
    """What quantization does to some data.

    Attributes:
        size: how many elements there are.
        clipped: how many codes were clamped.
        saturated: how many gradients the estimator stops; None where it is a callable.
        codes: the codes that occur, each once, in the format's storage type.

    >>> Measure.merge([Measure(4, 1, 1, np.array([0, 2])), Measure(4, 0, 0, np.array([2, 3]))])
    Measure(size=8, clipped=1, saturated=1, codes=array([0, 2, 3]))
    """

    size: int
    clipped: int
    saturated: int | None
    codes: Array

    @staticmethod
    def merge(parts: Sequence["Measure"]) -> "Measure":
        """All of the data as one."""
        stopped = [part.saturated for part in parts if part.saturated is not None]
        return Measure(
            sum(part.size for part in parts),
            sum(part.clipped for part in parts),
            sum(stopped) if len(stopped) == len(parts) else None,
            _distinct(np.concatenate([part.codes for part in parts])),
        )


def measure(x: Array, params: QuantParams, ste: Estimator) -> Measure:
    """What quantization by these parameters does to x, and its estimator to the gradient.

    >>> found = measure(np.array([0.2, 1.0, 400.0], np.float32), QuantParams.int8_symmetric(), Clipped())
    >>> found.clipped, found.saturated, found.codes.tolist()
    (1, 1, [0, 1, 127])
    """
    clipped = round(clip_fraction(x, params) * x.size)
    saturated: int | None
    if isinstance(ste, Custom):
        saturated = None
    elif isinstance(ste, Identity):
        saturated = 0
    elif ste == Clipped():  # the very mask that counts as clipped
        saturated = clipped
    else:
        passed = fake_quantize_backward(np.ones_like(x), x, params, ste=ste)
        saturated = int(np.count_nonzero(~(np.abs(passed) >= SATURATED)))
    return Measure(x.size, clipped, saturated, _distinct(quantize(x, params, nan="zero_point").codes))


def _distinct(codes: Array) -> Array:
    """The codes that occur, each once."""
    if codes.dtype.kind in "iu":
        return np.unique(codes)
    return np.unique(codes.view(np.uint8)).view(codes.dtype)  # small floats, by their bits


def sample(x: Tensor, params: QuantParams) -> tuple[Array, QuantParams]:
    """At most about ``SAMPLE`` elements of x in a row, and the parameters of each.

    >>> x = torch.arange(12.0).reshape(2, 6)
    >>> params = QuantParams("int8/axis0", scale=[1.0, 0.5])
    >>> some, own = sample(x, params)
    >>> some.shape, own.scale.tolist() == [1.0] * 6 + [0.5] * 6
    ((12,), True)
    """
    step = _distance(x.numel())
    data = to_array(x.detach().reshape(-1)[::step].cpu()).copy()  # a copy, for it may be kept
    if isinstance(params.spec.granularity, PerTensor):
        return data, params
    sets = _sets(params.spec.granularity, tuple(x.shape))
    scale, zero_point = params.scale.reshape(-1)[sets], params.zero_point.reshape(-1)[sets]
    return data, QuantParams.trusted(_each(params.spec), Parameters(scale, zero_point), scale, scale)


@lru_cache(maxsize=1024)
def _distance(size: int) -> int:
    """The distance of sampled elements: without a common factor with the size, so that no axis is seen in part only."""
    step = max(1, -(-size // SAMPLE))
    while gcd(step, size) > 1:
        step += 1
    return step


@lru_cache(maxsize=256)
def _sets(granularity: Granularity, shape: tuple[int, ...]) -> NDArray[np.intp]:
    """The set of each sampled element."""
    tiling = granularity.tiling(shape)
    size = int(np.prod(shape))
    places = np.unravel_index(np.arange(0, size, _distance(size)), shape)
    blocks = tuple(place // block for place, block in zip(places, tiling.block, strict=True))
    return np.ravel_multi_index(blocks, tiling.grid)


@lru_cache(maxsize=256)
def _each(spec: QuantSpec) -> QuantSpec:
    """The same codes with a plain scale for each element of a row."""
    return spec.replace(granularity=PerAxis(0), scale_format="float")


def params_of(quantizer: FakeQuantize, x: Tensor) -> QuantParams:
    """The parameters with which a quantizer meets x; its state stays as it is.

    Raises:
        NotCalibratedError: it has none.

    >>> params_of(FakeQuantize("int8", "per_batch"), torch.tensor([-254.0, 1.0])).scale
    array(2., dtype=float32)
    """
    if isinstance(quantizer.mode, PerBatch):
        return QuantParams.from_data(quantizer.spec, to_array(on_cpu(x)))
    return quantizer.params


class Oscillation:
    """How often the codes of a weight turn back, as an average over steps.

    >>> turning, params = Oscillation(), QuantParams.int8_symmetric()
    >>> for weights in ([0.4, 0.0], [0.6, 1.0], [0.4, 2.0]):
    ...     turning.update(np.array(weights), params)
    >>> turning.steps, turning.rate
    (2, 0.5)
    """

    def __init__(self) -> None:
        self.steps = 0
        self._data: Array | None = None
        self._levels: Array | None = None
        self._direction: Array = np.zeros(())
        self._frequency: Array = np.zeros(())

    @property
    def rate(self) -> float | None:
        """The share of weights that oscillate; None before there were two steps to compare."""
        return float(np.mean(self._frequency > FREQUENCY)) if self.steps else None

    def update(self, data: Array, params: QuantParams) -> None:
        """Look at the weights after a step; the same weights once more are no step."""
        if self._data is not None and np.array_equal(self._data, data):
            return
        levels = _levels(quantize(data, params, nan="zero_point"))
        if self._levels is None or self._levels.shape != levels.shape:
            self.__init__()  # type: ignore[misc]  # another weight: start anew
            self._direction, self._frequency = np.zeros((2, *levels.shape), np.float32)
        else:
            moved = np.sign(levels - self._levels)
            turned = moved * self._direction < 0
            self._direction = np.where(moved != 0, moved, self._direction)
            self._frequency = MOMENTUM * turned + (1 - MOMENTUM) * self._frequency
            self.steps += 1
        self._data, self._levels = data, levels


def _levels(q: QuantizedTensor) -> Array:
    """Numbers in the order of what the codes stand for."""
    if q.spec.format.kind == "float":
        return np.asarray(q.spec.format.levels, np.float32)[q.codes.view(np.uint8)]
    return q.codes.astype(np.float32)


class Watcher:
    """What one quantizer calls in each forward that quantizes; samples in training only.

    Attributes:
        first: the first scale, against which drift is measured.
        oscillation: of a weight; None for an activation.

    >>> quantizer = FakeQuantize("int8", "per_batch")
    >>> quantizer.watcher = Watcher(quantizer, is_weight=False)
    >>> _ = quantizer(torch.tensor([1.0, 0.5, -1.0]))
    >>> quantizer.watcher.measured().codes.tolist()
    [-127, 64, 127]
    """

    def __init__(self, quantizer: FakeQuantize, *, is_weight: bool, every: int = 1) -> None:
        known = quantizer.is_initialized and not isinstance(quantizer.mode, PerBatch)
        self.first: Array | None = quantizer.params.scale if known else None
        self.oscillation = Oscillation() if is_weight else None
        self._recent: deque[Measure] = deque(maxlen=RECENT)
        self._every, self._calls = every, 0

    def __call__(self, quantizer: FakeQuantize, x: Tensor, params: QuantParams | None) -> None:
        """Take a sample of x, if it is the turn of one; without parameters, those of the quantizer's state count."""
        if not quantizer.training or torch._C._are_functorch_transforms_active() or not x.numel():
            return
        self._calls += 1
        if self.oscillation is None and (self._calls - 1) % self._every:
            return
        params = params_of(quantizer, x) if params is None else params
        self.first = params.scale if self.first is None else self.first
        data, own = sample(x, params)
        if self.oscillation is None:
            self._recent.append(measure(data, own, quantizer.ste))
        else:
            self.oscillation.update(data, own)

    def measured(self) -> Measure | None:
        """What was seen of an activation lately; None where nothing was."""
        return Measure.merge(self._recent) if self._recent else None


class Watch:
    """A model being watched; made by ``qt.watch``, and a context that ends it on leaving.

    >>> import detent.torch as qt
    >>> with qt.watch(qt.prepare(nn.Sequential(nn.Linear(4, 2)), "w8a8")) as watched:
    ...     print(watched)
    Watch(2 quantizers, activations every 16 calls)
    """

    def __init__(self, model: nn.Module, every: int) -> None:
        weights = {id(quantizer) for *_, quantizer in weight_layers(model)}
        self.every = every
        self._watched: dict[FakeQuantize, Watcher] = {}
        for quantizer in quantizers_of(model).values():
            quantizer.watcher = watcher = Watcher(quantizer, is_weight=id(quantizer) in weights, every=every)
            self._watched[quantizer] = watcher

    def stop(self) -> None:
        """Watch no more; what was seen is forgotten.

        >>> import detent.torch as qt
        >>> model = qt.prepare(nn.Sequential(nn.Linear(4, 2)), "w8a8")
        >>> qt.watch(model).stop()
        >>> model[0].weight_quantizer.watcher is None
        True
        """
        for quantizer, watcher in self._watched.items():
            if quantizer.watcher is watcher:
                quantizer.watcher = None
        self._watched.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"Watch({len(self._watched)} quantizers, activations every {self.every} calls)"


def watch(model: nn.Module, *, every: int = 16) -> Watch:
    """Watch a model while it trains, for ``qt.health``; call it after calibration, from which drift is measured.

    Weights are sampled after each optimizer step, activations in every 16th call of their quantizer, in training only.
    Compiled forwards are not seen. Watching once more starts anew.

    Args:
        model: a prepared model.
        every: how many calls of an activation's quantizer there are to one sample.

    Returns:
        The watch, to ``stop()`` or to use as a context.

    Raises:
        StateError: the model is not prepared.
        SpecError: ``every`` is no positive integer.

    >>> import detent.torch as qt
    >>> model = qt.prepare(nn.Sequential(nn.Linear(4, 2)), "w8a8")
    >>> with qt.watch(model):
    ...     _ = model(torch.ones(3, 4))
    ...     print(qt.health(model)["0.input_quantizer"].code_usage == 1 / 256)
    True
    """
    if not isinstance(model, nn.Module):
        raise DtypeError(f"watch takes a prepared model, got {type(model).__name__}")
    plan_of(model)
    return Watch(model, as_integer("every", every, at_least=1))
