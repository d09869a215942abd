"""Measure the sensitivity of layers, and search for mixed-precision assignments by running them.

What ONNX models or PyTorch modules need is loaded when one is given. ``refine`` searches near the assignments that the
sum of noise powers predicts to be good. The starts are the exact choice for the sum, and every uniform option that
fits. From the best of them, moves are tried in the order of what they should cost by the sum: one layer gets another
option, and where that takes too many bytes, a second layer gives some back. A move that helps is kept. The search ends
when no move is left or the runs are used up.
"""

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from os import PathLike
from typing import TYPE_CHECKING, Any, cast

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

__all__ = ["measure", "moves", "refine", "run_mix", "search", "starting_points"]

Options = dict[str, str]


def starting_points(found: Sensitivity, budget: int) -> list[Options]:
    """The exact choice for the sum of noise, and all uniform options that fit.

    Raises:
        SpecError: nothing fits.

    >>> layer = LayerNoise("a", "Conv", 1, 4, {"int4/axis0": 0.1, "int8/axis0": 0.01}, {"int4/axis0": 5, \
"int8/axis0": 9})
    >>> starting_points(Sensitivity((layer,), ("int4/axis0", "int8/axis0")), 9)
    [{'a': 'int8/axis0'}, {'a': 'int4/axis0'}]
    """
    starts = [dict(found.choose(budget).options)]
    for option in found.options:
        try:
            mix = found.uniform(option)
        except SpecError:  # a layer cannot have it
            continue
        if mix.nbytes <= budget and dict(mix.options) not in starts:
            starts.append(dict(mix.options))
    return starts


def moves(found: Sensitivity, options: Mapping[str, str], budget: int) -> Iterator[Options]:
    """Changes of one or two layers that fit a budget, those first that should cost least by the sum of noise.

    >>> layer = LayerNoise("a", "Conv", 1, 4, {"int4/axis0": 0.1, "int8/axis0": 0.01}, {"int4/axis0": 5, \
"int8/axis0": 9})
    >>> list(moves(Sensitivity((layer,), ("int4/axis0", "int8/axis0")), {"a": "int4/axis0"}, 9))
    [{'a': 'int8/axis0'}]
    """
    spare = budget - sum(layer.nbytes[options[layer.name]] for layer in found.layers)
    tried: list[tuple[float, Options]] = []
    for layer in found.layers:
        for option, more, cost in _changes(layer, options):
            if more <= spare:
                tried.append((cost, {layer.name: option}))
                continue
            for other in found.layers:
                back = [each for each in _changes(other, options) if more + each[1] <= spare]
                if other is not layer and back:
                    best = min(back, key=lambda each: each[2])
                    tried.append((cost + best[2], {layer.name: option, other.name: best[0]}))
    for _, change in sorted(tried, key=lambda each: each[0]):
        yield change


def _changes(layer: LayerNoise, options: Mapping[str, str]) -> Iterator[tuple[str, int, float]]:
    """The other options of a layer, with the bytes and the noise that they add."""
    now = options[layer.name]
    for option, noise in layer.noise.items():
        if option != now:
            yield option, layer.nbytes[option] - layer.nbytes[now], noise - layer.noise[now]


