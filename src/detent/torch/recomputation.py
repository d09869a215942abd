"""Recomputation: a forward that activation checkpointing repeats in backward computes what the first one computed.

The first forward changes state: EMA ranges move, the counter of stochastic rounding counts, batch norms average. The
repeated one must change nothing and must use the values of its own first forward, which need not be the newest: a layer
may run several times before one backward. PyTorch does not say which forward is repeated, so layers record what they
used, under a checksum of their input, and look it up by the input of the repeated forward, newest first. Some operators
give other bits with gradients than without; behind them, layers follow in the order of the first forward. Records are
small (parameters, counters, gains) and are made only where a forward may be repeated: with gradients off
(``use_reentrant=True``) or saved tensors hooked (``use_reentrant=False``).

Left out: compiled code inside an eager checkpoint, which cannot know that it is repeated. Checkpoints inside compiled
code are the compiler's own.
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

__all__ = ["Recording", "is_recomputing", "is_recorded", "once"]

Value = TypeVar("Value")
MAX_RECORDS = 1024  # forwards of one layer before a backward
MAX_REPLAYED = 8  # records kept after they were used, for graphs that are retained
ODD = -7046029254386353131  # 2**64 over the golden ratio, as int64
CHECKSUM_CHUNK = 1 << 20  # elements, which take 8 bytes each

_hooks_of_saved_tensors: Callable[[bool], object] = getattr(
    torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: True
)


def is_recomputing() -> bool:
    """Whether a forward runs inside a backward, as activation checkpointing repeats it."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def _may_be_repeated() -> bool:
    return not torch.is_grad_enabled() or _hooks_of_saved_tensors(True) is not None


_order = itertools.count()


class _Record:
    """What one forward of a layer used, in order, by owner."""

    def __init__(self, key: object = None) -> None:
        self.key = key  # of its input
        self.order = next(_order)
        self.values: dict[object, list[Any]] = {}
        self.is_replayed = False


_journals: WeakKeyDictionary[nn.Module, deque[_Record]] = WeakKeyDictionary()
_lock = threading.Lock()


class _Active(threading.local):
    def __init__(self) -> None:
        self.recordings: list[Recording] = []
        self.replayed = -1  # the order of the last record that was used


_active = _Active()


class Recording:
    """One forward of a layer in training, as a context: recorded if it may be repeated, replayed if it is."""

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
        """Record what the owner used."""
        if self._record is None:
            self._record = _Record(_key_of(self._x))
        self._record.values.setdefault(owner, []).append(value)

    def take(self, owner: object) -> tuple[Any, ...]:
        """The value that the owner used at this place of the first forward; () if it is not known."""
        if self._record is None:
            self._record = self._find() or _Record()
        values, place = self._record.values.get(owner, ()), self._taken.get(owner, 0)
        self._taken[owner] = place + 1
        return (values[place],) if place < len(values) else ()

    def _find(self) -> _Record | None:
        """The record of the forward that is repeated: the newest of this input, else the next one in order."""
        key = _key_of(self._x)
        with _lock:
            records = list(_journals.get(self._layer, ()))
            matching = [each for each in records if each.key == key]
            if matching and all(each.is_replayed for each in matching):  # a retained graph is repeated once more
                for each in matching:
                    each.is_replayed = False
            unused = [each for each in matching if not each.is_replayed]
            following = [each for each in records if each.order > _active.replayed]
            if not unused and not following:
                return None
            found = unused[-1] if unused else following[0]
            found.is_replayed = True
            _active.replayed = found.order
            return found


def is_recorded() -> bool:
    """Whether the forward of a layer is being recorded or replayed."""
    return bool(_active.recordings)


def once(owner: object, first: Callable[[], Value], again: Callable[[], Value]) -> Value:
    """``first()``, which may change state; in a repeated forward what it gave, or ``again()`` if that is unknown."""
    if torch.compiler.is_compiling():
        return first()
    recording = _active.recordings[-1] if _active.recordings else None
    if is_recomputing():
        known = () if recording is None else recording.take(owner)
        return known[0] if known else again()
    value = first()
    if recording is not None:
        recording.put(owner, value)
    return value


def _key_of(x: Any) -> object:
    """What tells inputs apart: their bits; on other devices a checksum of these, computed there."""
    x = x.detach().contiguous()
    return tuple(x.shape), fingerprint(x) if x.device.type == "cpu" else _checksum(x)


def _checksum(x: Tensor) -> int:
    """A sum of all bits, weighted by position, on any device."""
    bits = x.view((torch.uint8, torch.int16, torch.int32, torch.int64)[x.element_size().bit_length() - 1]).flatten()
    mixed = torch.arange(1, min(bits.numel(), CHECKSUM_CHUNK) + 1, device=x.device) * ODD
    weights = (mixed ^ (mixed >> 31)) * ODD | 1
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for chunk in bits.split(CHECKSUM_CHUNK):
        total = total * ODD + (chunk * weights[: chunk.numel()]).sum()
    return int(total)
