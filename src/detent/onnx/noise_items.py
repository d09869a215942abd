"""Noise at the outputs on an executor: workers run the model on some samples, with some layers quantized.

A ``NoiseSetup`` is written to the workspace once. It names the model, the samples and the Q/DQ pairs; workers build
one session from it and keep it. A measurement is a ``NoiseItem``: which weights and which pairs are quantized, with
which parameters, on which samples. The noise of each sample is computed as in one process, and the driver adds it up in
the same order.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from detent.array_store import ArrayStore
from detent.error_places import at
from detent.onnx.graph_plan import weight_params
from detent.onnx.layer_error import Switch, SwitchableModel, output_noise
from detent.onnx_model.targets import get_target
from detent.onnx_model.workspace import Workspace, ranges, read_arrays, read_model, runtime_environment
from detent.ops import fake_quantize
from detent.params import QuantParams
from detent.spec import QuantSpec
from detent.work_items import FileStamp, run_items, workers_of

__all__ = ["RemoteNoise"]

Array = NDArray[Any]
Feed = dict[str, Array]
MODELS_KEPT = 2


class _Pair(NamedTuple):
    """Parameters of a Q/DQ pair: scale and zero point of the pair with this flag."""

    flag: str
    scale: float
    zero_point: int


class _NoiseItem(NamedTuple):
    """A measurement on some samples.

    Attributes:
        setup: the file that ``RemoteNoise`` wrote.
        specs: specs as JSON.
        weights: quantized layers, and the index of each weight's spec in ``specs``.
        flags: Q/DQ pairs that are turned on.
        params: parameters of pairs that differ from the setup; one tuple per set of parameters.
        samples: numbers of samples, and the index of each sample's set in ``params``.
        has_all: whether all weights and pairs are quantized.
    """

    setup: FileStamp
    specs: tuple[str, ...]
    weights: tuple[tuple[str, int], ...]
    flags: tuple[str, ...]
    params: tuple[tuple[_Pair, ...], ...]
    samples: tuple[tuple[int, int], ...]
    has_all: bool


class RemoteNoise:
    """Measurements of the noise at the outputs by the workers of a workspace."""

    def __init__(
        self,
        workspace: Workspace,
        model: FileStamp,
        layers: Sequence[str],
        switches: Sequence[Switch],
        target: str,
        outputs: Sequence[str],
        samples: Sequence[Feed],
        memory_budget: int | None = None,
    ) -> None:
        self._workspace = workspace
        setup = {
            "model": asdict(model),
            "layers": list(layers),
            "switches": [
                [each.flag, each.tensor, each.params.spec.to_json(), *_numbers(each.params), each.readers]
                for each in switches
            ],
            "target": target,
            "outputs": list(outputs),
            "samples": [asdict(workspace.add_arrays(feed)) for feed in samples],
            "memory_budget": memory_budget,
        }
        self._setup = workspace.add_json(setup)

    def run(
        self,
        weights: Mapping[str, QuantSpec],
        flags: Sequence[str],
        params: Sequence[Mapping[str, QuantParams]],
        samples: Sequence[int],
        has_all: bool,
    ) -> Iterator[list[float | None]]:
        """Yield the noise of each output, sample by sample; None for an output whose shape or type differs.

        Workers compute all samples, even if the caller stops early.

        Args:
            weights: specs of the quantized weights, by layer.
            flags: Q/DQ pairs that are turned on.
            params: for each sample, new parameters of Q/DQ pairs, by flag. Samples may share a dict.
            samples: numbers of the samples.
            has_all: whether all weights and pairs are quantized; runs are faster then.
        """
        specs = list(dict.fromkeys(weights.values()))
        sets = {id(each): each for each in params}
        places = {key: place for place, key in enumerate(sets)}
        tables = tuple(tuple(_Pair(flag, *_numbers(each)) for flag, each in one.items()) for one in sets.values())
        size = max(1, -(-len(samples) // workers_of(self._workspace.executor)))
        items = [
            _NoiseItem(
                self._setup,
                tuple(spec.to_json() for spec in specs),
                tuple((name, specs.index(spec)) for name, spec in weights.items()),
                tuple(flags),
                tables,
                tuple((samples[i], places[id(params[i])]) for i in part),
                has_all,
            )
            for part in ranges(len(samples), size)
        ]
        for noises in run_items(self._workspace.executor, _measure, items, runtime_environment):
            yield from noises


def _numbers(params: QuantParams) -> tuple[float, int]:
    return float(params.scale), int(params.zero_point)


@dataclass(frozen=True)
class _WorkerModel:
    """State that a worker keeps for a setup."""

    model: SwitchableModel
    specs: Mapping[str, QuantSpec]  # of Q/DQ pairs, by flag
    outputs: tuple[str, ...]
    samples: tuple[FileStamp, ...]
    weights: dict[tuple[str, str], Array]  # quantized weights, by layer and spec
    references: ArrayStore  # float outputs, by sample

    def weight(self, name: str, spec: str) -> Array:
        """Return a quantized weight."""
        if (name, spec) not in self.weights:
            array = self.model.weights[name]
            with at("layer", name):
                self.weights[name, spec] = fake_quantize(array, weight_params(array, QuantSpec.from_json(spec)))
        return self.weights[name, spec]

    def reference(self, sample: int) -> list[Array]:
        """Return the outputs of the float model."""
        if sample not in self.references:
            self.references[sample] = self.model.run(self.outputs, read_arrays(self.samples[sample]), {}, ())
        return self.references[sample]


@lru_cache(maxsize=MODELS_KEPT)
def _worker_model(stamp: FileStamp) -> _WorkerModel:
    setup = json.loads(stamp.check().read_text(encoding="utf-8"))
    switches = [
        Switch(flag, tensor, _params(QuantSpec.from_json(spec), scale, zero_point), tuple(readers))
        for flag, tensor, spec, scale, zero_point, readers in setup["switches"]
    ]
    model = SwitchableModel(
        read_model(FileStamp.from_dict(setup["model"])),
        {name: [name] for name in setup["layers"]},
        switches,
        get_target(setup["target"]),
        threads=1,
    )
    specs = {each.flag: each.params.spec for each in switches}
    samples = tuple(FileStamp.from_dict(each) for each in setup["samples"])
    return _WorkerModel(model, specs, tuple(setup["outputs"]), samples, {}, ArrayStore(setup["memory_budget"]))


def _params(spec: QuantSpec, scale: float, zero_point: int) -> QuantParams:
    return QuantParams(spec, scale=np.float32(scale), zero_point=np.int32(zero_point))


def _measure(item: _NoiseItem) -> list[list[float | None]]:
    """Measure the noise of each output in a worker, sample by sample."""
    state = _worker_model(item.setup)
    weights = {name: state.weight(name, item.specs[place]) for name, place in item.weights}
    prepared = [
        state.model.prepared({pair.flag: _params(state.specs[pair.flag], pair.scale, pair.zero_point) for pair in one})
        for one in item.params
    ]
    noises = []
    for sample, place in item.samples:
        feed = read_arrays(state.samples[sample])
        if item.has_all:
            outputs = state.model.run_quantized(state.outputs, feed, weights, prepared[place])
        else:
            outputs = state.model.run(state.outputs, feed, weights, item.flags, prepared[place])
        noises.append([output_noise(old, new) for old, new in zip(state.reference(sample), outputs, strict=True)])
    return noises
