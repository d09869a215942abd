"""Block formats by name; a new format is one more entry."""

from collections.abc import Mapping
from types import MappingProxyType

from detent.block_format import BlockFormat
from detent.errors import SpecError, closest
from detent.gguf.iq4 import iq4_nl, iq4_xs
from detent.gguf.k_quants import q2_k, q3_k, q4_k, q5_k, q6_k
from detent.gguf.legacy import q4_0, q4_1, q5_0, q5_1, q8_0
from detent.gguf.mxfp4 import mxfp4

__all__ = ["BLOCK_FORMATS", "find_block_format", "get_block_format", "type_format"]

_ALL = (q4_0, q4_1, q5_0, q5_1, q8_0, q2_k, q3_k, q4_k, q5_k, q6_k, iq4_nl, iq4_xs, mxfp4)
BLOCK_FORMATS: Mapping[str, BlockFormat] = MappingProxyType({form.name: form for form in _ALL})
_BY_TYPE = {form.type_name: form for form in _ALL}


def find_block_format(value: object) -> BlockFormat | None:
    """Return a block format, or the block format of this name; None for all other values."""
    if isinstance(value, BlockFormat):
        return value
    return BLOCK_FORMATS.get(value) if isinstance(value, str) else None


def get_block_format(value: BlockFormat | str) -> BlockFormat:
    """Return the block format of this name; return a BlockFormat unchanged.

    Raises:
        SpecError: unknown name; the message suggests the closest name.

    >>> get_block_format("q6_k")
    dt.gguf.q6_k
    """
    form = find_block_format(value)
    if form is None:
        hint = closest(str(value).lower(), BLOCK_FORMATS)
        raise SpecError(f"unknown block format {value!r}{hint} expected {', '.join(BLOCK_FORMATS)}")
    return form


def type_format(type_name: str) -> BlockFormat | None:
    """Return the block format of a tensor type of llama.cpp; None for other types.

    >>> type_format("MXFP4"), type_format("F16")
    (dt.gguf.mxfp4, None)
    """
    return _BY_TYPE.get(type_name)
