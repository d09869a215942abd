"""Decisions: everything that quantizing an ONNX model decides, as one value.

``qo.decide`` looks at data, searches and compares; ``qo.rewrite`` applies what it decided. The same model and the same
decisions give the same file, byte for byte, whatever the machine and the number of threads (and with the same version
of onnx, where that has to convert the model to a newer opset):

====================== ===============================================================================================
target, opset, IR      the runtime that the file is for, and the versions of ONNX that it is written in
constants              floats that ONNX Runtime computed from constants, where another machine may round differently
layers                 specs, weight scales and corrected biases, or why a layer is kept in float
equalized, smoothed    factors between layers (cross-layer equalization, SmoothQuant), in the order of application
placements, ranges     behind which tensors Q/DQ pairs stand, and their scales and zero points
onnx_version           the onnx that converted the model to a newer opset, which another one may do differently
source, data, recipe,  digests and texts that the file carries on; nothing is decided by them
options, written_by
====================== ===============================================================================================

Left out is what follows from these: codes, int32 biases, names, the Max nodes of ``ort_workarounds``. How they follow
is ``rewrite_version``: a detent whose rewrite makes other bytes of the same decisions has another one.

Each value checks itself when it is made; ``qo.rewrite`` checks that it fits the model before it changes anything.
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

VERSION = 2  # of the value and its JSON
REWRITE_VERSION = 2  # of the bytes that rewrite makes of the same decisions
MAX_ENTRIES = 1 << 20  # layers, placements, ...; a model with more is not what anybody wrote
MAX_INDEX_RANK = 16
MAX_BIAS_CODE = (1 << 31) - 1
OPSETS, IR_VERSIONS = range(13, 100), range(8, 11)  # that quantizers can be written in
EQUALIZED_FACTORS = np.float32(1e-3), np.float32(1)  # smallest and largest factor, as equalization limits them
GAIN_DIGITS = 3
SMOOTHED_FACTORS = np.float32(1e-4), np.float32(1e4)


_parse_spec = lru_cache(QuantSpec.parse)  # a model has few specs and many layers
_spec_text = lru_cache(spec_text)


def _spec_from(value: object) -> QuantSpec:
    if isinstance(value, str):
        return _parse_spec(value)
    if isinstance(value, Mapping):
        return QuantSpec.from_dict(value)
    raise SpecError(f"a spec is text such as 'int8/axis0' or an object, got {value!r:.60}")


LEAVES: Mapping[type, Leaf] = {QuantSpec: Leaf(lambda spec: _spec_text(spec) or spec.to_dict(), _spec_from)}


class _ComparedByContent:
    """Values that hold arrays: they are equal where their JSON is."""

    def __eq__(self, other: object) -> bool:
        return encode(self, LEAVES) == encode(other, LEAVES) if type(other) is type(self) else NotImplemented

    def __hash__(self) -> int:
        return hash(json.dumps(encode(self, LEAVES)))


@dataclass(frozen=True)
class QuantizerPlacement:
    """A tensor behind which a Q/DQ pair stands.

    Attributes:
        tensor: its name.
        spec: how it is quantized.
        group: the tensor whose scale and zero point it shares; its own name where it is the first of its group.
        readers: names of the nodes that read the quantized tensor; empty for all.
        clip_min, clip_max: bounds that a Relu or Clip before it enforces; they limited its range when it was decided.
        source_tensor, factor: the tensor whose codes it has, and the factor of its scale; "" where it has its own.
        constants: names of the numbers that its operator reads beside quantized tensors.

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
            raise SpecError(f"{where}: activations of a file have one float scale per tensor, got {self.spec}")
        if not isfinite(self.factor) or self.factor <= 0:
            raise SpecError(f"{where}: its factor must be positive and finite, got {self.factor}")
        _check_unique(where, "readers", self.readers)

    @property
    def is_read_by_all(self) -> bool:
        """Whether every reader of the tensor reads it quantized."""
        return not self.readers


