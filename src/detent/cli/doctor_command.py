"""``detent doctor``: what this installation can do, what is missing, and the command that installs it."""

import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from importlib.util import find_spec
from typing import Annotated, Any

import typer

from detent import __version__
from detent.cli.options import AsJson, Quiet
from detent.cli.screen import Screen
from detent.errors import EXTRAS, install_hint
from detent.kernels import Capabilities, capabilities

__all__ = ["HELP", "run"]

HELP = """Say what this installation can do: kernels, versions, instruction set, and how to install what is missing.

Example: [bold]detent doctor[/bold]"""
NEEDED = ("numpy", "ml_dtypes", "array_api_compat")
ALSO = ("openvino", "safetensors")
FOR = {
    "onnx": "ONNX files: quantize, verify, inspect, compare, sensitivity, bench",
    "torch": "quantization-aware training, and the demo",
    "cli": "this command",
    "report": "pages in HTML",
}


def run(
    everything: Annotated[bool, typer.Option("--all", help="All operations, types and rules of the kernels.")] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Show what this installation can do; see ``HELP``."""
    screen = Screen(as_json=as_json, quiet=quiet)
    caps = capabilities()
    versions = {name: _version(name) for name in (*NEEDED, *EXTRAS, *ALSO)}
    missing = {
        extra: [module for module, brings in EXTRAS.items() if brings == extra and versions[module] is None]
        for extra in FOR
    }
    missing = {extra: modules for extra, modules in missing.items() if modules}
    vnni = None
    if "onnx" not in missing:
        from detent.onnx_model.targets import has_vnni  # noqa: PLC0415 - its module knows targets, which are ONNX's

        vnni = has_vnni()
    screen.say(f"detent    {__version__}, Python {platform.python_version()}, {platform.system()}")
    for text in _lacks(missing, caps.level):
        screen.say(f"missing   {text}")
    screen.say(f"machine   {caps.machine}")
    screen.say(f"level     {caps.level}")
    screen.say(f"vnni      {'not known' if vnni is None else 'yes' if vnni else 'no'}")
    screen.say(f"threads   {caps.threads}")
    _show_kernels(screen, caps, everything=everything)
    screen.say()
    screen.table(("package", "version", "for"), [_row(name, versions[name]) for name in versions], fold=(2,))
    screen.emit(
        {
            "version": __version__,
            "python": platform.python_version(),
            "system": platform.system(),
            "machine": caps.machine,
            "level": caps.level,
            "vnni": vnni,
            "threads": caps.threads,
            "kernels": dict(caps.kernels),
            "limits": dict(caps.limits),
            "packages": versions,
            "missing": [
                {"extra": extra, "modules": modules, "install": install_hint(extra)}
                for extra, modules in missing.items()
            ],
        }
    )


def _lacks(missing: Mapping[str, Sequence[str]], level: str) -> list[str]:
    lines = [f"{', '.join(modules)}, for {FOR[extra]}: {install_hint(extra)}" for extra, modules in missing.items()]
    if level == "none":
        lines.append("the native kernels, for speed: reinstall detent with a C++ compiler at hand")
    return lines or ["nothing"]


def _show_kernels(screen: Screen, caps: Capabilities, *, everything: bool) -> None:
    """A line where all is native, which is the rule; a table where it is not, or where it is asked for."""
    if set(caps.kernels.values()) | set(caps.table.values()) == {"native"}:
        screen.say(f"kernels   all {len(caps.kernels)} operations native")
        for why in caps.limits.values():
            screen.say(f"          but {why}")
        if not everything:
            return
    screen.say()
    screen.say(str(caps).partition("\n\n")[2])  # above it stand machine, level and threads


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
