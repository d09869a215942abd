"""Options of ``qo.quantize`` and ``qo.decide`` for the accuracy passes, and how much each effort measures."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from numpy.typing import NDArray

from detent.checks import as_integer
from detent.errors import SpecError
from detent.onnx.calibration import Progress
from detent.onnx.graph_plan import PREFERENCES, Preference
from detent.onnx.samples import MAX_SAMPLES, Samples
from detent.onnx_model.workspace import Workspace
from detent.rule import ObserverLike, get_observer_spec

__all__ = ["EFFORTS", "MIN_COMPARED", "Effort", "KeepFloat", "Options", "RunOptions"]

Feed = dict[str, NDArray[Any]]
KeepFloat = Literal["auto", "none"]
Effort = Literal["fast", "balanced", "best"]

MAX_MULTIPLICATIONS = 2e10  # limit on the runs that record the inputs of layers, all samples together
MAX_FAST_SAMPLES = 16  # with effort "fast"; each pass over 32 samples would take a tenth to a quarter of the time
MIN_SAMPLES, MIN_COMPARED = 4, 2  # samples that even the largest model uses


class Search(NamedTuple):
    """Amount of measurement at the outputs of the model.

    ``multiplications`` is the work limit of one measurement. The model runs on as many samples as the limit allows, but
    on at least two. A limit of 0 turns measurements off. ``max_samples`` limits the samples of all passes except
    calibration, and those on which outputs are compared.
    """

    multiplications: float
    max_samples: int = MAX_SAMPLES

    def samples(self, samples: Sequence[Feed], per_sample: float) -> Samples:
        """Split the samples into the parts of ``Samples``; a large model uses only the first samples."""
        per_sample = max(per_sample, 1.0)
        num_compared = max(MIN_COMPARED, int(self.multiplications / per_sample)) if self.multiplications else 0
        max_samples = min(self.max_samples, max(MIN_SAMPLES, int(MAX_MULTIPLICATIONS / per_sample)))
        return Samples.of(samples, max(max_samples, num_compared), num_compared)


EFFORTS: Mapping[Effort, Search] = MappingProxyType(
    {"fast": Search(0.0, MAX_FAST_SAMPLES), "balanced": Search(2e9), "best": Search(1e11)}
)


@dataclass(frozen=True)
class Options:
    """Options of ``quantize`` and ``decide`` that affect decisions, with their defaults."""

    observer: ObserverLike | None = None
    skip: Iterable[str] = ()
    keep_float: KeepFloat = "auto"
    bias_correction: bool = True
    equalize: bool = True
    smooth: bool = True
    seed: int = 0
    prefer: Preference = "balanced"
    effort: Effort = "balanced"
    float16: bool = False
    metric: str = ""  # name of the metric, if max_drop is set
    max_drop: float | None = None

    @property
    def is_measured(self) -> bool:
        """Whether the noise at the outputs of the model is measured."""
        return EFFORTS[self.effort].multiplications > 0

    def __post_init__(self) -> None:
        skip = (self.skip,) if isinstance(self.skip, str) or not isinstance(self.skip, Iterable) else tuple(self.skip)
        if not all(isinstance(name, str) for name in skip):
            raise SpecError(f"got skip={self.skip!r}, expected layer names or glob patterns")
        object.__setattr__(self, "skip", skip)
        object.__setattr__(self, "seed", as_integer("seed", self.seed, at_least=0))
        if self.prefer not in PREFERENCES:
            raise SpecError(f"got prefer={self.prefer!r}, expected one of {', '.join(PREFERENCES)}")
        if self.effort not in EFFORTS:
            raise SpecError(f"got effort={self.effort!r}, expected one of {', '.join(EFFORTS)}")
        if self.keep_float not in {"auto", "none"}:
            raise SpecError(
                f"got keep_float={self.keep_float!r}, expected 'auto' or 'none'; to keep chosen layers in float, pass "
                "their names as skip="
            )

    def to_json(self) -> str:
        """Return the options that differ from their defaults as JSON, or "" if all options have their defaults."""
        options: dict[str, object] = {
            **vars(self),
            "observer": None if self.observer is None else str(get_observer_spec(self.observer)),
        }
        defaults = vars(Options())
        changed = {name: value for name, value in options.items() if value != defaults[name]}
        return json.dumps(changed) if changed else ""


@dataclass(frozen=True)
class RunOptions:
    """Options of calibration that do not affect decisions."""

    memory_budget: int | None = None
    progress: Progress | None = None
    resume_file: str | PathLike[str] | None = None
    workspace: Workspace | None = None  # with a workspace, workers run the model

    def __post_init__(self) -> None:
        if self.memory_budget is not None:
            budget = as_integer("memory_budget", self.memory_budget, at_least=1)
            object.__setattr__(self, "memory_budget", budget)
