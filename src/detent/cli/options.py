"""Options that several commands share, and the titles of the groups in which the help lists options."""

from pathlib import Path
from typing import Annotated

import typer

__all__ = [
    "ACCURACY",
    "CHECKS",
    "DATA",
    "OUTPUT",
    "AsJson",
    "BatchSize",
    "CalibrationData",
    "Data",
    "EvaluationData",
    "Force",
    "Labels",
    "MaxDrop",
    "Metric",
    "Quiet",
    "Report",
    "Skip",
    "Verbose",
    "recipe_file",
]

DATA, ACCURACY, CHECKS, OUTPUT = "Data", "Accuracy", "Checks", "Output"

AsJson = Annotated[bool, typer.Option("--json", help="Print only one JSON document on stdout.", rich_help_panel=OUTPUT)]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only errors.", rich_help_panel=OUTPUT)]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Print the log on stderr.", rich_help_panel=OUTPUT)]
Force = Annotated[bool, typer.Option("--force", "-f", help="Replace existing files.", rich_help_panel=OUTPUT)]
Data = Annotated[
    Path | None,
    typer.Option(
        "--data",
        "-d",
        metavar="PATH",
        help="Batches: .npz, .npy, or a directory of such files.",
        show_default=False,
        rich_help_panel=DATA,
    ),
]
CalibrationData = Annotated[
    Path | None,
    typer.Option(
        "--data",
        "-d",
        metavar="PATH",
        help="Calibration data: .npz, .npy or a directory.",
        show_default=False,
        rich_help_panel=DATA,
    ),
]
BatchSize = Annotated[
    int | None,
    typer.Option(
        "--batch-size",
        min=1,
        metavar="N",
        help="Samples per batch of .npy, .npz.",
        show_default="1, or the model's",
        rich_help_panel=DATA,
    ),
]
EvaluationData = Annotated[
    Path | None,
    typer.Option("--eval-data", metavar="PATH", help="Held-out data for the evaluation.", rich_help_panel=DATA),
]
Labels = Annotated[
    Path | None,
    typer.Option(
        "--labels", metavar="FILE", help="One label per sample: .npy, .npz, .txt or .csv.", rich_help_panel=DATA
    ),
]
Metric = Annotated[
    str | None,
    typer.Option(
        "--metric", metavar="NAME", help="top1, cosine, iou, or module:function (runs code).", rich_help_panel=ACCURACY
    ),
]
MaxDrop = Annotated[
    str | None,
    typer.Option(
        "--max-drop", metavar="N", help="Limit the metric's drop (0.5%) with layers in float.", rich_help_panel=ACCURACY
    ),
]
Skip = Annotated[
    list[str] | None,
    typer.Option(
        "--skip", metavar="PATTERN", help="Layer or pattern to keep in float; repeatable.", rich_help_panel=ACCURACY
    ),
]
Report = Annotated[
    Path | None,
    typer.Option(
        "--report",
        "-r",
        metavar="FILE",
        help="Write a report, .html or .json.",
        show_default=False,
        rich_help_panel=OUTPUT,
    ),
]


def recipe_file(recipe: str) -> Path | None:
    """Return the path if the recipe is a file, and None if it is a preset."""
    return Path(recipe) if Path(recipe).suffix.lower() in {".toml", ".json"} else None
