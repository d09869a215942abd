"""Advice for a quantized model that is not faster than its float model: slow layers, and options that help.

The profile of ONNX Runtime holds the time of each node. A node belongs to a layer if it has the layer's name or output.
If a layer runs in float, the DequantizeLinear node of its weight also belongs to the layer. The slow layers are the
layers that lose the most time in the quantized model.

An option is advised only if it helps. To find out, the float model is quantized again with this option, and timed. The
options are fast storage of weights (``--prefer speed`` or a target for VNNI) and ``--skip``.
"""

import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from os import fspath
from pathlib import Path
from typing import NamedTuple

from detent.errors import DetentError
from detent.evaluate.speed import SAME_SPEED, Timing, duration_text
from detent.granularity import PerGroup
from detent.onnx.decisions import Decisions, RangeDecision
from detent.onnx.fast_kernels import multiplications, with_last_layers
from detent.onnx.graph_plan import GraphPlan
from detent.onnx.pipeline import LayerReport, QuantizeReport
from detent.onnx.quality_warnings import QuantizeWarning
from detent.onnx.quantized_graph import placed, rewrite
from detent.onnx_model.files import LoadedModel, ModelSource
from detent.onnx_model.graph import DEQUANTIZE, QUANTIZERS, Graph
from detent.onnx_model.model_inputs import Feed
from detent.onnx_model.provenance import Provenance
from detent.onnx_model.sessions import make_session, ort_errors, written_name
from detent.onnx_model.targets import PREFER_SPEED, faster, has_vnni
from detent.recipe import skip_flag
from detent.spec import QuantSpec
from detent.tables import short_name

__all__ = ["SpeedAdvice", "advise"]

PROFILED_RUNS = 5
MAX_LAYERS_NAMED = 3
MIN_EXTRA = 0.01  # relative to the float model's time; a layer that loses less time is not named
MIN_QUANTIZERS = 0.05  # relative to the float model's time; quantizers that take less time are not mentioned
BYTE = 8  # bits
SKIPPED = "skipped"
ANY_RANGE = RangeDecision(1.0, 0)  # for tensors that only the tried option quantizes
NO_OPTION_HELPS = "No option helps: quantizing does not make this model faster on this CPU"
OTHER_RECIPE = (
    "ONNX Runtime has integer kernels only for weights and activations of at most 8 bits without groups: for speed, "
    "try --recipe w8a8"
)
WEIGHT_ONLY = "Weight-only recipes make files smaller, not faster: for speed, try --recipe w8a8"
# operators that ONNX Runtime may fuse with the convolution before them
FUSED = ("Add", "Clip", "HardSigmoid", "LeakyRelu", "Relu", "Sigmoid", "Tanh")
_KERNEL_TIME = "_kernel_time"
_RENAMED = re.compile(r"^fused |(_nchwc|/\w+Fusion/?)$")  # what ONNX Runtime adds to names of float nodes
Measure = Callable[[ModelSource], Timing]


class SpeedAdvice(NamedTuple):
    """Hints for a model that is as fast as its float model, or a warning for a slower model."""

    hints: tuple[str, ...] = ()
    warnings: tuple[QuantizeWarning, ...] = ()


def advise(
    source: LoadedModel,
    quantized: LoadedModel,
    result: QuantizeReport,
    timing: Timing,
    feeds: Sequence[Feed],
    measure: Measure,
) -> SpeedAdvice:
    """Advise on a model that is not faster than its float model.

    The result is empty for OpenVINO, because times in ONNX Runtime say nothing about times in OpenVINO.

    Args:
        source: the float model.
        quantized: the quantized model.
        result: the report of ``qo.quantize``.
        timing: times of both models.
        feeds: batches for the profile.
        measure: function that receives a model, and times this model and the float model.
    """
    if timing.is_faster or result.plan.target.runtime != "onnxruntime":
        return SpeedAdvice()
    is_weight_only = not any(layer.input for layer in result.layers)
    trials = _Trials(source, result, timing, measure)
    options = [] if is_weight_only else [*trials.fast_kernels(feeds[0])]
    if not timing.is_slower:
        return SpeedAdvice(tuple(f"a faster option for this model: {option}" for option in options))
    times = _layer_times(result, quantized, feeds)
    slow = [each for each in times.layers if each.extra_ms >= MIN_EXTRA * timing.first_ms][:MAX_LAYERS_NAMED]
    if not is_weight_only:
        options += trials.skipping([each.layer.name for each in slow if not each.layer.reason])
    causes = [str(each) for each in slow]
    if times.quantizers_ms >= MIN_QUANTIZERS * timing.first_ms:
        causes.append(f"quantizing and dequantizing activations takes {duration_text(times.quantizers_ms)}")
    text = [f"the quantized model is slower than the float model: {timing}"]
    if causes:
        text.append(f"Where the time goes: {'; '.join(causes)}")
    text.append(WEIGHT_ONLY if is_weight_only else _options_text(options, result))
    return SpeedAdvice(warnings=(QuantizeWarning("slower", ". ".join(text)),))


