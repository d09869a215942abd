"""Recomputation: a forward pass that activation checkpointing repeats uses the ranges and counters of the first pass.

The first forward pass changes state: EMA ranges, the counter of stochastic rounding, batch norm statistics. The
repeated pass must not change state again, and must use the values of the pass that it repeats. These values need not be
the newest, because a layer may run several times before one backward pass. PyTorch does not tell which pass is
repeated. So each layer records the values that it used, with a checksum of its input. A repeated pass uses the newest
record with the same input. Some operators give different bits with and without gradients, so later layers may find no
such record. These layers then use their records in the order of the first passes. Records are small (parameters,
counters, gains). A layer makes records only if its pass may be repeated. This is the case if gradients are off
(``use_reentrant=True``), or if saved tensors have hooks (``use_reentrant=False``).

Compiled code inside an eager checkpoint is not supported, because compiled code cannot detect a repeated pass.
Checkpoints inside compiled code are handled by the compiler.
"""

import itertools
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Self, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from detent.torch.arrays import fingerprint

__all__ = ["Recording", "is_ordinary_pass", "is_recomputing", "is_recorded", "once"]

Value = TypeVar("Value")
MAX_RECORDS = 1024  # maximum number per layer; older records are dropped
MAX_REPLAYED = 8  # number of records kept after use, for backward with retain_graph=True
HASH_MULTIPLIER = -7046029254386353131  # 2**64 divided by the golden ratio, as int64: odd, with well-mixed bits
CHECKSUM_CHUNK = 1 << 20  # elements per chunk; the weight of each element takes 8 bytes

_hooks_of_saved_tensors: Callable[[bool], object] = getattr(
    torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: True
)


def is_recomputing() -> bool:
    """Return whether a backward pass is running, in which activation checkpointing repeats forward passes."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def _may_be_repeated() -> bool:
    return not torch.is_grad_enabled() or _hooks_of_saved_tensors(True) is not None


def is_ordinary_pass() -> bool:
    """Return whether this forward pass, in which gradients are on, can neither be repeated nor repeats another one."""
    is_repeated = torch._C._current_graph_task_id() != -1
    return not (is_repeated or _active.recordings or _hooks_of_saved_tensors(True) is not None)


_order = itertools.count()


class _Record:
    """The values that one forward pass of a layer used: for each owner (quantizer or batch norm), a list in order."""

    def __init__(self, key: object = None) -> None:
        self.key = key  # from ``_key_of``, for the layer's input
        self.order = next(_order)
        self.values: dict[object, list[Any]] = {}
        self.is_replayed = False


_journals: WeakKeyDictionary[nn.Module, deque[_Record]] = WeakKeyDictionary()
_lock = threading.Lock()


class _Active(threading.local):
    def __init__(self) -> None:
        self.recordings: list[Recording] = []
        self.replayed = -1  # ``order`` of the last record that was replayed


_active = _Active()


class Recording:
    """Context of a forward pass in training: records its values if it may be repeated, or replays recorded values."""

    def __init__(self, layer: nn.Module, x: object) -> None:
        self._layer, self._x = layer, x
        self._record: _Record | None = None
        self._taken: dict[object, int] = {}
        self._replays = False
        self._is_active = False

    def __enter__(self) -> Self:
        if torch._C._are_functorch_transforms_active() or not isinstance(self._x, Tensor):
            return self
        self._replays = is_recomputing()
        self._is_active = self._replays or _may_be_repeated()
        if self._is_active:
            _active.recordings.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        if not self._is_active:
            return
        _active.recordings.remove(self)
        if self._record is not None and not self._replays:
            with _lock:
                journal = _journals.setdefault(self._layer, deque(maxlen=MAX_RECORDS))
                while len(journal) >= MAX_REPLAYED and journal[0].is_replayed:
                    journal.popleft()
                journal.append(self._record)

    def put(self, owner: object, value: object) -> None:
        """Record a value that the owner (a quantizer or batch norm) used."""
        if self._record is None:
            self._record = _Record(_key_of(self._x))
        self._record.values.setdefault(owner, []).append(value)

    def take(self, owner: object) -> tuple[Any, ...]:
        """Return the value that the owner used here in the first pass, as ``(value,)``; () if no value was recorded."""
        if self._record is None:
            self._record = self._find() or _Record()
        values, index = self._record.values.get(owner, ()), self._taken.get(owner, 0)
        self._taken[owner] = index + 1
        return (values[index],) if index < len(values) else ()

    def _find(self) -> _Record | None:
        """Find the record for a repeated pass: the newest one with this input, or else the next one in order."""
        key = _key_of(self._x)
        with _lock:
            records = list(_journals.get(self._layer, ()))
            matching = [each for each in records if each.key == key]
            if matching and all(each.is_replayed for each in matching):  # backward runs again, with retain_graph=True
                for each in matching:
                    each.is_replayed = False
            unused = [each for each in matching if not each.is_replayed]
            following = [each for each in records if each.order > _active.replayed]
            if not unused and not following:
                return None
            record = unused[-1] if unused else following[0]
            record.is_replayed = True
            _active.replayed = record.order
            return record


def is_recorded() -> bool:
    """Return whether the forward pass of a layer is being recorded or replayed."""
    return bool(_active.recordings)


def once(owner: object, first: Callable[[], Value], again: Callable[[], Value]) -> Value:
    """Return ``first()``, which may change state, and record the result.

    A repeated pass returns the recorded result instead, or ``again()`` if there is no record.
    """
    if torch.compiler.is_compiling():
        return first()
    recording = _active.recordings[-1] if _active.recordings else None
    if is_recomputing():
        recorded = () if recording is None else recording.take(owner)
        return recorded[0] if recorded else again()
    value = first()
    if recording is not None:
        recording.put(owner, value)
    return value


def _key_of(x: Any) -> object:
    """Return a key for the bits of an input; for devices other than the CPU, a checksum computed on that device."""
    x = x.detach().contiguous()
    return tuple(x.shape), fingerprint(x) if x.device.type == "cpu" else _checksum(x)


def _checksum(x: Tensor) -> int:
    """Return a checksum of the elements' bit patterns, weighted by position; runs on any device."""
    bits = x.view((torch.uint8, torch.int16, torch.int32, torch.int64)[x.element_size().bit_length() - 1]).flatten()
    mixed = torch.arange(1, min(bits.numel(), CHECKSUM_CHUNK) + 1, device=x.device) * HASH_MULTIPLIER
    weights = (mixed ^ (mixed >> 31)) * HASH_MULTIPLIER | 1
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for chunk in bits.split(CHECKSUM_CHUNK):
        total = total * HASH_MULTIPLIER + (chunk * weights[: chunk.numel()]).sum()
    return int(total)
