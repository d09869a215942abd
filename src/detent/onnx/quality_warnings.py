"""Warnings about a quantized model: low accuracy, a larger file, suspicious data, layers without integer kernels.

Each warning has a code, which does not change between versions, and a text that says what to do. ``qo.quantize``
measures accuracy on calibration samples. ``detent.evaluate`` measures accuracy on held-out batches, and adds the
warnings "slower", "target" and "not-run". ``detent quantize`` adds "fixed-batch". A warning never stops the job;
``detent quantize --strict`` ends with exit code 1 if there are any.

===================== ==========================================================================================
code                  condition
===================== ==========================================================================================
low-sqnr              the SQNR of the worst output is below 20 dB
low-agreement         the top-1 agreement is below 0.98
larger-file           the quantized file is larger than the float file
no-gain               the file is larger, and no layer runs on an integer kernel (of ONNX Runtime)
slower                the quantized model takes at least 5 % more CPU time than the float model in ONNX Runtime
few-samples           activations are quantized, and there are fewer than 32 samples, or fewer distinct ones
constant-data         every input has the same value in all samples, or a float input has that is larger than every
                      float input that varies
unscaled-data         an input looks like pixels from 0 to 255, but the weights of its layer expect small values
float-layers          layers in float, or on float kernels, hold over 10 % of the weight bytes, or do over 10 % of
                      the multiplications, without layers for which an integer kernel would be slower
padded-weights        a weight has fewer bits than the type that stores it
max-drop              the metric drops by more than max_drop, or one sample counts more than max_drop
target                the target does not suit this CPU
fixed-batch           a PyTorch program has a fixed batch size
not-run               a check could not run
===================== ==========================================================================================
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from detent.metrics import OutputComparison, worst_output
from detent.onnx.graph_plan import PADDED, SLOWER, WEIGHT_ONLY, GraphPlan, LayerPlan
from detent.onnx.metric_search import MetricSearch
from detent.onnx_model.batches import digest_of, samples_in
from detent.onnx_model.graph import MOVING, trace_back
from detent.recipe import EXCLUDED, NO_RULE
from detent.tables import bytes_text, counted

__all__ = [
    "DataSummary",
    "QuantizeWarning",
    "accuracy_warnings",
    "drop_warnings",
    "few_samples",
    "float_layers_text",
    "layer_shares",
    "quantize_warnings",
]

Array = NDArray[Any]

MIN_SQNR_DB = 20.0  # at 20 dB, the error is a tenth of the signal's amplitude
MIN_AGREEMENT = 0.98
MIN_SAMPLES = 32
MAX_FLOAT_SHARE = 0.1  # share of the weight bytes or of the multiplications, whichever is larger
MAX_LAYERS_NAMED = 3
MIN_BYTE_RANGE, MAX_BYTE = 50, 255  # largest values of integers that look like pixels in bytes
MAX_SIGNED_BYTE = 127  # the same for pixels minus 128
MIN_RESIZED, MAX_RESIZED = 200, 256  # largest values of resized pixels; these are not integers
INTEGERS, NUMBERS = "integers", "numbers"  # kinds of values that look like pixels
MIN_NORM = 0.1  # median L2 norm of a filter; filters for inputs up to 255 have norms of about 0.01
DELIBERATE = (EXCLUDED, NO_RULE, "skipped")  # reasons that follow from the user's choice
UNCHANGING = (*MOVING, "Cast", "Identity", "Pad")  # operators that keep the values of an input
# After these operators, the size of a layer's weights does not matter.
NORMALIZATIONS = (
    *("BatchNormalization", "GroupNormalization", "InstanceNormalization"),
    *("LayerNormalization", "MeanVarianceNormalization"),
)


class QuantizeWarning(NamedTuple):
    """A warning about a quantized model.

    Attributes:
        code: short name of the condition, such as "larger-file"; it does not change between versions.
        text: what was measured, and what to do.

    >>> str(QuantizeWarning("larger-file", "the file is larger than the float file"))
    'the file is larger than the float file'
    """

    code: str
    text: str

    def __str__(self) -> str:
        return self.text


class LayerRow(Protocol):
    """Fields of a ``QuantizeReport`` row that warnings need."""

    @property
    def name(self) -> str: ...
    @property
    def reason(self) -> str: ...
    @property
    def runs_on_integer_kernel(self) -> bool: ...
    @property
    def float_reason(self) -> str: ...


class DataSummary:
    """Summary of calibration data: number of samples, distinct samples, and the range of each input.

    Attributes:
        samples: number of samples.
        ranges: smallest and largest value of each input.
        integers: float inputs that hold only integers.
        sizes: largest number of elements of each float input in a batch.
        digests: hashes of the distinct samples; empty if there are at least 32, so that the order has no influence.
        has_enough: whether at least 32 samples are distinct.

    >>> summary = DataSummary()
    >>> summary.add({"x": np.float32([[0, 7], [255, 3], [0, 7]])})
    >>> summary.samples, summary.distinct, summary.ranges, summary.integers
    (3, 2, {'x': (0.0, 255.0)}, {'x'})
    """

    def __init__(self) -> None:
        self.samples = 0
        self.ranges: dict[str, tuple[float, float]] = {}
        self.integers: set[str] = set()
        self.sizes: dict[str, int] = {}
        self.digests: set[bytes] = set()
        self.has_enough = False

    @property
    def distinct(self) -> int:
        """Number of distinct samples; the number of all samples if at least 32 are distinct."""
        return self.samples if self.has_enough else len(self.digests)

    def add(self, feed: Mapping[str, Array]) -> None:
        """Add a batch."""
        self.samples += samples_in(feed)
        self.add_digests(feed)
        for name, array in feed.items():
            if array.dtype.kind not in "fiub" or not array.size:
                continue
            lo, hi = self.ranges.get(name, (np.inf, -np.inf))
            is_first = name not in self.ranges
            self.ranges[name] = min(lo, float(array.min())), max(hi, float(array.max()))
            if array.dtype.kind != "f":
                continue
            self.sizes[name] = max(self.sizes.get(name, 0), array.size)
            if is_first or name in self.integers:
                if bool((array == np.rint(array)).all()):
                    self.integers.add(name)
                else:
                    self.integers.discard(name)

    def add_digests(self, feed: Mapping[str, Array]) -> None:
        """Add the hashes of the samples of a batch, as long as fewer than 32 distinct samples are known."""
        count = samples_in(feed)
        for i in range(count):
            if self.has_enough:
                return
            sample = {name: x[i] if x.ndim and len(x) == count else x for name, x in feed.items()}
            self._add_digests({digest_of(sample)})

    def _add_digests(self, digests: set[bytes]) -> None:
        self.digests |= digests
        if self.has_enough or len(self.digests) >= MIN_SAMPLES:
            self.digests, self.has_enough = set(), True

    def merge(self, other: "DataSummary") -> None:
        """Add the batches of another summary."""
        self.samples += other.samples
        self.has_enough = self.has_enough or other.has_enough
        self._add_digests(other.digests)
        for name, size in other.sizes.items():
            self.sizes[name] = max(self.sizes.get(name, 0), size)
        for name, (lo, hi) in other.ranges.items():
            if name not in self.ranges:
                self.ranges[name] = lo, hi
                self.integers |= other.integers & {name}
                continue
            own = self.ranges[name]
            self.ranges[name] = min(own[0], lo), max(own[1], hi)
            if name not in other.integers:
                self.integers.discard(name)


def quantize_warnings(
    plan: GraphPlan,
    layers: Sequence[LayerRow],
    sizes: tuple[int, int],
    comparison: OutputComparison,
    data: DataSummary | None,
    work: Mapping[str, float],
) -> tuple[QuantizeWarning, ...]:
    """Return the warnings of ``qo.quantize``: all codes except those that the evaluation adds.

    ``sizes`` are the bytes of the float file and of the quantized file. ``work`` has the multiplications of each layer.
    """
    warnings = list(accuracy_warnings(comparison))
    before, after = sizes
    if after > before:
        text = (
            f"the quantized file is larger than the float file: {bytes_text(before)} -> {bytes_text(after)}; if size "
            "matters, use the float file"
        )
        warnings.append(QuantizeWarning("larger-file", text))
        if plan.target.runtime == "onnxruntime" and not any(layer.runs_on_integer_kernel for layer in layers):
            texts = float_layers_text(layers, layer_shares(plan, work))
            text = (
                f"the file is larger, and no layer runs on an integer kernel: use the float model. {'; '.join(texts)}"
            )
            warnings.append(QuantizeWarning("no-gain", text))
    if data is not None:
        warnings += _data_warnings(plan, data)
    warnings += _layer_warnings(plan, layers, work)
    return tuple(warnings)


def accuracy_warnings(comparison: OutputComparison) -> Iterator[QuantizeWarning]:
    """Yield warnings if the SQNR or the top-1 agreement is low, with confidence intervals of 95 %."""
    name = worst_output(comparison.sqnr_db)
    sqnr_db, compared = comparison.sqnr_db.get(name), comparison.compared_samples(name)
    if sqnr_db is not None and not sqnr_db >= MIN_SQNR_DB:  # True for NaN
        interval = comparison.sqnr_interval_db(name)
        span = "" if interval is None else f" (95 % confidence: {interval[0]:.1f} to {interval[1]:.1f} dB)"
        part = "" if compared == comparison.samples else f"{compared:,} of "
        advice = (
            "use --skip for the layers that detent sensitivity lists first, or use --prefer accuracy or --recipe w8a16"
        )
        if comparison.has_varying_rows(name):
            advice = (
                "the number of its rows depends on the data, so rows may have changed places: measure the accuracy "
                "with --metric module:function"
            )
        yield QuantizeWarning(
            "low-sqnr",
            f"the SQNR of output {name} is only {sqnr_db:.1f} dB on {part}"
            f"{counted(comparison.samples, 'sample', ',')}{span}: {advice}",
        )
    agreement, interval = comparison.agreement, comparison.agreement_interval
    if agreement is not None and interval is not None and agreement < MIN_AGREEMENT:
        total, span = comparison.agreement_counts[1], f"{100 * interval[0]:.1f} to {100 * interval[1]:.1f} %"
        yield QuantizeWarning(
            "low-agreement",
            f"the top-1 agreement is only {100 * agreement:.1f} % on {counted(total, 'sample', ',')} (95 % confidence: "
            f"{span}): measure the accuracy on labeled data",
        )


def drop_warnings(search: MetricSearch | None) -> Iterator[QuantizeWarning]:
    """Yield a warning if the search for ``max_drop`` failed on its samples, and one if it has too few samples."""
    if search is not None and not search.is_met:
        after, count = search.after, counted(search.after.samples, "search sample", ",")
        text = (
            f"no set of layers in float meets max_drop {search.max_drop:g} on {count}: {after.name} is {after}; pass "
            "more samples, a larger max_drop, or a recipe with more bits"
        )
        yield QuantizeWarning("max-drop", text)
    if search is not None and search.after.name.startswith("top1") and 0 < search.max_drop * search.after.samples < 1:
        count, share = counted(search.after.samples, "search sample", ","), 1 / search.after.samples
        text = (
            f"max_drop {search.max_drop:g} is less than one of {count} ({share:.4f}), so one changed class exceeds it: "
            "pass more samples, or a larger max_drop"
        )
        yield QuantizeWarning("max-drop", text)


def few_samples(count: int, distinct: int) -> Iterator[QuantizeWarning]:
    """Yield a warning if calibration and evaluation together used few samples, or few distinct samples."""
    if distinct < MIN_SAMPLES:
        what = counted(count, "sample")
        if distinct < count:
            what = f"{counted(distinct, 'distinct sample')} in {count:,}"
        text = f"only {what}: pass at least {MIN_SAMPLES} for reliable ranges and accuracy"
        yield QuantizeWarning("few-samples", text)


def _data_warnings(plan: GraphPlan, data: DataSummary) -> Iterator[QuantizeWarning]:
    if any(line.input is not None for line in plan.quantized):
        yield from few_samples(data.samples, data.distinct)
    constant = [name for name, (lo, hi) in data.ranges.items() if lo == hi]
    what = "the inputs are"
    if len(constant) < len(data.ranges):
        varying = [size for name, size in data.sizes.items() if name not in constant]
        largest = max(data.sizes.values(), default=0)
        is_larger = max(varying, default=largest) < largest
        constant = [name for name in constant if is_larger and data.sizes.get(name) == largest]
        what = "the largest input is" if len(constant) == 1 else "the largest inputs are"
    if constant:
        values = ", ".join(f"{name} is {data.ranges[name][0]:g}" for name in constant)
        text = f"{what} constant in all samples ({values}): pass real data for calibration"
        yield QuantizeWarning("constant-data", text)
    for name in sorted(data.ranges):
        kind, (lo, hi) = _pixel_kind(data, name), data.ranges[name]
        # Such integers from 0 on are pixels, but other values are pixels only if convolutions read them.
        if kind and _expects_small_values(plan, name, only_images=kind != INTEGERS or lo < 0):
            text = (
                f"input {name} holds {kind} from {lo:g} to {hi:g}, but the weights of its layer look trained on "
                "normalized data: preprocess calibration data as in deployment, e.g. divide by 255"
            )
            yield QuantizeWarning("unscaled-data", text)


def _pixel_kind(data: DataSummary, name: str) -> str:
    """Return "integers" or "numbers" if the values of a float input look like pixels that were not scaled, or ""."""
    lo, hi = data.ranges[name]
    if name in data.integers:
        is_byte = lo >= 0 and MIN_BYTE_RANGE < hi <= MAX_BYTE
        is_signed = -MAX_SIGNED_BYTE - 1 <= lo < -MIN_BYTE_RANGE and MIN_BYTE_RANGE < hi <= MAX_SIGNED_BYTE
        return INTEGERS if is_byte or is_signed else ""
    return NUMBERS if name in data.sizes and lo >= 0 and MIN_RESIZED <= hi <= MAX_RESIZED else ""


def _expects_small_values(plan: GraphPlan, name: str, *, only_images: bool) -> bool:
    """Return whether layers read an input without rescaling, with filters that are too large for values up to 255.

    If a normalization follows a layer, its filters may have any size. With ``only_images``, all layers must be
    convolutions.
    """
    layers = [layer for layer in plan.layers_by_name.values() if layer.shape and layer.node.op_type != "Gather"]
    readers = [layer for layer in layers if trace_back(layer.data, plan.graph.producer, UNCHANGING) == name]
    if only_images and any(layer.node.op_type != "Conv" for layer in readers):
        return False
    for layer in readers:
        filters = np.moveaxis(plan.graph.array(layer.weight), layer.axis, 0).reshape(layer.shape[layer.axis], -1)
        is_small = float(np.median(np.linalg.norm(filters.astype(np.float64), axis=1))) < MIN_NORM
        if is_small or _is_normalized(plan, layer.node.output[0]):
            return False
    return bool(readers)


def _is_normalized(plan: GraphPlan, name: str) -> bool:
    """Return whether a normalization reads a tensor, perhaps after operators that keep its values."""
    readers = plan.graph.consumers(name)
    return any(
        node.op_type in NORMALIZATIONS
        or (node.op_type in UNCHANGING and node.output[0] != name and _is_normalized(plan, node.output[0]))
        for node in readers
    )


def _layer_warnings(
    plan: GraphPlan, layers: Sequence[LayerRow], work: Mapping[str, float]
) -> Iterator[QuantizeWarning]:
    lines = {line.name: line for line in plan.layers}
    has_inputs = any(line.has_quantized_input for line in plan.quantized)
    planned = [layer for layer in layers if _runs_as_planned(layer, lines[layer.name], has_inputs=has_inputs)]
    slow = [layer for layer in layers if layer.reason not in DELIBERATE and layer not in planned]
    slowed = [layer for layer in slow if not layer.reason.endswith(SLOWER)]  # float is right for the others
    by_bytes, by_work = _byte_shares(plan), _work_shares(work if has_inputs else {})
    nbytes = sum(by_bytes[layer.name] for layer in slow)
    multiplied = sum(by_work.get(layer.name, 0.0) for layer in slowed)
    if max(nbytes, multiplied) > MAX_FLOAT_SHARE and plan.target.runtime == "onnxruntime":
        done = len(planned)
        what = "run on integer kernels" if has_inputs else "are quantized"
        share = f"hold {nbytes:.0%} of the weights"
        if multiplied > nbytes:
            slow, share = slowed, f"do {multiplied:.0%} of the multiplications"
        texts = "; ".join(float_layers_text(slow, layer_shares(plan, work if has_inputs else {})))
        yield QuantizeWarning(
            "float-layers", f"only {done:,} of {len(layers):,} layers {what}; others {share}: {texts}"
        )
    padded = [line for line in plan.quantized if PADDED in line.note]
    if padded:
        count, first = counted(len(padded), "layer"), padded[0]
        text = f"weights of {count} are stored in a larger type; the first layer is {first.name}: {first.note}"
        yield QuantizeWarning("padded-weights", text)


def _runs_as_planned(layer: LayerRow, line: LayerPlan, *, has_inputs: bool) -> bool:
    """Return whether a layer runs on an integer kernel.

    Embeddings, recurrent layers and layers in subgraphs have no such kernel. For these, and for weight-only recipes,
    return whether the layer is quantized.
    """
    has_kernel = line.type != "Gather" and not line.note.startswith(WEIGHT_ONLY)
    return layer.runs_on_integer_kernel if has_inputs and has_kernel else not layer.reason


def layer_shares(plan: GraphPlan, work: Mapping[str, float]) -> dict[str, float]:
    """Return each layer's share of the weight bytes or of the multiplications, whichever is larger."""
    by_work = _work_shares(work)
    return {name: max(share, by_work.get(name, 0.0)) for name, share in _byte_shares(plan).items()}


def _byte_shares(plan: GraphPlan) -> dict[str, float]:
    total = sum(line.nbytes_before for line in plan.layers) or 1
    return {line.name: line.nbytes_before / total for line in plan.layers}


def _work_shares(work: Mapping[str, float]) -> dict[str, float]:
    total = sum(work.values()) or 1.0
    return {name: each / total for name, each in work.items()}


def float_layers_text(layers: Sequence[LayerRow], shares: Mapping[str, float]) -> list[str]:
    """Name the three layers with the largest shares and their reasons, and count the others by reason."""
    ranked = sorted(layers, key=lambda layer: -shares[layer.name])
    named = [f"{layer.name}: {layer.float_reason}" for layer in ranked[:MAX_LAYERS_NAMED]]
    others = Counter(layer.float_reason for layer in ranked[MAX_LAYERS_NAMED:])
    return [*named, *(f"{count:,} more: {reason}" for reason, count in others.most_common())]
