"""ONNX export: write a trained model as an ONNX file with the codes and scales it was trained with.

::

    copy, run once      ->  mark                 ->  torch.onnx.export  ->  lower               ->  check, save
    in evaluation mode      quantizers to marks      ONNX operators         marks to Q/DQ nodes     atomically
"""

import inspect
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib import import_module
from importlib.util import find_spec
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from detent.checks import as_integer
from detent.errors import DetentError, DtypeError, FileFormatError, SpecError, UnsupportedError, install_hint
from detent.silence import silenced
from detent.storage import check_directory
from detent.torch.arrays import Arguments, arguments_of
from detent.torch.export_marks import Marked, copy_for_export, mark
from detent.torch.layers import float_class_of
from detent.torch.preparation import plan_of

if TYPE_CHECKING:
    from onnx import ModelProto

__all__ = [
    "FIRST_OPSET",
    "LAST_OPSET",
    "export_onnx",
    "exported_model",
    "exporter_error",
    "quiet_exporter",
    "require_packages",
    "run_exporter",
]

_log = logging.getLogger(__name__)

Ranges = dict[str, tuple[Any, Any]]
Example = Tensor | Sequence[Tensor] | Mapping[str, Tensor]
REQUIRED_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
FIRST_OPSET, LAST_OPSET = 18, 23  # torch writes opset 18 and later without conversion; detent supports up to 23
TORCH_MIN_SIZE = 2  # the lower bound that torch sets for every symbolic size
UNLIMITED = 1 << 31  # torch uses an upper bound of at least this value for a size without limit
_RECURRENT = (nn.LSTM, nn.GRU, nn.RNN)
_LOOP_OPERATORS = ("lstm", "gru")  # recurrent operators for which torch can trace a loop of any length
_LOOP_MODULE = "torch.export._patches"  # missing in older versions of torch


def export_onnx(
    model: nn.Module,
    example: Example,
    path: str | PathLike[str],
    *,
    target: str = "onnxruntime",
    dynamic_shapes: Any | None = None,
    opset: int = 21,
    container: Literal["int8"] | None = None,
) -> Path:
    """Write a prepared model as an ONNX file with Q/DQ nodes and the trained codes and scales.

    The model is not changed. ``dt.verify`` compares the model with the file.

    Args:
        model: a prepared model, calibrated or trained.
        example: model inputs: a tensor, a tuple of tensors, or a dict from argument names of forward to tensors.
        path: output path.
        target: runtime that will run the file; see ``detent.onnx_model.targets``.
        dynamic_shapes: passed to ``torch.onnx.export``; None lets the size of axis 0 of every input vary.
        opset: ONNX opset, 18 to 23; 4-bit codes, 16-bit codes and per-group scales need 21 or later.
        container: "int8" stores weights of fewer than 8 bits in int8, for ONNX Runtime before 1.23 and for opsets below
            21; the file is larger, with the same outputs. None stores weights in the smallest type.

    Returns:
        The output path.

    Raises:
        NotCalibratedError: a quantizer has no parameters yet; the message names it.
        StateError: the model is not prepared, is being calibrated, or is delayed by a ``qt.Schedule``.
        UnsupportedError: a package is missing, or ONNX or torch's exporter does not support a part of the model.
        SpecError, DtypeError, FileFormatError: an argument has a wrong value or type.

    >>> import tempfile
    >>> import detent.torch as qt
    >>> from detent.onnx_model import load
    >>> model = qt.prepare(nn.Sequential(nn.Linear(4, 2)), "w8a16")
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     path = export_onnx(model, torch.ones(1, 4), Path(directory, "model.onnx"))
    ...     [node.op_type for node in load(path).graph.node]
    ['DequantizeLinear', 'Gemm']
    """
    require_packages("export_onnx")
    from detent import onnx_model  # noqa: PLC0415 - imports onnx, which only an export needs
    from detent.onnx_model import sessions  # noqa: PLC0415

    runtime_target = onnx_model.get_target(target)
    output_path = _checked_path(path)
    exported = exported_model(
        model, example, target=target, dynamic_shapes=dynamic_shapes, opset=opset, container=container
    )
    checked = onnx_model.load(exported)
    # raise an error before writing a file that the runtime cannot load
    if runtime_target.runtime == "onnxruntime":
        sessions.runtime_record(onnx_model.optimized(checked)).write(checked)
    else:
        onnx_model.make_session(checked, optimize=False)
    onnx_model.save(checked, output_path)
    _log.info("exported to %s, opset %d, for %s", output_path, opset, target)
    return output_path


