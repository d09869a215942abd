"""Exporting: a trained model as an ONNX file that holds the very codes and scales it was trained with.

::

    copy, run once   ->  mark                  ->  torch.onnx.export  ->  lower              ->  check, save
    as it is shipped     quantizers are marks      operators of ONNX      marks become codes     atomically

The model itself is left as it is.
"""

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from detent.checks import as_integer
from detent.errors import DetentError, DtypeError, FileFormatError, SpecError, UnsupportedError, install_hint
from detent.storage import check_directory
from detent.torch.arrays import Arguments, arguments_of
from detent.torch.export_marks import Marked, copy_to_ship, mark
from detent.torch.layers import float_class_of
from detent.torch.preparation import plan_of

if TYPE_CHECKING:
    from onnx import ModelProto

__all__ = ["export_onnx", "quiet_exporter"]

Ranges = dict[str, tuple[Any, Any]]
Example = Tensor | Sequence[Tensor] | Mapping[str, Tensor]
NEEDED = ("onnx", "onnxscript", "onnxruntime")
FIRST_OPSET, LAST_OPSET = 18, 23  # what torch writes without converting, and what goes with the IR version
FEW, UNLIMITED = 2, 1 << 31  # sizes that torch may ask for anyway, and such as nobody asks for
_RECURRENT = (nn.LSTM, nn.GRU, nn.RNN)


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
    """Write a prepared model as an ONNX file, quantized as it was trained: QuantizeLinear and DequantizeLinear.

    The model is not changed. ``dt.verify`` compares it with the file.

    Args:
        model: prepared, and calibrated or trained.
        example: what the model takes: a tensor, a tuple of tensors, or tensors by the names of forward's arguments.
        path: where to write.
        target: what runs it; see ``detent.onnx_model.targets``.
        dynamic_shapes: as ``torch.onnx.export`` takes them; None lets axis 0 of every input vary.
        opset: the version of ONNX's operators, 18 to 23; codes of 4 or 16 bits, and groups, need 21.
        container: "int8" stores weights of few bits in 8, which ONNX Runtime's integer kernels need; None uses the
            smallest type.

    Returns:
        The path.

    Raises:
        NotCalibratedError: a quantizer has no parameters yet; the message has its name.
        StateError: the model is not prepared, or quantizers let data pass.
        UnsupportedError: a package is missing; or ONNX, or torch's exporter, cannot express something.
        SpecError, DtypeError, FileFormatError: arguments that cannot be.

    >>> import tempfile
    >>> import detent.torch as qt
    >>> from detent.onnx_model import load
    >>> model = qt.prepare(nn.Sequential(nn.Linear(4, 2)), "w8a16")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = export_onnx(model, torch.ones(1, 4), Path(folder, "model.onnx"))
    ...     [node.op_type for node in load(path).graph.node]
    ['DequantizeLinear', 'Gemm']
    """
    _require_packages()
    from detent import onnx_model  # noqa: PLC0415 - all of these import onnx, which only an export needs
    from detent.torch import export_graph  # noqa: PLC0415

    wanted = onnx_model.get_target(target)
    operators = as_integer("opset", opset, at_least=FIRST_OPSET, at_most=LAST_OPSET)
    if container not in {None, "int8"}:
        raise SpecError(f"container is None or 'int8', got {container!r}")
    goal = _checked_path(path)
    args, kwargs = _arguments(example)
    ready, outputs = _run_once(model, args, kwargs)
    marked = mark(ready)
    proto = _exported(marked, (args, kwargs), dynamic_shapes, operators, outputs)
    lowered = export_graph.Lowering(export_graph.clean(proto), marked, wanted, least=4 if container is None else 8)
    version: str = import_module("detent").__version__  # by name: the package holds what lies above this layer, too
    made = export_graph.finalize(lowered.run(), version)
    onnx_model.Provenance(
        weights=lowered.weights,
        activations=lowered.activations,
        target=wanted.name,
        recipe=plan_of(model).recipe.to_json(),
        made_by=version,
    ).write(made)
    checked = onnx_model.load(made)
    onnx_model.make_session(
        checked, optimize=wanted.runtime == "onnxruntime"
    )  # a file that nothing runs is not written
    onnx_model.save(checked, goal)
    return goal


def _require_packages() -> None:
    for name in NEEDED:
        try:
            import_module(name)
        except ImportError as error:
            raise UnsupportedError(f"export_onnx needs {name}: {install_hint(name)}") from error
    if not hasattr(torch.onnx, "ops"):
        raise UnsupportedError(f"export_onnx needs torch 2.8 or later, this is {torch.__version__}: upgrade torch")


def _checked_path(path: str | PathLike[str]) -> Path:
    goal = Path(path)
    if goal.is_dir():
        raise FileFormatError(f"{fspath(goal)} is a folder, expected the path of a file to write")
    check_directory(goal.parent, writable=False)
    return goal


