"""All networks by name, with data, losses, decisions and export options."""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import (
    avg_pool2d,
    binary_cross_entropy,
    binary_cross_entropy_with_logits,
    cross_entropy,
    mse_loss,
)

from networks import attention, convolutional, dense, graphs, sequential, series
from networks.network import Array, Data, Export, Network, Outputs, as_classes
from networks.scenes import Scenes, scenes
from networks.tasks import above, brightest, detected, detection_loss, last_classes, log_loss, step_loss

SIDE, MATTING_SIDE, LARGE_SIDE = 64, 512, 1024
SAMPLES, STEPS, TOKENS, COLUMNS = 4000, 64, 64, sequential.COLUMNS
THRESHOLD = 0.5


def _pictures(targets: Callable[[Scenes], tuple[Array, ...]], side: int = SIDE) -> Callable[[int, int], Data]:
    def data(count: int, seed: int) -> Data:
        drawn = scenes(count, side, seed)
        return {"pictures": drawn.pictures}, targets(drawn)

    return data


def _labels(drawn: Scenes) -> tuple[Array, ...]:
    return (drawn.labels,)


def looks(drawn: Scenes) -> tuple[Array, ...]:
    """Return brightness, texture and size as eight classes, which networks without batch norm learn within seconds."""
    radius, contrast = drawn.measures[:, 0], drawn.measures[:, 3]
    is_large = radius > 0.27 * drawn.pictures.shape[-1]
    return (4 * (contrast > 0) + 2 * (drawn.labels % 2) + is_large,)


def _masks(drawn: Scenes) -> tuple[Array, ...]:
    return (drawn.masks,)


def _channels_last(count: int, seed: int) -> Data:
    drawn = scenes(count, SIDE, seed)
    return {"pictures": np.ascontiguousarray(drawn.pictures.transpose(0, 2, 3, 1))}, looks(drawn)


def _small_pictures(count: int, seed: int, side: int = 96) -> Data:
    pictures = scenes(count, side, seed).pictures
    return {"pictures": avg_pool2d(torch.from_numpy(pictures), 2).numpy()}, (pictures,)


def _sounds(count: int, seed: int) -> Data:
    waves, labels = series.sounds(count, SAMPLES, seed)
    return {"waves": waves}, (labels,)


def _motions(count: int, seed: int) -> Data:
    readings, labels = series.motions(count, STEPS, seed)
    return {"readings": readings}, (labels,)


def _texts(count: int, seed: int) -> Data:
    tokens, mask, topics = series.texts(count, TOKENS, seed)
    return {"tokens": tokens, "mask": mask}, (topics,)


def _next_words(count: int, seed: int) -> Data:
    tokens, _, _ = series.texts(count, TOKENS + 1, seed)
    return {"tokens": tokens[:, :-1].copy()}, (tokens[:, 1:].copy(),)


def _tables(count: int, seed: int, with_fields: bool = True) -> Data:
    numbers, fields, labels = series.tables(count, COLUMNS, seed)
    return {"numbers": numbers} | ({"fields": fields} if with_fields else {}), (labels,)


def _reconstruction_loss(outputs: Tensor, pictures: Tensor) -> Tensor:
    return mse_loss(outputs, torch.sigmoid(pictures))


def _regression_loss(outputs: tuple[Tensor, ...], labels: Tensor, boxes: Tensor, measures: Tensor) -> Tensor:
    center, radius, light, scores = outputs
    loss = mse_loss(center / 16, boxes[:, :2] / 16) + mse_loss(radius / 10, measures[:, :1] / 10)
    return loss + mse_loss(light, measures[:, 2:]) + cross_entropy(scores, labels)


