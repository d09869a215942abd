"""Verification of a quantized file against its source: stored bits, computed results and integer kernels.

``verify`` returns a ``VerifyReport``. The first call of ``verify`` imports ONNX, and PyTorch if needed. The
import of ``detent.verification`` does not.
"""

from detent.verification.verify_call import verify
from detent.verification.verify_report import Difference, EndToEnd, Kernel, Replay, Segments, VerifyReport

__all__ = ["Difference", "EndToEnd", "Kernel", "Replay", "Segments", "VerifyReport", "verify"]
