"""The accuracy passes of ``qo.decide``, in their order.

======================= ===========================================================================================
pass                    decides
======================= ===========================================================================================
choosing kernels        which last layers stay in float, and which get a quantized output (``fast_kernels``)
choosing samples        the samples on which the following passes run the model (``samples``)
equalization            factors between convolutions (``equalization``)
SmoothQuant             factors between channels of matmul inputs and weights (``smoothquant``)
choosing last layers    whether small last layers at a Resize stay in float (``fast_kernels``)
choosing joins          whether Add and Concat nodes that also read float tensors stay in float (``placement``)
fitting group scales    scales of weight-only matmuls with groups (``group_scales``)
calibration             nothing; it observes the ranges of activations (``calibration``)
choosing ranges         which activations may be clipped (``calibration``)
searching ranges        the margins of ranges, and which activations are clipped (``range_search``)
choosing weight bits    7 or 8 bits for each weight (``fast_kernels``)
float fallback          which noisy layers stay in float (``float_fallback``)
searching ranges again  as before, without these layers; then float fallback runs once more
bias correction         new biases (``bias_correction``)
meeting max_drop        which layers stay in float, so that a metric drops by at most max_drop (``metric_search``)
======================= ===========================================================================================

A pass that changes the model is kept only if it lowers the noise at the outputs. This is measured on samples to which
the pass was not fitted. Equalization and SmoothQuant must remove a fifth of the noise. If the SQNR is above 30 dB
without them, they must remove half of it, or a smaller share with a confidence of 95 %: a small gain that varies from
sample to sample may be a loss on others.
If layers are skipped, the factors of equalization and SmoothQuant, and the margin of ranges, are those of the model
with all layers quantized. Otherwise, skipping one more layer could change them: in an Xception, this cost 1.5 dB.
``effort`` says how much is measured: "fast" measures nothing at the outputs, "best" uses more samples of large models.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import exp, inf, log, sqrt
from statistics import fmean, stdev
from typing import Any, NamedTuple

from numpy.typing import NDArray
from onnx import ModelProto

from detent.errors import NOTHING_QUANTIZED, DetentError, NotCalibratedError, UnsupportedError
from detent.metrics import one_sided_95
from detent.model_metric import MetricResult
from detent.onnx import equalization, smoothquant
from detent.onnx.bias_correction import CorrectedBias, corrected_biases
from detent.onnx.calibration import (
    Calibration,
    calibrate_groups,
    check_passes,
    choose_params,
    observed_tensors,
    range_decisions,
    tensor_groups,
)
from detent.onnx.calibration_items import Survey, subgraph_ranges_on_executor, survey_data
from detent.onnx.channel_items import compare_equalization, compare_smoothing
from detent.onnx.decisions import Decisions, Equalized, Smoothed
from detent.onnx.fast_kernels import (
    SLOW_REASON,
    choose_slow_weights,
    multiplications,
    recurrent_multiplications,
    with_last_layers,
)
from detent.onnx.float_fallback import NEGLIGIBLE_NOISE, NoiseByLayer
from detent.onnx.graph_plan import GraphPlan, Preference
from detent.onnx.group_scales import with_fitted_scales
from detent.onnx.layer_error import IsolatedLayers, ReferenceOutputs
from detent.onnx.metric_search import MetricGoal, MetricSearch, ModelTrials, search_float_layers
from detent.onnx.pass_errors import announce, running
from detent.onnx.pass_options import EFFORTS, MIN_COMPARED, Effort, Options, RunOptions
from detent.onnx.quality_warnings import DataSummary
from detent.onnx.quantized_graph import layer_decisions, placed, rewrite
from detent.onnx.quantizer_choice import UNQUANTIZABLE, Choice, choose_quantizers, unskipped_margin, with_float
from detent.onnx.range_search import ChosenRanges
from detent.onnx.samples import Samples, choose_samples, choose_surveyed
from detent.onnx.subgraph_ranges import observe_ranges
from detent.onnx_model.batches import Batches, open_batches, samples_in
from detent.onnx_model.files import LoadedModel, copied
from detent.onnx_model.model_inputs import inputs_of
from detent.onnx_model.sessions import array_outputs, make_session, ort_errors
from detent.onnx_model.workspace import Workspace

__all__ = ["Decided", "decide_with_data", "reject_empty"]

_log = logging.getLogger(__name__)

Feed = dict[str, NDArray[Any]]
Noises = Sequence[float]  # noise at the outputs, by sample

# Times per sample, in runs of the float model: to calibrate, to record activations, and to measure the noise at the
# outputs. On 8 models, the estimate was 0.5 to 2 times the measured time.
CALIBRATION_RUNS, RECORDED_RUNS, MEASURED_RUNS = 3.0, 5.0, 80.0
MARGIN_RUNS = 14.0  # the same for the margin of the model with all layers quantized, if layers are skipped
MIN_SECONDS_ANNOUNCED = 5.0
MAX_REASONS_SHOWN, MAX_NAMES_SHOWN, MAX_NAME_CHARS = 5, 3, 40  # limits on what a message lists
MAX_CHANGED_NOISE = 0.8  # noise after equalization or SmoothQuant, relative to the noise before (1 dB)
MAX_FASTER_NOISE = 1.2  # noise with quantized joins or last outputs, relative to the same in float (0.8 dB)
MAX_FITTED_NOISE = 0.95  # the same limit for scales of groups that fit the data
MAX_CHANGED_NOISE_SAFE = 0.5  # the same limit if the SQNR is above 30 dB (3 dB)
MIN_PAIRED_SAMPLES = 8  # on at least as many samples, noise before and after is also compared sample by sample
MAX_PAIRED_NOISE = 0.95  # the limit of that comparison: upper end of the confidence interval of the mean ratio


@dataclass(frozen=True)
class Decided:
    """Result of the accuracy passes: decisions, final plan, samples, and ``steps``, the changes as text."""

    decisions: Decisions
    plan: GraphPlan
    samples: tuple[Feed, ...] = ()
    steps: tuple[str, ...] = ()
    data: DataSummary | None = None
    search: MetricSearch | None = None
    goal: MetricGoal | None = None
    work: Mapping[str, float] = field(default_factory=dict)  # multiplications of all layers, also of those in float

    def metric(self, quantized: ModelProto) -> MetricResult | None:
        """Return the metric of the quantized model, from the search if there was one; None without a goal."""
        if self.search is not None:
            return self.search.after
        return None if self.goal is None else self.goal.measure(quantized)


def decide_with_data(
    facts: Decisions,
    graph_plan: GraphPlan,
    batches: Batches,
    options: Options,
    run: RunOptions,
    original: LoadedModel,
    goal: MetricGoal | None = None,
    unskipped: GraphPlan | None = None,
) -> Decided:
    """Run the accuracy passes on ``original``.

    ``facts`` are the decisions made before. ``goal`` limits the drop of a metric. ``unskipped`` is the plan without
    ``options.skip``, if layers are skipped.
    """
    with running("choosing kernels"):
        variants = _Variants.of(graph_plan, batches, options.prefer)
    graph_plan, work = variants.in_float, variants.work
    reject_empty(graph_plan)
    groups = _tensor_groups(graph_plan, batches, run)  # fails early if the budget is too small
    with running("choosing samples"):
        batches, survey, chosen = _survey(graph_plan.model, batches, run.workspace, run.memory_budget)
        # If batches are not cut, a whole batch is a sample.
        total = sum(work.values()) + recurrent_multiplications(graph_plan.graph, batches.check_first())
        per_sample = total * samples_in(chosen[0]) / samples_in(batches.check_first())
        samples = EFFORTS[options.effort].samples(chosen, per_sample)
        _announce_time(graph_plan.model, batches, chosen, per_sample, options.effort, is_skipped=unskipped is not None)
    changes = _early_changes(variants, unskipped, batches, samples, options, run)
    graph_plan = changes.plan
    if groups is not None and observed_tensors(graph_plan) != [name for group in groups for name in group]:
        groups = _tensor_groups(graph_plan, batches, run)  # other tensors are observed now
    with running("calibration"):
        progress = True if run.progress is None else run.progress
        calibration = calibrate_groups(
            graph_plan, batches, groups, options.observer, progress, run.resume_file, chosen, run.workspace, survey
        )
    if graph_plan.own_range_layers:
        with running("calibration of subgraphs"):
            graph_plan = _with_own_ranges(graph_plan, batches, chosen, run.workspace)
    graph_plan, fitted = _fit_scales(graph_plan, samples, options, run.memory_budget)
    isolated = IsolatedLayers(graph_plan, samples.every, run.memory_budget)
    find = partial(unskipped_margin, unskipped, graph_plan, batches, chosen, samples, options, run)
    choice = choose_quantizers(graph_plan, calibration, isolated, samples, work, options, run, find)
    facts = replace(facts, data=calibration.fingerprint, equalized=changes.equalized, smoothed=changes.smoothed)
    assembly = _Assembly(facts, calibration, choice.ranges)
    decisions, biases = _with_biases(assembly, choice.plan, isolated, samples, options, original, run.memory_budget)
    steps = (*changes.steps, *fitted, *choice.steps)
    for step in steps:
        _log.info("%s", step)
    compared = chosen[: EFFORTS[options.effort].max_samples]
    decided = Decided(decisions, choice.plan, compared, steps, calibration.summary, None, goal, variants.all_work)
    if goal is None or goal.max_drop is None:
        return decided
    with running("meeting max_drop"):
        if biases and choice.kept:  # the search may quantize these layers again
            params = assembly.without_layers(choice.unkept_plan).tensor_params()
            biases |= corrected_biases(choice.unkept_plan, params, isolated, len(samples.fitted))
        replan = partial(with_float, choice.unkept_plan, work, options, set(calibration.ranges), choice.kept)
        return _meet_goal(decided, choice, replace(assembly, biases=biases), replan, original, goal, run)


class _Variants(NamedTuple):
    """Two plans: small last layers at a Resize are in float, or have a quantized output.

    ``work`` has the multiplications of the layers that both plans may quantize, ``all_work`` those of all layers.
    """

    in_float: GraphPlan
    quantized: GraphPlan
    work: Mapping[str, float]
    all_work: Mapping[str, float]

    @classmethod
    def of(cls, graph_plan: GraphPlan, batches: Batches, prefer: Preference) -> "_Variants":
        """Choose last layers and slow weights of a plan."""
        first = batches.check_first()
        try:
            all_work: Mapping[str, float] = multiplications(graph_plan, first, with_float=True)
        except DetentError:  # of a layer that cannot be quantized, a shape may be unknown
            all_work = multiplications(graph_plan, first)
        work = {line.name: all_work[line.name] for line in graph_plan.quantized}

        def variant(*, resized_outputs: bool) -> GraphPlan:
            plan = with_last_layers(graph_plan.with_resized_outputs(resized_outputs=resized_outputs), work, prefer)
            return plan.without(choose_slow_weights(plan, work), SLOW_REASON)

        return cls(variant(resized_outputs=False), variant(resized_outputs=True), work, all_work)


class _EarlyChanges(NamedTuple):
    """The choices before calibration: a plan of the changed model, the factors, and what else was chosen, as text."""

    plan: GraphPlan
    equalized: tuple[Equalized, ...]
    smoothed: tuple[Smoothed, ...]
    choices: tuple[str, ...]

    @property
    def steps(self) -> tuple[str, ...]:
        return (*map(str, self.equalized), *map(str, self.smoothed), *self.choices)


def _early_changes(
    variants: _Variants,
    unskipped: GraphPlan | None,
    batches: Batches,
    samples: Samples,
    options: Options,
    run: RunOptions,
) -> _EarlyChanges:
    """Choose factors, last layers and additions; ``unskipped`` is the plan without skipped layers, if there are any."""
    factors = None
    if unskipped is not None:
        factors = _unskipped_factors(unskipped, variants.quantized, batches, samples, options, run)
    if factors is None:
        changed, equalized, smoothed = _equalize_and_smooth(variants.quantized, samples, options, run)
        model = changed.model
    else:
        equalized, smoothed = factors
        model = variants.quantized.model
        if equalized or smoothed:
            model = smoothquant.apply(equalization.apply(copied(model), equalized), smoothed)
    noise_of = _PlanNoise(samples.evaluated, run.memory_budget)
    in_float, quantized = variants.in_float.with_model(model), variants.quantized.with_model(model)
    graph_plan, last = _choose_resized_outputs(in_float, quantized, noise_of, options)
    graph_plan, joins = _choose_joins(graph_plan, noise_of, options)
    return _EarlyChanges(graph_plan, equalized, smoothed, (*last, *joins))


def _unskipped_factors(
    unskipped: GraphPlan,
    graph_plan: GraphPlan,
    batches: Batches,
    samples: Samples,
    options: Options,
    run: RunOptions,
) -> tuple[tuple[Equalized, ...], tuple[Smoothed, ...]] | None:
    """Choose factors for the plan without skipped layers; return those that matter to ``graph_plan``.

    Factors of tensors that no quantized layer reads are left out. The result is None if the skipped layers cannot be
    quantized, for example because a weight is not finite.
    """
    try:
        whole = _Variants.of(unskipped, batches, options.prefer).quantized
        _, equalized, smoothed = _equalize_and_smooth(whole, samples, options, run)
    except UNQUANTIZABLE as error:
        _log.info("factors were chosen for the remaining layers: %s", error)
        return None
    names = {line.name for line in graph_plan.quantized}
    # Factors that are folded into a normalization change the weights of all layers that read its output.
    smoothed = tuple(
        each if each.folded else replace(each, layers=tuple(name for name in each.layers if name in names))
        for each in smoothed
        if names & set(each.layers)
    )
    return tuple(each for each in equalized if names & set(each.readers)), smoothed


def _survey(
    model: ModelProto, batches: Batches, workspace: Workspace | None, memory_budget: int | None
) -> tuple[Batches, Survey | None, tuple[Feed, ...]]:
    """Choose samples. With a workspace, workers read the data; then the batches are in files, with facts about them."""
    if workspace is None:
        return batches, None, choose_samples(model, batches, memory_budget)
    batches = workspace.in_files(batches)
    survey = survey_data(workspace, workspace.add_model(model), batches)
    return batches, survey, choose_surveyed(model, batches, survey.facts, memory_budget)


def _with_own_ranges(
    graph_plan: GraphPlan, batches: Batches, samples: Sequence[Feed], workspace: Workspace | None
) -> GraphPlan:
    """Observe layers in subgraphs on all batches; if these can be read only once, on the samples."""
    names = graph_plan.own_range_layers
    if workspace is not None:
        ranges = subgraph_ranges_on_executor(workspace, graph_plan.model, names, batches)
    else:
        ranges = observe_ranges(graph_plan.model, names, batches if batches.is_repeatable else samples)
    return graph_plan.with_own_ranges(ranges)


def _with_biases(
    assembly: "_Assembly",
    graph_plan: GraphPlan,
    isolated: IsolatedLayers,
    samples: Samples,
    options: Options,
    original: LoadedModel,
    memory_budget: int | None,
) -> tuple[Decisions, dict[str, CorrectedBias]]:
    """Return the decisions of a plan, and its corrected biases if they lower the noise at the outputs."""
    decisions = assembly.without_layers(graph_plan)
    tensor_params = decisions.tensor_params()
    biases: dict[str, CorrectedBias] = {}
    if options.bias_correction:
        with running("bias correction"):
            biases = corrected_biases(graph_plan, tensor_params, isolated, len(samples.fitted))
    with running("choosing weight scales"):
        decisions = replace(decisions, layers=layer_decisions(graph_plan, tensor_params, biases))
    if biases and options.is_measured:
        with running("evaluating bias correction"):
            plain = replace(decisions, layers=layer_decisions(graph_plan, tensor_params, {}))
            model, rewritten = graph_plan.model, partial(rewrite, original)
            decisions = _less_noise(plain, decisions, model, samples.evaluated, rewritten, memory_budget)
            biases = {} if decisions is plain else biases
    return decisions, biases


@dataclass(frozen=True)
class _Assembly:
    """Parts that all plans of a search have in common; turns a plan into decisions."""

    facts: Decisions
    calibration: Calibration
    ranges: ChosenRanges
    biases: Mapping[str, CorrectedBias] = field(default_factory=dict)

    def without_layers(self, graph_plan: GraphPlan) -> Decisions:
        """Return decisions with the placements of a plan and their ranges."""
        placements = graph_plan.placements(self.calibration.ranges)
        params = self.ranges.with_new(placements, self.calibration).params
        placements, used = placed(graph_plan, placements, params)
        ranges = range_decisions(used, self.calibration, self.ranges.clipped)
        return replace(self.facts, placements=tuple(placements), ranges=ranges)

    def decisions(self, graph_plan: GraphPlan) -> Decisions:
        """Return all decisions of a plan."""
        decisions = self.without_layers(graph_plan)
        return replace(decisions, layers=layer_decisions(graph_plan, decisions.tensor_params(), self.biases))


def _meet_goal(
    decided: Decided,
    choice: Choice,
    assembly: _Assembly,
    replan: Callable[[Collection[str]], GraphPlan],
    original: LoadedModel,
    goal: MetricGoal,
    run: RunOptions,
) -> Decided:
    """Keep more layers in float until the drop of the metric is within the limit."""
    samples = decided.samples[:MIN_COMPARED]
    placements = choice.unkept_plan.placements(assembly.calibration.ranges)
    noise = choice.noise or NoiseByLayer(
        choice.unkept_plan, choice.ranges.params, samples, run.workspace, placements, run.memory_budget
    )
    trials = ModelTrials(goal, replan, assembly.decisions, partial(rewrite, original), noise)
    start = frozenset(choice.kept)
    trials.measure(start, decided.decisions)
    names = [line.name for line in choice.unkept_plan.quantized]
    search = search_float_layers(names, start, trials, goal.max_drop or 0.0)
    if not search.steps:
        return replace(decided, search=search)
    graph_plan = trials.plan(frozenset(search.layers))
    steps = (*decided.steps, *map(str, search.steps))
    return replace(decided, decisions=assembly.decisions(graph_plan), plan=graph_plan, steps=steps, search=search)


def _announce_time(
    model: ModelProto,
    batches: Batches,
    chosen: Sequence[Feed],
    per_sample: float,
    effort: Effort,
    *,
    is_skipped: bool = False,
) -> None:
    """Announce how long each effort takes, if the chosen one takes long."""
    session, names = make_session(model), array_outputs(model)
    start = time.perf_counter()
    if names:
        with ort_errors():
            session.run(names, chosen[0])
    run = time.perf_counter() - start
    samples_per_batch = samples_in(batches.check_first()) / samples_in(chosen[0])
    calibration = CALIBRATION_RUNS * run * (batches.count or 0) * samples_per_batch
    seconds: dict[Effort, float] = {}
    for name, search in EFFORTS.items():
        samples = search.samples(chosen, per_sample)
        runs = RECORDED_RUNS * len(samples.every)
        is_measured = bool(search.multiplications)
        measured_runs = MEASURED_RUNS + MARGIN_RUNS * is_skipped if is_measured else 0.0
        runs += measured_runs * len(samples.compared)
        seconds[name] = calibration * (1 + (is_skipped and is_measured)) + runs * run
    if seconds[effort] >= MIN_SECONDS_ANNOUNCED:
        others = ", ".join(f"{name} about {_duration(each)}" for name, each in seconds.items() if name != effort)
        announce(f"effort {effort} takes about {_duration(seconds[effort])} on this machine ({others})")


def _duration(seconds: float) -> str:
    """Format a rough duration.

    >>> _duration(14.2), _duration(47.0), _duration(200.0)
    ('14 s', '47 s', '3 min')
    """
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def _tensor_groups(graph_plan: GraphPlan, batches: Batches, run: RunOptions) -> list[list[str]] | None:
    """Return the tensors to observe in each pass over the data, or None without a memory budget."""
    if run.memory_budget is None:
        return None
    groups = tensor_groups(graph_plan, batches, run.memory_budget)
    check_passes(groups, run.resume_file)
    return groups


def _equalize_and_smooth(
    graph_plan: GraphPlan, samples: Samples, options: Options, run: RunOptions
) -> tuple[GraphPlan, tuple[Equalized, ...], tuple[Smoothed, ...]]:
    """Equalize and smooth the model; return the plan of the changed model, and the factors of both passes.

    Noise is measured with fixed scales, also for inputs that are quantized dynamically.
    """
    plan, graph_plan = graph_plan, graph_plan.with_fixed_inputs()
    fitted, workspace, memory_budget = samples.fitted, run.workspace, run.memory_budget
    equalized: tuple[Equalized, ...] = ()
    smoothed: tuple[Smoothed, ...] = ()
    evaluated = samples.evaluated if options.is_measured else ()
    noise: Noises | None = None
    if options.equalize:
        with running("equalization"):
            compare = None
            if workspace is not None:
                compare = compare_equalization(workspace, graph_plan.model, fitted, memory_budget)
            equalized = equalization.choose(graph_plan, fitted, memory_budget, compare)
            if equalized:
                changed = graph_plan.with_model(equalization.apply(copied(graph_plan.model), equalized))
                noises = _min_max_noises("equalization", (graph_plan, changed), evaluated, memory_budget)
                equalized, graph_plan, noise = (
                    (equalized, changed, noises[1]) if _is_better(*noises) else ((), graph_plan, noises[0])
                )
    if options.smooth:
        with running("SmoothQuant"):
            smooth, seed = None, options.seed
            if workspace is not None:
                smooth = compare_smoothing(workspace, graph_plan.model, fitted, seed, memory_budget)
            smoothed = smoothquant.choose(graph_plan, fitted, seed=seed, memory_budget=memory_budget, compare=smooth)
            if smoothed:
                changed = graph_plan.with_model(smoothquant.apply(copied(graph_plan.model), smoothed))
                noises = _min_max_noises("SmoothQuant", (graph_plan, changed), evaluated, memory_budget, noise)
                smoothed, graph_plan = (smoothed, changed) if _is_better(*noises) else ((), graph_plan)
    is_changed = graph_plan.model is not plan.model
    return plan.with_model(graph_plan.model) if is_changed else plan, equalized, smoothed


def _choose_resized_outputs(
    graph_plan: GraphPlan, with_outputs: GraphPlan, noise_of: "_PlanNoise", options: Options
) -> tuple[GraphPlan, tuple[str, ...]]:
    """Choose between two plans: small last layers before or after a Resize are in float, or have a quantized output.

    Both are plans of the same model. ``with_outputs`` is faster. It is rejected if it adds much noise at the outputs,
    unless the noise stays negligible.
    """
    if graph_plan.placements() == with_outputs.placements():
        return graph_plan, ()
    if not options.is_measured:
        return with_outputs, ()
    with running("choosing last layers"):
        noises = noise_of.means("outputs of last layers were not quantized", with_outputs, graph_plan)
        if noises is None:
            return graph_plan, ()
        quantized, in_float = noises
        if quantized <= max(MAX_FASTER_NOISE * in_float, NEGLIGIBLE_NOISE):
            return with_outputs, ()
        change = -_percent(quantized, in_float)
        return graph_plan, (f"kept last layers at a Resize in float: {change:.0f}% less noise at the outputs",)


def _choose_joins(graph_plan: GraphPlan, noise_of: "_PlanNoise", options: Options) -> tuple[GraphPlan, tuple[str, ...]]:
    """Keep Add and Concat nodes that also read float tensors in float if they add much noise."""
    float_plan = graph_plan.with_float_joins()
    if options.prefer == "speed" or graph_plan.placements() == float_plan.placements():
        return graph_plan, ()
    if options.prefer == "accuracy":
        return float_plan, ()
    if not options.is_measured:
        return graph_plan, ()
    with running("choosing joins"):
        noises = noise_of.means("Add and Concat nodes were not compared", graph_plan, float_plan)
        if noises is None:
            return graph_plan, ()
        quantized, in_float = noises
        if quantized <= MAX_FASTER_NOISE * in_float:
            return graph_plan, ()
        change = -_percent(quantized, in_float)
        kept = "kept Add and Concat nodes that also read float tensors in float"
        return float_plan, (f"{kept}: {change:.0f}% less noise at the outputs",)


def _fit_scales(
    graph_plan: GraphPlan, samples: Samples, options: Options, memory_budget: int | None
) -> tuple[GraphPlan, tuple[str, ...]]:
    """Fit the scales of weight-only matmuls with groups to the samples, if that lowers the noise at the outputs."""
    if not options.is_measured:
        return graph_plan, ()
    with running("fitting group scales"):
        changed = with_fitted_scales(graph_plan, samples.fitted, memory_budget)
        if changed is graph_plan:
            return graph_plan, ()
        noise_of = _PlanNoise(samples.evaluated, memory_budget)
        noises = noise_of.means("group scales were not fitted", graph_plan, changed)
        if noises is None:
            return graph_plan, ()
        before, after = noises
        change = _percent(before, after)
        if after > MAX_FITTED_NOISE * before:
            _log.info("group scales were not fitted, because the noise at the outputs would change by %+.0f %%", change)
            return graph_plan, ()
        return changed, (f"fitted the scales of groups: {-change:.0f}% less noise at the outputs",)


class _PlanNoise:
    """Mean noise at the outputs of plans, with min-max ranges and fixed scales; each plan is measured once."""

    def __init__(self, samples: Sequence[Feed], memory_budget: int | None) -> None:
        self._samples, self._memory_budget = samples, memory_budget
        self._noises: list[tuple[GraphPlan, float]] = []

    def means(self, consequence: str, first: GraphPlan, second: GraphPlan) -> tuple[float, float] | None:
        """Measure two plans; if that is not possible, log the ``consequence`` and return None."""
        try:
            return self._mean(first), self._mean(second)
        except NotCalibratedError as error:
            _log.info("%s, because the noise at the outputs cannot be measured: %s", consequence, error)
            return None

    def _mean(self, graph_plan: GraphPlan) -> float:
        noise = next((noise for measured, noise in self._noises if measured is graph_plan), None)
        if noise is None:
            noise = fmean(_min_max_noise(graph_plan.with_fixed_inputs(), self._samples, self._memory_budget))
            self._noises.append((graph_plan, noise))
        return noise


def _min_max_noises(
    name: str,
    plans: tuple[GraphPlan, GraphPlan],
    samples: Sequence[Feed],
    memory_budget: int | None,
    before: Noises | None = None,
) -> tuple[Noises, Noises]:
    """Measure the noise at the outputs before and after the pass ``name``, with min-max ranges, sample by sample.

    The noise is the mean over outputs, relative to the power of an output. ``before`` is the noise before the pass, or
    None if it is unknown. If a tensor is empty in all samples, the noise after the pass cannot be measured and is
    infinite.
    """
    if not samples:
        return (), ()
    try:
        first = _min_max_noise(plans[0], samples, memory_budget) if before is None else before
        noises = first, _min_max_noise(plans[1], samples, memory_budget)
    except NotCalibratedError as error:
        _log.info("%s was not applied, because the noise at the outputs cannot be measured: %s", name, error)
        return (0.0,), (inf,)
    if not _is_better(*noises):
        percent = _percent(fmean(noises[0]), fmean(noises[1]))
        _log.info("%s was not applied, because it would change the noise at the outputs by %+.0f %%", name, percent)
    return noises


def _is_better(before: Noises, after: Noises) -> bool:
    """Return whether equalization or SmoothQuant removes enough noise; without measurements it does.

    >>> _is_better([0.1], [0.07]), _is_better([1e-4], [0.7e-4]), _is_better([1e-4], [0.4e-4])
    (True, False, True)
    >>> noises = [n * 1e-5 for n in range(1, 9)]
    >>> _is_better(noises, [0.7 * each for each in noises]), _is_better(noises, [3e-5] * 8)
    (True, False)
    """
    if not before:
        return True
    old, new = fmean(before), fmean(after)
    if old > NEGLIGIBLE_NOISE:
        return new <= MAX_CHANGED_NOISE * old
    return new <= MAX_CHANGED_NOISE_SAFE * old or _paired_ratio(before, after) <= MAX_PAIRED_NOISE


def _paired_ratio(before: Noises, after: Noises) -> float:
    """Return the upper end of the 95 % confidence interval of the geometric mean of ``after / before``."""
    if len(before) < MIN_PAIRED_SAMPLES or not (min(before) > 0 and min(after) > 0):
        return inf
    logs = [log(new / old) for old, new in zip(before, after, strict=True)]
    return exp(fmean(logs) + one_sided_95(len(logs)) * stdev(logs) / sqrt(len(logs)))


def _percent(before: float, after: float) -> float:
    return 100 * (after / max(before, 1e-30) - 1)


def _min_max_noise(graph_plan: GraphPlan, samples: Sequence[Feed], memory_budget: int | None) -> Noises:
    """Measure the noise at the outputs with min-max ranges, sample by sample."""
    batches = open_batches(samples, inputs_of(graph_plan.model))
    groups = None if memory_budget is None else tensor_groups(graph_plan, batches, memory_budget)
    calibration = calibrate_groups(graph_plan, batches, groups, "minmax", False, None, tuple(samples))
    placements = graph_plan.placements(calibration.ranges)
    params = choose_params(placements, calibration, ())
    noise = NoiseByLayer(graph_plan, params, samples, None, placements, memory_budget)
    outputs = max(noise.count, 1) / len(samples)
    return [each / outputs for each in noise.sample_noises()]


def _less_noise(
    plain: Decisions,
    corrected: Decisions,
    model: ModelProto,
    samples: Sequence[Feed],
    rewritten: Callable[[Decisions], ModelProto],
    memory_budget: int | None,
) -> Decisions:
    """Return whichever decisions give less noise at the outputs, or ``corrected`` if the noise is equal."""
    names = array_outputs(model)
    if not names:
        return corrected
    references = ReferenceOutputs(names, _outputs(model, names, samples), memory_budget)
    noises: list[float] = []
    for decisions in (corrected, plain):
        by_sample: list[float] = []
        for i, outputs in enumerate(_outputs(rewritten(decisions), names, samples)):
            if not noises:
                references.leave_out(i, outputs)
            by_sample.append(sum(references.noise(i, outputs)))
        noises.append(sum(by_sample))
    if noises[1] < noises[0]:
        _log.info(
            "bias correction was not applied, because it would raise the noise at the outputs by %.0f %%",
            _percent(*noises[::-1]),
        )
        return plain
    return corrected


def _outputs(model: ModelProto, names: Sequence[str], samples: Sequence[Feed]) -> Iterator[list[NDArray[Any]]]:
    session = make_session(model)
    for feed in samples:
        with ort_errors():
            outputs = session.run(names, feed)
        yield outputs


def reject_empty(graph_plan: GraphPlan) -> None:
    """Reject a plan that quantizes no layer; the message lists the layers by reason."""
    if graph_plan.quantized:
        return
    layers: dict[str, list[str]] = {}
    for line in graph_plan.layers:
        layers.setdefault(line.reason, []).append(line.name)
    reasons = [f"{reason} ({_names(names)})" for reason, names in layers.items()]
    more = f"; and {len(reasons) - MAX_REASONS_SHOWN} more" if len(reasons) > MAX_REASONS_SHOWN else ""
    why = f"{'; '.join(reasons[:MAX_REASONS_SHOWN])}{more}"
    recipe = f"recipe {graph_plan.recipe.name}" if graph_plan.recipe.name else "the recipe"
    raise UnsupportedError(
        f"{NOTHING_QUANTIZED}, so no file is written: {why or 'the model has no layers'}. Change {recipe}, target= or "
        "skip=; qo.plan shows their effect on each layer"
    )


def _names(names: Sequence[str]) -> str:
    """Format the first names, shortened, and the number of the remaining names."""
    shown = [name if len(name) <= MAX_NAME_CHARS else f"{name[: MAX_NAME_CHARS - 3]}..." for name in names]
    more = [f"{len(names) - MAX_NAMES_SHOWN} more"] if len(names) > MAX_NAMES_SHOWN else []
    return ", ".join([*shown[:MAX_NAMES_SHOWN], *more])
