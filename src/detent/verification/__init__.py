"""Verification: whether a quantized file is what its source and its decisions make it, and computes that.

``verify`` compares, and ``VerifyReport`` says what it found.
``import detent.verification`` loads nothing heavy; PyTorch, ONNX and ONNX Runtime come with the first call.
"""

from detent.verification.verify_call import verify
from detent.verification.verify_report import Difference, EndToEnd, Kernel, Replay, Segments, VerifyReport

__all__ = ["Difference", "EndToEnd", "Kernel", "Replay", "Segments", "VerifyReport", "verify"]
