"""Observers: ranges from data. Feed with ``observe``, combine with ``merge``, ask for ``range`` or ``params``."""

from detent.observers.entropy import Entropy
from detent.observers.histogram import HistogramObserver
from detent.observers.minmax import EMAMinMax, MinMax
from detent.observers.mse import MSE
from detent.observers.observer import Observer, Range
from detent.observers.passes import budget, calibrate
from detent.observers.percentile import Percentile

__all__ = [
    "MSE",
    "EMAMinMax",
    "Entropy",
    "HistogramObserver",
    "MinMax",
    "Observer",
    "Percentile",
    "Range",
    "budget",
    "calibrate",
]
