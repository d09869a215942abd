"""Models in ONNX Runtime: sessions, the optimized graph, the kernel of each layer, and intermediate tensors.

ONNX Runtime fuses an operator and the Q/DQ pairs around it into an integer kernel if all conditions of the kernel hold.
Otherwise ONNX Runtime computes in float, without a warning. ``kernels_of`` reads each layer's kernel from the optimized
graph.

To read intermediate tensors, detent adds these tensors to the model's outputs when it creates a session. ``record``
yields these tensors batch by batch. A ``Probe`` passes the tensors to callbacks, in groups that fit into memory.
"""

import platform
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from math import isfinite, prod
from os import fspath
from pathlib import Path
from threading import RLock
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnxruntime as ort
from google.protobuf.message import EncodeError
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, shape_inference
from onnxruntime.capi import onnxruntime_pybind11_state as state

from detent.error_places import at
from detent.errors import DetentError, UnsupportedError
from detent.onnx_model.files import LoadedModel, ModelSource, without_initializers
from detent.onnx_model.graph import (
    CODE_OPERATORS,
    DEQUANTIZE,
    INTEGER_KERNELS,
    QUANTIZE,
    Graph,
    array_of,
    reads,
    rename_tensors,
    subgraphs,
    widened_constant,
)
from detent.onnx_model.layers import all_nodes, layers_of
from detent.onnx_model.provenance import Provenance, RuntimeRecord

__all__ = [
    "ACCURACY_LEVEL",
    "ORT_FAILED",
    "PROBE_BUDGET",
    "SPINNING",
    "Probe",
    "Reading",
    "Recorder",
    "array_outputs",
    "integer_kernels",
    "kernels_of",
    "make_session",
    "optimized",
    "ort_errors",
    "record",
    "record_in_parts",
    "runtime_record",
    "split_by_bytes",
    "tensor_bounds",
    "tensor_nbytes",
    "tensor_shapes",
    "without_weights",
    "written_name",
]

Array = NDArray[Any]
Feed = dict[str, Array]
PROBE_BUDGET = 1 << 29  # limit on the bytes of intermediate tensors in one run
FLOAT_NBYTES = 4
MAX_SHAPE_ELEMENTS = 256  # constants with more elements are not taken for shapes
_NO_ARRAYS = frozenset(  # types that ONNX Runtime does not return as arrays
    {
        *(TensorProto.INT2, TensorProto.UINT2, TensorProto.INT4, TensorProto.UINT4, TensorProto.FLOAT4E2M1),
        *(TensorProto.FLOAT8E4M3FN, TensorProto.FLOAT8E5M2, TensorProto.BFLOAT16),
    }
)
MIN_SHARED_NBYTES = 1024  # smaller initializers are copied into the session, larger ones are read from an array
_SHARED_DTYPES = {
    helper.np_dtype_to_tensor_dtype(np.dtype(kind)): np.dtype(kind) for kind in ("f4", "f8", "i1", "u1", "i4")
}
_SUFFIX = re.compile(r"(_token_\d+|_nhwc)+$")  # suffixes that ONNX Runtime adds to node names
SPINNING = "session.intra_op.allow_spinning"
ACCURACY_LEVEL = "session.qdq_matmulnbits_accuracy_level"  # for MatMulNBits; 0 and 1 keep activations in float
ORT_FAILED = "ONNX Runtime failed to"  # start of the messages of ``ort_errors``
LOG_FATAL_ONLY = 4  # errors are raised, and the log would only repeat them
_change_lock = RLock()  # for models that are changed for a moment
_ERRORS: tuple[type[Exception], ...] = (  # errors of ONNX Runtime have no common base class
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
    profile_to: str | None = None,
) -> ort.InferenceSession:
    """Create a session on the CPU.

    Args:
        model: a model in memory or in a file.
        optimize: False runs the graph as written, node by node.
        threads: number of threads; 0 for one per core.
        config: maps keys of ONNX Runtime's session settings to values. Threads do not spin by default, because spinning
            doubles the CPU time. To measure time, pass ``{SPINNING: "1"}``, the default of ONNX Runtime.
        write_to: path to write the optimized graph to.
        profile_to: start of the profile's path; ``end_profiling`` of the session writes the profile and returns
            its path.

    Raises:
        UnsupportedError: ONNX Runtime failed to load the model; the message gives the reason.

    >>> from onnx import parser
    >>> model = parser.parse_model(
    ...     '<ir_version: 8, opset_import: ["" : 17]> g (float[1] x) => (float[1] y) { y = Abs(x) }')
    >>> make_session(model, threads=1).get_outputs()[0].name
    'y'
    """
    options = ort.SessionOptions()
    options.log_severity_level = LOG_FATAL_ONLY
    options.intra_op_num_threads = threads
    level = ort.GraphOptimizationLevel
    options.graph_optimization_level = level.ORT_ENABLE_ALL if optimize else level.ORT_DISABLE_ALL
    for key, value in {SPINNING: "0", **(config or {})}.items():
        options.add_session_config_entry(key, value)
    if write_to is not None:
        options.graph_optimization_level = level.ORT_ENABLE_ALL
        options.optimized_model_filepath = write_to
    if profile_to is not None:
        options.enable_profiling = True
        options.profile_file_prefix = profile_to
    if isinstance(model, LoadedModel):
        model = model.proto  # the file may have changed after it was loaded
    try:
        if not isinstance(model, ModelProto):
            return _start(fspath(model), options)
        lean, weights = without_weights(model)
        options.add_external_initializers(list(weights), list(map(ort.OrtValue.ortvalue_from_numpy, weights.values())))
        session = _start(lean.SerializeToString(), options, _disabled_optimizers(model))
        session.weights = weights  # ONNX Runtime reads these arrays in place: keep them alive with the session
    except (ValueError, EncodeError) as error:
        raise UnsupportedError(f"{ORT_FAILED} load the model: {error}") from error
    return session