def _arguments(example: object) -> Arguments:
    """The positional and the named arguments, on the CPU."""
    args, kwargs = arguments_of(example, "example")
    if not (args or kwargs):
        raise DtypeError(f"example is an empty {type(example).__name__}, expected the model's arguments")
    for name, value in (*enumerate(args), *kwargs.items()):
        if not isinstance(value, Tensor):
            raise DtypeError(f"example[{name!r}] must be a torch.Tensor, got {type(value).__name__}")
    return Arguments(
        tuple(each.detach().cpu() for each in args), {name: each.detach().cpu() for name, each in kwargs.items()}
    )


def _run_once(model: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> tuple[nn.Module, list[str]]:
    """A copy that has run on the example, and names for its outputs; what cannot run shows here, with its own words."""
    ready = copy_to_ship(model)
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            result = ready(*args, **kwargs)
    except DetentError:
        raise
    except Exception as error:
        raise UnsupportedError(f"the model does not run on the example: {error}") from error
    return ready, _output_names(result, {*kwargs})


def _output_names(result: object, taken: set[str]) -> list[str]:
    """Names for the outputs by their place; none where some of them are no tensors."""
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
    """What torch's exporter makes of a marked model; axis 0 varies unless it refuses."""
    args, kwargs = example
    shapes = _varying(args, kwargs) if dynamic_shapes is None else dynamic_shapes

    def export(shapes: Any) -> "tuple[ModelProto, Ranges]":
        with quiet_exporter(), torch.random.fork_rng(devices=[]), torch.no_grad():
            program = torch.onnx.export(
                marked.model,
                args,
                kwargs=kwargs,
                dynamo=True,
                opset_version=opset,
                dynamic_shapes=shapes,
                output_names=outputs or None,
                verbose=False,
            )
        if program is None or program.exported_program is None:
            raise UnsupportedError("torch.onnx.export returned nothing")
        made: ModelProto = program.model_proto
        ranges = {
            str(symbol): (each.lower, each.upper) for symbol, each in program.exported_program.range_constraints.items()
        }
        return made, ranges

    try:
        made, ranges = export(shapes)
    except Exception as error:
        if dynamic_shapes is not None:
            raise _refusal(marked.model, error) from error
        try:
            made, ranges = export(None)
        except Exception:  # noqa: BLE001 - a model's own code may raise anything, and the first error says more
            raise _refusal(marked.model, error) from error
    if dynamic_shapes is None:
        _warn_of_limits(made, ranges)
    return made


def _varying(args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> Any:
    def axes(x: Tensor) -> Any:
        return {0: torch.export.Dim.AUTO} if x.ndim else None

    return {name: axes(each) for name, each in kwargs.items()} if kwargs else tuple(axes(each) for each in args)


def _warn_of_limits(model: "ModelProto", ranges: Ranges) -> None:
    """Say where axis 0 cannot take any size; torch names a size that has one value only, and here it becomes that."""
    for value in (*model.graph.input, *model.graph.output):
        for size in value.type.tensor_type.shape.dim:
            low, high = ranges.get(size.dim_param, (0, 1))
            if low == high:
                size.dim_value = int(low)
    said = []
    for value in model.graph.input:
        first = [*value.type.tensor_type.shape.dim][:1]
        low, high = ranges.get(first[0].dim_param, (0, UNLIMITED)) if first else (0, UNLIMITED)
        if first and first[0].HasField("dim_value"):
            said.append(f"axis 0 of {value.name} is fixed to {first[0].dim_value}")
        elif low > FEW or high < UNLIMITED:
            said.append(f"axis 0 of {value.name} must be from {low} to {high}")
    if said:
        why = "because the model computes with that size: give dynamic_shapes to choose which axes vary"
        warnings.warn(f"{', '.join(said)}, {why}", stacklevel=4)


def _refusal(model: nn.Module, error: Exception) -> UnsupportedError:
    """What torch's exporter says, in short, with the layers that it is known not to take."""
    cause: BaseException = error.__cause__ or error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    said = lines[0] if lines else type(cause).__name__
    layers = [
        f"{name} ({float_class_of(each).__name__})"
        for name, each in model.named_modules()
        if isinstance(each, _RECURRENT)
    ]
    hint = f"; recurrent layers are hard for it: {', '.join(layers)}" if layers else ""
    return UnsupportedError(f"torch.onnx.export does not take the model: {said}{hint}")


@contextmanager
def quiet_exporter() -> Iterator[None]:
    """Keep to itself what torch's exporter says of its own code.

    >>> with quiet_exporter():
    ...     logging.getLogger("torch.onnx").level == logging.ERROR
    True
    """
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
