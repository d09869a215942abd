"""Mixtures: llama.cpp's choice of a type for every tensor, for each name such as Q4_K_M.

A mixture has a default type, and gives more bits to tensors that are sensitive to quantization: values, the second
matrix of the feed-forward layer, the output of attention, and the output matrix. In models without an output matrix,
the embedding takes its type. Vectors, norms, routers and position embeddings stay float32.

If the block size of a type does not divide the rows of a tensor, llama.cpp uses a type with smaller blocks, or float16;
``TypeChoice.fallbacks`` says where and why. Where llama.cpp rejects the model, because a type with blocks of 32 does
not fit either, float16 is used.

``L`` is the number of blocks. Blocks that get more bits in Q4_K_M and Q5_K_M are the first and last eighth, and every
third block between them.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from re import compile as regex
from types import MappingProxyType

from detent.checkpoint_files.target_model import GgufModel, MetadataEntry, TargetTensor
from detent.errors import SpecError, closest
from detent.gguf import BLOCK_FORMATS, type_format

__all__ = [
    "FILE_TYPES",
    "MIXTURES",
    "Mixture",
    "TypeChoice",
    "choose_types",
    "file_metadata",
    "get_mixture",
    "is_float_tensor",
    "tensor_types",
]

QUANTIZATION_VERSION = 2
_BLOCK_NUMBER = regex(r"blk\.(\d+)\.")
# Weights that llama.cpp does not quantize, among those that the architectures of detent have.
_FLOAT_PARTS = ("_norm.weight", "ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight")
_FLOAT_NAMES = ("position_embd.weight", "token_types.weight")


@dataclass(frozen=True)
class TensorRole:
    """A tensor and what decides on its type.

    Attributes:
        kind: role of the tensor: "embedding", "output", "qkv", "value", "key", "query", "attention_output", "up",
            "gate", "down" or "other".
        index: number of earlier tensors of this kind; for the feed-forward layers of models with experts, the block.
        count: number of tensors of this kind; for feed-forward layers, the number of blocks.
        model: the model.
        importance: whether an importance matrix is used.
        is_stacked: whether the tensor has the matrices of several experts.
    """

    kind: str
    index: int
    count: int
    model: GgufModel
    importance: bool
    is_stacked: bool = False

    @property
    def heads_per_value(self) -> int:
        """The number of attention heads that share keys and values."""
        heads, kv_heads = self.model.heads
        return heads // kv_heads if kv_heads else 0

    @property
    def has_8_experts(self) -> bool:
        """Whether the model has 8 experts, as Mixtral 8x7B."""
        return self.model.expert_count == 8

    @property
    def is_70b(self) -> bool:
        """Whether llama.cpp treats the model as one of 70B parameters."""
        heads, kv_heads = self.model.heads
        if self.model.block_count != 80 or self.has_8_experts:
            return False
        return self.model.architecture == "qwen2" or (self.model.architecture == "llama" and heads != kv_heads)

    def is_in_first(self, parts: int) -> bool:
        """Return whether the tensor is in the first of so many equal parts of the model."""
        return self.index < self.count // parts

    @property
    def gets_more_bits(self) -> bool:
        """Whether the tensor is in the first or last eighth of the model, or a third block between them."""
        eighth = self.count // 8
        return self.index < eighth or self.index >= 7 * self.count // 8 or (self.index - eighth) % 3 == 2


Choice = Callable[[TensorRole], str | None]


@dataclass(frozen=True)
class Mixture:
    """A named choice of types.

    Attributes:
        name: name, such as "Q4_K_M".
        file_type: number of ``general.file_type``.
        default: type of tensors without a rule.
        rules: functions by kind of tensor that return a type, or None for the default.
        needs_importance: whether tensors of the default type need an importance matrix.
    """

    name: str
    file_type: int
    default: str
    rules: Mapping[str, Choice] = field(default_factory=dict, compare=False)
    needs_importance: bool = False

    @property
    def is_quantized(self) -> bool:
        """Whether the default type is a block format."""
        return self.default not in ("F32", "F16", "BF16")


@dataclass(frozen=True)
class TypeChoice:
    """The type of every tensor of a file.

    Attributes:
        mixture: name of the mixture.
        types: type by tensor name, such as "Q4_K" or "F32".
        fallbacks: reason by name of a tensor whose rows do not fit the type of the mixture.
    """

    mixture: str
    types: dict[str, str]
    fallbacks: dict[str, str]


def _always(name: str) -> Choice:
    return lambda _: name


def _if_shared(name: str, otherwise: str | None = None) -> Choice:
    """Choose a type if 4 or more heads share their values, as llama.cpp does for grouped-query attention."""
    return lambda role: name if role.heads_per_value >= 4 else otherwise


def _first(count: int, name: str, otherwise: str | None = None) -> Choice:
    return lambda role: name if role.index < count else otherwise


def _first_part(parts: int, name: str, otherwise: str | None = None) -> Choice:
    return lambda role: name if role.is_in_first(parts) else otherwise


def _more_bits(name: str) -> Choice:
    return lambda role: name if role.gets_more_bits else None


def _attention_output(otherwise: str | None = None) -> Choice:
    """Choose Q5_K for models of 8 experts."""
    return lambda role: "Q5_K" if role.has_8_experts else otherwise


def _first_eighth_if(importance: bool, name: str) -> Choice:
    return lambda role: name if role.importance is importance and role.is_in_first(8) else None


def _mxfp4(role: TensorRole) -> str:
    return "MXFP4" if role.is_stacked else "Q8_0"


_IQ4_RULES = {
    "value": _if_shared("Q5_K"),
    "down": _first_eighth_if(False, "Q5_K"),
    "attention_output": _attention_output(),
}
_KINDS = ("embedding", "output", "qkv", "value", "key", "query", "attention_output", "up", "gate", "down", "other")

_ALL = (
    Mixture("F32", 0, "F32"),
    Mixture("F16", 1, "F16"),
    Mixture("BF16", 32, "BF16"),
    Mixture("Q4_0", 2, "Q4_0", {"down": _first_eighth_if(True, "Q4_1")}),
    Mixture("Q4_1", 3, "Q4_1"),
    Mixture("Q5_0", 8, "Q5_0", {"down": _first_eighth_if(True, "Q5_1")}),
    Mixture("Q5_1", 9, "Q5_1"),
    Mixture("Q8_0", 7, "Q8_0"),
    Mixture(
        "Q2_K",
        10,
        "Q2_K",
        {
            "value": _if_shared("Q4_K", "Q3_K"),
            "down": _always("Q3_K"),
            "attention_output": _attention_output("Q3_K"),
        },
    ),
    Mixture("Q2_K_S", 21, "Q2_K", {"value": _if_shared("Q4_K"), "down": _first_part(8, "Q4_K")}, needs_importance=True),
    Mixture("Q3_K_S", 11, "Q3_K", {"attention_output": _attention_output()}),
    Mixture(
        "Q3_K_M",
        12,
        "Q3_K",
        {
            "value": _first(2, "Q5_K", "Q4_K"),
            "down": _first_part(16, "Q5_K", "Q4_K"),
            "attention_output": _attention_output("Q4_K"),
        },
    ),
    Mixture(
        "Q3_K_L",
        13,
        "Q3_K",
        {
            "value": _always("Q5_K"),
            "down": _always("Q5_K"),
            "attention_output": lambda role: None if role.has_8_experts else "Q5_K",
        },
    ),
    Mixture(
        "Q4_K_S",
        14,
        "Q4_K",
        {
            "value": _first(4, "Q5_K"),
            "down": _first_part(8, "Q5_K"),
            "attention_output": _attention_output(),
        },
    ),
    Mixture(
        "Q4_K_M",
        15,
        "Q4_K",
        {"value": _more_bits("Q6_K"), "down": _more_bits("Q6_K"), "attention_output": _attention_output()},
    ),
    Mixture("Q5_K_S", 16, "Q5_K"),
    Mixture("Q5_K_M", 17, "Q5_K", {"value": _more_bits("Q6_K"), "down": _more_bits("Q6_K")}),
    Mixture("Q6_K", 18, "Q6_K"),
    Mixture("IQ4_NL", 25, "IQ4_NL", _IQ4_RULES),
    Mixture("IQ4_XS", 30, "IQ4_XS", _IQ4_RULES),
    Mixture("MXFP4_MOE", 38, "MXFP4", dict.fromkeys(_KINDS, _mxfp4)),
)
MIXTURES: Mapping[str, Mixture] = MappingProxyType({mixture.name: mixture for mixture in _ALL})
FILE_TYPES: Mapping[str, int] = MappingProxyType({mixture.name: mixture.file_type for mixture in _ALL})
ALIASES: Mapping[str, str] = MappingProxyType(
    {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M", "MXFP4": "MXFP4_MOE"}
)
# The type that llama.cpp uses if rows do not fit: that of the block format, or float16.
_FALLBACKS: Mapping[str, str] = MappingProxyType(
    {form.type_name: form.fallback.upper() or "F16" for form in BLOCK_FORMATS.values()}
)


def get_mixture(name: str) -> Mixture:
    """Return the mixture of this name; "Q4_K" is "Q4_K_M", as in llama.cpp.

    Raises:
        SpecError: unknown name; the message suggests the closest name.

    >>> get_mixture("q4_k").name
    'Q4_K_M'
    """
    upper = name.upper()
    mixture = MIXTURES.get(ALIASES.get(upper, upper))
    if mixture is None:
        raise SpecError(f"unknown mixture {name!r}{closest(upper, MIXTURES)} expected {', '.join(MIXTURES)}")
    return mixture


def file_metadata(mixture: str) -> tuple[MetadataEntry, ...]:
    """Return the metadata entries that depend on the mixture.

    >>> file_metadata("Q4_K_M")[0]
    MetadataEntry(key='general.file_type', type='uint32', value=15)
    """
    return (
        MetadataEntry("general.file_type", "uint32", get_mixture(mixture).file_type),
        MetadataEntry("general.quantization_version", "uint32", QUANTIZATION_VERSION),
    )


def tensor_types(model: GgufModel, mixture: str, *, importance: bool = False) -> dict[str, str]:
    """Return the type of every tensor of a model; see ``choose_types``."""
    return choose_types(model, mixture, importance=importance).types


def choose_types(model: GgufModel, mixture: str, *, importance: bool = False) -> TypeChoice:
    """Choose the type of every tensor as llama.cpp does.

    Args:
        model: the model; its metadata have the number of blocks, heads and experts.
        mixture: name of the mixture.
        importance: whether an importance matrix is used.

    Raises:
        SpecError: unknown mixture, or one that needs an importance matrix.
    """
    chosen = get_mixture(mixture)
    if chosen.needs_importance and not importance:
        raise SpecError(f"{chosen.name} needs an importance matrix: pass importance=, or use Q2_K")
    types: dict[str, str] = {}
    fallbacks: dict[str, str] = {}
    for tensor, role in _roles(model, importance):
        if is_float_tensor(tensor):
            types[tensor.name] = "F32"
            continue
        name = _mixture_type(chosen, role, tensor) if chosen.is_quantized else chosen.default
        types[tensor.name] = _fitting(name, tensor.columns)
        if types[tensor.name] != name:
            fallbacks[tensor.name] = (
                f"{types[tensor.name]} instead of {name}: rows of {tensor.columns} are not a multiple of "
                f"{_block_size(name)}"
            )
    return TypeChoice(chosen.name, types, fallbacks)


def is_float_tensor(tensor: TargetTensor) -> bool:
    """Return whether a tensor is float32 in every GGUF file: vectors, norms, routers and position embeddings."""
    if len(tensor.shape) < 2 or tensor.row_count == 1 or not tensor.name.endswith("weight"):
        return True
    return tensor.name in _FLOAT_NAMES or any(part in tensor.name for part in _FLOAT_PARTS)


def _roles(model: GgufModel, importance: bool) -> Iterable[tuple[TargetTensor, TensorRole]]:
    """Return every tensor with its role, in the order of llama.cpp."""
    is_tied = all(tensor.name != "output.weight" for tensor in model.tensors)
    values = sum(_kind(tensor.name) in ("value", "qkv") for tensor in model.tensors)
    seen: dict[str, int] = {}
    for tensor in model.tensors:
        kind = _kind(tensor.name)
        kind = {"qkv": "value"}.get(kind, "output" if kind == "embedding" and is_tied else kind)
        index, count = seen.get(kind, 0), values if kind == "value" else model.block_count
        match = _BLOCK_NUMBER.match(tensor.name)
        if kind in ("up", "gate", "down") and model.expert_count > 1 and match:
            index = int(match[1])
        elif not is_float_tensor(tensor):
            seen[kind] = index + 1
        yield tensor, TensorRole(kind, index, count, model, importance, len(tensor.shape) == 3 and tensor.shape[0] > 1)


def _kind(name: str) -> str:
    if name in ("output.weight", "token_embd.weight"):
        return "output" if name == "output.weight" else "embedding"
    for part, kind in (
        ("attn_qkv.weight", "qkv"),
        ("attn_v.weight", "value"),
        ("attn_k.weight", "key"),
        ("attn_q.weight", "query"),
        ("attn_output.weight", "attention_output"),
        ("ffn_up", "up"),
        ("ffn_gate", "gate"),
        ("ffn_down", "down"),
    ):
        if part in name:
            return kind
    return "other"


def _mixture_type(mixture: Mixture, role: TensorRole, tensor: TargetTensor) -> str:
    """Return the type of the mixture, before fallbacks."""
    if role.kind == "output":
        is_fitting = tensor.columns % _block_size(mixture.default) == 0
        return "Q6_K" if is_fitting and mixture.default not in ("Q8_0", "MXFP4") else "Q8_0"
    rule = mixture.rules.get(role.kind)
    name = (rule(role) if rule else None) or mixture.default
    if mixture.default == "MXFP4":
        return name
    if role.kind == "value" and role.is_70b and name in ("Q3_K", "Q4_K"):
        name = "Q5_K"
    if role.kind in ("value", "key") and role.has_8_experts:
        return "Q8_0"
    return name


def _block_size(name: str) -> int:
    form = type_format(name)
    return 1 if form is None else form.block_size


def _fitting(name: str, columns: int) -> str:
    """Return a type whose blocks divide the rows."""
    if columns % _block_size(name) == 0:
        return name
    other = _FALLBACKS.get(name, "F16")
    return other if columns % _block_size(other) == 0 else "F16"
