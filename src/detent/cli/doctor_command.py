"""``detent doctor``: show kernels, versions and instruction set, and how to install what is missing."""

import platform
import shutil
from collections.abc import Mapping, Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from detent import __version__
from detent.cli.exits import DIFFERENCE, fail, require
from detent.cli.options import OUTPUT, WORK, AsJson, Quiet, Verbose
from detent.cli.screen import Screen
from detent.cluster import cluster_nodes, ray_executor
from detent.errors import EXTRAS, SpecError, install_hint
from detent.kernels import Capabilities, capabilities
from detent.tables import counted

__all__ = ["EXAMPLE", "HELP", "run"]

HELP = """Show what is installed, what is missing and how to install it.

It lists kernels, instruction set, threads and package versions."""
EXAMPLE = "detent doctor"
REQUIRED = ("numpy", "ml_dtypes", "array_api_compat")
OPTIONAL = {
    "openvino": "verify, level 2: a second runtime",
    "safetensors": "not needed: detent reads safetensors files itself",
}
LABEL_COLUMNS = 17
EXTRA_USES = {
    "onnx": "ONNX files: quantize, verify, inspect, compare, sensitivity, bench",
    "torch": "quantization-aware training, and the demo",
    "cli": "this command",
    "report": "HTML reports",
    "images": "calibration data from images",
    "text": "calibration data from texts",
    "checkpoint": "checkpoints of language models: GGUF files",
}
DISTRIBUTIONS = {"PIL": "pillow"}  # names of packages on PyPI, if they differ from the module


