"""Tables, byte counts, short names and short reprs."""

from dataclasses import dataclass, field
from xml.etree import ElementTree

import pytest

from detent.tables import bytes_text, html_table, short_name, short_repr, svg_histogram, table_lines


def test_columns_are_as_wide_as_their_widest_cell():
    assert table_lines([("name", "n"), ("a", "10")], right=(1,)) == ["name   n", "a     10"]
    assert table_lines([("name", "n"), ("a", "")]) == ["name  n", "a"]


def test_html_tables_escape_all_text():
    text = html_table([("name", "n"), ("<script>", "10")], right={1}, notes=['"a" & <b>'])
    assert "<script" not in text
    assert '<td style="text-align:right">10</td>' in text
    assert text.endswith("<div>&quot;a&quot; &amp; &lt;b&gt;</div>")
    assert html_table([("name",)]).count("<tr>") == 1


def test_histograms_are_svg_with_escaped_text():
    svg = ElementTree.fromstring(svg_histogram([3, 0, 6], "<a>", "b", "<t>"))
    assert [text.text for text in svg.iter("text")] == ["<a>", "b"]
    assert svg.find("title").text == "<t>"
    assert svg.find("path").get("d") == "M0.00 48v-24.00h85.33v24.00zM170.67 48v-48.00h85.33v48.00z"
    assert ElementTree.fromstring(svg_histogram([], "", "", "")).find("path").get("d") == ""


@pytest.mark.parametrize(
    ("count", "text", "padded"),
    [
        (0, "0 B", "0 B"),
        (999, "999 B", "999 B"),
        (1000, "1 kB", "1.00 kB"),
        (-1500, "-1.5 kB", "-1.50 kB"),
        (99_960, "100 kB", "100 kB"),
        (999_499, "999 kB", "999 kB"),
        (999_500, "1 MB", "1.00 MB"),
        (12_000_000_000, "12 GB", "12.0 GB"),
        (123_456_789_012, "123 GB", "123 GB"),
        (1_234_000_000_000_000, "1.23 PB", "1.23 PB"),
    ],
)
def test_bytes_have_three_digits(count, text, padded):
    assert (bytes_text(count), bytes_text(count, is_padded=True)) == (text, padded)


def test_long_names_are_cut_in_the_middle():
    assert short_name("a" * 60) == "a" * 60
    assert short_name("a" * 30 + "b" * 60) == "a" * 20 + "..." + "b" * 37


@dataclass
class Point:
    """Fields with and without defaults."""

    x: int
    y: int = 0
    tags: list[str] = field(default_factory=list)


@pytest.mark.parametrize(
    ("point", "text"), [(Point(0), "Point(x=0)"), (Point(1, 2, ["a"]), "Point(x=1, y=2, tags=['a'])")]
)
def test_short_reprs_omit_defaults(point, text):
    assert short_repr(point) == text
