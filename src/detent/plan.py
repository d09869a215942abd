"""Plan: everything about an operation decided and checked once, then run.

::

    select(operation, shape, dtype, spec)  ->  Plan     cached, immutable, safe to share between threads
    plan.can_implement(x, params, out)                  would it run?
    plan.run(x, params, out=out)                        run; only NaN is looked at, under the policy "raise"

The public operators of ``detent.ops`` are ``select``, ``check`` and ``run``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Literal, cast, get_args

import numpy as np
from numpy.typing import DTypeLike, NDArray

from detent._plan_checks import check_narrowed, check_out, refuse_nan
from detent.dtypes import FLOATS, code_dtype, float_dtype
from detent.errors import DetentError, DtypeError, ParamsError, ShapeError, SpecError, closest
from detent.formats import Format
from detent.granularity import Tiling
from detent.kernels import Kernel, find_kernel
from detent.packing import pack, packed_size
from detent.params import QuantParams
from detent.spec import QuantSpec, get_spec
from detent.ste import Custom, Estimator, EstimatorLike, Tanh, get_estimator

__all__ = ["NaNPolicy", "Plan", "PrecisionGuarantee"]

Array = NDArray[Any]
NaNPolicy = Literal["raise", "propagate", "zero_point", "qmin"]


@dataclass(frozen=True)
class _Signature:
    """What an operation reads beside the parameters, its policies for NaN (the first is the default), its output."""

    inputs: tuple[str, ...]
    nan: tuple[NaNPolicy, ...] = ("propagate",)
    codes_in: bool = False
    codes_out: bool = False


_SIGNATURES: Mapping[str, _Signature] = MappingProxyType(
    {
        "quantize": _Signature(("x",), nan=("raise", "zero_point", "qmin"), codes_out=True),
        "dequantize": _Signature(("codes",), codes_in=True),
        "fake_quantize": _Signature(("x",), nan=("propagate", "raise", "zero_point", "qmin")),
        "quantize_backward": _Signature(("g", "x")),
        "dequantize_backward": _Signature(("g",)),
        "fake_quantize_backward": _Signature(("g", "x")),
        "fake_quantize_learned_backward": _Signature(("g", "x")),
    }
)


@dataclass(frozen=True)
class PrecisionGuarantee:
    """What a plan promises about its arithmetic.

    Attributes:
        math: the type each operation rounds to.
        accumulator: the type of sums.
        deterministic: the same input gives the same bits in every run.
        bit_stable: and on every machine, thread count and memory layout.

    >>> Plan.select("quantize", shape=(4,), dtype="float16", spec="int8").precision_guarantee.math
    'float32'
    """

    math: str
    accumulator: str = "float64"
    deterministic: bool = True
    bit_stable: bool = True


@dataclass(frozen=True)
class Plan:
    """One operation on arrays of one shape, dtype and spec; make it with ``select``.

    Attributes:
        operation: the name of the public function.
        shape: the shape of the data.
        dtype: the float type of the data ("dequantize": of the result).
        spec: how.
        ste: the estimator of a gradient; None for operations without one.
        nan: the policy for NaN.
        tiling: how the data falls into sets.
        kernel: what runs.

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
        """The plan for an operation; the same arguments give the same plan.

        Raises:
            UnsupportedError: no such operation.
            ShapeError: the granularity does not fit the shape.
            DtypeError: not a float type.

        >>> Plan.select("quantize", shape=(4,), dtype="float32", spec="int8").sku
        'quantize/float32/int8/tensor/symmetric/onnx/reference'
        """
        kernel = find_kernel(operation)
        signature = _SIGNATURES.get(operation)
        if signature is None:
            raise SpecError(f"{operation!r} is a kernel without a plan: expected one of {', '.join(_SIGNATURES)}")
        spec = get_spec(spec)
        has_gradient = signature.inputs == ("g", "x")
        if ste is not None and not has_gradient:
            raise SpecError(f"{operation} has no estimator, got ste {ste!r}: leave it out")
        estimator = get_estimator(ste, spec.convention) if has_gradient else None
        policy = signature.nan[0] if nan is None else nan
        if policy not in signature.nan:
            raise SpecError(
                f"unknown NaN policy {nan!r} of {operation}{closest(str(nan), get_args(NaNPolicy))} "
                f"expected {', '.join(signature.nan)}"
            )
        key = (
            operation,
            tuple(int(size) for size in shape),
            float_dtype(dtype).name,
            spec,
            estimator,
            policy,
        )
        try:
            return _make(*key, kernel)
        except TypeError:  # an estimator that cannot be hashed is not cached
            return _make.__wrapped__(*key, kernel)

    @property
    def sku(self) -> str:
        """A name for logs and tables: operation, dtype, spec and backend."""
        return f"{self.operation}/{self.dtype}/{self.spec}/{self.kernel.backend}"

    @property
    def workspace_size(self) -> int:
        """How many bytes of scratch memory the caller must provide: none."""
        return 0

    @property
    def precision_guarantee(self) -> PrecisionGuarantee:
        """What the plan promises about its arithmetic; Tanh calls the platform's tanh, which differs by machine."""
        math = "float64" if self.dtype == "float64" else "float32"
        return PrecisionGuarantee(math, bit_stable=not isinstance(self.ste, Tanh))

    def can_implement(self, *operands: Array | QuantParams | None) -> bool:
        """Whether ``run`` would accept these operands: the inputs, the parameters and, if wanted, ``out``.

        >>> import detent as dt, numpy as np
        >>> plan = dt.Plan.select("quantize", shape=(3,), dtype="float32", spec="int8")
        >>> plan.can_implement(np.zeros(4, np.float32), dt.QuantParams.int8_symmetric())
        False
        """
        try:
            self.check(*operands)
        except DetentError:
            return False
        return True

    def check(self, *operands: Array | QuantParams | None) -> None:
        """Raise what ``can_implement`` would say no to.

        >>> import detent as dt, numpy as np
        >>> plan = dt.Plan.select("quantize", shape=(3,), dtype="float32", spec="int8")
        >>> plan.check(np.zeros(4, np.float32), dt.QuantParams.int8_symmetric())
        Traceback (most recent call last):
        ...
        detent.errors.ShapeError: x has shape (4,), expected (3,)
        """
        count = len(_SIGNATURES[self.operation].inputs)
        names = (*_SIGNATURES[self.operation].inputs, "params", "out")
        if len(operands) not in {count + 1, count + 2}:
            raise ShapeError(
                f"{self.operation} takes {', '.join(names[:-1])} and optionally out, got {len(operands)} operands"
            )
        inputs, params, out = dict(zip(names, operands[:count], strict=False)), operands[count], operands[count + 1 :]
        if not isinstance(params, QuantParams):
            raise DtypeError(
                f"params must be a QuantParams, got {type(params).__name__}: make one with from_data or from_range"
            )
        for name, array in inputs.items():
            self._check_input(name, array)
        self.check_params(params)
        if out and out[0] is not None:
            check_out(out[0], self._accepted_outputs(), inputs)

    def run(
        self, *operands: Array | QuantParams, out: Array | None = None, step: int = 0, grad_scale: float | None = None
    ) -> Array | tuple[Array, Array, Array]:
        """Run on operands that ``check`` accepts; only NaN is looked at, under the policy "raise".

        Args:
            *operands: the inputs and the parameters.
            out: where the result goes; None allocates it.
            step: the counter of stochastic rounding.
            grad_scale: the factor of learned gradients.

        Returns:
            The result, ``out`` where it was given; the gradients of x, scale and zero point for
            "fake_quantize_learned_backward".
        """
        inputs, params = cast("list[Array]", list(operands[:-1])), cast("QuantParams", operands[-1])
        if self.nan == "raise":
            refuse_nan("x", inputs[0])
        with np.errstate(all="ignore"):
            result = self._compute(inputs, params, step, grad_scale)
        return _deliver(result, out, self)

    def _compute(
        self, inputs: list[Array], params: QuantParams, step: int, grad_scale: float | None
    ) -> Array | tuple[Array, Array, Array]:
        if isinstance(self.ste, Custom):
            return self._custom(self.ste, inputs, params, step, grad_scale)
        shape = self.shape or (1,)  # 0-d arrays run as 1-d: NumPy turns 0-d results into scalars
        arrays = [array.reshape(shape) for array in inputs]
        scale = params.scale.astype("float64" if self.dtype == "float64" else "float32")
        options: dict[str, object] = {"tiling": self.spec.granularity.tiling(shape)}
        if self.operation == "dequantize_backward":
            return cast("Array", self.kernel.function(*arrays, scale, **options))
        options["spec"] = self.spec
        if self.operation == "dequantize":
            arrays = [array.view(np.uint8) if self.spec.format.kind == "float" else array for array in arrays]
            options["dtype"] = FLOATS[self.dtype]
        else:
            options["step"] = step
        if self.ste is not None:
            options["ste"] = self.ste
        if self.nan in {"zero_point", "qmin"}:
            options["fill"] = self.nan
        if self.operation == "fake_quantize_learned_backward":
            options["grad_scale"] = grad_scale
        return cast("Array", self.kernel.function(*arrays, scale, params.zero_point, **options))

    def _custom(
        self, ste: Custom, inputs: list[Array], params: QuantParams, step: int, grad_scale: float | None
    ) -> Array | tuple[Array, Array, Array]:
        """A callable's gradient of x, beside the kernel's gradients of scale and zero point where asked for."""
        g, x = inputs
        gx = np.asarray(ste.function(g, x, params))
        if gx.shape != g.shape or gx.dtype != g.dtype:
            raise ShapeError(f"the estimator must return {g.dtype} of {g.shape}, got {gx.dtype} of {gx.shape}")
        if self.operation == "fake_quantize_backward":
            return gx
        plain = Plan.select(self.operation, shape=self.shape, dtype=self.dtype, spec=self.spec, ste="identity")
        if self.operation == "quantize_backward":
            return plain.run(gx, x, params, step=step)
        _, gs, gz = plain.run(g, x, params, step=step, grad_scale=grad_scale)
        return gx, gs, gz

    def _check_input(self, name: str, array: object) -> None:
        if not isinstance(array, np.ndarray):
            raise DtypeError(f"{name} must be a NumPy array, got {type(array).__name__}")
        codes_in = _SIGNATURES[self.operation].codes_in
        wanted = code_dtype(self.spec) if codes_in else FLOATS[self.dtype]
        if array.dtype != wanted:
            raise DtypeError(f"{name} has dtype {array.dtype}, {self.operation} of {self.sku} expects {wanted}")
        if array.shape != self.shape:
            raise ShapeError(f"{name} has shape {array.shape}, expected {self.shape}")

    def check_params(self, params: QuantParams) -> None:
        """Raise unless the parameters fit the plan's spec and shape.

        >>> import detent as dt
        >>> dt.Plan.select("quantize", shape=(3,), dtype="float32", spec="int8").check_params(
        ...     dt.QuantParams.int8_symmetric()
        ... )
        """
        if params.spec != self.spec:
            raise ParamsError(
                f"params belong to {params.spec!r}, the plan to {self.spec!r}: select a plan for the params' spec"
            )
        if params.scale.shape != self.tiling.scale_shape:
            raise ShapeError(
                f"params hold scales of shape {params.scale.shape}, data of shape {self.shape} with granularity "
                f"{self.spec.granularity} needs {self.tiling.scale_shape}: make params from this data, or reshape it"
            )
        if params.scale.dtype == np.float64 and self.dtype != "float64":
            check_narrowed(params.scale)

    def _accepted_outputs(self) -> list[tuple[np.dtype[Any], tuple[int, ...]]]:
        if not _SIGNATURES[self.operation].codes_out:
            return [(FLOATS[self.dtype], self.shape)]
        count = int(np.prod(self.shape, dtype=object)) if self.shape else 1
        return [
            (code_dtype(self.spec), self.shape),
            (np.dtype("uint8"), (packed_size(count, self.spec.bits),)),
        ]


@lru_cache(maxsize=4096)
def _make(
    operation: str,
    shape: tuple[int, ...],
    dtype: str,
    spec: QuantSpec,
    ste: Estimator | None,
    nan: NaNPolicy,
    kernel: Kernel,
) -> Plan:
    return Plan(operation, shape, dtype, spec, ste, nan, spec.granularity.tiling(shape), kernel)


def _deliver(
    result: Array | tuple[Array, Array, Array], out: Array | None, plan: Plan
) -> Array | tuple[Array, Array, Array]:
    """The result in the contract's dtype, and in the caller's array where there is one."""
    if isinstance(result, tuple):
        gx, gs, gz = result
        return gx.reshape(plan.shape), np.asarray(gs), np.asarray(gz)
    values = np.asarray(result).reshape(plan.shape)
    if plan.operation == "quantize" and plan.spec.format.kind == "float":
        values = values.view(code_dtype(plan.spec))
    if out is None:
        return values
    packed = out.dtype != values.dtype or out.shape != values.shape
    np.copyto(out, pack(values, plan.spec.bits) if packed else values)
    return out
