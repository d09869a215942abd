"""Decisions: all choices that are made when an ONNX model is quantized, as one object.

``qo.decide`` makes the decisions, and ``qo.rewrite`` applies them to the model. The same model and decisions give the
same file, byte for byte, on every machine and with any number of threads. If the opset is converted, this also needs
the same version of onnx.

====================== ===============================================================================================
target, opset, IR      the runtime that the file is for, and the opset and IR version of the file
constants              results of constant folding by ONNX Runtime; another machine may round them differently
layers                 for each layer, specs, weight scales and corrected bias, or why the layer is kept in float; in
                       subgraphs, also the scale of its input
equalized, smoothed    factors of cross-layer equalization and of SmoothQuant, in the order of application
placements, ranges     the tensors with Q/DQ pairs, and their scales and zero points
float16                whether float constants that are exact in float16 are stored in it
onnx_version           version of the onnx package that converted the opset; other versions may convert differently
source, data, recipe,  digests and texts for the metadata of the file; they do not change the file's graph
options, written_by
====================== ===============================================================================================

Decisions do not contain results that ``qo.rewrite`` computes: weight codes, codes of uncorrected biases, new names, and
the Max nodes of ``ort_workarounds``. If a version of detent writes different bytes for the same decisions, it has a
new ``rewrite_version``.

The classes of this module check their fields on creation. ``qo.rewrite`` rejects decisions that do not fit the model.
"""

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from math import inf, isfinite
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from detent.checks import read_only
from detent.codec import Leaf, check_version, decode, encode, parse
from detent.errors import DetentError, ParamsError, SpecError
from detent.granularity import PerTensor
from detent.onnx_model.targets import get_target
from detent.params import QuantParams
from detent.spec import QuantSpec, spec_text

__all__ = [
    "LEAVES",
    "MAX_BIAS_CODE",
    "REWRITE_VERSION",
    "Decisions",
    "Equalized",
    "LayerDecision",
    "QuantizerPlacement",
    "RangeDecision",
    "Smoothed",
]

Array = NDArray[Any]
T = TypeVar("T")

VERSION = 2  # version of Decisions and of its JSON
REWRITE_VERSION = 7  # changes when qo.rewrite writes different bytes for the same decisions
MAX_ENTRIES = 1 << 20  # limit on layers, placements, ...; real models have thousands
MAX_INDEX_RANK = 16
MAX_BIAS_CODE = (1 << 31) - 1
OPSETS, IR_VERSIONS = range(13, 100), range(8, 11)  # versions that a quantized file can have
EQUALIZED_FACTORS = np.float32(1e-3), np.float32(1)  # smallest and largest factor of equalization
GAIN_DIGITS = 3  # decimals to which a gain in dB is rounded
SMOOTHED_FACTORS = np.float32(1e-4), np.float32(1e4)  # smallest and largest factor of SmoothQuant


_parse_spec = lru_cache(QuantSpec.parse)  # cached, because a model has few specs and many layers
_spec_text = lru_cache(spec_text)


def _spec_from(value: object) -> QuantSpec:
    if isinstance(value, str):
        return _parse_spec(value)
    if isinstance(value, Mapping):
        return QuantSpec.from_dict(value)
    raise SpecError(f"a spec must be text such as 'int8/axis0', or a JSON object, got {value!r:.60}")


LEAVES: Mapping[type, Leaf] = {QuantSpec: Leaf(lambda spec: _spec_text(spec) or spec.to_dict(), _spec_from)}


class _ComparedByContent:
    """Base class of values that hold arrays: two values are equal if their JSON is equal."""

    def __eq__(self, other: object) -> bool:
        return encode(self, LEAVES) == encode(other, LEAVES) if type(other) is type(self) else NotImplemented

    def __hash__(self) -> int:
        return hash(json.dumps(encode(self, LEAVES)))


