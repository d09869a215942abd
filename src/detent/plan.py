"""Plan: an operation that is selected and checked once, and run many times.

::

    select(operation, shape, dtype, spec)  ->  Plan     cached, immutable, safe to share between threads
    plan.can_implement(x, params, out)                  whether check accepts these operands
    plan.run(x, params, out=out)                        runs; the only check is for NaN, with nan="raise"

The public operators of ``detent.ops`` call ``find_plan``, ``check`` and ``run``. ``check`` rejects arrays of a wrong
shape or type, params of a different spec, and ``out`` arrays that cannot hold the result.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, cast

import numpy as np
from numpy.typing import DTypeLike, NDArray

from detent.checks import FLOATS, as_array, as_integer, as_shape, compute_dtype, float_dtype
from detent.errors import DetentError, DtypeError, OutError, ParamsError, ShapeError, SpecError, closest
from detent.formats import Format
from detent.granularity import Tiling
from detent.kernels import (
    OPERATIONS,
    Kernel,
    NaNPolicy,
    Operation,
    Problem,
    Result,
    current_kernels,
    find_kernel,
    find_operation,
)
from detent.packing import packed_size
from detent.params import QuantParams
from detent.spec import QuantSpec, code_dtype, get_spec, short_spec
from detent.ste import Clipped, Custom, Estimator, EstimatorLike, Identity, Tanh, get_estimator
from detent.tables import counted

__all__ = ["NaNPolicy", "Plan", "PrecisionGuarantee", "find_plan"]

Array = NDArray[Any]
STEP_LIMIT = 1 << 32  # the step of stochastic rounding is one 32-bit word of the Philox counter
MAX_FLOAT = sys.float_info.max
MAX_PLANS = 4096  # size of the cache; a full cache is emptied


@dataclass(frozen=True)
class PrecisionGuarantee:
    """Guarantees of a plan: the dtypes of its arithmetic and its sums, and which results have equal bits.

    ``deterministic`` means that every run on one machine gives equal bits. ``bit_stable`` means that the bits are equal
    on every machine, with any thread count and any memory layout.

    >>> Plan.select("quantize", shape=(4,), dtype="float16", spec="int8").precision_guarantee.math
    'float32'
    """

    math: str
    accumulator: str = "float64"
    deterministic: bool = True
    bit_stable: bool = True


@dataclass(frozen=True, repr=False)
class Plan:
    """Operation on arrays of one shape, dtype and spec; make it with ``select``.

    ``dtype`` is the float type of the data (for "dequantize", of the result). ``nan`` is the policy for NaN.

    >>> import detent as dt, numpy as np
    >>> plan = dt.Plan.select("fake_quantize", shape=(3,), dtype="float32", spec="int8")
    >>> plan.run(np.array([0.3, 0.5, 1.5], np.float32), dt.QuantParams.int8_symmetric())
    array([0., 0., 2.], dtype=float32)
    """

    operation: str
    shape: tuple[int, ...]
    dtype: str
    spec: QuantSpec
    ste: Estimator | None
    nan: NaNPolicy
    tiling: Tiling
    kernel: Kernel

    @classmethod
    def select(
        cls,
        operation: str,
        *,
        shape: tuple[int, ...],
        dtype: DTypeLike,
        spec: QuantSpec | Format | str,
        ste: EstimatorLike = None,
        nan: NaNPolicy | None = None,
    ) -> "Plan":
        """Select the plan for an operation; equal arguments return the cached plan.

        Raises:
            UnsupportedError: unknown operation.
            ShapeError: the granularity is not possible for the shape.
            DtypeError: dtype is not a float type.

        >>> Plan.select("quantize", shape=(4,), dtype="float32", spec="int8").sku  # doctest: +ELLIPSIS
        'quantize/float32/int8/tensor/symmetric/onnx/...'
        """
        row, spec = find_operation(operation), get_spec(spec)
        if ste is not None and not row.has_estimator:
            raise SpecError(f"got ste={ste!r}, but {operation} has no estimator: leave ste out")
        estimator = get_estimator(ste, spec.convention) if row.has_estimator else None
        if "mask" in row.outputs and not isinstance(estimator, Identity | Clipped):
            raise SpecError(
                f"got {estimator!r}, but a mask can only represent the estimators Identity and Clipped, whose gradient "
                "is 0 or 1: use fake_quantize_backward"
            )
        policy = row.nan[0] if nan is None else nan
        if policy not in row.nan:
            raise SpecError(
                f"unknown NaN policy {nan!r} for {operation}{closest(str(nan), row.nan)} expected {', '.join(row.nan)}"
            )
        name = float_dtype(dtype, "the data").name
        key = (operation, as_shape(shape), name, spec, estimator, policy, current_kernels())
        if isinstance(estimator, Custom):  # not cached: a callable may reference large arrays
            return _make_plan(*key)
        return _PLANS.get(key) or _remember(key, _make_plan(*key))

    def __repr__(self) -> str:
        ste = "" if self.ste in (None, get_estimator(None, self.spec.convention)) else f", ste={self.ste!r}"
        return (
            f"Plan({self.operation!r}, shape={self.shape}, dtype={self.dtype!r}, spec={short_spec(self.spec)}{ste}, "
            f"nan={self.nan!r}, kernel={self.kernel.backend!r})"
        )

    @property
    def sku(self) -> str:
        """A name for logs and tables: operation, dtype, spec and backend."""
        return f"{self.operation}/{self.dtype}/{self.spec}/{self.kernel.backend}"

    @property
    def workspace_size(self) -> int:
        """The number of bytes of scratch memory that the caller must provide: always 0."""
        return 0

    @property
    def precision_guarantee(self) -> PrecisionGuarantee:
        """The guarantees of the plan's arithmetic.

        With the estimator Tanh, ``bit_stable`` is False, because the platform's tanh differs between machines.
        """
        return PrecisionGuarantee(self._compute, bit_stable=not isinstance(self.ste, Tanh))

    @cached_property
    def _compute(self) -> str:
        return str(compute_dtype(FLOATS[self.dtype]).name)

    @cached_property
    def _row(self) -> Operation:
        return OPERATIONS[self.operation]

    @cached_property
    def _operands(self) -> tuple[str, ...]:
        return (*self._row.inputs, "params", "out")

    def can_implement(self, *operands: Array | QuantParams | None, out: Array | None = None) -> bool:
        """Return whether ``check`` accepts these operands: the inputs, the parameters and optionally ``out``."""
        try:
            self.check(*operands, out=out)
        except DetentError:
            return False
        return True

    def check(self, *operands: Array | QuantParams | None, out: Array | None = None) -> None:
        """Raise unless these operands are valid for ``run``.

        >>> import detent as dt, numpy as np
        >>> plan = dt.Plan.select("quantize", shape=(3,), dtype="float32", spec="int8")
        >>> plan.check(np.zeros(4, np.float32), dt.QuantParams.int8_symmetric())
        Traceback (most recent call last):
        ...
        detent.errors.ShapeError: x has shape (4,), expected (3,): pass an array of shape \