@dataclass(frozen=True)
class RangeDecision:
    """Scale and zero point of a group of activations.

    Attributes:
        scale: a positive, normal float32.
        zero_point: the code of 0.
        clipped: True for the observer's clipping range, False for the min-max range.
        observed_range: smallest and largest value in the calibration data, None where there were none.

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
                raise SpecError(f"observed_range must be finite and in order, got {self.observed_range}")
            object.__setattr__(self, "observed_range", (float(np.float32(lo)), float(np.float32(hi))))

    def params(self, spec: QuantSpec) -> QuantParams:
        """The parameters of a tensor with that spec."""
        if float(np.float32(self.scale)) != self.scale:
            raise ParamsError(f"a scale must be a float32, got {self.scale!r}: round it with float(np.float32(...))")
        return QuantParams(spec, np.float32(self.scale), self.zero_point)


@dataclass(frozen=True, eq=False)
class LayerDecision(_ComparedByContent):
    """What happens to one layer.

    Attributes:
        name: of its node.
        reason: why it is kept in float; "" where it is quantized.
        weight, input: the specs of both; None for what stays float.
        weight_scale, weight_zero_point: arrays in the shape that the weight's granularity gives; None in float.
        bias: what takes the place of its own bias (bias correction): int32 codes in the unit of both scales, as a layer
            with a quantized input has them in the file, or float32; None keeps its own.
        input_range: smallest and largest input that a float32 bias was corrected for.
        index_rank: axes of the indices of a Gather whose table has scales per group; None for all other layers.

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

    def __post_init__(self) -> None:
        for name in ("weight_scale", "weight_zero_point", "bias"):
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else read_only(value))
        self._check()

    def _check(self) -> None:
        where, stored = f"layer {self.name!r}", (self.weight, self.weight_scale, self.weight_zero_point)
        if self.reason:
            others = self.input, self.bias, self.input_range, self.index_rank
            if any(each is not None for each in (*stored, *others)):
                raise SpecError(f"{where} is kept in float ({self.reason}) and must have no specs and no parameters")
            return
        if any(each is None for each in stored):
            raise SpecError(
                f"{where} needs weight, weight_scale and weight_zero_point, or a reason to be kept in float"
            )
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
            raise ParamsError(f"{where}: its weight_scale must be float32 in the shape of {self.weight}")

    def _check_bias(self, where: str) -> None:
        bias = self.bias
        if bias is not None and bias.dtype == np.int32:
            if self.input is None:
                raise SpecError(f"{where}: its bias must be float32, since its input is not quantized")
            if bias.size and np.abs(bias.astype(np.int64)).max() > MAX_BIAS_CODE:
                raise SpecError(f"{where}: its bias must hold codes of at most {MAX_BIAS_CODE}")
        elif bias is not None and (bias.dtype != np.float32 or not np.isfinite(bias).all()):
            raise SpecError(f"{where}: its bias must be int32 codes or finite float32, got {bias.dtype}")
        if self.input_range is not None:
            lo, hi = self.input_range
            if bias is None or not (isfinite(lo) and isfinite(hi) and lo <= hi):
                raise SpecError(f"{where}: input_range is for corrected biases, finite and in order, got {lo}, {hi}")

    @property
    def is_quantized(self) -> bool:
        """Whether its weight is quantized."""
        return not self.reason

    @cached_property
    def weight_params(self) -> QuantParams:
        """The parameters of its weight."""
        if self.weight is None or self.weight_scale is None:
            raise SpecError(f"layer {self.name!r} is kept in float: {self.reason}")
        return QuantParams(self.weight, self.weight_scale, self.weight_zero_point)

    def kept_in_float(self, reason: str) -> "LayerDecision":
        """The same layer with a float weight."""
        return LayerDecision(self.name, reason)


@dataclass(frozen=True, eq=False)
class Equalized(_ComparedByContent):
    """Cross-layer equalization of one tensor: each channel divided by a factor, which the next layers multiply by.

    Attributes:
        tensor: between the layers.
        maker: the layer that makes it.
        readers: the layers that read it.
        factors: float32, one per channel, at most 1.
        strength: exponent of the factors; 1 makes all channels equally large.
        gain_db: how much less quantization error the outputs of the readers have.

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
    """SmoothQuant of one tensor: each channel divided by a factor, which the weights that read it are multiplied by.

    Attributes:
        tensor: the input of the layers.
        layers: that read it.
        factors: float32, one per channel.
        folded: True where the normalization before it takes the division, False for a Mul node.
        strength: exponent of the factors.
        gain_db: how much less quantization error the layers' outputs have.

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
        what = f"smoothed {self.tensor} ({', '.join(self.layers)})"
        return f"{what} with strength {self.strength:g}: {self.gain_db:.1f} dB less noise{cost}"


def _factors(where: str, factors: Array, limits: tuple[np.float32, np.float32]) -> Array:
    """The factors as an array that cannot be written, once they are checked."""
    values, (least, most) = np.asarray(factors), limits
    if values.dtype != np.float32 or values.ndim != 1:
        raise SpecError(f"{where}: its factors must be a vector of float32, got {values.dtype} of shape {values.shape}")
    if not ((values >= least) & (values <= most)).all():  # which NaN is not
        raise SpecError(f"{where}: its factors must lie in {least:g}..{most:g}")
    return read_only(values)


def _check_change(where: str, what: str, layers: tuple[str, ...], strength: float, gain_db: float) -> None:
    """Refuse changes of no layer, of one layer twice, and figures that are not finite."""
    if not layers:
        raise SpecError(f"{where}: its {what} must name at least one layer")
    _check_unique(where, what, layers)
    if not (isfinite(strength) and isfinite(gain_db)):
        raise SpecError(f"{where}: strength and gain_db must be finite, got {strength} and {gain_db}")


