"""Reports as HTML: numbers as text, charts as SVG paths, pages by Jinja templates.

Everything is in the page: styles, script and data; it loads nothing. Jinja escapes every text, since a file may name
its layers as it likes. The policy in the page's head lets the page's own style and script run, by their hashes, and
forbids all connections.
"""

import re
import shlex
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib.resources import files
from math import isfinite, isnan, log1p
from typing import TYPE_CHECKING, Any

from detent.errors import UnsupportedError, install_hint
from detent.metrics import sqnr_of
from detent.recipe import exact_pattern
from detent.report.comparison import Comparison
from detent.report.document import Histogram, Report, Size, Tensor
from detent.sensitivity.layer_noise import Mix
from detent.tables import bytes_text

if TYPE_CHECKING:
    from jinja2 import Environment

__all__ = ["render_comparison", "render_report", "skip_argument"]

NONE = "\u2013"
MINUS = "\u2212"
WIDTH, HEIGHT = 320.0, 96.0
CURVE_WIDTH, CURVE_HEIGHT = 640.0, 240.0
CURVE_POINTS = 256  # of a curve that are drawn
MIN_SHARE_SHOWN = 1e-4
Lines = tuple[float | None, float | None]


def number(value: float | None, digits: int = 4) -> str:
    """A number of so many digits, with a real minus sign."""
    if value is None or isnan(value):
        return NONE
    if not isfinite(value):
        return "∞" if value > 0 else f"{MINUS}∞"
    if isinstance(value, int) or (float(value).is_integer() and abs(value) < 1e9):
        return f"{int(value):,}".replace("-", MINUS)
    return f"{value:.{digits}g}".replace("-", MINUS)


def db(value: float | None) -> str:
    """Decibels with one digit after the point."""
    if value is None or not isfinite(value):
        return number(value)
    return f"{value:.1f}".replace("-", MINUS)


def percent(value: float | None, digits: int = 1) -> str:
    """A share in percent, behind a narrow space; what is not 0 never looks like 0."""
    if value is None or not isfinite(value):
        return NONE
    if value == 0:
        return "0\u202f%"
    if value < MIN_SHARE_SHOWN:
        return "< 0.01\u202f%"
    return f"{100 * value:.{digits if value >= 0.01 else 2}f}\u202f%"


def nbytes(value: float | None) -> str:
    """Bytes with a unit, by thousands."""
    return NONE if value is None else bytes_text(value, is_padded=True).replace("-", MINUS)


def noise_db(value: float | None) -> str:
    """The SQNR in decibels of a relative noise power."""
    if value is None or not value >= 0:
        return NONE
    return db(sqnr_of(value))


def signed(value: float | None, digits: int = 1) -> str:
    """A change with its sign."""
    if value is None:
        return NONE
    if isinstance(value, int):
        return f"{value:+,}".replace("-", MINUS) if value else "0"
    text = f"{value:+.{digits}f}"
    return "0" if not float(text) else text.replace("-", MINUS)


@dataclass(frozen=True)
class Bars:
    """A histogram as a drawing."""

    path: str  # strokes of the bars within the range
    clipped: str  # and of those beyond
    thick: float
    low: float | None  # where the clip lines stand; None where they are outside or not known
    high: float | None
    first: float  # the values at both ends of the drawing
    last: float
    data: str  # what a tooltip needs
    text: str


def bars(tensor: Tensor) -> Bars | None:
    """The drawing of a tensor's histogram, its clip lines within it; None without a histogram."""
    shown = tensor.histogram
    if shown is None:
        return None
    half = 0.5 if shown.of == "codes" else 0.0  # the bins of codes are centred on them
    lines = (
        None if tensor.clip_low is None else tensor.clip_low - half,
        None if tensor.clip_high is None else tensor.clip_high + half,
    )
    low, high = _extent(shown, lines)
    span = (high - low) or 1.0
    places = [None if line is None or not low <= line <= high else WIDTH * (line - low) / span for line in lines]
    inside, outside = _strokes(shown, lines, low, span)
    counts = ",".join(map(str, shown.counts))
    data = f"{shown.low:.7g}|{shown.width:.7g}|{low:.7g}|{high:.7g}|{shown.of}|{counts}"
    last = high if shown.of == "values" else _last_code(tensor, shown)
    wide = WIDTH * shown.width / span
    thick = max(wide - (0.8 if wide > 2.5 else 0.0), 0.5)
    text = _described(tensor, shown)
    return Bars(inside, outside, thick, places[0], places[1], low + half, last, data, text)


