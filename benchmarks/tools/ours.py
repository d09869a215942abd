"""detent: a plan with a preallocated output, on all threads, on one thread, and in torch's convention."""

from collections.abc import Callable, Iterator

import numpy as np
from case import Array, Case, Tool

import detent as dt
from detent.kernels import minmax

THREADS = dt.get_num_threads()
TORCH_OPERATIONS = ("fake_quantize", "fake_quantize_backward")


def tools_for(case: Case) -> Iterator[Tool]:
    """Yield detent's variants for a case."""
    run, answer = work(case)
    several = THREADS > 1 and case.dtype == "float32"
    yield Tool("detent", run, answer, prepare=lambda: dt.set_num_threads(THREADS))
    if several:
        yield Tool("detent, 1 thread", run, answer, prepare=lambda: dt.set_num_threads(1))
    if case.operation in TORCH_OPERATIONS and case.dtype == "float32":
        run, answer = work(case, "torch")
        yield Tool("detent, torch's convention", run, answer, "torch", lambda: dt.set_num_threads(THREADS))


def work(case: Case, convention: str = "onnx") -> tuple[Callable[[], object], Callable[[], list[Array]]]:
    """Return two functions: the function to time, and a function that returns its result."""
    if case.operation == "min-max":
        return _minmax(case)
    if case.operation == "observe + fake_quantize":
        return _observe(case, convention)
    operation = case.operation.split()[0]
    params, out, inputs = case.params(convention), np.empty(case.shape, case.real), [case.x]
    ste = None
    if operation == "quantize":
        out = np.empty(case.shape, np.int8) if case.bits == 8 else np.empty(case.size // 2, np.uint8)
    elif operation == "dequantize":
        inputs = [case.codes]
    elif operation == "fake_quantize_backward":
        inputs, ste = [case.g, case.x], dt.ste.Clipped()
    plan = dt.Plan.select(operation, shape=case.shape, dtype=case.dtype, spec=case.spec(convention), ste=ste)
    plan.check(*inputs, params, out=out)
    return lambda: plan.run(*inputs, params, out=out), lambda: [out]


def _minmax(case: Case) -> tuple[Callable[[], object], Callable[[], list[Array]]]:
    x, tiling, last = case.x, case.tiling, []

    def run() -> None:
        last[:] = minmax(x, tiling)[:2]

    return run, lambda: [np.asarray(bound) for bound in last]


def _observe(case: Case, convention: str) -> tuple[Callable[[], object], Callable[[], list[Array]]]:
    x, spec, out = case.x, case.spec(convention), np.empty_like(case.x)
    return lambda: dt.fake_quantize_dynamic(x, spec, out=out), lambda: [out]
