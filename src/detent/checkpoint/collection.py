"""collect: the importance of columns from text, as llama.cpp's imatrix tool measures it.

transformers runs the model on chunks of tokens. For every weight, the squares of its inputs are added up, column by
column, in float64; experts get the tokens that the router sends them. One pass over the text is enough. Sums over parts
of a text can be collected apart, on several machines, and merged (``Importance.merged``).
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from detent import __version__
from detent.checkpoint.sources import files_digest
from detent.checkpoint.sources import open as open_checkpoint
from detent.checkpoint_files.architectures import GgufModel, gguf_model
from detent.checkpoint_files.importance_files import ColumnSums, Importance, read_importance
from detent.checkpoint_files.tensor_source import TensorSource
from detent.checkpoint_files.text_files import read_text
from detent.checks import as_integer
from detent.errors import DtypeError, FileFormatError, RangeError, ShapeError, SpecError, UnsupportedError
from detent.silence import silenced
from detent.storage import check_directory

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["collect", "collected"]

TextOrTokens = str | os.PathLike[str] | Sequence[int] | NDArray[Any]
DEFAULT_CHUNK_SIZE = 512  # tokens, as in llama.cpp
MAX_TEXT_BYTES = 1 << 30
MAX_NAME_CHARS = 1024  # a longer text is not compared with names of files
_MODEL_FILES = ("config.json", "tokenizer*", "*.model", "vocab.*", "merges.txt", "*_tokens*.json")
_BLOCK = re.compile(r"(?:^|\.)(?:layers|h)\.(\d+)\.")


def collect(
    source: str | os.PathLike[str] | TensorSource,
    data: TextOrTokens,
    output: str | os.PathLike[str] | None = None,
    *,
    chunk_size: int = DEFAULT_CHUNK_SIZE,
    max_chunks: int | None = None,
    include_output: bool = False,
    progress: Callable[[int, int], None] | None = None,
    resume: bool = False,
) -> Importance:
    """Measure the importance of the columns of all weights on a text.

    Args:
        source: directory of a model that transformers can run.
        data: a text, the path of a text file, or token ids.
        output: file to write: GGUF, or the legacy form if the name ends in ".dat".
        chunk_size: tokens per chunk; a chunk starts with BOS if the tokenizer adds it, and an incomplete last chunk is
            left out.
        max_chunks: number of chunks to use at most.
        include_output: whether to measure the output matrix, too; llama.cpp does not by default.
        progress: function that is called with the number of chunks that are done, and the number of all chunks.
        resume: read ``output`` instead, if an earlier call wrote it with the same model, data and options.

    Raises:
        UnsupportedError: transformers or torch is missing, or the model has modules that are not supported.
        ShapeError: fewer tokens than one chunk.
        RangeError: invalid token ids, or activations that are not finite.
        FileFormatError: the model or the text cannot be read.
    """
    chunk_size = as_integer("chunk_size", chunk_size, at_least=1)
    max_chunks = None if max_chunks is None else as_integer("max_chunks", max_chunks, at_least=1)
    data = data if isinstance(data, str | os.PathLike) else _token_ids(data)
    if output is not None:
        check_directory(Path(output).absolute().parent)
    opened = source if isinstance(source, TensorSource) else open_checkpoint(source)
    if opened.path is None or opened.config is None:
        raise UnsupportedError("importance is collected with transformers: pass a directory with config.json")
    origin = ""
    if output is not None:
        origin = _origin(opened, opened.path, data, [chunk_size, max_chunks, include_output])
    if resume and output is not None and (kept := _kept(Path(output), origin)) is not None:
        return kept
    target = gguf_model(opened, vocabulary=False)
    model = _load_model(opened.path)
    chunks = _chunks(opened.path, data, chunk_size, max_chunks, int(target.value("{arch}.vocab_size")))
    sums = _run(model, target, chunks, progress, include_output=include_output)
    name = Path(data).name if isinstance(data, os.PathLike) else "text" if isinstance(data, str) else "tokens"
    importance = Importance(sums, (name,), len(chunks), chunk_size, origin=origin)
    if output is not None:
        importance.save(output)
    return importance


def collected(source: str | os.PathLike[str], data: TextOrTokens, output: Path) -> Importance | None:
    """Return the importance in ``output`` if ``collect`` wrote it with this model and data, and default options."""
    opened = open_checkpoint(source)
    if opened.path is None or not output.is_file():
        return None
    return _kept(output, _origin(opened, opened.path, data, [DEFAULT_CHUNK_SIZE, None, False]))


def _origin(source: TensorSource, path: Path, data: TextOrTokens, options: list[object]) -> str:
    """Return a digest of what importance was measured with: model, data, options and the version of detent.

    Large files are identified by size and modification time.
    """
    others = sorted({file for pattern in _MODEL_FILES for file in path.glob(pattern) if file.is_file()})
    if isinstance(data, str | os.PathLike):
        text = data if isinstance(data, str) else read_text(Path(data), MAX_TEXT_BYTES)
        content = hashlib.sha256(text.encode(errors="surrogatepass"))
    else:
        tokens = np.asarray(data)
        content = hashlib.sha256(json.dumps([tokens.dtype.str, tokens.shape]).encode() + tokens.tobytes())
    files = files_digest([*source.files, *others])
    facts = [__version__, source.digest, files, type(data) is str, content.hexdigest(), *options]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _kept(output: Path, origin: str) -> Importance | None:
    """Return the importance in a file if it has this origin."""
    if not output.is_file():
        return None
    try:
        importance = read_importance(output)
    except (FileFormatError, UnsupportedError):
        return None
    return importance if importance.origin == origin else None


def _load_model(path: Path) -> "nn.Module":
    """Load a model with transformers: local files only, no code from the checkpoint, no pickle."""
    try:
        import torch  # noqa: PLC0415 - an optional package
        from transformers import AutoModelForCausalLM  # noqa: PLC0415 - an optional package
    except ImportError as error:
        raise UnsupportedError(
            "collecting importance needs torch and transformers: pip install torch transformers"
        ) from error
    with _quiet_transformers():
        try:
            model = AutoModelForCausalLM.from_pretrained(
                path, dtype=torch.float32, local_files_only=True, trust_remote_code=False, use_safetensors=True
            )
        except (OSError, ValueError, TypeError, RuntimeError, KeyError) as error:
            raise FileFormatError(f"{path}: transformers failed to load the model: {str(error)[:300]}") from error
    module: nn.Module = model.train(False)
    return module


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Hide progress bars, warnings and log messages of transformers."""
    from transformers.utils import logging as transformers_logging  # noqa: PLC0415 - an optional package

    has_bar = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        with silenced("transformers"):
            yield
    finally:
        if has_bar:
            transformers_logging.enable_progress_bar()


