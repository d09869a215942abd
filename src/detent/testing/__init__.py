"""Testing: what a user's own tests need, and real models to try things on. May import everything; nothing imports it.

``assert_same_codes`` proves an exported file equal to its model, ``nasty_arrays`` breaks quantizers; the zoo finds
models in installed packages. ``import detent.testing`` loads nothing heavy.
"""

from detent.testing.nasty import nasty_arrays
from detent.testing.same_codes import assert_same_codes
from detent.testing.zoo import MODELS, ZOO, ZooModel, agreement, record

__all__ = ["MODELS", "ZOO", "ZooModel", "agreement", "assert_same_codes", "nasty_arrays", "record"]
