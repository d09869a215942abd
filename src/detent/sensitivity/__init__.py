"""Sensitivity: measure how much noise each layer causes at the outputs, and choose the bits of each layer.

::

    import detent.sensitivity as qs

    sensitivity = qs.measure(model, data, widths=(3, 4, 6, 8))     # each layer alone, at each bit width
    mix = sensitivity.choose(1_000_000)                            # the least noise within 1,000,000 bytes
    print(qs.run_mix(model, data, mix))                            # predicted and measured SQNR
    qs.refine(model, data, sensitivity, 1_000_000)                 # a better choice, found by running the model

``import detent.sensitivity`` is fast. The first call imports PyTorch, or ONNX and ONNX Runtime, depending on the model.
"""

from detent.metrics import sqnr_of
from detent.sensitivity.layer_noise import Cost, LayerNoise, Mix, Sensitivity
from detent.sensitivity.measurement import measure, refine, run_mix

__all__ = ["Cost", "LayerNoise", "Mix", "Sensitivity", "measure", "refine", "run_mix", "sqnr_of"]
