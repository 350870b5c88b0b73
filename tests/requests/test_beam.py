"""The search itself, over a made-up model: tests/api/test_beam.py has it over real ones, against
transformers.
"""

from itertools import product

import numpy as np
import pytest

from jaxkv.requests.beam import BeamSearch

VOCAB, LONGEST, END = 3, 4, 2


def logprobs_after(tokens: tuple[int, ...]) -> np.ndarray:
    x = np.random.default_rng([7, *tokens]).normal(size=VOCAB)
    return (x - np.log(np.exp(x).sum())).astype(np.float32)


def likeliest(tokens: tuple[int, ...], count: int) -> tuple[np.ndarray, np.ndarray]:
    logprobs = logprobs_after(tokens)
    best = np.argsort(-logprobs)[:count]
    return best, logprobs[best]


def run(
    width: int, *, length_penalty: float, count: int = VOCAB, eos_ids: tuple[int, ...] = (END,)
) -> BeamSearch:
    search = BeamSearch(width, max_new=LONGEST, eos_ids=eos_ids, length_penalty=length_penalty)
    running: list[tuple[int, ...]] = [()] * width
    while not search.is_over:
        tokens, logprobs = zip(*(likeliest(one, count) for one in running), strict=True)
        running = [
            (*running[parent], token)
            for parent, token in search.advance(np.stack(tokens), np.stack(logprobs))
        ]
    return search


def tokens_of(search: BeamSearch) -> list[tuple[int, ...]]:
    return [tuple(beam.token for beam in end.path()) for end in search.ended]


def every_sequence() -> list[tuple[int, ...]]:
    """All that end, or are as long as can be."""
    going = [one for n in range(LONGEST) for one in product([0, 1], repeat=n)]
    return [(*one, END) for one in going] + list(product([0, 1], repeat=LONGEST))


@pytest.mark.parametrize("length_penalty", [1, 0.0, 2.5, -1.5])
def test_a_search_as_wide_as_the_tree_ranks_every_sequence(length_penalty):
    def total(tokens: tuple[int, ...]) -> float:
        return sum(float(logprobs_after(tokens[:i])[token]) for i, token in enumerate(tokens))

    expected = sorted(every_sequence(), key=lambda one: -total(one) / len(one) ** length_penalty)
    search = run(VOCAB**LONGEST, length_penalty=length_penalty)
    assert tokens_of(search)[: len(expected)] == expected
    for end, tokens in zip(search.ended, expected, strict=False):
        assert end.cum_logprob == pytest.approx(total(tokens), rel=1e-5)
        assert [beam.token_K[0] for beam in end.path()] == [
            likeliest(tokens[:i], 1)[0][0] for i in range(len(tokens))
        ]


@pytest.mark.parametrize("eos_ids", [(), (2,), (0, 2)])
def test_each_beams_likeliest_tokens_are_enough(eos_ids):
    """More than (1 + end tokens) * width of the vocabulary change nothing; here that is all of it
    or less.
    """
    options = {"length_penalty": 1.0, "eos_ids": eos_ids}
    assert tokens_of(run(1, count=2 if len(eos_ids) < 2 else 3, **options)) == tokens_of(
        run(1, **options)
    )


def test_one_beam_is_greedy_and_a_finished_search_says_so():
    search = run(1, length_penalty=1.0)
    greedy: tuple[int, ...] = ()
    while len(greedy) < LONGEST and END not in greedy:
        greedy = (*greedy, int(np.argmax(logprobs_after(greedy))))
    assert tokens_of(search) == [greedy]
    with pytest.raises(RuntimeError, match="over"):
        search.advance(np.zeros((1, 2), int), np.zeros((1, 2), np.float32))
