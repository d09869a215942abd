"""Preparation: turn a model into one for quantization-aware training, in place, and back.

The root of a prepared model stores its plan. All other state is in the modules themselves, so wrapping, copying and
moving the model need no care.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from detent.errors import SpecError, StateError
from detent.tensor import QuantizedTensor
from detent.torch.arrays import process_count, scale_dtype
from detent.torch.batchnorm import Fold, QuantizedNorm
from detent.torch.layers import float_class_of, kind_of
from detent.torch.model_plan import LayerPlan, ModelPlan, RecipeLike, plan
from detent.torch.quantized_layer import QuantizedLayer, QuantizedProduct, quantized_class
from detent.torch.quantizer import FakeQuantize, WatcherFunction
from detent.torch.untrained_scales import warn_if_untrained

__all__ = [
    "evaluating",
    "freeze",
    "is_frozen",
    "plan_of",
    "prepare",
    "quantized_state",
    "quantizers_of",
    "unprepare",
    "weight_layers",
]

_log = logging.getLogger(__name__)

_PLAN = "_detent_plan"
_FUSED_PATHS = (nn.TransformerEncoderLayer, nn.TransformerEncoder)


@dataclass
class _Prepared:
    """What the root of a prepared model stores."""

    plan: ModelPlan
    hooks: list[Any]
    nested: list[nn.TransformerEncoder]  # whose nested tensors were switched off
    frozen: bool = False


def prepare(model: nn.Module, recipe: RecipeLike, *, sync: bool | None = None) -> nn.Module:
    """Prepare a model for quantization-aware training in place, as ``qt.plan`` shows, and return it.

    Parameters stay the same objects, so an existing optimizer keeps working; scales of mode Learned are new parameters,
    which it does not train, and its first step then warns. The float model's state_dict loads with ``strict=False``,
    under the same keys. ``qt.unprepare`` restores the float model bit for bit.

    Args:
        model: any module, with its weights in memory.
        recipe: a ``dt.Recipe``, the name of a preset, or the path of a .toml or .json file.
        sync: update EMA ranges only in ``qt.sync``, which merges those of all processes; None is True if
            ``torch.distributed`` runs with more than one.

    Raises:
        SpecError: the model is already prepared or on the meta device; or what ``qt.plan`` raises.

    >>> import detent.torch as qt
    >>> model = qt.prepare(nn.Sequential(nn.Linear(4, 2)), "w8a8")
    >>> [name for name, _ in model.named_modules()]
    ['', '0', '0.weight_quantizer', '0.input_quantizer']
    """
    if not isinstance(model, nn.Module):
        raise SpecError(f"prepare takes a torch.nn.Module, got {type(model).__name__}")
    _refuse_unfit(model)
    model_plan = plan(model, recipe)
    sync = process_count() > 1 if sync is None else sync
    modules = dict(model.named_modules())
    _refuse_taken_names(model_plan, modules)
    shared: dict[int, FakeQuantize] = {}
    quantizers = {
        layer.name: _make_quantizers(layer, modules[layer.name], shared, sync=sync) for layer in model_plan.quantized
    }
    # nothing below fails
    for layer in model_plan.quantized:
        module = modules[layer.name]
        _become(module, quantized_class(type(module)))
        for name, quantizer in quantizers[layer.name].items():
            module.add_module(name, quantizer)
        if layer.norm and isinstance(module, QuantizedProduct):
            module.fold = Fold(modules[layer.norm])
    _change_other_classes(model)
    vars(model)[_PLAN] = _Prepared(model_plan, *_disable_fused_paths(model))
    warn_if_untrained(model)
    _log.info("prepared %d of %d layers", len(model_plan.quantized), len(model_plan.layers))
    return model


def _change_other_classes(model: nn.Module) -> None:
    """Let batch norms freeze and fuse, and attention use the quantized weights of its output projection."""
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            _become(module, quantized_class(type(module)))
        # attention reads these weights itself, and they are quantized only in the forward of a quantized layer
        elif isinstance(module, nn.MultiheadAttention) and isinstance(module.out_proj, QuantizedLayer):
            _become(module, quantized_class(float_class_of(module)))


def _disable_fused_paths(model: nn.Module) -> tuple[list[Any], list[nn.TransformerEncoder]]:
    """Install the hooks of a prepared model; returns them, and the encoders whose nested tensors were switched off."""
    nested = [each for each in model.modules() if isinstance(each, nn.TransformerEncoder) and each.use_nested_tensor]
    for encoder in nested:
        encoder.use_nested_tensor = False  # nested tensors have no shape
    hooks = [model.register_load_state_dict_pre_hook(_check_checkpoint)]
    # fused paths read parameters directly, past the layers that hold them; a module with a hook does not take them
    hooks += [each.register_forward_pre_hook(_no_hook) for each in model.modules() if isinstance(each, _FUSED_PATHS)]
    return hooks, nested


def _refuse_unfit(model: nn.Module) -> None:
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


def _refuse_taken_names(model_plan: ModelPlan, modules: dict[str, nn.Module]) -> None:
    for layer in model_plan.quantized:
        for name in ("fold", *_quantizer_names(layer, modules[layer.name])):
            if hasattr(modules[layer.name], name):
                raise SpecError(f"{layer.name or 'the model'} has an attribute {name!r} already: rename it")


def _quantizer_names(layer: LayerPlan, module: nn.Module) -> list[str]:
    kind = kind_of(module)
    names = [f"{weight}_quantizer" for weight in layer.weights]
    names += kind.input_names() if kind is not None and layer.input is not None else []
    return names + ([] if layer.output is None else ["output_quantizer"])


def _make_quantizers(
    layer: LayerPlan, module: nn.Module, shared: dict[int, FakeQuantize], *, sync: bool
) -> dict[str, FakeQuantize]:
    """The quantizers of a layer by name; ``shared`` maps a weight's id to its quantizer, for tied weights."""
    first = next((each for each in module.parameters() if each.is_floating_point()), None)
    device, dtype = (torch.device("cpu"), torch.float32) if first is None else (first.device, scale_dtype(first))
    quantizers = {}
    for name in _quantizer_names(layer, module):
        weight = name.removesuffix("_quantizer")
        parameter = module._parameters[weight] if weight in layer.weights else None
        quantizer = None if parameter is None else shared.get(id(parameter))
        if quantizer is None:
            quantizer = _make_quantizer(layer, name, parameter, dtype)
            quantizer.name = f"{layer.name}.{name}".lstrip(".")
            quantizer.observer, quantizer.sync = layer.observer, sync and parameter is None
            quantizer.to(device).train(module.training)
        if parameter is not None:
            shared[id(parameter)] = quantizer
        quantizers[name] = quantizer
    return quantizers