def without_weights(model: ModelProto) -> tuple[ModelProto, dict[str, Array]]:
    """Copy a model without the data of its large initializers; return the copy, and a dict from names to data.

    Large initializers that no node reads are left out of both: ONNX Runtime would remove such initializers from the
    copy, and then reject the dict.
    """
    lean, weights = without_initializers(model), dict[str, Array]()
    inputs_and_outputs = {value.name for value in (*model.graph.input, *model.graph.output)}
    read = inputs_and_outputs.union(*map(reads, model.graph.node))
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


def _start(
    source: str | bytes, options: ort.SessionOptions, disabled_optimizers: Sequence[str] = ()
) -> ort.InferenceSession:
    with ort_errors("load"):
        return ort.InferenceSession(
            source, options, providers=["CPUExecutionProvider"], disabled_optimizers=list(disabled_optimizers)
        )


def _disabled_optimizers(model: ModelProto) -> Sequence[str]:
    """Return the optimizers of ONNX Runtime to disable for a model: one that crashes on float16 transformers.

    Constants that are only cast to another type do not count: ONNX Runtime casts them before.
    """
    halves = {tensor.name for tensor in model.graph.initializer if tensor.data_type == TensorProto.FLOAT16}
    nodes = [node for node in model.graph.node if node.op_type != "Cast"]
    return ("NchwcTransformer",) if any(not halves.isdisjoint(reads(node)) for node in nodes) else ()


@contextmanager
def ort_errors(action: str = "run") -> Iterator[None]:
    """Convert errors of ONNX Runtime to UnsupportedError."""
    try:
        yield
    except DetentError:  # some DetentErrors are RuntimeErrors
        raise
    except _ERRORS as error:
        raise UnsupportedError(f"{ORT_FAILED} {action} the model: {error}") from error


def array_outputs(model: ModelProto) -> list[str]:
    """List the outputs that ONNX Runtime returns as arrays.

    These are all tensors except tensors of bfloat16, float8, and types of at most 4 bits.

    >>> from onnx import parser
    >>> array_outputs(parser.parse_model('''<ir_version: 8, opset_import: ["" : 17]>
    ...     g (float[1] x) => (float[1] y, bfloat16[1] z) { y = Abs(x) z = Cast<to = 16>(x) }'''))
    ['y']
    """
    outputs = ((value.name, value.type) for value in model.graph.output)
    return [
        name
        for name, kind in outputs
        if kind.WhichOneof("value") in {"tensor_type", None} and kind.tensor_type.elem_type not in _NO_ARRAYS
    ]


