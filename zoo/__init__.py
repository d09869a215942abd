"""Real ONNX models from Python packages, and inputs for them. The zoo is not part of the wheel.

Tests, benchmarks and examples use it. ``make`` adds the root of the repository to the import path of its environment,
so scripts can ``import zoo``.
"""

from zoo.models import MODELS, ZOO, ZooModel, agreement, record

__all__ = ["MODELS", "ZOO", "ZooModel", "agreement", "record"]
