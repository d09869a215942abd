"""Testing: real models to try things on, found in installed packages. May import everything; nothing imports it."""

from detent.testing.zoo import MODELS, ZOO, ZooModel, agreement, record

__all__ = ["MODELS", "ZOO", "ZooModel", "agreement", "record"]
