"""Tensors for native kernels: their memory as arrays, its order, scratch memory, and PyTorch's threads and processes.

Arrays
    share the tensor's memory, so a kernel reads a tensor where it lies and writes into a tensor made for its result.
    Tensors in another dense order than C (channels last) are seen through a permutation, and stay in their order.
Scratch memory
    is for results that are used at once and then forgotten. Memory for a large tensor comes fresh from the system,
    which clears it page by page: that takes longer than quantizing into it. So quantized copies that only a product
    reads go into a buffer of the thread's own, one for inputs and one for weights, as large as the largest so far.
Threads
    are PyTorch's. It computes with OpenMP, whose threads stay awake for a while after their work; a second pool on the
    same processors would wait for them at every turn, and they for it. So kernels run on the same team, where
    PyTorch's runtime can be found, and on as many threads as ``torch.set_num_threads`` says. (A thread that has not
    used PyTorch yet has the runtime's default.)
"""

import ctypes
import re
import threading
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from detent.checks import FLOATS, compute_type
from detent.errors import DtypeError
from detent.granularity import PerAxis, PerTensor
from detent.kernels import checksum, join_team
from detent.spec import QuantSpec

__all__ = [
    "FLOAT_TYPES",
    "Arguments",
    "Order",
    "Slot",
    "arguments_of",
    "borrow",
    "call_with",
    "check_float",
    "find_runtime",
    "fingerprint",
    "full_tensor",
    "is_distributed",
    "is_plain",
    "on_cpu",
    "order_of",
    "process_count",
    "release",
    "scale_dtype",
    "to_array",
    "to_tensor",
    "use_torch_threads",
]

FLOAT_TYPES: Mapping[torch.dtype, str] = MappingProxyType({getattr(torch, name): name for name in FLOATS})
_PLAIN = frozenset({Tensor, torch.nn.Parameter, torch.nn.Buffer})
_BFLOAT16 = FLOATS["bfloat16"]


def is_plain(x: Tensor) -> bool:
    """Whether native kernels can read the tensor: in the memory of the CPU, real, and no transformation at work.

    >>> is_plain(torch.zeros(2)), is_plain(torch.zeros(2, device="meta"))
    (True, False)
    """
    return (
        type(x) in _PLAIN
        and x.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
    )


def on_cpu(x: Tensor) -> Tensor:
    """The tensor itself where kernels can read it, else a copy on the CPU; without its gradient.

    >>> on_cpu(torch.ones(2, requires_grad=True)).requires_grad
    False
    """
    return x.detach().cpu()


def check_float(x: object, name: str = "x") -> None:
    """Raise unless x is a tensor of a type that data may have.

    >>> check_float(torch.zeros(2))
    """
    if not isinstance(x, Tensor):
        raise DtypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}: NumPy arrays go to detent itself")
    if x.layout != torch.strided:
        raise DtypeError(f"{name} has layout {x.layout}, expected a dense tensor: convert it first, {name}.to_dense()")
    if x.dtype not in FLOAT_TYPES:
        expected = ", ".join(FLOAT_TYPES.values())
        raise DtypeError(
            f"{name} has dtype {x.dtype}, expected {expected}: convert it first, for example {name}.float()"
        )


def scale_dtype(x: Tensor) -> torch.dtype:
    """The type of scales for such data: float64 for float64, float32 for everything narrower.

    >>> scale_dtype(torch.zeros(1, dtype=torch.bfloat16))
    torch.float32
    """
    dtype: torch.dtype = compute_type(x.dtype, torch)
    return dtype


def to_array(x: Tensor) -> NDArray[Any]:
    """The same memory as a NumPy array.

    >>> to_array(torch.ones(2, dtype=torch.bfloat16)).dtype
    dtype(bfloat16)
    """
    data = x.detach()
    if x.dtype == torch.bfloat16:
        return _shared(data.view(torch.int16)).view(_BFLOAT16)
    return _shared(data)


def _shared(x: Tensor) -> NDArray[Any]:
    if is_distributed():  # numpy() would mark the memory as not to be freed, which FSDP does after each forward
        array: NDArray[Any] = np.from_dlpack(x)
        if array.flags.writeable:
            return array
    return x.numpy()


