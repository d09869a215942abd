"""Quantizing: an ONNX file and data in, a quantized file and a report out. The steps are functions of their own.

QuantizeReport: what was done to a model, and what it costs.
"""

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto

from detent.errors import NotCalibratedError, SpecError
from detent.granularity import PerGroup
from detent.metrics import sqnr_db
from detent.onnx.bias_correction import corrected_biases
from detent.onnx.calibration import Progress, calibrate, choose_clipped, choose_params, tensor_groups
from detent.onnx.equalization import equalize as equalize_channels
from detent.onnx.float_fallback import choose_float
from detent.onnx.graph_plan import GraphPlan, RecipeLike, plan
from detent.onnx.normal_form import prepare
from detent.onnx.quantized_graph import insert
from detent.onnx.smoothquant import smooth as smooth_inputs
from detent.onnx_model.batches import Batches, BatchSource, inputs_of, open_batches
from detent.onnx_model.files import ModelSource, load, nbytes_of, save
from detent.onnx_model.graph import Graph
from detent.onnx_model.provenance import digest_of
from detent.onnx_model.sessions import INTEGER, kernels_of, make_session
from detent.onnx_model.targets import Target, get_target
from detent.recipe import Recipe, get_recipe
from detent.rule import ObserverLike, get_observer_spec
from detent.tables import table_lines

__all__ = ["LayerReport", "QuantizeReport", "output_sqnr", "quantize"]


@dataclass(frozen=True)
class LayerReport:
    """What became of one layer.

    Attributes:
        name, type: of its node.
        weight, input: its specs, "" for what stays float.
        reason: why it was left alone.
        kernel: the operator that computes it in ONNX Runtime on this machine.
        note: what else there is to know.

    >>> LayerReport("fc", "MatMul", "int8", "uint8", kernel="MatMulIntegerToFloat").in_integers
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
    def in_integers(self) -> bool:
        """Whether it is computed in integers."""
        return self.kernel in INTEGER


@dataclass(frozen=True)
class QuantizeReport:
    """What ``qo.quantize`` did; ``str`` is a table.

    Attributes:
        output: the file.
        plan: as it was carried out.
        nbytes_before, nbytes_after: of both files.
        layers: what became of each.
        output_sqnr_db: of the first output, on the first batches; None without data.
        outputs_sqnr_db: of all outputs.
        seconds: that it took.
        steps: what was tried to keep the accuracy, and what came of it.
        hints: what a user should know.

    >>> from detent.onnx_model import get_target
    >>> from detent.recipe import Recipe
    >>> plan = GraphPlan(Recipe([]), get_target("openvino"), (), None)
    >>> made = QuantizeReport(Path("a.onnx"), plan, 8, 2, (), None, {}, 1.0)
    >>> print(made)
    a.onnx: 8 -> 2 bytes (0.250), 0 of 0 layers quantized, 0 in integers, 1.0 s
    >>> json.loads(made.to_json())["nbytes_after"]
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
    hints: tuple[str, ...] = field(default=())

    def to_json(self) -> str:
        """The same as JSON."""
        plain: dict[str, Any] = {
            "output": str(self.output),
            "recipe": json.loads(self.plan.recipe.to_json()),
            "target": self.plan.target.name,
            "layers": [{**asdict(layer), "in_integers": layer.in_integers} for layer in self.layers],
            "outputs_sqnr_db": dict(self.outputs_sqnr_db),
            "steps": list(self.steps),
            "hints": list(self.hints),
        }
        names = ("nbytes_before", "nbytes_after", "output_sqnr_db", "seconds")
        return json.dumps(plain | {name: getattr(self, name) for name in names}, indent=2)

    def __str__(self) -> str:
        rows = [
            (
                each.name,
                each.type,
                each.weight or "-",
                each.input or "-",
                each.kernel or "float",
                each.reason or each.note,
            )
            for each in self.layers
        ]
        head = ("layer", "type", "weight", "input", "in ONNX Runtime", "")
        lines = table_lines([head, *rows]) if rows else []
        quantized = sum(not layer.reason for layer in self.layers)
        integers = sum(layer.in_integers for layer in self.layers)
        sqnr = "" if self.output_sqnr_db is None else f", {self.output_sqnr_db:.1f} dB"
        lines += self.steps
        lines.append(
            f"{self.output}: {self.nbytes_before:,} -> {self.nbytes_after:,} bytes "
            f"({self.nbytes_after / max(1, self.nbytes_before):.3f}), {quantized} of {len(self.layers)} layers "
            f"quantized, {integers} in integers{sqnr}, {self.seconds:.1f} s"
        )
        return "\n".join([*lines, *self.hints])


