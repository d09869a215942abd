"""Checks that the numbers in a file's decisions are within bounds that follow from the source.

``qo.rewrite`` rejects decisions that do not fit the model. Examples are unknown layers, factors for tensors that are
not between two layers, and wrong constants. This module checks the numbers:

=============== =====================================================================================================
weight scale    8 bits and more: equal to the min-max scale. Fewer bits: at most the min-max scale, and the squared
                error is at most that of the min-max scale, or that of the histogram search of earlier versions. A
                scale may be larger if the int32 bias would overflow otherwise
zero point      8 bits and more: equal to that of the min-max range. Fewer bits: within the range of codes.
                Symmetric: 0 (``QuantParams`` checks it)
corrected bias  differs from the float bias by at most the mean error that quantization can cause in an output:
                ``sum|w - w'| * max|x| + sum|w'| * max|x - x'|`` plus one bias step. w' and x' are dequantized. x is in
                the observed range, but at most one range width outside the quantizer's range. The observed range
                is itself a decision, so ``decided`` lists the largest correction and the largest input
activation      any scale and zero point. ``decided`` lists them, and level 2 measures the resulting SQNR
=============== =====================================================================================================
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from detent.granularity import PerAxis
from detent.observers import MSE
from detent.onnx.decisions import MAX_BIAS_CODE, Decisions, LayerDecision
from detent.onnx.graph_plan import MINMAX_BITS
from detent.onnx.quantized_graph import ROOMY_BIAS_CODE, bias_scale, stays_float
from detent.onnx_model.graph import Graph
from detent.onnx_model.layers import Layer
from detent.ops import fake_quantize
from detent.params import QuantParams
from detent.spec import QuantSpec
from detent.tables import counted
from detent.verification.verify_report import Difference

__all__ = ["decided", "problems"]

Array = NDArray[Any]
SEARCH_TOLERANCE = 1e-2  # relative, for squared errors: the search on a histogram depends slightly on the CPU
HISTOGRAMS_AT_ONCE = 4096  # parameter sets searched at a time, which bounds the memory
TOLERANCE = 1e-5  # relative, for the rounding of float32 sums
MAX_CLIPPED_RANGES = 1  # inputs are assumed to be at most this many range widths outside the quantizer's range
BIAS_CODE_MARGIN = 1 << 8  # scales with a bias code above ROOMY_BIAS_CODE minus this may have been raised for the bias
MAX_NAMES_SHOWN = 3


class Correction(NamedTuple):
    """Size of a bias correction.

    Attributes:
        share: the correction, divided by the largest output that the layer can have.
        max_input: the largest input magnitude of the layer.
    """

    share: float
    max_input: float


def problems(
    graph: Graph, layers: Mapping[str, Layer], decisions: Decisions, corrections: dict[str, Correction]
) -> Iterator[Difference]:
    """Yield the decisions that are out of bounds.

    Args:
        graph: the float model after equalization and SmoothQuant.
        layers: maps names to layers of the float model.
        decisions: the decisions of the file.
        corrections: an empty dict; this function adds each bias correction under the name of its layer.
    """
    params, ranges = decisions.tensor_params(), _observed_ranges(decisions)
    for line in decisions.layers:
        if line.weight is not None:
            layer = layers[line.name]
            incoming = params.get(layer.data) if line.input is not None else None
            weight = graph.array(layer.weight)
            bias = graph.array(layer.bias) if layer.bias in graph.constants else None
            yield from _scale_problems(line, weight, incoming, bias if line.bias is None else line.bias)
            yield from _own_range_problems(line)
            if line.bias is not None:
                bias = np.zeros(line.bias.shape, np.float32) if bias is None else bias
                observed = ranges.get(layer.data) if incoming is not None else line.input_range
                corrections[line.name], mismatch = _check_bias(line, layer, weight, bias, incoming, observed)
                if mismatch is not None:
                    yield mismatch


def _scale_problems(
    line: LayerDecision, weight: Array, incoming: QuantParams | None, bias: Array | None
) -> Iterator[Difference]:
    params = line.weight_params
    minmax = QuantParams.from_data(params.spec, weight)
    scale, minmax_scale = params.scale, np.asarray(minmax.scale, np.float32)
    needed = _needed_by_bias(params, incoming, bias) & (scale >= minmax_scale)
    wrong = (scale > minmax_scale) & ~needed
    if params.spec.bits >= MINMAX_BITS:
        wrong |= (scale < minmax_scale) | ((params.zero_point != minmax.zero_point) & ~needed)
    cause = "wrong weight scale or zero point: they do not follow from the min-max range of the weight"
    if not wrong.any() and params.spec.bits < MINMAX_BITS:
        wrong = _is_worse(weight, params, minmax) & ~needed
        cause = "wrong weight scale: it gives a larger squared error than the min-max scale"
    if wrong.any():
        index = tuple(int(i[0]) for i in np.nonzero(np.atleast_1d(wrong)))[: scale.ndim]
        yield Difference.of(line.name, "weight_scale", cause, float(minmax_scale[index]), float(scale[index]), index)
    if incoming is not None and bias is not None and bias.dtype == np.float32:
        unit = bias_scale(incoming, params).astype(np.float64)
        if not stays_float(bias, unit) and np.abs(bias / unit).max(initial=0.0) > MAX_BIAS_CODE:
            cause = "wrong weight scale: it is so small that the bias does not fit into int32"
            yield Difference.of(line.name, "weight_scale", cause)


def _own_range_problems(line: LayerDecision) -> Iterator[Difference]:
    """Check that the scale of an input in a subgraph is that of its min-max range."""
    if line.own_range is None or line.input is None:
        return
    cause = "wrong scale or zero point of the input: they do not follow from its observed range"
    if line.own_range.observed_range is None:
        yield Difference.of(line.name, "own_range", cause)
        return
    expected, params = (
        QuantParams.from_range(line.input, *line.own_range.observed_range),
        line.own_range.params(line.input),
    )
    if expected.scale != params.scale or expected.zero_point != params.zero_point:
        yield Difference.of(line.name, "own_range", cause, float(expected.scale), float(params.scale))


def _is_worse(weight: Array, params: QuantParams, minmax: QuantParams) -> Array:
    """Return a mask of the scales that have a larger squared error than the min-max scale.

    Earlier versions searched scales on a histogram. Such scales may be slightly worse, and are accepted.
    """
    minmax_errors, errors = (_squared_errors(weight, each) for each in (minmax, params))
    worse = np.asarray(errors > minmax_errors * (1 + TOLERANCE))
    if worse.any():
        worse[worse] = errors[worse] > _histogram_errors(weight, params.spec, worse) * (1 + SEARCH_TOLERANCE)
    return worse


def _squared_errors(weight: Array, params: QuantParams) -> Array:
    """Return, for each scale, the sum of the squared quantization errors of the elements that share it."""
    squares = np.square(weight.astype(np.float64) - fake_quantize(weight, params))
    sums = np.bincount(_set_numbers(weight, params.spec), squares.ravel(), params.scale.size)
    return sums.reshape(params.scale.shape)


def _set_numbers(weight: Array, spec: QuantSpec) -> NDArray[np.intp]:
    """Return the index of each element's parameter set; elements are in C order."""
    tiling = spec.granularity.tiling(weight.shape)
    return np.asarray(np.broadcast_to(tiling.spread(np.arange(tiling.sets)), weight.shape).ravel(), np.intp)


