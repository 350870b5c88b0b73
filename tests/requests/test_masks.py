"""Bad words are the tokens that vLLM forbids, and the bit mask has exactly the bits of what may
come.
"""

import numpy as np
import pytest

from jaxkv.build.tokenizer import load_tokenizer
from jaxkv.requests.masks import encode_words, ends_of, token_mask
from tokenizers_ import save_tokenizer


@pytest.fixture(scope="module", params=["byte-level", "sentencepiece-like"])
def tokenizer(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param)
    save_tokenizer(directory, request.param)
    return load_tokenizer(directory)


def encoded(tokenizer, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def test_a_word_is_forbidden_with_and_without_a_space_in_front(tokenizer):
    for word in ("The", "end", "x", "story", "over", "One by", "night"):
        plain, spaced = encoded(tokenizer, word), encoded(tokenizer, " " + word)
        both = len(plain) == len(spaced) and plain[0] != spaced[0]
        assert encode_words(tokenizer, [word]) == ((plain, spaced) if both else (plain,))
        assert encode_words(tokenizer, ["  " + word]) == encode_words(tokenizer, [word])
    assert encode_words(tokenizer, ["end", "end"]) == encode_words(tokenizer, ["end"])
    assert encode_words(tokenizer, []) == ()


def test_byte_level_words_have_two_forms(tmp_path):
    save_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    texts = [tokenizer.decode(form) for form in encode_words(tokenizer, ["t", " t", "x", "the"])]
    assert texts == [
        "t",
        " t",
        "x",
        "the",
    ]  # " x" and " the" have one token more or less, as vLLM wants it


def test_a_word_may_not_be_completed():
    words = [(5,), (6, 7), (1, 2, 3), (7, 7)]
    assert ends_of(words, []) == {5}
    assert ends_of(words, [6]) == {5, 7}
    assert ends_of(words, [1, 2]) == {5, 3}
    assert ends_of(words, [2]) == {5}
    assert ends_of(words, [1, 2, 7]) == {5, 7}
    assert ends_of(words, [6, 1, 2]) == {5, 3}
    assert ends_of([], [6]) == set()


def test_what_may_not_come_is_what_transformers_forbids():
    torch = pytest.importorskip("torch")
    from transformers.generation.logits_process import NoBadWordsLogitsProcessor

    rng, size, num_long = np.random.default_rng(0), 12, 0
    for _ in range(200):
        words = {tuple(rng.integers(0, size, rng.integers(1, 4)).tolist()) for _ in range(4)}
        generated = rng.integers(0, size, rng.integers(1, 20)).tolist()
        processor = NoBadWordsLogitsProcessor([list(word) for word in words], eos_token_id=None)
        scores = processor(torch.tensor([generated]), torch.zeros(1, size))[0].numpy()
        assert ends_of(words, generated) == set(np.flatnonzero(np.isinf(scores)).tolist())
        num_long += ends_of(words, generated) != ends_of(words, [])
    assert num_long > 10


@pytest.mark.parametrize("size", [1, 31, 32, 33, 70, 420])
def test_a_mask_has_the_bits_of_the_allowed_tokens_but_the_forbidden(size):
    rng = np.random.default_rng(size)
    for allowed in (None, [size - 1], rng.integers(0, size, 30).tolist()):
        for forbidden in (set(), {0}, set(rng.integers(0, size, 5).tolist())):
            mask = token_mask(size, allowed, forbidden)
            assert (mask.dtype, len(mask)) == (np.uint32, -(-size // 32))
            got = {
                token for token in range(32 * len(mask)) if int(mask[token // 32]) >> token % 32 & 1
            }
            assert got == set(range(size) if allowed is None else allowed) - forbidden
