"""Sounds as data: .wav files for a model whose only input is a waveform.

The input has floats and the shape (samples), (batch, samples), (batch, 1, samples) or (batch, samples, 1). Channels
of a file are averaged, and integers are scaled to -1..1: a code c of b bits becomes c / 2**(b - 1), after subtracting
128 from 8-bit codes. Floats are used as they are.

If the model fixes the number of samples, a file is cut into windows of this length that do not overlap, and the last
window is filled with zeros. Otherwise a file is one sample, or windows of ``length`` of the preprocessing. Sounds of
one batch are filled with zeros up to the longest.

A model does not tell its sample rate. All files must have the same rate, unless ``rate`` of the preprocessing is set:
then others are resampled by linear interpolation, without a low-pass filter. That is enough for the ranges of
activations; for a metric, resample the files with a better filter first.

Files are untrusted: sizes of chunks are compared with the size of the file before memory is allocated. PCM of 8, 16, 24
and 32 bits, and floats of 32 and 64 bits are read here, because the module ``wave`` does not read floats.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from os import fspath
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from detent.errors import FileFormatError, ShapeError, SpecError
from detent.onnx_model.data_files import (
    DataFiles,
    DataListing,
    FileBatches,
    batch_size_of,
    cut,
    labels_of,
    left_out,
    only_input,
)
from detent.onnx_model.model_inputs import Array, Feed, InputInfo
from detent.tables import counted

__all__ = ["SUFFIXES", "WavFile", "open_sounds"]

SUFFIXES = frozenset({".wav"})
FIELDS = ("rate", "length")  # of Preprocessing
PCM, FLOAT, EXTENSIBLE = 1, 3, 0xFFFE  # format tags
BITS = {PCM: (8, 16, 24, 32), FLOAT: (32, 64)}
MAX_CHANNELS, MAX_RATE = 64, 1 << 20
MAX_CHUNKS = 1000
MAX_WINDOW = 1 << 27  # samples of one window or file; 512 MB as float32
MAX_WINDOWS = 1 << 20
FORMAT_BYTES, EXTENSIBLE_BYTES = 16, 26  # of the chunk "fmt ", up to the format tag of an extensible format


@dataclass(frozen=True)
class WavFile:
    """The checked header of a .wav file.

    Attributes:
        path: the file.
        rate: samples per second and channel.
        channels: number of channels.
        frames: samples per channel.
        bits: bits per sample.
        is_float: whether samples are floats.
        start: position of the first sample in the file, in bytes.
    """

    path: Path
    rate: int
    channels: int
    frames: int
    bits: int
    is_float: bool
    start: int

    @classmethod
    def open(cls, path: Path) -> "WavFile":
        """Read and check the header of a file.

        Raises:
            FileFormatError: the file is damaged, truncated or empty, or has an unknown format.
        """
        try:
            with path.open("rb") as file:
                return _read_header(path, file, path.stat().st_size)
        except (struct.error, OSError) as error:
            raise FileFormatError(f"{fspath(path)} is damaged, or not a .wav file: {error}") from error

    def read(self, begin: int, end: int) -> Array:
        """Read the frames from ``begin`` to ``end``; return the mean of the channels as float32.

        Raises:
            FileFormatError: the file became shorter, or contains NaN or infinity.
        """
        frame_bytes = self.channels * self.bits // 8
        with self.path.open("rb") as file:
            file.seek(self.start + begin * frame_bytes)
            data = file.read((end - begin) * frame_bytes)
        if len(data) != (end - begin) * frame_bytes:
            raise FileFormatError(
                f"{fspath(self.path)} was truncated after it was opened: do not change it until it is read"
            )
        samples = _scaled(data, self.bits, is_float=self.is_float).reshape(-1, self.channels)
        if not np.isfinite(samples).all():
            raise FileFormatError(f"{fspath(self.path)} contains samples that are NaN or infinite: save it again")
        mono: Array = samples.mean(axis=1, dtype=np.float64).astype(np.float32)
        return mono

    def resampled_frames(self, rate: int) -> int:
        """Return the number of frames at another rate."""
        return max(1, self.frames * rate // self.rate)

    def resampled(self, begin: int, end: int, rate: int) -> Array:
        """Return the frames from ``begin`` to ``end`` at another rate, by linear interpolation."""
        if rate == self.rate:
            return self.read(begin, end)
        position = np.arange(begin, end, dtype=np.int64) * self.rate
        left, rest = position // rate, position % rate
        first, last = int(left[0]), min(int(left[-1]) + 2, self.frames)
        source = self.read(first, last).astype(np.float64)
        right = np.minimum(left + 1, self.frames - 1) - first
        weight = rest / rate
        values: Array = (source[left - first] * (1 - weight) + source[right] * weight).astype(np.float32)
        return values


def _read_header(path: Path, file: IO[bytes], size: int) -> WavFile:
    where = fspath(path)
    riff, _, wave = struct.unpack("<4sI4s", file.read(12))
    if riff != b"RIFF" or wave != b"WAVE":
        raise FileFormatError(f"{where} does not begin like a .wav file: save it again as .wav")
    layout: tuple[int, int, int, int] | None = None  # tag, channels, rate, bits
    for _ in range(MAX_CHUNKS):
        name, length = struct.unpack("<4sI", file.read(8))
        start = file.tell()
        if start + length > size:
            raise FileFormatError(
                f"{where} is truncated: chunk {name!r} has {length} bytes, but the file holds {size - start}: copy or "
                "save the file again"
            )
        if name == b"fmt ":
            layout = _read_format(file.read(min(length, EXTENSIBLE_BYTES)), where)
        if name == b"data" and layout is not None:
            tag, channels, rate, bits = layout
            frames = length // (channels * bits // 8)
            if not frames:
                raise FileFormatError(f"{where} has no samples: remove the file")
            return WavFile(path, rate, channels, frames, bits, tag == FLOAT, start)
        file.seek(start + length + length % 2)
    raise FileFormatError(f"{where} has over {MAX_CHUNKS} chunks before its samples: save it again as .wav")


def _read_format(data: bytes, where: str) -> tuple[int, int, int, int]:
    """Return the format tag, channels, rate and bits of a chunk "fmt "."""
    tag, channels, rate, _, block, bits = struct.unpack("<HHIIHH", data[:FORMAT_BYTES])
    if tag == EXTENSIBLE and len(data) >= EXTENSIBLE_BYTES:
        (tag,) = struct.unpack("<H", data[EXTENSIBLE_BYTES - 2 :])
    if tag not in BITS or bits not in BITS[tag]:
        raise FileFormatError(
            f"{where} has format {tag} with {bits} bits, expected PCM of 8, 16, 24 or 32 bits, or floats: save it as "
            "16-bit PCM"
        )
    if not 1 <= channels <= MAX_CHANNELS or not 1 <= rate <= MAX_RATE or block != channels * bits // 8:
        raise FileFormatError(
            f"{where} has {channels} channels at {rate} Hz in frames of {block} bytes, expected 1 to {MAX_CHANNELS} "
            f"channels, at most {MAX_RATE} Hz, and frames of {channels * bits // 8} bytes: save it again as .wav"
        )
    return tag, channels, rate, bits


def _scaled(data: bytes, bits: int, *, is_float: bool) -> Array:
    """Convert samples to floats; integers are scaled to -1..1."""
    if is_float:
        return np.frombuffer(data, f"<f{bits // 8}")
    if bits == 8:
        return (np.frombuffer(data, np.uint8).astype(np.float64) - 128) / 128
    if bits == 24:  # as the upper bytes of 32 bits
        padded = np.zeros((len(data) // 3, 4), np.uint8)
        padded[:, 1:] = np.frombuffer(data, np.uint8).reshape(-1, 3)
        data, bits = padded.tobytes(), 32
    return np.frombuffer(data, f"<i{bits // 8}").astype(np.float64) / (1 << (bits - 1))


class _Window(NamedTuple):
    sound: int  # index of the file
    begin: int
    end: int


def open_sounds(files: DataFiles, listing: DataListing, inputs: Sequence[InputInfo]) -> FileBatches:
    """Open .wav files as batches of the model's only input; check the headers of all files.

    Raises:
        SpecError, ShapeError: the model or the options do not fit sounds, or files have different rates.
        FileFormatError: a file is damaged, truncated or empty.
    """
    where = fspath(listing.root)
    files.reject_unused("sounds", preprocess=FIELDS)
    info = only_input(inputs, where, "sounds")
    length = _window_length(files.preprocessing.length, info, where)
    sounds = [WavFile.open(path) for path in listing.paths]
    rate = files.preprocessing.rate or _common_rate(sounds)
    windows = _windows(sounds, rate, length)
    has_batch_axis = info.shape is None or len(info.shape) > 1
    size, is_fixed = batch_size_of(inputs, files.batch_size, where) if has_batch_axis else (1, False)
    batches = cut(len(windows), size, is_fixed=is_fixed, what="sounds", where=where)

    def read(numbers: Sequence[int] | None) -> Iterator[Feed]:
        for batch in batches if numbers is None else (batches[number] for number in numbers):
            parts = [(sounds[windows[i].sound], windows[i]) for i in batch]
            yield {info.name: _stacked(parts, rate, length, info)}

    labels = [listing.class_numbers[window.sound] for window in windows] if listing.classes else []
    note = _note(sounds, rate, length, len(windows), files.preprocessing.rate) + left_out(len(windows), batches)
    return FileBatches(where, len(batches), read, labels_of(labels, batches), listing.classes, note)


def _windows(sounds: Sequence[WavFile], rate: int, length: int | None) -> list[_Window]:
    """Cut sounds into windows; without a length, each sound is one window."""
    windows = list[_Window]()
    for i, sound in enumerate(sounds):
        frames = sound.resampled_frames(rate)
        step = length or frames
        if step > MAX_WINDOW:
            raise ShapeError(
                f"{fspath(sound.path)}: a sound has {frames:,} samples, expected at most {MAX_WINDOW:,}: set the "
                "length of windows, e.g. --preprocess length=16000"
            )
        if len(windows) + frames // step > MAX_WINDOWS:
            raise ShapeError(
                f"{fspath(sound.path)}: the sounds have over {MAX_WINDOWS:,} windows of {length} samples: pass fewer "
                "files"
            )
        windows += [_Window(i, begin, min(frames, begin + step)) for begin in range(0, frames, step)]
    return windows


def _window_length(given: int | None, info: InputInfo, where: str) -> int | None:
    """Return the number of samples of a window, or None if each file is one sample."""
    axis = _samples_axis(info)
    if info.dtype.kind != "f" or axis is None:
        raise ShapeError(
            f"{where}: input {info.name!r} of type {info.dtype} has shape {info.shape_text}, but sounds need floats of "
            "shape (samples), (batch, samples), (batch, 1, samples) or (batch, samples, 1): pass .npz files"
        )
    fixed = None if info.shape is None else info.shape[axis]
    if given is not None and fixed not in {None, given}:
        raise ShapeError(
            f"{where}: got length={given} (--preprocess), but input {info.name!r} has shape {info.shape_text}: drop "
            "length"
        )
    return fixed or given


def _samples_axis(info: InputInfo) -> int | None:
    """Return the axis of the samples, or None if the shape is not that of a waveform."""
    match info.shape:
        case None | (_, _):
            return 1
        case (_,):
            return 0
        case (_, 1, _) | (_, None, None):
            return 2
        case (_, _, 1):
            return 1
    return None


def _common_rate(sounds: Sequence[WavFile]) -> int:
    first = sounds[0]
    other = next((sound for sound in sounds if sound.rate != first.rate), None)
    if other is not None:
        raise SpecError(
            f"{fspath(other.path)} has {other.rate} Hz, but {fspath(first.path)} has {first.rate} Hz: pass the model's "
            f"rate, e.g. --preprocess rate={first.rate}, to resample"
        )
    return first.rate


def _stacked(parts: Sequence[tuple[WavFile, _Window]], rate: int, length: int | None, info: InputInfo) -> Array:
    """Read windows of sounds, and fill them with zeros up to the same length."""
    longest = length or max(window.end - window.begin for _, window in parts)
    samples = np.zeros((len(parts), longest), info.dtype)
    for row, (sound, window) in zip(samples, parts, strict=True):
        row[: window.end - window.begin] = sound.resampled(window.begin, window.end, rate)
    rank, axis = 2 if info.shape is None else len(info.shape), _samples_axis(info)
    return samples[0] if rank == 1 else samples if rank == 2 else np.expand_dims(samples, 3 - (axis or 1))


def _note(sounds: Sequence[WavFile], rate: int, length: int | None, windows: int, given: int | None) -> str:
    parts = [counted(len(sounds), "file", ","), f"{rate:,} Hz", "mono"]
    parts.append(f"{counted(windows, 'window', ',')} of {length:,} samples" if length else "whole files")
    if given is None:
        return f"sounds: {', '.join(parts)} (if the model expects another rate, pass --preprocess rate=HZ)"
    resampled = sum(sound.rate != rate for sound in sounds)
    return f"sounds: {', '.join(parts)}, {resampled} resampled"
