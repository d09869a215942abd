"""Exported programs: a file of ``torch.export.save`` (.pt2) as a float ONNX model whose nodes have names of modules.

``torch.export.load`` can execute code from the file: it unpickles parts of the archive, evaluates expressions, and
loads compiled libraries. So a file is loaded only if the caller trusts it. Nothing in the archive is read before that,
except its version.

Torch's exporter records in each node which module computes it. A layer gets the name of its module, such as
"features.0", and other nodes get the name of the module and of the operator, such as "features.0/Add". Reports, recipes
and ``skip`` then name layers as in the PyTorch model.
"""

import ast
import json
import logging
import warnings
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.export import ExportedProgram

from detent.checks import as_integer
from detent.errors import FileFormatError, SpecError, UnsupportedError
from detent.torch.onnx_export import FIRST_OPSET, LAST_OPSET, exporter_error, quiet_exporter, require_packages

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto

__all__ = ["PROGRAM_SUFFIX", "program_to_onnx"]

PROGRAM_SUFFIX = ".pt2"
SCOPES, RULE = "pkg.torch.onnx.name_scopes", "pkg.onnxscript.rewriter.rule_name"
MAX_SCOPES_CHARS = 1 << 16  # limit on the text that names the modules of a node
MAX_HEADER_BYTES = 64 << 20  # limit on the part of an archive that has its version
LAYERS = ("Conv", "ConvTranspose", "Gemm", "MatMul", "Gather", "LSTM", "GRU", "RNN")
ADVICE = "save the program again with torch.export.save"


def program_to_onnx(
    program: ExportedProgram | str | PathLike[str], *, trust: bool = False, opset: int = 21
) -> "ModelProto":
    """Convert an exported program to a float ONNX model, with the names of modules as names of layers.

    The batch axis is dynamic if it is dynamic in the program; otherwise there is a warning. Inputs have the names of
    the program's inputs.

    Args:
        program: the result of ``torch.export.export``, or the path of a .pt2 file.
        trust: whether to load the file, which can execute code from it; ``torch.export.load`` unpickles.
        opset: ONNX opset, 18 to 23.

    Raises:
        SpecError: ``program`` is a path, and ``trust`` is False.
        FileFormatError: the file is damaged, or from a version of torch that this one cannot read.
        UnsupportedError: a package is missing, or torch's exporter does not support a part of the program.

    >>> import detent.torch as qt
    >>> model, batch = torch.nn.Sequential(torch.nn.Linear(4, 2)), torch.export.Dim("batch")
    >>> program = torch.export.export(model, (torch.ones(2, 4),), dynamic_shapes=({0: batch},))
    >>> [node.name for node in qt.program_to_onnx(program).graph.node]
    ['0']
    """
    require_packages("program_to_onnx")
    opset = as_integer("opset", opset, at_least=FIRST_OPSET, at_most=LAST_OPSET)
    loaded = program if isinstance(program, ExportedProgram) else _load(program, trust=trust)
    from detent.torch import export_graph  # noqa: PLC0415 - imports onnx, which only an export needs

    model = _converted(loaded, opset)
    _name_nodes(model.graph)
    version: str = import_module("detent").__version__  # by name: import rules forbid a normal import here
    model = export_graph.finalize(export_graph.clean(model), version)
    _warn_of_fixed_batch(model.graph)
    return model


def _load(path: object, *, trust: bool) -> ExportedProgram:
    if not isinstance(path, str | PathLike):
        raise SpecError(
            f"got {type(path).__name__} for program, expected an ExportedProgram or the path of a .pt2 file"
        )
    name = fspath(path)
    if not trust:
        raise SpecError(
            f"{name}: loading an exported program can execute code from the file: pass trust=True if you trust its "
            "author, or export it to ONNX where it was made"
        )
    if not Path(path).is_file():
        raise FileFormatError(f"{name} is not a file" if Path(path).exists() else f"{name}: there is no such file")
    saved_by = _saved_by(name)
    try:
        with quiet_exporter(), _quiet_loader():
            return torch.export.load(name)
    except Exception as error:
        cause = next(iter(str(error).splitlines()), type(error).__name__)
        versions = f"it was saved by torch {saved_by}, and this is torch {torch.__version__}"
        raise FileFormatError(f"{name}: torch.export.load failed ({cause}); {versions}: {ADVICE}") from error


