"""``detent verify``: verify a quantized file against its float model."""

import json
from collections.abc import Mapping
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from detent.cli.exits import DIFFERENCE, require
from detent.cli.inspect_command import is_checkpoint
from detent.cli.options import CHECKS, DATA, AsJson, BatchSize, Preprocess, Quiet, Tokenizer, Verbose, data_files
from detent.cli.screen import Screen
from detent.errors import SpecError
from detent.metrics import worst_output
from detent.tables import counted

if TYPE_CHECKING:
    from detent.verification import VerifyReport

__all__ = ["EXAMPLE", "HELP", "run"]

HELP = """Verify a quantized file against its float model.

Level 1 (replay) quantizes the float model again with the decisions recorded in the file, and compares the result with \
the file bit for bit. It needs no data and takes seconds. Level 2 (execution) runs the file and the fake-quantized \
float model on the data, and compares codes and outputs. After each quantizer, both models continue with the codes \
that the file computed, so that errors do not spread. Level 3 (integer kernels) compares the integer kernels of this \
machine with exact arithmetic. Levels 2 and 3 need --data. A GGUF file is derived again from its checkpoint, and all \
bytes are compared. The exit code is 1 on a mismatch."""
EXAMPLE = "detent verify model.onnx model.w8a8.onnx --data calibration.npz"