def optimized(model: ModelSource) -> ModelProto:
    """Return the optimized graph that ONNX Runtime runs on this machine.

    >>> from onnx import parser
    >>> model = parser.parse_model('''<ir_version: 8, opset_import: ["" : 17]>
    ...     g (float[1] x) => (float[1] y) { t = Identity(x) y = Abs(t) }''')
    >>> [node.op_type for node in optimized(model).graph.node]
    ['Abs']
    """
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "optimized.onnx")
        make_session(model, write_to=fspath(path))
        running = onnx.load(path)  # onnx.checker would reject ONNX Runtime's own operators
    _rename_shadowing(running.graph, frozenset())
    return running


def _rename_shadowing(graph: GraphProto, outer: Set[str]) -> None:
    """Rename tensors of subgraphs that shadow an outer name; ONNX Runtime writes such graphs, but cannot load them.

    ONNX Runtime restarts the numbering of some tensors (``reorder_token_0``) in each subgraph.
    """
    inputs_and_outputs = {value.name for value in (*graph.input, *graph.output)}
    computed = {name for node in graph.node for name in node.output if name} - inputs_and_outputs
    names, new = computed | inputs_and_outputs | {tensor.name for tensor in graph.initializer}, dict[str, str]()
    for name in sorted(computed & outer):
        count = 0
        while f"{name}_inner_{count}" in names | outer:
            count += 1
        new[name] = f"{name}_inner_{count}"
        names.add(new[name])
    rename_tensors(graph.node, new)
    for node in graph.node:
        for body in subgraphs(node):
            _rename_shadowing(body, outer | names)


def runtime_record(running: ModelProto) -> RuntimeRecord:
    """Return ONNX Runtime's version, this machine, and the integer kernels of the optimized graph ``running``."""
    return RuntimeRecord(ort.__version__, platform.machine(), integer_kernels(running))


def integer_kernels(running: ModelProto) -> dict[str, str]:
    """Map the name of each node in the file to its integer kernel in the optimized graph ``running``."""
    nodes = (node for node in running.graph.node if node.op_type.startswith(CODE_OPERATORS) and node.name)
    return {written_name(node.name): node.op_type for node in nodes}


def written_name(name: str) -> str:
    """Return the name that a node of an optimized graph has in the file."""
    return _SUFFIX.sub("", name)


def kernels_of(
    model: ModelProto, names: Mapping[str, str] | None = None, *, running: ModelProto | None = None
) -> dict[str, str]:
    """Map each layer to the operator that computes it in ONNX Runtime on this machine.

    A layer that runs in float is mapped to the operator that reads its dequantized weight. A matmul of two activations
    is included if it runs on an integer kernel. ``names`` maps each constant with codes to one layer that reads the
    codes; None reads this mapping from the model's metadata. The result also contains other layers that share the
    codes. ``running`` is the optimized graph of the model; None computes it.
    """
    if names is None:
        provenance = Provenance.read(model)
        names = {} if provenance is None else provenance.weights
    graph, source = Graph(optimized(model) if running is None else running), Graph(model)
    written = {layer.name: layer.node.op_type for layer in layers_of(source)}
    written |= {node.name: node.op_type for node in reversed(model.graph.node)}
    present = {node.name: node.op_type for node in graph.nodes}
    kernels = {}
    casts = ((widened_constant(node, source.constants), node) for node in source.nodes)
    widened = {constant: node.output[0] for constant, node in casts if constant}
    for constant, layer in names.items():
        first = widened.get(constant, constant)  # ONNX Runtime computes the Cast of 4-bit codes at load
        has_both = first != constant and len(source.consumers(constant)) > 1  # other layers read the 4-bit codes
        for codes in (first, constant) if has_both else (first,):
            readers = [each.node.op_type for each in all_nodes(graph.consumers(codes)) if codes in each.node.input]
            own = [kind for kind in readers if kind in {*INTEGER_KERNELS, "MatMulNBits"}]
            dequantized = [node.output[0] for node in source.consumers(codes) if node.op_type == DEQUANTIZE]
            sharing = [node.name for name in dequantized for node in source.consumers(name)]
            for each in dict.fromkeys((layer, *sharing) if codes == first else sharing):
                # If a kernel repacks its weight, only the node's name identifies the layer.
                by_name = present.get(each) or _split_by_tokens(present, each)
                if own and (len(sharing) <= 1 or not by_name):
                    kernels[each] = own[0]
                else:
                    kernels[each] = by_name or written.get(each) or next(iter(readers), "float")
    integer = integer_kernels(graph.model)
    matmuls = [name for name, kind in written.items() if kind == "MatMul" and name in integer and name not in kernels]
    return kernels | {name: integer[name] for name in matmuls}  # of two activations