def _token_ids(data: Sequence[int] | NDArray[np.integer[Any]]) -> NDArray[np.integer[Any]]:
    """Return token ids as an array with one axis."""
    try:
        ids = np.asarray(data)
    except ValueError as error:
        raise DtypeError(f"got tokens in rows of different lengths, expected a list of integers: {error}") from error
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise DtypeError(f"got tokens of dtype {ids.dtype} and shape {ids.shape}, expected a list of integers")
    return ids


def _names_file(text: str) -> bool:
    if len(text) > MAX_NAME_CHARS:
        return False
    try:
        return Path(text).is_file()
    except (OSError, ValueError):
        return False


def _chunks(path: Path, data: TextOrTokens, size: int, limit: int | None, vocabulary: int) -> NDArray[np.int64]:
    """Return chunks of token ids, (chunks, size)."""
    ids: NDArray[np.integer[Any]]
    bos: int | None = None
    if isinstance(data, str) and _names_file(data):
        raise SpecError(f"got the text {data!r}, which names a file: pass pathlib.Path({data!r}) to read the file")
    if isinstance(data, str | os.PathLike):
        ids, bos = _tokenized(path, data if isinstance(data, str) else read_text(Path(data), MAX_TEXT_BYTES))
    else:
        ids = np.asarray(data)  # checked by _token_ids
    if ids.size and not (int(ids.min()) >= 0 and int(ids.max()) < vocabulary):
        raise RangeError(f"got token ids from {ids.min()} to {ids.max()}, expected 0 to {vocabulary - 1}")
    count = len(ids) // size if limit is None else min(len(ids) // size, limit)
    if not count:
        raise ShapeError(f"got {len(ids)} tokens, expected at least {size}, one chunk: pass more text or chunk_size=")
    chunks: NDArray[np.int64] = ids[: count * size].astype(np.int64).reshape(count, size)
    if bos is not None:
        chunks[:, 0] = bos
    return chunks


