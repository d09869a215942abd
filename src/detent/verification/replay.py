"""Replay: rewrite the source with the decisions recorded in a file, and compare the result with the file.

The replay reads only the decisions from the file, and checks the decisions (``decision_checks``). Operators,
attributes, wiring, inputs, outputs and constants must match the result of ``qo.rewrite`` bit for bit (``model_diff``).

If the source is quantized and the file records no decisions, source and file are compared directly. A replay needs
recorded decisions, and the same version of the rewrite as when the file was written. If the opset was converted, a
replay also needs the same version of onnx. If a replay is not possible, the result says why, and counts as failed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

from onnx import ModelProto

from detent.codec import reading
from detent.errors import DetentError, ParamsError, SpecError, UnsupportedError
from detent.onnx.decisions import Decisions
from detent.onnx.quantized_graph import check_fits, float_form, write_quantizers
from detent.onnx.stored_decisions import read_decisions, why_unreadable
from detent.onnx_model.files import LoadedModel, without_initializers
from detent.onnx_model.graph import Graph
from detent.onnx_model.qdq_reader import QuantizedGraph, is_quantized
from detent.verification.decision_checks import Correction, decided, problems
from detent.verification.model_diff import compared_constants, differences
from detent.verification.verify_report import Difference, MadeBy, Replay

__all__ = ["ReplayedModel", "compare_models", "replay"]

MAX_DIFFERENCES = 100  # the comparison stops after this many mismatches: an unrelated model differs everywhere


@dataclass(frozen=True)
class ReplayedModel:
    """Result of a replay, and the float graph and decisions that were used.

    Attributes:
        result: the comparison with the file.
        decisions: decisions of the file, or None if the replay was not possible.
        float_graph: the source after equalization and SmoothQuant, not yet quantized, or None if the replay was not
            possible.
        is_same: whether source and file are the same model.
        flaws: decisions that are out of bounds, and constants that were changed after the file was written.
    """

    result: Replay
    decisions: Decisions | None = None
    float_graph: Graph | None = None
    is_same: bool = False
    flaws: tuple[Difference, ...] = ()


def replay(source: LoadedModel, artifact: QuantizedGraph) -> ReplayedModel:
    """Rewrite a source with the decisions of a file, and compare the result with the file.

    Raises:
        FileFormatError: the decisions are malformed or contradict each other.
    """
    if next(differences(source.proto, artifact.model), None) is None:
        return ReplayedModel(_result(source.proto, (), made_by="copy"), is_same=True)
    provenance = artifact.provenance
    reason = why_unreadable(provenance)
    if reason and is_quantized(source.proto):  # without decisions, the file must be a copy
        return ReplayedModel(compare_models(source.proto, artifact.model, made_by="copy"))
    if reason or provenance is None:
        return ReplayedModel(Replay(reason))
    decisions, changed = read_decisions(artifact.model, provenance)
    flaws = [
        Difference.of(
            f"constant {each.name}",
            each.name,
            "changed since the file was written",
            f"digest {each.digest_written}",
            f"digest {each.digest}",
        )
        for each in changed
    ]
    if decisions is None:
        return ReplayedModel(Replay(differences=tuple(flaws)))
    if decisions.source and decisions.source != source.digest:
        return ReplayedModel(Replay(differences=(_wrong_source(decisions.source, source.digest),)))
    try:
        with reading("the decisions cannot be applied", error=SpecError, keep=DetentError):
            model = float_form(source, decisions)
            graph = Graph(model)
            layers = check_fits(graph, decisions)
            corrections: dict[str, Correction] = {}
            flaws += problems(graph, layers, decisions, corrections)
            float_graph = Graph(without_initializers(model))
            float_graph.constants.update(graph.constants)  # shared, not copied: weights may be large
            rewritten = write_quantizers(model, decisions)
    except UnsupportedError as error:
        return ReplayedModel(Replay(str(error)))
    except (SpecError, ParamsError) as error:
        flaws.append(Difference.of("the decisions", "metadata", str(error)))
        return ReplayedModel(Replay(differences=tuple(flaws)))
    result = compare_models(rewritten, artifact.model, flaws)
    result = replace(result, decided=decided(decisions, corrections))
    return ReplayedModel(result, decisions, float_graph, flaws=tuple(flaws))


def compare_models(
    expected: ModelProto, got: ModelProto, flaws: Sequence[Difference] = (), made_by: MadeBy = "decisions"
) -> Replay:
    """Compare a file with the expected model; ``flaws`` are further mismatches, which are listed first."""
    return _result(expected, (*flaws, *islice(differences(expected, got), MAX_DIFFERENCES)), made_by)


def _result(expected: ModelProto, mismatches: tuple[Difference, ...], made_by: MadeBy) -> Replay:
    return Replay("", len(expected.graph.node), compared_constants(expected), mismatches, made_by=made_by)


def _wrong_source(written: str, digest: str) -> Difference:
    return Difference.of("source", "digest", "the file was not made from this source", written, digest)
