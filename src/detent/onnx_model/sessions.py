"""Sessions: models in ONNX Runtime, and what its optimiser makes of them.

Integers: which layers a runtime really computes in integers, read back from the graph that it made.

ONNX Runtime replaces quantizers around an operator by an integer one where all its conditions hold, and otherwise
computes in float without a word. The weights tell which layer an operator of the optimised graph is.
"""

import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from os import fspath
from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, helper
from onnxruntime.capi import onnxruntime_pybind11_state as state

from detent.errors import UnsupportedError
from detent.onnx_model.files import SAVE_LIMIT, LoadedModel, ModelSource, save
from detent.onnx_model.graph import Graph
from detent.onnx_model.provenance import Provenance

__all__ = ["WEIGHT_ONLY", "kernels_of", "make_session", "optimised", "record", "refusals"]

Array = NDArray[Any]

Feed = dict[str, Array]

SEVERE = 4  # errors are raised; what is logged beside them only repeats it
_ERRORS: tuple[type[Exception], ...] = (  # of ONNX Runtime, which have no parent of their own
    RuntimeError,
    *(kind for kind in vars(state).values() if isinstance(kind, type) and issubclass(kind, Exception)),
)


def make_session(
    model: ModelSource,
    *,
    optimise: bool = True,
    threads: int = 0,
    config: Mapping[str, str] | None = None,
    write_to: str | None = None,
) -> ort.InferenceSession:
    """A session on the CPU.

    Args:
        model: in memory or in a file.
        optimise: False runs the graph as it is written, node by node.
        threads: 0 for as many as there are processors.
        config: settings of ONNX Runtime by their keys.
        write_to: where the optimised graph is written.

    Raises:
        UnsupportedError: ONNX Runtime does not take the model; its reason is in the message.

    >>> from onnx import parser
    >>> made = parser.parse_model(
    ...     '<ir_version: 8, opset_import: ["" : 17]> g (float[1] x) => (float[1] y) { y = Abs(x) }')
    >>> make_session(made, threads=1).get_outputs()[0].name
    'y'
    """
    options = ort.SessionOptions()
    options.log_severity_level = SEVERE
    options.intra_op_num_threads = threads
    level = ort.GraphOptimizationLevel
    options.graph_optimization_level = level.ORT_ENABLE_ALL if optimise else level.ORT_DISABLE_ALL
    for key, value in (config or {}).items():
        options.add_session_config_entry(key, value)
    if write_to is not None:
        options.graph_optimization_level = level.ORT_ENABLE_ALL
        options.optimized_model_filepath = write_to
    if isinstance(model, LoadedModel):
        model = model.proto  # its file may have been replaced since
    try:
        if not isinstance(model, ModelProto):
            return _start(fspath(model), options)
        if sum(len(tensor.raw_data) for tensor in model.graph.initializer) < SAVE_LIMIT:
            return _start(model.SerializeToString(), options)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "model.onnx")
            save(model, path)
            return _start(fspath(path), options)
    except ValueError as error:
        raise UnsupportedError(f"ONNX Runtime does not take the model: {error}") from error


def _start(source: str | bytes, options: ort.SessionOptions) -> ort.InferenceSession:
    with refusals():
        return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])


@contextmanager
def refusals() -> Iterator[None]:
    """Errors of ONNX Runtime become errors of detent.

    >>> with refusals():
    ...     ort.InferenceSession(b"no model")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    detent.errors.UnsupportedError: ONNX Runtime does not run the model: ...
    """
    try:
        yield
    except _ERRORS as error:
        raise UnsupportedError(f"ONNX Runtime does not run the model: {error}") from error


