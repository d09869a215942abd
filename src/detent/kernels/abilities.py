"""What this installation can do: which kernel runs which operation on which data by which rules, and why."""

import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product

from detent.convention import PRESETS
from detent.formats import FORMATS
from detent.granularity import PerTensor
from detent.kernels import native
from detent.kernels.choice import current_kernels
from detent.kernels.problem import Problem
from detent.kernels.registry import OPERATIONS, get_num_threads
from detent.kernels.rules import DTYPES
from detent.spec import QuantSpec
from detent.ste import Clipped, HardTanh, Identity, Tanh

__all__ = ["Capabilities", "capabilities"]

# What is not an operation of a plan: reductions and packing run on data of any convention.
PARTS = ("error_sum", "minmax", "observe", "pack_bits", "unpack_bits")
NATIVE, REFERENCE = "native", "reference"
_ESTIMATED = frozenset(
    name for name in OPERATIONS if name.endswith(("quantize_backward", "masked", "learned_backward"))
)


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
        widths = (34, *(11 for _ in DTYPES))
        lines.append(_columns(("operation", *DTYPES), widths))
        reasons: dict[str, None] = {}
        for operation in OPERATIONS:
            cells = []
            for dtype in DTYPES:
                found = {name: self.table[operation, dtype, name] for name in PRESETS}
                fast = [name for name, why in found.items() if why == NATIVE]
                reasons.update(dict.fromkeys(why for why in found.values() if why != NATIVE))
                cells.append(
                    NATIVE if len(fast) == len(found) else f"{len(fast)} of {len(found)}" if fast else REFERENCE
                )
            lines.append(_columns((operation, *cells), widths))
        lines += [_columns((name, *(self.kernels[name] for _ in DTYPES)), widths) for name in PARTS]
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
        (operation, dtype, name): _why_not(_sample(operation, dtype, QuantSpec("int8", convention=name))) or NATIVE
        for operation, dtype, name in product(OPERATIONS, DTYPES, PRESETS)
    }
    kernels = {name: NATIVE if table[name, "float32", "onnx"] == NATIVE else REFERENCE for name in OPERATIONS}
    asked = current_kernels() == REFERENCE
    kernels |= dict.fromkeys(PARTS, REFERENCE if asked or native.WHY_NOT is not None else NATIVE)
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
    if kernels["quantize"] == REFERENCE:
        limits = {}  # the table says it all
    return Capabilities(platform.machine(), native.current_level(), get_num_threads(), kernels, table, limits)


_ONE = PerTensor().tiling((1,))


def _sample(operation: str, dtype: str, spec: QuantSpec) -> Problem:
    return Problem(operation, _ONE, dtype, spec, Clipped() if operation in _ESTIMATED else None, "propagate")


def _why_not(problem: Problem) -> str | None:
    if current_kernels() == REFERENCE:
        return "the reference kernels were asked for"
    return native.refusal(problem)
