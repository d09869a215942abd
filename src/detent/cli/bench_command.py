"""``detent bench``: a float model against its quantized one, run by run in turn."""

from pathlib import Path
from typing import Annotated

import typer

from detent.cli.exits import require
from detent.cli.options import AsJson, BatchSize, Data, Quiet
from detent.cli.screen import Screen
from detent.errors import SpecError

__all__ = ["HELP", "run"]

HELP = """Time a float model against its quantized one in ONNX Runtime: alternating runs, medians, and their ratio.

Without data, inputs are random: sizes that vary are 1, unless --shape gives them.

Example: [bold]detent bench model.onnx model.w8a8.onnx --shape x=1,3,224,224 --threads 1[/bold]"""
MAX_BATCHES = 8


def run(
    first: Annotated[Path, typer.Argument(metavar="FLOAT", help="The float model.", show_default=False)],
    second: Annotated[Path, typer.Argument(metavar="QUANTIZED", help="The quantized one.", show_default=False)],
    *,
    data: Data = None,
    shape: Annotated[
        list[str] | None,
        typer.Option("--shape", help="NAME=1,3,224,224: the shape of a random input; repeatable."),
    ] = None,
    threads: Annotated[int, typer.Option(min=0, max=1024, help="Threads per model; 0 uses all cores.")] = 1,
    repeat: Annotated[
        int | None,
        typer.Option(min=1, help="How often each model runs.", show_default="what 5 s allow, up to 50"),
    ] = None,
    batch_size: BatchSize = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Time both models; see ``HELP``."""
    require("onnx", "onnxruntime")
    from detent.evaluate.speed import (  # noqa: PLC0415 - these load ONNX Runtime
        duration_text,
        parse_shapes,
        random_inputs,
        time_models,
    )
    from detent.onnx_model.batches import open_batches  # noqa: PLC0415
    from detent.onnx_model.files import load_model  # noqa: PLC0415

    screen = Screen(as_json=as_json, quiet=quiet)
    shapes = parse_shapes(shape or ())
    if data is not None and shapes:
        raise SpecError("--shape is for random inputs, --data has its own shapes: give one of them")
    models = load_model(first), load_model(second)
    if data is None:
        feeds = [random_inputs(models[0], shapes)]
    else:
        feeds = list(open_batches(data, models[0].inputs, batch_size).first(MAX_BATCHES))
    with screen.progress("timing") as step:
        timing = time_models(*models, feeds, threads=threads, repeat=repeat, seconds=5.0, progress=step)
    inputs = {name: list(array.shape) for name, array in feeds[0].items()}
    rows = [
        (str(first), duration_text(timing.first_ms), ""),
        (str(second), duration_text(timing.second_ms), timing.speed_text),
    ]
    screen.table(("model", "time", "speed"), rows, right=(1, 2))
    source = "random inputs" if data is None else f"{len(feeds)} batches"
    shown = ", ".join(f"{name} {'x'.join(map(str, sizes))}" for name, sizes in inputs.items())
    screen.say(f"medians of {timing.runs:,} alternating runs, {timing.threads_text}, {source}: {shown}")
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
