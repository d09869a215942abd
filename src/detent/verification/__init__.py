"""Verification: whether a quantized file computes what its source computes, code by code.

``verify`` compares, and ``VerifyReport`` says what it found.
``import detent.verification`` loads nothing heavy; PyTorch, ONNX and ONNX Runtime come with the first call.
"""

from detent.verification.verify_call import verify
from detent.verification.verify_report import Difference, EndToEnd, Kernel, VerifyReport

__all__ = ["Difference", "EndToEnd", "Kernel", "VerifyReport", "verify"]
