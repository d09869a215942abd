"""HTML form of reports: number formats, charts as SVG paths, and Jinja templates.

An HTML file contains its styles, script and data, and makes no network requests. Jinja escapes all text, because layer
names come from untrusted files. A Content-Security-Policy allows only the report's own style and script, by their
hashes, and forbids all connections.
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

NONE = "\u2013"  # an en dash, for unknown values
MINUS = "\u2212"
WIDTH, HEIGHT = 320.0, 96.0  # size of a histogram in SVG units
CURVE_WIDTH, CURVE_HEIGHT = 640.0, 240.0
CURVE_POINTS = 256  # approximate limit on the number of points that are drawn per curve
MIN_SHARE_SHOWN = 1e-4  # smaller shares are shown as "< 0.01 %"
Lines = tuple[float | None, float | None]


def number(value: float | None, digits: int = 4) -> str:
    """Format a number with ``digits`` significant digits and a typographic minus sign."""
    if value is None or isnan(value):
        return NONE
    if not isfinite(value):
        return "∞" if value > 0 else f"{MINUS}∞"
    if isinstance(value, int) or (float(value).is_integer() and abs(value) < 1e9):
        return f"{int(value):,}".replace("-", MINUS)
    return f"{value:.{digits}g}".replace("-", MINUS)


def db(value: float | None) -> str:
    """Format decibels with one decimal."""
    if value is None or not isfinite(value):
        return number(value)
    return f"{value:.1f}".replace("-", MINUS)


def percent(value: float | None, digits: int = 1) -> str:
    """Format a share in percent, with a narrow space before "%"; small shares are never shown as 0."""
    if value is None or not isfinite(value):
        return NONE
    if value == 0:
        return "0\u202f%"
    if value < MIN_SHARE_SHOWN:
        return "< 0.01\u202f%"
    return f"{100 * value:.{digits if value >= 0.01 else 2}f}\u202f%"


def nbytes(value: float | None) -> str:
    """Format bytes with an SI unit."""
    return NONE if value is None else bytes_text(value, is_padded=True).replace("-", MINUS)


def noise_db(value: float | None) -> str:
    """Format a relative noise power as SQNR in decibels."""
    if value is None or not value >= 0:
        return NONE
    return db(sqnr_of(value))


def signed(value: float | None, digits: int = 1) -> str:
    """Format a change with its sign."""
    if value is None:
        return NONE
    if isinstance(value, int):
        return f"{value:+,}".replace("-", MINUS) if value else "0"
    text = f"{value:+.{digits}f}"
    return "0" if not float(text) else text.replace("-", MINUS)


@dataclass(frozen=True)
class Bars:
    """A histogram as SVG."""

    path: str  # bars inside the clipping range
    clipped: str  # bars outside the clipping range
    thick: float
    low: float | None  # position of the lower clip line; None if unknown or outside the drawing
    high: float | None  # position of the upper clip line; None if unknown or outside the drawing
    first: float  # value at the left edge
    last: float  # value at the right edge
    data: str  # data for tooltips
    text: str


def bars(tensor: Tensor) -> Bars | None:
    """Draw a tensor's histogram with lines at the clipping bounds; return None if there is no histogram."""
    histogram = tensor.histogram
    if histogram is None:
        return None
    half = 0.5 if histogram.of == "codes" else 0.0  # bins are centered on codes
    lines = (
        None if tensor.clip_low is None else tensor.clip_low - half,
        None if tensor.clip_high is None else tensor.clip_high + half,
    )
    low, high = _extent(histogram, lines)
    width = (high - low) or 1.0
    positions = [None if line is None or not low <= line <= high else WIDTH * (line - low) / width for line in lines]
    inside, outside = _strokes(histogram, lines, low, width)
    counts = ",".join(map(str, histogram.counts))
    data = f"{histogram.low:.7g}|{histogram.width:.7g}|{low:.7g}|{high:.7g}|{histogram.of}|{counts}"
    last = high if histogram.of == "values" else _last_code(tensor, histogram)
    bar_width = WIDTH * histogram.width / width
    thick = max(bar_width - (0.8 if bar_width > 2.5 else 0.0), 0.5)
    text = _description(tensor, histogram)
    return Bars(inside, outside, thick, positions[0], positions[1], low + half, last, data, text)


