"""Layer runner for PyTorch modules.

It copies the model, calls ``qt.prepare`` on the copy once per candidate, and enables one layer's quantizers at a time.
The copy is in the state in which QAT would start: batch norms are folded, and weights have min-max scales.
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
from detent.recipe import EXCLUDED, NO_RULE, Recipe, exact_pattern, skipped_names
from detent.rule import Rule
from detent.sensitivity.bench import LayerGroup, OutputNoise, weight_nbytes
from detent.sensitivity.layer_noise import FLOAT, Storage
from detent.spec import QuantSpec
from detent.torch.arrays import Arguments, arguments_of, call_with, float_outputs
from detent.torch.calibration import calibrating
from detent.torch.computed_weights import current_weight
from detent.torch.model_plan import LayerPlan, ModelPlan, plan
from detent.torch.preparation import plan_of, prepare, unprepare
from detent.torch.quantizer import FakeQuantize

__all__ = ["TorchLayerRunner", "first_samples", "run_recipe"]

Array = NDArray[Any]
CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def first_samples(data: object, limit: int) -> tuple[list[Arguments], int]:
    """Return the call arguments of the first batches, up to ``limit`` samples in total, and the number of samples.

    Samples are counted along the first axis. The last batch is cut if all its tensors have the same number of samples.
    """
    if isinstance(data, str | bytes | Mapping | Tensor) or not isinstance(data, Iterable):
        raise SpecError(
            f"got data of type {type(data).__name__}, expected a list of batches: pass [data] for one batch"
        )
    calls, count = list[Arguments](), 0
    for number, batch in enumerate(data):
        call = arguments_of(batch, f"batch {number}")
        leaves, structure = pytree.tree_flatten((call.args, call.kwargs))
        sizes = {len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim}
        size = max(sizes, default=1)
        if count + size > limit and len(sizes) == 1:
            size = limit - count
            cut = [leaf[:size] if isinstance(leaf, Tensor) and leaf.ndim else leaf for leaf in leaves]
            call = Arguments(*pytree.tree_unflatten(cut, structure))
        calls.append(call)
        count += size
        if count >= limit:
            break
    if not calls:
        raise SpecError(
            "got no batches, expected at least one: if data is an iterator that was used before, pass a list"
        )
    return calls, count


class TorchLayerRunner:
    """A ``LayerRunner`` for a module, with the arguments of ``qs.measure``."""

    workers = 1  # runs cannot be parallel, because quantizers are enabled and disabled in place

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
        model_plan = plan(self._model, recipe)
        names = [layer.name for layer in model_plan.layers]
        skipped = skipped_names(names, skip, "qt.plan shows")
        self.recipe: Recipe | None = None
        if widths is None:
            self.recipe = _rule_per_layer(model_plan, skipped)
            self._recipes = {recipe.name or "recipe": self.recipe}
        else:
            excluded = skipped | {layer.name for layer in model_plan.layers if layer.reason in {EXCLUDED, NO_RULE}}
            rules = [Rule(exact_pattern(name), skip=True) for name in names if name in excluded]
            self._recipes = {label: Recipe([Rule(weight=spec), *rules]) for label, spec in widths.items()}
        self.options = tuple(self._recipes)
        plans = {label: plan(self._model, each) for label, each in self._recipes.items()}
        self.groups: Sequence[LayerGroup] = _groups(self._model, plans, storage)
        if not self.groups:
            raise UnsupportedError(f"no layer of the model can be measured:\n{model_plan}")
        self._prepared: tuple[str, list[FakeQuantize]] | None = None
        self.names: Sequence[str] = [
            f"output {at}" for at in range(len(float_outputs(_run(self._model, self._calls[0]))))
        ]

    def reference(self) -> Iterator[Sequence[Array]]:
        """Yield the float model's outputs of float type, batch by batch."""
        self._prepare(None)
        return self._outputs()

    def tasks(self) -> Iterator[tuple[LayerGroup, str]]:
        """Yield all pairs of a group and a candidate that the group supports.

        Pairs are ordered by candidate, so the model is prepared only once per candidate.
        """
        return ((group, option) for option in self.options for group in self.groups if option in group.nbytes)

    def outputs(self, options: Mapping[str, str]) -> Iterator[Sequence[Array]]:
        """Yield the outputs of float type with some groups quantized.

        If all these groups have the same candidate, the model stays prepared for the next call.
        """
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
            yield float_outputs(_run(self._model, call))

    def _prepare(self, option: str | None) -> list[FakeQuantize]:
        """Prepare the copy for the candidate ``option``, and return the copy's quantizers.

        If ``option`` is None, the copy becomes a float model again.
        """
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
        raise SpecError("the model is prepared already: call qt.unprepare, and measure the float model")
    try:
        return copy.deepcopy(model).eval()
    except (RuntimeError, TypeError, AttributeError) as error:
        raise UnsupportedError(
            f"measuring needs a copy of the model, but copy.deepcopy failed: {error}. Change the model so that "
            "copy.deepcopy(model) works"
        ) from error


