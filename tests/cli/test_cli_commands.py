"""All commands except `quantize`, on good and on bad input."""

import json
import re
import shutil
import subprocess
import sys
from math import nan

import numpy as np
import onnx
import pytest

import detent as dt
import detent.onnx as qo
from detent.cli import main, verify_command
from detent.cli.inspect_command import TensorRow
from detent.onnx_model import save
from detent.verification import EndToEnd, VerifyReport

from .cli_cases import detent, environment

COMMANDS = ["demo", "quantize", "verify", "inspect", "compare", "sensitivity", "bench", "doctor"]


def run(monkeypatch, capsys, folder, *arguments):
    """Run a command in this process, because that is faster; return exit code, stdout and stderr."""
    monkeypatch.chdir(folder)
    code = main([str(each) for each in arguments])
    return code, *capsys.readouterr()


def test_help_without_arguments():
    done = detent()
    assert done.returncode == 0
    for name in COMMANDS:
        assert f"\n  {name} " in done.stdout
    assert "Exit codes" in done.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_help_begins_with_what_it_does_and_has_an_example(name, capsys):
    assert main([name, "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert re.search(rf"Usage: detent {name} .*? (Train,|Quantize|Verify|Show|Compare|Measure|Time) ", text)
    assert f"Example: detent {name}" in text
    assert "--json" in text


def test_version():
    done = detent("--version")
    assert (done.returncode, done.stdout) == (0, f"detent {dt.__version__}\n")


def test_help_loads_nothing_heavy():
    code = "import sys; from detent.cli import main; main(['quantize', '--help']); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    loaded = {name.partition(".")[0] for name in done.stderr.split()}
    assert {"detent", "typer", "rich"} <= loaded
    assert not loaded & {"torch", "onnx", "onnxruntime", "jinja2", "openvino"}


def test_completion():
    done = detent(_DETENT_COMPLETE="complete_bash", COMP_WORDS="detent qu", COMP_CWORD="1")
    assert "quantize" in done.stdout


def test_unknown_command():
    done = detent("quantizer")
    assert done.returncode == 2
    assert "No such command" in done.stderr


# verify


def test_verify(shop):
    done = detent(
        "verify", "model.onnx", "model.w8a8.onnx", "-d", "calib.npz", "--batches", 3, "--levels", "1,3", cwd=shop
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ok: the file matches its source and its decisions")
    assert "integer kernels, 0 of " in done.stdout


def test_verify_without_data_replays(shop):
    done = detent("verify", "model.onnx", "model.w8a8.onnx", "--json", cwd=shop)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert (document["ok"], document["levels"], document["batches"], document["replay"]["differences"]) == (
        True,
        [1],
        0,
        [],
    )
    done = detent("verify", "model.onnx", "model.w8a8.onnx", "--levels", "2", cwd=shop)
    assert done.returncode == 2
    assert "need data" in done.stderr


@pytest.mark.parametrize(
    ("limit", "complaint"),
    [
        (["--fail-below-sqnr", 0, "--fail-below-agreement", 0.1], ""),
        (["--fail-below-sqnr", 150], "not ok: the SQNR of output y is "),
        (["--fail-below-agreement", 1], "not ok: the top-1 agreement is 0."),
    ],
    ids=["met", "sqnr", "agreement"],
)
def test_verify_with_limits(shop, limit, complaint, tmp_path, monkeypatch, capsys):
    x = (
        np.random.default_rng(1).normal(size=(200, 8, 1, 1)).repeat(8, axis=2).repeat(8, axis=3)
    )  # samples of many classes
    np.savez(tmp_path / "data.npz", x=x.astype(np.float32))
    result = qo.quantize(shop / "model.onnx", tmp_path / "q.onnx", tmp_path / "data.npz", recipe="w2a8", progress=False)
    arguments = ["verify", "model.onnx", result.output, "-d", tmp_path / "data.npz", *limit]
    code, out, _ = run(monkeypatch, capsys, shop, *arguments)
    first, *others = out.splitlines()
    assert code == (1 if complaint else 0)
    assert first.startswith(complaint or "ok: ")
    assert not any(line.startswith("ok: ") for line in others)
    code, out, _ = run(monkeypatch, capsys, shop, *arguments, "--json")
    document = json.loads(out)
    assert (code, document["ok"]) == ((1, False) if complaint else (0, True))
    assert [f"not ok: {each}" for each in document["below"]] == ([first] if complaint else [])
    assert document["failure"] == "".join(document["below"])


@pytest.mark.parametrize(
    ("end_to_end", "missed"),
    [
        (EndToEnd(output_sqnr_db={"y": 40.0, "z": 20.0}, agreement=0.99), []),
        (EndToEnd(output_sqnr_db={"y": 40.0, "z": 19.0}, agreement=1.0), ["the SQNR of output z is 19.0 dB, below"]),
        (EndToEnd(output_sqnr_db={"y": 40.0, "z": nan}, agreement=1.0), ["the SQNR of output z is nan dB, below"]),
        (
            EndToEnd(output_sqnr_db={"y": 40.0}, agreement=0.98),
            ["the top-1 agreement is 0.98, below the limit of 0.99"],
        ),
        (EndToEnd(output_sqnr_db={"y": 40.0}), ["--fail-below-agreement needs class scores"]),
        (EndToEnd(), ["--fail-below-sqnr needs a float output", "--fail-below-agreement needs class scores"]),
    ],
    ids=["met", "sqnr", "nan", "agreement", "no classes", "no float output"],
)
def test_limits_of_verify(end_to_end, missed):
    report = VerifyReport((2,), 1, 0, 0, end_to_end={"optimized": end_to_end})
    below = verify_command._below(report, 20.0, 0.99)
    assert [each.startswith(start) for each, start in zip(below, missed, strict=True)] == [True] * len(missed)


def test_verify_finds_a_difference(shop, tmp_path):
    model = onnx.load(shop / "model.w8a8.onnx")
    codes = next(tensor for tensor in model.graph.initializer if tensor.name == "w2_codes")
    raw = bytearray(codes.raw_data)
    raw[7] ^= 1
    codes.raw_data = bytes(raw)
    onnx.save(model, tmp_path / "changed.onnx")
    done = detent(
        "verify", "model.onnx", tmp_path / "changed.onnx", "-d", "few.npz", "--levels", "1", "--json", cwd=shop
    )
    assert done.returncode == 1
    document = json.loads(done.stdout)
    assert not document["ok"]
    assert document["differing_codes"] or document["first_difference"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["model.onnx", "model.onnx", "-d", "few.npz"], "quantize"),
        (["model.onnx", "nothing.onnx", "-d", "few.npz"], "there is no such file"),
        (["model.onnx", "model.w8a8.onnx", "-d", "nothing.npz"], "nothing.npz"),
        (["model.onnx", "model.w8a8.onnx", "-d", "few.npz", "--levels", "4"], "expected numbers from 1 to 3"),
        (["model.onnx", "model.w8a8.onnx", "--fail-below-sqnr", "20"], "--data"),
        (["model.onnx", "model.w8a8.onnx", "-d", "few.npz", "--fail-below-sqnr", "nan"], "must be numbers, got nan"),
        (["model.onnx", "model.w8a8.onnx", "-d", "few.npz", "--fail-below-agreement", "nan"], "--fail-below-agreement"),
    ],
    ids=["float", "no file", "no data", "level", "usage", "sqnr nan", "agreement nan"],
)
def test_verify_bad_input(shop, arguments, complaint, monkeypatch, capsys):
    code, out, err = run(monkeypatch, capsys, shop, "verify", *arguments)
    assert (code, out) == (2, "")
    assert complaint in err


# inspect


def test_inspect_quantized(shop):
    done = detent("inspect", "model.w8a8.onnx", cwd=shop)
    assert done.returncode == 0, done.stderr
    for part in ("recipe w8a8, target onnxruntime", "sha256", "3 weights, 3 biases", "int8 axis0", "activation"):
        assert part in done.stdout
    rows = [TensorRow(**{**row, "shape": row["shape"] and tuple(row["shape"])}).cells() for row in tensors(shop)]
    for row in rows:
        assert any(all(cell in line for cell in row) for line in done.stdout.splitlines())
    assert "producer" not in done.stdout


def tensors(folder):
    return json.loads(detent("inspect", "model.w8a8.onnx", "--json", cwd=folder).stdout)["tensors"]


def test_inspect_names_the_producer(shop, tmp_path, monkeypatch, capsys):
    model = onnx.load(shop / "model.onnx")
    model.producer_name, model.producer_version = "pytorch", "2.9"
    onnx.save(model, tmp_path / "a.onnx")
    assert "producer: pytorch 2.9\n" in run(monkeypatch, capsys, tmp_path, "inspect", "a.onnx")[1]


def test_inspect_json(shop, monkeypatch, capsys):
    code, out, _ = run(monkeypatch, capsys, shop, "inspect", "model.w8a8.onnx", "--json")
    document = json.loads(out)
    assert (code, document["is_quantized"], document["provenance"]["target"]) == (0, True, "onnxruntime")
    rows = {row["name"]: row for row in document["tensors"]}
    weight = onnx.numpy_helper.to_array(next(t for t in onnx.load("model.onnx").graph.initializer if t.name == "w2"))
    assert rows["w2_codes"]["high"] == pytest.approx(weight.max(), rel=0.02)
    assert rows["x"]["kind"] == "activation"
    assert rows["x"]["low"] < -1 < 1 < rows["x"]["high"]


def test_inspect_without_bz2_shows_the_rest(shop, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "bz2", None)
    code, out, _ = run(monkeypatch, capsys, shop, "inspect", "model.w8a8.onnx")
    assert code == 0
    assert "this Python was built without the module bz2" in out


def test_inspect_float(shop, monkeypatch, capsys):
    code, out, _ = run(monkeypatch, capsys, shop, "inspect", "model.onnx", "--json")
    document = json.loads(out)
    assert (code, document["is_quantized"], document["provenance"]) == (0, False, None)
    assert [row["name"] for row in document["tensors"]][:2] == ["w2", "w1"]
    assert document["inputs"] == {"x": "float[n, 8, 8, 8]"}


def test_inspect_safetensors(tmp_path):
    x = np.linspace(-1, 1, 64, dtype=np.float32).reshape(4, 16)
    dt.quantize(x, dt.QuantParams.from_data("int4/axis0", x)).save(tmp_path / "q.safetensors")
    done = detent("inspect", "q.safetensors", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for part in ("int4/axis0/symmetric/onnx", "4x16", "-1 .. 1", "scales: 4", "codes in use"):
        assert part in done.stdout


def test_inspect_resume_file_of_observers(tmp_path, monkeypatch, capsys):
    observer = dt.observers.MinMax()
    dt.observers.calibrate([np.float32([1, 2])], observer, resume_file=tmp_path / "c.bin", progress=False)
    code, out, _ = run(monkeypatch, capsys, tmp_path, "inspect", "c.bin", "--json")
    document = json.loads(out)
    assert code == 0
    assert "detent.calibration" in document["metadata"]
    assert "quantized_tensor" not in document


@pytest.mark.parametrize(
    ("name", "content"),
    [("junk.onnx", b"junk"), ("junk.safetensors", b"12345678{"), ("empty", b""), ("none", None), ("directory", ...)],
    ids=["onnx", "safetensors", "empty", "none", "directory"],
)
def test_inspect_bad_input(tmp_path, monkeypatch, capsys, name, content):
    if content is ...:
        (tmp_path / name).mkdir()
    elif content is not None:
        (tmp_path / name).write_bytes(content)
    code, out, err = run(monkeypatch, capsys, tmp_path, "inspect", name)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert ("inspect reads ONNX models, safetensors and GGUF files" in err) == (name == "empty")


# compare


@pytest.fixture(scope="module")
def pair(shop):
    """Two models and two reports."""
    done = detent(
        "quantize", "model.onnx", "-d", "calib.npz", "--recipe", "w4a8", "--report", "b.json", "--quiet", cwd=shop
    )
    assert done.returncode == 0, done.stderr
    return shop


@pytest.mark.parametrize(
    "both", [("a.json", "b.json"), ("model.w8a8.onnx", "model.w4a8.onnx")], ids=["reports", "models"]
)
def test_compare(pair, both, tmp_path):
    done = detent("compare", *both, "--report", tmp_path / "c.html", cwd=pair)
    assert done.returncode == 0, done.stderr
    for part in ("second", "head", "first"):
        assert part in done.stdout
    assert "second" in (tmp_path / "c.html").read_text(encoding="utf-8")


def test_compare_with_data(pair, monkeypatch, capsys):
    code, out, err = run(
        monkeypatch, capsys, pair, "compare", "model.w8a8.onnx", "model.w4a8.onnx", "-d", "few.npz", "--source",
        "model.onnx", "--json",
    )  # fmt: skip
    assert code == 0, err
    assert json.loads(out)


def test_compare_sees_other_codes_in_the_same_bytes(pair, monkeypatch, capsys):
    done = detent("quantize", "model.onnx", "-d", "calib.npz", "--recipe", "w6a8", "--quiet", cwd=pair)
    assert done.returncode == 0, done.stderr
    both = ["compare", "model.w8a8.onnx", "model.w6a8.onnx"]
    document = json.loads(run(monkeypatch, capsys, pair, *both, "--json")[1])
    second = next(layer for layer in document["layers"] if layer["name"] == "second")
    assert (second["nbytes_change"], second["is_changed"]) == (0, True)
    assert second["a"]["weight"]["spec"] == second["b"]["weight"]["spec"] == "int8/axis0"
    text = run(monkeypatch, capsys, pair, *both)[1]
    assert "codes -64..64" in text
    assert "codes -31..31" in text
    same = json.loads(run(monkeypatch, capsys, pair, "compare", "model.w8a8.onnx", "model.w8a8.onnx", "--json")[1])
    assert not any(layer["is_changed"] for layer in same["layers"])


def test_compare_shows_what_quantize_measured(pair, monkeypatch, capsys):
    line = next(line for line in (pair / "quantize.txt").read_text().splitlines() if line.startswith("  SQNR:"))
    assert f" {line.split()[1]} dB" in run(monkeypatch, capsys, pair, "compare", "a.json", "b.json")[1].splitlines()[0]


def test_compare_strangers(pair, tmp_path, monkeypatch, capsys):
    model = onnx.load(pair / "model.onnx")
    for node in model.graph.node:
        node.name = f"other/{node.name}"
    onnx.save(model, tmp_path / "other.onnx")
    run(monkeypatch, capsys, tmp_path, "quantize", "other.onnx", "--recipe", "w8a16", "-q", "--no-bench")
    code, out, _ = run(monkeypatch, capsys, pair, "compare", "model.w8a8.onnx", tmp_path / "other.w8a16.onnx")
    assert code == 0
    assert "the two models share no layer names: were both made from the same float model?" in out


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["a.json", "nothing.json"], "there is no such file"),
        (["a.json", "broken.json"], ""),
        (["a.json", "a.json", "-d", "few.npz"], "--data and --source are only for models"),
        (["model.w8a8.onnx", "few.npz"], "not an ONNX model"),
        (["model.w8a8.onnx", "model.onnx"], "model.onnx is not quantized"),
        (["model.w8a8.onnx", "model.w4a8.onnx", "-d", "few.npz"], "add --source (the float model)"),
        (["model.w8a8.onnx", "model.w4a8.onnx", "--source", "model.onnx"], "add --data"),
    ],
    ids=["no file", "broken", "data", "no model", "float", "data alone", "source alone"],
)
def test_compare_bad_input(pair, arguments, complaint, monkeypatch, capsys):
    (pair / "broken.json").write_text('{"a": 1}')
    code, out, err = run(monkeypatch, capsys, pair, "compare", *arguments)
    assert (code, out) == (2, "")
    assert complaint in err


