"""Verification of a quantized file against its source: stored bits, computed results and integer kernels.

``verify`` returns a ``VerifyReport``. ``import detent.verification`` loads neither PyTorch nor ONNX. The first call of
``verify`` loads ONNX and ONNX Runtime.
"""

from detent.verification.verify_call import verify
from detent.verification.verify_report import Difference, EndToEnd, Kernel, Replay, Segments, VerifyReport

__all__ = ["Difference", "EndToEnd", "Kernel", "Replay", "Segments", "VerifyReport", "verify"]
