"""Text and documents that the demo model learns from: library source, repeated random tokens,
recall documents.

Text: the source of the running Python's standard library (Python Software Foundation License
Version 2), with about one file in twenty held out by a hash of its path. A batch is a pure function
of (seed, step).
"""

import dataclasses
import hashlib
import random
import sysconfig
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCAB = 2048
BOS, EOS, PAD = 0, 1, 2
SPECIAL_TOKENS = ["<s>", "</s>", "<pad>"]
EXCLUDED = {
    "site-packages",
    "test",
    "tests",
    "idlelib",
    "pydoc_data",
    "encodings",
    "__pycache__",
    "lib-dynload",
}
ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789"
TOKENS_PER_STEP = 8192


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """Training text as tokens (<s> file </s> <s> file </s> ...) and as lines for filler; held-out
    text untokenised.
    """

    tokenizer: Tokenizer
    tokens: np.ndarray
    line_starts: np.ndarray  # indices into tokens
    lines: list[str]
    words: list[str]
    held_out: list[str]
    held_out_lines: list[str]


def read_stdlib() -> tuple[list[str], list[str]]:
    """Returns the texts of (training, held-out) files; a file is held out by a hash of its path."""
    root = Path(sysconfig.get_paths()["stdlib"])
    train, held_out = [], []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if EXCLUDED & set(relative.parts) or relative.name.startswith("_sysconfigdata"):
            continue
        is_held_out = hashlib.sha256(relative.as_posix().encode()).digest()[0] % 20 == 0
        (held_out if is_held_out else train).append(path.read_text(encoding="utf-8"))
    return train, held_out


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Byte-level BPE: lossless for any UTF-8; <s> is added in front, as Llama's tokenizer does."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=SPECIAL_TOKENS,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", BOS)]
    )
    return tokenizer


def build_corpus(tokenizer: Tokenizer | None = None) -> Corpus:
    """Reads, splits and tokenises the standard library; trains the tokenizer unless one is
    given.
    """
    train, held_out = read_stdlib()
    tokenizer = tokenizer or train_tokenizer(train)
    tokens = np.concatenate(
        [np.asarray([*e.ids, EOS], np.int32) for e in tokenizer.encode_batch(train)]
    )
    is_newline = np.asarray(["\n" in tokenizer.decode([i]) for i in range(VOCAB)])
    lines = "".join(train).splitlines(keepends=True)
    words = sorted(
        {
            w
            for line in lines[::7]
            for w in line.split()
            if w.isidentifier() and w.islower() and len(w) < 9
        }
    )
    return Corpus(
        tokenizer=tokenizer,
        tokens=tokens,
        line_starts=np.flatnonzero(is_newline[tokens[:-4096]]) + 1,
        lines=lines,
        words=words,
        held_out=held_out,
        held_out_lines="".join(held_out).splitlines(keepends=True),
    )


def code_document(rng: random.Random, corpus: Corpus, length: int) -> tuple[list[int], list[float]]:
    """<s> and library source from a random line on; every token counts."""
    start = int(rng.choice(corpus.line_starts))
    return [BOS, *corpus.tokens[start : start + length - 1].tolist()], [1.0] * length


