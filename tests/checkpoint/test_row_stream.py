import json
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import detent as dt
import detent.checkpoint as qc
from detent.checkpoint import partial_file, row_stream
from detent.checkpoint_files import ArrayTensor, TensorSource
from detent.checkpoint_files.gguf_reader import read_gguf
from detent.checkpoint_files.gguf_writer import gguf_layout
from detent.cluster import process_executor, ray_executor
from detent.errors import NaNError, ParamsError, RangeError, ShapeError, SpecError, UnsupportedError, WorkerError

from .tiny_checkpoints import (
    CONFIG,
    HEADS,
    HIDDEN,
    llama_tensors,
    mixtral_config,
    mixtral_tensors,
    write_checkpoint,
)

SMALL_BUDGET = 2_600_000  # items of at most 64 rows


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("source") / "tiny")


@pytest.fixture(scope="module")
def finished(checkpoint, tmp_path_factory):
    path = tmp_path_factory.mktemp("finished") / "tiny.gguf"
    qc.quantize(checkpoint, path, vocabulary=False)
    return path.read_bytes()


def hidden_files(directory):
    return sorted(path.name for path in directory.iterdir() if path.name.startswith("."))


def test_bytes_are_those_of_the_block_formats(checkpoint, tmp_path):
    report = qc.quantize(checkpoint, tmp_path / "tiny.gguf", "gguf:Q4_K_M", vocabulary=False)
    source, file = llama_tensors(), qc.open(tmp_path / "tiny.gguf")
    up = source["model.layers.1.mlp.up_proj.weight"].astype(np.float32)
    assert file["blk.1.ffn_up.weight"].read().tobytes() == dt.quantize(up, "q4_k").packed.tobytes()
    query = source["model.layers.0.self_attn.q_proj.weight"].astype(np.float32)
    paired = query.reshape(HEADS, 2, HIDDEN // HEADS // 2, HIDDEN).swapaxes(1, 2).reshape(HIDDEN, HIDDEN)
    assert file["blk.0.attn_q.weight"].read().tobytes() == dt.quantize(paired, "q4_k").packed.tobytes()
    output = source["lm_head.weight"].astype(np.float32)
    assert file["output.weight"].read().tobytes() == dt.quantize(output, "q6_k").packed.tobytes()
    norm = source["model.norm.weight"].astype(np.float32)
    assert np.array_equal(file["output_norm.weight"].read(), norm)
    assert report.nbytes_after == (tmp_path / "tiny.gguf").stat().st_size
    assert hidden_files(tmp_path) == []


def test_mxfp4_moe_stores_experts_in_mxfp4_and_the_rest_in_q8_0(tmp_path):
    source = write_checkpoint(tmp_path / "moe", mixtral_tensors(), mixtral_config())
    plan = qc.plan(source, "gguf:MXFP4_MOE", vocabulary=False)
    report = qc.quantize(source, tmp_path / "moe.gguf", "gguf:MXFP4_MOE", vocabulary=False)
    types = {line.name: line.type for line in report.tensors}
    assert {name for name, kind in types.items() if kind == "MXFP4"} == {
        f"blk.{layer}.ffn_{part}_exps.weight" for layer in (0, 1) for part in ("gate", "up", "down")
    }
    assert {kind for name, kind in types.items() if "_exps" not in name} == {"Q8_0", "F32"}
    assert (plan.nbytes_after, plan.tensors, plan.notes) == (report.nbytes_after, report.tensors, ())
    stored = qc.open(tmp_path / "moe.gguf")["blk.1.ffn_down_exps.weight"]
    experts = [mixtral_tensors()[f"model.layers.1.block_sparse_moe.experts.{i}.w2.weight"] for i in range(4)]
    expected = dt.quantize(np.stack(experts).astype(np.float32), dt.gguf.mxfp4)
    assert (stored.dtype, stored.read().tobytes()) == ("gguf.mxfp4", expected.packed.tobytes())
    assert np.array_equal(stored.dequantize(), expected.dequantize())
    assert dt.verify(source, tmp_path / "moe.gguf").ok


def test_experts_with_another_type_are_no_missing_experts(tmp_path):
    source = write_checkpoint(tmp_path / "moe", mixtral_tensors(), mixtral_config())
    recipe = dt.Recipe([dt.Rule("blk.*_exps", weight="q8_0"), dt.Rule("*")])
    assert qc.plan(source, "gguf:MXFP4_MOE", vocabulary=False, recipe=recipe).notes == ()


def test_mxfp4_moe_of_a_model_without_experts_says_that_all_weights_are_q8_0(checkpoint, tmp_path):
    report = qc.quantize(checkpoint, tmp_path / "x.gguf", "gguf:MXFP4", vocabulary=False)
    assert set(report.types) == {"Q8_0", "F32"}
    assert any("no experts" in warning and "Q8_0" in warning for warning in report.warnings)


def test_a_recipe_can_name_mxfp4(checkpoint, tmp_path):
    recipe = dt.Recipe([dt.Rule("blk.*.ffn_up", weight="gguf.mxfp4")])
    report = qc.quantize(checkpoint, tmp_path / "x.gguf", recipe=recipe, vocabulary=False)
    assert {line.type for line in report.tensors if "ffn_up" in line.name} == {"MXFP4"}


@pytest.mark.parametrize("to", ["gguf:F32", "gguf:BF16", "gguf:F16"])
def test_float_files_keep_the_values(checkpoint, tmp_path, to):
    qc.quantize(checkpoint, tmp_path / "x.gguf", to, vocabulary=False)
    tensor = qc.open(tmp_path / "x.gguf")["blk.1.ffn_up.weight"]
    values = llama_tensors()["model.layers.1.mlp.up_proj.weight"].astype(np.float32)
    expected = values.astype(np.float16).astype(np.float32) if to == "gguf:F16" else values
    assert np.array_equal(tensor.dequantize(), expected)


def test_a_bf16_gguf_file_gives_the_same_tensors_as_the_checkpoint(checkpoint, tmp_path, finished):
    qc.quantize(checkpoint, tmp_path / "bf16.gguf", "gguf:BF16", vocabulary=False)
    qc.quantize(tmp_path / "bf16.gguf", tmp_path / "q.gguf", "gguf:Q4_K_M")
    (tmp_path / "direct.gguf").write_bytes(finished)
    direct, again = qc.open(tmp_path / "direct.gguf"), qc.open(tmp_path / "q.gguf")
    assert list(direct) == list(again)
    assert all(direct[name].read().tobytes() == again[name].read().tobytes() for name in direct)


def test_a_gguf_source_keeps_its_alignment(checkpoint, tmp_path, finished):
    qc.quantize(checkpoint, tmp_path / "bf16.gguf", "gguf:BF16", vocabulary=False)
    file = read_gguf(tmp_path / "bf16.gguf")
    data = file.path.read_bytes()
    names = {"bfloat16": "BF16", "float32": "F32"}
    layout = gguf_layout(
        [*file.entries, ("general.alignment", "uint32", 256)],
        [(t.name, t.shape, names[t.dtype]) for t in file.tensors],
        alignment=256,
    )
    buffer = bytearray(layout.nbytes)
    buffer[: len(layout.header)] = layout.header
    for tensor, place in zip(file.tensors, layout.tensors, strict=True):
        buffer[place.offset : place.offset + place.nbytes] = data[tensor.offset : tensor.offset + tensor.nbytes]
    (tmp_path / "aligned.gguf").write_bytes(buffer)
    qc.quantize(tmp_path / "aligned.gguf", tmp_path / "q.gguf")
    (tmp_path / "direct.gguf").write_bytes(finished)
    direct, aligned = qc.open(tmp_path / "direct.gguf"), qc.open(tmp_path / "q.gguf")
    assert all(tensor.offset % 256 == 0 for tensor in aligned.values())
    assert all(direct[name].read().tobytes() == aligned[name].read().tobytes() for name in direct)


def test_the_memory_budget_does_not_change_the_bytes(checkpoint, tmp_path, finished):
    calls = []
    qc.quantize(
        checkpoint,
        tmp_path / "x.gguf",
        vocabulary=False,
        memory_budget=SMALL_BUDGET,
        progress=lambda done, total: calls.append((done, total)),
    )
    assert (tmp_path / "x.gguf").read_bytes() == finished
    assert len(calls) > 60
    assert calls[-1][0] == calls[-1][1]


@pytest.mark.parametrize("workers", [1, 3])
def test_threads_of_an_executor_give_the_same_bytes(checkpoint, tmp_path, finished, workers):
    with ThreadPoolExecutor(workers) as pool:
        qc.quantize(checkpoint, tmp_path / "x.gguf", vocabulary=False, executor=pool, memory_budget="1 MB")
    assert (tmp_path / "x.gguf").read_bytes() == finished


def test_processes_give_the_same_bytes(checkpoint, tmp_path, finished):
    with process_executor(2) as pool:
        qc.quantize(checkpoint, tmp_path / "x.gguf", vocabulary=False, executor=pool)
    assert (tmp_path / "x.gguf").read_bytes() == finished


@pytest.mark.slow
@pytest.mark.time_limit(180)
def test_ray_gives_the_same_bytes(checkpoint, tmp_path, finished, ray_cluster):
    with ray_executor(ray_cluster.address) as pool:
        qc.quantize(checkpoint, tmp_path / "x.gguf", vocabulary=False, executor=pool, memory_budget="1 MB")
    assert (tmp_path / "x.gguf").read_bytes() == finished
    assert [path.name for path in tmp_path.iterdir()] == ["x.gguf"]


class Interrupted(BaseException):
    pass


def interrupt(checkpoint, path, after, **options):
    """Run a job and interrupt it after so many bytes."""

    def stop(done, total):
        if done >= after * total:
            raise Interrupted

    with pytest.raises(Interrupted):
        qc.quantize(checkpoint, path, vocabulary=False, memory_budget=SMALL_BUDGET, progress=stop, **options)


def test_an_interrupted_job_goes_on_and_ends_with_the_same_bytes(checkpoint, tmp_path, finished):
    path = tmp_path / "x.gguf"
    interrupt(checkpoint, path, 0.4)
    assert not path.exists()
    partial, journal = sorted(hidden_files(tmp_path))
    assert journal == ".x.gguf.journal"
    assert re.fullmatch(r"\.x\.gguf\.[0-9a-f]{16}\.partial", partial)
    report = qc.quantize(checkpoint, path, vocabulary=False)
    assert report.resumed_nbytes > 0.3 * len(finished)
    assert path.read_bytes() == finished
    assert hidden_files(tmp_path) == []


def test_work_of_an_earlier_run_is_not_done_again(checkpoint, tmp_path, monkeypatch):
    path = tmp_path / "x.gguf"
    interrupt(checkpoint, path, 0.5)
    loaded = []
    monkeypatch.setattr(row_stream, "load", lambda item, load=row_stream.load: loaded.append(item.nbytes) or load(item))
    report = qc.quantize(checkpoint, path, vocabulary=False, memory_budget=SMALL_BUDGET)
    total = sum(line.nbytes for line in report.tensors)
    assert sum(loaded) == total - report.resumed_nbytes


def test_without_resume_the_job_starts_again(checkpoint, tmp_path, finished):
    path = tmp_path / "x.gguf"
    interrupt(checkpoint, path, 0.4)
    assert qc.quantize(checkpoint, path, vocabulary=False, resume=False).resumed_nbytes == 0
    assert path.read_bytes() == finished


def test_an_interrupted_job_without_resume_leaves_nothing(checkpoint, tmp_path):
    interrupt(checkpoint, tmp_path / "x.gguf", 0.4, resume=False)
    assert list(tmp_path.iterdir()) == []


def test_a_source_in_memory_starts_again(checkpoint, tmp_path):
    opened = qc.open(checkpoint)
    tensors = [ArrayTensor(name, tensor.read().copy()) for name, tensor in opened.items()]
    source = TensorSource(tensors, config=opened.config)
    interrupt(source, tmp_path / "x.gguf", 0.5)
    assert list(tmp_path.iterdir()) == []


def test_damaged_rows_of_a_partial_file_are_written_again(checkpoint, tmp_path, finished):
    path = tmp_path / "x.gguf"
    interrupt(checkpoint, path, 0.6)
    (partial,) = tmp_path.glob(".x.gguf.*.partial")
    data = bytearray(partial.read_bytes())
    data[len(data) // 4] ^= 1
    partial.write_bytes(data)
    qc.quantize(checkpoint, path, vocabulary=False)
    assert path.read_bytes() == finished


@pytest.mark.parametrize(
    "tail", [b'{"tensor": 1, "sta', b"garbage\n", b'{"tensor": 99, "start": 0}\n', b"[1]\n", b"\xff\n"]
)
def test_a_damaged_journal_does_not_change_the_bytes(checkpoint, tmp_path, finished, tail):
    path = tmp_path / "x.gguf"
    interrupt(checkpoint, path, 0.3)
    with (tmp_path / ".x.gguf.journal").open("ab") as file:
        file.write(tail)
    assert qc.quantize(checkpoint, path, vocabulary=False).resumed_nbytes > 0
    assert path.read_bytes() == finished


def test_a_journal_that_claims_too_much_is_not_believed(checkpoint, tmp_path, finished):
    path = tmp_path / "x.gguf"
    interrupt(checkpoint, path, 0.3)
    with (tmp_path / ".x.gguf.journal").open("ab") as file:
        file.write(json.dumps({"tensor": 5, "start": 0, "stop": 256, "crc32": 1}).encode() + b"\n")
    qc.quantize(checkpoint, path, vocabulary=False)
    assert path.read_bytes() == finished


def test_a_changed_source_starts_again(checkpoint, tmp_path):
    copy = Path(shutil.copytree(checkpoint, tmp_path / "tiny"))
    path = tmp_path / "x.gguf"
    interrupt(copy, path, 0.5)
    write_checkpoint(copy, llama_tensors(seed=1))
    assert qc.quantize(copy, path, vocabulary=False).resumed_nbytes == 0
    qc.quantize(copy, tmp_path / "direct.gguf", vocabulary=False)
    assert path.read_bytes() == (tmp_path / "direct.gguf").read_bytes()


def test_another_mixture_starts_again(checkpoint, tmp_path):
    path = tmp_path / "x.gguf"
    interrupt(checkpoint, path, 0.5)
    assert qc.quantize(checkpoint, path, "gguf:Q8_0", vocabulary=False).resumed_nbytes == 0


def test_two_jobs_cannot_write_one_file(checkpoint, tmp_path):
    def second(done, total):
        with pytest.raises(SpecError, match="another job is writing"):
            qc.quantize(checkpoint, tmp_path / "x.gguf", vocabulary=False)
        raise Interrupted

    with pytest.raises(Interrupted):
        qc.quantize(checkpoint, tmp_path / "x.gguf", vocabulary=False, progress=second)


def damaged(tmp_path, name, index, value):
    tensors = llama_tensors()
    tensors[name] = tensors[name].copy()
    tensors[name][index] = value
    return write_checkpoint(tmp_path / "damaged", tensors)


@pytest.mark.parametrize(("value", "error"), [(np.nan, NaNError), (np.inf, RangeError)])
@pytest.mark.parametrize("to", ["gguf:Q4_K_M", "gguf:BF16"])
def test_weights_that_are_not_finite_are_named(tmp_path, value, error, to):
    source = damaged(tmp_path, "model.layers.1.mlp.up_proj.weight", (300, 7), value)
    with pytest.raises(error, match=r"blk.1.ffn_up.weight, made from model.layers.1.mlp.up_proj.weight, .* \(300, 7\)"):
        qc.quantize(source, tmp_path / "x.gguf", to, vocabulary=False, memory_budget=SMALL_BUDGET)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged"]


def test_values_above_float16_are_named(tmp_path):
    source = damaged(tmp_path, "model.layers.1.mlp.up_proj.weight", (2, 3), 1e9)
    with pytest.raises(RangeError, match=r"\(2, 3\), which F16 cannot represent"):
        qc.quantize(source, tmp_path / "x.gguf", "gguf:F16", vocabulary=False)


def test_scales_that_float16_cannot_represent_are_refused_unless_kept(tmp_path):
    tensors = llama_tensors()
    name = "model.layers.0.mlp.down_proj.weight"
    tensors[name] = np.full_like(tensors[name], 1e-12)
    source = write_checkpoint(tmp_path / "damaged", tensors)
    with pytest.raises(ParamsError, match=r"tensor blk.0.ffn_down.weight, rows 0 to 255: float16 cannot represent"):
        qc.quantize(source, tmp_path / "x.gguf", "gguf:Q8_0", vocabulary=False)
    report = qc.quantize(source, tmp_path / "x.gguf", "gguf:Q8_0", vocabulary=False, scales="keep")
    assert len(report.warnings) == 1
    assert "they become 0" in report.warnings[0]
    assert dt.verify(source, tmp_path / "x.gguf").ok


def test_too_little_space_raises_before_the_start(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 10**6, 1000))
    with pytest.raises(SpecError, match=r"needs 829 kB, but .* has only 1 kB free"):
        qc.quantize(checkpoint, tmp_path / "x.gguf", vocabulary=False)
    assert hidden_files(tmp_path) == []


def test_a_full_disk_keeps_the_partial_file(checkpoint, tmp_path, monkeypatch, finished):
    def full(path, offset, data):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(partial_file, "write_at", full)
        with pytest.raises(WorkerError, match="the disk is full"):
            qc.quantize(checkpoint, tmp_path / "x.gguf", vocabulary=False)
    assert len(list(tmp_path.glob(".x.gguf.*.partial"))) == 1
    qc.quantize(checkpoint, tmp_path / "x.gguf", vocabulary=False)
    assert (tmp_path / "x.gguf").read_bytes() == finished


def test_the_output_cannot_be_the_source(checkpoint, tmp_path):
    copy = Path(shutil.copytree(checkpoint, tmp_path / "tiny"))
    os.link(copy / "model-00001-of-00002.safetensors", tmp_path / "link.gguf")
    for path in (copy / "model-00001-of-00002.safetensors", tmp_path / "link.gguf"):
        with pytest.raises(SpecError, match="is a file of the source"):
            qc.quantize(copy, path, vocabulary=False)


def test_an_existing_output_stays_until_the_new_one_is_complete(checkpoint, tmp_path, finished):
    path = tmp_path / "x.gguf"
    path.write_bytes(b"old")
    interrupt(checkpoint, path, 0.5)
    assert path.read_bytes() == b"old"
    qc.quantize(checkpoint, path, vocabulary=False)
    assert path.read_bytes() == finished


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"to": "Q4_K_M"}, SpecError, "such as 'gguf:Q4_K_M'"),
        ({"to": "gguf:Q4_K_X"}, SpecError, "did you mean"),
        ({"memory_budget": "many"}, SpecError, "invalid size"),
        ({"memory_budget": 0}, SpecError, "memory_budget"),
        ({"scales": "drop"}, SpecError, "expected 'raise' or 'keep'"),
        ({"executor": 2}, SpecError, "method submit"),
        ({"recipe": "w4a16"}, SpecError, "GGUF files need a block format"),
        ({"recipe": dt.Recipe([dt.Rule("nothing", weight="q4_k")])}, SpecError, "matches none"),
        ({"importance": {"blk.0.ffn_up.weight": np.ones(3)}}, ShapeError, r"expected \(256,\)"),
        ({"importance": {"other": np.ones(3)}}, SpecError, "collected with another model"),
    ],
)
def test_invalid_arguments_raise(checkpoint, tmp_path, options, error, message):
    with pytest.raises(error, match=message):
        qc.quantize(checkpoint, tmp_path / "x.gguf", vocabulary=False, **options)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_directory_raises(checkpoint, tmp_path):
    with pytest.raises(SpecError, match="not a directory"):
        qc.quantize(checkpoint, tmp_path / "missing" / "x.gguf", vocabulary=False)


