"""Proofs about streaming conversion that take long: memory under a budget, and resuming after SIGKILL.

``python benchmarks/checkpoint_proofs.py memory --gigabytes 20 --budget "1 GB"`` writes a sparse checkpoint of this
size, with many shards and one random group of rows per tensor, converts it to Q4_K_M in a process of its own, measures
the largest anonymous memory (RssAnon) of this process, and verifies the file.

``python benchmarks/checkpoint_proofs.py kill --kills 100 --megabytes 200`` kills a job at random moments, goes on, and
compares the bytes of every result.

``python benchmarks/checkpoint_proofs.py speed --llama PYTHON`` times ``qc.quantize`` and llama.cpp's own quantizer by
turns on the same BF16 file, and compares the bytes of all tensors. ``PYTHON`` runs llama.cpp through cyllama.

``python benchmarks/checkpoint_proofs.py mutations --mutations 10000`` opens and converts mutated files of every format,
and measures time and memory.

All print one JSON document; ``--output`` adds it to a file of results. Apart from that, nothing is written outside the
directory given by ``--directory``.
"""

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import detent.checkpoint as qc
from tests.tools import fuzz_checkpoints

CONVERT = """
import sys, detent.checkpoint as qc
qc.quantize(sys.argv[1], sys.argv[2], sys.argv[3], memory_budget=sys.argv[4], vocabulary=False)
"""
VERIFY = """
import sys, detent.checkpoint as qc
result = qc.verify(sys.argv[1], sys.argv[2])
print(result)
sys.exit(not result.ok)
"""
TIME_DETENT = """
import sys, time, detent as dt, detent.checkpoint as qc
dt.set_num_threads(int(sys.argv[3]))
begin = time.perf_counter()
qc.quantize(sys.argv[1], sys.argv[2], "gguf:Q4_K_M", resume=False)
print(time.perf_counter() - begin)
"""
TIME_LLAMA = """
import sys, time
import cyllama.llama.llama_cpp as llama
llama.disable_logging()
llama.llama_backend_init()
params = llama.LlamaModelQuantizeParams()
params.ftype, params.nthread = 15, int(sys.argv[3])
begin = time.perf_counter()
llama.model_quantize(sys.argv[1], sys.argv[2], params)
print(time.perf_counter() - begin)
"""
COMPARE = """
import sys, detent.checkpoint as qc
a, b = qc.open(sys.argv[1]), qc.open(sys.argv[2])
assert set(a) == set(b)
assert all((a[n].dtype, a[n].shape) == (b[n].dtype, b[n].shape) for n in a)
print(sum(a[n].read().tobytes() != b[n].read().tobytes() for n in a), len(a))
"""
FUZZ = """
import resource, sys
from tests.tools.fuzz_checkpoints import fuzz
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
before = peak()
print(*fuzz(sys.argv[1], int(sys.argv[2])), peak() - before)
"""
HIDDEN, FEED_FORWARD, VOCABULARY = 4096, 14336, 32000
RANDOM_ROWS = 16
POLL_SECONDS = 0.02


