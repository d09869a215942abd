"""Distributed training: merge the ranges of several processes exactly, in collectives that all processes call.

::

    calibration   all-gather of quantizer settings and observers, as bytes        once, on leaving qt.calibrating
    training      all-reduce, MAX of (-lo, hi), in one flat tensor                once per step, in qt.sync

Observers merge in rank order and ranges merge by MAX, so every process computes the same bits. Nothing is pickled. If
one process skipped a collective, the others would hang. So a process that fails in calibration sends ``FAILED`` instead
of its observers, and processes without data send empty ranges. Collectives use the default process group. Tensors
in collectives are on the CPU if the backend supports CPU tensors, as gloo does. Otherwise they are on the device of the
quantizers.
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
from detent.tables import counted
from detent.torch.arrays import process_count, to_tensor
from detent.torch.model_plan import ModelPlan
from detent.torch.preparation import plan_of, quantizers_of
from detent.torch.quantized_layer import QuantizedMatmul
from detent.torch.quantizer import FakeQuantize

__all__ = ["merge_observers", "sync", "without_collectives"]

FAILED = -1  # a process that failed sends this as the length of its data
DESCRIPTION = "detent.calibration"  # metadata key for the settings of the quantizers
MAX_DIFFERENCES_SHOWN = 10
_compared: WeakKeyDictionary[nn.Module, ModelPlan] = WeakKeyDictionary()  # model -> plan compared on all processes


def merge_observers(observers: Mapping[str, Observer], model: nn.Module) -> dict[str, Observer]:
    """Merge the observers of all processes by quantizer name; pass all observers, even those without data."""
    if process_count() == 1:
        return dict(observers)
    description = json.dumps(_describe(model, observers))
    states = {name: np.frombuffer(each.to_bytes(), np.uint8) for name, each in observers.items()}
    parts = [storage.loads(part) for part in _exchange(storage.dumps(states, {DESCRIPTION: description}), model)]
    _check_same([json.loads(metadata[DESCRIPTION]) for _, metadata in parts])
    merged = {}
    for name, own in observers.items():
        first, *others = (type(own).from_bytes(arrays[name].tobytes()) for arrays, _ in parts)
        for other in others:
            first.merge(other)
        merged[name] = first
    return merged


@contextmanager
def without_collectives(model: nn.Module) -> Iterator[None]:
    """Let processes run different numbers of forward passes: inside the context, DDP does not broadcast buffers.

    If the body raises on one process, the other processes raise in ``merge_observers``. If a process is killed, only
    the backend's timeout ends the other processes. The same holds if a process fails while other processes wait in the
    forward pass of a sharded model.
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
            with suppress(RuntimeError):  # the error of the body explains more than this error
                _gather(torch.tensor([FAILED]), model)
        raise
    finally:
        for each, before in wrappers.items():
            each.require_forward_param_sync = before


