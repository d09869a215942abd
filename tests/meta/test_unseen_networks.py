"""Networks of the benchmark on unseen models: each builds, exports the same bytes twice, runs and makes decisions."""

import importlib

import numpy as np
import onnxruntime as ort
import pytest

pytest.importorskip("onnxscript")
torch = pytest.importorskip("torch")

NAMES = [
    "mobilenet-v2",
    "mobilenet-v3",
    "lcnet",
    "efficientnet-lite",
    "resnet-18",
    "resnet-bottleneck",
    "resnext",
    "convnext",
    "densenet",
    "inception",
    "squeezenet",
    "shufflenet",
    "separable-outliers",
    "repvgg",
    "vgg",
    "keras-vgg",
    "vit",
    "swin",
    "mixer",
    "bert",
    "gpt",
    "speech",
    "unet",
    "deeplab",
    "autoencoder",
    "super-resolution",
    "matting",
    "yolo",
    "detector-nms",
    "keypoints",
    "regression",
    "lstm",
    "gru",
    "tcn",
    "audio",
    "tables",
    "keras-dense",
]
FRESH_NAMES = [
    "mnasnet",
    "efficientnet",
    "ghostnet",
    "mobileone",
    "lcnet-v2",
    "regnet",
    "resnet-v2",
    "wide-resnet",
    "xception",
    "darknet",
    "convnext-v2",
    "hrnet",
    "mobilefacenet",
    "siamese",
    "deit",
    "mobilevit",
    "poolformer",
    "roberta",
    "albert",
    "llama",
    "t5",
    "conformer",
    "linknet",
    "fpn",
    "dncnn",
    "srgan",
    "yolo-dfl",
    "centernet",
    "wavenet",
    "keyword-spotter",
    "crnn",
    "tagger",
    "pointnet",
    "deep-sets",
    "fusion",
    "table-regression",
    "keras-elu",
    "table-autoencoder",
]
LIBRARY_NAMES = [
    "mobilenet-v1",
    "textnet",
    "mobilevit-v2",
    "swiftformer",
    "pvt-v2",
    "segformer",
    "levit",
    "focalnet",
    "dinov2",
    "distilbert",
    "squeezebert",
    "convbert",
    "electra",
]
ALL_NAMES = [*NAMES, *FRESH_NAMES, *LIBRARY_NAMES]
QUICK = ["keras-dense", "tables", "regression", "keras-elu", "table-regression", "pointnet"]


@pytest.fixture(scope="module")
def package(root):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(root / "benchmarks"))
        yield importlib.import_module("networks")


@pytest.fixture(scope="module")
def networks(package):
    return {**package.NETWORKS, **package.FRESH_NETWORKS, **package.LIBRARY_NETWORKS}


def exported(network):
    """The untrained model as bytes."""
    return network.to_onnx(network.make(steps=0)).SerializeToString(deterministic=True)


def run(content, feed):
    options = ort.SessionOptions()
    options.log_severity_level = 4
    return ort.InferenceSession(content, options, providers=["CPUExecutionProvider"]).run(None, feed)


def test_all_networks_are_listed(package):
    assert sorted(package.NETWORKS) == sorted(NAMES)
    assert sorted(package.FRESH_NETWORKS) == sorted(FRESH_NAMES)
    assert sorted(package.LIBRARY_NETWORKS) == sorted(LIBRARY_NAMES)


def test_no_network_is_in_two_sets(networks):
    assert len(networks) == len(NAMES) + len(FRESH_NAMES) + len(LIBRARY_NAMES)


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in ALL_NAMES],
)
def test_a_network_is_deterministic_and_runs(networks, name):
    network = networks[name]
    content = exported(network)
    assert content == exported(network)
    feeds, held_out = network.calibration_feeds(), network.held_out_feeds()
    assert sum(len(next(iter(feed.values()))) for feed in feeds) == 32
    assert not np.array_equal(next(iter(feeds[0].values())), next(iter(held_out[0].values())))
    outputs = run(content, feeds[0])
    assert all(np.isfinite(output).all() for output in outputs)
    if network.decide is not None:
        assert network.decide(outputs).size


@pytest.mark.slow
@pytest.mark.parametrize("name", ["keras-vgg", "keras-dense", "keras-elu"])
def test_a_graph_written_by_hand_equals_the_module(networks, name):
    network = networks[name]
    model, feed = network.make(steps=0), network.held_out_feeds()[0]
    with torch.no_grad():
        expected = model(*map(torch.from_numpy, feed.values()))
    expected = expected if name != "keras-vgg" else expected.softmax(-1)
    np.testing.assert_allclose(run(network.to_onnx(model).SerializeToString(), feed)[0], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["separable-outliers", "repvgg", "mobileone", "lcnet-v2"])
def test_changes_after_training_keep_the_function(networks, name):
    network = networks[name]
    torch.manual_seed(0)
    model = network.build()
    picture = torch.from_numpy(network.calibration_feeds()[0]["pictures"])
    for _ in range(2):
        model(torch.cat([picture, -picture]))  # statistics of batch norms
    model.eval()
    with torch.no_grad():
        before = model(picture)
        weights = [tensor.clone() for tensor in model.parameters()]
        network.after_training(model)
        torch.testing.assert_close(model(picture), before, rtol=1e-3, atol=1e-4)
    changed = list(model.parameters())
    assert len(changed) != len(weights) or any(not torch.equal(a, b) for a, b in zip(changed, weights, strict=True))


def test_training_lowers_the_loss(networks, capsys):
    networks["keras-dense"].make(steps=60)
    words = capsys.readouterr().err.split()
    assert float(words[4]) < 0.9 * float(words[6])
