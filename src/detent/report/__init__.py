"""The report: what quantization did to a model, layer by layer, as one HTML page and as JSON. Imported as ``qr``.

``build`` looks at a quantized file, ``compare`` puts two reports side by side. ``import detent.report`` loads nothing
heavy: ONNX comes with ``build``, Jinja with the first page.
"""

from detent.report.builder import build
from detent.report.comparison import ComparedLayer, Comparison, compare
from detent.report.document import (
    Budget,
    Histogram,
    KernelRow,
    Layer,
    LayerSensitivity,
    Report,
    Reproduction,
    Run,
    SensitivityFacts,
    Size,
    Table,
    Tensor,
    VerificationFacts,
)

__all__ = [
    "Budget",
    "ComparedLayer",
    "Comparison",
    "Histogram",
    "KernelRow",
    "Layer",
    "LayerSensitivity",
    "Report",
    "Reproduction",
    "Run",
    "SensitivityFacts",
    "Size",
    "Table",
    "Tensor",
    "VerificationFacts",
    "build",
    "compare",
]
