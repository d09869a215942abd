"""Write the results of a benchmark, and read those of an earlier run."""

import json
from pathlib import Path


def write_result(result: dict, output: Path | None, indent: int = 1) -> None:
    """Write a result as JSON to ``output``, or print it if ``output`` is None."""
    text = json.dumps(result, indent=indent)
    if output is None:
        print(text)
    else:
        output.write_text(text + "\n", encoding="utf-8")


def stored_models(output: Path | None) -> dict:
    """Return the results by model in ``output``; {} if there are none yet."""
    is_stored = output is not None and output.is_file()
    return json.loads(output.read_text(encoding="utf-8"))["models"] if is_stored else {}
