"""Rendering: reports as HTML. Everything is in the page: styles, script and data; it asks nobody for anything.

Jinja escapes every text, for the names of layers are whatever a file says. The policy in the page's head lets the
page's own style and script run, by their hashes, and forbids all connections.
"""

import glob
import re
import shlex
from base64 import b64encode
from functools import cache
from hashlib import sha256
from importlib.resources import files
from math import isfinite
from typing import TYPE_CHECKING, Any

from detent.errors import UnsupportedError
from detent.report import figures
from detent.report.comparison import Comparison
from detent.report.document import Report

if TYPE_CHECKING:
    from jinja2 import Environment

__all__ = ["render_comparison", "render_report", "skip_argument"]

BASES = {
    "sensitivity": "Damage is a layer's share of the noise at the outputs when it alone is quantized.",
    "output": (
        "Damage is a layer's share of all layers' noise, each relative to its own result; what layers before it add is "
        "part of it."
    ),
    "weight": "Damage is a layer's share of the rounding noise of all weights, each relative to its weight.",
    "input": "Damage is a layer's share of the rounding noise of all inputs, each relative to its input.",
    "none": "Nothing is known of the damage: give data and the float model to measure it.",
}
_NUMERIC = re.compile(r"[\s<>=~±+\-\u2212\u2013.,\d]*\d[\d.,]*\s*(%|dB|ms|s|x|\u00d7|[kMG]?B|bytes|bits?)?")


def render_report(report: Report) -> str:
    """The page of a report.

    Raises:
        UnsupportedError: Jinja is not installed.

    >>> "<h1>a &lt;b&gt;</h1>" in render_report(Report("a <b>", None, 8))
    True
    """
    total, quantized, integers = report.counts
    return _render(
        "report.html.j2",
        report.title,
        report=report,
        total=total,
        quantized=quantized,
        integers=integers,
        basis=BASES[report.damage_basis],
        parts=figures.slices(report.sizes),
        curve=None if report.sensitivity is None else figures.curve(report.sensitivity),
        most_damage=max((each.damage or 0.0 for each in report.layers), default=0.0) or 1.0,
        island=_island(report.to_json()),
    )


def render_comparison(both: Comparison) -> str:
    """The page of two reports side by side.

    Raises:
        UnsupportedError: Jinja is not installed.

    >>> from detent.report.comparison import compare
    >>> "<td>a</td>" in render_comparison(compare(Report("a", None, 8), Report("b", None, 8)))
    False
    """
    title = f"{both.a.title} and {both.b.title}"
    return _render("comparison.html.j2", title, both=both, island=_island(both.to_json()))


def skip_argument(name: str) -> str:
    """What to type behind --skip for that layer alone, whatever its name: patterns and the shell take no part of it.

    >>> print(skip_argument("head"), skip_argument("head[0] a"))
    head 'head[[]0] a'
    """
    return shlex.quote(glob.escape(name))


def _render(template: str, title: str, **values: Any) -> str:
    style, script = _asset("style.css"), _asset("script.js")
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; "
        "base-uri 'none'; form-action 'none'; connect-src 'none'"
    )
    return (
        _environment().get_template(template).render(title=title, style=style, script=script, policy=policy, **values)
    )


@cache
def _asset(name: str) -> str:
    return files("detent.report").joinpath("templates", name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


def _island(text: str) -> str:
    """JSON that no text in it can leave: a script element ends at the first ``</``."""
    escaped = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}
    return re.sub("[<>&\u2028\u2029]", lambda found: escaped[found.group()], text)


@cache
def _environment() -> "Environment":
    try:
        import jinja2  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise UnsupportedError("HTML reports need jinja2: pip install 'detent[report]'") from error
    made = jinja2.Environment(
        loader=jinja2.PackageLoader("detent.report", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for name in ("number", "db", "noise_db", "percent", "nbytes", "signed", "bars"):
        made.filters[name] = getattr(figures, name)
    made.filters["numeric"] = lambda text: _NUMERIC.fullmatch(text.strip()) is not None
    made.filters["key"] = _key
    made.filters["skip"] = skip_argument
    made.filters["run_name"] = lambda name: name.replace("_", " ")
    return made


def _key(value: float | None) -> str:
    """What a column is sorted by; what is not known sorts last."""
    if value is None or value != value:  # noqa: PLR0124 - only NaN differs from itself
        return ""
    return f"{value:.8g}" if isfinite(value) else ("1e308" if value > 0 else "-1e308")
