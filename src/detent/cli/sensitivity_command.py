"""``detent sensitivity``: the noise that each layer causes, and how many bits each should have."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from detent.cli.exits import check_can_write, check_distinct, check_report_path, require
from detent.cli.options import AsJson, BatchSize, Force, Quiet, Report, recipe_file
from detent.cli.screen import Screen
from detent.errors import SpecError
from detent.tables import bytes_text, of_whole

if TYPE_CHECKING:
    from detent.onnx_model.batches import Batches
    from detent.onnx_model.files import LoadedModel
    from detent.sensitivity import Mix, Sensitivity

__all__ = ["HELP", "run"]

HELP = """Measure the noise that each layer causes alone, and choose bits per layer under a budget of bytes.

With --widths only weights are quantized. ONNX files hold 4 and 8 bits: 3 cost what 4 cost, 6 what 8 cost, and \
weights of convolutions take 8 at any width.

Example: [bold]detent sensitivity model.onnx -d calib.npz --widths 4,8 --budget 20% --save-recipe mix.toml[/bold]

Then: [bold]detent quantize model.onnx --recipe mix.toml[/bold]

It needs no data, and writes just what was measured here; with --data, biases are corrected on top."""
MAX_OPTIONS_SHOWN = 6  # that fit 80 columns
REPORT_BATCHES = 4
WIDTHS = tuple("2345678")
MAX_CHARS_SHOWN = 80  # of an argument in a message


def run(
    context: typer.Context,
    model: Annotated[Path, typer.Argument(help="The float model, an ONNX file.", show_default=False)],
    data: Annotated[Path, typer.Option("--data", "-d", help="Batches of inputs, as `detent quantize` takes them.")],
    *,
    recipe: Annotated[
        str, typer.Option("--recipe", help="What each layer is tried with, where no widths are given.")
    ] = "w8a8",
    widths: Annotated[
        str | None,
        typer.Option(
            "--widths", help="Bits of weights to try, such as 4,8; activations stay float.", show_default=False
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option("--budget", help="Bytes of all weights, such as 2MB, or a part of them in float, such as 25%."),
    ] = None,
    save_recipe: Annotated[
        Path | None, typer.Option("--save-recipe", help="Write the chosen mix as a recipe, .toml or .json.")
    ] = None,
    report: Report = None,
    samples: Annotated[int, typer.Option(min=1, help="How many samples to measure with.")] = 32,
    skip: Annotated[list[str] | None, typer.Option("--skip", help="Layers to leave in float; may be repeated.")] = None,
    target: Annotated[str, typer.Option("--target", help="What it is to run on.")] = "onnxruntime",
    batch_size: BatchSize = None,
    force: Force = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Measure layers, and choose their bits; see ``HELP``."""
    bits = None if widths is None else _widths(widths)
    if save_recipe is not None and budget is None:
        raise SpecError("--save-recipe needs --budget, which chooses the bits that it writes")
    if report is not None and bits is not None and budget is None:
        raise SpecError("--report with --widths needs --budget, which chooses the bits to report on")
    read = {"the model": model, "--data": data, "--recipe": recipe_file(recipe)}
    check_distinct({"--save-recipe": save_recipe, "--report": report}, read)
    check_can_write(save_recipe, force=force, suffixes=(".toml", ".json"))
    check_report_path(report, force=force)
    require("onnx", "onnxruntime")
    import detent.sensitivity as qs  # noqa: PLC0415 - these load ONNX Runtime
    from detent.onnx_model.batches import open_batches  # noqa: PLC0415
    from detent.onnx_model.files import load_model  # noqa: PLC0415

    screen = Screen(as_json=as_json, quiet=quiet)
    source = load_model(model)
    batches = open_batches(data, source.inputs, batch_size)
    with screen.progress("measuring sensitivity") as step:
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
        raise SpecError(f"--widths {text[:MAX_CHARS_SHOWN]!r}: expected bits from 2 to 8, such as 4,8")
    return tuple(sorted({int(part) for part in parts}))


def _show(screen: Screen, sensitivity: "Sensitivity", mix: "Mix | None") -> None:
    from detent.sensitivity import sqnr_of  # noqa: PLC0415 - loaded by now

    shown = sensitivity.options[:MAX_OPTIONS_SHOWN]
    chosen = () if mix is None else ("chosen",)
    rows = []
    for layer in sensitivity.ranked():
        cells = [f"{sqnr_of(layer.noise[name]):.1f}" if name in layer.noise else "-" for name in shown]
        label = () if mix is None else (_short(mix.options[layer.name]),)
        rows.append((layer.name, layer.type, bytes_text(layer.nbytes_float), *cells, *label))
    columns = ("layer", "type", "bytes", *(_short(name) for name in shown), *chosen)
    screen.table(columns, rows, right=range(2, 3 + len(shown)))
    screen.say(
        "SQNR of the outputs in dB when one layer alone is quantized, worst first; "
        f"{len(sensitivity.layers):,} layers, {sensitivity.samples:,} samples"
    )
    if mix is not None:
        measured = "not measured" if mix.measured_sqnr_db is None else f"{mix.measured_sqnr_db:.1f} dB measured"
        screen.say(
            f"chosen: {bytes_text(mix.nbytes)} of {bytes_text(sensitivity.nbytes_float)} in float; "
            f"{mix.predicted_sqnr_db:.1f} dB predicted, {measured}"
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
    """Write a report, for which the mix or the recipe is quantized into a temporary file."""
    import detent.onnx as qo  # noqa: PLC0415 - loaded by now
    from detent import report as qr  # noqa: PLC0415 - not everybody asks for it

    label = f"recipe {options['recipe']}"
    if mix is not None:
        options, label = {**options, "recipe": mix.recipe, "skip": ()}, "the chosen mix"
    name = "model" if source.path is None else source.path.stem
    with TemporaryDirectory() as directory:
        output = Path(directory, f"{name}.onnx")
        # Widths leave activations float: without data the report shows just what was measured.
        data = None if sensitivity.recipe is None else batches
        with screen.progress("quantizing for the report") as step:
            result = qo.quantize(source, output, data, progress=step, **options)
        page = qr.build(
            output,
            batches.first(REPORT_BATCHES),
            source=source,
            result=result,
            sensitivity=sensitivity,
            mix=mix,
            title=f"{name}.onnx with {label} (not written)",
            command=command,
        )
        page.save(path)