def to_tensor(array: NDArray[Any]) -> Tensor:
    """The array as a tensor that shares its memory; a read-only one is copied.

    >>> to_tensor(np.ones(2, np.float32))
    tensor([1., 1.])
    """
    if not array.flags.writeable:
        array = array.copy()
    if array.dtype == _BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(np.asarray(array))


class Order(NamedTuple):
    """The order of a tensor's axes in memory, None for C order, and the spec of the data in that order.

    >>> order = Order((1, 0), QuantSpec("int8"))
    >>> order.restore(order.lay(torch.zeros(2, 3))).shape
    torch.Size([2, 3])
    """

    axes: tuple[int, ...] | None
    spec: QuantSpec

    def lay(self, x: Tensor) -> Tensor:
        """A tensor of the same shape in this order, C-contiguous; a view where it already lies so.

        >>> Order((1, 0), QuantSpec("int8")).lay(torch.zeros(2, 3)).shape
        torch.Size([3, 2])
        """
        return (x if self.axes is None else x.permute(self.axes)).contiguous()

    def restore(self, laid: Tensor) -> Tensor:
        """The tensor whose order this is, as a view.

        >>> Order((1, 0), QuantSpec("int8")).restore(torch.zeros(3, 2)).shape
        torch.Size([2, 3])
        """
        if self.axes is None:
            return laid
        return laid.permute(sorted(range(laid.ndim), key=self.axes.__getitem__))


def order_of(x: Tensor, spec: QuantSpec) -> Order:
    """The order in which x lies in memory, where that is dense and its sets can be named in it; else C order.

    In channels-last order an image is C-contiguous, with its channels as the last axis.

    >>> x = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
    >>> order = order_of(x, QuantSpec("int8", granularity=PerAxis(1)))
    >>> order.axes, str(order.spec.granularity)
    ((0, 2, 3, 1), 'axis3')
    """
    kept = spec.granularity
    if x.is_contiguous() or spec.rounding.kind == "stochastic":  # whose numbers go by position
        return Order(None, spec)
    strides = x.stride()
    axes = tuple(sorted(range(x.ndim), key=lambda axis: (-strides[axis], axis)))
    if not x.permute(axes).is_contiguous():
        return Order(None, spec)
    if isinstance(kept, PerTensor):
        return Order(axes, spec)
    if isinstance(kept, PerAxis) and -x.ndim <= kept.axis < x.ndim:
        return Order(axes, _with_axis(spec, axes.index(kept.axis % x.ndim)))
    return Order(None, spec)


@lru_cache(maxsize=256)
def _with_axis(spec: QuantSpec, axis: int) -> QuantSpec:
    return spec.replace(granularity=PerAxis(axis))


FEW_ELEMENTS = 64  # tensors up to this size are compared as they are, larger ones by a checksum


def fingerprint(*tensors: Tensor) -> tuple[object, ...]:
    """A key that changes with any bit of the tensors; on other devices, with any change that a tensor knows of.

    >>> x = torch.zeros(2)
    >>> before = fingerprint(x)
    >>> x.data[0] = 1.0
    >>> fingerprint(x) == before
    False
    """
    parts: list[object] = []
    for tensor in tensors:
        if type(tensor) not in _PLAIN or tensor.device.type != "cpu":
            parts += [tensor.data_ptr(), tensor._version]
            continue
        array = to_array(tensor)
        parts.append(array.tobytes() if array.size <= FEW_ELEMENTS else checksum(array))
    return tuple(parts)


Slot = Literal["input", "weight"]
MIN_BYTES, MAX_BYTES = 1 << 17, 1 << 28  # smaller blocks the allocator keeps at hand; larger ones are not to be held
MAX_VIEWS = 256


class _Buffers(threading.local):
    def __init__(self) -> None:
        self.memory: dict[str, Tensor] = {}  # by slot
        self.views: dict[object, Tensor] = {}  # of that memory, by slot, type and shape


_buffers = _Buffers()


