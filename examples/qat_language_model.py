"""Fine-tune a small language model at 4 and at 2 bits, and write the files that llama.cpp runs.

A llama with random weights is trained on Wikipedia articles. Its weights are then quantized to the block formats of
GGUF files: first without training (PTQ), then with training against the quantized weights (QAT). The output layer keeps
6 bits, as in llama.cpp's files. The loss is measured on held-out articles. The last step writes the trained model as a
GGUF file and compares its bytes with those that were trained.

More training lowers the loss of the float model, too, so QAT is compared with a float model that is trained for as many
steps: a gap is the loss minus that of float, before and after. With ``--full``, 4 bits lose little, 2 bits lose
visibly, and QAT wins most of it back; benchmarks/block_training.py repeats this with several seeds.

    python examples/qat_language_model.py           a few steps
    python examples/qat_language_model.py --full    some minutes

Needs the packages transformers and tokenizers, and the text in gensim: ``pip install --no-deps gensim``.
"""

import bz2
import copy
import html
import re
import sys
import tempfile
from dataclasses import dataclass
from math import cos, pi
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import detent as dt
import detent.checkpoint as qc
import detent.torch as qt
from zoo.minilm import package_file

ARTICLES = "test/test_data/enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"
FORMATS = {4: "q4_k", 2: "q2_k"}
HELD_OUT_BATCHES, WARM_UP = 16, 20
LAYERS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@dataclass(frozen=True)
class Settings:
    """Sizes of the text, the model and the training."""

    characters: int = 60_000
    vocabulary: int = 512
    context: int = 32
    batch: int = 8
    blocks: int = 1
    width: int = 256
    inner_width: int = 256
    float_steps: int = 10
    steps: int = 3
    batches: int = 1  # of the evaluation
    float_rate: float = 2e-3
    rate: float = 5e-4


FULL = Settings(
    characters=2_000_000,
    vocabulary=320,
    context=64,
    batch=12,
    blocks=2,
    inner_width=512,
    float_steps=1200,
    steps=200,
    batches=HELD_OUT_BATCHES,
    float_rate=3e-3,
    rate=1e-3,
)


def read_articles(characters: int) -> str:
    """Return the text of Wikipedia articles, without most of the markup."""
    with bz2.open(package_file("gensim", ARTICLES), "rt", encoding="utf-8") as file:
        page = file.read(4 * characters)
    bodies = [html.unescape(body) for body in re.findall(r"<text[^>]*>(.*?)</text>", page, re.DOTALL)]
    text = "\n\n".join(body for body in bodies if not body.startswith("#REDIRECT"))
    for pattern, replacement in (
        (r"<ref[^>/]*/>|<ref.*?</ref>|<!--.*?-->", ""),
        (r"\{\{[^{}]*\}\}", ""),
        (r"\{\{[^{}]*\}\}", ""),  # templates in templates
        (r"\[\[(?:File|Image|Category)[^\]]*\]\]", ""),
        (r"\[\[(?:[^\]|]*\|)?([^\]]*)\]\]", r"\1"),
        (r"'{2,}|<[^>]*>", ""),
        (r"\n{3,}", "\n\n"),
    ):
        text = re.sub(pattern, replacement, text, flags=re.DOTALL)
    return text[:characters]


