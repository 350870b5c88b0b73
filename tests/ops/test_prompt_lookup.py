"""What is proposed is what a search through the text in plain Python finds."""

import jax
import numpy as np
import pytest

from jaxkv.ops.logits import NO_TOKEN
from jaxkv.ops.prompt_lookup import look_up

WIDTH = 24


def found(text: list[int], num_tokens: int, longest: int, shortest: int) -> list[int]:
    """The tokens behind the last of the places before which most tokens are as before the end."""
    best, most = 0, 0
    for place in range(1, len(text)):
        alike = 0
        while alike < min(longest, place) and text[place - 1 - alike] == text[-1 - alike]:
            alike += 1
        if alike >= max(most, 1):
            best, most = place, alike
    if most < shortest:
        return [NO_TOKEN] * num_tokens
    text = list(text)
    for place in range(best, best + num_tokens):
        text.append(text[place])
    return text[-num_tokens:]


@pytest.mark.parametrize(("num_tokens", "longest", "shortest"), [(4, 3, 2), (1, 1, 1), (6, 5, 5)])
def test_it_finds_what_a_search_in_plain_python_finds(num_tokens, longest, shortest):
    rng = np.random.default_rng(5)
    len_B = np.concatenate([np.arange(1, WIDTH + 1)] * 8).astype(np.int32)
    text_BN = rng.integers(0, 3, (len(len_B), WIDTH)).astype(np.int32)
    sizes = {"num_tokens": num_tokens, "longest": longest, "shortest": shortest}
    got_Bk = jax.jit(look_up, static_argnames=tuple(sizes))(text_BN, len_B, **sizes)
    rows = zip(text_BN.tolist(), len_B.tolist(), strict=True)
    want = [found(text[:length], **sizes) for text, length in rows]
    assert np.asarray(got_Bk).tolist() == want
    has = [row[0] != NO_TOKEN for row in want]
    assert 0 < sum(has) < len(has)
