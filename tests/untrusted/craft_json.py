"""JSON values that can break a reader, and a way to insert them anywhere in a document."""

import json

__all__ = ["BAD_VALUES", "places", "replaced"]


def nested(depth, inside="", opening="[", closing="]"):
    return opening * depth + inside + closing * depth


# JSON values that can break a reader.
BAD_VALUES = {
    "null": "null",
    "true": "true",
    "zero": "0",
    "minus one": "-1",
    "one": "1",
    "half": "0.5",
    "2^63": str(2**63),
    "2^1023": str(2**1023),
    "4000 digits": "9" * 4000,
    "minus 4000 digits": "-" + "9" * 4000,
    "5000 digits": "9" * 5000,
    "beyond floats": "1e999",
    "digits of a float": "1." + "1" * 100_000,
    "nan": '"nan"',
    "NaN": "NaN",
    "Infinity": "-Infinity",
    "text": '"x"',
    "empty text": '""',
    "long text": '"' + "x" * 200_000 + '"',
    "lone surrogate": r'"\ud800"',
    "nul": r'"\u0000"',
    "empty list": "[]",
    "empty object": "{}",
    "list": "[1, 2]",
    "object": '{"a": 1}',
    "lists 900 deep": nested(900),
    "objects 900 deep": nested(900, "1", '{"a": ', "}"),
    "lists 100,000 deep": nested(100_000),
    "ragged": "[[1], [1, 2]]",
    "long text and many numbers": '["' + "x" * 1_000_000 + '"' + ", 1" * 3000 + "]",
    "many sizes": "[" + f"{2**61}, " * 60_000 + "1]",
    "many ones": "[" + "1, " * 20_000 + "1]",
    "large product": "[4611686018427387903, 4611686018427387903]",
    "large product times zero": "[0, 4611686018427387903]",
    "many empty lists": "[" + "[], " * 20_000 + "[]]",
    "duplicated key": '{"a": 1, "a": 2}',
    "lone surrogate as a key": r'{"\ud800": 1}',
}


def places(value, path=()):
    """Yield the path of every value inside a JSON value, including the value itself."""
    yield path
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield from places(child, (*path, key))


def replaced(value, path, text):
    """JSON text of a value in which the value at a path is replaced by a text."""
    if not path:
        return text
    is_object = isinstance(value, dict)
    parts = []
    for key, child in value.items() if is_object else enumerate(value):
        inside = replaced(child, path[1:], text) if key == path[0] else json.dumps(child)
        parts.append(f"{json.dumps(key)}: {inside}" if is_object else inside)
    return f"{{{', '.join(parts)}}}" if is_object else f"[{', '.join(parts)}]"
