"""Architecture: a table entry that says how a model of transformers becomes a GGUF file.

An entry has rules for tensors (names, sizes, reordering, offsets) and functions for metadata. ``target_tensors``
applies the rules: it checks every shape against the configuration, and reports tensors that are missing or that no rule
uses.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from re import compile as regex

from detent.checkpoint_files.model_config import ModelConfig
from detent.checkpoint_files.target_model import (
    ExpertRows,
    Experts,
    HeadPairs,
    Layout,
    MetadataEntry,
    SourceRows,
    TargetTensor,
    Transposed,
)
from detent.checkpoint_files.tensor_source import TensorSource
from detent.errors import FileFormatError
from detent.tables import counted

__all__ = ["Architecture", "TensorRule", "block_sizes", "target_tensors"]

Sizes = Mapping[str, int]
MAX_NAMES_SHOWN, MAX_CHARS_SHOWN = 5, 100
_BLOCK = regex(r"blk\.(\d+)\.")


@dataclass(frozen=True)
class TensorRule:
    """Names and layout of tensors of one kind.

    Attributes:
        target: name in GGUF files without ".weight"; "{block}" is the number of the block.
        source: name in the checkpoint without ".weight"; "{expert}" is the number of the expert.
        shape: names of the sizes in the target, such as ("query", "hidden").
        bias: whether there is a bias: "no", "optional" or "yes".
        heads: name of the size by which rows are reordered from halves to pairs, or "".
        offset: number that is added to the values.
        is_transposed: whether the checkpoint stores columns as rows.
        is_optional: whether the tensor may be missing.
        fused: name in checkpoints that store the matrices of all experts in one tensor, or "".
        fused_part: index and number of parts of the rows of ``fused``.
    """

    target: str
    source: str
    shape: tuple[str, ...]
    bias: str = "no"
    heads: str = ""
    offset: float = 0.0
    is_transposed: bool = False
    is_optional: bool = False
    fused: str = ""
    fused_part: tuple[int, int] = (0, 1)


def no_constants(config: ModelConfig) -> list[TargetTensor]:  # noqa: ARG001 - the signature of ``constants``
    """Return no tensors."""
    return []


@dataclass(frozen=True)
class Architecture:
    """Table entry of an architecture.

    Attributes:
        name: name in GGUF files.
        classes: names of the model classes of transformers.
        rules: rules of all tensors.
        sizes: function that returns the sizes that rules name.
        metadata: function that returns the metadata of the architecture.
        unused: parts of names of tensors that GGUF files do not contain.
        prefixes: pairs of the start of a name in the rules, and of the same name in other checkpoints.
        constants: function that returns tensors that are computed from the configuration.
        drops_output: whether an output matrix in the checkpoint is ignored, because llama.cpp uses the embedding.
    """

    name: str
    classes: tuple[str, ...]
    rules: tuple[TensorRule, ...]
    sizes: Callable[[ModelConfig], dict[str, int]]
    metadata: Callable[[ModelConfig], list[MetadataEntry]]
    unused: tuple[str, ...] = (".rotary_emb.inv_freq",)
    prefixes: tuple[tuple[str, str], ...] = ()
    constants: Callable[[ModelConfig], list[TargetTensor]] = no_constants
    drops_output: bool = False


def block_sizes(config: ModelConfig) -> dict[str, int]:
    """Return the sizes that most architectures have."""
    heads = config.integer("num_attention_heads")
    kv_heads = config.integer("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise FileFormatError(
            f"config.json: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
        )
    head = config.head_size
    if head % 2:
        raise FileFormatError(f"config.json: heads have {head} elements, expected an even number, which rope needs")
    return {
        "one": 1,
        "vocabulary": config.integer("vocab_size"),
        "hidden": config.integer("hidden_size"),
        "inner": config.integer("intermediate_size"),
        "heads": heads,
        "kv_heads": kv_heads,
        "head": head,
        "query": heads * head,
        "key": kv_heads * head,
    }


def target_tensors(architecture: Architecture, config: ModelConfig, source: TensorSource) -> tuple[TargetTensor, ...]:
    """Apply the rules of an architecture to a checkpoint.

    Raises:
        FileFormatError: a tensor is missing, has a shape that contradicts the configuration, or is not in the rules.
    """
    resolver = _Resolver(architecture, config, source)
    tensors = list(resolver.tensors())
    resolver.check_all_used(config)
    tensors += architecture.constants(config)  # after shapes, which limit the sizes in config.json
    return tuple(sorted(tensors, key=lambda tensor: order_in_file(tensor.name)))


def order_in_file(name: str) -> tuple[int, str]:
    """Return a key that sorts tensors as llama.cpp does: outside of blocks first, then by block and name.

    >>> sorted(["blk.10.a", "output.weight", "blk.2.b"], key=order_in_file)
    ['output.weight', 'blk.2.b', 'blk.10.a']
    """
    match = _BLOCK.match(name)
    return (int(match[1]) if match else -1, name)


class _Resolver:
    """Applies rules to a checkpoint, and records which of its tensors they use."""

    def __init__(self, architecture: Architecture, config: ModelConfig, source: TensorSource) -> None:
        self.architecture, self.source = architecture, source
        self.sizes = architecture.sizes(config)
        self.blocks = config.integer("num_hidden_layers", "n_layer")
        self.tied = architecture.drops_output or config.is_true("tie_word_embeddings", default=False)
        self.prefix = self._find_prefix()
        self.used: set[str] = set()

    def _find_prefix(self) -> tuple[str, str]:
        """Return the pair of prefixes under which the first tensor of the rules is in the checkpoint."""
        first = self.architecture.rules[0].source
        for old, new in (("", ""), *self.architecture.prefixes):
            if first.startswith(old) and f"{new}{first[len(old) :]}.weight" in self.source:
                return old, new
        return "", ""

    def tensors(self) -> Iterable[TargetTensor]:
        for rule in self.architecture.rules:
            for block in range(self.blocks if "{block}" in rule.target else 1):
                yield from self._block_tensors(rule, block)

    def _block_tensors(self, rule: TensorRule, block: int) -> Iterable[TargetTensor]:
        if rule.target == "output" and self.tied:
            return
        weight = self._weight(rule, block)
        if weight is not None:
            yield weight
        if rule.bias == "no":
            return
        name = self._name(rule.source, block) + ".bias"
        if name in self.source or rule.bias == "yes":
            shape = (self.sizes[rule.shape[0]],)
            self._check(name, shape)
            layout: Layout = HeadPairs(self.sizes[rule.heads]) if rule.heads else SourceRows()
            yield TargetTensor(f"{rule.target.format(block=block)}.bias", shape, (name,), layout)

    def _weight(self, rule: TensorRule, block: int) -> TargetTensor | None:
        shape = tuple(self.sizes[size] for size in rule.shape)
        target = TargetTensor(f"{rule.target.format(block=block)}.weight", shape, (), offset=rule.offset)
        if "{expert}" in rule.source:
            return self._experts(rule, block, target)
        name = self._name(rule.source, block) + ".weight"
        other = self._name(rule.fused, block) + ".weight"
        if name not in self.source and other in self.source:
            name = other
        if rule.is_optional and name not in self.source:
            return None
        self._check(name, shape[::-1] if rule.is_transposed else shape)
        layout: Layout = Transposed() if rule.is_transposed else SourceRows()
        if rule.heads:
            layout = HeadPairs(self.sizes[rule.heads])
        return replace(target, sources=(name,), layout=layout)

    def _experts(self, rule: TensorRule, block: int, target: TargetTensor) -> TargetTensor:
        experts, rows, columns = target.shape
        fused = self._name(rule.fused, block)
        for name in (fused, f"{fused}.weight"):
            if rule.fused and name in self.source:
                part, parts = rule.fused_part
                self._check(name, (experts, rows * parts, columns))
                return replace(target, sources=(name,), layout=ExpertRows(part * rows, rows))
        names = []
        for expert in range(experts):  # the number is from config.json: stop at the first tensor that is missing
            names.append(f"{self._name(rule.source, block, expert)}.weight")
            self._check(names[-1], (rows, columns))
        return replace(target, sources=tuple(names), layout=Experts())

    def _name(self, pattern: str, block: int, expert: int = 0) -> str:
        name = pattern.format(block=block, expert=expert)
        old, new = self.prefix
        return f"{new}{name[len(old) :]}" if old and name.startswith(old) else name

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        if name not in self.source:
            raise FileFormatError(
                f"the checkpoint has no tensor {name!r}, which {self.architecture.name} models need: the download is "
                "incomplete, or config.json belongs to another model"
            )
        given = self.source[name].shape
        if given != shape:
            raise FileFormatError(
                f"tensor {name!r} has shape {given}, but config.json says {shape}: use the config.json of this model"
            )
        self.used.add(name)

    def check_all_used(self, config: ModelConfig) -> None:
        """Raise if the checkpoint has tensors that no rule uses; the file would be another model."""
        unused = self.architecture.unused + (("lm_head.weight",) if self.tied else ())
        left = [name for name in self.source if name not in self.used and not any(part in name for part in unused)]
        if left:
            names = ", ".join(repr(name[:MAX_CHARS_SHOWN]) for name in left[:MAX_NAMES_SHOWN])
            more = f" and {len(left) - MAX_NAMES_SHOWN} more" if len(left) > MAX_NAMES_SHOWN else ""
            raise FileFormatError(
                f"the architecture {self.architecture.name} ({config.classes[0]}) has no rule for "
                f"{counted(len(left), 'tensor')}: {names}{more}; the checkpoint is quantized or not a plain "
                f"{config.classes[0]}"
            )
