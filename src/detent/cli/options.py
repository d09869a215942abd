"""Options: those that several commands have, said once."""

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["AsJson", "BatchSize", "Data", "Force", "Quiet", "Report", "recipe_file"]

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout, and nothing else there.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing but errors.")]
Force = Annotated[bool, typer.Option("--force", "-f", help="Replace files that exist.")]
Data = Annotated[
    Path | None,
    typer.Option(
        "--data",
        "-d",
        help="Batches of inputs: an .npz with an array per input (an .npy for one input), whose first axis counts "
        "samples, or a directory with an .npz or .npy per batch.",
        show_default=False,
    ),
]
BatchSize = Annotated[
    int | None, typer.Option("--batch-size", min=1, help="Samples of an .npz per batch.", show_default="1")
]
Report = Annotated[
    Path | None,
    typer.Option("--report", "-r", help="Write a page (.html) or the same as .json to this file.", show_default=False),
]


def recipe_file(recipe: str) -> Path | None:
    """The file of a recipe; None for a preset."""
    return Path(recipe) if Path(recipe).suffix.lower() in {".toml", ".json"} else None
