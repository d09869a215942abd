"""PyTorch modules as layer runners: a copy, prepared by ``qt.prepare`` once per option, quantized layer by layer.

What is measured is what ``qt.prepare`` does: batch norms are folded, and weights below 8 bits are rounded by
their range, as in training. The model itself is left alone.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from detent.errors import SpecError, StateError, UnsupportedError
from detent.recipe import Recipe, exact_pattern, skipped_names
from detent.rule import Rule
from detent.sensitivity.bench import LayerGroup, OutputNoise, weight_nbytes
from detent.sensitivity.layer_noise import FLOAT, Storage
from detent.spec import QuantSpec
from detent.torch.arrays import Arguments, arguments_of, call_with
from detent.torch.calibration import calibrating
from detent.torch.model_plan import LayerPlan, ModelPlan, plan
from detent.torch.preparation import plan_of, prepare, unprepare
from detent.torch.quantizer import FakeQuantize

__all__ = ["TorchLayerRunner", "first_samples", "run_recipe"]

Array = NDArray[Any]
EXCLUDED = ("excluded", "no rule matches")
PRODUCTS = (nn.Linear, nn.MultiheadAttention)


def first_samples(data: object, wanted: int) -> tuple[list[Arguments], int]:
    """The first samples of the data, which are counted along the first axis of tensors, and how many they are.

    Args:
        data: batches: a tensor, a tuple of a model's arguments, or a dict of them by name.
        wanted: samples; the last batch is cut where its tensors have as many.

    Raises:
        SpecError: no batches.
        DtypeError: a batch of another type.

    >>> calls, count = first_samples([torch.ones(4, 2)] * 3, 6)
    >>> [call.args[0].shape for call in calls], count
    ([torch.Size([4, 2]), torch.Size([2, 2])], 6)
    """
    if isinstance(data, str | bytes | Mapping | Tensor) or not isinstance(data, Iterable):
        raise SpecError(f"data is of type {type(data).__name__}, expected a list of batches: for one batch give [data]")
    calls, count = list[Arguments](), 0
    for number, batch in enumerate(data):
        call = arguments_of(batch, f"batch {number}")
        leaves, structure = pytree.tree_flatten((call.args, call.kwargs))
        sizes = {len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim}
        size = max(sizes, default=1)
        if count + size > wanted and len(sizes) == 1:
            size = wanted - count
            cut = [leaf[:size] if isinstance(leaf, Tensor) and leaf.ndim else leaf for leaf in leaves]
            call = Arguments(*pytree.tree_unflatten(cut, structure))
        calls.append(call)
        count += size
        if count >= wanted:
            break
    if not calls:
        raise SpecError("data holds no batches, perhaps because it was read before: give a list")
    return calls, count


class TorchLayerRunner:
    """A module as a ``LayerRunner``; see ``OnnxLayerRunner`` for the arguments.

    >>> from detent.recipe import get_recipe
    >>> model = nn.Sequential(nn.Linear(2, 2))
    >>> bench = TorchLayerRunner(model, [torch.ones(3, 2)], get_recipe("w8a8"), None, 32, (), "onnx")
    >>> bench.groups[0].names, bench.options, len(list(bench.reference())), bench.names
    (('0',), ('w8a8',), 1, ['output 0'])
    >>> [len(list(bench.outputs({group.names[0]: option}))) for group, option in bench.tasks()]
    [1]
    """

    def __init__(
        self,
        model: nn.Module,
        data: object,
        recipe: Recipe,
        widths: Mapping[str, QuantSpec] | None,
        samples: int,
        skip: Iterable[str],
        storage: Storage,
    ) -> None:
        self._model = _copied(model)
        self._calls, self.samples = first_samples(data, samples)
        whole = plan(self._model, recipe)
        known = [line.name for line in whole.layers]
        skipped = skipped_names(known, skip, "qt.plan shows")
        if widths is None:
            named = _named(whole, skipped)
            self._recipes = {recipe.name or "recipe": named}
        else:
            left = skipped | {line.name for line in whole.layers if line.reason in EXCLUDED}
            rules = [Rule(exact_pattern(name), skip=True) for name in known if name in left]
            self._recipes = {label: Recipe([Rule(weight=spec), *rules]) for label, spec in widths.items()}
        self.recipe = None if widths is not None else named
        self.options = tuple(self._recipes)
        plans = {label: plan(self._model, made) for label, made in self._recipes.items()}
        self.groups: Sequence[LayerGroup] = _groups(self._model, plans, storage)
        if not self.groups:
            raise UnsupportedError(f"no layer of the model can be measured:\n{whole}")
        self._prepared: tuple[str, list[FakeQuantize]] | None = None
        self.names: Sequence[str] = [f"output {at}" for at in range(len(_floats(_run(self._model, self._calls[0]))))]

    def reference(self) -> Iterator[Sequence[Array]]:
        """The float outputs of the float model, batch by batch."""
        self._prepare(None)
        return self._outputs()

    def tasks(self) -> Iterator[tuple[LayerGroup, str]]:
        """Every group at every option it has, option by option: each prepares the model once."""
        return ((group, option) for option in self.options for group in self.groups if option in group.nbytes)

    def outputs(self, options: Mapping[str, str]) -> Iterator[Sequence[Array]]:
        """The same outputs with some groups quantized; while they all have one option, the model stays prepared."""
        chosen = {name: option for name, option in options.items() if option != FLOAT}
        names = {name: group.names for group in self.groups if (name := group.names[0]) in chosen}
        used = dict.fromkeys(chosen.values())
        if len(used) == 1:
            for quantizer in self._prepare(next(iter(used))):
                quantizer.enabled = False
            for name in (each for tied in names.values() for each in tied):
                for quantizer in _own_quantizers(self._model.get_submodule(name)):
                    quantizer.enabled = True
            return self._outputs()
        self._prepare(None)
        if not used:
            return self._outputs()
        specs = {option: self._recipes[option].rules[0].weight for option in used}
        rules = [Rule(exact_pattern(each), weight=specs[chosen[name]]) for name, tied in names.items() for each in tied]
        return self._mixed(Recipe(rules))

    def _mixed(self, recipe: Recipe) -> Iterator[Sequence[Array]]:
        with _quantized(self._model, recipe, self._calls):
            yield from self._outputs()

    def _outputs(self) -> Iterator[Sequence[Array]]:
        for call in self._calls:
            yield _floats(_run(self._model, call))

    def _prepare(self, option: str | None) -> list[FakeQuantize]:
        """Bring the copy into the state of an option, or back to float; returns its quantizers."""
        if self._prepared is not None and self._prepared[0] == option:
            return self._prepared[1]
        if self._prepared is not None:
            unprepare(self._model)
            self._prepared = None
        if option is None:
            return []
        quantizers = _prepared(self._model, self._recipes[option], self._calls)
        self._prepared = option, quantizers
        return quantizers


def _copied(model: nn.Module) -> nn.Module:
    try:
        plan_of(model)
    except StateError:
        pass
    else:
        raise SpecError("the model is prepared already: measure the float model, qt.unprepare gives it back")
    try:
        return copy.deepcopy(model).eval()
    except (RuntimeError, TypeError, AttributeError) as error:
        raise UnsupportedError(f"the model cannot be copied, and is not changed itself: {error}") from error


def _prepared(model: nn.Module, recipe: Recipe, calls: Sequence[Arguments]) -> list[FakeQuantize]:
    """Prepare a model, and calibrate it where its quantizers need data."""
    prepare(model, recipe, sync=False)
    with calibrating(model):
        if any(line.input is not None or line.output is not None for line in plan_of(model).quantized):
            for call in calls:
                call_with(model, call)
    model.eval()
    return [each for each in model.modules() if isinstance(each, FakeQuantize)]


def _own_quantizers(module: nn.Module) -> list[FakeQuantize]:
    return [child for child in module._modules.values() if isinstance(child, FakeQuantize)]


@torch.no_grad()
def _run(model: nn.Module, call: Arguments) -> object:
    return call_with(model, call)


def _floats(outputs: object) -> list[Array]:
    """The float tensors in a model's outputs, in order."""
    leaves = pytree.tree_leaves(_plain(outputs))
    found = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return [leaf.detach().to("cpu", torch.float32).numpy() for leaf in found]


