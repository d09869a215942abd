"""Measure the sensitivity of layers, and search for mixed-precision assignments by running them.

``refine`` starts from the exact choice for the sum of noise powers and from every uniform option that fits. From the
best of them, moves are tried in the order of their noise by the sum: one layer gets another option, and if that takes
too many bytes, a second layer gives some back. A move that helps is kept. The search ends when no move is left or the
runs are used up. ONNX and PyTorch are loaded when a model is given.
"""

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from os import PathLike
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from detent.checks import as_integer
from detent.errors import SpecError
from detent.metrics import sqnr_of
from detent.observers.passes import reporter
from detent.recipe import Recipe, get_recipe
from detent.sensitivity.bench import LayerRunner, OutputNoise, Progress, as_storage, as_widths, measure_all
from detent.sensitivity.layer_noise import Cost, LayerNoise, Mix, Sensitivity, Storage
from detent.spec import QuantSpec

if TYPE_CHECKING:
    from torch import nn

    from detent.onnx.decisions import Decisions
    from detent.onnx_model.files import ModelSource
    from detent.onnx_model.targets import Target

__all__ = ["measure", "refine", "run_mix", "search", "starting_points"]

Options = dict[str, str]


def starting_points(sensitivity: Sensitivity, budget: int) -> list[Options]:
    """The exact choice for the sum of noise, and all uniform options that fit."""
    starts = [dict(sensitivity.choose(budget).options)]
    for option in sensitivity.options:
        try:
            mix = sensitivity.uniform(option)
        except SpecError:  # a layer cannot have it
            continue
        if mix.nbytes <= budget and dict(mix.options) not in starts:
            starts.append(dict(mix.options))
    return starts


class _Change(NamedTuple):
    """Another option of a layer, with the noise and the bytes that it adds."""

    noise: float
    nbytes: int
    options: Options


def _moves(sensitivity: Sensitivity, options: Mapping[str, str], budget: int) -> Iterator[Options]:
    """Changes of one or two layers that fit a budget, those first that add the least noise by the sum."""
    spare = budget - sum(layer.nbytes[options[layer.name]] for layer in sensitivity.layers)
    changes = {layer.name: list(_changes(layer, options[layer.name])) for layer in sensitivity.layers}
    moves: list[tuple[float, Options]] = []
    for name, own in changes.items():
        for change in own:
            if change.nbytes <= spare:
                moves.append((change.noise, change.options))
                continue
            for other, others in changes.items():
                fitting = [each for each in others if change.nbytes + each.nbytes <= spare]
                if other != name and fitting:
                    back = min(fitting, key=lambda each: each.noise)
                    moves.append((change.noise + back.noise, {**change.options, **back.options}))
    return (move for _, move in sorted(moves, key=lambda each: each[0]))


def _changes(layer: LayerNoise, now: str) -> Iterator[_Change]:
    for option, noise in layer.noise.items():
        if option != now:
            nbytes = layer.nbytes[option] - layer.nbytes[now]
            yield _Change(noise - layer.noise[now], nbytes, {layer.name: option})


