"""Report of a quantized checkpoint: one HTML file without scripts, or JSON."""

import html
import json
from collections.abc import Mapping
from math import inf
from pathlib import Path
from typing import Any

from detent.checkpoint import CheckpointVerification, ConversionReport
from detent.codec import encode
from detent.storage import write_atomic
from detent.tables import bytes_text, html_table

__all__ = ["save_page"]

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:2em auto;max-width:70em;padding:0 1em}"
    "table{border-collapse:collapse}td,th{padding:.2em .8em;border-bottom:1px solid #ddd}"
)


def save_page(
    path: Path,
    result: ConversionReport,
    verification: CheckpointVerification | None,
    document: Mapping[str, Any],
) -> None:
    """Write a report; the suffix .json writes ``document``, any other suffix an HTML page."""
    if path.suffix.lower() == ".json":
        text = json.dumps(encode(dict(document)), indent=2, allow_nan=False)
    else:
        text = _page(result, verification)
    write_atomic(path, text.encode())


def _page(result: ConversionReport, verification: CheckpointVerification | None) -> str:
    title = html.escape(result.output.name)
    size = f"{bytes_text(result.nbytes_before)} to {bytes_text(result.nbytes_after)}"
    facts = [
        f"{result.to}, {size}, {result.bits_per_weight:.2f} bits per weight, {result.seconds:.1f} s",
        *([str(verification)] if verification is not None else ["not verified"]),
        *(f"warning: {text}" for text in result.warnings),
    ]
    lines = "".join(f"<p>{html.escape(line)}</p>" for fact in facts for line in fact.splitlines())
    sqnr_db = {} if verification is None else verification.sqnr_db
    rows = [("tensor", "type", "shape", "bits per weight", "size", "SQNR (dB)", "reason")]
    for line in result.tensors:
        value = sqnr_db.get(line.name)
        shown = "" if value is None else "exact" if value == inf else f"{value:.1f}"
        shape = "x".join(map(str, line.shape))
        bits = f"{line.bits_per_weight:.3g}"
        rows.append((line.name, line.type, shape, bits, bytes_text(line.nbytes), shown, line.reason))
    table = html_table(rows, right=(3, 4, 5)).replace("max-height:32em;", "", 1)
    head = f'<meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body><h1>{title}</h1>{lines}{table}</body></html>\n'
