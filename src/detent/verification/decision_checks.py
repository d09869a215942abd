"""Whether decisions keep what a model computes, or stay within their stated bounds.

``qo.rewrite`` itself refuses decisions that do not fit the model: layers, tensors and readers that it does not have,
factors that do not sit on both sides of a real pair, constants and opsets that do not follow from it. What is left is
about numbers:

=============== =====================================================================================================
weight scale    8 bits and more: the min-max scale of the weight, or one that its bias needs; fewer bits: not above
                the min-max scale, and with no larger squared error, unless the search gives it
weight zero     within the codes; 0 where the spec is symmetric (as ``QuantParams`` demands)
corrected bias  no further from the folded bias than the mean error of the layer can be:
                ``sum|w - w'| * max|x| + sum|w'| * max|x - x'|``, and a unit, where w' and x' are dequantized and x lies
                in the range that was observed, which may be twice that of the quantizer at each end. That range is
                decided, too: how far biases were moved, and for which inputs, is listed
activation      any scale and zero point: they are decided, and data show what they cost
=============== =====================================================================================================
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from detent.onnx.decisions import MAX_BIAS_CODE, Decisions, LayerDecision
from detent.onnx.graph_plan import MINMAX_BITS, weight_params
from detent.onnx.quantized_graph import ROOMY_BIAS_CODE, bias_scale, stays_float
from detent.onnx_model.graph import Graph
from detent.onnx_model.layers import Layer
from detent.ops import fake_quantize
from detent.params import QuantParams
from detent.verification.verify_report import Difference

__all__ = ["decided", "problems"]

Array = NDArray[Any]
SEARCH_SLACK = 1e-2  # by which a search on another CPU may miss the one here
SLACK = 1e-5  # of a bound, for float32 sums of the calibration
MAX_CLIPPED = 1  # times its range that a quantizer may clip, as far as it explains a corrected bias
ROOM = 1 << 8  # by which the code of a bias may miss the largest one, after rounding


class Correction(NamedTuple):
    """How far a corrected bias is from the source's: as a share of what its layer can give, for inputs up to a size."""

    share: float
    reach: float


def problems(
    graph: Graph, layers: Mapping[str, Layer], decisions: Decisions, corrections: dict[str, Correction]
) -> Iterator[Difference]:
    """Decisions that do not follow from a float model with their factors in it; corrections are added by layer."""
    params, ranges = decisions.tensor_params(), _observed_ranges(decisions)
    for line in decisions.layers:
        if line.is_quantized:
            layer = layers[line.name]
            incoming = params.get(layer.data) if line.input is not None else None
            weight = graph.array(layer.weight)
            bias = graph.array(layer.bias) if layer.bias in graph.constants else None
            yield from _scale_problems(line, weight, incoming, bias if line.bias is None else line.bias)
            if line.bias is not None:
                bias = np.zeros(line.bias.shape, np.float32) if bias is None else bias
                observed = ranges.get(layer.data) if incoming is not None else line.input_range
                corrections[line.name], found = _bias_problems(line, layer, weight, bias, incoming, observed)
                yield from found


def _scale_problems(
    line: LayerDecision, weight: Array, incoming: QuantParams | None, bias: Array | None
) -> Iterator[Difference]:
    params = line.weight_params
    full = QuantParams.from_data(params.spec, weight)
    scale, widest = params.scale, np.asarray(full.scale, np.float32)
    needed = _needed_by_bias(params, incoming, bias) & (scale >= widest)
    wrong = (scale > widest) & ~needed
    if params.spec.bits >= MINMAX_BITS:
        wrong |= (scale < widest) | ((params.zero_point != full.zero_point) & ~needed)
    cause = "a decided weight scale that does not follow from the weight"
    if not wrong.any() and params.spec.bits < MINMAX_BITS:
        wrong = _is_worse(weight, params, full) & ~needed
        cause = "a decided weight scale with a larger squared error than the min-max scale"
    if wrong.any():
        index = tuple(int(i[0]) for i in np.nonzero(np.atleast_1d(wrong)))[: scale.ndim]
        yield Difference.of(line.name, "weight_scale", cause, float(widest[index]), float(scale[index]), index)
    if incoming is not None and bias is not None and bias.dtype == np.float32:
        unit = bias_scale(incoming, params).astype(np.float64)
        if not stays_float(bias, unit) and np.abs(bias / unit).max(initial=0.0) > MAX_BIAS_CODE:
            cause = "a decided weight scale so small that the bias does not fit into 32 bits"
            yield Difference.of(line.name, "weight_scale", cause)


def _is_worse(weight: Array, params: QuantParams, full: QuantParams) -> Array:
    """Which scales give a larger squared error than the min-max scales, and than what the search here gives."""
    errors, own = (_squared_errors(weight, each) for each in (full, params))
    worse = own > errors * (1 + SLACK)
    if worse.any():  # the search looks at a histogram: of few weights it may miss the min-max scales by a little
        worse &= own > _squared_errors(weight, weight_params(weight, params.spec)) * (1 + SEARCH_SLACK)
    return worse


def _squared_errors(weight: Array, params: QuantParams) -> Array:
    """The squared error of each scale."""
    shape = params.scale.shape
    places = np.arange(params.scale.size).reshape(shape)
    spread = np.broadcast_to(params.spec.granularity.tiling(weight.shape).spread(places), weight.shape)
    squares = np.square(weight.astype(np.float64) - fake_quantize(weight, params))
    return np.bincount(spread.ravel(), squares.ravel(), params.scale.size).reshape(shape)