def repeat_document(
    rng: random.Random, corpus: Corpus, length: int
) -> tuple[list[int], list[float]]:
    """Random tokens repeated to the end: only the copies count, the first pass is noise."""
    period = rng.randint(12, length // 2)
    segment = [rng.randrange(len(SPECIAL_TOKENS), VOCAB) for _ in range(period)]
    tokens = [BOS, *(segment * (length // period + 1))][:length]
    return tokens, [0.0] * (period + 2) + [0.5] * (length - period - 2)


def random_key(rng: random.Random, corpus: Corpus, style: int) -> tuple[str, str, str]:
    """Returns (definition line, query line up to the opening quote, value) for a fresh key."""
    suffix = "".join(rng.choices(ALPHABET, k=3))
    key = (
        f"KEY_{suffix}"
        if rng.random() < 0.5 or style == 0
        else f"{rng.choice(corpus.words)}_{suffix}"
    )
    value = "".join(rng.choices(ALPHABET, k=rng.randint(3, 8)))
    if rng.random() < 0.4:
        value = "_".join(rng.choices(corpus.words, k=2))
    name = (key, key, f"config['{key}']", f"self.{key}")[style]
    return f"{name} = '{value}'\n", f"assert {name} == '", value


def filler(rng: random.Random, lines: list[str], num_chars: int) -> str:
    """At least num_chars of consecutive source lines from a random place."""
    start, text = rng.randrange(len(lines)), ""
    while len(text) < num_chars:
        text += lines[start % len(lines)]
        start += 1
    return text


def recall_document(
    rng: random.Random, corpus: Corpus, length: int
) -> tuple[list[int], list[float]]:
    """Keys defined near the start, library code, and queries: sprinkled everywhere, or all after
    one long gap.

    Weights: answers 5, library code 1, the random text of definitions and query heads 0 (nobody can
    predict it).
    """
    keys = [
        random_key(rng, corpus, rng.choice((0, 0, 1, 2, 3)))
        for _ in range(rng.choice((1, 2, 4, 4, 8, 16)))
    ]
    pieces = [(filler(rng, corpus.lines, rng.randint(0, 200)), 1.0)]  # (text, weight)
    for definition, _, _ in keys:
        pieces.append((definition, 0.0))
        if rng.random() < 0.2:
            pieces.append((filler(rng, corpus.lines, rng.randint(0, 200)), 1.0))
    budget = 5 * length  # characters; more than any `length` tokens of this tokenizer's text
    if rng.random() < 0.5:
        pieces.append((filler(rng, corpus.lines, rng.randint(0, 3 * length)), 1.0))
        queries = rng.sample(keys, len(keys))
    else:
        queries = rng.choices(keys, k=max(4, length // 40))
    for _, query, value in queries:
        pieces += [(query, 0.0), (f"{value}'", 5.0), ("\n", 0.0)]
        if len(queries) > len(keys) or rng.random() < 0.3:
            pieces.append((filler(rng, corpus.lines, rng.randint(0, 300)), 1.0))
    pieces.append(
        (filler(rng, corpus.lines, max(0, budget - sum(len(text) for text, _ in pieces))), 1.0)
    )
    char_weights = np.repeat([w for _, w in pieces], [len(text) for text, _ in pieces])
    encoding = corpus.tokenizer.encode("".join(text for text, _ in pieces)[:budget])
    return encoding.ids[:length], [
        0.0,
        *(float(char_weights[start]) for start, _ in encoding.offsets[1:length]),
    ]


def batch_plan(step: int) -> tuple[int, float, float]:
    """Returns (tokens per row, share of repeat documents, share of recall documents): short and
    synthetic first.

    It depends on the absolute step, not on the length of the run, so a run can be shortened or
    extended.
    """
    if step < 300:
        return 256, 0.35, 0.25
    if step < 520:
        return (256, 512, 512, 1024)[step % 4], 0.12, 0.30
    if step < 900:
        return (256, 256, 512, 256)[step % 4], 0.40, 0.35
    if step < 1300:
        return (512, 1024, 512, 512, 2048, 512, 1024, 512)[step % 8], 0.04, 0.25
    return (512, 2048, 1024, 2048)[step % 4], 0.04, 0.25 if step < 1560 else 0.40


def make_batch(corpus: Corpus, seed: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns (tokens_BT int32, weights_BT float32) with B * T = TOKENS_PER_STEP; weight t is of
    predicting token t.
    """
    length, repeat_share, recall_share = batch_plan(step)
    rng = random.Random(f"{seed}/{step}")
    rows = []
    for _ in range(TOKENS_PER_STEP // length):
        draw = rng.random()
        recall = recall_document if draw < repeat_share + recall_share else code_document
        rows.append((repeat_document if draw < repeat_share else recall)(rng, corpus, length))
    return np.asarray([t for t, _ in rows], np.int32), np.asarray([w for _, w in rows], np.float32)


def recall_trial(rng: random.Random, corpus: Corpus, distance: int) -> tuple[list[int], int]:
    """Four keys defined, held-out library code, one asked; returns (tokens up to the end of the
    answer, its start).

    `distance` is in tokens from the first token of the value at its definition to the same token of
    the answer.
    """
    encode, lines = corpus.tokenizer.encode, corpus.held_out_lines
    keys = [random_key(rng, corpus, 0) for _ in range(4)]
    definition, query, value = rng.choice(keys)
    text = filler(rng, lines, rng.randint(0, 150)) + "".join(key[0] for key in keys)
    defined_at = len(encode(text[: text.index(definition) + definition.index("'") + 1]).ids)
    room = (
        distance
        - (len(encode(text).ids) - defined_at)
        - len(encode(query, add_special_tokens=False).ids)
    )
    between = encode(filler(rng, lines, 8 * distance), add_special_tokens=False).ids
    text += corpus.tokenizer.decode(between[: max(0, room - 1)]) + "\n" + query
    return encode(f"{text}{value}'").ids, len(encode(text).ids)
