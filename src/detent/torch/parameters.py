"""ParameterState: the quantization parameters of a quantizer as the state of a module.

The buffers hold the state: checkpoints, device moves and trainers read and write only the buffers. Values read
from the buffers are cached until the bits of the buffers change. All code that changes the buffers is in this module;
the module ``quantizer`` decides when to call it.

Learned parameters (LSQ, Esser et al. 2020; LSQ+, Bhalgat et al. 2020) are small shifts from the calibrated values::

    scale      = initial_scale * max(1 + rate * scale_shift, 2^-10)
    zero point = initial_zero_point + rate * (qmax - qmin) * zero_point_shift

With a rate of 1, a shift of 1e-3 is 0.1 % of the scale, or 0.1 % of the code range.

If the scale itself were trained, one Adam step of 1e-3 could change the scale by 10 %, and an 8-bit model would
collapse. Shifts start at 0, so that weight decay pulls the parameters towards the calibrated values. Shifts exist
before calibration, so that an optimizer can be constructed at any time. Shifts receive the gradients of LSQ and LSQ+,
multiplied by a factor. With this factor, an SGD step changes the scale as much as in LSQ. The step also changes the
zero point as much as in LSQ+, which trains an offset instead of the zero point. Adam normalizes gradients, so the
factor does not affect Adam: there, the rate of the mode (``Learned(rate=...)``) sets how fast scales learn.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from detent.codec import parse
from detent.errors import NotCalibratedError, SpecError, StateError
from detent.granularity import PerAxis, PerTensor
from detent.observers.minmax import mix_ranges, mix_seen_ranges
from detent.params import QuantParams
from detent.scale_mode import EMA, Fixed, Learned, PerBatch, ScaleMode
from detent.scale_rule import Parameters, derive
from detent.spec import QuantSpec
from detent.torch import traced, traced_namespace
from detent.torch.arrays import FLOAT_TYPES, fingerprint, full_tensor, on_cpu, to_array
from detent.torch.operator import learned_derivative_error, rounded_zero_point
from detent.torch.transforms import is_batched_beyond, lifted, outside

__all__ = ["LearnedState", "ParameterState"]

Array = NDArray[Any]
MIN_GROWTH = 2.0**-10  # minimum of scale / initial_scale, so that a learned scale stays positive
MAX_EXTRA_STATE_BYTES = 1 << 16  # limit for untrusted checkpoints; a quantizer usually has about 500 bytes
_ONE = np.ones((), np.uint8)


class _Memo:
    """Cached values of a module.

    The values are not attributes of the module, because setting an attribute of a module takes longer than quantizing a
    small tensor.
    """

    __slots__ = ("arrays", "forwards", "params", "written")

    def __init__(self, params: QuantParams | None = None, written: Array | None = None) -> None:
        self.params = params  # params last read from or written to the buffers
        self.written = written  # lo, hi, scale and zero point last written by a native step, one row each
        self.arrays: dict[str, tuple[Tensor, int, Array]] = {}  # buffer name -> (buffer, address, array)
        self.forwards = 0  # training forward passes since the last ``qt.sync``

    def __reduce__(self) -> tuple[Any, ...]:
        return _Memo, (self.params, self.written)  # without arrays, because a copied module has its own buffers


class ParameterState(nn.Module):
    """Module with the scale and zero point of a spec, and with the state that the scale mode needs.

    ====================================== ========== =============================================================
    state                                  modes      content
    ====================================== ========== =============================================================
    scale, zero_point, initialized         all        current parameters; initialized is 1 once they are set
    lo, hi                                 EMA        the EMA range
    pending (not in the state dict)        EMA        (-lo, hi) of forward passes since the last ``qt.sync``
    initial_scale, initial_zero_point      Learned    calibrated values, to which the shifts are relative
    scale_shift, zero_point_shift          Learned    trained parameters; symmetric specs have no zero_point_shift
    step                                   all        counter for stochastic rounding; only for specs that use it
    ====================================== ========== =============================================================
    """

    scale: Tensor
    zero_point: Tensor
    initialized: Tensor
    lo: Tensor
    hi: Tensor
    pending: Tensor
    initial_scale: Tensor
    initial_zero_point: Tensor
    step: Tensor

    def __init__(self, spec: QuantSpec, mode: ScaleMode, shape: tuple[int, ...] | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.spec = spec
        self.mode = mode
        self.name = ""
        self.arithmetic = "float"  # of the layer, for the saved state
        self._memo = _Memo()
        if spec.scale_format == "e4m3" and not isinstance(mode, PerBatch):
            raise SpecError(f"got mode {mode} for {spec}, whose two-level scales need PerBatch: use mode PerBatch")
        if spec.scale_format != "float" and isinstance(mode, Learned):
            raise SpecError(
                f"got mode {mode} for {spec}, but scales of format {spec.scale_format} cannot be learned: use another "
                "mode, or a spec with float scales"
            )
        self._make_state(dtype, self._state_shape(shape))

    def _state_shape(self, shape: tuple[int, ...] | None) -> tuple[int, ...]:
        """Return the shape of the scale, or (0,) if it is not known yet."""
        if isinstance(self.spec.granularity, PerTensor):
            return (1,) if isinstance(self.mode, Learned) else ()
        if shape is None and isinstance(self.mode, Learned):
            raise SpecError(
                f"got mode {self.mode} without shape, but the number of learned scales with granularity "
                f"{self.spec.granularity} depends on the shape of the data: pass shape=, or use a per-tensor spec"
            )
        return (0,) if shape is None else self.spec.granularity.tiling(shape).scale_shape or (1,)

    @torch.inference_mode(False)
    def _make_state(self, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device | None = None) -> None:
        def unset(kind: torch.dtype = dtype) -> Tensor:
            return torch.full(shape, float("nan") if kind.is_floating_point else 0, dtype=kind, device=device)

        self.register_buffer("scale", unset())
        self.register_buffer("zero_point", unset(torch.int32))
        self.register_buffer("initialized", torch.zeros((), dtype=torch.uint8, device=device))
        if isinstance(self.mode, EMA):
            self.register_buffer("lo", unset(torch.float32))
            self.register_buffer("hi", unset(torch.float32))
            # not a buffer, because DDP would overwrite it with the value of rank 0
            self.pending = torch.full((2, *shape), -torch.inf, device=device)
        if isinstance(self.mode, Learned):
            self.register_buffer("initial_scale", unset())
            self.register_buffer("initial_zero_point", unset())  # a float, because averages truncate integers
            self.scale_shift = nn.Parameter(torch.zeros(shape, dtype=dtype, device=device))
            self.zero_point_shift = None if self.spec.symmetric else nn.Parameter(torch.zeros_like(self.scale_shift))
        if self.is_stochastic:
            self.register_buffer("step", torch.zeros((), dtype=torch.int64, device=device))

    # Properties

    @property
    def label(self) -> str:
        """The name of the quantizer in messages."""
        return self.name or "FakeQuantize"

    @property
    def is_learned(self) -> bool:
        """Whether the parameters are learned by gradients."""
        return isinstance(self.mode, Learned)

    @property
    def is_stochastic(self) -> bool:
        """Whether rounding is stochastic."""
        return self.spec.rounding.kind == "stochastic"

    @property
    def is_initialized(self) -> bool:
        """Whether parameters were set."""
        return self._memo.params is not None or self._is_set

    @property
    def _is_set(self) -> bool:
        """Whether the buffers hold parameters.

        An average of models (``AveragedModel(use_buffers=True)``) may truncate ``initialized`` to 0, but not the scale.
        """
        return bool(self.initialized) or bool(self.scale.numel() and not torch.isnan(self.scale).any())

    @property
    def is_ready(self) -> bool:
        """Whether a forward pass can run: the parameters are set, or the mode is PerBatch."""
        return isinstance(self.mode, PerBatch) or self.is_initialized

    @property
    def absorbs_gain(self) -> bool:
        """Whether scales can absorb per-channel factors of the data; then only the signs of codes may change."""
        spec = self.spec
        is_constant = isinstance(self.mode, Learned | Fixed)
        return is_constant and spec.granularity == PerAxis(0) and spec.symmetric and spec.qmin == -spec.qmax

    def version(self) -> object:
        """Return a key that changes if the same data may get different parameters."""
        if isinstance(self.mode, PerBatch):
            return ()
        if isinstance(self.mode, Learned):
            parts = (self.initial_scale, self.initial_zero_point, self.scale_shift, self.zero_point_shift)
            return fingerprint(*(part for part in parts if part is not None))
        return fingerprint(self.scale, self.zero_point)

    # Reading the parameters

    @property
    def params(self) -> QuantParams:
        """The current parameters."""
        return self.refresh().stored_params()

    def stored_params(self) -> QuantParams:
        """Return the parameters in the buffers."""
        memo = self._memo
        if memo.params is not None and (self.scale.shape == (0,) or self._contains(memo.params)):
            return memo.params
        if not self._is_set:
            raise NotCalibratedError(
                f"{self.label} has no parameters yet: calibrate the model (`with qt.calibrating(model): ...`) or train "
                "it"
            )
        shape = () if isinstance(self.spec.granularity, PerTensor) else tuple(self.scale.shape)
        scale, zero_point = (to_array(on_cpu(part)).reshape(shape).copy() for part in (self.scale, self.zero_point))
        written = memo.written
        if written is not None and all(map(np.array_equal, written[2:], (scale.ravel(), zero_point.ravel()))):
            lo, hi = (row.reshape(shape) for row in written[:2])
            memo.params = QuantParams.trusted(self.spec, Parameters(scale, zero_point), lo, hi)
        else:
            memo.params = QuantParams(self.spec, scale, zero_point)
        return memo.params

    def native_state(self) -> Array:
        """Return the memory in which native steps write lo, hi, scale and zero point; forget cached params."""
        memo = self._memo
        memo.params = None
        if memo.written is None or memo.written.shape != (4, self.scale.numel()):
            memo.written = np.zeros((4, self.scale.numel()), np.float32)
        return memo.written

    def forget_params(self) -> None:
        """Forget cached params, after a native step has written the buffers."""
        self._memo.params = None

    def _contains(self, params: QuantParams) -> bool:
        """Return whether the buffers contain these parameters, rounded to the dtype of the buffers."""
        if self.scale.device.type != "cpu":
            return False
        scale, zero_point = self._array("scale"), self._array("zero_point")
        if scale.size != params.scale.size or not np.array_equal(zero_point.ravel(), params.zero_point.ravel()):
            return False
        return np.array_equal(scale.ravel(), params.scale.ravel().astype(scale.dtype, copy=False))

    def learned_values(self) -> tuple[Tensor, Tensor | None]:
        """Return the learned scale and zero point as differentiable functions of their shifts.

        The zero point of a symmetric spec is None.
        """
        compiling = torch.compiler.is_compiling()  # compilers reject autograd functions with a jvp
        scale_function = _Scale if compiling else _ReverseModeScale
        mode: Learned = self.mode  # type: ignore[assignment]  # called in mode Learned only
        scale: Tensor = scale_function.apply(self.initial_scale, full_tensor(self.scale_shift), mode.rate)
        if self.zero_point_shift is None:
            return scale, None
        zero_point_function = _ZeroPoint if compiling else _ReverseModeZeroPoint
        shift = _unless_held(full_tensor(self.zero_point_shift), self.initial_zero_point, self.spec, mode)
        span = _span(self.spec, mode)
        return scale, zero_point_function.apply(self.initial_zero_point, shift, self.initial_scale, span)

    def learned_state(self) -> "LearnedState":
        """Return the tensors from which ``learned_values`` computes scale and zero point."""
        shift = None if self.zero_point_shift is None else full_tensor(self.zero_point_shift)
        return LearnedState(self.initial_scale, self.initial_zero_point, full_tensor(self.scale_shift), shift)

    def refresh(self, learned: tuple[Tensor, Tensor | None] | None = None) -> Self:
        """In mode Learned, update the buffers ``scale`` and ``zero_point`` from the learned values."""
        if isinstance(self.mode, Learned) and self.is_initialized:
            with torch.no_grad():
                scale, zero_point = self.learned_values() if learned is None else learned
                if not torch.equal(self.scale, scale):
                    self.scale.copy_(scale)
                rounded = self.zero_point if zero_point is None else rounded_zero_point(zero_point, self.spec)
                if not torch.equal(self.zero_point, rounded):
                    self.zero_point.copy_(rounded)
        return self

    # Changing the parameters

    def set_params(self, params: QuantParams) -> Self:
        """Set the parameters; learned shifts restart at 0, and an EMA range restarts from the range of the params."""
        if params.spec != self.spec:
            raise SpecError(
                f"got params of spec {params.spec!r} for {self.label}, expected {self.spec!r}: use the same spec"
            )
        dtype = self._scale_dtype
        if params.scale.dtype != dtype and params.block_scale is None:
            scale = params.scale.astype(dtype)
            params = QuantParams(self.spec, scale, params.zero_point, min_val=params.min_val, max_val=params.max_val)
        self._store(params)
        if isinstance(self.mode, EMA):
            bounds = ("lo", params.min_val, self.spec.qmin), ("hi", params.max_val, self.spec.qmax)
            for name, bound, code in bounds:  # params without a range: use the range of their codes
                self._write(name, (code - params.zero_point) * params.scale if bound is None else bound)
            self.pending.fill_(-torch.inf)
        if isinstance(self.mode, Learned):
            with torch.no_grad():
                self.initial_scale.copy_(self.scale)
                self.initial_zero_point.copy_(self.zero_point)
                self.scale_shift.zero_()
                if self.zero_point_shift is not None:
                    self.zero_point_shift.zero_()
        return self

    def hold(self, params: QuantParams) -> None:
        """Store the parameters of a batch in the buffers, or only in the cache if the buffers have a different shape.

        The shape of per-token parameters varies between batches.
        """
        if self.scale.shape == params.scale.shape:
            self._store(params)
        else:
            self._memo.params = params

    def hold_traced(self, scale: Tensor, zero_point: Tensor) -> None:
        """Store the parameters of a batch in the buffers, with torch operations.

        Under ``vmap``, the parameters are not stored if each sample has its own parameters.
        """
        if self.scale.shape != scale.shape or is_batched_beyond(scale, self.scale):
            return
        scale, zero_point = (lifted(part, self.scale, torch.amax) for part in (scale, zero_point))
        with outside(self.scale):
            self._copy_traced(scale, zero_point)

    def merge_range(self, lo: Array, hi: Array) -> QuantParams:
        """In mode EMA, update the range to ``decay * range + (1 - decay) * batch``, and return the new parameters."""
        mode = self.mode
        if not isinstance(mode, EMA):
            raise SpecError(f"got mode {mode}, but only mode EMA has an EMA range: use mode EMA")
        lo, hi = np.asarray(lo, np.float32), np.asarray(hi, np.float32)  # dtype of the EMA range
        if self.is_initialized:
            lo, hi = mix_ranges((self._array("lo"), self._array("hi")), (lo, hi), mode.decay)
        params = self._params_from(lo, hi)
        self._write("lo", lo)
        self._write("hi", hi)
        self._store(params)
        return params

    def _params_from(self, lo: Array, hi: Array) -> QuantParams:
        """Return the parameters for a range; call the slower ``from_range`` only to raise its error."""
        dtype = self._scale_dtype
        if not (lo <= hi).all():
            return QuantParams.from_range(self.spec, lo, hi, dtype=dtype)
        derived = derive(self.spec, lo.astype(np.float64), hi.astype(np.float64), dtype)
        return QuantParams.trusted(self.spec, derived, lo, hi)

    @property
    def _scale_dtype(self) -> np.dtype[Any]:
        return np.dtype(FLOAT_TYPES[self.scale.dtype])

    def merge_range_traced(self, lo: Tensor, hi: Tensor) -> None:
        """In mode EMA, update the range like ``merge_range``, with torch operations that do not branch on the state."""
        decay = self.mode.decay  # type: ignore[attr-defined]  # called in mode EMA only
        lo, hi = lifted(lo, self.lo, torch.amin), lifted(hi, self.hi, torch.amax)
        with outside(self.lo):
            is_started = (self.initialized != 0) & (self.lo <= self.hi)
            new_lo, new_hi = mix_seen_ranges(traced_namespace, (self.lo, self.hi), (lo, hi), decay, is_started)
            self.lo.copy_(new_lo)
            self.hi.copy_(new_hi)
            self._copy_traced(*traced.derive(self.spec, self.lo, self.hi, self.scale.dtype))

    def add_pending(self, lo: Array, hi: Array) -> None:
        """In mode EMA, widen the pending range for the next ``qt.sync``."""
        pending = to_array(self.pending)
        np.maximum(pending, np.stack((-lo, hi)), out=pending, casting="same_kind")

    def add_pending_traced(self, lo: Tensor, hi: Tensor) -> None:
        """In mode EMA, widen the pending range for the next ``qt.sync``, in torch operations."""
        lo, hi = lifted(lo, self.pending, torch.amin), lifted(hi, self.pending, torch.amax)
        with outside(self.pending):
            self.pending.copy_(torch.maximum(self.pending, torch.stack((-lo, hi))))

    def apply_pending(self, merged: Tensor) -> None:
        """In mode EMA, update the EMA range with the merged (-lo, hi) of ``qt.sync``, and reset the pending range."""
        # + 0.0 turns -0.0 into 0.0, because MAX of -0.0 and 0.0 depends on the backend
        negated_lo, hi = to_array(on_cpu(merged.float())) + np.float32(0.0)
        lo = np.float32(0.0) - negated_lo
        if (lo <= hi).any():
            self.merge_range(np.asarray(lo), np.asarray(hi))
        self.pending.fill_(-torch.inf)
        self._memo.forwards = 0

    # Memory of the buffers

    def _store(self, params: QuantParams) -> None:
        """Write the parameters to the buffers and the cache."""
        if self.scale.numel() != params.scale.size:
            self._make_state(self.scale.dtype, params.scale.shape, self.scale.device)
        for name, values in (("scale", params.scale), ("zero_point", params.zero_point), ("initialized", _ONE)):
            self._write(name, values)
        self._memo.params = params

    def _copy_traced(self, scale: Tensor, zero_point: Tensor) -> None:
        """Write scale and zero point to the buffers in torch operations; reading ``params`` detects the change."""
        self.scale.copy_(scale)
        self.zero_point.copy_(zero_point)
        self.initialized.fill_(1)

    def _write(self, name: str, values: Array | float) -> None:
        """Write values to a buffer on any device; values and buffer may differ in their number of axes of length 1."""
        buffer: Tensor = self._buffers[name]  # type: ignore[assignment]  # names are buffers
        array = np.asarray(values)
        if array.size == buffer.numel():
            array = array.reshape(buffer.shape)
        if buffer.device.type == "cpu":
            np.copyto(self._array(name), array, casting="same_kind")
        else:
            buffer.copy_(torch.from_numpy(array.copy()))

    def _array(self, name: str) -> Array:
        """Return a buffer's memory as a cached array; a copy if the buffer is not on the CPU."""
        buffer: Tensor = self._buffers[name]  # type: ignore[assignment]  # names are buffers
        if buffer.device.type != "cpu":
            return to_array(on_cpu(buffer))
        arrays = self._memo.arrays
        entry = arrays.get(name)
        if entry is None or entry[0] is not buffer or entry[1] != buffer.data_ptr():
            entry = arrays[name] = buffer, buffer.data_ptr(), to_array(buffer)
        return entry[2]

    # Moves, copies and checkpoints

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move the state to another device, but keep its dtype, because half-precision models need precise scales."""

        def keep_type(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        self._memo.params = self._memo.written = None
        if isinstance(self.mode, EMA):
            self.pending = keep_type(self.pending)
        applied: Self = super()._apply(keep_type, recurse)
        return applied

    def get_extra_state(self) -> Tensor:
        """Return spec and mode as JSON bytes in a tensor, which every checkpoint format can store.

        The state of a weight also says if its layer multiplies codes. This is for information: loading ignores it.
        """
        arithmetic = {} if self.arithmetic == "float" else {"arithmetic": self.arithmetic}
        text = json.dumps({"spec": self.spec.to_json(), "mode": self.mode.to_json(), **arithmetic})
        return torch.tensor(list(text.encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        """Raise StateError if the saved spec or mode differs from this quantizer's."""
        difference = self.compare_state(state)
        if difference:
            raise StateError(f"{self.label}: {difference}: load a checkpoint with the same spec and mode")

    def compare_state(self, state: object) -> str:
        """Return how the spec and mode of a saved state differ from this quantizer, or "" if both are equal."""
        got = f"{state.dtype} of shape {tuple(state.shape)}" if isinstance(state, Tensor) else type(state).__name__
        try:
            if not isinstance(state, Tensor) or state.dtype != torch.uint8 or state.numel() > MAX_EXTRA_STATE_BYTES:
                raise StateError(
                    f"got {got}, expected a uint8 tensor of at most {MAX_EXTRA_STATE_BYTES} elements, as state_dict() "
                    "returns it"
                )
            saved = parse(bytes(state.cpu().tolist()).decode(), "their JSON")
            spec, mode = QuantSpec.from_json(saved["spec"]), ScaleMode.from_json(saved["mode"])
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            return f"the checkpoint's spec and mode cannot be read ({error})"
        if (spec, mode) == (self.spec, self.mode):
            return ""
        return f"the checkpoint has {spec} with {mode}, but the model has {self.spec} with {self.mode}"

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        self.refresh()
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        saved = state_dict.get(prefix + "scale")
        if self.scale.shape == (0,) and isinstance(saved, Tensor) and saved.ndim:  # use the shape in the checkpoint
            self._make_state(self.scale.dtype, tuple(saved.shape), self.scale.device)
        super()._load_from_state_dict(state_dict, prefix, *rest)
        self._memo.params = self._memo.written = None
        if isinstance(self.mode, EMA):
            self.pending.fill_(-torch.inf)


