"""Quantize a trained PyTorch network in one call, export it, verify the file, and compare the accuracy.

The network and the images of digits are those of ``detent demo``.
"""

import numpy as np
import onnxruntime as ort
import torch

import detent as dt
import detent.torch as qt
from detent.demo.network import TrainingRun, logits_of, make_network, read_digits, repeatable

torch.set_num_threads(1)  # more threads do not speed up a network this small
train, test = read_digits()
with repeatable(seed=0):
    model = make_network()
    TrainingRun(train, epochs=4, rate=3e-3, seed=0).train(model, lambda: None)  # your own training
accuracy = np.mean(logits_of(model, test).argmax(1).numpy() == test.labels)

batches = [torch.from_numpy(images) for images in train.batches(32)[:16]]
qt.quantize(model, batches, "w8a8")
print(qt.ptq_report(model))

path = qt.export_onnx(model, batches[0], "digits.onnx")
report = dt.verify(model, path, batches[:2])
print(report.headline)
assert report.ok

session = ort.InferenceSession(str(path))
(logits,) = session.run(None, {session.get_inputs()[0].name: test.images})
print(f"accuracy: {accuracy:.1%} in float, {np.mean(logits.argmax(1) == test.labels):.1%} in the int8 file")
