"""Evaluation of a quantized model: accuracy on held-out batches, speed, verification, sensitive layers, and a dry run.

The command ``detent quantize`` calls these functions and ``qo.quantize``. All of them need ONNX Runtime.
"""

from detent.evaluate.accuracy import (
    Accuracy,
    Split,
    check_metric,
    check_supports_agreement,
    measure_accuracy,
    split_batches,
)
from detent.evaluate.dry_run_estimate import DryRun, dry_run
from detent.evaluate.evaluation import (
    Checks,
    Evaluation,
    SensitiveLayer,
    evaluate_result,
    quantize_and_evaluate,
)
from detent.evaluate.label_files import read_labels
from detent.evaluate.speed import Timing, random_inputs, time_models
from detent.model_metric import MetricResult

__all__ = [
    "Accuracy",
    "Checks",
    "DryRun",
    "Evaluation",
    "MetricResult",
    "SensitiveLayer",
    "Split",
    "Timing",
    "check_metric",
    "check_supports_agreement",
    "dry_run",
    "evaluate_result",
    "measure_accuracy",
    "quantize_and_evaluate",
    "random_inputs",
    "read_labels",
    "split_batches",
    "time_models",
]
