"""Parts that commands share: sizes, targets and CPUs, the screen."""

import io
import json
import re

import pytest

import detent as dt
from detent.cli.screen import Screen
from detent.codec import encode
from detent.errors import SpecError
from detent.onnx_model import targets
from detent.recipe import skip_flag
from detent.tables import bytes_text, of_whole, parse_bytes


@pytest.mark.parametrize(("text", "expected"), [("7", 7), ("1kB", 1000), ("1.5 GB", 1_500_000_000), ("2MiB", 2 << 20)])
def test_amounts(text, expected):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "0", "-1", "1e9", "MB", "1 XB", "0.1", "\u0661"])
def test_no_amounts(text):
    with pytest.raises(SpecError, match="invalid size"):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["0%", "101%", "%", "nan%", "x%"])
def test_no_shares(text):
    with pytest.raises(SpecError, match="invalid percentage"):
        of_whole(text, 100)


@pytest.mark.parametrize("count", [0, 1, 999, 1000, 99_950, 999_499, 999_500, 123_456_789, 10**10])
def test_amounts_in_words_are_near(count):
    number, unit = bytes_text(count).split()
    assert float(number) * {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}[unit] == pytest.approx(count, rel=0.006)


FLAGS = "processor : 0\nflags : fpu avx2 {}\n"


