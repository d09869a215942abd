"""Open mutated checkpoint files: each must give a DetentError or a valid result, quickly and in little memory.

``python tests/tools/fuzz_checkpoints.py 10000`` runs 10,000 mutations per format and prints one line per format.
"""

import json
import random
import resource
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import detent as dt
import detent.checkpoint as qc
from detent.checkpoint_files.gguf_writer import gguf_layout

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.checkpoint.tiny_checkpoints import CONFIG, llama_tensors, write_checkpoint  # noqa: E402

MAX_SECONDS, MAX_BYTES, MAX_MESSAGE = 1.0, 200 << 20, 3000
INTERESTING = (0, 1, 3, 31, 32, 255, 1 << 31, (1 << 32) - 1, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
FORMATS = ("safetensors", "index", "config", "gguf", "split gguf")
SMALL = CONFIG | {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 16}


def mutated(data, generator):
    """Change bytes: mostly in the first part, where headers are."""
    buffer = bytearray(data)
    for _ in range(generator.choice((1, 1, 1, 2, 4))):
        at = (
            generator.randrange(min(len(buffer), 4096) or 1)
            if generator.random() < 0.9
            else generator.randrange(len(buffer))
        )
        kind = generator.randrange(7)
        if kind == 0:
            buffer[at] ^= 1 << generator.randrange(8)
        elif kind == 1:
            buffer[at : at + 8] = generator.choice(INTERESTING).to_bytes(8, "little")
        elif kind == 2:
            buffer[at : at + 4] = (generator.choice(INTERESTING) & 0xFFFFFFFF).to_bytes(4, "little")
        elif kind == 3:
            del buffer[at : at + generator.choice((1, 8, 64, len(buffer)))]
        elif kind == 4:
            buffer[at:at] = buffer[at : at + generator.choice((1, 8, 100))]
        elif kind == 5:
            buffer[at] = generator.choice(b'0123456789"{}[]:,-.eE\\')
        else:
            other = generator.randrange(len(buffer))
            buffer[at : at + 16] = buffer[other : other + 16]
        if not buffer:
            break
    return bytes(buffer)


def write_gguf(path, tensors, entries=()):
    layout = gguf_layout(
        [("general.architecture", "string", "llama"), ("t.tokens", "array:string", ["a", "b", "c"]), *entries],
        [(name, array.shape, "Q8_0" if array.shape[-1] % 32 == 0 else "F32") for name, array in tensors.items()],
    )
    buffer = bytearray(layout.nbytes)
    buffer[: len(layout.header)] = layout.header
    for place in layout.tensors:
        array = tensors[place.name]
        data = dt.quantize(array, "q8_0").packed if place.type.name == "Q8_0" else array
        buffer[place.offset : place.offset + place.nbytes] = data.tobytes()
    path.write_bytes(buffer)


def prepare(form, directory):
    """Write valid files; return the path to open and the file to mutate."""
    generator = np.random.default_rng(0)
    tensors = {name: generator.normal(size=(4, 64)).astype(np.float32) for name in ("a", "b")}
    tensors["n"] = np.ones(5, np.float32)
    if form == "gguf":
        write_gguf(directory / "m.gguf", tensors)
        return directory / "m.gguf", directory / "m.gguf"
    if form == "split gguf":
        for number, names in enumerate((("a",), ("b", "n"))):
            split = [("split.no", "uint16", number), ("split.count", "uint16", 2), ("split.tensors.count", "int32", 3)]
            path = directory / f"m-0000{number + 1}-of-00002.gguf"
            write_gguf(path, {name: tensors[name] for name in names}, split)
        return directory / "m-00001-of-00002.gguf", directory / "m-00002-of-00002.gguf"
    write_checkpoint(directory / "m", llama_tensors(SMALL), SMALL, shards=2)
    files = {
        "safetensors": "model-00001-of-00002.safetensors",
        "index": "model.safetensors.index.json",
        "config": "config.json",
    }
    return directory / "m", directory / "m" / files[form]


def use(path, directory):
    """Open a checkpoint and use all of it, as users would."""
    source = qc.open(path)
    for tensor in source.values():
        tensor.read()
        tensor.dequantize()
    json.dumps(source.config)
    output = directory / "out.gguf"
    qc.quantize(source, output, "gguf:Q8_0", vocabulary=False, resume=False)
    output.unlink()


def fuzz(form, count, seed=0):
    """Return the number of valid results and of errors, and the slowest case in seconds."""
    generator = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        path, file = prepare(form, directory)
        use(path, directory)
        original, valid, errors, slowest, longest = file.read_bytes(), 0, 0, 0.0, 0
        for number in range(count):
            data = mutated(original, generator)
            file.write_bytes(data)
            begin = time.perf_counter()
            cpu = time.process_time()
            try:
                use(path, directory)
                valid += 1
            except dt.DetentError as error:
                errors, longest = errors + 1, max(longest, len(str(error)))
            except Exception as error:
                raise AssertionError(f"{form}, mutation {number} of seed {seed}: {error!r}") from error
            slowest = max(slowest, min(time.perf_counter() - begin, time.process_time() - cpu))
            leftovers = [each.name for each in directory.iterdir() if each.name.startswith((".", "out"))]
            assert not leftovers, f"{form}, mutation {number} of seed {seed} left {leftovers}"
    assert longest < MAX_MESSAGE, f"{form}: a message of {longest} characters"
    return valid, errors, slowest


def main(count, forms=FORMATS):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    for form in forms:
        valid, errors, slowest = fuzz(form, count)
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10) - before
        print(f"{form}: {count} files, {valid} valid, {errors} errors, slowest {slowest:.3f} s, +{grown >> 20} MB")
        assert slowest < MAX_SECONDS
        assert grown < MAX_BYTES


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:] or FORMATS)
