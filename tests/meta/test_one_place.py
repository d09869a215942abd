"""One place for each task: texts that only one module may contain, because other modules should call it."""

import ast
import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src" / "detent"
PLACES = {
    "JSON with unique keys": (r"object_pairs_hook", "codec.py"),
    "numbers that JSON has not": (r"parse_constant", "codec.py"),
    "the compute type": (r"float64 if [^\n]*== [^\n]*float64 else", "checks.py"),
    "the four float types": (r"np\.dtype\(ml_dtypes\.bfloat16", "checks.py"),
    "the first index of a mask": (r"unravel_index\(int\(np\.argmax", "checks.py"),
    "NaN refused": (r"raise NaNError", "checks.py"),
    "native runners": (r"_native\.Runner", "kernels/native.py"),
    "plans": (r"\bPlan\(operation", "plan.py"),
    "decibels": (r"\blog10\((?:ratio|noise)", "metrics.py"),
    "bits of scales": (r'scale_format == "e4m3" else 0', "spec.py"),
    "rounded zero points": (r"\.round\([^\n]*qmin", "scale_rule.py"),
    "skip patterns": (r"fnmatchcase\(", "recipe.py"),
    "exact patterns": (r"glob\.escape", "recipe.py"),
    "progress on a terminal": (r"stderr\.isatty", "observers/passes.py"),
    "writable directories": (r"TemporaryFile\(dir=", "storage.py"),
    "unnamed temporary files": (r"TemporaryFile\(prefix=", "array_store.py"),
    "moving operators": (r'"Squeeze"', "onnx_model/graph.py"),
    "operators with codes": (r'"QAttention"', "onnx_model/graph.py"),
    "depthwise convolutions": (r"1 < groups|groups > 1", "onnx_model/graph.py"),
    "integer types of ONNX": (r'lstrip\("U"\)', "onnx_model/graph.py"),
    "the accuracy level of MatMulNBits": (r"qdq_matmulnbits_accuracy_level", "onnx_model/sessions.py"),
    "a recipe in a document": (r"\bLeaf\([^\n]*Recipe\.from_json", "recipe.py"),
    "reasons of excluded layers": (r"[\"']no rule matches[\"']", "recipe.py"),
    "the reason of quantized weights": (r"its weight is quantized already", "onnx_model/layers.py"),
    "bytes as text": (r"[\"']kB[\"']", "tables.py"),
    "names cut short": (r"\.\.\.\{name\[", "tables.py"),
    "widths of codes in ONNX files": (r"else \(4, 8, 16\)", "spec.py"),
    "nodes that quantize": (r"_node\(QUANTIZE", "onnx_model/qdq_writer.py"),
    "parameters of nodes that quantize": (r"attribute_of\([^\n]*\"block_size\"", "onnx_model/qdq_reader.py"),
    "extras": (r"pip install 'detent\[", "errors.py"),
}


@pytest.mark.parametrize("thing", PLACES)
def test_one_module_does_it(thing):
    pattern, place = PLACES[thing]
    files = [path for path in SOURCE.rglob("*.py") if re.search(pattern, path.read_text(encoding="utf-8"))]
    assert [path.relative_to(SOURCE).as_posix() for path in files] == [place]


def unguarded_runs(node, *, is_guarded=False):
    """Lines where an ONNX Runtime session runs outside ``with ort_errors()``."""
    if isinstance(node, ast.With):
        is_guarded = is_guarded or any("ort_errors(" in ast.unparse(item) for item in node.items)
    match node:
        case ast.Call(func=ast.Attribute(value=receiver, attr="run"), args=[_, _]):
            if "session" in ast.unparse(receiver) and not is_guarded:
                yield node.lineno
    for child in ast.iter_child_nodes(node):
        yield from unguarded_runs(child, is_guarded=is_guarded)


def test_sessions_run_where_their_errors_are_caught():
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in SOURCE.rglob("*.py")}
    assert not [f"{path}:{line}" for path, tree in trees.items() for line in unguarded_runs(tree)]