(3,), or select a plan for shape (4,)
        """
        names = self._operands
        given = dict(zip(names, operands, strict=False))
        if not len(names) - 1 <= len(operands) <= len(names):
            raise DtypeError(
                f"{self.operation} needs the operands {', '.join(names[:-1])} and optionally out, got "
                f"{counted(len(operands), 'operand')}"
            )
        inputs = {name: given[name] for name in names[:-2]}
        for name, array in inputs.items():
            self._check_input(name, array)
        self.check_params(given["params"])
        target = given.get("out") if out is None else out
        if target is not None:
            check_out(target, self._accepted_outputs, inputs)

    def run(
        self, *operands: Array | QuantParams, out: Array | None = None, step: int = 0, grad_scale: float | None = None
    ) -> Result:
        """Run the operation on operands that ``check`` accepts.

        Other operands give undefined results or exceptions, but memory outside the arrays is never accessed.

        Args:
            *operands: the inputs and the parameters.
            out: array for the result; None allocates it.
            step: counter for stochastic rounding; each step has its own random numbers.
            grad_scale: factor for the gradients of scale and zero point.
        """
        *inputs, params = operands
        if not isinstance(params, QuantParams):
            raise DtypeError(
                f"got {type(params).__name__} as last operand of run, expected the operands "
                f"{', '.join(self._operands[:-1])}: pass out as a keyword argument"
            )
        scale, zero_point = params.compute_arrays(self._compute)
        if isinstance(self.ste, Custom):
            return self._custom(self.ste, inputs, params, out, step, grad_scale)  # type: ignore[arg-type]  # as above
        return self.kernel.run(inputs, scale, zero_point, out, step, grad_scale)  # type: ignore[arg-type]  # as above

    def _custom(
        self,
        ste: Custom,
        inputs: list[Array],
        params: QuantParams,
        out: Array | None,
        step: int,
        grad_scale: float | None,
    ) -> Result:
        """Return the gradient of x that the callable ``ste`` computes.

        For learned parameters, also return the gradients of scale and zero point, which the kernel computes.
        """
        g, x = inputs
        gx = as_array("the result of ste", ste.function(g, x, params))  # type: ignore[arg-type]  # anything
        if gx.shape != g.shape or gx.dtype != g.dtype:
            raise DtypeError(
                f"ste returned an array of dtype {gx.dtype} and shape {gx.shape}, expected {g.dtype} of shape {g.shape}"
            )
        passed = Plan.select(self.operation, shape=self.shape, dtype=self.dtype, spec=self.spec, ste="identity")
        if len(self._row.outputs) == 1:
            return passed.run(gx, x, params, out=out, step=step)
        _, *others = passed.run(g, x, params, step=step, grad_scale=grad_scale)
        return gx.copy(), others[0], others[1]

    @cached_property
    def _accepted_inputs(self) -> Mapping[str, list[tuple[np.dtype[Any], tuple[int, ...]]]]:
        """A dict that maps each input to its valid (dtype, shape) pairs; codes may also be a packed uint8 buffer."""
        byte: np.dtype[Any] = np.dtype("uint8")
        count = prod(self.shape)
        usual = [(FLOATS[self.dtype], self.shape)]
        codes = [(code_dtype(self.spec), self.shape), (byte, (packed_size(count, self.spec.bits),))]
        mask: list[tuple[np.dtype[Any], tuple[int, ...]]] = [(byte, (packed_size(count, 1),))]
        return {"x": usual, "g": usual, "codes": codes, "mask": mask}

    def _check_input(self, name: str, array: object) -> None:
        if not isinstance(array, np.ndarray):
            raise DtypeError(f"{name} must be a NumPy array, got {type(array).__name__}")
        accepted = self._accepted_inputs[name]
        if (array.dtype, array.shape) in accepted:
            return
        dtype, shape = accepted[0]
        if array.dtype != dtype:
            raise DtypeError(
                f"{name} has dtype {array.dtype}, expected {dtype}: convert {name}, or select a plan for its dtype"
            )
        raise ShapeError(
            f"{name} has shape {array.shape}, expected {shape}: pass an array of shape {shape}, or select a plan for "
            f"shape {array.shape}"
        )

    def check_params(self, params: object) -> None:
        """Raise unless the parameters match the plan's spec and shape."""
        check_is_params(params)
        params = cast("QuantParams", params)
        if params.spec != self.spec:
            raise ParamsError(
                f"got params with {params.spec!r}, but the plan has {self.spec!r}: select a plan with the params' spec"
            )
        if params.scale.shape != self.tiling.scale_shape:
            raise ShapeError(
                f"got params with scales of shape {params.scale.shape}, expected {self.tiling.scale_shape} for data of "
                f"shape {self.shape} and granularity {self.spec.granularity}: make params from x, or reshape x"
            )
        if params.scale.dtype == np.float64 and self.dtype != "float64":
            check_narrowed(params.scale)

    @cached_property
    def _accepted_outputs(self) -> list[tuple[np.dtype[Any], tuple[int, ...]]]:
        if "gs" in self._row.outputs:
            raise OutError(f"{self.operation} returns three arrays and does not support out=: omit it")
        if "codes" not in self._row.outputs:
            return [(FLOATS[self.dtype], self.shape)]
        packed = packed_size(prod(self.shape), self.spec.bits)
        return [(code_dtype(self.spec), self.shape), (np.dtype("uint8"), (packed,))]


