"""Help of every command: it fits a screen, groups its options and ends with an example."""

import re
import shlex

import pytest
import typer

from detent.cli import main
from detent.cli.app import COMMANDS, make_app
from detent.cli.help_text import default_text, grouped, option_names

SCREEN_COLUMNS, SCREEN_LINES = 80, 40
QUANTIZE_LINES = 66  # options of all kinds of input, in groups
GROUPS = {
    "demo": ["Training", "Output"],
    "quantize": ["Data", "Accuracy", "Checkpoints", "Work", "Checks", "Output"],
    "verify": ["Data", "Checks", "Output"],
    "inspect": ["Data", "Output"],
    "compare": ["Data", "Output"],
    "sensitivity": ["Data", "Accuracy", "Output", "Work"],
    "bench": ["Data", "Timing", "Output"],
    "doctor": ["Output", "Work"],
}
SHARED = {"--json", "--quiet", "--verbose"}


def help_lines(monkeypatch, capsys, *arguments, columns=SCREEN_COLUMNS):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main([*arguments, "--help"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out.splitlines()


def commands():
    return vars(typer.main.get_command(make_app()))["commands"]


def test_program_help_fits_a_screen_and_lists_all_commands(monkeypatch, capsys):
    lines = help_lines(monkeypatch, capsys)
    assert len(lines) <= SCREEN_LINES
    assert max(map(len, lines)) <= SCREEN_COLUMNS
    listed = [line.split()[0] for line in lines[lines.index("Commands:") + 1 : lines.index("Options:")]]
    assert listed == list(COMMANDS)
    assert lines[-1].startswith("Example: detent quantize ")


@pytest.mark.parametrize("name", COMMANDS)
def test_command_help_is_short(name, monkeypatch, capsys):
    lines = help_lines(monkeypatch, capsys, name)
    assert len(lines) <= (QUANTIZE_LINES if name == "quantize" else SCREEN_LINES)
    assert max(map(len, lines)) <= SCREEN_COLUMNS
    assert lines[0].startswith(f"Usage: detent {name} ")
    assert [line[:-1] for line in lines if re.fullmatch(r"[A-Z]\w+:", line)] == GROUPS[name]
    assert lines[-1] == f"Example: {COMMANDS[name].EXAMPLE}"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_listed_once_with_a_text(name, monkeypatch, capsys):
    lines = help_lines(monkeypatch, capsys, name)
    for parameter in commands()[name].params:
        assert not getattr(parameter, "hidden", False), option_names(parameter)
        rows = [line for line in lines if line.startswith(f"  {option_names(parameter)}  ")]
        assert len(rows) == 1, option_names(parameter)
        assert re.search(r"[a-z]{3}", rows[0].removeprefix(f"  {option_names(parameter)}"))
    assert {option for parameter in commands()[name].params for option in parameter.opts} >= SHARED


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_use_options_that_exist(name):
    program, command, *words = shlex.split(COMMANDS[name].EXAMPLE)
    assert (program, command) == ("detent", name)
    options = {option for parameter in commands()[name].params for option in parameter.opts}
    assert {word for word in words if word.startswith("-")} <= options


def test_help_folds_on_a_narrow_terminal(monkeypatch, capsys):
    lines = help_lines(monkeypatch, capsys, "quantize", columns=60)
    assert max(map(len, lines)) <= 60
    assert any(line.startswith("  --target RUNTIME ") for line in lines)


def test_defaults_are_shown(monkeypatch, capsys):
    lines = help_lines(monkeypatch, capsys, "sensitivity")
    assert any(line.startswith("  --samples N ") and line.endswith(" [32]") for line in lines)
    assert re.search(r"  --data, -d PATH [^\[]*\[required\]\n", "\n".join(lines))
    defaults = {each.name: default_text(each) for each in commands()["quantize"].params}
    assert (defaults["recipe"], defaults["output"], defaults["force"], defaults["data"]) == (
        "w8a8",
        "MODEL.RECIPE.onnx",
        "",
        "",
    )


def test_groups_keep_the_order_of_options():
    groups = grouped(commands()["verify"].params)
    assert list(groups) == GROUPS["verify"]
    assert [option_names(each) for each in groups["Data"]][:3] == ["SOURCE", "QUANTIZED", "--data, -d PATH"]
