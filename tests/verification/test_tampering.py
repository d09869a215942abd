"""Files changed after they were written: every change is rejected, and the report names it."""

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto

import detent as dt
import detent.onnx as qo
from detent.errors import DetentError, UnsupportedError
from detent.onnx.quantized_graph import float_form
from detent.onnx_model import load
from detent.onnx_model.sessions import make_session
from detent.verification import levels
from zoo import ZOO

sys.path.append(str(Path(__file__).parents[1] / "tools"))
tampering = importlib.import_module("tampering")
small_models = importlib.import_module("small_models")
fuzz_verify = importlib.import_module("fuzz_verify")

ATTENTION = dt.Recipe([*dt.Recipe.preset("w8a8").rules, dt.Rule(types="ActivationMatMul", input="uint8")])
OPTIONS = {
    "cnn": (small_models.cnn, {"skip": small_models.SKIPPED, "keep_float": "none"}),
    "transformer": (small_models.transformer, {}),
    "cnn-w4a8": (small_models.cnn, {"recipe": "w4a8", "target": "onnxruntime-avx2"}),
    "transformer-w4a16": (small_models.transformer, {"recipe": "w4a16-g32"}),
    "transformer-dynamic": (small_models.transformer, {"recipe": "w8a8-dynamic"}),
    "recurrent": (small_models.recurrent, {"keep_float": "none"}),
    "recurrent-dynamic": (small_models.recurrent, {"recipe": "w8a8-dynamic", "prefer": "speed"}),
    "recurrent-w4a16": (small_models.recurrent, {"recipe": "w4a16-g32"}),
    "transformer-attention": (small_models.transformer, {"recipe": ATTENTION}),
}
CACHE = {}


class Subject:
    """A source, its file, data, and the file's outputs."""

    def __init__(self, name):
        make, options = OPTIONS[name]
        self.source, batches = make()
        self.file = qo.rewrite(self.source, qo.decide(self.source, batches, progress=False, **options))
        self.data = batches[:1]
        self.outputs = self.run(self.file)

    def run(self, model):
        return [make_session(model, optimize=False).run(None, feed) for feed in self.data]

    def has_same_outputs(self, model):
        return fuzz_verify._equal(self.run(model), self.outputs)


def subject(name):
    if name not in CACHE:
        CACHE[name] = Subject(name)
    return CACHE[name]


def changed_files(model, edit, count, seed=0):
    """The files that an edit makes at so many places at most, with names of what it changed."""
    rng = np.random.default_rng(seed)
    sites = edit.sites(model)
    for i in sorted(rng.choice(len(sites), min(count, len(sites)), replace=False)):
        copy = tampering.copy_of(model)
        names = edit.apply(copy, sites[i], rng)
        if copy != model:
            yield copy, names


def check_edits(name, count, forms_of_every=1):
    """All edits at several places, and sometimes in the other two forms at one place."""
    base = subject(name)
    tried, admissible = 0, []
    for number, edit in enumerate(tampering.EDITS):
        for i, (file, names) in enumerate(changed_files(base.file, edit, count)):
            tried += 1
            try:
                report = dt.verify(base.source, file)
            except DetentError:  # the file is invalid now
                continue
            assert not report.ok, edit.name
            assert any(each in report.failure for each in names), (edit.name, names, report.failure)
            if i or number % forms_of_every:
                continue
            assert not dt.verify(base.source, tampering.without_decisions(file)).ok, edit.name
            forged = tampering.with_matching_digests(file)
            try:
                report = dt.verify(base.source, forged)
            except DetentError:  # the decisions are invalid now, such as a negative scale
                continue
            if report.ok:
                assert fuzz_verify._only_decided(base.file, forged), edit.name
                assert any("corrected bias" in each or "searched" in each for each in report.replay.decided)
                admissible.append(edit.name)
    return tried, admissible


def test_there_are_enough_kinds_of_edits():
    assert len({edit.name for edit in tampering.EDITS}) == len(tampering.EDITS) >= 100
    sites = {edit.name: sum(len(edit.sites(subject(name).file)) for name in OPTIONS) for edit in tampering.EDITS}
    assert sum(map(bool, sites.values())) >= 90
    assert len(tampering.FORGERIES) >= 30


@pytest.mark.parametrize("name", ["cnn", "transformer", "transformer-dynamic", "recurrent"])
def test_no_edit_is_accepted(name):
    tried, _ = check_edits(name, 1, forms_of_every=3)
    assert tried > 50


@pytest.mark.slow
@pytest.mark.parametrize("name", list(OPTIONS))
def test_no_edit_is_accepted_anywhere(name):
    tried, admissible = check_edits(name, 30)
    assert tried > (350 if name.startswith("recurrent") else 400)  # the recurrent model has fewer places to edit
    assert set(admissible) <= {"bias code", "scale by an ulp", "scale doubled"}


