"""ParameterState: the parameters of a quantizer as the state of a module.

The buffers hold the truth, because checkpoints, devices and trainers see only these. What was last read from them is
reused as long as they hold the same bits. Everything that changes them is here; when each change happens is the
business of ``quantizer``, which knows modes and switches.

Learned parameters (LSQ, Esser et al. 2020; LSQ+, Bhalgat et al. 2020) are small shifts from the values that data gave::

    scale      = initial_scale * max(1 + scale_shift, 2^-10)                     one step of 1e-3 is 0.1 %
    zero point = initial_zero_point + (qmax - qmin) * zero_point_shift           one step of 1e-3 is 0.1 % of the range

With the scale itself as the parameter, one step of Adam at 1e-3 can be a tenth of it, and an 8-bit model collapses.
Shifts start at 0, so weight decay pulls towards the calibrated values, and they exist before there is any data, so an
optimizer may be built at any time. Their gradients are the LSQ and LSQ+ ones divided by the unit of each, which under
SGD gives the relative step of LSQ; optimizers like Adam see no difference.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from detent.codec import parse
from detent.errors import NotCalibratedError, SpecError, StateError
from detent.granularity import PerAxis, PerTensor
from detent.observers.minmax import mix_ranges
from detent.params import QuantParams
from detent.scale_mode import EMA, Fixed, Learned, PerBatch, ScaleMode
from detent.scale_rule import derive
from detent.spec import QuantSpec
from detent.torch import traced
from detent.torch.arrays import FLOAT_TYPES, fingerprint, full_tensor, on_cpu, to_array
from detent.torch.operator import rounded_zero_point

__all__ = ["ParameterState", "shifted_scale", "shifted_zero_point"]

Array = NDArray[Any]
SMALLEST_GROWTH = 2.0**-10  # a learned scale stays positive
MAX_EXTRA_STATE = 1 << 16  # bytes of JSON that a checkpoint may hold for one quantizer
_ONE = np.ones((), np.uint8)


class _Memo:
    """What a quantizer knows without reading its buffers.

    A plain object: setting an attribute of an nn.Module takes longer than quantizing a small tensor.

    Attributes:
        params: what was last read from the buffers, or written to them.
        arrays: by the name of a buffer: the tensor, its address, and its memory as an array.
        forwards: training forwards since the last ``qt.sync``.
    """

    __slots__ = ("arrays", "forwards", "params")

    def __init__(self, params: QuantParams | None = None) -> None:
        self.params = params
        self.arrays: dict[str, tuple[Tensor, int, Array]] = {}
        self.forwards = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return _Memo, (self.params,)  # a copy has buffers of its own


class ParameterState(nn.Module):
    """Scale and zero point of a spec under a mode.

    ====================================== ========== =============================================================
    state                                  modes      holds
    ====================================== ========== =============================================================
    scale, zero_point, initialized         all        the parameters, and 1 once there are any
    lo, hi                                 EMA        the averaged range
    pending (not in the state dict)        EMA        (-lo, hi) of the forwards since the last ``qt.sync``
    initial_scale, initial_zero_point      Learned    what the shifts start from
    scale_shift, zero_point_shift          Learned    what is trained; no second one for symmetric specs
    step                                   all        the counter of stochastic rounding, for specs that use it
    ====================================== ========== =============================================================

    Args:
        spec: how to quantize.
        mode: where the parameters come from.
        shape: the shape of the data; None where only data will tell.
        dtype: the scale's type.

    Attributes:
        name: the full name in the model, for messages.
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
        self._memo = _Memo()
        if spec.scale_format == "e4m3" and not isinstance(mode, PerBatch):
            raise SpecError(f"{spec} has scales of two levels, which only PerBatch makes, got mode {mode}")
        if spec.scale_format != "float" and isinstance(mode, Learned):
            raise SpecError(f"a scale stored as {spec.scale_format} cannot be learned: use another mode or spec")
        self._make_state(dtype, self._state_shape(shape))

    def _state_shape(self, shape: tuple[int, ...] | None) -> tuple[int, ...]:
        """The shape of the scale; (0,) where it is not known yet."""
        if isinstance(self.spec.granularity, PerTensor):
            return (1,) if isinstance(self.mode, Learned) else ()
        if shape is None and isinstance(self.mode, Learned):
            raise SpecError(
                f"parameters to learn exist before there is data, and those of granularity {self.spec.granularity} "
                "depend on the data's shape: give shape=, or learn one scale per tensor"
            )
        return (0,) if shape is None else self.spec.granularity.tiling(shape).scale_shape or (1,)

    @torch.inference_mode(False)
    def _make_state(self, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device | None = None) -> None:
        def nothing(kind: torch.dtype = dtype) -> Tensor:
            return torch.full(shape, float("nan") if kind.is_floating_point else 0, dtype=kind, device=device)

        self.register_buffer("scale", nothing())
        self.register_buffer("zero_point", nothing(torch.int32))
        self.register_buffer("initialized", torch.zeros((), dtype=torch.uint8, device=device))
        if isinstance(self.mode, EMA):
            self.register_buffer("lo", nothing(torch.float32))
            self.register_buffer("hi", nothing(torch.float32))
            self.pending = torch.full(
                (2, *shape), -torch.inf, device=device
            )  # DDP would overwrite a buffer by rank 0's
        if isinstance(self.mode, Learned):
            self.register_buffer("initial_scale", nothing())
            self.register_buffer("initial_zero_point", nothing(torch.int32))
            self.scale_shift = nn.Parameter(torch.zeros(shape, dtype=dtype, device=device))
            shift = None if self.spec.symmetric else nn.Parameter(torch.zeros(shape, dtype=dtype, device=device))
            self.zero_point_shift = shift
        if self.is_stochastic:
            self.register_buffer("step", torch.zeros((), dtype=torch.int64, device=device))

    # What it is

    @property
    def label(self) -> str:
        """What messages call it."""
        return self.name or "FakeQuantize"

    @property
    def is_learned(self) -> bool:
        """Whether gradients change the parameters."""
        return isinstance(self.mode, Learned)

    @property
    def is_stochastic(self) -> bool:
        """Whether every forward rounds in another way."""
        return self.spec.rounding.kind == "stochastic"

    @property
    def is_initialized(self) -> bool:
        """Whether there are parameters."""
        return self._memo.params is not None or bool(self.initialized)

    @property
    def is_ready(self) -> bool:
        """Whether parameters of the same data stay the same."""
        return isinstance(self.mode, PerBatch) or self.is_initialized

    @property
    def absorbs_gain(self) -> bool:
        """Whether a factor per channel of the data can go into the scales, so that codes do not depend on it."""
        spec = self.spec
        stays = isinstance(self.mode, Learned | Fixed)
        return stays and spec.granularity == PerAxis(0) and spec.symmetric and spec.qmin == -spec.qmax

    def version(self) -> object:
        """A key that changes when the parameters of the same data may have changed."""
        if isinstance(self.mode, PerBatch):
            return ()
        if isinstance(self.mode, Learned):
            parts = (self.initial_scale, self.initial_zero_point, self.scale_shift, self.zero_point_shift)
            return fingerprint(*(part for part in parts if part is not None))
        return fingerprint(self.scale, self.zero_point)

    # Reading the parameters

    @property
    def params(self) -> QuantParams:
        """The current parameters.

        Raises:
            NotCalibratedError: there are none yet.
        """
        self.refresh()
        memo = self._memo
        if memo.params is not None and (self.scale.shape == (0,) or self._holds(memo.params)):
            return memo.params
        if not bool(self.initialized):
            raise NotCalibratedError(
                f"{self.label} has no parameters yet: calibrate it first, `with qt.calibrating(model): ...`, or train"
            )
        shape = () if isinstance(self.spec.granularity, PerTensor) else tuple(self.scale.shape)
        scale, zero_point = (to_array(on_cpu(part)).reshape(shape).copy() for part in (self.scale, self.zero_point))
        memo.params = QuantParams(self.spec, scale, zero_point)
        return memo.params

    def _holds(self, params: QuantParams) -> bool:
        """Whether the buffers are as these parameters left them; they may be narrower."""
        if self.scale.device.type != "cpu":
            return False
        scale, zero_point = self._array("scale"), self._array("zero_point")
        if scale.size != params.scale.size or not np.array_equal(zero_point.ravel(), params.zero_point.ravel()):
            return False
        return np.array_equal(scale.ravel(), params.scale.ravel().astype(scale.dtype, copy=False))

    def learned_values(self) -> tuple[Tensor, Tensor | None]:
        """Mode Learned: scale and zero point, differentiable in their shifts; no zero point for symmetric specs."""
        scale = shifted_scale(self.initial_scale, full_tensor(self.scale_shift))
        if self.zero_point_shift is None:
            return scale, None
        shift = full_tensor(self.zero_point_shift)
        return scale, shifted_zero_point(self.initial_zero_point, shift, self.initial_scale, self.spec)

    def refresh(self) -> Self:
        """Bring ``scale`` and ``zero_point`` up to date with what was learned; other modes do it in forward."""
        if isinstance(self.mode, Learned) and self.is_initialized:
            with torch.no_grad():
                scale, zero_point = self.learned_values()
                if not torch.equal(self.scale, scale):
                    self.scale.copy_(scale)
                rounded = self.zero_point if zero_point is None else rounded_zero_point(zero_point, self.spec)
                if not torch.equal(self.zero_point, rounded):
                    self.zero_point.copy_(rounded)
        return self

    # Changing the parameters

    def set_params(self, params: QuantParams) -> Self:
        """Take the parameters as given; a learned shift starts anew, an average starts from their range.

        >>> import detent as dt
        >>> import detent.torch as qt
        >>> qt.FakeQuantize("int8").set_params(dt.QuantParams(dt.QuantSpec("int8"), scale=0.5)).scale
        tensor(0.5000)
        """
        if params.spec != self.spec:
            raise SpecError(f"{self.label} has spec {self.spec!r}, the params {params.spec!r}: use the same")
        dtype = self._scale_dtype
        if params.scale.dtype != dtype and params.block_scale is None:
            scale = params.scale.astype(dtype)
            params = QuantParams(self.spec, scale, params.zero_point, min_val=params.min_val, max_val=params.max_val)
        self._store(params)
        if isinstance(self.mode, EMA):
            bounds = ("lo", params.min_val, self.spec.qmin), ("hi", params.max_val, self.spec.qmax)
            for name, bound, code in bounds:  # parameters set by hand have no range: it is that of their codes
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

    def hold(self, params: QuantParams) -> QuantParams:
        """Keep the parameters of a batch, as state where the shapes agree; per-token ones depend on the batch's shape.

        Returns:
            The parameters.
        """
        if self.scale.shape == params.scale.shape:
            self._store(params)
        else:
            self._memo.params = params
        return params

    def hold_traced(self, scale: Tensor, zero_point: Tensor) -> None:
        """``hold`` in torch operations."""
        if self.scale.shape == scale.shape:
            self._copy_traced(scale, zero_point)

    def merge_range(self, lo: Array, hi: Array) -> QuantParams:
        """Mode EMA: move the average by a batch with these bounds, ``average = decay * average + (1 - decay) * batch``.

        Returns:
            The parameters of the new average.

        >>> import detent.torch as qt
        >>> quantizer = qt.FakeQuantize("uint8", EMA(0.75))
        >>> for hi in (255.0, 510.0):
        ...     print(quantizer.merge_range(np.array(0.0), np.array(hi)).scale)
        1.0
        1.25
        """
        mode = self.mode
        if not isinstance(mode, EMA):
            raise SpecError(f"only mode EMA averages ranges, this is {mode}")
        lo, hi = np.asarray(lo, np.float32), np.asarray(hi, np.float32)  # the type of the average
        if self.is_initialized:
            lo, hi = mix_ranges((self._array("lo"), self._array("hi")), (lo, hi), mode.decay)
        params = self._params_from(lo, hi)
        self._write("lo", lo)
        self._write("hi", hi)
        self._store(params)
        return params

    def _params_from(self, lo: Array, hi: Array) -> QuantParams:
        """The parameters of a range; the checks of ``from_range`` only where they would find something."""
        dtype = self._scale_dtype
        if not (lo <= hi).all():
            return QuantParams.from_range(self.spec, lo, hi, dtype=dtype)
        derived = derive(self.spec, lo.astype(np.float64), hi.astype(np.float64), dtype)
        return QuantParams.trusted(self.spec, derived, lo, hi)

    @property
    def _scale_dtype(self) -> np.dtype[Any]:
        return np.dtype(FLOAT_TYPES[self.scale.dtype])

    def merge_range_traced(self, lo: Tensor, hi: Tensor) -> None:
        """``merge_range`` in torch operations, which cannot look at the state to decide."""
        decay = self.mode.decay  # type: ignore[attr-defined]  # only mode EMA comes here
        seen = (self.initialized != 0) & (self.lo <= self.hi)
        empty = lo > hi
        for average, new in ((self.lo, lo), (self.hi, hi)):
            mixed = torch.where(empty, average, traced.blend(average, new, decay))
            average.copy_(torch.where(seen, mixed, new))
        self._copy_traced(*traced.derive(self.spec, self.lo, self.hi))

    def add_pending(self, lo: Array, hi: Array) -> None:
        """Mode EMA: widen the range that the next ``qt.sync`` merges."""
        pending = to_array(self.pending)
        np.maximum(pending, np.stack((-lo, hi)), out=pending, casting="same_kind")

    def add_pending_traced(self, lo: Tensor, hi: Tensor) -> None:
        """``add_pending`` in torch operations."""
        self.pending.copy_(torch.maximum(self.pending, torch.stack((-lo, hi))))

    def apply_pending(self, merged: Tensor) -> None:
        """Mode EMA: move the average by the (-lo, hi) that ``qt.sync`` merged over all processes, and start over."""
        low, hi = to_array(on_cpu(merged.float())) + np.float32(
            0.0
        )  # no -0.0: which zero MAX keeps depends on backends
        lo = np.float32(0.0) - low
        if (lo <= hi).any():
            self.merge_range(np.asarray(lo), np.asarray(hi))
        self.pending.fill_(-torch.inf)
        self._memo.forwards = 0

    # The memory of the buffers

    def _store(self, params: QuantParams) -> None:
        """Write the parameters to the buffers, and remember them as what the buffers hold."""
        if self.scale.numel() != params.scale.size:
            self._make_state(self.scale.dtype, params.scale.shape, self.scale.device)
        for name, values in (("scale", params.scale), ("zero_point", params.zero_point), ("initialized", _ONE)):
            self._write(name, values)
        self._memo.params = params

    def _copy_traced(self, scale: Tensor, zero_point: Tensor) -> None:
        """``_store`` in torch operations; ``params`` notices that the buffers have changed."""
        self.scale.copy_(scale)
        self.zero_point.copy_(zero_point)
        self.initialized.fill_(1)

    def _write(self, name: str, values: Array | float) -> None:
        """Write values to a buffer, on whatever device it is; shapes may differ by axes of length 1."""
        buffer: Tensor = self._buffers[name]  # type: ignore[assignment]  # only names of buffers come here
        given = np.asarray(values)
        if given.size == buffer.numel():
            given = given.reshape(buffer.shape)
        if buffer.device.type == "cpu":
            np.copyto(self._array(name), given, casting="same_kind")
        else:
            buffer.copy_(torch.from_numpy(given.copy()))

    def _array(self, name: str) -> Array:
        """A buffer's memory, looked up once; of a buffer on another device a copy."""
        buffer: Tensor = self._buffers[name]  # type: ignore[assignment]  # only names of buffers come here
        if buffer.device.type != "cpu":
            return to_array(on_cpu(buffer))
        arrays = self._memo.arrays
        entry = arrays.get(name)
        if entry is None or entry[0] is not buffer or entry[1] != buffer.data_ptr():
            entry = arrays[name] = buffer, buffer.data_ptr(), to_array(buffer)
        return entry[2]

    # Moves, copies and checkpoints

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Moves go through, changes of a float type do not: scales keep their precision in a half-precision model."""

        def keep_type(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        self._memo.params = None
        if isinstance(self.mode, EMA):
            self.pending = keep_type(self.pending)
        applied: Self = super()._apply(keep_type, recurse)
        return applied

    def get_extra_state(self) -> Tensor:
        """Spec and mode as bytes of JSON, which every kind of checkpoint can hold."""
        text = json.dumps({"spec": self.spec.to_json(), "mode": self.mode.to_json()})
        return torch.tensor(list(text.encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        """Raise if the state belongs to another spec or mode."""
        difference = self.compare_state(state)
        if difference:
            raise StateError(f"{self.label}: {difference}")

    def compare_state(self, state: object) -> str:
        """How the spec and mode of a saved state differ from this module's; "" where they agree.

        >>> import detent.torch as qt
        >>> print(qt.FakeQuantize("int8").compare_state(qt.FakeQuantize("int4").get_extra_state()))
        the checkpoint has int4/tensor/symmetric/onnx with EMA(decay=0.99), the model \
