"""Preparation: a model made ready for quantization-aware training, in place, and back."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from detent.errors import SpecError, StateError
from detent.recipe import ObserverSpec
from detent.torch.batchnorm import Fold, QuantizedNorm
from detent.torch.layers import kind_of
from detent.torch.planning import LayerPlan, ModelPlan, RecipeLike, plan
from detent.torch.processes import process_count
from detent.torch.quantizer import FakeQuantize
from detent.torch.running import QuantizedLayer, QuantizedProduct, quantized_class

__all__ = ["plan_of", "prepare", "quantizers_of", "unprepare"]

_PLAN = "_detent_plan"
_FUSED_PATHS = (nn.TransformerEncoderLayer, nn.TransformerEncoder)


@dataclass
class _Prepared:
    """What the root of a prepared model remembers."""

    plan: ModelPlan
    hooks: list[Any]
    nested: list[nn.TransformerEncoder]


def prepare(model: nn.Module, recipe: RecipeLike, *, sync: bool | None = None) -> nn.Module:
    """Make a model ready for quantization-aware training, as ``qt.plan`` says, in place.

    Parameters stay the same objects, so that an existing optimizer keeps working; the float model's state_dict loads
    with ``strict=False``, under the same keys. ``qt.unprepare`` restores the float model bit for bit.

    Args:
        model: any module, with its weights in memory.
        recipe: a ``dt.Recipe``, the name of a preset, or the path of a .toml or .json file.
        sync: statistics move only in ``qt.sync``, which merges those of all processes; None is True where
            ``torch.distributed`` runs with more than one.

    Returns:
        The model.

    Raises:
        SpecError: the model is prepared already or on the meta device; or what ``qt.plan`` raises.

    >>> import detent.torch as qt
    >>> model = qt.prepare(nn.Sequential(nn.Linear(4, 2)), "w8a8")
    >>> [name for name, _ in model.named_modules()]
    ['', '0', '0.weight_quantizer', '0.input_quantizer']
    """
    if not isinstance(model, nn.Module):
        raise SpecError(f"prepare takes a torch.nn.Module, got {type(model).__name__}")
    if any(isinstance(module, QuantizedLayer | QuantizedNorm) for module in model.modules()) or _PLAN in vars(model):
        raise SpecError("the model is prepared already: qt.unprepare(model) first, to prepare it by another recipe")
    on_meta = [name for name, each in model.named_parameters() if each.is_meta]
    if on_meta:
        raise SpecError(
            f"{len(on_meta)} parameters are on the meta device, the first is {on_meta[0]!r}: load the weights first"
        )
    sharded = [name for name, each in model.named_parameters() if hasattr(each, "full_tensor")]
    if sharded:
        raise SpecError(
            f"{len(sharded)} parameters are sharded, the first is {sharded[0]!r}: qt.prepare comes before fully_shard, "
            "which then shards learned scales, too"
        )
    made = plan(model, recipe)
    if sync is None:
        sync = process_count() > 1
    modules = dict(model.named_modules())
    _refuse_taken_names(made, modules)
    weights: dict[int, FakeQuantize] = {}
    for layer in made.quantized:
        _prepare_layer(layer, modules, weights, sync=sync)
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            _become(module, quantized_class(type(module)))
    for module in model.modules():
        # Attention reads the weights of its output projection itself, and only a quantized one finds quantized ones.
        if isinstance(module, nn.MultiheadAttention) and isinstance(module.out_proj, QuantizedLayer):
            _become(module, quantized_class(_float_class(module)))
    nested = [each for each in model.modules() if isinstance(each, nn.TransformerEncoder) and each.use_nested_tensor]
    for encoder in nested:
        encoder.use_nested_tensor = False  # whose layers would see data without shape
    hooks = [model.register_load_state_dict_pre_hook(_check_checkpoint)]
    # The fused paths of these look at parameters, past the layers that hold them; a hook keeps them off.
    hooks += [each.register_forward_pre_hook(_no_hook) for each in model.modules() if isinstance(each, _FUSED_PATHS)]
    vars(model)[_PLAN] = _Prepared(made, hooks, nested)
    return model


def _become(module: nn.Module, layer: type[nn.Module]) -> None:
    module.__class__ = layer


def _float_class(module: nn.Module) -> type[nn.Module]:
    return getattr(type(module), "float_class", type(module))


def _no_hook(module: nn.Module, args: object) -> None:
    pass


def _refuse_taken_names(made: ModelPlan, modules: dict[str, nn.Module]) -> None:
    for layer in made.quantized:
        for name in ("fold", *_quantizer_names(layer, modules[layer.name])):
            if hasattr(modules[layer.name], name):
                raise SpecError(f"{layer.name or 'the model'} has an attribute {name!r} already: rename it")


def _quantizer_names(layer: LayerPlan, module: nn.Module) -> list[str]:
    kind = kind_of(module)
    names = [f"{weight}_quantizer" for weight in layer.weights]
    names += kind.input_names() if kind is not None and layer.input is not None else []
    return names + ([] if layer.output is None else ["output_quantizer"])


def _prepare_layer(
    layer: LayerPlan, modules: dict[str, nn.Module], weights: dict[int, FakeQuantize], *, sync: bool
) -> None:
    module = modules[layer.name]
    names, kind = _quantizer_names(layer, module), kind_of(module)
    device, dtype = _place_of(module)
    _become(module, quantized_class(type(module)))
    for name in names:
        full = f"{layer.name}.{name}".lstrip(".")
        weight = name.removesuffix("_quantizer")
        if weight in layer.weights:
            parameter = module._parameters[weight]
            known = weights.get(id(parameter))
            if known is None:
                shape = tuple(parameter.shape)  # type: ignore[union-attr]  # the plan names only weights that exist
                known = FakeQuantize(layer.weights[weight], layer.weight_mode, layer.ste, shape=shape, dtype=dtype)
                weights[id(parameter)] = _placed(known, full, device, layer.observer, sync=False)
            module.add_module(name, known)
            continue
        spec = layer.output if name == "output_quantizer" else layer.input
        made = FakeQuantize(spec, layer.mode, layer.ste, dtype=dtype)  # type: ignore[arg-type]  # named only where there is one
        module.add_module(name, _placed(made, full, device, layer.observer, sync=sync))
    if layer.norm and isinstance(module, QuantizedProduct) and kind is not None:
        module.fold = Fold(modules[layer.norm])  # type: ignore[arg-type]  # find_folds names batch normalisations


def _place_of(module: nn.Module) -> tuple[torch.device, torch.dtype]:
    """The device of a layer, and the type of its scales."""
    first = next((each for each in module.parameters() if each.is_floating_point()), None)
    if first is None:
        return torch.device("cpu"), torch.float32
    return first.device, torch.float64 if first.dtype == torch.float64 else torch.float32


def _placed(
    quantizer: FakeQuantize, name: str, device: torch.device, observer: ObserverSpec | None, *, sync: bool
) -> FakeQuantize:
    quantizer.name, quantizer.observer, quantizer.sync = name, observer, sync
    return quantizer.to(device)


def _check_checkpoint(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    """Refuse a checkpoint of another recipe before anything is loaded."""
    differences = []
    for name, quantizer in quantizers_of(module).items():
        saved = state.get(f"{prefix}{name}._extra_state")
        difference = "" if saved is None else quantizer.compare_state(saved)
        if difference:
            differences.append(f"  {name}: {difference}")
    if differences:
        count = len(differences)
        head = f"the checkpoint belongs to a model prepared by another recipe, {count} quantizers differ:"
        raise StateError("\n".join([head, *differences[:20], "prepare the model by the recipe of the checkpoint"]))


def quantizers_of(model: nn.Module) -> dict[str, FakeQuantize]:
    """The quantizers of a model by their full names, each once.

    >>> import detent.torch as qt
    >>> list(quantizers_of(qt.prepare(nn.Sequential(nn.Linear(4, 2)), "w8a16")))
    ['0.weight_quantizer']
    """
    return {name: module for name, module in model.named_modules() if isinstance(module, FakeQuantize)}


def plan_of(model: nn.Module) -> ModelPlan:
    """The plan by which a model was prepared.

    Raises:
        StateError: it was not.

    >>> import detent.torch as qt
    >>> plan_of(qt.prepare(nn.Sequential(nn.Linear(4, 2)), "w8a8")).recipe.name
    'w8a8'
    """
    for module in model.modules():  # a trainer may have wrapped the model
        found = vars(module).get(_PLAN)
        if isinstance(found, _Prepared):
            return found.plan
    raise StateError("the model is not prepared: qt.prepare(model, recipe) first")


def unprepare(model: nn.Module) -> nn.Module:
    """The float model again, in place: its classes, its parameters and nothing else.

    Raises:
        StateError: the model is not prepared.

    >>> import detent.torch as qt
    >>> type(qt.unprepare(qt.prepare(nn.Sequential(nn.Linear(4, 2)), "w8a8"))[0])
    <class 'torch.nn.modules.linear.Linear'>
    """
    plan_of(model)
    for module in list(model.modules()):
        prepared = vars(module).pop(_PLAN, None)
        if isinstance(prepared, _Prepared):
            for hook in prepared.hooks:
                hook.remove()
            for encoder in prepared.nested:
                encoder.use_nested_tensor = True
        if isinstance(module, QuantizedLayer):
            for name in [key for key, child in module._modules.items() if isinstance(child, FakeQuantize)]:
                if name.endswith("_quantizer"):
                    del module._modules[name]
        if isinstance(module, QuantizedLayer | QuantizedNorm):
            for name in ("fold", "_cache", "_running", "fused", "frozen"):
                vars(module).pop(name, None)
            _become(module, module.float_class)
    return model