def optimised(model: ModelSource, config: Mapping[str, str] | None = None) -> ModelProto:
    """The graph that ONNX Runtime makes of a model on this machine, as it runs it.

    >>> from onnx import parser
    >>> made = parser.parse_model('''<ir_version: 8, opset_import: ["" : 17]>
    ...     g (float[1] x) => (float[1] y) { t = Identity(x) y = Abs(t) }''')
    >>> [node.op_type for node in optimised(made).graph.node]
    ['Abs']
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "optimised.onnx")
        make_session(model, config=config, write_to=fspath(path))
        return onnx.load(path)  # not checked: operators of ONNX Runtime's own are among them


INTEGER = ("QLinearConv", "QLinearMatMul", "QGemm", "MatMulIntegerToFloat", "ConvInteger", "MatMulInteger")
WEIGHT_ONLY = ("MatMulNBits", "DequantizeLinear", "Gather", "GatherBlockQuantized")


def kernels_of(
    model: ModelProto, config: Mapping[str, str] | None = None, names: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The operator that computes each layer in ONNX Runtime on this machine, by the layer's name.

    Layers that run in float have the operator that reads their dequantized weight.

    Args:
        model: in memory.
        config: settings of ONNX Runtime by their keys.
        names: constants of codes and the layers they belong to; None for those that the model's metadata name.

    >>> from onnx import parser
    >>> import numpy as np, detent.onnx as qo
    >>> made = qo.plan(parser.parse_model('''<ir_version: 8, opset_import: ["" : 17]>
    ...     g (float[1,1] x) => (float[1,1] y) <float[1,1] w = {3.0}> { [fc] y = MatMul(x, w) }'''))
    >>> kernels_of(qo.insert(made, qo.calibrate(made, [np.float32([[2.0]])])))
    {'fc': 'MatMulIntegerToFloat'}
    """
    if names is None:
        about = Provenance.read(model)
        names = {} if about is None else about.weights
    written, graph = Graph(model), Graph(optimised(model, config))
    readers = {node.name: node.op_type for node in graph.nodes}
    found = {}
    for codes, layer in names.items():
        users = [node.op_type for node in graph.consumers(codes)]
        whole = [user for user in users if user in INTEGER or user in WEIGHT_ONLY[:1]]
        # Kernels may repack their weights: then the node of the layer's own name tells.
        found[layer] = whole[0] if whole else _by_name(readers, written, layer) or (users[0] if users else "float")
    return found


def _by_name(operators: Mapping[str, str], written: Graph, layer: str) -> str:
    if layer in operators:
        return operators[layer]
    outputs = next((node.op_type for node in written.nodes if node.name == layer), "")
    near = [kind for name, kind in operators.items() if name.startswith(f"{layer}_token_") and kind in INTEGER]
    return near[0] if near else outputs


def record(model: ModelProto, names: Iterable[str], feeds: Iterable[Feed], *, threads: int = 0) -> Iterator[Feed]:
    """Run a model and yield some of its tensors by name, batch after batch.

    >>> import numpy as np
    >>> from onnx import parser
    >>> made = parser.parse_model('''<ir_version: 8, opset_import: ["" : 17]>
    ...     g (float[1] x) => (float[1] y) { t = Abs(x) y = Neg(t) }''')
    >>> list(record(made, ["t"], [{"x": np.float32([-2])}]))
    [{'t': array([2.], dtype=float32)}]
    """
    wanted = list(dict.fromkeys(names))
    graph = Graph(model)
    made = [name for name in wanted if name not in graph.inputs]
    with _more_outputs(model, made):
        session = make_session(model, threads=threads)
    for feed in feeds:
        with refusals():
            results = dict(zip(made, session.run(made, feed), strict=True)) if made else {}
        found = {name: results[name] if name in results else feed[name] for name in wanted}
        del results
        yield found


@contextmanager
def _more_outputs(model: ModelProto, names: list[str], nodes: Iterable[NodeProto] = ()) -> Iterator[None]:
    """A model with some more outputs for a while; a copy of a large one would be large."""
    graph = model.graph
    outputs, before = len(graph.output), len(graph.node)
    present = {value.name for value in graph.output}
    graph.node.extend(nodes)
    graph.output.extend(helper.make_empty_tensor_value_info(name) for name in names if name not in present)
    try:
        yield
    finally:
        del graph.output[outputs:], graph.node[before:]
