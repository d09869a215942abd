"""Runs all levels of verification: a replay of the file, then one pass over the data for every other check.

::

    input                                   compared              check
    source and decisions -> rewrite         the whole file        level 1: replay
    weights of the file                     codes                 level 1: codes
    each batch -> ONNX Runtime, as written  codes, outputs        levels 1 and 2
               -> source, by segments       codes, outputs        level 2: segments
               -> source                    outputs               level 2: outputs, for information
               -> ONNX Runtime, optimized   intermediate tensors  level 2; level 3: kernel_oracle, kernel_plan
               -> OpenVINO                  outputs               level 2, for information

"For information" means that a difference does not fail the verification.

A check lists the tensors that it reads (``readings``), receives them batch by batch, and returns its result at the end.
"""

import logging
import sys
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import chain, zip_longest
from os import PathLike
from typing import Any

from numpy.typing import NDArray
from onnx import ModelProto, TensorProto

from detent.errors import DetentError, UnsupportedError
from detent.onnx_model import optimized
from detent.onnx_model.batches import BatchSource, open_batches
from detent.onnx_model.files import LoadedModel, ModelSource, load_model
from detent.onnx_model.graph import QUANTIZE
from detent.onnx_model.model_inputs import inputs_of
from detent.onnx_model.qdq_reader import QuantizedGraph, is_quantized, open_quantized
from detent.onnx_model.sessions import ACCURACY_LEVEL, Probe, Reading
from detent.tables import counted
from detent.verification.codes import ActivationCheck, WeightCheck
from detent.verification.kernel_oracle import ORACLES, KernelCheck, is_integer_kernel
from detent.verification.kernel_plan import check_kernels
from detent.verification.onnx_source import OnnxSource
from detent.verification.openvino import is_installed
from detent.verification.outputs import (
    ORDER,
    CurrentBatch,
    FusedCodes,
    GraphCheck,
    OpenVinoCheck,
    OutputCheck,
    SessionCheck,
    find_codes,
)
from detent.verification.source import Reference, Source
from detent.verification.tally import Tally
from detent.verification.verify_report import Difference, Replay, Segments, VerifyReport

__all__ = ["run_levels"]

_log = logging.getLogger(__name__)

Array = NDArray[Any]
Feeds = Mapping[str, Array]
FedBatch = tuple[Feeds, Future[Reference] | None]  # inputs, and the source's results for them if the source runs ahead
NOT_RUN = "the file was not run"
NO_SEGMENTS = "without a replay, only the SQNR of outputs is measured"


def run_levels(
    source: object, artifact: ModelSource, data: BatchSource | None, levels: tuple[int, ...]
) -> VerifyReport:
    """Run the requested levels; without data, run only the replay and the weight checks of level 1."""
    file = open_quantized(artifact)
    batches = () if data is None else open_batches(data, inputs_of(file.model))
    report = _Verification(file, _as_source(source, file), levels, has_data=data is not None).run(batches)
    _log.info("verified levels %s on %s: %s", levels, counted(report.batches, "batch"), report.headline)
    return report


def _as_source(source: object, artifact: QuantizedGraph) -> Source:
    torch = sys.modules.get("torch")  # if torch is not imported, the source cannot be a torch module
    if torch is not None and isinstance(source, torch.nn.Module):
        from detent.verification.torch_source import TorchSource  # noqa: PLC0415 - this import loads PyTorch

        return TorchSource(source, artifact)
    if not isinstance(source, LoadedModel | ModelProto | str | PathLike):
        raise UnsupportedError(
            f"got {type(source).__name__} as source, expected a model from qt.prepare, an ONNX model or a path to "
            "an ONNX file"
        )
    model = load_model(source)
    has_quantizers = is_quantized(model.proto, operators=(QUANTIZE,))  # a weight-only source counts as float
    return OnnxSource(model, open_quantized(model) if has_quantizers else None, artifact)


class _FileFailsError(Exception):
    """Error for a file that ONNX Runtime cannot run; errors of the source have other types."""


