"""Evaluation of a quantized model: held-out accuracy, speed, and a dry run that estimates size, memory and time."""
