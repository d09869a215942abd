"""Preparation: change a model in place for quantization-aware training, and change it back.

The root module of a prepared model stores the plan. All other state is in the changed modules, so that the model can
be wrapped, copied and moved as usual.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from detent.block_format import BlockFormat
from detent.block_tensor import BlockTensor
from detent.errors import SpecError, StateError, UnsupportedError
from detent.rule import Arithmetic
from detent.ste import Identity
from detent.tables import counted
from detent.tensor import QuantizedTensor
from detent.torch.arrays import process_count, scale_dtype
from detent.torch.batchnorm import Fold, QuantizedNorm
from detent.torch.block_quantizer import BlockFakeQuantize
from detent.torch.computed_weights import current_weight, has_weight, weight_owner
from detent.torch.fused_requantization import SumUnits
from detent.torch.layers import float_class_of, kind_of
from detent.torch.model_plan import LayerPlan, ModelPlan, RecipeLike, plan
from detent.torch.quantized_layer import NextQuantizer, QuantizedLayer, QuantizedMatmul, quantized_class
from detent.torch.quantizer import FakeQuantize, WatcherFunction
from detent.torch.untrained_scales import warn_if_untrained
from detent.torch.weight_scales import WeightLayer, set_weight_scales, starts_in_preparation

__all__ = [
    "evaluating",
    "freeze",
    "is_frozen",
    "onnx_weights",
    "plan_of",
    "prepare",
    "prepared_state",
    "quantized_state",
    "quantizers_of",
    "set_class",
    "unprepare",
    "weight_layers",
]

_log = logging.getLogger(__name__)

MAX_DIFFERENCES_SHOWN = 20
_PLAN = "_detent_plan"
_LAYER_STATE = (
    *("fold", "_cache", "_steps", "_forwards", "fused", "frozen"),
    *("arithmetic", "bias_rule", "memory", "next_quantizer"),
)
_RESERVED = ("fold", "arithmetic", "bias_rule", "memory", "next_quantizer")
BiasRule = Literal["float", "exported"]
Memory = Literal["float", "codes", "auto"]
RequantizationRule = Literal["fused", "separate"]
AnyQuantizer = FakeQuantize | BlockFakeQuantize
_FUSED_PATHS = (nn.TransformerEncoderLayer, nn.TransformerEncoder)


@dataclass
class _Prepared:
    """State in the root module of a prepared model."""

    plan: ModelPlan
    hooks: list[Any]
    nested: list[nn.TransformerEncoder]  # encoders whose use_nested_tensor was True before
    frozen: bool = False
    report: object | None = None  # the PtqReport of a model from qt.quantize


def prepare(
    model: nn.Module,
    recipe: RecipeLike,
    *,
    sync: bool | None = None,
    arithmetic: Arithmetic = "float",
    bias: BiasRule = "float",
    memory: Memory = "auto",
    requantization: RequantizationRule = "fused",
) -> nn.Module:
    """Prepare a model in place for quantization-aware training, as ``qt.plan`` shows, and return the model.

    Parameters stay the same objects, so an existing optimizer keeps working. Learned scales are new parameters: an
    optimizer constructed before ``qt.prepare`` does not train these parameters, and its first step gives a warning. A
    state_dict of the float model loads with ``strict=False``. ``qt.unprepare`` turns the model back into a float model.

    Args:
        model: any module, with its weights in memory.
        recipe: a ``dt.Recipe``, the name of a preset, or the path of a .toml or .json file.
        sync: if True, only ``qt.sync`` updates EMA ranges, with the merged ranges of all processes. None means True if
            ``torch.distributed`` runs with more than one process, and otherwise False.
        arithmetic: how layers multiply, for layers whose rules do not say it. "float" multiplies fake-quantized
            values. "integer" multiplies codes, as ONNX Runtime does, and places the output quantizers that its integer
            kernels need; a layer that cannot do this is an error. "auto" multiplies codes where possible.
        bias: "exported" rounds biases of float products as exported files store them, in int32; gradients pass
            straight through. "float" does not. Integer products always use the exported bias.
        memory: what integer products keep of their input for backward: "float" keeps the input itself, "codes" keeps
            codes and one bit per element. "auto" keeps the input if autograd keeps it anyway (the output of a ReLU),
            and codes otherwise. The results are the same. Learned scales always keep the input.
        requantization: codes at ties of the quantizer after an integer product, in training. "fused" gives those of
            evaluation and of exported files. "separate" gives those of separate operators, and saves up to 5 % of a
            step in layers without a batch norm. Evaluation without gradients is always fused.

    Raises:
        SpecError: the model is already prepared, sharded or on the meta device, or ``qt.plan`` raises a SpecError.

    >>> import detent.torch as qt
    >>> model = qt.prepare(nn.Sequential(nn.Linear(4, 2)), "w8a8")
    >>> [name for name, _ in model.named_modules()]
    ['', '0', '0.weight_quantizer', '0.input_quantizer']
    """
    if not isinstance(model, nn.Module):
        raise SpecError(f"got {type(model).__name__} for model, expected a torch.nn.Module")
    _check_preparable(model)
    if bias not in ("float", "exported"):
        raise SpecError(f"got bias={bias!r}, expected 'float' or 'exported'")
    if memory not in ("float", "codes", "auto"):
        raise SpecError(f"got memory={memory!r}, expected 'float', 'codes' or 'auto'")
    if requantization not in ("fused", "separate"):
        raise SpecError(f"got requantization={requantization!r}, expected 'fused' or 'separate'")
    model_plan = plan(model, recipe, arithmetic=arithmetic)
    sync = process_count() > 1 if sync is None else sync
    modules = dict(model.named_modules())
    _check_free_names(model_plan, modules)
    shared: dict[object, AnyQuantizer] = {}
    quantizers = {
        layer.name: _make_quantizers(layer, modules[layer.name], shared, sync=sync) for layer in model_plan.quantized
    }
    # all checks are done above, so a call that raises leaves the model unchanged
    for layer in model_plan.quantized:
        module = modules[layer.name]
        set_class(module, quantized_class(type(module)))
        for name, quantizer in quantizers[layer.name].items():
            module.add_module(name, quantizer)
        if isinstance(module, QuantizedMatmul):
            _set_arithmetic(module, layer, bias, memory)
            if layer.norm:
                owner = module if layer.arithmetic == "integer" else None
                module.fold = Fold(modules[layer.norm], owner)
    _link_quantizers(model_plan, modules)
    if requantization == "separate":
        for quantizer in (each for group in quantizers.values() for each in group.values()):
            if isinstance(quantizer, FakeQuantize):
                quantizer.sum_units = None
    _change_other_classes(model)
    vars(model)[_PLAN] = _Prepared(model_plan, *_disable_fused_paths(model))
    set_weight_scales(each for each in weight_layers(model) if starts_in_preparation(each[-1]))
    warn_if_untrained(model)
    _log.info("prepared %d of %d layers", len(model_plan.quantized), len(model_plan.layers))
    return model


def _set_arithmetic(module: QuantizedMatmul, layer: LayerPlan, bias: BiasRule, memory: Memory) -> None:
    if bias != "float":
        module.bias_rule = bias
    if layer.arithmetic == "integer":
        module.arithmetic, module.memory = "integer", memory
        module.weight_quantizer_of("weight").arithmetic = "integer"
        output = module._modules.get("output_quantizer")
        if layer.output_cause and layer.after_relu and isinstance(output, FakeQuantize):
            output.after_relu = True
        if isinstance(output, FakeQuantize):
            output.sum_units = SumUnits.for_quantizer(output.spec)


def _link_quantizers(model_plan: ModelPlan, modules: dict[str, nn.Module]) -> None:
    """Give each integer layer the quantizer that ONNX Runtime fuses into it."""
    for layer in model_plan.quantized:
        module, reader = modules[layer.name], modules.get(layer.next_layer) if layer.next_layer else None
        quantizer = None if reader is None else reader._modules.get("input_quantizer")
        if isinstance(module, QuantizedMatmul) and isinstance(quantizer, FakeQuantize):
            module.next_quantizer = NextQuantizer(quantizer, after_relu=layer.next_after_relu)
            quantizer.sum_units = SumUnits.for_quantizer(quantizer.spec, after_relu=layer.next_after_relu)


def _change_other_classes(model: nn.Module) -> None:
    """Change the classes of batch norms and of some attention modules.

    With its new class, a batch norm can be frozen and fused. An attention module changes its class if its output
    projection is quantized.
    """
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            set_class(module, quantized_class(type(module)))
        # attention reads out_proj.weight, which returns quantized values only inside the forward of a quantized layer
        elif isinstance(module, nn.MultiheadAttention) and isinstance(module.out_proj, QuantizedLayer):
            set_class(module, quantized_class(float_class_of(module)))


def _disable_fused_paths(model: nn.Module) -> tuple[list[Any], list[nn.TransformerEncoder]]:
    """Turn off PyTorch's fused paths; return the new hooks, and the encoders whose use_nested_tensor was changed."""
    nested = [each for each in model.modules() if isinstance(each, nn.TransformerEncoder) and each.use_nested_tensor]
    for encoder in nested:
        encoder.use_nested_tensor = False  # nested tensors have no shape
    hooks = [model.register_load_state_dict_pre_hook(_check_checkpoint)]
    hooks.append(model.register_load_state_dict_post_hook(_set_missing_scales))
    # fused paths read the float parameters of inner layers; PyTorch uses no fused path for a module with a hook
    hooks += [each.register_forward_pre_hook(_empty_hook) for each in model.modules() if isinstance(each, _FUSED_PATHS)]
    return hooks, nested


