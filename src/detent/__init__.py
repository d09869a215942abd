"""detent: neural-network quantization where what you train is what you ship.

A spec says how numbers are quantized, params hold the scales and zero points, operators compute, and ``FakeQuantize``
keeps state::

    spec (QuantSpec)  ->  params (QuantParams)  ->  codes (QuantizedTensor)  ->  values

``import detent`` loads NumPy and ml_dtypes and nothing heavier.
"""

from detent import convention, formats, granularity, metrics, observers, packing, rounding, ste
from detent.convention import Convention, ZeroRange
from detent.granularity import Granularity, PerAxis, PerBlock, PerGroup, PerTensor, PerToken
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
    ShapeError, SpecError, StateError, UnsupportedError, VerificationError,
)
from detent.formats import (
    Format, float4_e2m1fn, float8_e4m3fn, float8_e5m2, int1, int2, int3, int4, int5, int6, int7, int8, int9, int10,
    int11, int12, int13, int14, int15, int16, nf4, uint1, uint2, uint3, uint4, uint5, uint6, uint7, uint8, uint9,
    uint10, uint11, uint12, uint13, uint14, uint15, uint16,
)
from detent.ops import (
    dequantize, dequantize_backward, fake_quantize, fake_quantize_backward, fake_quantize_dynamic,
    fake_quantize_learned_backward, fake_quantize_masked, fake_quantize_masked_backward, quantize, quantize_backward,
)
# isort: on

__version__ = "0.1.0.dev0"

__all__ = [
    "EMA", "Capabilities", "Convention", "DetentError", "DtypeError", "FakeQuantize", "FileFormatError", "Fixed",
    "Format", "Granularity", "Learned", "NaNError", "NotCalibratedError", "OutError", "ParamsError", "PerAxis",
    "PerBatch", "PerBlock", "PerGroup", "PerTensor", "PerToken", "Plan", "PrecisionGuarantee", "QuantParams",
    "QuantSpec", "QuantizedTensor", "RangeError", "Recipe", "Rounding", "Rule", "ScaleMode", "ShapeError",
    "SpecError", "StateError", "UnsupportedError", "VerificationError", "ZeroRange", "__version__", "capabilities",
    "convention", "dequantize", "dequantize_backward", "fake_quantize", "fake_quantize_backward",
    "fake_quantize_dynamic", "fake_quantize_learned_backward", "fake_quantize_masked",
    "fake_quantize_masked_backward", "float4_e2m1fn", "float8_e4m3fn", "float8_e5m2", "formats", "get_num_threads",
    "granularity", "int1", "int2", "int3", "int4", "int5", "int6", "int7", "int8", "int9", "int10", "int11",
    "int12", "int13", "int14", "int15", "int16", "metrics", "mxfp4", "mxfp8", "mxfp8_e5m2", "nf4", "nvfp4",
    "observers", "packing", "quantize", "quantize_backward", "rounding", "set_num_threads", "ste", "uint1", "uint2",
    "uint3", "uint4", "uint5", "uint6", "uint7", "uint8", "uint9", "uint10", "uint11", "uint12", "uint13", "uint14",
    "uint15", "uint16", "use_kernels", "verify",
]
# fmt: on