def check_execution(name, count):
    """Level 2 alone detects all edits that change an output."""
    base, changed = subject(name), 0
    for edit in tampering.EDITS:
        for file, _ in changed_files(base.file, edit, count, seed=1):
            try:
                if base.has_same_outputs(file):
                    continue
            except Exception:  # noqa: BLE001 - ONNX Runtime raises what it likes
                continue
            changed += 1
            for form in (file, tampering.without_decisions(file)):
                try:
                    report = dt.verify(base.source, form, base.data, levels=(2,))
                except DetentError:  # other outputs, or codes of another type
                    continue
                assert not report.ok, edit.name
    return changed


@pytest.fixture
def without_openvino(monkeypatch):
    monkeypatch.setattr(levels, "is_installed", lambda: False)


def test_execution_catches_what_changes_outputs(without_openvino):
    assert check_execution("cnn", 1) > 20


@pytest.mark.slow
@pytest.mark.parametrize("name", list(OPTIONS))
def test_execution_catches_what_changes_outputs_anywhere(name, without_openvino):
    assert check_execution(name, 6) > 30


# Decisions themselves


def check_forgeries(name, count):
    """Forged decisions pass only if they are within bounds, and then keep the function of the source."""
    base, outcomes = subject(name), {}
    for forgery in tampering.FORGERIES:
        for seed in range(count):
            file = forgery.apply(base.source, base.file, np.random.default_rng(seed))
            if file is None or file == base.file:
                continue
            try:
                report = dt.verify(base.source, file)
            except DetentError:
                assert not forgery.admissible, forgery.name
                outcomes.setdefault(forgery.name, set()).add(False)
                continue
            assert forgery.admissible in {None, report.ok}, (forgery.name, report.failure)
            outcomes.setdefault(forgery.name, set()).add(report.ok)
            if report.ok:
                assert report.replay.decided
                float_model = float_form(base.source, tampering.decisions_of(file))
                assert is_same_function(base.source, float_model, base.data), forgery.name
    return outcomes


def is_same_function(a: ModelProto, b: ModelProto, data):
    """Whether two models agree up to the last bits of floats."""
    runs = [make_session(model).run(None, feed) for model in (a, b) for feed in data]
    half = len(runs) // 2
    return all(
        np.allclose(x, y, rtol=1e-3, atol=1e-4 * np.abs(x).max())
        for first, second in zip(runs[:half], runs[half:], strict=True)
        for x, y in zip(first, second, strict=True)
    )


@pytest.mark.parametrize("name", ["cnn", "transformer", "recurrent"])
def test_forged_decisions_are_admissible_or_caught(name):
    outcomes = check_forgeries(name, 2)
    assert len(outcomes) > 15
    assert {True} in outcomes.values()
    assert {False} in outcomes.values()


@pytest.mark.slow
@pytest.mark.parametrize("name", list(OPTIONS))
def test_many_forged_decisions_are_admissible_or_caught(name):
    assert len(check_forgeries(name, 20)) > 8


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("rewrite_version", 1, "rewrite_version 1"),
        ("rewrite_version", 99, "rewrite_version 99"),
        ("version", 7, "version"),
    ],
)
def test_decisions_of_other_versions_are_not_replayed(field, value, reason):
    base = subject("cnn")
    file, entry = tampering.copy_of(base.file), tampering._metadata(base.file)
    entry["decisions"][field] = value
    tampering._write_metadata(file, entry)
    report = dt.verify(base.source, file)
    assert not report.ok
    assert report.failure.startswith("not replayed: ")
    assert reason in report.failure


@pytest.mark.parametrize("value", [None, 2.0, "2", [2]])
def test_versions_are_integers(value):
    base = subject("cnn")
    file, entry = tampering.copy_of(base.file), tampering._metadata(base.file)
    entry["decisions"]["rewrite_version"] = value
    tampering._write_metadata(file, entry)
    with pytest.raises(dt.FileFormatError, match="rewrite_version must be an integer"):
        dt.verify(base.source, file)


# What the levels say of some edits


def changed(name, edit, site=0, seed=0):
    file = tampering.copy_of(subject(name).file)
    chosen = tampering.edits_by_name()[edit]
    return file, chosen.apply(file, chosen.sites(file)[site], np.random.default_rng(seed))


@pytest.mark.parametrize(
    "edit",
    [
        "pair removed",
        "node renamed",
        "output added",
        "pair bypassed",
        "outputs swapped",
        "constant of another type",
    ],
)
def test_all_levels_report_what_replay_found(edit, without_openvino):
    base = subject("cnn")
    for site in (0, -1):
        file, names = changed("cnn", edit, site)
        report = dt.verify(base.source, file, base.data)
        assert not report.ok
        assert any(each in report.failure for each in names)


