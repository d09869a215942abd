"""Preprocessing as a value: text forms, defaults, and all errors."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import detent as dt
from detent.onnx_model import Preprocessing
from detent.onnx_model.preprocess_options import PRESETS


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", Preprocessing()),
        ("imagenet", PRESETS["imagenet"]),
        ("0..1", Preprocessing(1 / 255, 0, 1)),
        ("-1..1", Preprocessing(mean=0.5, std=0.5)),
        ("0..255", Preprocessing(scale=1)),
        ("scale=1/255", Preprocessing(scale=1 / 255)),
        ("mean=0.1,0.2,0.3,std=2", Preprocessing(mean=(0.1, 0.2, 0.3), std=2)),
        (" std = 1 , 2 , 3.5e-1 ", Preprocessing(std=(1, 2, 0.35))),
        ("size=192x256,resize=200", Preprocessing(size=(192, 256), resize=200)),
        ("0..1,crop=NONE,layout=nhwc,color=BGR", Preprocessing(1 / 255, crop="none", layout="nhwc", color="bgr")),
        ("rate=16000,length=8000", Preprocessing(rate=16000, length=8000)),
    ],
)
def test_texts(text, expected):
    assert Preprocessing.parse(text) == expected
    assert Preprocessing.parse(str(expected)) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("imgnet", ["unknown preprocess 'imgnet'", "did you mean 'imagenet'"]),
        ("maen=1", ["unknown key 'maen'", "did you mean 'mean'", "std"]),
        ("imagenet,mean=1", ["sets mean twice"]),
        ("size=1x1,size=2x2", ["sets size twice"]),
        ("size=224", ["'224'", "HEIGHTxWIDTH"]),
        ("size=0x5", ["size of preprocess", "got 0"]),
        ("size=99999x5", ["size of preprocess", "got 99999"]),
        ("mean=a", ["mean='a'", "a number"]),
        ("mean=1,2", ["mean", "1 number, or 3", "got 2"]),
        ("scale=1/0", ["division by zero"]),
        ("scale=0", ["positive", "scale=0"]),
        ("std=1,0,1", ["positive", "std"]),
        ("mean=1e999", ["mean", "finite"]),
        ("crop=left", ["crop", "center or none", "'left'"]),
        ("color=cmyk", ["color", "rgb or bgr or gray"]),
        ("resize=5,crop=none", ["resize=5", "crop=center"]),
        ("rate=fast", ["rate='fast'", "whole number"]),
        ("length=0", ["length of preprocess", "got 0"]),
        ("imagenet,,", ["unknown preprocess ''"]),
        ("x" * 2000, ["2000 characters"]),
    ],
)
def test_bad_texts(text, words):
    with pytest.raises(dt.SpecError) as caught:
        Preprocessing.parse(text)
    assert not [word for word in words if word not in str(caught.value)], str(caught.value)


@pytest.mark.parametrize(
    "fields",
    [{"mean": "x"}, {"mean": (True,)}, {"size": 224}, {"size": (1, 2, 3)}, {"resize": 1.5}, {"scale": float("nan")}],
    ids=str,
)
def test_bad_fields(fields):
    with pytest.raises(dt.SpecError, match=next(iter(fields))):
        Preprocessing(**fields)


NUMBERS = st.floats(0.001, 1000).map(lambda value: (value,)) | st.tuples(*[st.floats(0.001, 1000)] * 3)


@given(
    st.builds(
        Preprocessing,
        scale=st.none() | st.floats(1e-6, 1e6),
        mean=st.none() | NUMBERS,
        std=st.none() | NUMBERS,
        size=st.none() | st.tuples(st.integers(1, 999), st.integers(1, 999)),
        resize=st.none() | st.integers(1, 999),
        layout=st.sampled_from([None, "nchw", "nhwc"]),
        color=st.sampled_from([None, "rgb", "bgr", "gray"]),
        rate=st.none() | st.integers(1, 96000),
        length=st.none() | st.integers(1, 10**6),
    )
)
def test_text_round_trip(preprocessing):
    assert Preprocessing.parse(str(preprocessing)) == preprocessing


def test_presets_have_their_own_names():
    assert {name: str(preset) for name, preset in PRESETS.items()} == {name: name for name in PRESETS}
    assert Preprocessing().preset == ""


def test_other_types_are_errors():
    with pytest.raises(dt.DtypeError, match="must be text, got int"):
        Preprocessing.parse(5)