def _histogram_errors(weight: Array, spec: QuantSpec, mask: Array) -> Array:
    """Search parameters on a histogram for the parameter sets in ``mask``; return the squared error of each set."""
    numbers, flat = _set_numbers(weight, spec), weight.ravel()
    members = np.flatnonzero(mask.ravel()[numbers])
    members = members[np.argsort(numbers[members], kind="stable")]
    sizes = np.unique(numbers[members], return_counts=True)[1]
    rows = np.full((sizes.size, int(sizes.max())), np.nan, weight.dtype)  # observers skip NaN
    rows[np.arange(rows.shape[1]) < sizes[:, None]] = flat[members]
    by_row, errors = replace(spec, granularity=PerAxis(0)), []
    for start in range(0, len(rows), HISTOGRAMS_AT_ONCE):
        part = rows[start : start + HISTOGRAMS_AT_ONCE]
        searched = MSE(granularity=by_row.granularity).observe(part).params(by_row)
        errors.append(np.nansum(np.square(part.astype(np.float64) - fake_quantize(part, searched)), axis=1))
    return np.concatenate(errors)


def _needed_by_bias(params: QuantParams, incoming: QuantParams | None, bias: Array | None) -> Array:
    """Return a mask of the scales that may have been raised for the bias.

    There are two reasons to raise a scale: the bias must fit into int32, and input scale times weight scale must be a
    normal float.
    """
    if incoming is None or bias is None:
        return np.zeros(params.scale.shape, bool)
    unit = bias_scale(incoming, params).astype(np.float64)
    if stays_float(bias, unit):
        return np.zeros(unit.shape, bool)
    codes = np.abs(bias if bias.dtype == np.int32 else bias / unit).astype(np.float64)
    codes = codes if params.scale.ndim else codes.max(initial=0.0)
    needed = unit <= 4 * float(np.finfo(np.float32).smallest_normal)
    return np.asarray(needed | (codes >= ROOMY_BIAS_CODE - BIAS_CODE_MARGIN))