def test_an_unknown_architecture_raises(tmp_path):
    source = write_checkpoint(tmp_path / "m", config=CONFIG | {"architectures": ["StrangeForCausalLM"]})
    with pytest.raises(UnsupportedError, match="StrangeForCausalLM"):
        qc.quantize(source, tmp_path / "x.gguf", vocabulary=False)


def test_a_recipe_replaces_types_of_the_mixture(checkpoint, tmp_path):
    rules = [dt.Rule("blk.0.*", weight="q8_0"), dt.Rule("blk.1.attn_q", skip=True)]
    report = qc.quantize(checkpoint, tmp_path / "x.gguf", vocabulary=False, recipe=dt.Recipe(rules))
    types = {line.name: (line.type, line.reason) for line in report.tensors}
    assert types["blk.0.ffn_up.weight"] == ("Q8_0", "set by the recipe")
    assert types["blk.1.attn_q.weight"] == ("BF16", "kept in float by the recipe")
    assert types["blk.1.ffn_up.weight"] == ("Q4_K", "")
    assert types["blk.0.attn_norm.weight"] == ("F32", "")
    assert dt.verify(checkpoint, tmp_path / "x.gguf").ok


def test_importance_weights_the_search(checkpoint, tmp_path):
    weights = np.random.default_rng(0).uniform(0, 4, 256).astype(np.float32)
    importance = {"blk.0.ffn_up.weight": weights}
    report = qc.quantize(checkpoint, tmp_path / "x.gguf", vocabulary=False, importance=importance)
    up = llama_tensors()["model.layers.0.mlp.up_proj.weight"].astype(np.float32)
    expected = dt.quantize(up, "q4_k", importance=weights).packed
    assert qc.open(tmp_path / "x.gguf")["blk.0.ffn_up.weight"].read().tobytes() == expected.tobytes()
    assert "tensors have no importance" in report.warnings[0]


