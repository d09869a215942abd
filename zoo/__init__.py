"""Real ONNX models that come in packages, and data for them: for tests, benchmarks and examples, not in the wheel.

``make`` puts the root of the repository on the environment's path, so that scripts can ``import zoo``.
"""

from zoo.models import MODELS, ZOO, ZooModel, agreement, record

__all__ = ["MODELS", "ZOO", "ZooModel", "agreement", "record"]