def run(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE", help="Float model (.onnx), or checkpoint.", show_default=False, rich_help_panel=DATA
        ),
    ],
    artifact: Annotated[
        Path,
        typer.Argument(
            metavar="QUANTIZED", help="Quantized .onnx or .gguf file.", show_default=False, rich_help_panel=DATA
        ),
    ],
    *,
    data: Annotated[
        Path | None,
        typer.Option(
            "--data",
            "-d",
            metavar="PATH",
            help=".npz, .npy, images, .wav, .txt, or a directory. Without --data, only level 1 runs.",
            rich_help_panel=DATA,
        ),
    ] = None,
    batches: Annotated[
        int | None,
        typer.Option(
            "--batches",
            min=1,
            metavar="N",
            help="Number of batches to use.",
            show_default="all",
            rich_help_panel=DATA,
        ),
    ] = None,
    batch_size: BatchSize = None,
    preprocess: Preprocess = None,
    tokenizer: Tokenizer = None,
    levels: Annotated[
        str | None,
        typer.Option(
            "--levels",
            metavar="LIST",
            help="Levels to run: 1 replay, 2 execution, 3 integer kernels.",
            show_default="1,2,3",
            rich_help_panel=CHECKS,
        ),
    ] = None,
    fail_below_sqnr: Annotated[
        float | None,
        typer.Option(
            "--fail-below-sqnr",
            metavar="DB",
            help="Exit 1 if the SQNR of an output is below DB; needs level 2.",
            rich_help_panel=CHECKS,
        ),
    ] = None,
    fail_below_agreement: Annotated[
        float | None,
        typer.Option(
            "--fail-below-agreement",
            metavar="N",
            min=0,
            max=1,
            help="Exit 1 if top-1 agreement (0..1) is below N; needs level 2.",
            rich_help_panel=CHECKS,
        ),
    ] = None,
    importance: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Importance matrix that a GGUF file was made with.", rich_help_panel=DATA),
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Verify a file; see ``HELP``."""
    if is_checkpoint(artifact):
        onnx_only = {
            "--data": data,
            "--batch-size": batch_size,
            "--preprocess": preprocess,
            "--tokenizer": tokenizer,
            "--levels": levels,
            "--fail-below-agreement": fail_below_agreement,
        }
        screen = Screen(as_json=as_json, quiet=quiet, verbose=verbose)
        _verify_checkpoint(screen, source, artifact, importance, fail_below_sqnr, onnx_only)
        return
    level_numbers = _levels(levels, has_data=data is not None, has_importance=importance is not None)
    limits = [limit for limit in (fail_below_sqnr, fail_below_agreement) if limit is not None]
    if any(isnan(limit) for limit in limits):
        raise SpecError("--fail-below-sqnr and --fail-below-agreement must be numbers, got nan")
    if limits and 2 not in level_numbers:
        raise SpecError("--fail-below-sqnr and --fail-below-agreement need level 2: add 2 to --levels, and pass --data")
    require("onnx", "onnxruntime")
    from detent.onnx_model.batches import open_batches  # noqa: PLC0415 - these load ONNX Runtime
    from detent.onnx_model.files import load_model  # noqa: PLC0415
    from detent.verification import verify  # noqa: PLC0415

    screen = Screen(as_json=as_json, quiet=quiet, verbose=verbose)
    quantized = load_model(artifact)
    files = data_files(data, batch_size, preprocess, tokenizer)
    notes: tuple[str, ...] = ()
    if files is None:
        screen.note(f"replaying {artifact}")
        report = verify(source, quantized, levels=level_numbers)
    else:
        inputs = open_batches(files, quantized.inputs)
        inputs = inputs if batches is None else inputs.first(batches)
        inputs.check_first()
        notes = inputs.notes
        screen.note(*notes)
        screen.note(f"verifying {artifact} on {counted(inputs.count or 0, 'batch', ',')}")
        with screen.progress("verifying") as step:
            report = verify(source, quantized, inputs.counted(step), levels=level_numbers)
    below = _below(report, fail_below_sqnr, fail_below_agreement)
    missed = [f"not ok: {each}" for each in below]
    # The first line begins with "ok" only if the limits are met, too.
    for line in [*missed, f"apart from the limits, {report}"] if report.ok and missed else [str(report), *missed]:
        screen.say(line)
    failure = report.failure or next(iter(below), "")
    document = {**json.loads(report.to_json()), "ok": not failure, "failure": failure, "below": below}
    screen.emit({**document, "data_notes": list(notes)})
    if failure:
        raise typer.Exit(DIFFERENCE)


def _verify_checkpoint(
    screen: Screen,
    source: Path,
    artifact: Path,
    importance: Path | None,
    min_sqnr_db: float | None,
    onnx_only: Mapping[str, object],
) -> None:
    unused = [option for option, value in onnx_only.items() if value is not None]
    if unused:
        raise SpecError(f"{', '.join(unused)} is for ONNX files: drop it")
    if min_sqnr_db is not None and isnan(min_sqnr_db):
        raise SpecError("--fail-below-sqnr must be a number, got nan")
    from detent.checkpoint import verify  # noqa: PLC0415 - loaded only if needed

    screen.note(f"deriving {artifact} again")
    result = verify(source, artifact, importance=importance)
    screen.say(str(result))
    below = [name for name, value in result.sqnr_db.items() if min_sqnr_db is not None and value < min_sqnr_db]
    if below:
        screen.say(f"not ok: the SQNR of {below[0]} is below the limit of {min_sqnr_db:g} dB")
    screen.emit({**result.document(), "below": below})
    if below or not result.ok:
        raise typer.Exit(DIFFERENCE)


def _below(report: "VerifyReport", sqnr_db: float | None, agreement: float | None) -> list[str]:
    """Return one message for each limit that is not met, including limits on a metric that is NaN or missing."""
    missed, worst_db, measured = [], report.output_sqnr_db, report.agreement
    if sqnr_db is not None:
        if worst_db is None:
            missed.append("--fail-below-sqnr needs a float output, but no output is float: drop this option")
        elif not worst_db >= sqnr_db:
            name = worst_output(report.end_to_end["optimized"].output_sqnr_db)
            missed.append(f"the SQNR of output {name} is {worst_db:.1f} dB, below the limit of {sqnr_db:g} dB")
    if agreement is not None:
        if measured is None:
            missed.append(
                "--fail-below-agreement needs class scores or labels, but the first output has neither: use "
                "--fail-below-sqnr"
            )
        elif measured < agreement:
            missed.append(f"the top-1 agreement is {measured:.4g}, below the limit of {agreement:g}")
    return missed


def _levels(text: str | None, *, has_data: bool, has_importance: bool = False) -> tuple[int, ...]:
    if has_importance:
        raise SpecError("--importance is for GGUF files: drop it")
    if text is None:
        return (1, 2, 3) if has_data else (1,)
    parts = [part.strip() for part in text.split(",")]
    if not all(part in {"1", "2", "3"} for part in parts):
        raise SpecError(f"got --levels {text!r}, expected numbers from 1 to 3, e.g. 1,3")
    return tuple(sorted({int(part) for part in parts}))
