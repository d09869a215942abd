"""Options that several commands share, and the titles of the groups in which the help lists options."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from detent.errors import SpecError

if TYPE_CHECKING:
    from detent.onnx_model import DataFiles

__all__ = [
    "ACCURACY",
    "CHECKPOINTS",
    "CHECKS",
    "DATA",
    "OUTPUT",
    "WORK",
    "AsJson",
    "BatchSize",
    "CalibrationData",
    "Data",
    "EvaluationData",
    "Force",
    "Labels",
    "MaxDrop",
    "Metric",
    "Preprocess",
    "Quiet",
    "Report",
    "Skip",
    "Tokenizer",
    "Verbose",
    "data_files",
    "recipe_file",
]

DATA, ACCURACY, CHECKS, OUTPUT = "Data", "Accuracy", "Checks", "Output"
CHECKPOINTS, WORK = "Checkpoints", "Work"

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
        help=".npz, .npy, images, .wav, .txt, or a directory.",
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
        help=".npz, .npy, images, .wav, .txt, or a directory.",
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
        help="Samples per batch.",
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
Preprocess = Annotated[
    str | None,
    typer.Option(
        "--preprocess",
        metavar="TEXT",
        help="imagenet, 0..1, -1..1, mean=..., size=...",
        show_default="guessed",
        rich_help_panel=DATA,
    ),
]
Tokenizer = Annotated[
    Path | None,
    typer.Option("--tokenizer", metavar="FILE", help="The tokenizer.json for a .txt file.", rich_help_panel=DATA),
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


def data_files(
    data: Path | None, batch_size: int | None, preprocess: str | None, tokenizer: Path | None
) -> "DataFiles | None":
    """Return the value of --data with its options; None without --data."""
    from detent.onnx_model import DataFiles  # noqa: PLC0415 - it loads ONNX

    if data is not None:
        return DataFiles(data, batch_size, preprocess, tokenizer)
    for option, value in (("--preprocess", preprocess), ("--tokenizer", tokenizer)):
        if value is not None:
            raise SpecError(f"got {option}, but no data: pass --data, or drop {option}")
    return None