def search(
    runner: LayerRunner,
    sensitivity: Sensitivity,
    starts: list[Options],
    budget: int,
    runs: int,
    announce: Callable[[Cost], object] | None,
    progress: Progress,
) -> Mix:
    """The best mix that so many runs find, with its measured SQNR; all starts are run, whatever the number of runs."""
    start = time.perf_counter()
    output_noise = OutputNoise(runner.names, runner.reference())
    if announce is not None:
        seconds = (time.perf_counter() - start) * runs
        announce(Cost(len(sensitivity.layers), len(sensitivity.options), runs, runner.samples, seconds))
    report, measured = reporter(progress, "measuring", "runs"), dict[tuple[str, ...], float]()

    def noise(options: Options) -> float:
        key = tuple(options.values())
        if key not in measured:
            measured[key] = output_noise.noise(runner.outputs(options))
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
    data: Iterable[Any] | str | PathLike[str],
    recipe: "Recipe | Decisions | str | PathLike[str]" = "w8a8",
    *,
    widths: Iterable[int | str] | None = None,
    samples: int = 32,
    target: "Target | str" = "onnxruntime",
    skip: Iterable[str] = (),
    storage: str = "onnx",
    progress: Callable[[int, int], object] | bool | None = None,
    announce: Callable[[Cost], object] | None = None,
) -> Sensitivity:
    """Measure the noise at the outputs when one layer alone is quantized, for every layer and every option.

    The model runs over all samples once per layer and option, and each batch of the data is read once. Layers that
    share a weight are quantized together.

    Args:
        model: a float model: an ONNX file or ModelProto, or a ``torch.nn.Module`` that is not prepared. It is not
            changed.
        data: for an ONNX model as ``qo.quantize`` takes it; for a module batches, each a tensor, a tuple of its
            arguments, or a dict of them by name.
        recipe: which layers are measured; without widths also how: weight and input of the layer as its rule says.
            ``qo.Decisions`` measure the layers with the parameters that their file has; ``refine`` and ``run_mix``
            then run the recipe, with ranges of their own.
        widths: only weights are quantized, once per width: a number of bits (symmetric, a scale per output channel)
            or the text of a spec, such as "int4/group32".
        samples: how many, counted along the first axis of the inputs; a batch is cut if the model allows it.
        target: what an ONNX model is to run on; decisions have their own.
        skip: names of layers to leave out, or globs of them.
        storage: how bytes are counted: "onnx" for ONNX files, where codes have 4, 8 or 16 bits, or "packed" for
            detent's safetensors, where they have as many bits as they need.
        progress: True or False for a bar, or a function of the runs done and in all; None for a bar on terminals.
        announce: called once, before the long part, with the cost.

    Raises:
        SpecError: invalid widths, recipe, samples or data; a module that is prepared.
        UnsupportedError: no layer can be measured, no float output, or the model does not run.
        RangeError: the float model's outputs hold NaN or infinity, or are all zero.
        NotCalibratedError: a layer of an ONNX model whose input is to be quantized gets no values: skip it.
        ShapeError, DtypeError, NaNError, FileFormatError: data or file do not fit.

    >>> import numpy as np, detent.sensitivity as qs
    >>> from onnx import parser
    >>> model = parser.parse_model('''<ir_version: 8, opset_import: ["" : 17]>
    ...     g (float[n,2] x) => (float[n,1] y) <float[2,1] w = {127.0, 0.6}> { [fc] y = Gemm(x, w) }''')
    >>> sensitivity = qs.measure(model, [np.float32([[2.0, 2.0]])], widths=(4, 8), announce=print)
    1 layer, 2 options: 2 runs over 1 sample, about 1 s or less
    >>> sensitivity.options, sensitivity.layers[0].noise["int8/axis0"] < sensitivity.layers[0].noise["int4/axis0"]
    (('int4/axis0', 'int8/axis0'), True)
    """
    specs, stored = None if widths is None else as_widths(widths), as_storage(storage)
    count, skipped = as_integer("samples", samples, at_least=1), (skip,) if isinstance(skip, str) else tuple(skip)
    name = target if isinstance(target, str) else target.name
    if _is_decisions(recipe):
        decisions = cast("Decisions", recipe)
        if specs is not None:
            raise SpecError("decisions hold the specs of all weights: give a recipe to measure other widths")
        from detent.sensitivity.onnx_bench import open_decisions  # noqa: PLC0415 - it loads ONNX Runtime

        runner: LayerRunner = open_decisions(_as_source(model), data, decisions, count, skipped, stored)
        name = decisions.target
    else:
        given = get_recipe(cast("Recipe | str | PathLike[str]", recipe))
        runner = _open(model, data, given, specs, count, target, skipped, stored)
    layers = measure_all(runner, announce, progress)
    return Sensitivity(layers, runner.options, runner.recipe, runner.samples, stored, name)


