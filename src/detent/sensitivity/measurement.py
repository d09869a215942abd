"""Measure the sensitivity of layers, and search for mixed-precision allocations by running the model.

``refine`` first runs the allocation with the smallest predicted noise, and all uniform allocations within the budget.
From the best allocation, it tries moves in the order of predicted noise. A move changes the candidate of one layer. If
the new candidate takes too many bytes, a second layer gets a smaller candidate. Moves that reduce the measured noise
are kept. The search ends when no move is left or the runs are used up.

ONNX and PyTorch are imported only when a model is measured.
"""

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import contextmanager
from os import PathLike
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from detent.checks import as_integer
from detent.errors import SpecError
from detent.metrics import sqnr_of
from detent.observers.passes import reporter
from detent.recipe import Recipe, get_recipe
from detent.sensitivity.bench import LayerRunner, OutputNoise, Progress, Runs, as_storage, as_widths, measure_all
from detent.sensitivity.layer_noise import Cost, LayerNoise, Mix, Sensitivity, Storage
from detent.spec import QuantSpec

if TYPE_CHECKING:
    from torch import nn

    from detent.onnx.decisions import Decisions
    from detent.onnx_model.batches import BatchSource
    from detent.onnx_model.files import ModelSource
    from detent.onnx_model.targets import Target
    from detent.sensitivity.onnx_bench import OnnxLayerRunner

__all__ = ["measure", "refine", "run_mix", "search", "starting_points"]

Options = dict[str, str]


def starting_points(sensitivity: Sensitivity, budget: int) -> list[Options]:
    """Return the allocation with the smallest predicted noise, and all uniform allocations, within the budget."""
    starts = [dict(sensitivity.choose(budget).options)]
    for option in sensitivity.options:
        try:
            mix = sensitivity.uniform(option)
        except SpecError:  # a layer was not measured with this candidate
            continue
        if mix.nbytes <= budget and dict(mix.options) not in starts:
            starts.append(dict(mix.options))
    return starts


class _Change(NamedTuple):
    """A new candidate for a layer, with the noise and the bytes that the change adds."""

    noise: float
    nbytes: int
    options: Options


def _moves(sensitivity: Sensitivity, options: Mapping[str, str], budget: int) -> Iterator[Options]:
    """Yield changes of one or two layers that fit the budget, least predicted noise first."""
    spare = budget - sum(layer.nbytes[options[layer.name]] for layer in sensitivity.layers)
    changes = {layer.name: list(_changes(layer, options[layer.name])) for layer in sensitivity.layers}
    moves: list[tuple[float, Options]] = []
    for name, layer_changes in changes.items():
        for change in layer_changes:
            if change.nbytes <= spare:
                moves.append((change.noise, change.options))
                continue
            for other_name, other_changes in changes.items():
                fitting = [each for each in other_changes if change.nbytes + each.nbytes <= spare]
                if other_name != name and fitting:
                    smaller = min(fitting, key=lambda each: each.noise)
                    moves.append((change.noise + smaller.noise, {**change.options, **smaller.options}))
    return (move for _, move in sorted(moves, key=lambda each: each[0]))


def _changes(layer: LayerNoise, current: str) -> Iterator[_Change]:
    for option, noise in layer.noise.items():
        if option != current:
            nbytes = layer.nbytes[option] - layer.nbytes[current]
            yield _Change(noise - layer.noise[current], nbytes, {layer.name: option})


def search(
    runner: LayerRunner,
    sensitivity: Sensitivity,
    starts: list[Options],
    budget: int,
    runs: int,
    announce: Callable[[Cost], object] | None,
    progress: Progress,
    remote: Runs | None = None,
) -> Mix:
    """Search for the best allocation in at most ``runs`` runs of the model; return it with its measured SQNR.

    ``starts`` are the allocations to run first. With ``remote``, the workers of an executor run the model.
    """
    start = time.perf_counter()
    output_noise = OutputNoise(runner.names, runner.reference())
    if announce is not None:
        seconds = (time.perf_counter() - start) * runs
        announce(Cost(len(sensitivity.layers), len(sensitivity.options), runs, runner.samples, seconds))
    report, measured = reporter(progress, "measuring", "runs"), dict[tuple[str, ...], float]()

    def noise(options: Options) -> float:
        key = tuple(options.values())
        if key not in measured:
            if remote is None:
                measured[key] = output_noise.noise(runner.outputs(options))
            else:
                (measured[key],) = remote.noises([options], output_noise)
            report(len(measured), runs)
        return measured[key]

    best = min(starts, key=noise)
    is_better = True
    while is_better and len(measured) < runs:
        is_better = False
        for move in _moves(sensitivity, best, budget):
            if len(measured) >= runs:
                break
            candidate = {**best, **move}
            if tuple(candidate.values()) not in measured and noise(candidate) < noise(best):
                best, is_better = candidate, True
                break
    report(runs, runs)
    return sensitivity.mixed(best, "refined mix").with_measured(sqnr_of(noise(best)))


