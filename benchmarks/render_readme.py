"""The README's tables: a few rows of every committed benchmark, made from the results and never typed.

::

    python benchmarks/render_readme.py

The pages that the README points to have all rows, and how they were measured.
"""

import json
from pathlib import Path
from statistics import mean

from page import placed
from render_qat import CONTINUED

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"
OURS, AVX2 = "detent", "detent, avx2"
ENTROPY = "ORT Entropy"
SIZE = 2**24
OPERATIONS = ("fake_quantize", "quantize int8", "quantize int4", "dequantize", "fake_quantize_backward", "min-max")
GRANULARITIES = ("tensor", "axis0", "group32")
BITS = (8, 4, 3, 2)
METHODS = (  # titles, and how the results call them
    ("quantized afterwards", "PTQ"),
    ("**trained quantized**, learned scales", "QAT, learned"),
    ("brevitas, trained", "brevitas"),
    ("torch.ao FX, trained", "torch.ao FX"),
)


def rendered(onnx: dict, qat: dict, speed: dict) -> dict[str, str]:
    """Each section by its name, as Markdown."""
    return {"readme-onnx": _files(onnx), "readme-qat": _training(qat), "readme-speed": _speed(speed)}


def _files(result: dict) -> str:
    """A row per model: the noise of detent's file and of the best file of any peer, sizes, times, memory."""
    found = {(row["model"], row["contestant"]): row for row in result["rows"] if "sqnr_db" in row}
    lines = [
        _line("w8a8", "SQNR in dB", "best peer", "decisions kept", "size", "time, any CPU", "time, avx2", "memory"),
        _line("---", *["--:"] * 7),
    ]
    for model in result["models"]:
        ours, fast, entropy = (found.get((model, who)) for who in (OURS, AVX2, ENTROPY))
        peers = [row for (name, who), row in found.items() if name == model and not who.startswith(OURS)]
        best = max(peers, key=lambda row: row["mean_sqnr_db"])
        lines.append(
            _line(
                model,
                *_better(ours["mean_sqnr_db"], best["mean_sqnr_db"], best["contestant"]),
                f"{ours['agreement']:.1%}",
                f"{ours['size_ratio']:.2f}",
                f"{ours['ratio']:.2f}",
                f"{fast['ratio']:.2f}",
                f"{ours['growth'] / entropy['growth']:.2f}" if entropy else "",
            )
        )
    about = (
        f"{_machine(result)}; peers: onnxruntime {result['versions']['onnxruntime']} (MinMax, Percentile, Entropy, "
        f"reduced range) and nncf {result['versions']['nncf']}. Noise over all outputs; sizes and times of a run "
        "over the float model's; memory over that of ORT's Entropy."
    )
    return "\n".join([*lines, "", about])


def _better(ours: float, best: float, who: str) -> tuple[str, str]:
    """Both figures, the better one in bold."""
    marks = ("**", "") if ours >= best else ("", "**")
    return f"{marks[0]}{ours:.1f}{marks[0]}", f"{marks[1]}{best:.1f}{marks[1]} ({who})"


def _training(result: dict) -> str:
    """Points of accuracy below the float model that trained as long, by bits of weights and activations."""
    score: dict[tuple[str, int | None], float] = {}
    for key in {(row["method"], row["bits"]) for row in result["rows"]}:
        score[key] = mean(row["accuracy"] for row in result["rows"] if (row["method"], row["bits"]) == key)
    plain = score[CONTINUED, None]
    lines = [
        _line("points below float", *(f"{bits} bits" for bits in BITS)),
        _line("---", *["--:"] * len(BITS)),
        *(
            _line(title, *(f"{plain - score[method, bits]:.2f}" if (method, bits) in score else "" for bits in BITS))
            for title, method in METHODS
        ),
    ]
    about = (
        f"A small CNN on Fashion-MNIST, {plain:.1f} % in float, mean of {len(result['seeds'])} seeds, weights and "
        f"activations of so many bits; {_machine(result)}."
    )
    return "\n".join([*lines, "", about])


def _speed(result: dict) -> str:
    """Times over a copy of the array, the yardstick of memory."""
    found = {
        (row["operation"], row["granularity"]): row["times_copy"]
        for row in result["rows"]
        if (row["dtype"], row["size"], row["contestant"]) == ("float32", SIZE, OURS)
    }
    lines = [
        _line("time / copy of the array", *(f"per {name}" for name in GRANULARITIES)),
        _line("---", *["--:"] * len(GRANULARITIES)),
        *(_line(operation, *(f"{found[operation, name]:.2f}" for name in GRANULARITIES)) for operation in OPERATIONS),
    ]
    return "\n".join(
        [*lines, "", f"2^24 numbers of float32, {result['machine']['threads']} threads; {_machine(result)}."]
    )


def _machine(result: dict) -> str:
    return f"{result['machine']['cpu']}, {result['machine']['level']}, {result['date']}"


def _line(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def results() -> tuple[dict, dict, dict]:
    """What was measured: ONNX files, training, kernels."""
    names = ("onnx_ptq.json", "qat_accuracy.json", "latest.json")
    onnx, qat, speed = (json.loads((RESULTS / name).read_text(encoding="utf-8")) for name in names)
    return onnx, qat, speed


def main() -> None:
    """Rewrite the README."""
    README.write_text(placed(README.read_text(encoding="utf-8"), rendered(*results())), encoding="utf-8")


if __name__ == "__main__":
    main()
