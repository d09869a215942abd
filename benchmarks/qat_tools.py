"""Tools that prepare a model for QAT, each through its own API and with the same bit widths.

A preparer takes a float model, an example batch and the bits of weights and activations, and returns the model that
users of the tool would train: weights per channel, activations per tensor (torchao: per token, as in its recipes).
Below 8 bits, the first and the last layer have 8 bits, as in detent's presets. If the tool needs activation statistics
before training, they come from the example batch. A preparer raises SkippedError if its tool is not installed or does
not support the model.

The tools do not all do the same work. torch.ao folds batch norm and also quantizes outputs. torchao supports only
Linear. brevitas learns activation scales after some steps of statistics, here two instead of 300, because these steps
are slow. modelopt calibrates once and trains with frozen scales, which is the cheapest option.
"""

import logging
import os
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch
from case import SkippedError
from torch import Tensor, nn

import detent as dt
import detent.torch as qt

CALIBRATION_STEPS = 2
EDGE_BITS = 8  # bits of the first and the last layer
PACKAGES = ("torchao", "brevitas", "nvidia-modelopt")
Preparer = Callable[[nn.Module, Tensor, int], nn.Module]


def detent_ema(model: nn.Module, example: Tensor, bits: int = 8) -> nn.Module:
    """Detent with EMA ranges, as in its presets."""
    return _detent(model, example, dt.Recipe.preset(f"w{bits}a{bits}", mode=dt.EMA(0.99)))


def detent_learned(model: nn.Module, example: Tensor, bits: int = 8) -> nn.Module:
    """Detent with learned scales."""
    return _detent(model, example, dt.Recipe.preset(f"w{bits}a{bits}", mode=dt.Learned()))


def detent_integer(model: nn.Module, example: Tensor, bits: int = 8) -> nn.Module:
    """Detent with EMA ranges and integer products."""
    return _detent(model, example, dt.Recipe.preset(f"w{bits}a{bits}", mode=dt.EMA(0.99)), "auto")


def detent_integer_learned(model: nn.Module, example: Tensor, bits: int = 8) -> nn.Module:
    """Detent with learned scales and integer products."""
    return _detent(model, example, dt.Recipe.preset(f"w{bits}a{bits}", mode=dt.Learned()), "auto")


def _detent(model: nn.Module, example: Tensor, recipe: dt.Recipe, arithmetic: str = "float") -> nn.Module:
    qt.prepare(model, recipe, arithmetic=arithmetic)
    with torch.no_grad(), qt.calibrating(model):
        for _ in range(CALIBRATION_STEPS):
            model(example)
    return model


def torch_ao_fx(model: nn.Module, example: Tensor, bits: int = 8) -> nn.Module:
    """FX graph mode of torch.ao, with its fused moving-average observers."""
    from torch.ao.quantization import QConfigMapping  # noqa: PLC0415 - slow and deprecated
    from torch.ao.quantization.fx.custom_config import PrepareCustomConfig  # noqa: PLC0415
    from torch.ao.quantization.quantize_fx import prepare_qat_fx  # noqa: PLC0415

    mapping = QConfigMapping().set_global(_qconfig(bits, bits)).set_object_type(nn.Embedding, None)
    custom = PrepareCustomConfig()
    if bits < EDGE_BITS:
        # A config covers a layer's weight and output: the input of the last layer is configured at the layer before it.
        custom.set_input_quantized_indexes([0])  # the images already have 8 bits
        widths = _widths(model, bits)
        entering = [*list(widths.values())[1:], EDGE_BITS]
        place = -1
        for name, layer in model.named_children():
            place += isinstance(layer, nn.Conv2d | nn.Linear)
            mapping.set_module_name(name, _qconfig(entering[place], list(widths.values())[place]))
    return prepare_qat_fx(model, mapping, (example,), prepare_custom_config=custom)


def _qconfig(activation_bits: int, weight_bits: int) -> object:
    from torch.ao.quantization import (  # noqa: PLC0415 - slow and deprecated
        FusedMovingAvgObsFakeQuantize,
        MovingAverageMinMaxObserver,
        MovingAveragePerChannelMinMaxObserver,
        QConfig,
    )

    fused = FusedMovingAvgObsFakeQuantize.with_args
    activation = fused(
        observer=MovingAverageMinMaxObserver,
        quant_min=0,
        quant_max=2**activation_bits - 1,
        dtype=torch.quint8,
        reduce_range=False,
    )
    weight = fused(
        observer=MovingAveragePerChannelMinMaxObserver,
        quant_min=-(2 ** (weight_bits - 1)),
        quant_max=2 ** (weight_bits - 1) - 1,
        dtype=torch.qint8,
        qscheme=torch.per_channel_symmetric,
        ch_axis=0,
    )
    return QConfig(activation, weight)


