"""The registry: which kernel runs a problem, and why.

Native kernels run where they exist, reference kernels elsewhere; ``capabilities`` says which and why. Both give the
same bits, so that the choice is a matter of speed alone.
"""

import platform
from collections.abc import Mapping
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

__all__ = ["Capabilities", "capabilities", "find_kernel"]


def find_kernel(problem: Problem, choice: str = "auto") -> Kernel:
    """The kernel that runs the problem.

    Raises:
        UnsupportedError: there is no such operation, or no native kernel where one is asked for.

    >>> from detent.granularity import PerTensor
    >>> from detent.spec import QuantSpec
    >>> problem = Problem("quantize", PerTensor().tiling((4,)), "float32", QuantSpec("int8"), None, "raise")
    >>> find_kernel(problem, "reference").backend
    'reference'
    """
    find_operation(problem.operation)
    why_not = "the reference kernels were asked for" if choice == "reference" else native.refusal(problem)
    if why_not is None:
        return NativeKernel(problem)
    if choice == "native":
        raise UnsupportedError(f"{why_not}: use_kernels('auto') runs the reference kernel instead")
    return ReferenceKernel(problem)


# What is not an operation of a plan: reductions and packing run on data of any convention.
PARTS = ("error_sum", "minmax", "observe", "pack_bits", "unpack_bits")
NATIVE_NAME, REFERENCE_NAME = "native", "reference"


@dataclass(frozen=True)
class Capabilities:
    """What this installation can do.

    Attributes:
        machine: the processor family.
        level: the CPU level of the native kernels, "none" without them.
        threads: how many threads kernels may use.
        kernels: the backend that runs each operation on float32 data as int8 with the onnx convention.
        table: for (operation, dtype, convention) "native", or why the reference runs it.
        limits: what has no native kernel whatever the operation's data, and why.

    >>> print(capabilities())  # doctest: +ELLIPSIS
    machine  ...
    """

    machine: str
    level: str
    threads: int
    kernels: Mapping[str, str]
    table: Mapping[tuple[str, str, str], str] = field(repr=False)
    limits: Mapping[str, str]

    def __str__(self) -> str:
        lines = [f"machine  {self.machine}", f"level    {self.level}", f"threads  {self.threads}", ""]
        widths = (34, *(11 for _ in FLOATS))
        lines.append(_columns(("operation", *FLOATS), widths))
        reasons: dict[str, None] = {}
        for operation in sorted(OPERATIONS):
            cells = []
            for dtype in FLOATS:
                found = {name: self.table[operation, dtype, name] for name in PRESETS}
                fast = [name for name, why in found.items() if why == NATIVE_NAME]
                reasons.update(dict.fromkeys(why for why in found.values() if why != NATIVE_NAME))
                cells.append(
                    NATIVE_NAME
                    if len(fast) == len(found)
                    else f"{len(fast)} of {len(found)}"
                    if fast
                    else REFERENCE_NAME
                )
            lines.append(_columns((operation, *cells), widths))
        lines += [_columns((name, *(self.kernels[name] for _ in FLOATS)), widths) for name in PARTS]
        lines += ["", f"by the rules of: {', '.join(PRESETS)}"]
        lines += [f"on the reference kernels: {why}" for why in (*reasons, *self.limits.values())]
        return "\n".join(lines)


def _columns(cells: tuple[str, ...], widths: tuple[int, ...]) -> str:
    return "".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


def capabilities() -> Capabilities:
    """What this installation can do: processor, threads, and the kernel of each operation, data type and convention.

    >>> capabilities().kernels["quantize"] in ("native", "reference")
    True
    """
    table = {
        (operation, dtype, name): _why_not(_sample(operation, dtype, QuantSpec("int8", convention=name))) or NATIVE_NAME
        for operation, dtype, name in product(sorted(OPERATIONS), FLOATS, PRESETS)
    }
    kernels = {
        name: NATIVE_NAME if table[name, "float32", "onnx"] == NATIVE_NAME else REFERENCE_NAME
        for name in sorted(OPERATIONS)
    }
    asked = current_kernels() == REFERENCE_NAME
    kernels |= dict.fromkeys(PARTS, REFERENCE_NAME if asked or native.WHY_NOT is not None else NATIVE_NAME)
    samples = {
        **{
            name: _sample("quantize", "float32", QuantSpec(form, symmetric=None if form.signed else False))
            for name, form in FORMATS.items()
            if name != "int1"  # has no symmetric spec
        },
        "stochastic rounding": _sample("quantize", "float32", QuantSpec("int8", rounding="stochastic")),
        **{
            type(ste).__name__: Problem("fake_quantize_backward", _ONE, "float32", QuantSpec("int8"), ste, "propagate")
            for ste in (Identity(), Clipped(), HardTanh(), Tanh())
        },
    }
    limits = {name: why for name, problem in samples.items() if (why := _why_not(problem)) is not None}
    if kernels["quantize"] == REFERENCE_NAME:
        limits = {}  # the table says it all
    return Capabilities(platform.machine(), native.current_level(), get_num_threads(), kernels, table, limits)


_ONE = PerTensor().tiling((1,))


def _sample(operation: str, dtype: str, spec: QuantSpec) -> Problem:
    return Problem(
        operation, _ONE, dtype, spec, Clipped() if OPERATIONS[operation].has_estimator else None, "propagate"
    )


def _why_not(problem: Problem) -> str | None:
    if current_kernels() == REFERENCE_NAME:
        return "the reference kernels were asked for"
    return native.refusal(problem)
