"""Random operations on a tree of sessions, in a pool too small for them: each says what its tokens
say alone, whatever happened to its pages.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from interrupt import Interrupt
from jaxkv import LLM, SamplingParams, Session
from jaxkv.errors import CapacityError
from jaxkv.holding.costs import Costs
from jaxkv.testing import engine_of
from poison import poisoned
from tiny import SMALL, make_checkpoint, tiny_config

pytestmark = pytest.mark.usefixtures("quick_compile", "one_loop")

LONG = (pytest.mark.slow, pytest.mark.timeout(1800))
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
LONGEST = 100
LOSE = ("do_forget", "do_interrupt")
RARE = 0.1
"""How often one of those is done, beside another operation: nothing is found for a while then."""


class Tree:
    """Keeps the living sessions of an `LLM`, and does something random with one of them."""

    def __init__(self, llm: LLM, folder: Path, seed: int) -> None:
        self.llm, self._folder, self._rng = llm, folder, random.Random(seed)
        self._root = llm.session({"prompt_token_ids": self._ids(20)})
        self.live: list[Session] = [self._root]
        self.num_done = {name: 0 for name in vars(Tree) if name.startswith("do_")}

    def step(self) -> None:
        """Does one operation, and checks what the engine counts."""
        weights = [RARE if name in LOSE else 1 for name in self.num_done]
        (name,) = self._rng.choices(list(self.num_done), weights)
        one = self._rng.choice(self.live)
        if len(one) <= LONGEST:
            self.num_done[name] += 1
            getattr(self, name)(one)
        while len(self.live) > 20:
            self.do_close(self._rng.choice(self.live))
        engine_of(self.llm).check()

    def do_begin(self, one: Session) -> None:
        self.live.append(self.llm.session({"prompt_token_ids": self._ids(len(one))}))

    def do_extend(self, one: Session) -> None:
        self.live.append(one.extend(self._ids(self._rng.randrange(1, 20))))

    def do_generate(self, one: Session) -> None:
        grown, out = one.generate(GREEDY)
        assert out.token_ids == self._alone(one).generate(GREEDY)[1].token_ids
        assert grown.tokens == (*one.tokens, *out.token_ids)
        self.live.append(grown)

    def do_score(self, one: Session) -> None:
        piece = self._ids(3)
        (got,) = one.logprobs([piece])
        (whole,) = self.llm.generate(
            self._alone(one, piece).prompt,
            SamplingParams(max_tokens=1, prompt_logprobs=0),
            use_tqdm=False,
        )
        want = [whole.prompt_logprobs[i - 3][piece[i]].logprob for i in range(3)]
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)

    def do_fork(self, one: Session) -> None:
        self.live += one.fork(2)

    def do_rewind(self, one: Session) -> None:
        self.live.append(one.rewind(tokens=self._rng.randrange(len(one))))

    def do_return(self, one: Session) -> None:
        if one.tokens[:20] == self._root.tokens[:20]:
            self.live.append(one.rewind(to=self._root))

    def do_close(self, one: Session) -> None:
        if len(self.live) > 1 and one is not self._root:
            self.live.remove(one)
            one.close()

    def do_look(self, one: Session) -> None:
        """Compares the keys and values that it has with those of its tokens alone."""
        one.generate(GREEDY)
        self._compare(one, self._alone(one))

    def do_evict(self, one: Session) -> None:
        prompts = [{"prompt_token_ids": self._ids(60)} for _ in range(4)]
        self.llm.generate(prompts, GREEDY, use_tqdm=False)

    def do_forget(self, one: Session) -> None:
        self.llm.reset_prefix_cache()

    def do_save(self, one: Session) -> None:
        """Saves and restores, sometimes when none of its pages is left."""
        path = self._folder / "saved"
        with suppress(CapacityError):
            one.save(path)
        if path.exists():
            if self._rng.random() < RARE:
                self.llm.reset_prefix_cache()
            restored = self.llm.restore(path)
            path.unlink()
            assert restored.tokens == one.tokens
            self._compare(restored, self._alone(one))
            self.live.append(restored)

    def do_interrupt(self, one: Session) -> None:
        with suppress(KeyboardInterrupt), Interrupt(self._rng.randrange(2000)):
            one.generate(GREEDY)

    def _compare(self, one: Session, other: Session) -> None:
        other.generate(GREEDY)
        mine, theirs = one._saved(), other._saved()
        if mine is None or theirs is None:  # needed by others meanwhile
            return
        assert mine.layers.keys() == theirs.layers.keys()
        for layer, arrays in mine.layers.items():
            for x, y in zip(arrays, theirs.layers[layer], strict=True):
                np.testing.assert_allclose(x, y, rtol=0, atol=1e-4)

    def _alone(self, one: Session, piece: list[int] = []) -> Session:  # noqa: B006
        """Returns a session of these tokens that shares no page with any."""
        salt = f"alone {self._rng.random()}"
        return self.llm.session({"prompt_token_ids": [*one.tokens, *piece], "cache_salt": salt})

    def _ids(self, length: int) -> list[int]:
        return self._rng.choices(range(3, 150), k=length)


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., LLM]:
    path = make_checkpoint(tmp_path / "model", tiny_config("llama", num_hidden_layers=2))
    return lambda **options: LLM(path, **SMALL | {"num_gpu_blocks_override": 24} | options)


@pytest.mark.parametrize(
    ("num_operations", "options"),
    [
        pytest.param(150, {"kv_host_bytes": 1 << 20}, id="150"),
        pytest.param(10_000, {"kv_host_bytes": 1 << 20}, id="10000", marks=LONG),
        pytest.param(5_000, {}, id="no_host_memory", marks=LONG),
        pytest.param(5_000, {"kv_disk_bytes": 1 << 18}, id="disk", marks=LONG),
    ],
)
def test_random_trees_of_sessions_say_what_their_tokens_say(
    make, tmp_path, num_operations, options, monkeypatch
):
    """NaN is in all memory that nobody owns."""
    if "kv_disk_bytes" in options:
        options = options | {"kv_disk": tmp_path / "pages"}
        monkeypatch.setattr(Costs, "pays", lambda *_, **__: True)  # whatever the clock says
    llm = make(**options)
    tree = Tree(llm, tmp_path, seed=7)
    with poisoned(engine_of(llm)):
        for _ in range(num_operations):
            tree.step()
    assert min(tree.num_done.values()) > 0
    tiers = engine_of(llm).scheduler.tiers
    if tiers is not None:
        assert tiers.host.num_found > 0 or not tiers.host.most
        assert tiers.disk is None or tiers.disk.num_found > 0
    for one in tree.live:
        one.close()
    engine_of(llm).check()
    assert engine_of(llm).scheduler.allocator.num_used == 0
