"""`detent quantize`: files, summary and rejected input."""

import json
import re
import shlex
import shutil

import numpy as np
import onnx
import pytest

import detent as dt
import detent.onnx as qo
import detent.report as qr
import detent.sensitivity as qs
from detent.cli import main
from detent.evaluate.speed import Timing
from detent.onnx_model import Provenance, make_session
from detent.onnx_model.batches import open_batches
from detent.onnx_model.model_inputs import inputs_of
from tests.onnx.onnx_graphs import warning_codes

from .cli_cases import detent, write_data, write_model


@pytest.fixture
def desk(shop, tmp_path):
    """A new directory with model and data."""
    for name in ("model.onnx", "calib.npz", "few.npz"):
        shutil.copy(shop / name, tmp_path / name)
    return tmp_path


def test_output_lies_beside_the_model(shop):
    assert (shop / "model.w8a8.onnx").is_file()
    onnx.checker.check_model(onnx.load(shop / "model.w8a8.onnx"))


@pytest.mark.parametrize(
    "part",
    [
        "size:",
        "on 2 held-out batches",
        "agreement:",
        "time:",
        "integer kernels:   3 of 3 layers",
        "verified: ok: the file matches its source and its decisions; ",
        "--skip head",
        "report: a.json",
    ],
)
def test_summary(shop, part):
    assert part in (shop / "quantize.txt").read_text(encoding="utf-8")


def test_not_more_than_80_columns_and_no_colour(shop):
    text = (shop / "quantize.txt").read_text(encoding="utf-8")
    assert max(map(len, text.splitlines())) <= 80
    assert "\x1b" not in text + (shop / "quantize.err").read_text(encoding="utf-8")


def test_origin_is_in_the_file(shop):
    model = onnx.load(shop / "model.w8a8.onnx")
    about = Provenance.read(model)
    batches = list(open_batches(shop / "calib.npz", inputs_of(onnx.load(shop / "model.onnx"))))
    kept = open_batches([feed for i, feed in enumerate(batches) if i % 10 != 9], inputs_of(model))
    assert len(list(kept.hashed())) == 22
    assert about.data == kept.fingerprint()
    assert about.made_by == dt.__version__
    assert dt.Recipe.from_json(about.recipe) == dt.Recipe.preset("w8a8")


def test_result_verifies(shop):
    assert dt.verify(shop / "model.onnx", shop / "model.w8a8.onnx", shop / "calib.npz", levels=(1, 3)).ok


def test_existing_file_is_kept(shop):
    before = (shop / "model.w8a8.onnx").read_bytes()
    done = detent("quantize", "model.onnx", "--data", "calib.npz", cwd=shop)
    assert done.returncode == 2
    assert "model.w8a8.onnx already exists: pass --force" in done.stderr
    assert (shop / "model.w8a8.onnx").read_bytes() == before


def test_json_is_all_there_is_on_stdout(desk):
    done = detent("quantize", "model.onnx", "-d", "few.npz", "--recipe", "w4a8", "--json", "--skip", "first", cwd=desk)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["ok"]
    assert document["output"] == "model.w4a8.onnx"
    assert document["nbytes_after"] == (desk / "model.w4a8.onnx").stat().st_size
    assert not document["evaluated_on_held_out"]
    assert document["differing_codes"] == 0 < document["compared_codes"]
    assert [layer["reason"] for layer in document["layers"]] == ["skipped", "", ""]
    assert "first" not in [each["layer"] for each in document["sensitive_layers"]]
    assert document["ms_float"] > 0 < document["ms_quantized"]


def test_limits_missed(desk):
    done = detent(
        "quantize",
        "model.onnx",
        "-d",
        "few.npz",
        "--fail-below-sqnr",
        200,
        "--no-rank",
        "--no-bench",
        "--json",
        cwd=desk,
    )
    assert done.returncode == 1
    assert "below the limit of 200 dB" in done.stderr
    assert not json.loads(done.stdout)["ok"]
    kept = detent(
        "quantize", "model.onnx", "-d", "few.npz", "--fail-below-sqnr", 20, "--fail-below-agreement", 0.5, "--force",
        "--no-rank", "--no-bench", "--quiet", cwd=desk,
    )  # fmt: skip
    assert (kept.returncode, kept.stdout, kept.stderr) == (0, "", "")


