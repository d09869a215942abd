"""Jobs on an executor give the bits of one process, survive dead workers and a dead driver, and refuse what differs."""

import threading
from concurrent.futures import Executor, ThreadPoolExecutor

import numpy as np
import pytest
from executor_job import BATCHES, quantized, small, write_job
from onnx_graphs import Maker, images, rows, weights
from test_subgraph_ranges import branched

import detent as dt
import detent.onnx as qo
import detent.sensitivity as qs
from detent.cluster import process_executor
from detent.observers import MSE, passes
from detent.onnx import calibration_items
from detent.onnx.samples import choose_samples, choose_surveyed
from detent.onnx.subgraph_ranges import observe_ranges
from detent.onnx_model import workspace as workspace_module
from detent.onnx_model.batches import Batches, open_batches
from detent.onnx_model.model_inputs import inputs_of
from detent.onnx_model.workspace import open_workspace, runtime_environment
from detent.work_items import Environment


@pytest.fixture
def job(tmp_path):
    return write_job(tmp_path)


@pytest.fixture
def threads():
    with ThreadPoolExecutor(3) as executor:
        yield executor


@pytest.mark.parametrize("recipe", ["w8a8", "w4a8"])
def test_the_file_has_the_bytes_of_one_process(job, threads, recipe):
    assert quantized(job, threads, recipe=recipe) == quantized(job, recipe=recipe)


def test_a_memory_budget_needs_several_passes_and_gives_the_same_file(job, threads):
    budget = {"memory_budget": 20_000}
    assert quantized(job, threads, **budget) == quantized(job, **budget)


def test_processes_give_the_same_file(job):
    with process_executor(2) as executor:
        assert quantized(job, executor) == quantized(job)


def test_the_workspace_is_removed(job, threads):
    quantized(job, threads)
    assert not [path for path in job.iterdir() if path.name.startswith(".detent-work")]


def test_samples_are_those_of_one_process(job, threads):
    model = small()
    batches = open_batches(job / "data", inputs_of(model))
    with open_workspace(threads, job, None) as workspace:
        survey = calibration_items.survey_data(workspace, workspace.add_model(model), workspace.in_files(batches))
    expected = choose_samples(model, batches)
    actual = choose_surveyed(model, batches, survey.facts)
    assert len(expected) == 32
    assert all(np.array_equal(a["x"], b["x"]) for a, b in zip(expected, actual, strict=True))
    list(batches.hashed())
    assert survey.fingerprint == batches.fingerprint()


def test_calibration_gives_the_same_ranges(job, threads):
    plan = qo.plan(qo.prepare(small()))
    here = qo.calibrate(plan, job / "data")
    there = qo.calibrate(plan, job / "data", executor=threads, work_directory=job)
    assert there.ranges == here.ranges
    assert (there.batches, there.fingerprint) == (here.batches, here.fingerprint)
    assert vars(there.summary) == vars(here.summary)
    assert all(there.observers[name].to_bytes() == each.to_bytes() for name, each in here.observers.items())


@pytest.mark.parametrize("widths", [(4, 8), None])
def test_sensitivity_has_the_same_bits(job, threads, widths):
    model, data = job / "m.onnx", job / "data"
    here = qs.measure(model, data, widths=widths, samples=20)
    assert qs.measure(model, data, widths=widths, samples=20, executor=threads) == here
    if widths is not None:
        budget = here.uniform("int4/axis0").nbytes + 150
        expected = qs.refine(model, data, here, budget, runs=12)
        assert qs.refine(model, data, here, budget, runs=12, executor=threads) == expected


def uneven_channels():
    """A model whose channels equalization changes, between three convolutions."""
    m = Maker()
    uneven = weights(16, 8, 1, 1) * np.logspace(-2.5, 0.5, 16, dtype=np.float32).reshape(-1, 1, 1, 1)
    t = m.add("Relu", [m.conv("x", 8, 16, 1, weight=uneven, bias=False, name="before")])
    t = m.add("Relu", [m.conv(t, 16, 16, 1, weight=weights(16, 16, 1, 1) * uneven[:, :1], name="middle")])
    return m.model([("x", [2, 8, 8, 8])], [m.conv(t, 16, 4, name="after")])


