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

Processor: what this CPU has that quantized models care for.
"""

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NamedTuple

from onnx import TensorProto

from detent.errors import SpecError, closest
from detent.formats import Format
from detent.onnx_model.graph import element_type
from detent.spec import QuantSpec

__all__ = ["TARGETS", "Container", "Target", "faster", "get_target", "has_avx2", "has_vnni", "mismatch"]

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


CPUINFO = Path("/proc/cpuinfo")
X86 = ("x86_64", "amd64", "i386", "i686")
READ = 1 << 16


def has_vnni() -> bool | None:
    """Whether it multiplies bytes into 32 bits at once; None where that cannot be told."""
    flags = _flags()
    return None if flags is None else any(flag.endswith("_vnni") for flag in flags)


def has_avx2() -> bool | None:
    """Whether it has AVX2; None where that cannot be told."""
    flags = _flags()
    return None if flags is None else "avx2" in flags


def _flags() -> list[str] | None:
    if platform.machine().lower() not in X86:
        return None
    try:
        with CPUINFO.open(encoding="utf-8", errors="replace") as file:
            lines = file.read(READ).splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), None)


def faster(target: str, vnni: bool | None, avx2: bool | None) -> str:
    """Which target computes faster on this CPU, and at what price; "" where there is none.

    Args:
        target: the name of the one that was chosen.
        vnni, avx2: what ``has_vnni`` and ``has_avx2`` say.

    >>> faster("onnxruntime", True, True)
    'this CPU has VNNI: --target onnxruntime-vnni computes the same codes faster here, but only on such CPUs'
    >>> faster("onnxruntime", False, True)
    'this CPU has AVX2 and no VNNI: --target onnxruntime-avx2 is faster here, with one bit less in weights'
    >>> faster("onnxruntime-vnni", True, True)
    ''
    """
    if target != "onnxruntime":
        return ""
    if vnni:
        return f"this CPU has VNNI: --target {target}-vnni computes the same codes faster here, but only on such CPUs"
    if vnni is False and avx2:
        return f"this CPU has AVX2 and no VNNI: --target {target}-avx2 is faster here, with one bit less in weights"
    return ""


def mismatch(target: str, vnni: bool | None = None) -> str:
    """Why a target is not the one for this CPU; "" where nothing speaks against it.

    Args:
        target: its name.
        vnni: what ``has_vnni`` says.

    >>> mismatch("onnxruntime", False)
    ''
    >>> mismatch("onnxruntime-vnni", False)
    'target onnxruntime-vnni needs a CPU with VNNI, this one has none: its products saturate here; \
--target onnxruntime is exact on every CPU'
    """
    aim = get_target(target)
    special = aim.needs_vnni or aim.limit is not None
    if special and platform.machine().lower() not in X86:
        return f"target {target} is made for x86 CPUs, this one is {platform.machine()}: use --target {aim.runtime}"
    if aim.needs_vnni and vnni is False:
        return (
            f"target {target} needs a CPU with VNNI, this one has none: its products saturate here; "
            f"--target {aim.runtime} is exact on every CPU"
        )
    if aim.limit is not None and vnni:
        return (
            f"target {target} gives up a bit of each weight, which this CPU does not ask for, as it has VNNI: "
            f"--target {aim.runtime}-vnni keeps it"
        )
    return ""