def _check_preparable(model: nn.Module) -> None:
    if any(isinstance(module, QuantizedLayer | QuantizedNorm) for module in model.modules()) or _PLAN in vars(model):
        raise SpecError("the model is already prepared: call qt.unprepare(model) first to use a different recipe")
    on_meta = [name for name, each in model.named_parameters() if each.is_meta]
    if on_meta:
        raise SpecError(
            f"the model has {counted(len(on_meta), 'parameter')} on the meta device (first: {on_meta[0]!r}): load the "
            "weights before qt.prepare"
        )
    sharded = [name for name, each in model.named_parameters() if hasattr(each, "full_tensor")]
    if sharded:
        raise SpecError(
            f"the model has {counted(len(sharded), 'sharded parameter')} (first: {sharded[0]!r}): call qt.prepare "
            "before fully_shard, so that learned scales are sharded, too"
        )


def _check_free_names(model_plan: ModelPlan, modules: dict[str, nn.Module]) -> None:
    for layer in model_plan.quantized:
        for name in (*_RESERVED, *_quantizer_names(layer, modules[layer.name])):
            if hasattr(modules[layer.name], name):
                raise SpecError(
                    f"{layer.name or 'the model'} already has an attribute {name!r}, a name that qt.prepare needs: "
                    "rename the attribute"
                )