@dataclass(frozen=True, eq=False)
class Decisions(_ComparedByContent):
    """Everything that was decided for one model; the parts are tuples in the order of application.

    Attributes:
        version, rewrite_version: the format of this value, and of the bytes that ``qo.rewrite`` makes of it.
        written_by: the version of detent that decided.
        onnx_version: the version of onnx that converted the model to the opset; "" where nothing was converted.
        target: name of the target.
        opset, ir_version: versions of ONNX that the file is written in.
        source, data: digests of the float model and of the calibration data; "" where they are not known.
        recipe, options: JSON texts of the recipe and of the options that are not the defaults.
        constants: computed floats by name.
        layers: a decision for every layer of the model.
        equalized, smoothed: factors, in the order of application.
        placements: of Q/DQ pairs, in order.
        ranges: scale and zero point by group.

    >>> decisions = Decisions(target="openvino", layers=(LayerDecision("fc", "skipped"),))
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

    def __post_init__(self) -> None:
        self._check_versions()
        get_target(self.target)
        for name in ("recipe", "options"):
            if text := getattr(self, name):
                value = parse(text, f"decisions: {name}", error=SpecError)
                object.__setattr__(self, name, json.dumps(value, separators=(",", ":")))
        for name in ("constants", "layers", "equalized", "smoothed", "placements", "ranges"):
            if len(getattr(self, name)) > MAX_ENTRIES:
                raise SpecError(f"decisions: {name} has {len(getattr(self, name))} entries, at most {MAX_ENTRIES}")
        constants = {name: read_only(value) for name, value in self.constants.items()}
        object.__setattr__(self, "constants", MappingProxyType(constants))
        object.__setattr__(self, "ranges", MappingProxyType(dict(self.ranges)))
        _check_unique("decisions", "layers", [each.name for each in self.layers])
        for name in ("equalized", "smoothed", "placements"):
            _check_unique("decisions", name, [each.tensor for each in getattr(self, name)])
        self._check_groups()

    def _check_versions(self) -> None:
        for name, value, supported in (
            ("version", self.version, VERSION),
            ("rewrite_version", self.rewrite_version, REWRITE_VERSION),
        ):
            if value != supported:
                raise SpecError(f"decisions: this detent reads {name} {supported}, got {value!r}: decide again")
        for name, value, allowed in (("opset", self.opset, OPSETS), ("ir_version", self.ir_version, IR_VERSIONS)):
            if type(value) is not int or value not in allowed:
                raise SpecError(f"decisions: {name} must be in {allowed[0]}..{allowed[-1]}, got {value!r}")

    def _check_groups(self) -> None:
        """Refuse groups without a range, ranges without a group, and groups that begin behind their members."""
        known: dict[str, QuantizerPlacement] = {}
        own = set()
        for each in self.placements:
            where = f"placement of {each.tensor!r}"
            if each.source_tensor and each.source_tensor not in known:
                raise SpecError(f"{where}: its source tensor {each.source_tensor!r} has no placement before it")
            if each.group != each.tensor and each.group not in known:
                raise SpecError(f"{where}: its group {each.group!r} has no placement before it")
            first = known.get(each.source_tensor or each.group, each)
            if each.spec != first.spec:
                raise SpecError(f"{where}: its spec must be {first.spec}, as that of {first.tensor!r}, got {each.spec}")
            known[each.tensor] = each
            if each.group == each.tensor and not each.source_tensor:
                own.add(each.group)
        if own != set(self.ranges):
            unknown, missing = sorted(set(self.ranges) - own), sorted(own - set(self.ranges))
            raise SpecError(f"decisions: ranges and groups of placements differ: unknown {unknown}, missing {missing}")
        self.tensor_params()

    def tensor_params(self) -> dict[str, QuantParams]:
        """The parameters of each quantized activation, by tensor."""
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
        """The same with some layers kept in float; Q/DQ pairs that only they read go, too.

        Raises:
            SpecError: there is no such layer, or no reason.
        """
        names = (names,) if isinstance(names, str) else names
        if not reason:
            raise SpecError("a layer that is kept in float needs a reason, such as 'too sensitive'")
        unknown = sorted(set(names) - {each.name for each in self.layers})
        if unknown:
            raise SpecError(f"there are no layers {unknown}: decisions.layers has the names")
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
        """All of it as JSON; ``from_json`` gives it back to the bit."""
        return json.dumps(encode(self, LEAVES), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> "Decisions":
        """The decisions that ``to_json`` wrote.

        Raises:
            FileFormatError: not JSON, unknown or missing keys, values of a wrong type.
            SpecError, ParamsError: values that cannot be applied to any model.
        """
        values = parse(text, "the JSON of decisions")
        check_version(values.get("version"), VERSION, "decisions")
        return decode(cls, values, "decisions", LEAVES)


def scaled(params: QuantParams, factor: float) -> QuantParams:
    """The parameters of a tensor's multiple: the same codes, another scale, rounded once."""
    return QuantParams(params.spec, np.float32(params.scale * np.float64(factor)), params.zero_point)


def _check_unique(where: str, what: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise SpecError(f"{where}: {what} has {name!r} twice")
        seen.add(name)
