"""Contents of an ONNX model from any tool, for ``detent inspect``: facts about the file, and one row per tensor."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from os import PathLike, fspath
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, ValueInfoProto, inliner

from detent.cli.inspect_command import Contents, TensorRow
from detent.errors import FileFormatError, UnsupportedError
from detent.onnx_model import Provenance, array_of, load_model
from detent.onnx_model.graph import Graph, element_range
from detent.onnx_model.qdq_reader import QuantizedGraph
from detent.onnx_model.quantized_model import ActivationQuantizer, QuantizedModel
from detent.tables import counted

__all__ = ["model_contents"]

MAX_OPERATORS_SHOWN = 12  # limit on the number of operator types; their names take about two lines
MAX_SKIPPED_SHOWN = 8


def model_contents(path: str | PathLike[str]) -> Contents:
    """Read an ONNX model with the same checks as ``qo.load``."""
    loaded = load_model(path)
    model, size = loaded.proto, loaded.nbytes
    read = QuantizedGraph(inliner.inline_local_functions(model) if model.functions else model)
    quantized, graph = QuantizedModel.of(read), Graph(model)
    provenance, provenance_error = _provenance(model)
    rows = [*_quantized_rows(quantized), *_constants(model, {*quantized.weights, *quantized.biases, *read.parameters})]
    kinds = Counter(row.kind for row in rows)
    inputs = {value.name: _shape_text(value) for value in model.graph.input if value.name not in graph.constants}
    outputs = {value.name: _shape_text(value) for value in model.graph.output}
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    facts = {
        "file": f"{fspath(path)}, {size:,} bytes, ONNX",
        "producer": f"{model.producer_name} {model.producer_version}".strip(),
        "versions": f"IR {model.ir_version}, opset {graph.opset}",
        "inputs": ", ".join(f"{name} {text}" for name, text in inputs.items()),
        "outputs": ", ".join(f"{name} {text}" for name, text in outputs.items()),
        "operators": _operators(quantized.nodes),
        "contents": ", ".join(counted(count, kind, ",") for kind, count in kinds.items()) or "no tensors",
    }
    facts = {name: text for name, text in facts.items() if text}  # the producer may be empty
    if provenance is not None:
        facts["quantized by"] = (
            f"detent {provenance.made_by}, recipe {_recipe_name(provenance)}, target {provenance.target}"
        )
        facts["data"] = f"sha256 {provenance.data}" if provenance.data else "none"
    if provenance_error:
        facts["metadata"] = provenance_error
    facts |= {f"not read: {name}": reason for name, reason in list(quantized.skipped.items())[:MAX_SKIPPED_SHOWN]}
    document = {
        "file": fspath(path),
        "kind": "onnx",
        "nbytes": size,
        "is_quantized": bool(quantized.weights or quantized.activations or quantized.skipped),
        "ir_version": model.ir_version,
        "opset": graph.opset,
        "producer": model.producer_name,
        "inputs": inputs,
        "outputs": outputs,
        "operators": dict(quantized.nodes),
        "provenance": None if provenance is None else _provenance_document(provenance),
        "metadata": {key: value for key, value in metadata.items() if key != "detent"},
        "not_read": dict(quantized.skipped),
        "tensors": [asdict(row) for row in rows],
    }
    return Contents(facts, rows, document)


def _provenance(model: ModelProto) -> tuple[Provenance | None, str]:
    try:
        return Provenance.read(model), ""
    except (FileFormatError, UnsupportedError) as error:  # the rest of the file can still be shown
        return None, str(error)


def _provenance_document(provenance: Provenance) -> dict[str, Any]:
    return {
        "made_by": provenance.made_by,
        "target": provenance.target,
        "recipe": _json(provenance.recipe),
        "data_sha256": provenance.data,
    }


def _recipe_name(provenance: Provenance) -> str:
    recipe = _json(provenance.recipe)
    return str(recipe.get("name") or "without a name") if isinstance(recipe, dict) else "unknown"


def _json(text: str) -> Any:  # noqa: ANN401 - any document
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _operators(nodes: Mapping[str, int]) -> str:
    ordered = sorted(nodes.items(), key=lambda each: (-each[1], each[0]))
    more = f" and {len(ordered) - MAX_OPERATORS_SHOWN} more" if len(ordered) > MAX_OPERATORS_SHOWN else ""
    return ", ".join(f"{count:,} {name}" for name, count in ordered[:MAX_OPERATORS_SHOWN]) + more


def _shape_text(value: ValueInfoProto) -> str:
    tensor_type = value.type.tensor_type
    if not tensor_type.elem_type:
        return "(not a tensor)"
    sizes = [str(axis.dim_value or axis.dim_param or "?") for axis in tensor_type.shape.dim]
    name = str(TensorProto.DataType.Name(tensor_type.elem_type)).lower()
    return f"{name}[{', '.join(sizes)}]" if tensor_type.HasField("shape") else name


def _quantized_rows(model: QuantizedModel) -> Iterator[TensorRow]:
    for name, tensor in model.weights.items():
        yield TensorRow(
            name, "weight", str(tensor.spec), tensor.shape, tensor.nbytes, *_range(tensor.dequantize("float32"))
        )
    for name, bias in model.biases.items():
        yield TensorRow(name, "bias", "int32", bias.codes.shape, bias.nbytes, *_range(bias.dequantize()))
    for each in model.activations:
        yield TensorRow(each.tensor, "activation", each.type.lower(), None, 0, *_code_range(each))


def _range(values: NDArray[Any]) -> tuple[float, float] | tuple[None, None]:
    if not values.size or values.dtype.kind not in "fiub":
        return None, None
    return float(values.min()), float(values.max())


def _code_range(each: ActivationQuantizer) -> tuple[float, float] | tuple[None, None]:
    """Return the values that the smallest and the largest code decode to."""
    if "INT" not in each.type:
        return None, None
    low, high = element_range(TensorProto.DataType.Value(each.type))
    scale, zero = each.scale.astype(np.float64), each.zero_point.astype(np.float64)
    return float(((low - zero) * scale).min()), float(((high - zero) * scale).max())


def _constants(model: ModelProto, quantized: set[str]) -> list[TensorRow]:
    """Return a row for each constant that holds no codes and is not a scale or zero point, largest first."""
    rows = []
    for tensor in model.graph.initializer:
        if tensor.name not in quantized:
            values = array_of(tensor)
            shape = tuple(int(size) for size in tensor.dims)
            rows.append(TensorRow(tensor.name, "constant", values.dtype.name, shape, values.nbytes, *_range(values)))
    return sorted(rows, key=lambda row: -row.nbytes)