def _tokenized(path: Path, text: str) -> tuple[NDArray[np.int64], int | None]:
    """Return the token ids of a text, and the id of BOS if the tokenizer adds it."""
    from transformers import AutoTokenizer  # noqa: PLC0415 - an optional package

    with _quiet_transformers():
        try:
            tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError, TypeError, RuntimeError, KeyError) as error:
            raise FileFormatError(f"{path}: transformers failed to load the tokenizer: {str(error)[:300]}") from error
        ids = np.array(tokenizer(text)["input_ids"], np.int64)
    has_bos = len(ids) > 0 and tokenizer.bos_token_id is not None and ids[0] == tokenizer.bos_token_id
    return ids, int(tokenizer.bos_token_id) if has_bos else None


def _run(
    model: "nn.Module",
    target: GgufModel,
    chunks: NDArray[np.int64],
    progress: Callable[[int, int], None] | None,
    *,
    include_output: bool,
) -> dict[str, ColumnSums]:
    import torch  # noqa: PLC0415 - an optional package

    sums = _Sums(target, include_output=include_output)
    handles = [handle for name, module in model.named_modules() for handle in sums.hooks(name, module)]
    try:
        with torch.no_grad(), _quiet_transformers():
            for number, chunk in enumerate(chunks):
                model(torch.from_numpy(chunk)[None], use_cache=False)
                if progress is not None:
                    progress(number + 1, len(chunks))
    finally:
        for handle in handles:
            handle.remove()
    return sums.results()


class _Sums:
    """Sums of squared inputs by name of the tensor in GGUF files, filled by hooks of modules."""

    def __init__(self, target: GgufModel, *, include_output: bool) -> None:
        self.expected = [
            tensor
            for tensor in target.tensors
            if len(tensor.shape) > 1
            and tensor.row_count > 1
            and "ffn_gate_inp" not in tensor.name
            and (tensor.name.startswith("blk.") or (include_output and tensor.name == "output.weight"))
        ]
        self.names = {name: tensor.name for tensor in self.expected for name in tensor.sources}
        self.sums: dict[str, NDArray[np.float64]] = {}
        self.counts: dict[str, NDArray[np.float64]] = {}

    def hooks(self, name: str, module: "nn.Module") -> Iterator[Any]:
        """Register hooks of a module if it has weights of the file; return their handles."""
        if hasattr(module, "gate_up_proj") and hasattr(module, "down_proj") and hasattr(module, "num_experts"):
            block = _BLOCK.search(f"{name}.")
            if block is not None:
                yield module.register_forward_pre_hook(self._expert_hook(f"blk.{block[1]}"))
            return
        target = self.names.get(f"{name}.weight")
        if target is not None:

            def hook(_: "nn.Module", inputs: tuple[Any, ...]) -> None:
                self._add(target, inputs[0].reshape(-1, inputs[0].shape[-1]))

            yield module.register_forward_pre_hook(hook)

    def _expert_hook(self, prefix: str) -> Callable[["nn.Module", tuple[Any, ...]], None]:
        """Return a hook for a module that has the matrices of all experts, and gets the experts of each token."""

        def hook(module: Any, inputs: tuple[Any, ...]) -> None:  # noqa: ANN401 - a class of transformers
            states, chosen = inputs[0], inputs[1]
            for expert in range(module.num_experts):
                tokens = (chosen == expert).any(dim=-1)
                inner = states[tokens]
                for part in ("gate", "up"):
                    self._add(f"{prefix}.ffn_{part}_exps.weight", inner, expert, module.num_experts)
                gate, up = (inner @ module.gate_up_proj[expert].T).chunk(2, dim=-1)
                self._add(f"{prefix}.ffn_down_exps.weight", module.act_fn(gate) * up, expert, module.num_experts)

        return hook

    def _add(self, name: str, rows: "Tensor", matrix: int = 0, matrices: int = 1) -> None:
        columns = rows.shape[-1]
        if name not in self.sums:
            self.sums[name], self.counts[name] = np.zeros((matrices, columns)), np.zeros(matrices)
        self.sums[name][matrix] += rows.double().square().sum(dim=0).numpy()
        self.counts[name][matrix] += len(rows)

    def results(self) -> dict[str, ColumnSums]:
        missing = [tensor.name for tensor in self.expected if tensor.name not in self.sums]
        if missing:
            raise UnsupportedError(
                f"no inputs were seen for {len(missing)} tensors, first {missing[0]}: this version of transformers "
                "computes the model with modules that detent does not know"
            )
        results = {}
        for name, sums in self.sums.items():
            if not np.isfinite(sums).all():
                raise RangeError(f"the inputs of {name} are not finite: check the weights of the model")
            results[name] = ColumnSums(sums, self.counts[name])
        return results