# Cached plans. A key has the arguments of ``find_plan``, either as given or as ``select`` resolves them. Plans with a
# callable as estimator are not cached.
_PLANS: dict[tuple[object, ...], Plan] = {}


def find_plan(
    operation: str,
    shape: tuple[int, ...],
    dtype: np.dtype[Any] | str,
    spec: QuantSpec,
    ste: EstimatorLike = None,
    nan: NaNPolicy | None = None,
) -> Plan:
    """Return the plan of ``Plan.select``, with a single cache lookup if the same arguments were used before."""
    key = (operation, shape, dtype, spec, ste, nan, current_kernels())
    try:
        plan = _PLANS.get(key)
    except TypeError:  # an unhashable argument
        return Plan.select(operation, shape=shape, dtype=dtype, spec=spec, ste=ste, nan=nan)
    if plan is None:
        plan = Plan.select(operation, shape=shape, dtype=dtype, spec=spec, ste=ste, nan=nan)
        if not isinstance(plan.ste, Custom):
            _remember(key, plan)
    return plan


def _make_plan(
    operation: str,
    shape: tuple[int, ...],
    dtype: str,
    spec: QuantSpec,
    ste: Estimator | None,
    nan: NaNPolicy,
    kernels: str,
) -> Plan:
    tiling = spec.granularity.tiling(shape)
    problem = Problem(operation, tiling, dtype, spec, ste, nan)
    # A callable estimator is applied by the plan, which uses the kernel of Identity.
    runnable = replace(problem, ste=Identity()) if isinstance(ste, Custom) else problem
    return Plan(operation, shape, dtype, spec, ste, nan, tiling, find_kernel(runnable, kernels))


