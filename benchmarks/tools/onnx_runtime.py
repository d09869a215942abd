"""ONNX Runtime: a session with one QuantizeLinear or DequantizeLinear node and preallocated input and output.

The threads of the session must not spin between runs, because they would slow down the tool that is timed next.
"""

from collections.abc import Iterator

import numpy as np
import onnx
import onnxruntime as ort
from case import Case, SkippedError, Tool
from onnx import TensorProto, helper

from tools.ours import THREADS

NODES = {"quantize int8": "QuantizeLinear", "dequantize": "DequantizeLinear"}


def tools_for(case: Case) -> Iterator[Tool]:
    """Yield ONNX Runtime for a case."""
    if case.operation not in NODES or case.dtype != "float32":
        raise SkippedError("onnxruntime: float32 to and from int8 only")
    reads = NODES[case.operation] == "DequantizeLinear"
    source, target = (case.codes, case.x) if reads else (case.x, case.codes)
    out = np.empty_like(target)
    session = _session(case)
    binding = session.io_binding()
    binding.bind_ortvalue_input("x", ort.OrtValue.ortvalue_from_numpy(source))
    binding.bind_output("y", "cpu", 0, out.dtype.type, case.shape, out.ctypes.data)
    yield Tool("onnxruntime", lambda: session.run_with_iobinding(binding), lambda: [out])


def _session(case: Case) -> ort.InferenceSession:
    """Create a session for a model with one node, whose scale and zero point are constants."""
    params = case.params()
    attributes = {} if case.granularity == "tensor" else {"axis": int(case.granularity == "axis1" or bool(case.group))}
    attributes |= {"block_size": case.group} if case.group else {}
    types = [TensorProto.FLOAT, TensorProto.INT8]
    types = types if NODES[case.operation] == "QuantizeLinear" else types[::-1]
    constants = [
        onnx.numpy_helper.from_array(params.scale, "s"),
        onnx.numpy_helper.from_array(params.zero_point.astype(np.int8), "z"),
    ]
    graph = helper.make_graph(
        [helper.make_node(NODES[case.operation], ["x", "s", "z"], ["y"], **attributes)],
        "one_node",
        [helper.make_tensor_value_info("x", types[0], case.shape)],
        [helper.make_tensor_value_info("y", types[1], case.shape)],
        constants,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    options = ort.SessionOptions()
    options.intra_op_num_threads = THREADS
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
