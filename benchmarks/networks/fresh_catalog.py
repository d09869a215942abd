"""Networks of the fresh set by name: nobody used them to develop detent, so their results are not tuned.

Architectures differ from those of ``catalog``. Most data are new; pictures of shapes and sounds have different seeds.
"""

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

from networks import (
    fresh_attention,
    fresh_convolutional,
    fresh_dense,
    fresh_sequential,
    graphs,
    library_networks,
    records,
)
from networks.catalog import looks
from networks.convolutional import merge_branches
from networks.network import TRAINING_SEED, Array, Data, Export, Network, Outputs, as_classes
from networks.scenes import Scenes, scenes
from networks.tasks import (
    POSITIVE_WEIGHT,
    above,
    brightest,
    detected,
    detection_loss,
    last_classes,
    log_loss,
    step_loss,
)
from networks.textures import Textures, textures

SEED_OFFSET = 100  # keeps shapes and sounds apart from those of the other networks
SIDE, SMALL_SIDE, MIDDLE_SIDE, LARGE_SIDE = 64, 32, 48, 96
STEPS, TOKENS, LONG_TOKENS, POINTS, SAMPLES = 256, 48, 64, 256, 4000
COLUMNS = fresh_sequential.COLUMNS
CELL = 4  # pixels per cell of CenterNet
PAIR_POOL = 256  # pictures from which the second one of a pair is chosen
MAX_DEVIATIONS = 4.0  # clips outliers of rows


def _surfaces(targets: Callable[[Textures], tuple[Array, ...]], side: int = SIDE) -> Callable[[int, int], Data]:
    def data(count: int, seed: int) -> Data:
        drawn = textures(count, side, seed)
        return {"pictures": drawn.pictures}, targets(drawn)

    return data


def _shapes(targets: Callable[[Scenes], tuple[Array, ...]], side: int = SIDE) -> Callable[[int, int], Data]:
    def data(count: int, seed: int) -> Data:
        drawn = scenes(count, side, seed + SEED_OFFSET)
        return {"pictures": drawn.pictures}, targets(drawn)

    return data


def _kinds(drawn: Textures) -> tuple[Array, ...]:
    return (drawn.labels,)


def _masks(drawn: Textures | Scenes) -> tuple[Array, ...]:
    return (drawn.masks,)


def _boxes(drawn: Scenes) -> tuple[Array, ...]:
    return drawn.labels, drawn.boxes


def _pairs(count: int, seed: int) -> Data:
    """Return pairs of pictures; half of them have the same texture."""
    rng = np.random.default_rng([seed, 51])
    first, pool = textures(count, SIDE, seed), textures(PAIR_POOL, SIDE, seed + SEED_OFFSET)
    is_same = rng.random(count) < 0.5
    chosen = [
        rng.choice(np.flatnonzero((pool.labels == label) == same))
        for label, same in zip(first.labels, is_same, strict=True)
    ]
    return {"first": first.pictures, "second": pool.pictures[chosen]}, (is_same.astype(np.float32),)


def _noisy(count: int, seed: int, side: int = LARGE_SIDE) -> Data:
    rng, clean = np.random.default_rng([seed, 52]), textures(count, side, seed).pictures
    noise = rng.normal(0, 1, clean.shape) * rng.uniform(0.2, 0.8, (count, 1, 1, 1))
    return {"pictures": (clean + noise).astype(np.float32)}, (clean,)


def _halved(count: int, seed: int, side: int = LARGE_SIDE) -> Data:
    pictures = textures(count, side, seed).pictures
    return {"pictures": avg_pool2d(torch.from_numpy(pictures), 2).numpy()}, (pictures,)


def _records(
    generate: Callable[[int, int, int], tuple[Array, ...]], size: int, name: str, target: int = 1
) -> Callable[[int, int], Data]:
    """Return a function whose input is the first array of a generator, and whose target is another array of it."""

    def data(count: int, seed: int) -> Data:
        arrays = generate(count, size, seed)
        return {name: arrays[0]}, (arrays[target],)

    return data


def _continued(count: int, seed: int) -> Data:
    symbols, _, _ = records.expressions(count, TOKENS + 1, seed)
    return {"tokens": symbols[:, :-1].copy()}, (symbols[:, 1:].copy(),)


