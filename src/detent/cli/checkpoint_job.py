"""``detent quantize DIRECTORY --to gguf:Q4_K_M``: quantize a checkpoint, verify the file, and print a summary."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from detent.checkpoint import (
    CheckpointVerification,
    ConversionReport,
    collect,
    plan,
    quantize,
    verify,
)
from detent.checkpoint.collection import collected
from detent.checkpoint.conversion import mixture_of
from detent.cli.exits import DIFFERENCE, check_can_write, check_distinct, check_report_path, fail
from detent.cli.options import recipe_file
from detent.cli.screen import Screen
from detent.cli.workers import open_executor
from detent.errors import SpecError, VerificationError
from detent.tables import bytes_text, counted

__all__ = ["CheckpointJob", "run_checkpoint_job"]

MAX_SENSITIVE_SHOWN = 5
JOB_OPTIONS = ("importance", "recipe", "memory_budget", "pre_tokenizer")
VALID_OPTIONS = frozenset(
    {
        *(
            "to",
            *JOB_OPTIONS,
            "text",
            "no_vocabulary",
            "keep_scales",
            "workers",
            "ray",
            "dry_run",
            "fail_below_sqnr",
            "strict",
        ),
        *("no_verify", "output", "report", "force", "as_json", "quiet", "verbose"),
    }
)


def run_checkpoint_job(values: Mapping[str, Any], given: Mapping[str, str]) -> None:
    """Run ``detent quantize`` with --to.

    Args:
        values: values of all options by parameter name.
        given: options that are on the command line, by parameter name.
    """
    unused = [option for name, option in given.items() if name not in VALID_OPTIONS]
    if unused:
        raise SpecError(f"{', '.join(unused)} cannot be combined with --to, which is for checkpoints: drop one of them")
    if values["fail_below_sqnr"] is not None and values["no_verify"]:
        raise SpecError("--fail-below-sqnr needs the verification: drop --no-verify")
    if "text" in given and ("importance" in given or values["dry_run"]):
        other = "--importance" if "importance" in given else "--dry-run"
        raise SpecError(f"--text measures importance, and cannot be combined with {other}: drop one of them")
    options: dict[str, Any] = {name: values[name] for name in JOB_OPTIONS if name in given}
    options |= {"vocabulary": not values["no_vocabulary"], "scales": "keep" if values["keep_scales"] else "raise"}
    job = CheckpointJob(values["model"], values["to"], values["output"], values["report"], options, values["text"])
    job.check_files(force=values["force"], dry_run=values["dry_run"])
    screen = Screen(as_json=values["as_json"], quiet=values["quiet"], verbose=values["verbose"])
    if values["dry_run"]:
        job.dry_run(screen)
        return
    job.run(
        screen,
        workers=values["workers"],
        ray=values["ray"],
        is_verified=not values["no_verify"],
        min_sqnr_db=values["fail_below_sqnr"],
        strict=values["strict"],
    )


@dataclass(frozen=True)
class CheckpointJob:
    """A call of the command after its options are read.

    Attributes:
        source: directory or file.
        to: format and mixture.
        output: file to write, or None for SOURCE-MIXTURE.gguf.
        report: file for a report, or None.
        options: further arguments of ``qc.quantize``.
        text: text on which importance is measured, or None.
    """

    source: Path
    to: str
    output: Path | None
    report: Path | None
    options: dict[str, Any]
    text: Path | None = None

    @property
    def importance_file(self) -> Path:
        """The file for importance that is measured on --text, next to the output."""
        return self.target.with_name(f"{self.target.stem}.imatrix.gguf")

    @property
    def target(self) -> Path:
        """The file to write."""
        if self.output is not None:
            return self.output
        name = self.source.resolve().name if self.source.is_dir() else self.source.stem
        return Path(f"{name}-{mixture_of(self.to)}.gguf")

    def check_files(self, *, force: bool, dry_run: bool) -> None:
        """Reject paths that are wrong before anything is computed."""
        mixture_of(self.to)
        if not self.source.exists():
            raise SpecError(f"{self.source}: there is no such file or directory")
        read = {"the model": self.source, "--importance": self.options.get("importance"), "--text": self.text}
        read["--recipe"] = None if self.options.get("recipe") is None else recipe_file(self.options["recipe"])
        check_distinct({"--output": self.target, "--report": self.report}, read)
        is_written = not dry_run
        check_can_write(self.target, force=force or dry_run, suffixes=(".gguf",), is_written=is_written)
        check_report_path(self.report, force=force or dry_run, is_written=is_written)
        if self.text is not None:
            is_kept = collected(self.source, self.text, self.importance_file) is not None
            check_can_write(self.importance_file, force=force or is_kept, suffixes=(".gguf",))

    def dry_run(self, screen: Screen) -> None:
        """Print what would be written."""
        estimate = plan(self.source, self.to, **self.options)
        screen.say(str(estimate))
        screen.emit({"model": str(self.source), "output": str(self.target), **estimate.document()})

    def _with_importance(self, screen: Screen) -> dict[str, Any]:
        """Measure importance on --text, if given; return the options with the file that contains it.

        A run that was killed after this step left the file, which the next run of the same job reads.
        """
        if self.text is None:
            return self.options
        if collected(self.source, self.text, self.importance_file) is not None:
            screen.note(f"importance of {self.text} was measured before: {self.importance_file}")
            return {**self.options, "importance": self.importance_file}
        screen.note(f"measuring importance on {self.text}: {self.importance_file}")
        with screen.progress("measuring importance") as step:
            collect(self.source, self.text, self.importance_file, progress=step)
        return {**self.options, "importance": self.importance_file}

    def run(
        self,
        screen: Screen,
        *,
        workers: int | None,
        ray: str | None,
        is_verified: bool,
        min_sqnr_db: float | None,
        strict: bool,
    ) -> None:
        """Quantize, verify, print and write the report."""
        options = self._with_importance(screen)
        screen.note(f"quantizing {self.source} to {self.target}")
        with (
            open_executor(workers, ray, None) as (executor, arguments),
            screen.progress("quantizing", executor) as step,
        ):
            arguments.pop("work_directory", None)
            result = quantize(self.source, self.target, self.to, progress=step, **arguments, **options)
        verification = None
        if is_verified:
            screen.note(f"verifying {self.target}")
            verification = verify(self.source, self.target, importance=options.get("importance"))
        self._show(screen, result, verification)
        missed = _missed(verification, min_sqnr_db)
        if strict and result.warnings:
            missed.append(f"--strict: got {counted(len(result.warnings), 'warning')}, expected none")
        document = {
            "model": str(self.source),
            **result.document(),
            "verification": None if verification is None else verification.document(),
            "missed": missed,
        }
        if self.report is not None:
            from detent.report.checkpoint_page import save_page  # noqa: PLC0415 - loaded only if needed

            save_page(self.report, result, verification, document)
        screen.emit(document)
        if verification is not None and not verification.ok:
            raise VerificationError(f"{self.target}: {verification.failure}", verification)
        if missed:
            fail(f"{'; '.join(missed)} ({self.target} was still written)", DIFFERENCE)

    def _show(self, screen: Screen, result: ConversionReport, verification: CheckpointVerification | None) -> None:
        screen.say(str(result.output), style="bold")
        types = ", ".join(f"{count:,} {name}" for name, (count, _) in result.types.items())
        facts = {
            "size": f"{bytes_text(result.nbytes_before)} -> {bytes_text(result.nbytes_after)}",
            "bits per weight": f"{result.bits_per_weight:.2f}",
            "tensors": types,
            "time": f"{result.seconds:.1f} s",
        }
        for label, text in facts.items():
            screen.say(f"  {label + ':':<18} {text}")
        if verification is not None:
            headline = f"bytes that differ: {verification.differing_bytes:,} of {verification.compared_bytes:,}"
            screen.say(f"{'verified' if verification.ok else 'not ok'}: {headline}")
            lossy = sorted((each.sqnr_db, each.name, each.type) for each in verification.tensors if each.sqnr_db != inf)
            if lossy:
                screen.say("lowest SQNR:")
            for sqnr_db, name, kind in lossy[:MAX_SENSITIVE_SHOWN]:
                screen.say(f"  {sqnr_db:5.1f} dB  {name} ({kind})")
        if self.report is not None:
            screen.say(f"report: {self.report}")
        for line in result.tensors:
            if line.reason:
                screen.note(f"{line.name}: {line.reason}")
        for warning in result.warnings:
            screen.warn(warning)


def _missed(verification: CheckpointVerification | None, min_sqnr_db: float | None) -> list[str]:
    if min_sqnr_db is None or verification is None:
        return []
    lowest = min(verification.tensors, key=lambda each: each.sqnr_db)
    if lowest.sqnr_db >= min_sqnr_db:
        return []
    return [f"the SQNR of {lowest.name} is {lowest.sqnr_db:.1f} dB, below the limit of {min_sqnr_db:g} dB"]
