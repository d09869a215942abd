"""Types in GGUF files: tensor types with their blocks, and types of metadata values.

Numbers and block sizes of tensor types come from the package ``gguf``, which llama.cpp maintains; it is imported when
they are first needed. In detent, a tensor type has the name of a NumPy or ml_dtypes type ("bfloat16"), or the name of a
block format ("q4_k"). In files and messages it has the name of llama.cpp ("BF16", "Q4_K").
"""

from collections.abc import Mapping
from functools import cache
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from detent.errors import UnsupportedError, install_hint
from detent.gguf import type_format

__all__ = ["VALUE_TYPES", "TensorType", "tensor_types", "types_by_number"]

_ELEMENTS = MappingProxyType(
    {
        "F64": "float64",
        "F32": "float32",
        "F16": "float16",
        "BF16": "bfloat16",
        "I64": "int64",
        "I32": "int32",
        "I16": "int16",
        "I8": "int8",
    }
)
# Types of metadata values by name: their number in files, and their NumPy type (None for strings).
VALUE_TYPES: Mapping[str, tuple[int, np.dtype[Any] | None]] = MappingProxyType(
    {
        "uint8": (0, np.dtype("u1")),
        "int8": (1, np.dtype("i1")),
        "uint16": (2, np.dtype("<u2")),
        "int16": (3, np.dtype("<i2")),
        "uint32": (4, np.dtype("<u4")),
        "int32": (5, np.dtype("<i4")),
        "float32": (6, np.dtype("<f4")),
        "bool": (7, np.dtype("u1")),  # read as bytes, because a byte above 1 is not a valid bool
        "string": (8, None),
        "uint64": (10, np.dtype("<u8")),
        "int64": (11, np.dtype("<i8")),
        "float64": (12, np.dtype("<f8")),
    }
)
ARRAY_TYPE = 9


class TensorType(NamedTuple):
    """A type of tensors.

    Attributes:
        name: name in llama.cpp, such as "Q4_K".
        number: number in GGUF files.
        block_size: number of elements in a block; 1 for plain elements.
        block_bytes: number of bytes of a block.
        dtype: name in detent, such as "bfloat16" or "q4_k".
    """

    name: str
    number: int
    block_size: int
    block_bytes: int
    dtype: str

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Return the number of bytes of a tensor, whose rows must consist of complete blocks."""
        return prod(shape) // self.block_size * self.block_bytes

    @property
    def bits_per_weight(self) -> float:
        """The number of stored bits per element."""
        return self.block_bytes * 8 / self.block_size


@cache
def tensor_types() -> Mapping[str, TensorType]:
    """Return all tensor types by name.

    >>> tensor_types()["Q4_K"]
    TensorType(name='Q4_K', number=12, block_size=256, block_bytes=144, dtype='q4_k')
    """
    try:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType  # noqa: PLC0415 - optional package
    except ImportError as error:
        raise UnsupportedError(f"GGUF files need the package gguf: {install_hint('gguf')}") from error
    types = {}
    for kind in GGMLQuantizationType:
        size, nbytes = GGML_QUANT_SIZES[kind]
        form = type_format(kind.name)
        dtype = _ELEMENTS.get(kind.name, kind.name.lower()) if form is None else form.name
        types[kind.name] = TensorType(kind.name, int(kind), int(size), int(nbytes), dtype)
    return MappingProxyType(types)


@cache
def types_by_number() -> Mapping[int, TensorType]:
    """Return all tensor types by their number in files."""
    return MappingProxyType({kind.number: kind for kind in tensor_types().values()})
