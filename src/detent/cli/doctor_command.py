"""``detent doctor``: what this installation can do, what is missing, and the command that installs it."""

import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from importlib.util import find_spec
from typing import Annotated, Any

import typer

from detent import __version__
from detent.cli.exits import guarded
from detent.cli.options import AsJson, Quiet
from detent.cli.screen import Screen
from detent.errors import EXTRAS, install_hint
from detent.kernels import Capabilities, capabilities

__all__ = ["register"]

HELP = """Say what this installation can do: kernels, versions, CPU level, and what is missing with the command for it.

Example: [bold]detent doctor[/bold]"""
NEEDED = ("numpy", "ml_dtypes", "array_api_compat")
ALSO = ("openvino", "safetensors")
FOR = {
    "onnx": "ONNX files: quantize, verify, inspect, compare, sensitivity, bench",
    "torch": "quantization-aware training, and the demo",
    "cli": "this command",
    "report": "pages in HTML",
}


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("doctor", help=HELP)(guarded(_doctor))


def _doctor(
    everything: Annotated[bool, typer.Option("--all", help="All operations, types and rules of the kernels.")] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    screen = Screen(as_json=as_json, quiet=quiet)
    found = capabilities()
    versions = {name: _version(name) for name in (*NEEDED, *EXTRAS, *ALSO)}
    missing = {
        extra: [module for module, brings in EXTRAS.items() if brings == extra and versions[module] is None]
        for extra in FOR
    }
    missing = {extra: modules for extra, modules in missing.items() if modules}
    vnni = _has_vnni() if "onnx" not in missing else None
    screen.say(f"detent    {__version__}, Python {platform.python_version()}, {platform.system()}")
    for text in _lacks(missing, found.level):
        screen.say(f"missing   {text}")
    screen.say(f"machine   {found.machine}")
    screen.say(f"level     {found.level}")
    screen.say(f"vnni      {'not known' if vnni is None else 'yes' if vnni else 'no'}")
    screen.say(f"threads   {found.threads}")
    _show_kernels(screen, found, everything=everything)
    screen.say()
    screen.table(("package", "version", "for"), [_row(name, versions[name]) for name in versions], fold=(2,))
    screen.emit(
        {
            "version": __version__,
            "python": platform.python_version(),
            "system": platform.system(),
            "machine": found.machine,
            "level": found.level,
            "vnni": vnni,
            "threads": found.threads,
            "kernels": dict(found.kernels),
            "limits": dict(found.limits),
            "packages": versions,
            "missing": [
                {"extra": extra, "modules": modules, "install": install_hint(extra)}
                for extra, modules in missing.items()
            ],
        }
    )


def _lacks(missing: Mapping[str, Sequence[str]], level: str) -> list[str]:
    found = [f"{', '.join(modules)}, for {FOR[extra]}: {install_hint(extra)}" for extra, modules in missing.items()]
    if level == "none":
        found.append("the native kernels, for speed: reinstall detent with a C++ compiler at hand")
    return found or ["nothing"]


def _show_kernels(screen: Screen, found: Capabilities, *, everything: bool) -> None:
    """A line where all is native, which is the rule; a table where it is not, or where it is asked for."""
    if set(found.kernels.values()) | set(found.table.values()) == {"native"}:
        screen.say(f"kernels   all {len(found.kernels)} operations native")
        for why in found.limits.values():
            screen.say(f"          but {why}")
        if not everything:
            return
    screen.say()
    screen.say(str(found).partition("\n\n")[2])  # above it stand machine, level and threads


def _has_vnni() -> bool | None:
    from detent.onnx_model.targets import has_vnni  # noqa: PLC0415 - its module knows targets, which are ONNX's

    return has_vnni()


def _row(name: str, version: str | None) -> tuple[str, str, str]:
    use: dict[str, Any] = {**{module: f"extra {extra!r}" for module, extra in EXTRAS.items()}}
    use |= dict.fromkeys(NEEDED, "always") | {"openvino": "a second opinion of verify", "safetensors": "not needed"}
    return name, version or "missing", use[name]


def _version(module: str) -> str | None:
    """The version of an installed package; its module is not imported."""
    try:
        if find_spec(module) is None:
            return None
        return metadata.version(module.replace("_", "-"))
    except metadata.PackageNotFoundError:
        return "unknown"
    except (ImportError, ValueError):
        return None