def search(
    bench: LayerRunner,
    found: Sensitivity,
    starts: list[Options],
    budget: int,
    runs: int,
    announce: Callable[[Cost], object] | None,
    progress: Progress,
) -> Mix:
    """The best mix that so many runs find, with its measured SQNR; all starts are run, whatever the number of runs."""
    start = time.perf_counter()
    output_noise = OutputNoise(bench.names, bench.reference())
    if announce is not None:
        seconds = (time.perf_counter() - start) * runs
        announce(Cost(len(found.layers), len(found.options), runs, bench.samples, seconds))
    report, known = reporter(progress, "measuring", "runs"), dict[tuple[str, ...], float]()

    def noise(options: Options) -> float:
        key = tuple(options.values())
        if key not in known:
            known[key] = output_noise.noise(bench.outputs(options))
            report(len(known), runs)
        return known[key]

    best = min(starts, key=noise)
    is_better = True
    while is_better and len(known) < runs:
        is_better = False
        for change in moves(found, best, budget):
            if len(known) >= runs:
                break
            tried = {**best, **change}
            if tuple(tried.values()) not in known and noise(tried) < noise(best):
                best, is_better = tried, True
                break
    report(runs, runs)
    return found.mixed(best, "refined mix").with_measured(sqnr_of(noise(best)))


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
    """The noise at the outputs when one layer alone is quantized, for every layer and every option.

    The model runs over all samples once per layer and option, and each batch of the data is read once. Layers that
    share a weight are quantized together.

    Args:
        model: a float model: an ONNX file or ModelProto, or a ``torch.nn.Module`` that is not prepared. It is left as
            it is.
        data: of an ONNX model as ``qo.quantize`` takes it; of a module batches, each a tensor, a tuple of its
            arguments, or a dict of them by name.
        recipe: which layers are measured; and without widths, how: weight and input of the layer as its rule says.
            ``qo.Decisions`` measure the layers with the parameters that their file has.
        widths: weights alone are quantized, once per width: a number of bits (symmetric, a scale per output channel)
            or the text of a spec, such as "int4/group32".
        samples: how many, counted along the first axis of the inputs; a batch is cut where the model allows it.
        target: what an ONNX model is to run on; decisions have their own.
        skip: names of layers to leave out, or globs of them.
        storage: how bytes are counted: "onnx" for ONNX files, where codes have 4, 8 or 16 bits, or "packed" for
            detent's safetensors, where they have as many as they need.
        progress: True or False for a bar, or a function of the runs done and in all; None for a bar on terminals.
        announce: called once, before the long part, with what it will cost.

    Raises:
        SpecError: widths, recipe, samples or data that cannot be; a module that is prepared.
        UnsupportedError: no layer can be measured, no float output, or the model does not run.
        RangeError: the float model's outputs hold NaN or infinity, or are all zero.
        NotCalibratedError: a layer of an ONNX model whose input is to be quantized gets no values: skip it.
        ShapeError, DtypeError, NaNError, FileFormatError: data or file do not fit.

    >>> import numpy as np, detent.sensitivity as qs
    >>> from onnx import parser
    >>> model = parser.parse_model('''<ir_version: 8, opset_import: ["" : 17]>
    ...     g (float[n,2] x) => (float[n,1] y) <float[2,1] w = {127.0, 0.6}> { [fc] y = Gemm(x, w) }''')
    >>> found = qs.measure(model, [np.float32([[2.0, 2.0]])], widths=(4, 8), announce=print)
    1 layer, 2 options: 2 runs over 1 sample, about 1 s or less
    >>> found.options, found.layers[0].noise["int8/axis0"] < found.layers[0].noise["int4/axis0"]
    (('int4/axis0', 'int8/axis0'), True)
    """
    specs, stored = None if widths is None else as_widths(widths), as_storage(storage)
    count, skipped = as_integer("samples", samples, at_least=1), (skip,) if isinstance(skip, str) else tuple(skip)
    name = target if isinstance(target, str) else target.name
    if type(recipe).__name__ == "Decisions":  # by name: onnx is not loaded here
        decisions = cast("Decisions", recipe)
        if specs is not None:
            raise SpecError("decisions hold the specs of all weights: give a recipe to measure other widths")
        from detent.sensitivity.onnx_bench import open_decisions  # noqa: PLC0415 - it loads ONNX Runtime

        bench: LayerRunner = open_decisions(_as_source(model), data, decisions, count, skipped, stored)
        name = decisions.target
    else:
        given = get_recipe(cast("Recipe | str | PathLike[str]", recipe))
        bench = _open(model, data, given, specs, count, target, skipped, stored)
    found = measure_all(bench, announce, progress)
    return Sensitivity(found, bench.options, bench.recipe, bench.samples, stored, name)


