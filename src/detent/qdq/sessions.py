"""Sessions: models in ONNX Runtime, and what its optimiser makes of them."""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from os import PathLike, fspath
from pathlib import Path

import onnx
import onnxruntime as ort
from onnx import ModelProto
from onnxruntime.capi import onnxruntime_pybind11_state as state

from detent.errors import UnsupportedError
from detent.qdq.files import SAVE_LIMIT, save

__all__ = ["make_session", "optimised", "refusals"]

SEVERE = 4  # errors are raised; what is logged beside them only repeats it
_ERRORS: tuple[type[Exception], ...] = (  # of ONNX Runtime, which have no parent of their own
    RuntimeError,
    *(kind for kind in vars(state).values() if isinstance(kind, type) and issubclass(kind, Exception)),
)


def make_session(
    model: ModelProto | str | PathLike[str],
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


def optimised(model: ModelProto | str | PathLike[str], config: Mapping[str, str] | None = None) -> ModelProto:
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
