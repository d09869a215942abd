"""Replay: rewrite the source with the decisions recorded in a file, and compare the result with the file.

Only the decisions of the file are trusted, after checks (``decision_checks``). Operators, attributes, wiring, inputs,
outputs and constants must match the result of ``qo.rewrite`` bit for bit (``model_diff``).

If the source is quantized and the file records no decisions, the two are compared directly. A replay that is not
possible has a reason and counts as failed: the file records no decisions, was written by a different rewrite version,
or needs an onnx version that is not installed.
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

MAX_DIFFERENCES = 100  # then the search stops: a different model differs everywhere


@dataclass(frozen=True)
class ReplayedModel:
    """Result of a replay, with its inputs.

    Attributes:
        decisions, float_graph: decisions of the file, and the source in normal form with its factors and without
            quantizers; None if the replay was not possible.
        is_same: whether source and file are the same model.
        flaws: decisions that are out of their bounds.
    """

    result: Replay
    decisions: Decisions | None = None
    float_graph: Graph | None = None
    is_same: bool = False
    flaws: tuple[Difference, ...] = ()


def replay(source: LoadedModel, artifact: QuantizedGraph) -> ReplayedModel:
    """Rewrite a source with the decisions of a file, and compare the result with the file.

    Raises:
        FileFormatError: the decisions are malformed or contradict themselves.
    """
    if next(differences(source.proto, artifact.model), None) is None:
        return ReplayedModel(_result(source.proto, (), made_by="copy"), is_same=True)
    provenance = artifact.provenance
    reason = why_unreadable(provenance)
    if reason and is_quantized(source.proto):  # then the file should be a copy of the source
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
    """Compare a file with the expected model; ``flaws`` are mismatches to list first."""
    return _result(expected, (*flaws, *islice(differences(expected, got), MAX_DIFFERENCES)), made_by)


def _result(expected: ModelProto, mismatches: tuple[Difference, ...], made_by: MadeBy) -> Replay:
    return Replay("", len(expected.graph.node), compared_constants(expected), mismatches, made_by=made_by)


def _wrong_source(written: str, digest: str) -> Difference:
    return Difference.of("source", "digest", "the file was not made from this source", written, digest)
