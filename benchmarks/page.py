"""Rendered sections of a page: rows of tables, and inserting each section between two markers with its name."""


def placed(page: str, sections: dict[str, str]) -> str:
    """Insert every section between its markers."""
    for name, text in sections.items():
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        before, rest = page.split(begin)
        _, after = rest.split(end)
        page = f"{before}{begin}\n{text}\n{end}{after}"
    return page


def table_row(*cells: str) -> str:
    """Format one row of a Markdown table."""
    return f"| {' | '.join(cells)} |"