def _remember(key: tuple[object, ...], plan: Plan) -> Plan:
    if len(_PLANS) >= MAX_PLANS:
        _PLANS.clear()
    return _PLANS.setdefault(key, plan)  # atomic: another thread may have added the plan


def check_step(step: int) -> int:
    return as_integer("step", step, at_least=0, at_most=STEP_LIMIT - 1)


def check_is_params(params: object) -> None:
    if not isinstance(params, QuantParams):
        raise DtypeError(
            f"params must be a QuantParams, got {type(params).__name__}: make them with QuantParams.from_data(spec, x) "
            "or QuantParams.from_range(spec, lo, hi)"
        )


def as_factor(grad_scale: object) -> float | None:
    """Check grad_scale, the factor on the gradients of learned scales and zero points; return None unchanged."""
    if grad_scale is None:
        return None
    if isinstance(grad_scale, bool) or not isinstance(grad_scale, int | float | np.floating | np.integer):
        raise DtypeError(f"got grad_scale={grad_scale!r}, expected a number or None")
    if not -MAX_FLOAT <= grad_scale <= MAX_FLOAT:
        raise SpecError(f"got grad_scale={grad_scale!r}, expected a finite number")
    return float(grad_scale)


def check_narrowed(scale: NDArray[np.floating]) -> None:
    """Raise unless float64 scales are still positive normal numbers after conversion to float32."""
    with np.errstate(over="ignore", under="ignore"):
        narrow = scale.astype(np.float32)
    if not (np.isfinite(narrow) & (narrow >= np.finfo(np.float32).smallest_normal)).all():
        raise ParamsError(
            f"got float64 scales in [{scale.min()}, {scale.max()}], but data that are not float64 need scales that fit "
            "float32: convert the data to float64, or rescale the data"
        )


def check_out(
    out: object, accepted: Sequence[tuple[np.dtype[Any], tuple[int, ...]]], inputs: Mapping[str, object]
) -> None:
    """Raise unless the result can be written to ``out``."""
    if not isinstance(out, np.ndarray):
        raise OutError(f"out must be a NumPy array, got {type(out).__name__}: create it with np.empty, or omit out")
    if (out.dtype, out.shape) not in accepted:
        expected = " or ".join(f"{dtype} of shape {shape}" for dtype, shape in accepted)
        raise OutError(
            f"out has dtype {out.dtype} and shape {out.shape}, expected {expected}: pass such an array, or omit out"
        )
    if not out.flags.writeable:
        raise OutError("out is read-only: pass a writable array")
    if _overlaps_itself(out):
        raise OutError(f"elements of out share memory (strides {out.strides}): pass an array without overlap")
    for name, array in inputs.items():
        if isinstance(array, np.ndarray) and _share_memory(out, array):
            raise OutError(f"out overlaps {name} in memory: pass a separate array")


def _overlaps_itself(out: Array) -> bool:
    """Return whether two elements of the array may share memory; False only if the strides rule this out."""
    if out.flags.c_contiguous or not out.size:
        return False
    span = out.itemsize
    axes = zip(out.strides, out.shape, strict=True)
    for stride, size in sorted((abs(stride), size) for stride, size in axes if size > 1):
        if stride < span:
            return True
        span += stride * (size - 1)
    return False


def _share_memory(a: Array, b: Array) -> bool:
    if not np.may_share_memory(a, b):
        return False
    try:
        return bool(np.shares_memory(a, b, max_work=10_000))  # type: ignore[arg-type]  # the stubs allow only 0 and -1
    except np.exceptions.TooHardError:
        return True