def _extent(shown: Histogram, lines: Lines) -> tuple[float, float]:
    """Both ends of a drawing: a line that lies a little outside is worth the space, one far outside is not."""
    low, high, room = shown.low, shown.high, shown.high - shown.low
    near = [line for line in lines if line is not None and low - room <= line <= high + room]
    return min([low, *near]), max([high, *near])


def _strokes(shown: Histogram, lines: Lines, low: float, span: float) -> tuple[str, str]:
    """The bars between the lines and those beyond, each an upright stroke."""
    most = log1p(max(shown.counts)) or 1.0
    parts: tuple[list[str], list[str]] = ([], [])
    for i, count in enumerate(shown.counts):
        if not count:
            continue
        left, right = shown.low + i * shown.width, shown.low + (i + 1) * shown.width
        middle = (left + right) / 2
        beyond = (lines[0] is not None and right <= lines[0]) or (lines[1] is not None and left >= lines[1])
        top = HEIGHT - max(1.5, (HEIGHT - 4) * log1p(count) / most)
        parts[beyond].append(f"M{WIDTH * (middle - low) / span:.4g} {HEIGHT:g}V{top:.3g}")
    return "".join(parts[0]), "".join(parts[1])


def _last_code(tensor: Tensor, shown: Histogram) -> float:
    """The last bin of codes may hold fewer than the others."""
    end = shown.high - 0.5
    return end if tensor.clip_high is None else min(end, tensor.clip_high)


def _described(tensor: Tensor, shown: Histogram) -> str:
    total = sum(shown.counts) or 1
    fullest = max(range(len(shown.counts)), key=shown.counts.__getitem__)
    half = 0.5 if shown.of == "codes" else 0.0
    start, stop = shown.low + fullest * shown.width + half, shown.low + (fullest + 1) * shown.width - half
    what = "codes less their zero point" if shown.of == "codes" else "values"
    low, high = (
        (tensor.minimum, tensor.maximum) if shown.of == "values" else (shown.low + 0.5, _last_code(tensor, shown))
    )
    where = f"are {number(start)}" if start == stop else f"lie from {number(start)} to {number(stop)}"
    parts = [
        f"Histogram of {number(tensor.elements)} {what} from {number(low)} to {number(high)}",
        f"{percent(shown.counts[fullest] / total)} of them {where}",
    ]
    if tensor.clip_low is not None and tensor.clip_high is not None:
        parts.append(f"the quantizer holds {number(tensor.clip_low)} to {number(tensor.clip_high)}")
    if tensor.clip_fraction is not None:
        parts.append(f"{percent(tensor.clip_fraction)} are clipped")
    return "; ".join(parts) + "."


@dataclass(frozen=True)
class Slice:
    """A part of the bar of sizes."""

    name: str
    nbytes: int
    share: float
    x: float
    width: float
    tone: int


def slices(sizes: Sequence[Size]) -> list[Slice]:
    """The parts of a bar of width 100."""
    total = sum(part.nbytes for part in sizes) or 1
    parts, at = [], 0.0
    for tone, part in enumerate(sizes):
        share = part.nbytes / total
        parts.append(Slice(part.name, part.nbytes, share, round(at, 3), round(100 * share, 3), tone % 6))
        at += 100 * share
    return parts


@dataclass(frozen=True)
class Curve:
    """A line of bytes and SQNR as a drawing, with ticks."""

    path: str
    dots: tuple[tuple[float, float, str], ...]
    x_ticks: tuple[tuple[float, str], ...]
    y_ticks: tuple[tuple[float, str], ...]
    text: str
    mix: tuple[float, float] | None
    measured: tuple[float, float] | None


