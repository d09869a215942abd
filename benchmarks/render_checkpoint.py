"""Render the tables of block formats and checkpoints in docs/benchmarks.md from the committed results.

::

    python benchmarks/render_checkpoint.py
"""

import json
from pathlib import Path

from page import placed, table_row

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"
RESULTS = ROOT / "benchmarks" / "results"
FILES = {
    "formats": "checkpoint.json",
    "proofs": "checkpoint_proofs.json",
    "gemma": "gemma_checkpoint.json",
    "training": "block_training.json",
}
K_QUANTS = ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k")
GOALS = {**dict.fromkeys(K_QUANTS, 4.0), "q4_0": 1.0, "q8_0": 1.0}  # speed relative to ggml, one thread
THREADS_GOAL, DEQUANTIZE_GOAL = 1.7, 1.0
HEAD = (
    "format",
    "bits per weight",
    "M elements/s",
    "x ggml",
    "with importance",
    "x ggml",
    "2 threads",
    "dequantize, x ggml",
)


def ratio(speeds: dict) -> float:
    """Return the speed of detent relative to ggml."""
    return float(speeds["detent"] / speeds["ggml"])


def missed(result: dict) -> list[str]:
    """Return the goals that are not met, each as a text."""
    texts = []
    for name, row in result["formats"].items():
        goal = GOALS.get(name)
        parts = [("quantize", row["plain"])] + (
            [("quantize with importance", row["weighted"])] if "weighted" in row else []
        )
        texts += [f"{name} {what}" for what, speeds in parts if goal is not None and ratio(speeds) < goal]
        if ratio(row["dequantize"]) < DEQUANTIZE_GOAL:
            texts.append(f"{name} dequantize")
        if row["plain"]["two_threads"] < THREADS_GOAL:
            texts.append(f"{name} on two threads")
        if not row["equal"]:
            texts.append(f"{name} bytes")
    return texts


def rendered(result: dict) -> dict[str, str]:
    """Render each section by its name, as Markdown."""
    lines = [table_row(*HEAD), "|---|" + "--:|" * (len(HEAD) - 1)]
    lines += [table_row(*_cells(name, row)) for name, row in result["formats"].items()]
    equal = sum(row["equal"] for row in result["formats"].values())
    not_met = missed(result)
    reading = (
        f"Bytes and values equal those of ggml for {equal} of {len(result['formats'])} formats. Goals: q4_0 and q8_0 "
        "at least as fast as ggml on one thread, K-quants at least 4 times; two threads at least "
        f"{THREADS_GOAL:g} times one; dequantize at least as fast as ggml. Not met: {', '.join(not_met) or 'none'}."
    )
    machine = result["machine"]
    if machine["real_time_priority"]:
        reading += (
            " The process had real-time priority. A plain copy of an array on two threads was "
            f"{machine['copy_on_two_threads']:.1f} times as fast as on one."
        )
    return {"block-formats": "\n".join(lines), "block-formats-reading": reading}


