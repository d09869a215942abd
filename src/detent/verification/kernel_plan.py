"""Level 3: checks that ONNX Runtime uses integer kernels where the file asks for them, and nowhere else.

ONNX Runtime may quantize a float layer between a DequantizeLinear and a QuantizeLinear node, although the file keeps it
in float (see ``onnx_model.ort_workarounds``). A different version of ONNX Runtime may also miss an integer kernel that
was used when the file was written: the layer then runs in float, slower and with different last bits.
"""

from onnx import ModelProto

from detent.onnx_model.graph import INTEGER_KERNELS, MOVING, node_name, trace_back
from detent.onnx_model.provenance import RuntimeRecord
from detent.onnx_model.qdq_reader import QuantizedGraph
from detent.onnx_model.sessions import integer_kernels, runtime_record
from detent.verification.verify_report import Difference

__all__ = ["check_kernels"]


def check_kernels(artifact: QuantizedGraph, running: ModelProto) -> tuple[Difference | None, list[str]]:
    """Return the first integer kernel that the file does not ask for, or that is missing, and notes."""
    kernels = integer_kernels(running)
    unrequested = _unrequested_kernel(artifact, kernels)
    if unrequested is not None:
        return unrequested, []
    record = RuntimeRecord.read(artifact.model)
    if record is None:
        return None, []
    missing = [(name, kernel) for name, kernel in record.kernels.items() if name not in kernels]
    installed = runtime_record(running)
    if not missing:
        return None, []
    name, kernel = missing[0]
    if (record.onnxruntime, record.machine) == (installed.onnxruntime, installed.machine):
        cause = f"integer kernel missing that was used when the file was written ({len(missing)} in all)"
        return Difference.of(name, "kernel", cause, kernel), []
    note = (
        f"{len(missing)} layers ran on integer kernels in ONNX Runtime {record.onnxruntime} ({record.machine}) and run "
        f"in float in {installed.onnxruntime} ({installed.machine}), first {name!r} ({kernel})"
    )
    return None, [note]


def _unrequested_kernel(artifact: QuantizedGraph, kernels: dict[str, str]) -> Difference | None:
    """Return the first layer with a float weight in the file that runs on an integer kernel."""
    graph = artifact.graph
    nodes = {node_name(node): node for node in graph.nodes}
    for name, kernel in kernels.items():
        node = nodes.get(name)
        if kernel in INTEGER_KERNELS and node is not None and node.op_type not in INTEGER_KERNELS:
            weight = trace_back(node.input[1], graph.producer, MOVING)
            if weight in graph.constants:
                cause = "the file keeps this layer in float, ONNX Runtime runs it on an integer kernel"
                return Difference.of(name, "kernel", cause, node.op_type, kernel)
    return None