def test_a_quantizer_that_is_gone_fails_level_2(without_openvino):
    base = subject("cnn")
    report = dt.verify(base.source, changed("cnn", "pair removed")[0], base.data, levels=(2,))
    assert not report.ok
    assert "missing quantizer" in report.failure


def test_a_changed_bias_fails_level_2_though_decisions_refer_to_it(without_openvino):
    base = subject("transformer")
    files = [changed("transformer", "bias code", seed=seed) for seed in range(10)]
    file, names = next((file, names) for file, names in files if not base.has_same_outputs(file))
    report = dt.verify(base.source, file, base.data, levels=(2,))
    assert not report.ok
    assert names[0].removesuffix(".bias_codes") in report.failure  # the layer


def test_other_outputs_than_the_source_s_are_said(without_openvino):
    base = subject("cnn")
    with pytest.raises(UnsupportedError, match="the file has outputs"):
        dt.verify(base.source, changed("cnn", "output added")[0], base.data, levels=(2,))


@pytest.mark.parametrize("edit", ["float constant", "Conv.pads", "inputs swapped", "constants swapped", "opset"])
def test_another_source_is_said_in_one_line(edit):
    base, chosen = subject("cnn"), tampering.edits_by_name()[edit]
    for source, _ in changed_files(base.source, chosen, 2):
        report = dt.verify(source, base.file)
        assert not report.ok
        assert "\n" not in report.failure
        assert "the file was not made from this source" in report.failure or edit == "opset"


# Real models, exported models, and random edits


def rejected_edits(source, file):
    """Apply each edit once, check that verify rejects it, and yield edit, file, and whether there was a report."""
    for edit in tampering.EDITS:
        for changed_file, names in changed_files(file, edit, 1):
            try:
                report = dt.verify(source, changed_file)
            except DetentError:
                yield edit, changed_file, False
                continue
            assert not report.ok, edit.name
            assert any(each in report.failure for each in names), (edit.name, names, report.failure)
            yield edit, changed_file, True


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ZOO if name != "smart-turn"])  # that one is quantized already
def test_no_edit_of_a_real_model_is_accepted(name, tmp_path):
    model = ZOO[name]
    if not model.is_installed:
        pytest.skip(f"{model.package} is not installed")
    path = model.write(tmp_path)
    file = qo.rewrite(path, qo.decide(path, list(model.feeds(2)), progress=False))
    assert dt.verify(path, file).ok
    tried = 0
    for _, changed_file, has_report in rejected_edits(path, file):
        tried += 1
        if has_report and tried % 4 == 0:
            assert not dt.verify(path, tampering.without_decisions(changed_file)).ok
    assert tried > 40


@pytest.mark.slow
def test_no_edit_of_an_exported_model_is_accepted(tmp_path, monkeypatch, without_openvino):
    torch = pytest.importorskip("torch")
    qt = importlib.import_module("detent.torch")
    torch_source = importlib.import_module("detent.verification.torch_source")
    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(3, 16, 3, padding=1), torch.nn.BatchNorm2d(16), torch.nn.ReLU(), torch.nn.MaxPool2d(2)]
    net = torch.nn.Sequential(*layers, torch.nn.Flatten(), torch.nn.Linear(256, 10), torch.nn.Softmax(-1))
    model, x = qt.prepare(net, "w8a8"), torch.randn(4, 3, 8, 8)
    with qt.calibrating(model):
        model(x)
    path = qt.export_onnx(qt.freeze(model).eval(), x, tmp_path / "net.onnx")
    file = load(path)
    export, exported = torch_source.exported_model, {}

    def export_once(*args, **options):
        if repr(options) not in exported:
            exported[repr(options)] = export(*args, **options)
        return exported[repr(options)]

    monkeypatch.setattr(torch_source, "exported_model", export_once)
    data = [{file.graph.input[0].name: x.numpy()}]
    assert dt.verify(model, file, data).ok
    before, tried, changed_outputs = fuzz_verify._run(file, data), 0, 0
    for edit, changed_file, has_report in rejected_edits(model, file):
        tried += 1
        if not has_report:
            continue
        try:
            after = fuzz_verify._run(changed_file, data)
        except Exception:  # noqa: BLE001 - ONNX Runtime raises what it likes
            continue
        (was,), now = before[0], after[0]
        if len(now) == 1 and was.shape == now[0].shape and np.allclose(was, now[0], rtol=1e-3):
            continue  # sums of PyTorch and ONNX Runtime differ by as much
        changed_outputs += 1
        try:
            report = dt.verify(model, changed_file, data, levels=(2,))
        except DetentError:
            continue
        assert not report.ok, edit.name
    assert tried > 40
    assert changed_outputs > 10


@pytest.mark.slow
def test_random_edits():
    outcomes = [outcome for _, outcome in fuzz_verify.fuzz(300, 7)]
    assert not [each for each in outcomes if fuzz_verify.is_wrong(each)]
    assert sum(each.effect == "changed" for each in outcomes) > 20
