"""Block formats of GGUF files: the bytes that llama.cpp reads, and those that its quantizer writes.

Every format is a ``BlockFormat``, and is accepted wherever a spec is: ``dt.quantize(w, dt.gguf.q4_k)``, or the name,
``dt.quantize(w, "q4_k")``. The bytes equal those of ``ggml_quantize_chunk``, with and without importance.
"""

from detent.gguf.format_table import BLOCK_FORMATS, find_block_format, get_block_format, type_format
from detent.gguf.iq4 import iq4_nl, iq4_xs
from detent.gguf.k_quants import q2_k, q3_k, q4_k, q5_k, q6_k
from detent.gguf.legacy import q4_0, q4_1, q5_0, q5_1, q8_0
from detent.gguf.mxfp4 import mxfp4

__all__ = [
    "BLOCK_FORMATS",
    "find_block_format",
    "get_block_format",
    "iq4_nl",
    "iq4_xs",
    "mxfp4",
    "q2_k",
    "q3_k",
    "q4_0",
    "q4_1",
    "q4_k",
    "q5_0",
    "q5_1",
    "q5_k",
    "q6_k",
    "q8_0",
    "type_format",
]