def _quantizer_names(layer: LayerPlan, module: nn.Module) -> list[str]:
    kind = kind_of(module)
    names = [f"{weight}_quantizer" for weight in layer.weights]
    names += kind.input_names() if kind is not None and layer.input is not None else []
    return names + ([] if layer.output is None else ["output_quantizer"])


def _make_quantizers(
    layer: LayerPlan, module: nn.Module, shared: dict[object, AnyQuantizer], *, sync: bool
) -> dict[str, AnyQuantizer]:
    """Make the quantizers of a layer, by name; ``shared`` maps ids of weights to quantizers, for tied weights."""
    first = next((each for each in module.parameters() if each.is_floating_point()), None)
    device, dtype = (torch.device("cpu"), torch.float32) if first is None else (first.device, scale_dtype(first))
    quantizers = {}
    for name in _quantizer_names(layer, module):
        weight = name.removesuffix("_quantizer")
        parameter = current_weight(module, weight) if weight in layer.weights else None
        owner = _owner_key(module, weight) if weight in layer.weights else None
        quantizer = None if owner is None else shared.get(owner)
        if quantizer is None:
            quantizer = _make_quantizer(layer, name, parameter, dtype)
            quantizer.name = f"{layer.name}.{name}".lstrip(".")
            if isinstance(quantizer, FakeQuantize):
                quantizer.observer, quantizer.sync = layer.observer, sync and parameter is None
            quantizer.to(device).train(module.training)
        if owner is not None:
            shared[owner] = quantizer
        quantizers[name] = quantizer
    return quantizers


