"""Targets: how codes must be stored for each runtime and CPU.

==================== ============= ============== ================================================================
target               7-bit weights 8-bit weights  for
==================== ============= ============== ================================================================
onnxruntime          int8          uint8, zp 128  every CPU, always exact; ``prefer`` chooses 7 or 8 bits
onnxruntime-avx2     int8          not used       every CPU, always exact
onnxruntime-vnni     int8          int8           CPUs with VNNI; elsewhere int16 accumulators saturate
openvino             int8          uint8, zp 128  every CPU, always exact; ``prefer`` chooses 7 or 8 bits
openvino-vnni        int8          int8           CPUs with VNNI
==================== ============= ============== ================================================================

AVX2 multiplies unsigned by signed bytes and adds two products into an int16 accumulator. The sum fits if codes of
weights are between -64 and 64 ("7 bits": 2 * 255 * 64 < 2^15); with larger codes, it can saturate. Kernels for unsigned
weights widen the weights first. These kernels are exact, but take up to three times as long. If codes and zero point
are both shifted by 128, they represent the same values. Weights of depthwise convolutions and embedding tables are int8
for every target: their kernels do not saturate.

Integer kernels read weights in bytes. For them, a weight of up to 4 bits is stored as 4-bit codes, which a Cast widens
to 8 bits (``spec.reads_bytes``). ONNX Runtime and OpenVINO compute this Cast once, when they load the model. Without
the Cast, ONNX Runtime would run a matmul in float, and dequantize its weight in every run.

Signed 8-bit activations are also shifted by 128, because kernels for signed activations are slow. Activations of fewer
than 8 bits are clipped and stored in 8 bits. Weights of fewer than 8 bits are stored in 4 or 8 bits.
"""

import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NamedTuple

from onnx import TensorProto

from detent.errors import SpecError, closest
from detent.formats import Format
from detent.onnx_model.graph import WIDER, element_type
from detent.spec import QuantSpec

__all__ = [
    "PREFER_SPEED",
    "TARGETS",
    "Container",
    "Target",
    "faster",
    "get_target",
    "has_vnni",
    "largest_code",
    "mismatch",
    "vnni_hint",
]

Runtime = Literal["onnxruntime", "openvino"]
BYTE = 8  # bits
MIN_ACTIVATION_BITS = 8
MAX_EXACT_CODE = 64  # largest weight code for which two products with 8-bit activations fit in an int16 accumulator


class Container(NamedTuple):
    """Storage of codes: the ONNX type, the shift that is added to codes and zero points, and the type that is read.

    If ``read_as`` is not 0, a Cast converts the stored codes to this type, and zero points have this type.
    """

    kind: int
    shift: int = 0
    read_as: int = 0


@dataclass(frozen=True)
class Target:
    """A runtime on a kind of CPU, and how codes are stored for it.

    Attributes:
        name: name in ``TARGETS``.
        runtime: the runtime that loads the file.
        unsigned_weights: whether dense layers store weights with codes above 64 as unsigned codes.
        limit: largest magnitude of a weight's code, or None for no limit.
        needs_vnni: whether the file needs a CPU with VNNI; on other CPUs, int16 accumulators saturate.

    >>> from detent.formats import get_format
    >>> target, spec = get_target("onnxruntime"), QuantSpec("int8")
    >>> target.weight_container(spec), target.weight_container(spec, depthwise=True)
    (Container(kind=2, shift=128, read_as=0), Container(kind=3, shift=0, read_as=0))
    >>> target.weight_container(QuantSpec("int4"), as_bytes=True)
    Container(kind=22, shift=0, read_as=3)
    >>> target.fast_weight_spec(spec).qmax, target.weight_container(target.fast_weight_spec(spec))
    (64, Container(kind=3, shift=0, read_as=0))
    >>> target.activation_container(get_format("int8"))
    Container(kind=2, shift=128, read_as=0)
    >>> get_target("onnxruntime-avx2").weight_spec(spec).qmax
    64
    """

    name: str
    runtime: Runtime
    unsigned_weights: bool = True
    limit: int | None = None
    needs_vnni: bool = False

    def weight_spec(self, spec: QuantSpec) -> QuantSpec:
        """Limit a weight's spec to the codes of this target; raise SpecError if an affine spec exceeds these codes."""
        if self.limit is None or not spec.format.is_integer or largest_code(spec) <= self.limit:
            return spec
        if not spec.symmetric:
            raise SpecError(f"target {self.name!r} needs symmetric weights, got {spec}: use a symmetric spec")
        return spec.replace(qmin=-self.limit, qmax=self.limit)

    def fast_weight_spec(self, spec: QuantSpec) -> QuantSpec:
        """Limit a symmetric int8 spec to codes that fast kernels multiply exactly; return other specs unchanged."""
        is_wide = spec.format.is_integer and spec.bits == BYTE and largest_code(spec) > MAX_EXACT_CODE
        if not (self.unsigned_weights and is_wide and spec.symmetric):
            return spec
        return spec.replace(qmin=-MAX_EXACT_CODE, qmax=MAX_EXACT_CODE)

    def weight_container(
        self, spec: QuantSpec, *, depthwise: bool = False, min_bits: int = 4, as_bytes: bool = False
    ) -> Container:
        """Choose the storage of a weight's codes, in a type of at least ``min_bits`` bits.

        If ``as_bytes``, 4-bit codes are widened to 8 bits before they are read.
        """
        kind = element_type(spec.format, min_bits)
        if as_bytes and kind in WIDER:
            return Container(kind, read_as=WIDER[kind])
        is_wide = kind == TensorProto.INT8 and largest_code(spec) > MAX_EXACT_CODE
        if is_wide and self.unsigned_weights and not depthwise:
            return Container(TensorProto.UINT8, 128)
        return Container(kind)

    def activation_container(self, format: Format, *, min_bits: int = MIN_ACTIVATION_BITS) -> Container:
        """Choose the storage of an activation's codes, in a type of at least ``min_bits`` bits.

        The default is 8 bits: between Q/DQ nodes, ONNX Runtime may insert operators that do not support smaller types.
        """
        kind = element_type(format, min_bits)
        return Container(TensorProto.UINT8, 128) if kind == TensorProto.INT8 else Container(kind)


