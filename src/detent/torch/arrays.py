"""Helpers for native kernels: tensors as NumPy arrays, memory order, scratch memory, threads and processes.

Native kernels read a dense tensor that is not in C order, for example a channels-last tensor, as a permuted view. The
result has the same memory order as the input. Quantized copies that only one matmul reads are written to scratch
memory, which is reused: allocating new pages for a large tensor takes longer than quantizing it. Kernels run on the
threads of PyTorch's OpenMP runtime if that runtime is found; ``torch.set_num_threads`` sets the number of threads.
OpenMP threads keep spinning for a while after their work, so a second thread pool on the same cores would have to wait.
"""

import ctypes
import re
import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch._prims_common import suggest_memory_format as _suggest_memory_format
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

from detent.checks import FLOATS, compute_type
from detent.errors import DtypeError
from detent.granularity import PerAxis, PerTensor
from detent.kernels import checksum, join_team
from detent.spec import QuantSpec

__all__ = [
    "FLOAT_TYPES",
    "PLAIN_TYPES",
    "Arguments",
    "Order",
    "Slot",
    "arguments_of",
    "borrow",
    "borrow_as",
    "call_with",
    "check_float",
    "find_runtime",
    "fingerprint",
    "float_outputs",
    "full_tensor",
    "is_channels_last",
    "is_distributed",
    "is_plain",
    "on_cpu",
    "order_of",
    "process_count",
    "scale_dtype",
    "to_array",
    "to_tensor",
    "use_torch_threads",
]

FLOAT_TYPES: Mapping[torch.dtype, str] = MappingProxyType({getattr(torch, name): name for name in FLOATS})
PLAIN_TYPES = frozenset({Tensor, torch.nn.Parameter, torch.nn.Buffer})
_BFLOAT16 = FLOATS["bfloat16"]


def is_plain(x: Tensor) -> bool:
    """Return whether native kernels can read the tensor.

    The tensor must be an ordinary ``torch.Tensor`` in CPU memory, neither traced nor transformed by ``torch.func``. The
    result is also False during forward-mode differentiation, because native kernels do not compute tangents.
    """
    return (
        type(x) in PLAIN_TYPES
        and x.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
    )


def on_cpu(x: Tensor) -> Tensor:
    """Detach the tensor, and copy it to the CPU if it is on another device."""
    return x.detach().cpu()


def check_float(x: object, name: str = "x") -> None:
    """Raise unless x is a dense tensor of a supported float type."""
    if not isinstance(x, Tensor):
        raise DtypeError(
            f"got {type(x).__name__} for {name}, expected a torch.Tensor: for NumPy arrays, use the functions in "
            "detent, not in detent.torch"
        )
    if x.layout != torch.strided:
        raise DtypeError(f"{name} has layout {x.layout}, expected a dense tensor: use {name}.to_dense()")
    if x.dtype not in FLOAT_TYPES:
        expected = ", ".join(FLOAT_TYPES.values())
        raise DtypeError(
            f"{name} has dtype {x.dtype}, expected one of {expected}: convert it, for example {name}.float()"
        )


def scale_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of scales for x: float64 for float64 data, else float32."""
    dtype: torch.dtype = compute_type(x.dtype, torch)
    return dtype


def to_array(x: Tensor) -> NDArray[Any]:
    """Return a NumPy array that shares the tensor's memory."""
    data = x.detach()
    if x.dtype == torch.bfloat16:
        array: NDArray[Any] = to_array(data.view(torch.int16)).view(_BFLOAT16)
        return array
    if is_distributed():  # numpy() would keep memory alive that FSDP frees after each forward pass
        array = np.from_dlpack(data)
        if array.flags.writeable:
            return array
    return data.numpy()


def to_tensor(array: NDArray[Any]) -> Tensor:
    """Return a tensor that shares the array's memory; a read-only array is copied."""
    if not array.flags.writeable:
        array = array.copy()
    if array.dtype == _BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(np.asarray(array))


