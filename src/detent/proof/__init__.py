"""The proof: that a quantized file computes what its source computes, code by code.

``verify`` compares, and ``VerifyReport`` says what it found. ``import detent.proof`` loads nothing heavy; PyTorch, ONNX
and ONNX Runtime come with the first call.
"""

from detent.proof.report import Difference, EndToEnd, Kernel, VerifyReport
from detent.proof.verification import verify

__all__ = ["Difference", "EndToEnd", "Kernel", "VerifyReport", "verify"]