def _needed_by_bias(params: QuantParams, incoming: QuantParams | None, bias: Array | None) -> Array:
    """Which scales were widened so that the bias fits into 32 bits, or that the product of scales is normal."""
    if incoming is None or bias is None:
        return np.zeros(params.scale.shape, bool)
    unit = bias_scale(incoming, params).astype(np.float64)
    if stays_float(bias, unit):
        return np.zeros(unit.shape, bool)
    codes = np.abs(bias if bias.dtype == np.int32 else bias / unit).astype(np.float64)
    codes = codes if params.scale.ndim else codes.max(initial=0.0)
    needed = unit <= 4 * float(np.finfo(np.float32).smallest_normal)
    return np.asarray(needed | (codes >= ROOMY_BIAS_CODE - ROOM))


def _bias_problems(
    line: LayerDecision,
    layer: Layer,
    weight: Array,
    before: Array,
    incoming: QuantParams | None,
    observed: tuple[float, float] | None,
) -> tuple[Correction, list[Difference]]:
    assert line.bias is not None  # noqa: S101 - the caller looked
    params = line.weight_params
    after, unit = line.bias.astype(np.float64), np.zeros(line.bias.shape)
    if incoming is not None and line.bias.dtype == np.int32:
        unit = np.broadcast_to(bias_scale(incoming, params).astype(np.float64), line.bias.shape)
        after = after * unit
    axes = tuple(axis for axis in range(weight.ndim) if axis != layer.axis)
    rounded = fake_quantize(weight, params).astype(np.float64)
    lost, kept = np.abs(weight - rounded).sum(axis=axes), np.abs(rounded).sum(axis=axes)
    lo, hi, off = _input_bounds(incoming, observed)
    reach = max(abs(lo), abs(hi))
    bound = (lost * reach + kept * off) * (1 + SLACK) + unit + SLACK * np.abs(before)
    shift = np.abs(after - before)
    most = kept * reach + unit
    share = float(np.max(shift / np.where(most > 0, most, np.inf), initial=0.0))
    if not (shift > bound).any():
        return Correction(share, reach), []
    index = (int(np.argmax(shift > bound)),)
    cause = f"a corrected bias further from the source's than the {bound[index]:.3g} that quantization can cause"
    found = Difference.of(line.name, "bias", cause, float(before[index]), float(after[index]), index)
    return Correction(share, reach), [found]


def _input_bounds(incoming: QuantParams | None, observed: tuple[float, float] | None) -> tuple[float, float, float]:
    """The smallest and largest input of a layer, and the largest error of one that is quantized."""
    if incoming is None:
        return (*(observed or (0.0, 0.0)), 0.0)
    scale, zero, spec = float(incoming.scale), int(incoming.zero_point), incoming.spec
    low, high = (spec.qmin - zero) * scale, (spec.qmax - zero) * scale
    widest = MAX_CLIPPED * (high - low)
    lo, hi = observed or (low, high)
    lo, hi = max(lo, low - widest), min(hi, high + widest)
    return lo, hi, scale / 2 + max(0.0, hi - high, low - lo)


def _observed_ranges(decisions: Decisions) -> dict[str, tuple[float, float] | None]:
    """The range that calibration saw, by quantized tensor."""
    ranges: dict[str, tuple[float, float] | None] = {}
    for each in decisions.placements:
        if each.source_tensor:
            before = ranges[each.source_tensor]
            ranges[each.tensor] = None if before is None else (before[0] * each.factor, before[1] * each.factor)
        elif each.group == each.tensor:
            ranges[each.tensor] = decisions.ranges[each.group].observed_range
        else:
            ranges[each.tensor] = ranges[each.group]
    return ranges


def decided(decisions: Decisions, corrections: Mapping[str, Correction]) -> tuple[str, ...]:
    """What was decided, which verification takes as given within its bounds, in a line each."""
    layers, lines = decisions.layers, [f"target {decisions.target}, opset {decisions.opset}"]
    quantized = [each for each in layers if each.is_quantized]
    in_float = [each.name for each in layers if not each.is_quantized]
    scales = [each.scale for each in decisions.ranges.values()]
    specs = Counter(str(each.weight) for each in quantized)
    kinds = ", ".join(f"{count} {spec}" for spec, count in specs.most_common())
    counts = (
        (len(specs), "kind of weights" if len(specs) == 1 else "kinds of weights", kinds),
        (len(scales), "activation scales and zero points", f"{min(scales):.3g} to {max(scales):.3g}" if scales else ""),
        (len(in_float), "layers kept in float", _listed(in_float)),
        (len(decisions.equalized), "equalized tensors", _listed([each.tensor for each in decisions.equalized])),
        (len(decisions.smoothed), "smoothed tensors", _listed([each.tensor for each in decisions.smoothed])),
        (len(corrections), "corrected biases", _largest_correction(corrections)),
        (
            sum(each.weight is not None and each.weight.bits < MINMAX_BITS for each in quantized),
            "weights with searched scales",
            "",
        ),
        (len(decisions.constants), "computed constants", _listed(list(decisions.constants))),
    )
    for count, what, names in counts:
        if count:
            lines.append(f"{count} {what}{f': {names}' if names else ''}")
    return tuple(lines)


def _largest_correction(corrections: Mapping[str, Correction]) -> str:
    if not corrections:
        return ""
    name = max(corrections, key=lambda each: corrections[each].share)
    reach = max(each.reach for each in corrections.values())
    return f"by at most {corrections[name].share:.2%} of what a layer can give ({name}), for inputs up to {reach:.3g}"


def _listed(names: list[str], shown: int = 3) -> str:
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more