class Order(NamedTuple):
    """The memory order of a tensor's axes (None means C order), and the spec for the tensor permuted to this order."""

    axes: tuple[int, ...] | None
    spec: QuantSpec

    def lay(self, x: Tensor) -> Tensor:
        """Permute x to this memory order and make it C-contiguous; the result is a view of x if no copy is needed."""
        return (x if self.axes is None else x.permute(self.axes)).contiguous()

    def restore(self, laid: Tensor) -> Tensor:
        """Undo ``lay``: permute a tensor back to the original order of axes, as a view."""
        if self.axes is None:
            return laid
        return laid.permute(sorted(range(laid.ndim), key=self.axes.__getitem__))

    def images(self, shape: Sequence[int]) -> tuple[int, int] | None:
        """Return points and channels of an image if this is channels-last order, for a tensor of ``shape``; else None.

        With a spec per axis, each index of the first axis must have its own parameters.
        """
        if self.axes is None or self.axes != (0, *range(2, len(shape)), 1):
            return None
        if isinstance(self.spec.granularity, PerAxis) and self.spec.granularity.axis != 0:
            return None
        return prod(shape[2:]), shape[1]


def order_of(x: Tensor, spec: QuantSpec) -> Order:
    """Return the memory order of x if x is dense and the spec fits the permuted x; otherwise C order."""
    granularity = spec.granularity
    if x.is_contiguous() or spec.rounding.kind == "stochastic":  # random numbers depend on positions in C order
        return Order(None, spec)
    strides = x.stride()
    axes = tuple(sorted(range(x.ndim), key=lambda axis: (-strides[axis], axis)))
    if not x.permute(axes).is_contiguous():
        return Order(None, spec)
    if isinstance(granularity, PerTensor):
        return Order(axes, spec)
    if isinstance(granularity, PerAxis) and -x.ndim <= granularity.axis < x.ndim:
        return Order(axes, _with_axis(spec, axes.index(granularity.axis % x.ndim)))
    return Order(None, spec)


@lru_cache(maxsize=256)
def _with_axis(spec: QuantSpec, axis: int) -> QuantSpec:
    return spec.replace(granularity=PerAxis(axis))


def is_channels_last(x: Tensor) -> bool:
    """Return whether PyTorch takes x for a channels-last tensor; strides decide, even of axes of size 1."""
    return x.ndim in _CHANNELS_LAST and _suggest_memory_format(x) == _CHANNELS_LAST[x.ndim]


_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
MAX_COPIED_ELEMENTS = 64  # up to this size, a key contains the bytes of a tensor; above it, a checksum is faster


def fingerprint(*tensors: Tensor) -> tuple[object, ...]:
    """Return a key that changes if the tensors change.

    The key contains the bits or a checksum of each plain tensor on the CPU. It contains the address and PyTorch's
    version counter of every other tensor.
    """
    parts: list[object] = []
    for tensor in tensors:
        if type(tensor) not in PLAIN_TYPES or tensor.device.type != "cpu":
            parts += [tensor.data_ptr(), tensor._version]
            continue
        array = to_array(tensor)
        parts.append(array.tobytes() if array.size <= MAX_COPIED_ELEMENTS else checksum(array))
    return tuple(parts)


Slot = Literal["input", "weight"]
MIN_SCRATCH_BYTES = 1 << 17  # the allocator itself reuses smaller blocks
MAX_SCRATCH_BYTES = 1 << 28  # larger blocks would take too much memory while unused
MAX_VIEWS = 256  # per thread; about one view is cached for each operand of each layer


class _Buffers(threading.local):
    def __init__(self) -> None:
        self.memory: dict[str, Tensor] = {}  # slot -> block of memory
        self.views: dict[object, Tensor] = {}  # (slot, dtype, shape) -> view of a block


_buffers = _Buffers()


