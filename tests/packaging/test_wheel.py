"""The packages that users install: the sdist, the wheel built from it, and an installation without a compiler.

The tests only read the source tree. This directory has no __init__.py, which would hide the library `packaging`.
"""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest
from filelock import FileLock

import detent as dt

SMOKE = Path(__file__).with_name("smoke.py")
MINUTES = 60
STABLE_ABI = sys.version_info >= (3, 12)
TAG = "cp312-abi3" if STABLE_ABI else "cp311-cp311"
EXTENSION = f"detent/_native{'.abi3.so' if STABLE_ABI else sysconfig.get_config_var('EXT_SUFFIX')}"
FOREIGN = ("CMAKE_ARGS", "DETENT_", "PYTHONPATH", "SKBUILD_")  # prefixes of variables that would change the result

HERE = "reference" if dt.capabilities().level == "none" else "native"

needs_compiler = pytest.mark.skipif(HERE == "reference", reason="detent was built without a compiler")


def run(*command, cwd, minutes=1, **variables):
    """Run the command and return its output; None removes a variable, and FOREIGN ones are always removed."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={name: value for name, value in (inherited | variables).items() if value is not None},
        capture_output=True,
        text=True,
        check=False,
        timeout=minutes * MINUTES,
    )
    assert done.returncode == 0, f"{' '.join(done.args)} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="session")
def pinned(root):
    """Variables that apply constraints.txt to packages and to build requirements, as in the Makefile."""
    pins = (root / "constraints.txt").as_uri()  # a URL, because pip splits the value at spaces
    return {"PIP_CONSTRAINT": pins, "PIP_BUILD_CONSTRAINT": pins}


@pytest.fixture(scope="session")
def dist(tmp_path_factory):
    """Directory for sdist and wheel, shared by all workers of pytest-xdist."""
    base = tmp_path_factory.getbasetemp()
    directory = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "dist"
    directory.mkdir(exist_ok=True)
    return directory


def made_once(dist, pattern, make):
    """Path of the file in `dist`; the first worker builds it, the others wait."""
    with FileLock(dist / "lock"):
        if not list(dist.glob(pattern)):
            make()
    (file,) = dist.glob(pattern)
    return file


@pytest.fixture(scope="session")
def sdist(root, dist, pinned):
    command = [sys.executable, "-m", "build", "--sdist", "--outdir", dist, root]
    return made_once(dist, "*.tar.gz", lambda: run(*command, cwd=dist, minutes=10, **pinned))


@pytest.fixture(scope="session")
def wheel(sdist, dist, pinned, tmp_path_factory):
    def make():
        source = unpacked(sdist, tmp_path_factory.mktemp("wheel"))
        # If the compiler fails, the build must fail instead of leaving out the native kernels.
        command = [sys.executable, "-m", "build", "--wheel", "-Cwheel.cmake=true", "--outdir", dist, source]
        run(*command, cwd=dist, minutes=30, **pinned)

    return made_once(dist, "*.whl", make)


@pytest.fixture
def venv(tmp_path):
    """Python of an empty virtual environment, without pip."""
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv", cwd=tmp_path)
    return tmp_path / "venv" / ("Scripts" if os.name == "nt" else "bin") / "python"


def unpacked(sdist, directory):
    shutil.unpack_archive(sdist, directory, filter="data")
    (source,) = directory.iterdir()
    return source


def pip(venv, *arguments, cwd, **variables):
    return run(sys.executable, "-m", "pip", "--python", venv, *arguments, cwd=cwd, minutes=15, **variables)


def smoke(venv, kernels, cwd):
    """Run the smoke test in that environment; return the line it prints."""
    (line,) = run(venv, "-W", "error", SMOKE, kernels, cwd=cwd).splitlines()
    assert f"kernels {kernels}" in line
    assert Path(line.rpartition(", ")[2]).is_relative_to(venv.parents[1]), f"the wrong detent was tested: {line}"
    return line


def files_of(directory):
    """Paths of all files of the package in a source tree, as in a wheel."""
    files = [path for path in (directory / "detent").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return {path.relative_to(directory).as_posix() for path in files}


@pytest.mark.slow
@needs_compiler
def test_wheel_brings_native_kernels_and_its_dependencies(wheel, venv, pinned, tmp_path):
    pip(venv, "install", wheel, cwd=tmp_path, **pinned)
    assert "level none" not in smoke(venv, "native", tmp_path)
    packages = json.loads(pip(venv, "list", "--format", "json", cwd=tmp_path))
    names = {package["name"].lower().replace("_", "-") for package in packages}
    assert names == {"detent", "numpy", "ml-dtypes", "array-api-compat"}


@pytest.mark.slow
def test_install_without_a_compiler_runs_the_reference_kernels(sdist, venv, pinned, tmp_path):
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    source = unpacked(sdist, tmp_path / "source")
    pip(venv, "install", ".", cwd=source, PATH=str(nothing), CC=None, CXX=None, **pinned)
    assert "level none" in smoke(venv, "reference", tmp_path)


@pytest.mark.slow
@needs_compiler
def test_wheel_holds_the_package_and_nothing_else(wheel, root):
    assert wheel.name.startswith(f"detent-{dt.__version__}-{TAG}-")
    info = f"detent-{dt.__version__}.dist-info"
    expected = files_of(root / "src") | {EXTENSION}
    expected |= {f"{info}/{name}" for name in ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE")}
    names = set(zipfile.ZipFile(wheel).namelist())
    assert names == expected
    assert "detent/py.typed" in names


@pytest.mark.slow
@needs_compiler
def test_metadata_is_that_of_the_project(wheel, root):
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    with zipfile.ZipFile(wheel) as archive:
        metadata = HeaderParser().parsestr(archive.read(f"detent-{dt.__version__}.dist-info/METADATA").decode())
    required = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    assert (metadata["Name"], metadata["Version"]) == ("detent", dt.__version__)
    assert metadata["Requires-Python"] == project["requires-python"] == ">=3.11"
    assert sorted(required) == sorted(project["dependencies"])
    assert set(metadata.get_all("Provides-Extra")) == set(project["optional-dependencies"])
    assert (metadata["License-Expression"], metadata["License-File"]) == ("Apache-2.0", "LICENSE")


@pytest.mark.slow
def test_sdist_holds_what_a_build_and_its_tests_need(sdist, root, tmp_path):
    source = unpacked(sdist, tmp_path / "source")
    files = {path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()}
    sources = {path.relative_to(root).as_posix() for path in root.glob("native/**/*.[ch]pp")}
    package = {f"src/{name}" for name in files_of(root / "src")}
    others = {"pyproject.toml", "CMakeLists.txt", "LICENSE", "README.md", "constraints.txt", "Makefile", "PKG-INFO"}
    others |= {"mkdocs.yml"}
    more = {"CHANGELOG.md", "CONTRIBUTING.md", "benchmarks", "docs", "examples", "native", "src", "tests", "zoo"}
    assert sources
    assert sources | package | others | {"tests/conftest.py", "tests/packaging/smoke.py"} <= files
    assert {name.partition("/")[0] for name in files} == others | more
    generated = [name for name in files if "__pycache__" in name or name.endswith((".pyc", ".so", ".o"))]
    assert generated == []


@pytest.mark.parametrize("kernels", ["native", "reference"])
def test_smoke_test_tells_the_kernels_apart(kernels, tmp_path):
    if kernels == HERE:
        assert run(sys.executable, SMOKE, kernels, cwd=tmp_path).count("\n") == 1
    else:
        with pytest.raises(AssertionError, match="native kernels"):
            run(sys.executable, SMOKE, kernels, cwd=tmp_path)