@pytest.mark.parametrize(
    ("machine", "text", "expected"),
    [
        ("x86_64", FLAGS.format("avx512_vnni"), True),
        ("x86_64", FLAGS.format("avx_vnni sha"), True),
        ("AMD64", FLAGS.format(""), False),
        ("x86_64", "nothing", None),
        ("aarch64", FLAGS.format("avx512_vnni"), None),
    ],
    ids=["avx512", "avx", "none", "unknown", "arm"],
)
def test_vnni(monkeypatch, tmp_path, machine, text, expected):
    (tmp_path / "cpuinfo").write_text(text)
    monkeypatch.setattr(targets, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr("platform.machine", lambda: machine)
    assert targets.has_vnni() is expected


@pytest.mark.parametrize(
    ("target", "vnni", "complaint"),
    [
        ("onnxruntime", True, ""),
        ("onnxruntime", False, ""),
        ("openvino", None, ""),
        ("onnxruntime-vnni", True, ""),
        ("onnxruntime-vnni", None, ""),
        ("onnxruntime-vnni", False, "--target onnxruntime, which suits every CPU"),
        ("openvino-vnni", False, "--target openvino, which suits every CPU"),
        ("onnxruntime-avx2", False, ""),
        ("onnxruntime-avx2", True, ""),
    ],
)
def test_target_and_cpu(monkeypatch, target, vnni, complaint):
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    warning = targets.mismatch(target, vnni)
    assert complaint in warning
    assert bool(warning) == bool(complaint)


@pytest.mark.parametrize(
    ("target", "vnni", "is_hinted"),
    [
        ("onnxruntime-avx2", True, True),
        ("onnxruntime-avx2", False, False),
        ("onnxruntime-avx2", None, False),
        ("onnxruntime", True, False),
        ("onnxruntime-vnni", True, False),
    ],
)
def test_a_target_of_7_bits_on_a_cpu_with_vnni(target, vnni, is_hinted):
    hint = targets.vnni_hint(target, vnni)
    assert bool(hint) == is_hinted
    assert not is_hinted or "--target onnxruntime-vnni stores 8 bits: usually more accurate, not always faster" in hint


NARROW = {"qmin": -64, "qmax": 64}


@pytest.mark.parametrize(
    ("target", "spec", "vnni", "hint"),
    [
        ("onnxruntime", {}, True, "--target onnxruntime-vnni (only for CPUs with VNNI)"),
        ("onnxruntime", {}, False, "--prefer speed (weights of 7 bits)"),
        ("openvino", {}, None, "--prefer speed (weights of 7 bits)"),
        ("onnxruntime", NARROW, True, ""),
        ("onnxruntime-avx2", NARROW, False, ""),
        ("onnxruntime-vnni", {}, True, ""),
    ],
)
def test_faster_files(target, spec, vnni, hint):
    text = targets.faster(
        targets.get_target(target), [dt.QuantSpec("int8", **NARROW), dt.QuantSpec("int8", **spec)], vnni=vnni
    )
    assert text == hint


def test_target_on_another_machine(monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert "for x86 CPUs" in targets.mismatch("openvino-vnni")
    assert not targets.mismatch("openvino")


@pytest.mark.parametrize(
    ("name", "flag"), [("a/b.c", "--skip a/b.c"), ("a b", "--skip 'a b'"), ("x[0]", "--skip 'x[[]0]'")]
)
def test_flag_can_be_typed(name, flag):
    assert skip_flag(name) == flag


def test_screen_keeps_stdout_for_the_document(capsys):
    screen = Screen(as_json=True)
    screen.say("text")
    screen.table(("a",), [("b",)])
    screen.note("note")
    screen.emit({"a": [float("-inf"), None, 1]})
    out, err = capsys.readouterr()
    assert json.loads(out) == {"a": ["-inf", None, 1]}
    assert "note" in err


def test_quiet_screen(capsys):
    screen = Screen(quiet=True)
    screen.say("text")
    screen.note("note")
    screen.warn("warning")
    screen.emit({})
    assert capsys.readouterr() == ("", "")


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self):
        return True


def test_bar_on_a_terminal_only(monkeypatch, capsys):
    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr", terminal)
    with Screen().progress("calibrating") as step:
        step(1, 2)
    assert "calibrating" in terminal.getvalue()
    assert capsys.readouterr().out == ""


PASSES = {"loading": 0.02, "calibration": 2.0, "searching ranges": 6.0, "planning": 0.03, "writing": 1.95}


def test_each_pass_has_a_line_with_its_share(capsys):
    Screen().passes(PASSES)
    assert capsys.readouterr().err.splitlines() == [
        "quantized in 10.0 s",
        "  searching ranges: 6.0 s, 60 %",
        "  calibration: 2.0 s, 20 %",
        "  writing: 1.9 s, 20 %",
        "  planning: 30 ms, <1 %",
        "  loading: 20 ms, <1 %",
    ]


def test_short_passes_share_a_line_on_a_terminal(monkeypatch):
    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr", terminal)
    Screen().passes(PASSES)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", terminal.getvalue()).splitlines()
    assert [line.partition(":")[0].strip() for line in lines] == [
        "quantized in 10.0 s", "searching ranges", "calibration", "writing", "2 shorter passes"
    ]  # fmt: skip
    assert lines[-1].endswith(": 50 ms, <1 %")


def test_a_quiet_screen_shows_no_passes(capsys):
    screen = Screen(quiet=True)
    screen.passes(PASSES)
    screen.passed("calibration", 60.0)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(("seconds", "expected"), [(0.5, ""), (60.0, "calibration took 60.0 s\n")])
def test_a_long_pass_has_a_line_when_it_ends(capsys, seconds, expected):
    Screen().passed("calibration", seconds)
    assert capsys.readouterr().err == expected


def shown_on_a_terminal(monkeypatch, width, *table, **options):
    """Print a table on a terminal of a given width, and return its lines."""
    terminal = Terminal()
    with monkeypatch.context() as patch:
        patch.setenv("TERM", "xterm")
        patch.setenv("COLUMNS", str(width))
        patch.setattr("sys.stdout", terminal)
        Screen().table(*table, **options)
    return re.sub(r"\x1b\[[0-9;]*m", "", terminal.getvalue()).splitlines()


def test_long_names_are_folded_on_a_terminal_and_not_cut(monkeypatch):
    name = "module." * 30 + "end"
    lines = shown_on_a_terminal(monkeypatch, 80, ("layer", "type", "bytes"), [(name, "Conv", "1.2 MB")], right=(2,))
    assert max(map(len, lines)) <= 80
    assert "".join(line.split("  ")[0].strip() for line in lines[2:]) == name


COLUMNS = ("tensor", "kind", "type", "shape", "size", "range", "why")
ROWS = [
    (
        "features.0.weight",
        "weight",
        "uint8 axis0",
        "1024x1024x3x3",
        "12.3 MB",
        "-0.00123 .. 12345.6",
        "too long a text",
    ),
    ("module." * 12, "activation", "float8_e4m3fn", "", "", "-1e-05 .. 1e+05", "[odd] name: because " + "of it " * 20),
]


@pytest.mark.parametrize("columns", [None, "40", "80", "300"])
def test_no_cell_of_a_pipe_is_cut_or_folded(capsys, monkeypatch, columns):
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    Screen().table(COLUMNS, ROWS, right=(4,), fold=(0, 6))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + len(ROWS)
    for line, row in zip(lines[2:], ROWS, strict=True):
        assert [cell for cell in re.split(" {2,}", line.strip()) if cell] == [cell.strip() for cell in row if cell]


@pytest.mark.parametrize("width", [40, 80, 120])
def test_numbers_are_whole_on_any_terminal(monkeypatch, width):
    head, _, *lines = shown_on_a_terminal(monkeypatch, width, COLUMNS, ROWS, right=(4,), fold=(0, 6))
    for row in ROWS:
        assert any(all(cell in line for cell in row[1:6]) for line in lines)
    names, reasons = head.index("kind"), head.index("why")
    assert "".join(line[:names].strip() for line in lines) == "".join(row[0] for row in ROWS)
    words = " ".join(line[reasons:].strip() for line in lines).split()
    assert words == [word for row in ROWS for word in row[6].split()]


def test_encode_leaves_finite_numbers_alone():
    assert encode({"a": 1.5, 2: [True, "x", None]}) == {"a": 1.5, "2": [True, "x", None]}