# Options


class _Option(NamedTuple):
    """An option that makes the quantized model faster, with the times of the float model and of the faster model."""

    text: str
    float_ms: float
    ms: float

    def __str__(self) -> str:
        return f"{self.text}: {duration_text(self.ms)}"


def _options_text(options: Sequence[_Option], result: QuantizeReport) -> str:
    if not options:
        specs = [spec for line in result.plan.quantized for spec in (line.weight, line.input)]
        has_kernels = all(spec is None or _has_integer_kernel(spec) for spec in specs)
        return NO_OPTION_HELPS if has_kernels else OTHER_RECIPE
    is_enough = any(option.ms < SAME_SPEED * option.float_ms for option in options)
    rest = "" if is_enough else ". Even so, quantizing does not make this model faster than float on this CPU"
    return f"Options that help: {'; '.join(map(str, options))}{rest}"


def _has_integer_kernel(spec: QuantSpec) -> bool:
    return spec.bits <= BYTE and not isinstance(spec.granularity, PerGroup)


@dataclass(frozen=True)
class _Trials:
    """Trials of options on rewritten models; only the times matter, so the models' ranges and codes are arbitrary."""

    source: LoadedModel
    result: QuantizeReport
    timing: Timing
    measure: Measure

    def fast_kernels(self, feed: Feed) -> Iterator[_Option]:
        """Yield each of these two options that helps: a target for VNNI, and ``--prefer speed``.

        Both options store all weights as int8, but with different codes.
        """
        plan, decisions = self.result.plan, self.result.decisions
        if decisions is None:
            return
        layers = plan.layers_by_name
        dense = [line for line in plan.quantized if line.has_quantized_input and not layers[line.name].depthwise]
        text = faster(plan.target, [line.weight for line in dense if line.weight is not None], vnni=has_vnni())
        fast = replace(decisions, target=f"{plan.target.runtime}-vnni")
        if text:
            yield from self._tried(text, lambda: fast)
        if json.loads(decisions.options or "{}").get("prefer") == "accuracy" and text != PREFER_SPEED:
            yield from self._tried(
                PREFER_SPEED,
                lambda: _replanned(with_last_layers(plan, multiplications(plan, feed), "speed"), fast),
            )

    def skipping(self, names: Sequence[str]) -> Iterator[_Option]:
        """Yield ``--skip`` for the first layer in ``names`` or for all of them, whichever is faster, if it helps."""
        plan, decisions = self.result.plan, self.result.decisions
        if decisions is None:
            return
        options: list[_Option] = []
        for count in sorted({1, len(names)}) if names else ():
            skipped = names[:count]
            if count < len(plan.quantized):
                text = " ".join(map(skip_flag, skipped))
                options += self._tried(text, partial(_replanned, plan.without(skipped, SKIPPED), decisions))
        yield from sorted(options, key=lambda option: option.ms / option.float_ms)[:1]

    def _tried(self, text: str, decide: Callable[[], Decisions]) -> Iterator[_Option]:
        """Yield an option if the model with this option is clearly faster than the quantized model."""
        try:
            new = self.measure(rewrite(self.source, decide()))
        except DetentError:  # an option that cannot be tried is not advised
            return
        if new.ratio >= SAME_SPEED * self.timing.ratio:
            yield _Option(text, self.timing.first_ms, self.timing.first_ms / new.ratio)


def _replanned(plan: GraphPlan, decisions: Decisions) -> Decisions:
    """Return new decisions for ``plan``, which has fewer quantized layers or more quantized outputs."""
    observed = {name: each.observed_range for name, each in decisions.ranges.items() if each.observed_range is not None}
    placements = plan.placements(observed)
    ranges = {each.tensor: decisions.ranges.get(each.tensor, ANY_RANGE) for each in placements}
    params = {each.tensor: ranges[each.tensor].params(each.spec) for each in placements}
    placements, used = placed(plan, placements, params)
    kept = {line.name for line in plan.quantized}
    layers = (each if each.name in kept or each.reason else each.kept_in_float(SKIPPED) for each in decisions.layers)
    return replace(
        decisions,
        placements=tuple(placements),
        ranges={group: ranges[group] for group in used},
        layers=tuple(layers),
    )


# Profile


class NodeTime(NamedTuple):
    """A node of an optimized graph, its operator, and its shortest time."""

    name: str
    operator: str
    ms: float