# sensitivity


def test_sensitivity(shop, tmp_path):
    done = detent(
        "sensitivity", "model.onnx", "-d", "calib.npz", "--widths", "3,4,6,8", "--budget", "30%", "--save-recipe",
        tmp_path / "mix.toml", "--samples", 8, "--report", tmp_path / "s.html", cwd=shop,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for part in ("int3", "chosen", "dB predicted", "dB measured", "8 samples"):
        assert part in done.stdout
    assert len(dt.Recipe.load(tmp_path / "mix.toml").rules) == 3
    page = (tmp_path / "s.html").read_text(encoding="utf-8")
    assert "<h1>model.onnx with the chosen allocation (not written)</h1>" in page
    assert "detent sensitivity model.onnx -d calib.npz --widths 3,4,6,8" in page


def test_sensitivity_json(shop, monkeypatch, capsys):
    code, out, err = run(monkeypatch, capsys, shop, "sensitivity", "model.onnx", "-d", "few.npz", "--json")
    assert code == 0, err
    document = json.loads(out)
    assert {layer["name"] for layer in document["sensitivity"]["layers"]} == {"first", "second", "head"}
    assert document["mix"] is None


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["nothing.onnx", "-d", "few.npz"], "there is no such file"),
        (["model.onnx", "-d", "few.npz", "--widths", "4,many"], "expected numbers of bits from 2 to 8"),
        (["model.onnx", "-d", "few.npz", "--widths", "4", "--budget", "5"], "the smallest needs"),
        (["model.onnx", "-d", "few.npz", "--widths", "4", "--budget", "200%"], "invalid percentage '200%'"),
        (["model.onnx", "-d", "few.npz", "--save-recipe", "mix.toml"], "pass --budget"),
        (["model.onnx"], "--data"),
    ],
    ids=["no file", "widths", "budget", "share", "recipe", "usage"],
)
def test_sensitivity_bad_input(shop, arguments, complaint, monkeypatch, capsys):
    code, out, err = run(monkeypatch, capsys, shop, "sensitivity", *arguments)
    assert (code, out) == (2, "")
    assert complaint in err


