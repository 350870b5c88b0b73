"""A state that is a value: what it computes is what the engine computes, whatever was forked,
rewound or cut before, and what it holds follows from itself.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import LLM, CapacityError, SamplingParams
from jaxkv import functional as jk
from jaxkv.programs.loop import decode_loop
from jaxkv.programs.pages import copy_pages
from jaxkv.programs.step import logits_step
from tiers import some
from tiny import SMALL, make_checkpoint, tiny_config

pytestmark = pytest.mark.usefixtures("quick_compile")

VOCAB = 151
PAGES, SIZE, ROWS, TOKENS = 30, 8, 4, 16
TOLERANCE = 2e-5
"""Logits near 1 in float32, computed in batches of another shape."""


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB, length).tolist()


PROMPTS = [prompt(1, 21), prompt(2, 5), prompt(3, 40), prompt(4, 1)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("functional"), tiny_config("llama-3"))


@pytest.fixture(scope="module")
def model(directory) -> jk.Model:
    return jk.load(directory, dtype="float32", skip_tokenizer_init=True)


@pytest.fixture
def kv(model) -> jk.State:
    return new(model)


def new(model: jk.Model, **changes: int) -> jk.State:
    sizes = {"num_pages": PAGES, "page_size": SIZE, "num_rows": ROWS}
    return jk.empty(model, **sizes | {"max_num_batched_tokens": TOKENS} | changes)


def check(kv: jk.State) -> None:
    """Every page is free or held, and a row holds no more than its tokens take."""
    held = set(chain.from_iterable(row.pages for row in kv.rows))
    assert sorted([*held, *kv.free_pages]) == list(range(PAGES))
    for row in kv.rows:
        assert len(row.pages) == -(-row.length // SIZE)


def close(got: jax.Array, want: jax.Array) -> None:
    np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE)


def test_pages_are_an_engines_where_no_size_is_given(model):
    assert jk.empty(model, num_pages=2).limits.block_size == 16


@pytest.mark.parametrize("codec", some(["float32", "int8"], "float32"))
def test_tokens_are_those_of_the_engine(directory, codec):
    """Prompts of one to several steps at once, more tokens than one loop has, greedy and drawn."""
    loaded = {"dtype": "float32", "kv_cache_dtype": codec, "skip_tokenizer_init": True}
    model = jk.load(directory, **loaded)
    drawn = SamplingParams(temperature=1.5, top_p=0.9, top_k=50, seed=7, max_tokens=13)
    asked = [
        SamplingParams(temperature=0, max_tokens=13),
        drawn,
        drawn,
        SamplingParams(temperature=0, max_tokens=13),
    ]
    llm = LLM(directory, **SMALL | {"kv_cache_dtype": codec, "max_num_batched_tokens": TOKENS})
    prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
    outputs = llm.generate(prompts, asked, use_tqdm=False)
    # So that the first new token is sampled too.
    longer = {row: ids[:-1] for row, ids in enumerate(PROMPTS) if ids[:-1]}
    kv, _ = jk.prefill(model, new(model), longer)
    kv, tokens = jk.decode(model, kv, [ids[-1] for ids in PROMPTS], n=13, sampling=asked)
    for output, token_n in zip(outputs, tokens, strict=True):
        want = output.outputs[0].token_ids
        assert token_n.tolist() == [*want, *[-1] * (13 - len(want))]
    check(kv)
    logits = jk.prefill(model, new(model), PROMPTS)[1]
    assert (logits.shape, logits.dtype) == ((ROWS, VOCAB), jnp.float32)
    greedy = [0, 3]
    assert logits.argmax(axis=-1)[np.array(greedy)].tolist() == tokens[greedy, 0].tolist()


def test_a_prompt_in_pieces_is_the_whole_and_rows_are_their_own(model, kv):
    kv, whole = jk.prefill(model, kv, PROMPTS)
    kv, _ = jk.prefill(model, new(model), {3: PROMPTS[2][:17], 0: PROMPTS[0][:1]})
    kv, pieces = jk.prefill(model, kv, {0: PROMPTS[0][1:], 3: jnp.array(PROMPTS[2][17:])})
    close(pieces, whole[np.array([0, 2])])
    assert kv.lengths == (21, 0, 0, 40)
    check(kv)


def test_a_fork_shares_pages_and_nobody_sees_what_the_other_writes(model, kv):
    kv, _ = jk.prefill(model, kv, {0: PROMPTS[0]})
    before = kv
    kv = jk.fork(jk.fork(kv, 0, to=2), 0, to=3)
    assert before.paged is kv.paged
    assert kv.rows[2] == kv.rows[0]
    assert kv.free_pages == before.free_pages
    kv, tokens = jk.decode(model, kv, {0: 9, 2: 10, 3: 9}, n=12)
    check(kv)
    first = [row.pages[:2] for row in kv.rows if row.length]
    assert first[0] == first[1] == first[2]  # full pages; 21 tokens are 2 of them and a part
    assert len(set(chain.from_iterable(row.pages[2:] for row in kv.rows))) == 3 * 3
    assert tokens[0].tolist() == tokens[2].tolist() != tokens[1].tolist()
    for row, begin in ((0, 9), (2, 10)):
        alone, _ = jk.prefill(model, new(model), [PROMPTS[0]])
        assert jk.decode(model, alone, [begin], n=12)[1].tolist() == [tokens[row // 2].tolist()]


def test_a_rewound_row_goes_on_as_if_it_had_never_been_longer(model, kv):
    kv, _ = jk.prefill(model, kv, {1: PROMPTS[2]})
    kv = jk.fork(kv, 1, to=0)
    kv = jk.rewind(kv, 1, jnp.int32(19))  # inside a page that row 0 holds in full
    check(kv)
    assert kv.lengths == (40, 19, 0, 0)
    kv, tokens = jk.decode(model, kv, {1: 5, 0: 6}, n=9)
    for ids, begin, got in ((PROMPTS[2][:19], 5, tokens[0]), (PROMPTS[2], 6, tokens[1])):
        alone, _ = jk.prefill(model, new(model), [ids])
        assert jk.decode(model, alone, [begin], n=9)[1][0].tolist() == got.tolist()
    for row in range(ROWS):
        kv = jk.rewind(kv, row, 0)
    assert len(kv.free_pages) == PAGES


def test_a_stop_token_ends_a_row_and_what_it_did_not_need_is_free(model, kv):
    kv, logits = jk.prefill(model, kv, PROMPTS[:2])
    kept = jax.tree.map(jnp.copy, kv)
    kv, free = jk.decode(model, kv, logits.argmax(axis=-1), n=20)
    stop = int(free[0, 4])
    assert stop not in free[0, :4]
    again = jax.tree.map(jnp.copy, kept)
    params = [SamplingParams(temperature=0, stop_token_ids=[stop]), jk.GREEDY]
    kv, tokens = jk.decode(model, kept, logits.argmax(axis=-1), n=20, sampling=params)
    assert tokens[0].tolist() == [*free[0, :5].tolist(), *[-1] * 15]
    assert tokens[1].tolist() == free[1].tolist()
    assert kv.lengths[:2] == (21 + 5, 5 + 20)
    check(kv)
    ending = replace(model, eos_ids=frozenset({stop}))  # the model's own is one as well
    params = [jk.GREEDY, SamplingParams(temperature=0, ignore_eos=True)]
    own = jk.decode(ending, again, logits.argmax(axis=-1), n=20, sampling=params)[1]
    assert own.tolist() == tokens.tolist()
    params = [SamplingParams(temperature=0, stop_token_ids=[stop])]
    for last in (stop, -1):  # it has ended, so it rests
        kv, tokens = jk.decode(model, kv, {0: last}, n=2, sampling=params)
        assert tokens.tolist() == [[-1, -1]]
        assert kv.lengths[0] == 21 + 5


def test_prefill_and_decode_consume_what_they_are_given_and_fork_does_not(model, kv):
    forked = jk.fork(kv, 0, to=1)
    after, _ = jk.prefill(model, kv, [[5]])
    for dead in (kv, forked):
        with pytest.raises(RuntimeError, match="state has been consumed"):
            jk.prefill(model, dead, [[5]])
    jk.decode(model, after, [5], n=1)
    with pytest.raises(RuntimeError, match="state has been consumed"):
        jk.decode(model, jk.rewind(after, 0, 0), [5], n=1)


def test_more_tokens_than_a_row_can_have_are_refused_also_where_all_rest(model, kv):
    for n in (kv.limits.max_len + 1, 2**62):
        with pytest.raises(ValueError, match=rf"n: .* from 1 to {kv.limits.max_len}, got {n}"):
            jk.decode(model, kv, [-1], n=n)


def test_a_decode_ends_with_its_rows(model, kv, monkeypatch):
    """A loop after the one in which the last row ended may be on its way already."""
    loops = []
    loop = jk.decode_loop

    def counted(*args, **options):
        loops.append(0)
        return loop(*args, **options)

    monkeypatch.setattr(jk, "decode_loop", counted)
    kv, tokens = jk.decode(model, kv, {0: -1, np.int64(1): -1}, n=np.int32(99))
    assert (loops, tokens.tolist()) == ([], [[-1] * 99] * 2)
    kv, logits = jk.prefill(model, kv, PROMPTS[:1])
    kv, free = jk.decode(model, kv, logits.argmax(axis=-1), n=4)
    stop, width, n = int(free[0, -1]), kv.limits.decode_steps, 99
    kv = jk.rewind(kv, np.int64(0), np.int32(len(PROMPTS[0])))
    loops.clear()
    params = SamplingParams(temperature=0, stop_token_ids=[stop])
    kv, tokens = jk.decode(model, kv, logits.argmax(axis=-1), n=n, sampling=params)
    end = free[0].tolist().index(stop) + 1
    assert tokens[0].tolist() == [*free[0, :end].tolist(), *[-1] * (n - end)]
    assert len(loops) == -(-end // width) + 1 < -(-n // width)
    check(kv)


def test_what_is_refused_leaves_the_state_as_it_was(model, kv):
    kv, logits = jk.prefill(model, kv, {0: PROMPTS[0], 2: PROMPTS[2]})
    kv = jk.fork(kv, 0, to=1)
    greedy = SamplingParams(temperature=0, logprobs=1)
    refusals = [
        (ValueError, "token ids from 0 to 150", lambda: jk.prefill(model, kv, [[5, 151]])),
        (ValueError, "row 1: expected token ids", lambda: jk.prefill(model, kv, [[5], []])),
        (ValueError, "row 0: expected token ids", lambda: jk.prefill(model, kv, [5, 6])),
        (ValueError, "row 0: expected token ids", lambda: jk.prefill(model, kv, [5] * 5)),
        (ValueError, "from 0 to 3, got 4", lambda: jk.prefill(model, kv, {4: [5]})),
        (ValueError, "at least one row", lambda: jk.prefill(model, kv, {})),
        (CapacityError, "5 rows needed, 4 there", lambda: jk.prefill(model, kv, [[5]] * 5)),
        (ValueError, r"at most 240 .* 21 \+ 220", lambda: jk.prefill(model, kv, [[5] * 220])),
        # Two rows share their last page: one more than they would need alone.
        (
            CapacityError,
            "23 pages of 8 tokens needed, 22 free",
            lambda: jk.prefill(model, kv, [[5] * 91] * 2),
        ),
        (CapacityError, "pages of 8 tokens needed", lambda: jk.decode(model, kv, [5, 5, 5], n=80)),
        (ValueError, "n: expected", lambda: jk.decode(model, kv, [5], n=0)),
        (ValueError, "token ids", lambda: jk.decode(model, kv, [-2])),
        (ValueError, "token ids", lambda: jk.decode(model, kv, [[5]])),
        (ValueError, "got logprobs", lambda: jk.decode(model, kv, [5], sampling=greedy)),
        (
            ValueError,
            "expected one or 1",
            lambda: jk.decode(model, kv, [5], sampling=[jk.GREEDY] * 2),
        ),
        (ValueError, "length: expected an int from 0 to 21", lambda: jk.rewind(kv, 0, 22)),
        (ValueError, "row: expected an int from 0 to 3", lambda: jk.fork(kv, 0, to=-1)),
        (ValueError, "a list that begins with row 0, got 5", lambda: jk.prefill(model, kv, 5)),
        (ValueError, "a list that", lambda: jk.decode(model, kv, jnp.array(5))),
        (ValueError, "sampling: expected", lambda: jk.decode(model, kv, [5], sampling=None)),
        (ValueError, "num_pages: expected", lambda: jk.empty(model, num_pages=0)),
        (ValueError, "num_rows: expected", lambda: jk.empty(model, num_pages=9, num_rows=None)),
        (ValueError, "page_size: exp", lambda: jk.empty(model, num_pages=9, page_size=0)),
        (ValueError, "^page_size: .*15", lambda: jk.empty(model, num_pages=9, page_size=15)),
        (ValueError, "^num_rows: .*4096", lambda: jk.empty(model, num_pages=9, num_rows=4096)),
        (CapacityError, "^num_pages: .* free", lambda: jk.empty(model, num_pages=2**24)),
        (ValueError, "length: expected", lambda: jk.rewind(kv, 0, jnp.float32(2))),
        (ValueError, "length: expected", lambda: jk.rewind(kv, 0, jnp.bool_(True))),
    ]
    for kind, message, call in refusals:
        with pytest.raises(kind, match=message):
            call()
    check(kv)
    kv, tokens = jk.decode(model, kv, {2: int(logits[1].argmax())}, n=3)
    alone, logits = jk.prefill(model, new(model), {2: PROMPTS[2]})
    assert tokens.tolist() == jk.decode(model, alone, {2: int(logits[0].argmax())}, n=3)[1].tolist()


def test_a_state_goes_with_a_model_that_keeps_the_same(model, kv, tmp_path):
    config = tiny_config("llama-3", num_hidden_layers=2, num_key_value_heads=3)
    other = jk.load(make_checkpoint(tmp_path, config), dtype="float32", skip_tokenizer_init=True)
    refused = (
        "made for a model with 2 layers of 3 KV heads of 8, got one for 3 layers of 2 KV heads"
    )
    start, x = jk.continuation(kv, 0, room=2), jk.embed(other, [5])
    for call in (
        lambda: jk.prefill(other, kv, [[5]]),
        lambda: jk.decode(other, kv, [5]),
        lambda: jk.extend(other, kv, start, x),
    ):
        with pytest.raises(ValueError, match=refused):
            call()
    with pytest.raises(ValueError, match="expected a Model and a State, got State, Model"):
        jk.prefill(kv, model, [[5]])
    jk.prefill(model, kv, [[5]])


def test_what_a_program_traces_is_no_number_of_decode_and_prefill(model, kv):
    traced = {
        "so no program traces it: `extend` is for those": lambda kv: jk.decode(model, kv, [5])[1],
        "in there use `embed` and `extend`": lambda kv: jk.prefill(model, kv, [kv.paged.pools[0]]),
    }
    for message, program in traced.items():
        with pytest.raises(ValueError, match=message):
            jax.jit(program)(kv)
    for tokens in (jnp.arange(2), jnp.arange(2)[None]):
        with pytest.raises(ValueError, match="in there use `embed` and `extend`"):
            jax.vmap(lambda token: jk.decode(model, kv, {0: token})[1])(tokens)


def test_models_and_states_are_shown_without_their_arrays(model, kv):
    assert repr(model) == "<Model: llama, 3 layers, float32>"
    assert (
        repr(kv) == f"<State: rows of (0, 0, 0, 0) tokens, {PAGES} of {PAGES} pages of {SIZE} free>"
    )


def test_a_state_that_was_on_the_host_goes_on(model, kv):
    kv, _ = jk.prefill(model, kv, PROMPTS)
    saved = jax.device_get(kv)
    tokens = jk.decode(model, kv, [5] * len(PROMPTS), n=3)[1]
    assert jk.decode(model, saved, [5] * len(PROMPTS), n=3)[1].tolist() == tokens.tolist()


def test_few_programs_are_compiled(model, kv):
    """One of each shape, whether its inputs come from the host or from the program before."""
    kv, logits = jk.prefill(model, kv, PROMPTS)
    kv, tokens = jk.decode(model, kv, logits.argmax(axis=-1), n=3)
    programs = (logits_step, decode_loop, copy_pages)
    counts = [program._cache_size() for program in programs]
    kv, _ = jk.decode(model, kv, tokens[:, -1], n=20)
    kv, _ = jk.prefill(model, kv, PROMPTS)
    assert [program._cache_size() for program in programs] == counts
