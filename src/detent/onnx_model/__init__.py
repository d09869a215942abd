"""ONNX models for ``detent.onnx`` and ``detent.torch``: files, graphs, Q/DQ reader and writer, sessions, targets."""

from detent.onnx_model.data_files import DataFiles
from detent.onnx_model.files import LoadedModel, ModelSource, load, load_model, save
from detent.onnx_model.graph import Graph, array_of, element_type, make_tensor
from detent.onnx_model.preprocess_options import Preprocessing
from detent.onnx_model.provenance import Provenance
from detent.onnx_model.qdq_reader import read_quantization
from detent.onnx_model.qdq_writer import QdqParams, dequantize_node, quantize_node
from detent.onnx_model.sessions import make_session, optimized
from detent.onnx_model.targets import TARGETS, Container, Target, get_target

__all__ = [
    "TARGETS",
    "Container",
    "DataFiles",
    "Graph",
    "LoadedModel",
    "ModelSource",
    "Preprocessing",
    "Provenance",
    "QdqParams",
    "Target",
    "array_of",
    "dequantize_node",
    "element_type",
    "get_target",
    "load",
    "load_model",
    "make_session",
    "make_tensor",
    "optimized",
    "quantize_node",
    "read_quantization",
    "save",
]