def exported_model(
    model: nn.Module,
    example: Example,
    *,
    target: str = "onnxruntime",
    dynamic_shapes: Any | None = None,
    opset: int = 21,
    container: Literal["int8"] | None = None,
) -> "ModelProto":
    """Build the model that ``export_onnx`` writes, including its ``ExportRecord``; the bytes are reproducible."""
    from detent import onnx_model  # noqa: PLC0415 - imports onnx, which only an export needs
    from detent.torch import export_graph  # noqa: PLC0415
    from detent.torch.export_record import ExportRecord  # noqa: PLC0415

    runtime_target = onnx_model.get_target(target)
    opset = as_integer("opset", opset, at_least=FIRST_OPSET, at_most=LAST_OPSET)
    if container not in {None, "int8"}:
        raise SpecError(f"got container={container!r}, expected 'int8', or None for the smallest type")
    args, kwargs = _arguments(example)
    evaluated, outputs = _run_once(model, args, kwargs)
    marked = mark(evaluated)
    proto = export_graph.clean(_exported(marked, (args, kwargs), dynamic_shapes, opset, outputs))
    lowering = export_graph.Lowering(proto, marked, runtime_target, min_bits=4 if container is None else 8)
    version: str = import_module("detent").__version__  # by name: import rules forbid a normal import here
    lowered = export_graph.finalize(lowering.run(), version)
    onnx_model.Provenance(
        weights=lowering.weights,
        activations=lowering.activations,
        target=runtime_target.name,
        recipe=plan_of(model).recipe.to_json(),
        made_by=version,
        export=ExportRecord.of(kwargs or args, opset, container, dynamic_shapes).to_dict(),
    ).write(lowered)
    return lowered


def require_packages(function: str) -> None:
    """Raise UnsupportedError if a package that a function needs is missing or too old."""
    for name in REQUIRED_PACKAGES:
        try:
            import_module(name)
        except ImportError as error:
            raise UnsupportedError(f"{function} needs {name}, which is not installed: {install_hint(name)}") from error
    if not hasattr(torch.onnx, "ops"):
        raise UnsupportedError(f"got torch {torch.__version__}, but {function} needs 2.8 or later: upgrade torch")


def _checked_path(path: str | PathLike[str]) -> Path:
    output_path = Path(path)
    if output_path.is_dir():
        raise FileFormatError(f"{fspath(output_path)} is a directory, expected the path of a file: add a file name")
    check_directory(output_path.parent, writable=False)
    return output_path


def _arguments(example: object) -> Arguments:
    args, kwargs = arguments_of(example, "example")
    if not (args or kwargs):
        raise DtypeError(
            f"example is an empty {type(example).__name__}, expected the model's arguments: pass at least one tensor"
        )
    for name, value in (*enumerate(args), *kwargs.items()):
        if not isinstance(value, Tensor):
            raise DtypeError(f"got {type(value).__name__} for example[{name!r}], expected a torch.Tensor")
    return Arguments(
        tuple(each.detach().cpu() for each in args), {name: each.detach().cpu() for name, each in kwargs.items()}
    )


