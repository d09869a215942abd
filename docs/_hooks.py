"""MkDocs hook that makes files of the repository pages of the site.

Pages link to files outside docs/, such as `../CHANGELOG.md` or `../examples/x.py`, and such links must work in the
repository and on the site. The hook adds these files to the site and rewrites the links. README, CONTRIBUTING,
CHANGELOG and SECURITY become pages. A source file becomes a page that shows its code, and a directory becomes a list of
its files. Other files are copied.
"""

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "README.md": "readme.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}
LANGUAGES = {"": "text", ".cpp": "cpp", ".hpp": "cpp", ".py": "python", ".toml": "toml", ".txt": "text", ".cff": "yaml"}
CODE = r"^(?P<indent> *)(?P<fence>`{3,}).*?^(?P=indent)(?P=fence) *$|`[^`\n]+`"
LINK = r"(?P<before>\]\(|\b(?:src|href|srcset)=\")(?P<target>[^)\"\s]+)(?P<after>[)\"])"
CODE_OR_LINK = re.compile(f"{CODE}|{LINK}", re.MULTILINE | re.DOTALL)
EXTERNAL = re.compile(r"[a-z][a-z0-9+.-]*:|#|/")


def links(text: str) -> Iterator[str]:
    """Yield the relative links of a page, without those in code."""
    for match in CODE_OR_LINK.finditer(text):
        if match["target"] and not EXTERNAL.match(match["target"]):
            yield match["target"]


def origin(uri: str) -> str:
    """Path, from the root of the repository, of the file that a page of the site is made from."""
    return next((path for path, page in PAGES.items() if page == uri), f"docs/{uri}")


def resolved(target: str, path: str) -> str:
    """Path, from the root of the repository, of the target of a link in the file ``path``, without its fragment."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), target.partition("#")[0]))


def address(path: str) -> str:
    """Address in the site of a file or directory of the repository."""
    if path == "docs":
        return "index.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if (ROOT / path).is_dir():
        return f"source/{path}/index.md"
    return PAGES.get(path) or f"source/{path}" + (".md" if Path(path).suffix in LANGUAGES else "")


def shown(path: str) -> str:
    """Render the page of a source file."""
    text = (ROOT / path).read_text(encoding="utf-8")
    title = f"---\nsearch:\n  exclude: true\n---\n\n# {path}\n"
    return f"{title}\n````{LANGUAGES[Path(path).suffix]}\n{text}\n````\n"


def children(path: str) -> list[str]:
    """Paths of the readable files of a directory."""
    files = sorted(file for file in (ROOT / path).iterdir() if file.is_file() and not file.name.startswith("."))
    return [f"{path}/{file.name}" for file in files if file.suffix in LANGUAGES]


def listing(path: str) -> str:
    """Render the page of a directory."""
    rows = "\n".join(f"- [{Path(child).name}]({Path(address(child)).name})" for child in children(path))
    return f"---\nsearch:\n  exclude: true\n---\n\n# {path}/\n\n{rows}\n"


def file_of(path: str, config: MkDocsConfig) -> File:
    """Create the site's file for a file or directory outside docs/."""
    uri = address(path)
    if path in PAGES or not uri.endswith(".md"):
        return File.generated(config, uri, abs_src_path=str(ROOT / path))
    content = listing(path) if (ROOT / path).is_dir() else shown(path)
    return File.generated(config, uri, content=content, inclusion=InclusionLevel.NOT_IN_NAV)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add linked files outside docs/, and the files of linked directories."""
    for path in PAGES:
        files.append(file_of(path, config))
    linked: dict[str, None] = {}
    for page in list(files.documentation_pages()):
        path = origin(page.src_uri)
        linked |= dict.fromkeys(resolved(target, path) for target in links(page.content_string))
    directories = [path for path in linked if (ROOT / path).is_dir()]
    linked |= dict.fromkeys(child for directory in directories for child in children(directory))
    for path in linked:
        outside = not path.startswith(("docs/", "../")) and path != "docs"
        if outside and path not in PAGES and (ROOT / path).exists():
            files.append(file_of(path, config))
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: object) -> str:
    """Rewrite links that leave docs/, or come from outside, to addresses in the site."""
    path, here = origin(page.file.src_uri), posixpath.dirname(page.file.src_uri)
    if page.file.src_uri.startswith("source/"):
        return markdown

    def turned(match: re.Match[str]) -> str:
        target = match["target"]
        if not target or EXTERNAL.match(target):
            return match[0]
        goal = address(resolved(target, path))
        if match["before"] != "](":  # MkDocs leaves HTML alone
            goal = re.sub(r"\.md$", ".html", goal)
        fragment = target.partition("#")[1:]
        return f"{match['before']}{posixpath.relpath(goal, here or '.')}{''.join(fragment)}{match['after']}"

    return CODE_OR_LINK.sub(turned, markdown)
