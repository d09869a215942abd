"""Float fallback: keeps a few layers in float if each of them alone causes much of the noise at the outputs.

Layers are chosen one by one. After each layer, the others are compared with the noise that remains, and the search ends
when this noise is negligible (30 dB). A layer is kept in float if all of these conditions hold:

- Quantizing only this layer causes at least a tenth of the remaining noise.
- All layers kept in float hold at most a tenth of the model's weight bytes.
- Keeping the layer in float removes enough of the remaining noise: over 8 times the layer's share of the model's cost,
  with a minimum of 15 % and a maximum of 50 %. The cost is counted in weight bytes and in multiplications; the larger
  of both shares counts. With the minimum, a few samples suffice to tell a gain from chance.
- Another layer remains quantized.

If the remaining noise is not negligible, ranges are searched again and float fallback runs once more
(``quantizer_choice``), because without the noise of these layers, other ranges are better and other layers cause most
of the noise: in three OCR models, this gained 0.7, 3.1 and 5.7 dB.

The condition that another layer remains matters if the noise is as large as the signal, because the errors of several
layers may then cancel. With less noise, the noise of a group of layers is about the sum of the layers' noise. So groups
of layers are measured first, and only noisy groups are split further.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from math import inf
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from detent.error_places import at
from detent.onnx.decisions import QuantizerPlacement
from detent.onnx.graph_plan import GraphPlan, LayerPlan
from detent.onnx.layer_error import ReferenceOutputs, Switch, SwitchableModel
from detent.onnx.noise_items import RemoteNoise
from detent.onnx_model.sessions import array_outputs
from detent.onnx_model.workspace import Workspace
from detent.ops import fake_quantize
from detent.params import QuantParams
from detent.spec import QuantSpec

__all__ = ["NoiseByLayer", "choose_float", "search_by_halves"]

_log = logging.getLogger(__name__)

MIN_NOISE_SHARE = 0.1  # only layers that alone cause this share of the remaining noise are tried
MAX_WEIGHT_SHARE = 0.1  # share of the model's weight bytes; more would undo the compression
MAX_LAYERS = 8  # limit on the layers kept in float
NEGLIGIBLE_NOISE = 1e-3  # noise relative to the power of an output (30 dB); below it, no layer gets more precision
REMOVED_NOISE_PER_COST = 8.0  # share of the remaining noise that float must remove, per share of the model's cost
MIN_REMOVED_NOISE, MAX_REMOVED_NOISE = 0.15, 0.5  # limits of the share that float must remove
MEASURED_TYPES = (TensorProto.UNDEFINED, TensorProto.FLOAT, TensorProto.FLOAT16)  # types of measured outputs
SEARCH_SAMPLES = 2  # samples for the search; candidates are then measured on all samples

Array = NDArray[Any]
Feed = dict[str, Array]


def choose_float(
    noise: "NoiseByLayer",
    plan: GraphPlan,
    work: Mapping[str, float],
    replan: Callable[[Sequence[str]], GraphPlan],
    earlier: Collection[str] = (),
) -> dict[str, float]:
    """Choose at most 8 layers to keep in float; return a dict from layer names to the share of the noise removed.

    The module docstring lists the conditions. The shares add up to at most 1. ``work`` has the multiplications of each
    layer. ``replan`` returns the plan with some layers in float. ``replan`` may also change earlier layers, for example
    to keep the inputs of float layers quantized. Layers in ``earlier`` are already in float in ``plan``; they count.
    """
    total = remaining = noise.noise_without()
    if not np.isfinite(total) or total <= NEGLIGIBLE_NOISE * noise.count:
        return {}
    sizes = {line.name: line.nbytes_before for line in plan.layers}
    spare = MAX_WEIGHT_SHARE * plan.nbytes_before - sum(sizes[name] for name in earlier)
    total_work = sum(work.values()) or 1.0
    required = {
        name: _required_gain(size / max(1, plan.nbytes_before), work.get(name, 0.0) / total_work)
        for name, size in sizes.items()
    }
    kept: dict[str, float] = {}
    rejected: set[str] = set()
    while len(kept) + len(earlier) < MAX_LAYERS and remaining > NEGLIGIBLE_NOISE * noise.count:
        excluded = rejected | set(kept)
        worst = [name for name in noise.worst(MIN_NOISE_SHARE, kept) if name not in excluded and sizes[name] < spare]
        alone: dict[str, float] = {}
        for name in worst:
            with at("layer", name):
                alone[name] = noise.noise([name])  # now measured on all samples
        alone = {name: each for name, each in alone.items() if each >= MIN_NOISE_SHARE * remaining}
        if not alone:
            break
        name = max(alone, key=lambda name: alone[name] / max(1, sizes[name]))
        with at("layer", name):
            changed = replan([*earlier, *kept, name])
            limit = (1 - required[name]) * remaining
            without = noise.noise_of(changed, limit)
        if changed.quantized and without < limit:
            kept[name] = (remaining - without) / total
            remaining, spare = without, spare - sizes[name]
        else:
            rejected.add(name)
    return kept


def _required_gain(byte_share: float, work_share: float) -> float:
    """Return the share of the noise that a layer must remove to be kept in float.

    >>> _required_gain(0.001, 0.01), _required_gain(0.03125, 0.02), _required_gain(0.05, 0.4)
    (0.15, 0.25, 0.5)
    """
    share = REMOVED_NOISE_PER_COST * max(byte_share, work_share)
    return min(max(share, MIN_REMOVED_NOISE), MAX_REMOVED_NOISE)


class NoiseByLayer:
    """Measurement of the noise at the outputs, relative to their power, with some layers quantized.

    The Q/DQ pair of an activation belongs to the layers that read the activation. If no layer reads it, the pair
    belongs to the layer that computes it. ``placements`` says which nodes read the quantized values, as in the file; by
    default it is ``plan.placements()``. With a workspace, workers run the quantized model. ``memory_budget`` limits the
    bytes of the float outputs in memory.
    """

    def __init__(
        self,
        plan: GraphPlan,
        params: Mapping[str, QuantParams],
        samples: Sequence[Feed],
        workspace: Workspace | None = None,
        placements: Iterable[QuantizerPlacement] | None = None,
        memory_budget: int | None = None,
    ) -> None:
        self.layers = [line.name for line in plan.quantized]
        self._ratios: dict[tuple[frozenset[str], int], list[float]] = {}
        self._rounded: dict[tuple[str, QuantSpec | None], Array] = {}  # weights, by layer and spec
        self._weights: dict[str, LayerPlan] = {}
        self.set_weights(plan)
        self._owners = {tensor: _owners(plan, tensor, self.layers) for tensor in params}
        self._samples = samples
        placed = plan.placements() if placements is None else placements
        readers = {each.tensor: each.readers for each in placed}
        switches = [Switch(_flag(tensor), tensor, each, readers.get(tensor, ())) for tensor, each in params.items()]
        by_layer = {name: [name] for name in self._weights}
        self._model = SwitchableModel(plan.model, by_layer, switches, plan.target)
        self._outputs = [each for each in array_outputs(plan.model) if plan.graph.kind(each) in MEASURED_TYPES]
        floats = (self._run(feed, frozenset()) for feed in samples)
        self._references = ReferenceOutputs(self._outputs, floats, memory_budget)
        self._all = frozenset((*self.layers, *map(_flag, params)))  # a layer may have the name of a tensor
        for i, feed in enumerate(samples):
            outputs = self._run(feed, self._all)
            self._references.leave_out(i, outputs)
            self._ratios[self._all, i] = self._references.noise(i, outputs)
        self._by_noise = sorted(range(len(samples)), key=lambda i: -sum(self._ratios[self._all, i]))
        self._new_params: dict[str, QuantParams] = {}  # set by set_params, by flag
        self._remote: RemoteNoise | None = None
        # Workers compute the scales of weights themselves, but know nothing of scales that fit the data.
        if workspace is not None and self._outputs and samples and not plan.has_fitted_scales:
            model, names = workspace.add_model(plan.model), list(self._weights)
            self._remote = RemoteNoise(
                workspace, model, names, switches, plan.target.name, self._outputs, samples, memory_budget
            )
        if self._outputs and not self.count:
            _log.info("the noise at the outputs was not measured, because the shapes of all outputs depend on the data")

    @property
    def count(self) -> int:
        """Number of compared outputs, summed over the samples."""
        return self._references.count

    @property
    def samples(self) -> int:
        """Number of samples."""
        return len(self._samples)

    def set_weights(self, plan: GraphPlan) -> None:
        """Use the weight specs of ``plan``; all else in ``plan`` must equal the plan passed to the constructor."""
        weights = {line.name: line for line in plan.quantized if line.weight is not None}
        if weights != self._weights:
            self._ratios.clear()
        self._plan, self._weights = plan, weights
        used = {(name, line.weight) for name, line in weights.items()}
        self._rounded = {key: array for key, array in self._rounded.items() if key in used}

    def set_params(self, params: Mapping[str, QuantParams]) -> None:
        """Replace the parameters of some tensors in all further measurements."""
        for tensor, each in params.items():
            self._model.set_params(_flag(tensor), each)
            self._new_params[_flag(tensor)] = each
        if params:
            self._ratios.clear()

    def use(self, params: Mapping[str, QuantParams]) -> None:
        """Replace the parameters of those tensors for which this is possible; see ``set_params``."""
        self.set_params({tensor: each for tensor, each in params.items() if self.can_replace(tensor)})

    def can_replace(self, tensor: str) -> bool:
        """Whether ``noises_by_sample`` can replace the parameters of a tensor."""
        return tensor in self._owners and self._model.can_replace(_flag(tensor))

    def noise_with(self, rows: Mapping[str, LayerPlan]) -> float:
        """Measure the noise with all layers quantized; ``rows`` are plan rows of layers with another weight spec."""
        if not rows:
            return self.noise_without()
        used = {name: rows.get(name, line) for name, line in self._weights.items()}
        flags, numbers = [_flag(tensor) for tensor in self._owners], range(len(self._samples))
        unchanged: dict[str, QuantParams] = {}
        total = 0.0
        for ratios in self._measured(used, flags, [unchanged] * len(numbers), numbers):
            total += sum(ratios)
        return total

    def noises_by_sample(self, params: Sequence[Mapping[str, QuantParams]]) -> Iterator[float]:
        """Yield the noise of each sample with all layers quantized, and with new parameters of some tensors.

        ``params`` has one dict for each of the first samples: the new parameters by tensor name. The samples that had
        the most noise at first come first, so that the caller can stop early.
        """
        order = [i for i in self._by_noise if i < len(params)]
        flags = [_flag(tensor) for tensor in self._owners]
        for ratios in self._measured(self._weights, flags, [params[i] for i in order], order, has_all=True):
            yield sum(ratios)

    def _measured(
        self,
        lines: Mapping[str, LayerPlan],
        flags: Sequence[str],
        params: Sequence[Mapping[str, QuantParams]],
        samples: Sequence[int],
        *,
        has_all: bool = False,
    ) -> Iterator[list[float]]:
        """Yield the noise of each output, sample by sample, with some weights and some Q/DQ pairs quantized.

        ``params`` has new parameters of tensors, one dict per sample; samples may share a dict. With ``has_all``, all
        weights and pairs are quantized, and runs are faster.
        """
        by_flag: dict[int, dict[str, QuantParams]] = {}  # by identity: many samples share their parameters
        for one in params:
            if id(one) not in by_flag:
                by_flag[id(one)] = {_flag(tensor): each for tensor, each in one.items()}
        if self._remote is not None:
            by_flag = {key: {**self._new_params, **each} for key, each in by_flag.items()}
            specs = {name: line.weight for name, line in lines.items() if line.weight is not None}
            each_params = [by_flag[id(one)] for one in params]
            for i, noises in zip(samples, self._remote.run(specs, flags, each_params, samples, has_all), strict=True):
                yield self._references.relative(i, dict(enumerate(noises)))
            return
        weights = {name: self._rounded_weight(name, line) for name, line in lines.items()}
        prepared = {key: self._model.prepared(each) for key, each in by_flag.items()}
        for i, one in zip(samples, params, strict=True):
            feed, stored = self._samples[i], prepared[id(one)]
            if has_all:
                outputs = self._model.run_quantized(self._outputs, feed, weights, stored)
            else:
                outputs = self._model.run(self._outputs, feed, weights, flags, stored)
            yield self._references.noise(i, outputs)

    def noise(self, layers: Iterable[str], samples: int | None = None) -> float:
        """Measure the noise with only these layers quantized."""
        return self._noise(self._parts(layers), samples)

    def noise_without(self, layers: Iterable[str] = (), samples: int | None = None) -> float:
        """Measure the noise with all layers quantized except these."""
        return self._noise(self._all - self._parts(layers), samples)

    def sample_noises(self) -> list[float]:
        """Return the noise with all layers quantized, sample by sample."""
        self._noise(self._all, None)
        return [sum(self._ratios[self._all, i]) for i in range(len(self._samples))]

    def noise_of(self, plan: GraphPlan, limit: float = inf) -> float:
        """Measure the noise with the quantized layers and the Q/DQ pairs of another plan for the same model.

        As soon as the noise is above ``limit``, the remaining samples are left out.
        """
        return self._noise(self._parts_of(plan), None, limit)

    def largest_noise_of(self, plan: GraphPlan) -> float:
        """Measure another plan for the same model as ``noise_of`` does; return the mean noise of the worst output."""
        parts = self._parts_of(plan)
        self._noise(parts, None)
        return fmean(max(self._ratios[parts, i], default=0.0) for i in range(len(self._samples)))

    def _parts_of(self, plan: GraphPlan) -> frozenset[str]:
        placed = {_flag(each.group) for each in plan.placements()}
        return self._all & ({line.name for line in plan.quantized} | placed)

    def worst(self, share: float, kept: Iterable[str] = ()) -> dict[str, float]:
        """Return the layers that each cause at least the fraction ``share`` of the noise, with their fractions.

        The noise is measured on the first samples, with the layers in ``kept`` in float.
        """
        total = max(self.noise_without(kept, SEARCH_SAMPLES), 1e-30)
        return search_by_halves(self.layers, lambda names: self.noise(names, SEARCH_SAMPLES) / total, share)

    def _parts(self, layers: Iterable[str]) -> frozenset[str]:
        """Return the names of some layers, and the flags of the Q/DQ pairs that belong to these layers."""
        names = set(layers)
        return frozenset(names | {_flag(tensor) for tensor, owners in self._owners.items() if names & owners})

    def _noise(self, parts: frozenset[str], samples: int | None, limit: float = inf) -> float:
        numbers = [i for i in self._by_noise if samples is None or i < samples]
        missing = [i for i in numbers if (parts, i) not in self._ratios]
        lines = {name: line for name, line in self._weights.items() if name in parts}
        flags = [_flag(tensor) for tensor in self._owners if _flag(tensor) in parts]
        unchanged: dict[str, QuantParams] = {}
        measured = self._measured(lines, flags, [unchanged] * len(missing), missing)
        total = 0.0
        for i in numbers:
            if (parts, i) not in self._ratios:
                self._ratios[parts, i] = next(measured)
            for ratio in self._ratios[parts, i]:
                total += ratio
            if total > limit:
                break
        return total

    def _run(self, feed: Feed, parts: frozenset[str]) -> list[Array]:
        weights = {name: self._rounded_weight(name, line) for name, line in self._weights.items() if name in parts}
        flags = [_flag(tensor) for tensor in self._owners if _flag(tensor) in parts]
        return self._model.run(self._outputs, feed, weights, flags)

    def _rounded_weight(self, name: str, line: LayerPlan) -> Array:
        key = name, line.weight
        if key not in self._rounded:
            with at("layer", name):
                self._rounded[key] = fake_quantize(self._model.weights[name], self._plan.weight_params(line))
        return self._rounded[key]


def search_by_halves(
    names: Sequence[str], share_of: Callable[[Sequence[str]], float], min_share: float
) -> dict[str, float]:
    """Return the names whose share is at least ``min_share``, with their shares.

    ``share_of`` measures the share of several names together. Only groups with a large share are split into halves.
    """
    if not names:
        return {}
    with at("layer", names[0]) if len(names) == 1 else nullcontext():
        share = share_of(names)
    if share < min_share:
        return {}
    if len(names) == 1:
        return {names[0]: share}
    half = len(names) // 2
    return search_by_halves(names[:half], share_of, min_share) | search_by_halves(names[half:], share_of, min_share)


def _flag(tensor: str) -> str:
    return f"{tensor}//input"


def _owners(plan: GraphPlan, tensor: str, names: Sequence[str]) -> frozenset[str]:
    """Return the layers that read a tensor.

    If there are none, return the layer that computes the tensor, directly or through a Relu or Clip.
    """
    readers = frozenset(name for name in names if tensor in plan.layers_by_name[name].activations)
    if readers:
        return readers
    producer = plan.graph.producer(tensor)
    results = {tensor}
    if producer is not None and producer.op_type in {"Relu", "Clip"}:
        results.add(producer.input[0])
    return frozenset(name for name in names if plan.layers_by_name[name].node.output[0] in results)