def borrow(slot: Slot | None, like: Tensor) -> Tensor:
    """A C-contiguous tensor of that shape and type, whatever is in it; valid until the slot is borrowed again.

    >>> a, b = borrow("input", torch.zeros(1 << 18)), borrow("input", torch.zeros(1 << 17))
    >>> a.data_ptr() == b.data_ptr(), borrow(None, b).data_ptr() == b.data_ptr()
    (True, False)
    """
    size = like.numel() * like.element_size()
    if slot is None or not MIN_BYTES <= size <= MAX_BYTES:
        return torch.empty_like(like, memory_format=torch.contiguous_format, requires_grad=False)
    key = (slot, like.dtype, like.shape)
    view = _buffers.views.get(key)
    if view is None:
        buffer = _buffers.memory.get(slot)
        if buffer is None or buffer.numel() < size:
            release()
            buffer = torch.empty(size, dtype=torch.uint8)
            _buffers.memory[slot] = buffer
        view = buffer[:size].view(like.dtype).view(like.shape)
        if len(_buffers.views) >= MAX_VIEWS:
            _buffers.views.clear()
        _buffers.views[key] = view
    return view


def release() -> None:
    """Give the calling thread's buffers back."""
    _buffers.memory.clear()
    _buffers.views.clear()


class Arguments(NamedTuple):
    """Positional and keyword arguments of one call of a module."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def arguments_of(batch: object, name: str = "a batch") -> Arguments:
    """Turn a batch into the arguments of a call: a tensor is the first, a tuple has all, a dict has them by name.

    >>> arguments_of({"mask": None}).kwargs, arguments_of([1, 2]).args
    ({'mask': None}, (1, 2))
    """
    if isinstance(batch, Arguments):
        return batch
    if isinstance(batch, Tensor):
        return Arguments((batch,), {})
    if isinstance(batch, tuple | list):
        return Arguments(tuple(batch), {})
    if isinstance(batch, Mapping):
        return Arguments((), dict(batch))
    raise DtypeError(
        f"{name} is of type {type(batch).__name__}, expected a tensor, a tuple of the model's arguments, or a dict of "
        "them by name"
    )


def call_with(module: torch.nn.Module, batch: object) -> Any:
    """Call a module with a batch, see ``arguments_of``.

    >>> call_with(torch.nn.Bilinear(2, 2, 3), (torch.ones(4, 2), torch.ones(4, 2))).shape
    torch.Size([4, 3])
    """
    args, kwargs = arguments_of(batch)
    return module(*args, **kwargs)


_HAS_DISTRIBUTED = torch.distributed.is_available()


def is_distributed() -> bool:
    """Whether ``torch.distributed`` runs; trainers that shard a model may then refill its weights behind our back."""
    return _HAS_DISTRIBUTED and torch.distributed.is_initialized()


def process_count() -> int:
    """How many processes ``torch.distributed`` knows of."""
    return torch.distributed.get_world_size() if is_distributed() else 1


def full_tensor(x: Tensor) -> Tensor:
    """Gather the parts of a DTensor, a collective that every process has to reach; any other tensor as it is."""
    gather = getattr(x, "full_tensor", None)
    return x if gather is None else gather()


RUNTIMES = re.compile(r"lib(gomp|iomp5|omp)[-.][^/]*$")
MAPS = Path("/proc/self/maps")


def find_runtime() -> str | None:
    """The file of the one OpenMP runtime that is loaded; None where there is none, or more than one.

    >>> find_runtime() is None or "omp" in find_runtime()
    True
    """
    try:
        lines = MAPS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # another system
        return None
    paths = {line.split(maxsplit=5)[5] for line in lines if line.count("/")}
    runtimes = sorted(path for path in paths if RUNTIMES.search(path))
    return runtimes[0] if len(runtimes) == 1 else None


def use_torch_threads() -> bool:
    """Let native kernels run on PyTorch's threads. Returns whether they do."""
    path = find_runtime()
    if path is None:
        return False
    try:
        runtime = ctypes.CDLL(path)
        entries = (runtime.GOMP_parallel, runtime.omp_get_max_threads)
    except (OSError, AttributeError):
        return False
    join_team(*(ctypes.cast(entry, ctypes.c_void_p).value or 0 for entry in entries))
    return True


use_torch_threads()