# bench


def test_bench(shop):
    done = detent("bench", "model.onnx", "model.w8a8.onnx", "--shape", "x=2,8,8,8", "--repeat", 4, cwd=shop)
    assert done.returncode == 0, done.stderr
    assert "medians of 4 alternating runs per model, 1 thread, random inputs: x 2x8x8x8" in done.stdout


def test_bench_with_data(shop, monkeypatch, capsys):
    code, out, _ = run(
        monkeypatch,
        capsys,
        shop,
        "bench",
        "model.onnx",
        "model.w8a8.onnx",
        "-d",
        "few.npz",
        "--json",
        "--batch-size",
        2,
    )
    document = json.loads(out)
    assert (code, document["inputs"], document["random"]) == (0, {"x": [2, 8, 8, 8]}, False)
    assert document["times_as_fast"] == pytest.approx(document["ms_float"] / document["ms_quantized"])


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--shape", "x=2,3"], "has shape (2, 3)"),
        (["--shape", "z=2"], "no input 'z'"),
        (["--shape", "x"], "expected NAME=1,3,224,224"),
        (["-d", "nothing.npz"], "nothing.npz"),
        (["-d", "few.npz", "--shape", "x=2,8,8,8"], "--shape is only for random inputs"),
    ],
    ids=["shape", "name", "text", "data", "both"],
)
def test_bench_bad_input(shop, arguments, complaint, monkeypatch, capsys):
    code, out, err = run(monkeypatch, capsys, shop, "bench", "model.onnx", "model.w8a8.onnx", *arguments)
    assert (code, out) == (2, "")
    assert complaint in err


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        (["nothing.onnx", "model.onnx"], "error: nothing.onnx: there is no such file"),
        (["model.onnx", "nothing.onnx"], "error: nothing.onnx: there is no such file"),
        (["few.npz", "model.onnx"], "error: few.npz is not an ONNX model"),
        (["model.onnx", "few.npz"], "error: few.npz is not an ONNX model"),
    ],
    ids=["no first", "no second", "first", "second"],
)
def test_bench_wants_models(shop, monkeypatch, capsys, files, complaint):
    code, out, err = run(monkeypatch, capsys, shop, "bench", *files)
    assert (code, out) == (2, "")
    assert err.startswith(complaint)