def torchao(model: nn.Module, example: Tensor, bits: int = 8) -> nn.Module:
    """Torchao with its QAT config: dynamic activations per token, weights per channel."""
    _require("torchao")
    if any(isinstance(module, nn.Conv2d) for module in model.modules()):
        raise SkippedError("torchao: no QAT for convolutions")
    from torchao.quantization import quantize_  # noqa: PLC0415 - optional
    from torchao.quantization.qat import IntxFakeQuantizeConfig, QATConfig  # noqa: PLC0415

    kind = getattr(torch, f"int{bits}")
    config = QATConfig(
        activation_config=IntxFakeQuantizeConfig(kind, "per_token", is_symmetric=False),
        weight_config=IntxFakeQuantizeConfig(kind, "per_channel"),
        step="prepare",
    )
    quantize_(model, config)
    model(example)
    return model


def brevitas(model: nn.Module, example: Tensor, bits: int = 8) -> nn.Module:
    """brevitas: its quantized layers replace float layers, compiled as its manual recommends for speed."""
    _require("brevitas")
    os.environ.setdefault("BREVITAS_JIT", "1")
    from brevitas import nn as qnn  # noqa: PLC0415 - optional, and reads the variable above
    from brevitas.quant import (  # noqa: PLC0415
        Int8WeightPerChannelFloat,
        ShiftedUint8ActPerTensorFloat,
        Uint8ActPerTensorFloat,
    )

    after_relu, widths = False, iter(_widths(model, bits).values())
    for owner, name, layer in list(_leaves(model)):
        if isinstance(layer, nn.Conv2d | nn.Linear):
            width = next(widths)
            options = {
                "weight_quant": Int8WeightPerChannelFloat,
                "weight_bit_width": width,
                "input_quant": Uint8ActPerTensorFloat if after_relu else ShiftedUint8ActPerTensorFloat,
                "input_bit_width": width,
                "input_collect_stats_steps": CALIBRATION_STEPS,
            }
            quantized = _brevitas_layer(qnn, layer, options)
            quantized.weight = layer.weight
            if layer.bias is not None:
                quantized.bias = layer.bias
            setattr(owner, name, quantized)
        if not isinstance(layer, nn.MaxPool2d | nn.AdaptiveAvgPool2d | nn.Flatten):
            after_relu = isinstance(layer, nn.ReLU)
    for _ in range(CALIBRATION_STEPS):
        model(example)
    return model


def _brevitas_layer(qnn: object, layer: nn.Module, options: dict) -> nn.Module:
    biased = layer.bias is not None
    if isinstance(layer, nn.Linear):
        return qnn.QuantLinear(layer.in_features, layer.out_features, bias=biased, **options)
    sizes = {"stride": layer.stride, "padding": layer.padding, "groups": layer.groups, "bias": biased}
    return qnn.QuantConv2d(layer.in_channels, layer.out_channels, layer.kernel_size, **sizes, **options)


def modelopt(model: nn.Module, example: Tensor, bits: int = 8) -> nn.Module:
    """Modelopt with its default int8 config: symmetric, calibrated once, frozen scales."""
    _require("modelopt")
    import modelopt.torch.quantization as mtq  # noqa: PLC0415 - optional

    if bits != EDGE_BITS:
        raise SkippedError("modelopt: compared only at 8 bits")
    with redirect_stdout(None):  # modelopt prints the number of its quantizers
        return mtq.quantize(model, mtq.INT8_DEFAULT_CFG, lambda prepared: prepared(example))


def _widths(model: nn.Module, bits: int) -> dict[str, int]:
    """Return the bits of each convolution and linear layer; the first and the last layer have 8 bits."""
    names = [name for name, layer in model.named_modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
    return dict.fromkeys(names, bits) | {names[0]: EDGE_BITS, names[-1]: EDGE_BITS}


def _leaves(module: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    """Return the modules without children in the order of definition, each with its parent and its name there."""
    leaves = []
    for name, child in module.named_children():
        leaves += _leaves(child) if next(child.children(), None) is not None else [(module, name, child)]
    return leaves


def _require(package: str) -> None:
    if find_spec(package) is None:
        raise SkippedError(f"{package}: not installed, run `make bench-tools`")


def versions() -> dict[str, str | None]:
    """Return the versions of the other tools; None for tools that are not installed."""
    installed: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            installed[package] = version(package)
        except PackageNotFoundError:
            installed[package] = None
    return installed


def silence_warnings() -> None:
    """Hide the warnings of other tools about deprecations and missing GPUs; some tools repeat them for every layer."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


PREPARERS: dict[str, Preparer] = {
    "detent": detent_ema,
    "detent, learned scales": detent_learned,
    "torch.ao FX": torch_ao_fx,
    "torchao": torchao,
    "brevitas": brevitas,
    "modelopt, frozen scales": modelopt,
}
INTEGER_PREPARERS: dict[str, Preparer] = {
    "detent, integer products": detent_integer,
    "detent, integer and learned": detent_integer_learned,
}