int8/tensor/symmetric/onnx with EMA(decay=0.99)
        """
        try:
            if not isinstance(state, Tensor) or state.dtype != torch.uint8 or state.numel() > MAX_EXTRA_STATE:
                raise StateError("not bytes")
            saved = parse(bytes(state.cpu().tolist()).decode(), "its JSON")
            spec, mode = QuantSpec.from_json(saved["spec"]), ScaleMode.from_json(saved["mode"])
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            return f"the checkpoint's description of the quantizer cannot be read ({error})"
        if (spec, mode) == (self.spec, self.mode):
            return ""
        return f"the checkpoint has {spec} with {mode}, the model {self.spec} with {self.mode}"

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        self.refresh()
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        saved = state_dict.get(prefix + "scale")
        if self.scale.shape == (0,) and isinstance(saved, Tensor) and saved.ndim:  # its shape was not known before
            self._make_state(self.scale.dtype, tuple(saved.shape), self.scale.device)
        super()._load_from_state_dict(state_dict, prefix, *rest)
        self._memo.params = None
        if isinstance(self.mode, EMA):
            self.pending.fill_(-torch.inf)


def shifted_scale(initial: Tensor, shift: Tensor) -> Tensor:
    """The scale, differentiable in its shift.

    >>> shifted_scale(torch.tensor([0.5]), torch.tensor([0.25]))
    tensor([0.6250])
    """
    scale: Tensor = _Scale.apply(initial, shift)
    return scale


def shifted_zero_point(initial: Tensor, shift: Tensor, scale: Tensor, spec: QuantSpec) -> Tensor:
    """The zero point before rounding, differentiable in its shift.

    >>> shifted_zero_point(torch.tensor([3]), torch.tensor([0.1]), torch.tensor([0.5]), QuantSpec("uint8"))
    tensor([28.5000])
    """
    zero_point: Tensor = _ZeroPoint.apply(initial, shift, scale, spec.qmax - spec.qmin)
    return zero_point


class _Scale(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(initial: Tensor, shift: Tensor) -> Tensor:
        growth = 1.0 + shift.to(initial.dtype)  # FSDP may lend it in half precision
        return initial * growth.clamp(min=SMALLEST_GROWTH)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[None, Tensor]:
        (initial,) = ctx.saved_tensors
        return None, g / initial


class _ZeroPoint(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(initial: Tensor, shift: Tensor, scale: Tensor, span: float) -> Tensor:
        return initial + span * shift.to(scale.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, float], output: Tensor) -> None:
        ctx.save_for_backward(inputs[2])
        ctx.span = inputs[3]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[None, Tensor, None, None]:
        (scale,) = ctx.saved_tensors
        return None, g / (ctx.span * scale * scale), None, None