def test_bench_says_which_types_cannot_be_made_up(tmp_path, monkeypatch, capsys):
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> g (string[1] x) => (string[1] y) { y = Identity(x) }'
    )
    save(model, tmp_path / "text.onnx")
    code, _, err = run(monkeypatch, capsys, tmp_path, "bench", "text.onnx", "text.onnx")
    assert code == 2
    assert "cannot generate random object values" in err


# doctor


def test_doctor(tmp_path):
    (tmp_path / "tokenizers.py").write_text("")  # the only package that may be missing where the tests run
    done = detent("doctor", path=tmp_path, DETENT_KERNELS="native")
    assert done.returncode == 0, done.stderr
    for part in (
        dt.__version__,
        "instruction set  ",
        "threads ",
        "kernels          all 14 operations have native kernels",
        "onnxruntime",
    ):
        assert part in done.stdout
    assert done.stdout.splitlines()[1] == "missing          nothing"
    assert "fake_quantize" not in done.stdout


def test_doctor_tells_of_all_operations(monkeypatch, capsys, tmp_path):
    with dt.use_kernels("reference"):  # with reference kernels, the table is printed without --all
        _, table, _ = run(monkeypatch, capsys, tmp_path, "doctor")
    _, everything, _ = run(monkeypatch, capsys, tmp_path, "doctor", "--all")
    for text in (table, everything):
        assert "fake_quantize_learned_backward" in text
        assert len([line for line in text.splitlines() if line.startswith("threads ")]) == 1
    assert "operations have native kernels" not in table


