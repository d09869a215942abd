"""Observers: ranges from data. Feed with ``observe``, combine with ``merge``, ask for ``range`` or ``params``."""

from detent.observers.ema import EMAMinMax
from detent.observers.minmax import MinMax
from detent.observers.observer import Observer, Range

__all__ = ["EMAMinMax", "MinMax", "Observer", "Range"]
