"""Under a policy an engine computes what a dense decoder computes that forgets by the same rule,
written down anew.

Before every step all memory that no request holds is NaN, demoted pages included.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from dense import Dense
from jaxkv import LLM, BeamSearchParams, CapacityError, SamplingParams
from jaxkv.kv.codecs import decode, get_codec
from jaxkv.kv.policies import (
    DEMOTE,
    DROP,
    KEEP,
    POLICIES,
    Held,
    Measure,
    Policy,
    Room,
    keep_best,
)
from jaxkv.testing import budget_of, config_of, engine_of
from poison import poisoned
from tiers import some
from tiny import make_checkpoint, tiny_config

pytestmark = pytest.mark.usefixtures("quick_compile")

SIZE, PAGES = 8, 8
BUDGET = SIZE * PAGES
NUM_NEW = 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True, logprobs=5)

Scores = Callable[["Forgetful", list[int], list[int]], dict[int, float]]
"""(decoder, tokens so far, pages that it holds) -> what each page is worth."""


def stored(codec: Any, x_KTH: np.ndarray) -> np.ndarray:
    """What pages in a codec return. Always of one shape: each would be compiled."""
    padded = np.zeros((x_KTH.shape[0], 256, x_KTH.shape[2]), np.float32)
    padded[:, : x_KTH.shape[1]] = x_KTH
    return np.asarray(decode(codec, codec.encode(jnp.asarray(padded))), np.float64)[
        :, : x_KTH.shape[1]
    ]


@dataclass(frozen=True)
class Forgetful(Dense):
    """Sees of the pages before a query those that are held at its place, some of them as another
    codec returns them. With a `nudge` values beside a rounding boundary go to the other side of it.
    """

    held_TT: np.ndarray | None = None
    low_TT: np.ndarray | None = None
    codec: Any = None
    nudge: float = 0.0
    weights: list[np.ndarray] = field(default_factory=list)

    def seen(self, length: int, window: int | None) -> np.ndarray:
        return super().seen(length, window) & self.held_TT[:length, :length]

    def attended(self, weights: np.ndarray, v: np.ndarray) -> np.ndarray:
        self.weights.append(weights)
        return super().attended(weights, v)

    def _attention(self, h: np.ndarray, layer: int, window: int | None) -> np.ndarray:
        if self.codec is None:
            return super()._attention(h, layer, window)
        q, k, v = (self._heads(h, layer, name) for name in "qkv")
        less = [stored(self.codec, x * (1 + self.nudge)) for x in (k, v)]
        k, v, less_k, less_v = (x.repeat(q.shape[0] // x.shape[0], axis=0) for x in (k, v, *less))
        low_TT = self.low_TT[: len(h), : len(h)]
        scores = (
            np.where(low_TT, q @ less_k.swapaxes(1, 2), q @ k.swapaxes(1, 2)) / q.shape[2] ** 0.5
        )
        scores = np.where(self.seen(len(h), window), scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=2, keepdims=True))
        weights /= weights.sum(axis=2, keepdims=True)
        self.weights.append(weights)
        out = np.where(low_TT, weights, 0) @ less_v + np.where(low_TT, 0, weights) @ v
        return self._linear(out.swapaxes(0, 1).reshape(len(h), -1), layer, "self_attn.o_proj")


def remembering(
    dense: Dense, ids: list[int], scores: Scores, *, full: int, low: int, codec: Any = None
) -> Forgetful:
    """A decoder for these tokens that holds at most `full` pages and `low` of another codec, the
    best by `scores`; when they are full the first stays, the last quarter stays, and an eighth
    goes.
    """
    shape = (len(ids) + 1, len(ids) + 1)
    one = Forgetful(
        dense.directory,
        dense.windows,
        "float32",
        held_TT=np.zeros(shape, bool),
        codec=codec,
        low_TT=np.zeros(shape, bool),
    )
    pages: list[int] = []
    less: list[int] = []
    for t in range(len(ids) + 1):
        if t % SIZE == 0:
            if len(pages) == full:
                worth = scores(one, ids[:t], sorted(pages + less))
                safe = [pages[0], *pages[-max(1, full // 4) :]]
                rank = sorted(
                    (page for page in pages if page not in safe),
                    key=lambda page: (worth[page], page),
                )
                kept = set(rank[len(rank) - (full - max(1, full // 8) - len(safe)) :]) | set(safe)
                below = sorted(
                    [*(page for page in pages if page not in kept), *less],
                    key=lambda page: (worth[page], page),
                )
                pages, less = sorted(kept), sorted(below[max(0, len(below) - low) :])
            pages.append(t // SIZE)
        for page in pages + less:
            one.held_TT[t, page * SIZE : (page + 1) * SIZE] = True
        for page in less:
            one.low_TT[t, page * SIZE : (page + 1) * SIZE] = True
    return one


def by_place(decoder: Forgetful, ids: list[int], pages: list[int]) -> dict[int, float]:
    return {page: page for page in pages}


def by_mass(
    decoder: Forgetful,
    ids: list[int],
    pages: list[int],
    *,
    last: int | None = None,
    focused: bool = False,
) -> dict:
    decoder.weights.clear()
    decoder.logits(ids)
    mass_T = np.zeros(len(ids))
    for weights_NTT in decoder.weights:
        logs = np.log(np.where(weights_NTT > 0, weights_NTT, 1))
        entropy_NT = -(weights_NTT * logs).sum(axis=2)
        most_T = np.log(np.maximum(decoder.seen(len(ids), None).sum(axis=1), 2))
        share_NT = np.clip(1 - entropy_NT / most_T, 0, 1) if focused else np.ones_like(entropy_NT)
        counts_T = np.arange(len(ids)) >= (0 if last is None else len(ids) - last)
        mass_T += np.einsum("nts,nt->s", weights_NTT, share_NT * counts_T)
    return {page: mass_T[page * SIZE : (page + 1) * SIZE].sum() for page in pages}


def by_snapkv(decoder: Forgetful, ids: list[int], pages: list[int]) -> dict[int, float]:
    """A page goes at a time, so only the first decision has more than its queries since the last
    one.
    """
    return by_mass(decoder, ids, pages, last=32 if len(ids) == BUDGET else SIZE)


def by_entropy(decoder: Forgetful, ids: list[int], pages: list[int]) -> dict[int, float]:
    return by_mass(decoder, ids, pages, focused=True)


def made(decoder: Forgetful, ids: list[int]) -> dict[str, np.ndarray]:
    """Queries, keys and values as the layers make them under this memory, each [L, heads, T, H]."""
    found: dict[str, list[np.ndarray]] = {name: [] for name in "qkv"}
    plain = Forgetful._heads

    class Watching(Forgetful):
        def _heads(self, h: np.ndarray, layer: int, name: str) -> np.ndarray:
            found[name].append(plain(self, h, layer, name))
            return found[name][-1]

    Watching(**{name: getattr(decoder, name) for name in decoder.__dataclass_fields__}).logits(ids)
    return {name: np.stack(of_layers) for name, of_layers in found.items()}


def by_norm(decoder: Forgetful, ids: list[int], pages: list[int]) -> dict[int, float]:
    length_T = {
        name: np.linalg.norm(x, axis=-1).mean(axis=(0, 1)) for name, x in made(decoder, ids).items()
    }
    slots = {page: slice(page * SIZE, (page + 1) * SIZE) for page in pages}
    return {p: length_T["v"][at].mean() / length_T["k"][at].mean() for p, at in slots.items()}


def by_spread(decoder: Forgetful, ids: list[int], pages: list[int]) -> dict[int, float]:
    values = made(decoder, ids)["v"]
    slots = {page: slice(page * SIZE, (page + 1) * SIZE) for page in pages}
    return {page: values[:, :, at].var(axis=2).mean() for page, at in slots.items()}


def spread(k_WKSH, v_WKSH):
    """Returns, of each page, the variance of each channel of its values, [W, K, H]."""
    return jnp.var(v_WKSH, axis=2)


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread(Policy):
    """Keeps pages whose values differ most: a policy that nobody but this file knows."""

    name: str = "spread"
    measure: Measure | None = spread

    def select(self, held: Held, room: Room) -> np.ndarray:
        return keep_best(held.measured_W.mean(axis=(1, 2)), held, room)


@pytest.fixture(autouse=True, scope="module")
def another_policy():
    POLICIES["spread"] = Spread()
    yield
    del POLICIES["spread"]


RULES: dict[str, tuple[Scores, bool]] = {
    "streaming": (by_place, False),
    "streaming:fp8_e4m3": (by_place, True),
    "page_norm": (by_norm, False),
    "spread": (by_spread, False),
    "h2o_page": (by_mass, False),
    "snapkv_page": (by_snapkv, False),
    "entropy:fp8_e4m3": (by_entropy, True),
}


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    config = tiny_config("qwen3", max_position_embeddings=512)
    return Dense(make_checkpoint(tmp_path_factory.mktemp("qwen3"), config), (None,) * 3, "float32")


def prompts_of(lengths: tuple[int, ...]) -> list[list[int]]:
    rng = np.random.default_rng(4)
    return [rng.integers(0, 151, length).tolist() for length in lengths]


@cache
def new_llm(dense: Dense, policy: str, **options: Any) -> LLM:
    """Made once for all tests: each leaves nothing behind but what is cached."""
    limits = {
        "block_size": SIZE,
        "max_num_batched_tokens": 16,
        "max_num_seqs": 2,
        "num_gpu_blocks_override": 40,
    }
    budget = None if policy == "full" else BUDGET
    made: dict[str, Any] = {
        "dtype": "float32",
        "kv_policy": policy,
        "kv_budget": budget,
        "lazy_compile": True,
    }
    return LLM(dense.directory, skip_tokenizer_init=True, **made | limits | options)


def generate(llm: LLM, prompts: list[list[int]], params: Any = GREEDY) -> list[Any]:
    with poisoned(engine_of(llm)):
        outputs = llm.generate(
            [{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False
        )
    scheduler = engine_of(llm).scheduler
    assert (scheduler.allocator.num_used, scheduler.allocators.low.num_used) == (0, 0)
    return [output.outputs[0] for output in outputs]


def counter(llm: LLM, name: str) -> float:
    (metric,) = [one for one in llm.get_metrics("") if one.name == name]
    return metric.value


def after(decoder: Forgetful, tokens: list[int], num_prompt: int) -> np.ndarray:
    """Log-probabilities [tokens, V] of what follows the prompt."""
    logits = decoder.logits(tokens[:-1])[num_prompt - 1 :]
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


LENGTHS = (180, 20, 71)


@pytest.mark.parametrize("policy", some(RULES, "entropy:fp8_e4m3"))
def test_a_policy_forgets_what_a_dense_decoder_forgets_by_the_same_rule(dense, policy):
    """Log-probabilities of all tokens, for prompts in chunks beside each other."""
    scores, demotes = RULES[policy]
    llm = new_llm(dense, policy)
    config = config_of(llm)
    codec = get_codec("fp8_e4m3", platform="cpu", dtype="float32") if demotes else None
    prompts, least = prompts_of(LENGTHS), np.inf
    for ids, got in zip(prompts, generate(llm, prompts), strict=True):
        tokens = ids + list(got.token_ids)
        rules: Any = {"full": config.row_pages, "low": config.low_row_pages, "codec": codec}
        decoder = remembering(dense, tokens, scores, **rules)
        logprobs = after(decoder, tokens, len(ids))
        # Values are right to a few parts in a million: one that lies that near to a rounding
        # boundary may be on its other side.
        nudged = [replace(decoder, nudge=x) for x in (-4e-6, 4e-6)] if demotes else []
        others = [np.abs(after(one, tokens, len(ids)) - logprobs).max() for one in nudged]
        room = 1e-4 + 2 * max(others, default=0)
        least = min(least, room) if len(ids) > BUDGET else least
        for want, entry in zip(logprobs, got.logprobs, strict=True):
            assert [entry[token].logprob for token in entry] == pytest.approx(
                [want[token] for token in entry], abs=room
            )
    assert least < 1e-2  # far less than what the demoted pages change
    outcomes = engine_of(llm).scheduler.eviction.outcomes
    assert outcomes["dropped"] + outcomes["demoted_dropped"] > 0  # more came than there is room for
    assert (outcomes["demoted"] > 0) is demotes


@pytest.mark.slow
def test_rows_are_admitted_where_their_demoted_pages_have_room_too(dense):
    """They share their first pages, so there is room for more of them than can demote."""
    llm = new_llm(dense, "streaming:fp8_e4m3", max_num_seqs=8, num_gpu_blocks_override=18)
    (shared, *own) = prompts_of((30, 40, 45, 50, 55, 60, 65, 70, 75))
    params = replace(GREEDY, max_tokens=90, logprobs=None)
    prompts = [shared + tail for tail in own]
    tight = [one.token_ids for one in generate(llm, prompts, params)]
    assert engine_of(llm).scheduler.num_found > 0
    assert engine_of(llm).scheduler.num_preemptions == 0
    alone = new_llm(dense, "streaming:fp8_e4m3")
    assert tight == [one.token_ids for one in generate(alone, prompts, params)]


@pytest.mark.parametrize("policy", some(("streaming", "h2o_page", "entropy")))
def test_tokens_do_not_depend_on_neighbours_chunks_or_preemption(dense, policy):
    prompts = [*prompts_of(LENGTHS), *prompts_of((12, 9, 10))]
    params = [*[GREEDY] * len(LENGTHS), *[replace(GREEDY, max_tokens=60)] * 3]
    wide = {"max_num_batched_tokens": 64, "max_num_seqs": 4}
    want = [
        list(one.token_ids) for one in generate(new_llm(dense, policy, **wide), prompts, params)
    ]
    chunked = generate(new_llm(dense, policy), prompts, params)
    tight = new_llm(dense, policy, **wide, num_gpu_blocks_override=6 if policy == "entropy" else 12)
    preempted = generate(tight, prompts[::-1], params[::-1])[::-1]
    assert engine_of(tight).scheduler.num_preemptions > 0
    alone = [generate(tight, [ids], one)[0] for ids, one in zip(prompts, params, strict=True)]
    assert [[list(one.token_ids) for one in other] for other in (chunked, preempted, alone)] == [
        want
    ] * 3
    whole = [
        list(one.token_ids) for one in generate(new_llm(dense, "full"), prompts[:2], params[:2])
    ]
    assert whole[0] != want[0]
    assert policy == "entropy" or whole[1] == want[1]  # which never reached the budget


CACHED = ("streaming", "snapkv_page", "h2o_page", "entropy")


@pytest.mark.parametrize("policy", some(CACHED, "snapkv_page"))
def test_a_prefix_hit_gives_what_a_miss_gives(dense, policy):
    """And pages that were computed after something was forgotten are not found by anybody."""
    llm, plain = new_llm(dense, policy), new_llm(dense, "full")
    (long,) = prompts_of((150,))
    prompts = [long, long[:40] + [3] * 90, long]
    other = new_llm(dense, policy, enable_prefix_caching=False)
    miss, hits = (
        [generate(other, [ids])[0].token_ids for ids in prompts[:2]],
        counter(llm, "prefix_cache_hits"),
    )
    assert [generate(llm, [ids])[0].token_ids for ids in prompts] == [*miss, miss[0]]
    hits = counter(llm, "prefix_cache_hits") - hits
    assert (hits > 0) is (
        policy in ("streaming", "snapkv_page")
    )  # others have to see what all queries attend to
    full = replace(GREEDY, kv_policy="full", max_tokens=4)
    assert (
        generate(llm, [long[:25]], full)[0].token_ids
        == generate(plain, [long[:25]], full)[0].token_ids
    )
    with pytest.raises(
        ValueError, match=r"pages of \d+, which hold \d+ .*: raise kv_budget of LLM"
    ):
        generate(llm, [long], full)
    engine_of(llm).scheduler.check()


def test_without_a_policy_nothing_changes_beside_requests_that_have_one(dense):
    """A request keeps all of its tokens, and its bits, next to others that forget."""
    prompts = prompts_of((60, 150, 30, 180))
    llm = new_llm(dense, "full")
    alone = generate(llm, [prompts[0], prompts[2]])
    own = replace(GREEDY, kv_policy="streaming", kv_budget=BUDGET)
    mixed = generate(llm, prompts, [GREEDY, own, GREEDY, own])
    assert [mixed[0].token_ids, mixed[2].token_ids] == [one.token_ids for one in alone]
    for one, other in zip((mixed[0], mixed[2]), alone, strict=True):
        assert [[x.logprob for x in entry.values()] for entry in one.logprobs] == [
            [x.logprob for x in entry.values()] for entry in other.logprobs
        ]
    want = generate(new_llm(dense, "streaming"), [prompts[1], prompts[3]])
    assert [mixed[1].token_ids, mixed[3].token_ids] == [one.token_ids for one in want]


@pytest.mark.parametrize("policy", some(("streaming", "entropy")))
def test_a_pool_of_a_quarter_of_the_context_serves_it_to_the_end(dense, policy):
    llm = new_llm(dense, policy, num_gpu_blocks_override=PAGES)
    (prompt,) = prompts_of((4 * PAGES * SIZE,))
    (output,) = generate(llm, [prompt])
    assert (len(output.token_ids), output.finish_reason) == (NUM_NEW, "length")
    advice = "have a kv_policy" if policy == "streaming" else "raise kv_budget of LLM"
    with pytest.raises(ValueError, match=advice):
        generate(llm, [prompt], replace(GREEDY, kv_policy="full"))


def test_pages_that_go_are_given_back_while_the_request_runs(dense):
    llm = new_llm(dense, "streaming")
    (prompt,) = prompts_of((200,))
    most, dropped = 0, engine_of(llm).scheduler.eviction.outcomes["dropped"]
    freed = counter(llm, "kv_policy_bytes_freed")
    for _ in llm.stream({"prompt_token_ids": prompt}, GREEDY):
        most = max(most, engine_of(llm).scheduler.allocator.num_used)
    assert most <= PAGES
    dropped = engine_of(llm).scheduler.eviction.outcomes["dropped"] - dropped
    assert dropped >= (200 - BUDGET) // SIZE
    assert counter(llm, "kv_policy_bytes_freed") - freed == dropped * budget_of(llm).page_nbytes


def test_protected_spans_stay(dense):
    """The tokens of a span are seen to the end: with them nothing else is left to choose."""
    llm = new_llm(dense, "streaming")
    (prompt,) = prompts_of((200,))
    params = replace(GREEDY, kv_protect=[(16, 30)], max_tokens=4)
    seen = []
    stream = llm.stream({"prompt_token_ids": prompt}, params)
    for _ in stream:
        seen += [list(request.hold.parts[0].first) for request in engine_of(llm).scheduler.running]
    assert seen
    assert all({0, 16, 24} <= set(first) for first in seen)


@pytest.mark.parametrize("policy", some(("streaming", "entropy"), "streaming"))
def test_beams_forget_as_they_would_alone(dense, policy):
    """One beam is greedy; several share what they hold until each forgets on its own, and nothing
    is left behind.
    """
    (prompt,) = prompts_of((110,))
    llm = new_llm(dense, policy)
    want = generate(llm, [prompt], replace(GREEDY, logprobs=None))[0].token_ids
    with poisoned(engine_of(llm)):
        (one,) = llm.beam_search(
            [{"prompt_token_ids": prompt}],
            BeamSearchParams(beam_width=1, max_tokens=NUM_NEW, ignore_eos=True),
        )
        (two,) = llm.beam_search(
            [{"prompt_token_ids": prompt}],
            BeamSearchParams(beam_width=2, max_tokens=NUM_NEW, ignore_eos=True),
        )
    assert one.sequences[0].tokens[len(prompt) :] == list(want)
    assert len({tuple(sequence.tokens) for sequence in two.sequences}) == 2
    scheduler = engine_of(llm).scheduler
    assert (scheduler.allocator.num_used, scheduler.allocators.low.num_used) == (0, 0)


@pytest.mark.slow
def test_int8_pages_are_demoted_to_int4(dense):
    llm = new_llm(dense, "entropy", kv_cache_dtype="int8")
    prompts = prompts_of((150, 200))
    want = generate(new_llm(dense, "entropy", kv_cache_dtype="int8", max_num_seqs=4), prompts[::-1])
    assert [one.token_ids for one in generate(llm, prompts)] == [
        one.token_ids for one in want[::-1]
    ]
    assert engine_of(llm).scheduler.eviction.outcomes["demoted"] > 0


@pytest.mark.parametrize("policy", some(("page_norm", "entropy"), "page_norm"))
def test_no_program_is_compiled_after_the_start(dense, policy):
    llm = new_llm(dense, policy, lazy_compile=False)
    llm.wait_until_compiled()
    before = engine_of(llm).programs.num_compiled
    generate(llm, prompts_of((150,)))
    assert engine_of(llm).programs.num_compiled == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_policy": "no"}, "kv_policy: expected full or one of streaming"),
        ({"kv_policy": 3}, "kv_policy: expected full or one of streaming"),
        ({"kv_policy": "streaming:bfloat16"}, "after the colon"),
        ({"kv_policy": "quest:int8", "kv_budget": 64}, "nothing is demoted"),
        (
            {"kv_policy": "streaming", "kv_budget": None},
            "kv_budget: expected a number of tokens, at least 32",
        ),
        ({"kv_policy": "streaming", "kv_budget": 31}, "at least 32"),
        ({"kv_policy": "entropy", "kv_budget": 63}, "at least 64"),
        ({"kv_policy": "full", "kv_budget": 64}, "kv_budget: expected None"),
    ],
)
def test_what_an_engine_cannot_do_is_said_before_it_is_made(dense, options, message):
    made: Any = {"skip_tokenizer_init": True, "lazy_compile": True, "block_size": SIZE}
    with pytest.raises(ValueError, match=message):
        LLM(dense.directory, **made | options)


def test_a_budget_larger_than_the_pool_and_codecs_to_demote_from(dense):
    with pytest.raises(CapacityError, match="kv_budget"):
        new_llm(dense, "streaming", num_gpu_blocks_override=PAGES - 1)
    for policy in ("entropy", "quest"):
        with pytest.raises(NotImplementedError, match="without a rotation, got int4"):
            new_llm(dense, policy, kv_cache_dtype="int4")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kv_policy": "entropy"}, "needs attention to be observed so and a pool of pages in int4"),
        ({"kv_policy": "page_norm"}, "needs pages to be measured"),
        ({"kv_budget": BUDGET + SIZE}, "expected what a row of this engine may hold"),
        ({"kv_budget": 8}, "at least 32"),
        ({"kv_policy": "full", "kv_budget": 64}, "expected None with kv_policy full"),
        ({"kv_protect": [(0, 300)]}, "expected 0 <= begin < end <= 150"),
        ({"kv_protect": [(5, 5)]}, "expected 0 <= begin < end"),
        ({"kv_protect": [(0, 100)]}, "expected at most 7 pages"),
        ({"kv_protect": "all"}, "list of .begin, end"),
    ],
)
def test_what_a_request_cannot_have_is_refused_at_the_front_door(dense, fields, message):
    (prompt,) = prompts_of((150,))
    with pytest.raises(ValueError, match=message):
        generate(new_llm(dense, "streaming"), [prompt], replace(GREEDY, **fields))


def test_quest_reads_less_and_keeps_everything(dense):
    """With room for all pages the tokens are those of an engine that reads all; with less they are
    not.
    """
    prompts = prompts_of((150, 20, 71))
    want = [one.token_ids for one in generate(new_llm(dense, "full"), prompts)]
    whole = new_llm(dense, "quest", kv_budget=40 * SIZE)
    assert [one.token_ids for one in generate(whole, prompts)] == want
    some = new_llm(dense, "quest", kv_budget=4 * SIZE)
    got = [one.token_ids for one in generate(some, prompts)]
    assert got[0] != want[0]
    assert got[1] == want[1]
    assert got == [
        one.token_ids for one in generate(some, prompts)
    ]  # found again in the cache, tails included
    with poisoned(engine_of(some)):
        (one,) = some.beam_search(
            [{"prompt_token_ids": prompts[2]}], BeamSearchParams(beam_width=2, max_tokens=6)
        )
    assert len(one.sequences) == 2
    with pytest.raises(ValueError, match="quest is the engine's for all requests"):
        generate(some, prompts, replace(GREEDY, kv_policy="full"))
    with pytest.raises(ValueError, match="needs part of the pages to be read"):
        generate(new_llm(dense, "full"), prompts, replace(GREEDY, kv_policy="quest"))


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_keeps_its_word_for_random_pages(name):
    rng, policy = np.random.default_rng(1), POLICIES[name]
    for _ in range(200):
        count = int(rng.integers(5, 20))
        is_low = rng.random(count) < 0.4
        protected = ~is_low & (rng.random(count) < 0.3)
        held = Held(
            first_W=np.arange(count) * SIZE,
            is_low_W=is_low,
            is_protected_W=protected,
            mass_W=rng.integers(0, 3, count).astype(float),
            measured_W=rng.random((count, 2)),
        )
        room = Room(
            int(protected.sum() + rng.integers(0, 4)), int(rng.integers(0, 6)) if policy.low else 0
        )
        chosen = policy.select(held, room)
        assert (chosen[protected] == KEEP).all()
        assert not (chosen[is_low] == DEMOTE).any()
        low = ((chosen == KEEP) & is_low) | (chosen == DEMOTE)
        full = (chosen == KEEP) & ~is_low
        assert full.sum() == min(room.full, (~is_low).sum())
        assert low.sum() == min(room.low, count - full.sum())
        assert ((chosen == DROP) == ~(low | full)).all()