def refine(
    model: "nn.Module | ModelSource",
    data: Iterable[Any] | str | PathLike[str],
    found: Sensitivity,
    budget_nbytes: int,
    *,
    runs: int = 100,
    progress: Callable[[int, int], object] | bool | None = None,
    announce: Callable[[Cost], object] | None = None,
) -> Mix:
    """A mix that fits a budget, found by running: no worse than ``choose`` and than every uniform option that fits.

    The noise of layers does not quite add up, least so where layers are few or bits are very few. The search begins
    with the best of those mixes and changes one or two layers at a time, those first that should cost least; each
    change is run, and kept where it helps.

    Args:
        model, data: those that were measured.
        found: what ``measure`` gave.
        budget_nbytes: of all weights that were measured.
        runs: how often the model may run over all samples; at least once for each mix that the search begins with.
        progress, announce: as for ``measure``.

    Returns:
        The mix, with the SQNR that was measured.

    Raises:
        SpecError: no choice fits, the runs are fewer than the mixes that the search begins with, or the model has other
            layers than those that were measured.

    >>> import numpy as np, detent.sensitivity as qs
    >>> from onnx import parser
    >>> model = parser.parse_model('''<ir_version: 8, opset_import: ["" : 17]>
    ...     g (float[n,2] x) => (float[n,1] y) <float[2,1] w = {127.0, 0.6}> { [fc] y = Gemm(x, w) }''')
    >>> data = [np.float32([[2.0, 2.0]])]
    >>> found = qs.measure(model, data, widths=(4, 8))
    >>> dict(qs.refine(model, data, found, 100).options)
    {'fc': 'int8/axis0'}
    """
    limit = as_integer("runs", runs, at_least=1)
    starts = starting_points(found, budget_nbytes)
    if limit < len(starts):
        raise SpecError(
            f"runs={limit} are fewer than the mixes to begin with, the chosen one and all uniform options that fit: "
            f"give at least {len(starts)}, or take what choose gives, which needs none"
        )
    specs, recipe = (as_widths(found.options), get_recipe("w8a16")) if found.recipe is None else (None, found.recipe)
    bench = _open(model, data, recipe, specs, found.samples, found.target, (), as_storage(found.storage))
    known = {group.names: set(group.nbytes) for group in bench.groups}
    for layer in found.layers:
        if not set(layer.noise) <= known.get(layer.names, set()):
            raise SpecError(f"the model has no layer {layer.name!r} with the options that were measured: measure it")
    return search(bench, found, starts, budget_nbytes, limit, announce, progress)


def run_mix(model: "nn.Module | ModelSource", data: Iterable[Any] | str | PathLike[str], mix: Mix) -> Mix:
    """The mix with the SQNR that the model has when all of it is quantized so.

    An ONNX model gets its quantizers as in a file and runs in ONNX Runtime, weight-only products in float; a module is
    prepared by ``qt.prepare``, as a copy. As many samples are taken as were measured: give the same data for the same
    samples, or other data to see whether the choice holds there.

    Args:
        model: the one that was measured.
        data: as for ``measure``.
        mix: what ``Sensitivity.choose`` gave.

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

        module = cast("nn.Module", model)
        return mix.with_measured(sqnr_of(torch_bench.run_recipe(module, data, mix.recipe, mix.samples)))
    from detent.sensitivity import onnx_bench  # noqa: PLC0415 - it loads ONNX Runtime

    noise = onnx_bench.run_recipe(_as_source(model), data, mix.recipe, mix.samples, mix.target)
    return mix.with_measured(sqnr_of(noise))


def _open(
    model: object,
    data: Any,  # noqa: ANN401 - checked by the benches
    recipe: Recipe,
    widths: Mapping[str, QuantSpec] | None,
    samples: int,
    target: "Target | str",
    skip: tuple[str, ...],
    storage: Storage,
) -> LayerRunner:
    if _is_module(model):
        from detent.sensitivity.torch_bench import TorchLayerRunner  # noqa: PLC0415 - it loads PyTorch

        return TorchLayerRunner(cast("nn.Module", model), data, recipe, widths, samples, skip, storage)
    from detent.sensitivity.onnx_bench import open_recipe  # noqa: PLC0415 - it loads ONNX Runtime

    return open_recipe(_as_source(model), data, recipe, widths, samples, target, skip, storage)


def _is_module(model: object) -> bool:
    torch = sys.modules.get("torch")  # who has a module has imported it
    return torch is not None and isinstance(model, torch.nn.Module)


def _as_source(model: object) -> "ModelSource":
    if isinstance(model, str | PathLike):
        return model
    if type(model).__name__ in {"LoadedModel", "ModelProto"}:  # by name: neither onnx nor its types are loaded here
        return cast("ModelSource", model)
    raise SpecError(f"a model is an ONNX file, a ModelProto or a torch.nn.Module, got {type(model).__name__}")
