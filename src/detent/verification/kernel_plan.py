"""Level 3: whether ONNX Runtime computes in integers what the file asks for, and nothing else.

ONNX Runtime may quantize a float layer behind the file's back, between a DequantizeLinear and a QuantizeLinear (see
``onnx_model.ort_workarounds``). And an integer kernel that it made when the file was written may be gone in another
version of it: the file then runs in float, slower and with other last bits.
"""

from onnx import ModelProto

from detent.onnx_model.graph import INTEGER_KERNELS, MOVING, node_name, trace_back
from detent.onnx_model.provenance import RuntimeRecord
from detent.onnx_model.qdq_reader import QuantizedGraph
from detent.onnx_model.sessions import integer_kernels, runtime_record
from detent.verification.verify_report import Difference

__all__ = ["check_kernels"]


def check_kernels(artifact: QuantizedGraph, running: ModelProto) -> tuple[Difference | None, list[str]]:
    """The first integer kernel that the file does not ask for, or that is gone; and notes."""
    kernels = integer_kernels(running)
    unasked = _unasked(artifact, kernels)
    if unasked is not None:
        return unasked, []
    record = RuntimeRecord.read(artifact.model)
    if record is None:
        return None, []
    gone = [(name, kernel) for name, kernel in record.kernels.items() if name not in kernels]
    here = runtime_record(running)
    if not gone:
        return None, []
    name, kernel = gone[0]
    if (record.onnxruntime, record.machine) == (here.onnxruntime, here.machine):
        cause = f"an integer kernel that was there when the file was written is gone ({len(gone)} in all)"
        return Difference.of(name, "kernel", cause, kernel), []
    note = (
        f"{len(gone)} integer kernels of ONNX Runtime {record.onnxruntime} ({record.machine}), the first is {kernel} "
        f"{name!r}, are not made by {here.onnxruntime} ({here.machine}): these layers run in float here"
    )
    return None, [note]


def _unasked(artifact: QuantizedGraph, kernels: dict[str, str]) -> Difference | None:
    """The first layer with a float weight in the file that ONNX Runtime computes in integers."""
    graph = artifact.graph
    nodes = {node_name(node): node for node in graph.nodes}
    for name, kernel in kernels.items():
        node = nodes.get(name)
        if kernel in INTEGER_KERNELS and node is not None and node.op_type not in INTEGER_KERNELS:
            weight = trace_back(node.input[1], graph.producer, MOVING)
            if weight in graph.constants:
                cause = "a float layer of the file that ONNX Runtime computes in integers"
                return Difference.of(name, "kernel", cause, node.op_type, kernel)
    return None
