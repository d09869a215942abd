"""ONNX files: quantize them with data, and read quantized ones. Imported as ``qo``."""

from detent.onnx.calibrating import Calibration, calibrate
from detent.onnx.inserting import insert
from detent.onnx.planning import GraphPlan, LayerPlan, plan
from detent.onnx.preparing import prepare
from detent.onnx.quantizing import quantize
from detent.onnx.reading import QuantizedModel, load_quantized
from detent.onnx.report import LayerReport, QuantizeReport
from detent.qdq.files import load, save

__all__ = [
    "Calibration",
    "GraphPlan",
    "LayerPlan",
    "LayerReport",
    "QuantizeReport",
    "QuantizedModel",
    "calibrate",
    "insert",
    "load",
    "load_quantized",
    "plan",
    "prepare",
    "quantize",
    "save",
]
