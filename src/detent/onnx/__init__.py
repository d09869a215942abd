"""Quantization of ONNX models with calibration data, and reading of quantized files. Imported as ``qo``."""

from detent.onnx.calibration import Calibration, calibrate
from detent.onnx.decisions import (
    Decisions,
    Equalized,
    LayerDecision,
    QuantizerPlacement,
    RangeDecision,
    Smoothed,
)
from detent.onnx.graph_plan import GraphPlan, LayerPlan, plan
from detent.onnx.metric_search import MetricSearch, SearchStep
from detent.onnx.normal_form import prepare
from detent.onnx.pipeline import LayerReport, QuantizeReport, decide, quantize
from detent.onnx.quality_warnings import QuantizeWarning
from detent.onnx.quantized_graph import insert, rewrite
from detent.onnx_model.files import load, save
from detent.onnx_model.quantized_model import QuantizedModel, load_quantized

__all__ = [
    "Calibration",
    "Decisions",
    "Equalized",
    "GraphPlan",
    "LayerDecision",
    "LayerPlan",
    "LayerReport",
    "MetricSearch",
    "QuantizeReport",
    "QuantizeWarning",
    "QuantizedModel",
    "QuantizerPlacement",
    "RangeDecision",
    "SearchStep",
    "Smoothed",
    "calibrate",
    "decide",
    "insert",
    "load",
    "load_quantized",
    "plan",
    "prepare",
    "quantize",
    "rewrite",
    "save",
]