def test_a_plan_has_the_exact_size_and_writes_nothing(checkpoint, tmp_path, finished):
    before = sorted(checkpoint.iterdir())
    plan = qc.plan(checkpoint, vocabulary=False, memory_budget="1 GB")
    assert plan.nbytes_after == len(finished)
    assert plan.types["Q4_K"][0] == 13
    assert 0 < plan.seconds < 60
    assert plan.peak_nbytes < 10**9
    assert sorted(checkpoint.iterdir()) == before
    assert "peak memory" in str(plan)


def test_rows_that_no_block_fits_fall_back_and_say_so(tmp_path):
    config = CONFIG | {"intermediate_size": 160}
    source = write_checkpoint(tmp_path / "m", config=config)
    report = qc.quantize(source, tmp_path / "x.gguf", vocabulary=False)
    line = next(line for line in report.tensors if line.name == "blk.0.ffn_down.weight")
    assert line.type != "Q4_K"
    assert "not a multiple of 256" in line.reason
    assert line.reason in str(report)


def test_a_config_that_contradicts_the_tensors_raises(tmp_path):
    source = write_checkpoint(tmp_path / "m", llama_tensors(), CONFIG | {"hidden_size": 512})
    with pytest.raises(dt.DetentError):
        qc.quantize(source, tmp_path / "x.gguf", vocabulary=False)


