"""Decoding: what a file's codes mean, whatever its source; the part of level 1 that needs no data and no source."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, ValueInfoProto, helper

from detent.errors import DetentError
from detent.onnx_model import Quantization, get_target, make_session
from detent.onnx_model.graph import attribute_of
from detent.onnx_model.sessions import refusals
from detent.ops import dequantize
from detent.params import QuantParams
from detent.proof.artifact import Artifact, FileWeight, is_bias
from detent.proof.report import Difference
from detent.proof.tally import Tally, first_index
from detent.proof.weights import place_in_file, place_of, spread

__all__ = ["check_biases", "check_decoding", "check_limit"]

Array = NDArray[Any]


def check_decoding(artifact: Artifact, weight: FileWeight, tally: Tally, *, count: bool) -> None:
    """Check that ONNX Runtime makes the same numbers of a weight's codes as detent, and that its parameters are sound.

    Args:
        artifact: the file.
        weight: of the file.
        tally: where codes are counted.
        count: whether codes are counted as compared; not where they were counted before.

    >>> from onnx import parser
    >>> artifact = Artifact(parser.parse_model('''<ir_version: 10, opset_import: ["" : 21]>
    ...     g (float[2] x) => (float[2] y) <float s = {-0.5}, int8[2] w = {3, 4}, int8 z = {0}>
    ...     { v = DequantizeLinear(w, s, z) y = Add(x, v) }'''))
    >>> tally = Tally()
    >>> check_decoding(artifact, artifact.weights[0], tally, count=True)
    >>> tally.differing, tally.first.cause
    (2, 'unsound parameters: scale must be positive, got -0.5')
    """
    codes = artifact.graph.array(weight.name)
    if count:
        tally.count(codes.size, 0)
    name = artifact.name_of(weight)
    try:
        expected = _decoded(codes, weight)
    except DetentError as error:
        tally.count(0, codes.size)
        cause = f"unsound parameters: {error}"
        tally.note(Difference(name, weight.constants[0], (), None, None, None, None, None, cause))
        return
    if not weight.direct or weight.node.op_type != "DequantizeLinear":
        return
    with refusals():
        got = _decoded_by_runtime(artifact, weight)
    bad = got.view(np.uint32) != expected.view(np.uint32)
    if bad.any():
        index = first_index(bad)
        tally.count(0, int(np.count_nonzero(bad)))
        values = float(expected[index]), float(got[index])
        cause = "ONNX Runtime makes another number of a code"
        tally.note(Difference(name, weight.node.output[0], index, *values, None, None, None, cause))


def _decoded(codes: Array, weight: FileWeight) -> Array:
    if not is_bias(weight):
        place = place_in_file(weight, codes.shape)
        how = weight.how
        moved = Quantization(
            how.scale, how.zero_point, how.kind, 1 if place.axis is None else place.axis, how.block, how.low, how.high
        )
        return dequantize(codes, moved.params(codes.shape))
    QuantParams("int8" if not weight.how.scale.ndim else "int8/axis0", weight.how.scale)  # its scales must be sound
    scale = spread(weight.how.scale, place_of(weight.how, codes.ndim), codes.shape)
    return codes.astype(np.float32) * np.asarray(scale, np.float32)


def _decoded_by_runtime(artifact: Artifact, weight: FileWeight) -> Array:
    """What ONNX Runtime's DequantizeLinear makes of the codes, in a model of its own."""
    node, constants = weight.node, artifact.graph.constants
    needed = [constants[name] for name in dict.fromkeys(node.input) if name]
    graph = helper.make_graph([node], "decoding", [], [ValueInfoProto(name=node.output[0])], needed)
    model = helper.make_model(graph, opset_imports=artifact.model.opset_import, ir_version=artifact.model.ir_version)
    found: Array = make_session(model, optimise=False).run(None, {})[0]
    return found