@dataclass(frozen=True)
class QuantizerPlacement:
    """A tensor that gets a Q/DQ pair.

    Attributes:
        tensor: name of the tensor.
        spec: spec of the tensor's codes.
        group: first tensor of the group that shares one scale and zero point; ``tensor`` itself if it is the first.
        readers: names of the nodes that read the quantized values; empty means all nodes that read the tensor.
        clip_min: lower bound of the Relu or Clip before the tensor; -inf without one.
        clip_max: upper bound of the Relu or Clip before the tensor; inf without one.
        source_tensor: the tensor whose codes this tensor shares; "" if it has its own codes.
        factor: scale of this tensor divided by the scale of ``source_tensor``.
        constants: names of scalar constants that are also quantized, for the operator that computes this tensor.

    >>> QuantizerPlacement("x", QuantSpec("uint8"), "x", ("fc",)).is_read_by_all
    False
    """

    tensor: str
    spec: QuantSpec
    group: str
    readers: tuple[str, ...] = ()
    clip_min: float = -inf
    clip_max: float = inf
    source_tensor: str = ""
    factor: float = 1.0
    constants: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        where = f"placement of {self.tensor!r}"
        if self.spec.granularity != PerTensor() or self.spec.scale_format != "float":
            raise SpecError(f"{where}: expected a spec with one float scale per tensor, got {self.spec}")
        if not isfinite(self.factor) or self.factor <= 0:
            raise SpecError(f"{where}: factor must be positive and finite, got {self.factor}")
        _check_unique(where, "readers", self.readers)

    @property
    def is_read_by_all(self) -> bool:
        """Whether all nodes that read the tensor read its quantized values."""
        return not self.readers


@dataclass(frozen=True)
class RangeDecision:
    """Scale and zero point of a group of activations.

    Attributes:
        scale: positive, normal float32.
        zero_point: the code that stands for 0.
        clipped: whether the range is the observer's clipping range; other ranges include all observed values.
        observed_range: smallest and largest value in the calibration data; None without calibration data.

    >>> RangeDecision(0.5, 3).params(QuantSpec("uint8"))
    dt.QuantParams('uint8/tensor/affine', scale=0.5, zero_point=3)
    """

    scale: float
    zero_point: int
    clipped: bool = False
    observed_range: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if self.observed_range is not None:
            lo, hi = self.observed_range
            if not (isfinite(lo) and isfinite(hi) and lo <= hi):
                raise SpecError(
                    f"got observed_range={self.observed_range}, expected finite numbers, the smaller one first"
                )
            object.__setattr__(self, "observed_range", (float(np.float32(lo)), float(np.float32(hi))))

    def params(self, spec: QuantSpec) -> QuantParams:
        """Return the quantization parameters: this scale and zero point, with ``spec``."""
        if float(np.float32(self.scale)) != self.scale:
            raise ParamsError(f"scale must be a float32 value, got {self.scale!r}: use float(np.float32(scale))")
        return QuantParams(spec, np.float32(self.scale), self.zero_point)