Feed = dict[str, NDArray[Any]]
SAMPLES = 8  # batches that channels are made even on
JUDGED = 4  # batches that the outputs are compared on
DEFAULTS: dict[str, object] = {
    "observer": None,
    "skip": [],
    "keep_float": "auto",
    "bias_correction": True,
    "equalize": True,
    "smooth": True,
    "seed": 0,
}
WEIGHT_ONLY_HINT = (
    "weight-only: ONNX Runtime computes such layers with 8-bit activations unless its session option "
    "'session.qdq_matmulnbits_accuracy_level' is '0' or '1', which the file cannot carry"
)


def quantize(  # noqa: PLR0913 - the options of the main job
    model: ModelSource,
    output: str | PathLike[str],
    data: BatchSource | None = None,
    recipe: RecipeLike = "w8a8",
    *,
    target: Target | str = "onnxruntime",
    observer: ObserverLike | None = None,
    skip: Iterable[str] = (),
    keep_float: Literal["auto", "none"] = "auto",
    bias_correction: bool = True,
    equalize: bool = True,
    smooth: bool = True,
    memory_budget: int | None = None,
    progress: Progress | None = None,
    checkpoint: str | PathLike[str] | None = None,
    seed: int = 0,
    force: bool = False,
) -> QuantizeReport:
    """Quantize a model file.

    Args:
        model: a path or a ModelProto, in float32.
        output: the file to write; an existing one is replaced in one step.
        data: batches to calibrate with: an iterable of dicts, tuples or arrays, an .npz, or a folder of .npz or .npy
            files; not needed for weight-only recipes.
        recipe: a ``dt.Recipe``, the name of a preset, or the path of a .toml or .json file.
        target: what it is to run on.
        observer: of activations; None chooses between all and the range of least error, tensor by tensor.
        skip: names of nodes to leave in float, or globs of them.
        keep_float: "auto" leaves small layers in float that alone cause over a quarter of the noise at the outputs.
        bias_correction: add the mean error of a layer's output to its bias.
        equalize: make the channels between convolutions equally large, where that helps.
        smooth: move outliers in the inputs of matrix products into their weights, where that helps.
        memory_budget: bytes of activations that calibration may hold at once.
        progress: True or False for a bar, or a function of the batches done and in all; None for a bar on terminals.
        checkpoint: a file from which an interrupted calibration goes on.
        seed: of the rows that smoothing is judged on.
        force: take models that are quantized already.

    Raises:
        NotCalibratedError: the recipe quantizes activations, and there are no data.
        UnsupportedError, FileFormatError, SpecError, ShapeError, NaNError: model, recipe or data do not fit.

    >>> import tempfile, numpy as np, detent.onnx as qo
    >>> from onnx import parser
    >>> model = parser.parse_model('''<ir_version: 8, opset_import: ["" : 17]>
    ...     g (float[1,1] x) => (float[1,1] y) <float[1,1] w = {3.0}> { [fc] y = MatMul(x, w) }''')
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     report = qo.quantize(model, f"{folder}/small.onnx", [np.float32([[2.0]])])
    >>> report.layers[0].kernel
    'MatMulIntegerToFloat'
    """
    start = time.perf_counter()
    if keep_float not in {"auto", "none"}:
        raise SpecError(f"keep_float is 'auto' or 'none', got {keep_float!r}; skip= names layers to leave in float")
    wanted, aim = get_recipe(recipe), get_target(target)
    original = load(model)
    batches = _checked_data(original, data, wanted)
    first = None if batches is None else batches.check_first()
    size, opset, source = nbytes_of(original), Graph(original).opset, digest_of(original)
    prepared = prepare(original, low_bits=_needs_low_bits(wanted), feed=first, force=force)
    del original  # a large model is large, and the source is still there
    made = plan(prepared, wanted, target=aim, skip=skip)
    path, steps = Path(output), list[str]()
    chosen = {
        "observer": None if observer is None else str(get_observer_spec(observer)),
        "skip": [skip] if isinstance(skip, str) else list(skip),
        "keep_float": keep_float,
        "bias_correction": bias_correction,
        "equalize": equalize,
        "smooth": smooth,
        "seed": seed,
    }
    if batches is None:
        if opset < made.graph.opset:
            steps.append(f"converted from operator set {opset} to {made.graph.opset}; not compared, without data")
        return _finish(path, made, size, insert(made, source=source, options=_changed(chosen)), {}, steps, start)
    if memory_budget is not None:  # whether it fits is told before anything takes long
        tensor_groups(made, batches, memory_budget)
    samples = batches.peek(SAMPLES) if equalize or smooth else []
    if equalize:
        equalized, even = equalize_channels(made, samples)
        steps += map(str, even)
        made = replace(made, model=equalized)  # layers keep their names, specs and bytes
    if smooth:
        smoothed, done = smooth_inputs(made, samples, seed=seed)
        steps += map(str, done)
        made = replace(made, model=smoothed)
    seen = calibrate(
        made,
        batches,
        observer=observer,
        memory_budget=memory_budget,
        progress=True if progress is None else progress,
        checkpoint=checkpoint,
    )
    params = choose_params(made, seen, choose_clipped(made, seen) if observer is None else None)
    if keep_float == "auto":
        hurting = choose_float(made, params, seen.samples[:2])
        steps += [f"left {name} in float: it alone causes {share:.0%} of the noise" for name, share in hurting.items()]
        made = made.without(hurting, "it alone causes more than a quarter of the noise")
        params = choose_params(made, seen, None) | params if hurting else params
    biases = corrected_biases(made, seen, params) if bias_correction else {}
    quantized = insert(made, seen, params=params, biases=biases, source=source, options=_changed(chosen))
    errors = output_sqnr(model, quantized, seen.samples[:JUDGED])
    return _finish(path, made, size, quantized, errors, steps, start)


