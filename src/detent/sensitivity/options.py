"""Options: the widths that a caller asks for as specs of weights, and the bytes these take.

===========  ==========================================================================================
storage      a weight of n elements and s scales at b bits
===========  ==========================================================================================
``onnx``     codes in 4, 8 or 16 bits, the next that holds b (4 for matrix products only); float32
             scales and zero points as wide as the codes
``packed``   n * b bits, float32 scales, zero points of b bits where the spec is affine
===========  ==========================================================================================
"""

from collections.abc import Iterable
from math import prod
from typing import Literal

from detent.checks import as_integer, plain
from detent.errors import SpecError
from detent.granularity import PerToken
from detent.spec import QuantSpec, spec_text

__all__ = ["STORAGES", "Storage", "as_storage", "as_widths", "stored_nbytes"]

Storage = Literal["onnx", "packed"]
STORAGES = ("onnx", "packed")
CONTAINERS = (4, 8, 16)
SCALE_BITS = {"float": 32, "e8m0": 8, "e4m3": 8}
SMALLEST, LARGEST = 1, 16


def as_widths(widths: Iterable[int | str]) -> dict[str, QuantSpec]:
    """The specs of weights by their labels, which are their short texts.

    Args:
        widths: numbers of bits, which stand for symmetric integers with a scale per output channel, or texts of specs.

    Raises:
        SpecError: no width, one that comes twice, or one that no weight can have.

    >>> list(as_widths([4, 8, "int4/group32"]))
    ['int4/axis0', 'int8/axis0', 'int4/group32']
    """
    if isinstance(widths, str | int) or not isinstance(widths, Iterable):
        raise SpecError(f"widths are a list such as (3, 4, 6, 8) or (4, 'int4/group32'), got {widths!r}")
    found: dict[str, QuantSpec] = {}
    for width in widths:
        spec = _spec(width)
        label = spec_text(spec)
        if label is None:
            raise SpecError(f"the width {width!r} has no short text: use a spec such as 'int4/group32'")
        if label in found:
            raise SpecError(f"the width {width!r} comes twice: each is an option of its own")
        found[label] = spec
    if not found:
        raise SpecError("there are no widths: give some, for example widths=(3, 4, 6, 8), or None for the recipe's")
    return found


def _spec(width: int | str) -> QuantSpec:
    value = plain(width)
    if isinstance(value, str):
        spec = QuantSpec.parse(value)
        if isinstance(spec.granularity, PerToken):
            raise SpecError(f"the width {width!r} has a scale per token, which only activations have")
        return spec
    bits = as_integer("a width", value, at_least=SMALLEST, at_most=LARGEST)
    return QuantSpec.parse(f"int{bits}/axis0")


def as_storage(value: str) -> Storage:
    """The storage of that name.

    >>> as_storage("packed")
    'packed'
    """
    if value not in STORAGES:
        raise SpecError(f"storage is one of {', '.join(STORAGES)}, got {value!r}")
    return "onnx" if value == "onnx" else "packed"


def stored_nbytes(spec: QuantSpec, shape: tuple[int, ...], storage: Storage, *, is_product: bool) -> int:
    """The bytes of a weight's codes, scales and zero points.

    Args:
        spec: placed as the layer needs it.
        shape: of the weight.
        storage: see above.
        is_product: whether it is that of a matrix product, whose codes ONNX may store in 4 bits.

    >>> spec = QuantSpec.parse("int3/axis0")
    >>> [stored_nbytes(spec, (8, 64), storage, is_product=True) for storage in STORAGES]
    [292, 224]
    """
    count, sets = prod(shape), spec.granularity.tiling(shape).sets
    if storage == "packed":
        parameters = sets * (SCALE_BITS[spec.scale_format] + (0 if spec.symmetric else spec.bits))
        parameters += SCALE_BITS["float"] if spec.scale_format == "e4m3" else 0  # the scale of the tensor
        return -(-count * spec.bits // 8) + -(-parameters // 8)
    bits = next(width for width in CONTAINERS if width >= max(spec.bits, 4 if is_product else 8))
    return -(-count * bits // 8) + sets * 4 + -(-sets * bits // 8)