def sync(model: nn.Module) -> None:
    """Update the EMA ranges with the merged ranges that all processes have observed since the last call.

    Call ``sync`` once per optimizer step on every process, after ``optimizer.step()``; ``qt.Schedule.step()`` includes
    this call. The updated ranges have the same bits on every process, and forward passes use them until the next call.
    A single process needs ``sync`` only if the model was prepared with ``sync=True``. Folded batch norms get the
    running statistics of rank 0, as under DDP; otherwise the processes would quantize different weights.

    Args:
        model: a prepared model, or a wrapper around one.

    Raises:
        StateError: the model is not prepared, differs between processes, or was prepared with ``sync=False`` although
            there are several processes.

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
    with_ema = [each for each in quantizers_of(model).values() if isinstance(each.mode, EMA)]
    is_parallel = process_count() > 1
    if is_parallel:
        _check_synchronized(with_ema)
        _compare_once(model)
    synchronized = [each for each in with_ema if each.sync]
    statistics = _folded_statistics(model) if is_parallel else []
    # other ranks send -inf, so that MAX returns the value of rank 0
    from_rank_0 = [each if dist.get_rank() == 0 else torch.full_like(each, -torch.inf) for each in statistics]
    parts = [each.pending for each in synchronized] + from_rank_0
    if not parts:
        return
    flat = torch.cat([each.flatten().to(_device(model)) for each in parts])
    if is_parallel:
        dist.all_reduce(flat, dist.ReduceOp.MAX)
    sizes = [each.numel() for each in parts]
    merged = [new.reshape(each.shape) for each, new in zip(parts, flat.split(sizes), strict=True)]
    for quantizer, bounds in zip(synchronized, merged, strict=False):
        quantizer.apply_pending(bounds)
    for statistic, value in zip(statistics, merged[len(synchronized) :], strict=True):
        statistic.copy_(value)


def _folded_statistics(model: nn.Module) -> list[Tensor]:
    """Return the running statistics of folded batch norms."""
    folds = (each.fold for each in model.modules() if isinstance(each, QuantizedMatmul))
    norms = [fold.norm for fold in folds if fold is not None]
    return [part for norm in norms for part in (norm.running_mean, norm.running_var) if part is not None]


def _check_synchronized(with_ema: list[FakeQuantize]) -> None:
    local = [each.label for each in with_ema if not each.sync]
    if local:
        raise StateError(
            f"each process updates the EMA ranges of {counted(len(local), 'quantizer')} separately (first: {local[0]}):"
            " start torch.distributed before qt.prepare, or use qt.prepare(..., sync=True)"
        )


def _compare_once(model: nn.Module) -> None:
    """Raise if the model differs between processes, because collectives would hang or mix up ranges."""
    if _compared.get(model) is plan_of(model):
        return
    description = json.dumps(_describe(model, {}))
    digest = np.frombuffer(sha256(description.encode()).digest(), np.uint8)
    digests = {part.cpu().numpy().tobytes() for part in _gather(to_tensor(digest), model)}
    if len(digests) > 1:
        _check_same([json.loads(part) for part in _exchange(description.encode(), model)])
    if all(
        each.scale.numel() for each in quantizers_of(model).values()
    ):  # if some shapes are not known yet, the next call compares again
        _compared[model] = plan_of(model)


def _describe(model: nn.Module, observers: Mapping[str, Observer]) -> dict[str, str]:
    """Return a text for each quantizer name, with the settings that must be the same on all processes."""
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
    lines = [f"the model on rank 0 is prepared differently from the model on rank {', '.join(map(str, different))}:"]
    for name in names[:MAX_DIFFERENCES_SHOWN]:
        lines += [f"- rank 0: {name}: {first[name]}"] if name in first else []
        lines += [f"+ rank {rank}: {name}: {other[name]}"] if name in other else []
    if len(names) > MAX_DIFFERENCES_SHOWN:
        lines.append(f"  and {len(names) - MAX_DIFFERENCES_SHOWN} more")
    if not names:
        lines.append(f"  rank {rank} has the same quantizers in a different order")
    raise StateError("\n".join([*lines, "build the same model and use the same recipe on every process"]))


def _exchange(data: bytes, model: nn.Module) -> list[bytes]:
    """Gather the bytes of every process in rank order: first the lengths, then the bytes, padded to equal length."""
    sizes = [int(size) for size in _gather(torch.tensor([len(data)]), model)]
    failed = [str(rank) for rank, size in enumerate(sizes) if size == FAILED]
    if failed:
        raise StateError(
            f"calibration failed on rank {', '.join(failed)}, so this process also stops: see the error message "
            "of the failed rank"
        )
    padded: np.ndarray[Any, np.dtype[np.uint8]] = np.zeros(max(sizes), np.uint8)
    padded[: len(data)] = np.frombuffer(data, np.uint8)
    parts = _gather(to_tensor(padded), model)
    return [part.cpu().numpy()[:size].tobytes() for part, size in zip(parts, sizes, strict=True)]


def _gather(own: Tensor, model: nn.Module) -> list[Tensor]:
    own = own.to(_device(model))
    parts = [torch.empty_like(own) for _ in range(process_count())]
    dist.all_gather(parts, own)
    return parts


def _device(model: nn.Module) -> torch.device:
    """Return the device for tensors in collectives of the default process group."""
    if process_count() == 1 or any(name in dist.get_backend() for name in ("gloo", "mpi", "cpu")):
        return torch.device("cpu")
    devices = (each.scale.device for each in quantizers_of(model).values())
    return next((device for device in devices if device.type != "cpu"), torch.device("cuda"))