@dataclass(frozen=True, eq=False)
class LayerDecision(_ComparedByContent):
    """Decision for one layer.

    Attributes:
        name: name of its node.
        reason: why the layer is kept in float; "" if it is quantized.
        weight: spec of its weight; None if the layer is kept in float, or is a matmul of two activations.
        input: spec of its input, or of both inputs of a matmul of two activations; None if the input is float or
            quantized dynamically.
        weight_scale: scales of its weight, float32, one per parameter set; None if ``weight`` is None.
        weight_zero_point: zero points of its weight, one per parameter set; None if ``weight`` is None.
        bias: corrected bias, as int32 codes or as float32; None keeps the model's bias. The scale of int32 codes is the
            input scale times the weight scale.
        input_range: smallest and largest input in the samples that bias correction used; None without a float32 bias.
        index_rank: rank of the indices of a Gather with per-group scales; None for all other layers.
        dynamic_input: spec of its input, if the file quantizes the input with the range of the current batch (dynamic
            quantization); None otherwise.
        own_range: scale and zero point of its input, if the layer is in a subgraph or shares its weight with one; the
            inputs of other layers have placements.

    >>> layer = LayerDecision("fc", "", QuantSpec("int8"), None, np.float32(0.5), np.int32(0))
    >>> layer.weight_params
    dt.QuantParams('int8/tensor', scale=0.5, zero_point=0)
    >>> layer.kept_in_float("too sensitive").is_quantized
    False
    """

    name: str
    reason: str = ""
    weight: QuantSpec | None = None
    input: QuantSpec | None = None
    weight_scale: Array | None = None
    weight_zero_point: Array | None = None
    bias: Array | None = None
    input_range: tuple[float, float] | None = None
    index_rank: int | None = None
    dynamic_input: QuantSpec | None = None
    own_range: RangeDecision | None = None

    def __post_init__(self) -> None:
        for name in ("weight_scale", "weight_zero_point", "bias"):
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else read_only(value))
        self._check()

    def _check(self) -> None:
        where, stored = f"layer {self.name!r}", (self.weight, self.weight_scale, self.weight_zero_point)
        if self.reason:
            others = self.input, self.bias, self.input_range, self.index_rank, self.dynamic_input, self.own_range
            if any(each is not None for each in (*stored, *others)):
                raise SpecError(
                    f"{where} is kept in float ({self.reason}), but has specs or parameters: omit either the reason or "
                    "the specs and parameters"
                )
            return
        if self.is_activation_matmul:
            return
        if any(each is None for each in stored):
            raise SpecError(
                f"{where} lacks weight, weight_scale or weight_zero_point: pass all three, or a reason to keep the "
                "layer in float"
            )
        if self.input is not None and self.dynamic_input is not None:
            raise SpecError(f"{where} has input and dynamic_input: omit one of them")
        if self.own_range is not None:
            self._check_own_range(where, self.own_range)
        self._check_bias(where)
        if self.index_rank is not None and not 0 <= self.index_rank <= MAX_INDEX_RANK:
            raise SpecError(f"{where}: index_rank must be in 0..{MAX_INDEX_RANK}, got {self.index_rank}")
        try:
            params = self.weight_params
        except DetentError as error:
            raise ParamsError(f"{where}: {error}") from error
        if (
            params.scale.dtype != np.float32
            or self.weight_scale is None
            or params.scale.shape != self.weight_scale.shape
        ):
            raise ParamsError(
                f"{where}: for {self.weight}, weight_scale must be float32 of shape {params.scale.shape}, got "
                f"{params.scale.dtype} of shape {np.asarray(self.weight_scale).shape}"
            )

    def _check_own_range(self, where: str, own_range: RangeDecision) -> None:
        if self.input is None:
            raise SpecError(f"{where} has own_range, but input is None: pass a spec as input=, or omit own_range")
        try:
            own_range.params(self.input)
        except DetentError as error:
            raise ParamsError(f"{where}: own_range: {error}") from error

    def _check_bias(self, where: str) -> None:
        bias = self.bias
        if bias is not None and bias.dtype == np.int32:
            if self.input is None:
                raise SpecError(f"{where}: bias must be float32, because the input is not quantized; got int32")
            if bias.size and np.abs(bias.astype(np.int64)).max() > MAX_BIAS_CODE:
                raise SpecError(
                    f"{where}: bias codes must be in -{MAX_BIAS_CODE}..{MAX_BIAS_CODE}, got {bias.min()}..{bias.max()}"
                )
        elif bias is not None and (bias.dtype != np.float32 or not np.isfinite(bias).all()):
            given = "NaN or infinity" if bias.dtype == np.float32 else bias.dtype
            raise SpecError(f"{where}: bias must be int32 codes, or finite values in float32, got {given}")
        if self.input_range is not None:
            lo, hi = self.input_range
            if bias is None or not (isfinite(lo) and isfinite(hi) and lo <= hi):
                raise SpecError(
                    f"{where}: got input_range=({lo}, {hi}), expected finite numbers, the smaller one first; "
                    "if bias= is None, input_range= must be None, too"
                )

    @property
    def is_quantized(self) -> bool:
        """Whether the layer is quantized."""
        return not self.reason

    @property
    def has_quantized_input(self) -> bool:
        """Whether the layer's input is quantized, with a fixed scale or dynamically."""
        return self.input is not None or self.dynamic_input is not None

    @property
    def is_activation_matmul(self) -> bool:
        """Whether the layer is a quantized matmul of two activations, which has an input spec and nothing else."""
        others = self.weight, self.weight_scale, self.weight_zero_point, self.bias, self.input_range
        is_plain = all(each is None for each in (*others, self.index_rank, self.dynamic_input, self.own_range))
        return is_plain and not self.reason and self.input is not None

    @cached_property
    def weight_params(self) -> QuantParams:
        """Quantization parameters of the layer's weight."""
        if self.weight is None or self.weight_scale is None:
            why = f"it is kept in float: {self.reason}" if self.reason else "it is a matmul of two activations"
            raise SpecError(f"layer {self.name!r} has no weight parameters, because {why}")
        return QuantParams(self.weight, self.weight_scale, self.weight_zero_point)

    def kept_in_float(self, reason: str) -> "LayerDecision":
        """Return a decision that keeps this layer in float for ``reason``."""
        return LayerDecision(self.name, reason)