def _prepared(model: nn.Module, recipe: Recipe, calls: Sequence[Arguments]) -> list[FakeQuantize]:
    """Prepare a model, calibrate it if its quantizers need data, and return its quantizers."""
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


def _rule_per_layer(model_plan: ModelPlan, skipped: set[str]) -> Recipe:
    """Return the recipe of a plan, expanded to one rule per layer."""
    rules = [
        Rule(
            exact_pattern(layer.name),
            weight=next(iter(layer.weights.values()), None),
            input=layer.input,
            output=layer.output,
            mode=layer.mode,
            ste=layer.ste,
            observer=layer.observer,
        )
        for layer in model_plan.quantized
        if layer.name not in skipped
    ]
    return Recipe(rules, model_plan.recipe.name)


def _groups(model: nn.Module, plans: Mapping[str, ModelPlan], storage: Storage) -> tuple[LayerGroup, ...]:
    """Group each layer with the layers tied to it, in the model's order; layers without weights are left out."""
    layers = {
        label: {each.name: each for each in model_plan.quantized if each.weights} for label, model_plan in plans.items()
    }
    owners: dict[str, str] = {}
    for layer in (each for model_plan in plans.values() for each in model_plan.layers):
        owner = next((other.rpartition(".")[0] for other in layer.tied.values()), layer.name)
        owners[layer.name] = owners.get(owner, owner)
    groups = []
    for first in dict.fromkeys(owners.values()):
        names = tuple(name for name, owner in owners.items() if owner == first)
        plan_by_label = {
            label: by_name[first] for label, by_name in layers.items() if all(name in by_name for name in names)
        }
        if not plan_by_label:
            continue
        module, layer = model.get_submodule(first), next(iter(plan_by_label.values()))
        nbytes = {label: _nbytes(module, each, storage) for label, each in plan_by_label.items()}
        weights = _weights(module, layer).values()
        elements = sum(each.numel() for each in weights)
        floats = sum(each.numel() * each.element_size() for each in weights)
        groups.append(LayerGroup(names, layer.type, elements, floats, nbytes))
    return tuple(groups)


def _weights(module: nn.Module, layer: LayerPlan) -> dict[str, Tensor]:
    return {key: current_weight(module, key) for key in layer.weights}


def _nbytes(module: nn.Module, layer: LayerPlan, storage: Storage) -> int:
    is_table, is_conv = isinstance(module, nn.Embedding | nn.EmbeddingBag), isinstance(module, CONVS)
    operator = "Gather" if is_table else "Conv" if is_conv else "MatMul"
    input_bits = 0 if layer.input is None else layer.input.bits
    return sum(
        weight_nbytes(layer.weights[key], tuple(weight.shape), storage, operator, input_bits)
        for key, weight in _weights(module, layer).items()
    )


@contextmanager
def _quantized(model: nn.Module, recipe: Recipe, calls: Sequence[Arguments]) -> Iterator[None]:
    _prepared(model, recipe, calls)
    try:
        yield
    finally:
        unprepare(model)


def run_recipe(model: nn.Module, data: object, recipe: Recipe, samples: int) -> float:
    """Prepare a copy of a module with a recipe, run the copy, and return the noise at the outputs."""
    copied = _copied(model)
    calls, _ = first_samples(data, samples)
    floats = [float_outputs(_run(copied, call)) for call in calls]
    output_noise = OutputNoise([f"output {at}" for at in range(len(floats[0]))], floats)
    with _quantized(copied, recipe, calls):
        return output_noise.noise(float_outputs(_run(copied, call)) for call in calls)
