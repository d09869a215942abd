"""Nodes: QuantizeLinear and DequantizeLinear, written from parameters and read back into them.

=============== ============================== ======================
granularity     scale in the file              attributes
=============== ============================== ======================
PerTensor       a number
PerAxis(a)      one per channel                axis=a
PerGroup(n, a)  the data's rank, ceil(D / n)   axis=a, block_size=n
=============== ============================== ======================
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, helper

from detent.errors import FileFormatError, ParamsError, UnsupportedError
from detent.formats import FORMATS, Format
from detent.granularity import Granularity, PerAxis, PerGroup, PerTensor
from detent.params import QuantParams
from detent.qdq.graph import attribute_of
from detent.qdq.targets import Container
from detent.qdq.tensors import array_of, element_range
from detent.spec import QuantSpec

__all__ = ["Quantization", "dequantize_node", "needs_clip", "quantize_node", "read_quantization"]

Array = NDArray[Any]
FIRST_BLOCKED = 21
_ATTRIBUTES = ("axis", "block_size")


@dataclass(frozen=True, eq=False)
class Quantization:
    """The parameters of a quantizer as a file holds them.

    Attributes:
        scale: float32.
        zero_point: integers of the codes' type, of the scale's shape.
        kind: the ONNX type of the codes.
        axis, block: where the scale has more than one value.
        low, high: the smallest and largest code that is used.

    >>> made = Quantization.of(QuantParams("int8", 0.5), Container(TensorProto.UINT8, 128), 2)
    >>> made.scale, made.zero_point, made.low, made.high, made.block
    (array(0.5, dtype=float32), array(128), 1, 255, 0)
    >>> made.params((4, 4)).spec.format.name, made.format.name, made.granularity((4, 4)), made.attributes()
    ('uint8', 'uint8', PerTensor(), {})
    """

    scale: Array
    zero_point: Array
    kind: int
    axis: int = 1
    block: int = 0
    low: float = 0
    high: float = 255

    @classmethod
    def of(cls, params: QuantParams, container: Container, rank: int) -> "Quantization":
        """What a file says of these parameters, for data of that rank."""
        spec = params.spec
        if params.block_scale is not None or spec.scale_format != "float":
            raise UnsupportedError(f"ONNX files cannot hold the scales of {spec}: use a spec with float scales")
        axis, block = _place(spec.granularity, rank)
        scale = np.asarray(params.scale, np.float32)
        if not np.array_equal(scale, params.scale):
            raise ParamsError("scales of float64 that are no float32 cannot be stored: make the params in float32")
        zero = np.asarray(params.zero_point.astype(np.int64) + container.shift)
        return cls(scale, zero, container.kind, axis, block, spec.qmin + container.shift, spec.qmax + container.shift)

    @property
    def format(self) -> Format:
        """The format of the codes."""
        name = TensorProto.DataType.Name(self.kind)
        found = next((format for format in FORMATS.values() if format.onnx == name), None)
        if found is None:
            raise UnsupportedError(f"codes of type {name} are not known here")
        return found

    def granularity(self, shape: tuple[int, ...]) -> Granularity:
        """The granularity for data of that shape."""
        if self.block:
            return PerGroup(self.block, axis=self.axis)
        return PerTensor() if self.scale.size == 1 and self.scale.ndim == 0 else PerAxis(self.axis % len(shape))

    def params(self, shape: tuple[int, ...]) -> QuantParams:
        """The parameters for data of that shape; codes are those of the file."""
        format = self.format
        low, high = (self.low, self.high) if format.is_integer else (None, None)
        spec = QuantSpec(format, self.granularity(shape), symmetric=not format.is_integer, qmin=low, qmax=high)
        return QuantParams(spec, self.scale, self.zero_point)

    def attributes(self) -> dict[str, int]:
        """Those of the nodes."""
        if self.block:
            return {"axis": self.axis, "block_size": self.block}
        return {"axis": self.axis} if self.scale.ndim else {}


def _place(granularity: Granularity, rank: int) -> tuple[int, int]:
    if isinstance(granularity, PerTensor):
        return 1, 0
    if isinstance(granularity, PerAxis):
        return granularity.axis % rank, 0
    if isinstance(granularity, PerGroup):
        return granularity.axis % rank, granularity.size
    raise UnsupportedError(f"ONNX files cannot hold scales of granularity {granularity}: use tensor, axis or group")


def needs_clip(quantization: Quantization) -> bool:
    """Whether the codes in use are fewer than the type has, so that data must be clipped first.

    >>> needs_clip(Quantization(np.float32(1), np.array(0), TensorProto.UINT8, high=15))
    True
    """
    if not quantization.format.is_integer:
        return False
    return (quantization.low, quantization.high) != element_range(quantization.kind)


def quantize_node(x: str, scale: str, zero_point: str, y: str, how: Quantization) -> NodeProto:
    """A QuantizeLinear node from x to y.

    >>> quantize_node("x", "s", "z", "y", Quantization(np.float32(1), np.array(0), TensorProto.UINT8)).op_type
    'QuantizeLinear'
    """
    return _node("QuantizeLinear", [x, scale, zero_point], y, how)


def dequantize_node(x: str, scale: str, zero_point: str | None, y: str, how: Quantization) -> NodeProto:
    """A DequantizeLinear node from x to y; without a zero point where that is 0 and needs no type.

    >>> dequantize_node("x", "s", None, "y", Quantization(np.ones(2, np.float32), np.zeros(2), TensorProto.INT32)).input
    ['x', 's']
    """
    inputs = [x, scale] if zero_point is None else [x, scale, zero_point]
    return _node("DequantizeLinear", inputs, y, how)


def _node(operator: str, inputs: list[str], y: str, how: Quantization) -> NodeProto:
    node = helper.make_node(operator, inputs, [y], name=f"{y}_node")
    node.attribute.extend(helper.make_attribute(name, value) for name, value in how.attributes().items())
    return node


def read_quantization(
    node: NodeProto, constants: Mapping[str, TensorProto], kind_of: Callable[[str], int] | None = None
) -> Quantization | None:
    """The parameters of a QuantizeLinear or DequantizeLinear node; None where they are no constants.

    Args:
        node: such a node.
        constants: the model's.
        kind_of: the element type of a tensor, for nodes without a zero point.

    >>> from onnx import numpy_helper
    >>> node = helper.make_node("QuantizeLinear", ["x", "s"], ["y"])
    >>> found = read_quantization(node, {"s": numpy_helper.from_array(np.float32([0.5]).reshape(()), "s")})
    >>> found.scale, found.kind == TensorProto.UINT8
    (array(0.5, dtype=float32), True)
    """
    names = [*node.input, ""]
    if any(name and name not in constants for name in names[1:3]):
        return None
    scale = array_of(constants[names[1]])
    if scale.dtype != np.float32:
        raise UnsupportedError(f"{node.name}: scales of {scale.dtype} are not read here, only float32")
    kind: int = TensorProto.UINT8
    zero = np.zeros(scale.shape, np.int64)
    if names[2]:
        kind, zero = constants[names[2]].data_type, array_of(constants[names[2]]).astype(np.int64)
    elif node.op_type == "QuantizeLinear":
        kind = attribute_of(node, "output_dtype", 0) or kind
    elif names[0] in constants:
        kind = constants[names[0]].data_type
    elif kind_of is not None:
        kind = kind_of(names[0]) or kind
    if scale.size == zero.size == 1:  # some write one number as an array, the other as a scalar
        zero = zero.reshape(scale.shape)
    if zero.shape != scale.shape:
        raise FileFormatError(f"{node.name}: its scale has shape {scale.shape}, its zero point {zero.shape}")
    axis, block = (int(attribute_of(node, name, default)) for name, default in zip(_ATTRIBUTES, (1, 0), strict=True))
    if scale.size == 1 and not block:
        scale, zero = scale.reshape(()), zero.reshape(())
    low, high = element_range(kind) if TensorProto.DataType.Name(kind).lstrip("U").startswith("INT") else (0, 0)
    return Quantization(scale, zero, kind, axis, block, low, high)
