"""Checkpoints of language models: open safetensors directories and GGUF files, and quantize them to GGUF.

``import detent.checkpoint as qc``. Reading GGUF files and writing need the extra ``checkpoint``.
"""

from detent.checkpoint.collection import collect
from detent.checkpoint.conversion_report import ConversionPlan, ConversionReport, TensorLine
from detent.checkpoint.file_verification import CheckpointVerification, TensorVerification, verify
from detent.checkpoint.row_stream import plan, quantize
from detent.checkpoint.sources import open  # noqa: A004 - called as qc.open
from detent.checkpoint.tensor_comparison import CheckpointComparison, TensorComparison, compare

__all__ = [
    "CheckpointComparison",
    "CheckpointVerification",
    "ConversionPlan",
    "ConversionReport",
    "TensorComparison",
    "TensorLine",
    "TensorVerification",
    "collect",
    "compare",
    "open",
    "plan",
    "quantize",
    "verify",
]
