"""Digests: whether the constants and places of a file's quantizers are as detent wrote them.

A float source does not tell what the codes of a folded, smoothed or corrected weight should be. The file itself does:
it holds a hash of each part.
"""

from detent.onnx_model.files import LoadedModel
from detent.onnx_model.provenance import digests_of
from detent.onnx_model.qdq_reader import QuantizedGraph
from detent.verification.codes import Tally

__all__ = ["check_digests", "check_origin"]


def check_origin(artifact: QuantizedGraph, source: LoadedModel, tally: Tally) -> str:
    """Count a file that was made from another model; returns what then speaks for its weights.

    That is "digests" where the file says how its weights were written for that source, "nothing" where it does not.
    """
    provenance = artifact.provenance
    if provenance is None or not provenance.digests or not provenance.source:
        return "nothing"
    if source.digest != provenance.source:
        tally.count(1, 1)
        cause = "the file was made from another model than this source"
        tally.note(cause, "source", "digest", (), provenance.source, source.digest)
    return "digests"


def check_digests(artifact: QuantizedGraph, tally: Tally) -> None:
    """Count the parts of a file's quantizers that were changed since it was written."""
    provenance = artifact.provenance
    if provenance is None or not provenance.digests:
        return
    now = digests_of(artifact.model)
    for name, digest in provenance.digests.items():
        if now.get(name) == digest:
            continue
        tally.count(1, 1)
        node = artifact.graph.producer(name)
        if node is None or name not in now:
            tally.note("gone from the file", name, name, (), "a quantizer", "none")
            continue
        parts = zip(("its place", *node.input), digest.split("."), now[name].split("."), strict=False)
        tensor, before, after = next((part for part in parts if part[1] != part[2]), (name, digest, now[name]))
        digests = f"digest {before}", f"digest {after}"
        tally.note("changed since detent wrote the file", artifact.graph.node_name(node), tensor, (), *digests)
