"""Distributed: merge the ranges of several processes exactly, in collectives that all processes reach.

::

    calibration   every process -> all: its plan and its observers, as bytes      once, on leaving qt.calibrating
    training      MAX over all processes of (-lo, hi), one flat tensor            once per step, in qt.sync

Observers merge in the order of ranks, ranges by MAX, so every process computes the same bits. Nothing is pickled. A
collective that one process skips hangs the others, so a process that fails in calibration sends ``FAILED`` in place of
its observers, and processes without data send ranges that do not count. Tensors go through the default process group,
on the CPU if its backend supports that, as gloo does, else on the quantizers' device.
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
DESCRIPTION = "detent.calibration"  # metadata key of the quantizers' settings
MAX_DIFFERENCES_SHOWN = 10
_compared: WeakKeyDictionary[nn.Module, ModelPlan] = WeakKeyDictionary()


def merge_observers(observers: Mapping[str, Observer], model: nn.Module) -> dict[str, Observer]:
    """Merge the observers of all processes, by quantizer name; those without data must be included."""
    if process_count() == 1:
        return dict(observers)
    description = json.dumps(_describe(model, observers))
    states = {name: np.frombuffer(each.to_bytes(), np.uint8) for name, each in observers.items()}
    parts = [storage.loads(part) for part in _exchange(storage.dumps(states, {DESCRIPTION: description}), model)]
    _check_same([json.loads(metadata[DESCRIPTION]) for _, metadata in parts])
    merged = {}
    for name, mine in observers.items():
        first, *others = (type(mine).from_bytes(arrays[name].tobytes()) for arrays, _ in parts)
        for other in others:
            first.merge(other)
        merged[name] = first
    return merged


@contextmanager
def without_collectives(model: nn.Module) -> Iterator[None]:
    """Let every process run as many forwards as it has data for: DDP sends no buffers in the block.

    If the block raises, the other processes raise in ``merge_observers``. They cannot learn of a process that was
    killed, or that failed while they wait in the forward of a sharded model: there the backend's timeout ends them.
    """
    wrappers = {
        each: each.require_forward_param_sync for each in model.modules() if isinstance(each, DistributedDataParallel)
    }
    for each in wrappers:
        each.require_forward_param_sync = False
    try:
        yield
    except Exception:
        if process_count() > 1:
            with suppress(RuntimeError):  # if the group is broken, the first error is the better message
                _gather(torch.tensor([FAILED]), model)
        raise
    finally:
        for each, before in wrappers.items():
            each.require_forward_param_sync = before


def sync(model: nn.Module) -> None:
    """Merge the ranges that all processes have seen since the last call into the EMA ranges.

    Call it once per optimizer step on every process, after ``optimizer.step()``; ``qt.Schedule.step()`` does it.
    Forwards use the result until the next call, with the same bits on every process. A single process whose model was
    prepared with ``sync=True`` follows the same rule. Folded batch norms take the running statistics of rank 0, as
    under DDP; otherwise each process would quantize different weights.

    Args:
        model: a prepared model, or a wrapper around one.

    Raises:
        StateError: the model is not prepared, was prepared with ``sync=False`` although there are several processes,
            or differs between processes.

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
    # of the other ranks -inf, so that MAX is the value on rank 0
    firsts = [each if dist.get_rank() == 0 else torch.full_like(each, -torch.inf) for each in norms]
    parts = [each.pending for each in waiting] + firsts
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
    """The running statistics of folded batch norms."""
    folds = (each.fold for each in model.modules() if isinstance(each, QuantizedProduct))
    norms = [fold.norm for fold in folds if fold is not None]
    return [part for norm in norms for part in (norm.running_mean, norm.running_var) if part is not None]


def _refuse_alone(averaged: list[FakeQuantize]) -> None:
    alone = [each.label for each in averaged if not each.sync]
    if alone:
        raise StateError(
            f"{len(alone)} quantizers average the batches of their own process, the first is {alone[0]}: start "
            "torch.distributed before qt.prepare, or use qt.prepare(..., sync=True)"
        )


def _compare_once(model: nn.Module) -> None:
    """Reject models that differ: their ranges would be mixed up, or the collective would never end."""
    if _compared.get(model) is plan_of(model):
        return
    mine = json.dumps(_describe(model, {}))
    digest = np.frombuffer(sha256(mine.encode()).digest(), np.uint8)
    digests = {part.cpu().numpy().tobytes() for part in _gather(to_tensor(digest), model)}
    if len(digests) > 1:
        _check_same([json.loads(part) for part in _exchange(mine.encode(), model)])
    if all(each.scale.numel() for each in quantizers_of(model).values()):  # else shapes are not known yet
        _compared[model] = plan_of(model)


def _describe(model: nn.Module, observers: Mapping[str, Observer]) -> dict[str, str]:
    """The settings of each quantizer, which must be the same on all processes."""
    lines = {}
    for name, each in quantizers_of(model).items():
        ste = "custom" if isinstance(each.ste, Custom) else repr(each.ste)
        observer = f", {observers[name]!r}" if name in observers else ""
        synced = ", sync" if each.sync and isinstance(each.mode, EMA) else ""
        shape = "" if observers else f", scale shape {tuple(each.scale.shape)}"
        lines[name] = f"{each.spec}, {each.mode}, {ste}{synced}{observer}{shape}"
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
    """The bytes of every process, in the order of ranks; lengths go first, then bytes padded to one length."""
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
    """The device that the backend of the default group needs."""
    if process_count() == 1 or any(name in dist.get_backend() for name in ("gloo", "mpi", "cpu")):
        return torch.device("cpu")
    devices = (each.scale.device for each in quantizers_of(model).values())
    return next((device for device in devices if device.type != "cpu"), torch.device("cuda"))
