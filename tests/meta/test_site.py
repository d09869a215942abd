"""The site of docs/: it contains every page, its reference lists all public names, and it builds without a warning.

The quick tests read mkdocs.yml and the pages. The slow ones build the site once, as `make docs` does, and check its
inventory, its links, and that no page loads anything from another server.
"""

import importlib
import importlib.util
import json
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import types
import zlib
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from filelock import FileLock

import detent as dt

pytest.importorskip("mkdocs", reason="needs the extra docs")

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
REFERENCE = sorted((DOCS / "reference").glob("*.md"))
BLOCK = re.compile(r"^::: (?P<name>[\w.]+)(?P<options>(?:\n {4}.*)*)", re.MULTILINE)
MEMBERS = re.compile(r"members: \[(?P<names>[^\]]+)\]")
# Without a reference page: kernels are used through dt, and the command line has its own page.
WITHOUT_PAGE = {"detent.kernels", "detent.cli"}


@cache
def module_of(name):
    """Import a module of docs/ by its path, as the site's tools do."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def config():
    from mkdocs.config import load_config

    return load_config(str(ROOT / "mkdocs.yml"))


def entries(nav):
    """Pages of a navigation tree, in order."""
    if isinstance(nav, str):
        return [nav]
    children = nav.values() if isinstance(nav, dict) else nav
    return [entry for child in children for entry in entries(child)]


def packages():
    """Public packages of detent."""
    names = [info.name for info in pkgutil.iter_modules(dt.__path__, "detent.") if info.ispkg]
    return [name for name in names if "._" not in name]


def is_documented(value):
    """Whether the reference has an entry for a public value: not for modules, numbers and tables."""
    return isinstance(value, type | types.FunctionType)


def public_names():
    """Yield (package, name) of every public class and function."""
    for package in ["detent", *(name for name in packages() if name not in WITHOUT_PAGE)]:
        module = importlib.import_module(package)
        yield from ((package, name) for name in module.__all__ if is_documented(getattr(module, name)))


def constants():
    """Public constants of dt and its modules, each with its text in the reference."""
    for name in dt.__all__:
        value = getattr(dt, name)
        if isinstance(value, dt.Format) and value.is_integer:
            continue  # int1 to int16 share one entry
        if isinstance(value, dt.Format | dt.QuantSpec):
            yield f"dt.{name}"
    yield from ("dt.int1", "dt.int16", "dt.uint1", "dt.uint16")


@cache
def covered():
    """Modules and single names that the blocks of the reference document."""
    documented = set()
    for page in REFERENCE:
        for block in BLOCK.finditer(page.read_text(encoding="utf-8")):
            only = MEMBERS.search(block["options"])
            names = re.split(r", *", only["names"]) if only else []
            documented |= {f"{block['name']}.{name}" for name in names} or {block["name"]}
    return documented


# Pages


def test_every_page_is_in_the_navigation_once():
    pages = [page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")]
    listed = entries(config()["nav"])
    assert len(listed) == len(set(listed))
    assert sorted(set(pages) - set(listed)) == []


def test_every_entry_of_the_navigation_exists():
    borrowed = set(module_of("_hooks").PAGES.values())
    missing = [entry for entry in entries(config()["nav"]) if not (DOCS / entry).exists() and entry not in borrowed]
    assert missing == []


def test_warnings_are_errors_and_nothing_is_fetched():
    assert config()["strict"]
    assert config()["theme"]["font"] is False
    assert not config()["site_url"]
    assert not config()["repo_url"]


# The reference


def test_every_package_has_a_page():
    assert sorted(set(packages()) - WITHOUT_PAGE - covered()) == []


@pytest.mark.parametrize("name", [name for name in dt.__all__ if is_documented(getattr(dt, name))])
def test_every_name_of_dt_is_in_the_reference(name):
    home = getattr(dt, name).__module__
    assert {home, home.rpartition(".")[0], f"{home}.{name}"} & covered(), f"no page shows {home}.{name}"


def test_values_are_named_in_the_reference():
    text = "".join(page.read_text(encoding="utf-8") for page in REFERENCE)
    assert [name for name in constants() if f"`{name}`" not in text] == []


def test_commands_are_those_of_the_program():
    from detent.cli.app import make_app

    page = (DOCS / "reference" / "cli.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `detent (\w+)` \|", page, re.MULTILINE)
    assert listed == [command.name for command in make_app().registered_commands]


# Tools of the site


def test_examples_become_blocks_of_code():
    as_markdown = module_of("_docstrings").as_markdown
    text = "Sum.\n\nArgs:\n    a: one.\n\n>>> a(\n...     1)\n2\n\nMore::\n\n    x\n"
    fenced = "```pycon\n>>> a(\n...     1)\n2\n```"
    assert as_markdown(text) == f"Sum.\n\nArgs:\n    a: one.\n\n{fenced}\n\nMore:\n\n    x\n"
    assert as_markdown("A.\n\n::\n\n    x\n") == "A.\n\n    x\n"


@pytest.mark.parametrize(
    ("path", "address"),
    [
        ("docs/howto/qat.md", "howto/qat.md"),
        ("docs", "index.md"),
        ("README.md", "readme.md"),
        ("examples/quickstart.py", "source/examples/quickstart.py.md"),
        ("examples", "source/examples/index.md"),
        ("benchmarks/results/latest.json", "source/benchmarks/results/latest.json"),
        ("LICENSE", "source/LICENSE.md"),
    ],
)
def test_addresses_of_files_outside(path, address):
    assert module_of("_hooks").address(path) == address


@pytest.mark.parametrize(
    ("page", "text", "turned"),
    [
        ("howto/qat.md", "[a](../../README.md#speed)", "[a](../readme.md#speed)"),
        ("howto/qat.md", "[a](../../examples/)", "[a](../source/examples/index.md)"),
        ("howto/qat.md", "[a](verify.md) [b](#here) [c](https://example.org)", None),
        ("howto/qat.md", "`[a](../../README.md)`\n\n```\n[a](../../README.md)\n```\n", None),
        ("readme.md", "[a](docs/howto/qat.md) [![b](docs/b.png)](docs/c.md)", "[a](howto/qat.md) [![b](b.png)](c.md)"),
        (
            "readme.md",
            '<img src="docs/images/b.png"> <a href="docs/c.md">',
            '<img src="images/b.png"> <a href="c.html">',
        ),
    ],
)
def test_links_are_turned(page, text, turned):
    place = types.SimpleNamespace(file=types.SimpleNamespace(src_uri=page))
    assert module_of("_hooks").on_page_markdown(text, page=place) == (turned or text)


# The built site


class Links(HTMLParser):
    """References of an HTML page: links, and resources that a browser loads."""

    def __init__(self, text):
        super().__init__()
        self.followed, self.fetched, self.anchors = [], [], set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.anchors |= {attributes[key] for key in ("id", "name") if attributes.get(key)}
        if tag == "a" and attributes.get("href"):
            self.followed.append(attributes["href"])
        elif tag == "link" and attributes.get("href"):
            self.fetched.append(attributes["href"])
        elif attributes.get("src"):
            self.fetched.append(attributes["src"])


def build(folder):
    """Build the site as `make docs` does."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def site(tmp_path_factory, worker_id):
    """Directory of the built site; the first worker builds it, the others wait."""
    base = tmp_path_factory.getbasetemp()
    shared = base if worker_id == "master" else base.parent
    with FileLock(shared / "site.lock"):
        if not (shared / "site" / "index.html").exists():
            build(shared / "building")
            (shared / "building").rename(shared / "site")
    return shared / "site"


