"""``qo.quantize``: writes a quantized file and returns a report, from an ONNX file and calibration data.

::

    load -> decide -> rewrite -> compare -> save

``decide`` runs the accuracy passes (``accuracy_passes``) and returns all that ``rewrite`` needs.
``QuantizeReport`` lists what happened to each layer, the sizes, and the SQNR of the outputs.
"""

import json
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any

import onnx
from numpy.typing import ArrayLike, NDArray
from onnx import ModelProto

from detent import __version__
from detent.checks import as_array
from detent.codec import encode
from detent.errors import NotCalibratedError, SpecError
from detent.granularity import PerGroup
from detent.metrics import OutputComparison, worst_output
from detent.model_metric import MetricLike, MetricResult, get_metric, parse_drop
from detent.onnx.accuracy_passes import Decided, decide_with_data, reject_empty
from detent.onnx.calibration import Progress
from detent.onnx.decisions import Decisions
from detent.onnx.graph_plan import NO_KERNEL, WEIGHT_ONLY, GraphPlan, Preference, RecipeLike, plan
from detent.onnx.metric_search import MetricGoal, MetricSearch
from detent.onnx.normal_form import needed_opset, to_normal_form
from detent.onnx.pass_errors import listening, running
from detent.onnx.pass_options import Effort, KeepFloat, Options, RunOptions
from detent.onnx.quality_warnings import DataSummary, QuantizeWarning, drop_warnings, quantize_warnings
from detent.onnx.quantized_graph import layer_decisions, rewrite
from detent.onnx_model.batches import KINDS, Batches, BatchSource, open_batches, samples_in
from detent.onnx_model.files import LoadedModel, ModelSource, default_output, load, load_model, save
from detent.onnx_model.graph import INTEGER_KERNELS, Graph
from detent.onnx_model.sessions import (
    ACCURACY_LEVEL,
    array_outputs,
    kernels_of,
    make_session,
    optimized,
    ort_errors,
    runtime_record,
)
from detent.onnx_model.targets import Target, get_target
from detent.onnx_model.workspace import open_workspace
from detent.recipe import Recipe, get_recipe
from detent.rule import ObserverLike
from detent.scale_mode import PerBatch
from detent.spec import QuantSpec
from detent.storage import check_directory
from detent.tables import html_table, short_name, table_lines

__all__ = ["LayerReport", "QuantizeReport", "compare_outputs", "decide", "output_sqnr", "quantize"]

_log = logging.getLogger(__name__)

Feed = dict[str, NDArray[Any]]

DATA_SUFFIXES = frozenset[str]().union(*(kind.suffixes for kind in KINDS))  # calibration data, never models
WEIGHT_ONLY_HINT = (
    "weight-only layers: ONNX Runtime rounds their activations to 8 bits unless the session option "
    f"{ACCURACY_LEVEL!r} is '0' or '1'; a file cannot set this option"
)


@dataclass(frozen=True)
class LayerReport:
    """Row of a ``QuantizeReport``: how one layer was quantized.

    Attributes:
        name: name of its node.
        type: operator of its node.
        weight: spec of its weight; "" if the layer is kept in float, or is a matmul of two activations.
        input: spec of its input, followed by "dynamic" for dynamic quantization; "" if the input is float.
        reason: why the layer is kept in float; "" if it is quantized.
        kernel: the operator that ONNX Runtime runs for the layer on this machine; "" if it is kept in float.
        note: remark of the plan on a quantized layer.

    >>> LayerReport("fc", "MatMul", "int8", "uint8", kernel="MatMulIntegerToFloat").runs_on_integer_kernel
    True
    """

    name: str
    type: str
    weight: str = ""
    input: str = ""
    reason: str = ""
    kernel: str = ""
    note: str = ""

    @property
    def runs_on_integer_kernel(self) -> bool:
        """Whether the layer runs on an integer kernel of ONNX Runtime."""
        return self.kernel in INTEGER_KERNELS

    @property
    def float_reason(self) -> str:
        """Why the layer does not run on an integer kernel, or "" if it does."""
        if self.reason or self.runs_on_integer_kernel:
            return self.reason
        if not self.input:
            is_embedding = self.type == "Gather"
            text = (
                "an embedding, which dequantizes the rows it looks up" if is_embedding else "the layer's input is float"
            )
            return self.note if self.note.startswith((NO_KERNEL, WEIGHT_ONLY)) else text
        note = self.note if self.weight else ""
        return note or f"ONNX Runtime runs this layer as {self.kernel or self.type} on this machine"


