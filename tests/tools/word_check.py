"""Find words and names that the glossary of docs/concepts.md replaces: ``python tests/tools/word_check.py PATH ...``.

Each finding is a line ``path:line: rule: text``. The rules are a short list of phrases that may not come back in
docstrings, comments, messages, templates and pages, and names that do not say what a value is.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ["Finding", "check_names", "check_text", "files_of", "findings"]

VAGUE_NAMES = frozenset({"aim", "asked", "found", "how", "known", "made", "said", "told", "wanted"})
BRITISH_STEMS = (
    "normal|general|serial|optim|initial|quant|recogn|organ|special|summar|emphas|minim|maxim|real|final|util|visual|"
    "factor|regular|equal|token|vector|categor|character|standard|stabil|symbol|synchron|parallel|local"
)
TENSOR_NAMES = frozenset({"centred"})  # in quantized files, whose bytes stay as they are
# Each phrase with what to write instead.
PHRASES = {
    r"\b(is|are) no (?!longer|more|less|later|larger|smaller)(?<!there is no )(?<!there are no )": "negate the verb",
    r"\bhas none\b|\bhave none\b|(?-i:\bis none\b(?! else))": "say what is missing",
    r"\bheld back\b|\bkept from calibration\b": "held out",
    r"\bjudg(e|es|ed|ing)\b|\bverdict of the data\b": "evaluate",
    r"\brehears\w*": "dry run",
    r"\b(in|with) integers\b": "on an integer kernel",
    r"\boperator sets?\b": "opset",
    r"\bfolders?\b": "directory",
    r"\bof which\b|\bof whom\b": "subject first",
    r"\bthe (latter|former)\b|\blikewise\b": "name the thing",
    r"\bin one go\b": "in one call",
    r"\bas ever\b|\ball the same\b": "as usual, still",
    r"\bmend(s|ed|ing)?\b": "fix",
    r"\bhurts?\b|\bdamages?\b(?! file)": "sensitivity, noise share",
    r"\bpeers?\b|\bcontestants?\b|\brivals?\b": "other tools",
    r"\bhostile\b|\bwith suspicion\b|\bstrange\b": "untrusted, unexpected",
    r"\bslow twins?\b": "reference kernel",
    r"\bin (your|the user's) hands\b|\bborn\b|\bin silence\b": "literal words",
    r"\bworth (knowing|looking|its)\b|\bis worth\b": "evaluation, result",
    r"\bwithout further ado\b|\bas somebody wished\b|\bnobody has to\b": "literal words",
    rf"\b({BRITISH_STEMS})is(e|es|ed|ing|ations?|ers?)\b": "American spelling",
    r"\b(behaviour|colour|favour|neighbour|honour|centre|licence|modelling|labelled(?!by)|cancelled|analyse)\w*": (
        "American spelling"
    ),
}
_COMPILED = [(re.compile(pattern, re.IGNORECASE), hint) for pattern, hint in PHRASES.items()]
_WHAT = re.compile(r"^(What|How|The same|Those|All that|Nothing,)\b")
_HEADLESS = re.compile(r"^\s*\w+(, \w+)*: (of|that|for which|whose) ")
_CODE = re.compile(r"``[^`]*``|`[^`]*`|<[^>]*>|https?://\S+")


class Finding(NamedTuple):
    """A place to reword."""

    path: str
    line: int
    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.text.strip()[:140]}"


def check_text(path: str, line: int, text: str) -> Iterator[Finding]:
    """Phrases that may not come back, in a text that starts at a line."""
    if text.strip('"') in TENSOR_NAMES:
        return
    plain = _CODE.sub(lambda match: " " * len(match[0]), text)
    for pattern, hint in _COMPILED:
        for match in pattern.finditer(plain):
            at = text.count("\n", 0, match.start())
            yield Finding(path, line + at, f"{match[0].strip()!r} -> {hint}", text.splitlines()[at])


def check_names(path: str, tree: ast.AST) -> Iterator[Finding]:
    """Locals, arguments, attributes, functions and classes with names that do not say what they are."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names = [node.id]
        elif isinstance(node, ast.arg):
            names = [node.arg]
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names = [node.attr]
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names = [node.name]
        for name in names:
            if name.strip("_").lower() in VAGUE_NAMES:
                yield Finding(path, getattr(node, "lineno", 0), "vague name", name)


def _docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                yield first.lineno, first.value.value


def _python(path: str, text: str) -> Iterator[Finding]:
    tree = ast.parse(text)
    yield from check_names(path, tree)
    for line, docstring in _docstrings(tree):
        if _WHAT.match(docstring.strip()):
            yield Finding(path, line, "docstring: begin with a verb or a noun", docstring)
        for at, part in enumerate(docstring.splitlines()):
            if _HEADLESS.match(part):
                yield Finding(path, line + at, "headless 'of': repeat the noun", part)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in {tokenize.STRING, tokenize.COMMENT} or tokenize.tok_name[token.type].startswith("FSTRING"):
            yield from check_text(path, token.start[0], token.string)


def findings(path: Path) -> Iterator[Finding]:
    """All findings in a file."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        yield from _python(str(path), text)
    else:
        yield from check_text(str(path), 1, text)


def files_of(path: Path) -> Iterator[Path]:
    """The text files of a directory, or the file itself."""
    if path.is_dir():
        for suffix in ("*.py", "*.md", "*.j2", "*.css"):
            yield from sorted(path.rglob(suffix))
    else:
        yield path


if __name__ == "__main__":
    results = [each for name in sys.argv[1:] for path in files_of(Path(name)) for each in findings(path)]
    print("\n".join(map(str, results)))
    print(f"{len(results)} findings")
