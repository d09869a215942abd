"""The report: what quantization did to a model, layer by layer, as one HTML page and as JSON. Imported as ``qr``.

``build`` looks at a quantized file, ``build_from_evaluation`` at one that ``detent.evaluate`` has evaluated, and
``compare`` puts two reports side by side. ``import detent.report`` loads nothing heavy: ONNX comes with ``build``,
Jinja with the first page.
"""

from detent.report.builder import build, build_from_evaluation
from detent.report.comparison import ComparedLayer, Comparison, compare
from detent.report.document import (
    Histogram,
    Layer,
    Report,
    Reproduction,
    Size,
    Table,
    Tensor,
)

__all__ = [
    "ComparedLayer",
    "Comparison",
    "Histogram",
    "Layer",
    "Report",
    "Reproduction",
    "Size",
    "Table",
    "Tensor",
    "build",
    "build_from_evaluation",
    "compare",
]
