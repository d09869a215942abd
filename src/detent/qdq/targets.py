"""Targets: what runtimes want of a quantized model, as data.

==================== ============= ============== ===========================================================
target               weights       depthwise      for
==================== ============= ============== ===========================================================
onnxruntime          uint8, zp 128 int8           every CPU: exact, because two signed bytes never saturate
onnxruntime-avx2     int8, |c|<=64 int8           CPUs without VNNI: faster, one bit less
onnxruntime-vnni     int8          int8           CPUs with VNNI; elsewhere its products saturate
openvino             uint8, zp 128 int8           every CPU
openvino-vnni        int8          int8           CPUs with VNNI
==================== ============= ============== ===========================================================

The same codes, shifted by 128 together with their zero point, mean the same numbers. AVX2 multiplies an unsigned by a
signed byte and adds two such products in 16 bits, which overflows where weights are signed and large; of unsigned
weights runtimes know that and widen them first. Signed 8-bit activations are shifted as well: their kernels are slow.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, NamedTuple

from onnx import TensorProto

from detent.errors import SpecError, closest
from detent.formats import Format
from detent.qdq.tensors import element_type
from detent.spec import QuantSpec

__all__ = ["TARGETS", "Container", "Target", "get_target"]

Runtime = Literal["onnxruntime", "openvino"]


class Container(NamedTuple):
    """How codes are stored.

    Attributes:
        kind: the ONNX type.
        shift: what is added to codes and zero points.

    >>> Container(TensorProto.UINT8, 128).shift
    128
    """

    kind: int
    shift: int = 0


@dataclass(frozen=True)
class Target:
    """What a runtime wants.

    Attributes:
        name: of the target.
        runtime: which runs it.
        unsigned_weights: whether signed 8-bit weights of dense products are stored as unsigned ones.
        limit: the largest magnitude of a weight's code, None for all that the format has.
        needs_vnni: whether products saturate on CPUs without VNNI.

    >>> from detent.formats import get_format
    >>> target = get_target("onnxruntime")
    >>> target.weight_container(get_format("int8")), target.weight_container(get_format("int8"), depthwise=True)
    (Container(kind=2, shift=128), Container(kind=3, shift=0))
    >>> target.activation_container(get_format("int8"))
    Container(kind=2, shift=128)
    >>> get_target("onnxruntime-avx2").weight_spec(QuantSpec("int8")).qmax
    64
    """

    name: str
    runtime: Runtime
    unsigned_weights: bool = True
    limit: int | None = None
    needs_vnni: bool = False

    def weight_spec(self, spec: QuantSpec) -> QuantSpec:
        """The spec with the codes that the target takes."""
        if self.limit is None or not spec.format.is_integer or max(-spec.qmin, spec.qmax) <= self.limit:
            return spec
        if not spec.symmetric:
            raise SpecError(f"target {self.name!r} takes symmetric weights, got {spec}")
        return spec.replace(qmin=-self.limit, qmax=self.limit)

    def weight_container(self, format: Format, *, depthwise: bool = False, least: int = 4) -> Container:
        """How codes of a weight are stored; ``least`` is the number of bits of the smallest type to use."""
        kind = element_type(format, least)
        if kind == TensorProto.INT8 and self.unsigned_weights and not depthwise:
            return Container(TensorProto.UINT8, 128)
        return Container(kind)

    def activation_container(self, format: Format, *, least: int = 4) -> Container:
        """How codes of an activation are stored."""
        kind = element_type(format, least)
        return Container(TensorProto.UINT8, 128) if kind == TensorProto.INT8 else Container(kind)


TARGETS: Mapping[str, Target] = MappingProxyType(
    {
        target.name: target
        for target in (
            Target("onnxruntime", "onnxruntime"),
            Target("onnxruntime-avx2", "onnxruntime", unsigned_weights=False, limit=64),
            Target("onnxruntime-vnni", "onnxruntime", unsigned_weights=False, needs_vnni=True),
            Target("openvino", "openvino"),
            Target("openvino-vnni", "openvino", unsigned_weights=False, needs_vnni=True),
        )
    }
)


def get_target(value: Target | str) -> Target:
    """The target of that name.

    >>> get_target("openvino").runtime
    'openvino'
    """
    if isinstance(value, Target):
        return value
    if value not in TARGETS:
        raise SpecError(f"unknown target {value!r}{closest(str(value), TARGETS)} expected {', '.join(TARGETS)}")
    return TARGETS[value]