def outlying_channels():
    """A model whose channels SmoothQuant changes, before two matmuls."""
    m, x = Maker(), "x"
    for name in ("first", "second"):
        gain = np.ones(32, np.float32)
        gain[[3, 17]] = 60
        norm = m.add("LayerNormalization", [x, m.constant(gain), m.constant(np.zeros(32, np.float32))], axis=-1)
        x = m.matmul(norm, 32, 32, name=name)
    return m.model([("x", [1, "n", 32])], [x])


@pytest.mark.parametrize("kind", ["equalized", "smoothed"])
def test_factors_of_channels_have_the_same_bits(tmp_path, threads, kind):
    is_smooth = kind == "smoothed"
    qo.save(outlying_channels() if is_smooth else uneven_channels(), tmp_path / "m.onnx")
    (tmp_path / "data").mkdir()
    for i, feed in enumerate(rows(width=32, length=64) if is_smooth else images()):
        np.savez(tmp_path / "data" / f"{i}.npz", **feed)
    options = {"progress": False, "effort": "fast"}  # "fast" keeps the factors without measuring the outputs
    here = qo.decide(tmp_path / "m.onnx", tmp_path / "data", **options)
    assert len(getattr(here, kind)) == {"equalized": 1, "smoothed": 2}[kind]
    assert qo.decide(tmp_path / "m.onnx", tmp_path / "data", **options, executor=threads) == here


@pytest.mark.parametrize("max_drop", [None, 0.0005])
def test_a_metric_has_the_same_bits(job, threads, max_drop, tmp_path):
    options = {"data": job / "data", "metric": "cosine", "max_drop": max_drop, "progress": False, "recipe": "w4a8"}
    here, there = (
        qo.quantize(job / "m.onnx", tmp_path / f"{number}.onnx", **options, executor=executor)
        for number, executor in enumerate((None, threads))
    )
    assert there.metric == here.metric
    assert there.search == here.search
    assert there.decisions == here.decisions
    if max_drop is not None:
        assert here.search.steps
        assert here.search.trials > 2


def test_evaluation_data_in_memory_need_a_named_directory(job, threads):
    feeds = [dict(np.load(path)) for path in sorted((job / "data").iterdir())]
    options = {"metric": "cosine", "eval_data": feeds}
    with pytest.raises(dt.SpecError, match=r"data is in memory, but workers read files.*work_directory="):
        quantized(job, threads, **options)
    assert quantized(job, threads, **options, work_directory=job) == quantized(job, **options)


def test_ranges_of_layers_in_subgraphs_are_the_same(tmp_path, threads):
    model = branched()
    qo.save(model, tmp_path / "m.onnx")
    (tmp_path / "data").mkdir()
    rng = np.random.default_rng(0)
    for i in range(9):
        x = rng.normal(size=(2, 4)).astype(np.float32)
        np.savez(tmp_path / "data" / f"{i}.npz", x=x, yes=np.array(i % 3 == 0))
    batches = open_batches(tmp_path / "data", inputs_of(model))
    with open_workspace(threads, tmp_path, None) as workspace:
        there = calibration_items.subgraph_ranges_on_executor(
            workspace, model, ["if/fc", "if/other"], workspace.in_files(batches)
        )
    assert there == observe_ranges(model, ["if/fc", "if/other"], batches)
    assert len(there) == 2


def test_the_model_and_the_samples_are_written_once(job, threads, monkeypatch):
    models, arrays = [], []
    save, write = workspace_module.save, workspace_module.write_arrays
    monkeypatch.setattr(workspace_module, "save", lambda model, path: models.append(path) or save(model, path))
    monkeypatch.setattr(workspace_module, "write_arrays", lambda path, feed: arrays.append(path) or write(path, feed))
    quantized(job, threads, equalize=False)  # surveys, calibrates, and measures noise
    assert len(models) == 1
    assert 0 < len(arrays) <= 32