def test_float8_checkpoints_are_quantized_from_their_scaled_values(tmp_path, monkeypatch):
    from . import tiny_checkpoints

    monkeypatch.setitem(tiny_checkpoints._DTYPES, "float8_e4m3fn", "F8_E4M3")
    tensors = llama_tensors()
    name = "model.layers.0.mlp.up_proj.weight"
    codes = (tensors[name].astype(np.float32) * 100).astype(ml_dtypes.float8_e4m3fn)
    scale = np.random.default_rng(0).uniform(0.005, 0.02, (4, 2)).astype(np.float32)
    tensors |= {name: codes, f"{name}_scale_inv": scale}
    source = write_checkpoint(tmp_path / "m", tensors)
    qc.quantize(source, tmp_path / "x.gguf", vocabulary=False)
    values = codes.astype(np.float32) * np.repeat(np.repeat(scale, 128, 0), 128, 1)
    assert (
        qc.open(tmp_path / "x.gguf")["blk.0.ffn_up.weight"].read().tobytes()
        == dt.quantize(values, "q4_k").packed.tobytes()
    )


def test_each_job_has_its_own_partial_file(checkpoint, tmp_path, finished):
    """A worker of an earlier job cannot write into the file of the next one, because it opens the file by name."""
    path = tmp_path / "x.gguf"
    interrupt(checkpoint, path, 0.4)
    (first,) = tmp_path.glob(".x.gguf.*.partial")
    with pytest.raises(KeyboardInterrupt):
        qc.quantize(checkpoint, path, to="gguf:Q8_0", vocabulary=False, progress=_interrupting)
    assert not first.exists()
    (second,) = tmp_path.glob(".x.gguf.*.partial")
    assert second.name != first.name


def _interrupting(*_):
    raise KeyboardInterrupt


def test_another_version_of_detent_starts_again(checkpoint, tmp_path, finished, monkeypatch):
    path = tmp_path / "x.gguf"
    interrupt(checkpoint, path, 0.4)
    monkeypatch.setattr("detent.checkpoint.row_stream.__version__", "0.0.0")
    assert qc.quantize(checkpoint, path, vocabulary=False).resumed_nbytes == 0


def test_a_journal_that_was_removed_before_it_is_locked_is_opened_again(checkpoint, tmp_path, monkeypatch):
    path, calls = tmp_path / "x.gguf", []
    flock = partial_file.fcntl.flock

    def removing(file, operation):
        if not calls:
            (tmp_path / ".x.gguf.journal").unlink()
        calls.append(operation)
        return flock(file, operation)

    monkeypatch.setattr(partial_file.fcntl, "flock", removing)
    journal, seen = tmp_path / ".x.gguf.journal", []
    qc.quantize(checkpoint, path, vocabulary=False, progress=lambda *_: seen.append(journal.exists()))
    assert len(calls) == 2
    assert seen[0]
