"""Evaluation of a quantized model: held-out accuracy, speed, and a dry run that estimates size, memory and time."""

from detent.evaluate.accuracy import Accuracy, Split, judge, split
from detent.evaluate.dry_run import Rehearsal, rehearse
from detent.evaluate.speed import Timing, race

__all__ = ["Accuracy", "Rehearsal", "Split", "Timing", "judge", "race", "rehearse", "split"]