def test_doctor_checks_gpu_kernels(monkeypatch, capsys, tmp_path):
    from detent.torch.gpu import readiness

    _, text, _ = run(monkeypatch, capsys, tmp_path, "doctor", "--gpu")
    assert re.search(r"PyTorch +2\.", text)
    assert re.search(r"^GPUs +\w", text, re.MULTILINE)
    monkeypatch.setattr(readiness, "report", lambda state: {"cuda:0 A100 float32": "ready"})
    _, text, _ = run(monkeypatch, capsys, tmp_path, "doctor", "--gpu")
    assert "cuda:0 A100 float32 ready" in text


def test_doctor_names_what_is_missing(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nfor name in ('torch', 'jinja2'):\n    sys.modules[name] = None\n"
    )
    (tmp_path / "tokenizers.py").write_text("")
    done = subprocess.run(
        [sys.executable, "-m", "detent", "doctor", "--json"],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert {each["extra"]: each["install"] for each in document["missing"]} == {
        "torch": "pip install 'detent[torch]'",
        "report": "pip install 'detent[report]'",
    }
    assert document["packages"]["onnx"]
    text_run = subprocess.run(
        [sys.executable, "-m", "detent", "doctor"], env=environment(tmp_path), capture_output=True, text=True,
        check=False, timeout=60,
    )  # fmt: skip
    assert text_run.stdout.splitlines()[1].startswith("missing          torch (for quantization-aware training")
    assert text_run.stdout.splitlines()[2].endswith("pip install 'detent[report]'")


# demo


def test_demo_names_all_that_it_writes(capsys):
    assert main(["demo", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for name in (
        "demo-report.html",
        "demo-float.onnx",
        "demo-w4-qat.onnx",
        "demo-calibration.npz",
        "replaces existing files",
    ):
        assert name in text


def test_demo_bad_input(tmp_path):
    done = detent("demo", tmp_path / "nothing")
    assert done.returncode == 2
    assert "nothing is not a directory" in done.stderr
    assert done.stdout == ""


@pytest.mark.slow
def test_demo(tmp_path):
    done = detent("demo", "--quick", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ok"]
    assert (tmp_path / "demo-report.html").is_file()


# all


def test_no_file_is_replaced_without_force(shop, tmp_path, monkeypatch, capsys):
    for name in ("a.json", "model.onnx", "few.npz"):
        shutil.copy(shop / name, tmp_path / name)
    kept = (tmp_path / "a.json").read_bytes()
    for arguments in (
        ["quantize", "model.onnx", "-d", "few.npz", "--report", "a.json"],
        ["sensitivity", "model.onnx", "-d", "few.npz", "--report", "a.json"],
        ["compare", "a.json", "a.json", "--report", "a.json"],
    ):
        code, _, err = run(monkeypatch, capsys, tmp_path, *arguments)
        assert code == 2
        assert "a.json already exists" in err
    assert (tmp_path / "a.json").read_bytes() == kept
