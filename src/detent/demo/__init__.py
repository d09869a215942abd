"""The demo: a small network for digits, trained, quantized in several ways, exported and proven, in a minute.

``run`` does all of it with data that are part of the package, and writes a page about it. ``import detent.demo`` loads
nothing heavy; PyTorch, ONNX and ONNX Runtime come with ``run``.
"""

from detent.demo.result import DemoResult, DemoRow
from detent.demo.start import run

__all__ = ["DemoResult", "DemoRow", "run"]
