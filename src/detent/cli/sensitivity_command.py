"""``detent sensitivity``: measure the output noise that each layer causes, and allocate bits under a size budget."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from detent.cli.exits import check_can_write, check_distinct, check_report_path, require
from detent.cli.options import (
    ACCURACY,
    DATA,
    OUTPUT,
    AsJson,
    BatchSize,
    Force,
    Preprocess,
    Quiet,
    Report,
    Skip,
    Tokenizer,
    Verbose,
    data_files,
    recipe_file,
)
from detent.cli.screen import Screen
from detent.cli.workers import Ray, WorkDirectory, Workers, open_executor
from detent.errors import SpecError
from detent.tables import bytes_text, counted, of_whole

if TYPE_CHECKING:
    from detent.onnx_model.batches import Batches
    from detent.onnx_model.files import LoadedModel
    from detent.sensitivity import Mix, Sensitivity

__all__ = ["EXAMPLE", "HELP", "run"]

HELP = """Measure each layer's sensitivity and allocate bits under a budget.

Only one layer at a time is quantized, and the noise at the outputs is measured. With --widths, only weights are \
quantized. With --budget, the bits of each layer are chosen for the least noise within the budget. Quantized files \
store 4, 8 or 16 bits per weight (at least 8 for convolutions and embeddings): 3 bits take as much space as 4, and 6 \
as much as 8."""
EXAMPLE = "detent sensitivity model.onnx -d calib.npz --widths 4,8 --budget 20%"
MAX_CANDIDATES_SHOWN = 6  # so that the table fits 80 characters
REPORT_BATCHES = 4  # batches on which the report measures activations
WIDTHS = tuple("2345678")
MAX_CHARS_SHOWN = 80  # longer arguments are cut off in messages


def run(
    context: typer.Context,
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="Float model (.onnx).", show_default=False, rich_help_panel=DATA)
    ],
    data: Annotated[
        Path,
        typer.Option(
            "--data",
            "-d",
            metavar="PATH",
            help=".npz, .npy, images, .wav, .txt, or a directory.",
            rich_help_panel=DATA,
        ),
    ],
    *,
    batch_size: BatchSize = None,
    preprocess: Preprocess = None,
    tokenizer: Tokenizer = None,
    samples: Annotated[
        int, typer.Option(min=1, metavar="N", help="Samples to measure with.", rich_help_panel=DATA)
    ] = 32,
    recipe: Annotated[
        str,
        typer.Option(
            "--recipe",
            metavar="NAME",
            help="Recipe to measure (preset or file); with --widths it only selects layers.",
            rich_help_panel=ACCURACY,
        ),
    ] = "w8a8",
    widths: Annotated[
        str | None,
        typer.Option(
            "--widths",
            metavar="LIST",
            help="Weight bits to try, e.g. 4,8; activations stay in float.",
            show_default=False,
            rich_help_panel=ACCURACY,
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            "--budget",
            metavar="SIZE",
            help="Maximum weight size, e.g. 2MB, or 25% of the float size.",
            rich_help_panel=ACCURACY,
        ),
    ] = None,
    skip: Skip = None,
    target: Annotated[
        str,
        typer.Option("--target", metavar="NAME", help="Runtime to quantize for.", rich_help_panel=ACCURACY),
    ] = "onnxruntime",
    save_recipe: Annotated[
        Path | None,
        typer.Option(
            "--save-recipe",
            metavar="FILE",
            help="Write the allocation as a recipe, .toml or .json.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    report: Report = None,
    workers: Workers = None,
    ray: Ray = None,
    work_directory: WorkDirectory = None,
    force: Force = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Measure layers and allocate bits; see ``HELP``."""
    bits = None if widths is None else _widths(widths)
    if save_recipe is not None and budget is None:
        raise SpecError("--save-recipe saves the bits that --budget chooses: pass --budget, too")
    if report is not None and bits is not None and budget is None:
        raise SpecError("with --widths, --report shows the bits that --budget chooses: pass --budget, too")
    read = {"the model": model, "--data": data, "--recipe": recipe_file(recipe), "--tokenizer": tokenizer}
    check_distinct({"--save-recipe": save_recipe, "--report": report}, read)
    check_can_write(save_recipe, force=force, suffixes=(".toml", ".json"))
    check_report_path(report, force=force)
    require("onnx", "onnxruntime")
    import detent.sensitivity as qs  # noqa: PLC0415 - these load ONNX Runtime
    from detent.onnx_model.batches import open_batches  # noqa: PLC0415
    from detent.onnx_model.files import load_model  # noqa: PLC0415

    screen = Screen(as_json=as_json, quiet=quiet, verbose=verbose)
    source = load_model(model)
    batches = open_batches(data_files(data, batch_size, preprocess, tokenizer), source.inputs)
    batches.check_first()
    screen.note(*batches.notes)
    with (
        open_executor(workers, ray, work_directory) as (executor, arguments),
        screen.progress("measuring sensitivity", executor) as step,
    ):
        sensitivity = qs.measure(
            source,
            batches,
            recipe,
            widths=bits,
            samples=samples,
            target=target,
            skip=tuple(skip or ()),
            progress=step,
            announce=lambda cost: screen.note(str(cost)),
            **arguments,
        )
    mix = None
    if budget is not None:
        mix = sensitivity.choose(of_whole(budget, sensitivity.nbytes_float))
        mix = qs.run_mix(source, batches, mix)
    _show(screen, sensitivity, mix)
    if save_recipe is not None and mix is not None:
        mix.recipe.save(save_recipe)
        screen.say(f"recipe: {save_recipe}")
    if report is not None:
        options = {"recipe": recipe, "target": target, "skip": tuple(skip or ())}
        _write_report(screen, report, source, batches, sensitivity, mix, options, str(context.obj or ""))
        screen.say(f"report: {report}")
    screen.emit(_document(model, sensitivity, mix, save_recipe))


