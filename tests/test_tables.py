"""Text for people."""

from detent.tables import table_lines


def test_columns_are_as_wide_as_their_widest_cell():
    assert table_lines([("name", "n"), ("a", "10")], right=(1,)) == ["name   n", "a     10"]
    assert table_lines([("name", "n"), ("a", "")]) == ["name  n", "a"]
