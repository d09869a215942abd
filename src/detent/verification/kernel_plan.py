"""Level 3: checks which layers ONNX Runtime runs on integer kernels.

A layer that the file keeps in float must not run on an integer kernel. ONNX Runtime may quantize such a layer if it is
between a DequantizeLinear and a QuantizeLinear node (see ``onnx_model.ort_workarounds``).

A layer that ran on an integer kernel when the file was written should still run on an integer kernel. With a different
version of ONNX Runtime it may run in float. It is then slower, and the last bits of its results differ.
"""

from onnx import ModelProto

from detent.onnx_model.graph import INTEGER_KERNELS, MOVING, node_name, trace_back
from detent.onnx_model.provenance import RuntimeRecord
from detent.onnx_model.qdq_reader import QuantizedGraph
from detent.onnx_model.sessions import integer_kernels, runtime_record
from detent.tables import counted
from detent.verification.verify_report import Difference

__all__ = ["check_kernels"]


def check_kernels(artifact: QuantizedGraph, running: ModelProto) -> tuple[Difference | None, list[str]]:
    """Check which layers run on integer kernels in the optimized graph ``running``.

    Returns:
        The first mismatch or None, and a list of notes. A mismatch is a layer that the file keeps in float and that
        runs on an integer kernel, or a layer whose integer kernel is missing.
    """
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
        count = counted(len(missing), "layer")
        cause = f"this layer ran on an integer kernel when the file was written, but does not now ({count} in all)"
        return Difference.of(name, "kernel", cause, kernel), []
    note = (
        f"{counted(len(missing), 'layer')} ran on integer kernels in ONNX Runtime {record.onnxruntime} "
        f"({record.machine}), but not in the installed ONNX Runtime {installed.onnxruntime} ({installed.machine}); "
        f"first: {name!r} ({kernel})"
    )
    return None, [note]


def _unrequested_kernel(artifact: QuantizedGraph, kernels: dict[str, str]) -> Difference | None:
    """Return the first layer that runs on an integer kernel although its weight is float in the file."""
    graph = artifact.graph
    nodes = {node_name(node): node for node in graph.nodes}
    for name, kernel in kernels.items():
        node = nodes.get(name)
        if kernel in INTEGER_KERNELS and node is not None and node.op_type not in INTEGER_KERNELS:
            weight = trace_back(node.input[1], graph.producer, MOVING)
            if weight in graph.constants:
                cause = "the file keeps this layer in float, but ONNX Runtime runs it on an integer kernel"
                return Difference.of(name, "kernel", cause, node.op_type, kernel)
    return None
