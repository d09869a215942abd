"""Limits of integer products: which layers can multiply codes, and why others cannot."""

from collections.abc import Iterator
from itertools import chain

import torch
from torch import Tensor, nn

from detent.granularity import PerAxis, PerTensor
from detent.spec import QuantSpec
from detent.torch.integer_product import MAX_TERMS
from detent.torch.layers import float_class_of, kind_of, runs_as_matmul

__all__ = ["has_product", "integer_problem"]

MAX_BITS = 8  # of codes that integer kernels multiply


def has_product(module: nn.Module) -> bool:
    """Return whether a layer multiplies its weights by data; look-ups and placeholders do not."""
    kind = kind_of(module)
    is_lookup = isinstance(module, nn.Embedding | nn.EmbeddingBag)
    return kind is not None and bool(kind.weights or kind.names) and not is_lookup


def integer_problem(module: nn.Module, weight: QuantSpec | None, x: QuantSpec | None) -> str:
    """Return why a layer with these specs cannot multiply codes, or "" if it can.

    >>> spec = QuantSpec("int8", PerAxis(0))
    >>> integer_problem(nn.Linear(4, 2), spec, None)
    'its input is not quantized'
    >>> integer_problem(nn.Linear(4, 2), spec, QuantSpec("uint8"))
    ''
    """
    if not runs_as_matmul(float_class_of(module)):
        return "only Linear and convolution layers multiply codes"
    parameter = module._parameters["weight"]
    if weight is None or x is None or parameter is None:
        return f"its {'weight' if weight is None else 'input'} is not quantized"
    return next(chain(_spec_problems(weight, x), _weight_problems(parameter)), "")


def _spec_problems(weight: QuantSpec, x: QuantSpec) -> Iterator[str]:
    for name, spec in (("input", x), ("weight", weight)):
        if not spec.format.is_integer or spec.bits > MAX_BITS:
            yield f"its {name} has format {spec.format.name}, but integer kernels need integers of at most 8 bits"
        if spec.rounding.kind == "stochastic":
            yield f"its {name} is rounded stochastically"
    if not isinstance(x.granularity, PerTensor):
        yield f"its input has {x.granularity} scales, but integer kernels need one scale for the tensor"
    if weight.granularity not in (PerTensor(), PerAxis(0)):
        yield f"its weight has {weight.granularity} scales, but integer kernels need one per output channel or tensor"
    if not weight.symmetric or weight.symmetric_zero_point:
        yield "its weight has a zero point, but integer kernels need symmetric signed weights"


def _weight_problems(parameter: Tensor) -> Iterator[str]:
    terms = parameter.shape[1:].numel()
    if terms > MAX_TERMS:
        yield f"its sums have {terms:,} terms, but only {MAX_TERMS:,} fit int32 together with a bias"
    if parameter.dtype == torch.float64:
        yield "its weight is float64, but integer products give float32"
    if parameter.device.type != "cpu":
        yield f"its weight is on device {parameter.device.type}, but integer kernels run on the CPU"