def measure(  # noqa: PLR0913 - the options of one job
    model: "nn.Module | ModelSource",
    data: "BatchSource",
    recipe: "Recipe | Decisions | str | PathLike[str]" = "w8a8",
    *,
    widths: Iterable[int | str] | None = None,
    samples: int = 32,
    target: "Target | str" = "onnxruntime",
    skip: Iterable[str] = (),
    storage: str = "onnx",
    progress: Callable[[int, int], object] | bool | None = None,
    announce: Callable[[Cost], object] | None = None,
    executor: Executor | None = None,
    work_directory: str | PathLike[str] | None = None,
) -> Sensitivity:
    """Measure the noise at the outputs with one layer quantized at a time, for every layer and every candidate.

    The model runs over all samples once per layer and candidate; each batch of the data is read once. Layers that
    share a weight are quantized together.

    Args:
        model: a float model: an ONNX file or ModelProto, or a ``torch.nn.Module`` that is not prepared. The model is
            not changed.
        data: for an ONNX model, everything that ``qo.quantize`` accepts. For a module, a list of batches: tensors,
            tuples of arguments, or dicts from argument names to values.
        recipe: selects the layers. Without ``widths``, the recipe is also the only candidate: weights and layer inputs
            are quantized as the recipe says. With ``qo.Decisions``, layers are measured with the params of the
            quantized file; ``refine`` and ``run_mix`` use only the specs of the decisions, and calibrate again.
        widths: candidates for the weights: numbers of bits (symmetric, per-channel) or texts of specs, such as
            "int4/group32". Activations stay in float. None measures the recipe.
        samples: number of samples, counted along the first axis of the inputs. If possible, the last batch is cut to
            reach exactly this number.
        target: target of an ONNX model; not used with decisions, which have their own target.
        skip: names of layers to leave out, or globs.
        storage: how bytes are counted. "onnx" is for ONNX files, where codes have 4, 8 or 16 bits. "packed" is for
            detent's safetensors files, where codes of 3 bits take 3 bits.
        progress: whether to show a progress bar, or a callback f(done, total), which counts runs. None shows a bar only
            on terminals.
        announce: function that is called with the ``Cost`` before the measurement starts.
        executor: runs an ONNX model on the workers of an executor, such as a ProcessPoolExecutor or
            ``detent.cluster.ray_executor()``; the results have the same bits.
        work_directory: a directory that all workers see, for a model or data in memory; None for the directory of the
            model.

    Raises:
        SpecError: invalid widths, recipe, samples or data; or a module that is already prepared.
        UnsupportedError: no layer can be measured, the model has no output of a float type, or the model does not run.
        RangeError: outputs of the float model contain NaN or infinity, or are all zero.
        NotCalibratedError: a layer's input is empty for all samples; skip this layer.
        ShapeError, DtypeError, NaNError, FileFormatError: the data do not fit the model, or a file is invalid.

    >>> import numpy as np, detent.sensitivity as qs
    >>> from onnx import parser
    >>> model = parser.parse_model('''<ir_version: 8, opset_import: ["" : 17]>
    ...     g (float[n,2] x) => (float[n,1] y) <float[2,1] w = {127.0, 0.6}> { [fc] y = Gemm(x, w) }''')
    >>> sensitivity = qs.measure(model, [np.float32([[2.0, 2.0]])], widths=(4, 8), announce=print)
    1 layer, 2 candidates: 2 runs over 1 sample, about 1 s or less
    >>> sensitivity.options, sensitivity.layers[0].noise["int8/axis0"] < sensitivity.layers[0].noise["int4/axis0"]
    (('int4/axis0', 'int8/axis0'), True)
    """
    specs, stored = None if widths is None else as_widths(widths), as_storage(storage)
    count, skipped = as_integer("samples", samples, at_least=1), (skip,) if isinstance(skip, str) else tuple(skip)
    name = target if isinstance(target, str) else target.name
    if _is_decisions(recipe):
        decisions = cast("Decisions", recipe)
        if specs is not None:
            raise SpecError("got decisions and widths, but decisions already contain specs: pass one or the other")
        from detent.sensitivity.onnx_bench import open_decisions  # noqa: PLC0415 - imports ONNX Runtime

        described: Recipe | Decisions = decisions
        runner: LayerRunner = open_decisions(_as_source(model), data, decisions, count, skipped, stored)
        name = decisions.target
    else:
        described = get_recipe(cast("Recipe | str | PathLike[str]", recipe))
        runner = _open(model, data, described, specs, count, target, skipped, stored)
    options = {"samples": count, "target": name, "storage": stored, "skip": skipped, "widths": specs}
    with _remote(executor, work_directory, model, data, runner, described, options) as remote:
        layers = measure_all(runner, announce, progress, remote)
    return Sensitivity(layers, runner.options, runner.recipe, runner.samples, stored, name)


