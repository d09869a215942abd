"""Models in ONNX Runtime: sessions, the optimized graph, the kernel of each layer, and inner tensors.

ONNX Runtime replaces quantizers around an operator by an integer kernel where all its conditions hold, and otherwise
computes in float without a word. Which kernel a layer got is read back from the graph that it made; the weights tell
which layer an operator of that graph is.

Inner tensors become outputs of the model for as long as a session is made: ``record`` yields them batch by batch, a
``Probe`` hands them to readers, in groups that fit into memory.
"""

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from os import fspath
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnxruntime as ort
from google.protobuf.message import EncodeError
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper, shape_inference
from onnxruntime.capi import onnxruntime_pybind11_state as state

from detent.errors import UnsupportedError
from detent.onnx_model.files import LoadedModel, ModelSource, copy_without
from detent.onnx_model.graph import Graph, array_of, reads
from detent.onnx_model.provenance import Provenance

__all__ = [
    "SPINNING",
    "WEIGHT_ONLY",
    "Probe",
    "Reading",
    "kernels_of",
    "make_session",
    "optimized",
    "ort_errors",
    "record",
    "tensor_nbytes",
    "without_weights",
]

Array = NDArray[Any]
Feed = dict[str, Array]

PROBE_BUDGET = 1 << 29  # bytes of inner tensors in one run
FLOAT_NBYTES = 4
MAX_SHAPE_ELEMENTS = 256  # constants with more are no shapes
_NO_ARRAYS = frozenset(  # types that ONNX Runtime does not hand over as arrays
    {TensorProto.INT4, TensorProto.UINT4, TensorProto.FLOAT8E4M3FN, TensorProto.FLOAT8E5M2}
)
MIN_SHARED_NBYTES = 1024  # of an initializer that a session reads from the memory of an array
_SHARED_DTYPES = {
    helper.np_dtype_to_tensor_dtype(np.dtype(kind)): np.dtype(kind) for kind in ("f4", "f8", "i1", "u1", "i4")
}
_BYTES = (TensorProto.INT8, TensorProto.UINT8)
_CODE_OPERATORS = ("QuantizeLinear", "QLinear")
SPINNING = "session.intra_op.allow_spinning"
SEVERE = 4  # errors are raised; what is logged beside them only repeats it
_ERRORS: tuple[type[Exception], ...] = (  # of ONNX Runtime, which have no parent of their own
    RuntimeError,
    *(kind for kind in vars(state).values() if isinstance(kind, type) and issubclass(kind, Exception)),
)


def make_session(
    model: ModelSource,
    *,
    optimize: bool = True,
    threads: int = 0,
    config: Mapping[str, str] | None = None,
    write_to: str | None = None,
) -> ort.InferenceSession:
    """A session on the CPU.

    Args:
        model: in memory or in a file.
        optimize: False runs the graph as it is written, node by node.
        threads: 0 for as many as there are processors.
        config: settings of ONNX Runtime by their keys. Threads do not spin by default, since that takes as much CPU
            time again as the model itself; where time is measured, ``{SPINNING: "1"}`` is what users have.
        write_to: where the optimized graph is written.

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
    options.graph_optimization_level = level.ORT_ENABLE_ALL if optimize else level.ORT_DISABLE_ALL
    for key, value in {SPINNING: "0", **(config or {})}.items():
        options.add_session_config_entry(key, value)
    if write_to is not None:
        options.graph_optimization_level = level.ORT_ENABLE_ALL
        options.optimized_model_filepath = write_to
    if isinstance(model, LoadedModel):
        model = model.proto  # its file may have been replaced since
    try:
        if not isinstance(model, ModelProto):
            return _start(fspath(model), options)
        lean, weights = without_weights(model)
        options.add_external_initializers(list(weights), list(map(ort.OrtValue.ortvalue_from_numpy, weights.values())))
        session = _start(lean.SerializeToString(), options)
        session.weights = weights  # ONNX Runtime reads the arrays where they are: they must live as long as the session
    except (ValueError, EncodeError) as error:
        raise UnsupportedError(f"ONNX Runtime does not take the model: {error}") from error
    return session


def without_weights(model: ModelProto) -> tuple[ModelProto, dict[str, Array]]:
    """A copy of a model without the data of its large initializers, and these as arrays.

    Large initializers that no node reads are left out: ONNX Runtime drops them, and then misses them.
    """
    lean, weights = copy_without(model, "graph"), dict[str, Array]()
    lean.graph.CopyFrom(copy_without(model.graph, "initializer"))
    kept = {value.name for value in (*model.graph.input, *model.graph.output)}
    read = kept.union(*map(reads, model.graph.node))
    for tensor in model.graph.initializer:
        dtype = _SHARED_DTYPES.get(tensor.data_type)
        if dtype is None or not tensor.HasField("raw_data") or prod(tensor.dims) * dtype.itemsize < MIN_SHARED_NBYTES:
            lean.graph.initializer.append(tensor)
            continue
        if tensor.name not in read:
            continue
        weights[tensor.name] = np.frombuffer(tensor.raw_data, dtype).reshape(tensor.dims)
        empty = lean.graph.initializer.add(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
        empty.data_location = TensorProto.EXTERNAL
        empty.external_data.add(key="location", value="memory")
    return lean, weights


def _start(source: str | bytes, options: ort.SessionOptions) -> ort.InferenceSession:
    with ort_errors():
        return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])


@contextmanager
def ort_errors() -> Iterator[None]:
    """Errors of ONNX Runtime become errors of detent.

    >>> with ort_errors():
    ...     ort.InferenceSession(b"no model")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    detent.errors.UnsupportedError: ONNX Runtime does not run the model: ...
    """
    try:
        yield
    except _ERRORS as error:
        raise UnsupportedError(f"ONNX Runtime does not run the model: {error}") from error


def optimized(model: ModelSource, config: Mapping[str, str] | None = None) -> ModelProto:
    """The graph that ONNX Runtime makes of a model on this machine, as it runs it.

    >>> from onnx import parser
    >>> made = parser.parse_model('''<ir_version: 8, opset_import: ["" : 17]>
    ...     g (float[1] x) => (float[1] y) { t = Identity(x) y = Abs(t) }''')
    >>> [node.op_type for node in optimized(made).graph.node]
    ['Abs']
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "optimized.onnx")
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
    written, graph = Graph(model), Graph(optimized(model, config))
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