@dataclass(frozen=True, eq=False)
class Equalized(_ComparedByContent):
    """Cross-layer equalization of one tensor.

    Each channel of the tensor is divided by a factor. The weights of the layers that read it are multiplied by that
    factor.

    Attributes:
        tensor: the tensor between the layers.
        maker: the layer that computes the tensor.
        readers: the layers that read the tensor.
        factors: float32 array, one factor per channel, at most 1.
        strength: exponent in the formula of the factors; 1 gives all channels the same range.
        gain_db: gain in SQNR at the readers' outputs, in dB.

    >>> print(Equalized("x", "a", ("b",), np.float32([1.0, 0.5]), 1.0, 6.0))
    equalized x (a, b) with strength 1: 6.0 dB less noise
    """

    tensor: str
    maker: str
    readers: tuple[str, ...]
    factors: Array
    strength: float
    gain_db: float

    def __post_init__(self) -> None:
        where = f"equalized {self.tensor!r}"
        object.__setattr__(self, "factors", _factors(where, self.factors, EQUALIZED_FACTORS))
        _check_change(where, "readers", self.readers, self.strength, self.gain_db)
        object.__setattr__(self, "gain_db", round(self.gain_db, GAIN_DIGITS))

    def __str__(self) -> str:
        layers = ", ".join((self.maker, *self.readers))
        return f"equalized {self.tensor} ({layers}) with strength {self.strength:g}: {self.gain_db:.1f} dB less noise"


@dataclass(frozen=True, eq=False)
class Smoothed(_ComparedByContent):
    """SmoothQuant of one tensor.

    Each channel of the tensor is divided by a factor. The weights of the layers that read it are multiplied by that
    factor.

    Attributes:
        tensor: the input of the layers.
        layers: the layers that read the tensor.
        factors: float32 array, one factor per channel.
        folded: True if the division is folded into the normalization before the tensor, False if it is a Mul node.
        strength: exponent alpha in the formula of the factors.
        gain_db: gain in SQNR at the layers' outputs, in dB.

    >>> print(Smoothed("x", ("fc",), np.float32([4.0, 0.5]), True, 0.5, 6.0))
    smoothed x (fc) with strength 0.5: 6.0 dB less noise
    """

    tensor: str
    layers: tuple[str, ...]
    factors: Array
    folded: bool
    strength: float
    gain_db: float

    def __post_init__(self) -> None:
        where = f"smoothed {self.tensor!r}"
        object.__setattr__(self, "factors", _factors(where, self.factors, SMOOTHED_FACTORS))
        _check_change(where, "layers", self.layers, self.strength, self.gain_db)
        object.__setattr__(self, "gain_db", round(self.gain_db, GAIN_DIGITS))

    def __str__(self) -> str:
        cost = "" if self.folded else ", at the cost of a Mul node"
        layers = ", ".join(self.layers)
        gain = f"{self.gain_db:.1f} dB less noise{cost}"
        return f"smoothed {self.tensor} ({layers}) with strength {self.strength:g}: {gain}"


def _factors(where: str, factors: Array, limits: tuple[np.float32, np.float32]) -> Array:
    """Check factors, and return them as a read-only array."""
    values, (lowest, highest) = np.asarray(factors), limits
    if values.dtype != np.float32 or values.ndim != 1:
        raise SpecError(f"{where}: factors must be a float32 vector, got {values.dtype} of shape {values.shape}")
    if not ((values >= lowest) & (values <= highest)).all():  # comparisons with NaN are false
        got = f"{values.min():g}..{values.max():g}"
        raise SpecError(f"{where}: factors must be in {lowest:g}..{highest:g}, got {got}")
    return read_only(values)


def _check_change(where: str, what: str, layers: tuple[str, ...], strength: float, gain_db: float) -> None:
    """Reject an empty list of layers, a repeated layer, and a strength or gain that is not finite."""
    if not layers:
        raise SpecError(f"{where}: {what} is empty, expected at least one layer")
    _check_unique(where, what, layers)
    if not (isfinite(strength) and isfinite(gain_db)):
        raise SpecError(f"{where}: strength and gain_db must be finite, got {strength} and {gain_db}")