class LayerTime(NamedTuple):
    """A layer, and its times in the float model and in the quantized model."""

    layer: LayerReport
    float_ms: float
    quantized_ms: float

    @property
    def extra_ms(self) -> float:
        """Additional time of the layer in the quantized model, in milliseconds."""
        return self.quantized_ms - self.float_ms

    def __str__(self) -> str:
        reason = self.layer.float_reason
        kernel = f"in float: {reason}" if reason else self.layer.kernel
        times = f"{duration_text(self.quantized_ms)} instead of {duration_text(self.float_ms)}"
        return f"{short_name(self.layer.name)} takes {times} ({kernel})"


class _Times(NamedTuple):
    """Times of layers, and of the QuantizeLinear and DequantizeLinear nodes of activations."""

    layers: tuple[LayerTime, ...] = ()
    quantizers_ms: float = 0.0


def _layer_times(result: QuantizeReport, quantized: LoadedModel, feeds: Sequence[Feed]) -> _Times:
    """Return the times of all layers that both profiles hold; the layer that loses the most time comes first."""
    plan = result.plan
    try:
        float_nodes, quantized_nodes = node_times((plan.model, quantized), feeds)
    except DetentError:  # the warning then names no layers
        return _Times()
    labels = _labels(plan)
    before = _by_layer(float_nodes, labels)
    after = _by_layer(quantized_nodes, labels | _weight_labels(quantized))
    both = (each for each in result.layers if each.name in before and each.name in after)
    layers = [LayerTime(each, before[each.name], after[each.name]) for each in both]
    return _Times(tuple(sorted(layers, key=lambda each: -each.extra_ms)), after.get("", 0.0))


def _labels(plan: GraphPlan) -> dict[str, str]:
    """Return a dict from names of nodes and tensors to the layers that they belong to.

    The keys are the names of layers, their outputs, and the outputs of operators that may be fused with a layer.
    """
    labels: dict[str, str] = {}
    for name, layer in plan.layers_by_name.items():
        if layer.is_weight_only:
            continue
        result = layer.node.output[0]
        while result not in labels:
            labels[result] = name
            readers = plan.graph.consumers(result)
            if len(readers) != 1 or readers[0].op_type not in FUSED:
                break
            result = readers[0].output[0]
    return labels | {name: name for name in plan.layers_by_name}


def _weight_labels(model: LoadedModel) -> dict[str, str]:
    """Return a dict from the names of the weights' DequantizeLinear nodes to the layers of these weights."""
    provenance = Provenance.read(model.proto)
    weights = {} if provenance is None else provenance.weights
    graph = Graph(model.proto)
    codes = {node.name: graph.code_constant(node.input[0]) for node in graph.nodes if node.op_type == DEQUANTIZE}
    return {node: weights[name] for node, name in codes.items() if name in weights}


def _by_layer(nodes: Sequence[NodeTime], labels: Mapping[str, str]) -> dict[str, float]:
    """Return a dict from each layer to the total time of its nodes.

    The key "" has the total time of all QuantizeLinear and DequantizeLinear nodes that belong to no layer.
    """
    times: dict[str, float] = defaultdict(float)
    for node in nodes:
        layer = labels.get(node.name, labels.get(_RENAMED.sub("", written_name(node.name))))
        if layer is not None or node.operator in QUANTIZERS:
            times[layer or ""] += node.ms
    return dict(times)


def node_times(models: Sequence[ModelSource], feeds: Sequence[Feed]) -> list[list[NodeTime]]:
    """Profile models in alternating runs on one thread; return the nodes of each model with their shortest times."""
    with tempfile.TemporaryDirectory() as directory:
        prefixes = [fspath(Path(directory, f"profile{i}")) for i in range(len(models))]
        sessions = [
            make_session(each, threads=1, profile_to=prefix) for each, prefix in zip(models, prefixes, strict=True)
        ]
        for run in range(1 + PROFILED_RUNS):
            for session in sessions:
                with ort_errors():
                    session.run(None, feeds[run % len(feeds)])
        return [_read_profile(Path(session.end_profiling())) for session in sessions]


def _read_profile(path: Path) -> list[NodeTime]:
    shortest: dict[tuple[str, str], NodeTime] = {}
    for event in json.loads(path.read_text(encoding="utf-8")):
        name = str(event.get("name", ""))
        if event.get("cat") != "Node" or not name.endswith(_KERNEL_TIME):
            continue
        key, ms = (name, str(event["args"].get("node_index"))), event["dur"] / 1000
        if key not in shortest or ms < shortest[key].ms:
            shortest[key] = NodeTime(name.removesuffix(_KERNEL_TIME), str(event["args"].get("op_name")), ms)
    return list(shortest.values())
