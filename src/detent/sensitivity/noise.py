"""Noise: what one layer causes at the outputs, by option; and what measuring it costs.

The noise of an option is the power of the outputs' error relative to their own power, ``sum (y - y')^2 / sum y^2``
over all samples, and of several outputs the mean, so that outputs of large values do not hide the others.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, log10
from types import MappingProxyType
from typing import Any

from detent.checks import as_integer
from detent.errors import SpecError

__all__ = ["LARGEST", "Cost", "LayerNoise", "counted", "sqnr_of"]

LARGEST = 1e30  # what outputs that overflow are counted as


def sqnr_of(noise: float) -> float:
    """The ratio of signal to noise of a relative noise power, in decibels.

    >>> sqnr_of(0.001), sqnr_of(0.0)
    (30.0, inf)
    """
    return -10 * log10(noise) if noise > 0 else inf


def counted(count: int, noun: str) -> str:
    """So many things, in words.

    >>> counted(1, "layer"), counted(2, "layer")
    ('1 layer', '2 layers')
    """
    return f"{count} {noun}{'' if count == 1 else 's'}"


@dataclass(frozen=True)
class LayerNoise:
    """What was measured of one layer.

    Invariants: ``noise`` and ``nbytes`` have the same keys, at least one; noise is in 0..1e30. Equal values have equal
    hashes, whatever the order of their options.

    Attributes:
        name: of the layer.
        type: its operator or class.
        elements: of its weights.
        nbytes_float: of its weights in float.
        noise: at the outputs, relative to their power, by option.
        nbytes: of its weights, by option.
        tied: other layers with the same weight, which are quantized together with it.

    Raises:
        SpecError: an invariant is broken.

    >>> layer = LayerNoise("fc", "MatMul", 100, 400, {"int4/axis0": 0.01, "int8/axis0": 0.0001}, {"int4/axis0": 90, \
"int8/axis0": 140})
    >>> layer.worst, layer.names
    (0.01, ('fc',))
    """

    name: str
    type: str
    elements: int
    nbytes_float: int
    noise: Mapping[str, float]
    nbytes: Mapping[str, int]
    tied: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not isinstance(self.type, str):
            raise SpecError(f"name and type of a layer are text, got {self.name!r} and {self.type!r}")
        where = f"layer {self.name!r}"
        for what in ("elements", "nbytes_float"):
            as_integer(f"{what} of {where}", getattr(self, what), at_least=0)
        if not self.noise or set(self.noise) != set(self.nbytes):
            raise SpecError(
                f"{where} needs noise and nbytes of the same options, at least one, got {list(self.noise)} and "
                f"{list(self.nbytes)}"
            )
        for option, value in self.noise.items():
            if isinstance(value, bool) or not isinstance(value, float | int) or not 0 <= value <= LARGEST:
                raise SpecError(f"the noise of {where} at {option!r} is a number in 0..{LARGEST:g}, got {value!r}")
            as_integer(f"nbytes of {where} at {option!r}", self.nbytes[option], at_least=0)
        object.__setattr__(self, "noise", MappingProxyType({key: float(value) for key, value in self.noise.items()}))
        object.__setattr__(self, "nbytes", MappingProxyType(dict(self.nbytes)))
        object.__setattr__(self, "tied", tuple(self.tied))

    def __reduce__(self) -> tuple[Any, ...]:
        about = (self.name, self.type, self.elements, self.nbytes_float, dict(self.noise), dict(self.nbytes), self.tied)
        return type(self), about

    def __hash__(self) -> int:
        options = frozenset((option, noise, self.nbytes[option]) for option, noise in self.noise.items())
        return hash((self.name, self.type, self.elements, self.nbytes_float, options, self.tied))

    @property
    def worst(self) -> float:
        """The largest noise of all options."""
        return max(self.noise.values())

    @property
    def names(self) -> tuple[str, ...]:
        """The layer's name, and those of the layers that are tied to it."""
        return (self.name, *self.tied)


@dataclass(frozen=True)
class Cost:
    """What measuring is going to cost, announced before the long part.

    Attributes:
        layers: how many are measured.
        options: how many each may have.
        runs: how often the model runs over all samples: once per layer and option.
        samples: in each of these.
        seconds_estimate: of one run, timed, times all.

    >>> print(Cost(14, 3, 42, 32, 8.4))
    14 layers, 3 options: 42 runs over 32 samples, about 8 s
    """

    layers: int
    options: int
    runs: int
    samples: int
    seconds_estimate: float

    def __str__(self) -> str:
        seconds = self.seconds_estimate
        time = f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s" if seconds >= 1 else "1 s or less"
        layers, options = counted(self.layers, "layer"), counted(self.options, "option")
        return f"{layers}, {options}: {counted(self.runs, 'run')} over {counted(self.samples, 'sample')}, about {time}"