def _unless_held(shift: Tensor, initial_zero_point: Tensor, spec: QuantSpec, mode: Learned) -> Tensor:
    """Return the shift, or the gradient of a shift, with 0 for zero points that the mode does not train."""
    if mode.zero_point != "auto":
        return shift
    return torch.where(initial_zero_point == spec.qmin, torch.zeros_like(shift), shift)


def _span(spec: QuantSpec, mode: Learned) -> float:
    """Return by how much a shift of 1 changes the zero point."""
    return (spec.qmax - spec.qmin) * mode.rate


class LearnedState(NamedTuple):
    """The tensors of a quantizer of mode Learned, for operators that compute without autograd."""

    initial_scale: Tensor
    initial_zero_point: Tensor
    scale_shift: Tensor
    zero_point_shift: Tensor | None

    def values(self, spec: QuantSpec, mode: Learned) -> tuple[Tensor, Tensor]:
        """Return the learned scale, and the learned zero point before rounding, as in ``learned_values``."""
        scale = _Scale.forward(self.initial_scale, self.scale_shift, mode.rate)
        if self.zero_point_shift is None:
            return scale, self.initial_zero_point
        shift = _unless_held(self.zero_point_shift, self.initial_zero_point, spec, mode)
        return scale, _ZeroPoint.forward(self.initial_zero_point, shift, self.initial_scale, _span(spec, mode))

    def gradients(self, gs: Tensor, gz: Tensor, spec: QuantSpec, mode: Learned) -> tuple[Tensor, Tensor]:
        """Return the gradients of the shifts, given those of scale and zero point; 0 for a missing shift."""
        shape, initial = self.scale_shift.shape, self.initial_scale
        gs, gz = (g.reshape(shape).to(initial.dtype) for g in (gs, gz))
        of_scale = _Scale.gradient(gs, initial, mode.rate)
        if self.zero_point_shift is None:
            return of_scale, torch.zeros_like(of_scale)
        of_zero_point = _ZeroPoint.gradient(gz, initial, _span(spec, mode))
        return of_scale, _unless_held(of_zero_point, self.initial_zero_point, spec, mode)


