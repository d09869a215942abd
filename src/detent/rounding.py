"""Rounding rules: from a real number to an integer code.

========== =====================================================================
half_even  to the nearest, ties to the even integer (IEEE, NumPy, torch, ONNX)
half_away  to the nearest, ties away from zero (C's ``round``, Rust's ``f32::round``)
floor      down
stochastic up with a probability equal to the fractional part, otherwise down
========== =====================================================================

Stochastic rounding has no hidden random state. The random word of element ``i`` (C order) is the first output of
Philox4x32-10 (Salmon et al. 2011) with key = seed and counter = (i low, i high, step, 0). So every backend gives equal
bits with any number of threads. The arithmetic is in ``detent.kernels.reference``.
"""

import re
from dataclasses import dataclass
from typing import Literal, get_args

from detent.checks import as_integer
from detent.errors import SpecError, closest

__all__ = ["Rounding", "floor", "get_rounding", "half_away", "half_even", "stochastic"]

Kind = Literal["half_even", "half_away", "floor", "stochastic"]
KINDS: tuple[Kind, ...] = get_args(Kind)
SEED_LIMIT = (1 << 64) - 1


@dataclass(frozen=True, repr=False)
class Rounding:
    """Rounding rule; only ``stochastic`` has a seed.

    Invariants: ``kind`` is one of KINDS. ``0 <= seed < 2**64``; if ``kind`` is not stochastic, ``seed == 0``.

    >>> import detent as dt
    >>> dt.rounding.half_even
    dt.rounding.half_even
    >>> dt.rounding.stochastic(7)
    dt.rounding.stochastic(7)
    """

    kind: Kind
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise SpecError(
                f"unknown rounding {self.kind!r}{closest(str(self.kind), KINDS)} expected {', '.join(KINDS)}"
            )
        object.__setattr__(self, "seed", as_integer("a rounding seed", self.seed, at_least=0, at_most=SEED_LIMIT))
        if self.seed and self.kind != "stochastic":
            raise SpecError(
                f"got seed {self.seed} for rounding {self.kind!r}, but only 'stochastic' has a seed: leave out the seed"
            )

    def __str__(self) -> str:
        return f"stochastic({self.seed})" if self.kind == "stochastic" else self.kind

    def __repr__(self) -> str:
        return f"dt.rounding.{self}"


half_even = Rounding("half_even")
half_away = Rounding("half_away")
floor = Rounding("floor")


def stochastic(seed: int = 0) -> Rounding:
    """Make stochastic rounding with this seed."""
    return Rounding("stochastic", seed)


def get_rounding(value: Rounding | str) -> Rounding:
    """Parse a rounding ("half_even", "floor", "stochastic(7)", ...); return a Rounding unchanged."""
    if isinstance(value, Rounding):
        return value
    match = re.fullmatch(r"(\w+?)(?:\(([0-9]{1,20})\))?", value) if isinstance(value, str) else None
    if match is None or match[1] not in KINDS:
        raise SpecError(
            f"unknown rounding {value!r}{closest(str(value), KINDS)} expected half_even, half_away, floor, "
            "stochastic or stochastic(SEED)"
        )
    return Rounding(match[1], int(match[2] or 0))