def borrow(slot: Slot | None, like: Tensor) -> Tensor:
    """Return an uninitialized C-contiguous tensor with the shape and dtype of ``like``.

    The tensor is valid until the same slot is borrowed again. With slot None, the tensor has new memory.
    """
    return borrow_as(slot, like.shape, like.dtype)


def borrow_as(slot: Slot | None, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return an uninitialized C-contiguous tensor with this shape and dtype, like ``borrow``."""
    size = shape.numel() * dtype.itemsize
    if slot is None or not MIN_SCRATCH_BYTES <= size <= MAX_SCRATCH_BYTES:
        return torch.empty(shape, dtype=dtype)
    key = (slot, dtype, shape)
    view = _buffers.views.get(key)
    if view is None:
        buffer = _buffers.memory.get(slot)
        if buffer is None or buffer.numel() < size:
            _buffers.memory.clear()
            _buffers.views.clear()
            buffer = _buffers.memory[slot] = torch.empty(size, dtype=torch.uint8)
        view = buffer[:size].view(dtype).view(shape)
        if len(_buffers.views) >= MAX_VIEWS:
            _buffers.views.clear()
        _buffers.views[key] = view
    return view


class Arguments(NamedTuple):
    """Positional and keyword arguments for calling a module."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def arguments_of(batch: object, name: str = "a batch") -> Arguments:
    """Turn a batch (a tensor, a tuple or list of all arguments, or a dict of arguments) into call arguments."""
    if isinstance(batch, Arguments):
        return batch
    if isinstance(batch, Tensor):
        return Arguments((batch,), {})
    if isinstance(batch, tuple | list):
        return Arguments(tuple(batch), {})
    if isinstance(batch, Mapping):
        return Arguments((), dict(batch))
    raise DtypeError(
        f"got {type(batch).__name__} for {name}, expected a tensor, a tuple of the model's arguments, or a dict of "
        "arguments by name"
    )


def call_with(module: torch.nn.Module, batch: object) -> Any:
    """Call a module with a batch, which is a tensor, a tuple or list of all arguments, or a dict of arguments."""
    args, kwargs = arguments_of(batch)
    return module(*args, **kwargs)


def float_outputs(outputs: object) -> list[NDArray[Any]]:
    """Return the float tensors in the outputs of a model, in order, as float32 arrays."""
    # Hugging Face models return mappings that are not dicts; pytree would treat them as leaves.
    leaves = pytree.tree_leaves(list(outputs.values()) if isinstance(outputs, Mapping) else outputs)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return [tensor.detach().to("cpu", torch.float32).numpy() for tensor in tensors]


_HAS_DISTRIBUTED = torch.distributed.is_available()


def is_distributed() -> bool:
    """Return whether ``torch.distributed`` is initialized.

    If so, trainers may rewrite sharded weights without incrementing PyTorch's version counter.
    """
    return _HAS_DISTRIBUTED and torch.distributed.is_initialized()


def process_count() -> int:
    """Return the world size of ``torch.distributed``; 1 if it is not initialized."""
    return torch.distributed.get_world_size() if is_distributed() else 1


def full_tensor(x: Tensor) -> Tensor:
    """Gather a DTensor in a collective, which every process must call; return any other tensor unchanged."""
    gather = getattr(x, "full_tensor", None)
    return x if gather is None else gather()


OPENMP_LIBRARY = re.compile(r"lib(gomp|iomp5|omp)[-.][^/]*$")
MEMORY_MAPS = Path("/proc/self/maps")


def find_runtime() -> str | None:
    """Return the path of the loaded OpenMP runtime, or None if no runtime or several runtimes are loaded."""
    try:
        lines = MEMORY_MAPS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # not Linux
        return None
    paths = {line.split(maxsplit=5)[5] for line in lines if line.count("/")}
    runtimes = sorted(path for path in paths if OPENMP_LIBRARY.search(path))
    return runtimes[0] if len(runtimes) == 1 else None


def use_torch_threads() -> bool:
    """Let native kernels run on PyTorch's threads; return False if no suitable OpenMP runtime is loaded."""
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
