"""``detent sensitivity``: the noise that each layer causes, and how many bits each should have."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from detent.cli.exits import check_distinct, check_free, guarded, require
from detent.cli.options import AsJson, BatchSize, Force, Quiet, Report, recipe_file
from detent.cli.screen import Screen
from detent.errors import SpecError
from detent.tables import bytes_text, of_whole

if TYPE_CHECKING:
    from detent.evaluate.accuracy import Part
    from detent.sensitivity import Mix, Sensitivity

__all__ = ["register"]

HELP = """Measure the noise that each layer causes alone, and choose bits per layer under a budget of bytes.

With --widths only weights are quantized. ONNX files hold 4 and 8 bits: 3 cost what 4 cost, 6 what 8 cost, and \
weights of convolutions take 8 at any width.

Example: [bold]detent sensitivity model.onnx -d calib.npz --widths 4,8 --budget 20% --save-recipe mix.toml[/bold]

Then: [bold]detent quantize model.onnx --recipe mix.toml[/bold]

It needs no data, and writes just what was measured here; with --data, biases are corrected on top."""
MOST_OPTIONS = 6  # that fit 80 columns
FEW = 4  # batches that a page is made of
WIDTHS = tuple("2345678")
SHOWN = 80  # characters of what was given, in a message


def register(app: typer.Typer) -> None:
    """Add the command.

    >>> app = typer.Typer()
    >>> register(app)
    >>> app.registered_commands[0].name
    'sensitivity'
    """
    app.command("sensitivity", help=HELP)(guarded(_sensitivity))


def _sensitivity(
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
    bits = None if widths is None else _widths(widths)
    if save_recipe is not None and budget is None:
        raise SpecError("--save-recipe writes the mix that a budget chooses: give --budget as well")
    if report is not None and bits is not None and budget is None:
        raise SpecError("with --widths a report is one of the mix that a budget chooses: give --budget as well")
    read = {"the model": model, "--data": data, "--recipe": recipe_file(recipe)}
    check_distinct({"--save-recipe": save_recipe, "--report": report}, read)
    check_free(save_recipe, force=force, suffixes=(".toml", ".json"))
    check_free(report, force=force, suffixes=(".html", ".json"))
    if report is not None and report.suffix.lower() == ".html":
        require("jinja2")
    require("onnx")
    require("onnxruntime")
    import detent.sensitivity as qs  # noqa: PLC0415 - these load ONNX Runtime
    from detent.evaluate.accuracy import first_batches  # noqa: PLC0415
    from detent.onnx_model import load  # noqa: PLC0415
    from detent.onnx_model.batches import inputs_of  # noqa: PLC0415

    screen = Screen(as_json=as_json, quiet=quiet)
    part = first_batches(data, inputs_of(load(model)), batch_size)
    with screen.progress("asking layers") as step:
        found = qs.measure(
            model,
            part,
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
        mix = found.choose(of_whole(budget, found.nbytes_float))
        mix = qs.run_mix(model, part, mix)
    _show(screen, found, mix)
    if save_recipe is not None and mix is not None:
        mix.recipe.save(save_recipe)
        screen.say(f"recipe: {save_recipe}")
    if report is not None:
        options = {"recipe": recipe, "target": target, "skip": tuple(skip or ())}
        _write_report(screen, report, model, part, found, mix, options, str(context.obj or ""))
        screen.say(f"report: {report}")
    screen.emit(_document(model, found, mix, save_recipe))


def _widths(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part in WIDTHS for part in parts):
        raise SpecError(f"--widths {text[:SHOWN]!r}: expected bits from 2 to 8, such as 4,8")
    return tuple(sorted({int(part) for part in parts}))


def _show(screen: Screen, found: "Sensitivity", mix: "Mix | None") -> None:
    from detent.sensitivity import sqnr_of  # noqa: PLC0415 - loaded by now

    shown = found.options[:MOST_OPTIONS]
    chosen = () if mix is None else ("chosen",)
    rows = []
    for layer in found.ranked():
        cells = [f"{sqnr_of(layer.noise[name]):.1f}" if name in layer.noise else "-" for name in shown]
        label = () if mix is None else (_short(mix.options[layer.name]),)
        rows.append((layer.name, layer.type, bytes_text(layer.nbytes_float), *cells, *label))
    columns = ("layer", "type", "bytes", *(_short(name) for name in shown), *chosen)
    screen.table(columns, rows, right=range(2, 3 + len(shown)))
    screen.say(
        f"SQNR of the outputs in dB when one layer alone is quantized, worst first; {len(found.layers):,} layers, "
        f"{found.samples:,} samples"
    )
    if mix is not None:
        measured = "not measured" if mix.measured_sqnr_db is None else f"{mix.measured_sqnr_db:.1f} dB measured"
        screen.say(
            f"chosen: {bytes_text(mix.nbytes)} of {bytes_text(found.nbytes_float)} in float; "
            f"{mix.predicted_sqnr_db:.1f} dB predicted, {measured}"
        )


def _short(option: str) -> str:
    return option.partition("/")[0]


def _document(model: Path, found: "Sensitivity", mix: "Mix | None", saved: Path | None) -> dict[str, object]:
    document: dict[str, object] = {"model": str(model), "sensitivity": json.loads(found.to_json()), "mix": None}
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
    model: Path,
    part: "Part",
    found: "Sensitivity",
    mix: "Mix | None",
    options: dict[str, Any],
    command: str,
) -> None:
    """A page needs a quantized file: the mix, or what the recipe says."""
    import detent.onnx as qo  # noqa: PLC0415 - loaded by now
    from detent import report as qr  # noqa: PLC0415 - not everybody asks for it

    what = f"recipe {options['recipe']}"
    if mix is not None:
        options, what = {**options, "recipe": mix.recipe, "skip": ()}, "the chosen mix"
    with TemporaryDirectory() as folder:
        output = Path(folder, f"{model.stem}.onnx")
        # Widths leave activations float: without data the page is of just what was measured.
        data = None if found.recipe is None else part
        with screen.progress("quantizing for the page") as step:
            made = qo.quantize(model, output, data, progress=step, **options)
        page = qr.build(
            output,
            list(part.first(FEW)),
            source=model,
            result=made,
            sensitivity=found,
            mix=mix,
            title=f"{model.name} with {what} (not written)",
            command=command,
        )
        page.save(path)
