"""Demo: train a small network on digits, quantize it in several ways, export and verify it, in about a minute.

``import detent.demo`` is fast, because only ``run`` imports PyTorch, ONNX and ONNX Runtime.
"""

from detent.demo.result import DemoResult, DemoRow
from detent.demo.start import run

__all__ = ["DemoResult", "DemoRow", "run"]
