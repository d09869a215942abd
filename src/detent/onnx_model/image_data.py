"""Images as data: .png, .jpg, .bmp and .webp files, decoded when their batch is read.

An image becomes a sample of the model's only input in these steps:

1. It is rotated as its EXIF orientation says, and transparent pixels are composed on white.
2. It is converted to RGB, BGR or gray (ITU-R 601 luma). Pixels of 16 bits keep their upper 8 bits.
3. It is resized with Pillow's bilinear filter, which averages over all pixels if the image shrinks, and cropped.
4. Its pixels are normalized as ``Preprocessing`` says, and the axes are arranged as the model expects.

Size, layout and number of channels follow from the shape of the input. A model of integers gets pixels from 0 to 255.
For a float model, scale, mean and std are guessed if they are not given: "0..255" or "0..1" if the first operator of
the model shows that it normalizes such pixels itself, otherwise "imagenet" for color images and "0..1" for gray ones.

Files are untrusted: Pillow reads only the four formats, and the number of pixels in a header is checked before the
image is decoded. The headers of all files are checked when the directory is opened.
"""

import struct
import warnings
import zlib
from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import ceil
from os import fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from detent.errors import FileFormatError, ShapeError, SpecError, UnsupportedError, install_hint
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
from detent.onnx_model.preprocess_options import PRESETS, Preprocessing
from detent.tables import counted

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["SUFFIXES", "complete", "open_images"]

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".webp"})
FORMATS = ("PNG", "JPEG", "BMP", "WEBP")
FIELDS = ("scale", "mean", "std", "size", "resize", "crop", "layout", "color")  # of Preprocessing
MAX_PIXELS = 89_478_485  # Pillow warns about larger images
CACHE_BYTES = 1 << 26  # of decoded images, because data are read several times
MARGIN = 8 / 7  # of the resized image around the crop; 256 pixels for 224
CHANNELS = {"rgb": 3, "bgr": 3, "gray": 1}
WHITE = (255, 255, 255, 255)
_DAMAGE = (OSError, SyntaxError, ValueError, TypeError, KeyError, IndexError, EOFError, struct.error, zlib.error)
_TEXTS = {
    "imagenet": "ImageNet mean and std",
    "0..1": "pixels scaled to 0..1",
    "-1..1": "pixels scaled to -1..1",
    "0..255": "pixels 0..255",
}


