"""detent: quantization of neural networks, with bit-exact verification of the exported file.

A spec describes a quantization, and params contain its scales and zero points. Operators compute codes and values
from data and params; ``FakeQuantize`` is a quantizer with state, for training::

    spec (QuantSpec)  ->  params (QuantParams)  ->  codes (QuantizedTensor)  ->  values

``import detent`` loads NumPy and ml_dtypes, but neither PyTorch nor ONNX.
"""

from detent import convention, formats, gguf, granularity, metrics, observers, packing, rounding, ste
from detent.block_format import BlockFormat
from detent.block_tensor import BlockTensor
from detent.convention import Convention, ZeroRange
from detent.granularity import Granularity, PerAxis, PerBlock, PerChannel, PerGroup, PerTensor, PerToken
from detent.kernels import Capabilities, capabilities, get_num_threads, set_num_threads, use_kernels
from detent.params import QuantParams
from detent.plan import Plan, PrecisionGuarantee
from detent.quantizer import FakeQuantize
from detent.recipe import Recipe
from detent.rounding import Rounding
from detent.rule import Rule
from detent.scale_mode import EMA, Fixed, Learned, PerBatch, ScaleMode
from detent.spec import QuantSpec, mxfp4, mxfp8, mxfp8_e5m2, nvfp4
from detent.tensor import QuantizedTensor
from detent.verification import verify

# fmt: off
# isort: off
from detent.errors import (
    DetentError, DtypeError, FileFormatError, NaNError, NotCalibratedError, OutError, ParamsError, RangeError,
    ShapeError, SpecError, StateError, UnsupportedError, VerificationError, WorkerError,
)
from detent.formats import (
    Format, float4_e2m1fn, float8_e4m3fn, float8_e5m2, int2, int4, int8, int16, nf4, uint2, uint4, uint8, uint16,
)
# Rare bit widths: available as dt.int11, but neither in __all__ nor in dir(dt).
from detent.formats import (
    int1 as int1, int3 as int3, int5 as int5, int6 as int6, int7 as int7, int9 as int9, int10 as int10, int11 as int11,
    int12 as int12, int13 as int13, int14 as int14, int15 as int15, uint1 as uint1, uint3 as uint3, uint5 as uint5,
    uint6 as uint6, uint7 as uint7, uint9 as uint9, uint10 as uint10, uint11 as uint11, uint12 as uint12,
    uint13 as uint13, uint14 as uint14, uint15 as uint15,
)
from detent.ops import (
    dequantize, dequantize_backward, fake_quantize, fake_quantize_backward, fake_quantize_dynamic,
    fake_quantize_learned_backward, fake_quantize_masked, fake_quantize_masked_backward, quantize, quantize_backward,
)
# isort: on

__version__ = "0.1.0.dev0"

__all__ = [
    "EMA", "BlockFormat", "BlockTensor", "Capabilities", "Convention", "DetentError", "DtypeError", "FakeQuantize",
    "FileFormatError", "Fixed", "Format", "Granularity", "Learned", "NaNError", "NotCalibratedError", "OutError",
    "ParamsError", "PerAxis", "PerBatch", "PerBlock", "PerChannel", "PerGroup", "PerTensor", "PerToken", "Plan",
    "PrecisionGuarantee", "QuantParams", "QuantSpec", "QuantizedTensor", "RangeError", "Recipe", "Rounding", "Rule",
    "ScaleMode", "ShapeError", "SpecError", "StateError", "UnsupportedError", "VerificationError", "WorkerError",
    "ZeroRange", "__version__", "capabilities", "convention", "dequantize", "dequantize_backward", "fake_quantize",
    "fake_quantize_backward", "fake_quantize_dynamic", "fake_quantize_learned_backward", "fake_quantize_masked",
    "fake_quantize_masked_backward", "float4_e2m1fn", "float8_e4m3fn", "float8_e5m2", "formats", "get_num_threads",
    "gguf", "granularity", "int2", "int4", "int8", "int16", "metrics", "mxfp4", "mxfp8", "mxfp8_e5m2", "nf4", "nvfp4",
    "observers", "packing", "quantize", "quantize_backward", "rounding", "set_num_threads", "ste", "uint2", "uint4",
    "uint8", "uint16", "use_kernels", "verify",
]
# fmt: on

__dir__ = __all__.copy  # completion lists only public names, without private modules and rare bit widths
