"""Tiny tokenizers made on the spot: byte-level BPE as in Llama 3 and Qwen, and one like
sentencepiece in Llama 2.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

SPECIALS = ("<unk>", "<s>", "</s>", "<pad>", "<|user|>", "<|assistant|>", "<|end|>")
BOS, EOS = 1, 2
CORPUS = [
    (
        "The quick brown fox jumps over the lazy dog. The end of the story is the beginning of the "
        "next one.\n"
    ),
    (
        "Once upon a time there was a little robot who counted the stars in the night sky, one by "
        "one by one."
    ),
    "café naïve über straße; Привет, мир! 你好，世界。",
    "  indented\n\n    lines\twith tabs  and   runs    of spaces",
] * 2
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role not in ['user', 'assistant'] %}{{ raise_exception('unknown role ' ~ m.role) "
    "}}{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_level(vocab_size: int = 380) -> Tokenizer:
    """Every byte is a token, so a character may be spread over several and a token may hold parts
    of two.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIALS),
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _with_bos(tokenizer)


def sentencepiece_like(vocab_size: int = 420) -> Tokenizer:
    """Pieces with a space mark in front; a character without a piece becomes one <0xNN> token per
    byte.
    """
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    # No piece spans a space, and most non-ASCII characters stay without a piece, so that they take
    # the byte tokens.
    words = [
        "\u2581" + word
        for line in CORPUS
        for word in "".join(c for c in line if c.isascii() or c in "éп").split()
    ]
    trainer = trainers.BpeTrainer(vocab_size=vocab_size - len(SPECIALS) - 256, show_progress=False)
    trained.pre_tokenizer = None
    trained.train_from_iterator(words, trainer)
    model = json.loads(trained.to_str())["model"]
    pieces = [*SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256)), *model["vocab"]]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=[tuple(pair) for pair in model["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIALS]
    )
    return _with_bos(tokenizer)


KINDS = {"byte-level": byte_level, "sentencepiece-like": sentencepiece_like}


def save_tokenizer(
    directory: Path, kind: str = "byte-level", *, chat_template: str | None = None
) -> Tokenizer:
    """Writes tokenizer.json and tokenizer_config.json as a checkpoint has them; returns the
    tokenizer itself.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = KINDS[kind]()
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 10**6,
    }
    if chat_template is not None:
        config["chat_template"] = chat_template
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return tokenizer


def _with_bos(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", BOS)]
    )
    return tokenizer
