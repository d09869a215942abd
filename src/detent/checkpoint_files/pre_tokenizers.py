r"""The names that llama.cpp has for pre-tokenizers, which divide texts before byte-level BPE.

A GGUF file has no regular expressions, only a name, and llama.cpp has the expressions. A name is found in two ways:

1. by the tokens of a fixed text: the SHA-256 of the list of ids is looked up among those of known tokenizers, as in
   llama.cpp's converter. This identifies a vocabulary, including those whose ``tokenizer.json`` is unusual.
2. by the pre-tokenizer in ``tokenizer.json``: for a new vocabulary, its expression is compared with known ones.

If neither finds a name, the caller has to pass one.
"""

import json
from collections.abc import Mapping, Sequence
from hashlib import sha256
from types import MappingProxyType
from typing import Any

__all__ = ["CHECK_TEXT", "name_of_pattern", "name_of_tokens"]

# The fixed text. Its ids differ between pre-tokenizers: digits, spaces, newlines, contractions, scripts and emoji.
CHECK_TEXT = (
    "\n \n\n \n\n\n \t \t\t \t\n  \n   \n    \n     \n"
    "\N{ROCKET} (normal) \N{FACE WITHOUT MOUTH}\u200d\N{FOG}\ufe0f (multiple emojis concatenated) "
    "\N{WHITE HEAVY CHECK MARK} \N{LLAMA}\N{LLAMA} 3 33 333 3333 33333 333333 3333333 33333333 3.3 3..3 3...3 "
    "\u1780\u17b6\u1793\u17cb\u178f\u17c2\u1796\u17b7\u179f\u17c1\u179f\u17a2\u17b6\u1785"
    "\N{GRINNING FACE WITH SMILING EYES} ?\u6211\u60f3\u5728apple\u5de5\u4f5c1314151\u5929\uff5e ------======= "
    "\u043d\u0435\u0449\u043e \u043d\u0430 \u0411\u044a\u043b\u0433\u0430\u0440\u0441\u043a\u0438 "
    "''''''```````\"\"\"\"......!!!!!!?????? I've been 'told he's there, 'RE you sure? 'M not sure I'll make it, "
    "'D you like some tea? We'Ve a'lL"
)
# SHA-256 of str(ids) of CHECK_TEXT, for vocabularies of the architectures that detent writes.
KNOWN_TOKENS: Mapping[str, str] = MappingProxyType(
    {
        "0ef9807a4087ebef797fc749390439009c3b9eda9ad1a097abbe738f486c01e5": "llama-bpe",
        "c136ed14d01c2745d4f60a9596ae66800e2b61fa45643e72436041855ad4089d": "smaug-bpe",
        "049ecf7629871e3041641907f3de7c733e4dbfdc736f57d882ba0b0845599754": "deepseek-llm",
        "347715f544604f9118bb75ed199f68779f423cabb20db6de6f31b908d04d7821": "deepseek-coder",
        "b3f499bb4255f8ca19fccd664443283318f2fd2414d5e0b040fbdd0cc195d6c5": "deepseek-r1-qwen",
        "e636dc30a262dcc0d8c323492e32ae2b70728f4df7dfe9737d9f920a282b8aea": "qwen2",
        "d4540891389ea895b53b399da6ac824becc30f2fba0e9ddbb98f92e55ca0e97c": "qwen2",
        "3ce83efda5659b07b1ad37ca97ca5797ea4285d9b9ab0dc679e4a720c9da7454": "gpt-2",
        "0fe1cf6eda062318a1af7270f3331a85c539a01778ff948e24388e949c5282f4": "gpt-2",
        "bc01ce58980e1db43859146dc51b1758b3b88729b217a74792e9f8d43e479d21": "gpt3-finnish",
        "855059429035d75a914d1eda9f10a876752e281a054a7a3d421ef0533e5b6249": "smollm",
        "63b97e4253352e6f357cc59ea5b583e3a680eaeaf2632188c2b952de2588485e": "tekken",
        "0e9433cbbb161f89e264eb32e8e64bfe69e834973ffca5d41d3948a604a3e2a3": "pixtral",
        "a8594e3edff7c29c003940395316294b2c623e09894deebbc65f33f1515df79e": "dbrx",
        "ccc2ef013c104be7bae2965776d611e1d7a8a2a9c547dd93a682c9a9fc80352e": "gpt-4o",
        "35d91631860c815f952d711435f48d356ebac988362536bed955d43bfa436e34": "starcoder",
        "6221ad2852e85ce96f791f476e0b390cf9b474c9e3d1362f53a24a06dc8220ff": "refact",
        "9d032fcbd5501f4a38150912590928bfb36091efb5df11b8e2124b0390e3fb1e": "falcon3",
        "a1e163ecab2e718a4c829d1148b6e86824ec36163bb71941c3dca9cd5ac25756": "mellum",
        "d4c8f286ea6b520b3d495c4455483cfa2302c0cfcd4be05d781b6a8a0a7cdaf1": "megrez",
        "7dec86086fcc38b66b7bc1575a160ae21cf705be7718b9d5598190d7c12db76f": "superbpe",
        "d5f1dd6f980fec569fb218a81a7658ac45fc56b38c5a0adeb1c232fbe04ef5ec": "seed-coder",
    }
)
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|"
_REST = "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
_THREE_DIGITS = f"{_CONTRACTIONS}\\p{{N}}{{1,3}}{_REST}"
_ONE_DIGIT = f"{_CONTRACTIONS}\\p{{N}}{_REST}"
_UPPER, _LOWER = "[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]", "[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]"
_BEFORE_WORD = "[^\\r\\n\\p{L}\\p{N}]?"
_TEKKEN = (
    f"{_BEFORE_WORD}{_UPPER}*{_LOWER}+|{_BEFORE_WORD}{_UPPER}+{_LOWER}*|\\p{{N}}"
    "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
)