def open_images(files: DataFiles, listing: DataListing, inputs: Sequence[InputInfo]) -> FileBatches:
    """Open images as batches of the model's only input; check the headers of all files.

    Raises:
        UnsupportedError: Pillow is not installed.
        SpecError, ShapeError: the model or the options do not fit images.
        FileFormatError: a file is damaged, or has too many pixels.
    """
    where = fspath(listing.root)
    files.reject_unused("images", preprocess=FIELDS)
    info = only_input(inputs, where, "images")
    preprocessing = complete(files.preprocessing, info, where)
    is_guessed = files.preprocessing.scale is None and info.dtype.kind == "f"
    size, is_fixed = batch_size_of(inputs, files.batch_size, where)
    batches = cut(len(listing.paths), size, is_fixed=is_fixed, what="images", where=where)
    for path in listing.paths:
        _open_image(path).close()
    tables = _tables(preprocessing, info.dtype)
    height, width = preprocessing.size or (1, 1)

    @lru_cache(CACHE_BYTES // (3 * height * width))
    def pixels(i: int) -> Array:
        return _pixels(listing.paths[i], preprocessing)

    def read(numbers: Sequence[int] | None) -> Iterator[Feed]:
        for batch in batches if numbers is None else (batches[number] for number in numbers):
            yield {info.name: np.stack([_normalized(pixels(i), preprocessing, tables) for i in batch])}

    basis = " from the model's first operator" if info.pixels else ""
    guess = f" (guessed{basis}; --preprocess changes it)" if is_guessed else ""
    count = len(listing.paths)
    note = f"images: {counted(count, 'file', ',')}, {_text(preprocessing)}{guess}{left_out(count, batches)}"
    return FileBatches(where, len(batches), read, labels_of(listing.class_numbers, batches), listing.classes, note)


def complete(preprocessing: Preprocessing, info: InputInfo, where: str) -> Preprocessing:
    """Set the fields that follow from the model's input, and guess scale, mean and std.

    Raises:
        ShapeError: the input is not a batch of images of 1 or 3 channels, or its size differs from ``size``.
        SpecError: a size is neither in the model nor in ``preprocessing``, or integers would be normalized.

    >>> info = InputInfo("x", np.dtype("float32"), (None, 3, 224, 224))
    >>> str(complete(Preprocessing(), info, "photos"))
    'imagenet,size=224x224,resize=256,crop=center,layout=nchw,color=rgb'
    """
    shape = (None,) * 4 if info.shape is None else info.shape
    if len(shape) != 4 or info.dtype.kind not in "fiu":
        raise ShapeError(
            f"{where}: input {info.name!r} of type {info.dtype} has shape {info.shape_text}, but images need 4 axes of "
            "numbers, such as (any, 3, 224, 224): pass .npz files"
        )
    layout = preprocessing.layout or ("nhwc" if shape[3] in {1, 3} and shape[1] not in {1, 3} else "nchw")
    channels, *sides = shape[1:] if layout == "nchw" else (shape[3], *shape[1:3])
    color = preprocessing.color or ("gray" if channels == 1 else "rgb")
    if channels not in {None, CHANNELS[color]}:
        raise ShapeError(
            f"{where}: input {info.name!r} has shape {info.shape_text}, so {layout.upper()} images have {channels} "
            f"channels, but {color} images have {CHANNELS[color]}: set layout or color (--preprocess), or pass .npz"
        )
    size = _size(preprocessing.size, sides, info, where)
    crop = preprocessing.crop or "center"
    resize = {"resize": ceil(MARGIN * min(size))} if crop == "center" else {}
    normalization = _normalization(preprocessing, info, color, where)
    return preprocessing.with_defaults(size=size, crop=crop, layout=layout, color=color, **resize, **normalization)


def _size(given: tuple[int, int] | None, sides: Sequence[int | None], info: InputInfo, where: str) -> tuple[int, int]:
    """Return the height and width of the input; ``sides`` are those that the model fixes."""
    height, width = given or sides
    if height is None or width is None:
        raise SpecError(
            f"{where}: input {info.name!r} has shape {info.shape_text}, which does not fix the size of images: pass "
            "one, e.g. --preprocess size=224x224"
        )
    if any(fixed not in {None, side} for fixed, side in zip(sides, (height, width), strict=True)):
        raise ShapeError(
            f"{where}: got size={height}x{width} (--preprocess), but input {info.name!r} has shape {info.shape_text}: "
            "drop size"
        )
    return height, width


def _normalization(preprocessing: Preprocessing, info: InputInfo, color: str, where: str) -> dict[str, object]:
    """Return scale, mean and std; guess them if they are not given."""
    is_float = info.dtype.kind == "f"
    if not is_float and (preprocessing.scale is not None and preprocessing.preset != "0..255"):
        raise SpecError(
            f"{where}: got preprocess={str(preprocessing)!r}, but input {info.name!r} has type {info.dtype}, which "
            "holds pixels 0..255: drop scale, mean and std"
        )
    if not is_float and np.iinfo(info.dtype).max < 255:
        raise SpecError(
            f"{where}: input {info.name!r} has type {info.dtype}, which cannot hold pixels: pass .npz files"
        )
    guess = PRESETS["0..255" if not is_float else info.pixels or ("0..1" if color == "gray" else "imagenet")]
    source = guess if preprocessing.scale is None else preprocessing
    if color == "gray" and max(len(source.mean or ()), len(source.std or ())) > 1:
        raise SpecError(f"{where}: got 3 numbers for mean or std, but the images are gray: pass 1 number")
    return {"scale": source.scale, "mean": source.mean, "std": source.std}


def _text(preprocessing: Preprocessing) -> str:
    height, width = preprocessing.size or (0, 0)
    crop = "stretched" if preprocessing.crop == "none" else f"cropped from {preprocessing.resize}"
    color = str(preprocessing.color)
    normalization = _TEXTS.get(preprocessing.preset) or str(
        Preprocessing(preprocessing.scale, preprocessing.mean, preprocessing.std)
    ).replace(",", " ")
    color = color if color == "gray" else color.upper()
    return f"{height}x{width} {crop}, {color}, {str(preprocessing.layout).upper()}, {normalization}"


def _open_image(path: Path) -> "Image":
    """Open an image without decoding it, and check the number of its pixels."""
    try:
        from PIL import Image  # noqa: PLC0415 - an optional package
    except ImportError as error:
        raise UnsupportedError(f"{fspath(path)}: images need Pillow: {install_hint('PIL')}") from error
    try:
        image = Image.open(path, formats=FORMATS)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise FileFormatError(f"{fspath(path)}: the image is too large: {error}: scale it down") from error
    except _DAMAGE as error:
        raise FileFormatError(
            f"{fspath(path)} is damaged, or not a PNG, JPEG, BMP or WebP image: {_first_line(error)}: save it again, "
            "or remove it"
        ) from error
    width, height = image.size
    if not 0 < width * height <= MAX_PIXELS:
        image.close()
        raise FileFormatError(
            f"{fspath(path)}: the image has {width} x {height} pixels, expected 1 to {MAX_PIXELS:,}: scale it down"
        )
    return image


def _pixels(path: Path, preprocessing: Preprocessing) -> Array:
    """Decode, resize and crop one image; return bytes of shape (height, width, channels)."""
    with _open_image(path) as image:
        try:
            pixels = np.asarray(_cropped(_colored(image, preprocessing), preprocessing))
        except _DAMAGE as error:
            raise FileFormatError(
                f"{fspath(path)}: the image is damaged or truncated: {_first_line(error)}: save it again, or remove it"
            ) from error
    pixels = pixels.reshape(*pixels.shape[:2], -1)
    return pixels[:, :, ::-1] if preprocessing.color == "bgr" else pixels


def _normalized(pixels: Array, preprocessing: Preprocessing, tables: Array) -> Array:
    """Normalize the pixels of one image, and arrange its axes."""
    sample = np.stack([tables[c][pixels[:, :, c]] for c in range(pixels.shape[2])], axis=0)
    return sample if preprocessing.layout == "nchw" else np.ascontiguousarray(sample.transpose(1, 2, 0))


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).partition("\n")[0]


