"""Registry: the choice of a kernel for each problem.

A problem runs on its native kernel if there is one, else on the reference kernel. Both give equal bits, so the choice
only affects speed.
"""

import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import product

from detent.checks import FLOATS
from detent.convention import PRESETS
from detent.errors import UnsupportedError
from detent.formats import FORMATS
from detent.granularity import PerTensor
from detent.kernels import native
from detent.kernels.native_kernel import NativeKernel
from detent.kernels.problem import OPERATIONS, Kernel, Problem, find_operation
from detent.kernels.reference_kernel import ReferenceKernel
from detent.kernels.settings import current_kernels, get_num_threads
from detent.spec import QuantSpec
from detent.ste import Clipped, HardTanh, Identity, Tanh

__all__ = ["Capabilities", "capabilities", "find_kernel", "register_gpu_report"]

# Reductions and packing. They are not operations of a plan, and do not depend on conventions.
PARTS = ("error_sum", "minmax", "observe", "pack_bits", "unpack_bits")
NATIVE_NAME, REFERENCE_NAME = "native", "reference"


def find_kernel(problem: Problem, choice: str = "auto") -> Kernel:
    """Return the kernel that runs the problem."""
    find_operation(problem.operation)
    why_not = _why_not(problem, choice)
    if why_not is None:
        return NativeKernel(problem)
    if choice == "native":
        raise UnsupportedError(f"{why_not}: use_kernels('auto') runs the reference kernel instead")
    return ReferenceKernel(problem)


def _why_not(problem: Problem, choice: str) -> str | None:
    return (
        "DETENT_KERNELS or use_kernels selected the reference kernels"
        if choice == REFERENCE_NAME
        else native.refusal(problem)
    )


@dataclass(frozen=True)
class Capabilities:
    """CPU, number of threads, and the kernel of each operation in this installation.

    Attributes:
        level: instruction set of the native kernels; "none" if there are no native kernels.
        kernels: maps each operation to "native" or "reference", for float32 data, int8 codes and the onnx convention.
        table: maps each (operation, dtype, convention) to "native", or to the reason for the reference kernel.
        limits: maps each format, rounding and estimator without a native kernel to the reason.
        gpu: maps each GPU and dtype to "ready", or to the reason why torch operations run instead of GPU kernels; empty
            without a GPU, and before ``detent.torch`` is imported.

    >>> print(capabilities())  # doctest: +ELLIPSIS
    machine  ...
    """

    machine: str
    level: str
    threads: int
    kernels: Mapping[str, str]
    table: Mapping[tuple[str, str, str], str] = field(repr=False)
    limits: Mapping[str, str]
    gpu: Mapping[str, str]

    def __str__(self) -> str:
        facts = {"machine": self.machine, "instruction set": self.level, "threads": self.threads}
        lines = [*(f"{name:15}  {value}" for name, value in facts.items()), ""]
        lines.append(_columns("operation", *FLOATS))
        reasons: dict[str, None] = {}
        for operation in sorted(OPERATIONS):
            cells = []
            for dtype in FLOATS:
                entries = [self.table[operation, dtype, name] for name in PRESETS]
                native_count = entries.count(NATIVE_NAME)
                reasons.update(dict.fromkeys(why for why in entries if why != NATIVE_NAME))
                some = f"{native_count} of {len(entries)}"
                cells.append({0: REFERENCE_NAME, len(entries): NATIVE_NAME}.get(native_count, some))
            lines.append(_columns(operation, *cells))
        lines += [_columns(name, *(self.kernels[name] for _ in FLOATS)) for name in PARTS]
        lines += ["", f"conventions: {', '.join(PRESETS)}"]
        lines += [f"on the reference kernels: {why}" for why in (*reasons, *self.limits.values())]
        lines += [f"GPU kernels, {device}: {state}" for device, state in self.gpu.items()]
        return "\n".join(lines)


def _columns(name: str, *cells: str) -> str:
    return "".join((name.ljust(34), *(cell.ljust(11) for cell in cells))).rstrip()


def capabilities() -> Capabilities:
    """Return the CPU, the number of threads, and the kernel for each operation, data type and convention.

    >>> capabilities().kernels["quantize"] in ("native", "reference")
    True
    """
    choice = current_kernels()
    table = {
        (operation, dtype, name): _why_not(_sample(operation, dtype, QuantSpec("int8", convention=name)), choice)
        or NATIVE_NAME
        for operation, dtype, name in product(sorted(OPERATIONS), FLOATS, PRESETS)
    }
    kernels = {
        name: NATIVE_NAME if table[name, "float32", "onnx"] == NATIVE_NAME else REFERENCE_NAME
        for name in sorted(OPERATIONS)
    }
    is_native = choice != REFERENCE_NAME and native.WHY_NOT is None
    kernels |= dict.fromkeys(PARTS, NATIVE_NAME if is_native else REFERENCE_NAME)
    samples = {
        **{
            name: _sample("quantize", "float32", QuantSpec(form, symmetric=None if form.signed else False))
            for name, form in FORMATS.items()
            if name != "int1"  # int1 cannot be symmetric
        },
        "stochastic rounding": _sample("quantize", "float32", QuantSpec("int8", rounding="stochastic")),
        **{
            type(ste).__name__: Problem("fake_quantize_backward", _ONE, "float32", QuantSpec("int8"), ste, "propagate")
            for ste in (Identity(), Clipped(), HardTanh(), Tanh())
        },
    }
    limits = {}
    if kernels["quantize"] == NATIVE_NAME:  # otherwise the table contains the reason
        limits = {name: why for name, problem in samples.items() if (why := _why_not(problem, choice)) is not None}
    gpu = {} if _Reports.gpu is None else _Reports.gpu()
    return Capabilities(platform.machine(), native.current_level(), get_num_threads(), kernels, table, limits, gpu)


class _Reports:
    """Reports of higher layers; ``gpu`` is set when ``detent.torch`` is imported."""

    gpu: Callable[[], Mapping[str, str]] | None = None


def register_gpu_report(report: Callable[[], Mapping[str, str]]) -> None:
    """Set the function that returns ``Capabilities.gpu``."""
    _Reports.gpu = report


_ONE = PerTensor().tiling((1,))


def _sample(operation: str, dtype: str, spec: QuantSpec) -> Problem:
    return Problem(
        operation, _ONE, dtype, spec, Clipped() if OPERATIONS[operation].has_estimator else None, "propagate"
    )