def _owner_key(module: nn.Module, weight: str) -> object:
    """Return a key that is equal for tied weights; a module may compute several weights, which are not tied."""
    owner = weight_owner(module, weight)
    return (id(owner), weight) if owner is module else id(owner)


def _make_quantizer(layer: LayerPlan, name: str, weight: Tensor | None, dtype: torch.dtype) -> AnyQuantizer:
    try:
        if weight is not None:
            spec, shape = layer.weights[name.removesuffix("_quantizer")], tuple(weight.shape)
            if isinstance(spec, BlockFormat):
                _check_block_estimator(layer)
                return BlockFakeQuantize(spec)
            return FakeQuantize(spec, layer.weight_mode, layer.ste, shape=shape, dtype=dtype)
        data_spec = layer.output if name == "output_quantizer" else layer.input
        assert data_spec is not None  # noqa: S101 - _quantizer_names lists only quantizers with a spec
        return FakeQuantize(data_spec, layer.mode, layer.ste, dtype=dtype)
    except SpecError as error:
        raise SpecError(f"cannot construct {layer.name}.{name}: {error}".lstrip(".")) from error


def _check_block_estimator(layer: LayerPlan) -> None:
    if layer.ste is not None and not isinstance(layer.ste, Identity):
        raise SpecError(f"got ste={layer.ste!r} for a block format, whose gradient passes straight through: omit ste")