class _Scale(torch.autograd.Function):
    """The learned scale, as a differentiable function of ``scale_shift``."""

    generate_vmap_rule = True

    @staticmethod
    def forward(initial: Tensor, shift: Tensor, rate: float) -> Tensor:
        move = shift.to(initial.dtype)  # FSDP may cast parameters to half precision
        growth = 1.0 + traced_namespace.multiply(torch.full_like(move, rate), move)
        return initial * growth.clamp(min=MIN_GROWTH)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.rate = inputs[2]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[None, Tensor, None]:
        (initial,) = ctx.saved_tensors
        return None, _Scale.gradient(g, initial, ctx.rate), None

    @staticmethod
    def gradient(g: Tensor, initial: Tensor, rate: float) -> Tensor:
        """Return the gradient of the shift, given the gradient g of the scale."""
        return traced_namespace.divide(g, rate * initial)


class _ZeroPoint(torch.autograd.Function):
    """The learned zero point before rounding, as a differentiable function of ``zero_point_shift``."""

    generate_vmap_rule = True

    @staticmethod
    def forward(initial: Tensor, shift: Tensor, scale: Tensor, span: float) -> Tensor:
        move = shift.to(scale.dtype)
        return initial + traced_namespace.multiply(torch.full_like(move, span), move)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, float], output: Tensor) -> None:
        ctx.save_for_backward(inputs[2])
        ctx.span = inputs[3]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[None, Tensor, None, None]:
        (scale,) = ctx.saved_tensors
        return None, _ZeroPoint.gradient(g, scale, ctx.span), None, None

    @staticmethod
    def gradient(g: Tensor, scale: Tensor, span: float) -> Tensor:
        """Return the gradient of the shift, given the gradient g of the zero point."""
        return traced_namespace.divide(g, span * scale * scale)


class _ReverseModeScale(_Scale):
    """A ``_Scale`` that raises an error in forward-mode differentiation."""

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Tensor:
        raise learned_derivative_error()


class _ReverseModeZeroPoint(_ZeroPoint):
    """A ``_ZeroPoint`` that raises an error in forward-mode differentiation."""

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Tensor:
        raise learned_derivative_error()