def _extent(histogram: Histogram, lines: Lines) -> tuple[float, float]:
    """Return the range of the x axis: the histogram's range, extended to clip lines within one histogram width."""
    low, high, width = histogram.low, histogram.high, histogram.high - histogram.low
    near = [line for line in lines if line is not None and low - width <= line <= high + width]
    return min([low, *near]), max([high, *near])


def _strokes(histogram: Histogram, lines: Lines, low: float, width: float) -> tuple[str, str]:
    """Draw bars as vertical strokes. Return the bars between the clip lines, and the bars outside."""
    highest = log1p(max(histogram.counts)) or 1.0
    parts: tuple[list[str], list[str]] = ([], [])
    for i, count in enumerate(histogram.counts):
        if not count:
            continue
        left, right = histogram.low + i * histogram.width, histogram.low + (i + 1) * histogram.width
        middle = (left + right) / 2
        is_outside = (lines[0] is not None and right <= lines[0]) or (lines[1] is not None and left >= lines[1])
        top = HEIGHT - max(1.5, (HEIGHT - 4) * log1p(count) / highest)
        parts[is_outside].append(f"M{WIDTH * (middle - low) / width:.4g} {HEIGHT:g}V{top:.3g}")
    return "".join(parts[0]), "".join(parts[1])


def _last_code(tensor: Tensor, histogram: Histogram) -> float:
    """Return the last code of the last bin, which may cover fewer codes than the other bins."""
    end = histogram.high - 0.5
    return end if tensor.clip_high is None else min(end, tensor.clip_high)


def _description(tensor: Tensor, histogram: Histogram) -> str:
    """Describe a histogram in words, for screen readers."""
    total = sum(histogram.counts) or 1
    fullest = max(range(len(histogram.counts)), key=histogram.counts.__getitem__)
    half = 0.5 if histogram.of == "codes" else 0.0
    start = histogram.low + fullest * histogram.width + half
    stop = histogram.low + (fullest + 1) * histogram.width - half
    noun = "codes (zero point subtracted)" if histogram.of == "codes" else "values"
    low, high = (
        (tensor.minimum, tensor.maximum)
        if histogram.of == "values"
        else (histogram.low + 0.5, _last_code(tensor, histogram))
    )
    where = f"are {number(start)}" if start == stop else f"are from {number(start)} to {number(stop)}"
    parts = [
        f"Histogram of {number(tensor.elements)} {noun} from {number(low)} to {number(high)}",
        f"{percent(histogram.counts[fullest] / total)} of them {where}",
    ]
    if tensor.clip_low is not None and tensor.clip_high is not None:
        parts.append(f"the clipping range is {number(tensor.clip_low)} to {number(tensor.clip_high)}")
    if tensor.clip_fraction is not None:
        parts.append(f"{percent(tensor.clip_fraction)} of the values are clipped")
    return "; ".join(parts) + "."


@dataclass(frozen=True)
class Slice:
    """One part of the bar that shows file sizes."""

    name: str
    nbytes: int
    share: float
    x: float
    width: float
    tone: int


def slices(sizes: Sequence[Size]) -> list[Slice]:
    """Return the parts of the bar that shows file sizes; the whole bar has width 100."""
    total = sum(part.nbytes for part in sizes) or 1
    parts, at = [], 0.0
    for tone, part in enumerate(sizes):
        share = part.nbytes / total
        parts.append(Slice(part.name, part.nbytes, share, round(at, 3), round(100 * share, 3), tone % 6))
        at += 100 * share
    return parts


@dataclass(frozen=True)
class Curve:
    """A line chart of SQNR against weight size as SVG, with ticks."""

    path: str
    dots: tuple[tuple[float, float, str], ...]
    x_ticks: tuple[tuple[float, str], ...]
    y_ticks: tuple[tuple[float, str], ...]
    text: str
    mix: tuple[float, float] | None
    measured: tuple[float, float] | None