QUICKLY = ("--no-rank", "--no-bench", "--no-verify", "--force")


def test_one_figure_everywhere(desk, monkeypatch, capsys):
    """The SQNR on held-out batches is the same in the summary, in JSON and in the report."""
    monkeypatch.chdir(desk)
    arguments = ["quantize", "model.onnx", "-d", "calib.npz", *QUICKLY]
    assert main([*arguments, "--report", "r.html"]) == 0
    shown = re.search(r"SQNR: +([0-9.]+) dB, on 2 held-out batches", capsys.readouterr().out)[1]
    assert main([*arguments, "--report", "r.json", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    page, kept = (desk / "r.html").read_text(encoding="utf-8"), qr.Report.load("r.json")
    tile = re.search(r"<dt>Output SQNR</dt>\s*<dd><span class=\"big\">([0-9.]+) dB</span>(.*)", page)
    assert shown == tile[1] == f"{document['sqnr_db']:.1f}"
    assert "on 2 held-out batches" in tile[2]
    assert kept.sqnr_db == document["sqnr_db"]
    assert kept.agreement == document["agreement"]
    assert document["sqnr_db_by_output"] == {"y": document["sqnr_db"]}
    assert document["calibration_sqnr_db"] == document["calibration_sqnr_db_by_output"]["y"] != document["sqnr_db"]
    assert "output_sqnr_db" not in document


def test_the_page_has_the_command_and_says_nothing_twice(desk, monkeypatch, capsys):
    monkeypatch.chdir(desk)
    arguments = ["quantize", "model.onnx", "-d", "few.npz", "--skip", "he*", "--no-rank", "--report", "r.json"]
    assert main(arguments) == 0
    page = qr.Report.load("r.json")
    assert page.reproduction.command == "detent " + shlex.join(arguments)
    assert [name for name, _ in page.facts if name != "Warning: slower"] == ["Time", "Warning: few-samples"]
    assert "  float kernel:      head: skipped\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("ms", "tried_ms", "hints", "warns"),
    [(2.0, 0.5, False, True), (0.99, 0.5, True, False), (0.99, 0.99, False, False), (0.5, 0.4, False, False)],
    ids=["slow", "same", "same, and no option helps", "fast"],
)
def test_a_hint_where_it_is_not_faster(desk, monkeypatch, capsys, ms, tried_ms, hints, warns):
    def times(_first, second, *_, **__):
        return Timing(1.0, tried_ms if isinstance(second, onnx.ModelProto) else ms, 3, 1)

    monkeypatch.chdir(desk)
    monkeypatch.setattr("detent.evaluate.evaluation.time_models", times)
    monkeypatch.setattr("detent.evaluate.speed_advice.has_vnni", lambda: True)
    options = ["--no-rank", "--no-verify", "--prefer", "accuracy"]
    flag = "--target onnxruntime-vnni (only for CPUs with VNNI): 0.50 ms"
    assert main(["quantize", "model.onnx", "-d", "few.npz", *options, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (f"a faster option for this model: {flag}" in document["hints"]) == hints
    assert [flag in each["text"] for each in document["warnings"] if each["code"] == "slower"] == [True] * warns
    assert main(["quantize", "model.onnx", "-d", "few.npz", *options, "--force"]) == 0
    err = capsys.readouterr().err
    assert (f"hint: a faster option for this model: {flag}\n" in err) == hints
    assert ("warning: slower: " in err) == warns


def test_weights_alone_get_no_hint_of_targets(desk, monkeypatch, capsys):
    monkeypatch.chdir(desk)
    monkeypatch.setattr("detent.evaluate.evaluation.time_models", lambda *_, **__: Timing(1.0, 2.0, 3, 1))
    monkeypatch.setattr("detent.evaluate.speed_advice.has_vnni", lambda: True)
    assert main(["quantize", "model.onnx", "--recipe", "w8a16"]) == 0
    assert "VNNI" not in capsys.readouterr().err


@pytest.mark.parametrize("quiet", [False, True])
def test_passes_and_efforts_are_on_stderr(desk, monkeypatch, capsys, quiet):
    monkeypatch.chdir(desk)
    monkeypatch.setattr("detent.onnx.accuracy_passes.MIN_SECONDS_ANNOUNCED", 0.0)
    arguments = ["quantize", "model.onnx", "-d", "calib.npz", "--effort", "fast", *QUICKLY]
    assert main([*arguments, *(["--quiet"] if quiet else [])]) == 0
    err = capsys.readouterr().err
    announced = re.findall(r"^effort fast takes about \d+ s on this machine \(balanced .*, best .*\)$", err, re.M)
    shares = re.findall(r"^  ([\w ]+): (?:\d+\.\d s|\d+ ms), (<?\d+) %$", err, re.M)
    if quiet:
        assert err == ""
        return
    assert len(announced) == 1
    assert {"calibration", "equalization", "bias correction", "writing"} <= {name for name, _ in shares}
    total = sum(int(share) for _, share in shares if share.isdigit())
    assert 90 <= total <= 110, "rounded, without shares below 1 %"


def test_limits_look_at_the_worst_output(desk, monkeypatch, capsys):
    """The second output is the first minus the mean over samples, so the second has the lower SQNR."""
    monkeypatch.chdir(desk)
    model = onnx.load("model.onnx")
    mean = make_session(model).run(None, dict(np.load("few.npz")))[0].mean(axis=0)
    model.graph.initializer.append(onnx.numpy_helper.from_array(mean, "mean"))
    model.graph.node.append(onnx.helper.make_node("Sub", ["y", "mean"], ["far"], name="far"))
    model.graph.output.append(onnx.helper.make_tensor_value_info("far", onnx.TensorProto.FLOAT, None))
    onnx.save(model, "two.onnx")
    arguments = ["quantize", "two.onnx", "-d", "few.npz", *QUICKLY]
    assert main([*arguments, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    figures = document["sqnr_db_by_output"]
    assert document["sqnr_db"] == figures["far"] < figures["y"]
    assert document["sqnr_db_output"] == "far"
    limit = (figures["far"] + figures["y"]) / 2
    assert main([*arguments, "--fail-below-sqnr", str(limit)]) == 1
    out, err = capsys.readouterr()
    assert f"the SQNR of output far is {figures['far']:.1f} dB, below the limit" in err
    assert re.search(r"SQNR of far: +[0-9.]+ dB, on .*\n +SQNR of y: +[0-9.]+ dB\n", out)


def test_weights_alone_need_no_data(desk):
    done = detent("quantize", "model.onnx", "--recipe", "w8a16", "-o", "small.onnx", cwd=desk)
    assert done.returncode == 0, done.stderr
    assert "not compared: no data" in done.stdout
    assert (desk / "small.onnx").is_file()


def test_dry_run_writes_nothing_and_knows_the_size(desk):
    done = detent("quantize", "model.onnx", "-d", "calib.npz", "--dry-run", "--json", cwd=desk)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in desk.iterdir()) == ["calib.npz", "few.npz", "model.onnx"]
    document = json.loads(done.stdout)
    real = detent("quantize", "model.onnx", "-d", "calib.npz", "--no-rank", "--no-bench", "--no-verify", cwd=desk)
    assert real.returncode == 0, real.stderr
    assert abs(document["nbytes_after"] / (desk / "model.w8a8.onnx").stat().st_size - 1) <= 0.01
    assert document["memory_bytes"] > 1 << 20
    assert document["seconds"] > 0
    assert [layer["name"] for layer in document["layers"]] == ["first", "second", "head"]


def test_dry_run_table(desk):
    done = detent("quantize", "model.onnx", "--recipe", "w4a16-g8", "--dry-run", cwd=desk)
    assert done.returncode == 0, done.stderr
    for part in ("per-group scales need a MatMul", "memory:  at most", "time:    about", "(not written)"):
        assert part in done.stdout
    assert "already exists" not in done.stdout


def test_dry_run_tells_that_the_output_exists(shop, monkeypatch, capsys):
    monkeypatch.chdir(shop)
    arguments = ["quantize", "model.onnx", "-d", "few.npz", "--dry-run"]
    assert main(arguments) == 0
    assert "  already exists: pass --force to replace it\n" in capsys.readouterr().out
    assert main([*arguments, "--force"]) == 0
    assert "already exists" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["nothing.onnx", "-d", "few.npz"], "nothing.onnx: there is no such file"),
        (["few.npz", "-d", "few.npz"], "few.npz is not an ONNX model"),
        (["model.onnx"], "quantizes activations"),
        (["model.onnx", "-d", "nothing.npz"], "nothing.npz"),
        (["model.onnx", "-d", "model.onnx"], "model.onnx"),
        (["model.onnx", "-d", "other.npz"], "input 'x' has shape"),
        (["model.onnx", "-d", "nan.npz"], "NaN"),
        (["model.onnx", "-d", "few.npz", "--recipe", "w9a9"], "w9a9"),
        (["model.onnx", "-d", "few.npz", "--recipe", "nothing.toml"], "nothing.toml"),
        (["model.onnx", "-d", "few.npz", "--observer", "maxmin"], "did you mean 'minmax'"),
        (["model.onnx", "-d", "few.npz", "--target", "onnxruntime-vni"], "did you mean 'onnxruntime-vnni'"),
        (["model.onnx", "-d", "few.npz", "--skip", "haed"], "did you mean 'head'"),
        (["model.onnx", "-d", "few.npz", "--memory-budget", "much"], "invalid size 'much'"),
        (
            ["model.onnx", "-d", "few.npz", "--report", "report.pdf"],
            "report.pdf: expected a file name that ends in .html",
        ),
        (["model.onnx", "-d", "few.npz", "-o", "model.onnx", "--force"], "model.onnx is the model itself"),
        (["model.onnx", "-d", "few.npz", "-o", "few.npz/a.onnx"], "few.npz is not a directory"),
        (["model.onnx", "-d", "few.npz", "-o", "/proc/a.onnx"], "/proc"),
        (["model.onnx", "--recipe", "w8a16", "--fail-below-sqnr", "3"], "need data: pass --data"),
        (["model.onnx", "--fail-below-agreement", "3"], "--fail-below-agreement"),
        (["model.onnx", "-d", "few.npz", "--fail-below-sqnr", "nan"], "must be numbers, got nan"),
        (["model.onnx", "-d", "few.npz", "--fail-below-agreement", "nan"], "--fail-below-agreement"),
        (["model.onnx", "-d", "few.npz", "--dry-run", "--fail-below-sqnr", "3"], "--dry-run compares no outputs"),
        (["model.onnx", "--nothing"], "No such option"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input(desk, arguments, complaint, monkeypatch, capsys):
    monkeypatch.chdir(desk)
    np.savez("other.npz", x=np.zeros((4, 3, 8, 8), np.float32))
    np.savez("nan.npz", x=np.full((4, 8, 8, 8), np.nan, np.float32))
    before = sorted(path.name for path in desk.iterdir())
    assert main(["quantize", *arguments]) == 2
    out, err = capsys.readouterr()
    assert complaint in " ".join(err.replace("│", " ").split())
    assert out == ""
    assert sorted(path.name for path in desk.iterdir()) == before


@pytest.mark.parametrize(
    "arguments",
    [["few.npz", "-d", "few.npz"], ["model.onnx", "-d", "model.onnx"], ["model.onnx", "--nothing"]],
    ids=["wrong file", "wrong data", "usage"],
)
def test_bad_input_gives_no_traceback(shop, arguments):
    done = detent("quantize", *arguments, "-o", "none.onnx", cwd=shop)
    assert done.returncode == 2
    assert done.stderr
    assert "Traceback" not in done.stderr
    assert not (shop / "none.onnx").exists()


def test_agreement_needs_classes(desk):
    model = onnx.load(desk / "model.onnx")
    del model.graph.output[:]
    model.graph.output.append(onnx.helper.make_tensor_value_info("t4", onnx.TensorProto.FLOAT, None))
    onnx.save(model, desk / "maps.onnx")
    done = detent("quantize", "maps.onnx", "-d", "few.npz", "--fail-below-agreement", 0.5, cwd=desk)
    assert done.returncode == 2
    assert "top-1 agreement needs class scores or a label per sample" in done.stderr
    assert not (desk / "maps.w8a8.onnx").exists()


def test_nothing_to_quantize_is_no_success(desk, monkeypatch, capsys):
    monkeypatch.chdir(desk)
    code = main(["quantize", "model.onnx", "-d", "few.npz", "--skip", "*", "--report", "r.html", "--json"])
    out, err = capsys.readouterr()
    assert code == 1
    assert "no layer was quantized, so no file is written: skipped (" in err
    assert json.loads(out)["exit_code"] == 1
    assert not (desk / "r.html").exists()
    assert not (desk / "model.w8a8.onnx").exists()
    assert main(["quantize", "model.onnx", "-d", "few.npz", "--skip", "*", "--dry-run"]) == 1
    assert "skipped (" in capsys.readouterr().err


def test_warns_of_a_target_for_another_cpu(desk, monkeypatch, capsys):
    monkeypatch.chdir(desk)
    for module in ("onnx_model.targets", "evaluate.evaluation"):
        monkeypatch.setattr(f"detent.{module}.has_vnni", lambda: False)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    arguments = ["quantize", "model.onnx", "-d", "few.npz", "--target", "onnxruntime-vnni", "--no-rank", "--no-bench"]
    assert main([*arguments, "--no-verify", "--json", "--report", "r.json"]) == 0
    out, err = capsys.readouterr()
    text = "target onnxruntime-vnni needs a CPU with VNNI"
    assert err.startswith(f"warning: {text}"), "before the work"
    assert f"\nwarning: target: {text}" in err, "and after it"
    (warning,) = [each for each in json.loads(out)["warnings"] if each["code"] == "target"]
    assert warning["text"].startswith(text)
    assert dict(qr.Report.load("r.json").facts)["Warning: target"] == warning["text"]
    assert main([*arguments, "--no-verify", "--dry-run", "--json"]) == 0
    assert [each["code"] for each in json.loads(capsys.readouterr().out)["warnings"]] == ["target", "few-samples"]


def test_a_hint_of_a_target_of_8_bits_is_no_warning(desk, monkeypatch, capsys):
    monkeypatch.chdir(desk)
    monkeypatch.setattr("detent.evaluate.evaluation.has_vnni", lambda: True)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    write_data("enough.npz", samples=40)
    arguments = ["quantize", "model.onnx", "-d", "enough.npz", "--target", "onnxruntime-avx2", "--strict", "--json"]
    assert main([*arguments, *QUICKLY]) == 0
    out, err = capsys.readouterr()
    (hint,) = json.loads(out)["hints"]
    assert hint.startswith("target onnxruntime-avx2 stores weights with 7 bits.")
    assert f"hint: {hint}\n" in err


@pytest.mark.parametrize("code", warning_codes())
def test_strict_and_the_report_have_every_warning(desk, monkeypatch, capsys, code):
    monkeypatch.chdir(desk)
    monkeypatch.setattr(
        "detent.evaluate.evaluation._Evaluator._result_warnings", lambda *_: [qo.QuantizeWarning(code, "some <text>")]
    )
    arguments = ["quantize", "model.onnx", "-d", "few.npz", "--effort", "fast", "--json", "--report", "r.html"]
    assert main([*arguments, *QUICKLY]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["ok"]
    assert json.loads(out)["warnings"] == [{"code": code, "text": "some <text>"}]
    assert f"warning: {code}: some <text>\n" in err
    assert f"<dt>Warning: {code}</dt>" in (page := (desk / "r.html").read_text(encoding="utf-8"))
    assert "some &lt;text&gt;" in page
    assert main([*arguments, *QUICKLY, "--strict"]) == 1
    out, err = capsys.readouterr()
    assert not json.loads(out)["ok"]
    assert f"error: --strict: got 1 warning ({code}), expected none (model.w8a8.onnx was still written)" in err


@pytest.mark.parametrize(("data", "codes"), [("few.npz", ["few-samples"]), ("enough.npz", [])])
def test_a_dry_run_is_strict_too(desk, monkeypatch, capsys, data, codes):
    monkeypatch.chdir(desk)
    write_data("enough.npz", samples=40)
    arguments = ["quantize", "model.onnx", "-d", data, "--effort", "fast", "--dry-run"]
    assert main([*arguments, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["ok"]
    assert [each["code"] for each in document["warnings"]] == codes
    assert main([*arguments, "--strict"]) == bool(codes)
    err = capsys.readouterr().err
    assert ("warning: few-samples: only 4 samples" in err) == bool(codes)
    assert ("error: --strict: got 1 warning (few-samples), expected none\n" in err) == bool(codes)
    assert not (desk / "model.w8a8.onnx").exists()


def test_strict_turns_warnings_into_exit_code_1(desk, monkeypatch, capsys):
    monkeypatch.chdir(desk)
    arguments = ["quantize", "model.onnx", "-d", "few.npz", "--no-rank", "--no-bench", "--no-verify", "--json"]
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert document["ok"]
    assert [each["code"] for each in document["warnings"]] == ["few-samples"]
    assert "warning: few-samples: only " in err
    assert main([*arguments, "--force", "--strict"]) == 1
    out, err = capsys.readouterr()
    assert not json.loads(out)["ok"]
    assert "error: --strict: got 1 warning (few-samples), expected none (model.w8a8.onnx was still written)" in err


def write_tiny_model(path):
    """Write a model whose quantized file is larger than its float file."""
    weight = onnx.numpy_helper.from_array(np.float32([[1], [2]]), "w")
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("MatMul", ["x", "w"], ["y"], name="fc")],
        "tiny",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n", 2])],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["n", 1])],
        [weight],
    )
    opsets = [onnx.helper.make_opsetid("", 17)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8), path)


@pytest.mark.parametrize(
    ("name", "ms", "is_kept"),
    [("tiny.onnx", 2.0, False), ("tiny.onnx", 0.9, True), ("model.onnx", 2.0, True)],
    ids=["larger and slower", "larger", "slower"],
)
def test_a_file_that_is_neither_smaller_nor_faster_is_removed(desk, monkeypatch, capsys, name, ms, is_kept):
    monkeypatch.chdir(desk)
    monkeypatch.setattr("detent.evaluate.evaluation.time_models", lambda *_, **__: Timing(1.0, ms, 3, 1))
    write_tiny_model("tiny.onnx")
    shape = (40, 2) if name == "tiny.onnx" else (40, 8, 8, 8)
    np.savez("data.npz", x=np.random.default_rng(0).normal(size=shape).astype(np.float32))
    arguments = ["quantize", name, "-d", "data.npz", "--no-rank", "--no-verify", "-o", "q.onnx", "--report", "r.json"]
    assert main([*arguments, "--json"]) == (not is_kept)
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert (document["ok"], document["output_is_kept"]) == (is_kept, is_kept)
    assert (desk / "q.onnx").exists() == is_kept
    assert (desk / "r.json").exists(), "the report says why"
    if is_kept:
        assert document["missed"] == []
        return
    (error,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert re.match(r"error: the file is not smaller \(\d+ B -> [0-9.]+ kB\), and the quantized model is slower", error)
    assert error.endswith("To keep such a file, pass --keep-anyway (q.onnx was removed)")
    assert main([*arguments, "--force"]) == 1
    assert capsys.readouterr().out.startswith("q.onnx (removed)\n")
    (desk / "q.onnx").write_bytes(b"older")
    names = {each.name for each in desk.iterdir()}
    assert main([*arguments, "--force"]) == 1
    out, err = capsys.readouterr()
    assert out.startswith("q.onnx (removed, the older file is kept)\n")
    assert "(q.onnx was removed, the older file is kept)" in err
    assert (desk / "q.onnx").read_bytes() == b"older"
    assert {each.name for each in desk.iterdir()} == names
    assert main([*arguments, "--force", "--keep-anyway"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("q.onnx\n")
    assert "warning: larger-file: " in err
    assert (desk / "q.onnx").is_file()


def test_a_file_without_gain_names_its_float_layers(desk, monkeypatch, capsys):
    monkeypatch.chdir(desk)
    monkeypatch.setattr("detent.evaluate.evaluation.time_models", lambda *_, **__: Timing(1.0, 2.0, 3, 1))
    monkeypatch.setattr("detent.evaluate.evaluation.Evaluation._float_layers", lambda _: ["fc: why", "2 more: because"])
    write_tiny_model("tiny.onnx")
    np.savez("data.npz", x=np.random.default_rng(0).normal(size=(40, 2)).astype(np.float32))
    assert main(["quantize", "tiny.onnx", "-d", "data.npz", "--no-rank", "--no-verify", "--quiet"]) == 1
    assert ". Layers on float kernels: fc: why; 2 more: because. To keep" in capsys.readouterr().err


def test_a_good_model_gives_no_warning(desk, monkeypatch, capsys):
    monkeypatch.chdir(desk)
    write_data("enough.npz", samples=40)
    arguments = ["quantize", "model.onnx", "-d", "enough.npz", "--no-rank", "--no-bench", "--strict", "--json"]
    assert main([*arguments, "--report", "r.html"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["warnings"] == []
    assert "warning" not in err
    assert "Warning:" not in (desk / "r.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(("seconds", "expected"), [((1e6, 1e6), [4, 1]), ((1e6, 1.0), [4, 1]), ((1.0,), [4])])
def test_ranking_has_limits(desk, monkeypatch, capsys, seconds, expected):
    given, estimates, real = [], iter(seconds), qs.measure

    def measure(model, data, recipe, *, samples, announce, **options):
        given.append(samples)
        announce(qs.Cost(3, 1, 3, samples, next(estimates)))
        return real(model, data, recipe, samples=samples, **options)

    monkeypatch.chdir(desk)
    monkeypatch.setattr(qs, "measure", measure)
    assert main(["quantize", "model.onnx", "-d", "few.npz", "--no-bench", "--no-verify"]) == 0
    out, err = capsys.readouterr()
    assert given == expected
    assert ("--skip head" in out) == (seconds[-1] == 1)
    assert ("sensitivity of layers was not measured: the measurement would take too long (3 layers" in err) == (
        seconds[-1] != 1
    )


def test_folder_of_batches(desk):
    folder = desk / "batches"
    folder.mkdir()
    for i in range(3):
        np.savez(folder / f"{i}.npz", x=np.random.default_rng(i).normal(size=(2, 8, 8, 8)).astype(np.float32))
    done = detent("quantize", "model.onnx", "-d", "batches", "--json", "--no-rank", "--no-bench", cwd=desk)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["calibration_batches"] == 3


def test_unusual_names(tmp_path):
    folder = tmp_path / "a b"
    folder.mkdir()
    write_model(folder / "my [net].onnx")
    write_data(folder / "d.npz", samples=2)
    done = detent("quantize", folder / "my [net].onnx", "-d", folder / "d.npz", "--no-rank", "--no-bench")
    assert done.returncode == 0, done.stderr
    assert "my [net].w8a8.onnx" in done.stdout
    assert (folder / "my [net].w8a8.onnx").is_file()
