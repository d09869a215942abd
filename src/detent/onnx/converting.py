"""Converting: a model in the operator set that its quantizers need."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, defs, version_converter

from detent.errors import UnsupportedError
from detent.qdq.graph import MAIN, Graph
from detent.qdq.sessions import make_session

__all__ = ["convert", "needed_opset"]

PER_AXIS, BLOCKED = 13, 21  # the first operator sets with quantizers of those kinds
NEWEST_IR = 10
CLOSE = 1e-5  # of the largest output: what another order of sums may change


def needed_opset(*, low_bits: bool) -> int:
    """The oldest operator set whose quantizers have channels, and with ``low_bits`` blocks, 4 and 16 bits, too.

    >>> needed_opset(low_bits=False), needed_opset(low_bits=True)
    (13, 21)
    """
    return BLOCKED if low_bits else PER_AXIS


def convert(model: ModelProto, opset: int, feed: Mapping[str, NDArray[Any]] | None = None) -> ModelProto:
    """The model in at least that operator set, with an IR version that runtimes read.

    Args:
        model: is not changed where it is old enough to be converted.
        opset: of ONNX's own operators; others are kept.
        feed: inputs on which the converted model is compared with the original.

    Raises:
        UnsupportedError: an operator cannot be converted, or computes something else afterwards.

    >>> from onnx import parser
    >>> made = parser.parse_model(
    ...     '<ir_version: 4, opset_import: ["" : 11]> g (float[1] x) => (float[1] y) { y = Relu(x) }')
    >>> Graph(convert(made, 13)).opset
    13
    """
    found = Graph(model).opset
    converted = model
    if found < opset:
        try:
            converted = version_converter.convert_version(model, opset)
        except Exception as error:
            raise UnsupportedError(
                f"the model has operator set {found}, its quantizers need {opset}, and it cannot be converted: {error}"
            ) from error
        present = {entry.domain for entry in converted.opset_import}
        for entry in model.opset_import:
            if entry.domain not in {*present, *MAIN}:
                converted.opset_import.add(domain=entry.domain, version=entry.version)
        converted.metadata_props.extend(
            each for each in model.metadata_props if each.key not in {old.key for old in converted.metadata_props}
        )
    converted.ir_version = min(max(converted.ir_version, 8 if opset < BLOCKED else NEWEST_IR), NEWEST_IR)
    if found < opset and feed is not None:
        _compare(model, converted, feed, (found, opset))
    return converted


def _compare(before: ModelProto, after: ModelProto, feed: Mapping[str, NDArray[Any]], opsets: tuple[int, int]) -> None:
    results = [make_session(each).run(None, dict(feed)) for each in (before, after)]
    for name, old, new in zip(Graph(before).outputs, *results, strict=True):
        if np.shape(old) == np.shape(new) and _close(np.asarray(old), np.asarray(new)):
            continue
        raise UnsupportedError(
            f"converted from operator set {opsets[0]} to {opsets[1]}, the model computes another {name!r}: between "
            f"these {', '.join(_changed(before, *opsets)) or 'no operators'} changed; export it with operator set "
            f"{opsets[1]}"
        )


def _changed(model: ModelProto, old: int, new: int) -> list[str]:
    """The operators of a model whose definition changed between two operator sets."""
    kinds = {node.op_type for node in model.graph.node if node.domain in MAIN}
    return sorted(kind for kind in kinds if old < defs.get_schema(kind, new).since_version <= new)


def _close(old: NDArray[Any], new: NDArray[Any]) -> bool:
    if old.dtype.kind != "f":
        return np.array_equal(old, new)
    scale = float(np.abs(old[np.isfinite(old)]).max(initial=0.0))
    return bool(np.allclose(old, new, rtol=0, atol=CLOSE * scale, equal_nan=True))
