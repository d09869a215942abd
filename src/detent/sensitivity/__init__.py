"""Sensitivity: which layers cause how much noise at the outputs, and how many bits each should have.

::

    import detent.sensitivity as qs

    sensitivity = qs.measure(model, data, widths=(3, 4, 6, 8))     each layer alone, at each bit width
    mix = sensitivity.choose(1_000_000)                            the least noise in so many bytes
    print(qs.run_mix(model, data, mix))                            predicted and measured
    qs.refine(model, data, sensitivity, 1_000_000)                 a search that runs mixes

``import detent.sensitivity`` loads nothing heavy; PyTorch, ONNX and ONNX Runtime come with the first call.
"""

from detent.metrics import sqnr_of
from detent.sensitivity.layer_noise import Cost, LayerNoise, Mix, Sensitivity
from detent.sensitivity.measurement import measure, refine, run_mix

__all__ = ["Cost", "LayerNoise", "Mix", "Sensitivity", "measure", "refine", "run_mix", "sqnr_of"]