@dataclass(frozen=True, repr=False)
class QuantizeReport:
    """The result of ``qo.quantize``; ``str`` and notebooks show it as a table.

    Attributes:
        output: path of the quantized file.
        plan: the final plan, after float fallback.
        nbytes_before: size of the float model in bytes.
        nbytes_after: size of the quantized file in bytes.
        layers: one row per layer.
        output_sqnr_db: SQNR of the worst output on calibration samples, in dB; None if the models were not compared.
        outputs_sqnr_db: SQNR of each float output in dB, by output name.
        seconds: wall time of ``quantize``.
        steps: the changes that the accuracy passes made, as text.
        hints: advice for running the file.
        decisions: all decisions; ``qo.rewrite`` makes the same quantized model from them.
        not_compared: why an output was not compared on some batches, by output name.
        warnings: warnings about low accuracy, a larger file, suspicious data, and layers in float.
        samples: number of calibration samples.
        passes: maps the name of each pass to its wall time in seconds.
        search: the search for layers to keep in float, if ``max_drop`` was set.
        metric: the metric of both models on ``eval_data``; None without ``metric``, ``labels`` and ``max_drop``.
        data_notes: the kind of data files and their preprocessing, and types that were converted.
        data: ranges and distinct samples of the calibration data; None without data.
        multiplications: multiplications of each layer on the first batch, by name; 0 for layers without an integer
            kernel on any target, and empty without data.

    >>> from detent.onnx_model import get_target
    >>> from detent.recipe import Recipe
    >>> plan = GraphPlan(Recipe([]), get_target("openvino"), (), None)
    >>> report = QuantizeReport(Path("a.onnx"), plan, 8, 2, (), None, {}, 1.0)
    >>> print(report)
    a.onnx: 8 -> 2 bytes (0.250), 0 of 0 layers quantized, 0 on integer kernels, 1.0 s
    >>> json.loads(report.to_json())["nbytes_after"]
    2
    """

    output: Path
    plan: GraphPlan
    nbytes_before: int
    nbytes_after: int
    layers: tuple[LayerReport, ...]
    output_sqnr_db: float | None
    outputs_sqnr_db: Mapping[str, float]
    seconds: float
    steps: tuple[str, ...] = ()
    hints: tuple[str, ...] = ()
    decisions: Decisions | None = None
    not_compared: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[QuantizeWarning, ...] = ()
    samples: int = 0
    passes: Mapping[str, float] = field(default_factory=dict)
    search: MetricSearch | None = None
    metric: MetricResult | None = None
    data_notes: tuple[str, ...] = ()
    data: DataSummary | None = field(default=None, repr=False, compare=False)
    multiplications: Mapping[str, float] = field(default_factory=dict, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values; numbers may be infinite."""
        names = ("nbytes_before", "nbytes_after", "output_sqnr_db", "seconds")
        return {
            "output": str(self.output),
            "recipe": json.loads(self.plan.recipe.to_json()),
            "target": self.plan.target.name,
            "layers": [
                {**asdict(layer), "runs_on_integer_kernel": layer.runs_on_integer_kernel} for layer in self.layers
            ],
            "outputs_sqnr_db": dict(self.outputs_sqnr_db),
            "outputs_not_compared": dict(self.not_compared),
            "steps": list(self.steps),
            "hints": list(self.hints),
            "warnings": [each._asdict() for each in self.warnings],
            "passes": dict(self.passes),
            "metric": None if self.metric is None else self.metric.to_dict(),
            "max_drop_search": None if self.search is None else self.search.to_dict(),
            "data_notes": list(self.data_notes),
            **{name: getattr(self, name) for name in names},
        }

    def to_json(self) -> str:
        """Return the report as JSON; infinite numbers become "inf" or "-inf"."""
        return json.dumps(encode(self.to_dict()), indent=2, allow_nan=False)

    def __str__(self) -> str:
        table = [_HEAD, *(_report_row(each, short_name(each.name)) for each in self.layers)]
        return "\n".join([*(table_lines(table) if self.layers else []), *self._notes()])

    def __repr__(self) -> str:
        return f"<QuantizeReport {self._summary()}>"

    def _repr_html_(self) -> str:
        rows = [_report_row(each, each.name) for each in self.layers]
        return html_table([_HEAD, *rows], notes=self._notes())

    def _notes(self) -> list[str]:
        """Return the lines below the table."""
        skipped = (f"output {name!r} not compared: {reason}" for name, reason in self.not_compared.items())
        metric = [] if self.metric is None else [f"{self.metric.name}: {self.metric}"]
        warnings = (f"warning: {each}" for each in self.warnings)
        return [*self.data_notes, *self.steps, self._summary(), *metric, *skipped, *self.hints, *warnings]

    def _summary(self) -> str:
        quantized = sum(not layer.reason for layer in self.layers)
        integers = sum(layer.runs_on_integer_kernel for layer in self.layers)
        sqnr = "" if self.output_sqnr_db is None else f", {self.output_sqnr_db:.1f} dB"
        return (
            f"{self.output}: {self.nbytes_before:,} -> {self.nbytes_after:,} bytes "
            f"({self.nbytes_after / max(1, self.nbytes_before):.3f}), {quantized} of {len(self.layers)} layers "
            f"quantized, {integers} on integer kernels{sqnr}, {self.seconds:.1f} s"
        )


_HEAD = ("layer", "type", "weight", "input", "in ONNX Runtime", "")


def _report_row(layer: LayerReport, name: str) -> tuple[str, ...]:
    specs = layer.weight or "-", layer.input or "-"
    return name, layer.type, *specs, layer.kernel or "float", layer.reason or layer.note


def quantize(  # noqa: PLR0913 - all options of the pipeline
    model: ModelSource,
    output: str | PathLike[str] | None = None,
    data: BatchSource | None = None,
    recipe: RecipeLike = "w8a8",
    *,
    target: Target | str = "onnxruntime",
    observer: ObserverLike | None = None,
    skip: Iterable[str] = (),
    keep_float: KeepFloat = "auto",
    bias_correction: bool = True,
    equalize: bool = True,
    smooth: bool = True,
    prefer: Preference = "balanced",
    effort: Effort = "balanced",
    float16: bool = False,
    memory_budget: int | None = None,
    progress: Progress | None = None,
    resume_file: str | PathLike[str] | None = None,
    executor: Executor | None = None,
    work_directory: str | PathLike[str] | None = None,
    seed: int = 0,
    force: bool = False,
    compare: bool = True,
    max_drop: float | str | None = None,
    metric: MetricLike | None = None,
    eval_data: BatchSource | None = None,
    labels: ArrayLike | None = None,
) -> QuantizeReport:
    """Quantize a model: call ``decide`` and ``rewrite``, compare both models, and save the quantized model.

    Args:
        model: a float32 model, as a path, a ModelProto, or a result of ``detent.onnx_model.load_model``.
        output: the file to write; an existing file is replaced atomically. None writes ``<model>.<recipe>.onnx`` next
            to the model file. For a ModelProto, which has no file, ``output`` is required.
        data: calibration batches: an iterable of dicts, tuples or arrays, a callable that returns one, a data loader,
            an .npz, .npy, image or .wav file, or a directory of such files. A ``detent.onnx_model.DataFiles`` also has
            options such as preprocessing or a tokenizer for texts. Weight-only recipes and dynamic
            quantization need no data.
        recipe: a ``dt.Recipe``, the name of a preset, or the path of a .toml or .json file.
        target: the runtime that the file is for, such as "onnxruntime-avx2".
        observer: observer for activations; None searches margins of ranges, and ranges to clip. The range of a rule's
            observer is used as it is.
        skip: names or glob patterns of layers to keep in float. If the data can be read more than once, all layers are
            calibrated once more without ``skip``, because neither the factors of equalization and SmoothQuant nor the
            margin of ranges should depend on it.
        keep_float: "auto" enables float fallback: a small layer that alone causes a tenth of the noise at the outputs
            is kept in float if this removes enough noise: 15 % for a cheap layer, up to half for an expensive one.
            "none" disables float fallback.
        bias_correction: change biases to cancel the mean error of each output channel.
        equalize: apply cross-layer equalization to convolutions where it helps.
        smooth: apply SmoothQuant to matmuls where it helps.
        prefer: "balanced" stores 8-bit weights with 7 bits, so that fast kernels are exact on every CPU. The few layers
            that lose the most accuracy get 8 bits. "speed" stores all weights with 7 bits, "accuracy" all with 8 bits.
            Targets for VNNI always store 8 bits, because fast kernels with VNNI are exact at 8 bits. "accuracy" also
            keeps the outputs of last convolutions in float, for all targets. "speed" also keeps ConvTranspose layers in
            float if the runtime has no integer kernel for them, and quantizes large matmuls of two activations.
        effort: how much is measured. "fast" compares candidates only at single layers, and has no float fallback.
            "balanced" also measures the noise at the outputs, on 2 samples of a large model, up to 32 of a small one.
            "best" uses 32 samples of models up to 3 billion multiplications.
        float16: store constants of float parts in float16, if their values are exact in it, as in float16 models. The
            file is smaller, and its outputs are the same.
        memory_budget: maximum bytes of activations, samples and outputs that a pass keeps in memory. A small budget
            needs several passes over the data, and space for temporary files.
        progress: whether to show a progress bar on a terminal (None means True), or a callback f(batches_done, total);
            total is None if unknown.
        resume_file: the file where calibration saves its state; if it exists, calibration resumes from it.
        executor: anything with the interface of ``concurrent.futures.Executor``, such as a ProcessPoolExecutor or
            ``detent.cluster.ray_executor()``. Its workers read the data, calibrate, and measure noise; the file has the
            same bytes as without an executor.
        work_directory: a directory that all workers see, for the model that they run; None for the directory of the
            model. Data in memory are written to this directory, so they need one.
        seed: random seed for choosing the rows on which SmoothQuant is evaluated.
        force: accept a model that is already quantized.
        compare: run both models on up to 32 calibration samples and report ``output_sqnr_db``.
        max_drop: largest accepted drop of the metric relative to the float model, such as 0.005 or "0.5%". If the drop
            is larger, more layers are kept in float, those that gain the most per byte; see ``QuantizeReport.search``.
        metric: "top1", "cosine", "iou", "module:function", or a function of outputs, or of outputs and labels, that
            returns one number; higher is better. None stands for "auto": top1 with labels, and otherwise the measure
            that fits the first output, compared with the float model.
        eval_data: batches on which the metric is measured, also by the search; by default, the calibration data. To
            evaluate on samples that the search has not seen, use ``qe.quantize_and_evaluate``.
        labels: one label per sample of ``eval_data``, for the metric; by default, the classes of its sub-directories,
            if the model has as many.

    Raises:
        NotCalibratedError: the recipe quantizes activations, and ``data`` is missing.
        SpecError: ``output`` is missing for a ModelProto, or is calibration data by mistake.
        UnsupportedError: no layer would be quantized; the message gives the reasons. Nothing is written.
        SpecError, ShapeError, DtypeError, RangeError: the metric fails or does not exist, or the labels do not fit.
            Nothing is written.
        UnsupportedError, FileFormatError, SpecError, ShapeError, DtypeError, NaNError: the model, the recipe or the
            data are invalid or not supported.

    >>> import tempfile, numpy as np, detent.onnx as qo
    >>> from onnx import parser
    >>> model = parser.parse_model('''<ir_version: 8, opset_import: ["" : 17]>
    ...     g (float[1,1] x) => (float[1,1] y) <float[1,1] w = {3.0}> { [fc] y = MatMul(x, w) }''')
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     path = Path(directory, "small.onnx")
    ...     _ = qo.save(model, path)
    ...     report = qo.quantize(path, data=[np.float32([[2.0]])])
    >>> report.output.name, report.layers[0].kernel
    ('small.w8a8.onnx', 'MatMulIntegerToFloat')
    """
    start = time.perf_counter()
    options = Options(
        observer, skip, keep_float, bias_correction, equalize, smooth, seed, prefer, effort, float16=float16
    )
    metric_options = MetricOptions.of(max_drop, metric, eval_data, labels)
    rules, target = get_recipe(recipe), get_target(target)
    path = _output_path(model, output, recipe)
    check_directory(path.parent)
    passes: dict[str, float] = {}
    with listening(lambda name, seconds: passes.update({name: passes.get(name, 0.0) + seconds})):
        original = _load(model)
        batches = _checked_data(original, data, rules)
        with open_workspace(executor, work_directory, original.path) as workspace:
            run = RunOptions(memory_budget, progress, resume_file, workspace)
            decided = _decide(original, batches, rules, target, options, run, metric_options, force=force)
            with running("rewriting"):
                quantized = rewrite(original, decided.decisions)
            with running("measuring the metric"):
                result = decided.metric(quantized)
        samples = decided.samples if compare else ()
        with running("comparing outputs"):
            names = array_outputs(quantized) if samples else []
            comparison = compare_outputs(original, quantized, names, samples) if names else OutputComparison(())
        with running("writing"):
            report = _finish(path, decided, original.nbytes, quantized, comparison)
    notes = () if batches is None else batches.notes
    return replace(report, seconds=time.perf_counter() - start, passes=passes, data_notes=notes, metric=result)


def _output_path(model: ModelSource, output: object, recipe: RecipeLike) -> Path:
    """Return the path of the file to write; reject calibration data that was passed as ``output``."""
    if output is None:
        model_path = model.path if isinstance(model, LoadedModel) else model
        if isinstance(model_path, str | PathLike):
            return default_output(model_path, recipe)
        load_model(model)  # rejects anything that is not a model
        raise SpecError(
            "output is missing, but a model in memory has no default output: pass output='quantized.onnx', or call "
            "qo.rewrite(model, qo.decide(model, data)) to get a model instead of a file"
        )
    if not isinstance(output, str | PathLike):
        raise SpecError(
            f"output must be a path, got {type(output).__name__}: pass calibration data by name, as in "
            "qo.quantize(model, data=batches)"
        )
    path = Path(output)
    if path.suffix.lower() in DATA_SUFFIXES or path.is_dir():
        kind = "the directory" if path.is_dir() else "the data file"
        raise SpecError(
            f"output must be the path of an ONNX file, got {kind} {str(path)!r}: pass calibration data by name, as in "
            f"qo.quantize(model, data={str(path)!r})"
        )
    return path


def decide(  # noqa: PLR0913 - all options of the pipeline
    model: ModelSource,
    data: BatchSource | None = None,
    recipe: RecipeLike = "w8a8",
    *,
    target: Target | str = "onnxruntime",
    observer: ObserverLike | None = None,
    skip: Iterable[str] = (),
    keep_float: KeepFloat = "auto",
    bias_correction: bool = True,
    equalize: bool = True,
    smooth: bool = True,
    prefer: Preference = "balanced",
    effort: Effort = "balanced",
    float16: bool = False,
    memory_budget: int | None = None,
    progress: Progress | None = None,
    resume_file: str | PathLike[str] | None = None,
    executor: Executor | None = None,
    work_directory: str | PathLike[str] | None = None,
    seed: int = 0,
    force: bool = False,
    max_drop: float | str | None = None,
    metric: MetricLike | None = None,
    eval_data: BatchSource | None = None,
    labels: ArrayLike | None = None,
) -> Decisions:
    """Decide how to quantize a model; ``qo.rewrite`` applies the decisions.

    Arguments and errors are the same as for ``qo.quantize``, but without ``output`` and ``compare``.

    >>> import numpy as np, detent.onnx as qo
    >>> from onnx import parser
    >>> model = parser.parse_model('''<ir_version: 8, opset_import: ["" : 17]>
    ...     g (float[1,1] x) => (float[1,1] y) <float[1,1] w = {64.0}> { [fc] y = MatMul(x, w) }''')
    >>> decisions = qo.decide(model, [np.float32([[51.0]])])
    >>> decisions.layers[0].weight_scale, decisions.ranges["x"].observed_range
    (array([1.], dtype=float32), (51.0, 51.0))
    """
    options = Options(
        observer, skip, keep_float, bias_correction, equalize, smooth, seed, prefer, effort, float16=float16
    )
    metric_options = MetricOptions.of(max_drop, metric, eval_data, labels)
    recipe, target = get_recipe(recipe), get_target(target)
    original = _load(model)
    batches = _checked_data(original, data, recipe)
    with open_workspace(executor, work_directory, original.path) as workspace:
        run = RunOptions(memory_budget, progress, resume_file, workspace)
        return _decide(original, batches, recipe, target, options, run, metric_options, force=force).decisions


@dataclass(frozen=True)
class MetricOptions:
    """Arguments of ``quantize`` about a metric; without ``max_drop``, it is only measured."""

    max_drop: float | None
    metric: MetricLike | None = None
    eval_data: BatchSource | None = None
    labels: NDArray[Any] | None = None

    @classmethod
    def of(
        cls,
        max_drop: float | str | None,
        metric: MetricLike | None,
        eval_data: BatchSource | None,
        labels: ArrayLike | None,
    ) -> "MetricOptions | None":
        """Check the arguments, and return None if all of them are None."""
        if all(each is None for each in (max_drop, metric, eval_data, labels)):
            return None
        if metric is not None:
            get_metric(metric)  # fail early
        limit = None if max_drop is None else parse_drop(max_drop)
        return cls(limit, metric, eval_data, None if labels is None else as_array("labels", labels))

    @property
    def name(self) -> str:
        """Name of the metric; "" if it is chosen by the outputs."""
        return "" if self.metric is None else get_metric(self.metric).name

    def goal(self, model: LoadedModel, calibration: Batches | None, run: RunOptions) -> MetricGoal:
        """Run the float model on the evaluation data, and return the goal."""
        source = calibration if self.eval_data is None else self.eval_data
        if source is None or (calibration is None and self.max_drop is not None):
            what = "a metric needs eval_data= or data=" if self.max_drop is None else "max_drop needs calibration data"
            raise NotCalibratedError(f"{what}, also for weight-only recipes: pass data= (--data)")
        batches = open_batches(source, model.inputs)
        if batches is calibration and not batches.is_repeatable:
            raise SpecError("a metric needs data that can be read twice: pass data as a list, or pass eval_data=")
        with running("running the float model"):
            return MetricGoal.of(
                model, batches, self.metric, self.labels, self.max_drop, run.workspace, run.memory_budget
            )


def _load(model: ModelSource) -> LoadedModel:
    with running("loading"):
        return load_model(model)


def _decide(
    original: LoadedModel,
    batches: Batches | None,
    recipe: Recipe,
    target: Target,
    options: Options,
    run: RunOptions,
    metric: MetricOptions | None,
    *,
    force: bool,
) -> Decided:
    goal = None if metric is None else metric.goal(original, batches, run)
    if metric is not None and metric.max_drop is not None:
        options = replace(options, max_drop=metric.max_drop, metric=metric.name)
    first = None if batches is None else batches.check_first()
    own_opset, opset = Graph(original.proto).opset, needed_opset(low_bits=_needs_low_bits(recipe))
    with running("preparing the model"):
        prepared = to_normal_form(load(original), opset, feed=first, force=force)
    with running("planning"):
        graph_plan = plan(prepared.model, recipe, target=target, skip=options.skip, prefer=options.prefer)
        # A workspace makes all data repeatable, but must not change the result, so the caller's data count.
        has_unskipped = bool(options.skip) and batches is not None and batches.is_repeatable
        unskipped = plan(prepared.model, recipe, target=target, prefer=options.prefer) if has_unskipped else None
    reject_empty(graph_plan)
    if batches is None and any(line.input is not None for line in graph_plan.quantized):
        raise _missing_data(recipe)
    facts = Decisions(
        written_by=__version__,
        onnx_version=onnx.__version__ if own_opset < graph_plan.graph.opset else "",
        target=target.name,
        opset=graph_plan.graph.opset,
        ir_version=prepared.model.ir_version,
        source=original.digest,
        recipe=recipe.to_json(),
        options=options.to_json(),
        constants=prepared.constants,
        float16=options.float16,
    )
    if batches is not None:
        return decide_with_data(facts, graph_plan, batches, options, run, original, goal, unskipped)
    steps: tuple[str, ...] = ()
    if own_opset < facts.opset:
        steps = (f"converted from opset {own_opset} to {facts.opset}; outputs not compared, because data is missing",)
    with running("choosing weight scales"):
        decisions = replace(facts, layers=layer_decisions(graph_plan, {}, {}))
        return Decided(decisions, graph_plan, (), steps, goal=goal)


def _checked_data(model: LoadedModel, data: BatchSource | None, recipe: Recipe) -> Batches | None:
    if data is not None:
        return open_batches(data, model.inputs)
    is_static = all(rule.mode != PerBatch() for rule in recipe.rules)  # otherwise the plan tells which data is needed
    if is_static and any(rule.input is not None or rule.output is not None for rule in recipe.rules):
        raise _missing_data(recipe)
    return None


def _missing_data(recipe: Recipe) -> NotCalibratedError:
    return NotCalibratedError(
        f"recipe {recipe.name or recipe!r} quantizes activations and needs calibration data: pass data= (--data), or "
        "use 'w8a8-dynamic', or a weight-only recipe such as 'w8a16' or 'w4a16'"
    )


def _needs_low_bits(recipe: Recipe) -> bool:
    """Return whether a recipe needs 4-bit, 16-bit or per-group Q/DQ pairs, which only newer opsets have."""
    for rule in recipe.rules:
        for spec, is_stored_in_4 in ((rule.weight, True), (rule.input, False), (rule.output, False)):
            if not isinstance(spec, QuantSpec):  # ONNX files have no block formats
                continue
            is_byte = (4 if is_stored_in_4 else 0) < spec.bits <= 8
            if not is_byte or isinstance(spec.granularity, PerGroup):
                return True
    return False


def output_sqnr(before: ModelSource, after: ModelProto, feeds: Iterable[Feed]) -> dict[str, float]:
    """Measure the SQNR of every float output in dB over some batches."""
    names = array_outputs(after)
    return compare_outputs(before, after, names, feeds).sqnr_db if names else {}


def compare_outputs(
    before: ModelSource, after: ModelSource, names: Sequence[str], feeds: Iterable[Feed]
) -> OutputComparison:
    """Run two models on some batches, and compare the named outputs."""
    sessions, comparison = (make_session(before), make_session(after)), OutputComparison(names)
    for feed in feeds:
        with ort_errors():
            expected, got = (session.run(names, feed) if names else [] for session in sessions)
        comparison.add(expected, got, samples_in(feed))
    return comparison


def _finish(
    path: Path,
    decided: Decided,
    size: int,
    quantized: ModelProto,
    comparison: OutputComparison,
) -> QuantizeReport:
    runtime_graph = optimized(quantized)  # raises before a file is written if ONNX Runtime cannot load the model
    kernels = kernels_of(quantized, running=runtime_graph)
    if decided.plan.target.runtime == "onnxruntime":
        runtime_record(runtime_graph).write(quantized)
    by_name = decided.plan.layers_by_name
    by_weight = {by_name[name].weight: kernel for name, kernel in kernels.items() if name in by_name}
    written = save(quantized, path)
    layers = tuple(
        LayerReport(
            each.name,
            each.type,
            "" if each.weight is None else str(each.weight),
            each.input_text,
            each.reason,
            kernels.get(each.name, by_weight.get(by_name[each.name].weight, "") if each.is_quantized else ""),
            each.note,
        )
        for each in decided.plan.layers
    )
    errors = comparison.sqnr_db
    hints = (WEIGHT_ONLY_HINT,) if any(layer.kernel == "MatMulNBits" for layer in layers) else ()
    return QuantizeReport(
        path,
        decided.plan,
        size,
        written,
        layers,
        errors.get(worst_output(errors)),
        errors,
        0.0,  # known at the end
        decided.steps,
        hints,
        decided.decisions,
        comparison.not_compared,
        (
            *quantize_warnings(decided.plan, layers, (size, written), comparison, decided.data, decided.work),
            *drop_warnings(decided.search),
        ),
        0 if decided.data is None else decided.data.samples,
        search=decided.search,
        data=decided.data,
        multiplications=decided.work,
    )
