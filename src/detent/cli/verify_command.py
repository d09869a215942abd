"""``detent verify``: verify a quantized file against its source."""

import json
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from detent.cli.exits import DIFFERENCE, require
from detent.cli.options import AsJson, BatchSize, Quiet
from detent.cli.screen import Screen
from detent.errors import SpecError
from detent.metrics import worst_output

if TYPE_CHECKING:
    from detent.verification import VerifyReport

__all__ = ["HELP", "run"]

HELP = """Verify that a quantized file is what its source and its decisions make it; exit 1 if not, or below a limit.

Level 1 quantizes the source again by the decisions in the file, and compares everything to the bit: it needs no data \
and takes seconds. Level 2 runs the source's operators between quantizers beside the file; level 3 compares the \
integer kernels of this machine with exact arithmetic, and with what the file asks for. Both need --data.

Example: [bold]detent verify model.onnx model.w8a8.onnx --data calibration.npz[/bold]"""


def run(
    source: Annotated[Path, typer.Argument(help="The float model that the file was made from.", show_default=False)],
    artifact: Annotated[Path, typer.Argument(help="The quantized file.", show_default=False)],
    *,
    data: Annotated[
        Path | None,
        typer.Option(
            "--data", "-d", help="Batches of inputs, as `detent quantize` takes them; without, only level 1 runs."
        ),
    ] = None,
    levels: Annotated[
        str | None,
        typer.Option(
            "--levels",
            help="Levels to run: 1 replay, 2 execution, 3 integer kernels.",
            show_default="1,2,3 with --data",
        ),
    ] = None,
    fail_below_sqnr: Annotated[
        float | None,
        typer.Option(
            "--fail-below-sqnr", metavar="DB", help="Exit 1 if any float output has a lower SQNR; needs level 2."
        ),
    ] = None,
    fail_below_agreement: Annotated[
        float | None,
        typer.Option(
            "--fail-below-agreement",
            metavar="SHARE",
            min=0,
            max=1,
            help="Exit 1 if the top-1 agreement is lower, such as 0.99; needs level 2.",
        ),
    ] = None,
    batches: Annotated[
        int | None, typer.Option("--batches", min=1, help="How many to look at.", show_default="all")
    ] = None,
    batch_size: BatchSize = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Verify a file; see ``HELP``."""
    level_numbers = _levels(levels, has_data=data is not None)
    limits = [limit for limit in (fail_below_sqnr, fail_below_agreement) if limit is not None]
    if any(isnan(limit) for limit in limits):
        raise SpecError("a limit is a number, got nan")
    if limits and 2 not in level_numbers:
        raise SpecError("--fail-below-sqnr and --fail-below-agreement need level 2, which needs --data")
    require("onnx", "onnxruntime")
    from detent.onnx_model.batches import open_batches  # noqa: PLC0415 - these load ONNX Runtime
    from detent.onnx_model.files import load_model  # noqa: PLC0415
    from detent.verification import verify  # noqa: PLC0415

    screen = Screen(as_json=as_json, quiet=quiet)
    quantized = load_model(artifact)
    if data is None:
        screen.note(f"replaying {artifact}")
        report = verify(source, quantized, levels=level_numbers)
    else:
        inputs = open_batches(data, quantized.inputs, batch_size)
        inputs = inputs if batches is None else inputs.first(batches)
        screen.note(f"verifying {artifact} with {inputs.count:,} batches")
        with screen.progress("verifying") as step:
            report = verify(source, quantized, inputs.counted(step), levels=level_numbers)
    below = _below(report, fail_below_sqnr, fail_below_agreement)
    missed = [f"not ok: {each}" for each in below]
    # The first line is the verdict, limits included.
    for line in [*missed, f"limits aside, {report}"] if report.ok and missed else [str(report), *missed]:
        screen.say(line)
    failure = report.failure or next(iter(below), "")
    screen.emit({**json.loads(report.to_json()), "ok": not failure, "failure": failure, "below": below})
    if failure:
        raise typer.Exit(DIFFERENCE)


def _below(report: "VerifyReport", sqnr_db: float | None, agreement: float | None) -> list[str]:
    """Limits that are not met, one text each; NaN, and a figure that there is not, meet no limit."""
    missed, worst_db, agreeing = [], report.output_sqnr_db, report.agreement
    if sqnr_db is not None:
        if worst_db is None:
            missed.append("there is no float output that --fail-below-sqnr could look at")
        elif not worst_db >= sqnr_db:
            name = worst_output(report.end_to_end["optimized"].output_sqnr_db)
            missed.append(f"the SQNR of output {name} is {worst_db:.1f} dB, below the limit of {sqnr_db:g} dB")
    if agreement is not None:
        if agreeing is None:
            missed.append("the first output holds no classes that --fail-below-agreement could look at")
        elif agreeing < agreement:
            missed.append(f"the top-1 agreement is {agreeing:.4g}, below the limit of {agreement:g}")
    return missed


def _levels(text: str | None, *, has_data: bool) -> tuple[int, ...]:
    if text is None:
        return (1, 2, 3) if has_data else (1,)
    parts = [part.strip() for part in text.split(",")]
    if not all(part in {"1", "2", "3"} for part in parts):
        raise SpecError(f"--levels {text!r}: expected some of 1, 2 and 3, such as 1,3")
    return tuple(sorted({int(part) for part in parts}))