def config(layers: int, hidden: int, inner: int, vocabulary: int) -> dict[str, Any]:
    """A llama configuration with this many layers."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": hidden // 128,
        "num_key_value_heads": max(1, hidden // 512),
        "num_hidden_layers": layers,
        "vocab_size": vocabulary,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }


def shapes(settings: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The tensors of the model: names and shapes."""
    hidden, inner, vocabulary = (settings[key] for key in ("hidden_size", "intermediate_size", "vocab_size"))
    kv = hidden * settings["num_key_value_heads"] // settings["num_attention_heads"]
    yield "model.embed_tokens.weight", (vocabulary, hidden)
    for layer in range(settings["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name, rows in (("q", hidden), ("k", kv), ("v", kv), ("o", hidden)):
            yield f"{prefix}self_attn.{name}_proj.weight", (rows, hidden)
        yield f"{prefix}mlp.gate_proj.weight", (inner, hidden)
        yield f"{prefix}mlp.up_proj.weight", (inner, hidden)
        yield f"{prefix}mlp.down_proj.weight", (hidden, inner)
        yield f"{prefix}input_layernorm.weight", (hidden,)
        yield f"{prefix}post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (vocabulary, hidden)


def bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The upper halves of float32 values, which are bfloat16."""
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def write_sparse(
    directory: Path, settings: dict[str, Any], *, tensors_per_shard: int, random_rows: int | None
) -> tuple[int, int]:
    """Write a checkpoint; of each tensor only some rows are on the disk. ``random_rows`` None writes all rows."""
    directory.mkdir(parents=True)
    generator = np.random.default_rng(0)
    tensors, index = list(shapes(settings)), {}
    groups = [tensors[i : i + tensors_per_shard] for i in range(0, len(tensors), tensors_per_shard)]
    for number, group in enumerate(groups):
        name = f"model-{number + 1:05}-of-{len(groups):05}.safetensors"
        header, position = {}, 0
        for tensor, shape in group:
            nbytes = 2 * int(np.prod(shape))
            header[tensor] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [position, position + nbytes]}
            position += nbytes
            index[tensor] = name
        text = json.dumps(header).encode()
        with (directory / name).open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + position)
            for tensor, shape in group:
                rows, columns = shape if len(shape) > 1 else (1, shape[0])
                count = rows if random_rows is None else min(random_rows, rows)
                first = int(generator.integers(rows - count + 1))
                file.seek(8 + len(text) + header[tensor]["data_offsets"][0] + 2 * first * columns)
                file.write(bfloat16((generator.standard_t(4, (count, columns)) * 0.02).astype(np.float32)).tobytes())
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (directory / "config.json").write_text(json.dumps(settings))
    return sum(2 * int(np.prod(shape)) for _, shape in tensors), len(groups)


def anonymous_bytes(pid: int) -> int:
    """RssAnon of a process in bytes, 0 if it has ended."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("RssAnon:")), 0)


def measured(command: list[Any]) -> tuple[int, float, int]:
    """Run a command; return its exit code, seconds, and largest RssAnon."""
    begin, largest = time.perf_counter(), 0
    with subprocess.Popen(command) as process:
        while process.poll() is None:
            largest = max(largest, anonymous_bytes(process.pid))
            time.sleep(POLL_SECONDS)
    return process.returncode, time.perf_counter() - begin, largest


def memory(directory: Path, gigabytes: float, budget: str) -> dict[str, Any]:
    """Convert a sparse checkpoint under a budget."""
    per_layer = 2 * (2.5 * HIDDEN**2 + 3 * HIDDEN * FEED_FORWARD)
    layers = max(1, round((gigabytes * 1e9 - 4 * VOCABULARY * HIDDEN) / per_layer))
    settings = config(layers, HIDDEN, FEED_FORWARD, VOCABULARY)
    source, output = directory / "sparse", directory / "sparse.gguf"
    nbytes, shards = write_sparse(source, settings, tensors_per_shard=8, random_rows=RANDOM_ROWS)
    code, seconds, largest = measured([sys.executable, "-c", CONVERT, source, output, "gguf:Q4_K_M", budget])
    verified, verify_seconds, verify_largest = measured([sys.executable, "-c", VERIFY, source, output])
    return {
        "source_bytes": nbytes,
        "shards": shards,
        "budget": budget,
        "exit_code": code,
        "seconds": round(seconds, 1),
        "largest_anonymous_bytes": largest,
        "output_bytes": output.stat().st_size,
        "verified": verified == 0,
        "verify_seconds": round(verify_seconds, 1),
        "verify_largest_anonymous_bytes": verify_largest,
    }


def sha256(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def converter(source: Path, output: Path) -> int:
    """Start a conversion in a forked process; return its process id."""
    child = os.fork()
    if not child:
        try:
            qc.quantize(source, output, "gguf:Q4_K_M", memory_budget="100 MB", vocabulary=False)
            os._exit(0)
        finally:
            os._exit(1)
    return child


def finish(child: int) -> None:
    """Wait for a conversion, which must succeed."""
    _, status = os.waitpid(child, 0)
    if status:
        raise RuntimeError(f"a conversion ended with status {status}")


def kill(directory: Path, kills: int, megabytes: float, seed: int = 0) -> dict[str, Any]:
    """Kill jobs at random moments, go on, and compare the bytes."""
    generator = random.Random(seed)
    hidden, inner = 1024, 2816
    layers = max(1, round(megabytes * 1e6 / (2 * (2.5 * hidden**2 + 3 * hidden * inner))))
    source, output = directory / "model", directory / "model.gguf"
    nbytes, _ = write_sparse(source, config(layers, hidden, inner, 4096), tensors_per_shard=16, random_rows=None)
    begin = time.perf_counter()
    finish(converter(source, output))
    whole = time.perf_counter() - begin
    expected, resumed, same = sha256(output), 0, 0
    for number in range(kills):
        output.unlink()
        child = converter(source, output)
        time.sleep(generator.uniform(0, whole))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        journal = output.with_name(f".{output.name}.journal")
        resumed += journal.exists() and journal.read_bytes().count(b"\n") > 1
        if not output.exists():
            finish(converter(source, output))
        same += sha256(output) == expected
        print(
            f"{number + 1} kills, {resumed} went on with finished rows, {same} same bytes", file=sys.stderr, flush=True
        )
    leftovers = [path.name for path in directory.iterdir() if path.name.startswith(".")]
    return {
        "source_bytes": nbytes,
        "seconds_without_kill": round(whole, 1),
        "kills": kills,
        "went_on_with_finished_rows": int(resumed),
        "same_bytes": same,
        "leftovers": leftovers,
    }


def printed(command: list[Any]) -> str:
    """Run a command; return the last line that it prints."""
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return done.stdout.strip().splitlines()[-1]


def speed(directory: Path, megabytes: float, llama: Path, rounds: int = 3) -> dict[str, Any]:
    """Time both quantizers by turns, on one thread and on two; the best round of each counts."""
    hidden, inner = 1024, 2816
    layers = max(1, round(megabytes * 1e6 / (2 * (2.5 * hidden**2 + 3 * hidden * inner))))
    source, float_file = directory / "model", directory / "bf16.gguf"
    nbytes, _ = write_sparse(source, config(layers, hidden, inner, 4096), tensors_per_shard=16, random_rows=None)
    subprocess.run([sys.executable, "-c", CONVERT, source, float_file, "gguf:BF16", "1 GB"], check=True)
    ours, theirs = directory / "detent.gguf", directory / "llama.gguf"
    seconds: dict[str, list[float]] = {}
    for _ in range(rounds):
        for threads in (1, 2):
            own = printed([sys.executable, "-c", TIME_DETENT, float_file, ours, str(threads)])
            seconds.setdefault(f"detent, {threads} threads", []).append(float(own))
            other = printed([llama, "-c", TIME_LLAMA, float_file, theirs, str(threads)])
            seconds.setdefault(f"llama.cpp, {threads} threads", []).append(float(other))
    differing, count = map(int, printed([sys.executable, "-c", COMPARE, ours, theirs]).split())
    best = {name: min(values) for name, values in seconds.items()}
    return {
        "source_bytes": nbytes,
        "seconds": {name: round(value, 2) for name, value in best.items()},
        "times_as_fast": {
            f"{threads} threads": round(best[f"llama.cpp, {threads} threads"] / best[f"detent, {threads} threads"], 2)
            for threads in (1, 2)
        },
        "tensors": count,
        "tensors_that_differ": differing,
    }


def mutations(count: int, formats: Sequence[str]) -> dict[str, Any]:
    """Open and convert mutated files; every format in a process of its own, whose memory is measured."""
    rows = {}
    for form in formats:
        begin = time.perf_counter()
        command = [sys.executable, "-c", FUZZ, form, str(count)]
        valid, errors, slowest, grown = map(float, printed(command).split())
        rows[form] = {
            "files": count,
            "valid": int(valid),
            "errors": int(errors),
            "slowest_seconds": round(slowest, 3),
            "grown_bytes": int(grown),
            "seconds": round(time.perf_counter() - begin, 1),
        }
        print(form, rows[form], file=sys.stderr, flush=True)
    return rows


def store(path: Path, proof: str, result: dict[str, Any]) -> None:
    """Add a result to the file, and keep those of other proofs and of other formats."""
    results = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    results[proof] = {**results.get(proof, {}), **result} if proof == "mutations" else result
    path.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def main() -> None:
    """Run one of the proofs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("proof", choices=("memory", "kill", "speed", "mutations"))
    parser.add_argument("--directory", type=Path, help="where temporary files are written; a disk, not memory")
    parser.add_argument("--gigabytes", type=float, default=20)
    parser.add_argument("--budget", default="1 GB")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--megabytes", type=float, default=200)
    parser.add_argument("--mutations", type=int, default=10_000)
    parser.add_argument("--formats", nargs="*", default=list(fuzz_checkpoints.FORMATS), help="of mutated files")
    parser.add_argument("--llama", type=Path, help="Python that has cyllama")
    parser.add_argument("--output", type=Path, help="file of results")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as name:
        directory = Path(name)
        if options.proof == "memory":
            result = memory(directory, options.gigabytes, options.budget)
        elif options.proof == "speed":
            result = speed(directory, options.megabytes, options.llama)
        elif options.proof == "kill":
            result = kill(directory, options.kills, options.megabytes)
        else:
            result = mutations(options.mutations, options.formats)
    print(json.dumps({"proof": options.proof, **result}, indent=2))
    if options.output is not None:
        store(options.output, options.proof, result)


if __name__ == "__main__":
    main()
