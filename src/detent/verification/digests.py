"""Digests: whether the constants and places of a file's quantizers are as detent wrote them.

A float source does not tell what the codes of a folded, smoothed or corrected weight should be. The file itself does:
it holds a hash of each part.
"""

from onnx import ModelProto

from detent.onnx_model.provenance import digest_of, digests_of
from detent.onnx_model.qdq_reader import QuantizedGraph
from detent.verification.codes import Tally
from detent.verification.verify_report import Difference

__all__ = ["check_digests", "check_origin"]


def check_origin(artifact: QuantizedGraph, source: ModelProto, tally: Tally) -> str:
    """Count a file that was made from another model; returns what then speaks for its weights.

    Returns:
        "digests" where the file says how its weights were written, for that source; "nothing" where it does not.

    >>> from onnx import parser
    >>> from detent.onnx_model.qdq_reader import open_quantized
    >>> model = parser.parse_model('''<ir_version: 10, opset_import: ["" : 21]>
    ...     g (float[2] x) => (float[2] y) <float s = {0.5}, int8[2] w = {3, 4}, int8 z = {0}>
    ...     { v = DequantizeLinear(w, s, z) y = Add(x, v) }''')
    >>> check_origin(open_quantized(model), model, Tally())
    'nothing'
    """
    about = artifact.provenance
    if about is None or not about.digests or not about.source:
        return "nothing"
    found = digest_of(source)
    if found != about.source:
        tally.count(1, 1)
        cause = "the file was made from another model than this source"
        tally.note(Difference("source", "digest", (), about.source, found, None, None, None, cause))
    return "digests"


def check_digests(artifact: QuantizedGraph, tally: Tally) -> bool:
    """Count the parts of a file's quantizers that were changed since it was written; returns whether there are none.

    >>> from onnx import parser
    >>> from detent.onnx_model.qdq_reader import open_quantized
    >>> from detent.onnx_model import Provenance
    >>> model = parser.parse_model('''<ir_version: 10, opset_import: ["" : 21]>
    ...     g (float[2] x) => (float[2] y) <float s = {0.5}, int8[2] w = {3, 4}, int8 z = {0}>
    ...     { v = DequantizeLinear(w, s, z) y = Add(x, v) }''')
    >>> Provenance().write(model)
    >>> model.graph.initializer[0].float_data[0] = 0.25
    >>> tally = Tally()
    >>> check_digests(open_quantized(model), tally), tally.first.tensor
    (False, 's')
    """
    about = artifact.provenance
    if about is None or not about.digests:
        return True
    now = digests_of(artifact.model)
    whole = True
    for name, digest in about.digests.items():
        if now.get(name) == digest:
            continue
        whole = False
        tally.count(1, 1)
        node = artifact.graph.producer(name)
        if node is None or name not in now:
            tally.note(Difference(name, name, (), "a quantizer", "none", None, None, None, "gone from the file"))
            continue
        read = ("its place", *node.input)
        parts = zip(read, digest.split("."), now[name].split("."), strict=False)
        tensor, before, after = next((part for part in parts if part[1] != part[2]), (name, digest, now[name]))
        cause = "changed since detent wrote the file"
        called = artifact.graph.node_name(node)
        tally.note(Difference(called, tensor, (), f"digest {before}", f"digest {after}", None, None, None, cause))
    return whole