def _make_quantizer(layer: LayerPlan, name: str, parameter: nn.Parameter | None, dtype: torch.dtype) -> FakeQuantize:
    try:
        if parameter is not None:
            spec, shape = layer.weights[name.removesuffix("_quantizer")], tuple(parameter.shape)
            return FakeQuantize(spec, layer.weight_mode, layer.ste, shape=shape, dtype=dtype)
        data_spec = layer.output if name == "output_quantizer" else layer.input
        assert data_spec is not None  # noqa: S101 - else the quantizer has no name
        return FakeQuantize(data_spec, layer.mode, layer.ste, dtype=dtype)
    except SpecError as error:
        raise SpecError(f"{layer.name}.{name} cannot be made: {error}".lstrip(".")) from error


def _check_checkpoint(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    """Reject a checkpoint of another recipe before anything is loaded."""
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


def _become(module: nn.Module, layer: type[nn.Module]) -> None:
    module.__class__ = layer


def _no_hook(module: nn.Module, args: object) -> None:
    pass


def unprepare(model: nn.Module) -> nn.Module:
    """Turn a prepared model back into the float model, in place: its classes, its parameters and nothing else.

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
            for name, child in list(module._modules.items()):
                if isinstance(child, FakeQuantize) and name.endswith("_quantizer"):
                    del module._modules[name]
        if isinstance(module, QuantizedLayer | QuantizedNorm):
            for name in ("fold", "_cache", "_forwards", "fused", "frozen"):
                vars(module).pop(name, None)
            _become(module, module.float_class)
    return model


def freeze(model: nn.Module) -> nn.Module:
    """Stop all updates of scales and statistics, and fuse batch norms into the layers before them.

    Args:
        model: a prepared model, calibrated or trained.

    Raises:
        StateError: the model is not prepared, or a folded batch norm was replaced since.

    >>> import detent.torch as qt
    >>> model = qt.prepare(nn.Sequential(nn.Linear(4, 2)), "w8a16")
    >>> qt.freeze(model)[0].weight_quantizer.observing
    False
    """
    plan_of(model)
    _check_folds(model)
    for root in _roots(model):
        root.frozen = True
    for quantizer in quantizers_of(model).values():
        quantizer.observing = False
        for parameter in quantizer.parameters(recurse=False):
            parameter.requires_grad_(False)
    for module in model.modules():
        if isinstance(module, QuantizedNorm):
            module.frozen = True
        if isinstance(module, QuantizedProduct) and module.fold is not None:
            module.fold.fuse()
    return model


@torch.no_grad()
def quantized_state(model: nn.Module) -> dict[str, QuantizedTensor]:
    """The quantized weights by full name, as they are exported: with batch norms folded in.

    >>> import detent.torch as qt
    >>> qt.quantized_state(qt.prepare(nn.Sequential(nn.Linear(4, 2)), "w8a16"))["0.weight"].codes.dtype
    dtype('int8')
    """
    plan_of(model)
    _check_folds(model)
    return {
        full: layer.exported_weight(name) for full, layer, name, quantizer in weight_layers(model) if quantizer.enabled
    }


def _check_folds(model: nn.Module) -> None:
    present = set(model.modules())
    for name, layer in model.named_modules():
        if isinstance(layer, QuantizedProduct) and layer.fold is not None and layer.fold.norm not in present:
            raise StateError(
                f"the batch norm that is folded into {name} was replaced after qt.prepare: replace it first, "
                "SyncBatchNorm.convert_sync_batchnorm included, and prepare the model then"
            )


def plan_of(model: nn.Module) -> ModelPlan:
    """The plan of a prepared model; StateError if the model is not prepared."""
    roots = _roots(model)
    if not roots:
        raise StateError("the model is not prepared: qt.prepare(model, recipe) first")
    return roots[0].plan


def _roots(model: nn.Module) -> list[_Prepared]:
    """What prepared models store; a trainer may have wrapped them."""
    plans = (vars(module).get(_PLAN) for module in model.modules())
    return [each for each in plans if isinstance(each, _Prepared)]


def is_frozen(model: nn.Module) -> bool:
    """Whether a prepared model was frozen."""
    return any(each.frozen for each in _roots(model))


def quantizers_of(model: nn.Module) -> dict[str, FakeQuantize]:
    """The quantizers of a model by full name, each once."""
    return {name: module for name, module in model.named_modules() if isinstance(module, FakeQuantize)}


def weight_layers(model: nn.Module) -> list[tuple[str, QuantizedLayer, str, FakeQuantize]]:
    """Full name, layer, name and quantizer of every quantized weight; a tied weight occurs under each of its names."""
    weights = []
    for prefix, layer in model.named_modules():
        if not isinstance(layer, QuantizedLayer):
            continue
        for key, quantizer in layer._modules.items():
            name = key.removesuffix("_quantizer")
            if not isinstance(quantizer, FakeQuantize) or key in (*layer.kind.input_names(), "output_quantizer"):
                continue
            full = f"{prefix}.{name}".lstrip(".")
            if layer._parameters.get(name) is None:
                raise StateError(
                    f"{full} was a parameter when the model was prepared and is none now: prune and parametrize before "
                    "qt.prepare, or not at all"
                )
            weights.append((full, layer, name, quantizer))
    return weights


@contextmanager
def evaluating(model: nn.Module, watcher: WatcherFunction | None = None) -> Iterator[None]:
    """Switch to evaluation mode, with a watcher on every quantizer if one is given, and back on exit."""
    modes = {module: module.training for module in model.modules()}
    quantizers = [] if watcher is None else list(quantizers_of(model).values())
    watchers = [quantizer.watcher for quantizer in quantizers]
    try:
        model.eval()
        for quantizer in quantizers:
            quantizer.watcher = watcher
        yield
    finally:
        for quantizer, before in zip(quantizers, watchers, strict=True):
            quantizer.watcher = before
        for module, mode in modes.items():
            module.training = mode