def _check_bias(
    line: LayerDecision,
    layer: Layer,
    weight: Array,
    before: Array,
    incoming: QuantParams | None,
    observed: tuple[float, float] | None,
) -> tuple[Correction, Difference | None]:
    assert line.bias is not None  # noqa: S101 - the caller has checked the bias
    params = line.weight_params
    after, step = line.bias.astype(np.float64), np.zeros(line.bias.shape)
    if incoming is not None and line.bias.dtype == np.int32:
        step = np.broadcast_to(bias_scale(incoming, params).astype(np.float64), line.bias.shape)
        after = after * step
    axes = tuple(axis for axis in range(weight.ndim) if axis != layer.axis)
    quantized = fake_quantize(weight, params).astype(np.float64)
    weight_errors, weight_sums = np.abs(weight - quantized).sum(axis=axes), np.abs(quantized).sum(axis=axes)
    lo, hi, input_error = _input_bounds(incoming, observed)
    max_input = max(abs(lo), abs(hi))
    bound = weight_errors * max_input + weight_sums * input_error
    bound = bound * (1 + TOLERANCE) + step + TOLERANCE * np.abs(before)
    shift = np.abs(after - before)
    max_output = weight_sums * max_input + step
    share = float(np.max(shift / np.where(max_output > 0, max_output, np.inf), initial=0.0))
    correction = Correction(share, max_input)
    if not (shift > bound).any():
        return correction, None
    index = (int(np.argmax(shift > bound)),)
    cause = f"wrong corrected bias: off by more than {bound[index]:.3g}, the largest error that quantization can cause"
    return correction, Difference.of(line.name, "bias", cause, float(before[index]), float(after[index]), index)


def _input_bounds(incoming: QuantParams | None, observed: tuple[float, float] | None) -> tuple[float, float, float]:
    """Return the smallest and largest input of a layer, and the largest quantization error of an input."""
    if incoming is None:
        return (*(observed or (0.0, 0.0)), 0.0)
    scale, zero, spec = float(incoming.scale), int(incoming.zero_point), incoming.spec
    clip_lo, clip_hi = (spec.qmin - zero) * scale, (spec.qmax - zero) * scale
    max_clipped = MAX_CLIPPED_RANGES * (clip_hi - clip_lo)
    lo, hi = observed or (clip_lo, clip_hi)
    lo, hi = max(lo, clip_lo - max_clipped), min(hi, clip_hi + max_clipped)
    return lo, hi, scale / 2 + max(0.0, hi - clip_hi, clip_lo - lo)


def _observed_ranges(decisions: Decisions) -> dict[str, tuple[float, float] | None]:
    """Map the name of each quantized tensor to its range observed in calibration."""
    ranges: dict[str, tuple[float, float] | None] = {}
    for each in decisions.placements:
        if each.source_tensor:
            bounds = ranges[each.source_tensor]
            ranges[each.tensor] = None if bounds is None else (bounds[0] * each.factor, bounds[1] * each.factor)
        elif each.group == each.tensor:
            ranges[each.tensor] = decisions.ranges[each.group].observed_range
        else:
            ranges[each.tensor] = ranges[each.group]
    return ranges


def decided(decisions: Decisions, corrections: Mapping[str, Correction]) -> tuple[str, ...]:
    """Describe the decisions that a replay accepts within bounds, in one line per kind of decision."""
    layers, lines = decisions.layers, [f"target {decisions.target}, opset {decisions.opset}"]
    quantized = [each for each in layers if each.is_quantized]
    in_float = [each.name for each in layers if not each.is_quantized]
    matmuls = [each.name for each in layers if each.is_activation_matmul]
    scales = [each.scale for each in decisions.ranges.values()]
    specs = Counter(str(each.weight) for each in quantized if each.weight is not None)
    spec_counts = ", ".join(f"{count} {spec}" for spec, count in specs.most_common())
    counts = (
        (len(specs), "weight format", "", spec_counts),
        (
            len(scales),
            "activation scale",
            " with zero point",
            f"scales from {min(scales):.3g} to {max(scales):.3g}" if scales else "",
        ),
        (
            sum(each.own_range is not None for each in quantized),
            "activation scale",
            " in subgraphs, with zero point",
            "",
        ),
        (sum(each.dynamic_input is not None for each in quantized), "layer", " with dynamic quantization", ""),
        (len(matmuls), "matmul", " of two activations", _listed(matmuls)),
        (len(in_float), "layer", " kept in float", _listed(in_float)),
        (len(decisions.equalized), "equalized tensor", "", _listed([each.tensor for each in decisions.equalized])),
        (len(decisions.smoothed), "smoothed tensor", "", _listed([each.tensor for each in decisions.smoothed])),
        (len(corrections), "corrected bias", "", _largest_correction(corrections)),
        (
            sum(each.weight is not None and each.weight.bits < MINMAX_BITS for each in quantized),
            "weight",
            " whose scales were searched",
            "",
        ),
        (len(decisions.constants), "computed constant", "", _listed(list(decisions.constants))),
    )
    for count, noun, rest, details in counts:
        if count:
            lines.append(f"{counted(count, noun)}{rest}{f': {details}' if details else ''}")
    return tuple(lines)


def _largest_correction(corrections: Mapping[str, Correction]) -> str:
    if not corrections:
        return ""
    name = max(corrections, key=lambda each: corrections[each].share)
    share, max_input = corrections[name].share, max(each.max_input for each in corrections.values())
    return (
        f"changed by at most {share:.2%} of the largest output of {name}, for inputs up to {max_input:.3g} in magnitude"
    )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - MAX_NAMES_SHOWN} more" if len(names) > MAX_NAMES_SHOWN else ""
    return ", ".join(names[:MAX_NAMES_SHOWN]) + more
