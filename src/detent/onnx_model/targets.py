"""Targets: what the runtimes and CPUs need of a quantized model, as data.

==================== ============= ============== ===========================================================
target               weights       depthwise      for
==================== ============= ============== ===========================================================
onnxruntime          uint8, zp 128 int8           every CPU: exact, because two signed bytes never saturate
onnxruntime-avx2     int8, |c|<=64 int8           CPUs without VNNI: faster, one bit less
onnxruntime-vnni     int8          int8           CPUs with VNNI; elsewhere its int16 accumulators saturate
openvino             uint8, zp 128 int8           every CPU
openvino-vnni        int8          int8           CPUs with VNNI
==================== ============= ============== ===========================================================

Codes shifted by 128 together with their zero point mean the same numbers. AVX2 multiplies an unsigned by a signed byte
and adds two products in 16 bits, which saturates if weights are signed and large; unsigned weights are widened first by
the runtimes. Signed 8-bit activations are shifted as well: their kernels are slow. Activations of fewer than 8 bits are
stored in 8 behind a Clip, weights of fewer than 8 in 4 or 8.
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
MIN_ACTIVATION_BITS = 8


class Container(NamedTuple):
    """How codes are stored: the ONNX type, and what is added to codes and zero points."""

    kind: int
    shift: int = 0


@dataclass(frozen=True)
class Target:
    """A runtime, on some CPUs, and how it needs codes stored.

    Attributes:
        unsigned_weights: whether signed 8-bit weights of dense layers are stored as unsigned ones.
        limit: the largest magnitude of a weight's code, None for all that the format has.
        needs_vnni: whether int16 accumulators saturate on CPUs without VNNI.

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
        """The spec with the codes that the target takes; SpecError if it limits codes and the spec is affine."""
        if self.limit is None or not spec.format.is_integer or max(-spec.qmin, spec.qmax) <= self.limit:
            return spec
        if not spec.symmetric:
            raise SpecError(f"target {self.name!r} takes symmetric weights, got {spec}")
        return spec.replace(qmin=-self.limit, qmax=self.limit)

    def weight_container(self, format: Format, *, depthwise: bool = False, least: int = 4) -> Container:
        """How codes of a weight are stored, in a type of at least ``least`` bits."""
        kind = element_type(format, least)
        if kind == TensorProto.INT8 and self.unsigned_weights and not depthwise:
            return Container(TensorProto.UINT8, 128)
        return Container(kind)

    def activation_container(self, format: Format, *, least: int = MIN_ACTIVATION_BITS) -> Container:
        """How codes of an activation are stored, in a type of at least ``least`` bits.

        ONNX Runtime puts operators of its own between quantizers, and these take no type of fewer than 8 bits.
        """
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
    """The target of that name; a ``Target`` is returned as it is."""
    if isinstance(value, Target):
        return value
    if value not in TARGETS:
        raise SpecError(f"unknown target {value!r}{closest(str(value), TARGETS)} expected {', '.join(TARGETS)}")
    return TARGETS[value]


# This CPU

CPUINFO = Path("/proc/cpuinfo")
X86 = ("x86_64", "amd64", "i386", "i686")
CPUINFO_BYTES = 1 << 16  # enough for the first CPU


def has_vnni() -> bool | None:
    """Whether this CPU multiplies bytes into 32-bit sums (VNNI); None if unknown."""
    flags = _flags()
    return None if flags is None else any(flag.endswith("_vnni") for flag in flags)


def has_avx2() -> bool | None:
    """Whether this CPU has AVX2; None if unknown."""
    flags = _flags()
    return None if flags is None else "avx2" in flags


def _flags() -> list[str] | None:
    if platform.machine().lower() not in X86:
        return None
    try:
        with CPUINFO.open(encoding="utf-8", errors="replace") as file:
            lines = file.read(CPUINFO_BYTES).splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), None)


def faster(target: str, vnni: bool | None, avx2: bool | None) -> str:
    """Advise a target that is faster on a CPU with VNNI or AVX2 than the chosen one; "" if there is none."""
    if target != "onnxruntime":
        return ""
    if vnni:
        return f"this CPU has VNNI: --target {target}-vnni computes the same codes faster here, but only on such CPUs"
    if vnni is False and avx2:
        return f"this CPU has AVX2 and no VNNI: --target {target}-avx2 is faster here, with one bit less in weights"
    return ""


def mismatch(target: str, vnni: bool | None = None) -> str:
    """Why a target does not suit this CPU, with or without VNNI; "" if it does."""
    chosen = get_target(target)
    needs_vnni, limit, runtime = chosen.needs_vnni, chosen.limit, chosen.runtime
    if (needs_vnni or limit is not None) and platform.machine().lower() not in X86:
        return f"target {target} is made for x86 CPUs, this one is {platform.machine()}: use --target {runtime}"
    if needs_vnni and vnni is False:
        return (
            f"target {target} needs a CPU with VNNI, this one has none: its int16 accumulators saturate here; "
            f"--target {runtime} is exact on every CPU"
        )
    if limit is not None and vnni:
        return (
            f"target {target} drops one weight bit for CPUs without VNNI; this CPU has VNNI: "
            f"use --target {runtime}-vnni"
        )
    return ""
