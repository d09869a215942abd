"""Real ONNX models from Python packages, with inputs, for tests, benchmarks and examples; not in the wheel.

``make`` puts the root of the repository on the environment's path, so scripts can ``import zoo``.
"""

from zoo.models import MODELS, ZOO, ZooModel, agreement, record

__all__ = ["MODELS", "ZOO", "ZooModel", "agreement", "record"]
