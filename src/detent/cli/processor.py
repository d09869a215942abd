"""Processor: what this CPU has that quantized models care for."""

import platform
from pathlib import Path

from detent.qdq.targets import get_target

__all__ = ["faster", "has_avx2", "has_vnni", "mismatch"]

CPUINFO = Path("/proc/cpuinfo")
X86 = ("x86_64", "amd64", "i386", "i686")
READ = 1 << 16


def has_vnni() -> bool | None:
    """Whether it multiplies bytes into 32 bits at once; None where that cannot be told.

    >>> has_vnni() in (True, False, None)
    True
    """
    flags = _flags()
    return None if flags is None else any(flag.endswith("_vnni") for flag in flags)


def has_avx2() -> bool | None:
    """Whether it has AVX2; None where that cannot be told.

    >>> has_avx2() in (True, False, None)
    True
    """
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
