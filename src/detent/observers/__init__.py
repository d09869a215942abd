"""Observers, which compute ranges from data.

Pass batches to ``observe``, combine observers with ``merge``, and get the result from ``range`` or ``params``. Three
observers also have the names that PyTorch uses: ``MinMaxObserver`` is ``MinMax``, ``MovingAverageMinMaxObserver`` is
``EMAMinMax``, and ``HistogramObserver`` is ``MSE``.
"""

from detent.observers.entropy import Entropy
from detent.observers.histogram import BinnedObserver
from detent.observers.minmax import EMAMinMax, MinMax, MinMaxObserver, MovingAverageMinMaxObserver
from detent.observers.mse import MSE, HistogramObserver, best_params
from detent.observers.observer import Observer, Range
from detent.observers.passes import budget, calibrate
from detent.observers.percentile import Percentile
from detent.observers.unclipped_search import unclipped_params

__all__ = [
    "MSE",
    "BinnedObserver",
    "EMAMinMax",
    "Entropy",
    "HistogramObserver",
    "MinMax",
    "MinMaxObserver",
    "MovingAverageMinMaxObserver",
    "Observer",
    "Percentile",
    "Range",
    "best_params",
    "budget",
    "calibrate",
    "unclipped_params",
]
