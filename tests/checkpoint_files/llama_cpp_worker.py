"""Runs llama.cpp through cyllama, in an environment of its own: one JSON request per line, one JSON answer per line.

Requests: {"do": "quantize", "source", "target", "file_type"}, {"do": "logits", "path", "tokens", "output"} and
{"do": "tokenize", "path", "texts"}.
"""

import json
import sys

import cyllama.llama.llama_cpp as llama
import numpy as np


def quantize(source, target, file_type):
    params = llama.LlamaModelQuantizeParams()
    params.ftype, params.nthread = file_type, 1
    llama.model_quantize(source, target, params)
    return {}


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