def curve_points(points: Sequence[tuple[int, float]]) -> Sequence[tuple[int, float]]:
    """Return at most about ``CURVE_POINTS`` points of a curve, including the last point."""
    step = -(-len(points) // CURVE_POINTS) or 1
    return (*points[:-1:step], *points[-1:]) if step > 1 else points


def curve(points: Sequence[tuple[int, float]], mix: Mix | None = None) -> Curve | None:
    """Draw the predicted SQNR against the total size of the weights; return None for fewer than two points."""
    points = [(size, value) for size, value in points if isfinite(value)]
    if len(points) < 2:
        return None
    xs, ys = [float(size) for size, _ in points], [value for _, value in points]
    mixes = (None, None) if mix is None else (mix.predicted_sqnr_db, mix.measured_sqnr_db)
    finite = [value for value in mixes if value is not None and isfinite(value)]
    x0, x1, y0, y1 = min(xs), max(xs), min(ys + finite), max(ys + finite)

    def position(x: float, y: float) -> tuple[float, float]:
        across = (x - x0) / ((x1 - x0) or 1.0)
        up = (y - y0) / ((y1 - y0) or 1.0)
        return round(CURVE_WIDTH * min(max(across, 0.0), 1.0), 1), round(CURVE_HEIGHT * (1 - up), 1)

    positions = [position(x, y) for x, y in zip(xs, ys, strict=True)]
    path = "M" + "L".join(f"{x:g} {y:g}" for x, y in positions)
    dots = tuple((x, y, f"{nbytes(a)}: {db(b)} dB") for (x, y), a, b in zip(positions, xs, ys, strict=True))
    x_ticks = tuple((position(x0 + i * (x1 - x0) / 4, y0)[0], nbytes(x0 + i * (x1 - x0) / 4)) for i in range(5))
    y_ticks = tuple((position(x0, y0 + i * (y1 - y0) / 4)[1], db(y0 + i * (y1 - y0) / 4)) for i in range(5))
    text = f"From {db(ys[0])} dB at {nbytes(xs[0])} to {db(ys[-1])} dB at {nbytes(xs[-1])}, {len(points)} points."
    predicted, measured = (
        position(mix.nbytes, each) if mix is not None and each is not None and isfinite(each) else None
        for each in mixes
    )
    return Curve(path, dots, x_ticks, y_ticks, text, predicted, measured)


NOISE_SHARE = "Noise share: {}, divided by the sum over all layers."
BASES = {
    "sensitivity": NOISE_SHARE.format("noise at the model's outputs with only this layer quantized"),
    "output": NOISE_SHARE.format("noise in this layer's output, including errors from earlier layers"),
    "weight": NOISE_SHARE.format("relative quantization error of this layer's weight"),
    "input": NOISE_SHARE.format("relative quantization error of this layer's input"),
    "none": "Noise shares were not measured: build the report with data and the float model.",
}
_NUMERIC = re.compile(r"[\s<>=~±+\-\u2212\u2013.,\d]*\d[\d.,]*\s*(%|dB|ms|s|x|\u00d7|[kMG]?B|bytes|bits?)?")


def render_report(report: Report) -> str:
    """Render a report as HTML."""
    total, quantized, integer = report.counts
    points = () if report.sensitivity is None else curve_points(report.sensitivity.curve())
    return _render(
        "report.html.j2",
        report.title,
        report=report,
        total=total,
        quantized=quantized,
        integer=integer,
        basis=BASES[report.noise_share_basis],
        parts=slices(report.sizes),
        points=points,
        curve=curve(points, report.mix),
        largest_share=max((each.noise_share or 0.0 for each in report.layers), default=0.0) or 1.0,
        island=_island(report.to_json()),
    )


def render_comparison(both: Comparison) -> str:
    """Render a comparison of two reports as HTML."""
    title = f"{both.a.title} and {both.b.title}"
    return _render("comparison.html.j2", title, both=both, island=_island(both.to_json()))


def skip_argument(name: str) -> str:
    """Return the argument of --skip that selects exactly this layer, escaped for patterns and for the shell."""
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
    """Escape JSON for use in a script element, which would otherwise end at the first ``</``."""
    escaped = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}
    return re.sub("[<>&\u2028\u2029]", lambda match: escaped[match.group()], text)


@cache
def _environment() -> "Environment":
    try:
        import jinja2  # noqa: PLC0415 - optional
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
    """Return the key by which the script of the page sorts a number; unknown values sort last."""
    if value is None or value != value:  # noqa: PLR0124 - only NaN differs from itself
        return ""
    return f"{value:.8g}" if isfinite(value) else ("1e308" if value > 0 else "-1e308")
