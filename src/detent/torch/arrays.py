"""Tensors as NumPy arrays and back, without copies: the way from PyTorch to the native kernels.

Memory is shared, so that a kernel reads a tensor where it lies and writes into a tensor that was made for its result.
Tensors in another dense order than C (channels last) are seen through a permutation, and stay in their order.
"""

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from detent.errors import DtypeError
from detent.granularity import PerAxis, PerTensor
from detent.kernels import checksum
from detent.spec import QuantSpec
from detent.torch.processes import is_distributed

__all__ = [
    "FLOAT_TYPES",
    "Order",
    "check_float",
    "is_plain",
    "on_cpu",
    "order_of",
    "scale_dtype",
    "to_array",
    "to_tensor",
]

FLOAT_TYPES: Mapping[torch.dtype, str] = MappingProxyType(
    {
        torch.float16: "float16",
        torch.bfloat16: "bfloat16",
        torch.float32: "float32",
        torch.float64: "float64",
    }
)
_PLAIN = frozenset({Tensor, torch.nn.Parameter, torch.nn.Buffer})
FEW = 64  # elements that are compared as they are
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


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
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def to_array(x: Tensor) -> NDArray[Any]:
    """The same memory as a NumPy array.

    >>> to_array(torch.ones(2, dtype=torch.bfloat16)).dtype
    dtype(bfloat16)
    """
    known = x.detach()
    if x.dtype == torch.bfloat16:
        return _shared(known.view(torch.int16)).view(_BFLOAT16)
    return _shared(known)


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


def fingerprint(*tensors: Tensor) -> tuple[object, ...]:
    """What changes with any bit of small tensors; on other devices, with any change that a tensor knows of.

    >>> x = torch.zeros(2)
    >>> before = fingerprint(x)
    >>> x.data[0] = 1.0
    >>> fingerprint(x) == before
    False
    """
    found: list[object] = []
    for tensor in tensors:
        if type(tensor) not in _PLAIN or tensor.device.type != "cpu":
            found += [tensor.data_ptr(), tensor._version]
            continue
        array = to_array(tensor)
        found.append(array.tobytes() if array.size <= FEW else checksum(array))
    return tuple(found)


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