def make_tokenizer(text: str, vocabulary: int) -> Tokenizer:
    """Return a byte-level BPE tokenizer that is trained on the text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([text[:200_000]], trainer)
    return tokenizer


def make_model(settings: Settings) -> nn.Module:
    """Return a llama with random weights."""
    config = LlamaConfig(
        vocab_size=settings.vocabulary,
        hidden_size=settings.width,
        intermediate_size=settings.inner_width,
        num_hidden_layers=settings.blocks,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=settings.context,
        tie_word_embeddings=False,
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model


def train(model: nn.Module, tokens: Tensor, settings: Settings, steps: int, rate: float, seed: int) -> None:
    """Train with Adam and a learning rate that rises during a few steps, and then decays to zero."""
    optimizer = torch.optim.Adam(model.parameters(), rate, betas=(0.9, 0.99))
    factors = [min(1, (i + 1) / WARM_UP) * (1 + cos(pi * i / steps)) / 2 for i in range(steps + 1)]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factors.__getitem__)
    generator = torch.Generator().manual_seed(seed)
    model.train()
    for _ in range(steps):
        starts = torch.randint(len(tokens) - settings.context, (settings.batch,), generator=generator)
        batch = torch.stack([tokens[start : start + settings.context] for start in starts])
        loss = model(batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1)
        optimizer.step()
        schedule.step()
    model.eval()


@torch.no_grad()
def measure(model: nn.Module, tokens: Tensor, settings: Settings) -> float:
    """Return the mean loss per token on held-out text."""
    size = settings.batches * settings.batch * settings.context
    parts = tokens[:size].reshape(settings.batches, settings.batch, settings.context)
    return sum(model(part, labels=part).loss.item() for part in parts) / settings.batches


def check_bytes(model: nn.Module, path: Path, blocks: int) -> int:
    """Check that the file has the rows that were trained, byte by byte; return the number of bytes.

    GGUF files have the rows of queries and keys in another order, so rows are compared in sorted order.
    """
    file, state = qc.open(path), qt.quantized_state(model)
    names = {"model.embed_tokens": "token_embd", "lm_head": "output"}
    for block in range(blocks):
        names |= {f"model.layers.{block}.{old}": f"blk.{block}.{new}" for old, new in LAYERS.items()}
    assert len(names) == len(state)
    for old, new in names.items():
        weight, rows = state[f"{old}.weight"], file[f"{new}.weight"].read()
        assert sorted(row.tobytes() for row in rows) == sorted(
            row.tobytes() for row in weight.packed.reshape(rows.shape)
        )
    return sum(weight.nbytes for weight in state.values())


def compare(settings: Settings, seed: int = 0) -> dict[str, float]:
    """Train, quantize, train quantized, and export; return the loss of every model by its name."""
    torch.manual_seed(seed)
    text = read_articles(settings.characters)
    tokenizer = make_tokenizer(text, settings.vocabulary)
    tokens = torch.tensor(tokenizer.encode(text).ids)
    size = HELD_OUT_BATCHES * settings.batch * settings.context
    held_out, tokens = tokens[-size:], tokens[:-size]
    model = make_model(settings)
    losses = {}

    def note(name: str, trained: nn.Module, reference: str = "") -> None:
        losses[name] = measure(trained, held_out, settings)
        gap = f", gap to {reference} {losses[name] - losses[reference]:+.4f}" if reference else ""
        print(f"{name:22} loss {losses[name]:.4f}{gap}", flush=True)

    train(model, tokens, settings, settings.float_steps, settings.float_rate, seed + 1)
    note("float", model)
    longer = copy.deepcopy(model)
    train(longer, tokens, settings, settings.steps, settings.rate, seed + 2)
    note("float, trained longer", longer)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        model.config.save_pretrained(directory)
        tokenizer.save(str(directory / "tokenizer.json"))
        for bits, form in FORMATS.items():
            recipe = dt.Recipe([dt.Rule(weight=form), dt.Rule("lm_head", weight="q6_k")])
            quantized = qt.prepare(copy.deepcopy(model), recipe)
            note(f"{bits} bits, PTQ", quantized, "float")
            train(quantized, tokens, settings, settings.steps, settings.rate, seed + 2)
            note(f"{bits} bits, QAT", quantized, "float, trained longer")
            path = qt.export_gguf(quantized, directory, directory / f"{form}.gguf")
            count = check_bytes(quantized, path, settings.blocks)
            print(
                f"{bits} bits, GGUF           {path.stat().st_size:,} bytes; {count:,} bytes of weights, all as trained"
            )
    return losses


def main() -> None:
    is_full = "--full" in sys.argv[1:]
    torch.set_num_threads(torch.get_num_threads() if is_full else 1)
    compare(FULL if is_full else Settings())


if __name__ == "__main__":
    main()