def run(
    everything: Annotated[
        bool,
        typer.Option(
            "--all",
            help="List the kernel of each operation and type, and all conventions for scales and rounding.",
            rich_help_panel=OUTPUT,
        ),
    ] = False,
    gpu: Annotated[
        bool,
        typer.Option(
            "--gpu",
            help="Check the GPU kernels on every GPU and print a report that you can send; loads PyTorch.",
            rich_help_panel=OUTPUT,
        ),
    ] = False,
    ray: Annotated[
        str | None,
        typer.Option(
            "--ray",
            metavar="ADDRESS",
            help="Check the nodes of a Ray cluster: HOST:PORT, auto, or local.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    see: Annotated[
        list[str] | None,
        typer.Option(
            "--see",
            metavar="PATH",
            help="With --ray: a file or directory that every node must see.",
            rich_help_panel=WORK,
        ),
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Show what this installation supports; see ``HELP``."""
    screen = Screen(as_json=as_json, quiet=quiet, verbose=verbose)
    if ray is not None:
        _check_cluster(screen, ray, tuple(see or ()))
        return
    if see:
        raise SpecError("got --see without --ray: --see names files that the nodes of a cluster must see")
    caps = capabilities()
    versions = {name: _version(name) for name in (*REQUIRED, *EXTRAS, *OPTIONAL)}
    missing = {
        extra: [module for module, brings in EXTRAS.items() if brings == extra and versions[module] is None]
        for extra in EXTRA_USES
    }
    missing = {extra: modules for extra, modules in missing.items() if modules}
    vnni = None
    if "onnx" not in missing:
        from detent.onnx_model.targets import has_vnni  # noqa: PLC0415 - it loads ONNX

        vnni = has_vnni()
    _show(screen, "detent", f"{__version__}, Python {platform.python_version()}, {platform.system()}")
    for text in _missing_texts(missing, caps.level):
        _show(screen, "missing", text)
    _show(screen, "machine", caps.machine)
    _show(screen, "instruction set", caps.level)
    _show(screen, "VNNI", "unknown" if vnni is None else "yes" if vnni else "no")
    _show(screen, "threads", str(caps.threads))
    _show_kernels(screen, caps, everything=everything)
    gpu_facts = _gpu_facts() if gpu and "torch" not in missing else {}
    for label, text in gpu_facts.items():
        _show(screen, label if len(label) < LABEL_COLUMNS else f"{label} ", text)
    screen.say()
    screen.table(("package", "version", "for"), [_row(name, versions[name]) for name in versions], fold=(2,))
    screen.emit(
        {
            "version": __version__,
            "python": platform.python_version(),
            "system": platform.system(),
            "machine": caps.machine,
            "instruction_set": caps.level,
            "vnni": vnni,
            "threads": caps.threads,
            "kernels": dict(caps.kernels),
            "limits": dict(caps.limits),
            "gpu": gpu_facts,
            "packages": versions,
            "missing": [
                {"extra": extra, "modules": modules, "install": install_hint(extra)}
                for extra, modules in missing.items()
            ],
        }
    )


def _check_cluster(screen: Screen, address: str, paths: tuple[str, ...]) -> None:
    """Print what each node of a Ray cluster lacks; exit 1 if a node lacks something."""
    require("onnx", "onnxruntime")
    from detent.onnx_model.workspace import runtime_environment  # noqa: PLC0415 - it loads ONNX Runtime

    absolute = tuple(str(Path(path).absolute()) for path in paths)
    with ray_executor(address) as executor:
        nodes = cluster_nodes(executor, runtime_environment, absolute)
    screen.table(
        ("node", "result"), [(name, "; ".join(problems) or "ok") for name, problems in nodes.items()], fold=(1,)
    )
    screen.emit({"nodes": [{"node": name, "problems": problems} for name, problems in nodes.items()]})
    bad = [name for name, problems in nodes.items() if problems]
    if bad:
        fail(
            f"{len(bad)} of {counted(len(nodes), 'node')} cannot run the items of this driver: {', '.join(bad)}",
            DIFFERENCE,
        )


def _show(screen: Screen, label: str, text: str) -> None:
    screen.say(f"{label:<{LABEL_COLUMNS}}{text}")


def _gpu_facts() -> dict[str, str]:
    """Run the self-checks of the GPU kernels; return versions and results."""
    from detent.torch.gpu.readiness import facts  # noqa: PLC0415 - it loads PyTorch

    compiler = next((each for each in map(shutil.which, ("cc", "gcc", "clang")) if each), "missing")
    return {"Triton": _version("triton") or "missing: pip install triton", "C compiler": compiler, **facts()}


def _missing_texts(missing: Mapping[str, Sequence[str]], level: str) -> list[str]:
    lines = [
        f"{', '.join(modules)} (for {EXTRA_USES[extra]}): {install_hint(extra)}" for extra, modules in missing.items()
    ]
    if level == "none":
        lines.append("native kernels (for speed): install a C++ compiler, then reinstall detent")
    return lines or ["nothing"]


def _show_kernels(screen: Screen, caps: Capabilities, *, everything: bool) -> None:
    """Print one line if all kernels are native. Otherwise, or with --all, print a table."""
    if set(caps.kernels.values()) | set(caps.table.values()) == {"native"}:
        _show(screen, "kernels", f"all {len(caps.kernels)} operations have native kernels")
        for limit in caps.limits.values():
            _show(screen, "", f"exception: {limit}")
        if not everything:
            return
    screen.say()
    screen.say(str(caps).partition("\n\n")[2])  # only the table, because the lines above it are already printed


def _row(name: str, version: str | None) -> tuple[str, str, str]:
    uses = {module: f"extra {extra!r}" for module, extra in EXTRAS.items()}
    uses |= dict.fromkeys(REQUIRED, "always") | OPTIONAL
    return name, version or "missing", uses[name]


def _version(module: str) -> str | None:
    """Return the version of an installed package without importing it."""
    try:
        if find_spec(module) is None:
            return None
        return metadata.version(DISTRIBUTIONS.get(module, module.replace("_", "-")))
    except metadata.PackageNotFoundError:
        return "unknown"
    except (ImportError, ValueError):
        return None
