"""Choice of quantizers: ranges of activations, bits of weights, and the layers that float fallback keeps in float.

The passes follow each other, because each one measures the model with the choices of those before. After float
fallback, ranges are searched again, and the fallback runs once more: the first search measured mostly the noise of
layers that are in float now.
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from detent.errors import NotCalibratedError, RangeError, UnsupportedError
from detent.onnx.calibration import (
    MAX_REMAINING_NOISE,
    Calibration,
    calibrate_groups,
    choose_clipped,
    choose_params,
    observed_tensors,
    observers_of_rules,
    tensor_groups,
)
from detent.onnx.decisions import QuantizerPlacement
from detent.onnx.fast_kernels import choose_wide, multiplications, with_last_layers
from detent.onnx.float_fallback import NEGLIGIBLE_NOISE, NoiseByLayer, choose_float
from detent.onnx.graph_plan import GraphPlan
from detent.onnx.layer_error import IsolatedLayers
from detent.onnx.metric_search import MAX_DROP_REASON
from detent.onnx.pass_errors import running
from detent.onnx.pass_options import Feed, Options, RunOptions
from detent.onnx.range_search import MIN_SAMPLES as MIN_RANGE_SAMPLES
from detent.onnx.range_search import ChosenRanges, SampleBounds, search_ranges
from detent.onnx.samples import Samples
from detent.onnx_model.batches import Batches

__all__ = ["UNQUANTIZABLE", "Choice", "choose_quantizers", "unskipped_margin", "with_float"]

_log = logging.getLogger(__name__)

MAX_CLIPPED_NOISE = 0.5  # if noise is measured only at single layers, clipping must remove half of it
UNQUANTIZABLE = (NotCalibratedError, RangeError, UnsupportedError)  # errors of layers that cannot be quantized
FALLBACK_ROUNDS = 2  # runs of float fallback; ranges are searched again after each
MAX_REPEATED_NOISE = 0.25  # with more noise at an output (6 dB), that of single layers says too little to go on
FALLBACK_REASON = "float fallback: quantizing this layer would cause much of the output noise"


class Choice(NamedTuple):
    """Chosen ranges of activations, and the plan with the chosen weight bits and float layers."""

    plan: GraphPlan
    ranges: ChosenRanges
    unkept_plan: GraphPlan  # the plan without float fallback
    noise: NoiseByLayer | None = None
    kept: tuple[str, ...] = ()  # layers that float fallback keeps in float
    steps: tuple[str, ...] = ()


def choose_quantizers(
    graph_plan: GraphPlan,
    calibration: Calibration,
    isolated: IsolatedLayers,
    samples: Samples,
    work: Mapping[str, float],
    options: Options,
    run: RunOptions,
    find_margin: Callable[[], float | None],
) -> Choice:
    """Choose ranges of activations, bits of weights, and layers to keep in float.

    ``find_margin`` returns the margin of all ranges with all layers quantized, or None if it is unknown.
    """
    with running("choosing ranges"):
        placements = graph_plan.placements(calibration.ranges)
        clipped: frozenset[str] | None = None
        if options.observer is None:
            max_noise = MAX_REMAINING_NOISE if options.is_measured else MAX_CLIPPED_NOISE
            clipped = frozenset(choose_clipped(graph_plan, calibration, placements, isolated, max_noise))
            named = observers_of_rules(graph_plan, placements)
            clipped = (clipped - set(named)) | {group for group, observer in named.items() if observer.kind != "minmax"}
        ranges = ChosenRanges(choose_params(placements, calibration, clipped), clipped)
    if not options.is_measured:
        return Choice(graph_plan, ranges, graph_plan)
    can_widen = options.prefer == "balanced" and any(line.wide_weight is not None for line in graph_plan.quantized)
    evidence = _Evidence(calibration, samples, clipped, run)
    with running("measuring noise at the outputs"):
        noise = evidence.noise(graph_plan, placements, ranges)
    if clipped is not None:
        fixed = _fixed_groups(noise, graph_plan, placements)
        margin = find_margin() if any(each.group not in fixed for each in placements) else None
        with running("searching ranges"):
            ranges = evidence.searched(noise, graph_plan, placements, margin)
            noise.use(ranges.params)
    widened: dict[str, float] = {}
    if can_widen:
        with running("choosing weight bits"):
            widened = choose_wide(noise, graph_plan, work)
            graph_plan = graph_plan.widened(widened)
            noise.set_weights(graph_plan)
    choice = Choice(graph_plan, ranges, graph_plan, noise)
    shares: dict[str, float] = {}
    if options.keep_float == "auto":
        choice, shares = _with_fallback(choice, noise, evidence, work, options)
    steps = (
        *choice.ranges.steps,
        *(f"8-bit weights for {name}: {share:.0%} less noise at the outputs" for name, share in widened.items()),
        *(f"kept {name} in float: {share:.0%} less noise at the outputs" for name, share in shares.items()),
    )
    return choice._replace(kept=tuple(shares), steps=steps)


class _Evidence(NamedTuple):
    """Data on which ranges and float layers are chosen. Only groups in ``clipped`` may be clipped; None means all."""

    calibration: Calibration
    samples: Samples
    clipped: frozenset[str] | None
    run: RunOptions

    def noise(
        self, graph_plan: GraphPlan, placements: Sequence[QuantizerPlacement], ranges: ChosenRanges
    ) -> NoiseByLayer:
        """Prepare to measure the noise of a plan."""
        params, run = ranges.of(placements), self.run
        return NoiseByLayer(graph_plan, params, self.samples.compared, run.workspace, placements, run.memory_budget)

    def searched(
        self,
        noise: NoiseByLayer,
        graph_plan: GraphPlan,
        placements: Sequence[QuantizerPlacement],
        margin: float | None = None,
    ) -> ChosenRanges:
        """Search ranges on the samples; with too few samples, use min-max ranges.

        ``margin`` is the preferred margin, if there is one.
        """
        clipped, every = self.clipped or frozenset[str](), self.samples.every
        fixed = _fixed_groups(noise, graph_plan, placements)
        if len(every) < MIN_RANGE_SAMPLES:
            return ChosenRanges(choose_params(placements, self.calibration, clipped & fixed), clipped & fixed)
        bounds = SampleBounds.measure(graph_plan, self.calibration, every, self.run.memory_budget)
        first = len(every) - len(self.samples.compared)
        return search_ranges(noise, placements, self.calibration, clipped, bounds, first, fixed, margin)


def _with_fallback(
    choice: Choice, noise: NoiseByLayer, evidence: _Evidence, work: Mapping[str, float], options: Options
) -> tuple[Choice, dict[str, float]]:
    """Keep noisy layers in float, and search ranges again without them; return the share of the noise of each layer."""
    ranges_of_all = evidence.calibration.ranges
    replan = partial(with_float, choice.unkept_plan, work, options, set(ranges_of_all), None)
    graph_plan, ranges, current = choice.plan, choice.ranges, noise
    shares: dict[str, float] = {}
    for _ in range(FALLBACK_ROUNDS):
        with running("float fallback"):
            kept = choose_float(current, graph_plan, work, replan, shares)
        if not kept:
            break
        remaining = 1 - sum(shares.values())
        shares |= {name: remaining * share for name, share in kept.items()}
        graph_plan = replan(list(shares))
        placements = graph_plan.placements(ranges_of_all)
        ranges = ranges.with_new(placements, evidence.calibration)
        if evidence.clipped is None or current.noise_of(graph_plan) <= NEGLIGIBLE_NOISE * current.count:
            break
        if current.largest_noise_of(graph_plan) > MAX_REPEATED_NOISE:
            break
        with running("searching ranges again"):
            current = evidence.noise(graph_plan, placements, ranges)
            ranges = ranges.updated(evidence.searched(current, graph_plan, placements))
            for each in (current, noise):
                each.use(ranges.params)
    return choice._replace(plan=graph_plan, ranges=ranges), shares


def _fixed_groups(noise: NoiseByLayer, graph_plan: GraphPlan, placements: Sequence[QuantizerPlacement]) -> set[str]:
    """Return the groups that are not searched: a rule names their observer, or ``noise`` cannot replace their range."""
    named = observers_of_rules(graph_plan, placements)
    return {each.group for each in placements if each.group in named or not noise.can_replace(each.group)}


def unskipped_margin(
    unskipped: GraphPlan | None,
    skipped: GraphPlan,
    batches: Batches,
    chosen: tuple[Feed, ...],
    samples: Samples,
    options: Options,
    run: RunOptions,
) -> float | None:
    """Search the margin of ranges for the plan without skipped layers; return None if it is not searched.

    ``skipped`` is the plan with skipped layers, whose changed model is used.
    """
    if unskipped is None or len(samples.every) < MIN_RANGE_SAMPLES:
        return None
    try:
        graph_plan = unskipped.with_model(skipped.model).with_fixed_inputs()
        graph_plan = graph_plan.with_resized_outputs(resized_outputs=skipped.resized_outputs)
        graph_plan = with_last_layers(graph_plan, multiplications(graph_plan, batches.check_first()), options.prefer)
        groups = None if run.memory_budget is None else tensor_groups(graph_plan, batches, run.memory_budget)
        with running("calibration of all layers"):
            calibration = calibrate_groups(graph_plan, batches, groups, "minmax", False, None, chosen, run.workspace)
        with running("searching ranges of all layers"):
            evidence = _Evidence(calibration, samples, frozenset(), run)
            placements = graph_plan.placements(calibration.ranges)
            min_max = ChosenRanges(choose_params(placements, calibration, ()), evidence.clipped)
            noise = evidence.noise(graph_plan, placements, min_max)
            ranges = evidence.searched(noise, graph_plan, placements)
            return ranges.margin if ranges.is_searched else None
    except UNQUANTIZABLE as error:
        _log.info("the margin of ranges was searched for the remaining layers: %s", error)
        return None


def with_float(
    graph_plan: GraphPlan,
    work: Mapping[str, float],
    options: Options,
    observed: set[str],
    fallback: Collection[str] | None,
    names: Collection[str],
) -> GraphPlan:
    """Return a plan with some layers kept in float, and with the new last layers before them.

    Layers in ``fallback`` are kept in float by float fallback, all others by ``max_drop``; None stands for all layers.
    """
    by_noise = [name for name in names if fallback is None or name in fallback]
    graph_plan = graph_plan.without(by_noise, FALLBACK_REASON)
    graph_plan = graph_plan.without(set(names) - set(by_noise), MAX_DROP_REASON)
    plan = with_last_layers(graph_plan, work, options.prefer, observed)
    # A new last layer may be read by a Concat whose other inputs were not observed.
    is_observed = set(observed_tensors(plan)) - set(observed_tensors(graph_plan)) <= observed
    return plan if is_observed else plan.with_float_joins()
