"""``detent bench``: time a float model and its quantized model, in alternating runs."""

from pathlib import Path
from typing import Annotated

import typer

from detent.cli.exits import require
from detent.cli.options import DATA, AsJson, BatchSize, Data, Preprocess, Quiet, Tokenizer, Verbose, data_files
from detent.cli.screen import Screen
from detent.errors import SpecError, UnsupportedError
from detent.tables import counted

__all__ = ["EXAMPLE", "HELP", "run"]

HELP = """Time a float model and its quantized model in ONNX Runtime.

The two models run alternately, and their median times are compared. Without --data, inputs are random, and dynamic \
axes have size 1 unless --shape sets them."""
EXAMPLE = "detent bench model.onnx model.w8a8.onnx --shape x=1,3,224,224"
TIMING = "Timing"  # title of a group of options in the help
MAX_BATCHES = 8  # enough for a median; all batches are held in memory


def run(
    first: Annotated[
        Path, typer.Argument(metavar="FLOAT", help="Float model (.onnx).", show_default=False, rich_help_panel=DATA)
    ],
    second: Annotated[
        Path,
        typer.Argument(metavar="QUANTIZED", help="Quantized model (.onnx).", show_default=False, rich_help_panel=DATA),
    ],
    *,
    data: Data = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            "--shape",
            metavar="NAME=SHAPE",
            help="Shape of a random input, e.g. x=1,3,224,224; repeatable.",
            rich_help_panel=DATA,
        ),
    ] = None,
    batch_size: BatchSize = None,
    preprocess: Preprocess = None,
    tokenizer: Tokenizer = None,
    threads: Annotated[
        int,
        typer.Option(min=0, max=1024, metavar="N", help="Threads per model; 0 uses all cores.", rich_help_panel=TIMING),
    ] = 1,
    repeat: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Runs per model.",
            show_default="3 to 50, as many as fit in 5 s",
            rich_help_panel=TIMING,
        ),
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Time both models; see ``HELP``."""
    require("onnx", "onnxruntime")
    from detent.evaluate.speed import (  # noqa: PLC0415 - these load ONNX Runtime
        duration_text,
        dynamic_shape_notes,
        parse_shapes,
        random_inputs,
        time_models,
    )
    from detent.onnx_model.batches import open_batches  # noqa: PLC0415
    from detent.onnx_model.files import load_model  # noqa: PLC0415

    screen = Screen(as_json=as_json, quiet=quiet, verbose=verbose)
    shapes = parse_shapes(shape or ())
    if data is not None and shapes:
        raise SpecError("got --shape and --data, but --shape is only for random inputs: drop one of these options")
    models = load_model(first), load_model(second)
    files = data_files(data, batch_size, preprocess, tokenizer)
    if files is None:
        feeds, notes = [random_inputs(models[0], shapes)], dynamic_shape_notes(models[0], shapes)
    else:
        batches = open_batches(files, models[0].inputs).first(MAX_BATCHES)
        feeds, notes = list(batches), list(batches.notes)
    screen.note(*notes)
    with screen.progress("timing") as step:
        try:
            timing = time_models(*models, feeds, threads=threads, repeat=repeat, seconds=5.0, progress=step)
        except UnsupportedError as error:
            if files is not None or not notes:
                raise
            raise UnsupportedError(f"{error} ({'; '.join(notes)})") from error
    inputs = {name: list(array.shape) for name, array in feeds[0].items()}
    rows = [
        (str(first), duration_text(timing.first_ms), ""),
        (str(second), duration_text(timing.second_ms), timing.speed_text),
    ]
    screen.table(("model", "time", "speed"), rows, right=(1, 2))
    source = "random inputs" if data is None else counted(len(feeds), "batch")
    shown = ", ".join(f"{name} {'x'.join(map(str, sizes))}" for name, sizes in inputs.items())
    runs = counted(timing.runs, "alternating run", ",")
    screen.say(f"medians of {runs} per model, {timing.threads_text}, {source}: {shown}")
    screen.emit(
        {
            "float": str(first),
            "quantized": str(second),
            "ms_float": timing.first_ms,
            "ms_quantized": timing.second_ms,
            "times_as_fast": timing.ratio,
            "runs": timing.runs,
            "threads": threads,
            "inputs": inputs,
            "random": data is None,
        }
    )
