"""Distributed: what several processes have seen, merged exactly, each time in one exchange that all of them reach.

::

    calibration   every process -> all: its plan and its observers, as bytes      once, on leaving qt.calibrating
    training      MAX over all processes of (-lo, hi), one flat tensor            once per step, in qt.sync

Observers merge in the order of ranks, ranges by MAX, which no order changes: every process computes the same bits.
Nothing is pickled. A collective that some process skips is a hang; so processes that fail in calibration say so in the
place where the others send their observers, and processes without data send ranges that do not count.

The exchange goes through the default process group, by tensors on the CPU where its backend takes them, as gloo does,
else on the quantizers' device.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from hashlib import sha256
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from detent import storage
from detent.errors import StateError
from detent.observers import Observer
from detent.scale_mode import EMA
from detent.ste import Custom
from detent.torch.arrays import process_count, to_tensor
from detent.torch.model_plan import ModelPlan
from detent.torch.preparation import plan_of, quantizers_of
from detent.torch.quantized_layer import QuantizedProduct
from detent.torch.quantizer import FakeQuantize

__all__ = ["merge_observers", "sync", "without_collectives"]

FAILED = -1
DESCRIPTION = "detent.calibration"  # the key of what observers belong to
MAX_DIFFERENCES_SHOWN = 10
_compared: WeakKeyDictionary[nn.Module, ModelPlan] = WeakKeyDictionary()


def merge_observers(seen: Mapping[str, Observer], model: nn.Module) -> dict[str, Observer]:
    """The observers with what all processes have seen, merged in the order of their ranks.

    Args:
        seen: the observers of this process, by their quantizers' names; those without data among them.
        model: the prepared model they belong to.

    Raises:
        StateError: the processes' models are prepared differently, or another process has failed.

    >>> from detent.observers import MinMax
    >>> import detent.torch as qt
    >>> model = qt.prepare(nn.Sequential(nn.Linear(4, 2)), "w8a8")
    >>> list(merge_observers({"0.input_quantizer": MinMax()}, model))
    ['0.input_quantizer']
    """
    if process_count() == 1:
        return dict(seen)
    description = json.dumps(_describe(model, seen))
    states = {name: np.frombuffer(each.to_bytes(), np.uint8) for name, each in seen.items()}
    parts = [storage.loads(part) for part in _exchange(storage.dumps(states, {DESCRIPTION: description}), model)]
    _check_same([json.loads(metadata[DESCRIPTION]) for _, metadata in parts])
    merged = {}
    for name, mine in seen.items():
        first, *others = (type(mine).from_bytes(arrays[name].tobytes()) for arrays, _ in parts)
        for other in others:
            first.merge(other)
        merged[name] = first
    return merged


@contextmanager
def without_collectives(model: nn.Module) -> Iterator[None]:
    """Let every process run as many forwards as it has data for, until all meet in ``merge_observers``.

    DDP sends no buffers meanwhile. If the block raises, the others are told, and raise where they meet. A process that
    ends, or fails while others wait in the collectives of a sharded model's forward, cannot tell: there the backend
    notices, or its timeout.

    """
    wrappers = [each for each in model.modules() if isinstance(each, DistributedDataParallel)]
    were = [each.require_forward_param_sync for each in wrappers]
    for each in wrappers:
        each.require_forward_param_sync = False
    try:
        yield
    except Exception:
        if process_count() > 1:
            with suppress(RuntimeError):  # of a broken group: what broke it is the better message
                _gather(torch.tensor([FAILED]), model)
        raise
    finally:
        for each, was in zip(wrappers, were, strict=True):
            each.require_forward_param_sync = was


def sync(model: nn.Module) -> None:
    """Merge what the quantizers of all processes have seen since the last call, and move their averages by it.

    Call it once per optimizer step, on every process, where all of them get to whatever their data: after
    ``optimizer.step()``, as ``qt.Schedule.step()`` does. Forwards until the next call use the result, which has the
    same bits on every process. A single process whose model was prepared with ``sync=True`` follows the same rule.

    Batch norms that are folded into quantized weights take the running statistics of rank 0, as DDP lets them
    before each forward; otherwise each process would quantize, and ship, other weights.

    Args:
        model: a prepared model, or a wrapper around one.

    Raises:
        StateError: the model is not prepared, its ranges move in forward (``sync=False``) although there are several
            processes, or the processes' models are prepared differently.

    >>> import detent.torch as qt
    >>> model = qt.prepare(nn.Sequential(nn.Linear(1, 1)), "w8a8", sync=True)
    >>> with qt.calibrating(model):
    ...     _ = model(torch.tensor([[0.0], [1.0]]))
    >>> _ = model.train()(torch.tensor([[2.0]]))
    >>> model[0].input_quantizer.hi
    tensor(1.)
    >>> qt.sync(model)
    >>> model[0].input_quantizer.hi
    tensor(1.0100)
    """
    plan_of(model)
    averaged = [each for each in quantizers_of(model).values() if isinstance(each.mode, EMA)]
    several = process_count() > 1
    if several:
        _refuse_alone(averaged)
        _compare_once(model)
    waiting = [each for each in averaged if each.sync]
    norms = _folded_statistics(model) if several else []
    parts = [each.pending for each in waiting] + [_from_first(each) for each in norms]
    if not parts:
        return
    flat = torch.cat([each.flatten().to(_device(model)) for each in parts])
    if several:
        dist.all_reduce(flat, dist.ReduceOp.MAX)
    sizes = [each.numel() for each in parts]
    merged = [new.reshape(each.shape) for each, new in zip(parts, flat.split(sizes), strict=True)]
    for quantizer, bounds in zip(waiting, merged, strict=False):
        quantizer.apply_pending(bounds)
    for statistic, first in zip(norms, merged[len(waiting) :], strict=True):
        statistic.copy_(first)


def _folded_statistics(model: nn.Module) -> list[Tensor]:
    """The running statistics in the factors of quantized weights: where they differ, so do the weights."""
    folds = (each.fold for each in model.modules() if isinstance(each, QuantizedProduct))
    norms = [fold.norm for fold in folds if fold is not None]
    statistics = (part for norm in norms for part in (norm.running_mean, norm.running_var))
    return [part for part in statistics if part is not None]


def _from_first(statistic: Tensor) -> Tensor:
    """What MAX over all processes makes the values of rank 0."""
    return statistic if dist.get_rank() == 0 else torch.full_like(statistic, -torch.inf)


def _refuse_alone(averaged: list[FakeQuantize]) -> None:
    alone = [each.label for each in averaged if not each.sync]
    if alone:
        raise StateError(
            f"{len(alone)} quantizers average the batches of their own process, the first is {alone[0]}: start "
            "torch.distributed before qt.prepare, or use qt.prepare(..., sync=True)"
        )


def _compare_once(model: nn.Module) -> None:
    """Refuse models that differ: their ranges would be mixed up, or the collective would never end."""
    if _compared.get(model) is plan_of(model):
        return
    mine = json.dumps(_describe(model, {}))
    digest = np.frombuffer(sha256(mine.encode()).digest(), np.uint8)
    digests = {part.cpu().numpy().tobytes() for part in _gather(to_tensor(digest), model)}
    if len(digests) > 1:
        _check_same([json.loads(part) for part in _exchange(mine.encode(), model)])
    if all(each.scale.numel() for each in quantizers_of(model).values()):  # else shapes are still to come
        _compared[model] = plan_of(model)


def _describe(model: nn.Module, seen: Mapping[str, Observer]) -> dict[str, str]:
    """What must be the same on all processes: each quantizer's settings, by its name, and the state's shape."""
    lines = {}
    for name, each in quantizers_of(model).items():
        ste = "custom" if isinstance(each.ste, Custom) else repr(each.ste)
        observer = f", {seen[name]!r}" if name in seen else ""
        synced = ", sync" if each.sync and isinstance(each.mode, EMA) else ""
        lines[name] = f"{each.spec}, {each.mode}, {ste}{synced}{observer}"
        if not seen:
            lines[name] += f", scale shape {tuple(each.scale.shape)}"
    return lines


def _check_same(described: list[dict[str, str]]) -> None:
    first = described[0]
    different = [rank for rank, other in enumerate(described) if list(other.items()) != list(first.items())]
    if not different:
        return
    rank, other = different[0], described[different[0]]
    names = [name for name in dict.fromkeys([*first, *other]) if first.get(name) != other.get(name)]
    lines = [f"the models of ranks {', '.join(map(str, different))} are prepared differently from that of rank 0:"]
    for name in names[:MAX_DIFFERENCES_SHOWN]:
        lines += [f"- rank 0: {name}: {first[name]}"] if name in first else []
        lines += [f"+ rank {rank}: {name}: {other[name]}"] if name in other else []
    if len(names) > MAX_DIFFERENCES_SHOWN:
        lines.append(f"  and {len(names) - MAX_DIFFERENCES_SHOWN} more")
    if not names:
        lines.append(f"  the same quantizers in another order on rank {rank}")
    raise StateError("\n".join([*lines, "build the same model and use one recipe on every process"]))


def _exchange(data: bytes, model: nn.Module) -> list[bytes]:
    """The bytes of every process, in the order of ranks: first their lengths, then themselves, padded to one length."""
    sizes = [int(size) for size in _gather(torch.tensor([len(data)]), model)]
    failed = [str(rank) for rank, size in enumerate(sizes) if size == FAILED]
    if failed:
        raise StateError(
            f"calibration failed on rank {', '.join(failed)}, so this process stops, too: its own error says why"
        )
    padded: np.ndarray[Any, np.dtype[np.uint8]] = np.zeros(max(sizes), np.uint8)
    padded[: len(data)] = np.frombuffer(data, np.uint8)
    parts = _gather(to_tensor(padded), model)
    return [part.cpu().numpy()[:size].tobytes() for part, size in zip(parts, sizes, strict=True)]


def _gather(mine: Tensor, model: nn.Module) -> list[Tensor]:
    mine = mine.to(_device(model))
    parts = [torch.empty_like(mine) for _ in range(process_count())]
    dist.all_gather(parts, mine)
    return parts


def _device(model: nn.Module) -> torch.device:
    """Where tensors must be for the default group to take them."""
    if process_count() == 1 or any(name in dist.get_backend() for name in ("gloo", "mpi", "cpu")):
        return torch.device("cpu")
    places = (each.scale.device for each in quantizers_of(model).values())
    return next((place for place in places if place.type != "cpu"), torch.device("cuda"))