def _colored(image: "Image", preprocessing: Preprocessing) -> "Image":
    """Rotate an image as its EXIF orientation says, and convert it to RGB or gray."""
    from PIL import Image, ImageOps  # noqa: PLC0415 - already loaded

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # many cameras write EXIF data that Pillow warns about
        image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):  # 16 bits; older versions of Pillow read them into 32
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, WHITE), image)
    return image.convert("L" if preprocessing.color == "gray" else "RGB")


def _cropped(image: "Image", preprocessing: Preprocessing) -> "Image":
    """Resize an image to the preprocessing's size; with crop=center, keep its aspect ratio and cut out the middle."""
    from PIL.Image import Resampling  # noqa: PLC0415 - already loaded

    height, width = preprocessing.size or (0, 0)
    if preprocessing.crop == "none":
        return image.resize((width, height), Resampling.BILINEAR)
    shorter = min(image.size)
    factor = max((preprocessing.resize or 0) / shorter, width / image.width, height / image.height)
    # The part of the image that the crop shows, in pixels of the image: resized alone, it needs no large copy.
    part_width, part_height = min(image.width, width / factor), min(image.height, height / factor)
    left, top = (image.width - part_width) / 2, (image.height - part_height) / 2
    box = (left, top, left + part_width, top + part_height)
    return image.resize((width, height), Resampling.BILINEAR, box=box)


def _tables(preprocessing: Preprocessing, dtype: np.dtype[Any]) -> Array:
    """Return a table of the 256 normalized values for each channel."""
    count = CHANNELS[str(preprocessing.color)]
    mean, std = (
        np.broadcast_to(np.asarray(each, np.float64), count) for each in (preprocessing.mean, preprocessing.std)
    )
    values = np.arange(256) * float(preprocessing.scale or 1)
    return np.stack([(values - mean[c]) / std[c] for c in range(count)]).astype(dtype)