def check_biases(
    artifact: Artifact,
    tally: Tally,
    biases: Mapping[str, Array] | None = None,
    scales: Mapping[str, Array] | None = None,
) -> None:
    """Check that biases lie on the grid of the products that they are added to, and hold the source's numbers.

    Args:
        artifact: a file of detent's.
        tally: where codes are counted.
        biases: what the source has, by the tensor of the codes of the layer's weight.
        scales: those of the source, by the tensor of the codes; the file's where the source has none.

    >>> from onnx import parser
    >>> check_biases(Artifact(parser.parse_model('''<ir_version: 10, opset_import: ["" : 21]>
    ...     g (float[2] x) => (float[2] y) <float s = {0.5}, int8[2] w = {3, 4}, int8 z = {0}>
    ...     { v = DequantizeLinear(w, s, z) y = Add(x, v) }''')), Tally())
    """
    graph = artifact.graph
    by_output = {weight.node.output[0]: weight for weight in artifact.weights}
    for bias in filter(is_bias, artifact.weights):
        for reader in graph.consumers(bias.node.output[0]):
            if reader.op_type not in {"Conv", "Gemm"} or len(reader.input) < 3:
                continue
            weight, x = by_output.get(reader.input[1]), graph.producer(reader.input[0])
            if weight is None or x is None or x.op_type != "DequantizeLinear" or x.input[1] not in graph.constants:
                continue
            known = scales or {}
            left = np.asarray(known.get(x.input[0], graph.array(x.input[1])), np.float32)
            right = np.asarray(known.get(weight.name, weight.how.scale), np.float32)
            unit = left.reshape(-1)[:1] * right.reshape(-1)
            _check_bias(artifact, bias, unit, (biases or {}).get(weight.name), tally)


def _check_bias(artifact: Artifact, bias: FileWeight, unit: Array, source: Array | None, tally: Tally) -> None:
    codes, name = artifact.graph.array(bias.name), artifact.name_of(bias)
    scale = np.broadcast_to(bias.how.scale.reshape(-1), codes.shape)
    expected = np.broadcast_to(unit, codes.shape) if unit.size in {1, codes.size} else scale
    bad = scale != expected
    if bad.any():
        index = first_index(bad)
        cause = "the scale of a bias is not the product of the scales of input and weight: one of the three was changed"
        values = float(expected[index]), float(scale[index])
        tally.note(Difference(name, bias.constants[0], index, *values, None, values[0], 0, cause))
    if source is not None and source.shape == codes.shape:
        wanted = np.rint(source.astype(np.float64) / expected)
        other = wanted != codes
        if other.any() and not bad.any():
            index = first_index(other)
            about = (float(source[index]), float(expected[index]), 0)
            tally.note(
                Difference(
                    name, bias.name, index, int(wanted[index]), int(codes[index]), *about, "another code of a bias"
                )
            )
        bad = bad | other
        tally.count(codes.size, int(np.count_nonzero(bad)))
    elif bad.any():
        tally.count(0, int(np.count_nonzero(bad)))


def check_limit(artifact: Artifact, weight: FileWeight, tally: Tally) -> None:
    """Check that codes are within what the file's target takes.

    >>> from onnx import parser
    >>> artifact = Artifact(parser.parse_model('''<ir_version: 10, opset_import: ["" : 21]>
    ...     g (float[2] x) => (float[2] y) <float s = {0.5}, int8[2] w = {3, 4}, int8 z = {0}>
    ...     { v = DequantizeLinear(w, s, z) y = Add(x, v) }'''))
    >>> check_limit(artifact, artifact.weights[0], Tally())
    """
    about = artifact.provenance
    limit = None if about is None or not about.target else get_target(about.target).limit
    readers = artifact.graph.consumers(weight.node.output[0])
    if limit is None or weight.how.kind != TensorProto.INT8 or not any(_is_dense(artifact, each) for each in readers):
        return
    codes = artifact.graph.array(weight.name).astype(np.int64)
    bad = np.abs(codes) > limit
    if bad.any():
        index = first_index(bad)
        tally.count(0, int(np.count_nonzero(bad)))
        cause = f"a code beyond {limit}, the limit of target {about.target!r}" if about else ""
        tally.note(
            Difference(artifact.name_of(weight), weight.name, index, None, int(codes[index]), None, None, None, cause)
        )


def _is_dense(artifact: Artifact, node: NodeProto) -> bool:
    """Whether a node adds products of several channels of quantized data, which may saturate."""
    if node.op_type not in {"Conv", "Gemm", "MatMul"}:
        return False
    before = artifact.graph.producer(node.input[0])
    if before is None or before.op_type != "DequantizeLinear":
        return False
    made = artifact.graph.producer(node.input[1])
    shape = artifact.graph.shape(made.input[0]) if made is not None else None
    groups = int(attribute_of(node, "group", 1))
    return not (shape is not None and 1 < groups == shape[0] and shape[1] == 1)
