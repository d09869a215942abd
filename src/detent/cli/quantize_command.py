"""``detent quantize``: quantize an ONNX file, evaluate the quantized model, and print a summary.

With ``--to``, the model is a checkpoint of a language model; ``checkpoint_job`` runs that job.
"""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from detent.cli.exits import (
    DIFFERENCE,
    check_can_write,
    check_distinct,
    check_is_file,
    check_report_path,
    fail,
    require,
)
from detent.cli.options import (
    ACCURACY,
    CHECKPOINTS,
    CHECKS,
    DATA,
    OUTPUT,
    WORK,
    AsJson,
    BatchSize,
    CalibrationData,
    EvaluationData,
    Force,
    Labels,
    MaxDrop,
    Metric,
    Preprocess,
    Quiet,
    Report,
    Skip,
    Tokenizer,
    Verbose,
    data_files,
    recipe_file,
)
from detent.cli.program_file import Program, load_source, onnx_file
from detent.cli.screen import Screen
from detent.cli.workers import Ray, WatchedExecutor, WorkDirectory, Workers, open_executor
from detent.errors import SpecError
from detent.recipe import skip_flag
from detent.tables import bytes_text, counted, parse_bytes

if TYPE_CHECKING:
    from detent.evaluate import Checks, DryRun, Evaluation, Split
    from detent.onnx.pipeline import QuantizeReport
    from detent.onnx.quality_warnings import QuantizeWarning
    from detent.onnx_model import DataFiles
    from detent.onnx_model.files import LoadedModel

__all__ = ["EXAMPLE", "HELP", "run"]

HELP = """Quantize and evaluate an ONNX model, or a checkpoint (with --to)."""
EXAMPLE = "detent quantize model.onnx --data calibration.npz --report report.html"
MAX_STEPS_SHOWN = 6  # at most this many accuracy steps are printed; --json has all of them
SUMMARY_COLUMNS = 80
LARGEST_SEED = (1 << 63) - 1
CHECKPOINT_ONLY = frozenset({"importance", "text", "pre_tokenizer", "no_vocabulary", "keep_scales"})