def _saved_by(name: str) -> str:
    """Return the version of torch that saved an archive, without unpickling anything."""
    try:
        with zipfile.ZipFile(name) as archive:
            entries = [each for each in archive.infolist() if each.filename.endswith("models/model.json")]
            if not entries or entries[0].file_size > MAX_HEADER_BYTES:
                raise FileFormatError(f"{name}: the archive has no exported program, expected one: {ADVICE}")
            version = json.loads(archive.read(entries[0])).get("torch_version")
    except (
        zipfile.BadZipFile,
        zlib.error,
        OSError,
        ValueError,
        RuntimeError,
        AttributeError,
        RecursionError,
        EOFError,
        NotImplementedError,
    ) as error:
        if isinstance(error, FileFormatError):
            raise
        raise FileFormatError(
            f"{name}: not a .pt2 file of torch.export.save, or damaged ({error}): {ADVICE}"
        ) from error
    return str(version)[:40]


@contextmanager
def _quiet_loader() -> Iterator[None]:
    """Silence the loader, which logs errors that it then raises."""
    logger = logging.getLogger("torch.export")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _converted(program: ExportedProgram, opset: int) -> "ModelProto":
    try:
        with quiet_exporter(), torch.no_grad():
            converted = torch.onnx.export(program, dynamo=True, opset_version=opset, verbose=False)
    except Exception as error:
        raise exporter_error(program.graph_module, error) from error
    if converted is None:
        raise UnsupportedError("torch.onnx.export returned no program: upgrade torch and onnxscript")
    model: ModelProto = converted.model_proto
    return model


def _name_nodes(graph: "GraphProto") -> None:
    """Rename nodes after their modules; nodes outside of modules keep their names."""
    constants = {each.name for each in graph.initializer}
    paths = [_module_of(node, constants) for node in graph.node]
    layers = Counter(path for node, path in zip(graph.node, paths, strict=True) if _is_layer(node, constants))
    used = Counter(node.name for node, path in zip(graph.node, paths, strict=True) if not path)
    for node, path in zip(graph.node, paths, strict=True):
        if not path:
            continue
        is_only_layer = layers[path] == 1 and _is_layer(node, constants)
        name = path if is_only_layer else f"{path}/{node.op_type}"
        used[name] += 1
        node.name = name if used[name] == 1 else f"{name}_{used[name] - 1}"


def _is_layer(node: "NodeProto", constants: set[str]) -> bool:
    """Return whether a node is a layer with a weight, unlike a matmul of two activations."""
    return node.op_type in LAYERS and any(name in constants for name in node.input)


def _module_of(node: "NodeProto", constants: set[str]) -> str:
    """Return the full name of the module that a node belongs to, or "" if it is the root module or not recorded."""
    notes = {each.key: each.value for each in node.metadata_props}
    if RULE in notes:  # a fused node has the notes of one of its parts; its weight belongs to the layer
        owner = next((name.rpartition(".")[0] for name in node.input if name in constants and "." in name), "")
        if owner:
            return owner
    try:
        scopes: Any = ast.literal_eval(notes.get(SCOPES, "")[:MAX_SCOPES_CHARS])
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return ""
    # The last scope is the operation itself.
    modules = scopes[:-1] if isinstance(scopes, list) else []
    return modules[-1] if modules and isinstance(modules[-1], str) and not modules[-1].startswith("_empty") else ""


def _warn_of_fixed_batch(graph: "GraphProto") -> None:
    fixed = []
    for value in graph.input:
        sizes = value.type.tensor_type.shape.dim
        if sizes and sizes[0].HasField("dim_value"):
            fixed.append(f"axis 0 of {value.name} is fixed to {sizes[0].dim_value}")
    if fixed:
        warnings.warn(
            f"{', '.join(fixed)}, as in the exported program: to let it vary, pass dynamic_shapes to "
            "torch.export.export",
            stacklevel=3,
        )