def _split_by_tokens(operators: Mapping[str, str], layer: str) -> str:
    names = (name for name, kind in operators.items() if name.startswith(f"{layer}_token_") and kind in INTEGER_KERNELS)
    return next((operators[name] for name in names), "")


# Intermediate tensors


class Reading(NamedTuple):
    """Names of tensors (computed, inputs or constants), and a callback that receives a dict from names to arrays."""

    names: tuple[str, ...]
    take: Callable[[Mapping[str, Array]], None]


class Probe:
    """A model that runs without optimizations, and callbacks that read its intermediate tensors.

    Readings share a run as long as their tensors fit into ``budget`` bytes; the remaining readings need further runs.
    ``kinds`` maps tensor names to element types. Tensors of 4-bit and float8 types are read as float32, because ONNX
    Runtime cannot return these types. If ``model`` is an optimized graph, ``written`` is the probe of the original
    model, which must run first. The largest tensor of the original model bounds the sizes of tensors in ``model``.
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
        operators = {name: node.op_type for node in model.graph.node for name in node.output}
        constants = {tensor.name: tensor for tensor in model.graph.initializer}
        names, kinds = {name for reading in self._readings for name in reading.names}, kinds or {}
        self._constants = {name: array_of(constants[name]) for name in names if name in constants}
        self._computed = names & operators.keys()
        self._cast = {name for name in self._computed if kinds.get(name, 0) in _NO_ARRAYS}
        self._widths = {name: _element_nbytes(kinds.get(name), operators[name]) for name in self._computed}
        self._largest = 0  # number of elements of the largest tensor; 0 if few shapes could be inferred
        self._groups: list[tuple[ort.InferenceSession, list[str], list[Reading]]] | None = None

    def run(self, feeds: Mapping[str, Array]) -> None:
        """Run the model on a batch, and pass the arrays to the callback of each reading."""
        if self._groups is None:
            self._groups = [self._prepare(group) for group in self._grouped(feeds)]
        for session, names, readings in self._groups:
            with ort_errors():
                values = session.run([self._output(name) for name in names], dict(feeds))
            arrays = {**self._constants, **feeds, **dict(zip(names, values, strict=True))}
            del values
            for reading in readings:
                reading.take(arrays)

    def _output(self, name: str) -> str:
        return f"{name}__as_float" if name in self._cast else name

    def _prepare(self, readings: list[Reading]) -> tuple[ort.InferenceSession, list[str], list[Reading]]:
        names = list(dict.fromkeys(name for reading in readings for name in reading.names if name in self._computed))
        with _more_outputs(self._model, [self._output(name) for name in names], self._cast_nodes(names)):
            return make_session(self._model, optimize=False), names, readings

    def _cast_nodes(self, names: Iterable[str]) -> list[NodeProto]:
        chosen = [name for name in names if name in self._cast]
        return [helper.make_node("Cast", [name], [self._output(name)], to=TensorProto.FLOAT) for name in chosen]

    def _grouped(self, feeds: Mapping[str, Array]) -> list[list[Reading]]:
        sizes = self._sizes(feeds)
        if sum(sizes.values()) <= self._budget:
            return [self._readings] if self._readings else []
        groups: list[list[Reading]] = []
        held: set[str] = set()
        for reading in self._readings:
            added = held | (set(reading.names) & self._computed)
            if not groups or sum(sizes[name] for name in added) > self._budget:
                groups.append([])
                added = set(reading.names) & self._computed
            groups[-1].append(reading)
            held = added
        return groups

    def _sizes(self, feeds: Mapping[str, Array]) -> dict[str, int]:
        """Estimate the bytes of each tensor by shape inference, by an upper bound, or as a last resort by a run."""
        shapes = {} if self._written is not None else _inferred_shapes(self._model, feeds, ())
        counts = {name: prod(shapes[name]) for name in self._computed if name in shapes}
        if 2 * len(counts) >= len(self._computed):
            self._largest = max(map(prod, shapes.values()), default=0)
        largest = self._largest if self._written is None else self._written._largest
        nbytes = {name: counts.get(name, largest) * width for name, width in self._widths.items()}
        if len(counts) == len(self._computed) or (largest and sum(nbytes.values()) <= self._budget):
            return nbytes
        names = sorted(self._computed)
        outputs = [self._output(name) for name in names]
        measured = tensor_nbytes(self._model, outputs, feeds, nodes=self._cast_nodes(names), optimize=False)
        return dict(zip(names, measured.values(), strict=True))


def _element_nbytes(kind: int | None, operator: str) -> int:
    """Return an upper bound on the bytes of an element in the arrays that ONNX Runtime returns."""
    if kind is None:
        return 2 if operator.startswith((QUANTIZE, "QLinear")) else FLOAT_NBYTES
    return 1 if kind in {TensorProto.INT8, TensorProto.UINT8} else FLOAT_NBYTES


def tensor_nbytes(
    model: ModelProto,
    names: Sequence[str],
    feeds: Mapping[str, Array],
    *,
    nodes: Sequence[NodeProto] = (),
    optimize: bool = True,
) -> dict[str, int]:
    """Map the names of intermediate tensors to their sizes in bytes, as float32 for one batch (``tensor_shapes``)."""
    shapes = tensor_shapes(model, names, feeds, nodes=nodes, optimize=optimize)
    return {name: FLOAT_NBYTES * prod(shape) for name, shape in shapes.items()}


def tensor_shapes(
    model: ModelProto,
    names: Sequence[str],
    feeds: Mapping[str, Array],
    *,
    nodes: Sequence[NodeProto] = (),
    optimize: bool = True,
) -> dict[str, tuple[int, ...]]:
    """Map the names of intermediate tensors to their shapes for one batch.

    ``names`` may include outputs of ``nodes``, which are added to the model temporarily. Shapes are inferred from the
    shapes in the batch. If this fails, the model runs with additional Shape nodes.
    """
    shapes = _inferred_shapes(model, feeds, nodes) if names else {}
    if not all(name in shapes for name in names):
        shape_nodes = [helper.make_node("Shape", [name], [f"{name}__shape"]) for name in names]
        outputs = [node.output[0] for node in shape_nodes]
        with _more_outputs(model, outputs, [*nodes, *shape_nodes]):
            session = make_session(model, optimize=optimize)
        with ort_errors():
            results = session.run(outputs, dict(feeds))
        shapes = {name: tuple(np.asarray(shape).tolist()) for name, shape in zip(names, results, strict=True)}
    return {name: tuple(shapes[name]) for name in names}


def split_by_bytes(model: ModelProto, names: Iterable[str], feeds: Feed, budget: int | None) -> list[list[str]]:
    """Split tensor names into parts whose tensors take at most ``budget`` bytes in one batch; None makes one part.

    A tensor that is larger than the budget is a part of its own. Inputs of the model take no bytes.
    """
    names = list(dict.fromkeys(names))
    if budget is None or not names:
        return [names]
    inputs = Graph(model).inputs
    sizes = tensor_nbytes(model, [name for name in names if name not in inputs], feeds)
    parts: list[list[str]] = [[]]
    nbytes = 0
    for name in names:
        size = sizes.get(name, 0)
        if parts[-1] and nbytes + size > budget:
            parts.append([])
            nbytes = 0
        parts[-1].append(name)
        nbytes += size
    return parts


def tensor_bounds(
    model: ModelProto, names: Iterable[str], feeds: Sequence[Feed], budget: int | None = None
) -> dict[str, tuple[Array, Array]]:
    """Map tensor names to the smallest and largest finite value in each batch; a batch without finite values gives 0.

    ``budget`` limits the bytes of the tensors in memory; a small budget needs several runs of the model per batch.
    """
    bounds: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in names}
    for _, tensors in record_in_parts(model, bounds, feeds, budget):
        for name, array in tensors.items():
            with at("tensor", name):
                for side, value in zip(bounds[name], _finite_bounds(array), strict=True):
                    side.append(value)
    return {name: (np.array(lo), np.array(hi)) for name, (lo, hi) in bounds.items()}


def _finite_bounds(array: Array) -> tuple[float, float]:
    lo, hi = (float(array.min()), float(array.max())) if array.size else (0.0, 0.0)
    if not isfinite(lo) or not isfinite(hi):
        finite = array[np.isfinite(array)]
        lo, hi = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
    return lo, hi


def _inferred_shapes(
    model: ModelProto, feeds: Mapping[str, Array], nodes: Sequence[NodeProto]
) -> dict[str, tuple[int, ...]]:
    """Infer shapes from a batch and from small constants; large constants are not copied."""
    lean = ModelProto(ir_version=model.ir_version, opset_import=model.opset_import, functions=model.functions)
    lean.graph.node.extend([*model.graph.node, *nodes])
    lean.graph.output.extend(model.graph.output)
    for name, array in feeds.items():
        kind = helper.np_dtype_to_tensor_dtype(array.dtype)
        lean.graph.input.append(helper.make_tensor_value_info(name, kind, array.shape))
    for tensor in model.graph.initializer:
        if prod(tensor.dims) <= MAX_SHAPE_ELEMENTS:  # the constant may hold a shape
            lean.graph.initializer.append(tensor)
        else:
            lean.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
    try:
        inferred = shape_inference.infer_shapes(lean, data_prop=True).graph
    except (RuntimeError, ValueError):  # the model has operators that onnx does not know
        return {}
    shapes = {}
    for value in (*inferred.value_info, *inferred.output):
        sizes = value.type.tensor_type.shape.dim
        if value.type.tensor_type.HasField("shape") and all(size.HasField("dim_value") for size in sizes):
            shapes[value.name] = tuple(size.dim_value for size in sizes)
    return shapes


def record(model: ModelProto, names: Iterable[str], feeds: Iterable[Feed], *, threads: int = 0) -> Iterator[Feed]:
    """Run a model on each batch, and yield a dict from ``names`` to the arrays of these tensors."""
    return Recorder(model, names, threads=threads).run(feeds)


class Recorder:
    """A session that computes intermediate tensors of a model; it can run any number of times."""

    def __init__(self, model: ModelProto, names: Iterable[str], *, threads: int = 0) -> None:
        self._tensors = list(dict.fromkeys(names))
        inputs = Graph(model).inputs
        self._computed = [name for name in self._tensors if name not in inputs]
        with _more_outputs(model, self._computed):
            self._session = make_session(model, threads=threads)

    def run(self, feeds: Iterable[Feed]) -> Iterator[Feed]:
        """Run the model on each batch, and yield a dict with the arrays of the tensors."""
        names = self._computed
        for feed in feeds:
            with ort_errors():
                results = dict(zip(names, self._session.run(names, feed), strict=True)) if names else {}
            arrays = {name: results[name] if name in results else feed[name] for name in self._tensors}
            del results
            yield arrays


def record_in_parts(
    model: ModelProto, names: Iterable[str], feeds: Sequence[Feed], budget: int | None = None
) -> Iterator[tuple[int, Feed]]:
    """Run a model on each batch; yield the index of the batch and a dict with some of the named tensors.

    The tensors that are yielded together take at most ``budget`` bytes, unless one of them is larger. For each part of
    the tensors, the model runs on all batches. The tensors are freed when the next ones are computed.
    """
    for part in split_by_bytes(model, names, feeds[0], budget) if feeds else ():
        for number, tensors in enumerate(record(model, part, feeds)):
            yield number, tensors
            tensors.clear()


@contextmanager
def _more_outputs(model: ModelProto, names: list[str], nodes: Iterable[NodeProto] = ()) -> Iterator[None]:
    """Add nodes and outputs to a model temporarily, to avoid a copy of a large model; one thread at a time."""
    graph = model.graph
    with _change_lock:
        outputs, before = len(graph.output), len(graph.node)
        present = {value.name for value in graph.output}
        graph.node.extend(nodes)
        graph.output.extend(helper.make_empty_tensor_value_info(name) for name in names if name not in present)
        try:
            yield
        finally:
            del graph.output[outputs:], graph.node[before:]
