"""Everything the pages show runs, and every link leads somewhere.

Each ```python block of README.md, CONTRIBUTING.md, SECURITY.md and docs/ is executed: one namespace per page, blocks in
order. A block titled "Setup" runs before the others, wherever it stands on the page. A block that opens with `>>>` is a
doctest, and its output is compared. A ```text block right after a Python block is its printed output, and is compared
without numbers; a line `...` ends the comparison. Failures name page and line.
"""

import doctest
import io
import re
from contextlib import redirect_stdout
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    ROOT / "SECURITY.md",
    *sorted(ROOT.glob("docs/**/*.md")),
]
MUST_SHOW_CODE = ["README.md", "docs/concepts.md", "docs/numerics.md"]
FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>[\w-]*)(?P<options>[^\n]*)\n(?P<code>.*?)^(?P=indent)``` *$",
    re.MULTILINE | re.DOTALL,
)
SETUP = 'title="Setup"'
LINK = re.compile(r"(?<!!)\[[^\]\n]*\]\((?P<link>[^)\s]+)\)|!\[[^\]\n]*\]\((?P<image>[^)\s]+)\)")
HEADING = re.compile(r"^#+ +(?P<title>.+?) *#*$", re.MULTILINE)
EXTERNAL = re.compile(r"^[a-z][a-z0-9+.-]*:")


def name(page):
    return page.relative_to(ROOT).as_posix() if page.is_relative_to(ROOT) else page.name


def snippets(page):
    """The (line number, source) of every Python block, setup first; the line is that of the first line of code."""
    text = page.read_text(encoding="utf-8")
    for match in sorted(FENCE.finditer(text), key=lambda match: match["options"].strip() != SETUP):
        if match["language"] in {"python", "py", "pycon"}:
            indent = match["indent"]
            lines = [line.removeprefix(indent) for line in match["code"].splitlines(keepends=True)]
            yield text.count("\n", 0, match.start("code")) + 1, "".join(lines)


def without_numbers(text):
    """The lines of an output with every number as `0`, up to a line `...`."""
    lines = [re.sub(r"\d+([.,]\d+)*", "0", " ".join(line.split())) for line in text.strip().splitlines()]
    return lines[: lines.index("...")] if "..." in lines else lines


def check_output(page, line, printed):
    """Compare what a block printed with the ```text block that follows it, if there is one."""
    rest = page.read_text(encoding="utf-8").split("\n", line - 1)[-1]
    after = rest[re.search(r"^ *```$", rest, re.MULTILINE).end() :]
    match = re.match(r"\s*```text\n(?P<output>.*?)^```$", after, re.MULTILINE | re.DOTALL)
    if match is None:
        return
    expected = without_numbers(match["output"])
    assert without_numbers(printed)[: len(expected)] == expected, f"{name(page)}:{line}: printed\n{printed}"


def run_doctest(source, namespace, page, line):
    test = doctest.DocTestParser().get_doctest(source, namespace, name(page), str(page), line - 1)
    report = []
    doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE, verbose=False).run(
        test, out=report.append, clear_globs=False
    )
    namespace.update(test.globs)
    assert not report, "".join(report)


def execute(page):
    """Executes the blocks of one page in order, in one namespace."""
    namespace = {"__name__": "__page__"}
    for line, source in snippets(page):
        if source.lstrip().startswith(">>>"):
            run_doctest(source, namespace, page, line)
            continue
        padded = "\n" * (line - 1) + source  # so that a traceback shows the page's own line numbers
        try:
            with redirect_stdout(io.StringIO()) as output:
                exec(compile(padded, str(page), "exec"), namespace)
        except Exception as error:
            raise AssertionError(f"{name(page)}:{line}: {type(error).__name__}: {error}") from error
        check_output(page, line, output.getvalue())


def anchors(page):
    """The fragments that GitHub gives the headings of a page."""
    titles = (match["title"] for match in HEADING.finditer(FENCE.sub("", page.read_text(encoding="utf-8"))))
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_links(page):
    """The relative links of a page whose file or heading does not exist."""
    broken = []
    for match in LINK.finditer(FENCE.sub("", page.read_text(encoding="utf-8"))):
        target = match["link"] or match["image"]
        if EXTERNAL.match(target):
            continue
        path, _, fragment = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (fragment and file.suffix == ".md" and fragment not in anchors(file)):
            broken.append(target)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_snippets_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    execute(page)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_resolve(page):
    assert broken_links(page) == []


@pytest.mark.parametrize("page", MUST_SHOW_CODE)
def test_page_shows_code(page):
    assert list(snippets(ROOT / page))


def write(directory, text):
    page = directory / "page.md"
    page.write_text(text, encoding="utf-8")
    return page


def test_blocks_share_one_namespace_in_order(tmp_path):
    blocks = ["a = 1", ">>> a + 1\n2\n>>> b = 5", "assert a + b == 6"]
    execute(write(tmp_path, "\n".join(f"```python\n{block}\n```\n" for block in blocks)))


def test_printed_output_is_compared_without_numbers(tmp_path):
    block = "```python\nprint('size', 1.5, 'MB')\nprint('rest')\n```\n\n"
    execute(write(tmp_path, f"{block}```text\nsize 2,000 MB\n...\n```\n"))
    with pytest.raises(AssertionError, match=r"page\.md:2: printed"):
        execute(write(tmp_path, f"{block}```text\nbytes 1.5 MB\n...\n```\n"))


def test_setup_runs_first(tmp_path):
    execute(write(tmp_path, '```python\nassert a == 1\n```\n\n```python title="Setup"\na = 1\n```\n'))


@pytest.mark.parametrize(
    ("block", "complaint"),
    [
        ("```python\nimport math\nmath.nothing\n```\n", r"page.md:3: AttributeError"),
        ("```python\n>>> 1 + 1\n3\n```\n", r"line 3"),
        ("- item\n\n  ```python\n  assert 1 == 2\n  ```\n", r"page.md:5: AssertionError"),
        ("```python\nif\n```\n", r"page.md:3: SyntaxError"),
    ],
)
def test_runner_notices_a_bad_snippet(block, complaint, tmp_path):
    with pytest.raises(AssertionError, match=complaint):
        execute(write(tmp_path, f"# Page\n{block}"))


def test_other_languages_are_left_alone(tmp_path):
    assert list(snippets(write(tmp_path, "```sh\npip install detent\n```\n\n```\nraise\n```\n"))) == []


def test_link_checker_notices_a_bad_link(tmp_path):
    text = "# A b: `c`\n[ok](#a-b-c) [gone](gone.md) [no](#no) ![x](x.png) [web](https://example.org)\n```\n[code](z)\n```\n"
    assert broken_links(write(tmp_path, text)) == ["gone.md", "#no", "x.png"]
