"""Conversion: everything that is decided about a GGUF file before its data are computed.

The file is a function of the source, the mixture, the importance matrix and the recipe. The decisions are types by
tensor; they determine the header and the position of every tensor. The file records what it was made with under the key
``detent.conversion``, so that it can be derived again.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detent.block_format import BlockFormat
from detent.block_tensor import ScalePolicy
from detent.checkpoint.row_items import RowItem
from detent.checkpoint.sources import open as open_checkpoint
from detent.checkpoint_files.architectures import gguf_model
from detent.checkpoint_files.gguf_reader import DEFAULT_ALIGNMENT
from detent.checkpoint_files.gguf_writer import GgufLayout, PlacedTensor, gguf_layout
from detent.checkpoint_files.importance_files import Importance, fit_importance, read_importance
from detent.checkpoint_files.mixtures import choose_types, file_metadata, get_mixture
from detent.checkpoint_files.target_model import GgufModel, MetadataEntry, TargetTensor
from detent.checkpoint_files.tensor_source import TensorSource
from detent.codec import parse
from detent.errors import SpecError, UnsupportedError
from detent.gguf import find_block_format, type_format
from detent.recipe import Recipe, get_recipe

__all__ = ["CONVERSION_KEY", "Conversion", "ConvertedTensor", "decide_conversion", "recorded_conversion"]

CONVERSION_KEY = "detent.conversion"
CONVERSION_VERSION = 1
_EXPERTS = "_exps."  # in the names of the weights of experts
GGUF_PREFIX = "gguf:"
PLAIN_TYPES = ("F32", "F16", "BF16")
SourceLike = TensorSource | str | os.PathLike[str]
ImportanceLike = Importance | Mapping[str, NDArray[Any]] | str | os.PathLike[str]


@dataclass(frozen=True)
class ConvertedTensor:
    """A tensor of the new file: what it is computed from, its place in the file, and why it has its type."""

    target: TargetTensor
    place: PlacedTensor
    reason: str = ""

    @property
    def name(self) -> str:
        """The name in the new file."""
        return self.place.name


@dataclass(frozen=True)
class Conversion:
    """A file that is to be written: source, layout and tensors."""

    source: TensorSource
    to: str
    entries: tuple[MetadataEntry, ...]
    layout: GgufLayout
    tensors: tuple[ConvertedTensor, ...]
    importance: Mapping[str, NDArray[np.float32]]
    importance_digest: str
    scales: ScalePolicy
    notes: tuple[str, ...] = ()

    def items(self, partial: Path, chunk_elements: int) -> Iterator[RowItem]:
        """Divide the tensors into items of whole rows; an item never crosses the border of two experts."""
        for index, tensor in enumerate(self.tensors):
            columns, rows = tensor.place.shape[-1], tensor.place.rows
            step = max(1, chunk_elements // columns)
            per_matrix = tensor.place.shape[-2] if len(tensor.place.shape) > 2 else rows
            sources = {name: self.source[name] for name in tensor.target.sources}
            for first in range(0, rows, per_matrix):
                weights = self._weights(tensor, first // per_matrix)
                for start in range(first, first + per_matrix, step):
                    stop = min(start + step, first + per_matrix)
                    yield RowItem(
                        index, tensor.target, sources, tensor.place, start, stop, weights, self.scales, str(partial)
                    )

    def _weights(self, tensor: ConvertedTensor, matrix: int) -> NDArray[np.float32] | None:
        weights = self.importance.get(tensor.name)
        return None if weights is None else weights[matrix]


def decide_conversion(
    source: SourceLike,
    to: str,
    *,
    importance: ImportanceLike | None = None,
    recipe: Recipe | str | os.PathLike[str] | None = None,
    pre_tokenizer: str | None = None,
    vocabulary: bool = True,
    scales: ScalePolicy = "raise",
    types: Mapping[str, str] | None = None,
) -> Conversion:
    """Decide on the types and positions of all tensors; see ``quantize`` for the arguments.

    ``types`` are types by tensor name that replace those of the mixture, for a file that another tool has written.
    """
    mixture = mixture_of(to)
    if scales not in ("raise", "keep"):
        raise SpecError(f"got scales={scales!r}, expected 'raise' or 'keep'")
    opened = source if isinstance(source, TensorSource) else open_checkpoint(source)
    weights, digest = _read_importance(importance)
    rules = None if recipe is None else get_recipe(recipe)
    model = gguf_model(opened, pre_tokenizer=pre_tokenizer, vocabulary=vocabulary)
    choice = choose_types(model, mixture, importance=importance is not None)
    given, types, reasons = types, dict(choice.types), dict(choice.fallbacks)
    if given is not None:
        types |= {name: kind for name, kind in given.items() if name in types}
    if rules is not None:
        _apply_recipe(rules, model, opened, types, reasons)
    _check_encodable(types)
    recorded = {
        "version": CONVERSION_VERSION,
        "to": GGUF_PREFIX + mixture,
        "importance": digest or None,
        "recipe": None if rules is None else json.loads(rules.to_json()),
        "pre_tokenizer": pre_tokenizer,
        "vocabulary": vocabulary,
        "scales": scales,
    }
    entries = [*_without_mixture(model), *file_metadata(mixture)]
    entries.append(MetadataEntry(CONVERSION_KEY, "string", json.dumps(recorded, sort_keys=True)))
    alignment = next((entry[2] for entry in entries if entry[0] == "general.alignment"), DEFAULT_ALIGNMENT)
    infos = [(each.name, each.shape, types[each.name]) for each in model.tensors]
    layout = gguf_layout(entries, infos, alignment=alignment)
    tensors = tuple(
        ConvertedTensor(target, place, reasons.get(target.name, ""))
        for target, place in zip(model.tensors, layout.tensors, strict=True)
    )
    used, notes = _fitting_importance(weights, tensors, is_given=importance is not None)
    requantized = sum(find_block_format(tensor.dtype) is not None for tensor in opened.values())
    if mixture == "MXFP4_MOE" and not any(_EXPERTS in target.name for target in model.tensors):
        notes += ("the model has no experts, which MXFP4_MOE stores in MXFP4: all weights are Q8_0, as in llama.cpp",)
    if requantized:
        notes += (f"{requantized} tensors of the source are already quantized: quantizing a float source loses less",)
    return Conversion(opened, GGUF_PREFIX + mixture, tuple(entries), layout, tensors, used, digest, scales, notes)


def mixture_of(to: str) -> str:
    """Return the mixture of a target such as "gguf:Q4_K_M".

    >>> mixture_of("gguf:q4_k_m")
    'Q4_K_M'
    """
    if not isinstance(to, str) or not to.lower().startswith(GGUF_PREFIX):
        raise SpecError(f"got to={to!r}, expected a format and a mixture, such as 'gguf:Q4_K_M'")
    return get_mixture(to[len(GGUF_PREFIX) :]).name


def recorded_conversion(metadata: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what a file records about its conversion, or None if another tool wrote the file."""
    text = metadata.get(CONVERSION_KEY)
    if text is None:
        return None
    return parse(text, CONVERSION_KEY)


