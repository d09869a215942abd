"""``detent quantize``: an ONNX file in, a quantized one out, and what it is worth."""

from collections.abc import Mapping
from dataclasses import replace
from math import isnan
from pathlib import Path
from typing import Annotated, Literal

import typer

from detent.cli.exits import DIFFERENCE, check_distinct, check_free, check_is_file, fail, guarded, require
from detent.cli.options import AsJson, BatchSize, Data, Force, Quiet, Report, recipe_file
from detent.cli.screen import Screen
from detent.errors import SpecError
from detent.tables import parse_bytes

__all__ = ["register"]

HELP = """Quantize an ONNX file, judge the result and say which layers hurt.

A tenth of the data is held back to judge the result, where there are at least 20 batches. A limit that is missed \
gives exit code 1; the file is written all the same.

Example: [bold]detent quantize model.onnx --data calibration.npz --report report.html[/bold]

In CI: [bold]detent quantize model.onnx -d calibration.npz --fail-below-sqnr 30 --json[/bold]"""
LIMITS, STEPS = "Limits", "Steps to leave out"
LARGEST_SEED = (1 << 63) - 1


def register(app: typer.Typer) -> None:
    """Add the command.

    >>> app = typer.Typer()
    >>> register(app)
    >>> app.registered_commands[0].name
    'quantize'
    """
    app.command("quantize", help=HELP)(guarded(_quantize))