def test_the_driver_reads_the_samples_of_a_measurement_once(job, threads, monkeypatch):
    reads = []
    real = Batches.first_samples

    def first_samples(self, count):
        reads.append(threading.current_thread())
        return real(self, count)

    monkeypatch.setattr(Batches, "first_samples", first_samples)
    qs.measure(job / "m.onnx", job / "data", samples=8, executor=threads)
    assert reads.count(threading.main_thread()) == 1


def test_a_measurement_writes_only_its_samples(job, threads, monkeypatch):
    feeds = [dict(np.load(path)) for path in sorted((job / "data").iterdir())]
    arrays, write = [], workspace_module.write_arrays
    monkeypatch.setattr(workspace_module, "write_arrays", lambda path, feed: arrays.append(path) or write(path, feed))
    here = qs.measure(job / "m.onnx", feeds, samples=4)
    assert qs.measure(job / "m.onnx", iter(feeds), samples=4, executor=threads, work_directory=job) == here
    assert len(arrays) == 3  # batches of 1, 2, and 1 of 3 samples


def test_sensitivity_of_decisions(job, threads):
    decisions = qo.decide(job / "m.onnx", job / "data", progress=False)
    here = qs.measure(job / "m.onnx", job / "data", decisions)
    assert qs.measure(job / "m.onnx", job / "data", decisions, executor=threads) == here


def test_the_next_job_of_an_executor_sees_changed_data(job, threads):
    for scale in (1.0, 30.0):
        for i in range(BATCHES):
            x = np.random.default_rng(i).normal(size=(2, 3, 12, 12)) * scale
            np.savez(job / "data" / f"{i:03d}.npz", x=x.astype(np.float32))
        here = qs.measure(job / "m.onnx", job / "data", samples=8)
        assert qs.measure(job / "m.onnx", job / "data", samples=8, executor=threads) == here
        assert quantized(job, threads) == quantized(job)


def test_sensitivity_of_some_batches(job, threads):
    batches = open_batches(job / "data", inputs_of(small())).subset([3, 5, 7])
    here = qs.measure(job / "m.onnx", batches, samples=4)
    assert qs.measure(job / "m.onnx", batches, samples=4, executor=threads) == here
    assert here != qs.measure(job / "m.onnx", job / "data", samples=4)


def test_an_interrupted_merge_is_not_saved(job, tmp_path, threads, monkeypatch):
    path, calls = tmp_path / "state", iter(range(100))

    def merge(self, other, real=MSE.merge):
        if next(calls) == 4:  # in the middle of an item
            raise KeyboardInterrupt
        return real(self, other)

    monkeypatch.setattr(MSE, "merge", merge)
    with pytest.raises(KeyboardInterrupt):
        quantized(job, threads, resume_file=path)
    assert not path.exists()


def test_data_in_memory_need_a_named_directory(job, threads):
    feeds = [dict(np.load(path)) for path in sorted((job / "data").iterdir())]
    with pytest.raises(dt.SpecError, match=r"data is in memory, but workers read files.*work_directory="):
        quantized(job, threads, data=feeds)
    spilled = job / "spilled"
    spilled.mkdir()
    assert quantized(job, threads, data=feeds, work_directory=spilled) == quantized(job, data=feeds)
    assert not list(spilled.iterdir())


def test_a_model_in_memory_needs_a_named_directory(job, threads):
    with pytest.raises(dt.SpecError, match=r"the model is in memory, but workers read files"):
        qo.decide(small(), job / "data", executor=threads)
    here = qo.decide(small(), job / "data", progress=False)
    assert qo.decide(small(), job / "data", progress=False, executor=threads, work_directory=job) == here


def test_a_directory_without_an_executor_is_refused(job):
    with pytest.raises(dt.SpecError, match="work_directory= without executor="):
        quantized(job, work_directory=job)


def test_a_directory_that_does_not_exist_is_refused(job, threads):
    with pytest.raises(dt.SpecError, match=r"cannot write to .*nowhere .*No such file"):
        quantized(job, threads, work_directory=job / "nowhere")


def test_a_module_is_refused(threads):
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    with pytest.raises(dt.SpecError, match="export it to ONNX first"):
        qs.measure(model, [torch.ones(1, 2)], executor=threads)