def _check_checkpoint(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    """Reject a checkpoint of a model with a different recipe before anything is loaded."""
    differences = []
    for name, quantizer in quantizers_of(module).items():
        saved = state.get(f"{prefix}{name}._extra_state")
        difference = "" if saved is None else quantizer.compare_state(saved)
        if difference:
            differences.append(f"  {name}: {difference}")
    if differences:
        count = counted(len(differences), "quantizer")
        head = f"the checkpoint is from a model prepared with a different recipe (differences in {count}):"
        advice = "prepare the model with the recipe of the checkpoint"
        raise StateError("\n".join([head, *differences[:MAX_DIFFERENCES_SHOWN], advice]))


def _set_missing_scales(module: nn.Module, keys: Any) -> None:
    """Set the scales of weights after loading a checkpoint without scales, which is from a float model."""
    missing = [f".{key}" for key in keys.missing_keys]  # names may begin with those of wrappers

    def is_missing(name: str) -> bool:
        return any(key.endswith(f".{name}") for key in missing)

    names = {quantizer: name for name, quantizer in quantizers_of(module).items()}
    set_weight_scales(
        each
        for each in weight_layers(module)
        if starts_in_preparation(each[-1]) and is_missing(f"{names[each[-1]]}.scale") and not is_missing(each[0])
    )


def set_class(module: nn.Module, layer: type[nn.Module]) -> None:
    """Change the class of a module, in place."""
    module.__class__ = layer


def _empty_hook(module: nn.Module, args: object) -> None:
    pass


def unprepare(model: nn.Module) -> nn.Module:
    """Turn a prepared model back into a float model, in place, and return it.

    Modules get their float classes back and keep their current weights; quantizers and hooks are removed.

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
                if isinstance(child, AnyQuantizer) and name.endswith("_quantizer"):
                    del module._modules[name]
        if isinstance(module, QuantizedLayer | QuantizedNorm):
            for name in _LAYER_STATE:
                vars(module).pop(name, None)
            set_class(module, module.float_class)
    return model


def freeze(model: nn.Module) -> nn.Module:
    """Stop all updates of scales and batch norm statistics, and fuse batch norms into the layers before them.

    Freezing is final: afterwards the model computes with the weights that ``qt.export_onnx`` writes, and layers with a
    fused batch norm no longer train.

    Args:
        model: a prepared model, calibrated or trained.

    Returns:
        The model.

    Raises:
        StateError: the model is not prepared, or a folded batch norm was replaced after ``qt.prepare``.

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
        if isinstance(module, QuantizedMatmul) and module.fold is not None:
            module.fold.fuse()
    return model


@torch.no_grad()
def quantized_state(model: nn.Module) -> dict[str, QuantizedTensor | BlockTensor]:
    """Return the quantized weights as they are exported, with batch norms folded in, by full name.

    A weight with a block format is a ``BlockTensor``.

    Args:
        model: a prepared model, calibrated or trained.

    Raises:
        StateError: the model is not prepared, or a folded batch norm was replaced after ``qt.prepare``.
        NotCalibratedError: a weight has no scale yet.

    >>> import detent.torch as qt
    >>> qt.quantized_state(qt.prepare(nn.Sequential(nn.Linear(4, 2)), "w8a16"))["0.weight"].codes.dtype
    dtype('int8')
    """
    state: dict[str, QuantizedTensor | BlockTensor] = {**_state_with_params(model)}
    for prefix, layer in model.named_modules():
        if isinstance(layer, QuantizedLayer):
            for key, module in layer._modules.items():
                if isinstance(module, BlockFakeQuantize) and module.enabled:
                    name = key.removesuffix("_quantizer")
                    state[f"{prefix}.{name}".lstrip(".")] = layer.block_weight(name)
    return state


@torch.no_grad()
def onnx_weights(model: nn.Module) -> dict[str, QuantizedTensor]:
    """Return ``quantized_state`` for an ONNX file, which cannot store block formats.

    Raises:
        UnsupportedError: a weight has a block format.
    """
    for name, module in model.named_modules():
        if isinstance(module, BlockFakeQuantize) and module.enabled:
            raise UnsupportedError(
                f"{name} has the block format {module.spec}, which ONNX files cannot store: use a recipe such as "
                "'w4a16-g32' for ONNX, or qt.quantized_state(model) for the bytes"
            )
    return _state_with_params(model)


def _state_with_params(model: nn.Module) -> dict[str, QuantizedTensor]:
    plan_of(model)
    _check_folds(model)
    return {
        full: layer.exported_weight(name) for full, layer, name, quantizer in weight_layers(model) if quantizer.enabled
    }


def _check_folds(model: nn.Module) -> None:
    present = set(model.modules())
    for name, layer in model.named_modules():
        if isinstance(layer, QuantizedMatmul) and layer.fold is not None and layer.fold.norm not in present:
            raise StateError(
                f"the batch norm folded into {name} was replaced after qt.prepare: replace batch norms before "
                "qt.prepare (this includes SyncBatchNorm.convert_sync_batchnorm)"
            )


def plan_of(model: nn.Module) -> ModelPlan:
    """Return the plan of a prepared model; raise StateError if the model is not prepared."""
    roots = _roots(model)
    if not roots:
        raise StateError("the model is not prepared: call qt.prepare(model, recipe) first")
    return roots[0].plan


def _roots(model: nn.Module) -> list[_Prepared]:
    """Return the states of all prepared models inside this module, which may be a trainer's wrapper."""
    plans = (vars(module).get(_PLAN) for module in model.modules())
    return [each for each in plans if isinstance(each, _Prepared)]


def prepared_state(model: nn.Module) -> _Prepared:
    """Return the state of a prepared model; raise StateError if the model is not prepared."""
    plan_of(model)
    return _roots(model)[0]


def is_frozen(model: nn.Module) -> bool:
    """Return whether a prepared model was frozen."""
    return any(each.frozen for each in _roots(model))


def quantizers_of(model: nn.Module) -> dict[str, FakeQuantize]:
    """Return the quantizers of a model by full name; a quantizer of tied weights occurs once."""
    return {name: module for name, module in model.named_modules() if isinstance(module, FakeQuantize)}


def weight_layers(model: nn.Module) -> list[WeightLayer]:
    """List (full name, layer, weight name, quantizer) for each quantized weight; tied weights occur under each name."""
    weights = []
    for prefix, layer in model.named_modules():
        if not isinstance(layer, QuantizedLayer):
            continue
        for key, quantizer in layer._modules.items():
            name = key.removesuffix("_quantizer")
            if not isinstance(quantizer, FakeQuantize) or key in (*layer.kind.input_names(), "output_quantizer"):
                continue
            full = f"{prefix}.{name}".lstrip(".")
            if not has_weight(layer, name):
                raise StateError(f"{full} was removed after qt.prepare: remove weights before qt.prepare")
            weights.append((full, layer, name, quantizer))
    return weights


@contextmanager
def evaluating(model: nn.Module, watcher: WatcherFunction | None = None) -> Iterator[None]:
    """Switch the model to evaluation mode, and set ``watcher`` in each quantizer if it is given; undo both on exit."""
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
