"""Documents: small generated files of many types, as inputs for a file-type classifier."""

import gzip
import io
import json
import wave
import zipfile
import zlib
from collections.abc import Callable, Iterator

import numpy as np

__all__ = ["documents"]

WORDS = (
    "amount answer base begin center circle count data depth draw edge empty field first flow graph group height index "
    "inner label layer left level limit line list load mark mean mode name next node order outer page part path place "
    "point queue range rate right root row scale score series shape side size slope source space start state step table"
)
Random = np.random.Generator


def _words(rng: Random, count: int) -> list[str]:
    return [str(word) for word in rng.choice(WORDS.split(), count)]


def _text(rng: Random) -> str:
    return "\n".join(" ".join(_words(rng, int(rng.integers(5, 14)))).capitalize() + "." for _ in range(30))


def _python(rng: Random) -> str:
    parts = [f'"""{" ".join(_words(rng, 6)).capitalize()}."""\n\nimport os\nimport sys\n']
    for name, first, second in (_words(rng, 3) for _ in range(20)):
        parts.append(
            f"\ndef {name}({first}, {second}=None):\n    if {second} is None:\n        return len({first})\n"
            f"    for item in {first}:\n        print(item, {second}, file=sys.stderr)\n    return os.getcwd()\n"
        )
    return "\n".join(parts)


def _c(rng: Random) -> str:
    parts = ["#include <stdio.h>\n#include <stdlib.h>\n"]
    for name, first, second in (_words(rng, 3) for _ in range(20)):
        parts.append(
            f"static int {name}(const int *{first}, size_t {second}) {{\n    int sum = 0;\n"
            f"    for (size_t i = 0; i < {second}; ++i) {{\n        sum += {first}[i];\n    }}\n    return sum;\n}}\n"
        )
    return "\n".join(parts)


def _javascript(rng: Random) -> str:
    parts = ['"use strict";\n']
    for name, first, second in (_words(rng, 3) for _ in range(25)):
        parts.append(
            f"export async function {name}({first}) {{\n  const {second} = await fetch(`/${{{first}.id}}`);\n"
            f"  return {second}.json().then((x) => x.filter((y) => y !== null));\n}}\n"
        )
    return "\n".join(parts)


def _shell(rng: Random) -> str:
    lines = ["#!/bin/bash", "set -euo pipefail"]
    for name, other in (_words(rng, 2) for _ in range(30)):
        lines += [
            f'{name}="${{1:-{other}}}"',
            f'if [ -f "${name}" ]; then',
            f'    grep -v {other} "${name}" | sort',
            "fi",
        ]
    return "\n".join(lines)


def _sql(rng: Random) -> str:
    rows = []
    for name, first, second in (_words(rng, 3) for _ in range(20)):
        rows.append(f"CREATE TABLE {name} ({first} INTEGER PRIMARY KEY, {second} VARCHAR(40) NOT NULL);")
        rows.append(f"SELECT {first}, COUNT(*) FROM {name} WHERE {second} LIKE 'a%' GROUP BY {first} ORDER BY 2;")  # noqa: S608 - not run
    return "\n".join(rows)


def _html(rng: Random) -> str:
    body = "".join(f'<p class="{name}">{_text(rng)[:200]}</p>\n<ul><li>{name}</li></ul>\n' for name in _words(rng, 12))
    return f"<!DOCTYPE html>\n<html>\n<head><title>{_words(rng, 1)[0]}</title></head>\n<body>\n{body}</body>\n</html>\n"


def _xml(rng: Random) -> str:
    rows = "".join(f'  <item id="{i}"><name>{name}</name></item>\n' for i, name in enumerate(_words(rng, 60)))
    return f'<?xml version="1.0" encoding="UTF-8"?>\n<items>\n{rows}</items>\n'


def _json(rng: Random) -> str:
    return json.dumps([{name: float(rng.random()), "tags": _words(rng, 3)} for name in _words(rng, 40)], indent=2)


def _csv(rng: Random) -> str:
    rows = [f"{i},{name},{rng.random():.4f},{rng.integers(1000)}" for i, name in enumerate(_words(rng, 80))]
    return "\n".join(["id,name,score,count", *rows])


def _ini(rng: Random) -> str:
    sections = (
        f"[{name}]\n" + "\n".join(f"{key} = {rng.integers(100)}" for key in _words(rng, 6)) for name in _words(rng, 15)
    )
    return "\n\n".join(sections)


def _markdown(rng: Random) -> str:
    parts = (f"## {name.capitalize()}\n\n{_text(rng)[:300]}\n\n- *{name}*\n- `{name}`\n" for name in _words(rng, 12))
    return "# Notes\n\n" + "\n".join(parts)


def _png(rng: Random) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    size = int(rng.integers(20, 60))
    pixels = b"".join(b"\0" + rng.integers(0, 256, 3 * size, np.uint8).tobytes() for _ in range(size))
    head = size.to_bytes(4, "big") * 2 + bytes([8, 2, 0, 0, 0])
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(pixels)) + chunk(b"IEND", b"")


def _zip(rng: Random) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in dict.fromkeys(_words(rng, 6)):
            archive.writestr(zipfile.ZipInfo(f"{name}.txt"), _text(rng))
    return file.getvalue()


def _wav(rng: Random) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(16000)
        sound.writeframes((np.cumsum(rng.normal(0, 200, 4000)) % 20000).astype("<i2").tobytes())
    return file.getvalue()


def _gzip(rng: Random) -> bytes:
    return gzip.compress(_text(rng).encode(), mtime=0)


MAKERS: tuple[Callable[[Random], str | bytes], ...] = (
    *(_python, _json, _png, _html, _c, _csv, _zip, _markdown),
    *(_javascript, _xml, _wav, _shell, _sql, _gzip, _ini, _text),
)


def documents(count: int) -> Iterator[bytes]:
    """Yield files of sixteen types in turn: programs, texts, tables, pictures, sounds and archives.

    >>> [data[1:4] for data in documents(3)][2]
    b'PNG'
    """
    for i in range(count):
        content = MAKERS[i % len(MAKERS)](np.random.default_rng([7, i]))
        yield content if isinstance(content, bytes) else content.encode()