def _center_maps(drawn: Scenes) -> tuple[Array, ...]:
    rows, columns = np.mgrid[: SIDE // 4, : SIDE // 4]
    x, y = (drawn.boxes[:, axis, None, None] / 4 for axis in (0, 1))
    near = np.exp(-((rows - y) ** 2 + (columns - x) ** 2) / 4)
    return (near[:, None].astype(np.float32),)


def _painted(outputs: Outputs) -> Array:
    """Paint the boxes of each class into a mask, whose size does not depend on the number of boxes."""
    boxes, _, classes = outputs
    canvas = np.zeros((dense.SHAPES, SIDE, SIDE), bool)
    for (top, left, bottom, right), kind in zip(np.clip(np.rint(boxes), 0, SIDE).astype(int), classes, strict=True):
        canvas[kind, top:bottom, left:right] = True
    return canvas


def _classifier(build: Callable[[], nn.Module], **options: Any) -> Network:
    return Network(build, _pictures(options.pop("targets", _labels)), cross_entropy, decide=as_classes, **options)


def _matting(side: int, held_out: int) -> Network:
    return Network(
        dense.Matting,
        _pictures(_masks, side),
        binary_cross_entropy,
        decide=above(THRESHOLD),
        training_data=_pictures(_masks, SIDE),
        held_out=held_out,
    )


_SEQUENCE = {"decide": as_classes, "steps": 200}
NETWORKS: Mapping[str, Network] = MappingProxyType(
    {
        "mobilenet-v2": _classifier(convolutional.mobilenet_v2),
        "mobilenet-v3": _classifier(convolutional.mobilenet_v3, export=Export(13, dynamic=True)),
        "lcnet": _classifier(convolutional.lcnet, export=Export(11, folds_norms=True)),
        "efficientnet-lite": _classifier(convolutional.efficientnet_lite, export=Export(18, dynamo=True)),
        "resnet-18": _classifier(convolutional.resnet_18, export=Export(folds_norms=True, dynamic=True)),
        "resnet-bottleneck": _classifier(convolutional.resnet_bottleneck, export=Export(11)),
        "resnext": _classifier(convolutional.resnext, export=Export(13)),
        "convnext": _classifier(convolutional.convnext, targets=looks, rate=2e-3, steps=200),
        "densenet": _classifier(convolutional.densenet, export=Export(13)),
        "inception": _classifier(convolutional.inception, export=Export(18, dynamo=True, dynamic=True)),
        "squeezenet": _classifier(convolutional.squeezenet, targets=looks, rate=2e-3, steps=250, export=Export(11)),
        "shufflenet": _classifier(convolutional.shufflenet, steps=200),
        "separable-outliers": _classifier(convolutional.separable, after_training=convolutional.with_outliers),
        "repvgg": _classifier(convolutional.repvgg, after_training=convolutional.merge_branches),
        "vgg": _classifier(convolutional.vgg, targets=looks, rate=2e-3, steps=250, export=Export(13, dynamic=True)),
        "keras-vgg": Network(
            lambda: nn.Sequential(_Turned(), *convolutional.vgg()),
            _channels_last,
            cross_entropy,
            decide=as_classes,
            steps=250,
            rate=2e-3,
            export=Export(writer=lambda model: graphs.keras_pictures(model[1:])),
        ),
        "vit": _classifier(attention.Vit, targets=looks, kind="transformer", steps=200),
        "swin": _classifier(attention.swin, targets=looks, kind="transformer", steps=200),
        "mixer": _classifier(
            attention.mixer, targets=looks, kind="transformer", steps=200, export=Export(18, dynamo=True)
        ),
        "bert": Network(
            attention.Encoder, _texts, cross_entropy, "transformer", as_classes, Export(13, dynamic=True), 200
        ),
        "gpt": Network(
            attention.Decoder, _next_words, step_loss, "transformer", as_classes, Export(18, dynamo=True), held_out=64
        ),
        "speech": Network(
            sequential.Speech, _sounds, step_loss, "transformer", as_classes, Export(17), 200, held_out=64
        ),
        "unet": Network(dense.Unet, _pictures(_masks), binary_cross_entropy_with_logits, decide=above(0), held_out=64),
        "deeplab": Network(
            dense.deeplab,
            _pictures(_masks),
            binary_cross_entropy_with_logits,
            decide=above(0),
            export=Export(13),
            held_out=64,
        ),
        "autoencoder": Network(
            dense.autoencoder,
            _pictures(lambda drawn: (drawn.pictures,)),
            _reconstruction_loss,
            steps=250,
            rate=2e-3,
            export=Export(dynamic=True),
            held_out=64,
        ),
        "super-resolution": Network(
            dense.super_resolution,
            _small_pictures,
            mse_loss,
            rate=2e-3,
            export=Export(11),
            held_out=32,
            training_data=partial(_small_pictures, side=48),
        ),
        "matting": _matting(MATTING_SIDE, 8),
        "yolo": Network(
            dense.Yolo,
            _pictures(lambda drawn: (drawn.labels, drawn.boxes)),
            detection_loss,
            decide=detected,
            steps=200,
            held_out=128,
        ),
        "detector-nms": Network(
            dense.Ssd,
            _pictures(lambda drawn: (drawn.labels, drawn.boxes)),
            detection_loss,
            decide=_painted,
            steps=200,
            export=Export(13, finish=graphs.with_suppression),
            held_out=256,
        ),
        "keypoints": Network(
            dense.keypoints, _pictures(_center_maps), binary_cross_entropy, decide=brightest, held_out=1024
        ),
        "regression": Network(
            dense.regression,
            _pictures(lambda drawn: (drawn.labels, drawn.boxes, drawn.measures)),
            _regression_loss,
            decide=last_classes,
            export=Export(13, folds_norms=True),
        ),
        "lstm": Network(sequential.lstm, _motions, cross_entropy, "recurrent", export=Export(13), **_SEQUENCE),
        "gru": Network(sequential.gru, _motions, cross_entropy, "recurrent", export=Export(17), **_SEQUENCE),
        "tcn": Network(sequential.tcn, _motions, cross_entropy, export=Export(13), **_SEQUENCE),
        "audio": Network(sequential.audio, _sounds, cross_entropy, export=Export(11), **_SEQUENCE),
        "tables": Network(
            sequential.Table, _tables, cross_entropy, "mlp", export=Export(13, dynamic=True), batch=8, **_SEQUENCE
        ),
        "keras-dense": Network(
            sequential.keras_dense,
            partial(_tables, with_fields=False),
            log_loss,
            "mlp",
            export=Export(writer=graphs.keras_dense),
            batch=8,
            **_SEQUENCE,
        ),
    }
)
# Too slow to be part of every run; they run only if they are chosen by name.
LARGE_NETWORKS: Mapping[str, Network] = MappingProxyType(
    {
        "matting-1024": _matting(LARGE_SIDE, 4),
        # 340 MB; not trained, because only time and memory of quantizing matter
        "bert-large": Network(
            partial(attention.Encoder, width=768, blocks=12, heads=12),
            _texts,
            cross_entropy,
            "transformer",
            as_classes,
            Export(13, dynamic=True),
            steps=0,
            held_out=16,
        ),
    }
)


class _Turned(nn.Module):
    """Convert pictures from channels last to channels first; the Keras graph writes this as a Transpose."""

    def forward(self, pictures: Tensor) -> Tensor:
        """Transpose."""
        return pictures.permute(0, 3, 1, 2)
