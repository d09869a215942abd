"""The demo: train a small network for digits, quantize it in several ways, export and verify, in a minute.

``import detent.demo`` loads nothing heavy; ``run`` imports PyTorch, ONNX and ONNX Runtime.
"""

from detent.demo.result import DemoResult, DemoRow
from detent.demo.start import run

__all__ = ["DemoResult", "DemoRow", "run"]