def rendered_proofs(result: dict) -> dict[str, str]:
    """Render memory, killed conversions, speed and mutated files."""
    memory, kill, speed = result["memory"], result["kill"], result["speed"]
    verified = "0 bytes differ" if memory["verified"] else "not met: bytes differ"
    one, two = (f"{speed['times_as_fast'][f'{count} threads']:.1f}" for count in (1, 2))
    bullets = [
        f"- Memory: a checkpoint of {memory['source_bytes'] / 1e9:.1f} GB in {memory['shards']} shards, sparse on "
        f"disk, with a budget of {memory['budget']}: at most {memory['largest_anonymous_bytes'] / 1e6:.0f} MB of "
        f"anonymous memory to convert it, and {memory['verify_largest_anonymous_bytes'] / 1e6:.0f} MB to verify it; "
        f"{verified}.",
        f"- SIGKILL at random moments of a conversion of {kill['source_bytes'] / 1e6:.0f} MB: after "
        f"{kill['same_bytes']} of {kill['kills']} kills, the next run ended with the same bytes; "
        f"{kill['went_on_with_finished_rows']} of them went on with finished rows.",
        f"- Speed, from a BF16 GGUF file of {speed['source_bytes'] / 1e6:.0f} MB to a Q4_K_M file: {one} times as fast "
        f"as llama.cpp's quantizer on one thread, {two} times on two. {speed['tensors_that_differ']} of "
        f"{speed['tensors']} tensors differ.",
    ]
    head = ("mutated files", "files", "valid results", "errors", "slowest, s", "memory growth, MB")
    lines = [table_row(*head), "|---|" + "--:|" * (len(head) - 1)]
    lines += [
        table_row(
            name,
            f"{row['files']:,}",
            f"{row['valid']:,}",
            f"{row['errors']:,}",
            f"{row['slowest_seconds']:.2f}",
            f"{row['grown_bytes'] / 1e6:.0f}",
        )
        for name, row in sorted(result["mutations"].items())
    ]
    return {"checkpoint-proofs": "\n".join(bullets), "mutated-files": "\n".join(lines)}


def rendered_gemma(result: dict) -> dict[str, str]:
    """Render the comparison on a real model."""
    head = ("mixture", "size", "tensors that differ", "same logits", "top-1 agreement", "loss")
    lines = [table_row(*head), "|---|" + "--:|" * (len(head) - 1)]
    lines += [
        table_row(
            name,
            f"{row['bytes'] / result['float_bytes']:.2f}",
            f"{row['tensors_that_differ']} of {row['tensors']}",
            "yes" if row["same_logits"] else "no",
            f"{100 * row['top1_agreement']:.1f}%",
            f"{row['loss']:.3f} ({row['loss'] - row['float_loss']:+.3f})",
        )
        for name, row in result["mixtures"].items()
    ]
    return {"gemma-checkpoint": "\n".join(lines)}


def rendered_training(result: dict) -> dict[str, str]:
    """Render the gaps of PTQ and QAT to float, one number per seed."""
    runs = result["runs"]
    head = ("bits", "float", "PTQ, gap to float", "QAT, gap to float trained as long")
    lines = [table_row(*head), "|--:|" + "--:|" * (len(head) - 1)]
    for bits in (4, 2):
        cells = (
            [f"{run['float']:.3f}" for run in runs],
            [f"{run[f'{bits} bits, PTQ'] - run['float']:+.3f}" for run in runs],
            [f"{run[f'{bits} bits, QAT'] - run['float, trained longer']:+.3f}" for run in runs],
        )
        lines.append(table_row(str(bits), *map(", ".join, cells)))
    return {"block-training": "\n".join(lines)}


RENDERERS = {"formats": rendered, "proofs": rendered_proofs, "gemma": rendered_gemma, "training": rendered_training}


def sections() -> dict[str, str]:
    """Render all sections from the committed results."""
    texts: dict[str, str] = {}
    for name, render in RENDERERS.items():
        texts |= render(json.loads((RESULTS / FILES[name]).read_text(encoding="utf-8")))
    return texts


def _cells(name: str, row: dict) -> tuple[str, ...]:
    weighted = row.get("weighted")
    return (
        f"`{name}`",
        f"{row['bits_per_weight']:g}",
        f"{row['plain']['detent']:,.0f}",
        f"{ratio(row['plain']):.1f}",
        "-" if weighted is None else f"{weighted['detent']:,.0f}",
        "-" if weighted is None else f"{ratio(weighted):.1f}",
        f"{row['plain']['two_threads']:.2f}",
        f"{ratio(row['dequantize']):.1f}",
    )


def main() -> None:
    """Rewrite the page."""
    PAGE.write_text(placed(PAGE.read_text(encoding="utf-8"), sections()), encoding="utf-8")


if __name__ == "__main__":
    main()