def _without_mixture(model: GgufModel) -> list[MetadataEntry]:
    """Return the metadata of a model, without entries of an earlier conversion."""
    dropped = {CONVERSION_KEY, "general.file_type", "general.quantization_version"}
    return [entry for entry in model.metadata if entry[0] not in dropped]


def _read_importance(importance: ImportanceLike | None) -> tuple[Mapping[str, NDArray[np.float32]], str]:
    if importance is None:
        return MappingProxyType({}), ""
    if isinstance(importance, str | os.PathLike):
        importance = read_importance(importance)
    if isinstance(importance, Importance):
        given = {name: sums.weights() for name, sums in importance.columns.items()}
    else:
        given = dict(importance)
    weights = {name: np.ascontiguousarray(values, np.float32) for name, values in given.items()}
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(json.dumps([name, weights[name].shape]).encode())
        digest.update(weights[name].tobytes())
    return weights, digest.hexdigest()


def _fitting_importance(
    weights: Mapping[str, NDArray[np.float32]], tensors: tuple[ConvertedTensor, ...], *, is_given: bool
) -> tuple[Mapping[str, NDArray[np.float32]], tuple[str, ...]]:
    """Check the shapes of importance; note how many tensors lack importance that their format can use."""
    used, missing = {}, []
    for tensor in tensors:
        form = find_block_format(tensor.place.type.dtype)
        if form is None or not form.uses_importance:
            continue
        values = weights.get(tensor.name)
        if values is None:
            missing.append(tensor.name)
            continue
        used[tensor.name] = fit_importance(tensor.name, values, tensor.place.shape)
    if not is_given or not missing:
        return used, ()
    if not used:
        raise SpecError("the importance matrix lacks all of the model's tensors: it was collected with another model")
    names = ", ".join(missing[:3]) + (" ..." if len(missing) > 3 else "")
    return used, (f"{len(missing)} tensors have no importance and are quantized without it: {names}",)


def _apply_recipe(
    recipe: Recipe, model: GgufModel, source: TensorSource, types: dict[str, str], reasons: dict[str, str]
) -> None:
    """Replace types of the mixture by those of a recipe, whose patterns match names such as "blk.0.attn_q"."""
    layers = {
        each.name: (each.name.removesuffix(".weight"), ["Embedding" if "token_embd" in each.name else "Linear"])
        for each in model.tensors
        if type_format(types[each.name]) is not None or types[each.name] in ("F16", "BF16")
    }
    recipe.check_matched(layers.values())
    for target in model.tensors:
        if target.name not in layers:
            continue
        decision = recipe.resolve(*layers[target.name])
        if decision.skip:
            dtype = source[target.sources[0]].dtype if target.sources else "float32"
            types[target.name] = {"bfloat16": "BF16", "float16": "F16"}.get(dtype, "F32")
            reasons[target.name] = "kept in float by the recipe"
        elif decision.weight is not None:
            types[target.name], note = _recipe_type(decision.weight, target)
            reasons[target.name] = note


def _recipe_type(weight: object, target: TargetTensor) -> tuple[str, str]:
    if not isinstance(weight, BlockFormat):
        raise SpecError(
            f"the recipe gives {target.name} the spec {weight}, but GGUF files need a block format, such as q4_k"
        )
    form = weight.fallback_for(target.shape)
    if form is weight:
        return weight.type_name, "set by the recipe"
    name = "F16" if form is None else form.type_name
    return name, f"{name} instead of {weight.type_name}: rows of {target.shape[-1]} do not fit its blocks"


def _check_encodable(types: Mapping[str, str]) -> None:
    for name, kind in types.items():
        if kind not in PLAIN_TYPES and type_format(kind) is None:
            raise UnsupportedError(f"tensor {name} would get type {kind}, which detent cannot write yet: use Q8_0")
