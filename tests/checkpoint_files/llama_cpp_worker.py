"""Runs llama.cpp through cyllama, in an environment of its own: one JSON request per line, one JSON answer per line.

Requests: {"do": "quantize", "source", "target", "file_type", "importance"}, {"do": "logits", "path", "tokens",
"output"} and {"do": "tokenize", "path", "texts"}.
"""

import ctypes
import json
import struct
import sys

import numpy as np

try:
    import cyllama.llama.llama_cpp as llama
except ImportError:  # pytest imports this module, too, to look for doctests
    llama = None


def quantize(source, target, file_type, importance):
    params = llama.LlamaModelQuantizeParams()
    params.ftype, params.nthread = file_type, 1
    kept = set_importance(params, np.load(importance)) if importance else None
    llama.model_quantize(source, target, params)
    del kept
    return {}


class ImportanceData(ctypes.Structure):
    """llama.cpp's ``llama_model_imatrix_data``."""

    _fields_ = (("name", ctypes.c_char_p), ("data", ctypes.POINTER(ctypes.c_float)), ("size", ctypes.c_size_t))


def set_importance(params, weights):
    """Set the pointer to importance, which cyllama does not offer; return what must stay alive.

    In llama.cpp's structure, the pointer is at byte 24, after four integers (first the number of threads and the file
    type) and six flags.
    """
    start, size = id(params), sys.getsizeof(params)
    at = ctypes.string_at(start, size).find(struct.pack("<ii", params.nthread, params.ftype))
    assert at > 0
    entries = (ImportanceData * (len(weights.files) + 1))()
    arrays = {name: np.ascontiguousarray(weights[name], np.float32).reshape(-1) for name in weights.files}
    for entry, (name, array) in zip(entries, arrays.items(), strict=False):
        entry.name, entry.size = name.encode(), array.size
        entry.data = array.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    ctypes.c_void_p.from_address(start + at + 24).value = ctypes.addressof(entries)
    return entries, arrays


def logits(path, tokens, output):
    """Store the logits of every token in a .npy file."""
    model = llama.LlamaModel(path_model=path, params=llama.LlamaModelParams(), verbose=False)
    params = llama.LlamaContextParams()
    params.n_ctx, params.n_batch, params.n_ubatch = 256, 256, 256
    params.n_threads = params.n_threads_batch = 1
    params.type_k = params.type_v = 0  # float32
    params.flash_attn_type = 0  # off
    context = llama.LlamaContext(model=model, params=params, verbose=False)
    batch = llama.LlamaBatch(n_tokens=len(tokens), embd=0, n_seq_max=1)
    for at, token in enumerate(tokens):
        batch.add(token, at, [0], True)
    context.decode(batch)
    np.save(output, np.array([context.get_logits_ith(at) for at in range(len(tokens))], np.float32))
    return {}


def tokenize(path, texts):
    model = llama.LlamaModel(path_model=path, params=llama.LlamaModelParams(), verbose=False)
    vocabulary = model.get_vocab()
    return {"tokens": [list(vocabulary.tokenize(text, True, True)) for text in texts]}


def main():
    llama.disable_logging()
    llama.llama_backend_init()
    answers = {"quantize": quantize, "logits": logits, "tokenize": tokenize}
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = answers[request.pop("do")](**request)
        except Exception as error:  # noqa: BLE001 - reported to the test
            answer = {"error": f"{type(error).__name__}: {error}"}
        print("\x1e" + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