def _run_once(model: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> tuple[nn.Module, list[str]]:
    """Run a copy of the model on the example, so that the model's errors appear before the exporter's errors.

    Returns the copy and the output names.
    """
    evaluated = copy_for_export(model)
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            result = evaluated(*args, **kwargs)
    except DetentError:
        raise
    except Exception as error:
        raise UnsupportedError(f"the model fails on the example: {error}") from error
    return evaluated, _output_names(result, {*kwargs})


def _output_names(result: object, taken: set[str]) -> list[str]:
    """Return output names from dict keys or positions; none if an output is not a tensor or a name is in use."""
    leaves = pytree.tree_leaves(result)
    if not all(isinstance(leaf, Tensor) for leaf in leaves):
        return []
    if isinstance(result, Mapping) and len(leaves) == len(result) and all(isinstance(key, str) for key in result):
        names = [str(key) for key in result]
    else:
        names = ["output"] if len(leaves) == 1 else [f"output_{i}" for i in range(len(leaves))]
    return [] if taken & {*names} else names


def _exported(
    marked: Marked,
    example: tuple[tuple[Tensor, ...], dict[str, Tensor]],
    dynamic_shapes: Any | None,
    opset: int,
    outputs: list[str],
) -> "ModelProto":
    """Export the marked model; if ``dynamic_shapes`` is None, let axis 0 vary, unless the exporter rejects this."""
    args, kwargs = example
    shapes = _free_axes(marked.model, args, kwargs) if dynamic_shapes is None else dynamic_shapes
    try:
        model, ranges = run_exporter(marked.model, example, opset, shapes, outputs)
    except Exception as error:
        if dynamic_shapes is not None:
            raise exporter_error(marked.model, error) from error
        try:
            model, ranges = run_exporter(marked.model, example, opset, None, outputs)
        except Exception:  # noqa: BLE001 - models may raise anything; raise the first error instead
            raise exporter_error(marked.model, error) from error
    if dynamic_shapes is None:
        _warn_of_limits(model, ranges)
    return model


def _free_axes(model: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> Any:
    """Return the dynamic shapes in which axis 0 of every argument varies, structured like the arguments of forward."""
    bound = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    arguments = dict(bound) if kwargs else tuple(bound.values())
    return pytree.tree_map(lambda x: {0: torch.export.Dim.AUTO} if x.ndim else None, arguments)


def run_exporter(
    model: nn.Module, example: tuple[tuple[Tensor, ...], dict[str, Tensor]], opset: int, shapes: Any, outputs: list[str]
) -> "tuple[ModelProto, Ranges]":
    """Run torch's exporter without its warnings; return the graph and the ranges of its symbolic sizes."""
    args, kwargs = example
    with quiet_exporter(), _recurrent_loops(shapes), torch.random.fork_rng(devices=[]), torch.no_grad():
        program = torch.onnx.export(
            model,
            args,
            kwargs=kwargs,
            dynamo=True,
            opset_version=opset,
            dynamic_shapes=shapes,
            output_names=outputs or None,
            verbose=False,
        )
    if program is None or program.exported_program is None:
        raise UnsupportedError("torch.onnx.export returned no program: upgrade torch and onnxscript")
    return program.model_proto, _ranges(program.exported_program)


def _ranges(program: torch.export.ExportedProgram) -> Ranges:
    """Return the ranges of the symbolic sizes, after all steps of the exporter.

    ``range_constraints`` has the ranges of the first step. If a later step fixes a size, only the shape environment
    records the new range.
    """
    sizes = dict(program.range_constraints)
    modes = (getattr(node.meta.get("val"), "fake_mode", None) for node in program.graph.nodes)
    environment = next((mode.shape_env for mode in modes if mode is not None and mode.shape_env is not None), None)
    final = {} if environment is None else environment.var_to_range
    ranges = {symbol: each & final[symbol] if symbol in final else each for symbol, each in sizes.items()}
    return {str(symbol): (each.lower, each.upper) for symbol, each in ranges.items()}


def _warn_of_limits(model: "ModelProto", ranges: Ranges) -> None:
    """Warn if the exporter limits the size of axis 0; replace symbolic sizes that have only one possible value."""
    for value in (*model.graph.input, *model.graph.output):
        for size in value.type.tensor_type.shape.dim:
            low, high = ranges.get(size.dim_param, (0, 1))
            if low == high:
                size.dim_value = int(low)
    limits = []
    for value in model.graph.input:
        first = [*value.type.tensor_type.shape.dim][:1]
        low, high = ranges.get(first[0].dim_param, (0, UNLIMITED)) if first else (0, UNLIMITED)
        if first and first[0].HasField("dim_value"):
            limits.append(f"axis 0 of {value.name} is fixed to {first[0].dim_value}")
        elif low > TORCH_MIN_SIZE or high < UNLIMITED:
            limits.append(f"axis 0 of {value.name} is limited to sizes from {low} to {high}")
    if limits:
        reason = "because the model's code depends on this size: pass dynamic_shapes to choose which axes vary"
        warnings.warn(f"{', '.join(limits)}, {reason}", stacklevel=4)


def exporter_error(model: nn.Module, error: Exception) -> UnsupportedError:
    """Make an error from the first line of the exporter's message and the names of recurrent layers."""
    cause: BaseException = error.__cause__ or error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    message = lines[0] if lines else type(cause).__name__
    layers = [
        f"{name} ({float_class_of(each).__name__})"
        for name, each in model.named_modules()
        if isinstance(each, _RECURRENT)
    ]
    hint = f" (the exporter often rejects recurrent layers, here {', '.join(layers)})" if layers else ""
    return UnsupportedError(f"torch.onnx.export failed: {message}{hint}")


@contextmanager
def _recurrent_loops(shapes: Any) -> Iterator[None]:
    """Trace recurrent layers as loops of any length in all steps of the exporter, if a size varies.

    torch traces loops only in the exporter's first step, and caches the chosen kernels. Without this context, the first
    export of a process differs from later exports, and later steps unroll the layer to the length of the example.
    """
    operators = [getattr(torch.ops.aten, name).input for name in _LOOP_OPERATORS]

    def forget_kernels() -> None:
        for operator in operators:
            operator._dispatch_cache.clear()

    with ExitStack() as stack:
        stack.callback(forget_kernels)
        if shapes is not None and find_spec(_LOOP_MODULE) is not None:
            for name in _LOOP_OPERATORS:
                register = getattr(import_module(_LOOP_MODULE), f"register_{name}_while_loop_decomposition", None)
                if register is not None:
                    stack.enter_context(register())
        forget_kernels()
        yield


def quiet_exporter() -> AbstractContextManager[None]:
    """Silence the exporter's warnings about its own code."""
    return silenced("torch.onnx", "onnxscript", "onnx_ir")