# Inner tensors


class Reading(NamedTuple):
    """Tensors that are looked at together.

    Attributes:
        names: the tensors; inputs and constants may be among them.
        take: what looks at them, given the arrays by name.
    """

    names: tuple[str, ...]
    take: Callable[[Mapping[str, Array]], None]


class Probe:
    """A model that runs as it is written, and whose inner tensors are looked at, in groups that fit into memory.

    Readings share a run as long as their tensors fit the budget; for each further group the model runs once more.

    Args:
        model: it is left as it is.
        readings: what to look at, in this order.
        kinds: the element types of tensors, as far as they are known; ONNX Runtime hands codes of 4 bits and float8
            over only as float32.
        budget: bytes of tensors in one run.
        written: a probe of the model before ONNX Runtime optimized it, that runs first; tensors of both are as large.

    >>> from onnx import parser
    >>> made = parser.parse_model('''<ir_version: 8, opset_import: ["" : 17]>
    ...     g (float[1] x) => (float[1] y) { t = Relu(x) y = Neg(t) }''')
    >>> probe = Probe(made, [Reading(("x", "t"), lambda arrays: print(arrays["t"]))])
    >>> probe.run({"x": np.float32([3])})
    [3.]
    >>> [value.name for value in made.graph.output]
    ['y']
    """

    def __init__(
        self,
        model: ModelProto,
        readings: Iterable[Reading],
        *,
        kinds: Mapping[str, int] | None = None,
        budget: int = PROBE_BUDGET,
        written: "Probe | None" = None,
    ) -> None:
        self._model, self._readings, self._budget, self._written = model, list(readings), budget, written
        made = {name: node.op_type for node in model.graph.node for name in node.output}
        constants = {tensor.name: tensor for tensor in model.graph.initializer}
        names = {name for reading in self._readings for name in reading.names}
        self._constants = {name: array_of(constants[name]) for name in names if name in constants}
        self._made = names & made.keys()
        self._cast = {name for name in self._made if (kinds or {}).get(name, 0) in _NO_ARRAYS}
        self._widths = {name: _code_nbytes((kinds or {}).get(name), made[name]) for name in self._made}
        self._largest = 0  # elements of the largest tensor, if most shapes follow from the batch's
        self._groups: list[tuple[ort.InferenceSession, list[str], list[Reading]]] | None = None

    def run(self, feeds: Mapping[str, Array]) -> None:
        """Run the model on a batch, and show the readings what they look at."""
        if self._groups is None:
            self._groups = [self._prepare(group) for group in self._grouped(feeds)]
        for session, names, readings in self._groups:
            values = session.run([self._output(name) for name in names], dict(feeds))
            arrays = {**self._constants, **feeds, **dict(zip(names, values, strict=True))}
            del values
            for reading in readings:
                reading.take(arrays)

    def _output(self, name: str) -> str:
        return f"{name}__as_float" if name in self._cast else name

    def _prepare(self, readings: list[Reading]) -> tuple[ort.InferenceSession, list[str], list[Reading]]:
        names = list(dict.fromkeys(name for reading in readings for name in reading.names if name in self._made))
        with _more_outputs(self._model, [self._output(name) for name in names], self._cast_nodes(names)):
            return make_session(self._model, optimize=False), names, readings

    def _cast_nodes(self, names: Iterable[str]) -> list[NodeProto]:
        chosen = [name for name in names if name in self._cast]
        return [helper.make_node("Cast", [name], [self._output(name)], to=TensorProto.FLOAT) for name in chosen]

    def _grouped(self, feeds: Mapping[str, Array]) -> list[list[Reading]]:
        sizes = self._sizes(feeds)
        if sum(sizes.values()) <= self._budget:
            return [self._readings]
        groups: list[list[Reading]] = []
        held: set[str] = set()
        for reading in self._readings:
            added = held | (set(reading.names) & self._made)
            if not groups or sum(sizes[name] for name in added) > self._budget:
                groups.append([])
                added = set(reading.names) & self._made
            groups[-1].append(reading)
            held = added
        return groups

    def _sizes(self, feeds: Mapping[str, Array]) -> dict[str, int]:
        """The bytes of each tensor: what follows from the batch's shapes, else a bound, else what the model says."""
        shapes = {} if self._written is not None else _inferred_shapes(self._model, feeds, ())
        counts = {name: prod(shapes[name]) for name in self._made if name in shapes}
        if 2 * len(counts) >= len(self._made):
            self._largest = max(map(prod, shapes.values()), default=0)
        largest = self._largest if self._written is None else self._written._largest
        nbytes = {name: counts.get(name, largest) * width for name, width in self._widths.items()}
        if len(counts) == len(self._made) or (largest and sum(nbytes.values()) <= self._budget):
            return nbytes
        names = sorted(self._made)
        outputs = [self._output(name) for name in names]
        asked = tensor_nbytes(self._model, outputs, feeds, nodes=self._cast_nodes(names), optimize=False)
        return dict(zip(names, asked.values(), strict=True))


