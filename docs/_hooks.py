"""Files of the repository as pages of the site: a hook of MkDocs.

Pages are read in the repository too, and link to files outside docs/ as `../CHANGELOG.md` or `../examples/x.py`. Here
these files join the site, and links to them are turned to where they are there: README, CONTRIBUTING and CHANGELOG as
pages, sources as pages of code, folders as lists of their files, and all else as it is.
"""

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"README.md": "readme.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
LANGUAGES = {"": "text", ".cpp": "cpp", ".hpp": "cpp", ".py": "python", ".toml": "toml", ".txt": "text"}
CODE = r"^(?P<indent> *)(?P<fence>`{3,}).*?^(?P=indent)(?P=fence) *$|`[^`\n]+`"
LINK = r"(?P<before>\]\(|\b(?:src|href|srcset)=\")(?P<target>[^)\"\s]+)(?P<after>[)\"])"
CODE_OR_LINK = re.compile(f"{CODE}|{LINK}", re.MULTILINE | re.DOTALL)
EXTERNAL = re.compile(r"[a-z][a-z0-9+.-]*:|#|/")


def links(text: str) -> Iterator[str]:
    """The relative links of a page, code left out."""
    for match in CODE_OR_LINK.finditer(text):
        if match["target"] and not EXTERNAL.match(match["target"]):
            yield match["target"]


def origin(uri: str) -> str:
    """Where the page of that address in the site has its text, seen from the root of the repository."""
    return next((path for path, page in PAGES.items() if page == uri), f"docs/{uri}")


def resolved(target: str, path: str) -> str:
    """What a link in the file of that path leads to, seen from the root of the repository, without its fragment."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), target.partition("#")[0]))


def address(path: str) -> str:
    """The address in the site of a file or folder of the repository."""
    if path == "docs":
        return "index.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if (ROOT / path).is_dir():
        return f"source/{path}/index.md"
    return PAGES.get(path) or f"source/{path}" + (".md" if Path(path).suffix in LANGUAGES else "")


def shown(path: str) -> str:
    """The page of a source file."""
    text = (ROOT / path).read_text(encoding="utf-8")
    title = f"---\nsearch:\n  exclude: true\n---\n\n# {path}\n"
    return f"{title}\n````{LANGUAGES[Path(path).suffix]}\n{text}\n````\n"


def children(path: str) -> list[str]:
    """The readable files of a folder."""
    files = sorted(file for file in (ROOT / path).iterdir() if file.is_file() and not file.name.startswith("."))
    return [f"{path}/{file.name}" for file in files if file.suffix in LANGUAGES]


def listing(path: str) -> str:
    """The page of a folder."""
    rows = "\n".join(f"- [{Path(child).name}]({Path(address(child)).name})" for child in children(path))
    return f"---\nsearch:\n  exclude: true\n---\n\n# {path}/\n\n{rows}\n"


def file_of(path: str, config: MkDocsConfig) -> File:
    """The file of the site for a file or folder outside docs/."""
    uri = address(path)
    if path in PAGES or not uri.endswith(".md"):
        return File.generated(config, uri, abs_src_path=str(ROOT / path))
    content = listing(path) if (ROOT / path).is_dir() else shown(path)
    return File.generated(config, uri, content=content, inclusion=InclusionLevel.NOT_IN_NAV)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds what is linked to and lies outside docs/, and what a folder among it holds."""
    for path in PAGES:
        files.append(file_of(path, config))
    wanted: dict[str, None] = {}
    for page in list(files.documentation_pages()):
        path = origin(page.src_uri)
        wanted |= dict.fromkeys(resolved(target, path) for target in links(page.content_string))
    folders = [path for path in wanted if (ROOT / path).is_dir()]
    wanted |= dict.fromkeys(child for folder in folders for child in children(folder))
    for path in wanted:
        outside = not path.startswith(("docs/", "../")) and path != "docs"
        if outside and path not in PAGES and (ROOT / path).exists():
            files.append(file_of(path, config))
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: object) -> str:
    """Turns links that leave docs/, or come from outside, to the addresses in the site."""
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