def test_nan_names_tensor_and_batch_as_in_one_process(tmp_path, threads):
    m = Maker()
    model = m.model([("x", [1, 4])], [m.matmul(m.add("Log", ["x"]), 4, 4, name="fc")])
    qo.save(model, tmp_path / "m.onnx")
    (tmp_path / "data").mkdir()
    for i in range(6):
        np.savez(tmp_path / "data" / f"{i}.npz", x=np.full((1, 4), -1.0 if i == 4 else 1.0 + i, np.float32))
    plan = qo.plan(qo.prepare(model))
    errors = []
    for options in ({}, {"executor": threads, "work_directory": tmp_path}):
        with pytest.raises(dt.NaNError, match="of batch 4") as caught:
            qo.calibrate(plan, tmp_path / "data", **options)
        errors.append(str(caught.value))
    assert errors[0] == errors[1]


def other_environment():
    return Environment(tuple((name, "9.9" if name == "onnxruntime" else each) for name, each in ENVIRONMENT))


ENVIRONMENT = runtime_environment().facts


def test_a_worker_with_another_version_is_refused(job, threads, monkeypatch):
    calls = iter([runtime_environment(), *[other_environment()] * 999])
    monkeypatch.setattr(calibration_items, "runtime_environment", lambda: next(calls))
    with pytest.raises(dt.WorkerError, match=r"worker \S+ has onnxruntime 9\.9, but \S+ on the driver"):
        quantized(job, threads)


def test_a_batch_that_changes_between_two_reads_is_refused(job):
    class Changing(Executor):
        """Changes a file after the survey."""

        def submit(self, function, /, *args, **kwargs):
            if args[0] is calibration_items._observe:
                np.savez(job / "data" / "000.npz", x=np.zeros((1, 3, 12, 12), np.float32))
            with ThreadPoolExecutor(1) as executor:
                return executor.submit(function, *args, **kwargs)

    with pytest.raises(dt.WorkerError, match=r"batch 0 of .*data has SHA-256 \w+\.\.\., expected \w+"):
        quantized(job, Changing())


def test_each_batch_is_observed_once(job, threads, monkeypatch):
    seen = []
    real = calibration_items._observe

    def observe(item):
        seen.extend(item.part.numbers)
        return real(item)

    monkeypatch.setattr(calibration_items, "_observe", observe)
    quantized(job, threads)
    assert sorted(seen) == list(range(BATCHES))


@pytest.mark.parametrize("workers", [0, 1, 4])
def test_a_job_resumes_with_any_number_of_workers(job, tmp_path, monkeypatch, workers):
    expected, path = quantized(job), tmp_path / "state"
    stop = iter(range(7))
    real = calibration_items.reporter
    monkeypatch.setattr(calibration_items, "reporter", lambda *_: lambda done, total: next(stop))
    with ThreadPoolExecutor(2) as executor, pytest.raises(StopIteration):
        quantized(job, executor, resume_file=path)
    monkeypatch.setattr(calibration_items, "reporter", real)
    assert path.exists()
    if not workers:
        assert quantized(job, resume_file=path) == expected
        return
    with ThreadPoolExecutor(workers) as executor:
        assert quantized(job, executor, resume_file=path) == expected


def test_other_data_do_not_fit_a_resume_file(job, tmp_path, threads):
    path = tmp_path / "state"
    quantized(job, threads, resume_file=path)
    np.savez(job / "data" / f"{BATCHES - 1:03d}.npz", x=np.ones((1, 3, 12, 12), np.float32))
    with pytest.raises(dt.FileFormatError, match="differs from the last batch saved"):
        quantized(job, threads, resume_file=path)
    (job / "data" / f"{BATCHES - 1:03d}.npz").unlink()
    with pytest.raises(dt.FileFormatError, match=f"got {BATCHES - 1} batches, but .* after {BATCHES} batches"):
        quantized(job, threads, resume_file=path)


def test_saved_states_of_both_ways_are_equal(job, tmp_path, threads):
    here, there = tmp_path / "here", tmp_path / "there"
    quantized(job, resume_file=here)
    quantized(job, threads, resume_file=there)
    assert here.read_bytes() == there.read_bytes()
    assert passes.ResumeHeader._fields == ("batches", "mark")