def _plain(outputs: object) -> object:
    """Outputs of mapping types that are no dict, as the libraries of transformers make them, as a list."""
    return list(outputs.values()) if isinstance(outputs, Mapping) else outputs


def _named(whole: ModelPlan, skipped: set[str]) -> Recipe:
    """What a recipe gives each layer, in a rule of its own."""
    rules = []
    for line in whole.quantized:
        if line.name not in skipped:
            weight = next(iter(line.weights.values()), None)
            rules.append(
                Rule(
                    exact_pattern(line.name),
                    weight=weight,
                    input=line.input,
                    output=line.output,
                    mode=line.mode,
                    ste=line.ste,
                    observer=line.observer,
                )
            )
    return Recipe(rules, whole.recipe.name)


def _groups(model: nn.Module, plans: Mapping[str, ModelPlan], storage: Storage) -> tuple[LayerGroup, ...]:
    """The layers with weights, in order; those that are tied belong to the first of them."""
    lines = {label: {line.name: line for line in made.quantized if line.weights} for label, made in plans.items()}
    owners: dict[str, str] = {}
    for made in plans.values():
        for line in made.layers:
            owner = next((other.rpartition(".")[0] for other in line.tied.values()), line.name)
            owners[line.name] = owners.get(owner, owner)
    groups = []
    for first in dict.fromkeys(owners.values()):
        names = tuple(name for name, owner in owners.items() if owner == first)
        module = model.get_submodule(first)
        nbytes = {
            label: _nbytes(module, made[first], storage)
            for label, made in lines.items()
            if all(name in made for name in names)
        }
        if nbytes:
            known = next(made[first] for label, made in lines.items() if label in nbytes)
            weights = [module._parameters[key] for key in known.weights]
            sizes = [(each.numel(), each.element_size()) for each in weights if each is not None]
            elements, floats = sum(count for count, _ in sizes), sum(count * size for count, size in sizes)
            groups.append(LayerGroup(names, known.type, elements, floats, nbytes))
    return tuple(groups)