def _widths(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part in WIDTHS for part in parts):
        raise SpecError(f"--widths {text[:MAX_CHARS_SHOWN]!r}: expected numbers of bits from 2 to 8, e.g. 4,8")
    return tuple(sorted({int(part) for part in parts}))


def _show(screen: Screen, sensitivity: "Sensitivity", mix: "Mix | None") -> None:
    from detent.sensitivity import sqnr_of  # noqa: PLC0415 - already loaded

    shown = sensitivity.options[:MAX_CANDIDATES_SHOWN]
    chosen = () if mix is None else ("chosen",)
    rows = []
    for layer in sensitivity.ranked():
        cells = [f"{sqnr_of(layer.noise[name]):.1f}" if name in layer.noise else "-" for name in shown]
        label = () if mix is None else (_short(mix.options[layer.name]),)
        rows.append((layer.name, layer.type, bytes_text(layer.nbytes_float), *cells, *label))
    columns = ("layer", "type", "bytes", *(_short(name) for name in shown), *chosen)
    screen.table(columns, rows, right=range(2, 3 + len(shown)))
    layers, samples = counted(len(sensitivity.layers), "layer", ","), counted(sensitivity.samples, "sample", ",")
    screen.say(
        f"{layers}, {samples}, most sensitive layer first. Each row: output SQNR in dB with only that layer quantized"
    )
    if mix is not None:
        measured = "not measured" if mix.measured_sqnr_db is None else f"{mix.measured_sqnr_db:.1f} dB measured"
        screen.say(
            f"chosen: {bytes_text(mix.nbytes)} of weights (float: {bytes_text(sensitivity.nbytes_float)}); "
            f"SQNR {mix.predicted_sqnr_db:.1f} dB predicted, {measured}"
        )


def _short(option: str) -> str:
    return option.partition("/")[0]


def _document(model: Path, sensitivity: "Sensitivity", mix: "Mix | None", saved: Path | None) -> dict[str, object]:
    document: dict[str, object] = {"model": str(model), "sensitivity": json.loads(sensitivity.to_json()), "mix": None}
    if mix is not None:
        document["mix"] = {
            "options": dict(mix.options),
            "nbytes": mix.nbytes,
            "predicted_sqnr_db": mix.predicted_sqnr_db,
            "measured_sqnr_db": mix.measured_sqnr_db,
            "recipe": json.loads(mix.recipe.to_json()),
            "saved": None if saved is None else str(saved),
        }
    return document


def _write_report(
    screen: Screen,
    path: Path,
    source: "LoadedModel",
    batches: "Batches",
    sensitivity: "Sensitivity",
    mix: "Mix | None",
    options: dict[str, Any],
    command: str,
) -> None:
    """Quantize the model with the chosen allocation or the recipe, write a report, and delete the quantized file."""
    import detent.onnx as qo  # noqa: PLC0415 - already loaded
    from detent import report as qr  # noqa: PLC0415 - loaded only if needed

    label = f"recipe {options['recipe']}"
    if mix is not None:
        options, label = {**options, "recipe": mix.recipe, "skip": ()}, "the chosen allocation"
    name = "model" if source.path is None else source.path.stem
    with TemporaryDirectory() as directory:
        output = Path(directory, f"{name}.onnx")
        # With --widths, activations stay in float. Data would only turn on bias correction, which was not measured.
        data = None if sensitivity.recipe is None else batches
        with screen.progress("quantizing for the report") as step:
            result = qo.quantize(source, output, data, progress=step, **options)
        document = qr.build(
            output,
            batches.first(REPORT_BATCHES),
            source=source,
            result=result,
            sensitivity=sensitivity,
            mix=mix,
            title=f"{name}.onnx with {label} (not written)",
            command=command,
        )
        document.save(path)
