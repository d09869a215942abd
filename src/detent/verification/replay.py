"""Replay: the source rewritten by the decisions that a file carries, beside the file.

Nothing in the file is trusted but its decisions, and these are checked (``decision_checks``). Whatever else the file
holds must be what ``qo.rewrite`` makes of them: operators, attributes, wiring, inputs, outputs and constants, to the
last bit (``model_diff``).

A source that is quantized itself is compared as it is with a file that carries no decisions. A replay that cannot be
made has a reason, and is not a success: a file without decisions, of another rewrite version, or of an onnx whose
converter is not installed here.
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

MAX_DIFFERENCES = 100  # that are looked for


@dataclass(frozen=True)
class ReplayedModel:
    """The result of a replay, and what it was made from where it could be made: decisions and the float model."""

    result: Replay
    decisions: Decisions | None = None
    float_graph: Graph | None = None  # of the model in normal form, with its factors, without quantizers
    is_same: bool = False  # source and file are one model
    flaws: tuple[Difference, ...] = ()  # of the decisions themselves


def replay(source: LoadedModel, artifact: QuantizedGraph) -> ReplayedModel:
    """Rewrite a source by the decisions of a file, and compare the result with the file.

    Raises:
        FileFormatError: the decisions are malformed or contradict themselves.
    """
    if next(differences(source.proto, artifact.model), None) is None:
        return ReplayedModel(_result(source.proto, (), made_by="copy"), is_same=True)
    provenance = artifact.provenance
    reason = why_unreadable(provenance)
    if reason and is_quantized(source.proto):  # the file should be a copy of it
        return ReplayedModel(compare_models(source.proto, artifact.model, made_by="copy"))
    if reason or provenance is None:
        return ReplayedModel(Replay(reason))
    decisions, changed = read_decisions(artifact.model, provenance)
    found = [
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
        return ReplayedModel(Replay(differences=tuple(found)))
    if decisions.source and decisions.source != source.digest:
        return ReplayedModel(Replay(differences=(_other_source(decisions.source, source.digest),)))
    try:
        with reading("they cannot be applied", error=SpecError, keep=DetentError):
            model = float_form(source, decisions)
            graph = Graph(model)
            layers = check_fits(graph, decisions)
            corrections: dict[str, Correction] = {}
            found += problems(graph, layers, decisions, corrections)
            float_graph = Graph(without_initializers(model))
            float_graph.constants.update(graph.constants)  # the tensors themselves: weights may be large
            rewritten = write_quantizers(model, decisions)
    except UnsupportedError as error:
        return ReplayedModel(Replay(str(error)))
    except (SpecError, ParamsError) as error:
        found.append(Difference.of("the decisions", "metadata", str(error)))
        return ReplayedModel(Replay(differences=tuple(found)))
    result = compare_models(rewritten, artifact.model, found)
    result = replace(result, decided=decided(decisions, corrections))
    return ReplayedModel(result, decisions, float_graph, flaws=tuple(found))


def compare_models(
    expected: ModelProto, got: ModelProto, found: Sequence[Difference] = (), made_by: MadeBy = "decisions"
) -> Replay:
    """What is different in a file from the model that it should be; ``found`` are differences known already."""
    return _result(expected, (*found, *islice(differences(expected, got), MAX_DIFFERENCES)), made_by)


def _result(expected: ModelProto, found: tuple[Difference, ...], made_by: MadeBy) -> Replay:
    return Replay("", len(expected.graph.node), compared_constants(expected), found, made_by=made_by)


def _other_source(written: str, digest: str) -> Difference:
    cause = "the file was made from another model than this source"
    return Difference.of("source", "digest", cause, written, digest)
