"""PyTorch frontend: quantization of any module, after or during training, bit-exact with the NumPy core.

::

    import detent.torch as qt

    qt.quantize(model, data, "w8a8")                  PTQ in one call, in place; or QAT, step by step:
    print(qt.plan(model, "w8a8"))                     the plan, layer by layer
    qt.prepare(model, "w8a8")                         in place; parameters stay the same objects
    with qt.calibrating(model): run(model, data)      forward passes only record ranges
    train(model)                                      your loop and your optimizer
    qt.freeze(model); qt.quantized_state(model)
    qt.export_onnx(model, example, "model.onnx")      the trained codes and scales, as a file
    qt.export_gguf(model, directory, "model.gguf")    the trained bytes of block formats, as llama.cpp runs them
"""

from detent.torch.calibration import calibrating
from detent.torch.diagnostics import HealthReport, QuantizerHealth, Watch, health, watch
from detent.torch.distributed import sync
from detent.torch.exported_program import program_to_onnx
from detent.torch.gguf_export import export_gguf
from detent.torch.layers import Quantizer, register_layer
from detent.torch.model_plan import LayerPlan, ModelPlan, plan
from detent.torch.norm_statistics import reestimate_norms
from detent.torch.onnx_export import export_onnx
from detent.torch.operator import fake_quantize
from detent.torch.oscillation import Oscillation
from detent.torch.preparation import freeze, prepare, quantized_state, unprepare
from detent.torch.ptq import PtqReport, ptq_report, quantize
from detent.torch.quantizer import FakeQuantize
from detent.torch.schedule import Schedule

__all__ = [
    "FakeQuantize",
    "HealthReport",
    "LayerPlan",
    "ModelPlan",
    "Oscillation",
    "PtqReport",
    "Quantizer",
    "QuantizerHealth",
    "Schedule",
    "Watch",
    "calibrating",
    "export_gguf",
    "export_onnx",
    "fake_quantize",
    "freeze",
    "health",
    "plan",
    "prepare",
    "program_to_onnx",
    "ptq_report",
    "quantize",
    "quantized_state",
    "reestimate_norms",
    "register_layer",
    "sync",
    "unprepare",
    "watch",
]