def _quantize(
    context: typer.Context,
    model: Annotated[Path, typer.Argument(help="The float model, an ONNX file.", show_default=False)],
    *,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The file to write.", show_default="<stem>.<recipe>.onnx beside the model"),
    ] = None,
    data: Data = None,
    recipe: Annotated[
        str, typer.Option("--recipe", help="A preset (w8a8, w4a8, w8a16, w4a16, ...), or a .toml or .json file.")
    ] = "w8a8",
    observer: Annotated[
        str | None,
        typer.Option("--observer", help="minmax, mse, percentile(0.1, 99.9), ...", show_default="chosen per tensor"),
    ] = None,
    target: Annotated[
        str, typer.Option("--target", help="onnxruntime, onnxruntime-avx2, onnxruntime-vnni, openvino, openvino-vnni.")
    ] = "onnxruntime",
    skip: Annotated[
        list[str] | None,
        typer.Option("--skip", help="A layer to leave in float, or a pattern of them; may be repeated."),
    ] = None,
    report: Report = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Write nothing: show the plan, and the size, memory and time it would take."),
    ] = False,
    fail_below_sqnr: Annotated[
        float | None,
        typer.Option(
            help="Exit 1 if any float output has a lower ratio of signal to noise, in dB.", rich_help_panel=LIMITS
        ),
    ] = None,
    fail_below_agreement: Annotated[
        float | None,
        typer.Option(
            min=0, max=1, help="Exit 1 if fewer samples keep their largest class; 0 to 1.", rich_help_panel=LIMITS
        ),
    ] = None,
    batch_size: BatchSize = None,
    memory_budget: Annotated[
        str | None, typer.Option(help="Bytes of activations to hold at once, such as 500MB.", show_default="all")
    ] = None,
    checkpoint: Annotated[Path | None, typer.Option(help="Where an interrupted calibration goes on from.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=LARGEST_SEED, help="Of what is drawn at random.")] = 0,
    no_keep_float: Annotated[
        bool, typer.Option("--no-keep-float", help="Leave no layer in float for its noise.", rich_help_panel=STEPS)
    ] = False,
    no_equalize: Annotated[
        bool, typer.Option("--no-equalize", help="Leave channels as unequal as they are.", rich_help_panel=STEPS)
    ] = False,
    no_smooth: Annotated[
        bool, typer.Option("--no-smooth", help="Move no outliers into weights.", rich_help_panel=STEPS)
    ] = False,
    no_bias_correction: Annotated[
        bool, typer.Option("--no-bias-correction", help="Leave biases as they are.", rich_help_panel=STEPS)
    ] = False,
    no_verify: Annotated[bool, typer.Option("--no-verify", help="Do not compare codes with the runtime's.")] = False,
    no_bench: Annotated[bool, typer.Option("--no-bench", help="Do not time both models.")] = False,
    no_rank: Annotated[bool, typer.Option("--no-rank", help="Do not look for the layers that hurt most.")] = False,
    allow_quantized: Annotated[
        bool, typer.Option("--allow-quantized", help="Take a model that is quantized in part.")
    ] = False,
    force: Force = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    require("onnx")
    require("onnxruntime")
    from detent.cli import quantize_job  # noqa: PLC0415 - these load ONNX Runtime
    from detent.cli.quantize_job import Job, Wish  # noqa: PLC0415

    screen = Screen(as_json=as_json, quiet=quiet)
    budget = None if memory_budget is None else parse_bytes(memory_budget)
    keep: Literal["auto", "none"] = "none" if no_keep_float else "auto"
    options = {
        "recipe": recipe,
        "target": target,
        "observer": observer,
        "skip": list(skip or ()),
        "keep_float": keep,
        "bias_correction": not no_bias_correction,
        "equalize": not no_equalize,
        "smooth": not no_smooth,
        "memory_budget": budget,
        "checkpoint": None if checkpoint is None else str(checkpoint),
        "seed": seed,
        "force": allow_quantized,
    }
    wanted = output if output is not None else model.with_name(f"{model.stem}.{Path(recipe).stem}.onnx")
    job = Job(model, wanted, data, batch_size, options, screen)
    read = {"--data": data, "--recipe": recipe_file(recipe), "--checkpoint": checkpoint}
    _check_files(model, job.output, report, read, force=force, dry_run=dry_run)
    _check_limits(fail_below_sqnr, fail_below_agreement, data, dry_run=dry_run)
    if report is not None and report.suffix.lower() == ".html":
        require("jinja2")
    job.check(agreement=fail_below_agreement is not None)
    if dry_run:
        found = job.rehearse()
        quantize_job.show_rehearsal(screen, found, job.output, force=force)
        screen.emit(
            {"model": str(model), **quantize_job.rehearsal_document(found, job.output), "warnings": job.warnings}
        )
        return
    made = job.run()
    try:
        verdict = job.judge(made, Wish(verify=not no_verify, bench=not no_bench, rank=not no_rank))
        if report is not None and not job.idle(made):
            job.write_report(made, verdict, report, str(context.obj or ""))
            verdict = replace(verdict, report=report)
    except BaseException:
        screen.note(f"{job.output} was written before this, and is complete")
        raise
    missed = job.idle(made) + verdict.missed(fail_below_sqnr, fail_below_agreement)
    quantize_job.show_result(screen, made, verdict, job.split)
    document = quantize_job.result_document(made, verdict, job.split) if as_json else {}
    screen.emit({"ok": not missed, "missed": missed, "model": str(model), **document, "warnings": job.warnings})
    if missed:
        fail(f"{'; '.join(missed)} ({job.output} was written all the same)", DIFFERENCE)


def _check_limits(sqnr_db: float | None, agreement: float | None, data: Path | None, *, dry_run: bool) -> None:
    given = [limit for limit in (sqnr_db, agreement) if limit is not None]
    if any(isnan(limit) for limit in given):
        raise SpecError("a limit is a number, got nan: nothing is below it")
    if given and data is None:
        raise SpecError("limits need data to measure with: give --data")
    if given and dry_run:
        raise SpecError("--dry-run measures no outputs, so that no limit can be missed: leave out one or the other")


def _check_files(
    model: Path, output: Path, report: Path | None, read: Mapping[str, Path | None], *, force: bool, dry_run: bool
) -> None:
    check_is_file(model)
    if output.exists() and output.samefile(model):
        raise SpecError(f"{output} is the model itself: give --output another name")
    check_distinct({"--output": output, "--report": report}, {"the model": model, **read})
    check_free(output, force=force or dry_run, is_written=not dry_run)
    check_free(report, force=force or dry_run, suffixes=(".html", ".json"), is_written=not dry_run)