@contextmanager
def _remote(
    executor: object,
    work_directory: str | PathLike[str] | None,
    model: object,
    data: "BatchSource",
    runner: LayerRunner,
    recipe: "Recipe | Decisions",
    options: dict[str, Any],
) -> Iterator[Runs | None]:
    """Prepare runs on an executor; yield None without an executor."""
    if executor is None and work_directory is None:
        yield None
        return
    if _is_module(model):
        raise SpecError(
            "got a torch.nn.Module with executor= or work_directory=, but workers read the model from a file: export "
            "it to ONNX first"
        )
    from detent.onnx_model.files import load_model  # noqa: PLC0415 - these import ONNX Runtime
    from detent.onnx_model.workspace import open_workspace  # noqa: PLC0415
    from detent.sensitivity.measurement_items import RemoteRuns, RunnerRecord  # noqa: PLC0415

    loaded = load_model(_as_source(model))
    with open_workspace(executor, work_directory, loaded.path) as workspace:
        if workspace is None:
            yield None
            return
        record = RunnerRecord.of(workspace, loaded, data, cast("OnnxLayerRunner", runner), recipe, **options)
        yield RemoteRuns(workspace, record)


def refine(
    model: "nn.Module | ModelSource",
    data: "BatchSource",
    sensitivity: Sensitivity,
    budget_nbytes: int,
    *,
    runs: int = 100,
    progress: Callable[[int, int], object] | bool | None = None,
    announce: Callable[[Cost], object] | None = None,
    executor: Executor | None = None,
    work_directory: str | PathLike[str] | None = None,
) -> Mix:
    """Search for the best allocation within a budget by running the model.

    ``choose`` assumes that the noise of layers adds. With few layers or very few bits, this is a poor approximation.
    The search starts from the allocation that ``choose`` returns and from all uniform allocations that fit. It changes
    one or two layers at a time, runs the model with each change, and keeps changes that reduce the noise.

    Args:
        model: the model that was measured.
        data: the data on which the model was measured.
        sensitivity: the result of ``measure``.
        budget_nbytes: maximum total size of the measured weights, in bytes.
        runs: maximum number of runs of the model over all samples; at least the number of allocations that the search
            starts from.
        progress: as for ``measure``.
        announce: as for ``measure``.
        executor, work_directory: as for ``measure``.

    Returns:
        The best allocation, with its measured SQNR. No allocation at the start of the search has a higher SQNR.

    Raises:
        SpecError: no allocation fits the budget, ``runs`` is too small, or the model lacks a measured layer.

    >>> import numpy as np, detent.sensitivity as qs
    >>> from onnx import parser
    >>> model = parser.parse_model('''<ir_version: 8, opset_import: ["" : 17]>
    ...     g (float[n,2] x) => (float[n,1] y) <float[2,1] w = {127.0, 0.6}> { [fc] y = Gemm(x, w) }''')
    >>> data = [np.float32([[2.0, 2.0]])]
    >>> sensitivity = qs.measure(model, data, widths=(4, 8))
    >>> dict(qs.refine(model, data, sensitivity, 100).options)
    {'fc': 'int8/axis0'}
    """
    limit = as_integer("runs", runs, at_least=1)
    starts = starting_points(sensitivity, budget_nbytes)
    if limit < len(starts):
        raise SpecError(
            f"runs={limit} is too small: the search first runs {len(starts)} allocations; pass runs>={len(starts)}, or "
            "use choose(), which needs no runs"
        )
    recipe, widths = sensitivity.recipe, None
    if recipe is None:
        recipe, widths = get_recipe("w8a16"), as_widths(sensitivity.options)
    storage = as_storage(sensitivity.storage)
    runner = _open(model, data, recipe, widths, sensitivity.samples, sensitivity.target, (), storage, parallel=False)
    options = {group.names: set(group.nbytes) for group in runner.groups}
    for layer in sensitivity.layers:
        if not set(layer.noise) <= options.get(layer.names, set()):
            raise SpecError(
                f"the model has no layer {layer.name!r} with the measured candidates: call measure for this model"
            )
    described = {"samples": sensitivity.samples, "target": sensitivity.target, "storage": storage, "skip": ()}
    with _remote(executor, work_directory, model, data, runner, recipe, {**described, "widths": widths}) as remote:
        return search(runner, sensitivity, starts, budget_nbytes, limit, announce, progress, remote)