@dataclass(frozen=True, eq=False, repr=False)
class Decisions(_ComparedByContent):
    """All decisions for one model; the module docstring has an overview.

    Attributes:
        version: version of this class and of its JSON.
        rewrite_version: changes when ``qo.rewrite`` writes different bytes for the same decisions.
        written_by: version of detent that made the decisions.
        onnx_version: version of the onnx package that converted the opset; "" if it was not converted.
        target: name of the target, such as "onnxruntime".
        opset: opset of the quantized file.
        ir_version: IR version of the quantized file.
        source: digest of the float model; "" if unknown.
        data: digest of the calibration data; "" without calibration data.
        recipe: the recipe as JSON.
        options: the options of ``qo.decide`` that differ from their defaults, as JSON.
        constants: results of constant folding that another machine may round differently, by name.
        layers: a decision for every layer of the model.
        equalized: cross-layer equalization of tensors, in the order of application.
        smoothed: SmoothQuant of tensors, in the order of application.
        placements: tensors with Q/DQ pairs, in graph order.
        ranges: scale and zero point of each group of placements, by the group's name.
        float16: whether the file stores constants of float parts in float16, if their values are exact in it.

    >>> decisions = Decisions(target="openvino", layers=(LayerDecision("fc", "skipped"),))
    >>> decisions
    <Decisions for openvino: 0 of 1 layers quantized, 0 Q/DQ pairs, 0 equalized, 0 smoothed>
    >>> Decisions.from_json(decisions.to_json()) == decisions
    True
    >>> Decisions(target="openvino", opset=9)
    Traceback (most recent call last):
    ...
    detent.errors.SpecError: decisions: opset must be in 13..99, got 9
    """

    version: int = VERSION
    rewrite_version: int = REWRITE_VERSION
    written_by: str = ""
    onnx_version: str = ""
    target: str = "onnxruntime"
    opset: int = OPSETS[0]
    ir_version: int = IR_VERSIONS[0]
    source: str = ""
    data: str = ""
    recipe: str = ""
    options: str = ""
    constants: Mapping[str, Array] = field(default_factory=dict)
    layers: tuple[LayerDecision, ...] = ()
    equalized: tuple[Equalized, ...] = ()
    smoothed: tuple[Smoothed, ...] = ()
    placements: tuple[QuantizerPlacement, ...] = ()
    ranges: Mapping[str, RangeDecision] = field(default_factory=dict)
    float16: bool = False

    def __post_init__(self) -> None:
        self._check_versions()
        get_target(self.target)
        for name in ("recipe", "options"):
            if text := getattr(self, name):
                value = parse(text, f"decisions: {name}", error=SpecError)
                object.__setattr__(self, name, json.dumps(value, separators=(",", ":")))
        for name in ("constants", "layers", "equalized", "smoothed", "placements", "ranges"):
            if len(getattr(self, name)) > MAX_ENTRIES:
                raise SpecError(
                    f"decisions: {name} has {len(getattr(self, name))} entries, expected at most {MAX_ENTRIES}"
                )
        constants = {name: read_only(value) for name, value in self.constants.items()}
        object.__setattr__(self, "constants", MappingProxyType(constants))
        object.__setattr__(self, "ranges", MappingProxyType(dict(self.ranges)))
        _check_unique("decisions", "layers", [each.name for each in self.layers])
        for name in ("equalized", "smoothed", "placements"):
            _check_unique("decisions", name, [each.tensor for each in getattr(self, name)])
        self._check_groups()

    def __repr__(self) -> str:
        quantized = sum(each.is_quantized for each in self.layers)
        return (
            f"<Decisions for {self.target}: {quantized} of {len(self.layers)} layers quantized, {len(self.placements)} "
            f"Q/DQ pairs, {len(self.equalized)} equalized, {len(self.smoothed)} smoothed>"
        )

    def _check_versions(self) -> None:
        for name, value, supported in (
            ("version", self.version, VERSION),
            ("rewrite_version", self.rewrite_version, REWRITE_VERSION),
        ):
            if value != supported:
                is_newer = type(value) is int and value > supported
                advice = "update detent, or call qo.decide again" if is_newer else "call qo.decide again"
                raise SpecError(
                    f"decisions: got {name} {value!r}, but this version of detent reads {supported}: {advice}"
                )
        for name, value, allowed in (("opset", self.opset, OPSETS), ("ir_version", self.ir_version, IR_VERSIONS)):
            if type(value) is not int or value not in allowed:
                raise SpecError(f"decisions: {name} must be in {allowed[0]}..{allowed[-1]}, got {value!r}")

    def _check_groups(self) -> None:
        """Reject groups without a range, ranges without a group, and placements before their group's first tensor."""
        earlier: dict[str, QuantizerPlacement] = {}
        own = set()
        for each in self.placements:
            where = f"placement of {each.tensor!r}"
            if each.source_tensor and each.source_tensor not in earlier:
                raise SpecError(
                    f"{where}: source_tensor {each.source_tensor!r} has no placement before this one: add one, or "
                    "reorder placements"
                )
            if each.group != each.tensor and each.group not in earlier:
                raise SpecError(
                    f"{where}: {each.group!r}, the first tensor of its group, has no placement before this one: add "
                    "one, or reorder placements"
                )
            first = earlier.get(each.source_tensor or each.group, each)
            if each.spec != first.spec:
                raise SpecError(f"{where}: got spec {each.spec}, expected {first.spec}, the spec of {first.tensor!r}")
            earlier[each.tensor] = each
            if each.group == each.tensor and not each.source_tensor:
                own.add(each.group)
        if own != set(self.ranges):
            unknown, missing = sorted(set(self.ranges) - own), sorted(own - set(self.ranges))
            raise SpecError(f"decisions: ranges must have one entry per group (unknown: {unknown}, missing: {missing})")
        self.tensor_params()

    def tensor_params(self) -> dict[str, QuantParams]:
        """Return the parameters of each quantized activation, by tensor name."""
        return dict(self._tensor_params)

    @cached_property
    def _tensor_params(self) -> Mapping[str, QuantParams]:
        params: dict[str, QuantParams] = {}
        for each in self.placements:
            try:
                if each.source_tensor:
                    params[each.tensor] = scaled(params[each.source_tensor], each.factor)
                elif each.group == each.tensor:
                    params[each.tensor] = self.ranges[each.group].params(each.spec)
                else:
                    params[each.tensor] = params[each.group]
            except DetentError as error:
                raise ParamsError(f"placement of {each.tensor!r}: {error}") from error
        return params

    def with_layers_in_float(self, names: Collection[str], reason: str) -> "Decisions":
        """Return these decisions with some layers kept in float, and without Q/DQ pairs that only these layers read.

        Raises:
            SpecError: a name is not the name of a layer, or the reason is empty.
        """
        names = (names,) if isinstance(names, str) else names
        if not reason:
            raise SpecError("reason= is empty: pass a text such as 'too sensitive'")
        unknown = sorted(set(names) - {each.name for each in self.layers})
        if unknown:
            raise SpecError(f"unknown layers {unknown}: decisions.layers lists the names")
        layers = tuple(each.kept_in_float(reason) if each.name in names else each for each in self.layers)
        placements = []
        for each in self.placements:
            readers = tuple(name for name in each.readers if name not in names)
            if each.is_read_by_all or readers:
                placements.append(replace(each, readers=readers))
        groups = {each.group for each in placements}
        ranges = {group: each for group, each in self.ranges.items() if group in groups}
        return replace(self, layers=layers, placements=tuple(placements), ranges=ranges)

    def to_json(self) -> str:
        """Return the decisions as JSON; ``from_json`` restores them bit for bit."""
        return json.dumps(encode(self, LEAVES), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> "Decisions":
        """Parse decisions from the JSON of ``to_json``.

        Raises:
            FileFormatError: the text is not JSON, has unknown or missing keys, or a value has a wrong type.
            SpecError, ParamsError: a value cannot be applied to any model.
        """
        values = parse(text, "the JSON of decisions")
        check_version(values.get("version"), VERSION, "decisions")
        values.setdefault("float16", False)  # earlier versions wrote neither it nor dynamic_input
        layers = values.get("layers")
        for each in layers if isinstance(layers, list) else ():
            if isinstance(each, dict):
                each.setdefault("dynamic_input", None)
                each.setdefault("own_range", None)
        return decode(cls, values, "decisions", LEAVES)


def scaled(params: QuantParams, factor: float) -> QuantParams:
    """Return the parameters of a tensor times a factor: the codes stay, and the new scale is rounded once."""
    return QuantParams(params.spec, np.float32(params.scale * np.float64(factor)), params.zero_point)


def _check_unique(where: str, what: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise SpecError(f"{where}: {name!r} occurs twice in {what}: remove one of these entries")
        seen.add(name)