@pytest.fixture(scope="module")
def pages(site):
    return {page: Links(page.read_text(encoding="utf-8")) for page in sorted(site.rglob("*.html"))}


def inventory(site):
    """Names that other sites can link to, in Sphinx's format: four lines of text, the rest compressed."""
    text = (site / "objects.inv").read_bytes()
    head, body = text.split(b"\n# The remainder of this file is compressed using zlib.\n")
    assert head.startswith(b"# Sphinx inventory version 2")
    return {line.split(" ")[0] for line in zlib.decompress(body).decode().splitlines()}


@pytest.mark.slow
def test_every_public_name_is_in_the_inventory(site):
    listed = inventory(site)
    lost = []
    for package, name in public_names():
        value = getattr(importlib.import_module(package), name)
        own_name = getattr(value, "__name__", name)  # of an alias, such as PerChannel, the class it stands for
        if not {f"{package}.{name}", f"{value.__module__}.{own_name}"} & listed:
            lost.append(f"{package}.{name}")
    assert lost == []


@pytest.mark.slow
def test_no_page_asks_for_anything_from_elsewhere(pages):
    assert len(pages) > 40
    foreign = {link for links in pages.values() for link in links.fetched if urlsplit(link).netloc}
    assert sorted(foreign) == []


@pytest.mark.slow
def test_every_link_of_the_site_leads_somewhere(site, pages):
    broken = []
    for page, links in pages.items():
        if page.name == "404.html":
            continue  # the error page of servers; its links are absolute
        for link in [*links.followed, *links.fetched]:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            goal = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            goal = goal / "index.html" if goal.is_dir() else goal
            if not goal.exists() or (parts.fragment and goal in pages and parts.fragment not in pages[goal].anchors):
                broken.append(f"{page.relative_to(site)}: {link}")
    assert broken == []


@pytest.mark.slow
def test_examples_of_docstrings_are_shown_as_code(site):
    text = (site / "reference" / "core.html").read_text(encoding="utf-8")
    assert "&gt;&gt;&gt;" in text
    assert "<blockquote>" not in text


@pytest.mark.slow
def test_options_of_commands_are_shown(site):
    text = (site / "reference" / "cli.html").read_text(encoding="utf-8")
    assert 'id="detent-quantize"' in text
    assert "--fail-below-sqnr" in text


@pytest.fixture
def browser():
    """Headless Chromium that records console messages and network requests."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium")
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not (chromium and driver):
        (pytest.fail if os.environ.get("DETENT_REQUIRE_BROWSER") == "1" else pytest.skip)(
            "needs chromium and chromium-driver"
        )
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1400,1200"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    chrome = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield chrome
    chrome.quit()


def requested(browser):
    """URLs that the browser requested."""
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    return [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]


@pytest.mark.slow
def test_search_works_from_the_disk(site, browser):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.wait import WebDriverWait

    browser.get((site / "index.html").as_uri())
    field = browser.find_element(By.CSS_SELECTOR, "input.md-search__input")
    field.click()
    field.send_keys("calibrating")
    results = WebDriverWait(browser, 30).until(lambda _: browser.find_elements(By.CSS_SELECTOR, ".md-search-result h2"))
    assert "calibrating" in [result.text for result in results]
    assert browser.get_log("browser") == []
    assert [url for url in requested(browser) if url.startswith("http")] == []
