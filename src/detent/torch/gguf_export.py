"""GGUF export: write a prepared Hugging Face model as a GGUF file with the bytes that it was trained with.

Weights with a block format keep their bytes: rows are reordered as llama.cpp expects them, and quantization is row by
row, so a reordered row has the same bytes. All other tensors have the type of their parameter (F32, BF16 or F16), so
the file is the trained model. Vectors, norms and routers are float32, as in every GGUF file. Metadata and vocabulary
come from the directory of the float model.
"""

from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from detent.block_tensor import BlockTensor
from detent.checkpoint_files.architectures import GgufModel, TargetTensor, gguf_model
from detent.checkpoint_files.gguf_writer import gguf_layout
from detent.checkpoint_files.mixtures import MIXTURES, file_metadata, is_float_tensor
from detent.checkpoint_files.safetensors_files import read_config
from detent.checkpoint_files.target_model import Constant, ExpertRows, Experts, Transposed
from detent.checkpoint_files.tensor_source import ArrayTensor, TensorSource, as_elements
from detent.errors import DtypeError, FileFormatError, RangeError, SpecError, UnsupportedError
from detent.storage import check_directory, write_atomic
from detent.torch.arrays import full_tensor, on_cpu
from detent.torch.preparation import quantized_state

__all__ = ["export_gguf"]

_TYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_ELEMENTS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_OUTPUT_LAYER = "lm_head.weight"


def export_gguf(
    model: nn.Module,
    float_directory: str | PathLike[str],
    path: str | PathLike[str],
    *,
    pre_tokenizer: str | None = None,
    vocabulary: bool = True,
) -> Path:
    """Write a prepared model as a GGUF file; its bytes equal those of ``qt.quantized_state``.

    The model is not changed.

    Args:
        model: a causal language model of transformers, prepared with block formats, such as the recipe "q4_k".
        float_directory: directory with ``config.json`` and the tokenizer files of the model.
        path: output path.
        pre_tokenizer: llama.cpp's name of the pre-tokenizer, if it cannot be found; see ``qc.quantize``.
        vocabulary: if False, the file has no vocabulary, and llama.cpp accepts only token ids.

    Returns:
        The output path.

    Raises:
        StateError: the model is not prepared.
        UnsupportedError: a weight is quantized with a spec that is not a block format, or in a way that GGUF files
            cannot store; no table entry for the architecture.
        FileFormatError: the configuration contradicts the model, or a file of the directory is damaged or missing.
    """
    directory, output = Path(float_directory), Path(path)
    check_directory(output.absolute().parent)
    state = _block_weights(model)
    source = _source(model, directory)
    target = gguf_model(source, pre_tokenizer=pre_tokenizer, vocabulary=vocabulary)
    _check_all_written(target, state)
    types = {tensor.name: _type_of(tensor, source, state) for tensor in target.tensors}
    entries = [*target.metadata, *file_metadata(_mixture(types))]
    layout = gguf_layout(entries, [(each.name, each.shape, types[each.name]) for each in target.tensors])

    def parts() -> Iterator[bytes]:
        yield layout.header
        at = len(layout.header)
        for tensor, placed in zip(target.tensors, layout.tensors, strict=True):
            yield bytes(placed.offset - at)
            data = _tensor_bytes(tensor, types[tensor.name], source, state)
            at = placed.offset + len(data)
            yield data
        yield bytes(layout.nbytes - at)

    write_atomic(output, parts())
    return output


def _block_weights(model: nn.Module) -> dict[str, BlockTensor]:
    state = quantized_state(model)
    for name, weight in state.items():
        if not isinstance(weight, BlockTensor):
            raise UnsupportedError(
                f"{name} is quantized as {weight.params.spec}, which GGUF files cannot store: prepare the model with a "
                "block format, such as 'q4_k'"
            )
    blocks = {name: weight for name, weight in state.items() if isinstance(weight, BlockTensor)}
    if not blocks:
        raise SpecError("no weight has a block format: prepare the model with a recipe such as 'q4_k'")
    return blocks


def _source(model: nn.Module, directory: Path) -> TensorSource:
    """Return the parameters of a model as a checkpoint in memory."""
    config = read_config(directory)
    if config is None:
        raise FileFormatError(f"{directory} has no config.json: pass the directory of the float model")
    if config.get("architectures") is None:  # saved without the model
        config["architectures"] = [type(model).__name__]
    tensors = {name: ArrayTensor(name, _array(name, parameter)) for name, parameter in model.named_parameters()}
    return TensorSource(tensors, path=directory, config=config)


def _array(name: str, parameter: Tensor) -> NDArray[Any]:
    data = on_cpu(full_tensor(parameter).detach()).contiguous()
    if data.dtype not in _TYPES:
        raise DtypeError(f"parameter {name} has dtype {data.dtype}, expected float32, bfloat16 or float16")
    if data.dtype == torch.bfloat16:
        array: NDArray[Any] = data.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return array
    return data.numpy()


def _check_all_written(target: GgufModel, state: Mapping[str, BlockTensor]) -> None:
    """Check that every quantized weight is in the file; a tied output layer has the bytes of the embedding."""
    written = {name for tensor in target.tensors for name in tensor.sources}
    missing = [name for name in state if name not in written and name != _OUTPUT_LAYER]
    if missing:
        raise UnsupportedError(f"{missing[0]} has a block format, but no tensor of the file: exclude the layer")


def _type_of(tensor: TargetTensor, source: TensorSource, state: Mapping[str, BlockTensor]) -> str:
    quantized = [name for name in tensor.sources if name in state]
    if quantized:
        if isinstance(tensor.layout, Transposed | ExpertRows | Constant) or len(quantized) != len(tensor.sources):
            raise UnsupportedError(
                f"{quantized[0]} has a block format, but GGUF files store it as {tensor.name}, whose rows are not rows "
                "of this weight: exclude the layer from the recipe"
            )
        formats = {state[name].format.type_name for name in quantized}
        if len(formats) > 1:
            raise UnsupportedError(f"{tensor.name} joins weights of formats {', '.join(sorted(formats))}: use one")
        return formats.pop()
    if is_float_tensor(tensor) or not tensor.sources:
        return "F32"
    return {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}[source[tensor.sources[0]].dtype]


def _tensor_bytes(tensor: TargetTensor, kind: str, source: TensorSource, state: Mapping[str, BlockTensor]) -> bytes:
    if kind in _ELEMENTS:
        floats = tensor.rows(source)
        values, at = as_elements(floats, _ELEMENTS[kind])
        if at is not None:
            value = "NaN" if np.isnan(floats[at]) else floats[at]
            raise RangeError(
                f"{', '.join(tensor.sources) or tensor.name} contains {value}, which {kind} cannot represent as a "
                "finite number: nothing was written"
            )
        return values.tobytes()
    parts = [state[name].packed.reshape(state[name].shape[0], -1) for name in tensor.sources]
    if isinstance(tensor.layout, Experts):
        return b"".join(part.tobytes() for part in parts)
    (rows,) = parts
    index = ArrayTensor("rows", np.arange(len(rows), dtype=np.float32)[:, None])
    order = tensor.layout.rows((index,), 1, 0, tensor.row_count).astype(np.int64)[:, 0]
    return rows[order].tobytes()


def _mixture(types: Mapping[str, str]) -> str:
    """Return the mixture whose default is the most frequent type; the first one, such as Q4_K_S, is uniform."""
    quantized = [kind for kind in types.values() if kind not in _ELEMENTS]
    common = max(sorted(set(quantized)), key=quantized.count)
    return next(name for name, mixture in MIXTURES.items() if mixture.default == common)