def name_of_tokens(ids: Sequence[int]) -> str | None:
    """Return the name of the pre-tokenizer of a known vocabulary from the ids of ``CHECK_TEXT``, or None."""
    return KNOWN_TOKENS.get(sha256(str(list(ids)).encode()).hexdigest())


def name_of_pattern(tokenizer: Mapping[str, Any]) -> str | None:
    """Return the name of the pre-tokenizer in the content of a ``tokenizer.json``, or None.

    >>> name_of_pattern({"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}})
    'gpt-2'
    """
    model = tokenizer.get("model")
    ignores_merges = isinstance(model, Mapping) and model.get("ignore_merges") is True
    steps = tuple(_steps(tokenizer.get("pre_tokenizer")))
    if steps == ("bytes by words",):
        return None if ignores_merges else "gpt-2"
    if steps == ("single digits", "bytes by words"):
        return None if ignores_merges else "smollm"
    if steps == (_THREE_DIGITS, "bytes"):
        return "llama-bpe" if ignores_merges else "dbrx"
    if steps == (_ONE_DIGIT, "bytes"):
        return None if ignores_merges else "qwen2"
    if steps == (_TEKKEN, "bytes"):
        return "tekken" if ignores_merges else None
    return None


def _steps(pre_tokenizer: object) -> list[str]:
    """Return the steps of a pre-tokenizer as text; what cannot be compared is returned as JSON."""
    if not isinstance(pre_tokenizer, Mapping):
        return []
    kind = pre_tokenizer.get("type")
    if kind == "Sequence" and isinstance(pre_tokenizer.get("pretokenizers"), list):
        return [step for each in pre_tokenizer["pretokenizers"] for step in _steps(each)]
    if kind == "ByteLevel" and not pre_tokenizer.get("add_prefix_space"):
        return ["bytes by words" if pre_tokenizer.get("use_regex", True) else "bytes"]
    if kind == "Digits" and pre_tokenizer.get("individual_digits"):
        return ["single digits"]
    pattern = pre_tokenizer.get("pattern")
    is_isolated = pre_tokenizer.get("behavior") == "Isolated" and not pre_tokenizer.get("invert")
    if kind == "Split" and is_isolated and isinstance(pattern, Mapping) and isinstance(pattern.get("Regex"), str):
        return [str(pattern["Regex"])]
    return [json.dumps(pre_tokenizer, sort_keys=True, default=str)]