def largest_code(spec: QuantSpec) -> int:
    """Return the largest magnitude of a spec's codes."""
    return int(max(-spec.qmin, spec.qmax))


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
    """Return the target with the name ``value``; a ``Target`` is returned unchanged."""
    if isinstance(value, Target):
        return value
    if value not in TARGETS:
        raise SpecError(f"unknown target {value!r}{closest(str(value), TARGETS)} expected {', '.join(TARGETS)}")
    return TARGETS[value]


# This CPU

CPUINFO = Path("/proc/cpuinfo")
X86 = ("x86_64", "amd64", "i386", "i686")
CPUINFO_BYTES = 1 << 16  # this many bytes are read, enough for the first CPU


def has_vnni() -> bool | None:
    """Return whether this CPU has VNNI (exact sums of byte products in 32 bits); None means unknown."""
    flags = _flags()
    return None if flags is None else any(flag.endswith("_vnni") for flag in flags)


def _flags() -> list[str] | None:
    if platform.machine().lower() not in X86:
        return None
    try:
        with CPUINFO.open(encoding="utf-8", errors="replace") as file:
            lines = file.read(CPUINFO_BYTES).splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), None)


PREFER_SPEED = "--prefer speed (weights of 7 bits)"


def faster(target: Target, specs: Iterable[QuantSpec], *, vnni: bool | None) -> str:
    """Return the command-line option that makes a file faster, or "" if there is no such option.

    ``specs`` are the weight specs of the file's dense layers. ``vnni`` says whether the CPU has VNNI; None means
    unknown.
    """
    if not any(target.weight_container(spec).shift for spec in specs):
        return ""
    return f"--target {target.name}-vnni (only for CPUs with VNNI)" if vnni else PREFER_SPEED


def mismatch(target: str, vnni: bool | None = None) -> str:
    """Return why a target does not suit this CPU, or "" if the target suits this CPU.

    ``vnni`` says whether the CPU has VNNI; None means unknown.
    """
    chosen = get_target(target)
    needs_vnni, runtime = chosen.needs_vnni, chosen.runtime
    if (needs_vnni or chosen.limit is not None) and platform.machine().lower() not in X86:
        return f"target {target} is for x86 CPUs, but this CPU is {platform.machine()}: use --target {runtime}"
    if needs_vnni and vnni is False:
        return (
            f"target {target} needs a CPU with VNNI, but this CPU lacks it, so int16 accumulators would saturate: use "
            f"--target {runtime}, which suits every CPU"
        )
    return ""


def vnni_hint(target: str, vnni: bool | None = None) -> str:
    """Return a hint if a target limits weights to 7 bits, but this CPU has VNNI; otherwise ""."""
    chosen = get_target(target)
    if chosen.limit is None or not vnni:
        return ""
    return (
        f"target {target} stores weights with 7 bits. For CPUs with VNNI, such as this one, --target "
        f"{chosen.runtime}-vnni stores 8 bits: usually more accurate, not always faster"
    )
