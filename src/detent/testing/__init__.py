"""Testing: real models to try things on, found in installed packages. May import everything; nothing imports it."""

from detent.testing.zoo import MODELS, ZooModel, record

__all__ = ["MODELS", "ZooModel", "record"]
