"""Commands on images, sounds and texts, run as users run them."""

import json

import numpy as np
import pytest

import detent.onnx as qo
from detent.cli import main
from detent.onnx_model import DataFiles
from detent.onnx_model.batches import open_batches
from detent.onnx_model.files import load_model

from .cli_cases import write_classifier, write_photos


@pytest.fixture
def gallery(tmp_path, monkeypatch):
    """A directory with model.onnx and 24 images of two classes in photos/, which is the current directory."""
    write_photos(tmp_path / "photos")
    write_classifier(tmp_path / "model.onnx")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(capsys, *arguments, code=0):
    assert main([str(each) for each in arguments]) == code
    return capsys.readouterr()


NOTE = "images: 24 files, 16x20 cropped from 19, RGB, NCHW, pixels scaled to -1..1\n"
OPTIONS = ("--data", "photos", "--preprocess", "-1..1,size=16x20")


def test_images_give_the_file_that_their_arrays_give(gallery, capsys):
    files = DataFiles("photos", preprocess="-1..1,size=16x20")
    feeds = list(open_batches(files, load_model("model.onnx").inputs))
    np.savez("arrays.npz", image=np.concatenate([feed["image"] for feed in feeds]))
    assert feeds[0]["image"].shape == (1, 3, 16, 20)
    first = qo.quantize("model.onnx", "images.onnx", files, progress=False)
    second = qo.quantize("model.onnx", "arrays.onnx", "arrays.npz", progress=False)
    assert (gallery / "images.onnx").read_bytes() == (gallery / "arrays.onnx").read_bytes()
    assert (first.data_notes, second.data_notes) == ((NOTE.strip(),), ())
    assert str(first).count(NOTE) == 1


def test_every_command_reads_images(gallery, capsys):
    out, err = run(capsys, "quantize", "model.onnx", *OPTIONS, "--report", "report.json", "--json")
    assert NOTE in err
    document = json.loads(out)
    labels = "labels: none (--labels), because the data have 2 sub-directories, but the model 3 classes"
    assert document["data_notes"] == [NOTE.strip(), labels]
    assert document["evaluated_on_held_out"]
    assert ["Data", f"{NOTE.strip()}; {labels}"] in json.loads((gallery / "report.json").read_text())["facts"]
    out, err = run(capsys, "verify", "model.onnx", "model.w8a8.onnx", *OPTIONS, "--batches", 2, "--json")
    assert NOTE in err
    assert json.loads(out)["data_notes"] == [NOTE.strip()]
    for arguments in (
        ("sensitivity", "model.onnx", "--samples", 2),
        ("compare", "model.w8a8.onnx", "model.w8a8.onnx", "--source", "model.onnx"),
        ("bench", "model.onnx", "model.w8a8.onnx", "--repeat", 1),
    ):
        assert NOTE in run(capsys, *arguments, *OPTIONS).err


def test_a_dry_run_reads_images(gallery, capsys):
    out, _ = run(capsys, "quantize", "model.onnx", *OPTIONS, "--dry-run", "--json")
    assert json.loads(out)["calibration_batches"] == 22
    assert not (gallery / "model.w8a8.onnx").exists()


@pytest.mark.parametrize("number", [0, 9], ids=["calibration", "held out"])
def test_nothing_is_written_if_an_image_is_truncated(gallery, capsys, number):
    path = gallery / "photos" / "cat" / f"{number:02}.png"
    path.write_bytes(path.read_bytes()[:-200])
    _, err = run(capsys, "quantize", "model.onnx", *OPTIONS, "--report", "r.json", code=2)
    assert f"{number:02}.png: the image is damaged or truncated" in err
    assert not (gallery / "model.w8a8.onnx").exists()
    assert not (gallery / "r.json").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--data", "photos"), ["--preprocess size=224x224"]),
        (("--data", "photos", "--preprocess", "imgnet"), ["did you mean 'imagenet'"]),
        (("--data", "photos", "--tokenizer", "model.onnx"), ["only to a .txt file"]),
        (("--recipe", "w8a16", "--preprocess", "0..1"), ["--preprocess, but no data"]),
        (("--data", "texts.txt"), ["no such file"]),
    ],
)
def test_bad_options(gallery, capsys, arguments, words):
    _, err = run(capsys, "quantize", "model.onnx", *arguments, code=2)
    assert not [word for word in words if word not in err], err


def test_a_missing_package_has_its_own_exit_code(gallery, capsys, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    assert "pip install 'detent[images]'" in run(capsys, "quantize", "model.onnx", *OPTIONS, code=3).err
    (gallery / "texts.txt").write_text("a text")
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    arguments = ("quantize", "model.onnx", "--data", "texts.txt", "--tokenizer", "t.json")
    assert "fill" in run(capsys, *arguments, code=2).err  # the input has four axes


def test_bench_names_the_option_for_dynamic_sizes(gallery, capsys):
    qo.quantize("model.onnx", recipe="w8a16", progress=False)
    _, err = run(capsys, "bench", "model.onnx", "model.w8a16.onnx", "--repeat", 1, code=2)
    assert "--shape image=SIZES, such as 1x3x1x1" in err.splitlines()[-1]  # the kernel is larger than 1 x 1
    out, err = run(capsys, "bench", "model.onnx", "model.w8a16.onnx", "--repeat", 1, "--shape", "image=1x3x8x8")
    assert "image 1x3x8x8" in out
    assert "--shape" not in err
