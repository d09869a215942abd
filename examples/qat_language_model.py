"""Fine-tune a small language model at 4 and at 2 bits, and write the files that llama.cpp runs.

A llama with random weights is trained on news articles (Lee et al. 2005). Its weights are then quantized to the block
formats of GGUF files: first without training (PTQ), then with training against the quantized weights (QAT). The
embedding and the output layer keep 6 bits. The loss is measured on held-out text. The last step writes the trained
model as a GGUF file and compares its bytes with those that were trained.

More training lowers the loss of the float model, too, so QAT must be compared with the float model that is trained for
as many steps: the gaps are those to float before and after. A model of this size loses little by quantization; the
example shows how to train and that the bytes are equal, not how much QAT gains on a real model.

    python examples/qat_language_model.py           a few steps
    python examples/qat_language_model.py --full    200 float steps, and 60 steps at each bit width

Needs the packages transformers and tokenizers, and the text in gensim: ``pip install --no-deps gensim``.
"""

import copy
import sys
import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import detent as dt
import detent.checkpoint as qc
import detent.torch as qt
from zoo.minilm import package_file

VOCABULARY, CONTEXT, BATCH, BLOCKS = 512, 32, 8, 1
LAYERS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def make_tokenizer(text: str) -> Tokenizer:
    """Return a byte-level BPE tokenizer that is trained on the text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([text], trainer)
    return tokenizer


def make_model() -> nn.Module:
    """Return a llama with random weights."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=BLOCKS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model


def train(model: nn.Module, tokens: Tensor, steps: int, rate: float, seed: int) -> None:
    """Train with Adam and a learning rate that decays to zero."""
    optimizer = torch.optim.Adam(model.parameters(), rate)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator = torch.Generator().manual_seed(seed)
    model.train()
    for _ in range(steps):
        starts = torch.randint(len(tokens) - CONTEXT, (BATCH,), generator=generator)
        batch = torch.stack([tokens[start : start + CONTEXT] for start in starts])
        loss = model(batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        decay.step()
    model.eval()


@torch.no_grad()
def measure(model: nn.Module, tokens: Tensor, batches: int) -> float:
    """Return the mean loss per token on held-out text."""
    parts = tokens[: batches * BATCH * CONTEXT].reshape(batches, BATCH, CONTEXT)
    return sum(model(part, labels=part).loss.item() for part in parts) / batches


def check_bytes(model: nn.Module, path: Path) -> int:
    """Check that the file has the rows that were trained, byte by byte; return the number of bytes.

    GGUF files have the rows of queries and keys in another order, so rows are compared in sorted order.
    """
    file, state = qc.open(path), qt.quantized_state(model)
    names = {"model.embed_tokens": "token_embd", "lm_head": "output"}
    for block in range(BLOCKS):
        names |= {f"model.layers.{block}.{old}": f"blk.{block}.{new}" for old, new in LAYERS.items()}
    assert len(names) == len(state)
    for old, new in names.items():
        weight, rows = state[f"{old}.weight"], file[f"{new}.weight"].read()
        assert sorted(row.tobytes() for row in rows) == sorted(
            row.tobytes() for row in weight.packed.reshape(rows.shape)
        )
    return sum(weight.nbytes for weight in state.values())


def main() -> None:
    full = "--full" in sys.argv[1:]
    float_steps, steps, batches = (200, 60, 16) if full else (10, 3, 1)
    torch.manual_seed(0)
    torch.set_num_threads(torch.get_num_threads() if full else 1)
    text = package_file("gensim", "test/test_data/lee_background.cor").read_text(encoding="utf-8")
    text = text[: 200_000 if full else 60_000]
    tokenizer = make_tokenizer(text)
    tokens = torch.tensor(tokenizer.encode(text).ids)
    held_out, tokens = tokens[-16 * BATCH * CONTEXT :], tokens[: -16 * BATCH * CONTEXT]
    model = make_model()
    train(model, tokens, float_steps, 2e-3, seed=1)
    float_loss = measure(model, held_out, batches)
    print(f"float                    loss {float_loss:.4f}", flush=True)
    longer = copy.deepcopy(model)
    train(longer, tokens, steps, 5e-4, seed=2)
    longer_loss = measure(longer, held_out, batches)
    print(f"float, trained longer    loss {longer_loss:.4f}")
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        model.config.save_pretrained(directory)
        tokenizer.save(str(directory / "tokenizer.json"))
        for bits, form in ((4, "q4_k"), (2, "q2_k")):
            recipe = dt.Recipe(
                [dt.Rule(weight=form), dt.Rule("*embed_tokens", weight="q6_k"), dt.Rule("lm_head", weight="q6_k")]
            )
            quantized = qt.prepare(copy.deepcopy(model), recipe)
            before = measure(quantized, held_out, batches)
            train(quantized, tokens, steps, 5e-4, seed=2)
            after = measure(quantized, held_out, batches)
            path = qt.export_gguf(quantized, directory, directory / f"{form}.gguf")
            print(f"{bits} bits, PTQ              loss {before:.4f}, gap to float {before - float_loss:+.4f}")
            print(f"{bits} bits, QAT              loss {after:.4f}, gap to longer float {after - longer_loss:+.4f}")
            count = check_bytes(quantized, path)
            size = path.stat().st_size
            print(f"{bits} bits, GGUF            {size:,} bytes; {count:,} bytes of weights, all as trained")


if __name__ == "__main__":
    main()
