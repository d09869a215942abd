"""Reports on quantized models, layer by layer, as a single HTML file and as JSON. Import as ``qr``.

``build`` makes the report of a quantized file. ``build_from_evaluation`` makes the report of an evaluation from
``detent.evaluate``. ``compare`` compares two reports. ``import detent.report`` is fast: only ``build`` imports ONNX,
and only ``to_html`` imports Jinja.
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