def run(
    context: typer.Context,
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL",
            help="Model (.onnx, .pt2), or checkpoint directory or file.",
            show_default=False,
            rich_help_panel=DATA,
        ),
    ],
    *,
    data: CalibrationData = None,
    eval_data: EvaluationData = None,
    labels: Labels = None,
    batch_size: BatchSize = None,
    preprocess: Preprocess = None,
    tokenizer: Tokenizer = None,
    trust_model: Annotated[
        bool,
        typer.Option("--trust-model", help="Load a .pt2 file, which can execute code from it.", rich_help_panel=DATA),
    ] = False,
    recipe: Annotated[
        str,
        typer.Option(
            "--recipe",
            metavar="NAME",
            help="w8a8, w4a8, w8a8-dynamic, w8a16, or a file.",
            rich_help_panel=ACCURACY,
        ),
    ] = "w8a8",
    target: Annotated[
        str,
        typer.Option(
            "--target",
            metavar="RUNTIME",
            help="onnxruntime[-avx2|-vnni] or openvino[-vnni].",
            show_default=False,
            rich_help_panel=ACCURACY,
        ),
    ] = "onnxruntime",
    prefer: Annotated[
        str,
        typer.Option(
            "--prefer",
            metavar="NAME",
            help="speed (7-bit weights), balanced or accuracy.",
            rich_help_panel=ACCURACY,
        ),
    ] = "balanced",
    effort: Annotated[
        str,
        typer.Option(
            "--effort",
            metavar="NAME",
            help="Search effort: fast, balanced or best.",
            rich_help_panel=ACCURACY,
        ),
    ] = "balanced",
    observer: Annotated[
        str | None,
        typer.Option(
            "--observer",
            metavar="NAME",
            help="minmax, mse, entropy, ...",
            show_default="chosen per tensor",
            rich_help_panel=ACCURACY,
        ),
    ] = None,
    skip: Skip = None,
    metric: Metric = None,
    max_drop: MaxDrop = None,
    allow_quantized: Annotated[
        bool,
        typer.Option(
            "--allow-quantized", help="Accept a model that is already partly quantized.", rich_help_panel=ACCURACY
        ),
    ] = False,
    no_keep_float: Annotated[
        bool,
        typer.Option(
            "--no-keep-float", help="No float fallback: quantize even the noisiest layers.", rich_help_panel=ACCURACY
        ),
    ] = False,
    float16: Annotated[
        bool,
        typer.Option("--float16", help="Store float parts of a float16 model in float16.", rich_help_panel=ACCURACY),
    ] = False,
    no_equalize: Annotated[
        bool, typer.Option("--no-equalize", help="Skip cross-layer equalization.", rich_help_panel=ACCURACY)
    ] = False,
    no_smooth: Annotated[bool, typer.Option("--no-smooth", help="Skip SmoothQuant.", rich_help_panel=ACCURACY)] = False,
    no_bias_correction: Annotated[
        bool, typer.Option("--no-bias-correction", help="Skip bias correction.", rich_help_panel=ACCURACY)
    ] = False,
    seed: Annotated[
        int, typer.Option(min=0, max=LARGEST_SEED, metavar="N", help="Random seed.", rich_help_panel=ACCURACY)
    ] = 0,
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="FORMAT",
            help="Quantize a checkpoint to gguf:Q4_K_M, gguf:Q8_0, ...",
            show_default=False,
            rich_help_panel=CHECKPOINTS,
        ),
    ] = None,
    importance: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Importance matrix: weights of columns.",
            show_default=False,
            rich_help_panel=CHECKPOINTS,
        ),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Text on which importance is measured.",
            show_default=False,
            rich_help_panel=CHECKPOINTS,
        ),
    ] = None,
    pre_tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Pre-tokenizer, by llama.cpp's name.",
            show_default="found",
            rich_help_panel=CHECKPOINTS,
        ),
    ] = None,
    no_vocabulary: Annotated[
        bool, typer.Option("--no-vocabulary", help="Write no tokenizer.", rich_help_panel=CHECKPOINTS)
    ] = False,
    keep_scales: Annotated[
        bool,
        typer.Option(
            "--keep-scales", help="Accept scales that are 0 or infinite in float16.", rich_help_panel=CHECKPOINTS
        ),
    ] = False,
    memory_budget: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Memory for activations or rows, e.g. 500MB.",
            show_default="none; 4 GB with --to",
            rich_help_panel=WORK,
        ),
    ] = None,
    resume_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Save calibration state; resume if the file exists.", rich_help_panel=WORK),
    ] = None,
    workers: Workers = None,
    ray: Ray = None,
    work_directory: WorkDirectory = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Write nothing; estimate size, memory and time.", rich_help_panel=CHECKS),
    ] = False,
    fail_below_sqnr: Annotated[
        float | None,
        typer.Option(metavar="DB", help="Exit 1 if the SQNR of an output is below DB.", rich_help_panel=CHECKS),
    ] = None,
    fail_below_agreement: Annotated[
        float | None,
        typer.Option(
            min=0, max=1, metavar="N", help="Exit 1 if top-1 agreement (0..1) is below N.", rich_help_panel=CHECKS
        ),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit 1 if there is any warning.", rich_help_panel=CHECKS)
    ] = False,
    no_verify: Annotated[bool, typer.Option("--no-verify", help="Skip verification.", rich_help_panel=CHECKS)] = False,
    no_bench: Annotated[bool, typer.Option("--no-bench", help="Skip timing.", rich_help_panel=CHECKS)] = False,
    keep_anyway: Annotated[
        bool,
        typer.Option("--keep-anyway", help="Keep a file that is neither smaller nor faster.", rich_help_panel=CHECKS),
    ] = False,
    no_rank: Annotated[
        bool, typer.Option("--no-rank", help="Skip the sensitivity measurement.", rich_help_panel=CHECKS)
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="File to write.",
            show_default="MODEL.RECIPE.onnx",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    report: Report = None,
    force: Force = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Quantize and evaluate; see ``HELP``."""
    del importance, text, pre_tokenizer, no_vocabulary, keep_scales  # read from the context
    if _runs_checkpoint(context, model, to):
        return
    require("onnx", "onnxruntime")
    import detent.evaluate as qe  # noqa: PLC0415 - these load ONNX Runtime
    from detent.onnx_model.files import default_output, older_file  # noqa: PLC0415

    screen = Screen(as_json=as_json, quiet=quiet, verbose=verbose)
    options: dict[str, Any] = {
        "recipe": recipe,
        "target": target,
        "prefer": prefer,
        "effort": effort,
        "observer": observer,
        "skip": list(skip or ()),
        "keep_float": "none" if no_keep_float else "auto",
        "bias_correction": not no_bias_correction,
        "equalize": not no_equalize,
        "smooth": not no_smooth,
        "memory_budget": None if memory_budget is None else parse_bytes(memory_budget),
        "seed": seed,
        "float16": float16,
        "force": allow_quantized,
    }
    _check_options(options)
    output_path = output if output is not None else default_output(model, recipe)
    read = {"--data": data, "--eval-data": eval_data, "--labels": labels, "--recipe": recipe_file(recipe)}
    read |= {"--resume-file": resume_file, "--tokenizer": tokenizer}
    program = Program.at(model, trusted=trust_model)
    _check_files(model, output_path, report, read, program, force=force, dry_run=dry_run)
    _check_limits(fail_below_sqnr, fail_below_agreement, data, dry_run=dry_run)
    source, early_warnings = load_source(screen, model, program)
    files = data_files(data, batch_size, preprocess, tokenizer)
    held_out = None if eval_data is None else data_files(eval_data, batch_size, preprocess, tokenizer)
    split = _split(source, files, held_out, labels, metric, max_drop, dry_run=dry_run)
    _check_data(screen, source, split, agreement=fail_below_agreement is not None)
    target_warnings = _target_warnings(screen, target)
    if dry_run:
        warnings = (*early_warnings, *target_warnings)
        _dry_run(screen, source, model, files, split, options, output_path, warnings, force=force, strict=strict)
        return
    checks = qe.Checks(verify=not no_verify, time=not no_bench, sensitivity=not no_rank)
    options["resume_file"] = resume_file
    if split is not None:
        qe.check_metric(source, split, metric)
        options |= split.search_arguments(metric, max_drop)
    job = _Job(screen, split, output_path, report, str(context.obj or ""), metric, program, early_warnings)
    with older_file(output_path) as older:
        with open_executor(workers, ray, work_directory) as (executor, arguments):
            evaluation = job.run(source, options | arguments, checks, executor)
        missed = evaluation.missed_limits(fail_below_sqnr, fail_below_agreement)
        _finish(screen, model, evaluation, missed, report, older, strict=strict, keep_anyway=keep_anyway)


def _finish(
    screen: Screen,
    model: Path,
    evaluation: "Evaluation",
    missed: list[str],
    report: Path | None,
    older: Path | None,
    *,
    strict: bool,
    keep_anyway: bool,
) -> None:
    """Remove a file that is neither smaller nor faster, print the evaluation, and fail if a limit is not met.

    ``older`` is the file that was replaced; it takes the place of a file that is removed.
    """
    from detent.onnx_model.files import remove  # noqa: PLC0415 - already loaded

    output, is_kept = evaluation.result.output, keep_anyway or not evaluation.no_gain
    if not is_kept:
        remove(output, older)
        missed = [*missed, f"{evaluation.no_gain}. To keep such a file, pass --keep-anyway"]
    removed = "removed" if older is None else "removed, the older file is kept"
    _show_evaluation(screen, evaluation, report, "" if is_kept else f" ({removed})")
    screen.emit(_document(model, evaluation, missed, report, strict=strict, is_kept=is_kept))
    missed = [*missed, *(_missed_by_warnings(evaluation.warnings) if strict else [])]
    if missed:
        fail(f"{'; '.join(missed)} ({output} was {'still written' if is_kept else removed})", DIFFERENCE)


def _dry_run(
    screen: Screen,
    source: "LoadedModel",
    model: Path,
    files: "DataFiles | None",
    split: "Split | None",
    options: Mapping[str, Any],
    output_path: Path,
    warnings: "Sequence[QuantizeWarning]",
    *,
    force: bool,
    strict: bool,
) -> None:
    """Estimate size, memory and time, and print them."""
    import detent.evaluate as qe  # noqa: PLC0415 - already loaded

    screen.note("dry run: quantizing the first batches in a subprocess")
    numbers = None if split is None else split.calibration.numbers
    with onnx_file(source, model) as path:
        estimate = qe.dry_run(path, files, numbers=numbers, **options)
    is_held_out = split is not None and split.is_held_out  # then the number of samples is not known
    others = (each for each in estimate.warnings if not (is_held_out and each.code == "few-samples"))
    warnings = (*warnings, *others)
    _show_estimate(screen, estimate, output_path, force=force)
    _show_warnings(screen, warnings)
    missed = _missed_by_warnings(warnings) if strict else []
    screen.emit(
        {
            "ok": not missed,
            "model": str(model),
            **_estimate_document(estimate, output_path),
            "warnings": [each._asdict() for each in warnings],
        }
    )
    if missed:
        fail("; ".join(missed), DIFFERENCE)


def _given_options(context: typer.Context) -> dict[str, str]:
    """Return the options that the command line has, by the name of the parameter."""
    return {
        parameter.name or "": parameter.opts[0]
        for parameter in context.command.params
        if parameter.param_type_name == "option"
        and getattr(context.get_parameter_source(parameter.name or ""), "name", "") == "COMMANDLINE"
    }


def _runs_checkpoint(context: typer.Context, model: Path, to: str | None) -> bool:
    """Run the job if the model is a checkpoint; return False for other models.

    Raises:
        SpecError: a checkpoint without --to, or an option that only checkpoints have without --to.
    """
    given = _given_options(context)
    if to is not None:
        require("gguf")
        from detent.cli.checkpoint_job import run_checkpoint_job  # noqa: PLC0415 - loaded only if needed

        run_checkpoint_job(context.params, given)
        return True
    if model.is_dir() or model.suffix.lower() in {".gguf", ".safetensors"}:
        what = "directory: if it contains a checkpoint" if model.is_dir() else "checkpoint"
        raise SpecError(f"{model} is a {what}, pass --to, for example --to gguf:Q4_K_M")
    options = [option for name, option in given.items() if name in CHECKPOINT_ONLY]
    if options:
        raise SpecError(f"{', '.join(options)} needs --to, which is for checkpoints: add --to, or drop it")
    return False


def _missed_by_warnings(warnings: "Sequence[QuantizeWarning]") -> list[str]:
    """Return the message of --strict, if there are warnings."""
    codes = ", ".join(dict.fromkeys(each.code for each in warnings))
    return [f"--strict: got {counted(len(warnings), 'warning')} ({codes}), expected none"] if codes else []


def _show_warnings(screen: Screen, warnings: "Sequence[QuantizeWarning]") -> None:
    for warning in warnings:
        screen.warn(f"{warning.code}: {warning.text}")


@dataclass(frozen=True)
class _Job:
    """A call of the command after its checks: what it reads, writes and prints."""

    screen: Screen
    split: "Split | None"
    output: Path
    report: Path | None
    command: str
    metric: str | None
    program: Program | None
    warnings: "Sequence[QuantizeWarning]" = ()  # about the model file

    def run(
        self,
        source: "LoadedModel",
        options: Mapping[str, Any],
        checks: "Checks",
        executor: WatchedExecutor | None = None,
    ) -> "Evaluation":
        """Quantize, evaluate and write the report; of a program, also write the float ONNX model."""
        result = self._quantize(source, options, executor)
        if self.program is not None:
            source = self.program.write(self.screen, source)
        try:
            return self._evaluate(source, result, checks)
        except BaseException:
            self.screen.note(f"{self.output} is complete: it was written before this error")
            raise

    def _quantize(
        self, source: "LoadedModel", options: Mapping[str, Any], executor: WatchedExecutor | None
    ) -> "QuantizeReport":
        import detent.onnx as qo  # noqa: PLC0415 - already loaded
        from detent.onnx.pass_errors import listening  # noqa: PLC0415

        data = None if self.split is None else self.split.calibration
        batches = "" if data is None else f" with {counted(data.count or 0, 'batch', ',')}"
        self.screen.note(f"quantizing {source.path if self.program is None else self.program.path}{batches}")
        watched = self.screen.progress("calibrating", executor)
        with watched as step, listening(self.screen.passed, self.screen.note):
            # If nothing is held out, the evaluation runs on the calibration batches anyway.
            compare = self.split is not None and self.split.is_held_out
            result = qo.quantize(source, self.output, data, progress=step, compare=compare, **options)
        self.screen.passes(result.passes)
        return result

    def _evaluate(self, source: "LoadedModel", result: "QuantizeReport", checks: "Checks") -> "Evaluation":
        import detent.evaluate as qe  # noqa: PLC0415 - already loaded

        if self.split is not None:
            self.screen.note(f"evaluating on {self.split}")
        with self.screen.stages() as progress:
            evaluation = qe.evaluate_result(
                source, result, self.split, checks=checks, progress=progress, metric=self.metric
            )
        evaluation = replace(evaluation, warnings=(*self.warnings, *evaluation.warnings))
        if self.report is not None:
            from detent import report as qr  # noqa: PLC0415 - loaded only if needed

            qr.build_from_evaluation(evaluation, command=self.command).save(self.report)
        return evaluation


def _check_data(screen: Screen, source: "LoadedModel", split: "Split | None", *, agreement: bool) -> None:
    """Fail early if the data do not fit the model, and print notes about the data.

    If ``agreement`` is True, also fail if the first output has neither class scores nor labels.
    """
    from detent.evaluate import check_supports_agreement  # noqa: PLC0415 - already loaded

    if split is not None:
        first = split.check()
        screen.note(*split.calibration.notes)
        if agreement:
            check_supports_agreement(source, first)


def _target_warnings(screen: Screen, target: str) -> "list[QuantizeWarning]":
    from detent.onnx.quality_warnings import QuantizeWarning  # noqa: PLC0415 - already loaded
    from detent.onnx_model.targets import has_vnni, mismatch  # noqa: PLC0415 - already loaded

    warning = mismatch(target, has_vnni())
    if warning:
        screen.warn(warning)
    return [QuantizeWarning("target", warning)] if warning else []


def _check_options(options: Mapping[str, Any]) -> None:
    """Fail early on a recipe, target or observer that does not exist."""
    from detent.onnx_model.targets import get_target  # noqa: PLC0415 - already loaded
    from detent.recipe import get_recipe  # noqa: PLC0415
    from detent.rule import get_observer_spec  # noqa: PLC0415

    get_recipe(options["recipe"])
    get_target(options["target"])
    if options["observer"] is not None:
        get_observer_spec(options["observer"])


def _split(
    source: "LoadedModel",
    data: "DataFiles | None",
    eval_data: "DataFiles | None",
    labels: Path | None,
    metric: str | None,
    max_drop: str | None,
    *,
    dry_run: bool,
) -> "Split | None":
    """Split the data into calibration and evaluation batches; None without data."""
    import detent.evaluate as qe  # noqa: PLC0415 - already loaded

    options = {"--eval-data": eval_data, "--labels": labels, "--metric": metric, "--max-drop": max_drop}
    used = [name for name, value in options.items() if value is not None]
    if used and data is None:
        raise SpecError(f"{', '.join(used)} {'needs' if len(used) == 1 else 'need'} calibration data: pass --data")
    if max_drop is not None and dry_run:
        raise SpecError("--max-drop needs outputs, but --dry-run compares no outputs: drop --dry-run or --max-drop")
    if data is None:
        return None
    label_array = None if labels is None else qe.read_labels(labels)
    is_searched = max_drop is not None
    return qe.split_batches(source, data, eval_data=eval_data, labels=label_array, metric=metric, search=is_searched)


def _check_limits(sqnr_db: float | None, agreement: float | None, data: Path | None, *, dry_run: bool) -> None:
    limits = [limit for limit in (sqnr_db, agreement) if limit is not None]
    if any(isnan(limit) for limit in limits):
        raise SpecError("--fail-below-sqnr and --fail-below-agreement must be numbers, got nan")
    if limits and data is None:
        raise SpecError("--fail-below-sqnr and --fail-below-agreement need data: pass --data")
    if limits and dry_run:
        raise SpecError(
            "--fail-below-sqnr and --fail-below-agreement need outputs, but --dry-run compares no outputs: drop "
            "--dry-run or the limits"
        )


def _check_files(
    model: Path,
    output: Path,
    report: Path | None,
    read: Mapping[str, Path | None],
    program: Program | None,
    *,
    force: bool,
    dry_run: bool,
) -> None:
    check_is_file(model)
    if output.exists() and output.samefile(model):
        raise SpecError(f"{output} is the model itself: choose another --output")
    check_distinct({"--output": output, "--report": report}, {"the model": model, **read})
    check_can_write(output, force=force or dry_run, is_written=not dry_run)
    check_report_path(report, force=force or dry_run, is_written=not dry_run)
    if program is not None:
        program.check_can_write(output, force=force, dry_run=dry_run)


def _show_evaluation(screen: Screen, evaluation: "Evaluation", report: Path | None, note: str) -> None:
    _note_steps(screen, evaluation.result.steps)
    for hint in (*evaluation.result.hints, *evaluation.hints):
        screen.note(f"hint: {hint}")
    screen.say(f"{evaluation.result.output}{note}", style="bold")
    for label, text in evaluation.facts():
        screen.say(f"  {label + ':':<18} {text}")
    if evaluation.verification is not None:
        for line in textwrap.wrap(
            f"verified: {evaluation.verification.headline}", SUMMARY_COLUMNS, subsequent_indent="  "
        ):
            screen.say(line)
    if evaluation.sensitive_layers:
        screen.say("most sensitive layers, and the flag that keeps each in float:")
        for layer in evaluation.sensitive_layers:
            share = " <1 %" if layer.noise_share < 0.01 else f"{100 * layer.noise_share:3.0f} %"
            screen.say(f"  {share} of the noise  {skip_flag(layer.name)}")
    if report is not None:
        screen.say(f"report: {report}")
    _show_warnings(screen, evaluation.warnings)


def _document(
    model: Path,
    evaluation: "Evaluation",
    missed: Sequence[str],
    report: Path | None,
    *,
    strict: bool,
    is_kept: bool,
) -> dict[str, Any]:
    document = evaluation.to_dict()
    return {
        "ok": not missed and not (strict and evaluation.warnings),
        "missed": list(missed),
        "model": str(model),
        "output_is_kept": is_kept,
        **document,
        "sensitive_layers": [{**layer, "flag": skip_flag(layer["layer"])} for layer in document["sensitive_layers"]],
        "report": None if report is None else str(report),
    }


def _note_steps(screen: Screen, steps: Sequence[str]) -> None:
    for step in steps[-MAX_STEPS_SHOWN:]:  # the last steps name the layers kept in float
        screen.note(step)
    if len(steps) > MAX_STEPS_SHOWN:
        screen.note(f"{counted(len(steps) - MAX_STEPS_SHOWN, 'earlier step', ',')} not shown: use --json")


def _show_estimate(screen: Screen, estimate: "DryRun", output: Path, *, force: bool) -> None:
    rows = [
        (
            layer["name"],
            layer["type"],
            layer["weight"].partition("/")[0] or "float",
            layer["input"].partition("/")[0] or "float",
            bytes_text(layer["nbytes_before"]),
            bytes_text(layer["nbytes_after"]),
            layer["reason"] or layer["note"],
        )
        for layer in estimate.layers
    ]
    if rows:
        columns = ("layer", "type", "weight", "input", "before", "after", "why float")
        screen.table(columns, rows, right=(4, 5), fold=(0, 6))
    _note_steps(screen, estimate.steps)
    bound, seconds = estimate.memory_bound, estimate.total_seconds
    memory = "unknown on this system" if bound is None else f"at most {bytes_text(bound)} while quantizing"
    time = f"{seconds:,.0f} s" if seconds >= 1 else "a second or less"
    screen.say(f"{output} (not written)", style="bold")
    if output.exists() and not force:
        screen.say("  already exists: pass --force to replace it")
    screen.say(f"  size:    {bytes_text(estimate.nbytes_before)} -> {bytes_text(estimate.nbytes_after)}")
    screen.say(f"  memory:  {memory}")
    screen.say(f"  time:    about {time}, plus the evaluation")


def _estimate_document(estimate: "DryRun", output: Path) -> dict[str, Any]:
    return {
        "dry_run": True,
        "output": str(output),
        "output_exists": output.exists(),
        "nbytes_before": estimate.nbytes_before,
        "nbytes_after": estimate.nbytes_after,
        "memory_bytes": estimate.memory_bound,
        "seconds": estimate.total_seconds,
        "calibration_batches": estimate.total_batches,
        "layers": [dict(layer) for layer in estimate.layers],
        "steps": list(estimate.steps),
    }