def run_mix(model: "nn.Module | ModelSource", data: "BatchSource", mix: Mix) -> Mix:
    """Run the model with all layers of an allocation quantized, and return the allocation with the measured SQNR.

    An ONNX model gets the Q/DQ pairs of a quantized file and runs in ONNX Runtime, with weight-only matmuls in float. A
    module is copied, and ``qt.prepare`` prepares the copy. The number of samples is the same as in the measurement.
    Pass the data of the measurement to test the prediction, or other data to test the choice.

    Raises:
        SpecError: the allocation has layers that the model does not have.

    >>> import numpy as np, detent.sensitivity as qs
    >>> from onnx import parser
    >>> model = parser.parse_model('''<ir_version: 8, opset_import: ["" : 17]>
    ...     g (float[n,2] x) => (float[n,1] y) <float[2,1] w = {127.0, 0.6}> { [fc] y = Gemm(x, w) }''')
    >>> data = [np.float32([[2.0, 2.0]])]
    >>> mix = qs.measure(model, data, widths=(4, 8)).choose(100)
    >>> ran = qs.run_mix(model, data, mix)
    >>> mix.measured_sqnr_db, abs(ran.measured_sqnr_db - ran.predicted_sqnr_db) < 0.1
    (None, True)
    """
    if not isinstance(mix, Mix):
        raise SpecError(f"got {type(mix).__name__}, expected a Mix: pass the result of Sensitivity.choose")
    if _is_module(model):
        from detent.sensitivity import torch_bench  # noqa: PLC0415 - imports PyTorch

        noise = torch_bench.run_recipe(cast("nn.Module", model), data, mix.recipe, mix.samples)
    else:
        from detent.sensitivity import onnx_bench  # noqa: PLC0415 - imports ONNX Runtime

        noise = onnx_bench.run_recipe(_as_source(model), data, mix.recipe, mix.samples, mix.target)
    return mix.with_measured(sqnr_of(noise))


def _open(
    model: object,
    data: Any,  # noqa: ANN401 - checked by the runners
    recipe: Recipe,
    widths: Mapping[str, QuantSpec] | None,
    samples: int,
    target: "Target | str",
    skip: tuple[str, ...],
    storage: Storage,
    *,
    parallel: bool = True,
) -> LayerRunner:
    if _is_module(model):
        from detent.sensitivity.torch_bench import TorchLayerRunner  # noqa: PLC0415 - imports PyTorch

        return TorchLayerRunner(cast("nn.Module", model), data, recipe, widths, samples, skip, storage)
    from detent.sensitivity.onnx_bench import open_recipe  # noqa: PLC0415 - imports ONNX Runtime

    source = _as_source(model)
    return open_recipe(source, data, recipe, widths, samples, target, skip, storage, parallel=parallel)


def _is_decisions(recipe: object) -> bool:
    decisions = sys.modules.get("detent.onnx.decisions")  # if this module is not imported, no Decisions exist
    return decisions is not None and isinstance(recipe, decisions.Decisions)


def _is_module(model: object) -> bool:
    torch = sys.modules.get("torch")  # if torch is not imported, no modules exist
    return torch is not None and isinstance(model, torch.nn.Module)


def _as_source(model: object) -> "ModelSource":
    if isinstance(model, str | PathLike):
        return model
    if type(model).__name__ in {"LoadedModel", "ModelProto"}:  # compared by name, because onnx may not be imported
        return cast("ModelSource", model)
    raise SpecError(f"got a model of type {type(model).__name__}, expected a path, a ModelProto or a torch.nn.Module")
