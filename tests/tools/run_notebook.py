"""Execute a notebook without Jupyter: ``python tests/tools/run_notebook.py NOTEBOOK [OUTPUT]``.

All code cells run in one namespace. The outputs of a cell are what it prints, then the value of its last expression as
text and, where it has one, as HTML. They are stored in the notebook, or in a copy of it at OUTPUT.
"""

import ast
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

__all__ = ["execute", "outputs_of", "read_notebook", "text_of", "write_notebook"]


def read_notebook(path: Path) -> dict[str, Any]:
    """Read a notebook of version 4."""
    notebook: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if notebook.get("nbformat") != 4:
        raise ValueError(f"{path}: expected nbformat 4, got {notebook.get('nbformat')!r}")
    return notebook


def write_notebook(path: Path, notebook: dict[str, Any]) -> None:
    """Write a notebook as Jupyter does."""
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def execute(notebook: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Run all code cells in order; return the outputs of each."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return [_run("".join(cell["source"]), namespace, number) for number, cell in enumerate(cells, 1)]


def _run(source: str, namespace: dict[str, Any], number: int) -> list[dict[str, Any]]:
    tree = ast.parse(source, filename=f"cell {number}")
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, f"cell {number}", "exec"), namespace)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), f"cell {number}", "eval"), namespace)
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        outputs.append({"name": "stdout", "output_type": "stream", "text": _lines(printed.getvalue())})
    if value is not None:
        data = {"text/plain": _lines(repr(value))}
        html = getattr(value, "_repr_html_", lambda: None)()
        if html is not None:
            data["text/html"] = _lines(html)
        outputs.append({"data": data, "execution_count": number, "metadata": {}, "output_type": "execute_result"})
    return outputs


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def outputs_of(notebook: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """The outputs that a notebook stores, by code cell."""
    return [cell["outputs"] for cell in notebook["cells"] if cell["cell_type"] == "code"]


def text_of(outputs: list[dict[str, Any]]) -> str:
    """What a reader sees of the outputs of a cell, as text."""
    parts = [
        output["text"] if output["output_type"] == "stream" else output["data"]["text/plain"] for output in outputs
    ]
    return "".join(line for lines in parts for line in lines)


def main(source: Path, target: Path) -> None:
    """Execute a notebook and write it with its outputs."""
    notebook = read_notebook(source)
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for count, (cell, outputs) in enumerate(zip(cells, execute(notebook), strict=True), 1):
        cell["outputs"], cell["execution_count"] = outputs, count
        print(f"[{count}] {text_of(outputs)}")
    write_notebook(target, notebook)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[-1]))