def _code_nbytes(kind: int | None, operator: str) -> int:
    """Bytes of an element as ONNX Runtime hands it over, at most."""
    if kind is None:
        return 2 if operator.startswith(_CODE_OPERATORS) else FLOAT_NBYTES
    return 1 if kind in _BYTES else FLOAT_NBYTES


def tensor_nbytes(
    model: ModelProto,
    names: Sequence[str],
    feeds: Mapping[str, Array],
    *,
    nodes: Sequence[NodeProto] = (),
    optimize: bool = True,
) -> dict[str, int]:
    """The bytes of tensors for a batch, as float32.

    Shapes are inferred from those of the batch; where they depend on data, the model itself is asked, by Shape nodes.

    Args:
        model: in memory.
        names: inner tensors, or results of ``nodes``.
        feeds: the batch.
        nodes: nodes to add to the model.
        optimize: whether ONNX Runtime optimizes the model, if it has to run.

    >>> from onnx import parser
    >>> made = parser.parse_model('''<ir_version: 8, opset_import: ["" : 17]>
    ...     g (float[N] x) => (int64[1, M] y) { t = Abs(x) y = NonZero(t) }''')
    >>> tensor_nbytes(made, ["t", "y"], {"x": np.float32([1, 0, 2])})
    {'t': 12, 'y': 8}
    """
    shapes = _inferred_shapes(model, feeds, nodes) if names else {}
    if not all(name in shapes for name in names):
        asking = [helper.make_node("Shape", [name], [f"{name}__shape"]) for name in names]
        outputs = [node.output[0] for node in asking]
        with _more_outputs(model, outputs, [*nodes, *asking]):
            session = make_session(model, optimize=optimize)
        with ort_errors():
            results = session.run(outputs, dict(feeds))
        shapes = {name: tuple(np.asarray(shape).tolist()) for name, shape in zip(names, results, strict=True)}
    return {name: FLOAT_NBYTES * prod(shapes[name]) for name in names}


def _inferred_shapes(
    model: ModelProto, feeds: Mapping[str, Array], nodes: Sequence[NodeProto]
) -> dict[str, tuple[int, ...]]:
    """Shapes that follow from those of a batch and from small constants; large constants are not copied."""
    lean = ModelProto(ir_version=model.ir_version, opset_import=model.opset_import, functions=model.functions)
    lean.graph.node.extend([*model.graph.node, *nodes])
    lean.graph.output.extend(model.graph.output)
    for name, array in feeds.items():
        kind = helper.np_dtype_to_tensor_dtype(array.dtype)
        lean.graph.input.append(helper.make_tensor_value_info(name, kind, array.shape))
    for tensor in model.graph.initializer:
        if prod(tensor.dims) <= MAX_SHAPE_ELEMENTS:  # it may hold a shape
            lean.graph.initializer.append(tensor)
        else:
            lean.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
    try:
        inferred = shape_inference.infer_shapes(lean, data_prop=True).graph
    except (RuntimeError, ValueError):  # operators that onnx does not know
        return {}
    shapes = {}
    for value in (*inferred.value_info, *inferred.output):
        sizes = value.type.tensor_type.shape.dim
        if value.type.tensor_type.HasField("shape") and all(size.HasField("dim_value") for size in sizes):
            shapes[value.name] = tuple(size.dim_value for size in sizes)
    return shapes


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
        with ort_errors():
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