def refine(
    model: "nn.Module | ModelSource",
    data: Iterable[Any] | str | PathLike[str],
    sensitivity: Sensitivity,
    budget_nbytes: int,
    *,
    runs: int = 100,
    progress: Callable[[int, int], object] | bool | None = None,
    announce: Callable[[Cost], object] | None = None,
) -> Mix:
    """Search for a mix that fits a budget by running: no worse than ``choose`` and every uniform option that fits.

    The noise of layers does not quite add up, least so with few layers or very few bits. The search starts from the
    best of those mixes and changes one or two layers at a time; each change is run, and kept if it helps.

    Args:
        model, data: those that were measured.
        sensitivity: the result of ``measure``.
        budget_nbytes: for all weights that were measured.
        runs: how often the model may run over all samples; at least once for each mix that the search starts from.
        progress, announce: as for ``measure``.

    Returns:
        The mix, with the SQNR that was measured.

    Raises:
        SpecError: no choice fits, there are too few runs for the first mixes, or the model lacks layers that were
            measured.

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
            f"runs={limit} is too few: the search starts from {len(starts)} mixes, the chosen one and all uniform "
            f"options that fit; pass runs>={len(starts)}, or use choose(), which runs nothing"
        )
    recipe, widths = sensitivity.recipe, None
    if recipe is None:
        recipe, widths = get_recipe("w8a16"), as_widths(sensitivity.options)
    storage = as_storage(sensitivity.storage)
    runner = _open(
        model, data, recipe, widths, sensitivity.samples, sensitivity.target, (), storage, side_by_side=False
    )
    options = {group.names: set(group.nbytes) for group in runner.groups}
    for layer in sensitivity.layers:
        if not set(layer.noise) <= options.get(layer.names, set()):
            raise SpecError(f"the model has no layer {layer.name!r} with the options that were measured: measure it")
    return search(runner, sensitivity, starts, budget_nbytes, limit, announce, progress)


def run_mix(model: "nn.Module | ModelSource", data: Iterable[Any] | str | PathLike[str], mix: Mix) -> Mix:
    """Run the model with a whole mix, and return the mix with the measured SQNR.

    An ONNX model gets its quantizers as in a file and runs in ONNX Runtime, weight-only matmuls in float; a copy of a
    module is prepared by ``qt.prepare``. As many samples are taken as were measured: pass the same data for the same
    samples, or other data to see whether the choice holds there.

    Raises:
        SpecError: the mix names layers that the model does not have.

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
        raise SpecError(f"run_mix takes what Sensitivity.choose gave, got {type(mix).__name__}")
    if _is_module(model):
        from detent.sensitivity import torch_bench  # noqa: PLC0415 - it loads PyTorch

        noise = torch_bench.run_recipe(cast("nn.Module", model), data, mix.recipe, mix.samples)
    else:
        from detent.sensitivity import onnx_bench  # noqa: PLC0415 - it loads ONNX Runtime

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
    side_by_side: bool = True,
) -> LayerRunner:
    if _is_module(model):
        from detent.sensitivity.torch_bench import TorchLayerRunner  # noqa: PLC0415 - it loads PyTorch

        return TorchLayerRunner(cast("nn.Module", model), data, recipe, widths, samples, skip, storage)
    from detent.sensitivity.onnx_bench import open_recipe  # noqa: PLC0415 - it loads ONNX Runtime

    source = _as_source(model)
    return open_recipe(source, data, recipe, widths, samples, target, skip, storage, side_by_side=side_by_side)


def _is_decisions(recipe: object) -> bool:
    decisions = sys.modules.get("detent.onnx.decisions")  # not imported yet: then it is none
    return decisions is not None and isinstance(recipe, decisions.Decisions)


def _is_module(model: object) -> bool:
    torch = sys.modules.get("torch")  # not imported yet: then it is not a module
    return torch is not None and isinstance(model, torch.nn.Module)


def _as_source(model: object) -> "ModelSource":
    if isinstance(model, str | PathLike):
        return model
    if type(model).__name__ in {"LoadedModel", "ModelProto"}:  # by name: neither onnx nor its types are loaded here
        return cast("ModelSource", model)
    raise SpecError(f"a model is an ONNX file, a ModelProto or a torch.nn.Module, got {type(model).__name__}")
