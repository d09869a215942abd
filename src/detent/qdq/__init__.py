"""What all that reads or writes ONNX files shares.

``files`` reads with suspicion and writes atomically; ``graph`` looks names up; ``tensors`` turns codes into
initializers and back; ``nodes`` writes QuantizeLinear and DequantizeLinear, and reads them; ``targets`` says what
runtimes want; ``provenance`` what a file says of itself; ``sessions`` runs models in ONNX Runtime.
"""

from detent.qdq.files import load, save
from detent.qdq.graph import Graph
from detent.qdq.nodes import Quantization, dequantize_node, quantize_node, read_quantization
from detent.qdq.provenance import Provenance
from detent.qdq.sessions import make_session, optimised
from detent.qdq.targets import TARGETS, Container, Target, get_target
from detent.qdq.tensors import array_of, element_type, make_tensor

__all__ = [
    "TARGETS",
    "Container",
    "Graph",
    "Provenance",
    "Quantization",
    "Target",
    "array_of",
    "dequantize_node",
    "element_type",
    "get_target",
    "load",
    "make_session",
    "make_tensor",
    "optimised",
    "quantize_node",
    "read_quantization",
    "save",
]