class _Verification:
    """Checks of all requested levels, which share one pass over the data."""

    def __init__(self, artifact: QuantizedGraph, source: Source, levels: tuple[int, ...], *, has_data: bool) -> None:
        self.artifact, self.source, self.levels, self.has_data = artifact, source, levels, has_data
        self.tally, self.batch = Tally(), CurrentBatch()
        self.notes: dict[str, None] = {}
        self.weights = WeightCheck(artifact, source, self.tally)
        self.activations = ActivationCheck(artifact, source, self.tally)
        self.end_to_end: dict[str, OutputCheck] = {}
        self.kernels: KernelCheck | None = None
        self.kernel_difference: Difference | None = None
        self.replay: Replay | None = None
        # In the second thread, ONNX Runtime optimizes the file and runs an ONNX source. A PyTorch source runs in this
        # thread, because PyTorch's settings are per thread.
        self.second_thread, self.uses_second_thread = ThreadPoolExecutor(1), isinstance(source, OnnxSource)
        self.optimized: Future[ModelProto]  # assigned only for levels 2 and 3

    def run(self, batches: Iterable[Mapping[str, Array]]) -> VerifyReport:
        # OpenVINO loads the file in a subprocess, in parallel with all other checks.
        uses_openvino = self.has_data and 2 in self.levels and is_installed()
        openvino = OpenVinoCheck(self.artifact, self.batch) if uses_openvino else None
        try:
            if self.has_data and {2, 3} & set(self.levels):
                self.optimized = self.second_thread.submit(optimized, self.artifact.model)
            return self._run(self._with_source_results(batches), openvino)
        finally:
            self.second_thread.shutdown(cancel_futures=True)
            if openvino is not None:
                openvino.close()

    def _with_source_results(self, batches: Iterable[Feeds]) -> Iterator[FedBatch]:
        """Yield each batch with the source's results for it; an ONNX source runs one batch ahead."""
        runs_ahead = 2 in self.levels and self.uses_second_thread
        previous: FedBatch | None = None
        for feeds in batches:
            current = feeds, self.second_thread.submit(self.source.run, feeds) if runs_ahead else None
            if previous is not None:
                yield previous
            previous = current
        if previous is not None:
            yield previous

    def _run(self, batches: Iterator[FedBatch], openvino: OpenVinoCheck | None) -> VerifyReport:
        first = next(batches, None)
        if {1, 2} & set(self.levels):
            replay = self.source.replay()
            self.replay = replay if 1 in self.levels else None
            _log.info("replay: %s", replay)
        if 1 in self.levels and self._weights_are_covered():
            self.weights.count()
        elif 1 in self.levels:
            self.weights.run()
            self.notes.update(self.weights.notes)
        count = 0
        batches = chain([] if first is None else [first], batches)
        del first
        try:
            probes = self._probes() if self.has_data else []
            if openvino is not None:
                self.end_to_end["openvino"] = openvino
            for count, (feeds, reference) in enumerate(batches, 1):
                self._run_batch(feeds, reference, probes, is_first=count == 1)
                _log.debug("compared batch %d", count)
        except _FileFailsError as error:
            self.tally.note(f"does not run in ONNX Runtime: {error}", "the file", "run")
            self.notes[f"levels 2 and 3 stopped, because the file does not run in ONNX Runtime: {error}"] = None
        except DetentError as error:
            if self.tally.first is None and (self.replay is None or not self.replay.differences):
                raise
            self.notes[f"levels 2 and 3 stopped, probably because the file does not match its source: {error}"] = None
        return self._report(count)

    def _weights_are_covered(self) -> bool:
        """Return whether the weight checks can be skipped.

        This is the case if the replay compared all weights and the segments will run. The segments detect weights that
        ONNX Runtime dequantizes wrongly, because a code or an output differs.
        """
        has_replay = self.has_data and 2 in self.levels and self.replay is not None and self.replay.ok
        return has_replay and isinstance(self.source, OnnxSource) and self.source.segments is not None

    def _probes(self) -> list[Probe]:
        """Create probes of the file as written (levels 1 and 2) and as ONNX Runtime optimizes it (levels 2 and 3)."""
        segments = self.source.segments if 2 in self.levels else None
        by_level = []
        if 1 in self.levels and (segments is None or not segments.checks_quantizers):
            by_level.append(self.activations.readings())
        written: GraphCheck | None = None
        if 2 in self.levels:
            codes = {each.node: FusedCodes(each.codes, channels_last=False) for each in self.artifact.quantize_nodes}
            written = GraphCheck(self.artifact, self.batch, [ORDER, *self.source.causes], codes, is_written=True)
            written.keep = set() if segments is None else {node for node, _ in segments.readers}
            self.end_to_end["unoptimized"] = written
            by_level.append(written.readings())
            by_level.append([] if segments is None else self._dynamic_readings())
        # Readings of the same quantizer are adjacent, because they share tensors.
        readings = [each for readings in zip_longest(*by_level) for each in readings if each is not None]
        probes = [Probe(self.artifact.model, readings, kinds=self.artifact.kinds)] if readings else []
        if {2, 3} & set(self.levels):
            probes.append(self._optimized_probe(written, probes[0] if probes else None))
        return probes

    def _dynamic_readings(self) -> list[Reading]:
        """Return readings of dynamically quantized tensors, whose codes, scales and zero points the segments use."""
        names = [(each.codes, each.scale, each.zero_point) for each in self.artifact.dynamic_quantizers]
        return [Reading(tensors, partial(self._take_dynamic, tensors)) for tensors in names]

    def _take_dynamic(self, tensors: tuple[str, ...], arrays: Mapping[str, Array]) -> None:
        self.batch.codes.update({name: arrays[name] for name in tensors})

    def _optimized_probe(self, written: GraphCheck | None, written_probe: Probe | None) -> Probe:
        model = self.optimized.result()
        readings: list[Reading] = []
        kinds: dict[str, int] = {}
        if written is not None:
            codes = find_codes(self.artifact, model)
            written.keep = {*written.keep, *codes}
            nodes = [each for each in self.artifact.quantize_nodes if each.node in codes]
            kinds = {codes[each.node].tensor: each.qparams.kind for each in nodes}
            check = GraphCheck(self.artifact, self.batch, self._optimized_causes(model), codes)
            self.end_to_end["optimized"] = check
            readings += check.readings()
            if any(node.op_type == "MatMulNBits" for node in model.graph.node):
                self.end_to_end["accuracy_level_0"] = SessionCheck(self.artifact, self.batch, {ACCURACY_LEVEL: "0"})
                self.notes[
                    "ONNX Runtime quantizes the activations of weight-only matmuls to 8 bits, unless the session "
                    f"option {ACCURACY_LEVEL} is 0 or 1. A file cannot set this option. To see the effect, compare the "
                    "runs 'optimized' and 'accuracy level 0'"
                ] = None
        if 3 in self.levels:
            self.kernels = KernelCheck(model)
            readings += self.kernels.readings()
            self.kernel_difference, notes = check_kernels(self.artifact, model)
            self.notes.update(dict.fromkeys(notes))
        return Probe(model, readings, kinds=kinds, written=written_probe)

    def _optimized_causes(self, model: ModelProto) -> list[str]:
        """List reasons why values in the optimized graph may differ from values in the source."""
        causes = [ORDER, *self.source.causes]
        kernels = sorted({node.op_type for node in model.graph.node if is_integer_kernel(node)})
        unknown = [name for name in kernels if name not in ORACLES]
        if kernels:
            causes.append("integer kernels round once per layer")
        if unknown:
            causes.append(f"some kernels use other formulas than the file's operators ({', '.join(unknown)})")
        own = {weight.name for weight in self.artifact.weights}
        rounded = [each.name for each in model.graph.initializer if each.data_type == TensorProto.INT32]
        rounded = [name for name in rounded if name.endswith("_bias_int32") and name not in own]
        if rounded:
            causes.append("ONNX Runtime rounds float biases to int32")
            self.notes[
                f"ONNX Runtime rounds {counted(len(rounded), 'float bias')} to int32 when it optimizes the file "
                f"(first: {rounded[0]!r}). To prevent this, create sessions with "
                "disabled_optimizers=['WeightBiasQuantization']"
            ] = None
        return causes

    def _run_batch(
        self, feeds: Feeds, reference: Future[Reference] | None, probes: list[Probe], *, is_first: bool
    ) -> None:
        self.batch.codes = {}
        session, openvino = (self.end_to_end.get(name) for name in ("accuracy_level_0", "openvino"))
        if isinstance(openvino, OpenVinoCheck):
            openvino.start(feeds)
        if reference is not None:
            self.batch.reference = reference.result()
        elif 2 in self.levels or (is_first and 1 in self.levels and self.source.can_match_weights):
            self.batch.reference = self.source.run(feeds)
        segments: Future[None] | None = None
        try:
            for position, probe in enumerate(probes):
                self._run_file(probe, feeds)
                if position == 0 and 2 in self.levels:  # the first probe runs the file as written
                    segments = self._run_segments(feeds)
        finally:
            if segments is not None:
                segments.result()
        if isinstance(session, SessionCheck):
            session.run(feeds)
        if isinstance(openvino, OpenVinoCheck):
            try:
                openvino.compare()
            except UnsupportedError as error:
                self.notes[str(error)] = None
                del self.end_to_end["openvino"]

    def _run_file(self, probe: Probe, feeds: Feeds) -> None:
        try:
            probe.run(feeds)
        except UnsupportedError as error:
            raise _FileFailsError(str(error)) from error

    def _run_segments(self, feeds: Feeds) -> Future[None] | None:
        """Run the source's segments on the file's codes; segments of an ONNX source run in the second thread."""
        segments, batch = self.source.segments, self.batch
        if segments is None:
            return None
        if self.uses_second_thread:
            return self.second_thread.submit(segments.run, feeds, batch.codes, batch.outputs)
        segments.run(feeds, batch.codes, batch.outputs)
        return None

    def _report(self, batches: int) -> VerifyReport:
        if 1 in self.levels:
            if batches:
                self.weights.count_absent()
            self.notes.update(self.activations.notes)
        self.notes.update(self.source.notes)
        for check in self.end_to_end.values():
            self.notes.update(check.notes)
        kernels = self.kernels
        if kernels is not None:
            self.notes.update(kernels.notes)
            unknown = [row.kernel for row in kernels.rows() if not row.compared and row.kernel not in ORACLES]
            if unknown:
                names, count = ", ".join(sorted(set(unknown))), counted(len(unknown), "kernel")
                note = f"level 3 does not support {names}: {count} not compared"
                self.notes[note] = None
        segments = self._segments()
        segment_runner = self.source.segments if segments is not None else None
        tallies = [self.tally]
        if segment_runner is not None and segment_runner.checks_quantizers:  # level 1 skipped the activations
            tallies.append(self.source.tally)
        replay_differences = () if self.replay is None else self.replay.differences
        first_of_segments = None if segments is None else segments.first
        candidates = (*replay_differences, self.tally.first, first_of_segments)
        first = next((each for each in candidates if each is not None), None)
        return VerifyReport(
            self.levels,
            batches,
            sum(each.compared for each in tallies),
            sum(each.differing for each in tallies),
            first,
            {name: check.result() for name, check in self.end_to_end.items() if batches},
            () if kernels is None else kernels.rows(),
            None if kernels is None else kernels.saturation(),
            tuple(self.notes),
            self.replay,
            segments,
            self.kernel_difference,
            tuple(self.artifact.notes) if self.replay is None or not self.replay.ok else (),
        )

    def _segments(self) -> Segments | None:
        if 2 not in self.levels:
            return None
        if self.source.is_same:
            return Segments(is_same=True)
        if self.source.flaw is not None:
            return Segments(f"a decision of the file is invalid: {self.source.flaw}")
        if self.source.segments is None:
            return Segments(NO_SEGMENTS)
        result = self.source.segments.result()
        return result if result.compared_outputs or result.first else Segments(NOT_RUN)