def _sounds(count: int, seed: int) -> Data:
    """Return spectrograms of the first of two sounds."""
    spectra, kinds = records.spectrograms(count, SAMPLES, seed + SEED_OFFSET)
    return {"spectrograms": spectra[..., : spectra.shape[-1] // 2].copy()}, (kinds[:, 0].copy(),)


def _sound_steps(count: int, seed: int, stride: int) -> Data:
    """Return spectrograms of two sounds, and the kind of sound at every step."""
    spectra, kinds = records.spectrograms(count, SAMPLES, seed + SEED_OFFSET)
    frames = np.arange(0, spectra.shape[-1], stride)
    return {"spectrograms": spectra}, (kinds[:, (frames >= spectra.shape[-1] // 2).astype(int)],)


def _normalized(count: int, seed: int) -> Data:
    """Return rows, and the same rows normalized by statistics of the training data."""
    rows, reference = (
        records.measurements(*each)[0] for each in ((count, COLUMNS, seed), (1024, COLUMNS, TRAINING_SEED))
    )
    expected = ((rows - reference.mean(0)) / reference.std(0)).clip(-MAX_DEVIATIONS, MAX_DEVIATIONS)
    return {"numbers": rows}, (expected,)


def _both(count: int, seed: int) -> Data:
    drawn, (rows, _, grades) = textures(count, SIDE, seed), records.measurements(count, COLUMNS, seed)
    return {"pictures": drawn.pictures, "numbers": rows}, (drawn.labels, grades)


def _cosine_loss(outputs: tuple[Tensor, ...], labels: Tensor) -> Tensor:
    return cross_entropy(outputs[1], labels)


def _class_losses(outputs: tuple[Tensor, ...], *labels: Tensor) -> Tensor:
    return torch.stack([cross_entropy(*pair) for pair in zip(outputs, labels, strict=True)]).sum()


def _quantity_loss(outputs: Tensor, quantities: Tensor) -> Tensor:
    ranges = torch.tensor([1.0, 5.0, 20.0])
    return mse_loss(outputs / ranges, quantities / ranges)


def _center_loss(outputs: tuple[Tensor, ...], boxes: Tensor) -> Tensor:
    """Cross entropy of the heat map, and distance of offset and size at the center of the shape."""
    heat, offset, size = outputs
    places = torch.arange(heat.shape[-1]) + 0.5
    x, y = (boxes[:, axis, None, None] / CELL for axis in (0, 1))
    near = torch.exp(-((places[:, None] - y) ** 2 + (places - x) ** 2) / 2)[:, None]
    loss = binary_cross_entropy(heat.clamp(1e-6, 1 - 1e-6), near, 1 + POSITIVE_WEIGHT * near)
    cells = (boxes[:, :2] / CELL).long()
    rows = torch.arange(len(boxes)), slice(None), cells[:, 1], cells[:, 0]
    loss = loss + (offset[rows] - (boxes[:, :2] / CELL - cells)).abs().mean()
    return loss + (size[rows] - boxes[:, 2:]).abs().mean() / 16


def _all_classes(outputs: Outputs) -> Array:
    """Decide on the class with the highest score in every output."""
    return np.concatenate([output.argmax(-1) for output in outputs])


def _classifier(
    build: Callable[[], nn.Module], side: int = SIDE, training_side: int = MIDDLE_SIDE, **options: Any
) -> Network:
    """Return a classifier of textures; small pictures are enough for training, because periods are in pixels."""
    data, training_data = (_surfaces(_kinds, each) for each in (side, training_side))
    return Network(build, data, cross_entropy, decide=as_classes, training_data=training_data, **options)


def _of_looks(build: Callable[[], nn.Module], **options: Any) -> Network:
    """Return a classifier of shapes by their looks, for networks without batch norm, which learn textures slowly."""
    export = Export(18, dynamo=True)
    return Network(build, _shapes(looks), cross_entropy, decide=as_classes, rate=2e-3, export=export, **options)


def _segmenter(build: Callable[[], nn.Module], data: Callable[[int, int], Data], **options: Any) -> Network:
    return Network(build, data, binary_cross_entropy_with_logits, decide=above(0), held_out=64, **options)


def _on_tokens(build: Callable[[], nn.Module], data: Callable[[int, int], Data], **options: Any) -> Network:
    settings = {"kind": "transformer", "decide": as_classes, "steps": 200, "held_out": 64} | options
    return Network(build, data, settings.pop("loss", step_loss), **settings)


_TRANSFORMER = {"kind": "transformer", "steps": 200}
FRESH_NETWORKS: Mapping[str, Network] = MappingProxyType(
    {
        "mnasnet": _classifier(fresh_convolutional.mnasnet, export=Export(folds_norms=True)),
        "efficientnet": _classifier(fresh_convolutional.efficientnet, export=Export(13, dynamic=True)),
        "ghostnet": _classifier(fresh_convolutional.ghostnet, export=Export(13, folds_norms=True)),
        "mobileone": _classifier(
            fresh_convolutional.mobileone, after_training=merge_branches, export=Export(11, dynamic=True)
        ),
        "lcnet-v2": _classifier(fresh_convolutional.lcnet_v2, after_training=merge_branches, export=Export(11)),
        "regnet": _classifier(fresh_convolutional.regnet, export=Export(18, dynamo=True)),
        "resnet-v2": _classifier(fresh_convolutional.resnet_v2, export=Export(13)),
        "wide-resnet": _classifier(
            fresh_convolutional.wide_resnet,
            LARGE_SIDE,
            SMALL_SIDE,
            export=Export(18, dynamo=True, dynamic=True),
            held_out=256,
        ),
        "xception": _classifier(fresh_convolutional.xception, export=Export(11, folds_norms=True)),
        "darknet": _classifier(fresh_convolutional.darknet, LARGE_SIDE, SMALL_SIDE, export=Export(18), held_out=256),
        "convnext-v2": _of_looks(fresh_convolutional.convnext_v2, steps=200),
        "hrnet": _segmenter(
            fresh_convolutional.Hrnet,
            _surfaces(_masks),
            training_data=_surfaces(_masks, MIDDLE_SIDE),
            export=Export(folds_norms=True),
        ),
        "mobilefacenet": Network(
            fresh_convolutional.mobilefacenet,
            _surfaces(_kinds),
            _cosine_loss,
            decide=last_classes,
            export=Export(13, dynamic=True),
        ),
        "siamese": Network(
            fresh_convolutional.Siamese, _pairs, binary_cross_entropy_with_logits, decide=above(0), steps=300
        ),
        "deit": _classifier(fresh_attention.Deit, training_side=SIDE, export=Export(dynamic=True), **_TRANSFORMER),
        "mobilevit": _classifier(fresh_attention.mobilevit, export=Export(13), **_TRANSFORMER),
        "poolformer": _of_looks(fresh_attention.poolformer, **_TRANSFORMER),
        "roberta": _on_tokens(
            fresh_attention.roberta,
            _records(records.expressions, TOKENS, "tokens", 2),
            loss=cross_entropy,
            held_out=1024,
        ),
        "albert": _on_tokens(
            fresh_attention.albert,
            _records(records.expressions, TOKENS, "tokens", 2),
            loss=cross_entropy,
            held_out=1024,
            export=Export(13, dynamic=True),
        ),
        "llama": _on_tokens(fresh_attention.llama, _continued, export=Export(18, dynamo=True)),
        "t5": _on_tokens(fresh_attention.t5, _records(records.expressions, LONG_TOKENS, "tokens"), export=Export(13)),
        "conformer": _on_tokens(fresh_sequential.conformer, partial(_sound_steps, stride=2)),
        "linknet": _segmenter(fresh_dense.Linknet, _shapes(_masks), export=Export(11)),
        "fpn": _segmenter(
            fresh_dense.Pyramid, _shapes(_masks, LARGE_SIDE), training_data=_shapes(_masks), export=Export(13)
        ),
        "dncnn": Network(
            fresh_dense.dncnn,
            _noisy,
            mse_loss,
            training_data=partial(_noisy, side=SMALL_SIDE),
            export=Export(folds_norms=True),
            steps=100,
            held_out=16,
        ),
        "srgan": Network(
            fresh_dense.srgan,
            _halved,
            mse_loss,
            training_data=partial(_halved, side=SMALL_SIDE),
            rate=3e-3,
            held_out=16,
        ),
        "yolo-dfl": Network(
            fresh_dense.DistributedYolo, _shapes(_boxes), detection_loss, decide=detected, steps=200, held_out=128
        ),
        "centernet": Network(
            fresh_dense.centernet,
            _shapes(lambda drawn: (drawn.boxes,)),
            _center_loss,
            decide=brightest,
            export=Export(13, folds_norms=True),
            held_out=1024,
        ),
        "wavenet": Network(
            fresh_sequential.Wavenet,
            _records(records.heartbeats, STEPS, "leads"),
            step_loss,
            decide=as_classes,
            export=Export(13),
            held_out=64,
        ),
        "keyword-spotter": Network(
            fresh_sequential.keyword_spotter,
            _sounds,
            cross_entropy,
            decide=as_classes,
            export=Export(11, folds_norms=True),
        ),
        "crnn": Network(
            fresh_sequential.Crnn,
            partial(_sound_steps, stride=1),
            step_loss,
            "recurrent",
            as_classes,
            held_out=64,
        ),
        "tagger": Network(
            fresh_sequential.Tagger,
            _records(records.expressions, TOKENS, "tokens"),
            step_loss,
            "recurrent",
            as_classes,
            Export(13),
            200,
            held_out=64,
        ),
        "pointnet": Network(
            fresh_sequential.Pointnet,
            _records(records.solids, POINTS, "points"),
            cross_entropy,
            decide=as_classes,
            export=Export(folds_norms=True),
        ),
        "deep-sets": Network(
            fresh_sequential.deep_sets,
            _records(records.solids, POINTS, "points"),
            cross_entropy,
            "mlp",
            as_classes,
            Export(18, dynamo=True),
            300,
        ),
        "fusion": Network(
            fresh_sequential.Fusion, _both, _class_losses, decide=_all_classes, export=Export(dynamic=True), rate=3e-3
        ),
        "table-regression": Network(
            fresh_sequential.residual_mlp,
            _records(records.measurements, COLUMNS, "numbers"),
            _quantity_loss,
            "mlp",
            export=Export(dynamic=True),
            steps=400,
            batch=16,
        ),
        "keras-elu": Network(
            fresh_sequential.keras_elu,
            _records(records.measurements, COLUMNS, "numbers", 2),
            log_loss,
            "mlp",
            as_classes,
            Export(writer=graphs.keras_dense),
            steps=400,
            batch=16,
        ),
        "table-autoencoder": Network(
            fresh_sequential.table_autoencoder, _normalized, mse_loss, "mlp", export=Export(13), steps=400, batch=16
        ),
    }
)


def _of_library(name: str, opset: int = 17, *, kind: str = "transformer", steps: int = 160) -> Network:
    """Return a classifier of the package ``transformers``; opset 18 stands for torch's newer exporter."""
    export = Export(opset, dynamo=opset == 18)
    if name in library_networks.TOKEN_OPTIONS:
        data = _records(records.expressions, TOKENS, "tokens", 2)
        build = partial(library_networks.token_classifier, name)
        return _on_tokens(build, data, loss=cross_entropy, held_out=1024, export=export)
    build = partial(library_networks.picture_classifier, name)
    return _classifier(build, training_side=SIDE, kind=kind, steps=steps, export=export)


LIBRARY_NETWORKS: Mapping[str, Network] = MappingProxyType(
    {
        "mobilenet-v1": _of_library("MobileNetV1", kind="cnn"),
        "textnet": _of_library("TextNet", 18, kind="cnn", steps=60),
        "mobilevit-v2": _of_library("MobileViTV2", 18),
        "swiftformer": _of_library("SwiftFormer", 18),
        "pvt-v2": _of_library("PvtV2"),
        "segformer": _of_library("Segformer"),
        "levit": _of_library("Levit", 18),
        "focalnet": _of_library("FocalNet"),
        "dinov2": _of_library("Dinov2"),
        "distilbert": _of_library("DistilBert"),
        "squeezebert": _of_library("SqueezeBert", 18),
        "convbert": _of_library("ConvBert"),
        "electra": _of_library("Electra", 18),
    }
)