def curve_points(points: Sequence[tuple[int, float]]) -> Sequence[tuple[int, float]]:
    """Bytes and predicted SQNR of a sensitivity's curve, thinned to about ``CURVE_POINTS``; the last point stays."""
    step = -(-len(points) // CURVE_POINTS) or 1
    return (*points[:-1:step], *points[-1:]) if step > 1 else points


def curve(points: Sequence[tuple[int, float]], mix: Mix | None = None) -> Curve | None:
    """The drawing of what bytes buy; None without at least two points."""
    points = [(size, value) for size, value in points if isfinite(value)]
    if len(points) < 2:
        return None
    xs, ys = [float(size) for size, _ in points], [value for _, value in points]
    mixes = (None, None) if mix is None else (mix.predicted_sqnr_db, mix.measured_sqnr_db)
    finite = [value for value in mixes if value is not None and isfinite(value)]
    x0, x1, y0, y1 = min(xs), max(xs), min(ys + finite), max(ys + finite)

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - x0) / ((x1 - x0) or 1.0)
        up = (y - y0) / ((y1 - y0) or 1.0)
        return round(CURVE_WIDTH * min(max(across, 0.0), 1.0), 1), round(CURVE_HEIGHT * (1 - up), 1)

    places = [place(x, y) for x, y in zip(xs, ys, strict=True)]
    path = "M" + "L".join(f"{x:g} {y:g}" for x, y in places)
    dots = tuple((x, y, f"{nbytes(a)}: {db(b)} dB") for (x, y), a, b in zip(places, xs, ys, strict=True))
    x_ticks = tuple((place(x0 + i * (x1 - x0) / 4, y0)[0], nbytes(x0 + i * (x1 - x0) / 4)) for i in range(5))
    y_ticks = tuple((place(x0, y0 + i * (y1 - y0) / 4)[1], db(y0 + i * (y1 - y0) / 4)) for i in range(5))
    text = f"From {db(ys[0])} dB at {nbytes(xs[0])} to {db(ys[-1])} dB at {nbytes(xs[-1])}, in {len(points)} steps."
    predicted, measured = (
        place(mix.nbytes, each) if mix is not None and each is not None and isfinite(each) else None for each in mixes
    )
    return Curve(path, dots, x_ticks, y_ticks, text, predicted, measured)


BASES = {
    "sensitivity": "Damage is a layer's share of the noise at the outputs when it alone is quantized.",
    "output": "Damage is a layer's share of the noise in all layers' results; it includes error of earlier layers.",
    "weight": "Damage is a layer's share of the rounding noise of all weights, each relative to its weight.",
    "input": "Damage is a layer's share of the rounding noise of all inputs, each relative to its input.",
    "none": "Nothing is known of the damage: give data and the float model to measure it.",
}
_NUMERIC = re.compile(r"[\s<>=~±+\-\u2212\u2013.,\d]*\d[\d.,]*\s*(%|dB|ms|s|x|\u00d7|[kMG]?B|bytes|bits?)?")


def render_report(report: Report) -> str:
    """The page of a report."""
    total, quantized, integers = report.counts
    points = () if report.sensitivity is None else curve_points(report.sensitivity.curve())
    return _render(
        "report.html.j2",
        report.title,
        report=report,
        total=total,
        quantized=quantized,
        integers=integers,
        basis=BASES[report.damage_basis],
        parts=slices(report.sizes),
        points=points,
        curve=curve(points, report.mix),
        most_damage=max((each.damage or 0.0 for each in report.layers), default=0.0) or 1.0,
        island=_island(report.to_json()),
    )


def render_comparison(both: Comparison) -> str:
    """The page of two reports side by side."""
    title = f"{both.a.title} and {both.b.title}"
    return _render("comparison.html.j2", title, both=both, island=_island(both.to_json()))


def skip_argument(name: str) -> str:
    """What to type behind --skip for that layer alone, whatever its name: patterns and the shell take no part of it."""
    return shlex.quote(exact_pattern(name))


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
    return re.sub("[<>&\u2028\u2029]", lambda match: escaped[match.group()], text)


@cache
def _environment() -> "Environment":
    try:
        import jinja2  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise UnsupportedError(f"HTML reports need jinja2: {install_hint('jinja2')}") from error
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("detent.report", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters = (number, db, noise_db, percent, nbytes, signed, bars)
    environment.filters.update({each.__name__: each for each in filters})
    environment.filters["numeric"] = lambda text: _NUMERIC.fullmatch(text.strip()) is not None
    environment.filters["key"] = _key
    environment.filters["skip"] = skip_argument
    environment.filters["run_name"] = lambda name: name.replace("_", " ")
    return environment


def _key(value: float | None) -> str:
    """What a column is sorted by; what is not known sorts last."""
    if value is None or value != value:  # noqa: PLR0124 - only NaN differs from itself
        return ""
    return f"{value:.8g}" if isfinite(value) else ("1e308" if value > 0 else "-1e308")