def _changed(chosen: Mapping[str, Any]) -> str:
    """The options that are not the defaults, as JSON; "" where there are none."""
    found = {name: value for name, value in chosen.items() if value != DEFAULTS[name]}
    return json.dumps(found) if found else ""


def _checked_data(model: ModelProto, data: BatchSource | None, recipe: Recipe) -> Batches | None:
    if data is not None:
        return open_batches(data, inputs_of(model))
    if any(rule.input is not None or rule.output is not None for rule in recipe.rules):
        raise NotCalibratedError(
            f"recipe {recipe.name or recipe!r} quantizes activations, whose ranges only data can tell: give data= "
            "(--data), or use a weight-only recipe such as 'w8a16' or 'w4a16'"
        )
    return None


def _needs_low_bits(recipe: Recipe) -> bool:
    """Whether quantizers are written that older operator sets do not have."""
    for rule in recipe.rules:
        for spec in (rule.weight, rule.input, rule.output):
            if spec is not None and (spec.bits not in {5, 6, 7, 8} or isinstance(spec.granularity, PerGroup)):
                return True
    return False


def output_sqnr(
    before: ModelSource, after: ModelProto, feeds: Sequence[Feed], config: Mapping[str, str] | None = None
) -> dict[str, float]:
    """The ratio of signal to quantization noise of every float output, in decibels, over some batches.

    >>> from onnx import parser
    >>> made = parser.parse_model(
    ...     '<ir_version: 8, opset_import: ["" : 17]> g (float[1] x) => (float[1] y) { y = Relu(x) }')
    >>> output_sqnr(made, made, [{"x": np.float32([1.0])}])
    {'y': inf}
    """
    names = Graph(after).outputs
    sessions = make_session(before), make_session(after, config=config)
    parts: dict[str, list[tuple[NDArray[Any], NDArray[Any]]]] = {name: [] for name in names}
    for feed in feeds:
        for name, old, new in zip(names, *(session.run(names, feed) for session in sessions), strict=True):
            if getattr(old, "dtype", None) == np.float32:
                parts[name].append((np.ravel(old), np.ravel(new)))
    return {
        name: float(sqnr_db(*(np.concatenate(side) for side in zip(*pairs, strict=True))))
        for name, pairs in parts.items()
        if pairs
    }


def _finish(
    path: Path,
    made: GraphPlan,
    size: int,
    after: ModelProto,
    errors: Mapping[str, float],
    steps: list[str],
    start: float,
) -> QuantizeReport:
    kernels = kernels_of(after)  # which loads the model: a file that nothing loads is not written
    by_weight = {made.found[name].weight: kernel for name, kernel in kernels.items() if name in made.found}
    written = save(after, path)
    layers = tuple(
        LayerReport(
            each.name,
            each.type,
            "" if each.weight is None else str(each.weight),
            "" if each.input is None else str(each.input),
            each.reason,
            kernels.get(each.name, by_weight.get(made.found[each.name].weight, "") if each.is_quantized else ""),
            each.note,
        )
        for each in made.layers
    )
    hints = (WEIGHT_ONLY_HINT,) if any(layer.kernel == "MatMulNBits" for layer in layers) else ()
    return QuantizeReport(
        path,
        made,
        size,
        written,
        layers,
        next(iter(errors.values()), None),
        errors,
        time.perf_counter() - start,
        tuple(steps),
        hints,
    )