def _nbytes(module: nn.Module, line: LayerPlan, storage: Storage) -> int:
    is_product = isinstance(module, PRODUCTS)
    weights = {key: module._parameters[key] for key in line.weights}
    shapes = {key: tuple(each.shape) for key, each in weights.items() if each is not None}
    return sum(weight_nbytes(line.weights[key], shape, storage, is_product=is_product) for key, shape in shapes.items())


@contextmanager
def _quantized(model: nn.Module, recipe: Recipe, calls: Sequence[Arguments]) -> Iterator[None]:
    _prepared(model, recipe, calls)
    try:
        yield
    finally:
        unprepare(model)


def run_recipe(model: nn.Module, data: object, recipe: Recipe, samples: int) -> float:
    """The noise at the outputs of a module that ``qt.prepare`` has quantized by a recipe.

    >>> run_recipe(nn.Sequential(nn.Linear(2, 2)), [torch.ones(1, 2)], Recipe.preset("w8a16"), 32) < 1e-3
    True
    """
    copied = _copied(model)
    calls, _ = first_samples(data, samples)
    floats = [_floats(_run(copied, call)) for call in calls]
    meter = OutputNoise([f"output {at}" for at in range(len(floats[0]))], floats)
    with _quantized(copied, recipe, calls):
        return meter.noise(_floats(_run(copied, call)) for call in calls)
